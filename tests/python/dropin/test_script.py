# SPDX-License-Identifier: Apache-2.0
"""TorchScript of functions and modules that use our regions, or torch's while installed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

import fastamp
from support import scripted_regions
from support.children import check_python

AUTOCAST = "__torch__.torch.amp.autocast_mode.autocast"
CPU_AUTOCAST = "__torch__.torch.cpu.amp.autocast_mode.autocast"
CASTS = ["torch.bfloat16", "torch.float32"]
EXPECTED = {
    "by_fastamp": [CASTS, [AUTOCAST]],
    "by_mirror": [CASTS, [AUTOCAST]],
    "by_amp": [CASTS, [AUTOCAST]],
    "by_cpu_amp": [CASTS, [CPU_AUTOCAST]],
    "by_torch": [CASTS, [AUTOCAST]],
    "by_torchs_cpu_amp": [CASTS, [CPU_AUTOCAST]],
}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


# In a process of its own: what has been compiled once stays so.
@pytest.mark.parametrize("arguments", [[], ["installed"]], ids=["imported", "installed"])
def test_a_region_in_a_script_is_torchs_class_and_casts(arguments: list[str]):
    names = [function.__name__ for function in scripted_regions.FUNCTIONS]
    seen = json.loads(check_python("-m", "support.scripted_regions", *arguments))
    assert seen == {name: EXPECTED[name] for name in names}


def test_scripts_compiled_before_and_after_installing_go_together():
    first = scripted_regions.seen(scripted_regions.by_torch)
    with fastamp.install():
        assert scripted_regions.seen(scripted_regions.by_mirror) == EXPECTED["by_mirror"]
    assert first == EXPECTED["by_torch"]
    assert scripted_regions.seen(scripted_regions.by_fastamp) == EXPECTED["by_fastamp"]


def test_a_scripted_module_gives_torchs_bits_and_is_loaded_without_fastamp(tmp_path: Path):
    model = scripted_regions.Model()
    x = torch.arange(4.0).view(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model.first(x)
    scripted = torch.jit.script(model)
    assert torch.equal(scripted(x), expected)
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    path = tmp_path / "model.pt"
    path.write_bytes(buffer.getvalue())
    code = f"""
import sys, torch
print(torch.jit.load({str(path)!r})(torch.ones(2, 2)).dtype, "fastamp" in sys.modules)
"""
    assert check_python("-c", code).split() == ["torch.bfloat16", "False"]


def test_only_the_classes_themselves_say_torchs_name():
    class Sub(fastamp.autocast):
        pass

    name = "_jit_override_qualname"
    assert fastamp.autocast._jit_override_qualname == AUTOCAST
    assert not hasattr(Sub, name)
    assert not hasattr(fastamp.autocast("cpu"), name)
    assert not hasattr(torch.autocast, name)
    with fastamp.install():
        assert torch.autocast._jit_override_qualname == AUTOCAST
        assert not hasattr(torch.autocast("cpu"), name)
    assert not hasattr(torch.autocast, name)
