# SPDX-License-Identifier: Apache-2.0
"""What groups say of how state is stored: it decides, whatever is stored, and is never misread."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch

import fastamp
from support.amp_reference import assert_same_bits
from support.optim_state import saved_and_loaded

SHAPES = ((64, 64), (33,))  # With codes in 8 bits, and without.
LAYOUTS = (None, torch.float32, torch.bfloat16, "8bit")


def weights(shapes=SHAPES, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def adam(params, **options):
    return fastamp.optim.AdamW(params, lr=1e-3, **options)


def sgd(params, **options):
    return fastamp.optim.SGD(params, lr=1e-3, momentum=0.9, **options)


def muon(params, **options):
    return fastamp.optim.Muon(params, lr=1e-3, **options)


MATRICES = ((8, 16), (3, 5))
KINDS = {"AdamW": (adam, SHAPES), "SGD": (sgd, SHAPES), "Muon": (muon, MATRICES)}
kinds = pytest.mark.parametrize("kind", KINDS)


def step(optimizer, size=1.0, count=1):
    for _ in range(count):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, size)
        optimizer.step()


def stored_dtypes(optimizer, p):
    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "exp_avg_8")
    state = optimizer.state[p]
    return {state[key].dtype for key in moments if key in state}


def dtype_of(layout, p):
    if layout == "8bit":
        return torch.uint8 if p.numel() >= 4096 else torch.bfloat16
    return layout or torch.float32


# --- a group that is edited ---


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(LAYOUTS, 2)))
def test_moments_are_converted_at_the_step_after_an_edit(first, second):
    params = weights()
    optimizer = adam(params, state_dtype=first)
    step(optimizer)
    optimizer.param_groups[0]["state_dtype"] = second
    step(optimizer)
    for p in params:
        assert stored_dtypes(optimizer, p) == {dtype_of(second, p)}
        assert optimizer.state[p]["step"] == 2


@kinds
@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16], ids=str)
def test_momentum_is_converted_too(kind, first):
    make, shapes = KINDS[kind]
    params = weights(shapes)
    optimizer = make(params, state_dtype=first)
    step(optimizer)
    second = torch.bfloat16 if first is torch.float32 else None
    optimizer.param_groups[0]["state_dtype"] = second
    step(optimizer)
    for p in params:
        assert stored_dtypes(optimizer, p) == {second or torch.float32}


@pytest.mark.parametrize("first", [torch.float32, None, "8bit"])
def test_second_moments_that_became_narrow_follow_gradients_that_fall(first):
    """Were they rounded to nearest, or left as they were, the root would end up at 0.88."""
    (p,) = weights(((64, 64),))
    optimizer = adam([p], state_dtype=first)
    step(optimizer, 1.0, 2000)
    optimizer.param_groups[0]["state_dtype"] = torch.bfloat16
    step(optimizer, 0.0, 3000)
    root = optimizer.state[p]["exp_avg_sq"].float().mean().sqrt().item()
    exact = math.sqrt((1 - 0.999**2000) * 0.999**3000)
    assert root == pytest.approx(exact, rel=0.1)


def test_a_parameter_that_moves_to_another_group_takes_its_layout():
    params = weights()
    optimizer = adam(
        [
            {"params": [params[0]], "state_dtype": torch.bfloat16, "amsgrad": True},
            {"params": [params[1]], "state_dtype": torch.float32, "amsgrad": True},
        ]
    )
    step(optimizer)
    narrow, wide = optimizer.param_groups
    narrow["params"], wide["params"] = wide["params"], narrow["params"]
    step(optimizer)
    assert stored_dtypes(optimizer, params[0]) == {torch.float32}
    assert stored_dtypes(optimizer, params[1]) == {torch.bfloat16}


def test_an_edit_of_master_is_followed():
    (p,) = weights(((5, 7),), torch.bfloat16)
    optimizer = adam([p])
    for master, key in (
        ("remainder", "master_remainder"),
        ("float32", "master_param"),
        (None, None),
    ):
        optimizer.param_groups[0]["master"] = master
        step(optimizer)
        assert (key or "master_param") in optimizer.state[p]


# --- a state that is loaded ---


def groups_of(params, options):
    return [{"params": [p], **o} for p, o in zip(params, options, strict=True)]


@pytest.mark.parametrize("source", ["torch", "portable"])
def test_a_groups_own_layout_outlives_a_state_without_any(source):
    params = weights()
    own = [{"state_dtype": "8bit"}, {"state_dtype": torch.bfloat16, "state_rounding": "stochastic"}]
    optimizer = adam(groups_of(params, own))
    if source == "torch":
        other = torch.optim.AdamW(groups_of(weights(), [{}, {}]))
        step(other)
        saved = other.state_dict()
    else:
        step(optimizer)
        saved = optimizer.state_dict(portable=True)
    optimizer.load_state_dict(saved_and_loaded(saved))
    for group, options in zip(optimizer.param_groups, own, strict=True):
        assert {key: group[key] for key in options} == options
    step(optimizer)
    assert stored_dtypes(optimizer, params[0]) == {torch.uint8}
    assert stored_dtypes(optimizer, params[1]) == {torch.bfloat16}


def test_masters_and_the_iteration_outlive_a_state_of_torchs():
    params = weights(MATRICES, torch.bfloat16)
    own = [{"master": "remainder", "ns_dtype": torch.float16}, {"master": "float32"}]
    optimizer = muon(groups_of(params, own))
    other = torch.optim.Muon(groups_of(weights(MATRICES, torch.bfloat16), [{}, {}]))
    step(other)
    optimizer.load_state_dict(other.state_dict())
    for group, options in zip(optimizer.param_groups, own, strict=True):
        assert {key: group[key] for key in options} == options
    step(optimizer)
    assert "master_remainder" in optimizer.state[params[0]]
    assert "master_param" in optimizer.state[params[1]]


@pytest.mark.parametrize(("mine", "saved"), list(itertools.permutations(LAYOUTS[1:], 2)))
def test_where_both_say_something_the_state_is_converted_to_this_optimizers(mine, saved):
    source = adam(weights(), state_dtype=saved)
    step(source)
    params = weights()
    optimizer = adam(params, state_dtype=mine)
    optimizer.load_state_dict(saved_and_loaded(source.state_dict()))
    assert optimizer.param_groups[0]["state_dtype"] == mine
    step(optimizer)
    for p in params:
        assert stored_dtypes(optimizer, p) == {dtype_of(mine, p)}


def test_the_masters_of_this_optimizer_win_too():
    source = adam(weights(((5, 7),), torch.bfloat16), master="remainder")
    step(source)
    params = weights(((5, 7),), torch.bfloat16)
    optimizer = adam(params, master="float32")
    optimizer.load_state_dict(source.state_dict())
    step(optimizer)
    assert optimizer.param_groups[0]["master"] == "float32"
    assert "master_param" in optimizer.state[params[0]]


def test_where_this_optimizer_says_nothing_the_states_layout_is_taken():
    source = adam(weights(), state_dtype=torch.bfloat16, state_rounding="stochastic")
    step(source)
    params = weights()
    optimizer = adam(params)
    optimizer.load_state_dict(saved_and_loaded(source.state_dict()))
    assert optimizer.param_groups[0]["state_dtype"] is torch.bfloat16
    assert optimizer.param_groups[0]["state_rounding"] == "stochastic"
    for p, q in zip(params, source.param_groups[0]["params"], strict=True):
        assert_same_bits(optimizer.state[p]["exp_avg"], source.state[q]["exp_avg"])


# --- values that are none ---

UNKNOWN = {
    "state_dtype": ["4bit", "bfloat16", torch.float16, torch.int8, 16],
    "master": ["int8", "Remainder", True, torch.float32],
    "state_rounding": ["up", "Nearest", 1],
    "ns_dtype": ["bfloat16", torch.float64, torch.float8_e4m3fn, 16],
    "adjust_lr_fn": ["none", "Original", 1],
}
CASES = [
    (kind, key, value)
    for kind in KINDS
    for key, values in UNKNOWN.items()
    for value in values + (["8bit"] if key == "state_dtype" and kind != "AdamW" else [])
    if not (key == "state_rounding" and kind != "AdamW")
    and not (key in ("ns_dtype", "adjust_lr_fn") and kind != "Muon")
]
unknown = pytest.mark.parametrize(("kind", "key", "value"), CASES)


def bits_of(optimizer):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return copy.deepcopy([[p.detach(), dict(optimizer.state.get(p, {}))] for p in params])


def same(first, second):
    for (p, state), (q, other) in zip(first, second, strict=True):
        assert_same_bits(p, q)
        assert state.keys() == other.keys()
        for key in state:
            assert_same_bits(state[key], other[key])


@unknown
def test_an_edit_to_a_value_that_is_none_is_refused_and_nothing_changes(kind, key, value):
    make, shapes = KINDS[kind]
    params = weights(shapes)
    optimizer = make(groups_of(params, [{}, {}]))
    step(optimizer)
    before = bits_of(optimizer)
    optimizer.param_groups[0]["state_dtype"] = torch.bfloat16  # Not converted by a refused step.
    optimizer.param_groups[1][key] = value
    with pytest.raises(
        ValueError, match=f"step: expected {key} to be .*got {value!r}".replace("'", ".")
    ):
        optimizer.step()
    same(before, bits_of(optimizer))


@unknown
def test_a_loaded_value_that_is_none_is_refused_and_nothing_changes(kind, key, value):
    make, shapes = KINDS[kind]
    optimizer = make(groups_of(weights(shapes), [{}, {}]))
    step(optimizer)
    before, groups = bits_of(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        for entry in state.values():
            entry.add_(1)
    saved["param_groups"][1][key] = value
    with pytest.raises(ValueError, match=f"load_state_dict: expected {key} to be "):
        optimizer.load_state_dict(saved)
    same(before, bits_of(optimizer))
    assert optimizer.state_dict()["param_groups"] == groups


@unknown
def test_a_new_group_with_a_value_that_is_none_is_refused(kind, key, value):
    make, shapes = KINDS[kind]
    optimizer = make(weights(shapes))
    with pytest.raises(ValueError, match=f"add_param_group: expected {key} to be "):
        optimizer.add_param_group({"params": weights(shapes), key: value})
    assert len(optimizer.param_groups) == 1


@unknown
def test_a_pickled_value_that_is_none_is_refused(kind, key, value):
    make, shapes = KINDS[kind]
    optimizer = make(weights(shapes))
    step(optimizer)
    optimizer.param_groups[0][key] = value
    with pytest.raises(ValueError, match=f"__setstate__: expected {key} to be "):
        copy.deepcopy(optimizer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [torch.bfloat16, None, "bfloat16"])
def test_weight_copies_of_one_group_are_refused(kind, value):
    make, shapes = KINDS[kind]
    optimizer = make(weights(shapes))
    group = {"params": weights(shapes), "autocast_dtype": value}
    expected = "expected autocast_dtype as an argument of the optimizer, got "
    for call in (make, lambda groups: optimizer.add_param_group(groups[0])):
        with pytest.raises(ValueError, match=expected):
            call([group])
    assert len(optimizer.param_groups) == 1
    saved = optimizer.state_dict()
    saved["param_groups"][0]["autocast_dtype"] = value
    with pytest.raises(ValueError, match=f"load_state_dict: {expected}"):
        optimizer.load_state_dict(saved)


def test_fuse_refuses_a_rate_that_no_step_knows():
    optimizer = torch.optim.Muon(weights(MATRICES))
    optimizer.param_groups[0]["adjust_lr_fn"] = "sqrt"
    with pytest.raises(
        ValueError, match="fuse_: expected adjust_lr_fn to be None or of 'original'"
    ):
        fastamp.optim.fuse_(optimizer)
    assert type(optimizer) is torch.optim.Muon


def test_the_newest_rate_is_known_where_torch_knows_it(monkeypatch):
    """torch 2.14 has it; older ones step with a ratio of 1, and so would float64 here."""
    from torch.optim import _muon

    (p,) = weights(((2, 8),))
    optimizer = muon([p], weight_decay=0.0)
    (group,) = optimizer.param_groups
    group["adjust_lr_fn"] = "spectral_unclamped"
    if _muon._adjust_lr(1.0, "spectral_unclamped", torch.Size((1, 4))) != 0.5:
        with pytest.raises(ValueError, match="step: expected adjust_lr_fn to be None or of"):
            step(optimizer)

        def newer(lr, name, shape):
            assert name == "spectral_unclamped"
            return lr * math.sqrt(shape[0] / shape[1])

        monkeypatch.setattr(_muon, "_adjust_lr", newer)
    before = p.detach().clone()
    step(optimizer)
    moved = p.detach() - before
    (q,) = weights(((2, 8),))
    original = muon([q], weight_decay=0.0)
    step(original)
    torch.testing.assert_close(moved, 0.5 * (q.detach() - before), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "key", "value", "expected"),
    [
        ("SGD", "momentum", "x", "a number, got 'x'"),
        ("SGD", "lr", None, "a number, got None"),
        ("AdamW", "weight_decay", "x", "a number, got 'x'"),
        ("AdamW", "lr", 10**400, "a number that a float can hold, got 1000"),
        ("AdamW", "betas", (0.9,), r"two numbers below 1, got \(0.9,\)"),
        ("AdamW", "betas", (0.9, 0.99, 0.999), "two numbers below 1, got"),
        ("AdamW", "betas", (1.0, 0.9), "two numbers below 1, got"),
        ("AdamW", "betas", (0.9, 1.1), "two numbers below 1, got"),
        ("AdamW", "betas", "ab", "two numbers below 1, got 'ab'"),
        ("AdamW", "betas", None, "two numbers below 1, got None"),
        ("Muon", "ns_steps", 2.5, "an int, got 2.5"),
        ("Muon", "ns_coefficients", "abc", "three numbers, got 'abc'"),
        ("Muon", "momentum", [1.0], r"a number, got \[1.0\]"),
    ],
)
@pytest.mark.parametrize("second_group", [False, True])
def test_numbers_that_are_none_are_refused_by_name(kind, key, value, expected, second_group):
    """torch raises for these, too, when it comes to compute with them."""
    make, shapes = KINDS[kind]
    params = weights(shapes)
    optimizer = make(params[:1])
    optimizer.add_param_group({"params": params[1:]})
    step(optimizer)
    before = copy.deepcopy(params)
    optimizer.param_groups[second_group][key] = value
    with pytest.raises(TypeError, match=f"step: expected {key} of a group to be {expected}"):
        step(optimizer)
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
