"""Compares a GGUF export with a compressed export of the same checkpoint: are the weights equal, bit for bit?

The file is read and dequantised by llama.cpp's own Python package.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.verify.dequantised import dequantised
from model.ranks import listed
from model.save import GGUF_FILE, GGUFNames, interleaved, open_gguf


@dataclass
class GGUFReport:
    """What was found.

    Attributes:
        types: number of tensors by ggml's type.
        equal: how many tensors of the checkpoint are equal in the file, each expert by itself.
        problems: one line per tensor that is not, or is missing, or is there alone.
    """

    types: dict[str, int]
    equal: int
    problems: list[str]

    @property
    def ok(self) -> bool:
        """Whether all is equal."""
        return not self.problems

    def table(self) -> str:
        """The report as text for people."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.types.items())
        lines = [f"{GGUF_FILE}: {kinds}", f"{self.equal} tensors of the checkpoint are equal bit for bit"]
        lines += [f"PROBLEM: {problem}" for problem in self.problems]
        return "\n".join([*lines, "ok" if self.ok else "NOT ok"])


@torch.no_grad()
def compare_with_compressed(export: Path, against: Path, *, trust_remote_code: bool = False) -> GGUFReport:
    """Compare every tensor of ``export``/model.gguf with a compressed export, in one process on CPU.

    Raises:
        RankError: ``against`` is no compressed checkpoint.
        ValueError: ``export`` holds no GGUF file, or the package gguf is missing.
    """
    reader = open_gguf(export / GGUF_FILE)
    found = {tensor.name: tensor for tensor in reader.tensors}
    kinds = [tensor.tensor_type.name for tensor in reader.tensors]
    report = GGUFReport({kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}, 0, [])
    left = set(found) - {"rope_freqs.weight"}
    with dequantised(against, trust_remote_code=trust_remote_code) as (model, tensors):
        names = GGUFNames(model.config)
        for key, expected in tensors:
            name, expert = names.place(key)
            if heads := names.heads(key):
                expected = interleaved(expected, heads)
            if name not in found:
                report.problems.append(f"{key} is not in the file")
                continue
            left.discard(name)
            if _equal(found[name], expert if ".experts." in key else None, expected):
                report.equal += 1
            else:
                report.problems.append(f"{name} is not {key} of {against}")
    if left:
        report.problems.append(f"{against} lacks {listed(sorted(left), 6)}")
    return report


def _equal(tensor, expert: int | None, expected: torch.Tensor) -> bool:
    """Whether a ``gguf.ReaderTensor``, or the part of one expert, dequantises to ``expected``."""
    from gguf.quants import dequantize

    try:
        data = tensor.data if expert is None else tensor.data[expert]
        values = torch.from_numpy(dequantize(data, tensor.tensor_type).copy())
    except (ValueError, IndexError, NotImplementedError):  # of no elements, of too few experts, of a type without one
        return False
    return torch.equal(values.view(-1), expected.reshape(-1))
