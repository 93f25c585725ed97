"""Tensors that fused attention keeps on a GPU, in nodes that layers recognize (quant.keep_codes)."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from quant.inputs import kept_by_attention

BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda one: one.name)
def test_the_output_is_kept_and_shown_without_a_copy(backend):
    """As transformers hands it to o_proj. Where a kernel gives out another layout, the copy is no view: its codes are
    kept, and this says so."""
    made = (torch.randn(2, 128, 8, 64, device="cuda").bfloat16().requires_grad_().transpose(1, 2) for _ in range(3))
    try:
        with sdpa_kernel(backend):
            output = F.scaled_dot_product_attention(*made, is_causal=True)
    except RuntimeError as error:
        pytest.skip(f"{backend.name} is not there: {error}")
    x = output.transpose(1, 2).contiguous().reshape(2, 128, -1).contiguous()
    saved = output.grad_fn._raw_saved_output.data
    assert saved.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
    assert kept_by_attention(output)
    assert kept_by_attention(x), "the layout of its output is not the one that transformers asks for"
    assert x.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
