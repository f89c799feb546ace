# SPDX-License-Identifier: Apache-2.0
"""fastamp.clip_grad_norm_ against torch.nn.utils.clip_grad_norm_."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fastamp
from fastamp import _C
from support.clipping import assert_gradients_near, near, torch_clip, twins_with_gradients, unscaled
from support.scaler_pairs import bits


@pytest.mark.parametrize("norm_type", [2, 2.0, 1, 0.5, float("inf"), -float("inf"), 0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("max_norm", [0.5, 1e6, 0.0])
def test_all_norms_and_dtypes_are_torchs(norm_type, dtype, max_norm):
    own, torchs = twins_with_gradients(dtype=dtype)
    if abs(norm_type) == float("inf"):  # torch refuses such a norm of an empty tensor.
        own, torchs = ([p for p in side if p.numel()] for side in (own, torchs))
    norm = fastamp.clip_grad_norm_(own, max_norm, norm_type)
    expected = torch_clip(torchs, max_norm, norm_type)
    assert norm.dtype == expected.dtype
    assert norm.shape == expected.shape
    assert near(norm.item(), expected.item(), dtype)
    assert_gradients_near(own, torchs)


def test_fp16_gradients_clip_as_torchs_do_even_where_their_norm_overflows():
    for factor in (1.0, 3e4):
        own, torchs = twins_with_gradients(dtype=torch.float16, factor=factor)
        norm, expected = fastamp.clip_grad_norm_(own, 1.0), torch_clip(torchs, 1.0)
        assert near(norm.item(), expected.item(), torch.float16)
        assert_gradients_near(own, torchs)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_non_finite_gradients_are_scaled_as_torch_scales_them_or_refused(bad):
    own, torchs = twins_with_gradients()
    for parameters in (own, torchs):
        parameters[0].grad[0, 0] = bad
    before = [bits(parameter.grad) for parameter in own]
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_: expected finite .* is non-finite"):
        fastamp.clip_grad_norm_(own, 1.0, error_if_nonfinite=True)
    assert [bits(parameter.grad) for parameter in own] == before
    assert str(fastamp.clip_grad_norm_(own, 1.0)) == str(torch_clip(torchs, 1.0))
    assert_gradients_near(own, torchs)


def test_odd_arguments_do_what_torch_does():
    assert fastamp.clip_grad_norm_([], 1.0).item() == 0.0
    single = torch.nn.Parameter(torch.ones(3))
    assert fastamp.clip_grad_norm_(single, 1.0).item() == 0.0  # No gradient.
    single.grad = torch.full((3,), 2.0)
    assert fastamp.clip_grad_norm_(single, 1.0).item() == pytest.approx(12**0.5)
    with pytest.warns(UserWarning, match="empty generator"):
        fastamp.clip_grad_norm_((p for p in ()), 1.0)
    own, torchs = twins_with_gradients()
    fastamp.clip_grad_norm_(iter([*own, own[0]]), 0.25)  # Listed twice: counted and scaled twice.
    torch_clip([*torchs, torchs[0]], 0.25)
    assert_gradients_near(own, torchs)
    with pytest.raises(AttributeError):
        fastamp.clip_grad_norm_([3], 1.0)
    own, torchs = twins_with_gradients()
    for foreach in (True, False):
        fastamp.clip_grad_norm_(own, 0.5, foreach=foreach)
        torch_clip(torchs, 0.5, foreach=foreach)
        assert_gradients_near(own, torchs)


def test_gradients_that_need_no_clipping_are_not_written():
    own, _ = twins_with_gradients()
    before = [bits(parameter.grad) for parameter in own]
    fastamp.clip_grad_norm_(own, 1e9)
    assert [bits(parameter.grad) for parameter in own] == before


class Passes:
    """Counts how often gradients are read for their norm."""

    def __init__(self, monkeypatch):
        self.count = 0
        original = _C.GradientList.two_norm

        def counted(*args):
            self.count += 1
            return original(*args)

        monkeypatch.setattr(_C.GradientList, "two_norm", counted)


def test_the_norm_of_unscale_is_used_while_the_gradients_are_unchanged(monkeypatch):
    passes = Passes(monkeypatch)
    own, torchs = twins_with_gradients()
    groups = [{"params": own[3:]}, {"params": own[:3]}]  # Another order than the list's.
    kept = unscaled(own, groups=groups)
    unscaled_twin = unscaled(torchs)
    norm = fastamp.clip_grad_norm_(own, 0.5)
    assert passes.count == 0
    assert near(norm.item(), torch_clip(torchs, 0.5).item())
    assert_gradients_near(own, torchs)
    fastamp.clip_grad_norm_(own, 0.25)  # They are changed now.
    torch_clip(torchs, 0.25)
    assert passes.count == 1
    assert_gradients_near(own, torchs)
    del kept, unscaled_twin


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p[0].grad.mul_(3),
        lambda p: setattr(p[0], "grad", p[0].grad * 3),
        lambda p: setattr(p[0], "grad", None),
        lambda p: p.pop(),
    ],
    ids=["edited", "replaced", "removed", "subset"],
)
def test_changed_gradients_are_read_again(change, monkeypatch):
    passes = Passes(monkeypatch)
    own, torchs = twins_with_gradients()
    kept = unscaled(own), unscaled(torchs)
    own, torchs = list(own), list(torchs)
    for parameters in (own, torchs):
        change(parameters)
    norm = fastamp.clip_grad_norm_(own, 0.5)
    assert passes.count == 1
    assert near(norm.item(), torch_clip(torchs, 0.5).item())
    assert_gradients_near(own, torchs)
    del kept


def test_the_passes_of_several_optimizers_are_put_together(monkeypatch):
    passes = Passes(monkeypatch)
    own, torchs = twins_with_gradients()
    first = torch.optim.SGD(own[:2], lr=0.1)
    second = torch.optim.Adam(own[2:], lr=0.1)
    scaler = fastamp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(first)
    scaler.unscale_(second)
    kept = unscaled(torchs)
    norm = fastamp.clip_grad_norm_(own, 0.5)
    assert passes.count == 0
    assert near(norm.item(), torch_clip(torchs, 0.5).item())
    assert_gradients_near(own, torchs)
    del kept


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(
        st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=40), min_size=1, max_size=5
    ),
    max_norm=st.floats(0.0, 1e10),
)
def test_norms_are_those_of_float64(values, max_norm):
    parameters = [torch.nn.Parameter(torch.zeros(len(row))) for row in values]
    exact = math.sqrt(sum(float(v) ** 2 for row in values for v in row))
    factor = min(1.0, max_norm / (exact + 1e-6))
    # A coefficient below the normal fp32 numbers has fewer bits, torch's as well as fastamp's.
    assume(factor == 0.0 or factor >= 2.0**-126)
    for parameter, row in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor(row, dtype=torch.float32)
    norm = fastamp.clip_grad_norm_(parameters, max_norm)
    assert norm.item() == pytest.approx(exact, rel=2e-7)
    for parameter, row in zip(parameters, values, strict=True):
        expected = torch.tensor(row, dtype=torch.float64) * factor
        torch.testing.assert_close(parameter.grad.double(), expected, rtol=1e-5, atol=1e-37)


@pytest.fixture
def mesh():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf"), 0.0, -1.0, -float("inf")])
@pytest.mark.parametrize("laid_out", ["both", "the gradient"])
def test_gradients_on_a_mesh_have_torchs_norm_of_each_order(mesh, norm_type, laid_out):
    from torch.distributed.tensor import Shard, distribute_tensor

    plain = torch.nn.Parameter(torch.ones(3))
    plain.grad = torch.tensor([3.0, 0.0, -4.0])
    expected = torch_clip([plain], 0.5, norm_type)
    value, gradient = torch.ones(3), torch.tensor([3.0, 0.0, -4.0])
    if laid_out == "both":
        value = distribute_tensor(value, mesh, [Shard(0)])
    parameter = torch.nn.Parameter(value)
    parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = fastamp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    norm = scaler.clip_grad_norm_(optimizer, 0.5, norm_type=norm_type)
    assert float(norm) == pytest.approx(float(expected), rel=1e-6)
    clipped = parameter.grad.to_local()
    torch.testing.assert_close(clipped, plain.grad, rtol=1e-6, atol=0.0, equal_nan=True)


def test_a_norm_over_a_group_and_the_mesh_of_a_gradient_alone(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = distribute_tensor(torch.tensor([3.0, -4.0]), mesh, [Shard(0)])
    group = torch.distributed.new_group([0])
    norm = fastamp.clip_grad_norm_([parameter], 0.5, mesh={group: None})
    assert norm.item() == pytest.approx(5.0)
    torch.testing.assert_close(parameter.grad.to_local(), torch.tensor([0.3, -0.4]))
