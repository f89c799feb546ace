# SPDX-License-Identifier: Apache-2.0
"""Files that commands write at their end."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path

import torch

from fastamp._cli.closed_pipe import flush_output, shows_any_text
from fastamp._debug.report import Report

__all__ = ["OutputFile", "json_option", "print_report", "rank_of_process"]


def rank_of_process() -> int | None:
    """The number of this process among those that train together; None if it is the only one."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() if distributed.get_world_size() > 1 else None
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return int(rank) if rank.isdecimal() and size.isdecimal() and int(size) > 1 else None


def _is_standard_output(path: str | os.PathLike[str]) -> bool:
    """Whether it is ``-``, or leads to where the standard output goes: to write there would cut it.

    Such as ``/dev/stdout``, or the file that it is redirected to.
    """
    if str(path) == "-":
        return True
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.path.samestat(os.stat(path), os.fstat(sys.stdout.fileno()))  # noqa: PTH116
    return False


def json_option(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Takes ``--json FILE`` from the beginning of a command's arguments.

    Returns:
        The file, None without the option; and the other arguments.
    """
    if arguments[:1] == ["--json"] and len(arguments) > 1:
        return arguments[1], arguments[2:]
    return None, arguments


def print_report(text: object, data: str, output: OutputFile | None) -> None:
    """Prints a report and writes it as data; the data alone if it goes to the standard output.

    Raises:
        OSError: It cannot be written.
    """
    if output is None or output.path is not None:
        print(text)
    if output is not None:
        output.put_text(f"{data}\n")


class OutputFile:
    """Destination of a command's report; ``-`` is the standard output, as is a name of it.

    Of several processes that train together each has a file of its own: ``step.rank1.html``.

    Args:
        path: The file, or a pipe or device. Programs may change their folder until it is written.

    Raises:
        OSError: It cannot be written; found out now, not at the end of a long run. Nothing is left
            behind, nor is a file that is there changed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Tries whether it can be written."""
        self._path = None if _is_standard_output(path) else Path(path).absolute()
        file = self.path
        if file is None:
            return
        if file.is_fifo():  # Whoever reads it would see its end.
            if not os.access(file, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
            return
        is_there = file.exists()
        file.open("a").close()
        if not is_there:
            file.unlink(missing_ok=True)

    @property
    def path(self) -> Path | None:
        """The file of this process; None for the standard output."""
        rank, path = rank_of_process(), self._path
        if path is None or rank is None or not (path.is_file() or not path.exists()):
            return path
        return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")

    def put_text(self, text: str) -> None:
        """Writes a text.

        Raises:
            OSError: It cannot be written.
        """
        path = self.path
        if path is None:
            with shows_any_text():
                print(text, end="")
                flush_output()
        else:
            path.write_text(text, encoding="utf-8")

    def put(self, report: Report) -> Path | None:
        """Writes a report: JSON or a page by the file's name, else its text, as on the output.

        Returns:
            The file; None if it was printed.

        Raises:
            OSError: It cannot be written, such as to a pipe that is closed.
        """
        path = self.path
        if path is not None:
            report.write(path)
            return path
        rank = rank_of_process()
        with shows_any_text():
            if rank is not None:
                print(f"fastamp: rank {rank}")
            report.print()
            flush_output()
        return None
