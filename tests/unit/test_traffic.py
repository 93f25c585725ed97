"""What a quantized layer costs a GPU in launches and bytes, counted: nobody adds a pass unseen."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.traffic import META, QWEN3_8B, Traffic, counted, decoder_layer, quant_linear
from data.loader import on_device
from data.samples import IGNORE
from engine.faults import nan_unless_finite
from engine.losses.chunked import _adds_in_fp32, chunked_losses
from engine.losses.objective import Objective, tokens_at_a_time
from model.head import install_head
from quant import SCHEMES, prepare

TOKENS = 1024
IN, OUT = QWEN3_8B["hidden_size"], QWEN3_8B["intermediate_size"]
# Forward and backward of a Linear whose scales train: operands that are quantized, GEMMs, and what masks a gradient.
LAUNCHES = dict.fromkeys(("w4a16_g32", "w8a16_channel", "w4a16_asym", "nvfp4", "mxfp4"), (2, 4))
LAUNCHES |= dict.fromkeys(("fp8_static", "w8a8_static", "fp8_dynamic", "int8_dynamic", "8da4w"), (3, 5))
LAUNCHES |= dict.fromkeys(("nvfp4_w4a4", "mxfp4_w4a4", "mxfp4_mxfp8", "mxfp8"), (3, 5)) | {"fp8_block": (5, 12)}
# Beside its GEMMs, per element of the weight and of the input, forward and backward together.
MOST_BYTES = {"fp8_static": (14.01, 8.25), "w4a16_g32": (14.7, 0)}


def elementwise_bytes(traffics) -> float:
    return sum(count for one in traffics for name, count in one.bytes.items() if "mm" not in name)


@pytest.mark.parametrize("scheme", LAUNCHES)
def test_launches_of_a_quantized_linear(scheme: str):
    found = tuple(one.launches.total() for one in counted(quant_linear(scheme, OUT), TOKENS))
    assert found == LAUNCHES[scheme]
    plain = counted(quant_linear(None, OUT), TOKENS)
    assert [one.launches.total() for one in plain] == [1, 2]


@pytest.mark.parametrize("scheme", MOST_BYTES)
def test_bytes_of_a_quantized_linear(scheme: str):
    of_weight, of_input = MOST_BYTES[scheme]
    few, many = (elementwise_bytes(counted(quant_linear(scheme, OUT), tokens)) for tokens in (TOKENS, 2 * TOKENS))
    per_input = (many - few) / (TOKENS * IN)
    assert per_input <= of_input
    assert (few - per_input * TOKENS * IN) / (IN * OUT) <= of_weight


@pytest.mark.parametrize("learn", [False, True])
def test_launches_and_bytes_of_codes_that_were_gathered(learn: bool):
    """2 + 4, the goal: the input is quantized, the codes are multiplied; the weight is dequantized, the input too while
    its gradient is masked, two GEMMs. The first of these gives a theta, whose gradient whoever has the weight makes, a
    zero."""
    layer = quant_linear("fp8_static", OUT, learn=learn, fp8_gemm=True, codes=True)
    there, back = counted(layer, TOKENS)
    assert there.launches.total() == 2 and back.launches.total() == 4
    assert back.launches["dequantize_with_zeros"] == learn and back.launches["zeros_like"] == 0
    assert elementwise_bytes([there]) <= 3.13 * TOKENS * IN
    assert elementwise_bytes([back]) <= 3.01 * IN * OUT + 3.13 * TOKENS * IN


@pytest.mark.parametrize("learn", [False, True])
def test_launches_of_the_gemm_of_codes(learn: bool):
    """Both operands are quantized, the weight's scale formed beside its codes; in backward it is quantized again, and
    its gradient masked while the sum for theta is taken."""
    there, back = counted(quant_linear("fp8_static", OUT, learn=learn, fp8_gemm=True), TOKENS)
    assert (there.launches.total(), back.launches.total()) == (3, 5)
    assert there.launches["quantize_with_scale"] == learn and not there.launches["effective_scale"]


@pytest.mark.parametrize("scheme", ["8da4w", "fp8_dynamic", "mxfp8"])
def test_bytes_of_dynamic_inputs(scheme: str):
    """Values are made from the input, read once, while its gradient is masked where something was clipped."""
    there, back = counted(quant_linear(scheme, OUT), TOKENS)
    assert there.bytes["fake_quantized_tokens"] <= 4 * TOKENS * IN + 64
    assert back.bytes["fake_quantize_tokens_and_mask_"] <= 4 * TOKENS * IN + 64


def test_sums_of_more_runs_than_are_counted_take_a_second_launch():
    for rows, most in ((1024, 1), (1025, 2)):
        x, s0 = torch.empty(rows, 16385, device=META), torch.empty(rows, 1, device=META)
        with Traffic() as traffic:
            torch.ops.deepqat.fake_quantize_backward_(x, x.clone(), s0, s0.clone(), 8, torch.float32, 1.0, True)
        assert traffic.launches["fake_quantize_backward_"] == most


@pytest.mark.parametrize("fp8_gemm", [False, True])
def test_a_layer_with_experts(fp8_gemm: bool):
    """No host waits, as many operations as in bf16: all experts' rows together are those that tokens chose."""
    plain, ours = (
        counted(decoder_layer(scheme, experts=True, **way), TOKENS, hidden=2048)
        for scheme, way in ((None, {}), ("fp8_static", {"fp8_gemm": fp8_gemm}))
    )
    rows, width = 8 * TOKENS, 3 * 2048 * 768
    assert plain[0].operations["bf16"] == 2 * TOKENS * 2048 * (128 * (2 * 32 + 2 * 4) + 128) + 2 * rows * width
    assert plain[1].operations["bf16"] == 2 * plain[0].operations["bf16"]
    assert not any(one.waits for one in (*plain, *ours))
    assert ours[1].operations == plain[1].operations
    assert [one.launches.total() for one in ours] == [123 if fp8_gemm else 87, 136]


def test_launches_of_the_quantized_linears_of_a_layer():
    """Seven of them, which share three of their seven inputs, beside 7 + 14 GEMMs; and the bytes of sharing."""
    ours = ("quantize", "effective_scale", "dequantize", "dequantize_and_mask_", "masked_", "fake_quantized")
    for codes, most in ((False, (11 + 7, 7 + 7)), (True, (4, 7 + 7))):
        parts = counted(decoder_layer("fp8_static", learn=False, fp8_gemm=True, codes=codes), TOKENS)
        assert tuple(sum(part.launches[name] for name in ours) for part in parts) <= most
        assert parts[1].launches["dequantize_and_mask_"] == 4 and parts[1].launches["masked_"] == 3


def test_launches_and_bytes_of_norms_and_swiglu_that_write_codes():
    """Of a layer with two norms and a SwiGLU; elements are read once, and written as a code and a bit."""
    ways = {"scheme": "fp8_static", "fp8_gemm": True, "codes": True}
    plain, fused = (counted(decoder_layer(**ways, fused=one), TOKENS) for one in (False, True))
    there, back = fused
    assert there.launches.total() == 40 and back.launches.total() == 87  # 58 and 120 otherwise
    assert there.launches["quantize"] == 1 and back.launches["masked_"] == 0  # attention's output is left
    assert there.launches["rms_norm_quantize"] == 2 and back.launches["rms_norm_backward"] == 4  # two sums of weights
    assert there.bytes["rms_norm_quantize"] <= 2 * (3 + 1 / 8 + 0.01) * TOKENS * IN
    assert back.bytes["rms_norm_backward"] <= 2 * (6 + 1 / 8 + 1 / 4 + 0.02) * TOKENS * IN
    assert there.bytes["silu_mul_quantize"] <= (5 + 1 / 8) * TOKENS * OUT + 64
    assert back.bytes["silu_mul_backward"] <= (10 + 1 / 8) * TOKENS * OUT + 64
    assert elementwise_bytes(fused) <= 0.65 * elementwise_bytes(plain)
    assert not there.waits and not back.waits


def test_gradients_of_fixed_scales_are_touched_where_something_was_clipped():
    _, back = counted(quant_linear("fp8_static", OUT, learn=False), TOKENS)
    assert back.bytes["dequantize_and_mask_"] <= (3 + 1 / 8) * TOKENS * IN + 64
    assert back.bytes["fake_quantize_backward_"] <= 2.01 * IN * OUT


def test_the_codes_are_multiplied_in_fp8_and_gradients_in_bf16():
    for fast, name in ((True, "fp8, fast sums"), (False, "fp8")):
        there, back = counted(quant_linear("fp8_static", OUT, fp8_gemm=True, fast_accum=fast), TOKENS)
        assert there.operations == {name: 2 * TOKENS * IN * OUT} and back.operations == {"bf16": 4 * TOKENS * IN * OUT}
        assert there.launches.total() == 3


@pytest.mark.parametrize("fp8_gemm", [False, True])
def test_recomputing_a_layer_stops_before_its_last_product(fp8_gemm: bool):
    """As in bf16: all that backward keeps is there again by then."""
    ways = {"fp8_static": {"scheme": "fp8_static", "fp8_gemm": fp8_gemm}, "w4a16_g32": {"scheme": "w4a16_g32"}}
    products = {
        name: sum(sum(one.operations.values()) for one in counted(decoder_layer(**way), TOKENS, checkpointed=True))
        for name, way in ({"bf16": {"scheme": None}} | ways).items()
    }
    assert products["bf16"] > 0 and len(set(products.values())) == 1


@pytest.mark.parametrize("scheme", ["fp8_static", "w4a16_g32", "8da4w", "fp8_block"])
def test_no_host_waits_inside_a_layer(scheme: str):
    """An operator that the host waits for has no result on the meta device: most fail there, the others are counted."""
    for traffic in counted(decoder_layer(scheme), 64, checkpointed=True):
        assert not traffic.waits


@pytest.mark.parametrize("scheme", ["fp8_static", "w4a16_g32", "8da4w"])
def test_no_host_waits_inside_a_micro_batch(scheme: str):
    """A whole model, from the batch to its gradients, losses in two chunks; on the meta device, as above.

    Attention asks for no mask here: transformers, which makes one, asks the device once per forward whether it must.
    """
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = Qwen3Config(vocab_size=64, num_hidden_layers=2, hidden_size=64, intermediate_size=128, **heads)
    with META:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="counted")
    prepare(model, SCHEMES[scheme], learn_weight_scale=True, learn_input_scale=False)
    head = install_head(model)
    batch = {"input_ids": torch.ones(2, 32, dtype=torch.int64), "labels": torch.arange(64).view(2, 32) % 3 - 1}
    batch["labels"][batch["labels"] == -1] = IGNORE
    given = {name: tensor.to(META) for name, tensor in on_device(batch, torch.device("cpu")).items()}

    def losses(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        positions = given["positions"]
        return chunked_losses(
            hidden, weight, bias, given["labels"], objective=Objective(chunk_tokens=32), positions=positions
        ).total

    with Traffic() as traffic, head.computing(losses):
        nan_unless_finite(model(given["input_ids"], use_cache=False).logits).backward()
    assert not traffic.waits and all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_the_counter_counts():
    x = torch.randn(4, 8, requires_grad=True)
    with Traffic() as traffic:
        y = (x.t().reshape(-1)[::2].exp() * 2).sum()
        y.add_(1)
        torch.addmm(torch.zeros(3), torch.zeros(4, 8), torch.zeros(8, 3).expand(8, 3))
        y.item()
    assert traffic.waits == {"_local_scalar_dense": 1}
    assert traffic.launches["exp"] == traffic.launches["sum"] == traffic.launches["add_"] == 1
    assert traffic.launches["t"] == traffic.launches["expand"] == 0
    assert traffic.bytes["exp"] == 2 * 16 * 4 and traffic.bytes["add_"] == 8
    assert traffic.operations == {"bf16": 2 * 4 * 8 * 3}


def test_the_gradient_of_lm_head_is_one_gemm_for_each_chunk():
    """Added to an fp32 sum, as CUDA does it; on the meta device, whose operator torch 2.11 has wrong."""
    if not _adds_in_fp32(META):
        pytest.skip("the meta device of this torch does not have CUDA's operator")
    size, tokens, vocabulary = 2048, 300, 2**14  # many slices of the kind that a CPU adds up
    make = {"dtype": torch.bfloat16, "device": META, "requires_grad": True}
    hidden, weight = torch.empty(1, tokens, size, **make), torch.empty(vocabulary, size, **make)
    labels, positions = torch.zeros(1, tokens, dtype=torch.int64, device=META), torch.arange(tokens, device=META)
    objective = Objective(chunk_tokens=100)
    chunked_losses(hidden, weight, None, labels, objective=objective, positions=positions)
    with Traffic() as traffic:
        chunked_losses(hidden, weight, None, labels, objective=objective, positions=positions)
    # Of each chunk the logits, the gradient of its rows and that of the weight.
    assert traffic.launches["mm"] == 2 * 3 and traffic.launches["addmm"] == 3
    assert not traffic.waits


@pytest.mark.parametrize(("device", "tokens"), [("cpu", 512), ("cuda", 4096), ("meta", 4096)])
def test_chunks_are_larger_on_a_gpu(device: str, tokens: int):
    assert tokens_at_a_time(None, torch.device(device)) == tokens
    assert tokens_at_a_time(7, torch.device(device)) == 7
