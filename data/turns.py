"""Read a turn of a conversation: its role, text, tool calls and reasoning, and the flags that say if it is learned."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from data.keys import Reads, is_empty

Turn = dict[str, Any]
"""Message of a chat template: ``role`` (system, developer, user, assistant or tool), ``content`` (str, list of text
parts, or None with tool calls), and if given ``tool_calls``, ``tool_call_id``, ``name``, ``reasoning_content``, and
other keys that the template reads."""

ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
ROLES |= {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
ROLES |= {"model": "assistant", "observation": "tool", "function": "tool", "tool_response": "tool"}
CALLERS = ("function_call", "tool_call")
"""Roles of turns whose text is a tool call, or a list of them, in JSON."""

FLAGS = {"weight": True, "train": True, "training": True, "trainable": True, "loss": True, "loss_mask": True}
FLAGS |= {"loss_weight": True, "masked": False}
"""Keys that say if a turn is learned, and the value with which it is."""

NOTHING: tuple[Any, ...] = (None, "", [], "[]", "null")
"""Values of a key for calls or tools if there are none."""

MEDIA = ("images", "image", "videos", "video", "audios", "audio")

_ROLE, _TEXT, _CALLS = ("role", "from"), ("content", "value"), ("tool_calls", "function_call")
_NO_CALL = {"name": None, "arguments": None}  # as an Arrow export writes it
_REASONING = ("reasoning_content", "reasoning", "thinking")
_READ = {*_CALLS, *_REASONING, *FLAGS, *MEDIA, "prefix", "name", "tool_call_id"}
_LIKE_FLAG = re.compile(r"(^|_)(loss|train\w*|weights?|learn\w*|mask\w*|supervis\w*)(_|$)")
_NULLABLE = ("default", "const", "example", "examples", "enum")
"""Keys of a JSON schema that may be null."""


class BadLineError(ValueError):
    """Error in one line, without file and line number."""


@dataclass(slots=True)
class Seen:
    """Notes about one row: the keys that are not used, and the nulls that an Arrow export may have added.

    Attributes:
        reads: names that the chat template reads.
        unused: keys that are not used.
        tools: the key of the tools.
        parameters: names of each tool's parameters.
        nulls_left_out: nulls in schemas of tools, and those of arguments that the tool does not have.
        nulls_kept: other nulls in arguments.
    """

    reads: Reads
    unused: set[str] = field(default_factory=set)
    tools: str = "tools"
    parameters: dict[str, set[str]] = field(default_factory=dict)
    nulls_left_out: int = 0
    nulls_kept: int = 0


@dataclass(slots=True)
class Said:
    """A turn, the flag that says if it is learned (None without one), and the names of its keys in the file."""

    turn: Turn
    learned: bool | None = None
    places: dict[str, str] = field(default_factory=dict)


def said(given: Any, name: str, place: str, seen: Seen) -> Said:
    """Read one turn of the list ``name``."""
    if not isinstance(given, dict):
        raise BadLineError(f"{place}: found {shown(given)}, expected an object with 'role' and 'content'")
    role_key, text_key = _first(given, _ROLE), _first(given, _TEXT)
    called = [key for key in _CALLS if given.get(key) not in NOTHING and given[key] != _NO_CALL]
    if len(called) > 1:
        raise BadLineError(f"{place}: found {' and '.join(map(repr, called))}, expected one of them")
    calls_key = called[0] if called else None
    role, content = given.get(role_key), given.get(text_key)
    if role_key not in given or (text_key not in given and not calls_key):
        raise BadLineError(
            f"{place}: found the keys {list(given)}, expected 'role' and 'content' (or 'from' and 'value')"
        )
    calls = given[calls_key] if calls_key else None
    if role in CALLERS and not calls_key:
        role, calls_key, calls, content = "assistant", text_key, _decoded(content, f"{place}.{text_key}"), None
    role = ROLES.get(role.lower()) if isinstance(role, str) else None
    if role is None:
        raise BadLineError(f"{place}.{role_key}: found {shown(given[role_key])}, expected one of {[*ROLES, *CALLERS]}")
    turn: Turn = {"role": role, "content": _content(content, f"{name}.{text_key}", f"{place}.{text_key}", seen)}
    places = {"content": f"{name}.{text_key}", "tool_calls": f"{name}.{calls_key}"}
    if calls_key:
        if role != "assistant":
            raise BadLineError(f"{place}: found {calls_key!r} in a turn of role {role!r}, expected it of 'assistant'")
        calls = calls if calls_key == "tool_calls" or isinstance(calls, list) else [calls]
        turn["tool_calls"] = _tool_calls(calls, f"{place}.{calls_key}", seen)
    elif content is None:
        remedy = ", or tool_calls beside it" if role == "assistant" else ""
        raise BadLineError(f"{place}.{text_key}: found null, expected a string{remedy}")
    for key in ("name", "tool_call_id", _reasoning_key(given, place)):
        if key and given.get(key) not in (None, ""):
            kept = "reasoning_content" if key in _REASONING else key
            turn[kept], places[kept] = text_of(given[key], f"{place}.{key}"), f"{name}.{key}"
    refuse_media(given, f"{place}.")
    if given.get("prefix"):
        raise BadLineError(
            f"{place}.prefix: found {shown(given['prefix'])}, expected an answer, not only its beginning"
        )
    for key, value in given.items():
        if key in (role_key, text_key) or key in _READ or is_empty(value):
            continue
        if _LIKE_FLAG.search(key) and not isinstance(value, str | dict):
            raise BadLineError(
                f"{place}.{key}: found {shown(value)}, expected one of {list(FLAGS)} to say if a turn is learned"
            )
        if key in seen.reads.keys and key not in (*_ROLE, *_TEXT):
            turn[key], places[key] = value, f"{name}.{key}"
        else:
            seen.unused.add(f"{name}.{key}")
    return Said(turn, _learned(given, role, place), places)


def _first(given: Mapping[str, Any], keys: Iterable[str]) -> str:
    """Return the first key with a value, else the first that is there, else the first."""
    keys = list(keys)
    return next((k for k in keys if given.get(k) is not None), next((k for k in keys if k in given), keys[0]))


def _reasoning_key(given: Turn, place: str) -> str | None:
    found = [key for key in _REASONING if given.get(key) not in (None, "")]
    if any(given[key] != given[found[0]] for key in found):
        raise BadLineError(
            f"{place}: found {' and '.join(map(repr, found))} with different values, expected one of them"
        )
    return found[0] if found else None


def _learned(given: Turn, role: str, place: str) -> bool | None:
    learned = flag_of(given, place)
    if learned and role != "assistant":
        raise BadLineError(
            f"{place}: found a flag ({', '.join(key for key in FLAGS if given.get(key) is not None)}) that asks to "
            f"learn a turn of role {role!r}, expected it of 'assistant': only answers are learned"
        )
    return learned


def flag_of(given: Mapping[str, Any], place: str) -> bool | None:
    """Return False if a flag says that a turn or row is not learned, True if one says that it is; None without."""
    found = {}
    for key in FLAGS:
        value = given.get(key)
        if value is None:
            continue
        if isinstance(value, str | list | dict) or value not in (0, 1):
            raise BadLineError(
                f"{place}.{key}: found {shown(value)}, expected 0 or 1 (false or true): parts of turns and other "
                "weights are not supported"
            )
        found[key] = bool(value) == FLAGS[key]
    if len(set(found.values())) > 1:
        raise BadLineError(f"{place}: found {' and '.join(map(repr, found))} that contradict each other, expected one")
    return next(iter(found.values()), None)


def refuse_media(given: Mapping[str, Any], place: str) -> None:
    """Refuse images, videos and sound: only text is read."""
    for key in MEDIA:
        if given.get(key) and not is_empty(given[key]):
            raise BadLineError(f"{place}{key}: found {shown(given[key])}, expected text only, without {key!r}")


def _content(content: Any, name: str, place: str, seen: Seen) -> str | list[dict[str, str]] | None:
    if isinstance(content, list):
        return _parts(content, name, place, seen)
    return None if content is None else text_of(content, place)


def _parts(parts: list[Any], name: str, place: str, seen: Seen) -> list[dict[str, str]]:
    """Return the parts of a list content; parts other than text are refused."""
    if not parts:
        raise BadLineError(f"{place}: found an empty list, expected a string or at least one text part")
    texts = []
    for index, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != "text" or "text" not in part:
            raise BadLineError(
                f'{place}[{index}]: found {shown(part)}, expected a text part {{"type": "text", "text": "..."}}'
            )
        seen.unused.update(
            f"{name}.{key}" for key, value in part.items() if key not in ("type", "text") and not is_empty(value)
        )
        texts.append("" if part["text"] is None else text_of(part["text"], f"{place}[{index}].text"))
    return [{"type": "text", "text": text} for text in texts]


def _tool_calls(calls: Any, place: str, seen: Seen) -> list[dict[str, Any]]:
    """Return tool calls in the form that servers give to templates, with their arguments as objects."""
    calls = _decoded(calls, place)
    if not isinstance(calls, list) or not calls:
        raise BadLineError(f"{place}: found {shown(calls)}, expected a list of at least one call")
    result = []
    for index, given_call in enumerate(calls):
        where = f"{place}[{index}]"
        call = _decoded(given_call, where)
        function = _function(call, where)
        given = _decoded(function.get("arguments"), f"{where}.arguments")
        if not isinstance(given, dict | None):
            raise BadLineError(f"{where}.arguments: found {shown(given)}, expected an object, or one as JSON")
        arguments = dict(given or {})
        known = seen.parameters.get(function["name"])
        for key in [key for key, value in arguments.items() if value is None]:
            if known is None or key in known:
                seen.nulls_kept += 1
            else:
                seen.nulls_left_out += 1
                del arguments[key]
        function = {key: value for key, value in function.items() if value is not None} | {"arguments": arguments}
        result.append(_wrapped(call, function, ("name", "arguments")))
    return result


def tools_of(tools: Any, place: str, seen: Seen) -> list[dict[str, Any]] | None:
    """Return the function schemas of a conversation in the form that servers give to templates; None if there are none.

    The list, a schema and its parameters may each be JSON text. Nulls in a schema are left out.
    """
    tools = _decoded(tools, place)
    if tools in NOTHING:
        return None
    if not isinstance(tools, list):
        raise BadLineError(f"{place}: found {shown(tools)}, expected a list of function schemas")
    result = []
    for index, given in enumerate(tools):
        where = f"{place}[{index}]"
        tool = _decoded(given, where)
        function = _function(tool, where)
        if "parameters" in function:
            function = function | {"parameters": _decoded(function["parameters"], f"{where}.parameters")}
        function = _without_nulls(function, seen)
        parameters = function.get("parameters")
        properties = parameters.get("properties", parameters) if isinstance(parameters, dict) else None
        if isinstance(properties, dict):
            seen.parameters[function["name"]] = set(properties)
        result.append(_wrapped(tool, function, function.keys() - {"type"}))
    return result


def _function(value: Any, place: str) -> dict[str, Any]:
    """Return the function of a tool or a call, which may be wrapped in an object."""
    function = value.get("function") or value if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadLineError(f"{place}: found {shown(value)}, expected an object with 'function' and its 'name'")
    return function


def _wrapped(value: dict[str, Any], function: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return a tool or a call as ``{"type": "function", "function": {...}}``, with its other keys beside them."""
    if value.get("function"):
        outer = value
    else:
        outer = {key: item for key, item in value.items() if key not in keys}
        function = {key: item for key, item in function.items() if key in keys}
    outer = {key: item for key, item in outer.items() if item is not None}
    return {"type": "function", **outer, "function": function}


def _without_nulls(value: Any, seen: Seen) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item, seen) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {name: item for name, item in value.items() if item is not None or name in _NULLABLE}
    seen.nulls_left_out += len(value) - len(kept)
    return {name: _without_nulls(item, seen) for name, item in kept.items()}


def _decoded(value: Any, place: str) -> Any:
    """Decode JSON in a text, if the value is one; an empty text is None."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, object_pairs_hook=without_doubles) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise BadLineError(f"{place}: found {shown(value)}, expected an object, or one as JSON ({error})") from error


def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object and reject repeated keys, of which json would silently keep the last value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for key in keys if keys.count(key) > 1)
        raise BadLineError(f"found the key {shown(double)} twice in one object, expected it once")
    return values


def text_of(value: Any, name: str) -> str:
    """Return a value that must be text."""
    if not isinstance(value, str):
        raise BadLineError(f"{name}: found {shown(value)}, expected a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON can encode half of a surrogate pair ("\ud83d"): not a character, and refused by every tokenizer.
        raise BadLineError(
            f"{name}: found half of a surrogate pair at character {error.start}, expected text"
        ) from error
    return value


def shown(value: Any) -> str:
    """Describe a JSON value, shortened."""
    text = json.dumps(value)
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    kind = kinds.get(type(value))
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if kind is None else f"{kind} {text}"
