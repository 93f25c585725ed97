"""The training that a recipe describes in one process without DeepSpeed: an fp32 model, autograd, AdamW.

What the runs on two ranks are compared with. It shares the losses, the layers and the parameter groups with the engine,
which have tests of their own; the sums over ranks and micro-batches, clipping, learning rates and the switching on of
fake quant are written out here.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer

from data.chat import read_chat
from data.loader import Loader, MicroBatch, valid_tokens
from data.text import read_text
from engine.losses import loss_sums
from engine.optim import parameter_groups, peak_learning_rates, set_learnable
from engine.recipe import Recipe, load_recipe
from engine.schedule import lr_factor
from model.build import build_model
from model.load import load_weights
from quant import Quantization, get_scheme, prepare, scales_from_stats

RANKS = 2


def inputs_of(batch: MicroBatch) -> dict[str, torch.Tensor]:
    """What a model's forward takes of a micro-batch."""
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


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
        )
        for rank in range(RANKS)
    ]


def plain_weights(path: str) -> nn.Module:
    """The checkpoint as our model, fp32, not quantised."""
    model = build_model(path, {}, dtype=torch.float32, device=torch.device("cpu"))
    load_weights(model, path, progress=False)
    return model


def plain_model(settings: Recipe) -> tuple[nn.Module, Quantization]:
    """The student, quantised; scales measured and calibrated as the recipe says, unless fake quant starts later."""
    model = plain_weights(settings.model.path)
    quantization = prepare(
        model,
        get_scheme("fp8_static"),
        learn_weight_scale=settings.learnable.weight_scale,
        learn_input_scale=settings.learnable.act_scale,
    )
    set_learnable(model, settings.learnable)
    quantization.set_fake_quant(False, False)
    quantization.observe(True)
    if settings.quant.fake_quant_start == 0:
        for loader in plain_loaders(settings):
            for batch in loader.first(settings.quant.calibration_batches):
                for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
                    with torch.no_grad():
                        model(input_ids=ids[None, mask.bool()])
        measure(quantization)
    return model, quantization


@torch.no_grad()
def measure(quantization: Quantization) -> None:
    """Scales from the whole weights and from what the observers saw; fake quant is on then."""
    spec = quantization.scheme.weights
    for group in quantization.weight_groups:
        absmax = max(quantization.layers[name].weight.abs().max() for name in group.members)
        group.s0.copy_(scales_from_stats(absmax.reshape(1), spec))
    for group in quantization.input_groups:
        group.s0.copy_(scales_from_stats(group.observer.absmax.reshape(1), spec))
    quantization.observe(False)
    quantization.set_fake_quant(True, True)


def plain_loop(path: Path) -> dict[str, Any]:
    """Losses and grad norms of every step, and the weights after the last one."""
    settings = load_recipe(path)
    loaders = plain_loaders(settings)
    model, quantization = plain_model(settings)
    loss = settings.loss
    teacher = plain_weights(loss.teacher).requires_grad_(False) if loss.kd_weight else None
    optimizer = torch.optim.AdamW(parameter_groups(model, settings.optim), betas=settings.optim.betas)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    losses, norms = [], []
    for step in range(settings.train.steps):
        if 0 < step == settings.quant.fake_quant_start:
            measure(quantization)
            for parameter in (
                p for group in optimizer.param_groups if group["name"] == "scales" for p in group["params"]
            ):
                del optimizer.state[parameter]
        batches = [batch for loader in loaders for batch in loader.step(step)]
        valid = valid_tokens(batches)
        sums = torch.zeros(2)
        for batch in batches:
            teacher_logits = None
            if teacher is not None:
                with torch.no_grad():
                    teacher_logits = teacher(**inputs_of(batch)).logits
            lm, kd = loss_sums(model(**inputs_of(batch)).logits, batch["labels"], teacher_logits, kd_kind=loss.kd)
            ((lm + loss.kd_weight * kd) / valid).backward()
            sums += torch.stack([lm.detach(), kd.detach()]) / valid
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, settings.optim.grad_clip)))
        factor = lr_factor(
            step,
            total=settings.train.steps,
            warmup=settings.optim.warmup_steps,
            kind=settings.optim.schedule,
            min_ratio=settings.optim.min_lr_ratio,
        )
        since_start = step - settings.quant.fake_quant_start + 1
        for group in optimizer.param_groups:
            share = min(factor, since_start / settings.optim.warmup_steps) if group["name"] == "scales" else factor
            group["lr"] = peak_learning_rates(settings.optim)[group["name"]] * share
        optimizer.step()
        optimizer.zero_grad()
        named = {"loss/total": float(sums[0] + loss.kd_weight * sums[1]), "loss/lm": float(sums[0])}
        losses.append({**named, **({f"loss/kd/{loss.kd}": float(sums[1])} if loss.kd_weight else {})})
    return {"losses": losses, "norms": norms, "weights": {name: p.detach() for name, p in model.named_parameters()}}


def load_result(path: Path) -> dict[str, Any]:
    """What ``train_script.py`` left of the recipe's run."""
    return torch.load(Path(load_recipe(path).output_dir) / "result.pt", weights_only=True)


def assert_same(found: dict[str, Any], expected: dict[str, Any], *, rtol: float, weight_atol: float) -> None:
    """Losses relative, weights absolute: Adam moves a weight whose gradient is rounding noise by up to a whole step."""
    for a, b in zip(found["losses"], expected["losses"], strict=True):
        for name in a.keys() | b.keys():
            assert abs(a[name] - b[name]) <= 1e-6 + rtol * abs(b[name]), (name, found["losses"], expected["losses"])
    for a, b in zip(found["norms"], expected["norms"], strict=True):
        if a is not None:  # stage 0 in fp32
            assert abs(a - b) <= 10 * rtol * b, (found["norms"], expected["norms"])
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in found["weights"].items():
        difference = (weight.float() - expected["weights"][name].float()).abs()
        # The mean shows a systematic error; the maximum bounds single weights that noise decides.
        assert difference.mean() < weight_atol / 10 and difference.max() < weight_atol, (
            name,
            difference.mean(),
            difference.max(),
        )
