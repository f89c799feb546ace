# SPDX-License-Identifier: Apache-2.0
"""Report of :func:`fastamp.debug.inspect`."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, ClassVar

from fastamp._debug.inspect.inspect_page import page_of
from fastamp._debug.inspect.inspect_rows import StepRows, low_share
from fastamp._debug.inspect.inspect_sections import scale_sentence, sections_of
from fastamp._debug.report import PageReport, Section, plain
from fastamp._util.tool_guard import ToolGuard

__all__ = ["InspectReport"]


@dataclasses.dataclass(frozen=True)
class InspectReport(StepRows, PageReport):
    """One training step, op by op. Its ``str`` is a set of tables.

    Attributes:
        ops: What ran, in the order of the first calls.
        gradients: Of parameters, in the order of the model's.
        weights: What the optimizer did to those that have a gradient; empty if it was skipped.
        skipped: Whether a gradient scaler of fastamp skipped the step.
        loss_scale: Where the scale may be; None without fp16 gradients.
        check: What :func:`fastamp.debug.check` finds in this step.
        title: The program, the number of the step, its dtype and the date.
    """

    kind: ClassVar[str] = "inspect"

    def summary(self) -> str:
        """The step in a few lines."""
        share = low_share(self.ops)
        in_low = "no products"
        if share is not None:
            in_low = f"{100 * share:.1f} % of the work of products in 16 bits"
        lines = [f"Cause: {self.check.cause}"] if self.check.cause else []
        lines.append(f"{sum(row.calls for row in self.ops)} op calls; {in_low}")
        inherited = sorted({row.op for row in self.ops if row.reason == "inherited"})
        if inherited:
            shown = ", ".join(inherited[:12]) + (" ..." if len(inherited) > 12 else "")
            lines.append(
                f"In 16 bits only because their inputs are, by no rule of autocast: {shown}"
            )
        worst = max(
            (row for row in self.ops if row.local_error is not None),
            key=lambda row: row.local_error or 0.0,
            default=None,
        )
        if worst is not None:
            where = f" in {worst.module}" if worst.module else ""
            lines.append(f"Largest local error: {worst.local_error:.3g}, {worst.op}{where}")
        if self.loss_scale is not None:
            lines.append(f"Loss scale: {scale_sentence(self)}")
        if self.skipped:
            lines.append("The step was skipped: gradients were inf or NaN")
        stalled = [row for row in self.weights if row.stalled > 0.5]
        if stalled:
            lines.append(
                f"{len(stalled)} of {len(self.weights)} weights keep more than half of their "
                f"elements in this step, such as {stalled[0].name}"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        """Returns the summary, a table for each section, and the findings."""
        return self.text()

    def text(self, rows: int = 30) -> str:
        """Returns the same with so many rows of each table at most."""
        parts = [
            str(self.title),
            ToolGuard("fastamp.debug.inspect's summary", "is left out").run(
                self.summary, default=""
            ),
        ]
        parts += [_text_of(section) for section in sections_of(self, rows)]
        parts.append(f"Findings\n{self.check}")
        return "\n\n".join(filter(None, parts))

    def print(self, rows: int = 30) -> None:
        """Prints the tables; to a terminal with colors, if rich is installed, and folded to fit.

        Args:
            rows: Shown at most of each table.
        """
        printed = (
            sys.stdout
            and sys.stdout.isatty()
            and ToolGuard("fastamp.debug.inspect's drawing of tables", "is left out").run(
                _print_in_colors, self, rows, default=False
            )
        )
        if not printed:
            print(self.text(rows))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data: ``ops``, ``gradients``, ``weights``, ``loss_scale``, ``check``."""
        record: dict[str, Any] = plain(dataclasses.asdict(self))
        record["check"] = self.check.to_dict()
        return record

    def _page(self) -> str:
        return page_of(self)


def _caption(section: Section) -> str:
    more = f" ({section.omitted} more rows)" if section.omitted else ""
    return section.note + more


_STYLES = {
    "inherited": "yellow",
    "16-bit weights": "magenta",
    "override": "cyan",
    "overflows": "red",
    "now, overflows": "bold red",
    "now": "bold green",
    "inf": "red",
}


def _print_in_colors(report: InspectReport, rows: int) -> bool:
    """Prints to a terminal; False without rich. Text is folded where it must be, numbers never."""
    try:
        from rich.console import Console
        from rich.measure import Measurement
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    console = Console()
    console.print(Text(f"{report.title}\n{report.summary()}", style="bold"))
    for section in sections_of(report, rows):
        table = Table(title=section.title, caption=_caption(section), title_justify="left")
        for index, column in enumerate(section.columns):
            is_number = column.endswith(">")
            table.add_column(
                column.rstrip(">"),
                justify="right" if is_number else "left",
                overflow="fold",
                no_wrap=is_number,
                min_width=max(len(cells[index]) for cells in section.rows) if is_number else None,
            )
        for cells in section.rows:
            table.add_row(*(Text(cell, style=_style(cell)) for cell in cells))
        least = Measurement.get(console, console.options, table).minimum
        console.print(table, width=max(least, min(console.width, 200)), crop=False)
    console.print(Text(str(report.check)))
    return True


def _style(cell: str) -> str:
    return _STYLES.get(cell, "")


def _text_of(section: Section) -> str:
    table = [tuple(column.rstrip(">") for column in section.columns), *section.rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [section.title, _caption(section)]
    for cells in table:
        aligned = (
            cell.rjust(width) if column.endswith(">") else cell.ljust(width)
            for cell, width, column in zip(cells, widths, section.columns, strict=True)
        )
        lines.append("  ".join(aligned).rstrip())
    lines.insert(3, "  ".join("-" * width for width in widths))
    return "\n".join(line for line in lines if line)
