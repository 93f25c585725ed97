"""Write a checkpoint's files other than its weights.

For mlx-lm, config.json gets further entries. Tensors keep the names of the source, which mlx-lm's classes translate,
except those of experts: a layer's experts are one tensor in MLX.
"""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from model.build import UNTIED
from model.checkpoint.names import Names, module_name_on_disk
from model.families import text_part
from model.quantized.quantization_config import MODELOPT_FILE, read_json_object, rounds_scales
from model.ranks import listed
from model.save.aside import sync, write_json
from model.save.plan import TIED_LAYOUTS, Item, copied_modules, mlx_place
from model.zero import full_shape
from quant import Quantization, QuantLayer
from quant.formats.layouts import Layout, layout_config
from quant.formats.mlx import mlx_config
from quant.formats.modelopt import modelopt_in_config
from quant.linear import QuantEmbedding, StackedLinear, linears_of
from quant.rotation import rotated_layers, transform_config
from quant.rules import name_patterns

# Files other than the weights that a reader of the checkpoint needs: tokenizer, chat template, processors of images and
# sound, generation defaults, remote code.
COPIED = (
    "generation_config.json",
    "tokenizer*",
    "tekken.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*processor_config.json",
    "additional_chat_templates",
    "*.py",
    "LICENSE*",
)
# By model type: the composite type as which mlx-lm reads it, with the text model as a part.
_COMPOSITE = {
    "qwen3_5_text": "qwen3_5",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5_moe": "qwen3_5_moe",
    "gemma4": "gemma4",
}


def write_config(
    model: PreTrainedModel,
    quantization: Quantization | None,
    layout: Layout,
    source: Path,
    directory: Path,
    items: list[Item],
    as_source: bool,
    dtype: torch.dtype | None,
) -> None:
    """Write config.json: the source's, with ``dtype`` (None keeps the source's) and a quantization_config that
    describes the tensors of ``items``. With ``as_source`` the source's quantization_config stays, without
    ``sparsity_config``, and without ``scale_fmt`` where :func:`rounds_scales` is True; otherwise the layout
    ``modelopt`` also gets hf_quant_config.json.

    The source's file is edited rather than writing ``model.config``, so that switches of training (``use_cache``, the
    attention implementation) do not leak into it. If nothing changes, the file is copied.
    """
    config = read_json_object(source / "config.json")
    for part in (config, config.get("text_config") or {}):  # composite models may have it there
        for key in () if as_source else ("quantization_config", "quantization"):
            part.pop(key, None)
        if rounds_scales(kept := part.get("quantization_config") or {}):
            del kept["scale_fmt"]
        kept.pop("sparsity_config", None)  # training does not keep zeros
    # Older checkpoints spell it torch_dtype, which older readers need.
    if dtype is not None:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    config.setdefault("architectures", [type(model).__name__])
    if hasattr(model.config, UNTIED) or (quantization and quantization.ties_layers and layout not in TIED_LAYOUTS):
        for part in (config, *([config["text_config"]] if "text_config" in config else [])):
            part["tie_word_embeddings"] = False
    if quantization is not None and not as_source:
        quantized = configuration(model, quantization, layout, items)
        if quantized is not None and layout == "modelopt":
            whole = {"producer": {"name": "DeepQAT"}, "quantization": quantized}
            write_json(whole, directory / MODELOPT_FILE)
            quantized = modelopt_in_config(quantized)
        if quantized is not None:
            config["quantization_config"] = quantized
        if layout == "mlx":
            add_mlx_entries(config, model, quantization)
    if config == read_json_object(source / "config.json"):
        shutil.copyfile(source / "config.json", directory / "config.json")
        sync(directory / "config.json")
    else:
        write_json(config, directory / "config.json")


def configuration(
    model: PreTrainedModel, quantization: Quantization, layout: Layout, items: list[Item]
) -> dict[str, Any] | None:
    """Create the ``quantization_config`` of an export of ``items`` (for ``modelopt`` the object ``quantization`` of
    hf_quant_config.json). Return None if the layout needs none.

    A module is listed under both names if its names on disk (used by vLLM) and in transformers differ. The text model
    of a composite model has another prefix in every reader (``model.language_model.layers`` on disk and in
    transformers, ``language_model.model.layers`` in vLLM, which does not translate patterns). So in layout
    ``compressed`` its names omit the prefix, and patterns match any prefix. Raises ValueError if an entry of ``ignore``
    matches a quantized layer.
    """
    part = text_part(model)
    anywhere = bool(part) and layout == "compressed"
    skipped = [
        part.name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, StackedLinear))
        for part in linears_of(name, module)
    ]
    routers = [name for name, module in model.named_modules() if is_router(module)]

    def names_of(module: str) -> tuple[str, ...]:
        on_disk = module_name_on_disk(model, module)
        if not anywhere:
            return on_disk, module
        inside = module.removeprefix(f"{part}.")
        begin, found, rest = on_disk.partition(f".{inside.partition('.')[0]}.")
        return (inside, f"{found.strip('.')}.{rest}") if begin and found else (inside,)

    def spellings(modules: Iterable[str]) -> dict[str, str]:
        """Map every name of each module, on disk and in transformers, to its name in the model."""
        return {name: module for module in modules for name in names_of(module)}

    schemes = {
        part.name: layer.scheme for name, layer in quantization.layers.items() for part in linears_of(name, layer)
    }
    layers = {name: schemes[module] for name, module in spellings(schemes).items()}
    head = model.get_output_embeddings()
    no_linears = [
        name for name, module in model.named_modules() if module is head or isinstance(module, QuantEmbedding)
    ]
    tables = [name for name, one in model.named_modules() if isinstance(one, (nn.Embedding, QuantEmbedding))]
    of_embeddings = {schemes.get(name) for name in tables}
    kv_cache = next((cache.spec for cache in quantization.caches.values()), None)
    config = layout_config(
        layout,
        layers,
        spellings(skipped),
        spellings(routers),
        kv_cache,
        no_linears=list(spellings(name for name in no_linears if name in schemes)),
        embedding=of_embeddings.pop() if len(of_embeddings) == 1 else None,
        copied=_copied(model, layout, items),
        anywhere=anywhere,
    )
    if config is not None and (rotated := rotated_layers(quantization)):
        others = spellings([*(name for name in schemes if name not in rotated), *skipped])
        targets = name_patterns(spellings(rotated), others, anywhere=anywhere)
        config["transform_config"] = transform_config(targets, next(iter(rotated.values())))
    quantized = {*schemes, *(module_name_on_disk(model, one) for one in schemes)}
    for entry in (config or {}).get("ignore", ()):
        pattern = re.compile(entry[3:] if entry.startswith("re:") else re.escape(entry) + "$")
        if taken := sorted(filter(pattern.match, quantized)):
            raise ValueError(
                f"the entry {entry!r} of ignore in quantization_config would match the quantized {listed(taken, 2)}: "
                "exempt these layers too (quant.exempt_more)"
            )
    return config


def _copied(model: PreTrainedModel, layout: Layout, items: list[Item]) -> list[str]:
    """List the copied modules, which the model lacks, each by its name on disk and by its name in transformers. For
    ``vllm_fp8`` list only their Linears, by their names on disk."""
    if layout == "vllm_fp8":  # its readers only know whole names of Linears
        plain = [item.copied for item in items if item.copied and len(item.copied.shape) == 2]
        return [tensor.key.removesuffix(".weight") for tensor in plain if tensor.key.endswith(".weight")]
    return [*copied_modules(items), *copied_modules(items, Names(model).renamed)]


def is_router(module: nn.Module) -> bool:
    """Return True for a MoE router of transformers 5: a module with a 2-D ``weight`` that is neither a Linear nor an
    embedding, while vLLM has a Linear in its place."""
    weight = module._parameters.get("weight")
    known = isinstance(module, (nn.Linear, nn.Embedding, QuantLayer))
    return weight is not None and not known and len(full_shape(weight)) == 2


def copy_companions(source: Path, directory: Path, *, as_source: bool = False) -> None:
    """Copy the files of the source, other than weights and config.json, that programs need to read the export
    (``COPIED``); with ``as_source`` also ModelOpt's hf_quant_config.json, if there is one."""
    for pattern in (*COPIED, *([MODELOPT_FILE] if as_source else [])):
        for path in sorted(source.glob(pattern)):
            copy = directory / path.name
            if path.is_dir():
                shutil.copytree(path, copy)
            else:
                shutil.copyfile(path, copy)
            for written in (*copy.rglob("*"), copy):
                sync(written)


def add_mlx_entries(config: dict[str, Any], model: PreTrainedModel, quantization: Quantization) -> None:
    """Add to ``config``, the contents of a config.json, the entries that mlx-lm reads: ``quantization``, and the keys
    that checkpoints on the Hub have.

    From version 5 on, transformers writes ``rope_parameters``, which most of mlx-lm's classes silently ignore, instead
    of ``rope_theta`` and ``rope_scaling``, and ``num_local_experts`` instead of ``num_experts``.
    """
    kind, settings = model.config.model_type, model.config.get_text_config()
    schemes = {
        mlx_module(kind, mlx_place(module_name_on_disk(model, part.name))[0]): layer.scheme
        for name, layer in quantization.layers.items()
        for part in linears_of(name, layer)
    }
    config["quantization"] = mlx_config(schemes)
    config["model_type"] = _COMPOSITE.get(kind, kind)
    text = config.get("text_config", config)
    config.setdefault("vocab_size", settings.vocab_size)
    if hasattr(settings, "num_experts"):
        text.setdefault("num_experts", settings.num_experts)
    if text.get("head_dim") is None:
        text["head_dim"] = settings.hidden_size // settings.num_attention_heads
    if kind == "lfm2":
        text.setdefault("block_dim", settings.hidden_size)
    if (interval := full_attention_interval(settings)) is not None:
        text["full_attention_interval"] = interval
    rope = text.get("rope_parameters") or {}
    if "rope_theta" in rope:
        text.setdefault("rope_theta", rope["rope_theta"])
        if rope.get("rope_type", "default") != "default":
            text.setdefault("rope_scaling", {key: value for key, value in rope.items() if key != "rope_theta"})


def full_attention_interval(config: PretrainedConfig) -> int | None:
    """Return n if each n-th layer has full attention and all others linear attention, as mlx-lm's Qwen3.5 computes (the
    number of layers + 1 if all are linear); None if no layer is linear. Raises ValueError for layers in another
    order."""
    kinds: list[str] = getattr(config, "layer_types", None) or []
    if "linear_attention" not in kinds:
        return None
    interval = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    if kinds != ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(len(kinds))]:
        raise ValueError(
            f"layout 'mlx': mlx-lm computes full attention in each n-th layer, not with layer_types {kinds}: set "
            "export.format to another one"
        )
    return interval


def mlx_module(kind: str, on_disk: str) -> str:
    """Return mlx-lm's name of the module that is called ``on_disk`` in a checkpoint of model type ``kind``."""
    if kind not in _COMPOSITE:
        return on_disk
    inner = on_disk.removeprefix("model.language_model.")
    return f"language_model.{on_disk}" if inner == on_disk else f"language_model.model.{inner}"
