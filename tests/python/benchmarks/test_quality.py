# SPDX-License-Identifier: Apache-2.0
"""What a model learns in each layout: the program, its table, and the stored result."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benchmarks import quality
from benchmarks.harness import BASELINE, FASTAMP
from benchmarks.rows.low_precision_weights import LAYOUTS

RESULT = {
    "environment": {
        "cpu": "A CPU",
        "gpu": "none",
        "torch": "2.11.0",
        "date": "2026-11-23T00:00:00",
        "revision": "0123456789",
    },
    "losses": {BASELINE: [2.0, 2.5], FASTAMP: [2.0, 2.5], "8-bit moments": [2.25, 2.375]},
}


def test_layouts_learn_from_the_same_weights_and_batches():
    """Those with float32 states have the bits of torch.amp, 8-bit moments have others."""
    exact = quality.losses_of(BASELINE, 0, "cpu", steps=3)
    assert len(exact) == quality.TEST_BATCHES
    assert quality.losses_of(FASTAMP, 0, "cpu", steps=3) == exact
    assert quality.losses_of("8-bit moments", 0, "cpu", steps=3) != exact
    assert quality.losses_of(BASELINE, 1, "cpu", steps=3) != exact


def test_the_rate_warms_up_and_falls_to_a_tenth():
    rates = [quality.rate(step) for step in range(1, quality.STEPS + 1)]
    top = rates.index(max(rates)) + 1
    assert top == quality.WARM_UP
    assert rates[-1] == pytest.approx(0.1)
    assert rates[: top - 1] == sorted(rates[: top - 1])


def test_the_table_says_how_far_layouts_are_from_torch_amp_and_seeds_from_each_other():
    table = quality.table_of(RESULT)
    assert "Losses of torch.amp differ by 0.5000 from seed to seed." in table
    assert "| fastamp | 2.0000 | 2.5000 | 2.2500 | equal |" in table
    assert "| 8-bit moments | 2.2500 | 2.3750 | 2.3125 | +0.2500, -0.1250 |" in table


def test_the_table_goes_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{quality.BEGIN}\nold\n{quality.END}\nafter\n")
    quality.write_table(RESULT, page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert quality.table_of(RESULT) in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match=r"expected .* in page\.md, got neither"):
        quality.write_table(RESULT, page)


def test_the_page_has_the_newest_result_and_all_its_layouts_are_within_the_spread_of_seeds():
    result = quality.newest()
    assert quality.table_of(result) in quality.PAGE.read_text()
    losses = result["losses"]
    assert set(losses) == {BASELINE, *LAYOUTS}
    exact = losses[BASELINE]
    spread = max(exact) - min(exact)
    for values in losses.values():
        assert all(abs(a - b) < spread for a, b in zip(values, exact, strict=True))
