"""Whether an input is kept for backward anyway, because fused attention made it and keeps its own output.

A layer that keeps codes for its backward does so to free what they were made of. Of o_proj's input that frees nothing:
it is a view of what fused attention gave out, and attention's backward wants that output, beside queries, keys and
values. Codes would then be bytes on top. So such an input is kept itself, which takes none, and quantised again in
backward, which gives the bits that the codes stand for.

The graph says it: behind an input that shows attention's output as it lies there are nodes of views, and then
attention's node. Whatever computes (a gate, a cast, a copy in another layout, a rotation) has a node of its own, and
codes are kept. Eager attention is no such node: its last product keeps what it multiplied, not what it gave out.

A wrong answer would cost bytes, never bits. The input shares attention's version counter, so that a write to either
between forward and backward is an error there.
"""

import torch
from torch import Tensor

# Nodes of operators whose output shows the memory, and counts the writes, of their one input. _unsafe_view is none of
# them: it counts writes of its own.
VIEWS = frozenset({"Alias", "Permute", "ReshapeAlias", "Slice", "Squeeze", "T", "Transpose", "Unsqueeze", "View"})
# Nodes whose backward asks for their output: torch's (tools/autograd/derivatives.yaml of 2.11 to 2.13, in which each of
# these formulas has `output`), and flash-attn's (flash_attn_interface.py, save_for_backward of out_padded).
ATTENTION = frozenset(
    {
        "ScaledDotProductFlashAttentionForCpu",
        "ScaledDotProductFlashAttention",
        "ScaledDotProductEfficientAttention",
        "ScaledDotProductCudnnAttention",
        "ScaledDotProductFusedAttentionOverrideable",
        "FlashAttentionForward",
        "EfficientAttentionForward",
        "CudnnAttentionForward",
        "FlashAttnFunc",
        "FlashAttnVarlenFunc",
    }
)


def kept_by_attention(x: Tensor, aliases: frozenset[str] = frozenset()) -> bool:
    """Whether ``x`` shows the memory of an output that fused attention keeps for its own backward.

    Args:
        x: a layer's input, as autograd knows it.
        aliases: names of autograd Functions around modules whose output shows the memory of their one input, and counts
            its writes. Nothing says that of a Function but its author.

    Returns:
        False also under ``torch.compile``, which has no graph yet to look at.
    """
    if torch.compiler.is_compiling():
        return False
    node = x.grad_fn
    while node is not None:
        kind = node.name().rstrip("0123456789").removesuffix("Backward")
        if kind not in VIEWS and kind not in aliases:
            return kind in ATTENTION
        node = node.next_functions[0][0]
    return False
