"""What build_model refuses, and what must not depend on how it builds. Stages and values: tests/distributed."""

import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from model.build import build_model, may_hold_experts
from model.moe.arrange import _looks_like_experts, _numbers_of_experts
from model.ranks import RankError
from tests.families.variants import VARIANTS
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_checkpoint, tiny_config

CPU = torch.device("cpu")
BF16 = {"bf16": {"enabled": True}}


def build(path: Path, **options):
    return build_model(path, BF16, dtype=torch.bfloat16, device=CPU, **options)


def write_config(path: Path, **changes) -> Path:
    """config.json of a tiny Llama with changes; its path."""
    values = {**tiny_config("llama").to_dict(), **changes}
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(values))
    return path


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_config_that_is_no_json_object(text: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RankError, match=r"config\.json"):
        build(tmp_path)


@pytest.mark.parametrize("names", [[10**30], [None], [["x"]], {"a": 1}, 3, "x"])
def test_architectures_that_are_no_names(names: object, tmp_path: Path):
    path = tiny_checkpoint(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": names}))
    with pytest.raises(RankError, match=r"config\.json: architectures is .*, expected a list of names"):
        build(path)


def test_no_config(tmp_path: Path):
    with pytest.raises(RankError, match=r"nowhere/config\.json does not exist"):
        build(tmp_path / "nowhere")


def test_a_quantized_checkpoint_that_is_not_read_is_refused(tmp_path: Path):
    write_config(tmp_path, quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(RankError, match=r"config\.json: quantization_config: .*whose codes are not read"):
        build(tmp_path)


def test_an_architecture_that_transformers_does_not_have(tmp_path: Path):
    with pytest.raises(RankError, match="marvellous"):
        build(write_config(tmp_path, model_type="marvellous"))


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
    ours, theirs = model.state_dict(), reference.state_dict()
    assert {name: (value.shape, value.dtype) for name, value in ours.items()} == {
        name: (value.shape, value.dtype) for name, value in theirs.items()
    }
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert model.config._attn_implementation == "sdpa" and model.dtype == torch.bfloat16


def test_buffers_that_the_model_lists_for_fp32_are_fp32_before_loading(tmp_path: Path):
    """A routing bias in bf16 would be rounded when it is loaded, and send tokens to other experts."""
    config = AutoConfig.for_model(
        "glm4_moe", vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=48, moe_intermediate_size=12, n_routed_experts=4, first_k_dense_replace=1,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model = build(tmp_path)
    assert model.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32
    assert model.model.layers[1].mlp.gate.weight.dtype == torch.bfloat16


REMOTE_CODE = """
import pathlib
pathlib.Path({marker!r}).write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM
class MarvellousConfig(LlamaConfig):
    model_type = "marvellous"
class MarvellousForCausalLM(LlamaForCausalLM):
    config_class = MarvellousConfig
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
    script = (
        "import torch; from pathlib import Path; from model.build import build_model\n"
        f"model = build_model(Path({str(path)!r}), {{}}, dtype=torch.float32, device=torch.device('cpu'), "
        "trust_remote_code=True)\nassert type(model).__name__ == 'MarvellousForCausalLM'"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_MODULES_CACHE": str(tmp_path / "cache")}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert marker.read_text() == "ran"


@pytest.mark.parametrize(("kind", "named"), [("vit", "ViTForImageClassification"), ("t5", None)])
def test_other_models_than_causal_ones_are_named_in_one_line(kind: str, named: str | None, tmp_path: Path):
    """Without the names of all classes that transformers has."""
    config = AutoConfig.for_model(kind)
    config.architectures = named and [named]
    config.save_pretrained(tmp_path)
    with pytest.raises(
        RankError, match=rf"describes {named or 'T5Config'} \(model_type {kind}\), expected a causal"
    ) as error:
        build(tmp_path)
    assert len(str(error.value)) < 300


def test_native_architectures_ignore_the_code_that_a_checkpoint_brings(tmp_path: Path):
    path = write_config(tmp_path, auto_map={"AutoModelForCausalLM": "code.Other"})
    (path / "code.py").write_text("raise SystemExit('remote code ran')")
    assert type(build(path)).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("kind", "attention", "why"),
    [
        pytest.param(
            "llama",
            "flash_attention_2",
            r"FlashAttention2",
            marks=pytest.mark.skipif(find_spec("flash_attn") is not None, reason="it is installed"),
        ),
        ("llama", "sdpaa", r"is not supported\. The only possible arguments are"),
        ("gemma2", "sdpa", r"Gemma2ForCausalLM does not support .*yet\.$"),
    ],
)
def test_an_attention_that_cannot_be_used_is_one_line_with_its_key(tmp_path: Path, kind: str, attention: str, why: str):
    """Before weights are read: the directory has none."""
    VARIANTS[kind].config().save_pretrained(tmp_path)
    with pytest.raises(RankError, match=rf"^model\.attn_implementation: '{attention}', expected auto.*{why}") as caught:
        build_model(tmp_path, {}, dtype=torch.float32, device=torch.device("cpu"), attn_implementation=attention)
    assert "\n" not in str(caught.value)


def test_a_model_that_transformers_runs_in_fp32_alone_is_refused_in_bf16(tmp_path: Path):
    """It would fail in the first forward."""
    VARIANTS["xlstm"].config().save_pretrained(tmp_path)
    with pytest.raises(RankError, match=r"transformers runs xlstm in fp32 alone: set model\.dtype to float32$"):
        build(tmp_path)
    build_model(tmp_path, {}, dtype=torch.float32, device=CPU)


def test_models_that_are_passed_over_have_no_experts(seed):
    """`may_hold_experts` saves the search of plain models: none may be passed over in which it would find some."""
    passed_over = set()
    for name in {"qwen3", "llama", "qwen3_moe", *random.sample(sorted(VARIANTS), 12)}:
        model = VARIANTS[name].model()
        counts = _numbers_of_experts(model.config.to_dict())
        if not may_hold_experts(model):
            passed_over.add(name)
            found = [one for one, part in model.named_modules() if _looks_like_experts(one, part, model, counts)]
            assert found == [], name
    assert {"qwen3", "llama"} <= passed_over and "qwen3_moe" not in passed_over
