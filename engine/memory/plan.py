"""Memory of a run before it begins: bytes per rank by item, for any ZeRO strategy, and whether they fit.

From config.json, the recipe and a DeepSpeed configuration alone; no weights, no GPU, no process group. Not modeled are
what the CUDA driver, NCCL and cuBLAS take for themselves, holes in the allocator's memory and blocks that are freed
late because another stream reads them: ``RESERVE`` bytes are set aside for them, an assumption.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from engine.config.config import Recipe
from engine.config.deepspeed import DsConfigError, resolve, teacher_config
from engine.losses.objective import tokens_at_a_time
from engine.memory.coded import QuantizedGather
from engine.memory.meta_model import (
    META,
    MetaStudent,
    MetaTeacher,
    Step,
    meta_student,
    meta_teacher,
    student_events,
    teacher_events,
)
from engine.memory.meta_step import Event
from engine.memory.ptq_init import bytes_of_ptq_init
from engine.memory.zero_cost import Moment, Traffic, own_bytes
from engine.memory.zero_gather import Gatherer
from engine.memory.zero_parameters import Inventory, module_parameters, take_inventory
from engine.memory.zero_stage_3 import TEACHER
from engine.memory.zero_stages import STEP_COPIES
from engine.memory.zero_states import Held, Settings, held_by
from engine.memory.zero_step import StepCost, cost_of_step

RESERVE = 4 * 10**9


@dataclass(frozen=True)
class Prediction:
    """What is predicted for one strategy. Bytes are those of one rank.

    Attributes:
        strategy: the recipe's ``deepspeed``.
        settings: the part of its configuration that decides on memory.
        held: bytes between steps by item, on the device and in host memory.
        moments: the worst moments of forward, backward and the optimizer's step.
        cost: what one step costs, its collectives included.
        largest_micro_batch: how many rows per rank still fit; None where nothing was asked, 0 where not even one does.
        init: bytes on the device while the first codes are chosen, before there is an optimizer; 0 where
            nothing asks for it.
    """

    strategy: str
    settings: Settings
    held: Held
    moments: dict[str, Moment]
    cost: StepCost
    largest_micro_batch: int | None = None
    init: int = 0

    @property
    def peak(self) -> int:
        """Bytes on the device at the worst moment."""
        return max(self.init, *(moment.total for moment in self.moments.values()))

    @property
    def host(self) -> int:
        """Bytes of host memory."""
        return sum(self.held.host.values())

    @property
    def together(self) -> int:
        """Bytes at the worst moment where device and host share one memory, as on the CPU."""
        copies = self.held.host.get(STEP_COPIES, 0)
        step = self.moments["step"].total + copies
        training = self.host - copies + max(self.moments["forward"].total, self.moments["backward"].total, step)
        return max(training, self.init)


class Planner:
    """Predicts a recipe's memory: builds its model once, then answers for strategies and micro-batches.

    Args:
        recipe: the recipe of the run.
        fused_optimizer: whether AdamW is fused, as on CUDA; on the CPU torch's AdamW makes copies.
        ranks_per_node: how many ranks share hpZ's second copies where the configuration does not say it.

    Raises:
        RankError: the model cannot be built (as the run would say).
    """

    def __init__(self, recipe: Recipe, *, fused_optimizer: bool = True, ranks_per_node: int = 8) -> None:
        self.recipe = recipe
        self.ranks_per_node = ranks_per_node
        self.fused_optimizer = fused_optimizer
        self.student: MetaStudent = meta_student(recipe)
        self.teacher: MetaTeacher | None = meta_teacher(recipe)
        layers = self.student.quantization.layers.values()
        inventory = take_inventory(self.student.model, recipe.optim)
        codes = sum(layer.weight.numel() for layer in layers if layer.held is None)
        self.inventory: Inventory = dataclasses.replace(inventory, quantized=codes)
        self._coded: QuantizedGather | None = None
        if recipe.quant.quantized_all_gather:
            self._coded = QuantizedGather.of(self.student.model, layers)
            self.inventory = self._coded.replace_in(self.inventory)
        self._events: dict[int, tuple[list[Event], Step]] = {}

    def events(self, rows: int) -> tuple[list[Event], Step]:
        """The events of the teacher's forward, and the step of the student, for a micro-batch of ``rows`` rows."""
        if rows not in self._events:
            before = teacher_events(self.student, self.teacher, rows)
            self._events[rows] = before, student_events(self.student, self.teacher, rows)
        return self._events[rows]

    def predict(self, strategy: str, ranks: int, *, gpu_bytes: int | None = None) -> Prediction:
        """Predict one strategy.

        Args:
            strategy: a name in ds_configs/ or the path of a JSON file.
            ranks: how many ranks the run has.
            gpu_bytes: memory of a GPU, of which ``RESERVE`` is set aside; asks for the largest micro-batch that fits.

        Raises:
            DsConfigError: the configuration is wrong, or contradicts the recipe.
        """
        recipe = dataclasses.replace(self.recipe, deepspeed=strategy)
        config = resolve(recipe, ranks, local_size=min(ranks, self.ranks_per_node))
        settings = Settings.of(config, ranks)
        if self._coded is not None and (problem := self._coded.problem(self.inventory, settings.zero)):
            raise DsConfigError(f"{strategy}: {problem}")
        keeps_codes = settings.accumulation > 1
        held = held_by(settings, self.inventory, keeps_codes=keeps_codes)
        modules = module_parameters(self.student.model, self.inventory, config)
        before = self._teacher(config, settings, held)
        rows = recipe.data.micro_batch_size
        held.host["activations"] = self.events(rows)[1].on_host
        cost = cost_of_step(
            settings,
            held,
            self.inventory,
            modules,
            self._all(rows, before),
            fused_optimizer=self.fused_optimizer,
            own_teacher=self.events(rows)[0] if self.teacher is None else (),
        )
        cost.traffic.add(before.traffic, settings.accumulation)
        found = Prediction(
            strategy,
            settings,
            held,
            cost.moments(self._all(rows, before)),
            cost,
            first_codes=self._first_codes(settings, held, rows),
        )
        if gpu_bytes is None:
            return found
        return dataclasses.replace(found, largest_micro_batch=self._largest(found, before, gpu_bytes - RESERVE))

    def _first_codes(self, settings: Settings, held: Held, rows: int) -> int:
        """Bytes on the device while codes are chosen, of micro-batches of ``rows``; 0 where nothing asks for it."""
        chosen = bytes_of_ptq_init(self.student, settings, rows)
        return chosen and chosen + held.device["parameters"]

    def _teacher(self, config: dict[str, Any], settings: Settings, held: Held) -> "_OfTeacher":
        """Add what the teacher holds to ``held``; return what its forward gathers and sends."""
        if self.teacher is None:
            return _OfTeacher()
        model = self.teacher.model
        parameters = [*take_inventory(model, None).parameters]
        inventory = Inventory(parameters, {})
        head = sum(parameter.numel() * parameter.element_size() for parameter in self.teacher.head.parameters())
        if settings.stage < 3:
            held.add("teacher", sum(p.numel * p.size for p in parameters) + head)
            return _OfTeacher()
        of_teacher = dataclasses.replace(settings, zero=Settings.of(teacher_config(config), settings.ranks).zero)
        shares = held_by_frozen(of_teacher, inventory)
        held.add("teacher", shares + -(-head // settings.ranks), settings.offloads_parameters)
        if settings.ranks == 1:
            return _OfTeacher()
        modules = module_parameters(model, inventory, teacher_config(config))
        events, _ = self.events(self.recipe.data.micro_batch_size)
        traffic = Traffic()
        gatherer = Gatherer(modules, of_teacher.zero, settings.ranks, traffic.count)
        for _ in range(2):  # the first decides what each call may let go; the second is the one that counts
            gatherer.forget_most()
            traffic.clear()
            gatherer.begin(events)
            for event in events:
                gatherer.event(event)
        for parameter in self.teacher.head.parameters():
            traffic.count("all_gather", parameter.numel() * parameter.element_size())
        return _OfTeacher(gatherer.most, head, traffic)

    def _all(self, rows: int, teacher: "_OfTeacher") -> list[Event]:
        """The student's events, after one event that stands for the teacher's forward.

        The teacher's lm_head is whole during the losses.
        """
        before, step = self.events(rows)
        head = next(name for name, module in self.student.model.named_modules() if module is self.student.head)
        most = max((event.peak for event in before), default=0) + teacher.gathered
        events = [
            dataclasses.replace(event, peak=event.peak + teacher.head)
            if (event.name, event.kind) == (head, "forward_end")
            else event
            for event in step.events
        ]
        return [Event(TEACHER, "", 0, most), *events]

    def _largest(self, found: Prediction, teacher: "_OfTeacher", limit: int) -> int:
        """How many rows fit. Each event's bytes grow linearly with the rows once these fill a chunk of the losses."""
        chunks = -(-tokens_at_a_time(self.recipe.loss.chunk_tokens, META) // self.recipe.data.max_length)
        few, many = chunks, 2 * chunks
        first, second = (own_bytes(self._all(rows, teacher)).astype(float) for rows in (few, many))

        def peak(rows: int) -> int:
            own = first + (second - first) * ((rows - few) / (many - few))
            training = max(found.cost.step.total, found.cost.additions.most(own))
            return max(training, self._first_codes(found.settings, found.held, rows))

        if peak(1) > limit:
            return 0
        fits, too_many = 1, 2
        while peak(too_many) <= limit:
            fits, too_many = too_many, 2 * too_many
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            fits, too_many = (middle, too_many) if peak(middle) <= limit else (fits, middle)
        return fits


@dataclass(frozen=True)
class _OfTeacher:
    """What a teacher with a model of its own adds under stage 3; nothing on other stages.

    Attributes:
        gathered: the most bytes that its forward gathers at one time.
        head: bytes of its lm_head, which is gathered for the losses.
        traffic: the collectives of one micro-batch.
    """

    gathered: int = 0
    head: int = 0
    traffic: Traffic = field(default_factory=Traffic)


def held_by_frozen(settings: Settings, inventory: Inventory) -> int:
    """Bytes that a rank holds of a frozen model under stage 3: its shares, and the parameters that persist."""
    shares = sum(p.share(settings.ranks) + p.second_share(settings.zero, settings.ranks) for p in inventory.parameters)
    if settings.ranks == 1:
        return shares
    return shares + sum(p.numel * p.size for p in inventory.parameters if p.persists(settings.zero))
