"""Random ways of handing over wrong scales, which nobody listed: each is an error that names a layer, or is exact, or
harms no layer more than docs/schemes.md says.

A right file of some scheme is changed in a random way, with its codes and without. What is read without an error is
judged by the layers themselves: by what they lose of their weights, and what they lose with their own scales.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from model.ranks import RankError
from model.scales import load_scales
from quant import SCHEMES, Quantization, QuantLayer, Scheme
from quant.formats.packing import unpack_zero_points
from quant.reference import fake_quant
from tests.lib.tiny import tiny_checkpoint
from tests.unit.model.scales.files import ASYM, Files, alone, checkpoint, exported, quantized

# What a layer may lose, as docs/schemes.md says it: so many times what it loses with its own scales, or a share of its
# squares; of scales alone at 8 bits and at fewer, and with codes beside them.
WORSE, ALONE_8, ALONE, BESIDE = 3.3, 0.04, 0.1, 0.02
NAMES = ("fp8_static", "fp8_dynamic", "fp8_block", "int8_dynamic", "w8a16_g32", "w4a16_g32", "w4a16_channel")
NAMES += ("w4a16_g32_asym", "w3a16_g32", "w2a16_g32", "nvfp4", "mxfp4")
KINDS = {name: SCHEMES.get(name, ASYM) for name in NAMES}
DRAWS = 3  # of each way, with codes and without

Change = Callable[[Tensor], Tensor]


class Draw:
    """A file, and the layers of it that a way changes: one, some, or all."""

    def __init__(self, files: Files, others: Files, scheme: Scheme):
        self.files, self.others, self.scheme = files, others, scheme
        names = sorted(key.removesuffix(".weight_scale") for key in files.tensors if key.endswith(".weight_scale"))
        count = random.choice((1, 2, len(names) // 2, len(names)))
        self.names = random.sample(names, count)
        self.all = names

    def each(self, change: Change) -> None:
        for name in self.names:
            scale = self.files.tensors[f"{name}.weight_scale"]
            if scale.dtype == torch.uint8:  # exponents
                value = change(torch.exp2(scale.float() - 127))
                stored = (value.abs().log2().round().nan_to_num(0.0) + 127).clamp(0, 255).to(torch.uint8)
            else:
                stored = change(scale.float()).to(scale.dtype)
            self.files.tensors[f"{name}.weight_scale"] = stored.contiguous()

    def move(self, index: Callable[[Tensor], Tensor]) -> None:
        """Move scales, and the zero points that go with them."""
        for name in self.names:
            scale = self.files.tensors[f"{name}.weight_scale"]
            order = index(torch.arange(scale.numel()).view(scale.shape)).reshape(-1)
            self.files.tensors[f"{name}.weight_scale"] = scale.flatten()[order].view(scale.shape)
            if (zero := self.zero(name)) is not None and random.random() < 0.5:
                self.files.tensors[f"{name}.weight_zero_point"] = zero.flatten()[order].view(scale.shape)

    def zero(self, name: str) -> Tensor | None:
        packed = self.files.tensors.get(f"{name}.weight_zero_point")
        if packed is None or packed.dtype == torch.int8:
            return packed
        rows = self.files.tensors[f"{name}.weight_scale"].shape[0]
        return unpack_zero_points(packed, self.scheme.weights.bits, rows)

    def exchange(self, endings: tuple[str, ...], source: Files | None = None) -> None:
        """Take tensors of another layer of their shapes, or of the same layer of another checkpoint."""
        before = dict(self.files.tensors)
        for name in self.names:
            pool = [each for each in self.all if each != name] if source is None else [name]
            pool = [one for one in pool if before[f"{one}.weight_scale"].shape == before[f"{name}.weight_scale"].shape]
            if not pool:
                continue
            other, tensors = random.choice(pool), before if source is None else source.tensors
            for ending in endings:
                if f"{name}.{ending}" in before:
                    self.files.tensors[f"{name}.{ending}"] = tensors[f"{other}.{ending}"].clone()


def permuted(dim: int) -> Callable[[Draw], None]:
    def index(at: Tensor) -> Tensor:
        return at.index_select(dim, torch.randperm(at.shape[dim])) if at.dim() > dim else at

    return lambda draw: draw.move(index)


def swapped(draw: Draw) -> None:
    """A few scales change places."""

    def index(at: Tensor) -> Tensor:
        flat = at.flatten().clone()
        chosen = torch.randperm(len(flat))[: random.choice((2, 4, 16))]
        flat[chosen] = flat[chosen.roll(1)]
        return flat

    draw.move(index)


FACTORS = (1.1, 1.25, 1.5, 0.9, 0.8, 0.67, 0.5, 2.0, 7 / 7.5, 15 / 7.5, 8, 448, 1 / 448, 16)


def factor(draw: Draw) -> None:
    value = 2 ** random.uniform(-8, 8) if random.random() < 0.5 else random.choice(FACTORS)
    draw.each(lambda scale: scale * value)


def some_factor(draw: Draw) -> None:
    value, share = 2 ** random.uniform(-4, 4), random.choice((0.01, 0.1, 0.5))
    draw.each(lambda scale: torch.where(torch.rand(scale.shape) < share, scale * value, scale))


def noise(draw: Draw) -> None:
    size = random.choice((0.05, 0.1, 0.2, 0.4, 0.8))
    draw.each(lambda scale: scale * torch.exp(size * torch.randn(scale.shape)))


def signs(draw: Draw) -> None:
    share = random.choice((0.02, 0.5, 1.0))
    draw.each(lambda scale: torch.where(torch.rand(scale.shape) < share, -scale, scale))


def reinterpreted(draw: Draw) -> None:
    dtype = random.choice((torch.float16, torch.bfloat16))
    draw.each(lambda scale: scale.to(torch.bfloat16 if dtype == torch.float16 else torch.float16).view(dtype).float())


def rounded(draw: Draw) -> None:
    dtype = random.choice((torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2))
    draw.each(lambda scale: scale.to(dtype).float())


def other_layers(draw: Draw) -> None:
    endings = ("weight_scale", "weight_zero_point")
    draw.exchange(random.choice((endings, (*endings, "weight_packed", "weight"), (*endings, "weight_global_scale"))))


def other_checkpoint(draw: Draw) -> None:
    endings = ("weight_scale", "weight_zero_point", "weight_global_scale")
    draw.exchange(random.choice((endings, (*endings, "weight_packed", "weight"))), draw.others)


def repeated(draw: Draw) -> None:
    """One scale in the place of all of a layer, of a row, or of a column."""
    dim = random.choice((None, 0, -1))

    def change(scale: Tensor) -> Tensor:
        if dim is None:
            return scale.flatten()[random.randrange(scale.numel())].expand(scale.shape)
        return scale.select(dim, 0).unsqueeze(dim).expand(scale.shape)

    draw.each(change)


def averaged(draw: Draw) -> None:
    draw.each(lambda scale: scale.mean().expand(scale.shape))


def shifted(draw: Draw) -> None:
    by, share = random.choice((-8, -4, -2, -1, 1, 2, 4, 8)), random.choice((0.05, 0.5, 1.0))
    for name in draw.names:
        if (zero := draw.zero(name)) is not None:
            moved = ((zero + by + 8) % 16 - 8).to(torch.int8)
            changed = torch.where(torch.rand(zero.shape) < share, moved, zero.to(torch.int8))
            draw.files.tensors[f"{name}.weight_zero_point"] = changed


def above(draw: Draw) -> None:
    """The global scale: its reciprocal, another factor, or that of another layer."""
    value = 2 ** random.uniform(-8, 8)
    for name in draw.names:
        if (scale := draw.files.tensors.get(f"{name}.weight_global_scale")) is not None:
            found = random.choice((1 / scale, scale * value, scale / 6, scale / 448))
            draw.files.tensors[f"{name}.weight_global_scale"] = found


def of_function(function: Change) -> Callable[[Draw], None]:
    return lambda draw: draw.each(function)


WAYS: dict[str, Callable[[Draw], None]] = {
    "rows permuted": permuted(0),
    "groups permuted": permuted(1),
    "all permuted": lambda draw: draw.move(lambda at: at.flatten()[torch.randperm(at.numel())]),
    "rolled": lambda draw: draw.move(lambda at: at.roll(random.choice((1, 2, 8)), random.choice((0, -1)))),
    "reversed": lambda draw: draw.move(lambda at: at.flip(random.choice((0, -1)))),
    "transposed": lambda draw: draw.move(lambda at: at.t() if at.dim() == 2 else at),
    "a few swapped": swapped,
    "sorted": of_function(lambda scale: scale.flatten().sort().values.view(scale.shape)),
    "a factor": factor,
    "a factor for some": some_factor,
    "noise": noise,
    "signs": signs,
    "reciprocals": of_function(lambda scale: 1 / scale),
    "squares": of_function(lambda scale: scale * scale),
    "roots": of_function(lambda scale: scale.abs().sqrt()),
    "logarithms": of_function(lambda scale: scale.abs().log2()),
    "another dtype's bits": reinterpreted,
    "rounded": rounded,
    "another layer's": other_layers,
    "another checkpoint's": other_checkpoint,
    "one for all": repeated,
    "averaged": averaged,
    "zero points": shifted,
    "global scales": above,
}


def losses(layer: QuantLayer, scale: Tensor, zero: Tensor | None) -> float:
    """Squared error over the squares of a Linear's weight."""
    weight = layer.weight.detach().float()
    return float(
        (fake_quant(weight, scale, layer.scheme.weights, zero) - weight).square().sum() / weight.square().sum()
    )


def scales_of(quantization: Quantization) -> Iterator[Tensor]:
    for group in (*quantization.weight_groups, *quantization.global_groups):
        yield group.s0
        if group.zero is not None:
            yield group.zero


def judge(files: Files, directory: Path, source: Path, scheme: Scheme) -> tuple[str | None, dict[str, tuple]]:
    """The error; without one what each Linear loses with the scales that were read, and with its own."""
    directory.mkdir(exist_ok=True)
    save_file({k: t.contiguous().clone() for k, t in files.tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(files.config))
    model, quantization = quantized(source, scheme)
    before = [tensor.detach().clone() for tensor in scales_of(quantization)]
    own = {name: losses(layer, layer.weight_scale(), layer.weight_zero) for name, layer in quantization.layers.items()}
    try:
        load_scales(model, quantization, directory, inputs_calibrated_later=True)
        found = quantization.layers.items()
        return None, {name: (losses(one, one.weight_scale(), one.weight_zero), own[name]) for name, one in found}
    except RankError as error:
        return str(error), {}
    finally:
        with torch.no_grad():
            for tensor, value in zip(scales_of(quantization), before, strict=True):
                tensor.copy_(value)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> list[tuple[Path, Path]]:
    """A checkpoint and another one of its sizes, whose rows are of different sizes, or all alike."""
    base = tmp_path_factory.mktemp("sources")
    unequal = [checkpoint(base / f"unequal_{seed}", "qwen3", seed) for seed in (5, 6)]
    alike = [tiny_checkpoint(base / f"alike_{seed}", "qwen3", seed=seed, wide=True) for seed in (5, 6)]
    return [(unequal[0], unequal[1]), (alike[0], alike[1])]


@pytest.mark.parametrize("beside", [True, False], ids=["codes", "alone"])
@pytest.mark.parametrize("way", WAYS)
def test_scales_that_were_changed_are_an_error_or_harm_little(way, beside, sources, tmp_path):
    seed = list(WAYS).index(way)
    random.seed(seed)
    torch.manual_seed(seed)
    schemes = {"zero points": ["w4a16_g32_asym"], "global scales": ["nvfp4"]}.get(way, list(NAMES))
    for _ in range(DRAWS):
        name = random.choice(schemes)
        source, other = random.choice(sources)
        draw = Draw(exported(source, KINDS[name]), exported(other, KINDS[name]), KINDS[name])
        WAYS[way](draw)
        if not beside:
            alone(draw.files)
        error, lost = judge(draw.files, tmp_path / "changed", source, KINDS[name])
        floor = BESIDE if beside else ALONE_8 if KINDS[name].weights.bits == 8 else ALONE
        for layer, (mine, own) in lost.items():
            assert mine <= max(WORSE * own, floor) * 1.001, (name, source.name, layer, mine, own)
        assert error is None or "_proj" in error or "scales" in error, error
