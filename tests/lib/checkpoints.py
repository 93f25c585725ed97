"""Load, quantize, export and damage tiny checkpoints."""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from model.build import build_model
from model.checkpoint.load import load_weights
from model.quantized.checkpoint import source_schemes
from model.quantized.scales import take_scales
from model.save.export_model import export_model
from model.scales.in_place import renew_weight_scales, write_scales
from model.scales.loading import ScaleReport
from quant import SCHEMES, Quantization, Scheme, replace_layers
from quant.packed_weight import store_packed
from quant.rules import schemes_of_layers
from quant.scale import first_input_scale
from tests.lib.tiny import tiny_checkpoint

CPU = torch.device("cpu")
ENGINES = {torch.bfloat16: {"bf16": {"enabled": True}}, torch.float16: {"fp16": {"enabled": True}}, torch.float32: {}}


def build(path: Path | str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> PreTrainedModel:
    """Build the model of ``path/config.json`` on the CPU, without its weights; ``options`` of ``build_model``."""
    return build_model(path, ENGINES[dtype], dtype=dtype, device=CPU, **options)


def load_model(path: Path | str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> PreTrainedModel:
    """Build the model of a checkpoint and load its weights."""
    model = build(path, dtype, **options)
    load_weights(model, path)
    return model


def quantize(
    model: nn.Module,
    scheme: Scheme | str | None = None,
    *,
    learn: bool = True,
    measure: bool = True,
    input_scale: float = 0.01,
    **options: Any,
) -> Quantization:
    """Prepare ``model`` with a scheme, or the preset of that name.

    Args:
        model: with its weights.
        scheme: of every Linear.
        learn: learn the scales of weights.
        measure: fill all scales: those of weights are measured.
        input_scale: the value of the others; a global scale gets 6 / ``input_scale``.
        options: of ``quant.replace_layers``.
    """
    scheme = SCHEMES[scheme] if isinstance(scheme, str) else scheme
    quantization = replace_layers(model, scheme, **{"learn_weight_scale": learn, "learn_input_scale": False, **options})
    if measure:
        renew_weight_scales(quantization)
        values = {
            group.owner: torch.tensor([6 / input_scale if group.spec.has_global_scale else input_scale])
            for group in quantization.input_groups
        }
        write_scales(quantization.input_groups, values)
    return quantization


def load_quantized(
    path: Path | str, dtype: torch.dtype = torch.bfloat16, *, learn: bool = True, **options: Any
) -> tuple[PreTrainedModel, Quantization, ScaleReport]:
    """Load a quantized checkpoint with its own schemes and scales; ``options`` of ``build_model``."""
    model = load_model(path, dtype, **options)
    quantization = quantize(model, measure=False, learn=learn, named=source_schemes(model, Path(path)))
    return model, quantization, take_scales(model, quantization, Path(path), inputs_calibrated_later=True)


def hold_packed(path: Path | str) -> Callable[[nn.Module], None]:
    """Return the option ``hold`` of ``build_model`` that keeps all weights of a quantized checkpoint packed."""

    def hold(model: nn.Module) -> None:
        modules = dict(model.named_modules())
        for name, scheme in schemes_of_layers(source_schemes(model, Path(path)), modules).items():
            store_packed(modules[name], scheme.weights, tuple(modules[name].weight.shape))

    return hold


@torch.no_grad()
def quantized(
    source: Path, scheme: Scheme | None, batches=(), *, powers_of_two: bool = False, experts="stacked", **options: Any
) -> tuple[PreTrainedModel, Quantization]:
    """Load a checkpoint in bf16 and quantize it with measured scales, those of inputs from ``batches`` of tokens.

    ``powers_of_two`` rounds the scales up. ``options`` are those of :func:`quantize`.
    """
    model = load_model(source, experts=experts).eval()
    quantization = quantize(model, scheme, **options)
    if quantization.input_groups:
        quantization.set_fake_quant(weights=False, activations=False)
        quantization.observe(True)
        for ids in batches:
            model(input_ids=ids)
        quantization.observe(False)
        quantization.set_fake_quant(weights=True, activations=True)
        for group in quantization.input_groups:
            group.s0.copy_(first_input_scale(group.observer.absmax.view(1), group.spec))
    if powers_of_two:
        for group in (*quantization.weight_groups, *quantization.input_groups):
            group.s0.copy_(torch.exp2(torch.ceil(torch.log2(group.s0))))
    return model, quantization


class Export(NamedTuple):
    """An export, the tokens of its calibration, and what was exported."""

    directory: Path
    batches: list[Tensor]
    model: PreTrainedModel
    quantization: Quantization


def exported(
    directory: Path,
    kind: str,
    scheme: Scheme | None,
    *,
    every_expert: bool = False,
    layout: str = "compressed",
    tied: bool = False,
    wide: bool = False,
    **options: Any,
) -> Export:
    """Make a random model in ``directory``/source, quantize it, and export it in shards to ``directory``/export.

    ``every_expert`` lets each token use all experts, so that no rounding sends one elsewhere.
    """
    source = tiny_checkpoint(directory / "source", kind, seed=random.randrange(2**31), tied=tied, wide=wide)
    if every_expert:
        config = AutoConfig.from_pretrained(source)
        config.num_experts_per_tok = config.num_experts
        config.save_pretrained(source)
    batches = [torch.randint(0, 301, (2, 64)) for _ in range(2)]
    model, quantization = quantized(source, scheme, batches, **options)
    size = 200_000 if wide else 40_000
    export_model(model, quantization, source, directory / "export", layout=layout, max_shard_size=size)
    return Export(directory / "export", batches, model, quantization)


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors in the safetensors files of a directory."""
    return {key: tensor for path in sorted(directory.glob("*.safetensors")) for key, tensor in load_file(path).items()}


def edit_checkpoint(directory: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a checkpoint, file by file, and its index."""
    weight_map = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors = load_file(file)
        edit(tensors)
        save_file({key: value.contiguous() for key, value in tensors.items()}, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
    for index in directory.glob("*.index.json"):
        edit_json(index, weight_map=weight_map)


def edit_tensors(directory: Path, key: str, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of the file that holds ``key``."""
    edit_checkpoint(directory, lambda tensors: edit(tensors) if key in tensors else None)


def edit_json(path: Path, edit: Callable[[Any], object] | None = None, /, **values: Any) -> Any:
    """Change a JSON file in place, by a function or with values of its keys, and return its contents.

    It is laid out as transformers writes config.json.
    """
    contents = json.loads(path.read_text(encoding="utf-8"))
    if edit is not None:
        edit(contents)
    contents.update(values)
    path.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
    return contents


def with_low_bits(tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Move values at random by less than bf16 has digits for, and return them in a dtype that has more."""
    return (tensor.float() * (1 + 2**-11 * torch.rand(tensor.shape))).to(dtype)


def assert_same_tensors(one: Path, other: Path) -> None:
    """Check that two checkpoints hold the same tensors, bit for bit."""
    found, expected = read_tensors(one), read_tensors(other)
    assert found.keys() == expected.keys()
    different = [key for key, value in expected.items() if not same_bits(value, found[key])]
    assert not different, different


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare dtype, shape and bits, also those of NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that only one of them has, or whose dtype, shape or bits are not the same."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one or name not in other or not same_bits(one[name], other[name])
    ]
