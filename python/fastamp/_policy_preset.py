# SPDX-License-Identifier: Apache-2.0
"""The op policies of one device on another."""

from __future__ import annotations

import fastamp._C as _C
from fastamp._held import Held
from fastamp._policy import change_op_policies, op_table

__all__ = ["policy_preset"]


class policy_preset(Held):  # noqa: N801 (used like torch.set_grad_enabled)
    """Gives the ops of one device the policies of another, at once and for the whole process.

    For good, for the length of a ``with`` block, or until :meth:`release`::

        fastamp.policy_preset("cuda", device="cpu")
        with fastamp.policy_preset("cuda", device="cpu"), fastamp.autocast("cpu", torch.float16):
            y = model(x)  # in the precisions that CUDA would choose for each op

    torch's lists for CUDA keep more ops in float32 than those for the CPU: norms, softmax, sums,
    powers. With them a CPU shows which dtypes a GPU computes in, though not its kernels' rounding,
    and exports what was trained there. The end of the block gives back the policies that were
    changed, but not those that were changed again meanwhile. Compiled graphs are dropped both
    times. Do it while no other thread runs ops under autocast. For one thread alone, name the ops
    in :class:`fastamp.op_policies`.

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
