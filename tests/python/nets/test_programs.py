# SPDX-License-Identifier: Apache-2.0
"""Generated programs under torch.amp and under fastamp, and with fastamp's options."""

from __future__ import annotations

import re
import textwrap

import pytest

import fastamp
from nets.past_programs import PAST
from nets.program_maker import make
from nets.program_runs import compare, fails, failures, script, shrink
from nets.program_text import Program, smaller
from nets.rounds import rounds

pytestmark = pytest.mark.usefixtures("one_thread")

PROGRAMS = 300  # in a round: about 10 s of CPU


@pytest.mark.slow
@pytest.mark.timeout(14400)
def test_generated_programs_give_the_results_that_are_promised():
    count = PROGRAMS * rounds()
    ends, texts = failures(make(seed) for seed in range(count))
    assert not texts, "\n\n".join(texts)
    assert ends["ran"] > 0.8 * count, ends


@pytest.mark.parametrize("name", sorted(PAST))
def test_past_failure(name: str):
    reference, source = PAST[name]
    program = Program(0, reference, (textwrap.dedent(source).strip(),))
    assert not fails(program)


def test_a_seed_makes_the_same_program_again():
    sources = {make(seed).source() for seed in range(30)}
    assert len(sources) == 30
    assert sources == {make(seed).source() for seed in range(30)}


def test_what_is_printed_is_the_program():
    program = make(3)
    text = script(program)
    space: dict[str, object] = {}
    exec(compile(text[: text.rindex("replay(")], "<script>", "exec"), space)
    assert callable(space["program"])
    assert re.sub(r"\s+$", "", program.source()) in text


def test_every_smaller_program_is_shorter_or_has_fewer_guards():
    program = make(5)
    candidates = list(smaller(program))
    assert len(candidates) > 30
    assert all(len(c.source()) < len(program.source()) or c.installed is False for c in candidates)


def test_a_wrong_policy_is_found_and_its_program_shrunk():
    fastamp.set_op_policy("softmax.int", "fp32")
    try:
        found = next(p for p, text, _ in compare([make(seed) for seed in range(60)]) if text)
        least = shrink(found, seconds=5)
        assert fails(least)
    finally:
        fastamp.reset_op_policies()
    assert not fails(least)
    assert "softmax" in least.source()
    assert len(least.source().splitlines()) < len(found.source().splitlines()) / 2
