# SPDX-License-Identifier: Apache-2.0
"""Tensors of every kind that can reach an op of a region, and how to compare them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

Convert = Callable[[torch.Tensor], torch.Tensor]

FAKE = FakeTensorMode(allow_non_fake_inputs=True)


class Plain(torch.Tensor):
    """A subclass that sees functions and leaves ops alone."""


class Secretive(torch.Tensor):
    """A wrapper that counts the requests for its sizes, and does not say its numel."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Secretive:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            dtype=inner.dtype,
            dispatch_sizes_strides_policy="sizes",
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if function in (aten.sym_numel.default, aten.numel.default):
            raise NotImplementedError("numel")
        if function in (aten.sym_size.default, aten.size.default):
            return None
        if function in (aten.sym_stride.default, aten.sym_storage_offset.default):
            return None
        unwrapped = pytree.tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        out = function(*unwrapped[0], **unwrapped[1])
        return pytree.tree_map_only(torch.Tensor, cls, out)


def nested(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([tensor, tensor * 2], dtype=tensor.dtype)


def jagged(tensor: torch.Tensor) -> torch.Tensor:
    parts = [tensor, tensor * 2]
    return torch.nested.nested_tensor(parts, dtype=tensor.dtype, layout=torch.jagged)


def inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


def zero(tensor: torch.Tensor) -> torch.Tensor:
    return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype)


def named(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.rename(*"NCHWDE"[: tensor.dim()])


def quantized(tensor: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8)


def dual(tensor: torch.Tensor) -> torch.Tensor:
    return torch.autograd.forward_ad.make_dual(tensor, torch.ones_like(tensor))


HAS_NAMES = hasattr(torch.Tensor, "rename")  # torch 2.15 has no named tensors any more

# Conversions keep the dtype. One that a tensor does not go with raises.
KINDS: dict[str, Convert] = {
    "nested": nested,
    "jagged": jagged,
    "sparse": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "csc": lambda t: t.to_sparse_csc(),
    "bsr": lambda t: t.to_sparse_bsr((1, 1)),
    "bsc": lambda t: t.to_sparse_bsc((1, 1)),
    "mkldnn": lambda t: t.to_mkldnn(),
    "quantized": quantized,
    "meta": lambda t: t.to("meta"),
    "fake": FAKE.from_tensor,
    "functional": torch._to_functional_tensor,
    "two tensors": lambda t: TwoTensor(t, t.clone()),
    "secretive": Secretive,
    "plain subclass": lambda t: t.as_subclass(Plain),
    "negated": lambda t: torch._neg_view(t),
    "zero": zero,
    **({"named": named} if HAS_NAMES else {}),
    "inference": inference,
    "dual": dual,
}


@contextmanager
def home_of(kind: str) -> Iterator[None]:
    """Where tensors of this kind can be made and used; silences what torch says of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "dual":
            with torch.autograd.forward_ad.dual_level():
                yield
        elif kind == "functional":
            torch._enable_functionalization(reapply_views=False)
            try:
                yield
            finally:
                torch._disable_functionalization()
        else:
            yield


def set_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Gives a leaf a gradient of its own kind; for nested ones, as a backward would."""
    if gradient.is_nested and gradient.layout == torch.jagged:
        # Jagged tensors fit each other only if they share their offsets.
        offsets = parameter.detach().offsets()
        gradient = torch.nested.nested_tensor_from_jagged(gradient.values(), offsets)
    if gradient.is_nested and gradient.layout == torch.strided:
        parameter.backward(gradient)  # The setter asks for a size.
    else:
        parameter.grad = gradient


def convert(value: Any, how: Convert) -> Any:
    """Every floating tensor in arguments as another kind; raises where one cannot be."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: how(t) if t.is_floating_point() else t, value
    )


def plain_parts(value: Any) -> list[Any]:
    """What a result holds, as ordinary tensors and other things that can be compared."""
    parts: list[Any] = []
    for leaf in pytree.tree_leaves(value):
        parts += _plain_parts(leaf) if isinstance(leaf, torch.Tensor) else [leaf]
    return parts


def _plain_parts(tensor: torch.Tensor) -> list[Any]:
    about: list[Any] = [type(tensor), tensor.dtype, str(tensor.layout), tensor.requires_grad]
    if tensor.is_nested:
        return about + [part.detach() for part in tensor.unbind()]
    if isinstance(tensor, (TwoTensor, Secretive)):
        inner = tensor.a if isinstance(tensor, TwoTensor) else tensor.inner
        return about + plain_parts(inner)
    about.append(tuple(tensor.shape))
    if torch._is_functional_tensor(tensor):
        torch._sync(tensor)
        return about + plain_parts(torch._from_functional_tensor(tensor))
    if tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor):
        return about
    tensor = tensor.detach()
    if tensor.is_quantized:
        return [*about, tensor.int_repr()]
    if tensor.is_mkldnn or tensor.layout != torch.strided:
        return [*about, tensor.to_dense()]
    if HAS_NAMES:
        tensor = tensor.rename(None)
    return [*about, tensor.as_subclass(torch.Tensor).resolve_neg().clone()]
