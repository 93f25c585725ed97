"""Tiny checkpoints in every native layout that is read.

The layouts are found in the tables of the readers, so that one that is added there is tried by the tests of all layouts
(or is missing in WRITERS).
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from model.quantized.quantization_config import _LAYOUTS, _WRITTEN
from model.save.export_model import export_model
from quant import SCHEMES, Rule, Scheme
from quant.formats.layouts import _ONE_SCHEME
from quant.formats.modelopt import ALGORITHMS, DYNAMIC, MIXED
from tests.lib.checkpoints import edit_checkpoint, load_model, quantize
from tests.lib.published import deepseek, gpt_oss, gptq_checkpoint, modelopt_checkpoint
from tests.lib.tiny import tiny_checkpoint

Writer = Callable[[Path], Path]


class Layout(NamedTuple):
    """How to write a tiny checkpoint, and the scheme of its layers; None: as the checkpoint says."""

    write: Writer
    scheme: Scheme | None = None


def _exported(scheme: Scheme, layout: str, rules: tuple[Rule, ...] = (), kind: str = "qwen3") -> Writer:
    def write(directory: Path) -> Path:
        source = tiny_checkpoint(directory / "source", kind, seed=random.randrange(2**31), wide=True)
        model = load_model(source)
        quantization = quantize(model, scheme, rules=[*rules], input_scale=0.02)
        export_model(model, quantization, source, directory / "export", layout=layout)
        return directory / "export"

    return write


def _compressed() -> Mapping[str, Writer]:
    """Every preset, and several in a model."""
    rules = (
        Rule(SCHEMES["mxfp4"], r".*\.experts\..*"),
        Rule(SCHEMES["nvfp4"], r".*layers\.0\..*[qkv]_proj"),
        Rule(None, r".*layers\.1\..*o_proj"),
    )
    mixed = {"mixed groups": _exported(SCHEMES["fp8_block"], "compressed", rules, "qwen3_moe")}
    # Those of llama.cpp have another file; in this one they are integers in groups.
    return mixed | {name: _exported(one, "compressed") for name, one in SCHEMES.items() if not one.weights.ggml}


def _modelopt() -> Mapping[str, Writer]:
    """By hand where the file's formulas are known, else as it is exported."""

    def mixed(name: str) -> str | None:
        return "NVFP4" if "experts" in name else None if "o_proj" in name else "FP8"

    found = {MIXED: lambda path: modelopt_checkpoint(path, "qwen3_moe", mixed)}
    for name, scheme in DYNAMIC.items():
        found[scheme.name] = lambda path, name=name: modelopt_checkpoint(
            path, "qwen3", lambda _: name, input_scale=False
        )
    for name, scheme in ALGORITHMS.items():
        by_hand = name in ("FP8", "NVFP4", "W4A16_NVFP4", "W4A8_MXFP4_FP8")
        own = lambda path, name=name: modelopt_checkpoint(path, "qwen3", lambda _: name)  # noqa: E731
        found[name] = own if by_hand else _exported(scheme, "modelopt")
    return found


def _columns(method: str) -> Mapping[str, Writer]:
    """Every packing of GPTQ, AWQ or AutoRound, by the names that :mod:`tests.lib.published` has for them."""
    names = {"auto-round": {"gptq": "auto-round", "awq": "auto-round awq"}}.get(method, {})
    kinds = {names.get(one, one) for one in _LAYOUTS[method][2].values()}
    return {kind: lambda path, kind=kind: gptq_checkpoint(path, kind)[0] for kind in sorted(kinds)}


WRITERS: dict[str, Callable[[], Mapping[str, Writer]]] = {
    "compressed-tensors": _compressed,
    "fp8": lambda: {
        **{one.name: _exported(one, "vllm_fp8") for one in _ONE_SCHEME["vllm_fp8"]},
        "DeepSeek-V3": lambda path: deepseek(path, random.randrange(2**31)),
    },
    "mxfp4": lambda: {"gpt-oss": lambda path: gpt_oss(path, random.randrange(2**31))},
    "modelopt": _modelopt,
    **{method: lambda method=method: _columns(method) for method in ("gptq", "awq", "auto-round")},
}


def layouts() -> dict[str, Layout]:
    """Every layout whose method has a reader, by method and name, and the blocks of llama.cpp."""
    found = {
        f"{method}: {name}": Layout(write)
        for method in dict.fromkeys([*_WRITTEN, *_LAYOUTS])
        for name, write in WRITERS[method]().items()
    }
    return found | {f"GGUF: {name}": one for name, one in _ggml().items()}


def _ggml() -> dict[str, Layout]:
    """Return layouts of fp32 weights as launch/convert_gguf.py writes them from Q4_0 and Q8_0: codes times fp16
    scales."""
    q8 = replace(SCHEMES["w8a16_g32"].weights, narrow=True)  # llama.cpp's quantizer has no code -128
    return {
        "Q4_0": Layout(lambda path: _blocks(path, SCHEMES["q4_0"]), SCHEMES["q4_0"]),
        "Q8_0": Layout(lambda path: _blocks(path, Scheme("q8", q8)), Scheme("q8_0_narrow", q8)),
    }


def _blocks(directory: Path, scheme: Scheme) -> Path:
    seed, bits = random.randrange(2**31), scheme.weights.bits
    path = tiny_checkpoint(directory / "source", "qwen3", seed=seed, wide=True, dtype=torch.float32)

    def encode(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.endswith("_proj.weight")]:
            groups = tensors[key].unflatten(1, (-1, 32))
            largest = groups.gather(2, groups.abs().argmax(-1, keepdim=True))
            divisor = -8 if bits == 4 else 127
            scale = (largest / divisor if bits == 4 else largest.abs() / divisor).half().float()
            codes = (groups / scale).round().clamp(scheme.weights.qmin, scheme.weights.qmax)
            tensors[key] = (codes * scale).flatten(1)

    edit_checkpoint(path, encode)
    return path
