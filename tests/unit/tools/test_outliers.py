"""A rotated or smoothed checkpoint is the same function, of every family that is not refused, in transformers' own
forward; inputs of a smoothed one differ less."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from model.ranks import RankError
from tests.lib.checkpoints import edit_json, edit_tensors, read_tensors
from tests.lib.processes import run_python
from tests.lib.root import ROOT
from tools.outliers import FAMILIES, rotate_checkpoint, rotation, smooth_checkpoint

COMMON = {"vocab_size": 60, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
COMMON |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
SHARED = {"shared_expert_intermediate_size": 24, "mlp_only_layers": [1]}
CLOSE = 1e-4  # transformers computes norms and positions in fp32, whatever the dtype
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama blocks": {"hidden_size": 52, "head_dim": 14, "num_attention_heads": 4},
    "mistral": {"sliding_window": 8},
    "mixtral": MOE,
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_moe": MOE | SHARED,
    "qwen3": {"head_dim": 12, "tie_word_embeddings": True},
    "qwen3 biases": {"attention_bias": True},
    "qwen3_moe": MOE,
    "qwen3_moe dense": MOE | {"mlp_only_layers": [0], "tie_word_embeddings": True},
}


def made(directory: Path, variant: str, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> Path:
    """A random checkpoint, its norms and biases too: ones and zeros would hide what is not folded or rotated."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(variant.split()[0], **COMMON | VARIANTS[variant])
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) + ("norm" in name))
            else:
                parameter.mul_(5)  # products of the size of the biases
    model.save_pretrained(directory, max_shard_size=shard)
    return directory


def logits(directory: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, experts_implementation="eager")
    ids = torch.randint(0, 60, (2, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_function(variant: str, tmp_path: Path) -> None:
    source = made(tmp_path / "plain", variant)
    report = rotate_checkpoint(source, tmp_path / "rotated")
    assert report.untied == VARIANTS[variant].get("tie_word_embeddings", False)
    expected = logits(source)
    assert expected.std() > 0.1
    assert (logits(tmp_path / "rotated") - expected).abs().max() < CLOSE * expected.std()
    before, after = read_tensors(source), read_tensors(tmp_path / "rotated")
    same = {key for key in before if torch.equal(before[key], after[key])}
    kept = ("q_norm.weight", "k_norm.weight", "q_proj.bias", "k_proj.bias", "gate_proj.bias", "up_proj.bias")
    assert all(key.endswith(kept) for key in same), same


def test_every_family_is_run() -> None:
    assert {variant.split()[0] for variant in VARIANTS} == set(FAMILIES)


def test_several_files_in_bf16(tmp_path: Path) -> None:
    """The files are those of the source, an outlier of the stream is spread, and each value is rounded once."""
    source = made(tmp_path / "plain", "qwen2", torch.bfloat16, shard="20KB")
    (source / "tokenizer.json").write_text("{}")
    names = sorted(path.name for path in source.glob("*.safetensors"))
    assert len(names) > 2
    change(source, lambda tensors: tensors["model.embed_tokens.weight"][:, 5].mul_(40))
    rotate_checkpoint(source, tmp_path / "rotated", seed=3)
    assert sorted(path.name for path in (tmp_path / "rotated").glob("*.safetensors")) == names
    assert (tmp_path / "rotated" / "tokenizer.json").is_file()
    before = read_tensors(source)["model.embed_tokens.weight"].double()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "rotated").get_input_embeddings().weight.detach()
    assert after.dtype == torch.bfloat16
    assert torch.allclose(after.double().norm(dim=1), before.norm(dim=1), rtol=2**-8)
    assert before.abs().max() / before.square().mean().sqrt() > 10
    assert after.double().abs().max() / after.double().square().mean().sqrt() < 8  # spread over 16 of 48
    expected = logits(source)
    assert (logits(tmp_path / "rotated") - expected).abs().max() < 0.2 * expected.std()  # bf16, in every weight


def change(directory: Path, work: Callable[[dict[str, Tensor]], object]) -> None:
    edit_tensors(directory, "model.embed_tokens.weight", work)


LAYER = "model.layers.1."
UP = LAYER + "mlp.up_proj.weight"
CODES = torch.ones(40, 48, dtype=torch.int8)
FP8 = {"quant_method": "fp8"}
# Values of config.json, or a change of the tensors, and the words of the error.
BAD: dict[str, tuple[dict[str, Any] | Callable[[dict[str, Tensor]], object], str]] = {
    "family": ({"model_type": "gemma"}, "model_type gemma cannot be rotated, expected one of llama"),
    "leftover": ({"quantization_config": FP8}, "quant_method 'fp8', but the weights in .* are not quantized"),
    "quantized": (lambda t: t.update({UP: CODES, f"{UP}_scale": torch.ones(1)}), "is quantized"),
    "layers": ({"num_hidden_layers": 3}, r"missing: model.layers.2.self_attn.q_proj.weight"),
    "heads": ({"num_key_value_heads": 3}, r"v_proj.weight is \[16, 48\], the model has \[24, 48\]"),
    "missing": (lambda t: t.pop(LAYER + "self_attn.o_proj.weight"), "missing: model.layers.1.self_attn.o_proj.weight"),
    "no norm": (lambda t: t.pop("model.norm.weight"), "missing: model.norm.weight"),
    "no head": (lambda t: t.pop("lm_head.weight"), "missing: lm_head.weight"),
    "unknown": (lambda t: t.update({LAYER + "mlp.norm.weight": torch.ones(48)}), "unexpected: .*mlp.norm.weight"),
    "shape": (
        lambda t: t.update({UP: torch.ones(40, 44)}),
        r"up_proj.weight is \[40, 44\], the model has \[40, 48\]",
    ),
    "codes": (lambda t: t.update({UP: CODES}), r"not bf16, fp16 or fp32.*up_proj.weight \(I8\)"),
    "nan": (lambda t: t[UP].view(-1)[7:8].fill_(float("nan")), "up_proj.weight holds NaN"),
    "destination": ({}, "is a file, expected a directory"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, tmp_path: Path) -> None:
    """One line that names it, and nothing written."""
    source = made(tmp_path / "plain", "llama")
    work, text = BAD[case]
    edit_json(source / "config.json", **work) if isinstance(work, dict) else change(source, work)
    if case == "quantized":
        edit_json(source / "config.json", quantization_config=FP8)
    if case == "destination":
        (tmp_path / "out").write_text("here")
    before = sorted(tmp_path.iterdir())
    with pytest.raises((RankError, ValueError, OSError), match=text):
        rotate_checkpoint(source, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_a_tied_head_in_the_file(tmp_path: Path) -> None:
    """A copy of the embedding is one more name for it. Another one is an error: readers differ in which they take."""
    source = made(tmp_path / "plain", "qwen2")
    expected = logits(source)
    change(source, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert rotate_checkpoint(source, tmp_path / "rotated").untied
    assert (logits(tmp_path / "rotated") - expected).abs().max() < CLOSE * expected.std()
    change(source, lambda tensors: tensors["lm_head.weight"].view(-1)[3:4].add_(1))
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        rotate_checkpoint(source, tmp_path / "again")


# ---- the matrices


@pytest.mark.parametrize(("size", "order"), [(1, 1), (2, 2), (64, 64), (12, 4), (13, 1), (52, 4), (896, 128)])
def test_rotation_is_hadamard(size: int, order: int) -> None:
    found = rotation(size, seed=size)
    assert (found.size, found.order) == (size, order)
    whole = found.apply(torch.eye(size, dtype=torch.float64), 1)
    assert torch.allclose(whole @ whole.T, torch.eye(size, dtype=torch.float64), atol=1e-12)
    for start in range(0, size, order):
        block = whole[start : start + order, start : start + order]
        assert torch.allclose(block.abs(), torch.full_like(block, 1 / math.sqrt(order)), atol=1e-12)


def test_turns_runs_along_an_axis() -> None:
    found, other = rotation(24, seed=3), rotation(24, seed=4)
    whole = found.apply(torch.eye(24, dtype=torch.float64), 1)
    values = torch.randn(72, 5, dtype=torch.float64)
    expected = torch.cat([whole.T @ part for part in values.split(24)])
    assert torch.allclose(found.apply(values, 0), expected, atol=1e-12)
    assert torch.allclose(found.apply(values.T, 1), expected.T, atol=1e-12)
    assert not torch.equal(found.signs, other.signs)


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
def test_smoothing_keeps_the_function(variant: str, tmp_path: Path) -> None:
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


BAD_TO_SMOOTH = {
    "family": "model_type gemma cannot be smoothed, expected one of llama",
    "quantized": "is quantized, and cannot be smoothed: take the unquantized checkpoint",
    "missing": r"missing: .*mlp.up_proj.weight",
    "range": r"mlp.up_proj.weight would leave the range of torch.float16: set a lower --strength",
    "infinite": r"the outputs of model.layers.1.input_layernorm.weight, .* have NaN or Inf on .*text: check the che",
    "text": "text: no text to evaluate on, expected words",
    "destination": "is a file, expected a directory",
}


@pytest.mark.parametrize("case", BAD_TO_SMOOTH)
def test_bad_input_of_smoothing(case: str, tmp_path: Path) -> None:
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
    with pytest.raises(RankError, match=BAD_TO_SMOOTH[case]):
        smooth(source)
    assert sorted(tmp_path.iterdir()) == before


def test_strength_is_a_share(tmp_path: Path) -> None:
    script = f"import runpy; runpy.run_path('{ROOT}/launch/smooth.py', run_name='__main__')"
    ended = run_python(script, "--model", ".", "--out", "o", "--text", "t", "--strength", "1.5", cwd=tmp_path)
    assert ended.returncode == 2 and "--strength 1.5, expected a number from 0 to 1" in ended.stderr
