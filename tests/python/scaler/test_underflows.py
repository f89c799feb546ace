# SPDX-License-Identifier: Apache-2.0
"""What the scaler shows of gradients that are 0."""

import math

import numpy as np
import pytest
import torch

import fastamp
from support.scaler_steps import INF, NAN, give_gradients, model_and_optimizer, step


def takes_amp_step(parameters):
    return fastamp.optim.SGD(parameters, lr=0.1)


def run(scaler, optimizer, parameters, gradients):
    scaler.scale(torch.ones(()))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1), takes_amp_step])
def test_zeros_are_counted_by_parameter_before_gradients_are_unscaled(make):
    parameters = [torch.nn.Parameter(torch.ones(n)) for n in (5, 3, 4)]
    optimizer = make(parameters)
    scaler = fastamp.GradScaler("cpu", init_scale=1024.0)
    gradients = [
        torch.tensor([0.0, -0.0, 1.0, 3.0, 2.0**-20]),
        torch.ones(3),
        torch.tensor([0.0, 512.0, 1.0, 1.0]),
    ]
    assert not scaler.underflow_report()
    assert str(scaler.underflow_report()) == "No gradients were counted."
    run(scaler, optimizer, parameters, gradients)
    report = scaler.underflow_report([("a", parameters[0]), ("b", parameters[1])])
    assert report
    assert (report.step, report.scale) == (0, 1024.0)
    assert [(g.name, g.index, g.shape, g.zeros, g.elements) for g in report.gradients] == [
        ("a", 0, (5,), 2, 5),
        ("parameter 2", 2, (4,), 1, 4),
    ]
    assert (report.range.zeros, report.range.elements) == (3, 12)
    assert (report.range.greatest, report.range.least) == (512.0, 2.0**-20)
    assert report.share_of_zeros() == 3 / 12
    assert "3 of 12 gradient elements (25 %) are 0" in str(report)
    assert report.as_dict()["gradients"][0]["zeros"] == 2


def test_what_another_scale_would_do_is_what_fp16_does():
    torch.manual_seed(0)
    gradient = torch.randn(20000) * torch.exp(4 * torch.randn(20000))
    parameter = torch.nn.Parameter(torch.zeros(20000))
    scaler = fastamp.GradScaler("cpu", init_scale=1.0)
    run(scaler, torch.optim.SGD([parameter], lr=0.1), [parameter], [gradient])
    report = scaler.underflow_report()
    for shift in range(-30, 6):
        lost = (gradient * 2.0**shift).to(torch.float16).eq(0).sum().item()
        assert report.share_of_zeros(2.0**shift) == lost / 20000, shift
    largest = report.largest_scale
    assert (gradient * largest).to(torch.float16).isfinite().all()
    assert not (gradient * largest * 2).to(torch.float16).isfinite().all()
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="expected scale to be a finite number above 0"):
            report.share_of_zeros(bad)


@pytest.mark.parametrize("sizes", [[70_000], [600_000] * 4, [100] * 3000, [5_000_000, 3]])
def test_of_many_elements_a_sample_is_counted_and_the_report_says_so(sizes):
    """Counting all of them takes three times as long as the pass around it."""
    total = sum(sizes)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = fastamp.GradScaler("cpu", init_scale=1.0)
    gradients = [torch.arange(size).remainder(4).float() for size in sizes]  # a quarter is 0
    reports, every = [], min(total // 32768, 128)
    for _ in range(3):
        run(scaler, optimizer, parameters, gradients)
        report = scaler.underflow_report()
        assert report.elements == total
        reports.append(report)
    assert all(16384 <= report.range.elements <= 1.5 * total / every for report in reports)
    for report in reports:
        assert report.share_of_zeros() == pytest.approx(0.25, abs=1e-3)
        assert sum(g.zeros for g in report.gradients) == report.range.zeros
        assert all(g.zeros == pytest.approx(g.elements / 4, abs=1) for g in report.gradients)
        counted = report.range.elements
        assert f"{report.range.zeros} of {counted} gradient elements" in str(report)
        assert f", in a sample of {total}" in str(report)
        assert report.as_dict()["elements"] == counted
        assert report.as_dict()["all_elements"] == total


def test_samples_take_turns():
    size, block = 2048 * 40, 2048
    parameter = torch.nn.Parameter(torch.zeros(size))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = fastamp.GradScaler("cpu", init_scale=1.0)
    found = []
    for number in range(3):
        zeros = torch.ones(size)
        zeros[block : 2 * block] = 0.0  # the second block, with which the first sample begins
        run(scaler, optimizer, [parameter], [zeros])
        assert scaler.underflow_report().step == number
        found.append(scaler.underflow_report().range.zeros)
    assert found == [block, 0, block]


def test_a_log_tells_the_zeros_of_all_elements():
    rows = []
    parameter = torch.nn.Parameter(torch.zeros(1_000_000))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = fastamp.GradScaler("cpu", init_scale=1.0)
    log = fastamp.debug.log_to(lambda values, _step: rows.append(values), scaler)
    run(scaler, optimizer, [parameter], [torch.arange(1_000_000).remainder(4).float()])
    log.release()
    assert rows[0]["amp/underflows"] == pytest.approx(250_000, rel=1e-3)


@pytest.mark.parametrize(("every", "phase"), [(0, 0), (-1, 0), (2, 2), (2, -1)])
def test_samples_that_are_none_are_refused(every, phase):
    table = torch.zeros((1, 260), dtype=torch.int64)
    with pytest.raises(ValueError, match=r"count_exponents_: expected (every|phase)"):
        torch.ops.fastamp.count_exponents_([torch.ones(3)], table, every=every, phase=phase)


def test_counts_come_at_the_first_steps_and_then_ever_more_seldom():
    model, optimizer = model_and_optimizer()
    scaler = fastamp.GradScaler("cpu", init_scale=4.0)
    counted = []
    for number in range(70):
        step(scaler, model, optimizer)
        report = scaler.underflow_report()
        if report.step == number:
            counted.append(number)
    assert counted == [0, 1, 2, 4, 8, 16, 32, 64]


def test_a_skipped_step_is_counted_with_its_infinities():
    model, optimizer = model_and_optimizer()
    scaler = fastamp.GradScaler("cpu", init_scale=8.0)
    step(scaler, model, optimizer, {"0.weight": [INF, -INF, NAN], "1.bias": [NAN]})
    found = scaler.underflow_report().range
    assert (found.inf, found.nan) == (2, 2)


def test_gradients_are_counted_once_in_an_iteration():
    """A pass after unscale_() would see gradients without their scale."""
    model, optimizer = model_and_optimizer()
    fastamp.optim.fuse_(optimizer)
    scaler = fastamp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(torch.ones(()))
    give_gradients(model)
    greatest = max(p.grad.abs().max().item() for p in model.parameters())
    scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, 0.01)
    scaler.step(optimizer)
    scaler.update()
    report = scaler.underflow_report(model)
    assert report.range.greatest == greatest
    assert report.scale == 16.0


def test_optimizers_that_read_the_flags_tell_the_scale_of_their_gradients():
    class Fused(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self):
            assert self.grad_scale.item() == 32.0

    parameter = torch.nn.Parameter(torch.ones(4))
    scaler = fastamp.GradScaler("cpu", init_scale=32.0)
    run(scaler, Fused([parameter], lr=0.1), [parameter], [torch.tensor([0.0, 1.0, 2.0, 4.0])])
    assert scaler.underflow_report().scale == 32.0


def test_fp64_gradients_are_not_counted_and_names_are_checked():
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    scaler = fastamp.GradScaler("cpu", init_scale=32.0)
    run(scaler, torch.optim.SGD([parameter], lr=0.1), [parameter], [torch.zeros(3).double()])
    assert not scaler.underflow_report()
    with pytest.raises(TypeError, match="underflow_report: expected named_parameters"):
        scaler.underflow_report(3)
    assert not fastamp.GradScaler("cpu", enabled=False).underflow_report()


def test_sixteen_bit_and_strided_gradients_are_counted():
    parameters = [
        torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16)),
        torch.nn.Parameter(torch.ones(4, 2)),
    ]
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    whole = torch.arange(16.0).reshape(4, 4)
    gradients = [torch.eye(4, dtype=torch.bfloat16), whole[:, ::2]]
    scaler.scale(torch.ones(()))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    scaler.unscale_(torch.optim.SGD(parameters, lr=0.1))
    assert [(g.zeros, g.elements) for g in scaler.underflow_report().gradients] == [
        (12, 16),
        (1, 8),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_exponents_are_numpys(dtype, threads):
    rng = np.random.default_rng(0)
    values = rng.standard_normal(300_001) * np.exp2(rng.integers(-150, 128, 300_001))
    values[rng.integers(0, values.size, 50)] = 0.0
    values[:4] = [np.inf, -np.inf, np.nan, -0.0]
    tensor = torch.from_numpy(values).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        table = torch.zeros((2, 260), dtype=torch.int64)
        torch.ops.fastamp.count_exponents_([tensor, tensor[:0]], table)
    finally:
        torch.set_num_threads(before)
    wide = tensor.double().numpy()
    finite = np.abs(wide[np.isfinite(wide) & (wide != 0)])
    exponents = np.maximum(np.frexp(finite)[1] + 126, 0)
    expected = np.bincount(exponents, minlength=255)
    assert table[0, :255].tolist() == expected.tolist()
    assert table[0, 255:258].tolist() == [
        np.isinf(wide).sum(),
        np.isnan(wide).sum(),
        (wide == 0).sum(),
    ]
    assert table[1].eq(0).all()
    found = fastamp._C.NumberRange.of(tensor)
    assert (found.greatest, found.least) == (finite.max(), finite.min())
    assert found.elements == tensor.numel()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([torch.ones(2).double()], (1, 260)), TypeError, r"tensors\[0\] to be Half, BFloat16 or"),
        (([torch.ones(2)], (1, 259)), ValueError, "exponents to be contiguous of shape"),
        (([torch.ones(2)] * 3, (2, 260)), ValueError, "exponents to be contiguous of shape"),
        (([torch.ones(2).to_sparse()], (1, 260)), ValueError, "to be strided"),
        (([torch.ones(2, device="meta")], (1, 260)), ValueError, "the device of exponents"),
    ],
)
def test_the_operator_refuses_what_it_does_not_count(arguments, error, text):
    tensors, shape = arguments
    with pytest.raises(error, match=text):
        torch.ops.fastamp.count_exponents_(tensors, torch.zeros(shape, dtype=torch.int64))


def test_the_operator_passes_torchs_own_check():
    tensors = [torch.randn(7), torch.randn(3, 3, dtype=torch.bfloat16)]
    table, zeros = torch.zeros((2, 260), dtype=torch.int64), torch.zeros((2, 1), dtype=torch.int64)
    operator = torch.ops.fastamp.count_exponents_.default
    torch.library.opcheck(operator, (tensors, table), {"zeros": zeros})
