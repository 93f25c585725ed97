"""torchao's QAT in a plain loop, for recovery.py: as our runs, but for the fake quantization.

Same checkpoint, samples, order, steps, rates and losses, which our own functions compute; AdamW over fp32 copies of
all parameters, gradients clipped. torchao quantizes with the absmax of each step's weights, and learns no scales.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks import timing
from data.loader import Loader, model_inputs
from data.samples import IGNORE
from data.text import read_text
from engine.config.config import Recipe
from engine.config.sections import LossRecipe
from engine.losses.chunked import TeacherHidden, chunked_losses
from engine.session.optimizer import lr_factor
from quant import SCHEMES


def takes(scheme: str) -> bool:
    """Tell if torchao is installed and supports the scheme: symmetric integer weights, unquantized inputs."""
    spec = SCHEMES[scheme]
    integers = spec.weights.dtype == "int" and spec.weights.symmetric and spec.activations is None
    return timing.installed("torchao") and integers


def train_torchao(recipe: Recipe, device: torch.device) -> PreTrainedModel:
    """Train; each weight of the model that is returned is the value that it was multiplied as."""
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
    model = AutoModelForCausalLM.from_pretrained(recipe.model.path, dtype=torch.bfloat16).to(device).train()
    teacher = None
    if recipe.loss.kd_weight:
        teacher = AutoModelForCausalLM.from_pretrained(recipe.loss.teacher, dtype=torch.bfloat16).to(device).eval()
    fake_quantize(model, recipe.quant.scheme)
    parameters = list(model.parameters())
    masters = [parameter.detach().float() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay)
    for step in range(steps):
        (batch,) = ({name: tensor.to(device) for name, tensor in one.items()} for one in loader.step(step))
        loss_of(model, teacher, batch, recipe.loss).backward()
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
    settle(model)
    return model


def loss_of(
    model: PreTrainedModel, teacher: PreTrainedModel | None, batch: Mapping[str, Tensor], recipe: LossRecipe
) -> Tensor:
    """The loss of a recipe, as the engine computes it; fp32 scalar, a mean over the tokens with a label."""
    inputs, labels = model_inputs(batch), batch["labels"]
    seen = None
    if teacher is not None:
        with torch.no_grad():
            seen = TeacherHidden(_hidden(teacher, inputs), teacher.get_output_embeddings().weight)
    head, valid = model.get_output_embeddings(), int((labels != IGNORE).sum())
    objective = recipe.objective(lm=recipe.lm_weight, kd=recipe.kd_weight)
    return chunked_losses(
        _hidden(model, inputs), head.weight, head.bias, labels, seen, objective, scale=1 / valid
    ).total


def _hidden(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Tensor:
    hidden: Tensor = model.base_model(**inputs, use_cache=False).last_hidden_state
    return hidden


def fake_quantize(model: nn.Module, scheme: str) -> None:
    """torchao's fake quantization of every Linear but lm_head."""
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


@torch.no_grad()
def settle(model: PreTrainedModel) -> None:
    """Quantize each weight, and remove torchao's modules."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import FakeQuantizedLinear, QATConfig

    for module in model.modules():
        if isinstance(module, FakeQuantizedLinear) and module.weight_fake_quantizer is not None:
            module.weight.copy_(module.weight_fake_quantizer(module.weight))
    quantize_(model, QATConfig(step="convert"))
