# SPDX-License-Identifier: Apache-2.0
"""Finds the modules of a model that patterns name."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from fastamp._policy.positions import POSITIONS, computes_positions

__all__ = ["Named", "ancestors", "applying", "is_meant", "named_modules"]

#: Parts of names that torch's wrappers add, each the name of the wrapper's one child.
_WRAPPER_PARTS = frozenset(
    ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
)


def _is_wrapper(module: torch.nn.Module) -> bool:
    children = [name for name, _ in module._modules.items()]  # TorchScript has no keys
    return (
        len(children) == 1
        and children[0] in _WRAPPER_PARTS
        and (type(module).__module__.startswith("torch.") or children[0] != "module")
    )


class Named(NamedTuple):
    """A module and its names."""

    name: str  #: as model.named_modules() has it
    bare: str  #: the same without what wrappers add
    module: torch.nn.Module

    def has_name_like(self, pattern: str) -> bool:
        """Whether one of the names fits a pattern."""
        return fnmatchcase(self.bare, pattern) or fnmatchcase(self.name, pattern)


def named_modules(model: torch.nn.Module) -> list[Named]:
    """The modules of a model that have code of their own, under each of their names.

    Wrappers are left out: the module inside has their name.
    """
    found: list[Named] = []

    def look(module: torch.nn.Module, name: str, bare: str, above: tuple[int, ...]) -> None:
        if id(module) in above:
            return
        is_wrapper = _is_wrapper(module)
        if not is_wrapper:
            found.append(Named(name, bare, module))
        for key, child in module._modules.items():
            if child is not None:
                below = f"{name}.{key}" if name else key
                bare_below = bare if is_wrapper else f"{bare}.{key}" if bare else key
                look(child, below, bare_below, (*above, id(module)))

    look(model, "", "", ())
    return found


def ancestors(bare: str) -> list[str]:
    """Names of the modules around one, outermost first."""
    if not bare:
        return []
    parts = bare.split(".")
    return ["", *(".".join(parts[:count]) for count in range(1, len(parts)))]


def is_meant(module: Named, pattern: str, value: Any) -> bool:
    """Whether a pattern with this value names a module: one for positions only those with some."""
    return module.has_name_like(pattern) and (
        value != POSITIONS or computes_positions(module.module)
    )


def applying(policies: Mapping[str, Any], modules: list[Named]) -> list[tuple[Named, list[str]]]:
    """Returns the patterns that each module is to be put under, in their order.

    Those that name it, but for one that names a module around it and was replaced by another
    pattern in between: in ``{"*": ..., "block": ...}`` the second holds in all of ``block``.
    """
    patterns = list(policies)
    matched = {
        each.bare: [n for n, p in enumerate(patterns) if is_meant(each, p, policies[p])]
        for each in modules
    }
    result = []
    for each in modules:
        around = [matched.get(name, []) for name in ancestors(each.bare)]
        chosen = [n for n in matched[each.bare] if not _was_replaced(n, around)]
        if chosen:
            result.append((each, [patterns[number] for number in chosen]))
    return result


def _was_replaced(number: int, around: list[list[int]]) -> bool:
    begins: dict[int, int] = {}
    for depth, matched in enumerate(around):
        for other in matched:
            begins.setdefault(other, depth)
    if number not in begins:
        return False
    mine = (begins[number], number)
    return any((depth, other) > mine for other, depth in begins.items())
