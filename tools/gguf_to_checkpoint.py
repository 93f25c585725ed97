"""Convert a GGUF file of llama.cpp to a Hugging Face checkpoint, a slice of a tensor in memory at a time.

Configuration and tokenizer are rebuilt from the file's metadata. transformers' own reader ignores metadata that it has
no name for (scaling of RoPE, the size of heads), and splits text like GPT-2 if it has no rule for
``tokenizer.ggml.pre``. Here an entry that changes the model or the tokens and has no equivalent is an error, as is a
tensor that the model or the file lacks. Changes of llama.cpp's converter are undone: rows of q and k of Llama are
interleaved (:func:`model.save.gguf_file.interleaved`), norms of Gemma have 1 added, and the experts of a layer are one
tensor.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from model.build import build_model
from model.checkpoint.load import check_headers
from model.checkpoint.names import Names
from model.checkpoint.safetensors import AGAIN, INDEX, SINGLE, CheckpointError
from model.console import progress_bar
from model.ranks import RankError, listed
from model.save.aside import Aside
from model.save.finish import write_json
from model.save.gguf_file import (
    ARCHITECTURES,
    ROPE_FREQS,
    SAME_VALUES,
    WINDOW_VALUES,
    GGUFNames,
    GGUFPlace,
    gguf_package,
    open_gguf,
)
from model.save.shard_writer import ShardWriter

_CHUNK = 2**24  # fp32 values at a time: 64 MB, and some copies
_SHARD_BYTES = 5 * 10**9
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_VALUES = {end: name for end, name in SAME_VALUES.items() if "expert" not in end}
_VALUES |= {"context_length": "max_position_embeddings"}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_ROPE = {"rope.freq_base", *(f"rope.scaling.{end}" for end in ("type", "factor", "original_context_length"))}
_YARN = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
_FRACTIONS = {"attention.layer_norm_rms_epsilon", "final_logit_softcapping", "rope.freq_base", "rope.freq_base_swa"}
_FRACTIONS |= {"rope.scaling.factor", *_YARN}
# Attributes that are the size of a tensor, and its dimension; heads are counted.
_SIZES = (
    ("hidden_size", "token_embd.weight", 1),
    ("intermediate_size", "blk.0.ffn_gate.weight", 0),
    ("num_attention_heads", "blk.0.attn_q.weight", 0),
    ("num_key_value_heads", "blk.0.attn_k.weight", 0),
)
_NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "rope.scaling.attn_factor": 1.0}
_REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "rms_norm_eps", "max_position_embeddings")
_OPTIONAL = ("final_logit_softcapping",)

# Tokenizers of byte-level BPE by tokenizer.ggml.pre: the pattern that splits text (None: GPT-2's), the normalizer, True
# if a word of the vocabulary is not merged, True if llama.cpp begins a text with bos unless the file denies it.
_ENDING, _START = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SLASHES = _REST.replace(r"[\r\n]*", r"[\r\n/]*")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD, _NAME = f"{_START}{_UPPER}*{_LOWER}+", f"{_START}{_UPPER}+{_LOWER}*"
_DIGITS = "digits"
_QWEN2 = rf"{_ENDING}|{_START}\p{{L}}+|\p{{N}}|{_REST}"
_LLAMA3 = (rf"{_ENDING}|{_START}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}", None, True, True)
_PRE: dict[str, tuple[str | None, Any, bool, bool]] = {
    "gpt-2": (None, None, False, False),
    **dict.fromkeys(("smollm", "starcoder", "refact"), (_DIGITS, None, False, False)),
    "qwen2": (_QWEN2, normalizers.NFC, False, False),
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3"), _LLAMA3),
    "tekken": (rf"{_WORD}|{_NAME}|\p{{N}}|{_SLASHES}", None, True, True),
    "gpt-4o": (rf"{_WORD}{_ENDING}?|{_NAME}{_ENDING}?|\p{{N}}{{1,3}}|{_SLASHES}", None, False, False),
}
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # types of tokens
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_ENDS = ("eos", "eot", "eom")  # tokens that end an answer
_TOKENIZER = {f"{name}_token_id" for name in (*_NAMED, *_ENDS, "seperator", "separator", "mask", "cls")}
_TOKENIZER |= {"model", "pre", "tokens", "token_type", "token_type_count", "merges", "scores", "add_bos_token"}
_TOKENIZER |= {"add_eos_token", "add_space_prefix"}


@dataclass(frozen=True)
class _Family:
    """transformers' model of an architecture of llama.cpp.

    Attributes:
        model_type, class_name: transformers' names.
        values: attribute of the configuration by the end of a metadata key, beside those of every model; empty if
            ``derived`` reads this entry.
        derived: function of the file and of the other values that returns values without an entry.
    """

    model_type: str
    class_name: str
    values: Mapping[str, str] = field(default_factory=dict)
    derived: Callable[["_File", Mapping[str, Any]], dict[str, Any]] = lambda file, values: {}


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion.

    Attributes:
        model_type: transformers' name of the architecture.
        kinds: number of tensors by ggml's type.
        rounded: number of quantized tensors that the chosen dtype does not represent exactly.
        dtype: dtype of these tensors.
    """

    model_type: str
    kinds: Mapping[str, int]
    rounded: int
    dtype: torch.dtype

    def summary(self) -> str:
        """Describe it in one line."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        name = str(self.dtype).removeprefix("torch.")
        rounded = f"; {self.rounded} of them rounded to {name} (--dtype float32 keeps every value)" * bool(self.rounded)
        return f"{self.model_type}, tensors: {kinds}{rounded}"


class _File:
    """Opened GGUF file with checked tensors, and its metadata. Raises CheckpointError for a damaged file."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise CheckpointError(f"{path} is not a file, expected a GGUF file")
        reader = open_gguf(path)
        self.path, self.tensors = path, {tensor.name: tensor for tensor in reader.tensors}
        self.values: dict[str, Any] = {}
        for name, entry in reader.fields.items():
            try:
                self.values[name] = entry.contents()
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{path}: {name} is not UTF-8 ({error}): {AGAIN}") from error
        end = 0
        for tensor in sorted(self.tensors.values(), key=lambda tensor: tensor.data_offset):
            if tensor.data_offset < end or 0 in shape_of(tensor):
                self.refuse(f"{tensor.name} is empty or overlaps another tensor: {AGAIN}")
            end = tensor.data_offset + tensor.n_bytes
        self.architecture = str(self.values.get("general.architecture"))
        if self.values.get("split.count", 1) not in (0, 1):
            self.refuse("it is one file of several: merge them with llama.cpp's llama-gguf-split --merge")
        if (kind := self.values.get("general.type", "model")) != "model":
            self.refuse(f"general.type is {kind!r}, expected 'model'")
        if self.architecture not in _FAMILIES:
            known = ", ".join(name for name in _FAMILIES if " " not in name)
            self.refuse(f"general.architecture is {self.architecture!r}, expected one of {known}")
        routed = f"{self.architecture} experts"
        self.family = _FAMILIES[routed if routed in _FAMILIES and self.own("expert_count") else self.architecture]

    def refuse(self, problem: str) -> NoReturn:
        """Raise CheckpointError with the file's name."""
        raise CheckpointError(f"{self.path}: {problem}")

    def own(self, end: str, default: Any = None) -> Any:
        """Return a metadata value of the architecture."""
        return self.values.get(f"{self.architecture}.{end}", default)

    def number(self, end: str, default: float | None = None) -> Any:
        """Return a number of the architecture's metadata: a float if it is in ``_FRACTIONS``, else an integer. Raises
        CheckpointError unless it is positive."""
        value, fraction = self.own(end, default), end in _FRACTIONS
        if isinstance(value, bool) or not isinstance(value, int | float if fraction else int) or not 0 < value < 2**31:
            expected = "number" if fraction else "integer"
            self.refuse(f"{self.architecture}.{end} is {str(value)[:60]}, expected one positive {expected}")
        return float(value) if fraction else value

    def token(self, end: str, default: Any = None) -> Any:
        """Return a metadata value of the tokenizer."""
        return self.values.get(f"tokenizer.ggml.{end}", default)


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return a tensor's shape, slowest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def convert_gguf(source: Path, out: Path, *, dtype: torch.dtype = torch.bfloat16) -> Conversion:
    """Write the model of a GGUF file to ``out`` as a Hugging Face checkpoint.

    Args:
        source: the file.
        out: directory to create.
        dtype: dtype of quantized tensors in the checkpoint. Tensors in F32, F16 and BF16 keep theirs.

    Raises:
        RankError, ValueError, OSError: before tensors are written: the file is damaged, or its architecture, metadata,
            tokenizer or a tensor is not supported. While writing: a tensor has NaN or infinite values. The message
            names the file and the entry or tensor; nothing remains at ``out``.
    """
    file = _File(source)
    config = _config(file)
    tokenizer = _tokenizer(file)
    for name in ("bos", "eos", "padding"):
        setattr(config, f"{name.removesuffix('ding')}_token_id", file.token(f"{name}_token_id"))
    size = sum(int(tensor.n_elements) * _dtype(file, name, dtype).itemsize for name, tensor in file.tensors.items())
    with closing(Aside(out, size)) as aside:
        config.save_pretrained(aside.path)
        try:
            options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("meta")}
            empty = build_model(aside.path, {}, **options, experts="per_expert")
        except RankError as error:
            raise CheckpointError(f"{source}: {str(error).replace(str(aside.path), 'its metadata, as')}") from error
        planned = _plan(file, empty, GGUFNames(config, file.architecture), dtype)
        config.dtype = max(planned.values(), key=lambda one: math.prod(one.shape)).dtype
        config.save_pretrained(aside.path)
        tokenizer.save_pretrained(aside.path)
        ends = {file.token(f"{name}_token_id") for name in _ENDS} - {None}
        if ends:
            write_json({"eos_token_id": sorted(ends)}, aside.path / "generation_config.json")
        sizes = {key: math.prod(one.shape) * one.dtype.itemsize for key, one in planned.items()}
        ends_at = dict(zip(sizes, accumulate(sizes.values()), strict=True))
        shards = [list(keys) for _, keys in groupby(planned, lambda key: ends_at[key] // _SHARD_BYTES)]
        files = [SINGLE]
        if len(shards) > 1:
            files = [f"model-{index:05}-of-{len(shards):05}.safetensors" for index in range(1, len(shards) + 1)]
            weight_map = {key: name for name, shard in zip(files, shards, strict=True) for key in shard}
            write_json({"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}, aside.path / INDEX)
        rounded = set()
        with progress_bar(sum(sizes.values()), "convert", "B") as bar:
            for name, shard in zip(files, shards, strict=True):
                with closing(ShardWriter(aside.path / name, {key: planned[key][:2] for key in shard})) as writer:
                    for key in shard:
                        start = 0
                        for values in planned[key].values(file):
                            part = values.to(planned[key].dtype).contiguous()
                            if part.dtype != values.dtype and not torch.equal(part.to(values.dtype), values):
                                rounded |= planned[key].names()
                            writer.write_part(key, start, part.view(-1))
                            start += part.numel()
                            bar.update(part.nbytes)
                    writer.finish()
        check_headers(empty, aside.path)
        aside.publish()
    kinds = Counter(tensor.tensor_type.name for tensor in file.tensors.values())
    return Conversion(config.model_type, dict(kinds.most_common()), len(rounded), dtype)


# ---- tensors


class _Planned(NamedTuple):
    """Tensor of the checkpoint.

    Attributes:
        dtype, shape: its dtype and shape.
        parts: its parts in their order: places in the file (two if these alternate) of one expert's Linear, or of the
            whole tensor.
        turned: True if the matrix of each part is transposed.
        dim: dimension along which two places alternate.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[list[GGUFPlace]]
    turned: bool = False
    dim: int = 0

    def names(self) -> set[str | None]:
        """Return the names of its tensors in the file."""
        return {place.name for places in self.parts for place in places}

    def values(self, file: "_File") -> Iterator[Tensor]:
        """Yield its elements in their order: slices, or whole matrices of experts if they are reordered."""
        for places in self.parts:
            if len(places) == 1 and not self.turned:
                yield from _slices(file, *places[0])
            else:
                halves = [torch.cat(list(_slices(file, *place))) for place in places]
                matrix = torch.stack(halves, self.dim + 1).flatten(self.dim, self.dim + 1)
                yield matrix.mT if self.turned else matrix


def _plan(file: _File, empty: PreTrainedModel, names: GGUFNames, dtype: torch.dtype) -> dict[str, _Planned]:
    """Find the places in the file of each tensor of the checkpoint. Raises CheckpointError if tensors are missing,
    unknown, of another shape, or of a type that the package gguf does not dequantize."""
    found: dict[str, _Planned] = {}
    problems: list[str] = []
    used: set[str | None] = {ROPE_FREQS}
    on_disk = Names(empty)
    tied = {"lm_head.weight"} if empty.config.tie_word_embeddings else set()
    for name, value in empty.state_dict().items():
        if name in tied:
            continue
        places, dim = names.places(name), int(name.endswith("_bias"))
        shape = tuple(size // len(places) if at == dim else size for at, size in enumerate(value.shape))
        problems += [problem for place in places for problem in _problems(file, name, place, shape)]
        used |= {place.name for place in places}
        stack = next((stack for stack in on_disk.stacks(name) if stack.only), None)
        key, whole = (stack.key, stack.shape) if stack else (on_disk.key(name), tuple(value.shape))
        if key not in found:
            found[key] = _Planned(_dtype(file, places[0].name, dtype), whole, [], bool(stack and stack.turned), dim)
        found[key].parts.append(places)
    if unknown := sorted(file.tensors.keys() - used):
        problems.append(f"{listed(unknown, 6)} has no equivalent in {file.family.class_name}")
    if problems:
        file.refuse(listed(list(dict.fromkeys(problems)), 6))
    dequantize = gguf_package().quants.dequantize
    kinds = {tensor.tensor_type: tensor for tensor in file.tensors.values()}
    for kind, tensor in kinds.items():
        try:
            dequantize(tensor.data.reshape(-1, tensor.data.shape[-1])[:1], kind)
        except NotImplementedError:
            file.refuse(f"{tensor.name} is {kind.name}, a type that the package gguf does not dequantize")
    return found


def _problems(file: _File, key: str, place: GGUFPlace, shape: tuple[int, ...]) -> Iterator[str]:
    """Yield what is wrong with the file's tensor of ``key``, whose shape is expected to be ``shape``."""
    if place.name not in file.tensors:
        yield f"it lacks {place.name or key}"
        return
    tensor = file.tensors[place.name]
    stacked, own = place.expert is not None, shape_of(tensor)
    if own != ((file.own("expert_count"), *shape) if stacked else shape):
        yield f"{place.name} is {list(own)}, expected {list(shape)}{' for each expert' * stacked}"
    if len(own) == 1 and tensor.tensor_type.name not in _PLAIN:
        yield f"{place.name} is a vector in {tensor.tensor_type.name}, expected {', '.join(_PLAIN)}"


def _dtype(file: _File, name: str | None, quantized: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor in the checkpoint. Norms of Gemma are fp32, in which subtracting 1 is exact."""
    if name is None or name not in file.tensors or _added(file, name):
        return torch.float32
    return _PLAIN.get(file.tensors[name].tensor_type.name, quantized)


def _added(file: _File, name: str) -> float:
    """Return the number that llama.cpp's converter added to a tensor."""
    return ARCHITECTURES[file.family.model_type].norm_offset if name.endswith("_norm.weight") else 0.0


def _slices(file: _File, name: str | None, expert: int | None, heads: int) -> Iterator[Tensor]:
    """Yield a tensor, or one expert of it, in slices of whole rows (and whole heads) as transformers orders them: fp32,
    or a plain tensor's own dtype. Raises CheckpointError if values are not finite."""
    assert name is not None, "planned"
    tensor = file.tensors[name]
    kind, data = tensor.tensor_type, tensor.data if expert is None else tensor.data[expert]
    data = data.reshape(-1, data.shape[-1] if data.ndim > 1 else 1 if heads else len(data))
    unit = len(data) // heads if heads else 1
    step = max(1, _CHUNK // int(tensor.shape[0]) // unit) * unit
    dequantize = gguf_package().quants.dequantize
    for start in range(0, len(data), step):
        rows = data[start : start + step]
        if kind.name in _PLAIN:
            values = torch.from_numpy(np.array(rows)).view(_PLAIN[kind.name])
        else:
            with np.errstate(all="ignore"):
                values = torch.from_numpy(dequantize(np.array(rows), kind))
        if not values.isfinite().all():
            file.refuse(f"{name} holds NaN or infinite values: {AGAIN}")
        if heads:
            values = values.unflatten(0, (-1, unit // 2, 2)).transpose(1, 2).flatten(0, 2)
        yield values.float() - added if (added := _added(file, name)) else values


# ---- configuration


def _config(file: _File) -> PretrainedConfig:
    """Build transformers' configuration. Raises CheckpointError for an unknown or missing entry of the metadata."""
    family, known = file.family, {**_VALUES, **file.family.values}
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(shape_of(embedding)) != 2:
        file.refuse("it has no matrix token_embd.weight")
    values: dict[str, Any] = {"vocab_size": shape_of(embedding)[0]}
    origin = {"vocab_size": "the number of rows of token_embd.weight"}
    unknown = []
    prefix = f"{file.architecture}."
    for key in (key for key in file.values if key.startswith(prefix)):
        value, end = file.values[key], key.removeprefix(prefix)
        if end in _ROPE or end in _YARN or (end in _NEUTRAL and value == _NEUTRAL[end]):
            continue
        attribute = known.get(end)
        if attribute is None:
            unknown.append(f"{key} = {str(value)[:60]}")
        elif attribute:
            value = file.number(end)
            if values.setdefault(attribute, value) != value:
                file.refuse(f"{key} is {value}, but {origin[attribute]} is {values[attribute]}")
            origin.setdefault(attribute, key)
    if unknown:
        name = family.class_name
        file.refuse(f"metadata that changes the model and has no equivalent in {name}: {listed(unknown, 6)}")
    ends = {attribute: end for end, attribute in reversed(known.items())}
    required = [*_REQUIRED, *(name for name in family.values.values() if name and name not in _OPTIONAL)]
    required += ["intermediate_size"] * ("moe_intermediate_size" not in required)
    if missing := [prefix + ends[name] for name in required if name not in values]:
        file.refuse(f"metadata lacks {listed(missing, 6)}")
    layers = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    experts = [shape_of(tensor)[0] for name, tensor in file.tensors.items() if name.endswith("_exps.weight")]
    for attribute, count in (("num_hidden_layers", len(layers)), ("num_experts", max(experts, default=0))):
        if values.get(attribute, count) != count:
            file.refuse(f"{origin[attribute]} is {values[attribute]}, but there are tensors for {count}")
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    inner = "moe_intermediate_size" if "moe_intermediate_size" in values else "intermediate_size"
    for attribute, name, dim in (*_SIZES, (inner, "blk.0.ffn_gate_exps.weight", 1)):
        if name in file.tensors:  # transformers would allocate memory by a wrong size
            heads, shape = "heads" in attribute, shape_of(file.tensors[name])
            if shape[dim:][:1] != (values[attribute] * (values["head_dim"] if heads else 1),):
                of_heads = f" heads of {values['head_dim']} (attention.key_length)" * heads
                file.refuse(f"{prefix}{ends[attribute]} is {values[attribute]}{of_heads}, but {name} is {list(shape)}")
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    values["rope_parameters"] = _rope(file, values["head_dim"])
    values |= family.derived(file, values)
    try:
        config = AutoConfig.for_model(family.model_type, **values)
    except Exception as error:  # transformers checks values in many places
        raise CheckpointError(
            f"{file.path}: its metadata is no {family.model_type}: {' '.join(str(error).split())}"
        ) from error
    config.architectures = [family.class_name]
    return config


def _rope(file: _File, head_dim: int) -> dict[str, Any]:
    """Build the parameters of RoPE. Raises CheckpointError if transformers has no such scaling."""
    theta = file.number("rope.freq_base", 10000.0)
    if theta <= 1:
        file.refuse(f"{file.architecture}.rope.freq_base is {theta}, expected more than 1")
    factor = file.number("rope.scaling.factor", 1.0) if file.own("rope.scaling.factor") != 0 else 1.0
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = file.own("rope.scaling.type", "linear")  # llama.cpp's default
    if kind == "yarn":
        length = file.number("rope.scaling.original_context_length")
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
        rope |= {name: file.number(end) for end, name in _YARN.items() if file.own(end) is not None}
    elif factor != 1 and kind == "linear":
        rope |= {"rope_type": "linear", "factor": factor}
    elif factor != 1 or kind not in ("none", "linear"):
        file.refuse(f"rope.scaling.type is {kind!r} with the factor {factor}, expected linear or yarn")
    if ROPE_FREQS in file.tensors:
        if rope["rope_type"] != "default" or file.architecture != "llama":
            file.refuse(f"{ROPE_FREQS} in {file.architecture} with rope.scaling.type {kind!r} is not supported")
        rope |= _llama3(file, theta, head_dim)
    return rope


def _llama3(file: _File, theta: float, head_dim: int) -> dict[str, Any]:
    """Find the parameters of Llama 3's scaling that the divisors of frequencies in the file were computed from."""
    found = torch.from_numpy(np.array(file.tensors[ROPE_FREQS].data, dtype=np.float64))
    turns = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim) / (2 * math.pi)
    factor = round(float(found.max()), 4)
    for original in (2**power for power in range(4, 24)):
        smooth = ((original * turns - 1) / 3).clamp(0, 1)  # low_freq_factor 1, high_freq_factor 4
        expected = 1 / ((1 - smooth) / factor + smooth)
        if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=0):
            parameters = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            return {"rope_type": "llama3", "original_max_position_embeddings": original} | parameters
    file.refuse(f"{ROPE_FREQS} are not divisors of Llama 3's scaling with low_freq_factor 1 and high_freq_factor 4")


def _gemma3(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that llama.cpp derives for Gemma 3."""
    period, layers = file.number("attention.sliding_window_pattern", 6), values["num_hidden_layers"]
    local_theta = file.number("rope.freq_base_swa", 10000.0)
    kinds = ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(layers)]
    # Only the model of 27B, known by its 62 layers, scales by the mean size of heads.
    scalar = values["hidden_size"] // values["num_attention_heads"] if layers == 62 else values["head_dim"]
    local = {"rope_type": "default", "rope_theta": local_theta}
    rope = {"full_attention": values["rope_parameters"], "sliding_attention": local}
    return {"layer_types": kinds, "query_pre_attn_scalar": scalar, "rope_parameters": rope}


def _llama(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return which layers have biases."""
    biased = {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}
    return {attribute: f"blk.0.{name}.bias" in file.tensors for attribute, name in biased.items()}


def _qwen3_moe(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the only kind that llama.cpp computes."""
    routing = {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}
    return routing | {"intermediate_size": values.get("intermediate_size", values["moe_intermediate_size"])}


def _gpt_oss(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the positions as published: the bounds of YaRN are not rounded."""
    return {"rope_parameters": {**values["rope_parameters"], "truncate": False}}


_FAMILIES = {
    "llama": _Family("llama", "LlamaForCausalLM", derived=_llama),  # Mistral, too
    "llama experts": _Family("mixtral", "MixtralForCausalLM", _EXPERTS),
    "qwen2": _Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _Family("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": _Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _EXPERTS | {"expert_feed_forward_length": "moe_intermediate_size"},
        _qwen3_moe,
    ),
    "gpt-oss": _Family(
        "gpt_oss",
        "GptOssForCausalLM",
        _EXPERTS | {"expert_feed_forward_length": "intermediate_size", "attention.sliding_window": "sliding_window"},
        _gpt_oss,
    ),
    "gemma3": _Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        WINDOW_VALUES | {"rope.freq_base_swa": "", "attention.sliding_window_pattern": ""},
        _gemma3,
    ),
}


# ---- tokenizer


def _tokenizer(file: _File) -> PreTrainedTokenizerFast:
    """Build the tokenizer. Raises CheckpointError for an unknown or inconsistent entry of the metadata."""
    kind, tokens, types = file.token("model"), file.token("tokens"), file.token("token_type")
    keys = [key.removeprefix("tokenizer.ggml.") for key in file.values if key.startswith("tokenizer.ggml.")]
    if unknown := [f"tokenizer.ggml.{key}" for key in keys if key not in _TOKENIZER and not key.startswith("fim_")]:
        file.refuse(f"metadata that changes the tokens and is not supported: {listed(unknown, 6)}")
    lists = [tokens, types, *([file.token("scores")] if kind == "llama" else [])]
    for one, type_ in zip(lists, (str, int, float), strict=False):
        if not isinstance(one, list) or len(one) != len(tokens) or not all(isinstance(value, type_) for value in one):
            file.refuse("tokenizer.ggml.tokens, token_type or scores are missing, or not lists of one length")
    if len(tokens) > (rows := shape_of(file.tensors["token_embd.weight"])[0]):
        file.refuse(f"tokenizer.ggml.tokens has {len(tokens)} tokens, but token_embd.weight has {rows} rows")
    for key in (key for key in keys if key.endswith("_token_id")):
        if type(file.token(key)) is not int or not 0 <= file.token(key) < len(tokens):
            file.refuse(f"tokenizer.ggml.{key} is {file.token(key)!r}, but there are {len(tokens)} tokens")
    vocabulary = {
        token: index
        for index, (token, type_) in enumerate(zip(tokens, types, strict=True))
        if type_ != _UNUSED or token != f"[PAD{index}]"  # rows that the converter padded
    }
    if twice := [token for index, token in enumerate(tokens) if vocabulary.get(token, index) != index]:
        file.refuse(f"tokenizer.ggml.tokens has {listed(twice, 3)} twice")
    if kind not in ("gpt2", "llama"):
        file.refuse(f"tokenizer.ggml.model is {kind!r}, expected 'gpt2' or 'llama'")
    made, begins = (_byte_level if kind == "gpt2" else _sentencepiece)(file, vocabulary)
    for wanted in (_CONTROL, _USER_DEFINED):
        found = [token for token, type_ in zip(tokens, types, strict=True) if type_ == wanted]
        found = [token for token in found if made.token_to_id(token) is not None]
        made.add_tokens([AddedToken(token, special=wanted == _CONTROL, normalized=False) for token in found])
    named = {
        attribute: tokens[file.token(f"{name}_token_id")]
        for name, attribute in _NAMED.items()
        if f"{name}_token_id" in keys
    }
    start = "tokenizer.chat_template"
    templates = {
        key.removeprefix(start)[1:]: file.values[key] for key in file.values if re.match(rf"{start}(\.|$)", key)
    }
    if not all(isinstance(template, str) for template in templates.values()):
        file.refuse(f"{start} is not a text")
    added = [
        named.get(f"{name}_token") if file.token(f"add_{name}_token", default) else ""
        for name, default in (("bos", begins), ("eos", False))
    ]
    if None in added:
        file.refuse(f"tokenizer.ggml.add_{('bos', 'eos')[added.index(None)]}_token is set, but there is no such token")
    if not added[0] and "bos_token" not in "".join(templates.values()):
        named.pop("bos_token", None)  # llama.cpp's converter adds one, for example for Qwen
    made.post_processor = processors.TemplateProcessing(
        single=[part for part in (added[0], "$A", added[1]) if part],
        special_tokens=[(token, vocabulary[token]) for token in dict.fromkeys(added) if token],
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=file.own("context_length"), **named)
    if templates:
        names = {name or "default": template for name, template in templates.items()}
        tokenizer.chat_template = names["default"] if list(names) == ["default"] else names
    return tokenizer


def _byte_level(file: _File, vocabulary: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Build a byte-level BPE; also return True if a text begins with bos by default."""
    pre, merges = file.token("pre"), file.token("merges")
    if not isinstance(pre, str) or pre not in _PRE:
        file.refuse(f"tokenizer.ggml.pre is {pre!r}, expected one of {', '.join(_PRE)}")
    if not isinstance(merges, list) or any(str(merge).count(" ") != 1 for merge in merges):
        file.refuse("tokenizer.ggml.merges is missing, or has an entry that is not a pair of tokens")
    pattern, normalizer, ignore_merges, begins = _PRE[pre]
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
        made = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=ignore_merges))
    except Exception as error:  # a merge of unknown tokens
        raise CheckpointError(f"{file.path}: tokenizer.ggml.merges and tokens do not fit: {error}") from error
    if normalizer is not None:
        made.normalizer = normalizer()
    first: Any = pre_tokenizers.Digits(individual_digits=True) if pattern == _DIGITS else None
    if pattern not in (None, _DIGITS):
        first = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern in (None, _DIGITS))
    made.pre_tokenizer = last if first is None else pre_tokenizers.Sequence([first, last])
    made.decoder = decoders.ByteLevel()
    return made, begins


def _sentencepiece(file: _File, vocabulary: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Build a BPE of SentencePiece. The file has scores instead of merges: a merge ranks by the score of its result;
    for Gemma, whose scores have another order, by the id (as in transformers' reader)."""
    gemma = file.architecture == "gemma3"
    prefix = bool(file.token("add_space_prefix", True))
    if prefix is gemma:
        file.refuse(f"tokenizer.ggml.add_space_prefix is {prefix}, expected {not gemma} for {file.architecture}")
    if gemma:  # tokens of several spaces are spelled with spaces in the file
        vocabulary = {token.replace(" ", "▁") if not token.strip() else token: i for token, i in vocabulary.items()}
    scores = file.token("scores")
    if not all(map(math.isfinite, scores)):
        file.refuse("tokenizer.ggml.scores holds NaN or infinite values")
    ranked = []
    for token, index in vocabulary.items():
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        splits = [(left, right) for left, right in splits if left in vocabulary and right in vocabulary]
        splits.sort(key=lambda split: (len(split[0]), len(split[1])))
        ranked += [(index if gemma else -scores[index], split) for split in splits]
    ranked.sort(key=lambda item: item[0])
    unknown = file.token("unknown_token_id")
    options = {"fuse_unk": True, "byte_fallback": True}
    if unknown is not None:
        options["unk_token"] = file.token("tokens")[unknown]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[split for _, split in ranked], **options))
    last = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if gemma:
        made.normalizer = normalizers.Replace(" ", "▁")
        made.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        last.append(decoders.Strip(content=" ", left=1))
    made.decoder = decoders.Sequence(last)
    return made, True
