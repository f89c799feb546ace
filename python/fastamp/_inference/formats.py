# SPDX-License-Identifier: Apache-2.0
"""Files of exported programs: written whole or not at all, and checked."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from fastamp._inference.strong_types import GraphTypes
from fastamp._inference.torch_output import TorchOutput

__all__ = ["check_packages", "check_tolerance", "checked_path", "write"]

_SUFFIXES = {"ep": ".pt2", "aoti": ".pt2", "onnx": ".onnx"}
_PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime")}

#: What onnxruntime's results may differ by from the program's, relative to its largest magnitude.
#: float16 has 11 bits, and the kernels of both round where they like: 16 of its last digits.
#: bfloat16 has three bits less.
ONNX_BOUND = 16 * 2.0**-11
# The least magnitude that results are held against.
_TINY = torch.finfo(torch.float32).tiny


def checked_path(
    format: str, path: str | os.PathLike[str] | None, overwrite: bool = False
) -> Path | None:
    """The file to write.

    Raises:
        TypeError: ``path`` is no path.
        ValueError: The format needs one, or has another suffix.
        FileExistsError: There is something.
        OSError: Its folder is not there, or cannot be written.
    """
    if path is None:
        if format == "aoti":
            raise ValueError("export: expected a path for format 'aoti', got None")
        return None
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"export: expected path to be a path, got {type(path).__name__}")
    target = Path(path).absolute()
    if target.suffix != _SUFFIXES[format]:
        raise ValueError(
            f"export: expected a path that ends in {_SUFFIXES[format]} for format {format!r}, "
            f"got {str(path)!r}"
        )
    if os.path.lexists(target) and not (overwrite and target.is_file()):
        what = "a path of a file" if overwrite else "a path where nothing is yet"
        hint = "" if overwrite else "; overwrite=True (--overwrite) replaces a file"
        raise FileExistsError(f"export: expected {what}, got {str(path)!r}{hint}")
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"export: expected a path in a folder that is there, got {str(path)!r}"
        )
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise PermissionError(
            f"export: expected a path in a folder that can be written, got {str(path)!r}"
        )
    return target


def check_tolerance(tolerance: Any) -> None:
    """Refuses what is no bound of a difference.

    Raises:
        TypeError: It is no number, nor None.
        ValueError: It is negative or not finite.
    """
    if tolerance is None:
        return
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)):
        raise TypeError(
            f"export: expected tolerance to be a number or None, got {type(tolerance).__name__}"
        )
    if not 0 <= tolerance <= sys.float_info.max:
        raise ValueError(
            f"export: expected tolerance to be 0 or more and finite, got {tolerance!r:.40}"
        )


def check_packages(format: str) -> None:
    """Refuses a format whose packages are missing.

    Raises:
        ImportError: It names them.
    """
    missing = [name for name in _PACKAGES.get(format, ()) if not importlib.util.find_spec(name)]
    if missing:
        raise ImportError(
            f"export: expected the packages of fastamp's extra 'export' for format {format!r}, "
            f"got none of the name {' or '.join(missing)}"
        )


@contextlib.contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """A path to write to; what is there in the end moves to the target, after an error nothing."""
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder / target.name
        # What lies beside the file goes first: a file that is there is complete.
        parts = sorted(folder.iterdir(), key=lambda part: part.name == target.name)
        for part in parts:
            part.replace(target.parent / part.name)
        if target.suffix == ".onnx" and len(parts) == 1:
            # Weights of a file that was there before.
            target.with_name(f"{target.name}.data").unlink(missing_ok=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write(
    format: str,
    program: torch.export.ExportedProgram,
    target: Path | None,
    example: tuple[tuple[Any, ...], dict[str, Any]],
    types: GraphTypes,
    tolerance: float | None = None,
) -> tuple[Any, tuple[str, ...]]:
    """Writes a program in a format and checks what was written.

    Returns:
        The ``torch.onnx.ONNXProgram`` or None, and what was checked, or cannot be.

    Raises:
        RuntimeError: The format cannot hold the program, or its runtime computes something else.
    """
    writers: dict[str, Callable[..., tuple[Any, tuple[str, ...]]]] = {
        "ep": _write_program,
        "onnx": _write_onnx,
        "aoti": _write_package,
    }
    made, checks = writers[format](program, target, example, types, tolerance)
    random = _random_ops(program)
    if random:
        checks += (
            f"the graph draws random numbers, which no runtime repeats: {', '.join(random)}; "
            "dropout by a function needs training=self.training",
        )
    return made, checks


def _random_ops(program: torch.export.ExportedProgram) -> list[str]:
    """The ops of a graph that draw random numbers, by name."""
    return sorted({str(n.target) for n in program.graph.nodes if _draws(n)})


def _draws(node: torch.fx.Node) -> bool:
    """Whether an op draws random numbers: dropout and what contains it only if it is on."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    schema: Any = getattr(node.target, "_schema", None)
    given = {each.name: each.default_value for each in schema.arguments}
    given |= dict(zip((each.name for each in schema.arguments), node.args, strict=False))
    given |= node.kwargs
    switches = ("train", "training", "dropout", "dropout_p")
    return all(given[name] for name in switches if name in given)


def _write_program(program: Any, target: Path | None, *_: Any) -> tuple[Any, tuple[str, ...]]:
    if target is not None:
        with _whole(target) as file:
            torch.export.save(program, file)
    return None, ()


def _write_package(
    program: Any, target: Path | None, example: Any, _: Any, tolerance: float | None
) -> tuple[Any, tuple[str, ...]]:
    assert target is not None
    with _whole(target) as file:
        output = TorchOutput()
        try:
            with output.kept():
                torch._inductor.aoti_compile_and_package(program, package_path=str(file))
        except Exception as error:
            raise RuntimeError(
                f"export: expected a program that AOTInductor can compile, got "
                f"{type(error).__name__}: {output.reason(error)}"
            ) from error
        checks: tuple[str, ...] = ()
        if not _needs_gpu(example):
            runner: Any = torch._inductor.aoti_load_package(str(file))
            checks = (_compared("the package", runner, program, example, tolerance),)
    return None, checks


def _needs_gpu(example: Any) -> bool:
    flat, _ = tree_flatten(example)
    return any(
        isinstance(value, torch.Tensor) and (value.is_cuda or _is_fake(value)) for value in flat
    )


def _is_fake(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def _compared(
    what: str, runner: Any, program: Any, example: Any, tolerance: float | None = None
) -> str:
    """Distance of a runtime's results from those of the program.

    Raises:
        RuntimeError: Farther than the bound.
    """
    if _random_ops(program):
        return f"{what} was not compared with the program"
    args, kwargs = example
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        wanted, _ = tree_flatten(program.module()(*args, **kwargs))
        found, _ = tree_flatten(runner(*args, **kwargs))
    errors = [
        _error(one.double(), torch.as_tensor(other).double())
        for one, other in zip(wanted, found, strict=True)
        if isinstance(one, torch.Tensor) and one.is_floating_point() and one.numel()
    ]
    worst = max(errors, key=lambda error: (math.isnan(error), error), default=0.0)
    is_bfloat16 = any(
        isinstance(t, torch.Tensor) and t.dtype == torch.bfloat16
        for t in program.state_dict.values()
    )
    bound = ONNX_BOUND * (8 if is_bfloat16 else 1) if tolerance is None else tolerance
    if not worst <= bound:
        raise RuntimeError(
            f"export: expected {what} to compute what the program does within {bound:.2g} of the "
            f"largest magnitude, got {worst:.2g}: their kernels round and add up in another order, "
            "which grows with the depth of a model; tolerance= (--tolerance) accepts more"
        )
    if not any(isinstance(one, torch.Tensor) and one.isfinite().any() for one in wanted):
        return f"{what} runs, but no result of the example is a finite number to compare"
    return f"{what} agrees with the program within {worst:.2g} of the largest magnitude"


def _error(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """The largest difference, relative to the largest finite magnitude; NaN where one is NaN."""
    finite = wanted[wanted.isfinite()]
    largest = max(finite.abs().max().item() if finite.numel() else 0.0, _TINY)
    same = (wanted == found) | (wanted.isnan() & found.isnan())
    return (wanted - found).abs().masked_fill(same, 0).max().item() / largest


def _write_onnx(
    program: Any,
    target: Path | None,
    example: Any,
    types: GraphTypes,
    tolerance: float | None,
) -> tuple[Any, tuple[str, ...]]:
    onnx: Any = importlib.import_module("onnx")
    norms = [name for name in types.mixed if "layer_norm" in name or "group_norm" in name]
    if norms:
        raise RuntimeError(
            f"export: expected a graph that ONNX has ops for, got {', '.join(norms)} of 16-bit "
            "activations with float32 weights, as torch's CPU lists want it; lists='cuda' computes "
            "norms in float32"
        )
    args, kwargs = example
    output = TorchOutput()
    try:
        with output.kept(), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            made = torch.onnx.export(
                program,
                args,
                kwargs=kwargs,
                dynamo=True,
                verbose=False,
                # It merges norms into convolutions, whatever dtypes they have.
                optimize=not types.mixed,
                # Before this version ONNX has no convolutions in bfloat16.
                opset_version=22,
            )
    except Exception as error:
        raise RuntimeError(
            f"export: expected a program that torch.onnx.export can write, got "
            f"{type(error).__name__}: {output.reason(error)}"
        ) from error
    with contextlib.ExitStack() as stack:
        if target is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            file = Path(folder) / "model.onnx"
        else:
            file = stack.enter_context(_whole(target))
        assert made is not None
        made.save(str(file))
        try:
            onnx.checker.check_model(str(file), full_check=True)
        except Exception as error:
            raise RuntimeError(
                f"export: expected a model that onnx.checker takes, got {error}"
            ) from error
        ran = _run_onnx(file, program, example, tolerance)
        checks = ("onnx.checker takes the model (full check)", ran)
    return made, checks


def _run_onnx(file: Path, program: Any, example: Any, tolerance: float | None) -> str:
    onnxruntime: Any = importlib.import_module("onnxruntime")

    if _needs_gpu(example):
        return "not run in onnxruntime: the model is for a GPU"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"]
        )
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented as error:
        return f"not run in onnxruntime, whose CPU lacks a kernel: {str(error).strip()}"

    def run(*args: Any, **kwargs: Any) -> list[Any]:
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        names = [given.name for given in session.get_inputs()]
        arrays = [t.detach().contiguous().numpy() for t in tensors]
        found: list[Any] = session.run(None, dict(zip(names, arrays, strict=True)))
        return found

    cloned = tree_map_only(torch.Tensor, torch.clone, example)
    return _compared("onnxruntime", run, program, cloned, tolerance)
