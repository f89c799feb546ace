# SPDX-License-Identifier: Apache-2.0
"""docs/rl.md: both programs run as they stand, and what the page says of them holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fastamp
import fastamp.optim
from support.ranks import results_of_two_ranks

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "rl.md").read_text(encoding="utf-8")
ALONE, SHARDED = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


pytestmark = pytest.mark.usefixtures("one_thread")


def run(program: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(program, "docs/rl.md", "exec"), names)
    return names


def share_of_right_actions(weights: dict[str, torch.Tensor]) -> float:
    generator = torch.Generator().manual_seed(7)
    states = torch.randn(2000, 8, generator=generator)
    w0, b0, w1, b1 = (weights[key].float().cpu() for key in sorted(weights, key=_layer_order))
    actions = (torch.tanh(states @ w0.t() + b0) @ w1.t() + b1).argmax(1)
    return float((actions == states[:, :4].argmax(1)).float().mean())


def _layer_order(key: str) -> tuple[str, bool]:
    return key.split(".")[0], key.endswith("bias")


def test_every_block_is_run():
    assert TEXT.count("```python") == TEXT.count("```") / 2 == 2


def test_the_program_for_one_device_learns_and_resumes():
    names = run(ALONE)
    policy, scaler = names["policy"], names["scaler"]
    assert {p.dtype for p in policy.parameters()} == {torch.float16}
    assert share_of_right_actions(names["weights_of_engine"]) > 0.5
    assert names["resumed"].state_dict() == scaler.state_dict()
    numbers = json.loads(names["checkpoint"]["scaler"])
    assert numbers["fast_growth_interval"] == 16
    assert [row.step for row in scaler.history() if row.skipped] == names["skipped"]
    masters = names["optimizer"].masters()
    for parameter in policy.parameters():
        assert torch.equal(masters[parameter].half(), parameter)
    assert any(not torch.equal(masters[p], p.float()) for p in policy.parameters())


def train_sharded(_rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    names = run(SHARDED)
    history = names["scaler"].history()
    return {
        "skipped": names["skipped"],
        "scales": [row.scale for row in history],
        "right": share_of_right_actions(names["state"]),
        "weights": {name: tensor.tolist() for name, tensor in names["state"].items()},
        "shards": {str(p.to_local().dtype) for p in names["policy"].parameters()},
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    backend = "nccl" if torch.cuda.device_count() >= 2 else "gloo"
    yield from results_of_two_ranks(train_sharded, tmp_path_factory, backend)


def test_the_sharded_program_learns_and_skips_on_all_ranks(ranks):
    first, second = ranks
    assert first["skipped"] == second["skipped"]
    assert 15 in first["skipped"]
    assert first["scales"] == second["scales"]
    assert first["weights"] == second["weights"]
    assert first["shards"] == {"torch.float32"}
    assert first["right"] > 0.4


# -- what the page promises, without its programs


class Bandit:
    """REINFORCE on states whose first four numbers say which action is right."""

    def __init__(self, scaler: Any, make_optimizer: Any) -> None:
        torch.manual_seed(3)
        self.policy = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
        )
        self.optimizer = make_optimizer(self.policy.parameters())
        self.scaler = scaler
        self.generator = torch.Generator().manual_seed(5)

    def step(self, region: Any, factor: float = 1.0) -> float:
        states = torch.randn(32, 8, generator=self.generator)
        with region:
            log_probs = torch.log_softmax(self.policy(states), dim=1)
            probabilities = log_probs.detach().float().exp()
            actions = torch.multinomial(probabilities, 1, generator=self.generator)
            rewards = factor * (actions[:, 0] == states[:, :4].argmax(1)).float()
            loss = -((rewards - rewards.mean()) * log_probs.gather(1, actions)[:, 0]).mean()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


def test_with_default_options_a_run_is_torchs_bit_for_bit():
    options: dict[str, Any] = {"init_scale": 2.0**14, "growth_interval": 4}
    runs = []
    for scaler, region in (
        (torch.amp.GradScaler("cpu", **options), torch.autocast("cpu", dtype=torch.float16)),
        (fastamp.GradScaler("cpu", **options), fastamp.autocast("cpu", dtype=torch.float16)),
    ):
        bandit = Bandit(scaler, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))
        losses = [bandit.step(region, 1e9 if i in (7, 8) else 1.0) for i in range(25)]
        weights = [p.detach().view(torch.int32).tolist() for p in bandit.policy.parameters()]
        runs.append((losses, weights, scaler.state_dict()))
    assert runs[0] == runs[1]
    assert runs[0][2]["scale"] != 2.0**14


def steps_to_recover(**options: Any) -> tuple[int, float]:
    scaler = fastamp.GradScaler("cpu", init_scale=1024.0, growth_interval=200, **options)
    bandit = Bandit(scaler, lambda p: fastamp.optim.AdamW(p, lr=0.01))
    region = fastamp.autocast("cpu", dtype=torch.float16)
    for _ in range(10):
        bandit.step(region, 1e6)  # A reward model that has lost its scale.
    collapsed = scaler.get_scale()
    for count in range(1, 50):
        bandit.step(region)
        if scaler.get_scale() >= 512.0:
            return count, collapsed
    return 50, collapsed


def test_after_a_burst_of_rewards_fast_growth_is_back_in_tens_of_steps():
    usual, collapsed = steps_to_recover()
    fast, same = steps_to_recover(fast_growth_interval=5, max_scale=1024.0)
    assert collapsed == same < 512.0 / 4
    assert fast <= 5 * 9
    assert usual == 50  # Not one growth.
