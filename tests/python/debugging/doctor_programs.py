# SPDX-License-Identifier: Apache-2.0
"""Programs that train wrongly, each with its cure.

Each is the same small training program with a few of its lines replaced. ``SICK`` says which rule
names the cause.
"""

from __future__ import annotations

import dataclasses
import textwrap

TEMPLATE = """\
import torch
from torch import nn
import fastamp

torch.manual_seed(0)
{define}
model = {model}
optimizer = {optimizer}
scaler = {scaler}
{before}
for step in range(3):
    x, y = {batch}
    optimizer.zero_grad()
{region}
{forward}
{backward}
{step}
{after}
"""

LINES = {
    "define": "",
    "model": "nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))",
    "optimizer": "torch.optim.SGD(model.parameters(), lr=0.1)",
    "scaler": 'torch.amp.GradScaler("cpu", init_scale=16.0)',
    "before": "",
    "batch": "torch.randn(4, 8), torch.arange(4)",
    "region": 'with torch.autocast("cpu", dtype=torch.float16):',
    "forward": "loss = nn.functional.cross_entropy(model(x), y)",
    "backward": "scaler.scale(loss).backward()",
    "step": "scaler.step(optimizer)\nscaler.update()",
    "after": "",
}
_DEPTHS = {"region": 1, "forward": 2, "backward": 1, "step": 1, "after": 1}


def program(**lines: str) -> str:
    """The program with these lines in place of the usual ones."""
    assert lines.keys() <= LINES.keys(), lines.keys() - LINES.keys()
    parts = {
        name: textwrap.indent(text, "    " * _DEPTHS.get(name, 0))
        for name, text in {**LINES, **lines}.items()
    }
    return TEMPLATE.format(**parts)


@dataclasses.dataclass(frozen=True)
class Sick:
    """A program with a fault.

    Attributes:
        rule: The rule that names it.
        lines: The lines that make it.
        cure: Those that the rule's advice changes, and what they are then.
        place: Words of the report's first lines that say where it is.
        others: Rules that the program breaks besides, because of the fault.
    """

    rule: str
    lines: dict[str, str]
    cure: dict[str, str]
    place: str = ""
    others: tuple[str, ...] = ()

    def text(self) -> str:
        return program(**self.lines)

    def cured(self) -> str:
        return program(**{**self.lines, **self.cure})


USUAL = LINES["step"]
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
# Of gradients by the scale, otherwise than in place.
DIVISIONS = {
    "into new tensors": (
        "for p in model.parameters():\n    p.grad = p.grad / scaler.get_scale()\n"
    ),
    "into new memory": (
        "inverse = 1 / scaler.get_scale()\n"
        "for p in model.parameters():\n    p.grad.data = inverse * p.grad.data\n"
    ),
    "and copied back": (
        "given = [p.grad for p in model.parameters()]\n"
        "made = torch._foreach_div([g.double() for g in given], scaler.get_scale())\n"
        "torch._foreach_copy_(given, made)\n"
    ),
}
_BF16 = 'with torch.autocast("cpu", dtype=torch.bfloat16):'
NO_SCALER = {"region": _BF16, "backward": "loss.backward()", "step": "optimizer.step()"}
_ATTENTION = """
class Attention(nn.Module):
    def __init__(self, large):
        super().__init__()
        self.qkv = nn.Linear(64, 192)
        nn.init.normal_(self.qkv.weight, std=large)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        WEIGHTS
        return torch.softmax(scores, -1) @ v
"""
_SCORES = "scores = q @ k.transpose(-1, -2) / 8"
ATTENTION_LINES = {
    "define": _ATTENTION.replace("WEIGHTS", _SCORES),
    "model": "nn.Sequential(nn.Linear(64, 64), Attention(40.0))",
    "batch": "torch.randn(2, 8, 64), None",
    "forward": "loss = model(x).float().pow(2).mean() * 1e-6",
}
_FEED_FORWARD = {
    "define": """
class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi, self.wo = nn.Linear(16, 64), nn.Linear(64, 16)
        nn.init.normal_(self.wi.weight, std=40.0)
        nn.init.normal_(self.wo.weight, std=200.0)

    def forward(self, x):
        return self.wo(torch.relu(self.wi(x)))
""",
    "model": "nn.Sequential(nn.Linear(16, 16), FeedForward())",
    "batch": "torch.randn(4, 16), None",
    "forward": "loss = model(x).float().square().mean().log()",
}
_RMS = {
    "define": """
class RMSNorm(nn.Module):
    def forward(self, x):
        SQUARES
        return x * torch.rsqrt(squares + 1e-3)
""".replace("SQUARES", "squares = x.pow(2).mean(-1, keepdim=True)"),
    "model": "nn.Sequential(nn.Linear(8, 16), RMSNorm(), nn.Linear(16, 8))",
    "before": "nn.init.normal_(model[0].weight, std=600.0)",
    "scaler": 'torch.amp.GradScaler("cpu", init_scale=2.0**30)',
}
MASKED = {
    "define": """
def attend(x, mask):
    scores = (x @ x.transpose(-1, -2)).float()
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)
""",
    "batch": "torch.randn(4, 8), torch.eye(4, dtype=torch.bool)",
    "before": "mask_row = 1",
    "forward": "y = y.clone()\ny[mask_row] = False\nh = model(x)\n"
    "loss = (attend(h, y) @ h).float().square().mean()",
}
ROPE = {
    "define": """
def rotate(x, positions):
    frequencies = 1.0 / 100 ** (torch.arange(4) / 4)
    ANGLES
    return x * angles.cos().float().repeat(1, 2)
""",
    "batch": "torch.randn(4, 8), torch.arange(4)",
    "before": "positions = torch.arange(4096.0, 4100.0)",
    "forward": "loss = nn.functional.cross_entropy(rotate(model(x), positions), y)",
}
ROUGH = "angles = positions[:, None] @ frequencies[None]"
EXACT = "angles = positions[:, None] * frequencies[None]"
PENALTY = {
    "backward": (
        "gradients = torch.autograd.grad(\n"
        "    scaler.scale(loss), list(model.parameters()), create_graph=True\n"
        ")\n"
        "penalty = sum(g.square().sum() for g in gradients)\n"
        "scaler.scale(loss + penalty).backward()"
    ),
}
DIVIDED_PENALTY = PENALTY["backward"].replace(
    "penalty =", "gradients = [g / scaler.get_scale() for g in gradients]\npenalty ="
)
_ACCUMULATION = {
    "backward": "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\nscaler.update()",
    "step": ("scaler.scale(nn.functional.cross_entropy(model(x).float(), y)).backward()\n" + USUAL),
}
IMAGES = {
    "model": (
        "nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), "
        "nn.Linear(8 * 36, 8))"
    ),
    "batch": "torch.randn(4, 3, 8, 8), torch.arange(4)",
}
_OVERFLOWING = "nn.init.normal_(model[0].weight, std=60000.0)"
WORK = {
    "model": "nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))",
    "batch": "torch.randn(256, 64), torch.arange(256) % 64",
}
BF16_MOMENTS = (
    "fastamp.optim.AdamW(model.parameters(), state_dtype=torch.bfloat16, "
    'state_rounding="{rounding}")'
)
FUSED = {"scaler": 'fastamp.GradScaler("cpu", init_scale=16.0)'}
_VOCABULARY = "nn.Sequential(nn.Linear(8, 8), nn.Linear(8, {size}))"

SICK: dict[str, Sick] = {
    # What is done with the scaler.
    "the optimizer's own step": Sick(
        "step-past-scaler", {"step": "optimizer.step()"}, {"step": USUAL}, "SGD.step()"
    ),
    "two steps on the same gradients": Sick(
        "step-past-scaler",
        {"step": "scaler.step(optimizer)\noptimizer.step()\nscaler.update()"},
        {"step": USUAL},
    ),
    "the optimizer's own step after unscale_": Sick(
        "step-after-unscale",
        {"step": "scaler.unscale_(optimizer)\n" + CLIP + "optimizer.step()\nscaler.update()"},
        {"step": "scaler.unscale_(optimizer)\n" + CLIP + USUAL},
    ),
    "a loss that is scaled twice": Sick(
        "loss-scaled-twice",
        {"backward": "scaler.scale(scaler.scale(loss)).backward()"},
        {"backward": LINES["backward"]},
    ),
    "a scaled loss that is scaled once more": Sick(
        "loss-scaled-twice",
        {"backward": "loss = scaler.scale(loss) / 2\nscaler.scale(loss).backward()"},
        {"backward": "loss = loss / 2\nscaler.scale(loss).backward()"},
    ),
    "a scaled loss that nobody uses": Sick(
        "loss-not-scaled",
        {"backward": "scaler.scale(loss)\nloss.backward()"},
        {"backward": LINES["backward"]},
    ),
    "one of two losses scaled": Sick(
        "one-loss-unscaled",
        {
            "forward": "out = model(x)\n" + LINES["forward"].replace("model(x)", "out"),
            "backward": (
                "scaler.scale(loss).backward(retain_graph=True)\nout.float().pow(2).mean().backward()"
            ),
        },
        {
            "backward": (
                "scaler.scale(loss).backward(retain_graph=True)\n"
                "scaler.scale(out.float().pow(2).mean()).backward()"
            )
        },
    ),
    "a new scaler for each step": Sick(
        "new-scaler-each-step",
        {"backward": f"scaler = {LINES['scaler']}\n{LINES['backward']}"},
        {"backward": LINES["backward"]},
    ),
    "gradients set to 0 before the step": Sick(
        "gradients-zeroed",
        {"step": "optimizer.zero_grad(set_to_none=False)\n" + USUAL},
        {"step": USUAL + "\noptimizer.zero_grad(set_to_none=False)"},
    ),
    "gradients dropped before the step": Sick(
        "gradients-zeroed",
        {"step": "model.zero_grad()\n" + USUAL},
        {"step": USUAL + "\nmodel.zero_grad()"},
        others=("unscale-inside-accumulation",),
    ),
    "unscale_ and update for each micro-batch": Sick(
        "unscale-inside-accumulation", _ACCUMULATION, {"backward": LINES["backward"]}
    ),
    "update for each micro-batch": Sick(
        "unscale-inside-accumulation",
        {"backward": LINES["backward"] + "\nscaler.update()"},
        {"backward": LINES["backward"]},
    ),
    "a division of one's own before the scaler's": Sick(
        "gradients-divided-twice",
        {
            "step": (
                "for p in model.parameters():\n    p.grad.div_(scaler.get_scale())\n" + CLIP + USUAL
            )
        },
        {"step": "scaler.unscale_(optimizer)\n" + CLIP + USUAL},
    ),
    **{
        f"a division of one's own, {how}, before the scaler's": Sick(
            "gradients-divided-twice",
            {"step": division + CLIP + USUAL},
            {"step": "scaler.unscale_(optimizer)\n" + CLIP + USUAL},
        )
        for how, division in DIVISIONS.items()
    },
    "clipping before unscale_": Sick(
        "clip-before-unscale",
        {"step": CLIP + USUAL},
        {"step": "scaler.unscale_(optimizer)\n" + CLIP + USUAL},
    ),
    "clipping by value before unscale_": Sick(
        "clip-before-unscale",
        {"step": "nn.utils.clip_grad_value_(model.parameters(), 0.1)\n" + USUAL},
        {"step": "scaler.clip_grad_value_(optimizer, 0.1)\n" + USUAL},
    ),
    "a gradient penalty with the scale in it": Sick(
        "scaled-gradient-penalty", PENALTY, {"backward": DIVIDED_PENALTY}
    ),
    "a checkpoint without the scaler": Sick(
        "checkpoint-without-scaler",
        {
            "before": "import io",
            "after": (
                'torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, '
                "io.BytesIO())"
            ),
        },
        {
            "after": (
                'torch.save({"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, '
                "io.BytesIO())"
            )
        },
    ),
    "a schedule that moves on skipped steps": Sick(
        "scheduler-on-skipped-step",
        {
            "scaler": 'torch.amp.GradScaler("cpu", init_scale=2.0**120)',
            "before": "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)",
            "after": "schedule.step()",
        },
        {"after": "if not scaler.step_was_skipped:\n    schedule.step()"},
    ),
    "fp16 without a scaler": Sick(
        "fp16-without-scaler",
        {"backward": "loss.backward()", "step": "optimizer.step()"},
        {"backward": LINES["backward"], "step": USUAL},
    ),
    "a scaler for bf16": Sick(
        "scaler-without-fp16",
        {"region": _BF16},
        {"scaler": 'torch.amp.GradScaler("cpu", enabled=False)'},
    ),
    # Regions.
    "backward in the region": Sick(
        "backward-in-region",
        {"backward": f"{_BF16}\n    loss.backward()", "region": _BF16, "step": "optimizer.step()"},
        {"backward": "loss.backward()"},
    ),
    "a region for another device": Sick(
        "region-casts-nothing",
        {**NO_SCALER, "region": 'with torch.autocast("cuda", dtype=torch.bfloat16):'},
        {"region": _BF16},
        "the region on cuda",
    ),
    "weights that have 16 bits already": Sick(
        "region-casts-nothing",
        {
            **NO_SCALER,
            "model": f"{LINES['model']}.bfloat16()",
            "batch": "torch.randn(4, 8).bfloat16(), torch.arange(4)",
            "optimizer": "fastamp.optim.SGD(model.parameters(), lr=0.1)",
        },
        {"model": LINES["model"], "batch": LINES["batch"]},
    ),
    "a loss outside of the region": Sick(
        "loss-in-16-bits",
        {"forward": "out = model(x)", "backward": "scaler.scale(out.square().mean()).backward()"},
        {"backward": "scaler.scale(out.float().square().mean()).backward()"},
    ),
    "the larger part outside of the region": Sick(
        "products-in-fp32",
        {
            **WORK,
            "forward": "h = model[:2](x)",
            "backward": (
                "loss = nn.functional.cross_entropy(model[2](h.float()), y)\n" + LINES["backward"]
            ),
        },
        {
            "forward": "h = model(x)",
            "backward": ("loss = nn.functional.cross_entropy(h.float(), y)\n" + LINES["backward"]),
        },
        "outside of a region",
    ),
    "a model outside of the region that takes turns with one inside": Sick(
        "products-in-fp32",
        {
            **WORK,
            "before": (
                "other = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))\n"
                "beside = torch.optim.SGD(other.parameters(), lr=0.1)"
            ),
            "after": (
                "beside.zero_grad()\nscaler.scale(other(x).square().mean()).backward()\n"
                "scaler.step(beside)\nscaler.update()"
            ),
        },
        {
            "after": (
                "beside.zero_grad()\nwith torch.autocast('cpu', dtype=torch.float16):\n"
                "    h = other(x)\nscaler.scale(h.float().square().mean()).backward()\n"
                "scaler.step(beside)\nscaler.update()"
            )
        },
        "outside of a region",
    ),
    # Numbers.
    "an attention whose scores overflow": Sick(
        "overflow-in-16-bits",
        ATTENTION_LINES,
        {"before": 'fastamp.policies.for_modules(model, {"1": "fp32"})'},
        "bmm (in 1, train.py:15)",
    ),
    "a feed-forward layer that overflows": Sick(
        "overflow-in-16-bits",
        _FEED_FORWARD,
        {"before": 'fastamp.policies.for_modules(model, {"1": "fp32"})'},
        "addmm (in 1.wo, train.py:",
    ),
    "squares that overflow and come back as 0": Sick(
        "overflow-in-16-bits",
        _RMS,
        {"define": _RMS["define"].replace("x.pow", "x.float().pow")},
        "pow.Tensor_Scalar (in 1, train.py:",
        others=("norm-in-16-bits",),
    ),
    "a batch with NaN": Sick(
        "nonfinite-input",
        {
            "before": "data = torch.randn(4, 8).numpy()\ndata[0, 0] = float('nan')\n",
            "batch": "torch.from_numpy(data), torch.arange(4)",
        },
        {"before": "data = torch.randn(4, 8).numpy()\n"},
        "your data, a float32 tensor [4, 8]",
    ),
    "a batch with NaN and no scaler": Sick(
        "nonfinite-input",
        {
            **NO_SCALER,
            "before": "data = torch.randn(4, 8).numpy()\ndata[0, 0] = float('nan')\n",
            "batch": "torch.from_numpy(data), torch.arange(4)",
        },
        {"before": "data = torch.randn(4, 8).numpy()\n"},
        "step 0 stepped with non-finite gradients",
        others=("step-without-scaler",),
    ),
    "a weight that was loaded with NaN": Sick(
        "nonfinite-input",
        {
            "before": (
                "weight = torch.randn(16, 8).numpy()\nweight[0, 0] = float('nan')\n"
                "model[0].weight.data = torch.from_numpy(weight)"
            )
        },
        {"before": ""},
        "the parameter 0.weight",
    ),
    "the log of 0": Sick(
        "nonfinite-in-fp32",
        {"forward": "p = model(x).float() * 0\nloss = -p.log().mean()"},
        {"forward": "p = model(x).float() * 0\nloss = -(p + 1e-6).log().mean()"},
        "log (train.py:",
    ),
    "the norm of 0": Sick(
        "nonfinite-in-fp32",
        {"forward": "loss = (model(x).float() * 0).square().sum().sqrt()"},
        {"forward": "loss = (model(x).float() * 0).square().sum().add(1e-6).sqrt()"},
        "backward",
    ),
    "a division by 0 in bf16": Sick(
        "nonfinite-in-fp32",
        {**NO_SCALER, "forward": "h = model(x).float()\nloss = (h / (h - h)).mean()"},
        {"forward": "h = model(x).float()\nloss = (h / (h - h + 1.0)).mean()"},
        others=("step-without-scaler",),
    ),
    "a row that is masked as a whole": Sick(
        "nonfinite-in-fp32",
        MASKED,
        {"before": "mask_row = 1, 0"},
        "a row masked as a whole",
    ),
    "a mask beyond fp16": Sick(
        "mask-beyond-fp16",
        {
            "forward": (
                "h = model(x)\nh = h + (h < 0).to(h.dtype) * -1e9\n"
                "loss = nn.functional.cross_entropy(h.float().clamp(min=-10.0), y)"
            )
        },
        {
            "forward": (
                "h = model(x)\nh = h + (h < 0).to(h.dtype) * -1e4\n"
                "loss = nn.functional.cross_entropy(h.float().clamp(min=-10.0), y)"
            )
        },
    ),
    "an eps that is 0": Sick(
        "eps-is-zero",
        {"forward": "h = model(x)\nloss = (h / (h.abs() + 1e-8)).float().mean()"},
        {"forward": "h = model(x)\nloss = (h / (h.abs() + 1e-3)).float().mean()"},
    ),
    "positions from a product in 16 bits": Sick(
        "positions-in-16-bits",
        {**ROPE, "define": ROPE["define"].replace("ANGLES", ROUGH)},
        {"define": ROPE["define"].replace("ANGLES", EXACT)},
        "cos",
    ),
    "statistics that a skipped step has left": Sick(
        "overflow-in-16-bits",
        {**IMAGES, "before": _OVERFLOWING},
        {"before": ""},
        "norm-statistics-not-finite",
        others=("norm-statistics-not-finite",),
    ),
    "a softmax of large logits": Sick(
        "softmax-in-16-bits",
        {
            "before": "nn.init.normal_(model[0].weight, std=400.0)",
            "forward": "p = torch.softmax(model(x), -1)\nloss = p.float().square().mean()",
        },
        {"forward": "p = torch.softmax(model(x).float(), -1)\nloss = p.square().mean()"},
    ),
    "a long sum": Sick(
        "long-sum-in-16-bits",
        {"forward": "h = model(x).repeat(1, 700)\nloss = h.mean(-1).float().square().mean()"},
        {"forward": "h = model(x).repeat(1, 700)\nloss = h.float().mean(-1).square().mean()"},
    ),
    "a variance in fp16": Sick(
        "norm-in-16-bits",
        {"forward": "loss = model(x).var(-1).float().mean()"},
        {"forward": "loss = model(x).float().var(-1).mean()"},
    ),
    "bf16 weights under torch.optim": Sick(
        "half-weights-torch-optim",
        {
            "model": f"{LINES['model']}.bfloat16()",
            "region": "if True:",
            "batch": "torch.randn(4, 8).bfloat16(), torch.arange(4)",
            "forward": "loss = nn.functional.cross_entropy(model(x).float(), y)",
            "backward": "loss.backward()",
            "step": "optimizer.step()",
        },
        {"before": "fastamp.optim.fuse_(optimizer)"},
    ),
    "second moments that cannot shrink": Sick(
        "bf16-second-moments",
        {"optimizer": BF16_MOMENTS.format(rounding="nearest"), **FUSED},
        {"optimizer": BF16_MOMENTS.format(rounding="stochastic")},
    ),
    "a vocabulary that is no multiple of 8": Sick(
        "dims-not-multiple-of-8",
        {"model": _VOCABULARY.format(size=32769)},
        {"model": _VOCABULARY.format(size=32776)},
        "out_features=32769",
    ),
}
