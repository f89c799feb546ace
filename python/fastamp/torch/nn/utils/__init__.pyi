# SPDX-License-Identifier: Apache-2.0
# isort: skip_file
# Names of fastamp come first: a later star import leaves them.
from fastamp._scaler.clip import clip_grad_norm_ as clip_grad_norm_
from fastamp.torch.nn.utils import clip_grad as clip_grad
from torch.nn.utils import *  # type: ignore[assignment]
