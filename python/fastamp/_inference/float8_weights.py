# SPDX-License-Identifier: Apache-2.0
"""Weights of linear layers in fp8: a byte for each element, and a scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.nn.utils import parametrize

import fastamp._C as _C
from fastamp._inference.weights import op_of

__all__ = ["Dequantized", "float8_weights", "only_in_base_dtype", "quantize_linears"]

_FLOAT8 = torch.float8_e4m3fn
_MULTIPLE = 16  # of both sizes of a weight: what fp8 products take


class Dequantized(torch.nn.Module):
    """Computes a weight from its fp8 values and its scale, a power of two.

    The result is in bfloat16, which holds each of these values exactly. An fp8 region casts it to
    the very values it came from; or to twice these with twice the scale, if the largest magnitude
    had been rounded down to a power of two. So the products are those of the float32 weight.
    """

    inverse_scale: torch.Tensor

    def __init__(self, inverse_scale: torch.Tensor) -> None:
        """Takes the factor that gives the values their size back."""
        super().__init__()
        self.register_buffer("inverse_scale", inverse_scale)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the weight."""
        weight: torch.Tensor = values.to(torch.bfloat16) * self.inverse_scale
        return weight


def float8_weights(model: torch.nn.Module) -> set[int]:
    """Ids of the parameters that only ``nn.Linear`` modules have and that their products take."""
    linear: set[int] = set()
    others: set[int] = set()
    for module in model.modules():
        is_linear = op_of(module) == "linear" and not parametrize.is_parametrized(module)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            fits = parameter.dim() == 2 and not any(n % _MULTIPLE for n in parameter.shape)
            wanted = is_linear and name == "weight" and fits and parameter.dtype == torch.float32
            excluded = wanted and _C.is_excluded_from_float8(parameter)
            (linear if wanted and not excluded else others).add(id(parameter))
    return linear - others


def only_in_base_dtype(model: torch.nn.Module) -> set[int]:
    """Ids of the parameters whose products can only be in the base dtype.

    The bias of an fp8 product is added in float32, and weights of products by other ops than
    ``linear`` run in fp8 only while they are float32 parameters that require gradients.
    """
    found: set[int] = set()
    others: set[int] = set()
    for module in model.modules():
        op = op_of(module)
        fp8_sizes = op == "linear" and not any(n % _MULTIPLE for n in module.weight.shape)  # type: ignore[union-attr]
        for parameter in module._parameters.values():
            if parameter is not None:
                (found if op is not None and not fp8_sizes else others).add(id(parameter))
    return found - others


def quantize_linears(
    model: torch.nn.Module, names: Iterable[str], tensors: Mapping[str, torch.Tensor]
) -> dict[str, int]:
    """Puts fp8 values in the place of weights, in place.

    Returns:
        Sizes in bytes now, by name.
    """
    sizes = {}
    for name in names:
        weight = tensors[name]
        scale = _scale_of(weight)
        values = (weight.detach().float() * scale).to(_FLOAT8)
        stored = torch.nn.Parameter(values, requires_grad=False)
        for module in list(model.modules()):
            if module._parameters.get("weight") is weight:
                module._parameters["weight"] = stored
                inverse = (1 / scale).to(torch.bfloat16)
                parametrize.register_parametrization(
                    module, "weight", Dequantized(inverse), unsafe=True
                )
        sizes[name] = stored.nbytes
    return sizes


def _scale_of(weight: torch.Tensor) -> torch.Tensor:
    """The scale of an fp8 region's cast: 2^floor(log2(448 / amax)), without rounding on the way."""
    magnitudes = weight.detach().abs()
    finite = torch.where(torch.isfinite(magnitudes), magnitudes, torch.zeros_like(magnitudes))
    amax = finite.max().double()
    if amax == 0:
        return torch.ones((), device=weight.device)
    _, exponent = torch.frexp(torch.finfo(_FLOAT8).max / amax)
    return torch.ldexp(torch.ones((), device=weight.device), (exponent - 1).clamp(max=126))
