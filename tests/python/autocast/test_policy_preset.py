# SPDX-License-Identifier: Apache-2.0
"""fastamp.policy_preset: the policies of one device on another."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import fastamp

FP16, FP32 = torch.float16, torch.float32


def column(device: str) -> dict[str, str]:
    return {row.op: getattr(row, device) for row in fastamp.op_table()}


def softmax_dtype() -> torch.dtype:
    with fastamp.autocast("cpu", dtype=FP16):
        return torch.softmax(torch.ones(2, 2, dtype=FP16), -1).dtype


@pytest.fixture(autouse=True)
def _default_policies():
    yield
    fastamp.reset_op_policies()


def test_a_block_gives_one_column_to_another_device_and_takes_it_back():
    before = fastamp.op_table()
    assert column("cpu") != column("cuda")
    assert softmax_dtype() == FP16  # torch's list for the CPU does not have it
    with fastamp.policy_preset("cuda", device="cpu") as preset:
        assert isinstance(preset, fastamp.policy_preset)
        assert column("cpu") == column("cuda") == {row.op: row.cuda for row in before}
        assert softmax_dtype() == FP32
    assert fastamp.op_table() == before
    assert softmax_dtype() == FP16


def test_without_a_block_it_stays_in_force_in_all_threads():
    preset = fastamp.policy_preset("cuda", device="cpu")
    seen: list[torch.dtype] = []
    thread = threading.Thread(target=lambda: seen.append(softmax_dtype()))
    thread.start()
    thread.join()
    assert seen == [FP32]
    preset.release()
    preset.release()
    assert softmax_dtype() == FP16


def test_reset_op_policies_ends_it_too():
    preset = fastamp.policy_preset("cuda", device="cpu")
    fastamp.reset_op_policies()
    assert softmax_dtype() == FP16
    before = fastamp.op_table()
    preset.release()
    assert fastamp.op_table() == before


def test_the_other_direction():
    with fastamp.policy_preset("cpu", device="cuda"):
        assert column("cuda") == column("cpu")
        assert fastamp.op_policy("softmax.int", "cuda") == fastamp.op_policy("softmax.int", "cpu")


def test_edits_made_before_are_copied_and_given_back():
    fastamp.set_op_policy("exp", "banned", "cuda")
    fastamp.set_op_policy("exp", "lower", "cpu")
    with fastamp.policy_preset("cuda", device="cpu"):
        assert fastamp.op_policy("exp", "cpu") == "banned"
    assert fastamp.op_policy("exp", "cpu") == "lower"


def test_edits_made_meanwhile_are_kept():
    with fastamp.policy_preset("cuda", device="cpu"):
        fastamp.set_op_policy("softmax", "lower", "cpu")
    assert fastamp.op_policy("softmax.int", "cpu") == "lower"
    assert fastamp.op_policy("layer_norm", "cpu") == "pass"


def test_registered_ops_are_copied():
    fastamp.register_op("aten::hardswish", "fp32", "cuda")
    try:
        with fastamp.policy_preset("cuda", device="cpu"):
            assert fastamp.op_policy("hardswish", "cpu") == "fp32"
        assert fastamp.op_policy("hardswish", "cpu") == "pass"
    finally:
        fastamp.unregister_op("aten::hardswish")


def test_a_block_ends_with_an_exception():
    def failing() -> None:
        with fastamp.policy_preset("cuda", device="cpu"):
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
    with fastamp.policy_preset("cuda", device="cpu"):
        assert dtype() == FP32
    assert dtype() == FP16


@pytest.mark.parametrize(
    ("source", "device", "error", "text"),
    [
        (
            "tpu",
            "cpu",
            ValueError,
            "policy_preset: expected device to be 'cpu' or 'cuda', got 'tpu'",
        ),
        ("cuda", "meta", ValueError, "policy_preset: expected device .* got 'meta'"),
        (torch.device("cuda"), "cpu", TypeError, "str"),
    ],
)
def test_other_devices_are_refused(source: Any, device: Any, error: type, text: str):
    before = fastamp.op_table()
    with pytest.raises(error, match=text):
        fastamp.policy_preset(source, device=device)
    assert fastamp.op_table() == before
