# SPDX-License-Identifier: Apache-2.0
"""fused_sgd_ as a dispatcher op: schema, versions, fake tensors, refusals."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from support.amp_reference import DEVICES
from support.fused_steps import FusedSgd, sgd_

devices = pytest.mark.parametrize("device", DEVICES)
NAMES = [
    "params",
    "grads",
    "momentum_buffers",
    "momentum_steps",
    "masters",
    "group_sizes",
    "lr",
    "momentum",
    "dampening",
    "weight_decay",
    "nesterov",
    "maximize",
    "lr_tensors",
    "weight_copies",
    "copy_of",
]


def optimizer(device="cpu"):
    params = [torch.ones(3, 4, device=device), torch.ones(5, device=device).bfloat16()]
    for p in params:
        p.grad = torch.full_like(p, 2.0)
    groups = [
        {"params": params[:1], "lr": 0.5, "momentum": 0.9},
        {"params": params[1:], "lr": 0.25},
    ]
    return FusedSgd(groups)


@devices
def test_opcheck(device):
    flag = torch.zeros((), device=device)
    torch.library.opcheck(sgd_, optimizer(device).arguments())
    torch.library.opcheck(
        sgd_,
        optimizer(device).arguments([torch.ones((), device=device)] * 2),
        {"inv_scale": flag + 0.5, "clip_coef": flag + 0.5, "found_inf": flag, "clip_value": 0.1},
    )


@devices
def test_versions_of_what_is_written_move(device):
    own = optimizer(device)
    sgd_(*own.arguments(), inv_scale=torch.tensor(0.5, device=device))
    arguments = dict(zip(NAMES, own.arguments(), strict=True))
    for name in ("params", "grads", "momentum_buffers", "momentum_steps", "masters"):
        assert all(t._version == 1 for t in arguments[name]), name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors(device):
    with FakeTensorMode():
        assert sgd_(*optimizer(device).arguments()) is None


def test_leaves_that_require_grad_get_no_node():
    p = torch.ones(3, requires_grad=True)
    p.grad = torch.ones(3)
    FusedSgd([{"params": [p], "lr": 0.5}]).step()
    assert p.grad_fn is None
    assert p.tolist() == [0.5] * 3


def test_edit_of_a_saved_parameter_is_noticed_by_backward():
    p = torch.ones(3, requires_grad=True)
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    FusedSgd([{"params": [p], "lr": 0.5}]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


REFUSED = {
    "no parameters": (
        {key: [] for key in ("params", "grads", "momentum_buffers", "momentum_steps", "masters")}
        | {"group_sizes": [0, 0], "found_inf": torch.zeros(())},
        ValueError,
        "expected at least one parameter, got none",
    ),
    "sizes": ({"group_sizes": [1, 2]}, ValueError, "add up to the number of params, 2, got 3"),
    "negative size": ({"group_sizes": [3, -1]}, ValueError, "of at least 0, got -1"),
    "too few rates": ({"lr": [0.1]}, ValueError, "expected lr to have 2 elements.* got 1"),
    "too few flags": ({"nesterov": [True]}, ValueError, "nesterov to have 2 elements.* got 1"),
    "no buffer": (
        {"momentum_buffers": []},
        ValueError,
        "expected more than 0 momentum_buffers",
    ),
    "a buffer too many": (
        {"momentum_buffers": [torch.zeros(3, 4), torch.zeros(5)]},
        ValueError,
        "expected 1 momentum_buffers, .* got 2",
    ),
    "buffer of another shape": (
        {"momentum_buffers": [torch.zeros(4, 3)]},
        ValueError,
        r"expected momentum_buffers\[0\] of shape \[3, 4\].* got \[4, 3\]",
    ),
    "fp16 buffer": (
        {"momentum_buffers": [torch.zeros(3, 4).half()]},
        TypeError,
        r"expected momentum_buffers\[0\] to be Float or BFloat16, got Half",
    ),
    "no master": ({"masters": []}, ValueError, "expected more than 0 masters"),
    "fp64 gradient": (
        {"grads": [torch.ones(3, 4).double(), torch.ones(5)]},
        TypeError,
        r"expected grads\[0\] to be Float, Half or BFloat16, got Double",
    ),
    "expanded gradient": (
        {"grads": [torch.ones(1).expand(3, 4), torch.ones(5)]},
        ValueError,
        r"expected grads\[0\] to have one memory location per element",
    ),
    "sparse gradient": (
        {"grads": [torch.ones(3, 4).to_sparse(), torch.ones(5)]},
        ValueError,
        r"expected grads\[0\] to be strided, got layout Sparse",
    ),
    "integer counter": (
        {"momentum_steps": [torch.zeros((), dtype=torch.int64)]},
        TypeError,
        r"expected momentum_steps\[0\] to be Float, got Long",
    ),
    "two flags": ({"found_inf": torch.zeros(2)}, ValueError, "found_inf to have one element"),
    "negative bound": (
        {"clip_value": -0.5},
        ValueError,
        "expected clip_value to be None or at least 0, got -0.5",
    ),
    "NaN bound": ({"clip_value": float("nan")}, ValueError, "clip_value .* got nan"),
    "double scale": (
        {"inv_scale": torch.ones((), dtype=torch.float64)},
        TypeError,
        "expected inv_scale to be Float, got Double",
    ),
    "half rate": (
        {"lr_tensors": [torch.ones(()), torch.ones(()).half()]},
        TypeError,
        "expected lr_tensors to be Float, got Half",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_calls_change_nothing(case):
    changes, error, message = REFUSED[case]
    own = optimizer()
    arguments = dict(zip(NAMES, own.arguments(), strict=True)) | changes
    amp_step = {
        k: arguments.pop(k) for k in ("found_inf", "inv_scale", "clip_value") if k in arguments
    }
    with pytest.raises(error, match="fused_sgd_: .*" + message):
        sgd_(*arguments.values(), **amp_step)
    for p in (g["params"][0] for g in own.groups):
        assert p.eq(1.0).all()
        assert p._version == 0
        assert p.grad.eq(2.0).all()
        assert own.steps[p].item() == 0.0
