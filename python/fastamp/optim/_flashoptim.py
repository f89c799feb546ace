# SPDX-License-Identifier: Apache-2.0
"""Masters in checkpoints of FlashOptim: what it calls error bits, beside 16-bit parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fastamp.optim._remainders import of_shards

if TYPE_CHECKING:
    from torch import Tensor

# A master less its parameter, in so many parts of half a unit of the parameter: 127 as int8, 32767
# as int16. A float32 master comes back within 2^-16 units of the parameter, or 2^-8.
ERROR_BITS = "error_bits"
# The group's option that says how wide masters are, in bytes: 3 or 4.
_WIDTH = "master_bytewidth"
_PARTS = {torch.int8: 127, torch.int16: 32767}
# Bits of the significand behind the point, and the least exponent.
_FORMATS = {torch.bfloat16: (7, -126), torch.float16: (10, -14)}


def check_loaded(function: str, state: Any, param: Tensor, group: dict[str, Any]) -> None:
    """Refuses a parameter's state in a checkpoint that FlashOptim saved in a way not read here.

    Args:
        function: What the user called.
        state: The state; anything that is no dict is another's concern.
        param: The parameter that it is for.
        group: The group of the checkpoint.

    Raises:
        ValueError: Moments are compressed, or error bits do not fit the parameter.
    """
    if not isinstance(state, dict):
        return
    compressed = [key for key in state if isinstance(key, str) and key.endswith("::quantized")]
    if compressed:
        raise ValueError(
            f"{function}: expected moments in floating point, got FlashOptim's {compressed[0]}; "
            "save them with compress_state_dict=False"
        )
    bits = state.get(ERROR_BITS)
    if bits is None:
        return
    width = group.get(_WIDTH)
    is_integer = isinstance(bits, torch.Tensor) and bits.dtype in _PARTS
    is_cast = isinstance(bits, torch.Tensor) and bits.dtype == param.dtype and width in (3, 4)
    if param.dtype not in _FORMATS or not (is_integer or is_cast) or bits.shape != param.shape:
        got = f"{bits.dtype} of shape {tuple(bits.shape)}" if hasattr(bits, "shape") else repr(bits)
        raise ValueError(
            f"{function}: expected {ERROR_BITS} as FlashOptim saves them for a 16-bit parameter of "
            f"shape {tuple(param.shape)}, got {got} for {param.dtype} and {_WIDTH}={width!r}"
        )


def as_integers(bits: Tensor, group: dict[str, Any]) -> Tensor:
    """Error bits as integers: a checkpoint has them in the parameter's dtype.

    FlashOptim stores 16 bits under that dtype's name, and 8 bits as numbers of it.
    """
    if not bits.is_floating_point():
        return bits
    return bits.to(torch.int8) if group[_WIDTH] == 3 else bits.view(torch.int16)


def master_from_error_bits(param: Tensor, bits: Tensor) -> Tensor:
    """The float32 master, such that the parameter is it rounded to nearest even.

    Where the bits say half a unit, or round beyond it, the nearest such master is taken.
    """
    master: Tensor = of_shards(_master_from_error_bits, param, bits)
    return master


def _master_from_error_bits(param: Tensor, bits: Tensor) -> Tensor:
    digits, least = _FORMATS[param.dtype]
    wide = param.double()
    exponent = (torch.frexp(wide)[1] - 1).clamp(min=least).masked_fill(wide == 0, least)
    # The bits of a power of two: exact, where kernels of ldexp and exp2 need not be.
    half_a_unit = (exponent.long() + (1023 - digits - 1) << 52).view(torch.float64)
    part = (bits.float() / _PARTS[bits.dtype]).double()  # rounded as FlashOptim rounds it
    master = (wide + part * half_a_unit).float()
    neighbor = master.to(param.dtype).double()
    inside = torch.nextafter(((wide + neighbor) / 2).float(), wide.float())
    master = torch.where(neighbor == wide, master, inside)
    return torch.where(torch.isfinite(neighbor), master, wide.float())
