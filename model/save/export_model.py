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

The directory is written beside its name and renamed when everything in it is on disk (``aside.py``): an interrupted
export never looks complete.
"""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from transformers import PreTrainedModel

from model.checkpoint.load import check_finite
from model.checkpoint.safetensors import SINGLE, garbage_kept
from model.peft import FOLDER, PeftFolder
from model.quantized.checkpoint import SourceCheckpoint, read_checkpoint
from model.quantized.quantization_config import read_quantization_config, rounds_scales
from model.ranks import errors_on_all_ranks, is_main, listed, say
from model.save.as_source import dtypes_on_disk, has_dtypes_of, is_as_source, several_input_scales, stored_dtypes
from model.save.aside import Aside
from model.save.finish import configuration, copy_companions, write_config, write_index
from model.save.gguf_file import GGUF_FILE, GGUFPlan, GGUFWriter, check_gguf_written, plan_gguf, without_towers
from model.save.loadable import check_loadable, check_support, check_written
from model.save.plan import Item, copied_modules, plan_shards
from model.save.write import Writers, safetensors_file, write_shards
from quant import Quantization, QuantLayer
from quant.formats.layouts import Layout
from quant.formats.torchao import PLAIN, TENSOR_NAMES, intx_metadata


@dataclass(frozen=True)
class ExportReport:
    """Summary of an export.

    Attributes:
        path: the finished directory.
        files: names of the weight files, in order.
        tensors: number of tensors in them.
        bytes: total size of the tensors, without headers.
        seconds: wall time.
        peak_bytes: most bytes of gathered and packed tensors on this rank at a time; counted, not measured. 0 on all
            ranks except rank 0.
        copied: names of the source's modules that the model lacks, copied unchanged: towers, MTP heads.
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
    """Warn of tensors of ``source`` that an export in the source's format would lack and of scales that its readers
    round, and name the tensors that the model has in a shorter dtype."""
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
    """Read the headers of the source, and tell if the export has its format and schemes. Raises ValueError if the
    layout does not hold the model."""
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
    """Write ``model`` as a checkpoint directory for transformers, vLLM, SGLang or llama.cpp. A collective.

    Args:
        model: the model in training, partitioned or not; its parameters are only read.
        quantization: returned by ``quant.replace_layers``. None writes every weight unchanged, without scales: a plain
            checkpoint.
        source_dir: checkpoint that the model was built from; its configuration, tokenizer and chat template are copied,
            and its tensors that the model lacks.
        out_dir: directory to create.
        layout: format of quantized layers, a name in :mod:`quant.formats.layouts`. If ``source_dir`` has this format
            and the same schemes, its configuration is kept, see :mod:`model.save.as_source`.
        template: for layout ``gguf``, a GGUF file of the base model, made with llama.cpp's convert_hf_to_gguf.py.
        adapter: unmerged adapter to write into a folder ``adapter`` of the export; None for none.
        max_shard_size: bytes of tensors per file. A larger module gets its own file; GGUF is always one file.
        trust_remote_code: allow running Python code in ``source_dir``.
        copied: False if ``source_dir`` has no weights, as the model was not read from it (``save_quantized.py``).

    Raises:
        RankError: on every rank, and no files are left: the layout cannot express a scheme, config.json names a class
            that would not find its weights (``loadable.py``), ``out_dir`` is not empty, the disk is full, or a weight
            or scale is invalid (NaN).
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
                    write_index(shards, files, directory)
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
