# SPDX-License-Identifier: Apache-2.0
"""unscale_and_check_ as a dispatcher op: schema, autograd, fake tensors, refusals."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from support.amp_reference import DEVICES, unscale_
from support.simulated_cuda import counted, is_simulated

devices = pytest.mark.parametrize("device", DEVICES)


@devices
def test_opcheck(device):
    half, flag = torch.tensor(0.5, device=device), torch.zeros(1, device=device)
    lists = [
        [],
        [torch.randn(3, device=device)],
        [torch.randn(2, 3, device=device).t(), torch.randn(5, device=device).half()],
        [torch.randn(4, 6, device=device)[:, ::2], torch.empty(0, device=device)],
    ]
    for grads in lists:
        torch.library.opcheck(unscale_, (grads, half, flag))


@devices
def test_versions_move_like_those_of_torch(device):
    grad, flag = torch.ones(3, device=device), torch.zeros((), device=device)
    inv_scale = torch.tensor(0.5, device=device)
    unscale_([grad, grad[:0]], inv_scale, flag)
    assert (flag._version, inv_scale._version) == (1, 0)
    assert grad._version == 2  # itself and a view of it


@devices
def test_grad_mode_makes_no_node_and_no_warning(device):
    leaf = torch.ones(3, device=device, requires_grad=True)
    strided_leaf = torch.ones(4, 4, device=device, requires_grad=True)
    result = leaf * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flag = torch.zeros((), device=device)
        node = result.grad_fn
        view = strided_leaf.detach()[:, ::2].requires_grad_()
        unscale_([leaf, result, view], torch.tensor(0.5, device=device), flag)
    assert result.grad_fn is node
    assert leaf.grad_fn is None
    assert leaf.tolist() == [0.5] * 3
    assert strided_leaf.detach()[:, ::2].eq(0.5).all()
    assert strided_leaf.detach()[:, 1::2].eq(1.0).all()


def test_edit_of_a_saved_tensor_is_noticed_by_backward():
    x = torch.ones(3, requires_grad=True)
    y = x * 1
    z = y * y
    unscale_([y], torch.tensor(0.5), torch.zeros(()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_inference_mode_tensors():
    with torch.inference_mode():
        grad = torch.ones(3)
        unscale_([grad], torch.tensor(0.5), torch.zeros(()))
    unscale_([grad, torch.ones(2)], torch.tensor(0.5), torch.zeros(()))
    assert grad.tolist() == [0.25] * 3


def test_negated_view_is_refused_like_torch_refuses_it():
    values = torch.complex(torch.ones(3), torch.full((3,), 2.0))
    view = values.conj().imag
    assert view.is_neg()
    half, flag = torch.tensor(0.5), torch.zeros(())
    for call in (
        lambda: unscale_([view], half, flag),
        lambda: torch._amp_foreach_non_finite_check_and_unscale_([view], flag, half),
    ):
        with pytest.raises(RuntimeError, match="mutable TensorLists with negation"):
            call()
    assert values.imag.tolist() == [2.0] * 3


@devices
def test_under_autocast_dtypes_stay(device):
    grad = torch.ones(3, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        unscale_([grad], torch.tensor(0.5, device=device), torch.zeros((), device=device))
    assert grad.dtype == torch.float32
    assert grad.tolist() == [0.5] * 3


def test_compiles_whole():
    def step(grads, inv_scale, found_inf):
        unscale_(grads, inv_scale, found_inf)
        return grads[0] + 1

    grads = [torch.ones(3), torch.ones(2, 2).half()]
    flag = torch.zeros(())
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert compiled(grads, torch.tensor(0.5), flag).tolist() == [1.5] * 3
    assert grads[1].eq(0.5).all()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors(device):
    with FakeTensorMode():
        grads = [torch.empty(3, device=device), torch.empty(2, device=device).half()]
        flag = torch.zeros((), device=device)
        assert unscale_(grads, torch.ones((), device=device), flag) is None


def test_meta_tensors_are_checked_too():
    meta = torch.empty(3, device="meta", dtype=torch.int32)
    with pytest.raises(TypeError, match=r"expected grads\[0\] to be Half.* got Int"):
        unscale_([meta], torch.ones((), device="meta"), torch.ones((), device="meta"))


REFUSED = {
    "integer gradient": (
        lambda g: ([g, torch.ones(2, dtype=torch.int32)], None, None),
        TypeError,
        r"expected grads\[1\] to be Half, BFloat16, Float or Double, got Int",
    ),
    "complex gradient": (
        lambda g: ([g, torch.ones(2, dtype=torch.complex64)], None, None),
        TypeError,
        r"grads\[1\] .* got ComplexFloat",
    ),
    "sparse gradient": (
        lambda g: ([g, torch.ones(2, 2).to_sparse()], None, None),
        ValueError,
        r"expected grads\[1\] to be strided, got layout Sparse",
    ),
    "expanded gradient": (
        lambda g: ([g, torch.ones(1).expand(3)], None, None),
        ValueError,
        r"expected grads\[1\] to have one memory location per element.*\[3\].*\[0\]",
    ),
    "meta gradient": (
        lambda g: ([g, torch.ones(2, device="meta")], None, None),
        ValueError,
        r"expected grads\[1\] on cpu, the device of inv_scale, got meta",
    ),
    "two inverse scales": (
        lambda g: ([g], torch.ones(2), None),
        ValueError,
        "expected inv_scale to have one element, got 2",
    ),
    "double inverse scale": (
        lambda g: ([g], torch.ones((), dtype=torch.float64), None),
        TypeError,
        "expected inv_scale to be Float, got Double",
    ),
    "empty flag": (
        lambda g: ([g], None, torch.ones(0)),
        ValueError,
        "expected found_inf to have one element, got 0",
    ),
    "integer flag": (
        lambda g: ([g], None, torch.ones((), dtype=torch.int32)),
        TypeError,
        "expected found_inf to be Float, got Int",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_calls_change_nothing(case):
    make, error, message = REFUSED[case]
    good = torch.tensor([2.0, float("inf")])
    version = good._version
    grads, inv_scale, found_inf = make(good)
    inv_scale = torch.tensor(0.5) if inv_scale is None else inv_scale
    found_inf = torch.zeros(()) if found_inf is None else found_inf
    with pytest.raises(error, match="unscale_and_check_: .*" + message):
        unscale_(grads, inv_scale, found_inf)
    assert good.tolist() == [2.0, float("inf")]
    assert good._version == version
    assert found_inf._version == 0


@pytest.mark.graph
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("count", [10, 1000, 5000])
def test_graph_capture_replays_with_new_values(count):
    grads = [torch.ones(17, device="cuda") for _ in range(count)]
    inv_scale, found_inf = torch.tensor(0.5, device="cuda"), torch.zeros((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        unscale_(grads, inv_scale, found_inf)
    torch.cuda.synchronize()
    for _ in range(3):
        # Pinned memory a careless capture would have kept reading from is used for other things.
        [torch.full((40_000,), 7.0).pin_memory().to("cuda", non_blocking=True) for _ in range(20)]
        graph.replay()
    torch.cuda.synchronize()
    assert all(g.eq(0.125).all() for g in grads)
    assert found_inf.item() == 0.0
    grads[-1][-1] = float("nan")
    inv_scale.fill_(1.0)
    graph.replay()
    assert found_inf.item() == 1.0
    assert grads[0].eq(0.125).all()


def launches(call: Callable[[], object]) -> int:
    """How many of the multi-tensor kernels a call launches; it must not wait."""
    if is_simulated():
        with counted("launches", "waits") as counts:
            call()
        assert counts["waits"] == 0
        return counts["launches"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
    return sum("multi_tensor_kernel" in event.name for event in profile.events())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("count", [10, 1000, 10_000])
def test_one_launch_and_no_synchronisation(count):
    grads = [torch.ones(17, device="cuda") for _ in range(count)]
    inv_scale, found_inf = torch.tensor(0.5, device="cuda"), torch.zeros((), device="cuda")
    unscale_(grads, inv_scale, found_inf)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert launches(lambda: unscale_(grads, inv_scale, found_inf)) == 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
