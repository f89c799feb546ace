# SPDX-License-Identifier: Apache-2.0
"""Models that hold their weights in the dtype that autocast would cast them to."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parameter import UninitializedParameter

import fastamp._C as _C
from fastamp._float8.recipe import float8_exclude
from fastamp._inference.float8_weights import (
    float8_weights,
    only_in_base_dtype,
    quantize_linears,
)
from fastamp._inference.regions import (
    ModuleRegion,
    add_region,
    edits_of,
    keep_in_fp32,
    region_of,
)
from fastamp._inference.weights import tensors_of, uses_by_forward, uses_by_type
from fastamp._util.aligned_text import aligned, size_text

__all__ = ["Conversion", "ConvertedParameter", "convert"]

_REPORT = "fastamp_conversion"
_IN_FLOAT8 = "in fp8"


@dataclasses.dataclass(frozen=True)
class ConvertedParameter:
    """Result of :func:`fastamp.inference.convert` for one parameter.

    Attributes:
        name: As in ``named_parameters()``; of a shared one, the first of its names.
        shape: Its sizes.
        dtype: What it has now.
        reason: Why that is not the dtype wanted: the op that reads the parameter as it is, ``"not
            used"``, another dtype than float32 to begin with, or, without example inputs, the class
            of a module that has it; else empty.
        bytes_before: Its size as it was.
        bytes_after: Its size now.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    reason: str
    bytes_before: int
    bytes_after: int


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Result of :func:`fastamp.inference.convert`; its ``str`` is a table of it.

    Attributes:
        dtype: The dtype of the converted parameters.
        parameters: In the order of ``named_parameters()``.
    """

    dtype: str
    parameters: tuple[ConvertedParameter, ...]

    @property
    def converted(self) -> tuple[str, ...]:
        """Names of the parameters that were cast."""
        return tuple(row.name for row in self.parameters if not row.reason)

    @property
    def bytes_before(self) -> int:
        """Size of all parameters before, in bytes."""
        return sum(row.bytes_before for row in self.parameters)

    @property
    def bytes_after(self) -> int:
        """Their size now."""
        return sum(row.bytes_after for row in self.parameters)

    @property
    def summary(self) -> str:
        """Returns one line: how many parameters were cast, and what that saves."""
        return (
            f"{len(self.converted)} of {len(self.parameters)} parameters in {self.dtype}: "
            f"{size_text(self.bytes_after)} instead of {size_text(self.bytes_before)}"
        )

    def __str__(self) -> str:
        """A line for each parameter, and the summary."""
        heading = ("Parameter", "Shape", "Dtype", "Stays because of")
        rows = [
            (row.name, "x".join(map(str, row.shape)) or "-", row.dtype, row.reason or "-")
            for row in self.parameters
        ]
        table, rule, *lines = aligned([heading, *rows], (0, 1, 2, 3))
        return "\n".join([table, rule, *lines, rule, self.summary])


def convert(
    model: torch.nn.Module,
    dtype: torch.dtype,
    *,
    lists: str | Mapping[str, str] | None = None,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    fp32: Iterable[str] = (),
    inplace: bool = False,
    verbose: bool = True,
) -> torch.nn.Module:
    """Makes a model for inference that holds its weights in the dtype autocast would cast them to.

    The weights that only ops of policy ``lower`` use are cast once, and their float32 values are
    dropped; all other parameters stay as they are. The model's forward pass runs in a region of its
    own, of ``dtype`` and with the op policies of ``lists``. So its outputs equal, bit for bit,
    those of that region over the float32 model under ``torch.no_grad()``, with half of the memory
    for those weights and without casting them at each call::

        model = fastamp.inference.convert(model.eval(), torch.bfloat16, example_inputs=x)
        y = model(x)

    The model keeps its class, names and hooks; its ``state_dict`` has the new dtypes. What was cast
    is frozen (``requires_grad`` is False), as torch takes other kernels for what is trained.
    Parameters that several modules share stay shared. A parameter that is also read in float32 (an
    embedding that is the head, too), or from which a parametrization computes a weight, stays.
    Buffers stay.
    ``model.fastamp_conversion`` shows what was done with each parameter, as a table if printed.

    With ``lists`` that differ from the device's own, the forward pass opens
    :class:`fastamp.policies.override`, and compiled functions run eagerly in it.

    Args:
        model: In the mode in which it is to run, usually ``eval()``; on one device, CPU or CUDA.
        dtype: ``torch.float16`` or ``torch.bfloat16``; ``torch.float8_e4m3fn`` for linear layers
            in fp8 and all else in bfloat16: see docs/inference.md.
        lists: Whose op lists the model was trained with: ``"cuda"``, ``"cpu"``, or policies by op
            as for :class:`fastamp.policies.override`, for ops that differ from those of the model's
            device. By default those of its device.
        example_inputs: A tuple of the arguments of a forward pass, or its one argument. The model
            runs on them without values (or as it is, if its control flow depends on values), and
            what reads each parameter is seen. Without them the classes of the modules decide:
            parameters of ``nn.Linear`` and convolutions that no other module has are cast.
        example_kwargs: Its arguments by name.
        fp32: Names of modules, with wildcards as for ``fnmatch``, that run without autocast, on
            arguments cast to float32.
        inplace: Convert ``model`` itself: its parameters stay the same objects, without gradients.
            By default a copy is made, which takes the memory of the result only.
        verbose: Print the summary.

    Returns:
        The converted copy, or ``model``.

    Raises:
        TypeError: An argument has another type; the model is scripted, cannot be copied, has a
            ``forward`` of its own beside its class's, or a parameter that is no plain tensor.
        ValueError: ``dtype``, ``lists`` or ``fp32`` names what there is not; the model is converted
            already, has no parameters or has them on several devices; or it computes something
            else when its weights have another dtype.
        RuntimeError: The model cannot run with the example inputs; kernels are not registered.
            The model is not changed then, nor by any other error.
    """
    check_arguments("convert", model, dtype, verbose=verbose, inplace=inplace)
    if region_of(model) is not None:
        raise ValueError("convert: expected a model that is not converted yet, got one that is")
    float8 = dtype == torch.float8_e4m3fn
    region = ModuleRegion(device_of("convert", model), torch.bfloat16 if float8 else dtype)
    region.edits = edits_of("convert", lists, region.device)
    region.float8 = float8
    example = example_of("convert", example_inputs, example_kwargs)
    converted = convert_for("convert", model, region, example, fp32, inplace=inplace)
    if verbose:
        print(f"convert: {vars(converted)[_REPORT].summary}")
    return converted


def check_arguments(
    function: str, model: Any, dtype: Any, *, dtypes: str = "", **flags: Any
) -> None:
    """Refuses arguments of wrong types, and dtypes that no region has."""
    checks: list[tuple[str, Any, Any, str]]
    checks = [("model", model, torch.nn.Module, "a torch.nn.Module")]
    checks.append(("dtype", dtype, torch.dtype, "a torch.dtype"))
    checks += [(name, value, bool, "a bool") for name, value in flags.items()]
    for name, value, kind, wanted in checks:
        if not isinstance(value, kind):
            got = type(value).__name__
            raise TypeError(f"{function}: expected {name} to be {wanted}, got {got}")
    lower = [torch.float16, torch.bfloat16] + ([] if dtypes else [torch.float8_e4m3fn])
    if dtype not in lower:
        names = dtypes or "float16, bfloat16 or float8_e4m3fn"
        raise ValueError(f"{function}: expected dtype to be {names}, got {_name_of(dtype)}")
    if not _C.kernels_registered():
        raise RuntimeError(
            f"{function}: expected fastamp's kernels to be registered, got FASTAMP_NO_REGISTER"
        )


def device_of(function: str, model: torch.nn.Module) -> str:
    """The device type of a model.

    Raises:
        ValueError: It has no parameters, is on several devices or on one without op lists.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if not devices:
        raise ValueError(f"{function}: expected a model with parameters, got none")
    if len(devices) > 1:
        some = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"{function}: expected a model on one device, got one on {some}")
    (device,) = devices
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{function}: expected a model on CPU or CUDA, got one on {device.type}")
    return device.type


Example = tuple[tuple[Any, ...], dict[str, Any]]


def example_of(function: str, inputs: Any, kwargs: Any) -> Example | None:
    """The arguments of a forward pass, or None.

    Raises:
        TypeError: ``kwargs`` is no mapping.
    """
    if kwargs is not None and not isinstance(kwargs, Mapping):
        got = type(kwargs).__name__
        raise TypeError(f"{function}: expected example_kwargs to be a mapping, got {got}")
    if inputs is None and kwargs is None:
        return None
    args = () if inputs is None else inputs if isinstance(inputs, tuple) else (inputs,)
    return args, dict(kwargs or {})


def convert_for(
    function: str,
    model: torch.nn.Module,
    region: ModuleRegion,
    example: Example | None,
    fp32: Iterable[str],
    *,
    inplace: bool,
    buffers: bool = False,
) -> torch.nn.Module:
    """Does what :func:`convert` says; with ``buffers`` it casts those, too, that qualify."""
    planned = _planned(function, model, region, example, fp32, buffers)
    tensors = tensors_of(model, buffers)
    before = {name: tensor.nbytes for name, tensor in model.named_parameters()}
    in_float8 = [name for name, reason in planned.items() if reason == _IN_FLOAT8]
    chosen = {name: tensors[name] for name, reason in planned.items() if not reason}
    casts = _casts_of(chosen, region.dtype)
    result = model if inplace else _copied(function, model, tensors, casts)
    keep_in_fp32(function, result, fp32)
    add_region(function, result, region)
    if inplace:
        with torch.no_grad():
            for name, cast in casts.items():
                _give(tensors[name], cast)
    now = dict(result.named_parameters())
    excluded = [now[n] for n in before if _C.is_excluded_from_float8(tensors[n])]
    if region.float8 and excluded and not inplace:
        float8_exclude(excluded)
    sizes = quantize_linears(result, in_float8, now)
    vars(result)[_REPORT] = Conversion(
        "float8_e4m3fn" if region.float8 else _name_of(region.dtype),
        tuple(
            ConvertedParameter(
                name,
                tuple(now[name].shape),
                "float8_e4m3fn" if name in sizes else _name_of(now[name].dtype),
                "" if name in sizes else planned[name],
                before[name],
                sizes.get(name, now[name].nbytes),
            )
            for name in before
        ),
    )
    return result


def _planned(
    function: str,
    model: torch.nn.Module,
    region: ModuleRegion,
    example: Example | None,
    fp32: Iterable[str],
    buffers: bool,
) -> dict[str, str]:
    """Why tensors stay as they are, by their names; empty for those to be cast."""
    tensors = tensors_of(model, buffers)
    for name, tensor in tensors.items():
        if isinstance(tensor, UninitializedParameter):
            raise TypeError(
                f"{function}: expected initialized parameters, got {name}, which is not"
            )
    skeleton = _skeleton(function, model, fp32)
    if example is None:
        uses = uses_by_type(skeleton, region.device)
    else:
        uses = uses_by_forward(function, skeleton, region, *example, buffers)
    reasons = {name: use.reason for name, use in uses.items()}
    for name, tensor in tensors.items():
        reasons.setdefault(name, "buffer")
        if tensor.dtype != torch.float32:
            reasons[name] = _name_of(tensor.dtype)
    return _with_float8(model, tensors, reasons) if region.float8 else reasons


def _with_float8(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], reasons: dict[str, str]
) -> dict[str, str]:
    """The reasons of an fp8 region: most of what it multiplies in the base dtype stays float32."""
    fp8, base_dtype = float8_weights(model), only_in_base_dtype(model)
    for name, reason in reasons.items():
        if not reason and id(tensors[name]) in fp8:
            reasons[name] = _IN_FLOAT8
        elif not reason and id(tensors[name]) not in base_dtype:
            reasons[name] = "may be in fp8"
    return reasons


def _skeleton(function: str, model: torch.nn.Module, fp32: Iterable[str]) -> torch.nn.Module:
    """The model as it will run but for its own region; shares all tensors with it."""
    if not fp32:
        return model
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    skeleton = _deepcopy(function, model, memo)
    keep_in_fp32(function, skeleton, fp32)
    return skeleton


def _casts_of(chosen: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Makes one cast for tensors that are the same memory, so that they share memory again."""
    made: dict[Any, torch.Tensor] = {}
    casts = {}
    for name, tensor in chosen.items():
        key = (
            tensor.untyped_storage()._cdata,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
        if key not in made:
            made[key] = tensor.detach().to(dtype)
        casts[name] = made[key]
    return casts


def _copied(
    function: str,
    model: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    casts: Mapping[str, torch.Tensor],
) -> torch.nn.Module:
    """A copy of the model with the casts in it; no float32 copy of what is cast is ever made."""
    memo: dict[int, Any] = {}
    for name, cast in casts.items():
        tensor = tensors[name]
        made = cast
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(cast, requires_grad=False)
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            vars(made).update(vars(tensor))  # attributes that users gave it
        memo[id(tensor)] = made
    return _deepcopy(function, model, memo)


def _deepcopy(function: str, model: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    try:
        copied: torch.nn.Module = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise TypeError(
            f"{function}: expected a model that copy.deepcopy can copy (or inplace=True), "
            f"got {type(error).__name__}: {error}"
        ) from error
    return copied


def _give(tensor: torch.Tensor, cast: torch.Tensor) -> None:
    """Replaces a tensor's values by their cast; it stays the same object for all who have it."""
    tensor.grad = None
    tensor.requires_grad_(False)
    tensor.data = cast


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
