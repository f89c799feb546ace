# SPDX-License-Identifier: Apache-2.0
"""Everything that the tests of tests/python/distributed do in each process."""

from __future__ import annotations

from typing import Any

import torch

from support import (
    async_save_cases,
    ddp_hook_cases,
    fp32_main_grads_cases,
    guide_cases,
    mesh_norm_cases,
)


def run(rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        "hooks": ddp_hook_cases.run(rank),
        "main_grads": fp32_main_grads_cases.run(rank),
        "mesh": mesh_norm_cases.run(rank),
        "guide": guide_cases.run(rank),
        "async_save": async_save_cases.run(rank),
    }
