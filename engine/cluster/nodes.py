"""Runs on several machines: compare environment, files and samples between them, and report early errors to all.

The ranks of one machine share disk, checkout and environment. Machines may differ in them, mostly without an error:
with other data the batches of ranks overlap, with other weights ZeRO mixes two models, and an output directory that is
not shared gets half of a checkpoint. So everything is compared before weights are read.

A machine is a launcher with its ranks, represented by the rank with ``LOCAL_RANK`` 0. Callers check
:func:`several_machines` first: on one machine there is nothing to compare.

With a process group, :mod:`model.ranks` raises an error of one rank on all of them. Without it, a machine with a bad
recipe or a missing file would exit alone, and the others would wait until the timeout: see :func:`tell_other_nodes`.
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
from model.checkpoint.fingerprint import digest_of_checkpoint
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
_SOURCES = ("data", "engine", "launch", "model", "quant", "tools")
# A directory that another machine has just made appears late: NFS may cache its absence for a minute.
PATIENCE_SECONDS = 75.0


def several_machines() -> bool:
    """Tell if the run has ranks on several machines, whatever launched them; a collective."""
    return len(_machines()) > 1


def check_nodes_agree(recipe: Recipe, ds_config: dict[str, Any]) -> None:
    """Refuse machines that differ in versions, checkout, recipe, DeepSpeed configuration or weights; a collective.

    Raises:
        RankError: on every rank, with the differences and the values on two machines.
    """
    _compare(lambda: dict(_facts(recipe, ds_config)))


def check_same_samples(*samples: Sequence[Sample]) -> None:
    """Refuse machines whose samples differ, as ranks draw samples by index; a collective.

    Raises:
        RankError: on every rank, with numbers and digests of the samples on two machines.
    """
    _compare(lambda: {"data (tokens and labels)": "; ".join(map(_samples_text, filter(None, samples)))})


def check_shared(directory: Path, key: str) -> None:
    """Refuse a directory if a machine does not see a file that rank 0 wrote there within ``PATIENCE_SECONDS``.

    A collective.

    Args:
        directory: output directory of all ranks; exists on rank 0.
        key: the recipe's key of the directory, for the message.

    Raises:
        RankError: on every rank, with the directory and the machines, or the reason why it cannot be written.
    """
    probe: str | None = None
    with errors_on_all_ranks(OSError):
        if is_main():
            # A new name, whose absence no machine has cached.
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
    """Tell if a file exists or appears within ``PATIENCE_SECONDS``."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


def _host() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


def _speaks_for_its_machine() -> bool:
    """Tell if this rank represents its machine (local rank 0)."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _machines() -> list[int]:
    """List the global ranks that represent their machines, one per machine; a collective."""
    return [index for index, speaks in enumerate(gather_objects(_speaks_for_its_machine())) if speaks]


def _compare(facts: Callable[[], dict[str, str]]) -> None:
    """Call ``facts`` once per machine; raise RankError on every rank if two machines differ. A collective."""
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
    """Yield name and value of everything that must be the same on all machines."""
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
    """Flatten a nested dictionary into names (keys joined by dots) and values as text."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, default=str)


def _digest_of_files(directory: str) -> str:
    """Digest names and sizes of the safetensors files in a directory; every rank reads these files later."""
    files = sorted(Path(directory).glob("*.safetensors"))
    return (
        f"{len(files)} files, "
        + hashlib.blake2b(
            repr([(file.name, file.stat().st_size) for file in files]).encode(), digest_size=8
        ).hexdigest()
    )


def _digest_of_sources() -> str:
    """Digest names and contents of this project's Python files."""
    root = Path(__file__).resolve().parents[2]
    files: Iterable[Path] = sorted(path for folder in _SOURCES for path in (root / folder).rglob("*.py"))
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def _samples_text(samples: Sequence[Sample]) -> str:
    """Format the number of samples and a digest of their contents, for comparison and for the message."""
    return f"{len(samples):,} samples, digest {digest_of_samples(samples)}"


def spans_nodes() -> bool:
    """Tell from the launcher's variables if ranks run on other machines; works before there is a process group."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return (local_world_size() or world) < world


def tell_other_nodes(error: str) -> None:
    """Raise an error that occurred before the process group existed on the ranks of other machines, too.

    Every process group starts with an exchange of such errors (:func:`engine.session.context.init_ranks`), so this rank
    joins the group to send its own. Does nothing on one machine, or if there is a process group already.
    """
    if not spans_nodes() or dist.is_initialized():
        return
    join_ranks()
    with suppress(RankError):  # the caller ends this process
        raise_everywhere(f"on {socket.gethostname()}: {error}")
    # The other ranks run the same barriers at the end of launch.exits.clean_exit. If this process exited earlier, they
    # would report its disappearance instead of the error.
    barrier()
    shut_down()
