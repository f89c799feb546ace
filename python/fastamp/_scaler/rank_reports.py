# SPDX-License-Identifier: Apache-2.0
"""Finds which rank had inf or NaN: reports of an overflow from all ranks, gathered or by files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fastamp._scaler.reports import OverflowReport, report_from_dict

__all__ = ["BYTES", "gathered", "merged"]

#: What each rank sends, whatever it has to report.
BYTES = 2048
_LONGEST_NAME = 200


def _of_rank(report: OverflowReport, rank: int) -> OverflowReport:
    return replace(report, gradients=[replace(g, rank=rank) for g in report.gradients])


def _packed(report: OverflowReport) -> bytes:
    """Returns a report in BYTES bytes: the gradients with most inf and NaN, as many as fit."""
    kept = sorted(report.gradients, key=lambda g: -(g.inf + g.nan))
    kept = [
        replace(g, name=g.name if len(g.name) <= _LONGEST_NAME else g.name[:_LONGEST_NAME] + "...")
        for g in kept
    ]
    while True:
        more = report.more + len(report.gradients) - len(kept)
        text = json.dumps(replace(report, gradients=kept, more=more).as_dict()).encode()
        if len(text) <= BYTES:
            return text.ljust(BYTES)
        kept = kept[: min(len(kept) - 1, len(kept) * BYTES // len(text))]


def gathered(report: OverflowReport, group: Any) -> OverflowReport:
    """Gathers the reports of a step that all members of a group have skipped.

    Nothing is sent if the report says that no step was skipped; all members have to know the same.

    Args:
        report: This rank's.
        group: A process group.

    Returns:
        On the group's first rank that of all ranks; on others their own, with their rank.
    """
    distributed = torch.distributed
    report = _of_rank(report, distributed.get_rank())
    if not report:
        return report
    device = "cuda" if distributed.get_backend(group) == "nccl" else "cpu"
    packed = torch.frombuffer(bytearray(_packed(report)), dtype=torch.uint8).to(device)
    first = distributed.get_global_rank(group, 0)
    is_first = distributed.get_rank() == first
    count = distributed.get_world_size(group)
    received = [torch.empty_like(packed) for _ in range(count)] if is_first else None
    distributed.gather(packed, received, dst=first, group=group)
    if received is None:
        return report
    texts = [bytes(each.tolist()).decode() for each in received]
    reports = [json.loads(text) for text in texts]
    name = "a rank's report"
    return merged([report_from_dict(each, "overflow_report", name) for each in reports])


def merged(reports: Sequence[OverflowReport]) -> OverflowReport:
    """Returns one report of the last step that any rank has skipped, in the order of ranks."""
    skipped = [report for report in reports if report.step is not None]
    if not skipped:
        return OverflowReport()
    step = max(report.step or 0 for report in skipped)
    of_step = [report for report in skipped if report.step == step]
    return replace(
        of_step[0],
        gradients=[gradient for report in of_step for gradient in report.gradients],
        more=sum(report.more for report in of_step),
    )
