"""Patterns of users and of other people's exports match names in a bounded time; ours match what they must, no more."""

import re

import pytest
import torch
from compressed_tensors.utils.match import is_match

from quant.rules import DEFAULT_EXEMPT, name_patterns, pattern_problem

LINEAR = torch.nn.Linear(1, 1)
NAME = "model.language_model.layers.117.mlp.experts.127.shared_expert_gate_proj_weight!"


@pytest.mark.parametrize(
    "pattern",
    [
        *DEFAULT_EXEMPT,
        r".*layers\.(\d+)\..*mlp\.experts\.\d+\..*_proj",
        r"model\.layers\.(0|1|2|17)\.self_attn\.(q|k|v)_proj",
        r"(?:.*\.)?visual(?:\..*)?$",
        r"(?!.*lm_head).*",
        r"[a-z_.]{1,8}",
        "",
    ],
)
def test_what_people_write_is_taken(pattern):
    assert pattern_problem(pattern) is None
    re.fullmatch(pattern, NAME)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(a+)+b", "repeats what holds a repetition"),
        (r"(\w+\.?)*x", "repeats what holds a repetition"),
        ("((.*)*)*", "repeats what holds a repetition"),
        ("(.|_.)*x", "or alternatives"),
        ("(?:a*){20}b", "repeats what holds a repetition"),
        ("(?=(a+)+b)", "repeats what holds a repetition"),
        (".*" * 5 + "x", "it has 5 repetitions like .*, at most 4 are allowed"),
        ("a{0,65000}" * 9, "it has 9 repetitions"),
        ("a" * 3000, "it has 3,000 characters"),
        ("(" * 900 + ")" * 900, ""),
        ("(", "missing ), unterminated subpattern"),
    ],
)
def test_what_may_take_for_ever_is_refused(pattern, said):
    problem = pattern_problem(pattern)
    assert said == "" or (problem is not None and said in problem)


def test_name_patterns_of_random_sets_match_those_and_no_others(seed):
    """Any subset of the names of a model, with and without an end that follows them."""
    names = ["lm_head", "embed", *(f"m.{i}.a{leaf}" for i in range(4) for leaf in ("", "_b"))]
    names += [f"m.{i}.experts.{e}.{leaf}" for i in range(4) for e in range(3) for leaf in ("up", "down")]
    for _ in range(50):
        chosen = torch.rand(len(names)) < torch.rand(())
        mine = [name for name, is_mine in zip(names, chosen, strict=True) if is_mine]
        others = [name for name in names if name not in mine]
        entries = name_patterns(mine, others)
        assert [name for name in names if is_match(name, LINEAR, entries)] == mine
        with_end = name_patterns(mine, others, r"\.end")
        assert [name for name in names if is_match(f"{name}.end", LINEAR, with_end)] == mine
        assert all(entry.startswith("re:") and re.compile(entry[3:]) for entry in with_end)
