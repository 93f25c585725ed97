"""Which part of a model gets which scheme: against every choice that there is, and as rules that give it back."""

import itertools
import random
import re

import pytest

from quant import SCHEMES, Rule
from quant.rules import assign
from tests.lib.tiny import tiny_model
from tools.mixed_precision import Option, Part, allocate, rules_of_choice


def part(*options: tuple[int, float], weights: int = 1) -> Part:
    """A part with options a, b, c, ... of these sizes and costs."""
    return Part(("x",), ("x",), weights, {name: Option(*one) for name, one in zip("abcdef", options, strict=False)})


def random_parts() -> list[Part]:
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
    linears = list(assign(model, schemes[0]).schemes)
    attention = [[f"model.layers.{n}.self_attn.{name}_proj" for name in "qkv"] for n in range(3)]
    sets = attention + [[f"model.layers.{n}.self_attn.o_proj"] for n in range(3)]
    for n in range(3):
        mlp = [name for name in linears if name.startswith(f"model.layers.{n}.mlp.")]
        experts = [name for name in mlp if ".experts." in name]
        sets += [experts] if experts else [[name] for name in mlp]
    assert sorted(itertools.chain(*sets)) == sorted(linears)
    for _ in range(20):
        parts = [Part(tuple(names), tuple(names), len(names), {}) for names in sets]
        chosen = [random.choice(schemes) for _ in sets]
        most, rules = rules_of_choice(parts, [scheme.name for scheme in chosen])
        found = assign(model, SCHEMES[most], [Rule(SCHEMES[rule["scheme"]], rule["layers"]) for rule in rules]).schemes
        expected = {name: scheme for names, scheme in zip(sets, chosen, strict=True) for name in names}
        assert found == expected
