"""Quantized checkpoints as other programs publish them: GPTQ, AWQ, AutoRound, ModelOpt, and gpt-oss.

Those of GPTQ and AWQ are packed by hand after AutoGPTQ's and AutoAWQ's sources: code by code, with no function of ours.
Those of ModelOpt follow vLLM's reader of them (`vllm/model_executor/layers/quantization/modelopt.py` and the names that
it remaps scales of keys and values from); no file of ModelOpt was at hand.
"""

import json
import random
import shutil
from pathlib import Path

import torch
from torch import Tensor

from model.save import export_model
from model.scales import write_scales
from quant.spec import PRESETS
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
