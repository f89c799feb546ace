# SPDX-License-Identifier: Apache-2.0
"""``python -m fastamp``: programs run as ``python`` runs them, on fastamp."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import fastamp
from patience import patience
from support.children import check_python, child_environment, run_python

SHOW = """
import sys, os
print("argv", sys.argv)
print("path", sys.path[0])
print("file", globals().get("__file__"), __name__, __package__, __spec__ and __spec__.name)
print("cached", globals().get("__cached__"), type(__loader__).__name__ if __loader__ else None)
import __main__
print("main", __main__.__dict__ is globals(), sorted(n for n in globals() if n.startswith("__")))
print("input", "-" in sys.argv or sys.stdin.read())
"""
FASTAMP = ["-m", "fastamp"]


def run_both(arguments: list[str], cwd: Path, text: str = "") -> list[Any]:
    """The same command line with and without fastamp."""
    done = []
    for prefix in ([], FASTAMP):
        done.append(
            subprocess.run(
                [sys.executable, *prefix, *arguments],
                cwd=cwd,
                env=child_environment(),
                input=text,
                capture_output=True,
                text=True,
                timeout=patience(600),
                check=False,
            )
        )
    return done


def same(arguments: list[str], cwd: Path, text: str = "") -> Any:
    plain, own = run_both(arguments, cwd, text)
    assert own.stdout == plain.stdout
    assert own.stderr == plain.stderr
    assert own.returncode == plain.returncode
    return own


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    (folder / "package").mkdir(parents=True)
    (folder / "show.py").write_text(SHOW)
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "__main__.py").write_text(SHOW)
    (folder / "package" / "module.py").write_text("from . import __name__ as n\nprint(n)\n" + SHOW)
    (folder / "package" / "empty").mkdir()
    with zipfile.ZipFile(folder / "app.zip", "w") as archive:
        archive.writestr("__main__.py", SHOW)
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        ["code/show.py", "-x", "--flag=1", "info"],
        ["code/package", "a"],
        ["code/app.zip"],
        ["-c", SHOW, "-m", "x"],
        ["-", "one"],
    ],
    ids=lambda a: a[0],
)
def test_programs_see_what_python_shows_them(arguments: list[str], programs: Path):
    text = SHOW if arguments[0] == "-" else "standard input"
    done = same(arguments, programs.parent, text)
    assert done.returncode == 0
    assert "main True" in done.stdout


@pytest.mark.parametrize("name", ["package", "package.module"])
def test_modules_see_what_python_shows_them(name: str, programs: Path):
    assert same(["-m", name, "a", "-b"], programs, "standard input").returncode == 0


FAILURES = {
    "chain": "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise ValueError('x') from e\n",
    "syntax": "x = = 1\n",
    "encoding": "# coding: latin-1\nprint(ascii('\xe4'))\ndef f():\n    raise KeyError(1)\nf()\n",
    "exit": "import sys\nprint('bye')\nsys.exit(7)\n",
    "at exit": "import atexit, threading\natexit.register(print, 'last')\n"
    "threading.Thread(target=print, args=('thread',)).start()\nraise SystemExit('a reason')\n",
    "hook": "import sys\nsys.excepthook = lambda k, v, t: print(k, v, t.tb_lineno)\n1/0\n",
}


@pytest.mark.parametrize("name", FAILURES)
def test_tracebacks_and_exit_codes_are_pythons(name: str, tmp_path: Path):
    (tmp_path / "fail.py").write_text(FAILURES[name], encoding="latin-1")
    done = same(["fail.py"], tmp_path)
    assert "fastamp" not in done.stderr


def test_an_interrupt_ends_the_process_as_in_python(tmp_path: Path):
    # A shell starts what runs in the background with interrupts ignored, and children inherit that.
    (tmp_path / "stop.py").write_text(
        "import os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    assert same(["stop.py"], tmp_path).returncode == -signal.SIGINT


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["missing.py"], 2), (["-m", "missing"], 1), (["-m", "package.empty"], 1), (["folder"], 1)],
)
def test_what_cannot_be_run_is_refused_with_pythons_words(
    arguments: list[str], code: int, programs: Path
):
    (programs / "folder").mkdir()
    plain, own = run_both(arguments, programs)
    assert own.returncode == plain.returncode == code
    assert own.stderr.partition("fastamp: ")[2] == plain.stderr.partition(": ")[2]


def test_the_program_and_what_it_imported_run_on_fastamp(tmp_path: Path):
    (tmp_path / "train.py").write_text(
        "import torch, fastamp\n"
        "from torch.amp import autocast, GradScaler\n"
        "print(fastamp.is_installed(), type(GradScaler('cpu')).__module__)\n"
        "with autocast('cpu'):\n"
        "    print(fastamp._C.open_torch_regions(), torch.mm(*[torch.ones(2, 2)] * 2).dtype)\n"
    )
    printed = check_python(*FASTAMP, str(tmp_path / "train.py"))
    assert printed.splitlines() == ["True fastamp", "1 torch.bfloat16"]


def test_report_writes_what_autocast_did_whatever_the_exit_code(tmp_path: Path):
    (tmp_path / "train.py").write_text(
        "import sys, torch\n"
        "with torch.autocast('cpu'):\n"
        "    torch.mm(torch.ones(2, 2), torch.ones(2, 2))\n"
        "assert sys.argv[1:] == ['--report', 'x']\n"
        "sys.exit(3)\n"
    )
    report = tmp_path / "report.json"
    command = ["--report", str(report), str(tmp_path / "train.py"), "--report", "x"]
    assert run_python(*FASTAMP, *command).returncode == 3
    assert '"mm' in report.read_text()
    json.loads(report.read_text())


def test_a_report_that_cannot_be_written_is_refused_before_the_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from fastamp import _cli

    missing = str(tmp_path / "missing" / "report")
    for arguments, text in (([missing, "-c", "1/0"], "missing"), ([missing], "expected --report")):
        monkeypatch.setattr(sys, "argv", ["fastamp", "--report", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            _cli.main()
        assert exit_info.value.code == 2
        assert text in capsys.readouterr().err


def test_spawned_processes_of_a_program_run_on_fastamp_too(tmp_path: Path):
    (tmp_path / "spawn.py").write_text(
        "import torch.multiprocessing as mp\n"
        "def work(rank):\n"
        "    import fastamp\n"
        "    print(rank, fastamp.is_installed(), flush=True)\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(work, nprocs=1)\n"
    )
    assert check_python(*FASTAMP, str(tmp_path / "spawn.py")).split() == ["0", "True"]


def test_info_tells_versions_build_devices_and_what_is_installed():
    printed = check_python(*FASTAMP, "info", "--no-probe")
    build = fastamp.build_info()
    for text in (
        f"fastamp:               {build['version']}\n",
        build["compiler"],
        "ONEDNN_MAX_CPU",
    ):
        assert text in printed
    assert re.search(r"autocast kernels: +fastamp's", printed)
    assert re.search(r"torch\.autocast is: +torch's", printed)
    kept = check_python(*FASTAMP, "info", "--no-probe", FASTAMP_NO_REGISTER="1")
    assert re.search(r"autocast kernels: +torch's", kept)


def test_info_probes_the_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    from fastamp._cli import info_command
    from fastamp._util import cpu_isa

    monkeypatch.delenv(cpu_isa.VARIABLE, raising=False)
    monkeypatch.setattr(cpu_isa, "runs", lambda level: level == "AVX2")
    info_command.main([])
    assert f"{cpu_isa.VARIABLE}=AVX2: bf16 or fp16 matmuls crash" in capsys.readouterr().out


def run_ops(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    from fastamp._cli import ops_command

    ops_command.main(arguments)
    return capsys.readouterr().out


def test_ops_lists_every_op_with_a_policy(capsys: pytest.CaptureFixture[str]):
    ops, _, calls = run_ops([], capsys).partition("\nCalls of other libraries")
    lines = [line.split() for line in ops.splitlines()]
    listed = {line[0]: tuple(line[1:3]) for line in lines[1:-2]}
    rows = [row for row in fastamp.policies.table() if {row.cpu, row.cuda} != {"pass"}]
    assert listed == {row.op: (row.cpu, row.cuda) for row in rows}
    assert lines[-1][0] == str(len(rows))
    assert "flash_attn.flash_attn_interface.FlashAttnFunc" in calls
    one = run_ops(["--device", "cuda"], capsys).partition("\nCalls of")[0].splitlines()
    assert one[0].split() == ["op", "cuda", "difference", "from", "torch"]
    assert len(one) - 3 == sum(row.cuda != "pass" for row in rows)


def test_ops_tells_one_op_and_what_differs_from_torch(capsys: pytest.CaptureFixture[str]):
    assert "cpu:  lower - " in run_ops(["mm"], capsys)
    assert "as torch" in run_ops(["aten::mm", "--device", "cuda"], capsys)
    softmax = run_ops(["softmax"], capsys)
    assert "softmax.int" in softmax
    assert "here they run in float32" in run_ops(["cat"], capsys)
    fastamp.policies.set("mm", "fp32", "cpu")
    try:
        edited = run_ops(["mm"], capsys)
        listed = run_ops([], capsys)
    finally:
        fastamp.policies.reset()
    assert "differs: torch: lower" in edited
    assert re.search(r"^mm +fp32 +lower +torch: lower$", listed, re.MULTILINE)


def test_ops_names_the_nearest_for_a_typo(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_info:
        run_ops(["softmx"], capsys)
    assert exit_info.value.code == 1
    error = capsys.readouterr().err
    assert re.search(r"got 'softmx'; nearest names: .*softmax", error)
    with pytest.raises(SystemExit):
        run_ops(["MM"], capsys)
    assert re.search(r"got 'MM'; nearest names: .*\bmm\b", capsys.readouterr().err)


def test_ops_tells_ops_that_are_in_no_list(capsys: pytest.CaptureFixture[str]):
    assert run_ops(["relu"], capsys) == (
        "relu\n  autocast has no policy for it: runs in the dtypes it is given\n"
    )


def test_without_arguments_or_with_unknown_options_it_shows_its_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from fastamp import _cli

    for arguments, code in (([], 2), (["--nothing"], 2), (["-m"], 2), (["-c"], 2)):
        monkeypatch.setattr(sys, "argv", ["fastamp", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            _cli.main()
        assert exit_info.value.code == code
        error = capsys.readouterr().err
        assert {"": "usage: ", "--nothing": "unknown option --nothing"}.get(
            "".join(arguments), "Argument expected"
        ) in error
    for option, text in (("--help", _cli.USAGE), ("--version", f"fastamp {fastamp.__version__}\n")):
        monkeypatch.setattr(sys, "argv", ["fastamp", option])
        _cli.main()
        assert capsys.readouterr().out == text
