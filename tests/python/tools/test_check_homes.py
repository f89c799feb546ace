# SPDX-License-Identifier: Apache-2.0
"""tools/check_homes.py finds what is declared in one file and defined in another, and only that."""

import pytest

import check_homes


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def found(root, elsewhere=None):
    return check_homes.check(root, elsewhere or {})


AT_HOME = [
    # Header, its source, how many functions.
    ("int f(int a);", "int f(int a) { return a; }", 1),
    ("int f(int a = {1});\nint f(double a);", "int f(int a) {}\nint f(double a) {}", 2),
    (
        "class A {\n public:\n  A();\n  ~A();\n  int f() const;\n};",
        "A::A() : b_{1}, c_(2) {}\nA::~A() = default;\nint A::f() const {}",
        3,
    ),
    ("struct A {\n  struct B { void f(); };\n};", "void A::B::f() {}", 1),
    ("struct A { bool operator==(A a) const; };", "bool A::operator==(A a) const {}", 1),
    ("struct A { operator bool() const; };", "A::operator bool() const {}", 1),
    ("std::function<void(int)> f();", "std::function<void(int)> f() { return {}; }", 1),
]

NOTHING_TO_DEFINE = [
    "inline int f() { return 1; }",
    "constexpr int f();",
    "template <typename T> int f(T t);",
    "template <typename T>\nclass A {\n  int f();\n};",
    "struct A {\n  A() = default;\n  A(const A&) = delete;\n  virtual int f() = 0;\n};",
    "struct A { int f() { return int{1}; } };",
    "struct A { friend int f(A a); };",
    "using F = int(int);\ntypedef int G(int);\nextern int (*hook)(int);",
    "enum class E : int { kA, kB };\ninline constexpr int kC{2};",
    'static_assert(sizeof(int) == 4, "{");',
    "// int f();\n/* int g(); */\n#define H() int h();\nstruct A;",
]


@pytest.mark.parametrize("end", ["cpp", "cu"])
@pytest.mark.parametrize(("header", "source", "count"), AT_HOME)
def test_what_is_defined_in_the_source_of_its_name_is_at_home(tmp_path, header, source, count, end):
    write(tmp_path, "src/ops/a.h", f"namespace fastamp::ops {{\n{header}\n}}\n")
    write(tmp_path, f"src/ops/a.{end}", f"namespace fastamp::ops {{\n{source}\n}}\n")
    assert len(check_homes.functions_of(tmp_path / "src/ops/a.h")) == count
    assert found(tmp_path) == []


@pytest.mark.parametrize(("header", "source", "count"), AT_HOME)
def test_what_is_defined_in_another_source_is_reported(tmp_path, header, source, count):
    write(tmp_path, "python/csrc/a.h", f"namespace fastamp {{\n{header}\n}}\n")
    write(tmp_path, "python/csrc/b.cpp", f"namespace fastamp {{\n{source}\n}}\n")
    problems = found(tmp_path)
    assert len(problems) == count
    assert all("is defined in python/csrc/b.cpp" in problem for problem in problems)


@pytest.mark.parametrize("header", NOTHING_TO_DEFINE)
def test_what_a_header_may_hold_is_not_reported(tmp_path, header):
    write(tmp_path, "src/ops/a.h", f"namespace fastamp {{\n{header}\n}}\n")
    assert found(tmp_path) == []


def test_public_headers_and_tests_are_left_alone(tmp_path):
    for name in ("include/fastamp/a.h", "tests/cpp/a.h"):
        write(tmp_path, name, "int f();\n")
    assert found(tmp_path) == []


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("", "no source"),
        ("namespace { int f() {} }", "no source"),
        ("namespace b { int f() {} }", "no source"),
        ("struct A { int f() {} };", "no source"),
    ],
)
def test_another_function_of_that_name_is_no_definition(tmp_path, source, where):
    write(tmp_path, "src/ops/a.h", "\nint f();\n")
    write(tmp_path, "src/ops/a.cpp", source)
    assert found(tmp_path) == [f"src/ops/a.h:2: f is defined in {where}"]


def test_each_overload_wants_a_definition(tmp_path):
    write(tmp_path, "src/ops/a.h", "int f(int a);\nint f(double a);\n")
    write(tmp_path, "src/ops/a.cpp", "int f(int a) {}\n")
    write(tmp_path, "src/ops/b.cpp", "int f(double a) {}\n")
    (problem,) = found(tmp_path)
    assert "src/ops/b.cpp" in problem


def test_the_table_allows_what_is_elsewhere_and_nothing_that_is_at_home(tmp_path):
    write(tmp_path, "src/ops/a.h", "namespace fastamp {\nint f();\nint g();\n}\n")
    write(tmp_path, "src/ops/a.cpp", "namespace fastamp {\nint f() {}\n}\n")
    write(tmp_path, "src/ops/b.cpp", "namespace fastamp {\nint g() {}\n}\n")
    assert found(tmp_path, {"src/ops/a.h": ("g",)}) == []
    (problem,) = found(tmp_path, {"src/ops/a.h": ("f", "g")})
    assert problem.endswith("f of src/ops/a.h is at home: strike it out")


@pytest.mark.parametrize(
    "text",
    [
        "int f() {\n",
        "}\n",
        "namespace a {\n",
        "int f(\n",
        "int f()\n",
        "f();\n",
        "int *[3](int);\n",
    ],
)
@pytest.mark.parametrize("name", ["src/ops/a.h", "src/ops/a.cpp"])
def test_a_file_that_is_not_understood_is_reported(tmp_path, name, text):
    write(tmp_path, name, text)
    (problem,) = found(tmp_path)
    assert problem.startswith(f"{name}: cannot be read: line 1: ")


def test_this_tree_keeps_the_rule():
    assert check_homes.check(check_homes.ROOT) == []


def test_headers_of_one_name_are_the_parts_of_a_kernel(tmp_path):
    for folder in ("kernels/cpu", "kernels/cuda", "kernels/functors"):
        write(tmp_path, f"src/{folder}/a.h", "")
    write(tmp_path, "include/fastamp/optim/a.h", "")  # What users see of it.
    assert found(tmp_path) == []
    write(tmp_path, "src/optim/a.h", "")
    (text,) = found(tmp_path)
    assert text == "a.h: headers of one name: src/kernels/cpu/a.h, src/optim/a.h"
