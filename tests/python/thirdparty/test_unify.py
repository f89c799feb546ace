# SPDX-License-Identifier: Apache-2.0
"""Tiny models of transformers and diffusers train in regions under the preset "unify"."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import fastamp

BF16 = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore")  # of many kinds
TINY = {"vocab_size": 32, "max_position_embeddings": 32, "hidden_size": 16}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}


def transformers() -> Any:
    return pytest.importorskip("transformers", reason="the thirdparty extra is not installed")


def language_loss(model: Any) -> torch.Tensor:
    tokens = torch.randint(0, 32, (2, 8))
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def mixtral(experts: str) -> Any:
    library = transformers()
    config = library.MixtralConfig(
        intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, **TINY, **LAYERS
    )
    model = library.MixtralForCausalLM(config)
    model.set_experts_implementation(experts)
    return model


def qwen3_moe(experts: str) -> Any:
    library = transformers()
    config = library.Qwen3MoeConfig(
        moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8, **TINY, **LAYERS
    )
    model = library.Qwen3MoeForCausalLM(config)
    model.set_experts_implementation(experts)
    return model


def t5() -> Any:
    library = transformers()
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = library.T5Config(vocab_size=32, decoder_start_token_id=0, pad_token_id=0, **sizes)
    return library.T5ForConditionalGeneration(config)


def unet() -> Any:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
    )


def unet_loss(model: Any) -> torch.Tensor:
    noise, text = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 8)
    loss: torch.Tensor = model(noise, torch.tensor([3]), text).sample.square().mean()
    return loss


class Experts(torch.nn.Module):
    """A mixture of experts as models wrote it: sums what experts give in a float32 tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(16, 4)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).float().softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            scaled = expert(x[rows]) * weights[rows, place, None].to(BF16)
            out.index_add_(0, rows, scaled)
        return out


def experts_loss(model: Any) -> torch.Tensor:
    loss: torch.Tensor = (model(torch.randn(8, 16)) - 1).square().mean()
    return loss


Job = tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]
JOBS: dict[str, Job] = {
    **{f"Mixtral, {e}": (lambda e=e: mixtral(e), language_loss) for e in ("eager", "grouped_mm")},
    **{
        f"Qwen3-MoE, {e}": (lambda e=e: qwen3_moe(e), language_loss)
        for e in ("eager", "grouped_mm")
    },
    "T5": (t5, language_loss),
    "UNet": (unet, unet_loss),
}


def losses(job: Job, preset: str | None) -> list[float]:
    make, loss_of = job
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found = []
    with fastamp.policies.preset(preset) if preset else nullcontext():
        for _ in range(3):
            with fastamp.autocast("cpu", dtype=BF16):
                loss = loss_of(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


@pytest.mark.parametrize("name", JOBS)
def test_models_that_run_without_it_have_the_same_bits_under_it(name: str):
    found = losses(JOBS[name], "unify")
    assert found == losses(JOBS[name], None)
    assert all(value == value for value in found)


def test_experts_that_write_16_bits_into_float32_train_under_it():
    with pytest.raises(RuntimeError, match="same scalar type"):
        losses((Experts, experts_loss), None)
    found = losses((Experts, experts_loss), "unify")
    assert found[-1] < found[0]
