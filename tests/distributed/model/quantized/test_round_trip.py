"""Quantized checkpoints on two ranks under ZeRO-3: what was read is exported again byte for byte, config.json too.

GPTQ, AWQ and ModelOpt have no export of their own: codes, scales and zero points come back as compressed-tensors.
"""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.build import build_model
from model.checkpoint.load import load_weights
from model.save import export_model
from model.scales import renew_weight_scales, write_scales
from quant import SCHEMES, prepare
from quant.formats.packing import unpack_int32, unpack_zero_points
from tests.lib.launcher import run_ranks
from tests.lib.published import gpt_oss, gptq_checkpoint, modelopt
from tests.lib.tiny import tiny_checkpoint

SCRIPT = Path(__file__).parent / "scripts" / "round_trip.py"
NARROW = "w4a16_g32, -7..7"  # absmax / 7, as Kimi-K2 has it, in the place of absmax / 7.5
# Architecture, scheme, form of experts, layout; the others come with the large counts.
DENSE = ("fp8_static", "fp8_block", "int8_dynamic", "w4a16_g32", NARROW, "w4a16_asym", "nvfp4", "mxfp4")
CASES = {scheme: ("qwen3", scheme, "per_expert", "compressed") for scheme in DENSE}
CASES |= {f"stacked {s}": ("qwen3_moe", s, "stacked", "compressed") for s in ("fp8_block", NARROW)}
CASES |= {"stacked, vLLM's fp8": ("qwen3_moe", "fp8_block", "stacked", "vllm_fp8")}
COLUMNS = ("gptq", "gptq_v2", "awq")  # 4 bits with zero points
MODELOPT = {"modelopt": True, "modelopt, hf_quant_config": False}  # whether config.json says it
OTHERS = {
    scheme: ("qwen3", scheme, "per_expert", "compressed")
    for scheme in ("fp8_dynamic", "w8a16_channel", "w8a16_g32", "w3a16_g32", "w2a16_g32", "nvfp4_w4a4")
}
OTHERS |= {
    f"stacked {scheme}": ("qwen3_moe", scheme, "stacked", "compressed")
    for scheme in ("fp8_static", "int8_dynamic", "w4a16_g32", "w4a16_asym", "nvfp4", "mxfp4")
}
OTHERS |= {"experts one by one": ("qwen3_moe", "w4a16_g32", "per_expert", "compressed")}
OTHERS |= {"vLLM's fp8, static": ("qwen3_moe", "fp8_static", "stacked", "vllm_fp8")}


def write(source: Path, directory: Path, scheme: str, form: str, layout: str) -> None:
    """A quantized checkpoint of ``source``; another writer's, as far as the grid is concerned."""
    model = build_model(
        source, {"bf16": {"enabled": True}}, dtype=torch.bfloat16, device=torch.device("cpu"), experts=form
    )
    load_weights(model, source, progress=False)
    chosen = SCHEMES["w4a16_g32" if scheme == NARROW else scheme]
    quantization = prepare(model, chosen, learn_weight_scale=True, learn_input_scale=False)
    renew_weight_scales(quantization)
    if scheme == NARROW:
        # Rounded up to bf16, which holds the largest magnitude within 7 steps.
        values = {group.owner: (group.s0 * 7.5 / 7 * 1.01).bfloat16().float() for group in quantization.weight_groups}
        write_scales(quantization.weight_groups, values)
    inputs = {group.owner: torch.rand(1) / 100 + 0.01 for group in quantization.input_groups}
    write_scales(quantization.input_groups, inputs)
    export_model(model, quantization, source, directory, layout=layout)


def round_trip(directory: Path, cases: dict[str, tuple[str, str, str, str]]) -> Path:
    """Files of all cases, for one job of two ranks."""
    seed = random.randrange(2**31)
    sources = {kind: tiny_checkpoint(directory / kind, kind, seed=seed, wide=True) for kind in ("qwen3", "qwen3_moe")}
    for name, (kind, scheme, form, layout) in cases.items():
        write(sources[kind], directory / "files" / name, scheme, form, layout)
    (directory / "cases.json").write_text(json.dumps({name: (*case[2:], "bf16") for name, case in cases.items()}))
    return directory


def other_writers(directory: Path) -> None:
    """Files of GPTQ and AWQ, the weights that these are, gpt-oss as it is published, and two files of ModelOpt, beside
    those of the cases."""
    cases = json.loads((directory / "cases.json").read_text())
    gpt_oss(directory / "gpt_oss", random.randrange(2**31)).rename(directory / "files" / "gpt_oss")
    cases["gpt_oss"] = ("stacked", "gpt_oss", "bf16")
    for kind in COLUMNS:
        path, weights = gptq_checkpoint(directory / kind, kind)
        path.rename(directory / "files" / kind)
        save_file(weights, directory / kind / "weights.safetensors")
        cases[kind] = ("per_expert", "compressed", "fp16")  # in which their scales are stored
    for name, inside in MODELOPT.items():
        (directory / name).mkdir()
        _, theirs = modelopt(directory / name, "fp8_static", inside=inside)
        theirs.rename(directory / "files" / name)
        cases[name] = ("per_expert", "compressed", "bf16")
    (directory / "cases.json").write_text(json.dumps(cases))


def different(directory: Path, name: str) -> list[str]:
    """The files of an export that are not those that were read."""
    files, again = directory / "files" / name, directory / "again" / name
    names = {file.name for file in (*files.iterdir(), *again.iterdir())}
    assert "model.safetensors" in names and names == {file.name for file in files.iterdir()}
    return [each for each in names if (files / each).read_bytes() != (again / each).read_bytes()]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    made = round_trip(tmp_path_factory.mktemp("round_trip"), CASES)
    other_writers(made)
    run_ranks(SCRIPT, str(made))
    return made


@pytest.mark.parametrize("name", [*CASES, "gpt_oss"])
def test_what_was_read_comes_back(directory, name):
    assert not different(directory, name)


@pytest.mark.full
def test_what_was_read_comes_back_in_every_scheme(tmp_path):
    directory = round_trip(tmp_path, OTHERS)
    run_ranks(SCRIPT, str(directory))
    assert not {name: found for name in OTHERS if (found := different(directory, name))}


@pytest.mark.parametrize("name", [name for name in CASES if NARROW in name])
def test_the_narrow_grid_stays_narrow(directory, name):
    """No code is -8, and 7 and -7 are used: the grid was not measured again."""
    tensors = load_file(directory / "again" / name / "model.safetensors")
    packed = {key: tensor for key, tensor in tensors.items() if key.endswith("weight_packed")}
    codes = torch.cat([unpack_int32(tensor, 4, tensor.shape[1] * 8).flatten() for tensor in packed.values()])
    assert codes.min() == -7 and codes.max() == 7


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


@pytest.mark.parametrize("name", MODELOPT)
def test_fp8_of_modelopt_comes_back(directory, name):
    """As this project's own export of the same model, byte for byte."""
    export, again = directory / name / "export", directory / "again" / name
    names = {file.name for file in export.iterdir()}
    assert "model.safetensors" in names and names == {file.name for file in again.iterdir()}
    assert not [each for each in names if (export / each).read_bytes() != (again / each).read_bytes()]
