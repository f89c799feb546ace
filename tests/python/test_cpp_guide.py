# SPDX-License-Identifier: Apache-2.0
"""The C++ of the guides: docs/cpp.md is one program, the blocks of other pages are functions of it.

It is built as a reader would build it, and run.
"""

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
DOCS = ROOT / "docs"


def blocks(page: Path, language: str = "cpp") -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


GUIDE = (DOCS / "cpp.md").read_text(encoding="utf-8")
PROGRAM = "\n".join(blocks(DOCS / "cpp.md"))
SECTIONS = re.findall(r"^void (\w+)\(\) \{", PROGRAM, re.MULTILINE)

#: What the blocks of other pages talk about, by page.
MODEL = """
  auto model = make_model();
  const auto loss = model->forward(torch::randn({8, 16}, device())).square().mean();
"""
OPTIMIZER = "  torch::optim::SGD optimizer(model->parameters(), 0.1);\n"
SCALER = "  fastamp::GradScaler scaler(device());\n"
SNIPPETS = {
    "optim.md": [MODEL],
    "guard.md": [MODEL + OPTIMIZER],
    "scaler.md": [MODEL + OPTIMIZER, SCALER],
}
#: What is true after a block, by its function.
AFTER = {
    "optim_0": "TORCH_CHECK(!scaler.step_was_skipped());",
    "guard_0": "TORCH_CHECK(!guard.step_was_skipped());",
    "scaler_0": "TORCH_CHECK(!scaler.step_was_skipped());",
    "scaler_1": "TORCH_CHECK(scaler.get_scale() == 64);",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def snippets() -> dict[str, str]:
    """Functions by name, each with a block of a page."""
    functions = {}
    for page, needs in SNIPPETS.items():
        for number, (before, block) in enumerate(zip(needs, blocks(DOCS / page), strict=True)):
            name = f"{page.removesuffix('.md')}_{number}"
            body = re.sub(r"^#include .*$", "", block, flags=re.MULTILINE)
            # The default is CUDA, which tests do without.
            body = body.replace("GradScaler scaler;", "GradScaler scaler(device());")
            body = body.replace("GradScalerOptions()", "GradScalerOptions().device(device())")
            functions[name] = f"void {name}() {{\n{before}{body}{AFTER[name]}\n}}\n"
    return functions


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guide")
    calls = "".join(f"  {name}();\n" for name in SECTIONS)
    functions = snippets()
    chosen = "".join(f'  if (name == "{name}") return {name}();\n' for name in functions)
    main = (
        f"\nvoid run(const std::string& name) {{\n{chosen}}}\n"
        f"\nint main(int argc, char** argv) {{\n  torch::manual_seed(0);\n"
        "  if (argc > 2) {\n    run(argv[2]);\n    return 0;\n  }\n"
        f"{calls}"
        "  if (argc > 1) {\n"
        "    fastamp::GradScaler scaler(device());\n"
        "    load_state_of_python(scaler, argv[1]);\n"
        '    std::cout << "scale " << scaler.get_scale() << std::endl;\n'
        "  }\n}\n"
    )
    source = "\n".join([PROGRAM, *functions.values(), main])
    (folder / "main.cpp").write_text(source, encoding="utf-8")
    (cmake,) = blocks(ROOT / "README.md", "cmake")
    (folder / "CMakeLists.txt").write_text(cmake, encoding="utf-8")
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


def run(program: Path, *arguments: Path | str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, check=False, cwd=cwd
    )
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


@pytest.mark.parametrize("name", snippets())
def test_the_block_of_another_page_runs(program: Path, name: str, tmp_path: Path):
    torch.save(fastamp.GradScaler("cpu", init_scale=64.0).state_dict(), tmp_path / "scaler.pt")
    run(program, "block", name, cwd=tmp_path)


def test_no_page_has_cpp_that_is_not_tested():
    """float8.md has a program of its own, as the README has."""
    pages = {page.name for page in DOCS.glob("*.md") if blocks(page)}
    assert pages == {"cpp.md", "float8.md", *SNIPPETS}
