"""torchao's QAT in a plain loop, for benchmarks/recovery.py: as our runs, but for the fake quantisation.

Same checkpoint, samples, order, steps and rates; AdamW over fp32 copies of all parameters, gradients clipped. torchao
quantises with the largest magnitude of each step's weights, and learns no scales.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks import timing
from data.loader import Loader, model_inputs
from data.samples import IGNORE
from data.text import read_text
from engine.recipe.recipe import Recipe
from engine.session.optimizer import lr_factor
from quant import SCHEMES


def takes(scheme: str) -> bool:
    """Whether torchao is here and has the scheme: symmetric integer weights, inputs as they are."""
    spec = SCHEMES[scheme]
    integers = spec.weights.dtype == "int" and spec.weights.symmetric and spec.activations is None
    return timing.installed("torchao") and integers


def train(recipe: Recipe) -> PreTrainedModel:
    """The model after training, fake quantisation still in it."""
    settings, optim, steps = recipe.data, recipe.optim, recipe.train.steps
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.path)
    loader = Loader(
        read_text(settings.train, tokenizer, settings.max_length),
        micro_batch_size=settings.micro_batch_size,
        gradient_accumulation_steps=1,
        rank=0,
        world=1,
        seed=settings.seed,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = AutoModelForCausalLM.from_pretrained(recipe.model.path, dtype=torch.bfloat16).train()
    fake_quantize(model, recipe.quant.scheme)
    parameters = list(model.parameters())
    masters = [parameter.detach().float() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay)
    for step in range(steps):
        (batch,) = loader.step(step)
        logits = model(**model_inputs(batch), use_cache=False).logits
        F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE).backward()
        for master, parameter in zip(masters, parameters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(masters, optim.grad_clip)
        factor = lr_factor(
            step, total=steps, warmup=optim.warmup_steps, kind=optim.schedule, min_ratio=optim.min_lr_ratio
        )
        for group in optimizer.param_groups:
            group["lr"] = optim.lr * factor
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
    return model


def fake_quantize(model: nn.Module, scheme: str) -> None:
    """torchao's fake quantisation of every Linear but lm_head."""
    from torchao.quantization import quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    weights = SCHEMES[scheme].weights
    granularity = PerGroup(weights.group_size) if weights.granularity == "group" else PerAxis(0)
    config = IntxFakeQuantizeConfig(getattr(torch, f"int{weights.bits}"), granularity, is_symmetric=True)
    quantize_(
        model,
        QATConfig(weight_config=config, step="prepare"),
        filter_fn=lambda module, name: isinstance(module, nn.Linear) and not name.endswith("lm_head"),
    )
