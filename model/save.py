"""Write a checkpoint while its parameters stream past.

Under ZeRO-3 nobody holds the model, and collecting a state dict on rank 0 would need the whole of it there. So every
rank first makes the same plan from names and sizes alone (which tensors each module becomes on disk, and in which shard
each lies), then all ranks send their partitions of the modules to rank 0 in that order, and rank 0 packs each one and
writes it to its place, while the next ones come. It holds the modules that are gathered at a time and those that come,
each no more than the largest takes, and one Linear as packed; the other ranks hold nothing.

Two things follow from the plan. Ranks know the shard boundaries, so they agree after each shard whether writing went
well: a full disk is an error on every rank instead of a hang in the next gather. And the number of shards is known at
the start, so files get their final names at once.

The directory is written aside, as ``<out_dir>.tmp-<random>``, and renamed when everything in it is on disk: an export
that was interrupted never looks complete.
"""

import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from model.load import garbage_kept
from model.names import Names, module_name_on_disk
from model.ranks import errors_on_all_ranks, is_main, raise_everywhere
from model.scales import cache_keys
from model.shard_writer import ShardWriter
from model.shards import INDEX, SINGLE
from model.zero import ReceiveBuffer, full_numel, full_shape, gathered_on_main, is_partitioned, is_whole
from quant.embedding import QuantEmbedding
from quant.experts import LinearPart, StackedLinear, linears_of
from quant.export import Shapes, cache_scale
from quant.kv_cache import QuantCache
from quant.layer import SCALE_PARAMETERS, QuantLayer
from quant.layouts import Layout, check_layout, layout_config, linear_shapes, linear_tensors
from quant.quantization import Quantization
from quant.spec import FP8_TENSOR

# Everything beside the weights that a reader of the checkpoint needs: tokenizer, chat template, generation defaults,
# remote code.
COPIED = (
    "generation_config.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates",
    "*.py",
    "LICENSE*",
)


# Of parameters that are gathered together. Less is slower: a large one cannot come while a few small ones are written.
GATHER_BYTES = 32 * 2**20


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    Attributes:
        path: the finished directory.
        files: names of the weight files, in order.
        tensors: number of tensors in them.
        bytes: their sizes together, headers excluded.
        seconds: wall time.
        peak_bytes: the most bytes of tensors that this rank held at a time, gathered and packed; counted, not measured.
            0 on all but rank 0.
    """

    path: Path
    files: list[str]
    tensors: int
    bytes: int
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class _Item:
    """One module's own tensors: what must be gathered, and what it becomes on disk."""

    name: str
    module: nn.Module
    parameters: list[nn.Parameter]  # to be gathered
    shapes: Shapes  # key on disk -> what will be written
    layout: Layout | None = None  # of a QuantLayer; None: written as it is
    linears: Mapping[str, LinearPart] = field(default_factory=dict)  # of a QuantLayer, by name on disk
    plain: Mapping[str, torch.Tensor] = field(default_factory=dict)  # written as they are, by key: parameter or buffer
    stacked: tuple[str, ...] = ()  # keys of the equal parts of the module's only parameter, in their order

    @cached_property
    def bytes(self) -> int:
        """Bytes on disk."""
        return sum(_bytes(dtype, shape) for dtype, shape in self.shapes.values())

    @cached_property
    def gathered_bytes(self) -> int:
        """Bytes that gathering the parameters takes; nothing for those that are whole on every rank anyway."""
        return sum(full_numel(p) * p.element_size() for p in self.parameters if is_partitioned(p) and not is_whole(p))


@garbage_kept()
def export_model(
    model: PreTrainedModel,
    quantization: Quantization | None,
    source_dir: str | Path,
    out_dir: str | Path,
    *,
    layout: Layout = "compressed",
    max_shard_size: int = 5 * 10**9,
    overwrite: bool = False,
) -> ExportReport:
    """Write ``model`` as a checkpoint directory for transformers and, quantised, for vLLM and SGLang. A collective.

    Args:
        model: the model in training, partitioned or not; its parameters are read only.
        quantization: what ``quant.prepare`` returned. None writes every weight as it is, without scales: a plain
            checkpoint.
        source_dir: the checkpoint directory that the model was built from: its config.json is carried over, its
            tokenizer, chat template and generation config are copied.
        out_dir: the directory to make.
        layout: how its layers are written, see :mod:`quant.layouts`.
        max_shard_size: bytes of tensors in one file. A module's tensors stay together; a module larger than this gets a
            file of its own.
        overwrite: replace an ``out_dir`` that is not empty, as a whole, when the new one is complete.

    Raises:
        RankError: on every rank: the layout cannot hold a scheme, ``out_dir`` is there and not empty, the disk is too
            small or becomes full, a scale is unusable. Nothing is left at ``out_dir`` then (or what was there before).
    """
    begin = time.perf_counter()
    source, out = Path(source_dir), Path(out_dir)
    with errors_on_all_ranks(ValueError):
        if quantization is not None:
            check_layout(layout, (layer.scheme for layer in quantization.layers.values()))
        shards = list(_shards(_plan(model, quantization, layout), max_shard_size))
    total = sum(item.bytes for shard in shards for item in shard)
    aside = out.with_name(f"{out.name}.tmp-{secrets.token_hex(4)}")
    # Whatever goes wrong on rank 0 alone must reach the others, which are in the next collective already.
    with errors_on_all_ranks(Exception):
        if max_shard_size <= 0:
            raise ValueError(f"max_shard_size is {max_shard_size} bytes, expected at least 1")
        if is_main():
            _check_destination(source, out, total, overwrite)
            aside.mkdir()
    try:
        files, peak = _write_shards(shards, aside)
        with errors_on_all_ranks(Exception):
            if is_main():
                _write_index(shards, files, aside)
                _write_config(model, quantization, layout, source, aside)
                _copy_companions(source, aside)
                _publish(aside, out)
    finally:
        if is_main():
            shutil.rmtree(aside, ignore_errors=True)  # nothing there any more if it was published
    tensors = sum(len(item.shapes) for shard in shards for item in shard)
    return ExportReport(out, files, tensors, total, time.perf_counter() - begin, peak)


# ---------------------------------------------------------------------------------------------------------------------
# The plan: a pure function of names and sizes, the same on every rank
# ---------------------------------------------------------------------------------------------------------------------


def _plan(model: PreTrainedModel, quantization: Quantization | None, layout: Layout) -> list[_Item]:
    """Every module with tensors of its own, in module order. A tied parameter is written once, under its first name."""
    names = Names(model)
    seen: set[int] = set()
    items = []
    for name, module in model.named_modules():
        if quantization is not None and name in quantization.layers:
            items.append(_quantized_item(model, name, quantization.layers[name], layout))
        elif isinstance(module, QuantCache):
            if quantization is not None and layout != "dequantized":
                items.append(_cache_item(cache_keys(model, name)[0], module))
        elif getattr(module, "projections", ()):
            items.append(_stacked_item(model, name, module))
        else:
            items.append(_plain_item(names, name, module, seen))
    return [item for item in items if item.shapes]


def _quantized_item(model: PreTrainedModel, name: str, layer: QuantLayer, layout: Layout) -> _Item:
    dtype = layer.weight.dtype
    linears = {module_name_on_disk(model, part.name): part for part in linears_of(name, layer)}
    shapes: Shapes = {}
    for on_disk, part in linears.items():
        suffixes = linear_shapes(layout, part.in_features, part.out_features, layer.scheme, dtype)
        if layer.bias is not None:
            suffixes["bias"] = (dtype, (part.out_features,))
        shapes |= {f"{on_disk}.{suffix}": expected for suffix, expected in suffixes.items()}
    return _Item(name, layer, list(layer.parameters(recurse=False)), shapes, layout=layout, linears=linears)


def _stacked_item(model: PreTrainedModel, name: str, module: nn.Module) -> _Item:
    """Experts that are not quantised, or without their scales."""
    stack = module.get_parameter("weight")
    shapes: Shapes = {
        f"{module_name_on_disk(model, part.name)}.weight": (stack.dtype, (part.out_features, part.in_features))
        for part in linears_of(name, module)
    }
    return _Item(name, module, [stack], shapes, stacked=tuple(shapes))


def _cache_item(key: str, cache: QuantCache) -> _Item:
    """The scale of keys or values, all that is stored of them."""
    return _Item(key, cache, list(cache.parameters()), {key: (torch.float32, (1,))})


def _plain_item(names: Names, name: str, module: nn.Module, seen: set[int]) -> _Item:
    """Own parameters and persistent buffers as they are; of a QuantLayer without its scales."""
    plain: dict[str, torch.Tensor] = {}
    own: dict[str, torch.Tensor | None] = {**module._parameters, **module._buffers}
    for suffix, tensor in own.items():
        scale = isinstance(module, QuantLayer) and suffix in SCALE_PARAMETERS
        if tensor is None or scale or suffix in module._non_persistent_buffers_set or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        plain[names.key(f"{name}.{suffix}" if name else suffix)] = tensor
    parameters = [tensor for tensor in plain.values() if isinstance(tensor, nn.Parameter)]
    shapes: Shapes = {key: (tensor.dtype, tuple(full_shape(tensor))) for key, tensor in plain.items()}
    return _Item(name, module, parameters, shapes, plain=plain)


def _shards(items: Iterable[_Item], limit: int) -> Iterator[list[_Item]]:
    """Consecutive items of at most ``limit`` bytes together; one that is larger stands alone."""
    shard: list[_Item] = []
    size = 0
    for item in items:
        if shard and size + item.bytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(item)
        size += item.bytes
    if shard:
        yield shard


def _batches(shard: list[_Item], limit: int) -> Iterator[list[_Item]]:
    """Consecutive items that are gathered together: at most ``limit`` bytes of full parameters, at least one item."""
    batch: list[_Item] = []
    size = 0
    for item in shard:
        if batch and size + item.gathered_bytes > limit:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item.gathered_bytes
    if batch:
        yield batch


def _bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)


# ---------------------------------------------------------------------------------------------------------------------
# Gathering and writing
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class _Held:
    """Counts the bytes of tensors that this rank holds, and the most it ever held."""

    now: int = 0
    peak: int = 0

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def _write_shards(shards: list[list[_Item]], directory: Path) -> tuple[list[str], int]:
    """Gather everything in order; rank 0 packs and writes. Returns the files' names and the peak of bytes held."""
    limit = min(GATHER_BYTES, max(item.gathered_bytes for shard in shards for item in shard))
    batches = [list(_batches(shard, limit)) for shard in shards]
    parameters = [[[p for item in batch for p in item.parameters] for batch in of_shard] for of_shard in batches]
    held, buffer = _Held(), ReceiveBuffer()
    with errors_on_all_ranks(RuntimeError):  # what torch raises without memory
        if is_main():
            for of_shard in parameters:
                buffer.reserve(of_shard)
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [SINGLE]
    total = sum(item.bytes for shard in shards for item in shard)
    with tqdm(total=total, desc="export", unit="B", unit_scale=True, delay=1, disable=not is_main()) as progress:
        for number, file in enumerate(files):
            output = _Output(directory / file, shards[number], held) if is_main() else None
            following = [*batches[number][1:], []]
            gathered = gathered_on_main(parameters[number], buffer)
            for batch, coming, _ in zip(batches[number], following, gathered, strict=True):
                if output is not None:
                    held.add(size := sum(item.gathered_bytes for item in (*batch, *coming)))
                    output.write(batch)
                    held.add(-size)
                progress.update(sum(item.bytes for item in batch))
            failure = output.finish() if output is not None else None
            # Whatever went wrong in packing or writing, rank 0 went on gathering up to here, where all of them stop.
            try:
                raise_everywhere(None if failure is None else f"export failed in {file}: {_text(failure)}")
            except RuntimeError as everywhere:
                raise everywhere from failure
    return files, held.peak


class _Output:
    """One file on rank 0. It raises nothing: :meth:`finish` returns the first error, and after it nothing is written.

    An error of any kind must wait: the other ranks are in the next gather.
    """

    def __init__(self, path: Path, shard: list[_Item], held: _Held) -> None:
        self._held = held
        self._failure: Exception | None = None
        self._writer: ShardWriter | None = None
        try:
            self._writer = ShardWriter(path, {key: shape for item in shard for key, shape in item.shapes.items()})
        except Exception as error:
            self._failure = error

    def write(self, batch: list[_Item]) -> None:
        """Pack and write modules whose parameters are gathered."""
        if self._writer is None or self._failure is not None:
            return
        try:
            for item in batch:
                for keys, stack in _stacks(item):
                    self._writer.write_stack(keys, stack.cpu())
                for tensors in _packed(item):
                    self._held.add(size := 0 if item.layout is None else sum(t.nbytes for t in tensors.values()))
                    for key, tensor in tensors.items():
                        self._writer.write(key, tensor)
                    self._held.add(-size)
        except Exception as error:
            self._failure = error

    def finish(self) -> Exception | None:
        """Close the file; what went wrong, if something did."""
        if self._writer is not None:
            try:
                if self._failure is None:
                    self._writer.finish()
            except Exception as error:
                self._failure = error
            self._writer.close()
        return self._failure


def _stacks(item: _Item) -> Iterator[tuple[Sequence[str], torch.Tensor]]:
    """The equal parts of the item's only parameter, some MiB at a time: keys, and ``[keys, out, in]``."""
    if item.stacked:
        stack = item.parameters[0].detach()
        parts = stack.view(len(item.stacked), -1, stack.shape[-1])
        some = max(1, GATHER_BYTES // parts[0].nbytes)
        for begin in range(0, len(parts), some):
            yield item.stacked[begin : begin + some], parts[begin : begin + some]


def _packed(item: _Item) -> Iterator[dict[str, torch.Tensor]]:
    """The item's other tensors in CPU memory, by Linears; of plain ones on a CPU the parameter's memory."""
    if isinstance(item.module, QuantCache):
        yield {item.name: cache_scale(item.name, item.module.input_scale())}
        return
    if item.layout is None:
        for key, tensor in item.plain.items():
            yield {key: tensor.detach().cpu().contiguous()}
        return
    layer = item.module
    assert isinstance(layer, QuantLayer)
    spec, zero, above = layer.scheme.weights, layer.weight_zero, layer.weight_global
    scale, input_scale = layer.weight_scale(), layer.input_scale()
    for name, part in item.linears.items():
        yield linear_tensors(
            item.layout,
            name,
            part.weight(layer.weight.detach()),
            part.scale(scale, spec),
            input_scale,
            layer.bias,
            layer.scheme,
            layer.weight.dtype,
            weight_global=None if above is None else part.scale(above, FP8_TENSOR),
            weight_zero=None if zero is None else part.scale(zero, spec),
        )


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


# ---------------------------------------------------------------------------------------------------------------------
# The rest of the directory
# ---------------------------------------------------------------------------------------------------------------------


def _check_destination(source: Path, out: Path, size: int, overwrite: bool) -> None:
    """Refuse now what would fail after everything has been gathered."""
    if not (source / "config.json").is_file():
        raise ValueError(
            f"{source} has no config.json: expected the checkpoint directory that the model was built from"
        )
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, expected a directory to make")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise ValueError(f"{out} is not empty: name another directory, or pass overwrite to replace it as a whole")
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if free < size:
        raise ValueError(f"{out.parent} has {free:,} bytes free, the weights alone need {size:,}")


def _write_index(shards: list[list[_Item]], files: list[str], directory: Path) -> None:
    if len(files) == 1:
        return
    weight_map = {key: file for file, shard in zip(files, shards, strict=True) for item in shard for key in item.shapes}
    size = sum(item.bytes for shard in shards for item in shard)
    _write_json({"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}, directory / INDEX)


def _write_config(
    model: PreTrainedModel, quantization: Quantization | None, layout: Layout, source: Path, directory: Path
) -> None:
    """The source's config.json, with our dtype and quantization_config.

    The file is carried over rather than written from ``model.config``: what training switches in memory (``use_cache``,
    the attention implementation) does not leak into it.
    """
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)  # of a source that was quantised itself
    # Older checkpoints spell it torch_dtype, which older readers need.
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(model.dtype).removeprefix("torch.")
    config.setdefault("architectures", [type(model).__name__])
    if quantization is not None and (quantised := _quantization_config(model, quantization, layout)) is not None:
        config["quantization_config"] = quantised
    _write_json(config, directory / "config.json")


def _quantization_config(model: PreTrainedModel, quantization: Quantization, layout: Layout) -> dict[str, Any] | None:
    """Under the names on disk, which vLLM sees, and under transformers' own where they differ."""
    skipped = [
        part.name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, StackedLinear))
        for part in linears_of(name, module)
    ]
    routers = [name for name, module in model.named_modules() if is_router(module)]

    def spellings(modules: Iterable[str]) -> dict[str, str]:
        """Modules by each of their names."""
        return {name: module for module in modules for name in (module_name_on_disk(model, module), module)}

    schemes = {
        part.name: layer.scheme for name, layer in quantization.layers.items() for part in linears_of(name, layer)
    }
    layers = {name: schemes[module] for name, module in spellings(schemes).items()}
    head = model.get_output_embeddings()
    no_linears = [
        name for name, module in model.named_modules() if module is head or isinstance(module, QuantEmbedding)
    ]
    named = spellings(name for name in no_linears if name in quantization.layers)
    kv_cache = next((cache.spec for cache in quantization.caches.values()), None)
    return layout_config(layout, layers, spellings(skipped), spellings(routers), kv_cache, no_linears=list(named))


def is_router(module: nn.Module) -> bool:
    """A bare 2-D ``weight``, neither a Linear nor an embedding: transformers 5 has the router so, vLLM as a Linear."""
    weight = module._parameters.get("weight")
    known = isinstance(module, (nn.Linear, nn.Embedding, QuantLayer))
    return weight is not None and not known and len(full_shape(weight)) == 2


def _copy_companions(source: Path, directory: Path) -> None:
    for pattern in COPIED:
        for path in sorted(source.glob(pattern)):
            if path.is_dir():
                shutil.copytree(path, directory / path.name)
            else:
                shutil.copyfile(path, directory / path.name)
                _sync(directory / path.name)


def _write_json(value: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
    _sync(path)


def _publish(aside: Path, out: Path) -> None:
    """Give the finished directory its name; what was there before is removed afterwards."""
    _sync(aside)
    old = None
    if out.is_dir() and any(out.iterdir()):
        old = out.with_name(f"{out.name}.old-{secrets.token_hex(4)}")
        os.rename(out, old)
    try:
        os.rename(aside, out)  # an empty directory is replaced
    except OSError:
        if old is not None:
            os.rename(old, out)
        raise
    _sync(out.parent)
    if old is not None:
        shutil.rmtree(old)


def _sync(path: Path) -> None:
    """Force a file or a directory's entries to disk, so that the rename cannot overtake what it announces."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
