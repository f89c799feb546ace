# SPDX-License-Identifier: Apache-2.0
"""tools/public_api.py: which names are public, and that a change has to be in the changelog."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import public_api  # noqa: E402

FILES = {
    "python/fastamp/__init__.py": """
from fastamp import part
from fastamp._private.inner import scale as scale, Thing
__all__ = ["part", "scale", "Thing", "LIMIT"]
LIMIT: int = 3
def not_listed(): ...
""",
    "python/fastamp/part.py": """
__all__ = ["go"]
def go(x: int, /, y: float = 2.0, *rest, z: str = "a", **more) -> int: ...
""",
    "python/fastamp/_private/__init__.py": "",
    "python/fastamp/_private/inner.py": """
from typing import overload
class _Base:
    def shared(self, a): ...
    def replaced(self, a): ...
class Thing(_Base):
    width: int = 1
    _hidden = 2
    def __init__(self, size: int) -> None: ...
    def replaced(self, a, b=None): ...
    @property
    def area(self) -> int: ...
    @area.setter
    def area(self, value: int) -> None: ...
    @staticmethod
    def of(text): ...
    @classmethod
    def read(cls, path): ...
    def _own(self): ...
@overload
def scale(x: int) -> int: ...
def scale(x, by=None): ...
""",
    "include/fastamp/a.h": """
#pragma once
#define FASTAMP_MACRO(x) \\
  struct Never { int x; };
namespace fastamp {
class Forward;
namespace detail { struct Internal { int x; }; }
/// A class; with a semicolon.
class FASTAMP_API Guard : public Base {
 public:
  explicit Guard(int device, std::vector<int> sizes = {1, 2}) : device_(device), sizes_{sizes} {}
  ~Guard();
  int device() const { return device_; }
  enum class Kind { one, two };
 protected:
  void seen();
 private:
  struct State { int y; };
  int device_;
};
FASTAMP_API void run(const Guard& guard);  // comment
inline constexpr int kCount{4};
using Callback = std::function<void(int)>;
}  // namespace fastamp
""",
    "CHANGELOG.md": "# Changelog\n\n## 1.1.0 (unreleased)\n\n- Nothing.\n\n## 1.0.0 (2030-01-31)\n",
}

PYTHON = """class fastamp.Thing(_Base)
fastamp.LIMIT
fastamp.Thing.__init__(size)
fastamp.Thing.area
fastamp.Thing.of(text)
fastamp.Thing.read(path)
fastamp.Thing.replaced(a, b=None)
fastamp.Thing.shared(a)
fastamp.Thing.width = 1
fastamp.part.go(x, /, y=2.0, *rest, z='a', **more)
fastamp.scale(x, by=None)""".splitlines()

CPP = """fastamp: FASTAMP_API void run(const Guard& guard)
fastamp: class FASTAMP_API Guard : public Base
fastamp: inline constexpr int kCount
fastamp: using Callback = std::function<void(int)>
fastamp::Guard: enum class Kind { one, two }
fastamp::Guard: explicit Guard(int device, std::vector<int> sizes = {1, 2})
fastamp::Guard: int device() const
fastamp::Guard: void seen()
fastamp::Guard: ~Guard()""".splitlines()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    public_api.write_lists(tmp_path, "now")
    public_api.write_lists(tmp_path, "released")
    return tmp_path


def edit(tree: Path, name: str, before: str, after: str) -> None:
    text = (tree / name).read_text(encoding="utf-8")
    assert before in text
    (tree / name).write_text(text.replace(before, after), encoding="utf-8")


def test_public_names_are_listed_with_their_signatures(tree):
    assert public_api.interfaces(tree) == {"python": PYTHON, "cpp": CPP}
    assert list(public_api.problems(tree)) == []


CHANGES = [
    ("python/fastamp/part.py", "y: float = 2.0", "y: float = 3.0", "part.go", "`go` divides."),
    ("python/fastamp/_private/inner.py", "def shared", "def common", "Thing.common", "`Thing`"),
    ("python/fastamp/__init__.py", '"LIMIT"', '"not_listed"', "not_listed", "not_listed, LIMIT"),
    ("include/fastamp/a.h", "void run(const", "int run(const", "int run", "`run` returns"),
    ("include/fastamp/a.h", "one, two", "one, two, three", "three", "a `Kind` more"),
]


@pytest.mark.parametrize(("file", "before", "after", "named", "news"), CHANGES)
def test_a_change_fails_until_it_is_listed_and_in_the_changelog(
    tree, file, before, after, named, news
):
    edit(tree, file, before, after)
    found = list(public_api.problems(tree))
    assert any("(wanted: public_api.py --write)" in line and named in line for line in found)
    public_api.write_lists(tree, "now")
    found = list(public_api.problems(tree))
    assert found
    assert all(line.startswith("CHANGELOG.md: the first section") for line in found)
    edit(tree, "CHANGELOG.md", "- Nothing.", f"- {news}")
    assert list(public_api.problems(tree)) == []
    public_api.write_lists(tree, "released")
    edit(tree, "CHANGELOG.md", f"- {news}", "- Nothing.")
    assert list(public_api.problems(tree)) == []


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("python/fastamp/part.py", "y: float", "y: int"),
        ("python/fastamp/_private/inner.py", "_hidden = 2", "_hidden = 3"),
        ("include/fastamp/a.h", "return device_;", "return device_ + 0;"),
        ("include/fastamp/a.h", "  int device_;", "  long device_;"),
        ("include/fastamp/a.h", "struct State { int y; }", "struct State { long y; }"),
        ("include/fastamp/a.h", "Internal { int x; }", "Internal { long x; }"),
        ("include/fastamp/a.h", "// comment", "// another"),
    ],
)
def test_what_users_do_not_see_may_change(tree, file, before, after):
    edit(tree, file, before, after)
    assert list(public_api.problems(tree)) == []
