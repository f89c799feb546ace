# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fastamp
from support.children import check_python

PROBE = str(Path(__file__).resolve().parents[1] / "support" / "policy_probe.py")
COLUMNS = [(device, dtype) for device in ("cpu", "cuda") for dtype in ("bfloat16", "float16")]
# Fails in torch's CPU regions; docs/compatibility.md, "Ops".
BEYOND_TORCH = ["aten::_transformer_encoder_layer_fwd"]


@pytest.fixture(scope="module")
def of_torch() -> dict[str, Any]:
    return json.loads(check_python(PROBE, FASTAMP_PROBE="0"))


@pytest.fixture(scope="module")
def of_fastamp() -> dict[str, Any]:
    return json.loads(check_python(PROBE, FASTAMP_PROBE="1"))


def policies(device: str) -> dict[str, str]:
    return {row.op: getattr(row, device) for row in fastamp.policies.table()}


def defaults(device: str) -> dict[str, str]:
    return {row.op: getattr(row, f"{device}_default") for row in fastamp.policies.table()}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_table_autocasts_exactly_the_ops_torch_registers(device: str, of_torch: dict[str, Any]):
    registered = {name.removeprefix("aten::") for name in of_torch["names"][device]}
    own = {op for op, policy in policies(device).items() if policy != "pass"}
    assert own == registered


def test_torch_2_11_registers_129_ops_on_cpu_and_126_on_cuda(of_torch: dict[str, Any]):
    if not torch.__version__.startswith("2.11."):
        pytest.skip("counts of torch 2.11")
    assert {device: len(of_torch["names"][device]) for device in ("cpu", "cuda")} == {
        "cpu": 129,
        "cuda": 126,
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kernels_replace_torchs_on_every_registered_op(device: str, of_torch: dict[str, Any]):
    key = f"Autocast{device.upper()}"
    for name in of_torch["names"][device]:
        lines = torch._C._dispatch_dump(name).splitlines()
        active = next(line for line in lines if line.startswith(f"{key}:") and "[ boxed" in line)
        assert "autocast/registration.cpp" in active, active


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_but_torchs_ops_is_registered(
    device: str, of_torch: dict[str, Any], of_fastamp: dict[str, Any]
):
    # In processes of their own: libraries that other tests import register ops, too.
    beyond_torch = BEYOND_TORCH if device == "cpu" else []
    assert of_fastamp["registered"][device] == sorted(of_torch["names"][device] + beyond_torch)


def test_rms_norm_is_in_the_table_and_follows_the_running_torch(of_torch: dict[str, Any]):
    for device in ("cpu", "cuda"):
        expected = "fp32" if "aten::rms_norm" in of_torch["names"][device] else "pass"
        assert fastamp.policies.get("rms_norm", device) == expected


def test_no_op_stands_in_the_table_twice_and_every_op_exists_in_torch():
    names = [row.op for row in fastamp.policies.table()]
    assert len(names) == len(set(names))
    for name in names:
        base, _, overload = name.partition(".")
        assert (
            getattr(torch.ops.aten, base).default
            if not overload
            else (overload in getattr(torch.ops.aten, base).overloads())
        )


def test_current_policies_are_the_defaults_where_nobody_edited_them():
    for device in ("cpu", "cuda"):
        assert policies(device) == defaults(device)


def header_lists() -> dict[str, str]:
    """CUDA policies as torch's installed header states them, op name to policy."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text(encoding="utf-8").replace("\\\n", " ")
    macros = {
        "LOWER_PRECISION_FP": "lower",
        "FP32": "fp32",
        "FP32_SET_OPT_DTYPE": "set_opt_dtype",
        "PROMOTE": "promote",
    }
    found: dict[str, str] = {}
    for macro, policy in macros.items():
        body = re.search(rf"#define AT_FORALL_{macro}\(_\)(.*)", text)
        assert body is not None, macro
        for base, overload in re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body.group(1)):
            found[f"{base}.{overload}" if overload else base] = policy
    redispatch = re.search(r"#define AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE\(_\)(.*)", text)
    assert redispatch is not None
    for name in re.findall(r'"([\w.]+)"', redispatch.group(1)):
        found[name] = "append_dtype"
    return found


def test_cuda_policies_are_those_of_torchs_header():
    expected = header_lists()
    assert len(expected) > 100
    # Registered by torch outside the header's lists.
    expected |= {
        "cudnn_convolution": "lower",
        "cudnn_convolution_transpose": "lower",
        "_cudnn_rnn": "lower",
        "binary_cross_entropy": "banned",
    }
    if hasattr(torch.ops.aten, "linalg_matrix_sqrth"):
        expected["linalg_matrix_sqrth"] = "fp32"
    assert {op: policy for op, policy in policies("cuda").items() if policy != "pass"} == expected


@pytest.mark.parametrize(("device", "dtype"), COLUMNS)
def test_every_kernel_hands_on_the_dtypes_torchs_kernel_does(
    device: str, dtype: str, of_torch: dict[str, Any], of_fastamp: dict[str, Any]
):
    """Twelve mixes of argument dtypes for each op, an explicit dtype argument included."""
    torchs, own = (probes["probes"][f"{device} {dtype}"] for probes in (of_torch, of_fastamp))
    assert own.keys() == torchs.keys()
    wrong = []
    answered = 0
    for op, mixes in torchs.items():
        for mix, expected in mixes.items():
            got = own[op][mix]
            if isinstance(expected, str):
                same = own_where_torch_refuses(op, expected, got)
            else:
                answered += 1
                same = got == expected
            if not same:
                wrong.append((op, mix, expected, got))
    assert not wrong
    assert answered > 10 * len(torchs)


def own_where_torch_refuses(op: str, expected: str, got: Any) -> bool:
    if "at::autocast::prioritize" in expected:
        # Decided difference: where torch refuses a mix of float16 and bfloat16, float32 is used.
        if op == "aten::index_put":
            got[0][1] = "indices, which are never cast"
        return "float32" in json.dumps(got) and "float16" not in json.dumps(got)
    assert op == "aten::binary_cross_entropy", (op, expected)
    return isinstance(got, str) and got.startswith("RuntimeError: aten::binary_cross_entropy")


@pytest.mark.parametrize(("device", "dtype"), COLUMNS)
def test_every_kernel_behaves_as_the_table_says(
    device: str, dtype: str, of_fastamp: dict[str, Any]
):
    for op, mixes in of_fastamp["probes"][f"{device} {dtype}"].items():
        expected = policies(device)[op.removeprefix("aten::")]
        assert behaviour(mixes, dtype) == expected, (op, mixes)


def behaviour(mixes: dict[str, Any], lower: str) -> str:
    """The policy that explains what a kernel did, from its answers alone."""
    short = {"bfloat16": "bf16", "float16": "fp16"}[lower]
    if isinstance(mixes["fp32"], str):
        return "banned"
    of_fp32, of_lower = json.dumps(mixes["fp32"]), json.dumps(mixes[short])
    if "dtype=torch.float32" in of_fp32:
        given = json.dumps(mixes["bf16 and a dtype argument"])
        return "set_opt_dtype" if "dtype=torch.float16" in given else "append_dtype"
    if lower in of_fp32:
        return "lower"
    return "promote" if lower in of_lower else "fp32"
