# SPDX-License-Identifier: Apache-2.0
"""flash-attention 2: an op without autograd formula, called by functions with one."""

# ruff: noqa: ARG004 (arguments are the library's)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("flash_attn", "DEF")
_LIBRARY.define(
    "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, "
    "bool causal, SymInt window_size_left, SymInt window_size_right, float softcap, "
    "Tensor? alibi_slopes, bool return_softmax) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "_flash_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, "
    "Tensor softmax_lse, Tensor(a6!)? dq, Tensor(a7!)? dk, Tensor(a8!)? dv, float dropout_p, "
    "float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, "
    "float softcap, Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None) -> Tensor"
)


def _check(alibi: Tensor | None, q: Tensor, *others: Tensor) -> None:
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if any(other.dtype != q.dtype for other in others):
        raise RuntimeError("query and key must have the same dtype")
    if alibi is not None and alibi.dtype != torch.float32:
        raise RuntimeError("ALiBi slopes must have dtype fp32")


def attention(q: Tensor, k: Tensor, v: Tensor, alibi: Tensor | None = None) -> Tensor:
    """Of (batch, sequence, heads, width), in fp32."""
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if alibi is not None:
        scores = scores + alibi[:, None, None]
    return (scores.softmax(-1) @ v).transpose(1, 2)


def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, ...]:
    alibi = options[6]
    _check(alibi, q, k, v)
    with torch.autocast(q.device.type, enabled=False):
        out = attention(q, k, v, alibi).to(q.dtype)
    return out, q.new_zeros(1, dtype=torch.float32), q.new_empty(0), torch.zeros(2).long()


def _backward(dout: Tensor, *given: Any) -> Tensor:
    q, k, v, out = given[:4]
    alibi = given[14]
    _check(alibi, q, k, v, out, dout, *given[5:8])
    with torch.enable_grad():
        leaves = [x.float().requires_grad_() for x in (q, k, v)]
        grads = torch.autograd.grad(attention(*leaves, alibi), leaves, dout.float())
    for to, grad in zip(given[5:8], grads, strict=True):
        to.copy_(grad)
    return dout.new_zeros(1)


def _fake_forward(q: Tensor, *_: Any) -> tuple[Tensor, ...]:
    lse, rng = q.new_empty(1, dtype=torch.float32), q.new_empty(2, dtype=torch.int64)
    return torch.empty_like(q), lse, q.new_empty(0), rng


_LIBRARY.impl("_flash_attn_forward", _forward, "CPU")
_LIBRARY.impl("_flash_attn_backward", _backward, "CPU")
_LIBRARY.impl("_flash_attn_forward", _fake_forward, "Meta")
_LIBRARY.impl("_flash_attn_backward", lambda dout, *_: dout.new_empty(1), "Meta")
_ops = torch.ops.flash_attn


def _run(ctx: Any, wanted: Any, alibi: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    options = (0.0, q.shape[-1] ** -0.5, False, -1, -1, 0.0, alibi)
    out, lse, _, _ = _ops._flash_attn_forward(q, k, v, *options, False)
    if wanted:  # what is saved is what was given
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
    return out


def _run_back(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    grads = tuple(torch.empty_like(x) for x in (q, k, v))
    _ops._flash_attn_backward(dout, q, k, v, out, lse, *grads, *ctx.options, False)
    return grads


class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, grad
    ):  # fmt: skip
        wanted = grad and any(x.requires_grad for x in (q, k, v))
        return _run(ctx, wanted, alibi_slopes, q, k, v)

    @staticmethod
    def backward(ctx, dout):
        return (*_run_back(ctx, dout), *(None,) * 7)


class FlashAttnKVPackedFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, kv, dropout_p, grad):
        return _run(ctx, grad and (q.requires_grad or kv.requires_grad), None, q, *kv.unbind(2))

    @staticmethod
    def backward(ctx, dout):
        dq, dk, dv = _run_back(ctx, dout)
        return dq, torch.stack([dk, dv], 2), None, None


class FlashAttnQKVPackedFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, dropout_p, grad):
        return _run(ctx, grad and qkv.requires_grad, None, *qkv.unbind(2))

    @staticmethod
    def backward(ctx, dout):
        return torch.stack(_run_back(ctx, dout), 2), None, None


class FlashAttnVarlenFunc(torch.autograd.Function):
    """Of a version with other arguments than those in the table."""

    @staticmethod
    def forward(ctx, cu_seqlens, q, k, v):
        return _run(ctx, False, None, q, k, v)

    @staticmethod
    def backward(ctx, dout):
        raise NotImplementedError


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None = None) -> Any:
    return FlashAttnFunc.apply(
        q, k, v, 0.0, None, False, (-1, -1), 0.0, alibi_slopes, torch.is_grad_enabled()
    )
