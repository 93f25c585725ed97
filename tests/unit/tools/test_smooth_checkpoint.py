"""A smoothed checkpoint is the same function, of every family, in transformers' own forward; its inputs differ less."""

import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from model.ranks import RankError
from tests.lib.checkpoints import edit_json, edit_tensors, read_tensors
from tests.lib.processes import run_python
from tests.lib.root import ROOT
from tests.unit.tools.test_rotate_checkpoint import CLOSE, FP8, LAYER, UP, VARIANTS, change, logits, made
from tools.smooth_checkpoint import smooth_checkpoint

IDS = torch.randint(1, 60, (40,), generator=torch.Generator().manual_seed(2)).tolist()
NORMS = re.compile(r".*\.(input_layernorm|post_attention_layernorm)\.weight")
READERS = re.compile(r".*\.([qkv]_proj|gate_proj|up_proj|w1|w3|gate|shared_expert_gate)\.weight")


def sampled(directory: Path, *arguments, **options) -> Path:
    """A random checkpoint with a tokenizer of numbers; ``text`` beside it has ``IDS``."""
    source = made(directory / "plain", *arguments, **options)
    words = Tokenizer(WordLevel({"eos": 0, **{str(number): number for number in range(1, 60)}}, unk_token="eos"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="eos").save_pretrained(source)
    (directory / "text").write_text(" ".join(map(str, IDS)))
    return source


def smooth(source: Path, tokens: int = 40, strength: float = 0.5) -> tuple[Path, tuple[int, int]]:
    """Smooth with the text beside ``source``; the new directory, and what is returned."""
    out, text, device = source.parent / "smooth", source.parent / "text", torch.device("cpu")
    return out, smooth_checkpoint(source, out, text, tokens=tokens, strength=strength, device=device)


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_function(variant: str, tmp_path: Path) -> None:
    source = sampled(tmp_path, variant)
    out, counts = smooth(source)
    expected = logits(source)
    assert expected.std() > 0.1 and (logits(out) - expected).abs().max() < CLOSE * expected.std()
    before, after = read_tensors(source), read_tensors(out)
    assert counts == (len(before), 4) and before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {key for key in before if NORMS.fullmatch(key) or READERS.fullmatch(key)}
    assert (out / "config.json").read_text() == (source / "config.json").read_text()


def largest_outputs(directory: Path, tokens: int) -> dict[str, Tensor]:
    """Largest magnitude of each feature of each norm that Linears read, for a prefix (EOS) and the text, by key."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, experts_implementation="eager")
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if NORMS.fullmatch(key := f"{name}.weight"):
            module.register_forward_hook(lambda _, __, out, key=key: found.update({key: out[0].abs().amax(0).double()}))
    with torch.no_grad():
        model(torch.tensor([[0, *IDS[: tokens - 1]]]))
    return found


@pytest.mark.parametrize(("variant", "strength"), [("qwen3", 0.5), ("qwen3_moe", 1.0)])
def test_factors(variant: str, strength: float, tmp_path: Path) -> None:
    """They are x^-strength over their mean, up to bf16's rounding, and files are like the source's."""
    source = sampled(tmp_path, variant, torch.bfloat16, shard="20KB")
    first, silent = "model.layers.0.input_layernorm.weight", LAYER + "input_layernorm.weight"
    edit_tensors(source, first, lambda tensors: tensors[first][5:6].mul_(40))
    edit_tensors(source, silent, lambda tensors: tensors[silent][7:8].zero_())
    names = sorted(path.name for path in source.glob("*.safetensors"))
    out, _ = smooth(source, 30, strength)
    assert sorted(path.name for path in out.glob("*.safetensors")) == names and len(names) > 2
    assert (out / "tokenizer.json").is_file()
    before, after, largest = read_tensors(source), read_tensors(out), largest_outputs(source, 30)
    assert len(largest) == 4
    for key, maxima in largest.items():
        heard = maxima > 0
        assert key != silent or not heard[7]
        logs = maxima[heard].log2()
        factors = (after[key].double() / before[key].double())[heard].log2()
        assert (factors - strength * (logs.mean() - logs)).abs().max() < 0.02 < factors.std()
    q = LAYER + "self_attn.q_proj.weight"
    assert torch.equal(before[q][:, 7], after[q][:, 7]) and not torch.equal(before[q], after[q])


BAD = {
    "family": "model_type gemma cannot be smoothed, expected one of llama",
    "quantized": "is quantized, and cannot be smoothed: take the unquantized checkpoint",
    "missing": r"missing: .*mlp.up_proj.weight",
    "range": r"mlp.up_proj.weight would leave the range of torch.float16: set a lower --strength",
    "infinite": r"the outputs of model.layers.1.input_layernorm.weight, .* have NaN or Inf on .*text: check the che",
    "text": "text: no text to evaluate on, expected words",
    "destination": "is a file, expected a directory",
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, tmp_path: Path) -> None:
    """One line that names it, and nothing written."""
    source = sampled(tmp_path, "llama", torch.bfloat16 if case == "infinite" else torch.float16)
    if case == "family":
        edit_json(source / "config.json", model_type="gemma")
    if case == "quantized":
        edit_json(source / "config.json", quantization_config=FP8)
        change(source, lambda t: t.update({UP: torch.ones(40, 48, dtype=torch.int8), f"{UP}_scale": torch.ones(1)}))
    if case == "missing":
        change(source, lambda t: t.pop(UP))
    if case == "range":
        change(source, lambda t: (t[LAYER + "post_attention_layernorm.weight"][3:4].fill_(99), t[UP].fill_(6e4)))
    if case == "infinite":
        change(source, lambda t: t[LAYER + "input_layernorm.weight"].fill_(3e38))
    if case == "text":
        (tmp_path / "text").write_text(" \n")
    if case == "destination":
        (tmp_path / "smooth").write_text("here")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RankError, match=BAD[case]):
        smooth(source)
    assert sorted(tmp_path.iterdir()) == before


def test_strength_is_a_share(tmp_path: Path) -> None:
    script = f"import runpy; runpy.run_path('{ROOT}/launch/smooth.py', run_name='__main__')"
    ended = run_python(script, "--model", ".", "--out", "o", "--text", "t", "--strength", "1.5", cwd=tmp_path)
    assert ended.returncode == 2 and "--strength 1.5, expected a number from 0 to 1" in ended.stderr
