# SPDX-License-Identifier: Apache-2.0
"""Training weights that are held in 16 bits, where autocast would cast them to anyway."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from types import FrameType
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

import fastamp._C as _C
from fastamp._casts.kept_casts import drop
from fastamp._inference.conversion import (
    Conversion,
    ConvertedParameter,
    check_arguments,
    device_of,
    example_of,
)
from fastamp._inference.regions import ModuleRegion, edits_of, region_of
from fastamp._inference.weights import Use, uses_by_forward, uses_by_type
from fastamp.optim._fused import FusedOptimizer, set_starting_masters

__all__ = ["LowPrecisionWeights", "low_precision_weights_"]

# What transformers' models say of themselves.
_KEPT_BY_MODEL = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


class LowPrecisionWeights:
    """Result of :func:`low_precision_weights_`; its ``str`` is a table.

    Not thread-safe.

    Attributes:
        conversion: What was done with each parameter: a :class:`fastamp.inference.Conversion`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        weights: Iterable[torch.Tensor],
        conversion: Conversion,
        optimizer: FusedOptimizer | None,
    ) -> None:
        """Use :func:`fastamp.optim.low_precision_weights_`."""
        self.conversion = conversion
        self._model = model
        self._weights = {id(weight) for weight in weights}
        self._optimizer = optimizer

    def __str__(self) -> str:
        """A line for each parameter, and the sizes of all."""
        return str(self.conversion)

    def state_dict(self, optimizer: FusedOptimizer | None = None) -> dict[str, Any]:
        """The model's state dict with float32 weights, as one of a float32 model.

        Args:
            optimizer: Who has the masters; by default the one that ``low_precision_weights_`` was
                given. Without one the values are those before the first step, where they are still
                known, or the 16 bits of the weights.

        Returns:
            Tensors by name. It may share memory with the model and the optimizer.
        """
        optimizer = self._chosen("state_dict", optimizer)
        masters = {} if optimizer is None else optimizer.masters()
        state: dict[str, Any] = self._model.state_dict(keep_vars=True)
        for name, value in state.items():
            if id(value) in self._weights:
                starting = _C.starting_master_of(value)
                master = value.detach().float() if starting is None else starting
                state[name] = masters.get(value, master)
            elif isinstance(value, torch.Tensor):
                state[name] = value.detach()
        return state

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        optimizer: FusedOptimizer | None = None,
        *,
        strict: bool = True,
    ) -> None:
        """Loads a state dict of the model; float32 weights become masters, with all their bits.

        (The model's own ``load_state_dict`` rounds them to 16 bits; an element whose 16 bits it
        does not change keeps its master.) The optimizer's own state may be loaded before or after.

        Args:
            state_dict: With weights in float32, as of a float32 model, or in 16 bits.
            optimizer: Who has the masters. It need not be given: whoever steps the weights next
                takes the values.
            strict: As torch's.

        Raises:
            RuntimeError: As torch's ``load_state_dict``.
        """
        self._chosen("load_state_dict", optimizer)
        own = self._model.state_dict(keep_vars=True)
        self._model.load_state_dict(state_dict, strict=strict)
        masters = {}
        for name, weight in own.items():
            value = state_dict.get(name)
            if id(weight) in self._weights and isinstance(value, torch.Tensor):
                masters[weight] = value.detach().to(weight.device, torch.float32, copy=True)
        trained = [weight for weight in masters if weight.requires_grad]
        set_starting_masters(trained, [masters[weight] for weight in trained])

    def _chosen(self, function: str, optimizer: Any) -> FusedOptimizer | None:
        if optimizer is None:
            return self._optimizer
        return _checked_optimizer(function, optimizer)


class _LowPrecisionMark:
    """An attribute of models with low-precision weights, to be copied with them."""

    def __deepcopy__(self, _: Any) -> _LowPrecisionMark:
        """Refuses copies that averages are to be kept in: 16 bits do not hold small changes."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is AveragedModel.__init__.__code__:
                raise _refusal_to_average("AveragedModel")
            frame = frame.f_back
        return _LowPrecisionMark()

    def __reduce__(self) -> tuple[type[bool], tuple[()]]:
        """Pickled models need no fastamp to be read."""
        return bool, ()


def _refusal_to_average(function: str) -> NotImplementedError:
    return NotImplementedError(
        f"{function}: expected a model with float32 weights, got one of low_precision_weights_: "
        "averages of 16 bits lose what a step adds to them; average the float32 values of "
        "LowPrecisionWeights.state_dict(optimizer) (docs/optim.md, low-precision weights)"
    )


@functools.cache
def _refuse_to_average() -> None:
    """Makes averages of a model that were made before its weights had 16 bits refuse it."""
    original = AveragedModel.update_parameters

    @functools.wraps(original)
    def update_parameters(averages: AveragedModel, model: torch.nn.Module) -> None:
        marks = (vars(module).get("_fastamp_low_precision") for module in model.modules())
        if any(isinstance(mark, _LowPrecisionMark) for mark in marks):
            raise _refusal_to_average("AveragedModel.update_parameters")
        original(averages, model)

    AveragedModel.update_parameters = update_parameters  # type: ignore[assignment,method-assign]


def low_precision_weights_(
    model: torch.nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    *,
    keep: Iterable[str] = (),
    optimizer: torch.optim.Optimizer | None = None,
    grads: torch.dtype = torch.float32,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    verbose: bool = True,
) -> LowPrecisionWeights:
    """Holds the weights of a model in 16 bits for training, where autocast would cast them to.

    Weights that only ops of policy ``lower`` use are cast once. Their float32 values become the
    masters that fastamp's optimizers step, so losses and masters are, bit for bit, those of float32
    weights in the same regions (with ``master="remainder"`` but for the ties that docs/optim.md
    describes), and no region casts a weight any more::

        fastamp.optim.low_precision_weights_(model)
        optimizer = fastamp.optim.AdamW(model.parameters(), lr=3e-4, master="remainder")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x)

    The gradients of a weight's uses are summed as torch.amp sums them, however often the model is
    called. Outside of regions, in a penalty for example, a weight has its 16-bit value.

    All other parameters stay float32: those of norms, embeddings, and whatever else an op reads as
    it is. Parameters stay the same objects, shared ones included. The model must run in regions of
    ``dtype`` from now on, in evaluation, too. What is written into a weight later counts, with its
    16 bits; ``LowPrecisionWeights.load_state_dict`` loads float32 values. Frozen parameters are
    cast, too, and have no master: their float32 values are gone. Averages (EMA) have to be of
    ``LowPrecisionWeights.state_dict(optimizer)``, not of copies of the model.

    Args:
        model: On one device, CPU or CUDA; before DistributedDataParallel. Not one of fully_shard,
            which keeps float32 shards and casts them itself.
        dtype: That of the regions: ``torch.bfloat16`` or ``torch.float16``.
        keep: Names of parameters or modules, with wildcards as for ``fnmatch``, that stay float32;
            those that models of transformers name in ``_keep_in_fp32_modules`` stay, too.
        optimizer: One of fastamp's that has the parameters already, if there is one. It may also be
            made later.
        grads: dtype of the weights' gradients: ``torch.float32``, in which they are summed as
            those of float32 weights, or ``dtype``, which takes half the memory and rounds where the
            gradients of several regions or backward passes are summed. DistributedDataParallel
            needs the latter, or :func:`fastamp.distributed.fp32_main_grads`.
        example_inputs: As for :func:`fastamp.inference.convert`: what reads each parameter is then
            seen in a forward pass without values. Without them the classes of the modules decide.
        example_kwargs: Arguments of the forward pass by name.
        verbose: Print what was done, in a line.

    Returns:
        What was done, and the way to state dicts with float32 weights.

    Raises:
        TypeError: An argument has another type, ``optimizer`` is not one of fastamp's, or a
            parameter is no plain tensor.
        ValueError: ``dtype``, ``grads`` or ``keep`` names what there is not; the model is
            converted, has no parameters, has them on several devices, or has gradients.
        RuntimeError: The model cannot run with the example inputs; kernels are not registered.
        NotImplementedError: ``grads=torch.float32`` with a torch without ``Tensor.grad_dtype``.
            The model is not changed then, nor by any other error.
    """
    check_arguments(
        "low_precision_weights_", model, dtype, dtypes="float16 or bfloat16", verbose=verbose
    )
    _check_grads(model, dtype, grads)
    own = None if optimizer is None else _checked_optimizer("low_precision_weights_", optimizer)
    uses = _uses(model, dtype, example_of("low_precision_weights_", example_inputs, example_kwargs))
    reasons = _reasons(model, uses, grads)
    _keep(model, reasons, keep)
    parameters = dict(model.named_parameters())
    before = {name: parameter.nbytes for name, parameter in parameters.items()}
    chosen = {name: parameters[name] for name, reason in reasons.items() if not reason}
    casts = {name: weight.detach().to(dtype) for name, weight in chosen.items()}
    masters = {name: weight.detach() for name, weight in chosen.items() if weight.requires_grad}
    drop(chosen.values())
    for name, weight in chosen.items():
        weight.data = casts[name]
    trained = [chosen[name] for name in masters]
    if grads != dtype:
        hold_grads_in_float(trained)
        _C.mark_low_precision_weights(trained)
    set_starting_masters(trained, list(masters.values()))
    if chosen:
        _refuse_to_average()
        _mark_owners(model, chosen.values())
    rows = [
        ConvertedParameter(
            name, tuple(p.shape), _name_of(p.dtype), reasons[name], before[name], p.nbytes
        )
        for name, p in parameters.items()
    ]
    weights = LowPrecisionWeights(
        model, chosen.values(), Conversion(_name_of(dtype), tuple(rows)), own
    )
    if verbose:
        print(f"low_precision_weights_: {weights.conversion.summary}")
    return weights


def _mark_owners(model: torch.nn.Module, weights: Iterable[torch.Tensor]) -> None:
    """Marks the modules that hold the weights: a part of the model may be averaged by itself."""
    identities = set(map(id, weights))
    for module in model.modules():
        if not identities.isdisjoint(map(id, module._parameters.values())):
            module.__dict__["_fastamp_low_precision"] = _LowPrecisionMark()


def _checked_optimizer(function: str, optimizer: Any) -> FusedOptimizer:
    if isinstance(optimizer, FusedOptimizer):
        return optimizer
    raise TypeError(
        f"{function}: expected optimizer to be one of fastamp.optim, got "
        f"{type(optimizer).__module__}.{type(optimizer).__qualname__}; fastamp.optim.fuse_ makes "
        "one of torch's SGD, Adam or AdamW"
    )


def _check_grads(model: torch.nn.Module, dtype: torch.dtype, grads: Any) -> None:
    if grads not in (torch.float32, dtype):
        raise ValueError(
            f"low_precision_weights_: expected grads to be torch.float32 or {dtype}, got {grads!r}"
        )
    if grads != dtype:
        check_grad_dtype_exists("low_precision_weights_", f"; pass grads={dtype}")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise ValueError(
            "low_precision_weights_: expected a model before DistributedDataParallel, got one in "
            f"it; call low_precision_weights_ first, with grads={dtype}"
        )
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise ValueError(
                "low_precision_weights_: expected a model without gradients, got one of "
                f"{name}; call zero_grad() first"
            )


def check_grad_dtype_exists(function: str, advice: str = "") -> None:
    """Refuses a torch that has no float32 gradients of 16-bit parameters."""
    if not hasattr(torch.Tensor, "grad_dtype"):
        raise NotImplementedError(
            f"{function}: expected a torch with Tensor.grad_dtype for gradients in float32, got "
            f"{torch.__version__}{advice}"
        )


def hold_grads_in_float(weights: Iterable[torch.Tensor]) -> None:
    """Makes the gradients of 16-bit weights float32 from the next backward pass on.

    Not by ``grad_dtype=torch.float32``: torch then refuses gradients of the weight's own dtype,
    which torch.distributed.checkpoint gives all parameters to make an optimizer's state.

    Args:
        weights: Leaves without gradients.
    """
    _C.ask_of_idle_hooks(_has_idle_hooks)
    for weight in weights:
        weight.grad_dtype = None
        weight.register_post_accumulate_grad_hook(_widen_grad)  # type: ignore[no-untyped-call]


def _widen_grad(weight: torch.Tensor) -> None:
    # What backward has summed in 16 bits, since no region of the weight's dtype has used it, or
    # compiled code has. Later passes are then added to it in float32.
    if weight.grad is not None and weight.grad.dtype != torch.float32:
        weight.grad = weight.grad.float()


def _has_idle_hooks(weight: torch.Tensor) -> bool:
    # Whether what is called after accumulation does nothing to a float32 gradient.
    hooks: Any = weight._post_accumulate_grad_hooks
    return hooks is not None and [*hooks.values()] == [_widen_grad]


def _uses(model: torch.nn.Module, dtype: torch.dtype, example: Any) -> dict[str, Use]:
    if region_of(model) is not None:
        raise ValueError(
            "low_precision_weights_: expected a model that is not converted, got one that is"
        )
    for name, parameter in model.named_parameters():
        if type(parameter) is not torch.nn.Parameter:
            raise TypeError(
                f"low_precision_weights_: expected plain parameters, got {name}, a "
                f"{type(parameter).__name__}"
            )
    region = ModuleRegion(device_of("low_precision_weights_", model), dtype)
    region.edits = edits_of("low_precision_weights_", None, region.device)
    if example is None:
        return uses_by_type(model, region.device)
    return uses_by_forward("low_precision_weights_", model, region, *example)


def _reasons(model: torch.nn.Module, uses: Mapping[str, Use], grads: torch.dtype) -> dict[str, str]:
    """Why parameters stay as they are, by their names; empty for those to be cast."""
    reasons = {name: use.reason for name, use in uses.items()}
    memory: dict[Any, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            reasons[name] = _name_of(parameter.dtype)
        use = uses[name]
        # torch.amp casts each use of a view apart, and so sums their gradients in float32. Autograd
        # does so where it holds them in float32, if there are no other uses.
        summed_in_16_bits = use.other_casts > 1 and grads != torch.float32
        if not reasons[name] and ((use.casts and use.other_casts) or summed_in_16_bits):
            reasons[name] = "several uses, some of views"
        first = memory.setdefault(parameter.untyped_storage()._cdata, name)
        for other in (name, first) if first != name else ():
            reasons[other] = reasons[other] or "shared memory"
    return reasons


def _keep(model: torch.nn.Module, reasons: dict[str, str], keep: Iterable[str]) -> None:
    if isinstance(keep, str):
        raise TypeError(
            f"low_precision_weights_: expected keep to be a sequence of names, got {keep!r}"
        )
    for pattern in keep:
        fitting = [name for name in reasons if _fits(name, pattern)]
        if not fitting:
            raise ValueError(
                "low_precision_weights_: expected keep to name parameters or modules, got "
                f"{pattern!r}, which fits none"
            )
        for name in fitting:
            reasons[name] = reasons[name] or "kept"
    by_model = {part for key in _KEPT_BY_MODEL for part in getattr(model, key, None) or ()}
    for name in reasons:
        if by_model.intersection(name.split(".")):
            reasons[name] = reasons[name] or "kept by the model"


def _fits(name: str, pattern: str) -> bool:
    """Whether a pattern fits the name of a parameter or of a module that it is a part of."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:i]), pattern) for i in range(1, len(parts) + 1))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
