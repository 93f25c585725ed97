"""DeepSpeed's configuration: what the recipe fills in; DeepSpeed trains with every shipped file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from engine.recipe.ds_config import ALLOWED, FROM_RECIPE, REFUSED, DsConfigError, config_path, resolve, teacher_config
from tests.root import ROOT
from tests.unit.engine.recipe.ds_files import SHIPPED, recipe, resolve_file


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


def test_every_key_that_deepspeed_reads_is_sorted() -> None:
    """A new DeepSpeed may read new keys, or no longer read one: each is to be allowed or refused on purpose."""

    class Recorder(dict):
        asked: set[str] = set()  # noqa: RUF012 - shared by the copies that DeepSpeed makes, on purpose

        def __copy__(self) -> "Recorder":
            return Recorder(self)

        def get(self, key: str, default: Any = None) -> Any:
            self.asked.add(key)
            return super().get(key, default)

        def __getitem__(self, key: str) -> Any:
            self.asked.add(key)
            return super().__getitem__(key)

        def __contains__(self, key: object) -> bool:
            self.asked.add(str(key))
            return super().__contains__(key)

        def keys(self) -> Any:
            return self

    from deepspeed.runtime import config as deepspeed_config

    DeepSpeedConfig(Recorder(train_batch_size=1))
    # Read only to say that the feature is gone; to this project they are unknown keys.
    removed = set(deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS) | {"curriculum_learning", "sequence_parallel_size"}
    assert ALLOWED - Recorder.asked == set()
    assert set(REFUSED) - Recorder.asked == set()
    assert Recorder.asked - removed - ALLOWED - set(REFUSED) == set()
    assert not ALLOWED & set(REFUSED)
    assert FROM_RECIPE < ALLOWED


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
