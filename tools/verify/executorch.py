"""Exports for ExecuTorch, in torchao and in ExecuTorch.

transformers loads the directory with torchao, which dequantizes its weights in fp32. Then the model is exported with
torch.export, lowered to XNNPACK and run by ExecuTorch's runtime on the CPU. Nothing is quantized on that way, but
inputs are by XNNPACK's own kernels: a value that is within a rounding of a boundary between two codes may come to the
other one, so logits are near ours and not equal.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tools.verify.comparison import Engine, Report, compare, logits_of

# Of tokens whose likeliest successor is another one; of random weights, where many are about as likely, too.
OTHER_TOP = 0.02
# Of the perplexity in XNNPACK relative to ours. Measured: 1e-6 and less. Wrong scales or inputs give 1e-2 and more.
PERPLEXITY = 5e-3


class ExecuTorch(Engine):
    """Reader of exports for ExecuTorch."""

    def __init__(self, export: Path) -> None:
        """Load ``export`` with transformers and torchao; see :func:`loaded`."""
        self.export, self.theirs = export, loaded(export)
        self.found = self.theirs.state_dict()
        self.unused = frozenset(self.theirs.all_tied_weights_keys)
        self.report = Report("XNNPACK", "torchao", sum(hasattr(weight, "qdata") for weight in self.found.values()))

    def equals(self, key: str, names: list[str], expected: Tensor) -> bool:
        found = self.found[key]
        return torch.equal(found.dequantize() if hasattr(found, "qdata") else found, expected)

    def compare_logits(self, against: Path, batches: Sequence[Tensor]) -> None:
        same = [ids for ids in batches if ids.shape == batches[0].shape]  # the lowered program takes no other
        ours = (logits_of(self.model, ids) for ids in same)
        found = self.report.logits["our forward"] = compare(ours, computed(self.theirs, same), same)
        self.report.require("our forward", 1 - found.top1, OTHER_TOP, "the share of other likeliest tokens")
        change = abs(found.perplexity("theirs") / found.perplexity("ours") - 1)
        self.report.require("our forward", change, PERPLEXITY, "the relative difference of the perplexities")


def loaded(export: Path) -> PreTrainedModel:
    """Load a model with transformers and torchao, computing in fp32 as XNNPACK does.

    Raises:
        ValueError: ExecuTorch is missing, or transformers does not load ``export`` with torchao.
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
    """Make a model whose weights are torchao's tensors ready for :func:`computed`: in fp32, as XNNPACK computes."""
    model.requires_grad_(False)
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding), "of the model types that are written"
    embedding.padding_idx = None  # a lookup with one is another operator, and there is none for codes
    model.to(torch.float32)  # type: ignore[arg-type]
    return model.eval()


class _Logits(nn.Module):
    """Module to lower: token ids [B, T] to logits [B, T, V], without a cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


def computed(model: PreTrainedModel, batches: Sequence[Tensor]) -> list[Tensor]:
    """Compute the logits of batches of one shape in ExecuTorch's runtime."""
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
