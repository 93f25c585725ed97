"""torchao's tensors: what it makes of the files is what our forward multiplies, bit for bit."""

import json
import random

import pytest
import torch

from quant import SCHEMES
from quant.formats.layouts import check_layout, layout_config, linear_shapes, linear_tensors
from quant.formats.torchao import PLAIN, TENSOR_NAMES, check_intx_of, intx_metadata
from quant.scale import Scale
from quant.spec import Scheme, TensorSpec

INPUTS = SCHEMES["8da4w"].activations
ROWS = Scheme("int8_per_row", TensorSpec("int", 8, "channel"), INPUTS)
HELD = [
    SCHEMES["8da4w"],
    Scheme("groups_of_64", TensorSpec("int", 4, "group", 64), INPUTS),
    Scheme("int4_per_row", TensorSpec("int", 4, "channel"), INPUTS),
    ROWS,
    SCHEMES["w4a16_g32"],
    SCHEMES["w8a16_channel"],
]


def layer(scheme: Scheme):
    """A layer's tensors for torchao, the fp32 weight of its forward, and how many inputs it has."""
    spec = scheme.weights
    rows, columns = random.randint(1, 9), (spec.group_size or 32) * random.randint(1, 4)
    weight = torch.randn(rows, columns).bfloat16()
    scale = (torch.rand(spec.scale_shape((rows, columns))) / 2 ** (spec.bits - 1) + 1e-3).bfloat16().float()
    found = {
        layout: linear_tensors(layout, "a", weight, Scale(s0=scale), None, None, scheme, dtype)
        for layout, dtype in (("executorch", torch.bfloat16), ("dequantized", torch.float32))
    }
    shapes = linear_shapes("executorch", columns, rows, scheme, torch.bfloat16)
    made = {key.removeprefix("a."): tensor for key, tensor in found["executorch"].items()}
    assert {suffix: (tensor.dtype, tuple(tensor.shape)) for suffix, tensor in made.items()} == shapes
    return made, found["dequantized"]["a.weight"], columns


@pytest.mark.parametrize("scheme", HELD, ids=lambda scheme: scheme.name)
def test_codes_and_scales_mean_the_weight(scheme: Scheme, seed: int):
    """By the definition alone, where torchao is not installed."""
    made, expected, columns = layer(scheme)
    block = json.loads(intx_metadata(scheme, columns, torch.bfloat16))["_data"]["block_size"]
    codes = made["_weight_qdata"].double().unflatten(1, (-1, block[1]))
    found = codes * made["_weight_scale"].double().unsqueeze(-1)
    assert torch.equal(found.flatten(1), expected.double())
    assert not made["_weight_zero_point"].any()


@pytest.mark.parametrize("scheme", HELD, ids=lambda scheme: scheme.name)
def test_torchao_reads_it(scheme: Scheme, seed: int):
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support", reason="pip install torchao")
    made, expected, columns = layer(scheme)
    told = {"a.weight": intx_metadata(scheme, columns, torch.bfloat16), "a.bias": PLAIN}
    metadata = {**told, TENSOR_NAMES: json.dumps(list(told))}
    tensors = {f"a.{suffix}": tensor for suffix, tensor in made.items()} | {"a.bias": torch.ones(3)}
    found, left = support.unflatten_tensor_state_dict(tensors, metadata)
    assert not left and torch.equal(found["a.bias"], torch.ones(3))
    weight = found["a.weight"]
    assert weight.dtype == torch.bfloat16 and weight.target_dtype == getattr(torch, f"int{scheme.weights.bits}")
    assert (weight.activation_quantization == "int8_asym_per_token") == (scheme.activations is not None)
    assert torch.equal(weight.to(torch.float32).dequantize(), expected)


def test_torchao_reads_the_configuration():
    core = pytest.importorskip("torchao.core.config", reason="pip install torchao")
    layers = {"model.a": SCHEMES["8da4w"], "model.b": ROWS, "model.embed_tokens": SCHEMES["w4a16_g32"]}
    config = layout_config("executorch", layers, ["lm_head"], [], no_linears=["model.embed_tokens"])
    assert (
        config is not None and config["quant_method"] == "torchao" and config["modules_to_not_convert"] == ["lm_head"]
    )
    kinds = core.config_from_dict(config["quant_type"]["default"]).fqn_to_config
    assert list(kinds) == list(layers)
    found = {name: (type(kind).__name__, kind.weight_dtype) for name, kind in kinds.items()}
    assert found == {
        "model.a": ("Int8DynamicActivationIntxWeightConfig", torch.int4),
        "model.b": ("Int8DynamicActivationIntxWeightConfig", torch.int8),
        "model.embed_tokens": ("IntxWeightOnlyConfig", torch.int4),
    }
    assert kinds["model.a"].weight_granularity.group_size == kinds["model.embed_tokens"].granularity.group_size == 32
    assert kinds["model.b"].weight_granularity.axis == 0


@pytest.mark.parametrize(
    ("scheme", "nearest"),
    [
        (SCHEMES["w2a16_g32"], "w8a16_channel"),
        (SCHEMES["w4a16_asym"], "w8a16_channel"),
        (SCHEMES["q4_0"], "w8a16_channel"),
        (SCHEMES["nvfp4"], "w8a16_channel"),
        (SCHEMES["mxfp4"], "w8a16_channel"),
        (SCHEMES["mxfp8"], "8da4w"),
        (SCHEMES["int8_dynamic"], "8da4w"),
        (SCHEMES["w4a8_int8"], "8da4w"),
        (SCHEMES["fp8_static"], "8da4w"),
        (Scheme("groups_of_16", TensorSpec("int", 4, "group", 16), INPUTS), "8da4w"),
        (Scheme("int8_in_groups", TensorSpec("int", 8, "group", 32), INPUTS), "8da4w"),
        (Scheme("three_bits", TensorSpec("int", 3, "group", 32), INPUTS), "8da4w"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_other_schemes_are_refused_and_the_nearest_is_named(scheme: Scheme, nearest: str):
    with pytest.raises(
        ValueError, match=rf"layout 'executorch' holds .*, got {scheme.name}; the nearest is {nearest}$"
    ):
        check_layout("executorch", [SCHEMES["8da4w"], scheme])


def test_a_linear_without_quantized_inputs_is_refused():
    with pytest.raises(ValueError, match=r"lm_head: layout 'executorch' has no Linear whose inputs are not quantized"):
        check_intx_of("lm_head", SCHEMES["w8a16_channel"], embedding=False)
    check_intx_of("model.embed_tokens", SCHEMES["w8a16_channel"], embedding=True)


@pytest.mark.parametrize("value", [-0.01, 1e-39])
def test_scales_that_xnnpack_does_not_take_are_refused(value: float):
    scale = torch.full((2, 1), 0.5)
    scale[1] = torch.tensor(value).bfloat16().float()
    with pytest.raises(ValueError, match=r"^a.*(not finite|XNNPACK takes no scales below 1\.18e-38)"):
        linear_tensors(
            "executorch", "a", torch.zeros(2, 32).bfloat16(), Scale(s0=scale), None, None, HELD[0], torch.bfloat16
        )
