# SPDX-License-Identifier: Apache-2.0
"""Each rule of tools/check_*.py reports a tree that breaks it, and only that."""

import pytest

import check_ascii
import check_copies
import check_includes
import check_licenses
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
    ("src/autocast/a.cpp", "#include <fastamp/macros.h>"),
    ("src/scaler/a.cpp", "#include <torch/all.h>  // wide include: torch::save's archives"),
    ("include/fastamp/fastamp.h", "#include <fastamp/scaler/grad_scaler.h>"),
    ("include/fastamp/autocast/guard.h", "#include <c10/core/DeviceType.h>"),
    ("src/optim/a.cpp", '#include "autocast/kept_casts.h"'),
    ("src/autocast/cast.cpp", '#include "autocast/thread_cache.h"'),
    ("src/autocast/cast.cpp", '#include "autocast/region.h"'),
    ("src/trace/a.cpp", "#include <fastamp/autocast/trace.h>"),
    ("src/autocast/a.cpp", '#include "trace/events.h"'),
    ("src/float8/a.cpp", '#include "autocast/float8_interface.h"'),
    ("src/optim/a.cpp", '#include "inference/convert.h"'),
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
    ("src/trace/a.cpp", '#include "autocast/cast.h"', "autocast is not below it"),
    ("src/autocast/a.cpp", '#include "inference/convert.h"', "inference is not below it"),
    ("src/autocast/a.cpp", '#include "float8/recipe.h"', "float8 is not below it"),
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


def circles(root, files, allowed=()):
    """What is said of the circles of a tree."""
    for name, text in files.items():
        write(root, name, text + "\n")
    return check_includes.check(root, allowed)


TWO_MODULES = {"src/ops/a.h": '#include "ops/b.h"', "src/ops/b.h": '#include "ops/a.h"'}


def test_modules_that_include_one_another_are_named_in_order(tmp_path):
    (problem,) = circles(tmp_path, TWO_MODULES)
    assert (
        problem
        == "src/ops/a: in a circle with 1 other modules: src/ops/a -> src/ops/b -> src/ops/a"
    )


def test_a_header_and_the_source_of_its_name_are_one_module(tmp_path):
    files = {
        "src/ops/a.h": "",
        "src/ops/a.cpp": '#include "ops/a.h"\n#include "ops/c.h"',
        "src/ops/b.h": "#include <ops/a.h>",  # Not fastamp's: fastamp's are quoted.
        "src/ops/c.h": "",
        "src/ops/c.cpp": '#include "ops/c.h"\n#include "ops/b.h"',
    }
    assert circles(tmp_path, files) == []
    (problem,) = circles(tmp_path, {"src/ops/b.h": '#include "ops/a.h"'})
    assert problem.endswith("src/ops/a -> src/ops/c -> src/ops/b -> src/ops/a")


def test_of_a_knot_the_shortest_way_and_the_number_of_modules_are_told(tmp_path):
    files = {
        "src/ops/a.h": '#include "ops/b.h"',
        "src/ops/b.h": '#include "ops/c.h"',
        "src/ops/c.h": '#include "ops/a.h"\n#include "ops/d.h"',
        "src/ops/d.h": '#include "ops/c.h"',
    }
    (problem,) = circles(tmp_path, files)
    assert "with 3 other modules" in problem
    assert problem.endswith("src/ops/a -> src/ops/b -> src/ops/c -> src/ops/a")


def test_circles_of_the_python_module_are_reported(tmp_path):
    files = {
        "python/csrc/a.h": "",
        "python/csrc/a.cpp": '#include "a.h"\n#include "b.h"',
        "python/csrc/b.h": '#include "a.h"',
    }
    (problem,) = circles(tmp_path, files)
    assert problem.endswith("python/csrc/a -> python/csrc/b -> python/csrc/a")


@pytest.mark.parametrize(
    "imported",
    [
        "import fastamp.b",
        "import fastamp.b as other",
        "from fastamp import b",
        "from fastamp.b import f",
        "def f():\n    from fastamp.b import f",
        "class C:\n    def f(self):\n        if self:\n            import fastamp.b",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import fastamp.b",
        "if TYPE_CHECKING:\n    from fastamp.b import f",
        "if typing.TYPE_CHECKING:\n    import fastamp.b",
    ],
)
def test_python_modules_that_import_one_another_are_reported(tmp_path, imported):
    files = {"python/fastamp/a.py": imported, "python/fastamp/b.py": "from fastamp.a import g"}
    (problem,) = circles(tmp_path, files)
    assert problem.endswith("python/fastamp/a -> python/fastamp/b -> python/fastamp/a")


@pytest.mark.parametrize(
    "imported",
    [
        "from fastamp import _C",  # A stub: not a module of the package's sources.
        "import fastamp._C as _C",
        "import torch.b",
        "# import fastamp.b",
    ],
)
def test_what_is_no_module_of_the_package_is_no_import(tmp_path, imported):
    files = {
        "python/fastamp/__init__.py": "from fastamp import a",
        "python/fastamp/_C.pyi": "from fastamp.b import f",
        "python/fastamp/a.py": imported,
        "python/fastamp/b.py": "import fastamp.a",
    }
    assert circles(tmp_path, files) == []


def test_a_name_of_the_package_is_an_import_of_the_package(tmp_path):
    files = {
        "python/fastamp/__init__.py": "from fastamp.sub import a",
        "python/fastamp/sub/__init__.py": "",
        "python/fastamp/sub/a.py": "from fastamp import __version__",
    }
    problem, of_folders = circles(tmp_path, files)
    assert "fastamp/__init__ -> python/fastamp/sub/a -> python/fastamp/__init__" in problem
    assert "fastamp/__init__ -> python/fastamp/sub/ -> python/fastamp/__init__" in of_folders


def test_folders_that_import_one_another_are_reported(tmp_path):
    files = {
        "python/fastamp/_one/a.py": "from fastamp._two import b",
        "python/fastamp/_one/c.py": "",
        "python/fastamp/_two/b.py": "",
    }
    assert circles(tmp_path, files) == []
    back = {"python/fastamp/_two/d.py": "def f():\n    from fastamp._one.c import g"}
    (problem,) = circles(tmp_path, back)
    assert problem.endswith("fastamp/_one/ -> python/fastamp/_two/ -> python/fastamp/_one/")


def test_private_modules_of_one_name_are_reported(tmp_path):
    files = {
        "python/fastamp/_one/__init__.py": "",
        "python/fastamp/_one/report.py": "",
        "python/fastamp/_two/__init__.py": "",
        "python/fastamp/_two/report.py": "",
        "python/fastamp/cpu/amp.py": "",  # of torch's names
        "python/fastamp/cuda/amp.py": "",
    }
    (problem,) = circles(tmp_path, files)
    assert problem == (
        "python/fastamp/_one/report: another module has the same name: python/fastamp/_two/report"
    )


def test_allowed_circles_are_allowed_exactly(tmp_path):
    allowed = [frozenset({"src/ops/a", "src/ops/b"})]
    assert circles(tmp_path, TWO_MODULES, allowed) == []
    # A third module joins: neither the new circle nor the absence of the old one is passed over.
    grown = {"src/ops/b.h": '#include "ops/c.h"', "src/ops/c.h": '#include "ops/a.h"'}
    joined, missing = circles(tmp_path, grown, allowed)
    assert "with 2 other modules" in joined
    assert missing.startswith("src/ops/a: no such circle any more")
    (missing,) = circles(tmp_path, {"src/ops/c.h": ""}, allowed)
    assert missing.endswith("take it out of ALLOWED_CIRCLES: src/ops/a, src/ops/b")


def test_this_tree_keeps_the_rules():
    assert check_includes.check(check_includes.ROOT, check_includes.ALLOWED_CIRCLES) == []
    for check in (check_sizes, check_ascii):
        assert check.check(check.ROOT) == []


@pytest.mark.parametrize("name", ["a.cpp", "a.cu", "a.py", "cmake/a.cmake", "CMakeLists.txt"])
def test_files_over_800_lines_are_reported(tmp_path, name):
    write(tmp_path, name, "\n" * 800)
    assert check_sizes.check(tmp_path) == []
    write(tmp_path, name, "\n" * 801)
    assert check_sizes.check(tmp_path) == [f"{name}: 801 lines, at most 800"]


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
    write(tmp_path, "a.cpp", "// {\n" + frame % (cpp_function(80) + "\n\n" + cpp_function(80)))
    assert check_sizes.check(tmp_path) == []
    write(tmp_path, "a.cpp", "// {\n" + frame % (cpp_function(80) + "\n\n" + cpp_function(81)))
    (problem,) = check_sizes.check(tmp_path)
    assert "int f(int a): 81 lines, at most 80" in problem


def test_long_python_functions_are_reported_without_their_docstrings(tmp_path):
    docstring = '    """' + "\n    more" * 30 + '"""'
    body = ["    x = 1"] * 79
    write(tmp_path, "a.py", "\n".join(["def f():", docstring, *body]) + "\n")
    assert check_sizes.check(tmp_path) == []
    write(tmp_path, "a.py", "\n".join(["def f():", docstring, *body, "    x = 2"]) + "\n")
    assert check_sizes.check(tmp_path) == ["a.py:1: f: 81 lines, at most 80"]


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


@pytest.mark.parametrize(
    "line",
    [
        "a.to(device, at::kFloat, /*non_blocking=*/true);",
        "a.to(device, a.scalar_type(), true);",
        "a.to(device, at::kFloat, true, /*copy=*/true);",
        "b.copy_(a, /*non_blocking=*/true);",
        "b.copy_(a, /*non_blocking=*/!b.is_cpu());",
        "b.copy_(a, non_blocking=True)",
        "a.to(device=device, non_blocking = waits)",
    ],
)
def test_a_copy_that_may_not_wait_is_found(line):
    assert check_copies.line_problem(line)


@pytest.mark.parametrize(
    "line",
    [
        "a.to(device, at::kFloat);",
        "a.to(device, at::kFloat, /*non_blocking=*/false);",
        "b.copy_(a, non_blocking=False)",
        "on_device(a, device, at::kFloat);",
        "b.copy_(a, /*non_blocking=*/true);  // towards the graph's device",
        "b.copy_(a, non_blocking=True)  # towards the graph's device",
    ],
)
def test_other_copies_are_allowed(line):
    assert not check_copies.line_problem(line)


def test_copies_are_looked_for_in_sources_but_for_their_home(tmp_path):
    line = "b.copy_(a, non_blocking=True)\n"
    for name in ("python/fastamp/a.py", "src/core/device_copy.h", "tests/python/test_a.py"):
        write(tmp_path, name, line)
    (found,) = check_copies.check(tmp_path)
    assert found.startswith("python/fastamp/a.py:1: ")


def test_a_source_without_its_licence_is_found_and_given_it(tmp_path):
    write(tmp_path, "src/a.cpp", "int x;\n")
    write(tmp_path, "tools/run.sh", "#!/bin/sh\ntrue\n")
    write(tmp_path, "python/empty.py", "")
    write(tmp_path, "docs/a.md", "text\n")
    assert [line.split(":")[0] for line in check_licenses.check(tmp_path)] == [
        "src/a.cpp",
        "tools/run.sh",
    ]
    assert check_licenses.check(tmp_path, write=True) == []
    assert check_licenses.check(tmp_path) == []
    line = check_licenses.IDENTIFIER
    assert (tmp_path / "src/a.cpp").read_text() == f"// {line}\nint x;\n"
    assert (tmp_path / "tools/run.sh").read_text() == f"#!/bin/sh\n# {line}\ntrue\n"
