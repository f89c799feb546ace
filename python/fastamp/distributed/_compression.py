# SPDX-License-Identifier: Apache-2.0
"""Gradients of DDP that travel in 16 bits, with what rounding takes from them added to the next."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with classes.
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

from fastamp._util.scaled_backward import ask_for_scales, scale_of_backward
from fastamp._util.tensors import on_device
from fastamp.distributed._reduction import (
    GradBucket,
    ProcessGroup,
    dense_buffer,
    group_of,
    start_mean,
)

_SUMMED = (torch.float32, torch.bfloat16, torch.float16)


def _power_of_two(exponent: Tensor) -> Tensor:
    # Exact: the bits of a float32, for exponents in -126 .. 127.
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def encode(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds rows of float32 to 16 bits.

    Rows of float16 are multiplied by a power of two that brings their largest magnitude to
    2^14 .. 2^15, so that nothing overflows and small values keep their bits; its exponent is one
    element more of the row. A row with inf or NaN is not scaled.
    """
    if dtype != torch.float16:
        return values.to(dtype)
    largest = values.abs().amax(1, keepdim=True)
    exponent = (torch.frexp(largest).exponent - 15).clamp_(min=-100)
    exponent = torch.where(largest.isfinite(), exponent, torch.zeros_like(exponent))
    return torch.cat([(values * _power_of_two(-exponent)).to(dtype), exponent.to(dtype)], 1)


def decode(message: Tensor) -> Tensor:
    """Returns the values that :func:`encode` has rounded, in float32."""
    if message.dtype != torch.float16:
        return message.float()
    return message[:, :-1].float() * _power_of_two(message[:, -1:])


class _Errors(NamedTuple):
    """Remainder that rounding took from a bucket and was not sent yet, unscaled, in bfloat16."""

    own: Tensor  # Of this rank's gradients, padded to equal shares for all ranks.
    mean: Tensor  # Of the share of the means that this rank computes.
    parameters: list[Tensor]  # Of the bucket, one after another. Kept alive, so identities hold.

    def of_parameters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Parameters with their parts of the rank's own errors."""
        begin = 0
        for parameter in self.parameters:
            yield parameter, self.own[begin : begin + parameter.numel()]
            begin += parameter.numel()


def _round(
    values: Tensor, dtype: torch.dtype, error: Tensor | None, scale: Tensor | None
) -> Tensor:
    """Encodes rows after adding their error, which becomes that of this rounding.

    Args:
        values: Gradients that carry the scale; overwritten.
        dtype: What they are sent in.
        error: Without the scale, which may be another one in the next step.
        scale: ``None``: 1.
    """
    if error is None:
        return encode(values, dtype)
    values.add_(error.view_as(values) if scale is None else error.view_as(values).float() * scale)
    message = encode(values, dtype)
    lost = values.sub_(decode(message))
    if scale is not None:
        lost.div_(scale)
    # inf and NaN leave no error behind: the step that gets them is skipped, and the next one has to
    # find a finite error.
    error.view_as(values).copy_(lost.nan_to_num_(0.0, 0.0, 0.0))
    return message


class CompressHook:
    """Result of :func:`compress_hook`; DDP calls it for each bucket. Not thread-safe.

    Attributes:
        dtype: What gradients are sent in.
        error_feedback: Whether rounding errors are kept.
    """

    def __init__(self, dtype: torch.dtype, error_feedback: bool) -> None:
        """Use :func:`fastamp.distributed.compress_hook`."""
        self.dtype = dtype
        self.error_feedback = error_feedback
        # By the identities of a bucket's parameters, so that one hook may serve several models.
        self._errors: dict[tuple[int, ...], _Errors] = {}
        self._loose: dict[int, Tensor] = {}  # Of parameters whose new bucket was not seen yet.
        # Kept until the next bucket: the streams of collectives may still read it.
        self._scale: Tensor | None = None
        if error_feedback:
            ask_for_scales(self)
        # DDP logs the names of hooks.
        self.__name__ = self.__qualname__ = "fastamp.distributed.compress_hook"

    def reset(self) -> None:
        """Forgets the errors, as when training starts again from a checkpoint."""
        self._errors.clear()
        self._loose.clear()

    def __call__(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        """Starts to average a bucket.

        Args:
            state: The process group of DDP, or ``None`` for the default group.
            bucket: From DDP.

        Returns:
            A future of the bucket's buffer, which has the means when it is done.

        Raises:
            TypeError: ``state`` or ``bucket`` is something else.
            ValueError: The group lacks this process, or there is none.
            NotImplementedError: The gradients are sparse.
        """
        group = group_of("compress_hook", state)
        buffer = dense_buffer("compress_hook", bucket)
        if buffer.dtype not in _SUMMED:
            return start_mean(group, buffer)
        return self._start(group, buffer, self._errors_of(bucket, group))

    def _errors_of(self, bucket: GradBucket, group: ProcessGroup) -> _Errors | None:
        if not self.error_feedback:
            return None
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        if key not in self._errors:
            self._take_apart(key, group)
            buffer, ranks = bucket.buffer(), group.size()
            share = -(-buffer.numel() // ranks)
            zeros = buffer.new_zeros((ranks + 1) * share, dtype=torch.bfloat16)
            self._errors[key] = _Errors(zeros[share:], zeros[:share], parameters)
            for parameter, error in self._errors[key].of_parameters():
                earlier = self._loose.pop(id(parameter), None)
                if earlier is not None:
                    error.copy_(earlier)
        return self._errors[key]

    def _take_apart(self, key: tuple[int, ...], group: ProcessGroup) -> None:
        """DDP makes its buckets anew after the first step: errors go with their parameters."""
        members = set(key)
        for other in [other for other in self._errors if not members.isdisjoint(other)]:
            errors = self._errors.pop(other)
            # Which rank has which means changes, too: their errors become this rank's own, and
            # count as often in the mean as there are ranks.
            own = errors.own.view(group.size(), -1)[torch.distributed.get_rank(group)]
            own.add_(errors.mean, alpha=group.size())
            self._loose |= {id(parameter): error for parameter, error in errors.of_parameters()}

    def _start(self, group: ProcessGroup, buffer: Tensor, errors: _Errors | None) -> Future[Tensor]:
        # Each rank gets one share of all ranks' gradients, sums it in float32 and sends the mean to
        # all: the bytes of an all-reduce in 16 bits, without its additions in 16 bits.
        ranks = group.size()
        share = -(-buffer.numel() // ranks)
        values = torch.zeros(ranks, share, device=buffer.device)
        values.view(-1)[: buffer.numel()].copy_(buffer)
        scale = scale_of_backward()
        if scale is not None:
            scale = on_device(scale, buffer.device)
        self._scale = scale
        sent = _round(values, self.dtype, errors and errors.own, scale).view(torch.uint8)
        received = torch.empty_like(sent)
        work: Any = torch.distributed.all_to_all_single(received, sent, group=group, async_op=True)

        def finish(future: Future[list[Tensor]]) -> Tensor:
            rows = decode(future.value()[0].view(self.dtype))
            mean = rows.sum(0, keepdim=True).div_(ranks)
            own = _round(mean, self.dtype, errors and errors.mean, scale).view(torch.uint8)
            all_means = own.new_empty(ranks, own.numel())
            gathered: Any = torch.distributed.all_gather_into_tensor(
                all_means, own, group=group, async_op=True
            )
            gathered.wait()  # On CUDA only this stream waits.
            means = decode(all_means.view(self.dtype)).view(-1)
            return buffer.copy_(means[: buffer.numel()])

        future = work.get_future()
        if buffer.device.type == "cpu":
            # gloo calls back from threads of its own, in an order that differs between ranks, and
            # then the second collectives of two buckets would meet. NCCL calls back at once.
            future.wait()
        mean: Future[Tensor] = future.then(finish)
        return mean


def compress_hook(dtype: torch.dtype, error_feedback: bool = True) -> CompressHook:
    """Makes a DDP hook that sends gradients in 16 bits and sums them in fp32.

    ``ddp.register_comm_hook(None, fastamp.distributed.compress_hook(torch.bfloat16))``

    Half the bytes of fp32 gradients travel. Every rank rounds its gradients to ``dtype``, sums one
    share of all ranks' gradients in fp32, and sends the mean of that share, rounded once more. With
    error feedback, what these two roundings took is added to the gradients, or means, of the next
    step: over many steps nothing is lost, where without it an error that points in one direction
    adds up. Errors are kept in bfloat16: 2 bytes per element, and 2 / ranks for the means.

    float16 is scaled by a power of two for each rank and share, so it does not overflow. inf and
    NaN arrive as inf or NaN on all ranks and leave no error behind; a step that a gradient scaler
    skips loses at most the rounding of one step. Errors are kept without the scale that
    fastamp's ``GradScaler.scale`` has put on the loss, so the scale may change; the scale of
    another scaler is not known here: ``reset()`` the hook whenever it changes. Errors are no part
    of a checkpoint: they start at zero when training is resumed. When DDP makes its buckets anew,
    after its first step, they go with their parameters.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``, which keeps three bits more. 16-bit
            gradients are sent, too, and summed in fp32.
        error_feedback: Keep the errors and send them with the next step's gradients.

    Returns:
        The hook. Its state, given to ``register_comm_hook``, is the process group of DDP, or
        ``None`` for the default group. Gradients of other dtypes than fp32, fp16 and bf16 are
        averaged as without a hook. On CPU, backward waits for each bucket.

    Raises:
        TypeError: An argument has another type.
        ValueError: ``dtype`` is another dtype.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"compress_hook: expected dtype to be a torch.dtype, got {type(dtype).__name__}"
        )
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"compress_hook: expected dtype to be torch.bfloat16 or torch.float16, got {dtype}"
        )
    if not isinstance(error_feedback, bool):
        raise TypeError(
            "compress_hook: expected error_feedback to be a bool, got "
            f"{type(error_feedback).__name__}"
        )
    return CompressHook(dtype, error_feedback)
