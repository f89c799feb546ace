# SPDX-License-Identifier: Apache-2.0
"""Weights of ``fully_shard`` that are cast to fp8 before they are gathered."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fastamp._C as _C
from fastamp._float8.gathered_weight import GatheredWeight
from fastamp._float8.recipe import Float8Recipe, fields_of
from fastamp._float8.shards import agree_on_largest
from fastamp._util.watched_step import watch_all_steps

__all__ = ["Float8AllGather", "float8_all_gather"]

_FUNCTION = "distributed.float8_all_gather"


class _Weight:
    """A sharded weight. ``fully_shard`` looks for two of these methods on its local tensor."""

    def __init__(self, owner: Float8AllGather, name: str, module: nn.Module, key: str) -> None:
        self.owner, self.name, self.key = owner, name, key
        # Weak: its tensors lead here, and cycles through tensors are not always collected.
        self._module = weakref.ref(module)
        self._param = weakref.ref(module._parameters[key])
        self.amax = torch.zeros(())

    @property
    def param(self) -> Any:
        """The sharded parameter, which lives as long as anybody gathers it."""
        return self._param()

    def attach(self) -> None:
        """Gives the methods to the local tensor, which loading and moving a model replace."""
        module = self._module()
        param: Any = None if module is None else module._parameters[self.key]
        # While it is gathered, the module has another parameter.
        if hasattr(param, "_local_tensor") and not isinstance(param._local_tensor, GatheredWeight):
            self._param = weakref.ref(param)
            param._local_tensor.fsdp_pre_all_gather = self.fsdp_pre_all_gather
            param._local_tensor.fsdp_post_all_gather = self.fsdp_post_all_gather

    def versions(self) -> tuple[int, int, int]:
        """Returns what changes with the numbers of the weight."""
        return self.param._version, self.param._local_tensor._version, id(self.param._local_tensor)

    def part(self) -> Tensor:
        """This rank's numbers as they would be sent in 16 bits, before a cast to fp8."""
        local: Tensor = self.param._local_tensor.detach()
        return local if self.owner.param_dtype is None else local.to(self.owner.param_dtype)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The bytes that this rank sends, and the scale, which all ranks know."""
        del outer_stride, module
        if any(size % 16 for size in outer_size):
            raise ValueError(
                f"{_FUNCTION}: expected both sizes of {self.name} on a rank of tensor parallelism "
                f"to be multiples of 16, got {tuple(outer_size)}; float8.exclude leaves it out"
            )
        self.owner._agree(mp_policy.param_dtype)
        part = self.part()
        missing = math.ceil(outer_size[0] / mesh.size()) - part.shape[0]
        if missing > 0 and part.shape[1:] == outer_size[1:]:  # The last ranks have fewer rows.
            part = torch.cat([part, part.new_zeros(missing, *part.shape[1:])])
        rows, inverse = _C.cast_part_to_float8(
            part, self.amax.to(part.device), self.owner.recipe.forward_dtype
        )
        # As bytes: not all backends send fp8.
        return (rows.view(torch.uint8),), (inverse, outer_size)

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], sent: Any, param_dtype: Any, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The weight, of the bytes of all ranks, in memory that ``fully_shard`` owns."""
        (data,), (inverse, size) = gathered, sent
        if out is not None:
            getattr(out, "_local_tensor", out).inverse_scale = inverse
            return None
        rows = data.view(self.owner.recipe.forward_dtype).view(-1, size[1])[: size[0]]
        return GatheredWeight(rows, inverse, param_dtype), ()


class Float8AllGather:
    """Result of :func:`float8_all_gather`.

    Attributes:
        names: Of the weights that are gathered in fp8, as in ``model.named_parameters()``.
        recipe: That of the regions.
    """

    def __init__(self, weights: list[tuple[str, nn.Module, str]], recipe: Float8Recipe) -> None:
        """Takes the weights that :func:`float8_all_gather` has found."""
        self.recipe = recipe
        self.param_dtype: torch.dtype | None = None
        self._weights = [_Weight(self, *each) for each in weights]
        self.names = [each.name for each in self._weights]
        self._is_changed = True
        self._versions: list[Any] = []
        self._attach()

    def __repr__(self) -> str:
        """Returns it with the weights' names."""
        return f"Float8AllGather({', '.join(self.names)})"

    def refresh(self) -> None:
        """Makes the next gather look for the largest magnitudes again; all ranks call it.

        Steps of optimizers and edits of parameters do so by themselves. An edit of a part, such as
        ``parameter.to_local().add_(...)``, does not on ranks whose part is empty.
        """
        self._is_changed = True

    def _attach(self, *_: Any) -> None:
        for weight in self._weights:
            weight.attach()

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        own = {id(weight.param) for weight in self._weights}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            self.refresh()

    def _agree(self, param_dtype: torch.dtype | None) -> None:
        """Finds the largest magnitudes of all weights together, if any has changed."""
        versions = [weight.versions() for weight in self._weights]
        if not self._is_changed and versions == self._versions and self.param_dtype == param_dtype:
            return
        self.param_dtype = param_dtype
        by_mesh: dict[Any, list[tuple[Tensor, tuple[int, ...]]]] = defaultdict(list)
        for weight in self._weights:
            weight.amax = _C.float8_amax(weight.part())
            placements = weight.param.placements
            spread = tuple(i for i, each in enumerate(placements) if not each.is_replicate())
            by_mesh[weight.param.device_mesh].append((weight.amax, spread))
        for mesh, wanted in by_mesh.items():
            agree_on_largest(mesh, wanted)
        self._versions, self._is_changed = versions, False


def _linear_weights(model: nn.Module, recipe: Float8Recipe) -> Iterator[tuple[str, nn.Module, str]]:
    """The sharded weights that regions with the recipe multiply in fp8, and nothing else uses."""
    uses: dict[int, list[tuple[str, nn.Module, str]]] = defaultdict(list)
    for name, module in model.named_modules():
        for key, param in module._parameters.items():
            if hasattr(param, "_local_tensor"):
                uses[id(param)].append((f"{name}.{key}" if name else key, module, key))
    for found in uses.values():
        _, module, key = found[0]
        weight: Any = module._parameters[key]
        is_linear = all(isinstance(each, nn.Linear) and k == "weight" for _, each, k in found)
        if is_linear and _C.runs_in_float8(fields_of(recipe), weight):
            yield found[0]


def _check_state(name: str, module: nn.Module, key: str) -> None:
    weight: Any = module._parameters[key]
    if hasattr(weight._local_tensor, "fsdp_pre_all_gather"):
        raise ValueError(
            f"{_FUNCTION}: expected {name} to be gathered as fully_shard does, got a weight that "
            "has all-gather functions already"
        )
    if weight._local_tensor.device.type != weight.device_mesh.device_type:
        raise NotImplementedError(
            f"{_FUNCTION}: expected {name} on {weight.device_mesh.device_type}, got "
            f"{weight._local_tensor.device} (offloaded)"
        )


def _check_groups(model: nn.Module) -> None:
    for module in model.modules():
        get_state: Any = getattr(module, "_get_fsdp_state", None)
        state = None if get_state is None else get_state()
        if getattr(state, "_is_root", None) is not None:
            raise ValueError(
                f"{_FUNCTION}: expected a model before its first forward pass, got one that has run"
            )
        group = getattr(state, "_fsdp_param_group", None)
        if getattr(group, "_use_post_forward_mesh", False):
            raise NotImplementedError(
                f"{_FUNCTION}: expected reshard_after_forward to be True or False, got a number "
                "of ranks"
            )


def float8_all_gather(model: nn.Module, recipe: Float8Recipe | None = None) -> Float8AllGather:
    """Sends the weights of linear layers in fp8, half of bfloat16's bytes, under ``fully_shard``.

    Each rank casts its shard with the scale of the whole weight, so a region with the recipe gets
    the very fp8 numbers that it would make of the gathered weight, and does not cast. The largest
    magnitudes of all weights are agreed on by one all-reduce (one for each dimension of a mesh in
    which they are sharded) at the first gather after an optimizer's step. Bits of training do not
    change. **Outside of such regions the weights are the fp8 numbers**: what evaluates the model in
    bfloat16 or float32 gets less than it would without.

    Call it on all ranks, after ``fully_shard`` and before the first forward pass; it changes how
    the model gathers for good.

    Args:
        model: Modules that ``fully_shard`` has sharded. Meant are the weights of ``nn.Linear`` that
            the recipe runs in fp8, by size, dtype and :class:`fastamp.float8.exclude`, and that no
            other kind of module shares.
        recipe: Of the regions that the model runs in; by default ``float8.Recipe()``.

    Returns:
        The names of the weights. The model keeps it.

    Raises:
        TypeError: An argument is something else.
        ValueError: No weight is meant, or a forward pass has run, or a weight has all-gather
            functions already.
        NotImplementedError: Shards are offloaded, or resharded to some ranks after forward.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{_FUNCTION}: expected model to be a module, got {type(model).__name__}")
    if not (recipe is None or isinstance(recipe, Float8Recipe)):
        raise TypeError(
            f"{_FUNCTION}: expected recipe to be a float8.Recipe or None, got "
            f"{type(recipe).__name__}"
        )
    recipe = Float8Recipe() if recipe is None else recipe
    weights = list(_linear_weights(model, recipe))
    if not weights:
        raise ValueError(
            f"{_FUNCTION}: expected model to have weights of nn.Linear that fully_shard has "
            "sharded and that run in fp8, got none"
        )
    _check_groups(model)
    for each in weights:
        _check_state(*each)
    gather = Float8AllGather(weights, recipe)
    model.register_forward_pre_hook(gather._attach, prepend=True)
    _gathers.append(weakref.ref(gather, _gathers.remove))
    watch_all_steps(_note_step, lambda: bool(_gathers))
    return gather


_gathers: list[weakref.ref[Float8AllGather]] = []  # Their models keep them.


def _note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for reference in tuple(_gathers):
        if (gather := reference()) is not None:
            gather._note_step(optimizer)
