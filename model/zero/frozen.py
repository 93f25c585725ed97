"""Frozen parameters in the files that DeepSpeed writes: left out there, and put in again when these are read.

DeepSpeed leaves out all of them or none (``exclude_frozen_parameters``), and among them are scales that were measured.
On the way back it wants all of them again: ``load_module_strict=False`` would pass over any name that is missing, and
on stage 3 a missing one is a KeyError. So what is kept is put back into what DeepSpeed is about to write, and what was
left out is put into what it has read, as the model has it.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS, FROZEN_PARAM_SHAPES
from deepspeed.runtime.utils import is_optimized_parameter
from torch import Tensor, nn

from model.zero.parameters import full_shape, is_partitioned

MODULE = "module"


@dataclass(frozen=True)
class LeftOut:
    """Frozen parameters of a model that a checkpoint does not hold.

    Attributes:
        model: the whole model, as it is now.
        names: of the parameters, tied ones under each of their names.
    """

    model: nn.Module
    names: Collection[str]

    def leave_out(self, state: dict[str, Any]) -> None:
        """Take them out of what a rank writes, where the engine saves with ``exclude_frozen_parameters``, which leaves
        out others too. A state of something else than a model stays as it is."""
        if not self.names or MODULE not in state:
            return
        module, frozen = state[MODULE], self._frozen()
        for name, value in self.model.state_dict().items():
            if name in self.names:
                module.pop(name, None)  # a second name of a tied one, which DeepSpeed leaves in
            else:
                module.setdefault(name, value)
        kept = {name: own for name, own in frozen.items() if name not in self.names}
        if any(map(is_partitioned, frozen.values())):
            state[FROZEN_PARAM_FRAGMENTS] = {name: _own_part(one).cpu() for name, one in kept.items()}
            state[FROZEN_PARAM_SHAPES] = {name: full_shape(one) for name, one in kept.items()}

    def put_in(self, state: dict[str, Any]) -> None:
        """Put them into what was read, as the model has them: whoever loads it then writes them onto themselves."""
        if not self.names or MODULE not in state:
            return
        own = self.model.state_dict()
        for name in self.names:
            state[MODULE].setdefault(name, own[name])
        if state.get(FROZEN_PARAM_FRAGMENTS) is not None:
            for name, parameter in self._frozen().items():
                if name in self.names:
                    state[FROZEN_PARAM_FRAGMENTS].setdefault(name, _own_part(parameter))

    def _frozen(self) -> dict[str, Tensor]:
        """What no optimizer has, each under its first name."""
        return {name: one for name, one in self.model.named_parameters() if not is_optimized_parameter(one)}


def _own_part(parameter: Tensor) -> Tensor:
    """What DeepSpeed writes of a frozen parameter: this rank's chunk of it under stage 3, padding included."""
    part: Tensor = parameter.ds_tensor if is_partitioned(parameter) else parameter  # type: ignore[attr-defined]
    return part.detach()
