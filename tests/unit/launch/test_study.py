"""launch/study.py: how its parts differ, and what it refuses before any of them is made."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import DbrxConfig, GPT2Config, LlamaConfig, MixtralConfig

from engine.config.config import Recipe
from engine.config.errors import RecipeError
from engine.config.quant import QuantRecipe, SchemeRecipe, TensorRecipe
from engine.config.reading import parse_recipe, save_recipe
from engine.config.sections import (
    AdapterRecipe,
    DataRecipe,
    EventRecipe,
    ExportRecipe,
    LearnableRecipe,
    LossRecipe,
    ModelRecipe,
    OptimRecipe,
    TrainRecipe,
)
from launch import study
from tests.lib.tiny import tiny_config

OF_FILES = SchemeRecipe(TensorRecipe("int", bits=4, granularity="channel"))
EVENTS = [
    EventRecipe(at=0, fake_quant=False),
    EventRecipe(at=2, fake_quant=True, lr={"weights": 1e-4}),
    EventRecipe(when="loss/lm < 2.5", loss={"lm": 0.5}),
    EventRecipe(every=3, observe=True),
    EventRecipe(at=4, freeze_scales=True),
]


def recipe_of(directory: Path, **sections) -> Recipe:
    recipe = Recipe(
        model=ModelRecipe(path="model"),
        data=DataRecipe(train=["train.jsonl"]),
        train=TrainRecipe(steps=8),
        output_dir=str(directory / "out"),
    )
    return replace(recipe, **sections)


def test_parts_differ_in_quantization_alone(tmp_path):
    recipe = recipe_of(tmp_path, schedule=EVENTS)
    save_recipe(recipe, tmp_path / "recipe.yaml")
    parts = {
        part: parse_recipe(
            ["--config", str(tmp_path / "recipe.yaml"), *study.changes_of(part, recipe)], check_files=False
        )
        for part in study.scripts_of(recipe, [])
    }
    out = tmp_path / "out"
    assert parts["qat"] == replace(recipe, output_dir=str(out / "qat"))
    assert parts["ptq"] == replace(
        recipe, output_dir=str(out / "ptq"), model=replace(recipe.model, path=str(out / "ft" / "export"))
    )
    assert parts["ft"] == replace(
        recipe,
        output_dir=str(out / "ft"),
        quant=replace(recipe.quant, fake_quant_start=-1),
        schedule=[
            EventRecipe(at=2, lr={"weights": 1e-4}),
            EventRecipe(when="loss/lm < 2.5", loss={"lm": 0.5}),
        ],
    )
    assert parts["ft"].never_quantizes() and not recipe.never_quantizes()
    study.check_recipe(recipe)


@pytest.mark.parametrize(
    "changed",
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
def test_ft_leaves_out_what_never_acts_without_fake_quant(tmp_path, changed):
    recipe = recipe_of(tmp_path)
    sections = {name: replace(getattr(recipe, name), **options) for name, options in changed.items()}
    recipe = replace(recipe, **sections)
    save_recipe(recipe, tmp_path / "recipe.yaml")
    words = ["--config", str(tmp_path / "recipe.yaml")]
    with pytest.raises(RecipeError, match="has no effect unless fake quant is on at some step"):
        parse_recipe([*words, "--quant.fake_quant_start", "-1"], check_files=False)
    plain = parse_recipe([*words, *study.changes_of("ft", recipe)], check_files=False)
    kept = {key: getattr(recipe.quant, key) for key in ("scheme", "weight_range", "calibration_batches")}
    assert plain.quant == QuantRecipe(fake_quant_start=-1, **kept) and plain.learnable == recipe_of(tmp_path).learnable
    assert plain.optim == recipe_of(tmp_path).optim
    study.check_recipe(recipe)


def test_ptq_and_qat_begin_with_the_same_codes(tmp_path):
    recipe = recipe_of(tmp_path, quant=QuantRecipe(scheme="w2a16_g32", init="gptq"))
    save_recipe(recipe, tmp_path / "recipe.yaml")
    parts = {
        part: parse_recipe(
            ["--config", str(tmp_path / "recipe.yaml"), *study.changes_of(part, recipe)], check_files=False
        )
        for part in study.scripts_of(recipe, [])
    }
    assert {part: one.quant.init for part, one in parts.items()} == {
        "ft": "rtn",
        "ptq": "gptq",
        "qat": "gptq",
    }


def test_ptqs_of_several_codes_stand_beside_one_qat(tmp_path):
    """A part for each, once; the recipe's own codes are those of the part ``ptq``."""
    recipe = recipe_of(tmp_path, quant=QuantRecipe(scheme="w2a16_g32", init="gptq"))
    save_recipe(recipe, tmp_path / "recipe.yaml")
    scripts = study.scripts_of(recipe, ["blockwise", "gptq", "rtn", "blockwise"])
    assert list(scripts) == ["ft", "ptq", "ptq_blockwise", "ptq_rtn", "qat"]
    codes = {}
    for part in scripts:
        words = ["--config", str(tmp_path / "recipe.yaml"), *study.changes_of(part, recipe)]
        codes[part] = parse_recipe(words, check_files=False).quant.init
    assert codes == {"ft": "rtn", "ptq": "gptq", "ptq_blockwise": "blockwise", "ptq_rtn": "rtn", "qat": "gptq"}
    (tmp_path / "made").mkdir()
    tiny_config("llama").save_pretrained(tmp_path / "made")
    made = str(tmp_path / "made")
    found = study.compared(recipe, scripts, {"autoround": made})
    names = [f"w2a16_g32 {name}" for name in ("gptq", "blockwise", "rtn", "autoround")]
    parts = [str(tmp_path / "out" / part / "export") for part in ("ptq", "ptq_blockwise", "ptq_rtn")]
    assert found == dict(zip(names, [*parts, made], strict=True))
    assert list(study.compared(recipe, study.scripts_of(recipe, []), {})) == ["w2a16_g32"]
    for name, directory, said in (
        ("blockwise", made, "expected another name"),
        ("other", "nowhere", "nowhere, expected"),
    ):
        with pytest.raises(RecipeError, match=said):
            study.compared(recipe, scripts, {name: directory})


def test_a_model_that_teaches_itself_is_its_own_ft(tmp_path):
    """PTQ is of the model as it is; whatever else would move FT has one trained."""
    model = tmp_path / "model"
    tiny_config("llama").save_pretrained(model)
    itself = LossRecipe(lm_weight=0.0, kd_weight=1.0, kd="kl", teacher=f"{model}/.")
    recipe = recipe_of(tmp_path, loss=itself, model=ModelRecipe(str(model)))
    assert study.teaches_itself(recipe) and study.reference(recipe) == model
    assert study.changes_of("ptq", recipe)[-2:] == ["--model.path", str(model)]
    moving = {"loss": [replace(itself, lm_weight=0.1), replace(itself, teacher="other")]}
    moving |= {"schedule": [[EventRecipe(at=2, loss={"lm": 0.5})]], "optim": [OptimRecipe(weight_decay=0.1)]}
    moving |= {"train": [TrainRecipe(steps=8, compile=True)]}
    for section, values in moving.items():
        for value in values:
            assert not study.teaches_itself(replace(recipe, **{section: value})), (section, value)


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
    assert study.training_differs(recipe_of(tmp_path, model=ModelRecipe(str(tmp_path / "model")))) == said


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"quant": QuantRecipe(scheme="source", schemes={"source": OF_FILES})},
            "quant.scheme: 'source', expected a scheme",
        ),
        ({"quant": QuantRecipe(fake_quant_start=-1)}, "quant.fake_quant_start: -1, expected 0 or more"),
        ({"quant": QuantRecipe(start="gptq")}, "quant.start: 'gptq', expected null"),
        ({"quant": QuantRecipe(scales="ptq")}, "quant.scales: 'ptq', expected null"),
        (
            {"adapter": AdapterRecipe(kind="lora"), "learnable": LearnableRecipe(weight=False)},
            "adapter.kind: 'lora', expected none",
        ),
        ({"train": TrainRecipe(steps=8, resume=True)}, "train.resume: True, expected false"),
        ({"export": ExportRecipe(enabled=False)}, "export.enabled: False, expected true"),
        ({"export": ExportRecipe(format="dequantized")}, "export.format: 'dequantized', expected compressed"),
        ({"export": ExportRecipe(dir="served")}, "export.dir: 'served', expected null"),
    ],
)
def test_a_recipe_of_which_no_fair_table_is_made(tmp_path, sections, said):
    with pytest.raises(RecipeError) as caught:
        study.check_recipe(recipe_of(tmp_path, **sections))
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


def test_a_folder_of_another_recipe_is_left_alone(tmp_path):
    recipe, folder = recipe_of(tmp_path), tmp_path / "out" / "ft"
    recipe = replace(recipe, output_dir=str(folder))
    study.check_part(folder, recipe)
    folder.mkdir(parents=True)
    study.check_part(folder, recipe)
    save_recipe(recipe, folder / study.MADE_BY)
    study.check_part(folder, recipe)
    with pytest.raises(RecipeError, match="was made by another recipe"):
        study.check_part(folder, replace(recipe, train=TrainRecipe(steps=9)))
    (folder / study.MADE_BY).rename(folder / "notes.txt")
    with pytest.raises(RecipeError, match="was not made by this script"):
        study.check_part(folder, recipe)
