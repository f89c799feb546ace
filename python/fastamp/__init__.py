"""Automatic mixed precision for PyTorch, in C++."""

from fastamp.grad_scaler import GradScaler

__all__ = ["GradScaler"]
