# SPDX-License-Identifier: Apache-2.0
"""States by names, as torch's distributed checkpoints have them."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class NamedState:
    """A model, its optimizer and its scaler: ``model``, ``optimizer`` and ``scaler`` of a class."""

    model: Any
    optimizer: Any
    scaler: Any

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scaler.load_state_dict(state["scaler"])
