"""Rewrite a checkpoint as the same function with smaller outliers: rotate it, or smooth it.

**Rotate** by Hadamard matrices: one tensor in memory at a time, computed in fp64 and rounded once.

Hadamard matrices are orthogonal, with entries of equal magnitude. Such a matrix spreads an outlier over all values of
its row, so that one scale fits them all (QuaRot, arXiv 2404.00456, section 3). The order of a matrix here is the
largest power of two by which the length of the row is divisible: a row of 2,560 values is rotated in 5 blocks of 512.

The residual stream h [n], a column vector, becomes Q^T h with an orthogonal Q [n, n]. The model computes the same
function if

- tensors that write to h are rotated: embeddings E Q, and outputs Q^T W and Q^T b of o_proj and down_proj;
- tensors that read from h are rotated back: W diag(g) Q, where g are the weights of the preceding RMSNorm. A norm with
  weights 1 commutes with Q^T, as Q preserves the mean of squares; so g is folded into W, and the norm's weights are 1.

The values v of a head become R^T v: v_proj has rows R^T W and biases R^T b, o_proj has columns W R. This preserves the
function, as attention sums values with weights that do not depend on the values. (SpinQuant, arXiv 2405.16406, section
3.1: R1 and R2.)

**Smooth**: move the magnitude of outliers from the inputs of layers to their weights. The outputs of an RMSNorm with
weights g [features] are read by Linears with weights W [out, features]: q, k, v; or gate, up, router. With any factors
f [features], g * f and W / f compute the same function. (SmoothQuant, arXiv 2211.10438, section 4, which also has the
largest weights in its factors.) Here

    f = x^-strength / (geometric mean of x^-strength)

where x is the largest magnitude of the feature in the norm's outputs for a sample text. Magnitudes of features then
differ less, so that a scale that a group of features shares fits them all.

All this holds only for known tensor names and a known order of norms, and if no other module reads or writes the
residual stream, or reads a norm's outputs. So only the families in :data:`FAMILIES` are accepted, for which the tests
compare outputs before and after.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig

from data.samples import load_tokenizer
from model.build import build_model, read_config
from model.checkpoint.load import check_headers
from model.checkpoint.safetensors import AGAIN, CheckpointError, DiskTensor, Reader, read_headers, read_tensor
from model.console import progress_bar
from model.quantized.quantization_config import is_quantized, read_json_object
from model.ranks import RankError, errors_on_all_ranks, is_main, listed, reduce_over_ranks, world_size
from model.save.aside import Aside, write_json
from model.save.finish import copy_companions
from model.save.shard_writer import ShardWriter, write_index
from tools.evaluation.perplexity import default_length, load_for_evaluation, read_eval_text
from tools.evaluation.score import reference_of, rolling_windows

FP64_CHUNK = 2**25  # fp64 values at a time: 256 MB, and one or two copies


@dataclass(frozen=True)
class Rotation:
    """Orthogonal matrix ``Q = diag(signs) (I x H) / sqrt(order)`` [size, size], which is never stored.

    H is Sylvester's Hadamard matrix, and ``size`` is divisible by its ``order``. ``signs`` are ``[size]``
    fp64 of 1 and -1, so that a row of equal values does not become a single large value.
    """

    signs: Tensor

    @property
    def size(self) -> int:
        """Number of rows, which is also the number of columns."""
        return len(self.signs)

    @property
    def order(self) -> int:
        """Order of the Hadamard matrix."""
        return self.size & -self.size

    def apply(self, values: Tensor, axis: int) -> Tensor:
        """Multiply each run of ``size`` values (fp64) along ``axis``, as a row vector, by Q; ``size`` divides the
        length of the axis."""
        moved = values.movedim(axis, -1)
        rotated, half = moved.reshape(-1, self.size) * (self.signs / math.sqrt(self.order)), 1
        while half < self.order:  # the fast Walsh-Hadamard transform
            first, second = rotated.reshape(-1, 2, half).unbind(1)
            rotated, half = torch.stack([first + second, first - second], 1), 2 * half
        return rotated.reshape(moved.shape).movedim(-1, axis)


def rotation(size: int, seed: int) -> Rotation:
    """Create the rotation of ``size``, with signs drawn from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    return Rotation(torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1)


FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
STREAM, VALUES = "stream", "values"  # the two rotations


@dataclass(frozen=True)
class Change:
    """Change of one tensor of the checkpoint by the rotations of residual stream (STREAM) and head values (VALUES);
    None where nothing changes."""

    norm: str | None = None  # key of the RMSNorm whose weights multiply the columns
    rows: str | None = None  # rotation of the first axis, STREAM or VALUES
    columns: str | None = None  # rotation of the last axis, STREAM or VALUES
    ones: bool = False  # the tensor is the weight of a norm that is folded into other weights: it becomes ones


_NORM, _INPUT, _MIDDLE = "model.norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight"
_MLP = r"(?:mlp|block_sparse_moe)\."
_EXPERT = rf"{_MLP}(?:(?:experts\.\d+|shared_expert)\.)?"
_HEADS = r"self_attn\.(?:[qk]_proj\.bias|[qk]_norm\.weight|rotary_emb\.inv_freq)"
OUTSIDE = {EMBEDDING: Change(columns=STREAM), HEAD: Change(norm=_NORM, columns=STREAM), _NORM: Change(ones=True)}
# Changes of a decoder layer's tensors, by a pattern of their names in the layer; so are the keys of norms.
IN_LAYER = {
    rf"{_INPUT}|{_MIDDLE}": Change(ones=True),
    r"self_attn\.[qk]_proj\.weight": Change(norm=_INPUT, columns=STREAM),
    r"self_attn\.v_proj\.weight": Change(norm=_INPUT, rows=VALUES, columns=STREAM),
    r"self_attn\.v_proj\.bias": Change(rows=VALUES),
    r"self_attn\.o_proj\.weight": Change(rows=STREAM, columns=VALUES),
    rf"self_attn\.o_proj\.bias|{_EXPERT}(?:down_proj|w2)\.(?:weight|bias)": Change(rows=STREAM),
    rf"{_EXPERT}(?:gate_proj|up_proj|w1|w3)\.weight": Change(norm=_MIDDLE, columns=STREAM),
    rf"{_MLP}(?:gate|shared_expert_gate)\.weight": Change(norm=_MIDDLE, columns=STREAM),
    rf"{_HEADS}|mlp\.(?:gate|up)_proj\.bias": Change(),
}


def change_of(key: str, where: str) -> Change:
    """Look up how the rotations change the tensor ``key``. Raises CheckpointError if the name is unknown; the message
    begins with ``where``, such as the file."""
    if key in OUTSIDE:
        return OUTSIDE[key]
    if found := re.fullmatch(r"(model\.layers\.\d+\.)(.+)", key):
        for pattern, change in IN_LAYER.items():
            if re.fullmatch(pattern, found[2]):
                return change if change.norm is None else replace(change, norm=found[1] + change.norm)
    raise CheckpointError(f"{where}: {key} is unknown, expected a tensor of one of {', '.join(FAMILIES)}")


@dataclass(frozen=True)
class RotationReport:
    """Result of a rotation."""

    tensors: int  # number of tensors written
    untied: bool  # lm_head was tied to the embedding, and is now a separate tensor
    orders: Mapping[str, tuple[int, int]]  # order of the Hadamard matrix, and size, by rotation (STREAM, VALUES)


def rotate_checkpoint(source: Path, out: Path, *, seed: int = 0) -> RotationReport:
    """Write ``source``, a plain Hugging Face checkpoint of one of :data:`FAMILIES`, with rotated weights to a new
    directory ``out``. The model computes the same function, and dtypes are the same. ``seed`` sets the signs.

    Raises:
        RankError, ValueError, OSError: before anything is written: ``out`` is not empty, the model is unknown or
            quantized, or a tensor is missing, unknown or of another shape. While writing: the disk is full, or values
            are not finite; the written files are then removed.
    """
    config, tensors = read_plain(source, "rotated")
    untied = bool(config.tie_word_embeddings)
    if untied:
        _drop_copy_of_embedding(tensors)
        tensors[HEAD] = tensors[EMBEDDING]
    changes = {key: change_of(key, str(source)) for key in tensors}
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotations = {STREAM: rotation(config.hidden_size, seed), VALUES: rotation(head, seed + 1)}

    def rotated(reader: Reader, key: str) -> Tensor:
        return _rotated(reader, tensors, key, changes[key], rotations)

    write_changed(source, out, tensors, rotated, {"tie_word_embeddings": False})
    orders = {name: (found.order, found.size) for name, found in rotations.items()}
    return RotationReport(len(tensors), untied, orders)


def read_plain(source: Path, done: str) -> tuple[PretrainedConfig, dict[str, DiskTensor]]:
    """Read the configuration and the headers of an unquantized checkpoint of one of :data:`FAMILIES`; a collective.
    ``done`` completes "cannot be ..." in error messages, such as "rotated".

    Raises:
        RankError: on every rank: the model is unknown or quantized; a tensor is missing, unknown or of another shape.
    """
    with errors_on_all_ranks(ValueError, OSError):
        config = read_config(source, trust_remote_code=False)
        if config.model_type not in FAMILIES:
            kind, families = config.model_type, ", ".join(FAMILIES)
            raise CheckpointError(f"{source}: model_type {kind} cannot be {done}, expected one of {families}")
        if is_quantized(source):
            raise CheckpointError(f"{source} is quantized, and cannot be {done}: take the unquantized checkpoint")
    empty = build_model(source, {}, dtype=torch.float32, device=torch.device("meta"), experts="per_expert")
    check_headers(empty, source)
    with errors_on_all_ranks(ValueError, OSError):
        return config, read_headers(source).tensors


def write_changed(
    source: Path,
    out: Path,
    tensors: Mapping[str, DiskTensor],
    changed: Callable[[Reader, str], Tensor],
    config: Mapping[str, Any],
) -> None:
    """Write a checkpoint like ``source`` to a new directory ``out``, in files of the same names, with one tensor in
    memory at a time. ``changed`` returns the tensor to write for each key of ``tensors``, of the shape and dtype of its
    header; ``config`` has values that replace those of config.json. Raises ValueError or OSError if ``out`` is not
    empty or the disk is full. After an error, also one of ``changed``, ``out`` is as it was."""
    files: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
    for key, tensor in tensors.items():
        assert tensor.dtype is not None, "the model has no such tensor"
        files.setdefault(tensor.file.name, {})[key] = (tensor.dtype, tensor.shape)
    total = sum(math.prod(shape) * dtype.itemsize for shapes in files.values() for dtype, shape in shapes.values())
    with closing(Aside(out, total)) as aside:
        with Reader() as reader, progress_bar(total, "write", "B") as bar:
            for file, shapes in files.items():
                with closing(ShardWriter(aside.path / file, shapes)) as writer:
                    for key in shapes:
                        written = changed(reader, key).contiguous()
                        writer.write(key, written)
                        bar.update(written.nbytes)
                    writer.finish()
        write_index(aside.path, files, total)
        write_json(read_json_object(source / "config.json") | dict(config), aside.path / "config.json")
        copy_companions(source, aside.path)
        aside.publish()


def _drop_copy_of_embedding(tensors: dict[str, DiskTensor]) -> None:
    """Remove a tied model's lm_head from ``tensors``: if it were written, transformers 5 would untie the model. Raises
    CheckpointError if lm_head differs from the embedding."""
    head, embedding = tensors.pop(HEAD, None), tensors[EMBEDDING]
    if head is None:
        return
    with Reader() as reader:
        same = torch.equal(read_tensor(reader, head), read_tensor(reader, embedding))
    if not same:
        raise CheckpointError(
            f"{head.file}: {HEAD} differs from {EMBEDDING}, though config.json ties them: remove {HEAD} from the file, "
            'or set "tie_word_embeddings": false in config.json'
        )


def _rotated(
    reader: Reader, tensors: Mapping[str, DiskTensor], key: str, change: Change, rotations: Mapping[str, Rotation]
) -> Tensor:
    """Compute a rotated tensor in the dtype of its file, in blocks of rows or columns that the rotation does not mix.
    Raises CheckpointError if the tensor has NaN or infinite values, which a rotation would spread over whole rows."""
    whole = read_tensor(reader, tensors[key])
    if change.ones:
        return torch.ones_like(whole)
    if change == Change():
        return whole
    if not whole.isfinite().all():
        raise CheckpointError(f"{tensors[key].file}: {tensors[key].key} holds NaN or infinite values: {AGAIN}")
    norm = None if change.norm is None else read_tensor(reader, tensors[change.norm]).double()
    values = whole.view(len(whole), -1)  # [rows, columns], also of a bias
    axis = 1 if change.rows == STREAM else 0
    inside = change.columns if axis else change.rows
    unit = rotations[inside].size if inside else 1
    step = max(1, FP64_CHUNK // values.shape[1 - axis] // unit) * unit
    for part in values.split(step, axis):
        wide = part.double()
        if norm is not None:
            wide *= norm
        if change.columns is not None:
            wide = rotations[change.columns].apply(wide, 1)
        if change.rows is not None:
            wide = rotations[change.rows].apply(wide, 0)
        part.copy_(wide)
    return whole


def smooth_checkpoint(
    source: Path, out: Path, text: Path, *, tokens: int, strength: float, device: torch.device
) -> tuple[int, int]:
    """Write ``source``, a plain Hugging Face checkpoint, with smoothed weights to a new directory ``out``: the same
    function, computed in fp64 and rounded once. Return the numbers of tensors written and of norms changed. Ranks share
    the model that reads the first ``tokens`` tokens of the UTF-8 file ``text`` (ZeRO-3), and rank 0 writes; a
    collective.

    ``strength`` is the exponent of the magnitudes: 0 changes nothing, and with 1 all features have the same magnitude.

    Raises:
        RankError: on every rank, before the model runs: ``out`` is not empty, the text has no tokens, the model is
            unknown or quantized, or a tensor is missing, unknown or of another shape. While writing: a weight is not
            finite in its dtype; the written files are then removed.
    """
    _, tensors = read_plain(source, "smoothed")
    with errors_on_all_ranks(ValueError, OSError):
        found = {key: change_of(key, str(source)).norm for key in tensors if key not in OUTSIDE}
        norms = {key: norm for key, norm in found.items() if norm is not None}
        if is_main():
            Aside(out, 0).close()
    maxima = measure_norm_outputs(source, sorted({*norms.values()}), text, tokens, device)
    factors = {key: smooth_factors(largest, strength) for key, largest in maxima.items()}
    factors |= {key: 1 / factors[norm] for key, norm in norms.items()}

    def smoothed(reader: Reader, key: str) -> Tensor:
        whole = read_tensor(reader, tensors[key])
        if key in factors:
            rows = whole.view(-1, len(factors[key]))  # a norm is one row
            for part in rows.split(max(1, FP64_CHUNK // rows.shape[1])):
                part.copy_(part.double() * factors[key])
            if not whole.isfinite().all():
                where = f"{tensors[key].file}: {key}"
                raise CheckpointError(f"{where} would leave the range of {whole.dtype}: set a lower --strength")
        return whole

    with errors_on_all_ranks(ValueError, OSError):
        if is_main():
            write_changed(source, out, tensors, smoothed, {})
    return len(tensors), len(maxima)


def measure_norm_outputs(
    source: Path, norms: Sequence[str], text: Path, tokens: int, device: torch.device
) -> dict[str, Tensor]:
    """Measure the outputs of norms, given by the keys of their weights, for the first ``tokens`` tokens of a text; a
    collective. Returns the largest magnitude of each feature, fp64 [features] in CPU memory, by key. Raises RankError
    on every rank if the checkpoint or the text cannot be read, or an output is not finite."""
    with errors_on_all_ranks(ValueError, OSError):
        sample = read_eval_text(text, load_tokenizer(source), tokens)
    model = load_for_evaluation(source, torch.bfloat16, device, sharded=world_size() > 1)
    maxima: dict[str, Tensor] = {}

    def watch(key: str, norm: nn.Module) -> None:
        def record(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
            largest = output.abs().flatten(0, -2).amax(0)
            maxima[key] = torch.maximum(maxima.get(key, largest), largest)

        norm.register_forward_hook(record)

    for name, module in model.body.named_modules():
        if (key := f"{name.removeprefix('module.')}.weight") in norms:  # the prefix: of DeepSpeed's engine
            watch(key, module)
    reference_of(model, rolling_windows(sample.token_ids, sample.prefix, default_length(model)), batch_size=1)
    # A MAX reduction may drop NaN; Inf survives it.
    found = {key: torch.where(maxima[key].isnan(), torch.inf, maxima[key]) for key in norms}
    found = {key: reduce_over_ranks(largest, dist.ReduceOp.MAX).double().cpu() for key, largest in found.items()}
    bad = [key for key, largest in found.items() if not largest.isfinite().all()]
    if bad:
        raise RankError(f"{source}: the outputs of {listed(bad, 3)} have NaN or Inf on {text}: check the checkpoint")
    return found


def smooth_factors(maxima: Tensor, strength: float) -> Tensor:
    """Compute the factors of features, ``(geometric mean of maxima / maxima) ** strength``, fp64 ``[features]``.

    ``maxima`` are the features' largest magnitudes. A feature that was always zero has factor 1, and is left out of
    the mean.
    """
    logs = maxima.log()
    factors = torch.exp(strength * (logs[maxima > 0].mean() - logs))
    return torch.where(maxima > 0, factors, torch.ones_like(factors))
