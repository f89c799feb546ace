# SPDX-License-Identifier: Apache-2.0
"""Checks that files have at most 800 lines, functions at most 80, and C++ lines 100 columns.

A Python function is counted without its docstring. In C++ every brace block that is not a
namespace, class or the like counts as a function: found by matching braces, which is enough to
catch what has grown too long.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tracked_files import ROOT, report, tracked_files

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 80
MAX_COLUMNS = 100  # clang-format, which breaks code there, leaves comments as they are.
CPP = (".h", ".cpp", ".cu", ".cuh")
CHECKED = (*CPP, ".py", ".pyi", ".cmake", "CMakeLists.txt", ".sh", "Makefile")

# Comments, strings and characters, whose braces mean nothing; preprocessor lines likewise.
NOISE = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"\((?:.*?)\)"|"(?:\\.|[^"\\\n])*"'
    r"|'(?:\\.|[^'\\\n])'|^[ \t]*\#(?:\\\n|[^\n])*",
    re.DOTALL | re.MULTILINE,
)
# What precedes the brace of a block that only groups declarations; the second form is a partial
# specialisation, whose arguments may hold a function type.
GROUPING = re.compile(
    r"\b(namespace|class|struct|union|enum|extern)\b[^;(){}]*$"
    r"|\b(class|struct)\s+\w+\s*<[^{};]*>\s*$"
)


def python_functions(source: str) -> Iterator[tuple[int, str, int]]:
    """Yields line, name and length of each function, docstrings not counted."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node, clean=False) is not None:
                length -= (first.end_lineno or first.lineno) - first.lineno + 1
            yield node.lineno, node.name, length


def cpp_functions(source: str) -> Iterator[tuple[int, str, int]]:
    """Yields first line, head and length of each block that counts as a function."""
    text = NOISE.sub(lambda match: "\n" * match[0].count("\n"), source)
    stack: list[tuple[bool, int, str]] = []  # is a function, first line, head
    line, head = 1, ""
    for char in text:
        if char == "{":
            inside = any(function for function, _, _ in stack)
            grouping = not head.strip() or GROUPING.search(head) is not None
            first = line - head.rstrip().lstrip("\n ").count("\n")
            stack.append((not inside and not grouping, first, " ".join(head.split())[-60:]))
            head = ""
        elif char == "}":
            function, first, name = stack.pop() if stack else (False, 0, "")
            if function:
                yield first, name, line - first + 1
            head = ""
        elif char == ";":
            head = ""
        else:
            head += char
        line += char == "\n"


def check(root: Path) -> list[str]:
    """Returns one line for each file and function below root that is too long."""
    found = []
    for path in tracked_files(root, *CHECKED):
        relative = path.relative_to(root)
        source = path.read_text(encoding="utf-8")
        lines = len(source.splitlines())
        if lines > MAX_FILE_LINES:
            found.append(f"{relative}: {lines} lines, at most {MAX_FILE_LINES}")
        if path.suffix in CPP:
            found += [
                f"{relative}:{number}: {len(line)} columns, at most {MAX_COLUMNS}"
                for number, line in enumerate(source.splitlines(), 1)
                if len(line) > MAX_COLUMNS
            ]
        functions: Iterator[tuple[int, str, int]] = iter(())
        if path.suffix == ".py":
            functions = python_functions(source)
        elif path.suffix in CPP:
            functions = cpp_functions(source)
        found += [
            f"{relative}:{line}: {name}: {length} lines, at most {MAX_FUNCTION_LINES}"
            for line, name, length in functions
            if length > MAX_FUNCTION_LINES
        ]
    return found


if __name__ == "__main__":
    sys.exit(report(check(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)))
