# SPDX-License-Identifier: Apache-2.0
"""Keeps the lists of public names and signatures in docs/api, and asks the changelog for changes.

`now` is the interface of the sources, `released` that of the last release. Lint fails where `now`
is not what the sources say, and where the first section of CHANGELOG.md does not name what differs
from `released`. Reads sources alone: nothing has to be built.

public_api.py            the check
public_api.py --write    writes `now`, after a change that is wanted
public_api.py --release  writes `released`, after a release
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tracked_files import ROOT, report, tracked_files

LISTS = Path("docs") / "api"
PACKAGE = "fastamp"
#: Methods that are part of a class's interface although their names begin with an underscore.
SPECIAL = frozenset(
    f"__{name}__"
    for name in ("init", "call", "enter", "exit", "iter", "len", "getitem", "contains", "eq")
)

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class Package:
    """The sources of the Python package, parsed once each."""

    def __init__(self, root: Path) -> None:
        """Takes the folder that holds the package."""
        self._root = root
        self._trees: dict[str, ast.Module | None] = {}

    def tree(self, module: str) -> ast.Module | None:
        """The syntax tree of a module; None if there is no such source."""
        if module not in self._trees:
            path = self._root / module.replace(".", "/")
            files = (path.with_suffix(".py"), path / "__init__.py", path.with_suffix(".pyi"))
            found = next((file for file in files if file.is_file()), None)
            text = found.read_text(encoding="utf-8") if found else None
            self._trees[module] = None if text is None else ast.parse(text)
        return self._trees[module]

    def public_names(self, module: str) -> list[str]:
        """Returns what `__all__` of a module holds, empty without one."""
        tree = self.tree(module)
        for node in tree.body if tree else ():
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(each, ast.Name) and each.id == "__all__" for each in targets):
                assert isinstance(node, ast.Assign)
                names: list[str] = ast.literal_eval(node.value)
                return names
        return []

    def definition(self, module: str, name: str) -> tuple[str, list[ast.stmt]] | None:
        """Finds the statements that define a name, through imports of the package's own modules.

        Returns:
            (module, statements), several for overloads; None if it is a module or another's.
        """
        tree = self.tree(module)
        found: list[ast.stmt] = []
        for node in tree.body if tree else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        if self.tree(f"{node.module}.{alias.name}") is not None:
                            return None
                        return self.definition(str(node.module), alias.name)
        for statement in tree.body if tree else ():
            if isinstance(statement, (*_Function, ast.ClassDef)) and statement.name == name:
                found.append(statement)
            targets = getattr(statement, "targets", [getattr(statement, "target", None)])
            if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                found.append(statement)
        return (module, found) if found else None


def signature(function: ast.FunctionDef | ast.AsyncFunctionDef, bound: bool) -> str:
    """Returns a function's arguments with their defaults, without annotations.

    Args:
        function: The definition.
        bound: Without its first argument.
    """

    def bare(arguments: list[ast.arg]) -> list[ast.arg]:
        return [ast.arg(each.arg) for each in arguments]

    given = function.args
    plain = ast.arguments(
        posonlyargs=bare(given.posonlyargs),
        args=bare(given.args),
        vararg=ast.arg(given.vararg.arg) if given.vararg else None,
        kwonlyargs=bare(given.kwonlyargs),
        kw_defaults=given.kw_defaults,
        kwarg=ast.arg(given.kwarg.arg) if given.kwarg else None,
        defaults=given.defaults,
    )
    if bound:
        del (plain.posonlyargs or plain.args)[:1]
    return f"({ast.unparse(plain)})"


def _decorators(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {ast.unparse(each).rpartition(".")[2] for each in function.decorator_list}


def _of_function(name: str, function: ast.FunctionDef | ast.AsyncFunctionDef, member: bool) -> str:
    decorators = _decorators(function)
    if decorators & {"property", "cached_property"}:
        return name
    return name + signature(function, member and "staticmethod" not in decorators)


def _members(package: Package, module: str, node: ast.ClassDef) -> dict[str, str]:
    """Public members of a class and of its bases in the package, each as its class has it."""
    found: dict[str, str] = {}
    for each in node.body:
        if isinstance(each, _Function):
            is_setter = "setter" in _decorators(each)
            if not is_setter and (not each.name.startswith("_") or each.name in SPECIAL):
                found[each.name] = _of_function(each.name, each, True)
        elif isinstance(each, (ast.Assign, ast.AnnAssign)):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            value = f" = {ast.unparse(each.value)}" if each.value else ""
            for target in targets:
                if isinstance(target, ast.Name) and not target.id.startswith("_"):
                    found[target.id] = target.id + value
    for base in node.bases:
        home, definitions = package.definition(module, ast.unparse(base)) or ("", [])
        for definition in definitions:
            if isinstance(definition, ast.ClassDef):
                found = _members(package, home, definition) | found
    return found


def _of_class(package: Package, name: str, module: str, node: ast.ClassDef) -> Iterator[str]:
    yield f"class {name}({', '.join(map(ast.unparse, node.bases))})"
    for member in _members(package, module, node).values():
        yield f"{name}.{member}"


def _of_module(package: Package, module: str) -> Iterator[str]:
    for name in package.public_names(module):
        path = f"{module}.{name}"
        found = package.definition(module, name)
        if found is None:
            if package.tree(path) is not None:
                yield from _of_module(package, path)
            else:
                yield path
            continue
        for each in found[1]:
            if isinstance(each, ast.ClassDef):
                yield from _of_class(package, path, found[0], each)
            elif isinstance(each, _Function):
                if len(found[1]) == 1 or "overload" not in _decorators(each):
                    yield _of_function(path, each, False)
            else:
                yield path


def python_interface(root: Path) -> list[str]:
    """Returns a line for each public name of the package, with its signature.

    Args:
        root: The folder that holds the package.
    """
    return sorted(set(_of_module(Package(root), PACKAGE)))


_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\])*")', re.DOTALL)
_DIRECTIVE = re.compile(r"^\s*#(?:[^\n]*\\\n)*[^\n]*$", re.MULTILINE)
_TYPE = re.compile(r"\b(class|struct|enum(?: class)?|union)\s+(?:FASTAMP_API\s+)?([\w:]+)")
_DECLARED_ONLY = re.compile(r"(?:enum )?(?:class|struct) (?:FASTAMP_API )?\w+")
_HIDDEN = "detail"  # of what is in it nothing is public
_SPACE = re.compile(r"\s+")


class _Header:
    """Reads the declarations of a header, bodies and what is not public left out."""

    def __init__(self, text: str) -> None:
        text = _COMMENT.sub(lambda match: match[1] or " ", text)
        self._text = _DIRECTIVE.sub("", text)
        self._place = 0
        self.found: list[str] = []

    def read(self, scope: tuple[str, ...] = (), public: bool = True) -> None:
        """Reads up to the end of a scope.

        Args:
            scope: Names of what is around.
            public: Whether members are, before the first label.
        """
        head, depth = "", 0
        while self._place < len(self._text):
            character = self._text[self._place]
            self._place += 1
            label = re.search(r"\b(public|protected|private)\s*$", head)
            if character == ":" and label and not depth:
                public, head = label[1] != "private", ""
            elif character == ";" and not depth:
                self._note(scope, head, public)
                head = ""
            elif character == "}" and not depth:
                return
            elif character == "{" and not depth:
                head = self._open(scope, head, public)
            else:
                depth += {"(": 1, ")": -1}.get(character, 0)
                head += character

    def _open(self, scope: tuple[str, ...], head: str, public: bool) -> str:
        space = re.search(r"\bnamespace\s+([\w:]+)\s*$", head)
        type_ = _TYPE.search(head)
        if space or 'extern "C"' in head:
            self.read((*scope, space[1]) if space else scope)
            return ""
        if type_ and "(" not in head:
            name = type_[2]
            if type_[1].startswith("enum"):
                body = self._body()
                self._note(scope, f"{head} {{{body}}}", public)
            else:
                self._note(scope, f"{head} {{", public)
                self.read((*scope, name if public else _HIDDEN), type_[1] != "class")
            return ""
        self._body()
        initialises = re.search(r"\)\s*:\s*\w", head)
        if initialises and re.match(r"\s*[,{]", self._text[self._place :]):
            return head  # a member in braces: the constructor's body is still to come
        ends = initialises or head.rstrip().endswith((")", "const", "noexcept"))
        if "=" in head.rpartition(")")[2] or not ends:
            return head  # a value in braces: the declaration goes on
        self._note(scope, head, public)
        return ""

    def _body(self) -> str:
        start, depth = self._place, 1
        while depth:
            depth += {"{": 1, "}": -1}.get(self._text[self._place], 0)
            self._place += 1
        return self._text[start : self._place - 1]

    def _note(self, scope: tuple[str, ...], head: str, public: bool) -> None:
        text = _SPACE.sub(" ", head).strip()
        text = re.sub(r"\) : \w.*$", ")", text)  # what a constructor initialises
        is_internal = not public or _HIDDEN in scope or text.startswith(("friend ", "using name"))
        if text and not is_internal and not _DECLARED_ONLY.fullmatch(text):
            place = f"{'::'.join(scope)}: " if scope else ""
            self.found.append(place + text.removesuffix(" {"))


def cpp_interface(root: Path) -> list[str]:
    """Returns a line for each public declaration of the headers, with the scope that it is in.

    Args:
        root: The folder that holds the headers.
    """
    lines: set[str] = set()
    for file in tracked_files(root, ".h"):
        header = _Header(file.read_text(encoding="utf-8"))
        header.read()
        lines.update(header.found)
    return sorted(lines)


def interfaces(root: Path) -> dict[str, list[str]]:
    """Returns the lists of a source tree, by language."""
    return {
        "python": python_interface(root / "python"),
        "cpp": cpp_interface(root / "include" / "fastamp"),
    }


def read_list(root: Path, state: str, language: str) -> list[str]:
    """Returns a list as it is committed; empty if there is none."""
    file = root / LISTS / state / f"{language}.txt"
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def write_lists(root: Path, state: str) -> None:
    """Writes both lists of a source tree under "now" or "released"."""
    for language, lines in interfaces(root).items():
        file = root / LISTS / state / f"{language}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def newest_section(changelog: str) -> str:
    """Returns the text under the first heading of a changelog."""
    return [*re.split(r"^## ", changelog, flags=re.MULTILINE), ""][1]


def is_named(line: str, text: str) -> bool:
    """Whether a text has one of the names in a line of a list, other than those of namespaces."""
    declared = line.partition(" = ")[0]
    names = re.findall(r"\w+", declared.split("(")[0]) + re.findall(r"(\w+)\s*\(", declared)
    spaces = {PACKAGE, "class", "struct", "static", "const", "void", "bool", "FASTAMP_API"}
    return any(re.search(rf"\b{name}\b", text) for name in names if name not in spaces)


def problems(root: Path) -> Iterator[str]:
    """Yields what is not as the lists and the changelog say."""
    news = newest_section((root / "CHANGELOG.md").read_text(encoding="utf-8"))
    for language, lines in interfaces(root).items():
        listed = read_list(root, "now", language)
        for line in sorted(set(lines) ^ set(listed)):
            change = "new" if line in lines else "gone"
            yield f"{LISTS}/now/{language}.txt: {change}: {line} (wanted: public_api.py --write)"
        for line in sorted(set(lines) ^ set(read_list(root, "released", language))):
            if not is_named(line, news):
                yield f"CHANGELOG.md: the first section does not name what changed: {line}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if lists and changelog are right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_const", dest="state", const="now")
    parser.add_argument("--release", action="store_const", dest="state", const="released")
    options = parser.parse_args(arguments)
    if options.state:
        write_lists(ROOT, options.state)
        return 0
    return report(list(problems(ROOT)))


if __name__ == "__main__":
    raise SystemExit(main())
