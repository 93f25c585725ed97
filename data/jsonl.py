"""Parse JSONL lines into conversations, in the three common forms of chat data.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"input": "...", "output": "..."}          "instruction" may be added, or replace "input" (Alpaca)

Each object may also have ``system``, a text, ``tools``, a list of function schemas for the chat template, and values of
the template's variables. A pair may have ``history``, its earlier questions and answers.
``prompt`` and ``completion`` may be two lists of messages, of which the second is learned.

A line of another form is an error: guessing would silently train on half of it. Other files need a field map from the
names above to the files' keys, like ``{"input": "question", "output": "answer"}``. Then only the mapped keys are used,
and every line must have them. Unused keys are counted and reported.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from data.files import LINE_BYTES

Turn = dict[str, Any]
"""Message of a chat template: ``role`` (system, developer, user, assistant or tool), ``content`` (str, list of text
parts, or None with tool calls), and if given ``tool_calls``, ``tool_call_id``, ``name``, ``reasoning_content``, and
other keys that the template reads."""

ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"},
    **{"model": "assistant", "observation": "tool", "function": "tool", "tool_response": "tool"},
}
CALLERS = ("function_call", "tool_call")
"""Roles of turns whose text is a tool call, or a list of them, in JSON."""

FLAGS = {
    **{"weight": True, "train": True, "training": True, "trainable": True, "loss": True, "loss_mask": True},
    **{"loss_weight": True, "sample_weight": True, "masked": False},
}
"""Keys that say if a turn is learned, and the value with which it is."""

NOTHING: tuple[Any, ...] = (None, "", [], "[]", "null")
"""Values of a key for calls or tools if there are none."""

MEDIA = re.compile(r"(image|img|video|audio)s?(_(path|file|url|bytes|base64|b64)s?)?|pixel_values")
_ANSWER = r"(response|answer|output|completion|message|conversation|turn|text|content|reply|replie)s?"
_CHOICE = r"(chosen|rejected|accepted|(non_|dis)?preferred)"
_RANKED = r"(better|worse|winner|loser|win|lose)"
COMPARED = re.compile(rf"{_CHOICE}(_{_ANSWER})?|{_RANKED}_{_ANSWER}|{_ANSWER}_({_CHOICE}|{_RANKED})")
"""Names of answers in preference data."""
_GOOD = r"label|desired|desirable|preferred|chosen|accepted|approved|(\w+_)?correct|good|liked|upvoted|thumbs?_up|valid"
_BAD = (
    r"undesired|undesirable|(non_|dis)preferred|reject(ed)?|incorrect|wrong|bad|disliked?|downvoted?|thumbs?_down|"
    r"invalid|deleted|discard(ed)?|ignored?|skip(ped)?|excluded?"
)
GOOD = re.compile(rf"((is|was|has|kto)_)?({_GOOD})|kto_tag")  # label of TRL, kto_tag of LLaMA-Factory
BAD = re.compile(rf"((is|was|has|to)_)?({_BAD})")
"""Names of switches that say if an answer is a good or a bad one."""
VERDICT = re.compile(rf"{GOOD.pattern}|feedback|verdict|rating|preference|vote|judge?ment|status|quality")
"""Names of texts that may say the same."""
OFF, ON = ("false", "no", "0", "0.0"), ("true", "yes", "1", "1.0")
SWITCHES = (*OFF, *ON)

PAIR = ("instruction", "input", "output")
ANSWERS = ("prompt", "completion")
FIELDS = {"messages": ("messages",), "conversations": ("conversations",), "pair": (*PAIR, "history")}
FIELDS["completion"] = ANSWERS
OPTIONAL_FIELDS = ("system", "tools", "functions", "chat_template_kwargs")
FORMS = "exactly one of 'messages', 'conversations' or 'input' (or 'instruction') with 'output'"
REMEDY = (
    "name the file's keys in the field map (data.fields: {input: question, output: answer}, or "
    "{messages: conversation}), or write mere texts into a file for data.kind text (jq -r .text FILE)"
)

_ROLE, _TEXT, _CALLS = ("role", "from"), ("content", "value"), ("tool_calls", "function_call")
_CALL_KEYS = ("name", "arguments", "function", "id", "type", "index")
_NO_CALL = {"name": None, "arguments": None}  # as an Arrow export writes it
_REASONING = ("reasoning_content", "reasoning", "thinking")
_READ = {*_CALLS, *_REASONING, *FLAGS, "prefix", "name", "tool_call_id"}
_LIKE_FLAG = re.compile(r"(^|_)(loss|train\w*|weights?|learn\w*|mask\w*|supervis\w*)(_|$)")
_PART = re.compile(
    r"(^|_)(\w*mask\w*|all|only|first|last|history|turns?|rounds?|prompts?|inputs?|questions?|users?)(_|$)"
)
_LIKE_SWITCH = re.compile(r"(^|_)(ignor\w*|skip\w*|exclud\w*|targets?|predict\w*|(un)?desir\w*)(_|$)")
_TAG = re.compile(r"\s*[<\[][^<>\[\]]+[>\]]\s*")
_NULLABLE = ("default", "const", "example", "examples", "enum")
"""Keys of a JSON schema that may be null."""


class BadLineError(ValueError):
    """Error in one line, without file and line number."""


@dataclass(frozen=True, slots=True)
class Reads:
    """Names in a chat template: variables, keys that it may look up in a turn, and variables that it reads somewhere
    without having set them, though it may set them elsewhere."""

    variables: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()
    undeclared: frozenset[str] = frozenset()


@dataclass(slots=True)
class Message:
    """A turn, its flag (True: train on it, False: do not, None: no flag), and the names of its keys in the file."""

    turn: Turn
    learned: bool | None = None
    places: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Conversation:
    """Turns to render (up to the last assistant turn, or those of a prompt), schemas of the tools, and what is
    counted."""

    reads: Reads
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)  # the row's values of those that the chat template takes
    unanswered: int = 0  # turns after the last assistant turn
    answers: int = 0  # assistant turns at the end that are left out, if it is a prompt
    unused: set[str] = field(default_factory=set)  # keys that are not used
    tools_key: str = "tools"  # in the file
    parameters: dict[str, set[str]] = field(default_factory=dict)  # names of each tool's parameters
    nulls_left_out: int = 0  # in schemas of tools, and as values of arguments that the tool does not have
    nulls_kept: int = 0  # other nulls in arguments


# ---- rows


def expected_fields(fields: Mapping[str, str] | None) -> str | None:
    """Return an error text with the expected field maps; None if ``fields`` is None or maps exactly one of the three
    forms."""
    if fields is None or ((form := _form(fields)) and {*fields} <= {*FIELDS[form], *OPTIONAL_FIELDS}):
        return None
    known = ("messages", "conversations", *FIELDS["pair"], *OPTIONAL_FIELDS)
    return (
        f"names out of {', '.join(known)}, each mapped to a key of the file: {FORMS}, and optionally 'history' (beside "
        f"'output'), {', '.join(map(repr, OPTIONAL_FIELDS))}"
    )


def conversation_of(
    line: bytes | dict[str, Any], fields: Mapping[str, str] | None, reads: Reads, *, prompt: bool = False
) -> Conversation:
    """Parse a line into a conversation up to its last assistant turn; later turns have no answer.

    Args:
        line: the line, or the values of a row of a table.
        fields: map from field names (``messages``, ``input``, ...) to the file's keys; None if the names are the keys.
        reads: names that the chat template reads.
        prompt: instead keep all turns except assistant turns at the end; no turns if the last answer or the row is
            marked as not to be learned.

    Raises BadLineError for a line of another form; the message names the found and the expected value.
    """
    row = _object(line) if isinstance(line, bytes) else line
    if fields is None:
        values = {name: value for name, value in row.items() if value is not None}
        _refuse_unsupported(values, "")
        _refuse_masks(values)
    else:
        missing = [key for key in fields.values() if key not in row]
        if missing:
            raise BadLineError(f"found the keys {list(row)}, expected {missing} of data.fields among them")
        values = {name: row[key] for name, key in fields.items() if row[key] is not None}
        for key in row.keys() - fields.values():
            if isinstance(row[key], bool) and _is_undesired(_words(key), row[key]):  # a number may be a class
                raise _undesired(key, row[key])
    form = _form(values)
    if form is None:
        nulls = [key for key, value in row.items() if value is None]
        without = f" (without a value: {nulls})" if nulls else ""
        raise BadLineError(f"found the keys {list(row)}{without}, expected {FORMS}; {REMEDY}")
    names = {name: (fields or {}).get(name, name) for name in values}
    found = Conversation(reads)
    _read_tools(values, names, found)
    found.messages = _with_system(_messages(values, names, form, found), values, names)
    # Flags of the whole row; a fraction named "loss" is a measured one.
    flags = {
        key: value
        for key, value in ({} if fields else values).items()
        if key in FLAGS
        and (_is_switch(value) or not isinstance(value, str | dict))
        and not (key == "loss" and isinstance(value, float))
    }
    if _flag_of(flags, "the row") is False:
        found.messages = _not_learned(found.messages)
    used = {*names.values()} if fields else {*FIELDS[form], *OPTIONAL_FIELDS, *flags}
    _read_variables(values, {} if fields else row, names, used, found)
    found.unused.update(key for key, v in row.items() if key not in used | found.variables.keys() and not is_empty(v))
    roles = [message.turn["role"] for message in found.messages]
    if prompt:
        asked = len("".join("a" if role == "assistant" else "-" for role in roles).rstrip("a"))
        if not asked:
            raise BadLineError(
                "found only assistant turns, expected a turn before them that they answer: remove the row"
            )
        marked = [message.learned is False for message in found.messages]
        found.answers, found.messages = len(roles) - asked, found.messages[:asked]
        if all(marked) or (found.answers and marked[-1]):
            found.messages = []
        return found
    if "assistant" not in roles:
        raise BadLineError(f"found the roles {roles}, expected an assistant turn to learn from")
    found.unanswered = roles[::-1].index("assistant")
    found.messages = found.messages[: len(roles) - found.unanswered]
    if len(found.messages) == 1:
        raise BadLineError("found nothing before the last assistant turn, expected a turn that it answers")
    return found


def _object(line: bytes) -> dict[str, Any]:
    if len(line) > LINE_BYTES:
        raise BadLineError(
            f"found more than {LINE_BYTES >> 20} MiB in one line, expected one conversation per line, not a JSON list "
            "of them all"
        )
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=_without_repeated_keys)
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
        of_all = " of one row, not a list of rows: write each row into a line of its own" * isinstance(row, list)
        raise BadLineError(f"found {excerpt(row)}, expected an object{of_all}")
    return row


def _refuse_unsupported(given: Mapping[str, Any], place: str) -> None:
    """Raise BadLineError if a row or turn has keys for media, preference data or undesired answers."""
    for key, value in given.items():
        words = _words(key)
        if MEDIA.fullmatch(words) and value and not is_empty(value):
            raise BadLineError(f"{place}{key}: found {excerpt(value)}, expected text only: remove {key!r}")
        if COMPARED.fullmatch(words) and not is_empty(value) and not _is_switch(value):
            answer = "input: prompt, output: chosen" if isinstance(value, str) else "messages: chosen"
            raise BadLineError(
                f"found the key {place + key!r} of preference data, expected one answer to learn, as learning from "
                f"preferences is not supported: remove the key, or name the answer (data.fields: {{{answer}}})"
            )
        if _is_undesired(words, value):
            raise _undesired(place + key, value)


def _refuse_masks(row: Mapping[str, Any]) -> None:
    """Raise BadLineError for a row's key that says which turns or tokens are learned, like ``train_mask`` or
    ``only_last_turn_loss``."""
    for key, value in row.items():
        words = _words(key)
        one_each = isinstance(value, list) and value != [] and all(isinstance(one, bool | int | float) for one in value)
        masks = one_each or value is False or (_is_switch(value) and _PART.search(words))
        if key not in FLAGS and masks and _LIKE_FLAG.search(words):
            raise BadLineError(
                f"{key}: found {excerpt(value)}, expected no key of a row that says which parts are learned: give the "
                "turns a weight (0 or 1) or set data.loss_on, or rename the key if it means something else"
            )


def _is_undesired(words: str, value: Any) -> bool:
    """Return True if a key with these words and this value says that an answer is a bad one."""
    if isinstance(value, str) and VERDICT.fullmatch(words) and BAD.fullmatch(_words(value)):
        return True
    states = OFF if GOOD.fullmatch(words) else ON if BAD.fullmatch(words) else ()
    return _is_switch(value) and str(value).lower() in states


def _undesired(key: str, value: Any) -> BadLineError:
    return BadLineError(
        f"{key}: found {json.dumps(value)}, which marks an undesired answer, expected only answers to learn: remove "
        "the row, or the key if it means something else"
    )


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool | int | float | str) and str(value).lower() in SWITCHES


@lru_cache(maxsize=4096)
def _words(key: str) -> str:
    """Return a key in lower case with underscores: ``isPreferred`` is ``is_preferred``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[ -]", "_", key.strip()).lower()


def _form(names: Mapping[str, Any]) -> str | None:
    """Return the form of a line by its keys (such as ``messages``, or ``input`` and ``output``); None unless exactly
    one form is complete."""
    forms = [form for form in ("messages", "conversations") if form in names]
    if "output" in names and ("input" in names or "instruction" in names):
        forms.append("pair")
    if not forms and all(isinstance(names.get(name), list) for name in ANSWERS):
        forms.append("completion")
    return forms[0] if len(forms) == 1 else None


def _messages(values: Mapping[str, Any], names: Mapping[str, str], form: str, found: Conversation) -> list[Message]:
    if form == "pair":
        return _pair(values, names)
    if form == "completion":  # only the completion's turns are learned
        prompt, completion = (_message_list(values[name], names[name], found) for name in ANSWERS)
        return [*_not_learned(prompt), *completion]
    return _message_list(values[form], names[form], found)


def _not_learned(messages: Iterable[Message]) -> list[Message]:
    return [Message(message.turn, False, message.places) for message in messages]


def _message_list(turns: Any, name: str, found: Conversation) -> list[Message]:
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        turns = _decoded(turns, repr(name))
    if not isinstance(turns, list) or not turns:
        raise BadLineError(
            f"{name!r}: found {excerpt(turns)}, expected a list of at least a user and an assistant turn"
        )
    messages = list[Message]()
    for index, turn in enumerate(turns):
        message = _message(turn, name, place := f"{name}[{index}]", found)
        before = messages[-1] if messages else None
        # ms-swift writes each call of an assistant's turn as a turn of its own, behind the turn's text.
        if before is not None and before.turn["role"] == "assistant" and turn.get(_first(turn, _ROLE)) in CALLERS:
            if before.learned != message.learned:
                raise BadLineError(f"{place}: found another flag than in the turn before, whose calls it continues")
            before.turn["tool_calls"] = [*before.turn.get("tool_calls", ()), *message.turn["tool_calls"]]
            before.places["tool_calls"] = message.places["tool_calls"]
        else:
            messages.append(message)
    return messages


def _pair(values: Mapping[str, Any], names: Mapping[str, str]) -> list[Message]:
    """Return the turns of the history, the user's turn (non-empty instruction and input, joined with a newline) and the
    answer. Raises BadLineError if the history is not a list of pairs, or if a value is not text."""
    asked = {name: _text(values[name], repr(names[name])) for name in ("instruction", "input") if name in values}
    answer = _text(values["output"], repr(names["output"]))
    history, name, messages = values.get("history"), names.get("history", ""), list[Message]()
    if not is_empty(history):
        if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
            raise BadLineError(f"{name!r}: found {excerpt(history)}, expected a list of pairs [question, answer]")
        messages = [
            Message({"role": role, "content": _text(text, f"{name}[{index}]")}, places={"content": name})
            for index, pair in enumerate(history)
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
    question, place = "\n".join(filter(None, asked.values())), "/".join(names[name] for name in asked)
    return [
        *messages,
        Message({"role": "user", "content": question}, places={"content": place}),
        Message({"role": "assistant", "content": answer}, places={"content": names["output"]}),
    ]


def _with_system(messages: list[Message], values: Mapping[str, Any], names: Mapping[str, str]) -> list[Message]:
    if values.get("system") in (None, ""):
        return messages
    name = names["system"]
    system, first = _text(values["system"], repr(name)), messages[0].turn
    if first["role"] != "system":
        return [Message({"role": "system", "content": system}, places={"content": name}), *messages]
    if first["content"] != system:
        raise BadLineError(f"found two system prompts: a system turn, and another text in {name!r}; expected one")
    return messages


def _read_variables(
    values: Mapping[str, Any], row: Mapping[str, Any], names: Mapping[str, str], used: set[str], found: Conversation
) -> None:
    """Read variables that the chat template takes: keys of the row, and of ``chat_template_kwargs``. Raises
    BadLineError if ``chat_template_kwargs`` is not an object, or has a variable that the row has with another value."""
    taken = found.reads.variables
    found.variables = {key: value for key, value in row.items() if key in taken - used and value is not None}
    more, name = values.get("chat_template_kwargs", {}), names.get("chat_template_kwargs", "")
    if not isinstance(more, dict):
        raise BadLineError(f"{name!r}: found {excerpt(more)}, expected an object with variables of the chat template")
    for key, value in more.items():
        if value is None:
            continue
        if found.variables.get(key, value) != value:
            raise BadLineError(f"found different {key!r} in the row and in {name!r}, expected it once")
        if key in taken or key in found.reads.undeclared:
            found.variables[key] = value
        elif not is_empty(value):
            found.unused.add(f"{name}.{key}")


# ---- turns


def _message(given: Any, name: str, place: str, found: Conversation) -> Message:
    """Read one turn of the list ``name``. Raises BadLineError if its keys or values are not supported, or contradict
    each other."""
    if not isinstance(given, dict):
        raise BadLineError(f"{place}: found {excerpt(given)}, expected an object with 'role' and 'content'")
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
        raise BadLineError(
            f"{place}.{role_key}: found {excerpt(given[role_key])}, expected one of {[*ROLES, *CALLERS]}"
        )
    turn: Turn = {"role": role, "content": _content(content, f"{name}.{text_key}", f"{place}.{text_key}", found)}
    places = {"content": f"{name}.{text_key}", "tool_calls": f"{name}.{calls_key}"}
    if calls_key:
        if role != "assistant":
            raise BadLineError(f"{place}: found {calls_key!r} in a turn of role {role!r}, expected it of 'assistant'")
        calls = calls if calls_key == "tool_calls" or isinstance(calls, list) else [calls]
        turn["tool_calls"] = _tool_calls(calls, f"{place}.{calls_key}", found)
    elif content is None:
        remedy = ", or tool_calls beside it" if role == "assistant" else ""
        raise BadLineError(f"{place}.{text_key}: found null, expected a string{remedy}")
    reasoning = [key for key in _REASONING if given.get(key) not in (None, "")]
    if any(given[key] != given[reasoning[0]] for key in reasoning):
        raise BadLineError(
            f"{place}: found {' and '.join(map(repr, reasoning))} with different values, expected one of them"
        )
    for key in ("name", "tool_call_id", *reasoning[:1]):
        if given.get(key) not in (None, ""):
            kept = "reasoning_content" if key in _REASONING else key
            turn[kept], places[kept] = _text(given[key], f"{place}.{key}"), f"{name}.{key}"
    _refuse_unsupported(given, f"{place}.")
    if reasoning and (text := turn["content"]):
        text = text if isinstance(text, str) else text[0]["text"]
        if (tag := _TAG.match(text)) and text[tag.end() :].startswith(turn["reasoning_content"].strip()):
            raise BadLineError(
                f"{place}: found the reasoning of {reasoning[0]!r} in {text_key!r} too, expected it once: remove it "
                "from one of them"
            )
    if given.get("prefix"):
        raise BadLineError(
            f"{place}.prefix: found {excerpt(given['prefix'])}, which marks the beginning of an answer; expected a "
            "whole answer: remove the key if it is one, else the row"
        )
    for key, value in given.items():
        if key in (role_key, text_key) or key in _READ or is_empty(value):
            continue
        words = _words(key)
        if (_LIKE_FLAG.search(words) and not isinstance(value, str | dict)) or (
            _is_switch(value) and (_LIKE_FLAG.search(words) or _LIKE_SWITCH.search(words))
        ):
            raise BadLineError(
                f"{place}.{key}: found {excerpt(value)}, expected one of {list(FLAGS)} to say if a turn is learned: "
                "rename or remove it"
            )
        if key in found.reads.keys and key not in (*_ROLE, *_TEXT):
            turn[key], places[key] = value, f"{name}.{key}"
        else:
            found.unused.add(f"{name}.{key}")
    learned = _flag_of(given, place)
    if learned and role != "assistant":
        raise BadLineError(
            f"{place}: found a flag ({', '.join(key for key in FLAGS if given.get(key) is not None)}) that marks a "
            f"turn of role {role!r} as learned, expected it only in turns of 'assistant': only answers are learned"
        )
    return Message(turn, learned, places)


def _first(given: Mapping[str, Any], keys: tuple[str, str]) -> str:
    """Choose the key to read: the first with a value, else the first that is present, else ``keys[0]``."""
    return next((k for k in keys if given.get(k) is not None), next((k for k in keys if k in given), keys[0]))


def _flag_of(given: Mapping[str, Any], place: str) -> bool | None:
    """Read the flag of a turn or row: True if it is to be learned, False if not, None without a flag. Raises
    BadLineError if a flag is not 0 or 1, or if flags contradict each other."""
    found = {}
    for key in FLAGS:
        value = given.get(key)
        if value is None:
            continue
        if isinstance(value, str | list | dict) or value not in (0, 1):
            raise BadLineError(
                f"{place}.{key}: found {excerpt(value)}, expected 0 or 1 (false or true): parts of turns and other "
                "weights are not supported"
            )
        found[key] = bool(value) == FLAGS[key]
    if len(set(found.values())) > 1:
        raise BadLineError(f"{place}: found {' and '.join(map(repr, found))} that contradict each other, expected one")
    return next(iter(found.values()), None)


def _content(content: Any, name: str, place: str, found: Conversation) -> str | list[dict[str, str]] | None:
    """Return a turn's content: a text, None, or a list of text parts without their other keys, which are recorded in
    ``found.unused``. Raises BadLineError for other content, and for an empty list."""
    if not isinstance(content, list):
        return None if content is None else _text(content, place)
    if not content:
        raise BadLineError(f"{place}: found an empty list, expected a string or at least one text part")
    parts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or "text" not in part:
            raise BadLineError(
                f'{place}[{index}]: found {excerpt(part)}, expected a text part {{"type": "text", "text": "..."}}'
            )
        _refuse_unsupported(part, f"{place}[{index}].")
        found.unused.update(
            f"{name}.{key}" for key, value in part.items() if key not in ("type", "text") and not is_empty(value)
        )
        text = "" if part["text"] is None else _text(part["text"], f"{place}[{index}].text")
        parts.append({"type": "text", "text": text})
    return parts


# ---- calls and tools


def _tool_calls(calls: Any, place: str, found: Conversation) -> list[dict[str, Any]]:
    """Convert tool calls to the form in which servers pass them to templates, with arguments as objects. Raises
    BadLineError if there is no call, or if a call has no function name or has arguments that are not an object."""
    calls = _decoded(calls, place)
    if not isinstance(calls, list) or not calls:
        raise BadLineError(f"{place}: found {excerpt(calls)}, expected a list of at least one call")
    result = []
    for index, given_call in enumerate(calls):
        where = f"{place}[{index}]"
        call = _decoded(given_call, where)
        function = _function(call, where)
        given = _decoded(function.get("arguments"), f"{where}.arguments")
        others = [key for key, value in (call | function).items() if key not in _CALL_KEYS and not is_empty(value)]
        if function.get("arguments") is None and others:
            raise BadLineError(f"{where}: found the keys {list(function)}, expected the arguments under 'arguments'")
        if not isinstance(given, dict | None):
            raise BadLineError(f"{where}.arguments: found {excerpt(given)}, expected an object, or one as JSON")
        arguments = dict(given or {})
        known = found.parameters.get(function["name"])
        for key in [key for key, value in arguments.items() if value is None]:
            if known is None or key in known:
                found.nulls_kept += 1
            else:
                found.nulls_left_out += 1
                del arguments[key]
        found.nulls_kept += sum(map(_nulls_in, arguments.values()))
        function = {key: value for key, value in function.items() if value is not None} | {"arguments": arguments}
        result.append(_wrapped(call, function, ("name", "arguments")))
    return result


def _nulls_in(value: Any) -> int:
    """Count the nulls inside an object or a list."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(1 if item is None else _nulls_in(item) for item in items)


def _read_tools(values: Mapping[str, Any], names: Mapping[str, str], found: Conversation) -> None:
    """Read function schemas from ``tools``, or the older key ``functions``, in the form in which servers pass them to
    templates.

    The list, a schema and its parameters may each be JSON text. Nulls in a schema are removed. Raises BadLineError if
    both keys have a value, or if the value is not a list of schemas with names.
    """
    given = [name for name in ("tools", "functions") if values.get(name) not in NOTHING]
    if len(given) > 1:
        raise BadLineError(f"found {' and '.join(repr(names[name]) for name in given)}, expected one of them")
    if not given:
        return
    found.tools_key = names[given[0]]
    place = repr(found.tools_key)
    tools = _decoded(values[given[0]], place)
    if tools in NOTHING:
        return
    if not isinstance(tools, list):
        raise BadLineError(f"{place}: found {excerpt(tools)}, expected a list of function schemas")
    found.tools = []
    for index, given_tool in enumerate(tools):
        where = f"{place}[{index}]"
        tool = _decoded(given_tool, where)
        function = _function(tool, where)
        if "parameters" in function:
            function = function | {"parameters": _decoded(function["parameters"], f"{where}.parameters")}
        function = _without_nulls(function, found)
        parameters = function.get("parameters")
        properties = parameters.get("properties", parameters) if isinstance(parameters, dict) else None
        if isinstance(properties, dict):
            found.parameters[function["name"]] = set(properties)
        found.tools.append(_wrapped(tool, function, function.keys() - {"type"}))


def _function(value: Any, place: str) -> dict[str, Any]:
    """Return the function of a tool or call: the object itself, or its entry ``function``. Raises BadLineError if it
    has no name."""
    function = value.get("function") or value if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadLineError(f"{place}: found {excerpt(value)}, expected an object with 'function' and its 'name'")
    return function


def _wrapped(value: dict[str, Any], function: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return a tool or a call as ``{"type": "function", "function": {...}}``, plus the keys of ``value`` that are not
    in ``keys``."""
    outer = value
    if not value.get("function"):
        outer = {key: item for key, item in value.items() if key not in keys}
        function = {key: item for key, item in function.items() if key in keys}
    return {"type": "function"} | {k: v for k, v in outer.items() if v is not None} | {"function": function}


def _without_nulls(value: Any, found: Conversation) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item, found) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {name: item for name, item in value.items() if item is not None or name in _NULLABLE}
    found.nulls_left_out += len(value) - len(kept)
    return {name: _without_nulls(item, found) for name, item in kept.items()}


# ---- values


def is_empty(value: Any) -> bool:
    """Return True for null, empty text, and lists or objects that contain only such values (Arrow's files write absent
    values so)."""
    if isinstance(value, dict):
        return all(map(is_empty, value.values()))
    return all(map(is_empty, value)) if isinstance(value, list) else value is None or value == ""


def _decoded(value: Any, place: str) -> Any:
    """Decode the JSON in a text; empty text becomes None, and other values are returned unchanged. Raises BadLineError,
    which names ``place``, if a text is not JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, object_pairs_hook=_without_repeated_keys) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise BadLineError(f"{place}: found {excerpt(value)}, expected an object, or one as JSON ({error})") from error


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object and reject repeated keys, of which json would silently keep the last value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise BadLineError(f"found the key {excerpt(repeated)} twice in one object, expected it once")
    return values


def _text(value: Any, name: str) -> str:
    """Return a value that must be text. Raises BadLineError for another type, or half of a surrogate pair."""
    if not isinstance(value, str):
        raise BadLineError(f"{name}: found {excerpt(value)}, expected a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON can encode half of a surrogate pair ("\ud83d"): not a character, and refused by every tokenizer.
        raise BadLineError(
            f"{name}: found half of a surrogate pair at character {error.start}, expected text"
        ) from error
    return value


def excerpt(value: Any) -> str:
    """Describe a JSON value, shortened."""
    text = json.dumps(value, default=str)  # a table may have dates
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    kind = kinds.get(type(value))
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if kind is None else f"{kind} {text}"
