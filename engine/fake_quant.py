"""Switches of fake quantization during training (``state.quant``), and the input scales that they need.

Input scales are measured by forward passes of the unquantized model, on any ZeRO stage. Input, key and value scales
that were loaded from files are checked on one micro-batch per rank (:func:`check_inputs`). :func:`measure` computes
statistics of the quantization while training: scales, clipped shares and the error of every weight.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from data.loader import MicroBatch, sample_inputs, token_positions, without_wait
from engine.config.config import Recipe
from engine.session.context import rows_of
from engine.session.session import Session
from model.console import progress_bar
from model.quantized.quantization_config import is_quantized
from model.ranks import RankError, raise_problems, reduce_over_ranks, say
from model.scales.in_place import (
    WeightStatistics,
    follow_weights,
    input_scales,
    renew_weight_scales,
    weight_statistics,
    write_scales,
)
from model.zero import forward_only, reset_moments, reset_optimizer_state, zero_parameters
from quant import Quantization, ScaleGroup, weights_changed
from quant.adapters import DecoupledScale, without_adapters
from quant.observers import only_tokens, scale_from_histogram
from quant.rules import exempt_line
from quant.scale import first_input_scale


def observed_input_scales(quantization: Quantization, owners: Set[str]) -> dict[str, Tensor]:
    """Compute static activation scales from the observers of all ranks; a collective.

    Returns:
        fp32 tensors of shape (1,), equal on every rank, for the scale groups of ``owners``, by owner.

    Raises:
        RankError: on every rank, naming layers whose inputs were never seen, were all zero, or had NaN or Inf.
    """
    groups = [group for group in quantization.input_groups if group.owner in owners]
    if not groups:
        return {}
    device = groups[0].s0.device
    absmax = torch.stack([group.observer.absmax.to(device) for group in groups if group.observer is not None])
    # A MAX reduction may drop NaN; Inf survives it.
    absmax = torch.where(torch.isnan(absmax), torch.inf, absmax)
    absmax = reduce_over_ranks(absmax, dist.ReduceOp.MAX)
    values = dict(zip((group.owner for group in groups), absmax.tolist(), strict=True))
    if not all(0 < value < math.inf for value in values.values()):
        raise RankError(_without_scales(values, quantization))  # on every rank: they have the same values
    ranges = quantization.ranges
    if ranges.inputs == "absmax":
        return {
            group.owner: first_input_scale(torch.tensor([values[group.owner]]), group.spec, ranges.headroom)
            for group in groups
        }
    scales = {}
    for group in groups:
        assert group.observer is not None and group.observer.histogram is not None
        counts = reduce_over_ranks(group.observer.histogram.to(group.s0.device))
        scales[group.owner] = scale_from_histogram(counts, ranges, group.spec)
    return scales


def _without_scales(absmax: dict[str, float], quantization: Quantization) -> str:
    """Return the error text for input groups without a scale: absmax is not finite, or 0 (no inputs, or all zero)."""
    bad = [owner for owner, value in absmax.items() if not math.isfinite(value)]
    unseen = [owner for owner, value in absmax.items() if value == 0]
    problems = []
    if bad:
        problems.append(f"inputs with NaN or Inf: {', '.join(bad[:20])}")
    if len(unseen) == len(absmax):
        problems.append(
            "observers have seen no inputs: let them watch (observe: true) in the steps before fake quant starts, and "
            "in the last steps of a run that ends without it; a calibration needs batches with inputs other than 0 for "
            f"{', '.join(unseen[:3])}"
        )
    elif unseen:
        layers = [owner for owner in unseen if owner in quantization.layers]
        remedy = f"; to leave them as they are, set {exempt_line(layers)}" if layers else ""
        problems.append(f"inputs that no batch reached, or that are all zero: {', '.join(unseen[:20])}{remedy}")
    return "; ".join(problems)


@torch.no_grad()
def calibrate_inputs(
    forward: nn.Module,
    quantization: Quantization,
    owners: Set[str],
    batches: Iterable[MicroBatch],
    device: torch.device,
) -> None:
    """Measure the input scales of the scale groups of ``owners`` on ``batches`` with the unquantized model, and write
    them; a collective. Every rank needs the same number of batches. ``forward`` is the engine (or the plain model).
    Switches and observers are restored. Raises RankError on every rank if a layer's inputs were never seen, were all
    zero, or had NaN or Inf."""
    with _observing(forward, quantization):
        for batch in progress_bar(desc="calibration", unit="batch", over=list(batches)):
            watch_inputs(forward, quantization, batch, device)
        write_scales(quantization.input_groups, observed_input_scales(quantization, owners))


@contextmanager
def _observing(forward: nn.Module, quantization: Quantization, *, quantized: bool = False) -> Iterator[None]:
    """Context in evaluation mode with observers on and weights unquantized; all switches are restored afterwards.
    ``quantized``: inputs are fake-quantized."""
    was_training = forward.training
    try:
        forward.eval()
        with quantization.paused():
            quantization.set_fake_quant(weights=False, activations=quantized)
            quantization.observe(True)
            yield
    finally:
        forward.train(was_training)


def watch_inputs(forward: nn.Module, quantization: Quantization, batch: MicroBatch, device: torch.device) -> None:
    """Run the samples of a batch through the model, one at a time, without padding and attention mask; a collective.
    The caller must have switched the observers on."""
    # One sample at a time, without its padding, which is never served.
    samples = list(sample_inputs(batch))
    # Packed or last rows hold unequal numbers of samples, and a forward is a collective under ZeRO-3: a rank with fewer
    # samples runs some tokens that are not counted.
    most = int(reduce_over_ranks(torch.tensor(len(samples)), dist.ReduceOp.MAX))
    for sample in samples:
        with forward_only(forward):
            forward(input_ids=sample.to(device), use_cache=False)
    with quantization.paused():
        for _ in range(most - len(samples)):
            with forward_only(forward):
                forward(input_ids=batch["input_ids"][:1, :2].to(device), use_cache=False)


def observing_tokens(session: Session, batch: MicroBatch) -> AbstractContextManager[None]:
    """Context in which observers ignore the padding of ``batch``, whose tensors are on the CPU."""
    mask = token_positions(batch) if session.quantization.observing else None
    if mask is not None and (rows := rows_of(session.recipe)) is not None:
        mask = mask[:, rows.share(mask.shape[1])]
    if mask is None:
        return nullcontext()
    return only_tokens(without_wait(mask, session.device), int(mask.sum()))


# Kind of scale group -> the parameter group of its thetas.
THETA_GROUPS = {"weight": "weight_scales", "input": "act_scales"}


class FakeQuant:
    """Switches of fake quantization; call every method on all ranks at the same step.

    A scale group (layers that share a scale) is *active* while at least one of its members is fake-quantized, else
    inactive. The theta of an inactive group does not change: its gradient is 0, and its Adam moments are set to 0 when
    the group becomes inactive. After a step that trains weights, norms, routers or merged adapters, an inactive group
    is *outdated*: its scale fits an earlier model. Switching fake quant on measures the scales of outdated groups again
    (weight scales from the current weights, input scales from the observers), and restarts their thetas at 0 with fresh
    moments. If the thetas of all groups of a kind (weight or input) restart, their learning rate warms up again.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.quantization = session.quantization
        self.overrides = session.overrides
        self.forgets = False
        """True: the observers are reset when the next step begins."""
        self.scale_steps = dict.fromkeys(THETA_GROUPS.values(), 0)
        """Optimizer steps with fake quant since the scales were measured, by parameter group."""
        self.stale: dict[str, set[str]] = {"weight": set(), "input": set(session.uncalibrated)}
        """Owners of the groups with outdated scales, and of inputs that were never calibrated, by kind."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint; the quantization saves its own switches."""
        return {
            "forgets": self.forgets,
            "scale_steps": dict(self.scale_steps),
            "stale": {kind: set(owners) for kind, owners in self.stale.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.forgets = state["forgets"]
        self.scale_steps = dict(state["scale_steps"])
        self.stale = {kind: set(owners) for kind, owners in state["stale"].items()}

    @property
    def enabled(self) -> bool:
        """True if any layer is fake-quantized."""
        return any(weights or inputs for weights, inputs in self.quantization.fake_quant_state().values())

    @property
    def any_stale(self) -> bool:
        """True if any scale is outdated, or any input scale was never calibrated."""
        return any(self.stale.values())

    def enable(self, *, weights: bool = True, activations: bool = True, layers: str | None = None) -> None:
        """Switch fake quant on in all layers, or in layers whose whole name matches the regex ``layers``; a collective.

        ``weights=False`` or ``activations=False`` switches that part off in these layers. Outdated scales are measured
        again. Inputs are observed as long as any of them stays unquantized.

        Raises:
            ValueError: the pattern matches no layer.
            RankError: a weight has NaN or Inf; or inputs to quantize were never observed, all zero, or had NaN or Inf.
        """
        self._switch(weights, activations, layers, observe=True)

    def disable(self, *, layers: str | None = None, observe: bool = True) -> None:
        """Switch fake quant off in all layers, or in layers whose whole name matches the regex ``layers``. ``observe``:
        True to observe inputs, for their scales; False if fake quant stays off. Raises ValueError if the pattern
        matches no layer."""
        self._switch(False, False, layers, observe=observe)

    def _switch(self, weights: bool, activations: bool, layers: str | None, *, observe: bool) -> None:
        before = self._active()
        self.quantization.set_fake_quant(weights, activations, layers)
        now = self._active()
        self._begin({kind: now[kind] - before[kind] for kind in now})
        self._rest({kind: before[kind] - now[kind] for kind in now})
        watch = observe and len(now["input"]) < len(self.quantization.input_groups)
        if watch != self.quantization.observing:  # starting again would clear the observers
            self.quantization.observe(watch)

    def observe(self, on: bool) -> None:
        """Start or stop observing inputs. Starting clears earlier statistics: at once if observers are off, else when
        the next step begins. Until then an evaluation, an export or a start of fake quant may use the earlier ones."""
        self.forgets = on and self.quantization.observing
        if not self.forgets:
            self.quantization.observe(on)

    def forget(self) -> None:
        """Clear the observers' statistics; the loop calls it at the start of a step if :attr:`forgets` is True."""
        self.observe(False)
        self.observe(True)

    def freeze_scales(self, on: bool = True) -> None:
        """Freeze learned scales, or with ``on=False`` train them again; both reset their moments and step counts."""
        self.overrides.frozen = set(THETA_GROUPS.values()) if on else set()
        for group in THETA_GROUPS.values():
            reset_optimizer_state(self.session.engine.optimizer, group)

    def learning(self, group: str) -> bool:
        """Tell if the thetas of a parameter group (weight_scales, act_scales) train now: fake quant is on in one of
        their layers, and they are not frozen."""
        kind = next(kind for kind, name in THETA_GROUPS.items() if name == group)
        return bool(self._active()[kind]) and group not in self.overrides.frozen

    def stepped(self) -> None:
        """Count a training step for active scales, and mark inactive scales as outdated, unless the recipe trains only
        scales or unmerged adapters. With ``quant.scales_follow_weights`` also measure the weight scales again, which is
        a collective."""
        if self.session.recipe.quant.scales_follow_weights:
            follow_weights(self.quantization)
            weights_changed(self.session.model)
        active = self._active()
        for kind, group in THETA_GROUPS.items():
            self.scale_steps[group] += bool(active[kind])
            if self.session.recipe.invalidates():
                self.stale[kind] |= set(self._groups(kind)) - active[kind]

    def calibrate(self, batches: Iterable[MicroBatch]) -> None:
        """Measure the input scales that no checkpoint provides, on batches of every rank; a collective. Does nothing if
        no scale is missing. Raises RankError as :func:`calibrate_inputs` does."""
        if not self.stale["input"]:
            return
        say(f"calibrating activations on {self.session.recipe.quant.calibration_batches} micro-batches per rank")
        self._calibrate(self.stale["input"], batches)
        self.stale["input"] = set()

    def measure(self, batches: Iterable[MicroBatch] = ()) -> None:
        """Measure every outdated scale again, for an export; a collective. Outdated input scales are measured from the
        observers if these are on, else on ``batches``. Raises RankError as :meth:`enable` does."""
        self._begin({kind: set(owners) for kind, owners in self.stale.items()}, batches)

    @contextmanager
    def as_served(self, batches: Iterable[MicroBatch]) -> Iterator[None]:
        """Context with serving numerics: all layers fake-quantized, no outdated scale, no observer; a collective.
        Outdated scales are measured and written at its start: those of inputs from the observers if these are on, else
        on ``batches``. Switches and observers are restored at its end. Raises RankError as :meth:`enable` does."""
        self._write(self.stale, batches)
        try:
            with self.quantization.paused():
                self.quantization.set_fake_quant(weights=True, activations=True)
                weights_changed(self.session.model)
                yield
        finally:
            weights_changed(self.session.model)

    def _groups(self, kind: str) -> dict[str, ScaleGroup]:
        groups = self.quantization.weight_groups if kind == "weight" else self.quantization.input_groups
        return {group.owner: group for group in groups}

    def _active(self) -> dict[str, set[str]]:
        """Find the owners of the active scale groups, by kind."""
        state = self.quantization.fake_quant_state()
        return {
            kind: {
                owner
                for owner, group in self._groups(kind).items()
                if any(state[name][index] for name in group.members)
            }
            for index, kind in enumerate(THETA_GROUPS)
        }

    def _begin(self, owners: dict[str, set[str]], batches: Iterable[MicroBatch] | None = None) -> None:
        """Restart the outdated groups among ``owners`` (by kind): set their thetas to 0 and measure their scales, on
        ``batches`` as in :meth:`_write`; a collective."""
        stale = {kind: owners[kind] & self.stale[kind] for kind in owners}
        recipe, inputs = self.session.recipe, stale["input"] - self.session.uncalibrated
        self._warn_of_lost_scales("weight", stale["weight"], recipe.quant.scales_brought_by())
        self._warn_of_lost_scales("input", inputs, files_of_input_scales(recipe) or "quant.initial_input_scale")
        for kind, begun in stale.items():
            self._restart(kind, begun)
        self._write(stale, batches)
        for kind, measured in stale.items():
            self.stale[kind] -= measured

    def _warn_of_lost_scales(self, kind: str, owners: set[str], source: str | None) -> None:
        """Warn that the scales from ``source`` are replaced by measured ones; None: they were measured, no warning."""
        if owners and source is not None:
            say(
                f"warning: {kind} scales that {source} gave are lost: {len(owners)} of {len(self._groups(kind))} are "
                "measured again, since the model has trained while their fake quant was off"
            )

    def _rest(self, owners: dict[str, set[str]]) -> None:
        """Deactivate scale groups: zero the moments of their thetas, which then do not change, and clear their
        observers."""
        for kind, resting in owners.items():
            thetas = self._thetas(kind, resting) + self._code_thetas(kind, resting)
            reset_moments(self.session.engine.optimizer, thetas)
            for group in (self._groups(kind)[owner] for owner in resting):
                if group.observer is not None:
                    group.observer.reset()

    def _write(self, owners: dict[str, set[str]], batches: Iterable[MicroBatch] | None = None) -> None:
        """Measure the scales of groups from the current weights and the observers, and write them; a collective. If
        the observers are off, inputs are measured on ``batches``, if given. Decoupled scales start again at 0."""
        if not any(owners.values()):
            return
        if owners["weight"]:
            # A decoupled scale is a factor on the weight: measured with it, the stored scale would contain it, too.
            zero_parameters(self.session.engine.optimizer, self._code_thetas("weight", owners["weight"]))
            renew_weight_scales(self.quantization, owners["weight"])
        if owners["input"] and batches is not None and not self.quantization.observing:
            self._calibrate(owners["input"], batches)
        elif owners["input"]:
            write_scales(self.quantization.input_groups, observed_input_scales(self.quantization, owners["input"]))
        weights_changed(self.session.model)

    def _calibrate(self, owners: set[str], batches: Iterable[MicroBatch]) -> None:
        base = self.session.recipe.adapter.beside  # then the base model serves other adapters, too
        with without_adapters(self.quantization) if base else nullcontext():
            calibrate_inputs(self.session.engine, self.quantization, owners, batches, self.session.device)

    def _thetas(self, kind: str, owners: set[str]) -> list[Parameter]:
        groups = [group for owner, group in self._groups(kind).items() if owner in owners]
        return [group.theta for group in groups if group.theta is not None]

    def _code_thetas(self, kind: str, owners: set[str]) -> list[Parameter]:
        """List the Parameters of decoupled scales of the groups' layers."""
        names = [name for owner, group in self._groups(kind).items() if owner in owners for name in group.members]
        adapters = [layer.adapter for name in names if (layer := self.quantization.layers.get(name)) is not None]
        return [one.code_theta for one in adapters if kind == "weight" and isinstance(one, DecoupledScale)]

    def _restart(self, kind: str, owners: set[str]) -> None:
        """Set thetas to 0, in the optimizer's fp32 masters too, and zero their moments; a collective."""
        thetas = self._thetas(kind, owners)
        zero_parameters(self.session.engine.optimizer, thetas)
        if owners == self._groups(kind).keys():
            reset_optimizer_state(self.session.engine.optimizer, THETA_GROUPS[kind])
            self.scale_steps[THETA_GROUPS[kind]] = 0


# Limits of check_input_scales. MOST_CLIPPED: largest share of an input's elements that a scale may clip (a Gaussian
# clipped at 1.6 standard deviations). TOO_LARGE: largest ratio of a scale to the absmax scale of a few samples. A token
# with a massive activation, which these samples may lack, makes the ratio some hundred. An absmax that was not divided
# by the largest code makes it 448 for e4m3.
MOST_CLIPPED, TOO_LARGE = 0.1, 256.0


def files_of_input_scales(recipe: Recipe) -> str | None:
    """Return the checkpoint directory that input, key and value scales are read from; None if there is none."""
    given = recipe.quant.start or recipe.quant.scales
    return given or (recipe.model.path if is_quantized(Path(recipe.model.path)) else None)


def check_inputs(session: Session, first: Callable[[int], Iterable[MicroBatch]]) -> None:
    """Run each rank's first training micro-batch, ``first(1)``, to check the input scales that were read from files; a
    collective. Call it after calibration. Raises RankError on every rank if a scale cannot belong to the inputs."""
    quant = session.recipe.quant
    source = files_of_input_scales(session.recipe)
    if source is None:
        return
    owners = {group.owner for group in session.quantization.input_groups} - session.uncalibrated
    if quant.initial_input_scale is not None:  # groups without a scale in the files have this one
        written, scales = torch.tensor(quant.initial_input_scale).item(), input_scales(session.quantization)
        owners = {owner for owner in owners if scales[owner] != written}
    check_input_scales(session.engine, session.quantization, owners, first(1), session.device, source)


@torch.no_grad()
def check_input_scales(
    forward: nn.Module,
    quantization: Quantization,
    owners: Set[str],
    batches: Iterable[MicroBatch],
    device: torch.device,
    source: str,
) -> None:
    """Run ``batches`` with quantized inputs and refuse scales that cannot belong to these inputs; a collective.

    The scales of the input groups of ``owners`` are checked; ``source`` is their origin, for the error. The model is
    left unchanged. A scale passes if it clips at most a share :data:`MOST_CLIPPED` of the elements, and is at most
    :data:`TOO_LARGE` times the absmax scale of these inputs. The global scale of dynamic scales (NVFP4) passes if it is
    within a factor :data:`TOO_LARGE` of the absmax scale, on both sides.

    Raises RankError on every rank; the message has the inputs, their scales in files and batches, and the remedy.
    """
    groups = [group for group in quantization.input_groups if group.owner in owners]
    if not groups:
        return
    scales = input_scales(quantization)
    with _observing(forward, quantization, quantized=True):
        for batch in batches:
            watch_inputs(forward, quantization, batch, device)
        seen = [group.observer for group in groups if group.observer is not None]
        counts = torch.tensor([[each.clipped.item(), each.total] for each in seen], dtype=torch.float64)
        largest = torch.tensor([each.absmax.item() for each in seen])
    counts, largest = reduce_over_ranks(counts), reduce_over_ranks(largest, dist.ReduceOp.MAX)
    problems = []
    for group, (clipped, total), most in zip(groups, counts.tolist(), largest.tolist(), strict=True):
        wanted, above = first_input_scale(torch.tensor([most]), group.spec).item(), group.spec.has_global_scale
        if above and not wanted / TOO_LARGE <= scales[group.owner] <= wanted * TOO_LARGE:
            beyond = "the dynamic scales, which are divided by this one, are all 0 or clipped"
        elif above:
            continue  # the dynamic scales decide what is clipped
        elif clipped > MOST_CLIPPED * total:
            beyond = f"{clipped / total:.2f} of its elements are beyond the range"
        elif 0 < wanted * TOO_LARGE < scales[group.owner]:
            beyond = "nearly all codes are unused"
        else:
            continue
        problems.append(f"{group.owner}: the scale is {scales[group.owner]:.3g}, absmax is {wanted:.3g}: {beyond}")
    head = (
        f"scales of inputs in {source} do not fit the inputs of the first samples. Leave them out of the files, and "
        "set quant.calibration_batches to measure them"
    )
    raise_problems(head, problems)


@dataclass(frozen=True)
class QuantStats:
    """Quantization statistics by layer (weights) and by scale-group owner (inputs, keys and values)."""

    weights: dict[str, WeightStatistics]
    input_scales: dict[str, float]
    clipped_inputs: dict[str, float]
    """Fraction of an input's elements outside the range, for the groups that were observed."""


def measure(quantization: Quantization) -> QuantStats:
    """Measure statistics of the current weights and of the observers; a collective."""
    weights, scales = weight_statistics(quantization), input_scales(quantization)
    observers = {group.owner: group.observer for group in quantization.input_groups if group.observer is not None}
    clipped: dict[str, float] = {}
    if observers:
        counts = [[int(observer.clipped), observer.total] for observer in observers.values()]
        reduced = reduce_over_ranks(torch.tensor(counts, dtype=torch.float64)).tolist()
        clipped = {owner: part / total for owner, (part, total) in zip(observers, reduced, strict=True) if total}
    return QuantStats(weights, scales, clipped)


@contextmanager
def observed(quant: FakeQuant) -> Iterator[None]:
    """Context in which inputs are observed. Observers that were on before keep their statistics and stay on. Others are
    switched off at the end, and get back the statistics that they had before, from which scales may be measured."""
    own, before = not quant.quantization.observing, quant.quantization.seen()
    if own:
        quant.observe(True)
    try:
        yield
    finally:
        if own:
            quant.observe(False)
            quant.quantization.restore_seen(before)
