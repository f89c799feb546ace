# SPDX-License-Identifier: Apache-2.0
"""The state of a gradient scaler as JSON."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from fastamp._scaler.checks import check_extras, is_finite_in_float32

_FORMAT = "fastamp.GradScaler"
_VERSION = 1
_FUNCTION = "from_json"

# What each key is called in a state_dict, and its type; the first five are always there.
_KEYS: dict[str, tuple[str, type]] = {
    "scale": ("scale", float),
    "growth_factor": ("growth_factor", float),
    "backoff_factor": ("backoff_factor", float),
    "growth_interval": ("growth_interval", int),
    "growth_tracker": ("_growth_tracker", int),
    "min_scale": ("min_scale", float),
    "max_scale": ("max_scale", float),
    "hysteresis": ("hysteresis", int),
    "hysteresis_tracker": ("_hysteresis_tracker", int),
    "fast_growth_interval": ("fast_growth_interval", int),
    "fast_growth_limit": ("_fast_growth_limit", float),
}
_REQUIRED = tuple(_KEYS)[:5]
_NAMES = {bool: "a bool", int: "an integer", float: "a number", str: "a string"}


def _refuse(function: str, text: str) -> NoReturn:
    raise ValueError(f"{function}: expected {text}")


def _check_numbers(function: str, numbers: dict[str, Any]) -> None:
    """Refuses what C++'s scaler refuses."""
    for key, accepted, expected in (
        ("scale", is_finite_in_float32, "scale to be finite in float32"),
        ("growth_factor", lambda n: n > 1.0, "growth_factor > 1.0"),
        ("backoff_factor", lambda n: n < 1.0, "backoff_factor < 1.0"),
        ("growth_interval", lambda n: n >= 0, "growth_interval >= 0"),
        ("growth_tracker", lambda n: 0 <= n < 2**31, "0 <= growth_tracker < 2^31"),
        ("hysteresis_tracker", lambda n: 0 <= n < 2**31, "0 <= hysteresis_tracker < 2^31"),
        (
            "fast_growth_limit",
            lambda n: is_finite_in_float32(n) or math.isinf(n),
            "fast_growth_limit to be inf or in float32",
        ),
    ):
        if key in numbers and not accepted(numbers[key]):
            _refuse(function, f"{expected}, got {numbers[key]!r}")
    check_extras(
        function,
        numbers.get("min_scale"),
        numbers.get("max_scale"),
        numbers.get("hysteresis", 1),
        numbers.get("fast_growth_interval"),
    )


def json_of_state(state: dict[str, Any]) -> str:
    """Writes a ``state_dict``, empty for a disabled scaler; the past in it is left out."""
    head = {"format": _FORMAT, "version": _VERSION, "enabled": bool(state)}
    numbers = {key: kind(state[name]) for key, (name, kind) in _KEYS.items() if name in state}
    if state:
        _check_numbers("to_json", numbers)
    if math.isinf(numbers.get("fast_growth_limit", 0.0)):
        numbers["fast_growth_limit"] = None
    return json.dumps(head | numbers)


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            _refuse(_FUNCTION, f'each key once, got "{key}" twice')
        entries[key] = value
    return entries


def _refuse_constant(name: str) -> NoReturn:
    _refuse(_FUNCTION, f"a number, a string, true, false or null, got {name}")


def _parse(text: str) -> dict[str, Any]:
    try:
        entries = json.loads(text, object_pairs_hook=_object_of, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        if str(error).startswith(_FUNCTION):
            raise
        raise ValueError(f"{_FUNCTION}: expected one JSON object, got none: {error}") from error
    if not isinstance(entries, dict):
        _refuse(_FUNCTION, f"one JSON object, got {_name_of(entries)}")
    return entries


def _name_of(value: Any) -> str:
    if value is None or isinstance(value, (list, dict)):
        return {type(None): "null", list: "a list", dict: "an object"}[type(value)]
    return "a number" if type(value) in (int, float) else _NAMES[type(value)]


def _take(entries: dict[str, Any], key: str, kind: type) -> Any:
    """Takes an entry of a type out of those that are left."""
    if key not in entries:
        _refuse(_FUNCTION, f'an object with "{key}", got one without it')
    value = entries.pop(key)
    given = type(value)
    if given is not kind and not (kind is float and given is int):
        got = repr(value) if given is float else _name_of(value)
        _refuse(_FUNCTION, f'"{key}" to be {_NAMES[kind]}, got {got}')
    if kind is int and not -(2**63) <= value < 2**63:
        _refuse(_FUNCTION, f'"{key}" to be an integer of 64 bits, got {value}')
    if kind is float and not (isinstance(value, float) and math.isfinite(value)):
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if math.isinf(value):
            _refuse(_FUNCTION, f'"{key}" in the range of float64, got one beyond it')
    return value


def state_of_json(function: str, text: Any) -> dict[str, Any]:
    """Reads what :func:`json_of_state` wrote.

    Raises:
        TypeError: ``text`` is no string.
        ValueError: It is none that :func:`json_of_state` writes.
    """
    if not isinstance(text, str):
        raise TypeError(f"{function}: expected text to be a str, got {type(text).__name__}")
    entries = _parse(text)
    for key, wanted in (("format", _FORMAT), ("version", _VERSION)):
        value = _take(entries, key, type(wanted))
        if value != wanted:
            _refuse(_FUNCTION, f'"{key}" to be {json.dumps(wanted)}, got {json.dumps(value)}')
    numbers: dict[str, Any] = {}
    if _take(entries, "enabled", bool):
        if entries.get("fast_growth_limit", 0.0) is None:
            numbers["fast_growth_limit"] = math.inf
            del entries["fast_growth_limit"]
        for key, (_, kind) in _KEYS.items():
            if key in _REQUIRED or key in entries:
                numbers[key] = _take(entries, key, kind)
        _check_numbers(_FUNCTION, numbers)
    if entries:
        _refuse(_FUNCTION, f'no other key, got "{next(iter(entries))}"')
    return {_KEYS[key][0]: value for key, value in numbers.items()}
