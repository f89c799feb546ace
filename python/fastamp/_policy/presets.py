# SPDX-License-Identifier: Apache-2.0
"""Op policies of all ops at once: presets, and those of one device on another."""

from __future__ import annotations

from collections.abc import Iterable

import fastamp._C as _C
from fastamp._policy.table import OpTableRow, change_op_policies, op_table, table_changed
from fastamp._util.held import Held

__all__ = ["Preset", "copy_from", "preset", "preset_policies"]


_EVERY_OP = "*"  #: Stands for every op without a policy.


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
        raise TypeError(f"policies.preset: expected name to be a str, got {type(name).__name__}")
    policies: dict[str, dict[str, str]] = {}
    for op, policy, of_device in _C.op_policy_preset(name, device):
        policies.setdefault(of_device, {})[op] = policy
    return policies


class Preset(Held):
    """Result of :func:`preset`: takes the preset back, also as a context manager."""

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
        every = {row.op: row for row in before}.get(_EVERY_OP)
        for device in self._devices:
            _C.set_op_policy(_EVERY_OP, getattr(every, device, "pass"), device)
        before = [row for row in before if row.op != _EVERY_OP]
        known = {row.op for row in before}
        now = {row.op for row in op_table()} - {_EVERY_OP}
        for op in now - known:
            if "::" not in op:
                _C.unregister_op(_exact(op))
        for row in before:
            for device in self._devices if row.op in now else ():
                _C.set_op_policy(_exact(row.op), getattr(row, device), device)
        table_changed()

    def __repr__(self) -> str:
        """Names the preset."""
        return f"<preset {self.name!r}{'' if self._before else ', released'}>"


def preset(name: str, device: str | None = None) -> Preset:
    """Gives all ops of torch the policies of a preset, for the whole process.

    ::

        fastamp.policies.preset("OD")  # from now on
        with fastamp.policies.preset("wide"):  # or for a while
            train()

    For one thread and one block there is ``fastamp.policies.override("OD")``.

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
            - ``"supported"``: as torch, but products with a sparse tensor and FFTs, for which
              devices lack 16-bit kernels, run in float32 on both devices.
            - ``"unify"``: as torch; but a call that it refuses because its arguments are of several
              of float16, bfloat16 and float32 is repeated with all of them in one dtype: that of
              the tensor it writes, or the region's, or float32.
        device: ``"cpu"``, ``"cuda"``, or both by default.

    Returns:
        Brings back what was before by ``release()``, or at the end of a ``with`` block.

    Raises:
        TypeError: ``name`` is no string.
        ValueError: Unknown preset or device. Nothing is changed then.

    Note:
        As :func:`fastamp.policies.set`: do it while no other thread runs ops under autocast;
        compiled graphs are dropped. All but ``"torch"`` and ``"cuda"`` register ops that are not in
        the op table (``"OD"`` about 165, of 256 that a process can register), which makes each of
        their calls in a region slower. ``"unify"`` registers kernels for all ops with two tensor
        arguments, also those that other libraries define before the next region is entered.
    """
    before = op_table()
    policies = preset_policies(name, device)
    for each, of_device in policies.items():
        for op, policy in of_device.items():
            _C.set_op_policy(op, policy, each)
    table_changed()
    return Preset(name, before, policies)


class copy_from(Held):  # noqa: N801 (used like torch.set_grad_enabled)
    """Gives the ops of one device the policies of another, at once and for the whole process.

    For good, for the length of a ``with`` block, or until :meth:`release`::

        fastamp.policies.copy_from("cuda", device="cpu")
        with fastamp.policies.copy_from("cuda", device="cpu"), torch.autocast("cpu", torch.float16):
            y = model(x)  # in the precisions that CUDA would choose for each op

    torch's lists for CUDA keep more ops in float32 than those for the CPU: norms, softmax, sums,
    powers. With them a CPU shows which dtypes a GPU computes in, though not its kernels' rounding,
    and exports what was trained there. The end of the block gives back the policies that were
    changed, but not those that were changed again meanwhile. Compiled graphs are dropped both
    times. Do it while no other thread runs ops under autocast. For one thread alone, name the ops
    in :class:`fastamp.policies.override`.

    Args:
        source: The device whose policies are copied, as they are in force here: ``"cuda"`` or
            ``"cpu"``.
        device: The device that gets them, likewise.

    Raises:
        ValueError: Another device. Nothing is changed then.
    """

    def __init__(self, source: str, *, device: str) -> None:
        """Puts the policies in force."""
        self._device = device
        self._edits = _C.policy_preset(source, device)
        rows = {row.op: row for row in op_table()}
        self._before = [(op, getattr(rows[op], device)) for op, _ in self._edits]
        change_op_policies(self._edits, device)

    def release(self) -> None:
        """Gives back the policies that were in force before. Safe to call again."""
        now = {row.op: getattr(row, self._device) for row in op_table()}
        edits, self._edits = dict(self._edits), []
        back = [(op, policy) for op, policy in self._before if now.get(op) == edits.get(op)]
        self._before = []
        change_op_policies(back, self._device)
