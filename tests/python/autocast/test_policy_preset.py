# SPDX-License-Identifier: Apache-2.0
"""fastamp.policies.copy_from: the policies of one device on another."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import fastamp

FP16, FP32 = torch.float16, torch.float32


def column(device: str) -> dict[str, str]:
    return {row.op: getattr(row, device) for row in fastamp.policies.table()}


def softmax_dtype() -> torch.dtype:
    with fastamp.autocast("cpu", dtype=FP16):
        return torch.softmax(torch.ones(2, 2, dtype=FP16), -1).dtype


@pytest.fixture(autouse=True)
def _default_policies():
    yield
    fastamp.policies.reset()


def test_a_block_gives_one_column_to_another_device_and_takes_it_back():
    before = fastamp.policies.table()
    assert column("cpu") != column("cuda")
    assert softmax_dtype() == FP16  # torch's list for the CPU does not have it
    with fastamp.policies.copy_from("cuda", device="cpu") as preset:
        assert isinstance(preset, fastamp.policies.copy_from)
        assert column("cpu") == column("cuda") == {row.op: row.cuda for row in before}
        assert softmax_dtype() == FP32
    assert fastamp.policies.table() == before
    assert softmax_dtype() == FP16


def test_without_a_block_it_stays_in_force_in_all_threads():
    preset = fastamp.policies.copy_from("cuda", device="cpu")
    seen: list[torch.dtype] = []
    thread = threading.Thread(target=lambda: seen.append(softmax_dtype()))
    thread.start()
    thread.join()
    assert seen == [FP32]
    preset.release()
    preset.release()
    assert softmax_dtype() == FP16


def test_reset_op_policies_ends_it_too():
    preset = fastamp.policies.copy_from("cuda", device="cpu")
    fastamp.policies.reset()
    assert softmax_dtype() == FP16
    before = fastamp.policies.table()
    preset.release()
    assert fastamp.policies.table() == before


def test_the_other_direction():
    with fastamp.policies.copy_from("cpu", device="cuda"):
        assert column("cuda") == column("cpu")
        assert fastamp.policies.get("softmax.int", "cuda") == fastamp.policies.get(
            "softmax.int", "cpu"
        )


def test_edits_made_before_are_copied_and_given_back():
    fastamp.policies.set("exp", "banned", "cuda")
    fastamp.policies.set("exp", "lower", "cpu")
    with fastamp.policies.copy_from("cuda", device="cpu"):
        assert fastamp.policies.get("exp", "cpu") == "banned"
    assert fastamp.policies.get("exp", "cpu") == "lower"


def test_edits_made_meanwhile_are_kept():
    with fastamp.policies.copy_from("cuda", device="cpu"):
        fastamp.policies.set("softmax", "lower", "cpu")
    assert fastamp.policies.get("softmax.int", "cpu") == "lower"
    assert fastamp.policies.get("layer_norm", "cpu") == "pass"


def test_registered_ops_are_copied():
    fastamp.policies.register_op("aten::hardswish", "fp32", "cuda")
    try:
        with fastamp.policies.copy_from("cuda", device="cpu"):
            assert fastamp.policies.get("hardswish", "cpu") == "fp32"
        assert fastamp.policies.get("hardswish", "cpu") == "pass"
    finally:
        fastamp.policies.unregister_op("aten::hardswish")


def test_a_block_ends_with_an_exception():
    def failing() -> None:
        with fastamp.policies.copy_from("cuda", device="cpu"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert softmax_dtype() == FP16


def test_compiled_functions_see_it():
    @torch.compile(backend="aot_eager")
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    def dtype() -> torch.dtype:
        with fastamp.autocast("cpu", dtype=FP16):
            return function(torch.ones(2, 2, dtype=FP16)).dtype

    assert dtype() == FP16
    with fastamp.policies.copy_from("cuda", device="cpu"):
        assert dtype() == FP32
    assert dtype() == FP16


@pytest.mark.parametrize(
    ("source", "device", "error", "text"),
    [
        (
            "tpu",
            "cpu",
            ValueError,
            "policies.copy_from: expected device to be 'cpu' or 'cuda', got 'tpu'",
        ),
        ("cuda", "meta", ValueError, "policies.copy_from: expected device .* got 'meta'"),
        (torch.device("cuda"), "cpu", TypeError, "str"),
    ],
)
def test_other_devices_are_refused(source: Any, device: Any, error: type, text: str):
    before = fastamp.policies.table()
    with pytest.raises(error, match=text):
        fastamp.policies.copy_from(source, device=device)
    assert fastamp.policies.table() == before
