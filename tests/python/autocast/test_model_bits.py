# SPDX-License-Identifier: Apache-2.0
"""Outputs, losses and gradients of small models are torch's bits, whatever casts are spared."""

from __future__ import annotations

import gc
import resource
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastamp
from support.autocast_state import torch_kernels
from support.small_models import MODELS, train_step

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 6, 8, generator=generator)
    return x, torch.randint(4, (5,), generator=generator)


def steps(
    name: str, region: Any, dtype: torch.dtype, prepare: Callable[[Any], Any] = lambda model: model
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = MODELS[name]()
    prepared = prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen: list[torch.Tensor] = []
    for _ in range(3):
        seen += train_step(prepared, region("cpu", dtype=dtype), *data())
        optimizer.step()
    return seen


def assert_same_bits(own: list[torch.Tensor], torchs: list[torch.Tensor]) -> None:
    assert len(own) == len(torchs)
    for a, b in zip(own, torchs, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def torchs_steps(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    with torch_kernels():
        try:
            return steps(name, torch.autocast, dtype)
        except RuntimeError:
            # oneDNN has no low-precision LSTM on some CPUs, and torch refuses then.
            if name != "lstm":
                raise
    assert all(value.isfinite().all() for value in steps(name, fastamp.autocast, dtype))
    pytest.skip("torch refuses this LSTM on this CPU; test_unsupported_by_torch.py has the values")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_three_steps_have_torchs_bits(name: str, dtype: str):
    torchs = torchs_steps(name, DTYPES[dtype])
    assert_same_bits(steps(name, fastamp.autocast, DTYPES[dtype]), torchs)


@pytest.mark.parametrize("name", MODELS)
def test_kept_casts_change_no_bit(name: str):
    keepers = []

    def keep(model: torch.nn.Module) -> torch.nn.Module:
        keepers.append(fastamp.casts.keep(model))
        return model

    torchs = torchs_steps(name, torch.bfloat16)
    own = steps(name, fastamp.autocast, torch.bfloat16, keep)
    keepers.pop().release()
    assert_same_bits(own, torchs)


@pytest.mark.parametrize("name", ["mlp", "cnn", "separate qkv", "fused qkv", "tied"])
def test_compiled_models_have_torchs_bits(name: str):
    def compiled(model: torch.nn.Module) -> Any:
        torch._dynamo.reset()
        return torch.compile(model, backend="aot_eager")

    own = steps(name, fastamp.autocast, torch.bfloat16, compiled)
    with torch_kernels():
        torchs = steps(name, torch.autocast, torch.bfloat16, compiled)
    torch._dynamo.reset()
    assert_same_bits(own, torchs)


def test_threads_train_models_of_their_own_with_torchs_bits():
    names = ["mlp", "separate qkv", "tied", "edits"]
    with torch_kernels():
        torchs = {name: steps(name, torch.autocast, torch.bfloat16) for name in names}
    # Seeds are the process's: models are made one after the other, and trained at the same time.
    models = {}
    for name in names:
        torch.manual_seed(0)
        models[name] = MODELS[name]()
    own: dict[str, list[torch.Tensor]] = {name: [] for name in names}

    def work(name: str) -> None:
        optimizer = torch.optim.SGD(models[name].parameters(), lr=0.05)
        for _ in range(3):
            own[name] += train_step(models[name], fastamp.autocast("cpu"), *data())
            optimizer.step()

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        assert_same_bits(own[name], torchs[name])


def living_low_precision_bytes() -> int:
    gc.collect()
    # Other tests' sparse tensors have no storage of their own to ask.
    tensors = [
        t
        for t in gc.get_objects()
        if type(t) is torch.Tensor and t.dtype == torch.bfloat16 and t.layout == torch.strided
    ]
    return sum({t.untyped_storage().data_ptr(): t.nbytes for t in tensors}.values())


@pytest.mark.parametrize("name", ["separate qkv", "tied", "edits"])
def test_every_cast_of_a_weight_is_gone_after_the_region(name: str):
    torch.manual_seed(0)
    model = MODELS[name]()
    before = living_low_precision_bytes()
    recorder = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: recorder.append(t) or t, lambda t: t):
        train_step(model, fastamp.autocast("cpu"), *data())
    assert living_low_precision_bytes() > before
    memories = [c.untyped_storage()._weak_ref() for c in recorder if c.dtype == torch.bfloat16]
    recorder.clear()
    assert memories
    assert living_low_precision_bytes() == before
    expired = torch.UntypedStorage._expired
    assert all(expired(memory) for memory in memories)
    for memory in memories:
        torch.UntypedStorage._free_weak_ref(memory)


@pytest.mark.slow
def test_many_uses_in_regions_do_not_grow_the_process():
    layer = torch.nn.Linear(4, 4, bias=False)
    kept = torch.nn.Linear(4, 4, bias=False)
    x = torch.ones(1, 4, requires_grad=True)

    def run(regions: int) -> None:
        for _ in range(regions):
            with fastamp.autocast("cpu"):
                h = x * 2
                layer(h)
                kept(h)

    with fastamp.casts.keep(kept):
        run(10_000)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run(100_000)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2048, f"{grown} KiB"  # 16 bytes per use would be 4.6 MiB
