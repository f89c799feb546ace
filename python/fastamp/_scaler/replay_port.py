# SPDX-License-Identifier: Apache-2.0
"""What a gradient scaler offers to code that captures whole iterations in a CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    import fastamp._C as _C


@dataclass(frozen=True)
class ReplayPort:
    """Functions of one scaler, given out by its ``replay_port()``; :class:`GraphedStep` uses them.

    Attributes:
        constants: What a captured step takes from the scaler for good: values of its options, and
            identities of its tensors. A capture stands as long as they are equal.
        prepare: Makes, on a device, all that a captured step must find, and 1 / scale right, which
            it reads. Before the capture, since what is made in it would be made anew by each
            replay; and before each replay, since the scale may have been set.
        end_capture: What the ``update`` that was just captured will leave at each replay.
        note_replay: Counts the edits that a replay made, and starts reading back its outcome.
        lend_counters: Makes another scaler count inf and NaN where this one does, so that this
            one finds the counters made.
        unscale_once: Unscales the gradients of an optimizer unless that was done.
    """

    constants: Callable[[], Any]
    prepare: Callable[[torch.device], None]
    end_capture: Callable[[], _C.CapturedOutcomes]
    note_replay: Callable[[_C.CapturedOutcomes], None]
    lend_counters: Callable[[Any], None]
    unscale_once: Callable[[torch.optim.Optimizer], None]
