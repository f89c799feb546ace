# SPDX-License-Identifier: Apache-2.0
"""Relations between two runs of fastamp, whose answers are known without a reference."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

import fastamp
from nets.all_ops import same_bits
from nets.relations import Case, train
from nets.rounds import rounds

CASES = 40  # of each relation, in a round


def seeds() -> range:
    return range(CASES * rounds())


def assert_same(case: Case, own: list[torch.Tensor], torchs: list[torch.Tensor]) -> None:
    for i, (a, b) in enumerate(zip(own, torchs, strict=True)):
        assert same_bits(a, b), f"Case({case.seed}), parameter {i}: {a} != {b}"


def norms(reported: list[Any]) -> list[float]:
    return [value.item() for value in reported if isinstance(value, torch.Tensor)]


def others(reported: list[Any]) -> list[Any]:
    return [value for value in reported if not isinstance(value, torch.Tensor)]


def in_range(case: Case) -> bool:
    """Whether a scale of 2^9 more keeps the scaled gradients of all dtypes in their range."""
    return all(value.dtype != torch.float16 for value in case.values)


def test_a_scale_of_another_power_of_two_changes_nothing():
    compared = 0
    for seed in seeds():
        case = Case(seed)
        if not in_range(case):
            continue
        compared += 1
        own, reported = train(case, scale=2.0**10)
        for scale in (1.0, 2.0**3, 2.0**19):
            torchs, others_reported = train(case, scale=scale)
            assert_same(case, own, torchs)
            assert str(reported) == str(others_reported), f"Case({seed})"
    assert compared > 5


def test_the_order_of_parameters_changes_nothing():
    for seed in seeds():
        case = Case(seed, exact=True)
        order = list(range(len(case.values)))
        case.draw.shuffle(order)
        own, reported = train(case)
        torchs, others_reported = train(
            case,
            values=[case.values[i] for i in order],
            gradients=[[step[i] for i in order] for step in case.gradients],
        )
        assert_same(case, [own[i] for i in order], torchs)
        assert str(reported) == str(others_reported), f"Case({seed})"


def test_groups_split_in_any_way_change_nothing():
    for seed in seeds():
        case = Case(seed, exact=True)

        def split(params: list[torch.nn.Parameter], case: Case = case) -> list[dict[str, Any]]:
            groups: list[dict[str, Any]] = []
            for param in params:
                if groups and case.draw.random() < 0.5:
                    groups[-1]["params"].append(param)
                else:
                    groups.append({"params": [param]})
            case.draw.shuffle(groups)
            return groups

        own, reported = train(case)
        torchs, others_reported = train(case, groups=split)
        assert_same(case, own, torchs)
        assert str(reported) == str(others_reported), f"Case({seed})"


def test_parameters_with_zero_gradients_change_nothing_for_others():
    for seed in seeds():
        case = Case(seed)
        extra = [torch.randn(case.draw.choice((1, 31, 2049))) for _ in range(2)]
        at = case.draw.randrange(len(case.values) + 1)

        def padded(
            tensors: list[torch.Tensor], by: list[torch.Tensor], at: int = at
        ) -> list[torch.Tensor]:
            return [*tensors[:at], *by, *tensors[at:]]

        own, reported = train(case)
        torchs, others_reported = train(
            case,
            values=padded(case.values, extra),
            gradients=[padded(s, [torch.zeros_like(e) for e in extra]) for s in case.gradients],
        )
        del torchs[at : at + 2]
        assert others(reported) == others(others_reported), f"Case({seed})"
        for a, b in zip(norms(reported), norms(others_reported), strict=True):
            # Zeros in between may cut the sums elsewhere.
            assert a == b or math.isclose(a, b, rel_tol=1e-6) or (a != a and b != b), (
                f"Case({seed})"
            )
        if case.clip is None:
            assert_same(case, own, torchs)


def test_parameters_joined_to_one_are_stepped_as_they_were():
    for seed in seeds():
        case = Case(seed, exact=True)
        dtype = case.values[0].dtype
        parts = [i for i, value in enumerate(case.values) if value.dtype == dtype]

        def joined(tensors: list[torch.Tensor], parts: list[int] = parts) -> list[torch.Tensor]:
            return [torch.cat([tensors[i].reshape(-1) for i in parts])]

        case.values = [case.values[i] for i in parts]
        case.gradients = [[step[i] for i in parts] for step in case.gradients]
        parts = list(range(len(parts)))
        own, reported = train(case)
        torchs, others_reported = train(
            case,
            values=joined(case.values, parts),
            gradients=[joined(step, parts) for step in case.gradients],
        )
        assert_same(case, joined(own, parts), torchs)
        assert str(reported) == str(others_reported), f"Case({seed})"


def test_any_place_of_an_overflow_skips_the_step():
    for seed in seeds():
        case = Case(seed)
        case.gradients = case.gradients[:1]
        for gradient in case.gradients[0]:
            gradient.nan_to_num_(0.0, 0.0, 0.0)
        hit = case.draw.choice(case.gradients[0])
        for value in (float("inf"), float("-inf"), float("nan")):
            at = case.draw.randrange(hit.numel())
            before = hit.view(-1)[at].clone()
            hit.view(-1)[at] = value
            own, reported = train(case)
            hit.view(-1)[at] = before
            assert others(reported) == [0.5, True], f"Case({seed})"
            assert_same(case, own, case.values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_accumulating_halves_gives_the_gradients_of_the_whole(dtype: torch.dtype):
    """On small integers, which all dtypes hold exactly."""
    for seed in seeds():
        generator = torch.Generator().manual_seed(seed)
        draw = random.Random(seed)
        rows, cols = draw.choice((2, 4, 8)), draw.choice((1, 3, 8))

        def ints(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randint(-2, 3, shape, generator=generator).float()

        weight = torch.nn.Parameter(ints(cols, 4))
        bias = torch.nn.Parameter(ints(cols))
        x, y = ints(rows, 4), ints(rows, cols)
        gradients = []
        for parts in (1, 2):
            scaler = fastamp.GradScaler("cpu", init_scale=4.0)
            weight.grad = bias.grad = None
            for some, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
                with fastamp.autocast("cpu", dtype=dtype):
                    out = torch.nn.functional.linear(some, weight, bias)
                scaler.scale((out.float() * target).sum()).backward()
            assert weight.grad is not None
            assert bias.grad is not None
            gradients.append([weight.grad.clone(), bias.grad.clone()])
        assert all(same_bits(a, b) for a, b in zip(*gradients, strict=True)), seed
        assert torch.equal(gradients[0][0], 4 * y.t() @ x), seed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norms_of_integers_are_exact_in_any_order_and_number_of_threads(dtype: torch.dtype):
    threads = torch.get_num_threads()
    try:
        for seed in seeds():
            draw = random.Random(seed)
            generator = torch.Generator().manual_seed(seed)
            sizes = [draw.choice((0, 1, 7, 16, 33, 2048, 5001, 40_000)) for _ in range(4)]
            gradients = [
                torch.randint(-128, 129, (n,), generator=generator).to(dtype) for n in sizes
            ]
            squares = sum(int((g.long() ** 2).sum()) for g in gradients)
            expected = torch.tensor(math.sqrt(squares), dtype=torch.float64).float()
            for _ in range(3):
                torch.set_num_threads(draw.choice((1, 2, 3)))
                draw.shuffle(gradients)
                params = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
                for param, gradient in zip(params, gradients, strict=True):
                    param.grad = gradient.clone()
                norm = fastamp.clip_grad_norm_(params, float("inf"))
                assert norm.float() == expected.to(norm.dtype).float(), (seed, norm, expected)
                flag = torch.zeros(())
                total = torch.zeros((), dtype=torch.float64)
                counts = torch.zeros(4, 2, dtype=torch.int64)
                torch.ops.fastamp.norm_and_check_(
                    gradients, torch.tensor(0.25), flag, total, non_finite_counts=counts
                )
                assert (flag.item(), total.item()) == (0.0, squares / 16), seed
                assert not counts.any(), seed
    finally:
        torch.set_num_threads(threads)


def test_the_device_may_have_a_number_or_none():
    for seed in seeds()[:10]:
        case = Case(seed)
        results = []
        for name in ("cpu", "cpu:0"):
            params = [torch.nn.Parameter(v.clone().to(name)) for v in case.values]
            optimizer = case.optimizer(params, **case.options)
            scaler = fastamp.GradScaler("cpu", init_scale=8.0)
            scaler.scale(torch.zeros((), device=name))
            for step in case.gradients:
                for param, gradient in zip(params, step, strict=True):
                    param.grad = (gradient * 8.0).to(name)
                scaler.step(optimizer)
                scaler.update(8.0)
            results.append([p.detach() for p in params])
        assert_same(case, *results)
