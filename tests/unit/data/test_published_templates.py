"""Published chat templates: answers are learned whole, or the line is refused.

The packages trl and axolotl ship the templates; `make test-templates` installs them beside, without what they need.
"""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from data.samples import DataError
from tests.unit.data.chats import ONE_LINE, WORD, Words, answers, cut_answers, learned_turns, messages, read, templated
from tests.unit.data.marked import Maker, outcome


def _templates() -> dict[str, Path]:
    found = {}
    for package, folder in (("axolotl", "utils/chat_templates/templates"), ("trl", "chat_templates")):
        spec = find_spec(package)
        for directory in (spec.submodule_search_locations or []) if spec else []:
            found |= {f"{package}/{path.stem}": path for path in sorted(Path(directory, folder).glob("*.jinja"))}
    return {name: path for name, path in found.items() if not name.endswith("_training")}


TEMPLATES = _templates()
TOKENS = re.compile(r"<[|\uff5c][^<>{}'\"\s|\uff5c]+[|\uff5c]>|</?s>|<(?:start|end)_of_turn>|<turn\|>|\[/?[A-Z_]{4,}\]")
ENDS = ["<|return|>", "<turn|>", "<|im_end|>", "<|eot_id|>", "<|END_OF_TURN_TOKEN|>"]
ENDS += ["<\uff5cend\u2581of\u2581sentence\uff5c>", "<|eot|>", "<end_of_turn>", "<|end|>", "<|endoftext|>"]

# What is learned. Of the others, a part would not be in the text.
REFUSED_INLINE = {"axolotl/deepseek_v3", "axolotl/exaone4", "trl/deepseek_r1_distill", "trl/deepseekv3"}
"""They remove the thinking in a content, of the last answer too."""
ENDS_LATER = {"axolotl/metharme", "trl/gptoss"}
"""They end an answer otherwise if it is the last, so the end of an earlier one is not learned."""
REASONING = {"axolotl/qwen3", "axolotl/qwen3_5"}
REASONING |= {
    f"trl/{name}"
    for name in re.findall(
        r"\w+",
        """diffusion_gemma gemma4_v5 glm4moe lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl muse_glimmer nemotron_3_5_lightning
        nemotron_3_nano nemotron_3_super nemotron_3_ultra qwen3 qwen3_5_nothink qwen3_5_think qwen3_6 qwen3_8""",
    )
}
"""They write the reasoning_content of the last answer."""
AGENT = {f"axolotl/{name}" for name in ["deepseek_v3", "exaone4", "jamba", "llama4", "qwen3", "qwen3_5", "qwen_25"]}
AGENT |= REASONING - {"trl/diffusion_gemma", "trl/gemma4_v5", "trl/muse_glimmer"}
AGENT |= {f"trl/{name}" for name in ["gemma4_v2", "lfm2_v2", "qwen2_5", "qwen3_instruct_2507", "qwen3_vl"]}
"""They write contents, calls and results, also of two calls in a row."""


def tokenizer_of(source: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose special tokens are those that the template names; generation stops at its end of turn."""
    tokenizer = templated(source)
    tokens = sorted({*TOKENS.findall(source), "<s>", "</s>"} - set(tokenizer.get_vocab()))
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens], special_tokens=True)
    ends = [end for end in ENDS if end in source and "eos_token" not in source]
    tokenizer.bos_token, tokenizer.eos_token = "<s>", ends[0] if ends else "</s>"
    return tokenizer


def answer(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def conversation(kind: str, word: Words) -> list[dict[str, Any]]:
    def calls(*ids: int) -> list[dict[str, Any]]:
        functions = [
            {"name": word("n"), "arguments": {word("k"): word("v"), word("k"): 7100 + word.count}} for _ in ids
        ]
        calls = [
            {"id": f"call{i:05}", "type": "function", "function": function}
            for i, function in zip(ids, functions, strict=True)
        ]
        return calls

    def result(of: int) -> dict[str, Any]:
        return {"role": "tool", "content": word("t"), "tool_call_id": f"call{of:05}", "name": "f"}

    if kind == "plain":
        return messages(("user", word("u")), ("assistant", word("a")), ("user", word("u")), ("assistant", word("a")))
    if kind == "reasoning":
        first, second = (answer(word("a"), reasoning_content=word("r")) for _ in range(2))
        return [*messages(("user", word("u"))), first, *messages(("user", word("u"))), second]
    if kind == "inline":
        first, second = (answer(f"<think>\n{word('i')}\n</think>\n\n{word('a')}") for _ in range(2))
        return [*messages(("user", word("u"))), first, *messages(("user", word("u"))), second]
    said = [*messages(("user", word("u"))), answer(None, tool_calls=calls(1)), result(1), answer(word("a"))]
    if kind == "tools":
        return [*said, *messages(("user", word("u"))), answer("", tool_calls=calls(2))]
    return [
        *said,
        *messages(("user", word("u"))),
        answer(word("a"), tool_calls=calls(2, 3)),
        result(2),
        result(3),
        answer(word("a")),
    ]


@pytest.mark.skipif(not TEMPLATES, reason="needs trl and axolotl, see make test-templates")
@pytest.mark.parametrize("name", TEMPLATES or ["none"])
def test_published(name, tmp_path):
    tokenizer = tokenizer_of(TEMPLATES[name].read_text())
    question = messages(("user", "?"))
    asked, given = (
        tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=add) for add in (True, False)
    )
    header = asked.removeprefix(given).strip() if asked.startswith(given) else ""
    learned = set()
    for kind in ("plain", "reasoning", "inline", "tools", "agent"):
        for loss_on in ("last", "all"):
            said = conversation(kind, Words())
            try:
                (sample,), counts = read(tmp_path, tokenizer, {"messages": said}, loss_on=loss_on)
            except DataError as error:
                assert ONE_LINE.fullmatch(str(error)), error
                continue
            learned.add(f"{kind} {loss_on}")
            turns = answers(said) if loss_on == "all" else answers(said)[-1:]
            runs = learned_turns(sample, tokenizer)
            assert counts.cut == cut_answers(turns, runs, tokenizer)
            if kind == "plain":  # an axolotl template may end no answer
                assert counts.without_end in (name in ENDS_LATER and len(turns) - 1, len(turns))
            assert not header or all(header not in re.split(WORD, run)[-1] for run in runs)
    assert {"plain last", "plain all"} <= learned
    assert ("inline last" in learned) == (name not in REFUSED_INLINE)
    assert ("reasoning last" in learned) == (name in REASONING | {"trl/gptoss"})
    assert ("agent all" in learned) == (name in AGENT)


@pytest.mark.skipif(not TEMPLATES, reason="needs trl and axolotl, see make test-templates")
@pytest.mark.parametrize("name", TEMPLATES or ["none"])
def test_no_value_of_a_row_is_passed_over(name, tmp_path, rng):
    tokenizer = tokenizer_of(TEMPLATES[name].read_text())
    outcomes = {outcome(tmp_path, tokenizer, Maker(rng).row(), rng.choice(["last", "all"])) for _ in range(30)}
    assert "refused" in outcomes and outcomes & {"whole", "counted"}
