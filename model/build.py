"""Build the empty model: all modules exist, and every parameter has memory for this rank's partition, but no weight has
been read.

On every stage, the model's ``__init__`` runs with parameters on the meta device and real buffers: torch's hook for
parameter registration moves each new Parameter there. Then MoE layers are arranged, embeddings are tied, and
:func:`model.zero.materialize` creates the parameters one by one, under ``zero.Init`` for stage 3. Running ``__init__``
inside ``zero.Init`` instead would patch torch's tensor constructors for all modeling code: float ``torch.arange`` and
the ``torch.tensor`` of a longrope configuration become bf16, and with them ``inv_freq``, and torch._dynamo cannot be
imported. With parameters on the meta device, no rank allocates a whole layer, and errors in the configuration or
modeling code are raised before the first collective.
"""

import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from model import zero
from model.families import arrange_conv1d, class_names, is_composite, model_class, text_of_composite
from model.moe.arrange import arrange_experts
from model.moe.experts import Form
from model.quantized.quantization_config import check_readable, is_quantized, read_json_object
from model.ranks import errors_on_all_ranks, raise_everywhere, say

FP32_ALONE = ("xlstm",)  # its states stay in fp32, and are multiplied by tensors in the model's dtype
UNTIED = "untied_by_us"  # attribute of the configuration of a model whose files tie lm_head to the embeddings
AUTO = "auto"  # sdpa, or eager for a class without it
# transformers' name of the module that chooses the tokens of sparse attention (DeepSeek-V3.2, GLM-5, Qwen4-Exp).
# Qwen4-Exp's indexer calls its norm once per token, and lengths of samples differ between ranks: so ZeRO-3 must gather
# the indexer as a whole. Such a leaf module must not train, since the gradients of its parameters would wait for a
# gradient of its output. transformers runs the indexer without gradients, so only weight decay would change it anyway.
INDEXER = "indexer"


def build_model(
    path: str | Path,
    ds_config: dict[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    attn_implementation: str = AUTO,
    experts: Form = "stacked",
    hold: Callable[[PreTrainedModel], None] | None = None,
    rotated: bool = False,
    untie: bool = False,
) -> PreTrainedModel:
    """Build the causal language model of ``path/config.json``, with uninitialized parameters. A collective.

    Args:
        path: directory of a Hugging Face checkpoint, maybe quantized; its configuration and code are read, no weights.
        ds_config: resolved DeepSpeed configuration; its stage and dtype are used.
        dtype: dtype of all parameters.
        device: device of the buffers, and on stages 0-2 of the parameters.
        trust_remote_code: allow running Python code in ``path``.
        attn_implementation: transformers' name ("eager", "flash_attention_2", ...), or "auto": sdpa if the model has
            it, else eager.
        experts: form of MoE layers: "stacked" (all experts of a layer in one weight) or "per_expert" (Linears).
        hold: function that replaces chosen weights of the model, still on the meta device, by packed weights
            (:mod:`quant.packed_weight`); None for none.
        rotated: True if the caller applies a quantized checkpoint's input rotations (``transform_config``); otherwise
            such a checkpoint is an error.
        untie: give lm_head and embeddings a weight each. If the files tie them, ``tie_word_embeddings`` of the model's
            configuration is set to False, and the configuration gets the attribute :data:`UNTIED`.

    Raises:
        RankError: on every rank: there is no config.json, the checkpoint, its MoE layout or ``attn_implementation`` is
            not supported, the model needs code that is not allowed, ``dtype`` contradicts ``ds_config`` or model, tied
            weights are separate parameters, or rotary frequencies are not fp32.
    """
    path = Path(path)
    with errors_on_all_ranks(Exception):
        config = read_config(path, trust_remote_code, rotated=rotated)
        _check_dtype(config, ds_config, dtype)
        attention = attention_for(config, attn_implementation)
        if attn_implementation == AUTO and attention != "sdpa":
            say(f"attention: {attention}, for {type(config).__name__} has no sdpa; it takes more memory and time")
        with _parameters_on_meta(dtype), no_init_weights():
            options = {"dtype": dtype, "attn_implementation": attention}
            with _named(path / "config.json", attn_implementation):
                model = _empty(config, trust_remote_code, options)
                head = model.get_output_embeddings()
                own = {f"{name}.weight" for name, module in model.named_modules() if module is head}
                if untie and own & model.all_tied_weights_keys.keys():
                    for part in (config, config.get_text_config()):
                        part.tie_word_embeddings = False
                        setattr(part, UNTIED, True)
                    say("untied: lm_head and embeddings share a weight in the files; each gets its own weight")
                    model = _empty(config, trust_remote_code, options)
            arrange_conv1d(model)
            arrange_experts(model, experts)
            for name in [name for name, _ in model.named_modules() if name.endswith(f".{INDEXER}")]:
                zero.mark_leaf(model.get_submodule(name))
        model.tie_weights()  # no_init_weights disables the method that ties them
        if hold is not None:
            hold(model)
        _place_buffers(model, dtype, device)
    zero.materialize(model, ds_config, device)
    raise_everywhere(untied(model))
    check_rotary_buffers(model)
    return model


def _empty(config: PretrainedConfig, trust_remote_code: bool, options: dict[str, Any]) -> PreTrainedModel:
    """Create the causal language model of a configuration; for a composite model without its towers."""
    model: PreTrainedModel = (
        text_of_composite(config, **options)
        if is_composite(config)
        else AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)
    )
    return model


@contextmanager
def _named(file: Path, attention: str = AUTO) -> Iterator[None]:
    """Convert errors of transformers, of any type, to a ValueError that names the configuration ``file`` or an
    unsupported ``attention``."""
    try:
        yield
    except Exception as error:
        where = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        if attention != AUTO and any("attn_implementation" in name for name in where):
            why = str(error).partition(" Please request")[0]  # without its advice to ask for it
            text = f"model.attn_implementation: {attention!r}, expected auto, or another one: {why}"
            raise ValueError(text) from error
        raise ValueError(f"{file} describes no model that can be built: {type(error).__name__}: {error}") from error


def attention_for(config: PretrainedConfig, name: str) -> str:
    """Resolve "auto" to sdpa, or to eager if the model class does not support sdpa; other names are returned unchanged.
    A class of remote code is assumed to support sdpa."""
    if name != AUTO:
        return name
    usual: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    kind = model_class(config) if is_composite(config) else usual.get(type(config), None)
    return "sdpa" if kind is None or kind._supports_sdpa else "eager"


def check_rotary_buffers(model: nn.Module) -> None:
    """Raise RankError on every rank if a rotary ``inv_freq`` is not fp32; a collective.

    A bf16 frequency is off by up to 0.2%, which at position 1,000 makes the angles of the faster pairs wrong by about a
    radian.
    Call this function again after ``deepspeed.initialize``, which may cast buffers (``data_types.buffer_dtype``).
    """
    wrong = [
        f"{name} ({buffer.dtype})"
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and buffer.dtype != torch.float32
    ]
    raise_everywhere(f"rotary frequencies must be float32: {', '.join(wrong)}" if wrong else None)


def _check_dtype(config: PretrainedConfig, ds_config: dict[str, Any], dtype: torch.dtype) -> None:
    """Raise ValueError if ``dtype`` is not the engine's dtype for parameters, or the model does not run in it."""
    if dtype != torch.float32 and config.model_type in FP32_ALONE:
        alone = f"transformers runs {config.model_type} in fp32 alone"
        raise ValueError(f"{config.name_or_path}: {alone}: set model.dtype to float32")
    enabled = {
        torch.bfloat16: bool(ds_config.get("bf16", {}).get("enabled", False)),
        torch.float16: bool(ds_config.get("fp16", {}).get("enabled", False)),
    }
    engine = next((kind for kind, on in enabled.items() if on), torch.float32)
    if engine != dtype:
        raise ValueError(
            f"model.dtype is {dtype}, but the DeepSpeed configuration trains in {engine}: set bf16.enabled and "
            "fp16.enabled to match"
        )


def read_config(path: Path, trust_remote_code: bool, *, rotated: bool = False) -> PretrainedConfig:
    """Read the configuration of the checkpoint in ``path``; the result has no quantization_config. ``rotated``: accept
    a quantized checkpoint with input rotations (``transform_config``), otherwise an error. Raises ValueError if there
    is no config.json, the checkpoint is not supported, or it needs Python code that ``trust_remote_code`` forbids."""
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{file} does not exist: expected the directory of a Hugging Face checkpoint")
    raw = read_json_object(file)
    if is_quantized(path):
        check_readable(path, rotated=rotated)
    # transformers has no class for this configuration, but the checkpoint names one.
    needs_code = bool(raw.get("auto_map")) and raw.get("model_type") not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if needs_code and not trust_remote_code:
        raise ValueError(
            f"{file} needs Python code from the checkpoint (auto_map: {json.dumps(raw['auto_map'])}): read that code, "
            "and if you trust it set model.trust_remote_code to true"
        )
    with _named(file):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    kinds = ", ".join(class_names(config)) or type(config).__name__
    known = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or is_composite(config)
    if not known and "AutoModelForCausalLM" not in raw.get("auto_map", {}):
        raise ValueError(
            f"{file} describes {kinds} (model_type {config.model_type}), expected a causal language model, or a "
            "composite model with one in it"
        )
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return config


@contextmanager
def _parameters_on_meta(dtype: torch.dtype) -> Iterator[None]:
    """Put all parameters registered inside the block on the meta device, floats in ``dtype``; buffers stay as is."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None  # registered unchanged
        # One dtype for all, even if a class requests fp32 (some routers do): under ZeRO-3 trainable parameters of two
        # dtypes would share one flat buffer of one dtype, and on other stages the engine casts them anyway.
        target = dtype if parameter.is_floating_point() else parameter.dtype
        meta = nn.Parameter(
            torch.empty_like(parameter, dtype=target, device="meta"), requires_grad=parameter.requires_grad
        )
        meta.__dict__.update(parameter.__dict__)
        return meta

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def _place_buffers(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Move buffers to ``device``, in place; they keep their dtype, except those that the model's class lists as fp32.
    Raises ValueError for a buffer on the meta device: it was computed from a parameter."""
    zero.upcast_named_buffers(model, dtype)
    for module_name, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                raise ValueError(
                    f"{module_name}.{name} is computed from a parameter in the model's __init__, expected a constant: "
                    "this model is not supported"
                )
            setattr(module, name, buffer.to(device))


def untied(model: PreTrainedModel) -> str | None:
    """Return an error text if the configuration ties two names, but they are not one Parameter; else None."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    pairs = [
        f"{target} and {source}"
        for target, source in model.all_tied_weights_keys.items()
        if parameters.get(target) is not parameters.get(source)
    ]
    return f"{type(model).__name__} ties {', '.join(pairs)}, but they are separate parameters" if pairs else None
