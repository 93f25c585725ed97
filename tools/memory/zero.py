"""Predict the bytes of parameters, gradients and optimizer state of one rank between two steps, by ZeRO stage.

By Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, section 3), a 16-bit parameter takes 2 bytes of weight, 2 bytes of
gradient and 12 bytes of optimizer state (an fp32 copy and Adam's two moments). Optimizer state is divided by the number
of ranks from stage 1 on, gradients from stage 2 on and weights on stage 3. DeepSpeed 0.19 allocates:

- stage 0 in 16 bits (runtime/fp16/unfused_optimizer.py): gradients in 16 bits; the step makes an fp32 copy of them all;
- stage 1 with bf16 and fp32 accumulation (runtime/bf16_optimizer.py): the fp32 gradients of *all* parameters in one
  buffer, and in addition the bf16 gradients until the step;
- stage 2, and stage 1 with another dtype (runtime/zero/stage_1_and_2.py): this rank's share of the gradients; an
  offloaded optimizer has a second share in host memory, and a copy of its share of the parameters in their dtype;
- stage 3 (runtime/zero/stage3.py): a share of each parameter, with padding so that all ranks have equal shares; fp32
  masters, also of fp32 parameters; one flat fp32 buffer for the gradients, and a second one if the optimizer is
  offloaded;
- an optimizer on NVMe (runtime/swap_tensor): page-locked buffers of the largest sub-group's size in host memory,
  through which each sub-group passes in the step. Sub-groups of less than 1 MB stay in host memory. In the others,
  gradients whose share is less than 1 MB, or no multiple of 256 elements, stay on the device until the step;
- moments in 8 bits (:mod:`engine.session.adamw8bit`): two codes per element, and two fp32 scales per block;
- buckets of ``reduce_bucket_size`` elements, into which gradients are copied: always on stage 3, and only during
  backward on stages 1 and 2 (twice with ``overlap_comm``); bf16's stage 1 and stage 0 have no buckets.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from torch import nn
from transformers import PreTrainedModel

from engine.config.deepspeed import offloads_to_nvme
from engine.config.sections import OptimRecipe
from engine.session.adamw8bit import moment_bytes
from engine.session.optimizer import classify, parameter_groups
from model.zero import leaves_of_stage_3, to_be_whole

FP32, FP64 = 4, 8
SWAPPED_BYTES, SWAP_BLOCK = 1 << 20, 256  # of runtime/swap_tensor/utils.py: MIN_AIO_BYTES; AIO_ALIGNED_BYTES / FP32
ITEMS = (
    "parameters",
    "gradients",
    "master weights",
    "moments",
    "buckets",
    "swap buffers",
    "weight codes",
    "scales of codes",
    "teacher",
)
SCALES = ("weight_scale", "act_scale", "kv_scale", "frozen")
# Parameters created after the weights, and not kept whole between steps (model.zero.release).
ADDED = (*SCALES, "adapter")


@dataclass(frozen=True)
class Settings:
    """Part of a resolved DeepSpeed configuration that determines memory."""

    zero: DeepSpeedZeroConfig  # with DeepSpeed's defaults for missing keys
    ranks: int  # of the run
    size: int  # bytes per element of the model's parameters
    accumulated: int  # bytes per element of a gradient in the buffer in which micro-batches are summed
    communicated: int  # bytes per element of a gradient while it is reduced over the ranks
    accumulation: int  # micro-batches per step
    bf16: bool  # parameters are bf16 (not fp16 or fp32)
    immediate: bool  # stage 1 adds each bf16 gradient to the fp32 gradients, and drops it, as soon as it is computed
    smallest_swapped: int = 0  # bytes of the smallest fp32 tensor kept in a file; 0: the optimizer is not on NVMe

    @classmethod
    def of(cls, ds_config: dict[str, Any], ranks: int) -> "Settings":
        """Read the settings from a resolved DeepSpeed configuration."""
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
            max(SWAPPED_BYTES, ds_config.get("aio", {}).get("block_size", 0)) if offloads_to_nvme(ds_config) else 0,
        )

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return int(self.zero.stage)

    @property
    def partitions(self) -> bool:
        """Return True if parameters are partitioned over several ranks."""
        return self.stage == 3 and self.ranks > 1

    @property
    def bf16_optimizer(self) -> bool:
        """Return True if stage 1 is DeepSpeed's BF16_Optimizer, which keeps fp32 gradients of all parameters on every
        rank."""
        separate = self.bf16 and self.accumulated == FP32
        return self.stage == 1 and separate and not self.offloads_optimizer

    @property
    def offloads_optimizer(self) -> bool:
        """Return True if the optimizer states are in host memory."""
        return _on_host(self.zero.offload_optimizer)

    @property
    def offloads_parameters(self) -> bool:
        """Return True if the parameter partitions are in host memory."""
        return _on_host(self.zero.offload_param)


def _on_host(offload: Any) -> bool:
    return offload is not None and OffloadDeviceEnum(offload.device) != OffloadDeviceEnum.none


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """Size and properties of a Parameter under stage 3."""

    name: str
    numel: int  # in the partitions of all ranks together
    size: int  # bytes per element
    trains: bool  # it has a gradient
    released: bool = False  # a scale or adapter, which is not kept whole between steps (model.zero.release)
    whole: bool = False  # every rank has all of it: small frozen scales are not partitioned
    as_codes: bool = False  # gathered as codes, one byte per weight (``quant.quantized_all_gather``)
    forward_only: bool = False  # backward does not read it, such as a frozen embedding that is not the lm_head too

    def elements(self, ranks: int) -> int:
        """Return the number of elements of one rank's partition, with padding."""
        return math.ceil(self.numel / ranks)

    def padded(self, ranks: int) -> int:
        """Return the bytes of all partitions together. Partitions have equal lengths, so the last one may have
        padding."""
        return self.elements(ranks) * ranks * self.size

    def share(self, ranks: int) -> int:
        """Return the bytes that one rank keeps: its partition, or all of a parameter that is not partitioned."""
        return self.numel * self.size if self.whole else self.padded(ranks) // ranks

    def persists(self, zero: DeepSpeedZeroConfig) -> bool:
        """Return True if the parameter is small enough to stay gathered between steps."""
        return self.numel <= zero.param_persistence_threshold and not self.released

    def gathered(self, ranks: int, as_codes: bool) -> int:
        """Return the bytes of the gathered parameter; if the argument and the attribute ``as_codes`` are both True, the
        bytes of its codes."""
        return self.padded(ranks) // (self.size if as_codes and self.as_codes else 1)


@dataclass(frozen=True)
class Inventory:
    """Every Parameter of a model once, and the parameter groups of its optimizer."""

    parameters: list[ShardedParameter]  # in the order of creation: weights, then scales and adapters
    groups: dict[str, list[ShardedParameter]]  # those that train, by the name of their group
    quantized: int = 0  # number of weight elements that have codes
    scales_of_codes: int = 0  # bytes of the scales that every rank keeps to gather codes
    coded: frozenset[str] = frozenset()  # names of the groups whose moments have 8 bits

    @property
    def trained(self) -> list[ShardedParameter]:
        """All parameters that train, in the order of the groups."""
        return [parameter for group in self.groups.values() for parameter in group]

    def gathered(self, zero: DeepSpeedZeroConfig) -> list[ShardedParameter]:
        """Return the parameters that stage 3, on several ranks, gathers for each use: all but those that always are
        whole on every rank, as they are small (``stage3_param_persistence_threshold``) or not partitioned."""
        return [one for one in self.parameters if not one.whole and not one.persists(zero)]

    def flat(self, ranks: int) -> list[int]:
        """Return the number of elements of each group's flat buffer on stages 1 and 2, of all ranks together: padded to
        a multiple of two per rank."""
        return [math.ceil(elements(group) / (2 * ranks)) * 2 * ranks for group in self.groups.values()]

    def updated(self, settings: "Settings") -> list[tuple[str, int]]:
        """Return, for each tensor that the optimizer of one rank updates, the name of its group and its number of
        elements on this rank."""
        ranks = settings.ranks
        if settings.stage == 0:
            return [(name, one.numel) for name, group in self.groups.items() for one in group]
        if settings.stage < 3:
            return [(name, size // ranks) for name, size in zip(self.groups, self.flat(ranks), strict=True)]
        return [(name, sum(one.elements(ranks) for one in group)) for name, group in self.sub_groups(settings)]

    def sub_groups(self, settings: "Settings") -> list[tuple[str, list[ShardedParameter]]]:
        """Return the name of the group and the parameters of each sub-group of stage 3. A group is split after each
        parameter with which a sub-group reaches ``sub_group_size`` elements per rank."""
        pieces: list[tuple[str, list[ShardedParameter]]] = []
        for name, group in self.groups.items():
            size = math.inf
            for one in group:
                if size >= settings.zero.sub_group_size:
                    pieces.append((name, []))
                    size = 0
                pieces[-1][1].append(one)
                size += one.elements(settings.ranks)
        return pieces


def take_inventory(
    model: PreTrainedModel, optim: OptimRecipe | None, as_codes: Iterable[nn.Parameter] = ()
) -> Inventory:
    """List the Parameters of a model on the meta device; those that train in the run must require a gradient. ``optim``
    is None for a frozen model, which has no parameter groups; ``as_codes`` are the weights whose codes are gathered."""
    made = sorted(classify(model), key=lambda owned: owned.kind in ADDED)
    whole = {id(parameter) for parameter in to_be_whole(one.parameter for one in made if one.kind in SCALES)}
    coded = {id(parameter) for parameter in as_codes}
    embedding = None if model.config.get_text_config().tie_word_embeddings else model.get_input_embeddings().weight
    known = {
        id(owned.parameter): ShardedParameter(
            owned.name,
            owned.parameter.numel(),
            owned.parameter.element_size(),
            owned.parameter.requires_grad,
            released=owned.kind in ADDED,
            whole=id(owned.parameter) in whole,
            as_codes=id(owned.parameter) in coded,
            forward_only=owned.parameter is embedding and not owned.parameter.requires_grad,
        )
        for owned in made
    }
    groups = parameter_groups(model, optim) if optim is not None else []
    return Inventory(
        list(known.values()),
        {group["name"]: [known[id(parameter)] for parameter in group["params"]] for group in groups},
        coded=frozenset(group["name"] for group in groups if group["moments"] == "8bit"),
    )


@dataclass(frozen=True)
class Calls:
    """Most bytes that one call of a module gathers under stage 3."""

    largest: int = 0
    listed: int = 0  # of a module with several parameters, which are gathered into one buffer and copied from it
    leaves: dict[str, int] = field(default_factory=dict)
    """For each parameter inside a leaf, bytes of the leaf's trained parameters, by the parameter's name. A leaf is a
    module that DeepSpeed gathers together with all its children."""


def module_calls(
    model: nn.Module, inventory: Inventory, ds_config: dict[str, Any], settings: Settings, as_codes: bool = True
) -> Calls:
    """Find the largest calls of a model's modules under stage 3. Weights that can be gathered as codes count as codes
    if ``as_codes``, else in their dtype."""
    gathered = {one.name: one for one in inventory.gathered(settings.zero)}
    by_id = {id(own): gathered[name] for name, own in model.named_parameters() if name in gathered}
    marked = leaves_of_stage_3(model, ds_config)
    largest = listed = 0
    leaves: dict[str, int] = {}
    for module in model.modules():
        leaf = id(module) in marked
        read = [by_id[id(own)] for own in module.parameters(recurse=leaf) if id(own) in by_id]
        size = sum(one.gathered(settings.ranks, as_codes) for one in read)
        largest, listed = max(largest, size), max(listed, size if len(read) > 1 else 0)
        if leaf:
            leaves |= dict.fromkeys((one.name for one in read), bytes_of(one for one in read if one.trains))
    return Calls(largest, listed, leaves)


def elements(parameters: Iterable[ShardedParameter]) -> int:
    """Count the elements of all parameters together."""
    return sum(parameter.numel for parameter in parameters)


def bytes_of(parameters: Iterable[ShardedParameter]) -> int:
    """Count the bytes of all parameters together, each whole."""
    return sum(parameter.numel * parameter.size for parameter in parameters)


@dataclass
class Held:
    """Bytes of one rank by item, on its device (``ITEMS``) and in host memory (``ITEMS`` and others)."""

    device: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ITEMS, 0))
    host: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ITEMS, 0))

    def add(self, item: str, size: int, on_host: bool = False) -> None:
        """Add ``size`` bytes to an item on the device, or in host memory."""
        (self.host if on_host else self.device)[item] += size


def held_by(settings: Settings, inventory: Inventory) -> Held:
    """Compute the peak bytes of parameters, gradients and optimizer state on a rank outside of forward and backward."""
    held = Held()
    zero, size, accumulated, offloaded = settings.zero, settings.size, settings.accumulated, settings.offloads_optimizer
    trained, flat = elements(inventory.trained), sum(inventory.flat(settings.ranks))
    updated = inventory.updated(settings)
    share = sum(size for _, size in updated)
    if settings.smallest_swapped:
        _add_swapped(held, settings, inventory)
        updated = [one for one in updated if FP32 * one[1] < settings.smallest_swapped]
    in_memory = sum(size for _, size in updated)
    if settings.stage > 0 or size != FP32:
        held.add("master weights", in_memory * FP32, offloaded)
    moments = (moment_bytes(size) if name in inventory.coded else 2 * FP32 * size for name, size in updated)
    held.add("moments", sum(moments), offloaded)
    if settings.bf16_optimizer:
        held.add("gradients", flat * FP32 + (0 if settings.immediate else trained * size))
    else:
        each = accumulated if settings.stage else size
        held.add("gradients", share * each, offloaded and settings.stage == 3)
    if offloaded:
        held.add("gradients", in_memory * FP32, offloaded)
    if settings.stage == 3:
        held_partitions(held, "parameters", settings, inventory)
        held.add("scales of codes", inventory.scales_of_codes)
        if zero.contiguous_gradients:
            held.add("buckets", zero.reduce_bucket_size * settings.communicated)
        return held
    frozen = bytes_of(parameter for parameter in inventory.parameters if not parameter.trains)
    held.add("parameters", frozen + (flat if settings.stage else trained) * size)
    if settings.accumulation > 1:  # quantized weights keep their codes from one micro-batch to the next
        held.add("weight codes", inventory.quantized)
    if settings.stage and offloaded:
        held.add("buckets", share * size, offloaded)
        held.add("buckets", max(parameter.numel for parameter in inventory.trained) * size)
    if settings.stage and zero.contiguous_gradients and not settings.bf16_optimizer:
        each = size if settings.stage == 2 else accumulated
        held.add("buckets", zero.reduce_bucket_size * each * (2 if zero.overlap_comm else 1))
    return held


def _add_swapped(held: Held, settings: Settings, inventory: Inventory) -> None:
    """Add the memory for sub-groups on NVMe: swap buffers on the host, and gradients on the device until the step."""
    offload = settings.zero.offload_optimizer
    assert offload is not None
    sizes = [size for _, size in inventory.updated(settings)]
    held.add("swap buffers", offload.buffer_count * FP32 * math.ceil(max(sizes) / SWAP_BLOCK) * SWAP_BLOCK, True)
    held.add("gradients", sum(late_gradients(settings, inventory).values()))


def late_gradients(settings: Settings, inventory: Inventory) -> dict[str, int]:
    """Return the bytes of the gradients that an optimizer on NVMe leaves on the device from backward to the step (this
    rank's share of each), by the parameter's name; empty if the optimizer is not on NVMe."""
    late: dict[str, int] = {}
    for _, group in inventory.sub_groups(settings) if settings.smallest_swapped else []:
        shares = {one.name: one.elements(settings.ranks) for one in group}
        if FP32 * sum(shares.values()) >= settings.smallest_swapped:
            small = {n for n, share in shares.items() if FP32 * share < settings.smallest_swapped or share % SWAP_BLOCK}
            late |= {name: FP32 * shares[name] for name in small}
    return late


def held_partitions(held: Held, item: str, settings: Settings, inventory: Inventory) -> None:
    """Add to ``item`` of ``held`` one rank's bytes of a model's parameters under stage 3: its partitions, hpZ's second
    partitions, and the parameters that stay gathered between steps."""
    zero, ranks, parameters = settings.zero, settings.ranks, inventory.parameters
    held.add(item, sum(one.share(ranks) for one in parameters), settings.offloads_parameters)
    if zero.zero_hpz_partition_size > 1:
        # Second partitions within a node, from the first forward on; for trained parameters until the step.
        second = sum(one.padded(ranks) // zero.zero_hpz_partition_size for one in parameters if not one.whole)
        held.add(item, second, settings.offloads_parameters)
    if ranks > 1:  # whole between steps, in addition to their shares
        held.add(item, bytes_of(one for one in parameters if one.persists(zero)))
