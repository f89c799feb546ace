# SPDX-License-Identifier: Apache-2.0
"""Tools that find out what mixed precision did: see docs/debugging.md and docs/trace.md."""

from __future__ import annotations

from fastamp._C import NumberRange
from fastamp._debug.bisect import bisect
from fastamp._debug.bisect.bisect_report import BisectReport, Fp32Op
from fastamp._debug.check import check
from fastamp._debug.check.rules import Cause, CheckReport, Finding
from fastamp._debug.inspect import inspect
from fastamp._debug.inspect.inspect_report import InspectReport
from fastamp._debug.inspect.inspect_rows import GradientRow, LossScale, OpRow, Title, WeightRow
from fastamp._debug.trace import trace
from fastamp._debug.trace.trace_rows import TraceRow
from fastamp._install.installation import torch_kernels
from fastamp._scaler.history_plot import plot_history
from fastamp._scaler.log_to import StepLog, log_to
from fastamp._scaler.reports import (
    NonFiniteGradient,
    OverflowReport,
    StepRecord,
    UnderflowReport,
    ZerosOfGradient,
)
from fastamp._util.publish import publish

__all__ = [
    "BisectReport",
    "Cause",
    "CheckReport",
    "Finding",
    "Fp32Op",
    "GradientRow",
    "InspectReport",
    "LossScale",
    "NonFiniteGradient",
    "NumberRange",
    "OpRow",
    "OverflowReport",
    "StepLog",
    "StepRecord",
    "Title",
    "TraceRow",
    "UnderflowReport",
    "WeightRow",
    "ZerosOfGradient",
    "bisect",
    "check",
    "inspect",
    "log_to",
    "plot_history",
    "torch_kernels",
    "trace",
]

publish(__name__, globals())
