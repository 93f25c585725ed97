"""Choose the model class of a checkpoint, and reduce a composite model to its text part.

A composite checkpoint (Qwen3.5, Gemma 3, LLaVA, ...) has a text model and towers: vision or audio encoders, projectors.
The class named in its config.json is built, so that names and the forward of text are the same as in transformers. Its
towers are removed before any parameter has memory: they are neither trained nor quantized, and an export copies their
tensors from the source's files, bit for bit.

GPT-2's Linears are ``Conv1D`` in transformers, with weights ``[in, out]``. Each is replaced by an ``nn.Linear``;
reading and writing transpose the weight (:mod:`model.checkpoint.names`). No reader loads such a layer in quantized form
(vLLM transposes every ``weight`` of these models on loading, compressed-tensors looks for Linears), so export these
models with ``export.format: dequantized``.
"""

from typing import Any
from weakref import WeakKeyDictionary

import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D


class Tower(nn.Module):
    """Placeholder for a removed module (name ``name``, class ``kind``) that a forward of text does not need."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__()
        self.part = f"{name} ({kind})"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(f"the forward reads .{name} of {self.part}, {_NOT_BUILT}") from None

    def forward(self, *_: Any, **__: Any) -> None:
        """Raise RuntimeError: a model that calls a tower even for text alone is not supported."""
        raise RuntimeError(f"the forward calls {self.part}, {_NOT_BUILT}")


_NOT_BUILT = "which is no part of its text model and was not built: this model cannot be trained on text alone"


def is_composite(config: PretrainedConfig) -> bool:
    """Return True if a configuration contains the configurations of a text model and of towers."""
    return config.get_text_config() is not config


def class_names(config: PretrainedConfig) -> list[str]:
    """Return the class names in ``architectures`` of a config.json; empty without this key. Raises ValueError if its
    value is no list of names."""
    names: Any = config.architectures or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"config.json: architectures is {names!r}, expected a list of names of classes")
    return names


def model_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return transformers' class for a configuration: the class that ``architectures`` names, or, if transformers has
    none of that name for this configuration, its default class of the model type; None if transformers has no class
    for the model type (remote code). Raises ValueError as :func:`class_names`."""
    for name in class_names(config):
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, PreTrainedModel) and type(config) is named.config_class:
            return named
    mappings = [MODEL_FOR_MULTIMODAL_LM_MAPPING] if is_composite(config) else []
    mappings.append(MODEL_FOR_CAUSAL_LM_MAPPING)
    usual: Any = next((mapping[type(config)] for mapping in mappings if type(config) in mapping), None)
    return usual


def text_of_composite(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """Build the composite model of ``config`` and remove its towers; parameters are created on the device that the
    caller's context sets. ``options`` are those of transformers' ``from_config``. Raises ValueError if transformers has
    no class for ``config``."""
    kind = model_class(config)
    if kind is None:
        raise ValueError(
            f"transformers has no class for {type(config).__name__} ({config.model_type}), which has towers: name one "
            "in architectures of config.json"
        )
    model = kind._from_config(config, **options)
    take_out_towers(model)
    return model


def take_out_towers(model: PreTrainedModel) -> None:
    """Replace all modules with tensors outside of a composite model's text model (``get_decoder``, embeddings and
    lm_head) by :class:`Tower`, in place. Single parameters outside of these (``image_newline``) become None."""
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    kept = {name for name, module in model.named_modules() if any(module is part for part in parts)}
    above = {
        "",
        *(".".join(pieces[:end]) for name in kept for pieces in [name.split(".")] for end in range(len(pieces))),
    }
    # The text model may contain its embeddings and lm_head, and everything inside it is kept.
    above = {name for name in above if not any(f"{name}.".startswith(f"{part}.") for part in kept)}
    for name, module in list(model.named_modules()):
        if name not in above:
            continue
        for child_name, child in list(module.named_children()):
            path = f"{name}.{child_name}".lstrip(".")
            if path not in above | kept and next(iter(child.state_dict()), None) is not None:
                module.add_module(child_name, Tower(path, type(child).__name__))
        for own in [key for key, parameter in module._parameters.items() if parameter is not None]:
            module._parameters[own] = None


def left_out(model: nn.Module) -> list[str]:
    """Return the names of the modules and parameters that :func:`take_out_towers` removed from ``model``."""
    modules = dict(model.named_modules())
    found = [name for name, module in modules.items() if isinstance(module, Tower)]
    beside = dict.fromkeys(name.rpartition(".")[0] for name in [*found, text_part(model)] if name)
    for parent in beside:
        own = modules[parent]._parameters
        found += [f"{parent}.{name}".lstrip(".") for name, parameter in own.items() if parameter is None]
    return found


def text_part(model: nn.Module) -> str:
    """Return the name of the text model inside a composite model; "" if the whole model is a text model."""
    if not isinstance(model, PreTrainedModel) or not is_composite(model.config):
        return ""
    decoder = model.get_decoder()
    return next((name for name, module in model.named_modules() if module is decoder), "")


# Transposed weights by model, recorded because quantized layers replace these Linears.
_TRANSPOSED: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def arrange_conv1d(model: nn.Module) -> None:
    """Replace every ``Conv1D`` of an empty model by an nn.Linear on the meta device, in place, and record the names of
    these weights for :func:`transposed_weights`."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Conv1D)}
    for name, conv in found.items():
        rows, columns = conv.weight.shape
        linear = nn.Linear(rows, columns, bias=False, dtype=conv.weight.dtype, device="meta")
        linear.bias = conv.get_parameter("bias")
        model.set_submodule(name, linear.train(conv.training))
    _TRANSPOSED[model] = frozenset(f"{name}.weight" for name in found)


def transposed_weights(model: nn.Module) -> frozenset[str]:
    """Return the names of a model's weights, ``[out, in]`` in memory, that its checkpoints store as ``[in, out]``."""
    return _TRANSPOSED.get(model, frozenset())
