# SPDX-License-Identifier: Apache-2.0
"""Programs that once differed, shrunk, as the net printed them: reference and source by name."""

from __future__ import annotations

PAST: dict[str, tuple[str, str]] = {
    # Of the net's first version, which stepped without gradients: a documented difference.
    "a_step_with_gradients_after_one_iteration_without": (
        "torch",
        """
        p = nn.Parameter(torch.randn(6, 6))
        opt = torch.optim.SGD([p], lr=0.1)
        scaler = Scaler("cpu", init_scale=2.0**8, growth_interval=1)
        scaler.scale(torch.ones(()))
        record(tried(lambda: scaler.update()))
        with amp("cpu", dtype=torch.float16):
            loss = torch.mm(p, p).float().mean()
        scaler.scale(loss).backward()
        record(tried(lambda: scaler.step(opt) is None))
        record(tried(lambda: scaler.update()))
        record(p, scaler.get_scale())
        """,
    ),
}
