"""Makes DeepSpeed engines: the student's, with its optimizer, and those of models that only run forward."""

from typing import Any

import deepspeed
from torch import nn
from transformers import PreTrainedModel

from engine.recipe.ds_config import teacher_config
from engine.recipe.recipe import Recipe
from engine.session.loss_scale import LossScale
from engine.session.optimizer import build_optimizer
from model.build import check_rotary_buffers
from model.ranks import errors_on_all_ranks
from model.zero import forget_secondary_copies, keep_frozen_fp32, stage


def initialize_student(recipe: Recipe, ds_config: dict[str, Any], model: PreTrainedModel) -> deepspeed.DeepSpeedEngine:
    """Make the student's engine with its optimizer; a collective."""
    with errors_on_all_ranks(ValueError):
        # In every other case an optimizer of DeepSpeed's stands around this one, which skips such steps by itself.
        unguarded = stage(ds_config) == 0 and recipe.model.dtype == "float32"
        optimizer = build_optimizer(model, recipe.optim, skip_non_finite=unguarded)
    # Scales were gathered since the weights were loaded, and hpZ keeps copies of what is gathered.
    forget_secondary_copies(model)
    config = ds_config
    if recipe.model.dtype == "float16":
        # A static scale, which is set before every step: see engine.session.loss_scale.
        config = {**ds_config, "fp16": {"enabled": True, "loss_scale": LossScale.from_config(ds_config["fp16"]).value}}
    with keep_frozen_fp32(model):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    check_rotary_buffers(model)
    if stage(ds_config) == 0:
        # On stage 0 in 16 bits DeepSpeed makes a step with zero gradients to allocate the optimizer's state. It moves
        # nothing, as the learning rate is still 0, but it counts for Adam's bias correction: the first real step would
        # be 0.73 of its size.
        optimizer.state.clear()
    return engine


def initialize_frozen(model: PreTrainedModel, ds_config: dict[str, Any]) -> nn.Module:
    """Freeze a model that only runs forward.

    Returns:
        Under stage 3 an engine without an optimizer, on the other stages the module itself.
    """
    model.requires_grad_(False)
    model.eval()
    config = model.config.get_text_config()
    config.use_cache = False
    config.output_router_logits = False
    if stage(ds_config) < 3:
        return model
    forget_secondary_copies(model)
    engine, *_ = deepspeed.initialize(model=model, config=teacher_config(ds_config))
    return engine
