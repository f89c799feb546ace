# SPDX-License-Identifier: Apache-2.0
"""float32 gradients of 16-bit parameters, under DistributedDataParallel."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with classes.
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

import fastamp._C as _C
from fastamp.distributed._reduction import GradBucket, dense_buffer, group_of, start_mean
from fastamp.optim._low_precision_weights import check_grad_dtype_exists, hold_grads_in_float

_NARROW = (torch.float16, torch.bfloat16)


def _mean_hook(state: Any, bucket: Any) -> Future[Tensor]:
    return start_mean(group_of("fp32_main_grads", state), bucket.buffer())


def _looks_for_unused(ddp: DistributedDataParallel) -> bool:
    return bool(ddp.find_unused_parameters or ddp.static_graph)  # The latter in the first pass.


class _MainGrads:
    """Takes gradients out of the reducer's sight while it works, and gives it float32 buckets.

    The reducer compares the dtype of a gradient with that of its bucket, which is the parameter's,
    when backward has made it, and not again when it copies there what the hook returned, of any
    dtype. In between, a parameter has no gradient, which the reducer takes for zeros; or, where it
    looks for unused parameters and so refuses that, zeros in 16 bits.
    """

    def __init__(self, ddp: DistributedDataParallel, hook: Callable[..., Any]) -> None:
        self._hook = hook
        self._narrow = [p for p in ddp.parameters() if p.requires_grad and p.dtype in _NARROW]
        self._hidden: Any = WeakIdKeyDictionary()
        # Whether the reducer expects a backward pass: from the end of a synchronized forward pass
        # until all buckets are on their way.
        self._expected = False
        self._has_begun = False
        self._must_be_there = _looks_for_unused(ddp)

    def note_forward(self, ddp: Any, *_: Any) -> None:
        """After a forward pass of the model, as the reducer: not after one that has failed."""
        if torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            self._expected, self._has_begun = True, False
            self._hidden.clear()  # What a backward pass has left that was broken off.

    def after_accumulation(self, parameter: Tensor) -> None:
        """After backward has added to the gradient of any parameter, before the reducer looks."""
        if not self._expected:
            return
        if not self._has_begun:
            # With the first one, the reducer also looks at the gradients of parameters that
            # backward will not reach; earlier passes may have given them some.
            self._has_begun = True
            for other in self._narrow:
                self._hide(other)
        elif parameter.dtype in _NARROW:
            self._hide(parameter)

    def _hide(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        # What backward adds to the zeros has 16 bits, too, until it is cast.
        parameter.grad = torch.zeros_like(parameter) if self._must_be_there else None
        earlier = self._hidden.get(parameter)
        if earlier is None:
            self._hidden[parameter] = gradient
        else:
            earlier.add_(gradient)

    def reduce(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        """The hook that DDP calls."""
        if dense_buffer("fp32_main_grads", bucket).dtype in _NARROW:
            self._fill(bucket)
        if bucket.is_last():  # Its turn comes when all gradients are there.
            self._expected = False
        mean: Future[Tensor] = self._hook(state, bucket)
        return mean

    def _fill(self, bucket: GradBucket) -> None:
        narrow = bucket.buffer()
        offsets = [g.storage_offset() - narrow.storage_offset() for g in bucket.gradients()]
        wide = torch.zeros_like(narrow, dtype=torch.float32)
        views, gradients = [], []
        for parameter, offset in zip(bucket.parameters(), offsets, strict=True):
            gradient = self._hidden.pop(parameter, None)
            # The mean is written there; or stays away, if no rank has used the parameter.
            parameter.grad = gradient
            if gradient is not None:
                # In the order of the parameter's memory, as the reducer reads the result.
                strides = torch.empty_like(parameter, device="meta").stride()
                views.append(wide.as_strided(parameter.shape, strides, offset))
                gradients.append(gradient)
        if views:
            torch._foreach_copy_(views, gradients)
        bucket.set_buffer(wide)


def _check(ddp: Any, hook: Any) -> None:
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            "fp32_main_grads: expected ddp to be a DistributedDataParallel, got "
            f"{type(ddp).__name__}; without one, fastamp.optim.low_precision_weights_ gives "
            "weights gradients in float32 by itself"
        )
    if hook is not None and not callable(hook):
        raise TypeError(
            f"fp32_main_grads: expected hook to be a function or None, got {type(hook).__name__}"
        )
    if ddp.gradient_as_bucket_view:
        raise ValueError(
            "fp32_main_grads: expected a model without gradient_as_bucket_view, got one with it: "
            "its gradients would be views of 16-bit buckets"
        )
    if not any(p.requires_grad and p.dtype in _NARROW for p in ddp.parameters()):
        raise ValueError("fp32_main_grads: expected trained parameters in 16 bits, got none")
    for name, parameter in ddp.module.named_parameters():
        if parameter.grad is not None:
            raise ValueError(
                f"fp32_main_grads: expected a model without gradients, got one of {name}; call "
                "zero_grad() first"
            )
    check_grad_dtype_exists("fp32_main_grads")
    for name, parameter in ddp.module.named_parameters():
        if _looks_for_unused(ddp) and _C.is_low_precision_weight(parameter):
            raise ValueError(
                "fp32_main_grads: expected 16-bit gradients with find_unused_parameters or "
                f"static_graph, got float32 of {name}; give low_precision_weights_ "
                f"grads={parameter.dtype}"
            )


def fp32_main_grads(
    ddp: DistributedDataParallel, hook: Callable[..., Any] | None = None, state: Any = None
) -> None:
    """Gives the 16-bit parameters of a DDP model gradients in float32.

    They are accumulated over micro-batches in float32, averaged over ranks in float32, and are
    float32 when the optimizer reads them. For models whose weights
    :func:`fastamp.optim.low_precision_weights_` holds in 16 bits, and others that were cast: losses
    and masters are then those of float32 weights under torch.amp and DDP. (DDP's own buckets have
    the parameter's dtype, and it refuses gradients of another.) Call it once, before the first
    forward pass::

        fastamp.optim.low_precision_weights_(model, grads=torch.bfloat16)
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        fastamp.distributed.fp32_main_grads(ddp)

    Costs 4 bytes per parameter for gradients instead of 2, and float32 buckets while they are under
    way; the all-reduce moves twice the bytes of 16-bit gradients. ``hook`` can halve that.
    During a backward pass that is synchronized, ``.grad`` of these parameters is not theirs.

    Args:
        ddp: The model, without ``gradient_as_bucket_view`` and without a communication hook.
        hook: A communication hook of DDP, for all buckets; those of 16-bit parameters are float32
            when it gets them. For example ``fastamp.distributed.compress_hook(torch.bfloat16)``.
            By default, gradients are averaged as by DDP without a hook.
        state: Passed on to the hook; by default the process group of ``ddp``.

    Raises:
        TypeError: ``ddp`` is not a DistributedDataParallel, or ``hook`` cannot be called.
        ValueError: It has ``gradient_as_bucket_view``, no 16-bit parameters, or gradients; or it
            looks for unused parameters, and ``low_precision_weights_`` has given it gradients in
            float32.
        RuntimeError: It has a communication hook.
        NotImplementedError: torch has no ``Tensor.grad_dtype``. Nothing was changed then, nor by
            any other error.
    """
    _check(ddp, hook)
    grads = _MainGrads(ddp, _mean_hook if hook is None else hook)
    # First what can be refused: DDP takes one hook.
    ddp.register_comm_hook(ddp.process_group if state is None else state, grads.reduce)
    trained = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
    narrow = [p for p in trained if p.dtype in _NARROW and p.grad_dtype == p.dtype]
    hold_grads_in_float(narrow)
    if not _looks_for_unused(ddp):  # There a gradient is added to zeros in 16 bits.
        _C.mark_low_precision_weights(narrow)
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(grads.after_accumulation)  # type: ignore[no-untyped-call]
    ddp.register_forward_hook(grads.note_forward)
