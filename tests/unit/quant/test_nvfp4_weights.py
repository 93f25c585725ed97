"""NVFP4 weights beside compressed-tensors: global scales, scales of groups, values."""

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from quant import SCHEMES, kernels
from quant.formats.config import quantization_args
from quant.reference import absmax_scale, fake_quant, global_scale, round_scale
from quant.scale import Quantizer, Scale

SPEC = SCHEMES["nvfp4_w4a4"].weights
ARGS = QuantizationArgs(**quantization_args(SPEC))


TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def test_a_million_weights_are_those_of_compressed_tensors(seed):
    """Scales bit for bit, and values but where ``w / s`` lies within a rounding of a tie: it divides by ``s``, training
    and vLLM multiply with the reciprocal. A group of zeros has another scale there, and zeros in both. Ties are rare
    among such weights, but where bf16 holds the largest one, whose global scale may be a short number such as 512."""
    w = torch.randn(4096, 256) * 10 ** torch.empty(4096, 16).uniform_(-3, 0).repeat_interleave(16, -1)
    w[::3] = w[::3].bfloat16().float()
    w[5, :16] = 0
    groups = w.unflatten(-1, (-1, 16))
    above = global_scale(w.abs().max(), SPEC).view(1)
    assert torch.equal(above, generate_gparam(w.min(), w.max()))
    codes, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), ARGS, global_scale=above)
    ours = round_scale(absmax_scale(groups.abs().amax(-1), SPEC), SPEC, above)
    filled = groups.abs().amax(-1) > 0
    assert filled.sum() == filled.numel() - 1
    assert torch.equal(ours[filled], (codes.float() / above)[filled])

    expected, found = fake_quantize(w, codes, zero, ARGS, above), fake_quant(w, ours, SPEC)
    v = (w / ours.repeat_interleave(16, -1)).abs()
    near = ((v.unsqueeze(-1) - TIES).abs() <= 2**-22 * TIES).any(-1)
    assert near.sum() < near.numel() // 100
    assert torch.equal(found[~near], expected[~near])
    quantizer = Quantizer(Scale(ours, None, above), SPEC, torch.float32)
    assert torch.equal(kernels.fake_quantize(w, quantizer), found)
    assert not found[5, :16].any()
