# SPDX-License-Identifier: Apache-2.0
"""Finds the module of a model that is running, forward and backward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from fastamp._debug.watch.model_names import ModelNames
from fastamp._util.tool_guard import ToolGuard


class ModulePath:
    """Finds the innermost module of a model that is running now.

    Of a backward pass it is the module whose forward pass made the node. Follows the thread that
    makes it; backward passes on CUDA run on another one while that waits.

    Args:
        names: Names its modules.
        guard: Of the tool.
    """

    def __init__(self, names: ModelNames, guard: ToolGuard) -> None:
        """Follows nothing yet."""
        self.half_weights: set[int] = set()
        self.parameters: set[int] = set()
        self._model_names = names
        self._guard = guard
        self._names: dict[torch.nn.Module, str] = {}
        self._begun: dict[torch.nn.Module, list[int]] = {}
        self._forward: list[str] = []
        self._backward: list[str] = []
        self._thread = threading.get_ident()
        self._backward_thread = self._thread
        self._labelled: dict[Any, str] = {}
        self._handles: list[Any] = []

    def add(self, model: torch.nn.Module, running: bool = False) -> None:
        """Follows a model, too.

        Notes its 16-bit weights in :attr:`half_weights`, by the address of their storage, and all
        of its in :attr:`parameters`, by identity.

        Args:
            model: What is called by itself.
            running: Whether its forward pass has begun.
        """
        self._model_names.add(model)
        for module in model.modules():
            if module not in self._names:
                self._names[module] = self._model_names.of_module(module)
                if not isinstance(module, torch.jit.ScriptModule):
                    self._handles += self._follow(module)
        self.parameters |= {id(p) for p in model.parameters()}
        self.half_weights |= {address(p) for p in model.parameters() if is_half(p)} - {0}
        if running and model in self._begun:
            self._enter(model)

    def knows(self, module: torch.nn.Module) -> bool:
        """Whether it is followed."""
        return module in self._names

    @property
    def name(self) -> str:
        """The module; empty outside the model."""
        if self._backward:
            # Checkpointed modules run forward again within backward.
            return self._forward[-1] if self._forward else self._backward[-1]
        return self._forward[-1] if self._forward else ""

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is running."""
        return torch._C._current_graph_task_id() != -1

    def end(self) -> None:
        """Follows nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._names.clear()
        self._begun.clear()
        self._labelled.clear()
        self._forward.clear()
        self._backward.clear()

    def enter(self, name: str) -> None:
        """Notes that what runs from now on is no module's, but an optimizer's."""
        self._forward.append(name)

    def leave(self) -> None:
        """Ends an :meth:`enter`."""
        if self._forward:
            self._forward.pop()

    def _follow(self, module: torch.nn.Module) -> list[Any]:
        self._begun[module] = []

        # torch gives no arguments by name to a hook that was removed within the same call.
        def enter(_: Any, __: Any, ___: Any = None) -> None:
            self._guard.run(self._enter, module)

        def leave(_: Any, __: Any, output: Any) -> None:
            self._guard.run(self._leave, module, output)

        return [
            module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
            module.register_forward_hook(leave, always_call=True),
        ]

    @property
    def _is_elsewhere(self) -> bool:
        """Whether this is another thread, and computes no node of fastamp: that may run modules."""
        here = threading.get_ident()
        return here != self._thread and not (self._backward and here == self._backward_thread)

    def _enter(self, module: torch.nn.Module) -> None:
        if module not in self._names or self._is_elsewhere:
            return  # The end came within the call, or it is not fastamp's.
        self._forward.append(self._names[module])
        self._begun[module].append(torch._C._autograd._get_sequence_nr())

    def _leave(self, module: torch.nn.Module, output: Any) -> None:
        if (
            self._begun.get(module) and not self._is_elsewhere
        ):  # Else the call had begun when the module was added.
            self._forward.pop()
            self._label(output, self._begun[module].pop(), self._names[module])

    def _label(self, output: Any, begun: int, name: str) -> None:
        """Gives the nodes that a module has made, and none of its children, its name.

        torch numbers the nodes of a thread: those from ``begun`` on are the module's.
        """
        open_nodes = [t.grad_fn for t in _tensors(output) if t.grad_fn is not None]
        visited = set()
        while open_nodes:
            node = open_nodes.pop()
            if node in visited or node._sequence_nr() < begun:
                continue
            visited.add(node)
            if node not in self._labelled:
                self._labelled[node] = own = self._hooked(node, begun) or name
                self._handles.append(node.register_prehook(self._guard.hook(self._pusher(own))))
                self._handles.append(node.register_hook(self._guard.hook(self._pop)))
            open_nodes += [next_node for next_node, _ in node.next_functions if next_node]

    def _hooked(self, node: Any, begun: int) -> str | None:
        """The submodule around whose results torch has put a node for its backward hooks.

        It does so after the submodule's forward hooks. The node around arguments is made before.
        """
        if node.name() != "BackwardHookFunctionBackward":
            return None
        for inner, _ in node.next_functions:
            if inner in self._labelled and inner._sequence_nr() >= begun:
                return self._labelled[inner]
        return None

    def _pusher(self, name: str) -> Callable[[Any], None]:
        def push(_: Any) -> None:
            self._backward.append(name)
            self._backward_thread = threading.get_ident()

        return push

    def _pop(self, _: Any, __: Any) -> None:
        if self._backward:
            self._backward.pop()


def is_half(value: Any) -> bool:
    """Whether this is a 16-bit floating tensor."""
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor has numbers in memory, one beside the other; not if sparse, nested, fake.

    Nor if it is one of the zeros without memory that forward-mode AD makes: under a mode torch
    reads them there all the same.
    """
    has_numbers = not (tensor.is_meta or isinstance(tensor, FakeTensor) or tensor._is_zerotensor())
    return has_numbers and tensor.layout == torch.strided and not tensor.is_nested


def address(tensor: torch.Tensor | None) -> int:
    """Returns where a tensor's storage begins; 0 if it has none: sparse, fake, of a subclass."""
    if tensor is None or isinstance(tensor, FakeTensor):
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def local_of(tensor: Any) -> torch.Tensor | None:
    """Returns what a tool may read of a tensor without a call of other code or other ranks.

    Itself if it is ordinary, this rank's shard of a DTensor, else None.
    """
    if type(tensor) in _ORDINARY:
        return tensor  # type: ignore[no-any-return]
    local = getattr(tensor, "_local_tensor", None)
    return local if type(local) in _ORDINARY else None


_ORDINARY = (torch.Tensor, torch.nn.Parameter)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
