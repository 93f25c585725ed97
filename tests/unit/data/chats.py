"""Conversations, tokenizers of several kinds, and the learned parts of a sample, for the tests of chat data."""

import json
import random
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from data.chat import Counts, read_chat
from data.samples import IGNORE, Sample
from tests.lib.tiny import TEXT, tiny_tokenizer

END = "<|im_end|>"
GOOD = {"input": "What is 12 plus 30?", "output": "42"}
WORDS = ["quick", " the", "12", "\n", "\n\n", "  ", "é", "e\u0301", "日本語", "😀", "👩‍👩‍👧", "\u2028", "<think>"]
WORDS += ["?", "\t", "assistant\n"]
THINKING = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + CONTENT + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n<think>\n'}}{% endif %}"
)


def write(path: Path, *rows: object) -> Path:
    """Write JSONL; a string is a line as it is."""
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def read(
    directory: Path, tokenizer: PreTrainedTokenizerFast, *rows: object, **options: Any
) -> tuple[list[Sample], Counts]:
    """Write the rows to ``a.jsonl`` and read them, of any length unless ``max_length`` is given."""
    return read_chat([write(directory / "a.jsonl", *rows)], tokenizer, **{"max_length": 10_000, **options})


def templated(template: str | None) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with another chat template."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def learned_turns(sample: Sample, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Decode each run of targets, after checking that they agree with the inputs."""
    valid = (sample.labels != IGNORE).tolist()
    assert valid[-1]
    runs: list[list[int]] = []
    for position, label in enumerate(sample.labels.tolist()):
        if not valid[position]:
            continue
        assert position + 1 == len(valid) or sample.input_ids[position + 1] == label
        if not (position and valid[position - 1]):
            runs.append([])
        runs[-1].append(label)
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def learned(sample: Sample, tokenizer: PreTrainedTokenizerFast) -> str:
    """Decode the targets, which must be one run."""
    (run,) = learned_turns(sample, tokenizer)
    return run


def whole(sample: Sample, tokenizer: PreTrainedTokenizerFast) -> str:
    """Decode the inputs and the last target."""
    return tokenizer.decode([*sample.input_ids, sample.labels[-1]], skip_special_tokens=False)


def text(rng: random.Random, least: int = 0) -> str:
    """Draw a text of at most 12 words."""
    return "".join(rng.choices(WORDS, k=rng.randint(least, 12)))


def conversation(rng: random.Random) -> list[dict[str, str]]:
    """Draw the messages of a conversation."""
    system = [("system", text(rng))] if rng.random() < 0.5 else []
    turns = [(role, text(rng, 1) + ".") for _ in range(rng.randint(1, 4)) for role in ("user", "assistant")]
    return messages(*system, *turns)


def messages(*pairs: tuple[Any, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


def turns(*pairs: tuple[Any, Any]) -> dict[str, Any]:
    return {"messages": messages(*pairs)}


TWO = messages(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))


def with_flags(*flags: dict[str, Any]) -> dict[str, Any]:
    """A row of two questions and two answers, with more keys on the turns."""
    return {"messages": [{**turn, **more} for turn, more in zip(TWO, flags, strict=True)]}


# Kinds of tokenizers: each is returned with the token that ends a turn.


def chatml() -> tuple[PreTrainedTokenizerFast, str]:
    return tiny_tokenizer(), END


def writes_bos() -> tuple[PreTrainedTokenizerFast, str]:
    """As Llama 3: the template writes BOS, and so would the tokenizer; the header of a turn ends with two newlines."""
    tokenizer = templated(
        "{{ bos_token }}{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n\n' + m['content'] + '<|im_end|>'}}"
        "{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n\n'}}{% endif %}"
    )
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return tokenizer, END


def swallows_whitespace() -> tuple[PreTrainedTokenizerFast, str]:
    """As Phi 3: the tokens of the template take the whitespace behind them along."""
    tokenizer = templated(
        "{% for m in messages %}{{('<|a|>' if m['role'] == 'assistant' else '<|im_start|>') + '\n' + m['content'] + "
        "'<|e|>\n'}}{% endfor %}{% if add_generation_prompt %}{{'<|a|>\n'}}{% endif %}"
    )
    tokenizer.add_tokens([AddedToken("<|a|>", rstrip=True), AddedToken("<|e|>", rstrip=True)], special_tokens=True)
    return tokenizer, "<|e|>"


def normalizing() -> tuple[PreTrainedTokenizerFast, str]:
    """As Qwen: text is composed (NFC) before it is tokenized, so tokens have fewer characters than the text."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer, END


KINDS = [chatml, writes_bos, swallows_whitespace, normalizing]


def words_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer with " the" as one token, so that the space at the end of a prompt merges with the answer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # would hide that a token begins in the prompt
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 9, trainer)
    assert tokenizer.encode(" the").tokens == ["Ġthe"]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    wrapped.chat_template = template
    return wrapped


# Words that mark the parts of a conversation.

ONE_LINE = re.compile(r"1 bad line in the data:\n\S+a\.jsonl:1: found [^\n]+")


WORD = r"w[a-z]\d{3}w|71\d\d"


class Words:
    """Words that occur once, each the mark of one part of a conversation."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, kind: str) -> str:
        """Return the next word; it has lower-case letters, which changes of a template reach."""
        self.count += 1
        return f"w{kind}{self.count:03}w"


def answers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [turn for turn in rows if turn["role"] == "assistant"]


def words_in(turn: dict[str, Any]) -> set[str]:
    return set(re.findall(WORD, json.dumps(turn)))


def cut_answers(turns: list[dict[str, Any]], runs: list[str], tokenizer: PreTrainedTokenizerFast) -> int:
    """Check the learned text of each answer, of which the last ends the conversation; count those with less thinking.

    It has the words of all its parts and of no other turn, and at most one token at which generation stops, its last.
    """
    cut = 0
    for turn, run in zip(turns, runs, strict=True):
        found, wanted = words_in({"run": run}), words_in(turn)
        thinking = {word for word in wanted if word[1] in "ri"}
        assert found <= wanted and wanted - found <= (set() if turn is turns[-1] else thinking), (turn, run)
        assert (turn["content"] or "").split("</think>")[-1].strip() in run, (turn, run)
        assert tokenizer.eos_token not in run.removesuffix(tokenizer.eos_token), run
        cut += found < wanted
    return cut
