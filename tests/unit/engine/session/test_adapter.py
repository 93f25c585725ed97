"""Adapters at the start: which layers get one, what they hold, folders to start from, a base that is held as codes."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config.errors import RecipeError
from engine.session.student import build_student, empty_student, initial_scales
from model.ranks import RankError
from model.save.export_model import export_model
from quant import SCHEMES
from tests.lib.checkpoints import CPU, edit_json, edit_tensors, quantized
from tests.lib.patience import ends
from tests.lib.tiny import tiny_checkpoint
from tests.unit.engine.session.adapted import DS_CONFIG, adapters, folder, recipe

BESIDE = {"merge": False}
CODES = {"merge": False, "base": "quantized"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {kind: tiny_checkpoint(base / kind, kind, even=True) for kind in ("qwen3", "qwen3_moe")}


def test_every_quantized_linear_gets_one_but_lm_head(tmp_path, checkpoints):
    settings = recipe(tmp_path, checkpoints["qwen3"], quant={"scheme": "w4a16_g32", "lm_head": "w8a16_channel"})
    found = adapters(settings)
    leaves = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert len(found) == 2 * len(leaves) and {name.rpartition(".")[2] for name in found} == set(leaves)
    for layer in found.values():
        assert layer.lora_a.shape == (4, layer.in_features) and layer.lora_b.shape == (layer.out_features, 4)
        assert layer.adapter.scaling == 32 / 4 and not layer.lora_b.any() and not layer.weight.requires_grad
        bound = layer.in_features**-0.5
        assert 0.7 * bound < layer.lora_a.abs().max() <= 1.01 * bound and layer.lora_a.requires_grad
        assert torch.equal(layer.merged_weight(), layer.weight)


def test_targets_and_ranks_are_chosen_by_pattern(tmp_path, checkpoints):
    targets, ranks = [".*(q|o)_proj", ".*\\.0\\..*down_proj"], {".*o_proj": 9, ".*_proj": 2}
    choice = {"targets": targets, "ranks": ranks, "rslora": True, "alpha": 6.0}
    found = adapters(recipe(tmp_path, checkpoints["qwen3"], choice))
    ranks = {name.removeprefix("model.layers."): layer.lora_a.shape[0] for name, layer in found.items()}
    expected = {"0.self_attn.q_proj": 2, "0.self_attn.o_proj": 9, "0.mlp.down_proj": 2}
    assert ranks == expected | {"1.self_attn.q_proj": 2, "1.self_attn.o_proj": 9}
    assert all(layer.adapter.scaling == 6 / layer.lora_a.shape[0] ** 0.5 for layer in found.values())


def test_what_is_drawn_depends_on_the_seed_and_the_name(tmp_path, checkpoints):
    """Other layers with an adapter change nothing, nor what was drawn before."""
    last = {"targets": [".*\\.1\\..*q_proj"]}
    one, *_ = adapters(recipe(tmp_path, checkpoints["qwen3"], last)).values()
    torch.rand(3)
    first, second = adapters(recipe(tmp_path, checkpoints["qwen3"], {"targets": [".*q_proj"]})).values()
    assert torch.equal(one.lora_a, second.lora_a) and not torch.equal(first.lora_a, second.lora_a)
    changed, *_ = adapters(recipe(tmp_path, checkpoints["qwen3"], last, train={"seed": 5})).values()
    assert not torch.equal(one.lora_a, changed.lora_a)


def test_one_half_may_be_frozen(tmp_path, checkpoints):
    """By its name, which no parameter has before the weights are read."""
    layers = adapters(recipe(tmp_path, checkpoints["qwen3"], learnable={"freeze": [".*lora_a"]})).values()
    assert not any(layer.lora_a.requires_grad for layer in layers) and all(one.lora_b.requires_grad for one in layers)


def test_experts_get_one_each(tmp_path, checkpoints):
    """Stacked, in one parameter: those of gate and up of an expert together, as their rows lie."""
    moe = checkpoints["qwen3_moe"]
    found = adapters(recipe(tmp_path, moe, {"ranks": {".*experts.*down_proj": 3}}))
    stacks = {name: layer for name, layer in found.items() if layer.projections}
    assert len(stacks) == 2 * 2 and len(found) == 2 * (2 + 4)
    for layer in stacks.values():
        rank = 3 if layer.projections == ("down_proj",) else 4
        assert layer.lora_a.shape == (5, rank, layer.in_features)
        assert layer.lora_b.shape == (5, layer.out_features, rank)
        assert layer.adapter.scaling == 32 / rank and len({tuple(one.flatten().tolist()) for one in layer.lora_a}) == 5
    apart = adapters(recipe(tmp_path, moe, model={"experts": "per_expert"}))
    assert len([name for name in apart if ".experts." in name]) == 2 * 5 * 3


def test_drawing_adapters_leaves_the_generator_alone(tmp_path, checkpoints):
    """They are the same on every rank, whatever its random state; dropout draws none of them."""
    drawn = []
    for dropout, seed in ((0.0, 3), (0.1, 4)):
        settings = recipe(tmp_path, checkpoints["qwen3"], {**BESIDE, "dropout": dropout})
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        layers = adapters(settings)
        assert torch.equal(torch.get_rng_state(), before)
        assert {layer.adapter.dropout for layer in layers.values()} == {dropout}
        drawn.append({name: layer.lora_a for name, layer in layers.items()})
    assert all(torch.equal(value, drawn[0][name]) for name, value in drawn[1].items())


GIVEN = {"initial_input_scale": 0.5, "calibration_batches": 0}
UNQUANTIZED = {"scheme": "w4a16_g32", "rules": [{"layers": ".*o_proj", "scheme": "none"}]}
ONE_WEIGHT = "these experts share one weight with others"
# Choices of adapters, the rest of the recipe, and what is said before weights are read.
REFUSED = [
    ({"targets": [".*proj", "nothing"]}, {}, "adapter.targets: 'nothing' matches no linear layer"),
    ({"targets": ["lm_head"]}, {}, "adapter.targets: lm_head: lm_head and embeddings get no adapter"),
    ({"targets": [".*embed_tokens"]}, {}, "adapter.targets: model.embed_tokens: lm_head and embeddings"),
    ({"targets": [".*"]}, {}, "adapter.targets: model.embed_tokens, lm_head: lm_head and embeddings"),
    ({"rank": 65}, {}, "rank 65, expected at most 64, the layer's smaller side"),
    ({"ranks": {".*k_proj": 17}}, {}, "k_proj: rank 17, expected at most 16"),
    ({"ranks": {".*x_proj": 2}}, {}, "adapter.ranks: '.*x_proj' decides for no layer"),
    ({"targets": [".*(o|q)_proj"]}, {"quant": UNQUANTIZED}, "o_proj: not quantized"),
    # Experts.
    ({"targets": [".*experts.0.*"]}, {"moe": True}, "experts.0.up_proj, model.layers.0.mlp.experts.0.down"),
    ({"targets": [".*gate_proj"]}, {"moe": True}, ONE_WEIGHT),
    ({"ranks": {".*up_proj": 3}}, {"moe": True}, ONE_WEIGHT),
    (BESIDE, {"moe": True}, "experts that share one weight, whose"),
    (BESIDE, {"moe": True, "model": {"experts": "per_expert"}}, "experts that share one weight in transformers"),
    # Codes that cannot be made of an ordinary checkpoint.
    (CODES, {"quant": {"scheme": "fp8_static", **GIVEN}}, "scheme 'fp8_static' has one scale for a whole weight"),
    (CODES, {"quant": {"scheme": "nvfp4"}}, "scheme 'nvfp4' has one scale for a whole weight"),
    (CODES, {"quant": {"scheme": "w8a8_static"}}, "scales of inputs would be measured in the quantized model"),
    (
        CODES,
        {"loss": {"kd_weight": 1.0, "kd": "kl", "teacher": "self"}},
        "set loss.teacher to model.path, as loss.teacher self",
    ),
    (CODES, {"schedule": [{"at": 1, "fake_quant": False}]}, "remove events that switch fake_quant of weights off"),
    (CODES, {"quant": {"scheme": "source"}}, "has no quantization_config"),
]


@pytest.mark.parametrize(("choice", "sections", "said"), REFUSED)
def test_what_is_refused_before_weights_are_read(tmp_path, checkpoints, choice, sections, said):
    sections = dict(sections)
    path = checkpoints["qwen3_moe" if sections.pop("moe", False) else "qwen3"]
    with pytest.raises((RankError, RecipeError)) as refused:
        empty_student(recipe(tmp_path, path, choice, **sections), DS_CONFIG, CPU)
    assert said in str(refused.value)


# A folder to start from


@pytest.fixture
def start(tmp_path, checkpoints) -> Path:
    return folder(tmp_path / "start", checkpoints["qwen3"])


@pytest.mark.parametrize("merge", (True, False))
def test_they_start_from_a_folder(tmp_path, checkpoints, start, merge):
    found = adapters(recipe(tmp_path, checkpoints["qwen3"], {"start": str(start), "merge": merge}))
    tensors = load_file(start / "adapter_model.safetensors")
    assert len(tensors) == 2 * len(found)
    for name, layer in found.items():
        assert layer.adapter.merges == merge
        for part, parameter in (("A", layer.lora_a), ("B", layer.lora_b)):
            assert torch.equal(parameter, tensors[f"base_model.model.{name}.lora_{part}.weight"]), name


KEY = "base_model.model.model.layers.0.self_attn.q_proj"
# What is wrong with a folder, its configuration or its tensors; and what is said.
WRONG = [
    ({"use_dora": True}, "use_dora is True, which is not read here; expected plain LoRA"),
    ({"new_trick": {"a": 1}}, "new_trick is {'a': 1}, which is not read here"),
    ({"new_trick": "x" * 10**6}, "x..., which is not read here"),
    ({"init_lora_weights": "pissa_niter_4"}, "which changes the weights of the base as well"),
    ({"bias": "all"}, "bias is 'all', expected 'none'"),
    ({"peft_type": "IA3"}, "peft_type is 'IA3', expected 'LORA'"),
    ({"lora_alpha": 8}, "is 2, expected 8, which follows from adapter.alpha"),
    ({"alpha_pattern": {"layers.1.*q_proj": 8}}, "the factor of model.layers.1.self_attn.q_proj is 2"),
    ({"r": 8}, "r is 8, but its lora_A has 4 rows"),
    ({"r": None}, "r is None, expected a number above 0"),
    ({"lora_alpha": float("nan")}, "lora_alpha is nan, expected a number above 0"),
    ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
    ({"rank_pattern": {"(a+)+b": 4}}, "rank_pattern: "),
    ({"rank_pattern": ["a"]}, "rank_pattern is ['a'], expected numbers above 0 by pattern"),
    (lambda t: {k: v for k, v in t.items() if "q_proj.lora_B" not in k}, "expected lora_A [rank, in] and"),
    (lambda t: {k: v for k, v in t.items() if "q_proj" not in k}, "it has no A and B for model.layers.0.self"),
    (lambda t: {k: torch.cat([v, v], 1) if "A" in k else v for k, v in t.items()}, "and [64, 4], expected"),
    (
        lambda t: {**t, f"{KEY}.lora_A.default.weight": torch.ones(4, 64)},
        "q_proj.lora_A.default.weight belong to the same layer",
    ),
    (lambda t: {**t, "base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}, "lm_head is no linear layer"),
    (lambda t: {**t, "base_model.model.x.lora_embedding_A": torch.ones(4, 64)}, "lora_embedding_A"),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_a_folder_that_is_not_what_the_recipe_says_is_refused(tmp_path, checkpoints, start, change, said):
    if isinstance(change, dict):
        edit_json(start / "adapter_config.json", **change)
    else:
        tensors = change(load_file(start / "adapter_model.safetensors"))
        save_file(tensors, start / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RankError) as refused:
        empty_student(recipe(tmp_path, checkpoints["qwen3"], {"start": str(start)}), DS_CONFIG, CPU)
    assert "adapter.start: " in str(refused.value) and said in str(refused.value)


def test_a_folder_of_another_base_is_refused(tmp_path, checkpoints, start):
    tensors = load_file(start / "adapter_model.safetensors")
    save_file(tensors, start / "adapter_model.safetensors", metadata={"format": "pt", "base": "of another"})
    with pytest.raises(RankError, match=r"adapter.start: .*it was trained on another checkpoint than model.path"):
        empty_student(recipe(tmp_path, checkpoints["qwen3"], {"start": str(start)}), DS_CONFIG, CPU)


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SPOILED = [(CONFIG, b"{"), (CONFIG, b"[]"), (WEIGHTS, b"\xff" * 99)]
SPOILED += [(file, other) for file in (CONFIG, WEIGHTS) for other in (None, os.mkfifo)]


@pytest.mark.parametrize(("file", "contents"), SPOILED)
def test_no_folder_garbage_and_pipes_are_named(tmp_path, checkpoints, start, file, contents):
    (start / file).unlink()
    if isinstance(contents, bytes):
        (start / file).write_bytes(contents)
    elif contents is not None:
        contents(start / file)
    with ends(file), pytest.raises(RankError, match=f"adapter.start: .*{file}"):
        empty_student(recipe(tmp_path, checkpoints["qwen3"], {"start": str(start)}), DS_CONFIG, CPU)


@pytest.mark.parametrize("change", [lambda t: t.fill_(float("nan")), lambda t: t.int()])
def test_an_adapter_of_other_values_than_finite_floats_is_refused(tmp_path, checkpoints, start, change):
    key = f"{KEY}.lora_B.weight"
    edit_tensors(start, key, lambda tensors: tensors.update({key: change(tensors[key])}))
    with pytest.raises(RankError, match=rf"adapter.start: .*{key} .* has NaN, Inf or .*, expected finite floats only"):
        adapters(recipe(tmp_path, checkpoints["qwen3"], {"start": str(start)}))


def test_pickled_weights_of_an_adapter_are_not_opened(tmp_path, checkpoints, start):
    (start / WEIGHTS).unlink()
    torch.save({"x": torch.ones(1)}, start / "adapter_model.bin")
    with pytest.raises(RankError, match=r"only adapter_model.bin: pickled weights can run code and are not read"):
        empty_student(recipe(tmp_path, checkpoints["qwen3"], {"start": str(start)}), DS_CONFIG, CPU)


# A base that is held as codes


def test_a_base_that_codes_do_not_say_is_refused(tmp_path, checkpoints):
    """Weights quantized otherwise; and scales of which one would take the place of several."""
    source, path = checkpoints["qwen3"], tmp_path / "nvfp4"
    export_model(*quantized(source, SCHEMES["nvfp4"], learn_weight_scale=False), source, path)
    settings = recipe(tmp_path, path, CODES, quant={"scheme": "source"})
    model, quantization = build_student(settings, DS_CONFIG, CPU)
    initial_scales(settings, model, quantization)
    assert all(layer.held is not None for layer in quantization.layers.values())

    other = recipe(tmp_path, path, CODES, quant={"scheme": "w4a16_g32"})
    said = r"adapter.base: quantized: .*weight is quantized as .*set quant.scheme to source"
    with pytest.raises(RankError, match=said):
        build_student(other, DS_CONFIG, CPU)

    edit_tensors(path, key := "model.layers.1.self_attn.k_proj.weight_global_scale", lambda t: t[key].mul_(2))
    model, quantization = build_student(settings, DS_CONFIG, CPU)
    said = r"adapter.base: quantized, but .*layers.1.self_attn.k_proj.* cannot use the checkpoint"
    with pytest.raises(RankError, match=said):
        initial_scales(settings, model, quantization)


def test_codes_are_made_of_an_ordinary_checkpoint(tmp_path, checkpoints):
    """All quantized layers are packed except lm_head, which keeps its weight; scales of inputs may be given."""
    for quant in ({"scheme": "w4a16_g32"}, {"scheme": "w8a8_static", **GIVEN, "lm_head": "w8a16_channel"}):
        settings = recipe(tmp_path, checkpoints["qwen3"], CODES, quant=quant)
        model, quantization = build_student(settings, DS_CONFIG, CPU)
        assert initial_scales(settings, model, quantization) == set()
        for name, layer in quantization.layers.items():
            assert layer.weight_s0.isfinite().all() and (layer.held is None) == (name == "lm_head")
