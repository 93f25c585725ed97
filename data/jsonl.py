"""Parse JSONL lines into conversations, in the three common forms of chat data.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"input": "...", "output": "..."}          "instruction" may be added, or replace "input" (Alpaca)

Each object may also have ``system``, a text, ``tools``, a list of function schemas for the chat template, and values of
the template's variables. A pair may have ``history``, its earlier questions and answers.
``prompt`` and ``completion`` may be two lists of messages, of which the second is learned.

A line of another form is an error: guessing would silently train on half of it. A field map
(``{"input": "question", "output": "answer"}``: our name to the file's key) describes other files; then only the
mapped keys are read, and every line must have them. All keys that are not read are noted, for `data.chat.Counts`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.keys import Reads, is_empty
from data.samples import DataError
from data.turns import (
    FLAGS,
    NOTHING,
    BadLineError,
    Said,
    Seen,
    Turn,
    flag_of,
    refuse_media,
    said,
    shown,
    text_of,
    tools_of,
    without_doubles,
)

PAIR = ("instruction", "input", "output")
ANSWERS = ("prompt", "completion")
COMPARED = ("chosen", "rejected", "chosen_response", "rejected_response", "rejected_messages", "rejected_output")
UNDESIRED = ("label", "kto_tag")  # of TRL and of LLaMA-Factory
FIELDS = {"messages": ("messages",), "conversations": ("conversations",), "pair": (*PAIR, "history")}
FIELDS["completion"] = ANSWERS
BESIDE = ("system", "tools", "functions", "chat_template_kwargs")
FORMS = "exactly one of 'messages', 'conversations' or 'input' (or 'instruction') with 'output'"
REMEDY = "name the file's keys in the field map (data.fields: {input: question, output: answer})"
LINE_BYTES = 2**26  # more than any real conversation; reading, decoding and rendering take a multiple of it
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns up to the last assistant turn, the schemas of the available tools, and notes for the counts.

    Attributes:
        turns: the turns.
        tools: schemas of the tools.
        variables: the row's values of variables that the chat template takes.
        learned: for each turn the flag that says if it is learned; None without one.
        places: for each turn the names of its keys in the file.
        unanswered: number of turns behind the last assistant turn.
        seen: keys that are not used, and nulls.
    """

    turns: list[Turn]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]
    learned: list[bool | None]
    places: list[dict[str, str]]
    unanswered: int
    seen: Seen


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of each line. Splits at newline bytes only: JSON strings may contain unescaped U+2028.

    A line longer than ``LINE_BYTES`` is cut after one more byte, so that `conversation_of` refuses it.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LINE_BYTES + 1):
            number += 1
            yield number, line.removeprefix(BOM) if number == 1 else line
            while len(line) > LINE_BYTES and not line.endswith(b"\n"):
                line = file.readline(LINE_BYTES + 1)


def expected_fields(fields: Mapping[str, str] | None) -> str | None:
    """Describe the expected field map; None if the map is None or describes exactly one of the three forms."""
    if fields is None or ((form := _form(fields)) and {*fields} <= {*FIELDS[form], *BESIDE}):
        return None
    known = ("messages", "conversations", *FIELDS["pair"], *BESIDE)
    return (
        f"names out of {', '.join(known)}, each mapped to a key of the file: {FORMS}, and optionally 'history' (beside "
        f"'output'), {', '.join(map(repr, BESIDE))}"
    )


def check_fields(fields: Mapping[str, str] | None) -> None:
    """Raise `DataError` if the field map is invalid."""
    if expected := expected_fields(fields):
        raise DataError(f"data.fields: {fields}, expected {expected}")


def conversation_of(line: bytes, fields: Mapping[str, str] | None, reads: Reads) -> Conversation:
    """Parse a line into a conversation up to its last assistant turn; later turns have no answer.

    Args:
        line: the line.
        fields: the field map.
        reads: names that the chat template reads.

    Raises:
        BadLineError: the text names the found and the expected value.
    """
    row = _object(line)
    if fields is None:
        values = {name: value for name, value in row.items() if value is not None}
        _refuse_known(values)
    else:
        missing = [key for key in fields.values() if key not in row]
        if missing:
            raise BadLineError(f"found the keys {list(row)}, expected {missing} of data.fields among them")
        values = {name: row[key] for name, key in fields.items() if row[key] is not None}
    form = _form(values)
    if form is None:
        nulls = [key for key, value in row.items() if value is None]
        without = f" (without a value: {nulls})" if nulls else ""
        raise BadLineError(f"found the keys {list(row)}{without}, expected {FORMS}; {REMEDY}")
    names = {name: (fields or {}).get(name, name) for name in values}
    seen = Seen(reads)
    tools = _tools(values, names, seen)
    turns = _with_system(_turns(values, names, form, seen), values, names)
    flags = {} if fields else _row_flags(values)
    if flag_of(flags, "the row") is False:
        turns = [Said(one.turn, False, one.places) for one in turns]
    used = {*names.values()} if fields else {*FIELDS[form], *BESIDE, *flags}
    variables = _variables(values, {} if fields else row, names, used, seen)
    seen.unused.update(key for key, value in row.items() if key not in used | variables.keys() and not is_empty(value))
    kept = _up_to_answer(turns)
    return Conversation(
        [one.turn for one in kept],
        tools,
        variables,
        [one.learned for one in kept],
        [one.places for one in kept],
        len(turns) - len(kept),
        seen,
    )


def _refuse_known(values: Mapping[str, Any]) -> None:
    """Refuse a row that says how to learn it in a way that is not supported."""
    refuse_media(values, "")
    for key in COMPARED:
        if not is_empty(values.get(key)):
            raise BadLineError(
                f"found the key {key!r} of preference data, expected rows with the answer to learn only: learning from "
                "comparisons is not supported"
            )
    for key in UNDESIRED:
        if values.get(key) is False:
            raise BadLineError(f"{key}: found false, which marks an undesired answer, expected only answers to learn")


def _row_flags(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of the whole row; a fraction named "loss" is a measured one."""
    return {
        key: value
        for key, value in values.items()
        if key in FLAGS and not isinstance(value, str | dict) and not (key == "loss" and isinstance(value, float))
    }


def _variables(
    values: Mapping[str, Any], row: Mapping[str, Any], names: Mapping[str, str], used: set[str], seen: Seen
) -> dict[str, Any]:
    """Return the values of variables that the chat template takes: keys of the row, and of ``chat_template_kwargs``."""
    found = {key: value for key, value in row.items() if key in seen.reads.variables - used and value is not None}
    more, name = values.get("chat_template_kwargs"), names.get("chat_template_kwargs", "")
    if more is None:
        return found
    if not isinstance(more, dict):
        raise BadLineError(f"{name!r}: found {shown(more)}, expected an object with variables of the chat template")
    for key, value in more.items():
        if value is None:
            continue
        if key in found and found[key] != value:
            raise BadLineError(f"found different {key!r} in the row and in {name!r}, expected it once")
        if key in seen.reads.variables:
            found[key] = value
        elif not is_empty(value):
            seen.unused.add(f"{name}.{key}")
    return found


def _object(line: bytes) -> dict[str, Any]:
    if len(line) > LINE_BYTES:
        raise BadLineError(
            f"found more than {LINE_BYTES >> 20} MiB in one line, expected one conversation per line, not a JSON list "
            "of them all"
        )
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=without_doubles)
    except UnicodeDecodeError as error:
        raise BadLineError(
            f"found bytes that are not UTF-8 ({error.reason} at byte {error.start}), expected UTF-8"
        ) from error
    except BadLineError:
        raise
    except (ValueError, RecursionError) as error:
        raise BadLineError(
            f"found invalid JSON ({error}), expected one object per line; data.kind: text reads plain text"
        ) from error
    if not isinstance(row, dict):
        raise BadLineError(f"found {shown(row)}, expected an object")
    return row


def _form(names: Mapping[str, Any]) -> str | None:
    """Return the form of a line with these keys; None unless they make exactly one complete form."""
    forms = [form for form in ("messages", "conversations") if form in names]
    if "output" in names and ("input" in names or "instruction" in names):
        forms.append("pair")
    if not forms and all(isinstance(names.get(name), list) for name in ANSWERS):
        forms.append("completion")
    return forms[0] if len(forms) == 1 else None


def _turns(values: Mapping[str, Any], names: Mapping[str, str], form: str, seen: Seen) -> list[Said]:
    if form == "pair":
        return _from_pair(values, names)
    if form == "completion":  # only the completion's turns are learned
        prompt, completion = (_from_list(values[name], names[name], seen) for name in ANSWERS)
        return [*(Said(one.turn, False, one.places) for one in prompt), *completion]
    return _from_list(values[form], names[form], seen)


def _from_list(turns: Any, name: str, seen: Seen) -> list[Said]:
    if not isinstance(turns, list) or not turns:
        raise BadLineError(f"{name!r}: found {shown(turns)}, expected a list of at least a user and an assistant turn")
    return [said(turn, name, f"{name}[{index}]", seen) for index, turn in enumerate(turns)]


def _from_pair(values: Mapping[str, Any], names: Mapping[str, str]) -> list[Said]:
    """Join non-empty instruction and input with a newline into the user's turn, followed by the answer."""
    asked = {name: text_of(values[name], repr(names[name])) for name in ("instruction", "input") if name in values}
    answer = text_of(values["output"], repr(names["output"]))
    question = "\n".join(filter(None, asked.values()))
    return [
        *_history(values.get("history"), names.get("history", "")),
        Said({"role": "user", "content": question}, places={"content": "/".join(names[name] for name in asked)}),
        Said({"role": "assistant", "content": answer}, places={"content": names["output"]}),
    ]


def _history(history: Any, name: str) -> list[Said]:
    """Return the earlier turns of a pair: a list of questions with their answers."""
    if is_empty(history):
        return []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise BadLineError(f"{name!r}: found {shown(history)}, expected a list of pairs [question, answer]")
    return [
        Said({"role": role, "content": text_of(text, f"{name}[{index}]")}, places={"content": name})
        for index, pair in enumerate(history)
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _tools(values: Mapping[str, Any], names: Mapping[str, str], seen: Seen) -> list[dict[str, Any]] | None:
    """Return the schemas of the tools; ``functions`` is their older name."""
    found = [name for name in ("tools", "functions") if values.get(name) not in NOTHING]
    if len(found) > 1:
        raise BadLineError(f"found {' and '.join(repr(names[name]) for name in found)}, expected one of them")
    if not found:
        return None
    seen.tools = names[found[0]]
    return tools_of(values[found[0]], repr(seen.tools), seen)


def _with_system(turns: list[Said], values: Mapping[str, Any], names: Mapping[str, str]) -> list[Said]:
    if values.get("system") in (None, ""):
        return turns
    name = names["system"]
    system, first = text_of(values["system"], repr(name)), turns[0].turn
    if first["role"] != "system":
        return [Said({"role": "system", "content": system}, places={"content": name}), *turns]
    if first["content"] != system:
        raise BadLineError(f"found a system turn and another text in {name!r} beside it, expected one system prompt")
    return turns


def _up_to_answer(turns: list[Said]) -> list[Said]:
    roles = [one.turn["role"] for one in turns]
    if "assistant" not in roles:
        raise BadLineError(f"found the roles {roles}, expected an assistant turn to learn from")
    last = len(roles) - 1 - roles[::-1].index("assistant")
    if last == 0:
        raise BadLineError("found nothing before the last assistant turn, expected a turn that it answers")
    return turns[: last + 1]
