"""Weights of checkpoints in every format that is read, held as codes: against the same checkpoints, decoded."""

import random
from pathlib import Path

import pytest
import torch

from model.build import build_model
from model.checkpoint.load import load_weights
from model.quantized.checkpoint import source_schemes
from model.quantized.scales import take_scales
from model.save import export_model
from model.scales import renew_weight_scales
from quant import SCHEMES, Quantization, prepare
from quant.packed_weight import store_packed
from quant.rules import schemes_of_layers
from tests.lib.tiny import tiny_checkpoint
from tests.unit.model.quantized import test_gptq_awq as test_columns
from tests.unit.model.quantized import test_modelopt
from tests.unit.model.quantized import test_mxfp4_experts as test_blocks

pytestmark = pytest.mark.usefixtures("seed")


def loaded(directory: Path, *, held: bool, dtype: torch.dtype, experts: str = "stacked") -> Quantization:
    """The layers of a quantized checkpoint in its own schemes, as the adapters' base that it would be."""

    def hold(model: torch.nn.Module) -> None:
        modules = dict(model.named_modules())
        for name, scheme in schemes_of_layers(source_schemes(model, directory), modules).items():
            store_packed(modules[name], scheme.weights, tuple(modules[name].weight.shape))

    engine = {"bf16": {"enabled": dtype == torch.bfloat16}, "fp16": {"enabled": dtype == torch.float16}}
    options = {"dtype": dtype, "device": torch.device("cpu"), "experts": experts}
    model = build_model(directory, engine, hold=hold if held else None, **options)
    load_weights(model, directory, progress=False)
    learn = {"learn_weight_scale": False, "learn_input_scale": False}
    quantization = prepare(model, None, named=source_schemes(model, directory), **learn)
    take_scales(model, quantization, directory, inputs_calibrated_later=True)
    return quantization


def exported(directory: Path, kind: str, scheme: str) -> Path:
    source = tiny_checkpoint(directory / "source", kind, seed=random.randrange(2**31), wide=True)
    model = build_model(source, {"bf16": {"enabled": True}}, dtype=torch.bfloat16, device=torch.device("cpu"))
    load_weights(model, source, progress=False)
    quantization = prepare(model, SCHEMES[scheme], learn_weight_scale=False, learn_input_scale=False)
    renew_weight_scales(quantization)
    for group in quantization.input_groups:
        group.s0.data.fill_(0.01)
    export_model(model, quantization, source, directory / "export", layout="vllm_fp8" if "fp8" in scheme else None)
    return directory / "export"


FORMATS = {
    "mxfp4 of gpt-oss": test_blocks.published,
    "fp8 of ModelOpt": lambda path, seed: test_modelopt.written(path, "fp8_static", inside=True)[1],
    "fp8 of vLLM": lambda path, seed: exported(path, "qwen3_moe", "fp8_static"),
    "blocks of DeepSeek": lambda path, seed: exported(path, "qwen3_moe", "fp8_block"),
}


def assert_the_same(plain: Quantization, held: Quantization) -> None:
    """What every layer multiplies, and its output for a stack of experts too, bit for bit."""
    assert plain.layers.keys() == held.layers.keys()
    for name, layer in held.layers.items():
        own = plain.layers[name]
        assert layer.held is not None and layer.weight.nbytes < own.weight.nbytes, name
        assert torch.equal(own.weight, layer.merged_weight()), name
        assert torch.equal(own.quantized_weight(), layer.quantized_weight()), name
        rows = torch.randn(4, layer.in_features, dtype=layer.weight.dtype)
        many = layer.num_experts
        offsets = torch.arange(4 - many + 1, 5, dtype=torch.int32).clamp(min=0) if many else None
        with torch.no_grad():
            assert torch.equal(own(rows, offsets), layer(rows, offsets)), name


@pytest.mark.parametrize("experts", ["stacked", "per_expert"])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_held_as_it_is_decoded(tmp_path, seed, kind, experts):
    source = FORMATS[kind](tmp_path, seed)
    plain, held = (loaded(source, held=one, dtype=torch.bfloat16, experts=experts) for one in (False, True))
    assert_the_same(plain, held)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gptq_is_held_as_it_is_decoded(tmp_path, dtype):
    """Whose matrices lie turned, with zero points."""
    source, _ = test_columns.gptq_checkpoint(tmp_path)
    plain, held = (loaded(source, held=one, dtype=dtype) for one in (False, True))
    assert_the_same(plain, held)
