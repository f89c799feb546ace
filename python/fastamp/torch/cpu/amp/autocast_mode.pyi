# SPDX-License-Identifier: Apache-2.0
from fastamp.cpu.amp import autocast as autocast
