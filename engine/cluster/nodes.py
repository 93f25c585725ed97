"""Runs on several machines: what each has by itself must be what the others have.

The ranks of one machine see one disk, one checkout and one environment. Between machines nothing makes sure of that,
and most differences are silent: from other data the ranks draw batches that overlap, other weights make a model of two,
and an output directory that is not shared gets half of a checkpoint. So all of it is compared before weights are read.

A machine here is a launcher with its ranks, and the one with ``LOCAL_RANK`` 0 speaks for it. On one machine there is
nothing to compare: who calls asks :func:`several_machines` first.

Errors that end a job of several machines before it has begun: how the ranks of the other machines learn of them.

Once there is a process group, :mod:`model.ranks` raises what one rank found on all of them. Before that a machine whose
recipe is bad, or which lacks a file, would end alone, and the others would wait for it until the time-out.
"""

import hashlib
import json
import os
import platform
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from data.samples import Sample, digest_of_samples
from engine.cluster.job import join_ranks
from engine.config.config import Recipe
from model.fingerprint import digest_of_checkpoint
from model.ranks import (
    RankError,
    barrier,
    errors_on_all_ranks,
    gather_objects,
    is_main,
    listed,
    local_world_size,
    raise_everywhere,
    rank,
    shut_down,
)

PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "numpy")
SOURCES = ("data", "engine", "launch", "model", "quant", "tools")
# A directory that another machine has just made is seen late: NFS may keep for a minute that it is not there.
PATIENCE_SECONDS = 75.0


def several_machines() -> bool:
    """Whether the run has ranks on several machines, whatever launched them; a collective."""
    return len(_machines()) > 1


def check_nodes_agree(recipe: Recipe, ds_config: dict[str, Any]) -> None:
    """Refuse machines with other versions, another checkout, recipe, DeepSpeed configuration or other weights.

    A collective.

    Raises:
        RankError: on every rank: what differs, with the values of two machines.
    """
    _compare(lambda: dict(_facts(recipe, ds_config)))


def check_same_samples(*samples: Sequence[Sample]) -> None:
    """Refuse machines whose samples differ: the ranks draw rows by number. A collective.

    Raises:
        RankError: on every rank: how many samples two machines have, and their digests.
    """
    _compare(lambda: {"data (tokens and labels)": "; ".join(map(_samples_text, filter(None, samples)))})


def check_shared(directory: Path, key: str) -> None:
    """Refuse a directory if a machine does not see what rank 0 writes there.

    A collective. It takes up to ``PATIENCE_SECONDS`` until it is refused.

    Args:
        directory: where every rank will write its part of something; there on rank 0.
        key: the recipe's key that names the directory, for the message.

    Raises:
        RankError: on every rank: names the directory and the machines, or says why it cannot be written.
    """
    probe: str | None = None
    with errors_on_all_ranks(OSError):
        if is_main():
            # A name that nobody has looked up yet: no machine remembers that it is not there.
            probe = f".shared-{secrets.token_hex(8)}"
            (directory / probe).touch()
    probe = gather_objects(probe)[0]
    assert probe is not None
    seen = not _speaks_for_its_machine() or _appears(directory / probe)
    blind = [f"{host} (rank {index})" for index, (host, sees) in enumerate(gather_objects((_host(), seen))) if not sees]
    if is_main():
        (directory / probe).unlink(missing_ok=True)
    if blind:
        raise RankError(
            f"{key}: {str(directory)!r} of {listed(blind)} is not that of {gather_objects(_host())[0]} (rank 0), "
            "expected a directory that all machines share: each rank writes its part of a checkpoint there"
        )


def _appears(path: Path) -> bool:
    """Whether a file is there, or comes within ``PATIENCE_SECONDS``."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


def _host() -> str:
    """The name of this machine."""
    return socket.gethostname()


def _speaks_for_its_machine() -> bool:
    """Whether this rank is the one that answers for its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _machines() -> list[int]:
    """The global ranks that speak for their machines, one of each; a collective."""
    return [index for index, speaks in enumerate(gather_objects(_speaks_for_its_machine())) if speaks]


def _compare(facts: Callable[[], dict[str, str]]) -> None:
    """Raise RankError on every rank if the facts of two machines differ; a collective. One rank of each finds them."""
    machines = _machines()
    mine: dict[str, str] = {}
    with errors_on_all_ranks(OSError, ValueError):
        if rank() in machines:
            mine = facts()
    found = gather_objects((_host(), mine))
    first_host, first = found[machines[0]]
    problems = []
    for other in machines[1:]:
        host, theirs = found[other]
        for name in dict.fromkeys([*first, *theirs]):
            one, two = first.get(name, "not there"), theirs.get(name, "not there")
            if one != two:
                problems.append(f"{name}: {one} on {first_host} (rank {machines[0]}), {two} on {host} (rank {other})")
    if problems:
        raise RankError("the machines differ:\n" + "\n".join(problems[:20]))


def _facts(recipe: Recipe, ds_config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and value of everything that must be the same on all machines."""
    yield "Python", platform.python_version()
    for package in PACKAGES:
        yield package, version(package)
    yield "DeepQAT (files)", _digest_of_sources()
    yield from _flat(asdict(recipe), "")
    yield from _flat(ds_config, "deepspeed configuration: ")
    yield f"model.path {recipe.model.path} (files)", digest_of_checkpoint(recipe.model.path)
    for key in ("scales", "start"):
        if (path := getattr(recipe.quant, key)) is not None:
            yield f"quant.{key} {path} (files)", _digest_of_files(path)
    if recipe.teacher_kind() == "model":
        yield f"loss.teacher {recipe.loss.teacher} (files)", digest_of_checkpoint(str(recipe.loss.teacher))


def _flat(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Name and value, as text, of everything in a nested dictionary; a name is its keys with dots between them."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, default=str)


def _digest_of_files(directory: str) -> str:
    """A digest of the names and sizes of the safetensors files in a directory, all of which every rank reads."""
    files = sorted(Path(directory).glob("*.safetensors"))
    return (
        f"{len(files)} files, "
        + hashlib.blake2b(
            repr([(file.name, file.stat().st_size) for file in files]).encode(), digest_size=8
        ).hexdigest()
    )


def _digest_of_sources() -> str:
    """A digest of the names and contents of this project's Python files."""
    root = Path(__file__).resolve().parents[2]
    files: Iterable[Path] = sorted(path for folder in SOURCES for path in (root / folder).rglob("*.py"))
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def _samples_text(samples: Sequence[Sample]) -> str:
    """The number of the samples and a digest of their contents, for comparison and for the message."""
    return f"{len(samples):,} samples, digest {digest_of_samples(samples)}"


def spans_nodes() -> bool:
    """Whether the launcher says that there are ranks on other machines; to be asked before there is a process group."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return (local_world_size() or world) < world


def tell_other_nodes(error: str) -> None:
    """Bring an error from before the process group to the ranks of other machines, which may not have it.

    Every process group begins with a look at such errors (``engine.session.context.init_ranks``), so this rank joins it
    to say what is wrong. Nothing happens on one machine, nor once there is a process group.
    """
    if not spans_nodes() or dist.is_initialized():
        return
    join_ranks()
    with suppress(RankError):  # the caller ends this process
        raise_everywhere(f"on {socket.gethostname()}: {error}")
    # The other ranks wait in the same barriers, at the end of launch.exits.clean_exit. If this process ended before
    # they get there, they would report its disappearance instead of the error.
    barrier()
    shut_down()
