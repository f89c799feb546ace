# SPDX-License-Identifier: Apache-2.0
"""Every kind of tensor, through every op of the table: torch's kernels and fastamp's agree."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fastamp
from support.autocast_state import torch_kernels
from support.op_arguments import Call, calls_of_the_table
from support.tensor_kinds import KINDS, Convert, convert, home_of, nested, plain_parts
from support.torch_lists import cpu_cases, same

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def fresh_memory_holds_nan() -> Iterator[None]:
    """Without it, ops that read what was in fresh memory (``linalg_lstsq``) differ between runs."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    found = calls_of_the_table()
    assert len(found) > 80
    listed = [
        Call(case.op, "listed", lambda *args, case=case: case._replace(args=args).call(), case.args)
        for case in cpu_cases(BF16)
        if case.op != "__div__" and not case.kwargs
    ]
    return found + listed


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return plain_parts(call())
    except Exception as error:
        # Each jagged tensor has a size of its own name, j1, j2, ...
        return type(error), re.sub(r"\bj\d+", "j", str(error).partition("\n")[0])


def differing(calls: list[Call], run: Callable[[], list[Any]]) -> list[Any]:
    """Calls where our kernels differ from torch's, among those where torch's agree with themselves.

    Some ops return what was in fresh memory, where a tensor has no numbers.
    """
    expected = []
    with torch_kernels():
        for _ in range(2):
            with torch.autocast("cpu", dtype=BF16):
                torch.manual_seed(0)
                expected.append(run())
    with fastamp.autocast("cpu", dtype=BF16):
        torch.manual_seed(0)
        got = run()
    outcomes = list(zip(calls, *expected, got, strict=True))
    certain = [(call, e, g) for call, e, again, g in outcomes if agree(e, again)]
    assert len(certain) > 0.9 * len(calls)
    return [(call.op, e, g) for call, e, g in certain if not agree(e, g)]


def agree(expected: Any, got: Any) -> bool:
    if isinstance(expected, tuple) or isinstance(got, tuple):
        return bool(expected == got)
    return same(expected, got)


def of_kind(args: tuple[Any, ...], how: Convert, only_first: bool) -> Any:
    """The arguments, or nothing where they cannot be of this kind."""
    try:
        if only_first:
            return (convert(args[0], how), *args[1:])
        return convert(args, how)
    except Exception:
        return None


@pytest.mark.parametrize("only_first", [True, False], ids=["first", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_op_of_the_table_does_what_torchs_kernel_does(
    kind: str, only_first: bool, calls: list[Call]
):
    def run() -> list[Any]:
        return [outcome(lambda c=call, a=a: c.function(*a)) for call, a in converted]

    with home_of(kind):
        both = ((call, of_kind(call.args, KINDS[kind], only_first)) for call in calls)
        converted = [(call, args) for call, args in both if args is not None]
        assert len(converted) > 20
        assert not differing([call for call, _ in converted], run)


def leaves(value: Any) -> list[torch.Tensor]:
    flat = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in flat if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def with_gradients(call: Call, how: Convert, only_first: bool) -> Any:
    """The op twice on one set of leaves, then backward: how often each was cast is in the bits."""
    args = convert(call.args, lambda t: t.detach().float())
    args = (convert(args[0], how), *args[1:]) if only_first else convert(args, how)
    for leaf in leaves(args):
        leaf.requires_grad_()
    first, second = call.function(*args), call.function(*args)
    # Unlike factors, or the sum of two gradients is the same in every precision.
    total = sum(
        (0.7 + 0.3 * i)
        * sum(piece.sum() for piece in (part.unbind() if part.is_nested else [part]))
        for i, part in enumerate(leaves([first, second]))
        if part.requires_grad
    )
    torch.autograd.backward(total)
    return [first, [leaf.grad for leaf in leaves(args)]]


@pytest.mark.parametrize("only_first", [True, False], ids=["first", "all"])
@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("quantized", "inference")])
def test_gradients_of_leaves_used_twice_are_torchs(kind: str, only_first: bool, calls: list[Call]):
    lowered = [call for call in calls if call.policy in ("lower", "listed", "promote")]

    def run() -> list[Any]:
        return [outcome(lambda c=c: with_gradients(c, KINDS[kind], only_first)) for c in lowered]

    with home_of(kind):
        assert not differing(lowered, run)


def batched_call(call: Call) -> Any:
    stacked = torch.stack([call.args[0], call.args[0] * 2])
    return torch.func.vmap(lambda first: call.function(first, *call.args[1:]))(stacked)


def test_every_op_under_vmap_does_what_torchs_kernel_does(calls: list[Call]):
    batched = [call for call in calls if isinstance(call.args[0], torch.Tensor)]
    assert not differing(
        batched, lambda: [outcome(lambda c=call: batched_call(c)) for call in batched]
    )


def test_a_trace_of_a_tensor_that_does_not_say_its_size_counts_no_bytes():
    x = KINDS["secretive"](torch.randn(4, 4))
    with fastamp.debug.trace() as trace, fastamp.autocast("cpu"):
        out = torch.mm(x, x)
    assert out.dtype == BF16
    assert trace.totals["other_casts"] == 2


# -- strided nested tensors, as models use them ----------------------------------------------------


def make_nested(width: int = 8, **kwargs: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(length, width, generator=generator) for length in (3, 5)]
    return torch.nested.nested_tensor(parts, **kwargs)


def linear_in_training() -> Any:
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8)
    x = make_nested(requires_grad=True)
    out = layer(layer(x))
    sum(part.float().sum() for part in out.unbind()).backward()
    return [out, x.grad, layer.weight.grad, layer.bias.grad]


def attention() -> Any:
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(2, length, 4, generator=generator) for length in (3, 5)]
    q = torch.nested.nested_tensor(heads)
    return torch.nn.functional.scaled_dot_product_attention(q, q, q)


def attention_module() -> Any:
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = make_nested()
    with torch.no_grad():
        return module(x, x, x, need_weights=False)[0]


def encoder_with_padding_mask() -> Any:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 5, 8)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    with torch.no_grad():
        return encoder(x, src_key_padding_mask=mask)


def bmm() -> Any:
    x = make_nested()
    return torch.bmm(x, x.transpose(1, 2))


MODELS = [linear_in_training, bmm, attention, attention_module, encoder_with_padding_mask]


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no_cache"])
@pytest.mark.parametrize("model", MODELS)
def test_strided_nested_tensors_go_through_models(model: Callable[[], Any], cache: bool):
    with torch_kernels(), torch.autocast("cpu", dtype=BF16, cache_enabled=cache):
        expected = outcome(model)
    with fastamp.autocast("cpu", dtype=BF16, cache_enabled=cache):
        got = outcome(model)
    with torch.autocast("cpu", dtype=BF16, cache_enabled=cache):
        under_torchs_region = outcome(model)
    if model is encoder_with_padding_mask:  # Deliberate: torch's CPU regions cannot do it.
        assert expected[0] is RuntimeError
        assert BF16 in got
        expected = got
    assert agree(expected, got)
    assert agree(expected, under_torchs_region)


def test_linear_and_attention_take_strided_nested_tensors():
    """The test above compares results, and not only refusals."""
    with fastamp.autocast("cpu", dtype=BF16):
        assert linear_in_training()[0].dtype == BF16
        assert attention().dtype == BF16
        attention_module()


def test_a_nested_leaf_is_cast_once_per_region_and_anew_when_edited():
    x = nested(torch.randn(4, 4)).requires_grad_()
    w = torch.randn(4, 4)
    with fastamp.debug.trace() as trace, fastamp.autocast("cpu", dtype=BF16):
        first = torch.nn.functional.linear(x, w)
        torch.nn.functional.linear(x, w)
        with torch.no_grad():
            x.mul_(2)
        third = torch.nn.functional.linear(x, w)
    assert trace.totals["weight_casts"] == 2
    assert trace.totals["cache_hits"] == 1
    for before, after in zip(first.unbind(), third.unbind(), strict=True):
        assert torch.equal(after, before * 2)


def test_casts_can_be_kept_of_a_module_with_parameters_of_odd_kinds():
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = torch.nn.Linear(4, 4)
            self.nested = torch.nn.Parameter(nested(torch.randn(4, 4)))
            self.sparse = torch.nn.Parameter(torch.eye(4).to_sparse())

        def forward(self, x: torch.Tensor) -> Any:
            return [
                self.dense(x),
                torch.nn.functional.linear(self.nested, self.dense.weight),
                torch.sparse.mm(self.sparse.float(), self.dense.weight.float()),
            ]

    torch.manual_seed(0)
    module, x = Odd(), torch.randn(4, 4)
    with fastamp.autocast("cpu", dtype=BF16):
        plain = outcome(lambda: module(x))
    with fastamp.casts.keep(module), fastamp.casts.together(module):
        for _ in range(3):
            with fastamp.autocast("cpu", dtype=BF16):
                kept = outcome(lambda: module(x))
    assert not isinstance(plain, tuple), plain
    assert same(plain, kept)
