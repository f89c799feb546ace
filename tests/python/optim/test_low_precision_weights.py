# SPDX-License-Identifier: Apache-2.0
"""What low_precision_weights_ chooses, changes and refuses."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import fastamp
import fastamp._C as _C

BF16 = torch.bfloat16


class Model(nn.Module):
    """An embedding that is the head, too, a norm, two linear layers and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(16)
        self.spare = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.down(self.norm(torch.relu(self.up(self.words(tokens)))))
        return nn.functional.linear(h, self.words.weight)


TOKENS = torch.arange(6).view(2, 3)


def lowered(model: nn.Module, **options: Any) -> fastamp.optim.LowPrecisionWeights:
    return fastamp.optim.low_precision_weights_(model, verbose=False, **options)


def reasons(handle: fastamp.optim.LowPrecisionWeights) -> dict[str, str]:
    return {row.name: row.reason for row in handle.conversion.parameters}


def test_parameters_that_ops_read_as_they_are_stay() -> None:
    model = Model()
    known = dict(model.named_parameters())
    found = reasons(lowered(model, example_inputs=TOKENS))
    assert {name for name, reason in found.items() if not reason} == {
        "up.weight",
        "up.bias",
        "down.weight",
        "down.bias",
    }
    assert found["words.weight"] == "embedding"
    assert found["norm.weight"] == found["norm.bias"] == "layer_norm"
    assert found["spare.weight"] == "not used"
    for name, parameter in model.named_parameters():
        assert parameter is known[name]
        assert parameter.dtype == (torch.float32 if found[name] else BF16)


def test_without_inputs_classes_decide() -> None:
    found = reasons(lowered(Model()))
    assert found["words.weight"] == "Embedding"
    assert found["norm.weight"] == "LayerNorm"
    assert found["spare.weight"] == found["up.bias"] == ""


@pytest.mark.parametrize("pattern", ["down", "down.*", "*down*"])
def test_names_of_parameters_and_modules_are_kept(pattern: str) -> None:
    found = reasons(lowered(Model(), keep=[pattern]))
    assert found["down.weight"] == found["down.bias"] == "kept"
    assert found["up.weight"] == ""


def test_what_a_transformers_model_keeps_is_kept() -> None:
    model = Model()
    model._keep_in_fp32_modules = ["down"]
    model._keep_in_fp32_modules_strict = None
    found = reasons(lowered(model))
    assert found["down.weight"] == "kept by the model"
    assert found["up.weight"] == ""


def test_weights_used_through_views_and_otherwise_stay() -> None:
    class Twice(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) @ self.weight.t()

    assert reasons(lowered(Twice(4, 4, bias=False), example_inputs=torch.ones(2, 4))) == {
        "weight": "several uses, some of views"
    }


class Views(nn.Module):
    """A weight of which views are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.weight.t()) @ self.weight.t()


def test_views_used_several_times_need_gradients_in_float32() -> None:
    x = torch.randn(6, 4)
    assert reasons(lowered(Views(), example_inputs=x, grads=BF16)) == {
        "weight": "several uses, some of views"
    }
    plain = Views()
    model = copy.deepcopy(plain)
    assert reasons(lowered(model, example_inputs=x)) == {"weight": ""}
    for each in (plain, model):
        with torch.autocast("cpu", dtype=BF16):
            each(x).float().square().sum().backward()
    assert model.weight.grad is not None
    assert plain.weight.grad is not None
    assert torch.equal(model.weight.grad, plain.weight.grad)


def test_parameters_that_share_memory_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data)
    assert set(reasons(lowered(model)).values()) == {"shared memory"}


def test_the_table_says_what_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    handle = fastamp.optim.low_precision_weights_(Model())
    summary = capsys.readouterr().out
    assert summary.startswith("low_precision_weights_: 6 of 9 parameters in bfloat16: ")
    assert "norm.weight" in str(handle)
    assert "LayerNorm" in str(handle)


def test_masters_start_from_all_bits_whenever_the_optimizer_is_made() -> None:
    model = nn.Linear(8, 8)
    expected = model.weight.detach().clone()
    early = fastamp.optim.SGD(model.parameters(), lr=0.1)
    lowered(model, optimizer=early)
    late = fastamp.optim.SGD(model.parameters(), lr=0.1, master="remainder")
    for optimizer in (early, late):
        assert torch.equal(optimizer.masters()[model.weight], expected)
    model.weight.grad = torch.zeros(8, 8)
    early.step()
    assert torch.equal(early.state[model.weight]["master_param"], expected)
    assert _C.starting_master_of(model.weight) is None  # taken
    assert torch.equal(late.masters()[model.weight], expected.to(BF16).float())


def test_what_is_written_before_the_first_step_counts() -> None:
    model = nn.Linear(8, 8)
    lowered(model)
    with torch.no_grad():
        model.weight.fill_(0.5)
    optimizer = fastamp.optim.SGD(model.parameters(), lr=1.0, master="remainder")
    model.weight.grad = torch.full((8, 8), 0.25)
    optimizer.step()
    assert (optimizer.masters()[model.weight] == 0.25).all()


def test_masters_go_with_their_parameters() -> None:
    model = nn.Linear(8, 8)
    lowered(model)
    master = _C.starting_master_of(model.weight)
    assert master is not None
    gone = weakref.ref(master)
    del model, master
    gc.collect()
    lowered(nn.Linear(2, 2))  # looks for those whose parameters are gone
    assert gone() is None


def test_frozen_parameters_have_no_master() -> None:
    model = nn.Linear(8, 8)
    model.weight.requires_grad_(False)
    lowered(model)
    assert model.weight.dtype == BF16
    assert not model.weight.requires_grad
    assert _C.starting_master_of(model.weight) is None
    assert _C.starting_master_of(model.bias) is not None


def test_plain_loading_rounds_and_the_handles_does_not() -> None:
    source = nn.Linear(8, 8).state_dict()
    model = nn.Linear(8, 8)
    same_16_bits = torch.zeros(8, 8, dtype=torch.bool)
    same_16_bits[0] = True
    mine = source["weight"].to(BF16).float() * (1 + 2**-10)
    mine[1:] += 1
    with torch.no_grad():
        model.weight.copy_(mine)
    optimizer = fastamp.optim.SGD(model.parameters(), lr=0.1)
    handle = lowered(model, optimizer=optimizer)
    model.weight.grad = torch.zeros(8, 8)
    optimizer.step()
    model.load_state_dict(source)
    # An element whose 16 bits are those it had keeps the master that rounds to them.
    loaded = torch.where(same_16_bits, mine, source["weight"].to(BF16).float())
    assert torch.equal(handle.state_dict()["weight"], loaded)
    handle.load_state_dict(source)
    assert torch.equal(handle.state_dict()["weight"], source["weight"])
    assert handle.state_dict()["weight"].dtype == torch.float32
    optimizer.step()
    assert torch.equal(optimizer.masters()[model.weight], source["weight"])
    with pytest.raises(RuntimeError, match="Missing key"):
        handle.load_state_dict({"weight": source["weight"]})


def test_a_deep_copy_trains_from_its_16_bits() -> None:
    model = nn.Linear(8, 8)
    lowered(model)
    copied = copy.deepcopy(model)
    assert copied.weight.dtype == BF16
    assert _C.starting_master_of(copied.weight) is None


def with_gradient() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.zeros(2, 2)
    return model


class Shard(nn.Parameter):
    pass


def with_subclass() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight = Shard(torch.ones(2, 2))
    return model


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (
            lambda: None,
            {},
            TypeError,
            "low_precision_weights_: expected model to be a torch.nn.Module",
        ),
        (Model, {"dtype": torch.float8_e4m3fn}, ValueError, "expected dtype to be float16 or"),
        (Model, {"dtype": "bf16"}, TypeError, "expected dtype to be a torch.dtype"),
        (Model, {"grads": torch.float16}, ValueError, "expected grads to be torch.float32 or"),
        (Model, {"keep": "head"}, TypeError, "expected keep to be a sequence of names"),
        (Model, {"keep": ["head"]}, ValueError, "got 'head', which fits none"),
        (
            Model,
            {"optimizer": torch.optim.SGD([torch.ones(1)])},
            TypeError,
            "fastamp.optim.fuse_ makes one",
        ),
        (Model, {"example_inputs": (TOKENS, TOKENS)}, RuntimeError, "runs with the example"),
        (with_gradient, {}, ValueError, "call zero_grad\\(\\) first"),
        (with_subclass, {}, TypeError, "expected plain parameters, got weight, a Shard"),
        (nn.ReLU, {}, ValueError, "expected a model with parameters"),
    ],
)
def test_what_is_refused_changes_nothing(
    make: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = make()
    with pytest.raises(error, match=message):
        lowered(model, **options)
    if isinstance(model, nn.Module):
        assert {p.dtype for p in model.parameters()} <= {torch.float32}
        assert all(_C.starting_master_of(p) is None for p in model.parameters())


def test_a_converted_model_is_refused() -> None:
    model = fastamp.inference.convert(nn.Linear(4, 4), BF16, verbose=False)
    with pytest.raises(ValueError, match="not converted"):
        lowered(model)
