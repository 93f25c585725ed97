"""The recipe: its defaults, what follows from it, and the files and directories that it names."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from engine.config.config import Recipe
from engine.config.errors import CHECK, RecipeError, checkpoint_problems, parse_size, value_problems
from engine.config.reading import parse_recipe
from tests.lib.recipes import minimal, write_minimal


def test_defaults_are_values_that_their_options_take() -> None:
    sections = [getattr(minimal(), item.name) for item in dataclasses.fields(Recipe)]
    sections = [section for section in sections if dataclasses.is_dataclass(section)]
    assert len(sections) == 11
    seen = 0
    for section in sections:  # Recipe.validate passes over defaults but for derived ones
        for item in dataclasses.fields(section):
            values = getattr(section, item.name)
            for value in values if "each" in item.metadata else [values]:
                seen += CHECK in item.metadata
                assert list(value_problems(item.name, value, item.metadata)) == []
    assert seen > 30


def test_all_problems_at_once() -> None:
    with pytest.raises(RecipeError) as error:
        minimal(train={"log_every": 0, "keep_checkpoints": 0}, data={"train": []})
    keys = [line.split(":")[0] for line in str(error.value).splitlines()]
    assert keys == ["data.train", "train.log_every", "train.keep_checkpoints"]


def test_an_assignment_is_checked_by_validate() -> None:
    recipe = minimal()
    recipe.optim.eps = -1.0
    with pytest.raises(RecipeError, match=r"^optim\.eps: -1\.0, expected at least 1e-30$"):
        recipe.validate()


def test_an_assignment_leaves_defaults_to_follow() -> None:
    """An option that still has the default of before is set again; what was assigned is kept."""
    recipe = minimal()
    for kind, merge, learns in (("none", True, True), ("lora", False, False), ("none", True, True)):
        recipe.adapter.kind, recipe.adapter.merge = kind, merge
        recipe.validate()
        assert (recipe.learnable.weight, recipe.learnable.weight_scale) == (learns, learns)


CACHE = {"teacher_cache": "cache", "kd": "kl_top_k", "top_k": 5}


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        ({}, "none"),
        ({"teacher": "somewhere"}, "none"),
        (CACHE, "none"),
        ({"kd_weight": 1.0, "teacher": "somewhere"}, "model"),
        ({"kd_weight": 1.0, "teacher": "self"}, "self"),
        ({"kd_weight": 1.0, "teacher": "somewhere", **CACHE}, "cache"),
    ],
)
def test_which_teacher_a_recipe_has(loss: dict[str, Any], kind: str) -> None:
    assert minimal(loss=loss, learnable={"weight": False}).teacher_kind() == kind


@pytest.mark.parametrize(("fake_quant", "never"), [(None, True), ("off", True), ("weights", False), ("on", False)])
def test_a_run_whose_events_start_fake_quant_does_quantize(tmp_path: Path, fake_quant: str | None, never: bool) -> None:
    argv = ["--config", str(write_minimal(tmp_path)), "--quant.fake_quant_start", "-1"]
    argv += [] if fake_quant is None else ["--schedule", f"[{{at: 3, fake_quant: {fake_quant}}}]"]
    assert parse_recipe(argv, check_files=False).never_quantizes() == never
    assert not minimal().never_quantizes()


def test_parse_size() -> None:
    sizes = {"5GB": 5e9, "500MB": 5e8, "1.5 kb": 1500, "2GiB": 2**31, "3MiB": 3 * 2**20, "17": 17}
    sizes |= dict.fromkeys(("", "GB", "5 GBB", "-1GB", "0GB", "0.5", "1e9", "5G", "1.2.3MB"))
    assert {text: parse_size(text) for text in sizes} == sizes


def test_export_dir() -> None:
    assert minimal().export_dir() == Path("out/export")
    assert minimal(export={"dir": "served"}).export_dir() == Path("served")


# Files


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a model and training data as the smallest recipe names them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "train.jsonl").touch()
    return tmp_path


def test_files_are_relative_to_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "teacher"):
        (tmp_path / name).mkdir()
    recipe = minimal(loss={"kd_weight": 1.0, "teacher": "teacher"}, quant={"scales": "ptq"})
    recipe.data.eval = ["eval.jsonl"]
    with pytest.raises(RecipeError) as error:
        recipe.validate_files()
    where = f"(in {os.getcwd()})"
    assert str(error.value).splitlines() == [
        f"model.path: 'model' {where}, expected config.json in that directory (a Hugging Face checkpoint)",
        f"loss.teacher: 'teacher' {where}, expected config.json in that directory (a Hugging Face checkpoint)",
        f"quant.scales: 'ptq' {where}, expected the directory of a PTQ checkpoint",
        f"data.train[0]: 'train.jsonl' {where}, expected a file",
        f"data.eval[0]: 'eval.jsonl' {where}, expected a file",
    ]
    with pytest.raises(RecipeError, match=r"data\.train\[0\]: 'train\.jsonl'"):
        parse_recipe(["--config", str(write_minimal(tmp_path))])
    recipe.data.eval = ["*.jsonl"]
    with pytest.raises(RecipeError, match=r"'\*\.jsonl' .*, expected a file; patterns are not expanded, name each"):
        recipe.validate_files()
    recipe.data.eval = ["eval.jsonl"]
    for name in ("model", "teacher"):
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").touch()
    (tmp_path / "ptq").mkdir()
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "eval.jsonl").touch()
    recipe.validate_files()
    recipe.model.path = str(tmp_path / "no")
    with pytest.raises(RecipeError, match=r"no', expected a directory with config\.json"):
        recipe.validate_files()


def test_a_name_that_cannot_be_fetched_hides_no_other_mistake(here: Path) -> None:
    recipe = minimal(model={"path": "hf://datasets/Qwen/Tiny"}, loss={"kd_weight": 1.0, "teacher": "nowhere"})
    recipe.data.train = ["no.jsonl", "train.jsonl"]
    found = []
    for check in (recipe.validate_files, recipe.validate_data, recipe.validate_models):
        with pytest.raises(RecipeError) as error:
            check()
        found.append([line.partition(": ")[0] for line in str(error.value).splitlines()])
    names = ["model.path", "loss.teacher", "data.train[0]"]
    assert found == [names, [names[0], names[2]], names[:2]]


def test_a_teacher_is_looked_for_where_it_is_used(here: Path) -> None:
    recipe = minimal(loss={"teacher": "nowhere"})
    recipe.validate_files()
    recipe.loss.kd_weight, recipe.loss.teacher_cache = 1.0, "cache"
    with pytest.raises(RecipeError, match=r"^loss.teacher_cache: 'cache' .*cache_teacher\.py wrote.*$"):
        recipe.validate_files()
    (here / "cache").mkdir()
    (here / "cache" / "manifest.json").write_text("{}")
    recipe.validate_files()


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("nowhere")])
def test_an_output_directory_that_is_a_file_is_named_before_ranks_meet(here: Path, make) -> None:
    make(here / "out")
    with pytest.raises(RecipeError, match=r"^output_dir: 'out', expected a directory, or no file of that name"):
        minimal().validate_files()


@pytest.mark.parametrize("name", ["lr=[1e-4]", "runs*", "a/why?"])
def test_an_output_directory_whose_checkpoints_could_not_be_loaded_is_named(here: Path, name: str) -> None:
    with pytest.raises(RecipeError, match=r"^output_dir: '/.*', expected no \*, \? or \[: DeepSpeed"):
        minimal(output_dir=name).validate_files()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors.index.json"])
def test_a_gigabyte_of_json_is_not_read(here: Path, name: str) -> None:
    path = here / "model" / name
    path.touch()
    os.truncate(path, 2**30)
    (problem,) = checkpoint_problems("model.path", "model")
    assert problem == f"model.path: 'model/{name}' has 1,073,741,824 bytes, expected at most 268,435,456"


OTHER_FORMS = {
    "qwen3-q4_0.gguf": "convert it with launch/convert_gguf.py",
    "pytorch_model.bin": "pickled weights can run code and are not read",
    "consolidated.00.pth": "save_pretrained, which writes safetensors",
    "tf_model.h5": "weights of TensorFlow are not read",
    "model-00001-of-00002.safetensors": "an index lists the files",
}


@pytest.mark.parametrize("name", OTHER_FORMS)
@pytest.mark.parametrize("config", [False, True])
def test_a_checkpoint_without_weights_that_are_read_says_which_it_has(here: Path, name: str, config: bool) -> None:
    (here / "model" / "model.safetensors").rename(here / "model" / name)
    if not config:
        (here / "model" / "config.json").unlink()
    (problem,) = checkpoint_problems("model.path", "model", weights=True)
    expected = "model.safetensors or model.safetensors.index.json" if config else "config.json"
    assert f", expected {expected} in that directory" in problem
    assert f"; found {name}: " in problem and OTHER_FORMS[name] in problem
    (here / "model" / "config.json").write_text("{}")
    assert not list(checkpoint_problems("model.path", "model"))  # where no weights are read


def test_weights_of_the_right_name_are_not_blamed(here: Path) -> None:
    (problem,) = checkpoint_problems("model.path", "model/model.safetensors")
    assert problem.endswith("expected a directory with config.json (a local Hugging Face checkpoint)")
    (here / "model" / "config.json").unlink()
    (problem,) = checkpoint_problems("model.path", "model", weights=True)
    assert problem.endswith("expected config.json in that directory (a Hugging Face checkpoint)")


def test_a_file_in_place_of_a_checkpoint_is_named(here: Path) -> None:
    (here / "qwen3-q4_0.gguf").write_bytes(b"GGUF\x03")
    (problem,) = checkpoint_problems("model.path", "qwen3-q4_0.gguf")
    assert (
        "expected a directory" in problem
        and "; found qwen3-q4_0.gguf: convert it with launch/convert_gguf.py" in problem
    )


@pytest.mark.parametrize("name", ["model/model.safetensors", "model/tokenizer.json", "train.jsonl"])
def test_files_of_another_kind_are_named_before_ranks_meet(here: Path, name: str) -> None:
    (here / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12\n")
    key = "data.train[0]" if name == "train.jsonl" else "model.path"
    with pytest.raises(RecipeError) as refused:
        minimal().validate_files()
    assert str(refused.value) == (
        f"{key}: {name!r} is a git-lfs pointer, not the file itself: run git lfs pull in its repository"
    )


def test_a_file_is_named_once_whatever_its_path(here: Path) -> None:
    """Twice, every sample that is held out would be trained on."""
    recipe = minimal()
    (here / "link.jsonl").symlink_to(here / "train.jsonl")
    recipe.data.eval = ["link.jsonl"]
    with pytest.raises(RecipeError, match=r"^data\.eval\[0\]: 'link\.jsonl' is data\.train\[0\], expected each"):
        recipe.validate_files()
    recipe.data.eval = ["model/../train.jsonl"]
    with pytest.raises(RecipeError, match=r"^data\.eval\[0\]: "):
        recipe.validate()
