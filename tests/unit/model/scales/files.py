"""What an export of a model with rows of unequal size holds, ways of changing it, and reading its scales back.

Tests share the models and the exports, which are made once for each checkpoint and scheme.
"""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.build import build_model
from model.checkpoint.load import load_weights
from model.save import export_model
from model.scales import load_scales, renew_weight_scales, write_scales
from quant import Scheme, TensorSpec, prepare
from quant.formats.packing import unpack_zero_points
from tests.lib.tiny import tiny_checkpoint

LAYER = "model.layers.0"
Tensors = dict[str, Tensor]


@dataclass
class Files:
    """What a directory with scales holds."""

    tensors: Tensors
    config: dict


def checkpoint(directory: Path, kind: str, seed: int) -> Path:
    """A tiny model whose rows, and some of whose columns, are of different sizes, as those of trained models are."""
    source = tiny_checkpoint(directory, kind, seed=seed, wide=True)
    file = source / "model.safetensors"
    tensors = load_file(file)
    for index, (key, tensor) in enumerate(sorted(tensors.items())):
        if key.endswith("proj.weight"):
            generator = torch.Generator().manual_seed(seed + index)
            rows = torch.exp(0.5 * torch.randn(tensor.shape[0], 1, generator=generator))
            columns = torch.exp(0.5 * torch.randn(tensor.shape[1], generator=generator))
            tensors[key] = (tensor * rows * columns).to(tensor.dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    return source


@cache
def quantized(source: Path, scheme: Scheme | None, form="per_expert", rules=(), kv_cache=None):
    """The model of a checkpoint, with measured scales; tests share it, for none of them may change it."""
    model = build_model(
        source, {"bf16": {"enabled": True}}, dtype=torch.bfloat16, device=torch.device("cpu"), experts=form
    )
    load_weights(model, source, progress=False)
    options = {"learn_weight_scale": True, "learn_input_scale": False}
    quantization = prepare(model, scheme, rules=rules, kv_cache=kv_cache, **options)
    renew_weight_scales(quantization)
    write_scales(quantization.input_groups, {g.owner: torch.tensor([0.01]) for g in quantization.input_groups})
    return model, quantization


def exported(source: Path, scheme: Scheme | None, **options) -> Files:
    """What an export of the model holds."""
    files = _exported(source, scheme, **options)
    return Files({key: tensor.clone() for key, tensor in files.tensors.items()}, deepcopy(files.config))


@cache
def _exported(source: Path, scheme: Scheme | None, **options) -> Files:
    directory = Path(mkdtemp(dir=source))
    export_model(*quantized(source, scheme, **options), source, directory)
    return Files(load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text()))


def read(files: Files, directory: Path, source: Path, scheme: Scheme | None, **options) -> None:
    """Read the scales of changed files into the model: no scale may change, whether there is an error or not."""
    directory.mkdir(exist_ok=True)
    save_file(
        {key: tensor.contiguous().clone() for key, tensor in files.tensors.items()}, directory / "model.safetensors"
    )
    (directory / "config.json").write_text(json.dumps(files.config))
    model, quantization = quantized(source, scheme, **options)
    before = [layer.weight_scale() for layer in quantization.layers.values()]
    try:
        load_scales(model, quantization, directory)
    finally:
        after = [layer.weight_scale() for layer in quantization.layers.values()]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def scales_of(files: Files, ending: str = ".weight_scale") -> list[str]:
    return [key for key in files.tensors if key.endswith(ending)]


def alone(files: Files) -> None:
    """Leave nothing but scales."""
    files.config.pop("quantization_config")
    for key in list(files.tensors):
        if "scale" not in key and "zero" not in key:
            del files.tensors[key]


def no_config(files: Files) -> None:
    files.config.pop("quantization_config")


def each(change: Callable[[Tensor], Tensor]) -> Callable[[Files], None]:
    """Change every scale of weights."""

    def edit(files: Files) -> None:
        for key in scales_of(files):
            scale = files.tensors[key]
            files.tensors[key] = change(scale.float()).to(scale.dtype)

    return edit


def swap(first: str, second: str, *endings: str) -> Callable[[Files], None]:
    """Swap tensors of two modules; all of them without endings."""

    def edit(files: Files) -> None:
        keys = [key for key in files.tensors if key.startswith(f"{first}.") and (key.endswith(endings) or not endings)]
        for key in keys:
            other = second + key.removeprefix(first)
            files.tensors[key], files.tensors[other] = files.tensors[other], files.tensors[key]

    return edit


def put(key: str, value: Tensor) -> Callable[[Files], None]:
    return lambda files: files.tensors.update({key: value})


def swapped_bytes(packed: Tensor) -> Tensor:
    """int32 of the other byte order."""
    return packed.view(torch.uint8).view(*packed.shape, 4).flip(-1).reshape(packed.shape[0], -1).view(packed.dtype)


def codes(change: Callable[[Tensor], Tensor]) -> Callable[[Files], None]:
    """Change every packed weight."""

    def edit(files: Files) -> None:
        for key in scales_of(files, ".weight_packed"):
            files.tensors[key] = change(files.tensors[key])

    return edit


def set_weights(**values: object) -> Callable[[Files], None]:
    """Change what the config says of weights."""
    return lambda files: files.config["quantization_config"]["config_groups"]["group_0"]["weights"].update(values)


def set_config(**values: object) -> Callable[[Files], None]:
    return lambda files: files.config["quantization_config"].update(values)


def transposed(files: Files) -> None:
    for key in scales_of(files):
        scale = files.tensors[key]
        files.tensors[key] = scale.t().reshape(scale.shape)


def shifted(by: int) -> Callable[[Files], None]:
    """Zero points that count codes from another number."""

    def edit(files: Files) -> None:
        for key in scales_of(files, ".weight_zero_point"):
            rows = files.tensors[key.replace("zero_point", "shape")][0].item()
            zero = unpack_zero_points(files.tensors[key], 4, rows)
            files.tensors[key] = ((zero + by + 8) % 16 - 8).to(torch.int8)

    return edit


def modelopt(**values: object) -> Callable[[Files], None]:
    def edit(files: Files) -> None:
        files.config["quantization_config"] = {"quant_method": "modelopt", **values}

    return edit


def second_scale(files: Files) -> None:
    """ModelOpt's value under compressed-tensors' name."""
    for key in scales_of(files, ".weight_global_scale"):
        files.tensors[key] = 1 / files.tensors[key]


def without(ending: str) -> Callable[[Files], None]:
    def edit(files: Files) -> None:
        for key in scales_of(files, ending):
            del files.tensors[key]

    return edit


def both(*edits: Callable[[Files], None]) -> Callable[[Files], None]:
    def edit(files: Files) -> None:
        for one in edits:
            one(files)

    return edit


ASYM = Scheme("w4a16_g32_asym", TensorSpec("int", 4, "group", 32, symmetric=False))
