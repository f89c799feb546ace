# SPDX-License-Identifier: Apache-2.0
"""FLOPs of products, also of those that torch's FlopCounterMode does not count."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["flops_of"]


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """FLOPs of a product, convolution, attention or RNN, two for each multiplication; else 0.

    As torch's FlopCounterMode counts, where it does.
    """
    if func.namespace != "aten":
        return 0
    from torch.utils.flop_counter import flop_registry  # It imports Triton.

    own, torchs = _OWN.get(func._overloadpacket.__name__), flop_registry.get(func._overloadpacket)
    try:
        if own is not None:
            return own(args, result)
        return 0 if torchs is None else int(torchs(*args, **kwargs, out_val=result))
    except (TypeError, ValueError, AssertionError, IndexError, RuntimeError):
        return 0  # arguments of another form, such as nested tensors


def _product(left: torch.Tensor, right: torch.Tensor) -> int:
    """``[(batch,) rows, inner] @ [(batch,) inner(, columns)]``; groups are no batches."""
    batch = left.shape[0] if left.dim() == right.dim() == 3 else 1
    columns = 1 if right.dim() == 1 else right.shape[-1]
    return 2 * batch * math.prod(left.shape[-2:]) * columns


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Scores, and their products with the values; keys and values may have fewer heads."""
    scores = query.shape[:-1].numel() * key.shape[-2]
    return 2 * int(scores) * (query.shape[-1] + value.shape[-1])


def _attention_backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """The scores again, then the gradients of scores, queries, keys and values."""
    scores = query.shape[:-1].numel() * key.shape[-2]
    return 2 * int(scores) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _through(tokens: torch.Tensor, weights: Any) -> int:
    """Each of the tokens times all matrices among the weights."""
    matrices = (leaf for leaf in tree_leaves(weights) if isinstance(leaf, torch.Tensor))
    elements = sum(leaf.numel() for leaf in matrices if leaf.dim() == 2)
    return 2 * (tokens.numel() // max(tokens.shape[-1], 1)) * elements


def _encoder_layer(tokens: torch.Tensor, weights: Any) -> int:
    attention = 4 * tokens.shape[:-1].numel() * tokens.shape[-2] * tokens.shape[-1]
    return _through(tokens, weights) + int(attention)


_OWN: dict[str, Callable[[Any, Any], int]] = {
    "_grouped_mm": lambda args, _: _product(*args[:2]),
    "_scaled_grouped_mm": lambda args, _: _product(*args[:2]),
    "_int_mm": lambda args, _: _product(*args[:2]),
    "mv": lambda args, _: _product(*args[:2]),
    "dot": lambda args, _: 2 * args[0].numel(),
    "vdot": lambda args, _: 2 * args[0].numel(),
    "addr": lambda _, result: 2 * result.numel(),
    "addmv": lambda args, _: _product(*args[1:3]),
    "addbmm": lambda args, _: _product(*args[1:3]),
    "_addmm_activation": lambda args, _: _product(*args[1:3]),
    "conv_tbc": lambda args, result: 2 * result.numel() * int(args[1].shape[:2].numel()),
    "conv_tbc_backward": lambda args, _: 4 * args[0].numel() * int(args[2].shape[:2].numel()),
    "mkldnn_rnn_layer": lambda args, _: _through(args[0], args[1:3]),
    "mkldnn_rnn_layer_backward": lambda args, _: 2 * _through(args[0], args[1:3]),
    "_cudnn_rnn": lambda args, _: _through(args[0], args[1]),
    "_cudnn_rnn_backward": lambda args, _: 2 * _through(args[0], args[1]),
    "_native_multi_head_attention": lambda args, _: _encoder_layer(args[0], args[5:9]),
    "_transformer_encoder_layer_fwd": lambda args, _: _encoder_layer(args[0], args[3:]),
}
for _kernel in (
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention_overrideable",
):
    _OWN[f"_scaled_dot_product_{_kernel}"] = lambda args, _: _attention(*args[:3])
    _OWN[f"_scaled_dot_product_{_kernel}_backward"] = lambda args, _: _attention_backward(
        *args[1:4]
    )
