import torch
from torch import Tensor

def build_info() -> dict[str, str]: ...
def begin_unscale(scale: Tensor) -> tuple[Tensor, Tensor]: ...
def unscale_gradients(
    optimizer: object, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
) -> tuple[dict[torch.device, Tensor], list[Tensor]]: ...
def combine_flags(flags: list[Tensor], device: torch.device) -> Tensor: ...
def flag_for_optimizer(flags: list[Tensor], device: torch.device) -> Tensor: ...
def update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    flags: list[Tensor],
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis_tracker: Tensor | None,
    hysteresis: int,
    min_scale: float | None,
    max_scale: float | None,
) -> None: ...
