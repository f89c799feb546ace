# SPDX-License-Identifier: Apache-2.0
"""Checks who may include whom.

core <- kernels <- ops <- trace <- autocast <- float8 <- inference <- optim <- scaler <- c_api <-
csrc: a file includes its own folder and the layers below it. Modules (a header and the source of
its name, a file of the Python package) form no circles, nor do the folders of the Python package,
whose private modules all have names of their own. Public headers keep Python, CUDA and our private
headers away from users; headers that drag in all of torch cost 20 s of compile time per file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from module_graph import (
    circle_problems,
    cpp_modules,
    python_modules,
    python_packages,
    same_names,
)
from tracked_files import ROOT, report, tracked_files

LAYERS = {
    name: height
    for height, name in enumerate(
        (
            "core",
            "kernels",
            "ops",
            "trace",
            "autocast",
            "float8",
            "inference",
            "optim",
            "scaler",
            "c_api",
            "csrc",
        )
    )
}

# Public headers that a lower layer may include: they say what users hand over, and include nothing
# of their own layer.
VOCABULARY = {
    "kernels": {"fastamp/ops/fused_steps.h"},
    "trace": {"fastamp/autocast/policy.h", "fastamp/autocast/trace.h"},
}

# Known circles that are to be removed, each as the set of its modules. Exact: a circle that is
# gone, or has gained or lost modules, is an error, as a new one is.
ALLOWED_CIRCLES: tuple[frozenset[str], ...] = ()

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"](.*)$')

WIDE = {"torch/torch.h", "torch/extension.h", "torch/all.h", "torch/types.h", "ATen/ATen.h"}
# Where one is unavoidable: the reason on the same line.
WIDE_REASON = re.compile(r"//\s*wide include: \S+")

PUBLIC_BAN = re.compile(
    r"^(Python\.h|pybind11/|torch/python\.h|torch/csrc/(autograd/python|utils/pybind|Exceptions)"
    r"|cuda|cub/|thrust/|ATen/cuda/|c10/cuda/)"
)
PYTHON_BAN = re.compile(r"^(Python\.h|pybind11/|torch/python\.h|torch/csrc/utils/pybind)")


def layer_of(relative: Path) -> str | None:
    """Returns the layer that a source or header belongs to; None for what has no rule."""
    parts = relative.parts
    if parts[:2] == ("python", "csrc"):
        return "csrc"
    inside = parts[2:] if parts[:2] == ("include", "fastamp") else parts[1:]
    if parts[0] not in ("include", "src") or relative.name == "fastamp.h":
        return None
    return inside[0] if len(inside) > 1 else "core"


def included_layer(name: str) -> str | None:
    """Returns the layer an include names, or None if it is not one of fastamp's."""
    parts = Path(name.removeprefix("fastamp/")).parts
    if len(parts) > 1:
        return parts[0] if parts[0] in LAYERS else None
    return "core" if name.startswith("fastamp/") and name != "fastamp/fastamp.h" else None


def problems_of(relative: Path, name: str, quoted: bool, rest: str) -> Iterator[str]:
    """Yields what is wrong with one include of one file."""
    own, other = layer_of(relative), included_layer(name)
    public = relative.parts[:2] == ("include", "fastamp")
    upwards = own is not None and other is not None and LAYERS[own] < LAYERS[other]
    if upwards and name not in VOCABULARY.get(own or "", set()):
        yield f"{own} may not include {name}: {other} is not below it"
    if own not in (None, "csrc") and name == "fastamp/fastamp.h":
        yield "fastamp/fastamp.h is for users: include the header you need"
    if public and PUBLIC_BAN.match(name):
        yield f"public headers may not include {name}"
    if public and quoted:
        yield f"public headers may not include private ones: {name}"
    if relative.parts[0] == "src" and PYTHON_BAN.match(name):
        yield f"libfastamp has no Python: {name}"
    if name in WIDE and (public or not WIDE_REASON.search(rest)):
        yield f"{name} costs 20 s per file: include what is used"


def include_problems(root: Path, files: Sequence[Path]) -> Iterator[str]:
    """Yields one line, "path:line: problem", for each forbidden include."""
    for path in files:
        relative = path.relative_to(root)
        layer = layer_of(relative)
        if layer is not None and layer not in LAYERS:
            yield f"{relative}: no such layer: {layer}"
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match = INCLUDE.match(line)
            if match:
                problems = problems_of(relative, match[2], match[1] == '"', match[3])
                yield from (f"{relative}:{number}: {problem}" for problem in problems)


def check(root: Path, allowed_circles: Collection[frozenset[str]] = ()) -> list[str]:
    """Returns one line for each forbidden include, circle or shared name below root."""
    files = [
        path
        for path in tracked_files(root, ".h", ".cpp", ".cu", ".cuh", ".inc", ".py", ".pyi")
        if path.relative_to(root).parts[0] in ("include", "src", "python")
    ]
    sources = [path for path in files if path.suffix not in (".py", ".pyi")]
    modules = python_modules(root, files)
    graph = cpp_modules(root, sources) | modules
    return [
        *include_problems(root, sources),
        *circle_problems(graph, allowed_circles),
        *circle_problems(python_packages(modules), ()),
        *same_names(modules),
    ]


if __name__ == "__main__":
    tree = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    sys.exit(report(check(tree, ALLOWED_CIRCLES)))
