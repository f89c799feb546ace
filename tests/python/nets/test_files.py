# SPDX-License-Identifier: Apache-2.0
"""What is read from outside, damaged: each reader takes it, or refuses it and changes nothing."""

from __future__ import annotations

from collections import Counter

import pytest

import fastamp
from nets.files import READERS, ChangedError, corpus, damaged
from nets.rounds import rounds

COUNT = 300  # cases of each reader in a round: some 2 s of CPU

readers = pytest.mark.parametrize("reader", READERS)


@readers
def test_the_corpus(reader: str):
    taken = [READERS[reader](case) for case in corpus(reader)]
    assert any(taken)
    assert not all(taken)


@readers
@pytest.mark.timeout(14400)
def test_damaged_input_is_taken_or_refused_and_changes_nothing(reader: str):
    taken = Counter[bool]()
    for seed in range(rounds()):
        for case in damaged(reader, seed, COUNT):
            try:
                taken[READERS[reader](case)] += 1
            except Exception as error:
                error.add_note(f"READERS[{reader!r}]({case!r})")
                raise
    assert min(taken[True], taken[False]) > 0.02 * COUNT * rounds()


def test_a_reader_that_changes_a_state_before_it_refuses_is_found(monkeypatch: pytest.MonkeyPatch):
    load = fastamp.GradScaler.load_state_dict

    def hasty(self: fastamp.GradScaler, state: dict[str, object]) -> None:
        self._growth_factor = state.get("growth_factor", self._growth_factor)  # type: ignore[assignment]
        load(self, state)

    monkeypatch.setattr(fastamp.GradScaler, "load_state_dict", hasty)
    with pytest.raises(ChangedError, match="by a call that raised"):
        all(READERS["scaler_state"](case) or True for case in damaged("scaler_state", 0, COUNT))
