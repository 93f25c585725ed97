"""Attention on the meta device, as fused kernels keep it.

torch chooses a kernel by the device, and has none for meta tensors: its unfused form would stand for all, with [T, T]
weights that no GPU keeps. So here is one whose forward and backward make what fused kernels make.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import AttentionMaskInterface

NAME = "deepqat_on_meta"


class _Attention(torch.autograd.Function):
    """Kept are operands, output and a logsumexp per query (Dao et al. 2022, arXiv:2205.14135)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, tokens, _ = query.shape
        # Laid out as the layer's next operator reads it.
        output = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, mask, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """What transformers calls, like its own for sdpa: with a mask keys and values are copied for each of their queries,
    and torch makes of a boolean mask one that is added, in every layer."""
    if attention_mask is not None:
        groups = getattr(module, "num_key_value_groups", 1)
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        if attention_mask.dtype == torch.bool:
            attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype)
    return _Attention.apply(query, key, value, attention_mask).transpose(1, 2).contiguous(), None


def attention_on_meta(implementation: str) -> str:
    """The name of what stands for an attention implementation of transformers on the meta device."""
    if implementation == "eager":  # operators of torch like all others
        return implementation
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])
    return NAME
