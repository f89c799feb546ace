# SPDX-License-Identifier: Apache-2.0
"""Policies of unchanged programs: ``--policy``, ``FASTAMP_POLICY`` and ``FASTAMP_POLICY_FILE``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import fastamp
from fastamp._install import program_policies
from fastamp._policy.policy_file import PolicyFile
from support.children import check_program, run_program

# Prints the dtype that each part of the model runs in, twice: the first call counts, too.
PROGRAM = """
import json, sys
import torch
from torch import nn

class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        out = self.linear(x)
        seen.append(str(out.dtype).removeprefix("torch."))
        return out

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(Part(), Part())
        self.head = Part()
    def forward(self, x):
        return self.head(self.body(x))

def main(model):
    global seen
    for _ in range(2):
        seen = []
        device = next(model.parameters()).device.type
        with torch.autocast(device, dtype=torch.bfloat16):
            model(torch.ones(1, 4))
        print(json.dumps(seen))

if __name__ == "__main__":
    main(WRAP(Model()))
"""
LOW, HIGH, HALF = "bfloat16", "float32", "float16"


def run(tmp_path: Path, policy: str, wrap: str = "", **environment: str) -> list[Any]:
    """What the program prints with a policy file."""
    (tmp_path / "policy.toml").write_text(policy)
    (tmp_path / "train.py").write_text(PROGRAM.replace("WRAP", wrap))
    arguments = ["-m", "fastamp", "--policy", str(tmp_path / "policy.toml")]
    text = check_program(*arguments, str(tmp_path / "train.py"), **environment)
    first, second = (json.loads(line) for line in text.splitlines())
    assert first == second
    return list(first)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ('[ops]\nlinear = "fp32"\n', [HIGH, HIGH, HIGH]),
        ('[ops]\nlinear = { cuda = "fp32" }\n', [LOW, LOW, LOW]),
        ('[modules]\nhead = "fp32"\n', [LOW, LOW, HIGH]),
        ('[modules]\n"body.1" = "float16"\n', [LOW, HALF, LOW]),
        ('[modules]\n"" = { linear = "fp32" }\n', [HIGH, HIGH, HIGH]),
        ('[ops]\nlinear = "fp32"\n[modules.head]\nlinear = "lower"\n', [HIGH, HIGH, LOW]),
    ],
)
def test_a_program_runs_under_a_file(tmp_path: Path, policy: str, expected: list[str]):
    assert run(tmp_path, policy) == expected


@pytest.mark.parametrize(
    "wrap",
    [
        # It runs on CUDA wherever there is a device.
        "(lambda m: nn.DataParallel(m.cuda() if torch.cuda.is_available() else m))",
        "(lambda m: torch.compile(m, backend='eager'))",
    ],
    ids=["DataParallel", "compile"],
)
def test_wrappers_do_not_change_names(tmp_path: Path, wrap: str):
    assert run(tmp_path, '[modules]\nhead = "fp32"\n', wrap) == [LOW, LOW, HIGH]


def test_the_variables_do_the_same_and_the_shorter_one_wins(tmp_path: Path):
    (tmp_path / "train.py").write_text("import fastamp" + PROGRAM.replace("WRAP", ""))
    file = tmp_path / "policy.toml"
    file.write_text('[ops]\nlinear = "fp32"\n[modules]\nhead = { linear = "lower" }\n')

    def dtypes(**variables: str) -> Any:
        return json.loads(check_program(str(tmp_path / "train.py"), **variables).splitlines()[0])

    assert dtypes(FASTAMP_POLICY="linear=fp32, pow = lower,") == [HIGH, HIGH, HIGH]
    assert dtypes(FASTAMP_POLICY_FILE=str(file)) == [HIGH, HIGH, LOW]
    both = dtypes(FASTAMP_POLICY_FILE=str(file), FASTAMP_POLICY="linear=lower")
    assert both == [LOW, LOW, LOW]
    assert dtypes(FASTAMP_POLICY="", FASTAMP_POLICY_FILE="") == [LOW, LOW, LOW]


def test_a_file_of_the_variable_that_is_not_there_is_named_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FASTAMP_POLICY_FILE", str(tmp_path / "absent.toml"))
    with pytest.raises(FileNotFoundError, match=r"FASTAMP_POLICY_FILE: No such.*absent.toml"):
        program_policies.start_from_environment()


def test_spawned_processes_follow(tmp_path: Path):
    spawn = (
        "import torch.multiprocessing as mp\n"
        "def child(_, model): main(model)\n"
        "def WRAPPED(model): mp.spawn(child, (model,)); return model\n"
    )
    text = PROGRAM.replace("if __name__ ==", f"{spawn}\nif __name__ ==").replace(
        "WRAP(", "WRAPPED("
    )
    (tmp_path / "policy.toml").write_text('[modules]\nhead = "fp32"\n[ops]\nlinear = "lower"\n')
    (tmp_path / "train.py").write_text(text)
    out = check_program(
        "-m", "fastamp", "--policy", str(tmp_path / "policy.toml"), str(tmp_path / "train.py")
    )
    assert [json.loads(line) for line in out.splitlines()] == [[LOW, LOW, HIGH]] * 4


def test_patterns_of_no_module_are_named_at_the_end(tmp_path: Path):
    (tmp_path / "policy.toml").write_text('[modules]\nheda = "fp32"\nbody = "fp32"\n')
    (tmp_path / "train.py").write_text(PROGRAM.replace("WRAP", ""))
    done = run_program(
        "-m", "fastamp", "--policy", str(tmp_path / "policy.toml"), str(tmp_path / "train.py")
    )
    assert done.returncode == 0
    assert re.search(r"policy.toml: expected patterns .*'heda'; nearest: head, which", done.stderr)
    assert "'body'" not in done.stderr


BAD = {
    "syntax": ("[ops]\nx = \n", "line 2: expected TOML"),
    "section": ('[modulse]\na = "fp32"\n', "line 1: .*'modulse'; nearest: modules"),
    "op": ('[ops]\n\npoow = "fp32"\n', "line 3: .*'poow'. Nearest: pow"),
    "policy": ('[ops]\npow = "fp23"\n', "line 2: .*'fp23'; nearest: fp32"),
    "device": ('[ops]\npow = { cpu = "fp32", cuad = "fp32" }\n', "line 2: .*'cuad'"),
    "carry": ('[ops]\nmm = "set_opt_dtype"\n', "line 2: .*mm can carry"),
    "module's value": (
        '[modules]\na = "fp32"\nb = "bf16"\n',
        "line 3: .*'bf16'; nearest: bfloat16",
    ),
    "module's op": ('[modules.a]\nmm = "lower"\nlineer = "fp32"\n', "line 3: .*Nearest: linear"),
    "type": ("[modules]\na = 3\n", "line 2: .*got int"),
    "unlisted": ('[ops]\n"aten::gelo" = "fp32"\n', "line 2: .*aten::gelu"),
    "bytes": ("\x00", "line 1: expected TOML"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_file_line_and_what_is_near(tmp_path: Path, name: str):
    text, expected = BAD[name]
    path = tmp_path / "policy.toml"
    path.write_text(text)
    done = run_program("-m", "fastamp", "--policy", str(path), "-c", "print('ran')")
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.search(f"--policy: {re.escape(str(path))}, {expected}", done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_no_file_is_refused(tmp_path: Path):
    for arguments, text in (
        (["--policy"], "expected --policy FILE and a program"),
        (["--policy", str(tmp_path / "none.toml"), "-c", ""], "--policy: .*No such file"),
    ):
        done = run_program("-m", "fastamp", *arguments)
        assert done.returncode == 2
        assert re.search(text, done.stderr), done.stderr


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("pow", "FASTAMP_POLICY: expected policies such as .*'pow'"),
        ("poow=fp32", "FASTAMP_POLICY: .*'poow'. Nearest: pow"),
        ("pow=fp23", "FASTAMP_POLICY: .*'fp23'; nearest: fp32"),
        ("=fp32", "FASTAMP_POLICY: expected policies"),
    ],
)
def test_a_wrong_variable_is_refused_at_import(value: str, text: str):
    done = run_program("-c", "import fastamp", FASTAMP_POLICY=value)
    assert done.returncode == 1
    assert re.search(f"ValueError: {text}", done.stderr), done.stderr


def test_what_is_written_is_read(tmp_path: Path):
    import torch

    policies = PolicyFile(
        ops={"pow": "fp32", "softmax.int": {"cpu": "fp32"}, "aten::gelu": "fp32"},
        modules={
            "*.norm*": "fp32",
            'a "quoted" \\ name\x7f': torch.bfloat16,
            "head": {"linear": "fp32", "prod.*": {"cuda": "lower"}},
            "": "pass",
        },
    )
    path = tmp_path / "policy.toml"
    policies.write(path, "before: cosine 0.1\nafter: cosine 0.999")
    again = PolicyFile.read(path)
    assert again.ops == policies.ops
    assert list(again.modules.items()) == list(policies.modules.items())
    assert path.read_text().startswith("# before: cosine 0.1\n# after")
    PolicyFile().write(path)
    assert PolicyFile.read(path) == PolicyFile(path=str(path))


def test_overloads_may_be_written_without_quotes_and_by_device(tmp_path: Path):
    path = tmp_path / "policy.toml"
    path.write_text(
        '[ops]\nsoftmax.int = "fp32"\nprod.dim_int = { cpu = "lower" }\npow.cuda = "pass"\n'
    )
    assert PolicyFile.read(path).ops == {
        "softmax.int": "fp32",
        "prod.dim_int": {"cpu": "lower"},
        "pow": {"cuda": "pass"},
    }


def test_a_file_for_one_model_puts_its_ops_in_the_model_only(tmp_path: Path):
    import torch

    path = tmp_path / "policy.toml"
    path.write_text('[ops]\nlinear = "fp32"\n[modules]\n"1" = { linear = "lower" }\n')
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    table = fastamp.policies.table()
    with fastamp.policies.for_modules(model, path), fastamp.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.ones(1, 2)).dtype == torch.bfloat16
        assert model[:1](torch.ones(1, 2)).dtype == torch.bfloat16
        seen = []
        model[0].register_forward_hook(lambda *a: seen.append(a[2].dtype))
        model(torch.ones(1, 2))
        assert seen == [torch.float32]
    assert fastamp.policies.table() == table
