# SPDX-License-Identifier: Apache-2.0
"""Op policies of all of torch's ops: the presets."""

from __future__ import annotations

from collections.abc import Iterable

import fastamp._C as _C
from fastamp import _compile
from fastamp._held import Held
from fastamp._policy import OpTableRow, op_table, table_hash

__all__ = ["Preset", "preset", "preset_policies"]


def _exact(op: str) -> str:
    """A name that stands for one overload."""
    return op if "." in op else f"{op}.default"


def preset_policies(name: str, device: str | None) -> dict[str, dict[str, str]]:
    """The policies of a preset by device and op; registers ops that it needs as ``pass``.

    Raises:
        TypeError: The name is no string.
        ValueError: Unknown preset or device. Nothing is changed then.
    """
    if not isinstance(name, str):
        raise TypeError(f"preset: expected name to be a str, got {type(name).__name__}")
    policies: dict[str, dict[str, str]] = {}
    for op, policy, of_device in _C.op_policy_preset(name, device):
        policies.setdefault(of_device, {})[op] = policy
    return policies


class Preset(Held):
    """What :func:`preset` returns: takes the preset back, also as a context manager."""

    def __init__(self, name: str, before: list[OpTableRow], devices: Iterable[str]) -> None:
        """Keeps what was before."""
        self.name = name
        self._before = before
        self._devices = tuple(devices)

    def release(self) -> None:
        """Brings back the policies that the process had before. Does nothing the second time.

        Ops that the preset registered leave the op table; edits made since are lost. Compiled
        graphs are dropped.
        """
        before, self._before = self._before, []
        if not before:
            return
        known = {row.op for row in before}
        now = {row.op for row in op_table()}
        for op in now - known:
            if "::" not in op:
                _C.unregister_op(_exact(op))
        for row in before:
            for device in self._devices if row.op in now else ():
                _C.set_op_policy(_exact(row.op), getattr(row, device), device)
        _compile.policies_changed(table_hash())

    def __repr__(self) -> str:
        """Names the preset."""
        return f"<preset {self.name!r}{'' if self._before else ', released'}>"


def preset(name: str, device: str | None = None) -> Preset:
    """Gives all ops of torch the policies of a preset, for the whole process.

    ::

        fastamp.preset("OD")  # from now on
        with fastamp.preset("wide"):  # or for a while
            train()

    For one thread and one block there is ``fastamp.op_policies("OD")``.

    Args:
        name: What ops do in autocast regions.

            - ``"torch"``: what the running torch does, which is the default.
            - ``"cuda"``: what it does on CUDA, on the CPU as well.
            - ``"OD"``: only the ops that torch lowers on one of the devices are in low precision;
              every other op of torch that rounds casts 16-bit arguments to float32. Ops that only
              move, compare or select values, which are exact in any dtype, and those that write an
              argument, such as ``add_``, stay as they are.
            - ``"wide"``: variances, norms, softmax and losses run in float32 on both devices; all
              else as torch.
        device: ``"cpu"``, ``"cuda"``, or both by default.

    Returns:
        Brings back what was before by ``release()``, or at the end of a ``with`` block.

    Raises:
        TypeError: ``name`` is no string.
        ValueError: Unknown preset or device. Nothing is changed then.

    Note:
        As :func:`fastamp.set_op_policy`: do it while no other thread runs ops under autocast;
        compiled graphs are dropped. ``"OD"`` and ``"wide"`` register ops that are not in the op
        table (of 256 that a process can register, about 165), which makes each of their calls in a
        region slower.
    """
    before = op_table()
    policies = preset_policies(name, device)
    for each, of_device in policies.items():
        for op, policy in of_device.items():
            _C.set_op_policy(op, policy, each)
    _compile.policies_changed(table_hash())
    return Preset(name, before, policies)
