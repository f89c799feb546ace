# SPDX-License-Identifier: Apache-2.0
"""Second micro-batches in fp8 where torch's op adds the product to the gradient: a program.

Its argument is a device, for which it registers the op. It prints, as JSON, for each case which
ops on the weight's gradient were run, and what else is to be known of it.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastamp
from support import scaled_addmm

RECIPE = fastamp.float8.Recipe(small_size=(0, 0))
ROWS, IN, OUT = 16, 48, 32
SIZES = {(OUT, IN), (IN, OUT), (IN, IN)}  # of weights
Case = Callable[[], dict[str, Any]]
CASES: dict[str, Case] = {}
device = sys.argv[1] if __name__ == "__main__" else "cpu"


class Seen(TorchDispatchMode):
    """Notes the ops that read or return a matrix of a weight's size."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in (*args, result) if isinstance(t, torch.Tensor)]
        if any(t.dtype.itemsize > 1 and (*t.shape,) in SIZES for t in tensors):
            self.ops.append(func.__name__)
        return result


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def layer(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(IN, OUT).to(device, dtype)


def loss_of(weight: torch.Tensor, bias: torch.Tensor | None, seed: int) -> torch.Tensor:
    x = torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(seed)).to(device)
    with fastamp.autocast(device, dtype=torch.bfloat16, float8=RECIPE):
        y = nn.functional.linear(x, weight, bias)
    return y.float().square().mean()


def loss(made: nn.Linear, seed: int) -> torch.Tensor:
    return loss_of(made.weight, made.bias, seed)


def run(call: Callable[[], Any]) -> list[str]:
    """Returns the ops that a call runs, under a mode: without one the CPU does not call torch's."""
    with Seen() as seen:
        call()
    return seen.ops


def apart(made: nn.Linear, seed: int) -> None:
    """Adds a gradient in a pass of its own: a hook may see it."""
    handle = made.weight.register_hook(lambda _: None)
    loss(made, seed).backward()
    handle.remove()


def three_micro_batches(made: nn.Linear, same: nn.Linear) -> dict[str, Any]:
    ops, versions = [], []
    for seed in range(3):
        value = loss(made, seed)
        ops.append(run(value.backward))
        apart(same, seed)
        versions.append(made.weight.grad._version)
    return {
        "ops": ops,
        "equal": torch.equal(made.weight.grad, same.weight.grad)
        and torch.equal(made.bias.grad, same.bias.grad),
        "versions": versions,
        "dtype": str(made.weight.grad.dtype),
    }


@case
def float32_weights() -> dict[str, Any]:
    return three_micro_batches(layer(), layer())


@case
def low_precision_weights() -> dict[str, Any]:
    pair = layer(), layer()
    for made in pair:
        fastamp.optim.low_precision_weights_(made, verbose=False)
    return three_micro_batches(*pair)


@case
def float16_weights_and_gradients() -> dict[str, Any]:
    """Gradients whose product and sum are exact to more digits than float16 has."""
    made, wide = layer(torch.float16), layer()
    with torch.no_grad():
        wide.weight.copy_(made.weight)
        wide.bias.copy_(made.bias)
    start = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(7)).half().to(device)
    made.weight.grad, wide.weight.grad = start.clone(), torch.zeros(OUT, IN, device=device)
    ops = run(loss(made, 0).backward)
    apart(wide, 0)
    once = (start.float() + wide.weight.grad).half()
    twice = start + wide.weight.grad.half()
    return {
        "ops": ops,
        "rounded once": torch.equal(made.weight.grad, once),
        "as rounded twice": torch.equal(once, twice),
    }


@case
def weights_of_mm() -> dict[str, Any]:
    weights = [layer().weight.detach().t().contiguous().requires_grad_() for _ in range(2)]
    ops = []
    for seed in range(2):
        for weight, watched in zip(weights, (False, True), strict=True):
            x = torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(seed)).to(device)
            handle = weight.register_hook(lambda _: None) if watched else None
            with fastamp.autocast(device, dtype=torch.bfloat16, float8=RECIPE):
                y = x.mm(weight)
            ops.append(run(y.float().square().mean().backward))
            if handle is not None:
                handle.remove()
    return {"ops": ops[2], "equal": torch.equal(*[weight.grad for weight in weights])}


@case
def used_twice() -> dict[str, Any]:
    """Inputs and weights of which all sums are exact, in any order."""
    weight = torch.ones(OUT, IN, device=device, requires_grad=True)
    weight.grad = torch.full((OUT, IN), 3.0, device=device)
    with fastamp.autocast(device, dtype=torch.bfloat16, float8=RECIPE):
        y = [
            nn.functional.linear(torch.full((ROWS, IN), v, device=device), weight)
            for v in (1.0, 2.0)
        ]
    total = sum(t.float().sum() for t in y)
    ops = run(total.backward)
    return {"ops": ops, "equal": bool((weight.grad == 3 + ROWS + 2 * ROWS).all())}


@case
def two_threads() -> dict[str, Any]:
    """One adds within the product, slowly, the other, a leaf of no product, in a pass."""
    weight = torch.ones(OUT, IN, device=device, requires_grad=True)
    weight.grad = torch.full((OUT, IN), 3.0, device=device)
    with fastamp.autocast(device, dtype=torch.bfloat16, float8=RECIPE):
        y = nn.functional.linear(torch.ones(ROWS, IN, device=device), weight)
    fused, plain = y.float().sum(), (4 * weight).sum()
    entered = threading.Event()

    class Tells(Seen):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.__name__.startswith("_scaled_addmm_"):
                entered.set()
            return super().__torch_dispatch__(func, types, args, kwargs)

    def add_slowly() -> None:
        with Tells() as seen:
            fused.backward()
        ops.extend(seen.ops)

    ops: list[str] = []
    scaled_addmm.pause = 0.5
    thread = threading.Thread(target=add_slowly)
    thread.start()
    entered.wait(60)
    plain.backward()
    thread.join()
    scaled_addmm.pause = 0.0
    return {"ops": ops, "equal": bool((weight.grad == 3 + ROWS + 4).all())}


def second(change: Callable[[nn.Linear], Any], backward: str = "backward") -> dict[str, Any]:
    """A second micro-batch after a change that keeps the gradient from being added at once."""
    made, same = layer(), layer()
    for each in (made, same):
        loss(each, 0).backward()
    told = change(made)
    value = loss(made, 1)
    ops = run(getattr(value, backward))
    if callable(told):
        told = told()
    apart(same, 1)
    return {"ops": ops, "equal": torch.equal(made.weight.grad, same.weight.grad), "told": told}


@case
def hook_of_the_weight() -> dict[str, Any]:
    seen: list[torch.Tensor] = []
    out = second(lambda made: made.weight.register_hook(lambda g: seen.append(g.clone())) and None)
    fresh = layer()
    loss(fresh, 1).backward()
    return out | {"told": torch.equal(*seen, fresh.weight.grad)}


@case
def hook_after_accumulation() -> dict[str, Any]:
    calls: list[int] = []
    out = second(
        lambda made: made.weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    )
    return out | {"told": len(calls)}


def accumulator(made: nn.Linear) -> Any:
    return made.weight.view_as(made.weight).grad_fn.next_functions[0][0]


kept: list[Any] = []


@case
def hooks_of_the_accumulator() -> dict[str, Any]:
    told: list[bool] = []

    def watch(made: nn.Linear) -> None:
        kept.append(accumulator(made))
        kept[-1].register_hook(lambda _, outputs: told.append(outputs[0] is not None))
        kept[-1].register_prehook(lambda outputs: told.append(outputs[0] is not None))

    out = second(watch)
    kept.clear()
    return out | {"told": told}


@case
def hook_of_the_product() -> dict[str, Any]:
    made, told = layer(), list[bool]()
    loss(made, 0).backward()
    value = loss(made, 1)
    node = value.grad_fn
    while node.name() != "LinearFloat8Backward":
        node = node.next_functions[0][0]
    node.register_hook(lambda inputs, _: told.append(inputs[1] is not None))
    return {"ops": run(value.backward), "equal": True, "told": told}


@case
def anomaly_mode() -> dict[str, Any]:
    with torch.autograd.set_detect_anomaly(True):
        return second(lambda _: None)


@case
def gradient_of_another_layout() -> dict[str, Any]:
    def turn(made: nn.Linear) -> None:
        made.weight.grad = made.weight.grad.t().contiguous().t()

    return second(turn)


@case
def gradient_that_is_not_aligned() -> dict[str, Any]:
    def move(made: nn.Linear) -> None:
        room = torch.zeros(OUT * IN + 1, device=device)
        made.weight.grad = room[1:].view(OUT, IN).copy_(made.weight.grad)

    return second(move)


@case
def gradient_with_a_history() -> dict[str, Any]:
    def require(made: nn.Linear) -> None:
        made.weight.grad.requires_grad_()

    return second(require)


@case
def weight_that_is_transposed() -> dict[str, Any]:
    """A square one, which could be taken for its transpose."""
    weights = [torch.randn(IN, IN, generator=torch.Generator().manual_seed(7)) for _ in range(2)]
    weights = [weight.to(device).requires_grad_() for weight in weights]
    x = torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(8)).to(device)
    for _ in range(2):
        with fastamp.autocast(device, dtype=torch.bfloat16, float8=RECIPE):
            y = x.mm(weights[0].t())
        ops = run(y.float().square().mean().backward)
        handle = weights[1].register_hook(lambda _: None)
        with fastamp.autocast(device, dtype=torch.bfloat16, float8=RECIPE):
            y = nn.functional.linear(x, weights[1])
        y.float().square().mean().backward()
        handle.remove()
    equal = torch.equal(*[weight.grad for weight in weights])
    return {"ops": ops, "equal": equal}


@case
def low_precision_weights_with_a_hook() -> dict[str, Any]:
    """A hook besides the one of fastamp's, which does nothing to a float32 gradient."""
    made, same = layer(), layer()
    for each in (made, same):
        fastamp.optim.low_precision_weights_(each, verbose=False)
        loss(each, 0).backward()
    told: list[int] = []
    made.weight.register_post_accumulate_grad_hook(lambda _: told.append(1))
    ops = run(loss(made, 1).backward)
    apart(same, 1)
    return {"ops": ops, "equal": torch.equal(made.weight.grad, same.weight.grad), "told": len(told)}


@case
def weight_that_is_computed() -> dict[str, Any]:
    made, same = layer(), layer()
    for seed in range(2):
        value = loss_of(made.weight * 1, made.bias, seed)
        ops = run(value.backward)
        apart(same, seed)
    return {
        "ops": [op for op in ops if "mul" not in op],
        "equal": torch.equal(made.weight.grad, same.weight.grad),
    }


@case
def gradients_that_are_returned() -> dict[str, Any]:
    made, fresh = layer(), layer()
    loss(made, 0).backward()
    before = made.weight.grad.clone()
    got: list[torch.Tensor] = []
    value = loss(made, 1)
    ops = run(lambda: got.extend(torch.autograd.grad(value, [made.weight])))
    loss(fresh, 1).backward()
    kept_as_it_was = torch.equal(made.weight.grad, before)
    return {"ops": ops, "equal": torch.equal(got[0], fresh.weight.grad), "told": kept_as_it_was}


@case
def backward_for_some_leaves() -> dict[str, Any]:
    made, same = layer(), layer()
    for each in (made, same):
        loss(each, 0).backward()
    before = made.weight.grad.clone()
    run(lambda: loss(made, 1).backward(inputs=[made.bias]))
    left_alone = torch.equal(made.weight.grad, before)
    value = loss(made, 1)
    ops = run(lambda: value.backward(inputs=[made.weight]))
    apart(same, 1)
    return {
        "ops": ops,
        "equal": torch.equal(made.weight.grad, same.weight.grad),
        "told": left_alone,
    }


@case
def create_graph() -> dict[str, Any]:
    made, same = layer(), layer()
    for each in (made, same):
        loss(each, 0).backward()
    value = loss(made, 1)
    ops = run(lambda: value.backward(create_graph=True))
    apart(same, 1)
    return {"ops": ops, "equal": torch.equal(made.weight.grad.detach(), same.weight.grad)}


if device == "cuda":

    @case
    def another_stream() -> dict[str, Any]:
        made, same = layer(), layer()
        for each in (made, same):
            loss(each, 0).backward()
        leaf = accumulator(made)  # of the usual stream, as long as it lives
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            value = loss(made, 1)
            ops = run(value.backward)
        torch.cuda.current_stream().wait_stream(side)
        apart(same, 1)
        equal = torch.equal(made.weight.grad, same.weight.grad)
        return {"ops": ops, "equal": equal, "told": leaf.name()}


def outcome(function: Case) -> dict[str, Any]:
    try:
        return function()
    except Exception:
        return {"ops": [], "raised": traceback.format_exc()}


if __name__ == "__main__":
    scaled_addmm.define(device)
    warnings.simplefilter("ignore")
    print(json.dumps({name: outcome(function) for name, function in CASES.items()}))
