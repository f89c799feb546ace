# SPDX-License-Identifier: Apache-2.0
"""The one parser of policies: files in TOML, mappings, and FASTAMP_POLICY."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import fastamp._C as _C
from fastamp._policy.positions import POSITIONS
from fastamp._policy.table import op_table, register_op, unregister_op

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

__all__ = [
    "DEVICES",
    "ModuleValue",
    "OpValues",
    "PolicyFile",
    "by_device",
    "is_listed",
    "listed",
    "load",
    "nearest",
    "save",
]

#: Policies by op: for both devices, or by device.
OpValues = Mapping[str, str | Mapping[str, str]]
#: What a module runs under: "fp32", "pass", "positions", a 16-bit dtype, or op policies.
ModuleValue = str | torch.dtype | OpValues

DEVICES = ("cpu", "cuda")
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_MODULE_VALUES = ("fp32", "pass", POSITIONS, *_DTYPES)
_POLICIES = tuple(_C.policy_names())


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; nearest: a, b"``, or an empty text if nothing is near."""
    found = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; nearest: {', '.join(found)}" if found else ""


def by_device(policy: Any) -> Mapping[str, Any]:
    """A policy for both devices, or by device, as one by device."""
    return policy if isinstance(policy, Mapping) else dict.fromkeys(DEVICES, policy)


def _module_value(value: Any) -> str | torch.dtype | dict[str, Any]:
    """Checks what a module is to run under; dtypes may be given by name.

    Raises:
        TypeError: It is no str, dtype or mapping.
        ValueError: It is none of the values that there are. The text begins with "expected".
    """
    if isinstance(value, str):
        if value not in _MODULE_VALUES:
            names = ", ".join(repr(name) for name in _MODULE_VALUES)
            raise ValueError(
                f"expected one of {names}, or op policies, got {value!r}"
                f"{nearest(value, _MODULE_VALUES)}"
            )
        return _DTYPES.get(value, value)
    if isinstance(value, torch.dtype):
        if value not in _DTYPES.values():
            hint = "; for float32 say 'fp32'" if value is torch.float32 else ""
            raise ValueError(f"expected torch.float16 or torch.bfloat16, got {value}{hint}")
        return value
    if isinstance(value, Mapping):
        return _op_values(value)
    raise TypeError(
        f"expected 'fp32', 'pass', 'positions', a dtype or op policies, got {type(value).__name__}"
    )


def _op_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Checks op policies, all but the names of ops, which only the op table knows.

    Raises:
        TypeError: A name or a policy has another type.
        ValueError: A policy or device is unknown. The text begins with "expected".
    """
    checked: dict[str, Any] = {}
    for op, policy in values.items():
        if not isinstance(op, str):
            raise TypeError(f"expected names of ops, got {type(op).__name__}")
        for device, name in by_device(policy).items():
            if device not in DEVICES:
                raise ValueError(
                    f"expected a policy of {op} for cpu or cuda, got one for {device!r}"
                )
            if not isinstance(name, str):
                raise TypeError(f"expected the policy of {op} as a str, got {type(name).__name__}")
            if name not in _POLICIES:
                raise ValueError(
                    f"expected the policy of {op} to be one of {', '.join(_POLICIES)}, got "
                    f"{name!r}{nearest(name, _POLICIES)}"
                )
        checked[op] = dict(policy) if isinstance(policy, Mapping) else policy
    return checked


@dataclasses.dataclass(frozen=True)
class PolicyFile:
    """Policies as a file holds them.

    Attributes:
        ops: Policies by op, for a whole program or model.
        modules: What modules run under, by patterns of their names.
        path: The file, for messages; empty if there is none.
        text: What was read; empty if nothing was.
    """

    ops: dict[str, Any] = dataclasses.field(default_factory=dict)
    modules: dict[str, Any] = dataclasses.field(default_factory=dict)
    path: str = ""
    text: str = dataclasses.field(default="", repr=False, compare=False)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> PolicyFile:
        """Reads a file.

        Raises:
            OSError: It cannot be read.
            ValueError: It is no policy file; the text names the file, the line, and what is near.
        """
        name = os.fspath(path)
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name}: expected UTF-8 text, got other bytes") from error
        try:
            data = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise _syntax_error(name, str(error)) from error
        file = cls(path=name, text=text)
        for section, content in data.items():
            if section not in ("ops", "modules") or not isinstance(content, dict):
                raise file.refusal(
                    (section,),
                    f"expected tables [ops] and [modules], got {section!r}"
                    f"{nearest(section, ('ops', 'modules'))}",
                )
        file.ops.update(file._checked(("ops",), _flat(data.get("ops", {}))))
        for pattern, value in data.get("modules", {}).items():
            if isinstance(value, dict):
                file.modules[pattern] = file._checked(("modules", pattern), _flat(value))
                continue
            try:
                file.modules[pattern] = _module_value(value)
            except (TypeError, ValueError) as error:
                raise file.refusal(("modules", pattern), str(error)) from error
        return file

    @classmethod
    def of(cls, policies: Any, function: str) -> PolicyFile:
        """Reads what a function was given: what modules run under by pattern, a file, or its path.

        Raises:
            TypeError: It is something else.
            OSError: The file cannot be read.
            ValueError: A value is none that there is.
        """
        if isinstance(policies, cls):
            return policies
        if isinstance(policies, (str, os.PathLike)):
            return cls.read(policies)
        if not isinstance(policies, Mapping):
            raise TypeError(
                f"{function}: expected policies to be a mapping or the path of a policy file, got "
                f"{type(policies).__name__}"
            )
        file = cls(path=function)
        for pattern, value in policies.items():
            if not isinstance(pattern, str):
                raise TypeError(
                    f"{function}: expected patterns to be strings, got {type(pattern).__name__}"
                )
            try:
                file.modules[pattern] = _module_value(value)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{function}: for {pattern!r} {error}") from None
        return file

    @classmethod
    def of_variable(cls, text: str) -> PolicyFile:
        """Reads ``FASTAMP_POLICY``: "layer_norm=lower,pow=fp32".

        Raises:
            ValueError: It is something else.
        """
        file = cls(path="FASTAMP_POLICY")
        for op, policy in _C.split_policies(text):
            try:
                file.ops.update(_op_values({op: policy}))
            except ValueError as error:
                raise file.refusal((), str(error)) from None
        return file

    def _checked(self, table: tuple[str, ...], values: dict[str, Any]) -> dict[str, Any]:
        for op, policy in values.items():
            try:
                _op_values({op: policy})
            except (TypeError, ValueError) as error:
                raise self.refusal((*table, op), str(error)) from error
        return values

    def refusal(self, keys: tuple[str, ...], text: str) -> ValueError:
        """The error that says what is wrong with an entry, and in which line it is.

        Args:
            keys: The way to the entry: table, then key.
            text: What was expected and what is there.
        """
        line = self._line_of(keys)
        return ValueError(f"{self.path}{f', line {line}' if line else ''}: {text}")

    def _line_of(self, keys: tuple[str, ...]) -> int:
        """The line in which an entry ends, as the parser sees it; 0 if it is in none."""
        lines = self.text.splitlines(keepends=True)
        for count in range(1, len(lines) + 1):
            try:
                data: Any = tomllib.loads("".join(lines[:count]))
            except (tomllib.TOMLDecodeError, RecursionError):
                continue  # in the middle of an entry of several lines
            for depth, key in enumerate(keys):
                if depth == (1 if keys[0] == "ops" else 2):
                    data = _flat(data)
                if not isinstance(data, dict) or key not in data:
                    break
                data = data[key]
            else:
                return count
        return 0

    def write(self, path: str | os.PathLike[str], comment: str = "") -> None:
        """Writes the file, so that :meth:`read` gives the same policies.

        Args:
            path: Where to.
            comment: Lines for people, written above the policies.

        Raises:
            OSError: It cannot be written.
        """
        Path(path).write_text(self.toml(comment), encoding="utf-8")

    def toml(self, comment: str = "") -> str:
        """Returns what :meth:`write` writes."""
        lines = [f"# {line}".rstrip() for line in comment.splitlines()]
        for title, entries in (("ops", self.ops), ("modules", self.modules)):
            if entries:
                lines += ["", f"[{title}]"] if lines else [f"[{title}]"]
                lines += [f"{_key(name)} = {_toml(value)}" for name, value in entries.items()]
        return "\n".join(lines) + "\n"


def load(path: str | os.PathLike[str]) -> PolicyFile:
    """Reads a policy file, for :func:`fastamp.policies.for_modules`. See docs/policies.md.

    Args:
        path: The file, in TOML.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no policy file; the text names the file, the line, and what is near.
    """
    return PolicyFile.read(path)


def save(policies: PolicyFile | Mapping[str, ModuleValue], path: str | os.PathLike[str]) -> None:
    """Writes a policy file, so that :func:`load` gives the same policies.

    Args:
        policies: What was loaded or found, such as by :func:`fastamp.debug.bisect`; or what
            modules run under, by pattern, as for :func:`fastamp.policies.for_modules`.
        path: Where to.

    Raises:
        TypeError: ``policies`` is something else.
        ValueError: A value is none that there is.
        OSError: The file cannot be written.
    """
    if not isinstance(policies, (PolicyFile, Mapping)):
        raise TypeError(
            f"policies.save: expected policies to be a PolicyFile or a mapping, got "
            f"{type(policies).__name__}"
        )
    PolicyFile.of(policies, "policies.save").write(path)


def _syntax_error(path: str, text: str) -> ValueError:
    # "Expected '=' after a key in a key/value pair (at line 2, column 5)"
    found = re.fullmatch(r"(.*) \(at (line \d+).*\)", text, re.DOTALL)
    where, what = (f", {found[2]}", found[1]) if found else ("", text)
    return ValueError(f"{path}{where}: expected TOML, got what is none: {what}")


def _flat(table: Any) -> Any:
    """Names of overloads that were written without quotes, which TOML takes for tables."""
    if not isinstance(table, dict):
        return table
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and not value.keys() & set(DEVICES):
            flat.update({f"{key}.{below}": deeper for below, deeper in _flat(value).items()})
        else:
            flat[key] = value
    return flat


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)


def _quoted(text: str) -> str:
    # JSON's escapes are TOML's, but for characters past 16 bits and DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml(value: Any) -> str:
    if isinstance(value, torch.dtype):
        value = str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(k)} = {_toml(v)}' for k, v in value.items())} }}"
    return _quoted(value)


def is_listed(op: str) -> bool:
    """Whether the op table has lines for a name, as :func:`fastamp.policies.get` reads names."""
    name = op.removeprefix("aten::")
    base, _, overload = name.partition(".")
    rows = [row.op for row in op_table()]
    if overload in ("", "*"):
        return any(row.partition(".")[0] == base for row in rows)
    return (base if overload == "default" else name) in rows


def _is_torchs(op: str) -> bool:
    """Whether torch has an op of this name, as pages of :func:`fastamp.debug.inspect` show it."""
    return hasattr(torch.ops.aten, op.partition(".")[0])


def _entries(file: PolicyFile) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Returns all op policies of a file: where they stand, op, policy."""
    for op, policy in file.ops.items():
        yield ("ops", op), op, policy
    for pattern, value in file.modules.items():
        if isinstance(value, Mapping):
            for op, policy in value.items():
                yield ("modules", pattern, op), op, policy


@contextlib.contextmanager
def listed(file: PolicyFile) -> Iterator[None]:
    """Checks the ops of a file, those that are not in the op table registered as ``pass``.

    If this or the block raises, they are taken out again.

    Raises:
        ValueError: An op is unknown or cannot carry its policy; the text says where it stands.
    """
    registered: list[str] = []
    try:
        for where, op, policy in _entries(file):
            try:
                if not is_listed(op) and ("::" in op or _is_torchs(op)):
                    name = op.removesuffix(".default").removesuffix(".*")
                    name = name if "::" in op else f"aten::{name}"
                    register_op(name, "pass")
                    registered.append(name)
                for device, chosen in by_device(policy).items():
                    _C.checked_op_policies([(device, [(op, chosen)])])
            except ValueError as error:
                # Without the name of the function that a reader of the file has not called.
                raise file.refusal(where, str(error).partition(": ")[2]) from error
        yield
    except BaseException:
        for name in reversed(registered):
            unregister_op(name)
        raise
