"""Read weights from safetensors files into (partitioned) parameters; quantized checkpoints are decoded on the way
(:mod:`model.quantized`).

``direct``: each rank reads exactly the bytes of its own partitions into them. The checkpoint is read once in total,
nothing is sent between ranks, and no rank allocates more than its partitions and one chunk. Must run before
``deepspeed.initialize`` (see :mod:`model.zero`).

``rank0``: rank 0 reads whole tensors in file order into gathered parameters, and DeepSpeed partitions them. It is meant
for storage that only one process should read, and as an independent check of ``direct``.

Both check all headers first: unless each tensor of the model would be filled exactly once, one error, on every rank,
names every problem. After loading and before saving, :func:`check_finite` finds parameters with NaN or infinities. A
forward may not show them: quantization clips an infinity to the largest value of the grid, most grids have no code for
NaN, and rows of an embedding may be unused.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from model.build import UNTIED
from model.checkpoint.names import (
    ROTARY_TABLES,
    DiskLayout,
    Names,
    TensorSlice,
    UnsupportedConversionError,
    own_tensors,
)
from model.checkpoint.safetensors import FLOATS, CheckpointError, DiskTensor, Reader, garbage_kept, warn_of_zero_tails
from model.console import progress_bar
from model.quantized.checkpoint import read_checkpoint
from model.quantized.quantize_on_load import in_codes
from model.quantized.tensor import QuantizedTensor, chunks_of, fill
from model.ranks import RankError, errors_on_all_ranks, is_main, listed, raise_everywhere, reduce_over_ranks, words_of
from model.zero import forget_secondary_copies, full_numel, gathered, local_data, local_range
from quant import SCALE_PARAMETERS
from quant.kernels import amax
from quant.packed_weight import packed_codes

# Kinds of problems of a checkpoint, as the error names them.
_DTYPE = "not bf16, fp16 or fp32, and no codes that its quantization_config explains"
_CONVERSION = "needs a conversion that is not supported"
_MISSING, _UNEXPECTED, _SHAPE, _TWICE = "missing", "unexpected", "of another shape", "found twice"
ProblemsByKind = dict[str, list[str]]


@dataclass(frozen=True)
class LoadReport:
    """Result of loading.

    Attributes:
        tensors: number of filled tensors; a tensor that is filled in several slices counts once for each.
        bytes: number of bytes that this rank read.
        seconds: wall time.
    """

    tensors: int
    bytes: int
    seconds: float

    def summary(self) -> str:
        """Format the report of rank 0 as one line for the log."""
        return f"{self.tensors} tensors, {self.bytes / 2**20:.1f} MiB read by rank 0 in {self.seconds:.2f} s"


class _Read(NamedTuple):
    """Slice of a tensor on disk, to be read into one tensor of the model. If ``filled_from`` is set, that key fills the
    tensor (it is tied), and this slice is only compared with it."""

    source: DiskTensor | QuantizedTensor
    piece: TensorSlice
    target: Tensor
    filled_from: str | None


@garbage_kept()
def load_weights(
    model: PreTrainedModel, path: str | Path, *, method: Literal["direct", "rank0"] = "direct"
) -> LoadReport:
    """Fill every parameter and persistent buffer of ``model``, except scales and adapters, from the safetensors files
    in the directory ``path``, cast to the parameter's dtype. A collective, before ``deepspeed.initialize``. With the
    method "direct" each rank reads its own partitions; with "rank0" rank 0 reads everything, and DeepSpeed partitions
    it.

    Raises:
        RankError: on every rank, naming the tensors: they are missing, unexpected, found twice, of another shape, of a
            dtype other than bf16, fp16 or fp32, in a damaged or absent file, or need an unsupported conversion; a
            packed weight has another format than on disk; tied tensors differ on disk; or weights have NaN or Inf.
    """
    begin = time.perf_counter()
    with errors_on_all_ranks(CheckpointError, OSError):
        reads = [in_codes(one, model) if one.target.is_meta else one for one in _plan(model, Path(path))]
        warn_of_zero_tails(Path(path))
    fill = {"direct": _fill_direct, "rank0": _fill_from_rank0}[method]
    total = _bytes_to_read(reads, method) if is_main() else None
    with progress_bar(total, "weights", "B") as bar, Reader(bar.update) as reader:
        fill(reads, reader)
        forget_secondary_copies(model)
        check_finite(model, f"the weights in {path} are not all numbers")
        return LoadReport(sum(read.filled_from is None for read in reads), reader.bytes, time.perf_counter() - begin)


def check_headers(model: PreTrainedModel, path: str | Path) -> None:
    """Check that the files in ``path`` would fill ``model``, whose weights need not be loaded; a collective that reads
    only headers. Raises RankError as :func:`load_weights`, except for problems of values or of packed weights."""
    with errors_on_all_ranks(CheckpointError, OSError):
        _plan(model, Path(path))


@torch.no_grad()
def _fill_direct(reads: list[_Read], reader: Reader) -> None:
    """Read each rank's own elements into its partitions. No collective runs meanwhile, as one rank may fail; at the
    end, errors are raised on all ranks."""
    with errors_on_all_ranks(CheckpointError, OSError):
        # A stack of experts is many reads.
        targets = {id(read.target): read.target for read in reads}
        own = {key: (local_range(target)[0], local_data(target)) for key, target in targets.items()}
        _check_tied([read for read in reads if not _transfer(read, reader, *own[id(read.target)])])


@torch.no_grad()
def _fill_from_rank0(reads: list[_Read], reader: Reader) -> None:
    """Read everything on rank 0 into gathered parameters. After an error, rank 0 continues to take part in all
    collectives and raises at the end."""
    error: str | None = None
    differing = []
    by_target: dict[int, list[_Read]] = {}  # gathers a stack of experts once, not once per expert
    for read in reads:
        by_target.setdefault(id(read.target), []).append(read)
    for together in by_target.values():
        target = together[0].target
        with gathered([target], modifier_rank=0):
            if is_main() and error is None:
                try:
                    differing += [read for read in together if not _transfer(read, reader, 0, target.detach().view(-1))]
                except (CheckpointError, OSError) as caught:
                    error = words_of(caught)
    raise_everywhere(error)
    with errors_on_all_ranks(CheckpointError):
        _check_tied(differing)


def _transfer(read: _Read, reader: Reader, start: int, values: Tensor) -> bool:
    """Fill ``values``, elements of the model's tensor from ``start`` on, with those that the slice on disk has. For a
    tied tensor, which another key has filled, only compare the two; return False if they differ."""
    piece = read.piece
    begin, end = _overlap(piece, start, start + values.numel())
    if begin == end:
        return True
    values, first = values[begin - start : end - start], begin - piece.start
    if piece.turned:  # a matrix that is transposed on disk is read whole, into a copy
        on_disk = torch.empty(piece.span, dtype=values.dtype)
        fill(read.source, reader, piece.offset, on_disk)
        chunks = iter([(0, piece.of(on_disk)[first : first + values.numel()])])
    elif read.filled_from is None:
        fill(read.source, reader, first + piece.offset, values)
        return True
    else:
        chunks = chunks_of(read.source, reader, first + piece.offset, values)
    equal = True
    for offset, chunk in chunks:
        mine = values[offset : offset + chunk.numel()]
        if read.filled_from is None:
            mine.copy_(chunk)
        else:
            equal &= torch.equal(chunk.cpu().to(mine.dtype).view(torch.uint8), mine.cpu().view(torch.uint8))
    return equal


def _overlap(piece: TensorSlice, start: int, stop: int) -> tuple[int, int]:
    """Intersect a slice with elements ``[start, stop)`` of the model's tensor: begin and end, which are equal if there
    are none."""
    begin = min(max(start, piece.start), stop)
    return begin, max(begin, min(stop, piece.start + piece.numel))


def _check_tied(differing: list[_Read]) -> None:
    """Raise CheckpointError if tied tensors differ on disk: choosing one of them would silently damage the model."""
    if pairs := [f"{read.source.key} and {read.filled_from}" for read in differing]:
        raise CheckpointError(
            f"{listed(pairs)} are tied by the configuration, but differ on disk. If they are meant to, set "
            "tie_word_embeddings to false in config.json"
        )


def _bytes_to_read(reads: list[_Read], method: str) -> int:
    """Count the bytes that this rank will read, for the progress bar."""
    total = 0
    for read in reads:
        start, stop = local_range(read.target) if method == "direct" else (0, full_numel(read.target))
        begin, end = _overlap(read.piece, start, stop)
        total += read.source.bytes_of(read.piece.span if read.piece.turned and begin < end else end - begin)
    return total


# ----------------------------------------------------------------------------------------------------------------------
# The plan: from headers only, the same on every rank
# ----------------------------------------------------------------------------------------------------------------------


def _plan(model: PreTrainedModel, path: Path) -> list[_Read]:
    """Plan the reads, in file order. Raises CheckpointError if the files do not have each tensor of the model exactly
    once; the message names every problem."""
    checkpoint = read_checkpoint(path, model)
    names = Names(model, {key: tensor.shape for key, tensor in checkpoint.tensors.items()})
    tensors = own_tensors(model)
    kinds = (_DTYPE, _CONVERSION, _MISSING, _UNEXPECTED, _SHAPE, _TWICE)
    problems: ProblemsByKind = {kind: [] for kind in kinds}
    layouts = _layouts(names, {*checkpoint.tensors, *checkpoint.lost}, problems)
    ignored = keys_left_unread(model)
    reads: list[_Read] = []
    # By identity, as a tied parameter has several names, and by start element: the name and the key that fills it.
    filled: dict[tuple[int, int], tuple[str, str]] = {}
    for key, source in checkpoint.tensors.items():
        layout = layouts.get(key)
        if layout is not None and _fits(source, layout, tensors, problems):
            for piece in layout.pieces:
                target = tensors[piece.name]
                name, by = filled.setdefault((id(target), piece.start), (piece.name, key))
                if by != key and name == piece.name:
                    problems[_TWICE].append(f"{names.linear(piece) or name} (in {by} and in {key})")
                reads.append(_Read(source, piece, target, by if by != key else None))
        elif key in layouts and layout is None and not (ignored.search(key) or names.is_left_out(key)):
            problems[_UNEXPECTED].append(key)
    if hasattr(model.config, UNTIED):  # the files of a tied model have one weight
        ends = (model.get_output_embeddings().weight, model.get_input_embeddings().weight)
        head, table = (next(name for name, tensor in tensors.items() if tensor is weight) for weight in ends)
        if (id(tensors[head]), 0) not in filled:
            twin = tensors.pop(head)
            copied = [read for read in reads if read.piece.name == table]
            reads += [read._replace(piece=read.piece._replace(name=head), target=twin) for read in copied]
    if not problems[_CONVERSION]:  # tensors that a conversion would make are not missing
        missing = missing_keys(names, tensors, layouts)
        problems[_MISSING] += [key for key in missing if not checkpoint.is_damaged(key)]
    lines = [f"file: {problem}" for problem in checkpoint.problems[:20]]
    lines += [f"{kind}: {listed(found)}" for kind, found in problems.items() if found]
    if lines:
        between = " " if len(lines) == 1 else "\n"
        raise CheckpointError(between.join([f"the weights in {path} do not fill {type(model).__name__}:", *lines]))
    return reads


def missing_keys(names: Names, tensors: Mapping[str, Tensor], layouts: Mapping[str, DiskLayout | None]) -> list[str]:
    """List the keys of a checkpoint, of whole tensors or of slices, that the model needs but the files lack; for a tied
    tensor the key of its first name.

    Args:
        names: translator for the model.
        tensors: the model's tensors by name (:func:`own_tensors`).
        layouts: layout of each key in the files; None for a key that belongs to no tensor of the model.
    """
    present: dict[int, dict[int, int]] = {}  # by identity: number of elements by start element
    for piece in (piece for layout in layouts.values() if layout for piece in layout.pieces):
        present.setdefault(id(tensors[piece.name]), {})[piece.start] = piece.numel
    missing: list[str] = []
    unique = {id(tensor): name for name, tensor in reversed(list(tensors.items()))}
    for identity, name in reversed(unique.items()):
        there = present.get(identity, {})
        if sum(there.values()) < full_numel(tensors[name]):
            missing += names.missing(name, there.keys())
    return missing


def _layouts(names: Names, keys: set[str], problems: ProblemsByKind) -> dict[str, DiskLayout | None]:
    """Find the layout of each key. Keys are processed in transformers' order, on which some of its renaming rules
    depend; unsupported keys are added to ``problems``."""
    layouts: dict[str, DiskLayout | None] = {}
    for key in sorted(keys, key=dot_natural_key):
        try:
            layouts[key] = names.layout(key)
        except UnsupportedConversionError as error:
            problems[_CONVERSION].append(str(error))
    return layouts


def _fits(
    source: DiskTensor | QuantizedTensor, layout: DiskLayout, tensors: dict[str, Tensor], problems: ProblemsByKind
) -> bool:
    """Return True if the model can use a tensor's shape and dtype on disk; otherwise add the reason to ``problems``."""
    dtypes = {tensors[piece.name].dtype for piece in layout.pieces}
    if source.shape != layout.shape:
        problems[_SHAPE].append(f"{source.key} is {list(source.shape)}, the model has {list(layout.shape)}")
    elif source.dtype in FLOATS if all(dtype.is_floating_point for dtype in dtypes) else dtypes == {source.dtype}:
        return True
    else:
        problems[_DTYPE].append(f"{source.key} ({source.kind})")
    return False


def keys_left_unread(model: PreTrainedModel) -> re.Pattern[str]:
    """Return a pattern for keys in a checkpoint that are no error although the model does not read them: those that
    the model's class lists (``_keys_to_ignore_on_load_unexpected``), and buffers that the model computes."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), ROTARY_TABLES]
    patterns += [f"^{re.escape(name)}$" for name, _ in model.named_non_persistent_buffers()]
    return re.compile("|".join(f"({pattern})" for pattern in patterns))


def check_finite(model: nn.Module, said: str) -> None:
    """Raise RankError, on every rank, if parameters have NaN or Inf; the message begins with ``said`` and names them. A
    collective without gathering. Excludes packed weights, and frozen scales, which are NaN until filled and are checked
    whenever they are read or written."""
    named = {
        name: own
        for name, own in model.named_parameters()
        if packed_codes(own) is None and (own.requires_grad or not name.endswith(SCALE_PARAMETERS))
    }
    largest = torch.cat([amax(local_data(own)) for own in named.values()]).nan_to_num(torch.inf, torch.inf)
    finite = reduce_over_ranks(largest, dist.ReduceOp.MAX).isfinite().tolist()
    if broken := [name for name, good in zip(named, finite, strict=True) if not good]:
        raise RankError(f"{said}: NaN or Inf in {listed(broken, 5)}")
