"""Compares a GGUF export with a compressed export of the same checkpoint: are the weights equal, bit for bit?

The file is read and dequantized by llama.cpp's own Python package. Where llama.cpp itself is installed it computes
logits, too (``tools/verify/llama_cpp.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from model.ranks import listed
from model.save import GGUF_FILE, GGUFNames, interleaved, open_gguf
from tools.verify import llama_cpp
from tools.verify.dequantized import check_tokens, dequantized


@dataclass
class GGUFReport:
    """What was found.

    Attributes:
        types: number of tensors by ggml's type.
        equal: how many tensors of the checkpoint are equal in the file, each expert by itself.
        problems: one line per tensor that is not, or is missing, or is there alone; what is wrong with the logits.
        logits: what was found of them, or why they were skipped; lines for people.
    """

    types: dict[str, int]
    equal: int
    problems: list[str]
    logits: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether all is equal."""
        return not self.problems

    def table(self) -> str:
        """The report as text for people."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.types.items())
        lines = [f"{GGUF_FILE}: {kinds}", f"{self.equal} tensors of the checkpoint are equal bit for bit"]
        lines += self.logits
        lines += [f"PROBLEM: {problem}" for problem in self.problems]
        return "\n".join([*lines, "ok" if self.ok else "NOT ok"])


@torch.no_grad()
def compare_with_compressed(
    export: Path, against: Path, batches: Sequence[Tensor] = (), *, trust_remote_code: bool = False
) -> GGUFReport:
    """Compare every tensor of ``export``/model.gguf with a compressed export, in one process on CPU, and the logits of
    ``batches`` of token ids ``[1, T]``, if there are any, where all tensors are equal and llama.cpp is installed.

    Raises:
        RankError: ``against`` is no compressed checkpoint.
        ValueError: ``export`` holds no GGUF file, llama.cpp does not load it, or the package gguf is missing.
    """
    reader = open_gguf(export / GGUF_FILE)
    found = {tensor.name: tensor for tensor in reader.tensors}
    kinds = [tensor.tensor_type.name for tensor in reader.tensors]
    report = GGUFReport({kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}, 0, [])
    left = set(found) - {"rope_freqs.weight"}
    with dequantized(against, trust_remote_code=trust_remote_code) as (model, tensors):
        check_tokens(model, batches, export)
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
        if not batches:
            report.logits = ["logits: skipped: no text was given"]
        elif not report.ok:  # which may be more than llama.cpp survives
            report.logits = ["logits: skipped: the tensors are not equal"]
        elif not llama_cpp.installed():
            report.logits = [f"logits: skipped: {llama_cpp.MISSING}"]
        else:
            logits = llama_cpp.compare_logits(export / GGUF_FILE, against, model, batches)
            report.logits, report.problems = logits.lines(), logits.problems()
    return report


def _equal(tensor, expert: int | None, expected: torch.Tensor) -> bool:
    """Whether a ``gguf.ReaderTensor``, or the part of one expert, dequantizes to ``expected``."""
    from gguf.quants import dequantize

    try:
        data = tensor.data if expert is None else tensor.data[expert]
        values = torch.from_numpy(dequantize(data, tensor.tensor_type).copy())
    except (ValueError, IndexError, NotImplementedError):  # of no elements, of too few experts, of a type without one
        return False
    return torch.equal(values.view(-1), expected.reshape(-1))
