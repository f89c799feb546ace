# SPDX-License-Identifier: Apache-2.0
"""The private attributes by which fastamp's Python and native parts find each other's work.

The native code reads them by name, so no type checker sees that both sides mean the same. They are
written down here and nowhere else; a test looks for names that are missing or that nobody uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor
    from torch.amp.grad_scaler import OptState

    import fastamp._C as _C
    from fastamp._C import AmpStep


class Optimizer(Protocol):
    """Attributes that an optimizer of fastamp.optim has beside torch's."""

    #: Whether there is _fastamp_amp_step, and ``step`` moves the versions of what it writes. Set by
    #: the classes of fastamp.optim, to False by a subclass with a ``step`` of its own. Read by
    #: GradScaler and graphed_step, and after each step of any optimizer by
    #: csrc/bind_optimizer_hook.cpp, which ends the casts of weights where it is missing or False.
    _fastamp_supports_amp_step: bool

    #: The AmpStep of the call of ``step`` that is under way. Set and deleted by _fastamp_amp_step
    #: where others wrap or watch ``step``, which takes it.
    _fastamp_pending_amp_step: AmpStep

    #: The casts that each step writes beside the weights, or None. Set by
    #: _fastamp_use_weight_copies; read by csrc/python_step.cpp.
    _fastamp_weight_copies: _C.WeightCopies | None

    #: Whether a parameter is listed twice, which no fused step can do. Set by add_param_group and
    #: _fastamp_adopt_state; read by ``step``, which leaves such optimizers to torch.
    _fastamp_repeats: bool

    #: Whether ``unscale_`` puts float32 gradients in the place of fp16 ones. Set by ``fuse_``; read
    #: by GradScaler.
    _fastamp_widens_grads: bool

    #: Whether the constructor is at work. Set and deleted by the classes' ``__init__``; read by
    #: add_param_group, which then leaves its warning to the end of the constructor.
    _fastamp_is_being_made: bool

    #: The state dict that is being loaded, as it was saved. Set and deleted by load_state_dict;
    #: read by ``__setstate__``, through which torch hands over only what it has cast.
    _fastamp_source: dict[str, Any]

    #: The dtype of _fastamp_weight_copies in copies and pickles. Set by ``__getstate__``; read and
    #: deleted by ``__setstate__``.
    _fastamp_autocast_dtype: torch.dtype

    def _fastamp_amp_step(
        self, amp_step: AmpStep, is_observed: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """``step`` with what a scaler asks of it. Called by GradScaler and graphed_step.

        ``is_observed``: a profiler is to see a call of ``step``.
        """

    def _fastamp_step(self, amp_step: AmpStep | None) -> None:
        """The step without a closure. Called by ``step``, and where torch's drives us."""

    def _fastamp_step_now(self, amp_step: AmpStep | None) -> None:
        """Does the same, not to be traced. Called by both, outside of dynamo's graphs."""

    def _fastamp_prepare(self, param: Tensor, group: dict[str, Any]) -> None:
        """Makes or completes the state of a parameter. Called by csrc/python_step.cpp only."""

    def _fastamp_adopt_state(self, source: dict[str, Any]) -> None:
        """Takes over state of torch's layout. Called by ``__setstate__`` and ``fuse_``."""

    def _fastamp_check_stored(self, function: str, options: Mapping[str, Any]) -> None:
        """Refuses options of stored state that there are not.

        Called by constructors, ``fuse_``, add_param_group, loads, and csrc/python_step.cpp for
        groups that were edited.
        """

    def _fastamp_take_notice(self, param: Tensor) -> None:
        """Takes or forgets a starting master that was set late. Called by _fastamp_step_now."""

    def _fastamp_states_before_steps(self) -> dict[Tensor, dict[Any, Any]]:
        """The states that the next step would make of starting masters. Called by state_dict."""

    def _fastamp_use_weight_copies(self, function: str, dtype: torch.dtype | None) -> None:
        """Sets _fastamp_weight_copies. Called by constructors, ``__setstate__`` and ``fuse_``."""


class OptimizerState(TypedDict):
    """An optimizer's entry in torch's ``GradScaler._per_optimizer_states``, while it has one.

    Its key is the optimizer's identity. csrc/python_optimizer.cpp reads and writes it, as do
    GradScaler, FSDP's scaler and other subclasses.
    """

    stage: OptState
    found_inf_per_device: dict[torch.device, Tensor]


class Scaler(Protocol):
    """Attributes that csrc/bind_scaler.cpp and python_optimizer.cpp read of a scaler or guard.

    The first five and the states are torch's. _scaler/state.py has the others.
    """

    _scale: Tensor
    _growth_tracker: Tensor
    _growth_factor: float
    _backoff_factor: float
    _growth_interval: int
    #: None of a guard: its native record knows.
    _per_optimizer_states: dict[int, OptimizerState] | None
    _min_scale: float | None
    _max_scale: float | None
    _hysteresis: int
    _hysteresis_tracker: Tensor | None
    _fast_growth_interval: int
    _fast_growth_limit: Tensor | None
    #: How often ``scale`` was called.
    _times_scaled: int

    def _agree_on(self, flag: Tensor) -> None:
        """Makes a flag the same on all ranks. Called where there is a process group."""


class Module(Protocol):
    """Attributes of modules that fastamp runs under policies or a region of their own."""

    #: The policies, outermost first. Set and read by _policy/module_placement.py.
    _fastamp_module_policies: tuple[Any, ...]

    #: The region of a converted module. Set and read by _inference/regions.py.
    _fastamp_region: Any

    #: The mark of a module that holds low-precision weights, which refuses to be averaged. Set and
    #: read by optim/_low_precision_weights.py.
    _fastamp_low_precision: Any


class TorchModule(Protocol):
    """Attributes of torch's modules that csrc/python_call_site.cpp knows.

    The call of a module is seen as the function that torch runs it in.
    """

    _call_impl: Any
    _modules: dict[str, Any]


class AsyncioEvents(Protocol):
    """Methods of ``asyncio.events`` that csrc/region_hooks.cpp calls: the loop here, or None."""

    _get_running_loop: Any


class TorchRegion(Protocol):
    """Attributes of a ``torch.autocast`` that csrc/torch_region.cpp reads under ``install()``.

    Set by torch's constructor; of ``fastamp.autocast`` these are native (csrc/region_type.cpp).
    """

    device: str
    fast_dtype: torch.dtype
    _enabled: bool
    _cache_enabled: bool


class ShardedTensor(Protocol):
    """Attributes of torch's DTensor that csrc/python_step.cpp and optimizer_objects.cpp read."""

    #: The tensor that this rank holds: what a fused step writes.
    _local_tensor: Tensor
    #: Placements and mesh: equal for a parameter and its gradient, or torch takes the step.
    _spec: Any
