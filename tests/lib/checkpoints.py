"""Load, quantize, export and damage tiny checkpoints."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from model.build import build_model
from model.checkpoint.load import load_weights
from model.save import export_model
from model.scales import renew_weight_scales
from quant import Quantization, Scheme, prepare
from quant.scale import first_input_scale
from tests.lib.tiny import tiny_checkpoint

CPU = torch.device("cpu")
ENGINES = {torch.bfloat16: {"bf16": {"enabled": True}}, torch.float16: {"fp16": {"enabled": True}}, torch.float32: {}}


def load_model(source: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> PreTrainedModel:
    """Build the project's model of a checkpoint and read its weights; ``options`` are those of build_model."""
    model = build_model(source, ENGINES[dtype], dtype=dtype, device=CPU, **options)
    load_weights(model, source, progress=False)
    return model


@torch.no_grad()
def quantized(
    source: Path, scheme: Scheme | None, batches=(), *, powers_of_two: bool = False, experts="stacked", **options: Any
) -> tuple[PreTrainedModel, Quantization]:
    """Load a checkpoint in bf16 and quantize it with measured scales, those of inputs from ``batches`` of tokens.

    ``powers_of_two`` rounds the scales up. ``options`` are those of prepare, by which weight scales are learned.
    """
    model = load_model(source, experts=experts).eval()
    options = {"learn_weight_scale": True, "learn_input_scale": False, **options}
    quantization = prepare(model, scheme, **options)
    renew_weight_scales(quantization)
    if quantization.input_groups:
        quantization.set_fake_quant(weights=False, activations=False)
        quantization.observe(True)
        for ids in batches:
            model(input_ids=ids)
        quantization.observe(False)
        quantization.set_fake_quant(weights=True, activations=True)
        for group in quantization.input_groups:
            group.s0.copy_(first_input_scale(group.observer.absmax.view(1), group.spec))
    if powers_of_two:
        for group in (*quantization.weight_groups, *quantization.input_groups):
            group.s0.copy_(torch.exp2(torch.ceil(torch.log2(group.s0))))
    return model, quantization


class Export(NamedTuple):
    """An export, the tokens of its calibration, and what was exported."""

    directory: Path
    batches: list[Tensor]
    model: PreTrainedModel
    quantization: Quantization


def exported(
    directory: Path,
    kind: str,
    scheme: Scheme | None,
    *,
    every_expert: bool = False,
    layout: str = "compressed",
    tied: bool = False,
    wide: bool = False,
    **options: Any,
) -> Export:
    """Make a random model in ``directory``/source, quantize it, and export it in shards to ``directory``/export.

    ``every_expert`` lets each token use all experts, so that no rounding sends one elsewhere.
    """
    source = tiny_checkpoint(directory / "source", kind, seed=random.randrange(2**31), tied=tied, wide=wide)
    if every_expert:
        config = AutoConfig.from_pretrained(source)
        config.num_experts_per_tok = config.num_experts
        config.save_pretrained(source)
    batches = [torch.randint(0, 301, (2, 64)) for _ in range(2)]
    model, quantization = quantized(source, scheme, batches, **options)
    size = 200_000 if wide else 40_000
    export_model(model, quantization, source, directory / "export", layout=layout, max_shard_size=size)
    return Export(directory / "export", batches, model, quantization)


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors in the safetensors files of a directory."""
    return {key: tensor for path in sorted(directory.glob("*.safetensors")) for key, tensor in load_file(path).items()}


def edit_tensors(directory: Path, key: str, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of the file that holds ``key``, in place."""
    path = next(path for path in directory.glob("*.safetensors") if key in load_file(path))
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_json(path: Path, edit: Callable[[Any], object] | None = None, /, **values: Any) -> Any:
    """Change a JSON file in place, by a function or with values of its keys, and return its contents."""
    contents = json.loads(path.read_text(encoding="utf-8"))
    if edit is not None:
        edit(contents)
    contents.update(values)
    path.write_text(json.dumps(contents), encoding="utf-8")
    return contents
