# SPDX-License-Identifier: Apache-2.0
"""How long kept casts live, what cannot be kept, and threads."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch

import fastamp
from support.casts import copies_made
from support.kept_casts import casts_of, use

pytestmark = pytest.mark.usefixtures("nothing_is_kept_afterwards")
BF16 = torch.bfloat16


@pytest.fixture
def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(6.0).reshape(3, 2))


def test_memory_goes_with_the_weight():
    weight = torch.nn.Parameter(torch.ones(3, 2))
    keeper = fastamp.casts.keep(weight)
    use(weight)
    assert fastamp.casts.kept() == (1, 12)
    del weight
    gc.collect()
    assert fastamp.casts.kept() == (0, 0)
    keeper.release()
    keeper.release()


def test_memory_goes_at_release_and_not_before_the_last(weight):
    first, second = fastamp.casts.keep(weight), fastamp.casts.keep([weight, weight])
    use(weight)
    first.release()
    assert fastamp.casts.kept().copies == 1
    second.release()
    assert fastamp.casts.kept().copies == 0


def test_the_copy_is_replaced_not_piled_up(weight):
    with fastamp.casts.keep(weight):
        for _ in range(50):
            use(weight)
            with torch.no_grad():
                weight.mul_(2)
        assert fastamp.casts.kept() == (1, 12)


def test_modules_tied_weights_and_copies_of_modules():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    x = torch.ones(2, 4)

    def run(module: torch.nn.Module) -> None:
        with fastamp.autocast("cpu"):
            module(x.bfloat16())

    with fastamp.casts.keep(model):
        run(model)
        assert fastamp.casts.kept().copies == 3
        assert casts_of(lambda: run(model)) == (0, 3)
        twin = copy.deepcopy(model)
        assert casts_of(lambda: run(twin)) == (3, 0)
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
        assert casts_of(lambda: run(model)) == (3, 0)


def test_what_cannot_be_kept_is_cast_as_ever():
    base = torch.ones(6, 2)
    odd = {
        "view": base[:3],
        "double": torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float64)),
        "not leaf": torch.nn.Parameter(torch.ones(3, 2)) * 1,
        "inference": torch.inference_mode()(torch.ones)(3, 2),
        "strided": torch.ones(3, 4)[:, ::2],
    }
    for name, tensor in odd.items():
        with fastamp.casts.keep(tensor), torch.no_grad():
            if tensor.dtype == torch.float32:
                out = use(tensor)
                assert torch.equal(out, torch.full((1, 2), 3, dtype=BF16)), name
            assert fastamp.casts.kept().copies == 0, name


def test_cache_enabled_false_keeps_nothing(weight):
    with fastamp.casts.keep(weight), fastamp.autocast("cpu", cache_enabled=False):
        torch.mm(torch.ones(1, 3, dtype=BF16), weight)
        assert fastamp.casts.kept().copies == 0


def test_torchs_own_regions_use_kept_casts_too(weight):
    def run() -> None:
        with torch.autocast("cpu"):
            torch.mm(torch.ones(1, 3, dtype=BF16), weight)

    with fastamp.casts.keep(weight):
        run()
        assert casts_of(run) == (0, 1)


def test_threads_share_copies_and_edits_are_seen_by_all(weight):
    results = []

    def work() -> None:
        for _ in range(200):
            results.append(use(weight).sum().item())

    with fastamp.casts.keep(weight):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert fastamp.casts.kept().copies == 1
    assert set(results) == {15.0}


def test_keeping_and_releasing_beside_running_threads(weight):
    stop = threading.Event()
    wrong = []

    def work() -> None:
        while not stop.is_set():
            if use(weight).sum().item() != 15.0:
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        with fastamp.casts.keep(weight):
            fastamp.casts.drop()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_under_modes_and_transforms_nothing_is_kept(weight):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with fastamp.casts.keep(weight), Mode():
        use(weight)
    with fastamp.casts.keep(weight):
        torch.func.grad(lambda w: use(w).float().sum())(weight)
        assert fastamp.casts.kept().copies == 0


def test_a_profiler_sees_the_cast_and_that_there_are_no_more(weight):
    with fastamp.casts.keep(weight):
        assert copies_made(lambda: use(weight)) == 1
        assert copies_made(lambda: use(weight)) == 0


@pytest.mark.parametrize("wrong", [None, 3, "model", [1], {"a": 1}])
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(TypeError, match=r"casts.keep: expected a module, a tensor or tensors"):
        fastamp.casts.keep(wrong)


def test_wrong_arguments_of_drop_are_refused():
    with pytest.raises(TypeError, match=r"casts.drop: expected a module, a tensor or tensors"):
        fastamp.casts.drop(3)
