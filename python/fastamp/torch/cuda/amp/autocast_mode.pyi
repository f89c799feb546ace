# SPDX-License-Identifier: Apache-2.0
from fastamp.cuda.amp import autocast as autocast
from fastamp.cuda.amp import custom_bwd as custom_bwd
from fastamp.cuda.amp import custom_fwd as custom_fwd
