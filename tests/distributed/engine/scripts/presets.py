"""Launched on every rank: train a few steps of each model under ZeRO-3 in its preset, export it, keep what the last
forward used for comparison; then start from the export, and export that.

Arguments: output directory, then ``name:preset:checkpoint`` per model. Rank 0 writes ``<name>/expected.pt``: codes and
effective scales by layer, of the last forward and of the first.
"""

import sys
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F

from engine.session.context import init_ranks
from engine.session.student import rotate_weights
from model.build import build_model
from model.checkpoint.load import load_weights
from model.quantized.scales import take_scales
from model.ranks import RankError, is_main, raise_everywhere, rank
from model.save import export_model
from model.scales import renew_weight_scales, write_scales
from model.zero import keep_frozen_fp32, partition_new_parameters
from quant import PRESETS, Quantization, prepare, weights_changed
from quant.linear import linears_of
from quant.reference import quantize
from quant.rotation import rotate_inputs
from quant.rules import Rule
from quant.scale import first_input_scale

STEPS = 5
# int4 but for the first decoder layer, which is fp8, and lm_head, which is int8.
MIXED = "mixed"
# NVFP4 on both sides, and the inputs of down_proj turned.
ROTATED = "rotated"


def config() -> dict:
    """bf16 under stage 3; norms and scales are whole on every rank, the rest is partitioned."""
    return {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000},
        "zero_allow_untested_optimizer": True,
    }


def prepared(model, name: str) -> Quantization:
    """The model in a preset, everything learnable that it has."""
    preset = PRESETS[{MIXED: "w4a16_g32", ROTATED: "nvfp4_w4a4"}.get(name, name)]
    mixed = {
        "rules": [Rule(PRESETS["fp8_dynamic"].linear, first=1)],
        "named": {"lm_head": PRESETS["w8a16_channel"].linear},
    }
    static = preset.kv_cache is not None or (preset.linear is not None and preset.linear.learns_input)
    quantization = prepare(
        model,
        preset.linear,
        learn_weight_scale=True,
        learn_input_scale=static,
        kv_cache=preset.kv_cache,
        **(mixed if name == MIXED else {}),
    )
    if name == ROTATED:
        rotate_inputs(quantization, [r".*\.down_proj"], 256)
    return quantization


def used_in_forward(engine, quantization: Quantization, ids) -> dict[str, dict[str, torch.Tensor]]:
    """What one forward computes with, taken inside it, where the engine has gathered each layer."""
    used: dict[str, dict[str, torch.Tensor]] = {}

    def keep_layer(name, layer):
        def hook(*_):
            for part in linears_of(name, layer):
                spec = layer.scheme.weights
                weight, scale = part.weight(layer.weight), part.scale(layer.weight_scale(), spec).clone()
                zero = None if layer.weight_zero is None else part.scale(layer.weight_zero, spec).clone()
                used[part.name] = {"codes": quantize(weight, scale, spec, zero).cpu(), "weight": scale.cpu()}
                if zero is not None:
                    used[part.name]["zero"] = zero.cpu()
                if layer.input_s0 is not None:
                    used[part.name]["input"] = layer.input_scale().cpu()

        return hook

    def keep_cache(name, cache):
        def hook(*_):
            used[name] = {"input": cache.input_scale().cpu()}

        return hook

    hooks = [each.register_forward_pre_hook(keep_layer(name, each)) for name, each in quantization.layers.items()]
    hooks += [each.register_forward_pre_hook(keep_cache(name, each)) for name, each in quantization.caches.items()]
    with torch.no_grad():
        engine(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return used


def train(preset: str, checkpoint: str, out: Path, device: torch.device) -> None:
    """Five steps, then the export."""
    model = build_model(checkpoint, config(), dtype=torch.bfloat16, device=device)
    load_weights(model, checkpoint, progress=False)
    quantization = prepared(model, preset)
    partition_new_parameters(model, config())
    rotate_weights(model, quantization)
    renew_weight_scales(quantization)
    # Inputs of these models reach 4: 448 codes of e4m3, 127 of int8, 448 * 6 of NVFP4.
    groups = enumerate(quantization.input_groups)
    first = {g.owner: first_input_scale(torch.tensor([4 + 0.1 * i]), g.spec) for i, g in groups}
    write_scales(quantization.input_groups, first)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    with keep_frozen_fp32(model):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config())
    generator = torch.Generator().manual_seed(rank())
    ids = torch.randint(0, 301, (1, 40), generator=generator).to(device)
    before = used_in_forward(engine, quantization, ids)
    for _ in range(STEPS):
        logits = engine(input_ids=ids).logits
        engine.backward(F.cross_entropy(logits[0, :-1].float(), ids[0, 1:]))
        engine.step()
        weights_changed(model)
    used = used_in_forward(engine, quantization, ids)
    export_model(model, quantization, checkpoint, out / "export", max_shard_size=300_000)
    if is_main():
        torch.save({"used": used, "before": before}, out / "expected.pt")
    raise_everywhere(None)
    engine.destroy()
    if preset != ROTATED:  # whose export is none to start from
        export_again(preset, out / "export", out / "again", device)


def export_again(preset: str, checkpoint: Path, out: Path, device: torch.device) -> None:
    """The export as the checkpoint to start from, and exported without a step of training."""
    model = build_model(checkpoint, config(), dtype=torch.bfloat16, device=device)
    try:
        load_weights(model, checkpoint, progress=False)
    except RankError as error:
        (out.parent / f"refused{rank()}.txt").write_text(str(error))
        return
    quantization = prepared(model, preset)
    partition_new_parameters(model, config())
    report = take_scales(model, quantization, checkpoint)
    assert not report.weights_measured, report
    assert not report.inputs_initial, report
    export_model(model, quantization, checkpoint, out, max_shard_size=300_000)


def main() -> None:
    """One model after another, in one process group."""
    directory, *models = (argument for argument in sys.argv[1:] if not argument.startswith("--local_rank"))
    device = init_ranks()
    for entry in models:
        name, preset, checkpoint = entry.split(":")
        out = Path(directory) / name
        if is_main():
            out.mkdir(parents=True)
        raise_everywhere(None)
        train(preset, checkpoint, out, device)


if __name__ == "__main__":
    main()
