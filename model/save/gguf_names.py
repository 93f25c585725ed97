"""Names, shapes and metadata of llama.cpp's architectures, and how its tensors differ from a checkpoint's."""

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

from model.save.plan import EXPERT

ROPE_FREQS = "rope_freqs.weight"  # computed by the converter from config.json (Llama 3, Gemma 4); copied


_SILU: dict[str, Any] = {"hidden_act": "silu"}
_GELU: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh"}


class Architecture(NamedTuple):
    """Form in which llama.cpp stores and computes a model type of transformers.

    Attributes:
        name: llama.cpp's name.
        norm_offset: number that llama.cpp's converter adds to the weights of norms.
        period: every ``period``-th layer attends to all positions, the others to a window; 0 without windows, None if
            the metadata has an entry for each layer.
        fixed: attributes of the configuration, each with the only value that llama.cpp supports.
        values: function of the configuration that returns expected metadata values, by the key without its prefix
            (``<name>.``), in addition to or in place of those in ``SAME_VALUES``.
        softcap: softcap of the logits that llama.cpp uses for a file without ``final_logit_softcapping``; 0 is none.
    """

    name: str
    norm_offset: float = 0.0
    period: int | None = 0
    fixed: Mapping[str, Any] = _SILU
    values: Callable[[PretrainedConfig], dict[str, Any]] = lambda config: {}
    softcap: float = 0.0


GEMMA4_SOFTCAP = 30.0  # of a file without final_logit_softcapping


def _gemma4(config: PretrainedConfig) -> dict[str, Any]:
    """Return metadata of Gemma 4: layers that attend to all positions have heads of another size and number."""
    layers = [config.per_layer_config[index] for index in range(config.num_hidden_layers)]
    heads = dict(zip(config.layer_types, (layer.head_dim for layer in layers), strict=True))
    sizes = {"": heads["full_attention"], "_swa": heads.get("sliding_attention")}
    wide = config.num_hidden_layers - config.num_kv_shared_layers if config.use_double_wide_mlp else len(layers)
    return {
        **{f"attention.{part}_length{end}": size for end, size in sizes.items() for part in ("key", "value")},
        **{f"rope.dimension_count{end}": size for end, size in sizes.items()},
        "attention.head_count_kv": [layer.num_key_value_heads for layer in layers],
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "expert_used_count": config.top_k_experts,
        "feed_forward_length": [config.intermediate_size * (1 + (index >= wide)) for index in range(len(layers))],
    }


def _interval(layers: list[str]) -> int:
    """Return the number, from 1, of the first layer with full attention; the number of layers + 1 if none has it."""
    return [*layers, "full_attention"].index("full_attention") + 1


def _qwen3_5(config: PretrainedConfig) -> dict[str, Any]:
    """Return metadata of Qwen3.5: sizes of its linear attention, and the number of rotary dimensions of a head."""
    return {
        "full_attention_interval": _interval(config.layer_types),
        "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
    }


def _lfm2(config: PretrainedConfig) -> dict[str, Any]:
    """Return metadata of LFM2 or its MoE: convolution layers have 0 key heads."""
    values = {
        "attention.head_count_kv": [config.num_key_value_heads * (kind != "conv") for kind in config.layer_types],
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "shortconv.l_cache": config.conv_L_cache,
    }
    if config.model_type == "lfm2_moe":
        return values | {"leading_dense_block_count": config.num_dense_layers, "expert_gating_func": 2}  # the sigmoid
    size, factor, multiple = config.intermediate_size, config.block_ffn_dim_multiplier, config.block_multiple_of
    if config.block_auto_adjust_ff_dim:
        size = int(2 * size / 3)
        size = size if factor is None else -(-int(factor * size) // multiple) * multiple
    return values | {"feed_forward_length": size}


_QWEN3_MOE = {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}
_LFM2_MOE = {"conv_bias": False, "norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1}
# By the model_type of config.json. For other types llama.cpp's converter changes further values.
ARCHITECTURES = {
    "llama": Architecture("llama"),
    "mistral": Architecture("llama"),
    "mixtral": Architecture("llama"),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture("qwen3moe", fixed=_SILU | _QWEN3_MOE),
    "gpt_oss": Architecture("gpt-oss", period=2),
    "gemma3_text": Architecture("gemma3", 1.0, 6, _GELU),
    "gemma4_text": Architecture("gemma4", 0.0, None, _GELU | {"attention_bias": False}, _gemma4, GEMMA4_SOFTCAP),
    "qwen3_5_text": Architecture("qwen35", 1.0, values=_qwen3_5),
    "qwen3_5_moe_text": Architecture("qwen35moe", 1.0, values=_qwen3_5),
    "lfm2": Architecture("lfm2", fixed={"conv_bias": False}, values=_lfm2),
    "lfm2_moe": Architecture("lfm2moe", fixed=_LFM2_MOE, values=_lfm2),
}

# Models with towers, whose text model is in ``ARCHITECTURES``. llama.cpp has their towers in a separate file (mmproj).
COMPOSITE = ("gemma3", "gemma4", "qwen3_5", "qwen3_5_moe")

# Parts of names that differ from those in llama.cpp's table of names.
_SPELLED = {
    ".linear_attn.dt.bias": ".linear_attn.dt_proj.bias",
    ".expert.bias": ".expert_bias.bias",
    ".router.scale": ".router.proj.scale",
    ".router.per_expert_scale": ".experts.down_proj.scale",
    ".sinks": ".sinks.weight",
}

# Values that template and config.json both have: the end of llama.cpp's key, and the attribute of transformers' config.
SAME_VALUES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "vocab_size": "vocab_size",
}
_SOFTCAP = "final_logit_softcapping"
WINDOW_VALUES = {"attention.sliding_window": "sliding_window", _SOFTCAP: _SOFTCAP}


class GGUFPlace(NamedTuple):
    """Location in a GGUF file of a tensor of a checkpoint.

    Attributes:
        name: llama.cpp's name of the tensor; None if llama.cpp has no such tensor.
        expert: index among the parts of all experts: ``per_expert * <expert> + <part>``; None outside of experts.
        per_expert: number of parts of each expert: 2 (gate, then up) if both are one matrix in the file, else 1.
        offset: number that the file adds to the checkpoint's values.
        rows: function of the number of rows that returns the index in the checkpoint of each row of the file; None if
            they are in the same order.
        columns: sizes ``(n, m)`` if the columns are ``n * m`` equal parts, ordered as a matrix [n, m] in the
            checkpoint, and as [m, n] in the file; None if they are in the same order.
        negative: True if the file stores ``-exp(values)``.
    """

    name: str | None
    expert: int | None = None
    per_expert: int = 1
    offset: float = 0.0
    rows: Callable[[int], Tensor] | None = None
    columns: tuple[int, int] | None = None
    negative: bool = False

    def to_file(self, tensor: Tensor) -> Tensor:
        """Convert a tensor of the checkpoint, or the bytes of its quantized blocks, to the file's order and values."""
        if self.rows is not None:
            tensor = tensor[self.rows(len(tensor))]
        if self.columns is not None:
            tensor = tensor.unflatten(1, (*self.columns, -1)).transpose(1, 2).flatten(1)
        if self.negative:
            tensor = -tensor.float().exp()
        return tensor.float() + self.offset if self.offset else tensor

    def part_of(self, data: Any) -> Any:
        """Return the part of ``data``, the array of a whole tensor in the file, at this place: ``[out, in]`` of one
        expert's part, or all of ``data`` outside of experts."""
        if self.expert is None:
            return data
        return data.reshape(len(data) * self.per_expert, -1, data.shape[-1])[self.expert]

    def to_checkpoint(self, values: Tensor) -> Tensor:
        """Convert values of a GGUF file to the checkpoint's: restore the order of columns, subtract ``offset``, and
        take ``log(-x)`` if ``negative``. The rows must already be in the checkpoint's order."""
        if self.columns is not None:
            values = values.unflatten(1, (*reversed(self.columns), -1)).transpose(1, 2).flatten(1)
        if self.negative:
            values = (-values.float()).log()
        return values.float() - self.offset if self.offset else values


class GGUFNames:
    """Mapping from the keys of a checkpoint to tensors of a GGUF file.

    Args:
        config: configuration of the model.
        architecture: llama.cpp's name of the architecture, as in a file to read. None, for a file to write, takes it
            from ``config``.

    Raises:
        ValueError: ``architecture`` is None, and llama.cpp does not compute the model as ``config`` says
            (:func:`architecture_of`); or the package ``gguf`` is missing.
    """

    def __init__(self, config: PretrainedConfig, architecture: str | None = None) -> None:
        self._architecture = architecture or architecture_of(config).name
        self._config, gguf = config.get_text_config(), gguf_package()
        config = self._config
        self._norm_offset = ARCHITECTURES[config.model_type].norm_offset
        number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == self._architecture)
        self._names = gguf.get_tensor_name_map(number, config.num_hidden_layers)

    def places(self, key: str) -> list[GGUFPlace]:
        """Return the locations of the tensor ``key`` of a checkpoint: usually one, and two for gate_up_proj of gpt-oss,
        whose rows (of a bias [E, 2 n]: columns) alternate between gate and up, two tensors in the file. A location has
        the name None if the file has no such tensor."""
        key = re.sub(r"(^|\.)language_model\.", r"\1", key)
        if re.search(r"\d\.experts\.\d+\.\w+\.scale$", key):
            return [GGUFPlace(None)]  # of NVFP4 in Gemma 4, where another scale has this name
        expert = EXPERT.search(key)
        stem = re.sub("_bias$", ".bias", EXPERT.sub(".experts.", key))  # gpt-oss has one tensor for all experts' biases
        for own, theirs in _SPELLED.items():
            stem = stem.replace(own, theirs)
        if ".feed_forward.experts.w" in stem:
            stem = stem.removeprefix("model.")
        pair = ".experts.gate_up_proj" in stem
        if half := re.search(r"\d\.experts\.(gate|up)_proj\.weight$", stem):  # one matrix in Gemma 4
            stem = stem.replace(f"{half[1]}_proj", "gate_up_proj")
        stems = [stem.replace("gate_up_proj", f"{part}_proj") for part in ("gate", "up")] if pair else [stem]
        names = [self._names.get_name(stem, try_suffixes=(".weight", ".bias", ".scale")) for stem in stems]
        if stem.endswith(".layer_scalar"):
            names = [f"{names[0]}.weight"]
        norms = [bool(name) and re.search(r"(?<!ssm)_norm\.weight$", name) is not None for name in names]
        place = self._order(key)._replace(expert=int(expert[1]) if expert else None)
        if place.expert is not None and half:
            place = place._replace(expert=2 * place.expert + (half[1] == "up"), per_expert=2)
        offsets = [self._norm_offset * norm for norm in norms]
        return [place._replace(name=name, offset=offset) for name, offset in zip(names, offsets, strict=True)]

    def _order(self, key: str) -> GGUFPlace:
        """Return a place without a name that has ``rows``, ``columns`` and ``negative`` of the tensor ``key``."""
        config, end = self._config, re.search(r"\.(q|k)_proj\.(weight|bias)$", key)
        if self._architecture == "llama" and end is not None:
            heads = config.num_attention_heads if end[1] == "q" else config.num_key_value_heads
            return GGUFPlace(None, rows=functools.partial(_interleaved, heads))
        _, linear, leaf = key.partition(".linear_attn.")
        if not linear or leaf.endswith(("norm.weight", ".scale")):
            return GGUFPlace(None)
        keys = config.linear_num_key_heads
        shape = (keys, config.linear_num_value_heads // keys)  # heads of values by the head of keys that they share
        if leaf == "out_proj.weight":
            return GGUFPlace(None, columns=shape)
        kept = 2 * keys * config.linear_key_head_dim if leaf in ("in_proj_qkv.weight", "conv1d.weight") else 0
        return GGUFPlace(None, rows=functools.partial(_transposed, shape, kept), negative=leaf == "A_log")


def _interleaved(heads: int, rows: int) -> Tensor:
    """Return the order of the rows of q or k in llama.cpp's Llama, which interleaves both halves of each head."""
    return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).flatten()


def _transposed(shape: tuple[int, int], kept: int, rows: int) -> Tensor:
    """Return an order of rows: the first ``kept`` unchanged, then those of a matrix ``shape`` of heads, transposed."""
    heads = torch.arange(kept, rows).view(*shape, -1).transpose(0, 1).flatten()
    return torch.cat([torch.arange(kept), heads])


def in_file(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without dimensions of size 1, for comparisons: convolution kernels [C, 1, K] are [C, K] in a GGUF
    file, and the gate [1, H] of a shared expert is [H] or [1, H]. A shape of a single element becomes (1,)."""
    return tuple(size for size in shape if size != 1) or (1,)


def split(tensor: Tensor, key: str, count: int) -> list[Tensor]:
    """Split the tensor ``key`` of a checkpoint into ``count`` tensors, one for each of its places in a file: every
    ``count``-th row (of experts' biases: column), or ``count`` times the tensor itself if it has one element."""
    if tensor.shape == (1,) or count == 1:  # a scale of both
        return [tensor] * count
    dim = int(key.endswith("_bias"))
    parts = tensor.unflatten(dim, (-1, count)).unbind(dim + 1)
    return [part.contiguous() for part in parts]


def architecture_of(config: PretrainedConfig) -> Architecture:
    """Return llama.cpp's architecture for a model's configuration. Raises ValueError if the model type is not
    supported, or if llama.cpp would compute the model differently."""
    known = [*ARCHITECTURES, *COMPOSITE]
    if config.model_type not in known:
        raise ValueError(
            f"layout 'gguf' supports models of type {', '.join(known)}, got {config.model_type}: set "
            "export.format to dequantized, and convert that checkpoint with llama.cpp's convert_hf_to_gguf.py"
        )
    config = config.get_text_config()
    architecture = ARCHITECTURES[config.model_type]
    problems = []
    for attribute, value in architecture.fixed.items():
        if (found := getattr(config, attribute, value)) != value:
            problems.append(f"{attribute} is {found!r}, expected {value!r}")
    period, usual = architecture.period, "sliding_attention" if getattr(config, "sliding_window", None) else ""
    layers = getattr(config, "layer_types", None) or [usual] * config.num_hidden_layers
    sliding = [(layer + 1) % period != 0 if period else False for layer in range(len(layers))]
    if period is not None and [kind == "sliding_attention" for kind in layers] != sliding:
        problems.append(
            "it has sliding attention" if not period else f"not every {period}th layer alone attends to all positions"
        )
    if config.model_type in ("qwen3_5_text", "qwen3_5_moe_text"):
        interval = _interval(layers)
        if layers != [f"{'linear' if at % interval else 'full'}_attention" for at in range(1, len(layers) + 1)]:
            problems.append("not every nth layer alone attends to all positions")
        if config.linear_key_head_dim != config.linear_value_head_dim:
            problems.append("linear_key_head_dim and linear_value_head_dim differ")
    if config.model_type == "gemma4_text" and config.use_bidirectional_attention == "all":
        problems.append("use_bidirectional_attention is 'all'")
    if config.model_type == "gemma3_text":
        # Only the model of 27B, known by its 62 layers, scales by the mean size of heads.
        mean = config.hidden_size // config.num_attention_heads
        scalar = mean if config.num_hidden_layers == 62 else config.head_dim
        if config.query_pre_attn_scalar != scalar:
            problems.append(f"query_pre_attn_scalar is {config.query_pre_attn_scalar}, expected {scalar}")
        if config.attn_logit_softcapping is not None or config.use_bidirectional_attention:
            problems.append("attn_logit_softcapping or use_bidirectional_attention is set")
    if problems:
        raise ValueError(
            f"llama.cpp computes this {config.model_type} differently: {'; '.join(problems)}; set export.format to "
            "another one"
        )
    return architecture


def other_values(value_of: Callable[[str], Any], config: PretrainedConfig) -> Iterator[str]:
    """Yield a sentence for each value in a GGUF file's metadata that differs from ``config``, the text model's
    configuration. Missing values are accepted, except a softcap if llama.cpp's default is not the model's.
    ``value_of`` returns a metadata value by its key, None if it is missing."""
    architecture = ARCHITECTURES[config.model_type]
    own = architecture.values(config)
    if hasattr(config, _SOFTCAP):
        own[_SOFTCAP] = getattr(config, _SOFTCAP) or 0.0
        if value_of(key := f"{architecture.name}.{_SOFTCAP}") is None and not same(architecture.softcap, own[_SOFTCAP]):
            yield f"{key} is missing, which is {architecture.softcap} in llama.cpp, expected {own[_SOFTCAP]}"
    for end, attribute in (SAME_VALUES | WINDOW_VALUES | dict.fromkeys(own, "")).items():
        found = value_of(key := f"{architecture.name}.{end}")
        expected = own[end] if end in own else getattr(config, attribute, None)
        if found is not None and expected is not None and not same(found, expected):
            yield f"{key} is {found}, expected {expected}{f' ({attribute})' * bool(attribute)}"


def rope_factors(config: PretrainedConfig) -> Tensor | None:
    """Return the divisors of RoPE's frequencies, fp64 ``[head_dim / 2]``, that llama.cpp's converter computes from
    ``config``, the text model's configuration (Llama 3, Gemma 4); None if a file has none."""
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    if rope.get("rope_type") == "llama3":
        powers = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** -powers / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return 1 / ((1 - smooth) / rope["factor"] + smooth)
    if rope.get("rope_type") == "proportional":
        size = next(
            config.per_layer_config[index].head_dim
            for index, kind in enumerate(config.layer_types)
            if kind == "full_attention"
        )
        turned = int(size * rope.get("partial_rotary_factor", 1.0) / 2)
        factors = torch.full((size // 2,), 1e30, dtype=torch.float64)  # the others do not turn
        factors[:turned] = 1
        return factors
    return None


def same(found: Any, expected: float | list[int]) -> bool:
    """Return True if the metadata value ``found`` equals the number ``expected`` up to fp32 rounding; False for NaN and
    strings. If ``expected`` is a list with a value per layer, ``found`` must be the same list, or the single value of
    all layers."""
    if isinstance(expected, list):
        return (found if isinstance(found, list) else [found] * len(expected)) == expected
    return isinstance(found, int | float) and abs(found - expected) <= 1e-6 * abs(expected)


def gguf_package() -> Any:
    """Import the package ``gguf``. Raises ValueError, with the command that installs it, if it is missing."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError(f"layout 'gguf' needs the package gguf ({error}): pip install -e '.[gguf]'") from None
    return gguf
