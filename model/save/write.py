"""Gather modules on rank 0, pack them, and write them into the shards of the plan."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from model.checkpoint.safetensors import SINGLE, DiskTensor, Reader
from model.console import progress_bar
from model.disk_errors import words_of
from model.quantized.tensor import QuantizedTensor, chunks_of
from model.ranks import errors_on_all_ranks, is_main, raise_everywhere
from model.save.plan import Item
from model.save.shard_writer import ShardWriter
from model.zero import ReceiveBuffer, batches, gathered_on_main
from quant import QuantLayer, QuantLinear
from quant.formats.compressed_tensors import TrainedLinear, cache_scale
from quant.formats.layouts import BLOCK_ENDS, linear_tensors
from quant.kv_cache import QuantCache
from quant.rotation import KEY, stored_matrix

# Size of parameters gathered together. Larger batches are slower: a large batch cannot arrive while a small one is
# written.
GATHER_BYTES = 32 * 2**20


@dataclass
class BufferedBytes:
    """Counter of the bytes of tensors on this rank, with their peak."""

    now: int = 0
    peak: int = 0

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


Writers = Callable[[Path, list[Item]], ShardWriter]


def safetensors_file(path: Path, items: list[Item]) -> ShardWriter:
    """Open a safetensors file for these items."""
    return ShardWriter(path, {key: shape for item in items for key, shape in item.shapes.items()})


def write_shards(
    shards: list[list[Item]], directory: Path, single: str = SINGLE, writer: Writers = safetensors_file
) -> tuple[list[str], int]:
    """Gather the plan's modules in order; rank 0 packs and writes them. A collective.

    Args:
        shards: shards of the plan.
        directory: output directory.
        single: file name if there is only one file.
        writer: opens a file.

    Returns:
        The files' names, and the peak bytes of tensors on this rank.

    Raises:
        RankError: on every rank, after the last collective of a file that rank 0 could not write.
    """
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
    """Write one file; ``shard`` has its items in batches to gather together."""
    output = _Output(path, [item for batch in shard for item in batch], held, writer) if is_main() else None
    gathered = gathered_on_main(_parameters(shard), buffer)
    for batch, coming, _ in zip(shard, [*shard[1:], []], gathered, strict=True):
        if output is not None:
            held.add(size := sum(item.gathered_bytes for item in (*batch, *coming)))
            output.write(batch)
            held.add(-size)
        progress.update(sum(item.bytes for item in batch))
    failure = output.finish() if output is not None else None
    # After any error in packing or writing, rank 0 kept gathering up to here, where all ranks stop.
    kind = "" if isinstance(failure, OSError) else f"{type(failure).__name__}: "
    try:
        raise_everywhere(None if failure is None else f"export failed in {path.name}: {kind}{words_of(failure)}")
    except RuntimeError as everywhere:
        raise everywhere from failure


class _Output:
    """File on rank 0. It raises nothing: :meth:`finish` returns the first error, after which nothing is written.

    An error of any kind must not be raised at once, as the other ranks are in the next gather.
    """

    def __init__(self, path: Path, shard: list[Item], held: BufferedBytes, writer: Writers) -> None:
        self._held = held
        self._failure: Exception | None = None
        self._writer: ShardWriter | None = None
        try:
            self._writer = writer(path, shard)
        except Exception as error:
            self._failure = error

    def write(self, batch: list[Item]) -> None:
        """Pack and write modules whose parameters are gathered."""
        if self._writer is None or self._failure is not None:
            return
        try:
            for item in batch:
                if item.copied is not None:
                    ((dtype, _),) = item.shapes.values()
                    self._copy(item.copied, dtype)
                for keys, stack in _stacks(item):
                    self._writer.write_stack(keys, stack.cpu())
                for key, start, part in _parts(item):
                    self._writer.write_part(key, start, part.cpu().contiguous())
                for tensors in _packed(item):
                    self._held.add(size := 0 if item.layout is None else sum(t.nbytes for t in tensors.values()))
                    for key, tensor in tensors.items():
                        self._writer.write(key, tensor)
                    self._held.add(-size)
        except Exception as error:
            self._failure = error

    def _copy(self, tensor: DiskTensor | QuantizedTensor, dtype: torch.dtype) -> None:
        assert self._writer is not None
        numel = math.prod(tensor.shape)
        with Reader(chunk_bytes=GATHER_BYTES) as reader:
            for start, values in chunks_of(tensor, reader, 0, torch.empty((), dtype=dtype).expand(numel)):
                self._held.add(values.nbytes)
                self._writer.write_part(tensor.key, start, values)
                self._held.add(-values.nbytes)
            if not numel:
                self._writer.write_part(tensor.key, 0, torch.empty(0, dtype=dtype))

    def finish(self) -> Exception | None:
        """Close the file, and return the first error, if any."""
        if self._writer is not None:
            try:
                if self._failure is None:
                    self._writer.finish()
            except Exception as error:
                self._failure = error
            self._writer.close()
        return self._failure


def _stacks(item: Item) -> Iterator[tuple[Sequence[str], torch.Tensor]]:
    """Yield the equal parts of a stacked item's only parameter, some MiB at a time: keys, and ``[keys, out, in]``."""
    if item.stacked:
        stack = item.parameters[0].detach()
        parts = stack.view(len(item.stacked), -1, stack.shape[-1])
        some = max(1, GATHER_BYTES // parts[0].nbytes)
        for begin in range(0, len(parts), some):
            yield item.stacked[begin : begin + some], parts[begin : begin + some]


def _parts(item: Item) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield the parts of tensors that are written in parts: key, first element, and values."""
    if item.layout == "gpt_oss":
        yield from _blocks(item)
        return
    for name, tensors in _weights(item) if item.joined else ():
        module, index = item.joined[name]
        for suffix, tensor in tensors.items():
            yield f"{module}.{suffix}", index * tensor.numel(), tensor
    start = dict.fromkeys(item.fused, 0)
    for experts in _experts(item) if item.fused else ():
        for stack in item.fused:
            part = torch.cat([experts[projection] for projection in stack.projections], dim=1)
            yield stack.key, start[stack], part.transpose(1, 2) if stack.turned else part
            start[stack] += part.numel()


def _blocks(item: Item) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield the parts of a stack in layout ``gpt_oss``: the codes and scales of each expert."""
    (stack,) = item.fused
    for index, (_, tensors) in enumerate(_weights(item)):
        for suffix, end in BLOCK_ENDS.items():
            yield stack.key + end, index * tensors[suffix].numel(), tensors[suffix]


def _experts(item: Item) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the Linears of a fused item, some experts at a time: ``[experts, out, in]`` by projection name."""
    projections: tuple[str, ...] = item.module.projections  # type: ignore[assignment, union-attr]
    if item.layout is None:
        stack = item.parameters[0].detach()
        some = max(1, GATHER_BYTES // max(1, stack[0].nbytes))
        for begin in range(0, len(stack), some):
            yield dict(zip(projections, stack[begin : begin + some].chunk(len(projections), dim=1), strict=True))
        return
    weights = (tensors["weight"] for _, tensors in _weights(item))
    for together in zip(*[weights] * len(projections), strict=True):
        yield {name: weight[None] for name, weight in zip(projections, together, strict=True)}


def _packed(item: Item) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of an item that is not stacked, in CPU memory, by key: all tensors of one Linear, or one plain
    tensor, at a time. A plain tensor on a CPU is the parameter's own memory, unless it is written transposed."""
    if isinstance(item.module, QuantCache):
        yield {item.name: cache_scale(item.name, item.module.input_scale())}
        return
    if item.layout is None:  # yields nothing for a stack
        for tensor, place in item.plain:
            matrix = tensor.detach().cpu()
            values = (matrix.t() if place.turned else matrix).contiguous().view(-1)
            yield {place.key: values[place.start : place.start + math.prod(place.shape)].view(place.shape)}
        return
    for name, tensors in _weights(item) if not (item.fused or item.joined) else ():
        if item.turned:
            tensors["weight"] = tensors["weight"].t().contiguous()
        if isinstance(layer := item.module, QuantLinear) and layer.rotation is not None:
            tensors[KEY] = stored_matrix(layer)
        yield {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}


def _weights(item: Item) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield each Linear on disk of a QuantLayer: its name, and its tensors by suffix, in CPU memory."""
    layer = item.module
    assert isinstance(layer, QuantLayer) and item.layout is not None
    scale = layer.scale_of_weight._replace(s0=layer.weight_scale(), theta=None)
    input_scale, weight = layer.input_scale(), layer.merged_weight()
    for name, part in item.linears.items():
        linear = TrainedLinear(
            name,
            part.weight(weight),
            part.of_scale(scale, layer.scheme.weights),
            input_scale,
            layer.bias,
            layer.scheme,
            layer.weight.dtype,
        )
        yield name, linear_tensors(item.layout, linear)
