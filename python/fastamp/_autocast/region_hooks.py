# SPDX-License-Identifier: Apache-2.0
"""The rarely used half of a region, set up once."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

import fastamp._C as _C
from fastamp._autocast.event_loops import note_region
from fastamp._dynamo import carried_state, compiler
from fastamp._float8 import recipe


def _notify_export(region: Any, entering: bool) -> None:
    """Records the start or end of a region in a graph that ``torch.export`` is tracing.

    torch shows regions to that one function mode only; others, such as ``torch.device("cuda")``
    as a context, do not see them.
    """
    proxy_tensor = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if proxy_tensor is None:
        return
    for mode in torch.overrides._get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        if isinstance(mode, proxy_tensor.PreDispatchTorchFunctionMode):
            if entering:
                values = (region.device, region.fast_dtype, region._enabled, region._cache_enabled)
                mode.__torch_function__(_enter_autocast, (), values)
            else:
                mode.__torch_function__(_exit_autocast, (), ())
            return


def _float8_changed(entering: bool) -> None:
    if entering:
        carried_state.hold(policies=False)
    else:
        carried_state.let_go(policies=False)


def _set_hooks(float8_arguments: Any, float8_changed: Any, in_event_loop: Any) -> None:
    # torch's own function with no frame of fastamp in between: its warnings must point at the
    # user's line.
    checked_init: Any = torch.amp.autocast_mode.autocast.__init__
    _C.set_region_hooks(
        checked_init, _notify_export, float8_arguments, float8_changed, in_event_loop
    )


_set_hooks(recipe.region_arguments, _float8_changed, note_region)


def _keep_out_of_graphs() -> None:
    disable: Any = torch._dynamo.disable
    reason = "fastamp: regions with an fp8 recipe, and notes of regions in asyncio, run eagerly"
    functions = (recipe.region_arguments, _float8_changed, note_region)
    _set_hooks(*(disable(function, reason=reason) for function in functions))


compiler.when_dynamo_loads(_keep_out_of_graphs)
_C.follow_clear_cache(torch.clear_autocast_cache)
