# SPDX-License-Identifier: Apache-2.0
"""How DistributedDataParallel sums gradients: hooks for ``ddp.register_comm_hook``.

See docs/distributed.md, which also has ``fastamp.main_grads`` and norms over several processes.
"""

from __future__ import annotations

from fastamp.distributed._compression import CompressHook, compress_hook
from fastamp.distributed._reduction import fp32_reduce_hook

__all__ = ["CompressHook", "compress_hook", "fp32_reduce_hook"]
