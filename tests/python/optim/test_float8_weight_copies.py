# SPDX-License-Identifier: Apache-2.0
"""fp8 weight copies: training to the bits of training without them, and regions cast no weight."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn

import fastamp
from support.copy_runs import OPTIMIZERS, Run, assert_same_run
from support.float8 import E4M3, float8_region, outcomes

pytestmark = pytest.mark.usefixtures("nothing_is_kept_afterwards")
BF16 = torch.bfloat16


class Model(nn.Module):
    """Products in fp8, in the base dtype (its sizes do not fit, or it is excluded), and neither."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 32)
        self.hidden = nn.Linear(32, 48)
        self.flat = nn.Parameter(torch.randn(48, 32) * 0.2)  # used as [K, N]
        self.norm = nn.LayerNorm(32)
        self.odd = nn.Linear(32, 20)
        self.excluded = nn.Linear(20, 16)
        self.head = nn.Linear(16, 16, bias=False)
        self.exclusion = fastamp.float8.exclude(self.excluded)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.hidden(self.embedding(tokens)))
        x = self.norm(x @ self.flat)
        return self.head(torch.relu(self.excluded(torch.relu(self.odd(x))))).mean(1)


class Training:
    """The model, an optimizer and a scaler, stepped on fixed tokens."""

    def __init__(self, optimizer: str, autocast_dtype: torch.dtype | None, **region: object):
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = OPTIMIZERS[optimizer](
            self.model.parameters(), autocast_dtype=autocast_dtype
        )
        self.scaler = fastamp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        self.region = region
        self.run = Run()
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(10, (4, 6), generator=generator)
        self.target = torch.randint(16, (4,), generator=generator)

    def forward(self) -> torch.Tensor:
        with float8_region("cpu", **self.region):
            out = self.model(self.tokens)
            self.run.seen.append(out.detach().clone())
            return nn.functional.cross_entropy(out, self.target)

    def step(self, *, overflows: bool = False, micro_steps: int = 1) -> None:
        with fastamp.debug.trace() as trace:
            for _ in range(micro_steps):
                self.scaler.scale(self.forward()).backward()
        self.run.weight_casts.append(trace.totals["weight_casts"])
        if overflows:
            self.model.head.weight.grad.view(-1)[0] = torch.inf
        self.run.seen += [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def steps(self, count: int, overflow=(), micro_steps: int = 1) -> Run:
        for step in range(count):
            self.step(overflows=step in overflow, micro_steps=micro_steps)
        self.run.seen += [p.detach().clone() for p in self.model.parameters()]
        return self.run


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("overflow", [(), (0, 1), (2, 3, 5)])
def test_the_bits_of_training_without_and_no_cast_of_a_weight(optimizer, overflow):
    own = Training(optimizer, E4M3).steps(7, overflow, micro_steps=2)
    torchs = Training(optimizer, None).steps(7, overflow, micro_steps=2)
    assert_same_run(own, torchs)
    # Three in fp8; two weights and two biases in the base dtype. Biases of fp8 products: per call.
    assert torchs.weight_casts[-1] >= 7
    assert own.weight_casts[2:] == [0] * 5


def test_in_another_base_dtype():
    own = Training("AdamW", E4M3, dtype=torch.float16).steps(5)
    assert_same_run(own, Training("AdamW", None, dtype=torch.float16).steps(5))
    assert own.weight_casts[2:] == [0] * 3


def test_a_copy_of_each_kind_and_their_bytes():
    training = Training("AdamW", E4M3)
    training.steps(3)
    kept = fastamp.casts.kept()
    both_layouts = sum(
        2 * w.numel() + 4
        for w in (training.model.hidden.weight, training.model.flat, training.model.head.weight)
    )
    carried = sum(
        2 * p.numel()
        for layer in (training.model.odd, training.model.excluded)
        for p in layer.parameters()
    )
    assert kept.bytes == both_layouts + carried
    assert kept.copies == 3 + 4


def matrix_pair(values: torch.Tensor, autocast_dtype):
    weight = nn.Parameter(values.clone())
    return weight, fastamp.optim.SGD([weight], lr=1.0, autocast_dtype=autocast_dtype)


def use(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with float8_region("cpu"):
        return nn.functional.linear(x, weight)


def weight_casts_of(weight: torch.Tensor, x: torch.Tensor) -> int:
    with fastamp.debug.trace() as trace:
        use(weight, x)
    return trace.totals["weight_casts"]


@pytest.mark.parametrize("factor", [2.0**k for k in range(-140, 121, 13)] + [0.0, 1.01, 0.99])
def test_weights_that_a_step_moves_by_any_number_of_binades(factor):
    """The step casts with the scale of before, which may be of no use for what it writes."""
    values = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    x = torch.randn(8, 48, generator=torch.Generator().manual_seed(1), requires_grad=True)
    seen = []
    for autocast_dtype in (E4M3, None):
        weight, optimizer = matrix_pair(values, autocast_dtype)
        for wanted in (values, values * factor, values):
            use(weight, x)
            weight.grad = weight.detach() - wanted
            optimizer.step()
        use(weight, x)
        weight.grad = weight.detach() - values * factor
        optimizer.step()
        out = use(weight, x)
        (dx,) = torch.autograd.grad(out.sum(), x)
        seen.append((weight.detach(), out, dx))
        assert weight_casts_of(weight, x) == (0 if autocast_dtype else 1)
    for own, torchs in zip(*seen, strict=True):
        torch.testing.assert_close(own, torchs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_weights_that_become_inf_or_nan_and_come_back(value):
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    seen = []
    for autocast_dtype in (E4M3, None):
        weight, optimizer = matrix_pair(torch.ones(16, 32), autocast_dtype)
        for wanted in (2.0, 2.0, value, 3.0, 3.0):
            out = use(weight, x)
            seen.append((autocast_dtype, out, torch.autograd.grad(out.sum(), x)[0]))
            weight.grad = torch.zeros_like(weight)
            weight.grad[3, 5] = weight.detach()[3, 5] - wanted
            with torch.no_grad():
                if not weight.isfinite().all():  # inf - inf is no way back.
                    weight[3, 5] = 0.0
                    weight.grad[3, 5] = -wanted
            optimizer.step()
    own = [entry[1:] for entry in seen if entry[0] is not None]
    torchs = [entry[1:] for entry in seen if entry[0] is None]
    assert any(not out.isfinite().all() for out, _ in own)
    for one, other in zip(own, torchs, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def stepped(autocast_dtype=E4M3):
    """A weight with an fp8 copy, its optimizer, and what it is used with."""
    weight, optimizer = matrix_pair(torch.randn(32, 16), autocast_dtype)
    x = torch.randn(4, 16, requires_grad=True)
    for _ in range(2):
        use(weight, x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert weight_casts_of(weight, x) == 0
    return weight, optimizer, x


def test_a_graph_that_outlives_the_step_has_the_old_weights():
    weight, optimizer, x = stepped()
    late, old = use(weight, x), weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight_casts_of(weight, x) == 0
    (dx,) = torch.autograd.grad(late.sum(), x)
    (expected,) = torch.autograd.grad(use(nn.Parameter(old), x).sum(), x)
    assert torch.equal(dx, expected)
    assert torch.equal(use(weight, x), use(weight.detach().clone().requires_grad_(), x))


@pytest.mark.parametrize("edit", ["in place", "data", "torch's step", "load"])
def test_weights_that_others_write_are_cast_again(edit):
    weight, optimizer, x = stepped()
    with torch.no_grad():
        if edit == "in place":
            weight.mul_(3.0)
        elif edit == "data":
            weight.data = weight.data * 3.0
        elif edit == "load":
            weight.copy_(torch.ones_like(weight))
        else:
            weight.grad = torch.ones_like(weight)
            torch.optim.SGD([weight], lr=0.5).step()
    assert torch.equal(use(weight, x), use(weight.detach().clone().requires_grad_(), x))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight_casts_of(weight, x) == 0
    assert torch.equal(use(weight, x), use(weight.detach().clone().requires_grad_(), x))


def test_the_documented_danger_ends_with_the_next_step():
    weight, optimizer, x = stepped()
    before = use(weight, x)
    weight.data.fill_(1.0)
    assert torch.equal(use(weight, x), before)  # the danger
    weight.grad = torch.ones_like(weight) * 0.5
    optimizer.step()
    assert torch.equal(use(weight, x), use(torch.full_like(weight, 0.5).requires_grad_(), x))
    weight.data.fill_(2.0)
    fastamp.casts.drop(weight)  # the way out
    assert torch.equal(use(weight, x), use(torch.full_like(weight, 2.0).requires_grad_(), x))


def test_evaluation_between_steps_uses_the_copies():
    weight, _, x = stepped()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert weight_casts_of(weight, x) == 0
            out = use(weight, x)
        assert torch.equal(out, use(weight, x))


def test_a_region_in_16_bits_after_fp8_casts_for_itself():
    weight, optimizer, x = stepped()
    with fastamp.autocast("cpu", dtype=BF16):
        out = nn.functional.linear(x, weight)
    assert torch.equal(out, nn.functional.linear(x.to(BF16), weight.to(BF16)))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight_casts_of(weight, x) == 0


@pytest.mark.parametrize("shape", [(20, 16), (16, 20), (16, 8)])
def test_a_weight_that_fp8_does_not_run_has_a_copy_in_the_base_dtype(shape):
    weight, optimizer = matrix_pair(torch.randn(shape), E4M3)
    x = torch.randn(4, shape[1], dtype=BF16)  # no weight itself
    for _ in range(2):
        use(weight, x).sum().backward()
        optimizer.step()
    assert outcomes(lambda: use(weight, x)) == ["K or N not a multiple of 16"]
    assert weight_casts_of(weight, x) == 0
    assert fastamp.casts.kept() == (1, 2 * weight.numel())


def test_no_part_of_a_checkpoint_but_of_copies_and_pickles():
    _weight, optimizer, _ = stepped()
    assert "float8" not in str(optimizer.state_dict())
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert twin._fastamp_weight_copies.dtype == E4M3


def test_threads_that_read_while_another_steps():
    weight, optimizer = matrix_pair(torch.ones(64, 64), E4M3)
    stop, wrong, judged = threading.Event(), [], []

    def read():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while not stop.is_set():
                x = torch.ones(1, 64, requires_grad=True)
                with fastamp.debug.trace() as trace, fastamp.autocast("cpu", float8=True):
                    out = nn.functional.linear(x, weight)
                # A region that finds no copy reads the weight itself, which is being written.
                if trace.totals["weight_casts"] == 0:
                    judged.append(trace.totals["kept_hits"])
                    if not bool((out == out[0, 0]).all()):
                        wrong.append(out)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(200):
            use(weight, torch.ones(1, 64))
            weight.grad = torch.full_like(weight, 2.0**-10)
            optimizer.step()
    finally:
        stop.set()
        reader.join()
    assert not wrong
    assert sum(judged) > 0
    x = torch.eye(64)
    assert torch.equal(use(weight, x), use(weight.detach().clone().requires_grad_(), x))


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float32, "fp8"])
def test_other_dtypes_are_refused(dtype):
    weight = nn.Parameter(torch.ones(16, 16))
    plain = torch.optim.SGD([weight], lr=0.1)
    for make in (
        lambda: fastamp.optim.AdamW([weight], autocast_dtype=dtype),
        lambda: fastamp.optim.fuse_(plain, autocast_dtype=dtype),
    ):
        with pytest.raises(ValueError, match=r"autocast_dtype .*torch\.float8_e4m3fn, got"):
            make()
    assert type(plain) is torch.optim.SGD


class TestTheOperator:
    """``fused_sgd_`` with fp8 copies of the caller's own."""

    @staticmethod
    def copy_with_header(scale: float, shape=(4, 8)) -> tuple[torch.Tensor, torch.Tensor]:
        memory = torch.zeros(16 + 32, dtype=torch.uint8)
        memory[:4].view(torch.float32).fill_(1 / scale)
        return memory, memory[16:].view(E4M3).view(shape)

    @staticmethod
    def step(weight, grad, weight_copy, found_inf=0.0):
        torch.ops.fastamp.fused_sgd_(
            [weight], [grad], [], [], [], [1], [1.0], [0.0], [0.0], [0.0], [False], [False], [],
            [weight_copy], [0], found_inf=torch.tensor(found_inf),
        )  # fmt: skip

    @pytest.mark.parametrize("found_inf", [0.0, 1.0])
    def test_writes_the_copy_and_the_range(self, found_inf):
        weight, grad = torch.randn(4, 8), torch.randn(4, 8)
        memory, weight_copy = self.copy_with_header(64.0)
        old = weight.clone()
        self.step(weight, grad, weight_copy, found_inf)
        header = memory[:16].view(torch.int32)
        assert memory[:4].view(torch.float32).item() == 1 / 64
        if found_inf:
            assert torch.equal(weight, old)
            assert not memory[4:].any()
            return
        assert torch.equal(weight, old - grad)
        expected = (weight * 64).clamp(-448, 448).to(E4M3)
        assert torch.equal(weight_copy.view(torch.uint8), expected.view(torch.uint8))
        assert header[1].item() == weight.abs().max().view(torch.int32).item() + 1
        assert header[2:].tolist() == [0, 0]

    def test_says_that_it_wrote_inf(self):
        memory, weight_copy = self.copy_with_header(1.0)
        grad = torch.zeros(4, 8)
        grad[2, 3] = torch.inf
        self.step(torch.ones(4, 8), grad, weight_copy)
        header = memory[:16].view(torch.int32)
        assert header[1].item() == torch.tensor(1.0).view(torch.int32).item() + 1
        assert header[2].item() == 1

    def test_refuses_copies_without_a_header(self):
        weight, grad = torch.ones(4, 8), torch.ones(4, 8)
        memory, _ = self.copy_with_header(1.0)
        for weight_copy in (torch.zeros(4, 8).to(E4M3), memory[8:40].view(E4M3).view(4, 8)):
            with pytest.raises(ValueError, match=r"fused_sgd_: .*weight_copies\[0\].* header"):
                self.step(weight, grad, weight_copy)
        assert weight.eq(1).all()

    def test_refuses_copies_that_lie_otherwise(self):
        weight = torch.ones(4, 8)
        _, weight_copy = self.copy_with_header(1.0, shape=(8, 4))
        with pytest.raises(ValueError, match=r"fused_sgd_: .*weight_copies\[0\].* strides"):
            self.step(weight, torch.ones(4, 8), weight_copy.t())
        assert weight.eq(1).all()
