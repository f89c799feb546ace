# SPDX-License-Identifier: Apache-2.0
"""The cases of torch's own autocast test lists, one by one."""

from __future__ import annotations

import collections.abc
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from support.torch_testing import torch_testing


class Case(NamedTuple):
    """One row of a list: call ``op`` of ``module`` (or of Tensor) and expect dtype ``out``."""

    list_name: str
    op: str
    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    run_as: torch.dtype
    out: torch.dtype | None

    def call(self) -> list[Any]:
        """Results of the function and of the method of this name, where there are such."""
        results = []
        if self.module is not None and hasattr(self.module, self.op):
            results.append(getattr(self.module, self.op)(*self.args, **self.kwargs))
        if isinstance(self.args[0], torch.Tensor) and hasattr(torch.Tensor, self.op):
            results.append(getattr(self.args[0], self.op)(*self.args[1:], **self.kwargs))
        assert results, f"{self.op} is neither in {self.module} nor a method"
        return results

    def call_by_hand(self) -> Any:
        """What autocast should have done: cast the arguments, call without autocast."""
        args = cast_floating(self.args, self.run_as)
        if self.module is not None and hasattr(self.module, self.op):
            return getattr(self.module, self.op)(*args, **self.kwargs)
        return getattr(args[0], self.op)(*args[1:], **self.kwargs)


def cast_floating(value: Any, to: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(to) if value.is_floating_point() else value
    if isinstance(value, str) or not isinstance(value, collections.abc.Iterable):
        return value
    return type(value)(cast_floating(item, to) for item in value)


def flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from flatten(item)
    else:
        yield value


def same(first: Any, second: Any) -> bool:
    """Equal structure, dtypes and bits; NaN equals NaN."""
    left, right = list(flatten(first)), list(flatten(second))
    return len(left) == len(right) and all(map(_same_leaf, left, right))


def _same_leaf(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    # Equal numbers are equal bits here but for signed zeros, which differ in their sign bit.
    if a.dtype == torch.bool:
        return torch.equal(a, b)
    if a.is_complex():
        return _same_leaf(torch.view_as_real(a), torch.view_as_real(b))
    signs = torch.equal(a.signbit(), b.signbit())
    return signs and torch.allclose(a, b, rtol=0, atol=0, equal_nan=a.is_floating_point())


def cpu_cases(dtype: torch.dtype) -> list[Case]:
    """Every case of the CPU lists for a region of ``dtype``."""
    __tracebackhide__ = True  # a file that is skipped for want of the lists is named, not this one
    torch.manual_seed(0)
    lists = torch_testing("autocast_test_lists").AutocastCPUTestLists(torch.device("cpu"))
    nn = torch._C._nn
    column = 1 if dtype == torch.bfloat16 else 2
    cases = []
    for name, module, run_as in (
        ("torch_16", torch, dtype),
        ("torch_fp32", torch, torch.float32),
        ("nn_16", nn, dtype),
        ("nn_fp32", nn, torch.float32),
    ):
        for op, args, *rest in getattr(lists, name):
            # These arguments are bfloat16 in the list; the region's own dtype is the harder case.
            given = cast_floating(args, dtype) if run_as == torch.float32 else args
            kwargs = rest[0] if rest else {}
            cases.append(Case(name, op, module, given, kwargs, run_as, run_as))
    for row in lists.torch_need_autocast_promote:
        cases.append(Case("promote", row[0], torch, row[column], {}, torch.float32, torch.float32))
    for name, module in (
        ("torch_expect_builtin_promote", torch),
        ("methods_expect_builtin_promote", None),
    ):
        for row in getattr(lists, name):
            cases.append(Case(name, row[0], module, row[column], {}, torch.float32, row[3]))
    return cases


def cuda_cases(dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Every case of the CUDA lists; make it under FakeTensorMode where there is no GPU."""
    __tracebackhide__ = True
    lists = torch_testing("autocast_test_lists").AutocastTestLists(device)
    nn = torch._C._nn
    cases = []
    for name, module, run_as in (
        ("torch_fp16", torch, dtype),
        ("torch_fp32", torch, torch.float32),
        ("nn_fp16", nn, dtype),
        ("nn_fp32", nn, torch.float32),
        ("linalg_fp16", torch._C._linalg, dtype),
        ("methods_fp16", None, dtype),
        ("methods_fp32", None, torch.float32),
        ("torch_need_autocast_promote", torch, torch.float32),
    ):
        for op, args, *rest in getattr(lists, name):
            kwargs = rest[0] if rest and isinstance(rest[0], dict) else {}
            cases.append(Case(name, op, module, args, kwargs, run_as, run_as))
    for name, module in (
        ("torch_expect_builtin_promote", torch),
        ("methods_expect_builtin_promote", None),
    ):
        for op, args, out in getattr(lists, name):
            cases.append(Case(name, op, module, args, {}, torch.float32, out))
    return cases
