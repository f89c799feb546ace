# SPDX-License-Identifier: Apache-2.0
"""``python -m fastamp --inspect`` and ``check``: programs of several kinds."""

from __future__ import annotations

import json

import pytest

from support.children import run_program

SHOW = "print(step, [p.double().sum().item() for m in MODELS for p in m.parameters()])\n"

# Two models with equal names, and a mode of the program's that begins before the step that is
# inspected and ends within it.
GAN = """
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
torch.manual_seed(0)
g = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
d = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 1))
og, od = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (g, d))
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
bce = nn.BCEWithLogitsLoss()
for step in range(2):
    z, r = torch.randn(4, 8), torch.randn(4, 8)
    with (
        FlopCounterMode(display=False) as flops,
        torch.device("cpu"),
        torch.autocast("cpu", dtype=torch.float16),
    ):
        fake = g(z)
        ld = bce(d(r), torch.ones(4, 1)) + bce(d(fake.detach()), torch.zeros(4, 1))
    print("flops", flops.get_total_flops())
    scaler.scale(ld).backward()
    first = d[0].weight.grad.abs().max().item()
    scaler.step(od); od.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        lg = bce(d(fake), torch.ones(4, 1))
    scaler.scale(lg).backward()
    scaler.step(og); og.zero_grad(); od.zero_grad()
    scaler.update()
    print("gradient", first)
    """ + SHOW.replace("MODELS", "(g, d)")

# Ops in the root module's own forward, and outside of modules.
ROOT = """
import torch
from torch import nn
torch.manual_seed(0)
class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
    def forward(self, x):
        y = self.first(x)
        with torch.autocast("cpu", enabled=False):
            y = (y.float() * 300).half().pow(2).float().clamp(max=1e3) @ torch.ones(8, 8)
        return y
model = Root()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(torch.ones(4, 8))
    loss = (y @ torch.full((8, 32), 1e-9)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    """ + SHOW.replace("MODELS", "[model]")

COMPILED = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
model = WRAPPED
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(torch.ones(4, 8)), torch.arange(4))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    """ + SHOW.replace("MODELS", "[net]")
AS_MODULE = COMPILED.replace("WRAPPED", 'torch.compile(net, backend="aot_eager")')
IN_PLACE = COMPILED.replace("WRAPPED", 'net; net.compile(backend="aot_eager")')
AS_FUNCTION = COMPILED.replace("WRAPPED", 'torch.compile(lambda x: net(x), backend="aot_eager")')

# The optimizer is stepped past the scaler.
PAST = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for step in range(3):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(torch.ones(4, 8)), torch.arange(4))
    scaler.scale(loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    """ + SHOW.replace("MODELS", "[model]")

# Two threads that train, one with a scaler and one without, whose steps overlap. The loops meet
# in the middle of each step, so that either's events come within the other's step.
THREADS = """
import threading
import torch
from torch import nn
torch.manual_seed(0)
first, meet, turn = "plain", threading.Barrier(2), threading.Semaphore(0)
class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)
    def forward(self, x):
        hidden = self.up(x).relu()
        if self is models[first]:
            turn.release()
        meet.wait()
        return self.down(hidden)
models = {"plain": Net(16), "scaled": Net(12)}
def train(name, dtype):
    model = models[name]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=name == "scaled")
    for step in range(3):
        if name != first:
            turn.acquire()  # The other one's step is the one that is inspected.
        with torch.autocast("cpu", dtype=dtype):
            loss = nn.functional.cross_entropy(model(torch.ones(4, 8)), torch.arange(4))
        scaler.scale(loss).backward()
        meet.wait()
        scaler.step(optimizer)
        scaler.update()
        meet.wait()
        optimizer.zero_grad()
threads = [
    threading.Thread(target=train, args=args)
    for args in [("plain", torch.bfloat16), ("scaled", torch.float16)]
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for step, model in models.items():
    """ + SHOW.replace("MODELS", "[model]")

# The other thread's pass runs after the first one's, while check looks at what that has changed.
MEANWHILE = """
import threading
import torch
from torch import nn
torch.manual_seed(0)
FIRST
models = {name: nn.Linear(8, 8) for name in order}
over, looks, begin, done, meet = [], [], threading.Event(), threading.Event(), threading.Barrier(2)
class Looked(list):
    def __iter__(self):
        if over and threading.current_thread().name == order[0]:
            looks.append(0)
            if len(looks) == look:
                begin.set()
                assert done.wait(60)
        return super().__iter__()
optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
group = optimizers[order[0]].param_groups[0]
group["params"] = Looked(group["params"])
models[order[0]].weight.register_post_accumulate_grad_hook(over.append)
def train(name, first):
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=name == "scaled")
    if not first:
        assert begin.wait(60)
    with torch.autocast("cpu", dtype=torch.float16 if name == "scaled" else torch.bfloat16):
        loss = nn.functional.cross_entropy(models[name](torch.ones(4, 8)), torch.arange(4))
    scaler.scale(loss).backward()
    if not first:
        done.set()
    meet.wait()
    scaler.step(optimizers[name])
    scaler.update()
threads = [
    threading.Thread(target=train, args=(name, name == order[0]), name=name) for name in order
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert begin.is_set()
"""

# torch warns of the first call, and of the argument of the second.
SCHEDULES = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
scheduler.step()
for step in range(2):
    with torch.autocast("cpu"):
        loss = model(torch.ones(4, 8)).sum()
    loss.backward()
    optimizer.step()
    scheduler.step(step)
"""


def run(tmp_path, text, *options, **environment):
    (tmp_path / "train.py").write_text(text)
    return run_program(*options, "train.py", cwd=tmp_path, **environment)


def inspected(tmp_path, text, step=1, **environment):
    """The record of a step; the program prints what it prints by itself."""
    plain = run(tmp_path, text, "-m", "fastamp")
    options = ["-m", "fastamp", "--inspect", "step.json", "--at-step", str(step)]
    done = run(tmp_path, text, *options, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    assert "fault of fastamp" not in done.stderr
    return done, json.loads(next(tmp_path.glob("step*.json")).read_text())


@pytest.mark.parametrize("step", [0, 1])
def test_two_models_with_equal_names_are_told_apart(tmp_path, step):
    done, record = inspected(tmp_path, GAN, step)
    parameters = [f"{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")]
    names = [f"{model}.{name}" for model in ("Sequential", "Sequential2") for name in parameters]
    assert [row["name"] for row in record["gradients"]] == names
    assert [row["name"] for row in record["weights"]] == names
    modules = {row["module"] for row in record["ops"] if row["op"] == "addmm"}
    assert modules == {"Sequential.0", "Sequential.2", "Sequential2.0", "Sequential2.2"}
    # Of the backward pass that its optimizer has stepped.
    shown = [float(line.split()[1]) for line in done.stdout.splitlines() if "gradient" in line]
    found = next(row for row in record["gradients"] if row["name"] == "Sequential2.0.weight")
    assert found["greatest"] == pytest.approx(shown[step], rel=1e-6)


@pytest.mark.parametrize("step", [0, 1])
def test_every_op_of_a_step_is_told(tmp_path, step):
    _, record = inspected(tmp_path, ROOT, step)
    forward = [row for row in record["ops"] if not row["backward"]]
    products = {row["module"]: row for row in forward if row["flops"]}
    assert {name: row["flops"] for name, row in products.items()} == {
        "first": 2 * 4 * 8 * 8,
        "Root": 2 * 4 * 8 * 8,
        "": 2 * 4 * 8 * 32,
    }
    assert products["first"]["inputs"][0] == "bfloat16"
    assert products[""]["inputs"][0] == "float32"
    culprit = next(row for row in forward if row["non_finite"])
    assert (culprit["op"], culprit["module"]) == ("pow.Tensor_Scalar", "Root")
    assert any(row["op"] == "ones" and row["inputs"] == [] for row in forward)
    assert {row["op"] for row in forward if row["module"] == "SGD.step"} >= {"add_.Tensor"}


@pytest.mark.parametrize(
    "text", [AS_MODULE, pytest.param(IN_PLACE, marks=pytest.mark.slow), AS_FUNCTION]
)
def test_compiled_models_run_eagerly_in_the_step(tmp_path, text):
    done, record = inspected(tmp_path, text)
    assert "global hooks" not in done.stderr  # They are fastamp's.
    products = [row for row in record["ops"] if row["op"] == "addmm" and not row["backward"]]
    names = [row["module"].removeprefix("_orig_mod.") for row in products]
    assert names == ["0", "2"]
    assert len(record["weights"]) == 4


def test_steps_past_the_scaler_are_steps_and_are_named(tmp_path):
    _, record = inspected(tmp_path, PAST, RANK="1", WORLD_SIZE="2")
    assert (tmp_path / "step.rank1.json").is_file()  # One file for each rank.
    assert len(record["weights"]) == 4
    (finding,) = record["check"]["findings"]
    assert (finding["rule"], finding["where"]) == ("step-past-scaler", "SGD.step()")
    checked = run(tmp_path, PAST, "-m", "fastamp", "check", "--steps", "2")
    assert checked.returncode == 1
    assert "2 optimizer steps of train.py\nstep-past-scaler\n" in checked.stdout
    assert "at SGD.step(): gradients times 16 (2 times)" in checked.stdout


@pytest.mark.parametrize("first", ["plain", "scaled"])
def test_the_thread_that_begins_the_step_is_told_and_no_other(tmp_path, first):
    text = THREADS.replace('first, meet, turn = "plain"', f'first, meet, turn = "{first}"')
    _, record = inspected(tmp_path, text)
    products = [row for row in record["ops"] if row["flops"]]
    assert {row["module"] for row in products} == {"Net.up", "Net.down"}
    width = 16 if first == "plain" else 12
    forward = {row["module"]: row["flops"] for row in products if not row["backward"]}
    assert forward == {"Net.up": 2 * 4 * 8 * width, "Net.down": 2 * 4 * width * 8}
    dtype = "bfloat16" if first == "plain" else "float16"
    assert {row["inputs"][0] for row in products} == {dtype}
    assert len(record["weights"]) == len(record["gradients"]) == 4
    assert record["check"]["findings"] == []
    checked = run(tmp_path, text, "-m", "fastamp", "check", "--steps", "0")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "6 optimizer steps of train.py" in checked.stdout


@pytest.mark.parametrize("look", [1, 2])  # Two listeners look, one after the other.
@pytest.mark.parametrize("order", [("plain", "scaled"), ("scaled", "plain")])
def test_a_pass_that_begins_while_another_is_looked_at_is_not_taken_for_it(tmp_path, order, look):
    text = MEANWHILE.replace("FIRST", f"order, look = {order}, {look}")
    checked = run(tmp_path, text, "-m", "fastamp", "check", "--steps", "0")
    assert (checked.returncode, checked.stderr) == (0, ""), checked.stdout
    assert "2 optimizer steps of train.py" in checked.stdout


@pytest.mark.parametrize(
    "options", [("--inspect", "step.json", "--at-step", "1"), ("check", "--steps", "0")]
)
def test_warnings_of_schedules_name_the_line_of_the_program(tmp_path, options):
    def warnings_of(done):
        return [line for line in done.stderr.splitlines() if "Warning" in line]

    plain = run(tmp_path, SCHEDULES)
    watched = run(tmp_path, SCHEDULES, "-m", "fastamp", *options)
    said = warnings_of(plain)
    assert len(said) == 2
    assert all("train.py:" in line for line in said)
    assert warnings_of(watched) == said
