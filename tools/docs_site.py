# SPDX-License-Identifier: Apache-2.0
"""Builds the site that `make docs` leaves in build/site/html.

Stages docs/*.md, README.md, CHANGELOG.md and CONTRIBUTING.md, makes the pages of examples, ops and
Python names, and runs MkDocs over them. What MkDocs warns of, such as a link that leads nowhere, is
a failure. MkDocs imports this file, too (`hooks` of mkdocs.yml), and calls on_post_build.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from docs_ops import ops_reference

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"
# Pages that stand elsewhere in the repository, or have another name there, by their path.
PAGES = {
    "README.md": "readme.md",
    "docs/home.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
LINK = re.compile(r"(!?)\[([^\]\n]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```.*?^```$)", re.DOTALL | re.MULTILINE)
# Sphinx's, which editors show as links and MkDocs as they are: :meth:`~fastamp.trace`.
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(<code>|`)~?")
LANGUAGES = {".py": "python", ".cpp": "cpp"}
# Modules with a page of their own, and its title.
MODULE_PAGES = {
    "optim": "Optimizers",
    "policies": "Policies",
    "casts": "Casts of weights",
    "float8": "fp8",
    "inference": "Inference and export",
    "debug": "Debugging",
    "distributed": "Several processes",
    "cuda": "CUDA graphs",
    "cpp": "C++ files",
}
# What programs use first; names of types that functions return come last.
BY_USE = {
    "": "autocast GradScaler clip_grad_norm_ StepGuard custom_fwd custom_bwd install uninstall "
    "is_installed build_info",
    "optim": "fuse_ AdamW Adam SGD Muon low_precision_weights_",
    "policies": "get set override for_modules fp32 preset load save table reset register_op "
    "unregister_op copy_from",
    "casts": "keep kept drop together",
    "float8": "recipe Recipe exclude plan",
    "inference": "convert export",
    "debug": "check inspect bisect trace log_to plot_history torch_kernels",
    "distributed": "compress_hook fp32_reduce_hook fp32_main_grads",
    "cuda": "graphed_step",
    "cpp": "cmake_prefix_path include_path",
}
# What search finds in pages that begin so, against 1 of others; a title that matches counts 1000.
RANKS = {"cpp/": 0.001, "changelog": 0.01, "contributing": 0.01, "testing": 0.01, "examples": 0.1}
# What commits sites to a branch, which -m does not run.
MIKE = ("-c", "from mike.driver import main; main()")
# Names of fastamp's that are mirrors of torch's modules, or have nothing to say.
NOT_ON_A_PAGE = {"amp", "cpu", "__version__"}


def anchor_of(program: str) -> str:
    """Returns where an example's program stands on the page of examples."""
    return Path(program).name.replace(".", "")


def site_target(path: str) -> str | None:
    """Returns the page of a file of the repository, and None if it has none."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("examples/") and Path(path).suffix in LANGUAGES:
        return f"examples.md#{anchor_of(path)}"
    return None


def relink(text: str, folder: str) -> str:
    """Replaces links into the repository by links into the site, or by their text.

    Args:
        text: A page in Markdown. Code blocks stay as they are.
        folder: Where the page stands in the repository: "" or "docs".
    """

    def replace(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        path, mark, anchor = target.partition("#")
        whole = (ROOT / folder / path).resolve()
        if "://" in target or not path or not whole.exists():
            return match[0]  # If it leads nowhere, MkDocs says so.
        page = site_target(whole.relative_to(ROOT).as_posix())
        if page is None:
            return label
        return f"{image}[{label}]({page}{'' if '#' in page else mark + anchor})"

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(replace, part) for part in parts)


def examples_page(programs: Mapping[str, str]) -> str:
    """Returns the page that shows the example programs.

    Args:
        programs: Their texts by path.
    """
    parts = ["# Examples\n", "A test runs each of these programs.\n"]
    for path, text in programs.items():
        language = LANGUAGES[Path(path).suffix]
        parts.append(f"## {path} {{ #{anchor_of(path)} }}\n")
        parts.append(f"```{language}\n{text.rstrip()}\n```\n")
    return "\n".join(parts)


def by_use(module: str, names: Iterable[str]) -> list[str]:
    """Returns names of a module, those first that programs use first.

    Args:
        module: Without ``fastamp.``; empty for fastamp itself.
        names: In any order.
    """
    order = BY_USE[module].split()
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


def summary_of(value: Any) -> str:
    """Returns the first sentence of a docstring, for a cell of a table."""
    text = (inspect.getdoc(value) or "").partition("\n\n")[0]
    text = re.sub(r"``([^`]*)``", r"`\1`", " ".join(text.split())).replace("|", "\\|")
    return re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text)


def api_page(title: str, module: str, names: Mapping[str, Any]) -> str:
    """Returns a page for mkdocstrings: a table of summaries, then a directive for each name.

    Args:
        title: Of the page.
        module: Whose names they are.
        names: What each stands for, in the order of the page.
    """
    parts = [
        f"# {title}\n",
        f"`import {module}` gives these names.\n",
        "| Name | What it does |\n|---|---|",
    ]
    for name, value in names.items():
        parts.append(f"| [`{name}`](#{module}.{name}) | {summary_of(value)} |")
    return "\n".join([*parts, "", *(f"::: {module}.{name}\n" for name in names)])


def stage(pages: Path) -> None:
    """Writes all pages into an empty folder."""
    import fastamp

    shutil.rmtree(pages, ignore_errors=True)
    pages.mkdir(parents=True)

    def write(name: str, text: str) -> None:
        (pages / name).write_text(text, encoding="utf-8")

    for path in sorted((ROOT / "docs").glob("*.md")):
        page = site_target(f"docs/{path.name}") or path.name
        text = path.read_text(encoding="utf-8").replace("; do not edit by hand.", ".")
        write(page, relink(text, "docs"))
    for name, page in PAGES.items():
        if "/" not in name:
            write(page, relink((ROOT / name).read_text(encoding="utf-8"), ""))
    shutil.copytree(ROOT / "docs" / "plots", pages / "plots")
    shutil.copy(ROOT / "docs" / "site" / "site.css", pages)
    folders = [ROOT / "examples" / language for language in ("python", "cpp")]
    programs = [p for folder in folders for p in sorted(folder.iterdir()) if p.suffix in LANGUAGES]
    texts = {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in programs}
    write("examples.md", examples_page(texts))
    lists = (ROOT / "docs" / "site" / "torch_ops.json").read_text(encoding="utf-8")
    write("ops.md", ops_reference(json.loads(lists)))
    for module, title in {"": "Python", **MODULE_PAGES}.items():
        home = getattr(fastamp, module) if module else fastamp
        left_out = NOT_ON_A_PAGE | (set() if module else MODULE_PAGES.keys())
        names = by_use(module, [name for name in home.__all__ if name not in left_out])
        page = api_page(title, home.__name__, {name: getattr(home, name) for name in names})
        write(f"api_{module or 'python'}.md", page)


def plain_docstrings(html: str) -> str:
    """Returns a page, or the index of search, without the marks of Sphinx that docstrings have.

    Roles leave what they name, and ``::`` ahead of a block a colon.
    """
    return re.sub(r"(?<=[^\s>:])::</p>", ":</p>", ROLE.sub(r"\1", html)).replace("<p>::</p>", "")


def linked_guides(html: str) -> str:
    """Returns a page of the API with links where docstrings name a guide: docs/optim.md."""
    link = r'<a href="\1.html">docs/\1.md</a>'
    return re.sub(r"(?<![\w/\">])docs/(\w+)\.md(?![^<]*</(?:a|pre|title)>)", link, html)


def _text_of(html: str) -> str:
    return re.sub(r"<[^>]*>", "", html).strip()


def _with_labels(row: str, labels: list[str], breaks_last: bool) -> str:
    """A row of a table whose cells know their columns; names of tests may break after a mark."""
    cells = re.findall(r"<td[^>]*>.*?</td>", row, re.DOTALL)
    mended = []
    for label, cell in zip(labels, cells, strict=False):
        if breaks_last and label == labels[-1]:
            cell = re.sub(r"(?<=\w)(::|_|/)(?=\w)(?![^<]*>)", r"\1<wbr>", cell)
        mended.append(cell.replace("<td", f'<td data-label="{label}"', 1))
    return f"<tr>{''.join(mended)}</tr>"


def mended_table(html: str) -> str:
    """Returns a table as site.css wants it.

    One whose last column are names of tests is marked, so that this column is narrow. One of three
    columns or more with sentences is marked, too: a phone shows its rows one below the other.
    """
    head, _, body = html.partition("</thead>")
    labels = [_text_of(cell) for cell in re.findall(r"<th[^>]*>(.*?)</th>", head, re.DOTALL)]
    rows = re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
    has_tests = labels[-1:] == ["Test"]
    is_long = len(labels) > 2 and sum(len(_text_of(row)) for row in rows) > 90 * len(rows)
    if not rows or not (has_tests or is_long):
        return html
    marks = f"{' data-tests' if has_tests else ''}{' data-stacked' if is_long else ''}"
    lines = "\n".join(_with_labels(row, labels, has_tests) for row in rows)
    head = head.replace("<table", f"<table{marks}", 1)
    return f"{head}</thead>\n<tbody>\n{lines}\n</tbody>\n</table>"


def wrapped_output(html: str) -> str:
    """Returns the output of a command, marked if its lines are long sentences: they are wrapped."""
    lines = _text_of(html).splitlines()
    is_output = bool(lines) and lines[0].startswith("$ ")
    has_columns = any(re.search(r"\S {3,}\S", line) for line in lines)
    is_long = any(len(line) > 90 for line in lines)
    return (
        html.replace("<pre>", "<pre data-wrapped>")
        if is_output and is_long and not has_columns
        else html
    )


def mend_search(text: str) -> str:
    """Returns the index of search without listings of sources, and with C++ below the guides."""
    start = text.index("{")
    index = json.loads(text[start:].rstrip().rstrip(";"))
    found = [doc for doc in index["docs"] if "_source.html" not in doc["location"]]
    for doc in found:
        ranks = [rank for start_of, rank in RANKS.items() if doc["location"].startswith(start_of)]
        if ranks:
            doc["boost"] = ranks[0]
    return text[:start] + json.dumps({**index, "docs": found}, separators=(",", ":"))


def finish(folder: Path) -> None:
    """Mends what MkDocs has made, pages and what search finds."""
    for path in (*folder.rglob("*.html"), *folder.rglob("search_index.js*")):
        text = path.read_text(encoding="utf-8")
        mended = plain_docstrings(text)
        if path.suffix == ".html":
            mended = re.sub(
                r"<table>.*?</table>", lambda m: mended_table(m[0]), mended, flags=re.DOTALL
            )
            mended = re.sub(
                r"<pre>.*?</pre>", lambda m: wrapped_output(m[0]), mended, flags=re.DOTALL
            )
            if path.name.startswith("api_"):
                mended = linked_guides(mended)
        else:
            mended = mend_search(mended)
        if mended != text:
            path.write_text(mended, encoding="utf-8")


def on_post_build(config: Any) -> None:
    """Mends a site that MkDocs has built; called by it."""
    finish(Path(config["site_dir"]))


# As mkdocs.plugins.event_priority, which the tests of this file do without: after the plugin that
# writes what search finds, whose is -100.
vars(on_post_build)["mkdocs_priority"] = -110


def version_of_site() -> str:
    """Returns the version whose pages these are: those of a patch replace the ones before it."""
    return (ROOT / "VERSION").read_text(encoding="utf-8").rpartition(".")[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status of MkDocs or mike."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--serve", action="store_true", help="show it at a local address")
    parser.add_argument(
        "--release",
        action="store_true",
        help="commit it to the local branch gh-pages, beside the sites of other versions",
    )
    options = parser.parse_args(arguments)
    stage(SITE / "pages")
    command = ["-m", "mkdocs", "serve" if options.serve else "build"]
    if options.release:
        command = [*MIKE, "deploy", "--update-aliases", version_of_site(), "latest"]
    # The theme's maintainers announce the end of its life in 2027 at each run, and how to be quiet.
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    # Where mike finds MkDocs.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"

    def run(*words: str) -> int:
        return subprocess.call([sys.executable, *words], cwd=ROOT, env=environment)

    status = run(*command)
    if status == 0 and options.release:
        status = run(*MIKE, "set-default", "latest")
        print(f"version {version_of_site()} is in the branch gh-pages, as latest, too")
    elif status == 0 and not options.serve:
        print("the site is in build/site/html/index.html")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
