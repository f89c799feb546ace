# SPDX-License-Identifier: Apache-2.0
"""python.md, migrating.md and guard.md are programs that hold; other pages have snippets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fastamp
from support.children import run_program

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "prints"),
    [("python.md", "layer_norm"), ("migrating.md", ""), ("guard.md", "skipped 30")],
    ids=str,
)
def test_the_blocks_of_a_page_form_a_program(page: str, prints: str, tmp_path: Path):
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == text.count("```python") > 3
    program = tmp_path / "guide.py"
    program.write_text("\n".join(blocks), encoding="utf-8")
    # A process of its own: one of the pages installs fastamp under torch.
    run = run_program(program, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert prints in run.stdout
    said = [line for line in run.stderr.splitlines() if "Warning" in line]
    assert all("fp8 on the CPU is a reference" in line for line in said)


class Training:
    """What the snippets of pages that are no programs talk about."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential()
        self.model.blocks = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))
        self.model.head = torch.nn.Linear(16, 4)
        self.model.to(DEVICE)
        self.x = torch.randn(8, 16, device=DEVICE)
        self.targets = torch.randint(4, (8,), device=DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = fastamp.GradScaler(DEVICE, init_scale=1024.0)

    def backward(self, dtype: torch.dtype = torch.float16) -> None:
        self.optimizer.zero_grad()
        with fastamp.autocast(DEVICE, dtype=dtype):
            loss = torch.nn.functional.cross_entropy(self.model(self.x), self.targets)
        self.scaler.scale(loss).backward()

    def names(self) -> dict[str, Any]:
        return {
            "torch": torch,
            "fastamp": fastamp,
            "model": self.model,
            "x": self.x,
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(self.optimizer, 1),
            "batches": [(self.x, self.targets)] * 2,
            "loss_fn": torch.nn.functional.cross_entropy,
            "train_step": self.backward,
        }


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SNIPPETS = [
    pytest.param(page, number, id=f"{page}-{number}")
    for page, count in (("optim.md", 8), ("scaler.md", 8), ("trace.md", 1))
    for number in range(count)
]


@pytest.mark.parametrize(("page", "number"), SNIPPETS)
def test_the_snippets_of_a_page_run(page: str, number: int, tmp_path: Path, monkeypatch: Any):
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == sum(each.values[0] == page for each in SNIPPETS)
    if "plot(" in blocks[number]:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    training = Training()
    if page == "scaler.md":
        training.backward()
    names = training.names()
    exec(compile(blocks[number].replace('"cuda"', f'"{DEVICE}"'), page, "exec"), names)
    if "optimizer = " in blocks[number]:  # and what it made trains
        training.optimizer = names["optimizer"]
        for _ in range(2):
            training.backward(torch.bfloat16)
            training.scaler.step(training.optimizer)
            training.scaler.update()
        assert not training.scaler.step_was_skipped
    if "log" in names:
        names["log"].release()
