# SPDX-License-Identifier: Apache-2.0
"""torch's operators on the simulated device: the CPU's results."""

from __future__ import annotations

import pytest
import torch

import fastamp
from support.torch_testing import torch_testing

pytestmark = pytest.mark.simulated

LAYERS = {
    "linear": (lambda: torch.nn.Linear(6, 4), (5, 6)),
    "conv": (lambda: torch.nn.Conv2d(3, 4, 3, padding=1), (2, 3, 8, 8)),
    "transposed conv": (lambda: torch.nn.ConvTranspose2d(3, 4, 3), (2, 3, 8, 8)),
    "batch norm": (lambda: torch.nn.BatchNorm2d(3), (2, 3, 8, 8)),
    "layer norm": (lambda: torch.nn.LayerNorm(6), (5, 6)),
    "lstm": (lambda: torch.nn.LSTM(6, 4, 2, bidirectional=True), (7, 3, 6)),
    "gru": (lambda: torch.nn.GRU(6, 4), (7, 3, 6)),
    "rnn": (lambda: torch.nn.RNN(6, 4), (7, 3, 6)),
    "attention": (lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), (5, 3, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_basic_layers_and_their_gradients_are_the_cpus(name):
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    own, torchs = make(), make().cuda()
    torchs.load_state_dict(own.state_dict())
    x = torch.randn(shape)
    results = []
    for layer, given in ((own, x.clone()), (torchs, x.cuda())):
        output = layer(given.requires_grad_())
        output = output[0] if isinstance(output, tuple) else output
        output.square().sum().backward()
        gradients = [given.grad, *(p.grad for p in layer.parameters())]
        results.append([t.detach().cpu() for t in (output, *gradients)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell"])
def test_basic_fused_cells_are_the_cpus(kind):
    torch.manual_seed(0)
    own, torchs = getattr(torch.nn, kind)(5, 4), getattr(torch.nn, kind)(5, 4).cuda()
    torchs.load_state_dict(own.state_dict())
    x = torch.randn(3, 5)
    outputs = [own(x), torchs(x.cuda())]
    for output in outputs:
        (output[1] if isinstance(output, tuple) else output).square().sum().backward()
    for a, b in zip(own.parameters(), torchs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad.cpu())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_basic_recurrent_layers_in_a_region(kind, dtype):
    torch.manual_seed(0)
    layer = getattr(torch.nn, kind)(8, 16, num_layers=2, bidirectional=True)
    lowered = getattr(torch.nn, kind)(8, 16, num_layers=2, bidirectional=True).cuda()
    lowered.load_state_dict(layer.state_dict())
    x = torch.randn(5, 3, 8)
    with fastamp.autocast("cuda", dtype=dtype):
        output = lowered(x.cuda())[0]
    output.float().sum().backward()
    expected = layer(x)[0]
    expected.sum().backward()
    assert output.dtype == torch.float16  # as torch's, whatever the region's dtype
    torch.testing.assert_close(output.detach().cpu().float(), expected, rtol=0.05, atol=0.05)
    for own, torchs in zip(lowered.parameters(), layer.parameters(), strict=True):
        assert own.grad.dtype == torch.float32
        torch.testing.assert_close(own.grad.cpu(), torchs.grad, rtol=0.1, atol=0.1)


def test_basic_packed_sequences():
    torch.manual_seed(0)
    own, torchs = torch.nn.LSTM(5, 4), torch.nn.LSTM(5, 4).cuda()
    torchs.load_state_dict(own.state_dict())
    sequences = [torch.randn(n, 5) for n in (4, 3, 1)]
    packed = torch.nn.utils.rnn.pack_sequence(sequences)
    expected, got = own(packed)[0].data, torchs(packed.to("cuda"))[0].data
    assert torch.equal(expected, got.cpu())


def test_every_operator_of_torchs_list_gives_the_cpus_result():
    op_db = torch_testing("common_methods_invocations").op_db

    torch.manual_seed(0)
    wrong, unable, compared = [], [], 0
    for op in op_db:
        on_both = torch.float32 in op.dtypes and torch.float32 in op.dtypesIfCUDA
        if not on_both or op.name in DRAWN or "linalg" in op.name:
            continue
        sample = next(iter(op.sample_inputs("cpu", torch.float32)), None)
        if sample is None:
            continue
        moved = sample.transform(lambda x: x.cuda() if isinstance(x, torch.Tensor) else x)
        try:
            expected = op(sample.input, *sample.args, **sample.kwargs)
            got = op(moved.input, *moved.args, **moved.kwargs)
        except (RuntimeError, NotImplementedError) as error:
            unable.append(f"{op.name}: {str(error)[:100]}")
            torch.cuda.synchronize()
            continue
        compared += 1
        try:
            torch.testing.assert_close(to_host(got), to_host(expected), equal_nan=True)
        except AssertionError as error:
            wrong.append(f"{op.name}: {str(error)[:200]}")
    assert not wrong, "\n".join(wrong)
    assert compared >= 350
    assert {name.partition(":")[0] for name in unable} <= UNABLE, "\n".join(unable)


# Code that is compiled at run time, arguments that must be on the CPU, a layout that is refused, an
# operator of the CPU alone, which newer torches list.
UNABLE = {
    "jiterator_unary",
    "jiterator_binary",
    "jiterator_4inputs_with_extra_args",
    "jiterator_binary_return_by_ref",
    "jiterator_2inputs_2outputs",
    "tensor_split",
    "sparse.mm",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
}


# Results that are drawn, or memory as it was.
DRAWN = {
    "bernoulli",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "multinomial",
    "new_empty",
    "new_empty_strided",
    "normal",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "resize_",
    "resize_as_",
    "uniform",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "nn.functional.dropout",
    "nn.functional.dropout2d",
    "nn.functional.dropout3d",
    "nn.functional.alpha_dropout",
    "nn.functional.feature_alpha_dropout",
    "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d",
    "nn.functional.rrelu",
    "nn.functional.scaled_dot_product_attention",
    "pca_lowrank",
    "svd_lowrank",
}


def to_host(value):
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, (tuple, list)):
        return [to_host(item) for item in value]
    return value
