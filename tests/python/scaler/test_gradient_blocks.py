"""Collecting gradients in blocks and handing their addresses to the kernel changes no result."""

import copy
import random
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastamp
from fastamp import _C
from support.scaler_pairs import SCALERS

# Blocks are of 32 parameters.
COUNTS = (0, 1, 31, 32, 33, 64, 65, 100)
DTYPES = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float64)
SHAPES = ((16,), (), (0,), (3, 5), (2047,), (2048,), (4500,))


class Asked(torch.nn.Parameter):
    """A parameter that is no plain one: its gradient is read through Python."""


def dense(draw, dtype):
    return torch.randn(draw.choice(SHAPES), dtype=torch.float64).to(dtype)


GRADIENTS = {
    "none": lambda _draw, _dtype: None,
    "dense": dense,
    "transposed": lambda _draw, dtype: torch.randn(5, 7).to(dtype).t(),
    "strided": lambda _draw, dtype: torch.randn(6, 8).to(dtype)[1:, ::2],
    "view": lambda draw, dtype: torch.randn(50).to(dtype)[draw.randrange(40) :],
    "sparse": lambda _draw, dtype: torch.sparse_coo_tensor(
        [[0, 2, 2]], torch.randn(3).to(dtype), (4,)
    ),
}
WEIGHTS = (2, 20, 3, 2, 2, 1)


def random_optimizer(seed, count):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    parameters = []
    for _ in range(count):
        kind = draw.choices(list(GRADIENTS), WEIGHTS)[0]
        gradient = GRADIENTS[kind](draw, draw.choice(DTYPES))
        subclass = draw.random() < 0.03
        shape = (2,) if gradient is None else gradient.shape
        dtype = torch.float32 if gradient is None else gradient.dtype
        parameter = (Asked if subclass else torch.nn.Parameter)(torch.zeros(shape, dtype=dtype))
        parameter.grad = gradient
        parameters.append(parameter)
    if count and draw.random() < 0.4:
        victim = draw.choice(parameters).grad
        if victim is not None and victim.layout is torch.strided and victim.numel():
            victim[(0,) * victim.dim()] = draw.choice([float("inf"), float("nan")])
    cut = draw.randrange(count + 1)
    groups = [{"params": parameters[:cut]}, {"params": parameters[cut:]}]
    return types.SimpleNamespace(param_groups=groups)


def gradients(optimizer):
    return [p.grad for group in optimizer.param_groups for p in group["params"]]


def unscale(kind, optimizer, scale=1024.0):
    scaler = kind("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    versions = [None if g is None else g._version for g in gradients(optimizer)]
    scaler.unscale_(optimizer)
    flags = scaler._found_inf_per_device(optimizer)
    bumps = [
        None if g is None or g.layout is not torch.strided else g._version - v
        for g, v in zip(gradients(optimizer), versions, strict=True)
    ]
    return scaler, {str(d): bool(f) for d, f in flags.items()}, bumps


def same(left, right):
    if left is None or right is None:
        return left is right
    if left.layout is not torch.strided:
        left, right = left._values(), right._values()
    return left.stride() == right.stride() and torch.equal(
        left.nan_to_num(nan=7.0), right.nan_to_num(nan=7.0)
    )


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("seed", range(6))
def test_any_list_of_gradients_is_unscaled_as_by_torch(seed, count):
    optimizers = [random_optimizer(1000 * seed + count, count) for _ in SCALERS]
    (_, flags, bumps), (_, torch_flags, _) = (
        unscale(kind, optimizer)
        for kind, optimizer in zip(
            (fastamp.GradScaler, torch.amp.GradScaler), optimizers, strict=True
        )
    )
    assert flags == torch_flags
    ours, torchs = (gradients(optimizer) for optimizer in optimizers)
    assert all(same(a, b) for a, b in zip(ours, torchs, strict=True))
    assert all(bump in (None, 1) for bump in bumps)


@pytest.mark.parametrize("seed", range(20))
def test_norm_and_counts_are_those_of_the_gradients(seed):
    optimizer = random_optimizer(seed, 70)
    for group in optimizer.param_groups:  # Sums of sparse duplicates are no sums of their squares.
        group["params"] = [p for p in group["params"] if p.grad is None or not p.grad.is_sparse]
    before = copy.deepcopy(gradients(optimizer))
    scaler, flags, _ = unscale(fastamp.GradScaler, optimizer)
    found = scaler._notes.record_of(optimizer).memory.latest
    wide = [g.double() for g in before if g is not None]
    if not flags["cpu"]:
        expected = torch.stack([(g / 1024).norm() for g in wide]).norm().float()
        assert found.total_norm(torch.float32).item() == pytest.approx(expected.item(), rel=1e-6)
    else:
        (counts,) = found.counts
        bad = {
            p: row.tolist()
            for p, row in zip(counts.positions, counts.counts, strict=True)
            if row.any()
        }
        expected = {
            i: [int(g.isinf().sum()), int(g.isnan().sum())]
            for i, g in enumerate(before)
            if g is not None and not g.isfinite().all()
        }
        assert bad == expected


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def plain_optimizer(count=40):
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.full((3,), 8.0)
    return types.SimpleNamespace(param_groups=[{"params": parameters}])


def test_dispatch_modes_see_the_operator():
    optimizer = plain_optimizer()
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    with Seen() as seen:
        scaler.unscale_(optimizer)
    assert seen.names.count("fastamp::unscale_and_check_") == 1
    assert all(g.eq(4.0).all() for g in gradients(optimizer))


def test_profilers_see_the_operator():
    optimizer = plain_optimizer()
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        scaler.unscale_(optimizer)
    names = [event.key for event in profile.key_averages()]
    assert "fastamp::unscale_and_check_" in names
    assert all(g.eq(4.0).all() for g in gradients(optimizer))


class Meddles(torch.nn.Parameter):
    """Runs a function when its gradient is read."""

    meddle = staticmethod(lambda: None)

    @property
    def grad(self):
        type(self).meddle()
        return torch.Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, value):
        torch.Tensor.grad.__set__(self, value)


def with_meddler(count):
    optimizer = plain_optimizer(count)
    meddler = Meddles(torch.zeros(3))
    torch.Tensor.grad.__set__(meddler, torch.full((3,), 8.0))
    optimizer.param_groups[0]["params"].append(meddler)
    return optimizer


@pytest.mark.parametrize("count", [1, 40])
def test_a_gradient_that_moves_while_others_are_collected_is_unscaled_where_it_is(
    monkeypatch, count
):
    optimizer = with_meddler(count)
    first = gradients(optimizer)[0]
    left = first.detach().clone()
    old = torch.empty(0).set_(first.untyped_storage())

    def move():
        first.set_(torch.full((5000,), 6.0))

    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    monkeypatch.setattr(Meddles, "meddle", staticmethod(move))
    scaler.unscale_(optimizer)
    assert first.shape == (5000,)
    assert first.eq(3.0).all()
    assert torch.equal(old, left)


def test_a_list_that_shrinks_while_it_is_read_is_read_to_its_new_end(monkeypatch):
    optimizer = with_meddler(40)
    parameters = optimizer.param_groups[0]["params"]
    parameters.extend(plain_optimizer(80).param_groups[0]["params"])
    last = parameters[-1]
    monkeypatch.setattr(
        Meddles, "meddle", staticmethod(lambda: parameters.__delitem__(slice(50, None)))
    )
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    assert len(parameters) == 50
    monkeypatch.setattr(Meddles, "meddle", staticmethod(lambda: None))
    assert all(g.eq(4.0).all() for g in gradients(optimizer))
    assert last.grad.eq(8.0).all()


def test_a_copy_on_write_gradient_is_copied_when_it_is_written_and_not_before():
    optimizer = plain_optimizer(2)
    source = torch.full((3,), 8.0)
    gradient = torch._lazy_clone(source)
    optimizer.param_groups[0]["params"][1].grad = gradient
    one = torch.ones(())
    _C.check_gradients(optimizer, one, torch.zeros(()), None, None)
    assert torch._C._is_cow_tensor(gradient)
    unscale(fastamp.GradScaler, optimizer, scale=2.0)
    assert gradient.eq(4.0).all()
    assert source.eq(8.0).all()


def test_gradients_made_in_inference_mode_are_unscaled():
    optimizer = plain_optimizer(40)
    with torch.inference_mode():
        made = torch.full((3,), 8.0)
    with torch.inference_mode():
        optimizer.param_groups[0]["params"][7].grad = made
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    assert all(g.eq(4.0).all() for g in gradients(optimizer))
    assert _C.recent_norm(_C.gather_optimizer(optimizer, False), torch.float32) is None


def test_a_gradient_shared_by_two_parameters_is_unscaled_for_each_as_by_torch():
    results = []
    for kind in (fastamp.GradScaler, torch.amp.GradScaler):
        for shared in (torch.full((3,), 8.0), torch.full((4, 4), 8.0)[:, 1]):
            optimizer = plain_optimizer(2)
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.data = torch.zeros_like(shared)
                parameter.grad = shared
            unscale(kind, optimizer, scale=2.0)
            results.append(shared.tolist())
    assert results[:2] == results[2:]


@pytest.mark.parametrize("kind", SCALERS)
def test_gradients_that_are_still_to_be_negated_are_refused_before_any_is_written(kind):
    optimizer = plain_optimizer(40)
    optimizer.param_groups[0]["params"][33].grad = torch._neg_view(torch.full((3,), 8.0))
    with pytest.raises(RuntimeError, match="negation"):
        unscale(kind, optimizer, scale=2.0)
    assert all(g.abs().eq(8.0).all() for g in gradients(optimizer))
