"""Adapters beside a base that is held as codes, on two ranks: against the same base held in the model's dtype, and
codes that are made of an ordinary checkpoint against those of its export."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from model.quantized.quantize_on_load import can_quantize_on_load
from quant import SCHEMES
from tests.distributed.engine.test_adapters import MANY, MIXED, every_scheme
from tests.distributed.model.save.test_lora import NO_EXPORT, RESTS, Runs, train_all
from tests.lib.plain import load_result
from tests.lib.recipes import write_ds_config
from tests.lib.tiny import tiny_checkpoint

MAKE = {"train": {"steps": 2, "gradient_accumulation_steps": 1}}
ATTENTION = {"targets": [".*self_attn.*"]}
BASES = {"weights": "weights", "codes": "quantized"}  # how it is held
CODES = {"adapter": {"base": "quantized"}}
SOURCE = {"quant": {"scheme": "source"}}
MERGED, MERGED_CODES = {"adapter": {"merge": True}}, {"adapter": {"merge": True, "base": "quantized"}}
ATTENTION_CODES = {**ATTENTION, "base": "quantized"}
RANK_0, RECOMPUTED = {"model": {"load": "rank0"}}, {"train": {"activation_checkpointing": True}}
SELF = {"loss": {"kd_weight": 1.0, "kd": "kl", "teacher": "self"}}
BEGUN = {"train": {"steps": 2, "checkpoint_every": 2}, **NO_EXPORT}
RESUMED = {"train": {"checkpoint_every": 2, "resume": True}, **NO_EXPORT}
# A scheme of each kind that can be made of rows.
MADE = {
    "quant": {
        **{"scheme": "w4a16_g32", "schemes": MIXED["schemes"], "calibration_batches": 0},
        "rules": [rule for rule in MIXED["rules"] if not rule["layers"].endswith("(q|k|v)_proj")]
        + [{"layers": r".*\.1\..*(q|k|v)_proj", "scheme": "fp8_dynamic"}],
    }
}
MADE_EXPERTS = {"quant": {"scheme": "w3a16_g32", "rules": [{"layers": ".*self_attn.*", "scheme": "w2a16_channel"}]}}
# name: the checkpoint or the run whose export is read, stage, dtype, what the recipe has beside BESIDE.
RUNS = {
    "mixed": ("qwen3", 3, "bfloat16", {"quant": MIXED, **MAKE}),
    "experts": ("qwen3_moe", 3, "bfloat16", {"adapter": ATTENTION, **MAKE}),
    "mixed_weights_3": ("{mixed}", 3, "bfloat16", {**SOURCE, **SELF}),
    "mixed_codes_3": ("{mixed}", 3, "bfloat16", {**SOURCE, **SELF, **CODES, "train": {"quant_stats_every": 2}}),
    "mixed_begun_3": ("{mixed}", 3, "bfloat16", {**SOURCE, **SELF, **CODES, **BEGUN}),
    "mixed_resumed_3": (
        "{mixed}",
        3,
        "bfloat16",
        {**SOURCE, **SELF, **CODES, **RESUMED, "output_dir": "mixed_begun_3"},
    ),
    "mixed_weights_2": ("{mixed}", 2, "float32", {**SOURCE, **RESTS}),
    "mixed_codes_2": ("{mixed}", 2, "float32", {**SOURCE, **RESTS, **CODES}),
    "experts_weights_3": ("{experts}", 3, "bfloat16", {**SOURCE, "adapter": ATTENTION}),
    "experts_codes_3": ("{experts}", 3, "bfloat16", {**SOURCE, "adapter": ATTENTION_CODES, **RANK_0, **RECOMPUTED}),
    "made_weights_3": ("qwen3", 3, "bfloat16", MADE),
    "made_codes_3": ("qwen3", 3, "bfloat16", {**MADE, **CODES}),
    "made_begun_3": ("qwen3", 3, "bfloat16", {**MADE, **CODES, **BEGUN}),
    "made_resumed_3": ("qwen3", 3, "bfloat16", {**MADE, **CODES, **RESUMED, "output_dir": "made_begun_3"}),
    "made_read_3": ("{made_weights_3}", 3, "bfloat16", {**SOURCE, **CODES}),
    "merged_weights_3": ("{mixed}", 3, "bfloat16", {**SOURCE, **MERGED}),
    "merged_codes_3": ("{mixed}", 3, "bfloat16", {**SOURCE, **MERGED_CODES}),
    "merged_experts_weights_2": ("{experts}", 2, "float32", {**SOURCE, **MERGED}),
    "merged_experts_codes_2": ("{experts}", 2, "float32", {**SOURCE, **MERGED_CODES}),
    "still_3": ("{mixed}", 3, "bfloat16", {**SOURCE, **MERGED_CODES, "optim": {"lr": 0.0}}),
    "made_weights_2": ("qwen3_moe", 2, "float32", {**MADE_EXPERTS, "adapter": ATTENTION}),
    "made_codes_2": ("qwen3_moe", 2, "float32", {**MADE_EXPERTS, "adapter": ATTENTION_CODES}),
    "made_rank0_3": ("qwen3_moe", 3, "float32", {**MADE_EXPERTS, "adapter": ATTENTION_CODES, **RANK_0}),
}
PAIRS = ("mixed_{}_3", "mixed_{}_2", "experts_{}_3", "made_{}_3", "made_{}_2")


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    return train_all(tmp_path_factory.mktemp("held"), RUNS, "held")


def both(paths: dict[str, Path], pair: str) -> tuple[dict, dict]:
    """What came of the runs whose base is in the model's dtype, and in codes."""
    weights, codes = (load_result(paths[pair.format(base)]) for base in ("weights", "codes"))
    return weights, codes


def assert_same_training(weights: dict, codes: dict) -> None:
    """Every loss, every adapter and scale, and what each layer multiplies, bit for bit."""
    assert weights["losses"] == codes["losses"] and weights["norms"] == codes["norms"]
    assert weights["weights"].keys() == codes["weights"].keys()
    held = [name for name, value in codes["weights"].items() if value.shape != weights["weights"][name].shape]
    assert {name.rpartition(".")[2] for name in held} == {"weight"} and len(held) >= 7
    for name in codes["weights"].keys() - held:
        assert torch.equal(weights["weights"][name], codes["weights"][name]), name
    assert any(value.any() for name, value in codes["weights"].items() if name.endswith("lora_b"))
    for name, used in weights["seen"]["used"].items():
        assert torch.equal(used, codes["seen"]["used"][name]), name


@pytest.mark.parametrize("pair", PAIRS)
def test_training_and_export_are_those_beside_the_base_in_the_models_dtype(paths, pair):
    """Files are equal byte for byte, and the base in them is the checkpoint that was read."""
    assert_same_training(*both(paths, pair))
    weights, codes = (paths[pair.format(base)].with_suffix("") / "export" for base in ("weights", "codes"))
    names = ("model.safetensors", "adapter/adapter_model.safetensors")
    (base, adapter), (again, same) = ([(one / name).read_bytes() for name in names] for one in (weights, codes))
    assert base == again
    assert load(adapter).keys() == load(same).keys()
    assert all(torch.equal(value, load(same)[key]) for key, value in load(adapter).items())
    if "2" not in pair and "made" not in pair:  # in fp32 what is not quantized there is written in fp32
        source = paths[pair.partition("_")[0]].with_suffix("") / "export"
        assert (source / "model.safetensors").read_bytes() == again


@pytest.mark.parametrize("pair", ["merged_{}_3", "merged_experts_{}_2"])
def test_adapters_are_merged_into_codes(paths, pair):
    """Training and export are those of a base in the model's dtype; the export has other codes than the checkpoint."""
    assert_same_training(*both(paths, pair))
    ours, theirs = (paths[pair.format(base)].with_suffix("") / "export" for base in ("codes", "weights"))
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    base = load(
        (paths["experts" if "experts" in pair else "mixed"].with_suffix("") / "export/model.safetensors").read_bytes()
    )
    found = load((ours / "model.safetensors").read_bytes())
    same = {key: torch.equal(value.view(torch.uint8), base[key].view(torch.uint8)) for key, value in found.items()
            if key in base and value.dtype == base[key].dtype and "_proj" in key}  # fmt: skip
    scales = [key for key in found if key.endswith("weight_scale") and "_proj" in key]
    assert scales and all(torch.equal(found[key].float(), base[key].float()) for key in scales)
    assert not all(equal for key, equal in same.items() if key.endswith("weight_packed"))


def test_adapters_of_zero_give_the_file_back(paths):
    """Byte for byte, as read, after steps that move nothing."""
    source, still = (paths[name].with_suffix("") / "export" for name in ("mixed", "still_3"))
    assert (source / "model.safetensors").read_bytes() == (still / "model.safetensors").read_bytes()


@pytest.mark.parametrize("pair", PAIRS)
def test_a_rank_holds_the_bytes_of_its_codes(paths, pair):
    """Of each weight, by arithmetic; and nothing else is another size."""
    weights, codes = both(paths, pair)
    ranks = 2 if pair.endswith("3") else 1
    total = {"weights": 0, "codes": 0}
    for name, size in codes["seen"]["bytes"].items():
        plain, bits = weights["seen"]["bytes"][name], codes["seen"]["bits"].get(name)
        expected = plain
        if bits is not None:
            expected = weights["weights"][name].numel() * bits / 8 / ranks
            total["weights"], total["codes"] = total["weights"] + plain, total["codes"] + size
        assert size == pytest.approx(expected, abs=8), name
    assert 0 < total["codes"] < total["weights"] / 2


def test_codes_that_are_made_are_those_of_an_export(paths):
    """Every loss and adapter, and what is held, bit for bit as beside the export that two steps begin with; scales are
    there as they are stored. And it does not matter who reads the weights."""
    made, read = (load_result(paths[name]) for name in ("made_codes_3", "made_read_3"))
    assert made["losses"] == read["losses"] and made["norms"] == read["norms"]
    assert made["weights"].keys() == read["weights"].keys()
    for name, value in made["weights"].items():
        other = read["weights"][name]
        stored = [value, value.bfloat16().float()] if name.endswith("weight_s0") else [value]
        assert any(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one in stored), name
    other, rank0 = (load_result(paths[name]) for name in ("made_codes_2", "made_rank0_3"))
    for name, value in other["weights"].items():
        if "lora" not in name:
            assert torch.equal(value.view(torch.uint8), rank0["weights"][name].view(torch.uint8)), name


@pytest.mark.parametrize("kind", ("mixed", "made"))
def test_a_resumed_run_goes_on_bit_for_bit(paths, kind):
    straight, resumed = load_result(paths[f"{kind}_codes_3"]), load_result(paths[f"{kind}_begun_3"])
    assert resumed["losses"] == straight["losses"][2:]
    for name, value in straight["weights"].items():
        assert torch.equal(value.view(torch.uint8), resumed["weights"][name].view(torch.uint8)), name


@pytest.mark.full
def test_other_configurations_train_as_beside_weights(tmp_path, paths):
    """Offload of the optimizer and of parameters, and hpZ, whose copies of codes must be those of now."""
    models = {"mixed": paths["mixed"].with_suffix("") / "export"}
    configurations = ("zero2_offload", "zero3_offload", "zero3_offload_param", "zero3_hpz")  # hpZ last
    runs: Runs = {}
    for shipped in configurations:
        common = {**SOURCE, **NO_EXPORT}
        common["deepspeed"] = write_ds_config(tmp_path, f"every_{shipped}", shipped)
        for base in ("weights", "codes"):
            runs[f"{base}_{shipped}"] = ("mixed", 3, "bfloat16", {**common, "adapter": {"base": BASES[base]}})
    written = train_all(tmp_path, runs, "held", models)
    for shipped in configurations:
        weights, codes = both(written, f"{{}}_{shipped}")
        assert codes["seen"]["bits"], shipped
        assert_same_training(weights, codes)


@pytest.mark.full
def test_codes_of_every_scheme_are_made_on_every_stage(tmp_path):
    """All that can be made of rows without a scale of inputs that is measured; dense layers and experts."""
    names = [name for name, one in SCHEMES.items() if can_quantize_on_load(one.weights) and one.stored_input is None]
    kinds = ("qwen3", "qwen3_moe")
    models = {kind: tiny_checkpoint(tmp_path / kind, kind, wide=True, layers=MANY) for kind in kinds}
    runs: Runs = {}
    for part, quant in enumerate(every_scheme(names)):
        # Of eight bits and a zero point bf16 does not give all codes back, which is refused.
        dtype = "float32" if any(rule["scheme"] == "w8a16_asym" for rule in quant["rules"]) else "bfloat16"
        for stage in range(4):
            kind = kinds[(part + stage) % 2]
            for base in ("weights", "codes"):
                adapter = {"base": BASES[base], **(ATTENTION if kind == "qwen3_moe" else {})}
                sections = {"adapter": adapter, "quant": {**quant, "calibration_batches": 0}, **MAKE}
                runs[f"{base}_{part}_{stage}"] = (kind, stage, dtype, sections)
    written = train_all(tmp_path, runs, "held", models)
    for name in [name for name in written if name.startswith("codes")]:
        weights, codes = both(written, name.replace("codes", "{}"))
        assert len(codes["seen"]["bits"]) > MANY, name
        assert_same_training(weights, codes)
