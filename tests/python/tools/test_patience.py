# SPDX-License-Identifier: Apache-2.0
"""Limits of time are stretched by how slow the machine is now."""

import patience


def test_limits_grow_with_what_was_measured_and_never_shrink(monkeypatch):
    for work, expected in ((0.001, 10.0), (0.01, 10.0), (0.1, 100.0)):
        monkeypatch.delenv("FASTAMP_TEST_SLOWNESS", raising=False)
        monkeypatch.setattr(patience, "_work", lambda work=work: work)
        patience.slowness.cache_clear()
        assert patience.patience(10) == expected
    patience.slowness.cache_clear()


def test_children_go_by_their_parents_measurement(monkeypatch):
    monkeypatch.setenv("FASTAMP_TEST_SLOWNESS", "7.5")
    patience.slowness.cache_clear()
    assert patience.patience(2) == 15
    patience.slowness.cache_clear()


def test_this_suite_runs_under_it(request):
    marker = request.node.get_closest_marker("timeout")
    assert marker.args[0] >= float(request.config.getini("timeout"))
