# SPDX-License-Identifier: Apache-2.0
"""Finds where two recorded steps part, beyond what rounding explains."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from typing import Any, ClassVar

from fastamp._debug.compare.record import Event, Record
from fastamp._debug.compare.sketch import Sketch
from fastamp._debug.report import Report

__all__ = ["Comparison", "Divergence", "compare_records"]

# How much farther apart an op may make what is apart, and what it adds by its own rounding: sums
# cancel. Wide, for a fault of a program is seldom as small as a hundred roundoffs.
_AMPLIFIED = 16.0
_NOISE = 8.0
_ROUNDINGS = 64.0
_FLOOR = 2.0**-24


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first event at which two runs are apart and rounding does not say why.

    Attributes:
        event: Of the first run.
        call: Which of the calls of this op in this module, from 0.
        what: Says it in words.
        distance: Of what the two runs have, relative to it; NaN if it is no matter of numbers.
        allowed: How far apart rounding may bring them.
    """

    event: Event
    call: int
    what: str
    distance: float = math.nan
    allowed: float = math.nan

    def __str__(self) -> str:
        """Returns one line."""
        where = _where(self.event)
        if self.event.kind == "op":
            where += f", call {self.call}"
        numbers = ""
        if not math.isnan(self.distance):
            numbers = f" (relative distance {self.distance:.3g}, by rounding {self.allowed:.3g})"
        return f"{where}: {self.what}{numbers}"


def _where(event: Event) -> str:
    if event.kind != "op":
        return f"{_KINDS[event.kind]} {event.name}"
    passes = "backward" if event.backward else "forward"
    return f"{event.op} in {event.name or 'no module'}, {passes}"


_KINDS = {"start": "parameter", "gradient": "gradient of", "end": "the step's update of"}


@dataclasses.dataclass(frozen=True)
class Comparison(Report):
    """Result of a comparison of two records.

    Attributes:
        matched: Events that both have.
        only_first: Events of the first that the second lacks.
        only_second: The reverse.
        divergence: The first one; None if rounding explains all.
        alone: Of the ops that one run alone has called before it, the first of each run.
        largest: The largest relative distance before it.
    """

    kind: ClassVar[str] = "compare"

    matched: int
    only_first: int
    only_second: int
    divergence: Divergence | None
    alone: tuple[Event | None, Event | None]
    largest: float

    def __str__(self) -> str:
        """Returns a few lines."""
        lines = [
            f"{self.matched} events of both runs compared, {self.only_first} only in the first, "
            f"{self.only_second} only in the second."
        ]
        if self.divergence is None:
            lines.append(
                "The runs are equal, bit for bit as far as records show."
                if self.largest == 0.0
                else f"Rounding explains all differences; the largest is {self.largest:.3g}."
            )
        else:
            lines.append(f"They part at: {self.divergence}")
            for which, event in zip(("first", "second"), self.alone, strict=True):
                if event is not None:
                    lines.append(f"Before that, only the {which} run calls {_where(event)}.")
            lines.append(f"The largest relative difference before that is {self.largest:.3g}.")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data: the attributes, events by kind, name, op and backward."""
        part = self.divergence
        return {
            "matched": self.matched,
            "only_first": self.only_first,
            "only_second": self.only_second,
            "divergence": part
            and {
                **_place_of(part.event),
                "call": part.call,
                "what": part.what,
                "distance": part.distance,
                "allowed": part.allowed,
            },
            "alone": [event and _place_of(event) for event in self.alone],
            "largest": self.largest,
        }


def _place_of(event: Event) -> dict[str, Any]:
    return dict(zip(("kind", "name", "op", "backward"), event.key, strict=True))


class _Comparing:
    def __init__(self, first: Record, second: Record) -> None:
        self._scales = first.scale, second.scale
        # What earlier steps may have made of weights, by rounding.
        events = (*first.events, *second.events)
        low = max((s.roundoff for event in events for s in event.outputs), default=0.0)
        self._before = max(first.step, second.step) * (4.0 * low + _ROUNDINGS * _FLOOR)
        self._same_ranks = first.ranks == second.ranks
        self.largest = 0.0  # Of what rounding has explained.
        self._gradients: dict[str, tuple[float, float]] = {}  # Distance, and unsure signs.
        self._starts: dict[str, tuple[Sketch, Sketch]] = {}

    def divergence(self, call: int, a: Event, b: Event) -> Divergence | None:
        """Looks at an event of both runs."""
        if a.kind == "op":
            return self._of_op(call, a, b)
        pairs = self._pairs(a, a.outputs, b.outputs)
        if pairs is None:
            return Divergence(a, call, self._shapes(a, b))
        for own, reference in pairs:
            fault = self._of_parameter(call, a, b, own, reference)
            if fault is not None:
                return fault
        return None

    def _pairs(
        self, a: Event, own: tuple[Sketch, ...], reference: tuple[Sketch, ...]
    ) -> list[tuple[Sketch, Sketch]] | None:
        """Tensors that can be compared, without the scale of the loss; None if shapes differ."""
        if len(own) != len(reference) or any(
            x.shape != y.shape for x, y in zip(own, reference, strict=True)
        ):
            # Other numbers of ranks have other parts of batches and weights.
            return None if self._same_ranks else []
        pairs = list(zip(own, reference, strict=True))
        if a.backward or a.kind == "gradient":
            return [self._without_scale(x, y) for x, y in pairs]
        return pairs

    def _without_scale(self, x: Sketch, y: Sketch) -> tuple[Sketch, Sketch]:
        """Gradients carry the scale of the loss; what the forward pass has saved does not."""
        one, other = self._scales
        unscaled = x.times(1.0 / one), y.times(1.0 / other)
        return min((unscaled, (x, y)), key=lambda pair: pair[0].distance(pair[1]))

    @staticmethod
    def _shapes(a: Event, b: Event) -> str:
        own = [sketch.shape for sketch in (*a.inputs, *a.outputs)]
        return f"other shapes: {own} and {[sketch.shape for sketch in (*b.inputs, *b.outputs)]}"

    def _of_op(self, call: int, a: Event, b: Event) -> Divergence | None:
        inputs = self._pairs(a, a.inputs, b.inputs)
        outputs = self._pairs(a, a.outputs, b.outputs)
        if inputs is None or outputs is None:
            return Divergence(a, call, self._shapes(a, b))
        given = 0.0
        for number, (x, y) in enumerate(inputs):
            distance = x.distance(y)
            allowed = 4.0 * self.largest + _ROUNDINGS * _FLOOR + 4.0 * _roundoff(x, y)
            if bool(x.non_finite) != bool(y.non_finite):
                return Divergence(a, call, f"input {number} has inf or NaN in one run only")
            if distance > allowed:
                what = f"input {number}, which comes from elsewhere, differs"
                return Divergence(a, call, what, distance, allowed)
            given = max(given, distance)
        for x, y in outputs:
            distance = x.distance(y)
            allowed = (
                _AMPLIFIED * given
                + _NOISE * (a.noise + b.noise)
                + _ROUNDINGS * _FLOOR
                + 4.0 * _roundoff(x, y)
            )
            if bool(x.non_finite) != bool(y.non_finite):
                return Divergence(a, call, "makes inf or NaN in one run only")
            if distance > allowed:
                what = "draws other numbers" if a.random else "differs, from equal inputs"
                return Divergence(a, call, what, distance, allowed)
            self.largest = max(self.largest, distance)
        return None

    def _of_parameter(
        self, call: int, a: Event, b: Event, x: Sketch, y: Sketch
    ) -> Divergence | None:
        if bool(x.non_finite) != bool(y.non_finite):
            return Divergence(a, call, "has inf or NaN in one run only")
        if a.kind == "end":
            return self._of_update(call, a, x, y)
        distance = x.distance(y)
        allowed = 2.0 * _roundoff(x, y)
        if a.kind == "start":
            self._starts[a.name] = x, y
            allowed += self._before
        else:
            allowed += 4.0 * self.largest + _NOISE * (a.noise + b.noise) + _ROUNDINGS * _FLOOR
            self._gradients[a.name] = distance, a.unsure + b.unsure
        if distance > allowed:
            return Divergence(a, call, "differs", distance, allowed)
        return None

    def _of_update(self, call: int, a: Event, x: Sketch, y: Sketch) -> Divergence | None:
        before = self._starts.get(a.name)
        if before is None:
            return None
        update, other = _difference(x, before[0]), _difference(y, before[1])
        moved = max(update.norm, other.norm)
        if moved == 0.0:
            return None
        gradient, unsure = self._gradients.get(a.name, (0.0, 0.0))
        # Adam's first steps take the sign of each element, and small ones may have the other: such
        # an update is apart by 2.
        signs = 2.0 * math.sqrt(2.0 * unsure) if gradient > 0.0 else 0.0
        allowed = _AMPLIFIED * gradient + 4.0 * math.sqrt(gradient) + signs + _ROUNDINGS * _FLOOR
        rounded = max(sketch.norm * sketch.roundoff for sketch in (x, y, *before))
        allowed += 4.0 * rounded / moved
        distance = update.distance(other)
        if distance > allowed:
            what = "differs, by gradients that do not"
            return Divergence(a, call, what, distance, allowed)
        return None


def _difference(x: Sketch, y: Sketch) -> Sketch:
    sums = tuple(a - b for a, b in zip(x.sums, y.sums, strict=True))
    return dataclasses.replace(x, norm=math.hypot(*sums), sums=sums)


def _roundoff(x: Sketch, y: Sketch) -> float:
    """Distance by rounding to two dtypes; 0 where both runs have the same bits to begin with."""
    return max(x.roundoff, y.roundoff) if x.dtype != y.dtype or x.roundoff > _FLOOR else 0.0


def compare_records(first: Record, second: Record) -> Comparison:
    """Matches the events of two records by module, op and call, and finds the first divergence.

    Args:
        first: Whose order counts.
        second: Of the same program; dtypes, ranks and versions of torch may be others. Where the
            number of ranks differs, tensors of other shapes are not compared.
    """
    reference: dict[object, list[tuple[int, Event]]] = defaultdict(list)
    for place, event in enumerate(second.events):
        reference[event.key].append((place, event))
    calls: dict[object, int] = defaultdict(int)
    comparing = _Comparing(first, second)
    matched, only_first = 0, 0
    divergence = None
    own_alone: Event | None = None
    met: set[int] = set()  # Places in the second run.
    last = 0
    for event in first.events:
        call = calls[event.key]
        calls[event.key] += 1
        others = reference[event.key]
        if call >= len(others):
            only_first += 1
            if divergence is None and event.kind == "op":
                own_alone = own_alone or event
            elif divergence is None:
                divergence = Divergence(event, call, "is in the first run only")
            continue
        matched += 1
        place, other = others[call]
        met.add(place)
        if divergence is None:
            divergence = comparing.divergence(call, event, other)
            last = max(last, place)
    only_second = len(second.events) - matched
    if divergence is None and first.skipped != second.skipped:
        divergence = Divergence(first.events[-1], 0, "the step is skipped in one run only")
    before = enumerate(second.events[:last])
    torchs_alone = (e for place, e in before if place not in met and e.kind == "op")
    alone = own_alone, next(torchs_alone, None)
    return Comparison(matched, only_first, only_second, divergence, alone, comparing.largest)
