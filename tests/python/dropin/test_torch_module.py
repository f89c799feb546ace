# SPDX-License-Identifier: Apache-2.0
"""``import fastamp.torch as torch`` is torch, but for mixed precision."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pickle
import pkgutil
import pydoc
import sys
from types import ModuleType
from unittest import mock

import pytest
import torch

import fastamp
import fastamp.torch as ft
from support.children import check_python

MIRRORS = [name for name, module in sys.modules.items() if name.startswith("fastamp.torch")]
REPLACED = {
    "fastamp.torch": {"autocast", "GradScaler", "amp", "cuda", "cpu", "nn"},
    "fastamp.torch.nn.utils": {"clip_grad", "clip_grad_norm_"},
    "fastamp.torch.amp": {
        "autocast",
        "GradScaler",
        "custom_fwd",
        "custom_bwd",
        "autocast_mode",
        "grad_scaler",
    },
    "fastamp.torch.cuda.amp": {
        "autocast",
        "GradScaler",
        "custom_fwd",
        "custom_bwd",
        "autocast_mode",
        "grad_scaler",
    },
}
NEW = {"scale_loss", "master_params"}


@pytest.mark.parametrize("name", MIRRORS)
def test_every_attribute_but_the_replaced_ones_is_torchs_object(name: str):
    mirror = sys.modules[name]
    original = sys.modules[name.removeprefix("fastamp.")]
    own = {"__name__", "__package__", "__loader__", "__spec__"}
    different = {
        attribute
        for attribute in dir(original)
        if attribute not in own and getattr(mirror, attribute) is not getattr(original, attribute)
    }
    assert different == set(mirror.__replaced__) - NEW
    assert set(dir(mirror)) == set(dir(original)) | set(mirror.__replaced__)
    if name in REPLACED:
        assert different == REPLACED[name]
    assert isinstance(mirror, ModuleType)
    assert mirror.__name__ == name


def test_replaced_names_are_fastamps():
    assert ft.autocast is ft.amp.autocast is ft.amp.autocast_mode.autocast is fastamp.autocast
    assert ft.GradScaler is ft.amp.grad_scaler.GradScaler is fastamp.GradScaler
    assert ft.cuda.amp.autocast is fastamp.cuda.amp.autocast
    assert ft.cpu.amp.GradScaler is fastamp.cpu.amp.GradScaler
    assert ft.amp.custom_fwd is fastamp.custom_fwd
    assert ft.amp.scale_loss is ft.cuda.amp.scale_loss is fastamp.amp.scale_loss
    assert ft.amp.grad_scaler.OptState is torch.amp.grad_scaler.OptState
    assert ft.nn.utils.clip_grad_norm_ is fastamp.clip_grad_norm_
    assert ft.nn.utils.clip_grad.clip_grad_value_ is torch.nn.utils.clip_grad_value_
    assert ft.Tensor is torch.Tensor


def test_torch_itself_is_unchanged():
    assert torch.autocast is torch.amp.autocast_mode.autocast is not fastamp.autocast
    assert torch.amp.__name__ == "torch.amp"
    assert torch.nn.functional.__spec__.name == "torch.nn.functional"
    assert not hasattr(torch.amp, "scale_loss")


def test_submodules_are_torchs_own_module_objects():
    import fastamp.torch.nn as nn
    import fastamp.torch.nn.functional as functional
    import fastamp.torch.optim.lr_scheduler
    from fastamp.torch import nn as from_nn
    from fastamp.torch.amp.grad_scaler import GradScaler, OptState
    from fastamp.torch.utils.data import DataLoader

    assert functional is torch.nn.functional
    assert nn.Linear is torch.nn.Linear
    assert from_nn is nn
    assert DataLoader is torch.utils.data.DataLoader
    assert fastamp.torch.optim.lr_scheduler is torch.optim.lr_scheduler
    assert (GradScaler, OptState) == (fastamp.GradScaler, torch.amp.grad_scaler.OptState)


def test_a_submodule_that_torch_loads_late_is_loaded_once_and_is_torchs():
    code = """
import sys
import fastamp.torch as torch
import fastamp.torch.testing as testing
import fastamp.torch.distributed.checkpoint.metadata as metadata
assert metadata is sys.modules["torch.distributed.checkpoint.metadata"]
assert metadata.__spec__.name == "torch.distributed.checkpoint.metadata"
assert torch.testing is testing is sys.modules["torch.testing"]
import torch as real
assert real.distributed.checkpoint.metadata is metadata
print("ok")
"""
    assert check_python("-W", "error::ImportWarning", "-c", code).strip() == "ok"


def test_a_submodule_that_is_not_there():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'fastamp\.torch\.nothing'"):
        importlib.import_module("fastamp.torch.nothing")
    with pytest.raises(ModuleNotFoundError, match=r"fastamp\.torch\.nn\.nothing"):
        importlib.import_module("fastamp.torch.nn.nothing")
    with pytest.raises(AttributeError, match="module 'torch' has no attribute 'nothing'"):
        _ = ft.nothing
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from fastamp.torch import nothing")


def test_every_public_package_of_torchs_can_be_imported():
    for module in pkgutil.iter_modules(torch.__path__):
        name = f"torch.{module.name}"
        if module.name.startswith("_") or name not in sys.modules:
            continue
        found = importlib.import_module(f"fastamp.{name}")
        if f"fastamp.{name}" not in MIRRORS:
            assert found is sys.modules[name]


def test_assignments_go_to_torch_and_those_of_replaced_names_stay_here():
    ft.set_by_a_test = 3
    try:
        assert torch.set_by_a_test == 3
        torch.set_by_a_test = 4
        assert ft.set_by_a_test == 4
    finally:
        del ft.set_by_a_test
    assert not hasattr(torch, "set_by_a_test")
    of_torch, of_fastamp = torch.autocast, ft.autocast
    with mock.patch("fastamp.torch.autocast", "patched"):
        assert ft.autocast == "patched"
        assert torch.autocast is of_torch
    assert ft.autocast is of_fastamp
    relu = torch.relu
    with mock.patch.object(ft, "relu", "patched"):
        assert torch.relu == "patched"
    assert torch.relu is ft.relu is relu


def test_a_star_import_gives_torchs_names_with_fastamps_among_them():
    names: dict[str, object] = {}
    exec("from fastamp.torch import *", names)
    assert set(torch.__all__) <= set(names)
    assert names["autocast"] is fastamp.autocast
    assert names["GradScaler"] is fastamp.GradScaler
    assert names["matmul"] is torch.matmul


def test_documentation_version_and_source_are_torchs():
    assert ft.__version__ == torch.__version__
    assert ft.__doc__ == torch.__doc__
    assert ft.__file__ == torch.__file__
    assert inspect.getsource(ft.nn.Linear) == inspect.getsource(torch.nn.Linear)
    assert "scale_loss" in dir(ft.amp)
    assert pydoc.plain(pydoc.render_doc(ft.cuda.amp)).count("class autocast(") == 1
    assert repr(ft).startswith("<module 'fastamp.torch' over <module 'torch'")


def test_what_is_made_through_it_is_an_instance_of_torchs_and_pickles():
    model = ft.nn.Sequential(ft.nn.Linear(2, 2), ft.nn.ReLU())
    assert isinstance(model, torch.nn.Module)
    assert isinstance(ft.autocast("cpu"), torch.autocast)
    assert isinstance(ft.amp.GradScaler("cpu"), torch.amp.GradScaler)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin[0].weight, model[0].weight)
    assert pickle.loads(pickle.dumps(ft.float16)) is torch.float16


def product(x: torch.Tensor) -> torch.Tensor:
    with ft.autocast("cpu", dtype=ft.bfloat16):
        return ft.nn.functional.relu(ft.mm(x, x))


def test_compile_script_and_export_see_through_it():
    x = ft.ones(4, 4)
    expected = product(x)
    got = ft.compile(product, backend="eager", fullgraph=True)(x)
    assert got.dtype == expected.dtype == torch.bfloat16
    assert ft.equal(got, expected)

    def plain(x: ft.Tensor) -> ft.Tensor:
        return ft.nn.functional.relu(ft.mm(x, x))

    with pytest.warns((DeprecationWarning, FutureWarning), match="script"):
        assert ft.equal(ft.jit.script(plain)(x), plain(x))


def test_dynamo_checks_no_more_than_torchs_frames_again_and_again():
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = ft.compile(product, backend=counter, fullgraph=True)
    for _ in range(3):
        compiled(ft.ones(3, 3))
    assert counter.frame_count == 1


def test_importlib_finds_what_is_there():
    assert importlib.util.find_spec("fastamp.torch.nn.functional") is not None
    assert importlib.util.find_spec("fastamp.torch.amp").name == "fastamp.torch.amp"
