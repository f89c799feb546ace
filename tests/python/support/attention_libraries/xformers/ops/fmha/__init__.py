# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import torch

from .common import Inputs

_LIBRARY = torch.library.Library("xformers_flash", "DEF")
_LIBRARY.define(
    "flash_fwd(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seqused_k, int max_seqlen_q, int max_seqlen_k, float p, "
    "float softmax_scale, bool is_causal, int window_left, int window_right, "
    "bool return_softmax, Tensor? block_tables, bool unpadded_lse) -> (Tensor, Tensor, Tensor)"
)


def _scores(inp: Inputs) -> torch.Tensor:
    scores = inp.query.float() @ inp.key.float().transpose(-1, -2)
    return scores if inp.attn_bias is None else scores + inp.attn_bias.float()


class _fMHA(torch.autograd.Function):  # noqa: N801
    @staticmethod
    def forward(ctx, *args):
        inp = Inputs(*args)
        inp.validate_inputs()
        ctx.save_for_backward(inp.query, inp.key, inp.value)
        ctx.bias = inp.attn_bias
        with torch.autocast("cpu", enabled=False):
            return (_scores(inp).softmax(-1) @ inp.value.float()).to(inp.query.dtype)

    @staticmethod
    def backward(ctx, grad):
        inp = Inputs(*ctx.saved_tensors, attn_bias=ctx.bias)
        inp.validate_inputs()
        assert grad.dtype == inp.query.dtype
        q, k, v, g = (x.float() for x in (*ctx.saved_tensors, grad))
        p = _scores(inp).softmax(-1)
        dp = g @ v.transpose(-1, -2)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True))
        grads = (ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ g)
        return (*(x.to(inp.query.dtype) for x in grads), None)


def memory_efficient_attention(query: Any, key: Any, value: Any, attn_bias: Any = None) -> Any:
    inp = Inputs(query=query, key=key, value=value, attn_bias=attn_bias)
    inp.validate_inputs()
    return _fMHA.apply(inp.query, inp.key, inp.value, inp.attn_bias)
