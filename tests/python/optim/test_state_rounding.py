# SPDX-License-Identifier: Apache-2.0
"""bfloat16 second moments: stochastic rounding, with noise that is the same everywhere."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import fastamp
from fastamp._C import AmpStep
from support.amp_reference import DEVICES, assert_same_bits
from support.optim_state import give_gradients, run, same_state, saved_and_loaded
from support.optim_twins import copies, parameters
from support.rounding_twin import rounded

SECOND = ("exp_avg_sq", "max_exp_avg_sq")
ADAMS = pytest.mark.parametrize("adam", [fastamp.optim.Adam, fastamp.optim.AdamW])
devices = pytest.mark.parametrize("device", DEVICES)


def adamw(params, **options):
    return fastamp.optim.AdamW(params, lr=0.01, state_dtype=torch.bfloat16, **options)


def exact_moments(optimizer, params, gradients):
    """The float32 moments after a step from the optimizer's present ones, and the count before."""
    results = []
    for p, gradient in zip(params, gradients, strict=True):
        (q,) = copies([p])
        q.grad = gradient
        group = next(g for g in optimizer.param_groups if any(p is other for other in g["params"]))
        twin = fastamp.optim.AdamW([q], betas=group["betas"], amsgrad=group["amsgrad"])
        state = optimizer.state.get(p, {})
        if state:
            twin.state[q] = {
                k: v.float() if k in SECOND else v.clone().float() for k, v in state.items()
            }
        steps = int(state["step"].item()) if state else 0
        twin.step()
        results.append((twin.state[q], steps))
    return results


@pytest.mark.parametrize("amsgrad", [False, True])
def test_bits_are_those_of_a_twin_in_numpy(amsgrad):
    """Parameters count in the order of the groups, whether or not they have a gradient."""
    torch.manual_seed(1)
    first, second = parameters(((3, 5), (0, 4), (1030,))), parameters(((7,), (70001,)))
    params = [*first, *second]
    groups = [{"params": first}, {"params": second, "betas": (0.8, 0.95)}]
    optimizer = adamw(groups, amsgrad=amsgrad)
    seen = 0
    for step in range(6):
        give_gradients(params, step)
        if step in (1, 2):
            params[0].grad = None  # The noise of the others must not notice.
        stepped = [i for i, p in enumerate(params) if p.grad is not None]
        expected = exact_moments(
            optimizer, [params[i] for i in stepped], [params[i].grad for i in stepped]
        )
        optimizer.step()
        for i, (exact, steps) in zip(stepped, expected, strict=True):
            state = optimizer.state[params[i]]
            assert_same_bits(state["exp_avg"], exact["exp_avg"].to(torch.bfloat16))
            for key in SECOND if amsgrad else SECOND[:1]:
                assert_same_bits(state[key], rounded(exact[key], i, steps))
                seen += not torch.equal(state[key], exact[key].to(torch.bfloat16))
    assert seen > 10  # Else rounding to nearest would pass.


@ADAMS
def test_nearest_is_the_rounding_of_torch(adam):
    torch.manual_seed(2)
    params = parameters()
    optimizer = adam(
        params, betas=(0.9, 0.99), state_dtype=torch.bfloat16, state_rounding="nearest"
    )
    for step in range(5):
        give_gradients(params, step)
        expected = exact_moments(optimizer, params, [p.grad for p in params])
        optimizer.step()
        for p, (exact, _) in zip(params, expected, strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                assert_same_bits(optimizer.state[p][key], exact[key].to(torch.bfloat16))


def ratios_after_gradients_fell_tenfold(betas=(0.9, 0.999), **options):
    """The second moments in bfloat16 over those in float32."""
    params = [torch.zeros(4096, requires_grad=True) for _ in range(2)]
    optimizers = [
        fastamp.optim.AdamW([params[0]], betas=betas, state_dtype=torch.bfloat16, **options),
        fastamp.optim.AdamW([params[1]], betas=betas),
    ]
    torch.manual_seed(9)
    for step in range(6000):
        gradient = torch.randn(4096).mul_(1.0 if step < 3000 else 0.1)
        for p, optimizer in zip(params, optimizers, strict=True):
            p.grad = gradient
            optimizer.step()
    narrow, exact = (
        optimizer.state[p]["exp_avg_sq"].float()
        for p, optimizer in zip(params, optimizers, strict=True)
    )
    return narrow / exact


def test_second_moments_follow_gradients_that_fall_tenfold():
    """The figures are those of docs/optim.md and of the warning."""
    ratios = ratios_after_gradients_fell_tenfold()
    assert ratios.median().item() == pytest.approx(1.0, abs=0.02)
    assert ratios.mean().item() == pytest.approx(1.0, abs=0.02)
    assert ratios.std().item() < 0.12
    assert 0.5 < ratios.min().item() < ratios.max().item() < 1.6
    with pytest.warns(UserWarning, match="nearly five times too small"):
        ratios = ratios_after_gradients_fell_tenfold(state_rounding="nearest")
    assert ratios.sqrt().mean().item() == pytest.approx(4.7, abs=0.2)
    ratios = ratios_after_gradients_fell_tenfold((0.9, 0.99), state_rounding="nearest")
    assert ratios.sqrt().mean().item() == pytest.approx(1.0, abs=0.02)


@devices
def test_bits_do_not_depend_on_threads_or_neighbours(device):
    """The cuts between threads move with their number and with the other parameters."""
    shapes = ((200_003,), (65,), (131_072,))
    torch.manual_seed(3)
    results = []
    threads = torch.get_num_threads()
    start = parameters(shapes, device=device)
    for count, absent in ((1, False), (2, False), (3, False), (2, True)):
        params = copies(start)
        optimizer = adamw(params)
        torch.set_num_threads(count)
        try:
            for step in range(3):
                give_gradients(params, step)
                if absent:
                    params[0].grad = None
                optimizer.step()
        finally:
            torch.set_num_threads(threads)
        results.append([optimizer.state[p]["exp_avg_sq"] for p in params[1:]])
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert_same_bits(first, second)


@devices
def test_a_skipped_step_draws_nothing(device):
    torch.manual_seed(4)
    params = parameters(device=device)
    others = copies(params)
    skipping, plain = adamw(params, amsgrad=True), adamw(others, amsgrad=True)
    run(skipping, 2)
    run(plain, 2)
    give_gradients(params, 77)
    before = [skipping.state[p]["exp_avg_sq"].clone() for p in params]
    skipping._fastamp_pending_amp_step = AmpStep(found_inf=torch.ones((), device=device))
    skipping.step()
    for p, was in zip(params, before, strict=True):
        assert_same_bits(skipping.state[p]["exp_avg_sq"], was)
    run(skipping, 2, 2)
    run(plain, 2, 2)
    same_state(skipping, plain)


@devices
@ADAMS
def test_a_resumed_run_continues_bit_for_bit(device, adam):
    torch.manual_seed(5)
    params = parameters(device=device)
    whole = adam(params, amsgrad=True, state_dtype=torch.bfloat16)
    run(whole, 3)
    others = copies(params)
    resumed = adam(others, amsgrad=True, state_dtype=torch.bfloat16)
    resumed.load_state_dict(saved_and_loaded(whole.state_dict()))
    run(whole, 3, 3)
    run(resumed, 3, 3)
    same_state(whole, resumed)
    twin = copy.deepcopy(resumed)
    run(twin, 2, 6)
    run(resumed, 2, 6)
    same_state(twin, resumed)


def test_state_rounding_is_a_groups_own_and_part_of_checkpoints():
    first, second = parameters(((300,),)), parameters(((300,),))
    groups = [{"params": first}, {"params": second, "state_rounding": "nearest"}]
    optimizer = adamw(groups, betas=(0.9, 0.99))
    give_gradients([*first, *second], 1)
    expected = exact_moments(optimizer, [*first, *second], [p.grad for p in [*first, *second]])
    optimizer.step()
    stochastic, nearest = (optimizer.state[p]["exp_avg_sq"] for p in (first[0], second[0]))
    assert_same_bits(stochastic, rounded(expected[0][0]["exp_avg_sq"], 0, 0))
    assert_same_bits(nearest, expected[1][0]["exp_avg_sq"].to(torch.bfloat16))
    saved = saved_and_loaded(optimizer.state_dict())
    assert "state_rounding" not in saved["param_groups"][0]  # Only where it was given.
    other = adamw([{"params": copies(first)}, {"params": copies(second)}], betas=(0.9, 0.99))
    other.load_state_dict(saved)
    assert other.param_groups[1]["state_rounding"] == "nearest"
    torch.optim.AdamW([{"params": first}, {"params": second}]).load_state_dict(saved)


def test_float32_moments_are_not_rounded():
    torch.manual_seed(6)
    params = parameters()
    others = copies(params)
    given, plain = fastamp.optim.AdamW(params, state_rounding="stochastic"), None
    plain = fastamp.optim.AdamW(others)
    run(given, 3)
    run(plain, 3)
    same_state(given, plain)


@ADAMS
@pytest.mark.parametrize("rounding", ["up", torch.bfloat16, True, "Nearest"])
def test_other_roundings_are_refused(adam, rounding):
    name = adam.__name__
    with pytest.raises(ValueError, match=f"{name}: expected state_rounding to be None, 'stoch"):
        adam(parameters(), state_rounding=rounding)
    optimizer = adam(parameters())
    with pytest.raises(ValueError, match="add_param_group: expected state_rounding to be"):
        optimizer.add_param_group({"params": parameters(), "state_rounding": rounding})
    assert len(optimizer.param_groups) == 1


@ADAMS
def test_stochastic_rounding_warns_of_no_beta2(adam):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = adam(parameters(), state_dtype=torch.bfloat16)
        optimizer.add_param_group({"params": parameters(), "betas": (0.9, 0.9999)})
        adam(parameters(), state_rounding="nearest")


def test_a_graphed_step_draws_the_noise_of_the_loop():
    def model_and_optimizer():
        torch.manual_seed(7)
        model = torch.nn.Linear(6, 3)
        return model, adamw(model.parameters())

    def loss_fn(output, target):
        return (output - target).square().mean()

    batches = [(torch.randn(4, 6), torch.randn(4, 3)) for _ in range(4)]
    model, optimizer = model_and_optimizer()
    for x, y in batches:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    graphed_model, graphed_optimizer = model_and_optimizer()
    scaler = fastamp.GradScaler("cpu", enabled=False)
    step = fastamp.cuda.graphed_step(
        graphed_model, loss_fn, graphed_optimizer, scaler, batches[0], autocast=False
    )
    for batch in batches:
        step(*batch)
    same_parameters = zip(model.parameters(), graphed_model.parameters(), strict=True)
    for p, q in same_parameters:
        assert_same_bits(p.detach(), q.detach())
    same_state(optimizer, graphed_optimizer)


def test_the_op_refuses_noise_of_another_length():
    p = torch.zeros(3)
    tensors = [[torch.zeros(3)] for _ in range(3)]
    with pytest.raises(ValueError, match="expected no noise_origins or 1, one for each of params"):
        torch.ops.fastamp.fused_adamw_(
            [p], *tensors, [], [torch.zeros(())], [], [1], [0.1], [0.9], [0.99], [1e-8], [0.0],
            [True], [False], [False], [], [], [], noise_origins=[0, 1], moment_scales=[],
        )  # fmt: skip
