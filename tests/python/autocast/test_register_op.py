# SPDX-License-Identifier: Apache-2.0
"""fastamp.policies.register_op: ops that are not in the table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fastamp

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

torch.library.define("fastamp_test::product", "(Tensor a, Tensor b) -> Tensor")
torch.library.define("fastamp_test::many", "(Tensor[] a, Tensor?[] b, Tensor? c) -> Tensor[]")
torch.library.define("fastamp_test::total", "(Tensor a, *, ScalarType? dtype=None) -> Tensor")
torch.library.define("fastamp_test::fill_", "(Tensor(a!) a, Tensor b) -> Tensor(a!)")
torch.library.define("fastamp_test::named", "(Tensor a, Dict(str, Tensor) named) -> Tensor[]")
torch.library.define("fastamp_test::dict_only", "(Dict(str, Tensor) named) -> Tensor[]")
torch.library.define("fastamp_test::tuple_only", "((Tensor, Tensor) both) -> Tensor[]")
torch.library.define(
    "fastamp_test::nested",
    "(Dict(str, Tensor[]) a, (Tensor, int) b, Tensor[] c, Dict(int, Tensor)? d=None) -> Tensor[]",
)
torch.library.define("fastamp_test::anything", "(Tensor a, Any b) -> Tensor")
torch.library.define("fastamp_test::keys", "(Dict(Tensor, int) a, Tensor b) -> Tensor")
torch.library.define("fastamp_test::both_", "(Tensor(a!) a, Tensor(b!) b, Tensor c) -> ()")
torch.library.define("fastamp_test::each_", "(Tensor(a!)[] a, Tensor c) -> ()")
torch.library.define("fastamp_test::put", "(Tensor a, *, Tensor(b!) out) -> Tensor(b!)")
torch.library.define("fastamp_test::either.one", "(Tensor a) -> Tensor")
torch.library.define("fastamp_test::either.two", "(Tensor a, Tensor b) -> Tensor")


@torch.library.impl("fastamp_test::product", "CompositeExplicitAutograd")
def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * b


@torch.library.impl("fastamp_test::many", "CompositeExplicitAutograd")
def _many(a: Any, b: Any, c: Any) -> list[torch.Tensor]:
    return [t.clone() for t in (*a, *b, c) if t is not None]


@torch.library.impl("fastamp_test::total", "CompositeExplicitAutograd")
def _total(a: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return a.sum(dtype=dtype)


@torch.library.impl("fastamp_test::named", "CompositeExplicitAutograd")
def _named(a: torch.Tensor, named: Any) -> list[torch.Tensor]:
    return [a.clone(), *(named[key].clone() for key in sorted(named))]


@torch.library.impl("fastamp_test::nested", "CompositeExplicitAutograd")
def _nested(a: Any, b: Any, c: Any, d: Any = None) -> list[torch.Tensor]:
    lists = [*a.values(), [b[0]], c, list(d.values()) if d else []]
    return [t.clone() for tensors in lists for t in tensors]


@torch.library.impl("fastamp_test::fill_", "CompositeExplicitAutograd")
def _fill(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    assert a.dtype == b.dtype
    return a.copy_(b)


@torch.library.impl("fastamp_test::put", "CompositeExplicitAutograd")
def _put(a: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    assert a.dtype == out.dtype
    return out.copy_(a)


@torch.library.impl("fastamp_test::either.one", "CompositeImplicitAutograd")
def _one(a: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, a)


@torch.library.impl("fastamp_test::either.two", "CompositeImplicitAutograd")
def _two(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


ops = torch.ops.fastamp_test


@pytest.fixture(autouse=True)
def registered_ops_are_dropped() -> Iterator[None]:
    yield
    for row in fastamp.policies.table():
        if row.op.startswith("fastamp_test::") or row.op == "nan_to_num":
            fastamp.policies.unregister_op(row.op)
    fastamp.policies.reset()


def product_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    with fastamp.autocast("cpu", dtype=BF16):
        return ops.product(torch.ones(2, dtype=a), torch.ones(2, dtype=b)).dtype


@pytest.mark.parametrize(
    ("policy", "dtypes"),
    [
        ("pass", [FP32, FP32, FP32, BF16]),
        ("lower", [BF16, BF16, BF16, BF16]),
        ("fp32", [FP32, FP32, FP32, FP32]),
        ("promote", [FP32, FP32, FP32, BF16]),
    ],
)
def test_each_policy_does_what_its_name_says(policy: str, dtypes: list[torch.dtype]):
    fastamp.policies.register_op("fastamp_test::product", policy)
    given = [(FP32, FP32), (FP32, BF16), (BF16, FP16), (BF16, BF16)]
    assert [product_dtype(a, b) for a, b in given] == dtypes
    assert product_dtype(FP64, FP64) == FP64
    assert ops.product(torch.ones(2), torch.ones(2)).dtype == FP32  # outside regions


def test_banned_refuses():
    fastamp.policies.register_op("fastamp_test::product", "banned")
    with pytest.raises(RuntimeError, match="fastamp_test::product: not allowed under autocast"):
        product_dtype(FP32, FP32)


def test_lists_and_absent_tensors_are_cast_or_left():
    fastamp.policies.register_op("fastamp_test::many", "lower")
    whole = torch.ones(2, dtype=torch.int64)
    with fastamp.autocast("cpu", dtype=BF16):
        outs = ops.many([torch.ones(2), whole], [None, torch.ones(3)], None)
        dtypes = [t.dtype for t in outs]
        assert dtypes == [BF16, torch.int64, BF16]
        assert ops.many([], [], torch.ones(1))[0].dtype == BF16


def test_tensors_in_dicts_and_tuples_are_cast():
    fastamp.policies.register_op("fastamp_test::named", "lower")
    fastamp.policies.register_op("fastamp_test::nested", "promote")
    x, low, whole = torch.ones(2), torch.ones(2, dtype=BF16), torch.ones(2, dtype=torch.int64)
    given = {"x": x, "y": low, "z": whole}
    with fastamp.autocast("cpu", dtype=BF16):
        assert [t.dtype for t in ops.named(x, given)] == [BF16, BF16, BF16, torch.int64]
        assert [t.dtype for t in ops.nested({"a": [low]}, (low, 1), [low])] == [BF16] * 3
        outs = ops.nested({"a": [low, whole]}, (low, 1), [low], {3: x})
        assert [t.dtype for t in outs] == [FP32, torch.int64, FP32, FP32, FP32]
    assert given["x"] is x
    assert [t.dtype for t in ops.named(x, given)] == [FP32, FP32, BF16, torch.int64]


WRITERS: dict[str, Any] = {
    "aten::index_put_": lambda a, v: a.index_put_((torch.tensor([0, 2]),), v[:2]),
    "aten::scatter_add_": lambda a, v: a.scatter_add_(0, torch.tensor([0, 1, 1, 3]), v),
    "aten::index_add_": lambda a, v: a.index_add_(0, torch.tensor([0, 1, 1, 3]), v),
    "aten::index_copy_": lambda a, v: a.index_copy_(0, torch.tensor([0, 1, 2, 3]), v),
    "aten::lerp_": lambda a, v: a.lerp_(v, 0.5),
    "aten::masked_scatter_": lambda a, v: a.masked_scatter_(torch.tensor([True, False] * 2), v),
    "fastamp_test::fill_": lambda a, v: ops.fill_(a, v),
    "fastamp_test::put": lambda a, v: ops.put(v, out=a),
}


@pytest.mark.parametrize("own", [FP32, BF16, FP16])
@pytest.mark.parametrize("value", [FP32, BF16, FP16])
@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_into_a_tensor_gets_its_dtype(
    name: str, own: torch.dtype, value: torch.dtype
):
    fastamp.policies.register_op(name, "promote", "cpu")
    try:
        written, values = torch.zeros(4, dtype=own), torch.tensor([1.0, 2, 3, 4]).to(value)
        expected = written.clone()
        WRITERS[name](expected, values.to(own))
        with fastamp.autocast("cpu", dtype=BF16):
            result = WRITERS[name](written, values)
        assert result.data_ptr() == written.data_ptr()
        assert written.dtype == own
        assert torch.equal(written, expected)
        assert values.dtype == value
    finally:
        fastamp.policies.unregister_op(name)


def test_gradients_flow_through_the_cast_of_what_is_written():
    fastamp.policies.register_op("aten::index_put_", "promote", "cpu")
    try:
        values = torch.ones(2, requires_grad=True)
        with fastamp.autocast("cpu", dtype=BF16):
            whole = torch.zeros(3, dtype=BF16).clone()
            whole[torch.tensor([0, 2])] = values * 2
            whole.index_put_((torch.tensor([0, 1]),), values)
        whole.float().sum().backward()
        assert values.grad is not None
        assert values.grad.tolist() == [1.0, 3.0]
    finally:
        fastamp.policies.unregister_op("aten::index_put_")


def test_a_tensor_that_autocast_never_casts_is_written_as_it_is_given():
    fastamp.policies.register_op("aten::index_add_", "promote", "cpu")
    try:
        with (
            fastamp.autocast("cpu", dtype=BF16),
            pytest.raises(RuntimeError, match=r"dtype|scalar"),
        ):
            torch.zeros(2, dtype=FP64).index_add_(0, torch.tensor([0]), torch.ones(1))
        with fastamp.autocast("cpu", dtype=BF16):
            whole = torch.zeros(2, dtype=torch.int64).index_add_(
                0, torch.tensor([0]), torch.ones(1, dtype=torch.int64)
            )
        assert whole.tolist() == [1, 0]
    finally:
        fastamp.policies.unregister_op("aten::index_add_")


def test_an_absent_dtype_is_set():
    fastamp.policies.register_op("fastamp_test::total", "set_opt_dtype")
    x = torch.ones(2, dtype=BF16)
    with fastamp.autocast("cpu", dtype=BF16):
        assert ops.total(x).dtype == FP32
        assert ops.total(x, dtype=BF16).dtype == BF16
        assert ops.total(x.double()).dtype == FP64


def test_gradients_flow_through_the_casts():
    fastamp.policies.register_op("fastamp_test::either.one", "lower")
    w = torch.eye(2, requires_grad=True)
    with fastamp.autocast("cpu", dtype=BF16):
        y = ops.either(w)
    assert y.dtype == BF16
    y.float().sum().backward()
    assert w.grad is not None
    assert w.grad.dtype == FP32


def test_pass_lets_the_ops_inside_be_autocast():
    fastamp.policies.register_op("fastamp_test::either", "pass")
    with fastamp.autocast("cpu", dtype=BF16):
        assert ops.either(torch.ones(2, 2)).dtype == BF16


def test_the_op_is_in_the_table_and_follows_edits_and_blocks():
    fastamp.policies.register_op("fastamp_test::product", "lower", "cpu")
    row = fastamp.policies.table()[-1]
    assert row == ("fastamp_test::product", "lower", "pass", "lower", "pass")
    fastamp.policies.set("fastamp_test::product", "fp32", "cpu")
    assert product_dtype(BF16, BF16) == FP32
    with fastamp.policies.override({"fastamp_test::product": "lower"}):
        assert product_dtype(FP32, FP32) == BF16
    fastamp.policies.reset()
    assert fastamp.policies.get("fastamp_test::product", "cpu") == "lower"
    fastamp.policies.register_op("fastamp_test::product", "fp32", "cpu")
    assert product_dtype(BF16, BF16) == FP32
    assert [r.op for r in fastamp.policies.table()].count("fastamp_test::product") == 1


def test_all_overloads_or_one():
    fastamp.policies.register_op("fastamp_test::either.two", "lower")
    x = torch.ones(2, 2)
    with fastamp.autocast("cpu", dtype=BF16):
        assert ops.either(x, x).dtype == BF16
    names = [row.op for row in fastamp.policies.table()]
    assert "fastamp_test::either.one" not in names
    fastamp.policies.register_op("fastamp_test::either", "fp32")
    names = [row.op for row in fastamp.policies.table()]
    assert {"fastamp_test::either.one", "fastamp_test::either.two"} <= set(names)


def test_an_op_of_torchs_that_is_not_in_the_table():
    fastamp.policies.register_op("aten::nan_to_num", "lower", "cpu")
    with fastamp.autocast("cpu", dtype=BF16):
        assert torch.nan_to_num(torch.ones(2)).dtype == BF16
    fastamp.policies.unregister_op("nan_to_num")
    with fastamp.autocast("cpu", dtype=BF16):
        assert torch.nan_to_num(torch.ones(2)).dtype == FP32


@pytest.mark.parametrize("policy", ["pass", "banned"])
def test_a_name_without_overload_leaves_out_what_can_never_be_cast(policy: str):
    fastamp.policies.register_op("aten::gelu", policy)
    assert "gelu.out" not in [row.op for row in fastamp.policies.table()]
    with fastamp.policies.override({"aten::gelu": "lower"}), fastamp.autocast("cpu", dtype=BF16):
        assert torch.nn.functional.gelu(torch.ones(2)).dtype == BF16
    fastamp.policies.unregister_op("aten::gelu")
    fastamp.policies.register_op("aten::gelu.out", policy)
    fastamp.policies.unregister_op("aten::gelu.out")


def test_unregister_takes_out_every_overload_that_was_added():
    fastamp.policies.register_op("fastamp_test::either", "lower")
    fastamp.policies.unregister_op("fastamp_test::either")
    assert not [
        row for row in fastamp.policies.table() if row.op.startswith("fastamp_test::either")
    ]


def test_unregister_gives_back_the_kernel_of_somebody_else():
    op = torch.library.custom_op("fastamp_test::theirs", lambda x: x.clone(), mutates_args=(),
                                 schema="(Tensor x) -> Tensor")  # fmt: skip
    torch.library.register_autocast(op, "cpu", FP16)
    x = torch.ones(2)
    with fastamp.autocast("cpu", dtype=BF16):
        assert op(x).dtype == FP16
        fastamp.policies.register_op("fastamp_test::theirs", "lower", "cpu")
        assert op(x).dtype == BF16
        fastamp.policies.unregister_op("fastamp_test::theirs")
        assert op(x).dtype == FP16


def test_torchs_kernels_come_back_while_disabled():
    fastamp.policies.register_op("fastamp_test::product", "lower")
    with fastamp.debug.torch_kernels():
        assert product_dtype(FP32, FP32) == FP32
    assert product_dtype(FP32, FP32) == BF16


@pytest.mark.parametrize(
    ("name", "policy", "device", "text"),
    [
        (
            "fastamp_test::prodct",
            "lower",
            None,
            r"policies.register_op: .* got 'fastamp_test::prodct'.*product",
        ),
        ("nowhere::product", "lower", None, r"policies.register_op: .*No op has this namespace"),
        (
            "aten::mm",
            "lower",
            None,
            r"policies.register_op: .* in the table, got 'aten::mm'.*set_op_policy",
        ),
        ("fastamp_test::product", "lowest", None, r"expected policy to be one of .* got 'lowest'"),
        (
            "fastamp_test::product",
            "lower",
            "tpu",
            r"policies.register_op: expected device .* got 'tpu'",
        ),
        ("fastamp_test::product", "set_opt_dtype", None, r"product can carry.*optional dtype"),
        ("fastamp_test::product", "append_dtype", None, r"product can carry.*overload"),
        ("fastamp_test::fill_", "lower", None, r"fill_ can carry.*none of which the op writes"),
        ("fastamp_test::fill_", "fp32", None, r"fill_ can carry.*none of which the op writes"),
        ("fastamp_test::both_", "promote", None, r"both_ can carry.*one of which at most"),
        ("fastamp_test::each_", "promote", None, r"each_ can carry.*one of which at most"),
        ("fastamp_test::dict_only", "lower", None, r"outside of dicts and tuples"),
        ("fastamp_test::dict_only", "promote", None, r"outside of dicts and tuples"),
        ("fastamp_test::tuple_only", "fp32", None, r"outside of dicts and tuples"),
        ("fastamp_test::anything", "lower", None, r"anything can carry.*that can be cast"),
        ("fastamp_test::keys", "promote", None, r"keys can carry.*that can be cast"),
    ],
)
def test_what_cannot_be_registered_is_refused(name: str, policy: str, device: Any, text: str):
    before = fastamp.policies.table()
    with pytest.raises(ValueError, match=text):
        fastamp.policies.register_op(name, policy, device)
    assert fastamp.policies.table() == before


def test_only_registered_ops_can_be_unregistered():
    with pytest.raises(
        ValueError, match=r"policies.unregister_op: .* got 'mm', which is in the table"
    ):
        fastamp.policies.unregister_op("mm")
    with pytest.raises(ValueError, match=r"policies.unregister_op: .* got 'fastamp_test::product'"):
        fastamp.policies.unregister_op("fastamp_test::product")


def test_compiled_functions_follow():
    w = torch.ones(2, 2)

    @torch.compile(backend="aot_eager")
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nan_to_num(x)

    def dtype() -> torch.dtype:
        with fastamp.autocast("cpu", dtype=BF16):
            return function(w).dtype

    tag = torch.compiler.config.cache_key_tag
    assert dtype() == FP32
    fastamp.policies.register_op("aten::nan_to_num", "lower", "cpu")
    assert torch.compiler.config.cache_key_tag != tag
    assert dtype() == BF16
    fastamp.policies.unregister_op("nan_to_num")
    assert torch.compiler.config.cache_key_tag == tag
    assert dtype() == FP32
