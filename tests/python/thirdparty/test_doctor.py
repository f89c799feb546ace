# SPDX-License-Identifier: Apache-2.0
"""check on programs that train models of libraries, with faults and without."""

from __future__ import annotations

import pytest

from debugging.doctor_programs import LINES, SICK, Sick, program
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


FAULTS = {
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
    "BERT in fp16 without a scaler": _as("fp16 without a scaler", "BERT"),
    "BERT whose loss is scaled twice": _as("a loss that is scaled twice", "BERT"),
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
    "Llama that steps past its scaler": _as("the optimizer's own step", "Llama"),
    "timm's ViT that clips scaled gradients": _as("clipping before unscale_", "timm's ViT"),
    "timm's ViT in a region for CUDA": _as("a region for another device", "timm's ViT"),
    "a ResNet whose gradients are divided twice": _as(
        "a division of one's own before the scaler's", "torchvision's ResNet"
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
    assert not rules_of(cured) & {case.rule, *case.others}, str(cured)


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
