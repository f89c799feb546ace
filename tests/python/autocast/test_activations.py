# SPDX-License-Identifier: Apache-2.0
"""An activation used by several ops of a region is cast once; only the memory shows it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import fastamp
from support.autocast_state import torch_kernels

BF16 = torch.bfloat16


def saved_storages(run: Any, dtype: torch.dtype = BF16) -> dict[int, int]:
    """Bytes of each memory of this dtype that ``run`` saves for backward."""
    sizes: dict[int, int] = {}
    kept = []  # Keeps the addresses from being used again.

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == dtype:
            kept.append(tensor)
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sizes


class Attention(torch.nn.Module):
    """A transformer block with separate query, key, value, gate and up projections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.out = (torch.nn.Linear(width, width) for _ in range(4))
        self.gate, self.up = (torch.nn.Linear(width, 2 * width) for _ in range(2))
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        attention = torch.nn.functional.scaled_dot_product_attention(
            self.q(h), self.k(h), self.v(h)
        )
        x = x + self.out(attention)
        h = self.norms[1](x)
        return x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))


def projections(width: int = 8) -> torch.nn.ModuleList:
    torch.manual_seed(0)
    return torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(3))


def test_three_projections_of_one_activation_save_one_cast_of_it():
    layers = projections()
    x = torch.randn(4, 8, requires_grad=True)

    def run() -> None:
        with fastamp.autocast("cpu"):
            h = x * 2
            run.out = [layer(h) for layer in layers]

    own = saved_storages(run)
    with torch_kernels():
        torchs = saved_storages(run)
    assert len(torchs) == 6  # three casts of h, three of weights
    assert len(own) == 4


def test_each_use_has_a_node_of_its_own_under_torchs_name():
    layers = projections()
    x = torch.randn(4, 8, requires_grad=True)
    with fastamp.autocast("cpu"):
        h = x * 2
        nodes = [layer(h).grad_fn.next_functions[0][0] for layer in layers]
    assert len(set(nodes)) == 3
    reference = x.to(BF16).grad_fn
    assert {node.name() for node in nodes} == {reference.name()} == {"ToCopyBackward0"}
    assert {type(node) for node in nodes} == {type(reference)}


@pytest.mark.parametrize("blocks", [1, 3])
def test_gradients_of_a_transformer_are_torchs_bit_for_bit(blocks: int):
    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(Attention(16) for _ in range(blocks)))
        x = torch.randn(2, 5, 16, requires_grad=True)
        with fastamp.autocast("cpu"):
            loss = model(x).float().square().mean()
        loss.backward()
        return [loss.detach(), x.grad, *(p.grad for p in model.parameters())]

    own = gradients()
    with torch_kernels():
        torchs = gradients()
    assert all(torch.equal(a, b) for a, b in zip(own, torchs, strict=True))


def test_twelve_blocks_save_a_tenth_less_for_backward():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Attention(64) for _ in range(12)))
    x = torch.randn(8, 64, 64)

    def saved_bytes() -> int:
        total: dict[int, int] = {}
        for dtype in (BF16, torch.float32):
            total.update(saved_storages(run, dtype))
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        return sum(size for pointer, size in total.items() if pointer not in weights)

    def run() -> None:
        with fastamp.autocast("cpu"):
            run.out = model(x)

    own = saved_bytes()
    with torch_kernels():
        torchs = saved_bytes()
    assert own <= 0.9 * torchs, (own, torchs)


def test_an_activation_edited_between_two_uses_is_cast_again():
    layers = projections()
    x = torch.randn(4, 8, requires_grad=True)
    with fastamp.autocast("cpu"):
        h = x * 2
        first = layers[0](h)
        h.add_(1)
        second = layers[0](h)
        fresh = layers[0]((x * 2).add_(1))
    assert not torch.equal(first, second)
    assert torch.equal(second, fresh)
    (first.float().sum() + second.float().sum()).backward()
    assert x.grad is not None


def test_a_buffer_written_behind_torchs_back_is_read_anew():
    """numpy moves no version counter: only activations with a history are shared."""
    numpy = pytest.importorskip("numpy")
    memory = numpy.ones((4, 8), dtype="float32")
    buffer = torch.from_numpy(memory)
    layer = projections()[0]
    with fastamp.autocast("cpu"):
        first = layer(buffer)
        memory *= 2
        second = layer(buffer)
    assert torch.equal(second, 2 * first)


def test_what_einsum_hands_out_can_be_edited_without_harm_to_other_uses():
    layer = projections()[0]
    x = torch.ones(4, 8, requires_grad=True)
    with fastamp.autocast("cuda" if torch.cuda.is_available() else "cpu"):
        h = x * 2
        with torch.no_grad():
            torch.einsum("ij->ij", h).add_(5)
        out = layer(h)
        again = layer(h)
    assert torch.equal(out, again)
    expected = h.detach().to(out.dtype) @ layer.weight.detach().to(out.dtype).t()
    assert torch.equal(out.detach(), expected)


def test_nothing_is_shared_with_the_cache_switched_off():
    layers = projections()
    x = torch.randn(4, 8, requires_grad=True)

    def run() -> None:
        with fastamp.autocast("cpu", cache_enabled=False):
            h = x * 2
            run.out = [layer(h) for layer in layers]

    assert len(saved_storages(run)) == 6


def test_the_ring_keeps_neither_activation_nor_cast_alive():
    layers = projections()
    x = torch.randn(4, 8, requires_grad=True)
    with fastamp.autocast("cpu"):
        h = x * 2
        out = layers[0](h)
        cast = out.grad_fn._saved_self if hasattr(out.grad_fn, "_saved_self") else None
        memory = None if cast is None else weakref.ref(cast.untyped_storage())
        alive = weakref.ref(h)
        del h, out, cast
        assert alive() is None
        assert memory is None or memory() is None
        other = layers[1](x * 2)  # the ring still refers to the dead ones
    assert other.dtype == BF16


def test_second_derivatives_hooks_and_a_second_backward_work():
    layers = projections()
    x = torch.randn(4, 8, requires_grad=True)
    seen = []

    def run() -> list[torch.Tensor]:
        with fastamp.autocast("cpu"):
            h = x * 2
            h.register_hook(lambda grad: seen.append(grad.dtype))
            total = sum((layer(h).float() ** 3).sum() for layer in layers)
        first = torch.autograd.grad(total, x, create_graph=True)[0]
        again = torch.autograd.grad(total, x, retain_graph=True)[0]
        second = torch.autograd.grad(first.square().sum(), x)[0]
        return [first.detach(), again, second]

    own = run()
    with torch_kernels():
        torchs = run()
    assert all(torch.equal(a, b) for a, b in zip(own, torchs, strict=True))
    assert set(seen) == {torch.float32}


@pytest.mark.parametrize("shape", [(8,), (3, 5), (1, 1), (0, 4), (2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_casts_have_the_strides_and_bits_of_to(shape: tuple[int, ...], dtype: torch.dtype):
    """cat of one promoted tensor shows the cast as it is; odd layouts included."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(shape, generator=generator) * 1e5
    layouts = [base, base.t() if base.dim() == 2 else base.transpose(0, -1)]
    if base.dim() == 4:
        layouts.append(base.contiguous(memory_format=torch.channels_last))
        layouts.append(base[:, :, ::2])
    for x in layouts:
        with fastamp.autocast("cpu", dtype=dtype):
            got = torch.nn.functional.prelu(x, torch.ones(1))
        expected = torch.nn.functional.prelu(x.to(dtype), torch.ones(1, dtype=dtype))
        assert got.dtype == expected.dtype
        assert got.stride() == expected.stride()
        assert torch.equal(got, expected)
