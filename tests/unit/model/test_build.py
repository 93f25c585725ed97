"""Models that build_model refuses, and what must not depend on how it builds. Stages and values: tests/distributed."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from model.ranks import RankError
from tests.families.variants import VARIANTS
from tests.lib.checkpoints import build, edit_json, load_model
from tests.lib.processes import run_python
from tests.lib.tiny import tiny_checkpoint, tiny_config


def write_config(path: Path, **changes) -> Path:
    """config.json of a tiny Llama with changes; its path."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**tiny_config("llama").to_dict(), **changes}))
    return path


def config_of(kind: str, path: Path, architectures=None) -> Path:
    """The default configuration of a class of transformers, without weights."""
    config = AutoConfig.for_model(kind)
    config.architectures = architectures
    config.save_pretrained(path)
    return path


CAUSAL = r"describes {} \(model_type {}\), expected a causal"
REFUSED = {
    "no file": (lambda path: path / "nowhere", r"nowhere/config\.json does not exist: expected"),
    "no JSON": (lambda path: (path / "config.json").write_text("{") and path, r"config\.json"),
    "a list": (lambda path: (path / "config.json").write_text("[1]") and path, r"config\.json"),
    **{
        f"architectures {names}": (
            lambda path, names=names: write_config(path, architectures=names),
            r"config\.json: architectures is .*, expected a list of names",
        )
        for names in ([10**30], [None], [["x"]], {"a": 1}, 3, "x")
    },
    "unknown codes": (
        lambda path: write_config(path, quantization_config={"quant_method": "bitsandbytes"}),
        r"config\.json: quantization_config: .*whose codes cannot be read",
    ),
    "unknown type": (lambda path: write_config(path, model_type="marvellous"), "marvellous"),
    "images": (lambda path: config_of("vit", path, ["ViTForImageClassification"]), CAUSAL.format("ViTFor.*", "vit")),
    "encoder": (lambda path: config_of("t5", path), CAUSAL.format("T5Config", "t5")),
    "fp32 alone": (
        lambda path: VARIANTS["xlstm"].config().save_pretrained(path) or path,
        r"transformers runs xlstm in fp32 alone: set model\.dtype to float32$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_model_of_ours_is_refused_in_a_few_words(case: str, tmp_path: Path):
    make, message = REFUSED[case]
    path = make(tmp_path)
    with pytest.raises(RankError, match=message) as error:
        build(path)
    # Without the names of all classes that transformers has.
    assert len(str(error.value)) < 300 or "expected a causal" not in message
    if case == "fp32 alone":
        build(path, torch.float32)


LEFT_OVER = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32},
    "fp8": {"quant_method": "fp8"},
}


@pytest.mark.parametrize("method", LEFT_OVER)
def test_a_quantization_config_over_plain_weights_is_to_be_removed(method: str, tmp_path: Path):
    path = tiny_checkpoint(tmp_path / "model")
    edit_json(path / "config.json", quantization_config=LEFT_OVER[method])
    with pytest.raises(RankError) as refused:
        build(path)
    assert str(refused.value) == (
        f"{path}/config.json: quantization_config has quant_method {method!r}, but the weights in {path} are not "
        "quantized: remove quantization_config from config.json to train them"
    )
    edit_json(path / "config.json", lambda config: config.pop("quantization_config"))
    load_model(path)
    modelopt = path / "hf_quant_config.json"
    modelopt.write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(RankError, match=rf"{modelopt} has .* not quantized: remove this file to train them"):
        build(path)


def test_a_failed_build_leaves_no_hook_behind(tmp_path: Path):
    config = AutoConfig.for_model("jetmoe", num_local_experts=2, num_hidden_layers=1, hidden_size=32)
    config.save_pretrained(tmp_path)
    with pytest.raises(RankError, match="JetMoeParallelExperts"):
        build(tmp_path, attn_implementation="eager")
    linear = nn.Linear(2, 2)
    assert not linear.weight.is_meta and linear.weight.dtype == torch.float32 and linear.weight.any()


def test_parameters_are_uninitialized_but_complete(tmp_path: Path):
    """Shapes, dtypes, names and buffers are those of a plain build of the same configuration."""
    model = build(write_config(tmp_path))
    reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.bfloat16)
    ours, theirs = (
        {name: (value.shape, value.dtype) for name, value in one.state_dict().items()} for one in (model, reference)
    )
    assert ours == theirs
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert model.config._attn_implementation == "sdpa" and model.dtype == torch.bfloat16


def test_buffers_that_the_model_lists_for_fp32_are_fp32_before_loading(tmp_path: Path):
    """A routing bias in bf16 would be rounded when it is loaded, and send tokens to other experts."""
    VARIANTS["glm4_moe"].config().save_pretrained(tmp_path)
    gate = build(tmp_path).model.layers[1].mlp.gate
    assert gate.e_score_correction_bias.dtype == torch.float32 and gate.weight.dtype == torch.bfloat16


REMOTE_CODE = """
import pathlib
pathlib.Path({marker!r}).write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM
class MarvellousConfig(LlamaConfig):
    model_type = "marvellous"
class MarvellousForCausalLM(LlamaForCausalLM):
    config_class = MarvellousConfig
"""
PROGRAM = """
import sys
from pathlib import Path
import torch
import transformers.dynamic_module_utils
from tests.lib.checkpoints import build, edit_json, load_model
transformers.dynamic_module_utils.HF_MODULES_CACHE = sys.argv[2]
model = build(Path(sys.argv[1]), torch.float32, trust_remote_code=True)
assert type(model).__name__ == "MarvellousForCausalLM"
"""


def test_remote_code_runs_only_when_asked(tmp_path: Path):
    """In a process of its own, because transformers keeps code that it has imported."""
    marker = tmp_path / "marker"
    classes = {"AutoConfig": "code.MarvellousConfig", "AutoModelForCausalLM": "code.MarvellousForCausalLM"}
    path = write_config(tmp_path / "model", model_type="marvellous", auto_map=classes)
    (path / "code.py").write_text(REMOTE_CODE.format(marker=str(marker)))
    with pytest.raises(RankError, match=r"needs Python code .*set model\.trust_remote_code to true"):
        build(path)
    assert not marker.exists()
    result = run_python(PROGRAM, path, tmp_path / "cache")
    assert result.returncode == 0, result.stderr
    assert marker.read_text() == "ran"


def test_native_architectures_ignore_the_code_that_a_checkpoint_brings(tmp_path: Path):
    path = write_config(tmp_path, auto_map={"AutoModelForCausalLM": "code.Other"})
    (path / "code.py").write_text("raise SystemExit('remote code ran')")
    assert type(build(path)).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("kind", "attention", "why"),
    [
        ("llama", "flash_attention_2", r"FlashAttention2"),
        ("llama", "sdpaa", r"is not supported\. The only possible arguments are"),
        ("gemma2", "sdpa", r"Gemma2ForCausalLM does not support .*yet\.$"),
    ],
)
def test_an_attention_that_cannot_be_used_is_one_line_with_its_key(tmp_path: Path, kind: str, attention: str, why: str):
    """Before weights are read: the directory has none."""
    if attention == "flash_attention_2" and find_spec("flash_attn") is not None:
        pytest.skip("it is installed")
    VARIANTS[kind].config().save_pretrained(tmp_path)
    with pytest.raises(RankError, match=rf"^model\.attn_implementation: '{attention}', expected auto.*{why}") as caught:
        build(tmp_path, torch.float32, attn_implementation=attention)
    assert "\n" not in str(caught.value)
