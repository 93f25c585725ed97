"""Many small runs in one job: recipes that differ from the defaults, each with the action that its loop gets."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.reading import load_recipe
from tests.distributed.engine.scripts.train import Action, run_all
from tests.families.variants import VARIANTS
from tests.lib.checkpoints import edit_json
from tests.lib.launcher import on_ranks
from tests.lib.plain import load_result, plain_weights
from tests.lib.recipes import write_chats, write_ds_config, write_recipe
from tests.lib.tiny import tiny_checkpoint
from tools.compressed import load_compressed

SAID = "said.txt"  # what both ranks printed, beside the recipes
TINY = ("qwen3", "llama", "qwen3_moe")
EVEN = "qwen3 even"  # a model whose sizes are multiples of 32
DROPOUT = "qwen3 config.attention_dropout=0.1"  # a model whose attention drops in training
NO_TEACHER = {"kd_weight": 0.0, "teacher": None}


@dataclass(frozen=True)
class Variant:
    """A run.

    Attributes:
        sections: of its recipe, ``stage`` among them.
        model: an architecture of tests.lib.tiny, with its options (``"qwen3_moe wide layers=8"``) and values of its
            config.json (``"config.attention_dropout=0.1"``), or one of tests.families.
        dtype: of the model.
        action: a function of a module, see ``run_all``.
        shipped: the name of a file in ds_configs/, for persistence is off (see ``write_ds_config``).
        ds: what differs in that file.
    """

    sections: Mapping[str, Any]
    model: str = "qwen3"
    dtype: str = "float32"
    action: Action | None = None
    shipped: str = ""
    ds: Mapping[str, Any] = field(default_factory=dict)


class Runs(Mapping[str, Path]):
    """Recipes of runs by their names. A job runs when the first of its recipes is asked for.

    Args:
        directory: where the jobs write, each into a folder of its own.
        jobs: variants by name, or a function that returns those of a directory.
    """

    def __init__(self, directory: Path, *jobs: Mapping[str, Variant] | Callable[[Path], Mapping[str, Variant]]) -> None:
        self._jobs: list[tuple[Path, Mapping[str, Variant]]] = []
        for index, job in enumerate(jobs):
            (base := directory / str(index)).mkdir()
            self._jobs.append((base, job(base) if callable(job) else job))
        self._recipes: dict[str, Path] = {}

    def __getitem__(self, name: str) -> Path:
        if name not in self._recipes:
            self._recipes |= run_variants(*next(job for job in self._jobs if name in job[1]))
        return self._recipes[name]

    def __iter__(self) -> Iterator[str]:
        return (name for _, job in self._jobs for name in job)

    def __len__(self) -> int:
        return sum(len(job) for _, job in self._jobs)

    def said(self) -> str:
        """Return what both ranks of the first job printed."""
        self[next(iter(self))]
        return (self._jobs[0][0] / SAID).read_text()


def runs_of(*jobs: Mapping[str, Variant] | Callable[[Path], Mapping[str, Variant]]) -> Any:
    """Make a fixture of a module: the runs of its jobs."""

    @pytest.fixture(scope="module")
    def paths(tmp_path_factory: pytest.TempPathFactory) -> Runs:
        return Runs(tmp_path_factory.mktemp("runs"), *jobs)

    return paths


def each(names: Iterable[str], more: Iterable[str] = ()) -> pytest.MarkDecorator:
    """Parametrize a test by ``name``; those of ``more`` come with the large counts."""
    return pytest.mark.parametrize("name", [*names, *(pytest.param(name, marks=pytest.mark.full) for name in more)])


def run_variants(directory: Path, variants: Mapping[str, Variant]) -> dict[str, Path]:
    """Run all of them in one job, in this order; the recipe of each by its name.

    A run under hpZ must be the last: its groups of ranks are there until the process ends.
    """
    models = {model: checkpoint(directory, model) for model in {variant.model for variant in variants.values()}}
    data = write_chats(directory / "chats.jsonl")
    written = {}
    for name, variant in variants.items():
        sections = dict(variant.sections)
        if variant.shipped:
            sections["deepspeed"] = write_ds_config(directory, f"{name}_ds", variant.shipped, **variant.ds)
        written[name] = write_recipe(directory, name, models[variant.model], data, dtype=variant.dtype, **sections)
    _, said = on_ranks(run_all, [(variants[name].action, path) for name, path in written.items()])
    (directory / SAID).write_text(said)
    return written


def checkpoint(directory: Path, model: str) -> Path:
    """Write the checkpoint of a variant's ``model``."""
    kind, *words = model.split()
    path = directory / f"model-{model.replace(' ', '-')}"
    if kind not in TINY:
        return VARIANTS[kind].checkpoint(path)
    options = {name: json.loads(value or "true") for name, _, value in (word.partition("=") for word in words)}
    changes = {name.removeprefix("config."): options.pop(name) for name in list(options) if name.startswith("config.")}
    tiny_checkpoint(path, kind, **options)
    edit_json(path / "config.json", **changes)
    return path


def start_of(path: Path) -> dict[str, torch.Tensor]:
    """The weights that a run started with."""
    return dict(plain_weights(load_recipe(path).model.path).named_parameters())


def changed(path: Path) -> set[str]:
    """The parameters that have other values than at the start; theta starts at 0."""
    before, after = start_of(path), load_result(path)["weights"]
    trained = {name for name in after if name.endswith("_theta") and after[name].any()}
    return trained | {name for name in before if not torch.equal(after[name].float(), before[name])}


def assert_same_run(found: Mapping[str, Any], expected: Mapping[str, Any], *, skip: tuple[str, ...] = ()) -> None:
    """Losses, grad norms and Parameters of two results are equal bit for bit, but for those that end in ``skip``."""
    assert found["losses"] == expected["losses"] and found["norms"] == expected["norms"]
    assert_same_weights(found, expected, skip=skip)


def assert_same_weights(found: Mapping[str, Any], expected: Mapping[str, Any], *, skip: tuple[str, ...] = ()) -> None:
    """Parameters of two results are equal bit for bit, but for those that end in ``skip``."""
    assert found["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        assert name.endswith(skip or "none") or torch.equal(found["weights"][name], value), name


def assert_export_is_of_the_last_forward(path: Path) -> None:
    """Weights and scales of a run's export are those that its last forward used, which ``used_weights`` kept."""
    seen = load_result(path)["seen"]
    model, quantization = load_compressed(load_recipe(path).export_dir(), dtype=torch.bfloat16)
    assert not [key for key in model.state_dict() if "lora" in key]
    assert quantization.layers.keys() == seen["used"].keys()
    for name, layer in quantization.layers.items():
        layer.input_fake_quant = False
        with torch.no_grad():
            served = layer(torch.eye(layer.in_features, dtype=torch.bfloat16)).t()
        assert torch.equal(served, seen["used"][name]) and torch.equal(layer.weight_scale(), seen["scales"][name]), name
    each_of_both = {**quantization.layers, **quantization.caches}
    inputs = {name: one.input_scale() for name, one in each_of_both.items() if one.input_s0 is not None}
    assert inputs.keys() == seen["inputs"].keys()
    assert not [name for name, scale in inputs.items() if not torch.equal(scale, seen["inputs"][name])]
