# SPDX-License-Identifier: Apache-2.0
"""Shortens what torch logs and raises while it exports: graphs, in thousands of lines."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator

__all__ = ["TorchOutput"]

_SHOWN = 24
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class TorchOutput:
    """Keeps what goes to the standard error inside a block; long texts go into a file.

    A short one appears when the block ends.
    """

    def __init__(self) -> None:
        """Has nothing yet."""
        self._text = io.StringIO()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keeps it inside the block."""
        own = sys.stderr
        handlers = [handler for handler in _handlers() if handler.stream in (own, sys.__stderr__)]
        streams = [handler.stream for handler in handlers]
        for handler in handlers:
            handler.setStream(self._text)
        try:
            with contextlib.redirect_stderr(self._text), warnings.catch_warnings():
                # torch's, of its own code: nothing that whoever exports can change.
                for category in (FutureWarning, DeprecationWarning):
                    warnings.simplefilter("ignore", category)
                yield
        finally:
            for handler, stream in zip(handlers, streams, strict=True):
                handler.setStream(stream)
            text = self._text.getvalue()
            if text and sys.exc_info()[0] is None:
                own.write(text if _is_short(text) else f"export: {_kept_in_file(text)}\n")

    def reason(self, error: BaseException) -> str:
        """The text of an error: its first lines, and the file that has the others."""
        text, output = (_COLORS.sub("", each) for each in (str(error), self._text.getvalue()))
        if _is_short(text + output):
            return text + (f"\n{output.rstrip()}" if output else "")
        shown = "\n".join(text.splitlines()[:_SHOWN])
        whole = f"{text}\n\n{output}"
        return f"{shown}\n{_kept_in_file(whole)}"


def _is_short(text: str) -> bool:
    return text.count("\n") <= _SHOWN and len(text) < 100 * _SHOWN


def _kept_in_file(text: str) -> str:
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", prefix="fastamp-export-", suffix=".txt", delete=False
    ) as file:
        file.write(text)
    return f"all {len(text.splitlines())} lines of torch's output are in {file.name}"


def _handlers() -> list[logging.StreamHandler[io.StringIO]]:
    """Returns those of torch's loggers, and of the root, that write to streams."""
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    loggers = [logging.root, *map(logging.getLogger, names)]
    found = {id(handler): handler for logger in loggers for handler in logger.handlers}
    return [
        handler
        for handler in found.values()
        if isinstance(handler, logging.StreamHandler)
        and not isinstance(handler, logging.FileHandler)
    ]
