"""Every number of a recipe at the ends of what a computer holds: what cannot be trained with is refused by its key.

The options are found by their types, so that one that is added is tried from then on.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from engine.config.errors import FP32_MAX, RecipeError
from engine.config.quant import RuleRecipe, SchemeRecipe, TensorRecipe
from engine.config.sections import EVENT_RATES, EventRecipe
from tests.distributed.engine.test_every_option import COMPANY, KD, LORA, recipe_of
from tests.unit.engine.config.anything import options

INTEGERS = (-1, 0, 2**31 - 1, 2**31, 2**63 - 1, 2**63)
HUGE = (1e4, 1e10, 1e15, 1e30, 1e38, 2e38, FP32_MAX, 3.5e38, 1e300, 2.0**63)
TINY = (-0.0, 5e-324, 1e-45, 2**-149, 2**-126, 1e-30, 1e-15)
FLOATS = (math.nan, math.inf, -math.inf, -1.0, *HUGE, *TINY, 1 - 2**-53, 1.0)
WITH: dict[str, dict[str, Any]] = {
    **COMPANY,
    "optim.norm_lr": {"learnable.norm": True},
    "optim.adapter_lr": LORA,
    "optim.decay_steps": {"optim.schedule": "wsd"},
    "adapter.rank": LORA,
    "adapter.alpha": {**LORA, "adapter.merge": False, "adapter.init": "error", "quant.scheme": "w4a16_g32"},
    "adapter.ranks": LORA,
    "data.held_out": {"eval.every": 1},
    "eval.every": {"data.held_out": 4},
    "quant.rotate_block": {"quant.rotate": [r".*\.o_proj"]},
    "quant.schemes": {"quant.scheme": "mine"},
    "loss.kd_weight": {"loss.teacher": "other"},
    "loss.top_k": {**KD, "loss.kd": "kl_top_k"},
}
# Numbers of things that are all done: they take as long as they are many.
ENDLESS = {"quant.calibration_batches": 2**31 - 1, "data.max_length": 2**20}


def cases() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Options with values, and what lets them act."""
    of_scheme = {"dtype": "int", "bits": 4, "granularity": "group", "group_size": 32}
    shapes: dict[str, list[Any]] = {
        "data.weights": [[one, 1.0] for one in FLOATS],
        "optim.betas": [pair for one in FLOATS for pair in ((one, 0.95), (0.9, one), (one, one))],
        "adapter.ranks": [{".*q_proj": one} for one in INTEGERS],
        "quant.schemes": [
            {"mine": SchemeRecipe(TensorRecipe(**{**of_scheme, key: one}))}  # type: ignore[arg-type]
            for key in ("bits", "group_size")
            for one in INTEGERS
        ],
        "quant.rules": [[RuleRecipe("w4a16_g32", **{key: one})] for key in ("first", "last") for one in INTEGERS],
        "schedule": [
            *([EventRecipe(at=0, lr={group: one})] for group in EVENT_RATES for one in FLOATS),
            *([EventRecipe(at=0, loss={"lm": one})] for one in FLOATS),
            *([EventRecipe(observe=True, **{key: one})] for key in ("at", "every") for one in INTEGERS),
        ],
    }
    for path, kind in options().items():
        key, types = ".".join(path), {kind, *get_args(kind)}
        values = [*(FLOATS if float in types else ()), *(INTEGERS if int in types else ())]
        for value in shapes.get(key, values):
            yield key, value, WITH.get(key, {})


def accepted(directory: Path) -> list[tuple[str, Any, Any]]:
    """Those whose recipes are read; the others name the key, each in one line."""
    found = []
    for key, value, company in cases():
        if isinstance(value, int) and value > ENDLESS.get(key, value):
            continue
        try:
            found.append((key, value, recipe_of(directory, {**company, key: value})))
        except RecipeError as error:
            assert all(key.partition(".")[0] in line for line in str(error).split("\n")), (key, value, str(error))
            assert key in str(error) or "quant.scheme" in str(error) or "schedule" in str(error), (key, value)
    return found


def test_numbers_that_cannot_be_trained_with_are_refused(tmp_path):
    """And every number of a recipe is tried."""
    found = accepted(tmp_path)
    tried = {key for key, _, _ in cases()}
    assert {"optim.lr", "optim.eps", "adapter.alpha", "loss.temperature", "quant.percentile", "train.seed"} <= tried
    for key, value, recipe in found:
        if key.endswith("lr"):
            assert 0 <= value / (1 - recipe.optim.betas[0]) < FP32_MAX, "AdamW divides by it, as fp32"
        numbers = [one for one in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(one, float)]
        assert all(map(math.isfinite, numbers)), (key, value)
