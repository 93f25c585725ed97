"""Write a checkpoint while its parameters stream past.

Under ZeRO-3 nobody holds the model, and collecting a state dict on rank 0 would need the whole of it there. So every
rank first makes the same plan from names and sizes alone (which tensors each module becomes on disk, and in which shard
each lies), then all ranks gather the modules in that order, and rank 0 packs each one and writes a shard as soon as it
is complete. Rank 0 holds one shard and one gathered tensor; the others hold one gathered tensor.

Two things follow from the plan. Ranks know the shard boundaries, so they agree after each shard whether writing went
well: a full disk is an error on every rank instead of a hang in the next gather. And the number of shards is known at
the start, so files get their final names at once.

The directory is written aside, as ``<out_dir>.tmp-<random>``, and renamed when everything in it is on disk: an export
that was interrupted never looks complete.
"""

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from model.names import Names, module_name_on_disk
from model.ranks import errors_on_all_ranks, is_main, raise_everywhere
from model.scales import cache_keys
from model.shards import INDEX, SINGLE
from model.zero import full_numel, full_shape, gathered, is_partitioned
from quant.embedding import QuantEmbedding
from quant.experts import LinearPart, StackedLinear, linears_of
from quant.export import Shapes, cache_scale, stored
from quant.kv_cache import QuantCache
from quant.layer import SCALE_PARAMETERS, QuantLayer
from quant.layouts import Layout, check_layout, layout_config, linear_shapes, linear_tensors
from quant.prepare import Quantization
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


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    Attributes:
        path: the finished directory.
        files: names of the weight files, in order.
        tensors: number of tensors in them.
        bytes: their sizes together, headers excluded.
        seconds: wall time.
        peak_bytes: the most bytes of tensors that this rank held at a time, gathered and collected; counted, not
        measured.
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
    stacked: Mapping[str, LinearPart] = field(default_factory=dict)  # by key: the parts of the module's only parameter

    @property
    def bytes(self) -> int:
        """Bytes on disk."""
        return sum(_bytes(dtype, shape) for dtype, shape in self.shapes.values())

    @property
    def gathered_bytes(self) -> int:
        """Bytes that gathering the parameters takes; nothing for those that are whole on every rank anyway."""
        return sum(full_numel(p) * p.element_size() for p in self.parameters if is_partitioned(p))


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
    parts = {f"{module_name_on_disk(model, part.name)}.weight": part for part in linears_of(name, module)}
    shapes: Shapes = {key: (stack.dtype, (part.out_features, part.in_features)) for key, part in parts.items()}
    return _Item(name, module, [stack], shapes, stacked=parts)


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
    """Consecutive items that are gathered together: at most ``limit`` bytes of full parameters, at least one item.

    Gathering parameters one call at a time is ten times slower than a list of them (a MoE has thousands of small ones);
    a list no larger than the largest single module costs no memory that is not needed anyway.
    """
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
    return torch.empty((), dtype=dtype).element_size() * torch.Size(shape).numel()


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
    largest = max(item.gathered_bytes for shard in shards for item in shard)
    held = _Held()
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [SINGLE]
    total = sum(item.bytes for shard in shards for item in shard)
    with tqdm(total=total, desc="export", unit="B", unit_scale=True, delay=1, disable=not is_main()) as progress:
        for file, shard in zip(files, shards, strict=True):
            collected: dict[str, torch.Tensor] = {}
            failure: Exception | None = None
            for batch in _batches(shard, largest):
                with gathered([p for item in batch for p in item.parameters]):
                    held.add(size := sum(item.gathered_bytes for item in batch))
                    if is_main() and failure is None:
                        failure = _collect(batch, collected, held)
                    progress.update(sum(item.bytes for item in batch))
                held.add(-size)
            if is_main() and failure is None:
                failure = _write(collected, directory / file)
            # Whatever went wrong on rank 0, it went on gathering with the others up to here, where all of them stop.
            try:
                raise_everywhere(None if failure is None else f"export failed in {file}: {_text(failure)}")
            except RuntimeError as everywhere:
                raise everywhere from failure
            held.add(-_size(collected))
    return files, held.peak


def _collect(batch: list[_Item], collected: dict[str, torch.Tensor], held: _Held) -> Exception | None:
    """Pack the gathered modules of ``batch`` into ``collected``; the caller raises what is returned, on all ranks."""
    try:
        for item in batch:
            tensors = _packed(item)
            held.add(_size(tensors))
            collected |= tensors
    except Exception as error:
        return error
    return None


def _packed(item: _Item) -> dict[str, torch.Tensor]:
    """The item's tensors in CPU memory, exactly as planned."""
    if isinstance(item.module, QuantCache):
        tensors = {item.name: cache_scale(item.name, item.module.input_scale())}
    elif item.layout is None:
        tensors = {key: stored(tensor, tensor.dtype) for key, tensor in item.plain.items()}
        for key, part in item.stacked.items():
            tensors[key] = stored(part.weight(item.parameters[0]), item.parameters[0].dtype)
    else:
        layer = item.module
        assert isinstance(layer, QuantLayer)
        tensors = {}
        spec, zero, above = layer.scheme.weights, layer.weight_zero, layer.weight_global
        scale, input_scale = layer.weight_scale(), layer.input_scale()
        for name, part in item.linears.items():
            tensors |= linear_tensors(
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
    made = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    if made != item.shapes:
        raise ValueError(f"{item.name} became {made}, planned was {item.shapes}")
    return tensors


def _write(tensors: dict[str, torch.Tensor], path: Path) -> Exception | None:
    """Write one shard. save_file streams from the tensors' own memory: it makes no copy of the shard."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
        # It leaves the file readable by its owner only. The directory's mode tells the umask.
        path.chmod(path.parent.stat().st_mode & 0o666)
        _sync(path)
    except Exception as error:  # safetensors' own kind, OSError, ...
        return error
    return None


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _size(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


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
