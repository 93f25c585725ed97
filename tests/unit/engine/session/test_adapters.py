"""Which layers get an adapter, what is refused before weights are read, and what the adapters hold at the start."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.recipe.checks import RecipeError
from engine.recipe.reading import load_recipe
from engine.recipe.recipe import Recipe
from engine.session.student import build_student, empty_student, initial_scales
from model.build import build_model
from model.load import load_weights
from model.ranks import RankError
from model.save import export_model
from model.scales import renew_weight_scales
from quant import SCHEMES, prepare
from tests.patience import ends
from tests.tiny import tiny_checkpoint

CPU = torch.device("cpu")
DS_CONFIG = {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {kind: tiny_checkpoint(base / kind, kind, even=True) for kind in ("qwen3", "qwen3_moe")}


def recipe(directory: Path, path: Path, choice: dict | None = None, /, **sections) -> Recipe:
    contents = {
        "model": {"path": str(path)},
        "data": {"train": ["a.jsonl"]},
        "train": {"steps": 4},
        "output_dir": "out",
        "quant": {"scheme": "w4a16_g32"},
        "learnable": {"weight": False},
        "adapter": {"kind": "lora", "rank": 4, **(choice or {})},
        **sections,
    }
    file = directory / "recipe.yaml"
    file.write_text(json.dumps(contents))  # JSON is YAML
    return load_recipe(file)


def adapters(settings: Recipe) -> dict[str, torch.nn.Module]:
    """The layers with an adapter by name."""
    _, quantization = build_student(settings, DS_CONFIG, CPU)
    return {name: layer for name, layer in quantization.layers.items() if layer.adapter is not None}


def test_every_quantised_linear_gets_one_but_lm_head(tmp_path, checkpoints):
    settings = recipe(tmp_path, checkpoints["qwen3"], {}, quant={"scheme": "w4a16_g32", "lm_head": "w8a16_channel"})
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
    choice = {
        "targets": [".*(q|o)_proj", ".*\\.0\\..*down_proj"],
        "ranks": {".*o_proj": 9, ".*_proj": 2},
        "rslora": True,
    }
    found = adapters(recipe(tmp_path, checkpoints["qwen3"], {**choice, "alpha": 6.0}))
    ranks = {name.removeprefix("model.layers."): layer.lora_a.shape[0] for name, layer in found.items()}
    expected = {"0.self_attn.q_proj": 2, "0.self_attn.o_proj": 9, "0.mlp.down_proj": 2}
    assert ranks == expected | {"1.self_attn.q_proj": 2, "1.self_attn.o_proj": 9}
    assert all(layer.adapter.scaling == 6 / layer.lora_a.shape[0] ** 0.5 for layer in found.values())


def test_what_is_drawn_depends_on_the_seed_and_the_name(tmp_path, checkpoints):
    """Not on which other layers get one, nor on what was drawn before."""
    one, *_ = adapters(recipe(tmp_path, checkpoints["qwen3"], {"targets": [".*\\.1\\..*q_proj"]})).values()
    torch.rand(3)
    several = adapters(recipe(tmp_path, checkpoints["qwen3"], {"targets": [".*q_proj"]}))
    first, second = several.values()
    assert torch.equal(one.lora_a, second.lora_a) and not torch.equal(first.lora_a, second.lora_a)
    other = {"train": {"steps": 4, "seed": 5}}
    changed, *_ = adapters(recipe(tmp_path, checkpoints["qwen3"], {"targets": [".*\\.1\\..*q_proj"]}, **other)).values()
    assert not torch.equal(one.lora_a, changed.lora_a)


def test_one_half_may_be_frozen(tmp_path, checkpoints):
    """By its name, which no parameter has before the weights are read."""
    freeze = {"weight": False, "freeze": [".*lora_a"]}
    layers = adapters(recipe(tmp_path, checkpoints["qwen3"], learnable=freeze)).values()
    assert not any(layer.lora_a.requires_grad for layer in layers) and all(one.lora_b.requires_grad for one in layers)


def test_stacked_experts_get_one_each(tmp_path, checkpoints):
    """In one parameter: those of gate and up of an expert together, as their rows lie."""
    found = adapters(recipe(tmp_path, checkpoints["qwen3_moe"], {"ranks": {".*experts.*down_proj": 3}}))
    stacks = {name: layer for name, layer in found.items() if layer.projections}
    assert len(stacks) == 2 * 2 and len(found) == 2 * (2 + 4)
    for layer in stacks.values():
        rank = 3 if layer.projections == ("down_proj",) else 4
        assert layer.lora_a.shape == (5, rank, layer.in_features) and layer.lora_b.shape == (
            5,
            layer.out_features,
            rank,
        )
        assert layer.adapter.scaling == 32 / rank and len({tuple(one.flatten().tolist()) for one in layer.lora_a}) == 5


def test_experts_of_their_own_get_one_each(tmp_path, checkpoints):
    settings = recipe(
        tmp_path, checkpoints["qwen3_moe"], {}, model={"path": str(checkpoints["qwen3_moe"]), "experts": "per_expert"}
    )
    assert len([name for name in adapters(settings) if ".experts." in name]) == 2 * 5 * 3


BAD = {
    "matches nothing": ({"targets": [".*proj", "nothing"]}, "adapter.targets: 'nothing' matches no linear layer"),
    "lm_head": ({"targets": ["lm_head"]}, "adapter.targets: lm_head: lm_head and embeddings get no adapter"),
    "embeddings": ({"targets": [".*embed_tokens"]}, "adapter.targets: model.embed_tokens: lm_head and embeddings"),
    "everything": ({"targets": [".*"]}, "adapter.targets: model.embed_tokens, lm_head: lm_head and embeddings"),
    "rank too large": ({"rank": 65}, "rank 65, expected at most 64, the layer's smaller side"),
    "a rank of its own": ({"ranks": {".*k_proj": 17}}, "k_proj: rank 17, expected at most 16"),
    "ranks of nothing": ({"ranks": {".*x_proj": 2}}, "adapter.ranks: '.*x_proj' matches no layer with an adapter"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_adapters_are_refused_before_weights_are_read(tmp_path, checkpoints, name):
    adapter, said = BAD[name]
    with pytest.raises(RankError) as refused:
        empty_student(recipe(tmp_path, checkpoints["qwen3"], adapter), DS_CONFIG, CPU)
    assert said in str(refused.value)


def test_layers_that_no_adapter_fits_are_refused(tmp_path, checkpoints):
    """Some of stacked experts, layers that are not quantised, weights of several modules, stacks with one beside."""
    model, moe = checkpoints["qwen3"], checkpoints["qwen3_moe"]
    none = {"quant": {"scheme": "w4a16_g32", "rules": [{"layers": ".*o_proj", "scheme": "none"}]}}
    cases = [
        (recipe(tmp_path, moe, {"targets": [".*experts.0.*"]}), "experts.0.up_proj, model.layers.0.mlp.experts.0.down"),
        (recipe(tmp_path, moe, {"targets": [".*gate_proj"]}), "these experts lie in one weight with others"),
        (recipe(tmp_path, moe, {"ranks": {".*up_proj": 3}}), "these experts lie in one weight with others"),
        (recipe(tmp_path, model, {"targets": [".*(o|q)_proj"]}, **none), "o_proj: not quantised"),
    ]
    beside = {"merge": False}
    frozen = {"learnable": {"weight": False, "weight_scale": False}}
    cases.append((recipe(tmp_path, moe, beside, **frozen), "experts that lie in one weight"))
    apart = {"model": {"path": str(moe), "experts": "per_expert"}}
    cases.append((recipe(tmp_path, moe, beside, **frozen, **apart), "experts that transformers has in one weight"))
    for settings, said in cases:
        with pytest.raises(RankError) as refused:
            empty_student(settings, DS_CONFIG, CPU)
        assert said in str(refused.value), refused.value


BESIDE, FROZEN = {"kind": "lora", "merge": False}, {"learnable": {"weight": False, "weight_scale": False}}
CONTRADICTIONS = [
    ({"learnable": {"weight": True}}, "learnable.weight: True, expected false with adapter.kind lora"),
    ({"quant": {"scheme": "w4a16_g32", "fake_quant_start": -1}}, "quant.fake_quant_start: -1 (never), expected 0 or"),
    (
        {"quant": {"scheme": "fp8_static", "gather_codes": True}},
        "quant.gather_codes: True, expected false with adapter",
    ),
    ({"train": {"steps": 4, "compile": True}}, "train.compile: True, expected false with adapter.kind lora"),
    ({"adapter": {"targets": [".*"]}}, "adapter.targets: ['.*'], expected nothing, or adapter.kind lora"),
    ({"adapter": {"ranks": {".*": 3}}}, "adapter.ranks: {'.*': 3}, expected nothing, or adapter.kind lora"),
    ({"adapter": {"kind": "lora", "ranks": {"(": 3}}}, "adapter.ranks: {'(': 3}, expected regular expressions"),
    ({"adapter": {"kind": "lora", "rank": 0}}, "adapter.rank: 0, expected at least 1"),
    ({"adapter": {"kind": "lora", "dropout": 0.1}}, "dropout"),
    ({"adapter": {"merge": False}}, "adapter.merge: False, expected true, or adapter.kind lora: there are no adapters"),
    ({"adapter": {"start": "a"}}, "adapter.start: 'a', expected null, or adapter.kind lora: there are no adapters"),
    (
        {"adapter": {"kind": "lora", "init": "error"}},
        "adapter.init: 'error', expected zeros, or adapter.kind lora with",
    ),
    ({"adapter": BESIDE}, "learnable: more than adapters learns, expected weight_scale, act_scale, norm, router to be"),
    (
        {"adapter": {**BESIDE, "ranks": {".*q_proj": 3}}, **FROZEN},
        "adapter.ranks: {'.*q_proj': 3}, expected nothing with adapter.merge false: vLLM multiplies",
    ),
    (
        {"adapter": BESIDE, **FROZEN, "export": {"format": "mlx"}},
        "export.format: 'mlx', expected one of compressed, vllm_fp8, dequantized, peft with adapter.merge false",
    ),
    (
        {"adapter": {"kind": "lora", "dropout": 0.1}},
        "adapter.dropout: 0.1, expected 0, or adapter.kind lora with adapter.merge false",
    ),
    ({"adapter": {"dropout": 0.1}}, "adapter.dropout: 0.1, expected 0, or adapter.kind lora with adapter.merge false"),
    *(
        ({"adapter": {**BESIDE, "dropout": share}, **FROZEN}, f"adapter.dropout: {share}, expected a number of at")
        for share in (1.0, -0.1, 1.5)
    ),
    (
        {"adapter": {"kind": "lora", "base": "codes"}},
        "adapter.base: 'codes', expected weights, or adapter.kind lora with",
    ),
    (
        {"adapter": {**BESIDE, "base": "nf4"}, **FROZEN},
        "adapter.base: Expected one of ['weights', 'codes']. Got value: nf4",
    ),
    *(
        (
            {"adapter": {**BESIDE, "base": "codes"}, **FROZEN, "quant": {"scheme": "w4a16_g32", **quant}},
            f"adapter.base: 'codes', expected weights{said}",
        )
        for quant, said in (
            ({"start": "a"}, " with quant.start or quant.scales"),
            ({"scales": "a"}, " with quant.start or quant.scales"),
            ({"fake_quant_start": 2}, "; or codes with quant.fake_quant_start 0"),
            ({"scales_follow_weights": True, "weight_range": "absmax"}, "; or codes with quant.fake_quant_start 0"),
        )
    ),
    (
        {"adapter": {**BESIDE, "base": "codes", "init": "error"}, **FROZEN},
        "adapter.init: 'error', expected zeros with adapter.base codes",
    ),
    ({"export": {"format": "peft"}}, "export.format: 'peft', expected another format, or adapter.kind lora with"),
]


@pytest.mark.parametrize(("sections", "said"), CONTRADICTIONS)
def test_knobs_that_do_not_go_together(tmp_path, sections, said):
    with pytest.raises(RecipeError) as refused:
        recipe(tmp_path, Path("model"), **sections)
    assert said in str(refused.value)


def test_ranks_drop_elements_of_their_own(tmp_path, checkpoints, monkeypatch):
    """While they draw the same A; without dropout the generator is left where it was on every rank."""
    choice = {**BESIDE, "rank": 4}
    drawn = {}
    for dropout in (0.0, 0.1):
        settings = recipe(tmp_path, checkpoints["qwen3"], {**choice, "dropout": dropout}, **FROZEN)
        for own in (0, 1):
            monkeypatch.setattr("engine.session.adapters.this_rank", lambda own=own: own)
            torch.manual_seed(3)
            layers = adapters(settings)
            drawn[dropout, own] = torch.rand(8), {name: layer.lora_a for name, layer in layers.items()}
            assert {layer.adapter.dropout for layer in layers.values()} == {dropout}
    for _, values in drawn.values():
        assert all(torch.equal(value, drawn[0.0, 0][1][name]) for name, value in values.items())
    assert torch.equal(drawn[0.0, 0][0], drawn[0.0, 1][0])
    assert not torch.equal(drawn[0.1, 0][0], drawn[0.1, 1][0])


def quantised(source: Path, directory: Path, scheme: str) -> Path:
    """The checkpoint in a scheme."""
    model = build_model(source, DS_CONFIG, dtype=torch.bfloat16, device=CPU)
    load_weights(model, source, progress=False)
    quantization = prepare(model, SCHEMES[scheme], learn_weight_scale=False, learn_input_scale=False)
    renew_weight_scales(quantization)
    export_model(model, quantization, source, directory)
    return directory


def test_a_base_that_codes_do_not_say_is_refused(tmp_path, checkpoints):
    """Weights quantised otherwise; and scales of which one would take the place of several."""
    base = {**BESIDE, "rank": 4, "base": "codes"}
    path = quantised(checkpoints["qwen3"], tmp_path / "nvfp4", "nvfp4")
    settings = recipe(tmp_path, path, base, **FROZEN, quant={"scheme": "source"})
    model, quantization = build_student(settings, DS_CONFIG, CPU)
    initial_scales(settings, model, quantization)
    assert all(layer.held is not None for layer in quantization.layers.values())

    other = recipe(tmp_path, path, base, **FROZEN, quant={"scheme": "w4a16_g32"})
    with pytest.raises(RankError, match=r"adapter.base: codes: .*weight is quantised as .*set quant.scheme to source"):
        build_student(other, DS_CONFIG, CPU)

    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight_global_scale"] *= 2
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    model, quantization = build_student(settings, DS_CONFIG, CPU)
    with pytest.raises(RankError, match=r"adapter.base: codes: .*layers.1.self_attn.k_proj.* do not have the scales"):
        initial_scales(settings, model, quantization)


GIVEN = {"initial_input_scale": 0.5, "calibration_batches": 0}
# What the recipe has beside a base whose codes are to be made, and what is said.
NOT_MADE = [
    ({"quant": {"scheme": "fp8_static", **GIVEN}}, "q_proj: .*scheme 'fp8_static' has a scale that a whole weight"),
    ({"quant": {"scheme": "nvfp4"}}, "q_proj: .*scheme 'nvfp4' has a scale that a whole weight, or several, must be"),
    ({"quant": {"scheme": "w8a8_static"}}, "scales of inputs would be measured in another model"),
    ({"loss": {"kd_weight": 1.0, "kd": "kl", "teacher": "self"}}, "set loss.teacher to it, as loss.teacher self would"),
    ({"schedule": [{"at": 1, "fake_quant": False}]}, "leave fake_quant of weights on in the schedule"),
    ({"quant": {"scheme": "source"}}, "has no quantization_config"),
]


@pytest.mark.parametrize(("sections", "said"), NOT_MADE)
def test_codes_that_cannot_be_made_are_refused_before_weights_are_read(tmp_path, checkpoints, sections, said):
    base = {**BESIDE, "rank": 4, "base": "codes"}
    with pytest.raises((RankError, RecipeError), match=said):
        empty_student(recipe(tmp_path, checkpoints["qwen3"], base, **{**FROZEN, **sections}), DS_CONFIG, CPU)


def test_codes_are_made_of_an_ordinary_checkpoint(tmp_path, checkpoints):
    """Of all quantised layers but lm_head, which keeps its weight; scales of inputs may be given."""
    base = {**BESIDE, "rank": 4, "base": "codes"}
    settings = recipe(tmp_path, checkpoints["qwen3"], base, **FROZEN, quant={"scheme": "w4a16_g32"})
    model, quantization = build_student(settings, DS_CONFIG, CPU)
    assert initial_scales(settings, model, quantization) == set()
    quant = {"scheme": "w8a8_static", **GIVEN, "lm_head": "w8a16_channel"}
    given = recipe(tmp_path, checkpoints["qwen3"], base, **FROZEN, quant=quant)
    other, static = build_student(given, DS_CONFIG, CPU)
    assert initial_scales(given, other, static) == set() and static.layers["lm_head"].held is None
    for layer in (*quantization.layers.values(), *static.layers.values()):
        assert layer.weight_s0.isfinite().all() and (layer.held is not None or layer is static.layers["lm_head"])


def folder(directory: Path, base: Path, rank: int = 4, alpha: float = 32.0, only: str = "_proj") -> Path:
    """An adapter as peft would write it for the Linears whose names end so, and its tensors on disk."""
    directory.mkdir()
    drawn = adapters(recipe(directory, base, {"rank": rank, "targets": [f".*{only}"]}))
    tensors = {}
    for name, layer in drawn.items():
        for part, parameter in (("A", layer.lora_a), ("B", layer.lora_b)):
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = torch.randn_like(parameter).detach()
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


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


def test_adapters_alone_may_train(tmp_path):
    recipe(tmp_path, Path("model"), learnable={"weight": False, "weight_scale": False})


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
