# SPDX-License-Identifier: Apache-2.0
"""``python -m fastamp --guard``: programs that know nothing of it."""

from __future__ import annotations

from pathlib import Path

import torch

from support.children import run_program

PROGRAM = """
import torch, warnings
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
{make}
def step(value):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.full((3, 4), value)).float().square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
for value in (1.0, float("nan"), 2.0):
    step(value)
torch.save([p.detach() for p in model.parameters()], "weights.pt")
print("done")
"""


def run(tmp_path: Path, make: str, *options: str) -> tuple[str, str, list[torch.Tensor]]:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM.format(make=make), encoding="utf-8")
    done = run_program("-m", "fastamp", *options, program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr, torch.load(tmp_path / "weights.pt")


def finite(weights: list[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(w).all()) for w in weights)


def test_each_optimizer_of_the_program_is_guarded(tmp_path: Path):
    make = "optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)"
    out, err, weights = run(tmp_path, make, "--guard")
    assert out == "done\n"
    assert finite(weights)
    assert "step 1 of AdamW is skipped" in err
    assert "1 steps of AdamW were skipped" in err
    assert "parameter 0" in err
    out, err, weights = run(tmp_path, make)
    assert not finite(weights)
    assert "fastamp" not in err


def test_what_cannot_be_guarded_runs_with_a_warning(tmp_path: Path):
    make = """
class Twice(torch.optim.LBFGS):
    def step(self, closure=None):
        return None
optimizer = Twice(model.parameters())
"""
    out, err, _ = run(tmp_path, make, "--guard")
    assert out == "done\n"
    assert "--guard: Twice runs without a guard" in err


def test_a_program_may_guard_by_itself(tmp_path: Path):
    make = """
import fastamp
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
guard = fastamp.StepGuard(optimizer, max_consecutive=3)
"""
    out, err, weights = run(tmp_path, make, "--guard")
    assert out == "done\n"
    assert finite(weights)
    assert "skipped" not in err


def test_the_option_goes_with_others_and_needs_a_program(tmp_path: Path):
    make = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
    report = tmp_path / "report.json"
    _, _, weights = run(tmp_path, make, "--guard", "--report", str(report))
    assert finite(weights)
    assert report.exists()
    done = run_program("-m", "fastamp", "--guard")
    assert done.returncode == 2
    assert "--guard" in done.stderr


def test_processes_that_the_program_spawns_are_guarded(tmp_path: Path):
    (tmp_path / "spawn.py").write_text(
        "import torch\n"
        "import torch.multiprocessing as mp\n"
        "def work(rank):\n"
        "    parameter = torch.nn.Parameter(torch.ones(2))\n"
        "    optimizer = torch.optim.SGD([parameter], lr=0.1)\n"
        "    parameter.grad = torch.tensor([1.0, float('nan')])\n"
        "    optimizer.step()\n"
        "    print(parameter.tolist(), flush=True)\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(work, nprocs=1)\n",
        encoding="utf-8",
    )
    done = run_program("-m", "fastamp", "--guard", "spawn.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[1.0, 1.0]\n"
