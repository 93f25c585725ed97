"""Fingerprints of frozen weights and of checkpoint files, to detect that either has changed."""

import functools
import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from model.checkpoint.names import own_tensors
from model.checkpoint.safetensors import PAGE_BYTES, CheckpointError, read_header
from model.ranks import is_main, reduce_over_ranks
from model.zero import is_partitioned, is_whole, local_data, local_range

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = -7046029254386353131  # 2**64 divided by the golden ratio: nearby indices differ in all bits
_CHUNK = 2**20  # elements summed at a time, 8 MB as integers: a checkpoint may be saved when memory is full


def frozen_weights(model: nn.Module) -> list[str]:
    """List the names of frozen parameters that checkpoint files store as weights: no scales and no adapters. A tied
    parameter is listed under each of its names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return [name for name in own_tensors(model) if name in parameters and not parameters[name].requires_grad]


@torch.no_grad()
def fingerprints(model: nn.Module, names: Iterable[str]) -> dict[str, int]:
    """Compute a 64-bit fingerprint of each of the parameters ``names``, on every rank; a collective.

    The fingerprint is the sum, modulo 2^64, of all elements' bits as integers, each multiplied by an odd number that
    depends on the element's index. So it is the same on every ZeRO stage and with any number of ranks. A change of one
    element always changes the fingerprint, a change of several almost certainly. For packed weights it covers the
    packed bytes.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    chosen = list(names)
    if not chosen:
        return {}
    sums = torch.stack([_local_sum(parameters[name]).cpu() for name in chosen])
    return dict(zip(chosen, reduce_over_ranks(sums).tolist(), strict=True))


def _local_sum(parameter: Tensor) -> Tensor:
    """Compute this rank's part of the fingerprint; only rank 0 adds parameters that are whole on every rank."""
    total = torch.zeros((), dtype=torch.int64)
    if not is_main() and (is_whole(parameter) or not is_partitioned(parameter)):
        return total
    local, (start, _) = local_data(parameter), local_range(parameter)
    for offset, bits in enumerate(local.view(_BITS[local.element_size()]).split(_CHUNK)):
        begin = start + offset * _CHUNK
        places = torch.arange(begin, begin + bits.numel(), device=bits.device)
        total = total.to(bits.device) + (bits.long() * (places * _FACTOR | 1)).sum()  # modulo 2**64
    return total


Identity = tuple[tuple[str, int, int, int, int], ...]
"""Name, size, inode and times of each file."""

WHOLE_BYTES = 64 * 2**20  # a file of up to this size is hashed whole
STRIDE_BYTES = 16 * 2**20  # distance of the samples inside a large tensor


def digest_of_checkpoint(path: str | Path) -> str:
    """Hash config.json and the weight files of a checkpoint into one digest; large files by samples
    (:func:`digest_of_file`)."""
    return _digest_of_checkpoint(str(path), identity(path))


@functools.cache  # every training checkpoint of adapters records the digest of its base
def _digest_of_checkpoint(path: str, _: Identity) -> str:
    digest = hashlib.blake2b((Path(path) / "config.json").read_bytes(), digest_size=16)
    for name, value in digests(path, "*.safetensors").items():
        digest.update(f"{name} {value}".encode())
    return digest.hexdigest()


def digests(path: str | Path, pattern: str = "*") -> dict[str, str]:
    """Hash a file, or each file of a directory, if its name matches ``pattern``; hidden files and ``*.md`` are left
    out. Returns the digests by file name, empty if ``path`` does not exist."""
    files = [file for file in _files(path) if file.match(pattern)]
    with ThreadPoolExecutor() as pool:  # a file server takes a millisecond to answer each of many thousand reads
        return {file.name: value for file, value in zip(files, pool.map(digest_of_file, files), strict=True)}


def digest_of_file(file: Path) -> str:
    """Hash the size and the whole contents of a file of at most ``WHOLE_BYTES``, but only samples of a larger one.

    The samples are a page before and after each multiple of ``STRIDE_BYTES`` and at the end; of a safetensors file,
    also its header, and a page before and after the begin and end of each tensor. So every tensor is sampled, and the
    digest of another revision differs even if sizes and header are the same. For 1 GB of file it reads 0.6 MB (dense
    model of 8 B parameters) to 3 MB (MoE with 18,000 experts).
    """
    size = file.stat().st_size
    digest, done = hashlib.blake2b(f"{size} ".encode(), digest_size=16), 0
    with file.open("rb", buffering=0) as stream:
        for begin, end in _samples(file, size):
            while (start := max(begin, done)) < end and (chunk := os.pread(stream.fileno(), end - start, start)):
                digest.update(chunk)
                done = start + len(chunk)
    return digest.hexdigest()


def _samples(file: Path, size: int) -> list[tuple[int, int]]:
    """List the byte ranges of a file to hash, in order; they may overlap."""
    if size <= WHOLE_BYTES:
        return [(0, size)]
    edges, head = {*range(0, size, STRIDE_BYTES), size}, 0
    if file.suffix == ".safetensors":
        with suppress(CheckpointError):  # damaged: reading the weights says how
            tensors = list(read_header(file))
            head = tensors[0].begin if tensors else size
            edges |= {edge for tensor in tensors for edge in (tensor.begin, tensor.end)}
    return [(0, head), *((max(0, edge - PAGE_BYTES), min(size, edge + PAGE_BYTES)) for edge in sorted(edges))]


def digest_of_range(file: Path, begin: int, end: int) -> bytes:
    """Hash bytes ``[begin, end)`` of a file."""
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb", buffering=0) as stream:
        stream.seek(begin)
        while (left := end - stream.tell()) > 0 and (chunk := stream.read(min(left, 2**24))):
            digest.update(chunk)
    return digest.digest()


def identity(path: str | Path) -> Identity:
    """Identify a file, or the files of a directory, by name, size, inode and times, without reading them. The result is
    equal for all processes and machines that share the files, and almost certainly different for a copy or after a
    change. It is empty if ``path`` does not exist."""
    found = [(file.name, file.stat()) for file in _files(path)]
    return tuple((name, at.st_size, at.st_ino, at.st_mtime_ns, at.st_ctime_ns) for name, at in found)


def _files(path: str | Path) -> list[Path]:
    """List a file, or a directory's files sorted by name, without hidden files and ``*.md``; empty if it is absent."""
    path = Path(path)
    inside = path.iterdir() if path.is_dir() else [path]
    return sorted(
        file for file in inside if file.is_file() and not file.name.startswith(".") and file.suffix.lower() != ".md"
    )
