"""Initialize codes from samples. Decoder layers are gathered and quantized one after the other, so that the codes of a
layer fit the inputs that the quantized layers before it produce. Codes are chosen by GPTQ, and optionally trained
afterwards (:mod:`model.ptq_init.blockwise`).

In a decoder layer, Linears with the same input are quantized together, and later Linears then get inputs from quantized
layers. Gram matrices of inputs are summed over ranks; each rank chooses codes for the rows of which it has elements
(:mod:`quant.gptq` has the arithmetic).

Inputs with dynamic scales are quantized meanwhile, as in training. Inputs with a stored scale, keys and values are not:
their scales are measured later, in the model with these codes.

Weights that would be rounded to other codes are replaced by the chosen codes' values (:mod:`quant.scale`), so that the
first step computes with GPTQ's weights. All other weights stay unchanged.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from model.console import progress_bar, working
from model.ptq_init import blockwise as tuning
from model.ptq_init.layer_samples import LayerSamples, Stop, decoder_layers, measure_inputs, record
from model.ranks import errors_on_all_ranks, listed, raise_everywhere, reduce_over_ranks, say
from model.scales.in_place import write_scales
from model.zero import (
    forget_secondary_copies,
    full_shape,
    gathered,
    is_partitioned,
    local_data,
    local_range,
    whole_values,
)
from quant import Quantization, Quantizer, QuantLayer, QuantLinear, Scale, kernels
from quant.gemm import rotate
from quant.gptq import add_inputs, choose, row_errors
from quant.linear import LinearPart, linears_of
from quant.reference import fake_quantize_tokens
from quant.rules import fused_sets
from quant.scale import have_codes, snap_to_codes


@torch.no_grad()
def choose_initial_codes(
    model: PreTrainedModel,
    quantization: Quantization,
    samples: Sequence[tuple[Tensor, bool]],
    device: torch.device,
    *,
    tuned_rows: int | None = None,
) -> None:
    """Choose codes and scales of the weights of ``model`` from samples, and write both into the model; a collective.
    Call it before ``deepspeed.initialize``. Quantized layers outside the decoder layers (lm_head, embeddings) and
    layers that the samples do not reach keep their weights, which are rounded to nearest. The model is in training mode
    afterwards.

    Args:
        model, quantization: the quantized model; weights and their scales are loaded.
        samples: batches of equal-length samples, the same number on every rank: ``input_ids [n, T]``, and True if the
            batch counts; False marks a batch without effect that lets this rank run as many batches as the others.
        device: device on which the model runs the samples.
        tuned_rows: samples per rank and step for training each decoder layer after GPTQ
            (:mod:`model.ptq_init.blockwise`), rounded up to whole batches; None for GPTQ only.

    Raises:
        RankError: on every rank: no quantized layer is in a decoder layer; a decoder layer runs twice, or not on the
            output of the one before; inputs have NaN or Inf; or the model's dtype cannot represent all code values.
    """
    blocks = decoder_layers(model, quantization)
    if not blocks:
        raise_everywhere(
            "quant.init: expected rtn for this model: none of its quantized layers is in a decoder layer of "
            "transformers' class GradientCheckpointingLayer"
        )
    model.eval()
    with quantization.paused():
        with working("first codes, inputs of the decoder layers"):
            found = record(model, blocks, samples, device)
        errors, of_layers = CodeErrors(), tuning.LayerErrors()
        done: list[str] = []
        original = list(found.hidden)
        prefixes = tuple(f"{name}." for name in found.layers)
        steps = sum(name.startswith(prefixes) for name in quantization.layers)
        steps += len(found.layers) * tuning.STEPS if tuned_rows else 0
        with progress_bar(steps, "first codes", "step" if tuned_rows else "layer") as bar:
            for name in found.layers:
                block = blocks[name]
                if tuned_rows:
                    found.advance(block, name, original)
                    weights = tuning.own_weights(quantization, name)
                for names in choose_codes(model, quantization, block, name, found, errors):
                    _switch_on(quantization, names)
                    done += names
                    bar.update(len(names))
                if tuned_rows:
                    measure_inputs(quantization, block, name, found)
                    chosen = [one for one in done if one.startswith(f"{name}.")]
                    _switch_on(quantization, chosen, all_inputs=True)
                    tuning.tune(
                        quantization,
                        block,
                        name,
                        found,
                        original,
                        weights,
                        tuned_rows,
                        errors=of_layers,
                        progress=bar.update,
                    )
                found.leave(block, name)
    forget_secondary_copies(model)
    model.train()
    left = [name for name in quantization.layers if name not in done]
    texts = [errors.text(), *([of_layers.text()] if tuned_rows else [])]
    texts += [f"nearest codes: {listed(left, 5)}"] if left else []
    count = int(reduce_over_ranks(torch.tensor(sum(found.sizes))))
    say(f"gptq: {len(done)} layers, {count} samples, {'; '.join(texts)}")


def _switch_on(quantization: Quantization, names: Sequence[str], *, all_inputs: bool = False) -> None:
    """Fake-quantize the weights of these layers, and their inputs if no input scale must be stored, or with
    ``all_inputs``."""
    for inputs in (False, True):
        alike = [name for name in names if (all_inputs or quantizes_inputs(quantization.layers[name])) == inputs]
        if alike:
            quantization.set_fake_quant(True, inputs, "|".join(map(re.escape, alike)))


Sets = list[list[str]]  # names of quantized layers with the same input


@dataclass
class CodeErrors:
    """Sums over all Linears whose codes were chosen, and over the calibration tokens.

    Attributes:
        nearest, chosen: squared errors of the outputs, with the nearest codes and with the chosen ones.
        squares: squared outputs of the unquantized weights.
        partitioned: True if the sums cover only the output features whose codes this rank has chosen.
    """

    nearest: float = 0.0
    chosen: float = 0.0
    squares: float = 0.0
    partitioned: bool = False

    def text(self) -> str:
        """Format the relative errors over all ranks; a collective if ``partitioned``."""
        sums = torch.tensor([self.nearest, self.chosen, self.squares], dtype=torch.float64)
        nearest, chosen, squares = (reduce_over_ranks(sums) if self.partitioned else sums).tolist()
        squares = max(squares, 1e-300)
        return f"squared error of outputs {chosen / squares:.3g}, with nearest codes {nearest / squares:.3g}"


def choose_codes(
    model: nn.Module, quantization: Quantization, block: nn.Module, name: str, samples: LayerSamples, errors: CodeErrors
) -> Iterator[list[str]]:
    """Choose the codes and scales of the decoder layer ``block``, called ``name``, from its inputs ``samples``, some
    Linears at a time, write them, and yield the names of these Linears; a collective. The caller must fake-quantize the
    yielded Linears before it requests the next ones. Their errors are added to ``errors``. Raises RankError on every
    rank if inputs have NaN or Inf, or if the model's dtype cannot represent all values of the codes."""
    for sets in quantized_together(model, quantization, name):
        grams = _grams(quantization, block, sets, samples, name)
        _choose(quantization, block, grams, errors)
        yield [member for names in sets for member in names]


def quantized_together(model: nn.Module, quantization: Quantization, name: str) -> Iterator[Sets]:
    """Yield, in module order, the Linears of the decoder layer ``name`` that are quantized together: one set of Linears
    with the same input, or, if experts are separate modules, the corresponding set of every expert."""
    schemes = {one: layer.scheme for one, layer in quantization.layers.items() if one.startswith(f"{name}.")}
    steps: dict[str, Sets] = defaultdict(list)
    for names in fused_sets(schemes, dict(model.named_modules()), across_experts=False):
        steps[re.sub(r"\.\d+\.", ".*.", names[0][len(name) :])].append(names)
    yield from steps.values()


def _grams(
    quantization: Quantization, block: nn.Module, sets: Sets, samples: LayerSamples, name: str
) -> dict[str, Tensor]:
    """Sum ``X'X`` of the inputs over all ranks' samples, by name of the layer: fp64 ``[in, in]``, for stacked experts
    ``[E, in, in]``; a collective."""
    firsts = [quantization.layers[names[0]] for names in sets]
    sums = [_zeros(layer) for layer in firsts]
    hooks = [
        layer.register_forward_pre_hook(_adding(layer, total, stop=len(sets) == 1))
        for layer, total in zip(firsts, sums, strict=True)
    ]
    with gathered(block.parameters()):
        for index, hidden in enumerate(samples.hidden):
            with suppress(Stop):
                samples.run(block, name, index, hidden)
    for hook in hooks:
        hook.remove()
    sums = [reduce_over_ranks(total) for total in sums]
    return {one: total for names, total in zip(sets, sums, strict=True) for one in names}


def _zeros(layer: QuantLayer) -> Tensor:
    stack = (layer.num_experts,) if layer.projections else ()
    shape = (*stack, layer.in_features, layer.in_features)
    return torch.zeros(shape, dtype=torch.float64, device=local_data(layer.weight_s0).device)


def _adding(layer: QuantLayer, total: Tensor, *, stop: bool) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """Create a hook that adds ``X'X`` of a layer's inputs ``X``, rotated and quantized as for its GEMM, to ``total``;
    with ``stop`` it then raises :class:`Stop`."""
    block = layer.rotation if isinstance(layer, QuantLinear) else None
    spec = layer.scheme.activations if quantizes_inputs(layer) else None

    def add(module: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0] if block is None else rotate(args[0], block)
        x = x if spec is None else fake_quantize_tokens(x, spec)
        if total.dim() == 2:
            add_inputs(total, x.flatten(0, -2))
        else:
            begin = 0
            for expert, end in enumerate(args[1].tolist()):
                add_inputs(total[expert], x[begin:end])
                begin = end
        if stop:
            raise Stop

    return add


def _choose(quantization: Quantization, block: nn.Module, grams: dict[str, Tensor], errors: CodeErrors) -> None:
    """Choose codes and scales of some layers by GPTQ, and update this rank's weights; a collective."""
    rows: dict[str, list[_Rows]] = {}
    with gathered(block.parameters()), errors_on_all_ranks(ValueError):
        for name, gram in grams.items():
            layer = quantization.layers[name]
            parts = [(part, gram if part.expert is None else gram[part.expert]) for part in linears_of(name, layer)]
            rows[name] = [one for part, own in parts if (one := _of_rank(layer, part, own)) is not None]
    scales = {name: _of_all_ranks(quantization.layers[name], found) for name, found in rows.items()}
    integers = {name: one for name, one in scales.items() if quantization.layers[name].scheme.weights.dtype == "int"}
    write_scales(quantization.weight_groups, integers)  # float formats keep their scales
    with errors_on_all_ranks(ValueError):
        for name, found in rows.items():
            layer = quantization.layers[name]
            errors.partitioned |= is_partitioned(layer.weight)
            values = [_moved(layer, one, scales[name], grams[name], errors) for one in found]
            if values:
                local_data(layer.weight).copy_(torch.cat(values))
            layer.forget_codes()


class _Rows(NamedTuple):
    """Rows of a Linear of which this rank has at least some elements.

    Attributes:
        part: the Linear as a slice of its layer, which may stack several.
        rows: range of its rows.
        own: range of this rank's elements in the flattened rows.
        weight: the rows, a copy in the model's dtype.
        before: quantizer of the rows with the scales before GPTQ.
        codes, scale: codes and scales chosen by GPTQ.
    """

    part: LinearPart
    rows: slice
    own: slice
    weight: Tensor
    before: Quantizer
    codes: Tensor
    scale: Tensor


def _of_rank(layer: QuantLayer, part: LinearPart, gram: Tensor) -> _Rows | None:
    """Run GPTQ on this rank's rows of a Linear, whose layer must be gathered; None if the rank has no rows."""
    (start, stop), columns = local_range(layer.weight), part.in_features
    begin = ((part.expert or 0) * layer.out_features + part.first_row) * columns
    low, high = max(start - begin, 0), min(stop - begin, part.out_features * columns)
    if low >= high:
        return None
    rows = slice(low // columns, -(-high // columns))
    weight, spec = part.weight(layer.weight.detach())[rows].clone(), layer.scheme.weights
    whole = Quantizer(layer.scale_of_weight, spec, weight.dtype)
    scale = part.of_scale(layer.scale_of_weight._replace(s0=kernels.effective_scale(whole), theta=None), spec)
    zero = None if scale.zero is None else scale.zero.detach()[rows].clone()
    above = None if scale.global_ is None else scale.global_.detach().clone()  # used after the gather ends
    before = Quantizer(Scale(scale.s0.detach()[rows].clone(), None, above, zero), spec, weight.dtype)
    own = slice(low - rows.start * columns, high - rows.start * columns)
    return _Rows(part, rows, own, weight, before, *choose(weight, before, gram))


def _of_all_ranks(layer: QuantLayer, found: Sequence[_Rows]) -> Tensor:
    """Collect the layer's scales from all ranks, fp32 in their shape (with zero points ``[2, *scale shape]``). A row
    that is split over ranks gets the scales of the rank with its first element. A collective."""
    own = local_data(layer.weight_s0)
    whole = torch.zeros(full_shape(layer.weight_s0), device=own.device)
    for one in found:
        there = one.part.scale(whole, layer.scheme.weights)[one.rows]
        first = int(one.own.start > 0)  # the rank before this one has its beginning
        there[first:] = one.scale[first:]
    if is_partitioned(layer.weight):
        whole = reduce_over_ranks(whole)
    zero = None if layer.weight_zero is None else whole_values([layer.weight_zero])[0].view_as(whole)
    return whole if zero is None else torch.stack([whole, zero])


def _moved(layer: QuantLayer, found: _Rows, scales: Tensor, gram: Tensor, errors: CodeErrors) -> Tensor:
    """Compute this rank's elements of a Linear, flat: weights that round to the chosen codes. Adds to ``errors``.
    Raises ValueError if the model's dtype cannot represent all values of the codes."""
    spec, weight = layer.scheme.weights, found.weight
    scale = scales if found.before.scale.zero is None else scales[0]
    s0 = found.part.scale(scale, spec)[found.rows].contiguous()
    after = found.before._replace(scale=found.before.scale._replace(s0=s0))
    decoded = kernels.dequantize(found.codes, after)
    if not bool(have_codes(decoded, found.codes, after).all()):
        raise ValueError(
            f"quant.init: expected rtn, or model.dtype float32: {weight.dtype} cannot represent all values "
            f"of the codes of {found.part.name}"
        )
    single, exact = (gram if found.part.expert is None else gram[found.part.expert]).float(), weight.float()
    errors.nearest += float(row_errors(kernels.fake_quantize(weight, found.before).float() - exact, single).sum())
    errors.chosen += float(row_errors(decoded.float() - exact, single).sum())
    errors.squares += float(row_errors(exact, single).sum())
    return snap_to_codes(weight, decoded, found.codes, after).flatten()[found.own]


def quantizes_inputs(layer: QuantLayer) -> bool:
    """Return True if GPTQ sees the layer's inputs quantized: the scheme quantizes them with dynamic scales only."""
    return layer.scheme.activations is not None and layer.scheme.stored_input is None
