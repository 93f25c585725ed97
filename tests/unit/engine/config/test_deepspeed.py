"""DeepSpeed's configuration: what the recipe fills in; DeepSpeed trains with every shipped file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from engine.config.deepspeed import (
    BROKEN,
    BROKEN_ZERO,
    CHECKED,
    DsConfigError,
    config_path,
    keys_of_deepspeed,
    remarks,
    resolve,
    teacher_config,
)
from tests.lib.root import ROOT
from tests.unit.engine.config.ds_files import SHIPPED, recipe, resolve_file


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_shipped_files_take_the_recipes_values(name: str, dtype: str) -> None:
    config = resolve(recipe(name, dtype), world_size=7, local_size=7)
    stage = 3 if name == "zeropp" else int(name[4])
    assert config["zero_optimization"]["stage"] == stage
    hpz = {"zero3_hpz": 7, "zeropp": 7}.get(name)
    assert config["zero_optimization"].get("zero_hpz_partition_size") == hpz
    assert config["train_micro_batch_size_per_gpu"] == 3
    assert config["gradient_accumulation_steps"] == 5
    assert config["train_batch_size"] == 3 * 5 * 7
    # Written out although it is 0: DeepSpeed clips at 1.0 when the key is missing.
    assert config["gradient_clipping"] == 0.0
    assert config["bf16"] == {"enabled": dtype == "bfloat16"}
    assert config["fp16"] == {"enabled": dtype == "float16"}
    # DeepSpeed refuses fp32 accumulation of 16-bit gradients at stage 0; with fp32 parameters its default is fp32.
    expected = {"grad_accum_dtype": "fp32"} if dtype != "float32" and stage > 0 else {}
    assert config["data_types"] == expected
    assert "auto" not in json.dumps(config)
    # Otherwise DeepSpeed demands its own CPUAdam, which compiles at first use.
    assert config.get("zero_force_ds_cpu_optimizer") is (False if "offload" in name else None)


def test_an_empty_section_and_a_missing_key_are_filled_too(tmp_path: Path) -> None:
    bare = resolve_file(tmp_path, {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    assert bare["bf16"] == {"enabled": True}
    assert bare["data_types"] == {"grad_accum_dtype": "fp32"}
    assert bare["zero_force_ds_cpu_optimizer"] is False
    assert bare["gradient_clipping"] == 0.0


def test_equal_values_and_foreign_keys_are_kept(tmp_path: Path) -> None:
    given = {
        "train_batch_size": 30,
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0,
        "bf16": {"enabled": True, "immediate_grad_update": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 12345, "stage3_prefetch_bucket_size": "auto"},
        "steps_per_print": 10,
        "wall_clock_breakdown": True,
    }
    config = resolve_file(tmp_path, given)
    for key, value in given.items():
        assert config[key] == value


def test_deepspeed_is_silent_by_default() -> None:
    """The loop does the printing; DeepSpeed prints only what a file asks for."""
    config = DeepSpeedConfig(resolve(recipe("zero0"), world_size=1))
    assert config.steps_per_print is None
    assert config.wall_clock_breakdown is False


def test_teacher(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    student = resolve_file(tmp_path, {"zero_optimization": zero, "csv_monitor": {"enabled": True}})
    before = json.dumps(student)
    teacher = teacher_config(student)
    assert teacher["zero_optimization"] == {"stage": 3, "offload_param": {"device": "cpu"}}
    assert teacher["bf16"] == {"enabled": True} and teacher["fp16"] == {"enabled": False}
    assert teacher["train_batch_size"] == student["train_batch_size"]
    assert not {"csv_monitor", "data_types", "zero_force_ds_cpu_optimizer"} & set(teacher)
    teacher["zero_optimization"]["offload_param"]["device"] = "nvme"
    assert json.dumps(student) == before


@pytest.mark.parametrize(("name", "size"), [("LOCAL_WORLD_SIZE", 4), ("LOCAL_SIZE", 2)])
def test_hpz_takes_the_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch, name: str, size: int) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    with pytest.raises(DsConfigError, match="the launcher sets neither LOCAL_WORLD_SIZE nor LOCAL_SIZE"):
        resolve(recipe("zero3_hpz"), world_size=8)
    monkeypatch.setenv(name, str(size))
    assert resolve(recipe("zero3_hpz"), world_size=8)["zero_optimization"]["zero_hpz_partition_size"] == size
    told = resolve(recipe("zero3_hpz"), world_size=16, local_size=8)
    assert told["zero_optimization"]["zero_hpz_partition_size"] == 8


def test_lists_name_keys_of_deepspeed() -> None:
    """A new DeepSpeed may no longer read a key that is listed here."""
    assert (CHECKED | BROKEN.keys()) - keys_of_deepspeed() == set()
    names = {name for key, field in DeepSpeedZeroConfig.model_fields.items() for name in (key, field.alias)}
    assert BROKEN_ZERO.keys() - names == set()


# As published: the transformers documentation of DeepSpeed, and examples/deepspeed of LLaMA-Factory.
FP16 = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
SIZES = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
STAGE_3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
CPU = {"device": "cpu", "pin_memory": True}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}
PUBLISHED: dict[str, dict[str, Any]] = {
    "transformers zero2": {
        "fp16": {**FP16, "auto_cast": False},
        "optimizer": ADAMW,
        "scheduler": WARMUP,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": CPU,
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 2e8,
            "contiguous_gradients": True,
        },
        **SIZES,
    },
    "transformers zero3": {
        "fp16": FP16,
        "bf16": {"enabled": "auto"},
        "optimizer": ADAMW,
        "scheduler": WARMUP,
        "zero_optimization": {**STAGE_3, "offload_optimizer": CPU, "offload_param": CPU},
        **SIZES,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    },
    "LLaMA-Factory z0": {
        **SIZES,
        "zero_allow_untested_optimizer": True,
        "fp16": FP16,
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 0,
            "allgather_partitions": True,
            "allgather_bucket_size": 5e8,
            "overlap_comm": False,
            "reduce_scatter": True,
            "reduce_bucket_size": 5e8,
            "contiguous_gradients": True,
            "round_robin_gradients": True,
        },
    },
    "LLaMA-Factory z3": {
        **SIZES,
        "zero_allow_untested_optimizer": True,
        "fp16": FP16,
        "bf16": {"enabled": "auto"},
        "zero_optimization": {**STAGE_3, "overlap_comm": False},
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_published_files_are_taken(tmp_path: Path, name: str, dtype: str) -> None:
    config = resolve_file(tmp_path, PUBLISHED[name], dtype=dtype)
    assert not {"optimizer", "scheduler"} & config.keys()
    said = [line.removeprefix(f"{tmp_path}/mine.json: ") for line in remarks(str(tmp_path / "mine.json"))]
    owned = ["optimizer: has no effect: the recipe owns it", "scheduler: has no effect: the recipe owns it"]
    hysteresis = ["fp16.hysteresis: has no effect: every overflow halves the loss scale"]
    assert said == [*(owned if "optimizer" in PUBLISHED[name] else []), *hysteresis]


def test_keys_that_are_handed_on_are_said(tmp_path: Path) -> None:
    config = resolve_file(tmp_path, {"zero_optimization": {"stage": 1}, "use_data_before_expert_parallelism": False})
    assert config["use_data_before_expert_parallelism"] is False
    (line,) = remarks(str(tmp_path / "mine.json"))
    assert line.endswith("mine.json: use_data_before_expert_parallelism: handed on to DeepSpeed as it is, untried")


def test_the_recipes_own_values_may_stand_in_the_optimizer(tmp_path: Path) -> None:
    own = recipe().optim
    params = {"lr": own.lr, "betas": list(own.betas), "eps": own.eps, "weight_decay": own.weight_decay}
    given = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": params}}
    assert "optimizer" not in resolve_file(tmp_path, given)


def test_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_path("zero3") == ROOT / "ds_configs" / "zero3.json"
    assert sorted(path.stem for path in (ROOT / "ds_configs").glob("*.json")) == sorted(SHIPPED)
    with pytest.raises(DsConfigError, match=f"expected one of {', '.join(SHIPPED)}, or the path"):
        config_path("zero4")
    with pytest.raises(DsConfigError, match="there is no such file in "):
        config_path("mine.json")
    (tmp_path / "mine.json").write_text("{}")
    assert config_path("mine.json") == Path("mine.json")


TRAIN = """
import copy, json, sys
import deepspeed, torch
from model.zero import init_process_group

init_process_group()
for name, config in json.loads(sys.argv[1]).items():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    assert engine.gradient_clipping() == 0.0
    for _ in range(2 * config["gradient_accumulation_steps"]):
        loss = engine(torch.ones(1, 8, dtype=torch.bfloat16)).float().sum()
        engine.backward(loss)
        engine.step()
    assert engine.global_steps == 2
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        for key, value in model.state_dict().items():
            assert value.isfinite().all() and not torch.equal(value.cpu().float(), before[key]), (name, key)
    print("trained with", name)
"""


def test_deepspeed_trains_with_every_shipped_file() -> None:
    configs = {}
    for name in SHIPPED:
        made = recipe(name)
        made.data.micro_batch_size = 1
        configs[name] = resolve(made, world_size=1)
    environment = {
        "DS_ACCELERATOR": "cpu",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    run = subprocess.run(
        [sys.executable, "-c", TRAIN, json.dumps(configs)],
        cwd=ROOT,
        env=os.environ | environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert [line.split()[-1] for line in run.stdout.splitlines() if line.startswith("trained with")] == list(SHIPPED)
