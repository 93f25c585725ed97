"""Samples that the student writes itself: a vLLM server, to which the run publishes, answers the prompts of each step.

Rank 0 sends the prompts of all rows of a step as tokens; the tokens of the answers are trained on unchanged. With each
answer the server names the version of the weights that wrote it. This version must be of this run, and at most
``data.max_age`` steps old. The sampling seed of an answer follows from train.seed, the step and the row in the step.

The answers of a step are stored in ``output_dir/samples`` before they are learned, and kept as long as a resumed run
may repeat the step. So a batch is a function of the step and of the stored answers, at any number of ranks.
"""

import json
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch

from data.cache import digest
from data.loader import Loader, MicroBatch, pad
from data.samples import Sample
from engine.checkpoint.checked_files import replace_text
from engine.checkpoint.find import STEP_DIRECTORIES
from engine.cluster.job import StopRequests
from engine.config.config import Recipe
from engine.publish import CURRENT, PROBE_TOKENS, RUN, STARTED, ServerError, VllmServer, versions_in
from engine.state import NoSamplesError
from model.ranks import made_by_main, say, words_of

_CHECKPOINTS = ("teacher", "teacher_cache", "start", "scales")  # options that are paths
AT_ONCE = 256  # number of requests
AGAIN_SECONDS = 1.0
SEEDS = 4  # random stream, separate from those of data.loader


class WrittenAnswer(NamedTuple):
    """Tokens of an answer, and the index of its prompt in the samples; ``ended`` is False if data.new_tokens cut it."""

    prompt: int
    ended: bool
    tokens: list[int]


class OnPolicyLoader(Loader):
    """Loader of prompts, with answers that the student has written.

    Args:
        recipe: recipe of the run, for its seed, server and output_dir.
        vocabulary: number of token ids that both student and teacher have.
        stop_requests: stop signals of the run; after one, the loader no longer waits for the server.
        samples: the prompts.
        options: other arguments of `Loader`.
    """

    def __init__(
        self, recipe: Recipe, vocabulary: int, stop_requests: StopRequests, samples: Sequence[Sample], **options: Any
    ) -> None:
        super().__init__(samples, **options)
        self._recipe, self._settings, self._vocabulary = recipe, recipe.data, vocabulary
        self._stop_requests = stop_requests
        self._folder = Path(recipe.output_dir) / "samples"
        self._reused = self._others = False  # True after the line that says so

    def step(self, k: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of step ``k``; a collective, in which rank 0 waits for the server and stores
        its answers. Raises NoSamplesError on every rank if rank 0 has no answers: the server fails for too long, or
        fails after a stop request; it serves a version that is not allowed; an answer has a token that the teacher
        lacks; or stored answers are damaged or answer other prompts."""

        def tried() -> tuple[list[WrittenAnswer], str | None]:
            try:
                return self._answers(k), None
            except (OSError, ValueError) as error:
                return [], f"step {k} has no samples: {words_of(error)}"

        answers, problem = made_by_main(tried)
        if problem is not None:
            raise NoSamplesError(problem)
        size, batches = self._micro_batch_size, []
        for index in range(self._accumulation):
            start = (index * self._world + self._rank) * size
            own = answers[start : start + size]
            rows = [[row] for row in range(size)]
            batch = pad([self._sample(answer) for answer in own], rows, self._pad, self._together)
            batches.append({**batch, "sample_ids": torch.tensor([answer.prompt for answer in own])})
        return self._own(batches)

    def seed_of(self, k: int, row: int) -> int:
        """Return the sampling seed for the answer of row ``row`` of step ``k``."""
        return int(np.random.default_rng((self._recipe.train.seed, k, row, SEEDS)).integers(2**62))

    def _sample(self, answer: WrittenAnswer) -> Sample:
        given, written = self.samples[answer.prompt], np.array(answer.tokens, np.int32)
        inputs, labels = np.append(given.input_ids, written[:-1]), np.append(given.labels[1:], written)
        return Sample(inputs, labels, given.file, given.line)

    def _answers(self, k: int) -> list[WrittenAnswer]:
        """Return stored or new answers to all rows of a step; only rank 0 calls it. Raises ValueError if the server
        gives none, or if stored ones are damaged or answer other prompts; OSError if their file cannot be read."""
        began, first = monotonic(), self._first(k)
        prompts = [self._order.row(first + row)[0] for row in range(self.rows_per_step)]
        if k == 0:  # of a run that was not resumed
            for old in self._folder.glob(f"{STEP_DIRECTORIES}.json"):
                old.unlink()
        path, steps = self._folder / f"step_{k:08d}.json", self._steps()
        if reused := path.exists() and (stored := _stored(path, prompts)).steps == steps:
            age, answers = stored.age, stored.answers
            if not self._reused:
                say(f"step {k}: its samples were stored before the restart, and are used again ({self._folder})")
        else:
            if path.exists() and not self._others:
                say(f"step {k}: its stored samples are of a run with another recipe: new ones are sampled")
                self._others = True
            age, answers = self._asked(k, prompts)
            self._store(k, path, {"age": age, "answers": answers, "steps": steps})
        self._reused = reused
        self.curves = {
            "on_policy/age": age,
            "on_policy/at_limit": sum(not answer.ended for answer in answers) / len(answers),
            "on_policy/new_tokens": sum(len(answer.tokens) for answer in answers) / len(answers),
            "on_policy/seconds": monotonic() - began,
        }
        return answers

    def _steps(self) -> str:
        """Return a digest of what decides how the steps before change the weights. A run that was resumed with another
        recipe repeats other steps: answers stored by the former ones are not its own."""
        recipe = self._recipe
        parts: tuple[Any, ...] = (recipe.optim, recipe.loss, recipe.learnable, recipe.quant, *recipe.schedule)
        sections = [asdict(part) for part in parts]
        for section in sections:  # checkpoints may be moved, but not renamed
            section.update({key: Path(section[key]).name for key in _CHECKPOINTS if section.get(key)})
        return digest([*sections, recipe.train.steps])

    def _store(self, k: int, path: Path, content: dict[str, Any]) -> None:
        """Store the answers of a step; remove those of steps before the oldest checkpoint, or without one before ``k``.
        An OSError is only a warning."""
        checkpoints = (Path(self._recipe.output_dir) / "checkpoints").glob(STEP_DIRECTORIES)
        oldest = min((checkpoint.name for checkpoint in checkpoints), default=path.stem)
        try:
            self._folder.mkdir(exist_ok=True)
            replace_text(path, json.dumps(content))
            for old in self._folder.glob(f"{STEP_DIRECTORIES}.json"):
                if old.stem < oldest:
                    old.unlink()
        except OSError as error:
            say(f"warning: {words_of(error)}: a restart that repeats step {k} would learn other answers")

    def _asked(self, k: int, prompts: list[int]) -> tuple[int, list[WrittenAnswer]]:
        """Ask the server for answers until it gives them; return the age of its version in steps, and the answers.
        Raises ValueError after ``data.server_seconds``, after a stop request, or for a bad version or token."""
        answers, said, url = dict[tuple[Path, int], WrittenAnswer](), "", str(self._settings.server)
        most, limit = self._settings.server_seconds, f"{self._settings.server_seconds:g} s"
        server = VllmServer(url, end := monotonic() + most)
        while True:
            try:
                version = self._version(server, prompts)
                age = self._age(k, version)
                missing = [row for row in range(len(prompts)) if (version, row) not in answers]

                def ask(row: int, version: Path = version) -> None:
                    answers[version, row] = self._answer(server, version, k, row, prompts[row])

                with ThreadPoolExecutor(AT_ONCE) as pool:
                    list(pool.map(ask, missing))
                return age, [answers[version, row] for row in range(len(prompts))]
            except ServerError as error:
                why = f"{url}: {error}"
            if self._stop_requests.requested:
                raise ValueError(f"{why}; not waited for, as the run was asked to stop")
            if monotonic() > end - AGAIN_SECONDS:
                raise ValueError(f"{why}; waited {limit} (data.server_seconds)")
            if why != said:
                say(f"step {k} waits for samples, {limit} at most (data.server_seconds): {why}")
                said = why
            time.sleep(AGAIN_SECONDS)

    def _version(self, server: VllmServer, prompts: list[int]) -> Path:
        """Return the version that the server serves; if it has loaded none since its start, let it load the newest.
        Raises ServerError if the directory that it was started with is not the link ``current``."""
        _, root, version = server.serving()
        if version != STARTED:
            return Path(version)
        if root.name != CURRENT or not (root.parent / RUN).exists():
            raise ServerError(
                f"it was started with {root}, expected the link {CURRENT!r} of the directory to which this run "
                "publishes: start it with that link, or give state.publish the server's address"
            )
        probe = self.samples[prompts[0]].input_ids[:PROBE_TOKENS].tolist()
        server.load(newest := root.resolve(), versions_in(root.parent), probe)
        return newest

    def _age(self, k: int, version: Path) -> int:
        """Return the age of a version in steps. Raises ValueError if another run or a later step wrote it, or if it is
        too old."""
        serves, run = f"{self._settings.server} serves {version}", version.parent / RUN
        match = re.fullmatch(r"step_(\d{8})(-\d+)?", version.name)
        if not match or not run.exists() or run.read_text("utf-8") != os.path.realpath(self._recipe.output_dir):
            raise ValueError(
                f"{serves}, expected a version that this run has published: publish to the server, or start it with "
                f"the link {CURRENT!r}"
            )
        age, most = k - int(match[1]), self._settings.max_age
        if age < 0:
            raise ValueError(
                f"{serves}, a version of a later step, expected one of step {k} or before: publish at step {k}"
            )
        if age > most:
            raise ValueError(f"{serves}, {age} steps old, expected {most} at most (data.max_age): publish more often")
        return age

    def _answer(self, server: VllmServer, version: Path, k: int, row: int, prompt: int) -> WrittenAnswer:
        given, sampling = self.samples[prompt].input_ids.tolist(), {"temperature": self._settings.temperature}
        seed, most = self.seed_of(k, row), self._settings.new_tokens
        tokens, ended = server.generate(version, given, max_tokens=most, seed=seed, **sampling)
        if max(tokens) >= self._vocabulary:
            raise ValueError(
                f"the student wrote token {max(tokens)}, expected ids below {self._vocabulary}, which student and "
                "teacher have: name a teacher with as many tokens as the student"
            )
        return WrittenAnswer(prompt, ended, tokens)


class _Stored(NamedTuple):
    """Stored answers of a step: the age of their version in steps, and the digest of the steps before."""

    age: int
    answers: list[WrittenAnswer]
    steps: str | None


def _stored(path: Path, prompts: list[int]) -> _Stored:
    """Read the stored answers of a step. Raises ValueError if they are damaged, or answer other prompts."""
    try:
        found = json.loads(path.read_text("utf-8"))
        stored = _Stored(int(found["age"]), [WrittenAnswer(*one) for one in found["answers"]], found.get("steps"))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it to sample again") from error
    if [answer.prompt for answer in stored.answers] != prompts:
        raise ValueError(f"{path} has answers to other prompts: remove it to sample again")
    return stored
