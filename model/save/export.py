"""Write a checkpoint while its parameters stream past.

Under ZeRO-3 nobody holds the model, and collecting a state dict on rank 0 would need the whole of it there. So every
rank first makes the same plan from names and sizes alone (``plan.py``: which tensors each module becomes on disk, and
in which shard each lies), then all ranks send their partitions of the modules to rank 0 in that order, and rank 0 packs
each one and writes it to its place, while the next ones come (``write.py``). It holds the modules that are gathered at
a time and those that come, each no more than the largest takes, and one Linear as packed; the other ranks hold nothing.

Two things follow from the plan. Ranks know the shard boundaries, so they agree after each shard whether writing went
well: a full disk is an error on every rank instead of a hang in the next gather. And the number of shards is known at
the start, so files get their final names at once.

The directory is written aside, as ``<out_dir>.tmp-<random>``, and renamed when everything in it is on disk
(``finish.py``): an export that was interrupted never looks complete.
"""

import secrets
import shutil
import sys
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from transformers import PreTrainedModel

from model.checkpoint.load import check_finite
from model.checkpoint.safetensors import garbage_kept
from model.peft import FOLDER
from model.quantized.checkpoint import read_checkpoint
from model.ranks import errors_on_all_ranks, is_main
from model.save.executorch import check_executorch, torchao_files
from model.save.finish import check_destination, configuration, copy_companions, publish, write_config, write_index
from model.save.gguf_file import FILE, GGUFPlan, GGUFWriter, check_gguf_written, plan_gguf
from model.save.loadable import check_loadable, check_written
from model.save.lora import PeftFolder
from model.save.plan import Item, copied_modules, plan_shards
from model.save.write import write_shards
from quant import Quantization
from quant.formats.layouts import Layout, check_layout


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
        copied: modules of the source that are no part of the model, copied as they are: towers, MTP heads.
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
    """Refuse before a run what could not be exported after it; a collective, with the arguments and errors of
    :func:`export_model`."""
    with errors_on_all_ranks(Exception):
        if is_main():
            shards = _plan(model, quantization, Path(source_dir), layout, 5 * 10**9)
            if layout == "gguf":
                plan_gguf(model, chain(*shards), template)
            check_loadable(Path(source_dir), shards, trust_remote_code=trust_remote_code)
            if quantization is not None:
                configuration(model, quantization, layout, shards)


def _plan(
    model: PreTrainedModel, quantization: Quantization | None, source: Path, layout: Layout, max_shard_size: int
) -> list[list[Item]]:
    if max_shard_size <= 0:
        raise ValueError(f"max_shard_size is {max_shard_size} bytes, expected at least 1")
    if not (source / "config.json").is_file():
        raise ValueError(
            f"{source} has no config.json: expected the checkpoint directory that the model was built from"
        )
    if quantization is not None:
        check_layout(layout, (layer.scheme for layer in quantization.layers.values()))
        if layout == "executorch":
            check_executorch(model, quantization)
    return plan_shards(model, quantization, layout, max_shard_size, read_checkpoint(source, model).tensors)


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
    overwrite: bool = False,
    trust_remote_code: bool = False,
) -> ExportReport:
    """Write ``model`` as a checkpoint directory for transformers, vLLM, SGLang or llama.cpp. A collective.

    Args:
        model: the model in training, partitioned or not; its parameters are read only.
        quantization: what ``quant.prepare`` returned. None writes every weight as it is, without scales: a plain
            checkpoint.
        source_dir: what the model was built from; its configurations, tokenizer and chat template are carried over.
        out_dir: the directory to make.
        layout: how its layers are written, see :mod:`quant.formats.layouts`.
        template: of layout ``gguf``, a GGUF file of the base model, see ``gguf_template.py``.
        adapter: one that stays beside the model, written into a folder ``adapter``.
        max_shard_size: bytes of tensors in a file. A larger module gets a file of its own; GGUF is always one file.
        overwrite: replace an ``out_dir`` that is not empty, as a whole, when the new one is complete.
        trust_remote_code: whether Python code in ``source_dir`` may be run.

    Raises:
        RankError: on every rank, and nothing is left: the layout cannot hold a scheme, config.json names a class that
            would not find its weights (``loadable.py``), ``out_dir`` is not empty, a full disk, NaN, a bad scale.
    """
    begin, source, out = time.perf_counter(), Path(source_dir), Path(out_dir)
    check_finite(model, f"{out} was not written: the model diverged, export an earlier checkpoint")
    with errors_on_all_ranks(ValueError, OSError):
        shards = _plan(model, quantization, source, layout, max_shard_size if layout != "gguf" else sys.maxsize)
    total = sum(item.bytes for shard in shards for item in shard)
    aside, gguf = out.with_name(f"{out.name}.tmp-{secrets.token_hex(4)}"), None
    # Whatever goes wrong on rank 0 alone must reach the others, which are in the next collective already.
    with errors_on_all_ranks(Exception):
        if is_main():
            check_destination(out, total, overwrite)
            check_loadable(source, shards, trust_remote_code=trust_remote_code)
            gguf = plan_gguf(model, chain(*shards), template) if layout == "gguf" else None
            aside.mkdir()
    try:
        files, peak = _written(shards, aside, layout, gguf)
        with errors_on_all_ranks(Exception):
            if is_main():
                _check_files(shards, files, aside, gguf)
                write_config(model, quantization, layout, source, aside, shards)
                copy_companions(source, aside)
                if adapter is not None:
                    adapter.write(aside / FOLDER)
                publish(aside, out)
    finally:
        if is_main():
            shutil.rmtree(aside, ignore_errors=True)  # nothing there any more if it was published
    count, seconds = sum(len(item.shapes) for item in chain(*shards)), time.perf_counter() - begin
    return ExportReport(out, files, count, total, seconds, peak, copied_modules(shards))


def _written(shards: list[list[Item]], aside: Path, layout: Layout, gguf: GGUFPlan | None) -> tuple[list[str], int]:
    """Write the files; what :func:`write_shards` returns. ``gguf``: of rank 0, the only one that writes."""
    if layout == "executorch":
        return write_shards(shards, aside, writer=torchao_files(shards))
    if layout != "gguf":
        return write_shards(shards, aside)

    def writer(path: Path, _: list[Item]) -> GGUFWriter:
        assert gguf is not None
        return GGUFWriter(path, gguf)

    return write_shards(shards, aside, FILE, writer)


def _check_files(shards: list[list[Item]], files: list[str], aside: Path, gguf: GGUFPlan | None) -> None:
    """Read back what was written, and say which of several files holds what."""
    if gguf is not None:
        check_gguf_written(aside / FILE, gguf)
        return
    write_index(shards, files, aside)
    check_written(aside, shards)
