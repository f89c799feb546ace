"""Making tensors that outlive the caller's modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_FUNCTIONALIZATION = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Lets tensors be made that can be written outside of the mode that is on now.

    An inference tensor can be written within inference mode alone, and functionalization wraps what
    is made under it.
    """
    with torch.inference_mode(False), torch._C._ExcludeDispatchKeyGuard(_FUNCTIONALIZATION):
        yield
