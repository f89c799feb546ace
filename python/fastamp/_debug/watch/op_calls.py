# SPDX-License-Identifier: Apache-2.0
"""Every op that runs, below autocast and autograd, with why it runs in its dtype."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastamp._C as _C
from fastamp._debug.watch.calls import is_notifying
from fastamp._debug.watch.model_names import ModelNames
from fastamp._debug.watch.modules import ModulePath, address, is_half
from fastamp._dynamo import carried_state
from fastamp._policy.table import op_table
from fastamp._util.tool_guard import ToolGuard

__all__ = ["OpCall", "OpWatcher", "Watch", "watched", "watched_thread"]


@dataclasses.dataclass(frozen=True)
class OpCall:
    """One call of an op, as it runs after autocast has cast its arguments.

    Attributes:
        func: The overload that is called, such as ``aten.addmm.default``.
        args: Its arguments by position.
        kwargs: Its arguments by name.
        module: Name of the innermost module around it, or whose forward pass made the node that is
            computed now; within an optimizer's step such as ``AdamW.step``; else empty.
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
    def written(self) -> list[torch.Tensor]:
        """The tensors that it writes among its arguments, by position or name."""
        arguments = self.func._schema.arguments
        found = [
            self.kwargs.get(each.name, self.args[place] if place < len(self.args) else None)
            for place, each in enumerate(arguments)
            if each.alias_info is not None and each.alias_info.is_write
        ]
        return [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]

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
        ``override``: of a policy that was changed; ``inherited``: its input has 16 bits, and
        autocast has no policy for it; ``16-bit weights``: a parameter has 16 bits, or all do
        without a region; ``backward``: a 16-bit gradient; ``no 16-bit input``.
        """
        if self.autocast is not None and self.autocast[2] != "pass":
            op, device, policy, _ = self.autocast
            return policy if policy == _defaults(device).get(op) else "override"
        if not any(is_half(t) for t in self.tensors):
            return "no 16-bit input"
        if self.holds_half_weights or not (self.region or self.backward):
            return "16-bit weights"
        return "backward" if self.backward else "inherited"


def _defaults(device: str) -> dict[str, str]:
    return {row.op: getattr(row, f"{device}_default") for row in op_table()}


class _Regions(TorchFunctionMode):
    """Notes for which devices a region is in force when Python calls torch.

    Below autocast, where ops are seen, torch says that there is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.devices: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.devices = {d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)}
        return func(*args, **(kwargs or {}))


class OpWatcher:
    """A base of what sees each op."""

    def before(self, call: OpCall) -> Any:
        """Called before an op runs; what it returns is given to :meth:`after`."""

    def after(self, call: OpCall, result: Any, noted: Any) -> None:
        """Called when it has run; not if it raises."""


class Watch(TorchDispatchMode):
    """Shows every op of a thread, and of the backward passes it starts, to a watcher.

    Args:
        path: Finds the module.
        regions: Finds for which devices a region is in force.
        watcher: Sees each :class:`OpCall`.
        guard: Of the tool: an op runs once, whatever becomes of that.
    """

    def __init__(
        self, path: ModulePath, regions: _Regions, watcher: OpWatcher, guard: ToolGuard
    ) -> None:
        """Notes what is to be done; it begins when the mode is on torch's stack."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._path = path
        self._regions = regions
        self._watcher = watcher
        self._guard = guard

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called by torch for each op."""
        kwargs = kwargs or {}
        if is_notifying():
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and self._guard.run(_is_composite, func, args, kwargs):
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        seen = self._guard.run(self._before, func, args, kwargs)
        result = func(*args, **kwargs)
        if seen is not None:
            call, noted = seen
            self._guard.run(self._watcher.after, call, result, noted)
        return result

    def _before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        return call, self._watcher.before(call)


def _is_composite(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether other ops compute it on this device: inference mode shows these only if asked to."""
    devices = {t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}

    def has_kernel(key: str) -> bool:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))

    return has_kernel("CompositeImplicitAutograd") and not any(
        has_kernel(each.upper()) for each in devices if each in ("cpu", "cuda")
    )


@contextlib.contextmanager
def watched(
    models: Iterable[torch.nn.Module], watcher: OpWatcher, names: ModelNames, guard: ToolGuard
) -> Iterator[tuple[ModulePath, _C.Recorder]]:
    """Watches what runs inside the block; compiled functions run eagerly meanwhile.

    The block may begin within modes of the program and end outside of them, or the reverse.

    Args:
        models: Whose modules are named.
        watcher: As for :class:`Watch`.
        names: Names modules.
        guard: Of the tool.

    Yields:
        Which module is running, and the record of autocast's casts.
    """
    recorder = _C.Recorder(False)  # Without an open trace no call of an autocast kernel is known.
    with contextlib.ExitStack() as ends:
        carried_state.hold()
        ends.callback(guard.run_always, carried_state.let_go)
        recorder.start()
        ends.callback(guard.run_always, recorder.stop)
        yield ends.enter_context(watched_thread(models, watcher, names, guard)), recorder


@contextlib.contextmanager
def watched_thread(
    models: Iterable[torch.nn.Module], watcher: OpWatcher, names: ModelNames, guard: ToolGuard
) -> Iterator[ModulePath]:
    """Watches what this thread runs, within the block of a :func:`watched` of any thread.

    Args:
        models: Whose modules are named.
        watcher: As for :class:`Watch`.
        names: Names modules.
        guard: Of the tool.

    Yields:
        Which module is running.
    """
    path = ModulePath(names, guard)
    regions = _Regions()
    watch = Watch(path, regions, watcher, guard)
    with contextlib.ExitStack() as ends:

        def afterwards(function: Callable[[], Any]) -> None:
            ends.callback(guard.run_always, function)

        afterwards(path.end)
        for model in models:
            guard.run(path.add, model)
        afterwards(lambda: _modes_here().take_off(regions, watch))
        _modes_here().put_on(regions, watch)
        yield path


class _OwnModes:
    """fastamp's modes on the stacks of one thread, where nothing else refers to this.

    They are taken off when they are not wanted any more, or else when Python lets go of what is
    local to the thread. Torch would do so later, when the thread ends, and needs the interpreter
    for it: if the program ends meanwhile, it is aborted.
    """

    def __init__(self) -> None:
        self._modes: list[Any] = []

    def put_on(self, regions: _Regions, watch: Watch) -> None:
        self._modes += [regions, watch]
        _change_function_modes(lambda modes: _with_outermost(modes, regions))
        _change_dispatch_modes(lambda modes: [watch, *modes])

    def take_off(self, *own: Any) -> None:
        """Does nothing in another thread than theirs."""

        def others(modes: list[Any]) -> list[Any]:
            return [mode for mode in modes if not any(mode is each for each in own)]

        if len(left := others(self._modes)) < len(self._modes):
            self._modes = left
            _change_function_modes(others)
            _change_dispatch_modes(others)

    def __del__(self) -> None:
        self.take_off(*self._modes)


_here = threading.local()


def _modes_here() -> _OwnModes:
    if not hasattr(_here, "modes"):
        _here.modes = _OwnModes()
    found: _OwnModes = _here.modes
    return found


def _with_outermost(modes: list[Any], own: Any) -> list[Any]:
    """The modes with fastamp's among them; torch wants that of ``torch.device`` below all."""
    devices = [mode for mode in modes if isinstance(mode, DeviceContext)]
    return [*devices, own, *(mode for mode in modes if mode not in devices)]


# Blocks of the program's modes end by taking the innermost mode away, whichever that is: fastamp's
# are the outermost, wherever they begin.
def _change_function_modes(change: Callable[[list[Any]], list[Any]]) -> None:
    modes = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    for _ in modes:
        overrides._pop_mode()  # type: ignore[no-untyped-call]
    for mode in change(modes):
        overrides._push_mode(mode)  # type: ignore[no-untyped-call]


def _change_dispatch_modes(change: Callable[[list[Any]], list[Any]]) -> None:
    stack = _python_dispatch._get_current_dispatch_mode_stack()
    modes = [mode for mode in stack if not mode.is_infra_mode()]  # torch's have their own place
    for _ in modes:
        _python_dispatch._pop_mode()
    for mode in change(modes):
        _python_dispatch._push_mode(mode)
