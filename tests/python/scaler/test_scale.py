# SPDX-License-Identifier: Apache-2.0
"""scale(): result dtypes, containers and refusals equal to torch.amp's."""

import collections

import pytest
import torch

import fastamp
from support.scaler_pairs import SCALERS, outcome


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,)])
def test_result_dtype_and_value_are_torchs(dtype, shape):
    output = torch.rand(shape, dtype=torch.float64).to(dtype)
    expected, got = (kind("cpu", init_scale=3.0).scale(output) for kind in SCALERS)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


def test_a_zero_dim_fp16_loss_becomes_fp32():
    loss = torch.tensor(2.0, dtype=torch.float16)
    assert fastamp.GradScaler("cpu", 65536.0).scale(loss).item() == 131072.0


def test_gradient_of_the_scaled_loss_is_scaled():
    weight = torch.nn.Parameter(torch.ones(3))
    fastamp.GradScaler("cpu", init_scale=8.0).scale(weight.sum()).backward()
    assert weight.grad.tolist() == [8.0, 8.0, 8.0]


def test_containers_keep_their_type_and_other_iterables_become_lazy():
    scaler = fastamp.GradScaler("cpu", init_scale=4.0)
    one = torch.ones(2)
    nested = scaler.scale([one, (one, [one])])
    assert type(nested) is list
    assert type(nested[1]) is tuple
    assert nested[1][1][0].tolist() == [4.0, 4.0]

    class Pair(list):
        pass

    assert type(scaler.scale(Pair([one]))) is Pair
    seen = []
    lazy = scaler.scale(seen.append(1) or one for _ in range(2))
    assert isinstance(lazy, collections.abc.Iterator)
    assert not seen
    assert [t.tolist() for t in lazy] == [[4.0, 4.0]] * 2
    assert list(scaler.scale({})) == []


@pytest.mark.parametrize("value", [1.0, None, object(), [torch.ones(1), 3]])
def test_values_that_are_no_tensors_are_refused_as_torch_does(value):
    results = [outcome(lambda k=k: k("cpu").scale(value)) for k in SCALERS]
    assert results[0] == results[1] == ("raised", ValueError)
    with pytest.raises(ValueError, match=r"scale: outputs must be a Tensor or an iterable.*, got"):
        fastamp.GradScaler("cpu").scale(value)


def test_the_first_output_decides_where_the_scale_lives():
    for kind in SCALERS:
        scaler = kind("cpu", init_scale=4.0)
        assert scaler._scale is None
        scaler.scale([torch.ones(1)])
        assert scaler._scale.device.type == "cpu"
        assert scaler._scale.dtype == torch.float32
        assert scaler._scale.shape == ()
        assert scaler._growth_tracker.dtype == torch.int32


def test_a_disabled_scaler_returns_the_very_object():
    scaler = fastamp.GradScaler("cpu", enabled=False)
    for value in (torch.ones(1), [1, 2], "text", None):
        assert scaler.scale(value) is value


def test_a_torch_function_mode_sees_the_multiplication_as_with_torch():
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Mode():
        fastamp.GradScaler("cpu").scale(torch.ones(1))
    assert "mul" in seen
