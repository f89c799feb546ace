# SPDX-License-Identifier: Apache-2.0
"""The cases that torch tests its own optimizers with: same results, same refusals."""

from __future__ import annotations

import pytest
import torch

from support.optim_twins import PAIRS, Twins, parameters
from support.torch_testing import torch_testing

INFOS = {
    info.optim_cls.__name__: info
    for info in torch_testing("common_optimizers").optim_db
    if info.optim_cls.__name__ in PAIRS
}


def inputs(name, device="cpu"):
    return INFOS[name].optim_inputs_func(device=device)


def device_inputs(name):
    """Those of the GPU too (capturable, tensor betas): torch has no other list of them."""
    seen = {case.desc: case for case in inputs(name, "cuda")}
    return [pytest.param(name, case.kwargs, id=f"{name}-{desc}") for desc, case in seen.items()]


CASES = [case for name in PAIRS for case in device_inputs(name)]
ERRORS = [
    pytest.param(name, case, id=f"{name}-{case.optimizer_error_input.desc}")
    for name in PAIRS
    for case in INFOS[name].optim_error_inputs_func(device="cpu", dtype=torch.float32)
]


def test_torch_still_has_the_cases():
    assert INFOS.keys() == PAIRS.keys()
    assert len(CASES) > 25
    assert len(ERRORS) > 10


@pytest.mark.parametrize(("name", "options"), CASES)
def test_results_are_torchs(name, options):
    torch.manual_seed(1)
    # torch has capturable on accelerators only, where it is another way to the same numbers.
    options = {key: value for key, value in options.items() if key != "capturable"}
    twins = Twins(name, [{"params": parameters()}], **options)
    for _ in range(4):
        twins.set_gradients()
        twins.step()


@pytest.mark.parametrize(("name", "case"), ERRORS)
def test_refusals_are_torchs(name, case):
    given, own = case.optimizer_error_input, PAIRS[name][0]
    params = parameters() if given.params is None else given.params
    expect = pytest.warns if issubclass(case.error_type, Warning) else pytest.raises
    if case.error_on.name == "CONSTRUCTION_ERROR":
        with expect(case.error_type, match=case.error_regex):
            own(params, **given.kwargs)
    else:
        optimizer = own(params, **given.kwargs)
        with pytest.raises(case.error_type, match=case.error_regex):
            optimizer.step()
