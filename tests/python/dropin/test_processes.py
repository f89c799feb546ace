# SPDX-License-Identifier: Apache-2.0
"""Threads, forked and spawned workers while fastamp is installed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import fastamp
import fastamp._C as _C
from support.autocast_state import torch_state
from support.children import check_python


class Products(Dataset[Any]):
    """Each item is computed in a region, in the worker."""

    def __init__(self, region: Any) -> None:
        self.region = region

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x = torch.full((2, 2), float(index))
        with self.region:
            y = torch.mm(x, x)
        return y, int(fastamp.is_installed())


def products(context: str | None, workers: int) -> list[Any]:
    dataset = Products(torch.autocast("cpu"))
    loader = DataLoader(dataset, num_workers=workers, multiprocessing_context=context)
    return list(loader)


@pytest.mark.usefixtures("installed")
def test_forked_workers_are_installed_too():
    with torch.autocast("cpu", dtype=torch.float16):  # the workers start here
        expected = products(None, 0)
        got = products("fork", 2)
    for (own, flag), (torchs, _) in zip(got, expected, strict=True):
        assert own.dtype == torch.float16
        assert torch.equal(own, torchs)
        assert flag.item() == 1


SPAWN = """
import fastamp
from dropin.test_processes import products
if __name__ == "__main__":
    fastamp.install()
    for (own, flag), (torchs, _) in zip(products("spawn", 1), products(None, 0), strict=True):
        assert own.dtype == torchs.dtype and own.equal(torchs)
        print(flag.item(), end="")
"""


def test_spawned_workers_are_installed_too(tmp_path: Any):
    script = tmp_path / "main.py"
    script.write_text(SPAWN)
    assert check_python(str(script)) == "111111"


@pytest.mark.usefixtures("installed")
def test_threads_have_regions_of_their_own():
    shared = torch.autocast("cpu", dtype=torch.float16)

    def work(index: int) -> bool:
        before = torch_state()
        x = torch.ones(2, 2)
        for _ in range(50):
            with shared, torch.autocast("cpu", enabled=index % 2 == 0):
                expected = torch.float16 if index % 2 == 0 else torch.float32
                if torch.mm(x, x).dtype != expected:
                    return False
        return torch_state() == before

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(16)))
    assert _C.open_torch_regions() == 0


def test_install_and_uninstall_from_many_threads_leave_one_state():
    def work(index: int) -> None:
        (fastamp.install if index % 2 else fastamp.uninstall)()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(200)))
    fastamp.install()
    with torch.autocast("cpu"):
        assert _C.open_torch_regions() == 1


@pytest.mark.parametrize("calls", ["", "fastamp.install()"])
def test_backward_threads_see_the_region(calls: str):
    code = f"""
import torch, fastamp
{calls}
seen = []
class Op(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x):
        return x * 2
    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        return g * 2
x = torch.ones(2, requires_grad=True)
with torch.autocast("cpu", dtype=torch.float16):
    y = Op.apply(x)
y.sum().backward()
print(seen)
"""
    assert check_python("-c", code).strip() == "[torch.float16]"
