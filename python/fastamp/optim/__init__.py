# SPDX-License-Identifier: Apache-2.0
"""torch.optim's SGD, Adam, AdamW and Muon with fused passes over memory per step.

Drop-in replacements, ``fuse_`` for optimizers that exist already, and weights that are held in 16
bits, ``low_precision_weights_``. See docs/optim.md.
"""

from __future__ import annotations

from fastamp._util.publish import publish
from fastamp.optim._fuse import fuse_
from fastamp.optim._low_precision_weights import LowPrecisionWeights, low_precision_weights_
from fastamp.optim.adam import Adam
from fastamp.optim.adamw import AdamW
from fastamp.optim.muon import Muon
from fastamp.optim.sgd import SGD

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "LowPrecisionWeights",
    "Muon",
    "fuse_",
    "low_precision_weights_",
]

publish(__name__, globals())
