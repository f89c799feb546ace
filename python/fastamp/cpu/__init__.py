# SPDX-License-Identifier: Apache-2.0
"""Mirror of ``torch.cpu``'s part in mixed precision: ``fastamp.cpu.amp``."""

from fastamp.cpu import amp

__all__ = ["amp"]
