"""The original weights with the scales of a quantized checkpoint of them, and snapped to its codes."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model.quantized.checkpoint import source_schemes
from model.quantized.scales import take_start
from model.ranks import RankError
from model.save.export_model import export_model
from model.scales.in_place import renew_weight_scales
from quant import Quantization
from quant.formats.compressed_tensors import weight_codes
from tests.lib.checkpoints import assert_same_tensors, edit_checkpoint, edit_json, load_model, quantize
from tests.lib.tiny import tiny_checkpoint

Q = "model.layers.0.self_attn.q_proj"
SPREAD = 0.4  # of the weights around the original ones, in steps of 4 bits


def original(directory: Path, kind: str = "qwen3") -> Path:
    return tiny_checkpoint(directory / "original", kind, seed=random.randrange(2**31), wide=True)


def model_of(directory: Path, schemes: str | Path) -> tuple[torch.nn.Module, Quantization]:
    """The model of plain weights, quantized with a scheme, or as a checkpoint is, without scales."""
    model = load_model(directory)
    named = source_schemes(model, schemes) if isinstance(schemes, Path) else {}
    return model, quantize(model, schemes if isinstance(schemes, str) else None, named=named, measure=False)


def other_rounding(source: Path, directory: Path, scheme: str = "w4a16_g32", spread: float = SPREAD) -> Path:
    """A quantized checkpoint of ``source`` whose codes are not the nearest ones, as those of GPTQ are not."""
    model = load_model(source)
    quantization = quantize(model, scheme)
    with torch.no_grad():
        for layer in quantization.layers.values():
            step = layer.weight.float().abs().amax(-1, keepdim=True) / 7.5
            layer.weight.add_(spread * step * torch.randn_like(step.expand_as(layer.weight)))
    renew_weight_scales(quantization)
    export_model(model, quantization, source, directory)
    return directory


def codes_of(quantization: Quantization) -> dict[str, torch.Tensor]:
    return {
        name: weight_codes(layer.weight, layer.weight_scale(), layer.scheme.weights, layer.weight_zero).view(torch.int8)
        for name, layer in quantization.layers.items()
        if not layer.projections
    }


KINDS = [("qwen3", s) for s in ("w4a16_g32", "w4a16_asym", "int8_dynamic", "fp8_static", "fp8_block", "nvfp4")]
KINDS += [("qwen3_moe", "w4a16_g32"), ("qwen3_moe", "mxfp4")]


@pytest.mark.parametrize(("kind", "scheme"), KINDS)
def test_snapped_weights_are_exported_as_the_files_codes(tmp_path, kind, scheme):
    """Bytes of codes and scales; each weight that was moved has the value of its code, and the others stay."""
    source = original(tmp_path, kind)
    start = other_rounding(source, tmp_path / "start", scheme)
    model, quantization = model_of(source, start)
    before = {name: layer.weight.detach().clone() for name, layer in quantization.layers.items()}
    take_start(model, quantization, start, inside=False)
    assert all(torch.equal(layer.weight, before[name]) for name, layer in quantization.layers.items())
    rounded = codes_of(quantization)
    take_start(model, quantization, start, inside=True)
    for name, codes in codes_of(quantization).items():
        layer = quantization.layers[name]
        moved = layer.weight != before[name]
        assert moved.any() and torch.equal(moved, (codes != rounded[name]) & moved)
        assert torch.equal(rounded[name][~moved], codes[~moved])
        assert torch.equal(layer.quantized_weight()[moved], layer.weight[moved])
    export_model(model, quantization, source, tmp_path / "again")
    assert_same_tensors(tmp_path / "again", start)


def test_codes_of_two_bits_may_be_far_from_the_nearest_ones(tmp_path):
    """As those of blockwise, which keeps a layer's outputs, not its weights."""
    source = original(tmp_path)
    start = other_rounding(source, tmp_path / "start", "w2a16_g32", spread=2.4)
    model, quantization = model_of(source, "w2a16_g32")
    take_start(model, quantization, start, inside=False)
    layer = quantization.layers[Q]
    before, nearest = layer.weight.detach().clone(), layer.quantized_weight()
    take_start(model, quantization, start, inside=True)
    far, near = ((before - values).float().square().sum() for values in (layer.quantized_weight(), nearest))
    assert 4 < far / near < 6, "farther than GPTQ's codes"


def swap_layers(tensors: dict[str, torch.Tensor]) -> None:
    """Swap the codes and scales of layers 0 and 1."""
    for key in [key for key in tensors if "layers.0" in key and "proj" in key]:
        other = key.replace("layers.0", "layers.1")
        tensors[key], tensors[other] = tensors[other], tensors[key]


def fewer(source: Path, start: Path) -> Path:
    """One layer that is plain there."""
    plain = load_file(source / "model.safetensors")[f"{Q}.weight"]

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.startswith(Q)]:
            del tensors[key]
        tensors[f"{Q}.weight"] = plain

    edit_checkpoint(other_rounding(source, start), edit)
    config = json.loads((start / "config.json").read_text())["quantization_config"]
    edit_json(start / "config.json", quantization_config={**config, "ignore": [*config["ignore"], Q]})
    return start


def zeros(source: Path, start: Path) -> Path:
    """An original without weights in a layer."""
    other_rounding(source, start)
    edit_checkpoint(source, lambda tensors: tensors[f"{Q}.weight"].zero_())
    return start


def edited(edit):
    """The codes of the original itself, edited."""

    def make(source: Path, start: Path) -> Path:
        edit_checkpoint(other_rounding(source, start), edit)
        return start

    return make


def each(ending: str, change):
    """Change all tensors of a kind."""
    return edited(lambda t: t.update({key: change(t[key]) for key in t if key.endswith(ending)}))


NOT_OF_IT = "start is not a quantized form of model.path"
BAD = {
    "scales times 2": (each("weight_scale", lambda s: s * 2), "are 2 times the weights"),
    "scales divided by 16": (each("weight_scale", lambda s: s / 16), NOT_OF_IT),
    "scales with another sign": (each("weight_scale", lambda s: -s), "times the weights of model.path"),
    "scales of 0": (each("weight_scale", torch.zeros_like), "must be finite and not 0"),
    "NaN": (each("weight_scale", lambda s: s * torch.nan), "must be finite and not 0"),
    "rows in another order": (each("weight_packed", lambda c: c.roll(1, 0)), "of other weights"),
    "codes that count from the middle": (each("weight_packed", lambda c: c ^ -0x77777778), NOT_OF_IT),
    "another checkpoint": (
        lambda source, start: other_rounding(original(start.parent / "another"), start),
        f"{NOT_OF_IT}\n{Q}.*of other weights",
    ),
    "other layers": (edited(swap_layers), f"{NOT_OF_IT}\n.*of other weights"),
    "other sizes": (
        lambda source, start: other_rounding(tiny_checkpoint(start.parent / "small", "qwen3", even=True), start),
        r"q_proj has the shape \[.*\], expected \[.*\] as in model.path",
    ),
    "another grid": (lambda *paths: other_rounding(*paths, "w8a16_channel"), "is quantized as .*, but"),
    "fewer layers": (fewer, f"has no codes of {Q}, which the recipe quantizes"),
    "not quantized": (lambda source, start: source, "has no codes of"),
    "zeros": (zeros, f"{Q}.weight_packed: model.path has zeros"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_checkpoint_of_something_else_is_an_error(tmp_path, case):
    make, message = BAD[case]
    source = original(tmp_path)
    start = make(source, tmp_path / "start")
    model, quantization = model_of(source, "w4a16_g32")
    before = [layer.weight.detach().clone() for layer in quantization.layers.values()]
    for inside in (False, True):
        with pytest.raises(RankError, match=message):
            take_start(model, quantization, start, inside=inside)
    after = [layer.weight for layer in quantization.layers.values()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_snapping_to_codes_that_are_rounded_again_is_refused(tmp_path):
    """q, k and v with scales of their own, of which the largest is taken: their codes are no cells any more."""
    source = original(tmp_path)
    start = other_rounding(source, tmp_path / "start", "fp8_static")

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q}.weight"] = (tensors[f"{Q}.weight"].float() / 2).to(torch.float8_e4m3fn)
        tensors[f"{Q}.weight_scale"] *= 2

    edit_checkpoint(start, edit)
    model, quantization = model_of(source, start)
    take_start(model, quantization, start, inside=False)
    with pytest.raises(RankError, match=rf"quant.snap_to_codes: true, expected false: {Q}"):
        take_start(model, quantization, start, inside=True)
