"""Predict the cost of one optimizer step under a ZeRO stage: bytes at its worst moments, and bytes of its collectives.

The events of a micro-batch (:mod:`tools.memory.trace`) have the bytes of the model itself at each moment. A stage adds
gradients as they are computed, and buckets and copies for their reduction, as in DeepSpeed 0.19. Stage 3 adds the
gathered parameters at the peak, by the limits that DeepSpeed documents. The number of their elements is the larger of

- the parameters that stay gathered for the next use, and the prefetch. The parameters that stay are those read again
  within ``stage3_max_reuse_distance`` and those of the largest module, or ``stage3_max_live_parameters`` elements if
  that is more and anything is prefetched;
- the parameters of the largest module, the prefetch, and a buffer into which a list of parameters is gathered and from
  which it is copied.

The prefetch is ``stage3_prefetch_bucket_size`` elements.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.session.adamw8bit import CHUNK, WORKING_BYTES
from tools.memory.trace import Event, own_bytes
from tools.memory.zero import FP32, FP64, Calls, Held, Inventory, Settings, elements, late_gradients

STEP_COPIES = "copies in the step"  # item of host memory that an offloaded optimizer needs for its step
# Elements of the buffers in which DeepSpeed's engine reduces gradients if its optimizer does not reduce them.
FALLBACK_BUCKET = 500_000_000
TEACHER = "teacher"  # kind of the event for the teacher's whole forward, before the student's events


@dataclass(frozen=True)
class Moment:
    """The moment of a phase at which most bytes are alive: their total, and bytes by part."""

    total: int
    parts: dict[str, int]


@dataclass(frozen=True)
class StepCost:
    """Cost of one optimizer step."""

    added: dict[str, np.ndarray]
    """Bytes by part at the two places of each event (before it, at it): ``held`` (parameters, gradients, optimizer
    states and buckets), ``gathered`` (parameters), ``reduction`` (copies of gradients)."""
    backward: np.ndarray  # for each place, True if it belongs to backward
    step: Moment  # of the optimizer's step, with the most bytes
    traffic: Counter[str]
    """Bytes of the whole step's collectives by kind, each of the whole tensor: the result of an all-gather, the operand
    of a reduction."""

    @property
    def gathered(self) -> int:
        """Most bytes of the student's parameters that are gathered at one time."""
        return int(self.added["gathered"].max())

    def moments(self, events: Sequence[Event]) -> dict[str, Moment]:
        """Find the moment with the most bytes of each phase: ``forward``, ``backward`` and ``step`` (the optimizer's).
        ``events`` are those for which this cost was computed."""
        parts = {**self.added, "activations": own_bytes(events)}
        total = np.sum(list(parts.values()), axis=0)
        found = {}
        for phase, inside in (("forward", ~self.backward), ("backward", self.backward)):
            index = int(np.where(inside, total, -1).argmax())
            found[phase] = Moment(int(total[index]), {name: int(part[index]) for name, part in parts.items()})
        return {**found, "step": self.step}

    def most(self, own: np.ndarray) -> int:
        """Compute the peak bytes of the whole step, if the model's tensors take ``own`` bytes: two numbers for each
        event, as :func:`tools.memory.trace.own_bytes` returns them, for this or another number of rows."""
        return max(self.step.total, int((sum(self.added.values()) + own).max()))


@dataclass(frozen=True)
class Gathers:
    """Gathers of parameters by stage 3: ``most`` bytes gathered at one time, and ``traffic``, bytes in one step by kind
    of collective."""

    most: int = 0
    traffic: dict[str, int] = field(default_factory=dict)


def gathers(
    settings: Settings, inventory: Inventory, calls: Calls, passes: Sequence[bool], checkpointing: bool = False
) -> Gathers:
    """Compute the gathers of a model under stage 3 by DeepSpeed's limits; zero if parameters are not partitioned.

    Args:
        settings: settings of the run; its ``zero`` is that of this model (student or teacher).
        inventory: the model's parameters.
        calls: the largest calls of its modules.
        passes: an item for each pass over all parameters in a micro-batch (forward, backward): True if the pass gathers
            codes where possible.
        checkpointing: True if backward repeats the forward of each layer.
    """
    if not settings.partitions:
        return Gathers()
    zero, ranks = settings.zero, settings.ranks
    parameters = inventory.gathered(zero)
    sizes = {codes: sum(one.gathered(ranks, codes) for one in parameters) for codes in set(passes)}
    once = sum(one.padded(ranks) for one in parameters if one.forward_only)
    first, *others = (sizes[codes] for codes in passes)
    whole = sizes[passes[-1]]
    if checkpointing:  # frozen parameters are gathered for the repeated forward, and again for backward
        others.append(sum(one.padded(ranks) for one in parameters if not one.trains and one.name not in calls.leaves))
    reads = 3 if checkpointing else 2  # of the modules behind a module, between its forward and its backward
    ahead = min(zero.prefetch_bucket_size, zero.max_live_parameters) * settings.size
    live = zero.max_live_parameters * settings.size if ahead else 0
    reused = zero.max_reuse_distance // reads * settings.size
    kept = min(whole, max(live, reused and reused + calls.largest)) if others else 0
    # A student that is its own teacher reads in the order of a step: parameters that backward does not read are
    # released, and gathered again.
    again = sum(size - once for size in others) * (1 - kept / max(1, whole)) + once * max(0, len(passes) - 2)
    sent = round(first + again) * settings.accumulation
    buffer = 0 if zero.allgather_sequential else min(whole, max(calls.listed, ahead))
    read = min(whole, calls.largest + ahead) + buffer
    stays = kept * (len(passes) - 1)  # a student as its own teacher leaves as much again, not counted by DeepSpeed
    most = first - once if kept == whole else max(read, kept and min(whole, stays + ahead))
    # hpZ's second partitions are created when a parameter is released; those of trained parameters end with the step.
    trained, hpz = sum(one.padded(ranks) for one in parameters if one.trains), zero.zero_hpz_partition_size
    if hpz > 1 and settings.accumulation == 1:
        most -= kept * trained // max(1, whole) // hpz
    world = trained if hpz > 1 else sent
    return Gathers(most, {"all_gather": world, "all_gather in the hpZ group": sent - world})


def cost_of_step(
    settings: Settings,
    held: Held,
    inventory: Inventory,
    calls: Calls,
    events: Sequence[Event],
    *,
    gathered: Gathers,
    fused_optimizer: bool,
) -> StepCost:
    """Compute the cost of a step: bytes that the stage adds at each of ``events`` (the micro-batch's), the peak of the
    optimizer's step, and collectives. Host memory for copies in that step is added to ``held``. ``inventory``,
    ``calls`` and ``gathered`` are the student's; with ``fused_optimizer`` the optimizer makes no copies of the tensors
    that it updates (torch's fused AdamW, on CUDA)."""
    constant = sum(size for item, size in held.device.items() if item not in ("gradients", "buckets"))
    stage = _reduction(settings, held, inventory)
    numels = {parameter.name: parameter.numel for parameter in inventory.trained}
    rows: list[tuple[int, int, int, bool]] = []
    made = beside = 0  # bytes of gradients, and of buckets and late gradients
    until_step = late_gradients(settings, inventory)
    backward = False
    for event in events:
        whole = 0 if event.kind == TEACHER else gathered.most
        rows.append((constant + stage.always + made + beside, whole, 0, backward))
        if event.kind == "gradient":
            made += numels[event.name] * stage.grows + until_step.get(event.name, 0)
            beside = stage.bucket + _late(settings, calls, event.name, numels)
        copies = {"gradient": stage.copies, "end": stage.at_end}.get(event.kind, 0)
        backward = backward or event.kind == "loss"
        rows.append((constant + stage.always + made + beside, whole, copies, backward))
    *added, in_backward = (np.array(column) for column in zip(*rows, strict=True))
    at_rest = constant + held.device["gradients"] + (held.device["buckets"] if settings.stage == 3 else 0)
    copies = _copies_in_step(settings, held, inventory, fused_optimizer)
    step = Moment(at_rest + copies, {"held": at_rest, "copies": copies})
    traffic = Counter(_reduced(settings, inventory)) + Counter(gathered.traffic)
    return StepCost(dict(zip(("held", "gathered", "reduction"), added, strict=True)), in_backward, step, traffic)


@dataclass(frozen=True)
class _Reduction:
    """Memory in which a stage keeps and reduces gradients, in bytes."""

    always: int  # during the whole micro-batch, including gradients of earlier micro-batches
    grows: int = 0  # per element of a gradient, from the time when it is computed
    bucket: int = 0  # from the first gradient to the end of backward
    copies: int = 0  # only while a bucket is reduced in backward
    at_end: int = 0  # only at the end of backward


def _reduction(settings: Settings, held: Held, inventory: Inventory) -> _Reduction:
    gradients, buckets = held.device["gradients"], held.device["buckets"]
    ranks, size, communicated = settings.ranks, settings.size, settings.communicated
    several = settings.accumulation > 1
    sizes = [parameter.numel for parameter in inventory.trained]
    filled = _packed(sizes, settings.zero.reduce_bucket_size)
    if settings.stage == 3:
        # reduce_scatter_coalesced makes a flat copy, unless there is a single tensor that needs no padding, and a copy
        # of this rank's part in the dtype of accumulation.
        part = 0 if communicated == settings.accumulated else settings.accumulated
        flat = [0 if len(one) == 1 and one[0] % ranks == 0 else sum(one) for one in filled]
        copies = max(a * communicated + sum(one) // ranks * part for a, one in zip(flat, filled, strict=True))
        made = gradients - sum(late_gradients(settings, inventory).values())
        return _Reduction(made + buckets, copies=copies, at_end=copies)
    if settings.stage == 2:
        copies = max(sum(bucket) * communicated if len(bucket) > 1 else 0 for bucket in filled)
        always, first = (gradients, 0) if several else (0, gradients)
        return _Reduction(always, bucket=first + buckets, copies=copies, at_end=copies)
    if settings.bf16_optimizer:
        flat, each = inventory.flat(ranks), 0 if settings.immediate else size
        at_end = max(max(sizes) * FP32, _all_reduce(flat, FP32, settings))  # one gradient in fp32 at a time
        constant = sum(flat) * FP32
    elif settings.stage == 1:
        each, constant = settings.accumulated, 0
        at_end = buckets + max(map(sum, filled)) * communicated if ranks > 1 else 0
    else:
        each, constant, at_end = size, 0, _all_reduce(sizes, size, settings)
    return _Reduction(constant + several * each * sum(sizes), grows=0 if several else each, at_end=at_end)


def _all_reduce(sizes: Sequence[int], size: int, settings: Settings) -> int:
    """Compute the peak bytes of DeepSpeed's ``buffered_allreduce_fallback``: a flat copy of a bucket's tensors, and a
    copy in the dtype of communication."""
    copied = settings.communicated if settings.communicated != size else 0
    buffers = _packed(sizes, FALLBACK_BUCKET) if settings.ranks > 1 else []
    return max((sum(one) * (copied + (size if len(one) > 1 else 0)) for one in buffers), default=0)


def _packed(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Split sizes into consecutive lists with a sum of at most ``limit``; a larger size forms its own list."""
    buckets: list[list[int]] = [[]]
    for size in sizes:
        if buckets[-1] and sum(buckets[-1]) + size > limit:
            buckets.append([])
        buckets[-1].append(size)
    return buckets


def _late(settings: Settings, calls: Calls, name: str, numels: Mapping[str, int]) -> int:
    """Compute the bytes of gradients outside of the reduction bucket once the gradient ``name`` is computed: gradients
    of a leaf until the leaf's backward is done, a gradient larger than the bucket until it is reduced, and, without
    ``contiguous_gradients``, all gradients of a bucket, as the bucket then has no copies."""
    if settings.stage < 2:
        return 0
    if name in calls.leaves:
        return calls.leaves[name]
    bucket = settings.zero.reduce_bucket_size
    if not settings.zero.contiguous_gradients:
        return min(bucket, sum(numels.values())) * settings.size
    return numels[name] * settings.size if numels[name] > bucket else 0


def _copies_in_step(settings: Settings, held: Held, inventory: Inventory, fused: bool) -> int:
    """Compute the bytes of copies at the worst moment of the optimizer's step.

    Unless it is fused, torch's AdamW allocates the root of the second moment and the quotient. 8-bit moments are
    decoded in chunks. The norm needs one gradient at a time in fp64. An offloaded optimizer's copies are in
    ``held.host``.
    """
    adam = 0 if fused else 2 * FP32

    def working(name: str, size: int) -> int:
        return WORKING_BYTES * min(size, CHUNK) if name in inventory.coded else adam * size

    updated = inventory.updated(settings)
    most = max(working(*one) for one in updated)
    largest = max(parameter.numel for parameter in inventory.trained)
    if settings.stage == 0:
        return (elements(inventory.trained) * FP32 if settings.size != FP32 else 0) + most
    norm = FP64 * (-(-largest // settings.ranks) if settings.stage == 3 else largest)
    if settings.offloads_optimizer:
        held.host[STEP_COPIES] = most
        return norm if settings.stage == 3 else 0
    if settings.stage == 3:
        # Gradients in 16 bits are made one tensor before they are converted.
        flat = settings.accumulated if settings.accumulated != FP32 else 0
        return max(norm, *(FP32 * size + max(flat * size, working(name, size)) for name, size in updated))
    # The update reads the buffer in which fp32 gradients were summed, and a copy of gradients in another dtype.
    reads_buffer = settings.bf16_optimizer or (settings.stage == 2 and settings.size != settings.accumulated == FP32)
    return (0 if reads_buffer else FP32 * max(size for _, size in updated)) + max(most, norm)


def _reduced(settings: Settings, inventory: Inventory) -> dict[str, int]:
    """Compute the bytes of the collectives of gradients, and of parameters after the step (on stage 3 only parameters
    that persist)."""
    ranks, trained, flat = settings.ranks, elements(inventory.trained), sum(inventory.flat(settings.ranks))
    if ranks == 1:
        return {}
    if settings.stage == 0:
        return {"all_reduce": trained * settings.communicated}
    if settings.stage < 3:
        reduced = flat if settings.bf16_optimizer else trained
        times = settings.accumulation if settings.stage == 2 else 1
        return {"all_reduce": reduced * times * settings.communicated, "all_gather": flat * settings.size}
    padded = sum(-(-one.numel // ranks) * ranks for one in inventory.trained)
    kind = "reduce_scatter" if settings.zero.reduce_scatter else "all_reduce"
    persistent = sum(one.padded(ranks) for one in inventory.parameters if one.persists(settings.zero))
    return {kind: padded * settings.communicated * settings.accumulation, "all_gather": persistent}
