# SPDX-License-Identifier: Apache-2.0
"""Records a run of `make gpu`: one JSON per stage, and a summary, whole at any moment.

A run belongs to a tree and a GPU. What another run left is moved aside, never mixed in.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tracked_files import tracked_files

PASSED, FAILED, SKIPPED, TOO_LONG = "passed", "FAILED", "skipped", "TOO LONG"
# While a stage runs; found at the start of another run, it was cut off: not even that was recorded.
RUNNING, CUT_OFF, INTERRUPTED = "running", "CUT OFF", "INTERRUPTED"
NOT_RUN = "not run"

# What a run is of: not documents, nor what the last stage writes.
_SOURCES = ("benchmarks", "cmake", "examples", "include", "python", "src", "tests", "tools")
_FILES = ("CMakeLists.txt", "VERSION", "pyproject.toml")
_MADE = re.compile(
    r"^benchmarks/results/|^python/fastamp/(include|lib|share)/|(^|/)(__pycache__|build_info\.json)"
    r"|\.so$|\.egg-info/"
)
# Lines of logs that say what was left out: of our tools, of pytest, of benchmarks.
_LEFT_OUT = re.compile(
    r"^(?:-- )?left out: (?P<own>.+)$"
    r"|^SKIPPED \[\d+\] (?P<pytest>\S+: .*(?:not installed|could not import).*)$"
    r"|^(?P<row>.+: not measured: .+)$"
)


@dataclass
class Outcome:
    """Outcome of a stage.

    Attributes:
        stage: Its name.
        status: ``passed`` or another of the words above.
        seconds: How long it took.
        last: The last line it printed, or why it did not run.
        left_out: What it could not run, and why.
    """

    stage: str
    status: str
    seconds: float
    last: str
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Identity:
    """Identity of a run: the commit (for readers), a digest of the sources, and the GPU."""

    commit: str
    tree: str
    gpu: str


def identify(root: Path, gpu: str) -> Identity:
    """Returns the identity of a run in this tree, which need not be a git checkout."""
    digest = hashlib.sha256()
    for path in tracked_files(root):
        name = path.relative_to(root).as_posix()
        if (name.partition("/")[0] in _SOURCES or name in _FILES) and not _MADE.search(name):
            digest.update(f"{name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    git = ["git", "-C", str(root), "rev-parse", "--short=10", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return Identity(commit, digest.hexdigest()[:16], gpu)


def left_out_lines(log: str) -> list[str]:
    """Returns what a log says was left out, each once."""
    found = [
        match[match.lastgroup or 0] for match in map(_LEFT_OUT.match, log.splitlines()) if match
    ]
    return list(dict.fromkeys(found))


def write(path: Path, text: str) -> None:
    """Writes a file, whole or not at all."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


class Record:
    """The outcomes of a run, in a folder."""

    def __init__(self, folder: Path, identity: Identity, stages: Iterable[str], keep: bool) -> None:
        """Opens the record of a run.

        Args:
            folder: Where it is; what another run left there goes to ``<folder>-before``.
            identity: What is run now.
            stages: Their names, in order.
            keep: Whether outcomes of the same tree and GPU stay.
        """
        self.folder = folder
        self.identity = identity
        self._stages = list(stages)
        #: Why there is nothing that could be kept; "" if there is.
        self.why = "there is no earlier run"
        self._outcomes: dict[str, Outcome] = {}
        if (folder / "run.json").is_file():
            before = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            self.why = self._difference(before)
            if self.why or not keep:
                aside = folder.with_name(folder.name + "-before")
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "run.json").is_file():
            self._load()
        else:
            now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            write(folder / "run.json", json.dumps({**asdict(identity), "started": now}, indent=1))

    def _difference(self, before: dict[str, str]) -> str:
        return ", ".join(
            f"{name} was {before.get(name)}, is {now}"
            for name, now in asdict(self.identity).items()
            if name != "commit" and before.get(name) != now
        )

    def _load(self) -> None:
        for path in self.folder.glob("*.json"):
            document = json.loads(path.read_text(encoding="utf-8"))
            if "stage" in document and "status" in document:
                outcome = Outcome(**document)
                self._outcomes[outcome.stage] = outcome
        self.mark_running(CUT_OFF)

    def outcome(self, stage: str) -> Outcome:
        """Returns how a stage ended, also in an earlier run that this one goes on with."""
        return self._outcomes.get(stage, Outcome(stage, NOT_RUN, 0.0, ""))

    def mark_running(self, status: str) -> None:
        """Gives stages that seem to run this status: nothing runs any more."""
        for outcome in [one for one in self._outcomes.values() if one.status == RUNNING]:
            self.save(replace(outcome, status=status))

    def save(self, outcome: Outcome) -> None:
        """Writes down an outcome, and the summary of all stages."""
        self._outcomes[outcome.stage] = outcome
        text = json.dumps(asdict(outcome), indent=1) + "\n"
        write(self.folder / f"{outcome.stage}.json", text)
        write(self.folder / "summary.md", self.summary())
        found = [asdict(self.outcome(name)) for name in self._stages]
        document = {**asdict(self.identity), "stages": found}
        write(self.folder / "summary.json", json.dumps(document, indent=1) + "\n")

    def summary(self) -> str:
        """Returns a table of the stages, and what was left out and why."""
        found = [self.outcome(name) for name in self._stages]
        rows = [("stage", "status", "seconds", "last line"), ("---", "---", "---:", "---")]
        rows += [
            (one.stage, one.status, f"{one.seconds:.0f}", one.last.replace("|", "/")[:100])
            for one in found
        ]
        sizes = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            f"{self.identity.gpu}, commit {self.identity.commit}, tree {self.identity.tree}",
            "",
        ]
        for stage, status, seconds, last in rows:
            cells = [stage.ljust(sizes[0]), status.ljust(sizes[1]), seconds.rjust(sizes[2]), last]
            lines.append(f"| {' | '.join(cells)} |")
        missing = [f"- {one.stage}: {text}" for one in found for text in one.left_out]
        lines += ["", "Left out:" if missing else "Nothing was left out.", *missing]
        return "\n".join(lines) + "\n"
