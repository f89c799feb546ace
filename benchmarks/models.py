# SPDX-License-Identifier: Apache-2.0
"""What is trained end to end: public model definitions with random weights, on real data.

Sizes on a GPU are those of the models' papers; on a CPU they are cut down, and the names say to
what, until a step takes a few hundredths of a second where 16-bit arithmetic is emulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from benchmarks import data

Batches = Iterator[data.Batch]


@dataclass(frozen=True)
class Workload:
    """A model with its data.

    Attributes:
        name: For the table.
        unit: ``images`` or ``tokens``.
        model: Makes it, on the CPU; seeds are the caller's.
        batches: Yields batches of a size on a device; the last argument asks for test data.
        batch: Sequences or images in a batch.
        units: Units of work in one of them.
        optimizer: ``SGD`` or ``AdamW``.
        lr: Its learning rate.
        steps: Training steps after which loss and accuracy are looked at.
    """

    name: str
    unit: str
    model: Callable[[], nn.Module]
    batches: Callable[[int, str, bool], Batches]
    batch: int
    units: int = 1
    optimizer: str = "AdamW"
    lr: float = 3e-4
    steps: int = 40

    def of_batch(self, batch: int) -> Workload:
        """Returns the same with another batch."""
        return replace(self, batch=batch)


def logits(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Returns a model's output as (..., classes), also where it is wrapped."""
    output: Any = model(x)
    found: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    return found


def loss_of(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross entropy; targets of -100 do not count."""
    return cross_entropy(output.flatten(0, -2), y.flatten())


def _images(size: int, channels: int) -> Callable[[int, str, bool], Batches]:
    def batches(batch: int, device: str, test: bool) -> Batches:
        if test:
            x, y = data.images(size, channels, test=True)
            return iter([(x.contiguous().to(device), y.to(device))])
        return data.image_batches(size, channels, batch, device)

    return batches


def text(length: int, masked: bool = False) -> Callable[[int, str, bool], Batches]:
    """Returns a function that yields batches of text, to predict the next bytes or the masked."""
    source = data.masked_batches if masked else data.text_batches
    return lambda batch, device, test: source(length, batch, device, test)


def mlp() -> nn.Module:
    """The digits example's: 64-256-10."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def wide_mlp(width: int, layers: int) -> nn.Module:
    """An MLP over digits, most of it hidden layers of ``width`` x ``width``."""
    hidden = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())]
    first = nn.Linear(64, width), nn.ReLU()
    return nn.Sequential(nn.Flatten(), *first, *hidden, nn.Linear(width, 10))


def resnet(name: str) -> nn.Module:
    """torchvision's, for ten classes."""
    import torchvision.models

    model: nn.Module = getattr(torchvision.models, name)(num_classes=10)
    return model


def timm_model(name: str, **options: Any) -> nn.Module:
    """timm's, for ten classes."""
    import timm

    model: nn.Module = timm.create_model(name, num_classes=10, **options)
    return model


def bert(**options: Any) -> nn.Module:
    """Transformers' BERT with the head that fills in masks; base size by default. No dropout."""
    from transformers import BertConfig, BertForMaskedLM

    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model: nn.Module = BertForMaskedLM(BertConfig(**none, **options))
    return model


def gpt2(**options: Any) -> nn.Module:
    """Transformers' GPT-2; 124M by default. No dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**none, **options))
    return model


def llama_block() -> nn.Module:
    """One block of transformers' Llama in the sizes of 8B, between a small embedding and head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(vocab_size=512, use_cache=False, **sizes, **heads)
    model: nn.Module = LlamaForCausalLM(config)
    return model


class Block(nn.Module):
    """Pre-norm transformer block with separate q, k, v: three consumers of one activation."""

    def __init__(self, width: int, heads: int, activation: type[nn.Module]) -> None:
        """Makes the layers; ``width`` is a multiple of ``heads``."""
        super().__init__()
        self.heads, self.activation = heads, activation()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes and returns (batch, length, width)."""
        y = self.norm1(x)
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(self.activation(self.up(self.norm2(x))))


def transformer(
    blocks: int,
    width: int,
    heads: int,
    activation: type[nn.Module] = nn.GELU,
    vocabulary: int = 512,
) -> nn.Module:
    """A plain causal language model over bytes, without positions."""
    layers = [Block(width, heads, activation) for _ in range(blocks)]
    head = nn.Linear(width, vocabulary)
    return nn.Sequential(nn.Embedding(vocabulary, width), *layers, nn.LayerNorm(width), head)


def digits(batch: int) -> Workload:
    """The digits example."""
    batches, steps = _images(8, 1), 300 if batch < 100 else 30
    return Workload(
        f"digits MLP, batch {batch}", "images", mlp, batches, batch, 1, "SGD", 0.1, steps
    )


def wide_digits(batch: int, width: int, layers: int) -> Workload:
    """Digits through wide layers; the smaller the batch, the larger the casts' part of a step."""
    name = f"MLP of {layers} layers of {width}, batch {batch}"
    model = partial(wide_mlp, width, layers)
    return Workload(name, "images", model, _images(8, 1), batch, 1, "AdamW", 3e-4, 30)


def workloads(device: str) -> list[Workload]:
    """Returns what is trained on a device, digits excepted."""
    return _gpu_workloads() if device == "cuda" else _cpu_workloads()


def _cpu_workloads() -> list[Workload]:
    # Without bf16 arithmetic, which many CPUs lack, mixed steps take ten times as long as fp32's.
    # All layers of the ResNets are there: their number decides how many casts a step makes.
    bert_cut = {"num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 128}
    bert_cut.update(hidden_size=128, num_attention_heads=4, intermediate_size=512)
    gpt2_cut = {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 512, "n_positions": 128}
    gpt2_cut.update(bos_token_id=0, eos_token_id=0)
    bytes_32 = text(32)
    vit = partial(timm_model, "vit_tiny_patch16_224", img_size=64, depth=2)

    def cnn(name: str) -> Workload:
        model = partial(timm_model, name.lower().replace("-", ""), channels=(16, 32, 64, 128))
        title = f"{name} of a quarter's width, 32x32"
        return Workload(title, "images", model, _images(32, 3), 4, 1, "SGD", 0.02, 5)

    def language(name: str, model: Callable[[], nn.Module], batches: Any) -> Workload:
        return Workload(name, "tokens", model, batches, 2, 32, steps=30)

    return [
        language("tiny transformer", partial(transformer, 2, 64, 4), bytes_32),
        cnn("ResNet-18"),
        cnn("ResNet-50"),
        Workload("ViT-Ti/16 cut to 2 blocks, 64x64", "images", vit, _images(64, 3), 4, steps=15),
        language("BERT cut to 2 layers of 128", partial(bert, **bert_cut), text(32, masked=True)),
        language("GPT-2 cut to 2 layers of 128", partial(gpt2, **gpt2_cut), bytes_32),
    ]


def _gpu_workloads() -> list[Workload]:
    full = _images(224, 3)

    def cnn(name: str, batch: int) -> Workload:
        model = partial(resnet, name.lower().replace("-", ""))
        return Workload(f"{name}, 224x224", "images", model, full, batch, 1, "SGD", 0.02, 40)

    def attention(name: str, size: str) -> Workload:
        model = partial(timm_model, f"vit_{size}_patch16_224", img_size=224)
        return Workload(f"{name}, 224x224", "images", model, full, 64, steps=40)

    return [
        cnn("ResNet-18", 128),
        cnn("ResNet-50", 64),
        attention("ViT-S/16", "small"),
        attention("ViT-B/16", "base"),
        Workload("BERT-base, 128 tokens", "tokens", bert, text(128, True), 32, 128, steps=40),
        Workload("GPT-2 124M, 512 tokens", "tokens", gpt2, text(512, False), 8, 512, steps=40),
    ]
