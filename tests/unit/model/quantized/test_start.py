"""The original weights with the scales of a quantized checkpoint of them, and in the cells of its codes."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.build import build_model
from model.checkpoint.load import load_weights
from model.quantized.checkpoint import source_schemes
from model.quantized.scales import take_start
from model.ranks import RankError
from model.save import export_model
from model.scales import renew_weight_scales, write_scales
from quant import SCHEMES, Quantization, prepare
from quant.formats.compressed_tensors import weight_codes
from tests.lib.tiny import tiny_checkpoint
from tests.unit.model.quantized.test_round_trip import ENGINE

pytestmark = pytest.mark.usefixtures("seed")

Q = "model.layers.0.self_attn.q_proj"
SPREAD = 0.4  # of the weights around the original ones, in steps of 4 bits


def original(directory: Path, kind: str = "qwen3") -> Path:
    return tiny_checkpoint(directory / "original", kind, seed=random.randrange(2**31), wide=True)


def model_of(directory: Path, schemes: str | Path) -> tuple[torch.nn.Module, Quantization]:
    """The model of plain weights, quantized with a scheme, or as a checkpoint is."""
    model = build_model(directory, ENGINE, dtype=torch.bfloat16, device=torch.device("cpu"))
    load_weights(model, directory, progress=False)
    named = source_schemes(model, schemes) if isinstance(schemes, Path) else {}
    scheme = SCHEMES[schemes] if isinstance(schemes, str) else None
    return model, prepare(model, scheme, named=named, learn_weight_scale=True, learn_input_scale=False)


def other_rounding(source: Path, directory: Path, scheme: str) -> Path:
    """A quantized checkpoint of ``source`` whose codes are not the nearest ones, as those of GPTQ are not."""
    model, quantization = model_of(source, scheme)
    with torch.no_grad():
        for layer in quantization.layers.values():
            step = layer.weight.float().abs().amax(-1, keepdim=True) / 7.5
            layer.weight.add_(SPREAD * step * torch.randn_like(step.expand_as(layer.weight)))
    renew_weight_scales(quantization)
    write_scales(quantization.input_groups, {g.owner: torch.tensor([0.01]) for g in quantization.input_groups})
    export_model(model, quantization, source, directory)
    return directory


def codes_of(quantization: Quantization) -> dict[str, torch.Tensor]:
    return {
        name: weight_codes(layer.weight, layer.weight_scale(), layer.scheme.weights, layer.weight_zero).view(torch.int8)
        for name, layer in quantization.layers.items()
        if not layer.projections
    }


KINDS = [*(("qwen3", name) for name in ("w4a16_g32", "w4a16_asym", "int8_dynamic", "fp8_static", "fp8_block", "nvfp4"))]
KINDS += [("qwen3_moe", "w4a16_g32"), ("qwen3_moe", "mxfp4")]


@pytest.mark.parametrize(("kind", "scheme"), KINDS)
def test_weights_in_the_cells_are_exported_as_the_files_codes(tmp_path, kind, scheme):
    """Bytes of codes and scales; each weight that was moved is what its code stands for, and the others stay."""
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
    first, again = (load_file(each / "model.safetensors") for each in (start, tmp_path / "again"))
    assert first.keys() == again.keys()
    differ = [key for key in first if not torch.equal(*(one[key].view(torch.uint8) for one in (first, again)))]
    assert not differ


def smaller(start: Path, source: Path) -> Path:
    """The codes of a model of other sizes."""
    return other_rounding(tiny_checkpoint(start.parent / "narrow", "qwen3", even=True), start, "w4a16_g32")


def another(start: Path, source: Path) -> Path:
    return other_rounding(original(start.parent / "another"), start, "w4a16_g32")


def another_layers(start: Path, source: Path) -> Path:
    """Layer 0 and 1 swapped, codes and scales alike."""
    other_rounding(source, start, "w4a16_g32")
    tensors = load_file(start / "model.safetensors")
    swap = {"layers.0": "layers.1", "layers.1": "layers.0"}
    swapped = {
        next((key.replace(a, b) for a, b in swap.items() if a in key and "proj" in key), key): tensor
        for key, tensor in tensors.items()
    }
    save_file(swapped, start / "model.safetensors", metadata={"format": "pt"})
    return start


def fewer(start: Path, source: Path) -> Path:
    """One layer that is plain there."""
    other_rounding(source, start, "w4a16_g32")
    tensors = load_file(start / "model.safetensors")
    plain = load_file(source / "model.safetensors")[f"{Q}.weight"]
    tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(Q)} | {f"{Q}.weight": plain}
    save_file(tensors, start / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((start / "config.json").read_text())
    config["quantization_config"]["ignore"].append(Q)
    (start / "config.json").write_text(json.dumps(config))
    return start


def zeros(start: Path, source: Path) -> Path:
    """An original without weights in a layer."""
    other_rounding(source, start, "w4a16_g32")
    tensors = load_file(source / "model.safetensors")
    tensors[f"{Q}.weight"].zero_()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return start


def edited(start: Path, source: Path, ending: str, change) -> Path:
    """The file of the original itself, with other numbers in it."""
    other_rounding(source, start, "w4a16_g32")
    tensors = load_file(start / "model.safetensors")
    tensors = {key: change(tensor) if key.endswith(ending) else tensor for key, tensor in tensors.items()}
    save_file(tensors, start / "model.safetensors", metadata={"format": "pt"})
    return start


def wrong(ending: str, change, message: str):
    return lambda *paths: edited(*paths, ending, change), "w4a16_g32", message


BAD = {
    "scales times 2": wrong("weight_scale", lambda s: s * 2, "are 2 times the weights"),
    "scales divided by 16": wrong("weight_scale", lambda s: s / 16, "not a quantized form of model.path"),
    "scales with another sign": wrong("weight_scale", lambda s: -s, "times the weights of model.path"),
    "reciprocals": wrong("weight_scale", lambda s: 1 / s, "not a quantized form of model.path"),
    "scales of 0": wrong("weight_scale", torch.zeros_like, "must be finite and not 0"),
    "NaN": wrong("weight_scale", lambda s: s * torch.nan, "must be finite and not 0"),
    "rows in another order": wrong("weight_packed", lambda c: c.roll(1, 0), "of other weights"),
    "codes that count from the middle": wrong("weight_packed", lambda c: c ^ -0x77777778, "not a quantized form"),
    "another checkpoint": (another, "w4a16_g32", f"start is not a quantized form of model.path\n{Q}.*of other weights"),
    "other layers": (another_layers, "w4a16_g32", "is not a quantized form of model.path\n.*of other weights"),
    "other sizes": (smaller, "w4a16_g32", r"q_proj has the shape \[.*\], expected \[.*\] as in model.path"),
    "another grid": (
        lambda *a: other_rounding(a[1], a[0], "w8a16_channel"),
        "w4a16_g32",
        "is quantized as .*, but",
    ),
    "fewer layers": (fewer, "w4a16_g32", f"has no codes of {Q}, which is quantized here"),
    "not quantized": (lambda *a: a[1], "w4a16_g32", "has no codes of"),
    "zeros": (zeros, "w4a16_g32", f"{Q}.weight_packed: model.path has zeros"),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("case", BAD)
def test_a_checkpoint_of_something_else_is_an_error(tmp_path, case, inside):
    make, scheme, message = BAD[case]
    source = original(tmp_path)
    start = make(tmp_path / "start", source)
    model, quantization = model_of(source, scheme)
    before = [layer.weight.detach().clone() for layer in quantization.layers.values()]
    with pytest.raises(RankError, match=message):
        take_start(model, quantization, start, inside=inside)
    assert all(
        torch.equal(*pair) for pair in zip(before, (x.weight for x in quantization.layers.values()), strict=True)
    )


def test_cells_of_codes_that_are_made_anew_are_refused(tmp_path):
    """q, k and v with scales of their own, of which the largest is taken: their codes are no cells any more."""
    source = original(tmp_path)
    start = other_rounding(source, tmp_path / "start", "fp8_static")
    tensors = load_file(start / "model.safetensors")
    codes = tensors[f"{Q}.weight"].float()
    tensors[f"{Q}.weight"] = (codes / 2).to(torch.float8_e4m3fn)
    tensors[f"{Q}.weight_scale"] *= 2
    save_file(tensors, start / "model.safetensors", metadata={"format": "pt"})
    model, quantization = model_of(source, start)
    take_start(model, quantization, start, inside=False)
    with pytest.raises(RankError, match=r"quant.snap_to_codes: true, expected false: model.layers.0.self_attn.q_proj"):
        take_start(model, quantization, start, inside=True)
