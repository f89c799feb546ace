"""What a gradient scaler asks of an optimizer's step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclasses.dataclass(slots=True, eq=False)
class StepGate:
    """Everything that happens to gradients between ``backward`` and an optimizer, and if it steps.

    Decided on the device: nothing here is read by the host. A scaler sets it as
    ``optimizer._fastamp_gate`` and calls ``optimizer.step``, which takes it.

    Attributes:
        inv_scale: Gradients are multiplied by it; fp32, one element. ``None``: they are unscaled.
        clip_coef: Then by this one, for clipping by norm; fp32, one element. ``None``: 1.
        found_inf: If not 0, nothing but the gradients changes; fp32, one element. ``None``: 0.
        clip_value: Then they are brought within [-clip_value, clip_value]. ``None``: not.
        write_grads: Leave the gradients unscaled and clipped, as torch.amp does; else as they were.
    """

    inv_scale: Tensor | None = None
    clip_coef: Tensor | None = None
    found_inf: Tensor | None = None
    clip_value: float | None = None
    write_grads: bool = True
    _copies: dict[torch.device, StepGate] = dataclasses.field(default_factory=dict, repr=False)

    def for_device(self, device: torch.device) -> StepGate:
        """Returns the same gate with its tensors on a device; one copy per device is kept.

        Copies do not wait for the device, except those to the CPU.
        """
        if device not in self._copies:
            self._copies[device] = StepGate(
                inv_scale=_tensor_on(self.inv_scale, device),
                clip_coef=_tensor_on(self.clip_coef, device),
                found_inf=_tensor_on(self.found_inf, device),
                clip_value=self.clip_value,
                write_grads=self.write_grads,
            )
        return self._copies[device]


def _tensor_on(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    # A copy to the CPU that did not wait would be read before it arrives.
    return None if tensor is None else tensor.to(device, non_blocking=device.type != "cpu")
