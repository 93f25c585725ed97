"""Write a rotated checkpoint: one tensor in memory at a time, computed in fp64 and rounded once."""

import json
import math
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

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
from model.quantized.config import is_quantized
from model.rotation import CHUNK
from model.save.finish import check_destination, copy_companions, publish, write_json
from model.save.shard_writer import ShardWriter
from quant.formats.compressed_tensors import Shapes
from tools.rotation.hadamard import Rotation, rotation
from tools.rotation.plan import EMBEDDING, HEAD, NORM, STREAM, VALUES, Change, check_family, head_dim, plan_rotation


@dataclass(frozen=True)
class RotationReport:
    """Result of a rotation.

    Attributes:
        tensors: number of tensors written.
        untied: lm_head was tied to the embedding, and is a separate tensor now.
        orders: per rotation, order of the Hadamard matrix and size of the rotation.
    """

    tensors: int
    untied: bool
    orders: Mapping[str, tuple[int, int]]


def rotate_checkpoint(source: Path, out: Path, *, seed: int = 0, progress: bool = True) -> RotationReport:
    """Write ``source`` with rotated weights to ``out``: the same function, in the same dtypes.

    Args:
        source: a plain Hugging Face checkpoint of one of ``plan.FAMILIES``.
        out: directory to create.
        seed: of the signs of both rotations.
        progress: show a progress bar.

    Raises:
        CheckpointError, ValueError, OSError: before anything is written: an unknown or a quantized model, a tensor
            that is missing, unknown or of another shape; while writing: values that are not finite. Nothing is left
            behind.
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
    check_destination(out, total, overwrite=False)
    aside = out.with_name(f"{out.name}.tmp-{secrets.token_hex(4)}")
    aside.mkdir()
    try:
        with (
            Reader() as reader,
            tqdm(total=total, unit="B", unit_scale=True, desc="rotate", disable=not progress) as bar,
        ):
            work = _Work(reader, checkpoint.tensors, changes, rotations)
            for file, shapes in files.items():
                _write(aside / file, shapes, work, bar)
        if len(files) > 1:
            places = {key: file for file, shapes in files.items() for key in shapes}
            write_json({"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}, aside / INDEX)
        said = json.loads((source / "config.json").read_text(encoding="utf-8"))
        write_json(said | {"tie_word_embeddings": False}, aside / "config.json")
        copy_companions(source, aside)
        publish(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # already gone after publishing
    orders = {name: (turned.order, turned.size) for name, turned in rotations.items()}
    return RotationReport(sum(map(len, files.values())), untied, orders)


@dataclass(frozen=True)
class _Work:
    """Inputs that rotated tensors are computed from."""

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
    """Rotate ``values`` [rows, columns] in place, blockwise along the axis that is not rotated as a whole."""
    axis = 1 if change.rows == STREAM else 0
    inside = change.columns if axis else change.rows
    unit = rotations[inside].size if inside else 1
    step = max(1, CHUNK // values.shape[1 - axis] // unit) * unit
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
    """Dtypes and shapes of the tensors of each file to write, equal to the source's; the last file has lm_head."""
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
