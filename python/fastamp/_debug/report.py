# SPDX-License-Identifier: Apache-2.0
"""The base of all reports: text, JSON, and one HTML page that loads nothing."""

from __future__ import annotations

import dataclasses
import datetime
import html
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import fastamp._C as _C

__all__ = [
    "LAYOUT",
    "PageReport",
    "Report",
    "Section",
    "cards_of",
    "json_of",
    "page",
    "plain",
    "section_of",
    "table_of",
    "today",
]


def today() -> str:
    """The date and time of a report, in UTC: ``2026-11-25 20:15 UTC``."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


#: Of what :func:`json_of` writes: 1 higher when a key goes, or means something else.
LAYOUT = 1


def json_of(report: str, data: dict[str, Any]) -> str:
    """Returns what a tool found as JSON, for programs.

    Args:
        report: Which tool: ``"check"``, as in docs/commands.md.
        data: What it found.

    Returns:
        The data, after ``"fastamp": {"report": ..., "layout": ..., "version": ...}``.
    """
    head = {"report": report, "layout": LAYOUT, "version": _C.build_info()["version"]}
    return json.dumps({"fastamp": head, **plain(data)}, indent=2)


def plain(value: Any) -> Any:
    """Returns data as JSON has them: no inf and NaN, names in place of numbers as keys."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


class Report:
    """Base of what check, inspect, bisect and trace return: its ``str`` is for people.

    Attributes:
        kind: Which of them, as in the JSON.
    """

    kind: ClassVar[str] = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data."""
        raise NotImplementedError

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns :meth:`to_dict` as JSON, after which tool, layout and version these are.

        Args:
            path: A file to write it to as well.

        Raises:
            OSError: The file cannot be written.
        """
        text = json_of(self.kind, self.to_dict())
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def print(self) -> None:
        """Prints the text."""
        print(self)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes a file: JSON if its name ends in ``.json``, else the text.

        Raises:
            OSError: The file cannot be written.
        """
        text = self._text_for(Path(path).suffix.lower())
        Path(path).write_text(text if text.endswith("\n") else f"{text}\n", encoding="utf-8")

    def _text_for(self, suffix: str) -> str:
        return self.to_json() if suffix == ".json" else str(self)


class PageReport(Report):
    """A report that is a page, too, with tables that sort."""

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns one page that needs no other file; writes it, too.

        Args:
            path: A file to write it to as well.

        Raises:
            OSError: The file cannot be written.
        """
        text = self._page()
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes a file: JSON or a page if its name ends in ``.json`` or ``.html``, else the text.

        Raises:
            OSError: The file cannot be written.
        """
        super().write(path)

    def _text_for(self, suffix: str) -> str:
        return self.to_html() if suffix == ".html" else super()._text_for(suffix)

    def _page(self) -> str:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Section:
    """A table.

    Attributes:
        title: What it is about.
        note: A sentence on how to read it.
        columns: Headings; those that end in ``>`` are of numbers, which stand to the right.
        rows: Cells.
        omitted: Rows that were left out.
    """

    title: str
    note: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    omitted: int = 0


_STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1b1f24, #e6e8eb); --soft: light-dark(#6a737d,
  #9aa4af); --line: light-dark(#d9dee3, #343a41); --card: light-dark(#fff, #1d2125);
  --page: light-dark(#f5f6f8, #14171a); --a: light-dark(#2563a8, #6aa9ea);
  --b: light-dark(#b3541e, #e59b62); --bad: light-dark(#b42318, #f97066);
  --good: light-dark(#1a7f4b, #57c98d); }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 24px 60px; max-width: 1180px; background: var(--page);
  color: var(--ink); font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 0 0 2px; }
p { margin: 0 0 10px; color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 16px 18px; margin: 16px 0; overflow-x: auto; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px;
  margin: 16px 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 14px; }
.card b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: 12.5px; }
table { border-collapse: collapse; width: 100%; font-size: 13px;
  font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 600; cursor: pointer; }
th, td { padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.n, th.n { text-align: right; }
.tag { border-radius: 4px; padding: 0 6px; border: 1px solid var(--line); }
.inherited, .weights { color: var(--b); border-color: var(--b); }
.lower { color: var(--a); border-color: var(--a); }
.rule { border-left: 3px solid var(--b); padding: 2px 0 2px 12px; margin: 12px 0; }
.rule b { font-size: 14px; } .rule div { color: var(--soft); }
svg { display: block; max-width: 100%; height: auto; } svg text { fill: var(--ink);
  font: 11.5px system-ui, sans-serif; } svg .soft { fill: var(--soft); }
"""

# Sorts a table by the column whose heading was clicked; numbers by value.
_SCRIPT = """
for (const th of document.querySelectorAll('th')) th.onclick = () => {
  const body = th.closest('table').tBodies[0], i = th.cellIndex, down = th.dataset.down !== '1';
  th.dataset.down = down ? '1' : '0';
  const key = row => { const t = row.cells[i].textContent, n = parseFloat(t);
    return isNaN(n) ? t : n; };
  [...body.rows].sort((a, b) => { const x = key(a), y = key(b);
    const o = typeof x === typeof y ? (x < y ? -1 : x > y ? 1 : 0) : typeof x === 'number' ? 1 : -1;
    return down ? -o : o; }).forEach(row => body.append(row));
};
"""


def page(title: str, parts: Iterable[str]) -> str:
    """Returns a page.

    Args:
        title: As a browser shows it.
        parts: Elements of the body, as HTML.
    """
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n"
        f"<body>{body}<script>{_SCRIPT}</script></body></html>\n"
    )


def cards_of(cards: Iterable[tuple[str, str]]) -> str:
    """Returns what matters most: numbers, as HTML, and what they are."""
    shown = "".join(
        f'<div class="card"><b>{big}</b><span>{small}</span></div>' for big, small in cards
    )
    return f'<div class="cards">{shown}</div>'


def section_of(title: str, note: str, content: str) -> str:
    """A section with a heading.

    Args:
        title: As text, as the note.
        note: A sentence below it; may be empty.
        content: As HTML.
    """
    below = f"<p>{html.escape(note)}</p>" if note else ""
    return f"<section><h2>{html.escape(title)}</h2>{below}{content}</section>"


def table_of(section: Section) -> str:
    """A section with a table."""
    is_number = [column.endswith(">") for column in section.columns]
    head = "".join(
        _cell("th", column.rstrip(">"), right)
        for column, right in zip(section.columns, is_number, strict=True)
    )
    rows = "".join(f"<tr>{_row(cells, is_number)}</tr>" for cells in section.rows)
    more = f"<p>{section.omitted} more rows</p>" if section.omitted else ""
    return section_of(
        section.title,
        section.note,
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}",
    )


def _row(cells: Iterable[str], is_number: list[bool]) -> str:
    return "".join(_cell("td", cell, right) for cell, right in zip(cells, is_number, strict=True))


_TAGS = {"inherited": "inherited", "16-bit weights": "weights", "lower": "lower"}


def _cell(kind: str, text: str, right: bool) -> str:
    shown = html.escape(text)
    if text in _TAGS:
        shown = f'<span class="tag {_TAGS[text]}">{shown}</span>'
    return f"<{kind}{' class=n' if right else ''}>{shown}</{kind}>"
