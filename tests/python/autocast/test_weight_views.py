# SPDX-License-Identifier: Apache-2.0
"""A view of a whole weight, such as ``w.t()``, shares the cast of the weight; bits are torch's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import fastamp
from support.autocast_state import TORCH_LOSES_GRADIENTS, torch_kernels

BF16 = torch.bfloat16

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "transpose": lambda w: w.transpose(0, 1),
    "permute": lambda w: w.permute(1, 0),
    "t of t": lambda w: w.t().t(),
    "view": lambda w: w.view(4, 16).view(8, 8),
    "unsqueeze": lambda w: w.unsqueeze(0).squeeze(0),
    "flatten": lambda w: w.view(-1).view(8, 8).t(),
}


def weight(requires_grad: bool = True) -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(1)
    return torch.nn.Parameter(torch.randn(8, 8, generator=generator), requires_grad)


def activation(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def casts(run: Callable[[], Any]) -> int:
    """Casts of weights that ``run`` makes."""
    with fastamp.debug.trace() as trace:
        run()
    return trace.totals["weight_casts"]


def in_region(function: Callable[[], Any]) -> Any:
    with fastamp.autocast("cpu", dtype=BF16):
        return function()


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_of_a_weight_is_cast_once_and_shares_the_weights_cast(view: Any):
    w, x = weight(), activation()
    assert casts(lambda: in_region(lambda: [x @ view(w) for _ in range(3)])) == 1
    assert casts(lambda: in_region(lambda: [x @ view(w), functional.linear(x, w)])) == 1
    assert casts(lambda: in_region(lambda: [functional.linear(x, w), x @ view(w)])) == 1


USES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "t": lambda x, w: x @ w.t(),
    "plain": functional.linear,
    "mm": lambda x, w: torch.mm(x, w.view(8, 8)),
    "row": lambda x, w: functional.linear(x, w[2:3]).expand(4, 8),
    "fp32": lambda x, w: x + w[:4] * 0.37,
    "t without grad": lambda x, w: torch.no_grad()(lambda: x @ w.t())(),
    "plain without grad": lambda x, w: torch.no_grad()(lambda: functional.linear(x, w))(),
}


def train(w: torch.Tensor, uses: tuple[str, ...]) -> list[torch.Tensor]:
    w.grad = None
    outputs = []
    with torch.autocast("cpu", dtype=BF16):
        h = activation()
        for use in uses:
            h = USES[use](h, w)
            outputs.append(h)
        loss = sum((out.float() ** 3).sum() for out in outputs)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
        outputs.append(w.grad)  # type: ignore[arg-type]
    return outputs


@pytest.mark.parametrize("uses", list(itertools.product(USES, repeat=3)), ids="-".join)
def test_bits_are_torchs_whatever_uses_a_weight_in_which_order(uses: tuple[str, ...]):
    of_fastamp = train(weight(), uses)
    with torch_kernels(), pytest.MonkeyPatch.context() as patch:
        if TORCH_LOSES_GRADIENTS:  # As a later torch has it: the cast has a history.
            linear = functional.linear
            patch.setitem(USES, "plain without grad", lambda x, w: linear(x, w).detach())
        of_torch = train(weight(), uses)
    assert len(of_fastamp) == len(of_torch)
    for mine, torchs in zip(of_fastamp, of_torch, strict=True):
        assert mine.dtype == torchs.dtype
        assert torch.equal(mine, torchs)


class Tied(torch.nn.Module):
    """A language model's way with a weight: looked up twice, then multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 8)
        self.block = torch.nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor, *, embed_twice: bool) -> torch.Tensor:
        h = self.embedding(tokens)
        if embed_twice:
            h = h * self.embedding(tokens.flip(0))
        return functional.linear(self.block(h), self.embedding.weight)


def tied_gradients(seed: int, before: Callable[[Tied], Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    model = Tied()
    tokens = torch.randint(16, (12,))
    for _ in range(2):  # From the second region on, casts may be made together.
        model.zero_grad()
        with torch.autocast("cpu", dtype=BF16):
            before(model)
            loss = functional.cross_entropy(model(tokens, embed_twice=True), tokens)
        loss.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in model.named_parameters()}  # type: ignore[misc]


@torch.no_grad()
def evaluate(model: Tied) -> None:
    model(torch.arange(12), embed_twice=False)


def do_nothing(model: Tied) -> None:
    """Lets the weight be used with gradients first."""


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("before", [evaluate, do_nothing])
@pytest.mark.parametrize("keeper", [None, fastamp.casts.together, fastamp.casts.keep])
def test_gradients_of_a_tied_weight_are_summed_in_torchs_order(seed: int, before: Any, keeper: Any):
    def follow(model: Tied) -> None:
        if keeper is not None and not hasattr(model, "handle"):
            object.__setattr__(model, "handle", keeper(model))
        before(model)

    of_fastamp = tied_gradients(seed, follow)
    if TORCH_LOSES_GRADIENTS:  # As a later torch has it: the cast has a history.
        before = getattr(before, "__wrapped__", before)
    with torch_kernels():
        of_torch = tied_gradients(seed, before)
    for name, gradient in of_torch.items():
        assert torch.equal(of_fastamp[name], gradient), name


def test_an_edit_of_the_weight_ends_the_cast_that_its_views_share():
    w, x = weight(), activation()
    with fastamp.autocast("cpu", dtype=BF16), torch.no_grad():
        x @ w.t()
        w.mul_(2)
        assert torch.equal(x @ w.t(), x.to(BF16) @ w.to(BF16).t())
        w.t().mul_(2)
        assert torch.equal(x @ w.t(), x.to(BF16) @ w.to(BF16).t())


def test_a_part_of_a_weight_is_cast_by_itself():
    w, x = weight(), activation()
    with fastamp.autocast("cpu", dtype=BF16):
        functional.linear(x, w)
        for part in (w[:4], w[:, :4].t(), w.t()[:4].t(), w[4:].reshape(4, 8)):
            out = functional.linear(x[:, : part.shape[1]], part)
            by_hand = functional.linear(x[:, : part.shape[1]].to(BF16), part.detach().to(BF16))
            assert torch.equal(out, by_hand)


def test_views_of_other_leaves_and_in_inference_mode():
    w, x = weight(), activation()
    frozen = weight(requires_grad=False)
    expected = x.to(BF16) @ w.detach().to(BF16).t()
    assert casts(lambda: in_region(lambda: x @ frozen.t())) == 0
    with fastamp.autocast("cpu", dtype=BF16):
        with torch.inference_mode():
            out = x @ w.t()
            assert out.is_inference()
            assert torch.equal(out, expected)
            assert torch.equal(functional.linear(x, w), expected)
        after = x @ w.t()
        assert torch.equal(after, expected)
        after.float().sum().backward()
    assert w.grad is not None


@pytest.mark.filterwarnings("ignore:.*[Oo]verriding a previously registered kernel")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_casts_of_views_require_gradients_where_torchs_do(mode: Any):
    # Ops look at it: matmul chooses its kernel by it.
    x, view = activation().to(BF16), weight().t()
    required = []

    def product(_x: torch.Tensor, cast: torch.Tensor) -> torch.Tensor:
        required.append(cast.requires_grad)
        return torch.zeros(4, 8, dtype=BF16)

    def run() -> None:
        with torch.autocast("cpu", dtype=BF16), mode():
            torch.mm(x, view)

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", product, "CPU")
    try:
        run()
        with torch_kernels():
            run()
    finally:
        library._destroy()
    assert required[0] == required[1]


@pytest.mark.parametrize("requires_grad", [True, False])
def test_kept_casts_serve_views_in_later_regions(requires_grad: bool):
    w, x = weight(requires_grad), activation()
    module = torch.nn.Module()
    module.w = w
    with fastamp.casts.keep(module):
        assert casts(lambda: in_region(lambda: x @ w.t())) == 1
        assert casts(lambda: in_region(lambda: x @ w.t())) == 0
        with torch.inference_mode():
            assert casts(lambda: in_region(lambda: x @ w.t())) == 0


def test_a_steps_copies_of_weights_serve_views():
    w, x = weight(), activation()
    optimizer = fastamp.optim.SGD([w], lr=0.1, autocast_dtype=BF16)

    def step() -> None:
        optimizer.zero_grad()
        in_region(lambda: x @ w.t()).float().sum().backward()
        optimizer.step()

    step()
    step()
    assert casts(step) == 0
    out = in_region(lambda: x @ w.t())
    assert torch.equal(out, x.to(BF16) @ w.detach().to(BF16).t())


def test_an_op_that_can_return_its_argument_gets_a_cast_of_its_own():
    def gradients() -> tuple[torch.Tensor | None, torch.Tensor | None]:
        w, x = weight(), activation().requires_grad_()
        with torch.autocast("cpu", dtype=BF16):
            out = x @ w.t()
            with torch.no_grad():
                torch.einsum("ij->ij", w.t()).add_(1)
            out.float().sum().backward()
        return w.grad, x.grad

    of_fastamp = gradients()
    with torch_kernels():
        of_torch = gradients()
    assert all(torch.equal(mine, torchs) for mine, torchs in zip(of_fastamp, of_torch, strict=True))
