"""Prompts: exactly what a server would give the model to answer."""

import pytest

from data.samples import IGNORE, DataError
from tests.lib.tiny import tiny_tokenizer
from tests.unit.data.chats import END, KINDS, THINKING, conversation, messages, read, templated, turns


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_the_chat_without_its_last_answer_as_the_template_opens_one(kind, tmp_path, rng):
    tokenizer, _ = kind()
    chats = [conversation(rng) for _ in range(40)]
    # Half of them end with a question.
    rows = [{"messages": chat[: len(chat) - index % 2]} for index, chat in enumerate(chats)]
    samples, counts = read(tmp_path, tokenizer, *rows, prompts=True)
    for chat, sample in zip(chats, samples, strict=True):
        served = tokenizer.apply_chat_template(chat[:-1], tokenize=False, add_generation_prompt=True)
        assert sample.input_ids.tolist() == tokenizer(served, add_special_tokens=False).input_ids
        assert len(sample.labels) == len(sample.input_ids) and (sample.labels == IGNORE).all()
    assert (counts.samples, counts.answers, counts.targets, counts.without_target) == (40, 20, 0, 0)
    assert "20 answers at the end of rows left out, as the model writes its own" in counts.summary()


def test_a_template_that_opens_a_thought_for_the_model_does_so_in_a_prompt(tmp_path):
    tokenizer = templated(THINKING.replace("CONTENT", "m['content']"))
    ((sample,), _) = read(tmp_path, tokenizer, turns(("user", "a"), ("assistant", "b")), prompts=True)
    assert tokenizer.decode(sample.input_ids, skip_special_tokens=False).endswith("<|im_start|>assistant\n<think>\n")


def test_rows_that_give_no_prompt_are_dropped_or_refused(tmp_path):
    tokenizer = tiny_tokenizer()
    good = turns(("user", "a"), ("assistant", ""), ("assistant", "b"))
    flagged = turns(("user", "a"), ("assistant", "b"))
    flagged["messages"][1]["weight"] = 0
    rows = [good, flagged, {**turns(("user", "a")), "train": False}, turns(("user", "long " * 40))]
    samples, counts = read(tmp_path, tokenizer, *rows, prompts=True, max_length=60)
    assert [sample.line for sample in samples] == [1]
    assert (counts.answers, counts.without_target, counts.too_long) == (3, 2, 1)
    with pytest.raises(DataError, match=r"a\.jsonl:1: found only assistant turns, expected a turn before them"):
        read(tmp_path, tokenizer, {"messages": messages(("assistant", "b"))}, prompts=True)


@pytest.mark.parametrize(("mode", "kept"), [("keep", 1), ("text", 0), ("refuse", None)])
def test_special_tokens_that_a_question_spells_out(tmp_path, mode, kept):
    tokenizer = tiny_tokenizer()
    row = turns(("user", f"What is {END}?"), ("assistant", f"The {END}."))
    if kept is None:
        with pytest.raises(DataError, match=r"found the special token '<\|im_end\|>' spelled out, expected none"):
            read(tmp_path, tokenizer, row, prompts=True, special_tokens=mode)
        return
    ((sample,), counts) = read(tmp_path, tokenizer, row, prompts=True, special_tokens=mode)
    assert counts.spelled == kept
    assert (sample.input_ids == tokenizer.convert_tokens_to_ids(END)).sum() == 1 + kept
