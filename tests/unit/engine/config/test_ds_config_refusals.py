"""What is refused of a DeepSpeed configuration: contradictions to the recipe, keys and values that would be ignored."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from engine.config.deepspeed import DsConfigError, resolve
from tests.unit.engine.config.ds_files import recipe, refusal, resolve_file


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


def test_a_number_that_no_float_holds_is_refused(tmp_path: Path) -> None:
    lines = refusal(tmp_path, {"zero_optimization": {"stage": 1}, "fp16": {"loss_scale": 10**400}})
    assert lines[-1] == ": fp16.loss_scale: expected numbers that 64 bits hold"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_other_accumulation_in_fp32(tmp_path: Path, stage: int) -> None:
    given = {"zero_optimization": {"stage": stage}, "data_types": {"grad_accum_dtype": "int8"}}
    (line,) = refusal(tmp_path, given, dtype="float32")
    assert line.startswith(": data_types.grad_accum_dtype is 'int8', expected fp32 (the default): DeepSpeed would add")


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("zero_optimizaton", "unknown key, which DeepSpeed would ignore in silence; did you mean zero_optimization?"),
        ("gradient_cliping", "unknown key, which DeepSpeed would ignore in silence; did you mean gradient_clipping?"),
        ("qqq", "unknown key, which DeepSpeed would ignore in silence; expected one of aio, bf16,"),
        ("activation_checkpointing", "set train.activation_checkpointing in the recipe"),
        ("gradient_allreduce_op", "leave it out: the loop scales the loss for DeepSpeed's default"),
    ],
)
def test_top_level_keys(tmp_path: Path, key: str, said: str) -> None:
    (line,) = refusal(tmp_path, {key: {}, "zero_optimization": {"stage": 3}})
    assert line.startswith(f": {key}: {said}")


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
    ({"elastic_checkpoint": True}, "elastic_checkpoint: leave it out: a resume reads shards of"),
    ({"zenflow": {}}, "zenflow: leave it out: it updates weights with gradients of earlier steps"),
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
            {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}},
            ': optimizer.lr: 0.0003, expected "auto" or the recipe\'s value: the recipe owns the optimizer: set',
        ),
        (
            {"zero_optimization": {"stage": 3}, "optimizer": {"params": "auto"}},
            ": optimizer.params: 'auto', expected an obj",
        ),
        (
            {"zero_optimization": {"stage": 3}, "optimizer": {"type": "Lion", "params": {"lr": "auto"}}},
            ": optimizer.type: 'Lion', expected \"auto\" or the recipe's value",
        ),
        (
            {"zero_optimization": {"stage": 3}, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}},
            ': scheduler.warmup_num_steps: 9, expected "auto": the recipe owns the schedule: set optim.schedule',
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


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({"stage": 2}, "zero_optimization.stage is 2, but quant.quantized_all_gather is true"),
        (
            {"stage": 3, "zero_hpz_partition_size": 2},
            "zero_hpz_partition_size is 2, but quant.quantized_all_gather is true",
        ),
        ({"stage": 3}, None),
    ],
)
def test_codes_are_gathered_by_stage_3_without_hpz(tmp_path: Path, zero: dict[str, Any], said: str | None) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"zero_optimization": zero}))
    made = recipe(str(tmp_path / "mine.json"))
    made.quant.quantized_all_gather = True
    if said is None:
        resolve(made, world_size=2)
        return
    with pytest.raises(DsConfigError, match=said):
        resolve(made, world_size=2)
