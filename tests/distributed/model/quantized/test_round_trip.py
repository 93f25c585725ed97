"""Quantized checkpoints on two ranks under ZeRO-3: what was read is exported again byte for byte, config.json too.

GPTQ and AWQ have no export of their own: codes, scales and zero points come back as compressed-tensors.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.quantized.checkpoint import source_schemes
from model.quantized.scales import take_scales
from model.save.export_model import export_model
from model.scales.in_place import write_scales
from model.zero import full_numel, init_process_group, is_partitioned, local_range, partition_new_parameters
from quant import SCHEMES, Rule, replace_layers
from quant.formats.packing import unpack_int32, unpack_zero_points
from tests.distributed.model.scripts.models import ds_config, loaded
from tests.families.variants import VARIANTS
from tests.lib.checkpoints import edit_checkpoint, edit_json, quantized, read_tensors, with_low_bits
from tests.lib.launcher import on_ranks
from tests.lib.published import deepseek, gpt_oss, gptq_checkpoint, modelopt_checkpoint
from tests.lib.tiny import tiny_checkpoint

NARROW = "w4a16_g32, -7..7"  # absmax / 7, as Kimi-K2 has it, in the place of absmax / 7.5
MIXED = "fp8 in blocks, MXFP4, NVFP4 and bf16"
RULES = [
    Rule(SCHEMES["mxfp4"], r".*\.experts\..*"),
    Rule(SCHEMES["nvfp4"], r".*layers\.0\..*[qkv]_proj"),
    Rule(None, r".*layers\.1\..*o_proj"),
]
Case = tuple[str, str, str, str]  # architecture, scheme, form of experts, layout
Files = dict[str, tuple[str, str, torch.dtype]]  # form of experts, layout of the export and dtype, by name


def cases(dense: str, stacked: str) -> dict[str, Case]:
    return {name: ("qwen3", name, "per_expert", "compressed") for name in dense.split()} | {
        f"stacked {name}": ("qwen3_moe", name, "stacked", "compressed") for name in stacked.split()
    }


CASES = cases("fp8_static fp8_block int8_dynamic w4a16_g32 w4a16_asym nvfp4 mxfp4", "fp8_block")
CASES |= {NARROW: ("qwen3", NARROW, "per_expert", "compressed")}
CASES |= {f"stacked {NARROW}": ("qwen3_moe", NARROW, "stacked", "compressed")}
CASES |= {"stacked, vLLM's fp8": ("qwen3_moe", "fp8_block", "stacked", "vllm_fp8")}
CASES |= {MIXED: ("qwen3_moe", MIXED, "stacked", "compressed")}
OTHERS = cases(
    "fp8_dynamic w8a16_channel w8a16_g32 w3a16_g32 w2a16_g32 nvfp4_w4a4",
    "fp8_static int8_dynamic w4a16_g32 w4a16_asym nvfp4 mxfp4",
)
OTHERS |= {"experts one by one": ("qwen3_moe", "w4a16_g32", "per_expert", "compressed")}
OTHERS |= {"vLLM's fp8, static": ("qwen3_moe", "fp8_static", "stacked", "vllm_fp8")}
MODELOPT: dict[str, tuple[str, Callable[[str], str | None]]] = {
    "ModelOpt's NVFP4": ("qwen3_moe", lambda name: "NVFP4"),
    "ModelOpt's NVFP4 weights": ("qwen3", lambda name: "W4A16_NVFP4"),
    "ModelOpt's W4A8": ("qwen3_moe", lambda name: "W4A8_MXFP4_FP8" if "experts" in name else "FP8"),
    "ModelOpt's FP8 and NVFP4": (
        "qwen3_moe",
        lambda name: "NVFP4" if "experts" in name else None if "o_proj" in name else "FP8",
    ),
}
SEVERAL = ("ModelOpt's FP8 and NVFP4, stacked", "ModelOpt's FP8 and NVFP4, one by one")
COLUMNS = ("gptq", "gptq_v2", "awq")  # 4 bits with zero points


def write(source: Path, directory: Path, scheme: str, form: str, layout: str) -> None:
    """A quantized checkpoint of ``source``; another writer's, as far as the grid is concerned."""
    chosen = SCHEMES[{NARROW: "w4a16_g32", MIXED: "fp8_block"}.get(scheme, scheme)]
    rules = RULES if scheme == MIXED else []
    model, quantization = quantized(source, chosen, [torch.randint(0, 301, (2, 64))], experts=form, rules=rules)
    if scheme == NARROW:
        # Rounded up to bf16, which holds the largest magnitude within 7 steps.
        values = {group.owner: (group.s0 * 7.5 / 7 * 1.01).bfloat16().float() for group in quantization.weight_groups}
        write_scales(quantization.weight_groups, values)
    export_model(model, quantization, source, directory, layout=layout)
    if scheme == NARROW:
        packed = [tensor for key, tensor in read_tensors(directory).items() if key.endswith("weight_packed")]
        codes = torch.cat([unpack_int32(tensor, 4, tensor.shape[1] * 8).flatten() for tensor in packed])
        assert codes.min() == -7 and codes.max() == 7


def write_all(directory: Path, cases: dict[str, Case]) -> Files:
    """Write the files of all cases."""
    kinds = ("qwen3", "qwen3_moe")
    sources = {kind: tiny_checkpoint(directory / kind, kind, seed=random.randrange(2**31), wide=True) for kind in kinds}
    for name, (kind, scheme, form, layout) in cases.items():
        write(sources[kind], directory / "files" / name, scheme, form, layout)
    return {name: (*case[2:], torch.bfloat16) for name, case in cases.items()}


def with_heads(directory: Path) -> Path:
    """vLLM's fp8 as other programs publish it: heads in codes that the model does not have, scales in bf16 without a
    dimension, a configuration with more keys than this project writes, and tensors in fp32 as in Qwen3.5."""
    source = VARIANTS["qwen3_5"].checkpoint(directory / "source", seed=random.randrange(2**31))
    model, quantization = quantized(source, SCHEMES["fp8_static"], [torch.randint(0, 301, (2, 64))])
    export_model(model, quantization, source, directory / "heads", layout="vllm_fp8")

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        scales = [key for key in tensors if key.endswith("_scale")]
        tensors |= {key: tensors[key].view(()).bfloat16() for key in scales}
        tensors["mtp.layers.0.mlp.up_proj.weight"] = torch.randn(96, 64).to(torch.float8_e4m3fn)
        tensors |= {f"mtp.layers.0.mlp.up_proj.{end}_scale": torch.rand(()) for end in ("weight", "input")}
        tensors["mtp.layers.0.self_attn.k_scale"] = torch.rand(())
        wide = ("linear_attn.A_log", "linear_attn.norm.weight")
        tensors |= {key: with_low_bits(tensors[key]) for key in tensors if key.endswith(wide)}

    edit_checkpoint(directory / "heads", edit)
    edit_json(directory / "heads" / "config.json", lambda config: config["quantization_config"].update(fmt="e4m3"))
    return directory / "heads"


def with_several_input_scales(directory: Path) -> Path:
    """Each expert's Linears have input scales of their own, as ModelOpt calibrates them."""
    path = modelopt_checkpoint(directory, *MODELOPT["ModelOpt's FP8 and NVFP4"])

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {key: tensors[key] * (0.5 + torch.rand(())) for key in tensors if key.endswith("input_scale")}

    edit_checkpoint(path, edit)
    return path


def write_others(directory: Path) -> Files:
    """Write files of GPTQ and AWQ and the weights that these are, gpt-oss and DeepSeek-V3 as they are published, and a
    model with heads."""
    for name, (kind, algorithm) in MODELOPT.items():
        modelopt_checkpoint(directory / name, kind, algorithm).rename(directory / "files" / name)
    for name in SEVERAL:
        with_several_input_scales(directory / name).rename(directory / "files" / name)
    with_heads(directory / "heads").rename(directory / "files" / "heads")
    gpt_oss(directory / "gpt_oss", random.randrange(2**31)).rename(directory / "files" / "gpt_oss")
    path = deepseek(directory / "deepseek", random.randrange(2**31))

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        """Norms in fp32, as in DeepSeek-V3.1, and in bf16 a routing bias that the model has in fp32."""
        tensors |= {key: tensors[key].bfloat16() for key in tensors if key.endswith("_bias")}
        tensors |= {key: with_low_bits(tensors[key]) for key in tensors if key.endswith("norm.weight")}

    edit_checkpoint(path, edit)
    path.rename(directory / "files" / "deepseek")
    for kind in COLUMNS:
        path, weights = gptq_checkpoint(directory / kind, kind)
        path.rename(directory / "files" / kind)
        save_file(weights, directory / kind / "weights.safetensors")
    others = dict.fromkeys(COLUMNS, ("per_expert", "compressed", torch.float16))  # in which their scales are stored
    others |= dict.fromkeys(MODELOPT, ("stacked", "modelopt", torch.bfloat16))
    forms = ("stacked", "per_expert")
    others |= {name: (form, "modelopt", torch.bfloat16) for name, form in zip(SEVERAL, forms, strict=True)}
    return others | {
        "gpt_oss": ("stacked", "gpt_oss", torch.bfloat16),
        "deepseek": ("stacked", "vllm_fp8", torch.bfloat16),
        "heads": ("per_expert", "vllm_fp8", torch.bfloat16),
    }


def export_again(directory: Path, files: Files) -> None:
    """On a rank: read checkpoints in ``files`` into partitions, and write them to ``again`` without a step."""
    init_process_group()
    for name, (form, layout, dtype) in files.items():
        path, config = directory / "files" / name, ds_config(3, dtype)
        model = loaded(path, config, dtype, experts=form)
        schemes = source_schemes(model, path)
        quantization = replace_layers(model, None, named=schemes, learn_weight_scale=True, learn_input_scale=False)
        partition_new_parameters(model, config)
        report = take_scales(model, quantization, path)
        assert report.weights_loaded and not report.weights_measured and not report.merged, name
        assert not report.inputs_missing, name
        for layer in quantization.layers.values():
            start, stop = local_range(layer.weight)
            assert is_partitioned(layer.weight) and stop - start < full_numel(layer.weight), name
        export_model(model, quantization, path, directory / "again" / name, layout=layout)


def different(files: Path, again: Path) -> list[str]:
    """The files of an export that are not those of the other folder."""
    names = {file.name for file in (*files.iterdir(), *again.iterdir())}
    assert "model.safetensors" in names and names == {file.name for file in files.iterdir()}
    return [each for each in names if (files / each).read_bytes() != (again / each).read_bytes()]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("round_trip")
    on_ranks(export_again, directory, write_all(directory, CASES) | write_others(directory))
    return directory


@pytest.mark.parametrize("name", [*CASES, *MODELOPT, *SEVERAL, "gpt_oss", "deepseek", "heads"])
def test_what_was_read_comes_back(directory, name):
    assert not different(directory / "files" / name, directory / "again" / name)


@pytest.mark.full
def test_what_was_read_comes_back_in_every_scheme(tmp_path):
    on_ranks(export_again, tmp_path, write_all(tmp_path, OTHERS))
    found = {name: different(tmp_path / "files" / name, tmp_path / "again" / name) for name in OTHERS}
    assert not any(found.values()), found


@pytest.mark.parametrize("kind", COLUMNS)
def test_codes_in_columns_come_back_as_rows(directory, kind):
    """Codes, scales and zero points in the export are the fp32 weights of the file's formula, bit for bit."""
    again = load_file(directory / "again" / kind / "model.safetensors")
    weights = load_file(directory / kind / "weights.safetensors")
    assert {key.removesuffix(".weight_packed") for key in again if key.endswith("weight_packed")} == weights.keys()
    for name, weight in weights.items():
        rows, columns = weight.shape
        scale = again[f"{name}.weight_scale"]
        assert scale.dtype == torch.float16 and scale.shape == (rows, columns // 32)
        codes = unpack_int32(again[f"{name}.weight_packed"], 4, columns).float()
        zero = unpack_zero_points(again[f"{name}.weight_zero_point"], 4, rows).float()
        found = (codes.view(rows, -1, 32) - zero[..., None]) * scale.float()[..., None]
        assert torch.equal(found.view(rows, columns), weight)
