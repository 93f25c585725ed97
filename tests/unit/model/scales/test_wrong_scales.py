"""Scales that belong to other weights or schemes: each is an error that names the layer, or changes no number.

A model with rows of unequal size is exported with a scheme, its files are changed, and its scales are read back into
the same weights. ``alone`` keeps only the scales, as another program may write them.
"""

import json
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from model.ranks import RankError
from model.save.export_model import export_model
from model.scales.loading import load_scales
from quant import SCHEMES, Rule, Scheme, TensorSpec
from quant.formats.packing import unpack_zero_points
from quant.spec import PRESETS
from tests.lib.checkpoints import edit_checkpoint, load_model, quantize, read_tensors
from tests.lib.thinned import thinned
from tests.lib.tiny import tiny_checkpoint

LAYER = "model.layers.0"
Q, GATE, UP = (f"{LAYER}.{name}_proj" for name in ("self_attn.q", "mlp.gate", "mlp.up"))
SCALE = f"{Q}.weight_scale"
ASYM = Scheme("w4a16_g32_asym", TensorSpec("int", 4, "group", 32, symmetric=False))


class Files(NamedTuple):
    """Contents of a directory with scales."""

    tensors: dict[str, Tensor]
    config: dict


Edit = Callable[[Files], object]


def checkpoint(directory: Path, kind: str = "qwen3", seed: int = 5) -> Path:
    """A tiny model whose rows, and some of whose columns, are of different sizes, as those of trained models are."""
    source = tiny_checkpoint(directory, kind, seed=seed, wide=True)

    def spread(tensors: dict[str, Tensor]) -> None:
        for index, (key, tensor) in enumerate(sorted(tensors.items())):
            if key.endswith("proj.weight"):
                generator = torch.Generator().manual_seed(seed + index)
                rows = torch.exp(0.5 * torch.randn(tensor.shape[0], 1, generator=generator))
                columns = torch.exp(0.5 * torch.randn(tensor.shape[1], generator=generator))
                tensors[key] = (tensor * rows * columns).to(tensor.dtype)

    edit_checkpoint(source, spread)
    return source


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Callable[..., Path]:
    base = tmp_path_factory.mktemp("sources")
    return cache(lambda kind, seed=5: checkpoint(base / f"{kind}_{seed}", kind, seed))


@cache
def quantized(source: Path, scheme: Scheme | None, form="per_expert", **options):
    """The model of a checkpoint, with measured scales; tests share it, for none of them may change it."""
    model = load_model(source, experts=form)
    return model, quantize(model, scheme, **options)


@cache
def _exported(source: Path, scheme: Scheme | None, **options) -> Files:
    directory = Path(mkdtemp(dir=source))
    export_model(*quantized(source, scheme, **options), source, directory)
    return Files(read_tensors(directory), json.loads((directory / "config.json").read_text()))


def exported(source: Path, scheme: Scheme | None, **options) -> Files:
    """Export the model, and return the contents."""
    return deepcopy(_exported(source, scheme, **options))


def read(files: Files, directory: Path, source: Path, scheme: Scheme | None, **options) -> None:
    """Read the scales of changed files into the model: every scale is in the files, and none may change, whether there
    is an error or not."""
    directory.mkdir(exist_ok=True)
    tensors = {key: tensor.contiguous().clone() for key, tensor in files.tensors.items()}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(files.config))
    model, quantization = quantized(source, scheme, **options)
    before = [layer.weight_scale() for layer in quantization.layers.values()]
    try:
        report = load_scales(model, quantization, directory)
        assert not report.weights_measured and not report.inputs_missing
        assert len(report.weights_loaded) == len(quantization.weight_groups)
    finally:
        after = [layer.weight_scale() for layer in quantization.layers.values()]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def alone(files: Files) -> None:
    """Leave nothing but scales."""
    files.config.pop("quantization_config")
    for key in [key for key in files.tensors if "scale" not in key and "zero" not in key]:
        del files.tensors[key]


def each(change: Callable[[Tensor], Tensor], ending: str = ".weight_scale") -> Edit:
    """Change every scale of weights, or every tensor with another ending, in its own dtype."""

    def edit(files: Files) -> None:
        for key in [key for key in files.tensors if key.endswith(ending)]:
            old = files.tensors[key]
            files.tensors[key] = change(old.float() if "scale" in key else old).to(old.dtype)

    return edit


def swap(first: str, second: str) -> Edit:
    def edit(files: Files) -> None:
        for key in [key for key in files.tensors if key.startswith(f"{first}.")]:
            other = second + key.removeprefix(first)
            files.tensors[key], files.tensors[other] = files.tensors[other], files.tensors[key]

    return edit


def put(key: str, value: Tensor) -> Edit:
    return lambda files: files.tensors.update({key: value})


def set_config(**values: object) -> Edit:
    return lambda files: files.config["quantization_config"].update(values)


def set_group(part: str, **values: object) -> Edit:
    """Change what the config says of weights or inputs."""

    def edit(files: Files) -> None:
        group = files.config["quantization_config"]["config_groups"]["group_0"]
        group[part] = {**group[part], **values}

    return edit


def replaced(**values: object) -> Edit:
    """The config of another writer; of none without values."""
    return lambda files: files.config.update(quantization_config=values)


def swapped_bytes(packed: Tensor) -> Tensor:
    """int32 of the other byte order."""
    return packed.view(torch.uint8).view(*packed.shape, 4).flip(-1).reshape(packed.shape[0], -1).view(packed.dtype)


def shifted(by: int) -> Edit:
    """Zero points that count codes from another number."""

    def edit(files: Files) -> None:
        for key in [key for key in files.tensors if key.endswith(".weight_zero_point")]:
            rows = files.tensors[key.replace("zero_point", "scale")].shape[0]
            zero = unpack_zero_points(files.tensors[key], 4, rows)
            files.tensors[key] = ((zero + by + 8) % 16 - 8).to(torch.int8)

    return edit


FIT = r"weight_scale: (scales are .* those of the weights themselves|the codes)"
CODES = r"weight_scale: the codes"
SCHEME = r"config.json says .*, but scheme .* has .*_proj"
NO_CONFIG, NEXT = replaced(), Q.replace("0", "1")
INT4, INT8 = "w4a16_g32", {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True}
E5M2 = torch.zeros(128, 128).to(torch.float8_e5m2)
ORDER = torch.arange(128).flip(0) // 32

# name: scheme of the files, the change (several in a tuple), the error; the scheme of the model if it is another one.
WAYS: dict[str, tuple] = {
    # Other numbers of bits, formats and groupings.
    "scales of 4 bits for 2": (INT4, (), SCHEME, "w2a16_g32"),
    "the same, no config": (INT4, NO_CONFIG, "as its scales are those of int codes with 2 bits", "w2a16_g32"),
    "symmetric for asymmetric": (INT4, (), SCHEME, ASYM),
    "group size in the config": (INT4, set_group("weights", group_size=64), SCHEME),
    "int8 inputs for fp8": ("fp8_static", set_group("input_activations", **INT8), "says int8 per tensor of inputs"),
    "ModelOpt's fp8 for nvfp4": ("nvfp4", replaced(quant_method="modelopt", quant_algo="FP8"), "says e4m3 per tensor"),
    "ignored in the config": (INT4, set_config(ignore=["lm_head", Q]), "says that these layers are not quantized"),
    "int8 for int4, alone": ("int8_dynamic", alone, FIT + r".*Probably they are of int8", "w4a16_channel"),
    "codes in e5m2": ("fp8_dynamic", put(f"{Q}.weight", E5M2), "q_proj.weight is F8_E5M2"),
    "groups of 64": (INT4, (NO_CONFIG, each(lambda s: s[:, ::2])), "has shape"),
    # Other numbers for the right weights.
    "times 2, alone": ("w8a16_channel", (alone, each(lambda s: s * 2)), FIT + ".*doubled"),
    "reciprocals, alone": (INT4, (alone, each(lambda s: 1 / s)), FIT + ".*reciprocals"),
    "reciprocals": ("fp8_block", each(lambda s: 1 / s), FIT),
    "one scale": ("w4a16_channel", (alone, lambda f: f.tensors[SCALE][7:8].mul_(4096)), "1 of 128 scales would"),
    "signs": ("fp8_dynamic", each(torch.neg), "must be finite and positive"),
    "one layer's are 0": (INT4, lambda f: f.tensors[SCALE].zero_(), "must be finite and not 0"),
    # Codes in another order.
    "nibbles swapped": ("nvfp4", each(lambda c: (c << 4) | (c >> 4), ".weight_packed"), CODES),
    "bytes swapped": (INT4, each(swapped_bytes, ".weight_packed"), CODES),
    # The right numbers in another place.
    "another layer's": (INT4, swap(Q, NEXT), CODES),
    "another layer's, alone": (INT4, (alone, swap(Q, NEXT)), FIT + ".*another"),
    "gate and up swapped": (INT4, swap(GATE, UP), CODES),
    "scales of the next row": ("w4a16_channel", each(lambda s: s.roll(1, 0)), FIT),
    # Zero points, second scales and exponents.
    "zero points off by 8, alone": (ASYM, (shifted(8), alone), FIT),
    "zero points off by 1": (ASYM, shifted(1), CODES),
    "no global scale": (
        "nvfp4",
        lambda f: [f.tensors.pop(key) for key in list(f.tensors) if "global" in key],
        "no weight_global_scale beside",
    ),
    "global scale inverted": ("nvfp4", each(lambda s: 1 / s, ".weight_global_scale"), FIT),
    "exponents off by one": ("mxfp4", each(lambda s: s + 1), CODES + ".* 2 times"),
    # What is beside them.
    "g_idx": (INT4, put(f"{Q}.weight_g_idx", ORDER), "g_idx.*another order"),
    "smoothing scales": (INT4, put(f"{Q}.pre_quant_scale", torch.ones(128)), "weights of the layer were smoothed"),
    "something unknown": (INT4, put(f"{Q}.weight_offset", torch.ones(1)), "does not know it"),
    "two spellings": ("fp8_block", put(f"{Q}.weight_scale_inv", torch.ones(1, 1)), "is there twice"),
    # Configurations.
    "actorder group": (INT4, set_group("weights", actorder="group"), "actorder is 'group'"),
    "awq": (INT4, set_config(quant_method="awq"), "quant_method is 'awq', whose scales are not read"),
    "a list": (INT4, lambda f: f.config.update(quantization_config=[1]), "that is a list, expected an obj"),
    "rotated": (INT4, set_config(transform_config={"R1": {}}), "transform_config is set"),
    "ModelOpt's awq": ("nvfp4", replaced(quant_method="modelopt", quant_algo="NVFP4_AWQ"), "is 'NVFP4_AWQ'"),
    "small blocks": ("fp8_block", replaced(quant_method="fp8", weight_block_size=[64, 64]), "weight_block_size is"),
}


@pytest.mark.parametrize("way", WAYS)
def test_scales_of_something_else_are_an_error(way, sources, tmp_path):
    of_files, change, message, *of_model = WAYS[way]
    schemes = [SCHEMES.get(one, one) for one in (of_files, *of_model)]
    files = exported(sources("qwen3"), schemes[0])
    for edit in change if isinstance(change, tuple) else [change]:
        edit(files)
    with pytest.raises(RankError, match=message) as caught:
        read(files, tmp_path / "changed", sources("qwen3"), schemes[-1])
    assert len(str(caught.value).splitlines()) <= 7


@pytest.mark.parametrize("scheme", ["w4a16_g32", "w4a16_asym", "int8_dynamic", "fp8_static", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("smoothed", [False, True])
def test_scales_of_other_weights_are_an_error(scheme, smoothed, sources, tmp_path):
    """Files that are right in themselves: of a model of the same sizes, and as AWQ leaves them."""
    other = sources("qwen3", 6)
    if smoothed:
        other, read_one = checkpoint(tmp_path / "smoothed"), ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")

        def smooth(tensors: dict[str, Tensor]) -> None:
            for key in [key for key in tensors if key.rpartition(".")[0].endswith(read_one)]:
                factor = torch.exp(0.4 * torch.randn(tensors[key].shape[1], generator=torch.Generator().manual_seed(1)))
                tensors[key] = (tensors[key] * factor).to(tensors[key].dtype)

        edit_checkpoint(other, smooth)
    files = exported(other, SCHEMES[scheme])
    expected = "smoothed" if smoothed else "of other weights than those of model.path"
    with pytest.raises(RankError, match=expected) as caught:
        read(files, tmp_path / "changed", sources("qwen3"), SCHEMES[scheme])
    assert SCALE in str(caught.value)


@pytest.mark.parametrize("form", ["per_expert", "stacked"])
@pytest.mark.parametrize("scheme", [INT4, "fp8_static", "fp8_block"])
def test_permuted_experts_are_named(form, scheme, sources, tmp_path):
    """Also in a stack, where a sum over all experts would show next to nothing."""
    source, experts = sources("qwen3_moe"), f"{LAYER}.mlp.experts"
    files = exported(source, SCHEMES[scheme])
    swap(f"{experts}.1.down_proj", f"{experts}.3.down_proj")(files)
    with pytest.raises(RankError, match=CODES) as caught:
        read(files, tmp_path / "changed", source, SCHEMES[scheme], form=form)
    assert sorted(line.split(":")[0] for line in str(caught.value).splitlines()[1:]) == [
        f"{experts}.{index}.down_proj.weight_scale" for index in (1, 3)
    ]


def test_a_mixed_recipe_is_compared_layer_by_layer(sources, tmp_path):
    """The files of a recipe with rules go with these rules, and not with one scheme for all."""
    rules = {"rules": (Rule(SCHEMES["w8a16_g32"], r".*\.down_proj"), Rule(None, r".*\.o_proj"))}
    files = exported(sources("qwen3"), SCHEMES["w4a16_g32"], **rules)
    read(files, tmp_path / "changed", sources("qwen3"), SCHEMES["w4a16_g32"], **rules)
    with pytest.raises(RankError, match=r"says int8 in groups of 32, but scheme 'w4a16_g32' has int4.*down_proj"):
        read(files, tmp_path / "changed", sources("qwen3"), SCHEMES["w4a16_g32"])


EXPERTS = ("fp8_static_kv", "fp8_block", "int8_dynamic", "w4a16_g32", "w4a16_asym", "w2a16_g32", "nvfp4", "mxfp4")


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [*thinned(("qwen3", name) for name in [*SCHEMES, "fp8_static_kv"]), *(("qwen3_moe", name) for name in EXPERTS)],
)
def test_own_exports_are_read_back(kind, scheme, sources, tmp_path):
    """With codes and without, in this project's layouts."""
    preset = PRESETS[scheme]
    options = {"kv_cache": preset.kv_cache, "form": "stacked" if kind == "qwen3_moe" else "per_expert"}
    files = exported(sources(kind), preset.linear, **options)
    read(files, tmp_path / "changed", sources(kind), preset.linear, **options)
    alone(files)
    read(files, tmp_path / "changed", sources(kind), preset.linear, **options)
