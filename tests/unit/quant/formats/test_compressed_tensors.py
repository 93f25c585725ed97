"""The tensors on disk against compressed-tensors itself."""

import random

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig

from quant.formats import compressed_tensors as export
from quant.formats.config_groups import quantization_config
from quant.formats.packing import pack_int32, pack_nibbles, packed_columns, unpack_int32, unpack_nibbles
from quant.reference import absmax_scale, dequantize, effective_scale, fake_quant, quantize
from quant.scale import Scale
from quant.spec import SCHEMES, Scheme, TensorSpec

BITS = (2, 3, 4, 8)
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
ALL = [*SCHEMES.values(), *COMPOSED]


def by_name(scheme: Scheme) -> str:
    return scheme.name


def weight_and_scale(scheme: Scheme, rows: int, columns: int, *, zeros: bool = False):
    """A bf16 weight, a learned scale of it (theta differs from 0, so that the scale is no round number), the global
    scale where the format has one, and any zero points where it has those."""
    weight = torch.randn(rows, columns).bfloat16()
    if zeros:
        weight[:, : columns // 3] = 0
    spec, size = scheme.weights, scheme.weights.group_size
    blocks = {
        "tensor": lambda: weight.view(1, -1),
        "channel": lambda: weight.view(rows, 1, -1),
        "group": lambda: weight.view(rows, -1, size),
        "block": lambda: weight.view(rows // size, size, -1, size).transpose(1, 2).flatten(2),
    }[spec.granularity]()
    absmax = blocks.float().abs().amax(-1).view(spec.scale_shape((rows, columns)))
    global_scale = (448 * 6 / weight.float().abs().max()).view(1) if spec.scale_format == "e4m3" else None
    theta = 0.1 * torch.randn(absmax.shape).bfloat16()
    scale = effective_scale(absmax_scale(absmax, spec), theta, spec, torch.bfloat16, global_scale)
    zero = None
    if spec.has_zero_points:
        zero = torch.randint(int(spec.qmin), int(spec.qmax) + 1, scale.shape).float()
    return weight, signed(scale) if spec.dtype == "int" else scale, global_scale, zero


def signed(scale: torch.Tensor) -> torch.Tensor:
    """Every second scale negative, as some initial scales of integers are."""
    return torch.where(torch.arange(scale.numel()).view(scale.shape) % 2 == 0, scale, -scale)


def input_scale_of(scheme: Scheme) -> torch.Tensor | None:
    return None if scheme.stored_input is None else (torch.rand(1) + 0.1).bfloat16().float()


def packed(scheme: Scheme, rows: int, columns: int, **options):
    """The tensors of one Linear by suffix, its weight, its effective scale, and its zero points."""
    weight, scale, global_scale, zero = weight_and_scale(scheme, rows, columns, **options)
    tensors = export.pack_linear(
        "a.b",
        weight,
        Scale(scale, global_=global_scale, zero=zero),
        input_scale_of(scheme),
        None,
        scheme,
        torch.bfloat16,
    )
    return {key.removeprefix("a.b."): tensor for key, tensor in tensors.items()}, weight, scale, zero


def theirs(scheme: Scheme):
    """compressed-tensors' compressor for the config that we write, and its scheme."""
    group = QuantizationConfig(**quantization_config({"a.b": scheme}, [])).config_groups["group_0"]
    return BaseCompressor.get_value_from_registry(group.format), group


@pytest.mark.parametrize("bits", BITS)
def test_packing_is_that_of_compressed_tensors(bits, seed):
    """Bit for bit both ways, for widths that do not fill a word or a group of 32 codes."""
    for columns in (1, 7, 31, 32, 33, 64, 83, random.randrange(1, 400)):
        rows = random.randrange(1, 9)
        codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, columns), dtype=torch.int8)
        words = pack_int32(codes, bits)
        assert torch.equal(words, pack_to_int32(codes, bits))
        assert words.is_contiguous()
        assert words.shape == (rows, packed_columns(columns, bits))
        assert torch.equal(unpack_int32(words, bits, columns), codes)
        across = words.t().clone(memory_format=torch.contiguous_format).t()  # as zero points lie
        assert torch.equal(unpack_int32(across, bits, columns), codes)
        assert torch.equal(unpack_from_int32(words, bits, codes.shape), codes)


@pytest.mark.parametrize("bits", BITS)
def test_packing_keeps_the_ends_of_the_grid(bits):
    """All codes at their extremes: every bit of every word is 0, then 1."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    assert not pack_int32(torch.full((3, 64), low, dtype=torch.int8), bits).any()
    assert (pack_int32(torch.full((3, 64), high, dtype=torch.int8), bits) == -1).all()


def test_nibbles_are_those_of_compressed_tensors(seed):
    """Both ways, every code in both halves of a byte; a negative zero keeps its sign."""
    codes = torch.cat([torch.arange(16).repeat(2, 1), torch.randint(0, 16, (2, 16))]).to(torch.uint8)
    both = torch.cat([codes, codes.roll(1, 1)])
    values = dequantize(both, torch.ones(8, 1), TensorSpec("fp4_e2m1", 4, "group", 16), torch.float32)
    assert torch.equal(pack_nibbles(both), pack_fp4_to_uint8(values))
    assert torch.equal(unpack_nibbles(pack_nibbles(both)), both)
    assert torch.equal(unpack_fp4_from_uint8(pack_nibbles(both), 8, 16, torch.float32), values)


@pytest.mark.parametrize("scheme", ALL, ids=by_name)
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_linear_decompresses_to_the_fake_quantized_weight(scheme, bias, seed, monkeypatch):
    """compressed-tensors' own decompression gives, bit for bit, what the forward multiplied with; fp32 and bf16.

    fp4 and MXFP8 it decompresses to bf16 whatever it is asked for: there only bf16 is compared.
    """
    monkeypatch.setattr(export, "CHUNK_ELEMENTS", 1000)  # several chunks, the last one short
    rows, columns = random.randrange(20, 60), 128 * random.randrange(1, 4)
    if scheme.weights.granularity == "block":
        rows = 128 * random.randrange(1, 4)
    weight, scale, global_scale, zero = weight_and_scale(scheme, rows, columns)
    input_scale, bias = input_scale_of(scheme), weight[:, 0] if bias else None
    stored = Scale(scale, global_=global_scale, zero=zero)
    tensors = export.pack_linear("a.b", weight, stored, input_scale, bias, scheme, weight.dtype)

    planned = {f"a.b.{key}": value for key, value in export.packed_shapes(columns, rows, scheme, weight.dtype).items()}
    planned |= {} if bias is None else {"a.b.bias": (torch.bfloat16, (rows,))}
    assert {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()} == planned
    sources = [weight, scale, *(each for each in (input_scale, global_scale, zero) if each is not None)]
    storages = [tensor.untyped_storage().data_ptr() for tensor in [*tensors.values(), *sources]]
    assert len({*storages}) == len(tensors) + len(sources)

    state = {key.removeprefix("a.b."): tensor for key, tensor in tensors.items()}
    codes = export.unpack_weight(state, scheme)
    expected = quantize(weight, scale, scheme.weights, zero)
    assert codes.dtype == expected.dtype
    assert torch.equal(codes.view(torch.int8), expected.view(torch.int8))
    assert torch.equal(
        export.unpack_scale(state["weight_scale"], scheme.weights, state.get("weight_global_scale")), scale
    )
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
    assert torch.equal(decompressed.bfloat16(), fake_quant(weight, scale, scheme.weights, zero))


@pytest.mark.parametrize("scheme", ALL, ids=by_name)
def test_compressed_tensors_writes_the_same_tensors(scheme, seed):
    """Its compressor, given the values and scales, gives what we write, dtype for dtype and bit for bit.

    Given a negative zero it writes a zero: both signs stand for the same number.
    """
    state, _, scale, zero = packed(scheme, 128, 256, zeros=True)
    compressor, group = theirs(scheme)
    values = export.dequantized_weight(export.unpack_weight(state, scheme), scale, scheme.weights, zero=zero)
    global_scale = state.get("weight_global_scale")
    given = {"weight": values, "weight_scale": scale if global_scale is None else scale * global_scale}
    as_given = ("weight_global_scale", "input_scale", "input_global_scale")
    given |= {suffix: state[suffix] for suffix in as_given if suffix in state}
    if zero is not None:
        given["weight_zero_point"] = zero.to(torch.int8)
    written = compressor.compress(given, group)
    if scheme.weights.scale_format == "model":
        written["weight_scale"] = written["weight_scale"].bfloat16()  # they leave it in the dtype given
    assert written.keys() == state.keys()
    for suffix, tensor in state.items():
        assert (written[suffix].dtype, written[suffix].shape) == (tensor.dtype, tensor.shape), suffix
        dense = [each[suffix].clone(memory_format=torch.contiguous_format) for each in (written, state)]
        pair = [each.view(torch.uint8) for each in dense]
        if scheme.weights.dtype == "fp4_e2m1" and suffix == "weight_packed":
            pair = [torch.where(nibbles == 8, 0, nibbles) for nibbles in map(unpack_nibbles, pair)]
        elif suffix == "weight" and scheme.weights.dtype == "fp8_e4m3":
            pair = [torch.where(codes == 0x80, 0, codes) for codes in pair]
        assert torch.equal(*pair), suffix


# What the loading code of vLLM creates for a Linear of 256 x 512 features and copies the file's tensors into
# (vllm/model_executor/layers/quantization/compressed_tensors/schemes/*.py; SGLang's are derived from these): parameter
# names and shapes. Copying converts a dtype; those of codes, and of scales whose bits are read, must be the same.
FP8, BYTES = torch.float8_e4m3fn, torch.uint8
VLLM = {
    "fp8_static": {"weight": (FP8, (256, 512)), "weight_scale": (None, (1,)), "input_scale": (None, (1,))},
    "fp8_dynamic": {"weight": (FP8, (256, 512)), "weight_scale": (None, (256, 1))},
    "fp8_block": {"weight": (FP8, (256, 512)), "weight_scale": (None, (2, 4))},
    "int8_dynamic": {"weight": (torch.int8, (256, 512)), "weight_scale": (None, (256, 1))},
    "w8a8_static": {"weight": (torch.int8, (256, 512)), "weight_scale": (None, (256, 1)), "input_scale": (None, (1,))},
    "nvfp4": {
        "weight_packed": (BYTES, (256, 256)),
        "weight_scale": (FP8, (256, 32)),
        "weight_global_scale": (None, (1,)),
    },
    "nvfp4_w4a4": {
        "weight_packed": (BYTES, (256, 256)),
        "weight_scale": (FP8, (256, 32)),
        "weight_global_scale": (None, (1,)),
        "input_global_scale": (None, (1,)),
    },
    "mxfp4": {"weight_packed": (BYTES, (256, 256)), "weight_scale": (BYTES, (256, 16))},
    "mxfp8": {"weight": (FP8, (256, 512)), "weight_scale": (BYTES, (256, 16))},
}
VLLM |= {"mxfp4_w4a4": VLLM["mxfp4"], "mxfp4_mxfp8": VLLM["mxfp4"]}


# llama.cpp's presets are none that vLLM serves: it would round their scales to the model's dtype (docs/schemes.md).
@pytest.mark.parametrize("scheme", [one for one in SCHEMES.values() if not one.weights.ggml], ids=by_name)
def test_shapes_are_those_that_vllm_creates(scheme):
    expected = VLLM.get(scheme.name)
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


def test_the_shape_of_a_packed_weight_is_in_the_file(seed):
    state, weight, *_ = packed(SCHEMES["w3a16_channel"], 20, 256)
    assert state["weight_shape"].tolist() == list(weight.shape)


@pytest.mark.parametrize("scheme", ALL, ids=by_name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantizing_a_dequantized_weight_gives_the_same_codes(scheme, dtype, seed):
    """What lets a reader rebuild our forward from a file.

    code * s * (1/s) is off by at most three roundings, 2^-22 of the code in fp32; after the rounding to bf16 2^-8.9.
    The next boundary between codes is half a step away: at least 1/30 of the code for e4m3, 1/256 for int8. With a zero
    point an 8-bit code can be 255 steps from 0, where bf16 does not tell neighbors apart.
    """
    weight, scale, _, zero = weight_and_scale(scheme, 128, 384)
    spec = scheme.weights
    codes = quantize(weight, scale, spec, zero)
    again = quantize(dequantize(codes, scale, spec, dtype, zero), scale, spec, zero)
    if spec.has_zero_points and spec.bits == 8 and dtype == torch.bfloat16:
        assert (again.int() - codes.int()).abs().max() <= 1
    else:
        assert torch.equal(again.view(torch.int8), codes.view(torch.int8))


def test_scales_at_the_ends_of_their_formats():
    """Powers of two from 2^-127 (a subnormal fp32 number) to 2^127; e4m3 scales from 2^-9 to 448."""
    mxfp4, nvfp4 = SCHEMES["mxfp4"], SCHEMES["nvfp4"]
    weight = torch.zeros(1, 128)
    ends = torch.tensor([[2.0**-127, 2.0**-126, 1.0, 2.0**127]])
    tensors = export.pack_linear("a", weight, Scale(ends), None, None, mxfp4, torch.bfloat16)
    assert tensors["a.weight_scale"].tolist() == [[0, 1, 127, 254]]
    assert torch.equal(export.unpack_scale(tensors["a.weight_scale"], mxfp4.weights), ends)
    global_scale = torch.tensor([1234.567])
    codes = torch.tensor([[2.0**-9, 2.0**-6, 1.0, 448.0]]).to(torch.float8_e4m3fn)
    scale = Scale(codes.float() / global_scale, global_=global_scale)
    tensors = export.pack_linear("a", weight[:, :64], scale, None, None, nvfp4, torch.bfloat16)
    assert torch.equal(tensors["a.weight_scale"].float(), codes.float())


def test_schemes_without_a_verified_format_are_refused():
    fp8, int8 = SCHEMES["fp8_static"], SCHEMES["w8a8_static"]
    for scheme in (
        Scheme("fp8-with-int8-inputs", fp8.weights, int8.activations),
        Scheme("nvfp4-with-fp8-inputs", SCHEMES["nvfp4"].weights, SCHEMES["fp8_dynamic"].activations),
        Scheme("mxfp4-with-fp8-inputs", SCHEMES["mxfp4"].weights, SCHEMES["fp8_block"].activations),
        Scheme("mxfp8-with-mxfp4-inputs", SCHEMES["mxfp8"].weights, SCHEMES["mxfp4_w4a4"].activations),
        Scheme("nvfp4-with-mxfp4-inputs", SCHEMES["nvfp4"].weights, SCHEMES["mxfp4_w4a4"].activations),
        Scheme("fp8-with-mxfp8-inputs", SCHEMES["fp8_dynamic"].weights, SCHEMES["mxfp8"].activations),
        Scheme("int8-per-tensor", TensorSpec("int", 8, "tensor")),
        Scheme("int8-per-block", TensorSpec("int", 8, "block", 128)),
    ):
        with pytest.raises(ValueError, match=f"{scheme.name}.*has no export format"):
            export.export_format(scheme)


def test_unusable_scales_and_weights_are_named():
    fp8, int4, nvfp4 = SCHEMES["fp8_static"], SCHEMES["w4a16_g32"], SCHEMES["nvfp4"]
    weight, scale = torch.ones(4, 64), torch.ones(1)
    cases = [
        (weight, scale, None, fp8, "x.q has no input scale"),
        (weight, torch.ones(4, 1), scale, fp8, r"x.q.weight_scale has shape \(4, 1\), expected \(1,\)"),
        (weight, torch.tensor([torch.nan]), scale, fp8, "x.q.weight_scale has a value that is not finite"),
        (weight, scale, torch.zeros(1), fp8, "x.q.input_scale has a value"),
        (weight, -scale, scale, fp8, "x.q.weight_scale has a value that is not finite and positive"),
        (weight, torch.zeros(4, 2), None, int4, "x.q.weight_scale has a value that is not finite or is 0"),
        (weight.index_fill(0, torch.tensor([2]), torch.inf), scale, scale, fp8, "x.q: the weight holds NaN or Inf"),
        (weight, torch.full((4, 2), 1.001), None, int4, "stored in torch.bfloat16, which cannot hold its values"),
        (weight, torch.full((4, 2), 1.5), None, SCHEMES["mxfp4"], "stored in torch.uint8, which cannot hold its"),
        (weight, torch.ones(4, 4), None, nvfp4, "x.q has no global scale"),
    ]
    for weight, weight_scale, input_scale, scheme, message in cases:
        with pytest.raises(ValueError, match=message):
            export.pack_linear("x.q", weight, Scale(weight_scale), input_scale, None, scheme, torch.bfloat16)


def test_unusable_zero_points_are_named():
    scheme = SCHEMES["w4a16_asym"]
    weight, scale = torch.ones(8, 256), torch.ones(8, 2)
    for zero, message in (
        (None, r"x.q.weight_zero_point is missing, expected \(8, 2\), as the scale"),
        (torch.zeros(8, 1), r"x.q.weight_zero_point is of shape \(8, 1\), expected \(8, 2\)"),
        (torch.full((8, 2), torch.nan), "x.q.weight_zero_point has nan, expected integers from -8 to 7"),
        (torch.full((8, 2), 8.0), "x.q.weight_zero_point has 8, expected"),
        (torch.full((8, 2), 0.5), "x.q.weight_zero_point has 0.5, expected"),
    ):
        with pytest.raises(ValueError, match=message):
            export.pack_linear("x.q", weight, Scale(scale, zero=zero), None, None, scheme, torch.bfloat16)
    state, *_ = packed(scheme, 8, 256)
    with pytest.raises(ValueError, match=r"weight_zero_point has shape \(2, 2\), 8 rows at 4 bits mean \(1, 2\)"):
        export.unpack_zero(state | {"weight_zero_point": torch.zeros(2, 2, dtype=torch.int32)}, scheme)


def test_a_packed_width_that_contradicts_the_shape_is_refused():
    tensors = {"weight_packed": torch.zeros(4, 3, dtype=torch.int32), "weight_shape": torch.tensor([4, 32])}
    with pytest.raises(
        ValueError, match=r"weight_packed has shape \(4, 3\), weight_shape \[4, 32\] at 4 bits means \(4, 4\)"
    ):
        export.unpack_weight(tensors, SCHEMES["w4a16_g32"])
