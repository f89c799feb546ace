# SPDX-License-Identifier: Apache-2.0
"""Prints, as JSON, which dtypes each autocast kernel of this process hands to its op.

A recorder is registered on the key below autocast (AutogradCPU, AutogradCUDA) for every op, so that
no op runs and the arguments need only fit the schema: argument dtypes alone decide what autocast
does. Run as a program, because the recorders stay for the life of the process. ``FASTAMP_PROBE=1``
imports fastamp first.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import warnings
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# Dtypes of the tensor arguments in turn, repeated as often as the op has arguments.
MIXES: dict[str, tuple[torch.dtype, ...]] = {
    "fp32": (FP32,),
    "bf16": (BF16,),
    "fp16": (FP16,),
    "fp64": (FP64,),
    "int": (torch.int64,),
    "fp32,bf16": (FP32, BF16),
    "bf16,fp32": (BF16, FP32),
    "fp16,bf16": (FP16, BF16),
    "fp64,fp32": (FP64, FP32),
    "int,fp16": (torch.int64, FP16),
    "bf16 and a dtype argument": (BF16,),
    "fp8,fp32": (torch.float8_e5m2, FP32),
    "complex,fp32": (torch.complex64, FP32),
}


class Recorded(Exception):  # noqa: N818  (carries an answer, not an error)
    pass


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch.")
    if isinstance(value, torch.dtype):
        return f"dtype={value}"
    if isinstance(value, (list, tuple)):
        return [_describe(item) for item in value]
    return "-"


def _recorder(*args: Any, **kwargs: Any) -> None:
    raise Recorded(json.dumps([_describe(args), {k: _describe(v) for k, v in kwargs.items()}]))


def _make_value(type_name: str, next_tensor: Any) -> Any:
    if type_name in ("Tensor", "Optional[Tensor]"):
        return next_tensor()
    if type_name in ("List[Tensor]", "List[Optional[Tensor]]"):
        return [next_tensor(), next_tensor()]
    if type_name.startswith("Optional["):
        return None
    scalars = {"bool": True, "float": 0.5, "str": "nuc", "number": 2, "Scalar": 2, "int": 1}
    if type_name in scalars:
        return scalars[type_name]
    if type_name.startswith("List["):
        return [1, 1]
    raise TypeError(type_name)


def _arguments(
    op: Any, next_tensor: Any, dtype: torch.dtype | None
) -> tuple[list[Any], dict[str, Any]]:
    positional, named = [], {}
    for argument in op._schema.arguments:
        type_name = str(argument.type)
        if op._overloadname.lower().find("dim") >= 0 and "str" in type_name:
            value: Any = ["dimname::N"] if "List" in type_name else "dimname::N"
        elif argument.name == "dtype":
            value = dtype
        elif type_name == "int" and argument.name in ("dim", "reduction"):
            value = 0
        else:
            value = _make_value(type_name, next_tensor)
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    return positional, named


def _probe_op(op: Any, device: str, mix: str) -> Any:
    dtypes = itertools.cycle(MIXES[mix])

    def next_tensor() -> torch.Tensor:
        dtype = next(dtypes)
        if device == "cpu":
            return torch.ones(2, dtype=dtype)
        on_meta = torch.empty(2, dtype=dtype, device="meta")
        return FakeTensor(_fake_mode, on_meta, torch.device("cuda:0"))

    try:
        positional, named = _arguments(op, next_tensor, FP16 if "argument" in mix else None)
        op(*positional, **named)
    except Recorded as seen:
        return json.loads(str(seen))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:60]}"
    return "ran"


_fake_mode = FakeTensorMode()


def registered(device: str) -> list[str]:
    key = f"Autocast{device.upper()}"
    return sorted(torch._C._dispatch_get_registrations_for_dispatch_key(key))


def probe(names: list[str], device: str, region_dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, region_dtype)
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        base, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        results[name] = {mix: _probe_op(op, device, mix) for mix in MIXES}
    torch.set_autocast_enabled(device, False)
    return results


def main() -> None:
    warnings.simplefilter("ignore")
    names = {device: registered(device) for device in ("cpu", "cuda")}
    if os.environ.get("FASTAMP_PROBE") == "1":
        import fastamp  # noqa: F401
    registered_now = {device: registered(device) for device in ("cpu", "cuda")}
    libraries = []
    for device in ("cpu", "cuda"):
        library = torch.library.Library("aten", "IMPL")
        for name in names[device]:
            library.impl(name.removeprefix("aten::"), _recorder, f"Autograd{device.upper()}")
        # norm's kernels call another overload than their own.
        for overload in ("ScalarOpt_dtype", "ScalarOpt_dim_dtype", "names_ScalarOpt_dim_dtype"):
            library.impl(f"norm.{overload}", _recorder, f"Autograd{device.upper()}")
        libraries.append(library)
    # _cudnn_rnn repacks its weights for cuDNN before it calls the op, which takes a GPU.
    probed = {
        device: [name for name in names[device] if name != "aten::_cudnn_rnn"]
        for device in ("cpu", "cuda")
    }
    answers = {
        f"{device} {dtype}": probe(probed[device], device, getattr(torch, dtype))
        for device in ("cpu", "cuda")
        for dtype in ("bfloat16", "float16")
    }
    sys.stdout.write(json.dumps({"names": names, "registered": registered_now, "probes": answers}))


if __name__ == "__main__":
    main()
