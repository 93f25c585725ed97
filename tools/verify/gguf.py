"""GGUF exports, dequantized by llama.cpp's own Python package; their logits in llama.cpp, where that is installed.

On a CPU llama.cpp rounds what a layer of Q4_0 or Q8_0 reads to 8 bits in blocks of 32 (ggml's ``block_q8_0``), and what
one of BF16 or F16 reads to that dtype. So its logits are not ours. They are compared twice: with our forward as it is,
which shows what that rounding costs, and with our forward whose inputs are rounded in the same way, from which they may
not differ by more than products in another order do.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from model.save import GGUF_FILE, GGUFNames, interleaved, is_expert, open_gguf
from quant import QuantEmbedding, QuantLayer
from quant.formats.gguf import BLOCK
from tools.verify.check import OUR_FORWARD_KL, OUR_FORWARD_KL_ROUTED
from tools.verify.comparison import Engine, LogitComparison, Report, logits_of
from tools.verify.files import dtype_on_disk

MISSING = "the package llama-cpp-python is not installed: pip install -e '.[llama-cpp]' (docs/gguf.md)"


class GGUF(Engine):
    """Reader of GGUF files."""

    unused = frozenset({"rope_freqs.weight"})

    def __init__(self, export: Path) -> None:
        """Open ``export``/model.gguf.

        Raises:
            ValueError: it is no GGUF file, or the package gguf is missing.
        """
        self.export = export
        self.found = {tensor.name: tensor for tensor in open_gguf(export / GGUF_FILE).tensors}
        kinds = Counter(tensor.tensor_type.name for tensor in self.found.values())
        contents = f"{GGUF_FILE}, {', '.join(f'{count} {kind}' for kind, count in kinds.items())}"
        self.report = Report("llama.cpp", contents, sum(n for kind, n in kinds.items() if kind.startswith("Q")))

    @cached_property
    def _names(self) -> GGUFNames:
        return GGUFNames(self.model.config)

    def names(self, key: str) -> list[str]:
        return [self._names.place(key)[0] or key]

    def equals(self, key: str, names: list[str], expected: Tensor) -> bool:
        from gguf.quants import dequantize

        if heads := self._names.heads(key):
            expected = interleaved(expected, heads)
        tensor, expert = self.found[names[0]], self._names.place(key)[1]
        data = tensor.data[expert] if ".experts." in key else tensor.data
        values = torch.from_numpy(dequantize(data, tensor.tensor_type).copy())
        return torch.equal(values.view(-1), expected.reshape(-1))

    def compare_logits(self, against: Path, batches: Sequence[Tensor]) -> None:
        if not installed():
            self.report.note = f"logits: skipped: {MISSING}"
            return
        routed = any(is_expert(name) for name, module in self.model.named_modules() if isinstance(module, QuantLayer))
        ours, rounded = self.report.logits["our forward"], self.report.logits["inputs rounded"] = (
            LogitComparison(),
            LogitComparison(),
        )
        dtype = dtype_on_disk(against, self.model)
        for ids, theirs in zip(batches, engine_logits(self.export / GGUF_FILE, batches), strict=True):
            ours.add(logits_of(self.model, ids), theirs, ids)
            with rounded_inputs(self.model, dtype):
                rounded.add(logits_of(self.model, ids), theirs, ids)
        bound = OUR_FORWARD_KL_ROUTED if routed else OUR_FORWARD_KL
        self.report.require_kl("inputs rounded", bound)


def installed() -> bool:
    """Tell if llama.cpp can be run here."""
    try:
        import llama_cpp  # noqa: F401
    except ImportError:
        return False
    return True


def engine_logits(file: Path, batches: Sequence[Tensor]) -> Iterator[Tensor]:
    """Logits [1, T, V] of llama.cpp for each row ``ids [1, T]``, on the CPU with keys and values in fp32.

    Raises:
        ValueError: it does not load the file.
    """
    import llama_cpp

    longest = max(ids.shape[1] for ids in batches)
    fp32 = 0  # GGML_TYPE_F32
    options = {"n_ctx": longest, "n_batch": longest, "n_ubatch": longest, "type_k": fp32, "type_v": fp32}
    try:
        model = llama_cpp.Llama(str(file), logits_all=True, n_gpu_layers=0, verbose=False, **options)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"llama.cpp does not load {file}: {error}") from error
    try:
        for ids in batches:
            model.reset()
            model.eval(ids[0].tolist())
            yield torch.from_numpy(model.scores[: ids.shape[1]].copy()).unsqueeze(0)
    finally:
        model.close()


@contextmanager
def rounded_inputs(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """Round what linear layers read as llama.cpp does, inside the block; ``dtype``: of what is not quantized."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, QuantLayer | nn.Linear) and not isinstance(module, QuantEmbedding):
                quantized = isinstance(module, QuantLayer)

                def hook(_: nn.Module, arguments: tuple, quantized: bool = quantized) -> tuple:
                    x, *others = arguments
                    return (in_blocks(x) if quantized else x.to(dtype).float(), *others)

                stack.callback(module.register_forward_pre_hook(hook).remove)
        yield


def in_blocks(x: Tensor) -> Tensor:
    """Round ``x [..., features]`` in fp32 to ggml's Q8_0 and back: ``d = absmax / 127``, codes by ``1 / d``, the scale
    stored in fp16."""
    groups = x.float().unflatten(-1, (-1, BLOCK))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest == 0, 0.0, 127.0 / largest)
    return ((groups * inverse).round() * (largest / 127.0).half().float()).flatten(-2)
