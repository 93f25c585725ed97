"""Which knobs of a recipe may differ where a run goes on from a checkpoint. Every knob is in one of the two lists."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from engine.recipe.recipe import Recipe

# What the checkpoint holds is of these, by section.
STAYS = {
    # The data cursor is a step: the samples of a step must stay the same.
    "data": [
        "train",
        "weights",
        "held_out",
        "kind",
        "loss_on",
        "fields",
        "max_length",
        "too_long",
        "special_tokens",
        "packing",
        "seed",
    ],
    # Shapes and types of the parameters.
    "model": ["dtype", "experts"],
    # Scales of one scheme have shapes that fit another, and each group of the optimizer its parameters. Observers have
    # a histogram or none; a theta corrects a fixed scale or the absmax of its step, of the sign that scales may have.
    # Weights are turned where inputs are. Norms that write codes have the scale of their readers under their own names.
    "quant": [
        "scheme",
        "schemes",
        "rules",
        "lm_head",
        "embedding",
        "exempt",
        "exempt_more",
        "input_range",
        "scales_follow_weights",
        "signed_scales",
        "rotate",
        "rotate_block",
        "fuse_norms",
    ],
    "learnable": ["weight", "embedding", "weight_scale", "act_scale", "norm", "router", "freeze"],
    "adapter": ["kind", "merge", "base", "rank", "alpha", "rslora", "targets", "ranks"],
}
# These are followed as they are given: rates, losses and events from here on; how the same is computed; where files
# lie; what is measured, written and kept; first scales, which the checkpoint has. Rows per step (data.micro_batch_size,
# train.gradient_accumulation_steps) and the ZeRO stage (deepspeed) are compared as such.
MAY_CHANGE = {
    "": ["output_dir", "schedule", "deepspeed"],
    "data": ["eval", "micro_batch_size"],
    "model": ["path", "trust_remote_code", "attn_implementation", "load"],
    "adapter": ["start", "init", "dropout"],
    "quant": [
        "scales",
        "start",
        "start_inside",
        "first_codes",
        "weight_range",
        "percentile",
        "calibration_batches",
        "initial_input_scale",
        "compute",
        "fp8_fast_accum",
        "keep_codes",
        "gather_codes",
        "fake_quant_start",
    ],
    "optim": [
        "lr",
        "embedding_lr",
        "norm_lr",
        "scale_lr",
        "act_scale_lr",
        "adapter_lr",
        "min_lr_ratio",
        "warmup_steps",
        "schedule",
        "decay_steps",
        "weight_decay",
        "betas",
        "eps",
        "grad_clip",
    ],
    "loss": [
        "lm_weight",
        "kd_weight",
        "kd",
        "temperature",
        "top_k",
        "tail",
        "teacher",
        "teacher_cache",
        "diagnostics_every",
        "chunk_tokens",
    ],
    "train": [
        "steps",
        "gradient_accumulation_steps",
        "seed",
        "activation_checkpointing",
        "activation_offload",
        "compile",
        "log_every",
        "quant_stats_every",
        "checkpoint_every",
        "resume",
        "keep_checkpoints",
        "max_skipped_steps",
    ],
    "eval": ["every", "best"],
    "export": ["enabled", "dir", "format", "template", "max_shard_size"],
}


def knobs(recipe: Recipe) -> Iterator[tuple[str, str, Any]]:
    """Section, name and value of every knob; the section is "" for those that have none."""
    for item in fields(recipe):
        value = getattr(recipe, item.name)
        if is_dataclass(value):
            yield from ((item.name, inner.name, getattr(value, inner.name)) for inner in fields(value))
        else:
            yield "", item.name, value


def changes(before: Recipe, recipe: Recipe) -> list[str]:
    """What ``recipe`` says otherwise than ``before`` of what must stay, like ``data.seed (was 0, is 3)``."""
    found = []
    for (section, name, was), (_, _, now) in zip(knobs(before), knobs(recipe), strict=True):
        if (section, name) == ("data", "train"):  # files may be moved, but not renamed, left out or added
            was, now = ([Path(file).name for file in files] for files in (was, now))
        if name in STAYS.get(section, ()) and was != now:
            found.append(f"{section}.{name} (was {was!r}, is {now!r})")
    return found
