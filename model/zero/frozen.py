"""Leave chosen frozen parameters out of the files that DeepSpeed writes, and restore them on reading.

DeepSpeed excludes all frozen parameters or none (``exclude_frozen_parameters``), and some of them are calibrated
scales. On loading it needs all of them: ``load_module_strict=False`` would ignore any missing name, and on stage 3 a
missing name is a KeyError. So parameters to keep are added to the state that DeepSpeed is about to write, and excluded
ones are added, with the model's values, to the state that it has read.
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
    """Frozen parameters of a model that its checkpoints exclude.

    Attributes:
        model: the whole model, as it is now.
        names: names of the excluded parameters, tied ones under each of their names.
    """

    model: nn.Module
    names: Collection[str]

    def leave_out(self, state: dict[str, Any]) -> None:
        """Remove the parameters from the state that a rank writes, and restore the other frozen ones, which
        ``exclude_frozen_parameters`` also dropped. A state other than a model's is not changed."""
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
            state[FROZEN_PARAM_FRAGMENTS] = {name: _local_part(one).cpu() for name, one in kept.items()}
            state[FROZEN_PARAM_SHAPES] = {name: full_shape(one) for name, one in kept.items()}

    def put_in(self, state: dict[str, Any]) -> None:
        """Add the parameters, with the model's current values, to a state that was read and is about to be loaded."""
        if not self.names or MODULE not in state:
            return
        own = self.model.state_dict()
        for name in self.names:
            state[MODULE].setdefault(name, own[name])
        if state.get(FROZEN_PARAM_FRAGMENTS) is not None:
            for name, parameter in self._frozen().items():
                if name in self.names:
                    state[FROZEN_PARAM_FRAGMENTS].setdefault(name, _local_part(parameter))

    def _frozen(self) -> dict[str, Tensor]:
        """Parameters that no optimizer updates, each under its first name."""
        return {name: one for name, one in self.model.named_parameters() if not is_optimized_parameter(one)}


def _local_part(parameter: Tensor) -> Tensor:
    """Part of a frozen parameter that DeepSpeed writes: under stage 3 this rank's chunk, padding included."""
    part: Tensor = parameter.ds_tensor if is_partitioned(parameter) else parameter  # type: ignore[attr-defined]
    return part.detach()
