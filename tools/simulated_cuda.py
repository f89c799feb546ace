# SPDX-License-Identifier: Apache-2.0
"""Runs a command with a simulated CUDA device (tests/simulated_cuda), where there is no GPU.

simulated_cuda.py [--devices 2] [--late] -- command ...

What the command finds out is called simulated, never GPU: docs/cuda.md says what it proves.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from cmake_build import cached
from tracked_files import ROOT

PLACE = "simulated_cuda"
RUNTIME_IMPORTS = ("libtorch_cuda.so", "libc10_cuda.so", "libtorch_python.so")
# The device's memory is not the allocator's: what a variable of the same name says is for a GPU.
UNSUITABLE = ("CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def libraries(build_dir: Path) -> list[Path]:
    """Returns what is preloaded: the runtime, named as torch loads it, and the driver."""
    runtimes = sorted((build_dir / PLACE).glob("libcudart.so.*"))
    return [*runtimes[:1], build_dir / PLACE / "libcuda.so.1"]


def is_built(build_dir: Path) -> bool:
    """Returns whether a build folder has the device: CUDA builds on Linux have."""
    if cached(build_dir, "FASTAMP_CUDA") == "OFF":  # What lies there is of an earlier build.
        return False
    found = libraries(build_dir)
    return len(found) == 2 and all(path.is_file() for path in found)


def symbols(library: Path, which: str) -> set[str]:
    """Returns the names of a library's dynamic symbols, without versions."""
    command = ["nm", "-D", which, str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[-1] for line in lines}


def is_nccls(name: str) -> bool:
    """Returns whether a function is one of NCCL, which has no versions."""
    return re.fullmatch(r"nccl[A-Z]\w*", name) is not None


def missing_functions(runtime: Path, torch_libraries: Path) -> list[str]:
    """Returns the functions of the CUDA runtime and NCCL that torch imports and the device has not.

    Args:
        runtime: The simulated runtime.
        torch_libraries: The folder of torch's libraries.
    """
    wanted: set[str] = set()
    for name in RUNTIME_IMPORTS:
        if (torch_libraries / name).is_file():
            imports = symbols(torch_libraries / name, "--undefined-only")
            wanted |= {item for item in imports if f"@{runtime.name}" in item or is_nccls(item)}
    have = {name.partition("@")[0] for name in symbols(runtime, "--defined-only")}
    return sorted({name.partition("@")[0] for name in wanted} - have)


def check_torch(runtime: Path) -> None:
    """Refuses a torch that needs more of the runtime; looks once for each torch.

    Raises:
        RuntimeError: There is no torch, or it imports what is not simulated.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{sys.executable} has no torch")
    folder = Path(spec.origin).parent / "lib"
    library = folder / "libtorch_cuda.so"
    if not library.is_file():
        raise RuntimeError(f"torch in {folder} has no CUDA part")
    key = f"{library} {library.stat().st_mtime_ns} {runtime.stat().st_mtime_ns}"
    stamp = runtime.parent / "checked_torch.txt"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == key:
        return
    if missing := missing_functions(runtime, folder):
        raise RuntimeError(f"torch in {folder} imports what is not simulated: {', '.join(missing)}")
    stamp.write_text(key, encoding="utf-8")


def environment(build_dir: Path, options: argparse.Namespace) -> dict[str, str]:
    """Returns the environment of the command."""
    variables = {name: value for name, value in os.environ.items() if name not in UNSUITABLE}
    preloaded = [*map(str, libraries(build_dir)), *variables.get("LD_PRELOAD", "").split()]
    variables["LD_PRELOAD"] = " ".join(preloaded)
    variables["SIMULATED_CUDA_DEVICES"] = str(options.devices)
    variables["SIMULATED_CUDA_CAPABILITY"] = str(options.capability)
    for name in ("late", "guards", "trace"):
        if getattr(options, name):
            variables[f"SIMULATED_CUDA_{name.upper()}"] = "1"
    if options.guards:
        variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    return variables


def parse(arguments: list[str]) -> argparse.Namespace:
    """Returns the options of a command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    build_dir = Path(os.environ.get("FASTAMP_BUILD_DIR", ROOT / "build" / "make"))
    parser.add_argument("--build-dir", type=Path, default=build_dir)
    parser.add_argument("--devices", type=int, choices=range(1, 5), default=2)
    parser.add_argument("--capability", type=int, default=90, help="80, 89, 90, 100")
    parser.add_argument("--late", action="store_true", help="work runs as late as waits allow")
    parser.add_argument("--guards", action="store_true", help="a guard page behind each tensor")
    parser.add_argument("--trace", action="store_true", help="print each kernel, copy and operator")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and what to run")
    return parser.parse_args(arguments)


def main() -> None:
    """Replaces this process by the command.

    Raises:
        RuntimeError: The device is not built, or does not go with torch.
    """
    options = parse(sys.argv[1:])
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    build_dir = options.build_dir.resolve()
    if not is_built(build_dir):
        raise RuntimeError(f"{build_dir} has no simulated device: builds with CUDA on Linux have")
    check_torch(libraries(build_dir)[0])
    os.execvpe(command[0], command, environment(build_dir, options))


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(f"fastamp: {error}")
