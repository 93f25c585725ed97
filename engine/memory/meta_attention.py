"""Attention on the meta device that allocates what a fused kernel allocates.

torch chooses an attention kernel by the device and has no fused one for meta tensors: it would take the unfused form,
with [T, T] weights that no GPU keeps. The one here makes the tensors that fused kernels make, in forward and backward.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import AttentionMaskInterface

NAME = "deepqat_on_meta"
# Implementations whose output layers know in the graph (:mod:`quant.inputs`).
KNOWN = ("sdpa", "flash_attention_2", "flash_attention_3")


class _Attention(torch.autograd.Function):
    """Saves operands, output and one logsumexp per query for backward (Dao et al. 2022, arXiv:2205.14135)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, tokens, _ = query.shape
        # The memory layout is the one that the layer's next operator reads without a copy.
        output = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, mask, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


class ScaledDotProductFlashAttention(_Attention):
    """The same, whose node in the graph has the name by which layers know torch's."""


def _attention(
    function: type[_Attention],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls. It makes the copies that transformers' own function for sdpa makes.

    With a mask, keys and values are copied for each of their query heads, and a boolean mask is turned into one that is
    added, once per layer.
    """
    if attention_mask is not None:
        groups = getattr(module, "num_key_value_groups", 1)
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        if attention_mask.dtype == torch.bool:
            attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype)
    return function.apply(query, key, value, attention_mask).transpose(1, 2).contiguous(), None


def attention_on_meta(implementation: str) -> str:
    """Register an implementation that stands in for one of transformers' on the meta device; return its name."""
    if implementation == "eager":  # it consists of operators that the meta device has
        return implementation
    known = implementation in KNOWN
    name = NAME if known else f"{NAME}_unknown"
    function = ScaledDotProductFlashAttention if known else _Attention
    AttentionInterface.register(name, partial(_attention, function))
    AttentionMaskInterface.register(name, AttentionMaskInterface()["sdpa"])
    return name
