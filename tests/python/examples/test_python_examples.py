# SPDX-License-Identifier: Apache-2.0
"""The programs in examples/python, run as their headers say, for fewer steps."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.simulated_ranks import run_on_ranks

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "python"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*words: object) -> str:
    """Runs Python with these arguments, offline; returns what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def number(pattern: str, output: str) -> float:
    found = re.search(pattern, output)
    assert found, output
    return float(found[1])


def test_a_resnet_learns_digits_in_bf16():
    pytest.importorskip("timm")
    pytest.importorskip("tqdm")
    # CPUs without bf16 arithmetic need half a minute for a step of it.
    output = run(EXAMPLES / "vision.py", "--steps", 60, "--seconds", 60)
    accuracy = number(r"resnet18, bf16: accuracy (\d+\.\d)%", output)
    steps = number(r"after (\d+) of 60 steps", output)
    assert 1 <= steps <= 60
    if steps == 60:
        assert accuracy > 30  # chance is 10


def test_few_seconds_make_few_steps():
    pytest.importorskip("timm")
    pytest.importorskip("tqdm")
    small = ["--batch", 8, "--seconds", 1e-6]
    assert number(r"after (\d+) of 200 steps", run(EXAMPLES / "vision.py", *small)) == 1


def test_a_vision_transformer_trains_in_fp16():
    pytest.importorskip("timm")
    pytest.importorskip("tqdm")
    model = ["--model", "vit_tiny_patch16_224", "--dtype", "fp16"]
    output = run(EXAMPLES / "vision.py", *model, "--steps", 10, "--seconds", 60)
    assert "vit_tiny_patch16_224, fp16: accuracy" in output


def test_a_resumed_gpt2_run_ends_where_an_uninterrupted_one_does(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("tqdm")
    small = ["--width", 64, "--layers", 2, "--dtype", "fp16"]
    halves = tmp_path / "halves.pt"
    run(EXAMPLES / "gpt2.py", "--steps", 20, "--checkpoint", halves, *small)
    resumed = run(EXAMPLES / "gpt2.py", "--steps", 40, "--checkpoint", halves, *small)
    whole = tmp_path / "whole.pt"
    assert run(EXAMPLES / "gpt2.py", "--steps", 40, "--checkpoint", whole, *small) == resumed
    assert number(r"fp16: validation loss (\d\.\d+)", resumed) < 4.5  # ln 256 is 5.5
    first, second = torch.load(halves), torch.load(whole)
    assert first["scaler"] == second["scaler"]
    for name, weight in second["model"].items():
        assert torch.equal(first["model"][name], weight), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["halves.pt", "whole.pt"]


def test_the_trainer_of_an_unchanged_program():
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    output = run("-m", "fastamp", EXAMPLES / "hf_trainer.py", "--steps", 100)
    assert number(r"bf16: accuracy (\d+\.\d)%", output) > 35  # chance is 25


def test_accelerate_in_an_unchanged_program():
    pytest.importorskip("accelerate")
    output = run("-m", "fastamp", EXAMPLES / "accelerate_loop.py")
    assert number(r"epoch 5: accuracy (\d+\.\d)%", output) > 95


def test_bad_data_under_a_guard():
    output = run(EXAMPLES / "guarded.py")
    assert number(r"accuracy (\d+\.\d)%", output) > 90
    assert number(r"accuracy (\d+\.\d)%", run(EXAMPLES / "guarded.py", "--no-guard")) < 20


def test_two_passes_per_step_and_lbfgs():
    for options in ([], ["--lbfgs"]):
        output = run(EXAMPLES / "sam.py", *options)
        assert number(r"accuracy (\d+\.\d)%", output) > 90
        assert number(r"accuracy .*, (\d+) of", output) < 20


def test_fp16_weights_in_a_loop_that_unscales_and_clips():
    output = run(EXAMPLES / "fp16_weights.py")
    half, full = (number(rf"fp{bits} weights: loss (\d\.\d+)", output) for bits in (16, 32))
    assert full < 0.4
    assert abs(half - full) < 0.05 * full
    program = [sys.executable, str(EXAMPLES / "fp16_weights.py"), "--no-masters", "--steps", "1"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert "Attempting to unscale FP16 gradients" in done.stderr
    assert "widen_grads=True" in done.stderr


def test_experts_that_write_16_bits_into_float32():
    output = run(EXAMPLES / "mixture.py")
    assert number(r"accuracy (\d+\.\d)%", output) > 85
    assert number(r"cast: \{'index_add_': (\d+)\}", output) > 100
    program = [sys.executable, str(EXAMPLES / "mixture.py"), "--preset", "torch"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert "index_add_(): self (Float) and source (BFloat16)" in done.stderr


def test_positions_of_a_long_context():
    output = run(EXAMPLES / "long_context.py", "--length", 1024)
    assert number(r"in bfloat16: wrong by up to (\S+)", output) > 0.5
    assert number(r"found \['rotary'\]: wrong by up to (\S+)", output) == 0


def test_sparse_products_and_ffts():
    assert number(r"accuracy (\d+\.\d)%", run(EXAMPLES / "graph.py")) > 90


def test_regions_of_tasks():
    output = run("-W", "error", EXAMPLES / "async_serving.py")
    assert output == "60 in bfloat16, 20 in float32\n"


RANKS = [("ddp", "fp16"), ("fsdp2", "fp16"), ("fsdp2", "fp8")]


@pytest.mark.parametrize(("parallel", "dtype"), RANKS)
def test_two_processes(parallel, dtype):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    words = ["--parallel", parallel, "--dtype", dtype, "--steps", 50]
    output = run(*launch, EXAMPLES / "ranks.py", *words)
    assert number(rf"{parallel}, {dtype}: accuracy (\d+\.\d)%", output) > 90


@pytest.mark.parametrize(("parallel", "dtype"), RANKS)
def test_four_simulated_ranks(parallel, dtype):
    example = runpy.run_path(str(EXAMPLES / "ranks.py"))

    def work(_: int) -> float:
        accuracy: float = example["train"](parallel, dtype, 50, torch.device("cpu"))
        return accuracy

    outcomes = run_on_ranks(4, work)
    assert [outcome.error for outcome in outcomes] == [None] * 4
    assert {outcome.result for outcome in outcomes} == {outcomes[0].result}
    assert outcomes[0].result > 0.9


def test_programs_for_other_libraries_do_not_name_fastamp():
    for name in ("hf_trainer.py", "accelerate_loop.py"):
        assert "import fastamp" not in (EXAMPLES / name).read_text(encoding="utf-8")


#: What each needs, and options that make it short.
CHECKED = {
    "accelerate_loop.py --epochs 1": ("accelerate", "sklearn"),
    "fp16_weights.py": (),
    "gpt2.py --steps 4 --width 64 --layers 2 --dtype fp16": ("transformers", "tqdm"),
    "graph.py": (),
    "guarded.py": (),
    "hf_trainer.py --steps 4": ("transformers", "accelerate"),
    "sam.py": (),
    "sam.py --lbfgs": (),
    "vision.py --steps 4 --batch 8": ("timm", "tqdm"),
}


@pytest.mark.parametrize("program", CHECKED)
def test_check_finds_nothing_in_the_examples(program):
    for package in CHECKED[program]:
        pytest.importorskip(package)
    name, *options = program.split()
    output = run("-m", "fastamp", "check", EXAMPLES / name, *options)
    assert number(r"check: (\d+) optimizer steps", output) == 3
    assert "\n0 findings\n" in output


def test_check_finds_nothing_in_any_mode_of_the_digits(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("tqdm")
    data = tmp_path / "digits.pt"
    run(EXAMPLES.parent / "data" / "digits.py", data)
    options = ["--steps", "0", EXAMPLES / "digits.py", data, "--iters", "3"]
    output = run("-m", "fastamp", "check", *options)
    assert number(r"check: (\d+) optimizer steps", output) == 12
    assert "\n0 findings\n" in output
