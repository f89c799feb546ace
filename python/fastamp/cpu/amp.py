# SPDX-License-Identifier: Apache-2.0
"""Mirror of ``torch.cpu.amp``, which torch deprecates; new code uses ``fastamp.amp``."""

from __future__ import annotations

import torch.cpu.amp.grad_scaler

import fastamp._scaler.grad_scaler
from fastamp._autocast import region
from fastamp._autocast.deprecated import check_region, trace_as_torchs
from fastamp._autocast.script import ScriptedAs

__all__ = ["GradScaler", "autocast"]


class autocast(region.autocast):  # noqa: N801  (torch's name)
    """``fastamp.autocast("cpu")`` with the arguments of ``torch.cpu.amp.autocast``.

    Args:
        enabled: As in ``fastamp.autocast``.
        dtype: As there, but ``torch.bfloat16`` by default.
        cache_enabled: As there, but ``True`` by default.
        device_type: ``"cpu"``, if given at all. torch has no such argument; articles do.

    Raises:
        ValueError: ``device_type`` is another one.

    Warns:
        FutureWarning: Always, as torch's: the spelling is deprecated.
    """

    _jit_override_qualname = ScriptedAs(torch.cpu.amp.autocast_mode.autocast)

    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        cache_enabled: bool = True,
        *,
        device_type: str = "cpu",
    ) -> None:
        """See the class."""
        check_region("cpu", device_type)
        super().__init__("cpu", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


trace_as_torchs(autocast)


# torch's class comes first: its __init__ has the arguments and the warning, and goes on to
# fastamp's.
class GradScaler(torch.cpu.amp.grad_scaler.GradScaler, fastamp._scaler.grad_scaler.GradScaler):
    """``fastamp.GradScaler("cpu")`` with the arguments of ``torch.cpu.amp.GradScaler``.

    Warns:
        FutureWarning: Always, as torch's: the spelling is deprecated.
    """
