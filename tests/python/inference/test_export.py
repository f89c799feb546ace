# SPDX-License-Identifier: Apache-2.0
"""fastamp.inference.export: the precision of a region, all of it in the graph."""

from __future__ import annotations

import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastamp
from fastamp._inference.formats import _compared
from fastamp._inference.strong_types import check_types, remove_needless_casts
from support.inference_models import NAMES, in_region, model_and_input, tensors

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
CASTS = torch.ops.aten._to_copy.default

quiet = {"verbose": False}


def nodes(program: Any, target: Any = None) -> list[Any]:
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    return [node for node in calls if target is None or node.target is target]


def run(program: Any, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return tensors(program.module()(*args, **kwargs))


QUICK = [("MLP", FP16), ("MLP", BF16), ("ResNet-18", FP16), ("GPT-2", BF16)]
CASES = [
    pytest.param(name, dtype, marks=() if (name, dtype) in QUICK else pytest.mark.slow)
    for name in NAMES
    for dtype in (FP16, BF16)
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_program_computes_what_the_region_computes(name: str, dtype: torch.dtype):
    model, x = model_and_input(name)
    wanted = in_region(model, dtype, "cuda", x)
    done = fastamp.inference.export(model, x, dtype, lists="cuda", keep_io_types=False, **quiet)
    given = x.to(dtype) if x.is_floating_point() else x
    found = run(done.program, given)
    assert [t.dtype for t in found] == [t.dtype for t in wanted]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert done.types.checked["lower"] >= 2
    assert done.types.inputs == (str(given.dtype).removeprefix("torch."),)
    targets = {str(node.target) for node in nodes(done.program)}
    assert not any("autocast" in target for target in targets)
    # No weight is cast but that of a head that is the embedding, too.
    casts = [node.args[0].name for node in nodes(done.program, CASTS)]
    tied = {"GPT-2": ["p_lm_head_weight"], "BERT": ["p_cls_predictions_decoder_weight"]}
    assert [cast for cast in casts if cast.startswith(("p_", "b_"))] == tied.get(name, [])


def test_constants_that_are_only_cast_are_cast_now():
    model, x, y = several()
    converted = fastamp.inference.convert(
        model, BF16, lists="cuda", example_inputs=(x,), example_kwargs={"y": y}, **quiet
    )
    assert converted.mask.dtype == FP32
    done = fastamp.inference.export(
        converted, (x,), BF16, kwargs={"y": y}, keep_io_types=False, **quiet
    )
    assert done.program.state_dict["mask"].dtype == BF16
    found = run(done.program, x, y=y)
    wanted = in_region(model, BF16, "cuda", x, y=y)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    done.program.validate()


def test_types_of_inputs_and_outputs_are_kept_or_stated():
    model, x = model_and_input("MLP")
    wanted = in_region(model, FP16, "cpu", x)
    kept = fastamp.inference.export(model, (x,), FP16, **quiet)
    assert (kept.types.inputs, kept.types.outputs) == (("float32",), ("float32",))
    assert torch.equal(run(kept.program, x)[0], wanted[0].float())
    lower = fastamp.inference.export(model, (x,), FP16, keep_io_types=False, **quiet)
    assert (lower.types.inputs, lower.types.outputs) == (("float16",), ("float16",))
    assert (kept.types.casts, lower.types.casts) == (2, 0)
    assert kept.types.cast_elements == x.numel() + wanted[0].numel()
    assert kept.types.constant_bytes == 2 * sum(p.numel() for p in model.parameters())


class Several(nn.Module):
    """Several inputs and outputs, mixed operands, a repeated cast, and one there and back."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("mask", torch.randn(8, 8))

    def forward(self, x: torch.Tensor, *, y: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        a, b = self.one(x), self.two(x)
        mixed = x + a
        joined = torch.cat([x, b], -1)
        return {
            "sum": self.norm(mixed) * y["scale"],
            "joined": joined,
            "masked": torch.mm(b, self.mask),
            "sure": a > x,
        }


def several() -> tuple[nn.Module, torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Several().eval(), torch.randn(3, 8), {"scale": torch.randn(8)}


def test_several_inputs_and_outputs():
    model, x, y = several()
    wanted = in_region(model, BF16, "cuda", x, y=y)
    done = fastamp.inference.export(
        model, (x,), BF16, lists="cuda", kwargs={"y": y}, keep_io_types=False, **quiet
    )
    found = run(done.program, x, y=y)
    assert [t.dtype for t in found] == [t.dtype for t in wanted] == [FP32, FP32, BF16, torch.bool]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert done.types.mixed == ()
    # x is cast once for both layers; each of a and b is widened once; the buffer not at all.
    sources = sorted(node.args[0].name for node in nodes(done.program, CASTS))
    assert len(sources) == len(set(sources)) == 3


def test_a_dynamic_batch():
    model, x = model_and_input("ViT")
    batch = torch.export.Dim("batch", min=2, max=64)
    done = fastamp.inference.export(
        model, (x,), BF16, lists="cuda", keep_io_types=False, dynamic_shapes=({0: batch},), **quiet
    )
    _, other = model_and_input("ViT", batch=5)
    (found,) = run(done.program, other.to(BF16))
    assert torch.equal(found, in_region(model, BF16, "cuda", other)[0])


def test_a_converted_model_is_exported_as_it_is():
    model, x = model_and_input("MLP")
    converted = fastamp.inference.convert(model, BF16, lists="cuda", example_inputs=x, **quiet)
    done = fastamp.inference.export(converted, (x,), BF16, **quiet)
    assert torch.equal(run(done.program, x)[0], converted(x).float())
    with pytest.raises(ValueError, match="expected a converted model with its own 16-bit dtype"):
        fastamp.inference.export(converted, (x,), FP16, **quiet)
    with pytest.raises(ValueError, match="neither lists nor fp32"):
        fastamp.inference.export(converted, (x,), BF16, lists="cpu", **quiet)
    assert converted(x).dtype == BF16  # and still runs in its region


def test_modules_kept_in_fp32_are_in_the_program():
    model, x = model_and_input("MLP")
    done = fastamp.inference.export(model, (x,), FP16, fp32=["3"], **quiet)
    kinds = [node.meta["val"].dtype for node in nodes(done.program, torch.ops.aten.linear.default)]
    assert kinds == [FP16, FP32]
    assert done.conversion.converted == ("1.weight", "1.bias")
    assert done.types.checked == {"lower": 1, "lower (in float32, where regions are off)": 1}


def test_a_gpu_that_is_not_there():
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.manual_seed(0)
    with FakeTensorMode(), torch.device("cuda"):
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).eval()
        x = torch.randn(2, 8)
    done = fastamp.inference.export(model, (x,), BF16, lists="cuda", **quiet)
    dtypes = [node.meta["val"].dtype for node in nodes(done.program, torch.ops.aten.linear.default)]
    assert dtypes == [BF16, BF16]
    assert {n.meta["val"].device.type for n in nodes(done.program, CASTS)} == {"cuda"}
    assert done.types.checked == {"lower": 2, "fp32": 1}


def test_programs_are_written_whole_and_come_back(tmp_path: Path, capsys: Any):
    model, x = model_and_input("MLP")
    path = tmp_path / "model.pt2"
    done = fastamp.inference.export(model, (x,), BF16, path=path)
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"export: {line}" for line in str(done).splitlines()]
    assert printed[-1] == f"export: wrote {path}"
    assert any(line.endswith(": 2 lower") for line in printed)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]
    assert torch.equal(run(torch.export.load(path), x)[0], run(done.program, x)[0])
    with pytest.raises(FileExistsError, match="export: expected a path where nothing is yet"):
        fastamp.inference.export(model, (x,), BF16, path=path)


def test_a_file_is_replaced_on_request_and_only_by_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, x = model_and_input("MLP")
    path = tmp_path / "model.pt2"
    path.write_text("old")
    with monkeypatch.context() as patched:
        patched.setattr(torch.export, "save", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fastamp.inference.export(model, (x,), BF16, path=path, overwrite=True, **quiet)
    assert path.read_text() == "old"
    done = fastamp.inference.export(model, (x,), BF16, path=path, overwrite=True, **quiet)
    assert torch.equal(run(torch.export.load(path), x)[0], run(done.program, x)[0])
    (tmp_path / "folder.pt2").mkdir()
    with pytest.raises(FileExistsError, match="export: expected a path of a file, got"):
        fastamp.inference.export(model, (x,), BF16, path=tmp_path / "folder.pt2", overwrite=True)


def test_a_model_in_training_mode_is_refused(tmp_path: Path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    x = torch.ones(1, 3, 8, 8)
    with pytest.raises(
        ValueError, match="training mode in Sequential and 2 more modules: call mod"
    ):
        fastamp.inference.export(model, (x,), BF16, lists="cuda", path=tmp_path / "m.pt2")
    model.eval()
    model[1].train()
    with pytest.raises(ValueError, match=r"got training mode in 1: call model.eval\(\) first"):
        fastamp.inference.export(model, (x,), BF16, lists="cuda", path=tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []
    done = fastamp.inference.export(model.eval(), (x,), BF16, lists="cuda", **quiet)
    assert len(done.program.graph_signature.user_outputs) == 1
    assert len(done.program.graph_signature.output_specs) == 1


def test_long_output_of_torch_goes_into_a_file(capfd: Any, monkeypatch: Any, tmp_path: Path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(40)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers(x)
            return x if x.sum() > 0 else -x

    with pytest.raises(RuntimeError, match="got GuardOnDataDependentSymNode") as raised:
        fastamp.inference.export(Deep().eval(), (X,), BF16, lists="cuda", **quiet)
    text = str(raised.value)
    assert len(text.splitlines()) < 40
    found = re.search(r"all (\d+) lines of torch's output are in (\S+)", text)
    assert found is not None
    whole = Path(found[2]).read_text()
    assert len(whole.splitlines()) == int(found[1]) > 40
    assert "def forward" in whole
    assert "def forward" not in capfd.readouterr().err


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(_program: Any, file: Path) -> None:
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch.export, "save", fail)
    model, x = model_and_input("MLP")
    with pytest.raises(OSError, match="disk full"):
        fastamp.inference.export(model, (x,), BF16, path=tmp_path / "model.pt2", **quiet)
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_wrong_graph_is_refused():
    model, x = model_and_input("MLP")
    program = fastamp.inference.export(model, (x,), FP16, **quiet).program
    with pytest.raises(
        RuntimeError, match=r"linear \(linear, policy fp32\) gets float16; linear \("
    ):
        check_types(program, FP16, {"linear": "fp32"})
    with pytest.raises(RuntimeError, match=r"policy lower\) gets float16"):
        check_types(program, BF16, {"linear": "lower"})
    cast = nodes(program, CASTS)[0]
    cast.kwargs = {"dtype": FP32}
    cast.meta["val"] = cast.meta["val"].float()
    with pytest.raises(RuntimeError, match=r"policy lower.* gets float16, float32"):
        check_types(program, FP16, {"linear": "lower"})


def test_casts_that_round_are_not_removed():
    class Rounds(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            rounded = x.to(BF16).float()
            back = rounded.to(BF16)
            return rounded * 2, back * 2, x.to(FP16).float().to(BF16) * 2

    x = torch.randn(5)
    program = torch.export.export(Rounds(), (x,)).run_decompositions({})
    before = len(nodes(program, CASTS))
    remove_needless_casts(program)
    assert len(nodes(program, CASTS)) < before
    for a, b in zip(run(program, x), Rounds()(x), strict=True):
        assert torch.equal(a, b)


class Probability(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(self.layer(x))
        return nn.functional.binary_cross_entropy(y, torch.ones_like(y))


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if self.layer(x).sum() > 0 else x


X = torch.ones(2, 8)


@pytest.mark.parametrize(
    ("model", "lists", "text"),
    [
        (
            Probability(),
            "cuda",
            "export: expected a model that .*binary_cross_entropy: not allowed",
        ),
        (Untraceable(), "cpu", "export: expected a model that torch.export can export, got Guard"),
    ],
)
def test_torchs_reason_is_told(model: nn.Module, lists: str, text: str, tmp_path: Path):
    with pytest.raises(RuntimeError, match=f"(?s){text}"):
        fastamp.inference.export(model.eval(), (X,), BF16, lists=lists, path=tmp_path / "m.pt2")
    assert [path.name for path in tmp_path.iterdir()] == []
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"model": 3}, TypeError, "export: expected model to be a torch.nn.Module, got int"),
        ({"dtype": torch.float8_e4m3fn}, ValueError, "dtype to be float16 or bfloat16, got float8"),
        ({"format": "tf"}, ValueError, "format to be one of .*'ep', 'onnx', 'aoti'.*, got 'tf'"),
        ({"lists": "tpu"}, ValueError, "export: expected lists to be 'cpu', 'cuda' or"),
        ({"args": None}, TypeError, "expected args, the arguments of a forward pass, got None"),
        ({"keep_io_types": 1}, TypeError, "expected keep_io_types to be a bool, got int"),
        ({"fp32": ["x*"]}, ValueError, "export: expected fp32 to name modules of the model"),
        ({"tolerance": "1"}, TypeError, "expected tolerance to be a number or None, got str"),
        ({"tolerance": -1.0}, ValueError, "expected tolerance to be 0 or more and finite, got -1"),
        ({"tolerance": 10**400}, ValueError, "expected tolerance to be 0 or more and finite, got"),
        ({"tolerance": math.nan}, ValueError, "to be 0 or more and finite, got nan"),
        ({"overwrite": 1}, TypeError, "expected overwrite to be a bool, got int"),
        ({"path": 3}, TypeError, "expected path to be a path, got int"),
        ({"path": "model.onnx"}, ValueError, "that ends in .pt2 for format 'ep', got 'model.onnx'"),
        ({"path": "model.pt2", "format": "onnx"}, ValueError, "that ends in .onnx for format"),
        ({"format": "aoti"}, ValueError, "expected a path for format 'aoti', got None"),
        ({"path": "no/folder/m.pt2"}, FileNotFoundError, "in a folder that is there, got 'no/fol"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type, text: str):
    given = {
        "model": nn.Sequential(nn.Linear(8, 8)).eval(),
        "args": (X,),
        "dtype": BF16,
        **arguments,
    }
    with pytest.raises(error, match=text):
        fastamp.inference.export(**given)


class Dropping(nn.Module):
    """Has no mode of its own."""

    def __init__(self, active: bool) -> None:
        super().__init__()
        self.linear, self.active = nn.Linear(8, 8), active
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped = nn.functional.dropout(self.drop(self.norm(self.linear(x))), 0.5, self.active)
        query = dropped.view(1, 1, *dropped.shape)
        return nn.functional.scaled_dot_product_attention(
            query, query, query, dropout_p=0.1 if self.active else 0.0
        )


@pytest.mark.parametrize("part", ["linear", "norm", "drop"])
def test_one_part_in_training_mode_is_enough_to_refuse(part: str):
    model = Dropping(False).eval()
    model.get_submodule(part).train()
    with pytest.raises(ValueError, match=f"got training mode in {part}: call model.eval"):
        fastamp.inference.export(model, (X,), BF16)


@pytest.mark.parametrize("active", [False, True])
def test_dropout_that_does_not_follow_the_mode_is_told(active: bool):
    done = fastamp.inference.export(Dropping(active).eval(), (X,), BF16, verbose=False)
    random = [line for line in done.checks if "draws random numbers" in line]
    assert len(random) == active
    if active:
        assert "aten.dropout.default" in random[0] or "aten.native_dropout.default" in random[0]
        assert "training=self.training" in str(done)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(PermissionError, match="in a folder that can be written"):
        fastamp.inference.export(nn.Linear(8, 8), (X,), BF16, path=tmp_path / "m.pt2")


def test_runtimes_are_held_against_the_program():
    nan, inf = float("nan"), float("inf")

    class Returns(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 1, x * 2

    x = torch.tensor([1.0, -4.0, nan, inf])
    program = torch.export.export(Returns(), (x,))

    def compared(*found: list[float], tolerance: float | None = None) -> str:
        def runner(_: Any) -> list[torch.Tensor]:
            return [torch.tensor(f) for f in found]

        return _compared("it", runner, program, ((x * scale,), {}), tolerance)

    scale = 1.0
    same, doubled = [1.0, -4.0, nan, inf], [2.0, -8.0, nan, inf]
    assert compared(same, doubled).startswith("it agrees with the program within 0 of")
    assert "within 0.0025 of" in compared(same, [2.02, -8.0, nan, inf])
    for wrong in ([1.5, -4.0, nan, inf], [nan, -4.0, nan, inf], [1.0, inf, nan, inf]):
        with pytest.raises(RuntimeError, match="export: expected it to compute what the program"):
            compared(wrong, doubled)
    with pytest.raises(RuntimeError, match="got nan"):
        compared(same, [2.0, -8.0, nan, nan])
    with pytest.raises(RuntimeError, match=r"tolerance= \(--tolerance\) accepts more"):
        compared(same, [2.1, -8.0, nan, inf])
    assert "within 0.012 of" in compared(same, [2.1, -8.0, nan, inf], tolerance=0.02)
    with pytest.raises(RuntimeError, match=r"within 0\.001 of the largest magnitude, got 0\.0025"):
        compared(same, [2.02, -8.0, nan, inf], tolerance=0.001)
    scale = nan
    assert "no result of the example is a finite number" in compared([nan] * 4, [nan] * 4)
    with pytest.raises(RuntimeError, match="got"):
        compared([nan] * 4, doubled)
