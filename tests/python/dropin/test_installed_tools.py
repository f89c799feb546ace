# SPDX-License-Identifier: Apache-2.0
"""What torch builds on its own classes keeps working while fastamp is installed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import fastamp
from support.autocast_state import torch_state

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
W = torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inside(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    plain = torch.mm(x, W)
    with torch.autocast("cpu", dtype=BF16):
        lower = torch.mm(x, W)
        with torch.amp.autocast("cpu", enabled=False):
            off = torch.mm(x, W)
        with torch.cpu.amp.autocast(dtype=FP16):
            other = torch.mm(x, W)
    return plain, lower, off, other


READY = torch.autocast("cpu", dtype=FP16)


def ready(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with READY:
        return (torch.mm(x, W),)


@torch.autocast("cpu", dtype=BF16)
def decorated(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.mm(x, W), torch.nn.functional.mse_loss(x, x))


def same(own: Any, torchs: Any) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(own, torchs, strict=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [inside, ready, decorated])
def test_regions_compile_to_one_graph_before_and_after_install(function: Any, backend: str):
    expected = function(X)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    assert same(compiled(X), expected)
    with fastamp.install():
        assert same(compiled(X), expected)
        torch._dynamo.reset()
        again = torch.compile(function, backend=backend, fullgraph=True)
        assert same(again(X), expected)
    assert same(again(X), expected)


def test_functions_compiled_before_install_are_not_compiled_again():
    counter = CompileCounter()
    compiled = torch.compile(inside, backend=counter, fullgraph=True)
    around = torch.compile(lambda x: torch.mm(x, W), backend=counter, fullgraph=True)

    def run() -> None:
        compiled(X)
        with torch.autocast("cpu"):
            around(X)

    run()
    frames = counter.frame_count
    with fastamp.install():
        run()
        run()
    run()
    assert counter.frame_count == frames == 2


@pytest.mark.usefixtures("installed")
def test_graph_breaks_and_exceptions_inside_a_compiled_region():
    def broken(x: torch.Tensor, fail: bool) -> torch.Tensor:
        with torch.autocast("cpu"):
            y = torch.mm(x, W)
            torch._dynamo.graph_break()
            if fail:
                raise KeyError("inside")
            return torch.mm(x, W) + y

    compiled = torch.compile(broken, backend="eager")
    before = torch_state()
    assert compiled(X, False).dtype == BF16
    with pytest.raises(KeyError, match="inside"):
        compiled(X, True)
    assert torch_state() == before


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", dtype=BF16):
            lower = self.linear(x)
            with torch.autocast("cpu", enabled=False):
                off = self.linear(x)
        return self.linear(x), lower, off


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.usefixtures("installed")
def test_export_keeps_regions(strict: bool):
    model = Model()
    exported = torch.export.export(model, (X,), strict=strict)
    assert same(exported.module()(X), model(X))
    assert "wrap_with_autocast" in str(exported.graph)


def scripted_region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lower = torch.mm(x, x)
    return lower, torch.mm(x, x)


@pytest.mark.usefixtures("installed")
def test_regions_in_scripts_compile_and_run():
    square = torch.ones(4, 4)
    script = torch.jit.script(scripted_region)
    assert [t.dtype for t in script(square)] == [BF16, FP32]
    with torch.autocast("cpu", dtype=FP16):
        traced = torch.jit.trace(lambda x: torch.mm(x, x), square, check_trace=False)
    assert traced(square).dtype == FP16


def test_script_regions_compile_for_the_first_time_while_installed():
    from support.children import check_python

    code = """
import fastamp
fastamp.install()
import torch
from dropin.test_installed_tools import scripted_region
print([t.dtype for t in torch.jit.script(scripted_region)(torch.ones(4, 4))])
"""
    printed = check_python("-W", "ignore", "-c", code)
    assert printed.strip() == "[torch.bfloat16, torch.float32]"


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))]
)
@pytest.mark.usefixtures("installed")
def test_regions_copy_and_pickle_as_torchs(duplicate: Any):
    region = torch.autocast("cpu", dtype=FP16, cache_enabled=False)
    with region:
        twin = duplicate(region)
    assert type(twin) is torch.autocast
    assert vars(twin) == vars(region)
    with twin:
        assert torch.mm(X, W).dtype == FP16


def trained(scaler: Any, steps: int = 3) -> tuple[torch.Tensor, dict[str, Any]]:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        factor = float("inf") if step == 1 else 1.0
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return parameter.detach(), scaler.state_dict()


def test_scalers_pickled_before_are_loaded_as_fastamps_and_go_on():
    plain = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    trained(plain)
    saved = pickle.dumps(plain)
    with fastamp.install():
        own = pickle.loads(saved)
        twin = copy.deepcopy(plain)
    assert isinstance(own, fastamp.GradScaler)
    assert isinstance(twin, fastamp.GradScaler)
    assert own.state_dict() == twin.state_dict() == plain.state_dict()
    (a, state_a), (b, state_b) = trained(own), trained(plain)
    assert torch.equal(a, b)
    assert state_a == state_b


@pytest.mark.parametrize("name", ["amp", "cpu.amp", "cuda.amp"])
def test_scalers_made_while_installed_pickle(name: str):
    with fastamp.install():
        make = getattr(torch, name.split(".")[0])
        make = make.amp if "." in name else make
        keywords = {"device": "cpu"} if name == "amp" else {"enabled": name != "cuda.amp"}
        scaler = make.GradScaler(init_scale=8.0, **keywords)
        twin = pickle.loads(pickle.dumps(scaler))
    again = pickle.loads(pickle.dumps(scaler))
    assert type(twin) is type(again) is type(scaler)
    assert twin.state_dict() == again.state_dict() == scaler.state_dict()


@pytest.mark.usefixtures("installed")
def test_fsdps_scaler_is_a_subclass_of_torchs_and_keeps_its_steps():
    class Group:  # a process group of one rank, without a process group
        pass

    scaler = ShardedGradScaler("cpu", init_scale=8.0, process_group=Group())
    assert type(scaler) is ShardedGradScaler
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.scale(torch.ones(2, dtype=FP16)).dtype == FP16
    assert scaler.get_scale() == 8.0


def test_training_is_bit_identical_before_during_and_after():
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
        for _ in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=FP16):
                loss = torch.nn.functional.cross_entropy(model(X), torch.arange(4))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        return [*(p.detach() for p in model.parameters()), scaler._scale, scaler._growth_tracker]

    with fastamp.debug.torch_kernels():
        torchs = run()
    with fastamp.install():
        own = run()
    assert same(own, torchs)
    assert same(run(), torchs)
