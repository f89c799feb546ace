# SPDX-License-Identifier: Apache-2.0
"""inference.export(format="onnx"): strongly typed models that checkers and runtimes take."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import fastamp
from support.inference_models import NAMES, model_and_input, tensors

FP16, BF16 = torch.float16, torch.bfloat16

pytest.importorskip("onnxscript")
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

# Ops whose floating operands are of one type by the strongly typed networks of TensorRT.
TYPED = {"Gemm", "MatMul", "Conv", "Add", "Mul", "LayerNormalization", "Softmax", "Concat"}


def float_types(model: Any) -> dict[str, set[int]]:
    """The floating types of the operands of each typed node."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    graph = inferred.graph
    kinds = {t.name: t.data_type for t in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        kinds[value.name] = value.type.tensor_type.elem_type
    floats = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
    return {
        node.name: {kinds[name] for name in node.input if kinds.get(name) in floats}
        for node in graph.node
        if node.op_type in TYPED
    }


def check(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, x = model_and_input(name)
    path = tmp_path / "model.onnx"
    done = fastamp.inference.export(
        model, (x,), dtype, lists="cuda", format="onnx", path=path, verbose=False
    )
    # What export says it checked is checked again, by itself.
    onnx.checker.check_model(str(path), full_check=True)
    kinds = float_types(onnx.load(path))
    assert len(kinds) >= 2
    assert all(len(found) <= 1 for found in kinds.values()), kinds
    assert {"float": 1, "float16": 10, "bfloat16": 16}[str(dtype)[6:]] in set().union(
        *kinds.values()
    )
    assert done.checks[0] == "onnx.checker takes the model (full check)"
    if dtype == BF16:
        assert "onnxruntime" in done.checks[1]
        return
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        wanted = tensors(done.program.module()(x))
    for a, b in zip(found, wanted, strict=True):
        assert (torch.from_numpy(a) - b).abs().max() <= 2**-7 * b.abs().max()
    assert "onnxruntime agrees with the program within" in done.checks[1]


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_an_mlp(dtype: torch.dtype, tmp_path: Path):
    check("MLP", dtype, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "MLP"])
def test_models(name: str, dtype: torch.dtype, tmp_path: Path):
    check(name, dtype, tmp_path)


def test_what_torchs_cpu_lists_do_with_norms_is_refused(tmp_path: Path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).eval()
    x = torch.ones(2, 8)
    with pytest.raises(RuntimeError, match=r"ONNX has ops for, got .*layer_norm.*lists='cuda'"):
        fastamp.inference.export(
            model, (x,), FP16, lists="cpu", format="onnx", path=tmp_path / "m.onnx"
        )
    assert [path.name for path in tmp_path.iterdir()] == []


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else real(name)
    )
    model, x = model_and_input("MLP")
    with pytest.raises(ImportError, match=r"extra 'export' for format 'onnx', .*onnxruntime"):
        fastamp.inference.export(model, (x,), FP16, format="onnx")
