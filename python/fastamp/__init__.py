# SPDX-License-Identifier: Apache-2.0
"""Automatic mixed precision for PyTorch: autocast and loss scaling in C++ and CUDA.

Importing the package registers fastamp's autocast kernels over torch's (unless
``FASTAMP_NO_REGISTER=1``): results stay torch's, bit for bit, and ``torch.autocast`` regions become
faster too.
"""

from __future__ import annotations

import os
from pathlib import Path

from fastamp._loader import load
from fastamp._paths import cmake_prefix_path, include_path

_C = load(Path(__file__).resolve().parent)

from fastamp import (  # noqa: E402  (needs the native module)
    _library_calls,
    _optimizer_hook,  # noqa: F401
    _program_policies,
    amp,
    cpu,
    cuda,
    distributed,
    optim,
)
from fastamp._autocast import autocast  # noqa: E402
from fastamp._bisect import bisect  # noqa: E402
from fastamp._cast_together import cast_together  # noqa: E402
from fastamp._check import check  # noqa: E402
from fastamp._clip import clip_grad_norm_  # noqa: E402
from fastamp._custom_function import custom_bwd, custom_fwd  # noqa: E402
from fastamp._float8 import Float8Recipe, float8_exclude, float8_recipe  # noqa: E402
from fastamp._float8_plan import float8_plan  # noqa: E402
from fastamp._graphed_step import graphed_step  # noqa: E402
from fastamp._history_plot import plot_history  # noqa: E402
from fastamp._inference.conversion import convert  # noqa: E402
from fastamp._inference.exporting import export  # noqa: E402
from fastamp._inspect import inspect  # noqa: E402
from fastamp._install import disabled, install, is_installed, uninstall  # noqa: E402
from fastamp._kept_casts import drop_kept_casts, keep_casts, kept_casts  # noqa: E402
from fastamp._lean import Lean, lean_  # noqa: E402
from fastamp._log_to import log_to  # noqa: E402
from fastamp._main_grads import main_grads  # noqa: E402
from fastamp._module_policies import fp32, module_policies  # noqa: E402
from fastamp._op_policies import op_policies  # noqa: E402
from fastamp._policy import (  # noqa: E402
    op_policy,
    op_table,
    register_op,
    reset_op_policies,
    set_op_policy,
    unregister_op,
)
from fastamp._policy_preset import policy_preset  # noqa: E402
from fastamp._presets import preset  # noqa: E402
from fastamp._trace import trace  # noqa: E402
from fastamp.grad_scaler import GradScaler  # noqa: E402


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
    "Float8Recipe",
    "GradScaler",
    "Lean",
    "__version__",
    "amp",
    "autocast",
    "bisect",
    "build_info",
    "cast_together",
    "check",
    "clip_grad_norm_",
    "cmake_prefix_path",
    "convert",
    "cpu",
    "cuda",
    "custom_bwd",
    "custom_fwd",
    "disabled",
    "distributed",
    "drop_kept_casts",
    "export",
    "float8_exclude",
    "float8_plan",
    "float8_recipe",
    "fp32",
    "graphed_step",
    "include_path",
    "inspect",
    "install",
    "is_installed",
    "keep_casts",
    "kept_casts",
    "lean_",
    "log_to",
    "main_grads",
    "module_policies",
    "op_policies",
    "op_policy",
    "op_table",
    "optim",
    "plot_history",
    "policy_preset",
    "preset",
    "register_op",
    "reset_op_policies",
    "set_op_policy",
    "trace",
    "uninstall",
    "unregister_op",
]

if os.environ.get("FASTAMP_NO_REGISTER", "") in ("", "0"):
    _C.register_kernels()
    _library_calls.follow()
_program_policies.start_from_environment()
