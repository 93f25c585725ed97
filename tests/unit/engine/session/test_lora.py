"""Which layers get an adapter, what is refused before weights are read, and what the adapters hold at the start."""

import pytest
import torch

from engine.session.student import empty_student
from model.ranks import RankError
from tests.unit.engine.session.adapted import BESIDE, CPU, DS_CONFIG, FROZEN, adapters, recipe


def test_every_quantized_linear_gets_one_but_lm_head(tmp_path, checkpoints):
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
    """Some of stacked experts, layers that are not quantized, weights of several modules, stacks with one beside."""
    model, moe = checkpoints["qwen3"], checkpoints["qwen3_moe"]
    none = {"quant": {"scheme": "w4a16_g32", "rules": [{"layers": ".*o_proj", "scheme": "none"}]}}
    cases = [
        (recipe(tmp_path, moe, {"targets": [".*experts.0.*"]}), "experts.0.up_proj, model.layers.0.mlp.experts.0.down"),
        (recipe(tmp_path, moe, {"targets": [".*gate_proj"]}), "these experts lie in one weight with others"),
        (recipe(tmp_path, moe, {"ranks": {".*up_proj": 3}}), "these experts lie in one weight with others"),
        (recipe(tmp_path, model, {"targets": [".*(o|q)_proj"]}, **none), "o_proj: not quantized"),
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


def test_ranks_drop_elements_of_their_own(tmp_path, checkpoints, monkeypatch):
    """While they draw the same A; without dropout the generator is left where it was on every rank."""
    choice = {**BESIDE, "rank": 4}
    drawn = {}
    for dropout in (0.0, 0.1):
        settings = recipe(tmp_path, checkpoints["qwen3"], {**choice, "dropout": dropout}, **FROZEN)
        for own in (0, 1):
            monkeypatch.setattr("engine.session.lora.this_rank", lambda own=own: own)
            torch.manual_seed(3)
            layers = adapters(settings)
            drawn[dropout, own] = torch.rand(8), {name: layer.lora_a for name, layer in layers.items()}
            assert {layer.adapter.dropout for layer in layers.values()} == {dropout}
    for _, values in drawn.values():
        assert all(torch.equal(value, drawn[0.0, 0][1][name]) for name, value in values.items())
    assert torch.equal(drawn[0.0, 0][0], drawn[0.0, 1][0])
    assert not torch.equal(drawn[0.1, 0][0], drawn[0.1, 1][0])
