# SPDX-License-Identifier: Apache-2.0
"""Policies of a whole program that is not changed: from the environment and from policy files."""

from __future__ import annotations

import dataclasses
import os
import threading
import warnings
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from fastamp._install.installation import in_spawned_processes
from fastamp._policy.module_names import Named, is_meant, named_modules
from fastamp._policy.module_placement import put_under, take_from
from fastamp._policy.module_policies import chosen_policies
from fastamp._policy.policy_file import PolicyFile, listed, nearest
from fastamp._policy.table import set_op_policy
from fastamp._util.at_exit import AtExit
from fastamp._util.model_parts import ModelParts
from fastamp._util.patches import Patches

__all__ = ["start", "start_from_environment"]


_running: list[ExitStack] = []


def start(path: str | os.PathLike[str]) -> ExitStack:
    """Puts the program under a policy file from now on, and processes that it spawns.

    Its op policies are those of the process, as :func:`fastamp.policies.set` sets them; its
    patterns are matched with the names that modules have in the program's models, when they are
    called first.

    Returns:
        Ends the policies of modules when it is closed.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no policy file, or names ops that there are not. Nothing is changed then.

    Warns:
        UserWarning: At exit, if a pattern was of no module of the program.
    """
    file = PolicyFile.read(path)
    running = ExitStack()
    _set_ops(file)
    if file.modules:
        running.callback(_ProgramModules(file).close)
    running.enter_context(in_spawned_processes(start, str(Path(path).absolute())))
    _running.append(running)  # whose end, if nobody held it, would end what it holds
    return running


def start_from_environment() -> None:
    """Puts the process under ``FASTAMP_POLICY_FILE``, then under ``FASTAMP_POLICY``.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file or the variable says what does not exist.
    """
    path = os.environ.get("FASTAMP_POLICY_FILE", "")
    if path:
        try:
            file = PolicyFile.read(path)  # children have the variable, too
        except OSError as error:
            error.strerror = f"FASTAMP_POLICY_FILE: {error.strerror}"
            raise
        _set_ops(file)
        if file.modules:
            _ProgramModules(file)
    text = os.environ.get("FASTAMP_POLICY", "")
    if text:
        _set_ops(PolicyFile.of_variable(text))


def _set_ops(file: PolicyFile) -> None:
    with listed(file):
        for op, policy in file.ops.items():
            if isinstance(policy, Mapping):
                for device, chosen in policy.items():
                    set_op_policy(op, chosen, device)
            else:
                set_op_policy(op, policy)


class _ProgramModules:
    """Puts modules of the program under policies when they are called first.

    A replaced ``torch.nn.Module.__call__``, and no hook: the outermost module itself has to be
    under its policies in its first call.
    """

    def __init__(self, file: PolicyFile) -> None:
        self._file = dataclasses.replace(file, ops={})
        self._unmatched = set(file.modules)
        self._known_names: set[str] = set()
        self._lock = threading.RLock()
        self._models = ModelParts()
        self._seen: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._placed: list[Any] = []
        self._patches = Patches()
        self._patches.replace(torch.nn.Module, "__call__", self._calling(torch.nn.Module.__call__))
        self._report = AtExit(self._warn)

    def close(self) -> None:
        """Ends the policies."""
        self._report.cancel()
        self._models.close()
        if not self._patches.overwritten():
            self._patches.undo()
        take_from(self._placed)
        self._file = PolicyFile()

    def _calling(self, torch_call: Any) -> Any:
        def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if torch.compiler.is_compiling() or self._has_seen(module):
                return torch_call(module, *args, **kwargs)
            self._look_at(module)
            return type(module).__call__(module, *args, **kwargs)  # its class may be another now

        return __call__

    def _has_seen(self, module: torch.nn.Module) -> bool:
        reference = self._seen.get(id(module))
        return reference is not None and reference() is module

    def _look_at(self, module: torch.nn.Module) -> None:
        with self._lock:
            new: list[Any] = []
            for top in self._models.outermost(module):
                new += self._policies_of(named_modules(top))
            if not self._has_seen(module):  # a wrapper, or replaced: no part of its parents
                new += self._policies_of(named_modules(module))
                self._seen[id(module)] = weakref.ref(module)
            put_under(new)
            self._placed += new

    def _policies_of(self, modules: list[Named]) -> list[Any]:
        self._known_names.update(each.bare for each in modules)
        for pattern in list(self._unmatched):
            if any(is_meant(each, pattern, self._file.modules[pattern]) for each in modules):
                self._unmatched.discard(pattern)
        unseen = {id(each.module) for each in modules if not self._has_seen(each.module)}
        placed = [
            (module, policy)
            for module, policy in chosen_policies(self._file, modules)
            if id(module) in unseen
        ]
        self._seen.update({id(each.module): weakref.ref(each.module) for each in modules})
        return placed

    def _warn(self) -> None:
        if self._unmatched and self._known_names:
            patterns = ", ".join(
                f"{pattern!r}{nearest(pattern, self._known_names)}"
                for pattern in self._file.modules
                if pattern in self._unmatched
            )
            warnings.warn(
                f"{self._file.path}: expected patterns of names of the program's modules, got "
                f"{patterns}, which no module has. See docs/policies.md.",
                stacklevel=2,
            )
