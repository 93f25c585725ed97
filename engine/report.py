"""Reports of a run: progress bar, curves, the measured memory and the last lines."""

import json
import math
import re
import resource
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.checkpoint.find import best_checkpoint
from engine.config.errors import RecipeError
from engine.fake_quant import QuantStats
from engine.losses.objective import DIAGNOSTICS
from engine.metrics import Metrics, Summary
from engine.state import LoopState, StepResult
from model.checkpoint.safetensors import parse_json
from model.console import progress_bar
from model.ranks import is_main, say, world_size
from model.zero import gradient_buffers, master_weights, partitions, secondary_partitions, swap_buffers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LAYER = re.compile(r"(?:.*\.)?layers\.(?P<index>\d+)\.(?P<place>.+)")
_EXPERT = re.compile(r"\.\d+\.")


# Diagnostics in the progress bar, with their names there.
SHOWN = {"kd/forward_kl": "KL to teacher", "kd/top1_agreement": "same top token"}


class RunReport:
    """Report of a run while it trains: progress bar, curves, memory and the last lines."""

    def __init__(self, state: LoopState) -> None:
        self._summary = Summary()
        self._bar = progress_bar(state.recipe.train.steps, "train", initial=state.step, leave=True)
        self._memory: MemoryWatch | None = None
        self._shown: dict[str, str] = {}

    def step(self, state: LoopState, seconds: float) -> None:
        """Report a step that took ``seconds`` to the progress bar and the curves."""
        last = state.last
        assert last is not None
        if self._memory is None:  # created after the first step, which is not typical, so it measures the second
            self._memory = MemoryWatch(state.model, state.session.engine.optimizer)
        self._memory.stepped()
        self._summary.step({} if last.skipped else last.losses, last.tokens, last.valid_tokens)
        speed = last.tokens / world_size() / seconds
        loss = f"{last.losses['loss/total']:.4g}"
        self._shown |= {SHOWN[name]: f"{value:.4g}" for name, value in last.losses.items() if name in SHOWN}
        # A narrow terminal cuts the last ones off.
        self._bar.set_postfix({"loss": loss, "tok/s/dev": f"{speed:.4g}", **self._shown}, refresh=False)
        self._bar.update(1)
        if last.quantization is not None:
            log_quantization(last.quantization, state.metrics, state.step)
        if state.step % state.recipe.train.log_every == 0:
            state.log(_figures(state, last, speed))
        elif measured := _measured_rarely(last):
            state.log(measured)

    def trained(self, state: LoopState) -> None:
        """Close the progress bar after the last step and, on rank 0, write memory.json."""
        self._bar.close()
        self._summary.peak_bytes = peak = peak_memory(state.session.device)
        if self._memory is not None and is_main():
            self._memory.write(Path(state.recipe.output_dir) / MEASURED, state.session.device, peak)

    def end(self, state: LoopState, checkpoints: Path) -> None:
        """Print the final lines, and log the run's results. ``checkpoints``: directory of the training checkpoints."""
        if is_main() and self._summary.steps:
            first = state.evaluations.first
            last = state.evaluation if first else {}  # not of an evaluation before a resume
            state.metrics.results(state.recipe, {**self._summary.last, **last}, state.step)
            say(self._summary.text(devices=world_size(), evaluations=(first, last)))
        if is_main() and (line := best_line(checkpoints)):
            say(line)


def _figures(state: LoopState, last: StepResult, speed: float) -> dict[str, float]:
    """Collect the scalars of a step, by tag."""
    engine = state.session.engine
    rates = {f"lr/{group['name']}": group["lr"] for group in engine.optimizer.param_groups}
    return {
        **last.losses,
        **rates,
        **_grad_norms(last),
        "train/tokens_per_second_per_device": speed,
        "train/peak_memory_gb": peak_memory(state.session.device) / 1e9,
        "train/skipped_steps": engine.skipped_steps,
        **({"train/loss_scale": last.loss_scale} if last.loss_scale is not None else {}),
        "train/epoch": state.loader.epoch_of(state.step),
        **state.loader.curves,
    }


def _measured_rarely(step: StepResult) -> dict[str, float]:
    """Collect the scalars that only some steps have, by tag: diagnostics, and gradient norms if that of the scales was
    measured."""
    diagnostics = {f"kd/{name}" for name in DIAGNOSTICS}
    found = {tag: value for tag, value in step.losses.items() if tag in diagnostics}
    return {**found, **_grad_norms(step)} if step.scale_grad_norm is not None else found


def _grad_norms(step: StepResult) -> dict[str, float]:
    """Collect the gradient norms of the step: the total, and in some steps also the norms of weights and of scales."""
    norms = {}
    if step.grad_norm is not None:
        norms["train/grad_norm"] = step.grad_norm
    if step.scale_grad_norm is not None:
        norms["train/grad_norm_scales"] = step.scale_grad_norm
        if step.grad_norm is not None:
            norms["train/grad_norm_weights"] = math.sqrt(max(0.0, step.grad_norm**2 - step.scale_grad_norm**2))
    return norms


def best_line(checkpoints: Path) -> str | None:
    """Return the final line about a directory's best checkpoint (a warning if ``best.json`` is damaged); None if no
    checkpoint is marked as the best."""
    try:
        best = best_checkpoint(checkpoints)
    except ValueError as error:  # everything else is done and written
        return f"warning: {error}"
    return None if best is None else f"best checkpoint: {checkpoints / best.name}, {best.metric} {best.value:.4f}"


def log_quantization(stats: QuantStats, metrics: Metrics, step: int) -> None:
    """Log histograms over layers, the largest values over all layers, and a picture of the weights' errors by layer.

    A model has hundreds of layers (thousands with experts), too many for one chart per layer.
    """
    errors = {name: decibels(one.error) for name, one in stats.weights.items()}
    clipped = {name: one.clipped for name, one in stats.weights.items()}
    by_tag = {
        "quant/weight_scales_log2": [np.log2(one.scale) for one in stats.weights.values()],
        "quant/input_scales_log2": [np.log2(scale) for scale in stats.input_scales.values()],
        "quant/clipped_weights": list(clipped.values()),
        "quant/clipped_inputs": list(stats.clipped_inputs.values()),
        "quant/weight_error_db": list(errors.values()),
    }
    for tag, values in by_tag.items():
        metrics.histogram(tag, values, step)
    worst = {}
    if stats.weights:  # not where the KV cache alone is quantized
        worst = {
            "quant/weight_error_db_worst": max(errors.values()),
            "quant/clipped_weights_most": max(clipped.values()),
        }
        metrics.picture("quant/weight_error_by_layer", lambda: error_picture(errors, step), step)
    if stats.clipped_inputs:
        worst["quant/clipped_inputs_most"] = max(stats.clipped_inputs.values())
    metrics.log(worst, step)


def decibels(relative_error: float) -> float:
    """Convert a ratio of squares to dB; ratios below 1e-10, and 0, become -100 dB."""
    return float(10 * np.log10(max(relative_error, 1e-10)))


def error_picture(errors: dict[str, float], step: int) -> "Figure":
    """Draw the weights' errors (dB, by layer name): decoder layers from left to right, modules of a layer from top to
    bottom.

    The same module of all experts is one square, with their mean error. Layers outside the decoder are left out.
    """
    from matplotlib.figure import Figure

    squares: dict[tuple[str, int], list[float]] = {}
    for name, error in errors.items():
        if match := _LAYER.fullmatch(name):
            squares.setdefault((_EXPERT.sub(".*.", match["place"]), int(match["index"])), []).append(error)
    places = list(dict.fromkeys(place for place, _ in squares))
    depth = 1 + max((index for _, index in squares), default=0)
    values = np.full((max(1, len(places)), depth), np.nan)
    for (place, index), found in squares.items():
        values[places.index(place), index] = np.mean(found)
    figure = Figure(figsize=(max(5.5, 3 + 0.2 * depth), 1.2 + 0.35 * len(places)), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(values, aspect="auto", cmap="viridis")
    axes.set_yticks(range(len(places)), places)
    axes.set_xlabel("decoder layer")
    axes.set_title(f"error of the weights, step {step}", fontsize="medium")
    figure.colorbar(image, ax=axes, label="dB")
    return figure


MEASURED = "memory.json"


@dataclass(frozen=True)
class Measured:
    """Memory measured on rank 0.

    Attributes:
        device: device type of the rank.
        ranks: number of ranks of the run.
        peak: peak memory in bytes after the last step, before the export.
        items: bytes by item: parameters, gradients, master weights, moments.
    """

    device: str
    ranks: int
    peak: int
    items: dict[str, int]


class MemoryWatch:
    """Measurement of the bytes of parameters, gradients and optimizer states on this rank, made in the first step after
    the object's creation."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        """Watch ``model``, the student, and ``optimizer``, the one of the student's engine."""
        self._model, self._optimizer = model, optimizer
        self._items: dict[str, int] = {}
        self._partitions: int | None = None
        # When this hook is called the gradients of the step are complete, and not yet freed.
        inner = getattr(optimizer, "optimizer", optimizer)
        inner.register_step_post_hook(self._measure)

    def _measure(self, inner: torch.optim.Optimizer, *_: Any) -> None:
        if self._items:  # a hook cannot remove itself
            return
        moments = [value for held in inner.state.values() for key, value in held.items() if key != "step"]
        own = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        # Buffers of an optimizer on NVMe, which hold a sub-group at this moment.
        seen = {buffer.untyped_storage().data_ptr() for buffer in swap_buffers(self._optimizer)}
        self._items = {
            "parameters": _bytes(secondary_partitions(self._model), set()),  # hpZ's; write() adds self._partitions
            "gradients": _bytes([*gradient_buffers(self._optimizer), *own], seen),
            "master weights": _bytes(master_weights(self._optimizer), seen),
            "moments": _bytes(moments, seen),
        }

    def stepped(self) -> None:
        """Measure the partitions of parameters, once. Call it directly after every step: a forward without a backward,
        such as an evaluation, leaves parameters gathered, which would be counted, too."""
        if self._items and self._partitions is None:
            self._partitions = _bytes(partitions(self._model), set())

    def write(self, path: Path, device: torch.device, peak: int) -> None:
        """Write the file that ``launch/memory.py --measured`` reads; nothing if no step was measured.

        ``device`` and ``peak``: see :class:`Measured`. If the disk is full, warn and write no file; the run goes on.
        """
        if self._partitions is None:
            return
        items = self._items | {"parameters": self._items["parameters"] + self._partitions}
        try:
            path.unlink(missing_ok=True)  # it may be a link to a file elsewhere
            path.write_text(json.dumps(asdict(Measured(device.type, world_size(), peak, items)), indent=1) + "\n")
        except OSError as error:
            warnings.warn(f"the measured memory could not be written: {error}", stacklevel=2)


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Count bytes of the tensors' storages except storages in ``seen``, and add the counted storages to ``seen``."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process so far, in bytes: of torch's allocator on CUDA, resident on a CPU.

    The curves, ``memory.json`` and the last lines of a run all use this measure.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # it counts KiB on Linux


def read_measured(file: Path) -> Measured:
    """Read the ``memory.json`` of a run. Raises RecipeError if the file cannot be read, or is of another kind."""
    try:
        return Measured(**parse_json(file.read_bytes()))
    except (OSError, TypeError, ValueError) as error:
        raise RecipeError(
            f"--measured: {file}, expected the {MEASURED} in the output_dir of a run ({error})"
        ) from error
