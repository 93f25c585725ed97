"""Adapters that stay beside quantized weights: trained on two ranks, written as a folder that peft loads."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from model.peft import read_adapter
from quant.adapters import AdapterBeside
from tests.distributed.engine.scripts import variants as actions
from tests.distributed.engine.scripts.train import run_all
from tests.lib.launcher import on_ranks
from tests.lib.plain import assert_equals_plain_loop, load_result
from tests.lib.recipes import merged, write_chats, write_recipe
from tests.lib.tiny import tiny_checkpoint
from tests.lib.variants import NO_TEACHER, assert_same_weights
from tools.compressed import load_compressed
from tools.evaluation.perplexity import load_for_evaluation

NOTHING = {"weight": False, "weight_scale": False}
BESIDE = {
    "adapter": {"kind": "lora", "rank": 4, "alpha": 6.0, "merge": False},
    "learnable": NOTHING,
    "optim": {"lr": 1e-2},
    "loss": NO_TEACHER,
    "train": {"steps": 3, "gradient_accumulation_steps": 2},
    "quant": {"scheme": "w4a16_g32", "calibration_batches": 1},
    "export": {"enabled": True},
}
SOURCE, PEFT = {"quant": {"scheme": "source"}}, {"export": {"enabled": True, "format": "peft"}}
STATIC, EXPERTS = {"scheme": "fp8_static"}, [".*experts.*"]
START = {"adapter": {"start": "{alone_3}"}}
ATTENTION = {"targets": [".*self_attn.*"], "rslora": True}
RESTS = {"schedule": [{"at": 1, "fake_quant": False}, {"at": 2, "fake_quant": True}]}
DROPOUT, NO_EXPORT = {"adapter": {"dropout": 0.3}}, {"export": {"enabled": False}}
RECOMPUTED = {"activation_checkpointing": True, "checkpoint_every": 2}
# name: kind, stage, dtype, what the recipe has beside BESIDE; in braces a model, or a run whose export is meant.
RUNS = {
    "plain_2": ("qwen3", 2, "float32", {}),
    "int4_3": ("qwen3", 3, "bfloat16", {}),
    "again_3": ("qwen3", 3, "bfloat16", {"optim": {"lr": 2e-2}}),
    "fp8_1": ("qwen3", 1, "bfloat16", {"quant": STATIC}),
    "rests_1": ("qwen3", 1, "bfloat16", {"quant": STATIC, **RESTS}),
    "later_3": ("qwen3", 3, "bfloat16", {"quant": {**STATIC, "fake_quant_start": 2}}),
    "moe_3": ("qwen3_moe", 3, "bfloat16", {"adapter": ATTENTION, "quant": {**STATIC, "exempt_more": EXPERTS}}),
    "alone_3": ("{int4_3}", 3, "bfloat16", {**SOURCE, **PEFT}),
    "whole_3": ("{int4_3}", 3, "bfloat16", SOURCE),
    "merged_3": ("{int4_3}", 3, "bfloat16", {**SOURCE, "adapter": {"merge": True}, "optim": {"lr": 0.2}}),
    "started_3": ("{int4_3}", 3, "bfloat16", {**SOURCE, **PEFT, **START, "optim": {"lr": 0.0}}),
    "dropped_3": ("qwen3", 3, "bfloat16", DROPOUT),
    "begun_3": ("qwen3", 3, "bfloat16", {**DROPOUT, **NO_EXPORT, "train": {**RECOMPUTED, "steps": 2}}),
    "resumed_3": (
        "qwen3",
        3,
        "bfloat16",
        {**DROPOUT, **NO_EXPORT, "train": {**RECOMPUTED, "resume": True}, "output_dir": "begun_3"},
    ),
    "self_2": ("qwen3", 2, "float32", {"loss": {"kd_weight": 1.0, "kd": "kl", "teacher": "self"}}),
    "teacher_2": ("qwen3", 2, "float32", {"loss": {"kd_weight": 1.0, "kd": "kl", "teacher": "{qwen3}"}}),
    "error_3": ("qwen3", 3, "bfloat16", {"adapter": {"init": "error", "rank": 16}, "optim": {"lr": 0.0}}),
    "goes_on_2": ("{int4_3}", 2, "bfloat16", {**SOURCE, **START}),
}


Runs = dict[str, tuple[str, int, str, dict]]


def train_all(directory: Path, runs: Runs, action: str, models: dict[str, Path] | None = None) -> dict[str, Path]:
    """Train all of them in one job; the sections of each are merged into BESIDE."""
    if models is None:
        models = {kind: tiny_checkpoint(directory / kind, kind, even=True) for kind in ("qwen3", "qwen3_moe")}
    chats, written = write_chats(directory / "chats.jsonl"), {}

    def place(name: str) -> str:
        earlier = name.strip("{}")
        return str(models.get(earlier, directory / earlier / "export")) if name.startswith("{") else name

    for name, (kind, stage, dtype, sections) in runs.items():
        whole = merged(BESIDE, sections)
        for section, key in (("adapter", "start"), ("loss", "teacher")):
            if whole[section].get(key):
                whole[section] = {**whole[section], key: place(whole[section][key])}
        if "output_dir" in whole:
            whole["output_dir"] = str(directory / whole["output_dir"])
        source = models[kind] if kind in models else place(kind)
        written[name] = write_recipe(directory, name, source, chats, stage=stage, dtype=dtype, **whole)
    on_ranks(run_all, [(getattr(actions, action), path) for path in written.values()])
    return written


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    return train_all(tmp_path_factory.mktemp("beside"), RUNS, "used_weights")


def export_of(paths: dict[str, Path], name: str) -> Path:
    return paths[name].with_suffix("") / "export"


def folders(paths: dict[str, Path], name: str) -> tuple[Path, Path]:
    """The model that an adapter is for, and the adapter's folder."""
    export = export_of(paths, name)
    return (export_of(paths, "int4_3"), export) if name in ("alone_3", "started_3") else (export, export / "adapter")


def with_adapter(base: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Our forward of an export with an adapter."""
    model, quantization = load_compressed(base, dtype=dtype)
    source = read_adapter(folder, model, quantization.layers)
    for name, scaling in source.scalings.items():
        pair = (nn.Parameter(one.to(dtype)) for one in source.pair(name))
        quantization.layers[name].attach_adapter(AdapterBeside(*pair, scaling))
    return model.eval()


def test_training_equals_a_plain_loop(paths):
    assert_equals_plain_loop(paths["plain_2"])


@pytest.mark.parametrize("name", ("int4_3", "fp8_1", "moe_3", "alone_3", "goes_on_2"))
def test_adapters_train_and_nothing_else(paths, name):
    result = load_result(paths[name])
    assert result["groups"] == ["adapters"]
    assert {one.rpartition(".")[2] for one in result["requires_grad"]} == {"lora_a", "lora_b"}
    assert all(value.any() for key, value in result["weights"].items() if key.endswith("lora_b"))


def test_a_run_resumed_with_recomputed_layers_trains_bit_for_bit_alike(paths):
    """With dropout. The first losses, where B is 0, are those without; the adapter's folder says the share."""
    whole, dropped, resumed = (load_result(paths[name]) for name in ("int4_3", "dropped_3", "resumed_3"))
    assert resumed["losses"] == dropped["losses"][2:] and dropped["losses"][0] == whole["losses"][0]
    assert dropped["losses"][1] != whole["losses"][1]
    assert_same_weights(resumed, dropped)
    for name, share in (("int4_3", 0.0), ("dropped_3", 0.3)):
        config = json.loads((export_of(paths, name) / "adapter" / "adapter_config.json").read_text())
        assert config["lora_dropout"] == share


def test_the_base_without_adapter_is_the_teacher_that_it_was(paths):
    """Every loss is that of a second model, in fp32."""
    own, other = (load_result(paths[name])["losses"] for name in ("self_2", "teacher_2"))
    assert "loss/kd/kl" in own[0] and own[-1]["loss/kd/kl"] > 0
    for mine, theirs in zip(own, other, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_what_reads_the_model_alone_says_so(paths, capsys):
    """Where there is an adapter beside it, and nowhere else."""
    for name, said in (("int4_3", True), ("merged_3", False)):
        load_for_evaluation(export_of(paths, name), torch.bfloat16, torch.device("cpu"))
        assert ("without the adapter in" in capsys.readouterr().out) == said, name


# A quantized base is written as it was read. Scales of inputs are those of the model without adapters, also where fake
# quant rests while the adapter trains, starts after it has, or the adapter starts with values.
SAME_BASE = {"again_3": "int4_3", "whole_3": "int4_3", "error_3": "int4_3", "rests_1": "fp8_1", "later_3": "fp8_1"}


@pytest.mark.parametrize("name", SAME_BASE)
def test_the_base_does_not_depend_on_what_the_adapter_learnt(paths, name):
    first, other = export_of(paths, SAME_BASE[name]), export_of(paths, name)
    for file in ("model.safetensors", "config.json"):
        assert (other / file).read_bytes() == (first / file).read_bytes()
    if name == "again_3":
        one, two = (load_file(each / "adapter" / "adapter_model.safetensors") for each in (first, other))
        assert one.keys() == two.keys() and not any(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("name", ("int4_3", "fp8_1", "moe_3", "alone_3", "goes_on_2"))
def test_the_folders_hold_what_the_last_forward_computed_with(paths, name):
    """Each layer by itself: base and adapter, read back."""
    result = load_result(paths[name])
    model = with_adapter(*folders(paths, name))
    for layer_name, used in result["seen"]["used"].items():
        layer = model.get_submodule(layer_name)
        for part in ("lora_a", "lora_b"):
            trained = result["weights"].get(f"{layer_name}.{part}")
            assert trained is None or torch.equal(getattr(layer, part), trained), layer_name
        layer.input_fake_quant = False
        with torch.no_grad():
            assert torch.equal(layer(torch.eye(layer.in_features, dtype=torch.bfloat16)).t(), used), layer_name


def test_a_rate_of_0_writes_the_adapter_that_it_started_from(paths):
    before, after = (export_of(paths, name) for name in ("alone_3", "started_3"))
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (before / file).read_bytes() == (after / file).read_bytes()
    after = export_of(paths, "goes_on_2") / "adapter"
    moved, was = (load_file(one / "adapter_model.safetensors") for one in (after, before))
    assert not any(torch.equal(value, moved[key]) for key, value in was.items())


def test_an_adapter_may_start_from_the_error_of_quantization(paths):
    """As near as a matrix of its rank comes, by the singular values."""
    weights, result = (load_result(paths[name])["weights"] for name in ("int4_3", "error_3"))
    _, quantization = load_compressed(export_of(paths, "int4_3"), dtype=torch.bfloat16)
    for name, layer in quantization.layers.items():
        a, b = (result[f"{name}.{part}"].double() for part in ("lora_a", "lora_b"))
        error = weights[f"{name}.weight"].double() - layer.weight.double()
        best = torch.linalg.svdvals(error)[16:].square().sum().sqrt()
        left = (error - 6.0 / 16 * b @ a).norm()
        assert best <= left <= 1.03 * best + 0.01 * error.norm() and left < error.norm(), name


def test_merged_adapters_on_a_quantized_base(paths):
    """The export holds the codes of the sum, on the grid and with the scales of the source."""
    result = load_result(paths["merged_3"])
    _, quantization = load_compressed(export_of(paths, "merged_3"), dtype=torch.bfloat16)
    _, source = load_compressed(export_of(paths, "int4_3"), dtype=torch.bfloat16)
    for name, layer in quantization.layers.items():
        with torch.no_grad():
            served = layer(torch.eye(layer.in_features, dtype=torch.bfloat16)).t()
        assert torch.equal(served, result["seen"]["used"][name]), name
        assert torch.equal(layer.weight_scale(), source.layers[name].weight_scale()), name
        assert not torch.equal(layer.weight, source.layers[name].weight), name


@pytest.mark.parametrize("name", ("int4_3", "alone_3"))
def test_what_a_reader_computes_is_our_forward(paths, name):
    """The formula of the format, written out around the Linears of transformers' model."""
    base, folder = folders(paths, name)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    scaling = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    meant = 0
    for module_name, module in model.named_modules():
        pair = [tensors.get(f"base_model.model.{module_name}.lora_{part}.weight") for part in "AB"]
        targeted = any(f".{module_name}".endswith(f".{target}") for target in config["target_modules"])
        assert targeted == (pair[0] is not None), module_name
        if targeted:
            a, b = (one.float() for one in pair)
            meant += 1
            module.register_forward_hook(
                lambda _, inputs, output, a=a, b=b: output + F.linear(F.linear(inputs[0], a), b) * scaling
            )
    assert 2 * meant == len(tensors)
    ids = torch.arange(3, 40).view(1, -1)
    ours = with_adapter(base, folder, torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft, see make test-peft")
@pytest.mark.parametrize("name", ("int4_3", "fp8_1", "moe_3", "alone_3"))
def test_peft_gives_our_logits(paths, name):
    from peft import PeftModel

    base, folder = folders(paths, name)
    assert Path(json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]) == base.resolve()
    ids, moe = torch.arange(3, 40).view(1, -1), name == "moe_3"
    # Of fp8 in bf16 every difference in the order of operations on an input becomes another code.
    for dtype in (torch.float32,) if moe or name == "fp8_1" else (torch.float32, torch.bfloat16):
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        ours = with_adapter(base, folder, dtype)
        with torch.no_grad():
            without = plain(ids).logits
            model = PeftModel.from_pretrained(plain, str(folder), autocast_adapter_dtype=False).eval()
            logits = model(ids).logits
            assert (logits - without).abs().max() > 0.05
            for layer_name in read_adapter(folder, ours, dict(ours.named_modules())).shapes:
                layer, theirs = ours.get_submodule(layer_name), model.base_model.model.get_submodule(layer_name)
                x = torch.randn(7, layer.in_features, dtype=dtype)
                torch.testing.assert_close(layer(x), theirs(x), rtol=1e-6, atol=1e-6)
            if not moe:  # a code that is another one sends tokens to other experts
                bounds = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {}
                torch.testing.assert_close(ours(ids).logits, logits, **bounds)


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft, see make test-peft")
def test_an_adapter_that_peft_wrote_is_read(paths, tmp_path):
    """With patterns of ranks and strengths; what we read is what it multiplies."""
    from peft import LoraConfig, get_peft_model

    base = paths["int4_3"].parent / "qwen3"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    patterns = {"rank_pattern": {"down_proj": 3}, "alpha_pattern": {r"layers\.1\..*": 5}}
    targets = ["q_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=6, target_modules=targets, init_lora_weights=False, **patterns)
    peft = get_peft_model(model, config)
    peft.save_pretrained(tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(base)
    linears = [name for name, module in plain.named_modules() if isinstance(module, nn.Linear)]
    source = read_adapter(tmp_path / "adapter", plain, linears)
    assert len(source.shapes) == 4 and source.base is None
    for name, scaling in source.scalings.items():
        a, b = source.pair(name)
        theirs = peft.base_model.model.get_submodule(name).get_delta_weight("default")
        torch.testing.assert_close(scaling * b @ a, theirs)
