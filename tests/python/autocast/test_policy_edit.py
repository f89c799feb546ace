# SPDX-License-Identifier: Apache-2.0
"""policies.get, policies.set and policies.reset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fastamp
import fastamp._C as _C
from support.autocast_state import cuda_state, fastamp_state, torch_kernels

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
POLICIES = ["pass", "lower", "lower_dense", "fp32", "set_opt_dtype", "append_dtype", "promote"]
POLICIES += ["banned"]


@pytest.fixture(autouse=True)
def default_policies_after() -> Iterator[None]:
    yield
    fastamp.policies.reset()
    # Registering anew also drops the kernels that edits have added.
    _C.unregister_kernels()
    _C.register_kernels()


def mm_dtype(a: torch.dtype, b: torch.dtype | None = None) -> torch.dtype:
    with fastamp.autocast("cpu", dtype=BF16):
        return torch.mm(torch.ones(2, 2, dtype=a), torch.ones(2, 2, dtype=b or a)).dtype


def test_each_policy_does_what_its_name_says():
    expected = {
        "pass": {FP32: FP32, FP16: FP16, BF16: BF16, FP64: FP64},
        "lower": {FP32: BF16, FP16: BF16, BF16: BF16, FP64: FP64},
        "fp32": {FP32: FP32, FP16: FP32, BF16: FP32, FP64: FP64},
        "promote": {FP32: FP32, FP16: FP32, BF16: BF16, FP64: FP64},
    }
    for policy, dtypes in expected.items():
        fastamp.policies.set("mm", policy, "cpu")
        assert fastamp.policies.get("mm", "cpu") == policy
        for given, result in dtypes.items():
            assert mm_dtype(given) == result, (policy, given)
    assert mm_dtype(BF16, BF16) == BF16


def test_banned_refuses_with_the_ops_name_and_only_in_regions():
    fastamp.policies.set("mm", "banned", "cpu")
    with pytest.raises(RuntimeError, match="mm"):
        mm_dtype(FP32)
    with fastamp.autocast("cpu", enabled=False):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))


def test_output_dtype_policies_on_a_device_where_torch_has_none():
    x = torch.ones(4, 4, dtype=FP16)
    for op, policy, call in [
        ("softmax", "set_opt_dtype", lambda t, **kw: torch.softmax(t, 1, **kw)),
        ("sum", "set_opt_dtype", lambda t, **kw: torch.sum(t, **kw)),
        ("cumsum", "set_opt_dtype", lambda t, **kw: torch.cumsum(t, 0, **kw)),
    ]:
        fastamp.policies.set(op, policy, "cpu")
        with fastamp.autocast("cpu", dtype=FP16):
            assert call(x).dtype == FP32
            assert call(x, dtype=FP16).dtype == FP16
            assert call(x.double()).dtype == FP64
    fastamp.policies.set("norm.Scalar", "append_dtype", "cpu")
    with fastamp.autocast("cpu", dtype=FP16):
        assert torch.ops.aten.norm.Scalar(x).dtype == FP32
        assert torch.ops.aten.norm.Scalar(x.double()).dtype == FP64
    assert torch.ops.aten.norm.Scalar(x).dtype == FP16


EDITS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], torch.dtype]] = {
    "layer_norm": ("lower", lambda x: torch.nn.functional.layer_norm(x, (4,)), BF16),
    "rms_norm": ("lower", lambda x: torch.nn.functional.rms_norm(x, (4,)), BF16),
    "exp": ("lower", torch.exp, BF16),
    "softmax.int": ("lower", lambda x: torch.softmax(x, 1), BF16),
    "mv": ("lower", lambda x: torch.mv(x, x[0]), BF16),
    "matmul": ("fp32", lambda x: torch.matmul(x, x), FP32),
}


@pytest.mark.parametrize("op", EDITS)
def test_edit_takes_effect_at_the_next_call_and_reset_undoes_it(op: str):
    policy, call, edited = EDITS[op]
    x = torch.ones(4, 4)
    with fastamp.autocast("cpu", dtype=BF16):
        before = call(x).dtype
        assert before != edited
        fastamp.policies.set(op, policy, "cpu")
        assert call(x).dtype == edited
    with torch.autocast("cpu", dtype=BF16):
        assert call(x).dtype == edited
    assert call(x).dtype == FP32
    fastamp.policies.reset()
    with fastamp.autocast("cpu", dtype=BF16):
        assert call(x).dtype == before


COMPOSITES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "chain_matmul": lambda x: torch.chain_matmul(x, x),
    "linalg_multi_dot": lambda x: torch.linalg.multi_dot([x, x]),
    "tensordot": lambda x: torch.tensordot(x, x, 1),
}


@pytest.mark.parametrize("undo", ["reset", "pass"])
@pytest.mark.parametrize("op", COMPOSITES)
def test_an_edit_taken_back_leaves_the_ops_inside_to_autocast(op: str, undo: str):
    """These run mm inside; torch has no CPU autocast kernel for them, so that mm is lowered."""
    x = torch.ones(4, 4)
    with fastamp.autocast("cpu", dtype=BF16):
        assert COMPOSITES[op](x).dtype == BF16
    fastamp.policies.set(op, "fp32", "cpu")
    if undo == "reset":
        fastamp.policies.reset()
    else:
        fastamp.policies.set(op, "pass", "cpu")
    with fastamp.autocast("cpu", dtype=BF16):
        assert COMPOSITES[op](x).dtype == BF16


def test_an_edit_of_one_device_leaves_the_other_and_no_device_means_both():
    fastamp.policies.set("mm", "fp32", "cuda")
    assert (fastamp.policies.get("mm", "cpu"), fastamp.policies.get("mm", "cuda")) == (
        "lower",
        "fp32",
    )
    assert mm_dtype(FP32) == BF16
    fastamp.policies.set("mm", "promote")
    assert {fastamp.policies.get("mm", device) for device in ("cpu", "cuda")} == {"promote"}


def test_an_edit_of_the_cuda_column_on_fake_tensors():
    with FakeTensorMode():
        x = torch.ones(4, 4, device="cuda:0")
        with cuda_state(FP16):
            assert torch.mm(x, x).dtype == FP16
            fastamp.policies.set("mm", "fp32", "cuda")
            assert torch.mm(x, x).dtype == FP32
            fastamp.policies.set("binary_cross_entropy", "fp32", "cuda")
            loss = torch.nn.functional.binary_cross_entropy(x.half(), x.half())
            assert loss.dtype == FP32


def test_a_base_name_changes_every_overload():
    overloads = ("pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor")
    fastamp.policies.set("pow", "lower", "cuda")
    rows = {row.op: row for row in fastamp.policies.table()}
    assert {rows[op].cuda for op in overloads} == {"lower"}
    assert {rows[op].cuda_default for op in overloads} == {"fp32"}
    fastamp.policies.set("aten::pow.Scalar", "fp32", "cuda")
    assert fastamp.policies.get("pow.Tensor_Scalar", "cuda") == "lower"
    with pytest.raises(ValueError, match="overload"):
        fastamp.policies.get("pow", "cuda")


def test_a_bare_name_means_the_default_overload_where_there_is_one():
    """ "conv1d" is both an op and the base name of "conv1d.padding"."""
    assert fastamp.policies.get("conv1d", "cuda") == "lower"
    for name in ("conv1d", "aten::conv1d", "conv1d.default", "aten::conv1d.default"):
        fastamp.policies.reset()
        fastamp.policies.set(name, "fp32", "cpu")
        for spelling in ("conv1d", "aten::conv1d", "conv1d.default", "aten::conv1d.default"):
            assert fastamp.policies.get(spelling, "cpu") == "fp32"
        assert fastamp.policies.get("conv1d.padding", "cpu") == "lower"
        with pytest.raises(ValueError, match="overloads differ"):
            fastamp.policies.get("conv1d.*", "cpu")


def test_a_star_means_all_overloads():
    names = {row.op for row in fastamp.policies.table() if row.op.split(".")[0] == "prod"}
    assert names >= {"prod", "prod.dim_int"}
    fastamp.policies.set("prod.*", "lower", "cpu")
    assert {fastamp.policies.get(name, "cpu") for name in names} == {"lower"}
    assert fastamp.policies.get("aten::prod.*", "cpu") == "lower"
    with fastamp.policies.override({"prod.*": "fp32", "prod": "pass"}, "cpu"):
        assert fastamp.policies.get("prod", "cpu") == "pass"
        assert fastamp.policies.get("prod.dim_int", "cpu") == "fp32"


def test_every_op_of_the_table_can_be_named_exactly():
    for row in fastamp.policies.table():
        name = row.op if "." in row.op else f"{row.op}.default"
        assert fastamp.policies.get(name, "cpu") == row.cpu


BAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "unknown op": (("matmull", "lower"), "matmul"),
    "unknown overload": (("softmax.float", "lower"), "softmax.int"),
    "empty op": (("", "lower"), "op"),
    "no default overload": (("softmax.default", "lower"), "softmax.int"),
    "all overloads of nothing": ((".*", "lower"), "op"),
    "unknown policy": (("mm", "lowered"), "lower"),
    "empty policy": (("mm", ""), "lower"),
    "no dtype argument": (("mm", "set_opt_dtype"), "mm"),
    "no overload with a dtype": (("softmax", "append_dtype"), "softmax"),
    "one overload of several cannot": (
        ("linalg_vector_norm", "append_dtype"),
        "linalg_vector_norm",
    ),
    "other device": (("mm", "lower", "xpu"), "xpu"),
}
BAD_DEVICES = ["foo", "", "CPU", "cuda:x"]


@pytest.mark.parametrize("name", BAD)
def test_a_refused_edit_names_what_is_wrong_and_changes_nothing(name: str):
    args, needle = BAD[name]
    fastamp.policies.set("bmm", "fp32", "cpu")
    before = fastamp_state()
    with pytest.raises(ValueError, match=needle):
        fastamp.policies.set(*args)
    assert fastamp_state() == before
    assert mm_dtype(FP32) == BF16


@pytest.mark.parametrize("device", BAD_DEVICES)
@pytest.mark.parametrize("call", [fastamp.policies.get, fastamp.policies.set])
def test_an_unknown_device_is_a_value_error(call: Any, device: str):
    arguments = ("mm", device) if call is fastamp.policies.get else ("mm", "fp32", device)
    with pytest.raises(ValueError, match="device"):
        call(*arguments)


@pytest.mark.parametrize("bad", [None, 3, torch.mm])
def test_an_op_that_is_no_string_is_a_type_error(bad: Any):
    with pytest.raises(TypeError):
        fastamp.policies.set(bad, "lower")


def test_every_edit_either_works_or_changes_nothing():
    """All ops, all policies: no crash, no half edit, and never a wrong answer about itself."""
    accepted = 0
    for row in fastamp.policies.table():
        for policy in POLICIES:
            with suppress(ValueError):
                _C.set_op_policy(row.op, policy, None)
                assert fastamp.policies.get(row.op, "cuda") == policy
                accepted += 1
        assert fastamp.policies.get(row.op, "cpu") in POLICIES
    assert accepted > 4 * len(fastamp.policies.table())
    fastamp.policies.reset()
    rows = fastamp.policies.table()
    assert all((r.cpu, r.cuda) == (r.cpu_default, r.cuda_default) for r in rows)
    assert mm_dtype(FP32) == BF16


def test_promote_runs_a_mix_of_float16_and_bfloat16_in_float32_where_torch_throws():
    mix = [torch.ones(2, dtype=FP16), torch.full((2,), 2.0, dtype=BF16)]
    for region_dtype in (BF16, FP16):
        with fastamp.autocast("cpu", dtype=region_dtype):
            assert torch.equal(torch.cat(mix), torch.tensor([1.0, 1.0, 2.0, 2.0]))
            assert torch.stack(mix).dtype == FP32
            assert torch.cat([mix[0], mix[0]]).dtype == (FP16 if region_dtype == FP16 else FP32)
        refuses = pytest.raises(RuntimeError, match="prioritize")
        with torch_kernels(), torch.autocast("cpu", dtype=region_dtype), refuses:
            torch.cat(mix)


def test_edits_made_while_uninstalled_take_effect_after_install():
    with torch_kernels():
        fastamp.policies.set("layer_norm", "lower", "cpu")
        with fastamp.autocast("cpu"):
            assert torch.nn.functional.layer_norm(torch.ones(4), (4,)).dtype == FP32
    with fastamp.autocast("cpu"):
        assert torch.nn.functional.layer_norm(torch.ones(4), (4,)).dtype == BF16


def test_weight_cast_kept_under_one_policy_is_not_used_under_another():
    w = torch.nn.Parameter(torch.ones(4, 4))
    with fastamp.autocast("cpu", dtype=BF16):
        assert torch.mm(w, w).dtype == BF16
        fastamp.policies.set("mm", "fp32", "cpu")
        assert torch.mm(w, w).dtype == FP32
        fastamp.policies.set("mm", "lower", "cpu")
        assert torch.mm(w, w).dtype == BF16


def test_reset_without_edits_and_edits_to_the_present_policy_change_nothing():
    before = fastamp_state()
    fastamp.policies.reset()
    fastamp.policies.set("mm", "lower")
    assert fastamp_state() == before
