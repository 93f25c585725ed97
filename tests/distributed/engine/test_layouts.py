"""Checkpoints with towers, experts in one tensor and concatenated tensors, from training to their own class: two ranks
train, and transformers loads what they exported."""

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load, load_file

from engine.config.reading import load_recipe
from quant.formats.packing import unpack_int32
from tests.lib.checkpoints import edit_checkpoint, with_low_bits
from tests.lib.plain import load_result
from tests.lib.published import deepseek
from tests.lib.variants import NO_TEACHER, Variant, each, runs_of
from tools.verify.check import compare_with_transformers


def run(model: str, scheme: str, *, router: bool = False, **quant) -> Variant:
    sections = {
        "stage": 3,
        "loss": NO_TEACHER,
        "train": {"steps": 2, "gradient_accumulation_steps": 1},
        "quant": {"scheme": scheme, "calibration_batches": 1 if scheme == "fp8_static" else 0, **quant},
        "learnable": {"router": router},
        "export": {"enabled": True},
    }
    return Variant(sections, model=model, dtype="bfloat16")


EXPERTS = [r".*\.experts\..+"]  # one tensor on disk, which no reader takes quantized
RUNS = {
    "qwen3_5": run("qwen3_5", "fp8_static"),
    "qwen3_5_moe": run("qwen3_5_moe", "w4a16_g32"),
    "gpt_oss": run("gpt_oss", "fp8_static", router=True, exempt_more=EXPERTS),
    "llama4": run("llama4", "fp8_static", exempt_more=EXPERTS),
}
# They come with the large counts.
MORE = {
    "gemma3": run("gemma3", "w4a16_g32"),
    "llava": run("llava", "fp8_static"),
    "granitemoe": run("granitemoe", "w4a16_g32", exempt_more=EXPERTS),
    "kimi_linear": run("kimi_linear", "fp8_static"),
    "qwen3_vl_moe": run("qwen3_vl_moe", "w4a16_g32", router=True, exempt_more=EXPERTS),
}


def again(source: Variant, **sections: Any) -> Variant:
    """A run like another, with other sections; from quantized weights unless they say something else."""
    changes = {"quant": {"scheme": "source", "calibration_batches": 0}, **sections}
    return Variant({**source.sections, **changes}, source.model, source.dtype)


# gpt-oss with experts in mxfp4, of which the export may be of one of two layouts.
BLOCKS = run("gpt_oss", "mxfp4", exempt_more=[r".*\.self_attn\..+"])
IN_BLOCKS = {"export": {"enabled": True, "format": "gpt_oss"}}
# A checkpoint on the narrow grid, -7..7, and training from it, which takes many weights beyond the ends of the grid.
GRID = {"dtype": "int", "bits": 4, "granularity": "group", "group_size": 32, "narrow": True}
NARROW = run("qwen3_5_moe", "own", schemes={"own": {"weights": GRID}})
FAR = {"lr": 0.1, "scale_lr": 1e-3}
# Runs from the exports of others, with rates that change no weight. Stored scales of inputs are compared with inputs.
AGAIN = {"from int4": "qwen3_5_moe", "from fp8": "qwen3_5"}
NORM = "norm.weight"
UNMOVED = {"lr": 1e-20, "scale_lr": 1e-20, "weight_decay": 0.0}


def runs(directory: Path) -> dict[str, Variant]:
    """Return the runs of one job; those from the export of another are behind it."""

    def of(name: str) -> dict[str, str]:
        return {"path": f"{directory}/{name}/export"}

    snapped = {"scheme": "source", "start": of("qwen3_5_moe")["path"], "snap_to_codes": True}
    trained = {"lr": 1e-2, "scale_lr": 1e-2}
    norms = deepseek(directory / "fp32_norms", 0)
    edit_checkpoint(
        norms,
        lambda tensors: tensors.update({key: with_low_bits(tensors[key]) for key in tensors if key.endswith(NORM)}),
    )
    more = {
        "fp32 norms": again(RUNS["qwen3_5"], model={"path": str(norms)}, learnable={"norm": True}, optim={"lr": 3e-3}),
        **{name: again(RUNS[source], model=of(source), optim=UNMOVED) for name, source in AGAIN.items()},
        "in cells": again(RUNS["qwen3_5_moe"], quant=snapped, optim=UNMOVED),
        "blocks": again(BLOCKS, quant=BLOCKS.sections["quant"], **IN_BLOCKS),
        "values": again(BLOCKS, quant=BLOCKS.sections["quant"], export={"enabled": True, "format": "dequantized"}),
        "trained": again(BLOCKS, model=of("blocks"), optim=trained, **IN_BLOCKS),
        "narrow": NARROW,
        "from narrow": again(NARROW, model=of("narrow"), quant={"scheme": "source"}, optim=FAR),
    }
    return RUNS | more


recipes = runs_of(runs, MORE)


@each(RUNS, MORE)
def test_an_export_loads_as_the_class_that_it_names(recipes, name):
    recipe = load_recipe(recipes[name])
    source, export = Path(recipe.model.path), recipe.export_dir()
    config = json.loads((export / "config.json").read_text())
    assert config["architectures"] == json.loads((source / "config.json").read_text())["architectures"]
    _, info = getattr(transformers, config["architectures"][0]).from_pretrained(export, output_loading_info=True)
    # It dequantizes experts, and has no use for the scales of their inputs.
    assert not [key for keys in info.values() for key in keys if not re.search(r"experts.*input_scale$", str(key))]

    before, after = load_file(source / "model.safetensors"), load_file(export / "model.safetensors")
    same = {key for key in before if key in after and torch.equal(before[key].float(), after[key].float())}
    towers = {key for key in before if re.search(r"visual|vision|projector", key)}
    assert towers <= same and bool(towers) == (name not in ("granitemoe", "kimi_linear", "gpt_oss"))
    assert len(same) < len(before), "nothing was trained"
    routers = {key for key in before if re.search(r"\.(router|mlp\.gate)\.weight$", key)}
    assert (routers <= same) != (RUNS | MORE)[name].sections["learnable"]["router"]
    report = compare_with_transformers(export, [torch.arange(10, 60)[None]])
    assert report.ok, report.table()


@each(AGAIN)
def test_a_run_from_an_export_that_changes_nothing_writes_the_same_export(recipes, name):
    """Towers, codes of stacked experts, scales and config.json, byte for byte; but for the sign of a code of zero,
    which a weight of zero gets that moves by 1e-20."""
    export, again = (load_recipe(recipes[each]).export_dir() for each in (AGAIN[name], name))
    files = [file for file in export.iterdir() if file.suffix in (".json", ".safetensors")]
    assert len(files) >= 2
    for file in files:
        ours, theirs = ((folder / file.name).read_bytes() for folder in (again, export))
        if file.suffix == ".safetensors":
            tensors = load(theirs)
            assert not [key for key, one in load(ours).items() if not torch.equal(one.float(), tensors[key].float())]
            size = 8 + int.from_bytes(ours[:8], "little")
            ours, theirs = ours[:size], theirs[:size]
        assert ours == theirs, file.name


def test_trained_tensors_keep_the_dtype_of_the_source(recipes):
    """Norms in fp32, model in bf16: what training changed is widened, the rest has the source's low bits."""
    recipe, trained = load_recipe(recipes["fp32 norms"]), load_result(recipes["fp32 norms"])["weights"]
    read, found = (load_file(path / "model.safetensors") for path in (Path(recipe.model.path), recipe.export_dir()))
    assert {key: one.dtype for key, one in read.items()} == {key: one.dtype for key, one in found.items()}
    norms = [key for key in read if key.endswith(NORM)]
    changed = {key: trained[key].float() != read[key].bfloat16().float() for key in norms}
    assert any(one.any() for one in changed.values()) and not all(one.all() for one in changed.values())
    for key in norms:
        assert torch.equal(found[key], torch.where(changed[key], trained[key].float(), read[key])), key


def test_training_from_the_narrow_grid_stays_on_it(recipes):
    """No code of the export is -8, though weights were clipped on both sides; the other grid has it, from the start."""
    codes = {}
    for name in ("narrow", "from narrow", "qwen3_5_moe"):
        tensors = load_file(load_recipe(recipes[name]).export_dir() / "model.safetensors")
        packed = [tensor for key, tensor in sorted(tensors.items()) if key.endswith("weight_packed")]
        codes[name] = torch.cat([unpack_int32(one, 4, 8 * one.shape[1]).flatten() for one in packed])
    before, after = codes["narrow"], codes["from narrow"]
    assert (int(before.min()), int(after.min()), int(codes["qwen3_5_moe"].min())) == (-7, -7, -8)
    assert (after == -7).sum() > 2 * (before == -7).sum(), "nothing was clipped"
    # The run's own recipe says it.
    saved = load_recipe(load_recipe(recipes["from narrow"]).output_dir + "/recipe.yaml")
    assert saved.quant.schemes["source"].weights.narrow


def test_the_original_in_the_cells_of_an_export_has_its_codes(recipes):
    """Codes and scales of quant.start, though the weights are those of model.path; and so are the others."""
    export, found = (
        load_file(load_recipe(recipes[name]).export_dir() / "model.safetensors") for name in ("qwen3_5_moe", "in cells")
    )
    original = load_file(Path(load_recipe(recipes["in cells"]).model.path) / "model.safetensors")
    assert export.keys() == found.keys()
    quantized = [key for key in export if re.search(r"weight_(packed|scale|shape)$", key)]
    assert quantized and not [key for key in quantized if not torch.equal(export[key], found[key])]
    assert not [key for key in found if key in original and not torch.equal(found[key], original[key])]


def test_experts_of_gpt_oss_in_blocks_are_the_values_of_the_last_forward(recipes):
    """transformers decodes what the same training writes as plain weights; training goes on from the blocks."""
    kind = transformers.GptOssForCausalLM
    decoding = transformers.Mxfp4Config(dequantize=True)
    exports = {name: load_recipe(recipes[name]).export_dir() for name in ("blocks", "values", "trained")}
    blocks, trained = (
        kind.from_pretrained(exports[name], dtype=torch.bfloat16, quantization_config=decoding).state_dict()
        for name in ("blocks", "trained")
    )
    values = kind.from_pretrained(exports["values"], dtype=torch.bfloat16).state_dict()
    assert blocks.keys() == values.keys()
    assert not [key for key in values if not torch.equal(blocks[key], values[key])]
    moved = {key for key in values if not torch.equal(blocks[key], trained[key])}
    assert {key for key in values if key.endswith(("gate_up_proj", "down_proj"))} <= moved
    files = [load_file(exports[name] / "model.safetensors") for name in ("blocks", "trained")]
    assert files[0].keys() == files[1].keys() and any(key.endswith("_blocks") for key in files[0])
