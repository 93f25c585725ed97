"""MLX's and torchao's tensors: what mlx.core and torchao make of the files is what our forward multiplies, bit for bit;
by the definition alone, too, where they are not installed."""

import json
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quant import SCHEMES
from quant.formats.compressed_tensors import TrainedLinear
from quant.formats.layouts import check_layout, layout_config, linear_shapes, linear_tensors
from quant.formats.mlx import mlx_config, quantization_mode
from quant.formats.torchao import PLAIN, TENSOR_NAMES, check_intx_of, intx_metadata
from quant.scale import Scale
from quant.spec import FP8_TENSOR, Scheme, TensorSpec

INPUTS = SCHEMES["8da4w"].activations
ROWS = Scheme("int8_per_row", TensorSpec("int", 8, "channel"), INPUTS)
MXFP8 = Scheme("mxfp8_weights", SCHEMES["mxfp8"].weights)
NAMES = ("w2a16_g32", "w3a16_g128", "w4a16_g32", "w4a16_g128", "w4a16_asym", "w8a16_g32", "w8a16_g128")
AFFINE = [SCHEMES[name] for name in NAMES]
AFFINE += [Scheme(f"w{bits}a16_g64", TensorSpec("int", bits, "group", 64)) for bits in (5, 6)]
MLX = pytest.mark.parametrize("scheme", [*AFFINE, SCHEMES["mxfp4"], MXFP8], ids=lambda scheme: scheme.name)
TORCHAO = pytest.mark.parametrize(
    "scheme",
    [
        SCHEMES["8da4w"],
        Scheme("groups_of_64", TensorSpec("int", 4, "group", 64), INPUTS),
        Scheme("int4_per_row", TensorSpec("int", 4, "channel"), INPUTS),
        ROWS,
        SCHEMES["w4a16_g32"],
        SCHEMES["w8a16_channel"],
    ],
    ids=lambda scheme: scheme.name,
)


def linear(layout: str, scheme: Scheme, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """A Linear's tensors in a layout by suffix, and the fp32 weight of its forward."""
    spec = scheme.weights
    rows, columns = random.randint(1, 9), (spec.group_size or 32) * random.randint(1, 4)
    weight, shape = torch.randn(rows, columns).to(dtype), spec.scale_shape((rows, columns))
    scale = (torch.rand(shape) / 2 ** (spec.bits - 1) + 1e-3).to(dtype).float()
    if spec.mx:
        scale = torch.ldexp(torch.ones(shape), torch.randint(-126, 120, shape))
    elif spec.symmetric and layout == "mlx":
        scale *= torch.where(torch.rand(shape) < 0.5, -1.0, 1.0)
    forward = Scale(s0=scale, zero=None if spec.symmetric else torch.randint(-8, 8, shape).float())
    trained = TrainedLinear("a", weight, forward, None, None, scheme, dtype)
    made = linear_tensors(layout, trained)
    shapes = linear_shapes(layout, columns, rows, scheme, dtype)
    assert {suffix: (tensor.dtype, tuple(tensor.shape)) for suffix, tensor in made.items()} == shapes
    return made, linear_tensors("dequantized", replace(trained, dtype=torch.float32))["weight"]


@pytest.mark.parametrize("scheme", AFFINE, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_words_for_mlx_are_a_stream_of_bits_that_means_the_weight(scheme, dtype, seed):
    made, expected = linear("mlx", scheme, dtype)
    bits = scheme.weights.bits
    octets = made["weight"].view(torch.uint8).int()
    stream = (octets.unsqueeze(-1) >> torch.arange(8) & 1).flatten(1)  # lowest bit first
    q = (stream.unflatten(1, (-1, bits)) << torch.arange(bits)).sum(-1)
    groups = q.double().unflatten(1, (-1, scheme.weights.group_size))
    found = made["scales"].double().unsqueeze(-1) * groups + made["biases"].double().unsqueeze(-1)
    assert torch.equal(found.flatten(1), expected.double())


@MLX
def test_mlx_reads_it(scheme, seed):
    mx = pytest.importorskip("mlx.core", reason="pip install -e '.[mlx]'")
    made, expected = linear("mlx", scheme, torch.bfloat16)
    wide = (tensor.float() if tensor.is_floating_point() else tensor for tensor in made.values())
    weight, *others = (mx.array(tensor.numpy()) for tensor in wide)
    found = mx.dequantize(weight, *others, **quantization_mode(scheme), dtype=mx.float32)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("scheme", [SCHEMES["mxfp4"], MXFP8], ids=lambda scheme: scheme.name)
def test_mlx_has_the_same_words_for_the_same_values(scheme, seed):
    """With the largest code in each group, MLX chooses our scales. No code is 0, of which MLX drops the sign."""
    mx = pytest.importorskip("mlx.core", reason="pip install -e '.[mlx]'")
    kind, s0 = quantization_mode(scheme), torch.ldexp(torch.ones(5, 3), torch.randint(-9, 9, (5, 3)))
    weight = torch.randn(5, 3, 32)
    weight += 0.5 * weight.sign()
    weight[..., 7] = -scheme.weights.qmax
    weight = (weight * s0.unsqueeze(-1)).flatten(1)
    trained = TrainedLinear("a", weight, Scale(s0=s0), None, None, scheme, torch.bfloat16)
    made, on_grid = linear_tensors("mlx", trained), linear_tensors("dequantized", replace(trained, dtype=torch.float32))
    words, again = mx.quantize(mx.array(on_grid["weight"].numpy()), **kind)
    assert words.tolist() == made["weight"].tolist() and again.tolist() == made["scales"].tolist()


def test_the_configuration_for_mlx_has_the_usual_groups_and_those_of_other_layers():
    layers = {"a": SCHEMES["w4a16_g32"], "b": SCHEMES["w8a16_g128"], "c": SCHEMES["w4a16_g32"], "d": MXFP8}
    usual, other = ({"group_size": size, "bits": bits, "mode": "affine"} for size, bits in ((32, 4), (128, 8)))
    assert mlx_config(layers) == {**usual, "b": other, "d": {"group_size": 32, "bits": 8, "mode": "mxfp8"}}
    assert layout_config("mlx", layers, [], []) is None  # no quantization_config, which other readers know


@TORCHAO
def test_codes_and_scales_for_torchao_mean_the_weight(scheme, seed):
    made, expected = linear("executorch", scheme, torch.bfloat16)
    block = json.loads(intx_metadata(scheme, expected.shape[1], torch.bfloat16))["_data"]["block_size"]
    codes = made["_weight_qdata"].double().unflatten(1, (-1, block[1]))
    found = codes * made["_weight_scale"].double().unsqueeze(-1)
    assert torch.equal(found.flatten(1), expected.double())
    assert not made["_weight_zero_point"].any()


@TORCHAO
def test_torchao_reads_it(scheme, seed):
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support", reason="pip install torchao")
    made, expected = linear("executorch", scheme, torch.bfloat16)
    told = {"a.weight": intx_metadata(scheme, expected.shape[1], torch.bfloat16), "a.bias": PLAIN}
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
    assert config["quant_method"] == "torchao" and config["modules_to_not_convert"] == ["lm_head"]
    kinds = core.config_from_dict(config["quant_type"]["default"]).fqn_to_config
    assert [(name, type(kind).__name__, kind.weight_dtype) for name, kind in kinds.items()] == [
        ("model.a", "Int8DynamicActivationIntxWeightConfig", torch.int4),
        ("model.b", "Int8DynamicActivationIntxWeightConfig", torch.int8),
        ("model.embed_tokens", "IntxWeightOnlyConfig", torch.int4),
    ]
    assert kinds["model.a"].weight_granularity.group_size == kinds["model.embed_tokens"].granularity.group_size == 32
    assert kinds["model.b"].weight_granularity.axis == 0


@pytest.mark.parametrize(
    ("layout", "nearest", "schemes"),
    [
        ("mlx", "w4a16_g32", ["8da4w"]),
        ("mlx", "w4a16_g128", ["w4a16_channel"]),
        ("mlx", "mxfp4", ["nvfp4", "mxfp4_w4a4", "mxfp4_mxfp8"]),
        ("mlx", "w8a16_g128", ["w8a16_asym", "fp8_static"]),
        ("mlx", "w8a16_g32", ["mxfp8", Scheme("own", TensorSpec("int", 7, "group", 32))]),
        ("mlx", "w8a16_g128", [Scheme("own", TensorSpec("int", bits, "group", 16)) for bits in (5, 6, 7)]),
        ("executorch", "w8a16_channel", ["w2a16_g32", "w4a16_asym", "q4_0", "nvfp4", "mxfp4"]),
        ("executorch", "8da4w", ["mxfp8", "int8_dynamic", "w4a8_int8", "fp8_static"]),
        ("executorch", "8da4w", [TensorSpec("int", *kind) for kind in ((4, "group", 16), (8, "group", 32))]),
        ("executorch", "8da4w", [TensorSpec("int", 3, "group", 32)]),
    ],
)
def test_other_schemes_are_refused_and_the_nearest_is_named(layout, nearest, schemes):
    for one in schemes:
        scheme = SCHEMES[one] if isinstance(one, str) else one
        scheme = Scheme("own", one, INPUTS) if isinstance(one, TensorSpec) else scheme
        said = rf"layout '{layout}' holds .*, got {scheme.name}; the nearest is {nearest}$"
        with pytest.raises(ValueError, match=said):
            check_layout(layout, [SCHEMES["w4a16_g32" if layout == "mlx" else "8da4w"], scheme])


def test_layouts_of_one_scheme_and_schemes_without_a_format_are_refused():
    bad = Scheme("bad", TensorSpec("int", 8, "tensor"))
    for layout, schemes, said in (
        ("nothing", [SCHEMES["fp8_static"]], "unknown layout 'nothing'"),
        ("compressed", [bad], "bad.* has no export format"),
        ("vllm_fp8", [SCHEMES["fp8_static"], SCHEMES["fp8_block"]], "got fp8_static, fp8_block; use"),
        ("modelopt", [SCHEMES["nvfp4"], SCHEMES["w4a16_g32"]], "got w4a16_g32; use layout 'compressed'"),
        ("gpt_oss", [SCHEMES["fp8_static"]], "got fp8_static; use layout 'compressed'"),
    ):
        with pytest.raises(ValueError, match=said):
            check_layout(layout, schemes)


def test_modelopt_names_one_algorithm_or_that_of_each_layer():
    one, other = SCHEMES["fp8_static"], SCHEMES["nvfp4"]
    config = layout_config("modelopt", {"a": one, "b": one}, ["lm_head"], ["gate"], FP8_TENSOR, copied=["visual"])
    left_out = ["gate", "lm_head", "visual*"]
    assert config == {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": left_out}
    mixed = layout_config("modelopt", {"a": one, "b": other}, ["lm_head"], [])
    kinds = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}
    assert mixed == {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": kinds}
    with pytest.raises(ValueError, match=r"layout 'modelopt' needs quantized layers, not only a KV cache; use layout"):
        layout_config("modelopt", {}, [], [], FP8_TENSOR)


def test_a_linear_for_torchao_without_quantized_inputs_is_refused():
    with pytest.raises(ValueError, match=r"lm_head: layout 'executorch' has no Linear whose inputs are not quantized"):
        check_intx_of("lm_head", SCHEMES["w8a16_channel"], embedding=False)
    check_intx_of("model.embed_tokens", SCHEMES["w8a16_channel"], embedding=True)


@pytest.mark.parametrize("value", [-0.01, 1e-39])
def test_scales_that_xnnpack_does_not_take_are_refused(value):
    scale, weight = torch.tensor([[0.5], [value]]).bfloat16().float(), torch.zeros(2, 32).bfloat16()
    linear = TrainedLinear("a", weight, Scale(s0=scale), None, None, SCHEMES["8da4w"], torch.bfloat16)
    with pytest.raises(ValueError, match=r"^a.*(not finite|XNNPACK takes no scales below 1\.18e-38)"):
        linear_tensors("executorch", linear)
