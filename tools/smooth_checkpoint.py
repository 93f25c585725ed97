"""Smooth a checkpoint: move the magnitude of outliers from the inputs of layers to their weights.

The outputs of an RMSNorm with weights g [features] are read by Linears with weights W [out, features]: q, k, v; or
gate, up, router. With any factors f [features], g * f and W / f compute the same function. (SmoothQuant, arXiv
2211.10438, section 4, which also has the largest weights in its factors.) Here

    f = x^-strength / (geometric mean of x^-strength)

where x is the largest magnitude of the feature in the norm's outputs for a sample text. Magnitudes of features then
differ less, so that a scale that a group of features shares fits them all.

All this holds only if nothing else reads a norm's outputs. So only the families are accepted that can be rotated
(:mod:`tools.rotate_checkpoint`), for which the tests compare outputs before and after.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.samples import load_tokenizer
from model.checkpoint.safetensors import CheckpointError, Reader, read_tensor
from model.ranks import RankError, errors_on_all_ranks, is_main, listed, reduce_over_ranks, world_size
from model.save.aside import Aside
from tools.evaluation.perplexity import default_length, load_for_evaluation, read_eval_text
from tools.evaluation.score import reference_of, rolling_windows
from tools.rotate_checkpoint import FP64_CHUNK, OUTSIDE, change_of, read_plain, write_changed


def smooth_checkpoint(
    source: Path, out: Path, text: Path, *, tokens: int, strength: float, device: torch.device
) -> tuple[int, int]:
    """Write ``source``, a plain Hugging Face checkpoint, with smoothed weights to a new directory ``out``: the same
    function, computed in fp64 and rounded once. Return the numbers of tensors written and of norms changed. Ranks share
    the model that reads the first ``tokens`` tokens of the UTF-8 file ``text`` (ZeRO-3), and rank 0 writes; a
    collective.

    ``strength`` is the exponent of the magnitudes: 0 changes nothing, and with 1 all features have the same magnitude.

    Raises:
        RankError: on every rank, before the model runs: ``out`` is not empty, the text has no tokens, the model is
            unknown or quantized, or a tensor is missing, unknown or of another shape. While writing: a weight is not
            finite in its dtype; the written files are then removed.
    """
    _, tensors = read_plain(source, "smoothed")
    with errors_on_all_ranks(ValueError, OSError):
        found = {key: change_of(key, str(source)).norm for key in tensors if key not in OUTSIDE}
        norms = {key: norm for key, norm in found.items() if norm is not None}
        if is_main():
            Aside(out, 0).close()
    maxima = measure_norm_outputs(source, sorted({*norms.values()}), text, tokens, device)
    factors = {key: smooth_factors(largest, strength) for key, largest in maxima.items()}
    factors |= {key: 1 / factors[norm] for key, norm in norms.items()}

    def smoothed(reader: Reader, key: str) -> Tensor:
        whole = read_tensor(reader, tensors[key])
        if key in factors:
            rows = whole.view(-1, len(factors[key]))  # a norm is one row
            for part in rows.split(max(1, FP64_CHUNK // rows.shape[1])):
                part.copy_(part.double() * factors[key])
            if not whole.isfinite().all():
                where = f"{tensors[key].file}: {key}"
                raise CheckpointError(f"{where} would leave the range of {whole.dtype}: set a lower --strength")
        return whole

    with errors_on_all_ranks(ValueError, OSError):
        if is_main():
            write_changed(source, out, tensors, smoothed, {})
    return len(tensors), len(maxima)


def measure_norm_outputs(
    source: Path, norms: Sequence[str], text: Path, tokens: int, device: torch.device
) -> dict[str, Tensor]:
    """Measure the outputs of norms, given by the keys of their weights, for the first ``tokens`` tokens of a text; a
    collective. Returns the largest magnitude of each feature, fp64 [features] in CPU memory, by key. Raises RankError
    on every rank if the checkpoint or the text cannot be read."""
    with errors_on_all_ranks(ValueError, OSError):
        sample = read_eval_text(text, load_tokenizer(source), tokens)
    model = load_for_evaluation(source, torch.bfloat16, device, sharded=world_size() > 1)
    maxima: dict[str, Tensor] = {}

    def watch(key: str, norm: nn.Module) -> None:
        def record(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
            largest = output.abs().flatten(0, -2).amax(0)
            maxima[key] = torch.maximum(maxima.get(key, largest), largest)

        norm.register_forward_hook(record)

    for name, module in model.body.named_modules():
        if (key := f"{name.removeprefix('module.')}.weight") in norms:  # the prefix: of DeepSpeed's engine
            watch(key, module)
    reference_of(model, rolling_windows(sample.token_ids, sample.prefix, default_length(model)), batch_size=1)
    # A MAX reduction may drop NaN; Inf survives it.
    found = {key: torch.where(maxima[key].isnan(), torch.inf, maxima[key]) for key in norms}
    found = {key: reduce_over_ranks(largest, dist.ReduceOp.MAX).double().cpu() for key, largest in found.items()}
    bad = [key for key, largest in found.items() if not largest.isfinite().all()]
    if bad:
        raise RankError(f"{source}: the outputs of {listed(bad, 3)} have NaN or Inf on {text}: check the checkpoint")
    return found


def smooth_factors(maxima: Tensor, strength: float) -> Tensor:
    """Compute the factors of features, ``(geometric mean of maxima / maxima) ** strength``, fp64 ``[features]``.

    ``maxima`` are the features' largest magnitudes. A feature that was always zero has factor 1, and is left out of
    the mean.
    """
    logs = maxima.log()
    factors = torch.exp(strength * (logs[maxima > 0].mean() - logs))
    return torch.where(maxima > 0, factors, torch.ones_like(factors))
