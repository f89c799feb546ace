# SPDX-License-Identifier: Apache-2.0
"""Regions with an fp8 recipe: arguments, nesting, threads, copies, and code that torch compiles."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import fastamp
from support.children import check_python
from support.float8 import E4M3, E5M2, float8_region, outcomes

BF16, FP16 = torch.bfloat16, torch.float16
OTHER = fastamp.float8.Recipe(grad_dtype=E4M3)


def in_force() -> fastamp.float8.Recipe | None:
    return fastamp.float8.recipe("cpu")


def test_the_recipe_is_in_force_in_its_region_alone():
    assert in_force() is None
    with float8_region() as region:
        assert region.float8 == in_force() == fastamp.float8.Recipe()
        assert torch.get_autocast_dtype("cpu") == BF16
        assert fastamp.float8.recipe("cuda") is None
        with float8_region(float8=OTHER, dtype=FP16):
            assert in_force() == OTHER
            assert torch.get_autocast_dtype("cpu") == FP16
        assert in_force() == fastamp.float8.Recipe()
    assert in_force() is None
    assert fastamp.autocast("cpu").float8 is None


def test_what_regions_inside_do_to_the_recipe():
    with float8_region(float8=OTHER):
        for keeps in (
            fastamp.autocast("cpu"),
            fastamp.autocast("cpu", cache_enabled=False),
            fastamp.autocast("cpu", None, True),
            fastamp.autocast("cuda", dtype=FP16, enabled=False),
            torch.autocast("cpu", dtype=BF16),
        ):
            with keeps:
                assert in_force() == OTHER
        for ends in (
            fastamp.autocast("cpu", dtype=BF16),
            fastamp.autocast("cpu", BF16),
            fastamp.autocast("cpu", float8=False),
            fastamp.autocast("cpu", dtype=FP16),
        ):
            with ends, fastamp.autocast("cpu"):
                assert in_force() is None
            assert in_force() == OTHER
        for suspends in (
            fastamp.autocast("cpu", enabled=False),
            torch.autocast("cpu", dtype=FP16),
            torch.autocast("cpu", enabled=False),
        ):
            with suspends:
                assert in_force() is None
            assert in_force() == OTHER
        with (
            torch.autocast("cpu", enabled=False),
            fastamp.autocast("cpu", dtype=BF16, enabled=False),
        ):
            assert in_force() is None
        with fastamp.autocast("cpu", enabled=False), fastamp.autocast("cpu"):
            assert in_force() == OTHER


def test_regions_of_torch_keep_the_recipe_while_installed_too():
    fastamp.install()
    try:
        with float8_region(float8=OTHER), torch.autocast("cpu", dtype=BF16):
            assert in_force() == OTHER
            with torch.autocast("cpu", dtype=FP16):
                assert in_force() is None
        assert in_force() is None
    finally:
        fastamp.uninstall()


def test_regions_may_end_in_any_order_and_by_exceptions():
    first, second, third = (
        float8_region(float8=OTHER),
        fastamp.autocast("cpu", BF16),
        float8_region(),
    )
    for region in (first, second, third):
        region.__enter__()
    first.__exit__(None, None, None)
    assert in_force() == fastamp.float8.Recipe()
    third.__exit__(None, None, None)
    assert in_force() is None
    second.__exit__(None, None, None)
    assert in_force() is None
    with pytest.raises(KeyError), float8_region():
        raise KeyError
    assert in_force() is None


def test_a_region_object_may_be_open_several_times_and_decorate():
    region = float8_region(float8=OTHER)

    @region
    def decorated() -> Any:
        return in_force()

    with region, fastamp.autocast("cpu", dtype=BF16), region:
        assert decorated() == OTHER
    assert decorated() == OTHER
    assert in_force() is None


def test_other_threads_have_no_recipe():
    seen: list[Any] = []
    region = float8_region()

    def work() -> None:
        seen.append(in_force())
        with region:
            seen.append(in_force())

    with region:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [None, fastamp.float8.Recipe()]


@pytest.mark.parametrize(
    "made", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))]
)
def test_copies_and_pickles_carry_the_recipe(made: Any):
    with made(float8_region(float8=OTHER)):
        assert in_force() == OTHER
        with made(fastamp.autocast("cpu")):
            assert in_force() == OTHER
        with made(fastamp.autocast("cpu", dtype=BF16)):
            assert in_force() is None
        assert made(OTHER) == OTHER


def test_a_pickled_region_means_the_same_in_another_process():
    data = pickle.dumps(float8_region(float8=OTHER))
    check_python(
        "-c",
        f"import pickle, fastamp\nassert pickle.loads({data!r}).float8.grad_dtype == "
        "fastamp.float8.Recipe().forward_dtype",
    )


def test_the_cpu_says_once_that_it_is_slow():
    check_python(
        "-c",
        "import warnings, fastamp\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(2):\n"
        "        fastamp.autocast('cpu', float8=True)\n"
        "assert len(caught) == 1 and 'fp8 on the CPU is a reference' in str(caught[0].message)\n",
    )


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_float8_dtype_on_cuda_means_bfloat16_and_a_recipe():
    for region in (
        fastamp.autocast("cuda", dtype=E4M3),
        fastamp.autocast("cuda", E4M3),
        fastamp.autocast("cuda", float8=True),
        fastamp.autocast("cuda", dtype=BF16, float8=fastamp.float8.Recipe()),
        fastamp.autocast("cuda", dtype=E4M3, float8=fastamp.float8.Recipe()),
    ):
        assert region.fast_dtype == BF16
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9):
            assert region.float8 == fastamp.float8.Recipe()
    assert fastamp.autocast("cuda", dtype=FP16, float8=True).fast_dtype == FP16


def test_a_float8_dtype_on_the_cpu_does_what_torchs_does():
    with warnings.catch_warnings(record=True) as torchs:
        warnings.simplefilter("always")
        torch.autocast("cpu", dtype=E4M3)
    with warnings.catch_warnings(record=True) as own:
        warnings.simplefilter("always")
        region = fastamp.autocast("cpu", dtype=E4M3)
    assert [str(warning.message) for warning in own] == [str(w.message) for w in torchs] != []
    assert not region._enabled
    assert region.float8 is None


@pytest.mark.parametrize(
    ("kind", "text", "arguments"),
    [
        (
            TypeError,
            "autocast: expected float8 to be a bool or a float8.Recipe, got str",
            ("cpu", {"float8": "e4m3"}),
        ),
        (
            TypeError,
            "autocast: expected dtype to be a torch.dtype, got str",
            ("cpu", {"dtype": "bf16", "float8": True}),
        ),
        (
            ValueError,
            "autocast: expected float8 not to be False with dtype torch.float8_e4m3fn",
            ("cuda", {"dtype": E4M3, "float8": False}),
        ),
        (
            ValueError,
            "autocast: expected dtype to be bfloat16, .* got Float8_e5m2. Give other",
            ("cuda", {"dtype": E5M2}),
        ),
        (
            ValueError,
            "autocast: .* got Float8_e4m3fnuz",
            ("cuda", {"dtype": torch.float8_e4m3fnuz}),
        ),
        (
            ValueError,
            "autocast: .* got Float8_e8m0fnu",
            ("cuda", {"dtype": torch.float8_e8m0fnu, "float8": True}),
        ),
        (
            ValueError,
            "autocast: expected dtype .* torch.float16 where float8 is given on cpu, got torch",
            ("cpu", {"dtype": E4M3, "float8": True}),
        ),
        (
            ValueError,
            "autocast: expected the dtype of a region .* bfloat16 or float16, .* got Float",
            ("cpu", {"dtype": torch.float32, "float8": True}),
        ),
        (
            ValueError,
            "autocast: expected the device of a region .* to be cpu or cuda, got xpu",
            ("xpu", {"float8": True}),
        ),
    ],
)
def test_contradictions_are_refused_before_anything_changes(kind: Any, text: str, arguments: Any):
    device, kwargs = arguments
    with pytest.raises(kind, match=text):
        fastamp.autocast(device, **kwargs)
    assert in_force() is None


@pytest.mark.parametrize(
    ("kind", "text", "fields"),
    [
        (
            TypeError,
            "float8.Recipe: expected grad_dtype to be a torch.dtype, got str 'e5m2'",
            {"grad_dtype": "e5m2"},
        ),
        (
            ValueError,
            "float8.Recipe: expected grad_dtype .* float8_e4m3fn or float8_e5m2, got Half",
            {"grad_dtype": FP16},
        ),
        (
            ValueError,
            "float8.Recipe: expected forward_dtype or grad_dtype .* for both",
            {"forward_dtype": E5M2},
        ),
        (
            TypeError,
            "float8.Recipe: expected fast_accumulate to be a tuple of three bools, got bool True",
            {"fast_accumulate": True},
        ),
        (
            TypeError,
            "float8.Recipe: expected ops to be a tuple of str, got str 'mm'",
            {"ops": "mm"},
        ),
        (
            ValueError,
            "float8.Recipe: expected ops .* among linear, addmm, mm, matmul, got 'bmm'",
            {"ops": ("bmm",)},
        ),
    ],
)
def test_impossible_recipes_are_refused(kind: Any, text: str, fields: Any):
    with pytest.raises(kind, match=text):
        fastamp.float8.Recipe(**fields)


def test_recipes_are_values():
    assert fastamp.float8.Recipe() == fastamp.float8.Recipe(E4M3, E5M2)
    assert hash(OTHER) == hash(fastamp.float8.Recipe(grad_dtype=E4M3))
    with pytest.raises(AttributeError):
        OTHER.ops = ("mm",)  # type: ignore[misc]


def test_checkpoint_is_torchs_again_after_the_last_region():
    forward = torch.utils.checkpoint.CheckpointFunction.forward
    with float8_region(), float8_region():
        assert torch.utils.checkpoint.CheckpointFunction.forward is not forward
    assert torch.utils.checkpoint.CheckpointFunction.forward is forward


def test_op_policies_and_recipes_are_carried_together():
    layer, x = nn.Linear(32, 16), torch.randn(4, 32, requires_grad=True)
    seen: list[Any] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        seen.append((in_force(), layer(hidden.detach()).dtype))
        return layer(hidden)

    with float8_region(), fastamp.policies.override({"linear": "fp32"}):
        y = torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)
    y.sum().backward()
    assert seen[0] == seen[1] == (fastamp.float8.Recipe(), torch.float32)


def test_compiled_functions_run_in_fp8_in_a_region_around_them():
    layer, x = nn.Linear(32, 16), torch.randn(4, 32)
    compiled = torch.compile(layer, backend="eager")
    with fastamp.autocast("cpu", dtype=BF16):
        base_dtype = compiled(x)
    with float8_region():
        expected = layer(x)
        assert torch.equal(compiled(x), expected)
        assert outcomes(lambda: compiled(x)) == ["float8"]
    assert not torch.equal(base_dtype, expected)
    with fastamp.autocast("cpu", dtype=BF16):
        assert torch.equal(compiled(x), base_dtype)


def test_a_region_inside_a_compiled_function_runs_eagerly_in_fp8():
    layer, x = nn.Linear(32, 16), torch.randn(4, 32)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with fastamp.autocast("cpu", dtype=torch.bfloat16, float8=True):
            return layer(x) * 2

    with float8_region():
        expected = layer(x) * 2
    found = torch.compile(forward, backend="aot_eager")(x)
    assert torch.equal(found, expected)
    assert in_force() is None


def test_a_region_made_outside_and_entered_in_a_compiled_function_runs_eagerly_in_fp8():
    layer, x = nn.Linear(32, 16), torch.randn(4, 32)
    region = float8_region()

    def inner(x: torch.Tensor) -> torch.Tensor:
        with region:
            return layer(x) * 2

    with float8_region():
        expected = layer(x) * 2
    compiled = torch.compile(lambda x: inner(x + 0), backend="aot_eager")
    assert torch.equal(compiled(x), expected)
    assert torch.equal(torch.compile(inner, backend="aot_eager")(x), expected)
    assert in_force() is None
