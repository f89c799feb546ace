# SPDX-License-Identifier: Apache-2.0
"""Import, exit, fork and spawn."""

from __future__ import annotations

import multiprocessing
import sys

import pytest
import torch

import fastamp
from patience import patience
from support.children import check_python, run_python

X = torch.ones(4, 4)


def test_import_warns_of_nothing():
    done = run_python("-W", "error", "-c", "import fastamp; print(fastamp._C.kernels_registered())")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_a_later_override_by_the_user_wins():
    code = """
import fastamp, torch
library = torch.library.Library("aten", "IMPL")
library.impl("mm", lambda a, b: a, "AutocastCPU")
x = torch.ones(2, 3)
with fastamp.autocast("cpu"):
    assert torch.mm(x, x).shape == (2, 3)
"""
    check_python("-c", code)


def test_no_register_leaves_torchs_kernels():
    code = """
import torch
before = torch._C._dispatch_dump("aten::mm")
import fastamp
assert torch._C._dispatch_dump("aten::mm") == before
assert not fastamp._C.kernels_registered()
x = torch.ones(4, 4)
with fastamp.autocast("cpu"):
    assert torch.mm(x, x).dtype == torch.bfloat16
assert fastamp.policies.get("mm", "cpu") == "lower"
"""
    check_python("-c", code, FASTAMP_NO_REGISTER="1")


def test_no_register_switched_off_registers():
    code = "import fastamp; assert fastamp._C.kernels_registered()"
    check_python("-c", code, FASTAMP_NO_REGISTER="0")


def test_import_does_not_load_dynamo_and_leaves_the_state_alone():
    code = """
import sys, torch
before = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), set(torch.__dict__))
import fastamp
assert "torch._dynamo" not in sys.modules
assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
        set(torch.__dict__)) == before
assert not torch.cuda.is_initialized()
"""
    check_python("-c", code)


EXITS = {
    "end of program": "pass",
    "sys.exit": "import sys; sys.exit(0)",
    "uncaught generator": "g = (fastamp.autocast('cpu').__enter__() for _ in range(3)); next(g)",
    "daemon thread inside": """
import threading, time
inside = threading.Event()
def work():
    with fastamp.autocast('cpu'):
        torch.mm(x, w)
        inside.set()
        time.sleep(1000)
threading.Thread(target=work, daemon=True).start()
inside.wait()
""",
    "thread that ended inside": """
import threading
t = threading.Thread(target=lambda: (fastamp.autocast('cpu').__enter__(), torch.mm(x, w)))
t.start(); t.join()
""",
    "garbage in a module": "import builtins; builtins.kept = (region, fastamp, torch.mm(x, w))",
}


@pytest.mark.parametrize("how", EXITS)
def test_the_interpreter_exits_cleanly_inside_a_region(how: str):
    code = f"""
import torch, fastamp
torch.set_num_threads(1)
x, w = torch.ones(4, 4), torch.nn.Parameter(torch.ones(4, 4))
region = fastamp.autocast("cpu")
region.__enter__()
torch.mm(x, w)
{EXITS[how]}
"""
    done = run_python("-X", "faulthandler", "-c", code)
    assert (done.returncode, done.stderr) == (0, "")


EXITS_AT_WORK = """
import os, sys, threading, torch, fastamp

torch.set_num_threads(1)
weight = torch.nn.Parameter(torch.ones(4, 4))


def work():
    # Not torch.autocast and torch.clear_autocast_cache: torch lets the GIL go there, and a daemon
    # thread that asks for it while the interpreter ends takes the process with it.
    with fastamp.autocast("cpu"), fastamp.autocast("cpu", enabled=False):
        fastamp._C.clear_cast_cache()
    overridden = fastamp.policies.override({"mm": "fp32"})
    with overridden, fastamp.debug.trace(), fastamp.casts.keep(weight):
        fastamp.casts.drop()


def work_on():
    work()
    at_work.wait()
    while True:
        work()


bad = 0
for _ in range(25):
    child = os.fork()
    if child == 0:
        at_work = threading.Barrier(4)
        for _ in range(3):
            threading.Thread(target=work_on, daemon=True).start()
        at_work.wait()
        sys.exit(0)
    bad += os.waitpid(child, 0)[1] != 0
print("bad exits:", bad)
"""


@pytest.mark.long
def test_the_interpreter_exits_cleanly_while_daemon_threads_enter_regions():
    assert check_python("-c", EXITS_AT_WORK).endswith("bad exits: 0\n")


def test_uncaught_exception_in_a_region_gives_its_traceback_and_exit_code_1():
    done = run_python("-c", "import fastamp\nwith fastamp.autocast('cpu'): raise KeyError(3)")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("KeyError: 3")


def worker_sees(queue: multiprocessing.Queue, region: fastamp.autocast) -> None:
    torch.set_num_threads(1)
    inherited = torch.mm(X, X).dtype
    with region:
        queue.put((str(inherited), str(torch.mm(X, X).dtype)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_region_works_in_a_worker_process(method: str):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} on {sys.platform}")
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    with fastamp.autocast("cpu", dtype=torch.bfloat16):
        region = fastamp.autocast("cpu", dtype=torch.float16)
        process = context.Process(target=worker_sees, args=(queue, region))
        process.start()
    inherited, inside = queue.get(timeout=patience(240))
    process.join(patience(240))
    assert process.exitcode == 0
    # A forked child goes on where its parent was, as with torch; a spawned one starts anew.
    assert inherited == ("torch.bfloat16" if method == "fork" else "torch.float32")
    assert inside == "torch.float16"


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        with fastamp.autocast("cpu", dtype=torch.float16):
            return torch.mm(X, X * index)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_regions_work_in_data_loader_workers(method: str):
    loader = torch.utils.data.DataLoader(Samples(), num_workers=2, multiprocessing_context=method)
    with fastamp.autocast("cpu"):
        batches = list(loader)
    assert len(batches) == 4
    assert all(batch.dtype == torch.float16 for batch in batches)


def test_package_reloaded_or_imported_twice_keeps_working():
    code = """
import importlib, fastamp, torch
importlib.reload(fastamp)
torch.clear_autocast_cache()
x, w = torch.ones(4, 4), torch.nn.Parameter(torch.ones(4, 4))
with fastamp.autocast("cpu"):
    assert torch.mm(x, w).dtype == torch.bfloat16
    torch.clear_autocast_cache()
"""
    check_python("-c", code)
