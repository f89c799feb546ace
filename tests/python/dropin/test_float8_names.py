# SPDX-License-Identifier: Apache-2.0
"""``--float8-exclude NAME``: weights of programs that are not changed, found by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fastamp._C as _C
from fastamp._cli.float8_names import NamedExclusions


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(12))
        self.lm_head = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        """A step of a program that calls the parts of its model and not the model."""
        return self.lm_head(self.layers[0](x)).sum()


X = torch.ones(2, 16)


@pytest.fixture
def exclude() -> Iterator[Callable[..., NamedExclusions]]:
    made: list[NamedExclusions] = []

    def make(*names: str) -> NamedExclusions:
        made.append(NamedExclusions(names))
        return made[-1]

    yield make
    for each in made:
        each.close()


def excluded(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if _C.is_excluded_from_float8(p)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lm_head", ["lm_head.weight", "lm_head.bias"]),
        ("lm_head.weight", ["lm_head.weight"]),
        ("*head", ["lm_head.weight", "lm_head.bias"]),
        ("scale", ["scale"]),
        ("layers.1", ["layers.1.0.weight", "layers.1.0.bias"]),
        ("layers.1?.0.weight", ["layers.10.0.weight", "layers.11.0.weight"]),
        ("1.0", ["layers.1.0.weight", "layers.1.0.bias"]),
        ("head", []),
        ("lm", []),
        ("layers.1.0.weigh", []),
        ("Layers", []),
    ],
)
def test_whole_parts_of_dotted_names_are_compared(exclude: Any, name: str, expected: list[str]):
    exclude(name)
    model = Model()
    assert excluded(model) == []
    model(X)
    assert excluded(model) == expected


def test_models_made_before_are_found_too(exclude: Any):
    model = Model()
    exclude("lm_head.weight")
    model(X)
    assert excluded(model) == ["lm_head.weight"]


def test_a_wrapper_adds_to_the_name_and_takes_nothing_from_it(exclude: Any):
    exclude("layers.2.0.weight", "module.scale")
    model = nn.ModuleDict({"module": Model()})
    model["module"](X)
    assert excluded(model) == ["module.scale", "module.layers.2.0.weight"]


def test_parts_that_a_program_calls_by_themselves_have_their_names(exclude: Any):
    exclude("lm_head.weight", "layers.0.0.bias")
    model = Model()
    model.loss(X)
    assert excluded(model) == ["layers.0.0.bias", "lm_head.weight"]


def test_copied_and_unpickled_models_are_known_from_what_is_called_down(exclude: Any):
    exclude("lm_head.weight")
    original = Model()
    for model in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        model(X)
        assert excluded(model) == ["lm_head.weight"]
    assert excluded(original) == []


def test_a_weight_that_is_replaced_is_found_again(exclude: Any):
    exclude("lm_head.weight")
    model = Model()
    model(X)
    model.lm_head.weight = nn.Parameter(torch.zeros(16, 16))
    model(X)
    assert excluded(model) == ["lm_head.weight"]
    model.lm_head = nn.Linear(16, 16)
    model(X)
    assert excluded(model) == ["lm_head.weight"]
    model.load_state_dict(Model().state_dict(), assign=True)
    model(X)
    assert excluded(model) == ["lm_head.weight"]
    model.to(torch.bfloat16)(X.bfloat16())
    assert excluded(model) == ["lm_head.weight"]


def test_tied_weights_have_both_names(exclude: Any):
    exclude("lm_head.weight")
    model = Model()
    model.scale = model.lm_head.weight
    model.layers[3][0].weight = model.lm_head.weight
    model.layers[3](X)
    assert _C.is_excluded_from_float8(model.layers[3][0].weight)


def test_a_shared_module_has_all_its_names_and_cycles_end(exclude: Any):
    exclude("output.weight")
    model = Model()
    model.output = model.lm_head
    model.layers[0][0].owner = model
    model.layers[1](X)
    assert _C.is_excluded_from_float8(model.lm_head.weight)
    assert not _C.is_excluded_from_float8(model.lm_head.bias)


def test_modules_may_list_their_parts_in_their_own_way(exclude: Any):
    class Own(Model):
        def named_modules(self) -> Any:  # type: ignore[override]
            raise NotImplementedError

        named_parameters = named_modules

    exclude("lm_head.weight")
    model = Own()
    model(X)
    assert _C.is_excluded_from_float8(model.lm_head.weight)


def test_closing_ends_exclusions_and_leaves_no_hook(exclude: Any):
    from torch.nn.modules import module

    before = len(module._global_forward_pre_hooks), len(module._global_module_registration_hooks)
    made = exclude("lm_head")
    model = Model()
    model(X)
    made.close()
    assert excluded(model) == []
    assert before == (
        len(module._global_forward_pre_hooks),
        len(module._global_module_registration_hooks),
    )


def test_modules_are_not_kept_alive(exclude: Any):
    import gc
    import weakref

    exclude("lm_head")
    model = Model()
    model(X)
    gone = weakref.ref(model), weakref.ref(model.lm_head.weight)
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_modules_that_compare_by_value_are_told_apart(exclude: Any):
    class Equal(nn.Linear):
        def __hash__(self) -> int:
            return 0

        def __eq__(self, other: object) -> bool:
            return True

    exclude("head")
    model = nn.ModuleDict({"body": Equal(16, 16), "head": Equal(16, 16)})
    assert not _C.is_excluded_from_float8(model["head"].weight)
    model["body"](X)
    assert _C.is_excluded_from_float8(model["head"].weight)
    assert not _C.is_excluded_from_float8(model["body"].weight)


def test_what_no_weight_has_is_told(exclude: Any):
    made = exclude("lm_head", "lm_heed")
    made._warn()  # no module was called yet
    Model()(X)
    with pytest.warns(UserWarning, match="got 'lm_heed', which no weight has") as caught:
        made._warn()
    assert len(caught) == 1
