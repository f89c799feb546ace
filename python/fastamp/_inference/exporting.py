# SPDX-License-Identifier: Apache-2.0
"""Programs for other runtimes in the precision of an autocast region."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from fastamp._inference import formats
from fastamp._inference.conversion import (
    Conversion,
    Example,
    check_arguments,
    convert_for,
    device_of,
    example_of,
)
from fastamp._inference.regions import ModuleRegion, edits_of, region_of, set_region
from fastamp._inference.strong_types import (
    GraphTypes,
    check_types,
    fold_constant_casts,
    make_casts_explicit,
    policies_in_force,
    remove_needless_casts,
)
from fastamp._inference.torch_output import TorchOutput
from fastamp._inference.weights import reads_of

__all__ = ["Exported", "export"]

FORMATS = ("ep", "onnx", "aoti")


@dataclasses.dataclass(frozen=True)
class Exported:
    """Result of :func:`fastamp.inference.export`; its ``str`` is what export prints.

    Attributes:
        program: The ``torch.export.ExportedProgram``: torch's ops alone, no regions.
        format: ``"ep"``, ``"onnx"`` or ``"aoti"``.
        path: The file that was written, if any.
        onnx: The ``torch.onnx.ONNXProgram`` of format ``"onnx"``.
        conversion: What was done with the parameters.
        types: What was proved of the graph.
        checks: What else was checked, a sentence each.
    """

    program: torch.export.ExportedProgram
    format: str
    path: Path | None
    onnx: Any
    conversion: Conversion
    types: GraphTypes
    checks: tuple[str, ...]

    def __str__(self) -> str:
        """Returns what is known of it, a line each."""
        lines = [self.conversion.summary, *str(self.types).splitlines(), *self.checks]
        if self.path is not None:
            lines.append(f"wrote {self.path}")
        return "\n".join(lines)


def export(
    model: torch.nn.Module,
    args: Any,
    dtype: torch.dtype,
    *,
    lists: str | Mapping[str, str] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    path: str | os.PathLike[str] | None = None,
    format: str = "ep",
    keep_io_types: bool = True,
    fp32: Iterable[str] = (),
    dynamic_shapes: Any = None,
    tolerance: float | None = None,
    overwrite: bool = False,
    verbose: bool = True,
) -> Exported:
    """Exports a model in the very precision in which autocast runs it, all of it in the graph.

    Converts a copy of the model (:func:`fastamp.inference.convert`), exports it with
    ``torch.export``, not strict, and decomposes it in a region, so that each cast of the region is
    an op of the graph; removes needless casts; and proves that the graph is strongly typed: each op
    of policy ``lower`` gets operands of ``dtype`` alone (or of float32 alone, where a region is
    off), each of policy ``fp32`` float32, each of ``promote`` one dtype. The program needs neither
    fastamp nor a region: do not run it in one. ::

        fastamp.inference.export(
            model, (x,), torch.float16, lists="cuda", path="model.onnx", format="onnx"
        )

    The model may be on a GPU that is not there, with fake tensors.

    Args:
        model: In ``eval()`` mode; also one that :func:`fastamp.inference.convert` made, whose
            ``lists``, ``fp32`` and dtype then count.
        args: A tuple of the arguments of a forward pass, or its one argument.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        lists: Whose op lists the model was trained with, as for
            :func:`fastamp.inference.convert`. ONNX has no op for what torch's CPU lists do with
            norms: name ``"cuda"`` there.
        kwargs: Arguments by name.
        path: A file to write, which must not be there yet unless ``overwrite``: ``.pt2`` for the
            formats ``"ep"`` and ``"aoti"``, ``.onnx`` for ``"onnx"`` (weights of 2 GB and more lie
            beside it, in ``.onnx.data``). ``"aoti"`` needs one.
        format: ``"ep"``, a ``torch.export.ExportedProgram``; ``"onnx"``, which needs the packages
            of the ``export`` extra: the model passes ``onnx.checker`` and is compared with the
            program in onnxruntime where that has kernels; ``"aoti"``, an AOTInductor package.
        keep_io_types: Take and return the float32 tensors that the float32 model would. Else inputs
            that the region casts at once are taken in ``dtype``, and outputs returned as they are.
        fp32: Names of modules that run in float32, as for :func:`fastamp.inference.convert`.
        dynamic_shapes: As for ``torch.export.export``.
        tolerance: How far the results of onnxruntime, or of the AOTInductor package, may be from
            the program's on the example inputs: the largest difference of an output's elements
            divided by its largest magnitude. Both compute the same graph in the same dtypes, but
            their kernels round elsewhere and sum in another order, which grows with the depth of
            the model. None: 16 units of the dtype, 0.0078 in float16 and 0.0625 in bfloat16; more
            than a few times that is a wrong model.
        overwrite: Replace what is at ``path``, when the new file is complete and checked.
        verbose: Print what was done.

    Raises:
        TypeError: An argument has another type.
        ValueError: ``format``, ``lists``, ``fp32`` or ``dtype`` names what there is not; the model
            is in training mode; ``tolerance`` is negative or not finite.
        FileExistsError: There is something at ``path``.
        OSError: ``path`` cannot be written.
        ImportError: A package of the ``export`` extra is missing.
        RuntimeError: The model cannot be exported; torch's reason is in the message. Or the graph
            is not strongly typed, or not what ONNX allows. Whatever is raised, nothing is written.
    """
    check_arguments(
        "export",
        model,
        dtype,
        dtypes="float16 or bfloat16",
        keep_io_types=keep_io_types,
        overwrite=overwrite,
        verbose=verbose,
    )
    formats.check_tolerance(tolerance)
    if format not in FORMATS:
        raise ValueError(f"export: expected format to be one of {FORMATS}, got {format!r}")
    target = formats.checked_path(format, path, overwrite)
    formats.check_packages(format)
    example = example_of("export", args, kwargs)
    if example is None:
        raise TypeError("export: expected args, the arguments of a forward pass, got None")
    _check_mode(model)
    converted, region = _converted(model, dtype, lists, example, fp32)
    region.upcast_outputs = keep_io_types
    if not keep_io_types:
        example = _lower_inputs(converted, region, example)
    program, types = _program(converted, region, example, dynamic_shapes)
    onnx, checks = formats.write(format, program, target, example, types, tolerance)
    conversion = vars(converted)["fastamp_conversion"]
    done = Exported(program, format, target, onnx, conversion, types, checks)
    if verbose:
        print("\n".join(f"export: {line}" for line in str(done).splitlines()))
    return done


def _check_mode(model: torch.nn.Module) -> None:
    """Refuses a model that would train: its dropout, and statistics that are outputs then.

    Graphs have their mode in them, whatever their attribute says.
    """
    training = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if module.training and not isinstance(module, torch.fx.GraphModule)
    ]
    if training:
        more = f" and {len(training) - 1} more modules" if len(training) > 1 else ""
        raise ValueError(
            f"export: expected a model in eval mode, got training mode in {training[0]}{more}: "
            "call model.eval() first"
        )


def _converted(
    model: torch.nn.Module,
    dtype: torch.dtype,
    lists: str | Mapping[str, str] | None,
    example: Example,
    fp32: Iterable[str],
) -> tuple[torch.nn.Module, ModuleRegion]:
    """A converted model and its region, which the caller may change."""
    given = region_of(model)
    if given is None:
        region = ModuleRegion(device_of("export", model), dtype)
        region.edits = edits_of("export", lists, region.device)
        made = convert_for("export", model, region, example, fp32, inplace=False, buffers=True)
        return made, region
    if given.dtype != dtype or given.float8 or lists is not None or list(fp32):
        raise ValueError(
            "export: expected a converted model with its own 16-bit dtype, and neither lists nor "
            f"fp32 beside it, got a model of {given.dtype}, dtype={dtype}, lists={lists!r}, "
            f"fp32={fp32!r}"
        )
    region = dataclasses.replace(given)  # the exporter's own: the model may be running meanwhile
    alias = copy.copy(model)
    set_region(alias, region)
    return alias, region


def _lower_inputs(model: torch.nn.Module, region: ModuleRegion, example: Example) -> Example:
    """The example with those float32 tensors in the region's dtype that are only read in it."""
    casts = reads_of("export", model, region, example)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(region.dtype) if id(tensor) in casts else tensor

    from torch.utils._pytree import tree_map_only

    lowered: Example = tree_map_only(torch.Tensor, cast, example)
    return lowered


def _program(
    model: torch.nn.Module, region: ModuleRegion, example: Example, dynamic_shapes: Any
) -> tuple[torch.export.ExportedProgram, GraphTypes]:
    args, kwargs = example
    output = TorchOutput()
    try:
        with output.kept(), region.surround(), torch.no_grad():
            program = torch.export.export(
                model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False
            )
            # No decompositions: what is left to do is to write casts in the place of regions.
            program = program.run_decompositions({})
            policies = policies_in_force(region.device)
    except Exception as error:
        raise RuntimeError(
            f"export: expected a model that torch.export can export, got {type(error).__name__} "
            f"while tracing {type(model).__name__}: {output.reason(error)}"
        ) from error
    make_casts_explicit(program)
    remove_needless_casts(program)
    fold_constant_casts(program)
    types = check_types(program, region.dtype, policies)
    return program, types
