# SPDX-License-Identifier: Apache-2.0
"""tools/torch_watch.py: what of torch it calls changed, and who has looked at it."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import torch_watch  # noqa: E402

MODULE = '''
"""A module."""
LIMIT: int = 3


def rate(a: int, b: int) -> float:
    """Says what it does."""
    assert a > b, "a first"
    return a / b  # in full


class Step:
    """A step."""

    def take(self):
        def within():
            return 1

        return within()

    def other(self):
        return 2
'''
HEADER = """
// A comment.
struct API Node : Base {
  int size() { return sizes_["{"]; }  /* inside */
  int sizes_;
};
struct Other { int x; };
"""
WATCHED = """
# Two files.
torch/a.py *
torch/b.py Step.take Step.take.within rate absent  # who cares
torch/include/node.h Node
"""


def make_torch(folder: Path, version: str, module: str = MODULE, header: str = HEADER) -> Path:
    files = {
        "torch/version.py": f"__version__ = '{version}+cpu'\n",
        "torch/a.py": module,
        "torch/b.py": module,
        "torch/include/node.h": header,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def seen(tmp_path: Path) -> Path:
    folder = tmp_path / "seen"
    folder.mkdir()
    (folder / "watched.txt").write_text(WATCHED, encoding="utf-8")
    return folder


def changed(tmp_path: Path, seen: Path, before: str, after: str, *, in_header: bool = False):
    """Names of what differs once a text in the sources is replaced."""
    old = torch_watch.torch_in(make_torch(tmp_path / "old", "2.1.0"))
    torch_watch.write_list(old, seen)
    module, header = MODULE, HEADER
    if in_header:
        assert before in HEADER
        header = HEADER.replace(before, after)
    else:
        assert before in MODULE
        module = MODULE.replace(before, after)
    new = torch_watch.torch_in(make_torch(tmp_path / "new", "2.1.1", module, header))
    return {line.split()[1] for line in torch_watch.differences(new, seen)}


def test_a_changed_function_is_noticed(tmp_path, seen):
    assert changed(tmp_path, seen, "return a / b", "return a // b") == {
        "torch/a.py:rate",
        "torch/b.py:rate",
    }


def test_a_changed_method_is_noticed_in_its_class_and_by_its_name(tmp_path, seen):
    assert changed(tmp_path, seen, "return 1", "return 2") == {
        "torch/a.py:Step",
        "torch/b.py:Step.take",
        "torch/b.py:Step.take.within",
    }


def test_a_method_that_is_not_watched_is_not_looked_at(tmp_path, seen):
    assert changed(tmp_path, seen, "return 2", "return 3") == {"torch/a.py:Step"}


def test_a_changed_constant_and_a_changed_header_are_noticed(tmp_path, seen):
    assert changed(tmp_path, seen, "= 3", "= 4") == {"torch/a.py:(rest)"}
    assert changed(tmp_path, seen, "int sizes_", "long sizes_", in_header=True) == {
        "torch/include/node.h:Node"
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# in full", "# exactly"),
        ('"""Says what it does."""', '"""Says it otherwise."""'),
        ("a: int, b: int) -> float", "a: float, b: float) -> object"),
        ("LIMIT: int =", "LIMIT ="),
        (
            'assert a > b, "a first"',
            'if a <= b:\n        raise AssertionError("expected a first")',
        ),
    ],
)
def test_what_does_not_run_is_not_noticed(tmp_path, seen, before, after):
    assert changed(tmp_path, seen, before, after) == set()


@pytest.mark.parametrize(
    ("before", "after"),
    [("// A comment.", "// Another."), ("/* inside */", ""), ("{ int x; }", "{ int y; }")],
)
def test_comments_and_other_classes_of_headers_are_not_noticed(tmp_path, seen, before, after):
    assert changed(tmp_path, seen, before, after, in_header=True) == set()


def test_a_function_that_comes_or_goes_is_noticed(tmp_path, seen):
    renamed = changed(tmp_path, seen, "def rate(", "def ratio(")
    assert renamed == {"torch/a.py:rate", "torch/a.py:ratio", "torch/b.py:rate"}


def test_a_new_minor_fails_until_somebody_has_looked(tmp_path, seen):
    old = make_torch(tmp_path / "old", "2.1.0")
    new = make_torch(tmp_path / "new", "2.2.0", MODULE.replace("a / b", "b / a"))
    assert torch_watch.write_list(torch_watch.torch_in(old), seen) == 0
    assert list(torch_watch.differences(torch_watch.torch_in(new), seen)) == [
        "2.2.0: nobody has looked at torch 2.2; see --note"
    ]
    assert torch_watch.write_list(torch_watch.torch_in(new), seen) == 2
    assert [line.split()[1] for line in torch_watch.unseen(seen)] == [
        "torch/a.py:rate",
        "torch/b.py:rate",
    ]
    listed = seen / "2.2.tsv"
    listed.write_text(
        listed.read_text().replace("\t?", "\tthe inverse; nobody in fastamp calls it")
    )
    assert list(torch_watch.unseen(seen)) == []
    assert list(torch_watch.differences(torch_watch.torch_in(new), seen)) == []
    # What was written stays when the list is made again.
    assert torch_watch.write_list(torch_watch.torch_in(new), seen) == 0


def test_a_wheel_is_read_without_being_installed(tmp_path, seen):
    folder = make_torch(tmp_path / "old", "2.1.0")
    with zipfile.ZipFile(tmp_path / "torch.whl", "w") as wheel:
        for file in folder.rglob("*.*"):
            wheel.write(file, file.relative_to(folder))
    torch_watch.write_list(torch_watch.torch_in(folder), seen)
    assert list(torch_watch.differences(torch_watch.torch_in(tmp_path / "torch.whl"), seen)) == []


def test_what_is_no_torch_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected torch/version\.py with a version, got none"):
        torch_watch.torch_in(tmp_path)
    (tmp_path / "torch.whl").write_text("no wheel")
    with pytest.raises(ValueError, match="expected a wheel or a folder that holds torch/"):
        torch_watch.torch_in(tmp_path / "torch.whl")


def test_differences_are_shown_to_be_read(tmp_path, seen):
    old = torch_watch.torch_in(make_torch(tmp_path / "old", "2.1.0"))
    new = torch_watch.torch_in(make_torch(tmp_path / "new", "2.2.0", MODULE.replace("/ b", "* b")))
    shown = list(torch_watch.changes(old, new, seen))
    assert "-    return a / b" in shown
    assert "+    return a * b" in shown


def test_all_that_is_watched_exists_in_some_version():
    lists = [torch_watch.read_list(minor) for minor in torch_watch.minors()]
    assert len(lists) >= 6
    for name in lists[-1]:
        assert any(each[name].digest != torch_watch.ABSENT for each in lists if name in each), name


def test_every_change_between_minors_was_looked_at():
    assert list(torch_watch.unseen()) == []


def test_the_torch_that_is_installed_is_as_it_was_looked_at():
    torch = torch_watch.installed_torch()
    if torch.minor not in torch_watch.minors():
        pytest.skip(f"nobody has looked at torch {torch.minor}")
    assert list(torch_watch.differences(torch)) == []
