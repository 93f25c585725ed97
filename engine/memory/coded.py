"""What changes for the planner where weights travel as codes (:mod:`model.zero.quantized_gather`): bytes of gathers,
and scales."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import nn

from engine.memory.zero_gather import Buffer, Gatherer
from engine.memory.zero_parameters import Inventory, ShardedParameter
from engine.memory.zero_states import FP32
from model.zero.quantized_gather import NONE_GATHERED_QUANTIZED, can_gather_quantized
from quant import QuantLayer


@dataclass(frozen=True)
class QuantizedGather:
    """The weights of a model that can travel as codes.

    Attributes:
        names: of the weights; one that persists does not travel.
        scale_elements: elements of their scales, which every rank keeps whole, in fp32.
    """

    names: frozenset[str]
    scale_elements: int

    @classmethod
    def of(cls, model: nn.Module, layers: Iterable[QuantLayer]) -> "QuantizedGather":
        """Those of a model on the meta device."""
        coded = [layer for layer in layers if can_gather_quantized(layer)]
        weights = {id(layer.weight) for layer in coded}
        scales = {id(p): p.numel() for layer in coded for p in (layer.weight_s0, layer.weight_theta) if p is not None}
        names = frozenset(name for name, parameter in model.named_parameters() if id(parameter) in weights)
        return cls(names, sum(scales.values()))

    def replace_in(self, inventory: Inventory) -> Inventory:
        """``inventory`` with the gathering of codes, and with the scales that every rank keeps for it."""
        gatherer = partial(CodesGatherer, coded=self.names)
        return dataclasses.replace(inventory, beside={"scales of codes": self.scale_elements * FP32}, gatherer=gatherer)

    def problem(self, inventory: Inventory, zero: DeepSpeedZeroConfig) -> str | None:
        """Why the run would be refused: no weight travels as codes."""
        coded = (parameter for parameter in inventory.parameters if parameter.name in self.names)
        return NONE_GATHERED_QUANTIZED if all(parameter.persists(zero) for parameter in coded) else None


@dataclass
class _BufferOfBytes(Buffer):
    """A buffer of bytes, codes among them, which lives until the first of its parameters is read."""


@dataclass
class CodesGatherer(Gatherer):
    """Gathers a list that has a weight in codes into one buffer of bytes, whatever the dtypes.

    Attributes:
        coded: names of the weights that travel as codes while fake quant is on.
    """

    coded: frozenset[str] = frozenset()
    quantizes: bool = True
    _decoded: set[ShardedParameter] = field(default_factory=set)

    def switch(self, quantizes: bool) -> None:
        self.quantizes = quantizes
        for parameter in list(self._decoded):
            self._wait(parameter)
            self._release(parameter)
        self._decoded.clear()

    def _as_codes(self, parameter: ShardedParameter) -> bool:
        return parameter.name in self.coded and not parameter.persists(self.zero)

    def _send(self, missing: Sequence[ShardedParameter]) -> None:
        coded = [parameter for parameter in missing if self.quantizes and self._as_codes(parameter)]
        if not coded:  # hpZ never goes with codes
            super()._send(missing)
            return
        self._decoded.update(coded)
        codes = [parameter.padded(self.ranks) // parameter.size for parameter in coded]
        size = sum(codes) + sum(p.padded(self.ranks) for p in missing if not self._as_codes(p))
        self._in_flight(missing, _BufferOfBytes(size, len(missing)))
        self.count("all_gather", size)

    def _read(self, buffer: Buffer) -> None:
        if not isinstance(buffer, _BufferOfBytes):
            return super()._read(buffer)
        for other in [one for one, its in self._buffers.items() if its is buffer]:
            # Codes stay codes, with one number behind them; all else is copied out.
            codes = other.padded(self.ranks) // other.size + other.size
            self._hold(other, codes if self._as_codes(other) else other.numel * other.size)
        self.whole -= buffer.size
        buffer.size = 0

    def _release(self, parameter: ShardedParameter) -> None:
        super()._release(parameter)
        if parameter not in self._held:
            self._decoded.discard(parameter)
