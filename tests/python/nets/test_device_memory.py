# SPDX-License-Identifier: Apache-2.0
"""Each allocation of device memory fails in turn, on the simulated device."""

from __future__ import annotations

import pytest

from support.simulated_cuda import is_simulated, run_simulated, why_not_built

pytestmark = [
    pytest.mark.skipif(bool(why_not_built()), reason=why_not_built()),
    pytest.mark.skipif(is_simulated(), reason="starts a process that has the device"),
]


@pytest.mark.slow
def test_a_call_that_runs_out_of_device_memory_changes_nothing_and_can_be_repeated():
    done = run_simulated("-m", "nets.device_memory")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n") > 15


def test_a_call_that_changes_something_before_it_fails_is_found():
    code = """
import torch
from nets.device_memory import fail_every_allocation, seen

def make():
    x = torch.ones(3, device="cuda")

    def call():
        x.add_(1)
        torch.empty(3, device="cuda")

    return call, lambda: seen(x)

fail_every_allocation(make)
"""
    done = run_simulated("-c", code)
    assert done.returncode == 1
    assert "AssertionError: changed by a call without its allocation 1" in done.stderr
