# SPDX-License-Identifier: Apache-2.0
"""Adds to docs/site/torch_ops.json which ops the torch that runs this autocasts.

python tools/torch_ops.py    # once with each torch; needs no fastamp
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

FILE = Path(__file__).resolve().parent.parent / "docs" / "site" / "torch_ops.json"


def autocast_ops(device: str) -> list[str]:
    """Returns the ops that have a kernel of torch's on a device's autocast key."""
    key = f"Autocast{device.upper()}"
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return sorted(name.removeprefix("aten::").removesuffix(".default") for name in registered)


def main() -> None:
    """Rewrites the file."""
    lists = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    version = torch.__version__.partition("+")[0]
    lists[version] = {device: autocast_ops(device) for device in ("cpu", "cuda")}
    ordered = dict(sorted(lists.items(), key=lambda item: [int(n) for n in item[0].split(".")]))
    FILE.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    counts = {device: len(ops) for device, ops in lists[version].items()}
    print(f"torch {version}: {counts}")


if __name__ == "__main__":
    main()
