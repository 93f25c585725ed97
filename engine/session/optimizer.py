"""Trainable parameters, parameter groups, learning rates, the optimizer, DeepSpeed's engines and the fp16 loss scale.

Parameters are classified by the module that owns them, not by parts of their names.

Loss scale: fp16 has no number between 0 and 6e-8, and none above 65504. So the loss is multiplied by a power of two,
and the fp32 sums of gradients are divided by it. The scale is dynamic (Micikevicius et al. 2018, Mixed Precision
Training, section 3.2, arXiv:1710.03740): a step with Inf in a gradient is skipped and halves the scale, ``window``
steps in a row without overflow double it.

DeepSpeed's own scaler doubles the scale between backward and update of a step, so that update divides the gradients by
twice their factor. On stage 0 the scaler has other settings, too. So DeepSpeed gets a static scale here, and the loop
sets it before each step to the value of :class:`LossScale`.
"""

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
from torch import nn
from transformers import PreTrainedModel

from engine.config.config import Recipe
from engine.config.deepspeed import offloads_to_nvme, teacher_config
from engine.config.sections import CODED, DECAYING, LearnableRecipe, OptimRecipe
from engine.session.adamw8bit import AdamW8bit
from model.build import INDEXER, check_rotary_buffers
from model.moe.experts import ExpertMLPs, router_names
from model.ranks import errors_on_all_ranks, listed, local_world_size, say
from model.zero import (
    check_space,
    forget_secondary_copies,
    full_shape,
    keep_frozen_fp32,
    local_range,
    on_cuda,
    stage,
)
from quant import QuantCache, QuantEmbedding, QuantLayer
from quant.rules import examples

# LSQ divides the gradient of a scale by sqrt(numel * qmax), about 1e5 for a 4096 x 4096 weight in fp8: gradients of
# theta are 1e-9 and less, below Adam's usual eps of 1e-8.
SCALE_EPS = 1e-15


class OwnedParameter(NamedTuple):
    """Parameter with its name in the model (the first one if modules share it) and its kind: weight, embedding, bias,
    norm, router, weight_scale, act_scale, kv_scale, adapter or frozen."""

    name: str
    parameter: nn.Parameter
    kind: str


def classify(model: nn.Module) -> Iterator[OwnedParameter]:
    """Yield every Parameter of the model once, in module order, with its kind.

    ``embedding`` is the token embedding and lm_head, tied or not. ``frozen`` are initial scales s0, global scales and
    zero points, which never train, and the parameters of sparse attention's indexers (``INDEXER``), even if another
    module shares them. A 1-dimensional ``weight`` is a norm: transformers has dozens of norm classes without a common
    base, and no other layer of its language models has a 1-dimensional weight.
    """
    of_kind = {id(parameter): "router" for parameter in _router_parameters(model)}
    for prefix, module in model.named_modules():
        if prefix.endswith(f".{INDEXER}"):
            of_kind |= {id(parameter): "frozen" for parameter in module.parameters()}
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            kind = of_kind.get(id(parameter)) or _kind(module, name, parameter)
            if kind == "weight" and (module is head or isinstance(module, (nn.Embedding, QuantEmbedding))):
                kind = "embedding"
            yield OwnedParameter(f"{prefix}.{name}" if prefix else name, parameter, kind)


# Kinds of a quantized layer's Parameters besides weight and bias.
_KIND_BY_NAME = {
    "weight_theta": "weight_scale",
    "code_theta": "weight_scale",
    "input_theta": "act_scale",
    "weight_s0": "frozen",
    "weight_global": "frozen",
    "weight_zero": "frozen",
    "input_s0": "frozen",
    "lora_a": "adapter",
    "lora_b": "adapter",
}


def _kind(module: nn.Module, name: str, parameter: nn.Parameter) -> str:
    if isinstance(module, QuantCache) and name == "input_theta":
        return "kv_scale"
    if isinstance(module, (QuantLayer, QuantCache)) and name in _KIND_BY_NAME:
        return _KIND_BY_NAME[name]
    if name == "bias" or isinstance(module, ExpertMLPs):  # own Parameters of ExpertMLPs are biases only
        return "bias"
    return "norm" if len(full_shape(parameter)) == 1 else "weight"


def _router_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of routers and of the gates of shared experts."""
    for name in router_names(model):
        parent, _, leaf = name.rpartition(".")
        router = getattr(model.get_submodule(parent), leaf)
        yield from router.parameters() if isinstance(router, nn.Module) else (router,)


def trained_scales(model: nn.Module) -> list[nn.Parameter]:
    """List all trainable thetas, each once."""
    scales = [owned for owned in classify(model) if GROUP_OF.get(owned.kind) in SCALE_GROUPS]
    return [owned.parameter for owned in scales if owned.parameter.requires_grad]


def check_patterns(names: Sequence[str], freeze: Sequence[str]) -> None:
    """Raise ValueError if a pattern of ``learnable.freeze`` matches none of ``names``, the Parameters' full names."""
    for pattern in freeze:
        if not any(re.fullmatch(pattern, name) for name in names):
            raise ValueError(
                f"learnable.freeze: {pattern!r} matches no parameter; it must match a full name such as "
                f"{examples(names)}"
            )


def set_learnable(model: nn.Module, learnable: LearnableRecipe) -> None:
    """Set ``requires_grad`` of every Parameter by the recipe's ``learnable`` section, before the engine is built.

    Biases train with the weights, as do embeddings unless excluded. Scales that are switched off have no theta.
    Parameters frozen by the model's class (biases that correct the choice of experts, fixed initial states) stay
    frozen: they get no gradient, and weight decay alone would change them. Raises ValueError if a pattern of ``freeze``
    matches no Parameter.
    """
    parameters = list(classify(model))
    check_patterns([owned.name for owned in parameters if owned.kind != "frozen"], learnable.freeze)
    trains = {
        "weight": learnable.weight,
        "embedding": learnable.weight and learnable.embedding,
        "bias": learnable.weight,
        "norm": learnable.norm,
        "router": learnable.router,
        "weight_scale": learnable.weight_scale,
        "act_scale": learnable.act_scale,
        "kv_scale": learnable.kv_scale,
        "adapter": True,
        "frozen": False,
    }
    fixed = []
    for owned in parameters:
        on = trains[owned.kind] and not any(re.fullmatch(pattern, owned.name) for pattern in learnable.freeze)
        if on and not owned.parameter.requires_grad:
            fixed.append(owned.name)
        else:
            owned.parameter.requires_grad_(on)
    if fixed:
        say(f"frozen by the model's class: {listed(fixed, 3)}")


# Kind of a Parameter -> its parameter group. Each group has its own learning rate.
GROUP_OF = {
    "weight": "weights",
    "router": "weights",
    "embedding": "embeddings",
    "norm": "norms",
    "bias": "biases",
    "weight_scale": "weight_scales",
    "act_scale": "act_scales",
    "kv_scale": "act_scales",
    "adapter": "adapters",
}
SCALE_GROUPS = ("weight_scales", "act_scales")


def parameter_groups(model: nn.Module, optim: OptimRecipe) -> list[dict]:
    """Build the optimizer's parameter groups; groups without trainable Parameters are left out.

    Groups are ``weights`` (with routers), ``embeddings`` (with lm_head), ``norms``, ``biases``, ``weight_scales`` and
    ``act_scales`` (theta), ``adapters``. A Parameter shared by modules is listed once. Theta is the logarithm of a
    factor on the scale, so its learning rate is a relative step. Theta has its own eps, and no weight decay, which
    would pull the scale back to its initial value. Norms and biases do not decay either. ``lr`` is 0 until the loop
    sets it before every step. ``moments`` is an option of :class:`engine.session.adamw8bit.AdamW8bit`. Raises
    ValueError if no Parameter is trainable.
    """
    members: dict[str, list[nn.Parameter]] = {name: [] for name in GROUP_OF.values()}
    for owned in classify(model):
        if owned.parameter.requires_grad:
            members[GROUP_OF[owned.kind]].append(owned.parameter)
    groups: list[dict] = [
        {
            "name": name,
            "params": parameters,
            "lr": 0.0,
            "weight_decay": optim.weight_decay if name in DECAYING else 0.0,
            "eps": SCALE_EPS if name in SCALE_GROUPS else optim.eps,
            "moments": optim.moments if name in CODED else "float32",
        }
        for name, parameters in members.items()
        if parameters
    ]
    if not groups:
        raise ValueError(
            "nothing trains: every switch under learnable is off, or learnable.freeze matches the rest; expected at "
            "least one trained parameter"
        )
    return groups


def peak_learning_rates(optim: OptimRecipe) -> dict[str, float]:
    """Map each parameter group to its peak learning rate, which is multiplied by :func:`lr_factor` in each step."""

    def own(value: float | None, otherwise: float) -> float:
        return otherwise if value is None else value

    return {
        "weights": optim.lr,
        "embeddings": own(optim.embedding_lr, optim.lr),
        "norms": own(optim.norm_lr, optim.lr),
        "biases": optim.lr,
        "weight_scales": optim.scale_lr,
        "act_scales": own(optim.act_scale_lr, optim.scale_lr),
        "adapters": own(optim.adapter_lr, optim.lr),
    }


_KINDS = ("constant", "linear", "cosine", "wsd")


def lr_factor(step: int, *, total: int, warmup: int, kind: str, min_ratio: float, decay: int = 0) -> float:
    """Compute the factor on the peak learning rate at ``step``.

    Linear warm-up over the first ``warmup`` steps (1/warmup at step 0), then ``constant``; or ``linear`` or ``cosine``
    decay from 1 to ``min_ratio`` at the last of ``total`` steps; or ``wsd`` (warm-up, stable, decay: Hu et al. 2024,
    MiniCPM, arXiv:2404.06395): 1 until the last ``decay`` steps, which decay linearly to ``min_ratio``. Raises
    ValueError if ``kind`` is unknown.
    """
    if kind not in _KINDS:
        raise ValueError(f"unknown learning-rate schedule {kind!r}, expected one of {', '.join(_KINDS)}")
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant":
        return 1.0
    if kind == "wsd":
        done = step - (total - decay) + 1  # decay steps, this one included
        return 1.0 - (1.0 - min_ratio) * min(1.0, max(0, done) / max(1, decay))
    progress = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
    if kind == "linear":
        return 1.0 - (1.0 - min_ratio) * progress
    return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


class SkippingAdamW(torch.optim.AdamW):
    """AdamW that skips a step with NaN or Inf in gradients. DeepSpeed's engine reads ``overflow`` and counts such steps
    in ``skipped_steps``."""

    overflow = False

    def step(self, closure=None):
        """Update the parameters; if a gradient is not finite, skip the update and set ``overflow``."""
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.overflow = not all(bool(gradient.isfinite().all()) for gradient in gradients)
        return None if self.overflow else super().step(closure)


class SkippingAdamW8bit(SkippingAdamW, AdamW8bit):
    """AdamW with 8-bit moments that skips a step with NaN or Inf in gradients."""


# The optimizer's class by optim.moments, and by whether it must skip steps by itself.
_CLASSES = {
    ("float32", False): torch.optim.AdamW,
    ("float32", True): SkippingAdamW,
    ("8bit", False): AdamW8bit,
    ("8bit", True): SkippingAdamW8bit,
}


def initialize_student(recipe: Recipe, ds_config: dict[str, Any], model: PreTrainedModel) -> deepspeed.DeepSpeedEngine:
    """Build the student's engine with its optimizer, AdamW (Loshchilov and Hutter 2019); a collective. The optimizer is
    torch's AdamW, or a subclass, as DeepSpeed's compiled versions take 45 s to build at first use. Raises RankError on
    every rank if nothing trains, or the drive of ``nvme_path`` is too small."""
    # In all other cases DeepSpeed wraps the optimizer and skips steps whose gradients are not finite.
    unguarded = stage(ds_config) == 0 and recipe.model.dtype == "float32"
    with errors_on_all_ranks(ValueError):
        groups = parameter_groups(model, recipe.optim)
    optimizer = _CLASSES[recipe.optim.moments, unguarded](groups, betas=recipe.optim.betas, fused=on_cuda())
    # Scales were gathered since the weights were loaded, and hpZ keeps copies of gathered parameters.
    forget_secondary_copies(model)
    config = ds_config
    if recipe.model.dtype == "float16":
        # A static scale, which the loop sets before every step: see the module's docstring.
        config = {**ds_config, "fp16": {"enabled": True, "loss_scale": LossScale.from_config(ds_config["fp16"]).value}}
    if offloads_to_nvme(ds_config):
        drive = Path(ds_config["zero_optimization"]["offload_optimizer"]["nvme_path"])
        ranges = [local_range(parameter) for group in groups for parameter in group["params"]]
        with errors_on_all_ranks(ValueError, OSError):
            check_space(drive, sum(stop - start for start, stop in ranges) * (local_world_size() or 1))
    with keep_frozen_fp32(model), redirect_stdout(io.StringIO()):  # on stage 1 it prints lines about memory
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    check_rotary_buffers(model)
    if stage(ds_config) == 0:
        # On stage 0 in 16 bits DeepSpeed runs a step with zero gradients to allocate the optimizer's state. It changes
        # no weights, as the learning rate is still 0, but counts in Adam's bias correction: the first real step would
        # be 0.73 of its size.
        optimizer.state.clear()
    return engine


def initialize_frozen(model: PreTrainedModel, ds_config: dict[str, Any]) -> nn.Module:
    """Freeze a model, in place, for forward only; return an engine without optimizer under stage 3, else the module
    itself. A collective under stage 3."""
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


@dataclass
class LossScale:
    """Loss scale, dynamic or static.

    Attributes:
        value: scale of the next step; a power of two if it is dynamic and ``least`` is a power of two.
        window: steps in a row without overflow after which the scale doubles; None: static scale.
        least: lower limit of the scale.
        good_steps: steps in a row without overflow since the last change.
    """

    value: float
    window: int | None
    least: float
    good_steps: int = 0

    @classmethod
    def from_config(cls, fp16: dict[str, Any]) -> "LossScale":
        """Create the scale from the ``fp16`` section of a DeepSpeed configuration, with DeepSpeed's defaults: static if
        ``loss_scale`` is above 0, else dynamic."""
        fp16 = {key: value for key, value in fp16.items() if value != "auto"}  # "auto" means the default
        static = float(fp16.get("loss_scale", 0))
        if static:
            return cls(static, None, static)
        least = float(fp16.get("min_loss_scale", 1))
        return cls(
            max(2.0 ** fp16.get("initial_scale_power", 16), least), int(fp16.get("loss_scale_window", 1000)), least
        )

    def stepped(self, *, overflow: bool) -> bool:
        """Update the scale after a step; return True if the scale was lowered. ``overflow``: True if a gradient was not
        finite."""
        if self.window is None:
            return False
        if overflow:
            self.good_steps = 0
            before, self.value = self.value, max(self.value / 2, self.least)
            return self.value < before
        self.good_steps += 1
        if self.good_steps >= self.window:
            self.good_steps, self.value = 0, 2 * self.value
        return False

    def state_dict(self) -> dict[str, float]:
        """Return plain values for a checkpoint."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the result of :meth:`state_dict`; a static scale stays unchanged."""
        if self.window is None:
            return
        self.value, self.good_steps = state["value"], int(state["good_steps"])
