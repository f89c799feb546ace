# SPDX-License-Identifier: Apache-2.0
"""policies.for_modules(model, {"*": "positions"}): sines and cosines of exact angles."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastamp
from support.children import check_program

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENGTH, DIM = 4096, 32


def frequencies() -> torch.Tensor:
    return 1.0 / 10000.0 ** (torch.arange(0, DIM, 2).float() / DIM)


def angles_of(positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    return positions[:, None] @ inv_freq[None, :]


def logged(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


class Rotary(nn.Module):
    """As many programs have it: a product of a column and a row, which autocast runs in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies())

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        angles = angles_of(positions, self.inv_freq)  # type: ignore[arg-type]
        return torch.stack([angles.cos(), angles.sin()])


class Decorated(Rotary):
    """As older transformers have it, behind decorators and methods."""

    @torch.no_grad()
    @logged
    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return self.table(self.inv_freq[:, None] @ positions[None, :])  # type: ignore[index]

    def table(self, angles: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.cos(angles.t()), torch.sin(angles.t())])


class Polar(Rotary):
    """As the first Llama has it."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        angles = torch.addmm(
            torch.zeros(1),
            positions[:, None],
            self.inv_freq[None],  # type: ignore[index]
        ).float()
        return torch.view_as_real(torch.polar(torch.ones_like(angles), angles)).permute(2, 0, 1)


class Learned(nn.Module):
    """Frequencies that are a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(frequencies())

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        angles = torch.matmul(positions[:, None], self.weight[None])
        return torch.stack([angles.cos_(), angles.detach().sin()])


class LazyTable(Rotary):
    """Made when it is first needed, by a method, and kept."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "cache"):
            self.make()
        return self.cache[:, positions.long()]

    def make(self) -> None:
        angles = angles_of(torch.arange(LENGTH).float(), self.inv_freq)  # type: ignore[arg-type]
        self.cache = torch.stack([angles.cos(), angles.sin()])


KINDS: list[type[nn.Module]] = [Rotary, Decorated, Polar, LazyTable]
POSITIONS = torch.arange(LENGTH).float()


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module] = Rotary) -> None:
        super().__init__()
        self.rotary = kind()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rotary(POSITIONS), self.linear(x)


def exact() -> torch.Tensor:
    angles = POSITIONS.double()[:, None] * frequencies().double()
    return torch.stack([angles.cos(), angles.sin()])


def run(model: nn.Module, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    with fastamp.autocast("cpu", dtype=dtype):
        result: tuple[torch.Tensor, torch.Tensor] = model(torch.ones(2, DIM))
    return result


def error(table: torch.Tensor) -> float:
    return float((table.double() - exact()).abs().max())


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_those_of_float32(kind: type[nn.Module], dtype: torch.dtype):
    assert error(run(Model(kind), dtype)[0]) > 0.5  # Angles of 4095 radians, in 16 bits.
    model = Model(kind)
    outside = copy.deepcopy(model)(torch.ones(2, DIM))[0]
    with fastamp.policies.for_modules(model, {"*": "positions"}) as policies:
        table, product = run(model, dtype)
    assert policies.names == {"*": ["rotary"]}
    assert torch.equal(table, outside)
    assert error(table) < 1e-3
    assert product.dtype == dtype  # All else runs as it did.


def test_learned_frequencies_are_found_and_get_gradients():
    model = Learned()
    policies = fastamp.policies.for_modules(model, {"*": "positions"})
    with fastamp.autocast("cpu", dtype=BF16):
        table = model(POSITIONS)
    assert table.dtype == FP32
    table.sum().backward()
    assert model.weight.grad is not None
    policies.release()


class Inline(nn.Module):
    """An attention whose own code has sines: float32 would cost its products."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) * x.sin() + x.cos()


class LooksLike(nn.Module):
    """Has buffers of these names, and products of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", torch.ones(DIM, DIM))
        self.register_buffer("sin", torch.ones(DIM, DIM).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.cos + x @ self.sin + (self.cos @ self.sin)[0].relu()


def test_what_has_weights_of_products_is_left_alone():
    model = nn.ModuleDict({"rotary": Rotary(), "block": Inline()})
    with fastamp.policies.for_modules(model, {"*": "positions"}) as policies:
        assert policies.names["*"] == ["rotary"]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("given", [BF16, FP16, FP32], ids=str)
def test_a_wrong_match_only_widens(dtype: torch.dtype, given: torch.dtype):
    model, x = LooksLike(), torch.full((2, DIM), 0.5, dtype=given)
    with fastamp.autocast("cpu", dtype=dtype):
        before = model(x)
    with (
        fastamp.policies.for_modules(model, {"": "positions"}),
        fastamp.autocast("cpu", dtype=dtype),
    ):
        after = model(x)
    torch.testing.assert_close(after, before, check_dtype=False, rtol=0, atol=0)
    assert after.dtype == FP32


def test_copies_pickles_and_release():
    model = Model()
    policies = fastamp.policies.for_modules(model, {"*": "positions"})
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert all(error(run(each)[0]) < 1e-3 for each in (model, *twins))
    policies.release()
    assert error(run(model)[0]) > 0.5


def test_later_patterns_and_op_policies_add_up():
    model = Model()
    with fastamp.policies.for_modules(model, {"*": "positions", "linear": {"linear": "fp32"}}):
        table, product = run(model)
        assert error(table) < 1e-3
        assert product.dtype == FP32
    with fastamp.policies.for_modules(model, {"*": "positions", "rotary": BF16}):
        assert error(run(model, FP16)[0]) < 1e-3


def test_a_compiled_model_has_the_same_table():
    model = Model()
    with fastamp.policies.for_modules(model, {"*": "positions"}):
        assert torch.equal(
            run(torch.compile(model, backend="eager"))[0],  # type: ignore[arg-type]
            run(model)[0],
        )


def test_libraries_modules_are_found():
    transformers = pytest.importorskip("transformers", reason="thirdparty extra")
    size = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 8, "num_hidden_layers": 1}
    size |= {"num_attention_heads": 2}
    configs = [transformers.LlamaConfig(**size), transformers.GPTNeoXConfig(**size)]
    for config in configs:
        model = transformers.AutoModelForCausalLM.from_config(config)
        tokens = torch.tensor([[1, 2, 3]])
        with fastamp.autocast("cpu", dtype=BF16):
            before = model(tokens).logits
        with fastamp.policies.for_modules(model, {"*": "positions"}) as policies:
            (name,) = policies.names["*"]
            with fastamp.autocast("cpu", dtype=BF16):
                assert torch.equal(model(tokens).logits, before)  # They compute in float32.
        assert name.endswith("rotary_emb")


def test_frequencies_that_were_rounded_are_named():
    model = Model().bfloat16()
    said = r"expected float32 frequencies in 'rotary', got inv_freq of torch\.bfloat16"
    with pytest.warns(UserWarning, match=said) as caught:
        policies = fastamp.policies.for_modules(model, {"*": "positions"})
    assert len(caught) == 1
    assert caught[0].filename == __file__
    policies.release()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for buffer in (torch.zeros(4), torch.arange(4).float()):  # Not falling.
            model.rotary.inv_freq = buffer.bfloat16()
            fastamp.policies.for_modules(model, {"*": "positions"}).release()


REFUSED: dict[str, tuple[Any, str]] = {
    "no such name": (
        {"rotray": "positions"},
        r"got 'rotray', which no module of Model has; nea.*rotary",
    ),
    "a module without positions": (
        {"linear": "positions"},
        r"expected modules that compute positions, got 'linear'.*policies\.fp32",
    ),
    "a word that there is not": ({"*": "position"}, r"'position'; nearest: positions"),
    "an op policy of this name": ({"rotary": {"mm": "positions"}}, r"policy of mm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_nothing(name: str):
    values, said = REFUSED[name]
    model = Model()
    kinds = [type(each) for each in model.modules()]
    with pytest.raises(ValueError, match=said):
        fastamp.policies.for_modules(model, values)
    assert [type(each) for each in model.modules()] == kinds


def test_a_policy_file_does_it_for_a_program(tmp_path: Path):
    path = tmp_path / "policy.toml"
    fastamp.policies.save({"*": "positions"}, path)
    assert fastamp.policies.load(path).modules == {"*": "positions"}
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "class Rotary(torch.nn.Module):\n"
        "    def forward(self, t):\n"
        "        angles = t[:, None] @ torch.ones(1, 1)\n"
        "        return angles.sin() + angles.cos()\n"
        "with torch.autocast('cpu', dtype=torch.bfloat16):\n"
        "    print(Rotary()(torch.ones(2)).dtype)\n"
    )
    assert check_program("-m", "fastamp", str(program)) == "torch.bfloat16\n"
    under = check_program("-m", "fastamp", "--policy", str(path), str(program))
    assert under == "torch.float32\n"


def test_check_names_the_policy():
    model = Model()

    def step() -> None:
        run(model)

    report = fastamp.debug.check(model, step=step)
    found = [each for each in report.findings if each.rule == "positions-in-16-bits"]
    assert found
    assert "{'*': 'positions'}" in found[0].fix
    with fastamp.policies.for_modules(model, {"*": "positions"}):
        after = fastamp.debug.check(model, step=step)
    assert "positions-in-16-bits" not in {each.rule for each in after.findings}
