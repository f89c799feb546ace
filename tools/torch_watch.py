# SPDX-License-Identifier: Apache-2.0
"""Lists which code of torch that fastamp wraps, replaces or imitates is not as it was looked at.

tools/torch_seen/watched.txt names that code. Beside it, each minor version of torch has a list: for
each function, class and header a hash of its source without comments, docstrings and annotations,
and where the hash differs from the version before, a sentence that says what was looked at.

torch_watch.py                            the torch that this interpreter imports
torch_watch.py --torch 2.15.0 ...         wheels of these versions, downloaded and not installed
torch_watch.py --from FILE_OR_FOLDER ...  wheels, or folders that hold torch/
torch_watch.py --torch 2.16.0 --note      writes the list of a new minor: replace each "?" in it
torch_watch.py --diff 2.15.0 2.16.0       shows what differs between two of them, to be read
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import importlib.util
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SEEN = ROOT / "tools" / "torch_seen"
WHEELS = ROOT / "build" / "torch_watch"

#: The hash of code that a version does not have.
ABSENT = "-"
#: What stands in the place of a sentence until somebody has looked.
UNSEEN = "?"
#: What is left of a module when its functions and classes are taken out.
REST = "(rest)"

Reader = Callable[[str], "str | None"]


class Torch(NamedTuple):
    """Source of a torch that need not be installed."""

    version: str  #: "2.15.0"
    read: Reader  #: Gives a file by its path, such as "torch/amp/__init__.py"; None if missing.

    @property
    def minor(self) -> str:
        """The version without its last number: "2.15"."""
        return self.version.rpartition(".")[0]


class Seen(NamedTuple):
    """A line of a version's list."""

    digest: str
    remark: str


def torch_in(where: Path) -> Torch:
    """Opens a wheel, or a folder that holds torch/.

    Raises:
        ValueError: It is neither.
    """
    if where.is_dir():

        def read(path: str) -> str | None:
            file = where / path
            return file.read_text(encoding="utf-8") if file.is_file() else None

    elif zipfile.is_zipfile(where):
        wheel = zipfile.ZipFile(where)
        names = set(wheel.namelist())

        def read(path: str) -> str | None:
            return wheel.read(path).decode() if path in names else None

    else:
        raise ValueError(f"expected a wheel or a folder that holds torch/, got {where}")
    version = re.search(r"__version__ = '(\d+\.\d+\.\d+)", read("torch/version.py") or "")
    if version is None:
        raise ValueError(f"expected torch/version.py with a version, got none in {where}")
    return Torch(version[1], read)


def installed_torch() -> Torch:
    """Finds the torch that this interpreter would import, and does not import it.

    Raises:
        ValueError: There is none.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ValueError("expected torch to be installed, got none; give --torch or --from")
    return torch_in(Path(spec.origin).parent.parent)


def downloaded_torch(version: str) -> Torch:
    """Fetches a version's smallest wheel, once. Python sources and headers are those of all others.

    Raises:
        ValueError: pip finds none.
    """
    found = sorted(WHEELS.glob(f"torch-{version}-*.whl"))
    if not found:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
        platforms = ["--platform=macosx_11_0_arm64", "--platform=macosx_14_0_arm64"]
        options = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", f"-d{WHEELS}"]
        if subprocess.run(
            [*pip, *options, *platforms, f"torch=={version}"], check=False
        ).returncode:
            raise ValueError(f"expected a version of torch that pip finds, got {version}")
        found = sorted(WHEELS.glob(f"torch-{version}-*.whl"))
    return torch_in(found[-1])


def watched(seen: Path = SEEN) -> Iterator[tuple[str, list[str]]]:
    """Yields the files of torch that are watched, and the names in each; ["*"] are all of them."""
    for line in (seen / "watched.txt").read_text(encoding="utf-8").splitlines():
        entry = line.partition("#")[0].split()
        if entry:
            yield entry[0], entry[1:]


def _is_text(node: object) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _is_overload(node: object) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(ast.unparse(each).endswith("overload") for each in decorators)


_OPPOSITE: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.In: ast.NotIn,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.NotEq: ast.Eq,
    ast.NotIn: ast.In,
}


def _opposite(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return ast.Compare(test.left, [_OPPOSITE[type(test.ops[0])]()], test.comparators)
    if isinstance(test, ast.BoolOp):
        other = ast.And() if isinstance(test.op, ast.Or) else ast.Or()
        return ast.BoolOp(other, [_opposite(value) for value in test.values])
    return ast.UnaryOp(ast.Not(), test)


class _Normal(ast.NodeTransformer):
    """Takes out what does not run: docstrings, annotations and overloads.

    Assertions lose their texts, and those written as ``if`` and ``raise`` become assertions: torch
    has changed them by the hundred.
    """

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Strips a node and all below it."""
        for field, value in ast.iter_fields(node):
            if isinstance(value, list):
                kept = [each for each in value if not _is_text(each) and not _is_overload(each)]
                setattr(node, field, kept)
        return super().generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        """Strips an argument's annotation."""
        node.annotation = None
        return node

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    visit_FunctionDef = visit_AsyncFunctionDef = _function  # noqa: N815

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """Takes an assertion's text out."""
        return ast.Assert(node.test)

    def visit_If(self, node: ast.If) -> ast.AST:
        """Makes an assertion of an ``if`` that is one."""
        only = node.body[0] if len(node.body) == 1 and not node.orelse else None
        error = only.exc if isinstance(only, ast.Raise) else None
        if isinstance(error, ast.Call) and getattr(error.func, "id", "") == "AssertionError":
            return ast.Assert(_opposite(node.test))
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Makes an annotated assignment a plain one; fields of dataclasses keep their names."""
        if node.value is not None:
            return self.generic_visit(ast.Assign([node.target], node.value))
        return ast.Expr(node.target)


def _canonical(value: object) -> str:
    """Writes a syntax tree alike in all versions of Python, which differ in empty fields."""
    if isinstance(value, ast.AST):
        fields = [(name, each) for name, each in ast.iter_fields(value) if each not in (None, [])]
        inner = ",".join(f"{name}={_canonical(each)}" for name, each in fields if name != "ctx")
        return f"{type(value).__name__}({inner})"
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    return repr(value)


_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _definitions(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yields the functions and classes of a body with their names, those under ``if`` as well."""
    for node in body:
        if isinstance(node, _Definition):
            yield node.name, node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for field in ("body", "orelse", "handlers", "finalbody"):
                inner = getattr(node, field, [])
                for each in inner:
                    yield from _definitions(each.body if hasattr(each, "type") else [each])


def _in_python(source: str, names: Sequence[str]) -> dict[str, list[ast.AST]]:
    tree = _Normal().visit(ast.parse(source))
    parts: dict[str, list[ast.AST]] = {}
    for name, node in _definitions(tree.body):
        parts.setdefault(name, []).append(node)
    if "*" in names:
        imports = (ast.Import, ast.ImportFrom)
        left = [each for each in tree.body if not isinstance(each, (*_Definition, *imports))]
        return parts | ({REST: left} if left else {})
    found: dict[str, list[ast.AST]] = {}
    for name in names:
        owner, *path = name.split(".")
        nodes = parts.get(owner, [])
        for step in path:
            inner = (pair for node in nodes for pair in _definitions(getattr(node, "body", [])))
            nodes = [node for each, node in inner if each == step]
        found[name] = nodes
    return found


_FOR_WINDOWS = re.compile(r"#ifdef _WIN32\b.*?#else\b", re.DOTALL)
_LITERAL = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'')
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\])*")', re.DOTALL)


def _in_header(source: str, names: Sequence[str]) -> dict[str, str]:
    text = _COMMENT.sub(lambda match: match[1] or " ", source)
    if "*" in names:
        return {"*": text}
    text = _FOR_WINDOWS.sub("", text)  # its braces would be counted twice
    code = _LITERAL.sub(lambda match: "_" * len(match[0]), text)
    found = {}
    for name in names:
        start = re.search(rf"\b(?:struct|class)\s+(?:\w+\s+)?{name}\b[^;{{}}]*{{", code)
        if start is None:
            found[name] = ""
            continue
        depth, end = 1, start.end()
        while depth and end < len(code):
            depth += {"{": 1, "}": -1}.get(code[end], 0)
            end += 1
        found[name] = text[start.start() : end]
    return found


def sources(torch: Torch, path: str, names: Sequence[str]) -> dict[str, str]:
    """Returns code of a file, normalised: what is equal does the same.

    Args:
        torch: Where to look.
        path: "torch/amp/grad_scaler.py", or a header.
        names: Functions, classes, methods ("Class.method"); ["*"] is all of the file.

    Returns:
        By name; empty for what this version does not have.
    """
    text = torch.read(path)
    if text is None:
        return dict.fromkeys(names, "")
    if not path.endswith(".py"):
        return {name: " ".join(part.split()) for name, part in _in_header(text, names).items()}
    found = _in_python(text, names)
    return {name: "\n".join(map(_canonical, nodes)) for name, nodes in found.items()}


def readable(torch: Torch, path: str, name: str) -> list[str]:
    """Returns the lines of code that :func:`sources` knows by a name, for people."""
    text = torch.read(path) or ""
    if not path.endswith(".py"):
        return [line for line in _in_header(text, [name])[name].splitlines() if line.strip()]
    whole = "*" if name == REST or "." not in name else name
    nodes = _in_python(text, [whole]).get(name, [])
    return "\n".join(map(ast.unparse, nodes)).splitlines()


def digests(torch: Torch, seen: Path = SEEN) -> dict[str, str]:
    """Returns the hashes of all watched code of a torch, by "file:name"."""
    found = {}
    for path, names in watched(seen):
        for name, source in sources(torch, path, names).items():
            digest = hashlib.sha256(source.encode()).hexdigest()[:12] if source else ABSENT
            found[f"{path}:{name}"] = digest
    return found


def minors(seen: Path = SEEN) -> list[str]:
    """Returns the minor versions that have a list, the oldest first."""
    names = [file.stem for file in seen.glob("*.tsv")]
    return sorted(names, key=lambda name: [int(part) for part in name.split(".")])


def read_list(minor: str, seen: Path = SEEN) -> dict[str, Seen]:
    """Returns a version's list by "file:name"; empty if it has none."""
    file = seen / f"{minor}.tsv"
    if not file.is_file():
        return {}
    lines = file.read_text(encoding="utf-8").splitlines()
    cells = (line.split("\t") for line in lines)
    return {name: Seen(digest, " ".join(remark)) for name, digest, *remark in cells}


def _before(minor: str, seen: Path) -> dict[str, Seen]:
    older = minors(seen)
    older = older[: older.index(minor)] if minor in older else older
    return read_list(older[-1], seen) if older else {}


def write_list(torch: Torch, seen: Path = SEEN) -> int:
    """Writes the list of a torch's minor version; sentences about code as it is stay.

    Returns:
        How many sentences somebody has to write.
    """
    old, before = read_list(torch.minor, seen), _before(torch.minor, seen)
    lines = []
    for name, digest in sorted(digests(torch, seen).items()):
        known = before.get(name, Seen(ABSENT, ""))
        if not before or known.digest == digest:
            remark = ""
        elif name in old and old[name].digest == digest:
            remark = old[name].remark or UNSEEN
        else:
            remark = UNSEEN
        lines.append(f"{name}\t{digest}" + (f"\t{remark}" if remark else ""))
    (seen / f"{torch.minor}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return sum(line.endswith(f"\t{UNSEEN}") for line in lines)


def unseen(seen: Path = SEEN) -> Iterator[str]:
    """Yields changes between the lists about which nobody has written a sentence."""
    for minor in minors(seen):
        before = _before(minor, seen)
        for name, (digest, remark) in read_list(minor, seen).items() if before else ():
            changed = before.get(name, Seen(ABSENT, "")).digest != digest
            if changed and remark in ("", UNSEEN):
                yield f"{minor}: {name} changed, and torch_seen/{minor}.tsv does not say what of it"


def differences(torch: Torch, seen: Path = SEEN) -> Iterator[str]:
    """Yields what of a torch is not as its version's list says."""
    known = read_list(torch.minor, seen)
    if not known:
        yield f"{torch.version}: nobody has looked at torch {torch.minor}; see --note"
        return
    now = digests(torch, seen)
    for name in sorted(now.keys() | known.keys()):
        was, is_ = known.get(name, Seen(ABSENT, "")).digest, now.get(name, ABSENT)
        if was != is_:
            yield f"{torch.version}: {name} was {was} when it was looked at, is {is_}"


def changes(old: Torch, new: Torch, seen: Path = SEEN) -> Iterator[str]:
    """Yields lines that show how the watched code of two torches differs."""
    before, after = digests(old, seen), digests(new, seen)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name, ABSENT) != after.get(name, ABSENT):
            path, _, part = name.rpartition(":")
            texts = readable(old, path, part), readable(new, path, part)
            yield f"=== {name} {after.get(name, ABSENT)}"
            yield from list(difflib.unified_diff(*texts, lineterm="", n=2))[2:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if all code is as somebody has looked at it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", nargs="+", default=[], metavar="VERSION")
    parser.add_argument("--from", nargs="+", default=[], metavar="PATH", type=Path, dest="paths")
    parser.add_argument("--note", action="store_true", help="write the lists of these versions")
    parser.add_argument("--diff", nargs=2, metavar="VERSION", help="show changes, from and to")
    options = parser.parse_args(arguments)
    try:
        if options.diff:
            old, new = map(downloaded_torch, options.diff)
            print("\n".join(changes(old, new)))
            return 0
        torches = [*map(downloaded_torch, options.torch), *map(torch_in, options.paths)]
        torches = torches or [installed_torch()]
    except ValueError as error:
        parser.error(str(error))
    for torch in torches if options.note else ():
        print(f"torch {torch.version}: {write_list(torch)} changes to look at")
    found = [*unseen(), *(line for torch in torches for line in differences(torch))]
    print("\n".join(found) if found else f"torch {', '.join(t.version for t in torches)}: as seen")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
