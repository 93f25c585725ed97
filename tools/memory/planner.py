"""Predict the memory of a run before it begins: bytes per rank by item, for any ZeRO strategy, and if they fit.

The prediction needs only config.json, the recipe and a DeepSpeed configuration: no weights, no GPU, no process group.
Not predicted are the memory of the CUDA driver, NCCL and cuBLAS, fragmentation of the allocator's memory, and blocks
that are freed late because another stream reads them. An assumed ``RESERVE`` bytes are set aside for all of these.

:func:`advice` finds changes of a recipe that does not fit: the memory with each of them alone, and a set of them that
fits. A change is tried as a user would make it: the changed recipe is validated and predicted from its model's
config.json. Changes that the recipe refuses, or that have no effect, are left out.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from io import StringIO
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from engine.config.config import Recipe
from engine.config.deepspeed import DsConfigError, resolve, teacher_config
from engine.config.errors import RecipeError
from engine.losses.chunked import BLOCK_ELEMENTS
from engine.losses.objective import tokens_at_a_time
from engine.report import Measured
from engine.session.context import rows_of
from model.console import markdown_table, progress_bar
from model.ranks import RankError
from model.zero.quantized_gather import NONE_GATHERED_QUANTIZED, can_gather_quantized
from tools.memory.model import Step, meta_student, meta_teacher, student_events, teacher_events
from tools.memory.ptq_init import bytes_of_ptq_init
from tools.memory.step_cost import TEACHER, Moment, StepCost, cost_of_step, gathers
from tools.memory.trace import Event, own_bytes
from tools.memory.zero import (
    FP32,
    ITEMS,
    Held,
    Settings,
    bytes_of,
    held_by,
    held_partitions,
    module_calls,
    take_inventory,
)

RESERVE = 4 * 10**9
GB = 10**9
UNSET = "-"


@dataclass(frozen=True)
class Prediction:
    """Prediction for one strategy, in bytes of one rank."""

    strategy: str  # the recipe's ``deepspeed``
    settings: Settings
    held: Held  # between steps
    moments: dict[str, Moment]  # of most memory in each phase: forward, backward and step (the optimizer's)
    cost: StepCost
    largest_micro_batch: int | None = None  # rows per rank that fit, perhaps 0; None if it was not requested
    init: int = 0  # on the device while ``quant.init`` chooses codes, before there is an optimizer; 0 for rtn

    @property
    def peak(self) -> int:
        """Bytes on the device at the worst moment."""
        return max(self.init, *(moment.total for moment in self.moments.values()))

    @property
    def host(self) -> int:
        """Bytes of host memory."""
        return sum(self.held.host.values())


class Planner:
    """Predictor of a recipe's memory. It builds the model once, then predicts for several strategies and micro-batches.

    Args:
        recipe: the recipe of the run.
        device: ``cuda`` or ``cpu``. On CUDA AdamW is fused; on the CPU torch's AdamW makes copies, and the logits of
            more tokens exist at a time.
        ranks_per_node: number of ranks that share hpZ's second copies if the configuration does not set it.

    Raises:
        RankError: the model cannot be built; the text is the same as in a run.
    """

    def __init__(self, recipe: Recipe, *, device: str = "cuda", ranks_per_node: int = 8) -> None:
        chunk = tokens_at_a_time(recipe.loss.chunk_tokens, torch.device(device))
        self.recipe = recipe = replace(recipe, loss=replace(recipe.loss, chunk_tokens=chunk))
        self.ranks_per_node = ranks_per_node
        self.fused_optimizer = device == "cuda"
        self.block_elements = BLOCK_ELEMENTS[device]
        self.student, self.teacher = meta_student(recipe), meta_teacher(recipe)
        if (shared := rows_of(recipe)) is not None:
            shared.start()
        layers = list(self.student.quantization.layers.values())
        coded = [layer for layer in layers if recipe.quant.quantized_all_gather and can_gather_quantized(layer)]
        scales = {id(p): p.numel() for one in coded for p in (one.weight_s0, one.weight_theta) if p is not None}
        self.inventory = replace(
            take_inventory(self.student.model, recipe.optim, [layer.weight for layer in coded]),
            quantized=sum(layer.weight.numel() for layer in layers if layer.held is None),
            scales_of_codes=sum(scales.values()) * FP32,
        )
        self._events: dict[int, tuple[list[Event], Step]] = {}

    def events(self, rows: int) -> tuple[list[Event], Step]:
        """Return the events of the teacher's forward, and the student's step, for a micro-batch of ``rows`` rows."""
        if rows not in self._events:
            BLOCK_ELEMENTS["meta"] = self.block_elements
            try:
                before = teacher_events(self.student, self.teacher, rows)
                self._events[rows] = before, student_events(self.student, self.teacher, rows)
            finally:
                del BLOCK_ELEMENTS["meta"]
        return self._events[rows]

    def predict(self, strategy: str, ranks: int, *, gpu_bytes: int | None = None) -> Prediction:
        """Predict one strategy, a name in ds_configs/ or the path of a JSON file, with this number of ranks. With
        ``gpu_bytes``, the memory of a GPU, also predict the largest micro-batch that leaves ``RESERVE`` bytes. Raises
        DsConfigError if the configuration is wrong or contradicts the recipe, RecipeError if ``parallel.sequence`` does
        not divide ``ranks``."""
        recipe, inventory, model = replace(self.recipe, deepspeed=strategy), self.inventory, self.student.model
        recipe.check_ranks(ranks)
        config = resolve(recipe, ranks, local_size=min(ranks, self.ranks_per_node))
        settings = Settings.of(config, ranks)
        if recipe.quant.quantized_all_gather and not any(one.as_codes for one in inventory.gathered(settings.zero)):
            raise DsConfigError(f"{strategy}: {NONE_GATHERED_QUANTIZED}")
        held = held_by(settings, inventory)
        rows = recipe.data.micro_batch_size
        held.host["activations"] = self.events(rows)[1].on_host
        own_teacher = recipe.teacher_kind() == "self"
        checkpointing = recipe.train.activation_checkpointing
        calls = module_calls(model, inventory, config, settings)
        gathered = gathers(settings, inventory, calls, [False] * own_teacher + [True, True], checkpointing)
        if own_teacher:  # reads unquantized weights
            plain = module_calls(model, inventory, config, settings, as_codes=False)
            teacher = _Teacher(gathers(settings, inventory, plain, [False] * 3).most)
        else:
            teacher = self._teacher(config, settings, held)
        events = self._all(rows, teacher)
        cost = cost_of_step(
            settings, held, inventory, calls, events, gathered=gathered, fused_optimizer=self.fused_optimizer
        )
        cost.traffic.update(teacher.traffic)
        found = Prediction(strategy, settings, held, cost.moments(events), cost, init=self._init(settings, held, rows))
        if gpu_bytes is None:
            return found
        return replace(found, largest_micro_batch=self._largest(found, teacher, gpu_bytes - RESERVE))

    def _init(self, settings: Settings, held: Held, rows: int) -> int:
        """Compute the bytes on the device while ``quant.init`` chooses codes, with micro-batches of ``rows`` rows; 0
        for rtn."""
        chosen = bytes_of_ptq_init(self.student, settings, rows)
        return chosen and chosen + held.device["parameters"]

    def _teacher(self, config: dict[str, Any], settings: Settings, held: Held) -> "_Teacher":
        """Add the teacher's bytes to ``held``; return the memory and traffic of its gathers."""
        if self.teacher is None:
            return _Teacher()
        model = self.teacher.model
        inventory = take_inventory(model, None)
        head = sum(parameter.numel() * parameter.element_size() for parameter in self.teacher.head.parameters())
        if settings.stage < 3:
            held.add("teacher", bytes_of(inventory.parameters) + head)
            return _Teacher()
        its_config = teacher_config(config)
        its = replace(settings, zero=Settings.of(its_config, settings.ranks).zero)
        held_partitions(held, "teacher", its, inventory)
        held.add("teacher", -(-head // settings.ranks), settings.offloads_parameters)
        if not settings.partitions:
            return _Teacher()
        gathered = gathers(its, inventory, module_calls(model, inventory, its_config, its), [False])
        traffic = Counter(gathered.traffic) + Counter(all_gather=head * settings.accumulation)
        return _Teacher(gathered.most, head, traffic)

    def _all(self, rows: int, teacher: "_Teacher") -> list[Event]:
        """Return the events of a micro-batch: one for the teacher's whole forward, then the student's, with the
        teacher's lm_head gathered during the losses."""
        before, step = self.events(rows)
        most = max((event.peak for event in before), default=0) + teacher.gathered
        losses = [replace(one, peak=one.peak + teacher.head) if one.kind == "loss" else one for one in step.events]
        return [Event(TEACHER, "", 0, most), *losses]

    def _largest(self, found: Prediction, teacher: "_Teacher", limit: int) -> int:
        """Find the largest micro-batch that fits into ``limit`` bytes. Bytes of each event grow linearly with the rows,
        once the rows fill a chunk of the losses."""
        assert self.recipe.loss.chunk_tokens is not None
        few = -(-self.recipe.loss.chunk_tokens * self.recipe.parallel.sequence // self.recipe.data.max_length)
        first, second = (own_bytes(self._all(rows, teacher)).astype(float) for rows in (few, 2 * few))

        def fits(rows: int) -> bool:
            own = first + (second - first) * ((rows - few) / few)
            return max(found.cost.most(own), self._init(found.settings, found.held, rows)) <= limit

        too_many = 1
        while fits(too_many):
            too_many *= 2
        return bisect_left(range(too_many // 2 + 1, too_many), True, key=lambda rows: not fits(rows)) + too_many // 2


@dataclass(frozen=True)
class _Teacher:
    """Bytes that a teacher adds under stage 3; none on other stages."""

    gathered: int = 0  # at one time in its forward, at most
    head: int = 0  # of its lm_head, which is gathered for the losses
    traffic: Counter[str] = field(default_factory=Counter)  # of its gathers in one step, by kind


def headline(recipe: Recipe, ranks: int, parameters: int, trained: int) -> str:
    """Format the line above the table. ``parameters`` and ``trained`` are numbers of parameters."""
    checkpointing = "with" if recipe.train.activation_checkpointing else "without"
    return (
        f"{recipe.model.path}: {parameters / 1e9:.3f}e9 parameters, {trained / 1e9:.3f}e9 of them trained, "
        f"{recipe.model.dtype}; {ranks} ranks; {recipe.data.micro_batch_size} x {recipe.data.max_length:,} tokens per "
        f"micro-batch, {recipe.train.gradient_accumulation_steps} per step, {checkpointing} activation checkpointing"
    )


def memory_table(predictions: Sequence[Prediction], gpu_bytes: int | None) -> str:
    """Format a table of GB (10^9 bytes) per rank, with a column per strategy. Items that are 0 everywhere are left
    out. With ``gpu_bytes``, the memory of a GPU, rows show if each strategy fits, and its largest micro-batch."""
    rows: list[tuple[str, Callable[[Prediction], str]]] = []

    def row(name: str, value: Callable[[Prediction], float]) -> None:
        if any(value(one) for one in predictions):
            rows.append((name, lambda one: _gigabytes(value(one))))

    for item in ITEMS:
        row(item, lambda one, item=item: one.held.device[item])  # type: ignore[misc]
    row("gathered at most", lambda one: one.cost.gathered)
    row("activations, losses", lambda one: max(one.moments[p].parts["activations"] for p in ("forward", "backward")))
    row("copies in the step", lambda one: one.moments["step"].parts["copies"])
    for phase, name in (("forward", "peak in forward"), ("backward", "peak in backward"), ("step", "peak in the step")):
        row(name, lambda one, phase=phase: one.moments[phase].total)  # type: ignore[misc]
    row("peak of the first codes (GPTQ)", lambda one: one.init)
    row("peak", lambda one: one.peak)
    if gpu_bytes is not None:
        row("peak + reserve", lambda one: one.peak + RESERVE)
        rows.append((f"fits {gpu_bytes / GB:g} GB", lambda one: "yes" if one.peak + RESERVE <= gpu_bytes else "no"))
        rows.append(("largest micro-batch", lambda one: str(one.largest_micro_batch or UNSET)))
    row("host memory", lambda one: one.host)
    return markdown_table(
        [["GB per rank", *(one.strategy for one in predictions)]] + [[n, *map(v, predictions)] for n, v in rows]
    )


def traffic_table(predictions: Sequence[Prediction]) -> str:
    """Format a table of the collectives of one optimizer step: for each kind the GB (10^9 bytes) of the whole tensors
    that are gathered or reduced, with a column per strategy."""
    kinds = list(dict.fromkeys(kind for one in predictions for kind in one.cost.traffic))
    rows = [["GB per step", *(one.strategy for one in predictions)]]
    rows += [[kind, *(_gigabytes(one.cost.traffic[kind]) for one in predictions)] for kind in kinds]
    return markdown_table(rows)


def measured_table(prediction: Prediction, measured: Measured) -> str:
    """Format a table of predicted and measured bytes by item, and of the peak on CUDA. On the CPU, device and host are
    one memory."""
    on_host = measured.device == "cpu"
    rows = [
        (item, prediction.held.device[item] + (prediction.held.host[item] if on_host else 0), size)
        for item, size in measured.items.items()
    ]
    if measured.device == "cuda":
        predicted, found = sum(expected for _, expected, _ in rows), sum(size for _, _, size in rows)
        rows.append(("all else at the peak", prediction.peak - predicted, measured.peak - found))
        rows.append(("peak", prediction.peak, measured.peak))
    table = [["bytes on rank 0", "predicted", "measured", "difference", "of the prediction"]]
    for name, expected, found in rows:
        share = f"{100 * (found - expected) / expected:+.1f}%" if expected else UNSET
        table.append([name, f"{expected:,}", f"{found:,}", f"{found - expected:+,}", share])
    return markdown_table(table)


def _gigabytes(size: float) -> str:
    return f"{size / GB:,.2f}" if size >= GB / 100 or not size else f"{size / GB:.1g}"


# ---- advice

LORA = {"adapter.kind": "lora", "learnable.weight": False}
CACHE = {"loss.teacher_cache": "CACHE", "loss.kd": "kl_top_k", "loss.top_k": 100, "loss.diagnostics_every": 0}


class Saving(NamedTuple):
    """Change of a recipe that may save memory: the options to set, and its drawback in words (``cost``)."""

    settings: dict[str, Any]
    cost: str

    def __str__(self) -> str:
        return ", ".join(f"{key}: {str(value).lower()}" for key, value in self.settings.items())


def possible(recipe: Recipe) -> Iterator[Saving]:
    """Yield changes that may save memory, in the order in which to try them; adapters are last."""
    rows, steps = recipe.data.micro_batch_size, recipe.train.gradient_accumulation_steps

    def split(rows: int, steps: int, cost: str) -> Saving:
        return Saving({"data.micro_batch_size": rows, "train.gradient_accumulation_steps": steps}, cost)

    checkpointing = {"train.activation_checkpointing": True}
    yield Saving(checkpointing, "layers compute their forward twice")
    yield split(1, rows * steps, "same steps, smaller GEMMs")
    yield Saving({"deepspeed": "zero3"}, "weights are sent in each forward and backward")
    if steps > 1:
        yield split(rows * steps, 1, "same steps; gradients in 16 bits, but more activations")
    yield Saving({"loss.chunk_tokens": 1024}, "smaller GEMMs at lm_head")
    yield Saving({**checkpointing, "train.activation_offload": True}, "copies to and from the host")
    yield Saving({"optim.moments": "8bit"}, "updates are off by about 10%")
    yield Saving({"loss.teacher_weights": "int8"}, "the teacher's weights are rounded to 8 bits")
    yield Saving({"deepspeed": "zero3_offload"}, "the optimizer's step runs on the CPU")
    yield Saving(CACHE, "the teacher runs once before (launch/cache_teacher.py); only its 100 likeliest tokens count")
    yield Saving(
        {"deepspeed": "zero3_offload_param"}, "the optimizer's step runs on the CPU, and weights come from host memory"
    )
    yield Saving(LORA, "adapters train, not the weights")
    yield Saving(
        {**LORA, "adapter.merge": False, "adapter.base": "quantized"},
        "adapters train beside frozen codes, not the weights",
    )


@dataclass
class Advisor:
    """Predictor of the memory of ``recipe`` with some options changed."""

    recipe: Recipe
    ranks: int
    ranks_per_node: int = 8
    _planners: dict[str, Planner] = field(default_factory=dict, init=False)

    def predict(self, changes: Sequence[Saving]) -> Prediction | None:
        """Predict the recipe with ``changes`` (may be empty); None if the changed recipe is invalid, or equal to the
        original although there are changes."""
        recipe, settings = deepcopy(self.recipe), {k: v for change in changes for k, v in change.settings.items()}
        if changes and all(attrgetter(key)(recipe) == value for key, value in settings.items()):
            return None
        for key, value in settings.items():
            section, _, name = key.rpartition(".")
            setattr(attrgetter(section)(recipe) if section else recipe, name, value)
        strategy = settings.pop("deepspeed", self.recipe.deepspeed)
        with redirect_stdout(StringIO()), suppress(RecipeError, DsConfigError, RankError):  # notes of a built model
            recipe.validate()
            if (key := str(settings)) not in self._planners:
                self._planners[key] = Planner(recipe, ranks_per_node=self.ranks_per_node)
            return self._planners[key].predict(strategy, self.ranks)
        return None

    def alone(self, limit: int) -> list[tuple[Saving, Prediction]]:
        """Predict each change alone, and return those that lower the peak: first all that fit into ``limit`` bytes, in
        the order of :func:`possible`, then the others, largest saving first."""
        before = self.predict([])
        assert before is not None, "the recipe itself cannot be predicted"
        changes = progress_bar(desc="memory", unit="change", over=list(possible(self.recipe)))
        found = [(change, self.predict([change])) for change in changes]
        useful = [(change, one) for change, one in found if one is not None and one.peak < before.peak]
        return sorted(useful, key=lambda pair: (pair[1].peak > limit, pair[1].peak if pair[1].peak > limit else 0))

    def together(self, limit: int) -> tuple[list[Saving], Prediction] | None:
        """Find several changes with which the recipe fits into ``limit`` bytes, and the prediction with them. Changes
        that turn out to be unnecessary are left out. Return None if all changes that help are not enough."""
        chosen: list[Saving] = []
        best = self.predict(chosen)
        for change in possible(self.recipe):
            if best is not None and best.peak <= limit:
                break
            found = self.predict([*chosen, change])
            if found is not None and (best is None or found.peak < best.peak):
                chosen, best = [*chosen, change], found
        if best is None or best.peak > limit:
            return None
        for change in chosen[-2::-1]:
            others = [one for one in chosen if one is not change]
            if (found := self.predict(others)) is not None and found.peak <= limit:
                chosen, best = others, found
        return chosen, best


def advice(advisor: Advisor, gpu_bytes: int) -> str:
    """Format changes that reduce the memory of a recipe that does not fit ``gpu_bytes``: single changes, best first;
    if it fits with none of them, several together."""
    limit = gpu_bytes - RESERVE
    alone = advisor.alone(limit)
    table = [["change", "peak + reserve, GB", f"fits {gpu_bytes / GB:g} GB", "host, GB", "cost"]]
    for change, one in alone:
        fits = "yes" if one.peak <= limit else "no"
        table.append([str(change), f"{(one.peak + RESERVE) / GB:.2f}", fits, f"{one.host / GB:.2f}", change.cost])
    lines = [f"{advisor.recipe.deepspeed} does not fit {gpu_bytes / GB:g} GB. Changes, best first:", ""]
    lines += [markdown_table(table)]
    if not any(one.peak <= limit for _, one in alone):
        found = advisor.together(limit)
        if found is None:
            lines += ["", "All of them together do not fit either: use more ranks, shorter rows or a smaller model."]
        else:
            changes, best = found
            together = "; ".join(map(str, changes))
            lines += ["", f"Together these fit, {(best.peak + RESERVE) / GB:.2f} GB: {together}"]
    return "\n".join(lines)
