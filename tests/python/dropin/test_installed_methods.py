# SPDX-License-Identifier: Apache-2.0
"""What `__enter__` and `__exit__` of torch's region classes are while fastamp is installed."""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch

import fastamp._C as _C
from support.autocast_state import nesting, torch_state

CLASSES = [torch.autocast, torch.cuda.amp.autocast, torch.cpu.amp.autocast]
METHODS = ["__enter__", "__exit__"]
TORCHS = {(cls, name): vars(cls)[name] for cls in CLASSES for name in METHODS}
pytestmark = [
    pytest.mark.usefixtures("installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("cls", CLASSES)
def test_each_class_has_a_c_function_that_looks_like_torchs(cls: Any, name: str):
    method, torchs = vars(cls)[name], TORCHS[cls, name]
    is_called_in_python = name == "__enter__" and sys.version_info >= (3, 14)
    native = method.__wrapped__ if is_called_in_python else method
    assert type(native) is _C.RegionMethod
    assert getattr(cls, name) is method
    assert native.__wrapped__ is torchs
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(method, attribute) == getattr(torchs, attribute)
    assert inspect.isroutine(method)
    assert inspect.signature(method) == inspect.signature(torchs)
    assert inspect.getsource(method) == inspect.getsource(torchs)
    assert functools.wraps(method)(lambda: None).__name__ == name


@pytest.mark.parametrize("name", METHODS)
def test_it_pickles_by_name(name: str):
    method = getattr(torch.autocast, name)
    assert pickle.loads(pickle.dumps(method)) is method


def test_it_binds_as_a_function_does():
    region = torch.autocast("cpu")
    enter = region.__enter__
    assert inspect.ismethod(enter)
    assert enter.__self__ is region
    assert enter.__func__ is torch.autocast.__enter__
    assert enter() is region
    assert torch.is_autocast_enabled("cpu")
    assert torch.autocast.__exit__(region, None, exc_tb=None, exc_val=None) is False
    assert nesting() == 0


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("__enter__", (), {}),
        ("__enter__", (0, 1), {}),
        ("__enter__", (0,), {"other": 1}),
        ("__exit__", (), {}),
        ("__exit__", (0, 1), {}),
        ("__exit__", (0, 1, 2, 3, 4), {}),
        ("__exit__", (0, 1, 2), {"other": 3}),
        ("__exit__", (0, 1, 2, 3), {"exc_tb": 3}),
    ],
)
@pytest.mark.parametrize("cls", CLASSES)
def test_wrong_calls_are_refused_in_torchs_words(
    cls: Any, name: str, arguments: tuple[Any, ...], named: dict[str, Any]
):
    before = torch_state()
    with pytest.raises(TypeError) as expected:
        TORCHS[cls, name](*arguments, **named)
    with pytest.raises(TypeError) as got:
        getattr(cls, name)(*arguments, **named)
    assert str(got.value) == str(expected.value)
    assert torch_state() == before


def test_subclasses_call_it_through_super():
    calls = []

    class Region(torch.autocast):
        def __enter__(self) -> Any:
            calls.append("enter")
            return super().__enter__()

        def __exit__(self, *args: Any) -> Any:
            calls.append("exit")
            return super().__exit__(*args)

    before = torch_state()
    with Region("cpu") as region, ExitStack() as stack:
        stack.enter_context(region)
        assert _C.open_torch_regions() == 2
    assert calls == ["enter", "enter", "exit", "exit"]
    assert torch_state() == before


@pytest.mark.parametrize("cls", [torch.cuda.amp.autocast, torch.cpu.amp.autocast])
def test_the_deprecated_classes_are_native_and_end_what_torch_has_entered(cls: Any):
    before = torch_state()
    region = cls()
    with region:
        assert _C.open_torch_regions() == 1
    assert "prev" not in vars(region)
    TORCHS[torch.autocast, "__enter__"](region)
    assert _C.open_torch_regions() == 0
    region.__exit__(None, None, None)
    assert torch_state() == before


def test_tests_of_others_may_replace_it_for_a_while():
    with mock.patch.object(torch.autocast, "__enter__", autospec=True) as enter:
        torch.autocast("cpu").__enter__()
        assert enter.call_count == 1
    with torch.autocast("cpu"):
        assert _C.open_torch_regions() == 1
