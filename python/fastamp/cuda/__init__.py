# SPDX-License-Identifier: Apache-2.0
"""Training steps as CUDA graphs, and the mirror of ``torch.cuda.amp``."""

from __future__ import annotations

from fastamp._scaler.graphed_step import GraphedStep, graphed_step
from fastamp._util.publish import publish
from fastamp.cuda import amp

__all__ = ["GraphedStep", "amp", "graphed_step"]

publish(__name__, globals())
