# SPDX-License-Identifier: Apache-2.0
"""Exported graphs whose precision is all in the graph: casts made explicit, few, and checked."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from fastamp._policy.table import op_policy, op_table
from fastamp._util.aligned_text import size_text

__all__ = [
    "GraphTypes",
    "check_types",
    "fold_constant_casts",
    "make_casts_explicit",
    "policies_in_force",
    "remove_needless_casts",
]

_TO_COPY = torch.ops.aten._to_copy.default
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_LOWER = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class GraphTypes:
    """Properties of a graph that :func:`fastamp.inference.export` proved.

    Attributes:
        checked: Numbers of nodes that were held against the lists, by policy. Those of policy
            ``lower`` that are in a region that is off, or in a module of ``fp32``, get float32 and
            are counted by themselves.
        mixed: Names of ops outside the lists with floating operands of different dtypes, such as
            norms of 16-bit activations with float32 weights.
        casts: Casts that the graph makes at each run.
        cast_elements: Elements of them; of dynamic sizes those of the example.
        constant_bytes: Size of the program's parameters, buffers and constants.
        inputs: Dtypes of the tensors that it takes.
        outputs: Dtypes of the tensors that it returns.
    """

    checked: dict[str, int]
    mixed: tuple[str, ...]
    casts: int
    cast_elements: int
    constant_bytes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        """Returns the lines that export prints."""
        checked = ", ".join(f"{count} {policy}" for policy, count in sorted(self.checked.items()))
        lines = [
            f"strongly typed, as the policies of its ops want it: {checked or 'none has one'}",
            f"casts that are left: {self.casts}, of {self.cast_elements} elements a run",
            f"weights and constants: {size_text(self.constant_bytes)}",
            f"takes {', '.join(self.inputs) or 'no tensors'}; returns {', '.join(self.outputs)}",
        ]
        if self.mixed:
            mixed = ", ".join(self.mixed)
            lines.append(f"ops without a policy, whose operands differ in dtype: {mixed}")
        return "\n".join(lines)


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, torch.fx.Node) else None


def _operands(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes of the floating-point tensors that a node reads."""
    flat, _ = tree_flatten((node.args, node.kwargs))
    return [n for n in flat if isinstance(_value(n), torch.Tensor) and _value(n).dtype in _FLOATS]


def _calls(program: Any) -> list[torch.fx.Node]:
    return [node for node in program.graph.nodes if node.op == "call_function"]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_cast(node: torch.fx.Node) -> bool:
    """Whether a node changes the dtype of a tensor and nothing else."""
    return node.target is _TO_COPY and set(node.kwargs) == {"dtype"}


def make_casts_explicit(program: Any) -> None:
    """Writes the casts that elementwise ops make of mixed operands into the graph.

    The kernels convert each element to the dtype of the result before they compute, so nothing is
    rounded that was not before. Numbers without dimensions stay: they are no operands of that kind.
    """
    graph = program.graph
    for node in _calls(program):
        joins = node.target in (torch.ops.aten.cat.default, torch.ops.aten.stack.default)
        tags = getattr(node.target, "tags", ())
        found = [n for n in _operands(node) if _value(n).dim() > 0]
        result = _value(node)
        widens = isinstance(result, torch.Tensor) and result.dtype in (torch.float32, torch.bool)
        is_mixed = len({_value(n).dtype for n in found}) > 1
        if not (is_mixed and widens and (joins or torch.Tag.pointwise in tags)):
            continue
        for operand in found:
            if _value(operand).dtype in _LOWER:
                with graph.inserting_before(node):
                    cast = graph.call_function(_TO_COPY, (operand,), {"dtype": torch.float32})
                cast.meta["val"] = _value(operand).to(torch.float32)
                node.replace_input_with(operand, cast)


def remove_needless_casts(program: Any) -> None:
    """Removes casts to the dtype a tensor has, back from a wider one, and repeated ones."""
    returned = {node.name for node in _returned(program)}
    seen: dict[tuple[Any, Any], torch.fx.Node] = {}
    for node in _calls(program):
        if not _is_cast(node):
            continue
        source: Any = node.args[0]
        dtype: Any = node.kwargs["dtype"]
        if _is_cast(source) and _value(source).dtype == torch.float32:
            (origin,) = source.args
            if _value(origin).dtype in _LOWER:
                source = origin  # what is widened is rounded to itself
                node.args = (origin,)
        same = source if _value(source).dtype == dtype else seen.get((source, dtype))
        if same is None or node.name in returned:
            seen.setdefault((source, dtype), node)
            continue
        node.replace_all_uses_with(same)
    for node in reversed(_calls(program)):
        if _is_cast(node) and not node.users:
            program.graph.erase_node(node)
    program.graph.lint()
    program.graph_module.recompile()


def fold_constant_casts(program: Any) -> None:
    """Casts parameters and buffers that the graph only casts, each to one 16-bit dtype, now."""
    signature = program.graph_signature
    constants = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    written = set(signature.buffers_to_mutate.values())
    for node in program.graph.nodes:
        name = constants.get(node.name) if node.op == "placeholder" else None
        users = list(node.users)
        if name is None or name in written or name not in program.state_dict or not users:
            continue
        dtypes = {user.kwargs.get("dtype") if _is_cast(user) else None for user in users}
        if len(dtypes) != 1 or not dtypes <= set(_LOWER) or _is_returned(users):
            continue
        (dtype,) = dtypes
        program.state_dict[name] = _constant(program.state_dict[name], dtype)
        node.meta["val"] = node.meta["val"].to(dtype)
        for user in users:
            user.replace_all_uses_with(node)
            program.graph.erase_node(user)
    program.graph_module.recompile()


def _constant(tensor: torch.Tensor, dtype: Any) -> torch.Tensor:
    cast = tensor.detach().to(dtype)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(cast, requires_grad=False) if is_parameter else cast


def _is_returned(nodes: list[Any]) -> bool:
    return any(user.op == "output" for node in nodes for user in node.users)


def _returned(program: Any) -> list[Any]:
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    flat, _ = tree_flatten(output.args)
    return [node for node in flat if isinstance(node, torch.fx.Node)]


def check_types(program: Any, dtype: torch.dtype, policies: dict[str, str]) -> GraphTypes:
    """Holds every node of the graph against the op lists.

    Args:
        program: The decomposed program.
        dtype: The region's dtype.
        policies: Policy by op, as in :func:`fastamp.policies.table`.

    Raises:
        RuntimeError: A node gets what its policy does not give it; the message names all of them.
    """
    checked: Counter[str] = Counter()
    wrong, mixed = [], set()
    for node in _calls(program):
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = str(node.target).removeprefix("aten.").removesuffix(".default")
        dtypes = {_value(n).dtype for n in _operands(node)}
        policy = policies.get(name, "pass")
        if policy == "lower" and dtypes == {torch.float32}:
            policy = "lower (in float32, where regions are off)"
        ok = {
            "lower": dtypes <= {dtype},
            "lower (in float32, where regions are off)": True,
            "lower_dense": len(dtypes) < 2,
            "fp32": dtypes <= {torch.float32},
            "promote": len(dtypes) < 2,
        }.get(policy)
        if policy in ("set_opt_dtype", "append_dtype"):
            ok = _has_output_dtype(node)
        if ok is not None:
            checked[policy] += 1
            if not ok:
                got = ", ".join(sorted(map(_name_of, dtypes)))
                wrong.append(f"{name} ({node.name}, policy {policy}) gets {got}")
        elif len({_value(n).dtype for n in _operands(node) if _value(n).dim() > 0}) > 1:
            mixed.add(name)
    if wrong:
        raise RuntimeError(
            "export: expected a graph in which every op gets what its policy says, got one in "
            "which " + "; ".join(wrong)
        )
    casts = [node for node in _calls(program) if node.target is _TO_COPY]
    constants = {**program.state_dict, **program.constants}
    tensors = {id(t): t.nbytes for t in constants.values() if isinstance(t, torch.Tensor)}
    names = set(program.graph_signature.user_inputs)
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in names]
    return GraphTypes(
        dict(checked),
        tuple(sorted(mixed)),
        len(casts),
        sum(_elements(node) for node in casts),
        sum(tensors.values()),
        tuple(_dtypes(placeholders)),
        tuple(_dtypes(_returned(program))),
    )


def _has_output_dtype(node: torch.fx.Node) -> bool:
    """Whether an op whose output is to be float32 says so, or what else its caller wanted."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((a.name for a in arguments), node.args, strict=False)) | dict(node.kwargs)
    return given.get("dtype") is not None or _value(node).dtype not in _LOWER


def _elements(node: torch.fx.Node) -> int:
    sizes = [s.node.hint if isinstance(s, torch.SymInt) else s for s in _value(node).shape]
    return math.prod(int(size) for size in sizes)


def _dtypes(nodes: list[Any]) -> list[str]:
    return [_name_of(_value(n).dtype) for n in nodes if isinstance(_value(n), torch.Tensor)]


def policies_in_force(device: str) -> dict[str, str]:
    """The policy of each op on this thread, by the names that :func:`check_types` looks up."""
    return {row.op: op_policy(row.op, device) for row in op_table()}
