"""Fields of rows and turns: each is honoured, or refused by name, or counted by name."""

import json
from collections import Counter
from typing import Any

import pytest

from data.samples import DataError
from tests.lib.tiny import CHAT_TEMPLATE, tiny_tokenizer
from tests.unit.data.chats import END, GOOD, TWO, learned_turns, read, templated, turns, whole, with_flags
from tests.unit.data.marked import Maker, outcome
from tests.unit.data.test_template import QWEN

ASKED, ANSWER = TWO[:2]


def learned_of(tmp_path, *rows: object, **options: Any) -> list[list[str]]:
    tokenizer = tiny_tokenizer()
    return [learned_turns(sample, tokenizer) for sample in read(tmp_path, tokenizer, *rows, **options)[0]]


@pytest.mark.parametrize("flag", ["weight", "train", "training", "trainable", "loss", "loss_mask", "loss_weight"])
def test_flags_say_which_answers_are_learned(flag, tmp_path):
    off, on, user = {flag: False}, {flag: 1}, {flag: 0.0}
    rows = [with_flags(user, one, user, other) for one in (off, on, {}) for other in (off, on, {flag: None})]
    every = learned_of(tmp_path, *rows, loss_on="all")
    first, last = "b" + END, "d" + END
    assert every == [[last], [last], [first], [first, last], [first, last], [first], [first, last], [first, last]]
    _, counts = read(tmp_path, tiny_tokenizer(), *rows, loss_on="all")
    assert (counts.without_target, counts.unlearned) == (1, 0)
    # The last answer is the last one, also if another one has the weight.
    assert learned_of(tmp_path, *rows) == [[last]] * 6
    _, counts = read(tmp_path, tiny_tokenizer(), *rows)
    assert (counts.without_target, counts.unlearned) == (3, 3)
    assert "3 turns not learned whose weight is 1 (data.loss_on)" in counts.summary() and not list(counts.notes())


NAMES = [
    *("train", "trainable", "train_on_turn", "do_train", "is_trainable", "in_training", "loss", "use_loss", "has_loss"),
    *("loss_mask", "compute_loss", "mask", "masked", "is_masked", "mask_loss", "weight", "weights", "turn_weight"),
    *("learn", "learned", "supervised", "is_target", "target", "predict", "to_predict", "desired", "is_desired"),
    *("ignore", "ignored", "ignore_loss", "skip", "skip_turn", "exclude", "excluded", "undesirable", "label"),
    *("kto_tag", "chosen", "rejected", "sample_weight", "undesired", "desirable"),
]


@pytest.mark.parametrize("value", [False, True, 0, 1, 0.0, "false", "True"])
def test_a_flag_of_any_name_is_honored_or_refused(value, tmp_path):
    """Or, of a name and value that may mean something else, counted."""
    asked, counted = TWO[:2], set()
    for name in NAMES:
        row = {"messages": [*asked, TWO[2], TWO[3] | {name: value}]}
        try:
            (sample,), counts = read(tmp_path, tiny_tokenizer(), row, loss_on="all")
        except DataError as error:
            assert f"messages[3].{name}" in str(error), error
            continue
        counted |= counts.unused.keys()
        runs = learned_turns(sample, tiny_tokenizer())
        assert len(runs) == (1 if (name == "masked") == bool(value) and not counts.unused else 2), name
    # Counted is only what says that the answer is a good one.
    on = value is True or value == "True" or value == 1
    assert counted == {f"messages.{name}" for name in (("label", "kto_tag", "chosen") if on else ("rejected",))}


GOOD_NAMES = "label kto_tag is_preferred preferred isPreferred chosen is_chosen accepted desirable correct is_correct"
GOOD_NAMES += " isCorrect symbolic_correct thumbs_up good approved liked Label valid"
BAD_NAMES = (
    "rejected is_rejected undesirable dispreferred incorrect thumbs_down bad disliked invalid deleted ignore skip"
)
NO, YES = [False, 0, 0.0, "0", "0.0", "false", "False", "no"], [True, 1, 1.0, "1", "true", "True", "yes"]
UNDESIRED = [(name, value) for name in GOOD_NAMES.split() for value in NO]
UNDESIRED += [(name, value) for name in BAD_NAMES.split() for value in YES]
UNDESIRED += [(name, value) for name in ("label", "feedback", "rating") for value in ("rejected", "Thumbs down", "bad")]
DESIRED = [(name, value) for name in GOOD_NAMES.split() for value in YES]
DESIRED += [(name, value) for name in BAD_NAMES.split() for value in NO]
DESIRED += [("label", "positive"), ("label", 4), ("label", -1), ("rating", 0), ("score", 0.0), ("reward", -1.5)]
DESIRED += [("chosen_score", 0.0), ("rejected_score", 1), ("chosen_model", "m"), ("quality", "low"), ("winner", "x")]


@pytest.mark.parametrize("form", ["row", "completion", "turn"])
def test_an_undesired_answer_is_refused_by_any_name(form, tmp_path):
    """As exports of preference data write it: booleans, numbers of CSV and Arrow, and words."""

    def row(key: str, value: object) -> dict[str, Any]:
        if form == "turn":
            return {"messages": [ASKED, ANSWER | {key: value}]}
        chat = {"messages": [ASKED, ANSWER]} if form == "row" else {"prompt": [ASKED], "completion": [ANSWER]}
        return chat | {key: value}

    place = "messages[1]." if form == "turn" else ""
    for key, value in UNDESIRED:
        with pytest.raises(DataError) as caught:
            read(tmp_path, tiny_tokenizer(), row(key, value))
        assert f":1: {place}{key}: found {json.dumps(value)}, which marks an undesired" in str(caught.value), key
    if form == "turn":  # there some of them may be flags of the turn
        return
    counts = read(tmp_path, tiny_tokenizer(), *(row(*one) for one in DESIRED))[1]
    assert counts.samples == len(DESIRED) and counts.unused == Counter(key for key, _ in DESIRED)


@pytest.mark.parametrize("key", ["chosen", "rejectedResponse", "dispreferred", "preferred_output", "answer_rejected"])
@pytest.mark.parametrize("value", ["x", [ANSWER], {"role": "assistant", "content": "x"}])
def test_answers_to_compare_are_refused_by_any_name(key, value, tmp_path):
    named = "input: prompt, output" if value == "x" else "messages"
    with pytest.raises(DataError, match=f"found the key '{key}' of preference data.*fields: {{{named}: chosen}}"):
        read(tmp_path, tiny_tokenizer(), GOOD | {key: value})


MASKS = {"weights": [0, 1], "mask": [0, 0, 0, 1], "trainMask": [False, True], "loss_masks": [0.0, 1.0]}
MASKS |= {"only_last_turn_loss": True, "onlyLastTurnLoss": 1, "train_on_last_turn": "true", "train_on_inputs": True}
MASKS |= {"train_turns": [1], "mask_history": True, "learn_all": False, "compute_loss": False}


@pytest.mark.parametrize("key", MASKS)
def test_masks_of_rows_are_refused(key, tmp_path):
    """They say which turns are learned; unused, each answer would be."""
    with pytest.raises(DataError, match=rf":1: {key}: found a .*, expected no key of a row that says which parts"):
        read(tmp_path, tiny_tokenizer(), {"messages": TWO, key: MASKS[key]}, loss_on="all")
    others = {"weights": [], "mask": "User", "learning_goals": ["a"], "is_train": True, "training_steps": 7}
    counts = read(tmp_path, tiny_tokenizer(), {"messages": TWO, **others}, loss_on="all")[1]
    assert counts.unused.keys() == others.keys() - {"weights"}


def test_how_an_answer_ended_is_counted(tmp_path):
    """These keys say something of the answer, and nothing of what is learned of it."""
    ended = {"finish_reason": "length", "truncated": True, "end_turn": False}
    row = {"messages": [ASKED, ANSWER | ended], **ended}
    counts = read(tmp_path, tiny_tokenizer(), row)[1]
    assert counts.samples == 1 and counts.unused.keys() == {*ended, *(f"messages.{key}" for key in ended)}


def test_an_undesired_answer_is_refused_with_a_field_map(tmp_path):
    """If it is marked by a boolean: a number may be a class."""
    row, names = {"prompt": "a", "completion": "b"}, {"input": "prompt", "output": "completion"}
    with pytest.raises(DataError, match="label: found false, which marks an undesired answer"):
        read(tmp_path, tiny_tokenizer(), row | {"label": False}, fields=names)
    counts = read(tmp_path, tiny_tokenizer(), row | {"label": 0}, row | {"label": True}, fields=names)[1]
    assert counts.samples == 2 and counts.unused == {"label": 2}


def test_keys_that_nothing_reads_are_counted(tmp_path):
    rows = [GOOD | {"system_hint": "Be brief.", "id": 7, "source": None}, GOOD | {"system_hint": "x"}, GOOD]
    rows.append(turns(("user", "a"), ("assistant", "b")) | {"tags": []})
    rows[-1]["messages"][0]["mood"] = "good"
    _, counts = read(tmp_path, tiny_tokenizer(), *rows)
    (note,) = counts.notes()
    said = '2 rows have "system_hint", 1 "id", 1 "messages.mood", which are not used'
    assert note == f"{tmp_path / 'a.jsonl'}: {said}"
    (note,) = read(tmp_path, tiny_tokenizer(), GOOD | {"hint": "x"})[1].notes()
    assert note.endswith('a.jsonl: 1 row has "hint", which is not used')
    many = GOOD | {f"key{index:02}": index for index in range(1, 24)}
    (note,) = read(tmp_path, tiny_tokenizer(), many)[1].notes()
    assert note.endswith('1 "key20" and 3 more keys, which are not used') and '1 row has "key01", 1 "key02"' in note
    # Of a field map too.
    (note,) = read(tmp_path, tiny_tokenizer(), {"q": "a", "a": "b", "c": "d"}, fields={"input": "q", "output": "a"})[
        1
    ].notes()
    assert note.endswith('1 row has "c", which is not used')


def test_where_no_sample_is_left_the_keys_that_nothing_reads_are_named(tmp_path):
    """They may be what should be learned, under another name."""
    row = {"messages": [ASKED, {"role": "assistant", "content": "", "toolCalls": [{"name": "f"}]}]}
    with pytest.raises(
        DataError, match=r'no sample is left .*; \S+a\.jsonl: 1 row has "messages\.toolCalls", which is'
    ):
        read(tmp_path, tiny_tokenizer(), row)


def test_history_becomes_turns(tmp_path):
    row = {"instruction": "c", "input": "", "output": "d", "history": [["a", "b"]]}
    plain = {"messages": TWO}
    tokenizer = tiny_tokenizer()
    for loss_on in ("last", "all"):
        one, other = read(tmp_path, tokenizer, row, plain, loss_on=loss_on)[0]
        assert whole(one, tokenizer) == whole(other, tokenizer)
        assert learned_turns(one, tokenizer) == learned_turns(other, tokenizer)


def test_the_template_is_given_what_it_reads(tmp_path):
    template = (
        "{% if thinking is defined %}{{ thinking }}{% endif %}{% for d in documents or [] %}{{ d.title }}{% endfor %}"
        "{% set mode = 'x' %}{{ mode }}{% for m in messages %}{{ m.mood or '' }}{% endfor %}"
        + tiny_tokenizer().chat_template
    )
    row = {"messages": [ASKED | {"mood": "glad"}, ANSWER], "documents": [{"title": "T", "url": "U"}], "mode": "y"}
    row |= {"chat_template_kwargs": {"thinking": False, "other": 1, "documents": None}, "add_generation_prompt": True}
    tokenizer = templated(template)
    (sample,), counts = read(tmp_path, tokenizer, row)
    assert whole(sample, tokenizer).startswith("FalseTxglad<|im_start|>user\na")
    place = tmp_path / "a.jsonl"
    assert list(counts.notes()) == [
        f'{place}: 1 row has "add_generation_prompt", 1 "chat_template_kwargs.other", 1 "mode", which are not used',
        f'{place}: 1 row has "documents.url", of which the chat template leaves out at least a part',
        f'{place}: 1 row has "documents", 1 "thinking", which the chat template takes as variables',
    ]
    _, counts = read(tmp_path, tiny_tokenizer(), row)
    assert '"documents", 1 "messages.mood"' in next(counts.notes())


def test_a_parameter_of_a_macro_is_no_variable(tmp_path):
    macro = "{% macro shown(content) %}{% if content is defined %}{{ content }}{% endif %}{% endmacro %}"
    sets = "{% for m in messages %}{% if loop.first %}{% set content = shown(m.content) %}{% endif %}{% endfor %}"
    template = macro + sets + "{% if content %}{% endif %}" + tiny_tokenizer().chat_template
    counts = read(tmp_path, templated(template), {"messages": TWO, "chat_template_kwargs": {"content": 7}})[1]
    assert counts.unused == {"chat_template_kwargs.content": 1} and not counts.taken


@pytest.mark.parametrize("given", [True, False])
def test_a_variable_that_a_template_sets_in_one_branch_is_taken_from_its_arguments(tmp_path, given):
    """As SmolLM3 reads custom_instructions; a key of the row of this name is no argument of the template."""
    sets = "{% if not messages %}{% set persona = 'x' %}{% endif %}{% if persona %}{{ persona }}{% endif %}"
    row = {"chat_template_kwargs": {"persona": "a pirate"}} if given else {"persona": "a pirate"}
    (sample,), counts = read(tmp_path, templated(sets + tiny_tokenizer().chat_template), {"messages": TWO, **row})
    assert ("a pirate" in tiny_tokenizer().decode(sample.input_ids)) == given and bool(counts.unused) != given


def test_a_short_text_that_is_left_out_is_not_found_in_others(tmp_path):
    """Each value takes up an occurrence of the text; a content that the template must write is found in its place."""
    row = turns(("user", "ok"), ("assistant", "look: ok"), ("user", "c"), ("assistant", "d"))
    row["messages"][1]["reasoning_content"] = "ok"
    tokenizer = templated(QWEN)
    (note,) = read(tmp_path, tokenizer, row)[1].notes()
    assert note.endswith(
        '1 row has "messages.reasoning_content", of which the chat template leaves out at least a part'
    )
    row["messages"][1] |= {"content": "ok", "reasoning_content": "", "tool_calls": [{"name": "f"}]}
    without = QWEN.replace("{{- content }}", "{{- '' if m.tool_calls else content }}")
    (note,) = read(tmp_path, templated(without), row)[1].notes()
    assert '1 row has "messages.content", of which' in note


def test_a_short_turn_that_is_left_out_is_refused_where_marks_are(tmp_path):
    """A template that asks for a name among the tools refuses marks, so texts are counted."""
    asks = "{% if messages[1].content != 'ok' %}{{ raise_exception('who?') }}{% endif %}"
    asks += CHAT_TEMPLATE.replace("in messages", "in messages[:1] + messages[2:]")
    row = turns(("user", "a"), ("user", "ok"), ("user", "look: ok"), ("assistant", "ok"))
    with pytest.raises(DataError, match="found turn 1's 'content' 'ok', which the chat template does not write"):
        read(tmp_path, templated(asks), row)


def test_a_tag_that_the_template_would_repeat_is_refused(tmp_path):
    """As in Hermes' calls of functions, where results are in tags that Qwen's template writes, too."""
    wraps = templated("{% set tag = '<tool_response>' %}" + CHAT_TEMPLATE.replace("m['content']", "TEXT", 1))
    wraps.chat_template = wraps.chat_template.replace(
        "TEXT", "(tag + '\n' if m['role'] == 'tool' else '')+m['content']"
    )
    row = turns(("user", "<tool_response>"), ("tool", "\n<tool_response>\n3\n</tool_response>"), ("assistant", "b"))
    (sample,), _ = read(tmp_path, tiny_tokenizer(), row)
    with pytest.raises(DataError, match="found '<tool_response>' at the beginning of a text of turn 1, which"):
        read(tmp_path, wraps, row)
    assert whole(sample, tiny_tokenizer()).count("<tool_response>") == 2


def test_turns_behind_the_last_answer_are_counted(tmp_path):
    row = turns(("user", "a"), ("assistant", "b"), ("user", "c"), ("user", "d"))
    _, counts = read(tmp_path, tiny_tokenizer(), row)
    assert counts.unanswered == 2 and "2 turns behind the last learned answer left out" in counts.summary()


# Reads variables and keys of turns, writes some of them, and cuts thoughts of earlier turns out, as gpt-oss's and
# Qwen's templates do.
PICKY = (
    "{% if documents %}{% for d in documents %}{{ d.title if d is mapping else d }}{% endfor %}{% endif %}"
    "{% if reasoning_effort is defined %}{{ 'Reasoning: ' ~ reasoning_effort }}{% endif %}"
    "{% for m in messages %}{% set thought = m.thinking if loop.last else '' %}{{ m.recipient or '' }}"
    "{% if m.mask or m.index or m.type %}{% endif %}{{ '<|im_start|>' + m.role + '\n' + thought|default('', true) }}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("template", [tiny_tokenizer().chat_template, QWEN, PICKY], ids=["plain", "Qwen", "picky"])
def test_no_value_of_a_row_is_passed_over(template, tmp_path, rng):
    """Each value of a random row is in the text, or its key is counted by name, or the row is refused or dropped."""
    tokenizer, outcomes = templated(template), Counter[str]()
    for _ in range(200):
        outcomes[outcome(tmp_path, tokenizer, Maker(rng).row(), rng.choice(["last", "all"]))] += 1
    assert len(outcomes) == 4 and min(outcomes.values()) > 3, outcomes


def test_nulls_of_arrow_are_left_out_or_counted(tmp_path):
    """A union of all arguments and of all schemas has a null for each key that other rows have."""
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "unit": None}}}
    call = {"name": "f", "arguments": {"city": None, "unit": None}}
    row = {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [tool]}
    tokenizer = templated(QWEN)
    (sample,), counts = read(tmp_path, tokenizer, row)
    assert (counts.nulls_left_out, counts.nulls_kept) == (2, 1)
    text = whole(sample, tokenizer)
    assert '"arguments": {"city": null}}' in text and "unit" not in text
    assert "1 nulls kept in arguments of calls" in counts.summary()


def test_reasoning_has_the_name_that_the_template_reads(tmp_path):
    tokenizer = templated(CHAT_TEMPLATE.replace("m['content']", "(m.reasoning or '')+m['content']"))
    rows = [{"messages": [ASKED, ANSWER | {key: "why? "}]} for key in ("reasoning", "reasoning_content", "thinking")]
    for sample in read(tmp_path, tokenizer, *rows)[0]:
        assert learned_turns(sample, tokenizer) == [f"why? b{END}"]


def test_calls_behind_an_assistants_turn_are_part_of_it(tmp_path):
    """As in ms-swift's files, where each call is a turn: the answer has one end."""
    call = '{"name": "weather", "arguments": {"city": "%s"}}'
    row = turns(("user", "a"), ("assistant", "I look"), ("tool_call", call % "Bonn"), ("tool_call", call % "Rome"))
    (sample,), _ = read(tmp_path, templated(QWEN), row)
    learned = templated(QWEN).decode([label for label in sample.labels if label >= 0])
    assert "I look" in learned and "Bonn" in learned and "Rome" in learned and learned.count("<|im_end|>") == 1
    row["messages"][3]["weight"] = 0
    with pytest.raises(DataError, match="found another flag than in the turn before, whose calls it continues"):
        read(tmp_path, templated(QWEN), row)


def test_nulls_inside_arguments_are_counted(tmp_path):
    arguments = {"filter": {"city": "Bonn", "amount": None, "tags": [None]}}
    row = turns(("user", "a"))
    row["messages"].append({"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": arguments}]})
    assert read(tmp_path, templated(QWEN), row)[1].nulls_kept == 2


def test_a_tag_that_the_template_writes_too_is_refused_in_answers(tmp_path):
    row = turns(("user", "a"), ("assistant", "b"))
    row["messages"][1]["reasoning_content"] = "<think>\nw\n</think>"
    with pytest.raises(DataError, match="found '<think>' at the beginning of a text of turn 1, which the chat"):
        read(tmp_path, templated(QWEN), row)
