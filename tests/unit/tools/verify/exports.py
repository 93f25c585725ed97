"""Exports of tiny models with fresh random weights, quantized by measured scales."""

import random
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig, PreTrainedModel

from model.build import build_model
from model.checkpoint.load import load_weights
from model.moe.experts import Form
from model.save import export_model
from model.scales import renew_weight_scales
from quant import Quantization, Scheme, prepare
from quant.scale import first_input_scale
from tests.lib.tiny import tiny_checkpoint


class Export(NamedTuple):
    """An export, the tokens of its calibration, and what was exported."""

    directory: Path
    batches: list[torch.Tensor]
    model: PreTrainedModel
    quantization: Quantization


@torch.no_grad()
def quantized(
    source: Path,
    scheme: Scheme | None,
    batches=(),
    *,
    powers_of_two: bool = False,
    experts: Form = "stacked",
    **options,
) -> tuple[PreTrainedModel, Quantization]:
    """The model of ``source`` in bf16 with measured scales, inputs calibrated on ``batches``."""
    device = torch.device("cpu")
    model = build_model(source, {"bf16": {"enabled": True}}, dtype=torch.bfloat16, device=device, experts=experts)
    model.eval()
    load_weights(model, source, progress=False)
    quantization = prepare(model, scheme, learn_weight_scale=True, learn_input_scale=False, **options)
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


def exported(
    directory: Path,
    kind: str,
    scheme: Scheme | None,
    *,
    every_expert: bool = False,
    layout: str = "compressed",
    tied: bool = False,
    wide: bool = False,
    **options,
) -> Export:
    """Make a model in ``directory``/source, quantize it, and export it in shards to ``directory``/export."""
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
