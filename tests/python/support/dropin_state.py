# SPDX-License-Identifier: Apache-2.0
"""Every object that installing may touch, to compare before and after."""

from __future__ import annotations

import multiprocessing.spawn
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # changes torch when it is loaded
import torch.distributed.fsdp.sharded_grad_scaler
import torch.nn.utils.clip_grad

CLASSES: list[type] = [
    torch.amp.autocast_mode.autocast,
    torch.amp.grad_scaler.GradScaler,
    torch.cuda.amp.autocast_mode.autocast,
    torch.cuda.amp.grad_scaler.GradScaler,
    torch.cpu.amp.autocast_mode.autocast,
    torch.cpu.amp.grad_scaler.GradScaler,
    torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler,
]
MODULES: list[ModuleType] = [
    multiprocessing.spawn,
    torch,
    torch.amp,
    torch.amp.autocast_mode,
    torch.amp.grad_scaler,
    torch.cuda,
    torch.cuda.amp,
    torch.cuda.amp.autocast_mode,
    torch.cuda.amp.grad_scaler,
    torch.cpu,
    torch.cpu.amp,
    torch.nn,
    torch.nn.utils,
    torch.nn.utils.clip_grad,
]


#: What Python makes when somebody asks for it.
_MADE_LATE = (
    "__slotnames__",
    "__warningregistry__",
    "__annotations__",
    "__annotations_cache__",
    "__annotate_func__",
)

#: What torch notes of CUDA when it starts, which any test may make it do where there is a device.
_CUDA_STARTED = {
    ("torch.cuda", name)
    for name in (
        "_cached_device_count",
        "_get_device_properties",
        "_initialized",
        "_queued_calls",
        "default_generators",
    )
}


def use_cuda_once(test: Any) -> None:
    """Has CUDA initialised before a test that is marked as using it: that changes torch.cuda.

    Not before others, which may fork.
    """
    if test.get_closest_marker("cuda") is not None and torch.cuda.is_available():
        torch.cuda.init()
        torch.cuda.device_count()  # which keeps it from then on


def dropin_objects() -> dict[tuple[str, str], Any]:
    """The attributes of those classes and modules, and the code of the functions among them."""
    objects: dict[tuple[str, str], Any] = {}
    for owner in (*CLASSES, *MODULES):
        label = f"{getattr(owner, '__module__', '')}.{owner.__name__}"
        for name, value in list(vars(owner).items()):
            # torch imports some of its submodules when they are first used.
            if isinstance(owner, ModuleType) and isinstance(value, ModuleType):
                continue
            if name in _MADE_LATE:
                continue
            objects[label, name] = value
            code = getattr(value, "__code__", None)
            if code is not None:
                objects[label, f"{name}.__code__"] = code
    for cls in CLASSES:
        objects[cls.__module__ + "." + cls.__name__, "class"] = type(cls)
    return objects


def changed_objects(
    before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]
) -> list[tuple[str, str]]:
    """Names of the attributes that are other objects, that are gone, or that are new."""
    absent = object()
    names = [*before, *(name for name in after if name not in before)]
    changed = [name for name in names if before.get(name, absent) is not after.get(name, absent)]
    return [name for name in changed if (name[0].lstrip("."), name[1]) not in _CUDA_STARTED]


def dispatch_state() -> tuple[Any, ...]:
    """The registered autocast kernels, and the dispatch keys in force on this thread."""
    keys = ("AutocastCPU", "AutocastCUDA")
    return (
        *(tuple(torch._C._dispatch_get_registrations_for_dispatch_key(key)) for key in keys),
        str(torch._C._dispatch_tls_local_include_set()),
        str(torch._C._dispatch_tls_local_exclude_set()),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
    )
