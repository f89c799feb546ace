# SPDX-License-Identifier: Apache-2.0
"""Which module of a model is running, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


class ModulePath:
    """Tells the innermost module of a model that is running now.

    Of a backward pass it is the module whose forward pass made the node. Follows one thread at a
    time, that of the forward pass; backward passes on CUDA run on another one while that waits.
    """

    def __init__(self) -> None:
        """Follows nothing yet."""
        self.half_weights: set[int] = set()
        self._names: dict[torch.nn.Module, str] = {}
        self._forward: list[str] = []
        self._backward: list[str] = []
        self._labelled: dict[Any, str] = {}
        self._handles: list[Any] = []

    def add(self, model: torch.nn.Module) -> None:
        """Follows a model, too; its modules are named as in ``named_modules``, itself by its class.

        Notes its 16-bit weights in :attr:`half_weights`, by the address of their storage.
        """
        for name, module in model.named_modules():
            if module not in self._names:
                self._names[module] = name or type(model).__name__
                if not isinstance(module, torch.jit.ScriptModule):
                    self._handles += self._follow(module, self._names[module])
        self.half_weights |= {address(p) for p in model.parameters() if is_half(p)} - {0}

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
        self.forget()

    def forget(self) -> None:
        """Lets the nodes of past backward passes go."""
        self._labelled.clear()
        self._forward.clear()
        self._backward.clear()

    def _follow(self, module: torch.nn.Module, name: str) -> list[Any]:
        stops: list[set[Any]] = []

        def enter(_: Any, args: Any, kwargs: Any) -> None:
            self._forward.append(name)
            nodes = {t.grad_fn for t in _tensors((args, kwargs)) if t.grad_fn is not None}
            stops.append(nodes)

        def leave(_: Any, __: Any, output: Any) -> None:
            if stops:  # Else the call had begun when the module was added.
                self._forward.pop()
                self._label(output, stops.pop(), name)

        return [
            module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
            module.register_forward_hook(leave, always_call=True),
        ]

    def _label(self, output: Any, stops: set[Any], name: str) -> None:
        """Gives the nodes that a module has made, and none of its children, its name."""
        open_nodes = [t.grad_fn for t in _tensors(output) if t.grad_fn is not None]
        while open_nodes:
            node = open_nodes.pop()
            if node in stops or node in self._labelled:
                continue
            self._labelled[node] = name
            self._handles.append(node.register_prehook(self._pusher(name)))
            self._handles.append(node.register_hook(self._pop))
            open_nodes += [next_node for next_node, _ in node.next_functions if next_node]

    def _pusher(self, name: str) -> Callable[[Any], None]:
        def push(_: Any) -> None:
            self._backward.append(name)

        return push

    def _pop(self, _: Any, __: Any) -> None:
        if self._backward:
            self._backward.pop()


def is_half(value: Any) -> bool:
    """Whether this is a 16-bit floating tensor."""
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def address(tensor: torch.Tensor) -> int:
    """Where a tensor's storage begins; 0 if it has none: sparse, fake, of a subclass."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
