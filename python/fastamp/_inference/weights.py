# SPDX-License-Identifier: Apache-2.0
"""Finds the parameters of a model that only ops read for which autocast casts them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

import fastamp._C as _C
from fastamp._dynamo.fake_models import FakeTensors, fake_copy, raw_region, unchanged_state
from fastamp._inference.regions import ModuleRegion
from fastamp._inference.torch_output import TorchOutput
from fastamp._policy.module_placement import policies_of
from fastamp._policy.op_policies import override
from fastamp._policy.table import op_policy

__all__ = ["Use", "op_of", "reads_of", "tensors_of", "uses_by_forward", "uses_by_type"]

NOT_USED = "not used"


class Use(NamedTuple):
    """Uses of a parameter in a region.

    Attributes:
        reason: Why the parameter has to stay as it is; empty if its cast can take its place.
        casts: How often autocast is to cast the parameter itself, for which there is one cast;
            judged by classes, how many modules have it.
        other_casts: How often it, or the program, casts a view of it or casts it once more.
    """

    reason: str
    casts: int = 0
    other_casts: int = 0


# The op that a class of torch's gives its own parameters to, and nothing else does.
_OPS: dict[type[torch.nn.Module], str] = {
    torch.nn.Linear: "linear",
    torch.nn.Conv1d: "conv1d",
    torch.nn.Conv2d: "conv2d",
    torch.nn.Conv3d: "conv3d",
    torch.nn.ConvTranspose1d: "conv_transpose1d",
    torch.nn.ConvTranspose2d: "conv_transpose2d.input",
    torch.nn.ConvTranspose3d: "conv_transpose3d.input",
}


def tensors_of(model: torch.nn.Module, buffers: bool = False) -> dict[str, torch.Tensor]:
    """The parameters of a model, each once, by the first of its names; then its buffers."""
    return {**dict(model.named_parameters()), **(dict(model.named_buffers()) if buffers else {})}


def uses_by_type(model: torch.nn.Module, device: str) -> dict[str, Use]:
    """Uses of parameters, judged by the classes of the modules that own them.

    Returns:
        For each name of :func:`tensors_of`.
    """
    refusals: dict[int, str] = {}
    owners: Counter[int] = Counter()
    apart = {id(part) for m in model.modules() if policies_of(m) for part in m.modules()}
    for module in model.modules():
        op = op_of(module)
        if op is not None and op_policy(op, device) == "lower" and id(module) not in apart:
            own = {"weight", "bias"}  # and not what a hook computes them from
        else:
            own = set()
        for name, parameter in module._parameters.items():
            owners[id(parameter)] += 1
            if parameter is not None and name not in own:
                refusals.setdefault(id(parameter), type(module).__name__)
    return {
        name: Use(refusals.get(id(p), ""), owners[id(p)]) for name, p in tensors_of(model).items()
    }


def op_of(module: torch.nn.Module) -> str | None:
    """The op that a module of torch's gives its own parameters to; None for other classes."""
    for kind, op in _OPS.items():
        if isinstance(module, kind):
            own = ("forward", "_conv_forward")
            same = all(getattr(type(module), n, None) is getattr(kind, n, None) for n in own)
            return op if same else None
    return None


def uses_by_forward(
    function: str,
    model: torch.nn.Module,
    region: ModuleRegion,
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    buffers: bool = False,
) -> dict[str, Use]:
    """Uses of parameters, seen in a forward pass of the model without values.

    Where the model cannot run so, it runs as it is, with the inputs. With and without gradients
    being recorded, since modules may take different paths. With the casts in their places the model
    is then run once more: its ops must be the same, in the same dtypes.

    Returns:
        For each name of :func:`tensors_of`.

    Raises:
        TypeError: A parameter is no plain tensor, or the model cannot be copied.
        ValueError: With the casts in place the model calls other ops.
        RuntimeError: The model cannot run with the inputs.
    """
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        unset_fake_temporarily,
    )
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    with unset_fake_temporarily(), unchanged_state():
        try:
            return _seen_without_values(function, model, region, inputs, kwargs, buffers)
        except (
            DataDependentOutputException,
            DynamicOutputShapeException,
            GuardOnDataDependentSymNode,
        ):
            pass  # Its control flow needs values.
        with _running(function), raw_region(region.device, region.dtype):
            return _seen(model, tensors_of(model, buffers), inputs, kwargs, region)


@contextlib.contextmanager
def _running(function: str) -> Iterator[None]:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    try:
        with TorchOutput().kept():  # Fake tensors log each refusal with its stack.
            yield
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        GuardOnDataDependentSymNode,
    ):
        raise
    except Exception as error:
        raise RuntimeError(
            f"{function}: expected a model that runs with the example inputs in the region, got "
            f"{type(error).__name__}: {error}"
        ) from error


def _seen_without_values(
    function: str,
    model: torch.nn.Module,
    region: ModuleRegion,
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    buffers: bool,
) -> dict[str, Use]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = FakeTensors(function, fake_mode, region.device)
    copied, _ = fake_copy(model, fakes)
    args, by_name = tree_map_only(torch.Tensor, fakes.of_input, (inputs, dict(kwargs)))
    tensors = tensors_of(copied, buffers)
    with _running(function), fake_mode, raw_region(region.device, region.dtype):
        uses = _seen(copied, tensors, args, by_name, region)
        before = _calls(copied, args, by_name, region)
        for name, use in uses.items():
            if not use.reason and tensors[name].dtype == torch.float32:
                _replace_everywhere(copied, tensors[name], tensors[name].to(region.dtype))
        after = _calls(copied, args, by_name, region)
    _check_same_calls(function, before, after)
    return uses


def _replace_everywhere(model: torch.nn.Module, tensor: torch.Tensor, cast: torch.Tensor) -> None:
    new = cast.detach()
    if isinstance(tensor, torch.nn.Parameter):
        new = torch.nn.Parameter(new, requires_grad=False)
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, value in tensors.items():
                if value is tensor:
                    setattr(module, name, new)  # RNNs keep a second list of theirs


def _seen(
    model: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    region: ModuleRegion,
) -> dict[str, Use]:
    seen = dict.fromkeys(tensors, Use(NOT_USED))
    for gradients in (False, True):
        watched = _C.WatchedWeights(list(tensors.values()))
        with torch.set_grad_enabled(gradients), override(region.edits, region.device):
            watched.start()
            try:
                model(*args, **kwargs)
            finally:
                uses = watched.stop()
        for name, (is_used, read_by, *casts) in zip(tensors, uses, strict=True):
            before = seen[name]
            read_before = before.reason not in ("", NOT_USED)
            reason = before.reason if read_before else read_by.removeprefix("aten::")
            if is_used:
                most = map(max, casts, before[1:])  # of either pass
                seen[name] = Use(reason, *most)
    return seen


def reads_of(
    function: str,
    model: torch.nn.Module,
    region: ModuleRegion,
    example: tuple[tuple[Any, ...], dict[str, Any]],
) -> set[int]:
    """Ids of the float32 tensors among a model's inputs that only ops of policy ``lower`` read."""
    flat, _ = tree_flatten(example)
    inputs = {str(i): x for i, x in enumerate(flat) if isinstance(x, torch.Tensor)}
    with unchanged_state(), _running(function), region.surround():
        uses = _seen(model, inputs, *example, region)
    return {
        id(inputs[i])
        for i, use in uses.items()
        if not use.reason and inputs[i].dtype == torch.float32
    }


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The ops below autocast and autograd with the dtypes of their tensors, casts left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, tuple[torch.dtype, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten._to_copy.default and func.namespace != "prim":
            flat, _ = tree_flatten((args, kwargs))
            dtypes = tuple(x.dtype for x in flat if isinstance(x, torch.Tensor))
            # Views and copies of a weight are of the cast later, and of the weight before.
            if any(returned.alias_info for returned in func._schema.returns):
                dtypes = ()
            self.calls.append((str(func), dtypes))
        return func(*args, **(kwargs or {}))


def _calls(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], region: ModuleRegion
) -> list[tuple[str, tuple[torch.dtype, ...]]]:
    with torch.no_grad(), override(region.edits, region.device), _Calls() as mode:
        model(*args, **kwargs)
    found: list[tuple[str, tuple[torch.dtype, ...]]] = mode.calls
    return found


def _check_same_calls(
    function: str,
    before: Sequence[tuple[str, tuple[torch.dtype, ...]]],
    after: Sequence[tuple[str, tuple[torch.dtype, ...]]],
) -> None:
    # detach and other views that only casts need come and go with them.
    views = [[call for call in calls if call[1]] for calls in (before, after)]
    for one, other in zip(*views, strict=False):
        if one != other:
            raise ValueError(
                f"{function}: expected a model that computes the same whatever dtype its weights "
                f"have, got one that asks for it: {_shown(one)} became {_shown(other)}"
            )
    if len(views[0]) != len(views[1]):
        raise ValueError(
            f"{function}: expected a model that computes the same whatever dtype its weights have, "
            f"got {len(views[0])} ops with float32 weights and {len(views[1])} with their casts"
        )


def _shown(call: tuple[str, tuple[torch.dtype, ...]]) -> str:
    return f"{call[0]}({', '.join(str(dtype).removeprefix('torch.') for dtype in call[1])})"
