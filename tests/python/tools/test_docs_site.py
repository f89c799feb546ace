# SPDX-License-Identifier: Apache-2.0
"""The site: links that stay within it, the page of ops, and MkDocs' own verdict."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastamp

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "tools"
sys.path.insert(0, str(TOOLS))

from docs_ops import ops_reference, versions_of  # noqa: E402
from docs_site import (  # noqa: E402
    BY_USE,
    MODULE_PAGES,
    NOT_ON_A_PAGE,
    finish,
    linked_guides,
    mended_table,
    relink,
    site_target,
    stage,
    summary_of,
    version_of_site,
    wrapped_output,
)
from torch_ops import autocast_ops  # noqa: E402

LISTS = json.loads((ROOT / "docs" / "site" / "torch_ops.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "folder", "wanted"),
    [
        ("see [it](docs/cpp.md#regions).", "", "see [it](cpp.md#regions)."),
        ("see [it](../README.md#install)", "docs", "see [it](readme.md#install)"),
        ("![plot](plots/x.svg)", "docs", "![plot](plots/x.svg)"),
        ("[a](cpp.md) [b](../CHANGELOG.md)", "docs", "[a](cpp.md) [b](changelog.md)"),
        ("[cnn.cpp](examples/cpp/cnn.cpp)", "", "[cnn.cpp](examples.md#cnncpp)"),
        ("[raw](../benchmarks/results) data", "docs", "raw data"),
        ("[web](https://pytorch.org)", "docs", "[web](https://pytorch.org)"),
        ("[here](#top)", "docs", "[here](#top)"),
        ("```md\n[a](../README.md)\n```", "docs", "```md\n[a](../README.md)\n```"),
    ],
)
def test_links_stay_within_the_site(text: str, folder: str, wanted: str):
    if "x.svg" in text:
        plot = next((ROOT / "docs" / "plots").glob("*.svg")).name
        text, wanted = text.replace("x.svg", plot), wanted.replace("x.svg", plot)
    assert relink(text, folder) == wanted


def test_a_link_that_leads_nowhere_is_left_for_mkdocs_to_find():
    assert relink("[a](no_such.md)", "docs") == "[a](no_such.md)"


def test_marks_of_docstrings_are_taken_out_of_pages(tmp_path: Path):
    page = tmp_path / "cpp" / "x.html"
    page.parent.mkdir()
    marks = "see :meth:<code>~fastamp.trace</code>, 10:30 <code>:x:</code>"
    page.write_text(f"{marks}<p>::</p><p>so::</p><p>a::b</p>")
    docs = [
        {"location": "optim.html", "text": "as :class:<code>Rows</code>"},
        {"location": "cpp/sgd_8h.html", "text": "SGD"},
        {"location": "cpp/sgd_8h_source.html", "text": "class SGD"},
    ]
    text = json.dumps({"config": {}, "docs": docs})
    (tmp_path / "search_index.json").write_text(text)
    (tmp_path / "search_index.js").write_text(f"var __index = {text}")
    finish(tmp_path)
    wanted = "see <code>fastamp.trace</code>, 10:30 <code>:x:</code><p>so:</p><p>a::b</p>"
    assert page.read_text() == wanted
    index = json.loads((tmp_path / "search_index.json").read_text())["docs"]
    assert index == [
        {"location": "optim.html", "text": "as <code>Rows</code>"},
        {"location": "cpp/sgd_8h.html", "text": "SGD", "boost": 0.001},
    ]
    script = (tmp_path / "search_index.js").read_text()
    assert json.loads(script.removeprefix("var __index = "))["docs"] == index


def table(*rows: list[str]) -> str:
    head, *body = ("".join(f"<{tag}>{cell}</{tag}>" for cell in row) for tag, row in rows)
    lines = "".join(f"<tr>{line}</tr>" for line in body)
    return f"<table>\n<thead>\n<tr>{head}</tr>\n</thead>\n<tbody>{lines}</tbody>\n</table>"


def test_tables_with_names_of_tests_or_with_sentences_are_marked():
    sentence = "A sentence that is long enough to be read line by line on a phone. " * 2
    plain = table(("th", ["Op", "CPU", "CUDA"]), ("td", ["mm", "lower", "lower"]))
    assert mended_table(plain) == plain
    stacked = mended_table(table(("th", ["A", "B", "C"]), ("td", [sentence, "<code>x</code>", ""])))
    assert stacked.startswith("<table data-stacked>")
    assert '<td data-label="B"><code>x</code></td><td data-label="C"></td>' in stacked
    name = "<code>test_a.py::test_it</code>"
    tests = mended_table(table(("th", ["Difference", "Test"]), ("td", ["it_s", name])))
    assert tests.startswith("<table data-tests>")
    assert '<td data-label="Difference">it_s</td>' in tests
    assert "<code>test_<wbr>a.py::<wbr>test_<wbr>it</code>" in tests


def test_outputs_of_sentences_are_wrapped_and_those_of_columns_are_not():
    long = "cause: " + "word " * 30
    assert "<pre data-wrapped>" in wrapped_output(f"<pre><code>$ check\n{long}</code></pre>")
    for lines in (f"{long}", f"$ check\n{long}\nop    dtype", "$ check\nshort"):
        text = f"<pre><code>{lines}</code></pre>"
        assert wrapped_output(text) == text


def test_guides_that_docstrings_name_are_linked():
    text = '<p>see docs/optim.md.</p><pre>docs/optim.md</pre><a href="x">docs/optim.md</a>'
    wanted = '<p>see <a href="optim.html">docs/optim.md</a>.</p>'
    assert linked_guides(text) == text.replace("<p>see docs/optim.md.</p>", wanted)


def test_which_files_have_pages():
    assert site_target("docs/optim.md") == "optim.md"
    assert site_target("docs/home.md") == "index.md"
    assert site_target("examples/python/gpt2.py") == "examples.md#gpt2py"
    assert site_target("src/library.cpp") is None


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "pages"
    stage(folder)
    return folder


def test_no_page_links_to_a_page_that_is_not_there(pages: Path):
    there = {path.relative_to(pages).as_posix() for path in pages.rglob("*")}
    for page in pages.glob("*.md"):
        text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        text = re.sub(r"`[^`\n]*`", "", text)
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            assert "://" in target or target in there, (page.name, target)


def test_every_page_is_in_the_navigation(pages: Path):
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = set(re.findall(r"(\S+\.md)$", navigation, re.MULTILINE))
    assert listed - {"cpp/annotated.md"} == {page.name for page in pages.glob("*.md")}


def test_the_reference_names_everything_that_is_public(pages: Path):
    text = (pages / "api_python.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^::: fastamp\.(\w+)$", text, re.MULTILINE))
    modules = {name for name in fastamp.__all__ if inspect.ismodule(getattr(fastamp, name))}
    assert named == set(fastamp.__all__) - modules - {"__version__"}
    assert modules == MODULE_PAGES.keys() | {"amp", "cpu"}
    for module in MODULE_PAGES:
        text = (pages / f"api_{module}.md").read_text(encoding="utf-8")
        directives = re.findall(rf"^::: fastamp\.{module}\.(\w+)$", text, re.MULTILINE)
        public = set(getattr(fastamp, module).__all__) - NOT_ON_A_PAGE
        assert len(directives) == len(public)
        assert set(directives) == public
        rows = re.findall(
            rf"^\| \[`(\w+)`\]\(#fastamp\.{module}\.\1\) \| .+ \|$", text, re.MULTILINE
        )
        assert rows == directives  # a summary of each, in the same order


def test_pages_begin_with_what_programs_use_first(pages: Path):
    for module, names in BY_USE.items():
        home = getattr(fastamp, module) if module else fastamp
        assert set(names.split()) <= set(home.__all__)
        text = (pages / f"api_{module or 'python'}.md").read_text(encoding="utf-8")
        assert (
            re.findall(r"^::: fastamp\.(?:\w+\.)?(\w+)$", text, re.MULTILINE)[: len(names.split())]
            == names.split()
        )


def test_summaries_are_first_sentences_without_roles():
    def documented() -> None:
        """Casts by :func:`~fastamp.autocast`, or
        not, ``a | b``.

        More.
        """

    assert summary_of(documented) == r"Casts by `fastamp.autocast`, or not, `a \| b`."


def test_the_list_of_this_torch_is_what_it_registers():
    version = torch.__version__.partition("+")[0]
    if version not in LISTS:
        pytest.skip(f"no list of torch {version} is stored: run tools/torch_ops.py with it")
    # Libraries that other tests have imported (torchvision) register ops of their own.
    for device in ("cpu", "cuda"):
        beyond_torch = {"_transformer_encoder_layer_fwd"} if device == "cpu" else set()
        of_aten = [name for name in autocast_ops(device) if "::" not in name]
        found = [name for name in of_aten if name not in beyond_torch]
        assert found == [name for name in LISTS[version][device] if "::" not in name]


def test_the_page_of_ops_has_a_line_for_each_op():
    page = ops_reference(LISTS)
    lines = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", page, re.MULTILINE))
    rows = {row.op: row for row in fastamp.policies.table()}
    assert set(rows) <= set(lines)
    policies = {policy for row in rows.values() for policy in (row.cpu_default, row.cuda_default)}
    assert policies <= set(lines)  # what they mean stands above
    assert lines["linear"] == "lower | lower | all | all"
    assert lines["pow.Tensor_Scalar"].startswith(f"{rows['pow.Tensor_Scalar'].cpu_default} | fp32")


def test_which_versions_autocast_an_op():
    lists = {"1.0": {"cpu": ["a", "b"]}, "2.0": {"cpu": ["a"]}}
    assert [versions_of(op, "cpu", lists) for op in "abc"] == ["all", "1.0", "."]


needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdoxy") is None or shutil.which("doxygen") is None,
    reason="needs the docs extra and doxygen",
)


@pytest.mark.slow
@needs_mkdocs
def test_the_site_is_built_without_a_warning():
    run = subprocess.run(
        [sys.executable, TOOLS / "docs_site.py"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "WARNING" not in run.stdout + run.stderr
    html = ROOT / "build" / "site" / "html"
    assert "fastamp.autocast" in (html / "api_python.html").read_text(encoding="utf-8")
    assert "GradScaler" in (html / "cpp" / "annotated.html").read_text(encoding="utf-8")
    index = (html / "search" / "search_index.js").read_text(encoding="utf-8")
    assert "_source.html" not in index  # The pages were mended after search had been written.


@pytest.mark.slow
@needs_mkdocs
def test_a_release_stands_beside_the_sites_of_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In a branch of another repository, made here with the site of a version before."""

    def git(*arguments: str) -> str:
        return subprocess.check_output(["git", *arguments], cwd=tmp_path, text=True)

    git("init", "-q", "-b", "gh-pages")
    git("config", "user.name", "a")
    git("config", "user.email", "a@example.org")
    earlier = [{"version": "0.0", "title": "0.0", "aliases": ["latest"]}]
    (tmp_path / "versions.json").write_text(json.dumps(earlier))
    for folder in ("0.0", "latest"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "index.html").write_text("of 0.0")
    git("add", ".")
    git("commit", "-q", "-m", "0.0")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    run = subprocess.run(
        [sys.executable, TOOLS / "docs_site.py", "--release"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    versions = json.loads(git("show", "gh-pages:versions.json"))
    found = {entry["version"]: entry["aliases"] for entry in versions}
    assert found == {version_of_site(): ["latest"], "0.0": []}
    assert git("show", "gh-pages:0.0/index.html") == "of 0.0"
    assert "fastamp.autocast" in git("show", f"gh-pages:{version_of_site()}/api_python.html")
    assert "latest" in git("show", "gh-pages:index.html")
