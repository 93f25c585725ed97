"""Plan and write a GGUF file for llama.cpp, tensor by tensor.

llama.cpp uses its own names and stores all experts of a layer in one tensor. For Llama it interleaves the rows of the
two halves of each head of q and k, for its RoPE. Norms, biases and routers are fp32; other unquantized tensors keep the
model's dtype. Every tensor of the plan has its own offset, so no tensors are collected in memory.

Metadata and vocabulary come from a template, a file that llama.cpp's own converter wrote for the base model. Its list
of tensors is compared with the plan, so that missing and foreign tensors are detected.
"""

import functools
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from model.checkpoint.safetensors import AGAIN
from model.ranks import listed
from model.save.plan import EXPERT, Item
from model.save.shard_writer import ShardWriter
from quant import QuantLayer
from quant.formats.gguf import BLOCK, BYTES, block_type

GGUF_FILE = "model.gguf"
_PLAIN = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


class Architecture(NamedTuple):
    """How llama.cpp stores and computes a model type of transformers.

    Attributes:
        name: llama.cpp's name.
        norm_offset: number that its converter adds to the weights of norms.
        period: every ``period``-th layer attends to all positions, the others to a window; 0 without windows, None if
            the metadata says it of each layer.
        activation: attribute of the configuration and value of the activation function.
        values: function of the configuration that returns metadata by the end of its key, where it differs from
            ``SAME_VALUES``.
    """

    name: str
    norm_offset: float = 0.0
    period: int | None = 0
    activation: tuple[str, str] = ("hidden_act", "silu")
    values: Callable[[PretrainedConfig], dict[str, Any]] = lambda config: {}


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
        "feed_forward_length": [config.intermediate_size * (1 + (index >= wide)) for index in range(len(layers))],
    }


def _lfm2(config: PretrainedConfig) -> dict[str, Any]:
    """Return metadata of LFM2: layers of convolutions have no heads of keys."""
    size, factor, multiple = config.intermediate_size, config.block_ffn_dim_multiplier, config.block_multiple_of
    if config.block_auto_adjust_ff_dim:
        size = int(2 * size / 3)
        size = size if factor is None else -(-int(factor * size) // multiple) * multiple
    return {
        "attention.head_count_kv": [config.num_key_value_heads * (kind != "conv") for kind in config.layer_types],
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "feed_forward_length": size,
        "shortconv.l_cache": config.conv_L_cache,
    }


# By the model_type of config.json. For other types llama.cpp's converter changes further values.
ARCHITECTURES = {
    "llama": Architecture("llama"),
    "mistral": Architecture("llama"),
    "mixtral": Architecture("llama"),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture("qwen3moe"),
    "gpt_oss": Architecture("gpt-oss", period=2),
    "gemma3_text": Architecture("gemma3", 1.0, 6, ("hidden_activation", "gelu_pytorch_tanh")),
    "gemma4_text": Architecture("gemma4", 0.0, None, ("hidden_activation", "gelu_pytorch_tanh"), _gemma4),
    "lfm2": Architecture("lfm2", values=_lfm2),
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
    "vocab_size": "vocab_size",
}
WINDOW_VALUES = {"attention.sliding_window": "sliding_window", "final_logit_softcapping": "final_logit_softcapping"}
# Entries that are written new, or that describe the template's own weights.
_NOT_COPIED = (
    "GGUF.",
    "general.architecture",
    "general.file_type",
    "general.quantization_version",
    "split.",
    "quantize.",
)
# llama.cpp's values of entries about positions that a file lacks.
_POSITIONS = {
    "rope.freq_base": 10000.0,
    "rope.freq_base_swa": 10000.0,
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
ROPE_FREQS = "rope_freqs.weight"  # computed by the converter from config.json (Llama 3); copied


class GGUFPlace(NamedTuple):
    """Location in a GGUF file of a tensor of a checkpoint.

    Attributes:
        name: llama.cpp's name of the tensor; None if it has none.
        expert: index of the expert; None outside of experts.
        heads: number of heads whose rows are interleaved in the file; 0 if rows are ordered as in transformers.
        offset: number that is added to its values in the file.
    """

    name: str | None
    expert: int | None = None
    heads: int = 0
    offset: float = 0.0


class GGUFNames:
    """Map keys of a checkpoint to tensors of a GGUF file.

    Args:
        config: configuration of the model.
        architecture: llama.cpp's name of its architecture; None if a file is to be written, which raises ValueError if
            that is not supported.
    """

    def __init__(self, config: PretrainedConfig, architecture: str | None = None) -> None:
        self._config, gguf = config, gguf_package()
        self._architecture = architecture or _architecture_of(config).name
        self._norm_offset = ARCHITECTURES[config.model_type].norm_offset
        number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == self._architecture)
        self._names = gguf.get_tensor_name_map(number, config.num_hidden_layers)

    def places(self, key: str) -> list[GGUFPlace]:
        """Return the location of a tensor: two if its rows (in biases of experts, its columns) are in two tensors by
        turns, as those of gate and up in gpt-oss."""
        expert = EXPERT.search(key)
        stem = re.sub("_bias$", ".bias", EXPERT.sub(".experts.", key))  # gpt-oss has one tensor for all experts' biases
        if stem.endswith(".sinks"):
            stem += ".weight"
        pair = ".experts.gate_up_proj" in stem
        stems = [stem.replace("gate_up_proj", f"{part}_proj") for part in ("gate", "up")] if pair else [stem]
        names = [self._names.get_name(stem, try_suffixes=(".weight", ".bias")) for stem in stems]
        if stem.endswith(".layer_scalar"):
            names = [f"{names[0]}.weight"]
        index, heads = int(expert[1]) if expert else None, self._heads(key)
        added = [self._norm_offset if name and name.endswith("_norm.weight") else 0.0 for name in names]
        return [GGUFPlace(name, index, heads, offset) for name, offset in zip(names, added, strict=True)]

    def _heads(self, key: str) -> int:
        """Return the number of heads whose rows are interleaved."""
        end = re.search(r"\.(q|k)_proj\.(weight|bias)$", key)
        if self._architecture != "llama" or end is None:
            return 0
        heads: int = self._config.num_attention_heads if end[1] == "q" else self._config.num_key_value_heads
        return heads


def in_file(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape in a file of a tensor of a checkpoint: the kernels [C, 1, K] of a convolution are [C, K]."""
    return (shape[0], shape[2]) if len(shape) == 3 and shape[1] == 1 else tuple(shape)


def split(tensor: Tensor, key: str, count: int) -> list[Tensor]:
    """Split the tensor ``key`` of a checkpoint into what each of its ``count`` places in a file holds."""
    dim = int(key.endswith("_bias"))
    parts = tensor.unflatten(dim, (-1, count)).unbind(dim + 1)
    return [part.contiguous() for part in parts]


@dataclass
class GGUFTensor:
    """Tensor of the file.

    Attributes:
        kind: ggml's name of its type.
        dtype, stored: dtype and shape in the file, without the dimension of experts; blocks are bytes.
        heads: number of heads whose rows are interleaved; 0 if rows are ordered as in transformers.
        offset: number that is added to its values.
        parts: keys of the plan's tensors in it, by expert index; a tensor without experts has the index 0.
    """

    kind: str
    dtype: torch.dtype
    stored: tuple[int, ...]
    heads: int = 0
    offset: float = 0.0
    parts: dict[int, str] = field(default_factory=dict)

    @property
    def stack(self) -> tuple[int, ...]:
        """Number of experts; empty without experts."""
        return (len(self.parts),) if any(EXPERT.search(key) for key in self.parts.values()) else ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the elements, slowest dimension first."""
        columns = self.stored[-1]
        columns = columns // BYTES[self.kind] * BLOCK if self.kind in BYTES else columns
        return (*self.stack, *self.stored[:-1], columns)

    @property
    def part_bytes(self) -> int:
        """Number of bytes of one expert, or of a tensor without experts."""
        return math.prod(self.stored) * self.dtype.itemsize


@dataclass
class GGUFPlan:
    """Contents of a GGUF file.

    Attributes:
        architecture: llama.cpp's name of the model's architecture.
        tensors: tensors by name, in the order of the file.
        template: the template, a ``gguf.GGUFReader``.
        rope_freqs: the template's RoPE frequency factors, fp32; None without them.
    """

    architecture: str
    tensors: dict[str, GGUFTensor]
    template: Any
    rope_freqs: Tensor | None


def interleaved(tensor: Tensor, heads: int) -> Tensor:
    """Interleave both halves of each head in rows ``[heads * 2 * half, ...]``, as in q and k of llama.cpp's Llama."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def plan_gguf(model: PreTrainedModel, items: Iterable[Item], template: Path | None) -> GGUFPlan:
    """Map every tensor of a plan to a GGUF file.

    Args:
        model: determines the architecture.
        items: items of the plan.
        template: a GGUF file of the base model.

    Raises:
        ValueError: there is no template, or it is a template of another model; or there are tensors that a GGUF file
            cannot have, or that only the template has. The message names each of them.
    """
    architecture = _architecture_of(model.config).name
    if template is None:
        raise ValueError(
            "layout 'gguf' needs a template (export.template, --template) for metadata and vocabulary: a GGUF file of "
            "the base model, made with llama.cpp's convert_hf_to_gguf.py"
        )
    reader = open_gguf(template)
    _check_template(reader, template, model.config)
    tensors = _tensors(model, items, architecture)
    factors = next((torch.from_numpy(one.data.copy()) for one in reader.tensors if one.name == ROPE_FREQS), None)
    if factors is not None:
        tensors[ROPE_FREQS] = GGUFTensor("F32", torch.float32, tuple(factors.shape), parts={0: ROPE_FREQS})
    plan = GGUFPlan(architecture, tensors, reader, factors)
    _check_tensors(plan, template, tied=bool(getattr(model.config, "tie_word_embeddings", False)))
    return plan


def _tensors(model: PreTrainedModel, items: Iterable[Item], architecture: str) -> dict[str, GGUFTensor]:
    """Plan the tensors by name."""
    names = GGUFNames(model.config)
    found: dict[str, GGUFTensor] = {}
    nowhere = []
    for item in items:
        for key, (dtype, whole) in item.shapes.items():
            places = names.places(key)
            shape = in_file(split(torch.empty(whole, device="meta"), key, len(places))[0].shape)
            for name, expert, heads, offset in places:
                if name is None or item.copied is not None or item.fused:
                    nowhere.append(key)
                    continue
                kind, index = _kind(item, name, key, dtype, shape), expert or 0
                own = GGUFTensor(kind, torch.float32 if kind == "F32" else dtype, shape, heads, offset)
                tensor = found.setdefault(name, own)
                if (tensor.kind, tensor.stored) != (kind, shape):
                    raise ValueError(
                        f"{key} is {kind} {list(own.shape)}, but other experts of {name} are {tensor.kind} "
                        f"{list(tensor.shape)}: llama.cpp has all experts of a layer in one tensor; give them one "
                        "scheme"
                    )
                if index in tensor.parts:
                    raise ValueError(
                        f"{key} and {tensor.parts[index]} have the same name {name} in llama.cpp: set export.format to "
                        "another one"
                    )
                tensor.parts[index] = key
    if nowhere:
        raise ValueError(
            f"a GGUF file of architecture {architecture} cannot store {listed(nowhere, 6)}: set export.format to "
            "dequantized"
        )
    return found


def _kind(item: Item, name: str, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Return ggml's type of a tensor of the plan."""
    if item.layout == "gguf" and key.endswith(".weight"):
        assert isinstance(item.module, QuantLayer)
        return block_type(item.module.scheme)
    # llama.cpp computes with these in fp32, and asserts their type.
    if len(shape) == 1 or name.endswith((".bias", "_norm.weight", "ffn_gate_inp.weight", "shortconv.conv.weight")):
        return "F32"
    return _PLAIN[dtype]


def _check_tensors(plan: GGUFPlan, path: Path, *, tied: bool) -> None:
    """Raise ValueError unless a file has all tensors of its template, of the same shapes, and no others."""
    expected = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in plan.template.tensors}
    if tied and "output.weight" not in plan.tensors:
        expected.pop("output.weight", None)  # copy of the embeddings, which llama.cpp uses if it is absent
    found = {name: tensor.shape for name, tensor in plan.tensors.items()}
    problems = []
    if missing := sorted(expected.keys() - found.keys()):
        problems.append(f"the model lacks {listed(missing, 6)}")
    if more := sorted(found.keys() - expected.keys()):
        problems.append(f"the template lacks {listed(more, 6)}")
    problems += [
        f"{name} is {list(expected[name])}, but {list(shape)} in the model"
        for name, shape in found.items()
        if name in expected and shape != expected[name]
    ]
    for name, tensor in plan.tensors.items():
        if sorted(tensor.parts) != list(range(len(tensor.parts))):
            problems.append(f"{name} lacks experts")
    if problems:
        raise ValueError(f"{path} is the template of another model: {listed(problems, 4)}")


class GGUFWriter(ShardWriter):
    """Writer of one GGUF file, tensor by tensor, with the errors of :class:`ShardWriter`."""

    def __init__(self, path: Path, plan: GGUFPlan) -> None:
        self._places: dict[str, list[tuple[str, GGUFTensor]]] = {}
        for name, tensor in plan.tensors.items():
            for index, key in tensor.parts.items():
                self._places.setdefault(key, []).append((_part(name, index), tensor))
        shapes = {part: (tensor.dtype, tensor.stored) for places in self._places.values() for part, tensor in places}
        header, begin, size = _head(path.with_name(f"{path.name}.head"), plan)
        super().__init__(path, shapes, (header, begin))
        try:
            os.truncate(path, size)  # the zeros after the last tensor
            if plan.rope_freqs is not None:
                self.write(ROPE_FREQS, plan.rope_freqs)
        except BaseException:
            self.close()  # the caller has no object to close
            raise

    def write(self, key: str, tensor: Tensor) -> None:
        """Write a tensor of the plan in its dtype and row order in the file."""
        places = self._places[key]
        for (part, planned), values in zip(places, split(tensor, key, len(places)), strict=True):
            ordered = interleaved(values, planned.heads) if planned.heads else values
            ordered = ordered.to(planned.dtype).reshape(planned.stored)
            super().write(part, (ordered + planned.offset if planned.offset else ordered).contiguous())


def _part(name: str, index: int) -> str:
    """Return the name of an expert's part of a tensor in messages."""
    return f"{name}[{index}]"


def _head(scratch: Path, plan: GGUFPlan) -> tuple[bytes, dict[str, int], int]:
    """Build the first bytes of the file (header and metadata), the offset of each tensor or expert's part, and the file
    size. ``scratch`` is a temporary file, which is removed."""
    gguf = gguf_package()
    writer = gguf.GGUFWriter(scratch, plan.architecture)
    _copy_metadata(plan.template, writer)
    file_types = {
        "Q4_0": "MOSTLY_Q4_0",
        "Q8_0": "MOSTLY_Q8_0",
        "MXFP4": "MOSTLY_MXFP4_MOE",
        "BF16": "MOSTLY_BF16",
        "F16": "MOSTLY_F16",
    }
    kinds = Counter(tensor.kind for tensor in plan.tensors.values() if tensor.kind in file_types)
    usual = [file_types[kind] for kind, _ in kinds.most_common(1)] or ["ALL_F32"]
    writer.add_file_type(gguf.LlamaFileType[usual[0]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    begin: dict[str, int] = {}
    end = 0
    for name, tensor in plan.tensors.items():
        whole = tensor.part_bytes * len(tensor.parts)
        # Blocks are described by their bytes; for other types the dtype is ignored.
        described = np.uint8 if tensor.dtype == torch.uint8 else np.float32
        kind = gguf.GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(name, (*tensor.stack, *tensor.stored), described, whole, kind)
        begin |= {_part(name, index): end + index * tensor.part_bytes for index in tensor.parts}
        end += gguf.GGUFWriter.ggml_pad(whole, writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    header = scratch.read_bytes()
    scratch.unlink()
    header += b"\0" * (-len(header) % writer.data_alignment)
    return header, {key: len(header) + offset for key, offset in begin.items()}, len(header) + end


def check_gguf_written(path: Path, plan: GGUFPlan) -> None:
    """Check with llama.cpp's own reader that a file has the planned tensors; raise ValueError if not."""
    reader = open_gguf(path)
    found = {t.name: (t.tensor_type.name, tuple(int(size) for size in reversed(t.shape))) for t in reader.tensors}
    planned = {name: (tensor.kind, tensor.shape) for name, tensor in plan.tensors.items()}
    if wrong := sorted(name for name in planned.keys() | found.keys() if planned.get(name) != found.get(name)):
        raise ValueError(f"{path}: these tensors are not as planned: {listed(wrong)}; export again")


def gguf_package() -> Any:
    """Import the package ``gguf``. Raises ValueError, with the command that installs it, if it is missing."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError(f"layout 'gguf' needs the package gguf ({error}): pip install -e '.[gguf]'") from None
    return gguf


def open_gguf(path: Path) -> Any:
    """Open a file as a ``gguf.GGUFReader``. Raises ValueError if it does not exist or is not a GGUF file."""
    gguf = gguf_package()
    if not path.is_file():
        raise ValueError(
            f"the GGUF template {path} is not a file: make one of the base model with llama.cpp's convert_hf_to_gguf.py"
        )
    try:
        check_header(path)
        return gguf.GGUFReader(path)
    except Exception as error:  # any error of the reader about damaged bytes
        raise ValueError(f"{path} is not a GGUF file: {error}: {AGAIN}, or make it again") from error


def _value_of(template: Any, key: str) -> Any:
    """Return a metadata value of the template; None if the template lacks the key."""
    entry = template.fields.get(key)
    return None if entry is None else entry.contents()


def _architecture_of(config: PretrainedConfig) -> Architecture:
    """Return llama.cpp's architecture. Raises ValueError if llama.cpp computes it differently, or if it is not
    supported."""
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"layout 'gguf' supports models of type {', '.join(ARCHITECTURES)}, got {config.model_type}: set "
            "export.format to dequantized, and convert that checkpoint with llama.cpp's convert_hf_to_gguf.py"
        )
    architecture = ARCHITECTURES[config.model_type]
    problems = []
    attribute, activation = architecture.activation
    if (found := getattr(config, attribute, activation)) != activation:
        problems.append(f"{attribute} is {found!r}, expected {activation!r}")
    period, usual = architecture.period, "sliding_attention" if getattr(config, "sliding_window", None) else ""
    layers = getattr(config, "layer_types", None) or [usual] * config.num_hidden_layers
    sliding = [(layer + 1) % period != 0 if period else False for layer in range(len(layers))]
    if period is not None and [kind == "sliding_attention" for kind in layers] != sliding:
        problems.append(
            "it has sliding attention" if not period else f"not every {period}th layer alone attends to all positions"
        )
    if config.model_type == "qwen3_moe":
        if not config.norm_topk_prob:
            problems.append("norm_topk_prob is false, but llama.cpp normalizes the experts' weights to a sum of 1")
        if config.mlp_only_layers or config.decoder_sparse_step != 1:
            problems.append("some layers have no experts")
    if getattr(config, "conv_bias", False):
        problems.append("conv_bias is true, but llama.cpp reads no biases of convolutions")
    if config.model_type == "gemma4_text":
        wrong = {"enable_moe_block": True, "attention_bias": True, "use_bidirectional_attention": "all"}
        problems += [f"{name} is {value}" for name, value in wrong.items() if getattr(config, name) == value]
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


def _check_template(template: Any, path: Path, config: PretrainedConfig) -> None:
    """Raise ValueError if the template's metadata has another architecture, other sizes or another vocabulary."""
    architecture, found = _architecture_of(config).name, _value_of(template, "general.architecture")
    problems = []
    if found != architecture:
        problems.append(f"general.architecture is {found!r}, expected {architecture!r}")
    else:
        problems += other_values(functools.partial(_value_of, template), config)
        problems += _other_positions(template, architecture, config)
        tokens = template.fields.get("tokenizer.ggml.tokens")
        if tokens is None:
            problems.append("the template has no vocabulary (tokenizer.ggml.tokens)")
        elif len(tokens.data) != config.vocab_size:
            problems.append(f"the template's vocabulary has {len(tokens.data)} tokens, expected {config.vocab_size}")
    if problems:
        raise ValueError(f"{path} is the template of another model: {listed(problems, 8)}")


def other_values(value_of: Callable[[str], Any], config: PretrainedConfig) -> Iterator[str]:
    """Yield a problem for each size in a file's metadata that differs from the model's. ``value_of`` returns a metadata
    value by its key, None if it is missing."""
    architecture = ARCHITECTURES[config.model_type]
    own = architecture.values(config)
    for end, attribute in (SAME_VALUES | WINDOW_VALUES | dict.fromkeys(own, "")).items():
        found = value_of(key := f"{architecture.name}.{end}")
        expected = own[end] if end in own else getattr(config, attribute, None)
        if found is not None and expected is not None and not _same(found, expected):
            yield f"{key} is {found}, expected {expected}{f' ({attribute})' * bool(attribute)}"


def _same(found: Any, expected: float | list[int]) -> bool:
    """Return True if a value equals this number up to fp32 rounding; False for NaN and strings. Of a list by layers,
    return True if it is the same, or one value for all layers."""
    if isinstance(expected, list):
        return (found if isinstance(found, list) else [found] * len(expected)) == expected
    return isinstance(found, int | float) and abs(found - expected) <= 1e-6 * abs(expected)


def _other_positions(template: Any, architecture: str, config: PretrainedConfig) -> Iterator[str]:
    """Yield a problem for each difference between the template's and the model's positional encoding."""
    rope = config.rope_parameters
    local, rope = rope.get("sliding_attention"), rope.get("full_attention", rope)
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "llama3", "linear", "yarn", "proportional"):
        yield f"rope_type is {kind!r}, expected 'default', 'llama3', 'linear', 'yarn' or 'proportional'"
    if unknown := [name for name in ("attention_factor", "mscale", "mscale_all_dim") if rope.get(name) is not None]:
        yield f"rope_parameters has {', '.join(unknown)}, which llama.cpp computes differently"
    scaled = kind in ("linear", "yarn")
    expected = {
        "rope.freq_base": rope["rope_theta"],
        "rope.scaling.type": kind if scaled else "none",
        "rope.scaling.factor": rope["factor"] if scaled else 1.0,
    }
    if kind == "yarn":
        expected["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        for end in ("beta_fast", "beta_slow"):
            key = f"rope.scaling.yarn_{end}"
            expected[key] = rope.get(end) or _POSITIONS[key]
    if local is not None:
        expected["rope.freq_base_swa"] = local["rope_theta"]
        if local.get("rope_type", "default") != "default":
            yield f"rope_type of sliding attention is {local['rope_type']!r}, expected 'default'"
    for end, value in expected.items():
        found = _value_of(template, key := f"{architecture}.{end}")
        used = _POSITIONS.get(end) if found is None else found
        if not (used == value if isinstance(value, str) else _same(used, value)):
            yield f"{key} is {found}, expected {value}" if found is not None else f"it has no {key}, expected {value}"
    has_factors = any(tensor.name == ROPE_FREQS for tensor in template.tensors)
    if (kind in ("llama3", "proportional")) != has_factors:
        yield f"the template has {'' if has_factors else 'no '}{ROPE_FREQS}, but rope_type is {kind!r} in config.json"


def _copy_metadata(template: Any, writer: Any) -> None:
    """Copy the template's metadata to a ``gguf.GGUFWriter``, except entries about its own weights."""
    array = gguf_package().GGUFValueType.ARRAY
    for name, entry in template.fields.items():
        if not name.startswith(_NOT_COPIED):
            kind = entry.types[0]
            writer.add_key_value(name, entry.contents(), kind, entry.types[-1] if kind == array else None)


# Bytes of a metadata value by its type; 8 is a string, 9 an array.
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4  # GGML_MAX_DIMS


def check_header(path: Path) -> None:
    """Check that the header of a little-endian GGUF file fits into the file; else raise ValueError.

    The package gguf trusts the 64-bit counts and lengths of a header, so a file of 100 bytes could keep it busy for
    centuries. A header (ggml's docs/gguf.md) has a magic number, a version, and the counts of tensors and of metadata
    entries; then for each metadata entry a key, a type and a value, and for each tensor a name, its dimensions, a type
    and an offset.
    """
    size = path.stat().st_size
    with path.open("rb") as file:

        def skip(count: int) -> None:
            if count > size - file.tell():
                raise ValueError(f"its header announces {count:,} bytes after byte {file.tell():,} of {size:,}")
            file.seek(count, os.SEEK_CUR)

        def number(kind: str) -> int:
            width = struct.calcsize(kind)
            skip(width)
            file.seek(-width, os.SEEK_CUR)
            return int(struct.unpack(kind, file.read(width))[0])

        def skip_values(kind: int, count: int) -> None:
            if kind == _TEXT:
                for _ in range(count):
                    skip(number("<Q"))
            elif kind in _VALUE_BYTES:
                skip(_VALUE_BYTES[kind] * count)
            else:
                raise ValueError(f"a metadata value has the unknown type {kind}")

        if file.read(4) != b"GGUF" or number("<I") not in (2, 3):
            raise ValueError("it does not begin like a little-endian GGUF file of version 2 or 3")
        tensors, metadata = number("<Q"), number("<Q")
        for _ in range(metadata):
            skip_values(_TEXT, 1)
            kind = number("<I")
            inner, count = (number("<I"), number("<Q")) if kind == _ARRAY else (kind, 1)
            skip_values(inner, count)
        for _ in range(tensors):
            skip_values(_TEXT, 1)
            dimensions = number("<I")
            if dimensions > _MOST_DIMENSIONS:
                raise ValueError(f"a tensor has {dimensions} dimensions, expected at most {_MOST_DIMENSIONS}")
            skip(8 * dimensions + 4)
            if number("<Q") > size:
                raise ValueError("a tensor begins after the end of the file")
