# SPDX-License-Identifier: Apache-2.0
"""A fault of a tool ends in one warning; the program under it goes on, with the same numbers."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import nn, overrides
from torch.utils import _python_dispatch

import fastamp
from fastamp._debug.bisect.suspects import Suspects
from fastamp._debug.check.op_rules import OpRules
from fastamp._debug.check.step_rules import StepRules
from fastamp._debug.inspect.inspect_report import InspectReport
from fastamp._debug.inspect.inspect_rows import Rows
from fastamp._debug.inspect.inspected_step import InspectedStep
from fastamp._debug.watch.model_names import ModelNames
from fastamp._debug.watch.modules import ModulePath
from fastamp._debug.watch.op_calls import OpWatcher, watched_thread
from fastamp._util.tool_guard import ToolGuard
from support.children import run_program

PROGRAM = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for step in range(3):
    x = torch.full((4, 8), float(step + 1))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), torch.arange(4))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(step, [round(p.double().sum().item(), 9) for p in model.parameters()])
"""

# Runs the command in a process in which a function of a tool's is broken.
BROKEN = """
import importlib, sys
import fastamp._cli
place, command = sys.argv[1], sys.argv[2:]
module, _, name = place.partition(":")
owner = importlib.import_module(module)
*path, name = name.split(".")
for part in path:
    owner = getattr(owner, part)
def broken(*args, **kwargs):
    raise KeyError("a planted fault")
setattr(owner, name, broken)
sys.argv = ["fastamp", *command]
fastamp._cli.main()
"""


def run(tmp_path, place, *command):
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "broken.py").write_text(BROKEN)
    first = ["broken.py", place] if place else ["-m", "fastamp"]
    return run_program(*first, *command, cwd=tmp_path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run(tmp_path_factory.mktemp("plain"), "", "train.py").stdout


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("fastamp._debug.inspect.inspected_step:InspectedStep.report", ["--inspect", "s.html"]),
        ("fastamp._debug.check.op_rules:OpRules.after", ["--inspect", "s.html", "--at-step", "1"]),
        ("fastamp._debug.watch.modules:ModulePath._label", ["--inspect", "s.html"]),
        ("fastamp._cli.output_file:OutputFile.put", ["--inspect", "-"]),
        ("fastamp._cli.output_file:OutputFile.put", ["--report", "t.json"]),
        ("fastamp._debug.trace:trace.__str__", ["--report", "t.txt"]),
    ],
)
def test_an_option_that_fails_warns_and_the_program_goes_on(plain, place, options, tmp_path):
    done = run(tmp_path, place, *options, "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain
    assert done.stderr.count("This is a fault of fastamp") == 1
    assert "python -m fastamp info" in done.stderr
    assert "KeyError: 'a planted fault'" in done.stderr


@pytest.mark.parametrize(
    "place",
    [
        "fastamp._debug.check.step_rules:StepRules.see",
        "fastamp._debug.check.order_rules:OrderRules.after_backward",
        "fastamp._debug.watch.origins:Origins.see",
        "fastamp._debug.watch.scaled_gradients:ScaledGradients.after_backward",
        "fastamp._debug.check.step_rules:StepRules.conclude",
        "fastamp._debug.check.model_rules:_look_at_model",
    ],
)
def test_check_that_fails_warns_and_tells_what_it_has(plain, place, tmp_path):
    done = run(tmp_path, place, "check", "--steps", "0", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(plain)
    assert done.stdout.endswith("0 findings\n")
    assert done.stderr.count("This is a fault of fastamp") == 1
    assert "KeyError: 'a planted fault'" in done.stderr


class Step:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = fastamp.GradScaler("cpu", init_scale=16.0)
        self.x = torch.randn(6, 8)

    def __call__(self):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(self.model(self.x), torch.arange(6) % 4)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def weights(self):
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def broken(*_, **__):
    raise KeyError("a planted fault")


@pytest.mark.parametrize("tool", [fastamp.debug.check, fastamp.debug.inspect])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (OpRules, "before"),
        (StepRules, "before_backward"),
        (ModulePath, "_enter"),
        (ModulePath, "add"),
        (Rows, "add"),
        (InspectedStep, "after_optimizer_step"),
        (InspectedStep, "report"),
    ],
)
def test_a_function_that_fails_warns_and_returns_what_it_has(monkeypatch, tool, owner, name):
    expected = Step()
    expected()
    step = Step()
    monkeypatch.setattr(owner, name, broken)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if tool is fastamp.debug.check:
            report = fastamp.debug.check(step.model, step.optimizer, step.scaler, step=step)
        else:
            report = fastamp.debug.inspect(step, step.model, step.optimizer, step.scaler)
        assert str(report)
    assert all(map(torch.equal, step.weights(), expected.weights()))
    faults = [each for each in warned if "This is a fault of fastamp" in str(each.message)]
    is_used = tool is fastamp.debug.inspect or owner not in (Rows, InspectedStep)
    assert len(faults) == is_used
    assert all("a planted fault" in str(each.message) for each in faults)


@pytest.mark.parametrize("name", ["_errors", "_scales"])
def test_a_table_that_fails_is_left_out(monkeypatch, name):
    from fastamp._debug.inspect import inspect_sections

    step = Step()
    report = fastamp.debug.inspect(step, step.model, step.optimizer, step.scaler)
    monkeypatch.setattr(inspect_sections, name, broken)
    monkeypatch.setattr(InspectReport, "summary", broken)
    with pytest.warns(
        RuntimeWarning, match="a table of fastamp.debug.inspect failed and is left out"
    ):
        text = str(report)
    assert "Ops: what ran" in text
    with pytest.warns(RuntimeWarning, match="left out"):
        assert "Weights: what the step changed" in report.to_html()


def test_what_the_program_raises_passes_unchanged():
    step = Step()
    with pytest.raises(IndexError) as raised:
        fastamp.debug.inspect(
            lambda: nn.functional.embedding(torch.tensor([9]), torch.ones(2, 2)), step.model
        )
    assert "index out of range" in str(raised.value)


def test_warnings_that_are_errors_do_not_end_the_program(capsys):
    guard = ToolGuard("a tool")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert guard.run(broken, default=3) == 3
        assert guard.run(lambda: 4, default=3) == 3  # off
        assert guard.run_always(lambda: 4) == 4
    assert "a tool failed and is off" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupts_and_exits_pass(error):
    def leaves():
        raise error

    guard = ToolGuard("a tool")
    with pytest.raises(error):
        guard.run(leaves)
    assert not guard.is_off


def test_a_bisection_is_its_own_program_and_raises(monkeypatch):
    monkeypatch.setattr(Suspects, "before", broken)
    step = Step()

    def forward_and_backward():
        with torch.autocast("cpu", dtype=torch.float16):
            loss = step.model(step.x).float().sum()
        loss.backward()

    with pytest.raises(KeyError, match="a planted fault"):
        fastamp.debug.bisect(forward_and_backward, step.model)


def test_a_log_that_fails_warns_and_the_training_goes_on(monkeypatch):
    from fastamp._scaler.log_to import StepLog

    expected = Step()
    expected()
    step = Step()
    monkeypatch.setattr(StepLog, "_row", broken, raising=True)
    rows = []
    log = fastamp.debug.log_to(lambda *row: rows.append(row), step.scaler)
    with pytest.warns(RuntimeWarning, match="This is a fault of fastamp"):
        step()
    log.release()
    assert rows == []
    assert all(map(torch.equal, step.weights(), expected.weights()))
    monkeypatch.setattr(StepLog, "_attach", broken)
    with fastamp.debug.log_to(print):
        other = Step()
        with pytest.warns(RuntimeWarning, match="fastamp.debug.log_to failed"):
            other()
    assert all(map(torch.equal, other.weights(), expected.weights()))


def test_a_trace_that_fails_to_follow_scalers_warns(monkeypatch):
    from fastamp._debug import trace as _trace

    monkeypatch.setattr(_trace, "listen", broken)
    scaler = fastamp.GradScaler("cpu")
    with (
        pytest.warns(RuntimeWarning, match="fastamp.debug.trace failed"),
        fastamp.debug.trace(scaler=scaler) as trace,
    ):
        torch.ones(2)
    monkeypatch.setattr(_trace, "describe", broken)
    monkeypatch.setattr(_trace, "as_lines", broken)
    with pytest.warns(RuntimeWarning, match="fastamp.debug.trace failed"):
        assert str(trace)
    with pytest.warns(RuntimeWarning, match="fastamp.debug.trace failed"):
        assert '"scalers": []' in trace.to_json()


FORWARD_MODE = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda t: f(t).tanh().sum())(x),
    "zeros": lambda f, x: f(torch._efficientzerotensor(x.shape) + x),
}


@pytest.mark.parametrize("tool", [fastamp.debug.check, fastamp.debug.inspect])
@pytest.mark.parametrize("call", FORWARD_MODE)
def test_zeros_without_memory_are_not_read(tool, call):
    """Forward-mode AD makes them; under a mode, reading them ends the process."""
    model = nn.Linear(4, 2)

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            FORWARD_MODE[call](lambda x: model(x).float(), torch.ones(3, 4))

    if tool is fastamp.debug.check:
        assert not tool(model, step=step).findings
    else:
        assert tool(step, model).ops


def torchs_modes():
    functions = overrides._get_current_function_mode_stack()
    return [*functions, *_python_dispatch._get_current_dispatch_mode_stack()]


@pytest.mark.parametrize("is_left", [False, True])
def test_a_watched_thread_that_ends_leaves_torch_no_mode(is_left):
    # torch would take it off after the interpreter may have ended, which aborts the program.
    class Last:
        def __del__(self):
            found.append(torchs_modes())

    def watch():
        block = watched_thread([], OpWatcher(), ModelNames(), ToolGuard("test"))
        blocks.append(block)  # As that of a program, it goes on when the thread does not.
        earlier.last = Last()
        block.__enter__()
        found.append(torchs_modes())
        if is_left:
            block.__exit__(None, None, None)
        later.last = Last()

    # Python lets go of what came first either first or, from 3.14 on, last.
    earlier, later = threading.local(), threading.local()
    found, blocks = [], []
    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert [len(modes) for modes in found] == [2, 0 if is_left else 2, 0]
    if not is_left:
        blocks[0].__exit__(None, None, None)  # In another thread.
    assert torchs_modes() == []
