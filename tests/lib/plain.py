"""The training that a recipe describes in one process without DeepSpeed: an fp32 model, autograd, AdamW.

What the runs on two ranks are compared with, step by step. It shares the layers and the parameter groups with the
engine, which have tests of their own; the losses, the sums over ranks and micro-batches, clipping, learning rates and
the switching on of fake quant are written out here.
"""

import functools
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from data.chat import read_chat
from data.loader import Loader, MicroBatch, model_inputs, sample_inputs, valid_tokens
from data.samples import IGNORE
from data.text import read_text
from engine.config.config import Recipe
from engine.config.reading import load_recipe
from engine.config.sections import LossRecipe, OptimRecipe
from engine.session.adapter import add_adapters
from engine.session.optimizer import SCALE_GROUPS, lr_factor, parameter_groups, peak_learning_rates, set_learnable
from model.moe.experts import Form
from quant import Quantization, replace_layers
from quant.gemm import rotate
from quant.prepared import find_quantization, prepare
from quant.reference import absmax_scale
from quant.rotation import rotate_inputs
from quant.scale import first_input_scale
from tests.lib.checkpoints import load_model
from tests.lib.definitions import kd_loss, lm_loss

RANKS = 2

# What two correct computations of one step may differ by.
#
# No BLAS promises the last bit of an fp32 matrix product: MKL's depends on the CPU, on the number of rows, and on
# whether an operand is aligned to 16 bytes, which in ZeRO's flat buffers it may not be. And ranks add gradients up in
# another order than one process. Without fake quant that stays rounding. But a code is discontinuous: of the half a
# million values that such a step quantizes, about one is so near to the middle between two codes that the last bit
# decides, and then an activation jumps by up to 1/8, which all later layers and tokens of its sequence see.
#
# From step to step this grows: a scale that moved by 3e-4 sends one code in 300 elsewhere, so that two correct loops of
# five steps may end with losses 1e-3 apart, in which a real error could hide. So every step is compared from the same
# Parameters.
#
# Behind each bound the most that was measured: a plain loop against itself with the output of every Linear times
# 1 + 6e-8 * randn, of each of 45 random models, dense and with experts, 12 times 5 steps.
SMOOTH_RTOL = 1e-5  # losses of a step without fake quant: 2e-7; ten times that for grad norms: 3e-7
QUANTIZED_RTOL = 1e-3  # losses of a step with it: 5e-4; ten times that for norms and divergences: 4e-3, 4e-3
SCALE_NORM_RTOL = 0.01  # of the norm of the scales' gradients: 1e-7; one code that flips moves one of its terms
WEIGHT_MEAN = 0.05  # of a tensor, in learning rates: 0.005 dense, 0.03 in an expert that few tokens chose
WEIGHT_MAX = 3.0  # of an element: 2, because Adam's step is as long where the gradient is nothing but rounding
# A theta's gradient may be a few terms that nearly cancel: so many may differ by more than THETA in learning rates,
# which are all that did. An error in how thetas are trained shows in most of them. Without fake quant they rest.
THETA, THETAS_APART = 0.1, {"weight": 1, "code": 1, "input": 2}


def inputs_of(batch: MicroBatch) -> dict[str, torch.Tensor]:
    """Select the inputs of a model's forward from a micro-batch; for a packed one the mask is written out."""
    inputs = model_inputs(batch)
    if "position_ids" in batch:
        rows, length = batch["input_ids"].shape
        mask = torch.eye(length, dtype=torch.bool).repeat(rows, 1, 1)
        for row, start, end in batch["spans"].tolist():
            mask[row, start:end, start:end] = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        inputs["attention_mask"] = mask[:, None]
    return inputs


def plain_loaders(settings: Recipe) -> list[Loader]:
    """The loaders of all ranks."""
    tokenizer = AutoTokenizer.from_pretrained(settings.model.path)
    if settings.data.kind == "text":
        samples = read_text(settings.data.train, tokenizer, settings.data.max_length)
    else:
        samples, _ = read_chat(
            settings.data.train, tokenizer, fields=settings.data.fields, max_length=settings.data.max_length
        )
    return [
        Loader(
            samples,
            micro_batch_size=settings.data.micro_batch_size,
            gradient_accumulation_steps=settings.train.gradient_accumulation_steps,
            rank=rank,
            world=RANKS,
            seed=settings.data.seed,
            pad_token_id=tokenizer.pad_token_id,
            packed_length=settings.data.max_length if settings.data.packing else None,
        )
        for rank in range(RANKS)
    ]


def plain_weights(path: str, experts: Form = "stacked") -> nn.Module:
    """The checkpoint as our model, fp32, not quantized."""
    return load_model(Path(path), torch.float32, experts=experts)


def prepares(settings: Recipe) -> bool:
    """Tell if ``prepare`` has an argument for everything that a recipe says of its layers and scales."""
    quant = settings.quant
    more = [quant.head_scheme(), quant.embedding_scheme(), quant.preset().kv_cache, quant.rotate, settings.adapter.on]
    more.append(quant.decoupled_scales)
    scales = (quant.fake_quant_start, quant.initial_input_scale, quant.scales_follow_weights, settings.schedule)
    return quant.default_scheme() is not None and not any([*more, *scales])


def calibrated(settings: Recipe, model: nn.Module) -> None:
    """Run the samples of the calibration on all ranks."""
    for loader in plain_loaders(settings):
        observed(model, loader.first(settings.quant.calibration_batches))


def observed(model: nn.Module, batches: Iterable[MicroBatch]) -> None:
    """Run each sample alone, for the observers."""
    for batch in batches:
        for ids in sample_inputs(batch):
            with torch.no_grad():
                model(input_ids=ids)


def plain_model(settings: Recipe, *, switched: bool = True) -> tuple[nn.Module, Quantization]:
    """The student, quantized; scales measured and calibrated as the recipe says, unless fake quant starts later.

    ``switched``: fake quant is switched in some steps, so that the scale groups are needed.
    """
    model, preset = plain_weights(settings.model.path, settings.model.experts), settings.quant.preset()
    if prepares(settings) and not switched:  # what the page "In your own loop" promises
        prepare(
            model,
            settings.quant.default_scheme(),
            rules=settings.quant.chosen_rules(),
            ranges=settings.quant.ranges(),
            learn_weight_scale=settings.learnable.weight_scale,
            learn_input_scale=settings.learnable.act_scale,
            calibrate=functools.partial(calibrated, settings),
        )
        set_learnable(model, settings.learnable)
        return model, find_quantization(model)
    quantization = replace_layers(
        model,
        preset.linear,
        rules=settings.quant.chosen_rules(),
        named={
            name: scheme
            for name, scheme in (
                ("lm_head", settings.quant.head_scheme()),
                ("model.embed_tokens", settings.quant.embedding_scheme()),
            )
            if scheme is not None
        },
        ranges=settings.quant.ranges(),
        kv_cache=preset.kv_cache,
        learn_weight_scale=settings.learnable.weight_scale,
        learn_input_scale=settings.learnable.act_scale,
        learn_kv_scale=settings.learnable.kv_scale,
    )
    if settings.adapter.on:
        add_adapters(settings, model, quantization)
    if settings.quant.decoupled_scales:
        quantization.decouple_scales()
    if settings.quant.rotate:
        rotate_inputs(quantization, settings.quant.rotate, settings.quant.rotate_block)
        for layer in quantization.layers.values():
            if layer.rotation is not None:
                layer.weight.data.copy_(rotate(layer.weight.double(), layer.rotation))
    set_learnable(model, settings.learnable)
    quantization.set_fake_quant(False, False)
    quantization.observe(True)
    if settings.quant.fake_quant_start == 0:
        calibrated(settings, model)
        measure(quantization)
        if settings.quant.initial_input_scale is not None:
            for group in quantization.input_groups:
                torch.nn.init.constant_(group.s0, settings.quant.initial_input_scale)
    return model, quantization


def plain_losses(
    kind: str, logits: torch.Tensor, teacher: torch.Tensor | None, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the valid tokens: language modeling, and distillation (0 without a teacher); in fp64."""
    valid = labels != IGNORE
    student = logits[valid].double()
    lm = lm_loss(student, labels[valid]).sum()
    if teacher is None:
        return lm, torch.zeros_like(lm)
    return lm, kd_loss(kind, student, teacher[valid].double(), labels[valid]).sum()


@torch.no_grad()
def measure(quantization: Quantization) -> None:
    """Scales from the whole weights and from what the observers saw; theta is 0 and fake quant is on then."""
    follow(quantization)
    for group in quantization.input_groups:
        group.s0.copy_(first_input_scale(group.observer.absmax.reshape(1), group.spec))
    for group in (*quantization.weight_groups, *quantization.input_groups):
        if group.theta is not None:
            group.theta.zero_()
    quantization.observe(False)
    quantization.set_fake_quant(True, True)


@torch.no_grad()
def follow(quantization: Quantization) -> None:
    """Scales that the largest weights fit."""
    for group in quantization.weight_groups:
        parts = [quantization.layers[name].weight.reshape(*group.s0.shape, -1) for name in group.members]
        parts = torch.cat(parts, -1)
        absmax = parts.abs().amax(-1)
        if group.zero is not None:
            lowest, highest = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
            steps = group.spec.qmax - group.spec.qmin
            group.s0.copy_((highest - lowest) / steps)
            group.zero.copy_((group.spec.qmin - lowest / group.s0).round())
        elif quantization.ranges.signed:  # the largest magnitude becomes -2^(bits - 1)
            group.s0.copy_(torch.where(parts.amax(-1) > -parts.amin(-1), -absmax, absmax) / 2 ** (group.spec.bits - 1))
        else:
            group.s0.copy_(absmax_scale(absmax, group.spec))
    for group in quantization.global_groups:  # with it the largest scale is the largest e4m3 number
        parts = torch.cat([quantization.layers[name].weight.flatten() for name in group.members])
        group.s0.copy_(448 * 6 / parts.reshape(*group.s0.shape, -1).abs().amax(-1))


def accumulate(
    model: nn.Module, teacher: nn.Module | None, loss: LossRecipe, batches: Sequence[MicroBatch]
) -> torch.Tensor:
    """Gradients of a step, added up; the means of both losses over its tokens."""
    valid = valid_tokens(batches)
    sums = torch.zeros(2)
    for batch in batches:
        teacher_logits = None
        if teacher is not None:
            with torch.no_grad():
                teacher_logits = teacher(**inputs_of(batch)).logits
        lm, kd = plain_losses(loss.kd, model(**inputs_of(batch)).logits, teacher_logits, batch["labels"])
        ((lm + loss.kd_weight * kd) / valid).backward()
        sums += torch.stack([lm.detach(), kd.detach()]) / valid
    return sums


def set_rates(optimizer: torch.optim.Optimizer, optim: OptimRecipe, step: int, total: int, scale_steps: int) -> None:
    """The learning rates of a step; those of scales have a warm-up of their own, and are 0 before it."""
    factor = lr_factor(step, total=total, warmup=optim.warmup_steps, kind=optim.schedule, min_ratio=optim.min_lr_ratio)
    scale_factor = min(factor, scale_steps / optim.warmup_steps) if scale_steps else 0.0
    for group in optimizer.param_groups:
        share = scale_factor if group["name"] in SCALE_GROUPS else factor
        group["lr"] = peak_learning_rates(optim)[group["name"]] * share


def plain_loop(
    settings: Recipe, found: dict[str, Any], *, off: range | None = None, without_targets: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Every step of the run ``found`` taken again: losses and grad norms, and the Parameters after each.

    Each step starts from the Parameters that the run had, so a difference does not grow over the steps; Adam's moments
    are this loop's own.

    Args:
        settings: the recipe.
        found: what ``scripts/train.py`` kept of the recipe's run in fp32.
        off: steps without fake quant; by default those before the recipe's start.
        without_targets: ranks whose labels are all ignored.
    """
    off = range(settings.quant.fake_quant_start) if off is None else off
    loaders = plain_loaders(settings)
    model, quantization = plain_model(settings, switched=len(off) > 0)
    parameters = dict(model.named_parameters())
    loss = settings.loss
    teacher = plain_weights(loss.teacher).requires_grad_(False) if loss.kd_weight else None
    optimizer = torch.optim.AdamW(parameter_groups(model, settings.optim), betas=settings.optim.betas)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    thetas = [p for group in optimizer.param_groups if group["name"] in SCALE_GROUPS for p in group["params"]]
    result: dict[str, Any] = {"losses": [], "norms": [], "scale_norms": [], "after": [], "quantized": []}
    scale_steps = 0
    for step in range(settings.train.steps):
        if step > 0 and step == off.start:
            quantization.set_fake_quant(False, False)
            quantization.observe(True)
        if step > 0 and step == off.stop:
            measure(quantization)
            for theta in thetas:
                del optimizer.state[theta]
            scale_steps = 0
        scale_steps += step not in off
        of_ranks = [loader.step(step) for loader in loaders]
        for batch in (batch for rank in without_targets for batch in of_ranks[rank]):
            batch["labels"].fill_(-100)
        batches = [batch for batches in of_ranks for batch in batches]
        if quantization.observing:
            observed(model, batches)
        with quantization.paused() if quantization.observing else nullcontext():  # observers see no padding
            sums = accumulate(model, teacher, settings.loss, batches)
        result["scale_norms"].append(float(torch.nn.utils.get_total_norm([theta.grad for theta in thetas])))
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(trained, settings.optim.grad_clip)))
        set_rates(optimizer, settings.optim, step, settings.train.steps, scale_steps if step not in off else 0)
        optimizer.step()
        optimizer.zero_grad()
        if settings.quant.scales_follow_weights:
            follow(quantization)
        named = {"loss/total": float(sums[0] + loss.kd_weight * sums[1]), "loss/lm": float(sums[0])}
        result["losses"].append({**named, **({f"loss/kd/{loss.kd}": float(sums[1])} if loss.kd_weight else {})})
        result["quantized"].append(step not in off)
        result["after"].append({name: parameter.detach().clone() for name, parameter in parameters.items()})
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(found["after"][step][name])
    return result


def load_result(path: Path) -> dict[str, Any]:
    """Load the result that ``scripts/train.py`` wrote in the recipe's run."""
    return torch.load(Path(load_recipe(path).output_dir) / "result.pt", weights_only=True)


def assert_equals_plain_loop(path: Path, *, off: range | None = None, without_targets: tuple[int, ...] = ()) -> None:
    """Every step of the recipe's run in fp32, and what it did to every Parameter, equals a step of the plain loop."""
    settings, found = load_recipe(path), load_result(path)
    expected = plain_loop(settings, found, off=off, without_targets=without_targets)
    for step, (after, plain_after) in enumerate(zip(found["after"], expected["after"], strict=True)):
        quantized = expected["quantized"][step]
        rtol = QUANTIZED_RTOL if quantized else SMOOTH_RTOL
        losses, plain_losses = found["losses"][step], expected["losses"][step]
        assert losses.keys() == plain_losses.keys()
        for name, loss in plain_losses.items():
            rel = 10 * rtol if name.startswith("loss/kd") else rtol
            assert losses[name] == pytest.approx(loss, rel=rel), (step, name)
        if found["norms"][step] is not None:  # stage 0 in fp32
            assert found["norms"][step] == pytest.approx(expected["norms"][step], rel=10 * rtol), step
        if found["scale_norms"][step] is not None:  # in the steps that measure it
            assert found["scale_norms"][step] == pytest.approx(expected["scale_norms"][step], rel=SCALE_NORM_RTOL), step
        assert after.keys() == plain_after.keys()
        scales = [name for name in after if name.endswith("_s0")]
        for name in scales if quantized else ():  # the others are not in use
            if name.replace("_s0", "_zero") in after:
                # Of ranges, an end of which may be one of the few weights that are a whole learning rate off.
                difference = (after[name] - plain_after[name]).abs() / settings.optim.lr
                assert float(difference.max()) <= WEIGHT_MAX and float(difference.mean()) <= WEIGHT_MEAN, (step, name)
                continue
            # Of the same weights, or of activations that rounding parts.
            torch.testing.assert_close(after[name], plain_after[name], rtol=1e-5, atol=0)
        for name in (name for name in after if name.endswith("_zero")):
            # A weight that differs in its last bits can turn a rounding.
            difference = (after[name] - plain_after[name]).abs()
            assert float(difference.max()) <= 1 and float(difference.mean()) < 0.01, (step, name)
        assert_same_steps(after, plain_after, settings, step)
        assert_same_thetas(after, plain_after, settings.optim.scale_lr if quantized else 0.0, step)


def assert_same_steps(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], settings: Recipe, step: int
) -> None:
    """The model's own Parameters after a step from the same ones, in units of the learning rate: Adam's whole step."""
    for name, value in found.items():
        if not name.endswith(("_theta", "_s0", "_zero")):
            difference = (value - expected[name]).abs() / settings.optim.lr
            mean, most = float(difference.mean()), float(difference.max())
            assert mean <= WEIGHT_MEAN and most <= WEIGHT_MAX, (step, name, mean, most)


def assert_same_thetas(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], learning_rate: float, step: int
) -> None:
    """Thetas after a step from the same ones; equal where the learning rate is 0."""
    for kind, most in THETAS_APART.items():
        names = [name for name in found if name.endswith(f".{kind}_theta")]
        differences = {name: float((found[name] - expected[name]).abs().max()) for name in names}
        apart = {name: difference for name, difference in differences.items() if difference > THETA * learning_rate}
        assert len(apart) <= (most if learning_rate else 0), (step, learning_rate, apart)
