"""Which parameters ZeRO-3 gathers at which moment, and how many bytes of them are whole then.

This replays the decisions of DeepSpeed's parameter coordinator.

DeepSpeed 0.19 decides per module call (runtime/zero/partitioned_param_coordinator.py): before it, what the module reads
is gathered, in one collective per dtype, and further parameters in the order of the trace until
``stage3_prefetch_bucket_size`` elements are under way or ``stage3_max_live_parameters`` are whole; after it, its
parameters are let go unless a module within the next ``stage3_max_reuse_distance`` elements reads them. A leaf module
is one call that reads all parameters below it. Parameters up to ``stage3_param_persistence_threshold`` elements are
let go only in the optimizer's step, after which they are gathered again.

A list of parameters is gathered into one flat buffer, from which each is copied when it is first read; the buffer
lives until the last of them is read. One parameter alone is gathered where it stays.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from engine.memory.meta_step import Event
from engine.memory.zero_parameters import ModuleParameters, ShardedParameter


@dataclass
class Buffer:
    """A flat buffer that several parameters were gathered into, and from which each is copied when it is read.

    Attributes:
        size: its bytes.
        waiting: how many of its parameters have not been read yet.
    """

    size: int
    waiting: int


@dataclass
class Gatherer:
    """The state of the coordinator. It is fed the events of a micro-batch.

    DeepSpeed decides in the first micro-batch what each later one may let go, so the counts are those of a step only
    from the second micro-batch on.

    Attributes:
        modules: the parameters of every module that has hooks, by module name.
        zero: DeepSpeed's settings.
        ranks: how many ranks a parameter is partitioned over.
        count: a function that is called with the kind and the bytes of each collective.
        whole: bytes that are gathered now, buffers included.
        most: the largest value of ``whole`` since :meth:`forget_most`.
    """

    modules: Mapping[str, ModuleParameters]
    zero: DeepSpeedZeroConfig
    ranks: int
    count: Callable[[str, int], None]
    whole: int = 0
    most: int = 0
    _held: dict[ShardedParameter, int] = field(default_factory=dict)
    _buffers: dict[ShardedParameter, Buffer] = field(default_factory=dict)
    _active: dict[ShardedParameter, set[str]] = field(default_factory=dict)
    _backward: dict[str, None] = field(default_factory=dict)
    _recomputed: dict[str, set[ShardedParameter]] = field(default_factory=dict)
    _secondary: set[ShardedParameter] = field(default_factory=set)
    _order: tuple[str, ...] = ()
    _queue: deque[tuple[ShardedParameter, int]] = field(default_factory=deque)
    _fetched: dict[ShardedParameter, int] = field(default_factory=dict)
    _released: dict[tuple[str, int], frozenset[ShardedParameter]] = field(default_factory=dict)
    _step: int = 0
    _available: int = 0

    def switch(self, quantizes: bool) -> None:
        """Turn fake quant on or off, on which the form may depend that weights travel in; here they are as they are."""

    def begin(self, events: Iterable[Event]) -> None:
        """A micro-batch begins. Its ``events``, forward and backward, say in which order modules are called."""
        if not self._order:
            calls = (event.name for event in events if event.kind in ("forward", "backward"))
            self._order = tuple(name for name in calls if name in self.modules)
        for parameter in list(self._buffers):
            self._wait(parameter)
            self._release(parameter)
        self._queue = deque(
            (parameter, step) for step, name in enumerate(self._order) for parameter in self.modules[name].gathered
        )
        self._fetched, self._step, self._available = {}, 0, 0

    def event(self, event: Event) -> None:
        """A module is called, or its call is over."""
        if event.name not in self.modules:
            return
        if event.kind in ("forward", "backward"):
            self._fetch(event.name, event.kind == "forward", event.recomputed)
        elif event.kind in ("forward_end", "backward_end"):
            self._let_go(event.name, event.kind == "forward_end")

    def end(self) -> None:
        """Backward is over. It ends the calls of modules too whose inputs have no gradient."""
        for name in reversed(list(self._backward)):
            self._backward.pop(name)
            recomputed = self._recomputed.pop(name, set())
            for parameter in {*self.modules[name].gathered, *recomputed}:
                self._active.get(parameter, set()).discard(name)
                if not parameter.persists(self.zero):
                    self._release(parameter)

    def step(self) -> None:
        """The optimizer steps: every parameter is let go, and those that persist are gathered anew."""
        for parameter in list(self._buffers):
            self._wait(parameter)
        self._active.clear()
        for parameter in list(self._held):
            self._release(parameter)
        self._secondary.clear()
        everything = dict.fromkeys(parameter for module in self.modules.values() for parameter in module.below)
        for parameter in everything:
            if parameter.persists(self.zero):
                self._gather([parameter])  # one collective for each

    def forget_most(self) -> int:
        """Return the most bytes that were whole since the last call, and begin to count anew."""
        most, self.most = self.most, self.whole
        return most

    # ---- one call

    def _fetch(self, name: str, forward: bool, recomputed: bool) -> None:
        if not forward:
            self._backward[name] = None
        needed = self.modules[name].gathered
        self._gather(needed)
        for parameter in needed:
            self._active.setdefault(parameter, set()).add(name)
            # A frozen parameter that is recomputed for a module is let go when that module's backward is done.
            if recomputed and self._backward and not parameter.trains:
                owner = next(reversed(self._backward))
                self._recomputed.setdefault(owner, set()).add(parameter)
                self._active[parameter].add(owner)
            self._wait(parameter)
        new = {parameter for parameter in needed if self._fetched.get(parameter, -1) < self._step}
        while self._queue and new:
            parameter, last = self._queue.popleft()
            self._fetched[parameter] = last
            new.discard(parameter)
        self._prefetch()
        self._step += 1

    def _prefetch(self) -> None:
        limit = min(self.zero.max_live_parameters - self._available, self.zero.prefetch_bucket_size)
        chosen: dict[ShardedParameter, None] = {}
        elements = 0
        while self._queue and elements < limit:
            parameter, last = self._queue.popleft()
            self._fetched[parameter] = max(self._fetched.get(parameter, -1), last)
            if parameter not in self._held and parameter not in chosen:
                chosen[parameter] = None
                elements += parameter.numel
        self._gather(list(chosen))

    def _let_go(self, name: str, forward: bool) -> None:
        let_go = set(self._to_release(name))
        parameters = set(self.modules[name].gathered)
        if not forward:
            recomputed = self._recomputed.pop(name, set())
            let_go |= {parameter for parameter in recomputed if not parameter.persists(self.zero)}
            parameters |= recomputed
            self._backward.pop(name, None)
        for parameter in parameters:
            self._active.get(parameter, set()).discard(name)
            if parameter in let_go:
                self._release(parameter)

    def _to_release(self, name: str) -> frozenset[ShardedParameter]:
        """The parameters that a call may let go: DeepSpeed decides when the call first comes, and stays with it."""
        key = (name, self._step)
        if key not in self._released:
            own = self.modules[name]
            chosen = {parameter for parameter in own.gathered if not parameter.persists(self.zero)}
            chosen -= {parameter for parameter in own.gathered if self._fetched.get(parameter, -1) > self._step}
            distance = 0
            for following in self._order[self._step :]:
                if distance >= self.zero.max_reuse_distance or not chosen:
                    break
                # DeepSpeed looks below the modules that follow if the one that is done is a leaf.
                module = self.modules[following]
                read = module.below if own.leaf else module.direct
                chosen.difference_update(read)
                distance += sum(parameter.numel for parameter in read)
            self._released[key] = frozenset(chosen)
        return self._released[key]

    # ---- one parameter

    def _gather(self, parameters: Sequence[ShardedParameter]) -> None:
        missing = [parameter for parameter in dict.fromkeys(parameters) if parameter not in self._held]
        self._available += sum(parameter.numel for parameter in missing)
        there = [parameter for parameter in missing if parameter.whole or self.ranks == 1]
        self._held.update(dict.fromkeys(there, 0))  # the partition is the parameter
        missing = [parameter for parameter in missing if parameter not in self._held]
        self._send(missing)

    def _send(self, missing: Sequence[ShardedParameter]) -> None:
        """Start gathering parameters that are partitioned and not there."""
        for secondary in (True, False):
            some = [parameter for parameter in missing if (parameter in self._secondary) == secondary]
            kind = "all_gather in the hpZ group" if secondary else "all_gather"
            if len(some) == 1 or self.zero.allgather_sequential:
                for parameter in some:
                    self._hold(parameter, parameter.padded(self.ranks))
                    self.count(kind, parameter.padded(self.ranks))
                continue
            for dtype in sorted({parameter.dtype for parameter in some}):
                together = [parameter for parameter in some if parameter.dtype == dtype]
                size = sum(parameter.padded(self.ranks) for parameter in together)
                self._in_flight(together, Buffer(size, len(together)))
                self.count(kind, size)

    def _in_flight(self, parameters: Sequence[ShardedParameter], buffer: Buffer) -> None:
        self._add(buffer.size)
        for parameter in parameters:
            self._held[parameter] = 0
            self._buffers[parameter] = buffer

    def _wait(self, parameter: ShardedParameter) -> None:
        """The parameter is read. When the first parameter of a buffer is read, all of them are copied out of it."""
        buffer = self._buffers.get(parameter)
        if buffer is None:
            return
        if not self._held[parameter]:
            self._read(buffer)
        del self._buffers[parameter]
        buffer.waiting -= 1
        if not buffer.waiting:
            self.whole -= buffer.size

    def _read(self, buffer: Buffer) -> None:
        """Copy all parameters out of a buffer."""
        for other in [one for one, its in self._buffers.items() if its is buffer]:
            self._hold(other, other.numel * other.size)

    def _hold(self, parameter: ShardedParameter, size: int) -> None:
        self._held[parameter] = size
        self._add(size)

    def _add(self, size: int) -> None:
        self.whole += size
        self.most = max(self.most, self.whole)

    def _release(self, parameter: ShardedParameter) -> None:
        if parameter in self._held and parameter not in self._buffers and not self._active.get(parameter):
            self.whole -= self._held.pop(parameter)
            self._available -= parameter.numel
            if self.zero.zero_hpz_partition_size > 1 and parameter.trains:
                self._secondary.add(parameter)
