# SPDX-License-Identifier: Apache-2.0
"""The modules of ``fastamp.torch`` that are not torch's own: mirrors with our names in them."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import fastamp.amp
import fastamp.cpu.amp
import fastamp.cuda.amp
from fastamp._install.module_proxy import Mirror, MirrorFinder
from fastamp._scaler.clip import clip_grad_norm_


def _names(module: ModuleType, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


_FUNCTIONS = ("custom_fwd", "custom_bwd")
_APEX = ("scale_loss", "master_params")

_CLIP: dict[str, Any] = {"clip_grad_norm_": clip_grad_norm_}

#: Our names, by the module of torch's that they are in.
_REPLACED: dict[str, dict[str, Any]] = {
    "amp.autocast_mode": _names(fastamp.amp, ("autocast", *_FUNCTIONS)),
    "amp.grad_scaler": _names(fastamp.amp, ("GradScaler",)),
    "amp": _names(fastamp.amp, ("autocast", "GradScaler", *_FUNCTIONS, *_APEX)),
    "cuda.amp.autocast_mode": _names(fastamp.cuda.amp, ("autocast", *_FUNCTIONS)),
    "cuda.amp.grad_scaler": _names(fastamp.cuda.amp, ("GradScaler",)),
    "cuda.amp": _names(fastamp.cuda.amp, ("autocast", "GradScaler", *_FUNCTIONS, *_APEX)),
    "cuda": {},
    "cpu.amp.autocast_mode": _names(fastamp.cpu.amp, ("autocast",)),
    "cpu.amp.grad_scaler": _names(fastamp.cpu.amp, ("GradScaler",)),
    "cpu.amp": _names(fastamp.cpu.amp, ("autocast", "GradScaler")),
    "cpu": {},
    "nn.utils.clip_grad": _CLIP,
    "nn.utils": dict(_CLIP),
    "nn": {},
    "": _names(fastamp.amp, ("autocast", "GradScaler")),
}


def make_mirrors(package: str) -> None:
    """Puts the mirrors in ``sys.modules`` as ``package`` and its submodules.

    Innermost first, each an attribute of the one around it. Every other submodule of ``package``
    can be imported from then on and is torch's.
    """
    sys.meta_path.insert(0, MirrorFinder(package, "torch"))
    for path, replaced in _REPLACED.items():
        mirrored = sys.modules[f"torch.{path}".rstrip(".")]
        name = f"{package}.{path}".rstrip(".")
        sys.modules[name] = mirror = Mirror(name, mirrored, replaced)
        if path:
            parent, _, child = path.rpartition(".")
            _REPLACED[parent][child] = mirror
