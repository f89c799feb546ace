# SPDX-License-Identifier: Apache-2.0
"""Calls of every op that torch's own operator database knows, made the same way again and again."""

from __future__ import annotations

import math
import random
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map

import fastamp
from support.autocast_state import cuda_state, torch_kernels
from support.torch_testing import torch_testing

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
REGIONS = (torch.bfloat16, torch.float16)
FORMS = ("function", "method", "inplace", "out")

# What these return was never written, or depends on addresses: torch does not give it twice.
UNDEFINED_VALUES = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "linalg.lstsq",  # other last places from call to call
    "linalg.lstsq.grad_oriented",
}


@dataclass(frozen=True)
class Call:
    """One call, as numbers and names: the same call in any process.

    Attributes:
        op: Full name in the database.
        sample: Which of the op's samples, counted from 0.
        dtype: Of the floating point arguments, or "mixed".
        region: dtype of the region.
        form: function, method, inplace or out.
        grad: Whether floating point arguments require gradients and the backward pass runs.
        twice: Whether the region holds the call two times.
        seed: Of the samples' values, of the mix, and of ops that draw numbers.
    """

    op: str
    sample: int
    dtype: str
    region: str
    form: str = "function"
    grad: bool = True
    twice: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return f"from nets.all_ops import Call, replay\nreplay({self!r})"


def seed_of(*parts: Any) -> int:
    """A number that is the same in every process, which hash() is not."""
    return zlib.crc32(repr(parts).encode())


def database() -> dict[str, Any]:
    ops = torch_testing("common_methods_invocations").op_db
    by_name: dict[str, Any] = {}
    for op in ops:
        by_name.setdefault(op.full_name, op)
    return by_name


@dataclass(frozen=True)
class Refusal:
    """An exception instead of results."""

    kind: type
    text: str

    @classmethod
    def of(cls, error: Exception) -> Refusal:
        return cls(type(error), str(error))


def _common_utils() -> Any:
    return torch_testing("common_utils")


class Samples:
    """The samples of one op, made once for each dtype and seed."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.made: dict[tuple[torch.dtype, int], list[Any]] = {}

    def of(self, dtype: torch.dtype, seed: int) -> list[Any]:
        """Without gradients; empty for a dtype that the op does not have."""
        key = (dtype, seed)
        if key not in self.made:
            self.made[key] = self._make(dtype, seed)
        return self.made[key]

    def _make(self, dtype: torch.dtype, seed: int) -> list[Any]:
        if dtype not in self.op.supported_dtypes("cpu"):
            return []
        fixed = seed_of(self.op.full_name, str(dtype), seed)
        torch.manual_seed(fixed)
        random.seed(fixed)
        # torch looks for a test in the stack for every sample: most of the time under pytest.
        with mock.patch.object(_common_utils(), "extract_test_fn", return_value=None):
            return list(self.op.sample_inputs("cpu", dtype, requires_grad=False))


def is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def arguments(samples: Samples, call: Call) -> tuple[list[Any], dict[str, Any]]:
    """New arguments of a call: positional ones and others."""
    mixed = call.dtype == "mixed"
    base = torch.float32 if mixed else getattr(torch, call.dtype)
    sample = samples.of(base, call.seed)[call.sample]
    mix = random.Random(seed_of("mix", call.op, call.sample, call.seed))

    def fresh(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if mixed and is_float(value):
            value = value.to(mix.choice(FLOATS))
        made = value.detach().clone()
        return made.requires_grad_() if call.grad and is_float(value) else made

    args, kwargs = tree_map(fresh, ((sample.input, *sample.args), dict(sample.kwargs)))
    return list(args), kwargs


def function_of(op: Any, form: str) -> Callable[..., Any] | None:
    """What a form calls; None if the op does not have it."""
    if form == "method":
        return op.method_variant
    if form == "inplace":
        return op.inplace_variant
    if form == "out":
        return op.op if op.supports_out else None
    return op.op


def leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def _invoke(function: Callable[..., Any], call: Call, args: list[Any], kwargs: Any) -> Any:
    if call.form == "out":
        with torch.no_grad():
            out = tree_map(
                lambda t: torch.zeros_like(t) if isinstance(t, torch.Tensor) else t,
                function(*args, **kwargs),
            )
            # Zeros: torch.fft.ihfft2 leaves a part unwritten.
            return function(*args, **kwargs, out=out)
    if call.form == "inplace":
        # A leaf that requires a gradient cannot be written.
        first = args[0] * 1 if args[0].requires_grad else args[0]
        return function(first, *args[1:], **kwargs)
    return function(*args, **kwargs)


def _sum_of_parts(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[Any]:
    differentiable = [o for o in outputs if o.requires_grad]
    if not differentiable or not inputs:
        return []
    torch.manual_seed(1)
    cotangents = [torch.rand_like(o) for o in differentiable]
    return list(torch.autograd.grad(differentiable, inputs, cotangents, allow_unused=True))


def run(
    samples: Samples,
    call: Call,
    region: Callable[[], Any],
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
) -> Any:
    """What a call gives in a region.

    Args:
        samples: Of the op.
        call: The call.
        region: Makes the region.
        wrap: Makes of the function that is called the one to call instead.

    Returns:
        A Refusal, or outputs, gradients and the arguments afterwards, which some ops write.
    """
    args, kwargs = arguments(samples, call)
    function = function_of(samples.op, call.form)
    assert function is not None
    function = wrap(function)
    torch.manual_seed(call.seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with region():
                results = [_invoke(function, call, args, kwargs) for _ in range(1 + call.twice)]
            inputs = [leaf for leaf in leaves((args, kwargs)) if leaf.requires_grad]
            gradients = _sum_of_parts(leaves(results), inputs) if call.grad else []
    except Exception as error:  # whatever torch raises, fastamp has to raise
        return Refusal.of(error)
    return [tree_flatten(results)[0], gradients, leaves((args, kwargs))]


def calls(
    op: Any,
    samples: Samples,
    seed: int,
    share: float = 1.0,
    kinds: tuple[Any, ...] = (*FLOATS, "mixed", torch.int64),
) -> Iterator[Call]:
    """Calls of an op: all of them, or a share that another seed draws otherwise."""
    draw = random.Random(seed_of("calls", op.full_name, seed))
    forms = [form for form in FORMS if function_of(op, form) is not None]
    grad_dtypes = op.supported_backward_dtypes("cpu")
    # Making samples takes most of a small share's time.
    for dtype in kinds if share >= 1 else draw.sample(kinds, min(2, len(kinds))):
        base = torch.float32 if dtype == "mixed" else dtype
        assert isinstance(base, torch.dtype)
        count = len(samples.of(base, seed))
        kept = [i for i in range(count) if share >= 1 or draw.random() < share]
        if count and not kept and share * len(FLOATS) * count > draw.random():
            kept = [draw.randrange(count)]
        for i in kept:
            name = "mixed" if dtype == "mixed" else str(dtype)[6:]
            for region in REGIONS if share >= 1 else (draw.choice(REGIONS),):
                form = draw.choice(forms) if draw.random() < 0.4 else "function"
                yield Call(
                    op.full_name,
                    i,
                    name,
                    str(region)[6:],
                    form,
                    grad=form != "out" and base in grad_dtypes and draw.random() < 0.9,
                    twice=draw.random() < 0.3,
                    seed=seed,
                )


def simpler(call: Call) -> Iterator[Call]:
    """The same call with one thing less, most useful first."""
    if call.twice:
        yield replace(call, twice=False)
    if call.grad:
        yield replace(call, grad=False)
    if call.form != "function":
        yield replace(call, form="function")
    if call.dtype == "mixed":
        yield replace(call, dtype="float32")
    for sample in range(call.sample):
        yield replace(call, sample=sample)


def shrink(call: Call, fails: Callable[[Call], bool]) -> Call:
    """The simplest call found that still fails."""
    shrunk = True
    while shrunk:
        shrunk = False
        for candidate in simpler(call):
            if fails(candidate):
                call, shrunk = candidate, True
                break
    return call


# -- comparing ------------------------------------------------------------------------------------


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(size[tensor.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal memory, NaN's too but for their signs and payloads, which no op promises."""
    if a.layout != torch.strided:
        parts = [leaf for t in (a, b) for leaf in _parts(t)]
        half = len(parts) // 2
        return all(same_bits(x, y) for x, y in zip(parts[:half], parts[half:], strict=True))
    a, b = a.detach().resolve_conj().resolve_neg(), b.detach().resolve_conj().resolve_neg()
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if a.is_floating_point():
        nan = a.isnan()
        if not torch.equal(nan, b.isnan()):
            return False
        a, b = a.masked_fill(nan, 0), b.masked_fill(nan, 0)
    return torch.equal(_integers(a), _integers(b))


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.to_dense()]


def difference(of_fastamp: Any, of_torch: Any, values: bool = True) -> str:
    """In what two results of run() differ; "" if in nothing."""
    if isinstance(of_fastamp, Refusal) or isinstance(of_torch, Refusal):
        equal = _kind(of_fastamp) == _kind(of_torch) or is_promoted(of_torch)
        return "" if equal else f"torch: {of_torch}\nfastamp: {of_fastamp}"
    for part, a, b in zip(("output", "gradient", "argument"), of_fastamp, of_torch, strict=True):
        if len(a) != len(b):
            return f"{part}s: torch has {len(b)}, fastamp {len(a)}"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            text = _leaf_difference(x, y, values)
            if text:
                return f"{part} {i}: {text}"
    return ""


def _kind(result: Any) -> Any:
    return result.kind if isinstance(result, Refusal) else None


def is_promoted(of_torch: Any) -> bool:
    """Whether torch refuses float16 beside bfloat16, which fastamp promotes to float32."""
    return isinstance(of_torch, Refusal) and "Unexpected floating ScalarType" in of_torch.text


def _leaf_difference(x: Any, y: Any, values: bool) -> str:
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        equal = type(x) is type(y) and (x == y or (isinstance(x, float) and math.isnan(x)))
        return "" if equal else f"torch: {y!r}, fastamp: {x!r}"
    for name in ("dtype", "shape", "device", "layout", "requires_grad"):
        if getattr(x, name) != getattr(y, name):
            return f"{name}: torch {getattr(y, name)}, fastamp {getattr(x, name)}"
    if x.layout == torch.strided and x.stride() != y.stride():
        return f"strides: torch {y.stride()}, fastamp {x.stride()}"
    if values and x.device.type == "cpu" and not same_bits(x, y):
        return f"bits\ntorch:   {y!r}\nfastamp: {x!r}"
    return ""


# -- both sides -----------------------------------------------------------------------------------


def fastamp_region(call: Call) -> Callable[[], Any]:
    """Of either class: importing fastamp makes torch's regions run its kernels, too."""
    dtype = getattr(torch, call.region)
    own = seed_of("class", call.op, call.sample) % 2
    return lambda: (fastamp.autocast if own else torch.autocast)("cpu", dtype=dtype)


def compare(samples: Samples, some: list[Call]) -> Iterator[tuple[Call, str]]:
    """Calls that differ between torch's kernels and fastamp's, and in what."""
    with torch_kernels():
        expected = [
            run(samples, call, lambda c=call: torch.autocast("cpu", dtype=getattr(torch, c.region)))
            for call in some
        ]
    for call, of_torch in zip(some, expected, strict=True):
        of_fastamp = run(samples, call, fastamp_region(call))
        text = difference(of_fastamp, of_torch, values=call.op not in UNDEFINED_VALUES)
        if text:
            yield call, text


def replay(call: Call) -> None:
    """Runs one call on both sides and prints what differs."""
    samples = Samples(database()[call.op])
    args, kwargs = arguments(samples, call)
    print(f"{call.op}, form {call.form}, in a region of {call.region}: {args} {kwargs}")
    print(next((text for _, text in compare(samples, [call])), "the same"))


def failures(seed: int, share: float, only: str = "") -> tuple[int, list[str]]:
    """Compares calls of all ops.

    Returns:
        How many calls were compared, and for each op that differs its simplest call with the
        difference.
    """
    count, texts = 0, []
    for name, op in database().items():
        if only and only != name:
            continue
        samples = Samples(op)
        some = list(calls(op, samples, seed, share))
        count += len(some)
        for call, found in compare(samples, some):
            least = shrink(call, lambda c, s=samples: any(True for _ in compare(s, [c])))
            text = next((text for _, text in compare(samples, [least])), f"once only: {found}")
            texts.append(f"{least}\n{text}")
            break
    return count, texts


# -- CUDA, on tensors without values -------------------------------------------------------------


def fake_results(
    samples: Samples,
    some: list[Call],
    dtype: torch.dtype,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
) -> list[Any]:
    """dtypes of what calls give in a CUDA region of a dtype, on fake tensors; or Refusals."""
    found = []
    for call in some:
        args, kwargs = arguments(samples, replace(call, grad=False))
        with FakeTensorMode(allow_non_fake_inputs=True), cuda_state(dtype):
            fakes = tree_map(_on_cuda, (args, kwargs))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    result = wrap(samples.op.op)(*fakes[0], **fakes[1])
            except Exception as error:
                found.append(Refusal.of(error))
                continue
            found.append([(t.dtype, t.device.type, tuple(t.shape)) for t in leaves(result)])
    return found


def _on_cuda(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return value
    # Device cuda, without a GPU.
    made = torch.empty(value.shape, dtype=value.dtype, device="cuda")
    return made.as_strided(value.shape, value.stride()) if value.numel() else made


def cuda_failures(seed: int, share: float) -> tuple[int, list[str]]:
    """As failures(), for a CUDA region's dtypes; the first count is of calls that ran."""
    ran, texts = 0, []
    for op in database().values():
        samples = Samples(op)
        some = [call for call in calls(op, samples, seed, share) if call.form == "function"]
        for name in REGIONS:
            with torch_kernels():
                expected = fake_results(samples, some, name)
            for call, of_torch, of_fastamp in zip(
                some, expected, fake_results(samples, some, name), strict=True
            ):
                ran += not isinstance(of_torch, Refusal)
                refused = isinstance(of_torch, Refusal) and isinstance(of_fastamp, Refusal)
                same = of_torch.kind is of_fastamp.kind if refused else of_torch == of_fastamp
                if not same and not is_promoted(of_torch):
                    texts.append(
                        f"{call} on CUDA in {name}\ntorch: {of_torch}\nfastamp: {of_fastamp}"
                    )
                    break
    return ran, texts
