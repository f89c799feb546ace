# SPDX-License-Identifier: Apache-2.0
"""Every op that runs, below autocast and autograd, with why it runs in its dtype."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastamp._C as _C
from fastamp import _carried_state
from fastamp._policy import op_table
from fastamp._watch.modules import ModulePath, address, is_half

__all__ = ["OpCall", "Watch", "watched"]


@dataclasses.dataclass(frozen=True)
class OpCall:
    """One call of an op, as it runs after autocast has cast its arguments.

    Attributes:
        func: The overload that is called, such as ``aten.addmm.default``.
        args: Its arguments by position.
        kwargs: Its arguments by name.
        module: Name of the innermost module around it, or whose forward pass made the node that is
            computed now; empty outside the model.
        backward: Whether a backward pass runs it.
        region: Whether an autocast region for the device of its tensors is in force.
        regions: The devices that any is in force for.
        autocast: (op, device, policy, dtypes given) of the call of an autocast kernel that it
            belongs to: ``aten.addmm`` belongs to ``linear``.
        holds_half_weights: Whether one of its inputs is a 16-bit parameter of the model.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: str
    backward: bool
    region: bool
    regions: frozenset[str]
    autocast: tuple[str, str, str, tuple[str, ...]] | None
    holds_half_weights: bool

    @property
    def op(self) -> str:
        """Name without namespace, and without the overload if that is the default one."""
        namespace, _, name = str(self.func.name()).partition("::")
        overload = self.func._overloadname
        name = name if overload == "default" else f"{name.partition('.')[0]}.{overload}"
        return name if namespace == "aten" else f"{namespace}::{name}"

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors among the arguments."""
        leaves = tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    @property
    def is_view(self) -> bool:
        """Whether it makes a view and computes nothing."""
        returns = self.func._schema.returns
        return bool(returns) and all(
            each.alias_info is not None and not each.alias_info.is_write for each in returns
        )

    @property
    def is_cast(self) -> bool:
        """Whether it only changes the dtype or the place of a tensor."""
        return self.op in ("_to_copy", "copy_", "clone")

    @property
    def reason(self) -> str:
        """Why it runs in the dtype of its inputs.

        ``lower``, ``fp32``, ``promote`` and the other policies: of the op in autocast's list;
        ``override``: of a policy that was changed; ``inherited``: its input has 16 bits and it is
        in no list; ``16-bit weights``: a parameter has 16 bits, or all do without a region;
        ``backward``: a 16-bit gradient; ``as given``: no input has 16 bits.
        """
        if self.autocast is not None and self.autocast[2] != "pass":
            op, device, policy, _ = self.autocast
            return policy if policy == _defaults(device).get(op) else "override"
        if not any(is_half(t) for t in self.tensors):
            return "as given"
        if self.holds_half_weights or not (self.region or self.backward):
            return "16-bit weights"
        return "backward" if self.backward else "inherited"


def _defaults(device: str) -> dict[str, str]:
    return {row.op: getattr(row, f"{device}_default") for row in op_table()}


class _Regions(TorchFunctionMode):
    """Notes for which devices a region is in force when Python calls torch.

    Below autocast, where ops are seen, torch tells that there is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.devices: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.devices = {d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)}
        return func(*args, **(kwargs or {}))


class Watch(TorchDispatchMode):
    """Hands every op of a thread, and of the backward passes it starts, to functions.

    Args:
        path: Tells the module.
        regions: Tells for which devices a region is in force.
        run: Called with each :class:`OpCall`; runs the op and returns its result.
    """

    def __init__(self, path: ModulePath, regions: _Regions, run: Callable[[OpCall], Any]) -> None:
        """Notes what is to be done; it begins with the block."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._path = path
        self._regions = regions
        self._run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called by torch for each op."""
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        device = tensors[0].device.type if tensors else "cpu"
        autocast = _C.current_op_call()
        call = OpCall(
            func=func,
            args=args,
            kwargs=kwargs,
            module=self._path.name,
            backward=self._path.in_backward,
            region=autocast is not None or device in self._regions.devices,
            regions=frozenset(self._regions.devices),
            autocast=autocast,
            holds_half_weights=any(
                is_half(t) and address(t) in self._path.half_weights for t in tensors
            ),
        )
        return self._run(call)


@contextlib.contextmanager
def watched(
    models: Iterable[torch.nn.Module], run: Callable[[OpCall], Any]
) -> Iterator[tuple[ModulePath, _C.Recorder]]:
    """Watches what runs inside the block; compiled functions run eagerly meanwhile.

    Args:
        models: Whose modules are named.
        run: As for :class:`Watch`.

    Yields:
        Which module is running, and the record of autocast's casts.
    """
    recorder = _C.Recorder(False)  # Without an open trace no call of an autocast kernel is known.
    path = ModulePath()
    _carried_state.hold()
    recorder.start()
    try:
        for model in models:
            path.add(model)
        with _Regions() as regions, Watch(path, regions, run):
            yield path, recorder
    finally:
        path.end()
        recorder.stop()
        _carried_state.let_go()
