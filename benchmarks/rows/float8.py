# SPDX-License-Identifier: Apache-2.0
"""fp8 regions beside torch.amp in bf16, and beside other libraries' fp8 where they are installed.

On a CPU fp8 products are emulated: its one row is about the host's work around them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

import fastamp
from benchmarks.goals import at_least_times
from benchmarks.harness import BASELINE, FASTAMP, Candidate, Facts, Goal, Result, Row
from benchmarks.models import Workload, digits, llama_block, text, workloads
from benchmarks.rows.float8_peers import peers
from benchmarks.sides import use_kernels_of
from benchmarks.training import Training

GROUP = "Linear layers in fp8"
BF16 = torch.bfloat16
BASE_DTYPE = "fastamp, bf16"
BF16_PRODUCTS, FLOAT8_PRODUCTS = "bf16 products", "fp8 products"
HOST_LIMIT = 5000.0  # ns
HOST_SIZE = 16
# Inputs and outputs: GPT-2's and its XL's MLP, squares, an 8B model's attention and MLP, a 70B's.
SHAPES = [
    (768, 3072),
    (1600, 6400),
    (1024, 1024),
    (4096, 4096),
    (4096, 6144),
    (4096, 14336),
    (14336, 4096),
    (8192, 28672),
]
TOKENS = (1024, 8192, 32768)
FIRST_CAPABILITY = (8, 9)


def check_gpu(device: str) -> None:
    """Checks that the GPU has fp8 products: on others a region in fp8 is one in bf16.

    Raises:
        ImportError: It has none; the row is then left out, and says so.
    """
    if device == "cuda" and torch.cuda.get_device_capability() < FIRST_CAPABILITY:
        raise ImportError(f"{torch.cuda.get_device_name()} has no fp8")


def every_product() -> fastamp.float8.Recipe:
    """The recipe that runs in fp8 whatever can be, however small."""
    return fastamp.float8.Recipe(small_size=(0, 0))


def region_of(which: str, device: str, recipe: fastamp.float8.Recipe | None = None) -> Any:
    """Returns the region of a candidate."""
    if which == BASELINE:
        return torch.autocast(device, dtype=BF16)
    if which == BASE_DTYPE:
        return fastamp.autocast(device, dtype=BF16)
    return fastamp.autocast(device, dtype=BF16, float8=recipe or True)


@dataclass
class Product:
    """A linear layer without a bias, its input and the gradient of its output; weights in fp32."""

    device: str
    tokens: int
    inputs: int
    outputs: int
    recorded: bool = True

    def __post_init__(self) -> None:
        """Makes the tensors from seed 0."""
        torch.manual_seed(0)
        options = {"device": self.device, "dtype": BF16}
        self.x = torch.randn(self.tokens, self.inputs, **options).requires_grad_(self.recorded)
        self.grad = torch.randn(self.tokens, self.outputs, **options)
        weight = torch.randn(self.outputs, self.inputs, device=self.device) * self.inputs**-0.5
        self.weight = nn.Parameter(weight)

    def candidate(self, which: str, recipe: fastamp.float8.Recipe | None = None) -> Candidate:
        """Forward and backward in a region of its own, as a training step has them: casts too."""
        region = region_of(which, self.device, recipe)
        x, weight, grad = self.x, self.weight, self.grad
        wanted = (x, weight) if self.recorded else (weight,)

        def step() -> None:
            with region:
                y = linear(x, weight)
            torch.autograd.grad(y, wanted, grad)

        before = use_kernels_of(BASELINE if which == BASELINE else FASTAMP)
        return Candidate("step()", {"step": step}, before, fastamp._C.register_kernels)

    def facts(self, recipe: fastamp.float8.Recipe | None = None) -> Facts:
        """Counts the layers that ran in fp8: none if the rule says that they are too small."""
        with fastamp.debug.trace() as trace:
            self.candidate(FASTAMP, recipe).names["step"]()
        ran = sum(row.calls for row in trace.rows if row.float8 == "float8")
        return {FASTAMP: {"layers in fp8": float(ran)}}


def linear_row(
    device: str, tokens: int, inputs: int, outputs: int, *, rule: bool = True, weight: float = 1.0
) -> Row:
    """Returns the row of a shape; with the rule on, one that is too small runs in bf16."""
    recipe = None if rule else every_product()

    def candidates() -> dict[str, Candidate]:
        check_gpu(device)
        product = Product(device, tokens, inputs, outputs)
        own = {which: product.candidate(which, recipe) for which in (BASELINE, FASTAMP)}
        return {**own, **peers(device, product.x, product.weight, product.grad)}

    def facts(quick: bool) -> Facts:
        del quick
        check_gpu(device)
        return Product(device, tokens, inputs, outputs).facts(recipe)

    name = f"{device}: fp8: linear {inputs} to {outputs}, {tokens} tokens"
    return Row(
        name if rule else f"{name}, without the rule",
        candidates,
        GROUP,
        device,
        goal=at_least_times(0.98 if rule else 0.9),
        work=(tokens, "tokens"),
        facts=facts,
        weight=weight,
    )


def cast_row(device: str, what: str, tokens: int, inputs: int, outputs: int) -> Row:
    """Returns a row of a product so narrow that its time is that of the wide operand's casts."""
    wide = tokens * inputs if what == "activation" else inputs * outputs
    # Read twice, written as rows and as columns, and read by the products once in each layout.
    element = 2 if what == "activation" else 4

    def candidates() -> dict[str, Candidate]:
        check_gpu(device)
        product = Product(device, tokens, inputs, outputs, recorded=what == "weight")
        return {which: product.candidate(which, every_product()) for which in (BASELINE, FASTAMP)}

    size = max(tokens, outputs)
    return Row(
        f"{device}: fp8: cast of {what}, {size} x {inputs}, with products of 16 rows",
        candidates,
        GROUP,
        device,
        bytes_moved=wide * (2 * element + 4),
    )


def _host_time(result: Result) -> float:
    """Returns what the host does more than torch.amp's around the products, in nanoseconds."""
    own = result.median(FASTAMP) - result.median(FLOAT8_PRODUCTS)
    return own - (result.median(BASELINE) - result.median(BF16_PRODUCTS))


def _products(device: str) -> dict[str, Candidate]:
    """The three products of the host row's layer, in both ways, without anything around them.

    In the layouts in which autograd multiplies them, which decide how long such small ones take.
    """
    size, e4m3, e5m2 = HOST_SIZE, torch.float8_e4m3fn, torch.float8_e5m2
    x = torch.randn(size, size, device=device).bfloat16()
    one = torch.ones((), device=device)
    names: dict[str, Any] = {
        "x": x,
        "t": x.t(),
        "b": x[0].clone(),
        "linear": linear,
        "mm": torch.mm,
        "scaled": partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=BF16),
        "wide": partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.float32),
        "x8": x.to(e4m3),
        "t8": x.to(e4m3).t(),
        "g8": x.to(e5m2),
    }
    return {
        BF16_PRODUCTS: Candidate("linear(x, x, b); mm(x, x); mm(t, x)", names),
        FLOAT8_PRODUCTS: Candidate("scaled(x8, t8, bias=b); scaled(g8, t8); wide(g8, t8)", names),
    }


def host_row(device: str) -> Row:
    """Returns the row of the host's work for a layer, in an open region, weights cast already."""

    def candidates() -> dict[str, Candidate]:
        check_gpu(device)
        layer = nn.Linear(HOST_SIZE, HOST_SIZE, device=device)
        x = torch.randn(HOST_SIZE, HOST_SIZE, device=device).bfloat16().requires_grad_()
        names = {
            "grad": torch.autograd.grad,
            "linear": linear,
            "x": x,
            "w": layer.weight,
            "b": layer.bias,
            "g": torch.randn(HOST_SIZE, HOST_SIZE, device=device).bfloat16(),
        }
        found = {}
        for which in (BASELINE, FASTAMP):
            region = region_of(which, device, every_product())
            found[which] = _inside(which, region, "grad(linear(x, w, b), (x, w, b), g)", names)
        return {**found, **_products(device)}

    return Row(
        f"{device}: fp8: host time of a linear layer {HOST_SIZE}x{HOST_SIZE}",
        candidates,
        GROUP,
        device,
        goal=Goal(
            f"at most {HOST_LIMIT / 1e3:g} us more than torch.amp, without the products",
            lambda result: _host_time(result) <= HOST_LIMIT,
        ),
    )


def _inside(which: str, region: Any, statement: str, names: dict[str, Any]) -> Candidate:
    def before() -> None:
        use_kernels_of(which)()
        region.__enter__()

    def after() -> None:
        region.__exit__(None, None, None)
        fastamp._C.register_kernels()

    return Candidate(statement, names, before, after)


WAYS = {BASELINE: (BASELINE, False), FASTAMP: (FASTAMP, True), BASE_DTYPE: (FASTAMP, False)}


def _facts_of(workload: Workload, device: str, quick: bool) -> Facts:
    """Counts each way separately, so that their memory does not mix."""
    check_gpu(device)
    found: Facts = {}
    for name, (which, float8) in WAYS.items():
        training = Training(workload, which, device, BF16, float8=float8)
        found[name] = training.facts(1 if quick else workload.steps)
        del training
        gc.collect()
    return found


def _trainings(workload: Workload, device: str, step: str) -> dict[str, Candidate]:
    check_gpu(device)
    found = {}
    for name, (which, float8) in WAYS.items():
        training = Training(workload, which, device, BF16, float8=float8)
        training.warm_up()
        found[name] = replace(
            training.candidate(),
            statement=step,
            names={"step": training.step, "grads": training.gradients},
        )
    return found


COPIES, CASTS = FASTAMP, "fastamp, fp8 casts in the region"


def copies_row(device: str, inputs: int, outputs: int) -> Row:
    """Returns the row of fp8 weight copies that the step writes, beside casts in the region.

    One training step of a layer with next to no products: the optimizer and the casts of its
    weight are what there is to time.
    """

    def candidates() -> dict[str, Candidate]:
        check_gpu(device)
        ways = {BASELINE: (BASELINE, False), COPIES: (FASTAMP, True), CASTS: (FASTAMP, False)}
        found = {}
        for name, (which, copies) in ways.items():
            step = _step_of_one_layer(device, inputs, outputs, which, copies=copies)
            for _ in range(3):  # The third step finds copies and a region that casts nothing.
                step()
            before = use_kernels_of(which)
            found[name] = Candidate("step()", {"step": step}, before, fastamp._C.register_kernels)
        return found

    # AdamW with fp32 states, a read of the gradient, the copy, its transposition.
    return Row(
        f"{device}: fp8: weight copies written by the step, {outputs} x {inputs}",
        candidates,
        GROUP,
        device,
        bytes_moved=inputs * outputs * (28 + 1 + 2),
    )


def _step_of_one_layer(
    device: str, inputs: int, outputs: int, which: str, *, copies: bool
) -> Callable[[], None]:
    torch.manual_seed(0)
    x = torch.randn(16, inputs, device=device, dtype=BF16)
    layer = nn.Linear(inputs, outputs, bias=False, device=device)
    options = {"lr": 1e-4}
    optimizer: torch.optim.Optimizer
    if which == BASELINE:
        optimizer = torch.optim.AdamW(layer.parameters(), fused=True, **options)
    else:
        optimizer = fastamp.optim.AdamW(
            layer.parameters(), autocast_dtype=torch.float8_e4m3fn if copies else None, **options
        )
    region = region_of(which, device, every_product())

    def step() -> None:
        with region:
            y = layer(x)
        y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def training_row(
    workload: Workload, device: str, goal: Goal | None, step: str = "step()", weight: float = 6.0
) -> Row:
    """Returns the row of a model in training; ``grads()`` leaves out the optimizer."""
    return Row(
        f"{device}: fp8: {workload.name}",
        partial(_trainings, workload, device, step),
        GROUP,
        device,
        goal=goal,
        work=(workload.batch * workload.units, workload.unit),
        facts=partial(_facts_of, workload, device),
        weight=weight,
    )


def _gpu_rows(device: str) -> list[Row]:
    shapes: list[Callable[[], Row]] = [
        partial(linear_row, device, tokens, *shape) for shape in SHAPES for tokens in TOKENS
    ]
    found = [make() for make in shapes]
    found.append(linear_row(device, 1024, 1024, 1024, rule=False))
    found.append(cast_row(device, "activation", 32768, 4096, 16))
    found.append(cast_row(device, "weight", 16, 4096, 14336))
    found.append(copies_row(device, 4096, 14336))
    never_slower = at_least_times(0.98)
    block = Workload(
        "Llama 8B block, 4096 tokens, forward and backward",
        "tokens",
        llama_block,
        text(2048),
        2,
        2048,
        steps=5,
    )
    models = [w for w in workloads(device) if w.name.startswith(("ViT-B", "GPT-2"))]
    found += [training_row(work, device, never_slower) for work in (digits(1797), *models)]
    return [*found, training_row(block, device, at_least_times(1.25), "grads()")]


def rows(device: str) -> list[Row]:
    """Returns the rows of one device."""
    return [host_row(device), *(_gpu_rows(device) if device == "cuda" else [])]
