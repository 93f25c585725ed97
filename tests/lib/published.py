"""Quantized checkpoints as other programs publish them: GPTQ, AWQ, AutoRound, ModelOpt, gpt-oss, and DeepSeek-V3.

Those of GPTQ and AWQ are packed by hand after AutoGPTQ's and AutoAWQ's sources: code by code, with no function of ours.
Those of ModelOpt follow its exporter (`unified_export_hf.py`, `nvfp4_tensor.py`, `mxfp4_tensor.py`) and vLLM's reader
of them (`vllm/model_executor/layers/quantization/modelopt.py` and the names that it remaps scales of keys and values
from); no file of ModelOpt was at hand.
"""

import itertools
import json
import random
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from model.save.export_model import export_model
from model.scales.in_place import write_scales
from quant.spec import PRESETS
from tests.families.make import Variant
from tests.families.variants import VARIANTS
from tests.lib.checkpoints import edit_checkpoint, edit_json, load_model, quantize
from tests.lib.tiny import tiny_checkpoint

NAME = "model.layers.0.mlp.up_proj"
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each nibble, as AutoAWQ's AWQ_ORDER


def signed(words: list[int]) -> list[int]:
    return [word - 2**32 if word >= 2**31 else word for word in words]


def stream(codes: list[int], bits: int) -> list[int]:
    """A little-endian stream of codes in words of 32 bits."""
    whole = sum(code << (index * bits) for index, code in enumerate(codes))
    return signed([(whole >> (32 * index)) & 0xFFFFFFFF for index in range(len(codes) * bits // 32)])


def nibbles(codes: list[int]) -> list[int]:
    """Eight codes in a word, in AWQ's order."""
    return signed(
        [
            sum(codes[begin + column] << (4 * place) for place, column in enumerate(AWQ_NIBBLES))
            for begin in range(0, len(codes), 8)
        ]
    )


def packed_linear(kind: str, bits: int, rows: int, columns: int, size: int, symmetric: bool) -> tuple[dict, Tensor]:
    """The tensors of one Linear, and the fp32 weight ``[out, in]`` that they are by the formula of their readers."""
    codes = torch.randint(0, 2**bits, (columns, rows))
    groups = columns // size
    # GPTQ stores the zero point less one; 0 has no code there.
    zero = torch.randint(1, 2**bits, (groups, rows))
    if symmetric:
        zero = torch.full((groups, rows), 2 ** (bits - 1))
    scale = (torch.rand(groups, rows) * 0.01 + 0.001).half()
    if kind == "auto-round" and symmetric:  # half of its scales are negative, so that the lowest code is used
        scale *= torch.randint(0, 2, scale.shape) * 2 - 1
    index = torch.arange(columns) // size
    weight = (codes - zero[index]).float() * scale.float()[index]
    tensors = {f"{NAME}.scales": scale}
    if kind.endswith("awq"):
        tensors[f"{NAME}.qweight"] = torch.tensor([nibbles(row) for row in codes.tolist()]).int()
        tensors[f"{NAME}.qzeros"] = torch.tensor([nibbles(row) for row in zero.tolist()]).int()
    else:
        tensors[f"{NAME}.qweight"] = torch.tensor([stream(row, bits) for row in codes.t().tolist()]).t().int()
        minus = 0 if kind == "gptq_v2" else 1
        tensors[f"{NAME}.qzeros"] = torch.tensor([stream(row, bits) for row in (zero - minus).tolist()]).int()
        tensors[f"{NAME}.g_idx"] = index.int()
    return {key: tensor.contiguous() for key, tensor in tensors.items()}, weight.t().contiguous()


def config_of(kind: str, bits: int, size: int, symmetric: bool) -> dict:
    if kind == "awq":
        method = {"quant_method": "awq", "version": "gemm", "zero_point": not symmetric}
    elif kind.startswith("auto-round"):
        layout = "auto_round:auto_awq" if kind.endswith("awq") else "auto_round:auto_gptq"
        method = {"quant_method": "auto-round", "packing_format": layout, "sym": symmetric}
        method["extra_config"] = {"lm_head": {"bits": 16, "data_type": "float"}}
    else:
        method = {"quant_method": "gptq", "checkpoint_format": kind, "sym": symmetric, "desc_act": False}
    return method | {"bits": bits, "group_size": size}


def gptq_checkpoint(directory: Path, kind: str = "gptq") -> tuple[Path, dict[str, torch.Tensor]]:
    """A tiny Llama of which every MLP is as GPTQ, or AWQ, writes it; and the weights that these are."""
    source = tiny_checkpoint(directory / "source", "llama", even=True, dtype=torch.float16)
    out = Path(shutil.copytree(source, directory / kind))
    weights = {}

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if ".mlp." in key]:
            rows, columns = tensors.pop(key).shape
            name = key.removesuffix(".weight")
            own, weights[name] = packed_linear(kind, 4, rows, columns, 32, symmetric=False)
            tensors |= {each.replace(NAME, name): tensor for each, tensor in own.items()}

    edit_checkpoint(out, pack)
    edit_json(out / "config.json", quantization_config=config_of(kind, 4, 32, symmetric=False))
    return out, weights


def modelopt(directory: Path, scheme: str, *, inside: bool) -> tuple[Path, Path]:
    """An export of this project, and the same as ModelOpt has it: scalars, other names, what is left out with stars.

    ``inside``: config.json says it, as newer versions write it; else hf_quant_config.json alone.
    """
    source = tiny_checkpoint(directory / "source", "qwen3", seed=random.randrange(2**31), wide=True)
    model, preset = load_model(source), PRESETS[scheme]
    quantization = quantize(model, preset.linear, kv_cache=preset.kv_cache)
    values = {group.owner: torch.rand(1) / 100 + 0.01 for group in quantization.input_groups}
    write_scales(quantization.input_groups, values)
    export_model(model, quantization, source, directory / "export")
    theirs = Path(shutil.copytree(directory / "export", directory / "modelopt"))

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.endswith("_scale")]:
            name, _, ending = key.rpartition(".")
            proj = f"{name}.{ending[0]}_proj.{ending}" if ending in ("k_scale", "v_scale") else key
            tensors[proj] = tensors.pop(key).reshape(())

    edit_checkpoint(theirs, rename)
    config = json.loads((theirs / "config.json").read_text())
    del config["quantization_config"]
    cache = "FP8" if scheme.endswith("kv") else None
    own = {"quant_algo": "FP8", "kv_cache_quant_algo": cache, "exclude_modules": ["lm_*"]}
    if inside:
        kv = {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}} if cache else {}
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_*"], **kv}
    else:
        whole = {"producer": {"name": "modelopt", "version": "0.33.1"}, "quantization": own}
        (theirs / "hf_quant_config.json").write_text(json.dumps(whole))
    (theirs / "config.json").write_text(json.dumps(config))
    return directory / "export", theirs


def nvfp4_linear(weight: Tensor, absmax: Tensor) -> dict[str, Tensor]:
    """The tensors of a Linear in NVFP4 as ModelOpt's nvfp4_tensor.py computes them, by suffix. ``absmax`` is that of
    the Linears that share a second scale."""
    second = absmax.float() / (6 * 448)
    groups = weight.float().unflatten(1, (-1, 16))
    scale = groups.abs().amax(-1) / (6 * second)
    scale = torch.where(scale == 0, 1.0, scale).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    scaled = (groups / (scale.float() * second).unsqueeze(-1)).flatten(1)
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = torch.searchsorted(bounds, scaled.abs()) + torch.isin(scaled.abs(), bounds[[1, 3, 5]])
    codes = (codes + 8 * (scaled < 0)).to(torch.uint8)
    return {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scale, "weight_scale_2": second}


def fp8_linear(weight: Tensor, absmax: Tensor) -> dict[str, Tensor]:
    """The tensors of a Linear in ModelOpt's FP8, by suffix."""
    scale = absmax.float() / 448
    return {"weight": (weight.float() / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def mxfp4_linear(weight: Tensor, _: Tensor) -> dict[str, Tensor]:
    """The tensors of a Linear in MXFP4 as ModelOpt's mxfp4_tensor.py computes them, by suffix. Zeros get the code of
    -0, and halfway values the smaller code."""
    groups = weight.float().unflatten(1, (-1, 32))
    exponent = (groups.abs().amax(-1) / 6).log2().clamp(min=-127).ceil()
    scaled = (groups / exponent.exp2().unsqueeze(-1)).flatten(1)
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = (torch.searchsorted(bounds, scaled.abs()) + 8 * (scaled <= 0)).to(torch.uint8)
    return {"weight": codes[:, 1::2] << 4 | codes[:, ::2], "weight_scale": (exponent + 127).to(torch.uint8)}


def shared(name: str) -> str:
    """The name of the layer that servers make of this Linear and others: these share a scale."""
    fused = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
    module, _, leaf = name.rpartition(".")
    return f"{module}.{fused.get(leaf, leaf)}"


def modelopt_checkpoint(
    directory: Path, kind: str, algorithm: Callable[[str], str | None], *, input_scale: bool = True
) -> Path:
    """A tiny checkpoint as ModelOpt writes it, by its source: codes, scales, and both files of configuration.

    ``algorithm`` says the ``quant_algo`` of each Linear, by name; None leaves it unquantized. ``input_scale``: inputs
    were calibrated.
    """
    path = tiny_checkpoint(directory / "source", kind, seed=random.randrange(2**31), wide=True)
    kinds: dict[str, dict] = {}
    absmax: dict[str, Tensor] = {}

    def of(key: str) -> str | None:
        return algorithm(key.removesuffix(".weight")) if key.endswith("_proj.weight") else None

    def measure(tensors: dict[str, Tensor]) -> None:
        for key in filter(of, tensors):
            found = tensors[key].abs().amax()
            absmax[shared(key.removesuffix(".weight"))] = found.maximum(
                absmax.get(shared(key.removesuffix(".weight")), found)
            )

    def encode(tensors: dict[str, Tensor]) -> None:
        for key in list(filter(of, tensors)):
            name, algo = key.removesuffix(".weight"), of(key)
            make = {"FP8": fp8_linear, "W4A8_MXFP4_FP8": mxfp4_linear}.get(algo, nvfp4_linear)
            own = make(tensors[key], absmax[shared(name)])
            if input_scale and algo != "W4A16_NVFP4":
                layer = re.sub(r"experts\.\d+", "experts", shared(name))  # all experts of a layer share an input
                own["input_scale"] = torch.tensor(0.001 + zlib.crc32(layer.encode()) / 2**40)
            size = {"FP8": {}, "W4A8_MXFP4_FP8": {"group_size": 32}}
            kinds[name] = {"quant_algo": algo} | size.get(algo, {"group_size": 16})
            tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in own.items()}

    edit_checkpoint(path, measure)
    edit_checkpoint(path, encode)
    one = next(iter(kinds.values()))
    mixed = any(kind != one for kind in kinds.values())
    said = {"quant_algo": "MIXED_PRECISION", "quantized_layers": kinds} if mixed else one
    left_out = {} if mixed else {"exclude_modules": ["lm_head", "model.layers.*.mlp.gate"]}
    own = {"kv_cache_quant_algo": None, **said, **left_out}
    whole = {"producer": {"name": "modelopt", "version": "0.41.0"}, "quantization": own}
    (path / "hf_quant_config.json").write_text(json.dumps(whole, indent=4))
    config = {**said, "ignore": left_out.get("exclude_modules", []), "producer": whole["producer"]}
    edit_json(path / "config.json", quantization_config={"config_groups": {}, **config, "quant_method": "modelopt"})
    return path


# As openai/gpt-oss-20b has it.
LEFT_OUT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
CONFIG = {"modules_to_not_convert": LEFT_OUT, "quant_method": "mxfp4"}


def gpt_oss(directory: Path, seed: int) -> Path:
    """A tiny gpt-oss whose experts are any codes, with scales of all sizes that trained weights may have."""
    source = VARIANTS["gpt_oss"].checkpoint(directory, seed=seed)

    def encode(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
            experts, columns, rows = tensors.pop(key).shape
            tensors[f"{key}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            tensors[f"{key}_scales"] = torch.randint(112, 123, (experts, rows, columns // 32), dtype=torch.uint8)

    edit_checkpoint(source, encode)
    edit_json(source / "config.json", quantization_config=CONFIG)
    return source


# As deepseek-ai/DeepSeek-V3 has it.
BLOCKS_OF_128 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
# Every layer's inputs are whole blocks. kv_a_proj_with_mqa has 512 + 64 rows, as in DeepSeek-V3: 4.5 blocks.
_SIZES = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "v_head_dim": 64}
_SIZES |= {"q_lora_rank": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 56}
_SIZES |= {"intermediate_size": 256, "moe_intermediate_size": 128}
_ROUTING = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}  # vLLM reads these, transformers needs neither


def blocks_of_128(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of a weight as DeepSeek's ``weight_cast`` computes them, block by block; the last blocks of its
    rows and columns are as large as what is left."""
    rows, columns = (range(0, side, 128) for side in weight.shape)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(len(rows), len(columns))
    for row, column in itertools.product(rows, columns):
        block = weight[row : row + 128, column : column + 128].float()
        scale = scales[row // 128, column // 128] = block.abs().amax() / 448
        codes[row : row + 128, column : column + 128] = (block / scale).to(torch.float8_e4m3fn)
    return codes, scales


def plain_deepseek(directory: Path, seed: int, **options: int) -> Path:
    """A tiny DeepSeek-V3 in bf16, with rows of q_b_proj (240), kv_a_proj_with_mqa (576) and kv_b_proj (240) that blocks
    of 128 do not divide; ``options`` of its configuration."""
    return Variant("deepseek_v3", "deepseek_v3", {**_SIZES, **_ROUTING, **options}).checkpoint(directory, seed=seed)


def deepseek(directory: Path, seed: int, **options: int) -> Path:
    """The model of :func:`plain_deepseek` in fp8, as it is published."""
    source = plain_deepseek(directory, seed, **options)

    def encode(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if "_proj" in key and key.endswith(".weight")]:
            tensors[key], tensors[f"{key}_scale_inv"] = blocks_of_128(tensors[key])
        for key in [key for key in tensors if key.endswith("e_score_correction_bias")]:
            tensors[key] = tensors[key].float()

    edit_checkpoint(source, encode)
    edit_json(source / "config.json", quantization_config=BLOCKS_OF_128)
    return source
