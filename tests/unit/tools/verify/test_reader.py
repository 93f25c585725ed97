"""Inputs as transformers quantizes them, and checkpoints that compressed-tensors itself writes."""

from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import nn

from quant.reference import fake_quantize_tokens
from quant.spec import SCHEMES
from tests.lib.tiny import tiny_model, tiny_tokenizer
from tools.compressed import load_compressed
from tools.verify.check import compare_with_transformers, fake_quantizer


@pytest.mark.parametrize("name", ["fp8_dynamic", "fp8_block", "int8_dynamic", "8da4w"])
def test_dynamic_inputs_are_the_same_but_for_boundaries(name, seed):
    """All but a few in ten thousand values are equal, and the others are one code apart.

    Measured over 200 seeds: at most 7e-4, of symmetric int8, where the largest value of a token is on a boundary.
    """
    spec = SCHEMES[name].activations
    x = torch.randn(2, 64, 256)
    ours = fake_quantize_tokens(x, spec)
    step = x.abs().amax(-1, keepdim=True) / (13.9 if spec.dtype == "fp8_e4m3" else 120)
    theirs = fake_quantizer(spec, None)(nn.Module(), (x,))[0]
    assert (theirs != ours).float().mean() < 3e-3
    assert ((theirs - ours).abs() <= step).all()


def written_by_compressed_tensors(directory: Path, preset: str) -> None:
    """A tiny model, quantized, compressed and saved by the library, with scales from the weights' ranges."""
    model = tiny_model("qwen3", seed=3, wide=True, dtype=torch.bfloat16)
    config = QuantizationConfig(config_groups={preset: ["Linear"]}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        args, weight = scheme.weights, module.weight.data
        rows, columns = weight.shape
        view = {
            "channel": (rows, 1, 1, columns),
            "group": (rows, 1, -1, args.group_size or 1),
            "tensor_group": (rows, 1, -1, args.group_size or 1),
            "block": (rows // 128, 128, columns // 128, 128),
        }[args.strategy]
        blocks = weight.view(view)
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        if args.strategy == "tensor_group":
            module.weight_global_scale.data.copy_(generate_gparam(weight.min(), weight.max()))
        scale, _ = calculate_qparams(low, high, args, getattr(module, "weight_global_scale", None))
        module.weight_scale.data = scale
        module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(directory)
    compressor.update_config(directory)
    tiny_tokenizer().save_pretrained(directory)


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("FP8_DYNAMIC", "fp8_dynamic"),
        ("FP8_BLOCK", "fp8_block"),
        ("W8A8", "int8_dynamic"),
        ("W4A16", "w4a16_g128"),
        ("MXFP4A16", "mxfp4"),
        ("NVFP4A16", "nvfp4"),
    ],
)
def test_checkpoints_of_compressed_tensors_are_read(preset, name, tmp_path):
    """By its own config and in its own tensors, with the logits that transformers computes."""
    written_by_compressed_tensors(tmp_path, preset)
    _, quantization = load_compressed(tmp_path)
    assert {layer.scheme for layer in quantization.layers.values()} == {SCHEMES[name]}
    report = compare_with_transformers(tmp_path, [torch.randint(0, 301, (2, 33))])
    assert report.logits["same arithmetic"].relative_max < 1e-5, report.table()
