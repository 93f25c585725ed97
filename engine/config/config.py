"""The recipe: all options of a run, typed, documented and checked before the process group starts.

One dataclass field is one option; engine/config/reading.py reads options from YAML and the command line. Values out of
bounds and contradicting options fail here, with the key's path, the value and the expected value: a typo in a 64-GPU
job should cost a second, not the wait for queue, process group and model.

:meth:`Recipe.validate` checks values only, so that a recipe can be read anywhere; :meth:`Recipe.validate_files` checks
the recipe's files. Paths in a YAML file are relative to the current directory, not to that file.
"""

import os
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from data.files import other_kind
from engine.config.contradictions import contradictions, derive
from engine.config.errors import RecipeError, checkpoint_problems, default_of, not_empty, not_there, value_problems
from engine.config.quant import QuantRecipe
from engine.config.sections import (
    AdapterRecipe,
    DataRecipe,
    EvalRecipe,
    EventRecipe,
    ExportRecipe,
    LearnableRecipe,
    LossRecipe,
    ModelRecipe,
    OptimRecipe,
    TeacherKind,
    TrainRecipe,
)


@dataclass
class Recipe:
    """Output directory, schedule events and ZeRO strategy.

    The whole recipe: built from YAML and the command line by :func:`engine.config.reading.parse_recipe`, or in Python.

    Raises:
        RecipeError: a value is out of bounds or contradicts another value.
    """

    model: ModelRecipe
    """The checkpoint to train."""
    data: DataRecipe
    """Training samples."""
    train: TrainRecipe
    """The loop."""
    output_dir: str = field(metadata=not_empty("a directory"))
    """Directory for everything that the run writes: recipe, TensorBoard files, checkpoints, export."""
    quant: QuantRecipe = field(default_factory=QuantRecipe)
    """Quantization."""
    learnable: LearnableRecipe = field(default_factory=LearnableRecipe)
    """Switches of trainable parameters."""
    adapter: AdapterRecipe = field(default_factory=AdapterRecipe)
    """Adapters, which train in place of the weights."""
    optim: OptimRecipe = field(default_factory=OptimRecipe)
    """Optimizer and schedule."""
    loss: LossRecipe = field(default_factory=LossRecipe)
    """Losses and teacher."""
    schedule: list[EventRecipe] = field(default_factory=list)
    """Events. Each has one of at (a step), every (a number of steps), when (a condition like loss/lm < 2.5); and one or
    more of fake_quant (true, false, weights, activations), layers (regex), observe, freeze_scales, lr (by group), loss
    (by name)."""
    eval: EvalRecipe = field(default_factory=EvalRecipe)
    """Evaluation during training."""
    export: ExportRecipe = field(default_factory=ExportRecipe)
    """Compressed checkpoint."""
    deepspeed: str = field(default="zero3", metadata=not_empty("a name in ds_configs/ or a JSON file"))
    """ZeRO strategy: the name of a file in ds_configs/ (zero0 ... zero3_offload) or the path of such a JSON file."""

    def __post_init__(self) -> None:
        self._derived: dict[str, Any] = {}
        self.validate()

    def export_dir(self) -> Path:
        """Return the directory of the compressed checkpoint."""
        return Path(self.export.dir) if self.export.dir else Path(self.output_dir) / "export"

    def distils(self) -> bool:
        """Tell if the distillation loss has a weight above 0 at any step, from the start or by an event."""
        later = any((event.loss or {}).get("kd", 0) > 0 for event in self.schedule)
        return self.loss.kd_weight > 0 or later

    def teacher_kind(self) -> TeacherKind:
        """Return the kind of the run's teacher; "none" without distillation, even if ``loss`` names a teacher."""
        return self.loss.named_teacher() if self.distils() else "none"

    def never_quantizes(self) -> bool:
        """Tell if fake quant is off in all steps."""
        return self.quant.fake_quant_start == -1 and not any(event.fake_quant for event in self.schedule)

    def invalidates(self) -> bool:
        """Tell if training invalidates inactive scales.

        With unmerged adapters it does not: the base model and the inputs of its layers stay unchanged.
        """
        learn = self.learnable
        return not self.adapter.beside and any((learn.weight, learn.norm, learn.router, self.adapter.on))

    def validate(self) -> None:
        """Set derived defaults, check every value, and check values against each other; no file is read.

        Call it again after an assignment to a field.

        Raises:
            RecipeError: all problems, one line each.
        """
        derive(self, self._derived)
        problems = list(_field_problems(self, ""))
        problems += self.quant.problems()
        for index, event in enumerate(self.schedule):
            problems += event.problems(f"schedule[{index}]")
        if len(self.data.train) + len(self.data.eval) > 1:
            problems += _named_twice(self.data, os.path.abspath)
        keys = {problem.partition(":")[0] for problem in problems}
        problems += (line for line in contradictions(self) if line.partition(":")[0] not in keys)
        if problems:
            raise RecipeError("\n".join(problems))

    def validate_models(self) -> None:
        """Check that the recipe's models have configurations, for uses that do not read weights.

        Raises:
            RecipeError: all problems, one line each.
        """
        if problems := list(self._model_problems(weights=False)):
            raise RecipeError("\n".join(problems))

    def _model_problems(self, *, weights: bool) -> Iterator[str]:
        yield from checkpoint_problems("model.path", self.model.path, weights=weights)
        if self.teacher_kind() == "model":  # with a cache, the teacher's checkpoint is not needed any more
            yield from checkpoint_problems("loss.teacher", str(self.loss.teacher), weights=weights)

    def validate_data(self) -> None:
        """Check that the files of the data and the student's configuration exist, for uses that read nothing else.

        Raises:
            RecipeError: all problems, one line each.
        """
        if problems := [*checkpoint_problems("model.path", self.model.path), *self._data_problems()]:
            raise RecipeError("\n".join(problems))

    def _data_problems(self) -> Iterator[str]:
        for key, files in (("data.train", self.data.train), ("data.eval", self.data.eval)):
            for index, file in enumerate(files):
                if not os.path.isfile(file):
                    yield f"{key}[{index}]: {not_there(file)}, expected a file"
                elif problem := other_kind(file, plain=self.data.kind == "text"):
                    yield f"{key}[{index}]: {file!r} {problem}"
        if len(self.data.train) + len(self.data.eval) > 1:
            yield from _named_twice(self.data, _file_identity)  # links to one file too

    def validate_files(self) -> None:
        """Check that the recipe's input files and directories exist, relative to the current directory.

        Raises:
            RecipeError: all problems, one line each.
        """
        problems = list(self._model_problems(weights=True))
        if self.teacher_kind() == "cache":
            cache = str(self.loss.teacher_cache)
            if not os.path.isfile(os.path.join(cache, "manifest.json")):
                said = "expected a directory that launch/cache_teacher.py wrote, with manifest.json"
                problems.append(f"loss.teacher_cache: {not_there(cache)}, {said}")
        for key in ("scales", "start"):
            if (path := getattr(self.quant, key)) is not None and not os.path.isdir(path):
                problems.append(f"quant.{key}: {not_there(path)}, expected the directory of a PTQ checkpoint")
        problems += self._data_problems()
        if os.path.lexists(self.output_dir) and not os.path.isdir(self.output_dir):
            problems.append(f"output_dir: {self.output_dir!r}, expected a directory, or no file of that name")
        if problems:
            raise RecipeError("\n".join(problems))


def _field_problems(section: Any, path: str) -> Iterator[str]:
    """Yield a line for each bad value in a section and its subsections; defaults are not checked."""
    for item in fields(section):
        value, key = getattr(section, item.name), f"{path}.{item.name}".lstrip(".")
        if value == default_of(item):
            continue
        listed = isinstance(value, list) and ("each" in item.metadata or any(map(is_dataclass, value)))
        for at, one in ({f"{key}[{n}]": one for n, one in enumerate(value)} if listed else {key: value}).items():
            yield from _field_problems(one, at) if is_dataclass(one) else value_problems(at, one, item.metadata)


def _named_twice(data: DataRecipe, identity: Callable[[str], Hashable]) -> Iterator[str]:
    """Yield a line for each repeated file of data.train and data.eval; equal files have equal ``identity``."""
    first: dict[Hashable, str] = {}
    for key, files in (("data.train", data.train), ("data.eval", data.eval)):
        for index, file in enumerate(files):
            here = f"{key}[{index}]"
            if (there := first.setdefault(identity(file), here)) != here:
                yield f"{here}: {file!r} is {there}, expected each file once (data.weights says how often it is used)"


def _file_identity(path: str) -> Hashable:
    """Return the identity of a file under all its names (device, inode); the path if it does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return path
    return (found.st_dev, found.st_ino)
