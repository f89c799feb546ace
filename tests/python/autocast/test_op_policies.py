# SPDX-License-Identifier: Apache-2.0
"""fastamp.policies.override: policies of one thread for a while."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import fastamp
from support.autocast_state import cuda_state, fastamp_state

BF16, FP32 = torch.bfloat16, torch.float32


def mm_dtype() -> torch.dtype:
    with fastamp.autocast("cpu", dtype=BF16):
        return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def test_a_block_changes_policies_and_gives_them_back():
    table = fastamp.policies.table()
    with fastamp.policies.override({"mm": "fp32", "layer_norm": "lower"}) as entered:
        assert isinstance(entered, fastamp.policies.override)
        assert mm_dtype() == FP32
        assert fastamp.policies.get("mm", "cpu") == "fp32"
        assert fastamp.policies.get("layer_norm", "cuda") == "lower"
        assert fastamp.policies.table() == table  # the process's
    assert mm_dtype() == BF16
    assert fastamp.policies.get("mm", "cpu") == "lower"


def test_a_device_limits_the_change():
    with fastamp.policies.override({"mm": "fp32"}, device="cuda"):
        assert mm_dtype() == BF16
        assert fastamp.policies.get("mm", "cuda") == "fp32"


def test_blocks_nest_and_inner_ones_add():
    with fastamp.policies.override({"mm": "fp32", "exp": "banned"}):
        with fastamp.policies.override({"mm": "pass"}):
            assert fastamp.policies.get("mm", "cpu") == "pass"
            assert fastamp.policies.get("exp", "cpu") == "banned"
        assert fastamp.policies.get("mm", "cpu") == "fp32"


def test_one_object_is_reused_nested_and_decorates():
    policies = fastamp.policies.override({"mm": "fp32"})
    with policies, policies:
        assert mm_dtype() == FP32
    assert mm_dtype() == BF16

    @policies
    def function() -> torch.dtype:
        return mm_dtype()

    assert function() == FP32
    assert function() == FP32
    assert mm_dtype() == BF16


def test_process_edits_show_through_where_the_block_says_nothing():
    with fastamp.policies.override({"exp": "fp32"}):
        fastamp.policies.set("mm", "fp32", "cpu")
        try:
            assert mm_dtype() == FP32
        finally:
            fastamp.policies.reset()
        assert fastamp.policies.get("exp", "cpu") == "fp32"


def test_an_exception_ends_the_block():
    def failing() -> None:
        with fastamp.policies.override({"mm": "banned"}), fastamp.autocast("cpu", dtype=BF16):
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))

    with pytest.raises(RuntimeError, match=r"aten::mm.*banned"):
        failing()
    assert mm_dtype() == BF16


@pytest.mark.parametrize("policies", [["mm"], None, 3])
def test_policies_of_another_type_are_refused(policies: Any):
    with pytest.raises(TypeError, match=r"policies.override: expected policies to be a mapping or"):
        fastamp.policies.override(policies)


@pytest.mark.parametrize(
    ("policies", "device", "text"),
    [
        ({"mmm": "lower"}, None, r"policies.override: expected op .* got 'mmm'. Nearest: .*mm"),
        ({"mm": "lowest"}, None, r"expected policy to be one of pass, lower, .* got 'lowest'"),
        ({"mm": "lower"}, "tpu", r"policies.override: expected device .* got 'tpu'"),
        ({"mm": "lower", "exp": "append_dtype"}, None, r"exp can carry, got 'append_dtype'"),
    ],
)
def test_bad_edits_are_refused_on_entry_and_change_nothing(policies: Any, device: Any, text: str):
    block = fastamp.policies.override(policies, device)
    with pytest.raises(ValueError, match=text), block:
        pass
    assert mm_dtype() == BF16
    assert torch.utils.checkpoint.CheckpointFunction.forward.__module__ == "torch.utils.checkpoint"


def test_other_threads_keep_their_own():
    seen: dict[str, torch.dtype] = {}
    inside, checked = threading.Event(), threading.Event()

    def overriding() -> None:
        with fastamp.policies.override({"mm": "fp32"}):
            seen["inside"] = mm_dtype()
            inside.set()
            checked.wait(10)

    thread = threading.Thread(target=overriding)
    thread.start()
    assert inside.wait(10)
    assert mm_dtype() == BF16
    checked.set()
    thread.join()
    assert seen["inside"] == FP32


def test_a_thread_that_ends_inside_a_block_leaves_nothing():
    thread = threading.Thread(target=fastamp.policies.override({"mm": "fp32"}).__enter__)
    thread.start()
    thread.join()
    assert mm_dtype() == BF16
    del thread
    gc.collect()
    with fastamp.debug.torch_kernels():
        pass


def test_kernels_are_not_dropped_under_a_block():
    with (
        fastamp.policies.override({"mm": "fp32"}),
        pytest.raises(RuntimeError, match=r"policies\.override"),
        fastamp.debug.torch_kernels(),
    ):
        pass


def test_copies_and_pickles_carry_the_edits():
    policies = fastamp.policies.override({"mm": "fp32"}, "cpu")
    for clone in (copy.deepcopy(policies), pickle.loads(pickle.dumps(policies))):
        with clone:
            assert mm_dtype() == FP32
            assert fastamp.policies.get("mm", "cuda") == "lower"


def test_the_cuda_column_follows():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode() as mode, cuda_state():
        x = FakeTensor(mode, torch.empty(2, 2, device="meta"), torch.device("cuda:0"))
        with fastamp.policies.override({"mm": "fp32"}):
            assert torch.mm(x, x).dtype == FP32
        assert torch.mm(x, x).dtype == torch.float16


class Recorder(torch.nn.Module):
    """Notes the dtype of its product each time it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 2))
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.mm(x, self.weight)
        self.dtypes.append(y.dtype)
        return torch.sin(y)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("sequential", [True, False])
def test_recomputation_has_the_policies_of_its_forward_pass(reentrant: bool, sequential: bool):
    model = Recorder()
    x = torch.ones(2, 2, requires_grad=True)
    with fastamp.autocast("cpu", dtype=BF16), fastamp.policies.override({"mm": "fp32"}):
        if sequential:
            y = checkpoint_sequential([model, torch.nn.Identity()], 2, x, use_reentrant=reentrant)
        else:
            y = checkpoint(model, x, use_reentrant=reentrant)
    y.sum().backward()
    assert model.dtypes == [FP32, FP32]
    # And without a block nothing is carried.
    model.dtypes.clear()
    with fastamp.autocast("cpu", dtype=BF16):
        y = checkpoint(model, x, use_reentrant=reentrant)
    with fastamp.policies.override({"mm": "fp32"}):
        pass
    y.sum().backward()
    assert model.dtypes == [BF16, BF16]


def test_composable_checkpointing_recomputes_alike():
    pytest.importorskip("torch.distributed._composable")
    from torch.distributed._composable import checkpoint as composable

    model = Recorder()
    composable(model)
    x = torch.ones(2, 2, requires_grad=True)
    with fastamp.autocast("cpu", dtype=BF16), fastamp.policies.override({"mm": "fp32"}):
        y = model(x)
    y.sum().backward()
    assert model.dtypes == [FP32, FP32]


def checkpoint_parts() -> dict[str, Any]:
    """What torch.utils.checkpoint and the composable one are made of."""
    from torch.distributed._composable import checkpoint_activation

    modules = (torch.utils.checkpoint, checkpoint_activation)
    parts = {f"{m.__name__}.{name}": value for m in modules for name, value in vars(m).items()}
    return parts | {"forward": vars(torch.utils.checkpoint.CheckpointFunction)["forward"]}


def test_torchs_checkpoint_is_as_before_afterwards():
    pytest.importorskip("torch.distributed._composable")
    before = checkpoint_parts()
    with fastamp.policies.override({"mm": "fp32"}):
        inside = checkpoint_parts()
        changed = {name.rpartition(".")[2] for name in before if inside[name] is not before[name]}
        generator = "_checkpoint_without_reentrant_generator"
        assert changed in ({"forward", generator}, {"forward", f"{generator}_impl"})
    after = checkpoint_parts()
    assert all(after[name] is before[name] for name in before)
    assert after.keys() == before.keys()


def test_a_function_of_torchs_that_others_replace_between_blocks_is_wrapped_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
):
    def applying(calls: list[int]) -> Any:
        def parallel_apply(modules: Any, inputs: Any) -> list[Any]:
            calls.append(len(modules))
            return [module(x) for module, x in zip(modules, inputs, strict=True)]

        return parallel_apply

    w = torch.ones(2, 2)
    for _ in range(2):
        calls: list[int] = []
        replaced = applying(calls)
        monkeypatch.setattr(torch.nn.parallel, "parallel_apply", replaced)
        with fastamp.autocast("cpu", dtype=BF16), fastamp.policies.override({"mm": "fp32"}):
            assert torch.nn.parallel.parallel_apply is not replaced
            (out,) = torch.nn.parallel.parallel_apply([lambda x: torch.mm(x, w)], [w])
        assert torch.nn.parallel.parallel_apply is replaced
        assert calls == [1]
        assert out.dtype == FP32


def test_a_preset_of_a_block_is_one_of_both_devices():
    with fastamp.policies.override("cuda"):
        assert fastamp.policies.get("pow.Tensor_Scalar", "cpu") == "fp32"
        assert fastamp.policies.get("pow.Tensor_Scalar", "cuda") == "fp32"


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_state_that_begins_in_compiled_code_is_refused_and_changes_nothing():
    before = checkpoint_parts()
    x = torch.ones(2, 2)

    @torch.compile(backend="eager")
    def function(x: torch.Tensor) -> torch.Tensor:
        fastamp._C.hold_state(True)
        return x + 1

    with pytest.raises(RuntimeError, match="to begin outside of compiled code"):
        function(x)
    after = checkpoint_parts()
    assert all(after[name] is before[name] for name in before)
    assert torch._dynamo.eval_frame._stance.stance == "default"
    with fastamp.policies.override({"mm": "fp32"}):
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_compiled_functions_see_the_block():
    w = torch.ones(2, 2)
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, w)

    def dtype() -> torch.dtype:
        with fastamp.autocast("cpu", dtype=BF16):
            return function(w).dtype

    assert dtype() == BF16
    with fastamp.policies.override({"mm": "fp32"}):
        assert dtype() == FP32
    assert dtype() == BF16
    assert len(graphs) == 1  # No graph of a block's policies, no recompilation after it.


def test_a_block_inside_a_compiled_function_acts():
    w = torch.ones(2, 2)

    @torch.compile(backend="aot_eager")
    def function(x: torch.Tensor) -> torch.Tensor:
        with fastamp.autocast("cpu", dtype=BF16):
            with fastamp.policies.override({"mm": "fp32"}):
                inside = torch.mm(x, w)
            return inside, torch.mm(x, w)

    inside, outside = function(w)
    assert inside.dtype == FP32
    assert outside.dtype == BF16


def test_a_block_inside_a_full_graph_is_refused_with_the_reason():
    @torch.compile(backend="eager", fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        with fastamp.policies.override({"mm": "fp32"}):
            return torch.mm(x, x)

    with pytest.raises(Exception, match=r"policies\.override"):
        function(torch.ones(2, 2))
    assert mm_dtype() == BF16


def test_a_stance_of_the_users_own_comes_back():
    from torch._dynamo import eval_frame

    with torch.compiler.set_stance("eager_on_recompile"):
        with fastamp.policies.override({"mm": "fp32"}):
            assert eval_frame._stance.stance == "force_eager"
        assert eval_frame._stance.stance == "eager_on_recompile"
    assert eval_frame._stance.stance == "default"


def test_no_trace_of_a_block_is_left():
    before = fastamp_state()
    with fastamp.policies.override({"mm": "fp32"}):
        pass
    assert fastamp_state() == before
    assert not fastamp._C.thread_op_policies()


def test_blocks_left_in_another_order_leave_what_is_still_open():
    outer = fastamp.policies.override({"mm": "fp32"})
    inner = fastamp.policies.override({"mm": "banned", "bmm": "fp32"})
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert fastamp.policies.get("mm", "cpu") == "banned"
    assert fastamp.policies.get("bmm", "cpu") == "fp32"
    inner.__exit__(None, None, None)
    assert fastamp.policies.get("mm", "cpu") == "lower"
    assert not fastamp._C.thread_op_policies()


def test_interleaved_generators_each_end_their_own_block():
    def generator(policies: dict[str, str]) -> Iterator[str]:
        with fastamp.policies.override(policies):
            while True:
                yield fastamp.policies.get("mm", "cpu")

    first, second = generator({"mm": "fp32"}), generator({"bmm": "fp32"})
    assert next(first) == "fp32"
    assert next(second) == "fp32"
    first.close()
    assert next(second) == "lower"
    second.close()
    assert not fastamp._C.thread_op_policies()


def test_leaving_on_another_thread_is_refused_and_changes_nothing():
    block = fastamp.policies.override({"mm": "fp32"})
    with block:
        with ThreadPoolExecutor(1) as pool:
            leaving = pool.submit(block.__exit__, None, None, None)
        with pytest.raises(RuntimeError, match="entered on this thread"):
            leaving.result()
        assert fastamp.policies.get("mm", "cpu") == "fp32"
    with pytest.raises(RuntimeError, match="entered on this thread"):
        block.__exit__(None, None, None)
    assert fastamp.policies.get("mm", "cpu") == "lower"
