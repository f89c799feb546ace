# SPDX-License-Identifier: Apache-2.0
"""Checks that what is declared in x.h, or in x_impl.h, is defined in x.cpp.

Checks free functions and members of classes in the headers of src and python/csrc that are neither
inline nor templates. Functions are known by their qualified names; the source must define as
many overloads as the header declares. A file whose declarations look alike is reported.
What is elsewhere for a reason is listed in a table; an entry that is not needed is an error.

Headers of src and python/csrc have names of their own, but for the parts of one kernel, which lie
in the folders of src/kernels.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tracked_files import ROOT, report, tracked_files

# Header -> its functions that are defined, for good, in a source of another name.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    # The parts that module.cpp puts together, a source each.
    "python/csrc/bindings.h": (
        "python::bind_cast_node",
        "python::bind_clear_cache",
        "python::bind_convert",
        "python::bind_float8",
        "python::bind_gradients",
        "python::bind_held_state",
        "python::bind_kept_casts",
        "python::bind_moment_codes",
        "python::bind_optim",
        "python::bind_policy",
        "python::bind_ranges",
        "python::bind_scaler",
        "python::bind_amp_step",
        "python::bind_trace",
        "python::add_region_type",
        "python::add_torch_region_functions",
        "python::add_mirror_type",
        "python::add_optimizer_hook",
    ),
    # What autocast asks of src/float8, which is built upon it.
    "src/autocast/float8_interface.h": (
        "autocast::thread_float8_slow",
        "autocast::set_thread_float8_slow",
        "autocast::float8_of_region",
        "autocast::check_float8_dtype",
        "autocast::float8_in_force_slow",
        "autocast::run_in_float8",
        "autocast::make_region_float8_casts",
        "autocast::is_empty",
        "autocast::clear_float8_casts",
        "autocast::forget_float8_casts",
        "autocast::drop_kept_float8_casts",
        "autocast::count_kept_float8_casts",
    ),
    # A kernel for each device.
    "src/kernels/amp_args.h": (
        "kernels::unscale_and_check_cpu",
        "kernels::unscale_and_check_cuda",
        "kernels::norm_and_check_cpu",
        "kernels::norm_and_check_cuda",
        "kernels::update_scale_cpu",
        "kernels::update_scale_cuda",
    ),
    "src/kernels/exponents.h": (
        "kernels::count_exponents_cpu",
        "kernels::count_exponents_cuda",
    ),
    "src/kernels/fused_steps.h": (
        "kernels::fused_sgd_cpu",
        "kernels::fused_sgd_cuda",
        "kernels::fused_adamw_cpu",
        "kernels::fused_adamw_cuda",
    ),
    "src/kernels/muon.h": (
        "kernels::muon_momentum_cpu",
        "kernels::muon_momentum_cuda",
        "kernels::muon_apply_cpu",
        "kernels::muon_apply_cuda",
    ),
    # The checks of an op are beside the op.
    "src/ops/checks.h": (
        "ops::check_unscale",
        "ops::check_norm",
        "ops::check_fused_sgd",
        "ops::check_fused_adamw",
        "ops::check_muon_momentum",
        "ops::check_muon_apply",
    ),
    # Needs CUDA's headers.
}

# The same, to be moved.
TO_BE_MOVED: dict[str, tuple[str, ...]] = {}

# Comments, strings and characters; preprocessor lines likewise.
NOISE = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"\((?:.*?)\)"|"(?:\\.|[^"\\\n])*"'
    r"|(?<!\w)'(?:\\.|[^'\\\n])+'|^[ \t]*\#(?:\\\n|[^\n])*",
    re.DOTALL | re.MULTILINE,
)
ATTRIBUTE = re.compile(r"\[\[.*?\]\]|__attribute__\s*\(\(.*?\)\)|alignas\s*\(.*?\)", re.DOTALL)
ACCESS = re.compile(r"^(?:\s*(?:public|private|protected)\s*:(?!:))+")
GROUP = re.compile(r"^(?:inline\s+)?(namespace|class|struct|union|enum|extern)\b([^()=]*)$")
OPERATOR = re.compile(r"\boperator\s*(\(\)|\[\]|[^\w\s(]+)")
CONVERSION = re.compile(r"\boperator\s+([\w:]+[\s&*]*)\(")
TEMPLATE_ARGUMENTS = re.compile(r"<[^<>;{}]*>")
# The text before a name, and the name, if parameters follow it.
NAMED_LIST = re.compile(
    r"((?:(?:virtual|explicit|FASTAMP_API)\s+)*[^(]*?)(~?\w+(?:\s*::\s*~?\w+)*)\s*\("
)
DECLTYPE = re.compile(r"\bdecltype\s*\((?:[^()]|\([^()]*\))*\)")
REQUIRES = re.compile(r"^\s*requires\b[^{};]*?\)\s*(?=\w)")
BRACE = re.compile(r"[{}]")
UNNAMED = "(unnamed)"
NO_FUNCTION = re.compile(r"^(using|typedef|friend|static_assert|extern\s+template|return)\b")


@dataclass(frozen=True)
class Function:
    """A function that a file declares or defines.

    Attributes:
        name: With its namespaces and classes.
        line: Where it begins.
        defined: Whether its body is here.
        exempt: Whether it may be defined in a header: inline, a template, deleted or pure.
    """

    name: str
    line: int
    defined: bool
    exempt: bool


@dataclass(frozen=True)
class Scope:
    """Place where a declaration stands.

    Attributes:
        path: The names of the namespaces and classes around it.
        is_class: Whether the innermost is a class.
        exempt: Whether one of them is a template.
    """

    path: tuple[str, ...] = ()
    is_class: bool = False
    exempt: bool = False


class UnreadableError(Exception):
    """A file is not understood."""


def cleaned(head: str) -> tuple[str, bool]:
    """Returns a head without attributes and template parameters, and whether it had the latter."""
    head = ACCESS.sub("", ATTRIBUTE.sub("", head)).strip()
    template = head.startswith("template")
    while head.startswith("template"):
        depth = 0
        for at, char in enumerate(head):
            depth += (char == "<") - (char == ">" and head[at - 1] != "-")
            if char == ">" and not depth:
                head = REQUIRES.sub("", head[at + 1 :]).strip()
                break
        else:
            break
    return head, template


def initialises(head: str) -> bool:
    """Whether a brace after this text begins a value: of a variable, or of a member."""
    bare, _ = cleaned(head)
    if re.search(r"(?<![=!<>])=\s*[\w:]*$|\breturn$", bare):
        return True
    if GROUP.match(bare) or not bare:
        return False
    if "(" not in bare:
        return True  # int x{1};
    in_list = re.search(r"\)[^:()]*(?<!:):(?!:)", bare) is not None
    return in_list and re.search(r"[\w>]$", bare) is not None


def function_name(head: str, owner: str) -> str | None:
    """Returns the name that a head declares, as it is written, if it is a function's.

    Raises:
        UnreadableError: It is not known what the head declares.
    """
    head = DECLTYPE.sub("auto", head)
    head = OPERATOR.sub(lambda m: "operator_" + "_".join(str(ord(c)) for c in m[1]), head)
    head = CONVERSION.sub("operator_conversion(", head)
    while (shorter := TEMPLATE_ARGUMENTS.sub("", head)) != head:
        head = shorter
    if "(" not in head or NO_FUNCTION.search(head) or "=" in head.partition("(")[0]:
        return None
    if re.match(r"[^(]*\(\s*\*", head):  # A pointer to a function.
        return None
    match = NAMED_LIST.match(head)
    if match is None:
        raise UnreadableError(f"what does {' '.join(head.split())[:60]!r} declare?")
    name = re.sub(r"\s", "", match[2])
    parts = name.split("::")
    constructs = parts[-1].lstrip("~") == (parts[-2] if len(parts) > 1 else owner)
    if match[1].strip() or constructs or "operator_conversion" in name:
        return name
    if re.fullmatch(r"[A-Z][A-Z0-9_]*", name):  # A macro.
        return None
    raise UnreadableError(f"{name} has no type")


class Reader:
    """Reads the functions of one file."""

    def __init__(self, source: str) -> None:
        """Takes the text of a file."""
        self._text = NOISE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source)
        self._at = 0
        self._first = 0  # Where the declaration at hand begins.
        self._functions: list[Function] = []

    def read(self) -> list[Function]:
        """Returns all functions.

        Raises:
            UnreadableError: Braces or parentheses do not match, or a declaration is not understood.
        """
        try:
            self._read_scope(Scope())
            if self._at < len(self._text):
                raise UnreadableError("a brace too many")
        except UnreadableError as error:
            raise UnreadableError(f"line {self._line()}: {error}") from None
        return self._functions

    def _line(self) -> int:
        return self._text.count("\n", 0, self._first) + 1

    def _skip_block(self) -> None:
        """Goes past the brace that closes the one just passed."""
        depth = 1
        while depth:
            match = BRACE.search(self._text, self._at)
            if match is None:
                raise UnreadableError("a brace is not closed")
            depth += 1 if match[0] == "{" else -1
            self._at = match.end()

    def _read_scope(self, scope: Scope) -> None:
        """Reads declarations up to the brace that closes the scope, or to the end."""
        head, depth = "", 0
        while self._at < len(self._text):
            char = self._text[self._at]
            if not head.strip():
                self._first = self._at
            if char == "}" and not depth:
                break
            self._at += 1
            depth += (char in "([") - (char in ")]")
            if char == "{" and (depth or initialises(head)):
                self._skip_block()
                head += "{}"
            elif char == "{":
                head = self._read_block(head, scope)
            elif char == ";" and not depth:
                self._declare(head, scope, body=False)
                head = ""
            else:
                head += char
        if cleaned(head)[0]:
            raise UnreadableError(f"{' '.join(head.split())[:60]!r} has no end")

    def _read_block(self, head: str, scope: Scope) -> str:
        """Reads a block behind its brace; returns the head that goes on after it."""
        bare, template = cleaned(head)
        group = GROUP.match(bare)
        if group is None:
            self._declare(head, scope, body=True)
            self._skip_block()
            return ""
        kind, rest = group[1], group[2]
        if kind == "enum":
            self._skip_block()
            return "enum "
        words = re.sub(r"(?<!:):(?!:).*", "", rest, flags=re.DOTALL).replace("::", " ").split()
        names = [word for word in words if word not in ("final", "FASTAMP_API")] or [UNNAMED]
        is_class = kind not in ("namespace", "extern")
        path = scope.path if kind == "extern" else (*scope.path, *names)
        self._read_scope(Scope(path, is_class, scope.exempt or template))
        if self._at >= len(self._text):
            raise UnreadableError("a brace is not closed")
        self._at += 1
        return "struct " if is_class else ""

    def _declare(self, head: str, scope: Scope, *, body: bool) -> None:
        bare, template = cleaned(head)
        name = function_name(bare, scope.path[-1] if scope.is_class else "")
        if name is None:
            return
        ending = re.search(r"=\s*(default|delete|0)$", bare)
        how = ending[1] if ending else ""
        exempt = scope.exempt or template or how in ("delete", "0")
        self._functions.append(
            Function(
                "::".join((*scope.path, name)),
                self._line(),
                body or how == "default",
                exempt or re.search(r"\b(inline|constexpr)\b", bare) is not None,
            )
        )


def functions_of(path: Path) -> list[Function]:
    """Returns the functions of a file, those of unnamed namespaces left out."""
    found = Reader(path.read_text(encoding="utf-8")).read()
    return [function for function in found if UNNAMED not in function.name]


def in_scope(relative: Path) -> bool:
    """Whether a file is one of those that the rule is for."""
    return relative.parts[0] == "src" or relative.parts[:2] == ("python", "csrc")


def homeless(
    header: list[Function], own: list[list[Function]], others: dict[str, list[str]]
) -> Iterator[tuple[int, str, str]]:
    """Yields line, name and whereabouts of what a header declares and its sources do not define."""
    here = Counter(function.name for function in header if function.defined)
    for functions in own:
        here.update(function.name for function in functions if function.defined)
    declared = [function for function in header if not function.defined and not function.exempt]
    for function in declared:
        here[function.name] -= 1
        if here[function.name] < 0:
            yield function.line, function.name, ", ".join(others.get(function.name, ["no source"]))


def check(root: Path, elsewhere: dict[str, tuple[str, ...]] | None = None) -> list[str]:
    """Returns one line, "path:line: problem", for each function below root that is not at home."""
    allowed = ELSEWHERE | TO_BE_MOVED if elsewhere is None else elsewhere
    found, files = [], {}
    for path in tracked_files(root, ".h", ".cpp", ".cu"):
        relative = path.relative_to(root)
        if in_scope(relative):
            try:
                files[relative] = functions_of(path)
            except UnreadableError as error:
                found.append(f"{relative}: cannot be read: {error}")
    sources = defaultdict(list)
    for relative, functions in files.items():
        for function in functions:
            if function.defined and relative.suffix != ".h":
                sources[function.name].append(str(relative))
    used = set()
    for relative in (name for name in files if name.suffix == ".h"):
        stem = relative.stem.removesuffix("_impl")
        homes = [relative.with_name(stem + end) for end in (".cpp", ".cu")]
        own = [files[home] for home in homes if home in files]
        for line, name, where in homeless(files[relative], own, sources):
            short = name.removeprefix("fastamp::")
            if short in allowed.get(str(relative), ()):
                used.add((str(relative), short))
            else:
                found.append(f"{relative}:{line}: {short} is defined in {where}")
    for header, names in allowed.items():
        for name in names:
            if (header, name) not in used:
                found.append(f"tools/check_homes.py: {name} of {header} is at home: strike it out")
    return [*found, *same_names(root)]


def same_names(root: Path) -> Iterator[str]:
    """Yields a line for each header that has the name of another one, of another idea."""
    kernels = Path("src/kernels")
    found: dict[str, dict[Path, Path]] = defaultdict(dict)
    for path in tracked_files(root, ".h", ".cuh"):
        relative = path.relative_to(root)
        if in_scope(relative):
            idea = kernels if kernels in relative.parents else relative
            found[relative.name].setdefault(idea, relative)
    for name, ideas in found.items():
        if len(ideas) > 1:
            yield f"{name}: headers of one name: {', '.join(map(str, ideas.values()))}"


if __name__ == "__main__":
    sys.exit(report(check(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)))
