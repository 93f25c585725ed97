"""The layout on disk against compressed-tensors itself, and quantization_config there and back."""

import json
import random

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import is_match

from quant import export
from quant.reference import absmax_scale, dequantize, effective_scale, fake_quant, quantize
from quant.spec import SCHEMES, Scheme, TensorSpec

BITS = (2, 3, 4, 8)


def weight_and_scale(scheme: Scheme, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A bf16 weight and a learned scale of it (theta differs from 0, so that the scale is no round number)."""
    weight = torch.randn(rows, columns).bfloat16()
    spec = scheme.weights
    width = {"tensor": rows * columns, "channel": columns, "group": spec.group_size}[spec.granularity]
    absmax = weight.float().abs().view(-1, width).amax(1).view(spec.scale_shape((rows, columns)))
    theta = 0.1 * torch.randn(absmax.shape).bfloat16()
    return weight, effective_scale(absmax_scale(absmax, spec), theta, spec, torch.bfloat16)


@pytest.mark.parametrize("bits", BITS)
def test_packing_is_that_of_compressed_tensors(bits, seed):
    """Bit for bit both ways, for widths that do not fill a word or a group of 32 codes."""
    for columns in (1, 7, 31, 32, 33, 64, 83, random.randrange(1, 400)):
        rows = random.randrange(1, 9)
        codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, columns), dtype=torch.int8)
        packed = export.pack_int32(codes, bits)
        assert torch.equal(packed, pack_to_int32(codes, bits))
        assert packed.is_contiguous()
        assert packed.shape == (rows, export.packed_columns(columns, bits))
        assert torch.equal(export.unpack_int32(packed, bits, columns), codes)
        assert torch.equal(unpack_from_int32(packed, bits, codes.shape), codes)


@pytest.mark.parametrize("bits", BITS)
def test_packing_keeps_the_ends_of_the_grid(bits):
    """All codes at their extremes: every bit of every word is 0, then 1."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    assert not export.pack_int32(torch.full((3, 64), low, dtype=torch.int8), bits).any()
    assert (export.pack_int32(torch.full((3, 64), high, dtype=torch.int8), bits) == -1).all()


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_linear_decompresses_to_the_fake_quantised_weight(scheme, bias, seed, monkeypatch):
    """compressed-tensors' own decompression gives, bit for bit, what the forward multiplied with; fp32 and bf16."""
    monkeypatch.setattr(export, "CHUNK_ELEMENTS", 1000)  # several chunks, the last one short
    rows, columns = random.randrange(20, 60), 128 * random.randrange(1, 4)
    weight, scale = weight_and_scale(scheme, rows, columns)
    input_scale = None if scheme.activations is None else torch.rand(1) + 0.1
    tensors = export.pack_linear(
        "a.b", weight, scale, input_scale, weight[:, 0] if bias else None, scheme, torch.bfloat16
    )

    planned = {
        f"a.b.{key}": value for key, value in export.packed_shapes(columns, rows, scheme, torch.bfloat16).items()
    }
    planned |= {"a.b.bias": (torch.bfloat16, (rows,))} if bias else {}
    assert {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()} == planned
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors.values()]
    assert (
        len({*storages, weight.untyped_storage().data_ptr(), scale.untyped_storage().data_ptr()}) == len(storages) + 2
    )

    codes = export.unpack_weight({key.removeprefix("a.b."): tensor for key, tensor in tensors.items()}, scheme)
    expected = quantize(weight, scale, scheme.weights)
    assert codes.dtype == expected.dtype
    assert torch.equal(codes.view(torch.int8), expected.view(torch.int8))
    assert torch.equal(tensors["a.b.weight_scale"].float(), scale)

    config = QuantizationConfig(**export.quantization_config(scheme, ["lm_head"]))
    state = {key.removeprefix("a.b."): tensor for key, tensor in tensors.items()}
    group = config.config_groups["group_0"]
    for dtype in (torch.float32, torch.bfloat16):
        state["weight_scale"] = tensors["a.b.weight_scale"].to(torch.float32)  # what a reader in fp32 holds
        theirs = BaseCompressor.get_value_from_registry(group.format).decompress(state, group)["weight"].to(dtype)
        assert torch.equal(theirs, dequantize(expected, scale, scheme.weights, dtype))
        assert torch.equal(theirs, export.dequantized_weight(codes, scale, scheme.weights, dtype))
    assert torch.equal(theirs, fake_quant(weight, scale, scheme.weights))


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantising_a_dequantised_weight_gives_the_same_codes(scheme, dtype, seed):
    """What lets a reader rebuild our forward from a file.

    code * s * (1/s) is off by at most three roundings, 2^-22 of the code in fp32; after the rounding to bf16 2^-8.9.
    The next boundary between codes is half a step away: at least 1/30 of the code for e4m3, 1/16 for 4 bits and fewer.
    """
    weight, scale = weight_and_scale(scheme, 64, 384)
    codes = quantize(weight, scale, scheme.weights)
    again = quantize(dequantize(codes, scale, scheme.weights, dtype), scale, scheme.weights)
    assert torch.equal(again.view(torch.int8), codes.view(torch.int8))


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
def test_config_there_and_back(scheme):
    """Through JSON, through compressed-tensors' own class, and with the further keys that other writers leave."""
    config = json.loads(json.dumps(export.quantization_config(scheme, ["lm_head"])))
    assert export.scheme_from_config(config) is scheme
    theirs = QuantizationConfig(**config).to_dict()
    assert (
        export.scheme_from_config(json.loads(json.dumps(theirs, default=str)) | {"quant_method": "compressed-tensors"})
        is scheme
    )


def test_config_of_numerics_without_a_preset():
    """A spec that no preset names is still read, under a name that says what it is."""
    scheme = Scheme("mine", TensorSpec("int", 5, "channel"))
    read = export.scheme_from_config(export.quantization_config(scheme, []))
    assert (read.weights, read.activations, read.name) == (scheme.weights, None, "w5a16_channel")


def test_fp8_config_is_the_one_that_was_verified():
    """Key for key the configuration that transformers and vLLM's loading code were seen to accept."""
    assert export.quantization_config(SCHEMES["fp8_static"], ["lm_head", r"re:.*mlp\.gate$"]) == {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "float-quantized",
                "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False},
                "input_activations": {
                    "num_bits": 8,
                    "type": "float",
                    "symmetric": True,
                    "strategy": "tensor",
                    "dynamic": False,
                },
                "output_activations": None,
            }
        },
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        "kv_cache_scheme": None,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(quant_method="fp8"), "quant_method is 'fp8'"),
        (lambda c: c.update(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (lambda c: c["config_groups"].update(group_1={}), "exactly one group"),
        (lambda c: c["config_groups"]["group_0"].update(targets=["re:.*q_proj"]), "targets"),
        (lambda c: c["config_groups"]["group_0"].update(output_activations={}), "output_activations"),
        (lambda c: c["config_groups"]["group_0"]["weights"].update(symmetric=False), "weights.symmetric is False"),
        (lambda c: c["config_groups"]["group_0"]["weights"].update(actorder="group"), "weights.actorder is 'group'"),
        (lambda c: c["config_groups"]["group_0"]["weights"].update(num_bits=4), "num_bits 4"),
        (lambda c: c["config_groups"]["group_0"]["weights"].update(strategy="block"), "strategy is 'block'"),
        (lambda c: c["config_groups"]["group_0"]["input_activations"].update(dynamic=True), "dynamic is True"),
    ],
)
def test_numerics_that_are_not_ours_are_refused(change, message):
    config = export.quantization_config(SCHEMES["fp8_static"], [])
    change(config)
    with pytest.raises(ValueError, match=message):
        export.scheme_from_config(config)


def test_schemes_without_a_verified_format_are_refused():
    for scheme in (
        Scheme("int4-with-fp8-inputs", TensorSpec("int", 4, "group", 32), SCHEMES["fp8_static"].activations),
        Scheme("fp8-weight-only", SCHEMES["fp8_static"].weights),
        Scheme("int8-per-tensor", TensorSpec("int", 8, "tensor")),
    ):
        with pytest.raises(ValueError, match=scheme.name):
            export.quantization_config(scheme, [])


def test_unusable_scales_and_weights_are_named():
    scheme, int4 = SCHEMES["fp8_static"], SCHEMES["w4a16_g32"]
    weight, scale = torch.ones(4, 64), torch.ones(1)
    cases = [
        (weight, scale, None, scheme, "x.q has no input scale"),
        (weight, torch.ones(4, 1), scale, scheme, r"x.q.weight_scale has shape \(4, 1\), expected \(1,\)"),
        (weight, torch.tensor([torch.nan]), scale, scheme, "x.q.weight_scale has a value that is not finite"),
        (weight, scale, torch.zeros(1), scheme, "x.q.input_scale has a value"),
        (weight.index_fill(0, torch.tensor([2]), torch.inf), scale, scale, scheme, "x.q: the weight holds NaN or Inf"),
        (weight, torch.full((4, 2), 0.1), None, int4, "x.q.weight_scale is stored in torch.bfloat16"),
    ]
    for weight, weight_scale, input_scale, scheme, message in cases:
        with pytest.raises(ValueError, match=message):
            export.pack_linear("x.q", weight, weight_scale, input_scale, None, scheme, torch.bfloat16)


def test_a_packed_width_that_contradicts_the_shape_is_refused():
    tensors = {"weight_packed": torch.zeros(4, 3, dtype=torch.int32), "weight_shape": torch.tensor([4, 32])}
    with pytest.raises(
        ValueError, match=r"weight_packed has shape \(4, 3\), weight_shape \[4, 32\] at 4 bits means \(4, 4\)"
    ):
        export.unpack_weight(tensors, SCHEMES["w4a16_g32"])


def test_ignore_patterns_catch_exactly_what_they_should():
    """Judged by compressed-tensors' own matching, on names that differ in one number or one suffix."""
    linear = torch.nn.Linear(1, 1)
    skipped = ["lm_head", "model.layers.0.mlp.down_proj"]  # layer 0 only: no pattern for all layers
    skipped += [f"model.layers.{i}.mlp.shared_expert_gate" for i in range(12)]
    routers = [f"model.layers.{i}.mlp.gate" for i in range(12)]
    quantized = [
        f"model.layers.{i}.mlp.{p}" for i in range(12) for p in ("gate_proj", "down_proj") if (i, p) != (0, "down_proj")
    ]
    quantized += ["model.layers.0.mlp.experts.0.down_proj"]
    ignore = export.ignore_patterns(skipped, quantized, routers)
    assert ignore == [
        r"re:.*mlp\.gate$",
        "lm_head",
        "model.layers.0.mlp.down_proj",
        r"re:model\.layers\.\d+\.mlp\.shared_expert_gate$",
    ]
    assert all(is_match(name, linear, ignore) for name in skipped + routers)
    assert not any(is_match(name, linear, ignore) for name in quantized)
