# SPDX-License-Identifier: Apache-2.0
"""Code that runs when a container of fastamp drops something, and that uses the same container."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import fastamp
import fastamp._C as _C
from support.autocast_state import torch_kernels, torch_state

BF16 = torch.bfloat16

Action = Callable[[], object]
Cast = Callable[[torch.Tensor], torch.Tensor]

X = torch.ones(2, 8)


def weight(value: float = 1.0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((8, 8), value))


def use(w: torch.Tensor, value: float = 1.0) -> torch.Tensor:
    out = torch.mm(X, w)
    assert out.dtype == BF16
    assert out.eq(8 * value).all()
    return out


def optimizer_of(count: int) -> torch.optim.SGD:
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.full((3,), 8.0)
    return torch.optim.SGD(parameters, lr=1.0)


# -- what runs -------------------------------------------------------------------------------------


def enters_a_region() -> None:
    with fastamp.autocast("cpu", dtype=BF16):
        use(weight(2.0), 2.0)


def enters_many_regions() -> None:
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(fastamp.autocast("cpu", dtype=BF16))
        for value in range(32):
            use(weight(float(value)), float(value))


def enters_torchs_region() -> None:
    with torch.autocast("cpu", dtype=BF16):
        use(weight(2.0), 2.0)


def clears_the_cache() -> None:
    torch.clear_autocast_cache()


def drops_kept_casts() -> None:
    fastamp.casts.drop()
    w = weight()
    with fastamp.casts.keep(w), fastamp.autocast("cpu", dtype=BF16):
        use(w)


def traces() -> None:
    with fastamp.debug.trace() as trace, fastamp.autocast("cpu", dtype=BF16):
        use(weight())
    assert trace.totals["weight_casts"] == 1


def changes_policies() -> None:
    with fastamp.policies.override({"mm": "fp32"}), fastamp.autocast("cpu", dtype=BF16):
        assert torch.mm(X, weight()).dtype == torch.float32


def lets_another_weight_go() -> None:
    with fastamp.autocast("cpu", dtype=BF16):
        w = weight()
        weakref.finalize(w, enters_a_region)
        use(w)
        del w


def scales_a_step() -> None:
    optimizer = optimizer_of(3)
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    fastamp.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
    scaler.step(optimizer)
    scaler.update()


ACTIONS = [
    enters_a_region,
    enters_many_regions,
    enters_torchs_region,
    clears_the_cache,
    drops_kept_casts,
    traces,
    changes_policies,
    lets_another_weight_go,
    scales_a_step,
]


class Ends:
    """Runs an action at the end of objects, and says how many it saw end."""

    def __init__(self, action: Action) -> None:
        self._action = action
        self.seen = 0
        self.one_more = threading.Semaphore(0)
        self.errors: list[BaseException] = []

    def of(self, thing: Any) -> Any:
        weakref.finalize(thing, self._run)
        return thing

    def _run(self) -> None:
        try:
            self._action()
        except BaseException as error:
            self.errors.append(error)
        self.seen += 1
        self.one_more.release()


@pytest.fixture(params=ACTIONS, ids=lambda action: action.__name__)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    before = torch_state()
    ends = Ends(request.param)
    yield ends
    assert not ends.errors
    assert ends.seen > 0
    assert torch_state() == before
    with fastamp.autocast("cpu", dtype=BF16):
        use(weight(3.0), 3.0)


_seen: list[torch.Tensor] = []


def _see(x: torch.Tensor) -> torch.Tensor:
    _seen.append(x)
    return x.sum()


# Never taken back: inductor asks every op that it has heard of.
_library = torch.library.Library("destruction", "DEF")
_library.define("see(Tensor x) -> Tensor")
_library.impl("see", _see, "CompositeExplicitAutograd")


@pytest.fixture(scope="module")
def cast_of() -> Iterator[Cast]:
    """A function that returns the cast that a region makes of a weight."""

    def cast_of(w: torch.Tensor) -> torch.Tensor:
        torch.ops.destruction.see(w)
        return _seen.pop()

    fastamp.policies.register_op("destruction::see", "lower", "cpu")
    yield cast_of
    fastamp.policies.unregister_op("destruction::see")


# -- what lets go ----------------------------------------------------------------------------------


def use_dying_weights(ends: Ends, count: int = 3) -> None:
    """Leaves weights that nothing but their casts holds; the next cast would let them go."""
    graphs = []
    for value in range(count):
        w = ends.of(weight(float(value)))
        graphs.append(use(w, float(value)))
        del w
    graphs.clear()
    assert ends.seen == 0


def test_casts_of_a_region_that_ends(ends: Ends):
    with fastamp.autocast("cpu", dtype=BF16):
        use_dying_weights(ends, 40)
    assert ends.seen == 40


def test_casts_of_a_region_of_torchs_class(ends: Ends):
    with torch.autocast("cpu", dtype=BF16):
        use_dying_weights(ends)
    with fastamp.autocast("cpu", dtype=BF16):
        use(weight())
    assert ends.seen == 3


def test_casts_left_from_torchs_region_when_the_next_begins(ends: Ends):
    with torch.autocast("cpu", dtype=BF16):
        use_dying_weights(ends)
    with torch.autocast("cpu", dtype=BF16):
        use(weight())
        use(weight(5.0), 5.0)
    assert ends.seen == 3


def test_casts_of_regions_that_end_out_of_order(ends: Ends):
    outer, inner = fastamp.autocast("cpu", dtype=BF16), fastamp.autocast("cpu", dtype=BF16)
    outer.__enter__()
    inner.__enter__()
    use_dying_weights(ends)
    outer.__exit__(None, None, None)
    use(weight())
    inner.__exit__(None, None, None)
    assert ends.seen == 3


def test_casts_that_are_cleared_inside_the_region(ends: Ends):
    with fastamp.autocast("cpu", dtype=BF16):
        use_dying_weights(ends)
        torch.clear_autocast_cache()
        assert ends.seen == 3
        use(weight(7.0), 7.0)


def test_a_cast_whose_place_another_takes(ends: Ends, cast_of: Cast):
    w = weight()
    with fastamp.autocast("cpu", dtype=BF16):
        ends.of(cast_of(w))
        assert ends.seen == 0
        with torch.no_grad():
            w.mul_(2)
        use(w, 2.0)
        assert ends.seen == 1
        use(w, 2.0)
        use(weight(5.0), 5.0)


def test_casts_of_a_thread_that_ends_inside_a_region(ends: Ends):
    def work() -> None:
        fastamp.autocast("cpu", dtype=BF16).__enter__()
        use_dying_weights(ends)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(3):  # The thread's own memory goes some time after Python's thread has ended.
        assert ends.one_more.acquire(timeout=300)


# Without our kernels, and getting them back. (torch's own wait for themselves where a weight that
# they cast ends.)
@pytest.mark.parametrize("action", [enters_many_regions, _C.register_kernels])
def test_casts_that_uninstalling_drops(action: Action):
    ends = Ends(action)
    torch.set_autocast_enabled("cpu", True)
    torch.autocast_increment_nesting()
    use_dying_weights(ends)
    torch.autocast_decrement_nesting()
    torch.set_autocast_enabled("cpu", False)
    with torch_kernels():
        pass
    assert ends.seen == 3
    assert not ends.errors


def test_kept_casts(ends: Ends, cast_of: Cast):
    w = weight()
    with fastamp.casts.keep(w):
        with fastamp.autocast("cpu", dtype=BF16):
            ends.of(cast_of(w).untyped_storage())
        assert ends.seen == 0
        fastamp.casts.drop([w])
        assert ends.seen == 1
        with fastamp.autocast("cpu", dtype=BF16):
            use(w)


def test_kept_casts_whose_place_others_take(ends: Ends, cast_of: Cast):
    w = weight()
    with fastamp.casts.keep(w):
        with fastamp.autocast("cpu", dtype=BF16):
            ends.of(cast_of(w).untyped_storage())
        with torch.no_grad():
            w.mul_(2)
        for _ in range(2):
            with fastamp.autocast("cpu", dtype=BF16):
                use(w, 2.0)
        assert ends.seen == 1


@pytest.mark.parametrize("when", ["release", "dead"])
def test_kept_casts_of_weights_that_are_gone(ends: Ends, cast_of: Cast, when: str):
    w = weight()
    request = fastamp.casts.keep(w)
    with fastamp.autocast("cpu", dtype=BF16):
        ends.of(cast_of(w).untyped_storage())
    if when == "release":
        request.release()
    else:
        del w
        fastamp.casts.kept()
    assert ends.seen == 1
    request.release()


def test_weights_cast_together(ends: Ends):
    weights = [weight(float(value)) for value in range(4)]
    with fastamp.casts.together(weights):
        for _ in range(3):
            with fastamp.autocast("cpu", dtype=BF16):
                for value, w in enumerate(weights):
                    use(w, float(value))
        for w in weights[1:]:
            ends.of(w)
        with fastamp.autocast("cpu", dtype=BF16):
            use(weights[0], 0.0)
            use(weights[1], 1.0)
            del w
            del weights[1:]
            assert ends.seen >= 2  # A cast that no op has taken keeps no weight; some clear all.
        assert ends.seen == 3
        for _ in range(3):
            with fastamp.autocast("cpu", dtype=BF16):
                use(weights[0], 0.0)


# -- gradients -------------------------------------------------------------------------------------


def let_gradients_go(optimizer: torch.optim.Optimizer, ends: Ends) -> int:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        ends.of(parameter.grad)
        parameter.grad = None
    return len(parameters)


def started() -> fastamp.GradScaler:
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    return scaler


@pytest.mark.parametrize("last", ["step", "update", "unscale_", "scaler"])
def test_gradients_that_a_pass_holds(ends: Ends, last: str):
    optimizer, other, scaler = optimizer_of(5), optimizer_of(2), started()
    scaler.unscale_(optimizer)
    count = let_gradients_go(optimizer, ends)
    assert ends.seen == 0
    if last == "step":
        scaler.step(optimizer)
    if last == "unscale_":
        scaler.unscale_(other)
    if last == "scaler":
        del scaler
        gc.collect()
    else:
        scaler.update()
    assert ends.seen == count


def test_gradients_whose_end_uses_the_scaler_that_lets_them_go():
    optimizer, scaler = optimizer_of(3), started()
    ends = Ends(lambda: (scaler.update(), scaler.unscale_(optimizer_of(2))))
    scaler.unscale_(optimizer)
    let_gradients_go(optimizer, ends)
    scaler.step(optimizer)
    scaler.update()
    assert ends.seen == 3
    assert not ends.errors


def test_a_pass_that_is_forgotten_while_it_forgets():
    optimizer, scaler = fastamp.optim.fuse_(optimizer_of(4)), started()
    ends = Ends(lambda: scaler._per_optimizer_states and scaler.update())
    scaler.unscale_(optimizer)
    let_gradients_go(optimizer, ends)
    scaler.step(optimizer)
    assert ends.seen == 4
    assert not ends.errors
    assert not scaler._per_optimizer_states


# -- objects of the raw C API ----------------------------------------------------------------------


def test_attributes_of_a_region_that_are_replaced(ends: Ends):
    class Name(str):
        pass

    region = fastamp.autocast("cpu", dtype=BF16)
    region.device = ends.of(Name("cpu"))
    region.device = "cpu"
    assert ends.seen == 1
    with region:
        use(weight())


def test_a_region_object_that_ends_with_its_region(ends: Ends):
    def generator() -> Iterator[None]:
        with ends.of(fastamp.autocast("cpu", dtype=BF16)):
            use_dying_weights(ends)
            yield

    running = generator()
    next(running)
    running.close()
    assert ends.seen == 4
