"""The tensors on disk against compressed-tensors itself."""

import random

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig

from quant.formats import compressed_tensors as export
from quant.formats.config_groups import quantization_config
from quant.reference import absmax_scale, dequantize, effective_scale, fake_quant, quantize
from quant.scale import Scale
from quant.spec import SCHEMES, Scheme, TensorSpec
from tests.unit.quant.oracle import per_scale

# What the parts can be composed to beside the presets.
COMPOSED = [
    Scheme("int5_channel", TensorSpec("int", 5, "channel")),
    Scheme("fp8_block_weight_only", TensorSpec("fp8_e4m3", 8, "block", 64)),
    Scheme("int8_group_with_int8_inputs", TensorSpec("int", 8, "group", 64), SCHEMES["int8_dynamic"].activations),
    Scheme("int4_with_static_int8_inputs", TensorSpec("int", 4, "group", 32), SCHEMES["w8a8_static"].activations),
    *(Scheme(f"int{bits}_shifted", TensorSpec("int", bits, "group", 32, symmetric=False)) for bits in (2, 3, 8)),
    Scheme("int4_shifted", TensorSpec("int", 4, "channel", symmetric=False), SCHEMES["int8_dynamic"].activations),
    Scheme("int8_shifted_int8", TensorSpec("int", 8, "channel", symmetric=False), SCHEMES["int8_dynamic"].activations),
]
ALL = pytest.mark.parametrize("scheme", [*SCHEMES.values(), *COMPOSED], ids=lambda scheme: scheme.name)


def weight_and_scale(scheme: Scheme, rows: int, columns: int):
    """A bf16 weight, a learned scale of it (theta differs from 0, so that the scale is no round number), the global
    scale where the format has one, and any zero points where it has those."""
    weight, spec = torch.randn(rows, columns).bfloat16(), scheme.weights
    absmax = per_scale(weight.float(), spec).abs().amax(-1)
    global_scale = (448 * 6 / weight.float().abs().max()).view(1) if spec.scale_format == "e4m3" else None
    theta = 0.1 * torch.randn(absmax.shape).bfloat16()
    scale = effective_scale(absmax_scale(absmax, spec), theta, spec, torch.bfloat16, global_scale)
    zero = None
    if spec.has_zero_points:
        zero = torch.randint(int(spec.qmin), int(spec.qmax) + 1, scale.shape).float()
    if spec.dtype == "int":  # every second one negative, as some initial scales of integers are
        scale.view(-1)[1::2] *= -1
    return weight, scale, global_scale, zero


def theirs(scheme: Scheme):
    """compressed-tensors' compressor for the config that we write, and its scheme."""
    group = QuantizationConfig(**quantization_config({"a.b": scheme}, [])).config_groups["group_0"]
    return BaseCompressor.get_value_from_registry(group.format), group


@ALL
def test_a_packed_linear_decompresses_to_the_fake_quantized_weight(scheme, seed, monkeypatch):
    """compressed-tensors' own decompression gives, bit for bit, what the forward multiplied with; fp32 and bf16.

    fp4 and MXFP8 it decompresses to bf16 whatever it is asked for: there only bf16 is compared.
    """
    monkeypatch.setattr(export, "CHUNK_ELEMENTS", 1000)  # several chunks, the last one short
    rows, columns = random.randrange(20, 60), 128 * random.randrange(1, 4)
    if scheme.weights.granularity == "block":
        rows, columns = random.randrange(20, 400), random.choice((columns, random.randrange(20, 400)))
    weight, scale, global_scale, zero = weight_and_scale(scheme, rows, columns)
    weight[:, : columns // 3] *= random.choice([0, 1])
    input_scale = None if scheme.stored_input is None else (torch.rand(1) + 0.1).bfloat16().float()
    bias = random.choice([None, weight[:, 0]])
    stored = Scale(scale, global_=global_scale, zero=zero)
    linear = export.TrainedLinear("a.b", weight, stored, input_scale, bias, scheme, weight.dtype)
    tensors = export.pack_linear(linear)

    planned = export.packed_shapes(columns, rows, scheme, weight.dtype)
    planned |= {} if bias is None else {"bias": (torch.bfloat16, (rows,))}
    assert {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()} == planned
    if "weight_shape" in tensors:
        assert tensors["weight_shape"].tolist() == [rows, columns]
    sources = [weight, scale, *(each for each in (input_scale, global_scale, zero) if each is not None)]
    storages = [tensor.untyped_storage().data_ptr() for tensor in [*tensors.values(), *sources]]
    assert len({*storages}) == len(tensors) + len(sources)

    state = dict(tensors)
    codes = export.unpack_weight(state, scheme)
    expected = quantize(weight, scale, scheme.weights, zero)
    assert codes.dtype == expected.dtype and torch.equal(codes.view(torch.int8), expected.view(torch.int8))
    found = export.unpack_scale(state["weight_scale"], scheme.weights, state.get("weight_global_scale"))
    assert torch.equal(found, scale)
    if zero is not None:
        assert torch.equal(export.unpack_zero(state, scheme), zero)
    if scheme.stored_input is not None:
        stored = state[export.input_suffix(scheme.stored_input)]
        assert torch.equal(export.unpack_scale(stored, scheme.stored_input), input_scale)

    compressor, group = theirs(scheme)
    if scheme.weights.scale_format == "model":
        state["weight_scale"] = scale  # what a reader in fp32 holds
    decompressed = compressor.decompress(state, group)["weight"]
    in_bf16 = scheme.weights.dtype == "fp4_e2m1" or scheme.weights.mx
    assert decompressed.dtype == (torch.bfloat16 if in_bf16 else torch.float32)
    for dtype in {decompressed.dtype, torch.bfloat16}:
        assert torch.equal(decompressed.to(dtype), dequantize(expected, scale, scheme.weights, dtype, zero))
        ours = export.dequantized_weight(codes, scale, scheme.weights, dtype, zero)
        assert torch.equal(decompressed.to(dtype), ours)
        # Quantized again it gives the same codes, which lets a reader rebuild our forward from a file. code * s * (1/s)
        # is off by at most 2^-8.9 of the code in bf16, and the next boundary between codes is half a step away: at
        # least 1/30 of the code for e4m3, 1/256 for int8. With a zero point an 8-bit code can be 255 steps from 0,
        # where bf16 does not tell neighbors apart.
        again, spec = quantize(ours, scale, scheme.weights, zero), scheme.weights
        apart = int(spec.has_zero_points and spec.bits == 8 and dtype == torch.bfloat16)
        assert (again.view(torch.int8).int() - codes.view(torch.int8).int()).abs().max() <= apart
    assert torch.equal(decompressed.bfloat16(), fake_quant(weight, scale, scheme.weights, zero))


# What the loading code of vLLM creates for a Linear of 256 x 512 features and copies the file's tensors into
# (vllm/model_executor/layers/quantization/compressed_tensors/schemes/*.py; SGLang's are derived from these): parameter
# names and shapes. Copying converts a dtype; those of codes, and of scales whose bits are read, must be the same.
FP8, BYTES, INPUT = torch.float8_e4m3fn, torch.uint8, {"input_scale": (None, (1,))}
FP4 = {"weight_packed": (BYTES, (256, 256)), "weight_scale": (FP8, (256, 32)), "weight_global_scale": (None, (1,))}
MXFP4 = {"weight_packed": (BYTES, (256, 256)), "weight_scale": (BYTES, (256, 16))}
VLLM = {
    "fp8_static": {"weight": (FP8, (256, 512)), "weight_scale": (None, (1,)), **INPUT},
    "fp8_dynamic": {"weight": (FP8, (256, 512)), "weight_scale": (None, (256, 1))},
    "fp8_block": {"weight": (FP8, (256, 512)), "weight_scale": (None, (2, 4))},
    "int8_dynamic": {"weight": (torch.int8, (256, 512)), "weight_scale": (None, (256, 1))},
    "w8a8_static": {"weight": (torch.int8, (256, 512)), "weight_scale": (None, (256, 1)), **INPUT},
    "nvfp4": FP4,
    "nvfp4_w4a4": {**FP4, "input_global_scale": (None, (1,))},
    "mxfp8": {"weight": (FP8, (256, 512)), "weight_scale": (BYTES, (256, 16))},
    **dict.fromkeys(("mxfp4", "mxfp4_w4a4", "mxfp4_mxfp8"), MXFP4),
}


# llama.cpp's presets are none that vLLM serves: it would round their scales to the model's dtype (docs/schemes.md).
@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if not scheme.weights.ggml])
def test_shapes_are_those_that_vllm_creates(name):
    scheme, expected = SCHEMES[name], VLLM.get(name)
    if expected is None:
        bits, size = scheme.weights.bits, scheme.weights.group_size
        expected = {
            "weight_packed": (torch.int32, (256, 512 * bits // 32)),
            "weight_scale": (torch.bfloat16, (256, 512 // size if size else 1)),
            "weight_shape": (torch.int64, (2,)),
        }
        if not scheme.weights.symmetric:
            expected["weight_zero_point"] = (torch.int32, (256 * bits // 32, 512 // size if size else 1))
    shapes = export.packed_shapes(512, 256, scheme, torch.bfloat16)
    assert {suffix: shape for suffix, (_, shape) in shapes.items()} == {s: shape for s, (_, shape) in expected.items()}
    for suffix, (dtype, _) in expected.items():
        found = shapes[suffix][0]
        assert found == dtype or (dtype is None and found in (torch.float32, torch.bfloat16)), suffix


def test_scales_at_the_ends_of_their_formats():
    """Powers of two from 2^-127 (a subnormal fp32 number) to 2^127; e4m3 scales from 2^-9 to 448."""
    mxfp4, nvfp4 = SCHEMES["mxfp4"], SCHEMES["nvfp4"]
    weight = torch.zeros(1, 128)
    ends = torch.tensor([[2.0**-127, 2.0**-126, 1.0, 2.0**127]])
    tensors = export.pack_linear(export.TrainedLinear("a", weight, Scale(ends), None, None, mxfp4, torch.bfloat16))
    assert tensors["weight_scale"].tolist() == [[0, 1, 127, 254]]
    assert torch.equal(export.unpack_scale(tensors["weight_scale"], mxfp4.weights), ends)
    global_scale = torch.tensor([1234.567])
    codes = torch.tensor([[2.0**-9, 2.0**-6, 1.0, 448.0]]).to(torch.float8_e4m3fn)
    scale = Scale(codes.float() / global_scale, global_=global_scale)
    tensors = export.pack_linear(export.TrainedLinear("a", weight[:, :64], scale, None, None, nvfp4, torch.bfloat16))
    assert torch.equal(tensors["weight_scale"].float(), codes.float())


PARTS = {name: (scheme.weights, scheme.activations) for name, scheme in SCHEMES.items()}


@pytest.mark.parametrize(
    ("weights", "inputs"),
    [
        ("fp8_static", "w8a8_static"),
        ("nvfp4", "fp8_dynamic"),
        ("mxfp4", "fp8_block"),
        ("mxfp8", "mxfp4_w4a4"),
        ("mxfp8", "fp8_dynamic"),
        ("nvfp4", "mxfp4_w4a4"),
        ("fp8_dynamic", "mxfp8"),
        (TensorSpec("int", 8, "tensor"), None),
        (TensorSpec("int", 8, "block", 128), None),
    ],
)
def test_schemes_without_a_verified_format_are_refused(weights, inputs):
    weights = PARTS[weights][0] if isinstance(weights, str) else weights
    with pytest.raises(ValueError, match=r"own.*has no export format"):
        export.export_format(Scheme("own", weights, inputs and PARTS[inputs][1]))


ONE, ROWS, GROUPS, HALVES = (torch.ones(size) for size in ((1,), (4, 1), (4, 4), (4, 2)))
FINITE, HOLD = "has a value that is not finite", "stored in torch.{}, which cannot hold its"


@pytest.mark.parametrize(
    ("scheme", "scale", "input_scale", "said"),
    [
        ("fp8_static", Scale(ONE), None, " has no input scale"),
        ("fp8_static", Scale(ROWS), ONE, r".weight_scale has shape \(4, 1\), expected \(1,\)"),
        ("fp8_static", Scale(torch.nan * ONE), ONE, f".weight_scale {FINITE}"),
        ("fp8_static", Scale(ONE), 0 * ONE, ".input_scale has a value"),
        ("fp8_static", Scale(-ONE), ONE, f".weight_scale {FINITE} and positive"),
        ("fp8_static", Scale(ONE), ONE, ": the weight holds NaN or Inf"),
        ("w4a16_g32", Scale(0 * HALVES), None, f".weight_scale {FINITE} or is 0"),
        ("w4a16_g32", Scale(1.001 * HALVES), None, HOLD.format("bfloat16")),
        ("mxfp4", Scale(1.5 * HALVES), None, HOLD.format("uint8")),
        ("nvfp4", Scale(GROUPS), None, " has no global scale"),
        ("w3a16_g32_asym", Scale(HALVES), None, r".weight_zero_point is missing, expected \(4, 2\), as the scale"),
        ("w3a16_g32_asym", Scale(HALVES, zero=ROWS), None, r" is of shape \(4, 1\), expected \(4, 2\)"),
        ("w3a16_g32_asym", Scale(HALVES, zero=torch.nan * HALVES), None, " must be integers from -4 to 3, got nan"),
        (
            "w3a16_g32_asym",
            Scale(HALVES, zero=4 * HALVES),
            None,
            ".weight_zero_point must be integers from -4 to 3, got 4",
        ),
        ("w3a16_g32_asym", Scale(HALVES, zero=0.5 * HALVES), None, ".weight_zero_point must be .*, got 0.5"),
    ],
)
def test_unusable_scales_weights_and_zero_points_are_named(scheme, scale, input_scale, said):
    own = Scheme("own", TensorSpec("int", 3, "group", 32, symmetric=False))
    weight = torch.ones(4, 64)
    weight[2] = torch.inf if "weight holds" in said else 1
    linear = export.TrainedLinear("x.q", weight, scale, input_scale, None, SCHEMES.get(scheme, own), torch.bfloat16)
    with pytest.raises(ValueError, match=rf"x\.q.*{said}"):
        export.pack_linear(linear)


def test_packed_tensors_that_contradict_the_shape_are_refused():
    tensors = {"weight_packed": torch.zeros(4, 3, dtype=torch.int32), "weight_shape": torch.tensor([4, 32])}
    said = r"weight_packed has shape \(4, 3\), weight_shape \[4, 32\] at 4 bits means \(4, 4\)"
    with pytest.raises(ValueError, match=said):
        export.unpack_weight(tensors, SCHEMES["w4a16_g32"])
    tensors = {"weight_zero_point": torch.zeros(2, 2, dtype=torch.int32), "weight_shape": torch.tensor([8, 256])}
    tensors["weight_scale"] = torch.ones(8, 2)
    with pytest.raises(ValueError, match=r"weight_zero_point has shape \(2, 2\), 8 rows at 4 bits mean \(1, 2\)"):
        export.unpack_zero(tensors, SCHEMES["w4a16_asym"])
