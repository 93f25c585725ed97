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
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerFast

from model.build import build_model
from model.checkpoint.load import check_headers
from model.checkpoint.safetensors import AGAIN, INDEX, SINGLE, CheckpointError
from model.console import progress_bar
from model.ranks import listed
from model.save.aside import Aside
from model.save.finish import write_json
from model.save.gguf_file import ROPE_FREQS, SAME_VALUES, GGUFNames, gguf_package, open_gguf
from model.save.plan import EXPERT
from model.save.shard_writer import ShardWriter

_CHUNK = 2**24  # fp32 values at a time: 64 MB, and some copies
_SHARD_BYTES = 5 * 10**9
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# llama.cpp's architectures: the model_type and class of transformers.
_MODELS = {
    "llama": ("llama", "LlamaForCausalLM"),  # Mistral, too
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
_GEMMA = "gemma3"
_VALUES = SAME_VALUES | {"context_length": "max_position_embeddings"}
_GEMMA_VALUES = {
    "attention.sliding_window": "sliding_window",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "",
    "attention.sliding_window_pattern": "",
}
_ROPE = {f"rope.{end}" for end in ("freq_base", "scaling.type", "scaling.factor", "scaling.original_context_length")}
_NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "rope.scaling.attn_factor": 1.0}
_REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "rms_norm_eps", "max_position_embeddings")

# Tokenizers of byte-level BPE by tokenizer.ggml.pre: the pattern that splits text (None: GPT-2's), the normalizer, True
# if a word of the vocabulary is not merged, True if llama.cpp begins a text with bos unless the file denies it.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = "digits"
_LLAMA3 = (_QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"), None, True, True)
_PRE: dict[str, tuple[str | None, Any, bool, bool]] = {
    "gpt-2": (None, None, False, False),
    **dict.fromkeys(("smollm", "starcoder", "refact"), (_DIGITS, None, False, False)),
    "qwen2": (_QWEN2, normalizers.NFC, False, False),
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3"), _LLAMA3),
    "tekken": (_TEKKEN, None, True, True),
}
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # types of tokens
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_ENDS = ("eos", "eot", "eom")  # tokens that end an answer
_TOKENIZER = {f"{name}_token_id" for name in (*_NAMED, *_ENDS, "seperator", "separator", "mask", "cls")}
_TOKENIZER |= {"model", "pre", "tokens", "token_type", "token_type_count", "merges", "scores", "add_bos_token"}
_TOKENIZER |= {"add_eos_token", "add_space_prefix"}


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
        for name, field in reader.fields.items():
            try:
                self.values[name] = field.contents()
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
        if self.architecture not in _MODELS:
            self.refuse(f"general.architecture is {self.architecture!r}, expected one of {', '.join(_MODELS)}")

    def refuse(self, problem: str) -> NoReturn:
        """Raise CheckpointError with the file's name."""
        raise CheckpointError(f"{self.path}: {problem}")

    def own(self, end: str, default: Any = None) -> Any:
        """Return a metadata value of the architecture."""
        return self.values.get(f"{self.architecture}.{end}", default)

    def number(self, end: str, default: float | None = None) -> Any:
        """Return a number of the architecture's metadata. Raises CheckpointError unless it is positive."""
        value = self.own(end, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**31:
            self.refuse(f"{self.architecture}.{end} is {str(value)[:60]}, expected one positive number")
        return value

    def token(self, end: str, default: Any = None) -> Any:
        """Return a metadata value of the tokenizer."""
        return self.values.get(f"tokenizer.ggml.{end}", default)


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return a tensor's shape, slowest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def convert_gguf(source: Path, out: Path, *, dtype: torch.dtype = torch.bfloat16, progress: bool = True) -> Conversion:
    """Write the model of a GGUF file to ``out`` as a Hugging Face checkpoint.

    Args:
        source: the file.
        out: directory to create.
        dtype: dtype of quantized tensors in the checkpoint. Tensors in F32, F16 and BF16 keep theirs.
        progress: show a progress bar.

    Raises:
        RankError, ValueError, OSError: before tensors are written: the file is damaged, or its architecture, metadata,
            tokenizer or a tensor is not supported. While writing: a tensor has NaN or infinite values. The message
            names the file and the entry or tensor; nothing remains at ``out``.
    """
    file = _File(source)
    config = _config(file)
    tokenizer = _tokenizer(file)
    size = sum(int(tensor.n_elements) * _dtype(file, name, dtype).itemsize for name, tensor in file.tensors.items())
    with closing(Aside(out, size)) as aside:
        config.save_pretrained(aside.path)
        empty = build_model(aside.path, {}, dtype=torch.float32, device=torch.device("meta"), experts="per_expert")
        tied = set() if not config.tie_word_embeddings else {"lm_head.weight"}
        expected = {key: tuple(value.shape) for key, value in empty.state_dict().items() if key not in tied}
        names = GGUFNames(config, file.architecture)
        sources = _sources(file, expected, names)
        dtypes = {key: _dtype(file, sources[key][0], dtype) for key in expected}
        config.dtype = dtypes[max(expected, key=lambda key: math.prod(expected[key]))]
        config.save_pretrained(aside.path)
        tokenizer.save_pretrained(aside.path)
        ends = {file.token(f"{name}_token_id") for name in _ENDS} - {None}
        if ends:
            write_json({"eos_token_id": sorted(ends)}, aside.path / "generation_config.json")
        sizes = {key: math.prod(shape) * dtypes[key].itemsize for key, shape in expected.items()}
        ends_at = dict(zip(sizes, accumulate(sizes.values()), strict=True))
        shards = [list(keys) for _, keys in groupby(expected, lambda key: ends_at[key] // _SHARD_BYTES)]
        files = [SINGLE]
        if len(shards) > 1:
            files = [f"model-{index:05}-of-{len(shards):05}.safetensors" for index in range(1, len(shards) + 1)]
            weight_map = {key: name for name, shard in zip(files, shards, strict=True) for key in shard}
            write_json({"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}, aside.path / INDEX)
        rounded = set()
        with progress_bar(sum(sizes.values()), "convert", "B", shown=progress) as bar:
            for name, shard in zip(files, shards, strict=True):
                shapes = {key: (dtypes[key], expected[key]) for key in shard}
                with closing(ShardWriter(aside.path / name, shapes)) as writer:
                    for key in shard:
                        start = 0
                        for values in _slices(file, *sources[key], names.heads(key)):
                            part = values.to(dtypes[key]).contiguous()
                            if part.dtype != values.dtype and not torch.equal(part.to(values.dtype), values):
                                rounded.add(sources[key][0])
                            writer.write_part(key, start, part.view(-1))
                            start += part.numel()
                            bar.update(part.nbytes)
                    writer.finish()
        check_headers(empty, aside.path)
        aside.publish()
    kinds = Counter(tensor.tensor_type.name for tensor in file.tensors.values())
    return Conversion(config.model_type, dict(kinds.most_common()), len(rounded), dtype)


# ---- tensors


def _sources(
    file: _File, expected: Mapping[str, tuple[int, ...]], names: GGUFNames
) -> dict[str, tuple[str, int | None]]:
    """Find the tensor of the file for each key of the checkpoint, and the expert's index in it. Raises CheckpointError
    if tensors are missing, unknown, of another shape, or of a type that the package gguf does not dequantize."""
    found: dict[str, tuple[str, int | None]] = {}
    problems, used = [], {ROPE_FREQS}
    for key, shape in expected.items():
        name, expert = names.place(key)
        if name is None or name not in file.tensors:
            problems.append(f"it lacks {name or key}")
            continue
        used.add(name)
        stacked = EXPERT.search(key) is not None
        own = shape_of(file.tensors[name])
        if own != ((file.own("expert_count"), *shape) if stacked else shape):
            problems.append(f"{name} is {list(own)}, expected {list(shape)}{' for each expert' * stacked}")
        if len(own) == 1 and file.tensors[name].tensor_type.name not in _PLAIN:
            problems.append(
                f"{name} is a vector in {file.tensors[name].tensor_type.name}, expected {', '.join(_PLAIN)}"
            )
        found[key] = (name, expert if stacked else None)
    if unknown := sorted(file.tensors.keys() - used):
        problems.append(f"{listed(unknown, 6)} has no equivalent in {_MODELS[file.architecture][1]}")
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


def _dtype(file: _File, name: str, quantized: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor in the checkpoint. Norms of Gemma are fp32, in which subtracting 1 is exact."""
    if _less_one(file, name):
        return torch.float32
    return _PLAIN.get(file.tensors[name].tensor_type.name, quantized)


def _less_one(file: _File, name: str) -> bool:
    return file.architecture == _GEMMA and name.endswith("_norm.weight")


def _slices(file: _File, name: str, expert: int | None, heads: int) -> Iterator[Tensor]:
    """Yield a tensor, or one expert of it, in slices of whole rows (and whole heads) as transformers orders them: fp32,
    or a plain tensor's own dtype. Raises CheckpointError if values are not finite."""
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
        yield values.float() - 1 if _less_one(file, name) else values


# ---- configuration


def _config(file: _File) -> PretrainedConfig:
    """Build transformers' configuration. Raises CheckpointError for an unknown or missing entry of the metadata."""
    model_type, class_name = _MODELS[file.architecture]
    known = dict(_VALUES)
    if file.architecture == _GEMMA:
        known |= _GEMMA_VALUES
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(shape_of(embedding)) != 2:
        file.refuse("it has no matrix token_embd.weight")
    values: dict[str, Any] = {"vocab_size": shape_of(embedding)[0]}
    origin = {"vocab_size": "the number of rows of token_embd.weight"}
    unknown = []
    prefix = f"{file.architecture}."
    for key in (key for key in file.values if key.startswith(prefix)):
        value, end = file.values[key], key.removeprefix(prefix)
        if (end in _NEUTRAL and value == _NEUTRAL[end]) or end in _ROPE:
            continue
        attribute = known.get(end)
        if attribute is None or (attribute.startswith(("num_expert", "moe")) and file.architecture != "qwen3moe"):
            unknown.append(f"{key} = {str(value)[:60]}")
        elif attribute:
            file.number(end)
            if values.setdefault(attribute, value) != value:
                file.refuse(f"{key} is {value}, but {origin[attribute]} is {values[attribute]}")
            origin.setdefault(attribute, key)
    if unknown:
        file.refuse(f"metadata that changes the model and has no equivalent in {class_name}: {listed(unknown, 6)}")
    ends = {attribute: end for end, attribute in reversed(known.items())}
    required = (
        *_REQUIRED,
        *(("num_experts", "num_experts_per_tok", "moe_intermediate_size") * (model_type == "qwen3_moe")),
    )
    if missing := [prefix + ends[name] for name in required if name not in values]:
        file.refuse(f"metadata lacks {listed(missing, 6)}")
    layers = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    experts = [shape_of(tensor)[0] for name, tensor in file.tensors.items() if name.endswith("_exps.weight")]
    for attribute, count in (("num_hidden_layers", len(layers)), ("num_experts", max(experts, default=0))):
        if values.get(attribute, count) != count:
            file.refuse(f"{origin[attribute]} is {values[attribute]}, but there are tensors for {count}")
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    query, rows = file.tensors.get("blk.0.attn_q.weight"), values["num_attention_heads"] * values["head_dim"]
    if query is not None and shape_of(query)[0] != rows:  # transformers would allocate memory by the size of a head
        file.refuse(f"blk.0.attn_q.weight has {shape_of(query)[0]} rows, expected {rows} by the metadata's heads")
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    if model_type == "llama":
        values["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        values["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if model_type == "qwen3_moe":
        values |= {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}
        values.setdefault("intermediate_size", values["moe_intermediate_size"])
    values["rope_parameters"] = _rope(file, values["head_dim"])
    if file.architecture == _GEMMA:
        values |= _gemma(file, values)
    for name in ("bos", "eos", "padding"):
        values[f"{name.removesuffix('ding')}_token_id"] = file.token(f"{name}_token_id")
    try:
        config = AutoConfig.for_model(model_type, **values)
    except Exception as error:  # transformers checks values in many places
        raise CheckpointError(
            f"{file.path}: its metadata is no {model_type}: {' '.join(str(error).split())}"
        ) from error
    config.architectures = [class_name]
    return config


def _rope(file: _File, head_dim: int) -> dict[str, Any]:
    """Build the parameters of RoPE. Raises CheckpointError if transformers has no such scaling."""
    theta = file.number("rope.freq_base", 10000.0)
    factor = file.number("rope.scaling.factor", 1.0) if file.own("rope.scaling.factor") != 0 else 1.0
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = file.own("rope.scaling.type", "linear")  # llama.cpp's default
    if kind == "yarn":
        length = file.number("rope.scaling.original_context_length")
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
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


def _gemma(file: _File, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that llama.cpp derives for Gemma 3."""
    period, layers = file.number("attention.sliding_window_pattern", 6), values["num_hidden_layers"]
    local_theta = file.number("rope.freq_base_swa", 10000.0)
    file.number("attention.sliding_window")
    kinds = ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(layers)]
    # Only the model of 27B, known by its 62 layers, scales by the mean size of heads.
    scalar = values["hidden_size"] // values["num_attention_heads"] if layers == 62 else values["head_dim"]
    local = {"rope_type": "default", "rope_theta": local_theta}
    rope = {"full_attention": values["rope_parameters"], "sliding_attention": local}
    return {"layer_types": kinds, "query_pre_attn_scalar": scalar, "rope_parameters": rope}


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
        if not isinstance(file.token(key), int) or not 0 <= file.token(key) < len(tokens):
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
    if pre not in _PRE:
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
    gemma = file.architecture == _GEMMA
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
