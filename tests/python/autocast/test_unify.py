# SPDX-License-Identifier: Apache-2.0
"""The policy "unify": mixes of dtypes that torch refuses are cast, all other calls are torch's."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

import fastamp
from support.autocast_state import cuda_state, torch_kernels
from support.mixed_calls import FUNCTIONS, ROWS, WRITES, randn

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def default_policies_after() -> Iterator[None]:
    yield
    fastamp.policies.reset()


@pytest.fixture
def unify() -> Iterator[None]:
    with fastamp.policies.preset("unify"):
        yield


def region(dtype: torch.dtype = BF16) -> Any:
    return fastamp.autocast("cpu", dtype=dtype)


@pytest.mark.parametrize("low_first", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_refused_call_is_what_casts_by_hand_make_of_it(name: str, low_first: bool):
    call, to = FUNCTIONS[name]

    def operands() -> list[torch.Tensor]:
        dtypes = (BF16, FP32) if low_first else (FP32, BF16)
        return [randn(4, 4, dtype=d).requires_grad_() for d in dtypes]

    with region(), pytest.raises((RuntimeError, IndexError)):
        call(*operands())
    torchs, own = operands(), operands()
    with torch_kernels(), torch.autocast("cpu", dtype=BF16):
        expected = call(*(t.to(to) for t in torchs))
    with fastamp.policies.preset("unify"), region():
        for _ in range(2):  # the second time as remembered
            found = call(*own)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    if expected.requires_grad:
        expected.sum().backward()
        found.sum().backward()
        for a, b in zip(own, torchs, strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or torch.equal(a.grad, b.grad)
    with region(), pytest.raises((RuntimeError, IndexError)):
        call(*operands())


@pytest.mark.parametrize("dtypes", [(FP32, BF16), (BF16, FP32), (FP16, BF16)])
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.usefixtures("unify")
def test_values_are_cast_to_the_dtype_of_what_is_written(
    name: str, dtypes: tuple[torch.dtype, torch.dtype]
):
    write = WRITES[name]
    written, value = dtypes
    expected, values = randn(4, 4, dtype=written), randn(2, 4, dtype=value)
    write(expected, values.to(written))
    with region():
        for _ in range(2):
            found = randn(4, 4, dtype=written)
            write(found, values)
            assert found.dtype == written
            assert torch.equal(found, expected)


@pytest.mark.usefixtures("unify")
def test_gradients_go_through_the_cast_of_a_written_value():
    layer = torch.nn.Linear(4, 4)
    x = randn(2, 4)
    with region():
        out = torch.zeros(4, 4)
        out[torch.tensor([True, False, True, False])] = layer(x)
    assert out.dtype == FP32
    out.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == FP32
    assert torch.equal(layer.weight.grad, x.bfloat16().sum(0).float().expand(4, 4))


@pytest.mark.usefixtures("unify")
def test_gradients_of_a_sparse_argument_of_two_calls_are_summed_in_its_own_dtype():
    sparse = torch.eye(4).to_sparse_csr().requires_grad_()  # 16-bit ones have no sums.
    x = randn(4, 4, dtype=FP16)
    with region():
        out = torch.sparse.mm(sparse, x, "sum") + torch.sparse.mm(sparse, x, "sum")
    out.sum().backward()
    by_hand = torch.eye(4).to_sparse_csr().requires_grad_()
    products = [torch.sparse.mm(by_hand.bfloat16(), x.bfloat16(), "sum") for _ in range(2)]
    sum(products).sum().backward()
    assert sparse.grad is not None
    assert by_hand.grad is not None
    assert sparse.grad.dtype == FP32
    assert torch.equal(sparse.grad.to_dense(), by_hand.grad.to_dense())


@pytest.mark.usefixtures("unify")
def test_float16_and_bfloat16_meet_in_the_dtype_of_the_region():
    with region(FP16):
        assert torch.lerp(randn(4, dtype=FP16), randn(4, dtype=BF16), 0.5).dtype == FP16


REFUSED: dict[str, Callable[[], Any]] = {
    "shapes": lambda: torch.lerp(randn(3), randn(4, dtype=BF16), 0.5),
    "float64": lambda: torch.lerp(randn(4, dtype=FP64), randn(4, dtype=BF16), 0.5),
    "float64 that is written": lambda: randn(4, dtype=FP64).index_add_(
        0, ROWS, randn(2, dtype=BF16)
    ),
    "an index": lambda: randn(4, 4).index_put((torch.tensor([9]),), randn(1, 4, dtype=BF16)),
    "a leaf that is written": lambda: randn(4).requires_grad_().lerp_(randn(4, dtype=BF16), 0.5),
    "one dtype": lambda: torch.special.chebyshev_polynomial_t(
        randn(4, dtype=BF16), randn(4, dtype=BF16)
    ),
    "an alias": lambda: randn(4).set_(randn(4, dtype=BF16)),
    "out": lambda: torch.bucketize(
        randn(4), randn(4, dtype=BF16), out=torch.empty(4, dtype=torch.float64)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("unify")
def test_what_no_cast_cures_is_refused_in_torchs_words(name: str):
    with (
        torch_kernels(),
        torch.autocast("cpu", dtype=BF16),
        pytest.raises(Exception) as torchs,  # noqa: PT011 (whatever torch raises)
    ):
        REFUSED[name]()
    with region(), pytest.raises(torchs.type) as own:
        REFUSED[name]()
    assert type(own.value) is torchs.type
    assert str(own.value).splitlines()[0] == str(torchs.value).splitlines()[0]


@pytest.mark.usefixtures("unify")
def test_a_refused_write_changes_nothing():
    x = randn(4)
    before = x.clone()
    with region(), pytest.raises(RuntimeError):
        x.index_add_(0, ROWS, randn(3, dtype=BF16))
    assert torch.equal(x, before)


@pytest.mark.usefixtures("unify")
def test_it_acts_in_enabled_regions_alone():
    a, b = randn(4), randn(4, dtype=BF16)
    with pytest.raises(RuntimeError):
        torch.lerp(a, b, 0.5)
    with region():
        with fastamp.autocast("cpu", enabled=False), pytest.raises(RuntimeError):
            torch.lerp(a, b, 0.5)
        with region(FP16):
            assert torch.lerp(a, b, 0.5).dtype == FP16
        assert torch.lerp(a, b, 0.5).dtype == BF16
        with cuda_state():
            assert torch.lerp(a, b, 0.5).dtype == BF16


def test_a_block_acts_on_its_thread_alone():
    a, b = randn(4), randn(4, dtype=BF16)
    refused: list[Exception] = []

    def other() -> None:
        with region():
            try:
                torch.lerp(a, b, 0.5)
            except RuntimeError as error:
                refused.append(error)

    with fastamp.policies.override("unify"), region():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert len(refused) == 1
        assert torch.lerp(a, b, 0.5).dtype == BF16
        with fastamp.policies.override("torch"), pytest.raises(RuntimeError):
            torch.lerp(a, b, 0.5)
        with fastamp.policies.override({"*": "pass"}), pytest.raises(RuntimeError):
            torch.lerp(a, b, 0.5)
        with fastamp.policies.override({"mm": "fp32"}):
            assert torch.lerp(a, b, 0.5).dtype == BF16
    with region(), pytest.raises(RuntimeError):
        torch.lerp(a, b, 0.5)


@pytest.mark.usefixtures("unify")
def test_many_threads_at_once():
    a, b = randn(64), randn(64, dtype=BF16)
    results: list[torch.Tensor] = []

    def work() -> None:
        with region():
            for _ in range(50):
                results.append(torch.lerp(a, b, 0.25))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 200
    assert all(torch.equal(r, results[0]) for r in results)


def test_names_and_tables():
    assert fastamp.policies.get("*", "cpu") == "pass"
    assert "*" not in {row.op for row in fastamp.policies.table()}
    fastamp.policies.set("*", "unify", "cpu")
    assert fastamp.policies.get("*", "cpu") == "unify"
    assert fastamp.policies.table()[-1] == ("*", "unify", "pass", "pass", "pass")
    with fastamp.policies.preset("torch"):
        assert fastamp.policies.get("*", "cpu") == "pass"
    assert fastamp.policies.get("*", "cpu") == "unify"
    with fastamp.policies.preset("unify", "cuda"):
        assert fastamp.policies.get("*", "cpu") == "unify" == fastamp.policies.get("*", "cuda")
    assert fastamp.policies.get("*", "cuda") == "pass"
    fastamp.policies.reset()
    assert fastamp.policies.get("*", "cpu") == "pass"


@pytest.mark.parametrize("policy", ["lower", "fp32", "promote", "banned", "set_opt_dtype"])
def test_every_op_can_have_no_other_policy(policy: str):
    with pytest.raises(ValueError, match=r"expected policy 'unify' or 'pass' for '\*'"):
        fastamp.policies.set("*", policy)
    with (
        pytest.raises(ValueError, match=r"policies.override: expected policy 'unify' or 'pass'"),
        fastamp.policies.override({"*": policy}),
    ):
        pass


def test_ops_of_the_table_cannot_have_it():
    with pytest.raises(ValueError, match="expected a policy that mm can carry, got 'unify'"):
        fastamp.policies.set("mm", "unify")
    with pytest.raises(ValueError, match="nothing_like_it"):
        fastamp.policies.preset("nothing_like_it")
    with pytest.raises(ValueError, match=r"expected op to name an op of the table"):
        fastamp.policies.unregister_op("*")


def kernels() -> set[str]:
    return set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"))


def test_kernels_are_there_while_it_is_used_and_not_after():
    before = kernels()
    with fastamp.policies.preset("unify", "cpu"):
        assert len(kernels()) > len(before) + 300
    assert kernels() == before
    with fastamp.policies.override("unify"):
        pass
    fastamp.policies.set("mm", "lower")  # an edit, with no thread in a block
    assert kernels() == before
    fastamp.policies.set("*", "unify", "cpu")
    with torch_kernels():
        assert not kernels() & {"aten::lerp.Scalar"}
    assert "aten::lerp.Scalar" in kernels()
    fastamp.policies.reset()
    assert kernels() == before


def test_ops_with_policies_of_their_own_keep_them():
    a, b = randn(4), randn(4, dtype=BF16)
    fastamp.policies.register_op("aten::lerp.Scalar", "fp32")
    try:
        with fastamp.policies.preset("unify"), region():
            assert torch.lerp(a, b, 0.5).dtype == FP32
            with fastamp.policies.override({"lerp.Scalar": "pass"}):
                assert torch.lerp(a, b, 0.5).dtype == BF16
            assert torch.lerp(a, b, 0.5).dtype == FP32
    finally:
        fastamp.policies.unregister_op("aten::lerp.Scalar")
    with fastamp.policies.preset("unify"):
        with fastamp.policies.override({"index_put": "fp32"}), region():  # its first kernel
            assert b.index_put((ROWS,), b[:2]).dtype == FP32
        with region():
            assert a.index_put((ROWS,), b[:2]).dtype == FP32
            assert b.index_put((ROWS,), b[:2]).dtype == BF16
            fastamp.policies.register_op("aten::lerp.Scalar", "lower")
            assert torch.lerp(a, a, 0.5).dtype == BF16
            fastamp.policies.unregister_op("aten::lerp.Scalar")
            assert torch.lerp(a, a, 0.5).dtype == FP32
            assert torch.lerp(a, b, 0.5).dtype == BF16


# -- Ops of other libraries

torch.library.define("fastamp_unify::product", "(Tensor a, Tensor b) -> Tensor")
torch.library.define("fastamp_unify::many", "(Tensor[] a, Tensor?[] b, Tensor? c) -> Tensor")
torch.library.define("fastamp_unify::put_", "(Tensor(a!) x, Tensor v) -> ()")
torch.library.define("fastamp_unify::halfway_", "(Tensor(a!) x, Tensor v) -> ()")
torch.library.define("fastamp_unify::raises", "(Tensor a, Tensor b, str kind) -> Tensor")
CALLS: list[tuple[torch.dtype, ...]] = []


def refuse_mixes(*tensors: torch.Tensor) -> None:
    CALLS.append(tuple(t.dtype for t in tensors))
    if len(set(CALLS[-1])) > 1:
        raise RuntimeError("expected one dtype")


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    refuse_mixes(a, b)
    return a * b


torch.library.impl("fastamp_unify::product", "CompositeExplicitAutograd", product)


@torch.library.impl("fastamp_unify::many", "CompositeExplicitAutograd")
def _many(a: Any, b: Any, c: Any) -> torch.Tensor:
    tensors = [t for t in (*a, *b, c) if t is not None]
    refuse_mixes(*tensors)
    return torch.stack([t.sum() for t in tensors])


@torch.library.impl("fastamp_unify::put_", "CompositeExplicitAutograd")
def _put(x: torch.Tensor, v: torch.Tensor) -> None:
    refuse_mixes(x, v)
    x.copy_(v)


@torch.library.impl("fastamp_unify::halfway_", "CompositeExplicitAutograd")
def _halfway(x: torch.Tensor, v: torch.Tensor) -> None:
    x.add_(1)
    refuse_mixes(x, v)


@torch.library.impl("fastamp_unify::raises", "CompositeExplicitAutograd")
def _raises(a: torch.Tensor, b: torch.Tensor, kind: str) -> torch.Tensor:
    CALLS.append((a.dtype, b.dtype))
    raise {"interrupt": KeyboardInterrupt, "memory": torch.OutOfMemoryError, "stop": StopIteration}[
        kind
    ]("raised")


@pytest.fixture
def called() -> list[tuple[torch.dtype, ...]]:
    CALLS.clear()
    return CALLS


@pytest.mark.usefixtures("unify")
def test_custom_ops(called: list[Any]):
    a, b = randn(4).requires_grad_(), randn(4, dtype=BF16)
    with region():
        assert torch.ops.fastamp_unify.product(a, b).dtype == BF16
        torch.ops.fastamp_unify.product(a, b)
        assert called == [(FP32, BF16), (BF16, BF16), (BF16, BF16)]  # refused once
        assert torch.ops.fastamp_unify.many([a, b], [None, b], a).dtype == BF16
        x = randn(4)
        torch.ops.fastamp_unify.put_(x, b)
        assert torch.equal(x, b.float())


@pytest.mark.usefixtures("unify")
def test_an_op_that_has_written_is_not_called_again(called: list[Any]):
    x = randn(4)
    expected = x + 1
    with region(), pytest.raises(RuntimeError, match="expected one dtype"):
        torch.ops.fastamp_unify.halfway_(x, randn(4, dtype=BF16))
    assert torch.equal(x, expected)
    assert len(called) == 1


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("interrupt", KeyboardInterrupt),
        ("memory", torch.OutOfMemoryError),
        ("stop", StopIteration),
    ],
)
@pytest.mark.usefixtures("unify")
def test_other_exceptions_are_no_refusals(kind: str, error: type[BaseException], called: list[Any]):
    with region(), pytest.raises(error):
        torch.ops.fastamp_unify.raises(randn(4), randn(4, dtype=BF16), kind)
    assert len(called) == 1


@pytest.mark.usefixtures("unify")
def test_ops_that_are_defined_later_are_reached_in_the_next_region():
    with region():
        pass
    fastamp.policies.set("*", "unify")
    torch.library.define("fastamp_unify::late", "(Tensor a, Tensor b) -> Tensor")
    torch.library.impl("fastamp_unify::late", "CompositeExplicitAutograd", product)
    with region():
        assert torch.ops.fastamp_unify.late(randn(4), randn(4, dtype=BF16)).dtype == BF16


def test_one_op_of_a_library():
    fastamp.policies.register_op("fastamp_unify::product", "unify")
    try:
        a, b = randn(4), randn(4, dtype=BF16)
        with region():
            assert torch.ops.fastamp_unify.product(a, b).dtype == BF16
            assert torch.ops.fastamp_unify.product(a, a).dtype == FP32
            with pytest.raises(RuntimeError):
                torch.lerp(a, b, 0.5)
        assert fastamp.policies.get("fastamp_unify::product", "cpu") == "unify"
    finally:
        fastamp.policies.unregister_op("fastamp_unify::product")


@pytest.mark.usefixtures("unify")
def test_statistics_of_a_batch_norm_are_kept():
    x, weight = randn(8, 3, dtype=BF16), torch.ones(3, dtype=FP16)
    mean, var = torch.zeros(3), torch.ones(3)
    with region():
        functional.batch_norm(x, mean, var, weight, torch.zeros(3, dtype=FP16), training=True)
    assert mean.dtype == FP32
    assert not torch.equal(mean, torch.zeros(3))


@pytest.mark.usefixtures("unify")
def test_codes_of_fp8_are_left():
    codes = randn(4, 4).to(torch.float8_e4m3fn)
    with region(), pytest.raises(RuntimeError):
        torch.cat([codes, randn(4, 4), randn(4, 4, dtype=BF16)]).lerp(codes, 0.5)


@pytest.mark.usefixtures("unify")
def test_bits_of_calls_that_torch_accepts():
    a, b = randn(64, 64), randn(64, 64, dtype=BF16)
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: a + b,
        lambda: a.clone().add_(b),
        lambda: b.clone().mul_(a),
        lambda: torch.where(a > 0, a, b),
        lambda: functional.layer_norm(b, (64,), a[0], a[1]),
        lambda: torch.addcmul(a, b, a),
        lambda: a @ b,
        lambda: a.clone().copy_(b),
    ]
    with region():
        own = [call() for call in calls]
    with torch_kernels(), torch.autocast("cpu", dtype=BF16):
        torchs = [call() for call in calls]
    for x, y in zip(own, torchs, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


@pytest.mark.usefixtures("unify")
def test_a_trace_shows_what_was_cured():
    with fastamp.debug.trace() as trace, region():
        torch.lerp(randn(4), randn(4, dtype=BF16), 0.5)
        torch.lerp(randn(4), randn(4), 0.5)
    rows = [row for row in trace.rows if row.op == "lerp.Scalar"]
    assert [(row.policy, row.calls) for row in rows] == [("unify", 1)]


def test_checkpoint_recomputes_under_it():
    weight = randn(4, 4).requires_grad_()

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.lerp(x @ weight, x, 0.5).sin()

    with fastamp.policies.override("unify"), region():
        out = torch.utils.checkpoint.checkpoint(block, randn(4, 4), use_reentrant=False)
    assert out.dtype == BF16
    out.sum().backward()
    assert weight.grad is not None


def test_module_policies_and_copies():
    class Lerp(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.lerp(x, x.bfloat16(), 0.5)

    model = torch.nn.Sequential(Lerp())
    policies = fastamp.policies.for_modules(model, {"0": {"*": "unify"}})
    with region():
        assert model(randn(4)).dtype == BF16
    policies.release()
    with region(), pytest.raises(RuntimeError):
        model(randn(4))
    for block in (
        copy.copy(fastamp.policies.override("unify")),
        pickle.loads(pickle.dumps(fastamp.policies.override("unify"))),
    ):
        with block, region():
            assert torch.lerp(randn(4), randn(4, dtype=BF16), 0.5).dtype == BF16


@pytest.mark.usefixtures("unify")
def test_transforms():
    a, b = randn(3, 4), randn(3, 4, dtype=BF16)

    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.lerp(x, y, 0.5)

    with region():
        assert torch.func.vmap(call)(a, b).dtype == BF16
        gradient = torch.func.grad(lambda x: call(x, b).sum())(a)
        tangent = torch.func.jvp(lambda x: call(x, b), (a,), (a,))[1]
    assert gradient.dtype == FP32
    assert torch.equal(gradient, torch.full((3, 4), 0.5))
    assert tangent.dtype == BF16


def programs(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.autocast("cpu", dtype=BF16):
        out = torch.zeros(4, 4)
        out[ROWS] = y[:2]
        return torch.lerp(x, y, 0.5) * 2, out, x.index_add(0, ROWS, y[:2]), x + y


@pytest.mark.usefixtures("unify")
def test_torch_jit_trace_records_the_casts():
    given = randn(4, 4), randn(4, 4, dtype=BF16)
    expected = programs(*given)
    found = torch.jit.trace(programs, given, check_trace=False)(*given)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)
