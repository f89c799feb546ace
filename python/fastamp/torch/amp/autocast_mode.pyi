# SPDX-License-Identifier: Apache-2.0
from fastamp.amp import autocast as autocast
from fastamp.amp import custom_bwd as custom_bwd
from fastamp.amp import custom_fwd as custom_fwd
from fastamp.amp import is_autocast_available as is_autocast_available
