"""Launches, products and host waits of quantized layers, counted on the meta device: no pass is added unseen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from model.moe.arrange import arrange_experts
from quant import SCHEMES, replace_layers
from quant.fused import fuse
from quant.packed_weight import placeholder
from tests.lib.counting import Counting

META, TOKENS = torch.device("meta"), 64
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 1, "vocab_size": 128}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 4}
# Forward and backward of a Linear whose scales train: operands that are quantized, GEMMs, and masks of gradients.
LAUNCHES = dict.fromkeys(("w4a16_g32", "w8a16_channel", "w4a16_asym", "nvfp4", "mxfp4"), (2, 4))
LAUNCHES |= dict.fromkeys(("fp8_static", "w8a8_static", "fp8_dynamic", "int8_dynamic", "8da4w"), (3, 5))
LAUNCHES |= dict.fromkeys(("nvfp4_w4a4", "mxfp4_w4a4", "mxfp4_mxfp8", "mxfp8"), (3, 5)) | {"fp8_block": (5, 12)}


def quantize(
    model: nn.Module, scheme: str | None, *, learn=True, codes=False, fused=False, decoupled=False, **compute: Any
) -> None:
    """Prepare a model on the meta device; ``codes``: codes in place of weights, as stage 3 gathers them."""
    if scheme is None:
        return
    quantization = replace_layers(model, SCHEMES[scheme], learn_weight_scale=learn, learn_input_scale=False, **compute)
    if fused:
        fuse(model)
    if decoupled:
        quantization.decouple_scales()
    for layer in quantization.layers.values() if codes else ():
        weight = layer.weight
        layer.known_weight_scale = torch.empty_like(layer.weight_s0)
        weight.data = placeholder(weight.new_empty(weight.shape, dtype=torch.uint8), weight.shape, weight.dtype)


def linear(scheme: str | None, **ways: Any) -> nn.Module:
    """A Linear of [512, 256]."""
    model = nn.ModuleDict({"up_proj": nn.Linear(256, 512, False, dtype=torch.bfloat16, device=META)})
    quantize(model, scheme, **ways)
    return model["up_proj"]


def decoder_layer(scheme: str | None, *, experts: bool = False, **ways: Any) -> Callable[[Tensor], Tensor]:
    """A decoder layer as a function of its input ``[1, tokens, hidden]``."""
    config = Qwen3MoeConfig(**SIZES, **EXPERTS) if experts else Qwen3Config(**SIZES)
    with META:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    arrange_experts(model, "stacked")
    quantize(model, scheme, **ways)
    angles = torch.empty(1, TOKENS, 64, dtype=torch.bfloat16, device=META)
    return lambda x: model.model.layers[0](x, position_embeddings=(angles, angles), attention_mask=None)


def counted(forward: Callable[[Tensor], Tensor], *, recomputed: bool = False) -> tuple[Counting, Counting]:
    """Count a forward, and its backward."""
    x = torch.empty(1, TOKENS, 256, dtype=torch.bfloat16, device=META, requires_grad=True)
    with Counting() as there:
        output = checkpoint(forward, x, use_reentrant=False) if recomputed else forward(x)
    with Counting() as back:
        output.backward(torch.empty_like(output))
    return there, back


def launches(parts: tuple[Counting, Counting]) -> tuple[int, ...]:
    return tuple(part.launches.total() for part in parts)


@pytest.mark.parametrize("scheme", LAUNCHES)
def test_launches_of_a_quantized_linear(scheme):
    assert launches(counted(linear(scheme))) == LAUNCHES[scheme]
    assert launches(counted(linear(None))) == (1, 2)


@pytest.mark.parametrize("scheme", ["w4a16_g32", "w8a16_channel", "w4a16_asym", "nvfp4_w4a4", "mxfp4_w4a4"])
def test_launches_of_decoupled_scales(scheme):
    """In each direction the weight is multiplied once; back, its products with the gradient are summed. The gradient
    of a frozen weight is not computed."""
    forward, backward = LAUNCHES[scheme]
    for trains in (False, True):
        layer = linear(scheme, decoupled=True)
        layer.weight.requires_grad_(trains)
        there, back = counted(layer)
        assert launches((there, back)) == (forward + 1, backward + 2 + trains)
        assert (there.launches["multiply_runs"], back.launches["multiply_runs"]) == (1, 1 + trains)
        assert back.launches["sum_products"] == 1


@pytest.mark.parametrize("learn", [False, True])
def test_launches_of_codes_that_were_gathered(learn):
    """Quantize the input, multiply the codes; back: dequantize the weight (the launch also writes the zero that theta
    gets), dequantize the input while its gradient is masked, two GEMMs."""
    there, back = counted(linear("fp8_static", learn=learn, fp8_gemm=True, codes=True))
    assert launches((there, back)) == (2, 4)
    assert back.launches["dequantize"] == 1 and back.launches["zeros_like"] == 0


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_launches_and_products_of_the_gemm_of_codes(learn, fast):
    """Forward in fp8 by the sums that were asked for, gradients in bf16; the codes' launch forms the scale too."""
    there, back = counted(linear("fp8_static", learn=learn, fp8_gemm=True, fast_accum=fast))
    assert launches((there, back)) == (3, 5)
    assert there.launches["quantize"] == 2 and not there.launches["effective_scale"]
    once = 2 * TOKENS * 256 * 512
    assert there.products == {"fp8, fast sums" if fast else "fp8": once} and back.products == {"bf16": 2 * once}


@pytest.mark.parametrize("fp8_gemm", [False, True])
def test_experts_multiply_the_rows_that_tokens_chose(fp8_gemm):
    """No more products than in bf16, and in fp8 those of all quantized layers. torch checks shapes, strides and dtypes
    on the meta device too."""
    plain, ours = (
        counted(decoder_layer(scheme, experts=True, **ways))
        for scheme, ways in ((None, {}), ("fp8_static", {"fp8_gemm": fp8_gemm}))
    )
    assert ours[1].products == plain[1].products and ours[0].products.total() == plain[0].products.total()
    weights = 256 * (256 + 128 + 128 + 256) + 4 * 3 * 256 * 64  # of attention, and of the chosen experts
    assert ours[0].products["fp8, fast sums"] == (2 * TOKENS * weights if fp8_gemm else 0)
    assert not any(one.waits for one in (*plain, *ours))


@pytest.mark.parametrize("codes", [False, True])
def test_launches_of_the_quantized_linears_of_a_layer(codes):
    """Seven of them, which share three of their seven inputs."""
    ours = ("quantize", "effective_scale", "dequantize", "dequantize_and_mask_", "masked_", "fake_quantize")
    parts = counted(decoder_layer("fp8_static", learn=False, fp8_gemm=True, codes=codes))
    there, back = (sum(part.launches[name] for name in ours) for part in parts)
    assert there <= (4 if codes else 18) and back <= 14
    assert parts[1].launches["dequantize_and_mask_"] == 4 and parts[1].launches["masked_"] == 3


def test_norms_and_swiglu_that_write_codes_save_launches():
    """Attention's output alone is quantized by itself."""
    ways = {"scheme": "fp8_static", "fp8_gemm": True, "codes": True}
    plain, fused = (counted(decoder_layer(**ways, fused=one)) for one in (False, True))
    assert all(less <= more - 18 for less, more in zip(launches(fused), launches(plain), strict=True))
    assert fused[0].launches["quantize"] == 1 and fused[1].launches["masked_"] == 0
    assert fused[0].launches["rms_norm_quantize"] == 2 and fused[1].launches["rms_norm_backward"] == 2


def test_recomputing_a_layer_stops_before_its_last_product_and_nothing_waits():
    """As in bf16: all that backward keeps is there again by then. An operator that the host waits for has no result on
    the meta device: most fail there, the others are counted."""
    products = set()
    for scheme in (None, "fp8_static", "w4a16_g32", "8da4w", "fp8_block"):
        for ways in ({}, {"fp8_gemm": True}) if scheme == "fp8_static" else ({},):
            parts = counted(decoder_layer(scheme, **ways), recomputed=True)
            assert not any(part.waits for part in parts), scheme
            products.add(sum(part.products.total() for part in parts))
    assert len(products) == 1
