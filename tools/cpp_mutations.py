# SPDX-License-Identifier: Apache-2.0
"""Changes that break a C++ source in one place each, made from its syntax tree.

What has to be known at compile time is left alone. A change may still not compile: the tree knows
no types.
"""

from __future__ import annotations

from collections.abc import Iterator

import tree_sitter
import tree_sitter_cpp
from tree_sitter import Node

from mutations import Mutation

_OPERATORS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "&&": "||",
    "||": "&&",
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
}
_TRUTHS = {"<", "<=", ">", ">=", "==", "!=", "&&", "||", "!"}
_LEFT_OUT = {
    "ERROR",
    "array_declarator",
    "attribute_declaration",
    "decltype",
    "enum_specifier",
    "noexcept",
    "preproc_def",
    "preproc_function_def",
    "requires_clause",
    "static_assert_declaration",
    "string_literal",
    "template_argument_list",
    "template_parameter_list",
    "throw_statement",  # what it says; whether it throws is changed all the same
}
#: Statements that can be left out.
_STEPS = {"call_expression", "assignment_expression", "update_expression"}
_EXPRESSION = "(fastamp_mutants::is_on({number}) ? ({new}) : ({old}))"
_TRUTH = "(fastamp_mutants::is_on({number}) ? {new} : static_cast<bool>({old}))"
_STATEMENT = "if (!fastamp_mutants::is_on({number})) {{ {old} }}"
_PARSER = tree_sitter.Parser(tree_sitter.Language(tree_sitter_cpp.language()))


def _text(node: Node | None) -> str:
    return "" if node is None or node.text is None else node.text.decode()


def _operator(node: Node) -> str:
    return _text(node.child_by_field_name("operator"))


def _is_constant(node: Node) -> bool:
    """Whether a declaration or function is constexpr."""
    return any(_text(child) in ("constexpr", "consteval") for child in node.children)


def _returns_bool(node: Node) -> bool:
    """Whether a statement is in a function, not a lambda, whose declared type is bool."""
    above = node.parent
    while above is not None and above.type not in ("function_definition", "lambda_expression"):
        above = above.parent
    return above is not None and _text(above.child_by_field_name("type")) == "bool"


def _ends_function(node: Node) -> bool:
    """Whether nothing follows a statement in its function."""
    block = node.parent
    if block is None or block.parent is None or block.parent.type != "function_definition":
        return False
    return bool(block.named_children[-1] == node)


def _is_step(node: Node) -> bool:
    """Whether a statement of an expression can be left out, and something is missing then."""
    return any(
        child.type in _STEPS
        and not _text(child.child_by_field_name("function")).endswith("reserve")
        for child in node.named_children[:1]
    )


def _of_expression(node: Node) -> Iterator[tuple[Node, str, str]]:
    if node.type == "binary_expression" and _operator(node) in _OPERATORS:
        left, right = (_text(node.child_by_field_name(side)) for side in ("left", "right"))
        yield node, f"{left} {_OPERATORS[_operator(node)]} {right}", _EXPRESSION
    elif node.type == "unary_expression" and _operator(node) == "!":
        argument = _text(node.child_by_field_name("argument"))
        yield node, f"static_cast<bool>({argument})", _TRUTH
    elif node.type == "unary_expression" and _operator(node) == "-":
        yield node, _text(node.child_by_field_name("argument")), _EXPRESSION
    elif node.type == "conditional_expression":
        condition = node.child_by_field_name("condition")
        assert condition is not None
        yield from ((condition, new, _TRUTH) for new in ("true", "false"))
    elif node.type == "number_literal":
        yield node, f"{_text(node)} + 1", _EXPRESSION
    elif node.type in ("true", "false"):
        yield node, "false" if node.type == "true" else "true", _EXPRESSION


def _of_statement(node: Node) -> Iterator[tuple[Node, str, str]]:
    if node.type in ("if_statement", "while_statement") and not _is_constant(node):
        clause = node.child_by_field_name("condition")
        value = None if clause is None else clause.child_by_field_name("value")
        if value is not None and value.type != "declaration":
            for new in ("true", "false")[node.type == "while_statement" :]:
                yield value, new, _TRUTH
    elif node.type == "return_statement" and node.named_children and _returns_bool(node):
        value = node.named_children[0]
        if value.type not in ("true", "false") and _operator(value) not in _TRUTHS:
            yield value, f"!({_text(value)})", _TRUTH
    elif (
        (node.type == "expression_statement" and _is_step(node))
        or node.type in ("continue_statement", "break_statement")
        or (node.type == "throw_statement" and not _ends_function(node))
    ):
        yield node, "", _STATEMENT


def _children(node: Node) -> Iterator[Node]:
    """The nodes below one that run, and are no part of a message."""
    function = _text(node.child_by_field_name("function"))
    for child in node.named_children:
        if node.type == "case_statement" and child == node.child_by_field_name("value"):
            continue
        if (
            node.type == "if_statement"
            and child == node.child_by_field_name("condition")
            and _is_constant(node)
        ):
            continue
        if child.type == "argument_list" and function.startswith(("TORCH_CHECK", "TORCH_INTERNAL")):
            yield from child.named_children[:1]
        elif child.type != "argument_list" or not function.startswith("TORCH_WARN"):
            yield child


def _changes(node: Node) -> Iterator[tuple[Node, str, str]]:
    yield from _of_expression(node)
    yield from _of_statement(node)
    if node.type in _LEFT_OUT:
        return
    for child in _children(node):
        constant = child.type in ("declaration", "field_declaration", "function_definition")
        if not (constant and _is_constant(child)):
            yield from _changes(child)


def mutations(source: str) -> list[Mutation]:
    """Returns all changes of a source, in a fixed order."""
    result = []
    for node, new, switch in _changes(_PARSER.parse(source.encode()).root_node):
        new = " ".join(new.split())
        if "//" not in new:
            place = node.start_byte, node.end_byte
            lines = node.start_point.row + 1, node.end_point.row + 1
            result.append(Mutation(*place, *lines, _text(node), new, switch))
    return sorted(result, key=lambda m: (m.line, m.begin, m.end, m.new))


def with_switch(source: str, header: str, path: str) -> str:
    """Has a switched source include what its changes ask; the compiler counts lines as before.

    Args:
        source: A switched source.
        header: Path of a file with :func:`switch_header`.
        path: Of the source, for messages.
    """
    return f'#include "{header}"\n#line 1 "{path}"\n{source}'


def switch_header(control: str) -> str:
    """The header that switched sources include.

    Args:
        control: Path of the file that tools/mutant_control.py describes.
    """
    return f"""#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace fastamp_mutants {{
inline unsigned char* control() {{
  static unsigned char* const memory = [] {{
    const int file = ::open("{control}", O_RDWR);
    struct stat status{{}};
    if (file < 0 || ::fstat(file, &status) != 0) {{
      std::abort();
    }}
    const auto size = static_cast<std::size_t>(status.st_size);
    void* mapped = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) {{
      std::abort();
    }}
    return static_cast<unsigned char*>(mapped);
  }}();
  return memory;
}}

inline bool is_on(std::uint32_t number) {{
  control()[4 + number] = 1;
  std::uint32_t chosen = 0;
  std::memcpy(&chosen, control(), sizeof(chosen));
  return chosen == number;
}}
}}  // namespace fastamp_mutants
"""
