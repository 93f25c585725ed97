"""Build student and teacher of a recipe on the meta device, with all shapes but without memory.

Both are built by the same functions as in a run, so that parameters, shared scales and trained parameters are counted
exactly. Their micro-batch also runs a run's code (:mod:`tools.memory.trace`).
"""

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import AttentionMaskInterface

from engine.config.config import Recipe
from engine.losses.chunked import TeacherHidden, TeacherTargets, TeacherTopK, chunked_losses
from engine.losses.objective import CACHED_KINDS, TopK
from engine.session.context import META, TORCH_DTYPES, stage_0
from engine.session.student import empty_student, quantize_student
from engine.session.teacher import empty_teacher, quantize_teacher
from model.build import attention_for, read_config
from model.head import LMHead, QuantHead, hidden_states, install_head, output_head, take_out_head
from model.moe.experts import ExpertMLPs
from model.ranks import errors_on_all_ranks
from quant import Quantization, QuantLinear
from tools.memory.trace import Event, record_step, representatives

MASKED = ("sdpa", "eager")  # take a mask; other implementations find the ends of samples in position_ids
# Implementations whose output is recognized in the autograd graph (:mod:`quant.inputs`).
IN_GRAPH = ("sdpa", "flash_attention_2", "flash_attention_3")


@dataclass
class MetaStudent:
    """Student on the meta device: the model, its quantization and loss head."""

    recipe: Recipe
    model: PreTrainedModel
    quantization: Quantization
    head: LMHead


@dataclass
class MetaTeacher:
    """Teacher that is a separate model, and its lm_head, which was removed from the model."""

    model: PreTrainedModel
    head: nn.Linear | QuantLinear


def meta_student(recipe: Recipe) -> MetaStudent:
    """Build the student as for a run on one rank. Raises RankError, with the text that a run would report, if the model
    cannot be built or quantized."""
    # On stage 0 nothing is partitioned. With one micro-batch per step no codes of weights are kept for the next
    # micro-batch: tools.memory.zero counts those codes. Nothing is computed, so nothing is compiled.
    train = dataclasses.replace(recipe.train, gradient_accumulation_steps=1, compile=False)
    attention = _attention(recipe, recipe.model.path)
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, attn_implementation=attention))
    padded = recipe.data.packing or recipe.data.kind != "text"
    makes_masks = attention == "sdpa" and padded and recipe.learnable.router  # see _inputs
    on_meta = attention_on_meta(attention, packing=recipe.data.packing if makes_masks else None)
    model_section = dataclasses.replace(recipe.model, attn_implementation=on_meta)
    plain = dataclasses.replace(recipe, model=model_section, train=train)
    config = stage_0(recipe)
    model, named = empty_student(plain, config, META)
    quantization = quantize_student(plain, config, META, model, named)
    head = install_head(model)
    if isinstance(head, QuantHead):
        quantization.layers[output_head(model)[0]] = head
    model.train()
    if recipe.never_quantizes():
        quantization.set_fake_quant(weights=False, activations=False)
    _balance_routing(model)
    return MetaStudent(recipe, model, quantization, head)


def meta_teacher(recipe: Recipe) -> MetaTeacher | None:
    """Build the teacher; return None if the recipe has none, or if the teacher is the student itself or a cache. Raises
    RankError if the model cannot be built or quantized."""
    if recipe.teacher_kind() != "model":
        return None
    path = str(recipe.loss.teacher)
    section = dataclasses.replace(recipe.model, attn_implementation=attention_on_meta(_attention(recipe, path)))
    recipe = dataclasses.replace(recipe, model=section)
    model = empty_teacher(recipe, stage_0(recipe), META)
    quantize_teacher(recipe, model, stage_0(recipe))
    _, head = output_head(model)
    take_out_head(model)
    for module in (model, head):
        module.requires_grad_(False).eval()
    model.config.get_text_config().output_router_logits = False
    _balance_routing(model)
    return MetaTeacher(model, head)


def _attention(recipe: Recipe, path: str) -> str:
    """Return the name of the attention implementation that the run will use for the model in ``path``. Raises RankError
    on every rank if the model's configuration cannot be read."""
    with errors_on_all_ranks(Exception):
        config = read_config(Path(path), recipe.model.trust_remote_code)
    return attention_for(config, recipe.model.attn_implementation)


@dataclass(frozen=True)
class Step:
    """Events of the student's micro-batch, and bytes of activations kept in host memory."""

    events: list[Event]
    on_host: int


def student_events(student: MetaStudent, teacher: MetaTeacher | None, rows: int) -> Step:
    """Record the student's micro-batch of ``rows`` rows, with its losses. Every token has a target.

    The teacher's forward, which comes before, is recorded by :func:`teacher_events`. The hidden states that the teacher
    returns are counted here. ``teacher`` is the result of :func:`meta_teacher`.
    """
    recipe = student.recipe
    labels = torch.zeros(rows, -(-recipe.data.max_length // recipe.parallel.sequence), dtype=torch.int64)
    objective = recipe.loss.objective(lm=recipe.loss.lm_weight, kd=recipe.loss.kd_weight or float(recipe.distils()))
    moved: list[int] = []

    def forward() -> Tensor:
        its_hidden = None
        if recipe.teacher_kind() in ("self", "model"):
            size = (teacher.head if teacher is not None else student.head).in_features
            its_hidden = torch.empty(*labels.shape, size, dtype=TORCH_DTYPES[recipe.model.dtype], device=META)

        def task(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            its = _teacher_at_head(recipe, student, teacher, its_hidden, labels.numel())
            return chunked_losses(hidden, weight, bias, labels, its, objective).total

        with student.head.computing(task), _on_host(recipe, moved):
            output = student.model(**_inputs(recipe, rows))
        total = output.logits
        if getattr(output, "aux_loss", None) is not None:
            total = total + output.aux_loss
        return total

    events = record_step(student.model, forward)
    with representatives(student.model) as runs:
        not_run = sum(len(run) - 1 for run in runs)
    hidden = labels.numel() * student.head.in_features * student.head.weight.element_size()
    return Step(events, sum(moved) + not_run * hidden if moved else 0)  # each layer keeps its input there


def _on_host(recipe: Recipe, moved: list[int]) -> AbstractContextManager[Any]:
    """Return a context that drops tensors that activation_offload moves to the host; add their bytes to ``moved``."""
    if not recipe.train.activation_offload:
        return nullcontext()

    def pack(tensor: Tensor) -> Tensor | tuple[torch.Size, tuple[int, ...], torch.dtype]:
        if isinstance(tensor, nn.Parameter):
            return tensor
        moved.append(tensor.numel() * tensor.element_size())
        return tensor.shape, tensor.stride(), tensor.dtype

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        shape, stride, dtype = packed
        return torch.empty_strided(shape, stride, dtype=dtype, device=META)

    return saved_tensors_hooks(pack, unpack)


def _teacher_at_head(
    recipe: Recipe, student: MetaStudent, teacher: MetaTeacher | None, hidden: Tensor | None, tokens: int
) -> TeacherTargets | None:
    """Build the teacher's outputs in the form in which the losses take them; None without a teacher."""
    kind = recipe.teacher_kind()
    if kind == "none":
        return None
    if kind == "cache":
        assert recipe.loss.kd in CACHED_KINDS
        shape = (tokens, recipe.loss.top_k or 1)
        log_probs = torch.empty(shape, device=META)
        return TeacherTopK(TopK(log_probs, torch.empty(shape, dtype=torch.int64, device=META), log_probs[:, 0]))
    assert hidden is not None
    if kind == "self":
        return TeacherHidden(hidden, student.head.weight)
    assert teacher is not None
    common = min(teacher.head.out_features, student.head.out_features)
    same = teacher.head.out_features == student.head.out_features
    return TeacherHidden(hidden, teacher.head.weight, teacher.head.bias, None if same else common)


def teacher_events(student: MetaStudent, teacher: MetaTeacher | None, rows: int) -> list[Event]:
    """Record the teacher's forward, which runs before the student's. The model is ``teacher``, or the unquantized
    student if the recipe's teacher is the student itself. The list is empty without a teacher, or with a cached one."""
    recipe = student.recipe
    if recipe.teacher_kind() in ("none", "cache"):
        return []

    def forward(model: PreTrainedModel) -> Tensor:
        return model(**_inputs(recipe, rows)).logits

    if teacher is not None:
        return record_step(teacher.model, partial(forward, teacher.model), backward=False)
    student.model.eval()
    try:
        with student.quantization.paused(), student.head.computing(hidden_states):
            return record_step(student.model, partial(forward, student.model), backward=False)
    finally:
        student.model.train()


def _inputs(recipe: Recipe, rows: int) -> dict[str, Any]:
    """Build inputs of the model's forward: rows of full length (also if ranks share them), with the attention mask that
    transformers would create.

    Rows without padding need no mask, as fused attention is causal. transformers computes masks from values, which meta
    tensors do not have. So the finished mask is passed, or positions if there is no mask. The router's auxiliary loss
    cannot read a finished mask: then the model makes one (:func:`_mask_on_meta`).
    """
    # Shares of a row differ by a token at most: all ranks are given the largest share.
    length = -(-recipe.data.max_length // recipe.parallel.sequence) * recipe.parallel.sequence
    attention = recipe.model.attn_implementation
    padded = recipe.data.packing or (recipe.data.kind != "text" and rows > 1)
    inputs: dict[str, Any] = {
        "input_ids": torch.empty(rows, length, dtype=torch.int64, device=META),
        "use_cache": False,
    }
    if attention in MASKED and (padded or attention == "eager") and not recipe.learnable.router:
        dtype = torch.bool if attention == "sdpa" else TORCH_DTYPES[recipe.model.dtype]
        inputs["attention_mask"] = torch.empty(rows, 1, length, length, dtype=dtype, device=META)
    else:
        inputs["position_ids"] = torch.arange(length).expand(rows, -1)
    return inputs


def _balance_routing(model: nn.Module) -> None:
    """Make routers distribute tokens evenly, with real index tensors: the number of an expert's tokens determines
    shapes."""

    def route(module: ExpertMLPs, arguments: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, chosen, weights = arguments
        balanced = torch.arange(chosen.numel()).remainder(module.num_experts).view(chosen.shape)
        return hidden, balanced, weights

    for module in model.modules():
        if isinstance(module, ExpertMLPs):
            module.register_forward_pre_hook(route)


class _Attention(torch.autograd.Function):
    """Attention that allocates and saves the same memory as fused attention: operands, output and one logsumexp per
    query (Dao et al. 2022, arXiv:2205.14135). torch has no fused kernel for meta tensors, and unfused attention would
    allocate [T, T] weights."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, tokens, _ = query.shape
        # The layer's next operator reads this memory layout without a copy.
        output = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, mask, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


class ScaledDotProductFlashAttention(_Attention):
    """Attention on the meta device. Its autograd node has the same name as the node of torch's flash attention, because
    :mod:`quant.inputs` recognizes attention by this name."""


def _attention_on_meta(
    function: type[_Attention],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers calls it, with the same copies as transformers' own function for sdpa. With a
    mask, transformers repeats keys and values for their query heads, and converts a boolean mask to an additive one in
    each layer."""
    if attention_mask is not None:
        groups = getattr(module, "num_key_value_groups", 1)
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        if attention_mask.dtype == torch.bool:
            attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype)
    return function.apply(query, key, value, attention_mask).transpose(1, 2).contiguous(), None


def _mask_on_meta(batch_size: int, q_length: int, kv_length: int, *, packing: bool, **_: Any) -> Tensor | None:
    """Create the mask that transformers creates for sdpa; None for a single row without packing."""
    if batch_size == 1 and not packing:
        return None
    return torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=META)


def attention_on_meta(implementation: str, packing: bool | None = None) -> str:
    """Register a counterpart of an attention implementation of transformers for the meta device, and return its name;
    ``eager`` needs none and is returned unchanged. With ``packing`` (of the rows) other than None, the model makes its
    masks itself."""
    if implementation == "eager":  # consists of operators that the meta device supports
        return implementation
    known = implementation in IN_GRAPH
    name = "deepqat_on_meta" if known else "deepqat_on_meta_unknown"
    masks = AttentionMaskInterface()["sdpa"]
    if packing is not None:
        name, masks = f"{name}_{'packed' if packing else 'padded'}", partial(_mask_on_meta, packing=packing)
    AttentionInterface.register(
        name, partial(_attention_on_meta, ScaledDotProductFlashAttention if known else _Attention)
    )
    AttentionMaskInterface.register(name, masks)
    return name
