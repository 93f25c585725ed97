"""Run tasks of lm-evaluation-harness on this project's forward, with serving numerics.

The harness builds the requests of a task and computes its metrics; :class:`ServedModel` is the interface through which
it calls a model. The harness' own class for Hugging Face models would load compressed checkpoints with transformers
(which does not quantize the inputs of experts) and compute the logits of whole batches in fp32. Requests are tokenized
and cut as in that class, so that results agree.

The harness sees every rank as rank 0 of 1, so each rank builds all requests.
:func:`tools.evaluation.score.score_windows` distributes the work, with or without ZeRO-3, and returns all results on
all ranks.

Only tasks that compare log-likelihoods are supported (output types loglikelihood, multiple_choice and
loglikelihood_rolling), not tasks that generate text.
"""

import contextlib
import hashlib
import json
import logging
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from transformers import PreTrainedTokenizerBase

from model.ranks import RankError, errors_on_all_ranks, gather_objects, listed, say
from tools.evaluation.results import Measurement
from tools.evaluation.score import ScoringModel, Window, rolling_windows, score_windows

OUTPUT_TYPES = ("loglikelihood", "multiple_choice", "loglikelihood_rolling")
# Bootstrap draws for the standard error of metrics without a closed form; the estimate is then accurate to about 2%.
BOOTSTRAP_DRAWS = 1000
FEWSHOT_SEED = 1234  # lm-evaluation-harness' default


@dataclass(frozen=True)
class Tasks:
    """Tasks and groups with their data, as ``TaskManager.load`` returns them for ``names``; each task is measured on
    its first ``limit`` samples, or on all if None."""

    loaded: Any
    limit: int | None
    names: frozenset[str]

    def measure(
        self,
        model: ScoringModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        length: int | None,
        batch_size: int,
        dtype: str,
    ) -> dict[str, Measurement]:
        """Measure each task's metrics, by ``task metric``; for a group with a mean, the mean and the members that were
        asked for by name. A collective.

        ``length`` is the number of tokens per window, or None for the model's context. ``dtype`` is a name that becomes
        part of the conditions of the measurements. Raises RankError if ``length`` is None and the model's context is
        unknown, an answer is longer than a window, a prediction is not finite, or requests differ between ranks.
        """
        length = length or model.context
        if length is None:
            raise RankError("the model's config.json does not say its context: expected --length")
        _seed()
        for task in self.loaded["tasks"].values():
            task.set_fewshot_seed(FEWSHOT_SEED)  # every model gets the same examples
        served = ServedModel(model, tokenizer, length=length, batch_size=batch_size)
        found = evaluate(served, self.loaded, limit=self.limit, bootstrap_iters=BOOTSTRAP_DRAWS, log_samples=False)
        assert found is not None, "every rank is rank 0 to lm-evaluation-harness"
        means = [name for name, group in self.loaded["groups"].items() if group.has_aggregation]
        within = set().union(*(self._members(name) for name in means)) - self.names
        measurements: dict[str, Measurement] = {}
        for name in (name for name in [*means, *self.loaded["tasks"]] if name not in within):
            conditions = f"{self._conditions(name, found)}, at most {length} tokens, {dtype}"
            measurements |= _metrics(name, found, conditions)
        return measurements

    def _members(self, group: str) -> set[str]:
        """Return the names of all tasks and groups inside a group."""
        children = set(self.loaded["group_map"].get(group, []))
        return children.union(*(self._members(child) for child in children))

    def _conditions(self, name: str, found: Any) -> str:
        """Return a line with the numbers of samples and of few-shot examples, and a digest of the requests."""
        tasks = self.loaded["tasks"]
        members = [name] if name in tasks else sorted(self._members(name) & tasks.keys())
        requests = [request.args for member in members for request in tasks[member].instances]
        digest = hashlib.sha256(json.dumps(requests, default=str).encode()).hexdigest()[:12]
        samples = sum(found["n-samples"][member]["effective"] for member in members)
        shots = ", ".join(map(str, sorted({found["n-shot"][member] for member in members})))
        return f"{samples:,} samples, {shots}-shot, requests {digest}"


def _metrics(name: str, found: Any, conditions: str) -> dict[str, Measurement]:
    """Collect metrics of one task or group by name. Names include the harness' filter unless that is "none"."""
    values, directions = found["results"][name], found["higher_is_better"].get(name, {})
    metrics: dict[str, Measurement] = {}
    for key, value in values.items():
        metric, comma, filter = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        error = values.get(f"{metric}_stderr,{filter}")
        metrics[f"{name} {metric}" if filter == "none" else f"{name} {metric} ({filter})"] = Measurement(
            float(value),
            directions.get(metric) is not False,  # the harness' default
            conditions,
            float(error) if isinstance(error, int | float) else None,
        )
    return metrics


def load_tasks(
    names: Sequence[str], task_dir: Path | None = None, *, limit: int | None = None, num_fewshot: int | None = None
) -> Tasks:
    """Find tasks, groups or tags by name and read their data, before any model is loaded; a collective. Seeds Python's
    and NumPy's global generators.

    Args:
        task_dir: folder with task files (YAML) that replace the harness' own. Their data files are relative to it.
            Their ``!function`` entries are Python code that is run.
        limit: number of samples of each task, from the first one on.
        num_fewshot: number of examples before each question, or None for each task's own; a task made for 0 takes no
            other number.

    Raises:
        RankError: a task is unknown or not supported, its data cannot be read or fetched, or its prompts cannot be
            created. The text names the task and the remedy.
    """
    # Other ranks would repeat the same warnings.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # The standard error of a few metrics is bootstrapped, by default in forked processes: a process with CUDA and a
    # process group must not be forked.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    with errors_on_all_ranks(OSError, ValueError):
        _seed()
        manager = _manager(names, task_dir)
        loaded: Any = {"tasks": {}, "groups": {}, "group_map": {}}
        with contextlib.chdir(task_dir) if task_dir is not None else contextlib.nullcontext():
            for name in names:
                for kind, entries in _load(manager, name, task_dir).items():
                    loaded[kind] |= entries
        for name, task in loaded["tasks"].items():
            _prepare(name, task, limit, num_fewshot)
    return Tasks(loaded, limit, frozenset(names))


def _manager(names: Sequence[str], task_dir: Path | None) -> TaskManager:
    """Create a manager of the tasks in ``task_dir``, or of the harness' own tasks (scanning them takes ten seconds).
    Raises ValueError if a task is unknown."""
    if task_dir is None:
        manager, known = TaskManager(), "a task of lm-evaluation-harness; with --task_dir those of a folder are taken"
    elif task_dir.is_dir():
        manager = TaskManager(include_path=task_dir.resolve(), include_defaults=False)
        known = f"one in {task_dir}: {listed(manager.all_tasks) or 'it has none'}"
    else:
        raise ValueError(f"--task_dir {task_dir} is not a directory: expected one with task files (YAML)")
    if unknown := [name for name in names if name not in manager.task_index]:
        lines = [f"--tasks {','.join(unknown)}: expected {known}"]
        for file in sorted(task_dir.rglob("*.yaml")) if task_dir is not None else ():
            try:
                load_yaml(file, resolve_func=False)
            except Exception as error:  # any content: the harness skips such files silently
                lines.append(f"{file} cannot be read: {error}")
        raise ValueError("\n".join(lines))
    return manager


def _load(manager: TaskManager, name: str, task_dir: Path | None) -> Any:
    try:
        return manager.load([name])
    except Exception as error:  # the harness, datasets and a task's own code may raise anything
        file = manager.task_index[name].yaml_path
        local = f"Data files that it names are looked for from {task_dir} on. " if task_dir is not None else ""
        raise ValueError(
            f"task {name} ({file}) cannot be loaded: {type(error).__name__}: {error}\n{local}Data on the Hugging Face "
            "Hub need access to it. Without: put a task file with 'dataset_path: json' and the data into a folder, "
            "and name that with --task_dir; or load the task once where there is access, copy the cache (HF_HOME) "
            "here, and set HF_HUB_OFFLINE=1."
        ) from error


def _prepare(name: str, task: Task, limit: int | None, num_fewshot: int | None) -> None:
    """Set the number of examples, and build the requests once, so that errors show before a model is loaded. Raises
    ValueError if the task or the number is not supported, or the requests cannot be built."""
    if task.OUTPUT_TYPE not in OUTPUT_TYPES:
        raise ValueError(
            f"task {name} has output_type {task.OUTPUT_TYPE}, expected one of {', '.join(OUTPUT_TYPES)}: tasks in "
            "which the model writes text are not run"
        )
    own = task.get_config("num_fewshot")
    if num_fewshot is not None and own == 0 and num_fewshot != 0:
        raise ValueError(
            f"--num_fewshot {num_fewshot}: task {name} is made for 0 examples (num_fewshot: 0 in its file): leave "
            "--num_fewshot or this task out"
        )
    task.set_config("num_fewshot", num_fewshot if num_fewshot is not None else own or 0)
    task.set_fewshot_seed(FEWSHOT_SEED)
    try:
        task.build_all_requests(limit=limit)
    except Exception as error:  # a template or function of the task
        raise ValueError(f"task {name}: its requests cannot be made: {type(error).__name__}: {error}") from error


def _seed() -> None:
    """Seed as lm-evaluation-harness does: some tasks shuffle their choices with the global generators."""
    random.seed(0)
    np.random.seed(FEWSHOT_SEED)


class ServedModel(TemplateLM):
    """Adapter through which lm-evaluation-harness calls a :class:`tools.evaluation.score.ScoringModel`."""

    def __init__(
        self, model: ScoringModel, tokenizer: PreTrainedTokenizerBase, *, length: int, batch_size: int
    ) -> None:
        """Wrap ``model``; ``length`` is the number of tokens per window."""
        super().__init__()
        self.model, self.tokenizer, self.max_length, self.batch_size = model, tokenizer, length, batch_size

    @property
    def eot_token_id(self) -> int:
        """Return the id of the token that ends a text (EOS)."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Return the id of the token that is put before a text without context: BOS, or EOS if there is no BOS."""
        bos = self.tokenizer.bos_token_id
        return bos if bos is not None else self.tokenizer.eos_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Tokenize ``string``. The tokenizer's special tokens are added if ``add_special_tokens`` is True; if it is
        None, they are added unless ``string`` already begins with the token :attr:`prefix_token_id`."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(str(self.tokenizer.decode([self.prefix_token_id])))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score each (context, continuation): return the log-likelihood of the continuation, and True if greedy
        decoding would generate it."""
        return super().loglikelihood(requests, disable_tqdm=True)  # the scores have a progress bar

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        windows, cut = [], 0
        for text, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise RankError(
                    f"a continuation has {len(continuation)} tokens, expected 1 to {self.max_length}: {text[1][:200]!r}"
                )
            inputs = (context + continuation)[:-1]
            cut += len(inputs) > self.max_length
            windows.append(Window(inputs[-self.max_length :], continuation))
        if cut:
            say(f"{cut:,} of {len(windows):,} requests have more than {self.max_length} tokens: cut at their beginning")
        return [(score.log_likelihood, score.greedy) for score in self._score(windows, "log-likelihoods")]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return for each text (the argument of a request) the sum of its tokens' log-likelihoods."""
        texts = (self.tok_encode(request.args[0]) for request in requests)
        windows = [rolling_windows(ids, self.prefix_token_id, self.max_length) for ids in texts]
        scores = iter(self._score(list(chain(*windows)), "rolling log-likelihoods"))
        return [sum((score.log_likelihood for score in islice(scores, len(own))), 0.0) for own in windows]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Raise NotImplementedError; never called, as :func:`load_tasks` rejects tasks that generate text."""
        raise NotImplementedError("tasks in which the model writes text are not run")

    def _score(self, windows: list[Window], label: str) -> list[Any]:
        digests = gather_objects(hashlib.sha256(json.dumps(windows).encode()).hexdigest())
        if len(set(digests)) > 1:
            raise RankError(
                "the ranks built different requests, as a task draws random numbers without a fixed seed: run it on "
                "one rank"
            )
        return score_windows(self.model, windows, batch_size=self.batch_size, label=label)
