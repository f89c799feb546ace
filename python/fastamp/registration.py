"""Whether autocast runs fastamp's kernels or torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastamp import _C

__all__ = ["disabled"]


@contextmanager
def disabled() -> Iterator[None]:
    """Gives torch its own autocast kernels back for a while, for the whole process.

    For comparisons and benchmarks: no other thread may be running ops under autocast when the block
    begins or ends. May be nested; where fastamp's kernels are not in place it does nothing.

    Raises:
        RuntimeError: The block begins inside an autocast region of this thread. Nothing is changed.
    """
    were_registered = _C.kernels_registered()
    _C.unregister_kernels()
    try:
        yield
    finally:
        if were_registered:
            _C.register_kernels()
