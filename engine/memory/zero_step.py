"""One optimizer step under a ZeRO stage: the bytes at its worst moments, and its collectives.

The events of a micro-batch (:mod:`engine.memory.meta_step`) say what the model itself holds at each moment. The replay
of a stage (:mod:`engine.memory.zero_stages`, :mod:`engine.memory.zero_stage_3`) says what the stage adds to it:
gradients as they are made, buckets and their reduction, parameters that are gathered, copies in the optimizer's step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.memory.meta_step import Event
from engine.memory.zero_cost import Additions, Moment, Traffic
from engine.memory.zero_parameters import Inventory, ModuleParameters
from engine.memory.zero_stage_3 import Stage3
from engine.memory.zero_stages import Stage0, Stage1, Stage2
from engine.memory.zero_states import Held, Settings

STAGES = (Stage0, Stage1, Stage2, Stage3)


@dataclass
class StepCost:
    """What one optimizer step costs.

    Attributes:
        additions: what the stage adds to a micro-batch's own bytes, each moment at the worst of all micro-batches.
        step: the worst moment of the optimizer's step itself.
        gathered: the most bytes of parameters that are gathered at one time.
        traffic: the collectives of the whole step.
    """

    additions: Additions
    step: Moment
    gathered: int
    traffic: Traffic

    def moments(self, events: Sequence[Event]) -> dict[str, Moment]:
        """The worst moment of each phase with these events: those that were replayed, or others of the same model."""
        worst = self.additions.worst
        return {
            "forward": worst(events, backward=False),
            "backward": worst(events, backward=True),
            "step": self.step,
        }


def cost_of_step(
    settings: Settings,
    held: Held,
    inventory: Inventory,
    modules: Mapping[str, ModuleParameters],
    events: Sequence[Event],
    *,
    fused_optimizer: bool,
    own_teacher: Sequence[Event] = (),
) -> StepCost:
    """Replay a step.

    Args:
        settings: those of the run.
        held: what the rank holds between steps. Of gradients and buckets the replay counts only what is there at each
            moment. Host memory for copies in the optimizer's step is added to it.
        inventory: the student's parameters.
        modules: the parameters of the student's modules, as stage 3 sees them.
        events: those of one micro-batch of the student.
        fused_optimizer: whether the optimizer makes no copies of what it updates (torch's fused AdamW, on CUDA).
        own_teacher: events of a forward in which the student is its own teacher. It comes before each micro-batch, at
            the event ``TEACHER``.
    """
    replay = STAGES[settings.stage](settings, held, inventory, modules, events, own_teacher)
    additions = replay.run()
    step = replay.optimizer(fused_optimizer)
    return StepCost(additions, step, int(additions.gathered.max()), replay.traffic)
