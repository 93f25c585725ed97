"""Rotate a checkpoint by Hadamard matrices: one tensor in memory at a time, computed in fp64 and rounded once.

Hadamard matrices are orthogonal, with entries of equal magnitude. Such a matrix spreads an outlier over all values of
its row, so that one scale fits them all (QuaRot, arXiv 2404.00456, section 3). Orders are p 2^k, where p is 1 or an
order of Paley's two constructions: q + 1 for a prime q = 3 mod 4, and 2 (q + 1) for a prime q = 1 mod 4 (Paley, J.
Math. Phys. 12, 1933).

The residual stream h [n], a column vector, becomes Q^T h with an orthogonal Q [n, n]. The model computes the same
function if

- tensors that write to h are rotated: embeddings E Q, and outputs Q^T W and Q^T b of o_proj and down_proj;
- tensors that read from h are rotated back: W diag(g) Q, where g are the weights of the preceding RMSNorm. A norm with
  weights 1 commutes with Q^T, as Q preserves the mean of squares; so g is folded into W, and the norm's weights are 1.

The values v of a head become R^T v: v_proj has rows R^T W and biases R^T b, o_proj has columns W R. This preserves the
function, as attention sums values with weights that do not depend on the values. (SpinQuant, arXiv 2405.16406, section
3.1: R1 and R2.)

All this holds only for known tensor names and a known order of norms, and if no other module reads or writes the
residual stream. So only the families in :data:`FAMILIES` are accepted, for which the tests compare outputs before and
after a rotation.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PretrainedConfig

from model.build import read_config
from model.checkpoint.safetensors import (
    INDEX,
    Checkpoint,
    CheckpointError,
    DiskTensor,
    Reader,
    read_headers,
    read_tensor,
)
from model.console import progress_bar
from model.quantized.quantization_config import is_quantized, read_json_object
from model.save.aside import Aside
from model.save.finish import copy_companions, write_json
from model.save.shard_writer import ShardWriter
from quant.formats.compressed_tensors import Shapes

_CHUNK = 2**25  # fp64 values at a time: 256 MB, and one or two copies
WIDEST = 64  # largest power-of-two factor: H(4096) is H(64) x H(64), which takes 1/32 of the products


@dataclass(frozen=True)
class Rotation:
    """Orthogonal matrix ``Q = diag(signs) (I x H) / sqrt(order)`` [size, size], which is never stored as a whole.

    Attributes:
        size: number of rows and columns.
        order: order of the Hadamard matrix H; less than ``size`` if no H of that size is known: the rotation is then
            block-diagonal.
        signs: ``[size]`` fp64 of 1 and -1, so that a row of equal values does not become a single large value.
        factors: fp64 orthogonal matrices whose Kronecker product is H / sqrt(order).
    """

    size: int
    order: int
    signs: Tensor
    factors: tuple[Tensor, ...]

    def turn(self, values: Tensor, axis: int) -> Tensor:
        """Multiply runs of ``size`` values along ``axis``, each as a row, by Q.

        Args:
            values: fp64; ``size`` divides its length along ``axis``.
            axis: axis of ``values`` to rotate.
        """
        moved = values.movedim(axis, -1)
        turned = moved.reshape(-1, self.size) * self.signs
        sizes = [len(factor) for factor in self.factors]
        turned = turned.reshape(-1, *sizes)
        for index, factor in enumerate(self.factors, 1):
            turned = torch.tensordot(turned, factor, ([index], [0])).movedim(-1, index)
        return turned.reshape(moved.shape).movedim(-1, axis)


def rotation(size: int, seed: int) -> Rotation:
    """Create the rotation of ``size``, with signs drawn from ``seed``."""
    order, factors = _largest(size)
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    return Rotation(size, order, signs, factors)


def _largest(size: int) -> tuple[int, tuple[Tensor, ...]]:
    """Find the largest order dividing ``size`` with a known Hadamard matrix; return it and its factors."""
    for order in sorted((d for d in range(1, size + 1) if size % d == 0), reverse=True):
        twos = (order & -order).bit_length() - 1
        for rest in range(twos, -1, -1):  # as many factors of two as possible, which are cheap
            if (core := paley(order >> rest)) is not None:
                parts = [core] if len(core) > 1 else []
                while rest:
                    step = min(rest, WIDEST.bit_length() - 1)
                    parts.append(_power_of_two(step))
                    rest -= step
                return order, tuple(part / math.sqrt(len(part)) for part in parts)
    raise AssertionError("1 divides every size")


def paley(order: int) -> Tensor | None:
    """Construct a Hadamard matrix ``[order, order]``, fp64 of 1 and -1, by Paley; None if neither construction fits."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if order % 4:
        return None
    if _is_prime(order - 1):  # 3 mod 4
        matrix = _bordered(order - 1)
        matrix[1:, 0] = -1
        return matrix + torch.eye(order, dtype=torch.float64)
    if order // 2 % 4 == 2 and _is_prime(order // 2 - 1):  # 1 mod 4
        matrix, identity = _bordered(order // 2 - 1), torch.eye(order // 2, dtype=torch.float64)
        pairs = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        others = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(matrix, pairs) + torch.kron(identity, others)
    return None


def _bordered(prime: int) -> Tensor:
    """Build the Jacobsthal matrix of quadratic characters of ``i - j`` mod ``prime``, with a row of ones on top and a
    column of ones on the left."""
    squares = {value * value % prime for value in range(1, prime)}
    character = torch.tensor([0.0] + [1.0 if value in squares else -1.0 for value in range(1, prime)]).double()
    index = torch.arange(prime)
    matrix = torch.ones(prime + 1, prime + 1, dtype=torch.float64)
    matrix[0, 0] = 0
    matrix[1:, 1:] = character[(index[:, None] - index[None]) % prime]
    return matrix


def _power_of_two(exponent: int) -> Tensor:
    """Build Sylvester's Hadamard matrix of order ``2^exponent``, fp64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(exponent):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<name>.+)")
STREAM, VALUES = "stream", "values"  # the two rotations

INPUT, MIDDLE = "input_layernorm.weight", "post_attention_layernorm.weight"
_NORMS = (INPUT, MIDDLE)
_BLOCK = r"(mlp|block_sparse_moe)\."
READS = {
    r"self_attn\.[qk]_proj\.weight": INPUT,
    rf"{_BLOCK}((experts\.\d+|shared_expert)\.)?(gate_proj|up_proj|w1|w3)\.weight": MIDDLE,
    rf"{_BLOCK}(gate|shared_expert_gate)\.weight": MIDDLE,
}
WRITES = rf"{_BLOCK}((experts\.\d+|shared_expert)\.)?(down_proj|w2)\.(weight|bias)|self_attn\.o_proj\.bias"
VALUE, OUTPUT = r"self_attn\.v_proj\.(weight|bias)", r"self_attn\.o_proj\.weight"
_KEPT = r"self_attn\.([qk]_proj\.bias|[qk]_norm\.weight|rotary_emb\.inv_freq)|mlp\.(gate|up)_proj\.bias"


@dataclass(frozen=True)
class Change:
    """Change of one tensor.

    Attributes:
        norm: key of the RMSNorm whose weights multiply the columns.
        rows: rotation of the first axis, STREAM or VALUES.
        columns: rotation of the last axis, STREAM or VALUES.
        ones: True if the tensor is the weight of a norm that is folded into other weights: it becomes ones.
    """

    norm: str | None = None
    rows: str | None = None
    columns: str | None = None
    ones: bool = False


def check_family(config: PretrainedConfig, where: str, *, quantized: bool) -> None:
    """Reject a model for which a rotation is not known to preserve the function.

    Raises:
        CheckpointError: the model is quantized or of another family; the text names the directory and the supported
            families.
    """
    if config.model_type not in FAMILIES:
        families = ", ".join(FAMILIES)
        raise CheckpointError(f"{where}: a rotation of {config.model_type} is not known; expected one of {families}")
    if quantized:
        raise CheckpointError(f"{where} is quantized: rotate the checkpoint that it was made from")


def plan_rotation(tensors: Mapping[str, DiskTensor], config: PretrainedConfig, where: str) -> dict[str, Change]:
    """Plan the change of each tensor of the files; a tied lm_head must not be among them.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or is unknown in these families; the text names it.
    """
    changes = {key: _change(key, where) for key in tensors}
    missing = [key for key in _needed(config) if key not in tensors]
    if missing:
        raise CheckpointError(f"{where} lacks {missing[0]}, and {len(missing) - 1} more tensors of its config.json")
    for key, change in changes.items():
        if change != Change():
            _check_tensor(tensors[key], change, config)
    return changes


def head_dim(config: PretrainedConfig) -> int:
    """Return the number of values of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _change(key: str, where: str) -> Change:
    """Look up the change of a tensor by its name."""
    whole = {EMBEDDING: Change(columns=STREAM), HEAD: Change(norm=NORM, columns=STREAM), NORM: Change(ones=True)}
    if key in whole:
        return whole[key]
    if (found := _LAYER.fullmatch(key)) is not None:
        prefix, name = f"model.layers.{found['layer']}.", found["name"]
        if name in _NORMS:
            return Change(ones=True)
        for pattern, norm in READS.items():
            if re.fullmatch(pattern, name):
                return Change(norm=prefix + norm, columns=STREAM)
        if re.fullmatch(WRITES, name):
            return Change(rows=STREAM)
        if value := re.fullmatch(VALUE, name):
            return Change(prefix + INPUT, VALUES, STREAM) if value[1] == "weight" else Change(rows=VALUES)
        if re.fullmatch(OUTPUT, name):
            return Change(rows=STREAM, columns=VALUES)
        if re.fullmatch(_KEPT, name):
            return Change()
    raise CheckpointError(
        f"{where}: {key} has no place in {', '.join(FAMILIES)}: what a rotation makes of it is unknown"
    )


def _needed(config: PretrainedConfig) -> Iterator[str]:
    """Yield the keys of the tensors that all families have; readers of the rotated checkpoint check all others."""
    yield from (EMBEDDING, NORM, *([] if config.tie_word_embeddings else [HEAD]))
    for layer in range(config.num_hidden_layers):
        linears = [f"self_attn.{part}_proj.weight" for part in "qkvo"]
        yield from (f"model.layers.{layer}.{name}" for name in (*_NORMS, *linears))


def _check_tensor(tensor: DiskTensor, change: Change, config: PretrainedConfig) -> None:
    """Check that a tensor is of a float type and that its rotated axes have the lengths of config.json."""
    if tensor.dtype is None or not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
        raise CheckpointError(f"{tensor.file}: {tensor.key} is {tensor.kind}, expected floats of 16 bits or more")
    hidden, size = config.hidden_size, head_dim(config)
    lengths = {(STREAM, 0): hidden, (STREAM, -1): hidden}
    lengths |= {(VALUES, 0): config.num_key_value_heads * size, (VALUES, -1): config.num_attention_heads * size}
    axes = [(change.rows, 0), (change.columns, -1)]
    expected = [(axis, lengths[kind, axis]) for kind, axis in axes if kind is not None]
    if change.ones:
        expected = [(0, hidden)]
    flat = change.ones or tensor.key.endswith("bias")
    if len(tensor.shape) != (1 if flat else 2) or any(tensor.shape[axis] != length for axis, length in expected):
        said = ", ".join(f"{length} in {'rows' if axis == 0 else 'columns'}" for axis, length in expected)
        raise CheckpointError(f"{tensor.file}: {tensor.key} has the shape {list(tensor.shape)}, expected {said}")


@dataclass(frozen=True)
class RotationReport:
    """Result of a rotation.

    Attributes:
        tensors: number of tensors written.
        untied: True if lm_head was tied to the embedding, and is now a separate tensor.
        orders: order of the Hadamard matrix and size of the rotation, by rotation.
    """

    tensors: int
    untied: bool
    orders: Mapping[str, tuple[int, int]]


def rotate_checkpoint(source: Path, out: Path, *, seed: int = 0, progress: bool = True) -> RotationReport:
    """Write ``source`` with rotated weights to ``out``. The model computes the same function, and dtypes are the same.

    Args:
        source: a plain Hugging Face checkpoint of one of :data:`FAMILIES`.
        out: directory to create.
        seed: seed of the signs of both rotations.
        progress: show a progress bar.

    Raises:
        CheckpointError, ValueError, OSError: before anything is written: the model is unknown or quantized, or a tensor
            is missing, unknown or of another shape. While writing: values are not finite; the written files are then
            removed.
    """
    config = read_config(source, trust_remote_code=False)
    check_family(config, str(source), quantized=is_quantized(source))
    checkpoint = read_headers(source)
    if checkpoint.problems:
        raise CheckpointError(checkpoint.problems[0])
    untied = bool(config.tie_word_embeddings)
    if untied:
        _drop_copy_of_embedding(checkpoint.tensors)
    changes = plan_rotation(checkpoint.tensors, config, str(source))
    rotations = {STREAM: rotation(config.hidden_size, seed), VALUES: rotation(head_dim(config), seed + 1)}
    files = _files(checkpoint, untied)
    total = sum(math.prod(shape) * dtype.itemsize for shapes in files.values() for dtype, shape in shapes.values())
    with closing(Aside(out, total)) as aside:
        with (
            Reader() as reader,
            progress_bar(total, "rotate", "B", shown=progress) as bar,
        ):
            work = _Work(reader, checkpoint.tensors, changes, rotations)
            for file, shapes in files.items():
                _write(aside.path / file, shapes, work, bar)
        if len(files) > 1:
            places = {key: file for file, shapes in files.items() for key in shapes}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            write_json(index, aside.path / INDEX)
        said = read_json_object(source / "config.json")
        write_json(said | {"tie_word_embeddings": False}, aside.path / "config.json")
        copy_companions(source, aside.path)
        aside.publish()
    orders = {name: (turned.order, turned.size) for name, turned in rotations.items()}
    return RotationReport(sum(map(len, files.values())), untied, orders)


@dataclass(frozen=True)
class _Work:
    """Inputs from which rotated tensors are computed."""

    reader: Reader
    tensors: Mapping[str, DiskTensor]
    changes: Mapping[str, Change]
    rotations: Mapping[str, Rotation]

    def tensor(self, key: str) -> Tensor:
        """Compute a tensor of the rotated checkpoint, in the dtype of its file.

        Raises:
            CheckpointError: the tensor has NaN or infinite values, which a rotation would spread over whole rows.
        """
        tied = key not in self.tensors
        source = self.tensors[EMBEDDING if tied else key]
        change = Change(norm=NORM, columns=STREAM) if tied else self.changes[key]
        values = read_tensor(self.reader, source)
        if change.ones:
            return torch.ones_like(values)
        if change == Change():
            return values
        if not values.isfinite().all():
            raise CheckpointError(f"{source.file}: {source.key} holds NaN or infinite values")
        norm = None if change.norm is None else read_tensor(self.reader, self.tensors[change.norm]).double()
        turned = _turned(values.view(len(values), -1), change, self.rotations, norm)
        return turned.view(values.shape)


def _drop_copy_of_embedding(tensors: dict[str, DiskTensor]) -> None:
    """Drop lm_head of a tied model if it equals the embedding. Readers disagree otherwise: transformers 5 unties it."""
    head, embedding = tensors.pop(HEAD, None), tensors.get(EMBEDDING)
    if head is None or embedding is None:
        return
    with Reader() as reader:
        same = head.shape == embedding.shape and torch.equal(read_tensor(reader, head), read_tensor(reader, embedding))
    if not same:
        raise CheckpointError(
            f"{head.file}: {HEAD} differs from {EMBEDDING}, and config.json ties them: remove the one that is not "
            "meant, or write tie_word_embeddings: false"
        )


def _turned(values: Tensor, change: Change, rotations: Mapping[str, Rotation], norm: Tensor | None) -> Tensor:
    """Rotate ``values`` [rows, columns] in place, in blocks along the axis that is not rotated as a whole."""
    axis = 1 if change.rows == STREAM else 0
    inside = change.columns if axis else change.rows
    unit = rotations[inside].size if inside else 1
    step = max(1, _CHUNK // values.shape[1 - axis] // unit) * unit
    for start in range(0, values.shape[axis], step):
        part = values.narrow(axis, start, min(step, values.shape[axis] - start))
        wide = part.double()
        if norm is not None:
            wide *= norm
        if change.columns is not None:
            wide = rotations[change.columns].turn(wide, 1)
        if change.rows is not None:
            wide = rotations[change.rows].turn(wide, 0)
        part.copy_(wide)
    return values


def _files(checkpoint: Checkpoint, untied: bool) -> dict[str, Shapes]:
    """Return dtypes and shapes of the tensors of each file to write: the source's tensors, and lm_head if
    ``untied``."""
    files: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
    for tensor in checkpoint.tensors.values():
        if tensor.dtype is None:
            raise CheckpointError(f"{tensor.file}: {tensor.key} has the dtype {tensor.kind}, which is not read")
        files.setdefault(tensor.file.name, {})[tensor.key] = (tensor.dtype, tensor.shape)
    if untied:
        embedding = checkpoint.tensors[EMBEDDING]
        files[max(files)][HEAD] = files[embedding.file.name][EMBEDDING]
    return files


def _write(path: Path, shapes: Shapes, work: _Work, bar: "tqdm[None]") -> None:
    writer = ShardWriter(path, shapes)
    try:
        for key in shapes:
            tensor = work.tensor(key)
            writer.write(key, tensor.contiguous())
            bar.update(tensor.nbytes)
        writer.finish()
    finally:
        writer.close()
