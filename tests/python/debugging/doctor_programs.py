# SPDX-License-Identifier: Apache-2.0
"""Programs that train wrongly, each with its cure, and programs that look like them and are right.

Each is the same small training program with a few of its lines replaced. ``SICK`` says which rule
names the cause; ``HEALTHY`` are programs of which nothing may be said.
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


_USUAL = LINES["step"]
_CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
# Of gradients by the scale, otherwise than in place.
_DIVISIONS = {
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
_NO_SCALER = {"region": _BF16, "backward": "loss.backward()", "step": "optimizer.step()"}
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
_ATTENTION_LINES = {
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
_MASKED = {
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
_ROPE = {
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
_ROUGH = "angles = positions[:, None] @ frequencies[None]"
_EXACT = "angles = positions[:, None] * frequencies[None]"
_PENALTY = {
    "backward": (
        "gradients = torch.autograd.grad(\n"
        "    scaler.scale(loss), list(model.parameters()), create_graph=True\n"
        ")\n"
        "penalty = sum(g.square().sum() for g in gradients)\n"
        "scaler.scale(loss + penalty).backward()"
    ),
}
_DIVIDED_PENALTY = _PENALTY["backward"].replace(
    "penalty =", "gradients = [g / scaler.get_scale() for g in gradients]\npenalty ="
)
_ACCUMULATION = {
    "backward": "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\nscaler.update()",
    "step": (
        "scaler.scale(nn.functional.cross_entropy(model(x).float(), y)).backward()\n" + _USUAL
    ),
}
_IMAGES = {
    "model": (
        "nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), "
        "nn.Linear(8 * 36, 8))"
    ),
    "batch": "torch.randn(4, 3, 8, 8), torch.arange(4)",
}
_OVERFLOWING = "nn.init.normal_(model[0].weight, std=60000.0)"
_WORK = {
    "model": "nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))",
    "batch": "torch.randn(256, 64), torch.arange(256) % 64",
}
_BF16_MOMENTS = (
    "fastamp.optim.AdamW(model.parameters(), state_dtype=torch.bfloat16, "
    'state_rounding="{rounding}")'
)
_FUSED = {"scaler": 'fastamp.GradScaler("cpu", init_scale=16.0)'}
_VOCABULARY = "nn.Sequential(nn.Linear(8, 8), nn.Linear(8, {size}))"

SICK: dict[str, Sick] = {
    # What is done with the scaler.
    "the optimizer's own step": Sick(
        "step-past-scaler", {"step": "optimizer.step()"}, {"step": _USUAL}, "SGD.step()"
    ),
    "two steps on the same gradients": Sick(
        "step-past-scaler",
        {"step": "scaler.step(optimizer)\noptimizer.step()\nscaler.update()"},
        {"step": _USUAL},
    ),
    "the optimizer's own step after unscale_": Sick(
        "step-after-unscale",
        {"step": "scaler.unscale_(optimizer)\n" + _CLIP + "optimizer.step()\nscaler.update()"},
        {"step": "scaler.unscale_(optimizer)\n" + _CLIP + _USUAL},
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
        {"step": "optimizer.zero_grad(set_to_none=False)\n" + _USUAL},
        {"step": _USUAL + "\noptimizer.zero_grad(set_to_none=False)"},
    ),
    "gradients dropped before the step": Sick(
        "gradients-zeroed",
        {"step": "model.zero_grad()\n" + _USUAL},
        {"step": _USUAL + "\nmodel.zero_grad()"},
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
                "for p in model.parameters():\n    p.grad.div_(scaler.get_scale())\n"
                + _CLIP
                + _USUAL
            )
        },
        {"step": "scaler.unscale_(optimizer)\n" + _CLIP + _USUAL},
    ),
    **{
        f"a division of one's own, {how}, before the scaler's": Sick(
            "gradients-divided-twice",
            {"step": division + _CLIP + _USUAL},
            {"step": "scaler.unscale_(optimizer)\n" + _CLIP + _USUAL},
        )
        for how, division in _DIVISIONS.items()
    },
    "clipping before unscale_": Sick(
        "clip-before-unscale",
        {"step": _CLIP + _USUAL},
        {"step": "scaler.unscale_(optimizer)\n" + _CLIP + _USUAL},
    ),
    "clipping by value before unscale_": Sick(
        "clip-before-unscale",
        {"step": "nn.utils.clip_grad_value_(model.parameters(), 0.1)\n" + _USUAL},
        {"step": "scaler.clip_grad_value_(optimizer, 0.1)\n" + _USUAL},
    ),
    "a gradient penalty with the scale in it": Sick(
        "scaled-gradient-penalty", _PENALTY, {"backward": _DIVIDED_PENALTY}
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
        {"backward": LINES["backward"], "step": _USUAL},
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
        {**_NO_SCALER, "region": 'with torch.autocast("cuda", dtype=torch.bfloat16):'},
        {"region": _BF16},
        "the region on cuda",
    ),
    "weights that have 16 bits already": Sick(
        "region-casts-nothing",
        {
            **_NO_SCALER,
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
            **_WORK,
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
            **_WORK,
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
        _ATTENTION_LINES,
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
            **_NO_SCALER,
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
        {**_NO_SCALER, "forward": "h = model(x).float()\nloss = (h / (h - h)).mean()"},
        {"forward": "h = model(x).float()\nloss = (h / (h - h + 1.0)).mean()"},
        others=("step-without-scaler",),
    ),
    "a row that is masked as a whole": Sick(
        "nonfinite-in-fp32",
        _MASKED,
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
        {**_ROPE, "define": _ROPE["define"].replace("ANGLES", _ROUGH)},
        {"define": _ROPE["define"].replace("ANGLES", _EXACT)},
        "cos",
    ),
    "statistics that a skipped step has left": Sick(
        "overflow-in-16-bits",
        {**_IMAGES, "before": _OVERFLOWING},
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
        {"optimizer": _BF16_MOMENTS.format(rounding="nearest"), **_FUSED},
        {"optimizer": _BF16_MOMENTS.format(rounding="stochastic")},
    ),
    "a vocabulary that is no multiple of 8": Sick(
        "dims-not-multiple-of-8",
        {"model": _VOCABULARY.format(size=32769)},
        {"model": _VOCABULARY.format(size=32776)},
        "out_features=32769",
    ),
}

_TWO_LOSSES = "out = model(x)\n" + LINES["forward"].replace("model(x)", "out")

HEALTHY: dict[str, dict[str, str]] = {
    "as it is": {},
    "bf16 without a scaler": _NO_SCALER,
    "unscale_, a look at the gradients, and the optimizer's own step": {
        "step": (
            "scaler.unscale_(optimizer)\n"
            "if nn.utils.clip_grad_norm_(model.parameters(), 0.1).isfinite():\n"
            "    optimizer.step()\n"
            "scaler.update()"
        )
    },
    "two losses, scaled each": {
        "forward": _TWO_LOSSES,
        "backward": (
            "scaler.scale(loss).backward(retain_graph=True)\n"
            "scaler.scale(out.float().pow(2).mean()).backward()"
        ),
    },
    "two losses, scaled together": {
        "forward": _TWO_LOSSES,
        "backward": "scaler.scale(loss + out.float().pow(2).mean()).backward()",
    },
    "a loss that is scaled by hand": {
        "before": "scaler.scale(torch.zeros(()))",
        "backward": "(loss * scaler.get_scale()).backward()",
    },
    "a loss divided for two micro-batches": {
        "backward": "scaler.scale(loss / 2).backward(retain_graph=True)\n" * 2,
    },
    "two micro-batches and one unscale_": {
        "backward": "scaler.scale(loss / 2).backward(retain_graph=True)\n" * 2,
        "step": "scaler.unscale_(optimizer)\n" + _CLIP + _USUAL,
    },
    "a batch that is left out after unscale_": {
        "step": (
            "scaler.unscale_(optimizer)\n"
            "if step == 1:\n"
            "    scaler.update()\n"
            "    optimizer.zero_grad()\n"
            "    continue\n" + _USUAL
        )
    },
    "gradients divided by hand and stepped by hand": {
        "step": (
            "for p in model.parameters():\n    p.grad.div_(scaler.get_scale())\noptimizer.step()"
        )
    },
    **{
        f"gradients divided by hand, {how}, clipped and stepped by hand": {
            "step": division + _CLIP + "optimizer.step()"
        }
        for how, division in _DIVISIONS.items()
    },
    "gradients halved before the scaler's step": {
        "step": "for p in model.parameters():\n    p.grad.mul_(0.5)\n" + _USUAL
    },
    "the scaler's own clipping": {"step": "scaler.clip_grad_norm_(optimizer, 0.1)\n" + _USUAL},
    "gradients zeroed after the step": {"after": "optimizer.zero_grad(set_to_none=False)"},
    "a gradient penalty without the scale": {"backward": _DIVIDED_PENALTY},
    "a gradient penalty of an unscaled loss": {
        "backward": _PENALTY["backward"].replace("scaler.scale(loss), list", "loss, list")
    },
    "a checkpoint in two files": {
        "before": "import io",
        "after": (
            "torch.save(optimizer.state_dict(), io.BytesIO())\n"
            "torch.save(scaler.state_dict(), io.BytesIO())"
        ),
    },
    "a reentrant checkpoint": {
        "before": "from torch.utils.checkpoint import checkpoint",
        "forward": (
            "h = checkpoint(model, x.requires_grad_(), use_reentrant=True)\n"
            "loss = nn.functional.cross_entropy(h, y)"
        ),
    },
    "a function that computes its gradients by a backward pass": {
        "define": """
class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, x):
        ctx.part = part
        ctx.save_for_backward(x)
        return part(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.autocast("cpu", dtype=torch.float16):
            out = ctx.part(x)
        out.backward(gradient)
        return None, x.grad
""",
        "forward": "loss = nn.functional.cross_entropy(Again.apply(model, x.requires_grad_()), y)",
    },
    "two optimizers with a scaler each": {
        "before": (
            "other = nn.Linear(8, 8)\n"
            "beside = torch.optim.SGD(other.parameters(), lr=0.1)\n"
            f"second = {LINES['scaler']}"
        ),
        "forward": LINES["forward"] + "\nmore = other(x).float().square().mean()",
        "after": (
            "beside.zero_grad()\nsecond.scale(more).backward()\nsecond.step(beside)\nsecond.update()"
        ),
    },
    "a first scale that is too large": {
        "scaler": 'torch.amp.GradScaler("cpu", init_scale=2.0**30)',
        "forward": "loss = model(x).float().square().mean()",
    },
    "a mask of -inf": {
        "forward": (
            "h = model(x)\nh = h.masked_fill(y[:, None] == 0, float('-inf'))\n"
            "loss = torch.softmax(h[1:], -1).float().square().mean()"
        )
    },
    "a mask of the lowest number": {
        "forward": (
            "h = model(x)\nh = h.masked_fill(h < 0, torch.finfo(h.dtype).min)\n"
            "loss = torch.softmax(h, -1).float().square().mean()"
        )
    },
    "an attention with a mask that is not whole": {**_MASKED, "before": "mask_row = 1, 0"},
    "an attention whose scores fit": {
        **_ATTENTION_LINES,
        "model": ("nn.Sequential(nn.Linear(64, 64), Attention(0.1))"),
    },
    "an eps in fp32": {"forward": "h = model(x)\nloss = (h / (h.abs().float() + 1e-8)).mean()"},
    "positions in fp32": {**_ROPE, "define": _ROPE["define"].replace("ANGLES", _EXACT)},
    "few positions in 16 bits": {
        **_ROPE,
        "define": _ROPE["define"].replace("ANGLES", _ROUGH),
        "before": "positions = torch.arange(4.0)",
    },
    "a loss that a test makes inf": {
        "backward": ("scaler.scale(loss * (float('inf') if step == 1 else 1.0)).backward()")
    },
    "a loss that a test makes NaN, without a scaler": {
        **_NO_SCALER,
        "backward": "(loss * (float('nan') if step == 2 else 1.0)).backward()",
    },
    "statistics of numbers that fit": _IMAGES,
    "statistics of a step that is skipped for its gradients": {
        **_IMAGES,
        "scaler": 'torch.amp.GradScaler("cpu", init_scale=2.0**30)',
    },
    "a schedule that waits for a step": {
        "scaler": 'torch.amp.GradScaler("cpu", init_scale=2.0**120)',
        "before": "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)",
        "after": "if not scaler.step_was_skipped:\n    schedule.step()",
    },
    "a layer norm of 16-bit numbers": {
        "model": "nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))",
    },
    "a long sum of 16-bit numbers in fp32": {
        "forward": (
            "h = model(x).repeat(1, 700)\n"
            "loss = h.sum(-1, dtype=torch.float32).square().mean() * 1e-6"
        )
    },
    "bf16 weights that have fp32 masters": {
        **SICK["bf16 weights under torch.optim"].lines,
        "optimizer": "fastamp.optim.SGD(model.parameters(), lr=0.1)",
    },
    "second moments in bf16 that follow": {
        "optimizer": _BF16_MOMENTS.format(rounding="nearest")[:-1] + ", betas=(0.9, 0.95))",
        **_FUSED,
    },
    "a small layer of an odd size": {
        "model": "nn.Sequential(nn.Linear(8, 17), nn.ReLU(), nn.Linear(17, 9))",
    },
    "a small head in fp32": {
        **_WORK,
        "before": "head = nn.Linear(64, 4)",
        "forward": "h = model(x)",
        "backward": (
            "loss = nn.functional.cross_entropy(head(h.float()), y % 4)\n" + LINES["backward"]
        ),
    },
    "a run in fp32 ahead of the one in 16 bits, and one after it": {
        **_WORK,
        "before": (
            "def in_fp32():\n"
            "    other = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))\n"
            "    beside = torch.optim.SGD(other.parameters(), lr=0.1)\n"
            "    for _ in range(2):\n"
            "        other(torch.randn(256, 64)).square().mean().backward()\n"
            "        beside.step()\n"
            "in_fp32()"
        ),
        "after": "if step == 2:\n    in_fp32()",
    },
    "the larger part in fp32 by a policy for its module": {
        **_WORK,
        "before": 'fastamp.policies.for_modules(model, {"2": "fp32"})',
    },
    "the larger part in a region that is switched off": {
        **_WORK,
        "forward": "h = model[:2](x)",
        "backward": (
            "with torch.autocast('cpu', enabled=False):\n"
            "    loss = nn.functional.cross_entropy(model[2](h.float()), y)\n" + LINES["backward"]
        ),
    },
    "a part in fp32 by a policy": {
        **_WORK,
        "before": 'fastamp.policies.for_modules(model, {"2": {"linear": "fp32"}})',
    },
    "sharpness-aware steps by the scaler's passes": {
        "scaler": 'fastamp.GradScaler("cpu", init_scale=16.0)',
        "backward": (
            "with scaler.pass_(optimizer):\n"
            "    scaler.scale(loss).backward()\n"
            "with torch.no_grad():\n"
            "    before = [p.clone() for p in model.parameters()]\n"
            "    torch._foreach_add_(\n"
            "        list(model.parameters()), [p.grad for p in model.parameters()], alpha=0.05\n"
            "    )\n"
            "optimizer.zero_grad()\n"
            "with torch.autocast('cpu', dtype=torch.float16):\n"
            "    loss = nn.functional.cross_entropy(model(x), y)\n"
            "scaler.scale(loss).backward()\n"
            "with torch.no_grad():\n"
            "    torch._foreach_copy_(list(model.parameters()), before)"
        ),
    },
    "a gradient penalty by the scaler's unscale": {
        "scaler": 'fastamp.GradScaler("cpu", init_scale=16.0)',
        "backward": _PENALTY["backward"].replace(
            "penalty =", "gradients = scaler.unscale(gradients)\npenalty ="
        ),
    },
    "LBFGS by the scaler's passes": {
        "scaler": 'fastamp.GradScaler("cpu", init_scale=16.0)',
        "optimizer": "torch.optim.LBFGS(model.parameters(), max_iter=2)",
        "backward": (
            "def closure():\n"
            "    with scaler.pass_(optimizer):\n"
            "        optimizer.zero_grad()\n"
            "        with torch.autocast('cpu', dtype=torch.float16):\n"
            "            again = nn.functional.cross_entropy(model(x), y)\n"
            "        scaler.scale(again).backward()\n"
            "    return again"
        ),
        "step": "optimizer.step(closure)\nscaler.update()",
    },
    "sharpness-aware steps": {
        "step": (
            "with torch.no_grad():\n"
            "    moved = [p.grad / scaler.get_scale() * 0.05 for p in model.parameters()]\n"
            "    torch._foreach_add_(list(model.parameters()), moved)\n"
            "optimizer.zero_grad()\n"
            "with torch.autocast('cpu', dtype=torch.float16):\n"
            "    loss = nn.functional.cross_entropy(model(x), y)\n"
            "scaler.scale(loss).backward()\n"
            "with torch.no_grad():\n"
            "    torch._foreach_sub_(list(model.parameters()), moved)\n" + _USUAL
        )
    },
}

_BY_HAND = "gradients divided by hand and stepped by hand"

#: By rule, programs of ``HEALTHY`` that look like those it names.
LOOK_ALIKES: dict[str, tuple[str, ...]] = {
    "nonfinite-input": ("a loss that a test makes inf",),
    "overflow-in-16-bits": ("an attention whose scores fit", "a first scale that is too large"),
    "nonfinite-in-fp32": ("an attention with a mask that is not whole", "a mask of -inf"),
    "step-without-scaler": ("a loss that a test makes NaN, without a scaler",),
    "loss-scaled-twice": ("a loss divided for two micro-batches",),
    "loss-not-scaled": ("a loss that is scaled by hand",),
    "one-loss-unscaled": ("two losses, scaled each", "two losses, scaled together"),
    "gradients-divided-twice": (_BY_HAND, "gradients halved before the scaler's step"),
    "gradients-zeroed": ("gradients zeroed after the step",),
    "step-after-unscale": ("unscale_, a look at the gradients, and the optimizer's own step",),
    "unscale-inside-accumulation": (
        "two micro-batches and one unscale_",
        "a batch that is left out after unscale_",
    ),
    "new-scaler-each-step": ("two optimizers with a scaler each",),
    "scaled-gradient-penalty": (
        "a gradient penalty without the scale",
        "a gradient penalty of an unscaled loss",
    ),
    "checkpoint-without-scaler": ("a checkpoint in two files",),
    "norm-statistics-not-finite": ("statistics of a step that is skipped for its gradients",),
    "half-weights-torch-optim": ("bf16 weights that have fp32 masters",),
    "fp16-without-scaler": ("bf16 without a scaler",),
    "scaler-without-fp16": ("as it is",),
    "region-casts-nothing": ("a small head in fp32",),
    "backward-in-region": ("a function that computes its gradients by a backward pass",),
    "step-past-scaler": (_BY_HAND, "sharpness-aware steps"),
    "clip-before-unscale": ("the scaler's own clipping", "two micro-batches and one unscale_"),
    "scheduler-on-skipped-step": ("a schedule that waits for a step",),
    "eps-is-zero": ("an eps in fp32",),
    "norm-in-16-bits": ("a layer norm of 16-bit numbers",),
    "softmax-in-16-bits": ("an attention whose scores fit",),
    "positions-in-16-bits": ("positions in fp32", "few positions in 16 bits"),
    "products-in-fp32": (
        "a small head in fp32",
        "a part in fp32 by a policy",
        "the larger part in fp32 by a policy for its module",
        "the larger part in a region that is switched off",
        "a run in fp32 ahead of the one in 16 bits, and one after it",
    ),
    "long-sum-in-16-bits": ("a long sum of 16-bit numbers in fp32",),
    "mask-beyond-fp16": ("a mask of the lowest number",),
    "dims-not-multiple-of-8": ("a small layer of an odd size",),
    "loss-in-16-bits": ("a long sum of 16-bit numbers in fp32",),
    "bf16-second-moments": ("second moments in bf16 that follow",),
}
