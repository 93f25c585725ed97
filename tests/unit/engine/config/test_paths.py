"""Files and directories that a recipe names: looked for before a run begins, once, and never read without end."""

import os
from pathlib import Path

import pytest

from engine.config.errors import RecipeError, checkpoint_problems
from engine.config.reading import parse_recipe
from tests.unit.engine.config.recipes import minimal, write


def test_files_are_relative_to_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model", "teacher"):
        (tmp_path / name).mkdir()
    recipe = minimal()
    recipe.loss.kd_weight, recipe.loss.teacher, recipe.quant.scales = 1.0, "teacher", "ptq"
    recipe.data.eval = ["eval.jsonl"]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as error:
        recipe.validate_files()
    here = f"(in {os.getcwd()})"
    assert str(error.value).splitlines() == [
        f"model.path: 'model' {here}, expected config.json in that directory (a Hugging Face checkpoint)",
        f"loss.teacher: 'teacher' {here}, expected config.json in that directory (a Hugging Face checkpoint)",
        f"quant.scales: 'ptq' {here}, expected the directory of a PTQ checkpoint",
        f"data.train[0]: 'train.jsonl' {here}, expected a file",
        f"data.eval[0]: 'eval.jsonl' {here}, expected a file",
    ]
    for name in ("model", "teacher"):
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "ptq").mkdir()
    (tmp_path / "train.jsonl").write_text("")
    (tmp_path / "eval.jsonl").write_text("")
    recipe.validate_files()
    recipe.model.path = str(tmp_path / "no")
    with pytest.raises(RecipeError, match=r"no', expected a directory with config\.json"):
        recipe.validate_files()


def test_a_teacher_that_is_not_used_is_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text("")
    recipe = minimal()
    recipe.loss.teacher = "nowhere"
    recipe.validate_files()


def test_a_cached_teacher_is_looked_for_and_not_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text("")
    recipe = minimal()
    recipe.loss.kd_weight, recipe.loss.teacher, recipe.loss.teacher_cache = 1.0, "nowhere", "cache"
    with pytest.raises(RecipeError, match=r"loss.teacher_cache: 'cache' .*cache_teacher\.py wrote"):
        recipe.validate_files()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "manifest.json").write_text("{}")
    recipe.validate_files()


def test_parse_recipe_checks_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"data\.train\[0\]: 'train\.jsonl'"):
        parse_recipe(["--config", str(write(tmp_path))])


@pytest.mark.parametrize("target", [None, "nowhere"])
def test_an_output_directory_that_is_a_file_is_named_before_ranks_meet(tmp_path: Path, target: str | None) -> None:
    path = tmp_path / "out"
    if target is None:
        path.write_text("mine")
    else:
        path.symlink_to(tmp_path / target)
    recipe = minimal(output_dir=str(path))
    with pytest.raises(RecipeError, match=rf"output_dir: '{path}', expected a directory, or no file of that name"):
        recipe.validate_files()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors.index.json"])
def test_a_gigabyte_of_json_is_not_read(tmp_path: Path, name: str) -> None:
    for file in {"config.json", name}:
        (tmp_path / file).write_text("{}")
    with (tmp_path / name).open("r+b") as stream:
        stream.truncate(2**30)
    (problem,) = checkpoint_problems("model.path", str(tmp_path))
    assert problem == f"model.path: '{tmp_path / name}' has 1,073,741,824 bytes, expected at most 268,435,456"


def test_a_file_is_named_once_whatever_its_path(tmp_path: Path) -> None:
    """Twice, every sample that is held out would be trained on."""
    data = tmp_path / "a.jsonl"
    data.touch()
    (tmp_path / "link.jsonl").symlink_to(data)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").touch()
    recipe = minimal()
    recipe.model.path = str(model)
    recipe.data.train = [str(data)]
    recipe.validate_files()
    recipe.data.eval = [str(tmp_path / "link.jsonl")]
    with pytest.raises(RecipeError, match=r"^data\.eval\[0\]: .*link\.jsonl' is data\.train\[0\], expected each"):
        recipe.validate_files()
    recipe.data.eval = [f"{tmp_path}/model/../a.jsonl"]
    with pytest.raises(RecipeError, match=r"^data\.eval\[0\]: "):
        recipe.validate()
