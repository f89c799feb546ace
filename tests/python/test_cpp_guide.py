# SPDX-License-Identifier: Apache-2.0
"""docs/cpp.md: its blocks are one program, which is built as a reader would build it, and run."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import fastamp
from packaging_tools import find_tool

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "cpp.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAM = "\n".join(re.findall(r"^```cpp\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE))
SECTIONS = re.findall(r"^void (\w+)\(\) \{", PROGRAM, re.MULTILINE)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guide")
    calls = "".join(f"  {name}();\n" for name in SECTIONS)
    main = (
        f"\nint main(int argc, char** argv) {{\n  torch::manual_seed(0);\n{calls}"
        "  if (argc > 1) {\n"
        "    fastamp::GradScaler scaler(device());\n"
        "    load_state_of_python(scaler, argv[1]);\n"
        '    std::cout << "scale " << scaler.get_scale() << std::endl;\n'
        "  }\n}\n"
    )
    (folder / "main.cpp").write_text(PROGRAM + main, encoding="utf-8")
    cmake = re.findall(r"^```cmake\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    (folder / "CMakeLists.txt").write_text(cmake[0], encoding="utf-8")
    options = [
        "-DCMAKE_BUILD_TYPE=Debug",
        f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path};{fastamp.cpp.cmake_prefix_path}",
    ]
    if shutil.which("ccache"):
        options.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
    build = folder / "build"
    for step in (["-S", folder, "-B", build, *options], ["--build", build]):
        done = subprocess.run(
            [find_tool("cmake"), *map(str, step)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "train"


def run(program: Path, *arguments: Path) -> str:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def test_every_section_holds(program: Path):
    assert len(SECTIONS) >= 9
    out = run(program)
    # The comment beside the log's rows says what they are.
    (shown,) = re.findall(r"<< row << .*// (.*)$", GUIDE, re.MULTILINE)
    kept = re.escape(shown).replace(r"\.\.\.", ".*")
    assert re.search(rf"^{kept}$", out, re.MULTILINE), out


@pytest.mark.parametrize("cls", [torch.amp.GradScaler, fastamp.GradScaler])
def test_a_state_that_python_wrote_is_read(program: Path, tmp_path: Path, cls: type):
    torch.save(cls("cpu", init_scale=64.0).state_dict(), tmp_path / "scaler.pt")
    assert run(program, tmp_path / "scaler.pt").endswith("scale 64\n")
