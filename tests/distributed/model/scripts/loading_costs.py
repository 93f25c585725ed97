"""Costs of loading on real ranks: bytes alive at one time, and bytes read."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.checkpoint.load import load_weights
from model.checkpoint.safetensors import INDEX, PAGE_BYTES, read_headers
from model.quantized.checkpoint import read_checkpoint
from model.ranks import is_main, world_size
from model.save.export_model import export_model
from model.scales.in_place import renew_weight_scales
from model.zero import full_numel, local_range, partition_new_parameters
from quant import SCHEMES, replace_layers
from tests.distributed.model.scripts.models import CPU, built, ds_config, loaded

# Codes packed and one by one, weights in the dtype of the model, what they are rounded to again, and fp32 on the way.
BYTES_TO_DECODE = 32
ATTEMPTS = 3  # a thread of gloo's may hold the tensor of a finished broadcast until it is scheduled again


class PeakTensorBytes(TorchDispatchMode):
    """The most bytes of CPU tensors made inside the block that were alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device == CPU:
                storage = tensor.untyped_storage()
                self.alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.alive = {key: held for key, held in self.alive.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def check_peak_bytes(path: Path, decoded: int = 0) -> None:
    """Building and loading need the partitions and one parameter; the model is many times that, a MoE layer several.
    Of codes so many weights are decoded at a time."""
    model = loaded(path, ds_config(3))
    parameters = list(model.parameters())
    partitions = sum(parameter.ds_tensor.nbytes for parameter in parameters)
    largest = max(2 * full_numel(parameter) for parameter in parameters)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    layer = sum(2 * full_numel(parameter) for parameter in model.model.layers[0].mlp.experts.parameters())
    # Besides: the frequencies while they are computed, and flags of DeepSpeed's, in all less than a page.
    bound = partitions + max(largest, BYTES_TO_DECODE * decoded) + buffers + 4096
    assert partitions + layer > bound, "the bound would not show that a whole MoE layer was made"
    peaks = []
    for _ in range(ATTEMPTS):
        with PeakTensorBytes() as memory:
            loaded(path, ds_config(3))
        peaks.append(memory.peak)
    assert partitions < min(peaks) <= bound, (peaks, bound, partitions, largest, layer)


def coded(path: Path) -> Path:
    """The checkpoint in int4, one scale per row; a collective."""
    out = path.with_name(f"{path.name}-coded")
    model = loaded(path, ds_config(3))
    quantization = replace_layers(model, SCHEMES["w4a16_channel"], learn_weight_scale=False, learn_input_scale=False)
    partition_new_parameters(model, ds_config(3))
    renew_weight_scales(quantization)
    export_model(model, quantization, path, out)
    return out


def largest_linear(path: Path) -> int:
    """Weights of the largest Linear that is stored as codes."""
    linears = read_checkpoint(path, built(path, ds_config(3))).coded.values()
    return max(linear.shape[0] * linear.shape[1] for linear in linears)


def check_bytes_read(path: Path) -> None:
    """By the kernel's count each rank reads its share of the file, and rank 0 all of it when it reads for all."""
    headers = read_headers(path)
    files = {tensor.file for tensor in headers.tensors.values()}
    total = sum(tensor.end - tensor.begin for tensor in headers.tensors.values())
    header_bytes = sum(file.stat().st_size for file in files) - total
    config = ds_config(3)
    read = {}
    for method in ("direct", "rank0", "direct"):  # the first time Python reads modules too
        model = built(path, config)
        before = _kernel_count()
        report = load_weights(model, path, method=method)
        read[method] = _kernel_count() - before
        share = sum(2 * (stop - start) for start, stop in map(local_range, model.parameters()))
        assert report.bytes == {"direct": share, "rank0": total * is_main()}[method]
    # Headers and index are read by every rank, and the ends of files by rank 0; messages between the ranks count too.
    allowance = 2 * (header_bytes + (path / INDEX).stat().st_size) + PAGE_BYTES * len(files) + 30_000
    assert share <= total / world_size() + 2 * len(headers.tensors) and allowance < total / 4
    assert share <= read["direct"] <= share + allowance
    if is_main():
        assert read["rank0"] >= total


def _kernel_count() -> int:
    """Bytes that this process has read from files by system calls, as Linux counts them."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])
