# SPDX-License-Identifier: Apache-2.0
"""Where torch.autocast raises, warns or accepts, so does fastamp.autocast."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fastamp
from support.autocast_state import set_torch_state, torch_state
from support.children import run_python

CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "nothing": ((), {}),
    "device None": ((None,), {}),
    "device int": ((0,), {}),
    "device bytes": ((b"cpu",), {}),
    "torch.device": ((torch.device("cpu"),), {}),
    "unknown device": (("foo",), {}),
    "empty device": (("",), {}),
    "cpu with index": (("cpu:0",), {}),
    "upper case": (("CPU",), {}),
    "meta": (("meta",), {}),
    "mps": (("mps",), {}),
    "xpu": (("xpu",), {}),
    "hpu": (("hpu",), {}),
    "privateuseone": (("privateuseone",), {}),
    "str subclass": ((type("S", (str,), {})("cpu"),), {}),
    "fp32 on cpu": (("cpu", torch.float32), {}),
    "fp64 on cpu": (("cpu", torch.float64), {}),
    "int64 on cpu": (("cpu", torch.int64), {}),
    "fp32 on cpu, disabled": (("cpu", torch.float32, False), {}),
    "fp32 on cuda": (("cuda", torch.float32), {}),
    "fp8 on cpu": (("cpu",), {"dtype": torch.float8_e5m2}),
    "cuda": (("cuda",), {}),
    "cuda bf16": (("cuda", torch.bfloat16), {}),
    "cuda disabled": (("cuda",), {"enabled": False}),
    "cuda twice the device": (("cuda",), {"device_type": "cuda"}),
    "unknown keyword": (("cpu",), {"typo": 1}),
    "empty keyword": (("cpu",), {"": 1}),
    "dtype twice": (("cpu", torch.float16), {"dtype": torch.float16}),
    "too many": (("cpu", None, True, None, 5), {}),
    "all keywords": (
        (),
        {"device_type": "cpu", "dtype": None, "enabled": True, "cache_enabled": None},
    ),
    "enabled 0": (("cpu",), {"enabled": 0}),
    "enabled 1": (("cpu",), {"enabled": 1}),
    "enabled None": (("cpu",), {"enabled": None}),
    "enabled str": (("cpu",), {"enabled": "yes"}),
    "enabled tensor": (("cpu",), {"enabled": torch.tensor(True)}),
    "cache 0": (("cpu",), {"cache_enabled": 0}),
    "cache str": (("cpu",), {"cache_enabled": "no"}),
    "dtype str": (("cpu",), {"dtype": "float16"}),
    "dtype type": (("cpu",), {"dtype": float}),
    "dtype str, disabled": (("cpu",), {"dtype": "float16", "enabled": False}),
}
# Refused by torch too, but only on entering the region and after a warning.
REFUSED_EARLIER = {"dtype str", "dtype str, disabled"}
# fastamp's refuses what torch warns about and disables.
REFUSED_BY_US = {"dtype type"}


def outcome(cls: Any, name: str) -> tuple[Any, list[tuple[type, str, str, int]], Any]:
    """Exception type, or the state inside; the warnings with the place they point at."""
    args, kwargs = CALLS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            region = cls(*args, **kwargs)
            with region:
                result: Any = torch_state()
        except Exception as error:
            result = type(error)
    shown = [(w.category, str(w.message), Path(w.filename).name, w.lineno) for w in caught]
    return result, shown


@pytest.mark.parametrize("name", CALLS)
def test_same_exception_warning_or_state_as_torch(name: str):
    before = torch_state()
    expected, expected_warnings = outcome(torch.autocast, name)
    set_torch_state(
        before
    )  # torch's region leaves a half-entered state behind some of these errors
    for _ in range(2):  # the second call takes the way of arguments that were checked before
        got, got_warnings = outcome(fastamp.autocast, name)
        assert torch_state() == before
        if name in REFUSED_EARLIER | REFUSED_BY_US:
            assert got is TypeError
            assert got is expected or name in REFUSED_BY_US
            continue
        assert got == expected
        assert got_warnings == expected_warnings


def test_a_region_for_cuda_with_an_index_does_not_let_plain_cuda_pass_unchecked():
    """torch lets "cuda:0" through without looking for a GPU, but never "cuda"."""
    code = """
import torch, fastamp, warnings
torch.cuda.is_available = lambda: False
fastamp.autocast("cuda:0", dtype=torch.bfloat16)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    region = fastamp.autocast("cuda", dtype=torch.bfloat16)
assert not region._enabled
assert len(caught) == 1
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_refused_argument_is_named_in_the_message():
    for args, needle in [((3,), "device_type"), (("foo",), "foo")]:
        with pytest.raises((ValueError, RuntimeError), match=needle):
            fastamp.autocast(*args)


def test_a_warning_points_at_the_line_that_made_the_region():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fastamp.autocast("cpu", dtype=torch.float32)  # this line
    line = Path(__file__).read_text(encoding="utf-8").splitlines()[caught[0].lineno - 1]
    assert caught[0].filename == __file__
    assert line.endswith("# this line")


def test_a_warning_turned_into_an_error_leaves_no_trace():
    before = torch_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="not supported"):
            fastamp.autocast("cpu", dtype=torch.float32)
    assert torch_state() == before


def set_and_enter(region: Any, name: str, value: Any) -> None:
    setattr(region, name, value)
    region.__enter__()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fast_dtype", "float16"),
        ("fast_dtype", None),
        ("device", 3),
        ("device", "nonsense"),
    ],
)
def test_an_attribute_of_a_wrong_kind_is_refused_at_the_latest_on_enter(name: str, value: Any):
    before = torch_state()
    region = fastamp.autocast("cpu", dtype=torch.float16)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        set_and_enter(region, name, value)
    assert torch_state() == before
    assert (region.device, region.fast_dtype) == ("cpu", torch.float16)


@pytest.mark.parametrize("name", ["device", "fast_dtype", "_enabled", "_cache_enabled"])
def test_an_attribute_cannot_be_deleted_into_a_crash(name: str):
    region = fastamp.autocast("cpu", dtype=torch.float16)
    with pytest.raises((AttributeError, TypeError)):
        delattr(region, name)
    with region:
        pass


@pytest.mark.parametrize("method", ["__enter__", "__exit__", "__init__"])
def test_methods_called_on_another_object_are_refused(method: str):
    with pytest.raises(TypeError):
        getattr(fastamp.autocast, method)(torch.autocast("cpu"), "cpu", None, None)


def test_uninitialised_regions_do_not_crash_the_interpreter():
    code = """
import copy, pickle, fastamp
region = fastamp.autocast.__new__(fastamp.autocast)
attempts = [
    region.__enter__, lambda: region.device, lambda: region.fast_dtype, lambda: region._enabled,
    lambda: copy.copy(region), lambda: pickle.dumps(region), lambda: repr(region),
    lambda: region.__exit__(None, None, None), lambda: fastamp._C.Region().__enter__(),
    lambda: fastamp._C.Region("cpu").__enter__().__exit__(),
    lambda: fastamp._C.set_region_hooks(1), lambda: fastamp._C.follow_clear_cache(len),
]
for attempt in attempts:
    try:
        attempt()
    except Exception as error:
        print(type(error).__name__)
print("alive")
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("alive\n")
