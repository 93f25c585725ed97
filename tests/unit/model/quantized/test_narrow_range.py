"""Which grid a checkpoint's integers are on: found in the codes, said in the recipe, kept where it was found."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.build import build_model
from model.checkpoint.load import load_weights
from model.quantized.checkpoint import read_checkpoint, source_schemes
from model.quantized.scales import take_scales, take_start
from model.ranks import RankError
from model.save import export_model
from model.scales import load_scales, renew_weight_scales
from quant import SCHEMES, Quantization, Scheme, prepare
from quant.formats.packing import pack_int32, unpack_int32
from quant.packed_weight import packed_codes, store_packed
from quant.rules import schemes_of_layers
from tests.lib.tiny import tiny_checkpoint
from tests.unit.model.quantized.test_round_trip import ENGINE, edited
from tests.unit.tools.memory.test_memory import recipe

pytestmark = pytest.mark.usefixtures("seed")

KINDS = ("w4a16_g32", "w3a16_channel", "w2a16_channel", "8da4w")


def narrow(scheme: str) -> Scheme:
    return replace(SCHEMES[scheme], weights=replace(SCHEMES[scheme].weights, narrow=True))


def model_of(directory: Path, hold=None) -> torch.nn.Module:
    model = build_model(directory, ENGINE, dtype=torch.bfloat16, device=torch.device("cpu"), hold=hold)
    load_weights(model, directory, progress=False)
    return model


def quantized(model: torch.nn.Module, scheme: Scheme | dict[str, Scheme]) -> Quantization:
    one, named = (scheme, {}) if isinstance(scheme, Scheme) else (None, scheme)
    return prepare(model, one, named=named, learn_weight_scale=True, learn_input_scale=False)


def checkpoint(directory: Path, scheme: Scheme) -> Path:
    source = tiny_checkpoint(directory / "original", "qwen3", seed=random.randrange(2**31), even=True)
    model = model_of(source)
    quantization = quantized(model, scheme)
    renew_weight_scales(quantization)
    export_model(model, quantization, source, directory / "files")
    return directory / "files"


def with_the_smallest_code(directory: Path, name: str, row: int) -> None:
    """One code of a weight becomes -8."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        if (packed := tensors.get(f"{name}.weight_packed")) is not None:
            codes = unpack_int32(packed, 4, 8 * packed.shape[1])
            codes[row, 3] = -8
            tensors[f"{name}.weight_packed"] = pack_int32(codes, 4)

    edited(directory, edit)


@pytest.mark.parametrize("scheme", KINDS)
def test_the_codes_say_which_grid_they_are_on(tmp_path, scheme):
    """Of files that say the same of both."""
    configs = []
    for is_narrow in (True, False):
        directory = tmp_path / str(is_narrow)
        directory.mkdir()
        files = checkpoint(directory, narrow(scheme) if is_narrow else SCHEMES[scheme])
        model = model_of(files)
        for reader in (model, None):
            found = {one.scheme.weights for one in read_checkpoint(files, reader).coded.values()}
            assert found == {replace(SCHEMES[scheme].weights, narrow=is_narrow)}
        (directory / "recipe").mkdir()
        chosen = recipe(directory / "recipe", quant={"scheme": "source"}, model={"path": str(files)}).quant
        assert chosen.schemes["source"].weights.narrow == is_narrow
        # Layers are on the grid that the recipe says: a run of before that knew one grid goes on with that.
        said = [chosen.schemes["source"].weights.spec()]
        assert {one.weights for one in source_schemes(model, files, said).values()} == set(said)
        if is_narrow:
            assert {one.weights for one in source_schemes(model, files, [said[0].wide]).values()} == {said[0].wide}
        else:
            with pytest.raises(
                ValueError, match=r"says narrow: true for model.*, but codes of its scheme are -\d+: this"
            ):
                source_schemes(model, files, [narrow(scheme).weights])
        configs.append((files / "config.json").read_text())
    assert configs[0] == configs[1]


def test_of_eight_bits_only_the_recipe_says_it(tmp_path):
    """Rounded to bf16 the scales of both grids may be the same."""
    files = checkpoint(tmp_path, narrow("int8_dynamic"))
    assert {one.scheme for one in read_checkpoint(files, None).coded.values()} == {SCHEMES["int8_dynamic"]}


def test_a_recipe_may_say_narrow_itself(tmp_path):
    """Scales are absmax / 7 then, of a plain checkpoint and of one on the whole grid, and taken from one like it, by
    ``quant.scales`` too."""
    files = checkpoint(tmp_path, SCHEMES["w4a16_g32"])
    for path in (tmp_path / "original", files):
        model = model_of(path)
        quantization = quantized(model, narrow("w4a16_g32"))
        if path == files:
            assert not take_scales(model, quantization, files).weights_loaded
        else:
            renew_weight_scales(quantization)
        layer = quantization.layers["model.layers.1.mlp.up_proj"]
        largest = layer.weight.unflatten(1, (-1, 32)).abs().amax(-1).float()
        assert torch.equal(layer.weight_scale(), (largest / 7).bfloat16().float())
    again = tmp_path / "again"
    export_model(model, quantization, tmp_path / "original", again)
    model = model_of(tmp_path / "original")
    quantization = quantized(model, narrow("w4a16_g32"))
    assert not load_scales(model, quantization, again).weights_measured


@pytest.mark.parametrize("held", [False, True], ids=["weights", "codes"])
def test_a_smallest_code_that_no_sample_saw_is_an_error(tmp_path, held):
    """And not one where the recipe names the whole grid."""
    name = "model.layers.1.mlp.gate_proj"
    files = checkpoint(tmp_path, narrow("w4a16_g32"))
    expected = rf"{name}.* has the code -8, but the scheme here has -7 to 7.*: set narrow to false in quant\.schemes"

    def hold(model: torch.nn.Module) -> None:
        modules = dict(model.named_modules())
        for each, scheme in schemes_of_layers(source_schemes(model, files), modules).items():
            store_packed(modules[each], scheme.weights, tuple(modules[each].weight.shape))

    if held:
        model = model_of(files, hold)
        assert packed_codes(model.get_submodule(name).weight).spec == narrow("w4a16_g32").weights
    with_the_smallest_code(files, name, row=90)
    if held:
        with pytest.raises(RankError, match=expected):
            model_of(files, hold)
        return
    model = model_of(files)
    quantization = quantized(model, source_schemes(model, files))
    with pytest.raises(RankError, match=expected):
        take_scales(model, quantization, files)
    model = model_of(files)
    quantization = quantized(model, SCHEMES["w4a16_g32"])
    assert not take_scales(model, quantization, files).weights_measured


def test_original_weights_in_the_cells_of_the_narrow_grid(tmp_path):
    """The cells at its ends have no end: weights far beyond stay. A smallest code is an error."""
    files = checkpoint(tmp_path, narrow("w4a16_g32"))
    source = tmp_path / "original"
    model = model_of(source)
    quantization = quantized(model, source_schemes(model, files))
    name = "model.layers.1.mlp.gate_proj"
    weight = quantization.layers[name].weight
    before = weight.detach().clone()
    take_start(model, quantization, files, inside=False)
    scale = quantization.layers[name].weight_scale().repeat_interleave(32, 1)
    with torch.no_grad():
        lowest = (before.float() / scale).round() == -7
        weight.copy_(torch.where(lowest, before * 1.1, before))
        beyond = weight.clone()
    assert ((beyond.float() / scale).round() == -8).any()
    take_start(model, quantization, files, inside=True)
    assert torch.equal(weight, beyond)
    with_the_smallest_code(files, name, row=90)
    with pytest.raises(RankError, match=rf"{name}\.weight_packed has the code -8, but the scheme here has -7 to 7"):
        take_start(model, quantization, files, inside=False)
