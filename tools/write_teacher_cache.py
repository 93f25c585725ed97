"""Write a teacher's most likely tokens for every target of the training samples (see :mod:`data.teacher_cache`)."""

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig

from data import teacher_cache
from data.loader import HeldOut, MicroBatch, model_inputs, on_device
from data.samples import Sample
from data.teacher_cache import CACHE_DTYPES, Manifest, Writer
from engine.config.config import Recipe
from engine.config.errors import RecipeError
from engine.config.hub import named
from engine.config.sections import ParallelRecipe
from engine.losses.chunked import TeacherHidden, row_blocks
from engine.losses.objective import take_top_k, tokens_at_a_time
from engine.session.context import RunContext, build_loader, pad_token, start_ranks
from engine.session.teacher import ModelTeacher, check_teacher, load_teacher
from model.checkpoint.fingerprint import digest_of_checkpoint
from model.console import progress_bar
from model.ranks import barrier, errors_on_all_ranks, gather_objects, is_main, naming, rank, say, world_size
from model.save.aside import Aside
from model.zero import gathered


def check_recipe(recipe: Recipe, out: Path | None) -> Path:
    """Return the directory to write: ``out``, or by default ``loss.teacher_cache``. Raises RecipeError, with one line
    per problem, for a recipe from which no cache can be written. Changes ``recipe.loss``: unsets ``teacher_cache``, and
    sets a ``kd_weight`` of 0 to 1."""
    settings = recipe.loss
    if out is None and settings.teacher_cache:
        out = Path(settings.teacher_cache)
    settings.teacher_cache = None  # not a source of this run
    settings.kd_weight = settings.kd_weight or 1.0  # the teacher runs, whatever the weight of its loss
    problems = []
    if recipe.data.kind == "on_policy":
        expected = "chat, text or mixed: a teacher cannot be asked before the student has written its answers"
        problems.append(f"data.kind: 'on_policy', expected {expected}")
    if settings.named_teacher() != "model":
        problems.append(f"loss.teacher: {settings.teacher!r}, expected the directory of the teacher to run")
    if settings.teacher_weights != "full":
        expected = (
            "full: a cache is read by many runs and should be exact, and its teacher shares memory with no student"
        )
        problems.append(f"loss.teacher_weights: {settings.teacher_weights!r}, expected {expected}")
    if settings.top_k is None:
        problems.append("loss.top_k: None, expected how many tokens to keep of each position, like 100")
    if out is None:
        problems.append("--out: None, expected a new directory (or loss.teacher_cache)")
    elif out.exists():
        problems.append(f"--out: {str(out)!r} exists, expected a new directory")
    try:
        recipe.validate_files()
    except RecipeError as error:
        problems.append(str(error))
    if problems:
        raise RecipeError("\n".join(problems))
    assert out is not None
    return out


def write_cache(recipe: Recipe, out: Path) -> Manifest:
    """Run the teacher over the training samples, write the cache, and return its manifest; a collective. Each rank runs
    a share of the samples. Raises RankError on every rank if the cache could not be written; the text has the reason,
    and ``out`` is not created."""
    recipe = dataclasses.replace(recipe, parallel=ParallelRecipe())  # only training shares rows
    context = start_ranks(recipe, {"--out": out})
    path, top_k = recipe.loss.teacher, recipe.loss.top_k
    assert path is not None and top_k is not None, "check_recipe was not called"
    with errors_on_all_ranks(OSError, ValueError):
        config = AutoConfig.from_pretrained(
            recipe.model.path, trust_remote_code=recipe.model.trust_remote_code, local_files_only=True
        )
    logits = int(config.get_text_config().vocab_size)
    tokens = {"model.path": logits, "loss.teacher": check_teacher(recipe, context.tokenizer, logits)}
    loader, _ = build_loader(recipe, context.tokenizer, tokens)
    teacher = load_teacher(recipe, context, logits)
    vocabulary = teacher.vocabulary or teacher.head.out_features
    with errors_on_all_ranks(OSError):
        manifest = Manifest(
            top_k=min(top_k, vocabulary),
            vocabulary=vocabulary,
            samples=len(loader.samples),
            positions=int(teacher_cache.offsets_of(loader.samples)[-1]),
            samples_digest=loader.digest,
            tokenizer_digest=teacher_cache.digest_of_tokenizer(context.tokenizer),
            teacher_digest=digest_of_checkpoint(path),
            teacher=named(path),
            checksums={},
        )
    aside = None
    with ExitStack() as stack:
        with errors_on_all_ranks(OSError, ValueError):
            if is_main():
                aside = stack.enter_context(closing(Aside(out, sum(map(manifest.bytes_of, CACHE_DTYPES)))))
                with naming(aside.path):
                    teacher_cache.create(aside.path, manifest)
        directory = gather_objects(aside and aside.path)[0]
        _write_rows(recipe, context, loader.samples, teacher, manifest, directory)
        _finish(directory, manifest)
        with errors_on_all_ranks(OSError):
            if aside is not None:
                aside.publish()
    say(
        f"teacher cache: {manifest.positions:,} positions of {manifest.samples:,} samples, {manifest.top_k} tokens "
        f"each, in {out}"
    )
    return manifest


def _write_rows(
    recipe: Recipe,
    context: RunContext,
    samples: Sequence[Sample],
    teacher: ModelTeacher,
    manifest: Manifest,
    directory: Path,
) -> None:
    """Run the teacher over this rank's share of the samples, and write the rows of these samples; a collective."""
    with errors_on_all_ranks(OSError):  # also if the directory is not on a disk that all ranks share
        writer = Writer(directory)
    held = HeldOut(
        samples,
        micro_batch_size=recipe.data.micro_batch_size,
        rank=rank(),
        world=world_size(),
        pad_token_id=pad_token(context.tokenizer, manifest.vocabulary),
    )
    offsets = teacher_cache.offsets_of(samples)
    error: OSError | None = None
    for index, batch in enumerate(progress_bar(desc="teacher", unit="batch", over=held)):
        if index % 64 == 63:  # only stage 3 keeps the ranks together, and a collective waits 10 minutes at most
            barrier()
        found = _rows_of(teacher, on_device(batch, context.device), manifest, recipe)
        try:
            with naming(directory):
                _write(writer, offsets, batch, found)
        except OSError as caught:  # the other ranks are in the next forward: continue, and raise after the last forward
            error = error or caught
    with errors_on_all_ranks(OSError), naming(directory):
        if error is not None:
            raise error
        if is_main():
            writer.write(0, {"offsets": offsets})
        writer.close()
    barrier()


def _finish(directory: Path, manifest: Manifest) -> None:
    """Compute the checksums of all files, each rank a share, and add them to the cache on rank 0; a collective."""
    with errors_on_all_ranks(OSError):
        mine = teacher_cache.checksums(directory, manifest, rank(), world_size())
    shares = gather_objects(mine)
    with errors_on_all_ranks(OSError), naming(directory):
        if is_main():
            merged = {name: dict(item for share in shares for item in share[name].items()) for name in mine}
            sums = {name: [blocks[index] for index in sorted(blocks)] for name, blocks in merged.items()}
            teacher_cache.finish(directory, dataclasses.replace(manifest, checksums=sums))


@torch.no_grad()
def _rows_of(teacher: ModelTeacher, batch: MicroBatch, manifest: Manifest, recipe: Recipe) -> dict[str, np.ndarray]:
    """Run the teacher, and return the cache's arrays for a batch's valid positions, in row-major order; a
    collective."""
    teacher_output = teacher.forward({**model_inputs(batch), "use_cache": False}, batch)
    found = teacher_output.teacher
    assert isinstance(found, TeacherHidden)
    positions = batch["positions"]
    hidden, labels = found.hidden.flatten(0, -2)[positions], batch["labels"].flatten()[positions]
    pieces: list[dict[str, Tensor]] = []
    with gathered(teacher_output.parameters):
        size = tokens_at_a_time(recipe.loss.chunk_tokens, hidden.device)
        for rows, targets in zip(hidden.split(size), labels.split(size), strict=True):
            pieces += _rows_of_chunk(found, rows, targets, manifest)
    names = pieces[0] if pieces else ()  # a batch without targets
    return {name: torch.cat([piece[name] for piece in pieces]).cpu().numpy() for name in names}


def _rows_of_chunk(
    teacher: TeacherHidden, hidden: Tensor, labels: Tensor, manifest: Manifest
) -> list[dict[str, Tensor]]:
    """Compute the cache's arrays for some positions, one block of positions at a time."""
    bias = None if teacher.bias is None else teacher.bias[: manifest.vocabulary]
    logits = F.linear(hidden, teacher.weight[: manifest.vocabulary], bias)
    pieces = []
    for block in row_blocks(logits):
        exact = teacher.function(logits[block].float())
        log_probs = F.log_softmax(exact, dim=-1)
        top = take_top_k(exact, log_probs, manifest.top_k)
        pieces.append(
            {
                "indices": top.indices,
                "log_probs": top.log_probs,
                "log_tail": top.log_tail,
                "logsumexp": exact.logsumexp(-1),
                "label_log_probs": log_probs.gather(-1, labels[block].unsqueeze(-1)).squeeze(-1),
            }
        )
    return pieces


def _write(writer: Writer, offsets: np.ndarray, batch: MicroBatch, found: dict[str, np.ndarray]) -> None:
    """Write the arrays of a batch: the rows of each sample begin at the sample's entry in ``offsets``."""
    start = 0
    for sample in batch["sample_ids"].tolist():
        stop = start + int(offsets[sample + 1] - offsets[sample])
        writer.write(int(offsets[sample]), {name: array[start:stop] for name, array in found.items()})
        start = stop
