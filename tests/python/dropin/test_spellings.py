# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.amp's and torch.cpu.amp's deprecated names, and the argument that articles add."""

from __future__ import annotations

import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch._dynamo

import fastamp
import fastamp.torch as ft
from support.autocast_state import torch_state

BF16, FP16 = torch.bfloat16, torch.float16
X = torch.ones(3, 3)


def caught(function: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        made = function(*args, **kwargs)
    return made, [(w.category, str(w.message).split(" Please")[0]) for w in record]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"enabled": False}, {"dtype": BF16}, {"dtype": FP16, "cache_enabled": False}],
)
def test_regions_are_torchs_with_its_defaults_and_warnings(device: str, kwargs: dict[str, Any]):
    torchs, torchs_warnings = caught(getattr(torch, device).amp.autocast, **kwargs)
    for package in (fastamp, ft):
        own, own_warnings = caught(getattr(package, device).amp.autocast, **kwargs)
        assert isinstance(own, torch.autocast)
        assert own_warnings == torchs_warnings
        for name in ("device", "fast_dtype", "_enabled", "_cache_enabled"):
            assert getattr(own, name) == getattr(torchs, name)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:CUDA is not available")
def test_device_type_is_accepted_if_it_is_the_right_one():
    for make in (fastamp.cuda.amp.autocast, ft.cuda.amp.autocast):
        region = make(device_type="cuda", dtype=FP16, enabled=False)
        assert (region.device, region.fast_dtype) == ("cuda", FP16)
    with fastamp.cpu.amp.autocast(device_type="cpu"):
        assert torch.mm(X, X).dtype == BF16
    with pytest.raises(ValueError, match=r"cuda\.amp\.autocast: expected device_type 'cuda', got"):
        fastamp.cuda.amp.autocast(device_type="cpu")
    with pytest.raises(TypeError):
        torch.cuda.amp.autocast(device_type="cuda")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_regions_nest_decorate_pickle_and_compile():
    before = torch_state()

    @fastamp.cpu.amp.autocast(dtype=FP16)
    def decorated(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)

    assert decorated(X).dtype == FP16
    region = fastamp.cpu.amp.autocast()
    twin = pickle.loads(pickle.dumps(region))
    assert type(twin) is fastamp.cpu.amp.autocast
    with region, twin, region:
        assert torch.mm(X, X).dtype == BF16

    def function(x: torch.Tensor) -> torch.Tensor:
        with fastamp.cpu.amp.autocast(dtype=FP16):
            return torch.mm(x, x)

    torch._dynamo.reset()
    assert torch.compile(function, backend="eager", fullgraph=True)(X).dtype == FP16
    assert torch_state() == before


def names_of(module: Any) -> set[str]:
    return {name for name in module.__all__ if name != "loss_scaler"}


def test_the_mirrors_have_every_public_name_of_torchs():
    assert set(torch.cuda.amp.__all__) <= names_of(fastamp.cuda.amp)
    assert {"autocast", "GradScaler"} <= names_of(fastamp.cpu.amp)
    public = {name for name in vars(torch.amp) if not name.startswith("_")}
    assert public - {"autocast_mode", "grad_scaler"} <= names_of(fastamp.amp)


@pytest.mark.parametrize("name", ["custom_fwd", "custom_bwd"])
def test_custom_function_decorators_have_torchs_signature_and_refusals(name: str):
    own, torchs = getattr(fastamp, name), getattr(torch.amp, name)
    kinds = [
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (own, torchs)
    ]
    assert kinds[0] == kinds[1]
    for bad in (3, None, torch.device("cpu")):
        with pytest.raises(ValueError, match="Expected `device_type` of type `str`"):
            torchs(device_type=bad)
        with pytest.raises(ValueError, match=f"{name}: expected device_type to be a str"):
            own(device_type=bad)


def make_function(amp: Any, seen: list[Any], cast_inputs: Any) -> Any:
    def state() -> Any:
        return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")

    class Op(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx: Any, x: torch.Tensor, extras: Any, text: str) -> torch.Tensor:
            seen.append((state(), x.dtype, [e.dtype for e in extras["list"]], text))
            ctx.save_for_backward(x)
            return torch.mm(x, x)

        @staticmethod
        @amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            seen.append((state(), grad.dtype))
            (x,) = ctx.saved_tensors
            return torch.mm(grad, x.t()), None, None

    return Op


@pytest.mark.parametrize("cast_inputs", [None, torch.float32, FP16])
@pytest.mark.parametrize("region", [None, BF16, FP16, False])
def test_custom_functions_see_and_compute_what_torchs_do(cast_inputs: Any, region: Any):
    results = []
    for amp in (torch.amp, fastamp.amp):
        seen: list[Any] = []
        op = make_function(amp, seen, cast_inputs)
        x = (torch.arange(9.0).view(3, 3) / 8).requires_grad_()
        extras = {"list": [torch.ones(1), torch.ones(1, dtype=torch.float64), torch.ones(1).int()]}
        if region is None:
            y = op.apply(x, extras, "text")
        else:
            with fastamp.autocast("cpu", dtype=region or BF16, enabled=region is not False):
                y = op.apply(x, extras, "text")
        y.float().sum().backward()
        results.append((seen, y.detach(), x.grad))
    assert results[0][0] == results[1][0]
    assert results[0][1].dtype == results[1][1].dtype
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][2], results[1][2])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_cuda_decorators_without_arguments_warn_and_pass_through():
    with pytest.warns(FutureWarning, match=r"cuda\.amp\.custom_fwd"):
        decorate = fastamp.cuda.amp.custom_fwd(cast_inputs=FP16)
    with pytest.warns(FutureWarning, match=r"cuda\.amp\.custom_bwd"):
        fastamp.cuda.amp.custom_bwd(lambda _, g: g)

    class Context:
        pass

    context = Context()
    assert decorate(lambda _, x: x)(context, X) is X
    assert context._fwd_used_autocast is False
