"""Convert a GGUF file of llama.cpp to a Hugging Face checkpoint, a slice of a tensor in memory at a time.

Configuration and tokenizer are rebuilt from the file's metadata. transformers' own reader ignores metadata that it has
no name for (scaling of RoPE, the size of heads). Here an entry that changes the model and has no equivalent is an
error, as is a tensor that the model or the file lacks. Changes of llama.cpp's converter are undone, such as rows of q
and k that are interleaved in Llama, or 1 that is added to norms in Gemma (:class:`model.save.gguf_names.GGUFPlace`).
The file has the experts of a layer in one tensor.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from model.build import build_model
from model.checkpoint.load import check_headers
from model.checkpoint.names import Names
from model.checkpoint.safetensors import AGAIN, SINGLE, CheckpointError
from model.console import progress_bar
from model.ranks import RankError, listed
from model.save.aside import Aside, write_json
from model.save.gguf_names import (
    GEMMA4_SOFTCAP,
    ROPE_FREQS,
    SAME_VALUES,
    WINDOW_VALUES,
    GGUFNames,
    GGUFPlace,
    gguf_package,
    in_file,
    other_values,
)
from model.save.shard_writer import ShardWriter, write_index
from tools.gguf_metadata import ENDS, GGUFSource, build_tokenizer, shape_of

_CHUNK = 2**24  # fp32 values at a time: 64 MB, and some copies
_SHARD_BYTES = 5 * 10**9
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_VALUES = {end: name for end, name in SAME_VALUES.items() if "expert" not in end}
_VALUES |= {"context_length": "max_position_embeddings"}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_SIZED_EXPERTS = _EXPERTS | {"expert_feed_forward_length": "moe_intermediate_size"}
_ROPE = {"rope.freq_base", *(f"rope.scaling.{end}" for end in ("type", "factor", "original_context_length"))}
_YARN = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
# Attributes that are the size of a tensor, and its dimension; heads are counted.
_SIZES = (
    ("hidden_size", "token_embd.weight", 1),
    ("intermediate_size", "blk.0.ffn_gate.weight", 0),
    ("num_attention_heads", "blk.0.attn_q.weight", 0),
    ("num_key_value_heads", "blk.0.attn_k.weight", 0),
    ("shared_expert_intermediate_size", "blk.0.ffn_gate_shexp.weight", 0),
)
_NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "rope.scaling.attn_factor": 1.0}
_NEUTRAL |= {"final_logit_softcapping": 0.0}
_REQUIRED = ["block_count", "embedding_length", "attention.head_count", "attention.layer_norm_rms_epsilon"]
_REQUIRED += ["context_length"]
_HEADS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_OPTIONAL = ("final_logit_softcapping",)


@dataclass(frozen=True)
class _Family:
    """Class of transformers for an architecture of llama.cpp, and rules that convert metadata to its configuration."""

    model_type: str
    class_name: str
    values: Mapping[str, str] = field(default_factory=dict)
    """Attribute of the configuration by the end of a metadata key, beside those of every model; empty if ``derived``
    reads this entry."""
    derived: Callable[[GGUFSource, Mapping[str, Any]], dict[str, Any]] = lambda file, values: {}
    """Returns values without an entry, from the file and the other values."""


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion: ``kinds`` are the numbers of tensors of each ggml type, ``rounded`` is the number of
    quantized tensors that ``dtype`` does not represent exactly."""

    model_type: str
    kinds: Mapping[str, int]
    rounded: int
    dtype: torch.dtype

    def summary(self) -> str:
        """Describe the conversion in one line."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        name = str(self.dtype).removeprefix("torch.")
        rounded = f"; {self.rounded} of them rounded to {name} (--dtype float32 keeps every value)" * bool(self.rounded)
        return f"{self.model_type}, tensors: {kinds}{rounded}"


def convert_gguf(source: Path, out: Path, *, dtype: torch.dtype = torch.bfloat16) -> Conversion:
    """Write the model of the GGUF file ``source`` to a new directory ``out`` as a Hugging Face checkpoint. Quantized
    tensors are written in ``dtype``; tensors in F32, F16 and BF16 keep their dtype.

    Raises:
        RankError, ValueError, OSError: before tensors are written: ``out`` is not empty, the file is damaged, or its
            architecture, metadata, tokenizer or a tensor is not supported. While writing: a tensor has NaN or infinite
            values. The message names the file and the entry or tensor; nothing new remains at ``out``.
    """
    file = GGUFSource(source, [name for name in _FAMILIES if " " not in name])
    routed = f"{file.architecture} experts"
    family = _FAMILIES[routed if routed in _FAMILIES and file.own("expert_count") else file.architecture]
    config = _config(file, family)
    tokenizer = build_tokenizer(file)
    for name in ("bos", "eos", "padding"):
        setattr(config, f"{name.removesuffix('ding')}_token_id", file.token(f"{name}_token_id"))
    size = sum(
        int(tensor.n_elements) * _PLAIN.get(tensor.tensor_type.name, dtype).itemsize for tensor in file.tensors.values()
    )
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
        ends = {file.token(f"{name}_token_id") for name in ENDS} - {None}
        if ends:
            write_json({"eos_token_id": sorted(ends)}, aside.path / "generation_config.json")
        sizes = {key: math.prod(one.shape) * one.dtype.itemsize for key, one in planned.items()}
        ends_at = dict(zip(sizes, accumulate(sizes.values()), strict=True))
        shards = [list(keys) for _, keys in groupby(planned, lambda key: ends_at[key] // _SHARD_BYTES)]
        files = [SINGLE]
        if len(shards) > 1:
            files = [f"model-{index:05}-of-{len(shards):05}.safetensors" for index in range(1, len(shards) + 1)]
        write_index(aside.path, dict(zip(files, shards, strict=True)), sum(sizes.values()))
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
    """Tensor to write to the checkpoint, and its places in the GGUF file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[list[GGUFPlace]]
    """In their order: places in the file (two if these alternate) of one expert's Linear, or of the whole tensor."""
    turned: bool = False  # the matrix of each part is transposed
    dim: int = 0  # along which two places alternate

    def names(self) -> set[str | None]:
        """Return the names of the file's tensors that this tensor consists of."""
        return {place.name for places in self.parts for place in places}

    def values(self, file: GGUFSource) -> Iterator[Tensor]:
        """Yield this tensor's elements in their order: in slices, or a whole matrix per part if it is reordered."""
        for places in self.parts:
            if len(places) == 1 and not self.turned:
                yield from _slices(file, places[0])
            else:
                halves = [torch.cat(list(_slices(file, place))) for place in places]
                matrix = torch.stack(halves, self.dim + 1).flatten(self.dim, self.dim + 1)
                yield matrix.mT if self.turned else matrix


def _plan(file: GGUFSource, empty: PreTrainedModel, names: GGUFNames, dtype: torch.dtype) -> dict[str, _Planned]:
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
            found[key] = _Planned(_dtype(file, places[0], dtype), whole, [], bool(stack and stack.turned), dim)
        found[key].parts.append(places)
    if unknown := sorted(file.tensors.keys() - used):
        problems.append(f"{listed(unknown, 6)} has no equivalent in {type(empty).__name__}")
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


def _problems(file: GGUFSource, key: str, place: GGUFPlace, shape: tuple[int, ...]) -> Iterator[str]:
    """Yield each problem of the GGUF tensor at ``place``: it is missing, is not of ``shape`` (of one part if experts
    are stacked), or is a quantized vector. ``key`` is the model's name of the tensor."""
    if place.name not in file.tensors:
        yield f"it lacks {place.name or key}"
        return
    tensor = file.tensors[place.name]
    stacked, own = place.expert is not None, shape_of(tensor)
    if stacked:
        shape = (file.own("expert_count"), shape[0] * place.per_expert, *shape[1:])
    if in_file(own) != in_file(shape):
        yield f"{place.name} is {list(own)}, expected {list(shape)}"
    if len(own) == 1 and tensor.tensor_type.name not in _PLAIN:
        yield f"{place.name} is a vector in {tensor.tensor_type.name}, expected {', '.join(_PLAIN)}"


def _dtype(file: GGUFSource, place: GGUFPlace, quantized: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor in the checkpoint. Norms of Gemma are fp32, in which subtracting 1 is exact."""
    if place.name not in file.tensors or place.offset or place.negative:
        return torch.float32
    return _PLAIN.get(file.tensors[place.name].tensor_type.name, quantized)


def _slices(file: GGUFSource, place: GGUFPlace) -> Iterator[Tensor]:
    """Yield the values at ``place`` (a tensor, or one expert's part) in slices of whole rows, in transformers' order.
    Quantized values are dequantized to fp32; others keep their dtype. Raises CheckpointError if one is not finite."""
    assert place.name is not None, "planned"
    tensor = file.tensors[place.name]
    kind, data = tensor.tensor_type, place.part_of(tensor.data)
    data = data.reshape(-1, data.shape[-1] if data.ndim > 1 else 1 if place.rows else len(data))
    order = np.arange(len(data)) if place.rows is None else place.rows(len(data)).argsort().numpy()
    step = max(1, _CHUNK // int(tensor.shape[0]))
    dequantize = gguf_package().quants.dequantize
    for start in range(0, len(data), step):
        rows = data[order[start : start + step]]
        if kind.name in _PLAIN:
            values = torch.from_numpy(np.array(rows)).view(_PLAIN[kind.name])
        else:
            with np.errstate(all="ignore"):
                values = torch.from_numpy(dequantize(np.array(rows), kind))
        values = place.to_checkpoint(values)
        if not values.isfinite().all():
            file.refuse(f"{place.name} holds NaN or infinite values: {AGAIN}")
        yield values


# ---- configuration


def _config(file: GGUFSource, family: _Family) -> PretrainedConfig:
    """Build transformers' configuration. Raises CheckpointError for unknown, missing or contradictory metadata."""
    known = {**_VALUES, **family.values}
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
    required = [
        *(known[end] for end in _REQUIRED),
        *(name for name in family.values.values() if name and name not in _OPTIONAL),
    ]
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
    routed = next((name for name in file.tensors if name.endswith(".ffn_gate_exps.weight")), "")
    for attribute, name, dim in (*_SIZES, (inner, routed, 1)):
        if name in file.tensors and attribute in values:  # transformers would allocate memory by a wrong size
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
            f"{file.path}: its metadata is not valid for {family.model_type}: {' '.join(str(error).split())}"
        ) from error
    config.architectures = [family.class_name]
    if other := list(other_values(file.values.get, config)):
        file.refuse(listed(other, 6))
    return config


def _rope(file: GGUFSource, head_dim: int) -> dict[str, Any]:
    """Build the parameters of RoPE. Raises CheckpointError if the kind of scaling is not supported."""
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
    if ROPE_FREQS in file.tensors and file.architecture != "gemma4":
        if rope["rope_type"] != "default" or file.architecture != "llama":
            file.refuse(f"{ROPE_FREQS} in {file.architecture} with rope.scaling.type {kind!r} is not supported")
        rope |= _llama3(file, theta, head_dim)
    return rope


def _llama3(file: GGUFSource, theta: float, head_dim: int) -> dict[str, Any]:
    """Find Llama 3's RoPE parameters from the divisors in the file. Raises CheckpointError if none fit."""
    found = torch.from_numpy(np.array(file.tensors[ROPE_FREQS].data, dtype=np.float64))
    turns = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim) / (2 * math.pi)
    factor = round(float(found.max()), 4)
    for original in (2**power for power in range(4, 24)):
        smooth = ((original * turns - 1) / 3).clamp(0, 1)  # low_freq_factor 1, high_freq_factor 4
        expected = 1 / ((1 - smooth) / factor + smooth)
        if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=0):
            parameters = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            return {"rope_type": "llama3", "original_max_position_embeddings": original} | parameters
    file.refuse(
        f"{ROPE_FREQS} has other values than Llama 3's scaling with low_freq_factor 1 and high_freq_factor 4, the only "
        "one that is supported"
    )


def _gemma3(file: GGUFSource, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer types, the scaling of queries and the RoPE parameters of Gemma 3."""
    period, layers = file.number("attention.sliding_window_pattern", 6), values["num_hidden_layers"]
    local_theta = file.number("rope.freq_base_swa", 10000.0)
    kinds = ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(layers)]
    # Only the model of 27B, known by its 62 layers, scales by the mean size of heads.
    scalar = values["hidden_size"] // values["num_attention_heads"] if layers == 62 else values["head_dim"]
    local = {"rope_type": "default", "rope_theta": local_theta}
    rope = {"full_attention": values["rope_parameters"], "sliding_attention": local}
    return {"layer_types": kinds, "query_pre_attn_scalar": scalar, "rope_parameters": rope}


def _llama(file: GGUFSource, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``attention_bias`` and ``mlp_bias``: True if the file has such biases in its first layer."""
    biased = {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}
    return {attribute: f"blk.0.{name}.bias" in file.tensors for attribute, name in biased.items()}


def _qwen3_moe(file: GGUFSource, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the only values that llama.cpp supports: experts in all layers, and normalized top-k weights."""
    routing = {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}
    return routing | {"intermediate_size": values.get("intermediate_size", values["moe_intermediate_size"])}


def _gpt_oss(file: GGUFSource, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE parameters of the published model: the bounds of YaRN are not rounded."""
    return {"rope_parameters": {**values["rope_parameters"], "truncate": False}}


def _gemma4(file: GGUFSource, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values per layer type, and values that tensors imply. Raises CheckpointError without ``ROPE_FREQS``."""
    layers = values["num_hidden_layers"]
    sliding = file.by_layer("attention.sliding_window_pattern", layers)
    heads, inner = (file.by_layer(end, layers) for end in ("attention.head_count_kv", "feed_forward_length"))
    full = next((index for index, one in enumerate(sliding) if not one), 0)
    factors, embedding = (file.tensors.get(name) for name in (ROPE_FREQS, "per_layer_token_embd.weight"))
    if factors is None:
        file.refuse(f"it lacks {ROPE_FREQS}")
    turned = np.array(factors.data) < 2  # the other factors stop frequencies
    rope = {"rope_type": "proportional", "rope_theta": values["rope_parameters"]["rope_theta"]}
    rope["partial_rotary_factor"] = int(turned.sum()) / len(turned)
    local = {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", 10000.0)}
    return {
        "enable_moe_block": "num_experts" in values,
        "final_logit_softcapping": file.own("final_logit_softcapping", GEMMA4_SOFTCAP) or None,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in sliding],
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        "num_global_key_value_heads": heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": file.own("attention.shared_kv_layers", 0),
        "use_double_wide_mlp": inner[-1] != inner[0],
        "hidden_size_per_layer_input": file.own("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": shape_of(embedding)[0] if embedding is not None else values["vocab_size"],
    }


def _qwen3_5(file: GGUFSource, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer types, the size of linear attention's value heads, and the RoPE parameters. Raises
    CheckpointError if the numbers of heads do not fit the convolution's tensor."""
    interval, rotary = file.number("full_attention_interval", 4), file.number("rope.dimension_count")
    keys, heads, size = (values[f"linear_{name}"] for name in ("num_key_heads", "num_value_heads", "key_head_dim"))
    kernels = file.tensors.get("blk.0.ssm_conv1d.weight")
    if heads % keys or kernels is None or shape_of(kernels)[0] != (2 * keys + heads) * size:
        found = None if kernels is None else list(shape_of(kernels))
        file.refuse(f"blk.0.ssm_conv1d.weight is {found}, expected rows of {keys}, {keys} and {heads} heads of {size}")
    kinds = [f"{'linear' if at % interval else 'full'}_attention" for at in range(1, values["num_hidden_layers"] + 1)]
    rope = values["rope_parameters"] | {"partial_rotary_factor": rotary / values["head_dim"]}
    if sections := file.own("rope.dimension_sections"):  # of positions in images; those of text are equal
        rope |= {"mrope_section": sections[:3], "mrope_interleaved": True}
    return {"layer_types": kinds, "linear_value_head_dim": size, "rope_parameters": rope}


def _lfm2(file: GGUFSource, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer types: layers without key heads are convolutions."""
    heads = file.by_layer("attention.head_count_kv", values["num_hidden_layers"])
    kinds = {"layer_types": ["full_attention" if count else "conv" for count in heads]}
    return kinds if "num_experts" in values else kinds | {"block_auto_adjust_ff_dim": False}


_CONVOLUTIONS = {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"}
_GEMMA4 = {
    **WINDOW_VALUES,
    **{f"{part}{end}": name for end, name in (("", "global_head_dim"), ("_swa", "head_dim")) for part in _HEADS},
    **dict.fromkeys(("rope.freq_base_swa", "attention.sliding_window_pattern"), ""),
    **dict.fromkeys(("attention.shared_kv_layers", "embedding_length_per_layer_input"), ""),
}
_LINEAR = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    **dict.fromkeys(("ssm.inner_size", "full_attention_interval"), ""),
    **dict.fromkeys(("rope.dimension_count", "rope.dimension_sections"), ""),
}
_FAMILIES = {
    "llama": _Family("llama", "LlamaForCausalLM", derived=_llama),  # Mistral, too
    "llama experts": _Family("mixtral", "MixtralForCausalLM", _EXPERTS),
    "qwen2": _Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _Family("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": _Family("qwen3_moe", "Qwen3MoeForCausalLM", _SIZED_EXPERTS, _qwen3_moe),
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
    "gemma4": _Family("gemma4_text", "Gemma4ForCausalLM", _GEMMA4, _gemma4),
    "gemma4 experts": _Family(
        "gemma4_text",
        "Gemma4ForCausalLM",
        _GEMMA4 | _SIZED_EXPERTS | {"expert_used_count": "top_k_experts"},
        _gemma4,
    ),
    "qwen35": _Family("qwen3_5_text", "Qwen3_5ForCausalLM", _LINEAR, _qwen3_5),
    "qwen35moe": _Family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        _LINEAR | _SIZED_EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        _qwen3_5,
    ),
    "lfm2": _Family("lfm2", "Lfm2ForCausalLM", _CONVOLUTIONS, _lfm2),
    "lfm2moe": _Family(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        _CONVOLUTIONS | _SIZED_EXPERTS | {"leading_dense_block_count": "num_dense_layers", "expert_gating_func": ""},
        _lfm2,
    ),
}
