"""Random rows with a marker in each of their values, and the markers that are passed over."""

import json
import random
import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from data.samples import DataError
from tests.unit.data.chats import learned_turns, read, whole

WORDS = re.compile(r"\w+")
MARKER = re.compile(r"zq\d+qz|9\d{6}")
# Keys of public files of chats, tool use, preferences and images; and some of no file.
ROW_KEYS = WORDS.findall(
    """id source dataset category task tags meta metadata context system_prompt system_message prompt_id question
    answer response completion text language score label model timestamp conversation_id num_turns turn quality
    difficulty reward_model extra_info ability data_source toxic redacted openai_moderation uuid license
    rejected_reason messages_2 documents enable_thinking thinking reasoning_effort builtin_tools custom_tools
    date_string model_identity add_generation_prompt continue_final_message chat_template bos_token tokenize role
    content namespace range title thinking_budget tool_choice parallel_tool_calls response_format temperature
    functions_used available_tools domain system_hint mask instruction_type url embedding loss weight history
    functions images name developer"""
)
TURN_KEYS = WORDS.findall(
    """id name tool_call_id weight train loss masked mask index timestamp model refusal audio annotations citations
    thinking reasoning reasoning_content reasoning_details thought tool_plan recipient channel end_turn author
    metadata function_calls functions tools documents images prefix step eot ipython country toxic language date url
    value content text parts type status label token_count logprobs finish_reason user cache_control partial
    tool_calls function_call response tool_name message_id parent_id rank emojis"""
)
PART_KEYS = ["image_url", "cache_control", "annotations", "id", "input_audio", "citations"]
CALL_KEYS = ["id", "index", "type", "result", "extra"]
TOOL_KEYS = ["strict", "returns", "type", "return", "output_schema", "category", "version"]


class Maker:
    """Draws rows. Each text in them is a marker of its own."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.numbers = count()

    def text(self) -> str:
        return f"zq{next(self.numbers)}qz"

    def value(self, depth: int = 0) -> Any:
        kinds: list[Callable[[], Any]] = [self.text] * 6 + [
            lambda: None,
            lambda: "",
            list,
            lambda: self.rng.random() < 0.5,
        ]
        kinds += [lambda: 9_000_000 + next(self.numbers), lambda: self.rng.choice([0, 1])]
        if depth < 3:
            kinds += [lambda: [self.value(depth + 1) for _ in range(self.rng.randint(1, 2))]] * 2
            kinds += [lambda: {key: self.value(depth + 1) for key in self.some(TURN_KEYS, 2)}] * 2
        return self.rng.choice(kinds)()

    def some(self, keys: list[str], most: int) -> list[str]:
        return self.rng.sample(keys, self.rng.randint(0, most))

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def more(self, keys: list[str], most: int, taken: dict[str, Any]) -> dict[str, Any]:
        return taken | {key: self.value() for key in self.some(keys, most) if key not in taken}

    def schema(self, depth: int = 0) -> dict[str, Any]:
        properties = {
            self.text(): {"type": "string", "description": self.text()} for _ in range(self.rng.randint(0, 2))
        }
        if depth < 1:
            properties |= {"unit": {"type": "object", **self.schema(depth + 1)}} if self.chance(0.3) else {}
            properties |= (
                {"n": {"type": "integer", "default": 9_000_000 + next(self.numbers)}} if self.chance(0.3) else {}
            )
        return {"type": "object", "properties": properties, "required": list(properties)}

    def tool(self) -> Any:
        function = {"name": self.text(), "description": self.text(), "parameters": self.schema()}
        function = self.more(TOOL_KEYS, 1, function)
        tool = self.more(TOOL_KEYS, 1, {"type": "function", "function": function}) if self.chance(0.7) else function
        return json.dumps(tool) if self.chance(0.1) else tool

    def call(self) -> Any:
        arguments: Any = {self.text(): self.text() for _ in range(self.rng.randint(0, 2))}
        arguments |= {"b": [9_000_000 + next(self.numbers), None, True], "n": None} if self.chance(0.3) else {}
        arguments = json.dumps(arguments) if self.chance(0.3) else arguments
        function = {"name": self.text(), "arguments": arguments}
        return self.more(CALL_KEYS, 2, {"function": function} if self.chance(0.7) else function)

    def content(self) -> Any:
        if self.chance(0.8):
            return self.text()
        return [self.more(PART_KEYS, 1, {"type": "text", "text": self.text()}) for _ in range(self.rng.randint(1, 2))]

    def turn(self, role: str, keys: tuple[str, str]) -> dict[str, Any]:
        turn: dict[str, Any] = {keys[0]: role, keys[1]: self.content()}
        if role in ("assistant", "gpt") and self.chance(0.2):
            calls = [self.call() for _ in range(self.rng.randint(0, 2))]
            turn["tool_calls"] = json.dumps(calls) if self.chance(0.1) else calls
            turn[keys[1]] = self.rng.choice([None, turn[keys[1]], ""])
        if role in ("assistant", "gpt") and self.chance(0.2):
            turn[self.rng.choice(["weight", "train"])] = self.rng.choice([0, 1, True, False])
        return self.more(TURN_KEYS, 2 if self.chance(0.4) else 0, turn)

    def turns(self, keys: tuple[str, str]) -> list[dict[str, Any]]:
        user, assistant = ("human", "gpt") if keys[0] == "from" else ("user", "assistant")
        roles = ["system"] * self.chance(0.3)
        for _ in range(self.rng.randint(1, 3)):
            roles += [user, assistant] + ["tool", assistant] * self.chance(0.15) + [user] * self.chance(0.1)
        return [self.turn(role, keys) for role in roles]

    def row(self) -> dict[str, Any]:
        form = self.rng.choice(["messages", "conversations", "pair", "completion"])
        row: dict[str, Any]
        if form == "pair":
            row = {self.rng.choice(["input", "instruction"]): self.text(), "output": self.text()}
            row |= {"history": [[self.text(), self.text()]]} if self.chance(0.3) else {}
        elif form == "completion":
            row = {"prompt": self.turns(("role", "content")), "completion": self.turns(("role", "content"))[1:]}
        else:
            own = ("role", "content") if form == "messages" else ("from", "value")
            row = {form: self.turns(self.rng.choice([own, own, ("role", "content"), ("from", "value")]))}
        if self.chance(0.3):
            tools = [self.tool() for _ in range(self.rng.randint(0, 2))]
            row[self.rng.choice(["tools", "tools", "functions"])] = json.dumps(tools) if self.chance(0.3) else tools
        row |= {"system": self.text()} if self.chance(0.2) else {}
        row |= (
            {"chat_template_kwargs": {key: self.value() for key in self.some(ROW_KEYS, 2)}} if self.chance(0.2) else {}
        )
        return self.more(ROW_KEYS, 3 if self.chance(0.6) else 0, row)


def markers_of(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each marker in a row's values with its keys; in JSON texts too."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from markers_of(item, (*path, key))
    elif isinstance(value, list):
        for item in value:
            yield from markers_of(item, path)
    elif isinstance(value, str) and value[:1] in ("{", "["):
        yield from markers_of(json.loads(value), path)
    elif isinstance(value, str | int) and not isinstance(value, bool):
        yield from ((marker, path) for marker in MARKER.findall(str(value)))


def passed_over(row: dict[str, Any], text: str, noted: set[str]) -> list[tuple[str, tuple[str, ...]]]:
    """The markers that are not in the text, and whose keys are not noted."""
    # A noted key covers all that is in it; a star is any name.
    paths = [path.replace("/", ".").removesuffix(".*").split(".") for path in noted]
    missing = []
    for marker, keys in markers_of(row):
        plain = [re.sub(MARKER, "*", key) for key in keys]
        inside = any(set(path) <= {*plain, "function", "*"} and path[-1] in plain for path in paths)
        if marker not in text and not inside:
            missing.append((marker, keys))
    return missing


def of_answers(row: dict[str, Any]) -> tuple[set[str], set[str]]:
    """The markers of all answers that a row allows to learn, and of the last answer's content."""
    if "output" in row:
        answers = [pair[1] for pair in row.get("history") or []] + [row["output"]]
        learned = [{"content": answer} for answer in answers]
    else:
        turns = next(row[key] for key in ("messages", "conversations", "completion") if key in row)
        answers = [turn for turn in turns if turn.get("role", turn.get("from")) in ("assistant", "gpt")]
        off = [
            [turn.get(key) in (0, False) and turn.get(key) is not None for key in ("weight", "train")]
            for turn in answers
        ]
        learned = [turn for turn, flags in zip(answers, off, strict=True) if not any(flags)]
        learned = learned if not any(off[-1]) else [*learned, {}]
    last = learned[-1].get("content", learned[-1].get("value"))
    text = "".join(part["text"] for part in last) if isinstance(last, list) else last or ""
    return {*MARKER.findall(json.dumps(learned))}, {*MARKER.findall(text)}


def outcome(directory: Path, tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], loss_on: str) -> str:
    """Read a random row and check that nothing of it is passed over, or learned that is no answer.

    Returns: ``whole``, ``counted`` if its keys are, ``refused`` or ``dropped``.
    """
    try:
        (sample,), counts = read(directory, tokenizer, row, loss_on=loss_on)
    except DataError as error:
        dropped = "no sample is left" in str(error) and "1 without target" in str(error)
        assert dropped or len(str(error).splitlines()) == 2, error
        return "dropped" if dropped else "refused"
    noted = {*counts.unused, *counts.unwritten, *counts.taken}
    missing = passed_over(row, whole(sample, tokenizer), noted)
    assert not missing or counts.unanswered, (missing, row)
    allowed, last = of_answers(row)
    targets = {*MARKER.findall("".join(learned_turns(sample, tokenizer)))}
    assert targets <= allowed and (last <= targets or counts.unwritten), (targets, row)
    return "counted" if counts.unused or counts.unwritten else "whole"
