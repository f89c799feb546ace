# SPDX-License-Identifier: Apache-2.0
"""Mirror of ``torch.cuda.amp``, which torch deprecates; new code uses ``fastamp.amp``."""

from __future__ import annotations

from typing import Any

import torch.cuda.amp.grad_scaler
from torch.cuda.amp.common import amp_definitely_not_available

import fastamp._scaler.grad_scaler
from fastamp._autocast import custom_function, region
from fastamp._autocast.deprecated import check_region, trace_as_torchs, warn_of_spelling
from fastamp._autocast.script import ScriptedAs
from fastamp._scaler.apex import master_params, scale_loss

__all__ = [
    "GradScaler",
    "amp_definitely_not_available",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "master_params",
    "scale_loss",
]


class autocast(region.autocast):  # noqa: N801  (torch's name)
    """``fastamp.autocast("cuda")`` with the arguments of ``torch.cuda.amp.autocast``.

    Args:
        enabled: As in ``fastamp.autocast``.
        dtype: As there, but ``torch.float16`` by default.
        cache_enabled: As there, but ``True`` by default.
        device_type: ``"cuda"``, if given at all. torch has no such argument; articles do.

    Raises:
        ValueError: ``device_type`` is another one.

    Warns:
        FutureWarning: Always, as torch's: the spelling is deprecated.
    """

    _jit_override_qualname = ScriptedAs(torch.cuda.amp.autocast_mode.autocast)

    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype = torch.float16,
        cache_enabled: bool = True,
        *,
        device_type: str = "cuda",
    ) -> None:
        """See the class."""
        check_region("cuda", device_type)
        super().__init__("cuda", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


trace_as_torchs(autocast)


# torch's class comes first: its __init__ has the arguments and the warning, and goes on to
# fastamp's.
class GradScaler(torch.cuda.amp.grad_scaler.GradScaler, fastamp._scaler.grad_scaler.GradScaler):
    """``fastamp.GradScaler("cuda")`` with the arguments of ``torch.cuda.amp.GradScaler``.

    Warns:
        FutureWarning: Always, as torch's: the spelling is deprecated.
    """


def custom_fwd(fwd: Any = None, *, cast_inputs: torch.dtype | None = None) -> Any:
    """``fastamp.custom_fwd(device_type="cuda")``; warns as torch's that it is deprecated."""
    warn_of_spelling("cuda.amp.custom_fwd(args...)", "amp.custom_fwd(args..., device_type='cuda')")
    return custom_function.custom_fwd(fwd, device_type="cuda", cast_inputs=cast_inputs)


def custom_bwd(bwd: Any) -> Any:
    """``fastamp.custom_bwd(device_type="cuda")``; warns as torch's that it is deprecated."""
    warn_of_spelling("cuda.amp.custom_bwd(args...)", "amp.custom_bwd(args..., device_type='cuda')")
    return custom_function.custom_bwd(bwd, device_type="cuda")
