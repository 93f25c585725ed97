"""Read chat JSONL into samples whose only targets are the tokens of the last assistant turn, or of all of them.

The mask comes from the chat template's output: `data.answers` finds the characters of the rendered conversation that
the model would generate, from the end of the generation prompt to the end of the turn. The text is tokenized once, as a
whole, and the tokens of these characters are the targets. Searching the tokens for a marker such as
``<|im_start|>assistant`` would need a rule per template, and would also match text that users typed.

The first target of a turn is the first token of the answer. The last target is the end-of-turn token (``<|im_end|>``);
whitespace that the template writes after that token is not a target. Nothing after the last target is kept: attention
is causal, so later tokens have no effect.

Special cases, each counted in turns:

- A template may write the generation prompt differently from the finished turn, or the context differently in serving.
  The turn is then located by its content (``by_content``), or the line is an error.
- A template may omit the thinking of a turn when later turns follow. The rest is learned, as the model sees it in
  serving: ``cut``.
- A token may begin in the prompt and end in the answer. It is context if the prompt alone ends with that token, else
  it is a target: ``straddling``.
- A template may write no special token after the answer (the next turn's role ends it). The last target is then the
  last token of the answer, and the model does not learn to stop: ``without_end``. Or generation does not stop at the
  token that it writes, so that serving continues after it: ``unstopped``.
"""

import json
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from data.answers import Answer, LossOn, Rendering, render, render_prompt
from data.cache import ArrayWriter, Shard, TokenCache, digest, size_of
from data.files import DataError, Problems, Row, check_files, raise_bad_lines, read_rows
from data.jsonl import BadLineError, Conversation, conversation_of, is_empty
from data.samples import IGNORE, KEYED, Bars, Flat, Samples, no_bar
from data.template import SpecialTokens, Template
from data.tokens import OffsetTokenizer, TokenizerError, Tokens, in_groups
from data.workers import Workers

_MANY_TURNS = 100
_SLOW_TURNS = 200  # with data.loss_on all a chat is rendered 1.5 times per turn: these in a second
_SHOWN = 20  # keys that a note names
CHAT_DTYPES = {**KEYED, "targets": "<i8", "lines": "<i8"}
_BYTES_PER_PROCESS = 2**23  # of a file; a process takes some seconds to start
_MOST_PROCESSES = 32  # more would wait for the one that reads the file and writes the tokens
_DATA = (".properties", ".arguments")
"""Ends of paths to objects whose keys are data: names of parameters."""


def _unusual(text: str) -> Any:
    """Declare a field of `Counts`; the summary prints a count other than 0 together with ``text``."""
    return field(default=0, metadata={"text": text})


@dataclass
class Counts:
    """Numbers of lines by outcome: ``lines = samples + too_long + without_target``. Blank lines do not count."""

    files: int = 0
    lines: int = 0
    samples: int = 0
    tokens: int = 0  # input positions of all samples
    targets: int = 0  # input positions with a label
    too_long: int = 0  # dropped: longer than max_length (when truncating: even without its beginning)
    without_target: int = 0  # dropped: there is no answer, or it is empty
    # Of samples that are kept:
    truncated: int = _unusual("truncated")
    targets_cut: int = _unusual("targets cut away with it")
    by_content: int = _unusual("answers found by their content")
    cut: int = _unusual("earlier answers of which the chat template leaves out a part, such as the thinking")
    unindented: int = _unusual("answers of which the chat template leaves out the spaces at the beginning")
    straddling: int = _unusual("answers that begin inside a token")
    without_end: int = _unusual("answers without an end-of-turn token")
    unstopped: int = _unusual(
        "answers that end with a token at which generation does not stop (generation_config.json)"
    )
    spelled: int = _unusual("special tokens spelled out in the chats and kept (data.special_tokens)")
    spelled_targets: int = _unusual("of them targets")
    unanswered: int = _unusual("turns behind the last learned answer left out")
    passed: int = _unusual("answers that are empty or open a chat, not learned")
    answers: int = _unusual("answers at the end of rows left out, as the model writes its own")
    unlearned: int = _unusual("turns not learned whose weight is 1 (data.loss_on)")
    nulls_left_out: int = _unusual("nulls left out of tools and of arguments that the tool does not have")
    nulls_kept: int = _unusual("nulls kept in arguments of calls")
    # Rows by key:
    unused: Counter[str] = field(default_factory=Counter)
    """Keys that are not used."""
    unwritten: Counter[str] = field(default_factory=Counter)
    """Keys that are given to the chat template, which does not write (all of) their value."""
    taken: Counter[str] = field(default_factory=Counter)
    """Keys that the chat template takes as variables."""
    by_file: dict[str, "Counts"] = field(default_factory=dict)

    def add(self, file: str, counts: "Counts") -> None:
        """Add the counts of one file."""
        for name in (item.name for item in fields(self) if item.name != "by_file"):
            setattr(self, name, getattr(self, name) + getattr(counts, name))
        self.by_file[file] = counts

    def as_json(self) -> dict[str, Any]:
        """Return the counts of a file as plain JSON, from which `Counts.of` restores them."""
        found = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "by_file"}
        return {name: value if isinstance(value, Counter) else int(value) for name, value in found.items()}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Counts":
        """Restore counts from the plain JSON of :meth:`as_json`."""
        given: dict[str, Any] = {
            name: Counter(value) if isinstance(value, dict) else value for name, value in values.items()
        }
        return cls(**given)

    def summary(self) -> str:
        """Summarize in one line what was kept and dropped, and why, and anything unusual about the masks."""
        share = 100 * self.targets / max(self.tokens, 1)
        text = (
            f"{self.samples:,} samples of {self.lines:,} lines in {self.files} file{'s' * (self.files != 1)}, "
            f"{self.tokens:,} tokens, {self.targets:,} of them targets ({share:.1f}%); "
            f"dropped {self.too_long:,} too long, {self.without_target:,} without target"
        )
        unusual = {item.metadata["text"]: getattr(self, item.name) for item in fields(self) if item.metadata}
        return text + "".join(f"; {count:,} {name}" for name, count in unusual.items() if count)

    def notes(self) -> Iterator[str]:
        """Yield lines for each file: how many rows have keys that are unused, not written by the template, or taken as
        variables."""
        for file, counts in self.by_file.items():
            if counts.unused:
                are = "are" if len(counts.unused) > 1 else "is"
                yield f"{file}: {_rows(counts.unused)}, which {are} not used"
            if counts.unwritten:
                yield f"{file}: {_rows(counts.unwritten)}, of which the chat template leaves out at least a part"
            if counts.taken:
                yield f"{file}: {_rows(counts.taken)}, which the chat template takes as variables"


def _rows(counts: Counter[str]) -> str:
    """Format counts of rows by key as ``300 rows have "id", 12 "messages.name" and 2 more keys``, the most frequent
    keys first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{rows:,} {json.dumps(key, ensure_ascii=False)}" for key, rows in ordered[:_SHOWN]]
    shown = [text.encode("utf-8", "backslashreplace").decode() for text in shown]  # half of a surrogate pair in a key
    number, key = shown[0].split(" ", 1)
    shown[0] = f"{number} row{'s have' if number != '1' else ' has'} {key}"
    more = len(ordered) - _SHOWN
    return ", ".join(shown) + (f" and {more:,} more key{'s' * (more > 1)}" if more > 0 else "")


@dataclass(frozen=True, slots=True)
class Targets:
    """Range of an assistant turn's tokens, ``first`` to ``last`` inclusive."""

    first: int
    last: int
    straddling: bool
    ended: bool


@dataclass(frozen=True)
class Options:
    """Options of `read_chat`, described there."""

    max_length: int
    fields: Mapping[str, str] | None
    loss_on: LossOn
    too_long: Literal["drop", "truncate"]
    special_tokens: SpecialTokens
    prompts: bool


def read_chat(
    files: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    fields: Mapping[str, str] | None = None,
    loss_on: LossOn = "last",
    too_long: Literal["drop", "truncate"] = "drop",
    special_tokens: SpecialTokens = "keep",
    prompts: bool = False,
    progress: Bars = no_bar,
    cache: TokenCache | None = None,
    say: Callable[[str], None] = print,
) -> tuple[Samples, Counts]:
    """Read files of chats into samples, in the order of the lines.

    Args:
        files: UTF-8 JSONL (also compressed), Parquet, or folders of data sets; `data.jsonl` has the forms of a line.
        tokenizer: a fast tokenizer with a chat template.
        max_length: the most input positions of a sample (the last target is only predicted, so it is not an input).
        fields: maps field names of `data.jsonl` to the files' keys, for lines of another form.
        loss_on: assistant turns that are trained on, the last one or all.
        too_long: drop a longer sample, or truncate its beginning (a BOS token is kept). A truncated sample is dropped
            if no position would be left to predict the last answer's first token from. An earlier answer is not a
            target if its beginning or its context is cut off. Extremely long samples are dropped in both modes.
        special_tokens: treatment of special tokens that contents spell out, such as ``<|im_end|>`` in a question: keep
            them, tokenize them as plain text, or refuse the line.
        prompts: read prompts for the model to answer, without targets; prompts above ``max_length`` are dropped.
        progress: creates the progress bar.
        cache: keeps the tokens of each file; large files are then tokenized in several processes.
        say: prints a line, before a file with chats of very many turns is read.

    Raises:
        DataError: a file is missing or empty, lines are bad (one error names up to 20 kinds), the tokenizer has no chat
            template or refuses a text, or no sample is left.
    """
    paths = check_files(files)
    if not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, expected one: take a chat model's "
            "tokenizer"
        )
    cache, options = cache or TokenCache(), Options(max_length, fields, loss_on, too_long, special_tokens, prompts)
    about = cache.about(tokenizer, {"kind": "chat", **asdict(options)}, chat=True)
    counts, shards = Counts(), []
    processes = 1
    if cache.directory is not None:  # else each rank reads all files
        size = sum(map(size_of, paths))
        processes = max(1, min(len(os.sched_getaffinity(0)), size // _BYTES_PER_PROCESS, _MOST_PROCESSES))
    with Workers(partial(_Builder, tokenizer, options), processes) as workers:
        for path in paths:

            def build(out: ArrayWriter, path: Path = path) -> dict[str, Any]:
                with progress(size_of(path), path.name, "B") as bar:
                    return _write(out, workers.in_order(_tasks(path, bar, say if loss_on == "all" else None)))

            shard = cache.shard(path, about, CHAT_DTYPES, build)
            shards.append(shard)
            counts.add(str(path), Counts.of(shard.facts["counts"]))
    raise_bad_lines({path: shard.facts for path, shard in zip(paths, shards, strict=True)})
    if not counts.samples:
        raise DataError(
            f"no sample is left of {', '.join(map(str, paths))}: {'; '.join([counts.summary(), *counts.notes()])} "
            f"(max_length {max_length}), expected at least one: raise data.max_length, or add answers to learn"
        )
    return _samples(paths, shards, cache), counts


def _samples(paths: Sequence[Path], shards: Sequence[Shard], cache: TokenCache) -> Samples:
    """Concatenate the samples of files."""
    lengths, targets, lines = (
        np.concatenate([shard.arrays[name] for shard in shards]) for name in ("lengths", "targets", "lines")
    )
    return Samples(
        inputs=Flat(shard.arrays["inputs"] for shard in shards),
        labels=Flat(shard.arrays["labels"] for shard in shards),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        targets=targets,
        lines=lines,
        codes=np.repeat(np.arange(len(shards)), [len(shard.arrays["lines"]) for shard in shards]),
        files=[str(path) for path in paths],
        highest=max(shard.facts["highest"] for shard in shards),
        key=digest([{name: shard.digests[name] for name in KEYED} for shard in shards]),
        cache=cache,
    )


@dataclass
class _Part:
    """Samples of some lines as flat arrays, and their bad lines."""

    arrays: dict[str, np.ndarray]
    counts: Counts
    problems: list[tuple[int, str]]


_Line = tuple[int, bytes | dict[str, Any]]


def _tasks(path: Path, bar: tqdm, say: Callable[[str], None] | None) -> Iterator[tuple[str, list[_Line]]]:
    """Yield groups of the file's rows, each with the file's path, without blank lines. At the first row of very many
    turns call ``say`` with a line about its cost."""

    def rows() -> Iterator[Row]:
        warn = say
        for row in read_rows(path):
            bar.update(row.done - bar.n)
            if warn is not None and (turns := _turns_in(row.value)) > _SLOW_TURNS:
                warn(
                    f"data.loss_on all: {path}:{row.number} has some {turns:,} turns: its answers are located in "
                    f"{turns * 3 // 2:,} renderings with {turns * row.size:,} characters in all; split such chats if "
                    "this takes too long"
                )
                warn = None
            if not isinstance(row.value, bytes) or row.value.strip():
                yield row

    for group in in_groups(rows(), lambda row: row.size):
        yield str(path), [(row.number, row.value) for row in group]


def _turns_in(row: bytes | dict[str, Any]) -> int:
    """Estimate the number of turns of a row."""
    if isinstance(row, bytes):
        return max(row.count(b'"role"'), row.count(b'"from"'))
    return max((len(value) for value in row.values() if isinstance(value, list)), default=0)


def _write(out: ArrayWriter, parts: Iterable[_Part]) -> dict[str, Any]:
    """Write the samples of a file, none after a bad line; return its counts, its highest token id and its bad lines."""
    counts, highest, problems = Counts(files=1), 0, Problems()
    for part in parts:
        for number, problem in part.problems:
            problems.add(number, problem)
        counts.add("", part.counts)
        if not problems.count:
            out.add(**part.arrays)
            highest = max(highest, *(int(part.arrays[name].max(initial=0)) for name in ("inputs", "labels")))
    if not counts.lines:
        problems.add(0, "found no rows, expected at least one; blank lines do not count")
    return {"counts": counts.as_json(), "highest": highest, **problems.as_json()}


class _Builder:
    """Build samples from lines, and count the special cases."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Options) -> None:
        self.options = options
        self.template = Template(tokenizer)
        self.tokenizer = OffsetTokenizer(tokenizer, spelled_as_text=options.special_tokens == "text")
        self.truncate = options.too_long == "truncate"
        self.bos = tokenizer.bos_token_id

    def __call__(self, task: tuple[str, list[_Line]]) -> _Part:
        """Build the samples of some lines of a file. Raises DataError if the tokenizer refuses a text."""
        self.file, lines = task
        self.counts = Counts()
        self.problems: list[tuple[int, str]] = []
        samples: list[tuple[np.ndarray, np.ndarray, int]] = []
        for batch in in_groups(self._renderings(lines), lambda line: len(line[1].text)):
            samples += self._samples(batch)
        inputs, labels, numbers = zip(*samples, strict=True) if samples else ((), (), ())
        arrays = {
            "inputs": np.concatenate([np.empty(0, np.int32), *inputs]),
            "labels": np.concatenate([np.empty(0, np.int32), *labels]),
            "lengths": np.array([len(one) for one in inputs], np.int64),
            "targets": np.array([(one != IGNORE).sum() for one in labels], np.int64),
            "lines": np.array(numbers, np.int64),
        }
        self.counts.samples += len(inputs)
        self.counts.tokens += len(arrays["inputs"])
        self.counts.targets += int(arrays["targets"].sum())
        return _Part(arrays, self.counts, sorted(self.problems))

    def _renderings(self, lines: Iterable[_Line]) -> Iterator[tuple[int, Rendering]]:
        """Yield numbers and renderings of lines that may become samples."""
        for number, line in lines:
            self.counts.lines += 1
            try:
                rendering = self._rendered(line)
                hopeless = self.tokenizer.is_longer(rendering.text, self.options.max_length)
            except (BadLineError, MemoryError, RecursionError) as error:
                said = str(error) if isinstance(error, BadLineError) else "found a line that is too large or too deep"
                self.problems.append((number, said))
                continue
            if hopeless:
                self.counts.too_long += 1
            elif rendering.answers:
                yield number, rendering
            else:
                self.counts.without_target += 1

    def _rendered(self, line: bytes | dict[str, Any]) -> Rendering:
        """Render a line with the template. Raises BadLineError if the line spells out a special token, unless
        data.special_tokens allows it."""
        conversation = conversation_of(line, self.options.fields, self.template.reads, prompt=self.options.prompts)
        if self.options.special_tokens == "refuse" and (token := self.template.special_token_in(conversation)):
            raise BadLineError(
                f"found the special token {token!r} spelled out, expected none: remove it, or set data.special_tokens "
                "to keep or text"
            )
        rendering = self._located(conversation)
        if self.options.special_tokens == "text" and rendering.unplaced:
            raise BadLineError(
                "found a special token spelled out, which cannot be made plain text, as the chat template writes the "
                "conversation otherwise without it: remove it, or set data.special_tokens to keep"
            )
        self._count(conversation, rendering)
        return rendering

    def _located(self, conversation: Conversation) -> Rendering:
        """Render a conversation and locate its answers.

        Locating an answer takes time in proportion to the number of turns. So in a chat of many turns the last answer
        is located first: its end shows if the chat is too long and is dropped."""
        if self.options.prompts:
            return render_prompt(self.template, conversation)
        if self.options.loss_on == "all" and not self.truncate and len(conversation.messages) > _MANY_TURNS:
            last = render(self.template, conversation, "last")
            text = last.text[: last.answers[-1].end] if last.answers else ""
            if len(self.tokenizer.one(text).ids) > self.options.max_length + _MANY_TURNS:
                return last
        return render(self.template, conversation, self.options.loss_on)

    def _count(self, conversation: Conversation, rendering: Rendering) -> None:
        """Count special cases of a conversation: turns that are left out or not learned; nulls; and keys that are
        unused, are variables of the template, or are missing in the rendered text."""
        learned = [message.learned for message in conversation.messages]
        self.counts.unanswered += conversation.unanswered + rendering.behind
        self.counts.passed += rendering.passed
        self.counts.unlearned += (learned[:-1] if self.options.loss_on == "last" else learned[:1]).count(True)
        self.counts.answers += conversation.answers
        self.counts.nulls_left_out += conversation.nulls_left_out
        self.counts.nulls_kept += conversation.nulls_kept
        self.counts.unused.update(conversation.unused)
        self.counts.taken.update(conversation.variables.keys())
        if rendering.answers:
            self.counts.unwritten.update(unwritten(conversation, rendering.text))

    def _samples(self, batch: list[tuple[int, Rendering]]) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Yield inputs, labels and line of each sample."""
        for (number, rendering), tokens in zip(batch, self._tokens(batch), strict=True):
            try:
                sample = self._sample(rendering, tokens)
            except BadLineError as error:
                self.problems.append((number, str(error)))
                continue
            if sample is not None:
                yield *sample, number

    def _tokens(self, batch: list[tuple[int, Rendering]]) -> Iterable[Tokens]:
        """Tokenize each line. Raises DataError, with file and line, for a text that the tokenizer refuses."""
        try:
            return self.tokenizer.batch([rendering.text for _, rendering in batch])
        except TokenizerError as error:
            for number, rendering in batch:
                try:
                    self.tokenizer.one(rendering.text)
                except TokenizerError as its_own:
                    raise DataError(f"{self.file}:{number}: {its_own}") from error
            raise DataError(f"{self.file}:{batch[0][0]} to {batch[-1][0]}: {error}") from error

    def _sample(self, rendering: Rendering, tokens: Tokens) -> tuple[np.ndarray, np.ndarray] | None:
        """Return inputs and labels of a sample; None if it is dropped as too long."""
        text, spelled, answers = rendering.text, rendering.spelled, rendering.answers
        tokens = self.tokenizer.with_text(text, tokens, spelled)
        if self.options.prompts:
            if len(tokens.ids) > self.options.max_length:
                self.counts.too_long += 1
                return None
            self.counts.spelled += len(self.tokenizer.spelled_at(tokens, spelled)) + rendering.unplaced
            return np.array(tokens.ids, np.int32), np.full(len(tokens.ids), IGNORE, np.int32)
        turns = [targets_of(answer, tokens, rendering, self.tokenizer) for answer in answers]
        length = turns[-1].last  # of the input: the last target is only predicted
        ids = np.array(tokens.ids[: length + 1], dtype=np.int32)
        begin, keeps_bos = self._cut(ids, turns[-1].first)
        if begin is None or (begin > 0 and not self.truncate):
            self.counts.too_long += 1
            return None
        labels = np.full(length, IGNORE, dtype=np.int32)
        for turn in turns:
            if turn.first > begin:  # the position that predicts its first token is there
                labels[turn.first - 1 : turn.last] = ids[turn.first : turn.last + 1]
            else:
                self.counts.targets_cut += turn.last + 1 - turn.first
        self.counts.truncated += begin > 0
        self.counts.by_content += sum(answer.by_content for answer in answers)
        self.counts.cut += sum(answer.cut for answer in answers)
        self.counts.unindented += sum(answer.unindented for answer in answers)
        self.counts.straddling += sum(turn.straddling for turn in turns)
        self.counts.without_end += sum(not turn.ended for turn in turns)
        stops = self.template.ends.stops
        self.counts.unstopped += sum(turn.ended and tokens.ids[turn.last] not in stops for turn in turns)
        kept = [index for index in self.tokenizer.spelled_at(tokens, spelled) if begin <= index <= length]
        self.counts.spelled += len(kept) + rendering.unplaced
        self.counts.spelled_targets += sum(index > begin and labels[index - 1] != IGNORE for index in kept)
        inputs, labels = ids[begin:length], labels[begin:]
        if keeps_bos:
            inputs, labels = np.append(ids[:1], inputs), np.append(np.int32(IGNORE), labels)
        return inputs, labels

    def _cut(self, ids: np.ndarray, first: int) -> tuple[int | None, bool]:
        """Return the number of tokens to cut off at the beginning so that the rest fits, and True if BOS is kept before
        the rest.

        The number is None if no token would be left before the last answer, which begins with token ``first``.
        """
        excess = len(ids) - 1 - self.options.max_length
        if excess <= 0:
            return 0, False
        if excess >= first:
            return None, False
        keeps_bos = bool(ids[0] == self.bos) and excess + 1 < first
        return excess + keeps_bos, keeps_bos


def unwritten(conversation: Conversation, text: str) -> set[str]:
    """Return the keys with texts or numbers that the rendered conversation does not contain.

    Values are searched longest first, and each uses up one occurrence in the text, so that a short value is not found
    inside a longer one. Whitespace and case do not count: templates change them.
    """
    values: dict[str, list[_Value]] = {}
    missing, left, short = set[str](), _squeezed(text), dict[str, int]()
    for one in _values(conversation, text):
        if one.asked:
            values.setdefault(_squeezed(one.value), []).append(one)
        else:
            missing.add(one.path)
    for key in sorted(filter(None, values), key=len, reverse=True):
        wanted, value = len(values[key]), values[key][0].value
        escaped = (json.dumps(value, ensure_ascii=False), json.dumps(value), repr(value))
        forms = (form[1:-1] if isinstance(value, str) else form for form in escaped)  # without quotes
        for form in dict.fromkeys([key, *map(_squeezed, forms)]):
            taken = min(wanted, left.count(form))
            left = left.replace(form, " ", taken)
            wanted -= taken
        short[key] = wanted
    left = left.casefold()
    for key, wanted in short.items():
        if wanted > left.count(key.casefold()):
            missing |= {one.path for one in values[key] if wanted == len(values[key]) or not one.located}
    return missing


class _Value(NamedTuple):
    """Text or number of a conversation."""

    path: str
    """Its keys; names of parameters are a star."""
    value: Any
    asked: bool
    """False if neither the template nor the text has its key: then it may be in the text by chance only."""
    located: bool
    """True if `render` has found it in its place."""


def _values(conversation: Conversation, text: str) -> Iterator[_Value]:
    def leaves(path: str, value: Any, asked: bool = True, located: bool = False) -> Iterator[_Value]:
        if isinstance(value, dict):
            data = path.endswith(_DATA)
            for name, item in value.items():
                if (name, item) != ("type", "function"):  # the only kind of tool
                    asked = data or name in text or name in conversation.reads.keys
                    is_function = (name, path.rpartition(".")[2]) == ("name", "function")
                    yield from leaves(f"{path}.{'*' if data else name}", item, asked, is_function)
        elif isinstance(value, list):
            for item in value:
                yield from leaves(path, item, asked, located)
        elif not is_empty(value):
            yield _Value(path, value, asked, located)

    yield from leaves(conversation.tools_key, conversation.tools)
    for key, value in conversation.variables.items():
        if isinstance(value, str | list | dict):  # another one is a switch
            yield from leaves(key, value)
    for message in conversation.messages:
        for key, value in message.turn.items():
            if key == "content":
                parts = [part["text"] for part in value] if isinstance(value, list) else value
                yield from leaves(message.places[key], parts, located="tool_calls" not in message.turn)
            elif key != "role":
                yield from leaves(message.places[key], value)


def _squeezed(value: Any) -> str:
    return "".join(str(value).split())


def targets_of(answer: Answer, tokens: Tokens, rendering: Rendering, tokenizer: OffsetTokenizer) -> Targets:
    """Return the range of a turn's target tokens. Raises BadLineError if the turn has no token of its own, or no token
    precedes it."""
    first, straddling = first_target(tokens, rendering, answer.start, tokenizer)
    last, ended = last_target(tokens, rendering.text, first, answer.end, tokenizer.special)
    if not 0 < first <= last:
        raise BadLineError(
            f"found the answer to begin at token {first} of {len(tokens.ids)} and to end at {last}, expected tokens "
            "in it and before it"
        )
    return Targets(first, last, straddling, ended)


def first_target(tokens: Tokens, rendering: Rendering, start: int, tokenizer: OffsetTokenizer) -> tuple[int, bool]:
    """Return the index of a turn's first target (one past the last token if there is none), and True if this token
    begins in the prompt. ``start`` is the character at which the turn begins."""
    offsets = tokens.offsets
    # A token without characters (a prefix that the tokenizer adds to a word) belongs to the word after it.
    inside = (index for index, (left, right) in enumerate(offsets) if left >= start or right > start)
    first = next(inside, len(offsets))
    if first == len(offsets) or offsets[first][0] >= start:
        return first, False
    given = tokenizer.one(rendering.text[:start], [span for span in rendering.spelled if span[1] <= start])
    if given.ids == tokens.ids[: first + 1]:
        return first + 1, False
    return first, True


def last_target(tokens: Tokens, text: str, first: int, stop: int, special: Collection[int]) -> tuple[int, bool]:
    """Return the index of the last target token, and True if it is a special token, which ends the turn.

    ``first`` is the index of the first target, ``stop`` the character at which the turn ends, ``special`` the ids of
    special tokens. The index is ``first - 1`` if the turn has no token. Raises BadLineError if one token contains the
    end of this turn and the beginning of the next text.
    """
    offsets = tokens.offsets
    last = bisect_right(offsets, stop, lo=min(first, len(offsets)), key=lambda offset: offset[1]) - 1
    if last + 1 < len(offsets) and offsets[last + 1][0] < stop:
        left, right = offsets[last + 1]
        inside, outside = text[left:stop].strip(), text[stop:right].strip()
        if inside and outside:
            raise BadLineError(
                f"found one token for {text[left:right]!r}, the end of an answer and the beginning of what follows, "
                "expected the chat template to keep them apart"
            )
        last += bool(inside)
    return last, tokens.ids[last] in special
