# SPDX-License-Identifier: Apache-2.0
"""Changes that break a Python source in one place each, made from its syntax tree."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from mutations import Mutation

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}


_EXPRESSION = "({new} if _is_on({number}) else ({old}))"
_STATEMENT = "if not _is_on({number}): {old}"
_FIRST_IMPORT = "from __future__ import annotations\n"


def _with(node: ast.expr, **fields: object) -> ast.expr:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def _others(node: ast.expr) -> Iterator[ast.expr]:
    """Returns what an expression becomes."""
    if isinstance(node, ast.Compare):
        yield _with(node, ops=[_COMPARISONS[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield _with(node, op=_ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, (int, float)):
            yield ast.Constant(node.value + 1)


def _changed_statements(node: ast.stmt) -> Iterator[tuple[ast.AST, str]]:
    """Parts of a statement, and texts that take their place."""
    if isinstance(node, (ast.If, ast.While)):
        if isinstance(node, ast.If):
            yield node.test, "True"
        yield node.test, "False"
    elif isinstance(node, ast.Return) and node.value is not None:
        yield node.value, "None"
    elif isinstance(node, (ast.Raise, ast.Assert, ast.Delete, ast.AugAssign)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.YieldFrom))
    ):
        yield node, "pass"


class _Finder(ast.NodeVisitor):
    """Collects what can be changed: code that runs, but for texts, annotations and imports."""

    def __init__(self) -> None:
        self.found: list[tuple[ast.AST, str]] = []

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.expr):
            self.found += [(node, f"({ast.unparse(other)})") for other in _others(node)]
        elif isinstance(node, ast.stmt):
            self.found += _changed_statements(node)
        super().generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skips messages: what one says is no behavior that is broken one by one."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        """An annotation."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.visit(node.args)
        for statement in node.body:
            self.visit(statement)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)


def mutations(source: str) -> list[Mutation]:
    """Returns all changes of a source, in a fixed order."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    data = source.encode()
    finder = _Finder()
    finder.visit(ast.parse(source))
    result = []
    for node, new in finder.found:
        assert isinstance(node, (ast.expr, ast.stmt))
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        switch = _EXPRESSION if isinstance(node, ast.expr) else _STATEMENT
        lines_of_node = node.lineno, node.end_lineno
        old = data[begin:end].decode()
        result.append(Mutation(begin, end, *lines_of_node, old, new, switch))
    return sorted(result, key=lambda m: (m.line, m.old, m.new))


def with_switch(source: str) -> str:
    """Has a switched source import what its changes ask; without another line.

    Raises:
        ValueError: The source does not import annotations, as all of the package do.
    """
    if _FIRST_IMPORT not in source:
        raise ValueError(f"expected a source with {_FIRST_IMPORT.strip()!r}, got one without")
    switch = "; from fastamp_mutants import is_on as _is_on\n"
    return source.replace(_FIRST_IMPORT, _FIRST_IMPORT.strip() + switch, 1)


def switch_module(control: str) -> str:
    """The module ``fastamp_mutants``.

    Args:
        control: Path of the file that tools/mutant_control.py describes.
    """
    return f"""import mmap

with open({control!r}, "r+b") as file:
    _control = mmap.mmap(file.fileno(), 0)


def is_on(number):
    _control[4 + number] = 1
    return int.from_bytes(_control[:4], "little") == number
"""
