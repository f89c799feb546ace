# SPDX-License-Identifier: Apache-2.0
"""The model of a linear layer's time from docs/float8.md, written a second time and slowly."""

from __future__ import annotations

import dataclasses
import math

import torch


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the page's table says of a GPU: the units there."""

    carrier: float
    float8: float
    bandwidth: float
    launch: float = 2.5e-6
    units: int = 132
    min_work: float = 2e10


GPUS = {
    "H100 SXM": Gpu(800e12, 1220e12, 2.58e12),
    "H200 SXM": Gpu(800e12, 1400e12, 3.7e12),
    "H200 NVL": Gpu(635e12, 1240e12, 3.55e12),
}


@dataclasses.dataclass(frozen=True)
class Layer:
    """One linear layer and what of its backward pass is computed."""

    m: int
    k: int
    n: int
    x_dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype = torch.float32
    bias: bool = False
    dx: bool = True
    dw: bool = True

    def fields(self) -> tuple[int, int, int, torch.dtype, torch.dtype, bool, bool, bool]:
        """As native code takes it."""
        return (*dataclasses.astuple(self),)  # type: ignore[return-value]


def product_seconds(gpu: Gpu, rows: int, columns: int, depth: int, item: int) -> float:
    waves = [
        math.ceil(math.ceil(rows / a) * math.ceil(columns / b) / gpu.units) * gpu.units * a * b * f
        for a, b, f in ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 1.12))
    ]
    ideal = rows * columns
    work = 2 * depth * max((min(waves) + ideal) / 2, ideal)
    rate = gpu.carrier if item == 2 else gpu.float8
    memory = (item * (rows * depth + depth * columns) + 2 * rows * columns) / gpu.bandwidth
    return max(work / rate + memory / 2, memory) + gpu.launch


def products(layer: Layer) -> list[tuple[int, int, int]]:
    m, k, n = layer.m, layer.k, layer.n
    return [(m, n, k), *([(m, k, n)] * layer.dx), *([(n, k, m)] * layer.dw)]


def carrier(gpu: Gpu, layer: Layer, dtype: torch.dtype) -> tuple[float, int]:
    """Seconds and launches in 16 bits."""
    m, k, n = layer.m, layer.k, layer.n
    passes = []
    if layer.x_dtype != dtype:
        passes += [(layer.x_dtype.itemsize + 2) * m * k] * (1 + layer.dx)
    if layer.weight_dtype != dtype:
        passes += [(layer.weight_dtype.itemsize + 2) * n * k] * (1 + layer.dw)
    if layer.bias and layer.dw:
        passes.append(2 * m * n)
    times = [product_seconds(gpu, *product, item=2) for product in products(layer)]
    times += [size / gpu.bandwidth + gpu.launch for size in passes]
    return sum(times), len(times)


def in_float8(gpu: Gpu, layer: Layer) -> tuple[float, int]:
    """Seconds and launches in fp8."""
    m, k, n = layer.m, layer.k, layer.n
    x, w = layer.x_dtype.itemsize, layer.weight_dtype.itemsize
    passes = [x * m * k, (x + 1 + layer.dw) * m * k, w * n * k, (w + 1 + layer.dx) * n * k]
    if layer.dx or layer.dw:
        passes += [2 * m * n, (2 + layer.dx + layer.dw) * m * n]
    times = [product_seconds(gpu, *product, item=1) for product in products(layer)]
    times += [size / gpu.bandwidth + gpu.launch for size in passes]
    more = (x - 2) * m * k * layer.dx + (w - 2) * n * k * layer.dw
    return sum(times) + more / gpu.bandwidth, len(times)


def gain(gpu: Gpu, layer: Layer, dtype: torch.dtype = torch.bfloat16) -> float:
    (slow, slow_launches), (fast, fast_launches) = carrier(gpu, layer, dtype), in_float8(gpu, layer)
    if 2 * layer.m * layer.k * layer.n < gpu.min_work:
        return min(slow / fast, slow_launches / fast_launches)
    return slow / fast
