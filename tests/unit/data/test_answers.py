"""Answers in what a chat template writes: the author's text to its end-of-turn token, or an error, for any template."""

import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from data.samples import DataError
from tests.unit.data.chats import (
    END,
    ONE_LINE,
    TWO,
    Words,
    answers,
    cut_answers,
    learned_turns,
    messages,
    read,
    templated,
)

EOS = "<|endoftext|>"


@dataclass(frozen=True)
class Composed:
    """A chat template of random parts, and the text of an answer that they make."""

    begin: str
    """In front of a role: a special token, or plain text."""
    end: str
    newline: str
    prompt: str
    """Generation prompt: on request, always, never, or one that opens a thought."""
    behind: str
    """Behind the conversation: nothing, an EOS, or the header of the next turn."""
    strip: bool
    thought: str
    """Reasoning: written, of the last answer only, or left out."""
    inline: str
    """Thought in a content: as it is, divided and written again, left out of earlier answers, or of all."""
    calls: str
    """Calls: as JSON, by names only, or left out."""
    change: str
    """A change of the content that the author did not make."""

    def source(self) -> str:
        """Write the template in Jinja."""
        header = f"{{{{ '{self.begin}' ~ m.role ~ ':\\n' }}}}"
        prompt = f"{{{{ '{self.begin}assistant:\\n{'<think>' if self.prompt == 'opens' else ''}' }}}}"
        calls = {
            "json": "{{ '<call>' ~ c.function.name ~ ' ' ~ (c.function.arguments | tojson) ~ '</call>' }}",
            "names": "{{ '<call>' ~ c.function.name ~ '</call>' }}",
            "none": "",
        }[self.calls]
        left_out = {"all": "true", "earlier": "not loop.last"}.get(self.inline)
        divide = "{% set r = c.split('</think>')[0].split('<think>')[-1] %}{% set c = c.split('</think>')[-1] %}"
        if left_out:
            divide = f"{{% if {left_out} %}}{{% set c = c.split('</think>')[-1] %}}{{% endif %}}"
        shown = {"written": "true", "last": "loop.last", "none": "false"}[self.thought]
        return (
            "{% for m in messages %}{% set c = m.content or '' %}{% set r = m.reasoning_content or '' %}"
            + ("{% set c = c | trim %}" if self.strip else "")
            + "{% if m.role == 'assistant' %}"
            + (f"{{% set c = {self.change} %}}" if self.change else "")
            + ("" if self.inline == "kept" else f"{{% if '</think>' in c %}}{divide}{{% endif %}}")
            + header
            + f"{{% if r and ({'true' if self.inline == 'divided' else 'false'} or {shown}) %}}"
            + "{{ '<think>\\n' ~ r ~ '\\n</think>\\n' }}{% endif %}{{ c }}"
            + f"{{% for c in m.tool_calls or [] %}}{calls}{{% endfor %}}{{% else %}}{header}{{{{ c }}}}{{% endif %}}"
            + f"{{{{ '{self.end}{self.newline}' }}}}{{% endfor %}}"
            + {"eos": f"{{% if not add_generation_prompt %}}{{{{ '{EOS}' }}}}{{% endif %}}", "none": ""}[self.behind]
            + {
                "asked": f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}",
                "opens": f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}",
                "always": prompt,
            }[self.prompt]
        )


def composed(rng: random.Random, *, benign: bool) -> Composed:
    """Draw a template; a benign one changes no answer."""
    change = rng.choice(["c | upper", "c.replace('w', 'v')", "c ~ c", "c[1:]", "c.split(' ')[0]", "'# ' ~ c | trim"])
    return Composed(
        begin=rng.choice(["<|im_start|>", "### ", "<|h|>", "\\n"]),
        end=rng.choice([END, "<|e|>"]),
        newline=rng.choice(["", "\\n", "\\n\\n"]),
        prompt=rng.choice(["asked", "always", "opens"]),
        behind=rng.choice(["none", "eos"]),
        strip=rng.random() < 0.5,
        thought="written" if benign else rng.choice(["written", "last", "last", "none"]),
        inline=rng.choice(["kept", "divided"] if benign else ["kept", "divided", "earlier", "earlier", "all"]),
        calls="json" if benign else rng.choice(["json"] * 4 + ["names", "none"]),
        change="" if benign or rng.random() < 0.85 else change,
    )


def drawn(rng: random.Random, word: Words) -> list[dict[str, Any]]:
    """Draw a conversation that ends with an answer: plain, with reasoning of both kinds, and with tools."""
    said = messages(("system", word("s"))) if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 3)):
        said += messages(("user", word("u")))
        for _ in range(rng.choice([0, 0, 1, 2])):
            call = {"name": word("n"), "arguments": {word("k"): rng.choice([f'{word("v")} "é"', [7100 + word.count]])}}
            said.append(
                {"role": "assistant", "content": rng.choice(["", word("a")]), "tool_calls": [{"function": call}]}
            )
            said += messages(("tool", word("t")))
        said.append({"role": "assistant", "content": rng.choice(["", " "]) + f"{word('a')} {word('a')}"})
    for turn in said:
        if turn["role"] == "assistant" and rng.random() < 0.3:
            turn["reasoning_content"] = f"{word('r')}\n{word('r')}"
        elif turn["role"] == "assistant" and turn["content"] and rng.random() < 0.3:
            turn["content"] = rng.choice(["<think>", ""]) + f"{word('i')}</think>{turn['content']}"
    return said


def expected(template: Composed, turn: dict[str, Any], *, last: bool) -> str:
    """Return what a benign template writes for an answer, without whitespace."""
    content, thought = turn["content"], turn.get("reasoning_content", "")
    if template.inline == "divided" and "</think>" in content:
        thought, content = content.split("</think>")[0].split("<think>")[-1], content.split("</think>")[1]
    text = (f"<think>{thought}</think>" if thought else "") + content
    for call in turn.get("tool_calls", ()):
        ((key, value),) = call["function"]["arguments"].items()
        value = str(value) if isinstance(value, list) else '"' + value.replace('"', '\\"') + '"'
        text += f'<call>{call["function"]["name"]} {{"{key}": {value}}}</call>'
    if template.prompt == "opens":
        text = text.removeprefix("<think>")  # the model's input
    goes_on = template.end != END and last and template.behind == "eos"
    return squeezed(text + template.end + (EOS if goes_on else ""))


def squeezed(text: str) -> str:
    """Remove whitespace, which templates strip and add."""
    return "".join(text.split())


def tokenizer_of(template: Composed) -> PreTrainedTokenizerFast:
    """A tokenizer with the template, whose generation stops at two tokens, but not at ``<|e|>``."""
    tokenizer = templated(template.source())
    tokenizer.add_tokens([AddedToken(token, special=True) for token in ("<|e|>", "<|h|>")], special_tokens=True)
    tokenizer.eos_token = EOS if template.end == "<|e|>" else END
    return tokenizer


@pytest.mark.parametrize("loss_on", ["last", "all"])
def test_benign_templates_are_learned_as_they_write(loss_on, tmp_path, rng):
    for _ in range(40):
        template = composed(rng, benign=True)
        said = drawn(rng, Words())
        tokenizer = tokenizer_of(template)
        (sample,), counts = read(tmp_path, tokenizer, {"messages": said}, loss_on=loss_on)
        turns = answers(said)
        wanted = [expected(template, turn, last=turn is turns[-1]) for turn in turns]
        found = [squeezed(run) for run in learned_turns(sample, tokenizer)]
        assert found == (wanted if loss_on == "all" else wanted[-1:]), template
        assert counts.cut == counts.without_end == 0
        assert counts.unstopped == sum(run.endswith("<|e|>") for run in found)


@pytest.mark.parametrize("loss_on", ["last", "all"])
def test_any_template_is_learned_whole_or_refused(loss_on, tmp_path, rng):
    """All words of an answer, in order and unchanged, or of an earlier one all but its thinking, which is counted."""
    outcomes = Counter()
    for _ in range(100):
        template = composed(rng, benign=False)
        said = drawn(rng, Words())
        tokenizer = tokenizer_of(template)
        try:
            (sample,), counts = read(tmp_path, tokenizer, {"messages": said}, loss_on=loss_on)
        except DataError as error:
            assert ONE_LINE.fullmatch(str(error)), error
            outcomes["refused"] += 1
            continue
        runs = learned_turns(sample, tokenizer)
        cut = cut_answers(answers(said) if loss_on == "all" else answers(said)[-1:], runs, tokenizer)
        assert "assistant:" not in "".join(runs) and counts.cut == cut, template
        outcomes["cut" if cut else "whole"] += 1
    assert all(outcomes[kind] for kind in ("refused", "whole", *(["cut"] if loss_on == "all" else []))), outcomes


PHI = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|e|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}"
)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_an_answer_ends_where_generation_stops(name, tmp_path):
    """The EOS behind a conversation is learned only if generation does not stop at the token in front of it."""
    tokenizer = templated(PHI)
    tokenizer.add_tokens([AddedToken("<|e|>", special=True, rstrip=True)], special_tokens=True)
    tokenizer.name_or_path = str(tmp_path)
    for stops, end, unstopped in ((None, f"<|e|>\n{END}", 1), ([tokenizer.vocab["<|e|>"], 10**9], "<|e|>", 0)):
        if stops:
            (tmp_path / name).write_text(json.dumps({"eos_token_id": stops}))
        (sample,), counts = read(tmp_path, tokenizer, {"messages": TWO}, loss_on="all")
        first, second = (run.replace("<|e|>\n", "<|e|>") for run in learned_turns(sample, tokenizer))
        assert (first, second) == ("b<|e|>", "d" + end.replace("\n", ""))
        assert counts.unstopped == unstopped
        assert ("generation does not stop (generation_config.json)" in counts.summary()) == bool(unstopped)
    (tmp_path / name).write_text("[")
    with pytest.raises(DataError, match=rf"{name}: expected a JSON object"):
        read(tmp_path, tokenizer, {"messages": TWO})


def test_an_end_that_only_the_last_answer_has_is_learned_there_alone(tmp_path):
    """As gpt-oss writes it: generation never ends with the token behind an earlier answer."""
    tokenizer = templated(
        PHI.replace("'<|e|>\n'", "(eos_token if loop.last else '<|e|>')").partition("{% else")[0] + "{% endif %}"
    )
    tokenizer.add_tokens([AddedToken("<|e|>", special=True)], special_tokens=True)
    (sample,), counts = read(tmp_path, tokenizer, {"messages": TWO}, loss_on="all")
    assert learned_turns(sample, tokenizer) == ["b", f"d{END}"] and counts.without_end == 1


NO_END = PHI.replace("'<|e|>\n'", "'\n'")
ROLES = NO_END.replace("'<|im_start|>' ~ m.role ~ '\n'", "'<|' ~ m.role ~ '|>'").replace(
    "'<|im_start|>assistant\n'", "'<|assistant|>'"
)


@pytest.mark.parametrize(
    "template",
    [
        NO_END.replace("eos_token", "'<|im_start|>user'"),
        NO_END.replace("{% else %}{{ eos_token }}", "{% endif %}{% if true %}{{ '<|im_start|>assistant\n' }}"),
        ROLES.replace("eos_token", "'<|assistant|>'"),
        NO_END.replace("eos_token", "'## user: '"),
    ],
)
def test_the_header_of_the_next_turn_ends_no_answer(template, tmp_path):
    tokenizer = templated(template)
    tokenizer.add_tokens([AddedToken("<|assistant|>", special=True)], special_tokens=True)
    with pytest.raises(DataError, match=r"found .* after turn 1 \(assistant\), and no special token that ends it"):
        read(tmp_path, tokenizer, {"messages": messages(("user", "a"), ("assistant", "b"))})
