# SPDX-License-Identifier: Apache-2.0
"""Image models of timm and torchvision: what every module returns, with fastamp installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from support.twin_runs import is_fastamps, parameters_of, same_results

REASON = "the thirdparty extra is not installed"


def timm_vit() -> nn.Module:
    timm = pytest.importorskip("timm", reason=REASON)
    options = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 4}
    return timm.create_model("vit_tiny_patch16_224", pretrained=False, **options)


def timm_resnet() -> nn.Module:
    timm = pytest.importorskip("timm", reason=REASON)
    narrow = {"channels": (8, 16, 16, 32), "stem_width": 8, "num_classes": 4}
    return timm.create_model("resnet10t", pretrained=False, **narrow)


def torchvision_vit() -> nn.Module:
    models = pytest.importorskip("torchvision.models", reason=REASON)
    return models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=4)


def torchvision_resnet() -> nn.Module:
    models = pytest.importorskip("torchvision.models", reason=REASON)
    block = models.resnet.Bottleneck
    return models.ResNet(block, [1, 1, 1, 1], num_classes=4, width_per_group=4)


MODELS = [timm_vit, timm_resnet, torchvision_vit, torchvision_resnet]


def watch(model: nn.Module, seen: list[tuple[str, list[torch.Tensor]]]) -> None:
    for name, module in model.named_modules():

        def note(_module: Any, _args: Any, output: Any, name: str = name) -> None:
            tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
            seen.append((name, [t.detach().cpu() for t in tensors]))

        module.register_forward_hook(note)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("make", MODELS)
def test_every_modules_output_is_torchs(
    make: Callable[[], nn.Module], mode: str, dtype: torch.dtype, device: str
):
    def run() -> Any:
        model = make().to(device).train(mode == "train")
        seen: list[Any] = []
        watch(model, seen)
        x = torch.randn(2, 3, 32, 32, device=device)
        with torch.set_grad_enabled(mode == "train"), torch.autocast(device, dtype=dtype):
            model(x)
        return seen

    seen = same_results(run)
    assert len(seen) > 10
    assert {t.dtype for _, outputs in seen for t in outputs} >= {dtype}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("make", MODELS)
def test_training_with_a_scaler_gives_torchs_bits(
    make: Callable[[], nn.Module], channels_last: bool, device: str
):
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def run() -> Any:
        model = make().to(device, memory_format=layout)
        if hasattr(model, "maxpool"):  # its backward adds in any order on a GPU
            model.maxpool = nn.Identity()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**30, growth_interval=2)
        assert is_fastamps(scaler)
        trace = []
        x = torch.randn(2, 3, 32, 32, device=device).to(memory_format=layout)
        y = torch.arange(2, device=device)
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            trace.append((loss.item(), scaler.state_dict()))
        return trace, parameters_of(model)

    trace, _ = same_results(run)
    assert trace[0][1]["scale"] < 2.0**30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_torchvisions_own_autocast_kernels_stay(dtype: torch.dtype, device: str):
    ops = pytest.importorskip("torchvision.ops", reason=REASON)

    def run() -> Any:
        features = torch.randn(1, 4, 16, 16, device=device)
        boxes = torch.tensor([[0, 1.0, 1.0, 9.0, 9.0], [0, 2.0, 2.0, 10.0, 10.0]], device=device)
        offset = torch.randn(1, 18, 14, 14, device=device)
        weight = torch.randn(4, 4, 3, 3, device=device)
        with torch.autocast(device, dtype=dtype):
            low = features.to(dtype)
            results = [
                torch.ops.torchvision.roi_align(low, boxes, 1.0, 4, 4, -1, False),
                ops.roi_pool(features, boxes, 4),
                ops.nms(boxes[:, 1:], torch.tensor([0.5, 0.9], device=device), 0.5),
                ops.deform_conv2d(features, offset, weight),
            ]
        return [t.cpu() for t in results]

    same_results(run, witness=False)
