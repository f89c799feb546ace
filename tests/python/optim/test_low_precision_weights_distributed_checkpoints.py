# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint with low-precision weights, before and after the first step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fastamp

if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

BF16 = torch.bfloat16


class Model(nn.Module):
    """The last layer is not used at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, whole: bool) -> torch.Tensor:
        x = self.norm(self.first(x))
        return self.last(x) if whole else x


def fresh(seed: int, remainder: str | None) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = Model()
    fastamp.optim.low_precision_weights_(model, verbose=False)
    return model, fastamp.optim.AdamW(model.parameters(), lr=1e-2, master=remainder)


def train(model: nn.Module, optimizer: Any, *, whole: bool) -> None:
    for seed in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=BF16):
            model(x, whole=whole).float().square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("remainder", [None, "remainder"])
@pytest.mark.parametrize("was_used", [False, True])
def test_before_the_first_step_states_are_whole(remainder: str | None, *, was_used: bool) -> None:
    model, optimizer = fresh(0, remainder)
    if was_used:  # By another optimizer, or not stepped.
        with torch.autocast("cpu", dtype=BF16):
            model(torch.ones(4, 8), whole=True).sum().backward()
        model.zero_grad()
    masters = {p: m.clone() for p, m in optimizer.masters().items()}
    _, state = get_state_dict(model, optimizer)
    assert {
        "exp_avg",
        "exp_avg_sq",
        "step",
        "master_remainder" if remainder else "master_param",
    } == set(state["state"]["first.weight"])
    for parameter, master in optimizer.masters().items():
        if remainder is None:
            assert torch.equal(master, masters[parameter])
        torch.testing.assert_close(master, masters[parameter], rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("remainder", [None, "remainder"])
def test_a_resumed_run_continues_bit_for_bit(remainder: str | None, tmp_path: Any) -> None:
    model, optimizer = fresh(0, remainder)
    train(model, optimizer, whole=False)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    resumed, its_optimizer = fresh(1, remainder)
    weights, state = get_state_dict(resumed, its_optimizer)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(
        resumed,
        its_optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    for one, its in ((model, optimizer), (resumed, its_optimizer)):
        train(one, its, whole=True)
    for one, other in zip(
        optimizer.masters().values(), its_optimizer.masters().values(), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {"state_dtype": BF16}),
        ("AdamW", {"state_dtype": BF16}),
        ("AdamW", {"state_dtype": "8bit", "master": "remainder"}),
        ("Muon", {"ns_dtype": torch.float16, "state_dtype": BF16}),
    ],
)
def test_full_states_on_the_cpu_take_options_that_are_dtypes(
    kind: str, options: dict[str, Any]
) -> None:
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    runs = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Linear(64, 64, bias=False, dtype=BF16)
        runs.append((model, getattr(fastamp.optim, kind)(model.parameters(), lr=0.1, **options)))
    (model, optimizer), (resumed, its_optimizer) = runs
    (weight,), (its_weight,) = model.parameters(), resumed.parameters()
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=whole))
    set_state_dict(
        resumed, its_optimizer, model_state_dict=weights, optim_state_dict=state, options=whole
    )
    assert options.items() <= its_optimizer.param_groups[0].items()
    weight.grad = its_weight.grad = torch.randn_like(weight)
    optimizer.step()
    its_optimizer.step()
    assert torch.equal(weight, its_weight)


def test_options_that_torchs_optimizer_has_loaded_count_when_it_is_fused() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    saved = fastamp.optim.AdamW([weight], state_dtype=BF16).state_dict()
    optimizer = torch.optim.AdamW([weight])
    optimizer.load_state_dict(saved)
    fastamp.optim.fuse_(optimizer)
    assert optimizer.param_groups[0]["state_dtype"] is BF16
    weight.grad = torch.ones(4, 4)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].dtype is BF16
