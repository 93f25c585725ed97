"""Compare ranks before weights are read: everything that affects their results must be equal.

Ranks may be started by hand with other arguments or in other directories, and machines may differ in disks, checkouts
and environments, mostly without an error: with other data or seeds the batches of ranks overlap, with other weights
ZeRO mixes two models, with another number of steps ranks wait in a collective, and an output directory that is not
shared gets only a part of a checkpoint. So three functions compare ranks, and all ranks end if two differ:

- :func:`check_ranks_agree`, the first exchange of every job: script, recipe, versions, sources, environment, files;
- :func:`check_same_samples`: the tokens and labels that the ranks read;
- :func:`check_shared`: the output directory.

Only devices, paths of caches and the network may differ. If all is equal, these functions cost a few small gathers of
digests and file identities. Files are read only if ranks see different copies of them, and then as a whole: a machine
loads only its partitions from its copy, so the model would be a mixture of copies that differ in any byte.

With a process group, :mod:`model.ranks` raises an error of one rank on all of them. Without it, a rank with a bad
recipe or a missing file would exit alone, and the others would wait until the timeout: see :func:`tell_other_ranks`.
"""

import hashlib
import json
import os
import platform
import re
import secrets
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from data.samples import Sample, samples_of
from engine.cluster.job import join_ranks
from engine.config.config import Recipe
from engine.config.errors import RecipeError
from engine.config.hub import named
from model.checkpoint.fingerprint import digest_of_range, identity
from model.console import progress_bar
from model.ranks import (
    RankError,
    barrier,
    errors_on_all_ranks,
    gather_objects,
    is_main,
    listed,
    rank,
    shut_down,
    world_size,
)

PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "safetensors", "numpy")
_SOURCES = ("data", "engine", "launch", "model", "quant", "tools")
# Environment variables that change numbers, or the order of collectives.
_VARIABLES = re.compile(
    r"(ATEN|CUBLAS|CUBLASLT|CUDNN|DEEPQAT|DS|NVIDIA_TF32|TORCHDYNAMO|TORCHINDUCTOR|TORCH_ALLOW_TF32|TORCH_COMPILE|TRITON"
    r"|NCCL_ALGO|NCCL_PROTO)(_.*)?(?<!_DIR)(?<!_PATH)(?<!_HOME)"
)
PIECE, PIECES_AT_ONCE = 2**28, 8
"""Bytes of a file that a thread reads, and how many such pieces a rank reads before it waits for the others."""
MOST_DIFFERENCES = 5  # in a message
# A directory that another machine has just made appears late: NFS may cache its absence for a minute.
PATIENCE_SECONDS = 75.0
# Ranks of one command reach the same error within this time, and only one of them prints it.
SHOWN_SECONDS = 5.0


class RanksDifferError(RankError):
    """Error of ranks that were not started alike. Every rank prints it, as each may have its own terminal."""


def check_ranks_agree(inputs: Mapping[str, Any], files: Mapping[str, str | Path | None]) -> None:
    """Refuse ranks that differ in script, inputs, versions, sources, environment or files; a collective. A single rank
    is not checked.

    Args:
        inputs: arguments of the job that must be equal, by name; plain values, which may be nested.
        files: files and directories that the ranks read, by name. None is skipped, and so are paths that a name on the
            Hugging Face Hub was replaced by. A path may be missing, if it is missing on all ranks.

    Raises:
        RankError: on every rank: ranks differ; the message has the first differences, the values and their ranks.
    """
    if world_size() == 1:
        return
    with errors_on_all_ranks(OSError):
        facts = dict(_facts(inputs))
        loaded = dict(_loaded())
    _compare(facts, loaded)
    # Commits of the Hugging Face Hub are compared as inputs; other programs may have added files to the cache.
    _compare_files({key: path for key, path in files.items() if path is not None and named(path) == path})


def _compare_files(paths: Mapping[str, str | Path]) -> None:
    """Raise on every rank if the ranks see different files at a path; a collective. ``paths`` are equal on all ranks.
    If ranks see several copies of a file, the ranks of each copy read it together, each byte once."""
    with errors_on_all_ranks(OSError):
        mine = {key: identity(path) for key, path in paths.items()}
    everywhere = gather_objects(mine)
    seen = {key: [theirs[key] for theirs in everywhere] for key in paths}
    copied = {key: Path(path) for key, path in paths.items() if len({*seen[key]}) > 1}
    if not copied:
        return
    _compare({_file(key, copied[key], name): f"{size:,} bytes" for key in copied for name, size, *_ in mine[key]})
    work = list[tuple[str, Path, int, int]]()  # of this rank: key, file, and a range of its bytes
    for key, path in copied.items():
        readers = [index for index, theirs in enumerate(seen[key]) if theirs == mine[key]]
        pieces = [(name, at, min(at + PIECE, size)) for name, size, *_ in mine[key] for at in range(0, size, PIECE)]
        for name, begin, end in pieces[readers.index(rank()) :: len(readers)]:
            work.append((key, path / name if path.is_dir() else path, begin, end))
    found = gather_objects(_read(work))
    digests: dict[str, Any] = {}
    for key, path in copied.items():
        of_copy = [one for theirs, one in zip(seen[key], found, strict=True) if theirs == mine[key]]
        for (_, name, _), digest in sorted(item for one in of_copy for item in one.items() if item[0][0] == key):
            digests.setdefault(_file(key, path, name), hashlib.blake2b(digest_size=16)).update(digest)
    _compare({name: digest.hexdigest() for name, digest in digests.items()})


def _file(key: str, path: Path, name: str) -> str:
    return f"{key} {path} (files): {name}"


def _read(work: Sequence[tuple[str, Path, int, int]]) -> dict[tuple[str, str, int], bytes]:
    """Hash ranges of files (recipe's key, file, begin, end); return digests by (key, file name, begin).

    The ranks meet after every few ranges, so that a slow disk does not exceed the others' time-out; a collective."""
    digests = {}
    bar = progress_bar(sum(end - begin for *_, begin, end in work), "comparing copies of files", "B")
    with bar, ThreadPoolExecutor() as pool:
        for first in range(0, max(gather_objects(len(work))), PIECES_AT_ONCE):
            some = work[first : first + PIECES_AT_ONCE]
            with errors_on_all_ranks(OSError):
                for piece, digest in zip(some, pool.map(lambda one: digest_of_range(*one[1:]), some), strict=True):
                    key, file, begin, end = piece
                    digests[key, file.name, begin] = digest
                    bar.update(end - begin)
    return digests


def files_of(recipe: Recipe) -> dict[str, str | Path | None]:
    """Map keys of the recipe to the paths of files and directories that ranks read, None if there is none. Data files
    are not included: their samples are compared (:func:`check_same_samples`)."""
    quant, loss = recipe.quant, recipe.loss
    return {
        "model.path": recipe.model.path,
        "quant.scales": quant.scales,
        "quant.start": quant.start,
        "adapter.start": recipe.adapter.start,
        "loss.teacher": loss.teacher,
        "loss.teacher_cache": loss.teacher_cache,
        "export.template": recipe.export.template,
    }


def check_same_samples(*samples: Sequence[Sample]) -> None:
    """Refuse ranks whose samples differ, as ranks draw samples by index; a collective. ``samples``: those for training,
    those held out, ... Raises RankError on every rank if samples differ; the message has their numbers and digests."""
    if world_size() > 1:
        texts = [f"{len(part):,} samples, digest {samples_of(part).key}" for part in samples if part]
        _compare({"data (tokens and labels)": "; ".join(texts)})


def check_shared(directory: Path) -> None:
    """Refuse an output directory that ranks do not share: rank 0 writes a file there, which every rank must see within
    ``PATIENCE_SECONDS``. A collective.

    Args:
        directory: output directory, the same path on all ranks; exists on rank 0.

    Raises:
        RankError: on every rank: the directory is not shared (the message has the ranks that do not see the file), or
            cannot be written.
    """
    probe: str | None = None
    with errors_on_all_ranks(OSError):
        if is_main():
            # A new name, whose absence no machine has cached.
            probe = f".shared-{secrets.token_hex(8)}"
            (directory / probe).touch()
    probe = gather_objects(probe)[0]
    assert probe is not None
    found = gather_objects((socket.gethostname(), _appears(directory / probe)))
    blind = [f"{host} (rank {index})" for index, (host, sees) in enumerate(found) if not sees]
    if is_main():
        (directory / probe).unlink(missing_ok=True)
    if blind:
        raise RanksDifferError(
            f"output_dir: {str(directory)!r} of {listed(blind)} is not that of {found[0][0]} (rank 0), "
            "expected a directory that all ranks share: each writes its part of a checkpoint there"
        )


def _appears(path: Path) -> bool:
    """Tell if a file exists or appears within ``PATIENCE_SECONDS``."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


def _compare(facts: dict[str, str], loaded: Mapping[str, str] | None = None) -> None:
    """Raise on every rank if ranks differ in ``facts``, or in a value of ``loaded`` that both have; a collective. The
    ranks exchange a digest, and the values themselves only if digests differ."""
    known = (facts, loaded or {})
    if len({*gather_objects(hashlib.blake2b(repr(known).encode(), digest_size=16).digest())}) == 1:
        return
    found = gather_objects((socket.gethostname(), *known))
    problems = []
    for name in dict.fromkeys(name for _, theirs, _ in found for name in theirs):
        problems += _difference(name, [(host, theirs.get(name, "not there")) for host, theirs, _ in found])
    for name in dict.fromkeys(name for _, _, theirs in found for name in theirs):
        problems += _difference(name, [(host, theirs.get(name)) for host, _, theirs in found])
    if problems:
        more = [f"and {len(problems) - MOST_DIFFERENCES} more"] if len(problems) > MOST_DIFFERENCES else []
        raise RanksDifferError(
            f"the ranks differ: {'; '.join([*problems[:MOST_DIFFERENCES], *more])}. Start every rank with the same "
            "command, files, versions and environment"
        )


def _difference(name: str, values: Sequence[tuple[str, str | None]]) -> list[str]:
    """Describe the values of all ranks, given as (host, value), if they differ: each with its first host and ranks."""
    ranks: dict[str, list[int]] = {}
    for index, (_, value) in enumerate(values):
        if value is not None:
            ranks.setdefault(value, []).append(index)
    if len(ranks) < 2:
        return []
    parts = [
        f"{value} on {values[found[0]][0]} (rank{'s' * (len(found) > 1)} {listed(list(map(str, found)), 4)})"
        for value, found in ranks.items()
    ]
    return [f"{name}: {', '.join(parts)}"]


def _facts(inputs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and value of everything that must be the same on all ranks, the most telling first."""
    yield "script", Path(sys.argv[0]).name
    yield from _flat(named(inputs), "")
    yield "Python", platform.python_version()
    for package in PACKAGES:
        yield package, version(package)
    for name, value in sorted(os.environ.items()):
        if _VARIABLES.fullmatch(name):
            yield f"environment variable {name}", value
    root = Path(__file__).resolve().parents[2]
    for path in sorted(path for folder in _SOURCES for path in (root / folder).rglob("*.*")):
        if path.suffix in (".py", ".h", ".cpp", ".cu"):
            yield f"DeepQAT's {path.relative_to(root)}", _digest(path)


def _loaded() -> Iterator[tuple[str, str]]:
    """Yield name and value of imported modules: the version of a package, a digest of a user's Python file."""
    stdlib = sysconfig.get_path("stdlib")
    for name, module in sorted(sys.modules.items()):
        known = getattr(module, "__dict__", {})  # asking a lazy module would import it
        file = known.get("__file__") or ""
        if isinstance(number := known.get("__version__"), str):
            yield f"module {name}", number
        elif name.split(".")[0] in _SOURCES or "-packages" in file or file.startswith(stdlib):
            continue
        elif file.endswith(".py"):
            yield f"module {name} ({Path(file).name})", _digest(Path(file))


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Flatten a nested dictionary into names (keys joined by dots) and values as text."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, default=str)


def tell_other_ranks(error: str, *, shown: bool = False) -> bool:
    """Send an error that occurred before the process group existed to the other ranks, which raise it too.

    Every process group starts with an exchange of such errors (:func:`engine.session.context.init_ranks`), so this rank
    joins the group to send its own. If it waits for other ranks longer than ``SHOWN_SECONDS``, it prints the error
    first, unless it was ``shown``. With a single rank, or if a process group exists already, do nothing.

    Returns:
        True if the caller should print the error: it was not printed yet, and this is the lowest rank of this machine
        that has it (or no other rank answers). False if nothing was done.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" or dist.is_initialized():
        return False
    text = f"error on rank {os.environ.get('RANK')}: {error}"
    waiting = threading.Timer(SHOWN_SECONDS, print, (text,), {"file": sys.stderr, "flush": True})
    waiting.daemon = True
    if not shown:
        waiting.start()
    try:
        join_ranks()
        alone = False
    except (RankError, RecipeError):  # the other ranks are not there, or the launch itself is wrong
        alone = True
    shown = shown or waiting.finished.is_set()
    waiting.cancel()
    if alone:
        return not shown
    texts = gather_objects(text := f"on {socket.gethostname()}: {error}")
    # The other ranks run the same barriers at the end of launch.exits.clean_exit. If this process exited earlier, they
    # would report its disappearance instead of the error.
    barrier()
    first = texts.index(text) == rank()
    with suppress(RankError):
        shut_down()
    return first and not shown
