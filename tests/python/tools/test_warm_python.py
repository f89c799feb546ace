# SPDX-License-Identifier: Apache-2.0
"""A forked program does what one of an interpreter of its own does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import warm_python
from support.children import check_python

SAYS = (
    "import sys, __main__; print(sys.argv, sys.path[:2], __name__, vars(__main__).get('__file__'))"
)
FILES = {
    "says.py": SAYS,
    "package/__init__.py": "",
    "package/__main__.py": SAYS,
    "package/part.py": f"{SAYS}\nprint(__spec__.name, __package__)",
    "raises.py": "def f():\n    raise ValueError('why')\n\nif __name__ == '__main__':\n    f()\n",
    "spawns.py": """
import multiprocessing
def work(value):
    return value + 1
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [1, 2]))
""",
}
AT_EXIT = """
import atexit, sys, threading, time
class Last:
    def __del__(self):
        print("destroyed", flush=True)
last = Last()
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
sys.stdout.write("not flushed\\n")
"""
FASTAMP = """
import sys
print({"fastamp", "pytest", "_pytest", "hypothesis", "warm_python", "suite_queue"} & {*sys.modules})
import torch, fastamp, os
with fastamp.autocast("cpu"):
    print(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype, os.environ["FASTAMP_PROBE"])
"""
COMMANDS: dict[str, list[str]] = {
    "code": ["-c", SAYS, "a", "-b"],
    "module": ["-m", "package", "a"],
    "module in a package": ["-m", "package.part", "-c"],
    "no module": ["-m", "nothing_of_this_name"],
    "file": ["says.py", "a", "b"],
    "file in a folder": ["package/part_of_nothing/../../says.py"],
    "error": ["raises.py"],
    "error in code": ["-c", "1 / 0"],
    "error in a module": ["-m", "raises"],
    "error of syntax": ["-c", "x ="],
    "status": ["-c", "raise SystemExit(7)"],
    "no status": ["-c", "raise SystemExit"],
    "text as status": ["-c", "import sys; sys.exit('the text')"],
    "left": ["-c", "import os; print(1, flush=True); os._exit(5)"],
    "signal": ["-c", "import os; os.kill(os.getpid(), 9)"],
    "aborts": ["-c", "import os; os.abort()"],
    "ends": ["-c", AT_EXIT],
    "error at exit": ["-c", "import atexit; atexit.register(lambda: 1 / 0)"],
    "closed output": ["-c", "import sys, os; print(1); os.close(1)"],
    "input": ["-c", "import sys; print(repr(sys.stdin.read()))"],
    "letters": ["-c", "import sys; print('\\u00e9'); print('\\u00e9', file=sys.stderr)"],
    "warning": ["-c", "import warnings; warnings.warn('w', DeprecationWarning, stacklevel=1)"],
    "spawns": ["spawns.py"],
    "fastamp": ["-c", FASTAMP],
}
DRIVER = """
import json, os, re, subprocess, sys
import pytest, torch
import warm_python
warm_python.begin()
environment = {**os.environ, "FASTAMP_PROBE": "0", "COLUMNS": "70", "PYTEST_CURRENT_TEST": "x",
               "TORCHINDUCTOR_CACHE_DIR": "x"}
def outcome(done):
    return done.returncode, done.stdout, re.sub("0x[0-9a-f]+", "0x", done.stderr)
found = {}
for name, command in json.loads(sys.argv[1]).items():
    assert warm_python.can_run(command, environment)
    forked = warm_python.run(command, environment, os.getcwd(), 300)
    started = subprocess.run(
        [sys.executable, *command], env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True,
    )
    found[name] = outcome(forked), outcome(started)
assert not warm_python.can_run(["-W", "error", "-c", ""], environment)
assert not warm_python.can_run(["-c", ""], {**environment, "OMP_NUM_THREADS": "3"})
try:
    warm_python.run(["-c", "import time; time.sleep(1000)"], environment, os.getcwd(), 0.5)
except subprocess.TimeoutExpired:
    found["too long"] = warm_python.run(["-c", "print(1)"], environment, os.getcwd(), 300).stdout
warm_python.end()
assert not warm_python.can_run(["-c", ""], environment)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("programs")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "package" / "part_of_nothing").mkdir()
    driver = Path(warm_python.__file__).parent
    program = f"import os, sys\nsys.path[0] = {str(driver)!r}\nos.chdir({str(folder)!r})\n{DRIVER}"
    return dict(json.loads(check_python("-c", program, json.dumps(COMMANDS)).splitlines()[-1]))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_program_does_what_it_does_by_itself(found: dict[str, Any], name: str):
    forked, started = found[name]
    assert forked == started


def test_these_are_no_programs_that_do_nothing(found: dict[str, Any]):
    assert found["fastamp"][0] == [0, "set()\ntorch.bfloat16 0\n", ""]
    assert found["ends"][0] == [0, "not flushed\nthread\nat exit\ndestroyed\n", ""]
    assert [found[name][0][0] for name in ("status", "signal", "aborts")] == [7, -9, -6]


def test_one_that_takes_too_long_is_ended(found: dict[str, Any]):
    assert found["too long"] == "1\n"
