# SPDX-License-Identifier: Apache-2.0
"""Making tensors that outlive the caller's modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_FUNCTIONALIZATION = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Lets tensors be made that can still be written when the caller's modes have ended.

    An inference tensor can be written only in inference mode, and functionalization wraps tensors
    that are made under it.
    """
    with torch.inference_mode(False), torch._C._ExcludeDispatchKeyGuard(_FUNCTIONALIZATION):
        yield
