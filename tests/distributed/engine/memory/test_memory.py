"""Predicted memory and collectives against those of real steps on two ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from engine.config.reading import load_recipe
from engine.memory.plan import Planner
from launch.memory import main
from model.build import build_model
from model.checkpoint.load import load_weights
from model.save import export_model
from model.scales import renew_weight_scales
from quant import SCHEMES, prepare
from tests.distributed.launcher import run_ranks
from tests.tiny import TEXT, tiny_tokenizer

RANKS = 2
SCRIPT = Path(__file__).parent / "scripts" / "memory.py"
SIZES = {"hidden_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 40}
SIZES |= {"vocab_size": 1201, "max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": None}
EVERYTHING = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 50_000_000}


def checkpoint(directory: Path, kind: str) -> Path:
    """Large enough that no bookkeeping of a few kilobytes shows."""
    if kind == "dense":
        model = Qwen3ForCausalLM(Qwen3Config(intermediate_size=416, **SIZES))
    else:
        experts = {"moe_intermediate_size": 96, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(intermediate_size=416, **experts, **SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1) if parameter.dim() == 1 else parameter.normal_(0, 0.02)
    model.to(torch.bfloat16).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def coded(source: Path, directory: Path) -> None:
    """The checkpoint in int4."""
    options = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    model = build_model(source, {"bf16": {"enabled": True}}, **options)
    load_weights(model, source, progress=False)
    quantization = prepare(model, SCHEMES["w4a16_g32"], learn_weight_scale=False, learn_input_scale=False)
    renew_weight_scales(quantization)
    export_model(model, quantization, source, directory)


def recipe(directory: Path, kind: str, stage: int, sections: dict[str, dict] | None = None, **zero: Any) -> Path:
    """A recipe of full rows and small buckets, so that no bucket hides what is compared; ``sections`` in place of its
    own values."""
    sections = sections or {}
    keys = [*zero, *(key for section in sections.values() for key in section)]
    name = f"{kind}{stage}{''.join(f'_{key}' for key in keys)}"
    text = directory / "text.txt"
    if not text.exists():
        text.write_text(TEXT * 400)
    options = {"stage": stage, "reduce_bucket_size": 150_000, **zero}
    if stage == 3:
        options = {"stage3_prefetch_bucket_size": 100_000, "stage3_param_persistence_threshold": 0, **options}
    ds_config = directory / f"{name}.json"
    ds_config.write_text(
        json.dumps(
            {"zero_optimization": options, "zero_force_ds_cpu_optimizer": False, "comms_logger": {"enabled": True}}
        )
    )
    path = directory / f"{name}.yaml"
    contents = {
        "model": {"path": str(directory / kind)},
        "data": {"train": [str(text)], "kind": "text", "max_length": 128, "micro_batch_size": 2},
        "train": {"steps": 4, "quant_stats_every": 0, "gradient_accumulation_steps": 1},
        "quant": {"initial_input_scale": 0.05, "calibration_batches": 0},
        "export": {"enabled": False},
        "deepspeed": str(ds_config),
        "output_dir": str(directory / name),
    }
    contents |= {section: {**contents.get(section, {}), **values} for section, values in sections.items()}
    path.write_text(yaml.safe_dump(contents))
    return path


def measured(path: Path) -> dict:
    """What the ranks wrote."""
    return json.loads(Path(load_recipe(path).output_dir, "measured.json").read_text())


def compare(path: Path, rel: float = 0.08) -> None:
    """The prediction against the step that was measured; ``rel``: of the peak."""
    recipe, found = load_recipe(path), measured(path)
    predicted = Planner(recipe, fused_optimizer=False).predict(recipe.deepspeed, RANKS)
    # Partitions, flat buffers and their padding are arithmetic: what the issue allows is 5%.
    for item, size in found["items"].items():
        assert predicted.held.device[item] + predicted.held.host[item] == pytest.approx(size, rel=0.005), (
            path.stem,
            item,
        )
    # 15% is asked for. Measured: 1% to 3% more than there was, as operators free their inputs a little earlier.
    peak = predicted.together
    print(f"{path.stem}: peak predicted {peak:,}, measured {found['peak']:,}, {peak / found['peak'] - 1:+.1%}")
    assert peak == pytest.approx(found["peak"], rel=rel), (path.stem, predicted.moments)
    calls, sizes = sent(found["collectives"])
    assert predicted.cost.traffic.calls == calls, path.stem
    assert predicted.cost.traffic.bytes == sizes, path.stem


def sent(log: dict[str, list[list[int]]]) -> tuple[dict[str, int], dict[str, int]]:
    """Calls and bytes by kind from DeepSpeed's log, which has the size of what a rank puts into an all-gather."""
    calls: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for name, entries in log.items():
        kind = name.removesuffix("_into_tensor").removesuffix("_tensor")
        calls[kind] = sum(count for _, count in entries)
        sizes[kind] = sum(size * count for size, count in entries) * (RANKS if kind == "all_gather" else 1)
    return calls, sizes


@pytest.mark.full
def test_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "moe", "moe")
    path = recipe(tmp_path, "moe", 3)
    run_ranks(SCRIPT, str(path))
    compare(path)
    main(["--config", str(path), "--measured", str(tmp_path / "moe3" / "memory.json")])
    table = capsys.readouterr().out
    gradients = measured(path)["items"]["gradients"]
    assert f"{gradients:,} | " in table and "| all else at the peak |" in table


@pytest.mark.full
def test_prediction_on_every_stage(tmp_path: Path) -> None:
    for kind in ("dense", "moe"):
        checkpoint(tmp_path / kind, kind)
    paths = [recipe(tmp_path, kind, stage) for stage in (0, 1, 2, 3) for kind in ("dense", "moe")]
    # Parameters that stay whole, as at DeepSpeed's own threshold; no prefetch; prefetch of everything, nothing reused.
    paths.append(recipe(tmp_path, "dense", 3, stage3_param_persistence_threshold=100_000))
    paths.append(recipe(tmp_path, "moe", 3, stage3_prefetch_bucket_size=0))
    paths.append(recipe(tmp_path, "dense", 3, offload_optimizer={"device": "cpu"}))
    paths.append(recipe(tmp_path, "moe", 3, **EVERYTHING))
    codes = {"quant": {"quantized_all_gather": True}}
    paths += [recipe(tmp_path, kind, 3, codes) for kind in ("dense", "moe")]
    paths.append(recipe(tmp_path, "dense", 3, codes, stage3_param_persistence_threshold=50_000))
    # From codes: what training holds is what it is from weights.
    coded(tmp_path / "dense", tmp_path / "coded")
    source = {"quant": {"scheme": "source", "initial_input_scale": None}}
    paths += [recipe(tmp_path, "coded", stage, source) for stage in (0, 3)]
    run_ranks(SCRIPT, *map(str, paths))
    for path in paths:
        compare(path)


@pytest.mark.full
def test_a_student_that_is_its_own_teacher(tmp_path: Path) -> None:
    """Its first forward leaves most parameters gathered for the second: two collectives more than without a teacher.
    Where DeepSpeed takes a forward without backward for a step, there are six times as many."""
    learnable = {"weight": False, "act_scale": True}
    sections = {"loss": {"teacher": "self", "kd_weight": 1.0}, "learnable": learnable}
    paths = []
    for kind in ("dense", "moe"):
        checkpoint(tmp_path / kind, kind)
        paths.append(recipe(tmp_path, kind, 3, sections))
    # Its own forward is not quantized: codes travel for the student's alone.
    learnable = {**learnable, "weight_scale": False}
    paths.append(
        recipe(
            tmp_path,
            "dense",
            3,
            {**sections, "learnable": learnable, "quant": {"quantized_all_gather": True}},
            **EVERYTHING,
        )
    )
    run_ranks(SCRIPT, *map(str, paths))
    for path in paths:
        compare(path)


@pytest.mark.full
def test_what_codes_take_on_their_way(tmp_path: Path) -> None:
    """Rows are short and weights do not train, so that at the peak most is what is gathered: the bytes in flight, and
    the codes copied out of them, which stay codes."""
    checkpoint(tmp_path / "dense", "dense")
    quant = {"quantized_all_gather": True, "scheme": "fp8_dynamic", "initial_input_scale": None}  # a scale per row
    learnable = {"weight": False, "weight_scale": False, "norm": True}
    data = {"max_length": 16, "micro_batch_size": 1}
    path = recipe(tmp_path, "dense", 3, {"quant": quant, "learnable": learnable, "data": data}, **EVERYTHING)
    run_ranks(SCRIPT, str(path))
    compare(path, rel=0.02)


@pytest.mark.full
def test_adapters(tmp_path: Path) -> None:
    """On every stage: frozen weights, and what trains on them; small parameters that stay whole, adapters not."""
    checkpoint(tmp_path / "dense", "dense")
    sections = {"adapter": {"kind": "lora", "rank": 8}, "learnable": {"weight": False}}
    paths = [recipe(tmp_path, "dense", stage, sections) for stage in (0, 1, 2, 3)]
    paths.append(recipe(tmp_path, "dense", 3, sections, stage3_param_persistence_threshold=100_000))
    run_ranks(SCRIPT, *map(str, paths))
    for path in paths:
        compare(path)


@pytest.mark.full
def test_a_base_that_is_held_as_codes(tmp_path: Path) -> None:
    """On stages 1 and 3, of int4 in groups of 32: half a byte per weight and four for each scale; and as many
    collectives as of the same base in bf16, or fewer. An optimizer that has nothing to update hides nothing. Codes that
    are made of the original take what those of its export take."""
    checkpoint(tmp_path / "dense", "dense")
    sections = {
        "quant": {"scheme": "source", "initial_input_scale": None},
        "learnable": {"weight": False, "weight_scale": False},
        "export": {"format": "peft"},
    }
    paths = {}
    for base in ("weights", "codes"):
        adapter = {"kind": "lora", "rank": 8, "merge": False, "base": base}
        coded(tmp_path / "dense", tmp_path / base / "coded")
        for stage in (1, 3):
            paths[base, stage] = recipe(tmp_path / base, "coded", stage, {**sections, "adapter": adapter})
    made = {"adapter": adapter, "quant": {"scheme": "w4a16_g32", "initial_input_scale": None}}
    paths["made", 3] = recipe(tmp_path, "dense", 3, {**made, "learnable": sections["learnable"]})
    run_ranks(SCRIPT, *map(str, paths.values()))
    for path in paths.values():
        compare(path)
    assert measured(paths["made", 3])["items"] == measured(paths["codes", 3])["items"]
    config = Qwen3Config(intermediate_size=416, **SIZES)
    attention, hidden = config.num_attention_heads * config.head_dim, config.hidden_size
    pairs = config.num_key_value_heads * config.head_dim
    quantized = 4 * hidden * (2 * attention + 2 * pairs + 3 * config.intermediate_size)
    for stage, ranks in ((1, 1), (3, 2)):
        weights, codes = (measured(paths[base, stage]) for base in ("weights", "codes"))
        saved = weights["items"]["parameters"] - codes["items"]["parameters"]
        assert saved == pytest.approx(1.5 * quantized / ranks, rel=0.001)
        for kind, count in sent(codes["collectives"])[0].items():
            assert count <= sent(weights["collectives"])[0][kind], kind
