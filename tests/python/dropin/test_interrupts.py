# SPDX-License-Identifier: Apache-2.0
"""A KeyboardInterrupt at any moment leaves no region open that its ``with`` statement has left."""

from __future__ import annotations

import json
import os

import pytest

from support.children import check_python

TRIES = 1500 if os.environ.get("FASTAMP_LONG") else 200

# Interrupts loops that do nothing but enter and leave regions, again and again, and counts how
# often the thread is in a region afterwards.
PROGRAM = """
import gc, itertools, json, os, random, signal, sys, warnings
import torch, fastamp
from support.autocast_state import set_torch_state, torch_state

warnings.simplefilter("ignore")
case, tries = sys.argv[1], int(sys.argv[2])
spelling, _, state = case.partition(" ")
if state == "installed":
    fastamp.install()
region = {
    "fastamp.autocast": lambda: fastamp.autocast("cpu"),
    "fastamp.cpu.amp.autocast": lambda: fastamp.cpu.amp.autocast(),
    "torch.autocast": lambda: torch.autocast("cpu"),
    "torch.cpu.amp.autocast": lambda: torch.cpu.amp.autocast(),
    "torch.cuda.amp.autocast": lambda: torch.cuda.amp.autocast(),
}[spelling]()

def statement():
    while True:
        with region:
            pass

@region
def decorated():
    pass

def decorator():
    while True:
        decorated()

def two_in_a_region():
    with region:
        yield
    with region, region:
        yield

def generator():
    while True:
        for _ in two_in_a_region():
            pass
        next(two_in_a_region())  # closed in the region

def explicit():
    while True:
        with region:
            raised = False
            try:
                with region:
                    raise ValueError
            except ValueError:
                pass

def interrupt(loop):
    # More than once: an interrupt inside a finalizer is printed, and the loop goes on.
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 8e-5), 1.0)
            loop()
        except KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)

outside = torch_state()
left_open = {}
random.seed(0)
signal.signal(signal.SIGALRM, signal.default_int_handler)
for loop in (statement, decorator, generator, explicit):
    left_open[loop.__name__] = 0
    for _ in range(tries):
        interrupt(loop)
        gc.collect(0)
        if torch_state() != outside:
            left_open[loop.__name__] += 1
            set_torch_state(outside)
print(json.dumps(left_open))
sys.stdout.flush()
os._exit(0)  # Regions of torch's that were left open are nobody's to end.
"""


def left_open(case: str, tries: int) -> dict[str, int]:
    printed: dict[str, int] = json.loads(check_python("-c", PROGRAM, case, str(tries)))
    assert len(printed) == 4
    return printed


@pytest.mark.parametrize(
    "case",
    [
        "fastamp.autocast",
        "fastamp.cpu.amp.autocast",
        "torch.autocast installed",
        "torch.cpu.amp.autocast installed",
        "torch.cuda.amp.autocast installed",
    ],
)
def test_no_interrupt_leaves_a_region_of_fastamp_open(case: str):
    assert set(left_open(case, TRIES).values()) == {0}


def test_the_interrupts_fall_where_they_could():
    assert all(count > 0 for count in left_open("torch.autocast", 200).values())
