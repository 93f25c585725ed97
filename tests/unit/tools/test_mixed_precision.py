"""Sizes and costs of the parts of a model, and which part gets which scheme: against every choice that there is."""

import itertools
import random
import re

import pytest
import torch

from model.ranks import RankError
from model.save.export_model import export_model
from quant import SCHEMES, Rule
from quant.rules import assign
from tests.lib.checkpoints import CPU, quantized, read_tensors
from tests.lib.tiny import tiny_checkpoint, tiny_model
from tools.mixed_precision import LayerSet, Option, allocate, divergences, layer_sets, patterns, rules_of_choice


def part(*options: tuple[int, float], weights: int = 1) -> LayerSet:
    """A part with options a, b, c, ... of these sizes and costs."""
    return LayerSet(("x",), ("x",), weights, {name: Option(*one) for name, one in zip("abcdef", options, strict=False)})


def random_parts() -> list[LayerSet]:
    """Costs mostly fall with size, as errors do; not always, as in measurements."""
    parts = []
    for _ in range(random.randint(1, 6)):
        weights = random.randint(1, 50)
        bits = sorted(random.sample(range(1, 9), random.randint(1, 4)))
        parts.append(part(*((one * weights, random.random() * 2.0**-one) for one in bits), weights=weights))
    return parts


@pytest.mark.usefixtures("seed")
def test_the_choice_is_as_good_as_the_best_one_but_for_a_step():
    for _ in range(200):
        parts = random_parts()
        weights = sum(one.weights for one in parts)
        budget = random.uniform(1, 8)
        choices = [
            (sum(option.bits for option in choice), sum(option.cost for option in choice))
            for choice in itertools.product(*(one.options.values() for one in parts))
        ]
        costs = [cost for bits, cost in choices if bits <= budget * weights]
        if not costs:
            least = min(bits for bits, _ in choices) / weights
            with pytest.raises(ValueError, match="or more: the smallest schemes need them") as error:
                allocate(parts, budget)
            said = float(re.search(r"expected ([\d.]+)", str(error.value))[1])
            assert least <= said < least + 1.01e-4
            allocate(parts, said)  # what the text asks for is enough
            continue
        chosen = [one.options[name] for one, name in zip(parts, allocate(parts, budget), strict=True)]
        assert sum(option.bits for option in chosen) <= budget * weights * (1 + 1e-12)
        step = max(
            max(o.cost for o in one.options.values()) - min(o.cost for o in one.options.values()) for one in parts
        )
        assert min(costs) <= sum(option.cost for option in chosen) <= min(costs) + step


def test_bits_go_where_they_save_most_and_never_where_they_save_nothing():
    parts = [part((2, 1.0), (4, 0.5)), part((2, 9.0), (4, 1.0)), part((2, 0.1), (4, 0.1)), part((2, 0.5), (2, 0.2))]
    assert allocate(parts, 2.5) == ["a", "b", "a", "b"]
    assert allocate(parts, 8) == ["b", "b", "a", "b"]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_rules_give_the_choice_back(kind, seed):
    """As quant.rules are applied to the Linears of a model, experts included; over many choices."""
    model = tiny_model(kind, layers=3)
    schemes = [SCHEMES[name] for name in ("w2a16_g32", "w4a16_g32", "w8a16_channel")]
    linears = list(assign(model, schemes[0])[0])
    attention = [[f"model.layers.{n}.self_attn.{name}_proj" for name in "qkv"] for n in range(3)]
    sets = attention + [[f"model.layers.{n}.self_attn.o_proj"] for n in range(3)]
    for n in range(3):
        mlp = [name for name in linears if name.startswith(f"model.layers.{n}.mlp.")]
        experts = [name for name in mlp if ".experts." in name]
        sets += [experts] if experts else [[name] for name in mlp]
    assert sorted(itertools.chain(*sets)) == sorted(linears)
    for _ in range(20):
        parts = [LayerSet(tuple(names), tuple(names), len(names), {}) for names in sets]
        chosen = [random.choice(schemes) for _ in sets]
        most, rules = rules_of_choice(parts, [scheme.name for scheme in chosen])
        found = assign(model, SCHEMES[most], [Rule(SCHEMES[rule["scheme"]], rule["layers"]) for rule in rules])[0]
        expected = {name: scheme for names, scheme in zip(sets, chosen, strict=True) for name in names}
        assert found == expected


# ---- sizes and costs


@pytest.mark.parametrize(
    ("scheme", "experts"),
    [
        ("w4a16_g32", "stacked"),
        ("w3a16_g32", "per_expert"),
        ("w8a16_asym", "stacked"),
        ("fp8_dynamic", "per_expert"),
        ("nvfp4", "stacked"),
    ],
)
def test_parts_are_all_layers_once_and_have_the_bytes_of_the_export(scheme, experts, tmp_path, seed):
    source = tiny_checkpoint(tmp_path / "source", "qwen3_moe", seed=seed, wide=True)
    model, quantization = quantized(source, SCHEMES[scheme], experts=experts)
    parts = layer_sets(model, quantization, scheme, (), torch.bfloat16)
    assert sorted(name for part in parts for name in part.layers) == sorted(quantization.layers)
    # q, k and v; o; all experts: of each of two layers.
    assert [len(part.linears) for part in parts[:3]] == [3, 1, len(parts[2].linears)] and len(parts) == 6
    assert all(".experts." in name for name in parts[2].linears)

    export_model(model, quantization, source, tmp_path / "export")
    tensors = read_tensors(tmp_path / "export")
    for part in parts:
        found = {key: one for key, one in tensors.items() if key.rpartition(".")[0] in part.linears}
        bits = 8 * sum(one.nbytes for key, one in found.items() if not key.endswith("weight_shape"))
        assert part.options[scheme].bits == bits and bits > 0
    original = read_tensors(source)
    assert sum(part.weights for part in parts) == sum(
        original[f"{name}.weight"].numel() for part in parts for name in part.linears
    )


def test_divergences_are_those_of_the_logits(monkeypatch, tmp_path, seed):
    """Sets of layers alone and together, over samples of several lengths, in fp64; nothing is changed by it."""
    monkeypatch.setattr("tools.mixed_precision._TOKENS", 7)
    model, quantization = quantized(tiny_checkpoint(tmp_path, "qwen3", seed=seed, wide=True), SCHEMES["w2a16_g32"])
    model.float()
    layers = list(quantization.layers)
    sets = [layers[:1], random.sample(layers, 3), layers]
    batches = [
        {
            "input_ids": torch.randint(0, 301, (rows, length)),
            "spans": torch.tensor([[row, 0, length] for row in range(rows)]),
        }
        for rows, length in ((2, 33), (1, 8))
    ]
    model.train()
    quantization.set_fake_quant(True, True)
    before = quantization.fake_quant_state()
    found = divergences(model, quantization, sets, batches, CPU)
    assert quantization.fake_quant_state() == before and model.training
    model.eval()
    tokens = 2 * 33 + 8
    for names, value in zip(sets, found, strict=True):
        expected = 0.0
        for batch in batches:
            logits = []
            for on in ([], names):
                quantization.set_fake_quant(False, False)
                for name in on:
                    quantization.set_fake_quant(True, True, name.replace(".", r"\."))
                with torch.no_grad():
                    logits.append(model(input_ids=batch["input_ids"]).logits.double().log_softmax(-1))
            expected += float((logits[0].exp() * (logits[0] - logits[1])).sum())
        assert expected > 0
        assert value == pytest.approx(expected / tokens, rel=1e-3)
    quantization.layers[layers[0]].weight_s0.fill_(torch.inf)
    with pytest.raises(RankError, match=f"with only {re.escape(layers[0])} quantized is nan: logits"):
        divergences(model, quantization, sets, batches, CPU)


def test_patterns_take_any_expert_and_no_other_number():
    names = [
        f"model.layers.{layer}.{part}" for layer in (0, 2) for part in ("mlps.1.up", "experts.0.up", "experts.1.up")
    ]
    assert patterns(names) == [r"model\.layers\.(0|2)\.mlps\.1\.up", r"model\.layers\.(0|2)\.experts\.\d+\.up"]
