# SPDX-License-Identifier: Apache-2.0
"""check on programs that train models of libraries, with faults and without."""

from __future__ import annotations

import pytest

from debugging.doctor_programs import LINES, SICK, Sick, program
from debugging.healthy_programs import HEALTHY
from debugging.test_doctor import checked, rules_of

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]  # their warnings

_TEXT = {
    "batch": "torch.randint(0, 32, (4, 12)), torch.arange(4) % 4",
    "forward": "loss = model(input_ids=x, labels=LABELS).loss",
}
_IMAGES = {"batch": "torch.randn(4, 3, 32, 32), torch.arange(4)"}
_SMALL = "hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32"


def _model(made: str, labels: str = "") -> dict[str, str]:
    lines = {"define": "import transformers", "model": f"transformers.{made}", **_TEXT}
    return {**lines, "forward": _TEXT["forward"].replace("LABELS", labels or "x")}


MODELS = {
    "T5": _model(
        "T5ForConditionalGeneration(transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, "
        "d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0))"
    ),
    "GPT-2": _model(
        "GPT2LMHeadModel(transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, "
        "n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, attn_implementation='eager'))"
    ),
    "BERT": _model(
        "BertForSequenceClassification(transformers.BertConfig(vocab_size=32, num_labels=4, "
        f"max_position_embeddings=16, {_SMALL}))",
        "y",
    ),
    "Llama": _model(
        "LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, max_position_embeddings=16, "
        f"num_key_value_heads=2, {_SMALL}))"
    ),
    "timm's ViT": {
        "define": "import timm",
        "model": (
            "timm.create_model('vit_tiny_patch16_224', img_size=32, embed_dim=32, depth=2, "
            "num_heads=2, num_classes=4)"
        ),
        **_IMAGES,
    },
    "torchvision's ResNet": {
        "define": "from torchvision.models import resnet",
        "model": "resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=4)",
        **_IMAGES,
    },
}


def _as(fault: str, model: str, **more: str) -> Sick:
    """A fault of the small program in one that trains a library's model."""
    case = SICK[fault]
    return Sick(
        case.rule, {**case.lines, **MODELS[model], **more}, case.cure, case.place, case.others
    )


# By model, faults of the small program that do not depend on what it computes.
_COMMON = {
    "T5": (
        "two steps on the same gradients",
        "a new scaler for each step",
        "clipping by value before unscale_",
        "a scaled loss that nobody uses",
        "a schedule that moves on skipped steps",
    ),
    "GPT-2": (
        "the optimizer's own step after unscale_",
        "gradients set to 0 before the step",
        "a checkpoint without the scaler",
        "a division of one's own, into new memory, before the scaler's",
        "backward in the region",
        "a loss that is scaled twice",
    ),
    "BERT": (
        "fp16 without a scaler",
        "a loss that is scaled twice",
        "a scaled loss that is scaled once more",
        "gradients dropped before the step",
        "a division of one's own, and copied back, before the scaler's",
        "a scaler for bf16",
    ),
    "Llama": (
        "the optimizer's own step",
        "update for each micro-batch",
        "a division of one's own, into new tensors, before the scaler's",
        "clipping before unscale_",
        "a checkpoint without the scaler",
        "a region for another device",
    ),
    "timm's ViT": (
        "clipping before unscale_",
        "a region for another device",
        "two steps on the same gradients",
        "a new scaler for each step",
        "fp16 without a scaler",
        "a schedule that moves on skipped steps",
    ),
    "torchvision's ResNet": (
        "a division of one's own before the scaler's",
        "a gradient penalty with the scale in it",
        "the optimizer's own step after unscale_",
        "gradients set to 0 before the step",
        "backward in the region",
        "a scaled loss that nobody uses",
        "clipping by value before unscale_",
    ),
}

FAULTS = {
    **{f"{model}: {fault}": _as(fault, model) for model in _COMMON for fault in _COMMON[model]},
    "T5 whose feed-forward layers overflow": Sick(
        "overflow-in-16-bits",
        {
            **MODELS["T5"],
            "before": (
                "for name, p in model.named_parameters():\n"
                "    if 'DenseReluDense' in name:\n        nn.init.normal_(p, std=400.0)"
            ),
        },
        {
            "before": (
                "for name, p in model.named_parameters():\n"
                "    if 'DenseReluDense' in name:\n        nn.init.normal_(p, std=400.0)\n"
                "fastamp.policies.for_modules(model, {'*.DenseReluDense': 'fp32'})"
            )
        },
        "mm (in encoder.block.0.layer.1.DenseReluDense.wo, transformers/models/t5/",
    ),
    "GPT-2 whose scores overflow": Sick(
        "overflow-in-16-bits",
        {
            **MODELS["GPT-2"],
            "before": (
                "for h in model.transformer.h:\n"
                "    nn.init.normal_(h.attn.c_attn.weight, std=100.0)"
            ),
        },
        {
            "before": (
                "for h in model.transformer.h:\n"
                "    nn.init.normal_(h.attn.c_attn.weight, std=100.0)\n"
                "fastamp.policies.for_modules(model, {'transformer.h.*.attn': 'fp32'})"
            )
        },
        "transformer.h.0.attn, transformers/models/gpt2/modeling_gpt2.py:",
    ),
    "Llama with bf16 weights under torch.optim": Sick(
        "half-weights-torch-optim",
        {
            **MODELS["Llama"],
            "model": MODELS["Llama"]["model"] + ".bfloat16()",
            "region": "if True:",
            "backward": "loss.float().backward()",
            "step": "optimizer.step()",
        },
        {"before": "fastamp.optim.fuse_(optimizer)"},
    ),
    "a ResNet with NaN in its images": Sick(
        "nonfinite-input",
        {
            **MODELS["torchvision's ResNet"],
            "before": "data = torch.randn(4, 3, 32, 32).numpy()\ndata[0, 0, 0, 0] = float('nan')",
            "batch": "torch.from_numpy(data), torch.arange(4)",
        },
        {"before": "data = torch.randn(4, 3, 32, 32).numpy()"},
        "your data, a float32 tensor [4, 3, 32, 32]",
        others=("norm-statistics-not-finite",),
    ),
}

# By model, programs that look like those.
_RIGHT = {
    "T5": ("two micro-batches and one unscale_", "gradients zeroed after the step"),
    "GPT-2": (
        "unscale_, a look at the gradients, and the optimizer's own step",
        "a loss divided for two micro-batches",
    ),
    "BERT": (
        "gradients halved before the scaler's step",
        "a batch that is left out after unscale_",
        "a checkpoint in two files",
    ),
    "Llama": ("a loss that is scaled by hand", "gradients divided by hand and stepped by hand"),
    "timm's ViT": ("the scaler's own clipping", "a schedule that waits for a step"),
    "torchvision's ResNet": (
        "a gradient penalty without the scale",
        "gradients divided by hand, into new memory, clipped and stepped by hand",
    ),
}
LOOKING_ALIKE = {
    f"{model}: {name}": {**HEALTHY[name], **MODELS[model]}
    for model in _RIGHT
    for name in _RIGHT[model]
}


def _needs(lines: dict[str, str]) -> None:
    pytest.importorskip(
        lines["define"].split()[1].partition(".")[0], reason="the thirdparty extra is not installed"
    )


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_first_and_the_advice_cures_it(name: str) -> None:
    case = FAULTS[name]
    _needs(case.lines)
    report = checked(case.text())
    assert case.rule in str(report).splitlines()[:2], str(report)
    assert case.place in str(report), str(report)
    assert rules_of(report) <= {case.rule, *case.others}, str(report)
    cured = checked(case.cured())
    assert not cured, str(cured)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_nothing_is_said_of_the_models_as_they_are(name: str, dtype: str) -> None:
    lines = MODELS[name]
    _needs(lines)
    if dtype == "bfloat16":
        region = LINES["region"].replace("float16", dtype)
        scaler = 'torch.amp.GradScaler("cpu", enabled=False)'
        lines = {**lines, "region": region, "scaler": scaler}
    report = checked(program(**lines))
    assert not report, str(report)


@pytest.mark.parametrize("name", LOOKING_ALIKE)
def test_nothing_is_said_of_programs_that_look_like_those(name: str) -> None:
    lines = LOOKING_ALIKE[name]
    _needs(lines)
    report = checked(program(**lines))
    assert not report, str(report)


def test_there_are_as_many_as_are_asked_for() -> None:
    assert len(FAULTS) >= 40
    assert 2 * len(MODELS) + len(LOOKING_ALIKE) >= 25
