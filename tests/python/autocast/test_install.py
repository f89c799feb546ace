# SPDX-License-Identifier: Apache-2.0
"""install and uninstall: torch's kernels come back exactly."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import fastamp
import fastamp._C as _C
from support.autocast_state import cuda_state, torch_kernels, torch_state
from support.children import check_python

COMPARE_DUMPS = """
import json, sys, torch
def dump():
    names = set()
    for key in ("AutocastCPU", "AutocastCUDA"):
        names |= set(torch._C._dispatch_get_registrations_for_dispatch_key(key))
    table = {name: (torch._C._dispatch_dump(name), torch._C._dispatch_dump_table(name))
             for name in sorted(names)}
    ops = torch._C._dispatch_get_all_op_names()
    return table, sum(not name.startswith("fastamp::") for name in ops)
before = dump()
import fastamp
assert dump()[0] != before[0]
assert dump()[1] == before[1]
fastamp._C.unregister_kernels()
assert dump() == before
fastamp._C.unregister_kernels()
for _ in range(3):
    fastamp._C.register_kernels()
    fastamp._C.register_kernels()
    assert fastamp._C.kernels_registered()
    fastamp._C.unregister_kernels()
    assert dump() == before
fastamp.policies.set("layer_norm", "lower", "cpu")
fastamp._C.register_kernels()
fastamp._C.unregister_kernels()
assert dump() == before
fastamp._C.register_kernels()
fastamp.policies.set("rms_norm", "fp32")
fastamp._C.unregister_kernels()
fastamp.policies.reset()
assert dump() == before
"""


def test_uninstall_restores_the_dispatcher_entry_of_every_op_exactly():
    check_python("-c", COMPARE_DUMPS)


@pytest.mark.parametrize("region", [torch.autocast, fastamp.autocast])
def test_uninstall_inside_a_region_is_refused_and_changes_nothing(region: Any):
    with region("cpu"):
        state = torch_state()
        with pytest.raises(RuntimeError, match="unregister_kernels"):
            _C.unregister_kernels()
        assert _C.kernels_registered()
        assert torch_state() == state
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
    with cuda_state(), pytest.raises(RuntimeError, match="unregister_kernels"):
        _C.unregister_kernels()
    with region("cpu", enabled=False), pytest.raises(RuntimeError, match="unregister_kernels"):
        _C.unregister_kernels()


def test_regions_run_torchs_kernels_while_uninstalled():
    x = torch.ones(4, 4)
    with torch_kernels():
        assert not _C.kernels_registered()
        with fastamp.autocast("cpu", dtype=torch.float16):
            assert torch.mm(x, x).dtype == torch.float16
            with pytest.raises(RuntimeError, match="prioritize"):
                torch.cat([x.bfloat16(), x.half()])
    assert _C.kernels_registered()


def test_install_inside_a_region_takes_effect_at_once():
    x = torch.ones(4, 4)
    with torch_kernels(), fastamp.autocast("cpu", dtype=torch.float16):
        _C.register_kernels()
        assert torch.cat([x.bfloat16(), x.half()]).dtype == torch.float32


def test_install_from_many_threads_at_once_is_safe():
    with torch_kernels(), ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: _C.register_kernels(), range(64)))
        assert _C.kernels_registered()
        _C.unregister_kernels()


def test_casts_made_before_uninstall_are_not_used_after_install():
    w = torch.nn.Parameter(torch.ones(4, 4))
    with fastamp.autocast("cpu"):
        torch.mm(w, w)
    with torch_kernels():
        pass
    w.data.mul_(2)
    with fastamp.autocast("cpu"):
        assert torch.equal(torch.mm(w, w), torch.full((4, 4), 16.0, dtype=torch.bfloat16))


def test_disabled_runs_torchs_kernels_and_gives_fastamps_back():
    entry = torch._C._dispatch_dump_table("aten::mm")
    with fastamp.debug.torch_kernels():
        assert not _C.kernels_registered()
        assert torch._C._dispatch_dump_table("aten::mm") != entry
        with fastamp.debug.torch_kernels(), fastamp.autocast("cpu"):
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
        assert not _C.kernels_registered()
    assert torch._C._dispatch_dump_table("aten::mm") == entry
    with pytest.raises(ZeroDivisionError), fastamp.debug.torch_kernels():
        raise ZeroDivisionError
    assert _C.kernels_registered()


def test_disabled_inside_a_region_is_refused_and_changes_nothing():
    with fastamp.autocast("cpu"):
        with pytest.raises(RuntimeError, match="unregister_kernels"):
            fastamp.debug.torch_kernels().__enter__()
        assert _C.kernels_registered()
