# SPDX-License-Identifier: Apache-2.0
"""The scripts of tests/data/scaler_scenarios.txt, which the C++ scaler runs too."""

from pathlib import Path

import pytest
import torch

import fastamp

TABLE = Path(__file__).parents[2] / "data" / "scaler_scenarios.txt"


def read_scenarios():
    scenarios = {}
    for line in TABLE.read_text().splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if words[0] == "scenario":
            script = scenarios[" ".join(words[1:])] = []
        else:
            script.append(words)
    return scenarios


SCENARIOS = read_scenarios()


def yes_or_no(value):
    return "yes" if value else "no"


class Player:
    """Runs the lines of a scenario."""

    def __init__(self, kind):
        self.kind = kind
        self.scaler = fastamp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.scaler.scale(torch.ones(()))
        self.optimizers = {}
        for name in "ab":
            self.recreate(name)

    def recreate(self, name):
        self.optimizers.pop(name, None)
        self.optimizers[name] = self.kind([torch.nn.Parameter(torch.ones(2))], lr=1.0)

    def parameter_of(self, name):
        return self.optimizers[name].param_groups[0]["params"][0]

    def run(self, words):
        getattr(self, "do_" + words[0], self.check)(*words)

    def do_only(self, *words):
        assert words[1:] == ("fused",)

    def do_backward(self, _, name, value):
        self.scaler.scale(torch.ones(()))
        self.do_replace(_, name, value)

    def do_replace(self, _, name, value):
        self.parameter_of(name).grad = torch.full((2,), float(value))

    def do_drop(self, _, name):
        self.parameter_of(name).grad = None

    def do_recreate(self, _, name):
        self.recreate(name)

    def do_unscale(self, _, name):
        self.scaler.unscale_(self.optimizers[name])

    def do_step(self, _, name):
        self.scaler.step(self.optimizers[name])

    def do_clip_norm(self, _, name, value):
        self.scaler.clip_grad_norm_(self.optimizers[name], float(value))

    def do_clip_value(self, _, name, value):
        self.scaler.clip_grad_value_(self.optimizers[name], float(value))

    def do_update(self, _, value=None):
        self.scaler.update(None if value is None else float(value))

    def do_update_tensor(self, _, value):
        self.scaler.update(torch.tensor(float(value)))

    def do_refused(self, _, *words):
        before = self.scaler.state_dict(), list(self.scaler._per_optimizer_states)
        with pytest.raises((AssertionError, RuntimeError)):
            self.run(words)
        assert (self.scaler.state_dict(), list(self.scaler._per_optimizer_states)) == before

    def check(self, what, *expected):
        scaler = self.scaler
        if what == "scale":
            assert [scaler.get_scale(), scaler.get_scale_async()] == [float(expected[0])] * 2
        elif what == "skipped":
            assert yes_or_no(scaler.step_was_skipped) == expected[0]
        elif what == "skipped_of":
            assert (
                yes_or_no(scaler.step_was_skipped_for(self.optimizers[expected[0]]))
                == (expected[1])
            )
        elif what == "history":
            assert [
                f"{row.step}:{row.scale:g}:{yes_or_no(row.skipped)}:{row.growth_tracker}"
                for row in scaler.history()
            ] == list(expected)
        elif what == "report":
            step = scaler.overflow_report().step
            assert ("none" if step is None else str(step)) == expected[0]
        elif what == "overflowed":
            named = [(name, self.parameter_of(name)) for name in "ab"]
            report = scaler.overflow_report(named)
            assert [gradient.name for gradient in report.gradients] == list(expected)
        elif what == "grad_below":
            assert self.parameter_of(expected[0]).grad.abs().max() < float(expected[1])
        elif what == "grad":
            assert self.parameter_of(expected[0]).grad.tolist() == [float(expected[1])] * 2
        else:
            assert what == "parameter"
            assert self.parameter_of(expected[0]).tolist() == [float(expected[1])] * 2


@pytest.mark.parametrize("kind", [torch.optim.SGD, fastamp.optim.SGD], ids=["torch", "fused"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name, kind):
    script = SCENARIOS[name]
    if ["only", "fused"] in script and kind is torch.optim.SGD:
        pytest.skip("of fused optimizers only")
    player = Player(kind)
    for words in script:
        player.run(words)
