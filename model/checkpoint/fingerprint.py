"""Fingerprints of frozen weights, which detect if these still equal the model's files, and of the files themselves."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from model.checkpoint.names import own_tensors
from model.ranks import is_main, reduce_over_ranks
from model.zero import is_partitioned, is_whole, local_data, local_range

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = -7046029254386353131  # 2**64 divided by the golden ratio: nearby indices differ in all bits
_CHUNK = 2**20  # elements summed at a time, 8 MB as integers: a checkpoint may be saved when memory is full


def frozen_weights(model: nn.Module) -> list[str]:
    """List the names of the frozen parameters in a checkpoint's files, without scales; a tied parameter under each of
    its names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return [name for name in own_tensors(model) if name in parameters and not parameters[name].requires_grad]


@torch.no_grad()
def fingerprints(model: nn.Module, names: Iterable[str]) -> dict[str, int]:
    """Compute a 64-bit fingerprint of each of these parameters, on every rank; a collective.

    The fingerprint is the sum of all elements' bits, each multiplied by an odd number that depends on the element's
    index. So it is the same on every ZeRO stage and with any number of ranks. One differing element always changes the
    fingerprint, several almost certainly do. For packed weights it covers the packed bytes.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    chosen = list(names)
    if not chosen:
        return {}
    sums = torch.stack([_local_sum(parameters[name]).cpu() for name in chosen])
    return dict(zip(chosen, reduce_over_ranks(sums).tolist(), strict=True))


def _local_sum(parameter: Tensor) -> Tensor:
    """Sum this rank's elements; parameters that are whole on every rank are added by rank 0 only."""
    total = torch.zeros((), dtype=torch.int64)
    if not is_main() and (is_whole(parameter) or not is_partitioned(parameter)):
        return total
    local, (start, _) = local_data(parameter), local_range(parameter)
    for offset, bits in enumerate(local.view(_BITS[local.element_size()]).split(_CHUNK)):
        begin = start + offset * _CHUNK
        places = torch.arange(begin, begin + bits.numel(), device=bits.device)
        total = total.to(bits.device) + (bits.long() * (places * _FACTOR | 1)).sum()  # modulo 2**64
    return total


DIGEST_BYTES = 2**20  # read at three offsets of each weight file


def digest_of_checkpoint(path: str | Path) -> str:
    """Hash config.json, and name, size, beginning, middle and end of every weight file."""
    digest = hashlib.blake2b((Path(path) / "config.json").read_bytes(), digest_size=16)
    for file in sorted(Path(path).glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as stream:
            for start in (0, size // 2, max(0, size - DIGEST_BYTES)):
                stream.seek(start)
                digest.update(stream.read(DIGEST_BYTES))
    return digest.hexdigest()
