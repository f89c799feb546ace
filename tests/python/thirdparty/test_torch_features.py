# SPDX-License-Identifier: Apache-2.0
"""Parts of torch that know about autocast, on whole models while fastamp is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import func, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from support.simulated_cuda import need_real_gpu
from support.twin_runs import is_fastamps, parameters_of, same_results

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])


def encoder(device: str, **options: Any) -> nn.Module:
    options = {"dropout": 0.1, "batch_first": True, **options}
    layer = nn.TransformerEncoderLayer(16, 2, 32, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)


def train(
    device: str, dtype: torch.dtype, forward: Callable[[nn.Module, torch.Tensor], Any]
) -> Any:
    """Four steps with a scaler, the second of which overflows."""
    model = encoder(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8, growth_interval=2)
    assert is_fastamps(scaler)
    x, trace = torch.randn(2, 5, 16, device=device, requires_grad=True), []
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=dtype):
            output = forward(model, x)
            loss = output.float().square().mean() * (float("inf") if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        trace.append((loss.item(), str(output.dtype), scaler.state_dict()))
    assert trace[1][2]["scale"] == trace[0][2]["scale"] / 2
    assert x.grad is not None
    return trace, parameters_of(model), x.grad.cpu()


@DTYPES
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointed_layers_train_with_torchs_bits(
    device: str, reentrant: bool, dtype: torch.dtype
):
    def forward(model: Any, x: torch.Tensor) -> Any:
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x

    same_results(lambda: train(device, dtype, forward))


@DTYPES
def test_custom_functions_train_with_torchs_bits(device: str, dtype: torch.dtype):
    class Lowered(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=device)
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return torch.matmul(x, w)

        @staticmethod
        @torch.amp.custom_bwd(device_type=device)
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, w = ctx.saved_tensors
            return torch.matmul(grad, w.t()), torch.matmul(x.flatten(0, 1).t(), grad.flatten(0, 1))

    class Exact(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=device, cast_inputs=torch.float32)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            assert not torch.is_autocast_enabled(device)
            assert x.dtype == FP32
            ctx.save_for_backward(x)
            return x.exp().log1p()

        @staticmethod
        @torch.amp.custom_bwd(device_type=device)
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            assert not torch.is_autocast_enabled(device)
            return grad * ctx.saved_tensors[0].sigmoid()

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        weight = next(model.parameters())[:16]
        return Exact.apply(Lowered.apply(model(x), weight))

    same_results(lambda: train(device, dtype, forward))


FAST_PATHS = {"aten::_native_multi_head_attention", "aten::_transformer_encoder_layer_fwd"}


@DTYPES
def test_attention_takes_its_fast_path_where_torch_does(device: str, dtype: torch.dtype):
    def run() -> Any:
        model = encoder(device).eval()
        attention = nn.MultiheadAttention(16, 2, batch_first=True).to(device).eval()
        x, results, events = torch.randn(2, 5, 16, device=device), [], []
        for enabled in (True, False):
            region = torch.autocast(device, dtype=dtype, enabled=enabled)
            with torch.no_grad(), region, torch.profiler.profile(acc_events=True) as profile:
                results += [model(x), *attention(x, x, x)]
                results.append(attention(x, x, x, need_weights=False)[0])
            names = {event.name for event in profile.events()}
            events.append(sorted(names & FAST_PATHS))
        return [r.cpu() for r in results if r is not None], events

    _, (inside, outside) = same_results(run)
    # torch leaves the fast path in regions, but asks about those for CUDA only.
    assert inside == ([] if device == "cuda" else sorted(FAST_PATHS))
    assert outside == sorted(FAST_PATHS)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@DTYPES
def test_gradients_per_sample_are_torchs(device: str, dtype: torch.dtype):
    if device == "cuda":
        need_real_gpu("batching rules of torch's kernels for CUDA")

    def run() -> Any:
        model = encoder(device, dropout=0.0)
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def loss(weights: Any, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device, dtype=dtype):
                output = func.functional_call(model, weights, (x.unsqueeze(0),))
            return output.float().square().sum()

        gradients = func.vmap(func.grad(loss), in_dims=(None, 0))
        x = torch.randn(3, 5, 16, device=device)
        with torch.autocast(device, dtype=dtype):  # around the transforms, too
            around = gradients(weights, x)
        inside = gradients(weights, x)
        return [{name: g.cpu() for name, g in tree.items()} for tree in (inside, around)]

    inside, _ = same_results(run)
    assert inside["layers.0.linear1.weight"].shape == (3, 32, 16)


def blend_with_rule_for(device: str) -> Any:
    """An op per device: one with rules for two devices loses them when torch compiles it."""
    name = f"fastamp_thirdparty::blend_{device}"
    torch.library.define(name, "(Tensor a, Tensor b) -> Tensor")
    torch.library.impl(name, "CompositeExplicitAutograd", torch.mm)
    torch.library.register_fake(name, lambda a, b: a.new_empty(len(a), b.shape[1]))
    torch.library.register_autocast(name, device, BF16)
    return getattr(torch.ops.fastamp_thirdparty, f"blend_{device}")


BLEND = {device: blend_with_rule_for(device) for device in ("cpu", "cuda")}


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_ops_with_autocast_rules_registered_in_torch_keep_them(device: str, compiled: bool):
    def run() -> Any:
        torch.compiler.reset()
        op = BLEND[device]

        def blend(a: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device, dtype=FP16):  # the registration's dtype wins
                return op(a, a)

        if compiled:
            blend = torch.compile(blend, backend="aot_eager", fullgraph=True)
        a = torch.randn(4, 4, device=device)
        with torch.autocast(device, dtype=FP16):
            around = op(a, a)
        return around.cpu(), blend(a).cpu(), op(a, a).cpu()

    around, inside, outside = same_results(run, witness=False)
    assert [t.dtype for t in (around, inside, outside)] == [BF16, BF16, FP32]


def test_tensor_subclasses_see_the_same_casts(device: str):
    def run() -> Any:
        model = nn.Linear(8, 8).to(device)
        weight = TwoTensor(model.weight.detach(), 2 * model.weight.detach())
        model.weight = nn.Parameter(weight)
        with torch.autocast(device, dtype=BF16):
            output = model(torch.randn(4, 8, device=device))
        assert isinstance(output, TwoTensor)
        output.float().sum().backward()
        gradient = model.weight.grad
        assert isinstance(gradient, TwoTensor)
        return [t.detach().cpu() for t in (output.a, output.b, gradient.a, gradient.b)]

    assert same_results(run)[0].dtype == BF16


def scripted_vision(kind: str, device: str) -> Any:
    models = pytest.importorskip(
        "torchvision.models", reason="the thirdparty extra is not installed"
    )
    block = models.resnet.Bottleneck
    model = models.ResNet(block, [1, 1, 1, 1], num_classes=4, width_per_group=4)
    model = model.to(device).eval()
    if kind == "script":
        return torch.jit.script(model)
    return torch.jit.trace(model, torch.ones(1, 3, 32, 32, device=device))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@DTYPES
@pytest.mark.parametrize("kind", ["script", "trace"])
def test_torchscript_models_run_in_regions(device: str, kind: str, dtype: torch.dtype):
    def run() -> Any:
        model, x = scripted_vision(kind, device), torch.randn(2, 3, 32, 32, device=device)
        results = []
        for _ in range(3):  # the profiling executor optimises after the first calls
            with torch.no_grad(), torch.autocast(device, dtype=dtype):
                results.append(model(x).cpu())
        return [*results, model(x).detach().cpu()]

    assert [t.dtype for t in same_results(run, witness=False)] == [dtype] * 3 + [FP32]


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_exported_models_keep_the_casts(device: str, strict: bool):
    models = pytest.importorskip(
        "torchvision.models", reason="the thirdparty extra is not installed"
    )

    class Autocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vit = models.VisionTransformer(16, 8, 1, 2, 16, 32, num_classes=4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.autocast(device, dtype=BF16):
                return self.vit(x), self.vit.heads(x.flatten(1)[:, :16])

    def run() -> Any:
        model = Autocast().to(device).eval()
        x = torch.randn(2, 3, 16, 16, device=device)
        program = torch.export.export(model, (x,), strict=strict)
        return [t.detach().cpu() for t in (*program.module()(x), *model(x))]

    assert {t.dtype for t in same_results(run, witness=not strict)} == {BF16}


@pytest.mark.cuda
@DTYPES
def test_data_parallel_replicas_run_in_the_region(dtype: torch.dtype):
    devices = list(range(torch.cuda.device_count()))
    forward = partial(nn.parallel.data_parallel, device_ids=devices)
    same_results(lambda: train("cuda", dtype, lambda model, x: forward(model, x)))


@pytest.mark.cuda
def test_replicas_on_threads_of_their_own_run_in_native_regions():
    def run() -> Any:
        model, x = nn.Linear(8, 8).cuda(), torch.randn(2, 8, device="cuda")
        with torch.autocast("cuda"):
            replicas = nn.parallel.parallel_apply([model, model], [x, 2 * x], devices=[0, 0])
        return [t.detach().cpu() for t in replicas]

    assert same_results(run)[0].dtype == FP16
