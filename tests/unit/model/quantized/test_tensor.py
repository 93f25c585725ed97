"""Ranges of weights that are stored as codes, against compressed-tensors' own decompression, bit for bit."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

from model.checkpoint.safetensors import CheckpointError, Reader, read_headers
from model.quantized.checkpoint import read_quantized
from model.quantized.quantization_config import rules_of
from model.quantized.tensor import QuantizedTensor
from quant import SCHEMES, Scale, Scheme, TensorSpec
from quant.formats.compressed_tensors import TrainedLinear, export_format, pack_linear
from quant.formats.config_groups import quantization_config
from quant.observers import partial_stats, scales_from_stats, zero_points_from_stats
from quant.reference import effective_scale, quantize
from tests.lib.checkpoints import CPU
from tests.lib.published import nvfp4_linear

# Widths that no preset has, and codes of a whole byte that are far from 0.
OTHERS = [Scheme(f"w{bits}a16_g16", TensorSpec("int", bits, "group", 16)) for bits in (5, 6, 7)]
ALL = {scheme.name: scheme for scheme in (*SCHEMES.values(), *OTHERS)}
NAME = "model.layers.0.mlp.up_proj"


def packed(scheme: Scheme, rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The codes of a random weight, and its tensors on disk."""
    weight, spec = (torch.randn(rows, columns) * 0.03).to(dtype), scheme.weights
    stats = partial_stats(weight.view(-1), 0, (rows, columns), spec)
    scale, zero = scales_from_stats(stats, spec), zero_points_from_stats(stats, spec)
    above = 448 * 6 / weight.float().abs().max().view(1) if spec.scale_format == "e4m3" else None
    effective = effective_scale(scale, None, spec, dtype, above)
    static = None if scheme.stored_input is None else torch.tensor([0.125])
    linear = TrainedLinear(NAME, weight, Scale(effective, None, above, zero), static, None, scheme, dtype)
    tensors = {f"{NAME}.{suffix}": tensor for suffix, tensor in pack_linear(linear).items()}
    return quantize(weight, effective, spec, zero), tensors


def written(directory: Path, scheme: Scheme, tensors: dict[str, torch.Tensor]) -> QuantizedTensor:
    """The tensors in a file, and read as a coded weight."""
    save_file(tensors, directory / "model.safetensors")
    config = quantization_config({NAME: scheme}, [])
    coded, beside, problems = read_quantized(read_headers(directory), rules_of(config), lambda name: [name])
    assert not problems, problems
    assert beside.keys() == tensors.keys()
    (tensor,) = coded.values()
    return tensor


def decompressed(tensors: dict[str, torch.Tensor], scheme: Scheme) -> torch.Tensor:
    """By the library that defines the formats."""
    group = quantization_config({NAME: scheme}, [])["config_groups"]["group_0"]
    state = {key.removeprefix(f"{NAME}."): tensor for key, tensor in tensors.items()}
    compressor = BaseCompressor.get_value_from_registry(export_format(scheme))
    return compressor.decompress(state, QuantizationScheme(**json.loads(json.dumps(group))))["weight"]


def values(tensor: QuantizedTensor, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    found = torch.full((count,), torch.nan, dtype=dtype)
    with Reader() as reader:
        for offset, chunk in tensor.values(reader, start, count, dtype, CPU):
            found[offset : offset + chunk.numel()] = chunk
    return found


@pytest.mark.parametrize("name", ALL)
def test_any_range_is_what_compressed_tensors_decompresses(tmp_path, monkeypatch, name):
    """In chunks of a few rows, from the middle of a row to the middle of another."""
    monkeypatch.setattr("model.quantized.tensor._CHUNK", 700)
    scheme = ALL[name]
    # The library unpacks e2m1 into bf16.
    dtype = torch.bfloat16 if scheme.weights.dtype == "fp4_e2m1" else torch.float32
    blocks = scheme.weights.granularity == "block"
    rows, columns = random.randrange(100, 300) if blocks else random.randrange(60, 90), random.choice((256, 384))
    columns -= random.choice((0, 1, 64)) * blocks
    _, tensors = packed(scheme, rows, columns, dtype)
    tensor = written(tmp_path, scheme, tensors)
    assert (tensor.shape, tensor.scheme) == ((rows, columns), scheme)
    expected = decompressed(load_file(tmp_path / "model.safetensors"), scheme).reshape(-1)
    for _ in range(5):
        start = random.randrange(rows * columns)
        count = random.randrange(1, rows * columns - start + 1)
        assert torch.equal(values(tensor, start, count, dtype), expected[start : start + count].to(dtype))
    assert torch.equal(values(tensor, 0, rows * columns, dtype), expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name in ALL if name != "w8a16_asym"])
def test_codes_come_back_in_the_models_dtype(tmp_path, name, dtype):
    """Every code is among them at 8 bits and fewer; of 255 codes on one side of 0 bf16 cannot tell neighbors apart."""
    codes, tensors = packed(ALL[name], 128, 256, dtype)
    tensor = written(tmp_path, ALL[name], tensors)
    with Reader() as reader:
        found, decoded = tensor.checked_rows(reader, slice(0, 128), dtype, CPU)
    assert torch.equal(found.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(decoded.view(-1), values(tensor, 0, 128 * 256, dtype))


def test_codes_that_a_dtype_cannot_hold_are_refused_by_name(tmp_path):
    """All positive, asymmetric, 8 bits: 255 steps of one size."""
    scheme = SCHEMES["w8a16_asym"]
    codes = torch.arange(-128, 128).repeat(4, 1)
    _, tensors = packed(scheme, 4, 256, torch.bfloat16)
    words = (codes + 128).view(4, 64, 4)
    packed_codes = (words << torch.tensor([0, 8, 16, 24])).sum(-1)
    tensors[f"{NAME}.weight_packed"] = torch.where(packed_codes >= 2**31, packed_codes - 2**32, packed_codes).int()
    tensors[f"{NAME}.weight_zero_point"] = torch.zeros_like(tensors[f"{NAME}.weight_zero_point"])  # all -128
    tensor = written(tmp_path, scheme, tensors)
    assert values(tensor, 0, 1024, torch.float32).isfinite().all()
    with pytest.raises(CheckpointError, match=rf"{NAME}\.weight_packed: .* codes change if .* to float32"):
        values(tensor, 0, 1024, torch.bfloat16)


ORDER = torch.arange(256, dtype=torch.int32) % 8
E4M3, NAN = torch.ones(32, 256).to(torch.float8_e4m3fn), torch.tensor(torch.nan)
MOVED = torch.ones(16, 8, dtype=torch.int8)
WRONG = {
    "a scale is missing": ("w4a16_g32", "weight_scale", None, "is missing"),
    "zero points are missing": ("w4a16_asym", "weight_zero_point", None, "is missing"),
    "the shape is missing": ("w4a16_g32", "weight_shape", None, "is missing"),
    "the global scale is missing": ("nvfp4", "weight_global_scale", None, "is missing"),
    "scales of other groups": ("w4a16_g32", "weight_scale", torch.ones(16, 4), "is F32 [16, 4], expected"),
    "codes of other bits": ("w4a16_g32", "weight_packed", torch.zeros(16, 64).int(), "is I32 [16, 64], expected"),
    "columns in another order": ("w4a16_g32", "weight_g_idx", ORDER, "the columns were quantized in another order"),
    "a zero point that moves": ("w4a16_g32", "weight_zero_point", MOVED, "is not 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_together_is_a_problem(tmp_path, case):
    name, suffix, value, expected = WRONG[case]
    _, tensors = packed(SCHEMES[name], 16, 256, torch.bfloat16)
    tensors[f"{NAME}.{suffix}"] = value
    save_file({key: value for key, value in tensors.items() if value is not None}, tmp_path / "model.safetensors")
    rules = rules_of(quantization_config({NAME: SCHEMES[name]}, []))
    coded, _, (problem,) = read_quantized(read_headers(tmp_path), rules, lambda name: [name])
    assert not coded and re.search(rf"{NAME}: {suffix}:? {re.escape(expected)}", problem), problem


MODELOPT_WRONG = {
    "no second scale": ("NVFP4", {"weight_scale_2": None}, "weight_scale_2 is missing, expected torch.float32 [1] for"),
    "no scale": ("NVFP4", {"weight_scale": None}, "weight_scale is missing"),
    "codes of 8 bits": ("NVFP4", {"weight": E4M3}, "weight is F8_E4M3 [32, 256], expected"),
    "codes of 4 bits": ("FP8", {"weight_scale": torch.ones(())}, "weight is U8 [32, 128], expected torch.float8_e4m3"),
    "groups of 32": ("NVFP4", {"weight_scale": E4M3[:, :8].contiguous()}, "weight_scale is F8_E4M3 [32, 8]"),
    "scales of fp32": ("NVFP4", {"weight_scale": torch.ones(32, 16)}, "weight_scale is F32 [32, 16], expected"),
    "half a group": (
        "NVFP4",
        {"weight": torch.zeros(32, 100).byte()},
        "in_features 200 is not divisible by group_size",
    ),
    "names of compressed-tensors": (
        "NVFP4",
        {"weight": None, "weight_packed": torch.zeros(32, 128).byte()},
        "weight is missing, expected torch.uint8 [32, 128] for nvfp4_w4a4",
    ),
    "rotated inputs": ("NVFP4_AWQ", {}, "quant_algo is 'NVFP4_AWQ', expected FP8, "),
    # Found when the numbers are read.
    "a scale of NaN": ("NVFP4", {"weight_scale": NAN.expand(32, 16)}, "weight_scale must be finite and not"),
    "a second scale of 0": ("NVFP4", {"weight_scale_2": torch.zeros(())}, "weight_scale_2 must be finite and positive"),
    "a second scale of NaN": ("NVFP4", {"weight_scale_2": NAN}, "weight_scale_2 must be finite and"),
}


@pytest.mark.parametrize("case", MODELOPT_WRONG)
def test_files_of_modelopt_that_contradict_themselves_are_named(tmp_path, case):
    algorithm, edits, expected = MODELOPT_WRONG[case]
    made = nvfp4_linear(torch.randn(32, 256), torch.tensor(5.0)) | {"input_scale": torch.tensor(0.01)} | edits
    if case == "a scale of NaN":
        made["weight_scale"] = made["weight_scale"].to(torch.float8_e4m3fn)
    save_file({f"{NAME}.{key}": one for key, one in made.items() if one is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(expected)) as raised:
        rules = rules_of({"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 16})
        coded, _, problems = read_quantized(read_headers(tmp_path), rules, lambda name: [name], modelopt=True)
        if problems:
            raise ValueError(problems[0])
        values(coded[f"{NAME}.weight"], 0, 32 * 256, torch.float32)
    assert "\n" not in str(raised.value)
    assert NAME in str(raised.value) or case == "rotated inputs"


def test_modelopts_second_scale_multiplies(tmp_path, seed):
    """Codes of the file, and the products of its source: ``code * weight_scale * weight_scale_2``."""
    weight = torch.randn(32, 256)
    made = nvfp4_linear(weight, weight.abs().amax())
    save_file({f"{NAME}.{key}": one for key, one in made.items()}, tmp_path / "model.safetensors")
    rules = rules_of({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"})
    coded, _, problems = read_quantized(read_headers(tmp_path), rules, lambda name: [name], modelopt=True)
    assert not problems
    tensor = coded[f"{NAME}.weight"]
    found = values(tensor, 0, 32 * 256, torch.float32).view(32, 256)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.stack([made["weight"] & 15, made["weight"] >> 4], -1).flatten(1).long()
    scale = made["weight_scale"].double() * made["weight_scale_2"].double()
    expected = grid[codes].double() * scale.repeat_interleave(16, 1)
    assert torch.allclose(found.double(), expected, rtol=2**-22, atol=0)
    # The largest weight has the largest code and scale: 6 * 448 * weight_scale_2, and so is the reciprocal.
    assert torch.allclose(found.abs().max(), weight.abs().max(), rtol=1e-6)
    with Reader() as reader:
        assert torch.allclose(tensor.read_above(reader), 6 * 448 / weight.abs().max(), rtol=1e-6)


def test_columns_in_their_order_and_zero_points_of_zero_change_nothing(tmp_path):
    _, tensors = packed(SCHEMES["w4a16_g32"], 16, 256, torch.bfloat16)
    plain = values(written(tmp_path, SCHEMES["w4a16_g32"], tensors), 0, 16 * 256, torch.bfloat16)
    tensors[f"{NAME}.weight_g_idx"] = torch.arange(256, dtype=torch.int32) // 32
    tensors[f"{NAME}.weight_zero_point"] = torch.zeros(16, 8, dtype=torch.int8)
    tensor = written(tmp_path, SCHEMES["w4a16_g32"], tensors)
    assert torch.equal(values(tensor, 0, 16 * 256, torch.bfloat16), plain)


@pytest.mark.parametrize(("rows", "columns"), [(200, 256), (256, 200), (201, 199)])
def test_last_blocks_that_are_not_full(tmp_path, monkeypatch, rows, columns):
    """As DeepSeek-V3's kv_a_proj_with_mqa, of 576 rows in blocks of 128; by hand, as DeepSeek's own code does it."""
    monkeypatch.setattr("model.quantized.tensor._CHUNK", 7000)
    codes, scale = (torch.randn(rows, columns) * 30).to(torch.float8_e4m3fn), torch.rand(2, 2) + 0.01
    save_file({f"{NAME}.weight": codes, f"{NAME}.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
    coded, beside, problems = read_quantized(read_headers(tmp_path), rules_of(config), lambda name: [name])
    assert not problems
    assert len(beside) == 2
    expected = codes.float() * scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    found = values(coded[f"{NAME}.weight"], 300, rows * columns - 300, torch.float32)
    assert torch.equal(found, expected.view(-1)[300:])
