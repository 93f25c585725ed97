"""DeepSpeed's configuration: what the recipe fills in, what is refused, and training with every shipped file."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from deepspeed.runtime.config import DeepSpeedConfig

from engine.config.config import Recipe
from engine.config.deepspeed import (
    BROKEN,
    BROKEN_NESTED,
    CHECKED,
    MODELS,
    RANGES,
    DsConfigError,
    _refused_by_deepspeed,
    config_path,
    keys_of_deepspeed,
    remarks,
    resolve,
    teacher_config,
)
from tests.lib.processes import run_python
from tests.lib.recipes import minimal
from tests.lib.root import ROOT

SHIPPED = sorted(path.stem for path in (ROOT / "ds_configs").glob("*.json"))


def recipe(deepspeed: str = "zero3", dtype: str = "bfloat16", rows: int = 3, **sections: Any) -> Recipe:
    return minimal(
        model={"dtype": dtype},
        data={"micro_batch_size": rows},
        deepspeed=deepspeed,
        **{"optim": {"grad_clip": 0.0}, "train": {"gradient_accumulation_steps": 5}, **sections},
    )


def resolve_file(tmp_path: Path, content: Any, *, dtype: str = "bfloat16", **sections: Any) -> dict[str, Any]:
    """Complete a file with this content for two ranks: text as it is, anything else as JSON."""
    path = tmp_path / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return resolve(recipe(str(path), dtype, **sections), 2)


def refusal(tmp_path: Path, content: Any, **choices: Any) -> list[str]:
    """Return the problems with such a file, without the file's name, which every line must open with."""
    with pytest.raises(DsConfigError) as error:
        resolve_file(tmp_path, content, **choices)
    lines = str(error.value).splitlines()
    path = str(tmp_path / "mine.json")
    assert all(line.startswith(path) for line in lines), lines
    return [line.removeprefix(path) for line in lines]


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
    # The loop does the printing; DeepSpeed prints only what a file asks for.
    config.pop("train_batch_size")  # which DeepSpeed would compare with that of a single rank
    read = DeepSpeedConfig(config)
    assert read.steps_per_print is None and read.wall_clock_breakdown is False


@pytest.mark.parametrize(
    ("stage", "dtype", "quant", "expected"),
    [
        (3, "bfloat16", {}, "bf16"),
        (3, "float16", {}, "fp16"),
        (3, "float32", {}, None),
        (3, "bfloat16", {"quantized_all_gather": True}, "fp32"),  # changes gradients after their reduction
        (2, "bfloat16", {}, "fp32"),
        (1, "bfloat16", {}, "fp32"),
    ],
)
def test_a_single_micro_batch_accumulates_nothing(
    tmp_path: Path, stage: int, dtype: str, quant: dict[str, Any], expected: str | None
) -> None:
    content: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    train = {"gradient_accumulation_steps": 1}
    found = resolve_file(tmp_path, content, dtype=dtype, train=train, quant=quant)
    assert found["data_types"].get("grad_accum_dtype") == expected
    # A sum over the ranks in fp32 must not be rounded.
    content["communication_data_type"] = "fp32"
    found = resolve_file(tmp_path, content, dtype=dtype, train=train, quant=quant)
    assert found["data_types"].get("grad_accum_dtype") == (expected and "fp32")


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
        "use_data_before_expert_parallelism": False,
    }
    config = resolve_file(tmp_path, given)
    assert {key: config[key] for key in given} == given
    (line,) = remarks(str(tmp_path / "mine.json"))
    assert line.endswith("mine.json: use_data_before_expert_parallelism: passed on to DeepSpeed, untested")


def test_teacher(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    student = resolve_file(tmp_path, {"zero_optimization": zero, "csv_monitor": {"enabled": True}})
    assert student["zero_force_ds_cpu_optimizer"] is False
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
    names = {
        f"{section}.{name}"
        for section, model in MODELS.items()
        for key, field in model.model_fields.items()
        for name in (key, field.alias)
    }
    assert {*BROKEN_NESTED, *RANGES} - names == set()


def test_an_optimizer_on_nvme(tmp_path: Path) -> None:
    """It has fp32 moments, and its section aio has an effect."""
    offload = {"device": "nvme", "nvme_path": "/nvme"}
    zero = {"stage": 3, "offload_optimizer": offload}
    content = {"zero_optimization": zero, "aio": {"queue_depth": 16}}
    assert resolve_file(tmp_path, content)["zero_optimization"]["offload_optimizer"] == offload
    assert remarks(str(tmp_path / "mine.json")) == []
    key = ": zero_optimization.offload_optimizer"
    (line,) = refusal(tmp_path, content, optim={"grad_clip": 0.0, "moments": "8bit"})
    assert line.startswith(f"{key}: device 'nvme', but optim.moments is '8bit'")
    offload |= {"pipeline_read": True, "buffer_count": 3}
    lines = refusal(tmp_path, content)
    assert [line.split(": ")[1] for line in lines] == [f"{key[2:]}.pipeline_read", f"{key[2:]}.buffer_count"]


def test_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_path("zero3") == ROOT / "ds_configs" / "zero3.json"
    with pytest.raises(DsConfigError, match=f"expected one of {', '.join(SHIPPED)}, or the path"):
        config_path("zero4")
    with pytest.raises(DsConfigError, match="there is no such file in "):
        config_path("mine.json")
    (tmp_path / "mine.json").write_text("{}")
    assert config_path("mine.json") == Path("mine.json")


# As published: the transformers documentation of DeepSpeed, and examples/deepspeed of LLaMA-Factory.
PUBLISHED = yaml.safe_load("""
transformers: &transformers
  gradient_accumulation_steps: auto
  gradient_clipping: auto
  train_batch_size: auto
  train_micro_batch_size_per_gpu: auto
  fp16: &fp16 {enabled: auto, loss_scale: 0, loss_scale_window: 1000, initial_scale_power: 16, hysteresis: 2,
    min_loss_scale: 1}
  bf16: {enabled: auto}
  optimizer: {type: AdamW, params: {lr: auto, betas: auto, eps: auto, weight_decay: auto}}
  scheduler: {type: WarmupLR, params: {warmup_min_lr: auto, warmup_max_lr: auto, warmup_num_steps: auto}}
  zero_optimization: {stage: 3, overlap_comm: true, contiguous_gradients: true, sub_group_size: 1.0e+9,
    reduce_bucket_size: auto, stage3_prefetch_bucket_size: auto, stage3_param_persistence_threshold: auto,
    stage3_max_live_parameters: 1.0e+9, stage3_max_reuse_distance: 1.0e+9,
    stage3_gather_16bit_weights_on_model_save: true, offload_optimizer: {device: cpu, pin_memory: true},
    offload_param: {device: cpu, pin_memory: true}}
  steps_per_print: 2000
  wall_clock_breakdown: false
LLaMA-Factory:
  gradient_accumulation_steps: auto
  gradient_clipping: auto
  train_batch_size: auto
  train_micro_batch_size_per_gpu: auto
  zero_allow_untested_optimizer: true
  fp16: {<<: *fp16, auto_cast: false}
  bf16: {enabled: auto}
  zero_optimization: {stage: 0, allgather_partitions: true, allgather_bucket_size: 5.0e+8, overlap_comm: false,
    reduce_scatter: true, reduce_bucket_size: 5.0e+8, contiguous_gradients: true, round_robin_gradients: true}
""")


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_published_files_are_taken(tmp_path: Path, name: str, dtype: str) -> None:
    config = resolve_file(tmp_path, PUBLISHED[name], dtype=dtype)
    assert not {"optimizer", "scheduler"} & config.keys()
    said = [line.removeprefix(f"{tmp_path}/mine.json: ") for line in remarks(str(tmp_path / "mine.json"))]
    owned = ["optimizer: has no effect: the recipe owns it", "scheduler: has no effect: the recipe owns it"]
    hysteresis = ["fp16.hysteresis: has no effect: every overflow halves the loss scale"]
    told = [*(owned if "optimizer" in PUBLISHED[name] else []), *hysteresis]
    if "round_robin_gradients" in PUBLISHED[name]["zero_optimization"]:
        told.append("zero_optimization.round_robin_gradients: has no effect: it is switched off, as DeepSpeed 0.19.8")
        said[-1] = said[-1][: len(told[-1])]
    assert said == told and "round_robin_gradients" not in config["zero_optimization"]


def test_the_recipes_own_values_may_stand_in_the_optimizer(tmp_path: Path) -> None:
    own = recipe().optim
    params = {"lr": own.lr, "betas": list(own.betas), "eps": own.eps, "weight_decay": own.weight_decay}
    given = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": params}}
    assert "optimizer" not in resolve_file(tmp_path, given)


# Refusals: what a file of stage 2 says beside its stage, and how the first line begins.
REFUSED = r"""
bf16: true                                      | bf16: True, expected an object
fp16: 16                                        | fp16: 16, expected an object
checkpoint: 3                                   | checkpoint: 3, expected an object
timers: []                                      | timers: [], expected an object
train_micro_batch_size_per_gpu: 4               | train_micro_batch_size_per_gpu is 4, but data.micro_batch_size is 3:
gradient_accumulation_steps: 4                  | gradient_accumulation_steps is 4, but
train_batch_size: 4                             | train_batch_size is 4, but data.micro_batch_size *
gradient_clipping: 4                            | gradient_clipping is 4, but optim.grad_clip is 0.0: write "auto", or
bf16: {enabled: false}                          | bf16.enabled is False, but model.dtype is 'bfloat16': write "auto",
zero_optimizaton: {}                            | zero_optimizaton: unknown key, which DeepSpeed would ignore in
gradient_cliping: {}                            | gradient_cliping: unknown key, which DeepSpeed would ignore in
qqq: {}                                         | qqq: unknown key, which DeepSpeed would ignore in silence; expected
activation_checkpointing: {}                    | activation_checkpointing: set train.activation_checkpointing in the
gradient_allreduce_op: {}                       | gradient_allreduce_op: leave it out: the loop scales the loss for
wandb: auto                                     | wandb: the recipe has no value for "auto"
steps_per_print: abc                            | steps_per_print: Input should be a valid integer, found 'abc'
steps_per_print: true                           | steps_per_print: Input should be a valid integer, found True
steps_per_print: 0                              | steps_per_print: Input should be greater than or equal to 1
wall_clock_breakdown: 'no'                      | wall_clock_breakdown: Input should be a valid boolean, found 'no'
zero_allow_untested_optimizer: 1                | zero_allow_untested_optimizer: Input should be a valid boolean
log_level: loud                                 | log_level: Input should be 'debug', 'info', 'warning', 'error' or
log_level: [info]                               | log_level: Input should be 'debug', 'info', 'warning', 'error' or
communication_data_type: fp16                   | communication_data_type is 'fp16', expected fp32 or bf16: without
zero_optimization: {stage: 2, offload_param: {device: cpu}} | zero_optimization.offload_param has no effect on stage 2
zero_optimization: {stage: 0, offload_optimizer: {device: cpu}} | zero_optimization.offload_optimizer has no effect on
communication_data_type: int8                   | communication_data_type: Input should be 'fp16', 'bf16' or 'fp32'
data_types: {param_dtype: fp32}                 | data_types.param_dtype: Extra inputs are not permitted, found 'fp32'
data_types: {grad_accum_dtype: int8}            | data_types.grad_accum_dtype is 'int8', expected fp32 (the default)
data_types: {grad_accum_dtype: fp16}            | data_types.grad_accum_dtype is 'fp16', expected fp32 (the default)
data_types: {grad_accum_dtype: null}            | data_types.grad_accum_dtype is None, expected fp32 (the default) or
data_types: {grad_accum_dtype: 32}              | data_types.grad_accum_dtype is 32, expected fp32 (the default) or
checkpoint: {load_universal: true}              | checkpoint.load_universal: Extra inputs are not permitted
checkpoint: {tag_validation: x}                 | checkpoint.tag_validation: String should match pattern
checkpoint: {tag_validation: false}             | checkpoint.tag_validation: Input should be a valid string, found False
timers: {throughput: 3}                         | timers.throughput: Input should be a valid dictionary
flops_profiler: {enabled: maybe}                | flops_profiler.enabled: Input should be a valid boolean
flops_profiler: {profile_steps: 3}              | flops_profiler.profile_steps: Extra inputs are not permitted
comms_logger: {enabled: true, prof_ops: 3}      | comms_logger.prof_ops: Input should be a valid list
tensorboard: {enabled: x}                       | tensorboard.enabled: Input should be a valid boolean
csv_monitor: {a: 1}                             | csv_monitor.a: Extra inputs are not permitted, found 1
bf16: {'on': 1}                                 | bf16.on: Extra inputs are not permitted, found 1
bf16: {bf16_master_weights_and_grads: true}     | bf16.bf16_master_weights_and_grads: leave it out: the opt
bf16: {check_grad_overflow: false}              | bf16.check_grad_overflow: leave it out: without it a step whose
fp16: {initial_scale_power: 5000}               | fp16.initial_scale_power: 5000, expected 0 to 32
fp16: {loss_scale: .inf}                        | fp16.loss_scale: inf, expected 0 to 4294967296
fp16: {loss_scale: -1}                          | fp16.loss_scale: -1, expected 0 to 4294967296
optimizer: {type: AdamW, params: {lr: 3.0e-4}}  | optimizer.lr: 0.0003, expected "auto" or the recipe's value: the
optimizer: {params: auto}                       | optimizer.params: 'auto', expected an object
optimizer: {type: Lion, params: {lr: auto}}     | optimizer.type: 'Lion', expected "auto" or the recipe's value
scheduler: {params: {warmup_num_steps: 9}}      | scheduler.warmup_num_steps: 9, expected "auto": the recipe owns the
zero_optimization: {stage: auto}                | zero_optimization.stage: missing, expected 0, 1, 2 or 3
zero_optimization: {stage: 7}                   | zero_optimization.stage: Input should be 0, 1, 2
zero_optimization: {stage: true}                | zero_optimization.stage: True, expected 0, 1, 2 or 3
zero_optimization: {stage: '3'}                 | zero_optimization.stage: '3', expected 0, 1, 2 or 3
zero_optimization: {stge: 1}                    | zero_optimization.stge: Extra inputs are not permitted
zero_optimization: {load_from_fp32_weights: false} | zero_optimization.load_from_fp32_weights: leave it out: a
zero_optimization: {zero_quantized_weights: true} | zero_optimization.zero_quantized_weights: leave it out: it rounds
zero_optimization: {zero_quantized_gradients: true} | zero_optimization.zero_quantized_gradients: leave it out: across
zero_optimization: {elastic_checkpoint: true}   | zero_optimization.elastic_checkpoint: leave it out: a resume reads
zero_optimization: {zenflow: {}}                | zero_optimization.zenflow: leave it out: it updates weights with
zero_optimization: {leaf_module: 3}             | zero_optimization.leaf_module: leave it out
zero_optimization: {sub_group_size: 0}          | zero_optimization.sub_group_size: 0, expected 1 to 1099511627776
zero_optimization: {reduce_bucket_size: 9999999999999} | zero_optimization.reduce_bucket_size: 9999999999999, expected
zero_optimization: {stage3_prefetch_bucket_size: -1} | zero_optimization.stage3_prefetch_bucket_size: -1, expected 0
zero_optimization: {reduce_bucket_size: many}   | zero_optimization.reduce_bucket_size: Input should be a valid
zero_optimization: {offload_param: {device: nvme, nvme_path: /}} | zero_optimization.offload_param: device 'nvme',
zero_optimization: {offload_optimizer: {device: cpu, ratio: 0.5}} | zero_optimization.offload_optimizer: ratio 0.5,
zero_optimization: {offload_optimizer: {device: nvme, nvme_path: /}} | zero_optimization.offload_optimizer: device 'nvm
zero_optimization: {stage: 3, offload_optimizer: {device: nvme}} | zero_optimization.offload_optimizer.nvme_path:
zero_optimization: {zero_hpz_partition_size: 3} | zero_optimization.zero_hpz_partition_size: 3, expected auto (the
"""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_refused(tmp_path: Path, row: str) -> None:
    """DeepSpeed would ignore these, fail after the process group has started, or train another model."""
    text, said = row.split(" | ")
    content = yaml.safe_load(text)
    zero = content.pop("zero_optimization", {})
    assert refusal(tmp_path, {**content, "zero_optimization": {"stage": 2, **zero}})[0].startswith(f": {said}")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{\n"bf16": {},\n"zero_optimization" {}\n}', ", line 3: not JSON"),
        ("", ", line 1: not JSON"),
        ("[" * 100_000, ": brackets are nested too deeply"),
        ('{"steps_per_print": ' + "9" * 5000 + "}", ": Exceeds the limit"),
        ("[1]", ": expected an object with DeepSpeed's keys, found list"),
        ('{"bf16": {}, "bf16": {}}', ": 'bf16' occurs twice in one object"),
        ('{"zero_optimization": {"stage": 1, "stage": 3}}', ": 'stage' occurs twice in one object"),
        ({}, ": zero_optimization.stage: missing, expected 0, 1, 2 or 3"),
        ({"zero_optimization": 3}, ": zero_optimization: 3, expected an object"),
    ],
    ids=range(9),
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: Any, said: str) -> None:
    assert refusal(tmp_path, content)[0].startswith(said)


def test_a_number_that_no_float_holds_is_refused(tmp_path: Path) -> None:
    lines = refusal(tmp_path, {"zero_optimization": {"stage": 1}, "fp16": {"loss_scale": 10**400}})
    assert lines[-1].startswith(": fp16.loss_scale: 1000") and lines[-1].endswith("000, expected 0 to 4294967296")


def test_accumulation_of_gradients(tmp_path: Path) -> None:
    """In fp32, or at stage 0 in the dtype of the parameters."""
    fp32 = {"zero_optimization": {"stage": 0}, "data_types": {"grad_accum_dtype": "fp32"}}
    (line,) = refusal(tmp_path, fp32)
    assert line.startswith(": data_types.grad_accum_dtype is 'fp32': stage 0 accumulates in bf16 only")
    assert resolve_file(tmp_path, fp32, dtype="float32")["data_types"] == {"grad_accum_dtype": "fp32"}
    said = ": data_types.grad_accum_dtype is 'int8', expected fp32 (the default): DeepSpeed would add"
    for stage in range(4):
        given = {"zero_optimization": {"stage": stage}, "data_types": {"grad_accum_dtype": "int8"}}
        (line,) = refusal(tmp_path, given, dtype="float32")
        assert line.startswith(said)


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({"stage": 2}, "zero_optimization.stage is 2, but quant.quantized_all_gather is true"),
        ({"stage": 3, "zero_hpz_partition_size": 2}, "zero_optimization.zero_hpz_partition_size is 2, but quant.quan"),
    ],
)
def test_codes_are_gathered_by_stage_3_without_hpz(tmp_path: Path, zero: dict[str, Any], said: str) -> None:
    gathers = {"quant": {"quantized_all_gather": True}}
    (line,) = refusal(tmp_path, {"zero_optimization": zero}, **gathers)
    assert line.startswith(f": {said}")
    resolve_file(tmp_path, {"zero_optimization": {"stage": 3}}, **gathers)


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
        engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16)).float().sum())
        engine.step()
    assert engine.global_steps == 2
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        for key, value in model.state_dict().items():
            assert value.isfinite().all() and not torch.equal(value.cpu().float(), before[key]), (name, key)
    print("trained with", name)
"""


def test_deepspeed_trains_with_every_shipped_file() -> None:
    configs = {name: resolve(recipe(name, rows=1), world_size=1) for name in SHIPPED}
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    run = run_python(TRAIN, json.dumps(configs), **rank)
    assert run.returncode == 0, run.stderr[-4000:]
    assert [line.split()[-1] for line in run.stdout.splitlines() if line.startswith("trained with")] == SHIPPED


def test_a_key_that_deepspeed_cannot_read_is_named_unless_there_are_several() -> None:
    """Each key is left out once: with several such keys no single one is the cause."""
    one = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "aio": {"use_gds": True}}
    (line,) = _refused_by_deepspeed(one)
    assert line.startswith("aio: DeepSpeed cannot read it: AssertionError: GDS")
    (line,) = _refused_by_deepspeed({**one, "sparse_gradients": True})
    assert line.startswith("DeepSpeed cannot read it: ")
