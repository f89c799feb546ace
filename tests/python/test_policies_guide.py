# SPDX-License-Identifier: Apache-2.0
"""The code of docs/policies.md runs, and prints and refuses what the page says."""

from __future__ import annotations

import re
from pathlib import Path

from fastamp._policy.policy_file import PolicyFile
from support.children import check_program, run_program

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "policies.md"


def blocks(language: str) -> list[str]:
    text = GUIDE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_python_blocks_run_one_after_another(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text("\n".join(blocks("python")), encoding="utf-8")
    assert check_program(str(program)).splitlines() == [
        "tensor(32.)",
        "torch.float32 torch.float32 torch.bfloat16",
        "torch.bfloat16 torch.float32 torch.complex64",
        "torch.float32 torch.bfloat16 torch.float32",
        "['norm1', 'norm2'] torch.float32",
        "['rotary'] 2",
    ]


def test_the_policy_file_is_one(tmp_path: Path):
    path = tmp_path / "policy.toml"
    (text,) = blocks("toml")
    path.write_text(text, encoding="utf-8")
    file = PolicyFile.read(path)
    assert len(file.ops) == 3
    assert len(file.modules) == 4
    program = "import torch, fastamp; print(fastamp.policies.get('softmax.int', 'cpu'))"
    assert check_program("-m", "fastamp", "--policy", str(path), "-c", program) == "fp32\n"


def test_the_message_is_the_one_that_is_printed(tmp_path: Path):
    (tmp_path / "policy.toml").write_text('[ops]\n\npoow = "fp32"\n')
    (message,) = blocks("text")
    done = run_program("-m", "fastamp", "--policy", str(tmp_path / "policy.toml"), "-c", "")
    assert done.stderr.endswith(message)
