"""How many bytes of parameters, gradients and optimizer state one rank holds between two steps, by ZeRO stage.

The shares are those of Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, section 3): with 16-bit parameters 2 bytes of
weight, as many of gradient and 12 of optimizer (an fp32 copy and Adam's two moments), each divided by the ranks from
its stage on. What DeepSpeed 0.19 really allocates differs by stage, and that is what is counted here:

- stage 0 in 16 bits (runtime/fp16/unfused_optimizer.py): gradients in 16 bits; the step makes an fp32 copy of them all;
- stage 1 with bf16 and fp32 accumulation (runtime/bf16_optimizer.py): the fp32 gradients of *all* parameters in one
  buffer, and the bf16 ones beside them until the step;
- stage 2 (runtime/zero/stage_1_and_2.py): this rank's share of the gradients in fp32, from the first reduction of a
  step until its end; an offloaded optimizer has a second one in host memory, and a 16-bit copy of its share;
- stage 3 (runtime/zero/stage3.py): shares of each parameter, so each padded to the ranks; one flat fp32 buffer for the
  gradients, always there, and where the optimizer is offloaded a second one of the same size;
- buckets: ``reduce_bucket_size`` elements that gradients are copied into, on stage 3 always there, on stages 1 and 2
  only during backward (twice with ``overlap_comm``); bf16's stage 1 and stage 0 have none.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

from engine.memory.zero_parameters import Inventory, ShardedParameter, elements, flat_elements

FP32 = 4
ITEMS = (
    "parameters",
    "gradients",
    "master weights",
    "moments",
    "buckets",
    "weight codes",
    "scales of codes",
    "teacher",
)


@dataclass(frozen=True)
class Settings:
    """The part of a resolved DeepSpeed configuration that decides on memory.

    Attributes:
        zero: its ``zero_optimization``, with DeepSpeed's own defaults where the file is silent.
        ranks: how many ranks the run has.
        size: bytes per element of the model's parameters.
        accumulated: bytes per element of a gradient in the buffer where micro-batches are added up.
        communicated: bytes per element of a gradient while it is reduced over the ranks.
        accumulation: micro-batches per step.
        bf16: whether parameters are bf16 (and not fp16 or fp32).
        immediate: whether stage 1 adds each bf16 gradient to the fp32 ones, and drops it, as soon as it is made.
    """

    zero: DeepSpeedZeroConfig
    ranks: int
    size: int
    accumulated: int
    communicated: int
    accumulation: int
    bf16: bool
    immediate: bool

    @classmethod
    def of(cls, ds_config: dict[str, Any], ranks: int) -> "Settings":
        """Read the settings from a configuration that :func:`engine.config.deepspeed.resolve` returned."""
        half = any(ds_config.get(key, {}).get("enabled") for key in ("bf16", "fp16"))
        size = 2 if half else FP32
        sizes = {"fp32": FP32, "fp16": 2, "bf16": 2}
        return cls(
            DeepSpeedZeroConfig(**ds_config.get("zero_optimization", {})),
            ranks,
            size,
            sizes.get(ds_config.get("data_types", {}).get("grad_accum_dtype", ""), size),
            sizes.get(ds_config.get("communication_data_type", ""), size),
            int(ds_config["gradient_accumulation_steps"]),
            bool(ds_config.get("bf16", {}).get("enabled")),
            bool(ds_config.get("bf16", {}).get("immediate_grad_update")),
        )

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return int(self.zero.stage)

    @property
    def bf16_optimizer(self) -> bool:
        """Whether stage 1 is DeepSpeed's BF16_Optimizer, which keeps fp32 gradients of everything on every rank."""
        separate = self.bf16 and self.accumulated == FP32
        return self.stage == 1 and separate and self.offloads_optimizer is None

    @property
    def offloads_optimizer(self) -> str | None:
        """Where the optimizer's states are offloaded to: ``cpu``, or None if they stay on the device."""
        return _device(self.zero.offload_optimizer)

    @property
    def offloads_parameters(self) -> str | None:
        """Where the parameters' partitions are offloaded to: ``cpu``, or None if they stay on the device."""
        return _device(self.zero.offload_param)


def _device(offload: Any) -> str | None:
    if offload is None or offload.device == OffloadDeviceEnum.none:
        return None
    return OffloadDeviceEnum(offload.device).value


@dataclass
class Held:
    """What one rank holds, in bytes by item of ``ITEMS``: on its device, and in host memory."""

    device: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ITEMS, 0))
    host: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ITEMS, 0))

    def add(self, item: str, size: int, offloaded: str | None = None) -> None:
        """Count ``size`` bytes more of an item, in the place that it is offloaded to (None: the device)."""
        place = {None: self.device, "cpu": self.host}[offloaded]
        place[item] += size


def held_by(settings: Settings, inventory: Inventory, *, keeps_codes: bool = False) -> Held:
    """What a rank holds of the student outside of forward and backward, at the moment when it holds most.

    Args:
        settings: those of the run.
        inventory: the student's parameters.
        keeps_codes: whether quantized weights keep their codes from one micro-batch to the next.
    """
    held = Held()
    if keeps_codes and settings.stage < 3:
        held.add("weight codes", inventory.quantized)
    if settings.stage == 3:
        _stage_3(held, settings, inventory)
        return held
    frozen = [parameter for parameter in inventory.parameters if not parameter.trains]
    held.add("parameters", _bytes(frozen))
    if settings.stage == 0:
        _stage_0(held, settings, inventory)
    else:
        _stages_1_and_2(held, settings, inventory)
    return held


def _stage_0(held: Held, settings: Settings, inventory: Inventory) -> None:
    trained = elements(inventory.trained)
    held.add("parameters", trained * settings.size)
    held.add("gradients", trained * settings.size)
    held.add("moments", trained * 2 * FP32)
    if settings.size != FP32:
        held.add("master weights", trained * FP32)


def _stages_1_and_2(held: Held, settings: Settings, inventory: Inventory) -> None:
    flat = sum(flat_elements(group, settings.ranks) for group in inventory.groups.values())
    share = flat // settings.ranks
    offloaded = settings.offloads_optimizer
    held.add("parameters", flat * settings.size)
    held.add("master weights", share * FP32, offloaded)
    held.add("moments", share * 2 * FP32, offloaded)
    if settings.bf16_optimizer:
        held.add("gradients", flat * FP32)
        if not settings.immediate:
            held.add("gradients", elements(inventory.trained) * settings.size)
        return
    if settings.stage == 1:
        held.add("gradients", elements(inventory.trained) * settings.accumulated)
    else:
        held.add("gradients", share * settings.accumulated)
    if offloaded:
        held.add("gradients", share * FP32, offloaded)
        held.add("master weights", share * settings.size, "cpu")
        held.add("buckets", max(parameter.numel for parameter in inventory.trained) * settings.size)
    if settings.zero.contiguous_gradients:
        size = settings.size if settings.stage == 2 else settings.accumulated
        held.add("buckets", settings.zero.reduce_bucket_size * size * (2 if settings.zero.overlap_comm else 1))


def _stage_3(held: Held, settings: Settings, inventory: Inventory) -> None:
    zero, ranks = settings.zero, settings.ranks
    shares = sum(parameter.share(ranks) for parameter in inventory.parameters)
    held.add("parameters", shares, settings.offloads_parameters)
    if ranks > 1:  # whole between steps, beside their shares
        held.add("parameters", _bytes(parameter for parameter in inventory.parameters if parameter.persists(zero)))
    for item, size in inventory.beside.items():
        held.add(item, size)
    # The second partitions of hpZ are there from the first forward on; those of trained parameters until the step.
    held.add("parameters", sum(parameter.second_share(zero, ranks) for parameter in inventory.parameters))
    share = sum(math.ceil(parameter.numel / ranks) for parameter in inventory.trained)
    offloaded = settings.offloads_optimizer
    held.add("gradients", share * settings.accumulated, "cpu" if offloaded else None)
    if offloaded:
        held.add("gradients", share * FP32, offloaded)
    if settings.size != FP32 or offloaded:  # else the parameters are their own masters
        held.add("master weights", share * FP32, offloaded)
    held.add("moments", share * 2 * FP32, offloaded)
    if zero.contiguous_gradients:
        held.add("buckets", zero.reduce_bucket_size * settings.communicated)


def _bytes(parameters: Iterable[ShardedParameter]) -> int:
    return sum(parameter.numel * parameter.size for parameter in parameters)
