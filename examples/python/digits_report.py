# SPDX-License-Identifier: Apache-2.0
"""What the digits example shows beside its training loop: options, progress, figures, table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fastamp import GradScaler

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
WARM_UP = 10  # iterations that are not timed, if there are more
CHECK_EVERY = 100  # iterations between two looks at the loss: each look waits for the device


def parse_options(description: str | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("data", type=Path, help="what examples/data/digits.py wrote")
    parser.add_argument("--iters", type=int, default=2000, help="iterations, at most")
    parser.add_argument("--shorter", default="", help="modes with fewer of them: fp16=200,fp8=50")
    parser.add_argument("--marks", default="1", help="iterations whose loss is shown: 1,100,1000")
    parser.add_argument("--until-loss", type=float, default=0.0, help="stop at this loss")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    pairs = (pair.split("=") for pair in options.shorter.split(",") if pair)
    options.shorter = {mode: int(count) for mode, count in pairs}
    options.marks = [int(mark) for mark in options.marks.split(",")]
    return options


class Row:
    """One training run: iterating gives the iteration numbers, record() takes each one's loss."""

    def __init__(
        self,
        options: argparse.Namespace,
        mode: str,
        model: Any,
        optimizer: torch.optim.Optimizer,
        scaler: GradScaler,
    ) -> None:
        """Watches the model's fc1 and the optimizer from now on."""
        self._options, self._scaler = options, scaler
        self._cuda = next(model.parameters()).is_cuda
        self._total = min(options.iters, options.shorter.get(mode, options.iters))
        self._skipped = 0
        self._loss: torch.Tensor | None = None
        self.mode = mode + (" + GradScaler" if scaler.is_enabled() else "")
        self.facts: dict[str, Any] = {"mode": self.mode}
        self.losses: dict[int, float] = {}
        self._hook = model.fc1.register_forward_hook(self._see_dtypes)
        optimizer.register_step_pre_hook(self._count_skipped)

    def _see_dtypes(self, module: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
        seen = {"input": inputs[0], "output": output, "weight": module.weight}
        self.facts.update({name: DTYPES[tensor.dtype] for name, tensor in seen.items()})
        self._hook.remove()  # every iteration is the same: the others are timed without it

    def _count_skipped(self, *_: Any) -> None:
        # Whether the step before this one was skipped: by now its flag has reached the host.
        self._skipped += self._scaler.step_was_skipped

    def __iter__(self) -> Iterator[int]:
        """Yields 1, 2, ... until the iterations are done or the target loss is reached."""
        total = self._total
        terminal = sys.stderr.isatty()
        reset_peak_memory(self._cuda)
        started, timed_from = time.perf_counter(), 0
        bar_options: dict[str, Any] = {"mininterval": 0.1 if terminal else 5.0}
        if not terminal:
            bar_options["ncols"] = 78
        with tqdm(total=total, desc=f"Python {self.mode}", unit="it", **bar_options) as bar:
            for iteration in range(1, total + 1):
                yield iteration
                bar.update()
                if iteration == min(WARM_UP, total - 1):
                    self._wait()
                    started, timed_from = time.perf_counter(), iteration
                if self._is_over(iteration, bar):
                    break
        self._wait()
        elapsed = time.perf_counter() - started
        self.facts["iterations"] = iteration
        self.facts["ms_per_iteration"] = 1e3 * elapsed / (iteration - timed_from)
        self.facts["peak_mib"] = peak_memory_mib(self._cuda)

    def _is_over(self, iteration: int, bar: Any) -> bool:
        assert self._loss is not None
        if iteration in self._options.marks:
            self.losses[iteration] = self._loss.item()
        check = iteration % CHECK_EVERY == 0
        if not check and iteration > 1:
            return False
        loss = self._loss.item()
        bar.set_postfix(loss=f"{loss:.6f}", refresh=False)
        return check and loss <= self._options.until_loss

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def record(self, loss: torch.Tensor) -> None:
        """Takes the loss of this iteration; it is read only where it is shown."""
        self._loss = loss.detach()

    def finish(self, accuracy: torch.Tensor) -> None:
        """Takes the accuracy of the trained model, and what the scaler ended at."""
        assert self._loss is not None
        self.facts["final_loss"] = self._loss.item()
        self.facts["accuracy"] = accuracy.item()
        enabled = self._scaler.is_enabled()
        self.facts["scale"] = self._scaler.get_scale() if enabled else None
        self._count_skipped()  # the last one
        self.facts["skipped"] = self._skipped if enabled else None

    def cells(self) -> dict[str, str]:
        """Returns the row as it is printed, by column."""
        facts = self.facts
        cells = {"mode": self.mode}
        cells |= {f"fc1 {name}": facts[name] for name in ("input", "output", "weight")}
        for mark in (mark for mark in self._options.marks if mark <= self._options.iters):
            cells[f"loss @{short(mark)}"] = (
                f"{self.losses[mark]:.6f}" if mark in self.losses else ""
            )
        cells["final loss"] = f"{facts['final_loss']:.6f}"
        fewer = f" of {self._options.iters}" if self._total < self._options.iters else ""
        cells["iterations"] = f"{facts['iterations']}{fewer}"
        cells["accuracy"] = f"{facts['accuracy']:.4f}"
        cells["final scale"] = "-" if facts["scale"] is None else f"{facts['scale']:g}"
        cells["skipped"] = "-" if facts["skipped"] is None else str(facts["skipped"])
        cells["ms/iter"] = f"{facts['ms_per_iteration']:.2f}"
        peak = facts["peak_mib"]
        title = "peak CUDA MiB" if self._cuda else "peak RSS MiB"
        cells[title] = "n/a" if peak is None else f"{peak:.0f}"
        return cells


class Report:
    """The rows of all runs, and the table of them."""

    def __init__(self, options: argparse.Namespace, device: str) -> None:
        """Prints what the runs will use."""
        self._options, self._device = options, device
        self._rows: list[Row] = []
        threads = torch.get_num_threads()
        print(f"Python {platform.python_version()}, torch {torch.__version__}: ", end="")
        if device == "cuda":
            print(f"training on {torch.cuda.get_device_name()}")
        else:
            print(f"no CUDA GPU, training on the CPU ({threads} threads)")
            print("fp16 is slow on CPUs without fp16 arithmetic of their own,")
            print("fp8 on all: there it shows what a GPU would compute", flush=True)

    def add_row(self, mode: str, model: Any, optimizer: Any, scaler: GradScaler) -> Row:
        """Returns the row that watches a run."""
        self._rows.append(Row(self._options, mode, model, optimizer, scaler))
        return self._rows[-1]

    def print(self) -> None:
        """Prints the table, and writes the file if one was asked for."""
        print_table([row.cells() for row in self._rows])
        if self._options.json:
            rows = [row.facts | {"losses": row.losses} for row in self._rows]
            document = {"language": "Python", "device": self._device, "rows": rows}
            self._options.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


def short(number: int) -> str:
    """Returns 100k for 100000."""
    return f"{number // 1000}k" if number >= 10000 and number % 1000 == 0 else str(number)


def print_table(rows: list[dict[str, str]]) -> None:
    """Prints rows of the same columns; columns that do not fit go into further blocks below."""
    width = shutil.get_terminal_size((100, 24)).columns
    first, *columns = rows[0]
    sizes = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    while columns:
        block, used = [first], sizes[first]
        while columns and (len(block) == 1 or used + 2 + sizes[columns[0]] <= width):
            used += 2 + sizes[columns[0]]
            block.append(columns.pop(0))
        print()
        for line in ({name: name for name in block}, *rows):
            cells = [line[name].rjust(sizes[name]) for name in block[1:]]
            print("  ".join([line[first].ljust(sizes[first]), *cells]))
    print(flush=True)


def reset_peak_memory(cuda: bool) -> None:
    """Starts the count of peak_memory_mib anew."""
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory_mib(cuda: bool) -> float | None:
    """Returns the peak of CUDA tensors, or of the whole process (RSS, libraries included)."""
    if cuda:
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")
    if not status.exists() or not os.access("/proc/self/clear_refs", os.W_OK):
        return None
    lines = status.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
