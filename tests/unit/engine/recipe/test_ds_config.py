"""DeepSpeed's configuration: what the recipe fills in, what is refused; DeepSpeed trains with every shipped file."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from engine.recipe.ds_config import ALLOWED, FROM_RECIPE, REFUSED, DsConfigError, config_path, resolve, teacher_config
from engine.recipe.recipe import Recipe
from engine.recipe.sections import DataRecipe, ModelRecipe, TrainRecipe
from tests.root import ROOT

SHIPPED = (
    "zero0",
    "zero1",
    "zero2",
    "zero2_offload",
    "zero3",
    "zero3_hpz",
    "zero3_offload",
    "zero3_offload_param",
    "zeropp",
)


def recipe(deepspeed: str = "zero3", dtype: Any = "bfloat16") -> Recipe:
    made = Recipe(
        model=ModelRecipe(path="model", dtype=dtype),
        data=DataRecipe(train=["train.jsonl"], micro_batch_size=3),
        train=TrainRecipe(steps=10, gradient_accumulation_steps=5),
        output_dir="out",
        deepspeed=deepspeed,
    )
    made.optim.grad_clip = 0.0
    return made


def resolve_file(tmp_path: Path, content: Any, *, dtype: Any = "bfloat16", world_size: int = 2) -> dict[str, Any]:
    """What comes of a file with this content: text as it is, anything else as JSON."""
    path = tmp_path / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return resolve(recipe(str(path), dtype), world_size)


def refusal(tmp_path: Path, content: Any, *, dtype: Any = "bfloat16") -> list[str]:
    """The problems with such a file, without the file's name, which every line must open with."""
    with pytest.raises(DsConfigError) as error:
        resolve_file(tmp_path, content, dtype=dtype)
    lines = str(error.value).splitlines()
    path = str(tmp_path / "mine.json")
    assert all(line.startswith(path) for line in lines), lines
    return [line.removeprefix(path) for line in lines]


# ----------------------------------------------------------------------------------------------------------- filling


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


# ---------------------------------------------------------------------------------------------------------- refusing


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("train_micro_batch_size_per_gpu", "is 4, but data.micro_batch_size is 3"),
        ("gradient_accumulation_steps", "is 4, but train.gradient_accumulation_steps is 5"),
        ("train_batch_size", "is 4, but data.micro_batch_size * train.gradient_accumulation_steps * ranks is 30"),
        ("gradient_clipping", "is 4, but optim.grad_clip is 0.0"),
    ],
)
def test_contradictions_name_both_keys_and_values(tmp_path: Path, key: str, said: str) -> None:
    lines = refusal(tmp_path, {key: 4, "zero_optimization": {"stage": 1}})
    assert lines == [f': {key} {said}: write "auto", or make them equal']


def test_dtype_contradictions(tmp_path: Path) -> None:
    zero = {"zero_optimization": {"stage": 1}}
    assert refusal(tmp_path, zero | {"bf16": {"enabled": False}}) == [
        ": bf16.enabled is False, but model.dtype is 'bfloat16': write \"auto\", or make them equal"
    ]
    assert refusal(tmp_path, zero | {"bf16": {"enabled": True}}, dtype="float32") == [
        ": bf16.enabled is True, but model.dtype is 'float32': write \"auto\", or make them equal"
    ]


def test_fp32_accumulation_at_stage_0(tmp_path: Path) -> None:
    given = {"zero_optimization": {"stage": 0}, "data_types": {"grad_accum_dtype": "fp32"}}
    (line,) = refusal(tmp_path, given)
    assert line.startswith(": data_types.grad_accum_dtype is 'fp32': stage 0 accumulates in bf16 only")
    assert resolve_file(tmp_path, given, dtype="float32")["data_types"] == {"grad_accum_dtype": "fp32"}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_other_accumulation_in_fp32(tmp_path: Path, stage: int) -> None:
    given = {"zero_optimization": {"stage": stage}, "data_types": {"grad_accum_dtype": "int8"}}
    (line,) = refusal(tmp_path, given, dtype="float32")
    assert line.startswith(": data_types.grad_accum_dtype is 'int8', expected fp32 (the default): DeepSpeed would add")


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("zero_optimisation", "unknown key, which DeepSpeed would ignore in silence; did you mean zero_optimization?"),
        ("gradient_cliping", "unknown key, which DeepSpeed would ignore in silence; did you mean gradient_clipping?"),
        ("qqq", "unknown key, which DeepSpeed would ignore in silence; expected one of aio, bf16,"),
        ("optimizer", "the recipe owns the optimizer: set optim.lr,"),
        ("scheduler", "the recipe owns the schedule: set optim.schedule,"),
        ("activation_checkpointing", "set train.activation_checkpointing in the recipe"),
        ("gradient_allreduce_op", "leave it out: the loop scales the loss for DeepSpeed's default"),
    ],
)
def test_top_level_keys(tmp_path: Path, key: str, said: str) -> None:
    (line,) = refusal(tmp_path, {key: {}, "zero_optimization": {"stage": 3}})
    assert line.startswith(f": {key}: {said}")


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


# Values that DeepSpeed takes as they are and that end in a traceback after the process group, or train another model.
VALUES: list[tuple[dict[str, Any], str]] = [
    ({"steps_per_print": "abc"}, "steps_per_print: 'abc', expected a number of steps, 1 or more, or null"),
    ({"steps_per_print": True}, "steps_per_print: True, expected a number"),
    ({"wall_clock_breakdown": "no"}, "wall_clock_breakdown: 'no', expected true or false"),
    ({"zero_allow_untested_optimizer": 1}, "zero_allow_untested_optimizer: 1, expected true or false"),
    ({"log_level": "loud"}, "log_level: 'loud', expected debug, info, warning, error or critical"),
    ({"log_level": ["info"]}, "log_level: ['info'], expected debug"),
    ({"communication_data_type": "int8"}, "communication_data_type: 'int8', expected fp16, bf16, fp32 or null"),
    (
        {"data_types": {"param_dtype": "fp32"}},
        "data_types.param_dtype: leave it out; expected grad_accum_dtype at",
    ),
    ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal: leave it out; expected tag_validation at"),
    ({"checkpoint": {"tag_validation": "x"}}, "checkpoint.tag_validation: 'x', expected Ignore, Warn or Fail"),
    ({"checkpoint": {"tag_validation": False}}, "checkpoint.tag_validation: False, expected Ignore, Warn or Fail"),
    ({"checkpoint": 3}, "checkpoint: 3, expected an object"),
    ({"timers": []}, "timers: [], expected an object"),
    ({"timers": {"throughput": 3}}, "timers.throughput: 3, expected an object with enabled and synchronized"),
    ({"flops_profiler": {"enabled": "maybe"}}, "flops_profiler.enabled: 'maybe', expected true or false"),
    ({"flops_profiler": {"profile_steps": 3}}, "flops_profiler.profile_steps: leave it out; expected enabled, "),
    ({"aio": {"block_size": "1M"}}, "aio.block_size: '1M', expected a whole number, 1 or more"),
    (
        {"comms_logger": {"enabled": True, "prof_ops": 3}},
        "comms_logger.prof_ops: Input should be a valid list",
    ),
    ({"tensorboard": {"enabled": "x"}}, "tensorboard.enabled: Input should be a valid boolean"),
    ({"csv_monitor": {"a": 1}}, "csv_monitor.a: Extra inputs are not permitted, found 1"),
    (
        {"bf16": {"bf16_master_weights_and_grads": True}},
        "bf16.bf16_master_weights_and_grads: leave it out: the opt",
    ),
    ({"fp16": {"initial_scale_power": 5000}}, "fp16.initial_scale_power: 5000, expected at most 32"),
    ({"fp16": {"loss_scale": math.inf}}, "fp16.loss_scale: inf, expected at most 4.29497e+09"),
]
ZERO_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"elastic_checkpoint": True}, "elastic_checkpoint: leave it out: DeepQAT has not been tried with it"),
    ({"zenflow": {}}, "zenflow: leave it out"),
    ({"leaf_module": 3}, "leaf_module: leave it out"),
    ({"sub_group_size": 0}, "sub_group_size: 0, expected 1 to 2^40 elements"),
    ({"reduce_bucket_size": 10**30}, f"reduce_bucket_size: {10**30}, expected 1 to 2^40 elements"),
    ({"stage3_prefetch_bucket_size": -1}, "stage3_prefetch_bucket_size: -1, expected 0 to 2^40 elements"),
    ({"reduce_bucket_size": "many"}, "reduce_bucket_size: Input should be a valid integer"),
]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{\n"bf16": {},\n"zero_optimization" {}\n}', ", line 3: not JSON"),
        ("", ", line 1: not JSON"),
        ("[" * 100_000, ": nested too deep for a configuration"),
        ('{"steps_per_print": ' + "9" * 5000 + "}", ": not JSON (Exceeds the limit"),
        ("[1]", ": expected an object with DeepSpeed's keys, found list"),
        ('{"bf16": {}, "bf16": {}}', ": 'bf16' occurs twice in one object"),
        ('{"zero_optimization": {"stage": 1, "stage": 3}}', ": 'stage' occurs twice in one object"),
        ({"zero_optimization": 3}, ": zero_optimization: 3, expected an object"),
        ({"bf16": True}, ": bf16: True, expected an object"),
        ({}, ": zero_optimization.stage: missing, expected 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "auto"}}, ": zero_optimization.stage: missing, expected 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 7}}, ": zero_optimization.stage: Input should be 0, 1, 2"),
        ({"zero_optimization": {"stage": True}}, ": zero_optimization.stage: True, expected 0, 1, 2 or 3"),
        (
            {"zero_optimization": {"stage": 3, "load_from_fp32_weights": False}},
            ": zero_optimization.load_from_fp32_weights: leave it out: a resumed run would go on from rounded weights",
        ),
        *(
            (
                {"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": dtype}},
                f": data_types.grad_accum_dtype is {dtype!r}, expected fp32 (the default) or bf16",
            )
            for dtype in ("int8", "fp16", "fp64", None, 32)
        ),
        ({"zero_optimization": {"stage": 3, "stge": 1}}, ": zero_optimization.stge: Extra inputs are not permitted"),
        ({"zero_optimization": {"stage": 3}, "bf16": {"on": 1}}, ": bf16.on: Extra inputs are not permitted, found 1"),
        (
            {"zero_optimization": {"stage": 2}, "bf16": {"check_grad_overflow": False}},
            ": bf16.check_grad_overflow: leave it out: without it a step whose gradients are not finite is taken",
        ),
        ({"zero_optimization": {"stage": 3}, "fp16": 16}, ": fp16: 16, expected an object"),
        (
            {"zero_optimization": {"stage": 3}, "fp16": {"hysteresis": 2}},
            ": fp16.hysteresis: leave it out: every overflow halves the scale",
        ),
        (
            {"zero_optimization": {"stage": 3}, "fp16": {"loss_scale": -1}},
            ": fp16.loss_scale: Value error, fp16.loss_scale must be >= 0",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            ": zero_optimization.zero_quantized_weights: leave it out: it rounds what is gathered for the forward",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}},
            ": zero_optimization.offload_param.device: 'nvme', expected cpu or none: weights are read into",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}},
            ": zero_optimization.offload_optimizer.device: 'nvme', expected cpu or none: such a run cannot be resumed",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}},
            ": zero_optimization.zero_hpz_partition_size: 3, expected auto (the ranks of a node), or a number that "
            "divides the 2 ranks of this job",
        ),
        ({"zero_optimization": {"stage": 3}, "wandb": "auto"}, ': wandb: the recipe has no value for "auto"'),
        *(({"zero_optimization": {"stage": 2}, **keys}, f": {said}") for keys, said in VALUES),
        *(({"zero_optimization": {"stage": 2, **keys}}, f": zero_optimization.{said}") for keys, said in ZERO_VALUES),
    ],
)
def test_bad_files(tmp_path: Path, content: Any, said: str) -> None:
    assert refusal(tmp_path, content)[0].startswith(said)


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


# ---------------------------------------------------------------------------------------------------------- training

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


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({"stage": 2}, "zero_optimization.stage is 2, but quant.gather_codes is true"),
        ({"stage": 3, "zero_hpz_partition_size": 2}, "zero_hpz_partition_size is 2, but quant.gather_codes is true"),
        ({"stage": 3}, None),
    ],
)
def test_codes_are_gathered_by_stage_3_without_hpz(tmp_path: Path, zero: dict[str, Any], said: str | None) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"zero_optimization": zero}))
    made = recipe(str(tmp_path / "mine.json"))
    made.quant.gather_codes = True
    if said is None:
        resolve(made, world_size=2)
        return
    with pytest.raises(DsConfigError, match=said):
        resolve(made, world_size=2)
