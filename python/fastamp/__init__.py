# SPDX-License-Identifier: Apache-2.0
"""Automatic mixed precision for PyTorch: autocast and loss scaling in C++ and CUDA.

Importing the package registers fastamp's autocast kernels over torch's (unless
``FASTAMP_NO_REGISTER=1``): results stay torch's, bit for bit, and ``torch.autocast`` regions become
faster too.
"""

from __future__ import annotations

import os
from pathlib import Path

from fastamp._util.loader import load
from fastamp._util.publish import publish

_C = load(Path(__file__).resolve().parent)

from fastamp import (  # noqa: E402  (needs the native module)
    amp,
    casts,
    cpp,
    cpu,
    cuda,
    debug,
    distributed,
    float8,
    inference,
    optim,
    policies,
)
from fastamp._autocast.custom_function import custom_bwd, custom_fwd  # noqa: E402
from fastamp._autocast.region import autocast  # noqa: E402
from fastamp._casts import optimizer_hook  # noqa: E402, F401
from fastamp._install import attention_libraries, program_policies  # noqa: E402
from fastamp._install.installation import (  # noqa: E402
    Installation,
    install,
    is_installed,
    uninstall,
)
from fastamp._scaler.clip import clip_grad_norm_  # noqa: E402
from fastamp._scaler.grad_scaler import GradScaler  # noqa: E402
from fastamp._scaler.step_guard import StepGuard  # noqa: E402


def build_info() -> dict[str, str]:
    """Returns the facts fixed when the native part was built.

    Returns:
        ``version`` (fastamp's), ``torch_version``, ``cuda_version`` (empty for a CPU-only build),
        ``cuda_archs``, ``compiler`` and ``build_type``.
    """
    info: dict[str, str] = _C.build_info()
    return info


__version__: str = build_info()["version"]

__all__ = [
    "GradScaler",
    "Installation",
    "StepGuard",
    "__version__",
    "amp",
    "autocast",
    "build_info",
    "casts",
    "clip_grad_norm_",
    "cpp",
    "cpu",
    "cuda",
    "custom_bwd",
    "custom_fwd",
    "debug",
    "distributed",
    "float8",
    "inference",
    "install",
    "is_installed",
    "optim",
    "policies",
    "uninstall",
]

publish(__name__, globals())

if os.environ.get("FASTAMP_NO_REGISTER", "") in ("", "0"):
    _C.register_kernels()
    attention_libraries.follow()
program_policies.start_from_environment()
