# SPDX-License-Identifier: Apache-2.0
"""``python -m fastamp --float8``: unmodified programs whose bfloat16 regions run in fp8."""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastamp
from fastamp._cli import float8_command
from support.children import check_program, run_program
from support.float8 import E4M3, outcomes

BF16, FP16 = torch.bfloat16, torch.float16
DEFAULT = fastamp.float8.Recipe()
FASTAMP = ["-m", "fastamp"]


def in_force() -> fastamp.float8.Recipe | None:
    return fastamp.float8.recipe("cpu")


@pytest.fixture
def running() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with float8_command.start():
            yield
    assert in_force() is None


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("installed", [False, True])
def test_bfloat16_regions_of_both_classes_follow_the_default_recipe(installed: bool):
    if installed:
        fastamp.install()
    layer, x = nn.Linear(32, 16), torch.randn(4, 32)
    try:
        assert in_force() is None
        for region in (
            torch.autocast("cpu"),
            torch.autocast("cpu", dtype=BF16),
            torch.amp.autocast("cpu", BF16, cache_enabled=False),
            fastamp.autocast("cpu"),
            fastamp.autocast("cpu", dtype=BF16),
            fastamp.cpu.amp.autocast(),
        ):
            with region:
                assert in_force() == DEFAULT
                assert torch.get_autocast_dtype("cpu") == BF16
                assert outcomes(lambda: layer(x)) == ["float8"]
            assert in_force() is None
        with fastamp.autocast("cpu", float8=True):
            expected = layer(x)
        with torch.autocast("cpu"):
            assert torch.equal(layer(x), expected)
    finally:
        fastamp.uninstall()


@pytest.mark.usefixtures("running")
def test_other_regions_stay_as_they_are():
    layer, x = nn.Linear(32, 16), torch.randn(4, 32)
    for region in (
        torch.autocast("cpu", dtype=FP16),
        torch.autocast("cpu", enabled=False),
        fastamp.autocast("cpu", dtype=FP16),
        fastamp.autocast("cpu", dtype=BF16, enabled=False),
        fastamp.autocast("cpu", float8=False),
        fastamp.autocast("cpu", dtype=BF16, float8=False),
    ):
        with region:
            assert in_force() is None
            assert outcomes(lambda: layer(x)) in ([""], [])
            with fastamp.autocast("cpu", dtype=BF16):
                assert in_force() == DEFAULT
    with fastamp.autocast("cpu", float8=False), torch.autocast("cpu", dtype=BF16):
        assert in_force() is None  # as with a recipe: it may be a checkpoint's
    own = fastamp.float8.Recipe(grad_dtype=E4M3)
    with fastamp.autocast("cpu", float8=own):
        assert in_force() == own
        with fastamp.autocast("cpu", dtype=BF16):
            assert in_force() == DEFAULT


def test_without_a_default_a_region_that_refuses_fp8_is_a_region_of_the_base_dtype():
    with fastamp.autocast("cpu", float8=False) as region:
        assert region.float8 is None
        assert in_force() is None


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("refused", [False, True])
def test_recomputation_and_backward_threads_follow_the_forward_pass(reentrant: bool, refused: bool):
    layer, x = nn.Linear(32, 16), torch.randn(4, 32, requires_grad=True)
    seen: list[Any] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(in_force())
        return layer(hidden)

    region = fastamp.autocast("cpu", float8=False) if refused else torch.autocast("cpu")
    with region:
        y = checkpoint(forward, x, use_reentrant=reentrant)
    y.sum().backward()
    assert seen == [None if refused else DEFAULT] * 2
    with region:
        expected = torch.autograd.grad(layer(x).sum(), layer.weight)
    assert torch.equal(layer.weight.grad, expected[0])


@pytest.mark.usefixtures("running")
def test_regions_of_other_threads_follow_it_too():
    seen: list[Any] = []

    def work() -> None:
        seen.append(in_force())
        with torch.autocast("cpu"):
            seen.append(in_force())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None, DEFAULT]


@pytest.mark.usefixtures("running")
def test_compiled_functions_run_eagerly_in_fp8():
    layer, x = nn.Linear(32, 16), torch.randn(4, 32)
    compiled = torch.compile(layer, backend="eager")
    with torch.autocast("cpu"):
        assert outcomes(lambda: compiled(x)) == ["float8"]


def test_it_ends_and_can_start_again():
    for _ in range(2):
        running = float8_command.start(["nothing"])
        with torch.autocast("cpu"):
            assert in_force() == DEFAULT
            running.close()
            assert in_force() is None


def test_a_gpu_is_not_asked_for_its_kind_before_the_program_uses_it(
    monkeypatch: pytest.MonkeyPatch,
):
    calls: list[Callable[[], None]] = []
    monkeypatch.setattr(torch.cuda, "_lazy_call", calls.append)
    torch.set_autocast_dtype("cuda", BF16)
    torch.set_autocast_enabled("cuda", True)
    try:
        running = float8_command.start()
        assert fastamp.float8.recipe("cuda") is None
        (on_gpu,) = calls
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9):
            on_gpu()
            assert fastamp.float8.recipe("cuda") == DEFAULT
        running.close()
        assert fastamp.float8.recipe("cuda") is None
        on_gpu()  # of a program that has ended it
        assert fastamp.float8.recipe("cuda") is None
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", FP16)


TRAIN = """
import sys, warnings, torch
from torch import nn
torch.manual_seed(0)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.lm_head = nn.Linear(32, 32), nn.Linear(32, 16)
    def forward(self, x):
        return self.lm_head(self.body(x))
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    with torch.autocast('cpu', dtype=torch.bfloat16):
        loss = (model(torch.ones(4, 32)) - 2).square().mean()
    loss.backward()
    optimizer.step()
print(sys.argv[1:], sorted(model.state_dict()), loss.item())
"""
SLOW = "fp8 on the CPU is a reference"
NO_NAME = "--float8-exclude: expected names of weights"


@pytest.fixture
def train(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return str(path)


def test_a_program_trains_in_fp8_with_the_same_state(train: str, tmp_path: Path):
    plain = check_program(*FASTAMP, train, "--float8")
    report = tmp_path / "report.json"
    done = run_program(*FASTAMP, "--float8", "--report", str(report), train, "--float8")
    assert done.returncode == 0, done.stderr
    *names, loss = done.stdout.split()
    *plain_names, plain_loss = plain.split()
    assert names == plain_names
    assert float(loss) == pytest.approx(float(plain_loss), rel=0.05)
    assert loss != plain_loss
    assert done.stderr.count(SLOW) == 1
    assert NO_NAME not in done.stderr
    assert report.read_text().count('"float8": "float8"') == 2


def test_names_are_excluded_and_those_of_no_weight_are_told_once_at_exit(
    train: str, tmp_path: Path
):
    report = tmp_path / "report.json"
    names = ["lm_head", "lm_heed", "fc*"]
    words = [word for name in names for word in ("--float8-exclude", name)]
    done = run_program(*FASTAMP, "--report", str(report), *words, "--float8", train)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(NO_NAME) == 1
    assert re.search(r"^python -m fastamp:1: .* got 'lm_heed', 'fc\*', which", done.stderr, re.M)
    text = report.read_text()
    assert (text.count('"float8": "float8"'), text.count('"float8": "excluded"')) == (1, 1)


def test_a_program_without_bfloat16_regions_hears_nothing():
    program = "import torch\nwith torch.autocast('cpu', dtype=torch.float16):\n    print(1)\n"
    done = run_program(*FASTAMP, "--float8", "--float8-exclude", "lm_head", "-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


FLOAT16 = "--float8: expected regions of bfloat16"


def test_a_program_in_float16_is_told_at_exit_that_fp8_did_nothing(train: str):
    program = Path(train)
    program.write_text(TRAIN.replace("torch.bfloat16", "torch.float16"))
    done = run_program(*FASTAMP, "--float8", train)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(FLOAT16) == 1
    assert re.search(r"^python -m fastamp:1: .*float16 alone \(on cpu\)", done.stderr, re.M)
    assert SLOW not in done.stderr


BOTH = """
import fastamp, torch
layer = torch.nn.Linear(16, 16)
for region in ({}):
    with region:
        layer(torch.ones(1, 16))
"""


@pytest.mark.parametrize(
    ("regions", "count"),
    [
        ("torch.autocast('cpu', dtype=torch.float16),", 1),
        ("torch.autocast('cpu', dtype=torch.float16), torch.autocast('cpu')", 0),
        ("torch.autocast('cpu', dtype=torch.bfloat16), torch.autocast('cpu', torch.float16)", 0),
        ("torch.autocast('cpu', dtype=torch.float16), fastamp.autocast('cpu', float8=False)", 1),
        ("fastamp.autocast('cpu', dtype=torch.float16, float8=True),", 0),
        (
            "torch.autocast('cpu', torch.float16),"
            " fastamp.autocast('cpu', dtype=torch.float16, float8=True)",
            0,
        ),
        ("fastamp.autocast('cpu', dtype=torch.float16, float8=False),", 0),
        ("torch.autocast('cpu', dtype=torch.float16, enabled=False),", 0),
    ],
)
def test_only_a_program_whose_regions_are_all_in_float16_gets_a_warning(regions: str, count: int):
    done = run_program(*FASTAMP, "--float8", "-c", BOTH.format(regions))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(FLOAT16) == count


def test_what_is_told_at_exit_is_no_error_to_a_program_that_makes_errors_of_warnings():
    program = BOTH.format("torch.autocast('cpu', dtype=torch.float16),")
    options = ["--float8", "--float8-exclude", "lm_heed"]
    done = run_program(
        *FASTAMP, *options, "-c", f"import warnings\nwarnings.simplefilter('error')\n{program}"
    )
    assert done.returncode == 0
    assert done.stderr.count(FLOAT16) == done.stderr.count(NO_NAME) == 1
    assert "Traceback" not in done.stderr


def test_what_was_met_counts_from_the_start():
    layer, x = nn.Linear(16, 16), torch.ones(1, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(2):
            with float8_command.start():
                assert fastamp._C.default_float8_use("cpu") == (False, False)
                with torch.autocast("cpu", dtype=FP16):
                    layer(x)
                assert fastamp._C.default_float8_use("cpu") == (False, True)
                with torch.autocast("cpu", dtype=BF16):
                    layer(x)
                assert fastamp._C.default_float8_use("cpu") == (True, True)


def test_processes_that_multiprocessing_spawns_do_the_same(tmp_path: Path):
    (tmp_path / "spawn.py").write_text(
        "import torch, torch.multiprocessing as mp\n"
        "def work(rank):\n"
        "    import fastamp\n"
        "    layer = torch.nn.Linear(16, 16)\n"
        "    with torch.autocast('cpu'):\n"
        "        layer(torch.ones(1, 16))\n"
        "        print(rank, fastamp.float8.recipe('cpu') is not None, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(work, nprocs=1)\n"
    )
    program = str(tmp_path / "spawn.py")
    done = run_program(*FASTAMP, "--float8", "--float8-exclude", "lm_head", program)
    assert (done.returncode, done.stdout.split()) == (0, ["0", "True"])
    assert done.stderr.count(NO_NAME) == 1  # the child's: the parent has called no module


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--float8-exclude", "head", "-c", "1/0"], "expected --float8 with --float8-exclude"),
        (["--float8", "--float8-exclude", "head"], "expected --float8-exclude NAME and a program"),
        (["--float8", "--float8-exclude"], "expected --float8-exclude NAME and a program"),
        (["--float8", "--float8-exclude", "", "-c", "1/0"], "with a name, got an empty one"),
        (["--float8=yes", "-c", "1/0"], "unknown option --float8=yes"),
        (["--float8"], "usage: "),
    ],
)
def test_wrong_options_are_refused_before_the_program_runs(
    arguments: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    from fastamp import _cli

    monkeypatch.setattr(sys, "argv", ["fastamp", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        _cli.main()
    assert exit_info.value.code == 2
    assert text in capsys.readouterr().err
    with torch.autocast("cpu"):
        assert in_force() is None
