# SPDX-License-Identifier: Apache-2.0
"""install and uninstall: what changes, and that it all comes back."""

from __future__ import annotations

import inspect
import threading
import time
from typing import Any

import pytest
import torch

import fastamp
import fastamp._C as _C
from patience import patience
from support.autocast_state import nesting, torch_state
from support.children import check_python
from support.dropin_state import changed_objects, dropin_objects

BF16, FP16 = torch.bfloat16, torch.float16


def product() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def test_install_changes_what_it_says_and_uninstall_gives_every_object_back():
    before = dropin_objects()
    fastamp.install()
    assert fastamp.is_installed()
    changed = changed_objects(before, dropin_objects())
    assert {
        ("torch.amp.autocast_mode.autocast", "__enter__"),
        ("torch.amp.autocast_mode.autocast", "__exit__"),
        ("torch.amp.grad_scaler.GradScaler", "__new__"),
    } <= set(changed)
    fastamp.uninstall()
    assert not fastamp.is_installed()
    assert changed_objects(before, dropin_objects()) == []


def test_install_and_uninstall_twice_are_harmless():
    before = dropin_objects()
    fastamp.uninstall()
    fastamp.install()
    once = dropin_objects()
    fastamp.install()
    assert changed_objects(once, dropin_objects()) == []
    fastamp.uninstall()
    fastamp.uninstall()
    assert changed_objects(before, dropin_objects()) == []


def test_as_a_context_manager_it_ends_with_the_outermost_block():
    with fastamp.install():
        with fastamp.install():
            assert fastamp.is_installed()
        assert fastamp.is_installed()
    assert not fastamp.is_installed()
    with pytest.raises(ZeroDivisionError), fastamp.install():
        raise ZeroDivisionError
    assert not fastamp.is_installed()


def test_a_block_leaves_a_standing_installation():
    fastamp.install()
    with fastamp.install():
        pass
    assert fastamp.is_installed()


def test_uninstall_inside_a_region_is_refused_and_changes_nothing():
    for region in (torch.autocast("cpu"), fastamp.autocast("cpu", enabled=False)):
        fastamp.install()
        installed = dropin_objects()
        with region:
            state = torch_state()
            with pytest.raises(RuntimeError, match="uninstall: expected to be called outside"):
                fastamp.uninstall()
            assert torch_state() == state
        assert fastamp.is_installed()
        assert changed_objects(installed, dropin_objects()) == []
        fastamp.uninstall()


@pytest.mark.usefixtures("installed")
def test_uninstall_while_another_thread_is_in_a_region_is_refused():
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with torch.autocast("cpu"):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait()
    with pytest.raises(RuntimeError, match="no thread to be in an autocast region, got 1 open"):
        fastamp.uninstall()
    leave.set()
    thread.join()
    fastamp.uninstall()


@pytest.mark.usefixtures("installed")
def test_a_thread_that_dies_in_a_region_does_not_block_uninstall():
    thread = threading.Thread(target=torch.autocast("cpu").__enter__)
    thread.start()
    thread.join()  # ends before the thread's C++ part does
    deadline = time.monotonic() + patience(60)
    while _C.open_torch_regions() > 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _C.open_torch_regions() == 0
    assert nesting() == 0


def test_install_inside_an_open_region_of_torchs():
    before = torch_state()
    region = torch.autocast("cpu")
    with region:
        fastamp.install()
        with region, torch.autocast("cpu", dtype=FP16):
            assert product() == FP16
        assert product() == BF16
    assert torch_state() == before
    with pytest.raises(RuntimeError, match="entered on this thread"):
        region.__exit__(None, None, None)
    assert torch_state() == before


@pytest.mark.usefixtures("installed")
def test_uninstall_refuses_to_undo_over_somebody_elses_patch():
    own = torch.autocast.__enter__
    torch.autocast.__enter__ = lambda self: own(self)
    try:
        with pytest.raises(RuntimeError, match=r"autocast_mode\.autocast\.__enter__"):
            fastamp.uninstall()
        assert fastamp.is_installed()
    finally:
        torch.autocast.__enter__ = own


def test_signatures_and_documentation_stay_torchs():
    def facts() -> list[Any]:
        classes = [torch.autocast, torch.amp.GradScaler, torch.cuda.amp.GradScaler]
        functions = [torch.autocast.__enter__, torch.autocast.__exit__]
        signatures = [inspect.signature(each) for each in (*classes, *functions)]
        return [signatures, [inspect.getsource(each) for each in (*classes, *functions)]]

    before = facts()
    with fastamp.install():
        assert facts() == before


def test_fork_in_a_region_counts_the_regions_of_the_child_alone():
    code = """
import os, threading, torch, fastamp
fastamp.install()
inside, leave = threading.Event(), threading.Event()
def work():
    with torch.autocast("cpu"):
        inside.set()
        leave.wait()
thread = threading.Thread(target=work)
thread.start()
inside.wait()
pid = os.fork()
if pid == 0:
    fastamp.uninstall()
    os._exit(7)
leave.set()
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
fastamp.uninstall()
"""
    check_python("-W", "ignore::DeprecationWarning", "-c", code)


REGISTRATIONS = """
import torch
def dump():
    names = set()
    for key in ("AutocastCPU", "AutocastCUDA"):
        names |= set(torch._C._dispatch_get_registrations_for_dispatch_key(key))
    return {name: torch._C._dispatch_dump(name) for name in sorted(names)}
before = dump()
import fastamp
loaded = dump()
for _ in range(3):
    fastamp.install()
    assert dump() != before
    fastamp.uninstall()
    assert dump() == loaded
print(loaded == before)
"""


@pytest.mark.parametrize("no_register", ["1", "0"])
def test_uninstall_restores_the_registrations_that_were_there(no_register: str):
    printed = check_python("-c", REGISTRATIONS, FASTAMP_NO_REGISTER=no_register)
    assert printed.split() == [str(no_register == "1")]


def test_interpreter_exit_inside_a_region_is_clean():
    code = """
import sys, threading, torch, fastamp
fastamp.install()
torch.autocast("cpu").__enter__()
threading.Thread(target=torch.autocast("cpu").__enter__).start()
def generator():
    with torch.autocast("cpu"):
        yield
kept = generator()
next(kept)
"""
    assert check_python("-X", "dev", "-c", code) == ""
