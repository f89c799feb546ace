# SPDX-License-Identifier: Apache-2.0
"""Which weights have weight copies, for how long, and what optimizers say of them."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch

import fastamp
from support.kept_casts import casts_of, use

pytestmark = pytest.mark.usefixtures("nothing_is_kept_afterwards")
BF16 = torch.bfloat16


def make_weight(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(6.0).reshape(*shape or (3, 2)))


def step(optimizer, *weights):
    for weight in weights:
        use(weight).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_memory_goes_with_the_optimizer():
    weight = make_weight()
    optimizer = fastamp.optim.AdamW([weight], autocast_dtype=BF16)
    assert fastamp.casts.kept() == (0, 0)
    for _ in range(3):
        step(optimizer, weight)
    assert fastamp.casts.kept() == (1, 12)
    del optimizer
    gc.collect()
    assert fastamp.casts.kept() == (0, 0)
    assert casts_of(lambda: use(weight)) == (1, 0)


def test_memory_goes_with_the_weight():
    weight, other = make_weight(), make_weight()
    optimizer = fastamp.optim.SGD([weight, other], lr=0.1, autocast_dtype=BF16)
    for _ in range(2):
        step(optimizer, weight, other)
    assert fastamp.casts.kept().copies == 2
    optimizer.param_groups[0]["params"] = [other]
    del weight
    gc.collect()
    assert fastamp.casts.kept() == (1, 12)
    step(optimizer, other)
    assert casts_of(lambda: use(other)) == (0, 1)


def test_weights_that_no_region_casts_have_none():
    table = torch.nn.Embedding(5, 3)
    weight, norm = make_weight(), torch.nn.LayerNorm(3)
    optimizer = fastamp.optim.SGD(
        [weight, *table.parameters(), *norm.parameters()], lr=0.1, autocast_dtype=BF16
    )
    for _ in range(3):
        with fastamp.autocast("cpu"):
            out = norm(table(torch.tensor([0, 1]))) @ weight
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert fastamp.casts.kept() == (1, 12)


def test_groups_added_later():
    weight, late = make_weight(), make_weight()
    optimizer = fastamp.optim.SGD([weight], lr=0.1, momentum=0.9, autocast_dtype=BF16)
    step(optimizer, weight)
    optimizer.add_param_group({"params": [late], "lr": 0.2})
    for _ in range(2):
        step(optimizer, weight, late)
    assert casts_of(lambda: [use(weight), use(late)]) == (0, 2)


def test_a_weight_without_a_gradient_keeps_its_weight_copy():
    weight, idle = make_weight(), make_weight()
    optimizer = fastamp.optim.SGD([weight, idle], lr=0.1, autocast_dtype=BF16)
    for _ in range(2):
        step(optimizer, weight, idle)
    for _ in range(3):
        step(optimizer, weight)
    assert casts_of(lambda: [use(weight), use(idle)]) == (0, 2)


def strided():
    return torch.nn.Parameter(torch.arange(12.0).reshape(3, 4)[:, ::2])


def transposed():
    return torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t())


def in_bfloat16():
    return torch.nn.Parameter(torch.arange(6.0).reshape(3, 2).to(BF16))


def in_float64():
    return torch.nn.Parameter(torch.arange(6.0).reshape(3, 2).double())


class Marked(torch.Tensor):
    pass


def of_a_subclass():
    return torch.arange(6.0).reshape(3, 2).as_subclass(Marked).requires_grad_()


@pytest.mark.parametrize(
    ("make", "copies"),
    [(strided, 0), (transposed, 1), (in_bfloat16, 0), (in_float64, 0), (of_a_subclass, 0)],
)
def test_what_has_no_weight_copy_trains_as_ever(make, copies):
    def run(autocast_dtype):
        weight = make()
        optimizer = fastamp.optim.SGD([weight], lr=0.5, momentum=0.5, autocast_dtype=autocast_dtype)
        outs = []
        for _ in range(4):
            with fastamp.autocast("cpu"):
                narrow = weight if weight.dtype is not torch.float64 else weight.float()
                outs.append(torch.mm(torch.ones(1, 3, dtype=BF16), narrow))
            outs[-1].float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if autocast_dtype is not None:
            assert fastamp.casts.kept().copies == copies
        return [torch.Tensor(t.detach()) for t in (*outs, weight)]

    assert all(torch.equal(a, b) for a, b in zip(run(BF16), run(None), strict=True))


def test_sparse_gradients_and_differentiable_groups():
    weight = make_weight()
    optimizer = fastamp.optim.SGD([weight], lr=0.5, autocast_dtype=BF16)
    for _ in range(2):
        step(optimizer, weight)
    weight.grad = torch.ones(3, 2).to_sparse()
    optimizer.step()
    assert torch.equal(use(weight), weight.detach().to(BF16).sum(0, keepdim=True))
    for _ in range(2):
        step(optimizer, weight)
    assert casts_of(lambda: use(weight)) == (0, 1)


def test_a_parameter_listed_twice_is_right():
    weight = make_weight()
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = fastamp.optim.SGD([weight, weight], lr=0.5, autocast_dtype=BF16)
    with fastamp.casts.keep(weight):
        for _ in range(3):
            step(optimizer, weight)
            assert torch.equal(use(weight), weight.detach().to(BF16).sum(0, keepdim=True))


def test_steps_in_inference_mode():
    weight = make_weight()
    optimizer = fastamp.optim.SGD([weight], lr=0.5, autocast_dtype=BF16)
    for _ in range(4):
        use(weight).sum().backward()
        with torch.inference_mode():
            optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(use(weight), weight.detach().to(BF16).sum(0, keepdim=True))


def test_regions_without_a_cache_and_with_profiler():
    weight = make_weight()
    optimizer = fastamp.optim.SGD([weight], lr=0.5, autocast_dtype=BF16)
    for _ in range(3):
        with fastamp.autocast("cpu", cache_enabled=False):
            torch.mm(torch.ones(1, 3, dtype=BF16), weight).sum().backward()
        optimizer.step()
    assert fastamp.casts.kept() == (0, 0)
    with torch.profiler.profile():
        for _ in range(3):
            step(optimizer, weight)
    assert torch.equal(use(weight), weight.detach().to(BF16).sum(0, keepdim=True))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_of_optimizers_have_weight_copies_of_their_own(duplicate):
    optimizer = fastamp.optim.AdamW([make_weight()], autocast_dtype=BF16)
    twin = duplicate(optimizer)
    (weight,) = twin.param_groups[0]["params"]
    for _ in range(2):
        step(twin, weight)
    assert casts_of(lambda: use(weight)) == (0, 1)
    assert duplicate(fastamp.optim.AdamW([make_weight()]))._fastamp_weight_copies is None
    assert "_fastamp_autocast_dtype" not in twin.__dict__


def test_a_failed_step_leaves_right_casts():
    weight = make_weight()
    optimizer = fastamp.optim.SGD([weight], lr=0.5, momentum=0.9, autocast_dtype=BF16)
    for _ in range(2):
        step(optimizer, weight)
    good = optimizer.state[weight]["momentum_buffer"]
    optimizer.state[weight]["momentum_buffer"] = torch.zeros(7)
    with pytest.raises(ValueError, match="momentum_buffers"):
        step(optimizer, weight)
    assert torch.equal(use(weight), weight.detach().to(BF16).sum(0, keepdim=True))
    optimizer.state[weight]["momentum_buffer"] = good
    step(optimizer, weight)
    assert casts_of(lambda: use(weight)) == (0, 1)


def test_a_subclass_with_a_step_of_its_own_is_never_trusted():
    class Scaled(fastamp.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.mul_(0.5)

    weight = make_weight()
    optimizer = Scaled([weight], lr=0.5, autocast_dtype=BF16)
    for _ in range(3):
        step(optimizer, weight)
        assert torch.equal(use(weight), weight.detach().to(BF16).sum(0, keepdim=True))


def test_fuse_():
    weight = make_weight()
    optimizer = torch.optim.SGD([weight], lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    fastamp.optim.fuse_(optimizer, autocast_dtype=BF16)
    for _ in range(2):
        step(optimizer, weight)
        schedule.step()
    assert casts_of(lambda: use(weight)) == (0, 1)
    fastamp.optim.fuse_(optimizer)
    assert optimizer._fastamp_weight_copies.dtype is BF16
    fastamp.optim.fuse_(optimizer, autocast_dtype=torch.float16)
    assert optimizer._fastamp_weight_copies.dtype is torch.float16
    assert fastamp.casts.kept() == (0, 0)


@pytest.mark.parametrize("wrong", [torch.float32, torch.float64, "bfloat16", 16])
def test_other_dtypes_are_refused(wrong):
    message = "expected autocast_dtype to be None, torch.float16, torch.bfloat16 or torch.float8_"
    for make in (fastamp.optim.SGD, fastamp.optim.Adam, fastamp.optim.AdamW):
        with pytest.raises(ValueError, match=f"{make.__name__}: {message}"):
            make([make_weight()], lr=0.1, autocast_dtype=wrong)
    plain = torch.optim.SGD([make_weight()], lr=0.1)
    with pytest.raises(ValueError, match=f"fuse_: {message}"):
        fastamp.optim.fuse_(plain, autocast_dtype=wrong)
    assert type(plain) is torch.optim.SGD


@pytest.mark.graph
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_step_ends_the_weight_copies():
    weight = torch.nn.Parameter(torch.arange(6.0, device="cuda").reshape(3, 2))
    optimizer = fastamp.optim.SGD([weight], lr=0.5, autocast_dtype=BF16)

    def sums():
        with fastamp.autocast("cuda", dtype=BF16):
            return torch.mm(torch.ones(1, 3, dtype=BF16, device="cuda"), weight)

    def train():
        sums().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train()
    assert fastamp.casts.kept() == (0, 0)
    for _ in range(3):
        graph.replay()
        assert torch.equal(sums(), weight.detach().to(BF16).sum(0, keepdim=True))
