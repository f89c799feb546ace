# SPDX-License-Identifier: Apache-2.0
"""Tensor subclasses and modes see in our regions what they see in torch's."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fastamp
from support.autocast_state import torch_kernels

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Record(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        dtype = out.dtype if isinstance(out, torch.Tensor) else None
        self.calls.append((str(function), dtype))
        return out


class RecordFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))


class Logged(torch.Tensor):
    """A wrapper subclass that writes down the ops that reach it."""

    calls: list[Any] = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Logged:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner.detach()

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, Logged) else value

        out = function(*map(unwrap, args), **(kwargs or {}))
        Logged.calls.append((str(function), [t.dtype for t in pytree.tree_leaves(out)]))
        return pytree.tree_map(Logged, out)


def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = torch.mm(x, w)
    hidden = torch.nn.functional.layer_norm(torch.mm(hidden, w), (4,))
    return torch.nn.functional.mse_loss(hidden, x)


def seen_by_mode(parameter: bool) -> Any:
    w = torch.nn.Parameter(torch.ones(4, 4)) if parameter else torch.ones(4, 4)
    with fastamp.autocast("cpu"):
        torch.mm(w, w)  # a cast made before the mode is on
        with Record() as record:
            forward(torch.ones(4, 4), w)
    return record.calls


def seen_by_mode_outside(parameter: bool) -> Any:
    w = torch.nn.Parameter(torch.ones(4, 4)) if parameter else torch.ones(4, 4)
    with Record() as record, fastamp.autocast("cpu"):
        forward(torch.ones(4, 4), w)
    return record.calls


def seen_by_subclass(parameter: bool) -> Any:
    Logged.calls.clear()
    w = Logged(torch.ones(4, 4))
    if parameter:
        w = torch.nn.Parameter(w)
    with fastamp.autocast("cpu"):
        out = forward(torch.ones(4, 4), w)
    assert isinstance(out, Logged)
    return list(Logged.calls)


def seen_by_make_fx(parameter: bool) -> Any:
    w = torch.nn.Parameter(torch.ones(4, 4)) if parameter else torch.ones(4, 4)
    with fastamp.autocast("cpu"):
        torch.mm(w, w)
        graph = make_fx(forward)(torch.ones(4, 4), w)
    return [str(node.target) for node in graph.graph.nodes]


def seen_by_make_fx_of_a_captured_weight(parameter: bool) -> Any:
    w = torch.nn.Parameter(torch.ones(4, 4)) if parameter else torch.ones(4, 4)
    with fastamp.autocast("cpu"):
        torch.mm(w, w)
        graph = make_fx(lambda x: forward(x, w))(torch.ones(4, 4))
    return [str(node.target) for node in graph.graph.nodes]


VIEWS = [
    seen_by_mode,
    seen_by_mode_outside,
    seen_by_subclass,
    seen_by_make_fx,
    seen_by_make_fx_of_a_captured_weight,
]


CASES = [
    pytest.param(view, parameter, id=f"{view.__name__}-{'parameter' if parameter else 'tensor'}")
    for view in VIEWS
    for parameter in (False, True)
    if (view, parameter) != (seen_by_mode_outside, True)
]


@pytest.mark.parametrize(("view", "parameter"), CASES)
def test_sees_the_same_ops_as_with_torchs_kernels(view: Any, parameter: bool):
    results = []
    for kernels in (torch_kernels(), nullcontext()):
        with kernels:
            results.append(view(parameter))
    assert results[1] == results[0]
    assert len(results[1]) > 3


def test_two_tensor_keeps_both_halves_and_their_gradients():
    results = []
    for kernels in (torch_kernels(), nullcontext()):
        with kernels:
            w = TwoTensor(torch.ones(4, 4), torch.full((4, 4), 2.0)).requires_grad_()
            with fastamp.autocast("cpu", dtype=FP16):
                out = torch.mm(torch.ones(4, 4), w)
            out.float().sum().backward()
            assert out.a.dtype == out.b.dtype == FP16
            results.append([out.a, out.b, w.grad.a, w.grad.b])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_function_mode_sees_no_more_than_with_torchs_region():
    seen = []
    for region in (torch.autocast, fastamp.autocast):
        with RecordFunctions() as record, region("cpu"):
            torch.mm(torch.ones(4, 4), torch.ones(4, 4))
        seen.append(record.calls)
    assert seen[1] == seen[0]


def test_fake_tensors_get_torchs_dtypes_and_leave_no_cast_behind():
    from torch._subclasses.fake_tensor import FakeTensorMode

    w = torch.nn.Parameter(torch.ones(4, 4))
    with fastamp.autocast("cpu", dtype=FP16):
        real = torch.mm(w, w)
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = torch.mm(torch.ones(4, 4), w)
        assert fake.dtype == FP16
        assert torch.equal(torch.mm(w, w), real)


@pytest.mark.parametrize("layout", ["sparse", "csr", "mkldnn"])
def test_tensors_of_other_layouts_do_as_with_torchs_kernels(layout: str):
    def make() -> torch.Tensor:
        dense = torch.eye(4)
        return {"sparse": dense.to_sparse, "csr": dense.to_sparse_csr, "mkldnn": dense.to_mkldnn}[
            layout
        ]()

    results: list[Any] = []
    for kernels in (torch_kernels(), nullcontext()):
        with kernels, fastamp.autocast("cpu"):
            try:
                left = make()
                right = torch.ones(4, 4).to_mkldnn() if layout == "mkldnn" else torch.ones(4, 4)
                out = torch.mm(left, right)
                results.append((out.dtype, out.layout))
            except RuntimeError as error:
                results.append(str(error).splitlines()[0])
    assert results[1] == results[0]


def test_a_dispatch_mode_sees_a_weight_cast_as_often_as_in_torchs_regions():
    with torch_kernels():
        torchs = seen_by_mode_outside(parameter=True)
    own = seen_by_mode_outside(parameter=True)
    assert Counter(map(str, own)) == Counter(map(str, torchs))
