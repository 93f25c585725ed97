"""launch/study.py: how its parts differ, and what it refuses before any of them is made."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import DbrxConfig, GPT2Config, LlamaConfig, MixtralConfig

from engine.config.config import Recipe
from engine.config.errors import RecipeError
from engine.config.quant import SchemeRecipe
from engine.config.reading import parse_recipe, save_recipe
from engine.config.sections import EventRecipe
from launch import study
from quant import TensorSpec
from tests.lib.recipes import minimal
from tests.lib.tiny import tiny_config

OF_FILES = SchemeRecipe(TensorSpec("int", bits=4, granularity="channel"))


def recipe_of(directory: Path, **sections: Any) -> Recipe:
    return minimal(**{"train": {"steps": 8}, "output_dir": str(directory / "out"), **sections})


def parts_of(recipe: Recipe, directory: Path, codes: list[str] | None = None) -> dict[str, Recipe]:
    """Read the recipe of each part from a file, as the study's scripts do."""
    save_recipe(recipe, directory / "recipe.yaml")
    words = ["--config", str(directory / "recipe.yaml")]
    parts = study.scripts_of(recipe, codes or [])
    return {part: parse_recipe([*words, *study.changes_of(part, recipe)], check_files=False) for part in parts}


def test_parts_differ_in_quantization_alone(tmp_path):
    events = [
        EventRecipe(at=0, fake_quant=False),
        EventRecipe(at=2, fake_quant=True, lr={"weights": 1e-4}),
        EventRecipe(when="loss/lm < 2.5", loss={"lm": 0.5}),
        EventRecipe(every=3, observe=True),
        EventRecipe(at=4, freeze_scales=True),
    ]
    recipe, out = recipe_of(tmp_path, schedule=events), tmp_path / "out"
    parts = parts_of(recipe, tmp_path)
    assert parts["qat"] == replace(recipe, output_dir=str(out / "qat"))
    trained = replace(recipe.model, path=str(out / "ft" / "export"))
    assert parts["ptq"] == replace(recipe, output_dir=str(out / "ptq"), model=trained)
    plain = [replace(events[1], fake_quant=None), events[2]]
    quant = replace(recipe.quant, fake_quant_start=-1)
    assert parts["ft"] == replace(recipe, output_dir=str(out / "ft"), quant=quant, schedule=plain)
    assert parts["ft"].never_quantizes() and not recipe.never_quantizes()
    study.check_comparable(recipe)


@pytest.mark.parametrize(
    "sections",
    [
        {"quant": {"quantized_all_gather": True, "fp8_fast_accum": False, "compute": "fp8_gemm"}},
        {"quant": {"fuse_norms": True, "rotate": [r".*\.down_proj"], "rotate_block": 64}},
        {"quant": {"scheme": "nvfp4_w4a4", "keep_codes": True}},
        {
            "quant": {"scales_follow_weights": True, "weight_range": "absmax"},
            "learnable": {"act_scale": True},
            "optim": {"act_scale_lr": 1e-4},
        },
    ],
)
def test_ft_leaves_out_what_never_acts_without_fake_quant(tmp_path, sections):
    recipe, default = recipe_of(tmp_path, **sections), recipe_of(tmp_path)
    save_recipe(recipe, tmp_path / "recipe.yaml")
    with pytest.raises(RecipeError, match="has no effect unless fake quant is on at some step"):
        parse_recipe(["--config", str(tmp_path / "recipe.yaml"), "--quant.fake_quant_start", "-1"], check_files=False)
    plain = parts_of(recipe, tmp_path)["ft"]
    kept = {key: getattr(recipe.quant, key) for key in ("scheme", "weight_range", "calibration_batches")}
    assert plain.quant == replace(default.quant, fake_quant_start=-1, **kept)
    assert (plain.learnable, plain.optim) == (default.learnable, default.optim)
    study.check_comparable(recipe)


def test_ptqs_of_several_codes_stand_beside_one_qat(tmp_path):
    """A part for each, once; the recipe's own codes are those of the part ``ptq``, and QAT begins with them."""
    recipe = recipe_of(tmp_path, quant={"scheme": "w2a16_g32", "init": "gptq"})
    codes = {part: one.quant.init for part, one in parts_of(recipe, tmp_path).items()}
    assert codes == {"ft": "rtn", "ptq": "gptq", "qat": "gptq"}
    several = parts_of(recipe, tmp_path, ["blockwise", "gptq", "rtn", "blockwise"])
    codes = {part: one.quant.init for part, one in several.items()}
    expected = {"ft": "rtn", "ptq": "gptq", "ptq_blockwise": "blockwise", "ptq_rtn": "rtn", "qat": "gptq"}
    assert list(codes.items()) == list(expected.items())
    made = str(tmp_path / "made")
    tiny_config("llama").save_pretrained(made)
    scripts = study.scripts_of(recipe, ["blockwise", "gptq", "rtn", "blockwise"])
    found = study.compared(recipe, scripts, {"autoround": made})
    names = [f"w2a16_g32 {name}" for name in ("gptq", "blockwise", "rtn", "autoround")]
    parts = [str(tmp_path / "out" / part / "export") for part in ("ptq", "ptq_blockwise", "ptq_rtn")]
    assert found == dict(zip(names, [*parts, made], strict=True))
    assert list(study.compared(recipe, study.scripts_of(recipe, []), {})) == ["w2a16_g32"]
    for name, folder, said in (("blockwise", made, "expected another name"), ("other", "nowhere", "nowhere, expected")):
        with pytest.raises(RecipeError, match=said):
            study.compared(recipe, scripts, {name: folder})


def test_a_model_that_teaches_itself_is_its_own_ft(tmp_path):
    """PTQ is of the model as it is; whatever else would move FT has one trained."""
    model = tmp_path / "model"
    tiny_config("llama").save_pretrained(model)
    itself = {"lm_weight": 0.0, "kd_weight": 1.0, "kd": "kl", "teacher": f"{model}/."}

    def recipe(loss: dict[str, Any], **sections: Any) -> Recipe:
        return recipe_of(tmp_path, model={"path": str(model)}, loss={**itself, **loss}, **sections)

    assert study.teaches_itself(recipe({})) and study.reference(recipe({})) == model
    assert study.changes_of("ptq", recipe({}))[-2:] == ["--model.path", str(model)]
    only_scales = recipe({"lm_weight": 1.0, "teacher": "self"}, learnable={"weight": False})
    assert [*study.scripts_of(only_scales, [])] == ["ptq", "qat"] and study.reference(only_scales) == model
    for moving in (
        recipe({"lm_weight": 0.1}),
        recipe({"teacher": "other"}),
        recipe({}, schedule=[EventRecipe(at=2, loss={"lm": 0.5})]),
        recipe({}, optim={"weight_decay": 0.1}),
        recipe({}, train={"steps": 8, "compile": True}),
    ):
        assert not study.teaches_itself(moving)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LlamaConfig(), []),
        (LlamaConfig(attention_dropout=0.25), ["attention_dropout 0.25"]),
        (GPT2Config(resid_pdrop=0.0, attn_pdrop=0.0), ["embd_pdrop 0.1", "summary_first_dropout 0.1"]),
        (MixtralConfig(router_jitter_noise=0.01), ["router_jitter_noise 0.01"]),
        (DbrxConfig(ffn_config={"moe_jitter_eps": 0.02}), ["moe_jitter_eps 0.02"]),
    ],
)
def test_what_acts_in_training_alone_is_named(tmp_path, config, said):
    """Also where it is the class's default, which no file names."""
    config.save_pretrained(tmp_path / "model")
    assert study.training_differs(recipe_of(tmp_path, model={"path": str(tmp_path / "model")})) == said


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"quant": {"scheme": "source", "schemes": {"source": OF_FILES}}}, "quant.scheme: 'source', expected a scheme"),
        ({"quant": {"fake_quant_start": -1}}, "quant.fake_quant_start: -1, expected 0 or more"),
        ({"quant": {"start": "gptq"}}, "quant.start: 'gptq', expected null"),
        ({"quant": {"scales": "ptq"}}, "quant.scales: 'ptq', expected null"),
        ({"adapter": {"kind": "lora"}}, "adapter.kind: 'lora', expected none"),
        ({"train": {"resume": True}}, "train.resume: True, expected false"),
        ({"export": {"enabled": False}}, "export.enabled: False, expected true"),
        ({"export": {"format": "dequantized"}}, "export.format: 'dequantized', expected compressed"),
        ({"export": {"dir": "served"}}, "export.dir: 'served', expected null"),
    ],
)
def test_a_recipe_of_which_no_fair_table_is_made(tmp_path, sections, said):
    with pytest.raises(RecipeError) as caught:
        study.check_comparable(recipe_of(tmp_path, **sections))
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


def test_a_folder_of_another_recipe_is_left_alone(tmp_path):
    folder = tmp_path / "out" / "ft"
    recipe = recipe_of(tmp_path, output_dir=str(folder))
    study.check_part(folder, recipe)
    folder.mkdir(parents=True)
    study.check_part(folder, recipe)
    save_recipe(recipe, folder / study.MADE_BY)
    study.check_part(folder, recipe)
    with pytest.raises(RecipeError, match="was made by another recipe"):
        study.check_part(folder, recipe_of(tmp_path, output_dir=str(folder), train={"steps": 9}))
    (folder / study.MADE_BY).rename(folder / "notes.txt")
    with pytest.raises(RecipeError, match="was not made by this script"):
        study.check_part(folder, recipe)
