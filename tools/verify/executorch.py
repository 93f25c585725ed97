"""Compares an export for ExecuTorch with a compressed export of the same checkpoint, in torchao and in ExecuTorch.

transformers loads the directory with torchao, whose tensors are dequantized in fp32 and must be equal bit for bit to
what our forward multiplies. Then the model is exported with torch.export, lowered to XNNPACK and run by ExecuTorch's
runtime on the CPU. Nothing is quantized on that way, but inputs are by XNNPACK's own kernels: a value that lies within
a rounding of a boundary between two codes may come to the other one, so logits are near ours and not equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

from model.ranks import listed
from tools.verify.dequantized import dequantized

# Of tokens whose likeliest successor is the same in both; of random weights, where many are about as likely, too.
SAME_TOP = 0.98
# Of the perplexity in XNNPACK relative to ours. Measured: 1e-6 and less. Wrong scales or inputs give 1e-2 and more.
PERPLEXITY = 5e-3


@dataclass
class ExecuTorchReport:
    """What was found.

    Attributes:
        quantized: how many layers have codes.
        equal: how many tensors of the checkpoint are equal.
        same_top: share of tokens after which the likeliest one is the same in XNNPACK.
        perplexity: of the text in XNNPACK, and in our forward.
        tokens: how many were compared.
        problems: one line each.
    """

    quantized: int = 0
    equal: int = 0
    same_top: float = 0.0
    perplexity: tuple[float, float] = (0.0, 0.0)
    tokens: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether weights are equal and logits near."""
        return not self.problems

    def table(self) -> str:
        """The report as text for people."""
        lines = [
            f"{self.quantized} quantized layers, {self.equal} tensors of the checkpoint equal bit for bit",
            f"in XNNPACK: same likeliest token {self.same_top:.1%} of {self.tokens}, perplexity "
            f"{self.perplexity[0]:.4f} there, {self.perplexity[1]:.4f} here",
            *(f"PROBLEM: {problem}" for problem in self.problems),
        ]
        return "\n".join([*lines, "ok" if self.ok else "NOT ok"])


@torch.no_grad()
def compare_with_compressed(
    export: Path, against: Path, batches: Sequence[Tensor], *, trust_remote_code: bool = False
) -> ExecuTorchReport:
    """Compare every tensor, and the logits of ``batches`` of token ids [B, T]: of those of the first one's shape, which
    the lowered program takes alone.

    Raises:
        RankError: ``against`` is no compressed checkpoint.
        ValueError: ExecuTorch is missing, or transformers does not load ``export`` with torchao.
    """
    batches = [ids for ids in batches if ids.shape == batches[0].shape]
    theirs = loaded(export)
    report = ExecuTorchReport()
    found = dict(theirs.state_dict())
    with dequantized(against, trust_remote_code=trust_remote_code) as (model, tensors):
        left = set(found)
        for key, expected in tensors:
            left.discard(key)
            _compare(report, key, expected, found.get(key))
        if left := left - set(theirs.all_tied_weights_keys):
            report.problems.append(f"{against} lacks {listed(sorted(left), 6)}")
        if not report.problems:
            ours = [model(input_ids=ids, use_cache=False).logits.float() for ids in batches]
            _compare_logits(report, computed(theirs, batches), ours, batches)
    return report


def loaded(export: Path) -> PreTrainedModel:
    """The model as transformers loads it with torchao, computing in fp32 as XNNPACK does.

    Raises:
        ValueError: see :func:`compare_with_compressed`.
    """
    try:
        import executorch  # noqa: F401
        import torchao  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{error}: pip install -e '.[executorch]'") from error
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(export, local_files_only=True)
    except Exception as error:  # of whatever kind: metadata, shapes and keys are checked in many places
        raise ValueError(f"transformers does not load {export}: {type(error).__name__}: {error}") from error
    return lowerable(model)


def lowerable(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, whose weights are torchao's tensors, ready for :func:`computed`: in fp32, as XNNPACK computes."""
    model.requires_grad_(False)
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding), "of the model types that are written"
    embedding.padding_idx = None  # a lookup with one is another operator, and there is none for codes
    model.to(torch.float32)  # type: ignore[arg-type]
    return model.eval()


def _compare(report: ExecuTorchReport, key: str, expected: Tensor, found: Tensor | None) -> None:
    if found is None:
        report.problems.append(f"{key} is not there")
        return
    if hasattr(found, "qdata"):
        report.quantized += 1
        found = found.dequantize()
    if torch.equal(found, expected):
        report.equal += 1
    else:
        report.problems.append(f"{key} is another one")


class _Logits(nn.Module):
    """What is lowered: token ids [B, T] to logits [B, T, V], without a cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


def computed(model: PreTrainedModel, batches: Sequence[Tensor]) -> list[Tensor]:
    """The logits of batches of one shape in ExecuTorch's runtime."""
    import executorch.kernels.quantized  # noqa: F401  registers the lookups in tables of codes
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.runtime import Runtime

    exported = torch.export.export(_Logits(model), (batches[0],), strict=False)
    edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
    # Lookups in tables of codes become one operator here.
    lowered = edge.to_executorch(ExecutorchBackendConfig(do_quant_fusion_and_const_prop=True))
    buffer = lowered.buffer
    program = Runtime.get().load_program(buffer)  # a method does not keep it alive, nor it the bytes
    method = program.load_method("forward")
    return [method.execute([ids])[0].clone() for ids in batches]


def _compare_logits(
    report: ExecuTorchReport, theirs: Sequence[Tensor], ours: Sequence[Tensor], batches: Sequence[Tensor]
) -> None:
    same = [(one.argmax(-1) == other.argmax(-1)).flatten() for one, other in zip(ours, theirs, strict=True)]
    report.same_top = torch.cat(same).float().mean().item()
    report.tokens = torch.cat(same).numel()
    there, here = report.perplexity = _perplexity(theirs, batches), _perplexity(ours, batches)
    if not report.same_top >= SAME_TOP:
        report.problems.append(f"{report.same_top:.1%} of the likeliest tokens are the same, expected {SAME_TOP:.0%}")
    if not abs(there / here - 1) <= PERPLEXITY:
        report.problems.append(f"the perplexity is {there:.4f} there and {here:.4f} here")


def _perplexity(logits: Sequence[Tensor], batches: Sequence[Tensor]) -> float:
    losses = [
        cross_entropy(one[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        for one, ids in zip(logits, batches, strict=True)
    ]
    return torch.cat(losses).mean().exp().item()
