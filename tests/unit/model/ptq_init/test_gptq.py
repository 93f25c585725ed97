"""GPTQ through a model of one process: which inputs the codes are chosen by, and what becomes of the weights."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from model.ptq_init.layerwise import choose_initial_codes
from model.ranks import RankError
from model.scales.in_place import renew_weight_scales
from quant import Quantization, Quantizer, Scale, kernels
from quant.gemm import rotate
from quant.gptq import add_inputs, choose
from quant.linear import linears_of
from tests.families.variants import VARIANTS
from tests.lib.checkpoints import CPU, load_model, quantize
from tests.lib.linears import linears
from tests.lib.tiny import tiny_checkpoint


def quantized(directory: Path, kind: str, scheme: str, **options: object) -> tuple[nn.Module, Quantization]:
    source = directory / kind
    if not source.exists():
        size = "wide" if scheme == "w4a16_asym" else "even"  # in groups of 128
        tiny_checkpoint(source, kind, seed=random.randrange(2**31), **{size: True})
    model = load_model(source, **options)
    quantization = quantize(model, scheme, measure=False)
    renew_weight_scales(quantization)
    return model, quantization


def samples(model: nn.Module, count: int = 6) -> list[tuple[Tensor, bool]]:
    size = model.config.get_text_config().vocab_size
    return [(torch.randint(size, (1, random.randint(20, 40))), True) for _ in range(count)]


def by_hand(quantization: Quantization, name: str, inputs: list[tuple[Tensor, ...]]) -> Tensor:
    """The values of a layer's codes for these inputs."""
    layer = quantization.layers[name]
    moved = torch.empty_like(layer.weight)
    for part in linears_of(name, layer):
        gram = torch.zeros(layer.in_features, layer.in_features, dtype=torch.float64)
        for x, *offsets in inputs:
            x = x if layer.rotation is None else rotate(x, layer.rotation)
            ends = [0, *offsets[0].tolist()] if offsets else [0, x.flatten(0, -2).shape[0]]
            expert = part.expert or 0
            add_inputs(gram, x.flatten(0, -2)[ends[expert] : ends[expert + 1]])
        spec, weight = layer.scheme.weights, part.weight(layer.weight.detach())
        effective = part.scale(layer.weight_scale(), spec)
        quantizer = Quantizer(Scale(effective.contiguous()), spec, weight.dtype)
        codes, scale = choose(weight, quantizer, gram)
        part.weight(moved).copy_(kernels.dequantize(codes, quantizer._replace(scale=Scale(scale.contiguous()))))
    return moved


@torch.no_grad()
def inputs_of(model: nn.Module, layer: nn.Module, given: list[tuple[Tensor, bool]]) -> list[tuple[Tensor, ...]]:
    """The inputs of a layer in forwards of the whole model as it is now."""
    seen: list[tuple[Tensor, ...]] = []
    hook = layer.register_forward_pre_hook(lambda module, args: seen.append(args))
    for ids, _ in given:
        model(input_ids=ids, use_cache=False)
    hook.remove()
    return seen


@pytest.mark.parametrize(
    ("kind", "scheme"), [("qwen3", "w2a16_g32"), ("qwen3_moe", "w3a16_channel"), ("qwen3", "w8a8_static")]
)
def test_each_layer_is_chosen_by_what_the_quantized_ones_before_it_give(tmp_path, kind, scheme):
    """The model is quantized here by whole forwards, one layer after the other in the order of its data. Some turn
    their inputs first."""
    model, quantization = quantized(tmp_path, kind, scheme)
    other, expected = quantized(tmp_path, kind, scheme)
    for name in quantization.layers:
        if name.endswith("o_proj"):
            quantization.layers[name].rotation = expected.layers[name].rotation = 32
    given = samples(model)
    choose_initial_codes(model, quantization, given, CPU)
    assert all(layer.weight_fake_quant for layer in quantization.layers.values()) and model.training

    other.eval()
    order = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj"]
    names = sorted(expected.layers, key=lambda name: (name.split(".")[2], order.index(name.rpartition(".")[2])))
    together = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}  # these read one tensor
    expected.set_fake_quant(False, False)
    seen: dict[str, list[tuple[Tensor, ...]]] = {}
    done: list[str] = []
    for name in names:
        parent, _, leaf = name.rpartition(".")
        first = f"{parent}.{together.get(leaf, leaf)}"
        seen[name] = seen[first] if first != name else inputs_of(other, expected.layers[name], given)
        moved, layer = by_hand(expected, name, seen[name]), quantization.layers[name]
        assert (moved == layer.quantized_weight()).float().mean() > 0.99, name
        # Weights that have their codes stay as they were, the others become what the codes stand for.
        stays = layer.weight == expected.layers[name].weight
        assert 0.2 < stays.float().mean() < 0.99, name
        assert torch.equal(layer.weight[~stays], layer.quantized_weight()[~stays]), name
        # The same from here on: what a rounding has changed must not add up.
        with torch.no_grad():
            expected.layers[name].weight.copy_(layer.weight)
            expected.layers[name].weight_s0.copy_(layer.weight_s0)
        done.append(name.replace(".", r"\."))
        expected.set_fake_quant(True, scheme != "w8a8_static", "|".join(done))


@pytest.mark.parametrize("scheme", ["w4a16_asym", "nvfp4", "int8_dynamic", "mxfp4"])
def test_other_formats_go_too(tmp_path, scheme):
    """Scales of floats stay; weights that are moved are numbers of their own grids."""
    model, quantization = quantized(tmp_path, "qwen3", scheme)
    before = {name: (layer.weight.clone(), layer.weight_s0.clone()) for name, layer in quantization.layers.items()}
    choose_initial_codes(model, quantization, samples(model), CPU)
    for name, layer in quantization.layers.items():
        weight, s0 = before[name]
        if layer.scheme.weights.dtype != "int":
            assert torch.equal(layer.weight_s0, s0)
        moved = layer.weight != weight
        with torch.no_grad():
            assert moved.any() and torch.equal(layer.quantized_weight()[moved], layer.weight[moved])


def test_inputs_that_are_not_measured_yet_are_left_as_they_are(tmp_path):
    """The codes are those of the scheme that quantizes weights alone, bit for bit. Scales are NaN until measured."""
    model, quantization = quantized(tmp_path, "qwen3", "nvfp4_w4a4")
    other, expected = quantized(tmp_path, "qwen3", "nvfp4")
    given = samples(model)
    choose_initial_codes(model, quantization, given, CPU)
    choose_initial_codes(other, expected, given, CPU)
    for name, layer in quantization.layers.items():
        assert torch.equal(layer.weight, expected.layers[name].weight), name
        assert layer.weight_fake_quant and layer.input_fake_quant


def test_experts_as_modules_are_the_same_as_stacked_ones(tmp_path):
    stacked, quantization = quantized(tmp_path, "qwen3_moe", "w2a16_g32")
    given = samples(stacked)
    apart, others = quantized(tmp_path, "qwen3_moe", "w2a16_g32", experts="per_expert")
    choose_initial_codes(stacked, quantization, given, CPU)
    choose_initial_codes(apart, others, given, CPU)
    equal = [part.weight(layer.weight) == others.layers[part.name].weight for part, layer in linears(quantization)]
    assert sum(float(one.float().mean()) for one in equal) / len(equal) > 0.95


class Wrapped(nn.Module):
    """Runs a decoder layer in another way."""

    def __init__(self, layer: nn.Module, run) -> None:
        super().__init__()
        self.layer, self.run = layer, run

    def forward(self, hidden: Tensor, *args: object, **kwargs: object) -> Tensor:
        return self.run(lambda hidden: self.layer(hidden, *args, **kwargs), hidden)


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (lambda layer, hidden: layer(layer(hidden)), "runs more than once"),
        (lambda layer, hidden: layer(2 * hidden), "is not the output of"),
    ],
)
def test_layers_that_are_no_chain_are_refused(tmp_path, run, text):
    model, quantization = quantized(tmp_path, "qwen3", "w2a16_g32")
    before = [layer.weight.clone() for layer in quantization.layers.values()]
    model.model.layers[1] = Wrapped(model.model.layers[1], run)
    renamed = {name.replace("layers.1.", "layers.1.layer."): layer for name, layer in quantization.layers.items()}
    quantization = Quantization(renamed, [])
    with pytest.raises(RankError, match=f"expected rtn for this model: .*{text}"):
        choose_initial_codes(model, quantization, samples(model), CPU)
    assert all(map(torch.equal, before, (layer.weight for layer in quantization.layers.values())))


def test_a_model_without_decoder_layers_is_refused(tmp_path):
    """OpenAI GPT's layers are plain modules."""
    source = next(one for one in VARIANTS.values() if one.model_type == "openai-gpt").checkpoint(tmp_path / "model")
    model = load_model(source)
    quantization = quantize(model, "w4a16_g32")
    with pytest.raises(RankError, match="expected rtn for this model: none of its quantized layers is in a decoder"):
        choose_initial_codes(model, quantization, samples(model), CPU)
