# SPDX-License-Identifier: Apache-2.0
"""Builds the site that `make docs` leaves in build/site/html.

Stages docs/*.md, README.md, CHANGELOG.md and CONTRIBUTING.md, makes the pages of examples, ops and
Python names, and runs MkDocs over them. What MkDocs warns of, such as a link that leads nowhere, is
a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

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


def api_page(title: str, module: str, names: list[str]) -> str:
    """Returns a page of directives for mkdocstrings, one for each public name."""
    directives = [f"::: {module}.{name}\n" for name in names]
    return "\n".join([f"# {title}\n", f"`import {module}` gives these names.\n", *directives])


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
    names = [name for name in fastamp.__all__ if name not in NOT_ON_A_PAGE | MODULE_PAGES.keys()]
    write("api_python.md", api_page("Python", "fastamp", names))
    for module, title in MODULE_PAGES.items():
        public = [name for name in getattr(fastamp, module).__all__ if name not in NOT_ON_A_PAGE]
        write(f"api_{module}.md", api_page(title, f"fastamp.{module}", public))


def take_roles_out(folder: Path) -> None:
    """Leaves of roles in docstrings what they name, in pages and in what search finds."""
    for path in (*folder.rglob("*.html"), *folder.rglob("search_index.js*")):
        text = path.read_text(encoding="utf-8")
        plain = ROLE.sub(r"\1", text)
        if plain != text:
            path.write_text(plain, encoding="utf-8")


def main() -> int:
    """Returns MkDocs' exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--serve", action="store_true", help="show it at a local address")
    options = parser.parse_args()
    stage(SITE / "pages")
    command = [sys.executable, "-m", "mkdocs", "serve" if options.serve else "build", "--strict"]
    # The theme's maintainers announce the end of its life in 2027 at each run, and how to be quiet.
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if status == 0 and not options.serve:
        take_roles_out(SITE / "html")
        print("the site is in build/site/html/index.html")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
