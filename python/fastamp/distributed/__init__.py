# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients under DistributedDataParallel: hooks for ``ddp.register_comm_hook``.

And float32 gradients of 16-bit parameters, ``fp32_main_grads``, and weights that ``fully_shard``
gathers in fp8, ``float8_all_gather``. See docs/distributed.md, which also
has norms over several processes.
"""

from __future__ import annotations

from fastamp._util.publish import publish
from fastamp.distributed._compression import CompressHook, compress_hook
from fastamp.distributed._float8_all_gather import Float8AllGather, float8_all_gather
from fastamp.distributed._fp32_main_grads import fp32_main_grads
from fastamp.distributed._reduction import fp32_reduce_hook

__all__ = [
    "CompressHook",
    "Float8AllGather",
    "compress_hook",
    "float8_all_gather",
    "fp32_main_grads",
    "fp32_reduce_hook",
]

publish(__name__, globals())
