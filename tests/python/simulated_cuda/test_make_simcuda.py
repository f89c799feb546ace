# SPDX-License-Identifier: Apache-2.0
"""What `make simcuda` runs beside the device's own tests, pass by pass."""

from __future__ import annotations

import pytest

from simulated_tests import PASSES, Pass, run
from support.simulated_cuda import BUILD, is_simulated, why_not_built

pytestmark = [
    pytest.mark.skipif(bool(why_not_built()), reason=why_not_built()),
    pytest.mark.skipif(is_simulated(), reason="makes processes with a device of their own"),
    pytest.mark.slow,
    pytest.mark.timeout(3600),
]


@pytest.mark.parametrize("one", PASSES[1:], ids=lambda one: one.name)
def test_a_pass_passes(one: Pass):
    passed, line = run(one, BUILD)
    assert passed, line
