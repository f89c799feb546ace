"""fastamp: automatic mixed precision for LibTorch and PyTorch."""

import os as _os

import torch as _torch  # noqa: F401  (loads the libraries that the native module links)

from fastamp import _C
from fastamp.autocast import autocast
from fastamp.policy import op_policy, op_table, reset_op_policies, set_op_policy

__all__ = ["autocast", "op_policy", "op_table", "reset_op_policies", "set_op_policy"]

if _os.environ.get("FASTAMP_NO_REGISTER", "") in ("", "0"):
    _C.install()
