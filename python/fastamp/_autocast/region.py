# SPDX-License-Identifier: Apache-2.0
"""Mixed-precision regions."""

from __future__ import annotations

import inspect
from typing import Any

import torch

import fastamp._C as _C
from fastamp._autocast import region_hooks  # noqa: F401  (sets things up)
from fastamp._autocast.entering import as_enter
from fastamp._autocast.script import ScriptedAs
from fastamp._dynamo import compiled_regions, compiler  # noqa: F401  (the first sets things up)
from fastamp._float8 import graphs, shards  # noqa: F401  (set things up)
from fastamp._float8.recipe import Float8Recipe, recipe_numbered, region_arguments
from fastamp._util.stepwise import in_steps, run_within

__all__ = ["autocast"]


def _rebuild(
    cls: type,
    device: str,
    dtype: torch.dtype,
    flags: tuple[bool, bool],
    extra: dict[str, Any],
    float8: Float8Recipe | bool | None = None,
) -> Any:
    region: Any = cls.__new__(cls)  # type: ignore[call-overload]
    region.device = device
    region.fast_dtype = dtype
    region._enabled, region._cache_enabled = flags
    if float8 is not None:
        _, region.float8_number = region_arguments(device, dtype, float8=float8)
    region.__dict__.update(extra)
    return region


class autocast(_C.Region, torch.amp.autocast_mode.autocast):  # noqa: N801  (torch's name)
    """A region in which ops run in lower precision where that is safe, as ``torch.autocast``.

    Works as a context manager and as a decorator: of generators, coroutines and async generators,
    too, each step of which runs in the region. Takes the same arguments, gives the same results
    bit for bit, and nests with ``torch.autocast`` in any order; entering takes a fifth of the time.
    Beyond torch's: one region object may be entered again while it is open, be shared by threads,
    and be left in another order than it was entered.

    Args:
        device_type: ``"cuda"``, ``"cpu"`` or another device type torch has autocast for (those run
            torch's kernels).
        dtype: ``torch.float16`` or ``torch.bfloat16``; by default
            ``torch.get_autocast_dtype(device_type)``. On ``"cuda"``, ``torch.float8_e4m3fn`` means
            ``torch.bfloat16`` with ``float8=True``.
        enabled: ``False`` switches autocast off inside the region.
        cache_enabled: Whether casts of weights are kept until the outermost region ends; by default
            the current setting.
        float8: A :class:`fastamp.float8.Recipe`, or ``True`` for the default one: linear layers run
            in fp8 and all else in ``dtype``, by default ``torch.bfloat16``; see docs/float8.md. On
            ``"cpu"`` this is a slow reference. By default, a region that names a dtype ends the
            recipe of a region around it, and one that names none keeps it; ``False`` ends it.

    Raises:
        TypeError: ``float8`` is something else.
        ValueError: ``device_type`` is not a str; the recipe contradicts the other arguments.
        RuntimeError: torch has no autocast for ``device_type``; bfloat16 on a GPU without it.

    Warns:
        UserWarning: autocast cannot work here (no CUDA, dtype not supported on CPU); the region is
            disabled.

    Note:
        The state is thread-local, as torch's, and is torch's: ``torch.is_autocast_enabled()`` shows
        the truth inside.
    """

    __enter__ = as_enter(_C.Region.__enter__)
    _jit_override_qualname = ScriptedAs(torch.amp.autocast_mode.autocast)

    def __call__(self, func: Any) -> Any:
        """Decorates a function."""
        stepping = in_steps(func, run_within(self))
        wrapped: Any = super().__call__
        return wrapped(func) if stepping is None else stepping

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles as torch's do: the settings, whether or not the region is open."""
        flags = (self._enabled, self._cache_enabled)
        settings = (type(self), self.device, self.fast_dtype, flags, dict(self.__dict__))
        # Numbers are those of this process.
        float8 = (
            self.float8 if self.float8_number else None if self.float8_number is None else False
        )
        return _rebuild, (*settings, float8)

    @property
    def device(self) -> str:
        """The device type, as given. The first thing that dynamo asks a region for."""
        if self.float8_number or (self.float8_number == 0 and any(_C.float8_numbers())):
            # Its graphs have no place for the recipe that the region sets, or for its end.
            compiler.skip_frame_if_traced("a region that sets an fp8 recipe runs eagerly")
        return _C.Region.device.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @device.setter
    def device(self, device: str) -> None:
        _C.Region.device.__set__(self, device)  # type: ignore[attr-defined]

    @property
    def float8(self) -> Float8Recipe | None:
        """The region's own recipe, if it has one."""
        return recipe_numbered(self.float8_number) if self.float8_number else None


def _signature() -> inspect.Signature:
    torchs = inspect.signature(torch.amp.autocast_mode.autocast)
    keyword = inspect.Parameter("float8", inspect.Parameter.KEYWORD_ONLY, default=None)
    return torchs.replace(parameters=[*torchs.parameters.values(), keyword])


# The native __init__ has no signature of its own.
autocast.__signature__ = _signature()  # type: ignore[attr-defined]

compiler.when_dynamo_loads(lambda: compiler.trace_as_torch_autocast(autocast))
