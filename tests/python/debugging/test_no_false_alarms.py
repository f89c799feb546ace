# SPDX-License-Identifier: Apache-2.0
"""The linter finds nothing in the benchmarks' training."""

from __future__ import annotations

import pytest
import torch

import fastamp
from benchmarks import models
from benchmarks.harness import BASELINE, FASTAMP
from benchmarks.training import Training

# ResNet-50 on a CPU takes its time, and shows nothing that ResNet-18 does not.
WORKLOADS = [w for w in models.workloads("cpu") if "ResNet-50" not in w.name] + [models.digits(64)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("which", [BASELINE, FASTAMP])
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name.split(",")[0])
def test_the_benchmarks_models_have_no_findings(workload, which, dtype):
    for package in ("sklearn", "timm", "transformers"):
        pytest.importorskip(package)
    training = Training(workload, which, "cpu", dtype)
    report = fastamp.debug.check(
        training.model, training.optimizer, training.scaler, step=training.step
    )
    assert not report, str(report)


@pytest.mark.slow
def test_the_largest_models_have_no_findings_either_but_for_a_vocabulary():
    """Sizes as on a GPU, looked at without a step."""
    for package in ("timm", "torchvision", "transformers"):
        pytest.importorskip(package)
    for workload in models.workloads("cuda"):
        with torch.device("meta"):
            model = workload.model()
        report = fastamp.debug.check(model)
        found = {(f.rule, f.what) for f in report.findings}
        # GPT-2's and BERT's are the standard examples of sizes to round up.
        assert found <= {
            ("dims-not-multiple-of-8", "out_features=50257"),
            ("dims-not-multiple-of-8", "out_features=30522"),
        }, (workload.name, found)
