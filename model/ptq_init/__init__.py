"""Initialize codes from samples. Decoder layers are gathered and quantized one after the other, so that the codes of a
layer fit the inputs that the quantized layers before it produce. Codes are chosen by GPTQ
(:mod:`model.ptq_init.layerwise`), and optionally trained afterwards (:mod:`model.ptq_init.blockwise`)."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from model.console import progress_bar, working
from model.ptq_init import blockwise as tuning
from model.ptq_init import layerwise as gptq
from model.ptq_init.layer_samples import decoder_layers, measure_inputs, record
from model.ranks import listed, raise_everywhere, reduce_over_ranks, say
from model.zero import forget_secondary_copies
from quant import Quantization


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
        RankError: on every rank: the model has no decoder layers, or they do not run once each, one after the other;
            inputs have NaN or Inf; or the model's dtype cannot represent all values of the codes.
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
        errors, of_layers = gptq.CodeErrors(), tuning.LayerErrors()
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
                for names in gptq.choose_codes(model, quantization, block, name, found, errors):
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
        alike = [name for name in names if (all_inputs or gptq.quantizes_inputs(quantization.layers[name])) == inputs]
        if alike:
            quantization.set_fake_quant(True, inputs, "|".join(map(re.escape, alike)))
