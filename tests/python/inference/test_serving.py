# SPDX-License-Identifier: Apache-2.0
"""AOTInductor packages that export made, and examples/cpp/serve.cpp, which runs one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

import fastamp
from packaging_tools import build_example
from support.inference_models import NAMES, in_region, model_and_input, tensors

FP16, BF16 = torch.float16, torch.bfloat16
# Relative to the largest magnitude: as docs/inference.md states them.
BOUNDS = {FP16: 2**-7, BF16: 2**-4}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # two compilers at work


def test_a_program_without_python_serves_a_package_and_a_script(tmp_path: Path):
    model, x = model_and_input("MLP")
    wanted = in_region(model, BF16, "cpu", x)[0]
    package, script, given, result = (
        tmp_path / name for name in ("model.pt2", "model.ts", "x.pt", "y.pt")
    )
    done = fastamp.inference.export(
        model, (x,), BF16, format="aoti", path=package, keep_io_types=False, verbose=False
    )
    assert done.types.outputs == ("bfloat16",)
    assert "the package agrees with the program" in done.checks[0]
    torch.jit.trace(model, (x,)).save(str(script))
    torch.save(x.to(BF16), given)
    program = build_example(tmp_path, "serve")
    run = subprocess.run(
        [program, package, script, given, result], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout == "package BFloat16, script BFloat16\n"
    from_package, from_script = torch.load(result)
    assert torch.equal(from_script, wanted)
    assert (from_package.float() - wanted.float()).abs().max() <= 2**-6 * wanted.abs().max()
    # And says what is wrong.
    run = subprocess.run([program, "a"], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "usage: serve PACKAGE.pt2" in run.stderr


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_packages_of_models(name: str, dtype: torch.dtype, tmp_path: Path):
    model, x = model_and_input(name)
    path = tmp_path / "model.pt2"
    # How fast the code is that calls the kernels does not matter here, but takes long to compile.
    with torch._inductor.config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):
        done = fastamp.inference.export(
            model, (x,), dtype, lists="cuda", format="aoti", path=path, verbose=False
        )
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt2"]
    assert "the package agrees with the program" in done.checks[0]
    found = tensors(torch._inductor.aoti_load_package(str(path))(x))
    region = in_region(model, dtype, "cuda", x)
    for one, other in zip(found, region, strict=True):
        assert one.dtype == torch.float32  # keep_io_types
        assert torch.isfinite(one).all()
        assert (one - other.float()).abs().max() <= BOUNDS[dtype] * other.float().abs().max()
