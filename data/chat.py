"""Chat JSONL to samples whose only targets are the tokens of the last assistant turn.

The mask comes from the chat template's own output. The conversation is rendered twice: up to the last assistant turn
with the generation prompt, which is what the model will be given when it serves, and whole. The second text is
tokenised, once, and every token behind the end of the first is a target: just what the model has to write by itself.
Searching the tokens for a marker such as ``<|im_start|>assistant`` instead would need a rule per template and finds
what users typed, too.

The first target is the first token of the answer. The last one is the end-of-turn token that the template writes
after it (``<|im_end|>``); whitespace behind that token is written by the template alone and is no target. Nothing
behind the last target is kept: attention is causal, so it could not matter.

Where exactness takes more than that:

- A template may write the generation prompt otherwise than the finished turn (it opens ``<think>`` in the prompt and
  strips it from the turn). The place of the answer is then found by rendering the turn once more with a marker in
  place of its content: what stands between the template's own text before and after must be a part of the content, or
  the line is an error. Counted as ``by_content``.
- A token may begin in the prompt and end in the answer. If the prompt alone ends with that very token it is given,
  else the model has to write it, so it is a target. Counted as ``straddling``.
- A template may write no special token after the answer (the next turn's role ends it). Then the last target is the
  last token of the answer. Counted as ``without_end``, because such a model learns from this data not when to stop.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jinja2
import numpy as np
from tokenizers import Encoding, Tokenizer
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from data.jsonl import BadLineError, Turn, check_fields, lines_of, turns_of
from data.samples import IGNORE, DataError, Problems, Sample, check_files, plain_backend

BATCH = 1024  # conversations tokenised at a time: enough for all cores, little enough text in memory
MARKER = "deepqat-answer-5b1e"


@dataclass
class Counts:
    """What became of the lines: ``lines = samples + too_long + without_target``. Blank lines do not count."""

    files: int = 0
    lines: int = 0
    samples: int = 0
    tokens: int = 0  # input positions of all samples
    targets: int = 0  # of these, the ones with a label
    too_long: int = 0  # dropped: longer than max_length (or, when truncating, the answer alone is)
    truncated: int = 0  # kept, the beginning of the prompt cut off
    without_target: int = 0  # dropped: the answer is empty
    by_content: int = 0  # kept: the generation prompt is no prefix of the conversation
    straddling: int = 0  # kept: a token reaches from the prompt into the answer and is a target
    without_end: int = 0  # kept: no special token ends the answer

    def summary(self) -> str:
        """One line for people: what was kept, what was dropped and why, and anything unusual about the masks."""
        share = 100 * self.targets / max(self.tokens, 1)
        text = (
            f"{self.samples:,} samples of {self.lines:,} lines in {self.files} file{'s' * (self.files != 1)}, "
            f"{self.tokens:,} tokens, {self.targets:,} of them targets ({share:.1f}%); "
            f"dropped {self.too_long:,} too long, {self.without_target:,} without target"
        )
        unusual = {
            "truncated": self.truncated,
            "whose answer was found by its content": self.by_content,
            "whose answer begins inside a token": self.straddling,
            "without an end-of-turn token": self.without_end,
        }
        return text + "".join(f"; {count:,} {name}" for name, count in unusual.items() if count)


@dataclass(frozen=True, slots=True)
class Rendering:
    """The whole conversation as the template writes it, and the character at which the answer begins."""

    file: str
    line: int
    text: str
    start: int
    by_content: bool


def read_chat(
    files: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    fields: Mapping[str, str] | None = None,
    loss_on: Literal["last", "all"] = "last",
    too_long: Literal["drop", "truncate"] = "drop",
    progress: bool = False,
) -> tuple[list[Sample], Counts]:
    """Read JSONL files into samples, in the order of the lines.

    Args:
        files: UTF-8 JSONL files; the forms of a line are in `data.jsonl`.
        tokenizer: a fast tokenizer with a chat template.
        max_length: the most input positions of a sample (the end-of-turn token is only predicted, so it is not one).
        fields: our field names to the files' keys, for files of another form.
        too_long: a longer sample is dropped, or loses the beginning of its prompt (a BOS token is kept) and is dropped
            only if no position of the prompt would be left to predict the answer's first token from.
        progress: show a progress bar.

    Raises:
        DataError: a file is missing or empty, lines are bad (up to 20 named in one error), or no sample is left.
    """
    if loss_on != "last":
        raise DataError("data.loss_on: all: not yet")
    if max_length < 1 or too_long not in ("drop", "truncate"):
        raise DataError(
            f"found max_length {max_length} and too_long {too_long!r}, expected at least 1, and 'drop' or 'truncate'"
        )
    check_fields(fields)
    paths = check_files(files)
    if not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, expected one to write turns with"
        )
    builder = _Builder(tokenizer, fields, max_length, truncate=too_long == "truncate")
    size = sum(path.stat().st_size for path in paths)
    with tqdm(total=size, unit="B", unit_scale=True, desc="chats", delay=1, disable=not progress) as bar:
        for path in paths:
            builder.read(path, bar)
    builder.problems.raise_if_any()
    if not builder.samples:
        raise DataError(
            f"no sample is left of {', '.join(map(str, paths))}: {builder.counts.summary()} (max_length {max_length})"
        )
    return builder.samples, builder.counts


class _Builder:
    """Renderings to samples, with everything counted."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, fields: Mapping[str, str] | None, max_length: int, *, truncate: bool
    ) -> None:
        self.tokenizer = tokenizer
        self.fields = fields
        self.backend = plain_backend(tokenizer)
        self.max_length = max_length
        self.truncate = truncate
        self.bos = tokenizer.bos_token_id
        # What may end a turn: <|im_end|> is a special token in Qwen's tokenizers even where EOS is another one.
        self.special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.samples: list[Sample] = []
        self.counts = Counts()
        self.problems = Problems()

    def read(self, path: Path, bar: tqdm) -> None:
        """Add one file, a batch of lines at a time."""
        self.counts.files += 1
        batch: list[Rendering] = []
        for rendering in self._renderings(path, bar):
            batch.append(rendering)
            if len(batch) == BATCH:
                self._add(batch)
                batch = []
        self._add(batch)

    def _renderings(self, path: Path, bar: tqdm) -> Iterator[Rendering]:
        before, name = self.counts.lines, str(path)
        for number, line in lines_of(path):
            bar.update(len(line))
            if not line.strip():
                continue
            self.counts.lines += 1
            try:
                turns = turns_of(line, self.fields)
                if turns[-1]["content"].strip():
                    yield render(turns, self.tokenizer, name, number)
                else:
                    self.counts.without_target += 1
            except BadLineError as error:
                self.problems.add(f"{name}:{number}", str(error))
        if self.counts.lines == before:
            self.problems.add(str(path), "found only blank lines, expected one JSON object per line")

    def _add(self, batch: list[Rendering]) -> None:
        if self.problems.count:
            return  # there will be no samples: finish looking for bad lines
        encodings = self.backend.encode_batch([rendering.text for rendering in batch], add_special_tokens=False)
        for rendering, encoding in zip(batch, encodings, strict=True):
            try:
                sample = self._sample(rendering, encoding)
            except BadLineError as error:
                self.problems.add(f"{rendering.file}:{rendering.line}", str(error))
                continue
            if sample is not None:
                self.samples.append(sample)
                self.counts.samples += 1
                self.counts.tokens += len(sample.input_ids)
                self.counts.targets += int((sample.labels != IGNORE).sum())

    def _sample(self, rendering: Rendering, encoding: Encoding) -> Sample | None:
        first, straddling = first_target(encoding, rendering, self.backend)
        ids = encoding.ids
        if not 0 < first < len(ids):
            raise BadLineError(
                f"found the answer to begin at token {first} of {len(ids)}, expected tokens on both sides"
            )
        last, ended = last_target(encoding, rendering.text, first, self.special)
        kept = _cut(ids[:first], last + 1 - first, self.max_length, self.bos)
        if kept is None or (len(kept) < first and not self.truncate):
            self.counts.too_long += 1
            return None
        self.counts.truncated += len(kept) < first
        self.counts.by_content += rendering.by_content
        self.counts.straddling += straddling
        self.counts.without_end += not ended
        answer = ids[first : last + 1]
        labels = [IGNORE] * (len(kept) - 1) + answer
        return Sample(
            np.array(kept + answer[:-1], dtype=np.int32),
            np.array(labels, dtype=np.int32),
            rendering.file,
            rendering.line,
        )


def render(turns: list[Turn], tokenizer: PreTrainedTokenizerBase, file: str = "", line: int = 0) -> Rendering:
    """Write the conversation with the template and find where its last turn, the assistant's, begins.

    Raises:
        BadLineError: the template refuses the conversation, or the answer cannot be located exactly.
    """
    prompt = _write(turns[:-1], tokenizer, add_generation_prompt=True)
    text = _write(turns, tokenizer)
    if text.startswith(prompt):
        if not text[len(prompt) :].strip():
            raise BadLineError(
                "found nothing after the generation prompt, expected the chat template to write the answer"
            )
        return Rendering(file, line, text, len(prompt), by_content=False)
    return Rendering(file, line, text, _start_of_content(turns, text, tokenizer), by_content=True)


def _write(turns: list[Turn], tokenizer: PreTrainedTokenizerBase, *, add_generation_prompt: bool = False) -> str:
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt))
    except (jinja2.TemplateError, TypeError) as error:
        roles = [turn["role"] for turn in turns]
        raise BadLineError(f"found the roles {roles}, which the chat template refuses: {error}") from error


def _start_of_content(turns: list[Turn], text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Where the answer begins in ``text``, from what the template writes around a marker in the answer's place."""
    content = turns[-1]["content"]
    marked = _write([*turns[:-1], {"role": "assistant", "content": MARKER}], tokenizer)
    before, _, after = marked.partition(MARKER)
    end = len(text) - len(after)
    written = text[len(before) : end]
    exact = marked.count(MARKER) == 1 and text.startswith(before) and text.endswith(after)
    if not exact or not written.strip() or written not in content:
        raise BadLineError(
            "found a chat template whose generation prompt is not how it begins the finished conversation, and which "
            f"writes {written[:60]!r} for the last assistant turn, expected (a part of) its content: the loss mask "
            "cannot be exact, mend the template or the turn"
        )
    return len(before)


def first_target(encoding: Encoding, rendering: Rendering, backend: Tokenizer) -> tuple[int, bool]:
    """Index of the first target (one past the last token if there is none), and whether it begins in the prompt."""
    start = rendering.start
    offsets = encoding.offsets
    # A token without characters (a prefix that the tokenizer puts before a word) belongs to what it stands before.
    inside = (index for index, (left, right) in enumerate(offsets) if left >= start or right > start)
    first = next(inside, len(offsets))
    if first == len(offsets) or offsets[first][0] >= start:
        return first, False
    given = backend.encode(rendering.text[:start], add_special_tokens=False).ids
    if given == encoding.ids[: first + 1]:
        return first + 1, False
    return first, True


def last_target(encoding: Encoding, text: str, first: int, special: set[int]) -> tuple[int, bool]:
    """Index of the last token that is a target, and whether it is a special one, which ends the turn."""
    last = end = len(encoding.ids) - 1
    offsets = encoding.offsets
    while end > first and not text[slice(*offsets[end])].strip():
        end -= 1
    return (end, True) if encoding.ids[end] in special else (last, False)


def _cut(prompt: list[int], targets: int, max_length: int, bos: int | None) -> list[int] | None:
    """The end of the prompt that leaves at most ``max_length`` input positions, None if not one token of it fits.

    The last target is no input, so ``p`` prompt tokens and ``t`` targets make ``p + t - 1`` positions.
    """
    room = max_length + 1 - targets
    if room < 1:
        return None
    if len(prompt) <= room:
        return prompt
    if room > 1 and prompt[0] == bos:
        return [prompt[0], *prompt[1 - room :]]
    return prompt[-room:]
