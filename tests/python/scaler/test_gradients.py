# SPDX-License-Identifier: Apache-2.0
"""Which gradients are unscaled, and how: layouts, dtypes, subclasses, odd optimizers."""

import sys
import types

import pytest
import torch

import fastamp
from support.scaler_pairs import SCALERS, outcome


def optimizer_of(*gradients):
    """An optimizer-like object with one parameter per gradient."""
    parameters = []
    for gradient in gradients:
        dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
        parameter = torch.nn.Parameter(torch.zeros(dense.shape, dtype=gradient.dtype))
        parameter.grad = gradient
        parameters.append(parameter)
    return types.SimpleNamespace(param_groups=[{"params": parameters}])


def unscale(kind, optimizer, inv_scale=0.5, allow_fp16=True):
    scaler = kind("cpu")
    scaler.scale(torch.ones(()))
    flags = scaler._unscale_grads_(optimizer, torch.tensor(inv_scale), torch.zeros(()), allow_fp16)
    return {str(device): flag.item() for device, flag in flags.items()}


def sparse(values, indices, dtype, size=4):
    return torch.sparse_coo_tensor([indices], torch.tensor(values, dtype=dtype), (size,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_dense_gradients_of_each_dtype(dtype, bad):
    results = []
    for kind in SCALERS:
        gradient = torch.arange(33, dtype=torch.float64).to(dtype)
        if bad is not None:
            gradient[-1] = bad
        optimizer = optimizer_of(gradient)
        flags = unscale(kind, optimizer)
        results.append((flags, optimizer.param_groups[0]["params"][0].grad[:-1]))
    assert results[0][0] == results[1][0] == {"cpu": float(bad is not None)}
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bad", [False, True])
def test_bfloat16_gradients_on_cuda(bad):
    parameter = torch.nn.Parameter(torch.zeros(9, dtype=torch.bfloat16, device="cuda"))
    parameter.grad = torch.full_like(parameter, 4.0)
    if bad:
        parameter.grad[-1] = float("inf")
    scaler = fastamp.GradScaler("cuda", init_scale=2.0)
    scaler.scale(torch.ones((), device="cuda"))
    optimizer = types.SimpleNamespace(param_groups=[{"params": [parameter]}])
    scaler.unscale_(optimizer)
    assert parameter.grad[0].item() == 2.0
    assert [f.item() for f in scaler._found_inf_per_device(optimizer).values()] == [float(bad)]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cpu_and_cuda_gradients_of_one_optimizer_have_a_flag_each():
    parameters = [torch.nn.Parameter(torch.zeros(2, device=d)) for d in ("cpu", "cuda")]
    parameters[0].grad = torch.full((2,), float("inf"))
    parameters[1].grad = torch.full((2,), 4.0, device="cuda")
    scaler = fastamp.GradScaler("cuda", init_scale=2.0)
    scaler.scale(torch.ones((), device="cuda"))
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler.step(optimizer)
    flags = {d.type: f.item() for d, f in scaler._found_inf_per_device(optimizer).items()}
    assert flags == {"cpu": 1.0, "cuda": 0.0}
    assert parameters[1].tolist() == [0.0, 0.0]
    scaler.update()
    assert scaler.get_scale() == 1.0


def test_all_dtypes_and_layouts_of_one_device_share_one_flag():
    flags = unscale(
        fastamp.GradScaler,
        optimizer_of(
            torch.ones(3),
            torch.ones(3).half(),
            torch.ones(2).double(),
            torch.ones(2, 3).t(),
            sparse([1.0, float("inf")], [0, 2], torch.float32),
        ),
    )
    assert flags == {"cpu": 1.0}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("values", [(2.0, 4.0), (60000.0, 60000.0), (1.0, float("inf"))])
def test_sparse_gradients_with_duplicates(dtype, values):
    results = []
    for kind in SCALERS:
        optimizer = optimizer_of(sparse(values, [1, 1], dtype), torch.ones(2))
        flags = unscale(kind, optimizer)
        gradient = optimizer.param_groups[0]["params"][0].grad
        results.append((flags, gradient.is_coalesced(), gradient._values().tolist()))
    assert results[0] == results[1]
    # 60000 + 60000 overflows fp16: only the sum shows it, and only fp16 gradients are summed.
    overflow = float("inf") in values or (dtype is torch.float16 and values[0] == 60000.0)
    assert results[1][0] == {"cpu": float(overflow)}
    assert results[1][1] is (dtype is torch.float16)


def test_a_refused_fp16_gradient_leaves_sparse_gradients_uncoalesced():
    duplicates, half = sparse([1.0, 1.0], [1, 1], torch.float16), torch.ones(1).half()
    optimizer = optimizer_of(torch.full((2,), 4.0), half, duplicates)
    with pytest.raises(ValueError, match="float16"):
        unscale(fastamp.GradScaler, optimizer, allow_fp16=False)
    parameters = optimizer.param_groups[0]["params"]
    assert parameters[0].grad.tolist() == [4.0, 4.0]
    assert not parameters[2].grad.is_coalesced()


@pytest.mark.parametrize(
    ("bad", "error", "torchs"),
    [
        (torch.ones(2, dtype=torch.complex64), TypeError, NotImplementedError),
        (torch.ones(2).to(torch.float8_e4m3fn), TypeError, NotImplementedError),
        (torch.ones(1).expand(2), ValueError, RuntimeError),
    ],
    ids=["complex", "float8", "expanded"],
)
def test_gradients_that_nobody_can_unscale_are_refused_before_any_is_written(bad, error, torchs):
    for kind, raised in zip(SCALERS, (torchs, error), strict=True):
        optimizer = optimizer_of(torch.full((2,), 4.0), bad)
        with pytest.raises(raised):
            unscale(kind, optimizer)
    assert optimizer.param_groups[0]["params"][0].grad.tolist() == [4.0, 4.0]


def test_absent_gradients_and_empty_groups_give_no_flag():
    parameter = torch.nn.Parameter(torch.ones(1))
    for groups in ([], [{"params": []}], [{"params": [parameter]}]):
        for kind in SCALERS:
            assert unscale(kind, types.SimpleNamespace(param_groups=groups)) == {}


@pytest.mark.parametrize("wrap", [list, tuple])
@pytest.mark.parametrize("hold", [tuple, dict.fromkeys, iter])
def test_parameter_lists_may_be_any_iterable_of_any_mapping(wrap, hold):
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), 4.0)
    groups = wrap([types.MappingProxyType({"params": hold([parameter])})])
    flags = unscale(fastamp.GradScaler, types.SimpleNamespace(param_groups=groups))
    assert flags == {"cpu": 0.0}
    assert parameter.grad.item() == 2.0


@pytest.mark.parametrize("entry", [1, None, "weight", object()])
def test_entries_that_are_no_tensors_are_refused_before_anything_changes(entry):
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), 4.0)
    optimizer = types.SimpleNamespace(param_groups=[{"params": [parameter, entry]}])
    results = [outcome(lambda k=k: unscale(k, optimizer)) for k in SCALERS]
    assert results[0] == results[1] == ("raised", AssertionError)
    assert parameter.grad.item() == 4.0


def test_optimizers_without_the_right_attributes_raise_what_torchs_does():
    for broken in (object(), types.SimpleNamespace(param_groups=[{}])):
        results = [outcome(lambda k=k, b=broken: unscale(k, b)) for k in SCALERS]
        assert results[0] == results[1]


def test_gradients_that_carry_history_are_unscaled_without_extending_it():
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    (weight**3).sum().backward(create_graph=True)
    assert weight.grad.requires_grad
    before = weight.grad.grad_fn
    version = weight.grad._version
    assert unscale(
        fastamp.GradScaler, types.SimpleNamespace(param_groups=[{"params": [weight]}])
    ) == {"cpu": 0.0}
    assert weight.grad.item() == 6.0
    assert weight.grad.grad_fn is before
    assert weight.grad._version > version
    weight.grad = None


def test_a_gradient_saved_for_backward_notices_the_unscaling():
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    weight.grad = torch.tensor([4.0])
    other = torch.nn.Parameter(torch.tensor([1.0]))
    product = weight.grad * other
    unscale(fastamp.GradScaler, types.SimpleNamespace(param_groups=[{"params": [weight]}]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_the_flag_starts_from_the_callers_and_is_a_copy():
    scaler = fastamp.GradScaler("cpu")
    found_inf = torch.ones(())
    flags = scaler._unscale_grads_(optimizer_of(torch.ones(1)), torch.tensor(1.0), found_inf, True)
    flag = flags[torch.device("cpu")]
    assert flag.item() == 1.0
    assert flag.data_ptr() != found_inf.data_ptr()


def test_parameter_subclasses_are_asked_through_python():
    class Reading(torch.nn.Parameter):
        reads = 0

        @property
        def grad(self):
            type(self).reads += 1
            return self.hidden

    parameter = Reading(torch.zeros(2))
    parameter.hidden = torch.full((2,), 4.0)
    unscale(fastamp.GradScaler, types.SimpleNamespace(param_groups=[{"params": [parameter]}]))
    assert parameter.hidden.tolist() == [2.0, 2.0]
    assert Reading.reads >= 1


class Logged(torch.Tensor):
    """A wrapper subclass: its data is in another tensor, which only Python code finds."""

    calls: list = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(str(func))
        unwrap = torch.utils._pytree.tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        result = func(*unwrap[0], **unwrap[1])
        return cls(result) if func is torch.ops.aten.detach.default else result


@pytest.mark.parametrize("bad", [False, True])
def test_wrapper_subclasses_get_torchs_own_operator(bad):
    parameter = torch.nn.Parameter(torch.zeros(2))
    plain = torch.nn.Parameter(torch.zeros(2))
    plain.grad = torch.full((2,), 4.0)
    inner = torch.tensor([4.0, float("inf") if bad else 8.0])
    wrapped = torch.nn.Parameter(Logged(torch.zeros(2)))
    wrapped.grad = Logged(inner)
    Logged.calls.clear()
    optimizer = types.SimpleNamespace(param_groups=[{"params": [parameter, wrapped, plain]}])
    flags = unscale(fastamp.GradScaler, optimizer)
    assert flags == {"cpu": float(bad)}
    assert inner[0].item() == 2.0
    assert plain.grad.tolist() == [2.0, 2.0]
    assert any("_amp_foreach_non_finite_check_and_unscale_" in call for call in Logged.calls)


def test_fake_tensors_go_through_the_whole_iteration():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler = fastamp.GradScaler("cpu")
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        scaler.update()
    assert type(weight.grad).__name__ == "FakeTensor"


def test_ten_thousand_gradients_are_gathered_without_python_objects():
    # A gradient that no Python name holds has no Python object; gathering must not create one.
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(10_000)]
    total = sum(p.sum() for p in parameters)
    total.backward()
    calls = []
    optimizer = types.SimpleNamespace(param_groups=[{"params": parameters}])
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(types.SimpleNamespace(param_groups=[]))  # Makes what a scaler makes once.
    sys.setprofile(lambda _frame, event, _argument: calls.append(event))
    try:
        scaler.unscale_(optimizer)
    finally:
        sys.setprofile(None)
    assert len(calls) < 20
    assert all(p.grad.item() == 0.5 for p in parameters[::997])


def test_nobody_asks_for_meshes_of_plain_parameters(monkeypatch):
    # In a program that has DTensors and a process group, the question costs time in each call.
    def asked(_optimizer):
        raise AssertionError("plain parameters were asked for meshes")

    for module in ("gradients", "grad_scaler", "step_guard"):
        monkeypatch.setattr(f"fastamp._scaler.{module}.meshes_of", asked)
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = fastamp.optim.AdamW([parameter])
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    for unscales in (False, True):
        parameter.grad = torch.ones(3)
        scaler.scale(torch.ones(()))
        if unscales:
            scaler.unscale_(optimizer)
        else:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.clip_grad_value_(optimizer, 0.1)
        scaler.step(optimizer)
        scaler.update()
    guarded = fastamp.optim.AdamW([parameter])
    guard = fastamp.StepGuard(guarded)
    guard.clip_grad_norm_(1.0)
    guard.clip_grad_value_(0.1)
    guarded.step()
    assert not guard.step_was_skipped
