# SPDX-License-Identifier: Apache-2.0
"""fastamp.inference.convert: weights cast once, the outputs of the region."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

import fastamp
from support.autocast_state import torch_state
from support.inference_models import NAMES, in_region, model_and_input, tensors

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def run(model: nn.Module, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return tensors(model(*args, **kwargs))


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert [t.dtype for t in found] == [t.dtype for t in wanted]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("lists", ["cpu", "cuda"])
@pytest.mark.parametrize("name", NAMES)
def test_a_converted_model_computes_what_its_region_computes(name: str, lists: str, dtype: Any):
    model, x = model_and_input(name)
    wanted = in_region(model, dtype, lists, x)
    before = copy.deepcopy(model.state_dict())
    state = torch_state()
    converted = fastamp.inference.convert(
        model, dtype, lists=lists, example_inputs=x, verbose=False
    )
    assert_equal(run(converted, x), wanted)
    _, other = model_and_input(name, batch=3)  # another input than the example
    assert_equal(run(converted, other), in_region(model, dtype, lists, other))
    assert torch_state() == state
    # The model itself is unchanged.
    after = model.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert {t.dtype for t in model.parameters()} == {FP32}


@pytest.mark.parametrize("name", NAMES)
def test_it_casts_no_weight_that_it_converted(name: str):
    model, x = model_and_input(name)
    converted = fastamp.inference.convert(model, BF16, example_inputs=x, verbose=False)
    with fastamp.debug.trace() as trace:
        run(converted, x)
    shared = sum(
        1
        for row in converted.fastamp_conversion.parameters
        if (row.reason == "embedding" and row.name in ("transformer.wte.weight",))
        or row.name == "bert.embeddings.word_embeddings.weight"
    )
    assert trace.totals["weight_casts"] == shared  # embeddings that are the head, too
    done = converted.fastamp_conversion
    assert len(done.converted) >= 4
    assert done.bytes_before - done.bytes_after == sum(
        row.bytes_after for row in done.parameters if not row.reason
    )
    assert {key: t.dtype for key, t in converted.named_parameters()} == {
        row.name: getattr(torch, row.dtype) for row in done.parameters
    }


def test_types_decide_where_there_are_no_inputs():
    model, x = model_and_input("ResNet-18")
    by_types = fastamp.inference.convert(model, BF16, verbose=False)
    by_forward = fastamp.inference.convert(model, BF16, example_inputs=x, verbose=False)
    assert by_types.fastamp_conversion.converted == by_forward.fastamp_conversion.converted
    assert_equal(run(by_types, x), in_region(model, BF16, "cpu", x))


def test_by_types_only_what_is_known_is_converted():
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return linear(x, self.weight.exp(), self.bias)

    model = nn.Sequential(nn.Linear(4, 4), Own(4, 4), nn.Bilinear(4, 4, 4), nn.Conv1d(4, 4, 1))
    model.append(nn.MultiheadAttention(4, 2)).append(nn.Embedding(4, 4)).append(nn.Linear(4, 4))
    model[6].weight = model[5].weight
    reasons = {
        row.name: row.reason
        for row in fastamp.inference.convert(
            model, BF16, verbose=False
        ).fastamp_conversion.parameters
    }
    converted = {name for name, reason in reasons.items() if not reason}
    assert converted == {
        "0.weight",
        "0.bias",
        "3.weight",
        "3.bias",
        "4.out_proj.weight",
        "4.out_proj.bias",
        "6.bias",
    }
    assert reasons["1.weight"] == "Own"
    assert reasons["5.weight"] == "Embedding"
    with fastamp.policies.override({"conv1d": "fp32"}):
        done = fastamp.inference.convert(model, BF16, verbose=False).fastamp_conversion
    assert "3.weight" not in done.converted


class Uses(nn.Module):
    """Weights used in ways of which some leave the cast as good as the weight."""

    def __init__(self) -> None:
        super().__init__()
        names = ("plain", "view", "part", "squared", "own_cast", "exact_cast", "unused", "both")
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.randn(8, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.plain
        y = torch.mm(y, self.view.t())
        y = linear(y, self.part[:8].reshape(8, 8).unsqueeze(0).squeeze(0))
        y = torch.mm(y, self.squared**2)
        y = torch.mm(y, self.own_cast.to(torch.bfloat16))
        y = torch.mm(y, self.exact_cast.double().float())
        return torch.mm(y, self.both) + self.both.sum()


def test_each_parameter_is_judged_by_its_uses():
    torch.manual_seed(0)
    model, x = Uses().eval(), torch.randn(3, 8)
    converted = fastamp.inference.convert(model, BF16, example_inputs=(x,), verbose=False)
    reasons = {row.name: row.reason for row in converted.fastamp_conversion.parameters}
    assert [name for name, reason in reasons.items() if not reason] == [
        "plain",
        "view",
        "part",
        "own_cast",
    ]
    assert reasons["squared"].startswith("pow")
    assert reasons["unused"] == "not used"
    assert reasons["both"] == "sum"
    assert_equal(run(converted, x), in_region(model, BF16, "cpu", x))


def test_shared_weights_stay_shared():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
            self.two.weight = self.one.weight
            self.block = nn.Sequential(nn.Linear(8, 8))
            self.again = self.block
            # Two parameters, one memory.
            self.two.bias.data = self.one.bias.data

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.again(self.block(self.two(self.one(x))))

    model, x = Twice().eval(), torch.randn(3, 8)
    wanted = in_region(model, BF16, "cpu", x)
    for inplace in (False, True):
        converted = fastamp.inference.convert(
            model, BF16, example_inputs=x, inplace=inplace, verbose=False
        )
        assert converted.one.weight is converted.two.weight
        assert converted.one.weight.dtype == BF16
        assert converted.block is converted.again
        assert converted.one.bias.data_ptr() == converted.two.bias.data_ptr()
        assert_equal(run(converted, x), wanted)


def test_a_head_that_is_the_embedding_stays():
    model, x = model_and_input("GPT-2")
    converted = fastamp.inference.convert(model, FP16, example_inputs=x, verbose=False)
    assert converted.lm_head.weight is converted.transformer.wte.weight
    assert converted.lm_head.weight.dtype == FP32


@pytest.mark.parametrize("kind", ["parametrization", "spectral", "hooks"])
def test_computed_weights_are_right(kind: str):
    layer = nn.Linear(8, 8)
    if kind == "parametrization":
        nn.utils.parametrizations.weight_norm(layer)
    elif kind == "spectral":
        nn.utils.parametrizations.spectral_norm(layer)
    else:
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(layer)
        layer.weight = layer.weight.detach()  # what deepcopy can copy
    model, x = nn.Sequential(layer, nn.Linear(8, 4)).eval(), torch.randn(3, 8)
    wanted = in_region(model, BF16, "cpu", x)
    for example in (x, None):
        converted = fastamp.inference.convert(model, BF16, example_inputs=example, verbose=False)
        assert set(converted.fastamp_conversion.converted) == {"0.bias", "1.weight", "1.bias"}
        assert_equal(run(converted, x), wanted)


def test_buffers_and_parameters_of_other_dtypes_stay():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8).bfloat16()).eval()
    model.register_buffer("table", torch.ones(3))
    model.register_parameter("steps", nn.Parameter(torch.tensor(3), requires_grad=False))
    converted = fastamp.inference.convert(
        model, BF16, example_inputs=torch.randn(2, 8), verbose=False
    )
    reasons = {row.name: row.reason for row in converted.fastamp_conversion.parameters}
    assert reasons["2.weight"] == "bfloat16"
    assert reasons["steps"] == "int64"
    assert converted.table.dtype == converted[1].running_var.dtype == FP32


def test_recurrent_layers_are_right():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rnn(x)[0])

    model, x = Recurrent().eval(), torch.randn(2, 5, 8)
    converted = fastamp.inference.convert(model, BF16, example_inputs=x, verbose=False)
    assert_equal(run(converted, x), in_region(model, BF16, "cpu", x))
    assert converted.head.weight.dtype == BF16


def test_attention_takes_the_same_path_with_and_without_gradients():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 8)
    converted = fastamp.inference.convert(model, BF16, example_inputs=x, verbose=False)
    # Without gradients one op without a policy reads them all.
    reasons = {row.reason for row in converted.fastamp_conversion.parameters}
    assert reasons == {"_transformer_encoder_layer_fwd"}
    assert_equal(run(converted, x), in_region(model, BF16, "cpu", x))
    with fastamp.autocast("cpu", dtype=BF16):
        wanted = model(x)
    assert_equal([converted(x)], [wanted])  # with gradients, nothing being converted


def test_the_converted_model_is_its_class_in_all_that_programs_ask():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            """Doc."""
            return self.layer(x) * scale

    model, x = Model().eval(), torch.randn(2, 8)
    seen = []
    model.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    converted = fastamp.inference.convert(model, FP16, example_inputs=x, verbose=False)
    assert isinstance(converted, Model)
    assert type(converted).__name__ == "Model"
    assert str(converted) == str(model)
    assert inspect.signature(converted.forward) == inspect.signature(model.forward)
    assert converted.state_dict().keys() == model.state_dict().keys()
    assert {t.dtype for t in converted.state_dict().values()} == {FP16}
    assert not converted.training
    seen.clear()
    wanted = run(converted, x, scale=2.0)
    assert seen == [False]  # hooks run around the region
    assert_equal(run(copy.deepcopy(converted), x, scale=2.0), wanted)
    converted.layer.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        converted(x)
    assert not torch.is_autocast_enabled("cpu")


def test_pickles_and_saved_states_come_back():
    model, x = model_and_input("MLP")
    converted = fastamp.inference.convert(
        model, BF16, lists="cuda", example_inputs=x, verbose=False
    )
    wanted = run(converted, x)
    assert_equal(run(pickle.loads(pickle.dumps(converted)), x), wanted)
    other = fastamp.inference.convert(model, BF16, lists="cuda", example_inputs=x, verbose=False)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(converted.state_dict())
    assert_equal(run(other, x), wanted)


def test_in_place_the_parameters_are_the_same_objects():
    model, x = model_and_input("MLP")
    parameters = list(model.parameters())
    wanted = in_region(model, FP16, "cpu", x)
    parameters[0].grad = torch.ones_like(parameters[0])
    assert (
        fastamp.inference.convert(model, FP16, example_inputs=x, inplace=True, verbose=False)
        is model
    )
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert {p.dtype for p in parameters} == {FP16}
    assert parameters[0].grad is None
    assert_equal(run(model, x), wanted)


def test_what_is_cast_is_frozen_and_keeps_its_attributes():
    for inplace in (False, True):
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        model[0].weight.no_decay = True
        x = torch.randn(2, 8)
        converted = fastamp.inference.convert(
            model, BF16, example_inputs=x, inplace=inplace, verbose=False
        )
        assert [p.requires_grad for p in converted.parameters()] == [False, False, True, True]
        assert converted[0].weight.no_decay


def test_frozen_weights_go_the_way_of_casts():
    # matmul folds the batch of an operand that is not contiguous only where gradients are wanted.
    model, x = nn.Sequential(nn.Linear(8, 4)).eval(), torch.randn(5, 2, 8).transpose(0, 1)
    converted = fastamp.inference.convert(model, BF16, example_inputs=x, verbose=False)
    assert converted.fastamp_conversion.converted == ("0.weight", "0.bias")
    assert_equal(run(converted, x), in_region(model, BF16, "cpu", x))


def test_lists_may_be_policies():
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)).eval()
    x = torch.randn(2, 8)
    policies = {"linear": "fp32", "softmax": "fp32"}
    converted = fastamp.inference.convert(
        model, BF16, lists=policies, example_inputs=x, verbose=False
    )
    assert converted.fastamp_conversion.converted == ()
    with torch.no_grad(), fastamp.policies.override(policies), fastamp.autocast("cpu", dtype=BF16):
        wanted = model(x)
    assert_equal(run(converted, x), [wanted])


def test_modules_kept_in_fp32():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, x = nn.Sequential(nn.Linear(8, 8), block, nn.Linear(8, 8)).eval(), torch.randn(2, 8)
    with torch.no_grad(), fastamp.autocast("cpu", dtype=BF16):
        y = model[0](x)
        with fastamp.autocast("cpu", enabled=False):
            y = block(y.float())
        wanted = model[2](y)
    for example in (x, None):
        converted = fastamp.inference.convert(
            model, BF16, example_inputs=example, fp32=["1"], verbose=False
        )
        assert_equal(run(converted, x), [wanted])
        assert converted.fastamp_conversion.converted == (
            "0.weight",
            "0.bias",
            "2.weight",
            "2.bias",
        )
    assert type(model[1]) is nn.Sequential


def test_control_flow_that_needs_values_is_run_with_them():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x) if x.sum().item() > 0 else self.two(x)

    state = torch.get_rng_state()
    x = torch.ones(2, 8)
    converted = fastamp.inference.convert(Model().eval(), BF16, example_inputs=x, verbose=False)
    assert converted.fastamp_conversion.converted == ("one.weight", "one.bias")
    del state


def test_a_model_that_asks_for_its_weights_dtype_is_refused():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.sin(x.to(self.layer.weight.dtype)))

    model = Model().eval()
    with pytest.raises(ValueError, match=r"convert: expected a model that computes the same .*sin"):
        fastamp.inference.convert(model, BF16, example_inputs=torch.randn(2, 8))
    assert type(model) is Model


def test_compiled_code_computes_the_same():
    model, x = model_and_input("MLP")
    converted = fastamp.inference.convert(model, BF16, example_inputs=x, verbose=False)
    compiled = torch.compile(converted, backend="aot_eager", fullgraph=True)
    assert_equal(run(compiled, x), run(converted, x))


def test_the_summary_is_printed_and_the_table_names_each_parameter(capsys: Any):
    model, x = model_and_input("GPT-2")
    converted = fastamp.inference.convert(model, BF16, example_inputs=x)
    summary = converted.fastamp_conversion.summary
    assert capsys.readouterr().out == f"convert: {summary}\n"
    text = str(converted.fastamp_conversion)
    assert text.endswith(summary)
    assert all(name in text for name, _ in model.named_parameters())
    (line,) = (line for line in text.splitlines() if line.startswith("transformer.wte.weight"))
    assert line.split() == ["transformer.wte.weight", "128x64", "float32", "embedding"]


class Wrapped(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.forward = lambda x: x


X = torch.ones(2, 8)


@pytest.mark.parametrize(
    ("model", "arguments", "error", "text"),
    [
        ("model", {}, TypeError, "convert: expected model to be a torch.nn.Module, got str"),
        (nn.Linear(8, 8), {"dtype": FP32}, ValueError, "expected dtype to be float16, .* float32"),
        (nn.Linear(8, 8), {"dtype": "bf16"}, TypeError, "expected dtype to be a torch.dtype"),
        (nn.Linear(8, 8), {"lists": "tpu"}, ValueError, "expected lists to be 'cpu', .*got 'tpu'"),
        (nn.Linear(8, 8), {"lists": 3}, TypeError, "expected lists to be .*, got int"),
        (nn.Linear(8, 8), {"lists": {"mmm": "lower"}}, ValueError, "convert: lists: .*'mmm'"),
        (nn.Linear(8, 8), {"lists": {"mm": "low"}}, ValueError, "convert: lists: .*'low'"),
        (nn.Linear(8, 8), {"inplace": 1}, TypeError, "expected inplace to be a bool, got int"),
        (nn.Linear(8, 8), {"fp32": ["norm"]}, ValueError, "expected fp32 to name modules.*'norm'"),
        (
            nn.Linear(8, 8),
            {"fp32": [3]},
            TypeError,
            "expected fp32 to be names of modules, got int",
        ),
        (nn.Linear(8, 8), {"example_kwargs": [X]}, TypeError, "example_kwargs to be a mapping"),
        (nn.Linear(8, 8), {"example_inputs": X[0, :3]}, RuntimeError, "runs with the example inp"),
        (nn.ReLU(), {}, ValueError, "expected a model with parameters, got none"),
        (nn.Linear(8, 8, device="meta"), {}, ValueError, "on CPU or CUDA, got one on meta"),
        (nn.LazyLinear(8), {}, TypeError, "expected initialized parameters, got weight"),
        (
            Wrapped(),
            {},
            TypeError,
            "expected modules that run their class's forward, got a Wrapped",
        ),
        (torch.jit.script(nn.Linear(8, 8)), {}, TypeError, "expected a module written in Python"),
        (torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8))), {}, TypeError, "in Python"),
    ],
)
@pytest.mark.parametrize("inplace", [True, False])
def test_what_cannot_be_converted_is_refused(
    model: Any, arguments: dict[str, Any], error: type, text: str, inplace: bool
):
    kind = type(model)
    options = {"dtype": BF16, "inplace": inplace, **arguments}
    with pytest.raises(error, match=text):
        fastamp.inference.convert(model, **options)
    assert type(model) is kind
    if isinstance(model, nn.Module):
        assert not hasattr(model, "fastamp_conversion")
        assert {p.dtype for p in model.parameters()} <= {FP32}


def test_a_model_is_converted_once():
    converted = fastamp.inference.convert(nn.Linear(8, 8), BF16, verbose=False)
    with pytest.raises(ValueError, match="expected a model that is not converted yet"):
        fastamp.inference.convert(converted, BF16)


def test_parameters_on_several_devices_are_named():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, device="meta"))
    with pytest.raises(ValueError, match="on one device, got one on cpu, meta"):
        fastamp.inference.convert(model, BF16)
