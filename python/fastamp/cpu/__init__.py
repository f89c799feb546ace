"""Mirror of ``torch.cpu``'s part in mixed precision: ``fastamp.cpu.amp``."""

from fastamp.cpu import amp

__all__ = ["amp"]
