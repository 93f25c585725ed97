"""The student: built empty, weights loaded and rotated, quantized, scales and codes initialized."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from data.loader import MicroBatch
from engine.config.config import Recipe
from engine.config.quant import SOURCE, TIED
from engine.session.adapter import add_adapters, check_adapters, pack_base
from engine.session.context import build_for, rows_of, samples_on_all_ranks
from engine.session.optimizer import check_patterns, classify, set_learnable
from model.checkpoint.load import load_weights
from model.console import working
from model.head import output_head
from model.moe.experts import ExpertMLPs, router_names
from model.ptq_init.layerwise import choose_initial_codes
from model.quantized.checkpoint import source_schemes
from model.quantized.quantization_config import is_quantized
from model.quantized.quantize_on_load import fill_quantize_on_load_scales
from model.quantized.scales import take_scales, take_start
from model.ranks import errors_on_all_ranks, is_main, listed, raise_everywhere, reduce_over_ranks, say
from model.scales.in_place import renew_weight_scales, write_scales
from model.scales.loading import load_scales
from model.zero import INPUT_ALIASES, forget_secondary_copies, full_shape, gathered, partition_new_parameters, stage
from quant import Quantization, QuantLinear, Scheme, replace_layers
from quant.fused import fuse
from quant.gemm import rotate
from quant.packed_weight import as_weight
from quant.rotation import rotate_inputs, rotated_layers
from quant.rules import DEFAULT_EXEMPT, exempt_line

SIMULATED = (
    "simulated, for the fp8 GEMM supports only sides that are multiples of 16, and stacked experts only in bf16 on "
    "compute capability 9.0"
)
# Tokens of all ranks: GPTQ's codes at 2 bits have a KL of 1.27 if chosen on 16,384, 0.95 on 65,536 (docs/low_bits.md).
FEW_TOKENS = 65536
# Round where eager mode rounds: fused chains of bf16 operations would stay in fp32.
COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"emulate_precision_casts": True}


def build_student(
    recipe: Recipe, ds_config: dict[str, Any], device: torch.device, *, losses: bool = True
) -> tuple[PreTrainedModel, Quantization]:
    """Build the student, load its weights, and replace the layers to be quantized by quantized layers, whose scales are
    filled later; a collective. Weights are rotated if the recipe says so, and ``requires_grad`` is set. ``losses``:
    True to refuse models whose logits cannot be computed from hidden states and lm_head. Raises RankError on every rank
    if the recipe or the checkpoint does not fit the model."""
    model, named = empty_student(recipe, ds_config, device, losses=losses)
    report = load_weights(model, recipe.model.path, method=recipe.model.load)
    say(f"weights: {report.summary()}")
    quantization = quantize_student(recipe, ds_config, device, model, named)
    with working("rotating weights"):
        turned = rotate_weights(model, quantization) if recipe.quant.rotate else 0
    if turned:
        say(f"rotated: the inputs of {turned} layers, in blocks of {recipe.quant.rotate_block}")
    say(f"quantized: {_summary(recipe, quantization)}")
    for line in quantized_share(model, quantization).lines():
        say(line)
    if quantization.simulated:
        say(f"{SIMULATED}: {listed(quantization.simulated)}")
    return model, quantization


def empty_student(
    recipe: Recipe, ds_config: dict[str, Any], device: torch.device, *, losses: bool = True
) -> tuple[PreTrainedModel, dict[str, Scheme]]:
    """Build the student without weights; a collective. Also return schemes by layer name: those that the recipe sets
    for lm_head and embeddings; with ``quant.scheme: source`` those of all quantized layers. ``losses``: True to refuse
    models whose logits cannot be computed from hidden states and lm_head. Raises RankError on every rank if the recipe
    does not fit the model."""

    def pack(model: PreTrainedModel) -> None:
        pack_base(recipe, model, _exempt(recipe, model), _named_schemes(recipe, model))

    held = recipe.adapter.base == "quantized"
    model = build_for(
        recipe, recipe.model.path, ds_config, device, hold=pack if held else None, untie=recipe.quant.unties()
    )
    with errors_on_all_ranks(ValueError):  # before the weights are read
        named = _named_schemes(recipe, model)
        # Parameters named theta or lora are created later.
        own = [one for one in recipe.learnable.freeze if not re.search("theta|lora", one)]
        check_patterns([name for name, _ in model.named_parameters()], own)
        if losses:
            name, _ = output_head(model)  # raises if the losses cannot be computed from hidden states
            if name in named and named[name].activations is not None:
                raise ValueError(
                    f"{name}: {recipe.quant.start or recipe.model.path} quantizes its inputs ({named[name].name}), "
                    f"but losses in training are computed from unquantized inputs; set {exempt_line([name])}"
                )
        if recipe.quant.rotate and is_quantized(Path(recipe.model.path)):
            raise ValueError(
                f"quant.rotate: {recipe.quant.rotate}, expected []: {recipe.model.path} is quantized, and its "
                "scales belong to weights that are not rotated: set model.path to the unquantized checkpoint"
            )
        if recipe.adapter.on:
            check_adapters(recipe, model, _exempt(recipe, model), named)
    return model, named


def quantize_student(
    recipe: Recipe, ds_config: dict[str, Any], device: torch.device, model: PreTrainedModel, named: dict[str, Scheme]
) -> Quantization:
    """Prepare the student for training, in place: quantized layers, rotations, adapters, fused norms,
    ``requires_grad``, activation checkpointing, compile; a collective. Scales are filled later. ``named``: schemes by
    layer name. Raises RankError on every rank if a layer cannot be quantized or rotated as the recipe says, no norm can
    be fused, or a pattern matches nothing."""
    with errors_on_all_ranks(ValueError):
        quantization = replace_layers(
            model,
            recipe.quant.default_scheme(),
            rules=recipe.quant.chosen_rules(),
            named=named,
            exempt=_exempt(recipe, model),
            learn_weight_scale=recipe.learnable.weight_scale,
            learn_input_scale=recipe.learnable.act_scale,
            learn_kv_scale=recipe.learnable.kv_scale,
            ranges=recipe.quant.ranges(),
            fp8_gemm=uses_fp8_gemm(recipe, device),
            fast_accum=recipe.quant.fp8_fast_accum,
            kv_cache=recipe.quant.preset().kv_cache,
        )
        if recipe.quant.rotate:
            rotate_inputs(quantization, recipe.quant.rotate, recipe.quant.rotate_block)
            # The losses are computed from lm_head's weight and the unrotated hidden states.
            if getattr(model.get_output_embeddings(), "rotation", None) is not None:
                raise ValueError("quant.rotate: the input of lm_head cannot be rotated; leave it out of the patterns")
        if recipe.adapter.on:
            add_adapters(recipe, model, quantization)
        if recipe.quant.decoupled_scales:
            quantization.decouple_scales(head=model.get_output_embeddings())
        if recipe.quant.fuse_norms:
            say(f"fused: {fuse(model).summary()}")
    partition_new_parameters(model, ds_config)
    with errors_on_all_ranks(ValueError):
        set_learnable(model, recipe.learnable)
    # transformers computes the router's auxiliary loss in its forward; only a trainable router uses it.
    config = model.config.get_text_config()
    config.output_router_logits = recipe.learnable.router and _has_router_logits(model)
    config.use_cache = False
    if recipe.train.activation_checkpointing:
        # engine.step offloads inputs of recomputed layers: transformers' own `offload` does not run on a CPU.
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    if recipe.train.compile:
        _compile_layers(model)
    for layer in quantization.layers.values() if recipe.quant.keep_codes else ():
        if isinstance(layer, QuantLinear):
            # Save codes of inputs with dynamic scales for backward, except inputs that attention saves anyway.
            layer.dynamic_codes, layer.aliases = True, INPUT_ALIASES
    if stage(ds_config) < 3 and recipe.train.gradient_accumulation_steps > 1:
        # Resident weights are used by several micro-batches, so they are quantized once per optimizer step; the codes
        # take one byte per weight. Under stage 3 a weight exists only while its layer runs.
        for layer in quantization.layers.values():
            layer.keeps_weight_codes = layer.held is None
    return quantization


def _has_router_logits(model: PreTrainedModel) -> bool:
    """Tell if ``output_router_logits`` can be set; warn if the model gets no auxiliary loss. Without a module that
    outputs router logits (Granite hybrids without experts, DeepSeek-V4 with hashed experts only) transformers' own loss
    fails."""
    recorded = [module._can_record_outputs or {} for module in model.modules() if isinstance(module, PreTrainedModel)]
    kinds = [getattr(one["router_logits"], "target_class", nn.Module) for one in recorded if "router_logits" in one]
    there = not kinds or any(isinstance(module, tuple(kinds)) for module in model.modules())
    own = any(hasattr(sys.modules[kind.__module__], "load_balancing_loss_func") for kind in type(model).__mro__)
    if not there or not own:
        lacks = "transformers computes no auxiliary loss for it" if there else "no router of it gives logits"
        say(f"warning: learnable.router: {type(model).__name__}: {lacks}: routers train without load balancing")
    return there


def _exempt(recipe: Recipe, model: PreTrainedModel) -> list[str]:
    """List patterns of unquantized modules: the recipe's, and those of :func:`always_exempt`."""
    return [*recipe.quant.exempt, *recipe.quant.exempt_more, *always_exempt(model)]


def always_exempt(model: PreTrainedModel) -> list[str]:
    """List regexes on names of modules that quant.scheme and quant.rules never quantize: routers (to keep their
    choices), and lm_head, which only ``quant.lm_head`` quantizes."""
    modules = {name for name, _ in model.named_modules()}
    routers = [rf"{re.escape(name)}(\..+)?" for name in router_names(model) if name in modules]
    return routers + [re.escape(name) for name, one in model.named_modules() if one is model.get_output_embeddings()]


def initial_scales(recipe: Recipe, model: PreTrainedModel, quantization: Quantization) -> set[str]:
    """Fill all weight scales, and the input scales that files or ``quant.initial_input_scale`` provide; a collective.

    Returns:
        Owners of the input groups whose scales remain to be calibrated.
    """
    if recipe.quant.start or recipe.quant.scales or is_quantized(Path(recipe.model.path)):
        return _scales_of_files(recipe, model, quantization)
    made = fill_quantize_on_load_scales(model, quantization) if recipe.adapter.base == "quantized" else set()
    renew_weight_scales(quantization, {group.owner for group in quantization.weight_groups} - made)
    owners = {group.owner for group in quantization.input_groups}
    if recipe.quant.initial_input_scale is None:
        return owners
    write_scales(quantization.input_groups, dict.fromkeys(owners, torch.tensor([recipe.quant.initial_input_scale])))
    return set()


def initial_codes(
    recipe: Recipe,
    model: PreTrainedModel,
    quantization: Quantization,
    batches: Iterable[MicroBatch],
    device: torch.device,
) -> None:
    """Choose initial codes by GPTQ or block-wise tuning on ``batches``, and set weights to their values; a collective.

    Call it after :func:`initial_scales`, with the same number of batches on every rank. Samples of equal length run
    together, at most as many as a micro-batch has rows. Raises RankError on every rank if model.path is quantized, or
    as :func:`model.ptq_init.layerwise.choose_initial_codes` does.
    """
    if is_quantized(Path(recipe.model.path)):
        raise_everywhere(f"quant.init: {recipe.quant.init}, expected rtn: {recipe.model.path} has codes of its own")
    rows = recipe.data.micro_batch_size
    groups = list(samples_on_all_ranks(batches, together=rows, shared=rows_of(recipe)))
    own = sum(ids.numel() for ids, counts in groups if counts)
    tokens, asked = int(reduce_over_ranks(torch.tensor(own))), recipe.quant.calibration_batches
    say(f"quant.init {recipe.quant.init}: first codes from {tokens:,} tokens")
    if 0 < tokens < FEW_TOKENS:
        say(
            f"warning: {tokens:,} tokens are few for quant.init {recipe.quant.init}, whose codes of 2 and 3 bits are "
            f"much better from {FEW_TOKENS:,}: set quant.calibration_batches to {-(-asked * FEW_TOKENS // tokens)} (it "
            f"is {asked}), if there are so many samples"
        )
    tuned_rows = rows if recipe.quant.init == "blockwise" else None
    choose_initial_codes(model, quantization, groups, device, tuned_rows=tuned_rows)


def _scales_of_files(recipe: Recipe, model: PreTrainedModel, quantization: Quantization) -> set[str]:
    """Fill the scales from a PTQ checkpoint or a quantized ``model.path``; return owners of inputs without a scale."""
    start, scales = recipe.quant.start, recipe.quant.scales
    read = partial(take_start, inside=recipe.quant.snap_to_codes) if start else load_scales if scales else take_scales
    report = read(
        model,
        quantization,
        start or scales or recipe.model.path,
        initial_input_scale=recipe.quant.initial_input_scale,
        inputs_calibrated_later=recipe.quant.calibration_batches > 0,
    )
    say(report.summary())
    return set(report.inputs_missing)


def _named_schemes(recipe: Recipe, model: PreTrainedModel) -> dict[str, Scheme]:
    """Map layer names to schemes: those of lm_head and embeddings, or with ``quant.scheme: source`` those of all
    quantized layers, except layers that the recipe exempts by other patterns than the default ones."""
    if recipe.quant.scheme == SOURCE:
        found = source_schemes(model, Path(recipe.quant.start or recipe.model.path), recipe.quant.own_weights())
        exempt = {*recipe.quant.exempt, *recipe.quant.exempt_more}.difference(DEFAULT_EXEMPT)
        return {name: one for name, one in found.items() if not any(re.fullmatch(each, name) for each in exempt)}
    return _schemes_at_ends(recipe, model) if recipe.quant.lm_head or recipe.quant.embedding else {}


def _schemes_at_ends(recipe: Recipe, model: PreTrainedModel) -> dict[str, Scheme]:
    """Return the schemes of lm_head and embeddings, by name in the model. Raises ValueError if quant.lm_head is
    ``tied``, but the model has two weights."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if recipe.quant.lm_head == TIED and head.weight is not table.weight:
        raise ValueError(
            f"quant.lm_head: {TIED}, expected a scheme: lm_head and embeddings of {recipe.model.path} are two weights"
        )
    modules = {id(module): name for name, module in model.named_modules()}
    chosen = {
        "lm_head": (recipe.quant.head_scheme(), head),
        "embedding": (recipe.quant.embedding_scheme(), table),
    }
    return {modules[id(module)]: scheme for scheme, module in chosen.values() if scheme is not None}


def uses_fp8_gemm(recipe: Recipe, device: torch.device) -> bool:
    """Tell if this run multiplies codes in fp8 GEMMs; ``quant.compute: auto`` does so on GPUs with fp8 tensor cores, in
    bfloat16, if a scheme allows it. Raises ValueError if ``quant.compute`` is fp8_gemm on a GPU without fp8 tensor
    cores."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    if recipe.quant.compute == "fp8_gemm" and device.type == "cuda" and not able:
        gpu = f"{torch.cuda.get_device_name(device)} has no fp8 tensor cores (compute capability 8.9)"
        raise ValueError(f"quant.compute: 'fp8_gemm', expected auto or simulate: {gpu}")
    if recipe.quant.compute != "auto":
        return recipe.quant.compute == "fp8_gemm"
    return able and recipe.model.dtype == "bfloat16" and recipe.quant.has_fp8_gemm()


def _compile_layers(model: PreTrainedModel) -> None:
    """Compile each decoder layer separately with torch.compile, in place.

    Layers share one graph, so compile time does not grow with their number. Layers with experts are not compiled: the
    number of tokens per expert is known only at run time.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    dense = [layer for layer in layers if not any(isinstance(part, ExpertMLPs) for part in layer.modules())]
    for layer in dense:
        layer.compile(options=COMPILE_OPTIONS)
    say(f"compiled: {len(dense)} of {len(layers)} decoder layers; the first steps take longer")


ENOUGH = 0.8  # warn if a smaller share of the decoder's matrices is quantized


@dataclass
class QuantizedShare:
    """Quantized share of the decoder's matrices: weights of two or more dims without embeddings, lm_head and routers.

    Attributes:
        parameters: numbers of quantized and of all elements by kind (attention, MLP, experts, other).
        left_out: number of unquantized elements by parameter name, in which numbers are replaced by ``*``.
    """

    parameters: dict[str, tuple[int, int]]
    left_out: Counter[str]

    def lines(self) -> Iterator[str]:
        """Yield a line with all shares and, if less than 80% is quantized, a warning with unquantized parameters."""
        done, whole = map(sum, zip(*self.parameters.values(), strict=True))
        share = done / whole if whole else 1.0
        kinds = ", ".join(f"{kind} {done:,} of {whole:,}" for kind, (done, whole) in self.parameters.items() if whole)
        yield f"quantized: {share:.1%} of the {whole:,} parameters in the decoder's matrices ({kinds})"
        if share < ENOUGH:
            most = [f"{name} ({count:,})" for name, count in self.left_out.most_common()]
            yield f"warning: {1 - share:.1%} of the decoder's matrices are not quantized: {listed(most, 8)}"


def quantized_share(model: PreTrainedModel, quantization: Quantization) -> QuantizedShare:
    """Count the quantized elements of a model's matrices; parameters may be partitioned."""
    quantized = {id(layer.weight) for layer in quantization.layers.values()}
    modules = dict(model.named_modules())
    counts = dict.fromkeys(("attention", "MLP", "experts", "other"), (0, 0))
    left_out: Counter[str] = Counter()
    for owned in classify(model):
        shape = full_shape(as_weight(owned.parameter))
        if owned.kind != "weight" or len(shape) < 2:
            continue
        kind, numel, done = _kind_of_matrix(owned.name, modules), shape.numel(), id(owned.parameter) in quantized
        counts[kind] = counts[kind][0] + done * numel, counts[kind][1] + numel
        if not done:
            left_out[re.sub(r"\b\d+\b", "*", owned.name)] += numel
    return QuantizedShare(counts, left_out)


_KINDS = {"attention": ("attn", "attention"), "MLP": ("mlp", "feed_forward", "ffn", "moe")}


def _kind_of_matrix(name: str, modules: dict[str, nn.Module]) -> str:
    """Find a matrix's kind (attention, MLP, experts, other) by its innermost module with a telling name or class."""
    around = name.rpartition(".")[0]
    while around:
        words = f"{around.rpartition('.')[2]} {type(modules[around]).__name__}".lower()
        if isinstance(modules[around], ExpertMLPs):
            return "experts"
        for kind, said in _KINDS.items():
            if any(word in words for word in said):
                return kind
        around = around.rpartition(".")[0]
    return "other"


def _summary(recipe: Recipe, quantization: Quantization) -> str:
    multiplied = sum(layer.fp8_gemm for layer in quantization.layers.values())
    how = f"{multiplied} by fp8 GEMM" if multiplied else f"simulated in {recipe.model.dtype}"
    how = "fake quant off in all steps" if recipe.never_quantizes() else how
    counts = Counter(layer.scheme.name for layer in quantization.layers.values())
    schemes = ", ".join(f"{count} {name}" for name, count in counts.items()) if len(counts) > 1 else "".join(counts)
    parts = [f"{len(quantization.layers)} linear layers, {schemes}, {how}"] if quantization.layers else []
    if quantization.caches:
        parts.append(f"keys and values of {len(quantization.caches) // 2} layers")
    return "; ".join(parts)


_CHUNK = 2**25  # fp64 values at a time: 256 MB, and one or two copies


@torch.no_grad()
def rotate_weights(model: PreTrainedModel, quantization: Quantization) -> int:
    """Rotate the weights of all layers that rotate their inputs, so that the model computes the same function; a
    collective.

    Each value is computed in fp64 and rounded once to the weight's dtype. One weight is gathered at a time. Call it
    before ``deepspeed.initialize``, after the weights are loaded and before scales are measured from them.

    Returns:
        Number of rotated layers.
    """
    turned = rotated_layers(quantization)
    for name, block in turned.items():
        layer = quantization.layers[name]
        with gathered([layer.weight], modifier_rank=0):
            if is_main():
                for rows in layer.weight.split(max(1, _CHUNK // layer.in_features)):
                    rows.copy_(rotate(rows.double(), block))
    if turned:
        forget_secondary_copies(model)
    return len(turned)
