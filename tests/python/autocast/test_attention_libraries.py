# SPDX-License-Identifier: Apache-2.0
"""Attention of other libraries in regions: what they would refuse is cast, the rest is left."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fastamp
from fastamp._cli import ops_command
from fastamp._install import attention_libraries as library_calls
from support import attention_libraries

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CALLS = {call.path: call for call in library_calls.CALLS}
FLASH = "flash_attn.flash_attn_interface"
XFORMERS = "xformers.ops.fmha.common"
OP = "flash_attn::_flash_attn_forward"


def forget(*libraries: str) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in libraries:
            del sys.modules[name]
    library_calls.unfollow()
    library_calls.follow()


@pytest.fixture(scope="module")
def libraries() -> Iterator[dict[str, ModuleType]]:
    """flash_attn and xformers, imported after fastamp."""
    if any(importlib.util.find_spec(name) for name in ("flash_attn", "xformers")):
        pytest.skip("the real libraries are installed")
    sys.path.insert(0, str(Path(attention_libraries.__file__).parent))
    try:
        modules = {name: importlib.import_module(name) for name in (FLASH, "xformers.ops.fmha")}
    finally:
        sys.path.pop(0)
    try:
        yield modules
    finally:
        for name in (FLASH, "xformers.ops.fmha"):
            sys.modules[name]._LIBRARY._destroy()
        forget("flash_attn", "xformers")


def tensors(*dtypes: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = (torch.randn(2, 5, 3, 4).to(dtype) for dtype in dtypes)
    return [tensor.requires_grad_() for tensor in made]


def run(
    function: Callable[..., Any],
    given: list[torch.Tensor],
    *more: Any,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """The result and the gradients; the call is in a region if there is a dtype."""
    for tensor in given:
        tensor.grad = None
    with fastamp.autocast("cpu", dtype=dtype or BF16, enabled=dtype is not None):
        out = function(*given, *more)
    out.float().square().sum().backward()
    return [out.detach(), *(tensor.grad for tensor in given if tensor.grad is not None)]


def by_hand(function: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    def cast_first(*args: Any) -> Any:
        return function(*(x.to(dtype) if torch.is_tensor(x) else x for x in args))

    return cast_first


def calls_of(libraries: dict[str, ModuleType]) -> dict[str, Callable[..., Any]]:
    flash = libraries[FLASH]
    on = torch.is_grad_enabled()
    return {
        "qkv": flash.flash_attn_func,
        "packed": lambda qkv: flash.FlashAttnQKVPackedFunc.apply(qkv, 0.0, on),
        "q, kv": lambda q, kv: flash.FlashAttnKVPackedFunc.apply(q, kv, 0.0, on),
        "xformers": libraries["xformers.ops.fmha"].memory_efficient_attention,
    }


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("qkv", (FP32, FP32, "low")),  # a norm of query and key
        ("qkv", (FP32, FP32, FP32)),
        ("qkv", ("low", "low", "other")),
        ("xformers", (FP32, FP32, "low")),
        ("xformers", (FP32, "low", "low")),
    ],
)
def test_what_is_refused_becomes_what_casts_by_hand_give(
    libraries: dict[str, ModuleType], name: str, given: Any, dtype: torch.dtype
):
    function = calls_of(libraries)[name]
    names = {"low": dtype, "other": FP16 if dtype == BF16 else BF16}
    given = tensors(*(names.get(each, each) for each in given))
    with pytest.raises((RuntimeError, ValueError), match=r"dtype|data type"):
        function(*given)
    expected = run(by_hand(function, dtype), given)
    found = run(function, given, dtype=dtype)
    assert found[0].dtype == dtype
    assert [grad.dtype for grad in found[1:]] == [tensor.dtype for tensor in given]
    for own, torchs in zip(found, expected, strict=True):
        assert torch.equal(own, torchs)


def test_packed_arguments_are_cast(libraries: dict[str, ModuleType]):
    (q,) = tensors(FP32)
    for name, given in (
        ("packed", [torch.randn(2, 5, 3, 3, 4, requires_grad=True)]),
        ("q, kv", [q, torch.randn(2, 5, 2, 3, 4, dtype=BF16, requires_grad=True)]),
    ):
        function = calls_of(libraries)[name]
        expected = run(by_hand(function, BF16), given)
        found = run(function, given, dtype=BF16)
        assert all(map(torch.equal, found, expected))


def test_other_arguments_stay_in_their_dtype(libraries: dict[str, ModuleType]):
    given, slopes = tensors(FP32, FP32, BF16), torch.rand(3)
    function = calls_of(libraries)["qkv"]
    expected = run(lambda *qkv: function(*(x.to(BF16) for x in qkv), slopes), given)
    found = run(function, given, slopes, dtype=BF16)
    assert all(map(torch.equal, found, expected))


def test_a_bias_of_xformers_follows(libraries: dict[str, ModuleType]):
    attention = calls_of(libraries)["xformers"]
    given, bias = tensors(BF16, BF16, BF16), torch.randn(5, 3, 3)
    with pytest.raises(ValueError, match="bias"):
        attention(*given, bias)
    with fastamp.autocast("cpu", dtype=BF16):
        assert torch.equal(attention(*given, bias), attention(*given, bias.to(BF16)))


@pytest.mark.parametrize(
    ("name", "given"),
    [("qkv", (BF16, BF16, BF16)), ("qkv", (FP16,) * 3), ("xformers", (FP32,) * 3)],
)
def test_what_the_library_takes_is_left(
    libraries: dict[str, ModuleType], name: str, given: tuple[torch.dtype, ...]
):
    function = calls_of(libraries)[name]
    inputs = tensors(*given)
    expected = run(function, inputs)
    found = run(function, inputs, dtype=BF16)
    assert found[0].dtype == given[0]
    assert all(map(torch.equal, found, expected))


def refuses(libraries: dict[str, ModuleType]) -> bool:
    refusal = pytest.raises(RuntimeError, match="FlashAttention only support")
    try:
        with refusal:
            assert calls_of(libraries)["qkv"](*tensors(FP32, FP32, BF16)).dtype == BF16
    except pytest.fail.Exception:
        return False
    return True


def test_it_counts_where_autocast_does(libraries: dict[str, ModuleType]):
    assert refuses(libraries)
    with torch.autocast("cpu", dtype=BF16):
        assert not refuses(libraries)
        with torch.autocast("cpu", enabled=False):
            assert refuses(libraries)
    with fastamp.debug.torch_kernels(), torch.autocast("cpu", dtype=BF16):
        assert refuses(libraries)
    with torch.autocast("cuda", dtype=BF16) if torch.cuda.is_available() else torch.no_grad():
        assert refuses(libraries)


def test_what_is_not_castable_is_left_to_the_library(libraries: dict[str, ModuleType]):
    given = tensors(FP32, FP32, torch.float64)
    with fastamp.autocast("cpu", dtype=BF16), pytest.raises(RuntimeError, match="only support"):
        calls_of(libraries)["qkv"](*given)
    with pytest.raises(TypeError):
        libraries[FLASH].flash_attn_func()


@pytest.mark.usefixtures("libraries")
def test_key_and_value_that_are_one_tensor_stay_one():
    inputs = importlib.import_module(XFORMERS).Inputs
    q, k = tensors(BF16, FP32)
    with fastamp.autocast("cpu", dtype=BF16):
        made = inputs(q, k, value=k, p=0.5)
    assert made.key is made.value
    assert (made.key.dtype, made.p, made.attn_bias) == (BF16, 0.5, None)


def test_a_policy_of_the_users_counts(libraries: dict[str, ModuleType]):
    fastamp.policies.register_op(OP, "pass")
    try:
        with fastamp.autocast("cpu", dtype=BF16):
            assert refuses(libraries)
        assert library_calls.state_of(CALLS[f"{FLASH}.FlashAttnFunc"]) == (
            f"left to policies.register_op: {OP} is pass"
        )
    finally:
        fastamp.policies.unregister_op(OP)
    with fastamp.autocast("cpu", dtype=BF16):
        assert not refuses(libraries)


def test_an_autocast_kernel_that_is_there_counts(libraries: dict[str, ModuleType]):
    library = torch.library.Library("flash_attn", "IMPL")
    library.impl("_flash_attn_forward", torch.library.fallthrough_kernel, "AutocastCPU")
    try:
        state = library_calls.state_of(CALLS[f"{FLASH}.FlashAttnFunc"])
        assert state == f"left to the autocast kernel of {OP}"
        with fastamp.autocast("cpu", dtype=BF16):
            assert refuses(libraries)
    finally:
        library._destroy()
    assert library_calls.state_of(CALLS[f"{FLASH}.FlashAttnFunc"]) == "in force"


@pytest.mark.parametrize(
    ("name", "given", "is_refused"),
    [
        ("qkv", (FP32, FP32, BF16), True),  # dynamo does not look at apply
        ("qkv", (BF16, BF16, BF16), False),
        ("xformers", (FP32, FP32, BF16), False),
        ("xformers", (FP32, FP32, FP32), False),
    ],
)
def test_compiled_calls_are_the_same_or_refused(
    libraries: dict[str, ModuleType],
    name: str,
    given: tuple[torch.dtype, ...],
    is_refused: bool,
):
    function = calls_of(libraries)[name]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    inputs = [tensor.detach() for tensor in tensors(*given)]
    with fastamp.autocast("cpu", dtype=BF16):
        expected = function(*inputs)
        for _ in range(2):
            if is_refused:
                with pytest.raises(RuntimeError, match="FlashAttention only support"):
                    compiled(*inputs)
            else:
                found = compiled(*inputs)
                assert found.dtype == expected.dtype
                assert torch.equal(found, expected)


@pytest.mark.usefixtures("libraries")
def test_the_list_says_what_is_in_force(capsys: pytest.CaptureFixture[str]):
    ops_command.main([])
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    listed = {line[0]: line[1] for line in lines if len(line) > 1 and line[0] in CALLS}
    assert listed.keys() == CALLS.keys()
    assert listed[f"{FLASH}.FlashAttnFunc"].endswith("q, k, v                       in force")
    assert listed[f"{XFORMERS}.Inputs"].endswith("in force")
    assert listed[f"{FLASH}.FlashAttnVarlenFunc"].endswith("this version has other arguments")
    assert listed[f"{FLASH}.FlashAttnVarlenKVPackedFunc"].endswith("has no such class")
    assert listed["flash_attn_interface.FlashAttnFunc"].endswith("once it is imported")
    for name in ("flash_attn", OP, "FlashAttnKVPackedFunc"):
        ops_command.main([name])
        out = capsys.readouterr().out
        assert "lower - q, kv" in out
        assert "diffusers/issues/14104" in out


def test_uninstall_gives_the_objects_back(libraries: dict[str, ModuleType]):
    flash, inputs = libraries[FLASH], importlib.import_module(XFORMERS).Inputs
    assert "apply" in vars(flash.FlashAttnFunc)
    wrapped = vars(inputs)["__init__"]
    finders = len(sys.meta_path)
    library_calls.unfollow()
    try:
        assert "apply" not in vars(flash.FlashAttnFunc)
        assert vars(inputs)["__init__"] is wrapped.__wrapped__
        assert len(sys.meta_path) < finders
        with fastamp.autocast("cpu", dtype=BF16):
            assert refuses(libraries)
        state = library_calls.state_of(CALLS[f"{FLASH}.FlashAttnFunc"])
        assert state == "off: fastamp's kernels are not registered"
    finally:
        library_calls.follow()
    assert len(sys.meta_path) == finders
    with fastamp.autocast("cpu", dtype=BF16):  # a library that was imported before
        assert not refuses(libraries)


def test_a_class_that_others_changed_since_is_left_to_them(libraries: dict[str, ModuleType]):
    cls = libraries[FLASH].FlashAttnFunc
    own = vars(cls)["apply"]
    cls.apply = torchs = classmethod(lambda cls, *args: own.__func__(cls, *args))
    try:
        library_calls.unfollow()
        assert vars(cls)["apply"] is torchs
        with fastamp.autocast("cpu", dtype=BF16):
            assert refuses(libraries)
    finally:
        del cls.apply
        library_calls.follow()


def write_module(folder: Path, call: library_calls.LibraryCall, text: str) -> None:
    *packages, name = call.module.split(".")
    for package in packages:
        folder = folder / package
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
    (folder / f"{name}.py").write_text(text)


@pytest.mark.parametrize("path", sorted(CALLS))
def test_each_line_of_the_table_changes_its_class(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    call = CALLS[path]
    top = call.module.partition(".")[0]
    loaded = {name: sys.modules[name] for name in sys.modules if name.partition(".")[0] == top}
    forget(top)
    arguments = ", ".join((*call.tensors, "more=None"))
    given = [torch.ones(2, dtype=FP32 if i == 0 else BF16) for i in range(len(call.tensors))]
    is_function = call.name != "Inputs"
    source = (
        "import torch\n"
        f"class {call.name}(torch.autograd.Function):\n"
        f"  def forward(ctx, {arguments}): return {call.tensors[0]} * 1\n"
        if is_function
        else f"class {call.name}:\n  def __init__(self, {arguments}): self.a = {call.tensors[0]}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        write_module(tmp_path, call, "raise ImportError('no GPU')")
        assert importlib.util.find_spec(call.module) is not None
        with pytest.raises(ImportError, match="no GPU"):
            importlib.import_module(call.module)
        write_module(tmp_path, call, source)
        importlib.invalidate_caches()
        sys.path_importer_cache.clear()
        cls = getattr(importlib.import_module(call.module), call.name)
        assert library_calls.state_of(call) == "in force"
        with torch.autocast("cpu", dtype=BF16):
            result = cls.apply(*given, 1) if is_function else cls(*given, 1).a
        assert result.dtype == BF16
    finally:
        forget(top)
        sys.modules.update(loaded)
        forget()
