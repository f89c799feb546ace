# SPDX-License-Identifier: Apache-2.0
"""The one collective of scaler and norms: an all-reduce whose failure says what was waited for."""

from __future__ import annotations

from typing import Any

import torch


def all_reduce(tensor: torch.Tensor, largest: bool, group: Any, purpose: str) -> None:
    """Replaces a tensor by its maximum or sum over a group, which all members have to reach.

    Args:
        tensor: Of any shape, the same on all ranks; written.
        largest: MAX; else SUM.
        group: A process group.
        purpose: For messages, such as "agree on an overflow".

    Raises:
        RuntimeError: A member did not come, because its program has ended or went another way. On
            CPUs; NCCL's watchdog ends the process instead.
    """
    operation = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
    try:
        torch.distributed.all_reduce(tensor, operation, group=group)
    except RuntimeError as error:
        count = torch.distributed.get_world_size(group)
        raise RuntimeError(
            f"expected all {count} ranks of a group to come and {purpose}, got "
            f"an error or the group's timeout: {error}"
        ) from error
