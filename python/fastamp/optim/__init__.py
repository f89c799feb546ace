# SPDX-License-Identifier: Apache-2.0
"""torch.optim's SGD, Adam, AdamW and Muon with fused passes over memory per step.

Drop-in replacements, and ``fuse_`` for optimizers that exist already. See docs/optim.md.
"""

from __future__ import annotations

from fastamp.optim._fuse import fuse_
from fastamp.optim.adam import Adam
from fastamp.optim.adamw import AdamW
from fastamp.optim.muon import Muon
from fastamp.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Muon", "fuse_"]
