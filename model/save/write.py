"""Gather modules on rank 0, pack them, and write them into the planned files."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from model.checkpoint.safetensors import Reader, read_tensor
from model.console import progress_bar
from model.quantized.tensor import chunks_of
from model.ranks import errors_on_all_ranks, is_main, raise_everywhere, words_of
from model.save.plan import Item, inverse_of
from model.save.shard_writer import ShardWriter, safetensors_head
from model.zero import ReceiveBuffer, batches, gathered_on_main
from quant import QuantLayer, QuantLinear
from quant.attention import QuantCache
from quant.formats.compressed_tensors import TrainedLinear, cache_scale, dequantized_weight
from quant.formats.layouts import BLOCK_ENDS, linear_tensors
from quant.rotation import KEY, stored_matrix

# Bytes of parameters gathered together. Larger batches are slower: a large batch cannot arrive while a small one is
# written.
GATHER_BYTES = 32 * 2**20


@dataclass
class BufferedBytes:
    """Counter of the bytes of tensors that this rank holds now, and of their peak."""

    now: int = 0
    peak: int = 0

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


Writers = Callable[[Path, list[Item]], ShardWriter]


def safetensors_file(path: Path, items: list[Item], metadata: Mapping[str, str] | None = None) -> ShardWriter:
    """Create a safetensors file for the tensors of ``items``, and write its header with ``metadata``."""
    shapes = {key: shape for item in items for key, shape in item.shapes.items()}
    return ShardWriter(path, shapes, safetensors_head(shapes, metadata))


def write_shards(shards: list[list[Item]], directory: Path, single: str, writer: Writers) -> tuple[list[str], int]:
    """Gather the modules of ``shards``, the items of each file, in order; rank 0 packs them, and writes them into files
    that ``writer`` creates in ``directory``. A collective. A single file is called ``single``. Returns the files'
    names, and the peak bytes of gathered and packed tensors on this rank. Raises RankError, on every rank, if rank 0
    lacks memory, or could not write a file (after the gathers of this file)."""
    limit = min(GATHER_BYTES, max(item.gathered_bytes for shard in shards for item in shard))
    by_shard = [list(batches(shard, lambda item: item.gathered_bytes, limit)) for shard in shards]
    held, buffer = BufferedBytes(), ReceiveBuffer()
    with errors_on_all_ranks(RuntimeError):  # torch's out-of-memory error
        if is_main():
            for shard in by_shard:
                buffer.reserve(_parameters(shard))
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [single]
    total = sum(item.bytes for shard in shards for item in shard)
    with progress_bar(total, "export", "B") as progress:
        for file, shard in zip(files, by_shard, strict=True):
            _write_shard(directory / file, shard, buffer, held, progress, writer)
    return files, held.peak


def _parameters(shard: list[list[Item]]) -> list[list[nn.Parameter]]:
    """Return the parameters to gather for each batch of a shard."""
    return [[parameter for item in batch for parameter in item.parameters] for batch in shard]


def _write_shard(
    path: Path,
    shard: list[list[Item]],
    buffer: ReceiveBuffer,
    held: BufferedBytes,
    progress: tqdm,
    writer: Writers,
) -> None:
    """Write one file; ``shard`` has its items in batches to gather together. A collective.

    After an error in packing or writing, rank 0 keeps gathering up to the end of the file, where all ranks raise
    RankError.
    """
    output: ShardWriter | None = None
    errors: list[Exception] = []
    if is_main():
        with _added_to(errors):
            output = writer(path, [item for batch in shard for item in batch])
    gathered = gathered_on_main(_parameters(shard), buffer)
    for batch, coming, _ in zip(shard, [*shard[1:], []], gathered, strict=True):
        if output is not None and not errors:
            held.add(size := sum(item.gathered_bytes for item in (*batch, *coming)))
            with _added_to(errors):
                for item in batch:
                    _write(item, output, held)
            held.add(-size)
        progress.update(sum(item.bytes for item in batch))
    if output is not None:
        with _added_to(errors):
            if not errors:
                output.finish()
        output.close()
    failure = errors[0] if errors else None
    kind = "" if isinstance(failure, OSError) else f"{type(failure).__name__}: "
    try:
        raise_everywhere(None if failure is None else f"export failed in {path.name}: {kind}{words_of(failure)}")
    except RuntimeError as everywhere:
        raise everywhere from failure


@contextmanager
def _added_to(errors: list[Exception]) -> Iterator[None]:
    """Append an exception of the block to ``errors`` instead of raising it: the other ranks already wait in the next
    gather."""
    try:
        yield
    except Exception as error:
        errors.append(error)


def _write(item: Item, output: ShardWriter, held: BufferedBytes) -> None:
    """Pack the tensors of an item whose parameters are gathered, and write them."""
    if item.copied is not None:
        _copy(item, output, held)
    elif isinstance(item.module, QuantCache):
        dtype, shape = item.shapes[item.name]
        output.write(item.name, cache_scale(item.name, item.module.input_scale()).view(shape).to(dtype))
    elif item.fused and not item.joined:
        _write_fused(item, output, held)
    elif item.layout is not None:
        for name, tensors in _packed(item, held):
            prefix, index = item.joined.get(name, (name, 0))
            for suffix, tensor in tensors.items():
                if item.joined:
                    end = BLOCK_ENDS.get(suffix, f".{suffix}")
                    output.write_part(f"{prefix}{end}", index * tensor.numel(), tensor.contiguous())
                else:
                    key = f"{prefix}.{suffix}"
                    key = key if key in item.shapes else inverse_of(key)
                    if key in item.kept:
                        with Reader() as reader:
                            tensor = read_tensor(reader, item.kept[key])
                    _write_whole(item, key, tensor, output, held)
    else:
        for name, weight in _plain_weights(item):
            _write_whole(item, f"{name}.weight", weight.cpu().contiguous(), output, held)
        for tensor, place in item.plain:  # on a CPU this is the parameter's own memory, unless it is transposed
            matrix = tensor.detach().cpu()
            values = (matrix.t() if place.turned else matrix).contiguous().view(-1)
            _write_whole(item, place.key, values[place.start : place.start + math.prod(place.shape)], output, held)


def _write_whole(item: Item, key: str, values: Tensor, output: ShardWriter, held: BufferedBytes) -> None:
    """Write a contiguous tensor in CPU memory in the planned shape and dtype."""
    dtype, shape = item.shapes[key]
    if key in item.rounded:
        _write_rounded(item, key, 0, values, output, held)
    else:
        output.write(key, values.view(shape).to(dtype))


def _write_rounded(item: Item, key: str, start: int, values: Tensor, output: ShardWriter, held: BufferedBytes) -> None:
    """Write contiguous ``values`` to the tensor ``key``, from element ``start`` on, in the source's dtype. A value that
    still equals the source's, rounded to the model's dtype, is written as the source has it."""
    dtype, source = item.shapes[key][0], item.rounded[key]
    with Reader() as reader:
        for own in values.view(-1).split(GATHER_BYTES // dtype.itemsize):
            exact = torch.empty(own.numel(), dtype=dtype)
            reader.read(source, start, exact)
            held.add(size := 2 * exact.nbytes)
            output.write_part(key, start, torch.where(exact.to(own.dtype) == own, exact, own.to(dtype)))
            held.add(-size)
            start += own.numel()


def _copy(item: Item, output: ShardWriter, held: BufferedBytes) -> None:
    """Copy a tensor of the source checkpoint to the output, some MiB at a time: decoded if it is quantized and
    ``item.stored`` is empty."""
    assert item.copied is not None
    with Reader(chunk_bytes=GATHER_BYTES) as reader:
        for (key, (dtype, shape)), tensor in zip(item.shapes.items(), item.stored or (item.copied,), strict=True):
            if not math.prod(shape):
                output.write(key, torch.empty(shape, dtype=dtype))
                continue
            for start, values in chunks_of(tensor, reader, 0, torch.empty((), dtype=dtype).expand(math.prod(shape))):
                held.add(values.nbytes)
                output.write_part(key, start, values)
                held.add(-values.nbytes)


def _write_fused(item: Item, output: ShardWriter, held: BufferedBytes) -> None:
    """Write an item of experts to tensors that each contain all experts, one expert at a time."""
    projections: tuple[str, ...] = item.module.projections  # type: ignore[assignment, union-attr]
    weights = _plain_weights(item)
    if item.layout is not None:
        weights = ((name, tensors["weight"]) for name, tensors in _packed(item, held))
    start = dict.fromkeys(item.fused, 0)
    for expert in zip(*[weights] * len(projections), strict=True):
        own = {projection: weight for projection, (_, weight) in zip(projections, expert, strict=True)}
        for stack in item.fused:
            part = torch.cat([own[projection] for projection in stack.projections])
            part = (part.t() if stack.turned else part).cpu().contiguous()
            if stack.key in item.rounded:
                _write_rounded(item, stack.key, start[stack], part, output, held)
            else:
                output.write_part(stack.key, start[stack], part.to(item.shapes[stack.key][0]))
            start[stack] += part.numel()


def _plain_weights(item: Item) -> Iterator[tuple[str, Tensor]]:
    """Yield the name on disk and the weight of each expert's Linears, for an unquantized stack of experts."""
    for name, part in item.linears.items():
        yield name, part.weight(item.parameters[0].detach())


def _packed(item: Item, held: BufferedBytes) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield each Linear on disk of a QuantLayer: its name, and its tensors by suffix, in CPU memory."""
    layer = item.module
    assert isinstance(layer, QuantLayer) and item.layout is not None
    scale = layer.scale_of_weight._replace(s0=layer.weight_scale(), theta=None)
    input_scale, spec = layer.input_scale(), layer.scheme.weights
    codes = layer.held is not None and layer.adapter is None
    whole = layer.held.unpack(layer.weight) if codes and layer.held else layer.merged_weight()
    for name, part in item.linears.items():
        weight, of_part = part.weight(whole), part.of_scale(scale, spec)
        if codes:  # values in fp32 have the same codes, values in the model's dtype may round to others
            weight = dequantized_weight(weight, of_part.s0, spec, zero=of_part.zero).to(weight.device)
        linear = TrainedLinear(name, weight, of_part, input_scale, layer.bias, layer.scheme, layer.weight.dtype)
        own = {key.rpartition(".")[2]: one for key, one in item.source.items() if key.rpartition(".")[0] == name}
        with Reader() as reader:
            of_source = {suffix: read_tensor(reader, one).float() for suffix, one in own.items()}
        tensors = linear_tensors(item.layout, linear, of_source)
        if item.turned:
            tensors["weight"] = tensors["weight"].t().contiguous()
        if isinstance(layer, QuantLinear) and layer.rotation is not None:
            tensors[KEY] = stored_matrix(layer)
        held.add(size := sum(tensor.nbytes for tensor in tensors.values()))
        yield name, tensors
        held.add(-size)
