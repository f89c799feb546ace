# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from fastamp._util import cpu_isa


@pytest.fixture(autouse=True)
def no_user_choice(monkeypatch):
    monkeypatch.delenv(cpu_isa.VARIABLE, raising=False)


def probe(monkeypatch, working):
    """Replaces the probe by one that survives at the given levels; returns the levels tried."""
    tried = []

    def runs(level):
        tried.append(level)
        return level in working

    monkeypatch.setattr(cpu_isa, "runs", runs)
    return tried


def test_first_level_that_survives_is_taken(monkeypatch):
    tried = probe(monkeypatch, {"AVX512_CORE", "AVX2"})
    assert cpu_isa.best_level() == "AVX512_CORE"
    assert tried == ["", "AVX512_CORE_FP16", "AVX512_CORE_BF16", "AVX512_CORE"]


def test_nothing_is_set_where_onednns_choice_works(monkeypatch):
    probe(monkeypatch, {""})
    assert cpu_isa.best_level() == ""


def test_users_choice_wins_without_a_probe(monkeypatch):
    tried = probe(monkeypatch, set())
    monkeypatch.setenv(cpu_isa.VARIABLE, "AVX2")
    assert cpu_isa.best_level() == "AVX2"
    assert tried == []


def test_answer_is_kept_for_this_cpu_and_torch(monkeypatch, tmp_path):
    cache = tmp_path / "new" / "cpu_isa.json"
    tried = probe(monkeypatch, {"AVX2"})
    assert cpu_isa.best_level(cache) == "AVX2"
    tried.clear()
    assert cpu_isa.best_level(cache) == "AVX2"
    assert tried == []
    cache.write_text(json.dumps({"another CPU; torch 0": ""}))
    assert cpu_isa.best_level(cache) == "AVX2"
    assert tried


def test_no_working_level_is_an_error(monkeypatch):
    probe(monkeypatch, set())
    with pytest.raises(RuntimeError, match="crash on this CPU"):
        cpu_isa.best_level()


def test_a_child_killed_by_a_signal_means_no_and_one_with_an_exception_is_an_error(monkeypatch):
    monkeypatch.setattr(cpu_isa, "_PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert not cpu_isa.runs("")
    monkeypatch.setattr(cpu_isa, "_PROBE", "raise ImportError('no torch')")
    with pytest.raises(RuntimeError, match="no torch"):
        cpu_isa.runs("")


def test_the_probe_itself_runs_at_the_lowest_level():
    assert cpu_isa.runs("AVX2")
