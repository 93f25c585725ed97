"""DeepSpeed's keys by what DeepQAT makes of them: those that a file may set, those that it may not, and why.

What DeepSpeed does with a key that nobody has tried here is not known to be right, so the lists name what is allowed.
"""

import math
from collections.abc import Callable
from typing import Any

# Top-level keys that a file may set: whatever leaves the arithmetic of the loop alone.
ALLOWED = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "bf16",
        "fp16",
        "data_types",
        "zero_optimization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "communication_data_type",
        "aio",
        "checkpoint",
        "disable_python_gc",
        "steps_per_print",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "timers",
        "log_level",
        "flops_profiler",
        "comms_logger",
        "tensorboard",
        "csv_monitor",
        "wandb",
        "comet",
    }
)

# The keys among them whose values the recipe has.
FROM_RECIPE = frozenset(
    {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}
)

MOST_ELEMENTS = 2**40  # of a bucket; a larger number is no size that any memory has

_MEAN = "leave it out: the loop scales the loss for DeepSpeed's default, a mean over ranks and micro-batches"
_UNTESTED = "leave it out: DeepQAT does not support it"
# Top-level keys that DeepSpeed knows and a file may not set, with the remedy.
REFUSED = {
    "optimizer": "the recipe owns the optimizer: set optim.lr, optim.betas, optim.eps and optim.weight_decay there",
    "scheduler": "the recipe owns the schedule: set optim.schedule, optim.warmup_steps and optim.min_lr_ratio there",
    "bfloat16": 'write "bf16", the name of today',
    "torch_autocast": "set model.dtype in the recipe: parameters and GEMMs have that type",
    "activation_checkpointing": "set train.activation_checkpointing in the recipe",
    "data_efficiency": "the recipe owns the data: see its data section",
    "dataloader_drop_last": "the recipe owns the data: see its data section",
    "weight_quantization": "set quant.scheme in the recipe",
    "gradient_allreduce_op": _MEAN,
    "gradient_predivide_factor": _MEAN,
    "managed_gradient_accumulation": _MEAN,
    "prescale_gradients": _MEAN,
    "autotuning": _UNTESTED,
    "compile": _UNTESTED,
    "datastates_ckpt": _UNTESTED,
    "disable_allgather": _UNTESTED,
    "expert_parallel": _UNTESTED,
    "hybrid_engine": _UNTESTED,
    "pipeline": _UNTESTED,
    "seq_parallel_communication_data_type": _UNTESTED,
    "tensor_parallel": _UNTESTED,
    "use_data_before_expert_parallelism": _UNTESTED,
    "vocabulary_size": _UNTESTED,
}

# The keys of the student's configuration that its teacher, which has no optimizer, takes over.
TEACHER_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
    "zero_optimization",
    "communication_data_type",
    "log_level",
)

# Sections whose values DeepSpeed takes as they come.
SECTIONS = frozenset(
    {"bf16", "fp16", "data_types", "zero_optimization", "aio", "checkpoint", "timers", "flops_profiler"}
    | {"comms_logger", "tensorboard", "csv_monitor", "wandb", "comet"}
)


def _truth(value: Any) -> bool:
    return isinstance(value, bool)


# Values of top-level keys that DeepSpeed does not check, or only when they are used: what is good, and in words.
VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc"), (_truth, "true or false")
    ),
    **dict.fromkeys(("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"), (_truth, "true or false")),
    "steps_per_print": (
        lambda value: value is None or (type(value) is int and value >= 1),
        "a number of steps, 1 or more, or null",
    ),
    "log_level": (
        lambda value: value in ("debug", "info", "warning", "error", "critical"),
        "debug, info, warning, error or critical",
    ),
    "communication_data_type": (
        lambda value: value in (None, "fp16", "bf16", "fp32"),
        "fp16, bf16, fp32 or null",
    ),
}


def _whole(lowest: int) -> tuple[Callable[[Any], bool], str]:
    return lambda value: type(value) is int and value >= lowest, f"a whole number, {lowest} or more"


_TRUTH = (_truth, "true or false")
_FILE = (lambda value: value is None or (isinstance(value, str) and value.isprintable()), "a file's name or null")
# All that a file may set in sections of which DeepSpeed has no model that checks them, with what is good and in words.
# Others it would ignore in silence, or obey: other types of parameters and buffers would train another model, and other
# ways of keeping checkpoints are not those that a resume reads.
NESTED: dict[str, dict[str, tuple[Callable[[Any], bool], str]]] = {
    "data_types": {"grad_accum_dtype": (lambda value: True, "")},
    "flops_profiler": {
        "enabled": _TRUTH,
        "recompute_fwd_factor": (
            lambda value: type(value) in (int, float) and 0 <= value < math.inf,
            "a number, 0 or more",
        ),
        "profile_step": _whole(1),
        "module_depth": _whole(-1),
        "top_modules": _whole(1),
        "detailed": _TRUTH,
        "output_file": _FILE,
    },
    "aio": {
        **dict.fromkeys(("block_size", "queue_depth", "intra_op_parallelism"), _whole(1)),
        **dict.fromkeys(("single_submit", "overlap_events", "use_gds"), _TRUTH),
    },
    "timers": {
        "throughput": (
            lambda value: (
                isinstance(value, dict)
                and all(key in ("enabled", "synchronized") and _truth(on) for key, on in value.items())
            ),
            "an object with enabled and synchronized, true or false",
        )
    },
    "checkpoint": {
        "tag_validation": (
            lambda value: isinstance(value, str) and value.upper() in ("IGNORE", "WARN", "FAIL"),
            "Ignore, Warn or Fail",
        )
    },
}

# Keys of zero_optimization that move data and memory about and leave the arithmetic alone.
ZERO_KEYS = frozenset(
    {
        "stage",
        "contiguous_gradients",
        "reduce_scatter",
        "reduce_bucket_size",
        "use_multi_rank_bucket_allreduce",
        "allgather_partitions",
        "allgather_bucket_size",
        "overlap_comm",
        "load_from_fp32_weights",
        "offload_param",
        "offload_optimizer",
        "sub_group_size",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold",
        "stage3_module_granularity_threshold",
        "stage3_gather_16bit_weights_on_model_save",
        "round_robin_gradients",
        "ignore_unused_parameters",
        "memory_efficient_linear",
        "log_trace_cache_warnings",
        "zero_hpz_partition_size",
        "zero_quantized_gradients",
        "zero_quantized_weights",
        "zero_quantized_nontrainable_weights",
    }
)


def _unset(value: Any) -> bool:
    return value is None


def _false(value: Any) -> bool:
    return not value


def _at_most(most: float) -> Callable[[Any], bool]:
    return lambda value: not isinstance(value, int | float) or value <= most


_QUANTIZED = (
    "leave it out: it rounds what is gathered for the forward, scales too (by way of fp16), but not what is gathered "
    "for the export, so that another model would be exported than the one that was trained"
)
_HALVED = "leave it out: every overflow halves the scale (engine/session/loss_scale.py)"
_COPIES = "leave it out: the optimizer's copies are fp32"
_NVME = "{!r}, expected cpu or none: "
# What DeepQAT asks of settings in sections beside what DeepSpeed's own model of the section does: the path, what is
# good (None: the key is not there), and the problem, with the value for {}.
SETTINGS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    # DeepSpeed takes a missing stage for 0: every rank would hold everything, and at scale run out of memory.
    ("zero_optimization.stage", lambda value: value not in (None, "auto"), "missing, expected 0, 1, 2 or 3"),
    # DeepSpeed takes true for 1.
    ("zero_optimization.stage", lambda value: not isinstance(value, bool), "{!r}, expected 0, 1, 2 or 3"),
    (
        "zero_optimization.load_from_fp32_weights",
        lambda value: value is None or value is True,
        "leave it out: a resumed run would go on from rounded weights, not from the optimizer's fp32 copies",
    ),
    ("zero_optimization.zero_quantized_weights", _false, _QUANTIZED),
    ("zero_optimization.zero_quantized_nontrainable_weights", _false, _QUANTIZED),
    *(
        (
            f"zero_optimization.{key}",
            lambda value, least=least: not isinstance(value, int | float) or least <= value <= MOST_ELEMENTS,
            f"{{!r}}, expected {least} to 2^40 elements",
        )
        for key, least in (
            ("reduce_bucket_size", 1),
            ("allgather_bucket_size", 1),
            ("sub_group_size", 1),
            ("stage3_prefetch_bucket_size", 0),
        )
    ),
    (
        "zero_optimization.offload_param.device",
        lambda value: value != "nvme",
        _NVME + "weights are read into their partitions and scales measured there, in memory; a file would have to be "
        "read and written for each",
    ),
    (
        "zero_optimization.offload_optimizer.device",
        lambda value: value != "nvme",
        _NVME + "such a run cannot be resumed: DeepSpeed (0.19.8, engine.py:4456) would copy its files back and load "
        "neither the weights nor groups below 1 MB, among which are the scales",
    ),
    (
        "bf16.check_grad_overflow",
        lambda value: value is None or value is True,
        "leave it out: without it a step whose gradients are not finite is taken on some stages, and every weight is "
        "NaN after it",
    ),
    ("bf16.bf16_master_weights_and_grads", _unset, _COPIES),
    ("bf16.bf16_optimizer_states", _unset, "leave it out: the optimizer's moments are fp32"),
    ("fp16.auto_cast", _unset, "leave it out: inputs are token ids"),
    ("fp16.hysteresis", _unset, _HALVED),
    ("fp16.consecutive_hysteresis", _unset, _HALVED),
    ("fp16.fp16_master_weights_and_grads", _unset, _COPIES),
    # Numbers that fp32 has room for.
    ("fp16.loss_scale", _at_most(2.0**32), "{!r}, expected at most 4.29497e+09"),
    ("fp16.min_loss_scale", _at_most(2.0**32), "{!r}, expected at most 4.29497e+09"),
    ("fp16.initial_scale_power", _at_most(32), "{!r}, expected at most 32"),
)
