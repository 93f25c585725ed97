"""Write a checkpoint while its parameters stream through rank 0.

Under ZeRO-3 no rank has the whole model, and collecting a state dict on rank 0 would need memory for it. So every rank
first computes the same plan, from names and sizes only (``plan.py``: the tensors on disk of each module, and their
shard). Then all ranks send their partitions to rank 0 in the order of the plan, and rank 0 packs each module and writes
it to its offset, while the next modules arrive (``write.py``). Rank 0 allocates memory for the modules being written,
for the modules arriving, and for one packed Linear; the other ranks allocate nothing. The first two are bounded by a
batch size, or by the largest module.

The plan has two advantages. All ranks know where a shard ends and check there together if writing succeeded: a full
disk is an error on every rank instead of a hang in the next gather. And the number of shards is known at the start, so
files get their final names immediately.

The directory has a temporary name until everything in it is on disk (``aside.py``): an interrupted export never looks
complete.

If an export has the format of the checkpoint that the model was read from, and each layer is quantized as in it, then
the source's configuration describes the export, too, and is kept. The export then also keeps what training does not
determine: codes of tensors outside of the model, the names of scales of keys and values, and the shape of a single
scale (``[]`` or ``[1]``). Scales that training has not changed keep their dtype, and input scales that the model has
merged into one stay separate. Tensors without codes get the source's dtype unless it would round them. Elements that
loading has rounded to the model's dtype, and that training has not changed, are written with the source's values.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from model.checkpoint.load import check_finite
from model.checkpoint.names import Names, module_name_on_disk, own_tensors
from model.checkpoint.safetensors import SINGLE, CheckpointError, DiskTensor, garbage_kept
from model.peft import FOLDER, PeftFolder
from model.quantized.checkpoint import SourceCheckpoint, parts_of, read_checkpoint
from model.quantized.quantization_config import read_quantization_config, rounds_scales, source_layout
from model.quantized.scales import read_small_scales
from model.ranks import errors_on_all_ranks, is_main, listed, reduce_over_ranks, say
from model.save.aside import Aside
from model.save.finish import configuration, copy_companions, write_config
from model.save.gguf_file import GGUF_FILE, GGUFPlan, GGUFWriter, check_gguf_written, plan_gguf, without_towers
from model.save.loadable import check_loadable, check_support, check_written
from model.save.plan import Item, copied_modules, plan_shards
from model.save.shard_writer import write_index
from model.save.write import Writers, safetensors_file, write_shards
from model.scales.grouping import INPUT_GLOBAL_SCALE, INPUT_SCALE, INVERSE, WEIGHT_SCALE, arrange, cache_keys
from model.zero import local_data, local_range
from quant import Quantization, QuantLayer, ScaleGroup, Scheme
from quant.formats.compressed_tensors import Shapes
from quant.formats.layouts import Layout
from quant.formats.torchao import PLAIN, TENSOR_NAMES, intx_metadata
from quant.linear import linears_of
from quant.rotation import rotated_layers

_COUNTED = 2**24  # elements compared at a time


@dataclass(frozen=True)
class ExportReport:
    """Summary of an export.

    Attributes:
        path: the finished directory.
        files: names of the weight files, in order.
        tensors, bytes: number and total size of the planned tensors, without headers. (A GGUF file joins the tensors of
            experts, and has some tensors in fp32 instead of the planned dtype.)
        seconds: wall time.
        peak_bytes: most bytes of gathered and packed tensors on this rank at a time; counted, not measured. 0 on all
            ranks except rank 0.
        copied: names of the source's modules that the model lacks and the export has: towers, MTP heads.
    """

    path: Path
    files: list[str]
    tensors: int
    bytes: int
    seconds: float
    peak_bytes: int
    copied: list[str]


def check_plan(
    model: PreTrainedModel,
    quantization: Quantization | None,
    source_dir: str | Path,
    *,
    layout: Layout = "compressed",
    template: Path | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Check before a training run that the model can be exported afterwards; a collective, with the arguments of
    :func:`export_model`. Needs no values of weights. Raises RankError if names, sizes or schemes already show that the
    export would fail."""
    with errors_on_all_ranks(Exception):
        if is_main():
            checkpoint, as_source = _read_source(model, quantization, Path(source_dir), layout)
            dtypes = dtypes_on_disk(checkpoint) if as_source else None  # the model has no values yet
            shards = plan_shards(model, quantization, layout, 5 * 10**9, checkpoint, dtypes)
            items = list(chain(*shards))
            if layout == "gguf":
                plan_gguf(model, without_towers(model, items), template)
            else:
                check_loadable(Path(source_dir), items, trust_remote_code=trust_remote_code)
            if quantization is not None and not as_source:
                configuration(model, quantization, layout, items)
            if as_source:
                _say_differences(items, checkpoint, source_dir)


def _say_differences(items: Sequence[Item], checkpoint: SourceCheckpoint, source: str | Path) -> None:
    """Warn, for an export in the format of ``source``, of scales that readers of ``source`` round and of tensors that
    the export will lack; also log the tensors that the model's dtype has rounded."""
    if rounds_scales(read_quantization_config(Path(source))):
        say(
            f"warning: {source} asks servers to round scales to powers of two (scale_fmt: ue8m0); training does not "
            "round them, and the export will not ask for it"
        )
    written = {key for item in items for key in item.shapes}
    if unused := sorted(checkpoint.beside.keys() - written):
        say(
            f"warning: {source} has {listed(unused, 3)}, which its configuration does not use; training does not use "
            "them either, and the export will not have them"
        )
    if rounded := sorted(key for item in items for key in item.rounded):
        say(
            f"{source} has {listed(rounded, 3)} in a dtype that model.dtype rounds: the export will have the source's "
            "dtype, and the source's values where training has not changed the rounded ones"
        )


def _read_source(
    model: PreTrainedModel, quantization: Quantization | None, source: Path, layout: Layout, *, copied: bool = True
) -> tuple[SourceCheckpoint, bool]:
    """Return the headers of ``source`` (empty if not ``copied``), and True if the export has the source's format and
    schemes. Raises ValueError if ``source`` is no supported checkpoint, or ``layout`` cannot store the model."""
    if not (source / "config.json").is_file():
        raise ValueError(
            f"{source} has no config.json: expected the checkpoint directory that the model was built from"
        )
    if quantization is not None:
        check_support(model, quantization, layout)
    checkpoint = read_checkpoint(source, model) if copied else SourceCheckpoint({}, [], set())
    return checkpoint, is_as_source(model, quantization, checkpoint, source, layout)


@garbage_kept()
def export_model(
    model: PreTrainedModel,
    quantization: Quantization | None,
    source_dir: str | Path,
    out_dir: str | Path,
    *,
    layout: Layout = "compressed",
    template: Path | None = None,
    adapter: PeftFolder | None = None,
    max_shard_size: int = 5 * 10**9,
    trust_remote_code: bool = False,
    copied: bool = True,
) -> ExportReport:
    """Write ``model`` as a checkpoint directory for the programs that read ``layout``. A collective.

    Args:
        model: the model in training, partitioned or not; its parameters are only read.
        quantization: returned by ``quant.replace_layers``. None writes every weight unchanged, without scales: a plain
            checkpoint.
        source_dir: checkpoint that the model was built from. Its tokenizer, chat template and tensors that the model
            lacks are copied, and its configuration is adapted.
        out_dir: directory to create.
        layout: format of quantized layers, a name in :mod:`quant.formats.layouts`. If ``source_dir`` has this format
            and the same schemes, its configuration is kept (see above).
        template: for layout ``gguf``, a GGUF file of the base model, made with llama.cpp's convert_hf_to_gguf.py.
        adapter: unmerged adapter to write into a folder ``adapter`` of the export; None for none.
        max_shard_size: bytes of tensors per file. A larger module gets its own file; GGUF is always one file.
        trust_remote_code: allow running Python code in ``source_dir``.
        copied: False if ``source_dir`` has no weights, as the model was not read from it (``save_quantized.py``).

    Raises:
        RankError: on every rank, and no files are left: the layout cannot express a scheme, config.json names a class
            that would not find its weights (``loadable.py``), the template is missing or wrong, ``out_dir`` is not
            empty, the disk is full, or a weight or scale is invalid (NaN).
    """
    begin, source, out = time.perf_counter(), Path(source_dir), Path(out_dir)
    check_finite(model, f"{out} was not written: the model diverged, export an earlier checkpoint")
    with errors_on_all_ranks(ValueError, OSError):
        if max_shard_size <= 0:
            raise ValueError(f"max_shard_size is {max_shard_size} bytes, expected at least 1")
        checkpoint, as_source = _read_source(model, quantization, source, layout, copied=copied)
    dtypes, inputs = None, None
    if as_source and quantization is not None:
        dtypes = stored_dtypes(model, quantization, checkpoint)
        inputs = several_input_scales(model, quantization, checkpoint)
    with errors_on_all_ranks(ValueError, OSError):
        limit = max_shard_size if layout != "gguf" else sys.maxsize
        shards = plan_shards(model, quantization, layout, limit, checkpoint, dtypes, inputs)
        if layout == "gguf":
            shards = [without_towers(model, shard) for shard in shards]
    items = list(chain(*shards))
    total = sum(item.bytes for item in items)
    aside: Aside | None = None
    writer: Writers = safetensors_file
    if layout == "executorch":
        writer = partial(safetensors_file, metadata=_torchao_metadata(items))
    with ExitStack() as stack:
        # Any error only on rank 0 must reach the other ranks, which are already in the next collective.
        with errors_on_all_ranks(Exception):
            if is_main():
                if layout == "gguf":
                    gguf = plan_gguf(model, items, template)
                    writer = partial(_gguf_file, plan=gguf)
                else:
                    check_loadable(source, items, trust_remote_code=trust_remote_code)
                aside = stack.enter_context(closing(Aside(out, total)))
        directory, single = out if aside is None else aside.path, GGUF_FILE if layout == "gguf" else SINGLE
        files, peak = write_shards(shards, directory, single, writer)
        with errors_on_all_ranks(Exception):
            if aside is not None:
                if layout == "gguf":
                    check_gguf_written(directory / GGUF_FILE, gguf)
                else:
                    keys = [[key for item in shard for key in item.shapes] for shard in shards]
                    write_index(directory, dict(zip(files, keys, strict=True)), total)
                    check_written(directory, items)
                shapes = {key: shape for item in items for key, shape in item.shapes.items()}
                dtype = None if as_source and has_dtypes_of(checkpoint, shapes) else model.dtype
                write_config(model, quantization, layout, source, directory, items, as_source, dtype)
                copy_companions(source, directory, as_source=as_source)
                if adapter is not None:
                    adapter.write(directory / FOLDER)
                aside.publish()
    count, seconds = sum(len(item.shapes) for item in items), time.perf_counter() - begin
    return ExportReport(out, files, count, total, seconds, peak, copied_modules(items))


def _torchao_metadata(items: list[Item]) -> dict[str, str]:
    """Create the metadata that every file of an ExecuTorch export gets. It names all tensors of the model, because
    readers merge the files' metadata and keep only one list of names."""
    kinds: dict[str, str] = {}
    for item in items:
        layer = item.module
        if item.layout is None or not isinstance(layer, QuantLayer):
            kinds |= dict.fromkeys(item.shapes, PLAIN)
            continue
        for name, part in item.linears.items():
            kinds[f"{name}.weight"] = intx_metadata(layer.scheme, part.in_features, layer.weight.dtype)
            kinds |= {key: PLAIN for key in [f"{name}.bias"] if key in item.shapes}
    return {**kinds, TENSOR_NAMES: json.dumps(list(kinds))}


def _gguf_file(path: Path, _: list[Item], plan: GGUFPlan) -> GGUFWriter:
    return GGUFWriter(path, plan)


def is_as_source(
    model: PreTrainedModel,
    quantization: Quantization | None,
    checkpoint: SourceCheckpoint,
    directory: Path,
    layout: Layout,
) -> bool:
    """Return True if an export of ``model`` in ``layout`` will have the format of the quantized ``checkpoint`` in
    ``directory``, and the same schemes in every layer and in the KV cache; False if ``model`` or
    ``checkpoint`` is not quantized, or if layers of ``model`` are rotated. Schemes may differ in narrow or full
    range."""
    coded = checkpoint.coded
    if quantization is None or not coded or rotated_layers(quantization):
        return False
    kv_cache = next((cache.spec for cache in quantization.caches.values()), None)
    if source_layout(directory) != layout or kv_cache != checkpoint.kv_cache:
        return False
    own = {part.name: layer.scheme for name, layer in quantization.layers.items() for part in linears_of(name, layer)}

    def formats(scheme: Scheme | None) -> object:
        return scheme and (scheme.weights.wide, scheme.activations)

    for part in parts_of(model):
        source = coded.get(module_name_on_disk(model, part.name))
        if formats(own.get(part.name)) != formats(None if source is None else source.scheme):
            return False
    return True


def dtypes_on_disk(checkpoint: SourceCheckpoint) -> dict[str, torch.dtype]:
    """Return the dtypes of the source's floating-point tensors without codes, by key."""
    plain = ((key, one.dtype) for key, one in checkpoint.tensors.items() if isinstance(one, DiskTensor))
    return {key: dtype for key, dtype in plain if dtype is not None and dtype.is_floating_point}


def has_dtypes_of(checkpoint: SourceCheckpoint, shapes: Shapes) -> bool:
    """Return True if no tensor of an export differs in dtype from the source's tensor of the same key. ``shapes`` has
    dtype and shape of each tensor of the export, by key."""
    stored = [one for one in (*checkpoint.tensors.values(), *checkpoint.beside.values()) if isinstance(one, DiskTensor)]
    return all(one.key not in shapes or shapes[one.key][0] == one.dtype for one in stored)


def stored_dtypes(
    model: PreTrainedModel, quantization: Quantization, checkpoint: SourceCheckpoint
) -> dict[str, torch.dtype]:
    """Return, by key, the source's dtypes that an export can keep because they round no value of the model: for tensors
    without codes that the source stores in another dtype than the model, and for scales. Learned scales are left out
    once a step has changed them. A collective."""
    found: list[tuple[list[str], torch.dtype]] = []
    changed: list[torch.Tensor] = []
    for one, other, count in _in_other_dtypes(model, checkpoint):
        changed.append(count)
        found.append(([one], other))
    for group in (*quantization.weight_groups, *quantization.input_groups):
        tensors = [checkpoint.beside[key] for key in _keys(model, quantization, group) if key in checkpoint.beside]
        dtypes = {one.dtype for one in tensors}
        own = {"float32": torch.float32, "model": model.dtype}.get(group.spec.scale_format)
        if own is None or len(dtypes) != 1:
            continue
        dtype = tensors[0].dtype
        assert dtype is not None
        scale, theta = local_data(group.s0), group.theta
        count = (scale.to(own).to(dtype).float() != scale).sum()
        changed.append(count.cpu() if theta is None else (count + local_data(theta).count_nonzero()).cpu())
        found.append(([one.key for one in tensors], dtype))
    if not found:
        return {}
    counts = reduce_over_ranks(torch.stack(changed)).tolist()
    return {key: dtype for (keys, dtype), count in zip(found, counts, strict=True) if not count for key in keys}


def _in_other_dtypes(
    model: PreTrainedModel, checkpoint: SourceCheckpoint
) -> Iterator[tuple[str, torch.dtype, torch.Tensor]]:
    """Yield the keys that the source stores in another dtype than the model, this dtype, and how many of this rank's
    elements the dtype would round."""
    names, own = Names(model, {key: one.shape for key, one in checkpoint.tensors.items()}), own_tensors(model)
    dtypes = dtypes_on_disk(checkpoint)
    for key in sorted(dtypes, key=dot_natural_key):  # some of transformers' rules depend on this order
        layout, dtype = names.layout(key), dtypes[key]
        pieces = [piece for piece in layout.pieces if own[piece.name].dtype != dtype] if layout is not None else []
        count = torch.zeros((), dtype=torch.int64)
        for piece in pieces:
            tensor = own[piece.name]
            if torch.promote_types(dtype, tensor.dtype) != dtype:
                first, _ = local_range(tensor)
                begin, end = (max(0, at - first) for at in (piece.start, piece.start + piece.numel))
                for part in local_data(tensor)[begin:end].split(_COUNTED):
                    count += (part.to(dtype).to(part.dtype) != part).sum().cpu()
        if pieces:
            yield key, dtype, count


def several_input_scales(
    model: PreTrainedModel, quantization: Quantization, checkpoint: SourceCheckpoint
) -> dict[str, DiskTensor]:
    """Return, by key, the source's input scales to write in place of the model's: those of layers that share one scale
    in the model but have different ones in the source, if the model's is still the one computed from these. A
    collective. Raises RankError if a file cannot be read."""
    with errors_on_all_ranks(OSError, CheckpointError):
        stored = read_small_scales(model, quantization, checkpoint, {})
    found, changed = [], []
    for scale in arrange(model, quantization, stored).inputs:
        of_files = scale.stored
        if scale.group.owner in quantization.caches or len({one.value.item() for one in of_files}) < 2:
            continue
        local, theta = local_data(scale.group.s0).cpu().view(-1), scale.group.theta
        count = (local != scale.value().view(-1)[: local.numel()]).sum()
        changed.append(count if theta is None else count + local_data(theta).count_nonzero().cpu())
        names = [one.key.rpartition(".")[0] for one in of_files]
        found.append([name + end for name in names for end in (INPUT_SCALE, INPUT_GLOBAL_SCALE)])
    if not found:
        return {}
    counts, beside = reduce_over_ranks(torch.stack(changed)).tolist(), checkpoint.beside
    same = [key for keys, count in zip(found, counts, strict=True) if not count for key in keys]
    return {key: beside[key] for key in same if key in beside}


def _keys(model: PreTrainedModel, quantization: Quantization, group: ScaleGroup) -> Iterator[str]:
    """Yield the keys that the scales of a group may have on disk."""
    for name in group.members:
        if name in quantization.caches:
            yield from cache_keys(model, name)
            continue
        for part in linears_of(name, quantization.layers[name]):
            disk = module_name_on_disk(model, part.name)
            yield from (disk + end for end in ([INPUT_SCALE] if group.observer else [WEIGHT_SCALE, INVERSE]))
