"""The range of a checkpoint's integers: found in the codes, said in the recipe, kept where it was found."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.quantized.checkpoint import read_checkpoint, source_schemes
from model.quantized.scales import take_scales, take_start
from model.ranks import RankError
from model.save.export_model import export_model
from model.scales.loading import load_scales
from quant import SCHEMES, Quantization, Scheme
from quant.formats.packing import pack_int32, unpack_int32
from quant.packed_weight import packed_codes
from tests.lib.checkpoints import edit_checkpoint, hold_packed, load_model, quantize
from tests.lib.recipes import bare_recipe as recipe
from tests.lib.tiny import tiny_checkpoint

GATE = "model.layers.1.mlp.gate_proj"


def narrow(scheme: str) -> Scheme:
    return replace(SCHEMES[scheme], weights=replace(SCHEMES[scheme].weights, narrow=True))


def as_source(model: torch.nn.Module, files: Path) -> Quantization:
    """Prepare a model as a checkpoint is quantized, without scales."""
    return quantize(model, measure=False, named=source_schemes(model, files))


def checkpoint(directory: Path, scheme: Scheme) -> Path:
    source = tiny_checkpoint(directory / "original", "qwen3", seed=random.randrange(2**31), even=True)
    model = load_model(source)
    export_model(model, quantize(model, scheme), source, directory / "files")
    return directory / "files"


def write_a_smallest_code(directory: Path) -> None:
    """Make one code of a weight -8."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        codes = unpack_int32(tensors[f"{GATE}.weight_packed"], 4, 64)
        codes[90, 3] = -8
        tensors[f"{GATE}.weight_packed"] = pack_int32(codes, 4)

    edit_checkpoint(directory, edit)


@pytest.mark.parametrize("scheme", ["w4a16_g32", "w3a16_channel", "w2a16_channel", "8da4w"])
def test_the_codes_say_which_grid_they_are_on(tmp_path, scheme):
    """The configurations of both are the same."""
    configs = []
    for is_narrow in (True, False):
        files = checkpoint(tmp_path / str(is_narrow), narrow(scheme) if is_narrow else SCHEMES[scheme])
        model = load_model(files)
        for reader in (model, None):
            found = {one.scheme.weights for one in read_checkpoint(files, reader).coded.values()}
            assert found == {replace(SCHEMES[scheme].weights, narrow=is_narrow)}
        chosen = recipe(tmp_path, quant={"scheme": "source"}, model={"path": str(files)}).quant
        assert chosen.schemes["source"].weights.narrow == is_narrow
        # Layers are on the grid that the recipe says: a run of before that knew one grid goes on with that.
        said = [chosen.schemes["source"].weights]
        assert {one.weights for one in source_schemes(model, files, said).values()} == set(said)
        if is_narrow:
            assert {one.weights for one in source_schemes(model, files, [said[0].wide]).values()} == {said[0].wide}
        else:
            refused = r"has narrow: true for model.*, but its checkpoint has codes down to -\d+, so"
            with pytest.raises(ValueError, match=refused):
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
        model = load_model(path)
        quantization = quantize(model, narrow("w4a16_g32"), measure=path != files)
        if path == files:
            assert not take_scales(model, quantization, files).weights_loaded
        layer = quantization.layers[GATE]
        largest = layer.weight.unflatten(1, (-1, 32)).abs().amax(-1).float()
        assert torch.equal(layer.weight_scale(), (largest / 7).bfloat16().float())
    export_model(model, quantization, tmp_path / "original", tmp_path / "again")
    model = load_model(tmp_path / "original")
    quantization = quantize(model, narrow("w4a16_g32"), measure=False)
    assert not load_scales(model, quantization, tmp_path / "again").weights_measured


@pytest.mark.parametrize("packed", [False, True], ids=["weights", "codes"])
def test_a_smallest_code_that_no_sample_saw_is_an_error(tmp_path, packed):
    """And not one where the recipe names the whole grid."""
    files = checkpoint(tmp_path, narrow("w4a16_g32"))
    expected = rf"{GATE}.* has the code -8, but its scheme has the narrow range -7 to 7.*: set narrow to false in"
    if packed:
        model = load_model(files, hold=hold_packed(files))
        assert packed_codes(model.get_submodule(GATE).weight).spec == narrow("w4a16_g32").weights
    write_a_smallest_code(files)
    if packed:
        with pytest.raises(RankError, match=expected):
            load_model(files, hold=hold_packed(files))
        return
    model = load_model(files)
    with pytest.raises(RankError, match=expected):
        take_scales(model, as_source(model, files), files)
    model = load_model(files)
    assert not take_scales(model, quantize(model, "w4a16_g32", measure=False), files).weights_measured


def test_original_weights_in_the_cells_of_the_narrow_grid(tmp_path):
    """The cells at its ends have no end: weights far beyond stay. A smallest code is an error."""
    files = checkpoint(tmp_path, narrow("w4a16_g32"))
    model = load_model(tmp_path / "original")
    quantization = as_source(model, files)
    weight = quantization.layers[GATE].weight
    before = weight.detach().clone()
    take_start(model, quantization, files, inside=False)
    scale = quantization.layers[GATE].weight_scale().repeat_interleave(32, 1)
    with torch.no_grad():
        lowest = (before.float() / scale).round() == -7
        weight.copy_(torch.where(lowest, before * 1.1, before))
        beyond = weight.clone()
    assert ((beyond.float() / scale).round() == -8).any()
    take_start(model, quantization, files, inside=True)
    assert torch.equal(weight, beyond)
    write_a_smallest_code(files)
    with pytest.raises(
        RankError, match=rf"{GATE}\.weight_packed has the code -8, but its scheme has the narrow range -7 to 7"
    ):
        take_start(model, quantization, files, inside=False)
