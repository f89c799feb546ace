# SPDX-License-Identifier: Apache-2.0
"""fastamp's C functions, called by ctypes as a binding of another language calls them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastamp

OK, ERROR, VALUE_ERROR, TYPE_ERROR, NOT_IMPLEMENTED = range(5)
DEFAULT_DTYPE = -1
CPU = 0
HALF = 5  # as aoti_torch_dtype_float16()


class ScalerOptions(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("device_type", ctypes.c_int32),
        ("enabled", ctypes.c_int32),
        ("init_scale", ctypes.c_double),
        ("growth_factor", ctypes.c_double),
        ("backoff_factor", ctypes.c_double),
        ("growth_interval", ctypes.c_int64),
    )


class SgdOptions(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        *((name, ctypes.c_double) for name in ("lr", "momentum", "dampening", "weight_decay")),
        ("nesterov", ctypes.c_int32),
        ("maximize", ctypes.c_int32),
    )


class AdamWOptions(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")),
        ("amsgrad", ctypes.c_int32),
    )


@pytest.fixture(scope="module")
def c() -> ctypes.CDLL:
    folder = Path(fastamp.cpp.include_path).parent / "lib"
    library = ctypes.CDLL(str(next(folder.glob("libfastamp.so.*"))))
    library.fastamp_last_error.restype = ctypes.c_char_p
    return library


def last_error(c: ctypes.CDLL) -> str:
    return c.fastamp_last_error().decode()


_pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in.restype, _pointer_in.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_capsule_of = ctypes.pythonapi.PyCapsule_New
_capsule_of.restype = ctypes.py_object
_capsule_of.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def handle(tensor: torch.Tensor) -> int:
    """A new reference to a tensor, as torch's own C functions take it."""
    (capsule,) = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([tensor])
    return _pointer_in(capsule, None)


def tensor_at(pointer: ctypes.c_void_p) -> torch.Tensor:
    """The tensor of a handle, which is gone then."""
    return torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(
        _capsule_of(pointer.value, None, None)
    )


class Owner:
    """Objects of the C API, by what makes and frees them."""

    def __init__(self, c: ctypes.CDLL) -> None:
        self.c = c
        self.made: list[tuple[Any, ctypes.c_void_p]] = []

    def new(self, maker: str, free: str, *arguments: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        assert getattr(self.c, maker)(*arguments, ctypes.byref(made)) == OK, last_error(self.c)
        self.made.append((getattr(self.c, free), made))
        return made

    def scaler(self, **changed: Any) -> ctypes.c_void_p:
        options = ScalerOptions()
        assert self.c.fastamp_scaler_options_init(ctypes.byref(options)) == OK
        for name, value in changed.items():
            setattr(options, name, value)
        return self.new("fastamp_scaler_new", "fastamp_scaler_free", ctypes.byref(options))

    def optimizer(self, name: str, parameters: list[torch.Tensor], **changed: Any):
        options = {"sgd": SgdOptions, "adamw": AdamWOptions}[name]()
        assert getattr(self.c, f"fastamp_{name}_options_init")(ctypes.byref(options)) == OK
        for option, value in changed.items():
            setattr(options, option, value)
        handles = (ctypes.c_void_p * len(parameters))(*map(handle, parameters))
        count = ctypes.c_size_t(len(parameters))
        arguments = (handles, count, ctypes.byref(options))
        return self.new(f"fastamp_{name}_new", "fastamp_optimizer_free", *arguments)


@pytest.fixture
def own(c) -> Iterator[Owner]:
    owner = Owner(c)
    yield owner
    for free, made in owner.made:
        assert free(made) == OK


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))


X = torch.linspace(-2, 2, 8 * 16).reshape(8, 16)
STEPS = 6
OVERFLOW = 3  # of this step


def loss_of(layers: torch.nn.Module, step: int) -> torch.Tensor:
    factor = 1e4 if step == OVERFLOW else 1.0
    return (layers(X).float() * factor).square().sum()


@pytest.mark.parametrize(
    ("name", "kind", "options", "python"),
    [
        ("sgd", "SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": 1}, {"nesterov": True}),
        ("adamw", "AdamW", {"lr": 0.01, "beta1": 0.8, "amsgrad": 1}, {"betas": (0.8, 0.999)}),
    ],
)
@pytest.mark.parametrize("unscales", [True, False])
def test_it_trains_to_pythons_bits(c, own, name, kind, options, python, unscales):
    expected = model()
    kwargs = {key: value for key, value in options.items() if key != "beta1"} | python
    kwargs |= {key: True for key in ("amsgrad",) if key in options}
    optimizer = getattr(fastamp.optim, kind)(expected.parameters(), **kwargs)
    scaler = fastamp.GradScaler("cpu", growth_interval=2, init_scale=4.0)
    actual = model()
    stepper = own.optimizer(name, list(actual.parameters()), **options)
    scaling = own.scaler(growth_interval=2, init_scale=4.0)
    skipped, scale, norm = ctypes.c_int32(), ctypes.c_double(), ctypes.c_void_p()
    for step in range(STEPS):
        optimizer.zero_grad()
        with fastamp.autocast("cpu", dtype=torch.float16):
            loss = loss_of(expected, step)
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
        expected_norm = scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

        assert c.fastamp_optimizer_zero_grad(stepper) == OK
        region = ctypes.c_void_p()
        assert c.fastamp_region_begin(CPU, HALF, 1, ctypes.byref(region)) == OK
        assert torch.is_autocast_enabled("cpu")
        loss = loss_of(actual, step)
        assert c.fastamp_region_end(region) == OK
        assert not torch.is_autocast_enabled("cpu")
        scaled = ctypes.c_void_p()
        loss_handle = ctypes.c_void_p(handle(loss))
        assert c.fastamp_scaler_scale(scaling, loss_handle, ctypes.byref(scaled)) == OK
        assert c.fastamp_tensor_backward(scaled) == OK
        if unscales:
            assert c.fastamp_scaler_unscale(scaling, stepper) == OK
        clip = c.fastamp_scaler_clip_grad_norm
        one, two = ctypes.c_double(1.0), ctypes.c_double(2.0)
        assert clip(scaling, stepper, one, two, ctypes.byref(norm)) == OK
        assert torch.equal(tensor_at(norm), expected_norm.float()) or step == OVERFLOW
        assert c.fastamp_scaler_step(scaling, stepper) == OK
        assert c.fastamp_scaler_update(scaling) == OK
        assert c.fastamp_scaler_step_was_skipped(scaling, ctypes.byref(skipped)) == OK
        assert bool(skipped.value) == scaler.step_was_skipped == (step == OVERFLOW)
        assert c.fastamp_scaler_get_scale(scaling, ctypes.byref(scale)) == OK
        assert scale.value == scaler.get_scale()
        for a, b in zip(actual.parameters(), expected.parameters(), strict=True):
            assert torch.equal(a, b)


def test_a_step_without_a_scaler_and_another_learning_rate(c, own):
    parameter = torch.nn.Parameter(torch.ones(3))
    stepper = own.optimizer("sgd", [parameter], lr=0.5)
    parameter.grad = torch.ones(3)
    assert c.fastamp_optimizer_step(stepper) == OK
    assert torch.equal(parameter.detach(), torch.full((3,), 0.5))
    assert c.fastamp_optimizer_set_lr(stepper, ctypes.c_double(0.25)) == OK
    assert c.fastamp_optimizer_step(stepper) == OK
    assert torch.equal(parameter.detach(), torch.full((3,), 0.25))
    assert c.fastamp_optimizer_zero_grad(stepper) == OK
    assert parameter.grad is None


def test_a_scalers_state_is_read_and_set(c, own):
    scaler = own.scaler(init_scale=8.0)
    scale, tracker = ctypes.c_double(), ctypes.c_int64()
    read = c.fastamp_scaler_get_state
    assert c.fastamp_scaler_set_state(scaler, ctypes.c_double(32.0), ctypes.c_int64(7)) == OK
    assert read(scaler, ctypes.byref(scale), ctypes.byref(tracker)) == OK
    assert (scale.value, tracker.value) == (32.0, 7)
    disabled = own.scaler(enabled=0)
    assert read(disabled, ctypes.byref(scale), ctypes.byref(tracker)) == VALUE_ERROR
    assert "expected an enabled scaler, got a disabled one" in last_error(c)


def test_gradients_are_given_where_there_are_some(c):
    parameter = torch.nn.Parameter(torch.ones(2))
    found = ctypes.c_void_p(1)
    own = ctypes.c_void_p(handle(parameter))
    assert c.fastamp_tensor_grad(own, ctypes.byref(found)) == OK
    assert found.value is None
    loss = ctypes.c_void_p(handle((parameter * 3).sum()))
    assert c.fastamp_tensor_backward(loss) == OK
    assert c.fastamp_tensor_grad(own, ctypes.byref(found)) == OK
    assert torch.equal(tensor_at(found), torch.full((2,), 3.0))


@pytest.mark.parametrize(
    ("call", "code", "text"),
    [
        (lambda c, _: c.fastamp_region_begin(CPU, 5, 1, None), VALUE_ERROR, "region, got NULL"),
        (lambda c, out: c.fastamp_region_begin(99, 5, 1, out), VALUE_ERROR, "kind of device"),
        (lambda c, out: c.fastamp_region_begin(CPU, 999, 1, out), VALUE_ERROR, "a dtype"),
        (lambda c, _: c.fastamp_scaler_update(None), VALUE_ERROR, "a scaler, got NULL"),
        (
            lambda c, out: c.fastamp_scaler_new(ctypes.byref(ScalerOptions(size=8)), out),
            VALUE_ERROR,
            "got size 8",
        ),
        (
            lambda c, out: c.fastamp_sgd_new(None, ctypes.c_size_t(0), None, out),
            VALUE_ERROR,
            "expected parameters, got none",
        ),
        (
            lambda c, out: c.fastamp_sgd_new(None, ctypes.c_size_t(1), None, out),
            VALUE_ERROR,
            "parameters, got NULL",
        ),
        (
            lambda c, _: c.fastamp_tensor_backward(ctypes.c_void_p(handle(torch.ones(2)))),
            ERROR,
            "does not require grad",
        ),
    ],
)
def test_a_refusal_has_a_code_and_a_text_and_makes_nothing(c, call, code, text):
    out = ctypes.c_void_p(1234)
    assert call(c, ctypes.byref(out)) == code
    assert text in last_error(c)
    assert "Exception raised from" not in last_error(c)
    assert out.value == 1234
    assert not torch.is_autocast_enabled("cpu")


def test_bad_options_are_refused_with_the_scalers_own_text(c):
    options, out = ScalerOptions(), ctypes.c_void_p()
    assert c.fastamp_scaler_options_init(ctypes.byref(options)) == OK
    options.growth_factor = 1.0
    made = c.fastamp_scaler_new(ctypes.byref(options), ctypes.byref(out))
    assert made == VALUE_ERROR
    assert "growth" in last_error(c)
    assert out.value is None


def test_nothing_is_freed_twice_or_where_there_is_nothing(c):
    for free in ("region_end", "scaler_free", "optimizer_free"):
        assert getattr(c, f"fastamp_{free}")(None) == OK
