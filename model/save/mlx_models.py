"""Write what mlx-lm needs of a model beside its codes and scales: the names of its modules, and entries of config.json.

Files keep the names of the source, which mlx-lm's classes translate, except those of experts: a layer's experts are one
tensor in MLX.
"""

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from model.checkpoint.names import module_name_on_disk
from model.save.plan import mlx_place
from quant import Quantization
from quant.formats.mlx import mlx_config
from quant.linear import linears_of

# Types that mlx-lm reads as another one, in which the text model is a part of a composite model.
_COMPOSITE = {
    "qwen3_5_text": "qwen3_5",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5_moe": "qwen3_5_moe",
    "gemma4": "gemma4",
}


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
