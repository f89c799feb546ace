# SPDX-License-Identifier: Apache-2.0
"""Plans: what a recipe would do with a model, without running it."""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fastamp
import fastamp._C as _C
from support.autocast_state import fastamp_state, torch_state
from support.float8 import float8_region, saved_bytes

RECIPE = fastamp.float8.Recipe(small_size=(0, 0))
SMALL = "K and N within small_size"


class Mixed(nn.Module):
    """Has a call for every reason."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(32, 48)
        self.odd = nn.Linear(48, 20)
        self.back = nn.Linear(20, 32)
        self.flat = nn.Parameter(torch.randn(32, 64))
        self.head = nn.Linear(64, 32, bias=False)
        self.frozen = nn.Linear(32, 32, bias=False)
        self.frozen.requires_grad_(False)
        self.register_buffer("fixed", torch.randn(32, 32))
        self.seen: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        x = self.back(self.odd(functional.gelu(self.body(x))))
        x = x @ self.flat
        x = torch.addmm(self.body.bias[:32], x, self.head.weight.t())
        x = self.frozen(x.float()) + x @ self.fixed
        return torch.bmm(x[None], x.t()[None])


def by_name(plan: Any) -> dict[tuple[str, str], Any]:
    return {(row.module, row.op): row for row in plan.rows}


def test_each_product_has_a_row_with_its_weights_module_and_reason():
    model, x = Mixed(), torch.randn(8, 32)
    rows = by_name(fastamp.float8.plan(model, x, recipe=RECIPE))
    assert {key: row.float8 for key, row in rows.items()} == {
        ("body", "linear"): "float8",
        ("odd", "linear"): "K or N not a multiple of 16",
        ("back", "linear"): "K or N not a multiple of 16",
        ("Mixed.flat", "matmul"): "float8",
        ("head", "addmm"): "float8",
        ("frozen", "linear"): "float8",
        ("Mixed.fixed", "matmul"): "second operand is no weight",
    }
    body = rows["body", "linear"]
    assert (body.m, body.k, body.n, body.x_dtype, body.calls) == (8, 32, 48, "float32", 1)
    assert rows["head", "addmm"].x_dtype == "bfloat16"
    assert (rows["head", "addmm"].k, rows["head", "addmm"].n) == (64, 32)


def test_a_large_model_needs_no_memory():
    with torch.device("meta"):
        block = nn.Sequential(
            nn.Linear(4096, 14336, bias=False), nn.SiLU(), nn.Linear(14336, 4096, bias=False)
        )
        model = nn.Sequential(*(nn.Sequential(*block) for _ in range(32)))
        x = torch.empty(8, 1024, 4096, dtype=torch.bfloat16, requires_grad=True)
    plan = fastamp.float8.plan(model, x)
    assert [(row.float8, row.calls) for row in plan.rows] == [("float8", 32)] * 2
    operands = 8192 * (4096 + 14336) * 32 + 2 * 4096 * 14336
    assert plan.base_dtype_saved_bytes == 2 * operands
    assert plan.saved_bytes == operands + 32 * 2 * 4 + 2 * 4


@pytest.mark.parametrize("small_size", [None, (32, 48), (4096, 4096)])
@pytest.mark.parametrize("grad", [True, False])
def test_a_run_does_what_the_plan_says(small_size: tuple[int, int] | None, grad: bool):
    model, x = Mixed(), torch.randn(8, 32)
    recipe = fastamp.float8.Recipe(small_size=small_size)
    with torch.set_grad_enabled(grad):
        plan = fastamp.float8.plan(model, x, device="cpu", recipe=recipe)
        with fastamp.debug.trace() as trace, float8_region(float8=recipe):
            model(x)
    planned: collections.Counter[tuple[str, str]] = collections.Counter()
    for row in plan.rows:
        planned[row.op, row.float8] += row.calls
    ran: collections.Counter[tuple[str, str]] = collections.Counter()
    for traced in trace.rows:
        if traced.float8:
            ran[traced.op, traced.float8] += traced.calls
    assert planned == ran
    outcomes = {outcome for _, outcome in ran}
    assert ("float8" in outcomes, SMALL in outcomes) == {
        None: (True, False),
        (32, 48): (True, True),
        (4096, 4096): (False, True),
    }[small_size]


def saved_in_a_run(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes that products in fp8 save: fp8 casts, and float32 scales."""
    with float8_region(float8=RECIPE):
        saved = saved_bytes(lambda: model(x), [*model.parameters(), x])
    return saved[torch.float8_e4m3fn] + saved[torch.float32]


@pytest.mark.parametrize("is_leaf", [True, False])
def test_saved_bytes_count_shared_operands_once(is_leaf: bool):
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(64, 32) for _ in range(3))
            self.q_again = self.q

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x if is_leaf else x * 1.0
            return self.q(x) + self.k(x) + self.v(x) + self.q_again(x)

    model, x = Attention(), torch.randn(16, 64, requires_grad=True)
    plan = fastamp.float8.plan(model, x, recipe=RECIPE)
    assert [(row.module, row.calls) for row in plan.rows] == [
        ("q = q_again", 2),
        ("k", 1),
        ("v", 1),
    ]
    # In 16 bits one cast of x; in fp8 one for each call, but of an activation.
    assert plan.base_dtype_saved_bytes == 2 * 16 * 64 + 3 * 2 * 32 * 64
    assert plan.saved_bytes == (4 if is_leaf else 1) * (16 * 64 + 4) + 3 * (32 * 64 + 4)
    assert plan.saved_bytes == saved_in_a_run(model, x)
    with torch.no_grad():
        assert fastamp.float8.plan(model, x, recipe=RECIPE).saved_bytes == 0


def test_excluded_weights_are_excluded_as_long_as_they_are():
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16)), torch.randn(4, 32)

    def plan() -> list[str]:
        return [row.float8 for row in fastamp.float8.plan(model, x, recipe=RECIPE).rows]

    with fastamp.float8.exclude(model[1]):
        assert plan() == ["float8", "excluded"]
    assert plan() == ["float8", "float8"]


def test_recipes_policies_and_regions_inside_the_model_count():
    layer, x = nn.Linear(32, 16), torch.randn(4, 32)
    recipe = fastamp.float8.Recipe(ops=("mm",), small_size=(0, 0))
    (row,) = fastamp.float8.plan(layer, x, recipe=recipe).rows
    assert (row.module, row.float8, row.k) == ("Linear", "op not in recipe", 32)
    with fastamp.policies.override({"linear": "fp32"}):
        assert fastamp.float8.plan(layer, x).rows == ()

    class Off(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(x.device.type, enabled=False):
                x = self.inside(x)
            return self.outside(x)

    plan = fastamp.float8.plan(Off(), x, recipe=RECIPE)
    assert [row.module for row in plan.rows] == ["outside"]


class Drawing(nn.Module):
    """Draws as stochastic depth and augmentation do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * random.random() * float(np.random.rand()) * torch.rand(1, device=x.device)


def test_neither_the_model_nor_any_state_changes():
    model, x = nn.Sequential(Mixed(), nn.Dropout(), Drawing()), torch.randn(8, 32)
    model[0].body(x).sum().backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradient = model[0].body.weight.grad
    versions = [parameter._version for parameter in model.parameters()]
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    torch_before, fastamp_before = torch_state(), fastamp_state()
    with fastamp.autocast("cpu", dtype=torch.float16):
        fastamp.float8.plan(model, x)
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert fastamp.float8.recipe("cpu") is None
    with pytest.raises(RuntimeError):
        fastamp.float8.plan(model, x[:, 1:])
    assert (torch_state(), fastamp_state()) == (torch_before, fastamp_before)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert model[0].seen is None
    assert model[0].body.weight.grad is gradient
    assert [parameter._version for parameter in model.parameters()] == versions
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_inputs_may_be_nested_named_and_anywhere():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 16)
            self.table = [torch.randn(3, 32)]

        def forward(self, batch: Any, *, mask: Any = None) -> Any:
            return self.layer(batch["x"][0] + mask + self.table[0])

    x, mask = torch.randn(3, 32, device="meta"), torch.randn(32)
    (row,) = fastamp.float8.plan(Named(), {"x": [x]}, kwargs={"mask": mask}).rows
    assert (row.module, row.m) == ("layer", 3)


def test_an_input_that_is_given_twice_is_one_tensor_to_the_model():
    attention, x = nn.MultiheadAttention(32, 2), torch.randn(4, 2, 32)

    def rows(*inputs: torch.Tensor) -> list[tuple[str, str, int, int]]:
        plan = fastamp.float8.plan(attention, *inputs, recipe=RECIPE)
        return [(row.module, row.op, row.n, row.calls) for row in plan.rows if row.n]

    output = ("out_proj", "linear", 32, 1)
    # Query, key and value in one product, or in three with parts of the weight.
    assert rows(x, x, x) == [("MultiheadAttention.in_proj_weight", "linear", 96, 1), output]
    parts = rows(x, x.clone(), x.clone())
    assert parts == [("MultiheadAttention.in_proj_weight", "linear", 32, 3), output]


def test_fake_models_are_planned_too():
    from torch._subclasses.fake_tensor import FakeTensorMode

    expected = fastamp.float8.plan(nn.Linear(32, 16), torch.randn(4, 32))
    with FakeTensorMode():
        assert fastamp.float8.plan(nn.Linear(32, 16), torch.randn(4, 32)) == expected


def test_on_the_cpu_no_product_is_small():
    for device, outcome in (("cpu", "float8"), ("cuda", SMALL)):
        plan = fastamp.float8.plan(nn.Linear(32, 16), torch.randn(4, 32), device=device)
        assert (plan.device, [row.float8 for row in plan.rows]) == (device, [outcome])


def test_the_table_names_products_reasons_and_sums():
    lines = str(fastamp.float8.plan(Mixed(), torch.randn(8, 32))).splitlines()
    assert lines[0].split()[:6] == ["Module", "Op", "M", "K", "N", "x"]
    (body,) = [line for line in lines if line.startswith("body")]
    assert body.split()[:6] == ["body", "linear", "8", "32", "48", "float32"]
    assert f"no: {SMALL}" in body
    assert lines[-1].startswith("0 of 7 products in fp8 on cuda; saved for backward 0.0")
    assert str(fastamp.float8.plan(nn.ReLU(), torch.randn(2))).splitlines()[-1].startswith("0 of 0")
    on_cpu = str(fastamp.float8.plan(Mixed(), torch.randn(8, 32), device="cpu"))
    assert on_cpu.splitlines()[-1].startswith("4 of 7 products in fp8 on cpu; saved for backward")


def test_compiled_models_are_planned_as_what_was_compiled():
    model = torch.compile(nn.Sequential(nn.Linear(32, 16)), backend="eager")
    assert [row.module for row in fastamp.float8.plan(model, torch.randn(4, 32)).rows] == ["0"]


class Deciding(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Uncopyable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = (step for step in range(3))


@pytest.mark.parametrize(
    ("arguments", "kwargs", "error", "text"),
    [
        ((3,), {}, TypeError, "expected model to be a torch.nn.Module, got int"),
        ((nn.ReLU(),), {"kwargs": [1]}, TypeError, "expected kwargs to be a mapping or None"),
        (
            (nn.ReLU(),),
            {"recipe": True},
            TypeError,
            "expected recipe to be a float8.Recipe or None",
        ),
        ((nn.ReLU(),), {"dtype": "bf16"}, TypeError, "expected dtype to be a torch.dtype"),
        ((nn.ReLU(),), {"dtype": torch.float32}, ValueError, "got Float"),
        ((nn.ReLU(),), {"device": 0}, TypeError, "expected device to be a str, got int"),
        ((nn.ReLU(),), {"device": "xpu"}, ValueError, "to be 'cpu' or 'cuda', got 'xpu'"),
        (
            (nn.Linear(4, 4), torch.randn(2, 3)),
            {},
            RuntimeError,
            "a model that runs with these inp",
        ),
        ((nn.Linear(4, 4),), {}, RuntimeError, "missing 1 required positional argument"),
        ((Deciding(), torch.randn(3)), {}, RuntimeError, "tensors without values, got .*Data"),
        ((nn.ReLU(), torch.randn(3).to_sparse()), {}, TypeError, "each input to be a plain, dense"),
        ((nn.LazyLinear(4), torch.randn(3)), {}, TypeError, "weight to be a plain.*Uninitialized"),
        ((Uncopyable(), torch.randn(3)), {}, TypeError, "a model that copy.deepcopy can copy"),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, kwargs: Any, error: type, text: str):
    with pytest.raises(error, match=rf"float8.plan: expected .*{text}|{text}"):
        fastamp.float8.plan(*arguments, **kwargs)


def test_a_plan_needs_the_kernels():
    _C.unregister_kernels()
    try:
        with pytest.raises(RuntimeError, match="expected fastamp's kernels to be registered"):
            fastamp.float8.plan(nn.ReLU(), torch.randn(3))
    finally:
        _C.register_kernels()
