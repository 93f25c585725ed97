"""Adapters that start from a folder, and folders that are refused."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.session.student import empty_student
from model.ranks import RankError
from tests.lib.patience import ends
from tests.unit.engine.session.adapted import CPU, DS_CONFIG, FROZEN, adapters, folder, recipe


@pytest.mark.parametrize("merge", (True, False))
def test_they_start_from_a_folder(tmp_path, checkpoints, merge):
    start = folder(tmp_path / "start", checkpoints["qwen3"])
    found = adapters(recipe(tmp_path, checkpoints["qwen3"], {"start": str(start), "merge": merge}, **FROZEN))
    tensors = load_file(start / "adapter_model.safetensors")
    assert len(tensors) == 2 * len(found)
    for name, layer in found.items():
        assert layer.adapter.merges == merge
        for part, parameter in (("A", layer.lora_a), ("B", layer.lora_b)):
            assert torch.equal(parameter, tensors[f"base_model.model.{name}.lora_{part}.weight"]), name


# What is wrong with a folder: its configuration, metadata, tensors; and what is said.
WRONG = {
    "dora": ({"use_dora": True}, None, "use_dora is True, which is not read here; expected plain LoRA"),
    "unheard of": ({"new_trick": {"a": 1}}, None, "new_trick is {'a': 1}, which is not read here"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, None, "which changes the weights of the base as well"),
    "bias": ({"bias": "all"}, None, "bias is 'all', expected 'none'"),
    "kind": ({"peft_type": "IA3"}, None, "peft_type is 'IA3', expected 'LORA'"),
    "strength": ({"lora_alpha": 8}, None, "is multiplied by 2, and adapter.alpha, rank and rslora give 8"),
    "one strength": ({"alpha_pattern": {"layers.1.*q_proj": 8}}, None, "layers.1.self_attn.q_proj is multiplied by 2"),
    "rank": ({"r": 8}, None, "r is 8, and its lora_A has 4 rows"),
    "no number": ({"r": None}, None, "r is None, expected a number above 0"),
    "nan": ({"lora_alpha": float("nan")}, None, "lora_alpha is nan, expected a number above 0"),
    "beyond fp32": ({"lora_alpha": 10**400}, None, "lora_alpha is 1000"),
    "a page": ({"new_trick": "x" * 10**6}, None, "x..., which is not read here"),
    "endless": ({"rank_pattern": {"(a+)+b": 4}}, None, "rank_pattern: "),
    "not numbers": ({"rank_pattern": ["a"]}, None, "rank_pattern is ['a'], expected numbers above 0 by pattern"),
    "another base": ({}, lambda t: t, "it was trained on another checkpoint than model.path"),
    "half": ({}, lambda t: {k: v for k, v in t.items() if "q_proj.lora_B" not in k}, "expected lora_A [rank, in] and"),
    "less": ({}, lambda t: {k: v for k, v in t.items() if "q_proj" not in k}, "it has nothing for model.layers.0.self"),
    "wide": ({}, lambda t: {k: torch.cat([v, v], 1) if "A" in k else v for k, v in t.items()}, "and [64, 4], expected"),
    "twice": (
        {},
        lambda t: {**t, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.ones(4, 64)},
        "q_proj.lora_A.default.weight are of one layer, expected one of them",
    ),
    "head": ({}, lambda t: {**t, "base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}, "lm_head is no linear"),
    "table": ({}, lambda t: {**t, "base_model.model.x.lora_embedding_A": torch.ones(4, 64)}, "lora_embedding_A"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_folder_that_is_not_what_the_recipe_says_is_refused(tmp_path, checkpoints, name):
    changes, change, said = WRONG[name]
    start = folder(tmp_path / "start", checkpoints["qwen3"])
    config = json.loads((start / "adapter_config.json").read_text())
    (start / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    if change is not None:
        tensors = load_file(start / "adapter_model.safetensors")
        metadata = {"format": "pt", **({"base": "of another"} if name == "another base" else {})}
        save_file(change(tensors), start / "adapter_model.safetensors", metadata=metadata)
    with pytest.raises(RankError) as refused:
        empty_student(recipe(tmp_path, checkpoints["qwen3"], {"start": str(start)}), DS_CONFIG, CPU)
    assert "adapter.start: " in str(refused.value) and said in str(refused.value)


def test_no_folder_and_garbage_are_named(tmp_path, checkpoints):
    start = folder(tmp_path / "start", checkpoints["qwen3"])
    cases = [("adapter_config.json", b"{"), ("adapter_config.json", b"[]"), ("adapter_model.safetensors", b"\xff" * 99)]
    for file, contents in [*cases, ("adapter_model.safetensors", None), ("adapter_config.json", None)]:
        kept = (start / file).read_bytes()
        (start / file).unlink() if contents is None else (start / file).write_bytes(contents)
        with pytest.raises(RankError, match=f"adapter.start: .*{file}"):
            empty_student(recipe(tmp_path, checkpoints["qwen3"], {"start": str(start)}), DS_CONFIG, CPU)
        (start / file).write_bytes(kept)


@pytest.mark.parametrize("change", [lambda t: t.fill_(float("nan")), lambda t: t.int()])
def test_an_adapter_of_other_values_than_finite_floats_is_refused(tmp_path, checkpoints, change):
    start = folder(tmp_path / "start", checkpoints["qwen3"])
    tensors = load_file(start / "adapter_model.safetensors")
    key = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    save_file({**tensors, key: change(tensors[key])}, start / "adapter_model.safetensors")
    with pytest.raises(RankError, match=rf"adapter.start: .*{key} is .*, and not all of it finite floats"):
        adapters(recipe(tmp_path, checkpoints["qwen3"], {"start": str(start)}))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_named_and_not_waited_for(tmp_path, checkpoints, name):
    start = folder(tmp_path / "start", checkpoints["qwen3"])
    (start / name).unlink()
    os.mkfifo(start / name)
    with ends(name), pytest.raises(RankError, match=f"adapter.start: .*{name} is not there"):
        empty_student(recipe(tmp_path, checkpoints["qwen3"], {"start": str(start)}), DS_CONFIG, CPU)


def test_pickled_weights_of_an_adapter_are_not_opened(tmp_path, checkpoints):
    start = folder(tmp_path / "start", checkpoints["qwen3"])
    (start / "adapter_model.safetensors").unlink()
    torch.save({"x": torch.ones(1)}, start / "adapter_model.bin")
    with pytest.raises(RankError, match=r"only adapter_model.bin: pickled weights can run code and are not read"):
        empty_student(recipe(tmp_path, checkpoints["qwen3"], {"start": str(start)}), DS_CONFIG, CPU)
