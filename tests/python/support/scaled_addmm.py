# SPDX-License-Identifier: Apache-2.0
"""torch 2.15's op that adds a product in fp8, for devices and versions for which torch has none.

Call :func:`define` in a program of its own: fastamp looks for the op once.
"""

from __future__ import annotations

import time

import torch
from torch.utils._pytree import tree_map_only

#: As torch 2.15 prints it.
SCHEMA = (
    "_scaled_addmm_(Tensor(a!) self, Tensor mat1, Tensor mat2, Tensor[] scale_a, int[] recipe_a, "
    "int[] swizzle_a, Tensor[] scale_b, int[] recipe_b, int[] swizzle_b, int[] contraction_dim=[], "
    "*, Scalar beta=1, Scalar alpha=1, bool use_fast_accum=False) -> Tensor(a!)"
)
#: Seconds between its reading of a sum and its writing, in which others could be overwritten.
pause = 0.0
#: Not empty where torch has the op: then its kernel for tensors without numbers checks arguments.
checked_by_torch: list[bool] = []
_libraries: list[torch.library.Library] = []


def is_torchs() -> bool:
    """Whether this torch has the op, for whatever device."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    return "aten::_scaled_addmm_" in names and not _libraries


def define(device: str) -> None:
    """Registers a kernel of the op for a device, and the op itself where torch has none."""
    if is_torchs():
        checked_by_torch.append(True)
    else:
        fragment = torch.library.Library("aten", "FRAGMENT")
        fragment.define(SCHEMA)
        _libraries.append(fragment)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_addmm_", _add_product, device.upper())
    _libraries.append(library)


def _add_product(
    sum_,
    mat1,
    mat2,
    scale_a,
    recipe_a,
    swizzle_a,
    scale_b,
    recipe_b,
    swizzle_b,
    contraction_dim=(),
    *,
    beta=1,
    alpha=1,
    use_fast_accum=False,
):
    """The definition in torch.nn.functional.scaled_addmm: one rounding, to the dtype of the sum."""
    assert ([*recipe_a], [*recipe_b]) == ([0], [0])  # ScalingType.TensorWise
    assert not [*swizzle_a, *swizzle_b, *contraction_dim]
    assert beta == alpha == 1
    if checked_by_torch:
        scales = scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b
        given = tree_map_only(torch.Tensor, lambda t: t.to("meta"), (sum_, mat1, mat2, *scales))
        torch.ops.aten._scaled_addmm_(*given, contraction_dim, use_fast_accum=use_fast_accum)
    assert sum_.is_contiguous()
    assert sum_.data_ptr() % 16 == 0
    product = torch._scaled_mm(mat1, mat2, *scale_a, *scale_b, out_dtype=torch.float32)
    result = sum_.float() + product
    time.sleep(pause)
    return sum_.copy_(result)
