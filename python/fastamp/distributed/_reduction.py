# SPDX-License-Identifier: Apache-2.0
"""The mean of a DDP bucket over a group, and the hook that takes it of 16-bit buckets in fp32."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with classes.
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.futures import Future

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket, ProcessGroup
else:  # A torch without distributed has neither, and no DDP to call a hook.
    GradBucket = getattr(torch.distributed, "GradBucket", None)
    ProcessGroup = getattr(torch.distributed, "ProcessGroup", None)

__all__ = [
    "GradBucket",
    "ProcessGroup",
    "dense_buffer",
    "fp32_reduce_hook",
    "group_of",
    "start_mean",
]


def group_of(function: str, state: Any) -> ProcessGroup:
    """Returns the group that a hook was registered with.

    Raises:
        TypeError: ``state`` is neither ``None`` nor a process group.
        ValueError: It is a group without this process.
    """
    distributed = torch.distributed
    if state is None:
        world = distributed.group.WORLD
        if world is None:
            raise ValueError(f"{function}: expected a process group to be initialized, got none")
        return world
    if state == distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{function}: expected a group that this process is a member of, got one without it"
        )
    if not isinstance(state, ProcessGroup):
        raise TypeError(
            f"{function}: expected state to be a ProcessGroup or None, got {type(state).__name__}"
        )
    return state


def dense_buffer(function: str, bucket: Any) -> Tensor:
    """Returns the gradients of a bucket, one after another.

    Raises:
        TypeError: It is not a bucket, because the function was called by somebody else than DDP.
        NotImplementedError: The gradients are sparse.
    """
    if not isinstance(bucket, GradBucket):
        raise TypeError(
            f"{function}: expected bucket to be a GradBucket, got {type(bucket).__name__}; "
            "DistributedDataParallel.register_comm_hook makes DDP call the hook"
        )
    buffer: Tensor = bucket.buffer()
    if buffer.layout != torch.strided:
        raise NotImplementedError(
            f"{function}: expected dense gradients, got a bucket of layout {buffer.layout}"
        )
    return buffer


def start_mean(group: ProcessGroup, buffer: Tensor) -> Future[Tensor]:
    """Starts to replace a buffer by its mean over a group, with the bits of a DDP without hooks."""
    buffer.mul_(1.0 / group.size())
    work: Any = torch.distributed.all_reduce(buffer, group=group, async_op=True)
    mean: Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return mean


def fp32_reduce_hook(state: Any, bucket: GradBucket) -> Future[Tensor]:
    """Averages 16-bit gradients in fp32: ``ddp.register_comm_hook(None, fp32_reduce_hook)``.

    DDP sums 16-bit gradients in 16 bits, after dividing them: small ones are lost, and every
    addition rounds. Here a 16-bit bucket is cast to fp32, summed by one all-reduce, divided by the
    number of ranks and rounded to its dtype once. A mean that fits does not overflow, whatever the
    sum is; inf and NaN stay inf or NaN, so a gradient scaler sees them. Buckets of other dtypes are
    averaged as without a hook, bit for bit. The all-reduce moves twice the bytes of 16-bit
    gradients and overlaps with backward. Needs fp32 memory for the buckets that are under way.

    Args:
        state: The process group of DDP, or ``None`` for the default group. The hook cannot find out
            which group DDP has: if it has another than the default one, give it here.
        bucket: From DDP, with dense gradients. Works with ``gradient_as_bucket_view``.

    Returns:
        A future of the bucket's buffer, which has the means when it is done.

    Raises:
        TypeError: ``state`` or ``bucket`` is something else.
        ValueError: The group lacks this process, or there is none.
        NotImplementedError: The gradients are sparse.
    """
    group = group_of("fp32_reduce_hook", state)
    buffer = dense_buffer("fp32_reduce_hook", bucket)
    if buffer.dtype not in (torch.float16, torch.bfloat16):
        return start_mean(group, buffer)
    size = group.size()

    def finish(future: Future[list[Tensor]]) -> Tensor:
        # The future's tensor and not one of this closure: torch notes that its memory is in use on
        # the stream that this runs on.
        return buffer.copy_(future.value()[0].div_(size))

    work: Any = torch.distributed.all_reduce(buffer.float(), group=group, async_op=True)
    mean: Future[Tensor] = work.get_future().then(finish)
    return mean
