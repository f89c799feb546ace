# SPDX-License-Identifier: Apache-2.0
"""fastamp.policies.for_modules: modules under policies of their own."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastamp
from fastamp._policy.module_policies import named_modules
from support.autocast_state import fastamp_state

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Spy(nn.Module):
    """A linear layer that writes down in which dtypes it was given its input and ran."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        self.seen.append((x.dtype, out.dtype))
        return out.relu()  # saves its result: recomputation does not end before it


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Spy(), Spy()])
        self.norm = nn.LayerNorm(8)
        self.head = Spy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x).relu()
        out: torch.Tensor = self.head(self.norm(x))
        return out


def make() -> Model:
    torch.manual_seed(0)
    return Model()


def run(model: nn.Module, dtype: torch.dtype = BF16, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 8, generator=generator)
    with fastamp.autocast(device, dtype=dtype):
        out: torch.Tensor = model(x)
    return out


def seen(spy: Any) -> tuple[torch.dtype, torch.dtype]:
    found: tuple[torch.dtype, torch.dtype] = spy.seen[-1]
    return found


@pytest.fixture(autouse=True)
def added_ops_are_dropped() -> Iterator[None]:
    known = {row.op for row in fastamp.policies.table()}
    yield
    for row in fastamp.policies.table():
        if row.op not in known:
            fastamp.policies.unregister_op(row.op)


def test_each_value_does_what_its_name_says():
    model = make()
    cases: list[tuple[Any, torch.dtype, torch.dtype]] = [
        ("fp32", FP32, FP32),
        (FP16, BF16, FP16),
        ("float16", BF16, FP16),
        ("bfloat16", BF16, BF16),
        ({"linear": "fp32"}, BF16, FP32),
        ({"linear": {"cpu": "fp32"}}, BF16, FP32),
        ({"linear": {"cuda": "fp32"}}, BF16, BF16),
    ]
    for value, given, ran in cases:
        with fastamp.policies.for_modules(model, {"blocks.1": value}) as policies:
            assert policies.names == {"blocks.1": ["blocks.1"]}
            run(model)
            assert seen(model.blocks[1]) == (given, ran), value
            assert seen(model.blocks[0]) == (BF16, BF16), value
        run(model)
        assert seen(model.blocks[1]) == (BF16, BF16)


def test_pass_switches_autocast_off_and_casts_nothing():
    layer = nn.Sequential(nn.Identity())
    with fastamp.policies.for_modules(layer, {"0": "pass"}), fastamp.autocast("cpu", dtype=BF16):
        assert layer(torch.ones(2, dtype=BF16)).dtype == BF16
        layer[0].forward = lambda x: torch.mm(x, x)
        assert layer(torch.ones(2, 2)).dtype == FP32


def test_bits_are_those_of_regions_written_by_hand():
    model, by_hand = make(), make()

    class Off(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                out: torch.Tensor = self.inner(x.float())
            return out

    by_hand.head = Off(by_hand.head)  # type: ignore[assignment]
    fastamp.policies.for_modules(model, {"head": "fp32"})
    own, torchs = run(model), run(by_hand)
    assert own.dtype == FP32
    assert torch.equal(own, torchs)
    own.square().sum().backward()
    torchs.square().sum().backward()
    for mine, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad)


def test_nothing_is_changed_outside_regions():
    model = make()
    x = torch.randn(4, 8)
    expected = model(x)
    policies = {"": {"linear": "banned"}, "head": "fp32", "blocks.0": FP16, "blocks.1": "pass"}
    with fastamp.policies.for_modules(model, policies):
        assert torch.equal(model(x), expected)
        with fastamp.autocast("cpu", enabled=False):
            assert torch.equal(model(x), expected)
        with pytest.raises(RuntimeError, match="linear: not allowed"):
            run(model)


def test_a_policy_holds_in_all_of_a_module_until_one_further_in():
    model = make()
    with fastamp.policies.for_modules(
        model, {"*": {"linear": "fp32"}, "blocks.1": {"linear": "lower"}}
    ):
        run(model)
        assert seen(model.blocks[0])[1] == FP32
        assert seen(model.blocks[1])[1] == BF16
        assert seen(model.head)[1] == FP32
    with fastamp.policies.for_modules(model, {"blocks.1": FP16, "blocks.1.linear": "fp32"}):
        run(model)
        assert seen(model.blocks[1]) == (BF16, FP32)


def test_of_patterns_for_one_module_the_last_wins_and_op_policies_add_up():
    model = make()
    with fastamp.policies.for_modules(model, {"head": "fp32", "h*": BF16}):
        run(model)
        assert seen(model.head)[1] == BF16
    with fastamp.policies.for_modules(model, {"h*": BF16, "head": "fp32"}):
        run(model)
        assert seen(model.head) == (FP32, FP32)
    ops = {"head": {"linear": "fp32", "relu": "pass"}, "h*": {"linear": {"cpu": "lower"}}}
    fastamp.policies.register_op("aten::relu", "pass")
    with fastamp.policies.for_modules(model, ops):
        inside: list[tuple[str, str]] = []
        handle = model.head.linear.register_forward_pre_hook(
            lambda *_: inside.append(
                (fastamp.policies.get("linear", "cpu"), fastamp.policies.get("linear", "cuda"))
            )
        )
        run(model)
        handle.remove()
    assert inside == [("lower", "fp32")]


def test_two_calls_of_module_policies_nest_and_end_in_any_order():
    model = make()
    outer = fastamp.policies.for_modules(model, {"head": {"linear": "fp32"}})
    inner = fastamp.policies.for_modules(model, {"head": {"linear": "lower"}})
    run(model)
    assert seen(model.head)[1] == BF16
    outer.release()
    run(model)
    assert seen(model.head)[1] == BF16
    inner.release()
    outer.release()
    assert type(model.head) is Spy
    assert "_fastamp_module_policies" not in model.head.__dict__


@pytest.mark.parametrize("value", ["fp32", FP16, {"linear": "fp32"}])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_an_interrupted_call_leaves_no_state(value: Any, error: type[BaseException]):
    model = make()
    fastamp.policies.for_modules(model, {"head": value})

    def fail(*_: Any) -> None:
        raise error

    for module in (model.head, model.head.linear):  # before and within the policies
        handle = module.register_forward_pre_hook(fail)
        before = fastamp_state()
        with fastamp.autocast("cpu", dtype=BF16):
            with pytest.raises(error):
                model(torch.ones(1, 8))
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") == BF16
            assert fastamp.policies.get("linear", "cpu") == "lower"
        assert fastamp_state() == before
        handle.remove()


class Recomputed(Spy):
    """A spy that recomputes itself."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(super().forward, x, use_reentrant=self.reentrant)
        return out


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("value", ["fp32", FP16, {"linear": "fp32"}])
@pytest.mark.parametrize("kind", [Spy, Recomputed])
def test_checkpoint_recomputes_under_the_policies(value: Any, reentrant: bool, kind: type[Spy]):
    """The module with the policy is recomputed as a whole, or recomputes a part of itself."""
    model = nn.Sequential(nn.Linear(8, 8), kind())
    spy = model[1]
    plain = nn.Sequential(model[0], copy.deepcopy(spy))
    plain[1].__class__ = Spy
    spy.reentrant = reentrant
    for each in (model, plain):
        fastamp.policies.for_modules(each, {"1": value})
    x = torch.randn(4, 8)
    with fastamp.autocast("cpu", dtype=BF16):
        hidden = model[0](x)
        if kind is Recomputed:
            out = spy(hidden)
        else:
            out = checkpoint(spy, hidden, use_reentrant=reentrant)
        expected = plain[1](plain[0](x))
    out.float().square().sum().backward()
    first, again = spy.seen
    assert again == first
    assert first[1] == (FP16 if value == FP16 else FP32)
    expected.float().square().sum().backward()
    for mine, other in zip(spy.linear.parameters(), plain[1].linear.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad)


def test_arguments_are_cast_wherever_they_are_and_other_objects_are_kept():
    given: list[Any] = []

    class Taker(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> None:
            given.append((args, kwargs))

    class Cache(dict):  # type: ignore[type-arg]
        pass

    low, whole, double = torch.ones(2, dtype=BF16), torch.ones(2, dtype=torch.int64), torch.ones(2)
    packed = nn.utils.rnn.pack_sequence([low])
    cache, names = Cache(x=low), ["a", whole]
    holder = nn.Sequential(Taker())
    fastamp.policies.for_modules(holder, {"0": "fp32"})
    with fastamp.autocast("cpu", dtype=BF16):
        holder[0]((low, [low, double]), names, cache, packed, {"k": low}, extra=low.half())
    ((first, kept, same_cache, also_packed, mapping), kwargs) = given[0]
    assert (first[0].dtype, first[1][0].dtype, mapping["k"].dtype) == (FP32, FP32, FP32)
    assert first[1][1] is double
    assert kept is names
    assert same_cache is cache
    assert isinstance(also_packed, nn.utils.rnn.PackedSequence)
    assert also_packed.data.dtype == FP32
    assert kwargs["extra"].dtype == FP32


def test_copies_and_pickles_stay_under_the_policies_and_copies_are_released_together():
    model = make()
    policies = fastamp.policies.for_modules(model, {"head": "fp32", "blocks.0": {"linear": "fp32"}})
    twin = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=False)
    for each in (model, twin, loaded, saved):
        run(each)
        assert seen(each.head) == (FP32, FP32)
        assert seen(each.blocks[0]) == (BF16, FP32)
        assert isinstance(each.head, Spy)
        assert type(each.head).__name__ == "Spy"
    assert list(model.state_dict()) == list(make().state_dict())
    policies.release()
    for each in (model, twin):
        run(each)
        assert seen(each.head) == (BF16, BF16)
    run(loaded)
    assert seen(loaded.head) == (FP32, FP32)


def test_nothing_is_kept_alive_and_no_cycle_is_made():
    model = make()
    policies = fastamp.policies.for_modules(model, {"*": "fp32"})
    policies.release()
    fastamp.policies.for_modules(model, {"*": {"linear": "fp32"}})
    run(model)
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_all_threads_are_concerned():
    model = make()
    fastamp.policies.for_modules(model, {"head": {"linear": "fp32"}, "blocks.0": "fp32"})
    dtypes: list[Any] = []

    def work() -> None:
        run(model)
        dtypes.append((seen(model.head)[1], seen(model.blocks[0])[1]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dtypes == [(FP32, FP32)] * 4


def test_names_may_have_the_parts_that_wrappers_add():
    model = make()
    compiled = torch.compile(model, backend="eager")
    names = {each.bare for each in named_modules(compiled)}
    assert {"", "head", "blocks.0.linear"} <= names
    for pattern in ("head", "_orig_mod.head", "*head"):
        with fastamp.policies.for_modules(compiled, {pattern: "fp32"}):
            run(model)
            assert seen(model.head) == (FP32, FP32)
    replicas = nn.DataParallel(model)
    with fastamp.policies.for_modules(replicas, {"head": "fp32"}):
        run(model)
        assert seen(model.head) == (FP32, FP32)


def test_a_module_with_two_names_is_found_under_both():
    model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    model["b"] = model["a"]
    for name in ("a", "b"):
        with (
            fastamp.policies.for_modules(model, {name: "fp32"}),
            fastamp.autocast("cpu", dtype=BF16),
        ):
            assert model["a"](torch.ones(1, 2)).dtype == FP32


def test_a_class_that_keeps_account_of_subclasses_is_told_of_none():
    known: list[type] = []

    class Registering(nn.Module):
        def __init_subclass__(cls, *, required: int) -> None:
            known.append(cls)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

    holder = nn.Sequential(Registering())
    with fastamp.policies.for_modules(holder, {"0": "fp32"}), fastamp.autocast("cpu", dtype=BF16):
        assert holder(torch.ones(2, 2)).dtype == FP32
    assert known == []


def test_ops_that_are_not_in_the_table_are_registered():
    model = nn.Sequential(nn.GELU())
    x = torch.ones(2, dtype=BF16)
    with (
        fastamp.policies.for_modules(model, {"0": {"aten::gelu": "fp32"}}),
        fastamp.autocast("cpu", dtype=BF16),
    ):
        assert model(x).dtype == FP32
        assert torch.nn.functional.gelu(x).dtype == BF16
    assert fastamp.policies.table()[-1].op == "gelu"


def test_forward_hooks_and_signatures_are_untouched():
    model = make()
    order: list[str] = []
    model.head.register_forward_pre_hook(lambda *_: order.append("before"))
    model.head.register_forward_hook(lambda *_: order.append("after"))
    fastamp.policies.for_modules(model, {"head": "fp32"})
    run(model)
    assert order == ["before", "after"]
    assert model.head.forward.__func__ is Spy.forward  # type: ignore[attr-defined]
    assert repr(model) == repr(make())


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "no module": ({"heda": "fp32"}, ValueError, "'heda'.*nearest: head"),
    "one of two": ({"head": "fp32", "tail": "fp32"}, ValueError, "'tail'"),
    "value": ({"head": "fp23"}, ValueError, "for 'head'.*'fp23'; nearest: fp32"),
    "float32": ({"head": FP32}, ValueError, "say 'fp32'"),
    "float64": ({"head": torch.float64}, ValueError, "torch.float64"),
    "type": ({"head": 3}, TypeError, "for 'head'.*int"),
    "pattern": ({3: "fp32"}, TypeError, "patterns to be strings, got int"),
    "policies": (3, TypeError, "expected policies to be a mapping or the path"),
    "op": ({"head": {"lineer": "fp32"}}, ValueError, "'lineer'. Nearest: linear"),
    "unlisted op": ({"head": {"aten::gelo": "fp32"}}, ValueError, "aten::gelu"),
    "a dtype where autocast is off": (
        {"blocks.*": "fp32", "*.linear": FP16},
        ValueError,
        r"'\*.linear' for 'blocks.0.linear', a part of 'blocks.0'",
    ),
    "policy": ({"head": {"linear": "fp23"}}, ValueError, "nearest: fp32"),
    "carry": ({"head": {"aten::gelu": "append_dtype"}}, ValueError, "gelu can carry"),
    "device": ({"head": {"linear": {"xpu": "fp32"}}}, ValueError, "'xpu'"),
    "policy's type": ({"head": {"linear": 3}}, TypeError, "policy of linear as a str, got int"),
    "op's type": ({"head": {3: "fp32"}}, TypeError, "names of ops, got int"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_changes_nothing(name: str):
    policies, error, text = BAD[name]
    model = make()
    before, table = fastamp_state(), fastamp.policies.table()
    with pytest.raises(error, match=f"(?s)policies.for_modules: .*{text}"):
        fastamp.policies.for_modules(model, policies)
    assert fastamp_state() == before
    assert fastamp.policies.table() == table
    assert [type(m) for m in model.modules()] == [type(m) for m in make().modules()]


def test_what_is_no_model_and_modules_that_cannot_be_are_refused():
    with pytest.raises(TypeError, match="model to be a module, got function"):
        fastamp.policies.for_modules(make, {})  # type: ignore[arg-type]
    scripted = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="TorchScript"):
        fastamp.policies.for_modules(scripted, {"0": "fp32"})
    half = make()
    half.head.half()
    with pytest.raises(ValueError, match=r"'head' linear.weight of torch.float16"):
        fastamp.policies.for_modules(half, {"head": "fp32"})
    with pytest.raises(ValueError, match="which no module of Identity has"):
        fastamp.policies.for_modules(nn.Identity(), {"a": "fp32"})
    empty = fastamp.policies.for_modules(nn.Identity(), {})
    assert empty.names == {}


def test_torchscript_refuses_modules_under_policies():
    model = nn.Sequential(nn.Linear(2, 2))
    refuses = pytest.raises(RuntimeError, match=r"torch.jit.script: .*module policies.*release\(\)")
    with fastamp.policies.for_modules(model, {"0": "fp32"}), refuses:
        torch.jit.script(model)
    assert torch.jit.script(model)(torch.ones(1, 2)).dtype == FP32


def test_policies_are_saved_and_loaded(tmp_path):
    path = tmp_path / "policy.toml"
    fastamp.policies.save({"*norm*": "fp32", "head": {"linear": "fp32"}}, path)
    loaded = fastamp.policies.load(path)
    assert loaded.modules == {"*norm*": "fp32", "head": {"linear": "fp32"}}
    model = nn.ModuleDict({"norm": nn.LayerNorm(2), "head": nn.Linear(2, 2)})
    with fastamp.policies.for_modules(model, loaded) as policies:
        assert policies.names == {"*norm*": ["norm"], "head": ["head"]}
    fastamp.policies.save(loaded, tmp_path / "again.toml")
    assert fastamp.policies.load(tmp_path / "again.toml") == dataclasses.replace(
        loaded, path=str(tmp_path / "again.toml")
    )


def test_what_is_no_policy_is_not_saved(tmp_path):
    path = tmp_path / "policy.toml"
    with pytest.raises(TypeError, match=r"policies\.save: expected policies to be a PolicyFile"):
        fastamp.policies.save("policy.toml", path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"policies\.save: for 'a' expected one of 'fp32'"):
        fastamp.policies.save({"a": "fp23"}, path)
    assert not path.exists()
