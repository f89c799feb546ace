# SPDX-License-Identifier: Apache-2.0
"""muon_momentum_ and muon_apply_ as dispatcher ops: arithmetic, schema, versions, refusals."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from support.amp_reference import DEVICES
from support.fused_steps import assert_same_step

momentum_op = torch.ops.fastamp.muon_momentum_
apply_ = torch.ops.fastamp.muon_apply_
devices = pytest.mark.parametrize("device", DEVICES)


def momentum_(*arguments, momentum_steps=(), **amp_step):
    """The op; few calls have buffers that are rounded by noise."""
    return momentum_op(*arguments, momentum_steps=list(momentum_steps), **amp_step)


def momentum_lists(device="cpu"):
    """Arguments: a dense matrix, a strided one, one without elements; updates of three dtypes."""
    grads = [torch.randn(3, 5, device=device), torch.randn(4, 12, device=device)[:, ::2]]
    grads.append(torch.zeros(0, 4, device=device))
    buffers = [
        torch.randn_like(g).to(torch.bfloat16 if i else g.dtype) for i, g in enumerate(grads)
    ]
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    updates = [
        torch.zeros(g.shape, dtype=dtype, device=device)
        for g, dtype in zip(grads, dtypes, strict=True)
    ]
    return [grads, buffers, updates, [2, 1], [0.9, 0.5], [True, False]]


def apply_lists(device="cpu"):
    params = [torch.randn(3, 5, device=device), torch.randn(2, 2, device=device).bfloat16()]
    updates = [torch.randn(3, 5, device=device).bfloat16(), torch.randn(2, 2, device=device)]
    masters = [params[1].float()]
    return [params, updates, masters, [1, 1], [0.5, 0.1], [1.0, 2.0], [0.0, 0.1], [], [], []]


@devices
def test_momentum_is_torchs_lerp(device):
    torch.manual_seed(0)
    arguments = momentum_lists(device)
    grads, buffers, updates = ([t.clone() for t in tensors] for tensors in arguments[:3])
    momentum_(*arguments, inv_scale=torch.tensor(0.25, device=device))
    options = zip((0.9, 0.9, 0.5), (True, True, False), strict=True)
    for i, (momentum, nesterov) in enumerate(options):
        g = grads[i] * 0.25
        b = buffers[i].float().lerp(g, 1 - momentum)
        u = g.lerp(b, momentum) if nesterov else b
        assert_same_step(arguments[0][i], g)
        assert_same_step(arguments[1][i], b.to(buffers[i].dtype))
        assert_same_step(arguments[2][i], u.to(updates[i].dtype))


@devices
def test_apply_is_torchs_decay_and_addition(device):
    torch.manual_seed(1)
    arguments = apply_lists(device)
    weights = [arguments[0][0].clone(), arguments[2][0].clone()]
    apply_(*arguments)
    weights[0].add_(arguments[1][0], alpha=-0.5)
    weights[1].mul_(1 - 0.1 * 0.1).add_(arguments[1][1], alpha=-0.1 * 2.0)
    assert_same_step(arguments[0][0], weights[0])
    assert_same_step(arguments[2][0], weights[1])
    assert torch.equal(arguments[0][1], arguments[2][0].bfloat16())


@devices
def test_opcheck(device):
    flag = torch.zeros((), device=device)
    counts = [torch.zeros((), device=device)]
    for noise in (
        {"momentum_steps": []},
        {"noise_origins": [-1, 7, -1], "momentum_steps": counts},
    ):
        torch.library.opcheck(momentum_op, momentum_lists(device), {"found_inf": flag, **noise})
    torch.library.opcheck(apply_, apply_lists(device), {"found_inf": flag})


@devices
def test_versions_of_what_is_written_move(device):
    arguments = momentum_lists(device)
    momentum_(*arguments, write_grads=False)
    assert [t._version for t in arguments[0]] == [0, 0, 0]
    assert all(t._version == 1 for tensors in arguments[1:3] for t in tensors)
    arguments = apply_lists(device)
    before = [t._version for t in arguments[1]]
    apply_(*arguments)
    assert [t._version for t in arguments[1]] == before
    assert all(t._version == 1 for t in [*arguments[0], *arguments[2]])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors(device):
    with FakeTensorMode():
        assert momentum_(*momentum_lists(device)) is None
        assert apply_(*apply_lists(device)) is None


BAD_MOMENTUM = {
    "no matrices": ({0: [], 1: [], 2: [], 3: [0, 0]}, "expected at least one parameter"),
    "fewer buffers": ({1: []}, "expected 3 momentum_buffers, one for each of updates, got 0"),
    "fewer gradients": ({0: []}, "expected 3 grads, one for each of params, got 0"),
    "group sizes": ({3: [1, 1]}, "expected group_sizes to add up to the number of params, 3"),
    "momenta": ({4: [0.9]}, "expected momentum to have 2 elements"),
    "nesterov": ({5: [True]}, "expected nesterov to have 2 elements"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_MOMENTUM.values(), ids=BAD_MOMENTUM)
def test_lists_that_do_not_fit_are_refused(changes, message):
    arguments = momentum_lists()
    for index, value in changes.items():
        arguments[index] = value
    with pytest.raises(ValueError, match="muon_momentum_: " + message):
        momentum_(*arguments)


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (
            {"noise_origins": [1, 2]},
            "expected no noise_origins or 3, one for each of params, got 2",
        ),
        ({"noise_origins": [-1, 7, -1]}, "expected more than 0 momentum_steps, one for each noise"),
        ({"momentum_steps": [torch.zeros(())]}, "expected 0 momentum_steps, one for each noise"),
        (
            {"noise_origins": [-1, 7, -1], "momentum_steps": [torch.zeros(2)]},
            r"expected momentum_steps\[0\] to have one element, got 2",
        ),
    ],
)
def test_noise_that_does_not_fit_is_refused(noise, message):
    with pytest.raises(ValueError, match="muon_momentum_: " + message):
        momentum_(*momentum_lists(), **noise)


@devices
def test_counters_of_noise_move_unless_the_step_is_skipped(device):
    noise = {"noise_origins": [-1, 7, -1], "momentum_steps": [torch.zeros((), device=device)]}
    for flag, expected in ((0.0, 1), (1.0, 1), (0.0, 2)):
        momentum_(*momentum_lists(device), found_inf=torch.tensor(flag, device=device), **noise)
        assert noise["momentum_steps"][0].item() == expected


def test_tensors_that_do_not_fit_are_refused_and_nothing_changes():
    def refuses(op, lists, place, value, error, message, **amp_step):
        arguments = lists()
        arguments[place[0]][place[1]] = value
        before = [t.clone() for tensors in arguments[:3] for t in tensors]
        with pytest.raises(error, match=message):
            op(*arguments, **amp_step)
        after = [t for tensors in arguments[:3] for t in tensors]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))

    zeros = torch.zeros
    for place, value, error, message in (
        ((2, 0), zeros(3, 5, dtype=torch.double), TypeError, r"updates\[0\] to be Float, Half"),
        ((2, 0), zeros(3, 10)[:, ::2], ValueError, r"updates\[0\] to be dense"),
        ((0, 0), zeros(5, 3), ValueError, r"grads\[0\] of shape \[3, 5\]"),
        ((0, 0), zeros(3, 5, dtype=torch.int), TypeError, r"grads\[0\] to be Float"),
        ((1, 1), zeros(6, 4), ValueError, r"momentum_buffers\[1\] of shape \[4, 6\]"),
        ((1, 1), zeros(4, 6).half(), TypeError, r"momentum_buffers\[1\] to be Float or BFloat16"),
    ):
        refuses(momentum_, momentum_lists, place, value, error, "muon_momentum_: .*" + message)
    amp_step = {"clip_value": -1.0}
    same = momentum_lists()[0][2]
    refuses(momentum_, momentum_lists, (0, 2), same, ValueError, "expected clip_value", **amp_step)
    for place, value, error, message in (
        ((1, 0), zeros(5, 3), ValueError, r"updates\[0\] of shape \[3, 5\]"),
        ((2, 0), zeros(2, 2).half(), TypeError, r"masters\[0\] to be Float or Short"),
        ((0, 0), zeros(3, 5, dtype=torch.double), TypeError, r"params\[0\] to be Float, Half"),
    ):
        refuses(apply_, apply_lists, place, value, error, "muon_apply_: .*" + message)
