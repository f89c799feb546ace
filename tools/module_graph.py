# SPDX-License-Identifier: Apache-2.0
"""The modules of the tree, who uses whom, and the circles among them.

A module is a C++ header with the source of its name, or a file of the Python package. Of two
modules in a circle neither comes first, so that neither can be read, tested or moved alone.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath

Graph = dict[str, set[str]]

CPP_FOLDERS = (("src",), ("python", "csrc"))
PYTHON_PACKAGE = PurePosixPath("python/fastamp")
QUOTED_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def cpp_modules(root: Path, files: Iterable[Path]) -> Graph:
    """Returns for each C++ module the modules that its files include."""
    graph: Graph = {}
    for path in files:
        relative = path.relative_to(root)
        if not any(relative.parts[: len(folder)] == folder for folder in CPP_FOLDERS):
            continue
        uses = graph.setdefault(relative.with_suffix("").as_posix(), set())
        for name in QUOTED_INCLUDE.findall(path.read_text(encoding="utf-8")):
            for folder in (relative.parent, Path("src")):
                if (root / folder / name).is_file():
                    uses.add((folder / name).with_suffix("").as_posix())
                    break
    return _without_self(graph)


def python_modules(root: Path, files: Iterable[Path]) -> Graph:
    """Returns for each module of the package those it imports.

    Also inside functions and for type checkers only: neither can be read without the other.
    """
    sources = {}
    for path in files:
        relative = PurePosixPath(path.relative_to(root).as_posix())
        if relative.is_relative_to(PYTHON_PACKAGE):
            sources[relative.with_suffix("").as_posix()] = path
    graph: Graph = {}
    for module, path in sources.items():
        if path.suffix == ".py":  # A stub stands for a module that is not written in Python.
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found = (_find(*names, sources) for names in _imports(tree))
            graph[module] = {name for name in found if name is not None}
    return _without_self(graph)


def python_packages(modules: Graph) -> Graph:
    """Returns for each folder below the package, and each module beside them, those it imports.

    Without what modules beside the folders import of one another: that is in the other graph.
    """
    graph: Graph = {}
    for module, uses in modules.items():
        package = _package_of(module)
        others = {_package_of(other) for other in uses}
        if package == module:
            others -= uses
        graph.setdefault(package, set()).update(others)
    return _without_self(graph)


def same_names(modules: Graph) -> Iterator[str]:
    """Yields a line for each name that several private modules of the package have."""
    named = defaultdict(list)
    for module in sorted(modules):
        name = PurePosixPath(module).name
        if "/_" in module and name != "__init__":
            named[name].append(module)
    for first, *others in named.values():
        if others:
            yield f"{first}: another module has the same name: {', '.join(others)}"


def circles(graph: Graph) -> list[list[str]]:
    """Returns the knots of a graph, its strongly connected components of two or more, sorted."""
    reached = {module: _reachable(graph, module) for module in graph}
    knots = {
        tuple(sorted(other for other in reached[module] if module in reached.get(other, ())))
        for module in graph
        if module in reached[module]
    }
    return [list(knot) for knot in sorted(knots)]


def circle_problems(graph: Graph, allowed: Collection[frozenset[str]]) -> Iterator[str]:
    """Yields a line for each circle that is not allowed, and for each allowed one that is gone."""
    knots = circles(graph)
    for knot in knots:
        if frozenset(knot) not in allowed:
            way = " -> ".join(_shortest_circle(graph, knot))
            yield f"{knot[0]}: in a circle with {len(knot) - 1} other modules: {way}"
    for knot in sorted(sorted(knot) for knot in allowed):
        if knot not in knots:
            names = ", ".join(knot)
            yield f"{knot[0]}: no such circle any more, take it out of ALLOWED_CIRCLES: {names}"


def _without_self(graph: Graph) -> Graph:
    return {module: uses - {module} for module, uses in graph.items()}


def _package_of(module: str) -> str:
    folder = PurePosixPath(module).parent
    return module if folder == PYTHON_PACKAGE else f"{folder}/"


def _reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - seen
        seen |= new
        waiting += new
    return seen


def _shortest_circle(graph: Graph, knot: list[str]) -> list[str]:
    """Returns the shortest way from the first module of a knot back to it."""
    start = knot[0]
    ways = deque([[start]])
    seen: set[str] = set()
    while True:
        way = ways.popleft()
        for module in sorted(graph[way[-1]] & set(knot)):
            if module == start:
                return [*way, start]
            if module not in seen:
                seen.add(module)
                ways.append([*way, module])


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields ("fastamp.a", "") for an import of a module, ("fastamp.a", "b") for a name of one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, "") for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from ((child.module or "", alias.name) for alias in child.names)
        else:
            yield from _imports(child)


def _find(module: str, name: str, sources: Collection[str]) -> str | None:
    """Returns the module that is imported: `name` of a package, or the one that has the name."""
    package, *inside = module.split(".")
    if package != PYTHON_PACKAGE.name:
        return None
    path = PYTHON_PACKAGE.joinpath(*inside)
    for candidate in (path / name, path, path / "__init__"):
        if candidate.as_posix() in sources:
            return candidate.as_posix()
    return None
