"""Parse JSONL lines into conversations, in the three common forms of chat data.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"input": "...", "output": "..."}          "instruction" may be added, or replace "input" (Alpaca)

Each object may also have ``system``, a text, and ``tools``, a list of function schemas for the chat template. A message
may have ``tool_calls``, ``tool_call_id``, ``name`` and ``reasoning_content``. Its content is a string or a list of text
parts (``{"type": "text", "text": "..."}``); it may be null if there are ``tool_calls``.

A line of another form is an error: guessing would silently train on half of it. A field map
(``{"input": "question", "output": "answer"}``: our name to the file's key) describes other files; then only the
mapped keys are read, and every line must have them.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.samples import DataError

Turn = dict[str, Any]
"""Message of a chat template: ``role`` (system, developer, user, assistant or tool), ``content`` (str, list of text
parts, or None with tool calls), and if given ``tool_calls``, ``tool_call_id``, ``name``, ``reasoning_content``."""

ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
SPEAKERS = {"human": "user", "gpt": "assistant", "observation": "tool", **ROLES}
PAIR = ("instruction", "input", "output")
FORMS = "exactly one of 'messages', 'conversations' or 'input' (or 'instruction') with 'output'"
REMEDY = "name the file's keys in the field map (data.fields: {input: question, output: answer})"
LINE_BYTES = 2**26  # more than any real conversation; reading, decoding and rendering take a multiple of it
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns up to the last assistant turn, and the schemas of the available tools."""

    turns: list[Turn]
    tools: list[dict[str, Any]] | None


class BadLineError(ValueError):
    """Error in one line, without file and line number."""


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
    known = ("messages", "conversations", *PAIR, "system", "tools")
    if fields is None or (_form(fields) is not None and all(name in known for name in fields)):
        return None
    return (
        f"names out of {', '.join(known)}, each mapped to a key of the file: {FORMS}, and optionally 'system' and "
        "'tools'"
    )


def check_fields(fields: Mapping[str, str] | None) -> None:
    """Raise `DataError` if the field map is invalid."""
    if expected := expected_fields(fields):
        raise DataError(f"data.fields: {fields}, expected {expected}")


def conversation_of(line: bytes, fields: Mapping[str, str] | None) -> Conversation:
    """Parse a line into a conversation up to its last assistant turn; later turns have no answer.

    Raises:
        BadLineError: the text names the found and the expected value.
    """
    row = _object(line)
    if fields is None:
        values = row
    else:
        missing = [key for key in fields.values() if key not in row]
        if missing:
            raise BadLineError(f"found the keys {list(row)}, expected {missing} of data.fields among them")
        values = {name: row[key] for name, key in fields.items()}
    form = _form(values)
    if form is None:
        raise BadLineError(f"found the keys {list(row)}, expected {FORMS}; {REMEDY}")
    names = {name: (fields or {}).get(name, name) for name in values}
    turns = _up_to_answer(_with_system(_TURNS[form](values, names), values, names))
    return Conversation(turns, _tools(values, names))


def _object(line: bytes) -> dict[str, Any]:
    if len(line) > LINE_BYTES:
        raise BadLineError(
            f"found more than {LINE_BYTES >> 20} MiB in one line, expected one conversation per line, not a JSON list "
            "of them all"
        )
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=_without_doubles)
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
        raise BadLineError(f"found {_shown(row)}, expected an object")
    return row


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object and reject repeated keys, of which json would silently keep the last value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for key in keys if keys.count(key) > 1)
        raise BadLineError(f"found the key {_shown(double)} twice in one object, expected it once")
    return values


def _form(names: Mapping[str, Any]) -> str | None:
    """Return the form of a line with these keys; None unless they make exactly one complete form."""
    forms = [form for form in ("messages", "conversations") if form in names]
    if any(name in names for name in PAIR):
        forms.append("pair")
    if forms == ["pair"] and not ("output" in names and ("input" in names or "instruction" in names)):
        return None
    return forms[0] if len(forms) == 1 else None


def _from_list(values: Mapping[str, Any], names: Mapping[str, str], form: str) -> list[Turn]:
    role_key, text_key, roles = ("role", "content", ROLES) if form == "messages" else ("from", "value", SPEAKERS)
    turns, name = values[form], names[form]
    if not isinstance(turns, list) or not turns:
        raise BadLineError(f"{name!r}: found {_shown(turns)}, expected a list of at least a user and an assistant turn")
    result = []
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise BadLineError(
                f"{name}[{index}]: found {_shown(turn)}, expected an object with {role_key!r} and {text_key!r}"
            )
        role = _role(turn, f"{name}[{index}]", role_key, text_key, roles)
        result.append({"role": role, **_said(turn, f"{name}[{index}]", text_key, role)})
    return result


def _role(turn: dict[str, Any], place: str, role_key: str, text_key: str, roles: Mapping[str, str]) -> str:
    for key in (role_key, text_key):
        if key not in turn and not (key == text_key and turn.get("tool_calls")):
            raise BadLineError(f"{place}: found the keys {list(turn)}, expected {role_key!r} and {text_key!r}")
    role = turn[role_key]
    if not isinstance(role, str) or role not in roles:
        raise BadLineError(f"{place}.{role_key}: found {_shown(role)}, expected one of {list(roles)}")
    return roles[role]


def _said(turn: dict[str, Any], place: str, text_key: str, role: str) -> Turn:
    """Return a turn's content and tool calls, with the other keys that chat templates read."""
    said: Turn = {"content": turn.get(text_key)}
    if turn.get("tool_calls") is not None:
        if role != "assistant":
            raise BadLineError(f"{place}: found 'tool_calls' in a turn of role {role!r}, expected them of 'assistant'")
        said["tool_calls"] = _tool_calls(turn["tool_calls"], f"{place}.tool_calls")
    if said["content"] is None and role == "assistant" and "tool_calls" not in said:
        raise BadLineError(f"{place}.{text_key}: found null, expected a string, or tool_calls beside it")
    if isinstance(said["content"], list):
        said["content"] = _parts(said["content"], f"{place}.{text_key}")
    elif said["content"] is not None or "tool_calls" not in said:
        said["content"] = _text(said["content"], f"{place}.{text_key}")
    for key in ("reasoning_content", "name", "tool_call_id"):
        if turn.get(key) not in (None, ""):
            said[key] = _text(turn[key], f"{place}.{key}")
    return said


def _parts(parts: list[Any], place: str) -> list[dict[str, str]]:
    """Return the parts of a list content; parts other than text are refused."""
    if not parts:
        raise BadLineError(f"{place}: found an empty list, expected a string or at least one text part")
    for index, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != "text" or "text" not in part:
            raise BadLineError(
                f'{place}[{index}]: found {_shown(part)}, expected a text part {{"type": "text", "text": "..."}}'
            )
    return [{"type": "text", "text": _text(part["text"], f"{place}[{i}].text")} for i, part in enumerate(parts)]


def _tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects, the form that templates and servers expect."""
    if not isinstance(calls, list) or not calls:
        raise BadLineError(f"{place}: found {_shown(calls)}, expected a list of at least one call")
    result = []
    for index, call in enumerate(calls):
        where = f"{place}[{index}]"
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadLineError(f"{where}: found {_shown(call)}, expected an object with 'function' and its 'name'")
        whole = {**function, "arguments": _arguments(function.get("arguments"), f"{where}.arguments")}
        result.append({**call, "function": whole} if "function" in call else whole)
    return result


def _arguments(arguments: Any, place: str) -> dict[str, Any]:
    value = {} if arguments is None else arguments
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=_without_doubles) if value.strip() else {}
        except (ValueError, RecursionError) as error:
            raise BadLineError(
                f"{place}: found {_shown(arguments)}, expected an object, or one as JSON ({error})"
            ) from error
    if not isinstance(value, dict):
        raise BadLineError(f"{place}: found {_shown(arguments)}, expected an object, or one as JSON")
    return value


def _tools(values: Mapping[str, Any], names: Mapping[str, str]) -> list[dict[str, Any]] | None:
    """Return the function schemas of a conversation."""
    tools = values.get("tools")
    if tools in (None, []):
        return None
    name = repr(names["tools"])
    if not isinstance(tools, list):
        raise BadLineError(f"{name}: found {_shown(tools)}, expected a list of function schemas")
    for index, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadLineError(
                f"{name}[{index}]: found {_shown(tool)}, expected an object with 'function' and its 'name'"
            )
    return tools


def _from_messages(values: Mapping[str, Any], names: Mapping[str, str]) -> list[Turn]:
    return _from_list(values, names, "messages")


def _from_conversations(values: Mapping[str, Any], names: Mapping[str, str]) -> list[Turn]:
    return _from_list(values, names, "conversations")


def _from_pair(values: Mapping[str, Any], names: Mapping[str, str]) -> list[Turn]:
    """Join non-empty instruction and input with a newline into the user's turn, followed by the answer."""
    asked = [_text(values[name], repr(names[name])) for name in ("instruction", "input") if name in values]
    answer = _text(values["output"], repr(names["output"]))
    return [{"role": "user", "content": "\n".join(filter(None, asked))}, {"role": "assistant", "content": answer}]


_TURNS = {"messages": _from_messages, "conversations": _from_conversations, "pair": _from_pair}


def _with_system(turns: list[Turn], values: Mapping[str, Any], names: Mapping[str, str]) -> list[Turn]:
    if values.get("system") in (None, ""):
        return turns
    system = _text(values["system"], repr(names["system"]))
    if turns[0]["role"] == "system":
        raise BadLineError(f"found a system turn and the key {names['system']!r} beside it, expected one system prompt")
    return [{"role": "system", "content": system}, *turns]


def _up_to_answer(turns: list[Turn]) -> list[Turn]:
    roles = [turn["role"] for turn in turns]
    if "assistant" not in roles:
        raise BadLineError(f"found the roles {roles}, expected an assistant turn to learn from")
    last = len(roles) - 1 - roles[::-1].index("assistant")
    if last == 0:
        raise BadLineError("found nothing before the last assistant turn, expected a turn that it answers")
    return turns[: last + 1]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadLineError(f"{name}: found {_shown(value)}, expected a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON can encode half of a surrogate pair ("\ud83d"): not a character, and refused by every tokenizer.
        raise BadLineError(
            f"{name}: found half of a surrogate pair at character {error.start}, expected text"
        ) from error
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    kind = kinds.get(type(value))
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if kind is None else f"{kind} {text}"
