"""Patterns of users and of other people's exports are compared with names in a bounded time."""

import re

import pytest

from quant.patterns import pattern_problem
from quant.rules import DEFAULT_EXEMPT

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
