"""Find changes of a recipe that does not fit: the memory with each of them alone, and a set of them that fits.

A change is tried as a user would make it: the changed recipe is validated and predicted from its model's config.json.
Changes that the recipe refuses, or that have no effect, are left out.
"""

from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from copy import deepcopy
from dataclasses import dataclass
from io import StringIO
from operator import attrgetter
from typing import Any, NamedTuple

from engine.config.config import Recipe
from engine.config.deepspeed import DsConfigError
from engine.config.errors import RecipeError
from model.console import markdown_table, progress_bar
from model.ranks import RankError
from tools.memory.planner import GB, RESERVE, Planner, Prediction

LORA = {"adapter.kind": "lora", "learnable.weight": False}
CACHE = {"loss.teacher_cache": "CACHE", "loss.kd": "kl_top_k", "loss.top_k": 100, "loss.diagnostics_every": 0}


class Saving(NamedTuple):
    """Options to set, and the cost for the user."""

    settings: dict[str, Any]
    cost: str

    def __str__(self) -> str:
        return ", ".join(f"{key}: {str(value).lower()}" for key, value in self.settings.items())


def possible(recipe: Recipe) -> Iterator[Saving]:
    """Yield changes that may save memory, in the order in which to try them; adapters are last."""
    rows, steps = recipe.data.micro_batch_size, recipe.train.gradient_accumulation_steps

    def split(rows: int, steps: int, cost: str) -> Saving:
        return Saving({"data.micro_batch_size": rows, "train.gradient_accumulation_steps": steps}, cost)

    checkpointing = {"train.activation_checkpointing": True}
    yield Saving(checkpointing, "layers compute their forward twice")
    yield split(1, rows * steps, "same steps, smaller GEMMs")
    yield Saving({"deepspeed": "zero3"}, "weights are sent in each forward and backward")
    if steps > 1:
        yield split(rows * steps, 1, "same steps; gradients in 16 bits, but more activations")
    yield Saving({"loss.chunk_tokens": 1024}, "smaller GEMMs at lm_head")
    yield Saving({**checkpointing, "train.activation_offload": True}, "copies to and from the host")
    yield Saving({"optim.moments": "8bit"}, "updates are off by about 10%")
    yield Saving({"loss.teacher_weights": "int8"}, "the teacher's weights are rounded to 8 bits")
    yield Saving({"deepspeed": "zero3_offload"}, "the optimizer's step runs on the CPU")
    yield Saving(CACHE, "the teacher runs once before (launch/cache_teacher.py); only its 100 likeliest tokens count")
    yield Saving(
        {"deepspeed": "zero3_offload_param"}, "the optimizer's step runs on the CPU, and weights come from host memory"
    )
    yield Saving(LORA, "adapters train, not the weights")
    yield Saving(
        {**LORA, "adapter.merge": False, "adapter.base": "quantized"},
        "adapters train beside frozen codes, not the weights",
    )


@dataclass
class Advisor:
    """Predictor of the memory of a recipe with changes.

    Attributes:
        recipe: the recipe without changes.
        ranks, ranks_per_node: number of ranks of the run and of a node.
    """

    recipe: Recipe
    ranks: int
    ranks_per_node: int = 8

    def __post_init__(self) -> None:
        self._planners: dict[str, Planner] = {}

    def predict(self, changes: Sequence[Saving]) -> Prediction | None:
        """Predict the changed recipe; None if it is refused or the changes have no effect."""
        recipe, settings = deepcopy(self.recipe), {k: v for change in changes for k, v in change.settings.items()}
        if changes and all(attrgetter(key)(recipe) == value for key, value in settings.items()):
            return None
        for key, value in settings.items():
            section, _, name = key.rpartition(".")
            setattr(attrgetter(section)(recipe) if section else recipe, name, value)
        strategy = settings.pop("deepspeed", self.recipe.deepspeed)
        with (
            redirect_stdout(StringIO()),
            suppress(RecipeError, DsConfigError, RankError),
        ):  # building a model prints notes
            recipe.validate()
            if (key := str(settings)) not in self._planners:
                self._planners[key] = Planner(recipe, ranks_per_node=self.ranks_per_node)
            return self._planners[key].predict(strategy, self.ranks)
        return None

    def alone(self, limit: int) -> list[tuple[Saving, Prediction]]:
        """Predict each change alone: first those that fit into ``limit`` bytes, then those that save most."""
        before = self.predict([])
        assert before is not None, "the recipe itself cannot be predicted"
        changes = progress_bar(desc="memory", unit="change", over=list(possible(self.recipe)))
        found = [(change, self.predict([change])) for change in changes]
        useful = [(change, one) for change, one in found if one is not None and one.peak < before.peak]
        return sorted(useful, key=lambda pair: (pair[1].peak > limit, pair[1].peak if pair[1].peak > limit else 0))

    def together(self, limit: int) -> tuple[list[Saving], Prediction] | None:
        """Find changes that together fit into ``limit`` bytes, all of them needed; None if there are none."""
        chosen: list[Saving] = []
        best = self.predict(chosen)
        for change in possible(self.recipe):
            if best is not None and best.peak <= limit:
                break
            found = self.predict([*chosen, change])
            if found is not None and (best is None or found.peak < best.peak):
                chosen, best = [*chosen, change], found
        if best is None or best.peak > limit:
            return None
        for change in chosen[-2::-1]:
            others = [one for one in chosen if one is not change]
            if (found := self.predict(others)) is not None and found.peak <= limit:
                chosen, best = others, found
        return chosen, best


def advice(advisor: Advisor, gpu_bytes: int) -> str:
    """Format changes that reduce memory: single changes, best first; if none fits, several together."""
    limit = gpu_bytes - RESERVE
    alone = advisor.alone(limit)
    table = [["change", "peak + reserve, GB", f"fits {gpu_bytes / GB:g} GB", "host, GB", "cost"]]
    for change, one in alone:
        fits = "yes" if one.peak <= limit else "no"
        table.append([str(change), f"{(one.peak + RESERVE) / GB:.2f}", fits, f"{one.host / GB:.2f}", change.cost])
    lines = [f"{advisor.recipe.deepspeed} does not fit {gpu_bytes / GB:g} GB. Changes, best first:", ""]
    lines += [markdown_table(table)]
    if not any(one.peak <= limit for _, one in alone):
        found = advisor.together(limit)
        if found is None:
            lines += ["", "All of them together do not fit either: use more ranks, shorter rows or a smaller model."]
        else:
            changes, best = found
            together = "; ".join(map(str, changes))
            lines += ["", f"Together these fit, {(best.peak + RESERVE) / GB:.2f} GB: {together}"]
    return "\n".join(lines)
