"""Each rule of tools/check_*.py reports a tree that breaks it, and only that."""

import pytest

import check_ascii
import check_includes
import check_sizes


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


ALLOWED = [
    ("src/ops/a.cpp", '#include "kernels/cpu/scale.h"'),
    ("src/ops/a.cpp", '#include "ops/b.h"'),
    ("src/kernels/cuda/a.cu", "#include <cuda_runtime.h>"),
    ("src/autocast/a.cpp", "#include <fastamp/autocast/guard.h>"),
    ("src/autocast/a.cpp", "#include <fastamp/export.h>"),
    ("src/scaler/a.cpp", "#include <torch/all.h>  // wide include: torch::save's archives"),
    ("include/fastamp/fastamp.h", "#include <fastamp/scaler/grad_scaler.h>"),
    ("include/fastamp/autocast/guard.h", "#include <c10/core/DeviceType.h>"),
    ("src/optim/a.cpp", '#include "autocast/shadows.h"'),
    ("src/scaler/a.cpp", "#include <fastamp/optim/sgd.h>"),
    ("python/csrc/module.cpp", "#include <pybind11/pybind11.h>"),
    ("python/csrc/module.cpp", '#include "autocast/cast_cache.h"'),
]

FORBIDDEN = [
    ("src/core/a.cpp", '#include "ops/b.h"', "ops is not below it"),
    ("src/kernels/cpu/a.cpp", '#include "autocast/cast.h"', "autocast is not below it"),
    ("src/autocast/a.cpp", '#include "scaler/state.h"', "scaler is not below it"),
    ("src/optim/a.cpp", "#include <fastamp/scaler/s.h>", "scaler is not below it"),
    ("src/autocast/a.cpp", "#include <fastamp/optim/sgd.h>", "optim is not below it"),
    ("src/ops/a.cpp", "#include <fastamp/autocast/guard.h>", "autocast is not below it"),
    ("include/fastamp/ops/a.h", "#include <fastamp/scaler/s.h>", "scaler is not below it"),
    ("src/ops/a.cpp", "#include <fastamp/fastamp.h>", "is for users"),
    ("src/core/a.cpp", "#include <pybind11/pybind11.h>", "has no Python"),
    ("src/core/a.cpp", "#include <Python.h>", "has no Python"),
    ("include/fastamp/a.h", "#include <Python.h>", "public headers may not include Python.h"),
    ("include/fastamp/a.h", "#include <cuda_runtime.h>", "may not include cuda_runtime.h"),
    ("include/fastamp/a.h", "#include <ATen/cuda/CUDAContext.h>", "may not include ATen/cuda"),
    ("include/fastamp/a.h", '#include "core/checks.h"', "may not include private ones"),
    ("include/fastamp/a.h", "#include <torch/torch.h>  // wide include: no", "20 s per file"),
    ("src/core/a.cpp", "#include <ATen/ATen.h>", "20 s per file"),
    ("python/csrc/a.cpp", "#  include <torch/extension.h>", "20 s per file"),
    ("src/misc/a.cpp", "", "no such layer: misc"),
]


@pytest.mark.parametrize(("name", "line"), ALLOWED)
def test_includes_along_the_layers_are_allowed(tmp_path, name, line):
    write(tmp_path, name, f"{line}\n")
    assert check_includes.check(tmp_path) == []


@pytest.mark.parametrize(("name", "line", "message"), FORBIDDEN)
def test_includes_against_the_layers_are_reported(tmp_path, name, line, message):
    write(tmp_path, name, f"\n{line}\n")
    (problem,) = check_includes.check(tmp_path)
    assert problem.startswith(name)
    assert message in problem


def test_this_tree_keeps_the_rules():
    for check in (check_includes, check_sizes, check_ascii):
        assert check.check(check.ROOT) == []


@pytest.mark.parametrize("name", ["a.cpp", "a.cu", "a.py", "cmake/a.cmake", "CMakeLists.txt"])
def test_files_over_500_lines_are_reported(tmp_path, name):
    write(tmp_path, name, "\n" * 500)
    assert check_sizes.check(tmp_path) == []
    write(tmp_path, name, "\n" * 501)
    assert check_sizes.check(tmp_path) == [f"{name}: 501 lines, at most 500"]


@pytest.mark.parametrize("name", ["a.h", "a.cu"])
def test_cpp_lines_over_100_columns_are_reported(tmp_path, name):
    write(tmp_path, name, f"//{'x' * 98}\n")
    assert check_sizes.check(tmp_path) == []
    write(tmp_path, name, f"\n//{'x' * 99}\n")
    assert check_sizes.check(tmp_path) == [f"{name}:2: 101 columns, at most 100"]


def cpp_function(lines):
    body = ["  int brace = '}'; // }", '  f("}{{{");'] + ["  g();"] * (lines - 4)
    return "\n".join(["int f(int a) {", *body, "}"])


@pytest.mark.parametrize("frame", ["%s", "namespace a {\nstruct B {\n%s\n};\n}  // namespace a"])
def test_long_cpp_functions_are_reported(tmp_path, frame):
    write(tmp_path, "a.cpp", "// {\n" + frame % (cpp_function(50) + "\n\n" + cpp_function(50)))
    assert check_sizes.check(tmp_path) == []
    write(tmp_path, "a.cpp", "// {\n" + frame % (cpp_function(50) + "\n\n" + cpp_function(51)))
    (problem,) = check_sizes.check(tmp_path)
    assert "int f(int a): 51 lines, at most 50" in problem


def test_long_python_functions_are_reported_without_their_docstrings(tmp_path):
    docstring = '    """' + "\n    more" * 30 + '"""'
    body = ["    x = 1"] * 49
    write(tmp_path, "a.py", "\n".join(["def f():", docstring, *body]) + "\n")
    assert check_sizes.check(tmp_path) == []
    write(tmp_path, "a.py", "\n".join(["def f():", docstring, *body, "    x = 2"]) + "\n")
    assert check_sizes.check(tmp_path) == ["a.py:1: f: 51 lines, at most 50"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = '\u00b5'\n", "a.py:1: not ASCII"),
        ("\tx\n", "a.py:1: tab"),
        ("x \n", "a.py:1: blanks at the end"),
        ("x", "a.py: no newline at the end"),
    ],
)
def test_bad_text_is_reported(tmp_path, text, problem):
    write(tmp_path, "a.py", text)
    (found,) = check_ascii.check(tmp_path)
    assert found.startswith(problem)


def test_makefiles_have_tabs(tmp_path):
    write(tmp_path, "Makefile", "a:\n\tb\n")
    assert check_ascii.check(tmp_path) == []
