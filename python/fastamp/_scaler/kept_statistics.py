# SPDX-License-Identifier: Apache-2.0
"""Running statistics of batch norms, put back where a step was skipped."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch._C._nn import unflatten_dense_tensors
from torch._subclasses.fake_tensor import is_fake
from torch.nn.modules.batchnorm import _NormBase

from fastamp._util.tensors import on_device

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.utils.hooks import RemovableHandle

__all__ = ["KeptStatistics", "RestoredStatistics"]


_NAMES = ("running_mean", "running_var", "num_batches_tracked")


def _statistics_of(module: torch.nn.Module) -> list[Tensor]:
    found: list[Tensor] = []
    waiting, seen = [module], {id(module)}
    for norm in waiting:  # modules() makes names, too, which takes longer than the rest.
        for part in norm._modules.values():
            if part is not None and id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)
        if isinstance(norm, _NormBase) and norm.track_running_stats:
            # As attributes, buffers take ten times as long.
            buffers = map(norm._buffers.get, _NAMES)
            found += [buffer for buffer in buffers if buffer is not None]
    return found


class SavedStatistics:
    """Statistics and their values at some time, those of a device and a dtype in one tensor.

    Tensor subclasses, such as DTensors, have a copy each.
    """

    def __init__(self, statistics: list[Tensor]) -> None:
        """Copies them."""
        self._groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        subclasses = []
        for statistic in statistics:
            if type(statistic) is torch.Tensor:
                self._groups[statistic.device, statistic.dtype].append(statistic)
            else:
                subclasses.append(statistic)
        self._saved = {key: _join(group) for key, group in self._groups.items()}
        self._pairs = [(each, each.clone()) for each in subclasses]

    def has_values(self) -> bool:
        """Whether it can be put back: a pass over fake tensors, as in an export, has no values."""
        copies = [*self._saved.values(), *(copy for _, copy in self._pairs)]
        return not any(map(is_fake, copies))

    def put_back(self) -> None:
        """Copies the values of then into the statistics."""
        for key, group in self._groups.items():
            _copy_into(group, self._saved[key])
        for statistic, copy in self._pairs:
            statistic.copy_(copy)

    def put_back_where(self, flags: tuple[Tensor, ...]) -> None:
        """Copies them if a flag is raised. Waits for nothing."""
        raised: dict[torch.device, Tensor] = {}
        for home in {each.device for each in (*self._saved.values(), *(s for s, _ in self._pairs))}:
            here = [on_device(flag, home).ne(0) for flag in flags]
            raised[home] = torch.stack(here).any()
        for key, group in self._groups.items():
            _copy_into(group, torch.where(raised[key[0]], self._saved[key], _join(group)))
        for statistic, copy in self._pairs:
            statistic.copy_(torch.where(raised[statistic.device], copy, statistic))


def _join(tensors: list[Tensor]) -> Tensor:
    """Copies tensors into one of its own. Not by ``cat``, an op that policies may lower."""
    joined = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
    torch._foreach_copy_(unflatten_dense_tensors(joined, tensors), tensors)
    return joined


def _copy_into(tensors: list[Tensor], joined: Tensor) -> None:
    torch._foreach_copy_(tensors, unflatten_dense_tensors(joined, tensors))


class KeptStatistics:
    """The statistics of a module, as they were before the first forward pass of an iteration."""

    def __init__(self, function: str, module: Any) -> None:
        """Follows the forward passes of a module in training.

        Raises:
            TypeError: It is no module.
            ValueError: It has no norm with running statistics.
        """
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"{function}: expected module to be a torch.nn.Module, got {type(module).__name__}"
            )
        if not _statistics_of(module):
            raise ValueError(
                f"{function}: expected a module with running statistics, as of BatchNorm, got a "
                f"{type(module).__name__} without any"
            )
        self._before: SavedStatistics | None = None
        self._hook = module.register_forward_pre_hook(self._save)

    @torch.no_grad()
    def _save(self, module: torch.nn.Module, _: Any) -> None:
        if self._before is None and module.training:
            before = SavedStatistics(_statistics_of(module))
            if torch.compiler.is_dynamo_compiling() or before.has_values():
                self._before = before

    @torch.no_grad()
    def poll(self, flags: tuple[Tensor, ...]) -> None:
        """Ends an iteration: puts the statistics back if a flag is raised. Waits for nothing."""
        before, self._before = self._before, None
        if before is None:
            return
        if not all(flag.is_cpu for flag in flags):
            before.put_back_where(flags)
        elif any(flags):  # What the host has, it need not wait for.
            before.put_back()

    def remove(self) -> None:
        """Follows the module no longer. Safe to call again."""
        self._hook.remove()
        self._before = None


class RestoredStatistics:
    """Statistics of all modules that one scaler or guard puts back."""

    def __init__(self) -> None:
        """Has none yet."""
        self._kept: OrderedDict[int, KeptStatistics] = OrderedDict()

    def add(self, function: str, module: Any) -> RemovableHandle:
        """Adds a module; see :meth:`fastamp.StepGuard.restore_on_skip`."""
        kept = KeptStatistics(function, module)
        handle = _Handle(self._kept)
        self._kept[handle.id] = kept
        return handle

    def poll(self, flags: Iterable[Tensor]) -> None:
        """Ends an iteration of all."""
        flags = tuple(flags)
        for kept in tuple(self._kept.values()):
            kept.poll(flags)


class _Handle(torch.utils.hooks.RemovableHandle):
    """Removes the hook of the module, too."""

    def remove(self) -> None:
        table = self.hooks_dict_ref()
        kept = None if table is None else table.get(self.id)
        if kept is not None:
            kept.remove()
        super().remove()
