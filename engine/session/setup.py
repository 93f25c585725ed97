"""From a recipe to everything that the loop needs, in the order that ZeRO asks for.

The order is not free: parameters must exist in partitions before weights stream into them, layers must be quantised
before their scales can be loaded, all of it before ``deepspeed.initialize`` copies the parameters into fp32 masters;
and activations can only be calibrated after it, because the forward needs the engine's hooks.
"""

import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from data.chat import read_chat
from data.held_out import HeldOut, split
from data.loader import Loader
from data.samples import Sample
from data.text import read_text
from engine.cluster.join import join_ranks
from engine.cluster.nodes import check_nodes_agree, check_same_samples
from engine.losses.teacher import ModelTeacher, SelfTeacher, Teacher, common_vocabulary, first_difference
from engine.recipe.checks import RecipeError
from engine.recipe.ds_config import resolve, teacher_config
from engine.recipe.recipe import Recipe
from engine.session.levers import Levers
from engine.session.loss_scale import LossScale
from engine.session.optimizer import build_optimizer, set_learnable
from model.build import build_model, check_rotary_buffers
from model.coded import CodedWeights
from model.experts import ExpertMLPs
from model.head import LMHead, QuantHead, changes_logits, install_head, output_head, remove_head
from model.load import load_weights
from model.ranks import errors_on_all_ranks, gather_objects, is_main, listed, raise_everywhere, rank, say, world_size
from model.scales import load_scales, release_scales, renew_weight_scales, write_scales
from model.zero import forget_secondary_copies, keep_frozen_fp32, partition_new_parameters, stage
from quant import Quantization, Scheme, prepare, prepare_kernels

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass
class RunContext:
    """What a run stands on before a model exists."""

    device: torch.device
    ds_config: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase


@dataclass
class Session:
    """A run that is ready to train: the student in its engine, its quantisation, the teacher, the data."""

    recipe: Recipe
    ds_config: dict[str, Any]
    engine: deepspeed.DeepSpeedEngine
    model: PreTrainedModel
    quantization: Quantization
    teacher: Teacher | None
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    levers: Levers
    head: LMHead | None = None
    """The student's lm_head, where the losses of training are computed; None in a session that does not train."""
    coded: CodedWeights | None = None
    """The weights that stage 3 gathers as codes; None where it gathers all of them as they are."""
    head_checked: bool = False
    """Whether a forward has shown that the model returns what lm_head gives."""
    loss_scale: LossScale | None = None
    """Of a run in fp16."""


def init_ranks() -> torch.device:
    """Start the process group (NCCL on CUDA, gloo on CPU) and return this rank's device.

    Without a launcher the process is rank 0 of 1.

    Raises:
        RecipeError: a job of several processes does not say which rank this one is.
        RankError: another machine has found something wrong before it came here
        (engine.cluster.nodes.tell_other_nodes).
    """
    device = join_ranks()
    raise_everywhere(None)
    return device


def read_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The tokenizer of the student's checkpoint; an error on every rank if there is none."""
    with errors_on_all_ranks(OSError, ValueError):
        return AutoTokenizer.from_pretrained(
            recipe.model.path, trust_remote_code=recipe.model.trust_remote_code, local_files_only=True
        )


def read_samples(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, files: Sequence[str]) -> list[Sample]:
    """Tokenised samples of some files, every rank its own copy; an error on every rank if a line is bad."""
    settings = recipe.data
    with errors_on_all_ranks(OSError, ValueError):
        if settings.kind == "text":
            samples = read_text(files, tokenizer, settings.max_length, progress=is_main())
            say(f"data: {len(samples):,} blocks of {settings.max_length:,} tokens")
            return samples
        samples, counts = read_chat(
            files,
            tokenizer,
            fields=settings.fields,
            max_length=settings.max_length,
            loss_on=settings.loss_on,
            too_long=settings.too_long,
            progress=is_main(),
        )
        say(f"data: {counts.summary()}")
        return samples


def build_loader(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> tuple[Loader, HeldOut | None]:
    """Samples, sharded by rank and grouped into optimizer steps; and those held out, None if the recipe has none."""
    settings = recipe.data
    if settings.packing:
        _check_packing(recipe)
    training = read_samples(recipe, tokenizer, settings.train)
    held_out: list[Sample] = []
    with errors_on_all_ranks(ValueError):
        if settings.held_out:
            training, held_out = split(training, settings.held_out, settings.seed)
    if settings.eval:
        held_out += read_samples(recipe, tokenizer, settings.eval)
    sharded = {
        "micro_batch_size": settings.micro_batch_size,
        "rank": rank(),
        "world": world_size(),
        "pad_token_id": tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
    }
    check_same_samples(training, held_out)
    with errors_on_all_ranks(ValueError):
        loader = Loader(
            training,
            gradient_accumulation_steps=recipe.train.gradient_accumulation_steps,
            seed=settings.seed,
            packed_length=settings.max_length if settings.packing else None,
            weights=settings.weights_by_file(),
            **sharded,
        )
    return loader, HeldOut(held_out, **sharded) if held_out else None


def _check_packing(recipe: Recipe) -> None:
    """Refuse to pack for a model that would see across the borders of samples; an error on every rank."""
    attention = recipe.model.attn_implementation
    with errors_on_all_ranks(OSError, ValueError):
        config = AutoConfig.from_pretrained(
            recipe.model.path, trust_remote_code=recipe.model.trust_remote_code, local_files_only=True
        )
        # Layers that carry a state from token to token read no borders.
        other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if other:
            raise RecipeError(
                f"data.packing: true, expected false: {recipe.model.path} has layers of the kinds {sorted(other)}, "
                "which do not keep packed samples apart"
            )
        # transformers: masks for these; flash attention reads borders from position_ids in batches of one row.
        if attention in ("sdpa", "eager", "flex_attention"):
            return
        if not attention.startswith("flash_attention") or recipe.data.micro_batch_size > 1:
            raise RecipeError(
                f"data.packing: true, expected false: with model.attn_implementation {attention} and "
                f"data.micro_batch_size {recipe.data.micro_batch_size} packed samples would see each other; packing "
                "works with sdpa, eager and flex_attention, and with flash_attention_2 at data.micro_batch_size 1"
            )


def build_student(
    recipe: Recipe, ds_config: dict[str, Any], device: torch.device, *, training: bool = True
) -> tuple[PreTrainedModel, Quantization]:
    """The student with weights loaded, Linears quantised and what trains switched on; scales hold no values yet."""
    model, named = empty_student(recipe, ds_config, device, training=training)
    report = load_weights(model, recipe.model.path, method=recipe.model.load)
    say(f"weights: {report.summary()}")
    quantization = quantise_student(recipe, ds_config, device, model, named)
    say(f"quantised: {_summary(recipe, quantization)}")
    if quantization.simulated:
        say(
            "simulated, for the fp8 GEMM takes sides that are multiples of 16 alone, and of stacked experts bf16 on "
            f"compute capability 9.0: {listed(quantization.simulated)}"
        )
    return model, quantization


def empty_student(
    recipe: Recipe, ds_config: dict[str, Any], device: torch.device, *, training: bool = True
) -> tuple[PreTrainedModel, dict[str, Scheme]]:
    """The student without weights (on the meta device nothing has any), and the schemes of what is named alone."""
    model = build_model(
        recipe.model.path,
        ds_config,
        dtype=DTYPES[recipe.model.dtype],
        device=device,
        trust_remote_code=recipe.model.trust_remote_code,
        attn_implementation=recipe.model.attn_implementation,
        experts=recipe.model.experts,
    )
    with errors_on_all_ranks(ValueError):  # before the weights are read
        named = _named_schemes(recipe, model)
        if training:
            _check_head(model, recipe)
    return model, named


def quantise_student(
    recipe: Recipe, ds_config: dict[str, Any], device: torch.device, model: PreTrainedModel, named: dict[str, Scheme]
) -> Quantization:
    """Quantise Linears and switch on what trains, in place; scales hold no values yet."""
    with errors_on_all_ranks(ValueError):
        quantization = prepare(
            model,
            recipe.quant.preset().linear,
            rules=recipe.quant.chosen_rules(),
            named=named,
            exempt=recipe.quant.exempt,
            learn_weight_scale=recipe.learnable.weight_scale,
            learn_input_scale=recipe.learnable.act_scale,
            ranges=recipe.quant.ranges(),
            fp8_gemm=uses_fp8_gemm(recipe, device),
            kv_cache=recipe.quant.preset().kv_cache,
        )
    partition_new_parameters(model, ds_config)
    set_learnable(model, recipe.learnable)
    # transformers computes the router's auxiliary loss in its forward; without a trainable router nobody would use it.
    model.config.output_router_logits = recipe.learnable.router
    model.config.use_cache = False
    if recipe.train.activation_checkpointing:
        # Their inputs go to host memory in engine.forward: transformers' own `offload` does not run on a CPU.
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    if recipe.train.compile:
        _compile_layers(model)
    _keep_weight_codes(recipe, ds_config, quantization)
    return quantization


def _named_schemes(recipe: Recipe, model: PreTrainedModel) -> dict[str, Scheme]:
    """The schemes of lm_head and of the embeddings, by their names in the model."""
    modules = {id(module): name for name, module in model.named_modules()}
    chosen = {
        "lm_head": (recipe.quant.head_scheme(), model.get_output_embeddings()),
        "embedding": (recipe.quant.embedding_scheme(), model.get_input_embeddings()),
    }
    if model.config.get_text_config().tie_word_embeddings:
        for key, (scheme, _) in chosen.items():
            if scheme is not None:
                raise ValueError(
                    f"quant.{key}: {scheme.name!r}, expected null: the checkpoint ties embeddings and lm_head, which "
                    "have one weight on disk, read by readers that quantise neither"
                )
    return {modules[id(module)]: scheme for scheme, module in chosen.values() if scheme is not None}


def _check_head(model: PreTrainedModel, recipe: Recipe) -> None:
    """Refuse, before weights are read, a model whose losses cannot be computed from its hidden states."""
    if problem := changes_logits(model.config):
        raise ValueError(problem)
    name, _ = output_head(model)
    exempt = recipe.quant.exempt
    if recipe.quant.lm_head is None and not any(re.fullmatch(pattern, name) for pattern in exempt):
        raise ValueError(
            f"quant.exempt: {exempt}, expected a pattern that matches {name}: losses are computed through it in "
            "the model's dtype"
        )


def uses_fp8_gemm(recipe: Recipe, device: torch.device) -> bool:
    """Whether this run multiplies codes. ``auto`` does where a GPU has fp8 tensor cores.

    Raises:
        ValueError: the recipe asks for it on a GPU without them.
    """
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    if recipe.quant.compute == "fp8_gemm" and device.type == "cuda" and not able:
        raise ValueError(
            f"quant.compute: 'fp8_gemm', expected auto or simulate: {torch.cuda.get_device_name(device)} has no fp8 "
            "tensor cores (compute capability 8.9)"
        )
    if recipe.quant.compute != "auto":
        return recipe.quant.compute == "fp8_gemm"
    return able and recipe.model.dtype == "bfloat16" and recipe.quant.has_fp8_gemm()


# To round where eager mode rounds: fused chains of bf16 operations would stay in fp32.
COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"emulate_precision_casts": True}


def _compile_layers(model: PreTrainedModel) -> None:
    """torch.compile each decoder layer by itself, in place: they share one graph, so compiling does not take longer
    with their number. Layers with experts stay as they are: which tokens an expert gets is known only at run time."""
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    dense = [layer for layer in layers if not any(isinstance(part, ExpertMLPs) for part in layer.modules())]
    for layer in dense:
        layer.compile(options=COMPILE_OPTIONS)
    say(f"compiled: {len(dense)} of {len(layers)} decoder layers; the first steps take longer")


def _keep_weight_codes(recipe: Recipe, ds_config: dict[str, Any], quantization: Quantization) -> None:
    """Quantise weights once per optimizer step where they stay resident and several micro-batches use them.

    Costs a byte per weight. Under stage 3 a weight is there only while its layer runs.
    """
    keep = stage(ds_config) < 3 and recipe.train.gradient_accumulation_steps > 1
    for layer in quantization.layers.values():
        layer.keeps_weight_codes = keep


def _summary(recipe: Recipe, quantization: Quantization) -> str:
    multiplied = [layer for layer in quantization.layers.values() if layer.fp8_gemm]
    how = f"{len(multiplied)} by fp8 GEMM" if multiplied else "simulated"
    counts = Counter(layer.scheme.name for layer in quantization.layers.values())
    schemes = ", ".join(f"{count} {name}" for name, count in counts.items()) if len(counts) > 1 else "".join(counts)
    parts = [f"{len(quantization.layers)} linear layers, {schemes}, {how}"] if quantization.layers else []
    if quantization.caches:
        parts.append(f"keys and values of {len(quantization.caches) // 2} layers")
    return "; ".join(parts)


def initial_scales(recipe: Recipe, model: PreTrainedModel, quantization: Quantization) -> set[str]:
    """Fill every weight scale, and the activation scales that the recipe names a source for; a collective.

    Returns:
        Owners of the input groups whose scales remain to be calibrated in place.
    """
    if recipe.quant.scales is not None:
        report = load_scales(
            model,
            quantization,
            recipe.quant.scales,
            initial_input_scale=recipe.quant.initial_input_scale,
            inputs_calibrated_later=recipe.quant.calibration_batches > 0,
        )
        say(report.summary())
        return set(report.inputs_missing)
    renew_weight_scales(quantization)
    owners = {group.owner for group in quantization.input_groups}
    if recipe.quant.initial_input_scale is None:
        return owners
    write_scales(quantization.input_groups, dict.fromkeys(owners, torch.tensor([recipe.quant.initial_input_scale])))
    return set()


def initialize_student(recipe: Recipe, ds_config: dict[str, Any], model: PreTrainedModel) -> deepspeed.DeepSpeedEngine:
    """The student's engine with its optimizer."""
    with errors_on_all_ranks(ValueError):
        # In every other case an optimizer of DeepSpeed's stands around this one, which skips such steps by itself.
        unguarded = stage(ds_config) == 0 and recipe.model.dtype == "float32"
        optimizer = build_optimizer(model, recipe.optim, skip_non_finite=unguarded)
    # Scales were gathered since the weights were loaded, and hpZ keeps copies of what is gathered.
    forget_secondary_copies(model)
    config = ds_config
    if recipe.model.dtype == "float16":
        # A static scale, which is set before every step: see engine.session.loss_scale.
        config = {**ds_config, "fp16": {"enabled": True, "loss_scale": LossScale.from_config(ds_config["fp16"]).value}}
    with keep_frozen_fp32(model):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    check_rotary_buffers(model)
    if stage(ds_config) == 0:
        # On stage 0 in 16 bits DeepSpeed makes a step with zero gradients to allocate the optimizer's state. It moves
        # nothing, as the learning rate is still 0, but it counts for Adam's bias correction: the first real step would
        # be 0.73 of its size.
        optimizer.state.clear()
    return engine


def initialize_frozen(model: PreTrainedModel, ds_config: dict[str, Any]) -> nn.Module:
    """A model that only runs forward: an engine without an optimizer under stage 3, elsewhere the plain module."""
    model.requires_grad_(False)
    model.eval()
    model.config.use_cache = False
    model.config.output_router_logits = False
    if stage(ds_config) < 3:
        return model
    forget_secondary_copies(model)
    engine, *_ = deepspeed.initialize(model=model, config=teacher_config(ds_config))
    return engine


def build_teacher(recipe: Recipe, context: RunContext, logits: int) -> Teacher | None:
    """The teacher that is a model of its own; None where there is none, or it is the student itself or a cache."""
    if recipe.teacher_kind() != "model":
        return None
    assert recipe.loss.teacher is not None
    return load_teacher(recipe, context, recipe.loss.teacher, logits)


def load_teacher(recipe: Recipe, context: RunContext, path: str, logits: int) -> ModelTeacher:
    """A frozen model to distil from; under stage 3 an engine without an optimizer.

    Args:
        recipe: the run.
        context: what :func:`start_ranks` gave.
        path: directory of the teacher's checkpoint.
        logits: how many the student has per token.

    Raises:
        RankError: on every rank: its tokenizer is another one, or lacks, it has no logit for a token, or its logits are
            not what lm_head gives.
    """
    with errors_on_all_ranks(OSError, ValueError):
        if os.path.realpath(path) != os.path.realpath(recipe.model.path):
            _check_same_tokens(recipe, context.tokenizer, path)
    model = build_model(
        path,
        teacher_config(context.ds_config),
        dtype=DTYPES[recipe.model.dtype],
        device=context.device,
        trust_remote_code=recipe.model.trust_remote_code,
        attn_implementation=recipe.model.attn_implementation,
        experts=recipe.model.experts,
    )
    with errors_on_all_ranks(ValueError):
        if problem := changes_logits(model.config):
            raise ValueError(f"loss.teacher: {path}: {problem}")
        _, linear = output_head(model)
        try:
            vocabulary = common_vocabulary(context.tokenizer, logits, linear.out_features)
        except ValueError as error:
            raise ValueError(f"loss.teacher: {path}: {error}") from error
    if vocabulary is not None:
        say(
            f"distillation compares the {vocabulary:,} tokens of the tokenizer: the student has {logits:,} logits, "
            f"the teacher {linear.out_features:,}"
        )
    report = load_weights(model, path, method=recipe.model.load)
    say(f"teacher: {report.summary()}")
    its_head = remove_head(model).requires_grad_(False)
    return ModelTeacher(initialize_frozen(model, context.ds_config), its_head, vocabulary)


def _check_same_tokens(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Refuse a teacher to whom a token id means something else."""
    try:
        theirs = AutoTokenizer.from_pretrained(
            path, trust_remote_code=recipe.model.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"loss.teacher: {path} has no tokenizer to compare with the student's: distillation compares token by "
            f"token ({error})"
        ) from error
    if difference := first_difference(tokenizer, theirs):
        raise ValueError(f"loss.teacher: {path} has another tokenizer: {difference}")


def start_ranks(recipe: Recipe) -> RunContext:
    """Process group, DeepSpeed configuration and tokenizer.

    Raises:
        RecipeError: the DeepSpeed configuration is wrong; on every rank, before there is a process group.
        RankError: there is no tokenizer, or the machines differ (:mod:`engine.cluster.nodes`).
    """
    ds_config = resolve(recipe, int(os.environ.get("WORLD_SIZE", "1")))
    if missing := list(_not_on_this_machine(recipe, ds_config)):
        raise RecipeError("\n".join(missing))
    device = init_ranks()
    check_nodes_agree(recipe, ds_config)
    slower = Counter(text for text in gather_objects(prepare_kernels()) if text)
    for text, ranks in slower.items():
        say(text if ranks == world_size() else f"{text} ({ranks} of {world_size()} ranks)")
    for seeder in (torch.manual_seed, random.seed, np.random.seed):
        seeder(recipe.train.seed)
    return RunContext(device, ds_config, read_tokenizer(recipe))


def _not_on_this_machine(recipe: Recipe, ds_config: dict[str, Any]) -> Iterator[str]:
    """What the recipe asks for and DeepSpeed cannot do here, a line each; before there is a process group."""
    accelerator = get_accelerator()
    if recipe.model.dtype == "float16" and not accelerator.is_fp16_supported():
        yield (
            f"model.dtype: 'float16', expected bfloat16 or float32: DeepSpeed has no fp16 on this machine's "
            f"{accelerator.device_name()}"
        )
    several_nodes = int(os.environ.get("WORLD_SIZE", "1")) > accelerator.device_count()  # as DeepSpeed counts them
    quantized = ds_config["zero_optimization"].get("zero_quantized_gradients")
    if quantized and several_nodes and accelerator.device_name() == "cpu":
        yield (
            f"{recipe.deepspeed}: zero_optimization.zero_quantized_gradients: true, expected false: across nodes it "
            "runs an operator for GPUs"
        )


def set_up(
    recipe: Recipe, context: RunContext, *, training: bool = True, teacher: bool = True
) -> tuple[Session, set[str]]:
    """Everything from the recipe to engines, with weights and scales in place; a collective.

    Args:
        recipe: the run.
        context: what :func:`start_ranks` gave.
        training: with an optimizer; else the engine only runs forward.
        teacher: with what computes the losses of training, and the teacher that the recipe names (a cache is opened by
            who has the samples).

    Returns:
        The session, and the owners of input groups whose scales are still to be calibrated (see
        engine.quantisation.calibrate).
    """
    device, ds_config = context.device, context.ds_config
    model, quantization = build_student(recipe, ds_config, device, training=training and teacher)
    uncalibrated = initial_scales(recipe, model, quantization)
    head, its_teacher = None, None
    if training and teacher:
        with errors_on_all_ranks(ValueError):
            head = install_head(model)
        if isinstance(head, QuantHead):
            quantization.layers[output_head(model)[0]] = head
        its_teacher = build_teacher(recipe, context, head.out_features)
    engine = initialize_student(recipe, ds_config, model) if training else initialize_frozen(model, ds_config)
    if training:
        release_scales(engine, quantization)
    if head is not None and recipe.teacher_kind() == "self":
        its_teacher = SelfTeacher(engine, head, quantization)
    session = Session(
        recipe, ds_config, engine, model, quantization, its_teacher, context.tokenizer, device, Levers(recipe), head
    )
    if training and recipe.model.dtype == "float16":
        session.loss_scale = LossScale.from_config(ds_config["fp16"])
    if training and recipe.quant.gather_codes:
        with errors_on_all_ranks(ValueError):
            session.coded = CodedWeights(model, quantization.layers.values())
        say(f"gathered as codes: the weights of {len(session.coded)} layers")
    return session, uncalibrated
