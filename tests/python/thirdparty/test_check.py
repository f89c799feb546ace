# SPDX-License-Identifier: Apache-2.0
"""The linter finds nothing in what the five libraries do."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import fastamp
from fastamp._cli.check_command import check_program
from fastamp._debug.check.rules import Findings
from support.twin_runs import seed

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]  # their warnings


def neighbour(name: str) -> Any:
    """A file of tests beside this one, for the programs in it."""
    path = Path(__file__).with_name(f"test_{name}.py")
    spec = importlib.util.spec_from_file_location(f"neighbour_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_silent(job: Any, *ignore: str) -> None:
    findings = Findings(ignore)
    seed()
    with fastamp.install():
        watched = check_program(job, findings)
    report = findings.report(has_step=True)
    assert not report, str(report)
    assert watched.steps > 0
    assert watched.models


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_accelerate(precision: str, accumulate: int):
    pytest.importorskip("accelerate", reason="the thirdparty extra is not installed")
    torchs = neighbour("accelerate")
    try:
        assert_silent(lambda: torchs.Job("cpu", precision, accumulate).train(overflow_at=3))
    finally:
        torchs.reset()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_transformers(precision: str, kind: str, tmp_path: Path, monkeypatch: Any):
    pytest.importorskip("accelerate", reason="the thirdparty extra is not installed")
    library = pytest.importorskip("transformers", reason="the thirdparty extra is not installed")
    monkeypatch.chdir(tmp_path)
    torchs = neighbour("transformers")
    from accelerate.state import AcceleratorState, GradientState

    try:
        assert_silent(lambda: torchs.train(library, kind, "cpu", precision))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.fixture(scope="module")  # imported before a test begins: it wraps torch.compile for good
def pl() -> Any:
    return pytest.importorskip("lightning.pytorch", reason="the thirdparty extra is not installed")


@pytest.mark.parametrize("scaler", [None, "lightning's"])
def test_lightning(pl: Any, scaler: str | None):
    torchs = neighbour("lightning")

    def job() -> None:
        options: dict[str, Any] = {"precision": "bf16-mixed"}
        if scaler:
            options = {"plugins": [torchs.plugin("cpu", scaler)]}
        fit = torchs.trainer(pl, "cpu", gradient_clip_val=0.5, **options)
        fit.fit(torchs.classifier(pl), torchs.batches(), torchs.batches())

    assert_silent(job)


@pytest.mark.parametrize(
    "name", ["timm_vit", "timm_resnet", "torchvision_vit", "torchvision_resnet"]
)
def test_timm_and_torchvision(name: str):
    torchs = neighbour("vision")

    def job() -> None:
        model = getattr(torchs, name)()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        x, y = torch.randn(2, 3, 32, 32), torch.arange(2)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = torch.nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    assert_silent(job)
