# SPDX-License-Identifier: Apache-2.0
"""Mirror of ``torch.cuda``'s part in mixed precision: ``fastamp.cuda.amp``."""

from fastamp.cuda import amp

__all__ = ["amp"]
