# SPDX-License-Identifier: Apache-2.0
"""Programs that look like those of doctor_programs and are right: nothing may be said of them."""

from __future__ import annotations

from debugging.doctor_programs import (
    ATTENTION_LINES,
    BF16_MOMENTS,
    CLIP,
    DIVIDED_PENALTY,
    DIVISIONS,
    EXACT,
    FUSED,
    IMAGES,
    LINES,
    MASKED,
    NO_SCALER,
    PENALTY,
    ROPE,
    ROUGH,
    SICK,
    USUAL,
    WORK,
)

_TWO_LOSSES = "out = model(x)\n" + LINES["forward"].replace("model(x)", "out")

HEALTHY: dict[str, dict[str, str]] = {
    "as it is": {},
    "bf16 without a scaler": NO_SCALER,
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
        "step": "scaler.unscale_(optimizer)\n" + CLIP + USUAL,
    },
    "a batch that is left out after unscale_": {
        "step": (
            "scaler.unscale_(optimizer)\n"
            "if step == 1:\n"
            "    scaler.update()\n"
            "    optimizer.zero_grad()\n"
            "    continue\n" + USUAL
        )
    },
    "gradients divided by hand and stepped by hand": {
        "step": (
            "for p in model.parameters():\n    p.grad.div_(scaler.get_scale())\noptimizer.step()"
        )
    },
    **{
        f"gradients divided by hand, {how}, clipped and stepped by hand": {
            "step": division + CLIP + "optimizer.step()"
        }
        for how, division in DIVISIONS.items()
    },
    "gradients halved before the scaler's step": {
        "step": "for p in model.parameters():\n    p.grad.mul_(0.5)\n" + USUAL
    },
    "the scaler's own clipping": {"step": "scaler.clip_grad_norm_(optimizer, 0.1)\n" + USUAL},
    "gradients zeroed after the step": {"after": "optimizer.zero_grad(set_to_none=False)"},
    "a gradient penalty without the scale": {"backward": DIVIDED_PENALTY},
    "a gradient penalty of an unscaled loss": {
        "backward": PENALTY["backward"].replace("scaler.scale(loss), list", "loss, list")
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
    "an attention with a mask that is not whole": {**MASKED, "before": "mask_row = 1, 0"},
    "an attention whose scores fit": {
        **ATTENTION_LINES,
        "model": ("nn.Sequential(nn.Linear(64, 64), Attention(0.1))"),
    },
    "an eps in fp32": {"forward": "h = model(x)\nloss = (h / (h.abs().float() + 1e-8)).mean()"},
    "positions in fp32": {**ROPE, "define": ROPE["define"].replace("ANGLES", EXACT)},
    "few positions in 16 bits": {
        **ROPE,
        "define": ROPE["define"].replace("ANGLES", ROUGH),
        "before": "positions = torch.arange(4.0)",
    },
    "a loss that a test makes inf": {
        "backward": ("scaler.scale(loss * (float('inf') if step == 1 else 1.0)).backward()")
    },
    "a loss that a test makes NaN, without a scaler": {
        **NO_SCALER,
        "backward": "(loss * (float('nan') if step == 2 else 1.0)).backward()",
    },
    "statistics of numbers that fit": IMAGES,
    "statistics of a step that is skipped for its gradients": {
        **IMAGES,
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
        "optimizer": BF16_MOMENTS.format(rounding="nearest")[:-1] + ", betas=(0.9, 0.95))",
        **FUSED,
    },
    "a small layer of an odd size": {
        "model": "nn.Sequential(nn.Linear(8, 17), nn.ReLU(), nn.Linear(17, 9))",
    },
    "a small head in fp32": {
        **WORK,
        "before": "head = nn.Linear(64, 4)",
        "forward": "h = model(x)",
        "backward": (
            "loss = nn.functional.cross_entropy(head(h.float()), y % 4)\n" + LINES["backward"]
        ),
    },
    "a run in fp32 ahead of the one in 16 bits, and one after it": {
        **WORK,
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
        **WORK,
        "before": 'fastamp.policies.for_modules(model, {"2": "fp32"})',
    },
    "the larger part in a region that is switched off": {
        **WORK,
        "forward": "h = model[:2](x)",
        "backward": (
            "with torch.autocast('cpu', enabled=False):\n"
            "    loss = nn.functional.cross_entropy(model[2](h.float()), y)\n" + LINES["backward"]
        ),
    },
    "a part in fp32 by a policy": {
        **WORK,
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
        "backward": PENALTY["backward"].replace(
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
            "    torch._foreach_sub_(list(model.parameters()), moved)\n" + USUAL
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
