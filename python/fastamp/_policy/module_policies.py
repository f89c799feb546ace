# SPDX-License-Identifier: Apache-2.0
"""Policies of modules, by their names in a model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fastamp._policy.module_names import Named, ancestors, applying, is_meant, named_modules
from fastamp._policy.module_placement import ModulePolicy, put_under, take_from
from fastamp._policy.policy_file import ModuleValue, PolicyFile, by_device, listed, nearest
from fastamp._policy.positions import POSITIONS, policies_of_positions, rounded_frequencies
from fastamp._util.held import Held

__all__ = ["ModulePolicies", "chosen_policies", "for_modules"]

_LOW = (torch.float16, torch.bfloat16)


class ModulePolicies(Held):
    """Result of :func:`for_modules`: ends the policies, also as a context manager.

    Attributes:
        names: Names of the modules that each pattern was found to name.
    """

    def __init__(
        self, names: dict[str, list[str]], placed: list[tuple[torch.nn.Module, ModulePolicy]]
    ) -> None:
        """Keeps what is to be undone."""
        self.names = names
        self._placed = placed

    def release(self) -> None:
        """Ends the policies, in copies of the modules, too. Does nothing the second time.

        Compiled graphs are dropped. Do it while no other thread calls the model.
        """
        placed, self._placed = self._placed, []
        take_from(placed)

    def __repr__(self) -> str:
        """Returns how many modules each pattern names."""
        if not self._placed:
            return "<module policies, released>"
        counts = ", ".join(f"{name!r}: {len(found)}" for name, found in self.names.items())
        return f"<module policies {{{counts}}}>"


def for_modules(
    model: torch.nn.Module,
    policies: Mapping[str, ModuleValue] | PolicyFile | str | os.PathLike[str],
) -> ModulePolicies:
    """Runs modules of a model under policies of their own; the model's code does not change.

    ::

        policies = fastamp.policies.for_modules(
            model, {"*.norm*": "fp32", "head": {"linear": "fp32"}, "vision": torch.float16}
        )

    A policy holds for all that the call of a module runs, submodules and recomputation by
    ``torch.utils.checkpoint`` included, in all threads, until a module further in that another
    pattern names. Of patterns that name the same module, later ones win; op policies add up.
    Patterns are those of ``fnmatch``, in which ``*`` stands for dots, too; names are those of
    ``model.named_modules()``, with or without the parts that torch's wrappers add. ``"*"`` and
    ``""`` name the model itself as well. Only calls of a module count: what reads its parameters,
    as MultiheadAttention does those of ``out_proj``, does not.

    ``torch.compile`` compiles regions into its graphs, and runs modules with op policies eagerly
    (``fullgraph=True`` refuses them). ``torch.jit.script`` refuses the modules. Their class is a
    subclass with the name of their own; copies and pickles stay under the policies, so release
    them before you pickle modules for a program without fastamp. State dicts do not change.

    Args:
        model: The model.
        policies: What modules run under, by pattern; or a policy file, whose ``[ops]`` hold in the
            whole model (docs/policies.md).

            - ``"fp32"``: where autocast is on, it is off in the module, and 16-bit floating tensors
              among the arguments are cast to float32, in lists, tuples and dicts, too. The
              parameters have to be float32.
            - ``"pass"``: autocast is off; nothing is cast.
            - ``torch.float16``, ``torch.bfloat16``, or their names: where autocast is on, it has
              this dtype. Refused for parts of a module in which it is off.
            - ``"positions"``: of the modules that the pattern names, those that compute positions
              (rotary and sinusoidal embeddings, found by their code: it names ``sin`` and ``cos``,
              or ``polar``, and they have no weights of products) run products in float32.
            - A mapping: op policies, as for :class:`fastamp.policies.override`, by device if the
              value is a mapping. Ops such as ``"aten::gelu"`` that are not in the op table are
              registered as ``pass``.

    Returns:
        Ends the policies by ``release()`` or at the end of a ``with`` block.

    Raises:
        TypeError: ``model`` is no module, or a value has another type.
        ValueError: A pattern names no module (the nearest names are given) or one of TorchScript;
            a value, op or policy is unknown or does not fit the module. Nothing is changed then.
        OSError: The policy file cannot be read.

    Warns:
        UserWarning: Frequencies of a module under ``"positions"`` have 16 bits already.

    Note:
        Do it while no other thread calls the model.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"policies.for_modules: expected model to be a module, got {type(model).__name__}"
        )
    file = PolicyFile.of(policies, "policies.for_modules")
    modules = named_modules(model)
    names = {
        pattern: [each.bare for each in modules if is_meant(each, pattern, value)]
        for pattern, value in file.modules.items()
    }
    for pattern, found in names.items():
        if not found:
            raise file.refusal(("modules", pattern), _names_nothing(file, pattern, modules))
    with listed(file):
        placed = chosen_policies(file, modules)
    put_under(placed)
    return ModulePolicies(names, placed)


def chosen_policies(
    file: PolicyFile, modules: list[Named]
) -> list[tuple[torch.nn.Module, ModulePolicy]]:
    """Modules that a file puts under policies.

    Args:
        file: The policies. Patterns may name no module.
        modules: All modules of a model, the model itself first.

    Raises:
        ValueError: A module is one of TorchScript, or has 16-bit parameters and is to run in fp32.
    """
    patterns: dict[int, list[str]] = {}
    by_id = {id(each.module): each.module for each in modules}
    for each, found in applying(file.modules, modules):
        if any(file.modules[pattern] == POSITIONS for pattern in found):
            _warn_of_rounded(each)
        known = patterns.setdefault(id(each.module), [])
        known += [pattern for pattern in found if pattern not in known]
    _check_nesting(file, modules)
    made: dict[tuple[str, ...], ModulePolicy] = {}
    placed = []
    if file.ops and modules:
        placed.append((modules[0].module, ModulePolicy(None, file.ops)))
    for key, found in patterns.items():
        combination = tuple(sorted(found, key=list(file.modules).index))
        _check_fits(file, by_id[key], combination)
        if combination not in made:
            made[combination] = _combined([file.modules[pattern] for pattern in combination])
        placed.append((by_id[key], made[combination]))
    return placed


def _names_nothing(file: PolicyFile, pattern: str, modules: list[Named]) -> str:
    """Says what is wrong with a pattern that no module is meant by."""
    model = type(modules[0].module).__name__ if modules else "the model"
    if file.modules[pattern] == POSITIONS and any(m.has_name_like(pattern) for m in modules):
        return (
            f"expected modules that compute positions, got {pattern!r}, which names none of "
            f"{model}: no module without weights of products has code with sin and cos, or polar; "
            "for a function there is fastamp.policies.fp32"
        )
    near = nearest(pattern, [each.bare for each in modules])
    return (
        f"expected patterns of names of modules, got {pattern!r}, which no module of {model} has"
        f"{near}"
    )


def _warn_of_rounded(module: Named) -> None:
    for name in rounded_frequencies(module.module):
        dtype = module.module.get_buffer(name).dtype
        warnings.warn(
            "policies.for_modules: expected float32 frequencies in "
            f"{module.bare or 'the model'!r}, got {name} of {dtype}: what that has rounded stays "
            "so. Keep the model in float32, or make the buffer anew in float32.",
            stacklevel=4,
        )


def _combined(values: list[Any]) -> ModulePolicy:
    region = None
    ops: dict[str, Any] = {}
    for given in values:
        value = policies_of_positions() if given == POSITIONS else given
        if isinstance(value, Mapping):
            for op, policy in value.items():
                # Last in the order, as it was given.
                ops[op] = {**ops.pop(op, {}), **by_device(policy)}
        else:
            region = value
    return ModulePolicy(region, ops)


def _region_of(file: PolicyFile, patterns: Iterable[str]) -> tuple[str, Any]:
    """The last pattern that says something of the region, and what; empty if none does."""
    values = file.modules
    regions = [p for p in patterns if not isinstance(values[p], Mapping) and values[p] != POSITIONS]
    return (regions[-1], file.modules[regions[-1]]) if regions else ("", None)


def _check_nesting(file: PolicyFile, modules: list[Named]) -> None:
    """Refuses a dtype inside of a module without autocast: there is no region to have it."""
    regions = {
        each.bare: _region_of(file, found) for each, found in applying(file.modules, modules)
    }
    for name, (pattern, value) in regions.items():
        around = {other: regions[other] for other in ancestors(name) if other in regions}
        off = next((other for other, (_, v) in around.items() if v in ("fp32", "pass")), None)
        if isinstance(value, torch.dtype) and off is not None:
            raise file.refusal(
                ("modules", pattern),
                f"expected autocast to be on around a module with a dtype of its own, got "
                f"{pattern!r} for {name!r}, a part of {off or 'the model'!r}, in which "
                f"{around[off][0]!r} switches it off; put the other parts of that under "
                f"{around[off][1]!r} instead",
            )


def _check_fits(file: PolicyFile, module: torch.nn.Module, patterns: tuple[str, ...]) -> None:
    where = ("modules", patterns[-1])
    if isinstance(module, torch.jit.ScriptModule):
        raise file.refusal(
            where,
            f"expected modules that Python runs, got for {patterns[-1]!r} one of TorchScript; "
            "compile the model after release()",
        )
    pattern, value = _region_of(file, patterns)
    for name, parameter in module.named_parameters() if value == "fp32" else ():
        if parameter.dtype in _LOW:
            raise file.refusal(
                ("modules", pattern),
                f"expected float32 parameters in modules under 'fp32', got for {pattern!r} "
                f"{name} of {parameter.dtype}",
            )
