# SPDX-License-Identifier: Apache-2.0
"""Public models, cut to a size that compiles and runs in a moment, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fastamp
import fastamp._C as _C
from benchmarks import models

_GPT2 = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 32}
_BERT = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
_BERT.update(intermediate_size=128, vocab_size=128, max_position_embeddings=32)
_VIT = {"img_size": 64, "depth": 2, "embed_dim": 64, "num_heads": 4}


def _images(size: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.randn(batch, 3, size, size)


def _tokens(batch: int) -> torch.Tensor:
    return torch.randint(128, (batch, 8))


#: Makes the model; makes its input of a batch; the package it comes from.
_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor], str]] = {
    "MLP": (models.mlp, lambda batch: torch.randn(batch, 64), "torch"),
    "ResNet-18": (
        partial(models.timm_model, "resnet18", channels=(8, 16, 32, 64)),
        _images(32),
        "timm",
    ),
    "ViT": (partial(models.timm_model, "vit_tiny_patch16_224", **_VIT), _images(64), "timm"),
    "GPT-2": (
        partial(models.gpt2, bos_token_id=0, eos_token_id=0, **_GPT2),
        _tokens,
        "transformers",
    ),
    "BERT": (partial(models.bert, **_BERT), _tokens, "transformers"),
}
NAMES = list(_MODELS)


def model_and_input(name: str, batch: int = 2) -> tuple[nn.Module, torch.Tensor]:
    """One of ``NAMES`` in eval mode, always with the same weights."""
    make, make_input, package = _MODELS[name]
    pytest.importorskip(package)
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases of 0 and norms of 1 would hide mistakes
            parameter.add_(torch.randn_like(parameter) * 0.02)
        for name_of, buffer in model.named_buffers():
            if buffer.is_floating_point() and "running" in name_of:
                buffer.add_(torch.rand_like(buffer))
    return model, make_input(batch)


def tensors(output: Any) -> list[torch.Tensor]:
    """The tensors of an output, whatever holds them."""
    flat, _ = torch.utils._pytree.tree_flatten(output)
    return [value for value in flat if isinstance(value, torch.Tensor)]


def in_region(
    model: nn.Module, dtype: torch.dtype, lists: str, *args: Any, **kwargs: Any
) -> list[torch.Tensor]:
    """What the region over the float32 model computes, which all else is held against."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(fastamp.policies.override(dict(_C.policy_preset(lists, "cpu")), "cpu"))
        stack.enter_context(fastamp.autocast("cpu", dtype=dtype))
        return tensors(model(*args, **kwargs))
