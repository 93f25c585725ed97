"""Logits as llama.cpp computes them, beside those of our forward.

On a CPU llama.cpp rounds what a layer of Q4_0 or Q8_0 reads to 8 bits in blocks of 32 (ggml's ``block_q8_0``), and what
one of BF16 or F16 reads to that dtype. So its logits are not ours. They are compared twice: with our forward as it is,
which shows what that rounding costs, and with our forward whose inputs are rounded in the same way, from which they may
not differ by more than products in another order do.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from model.save import is_expert
from quant import QuantEmbedding, QuantLayer
from quant.formats.gguf import BLOCK
from tools.verify.check import OUR_FORWARD_KL, OUR_FORWARD_KL_ROUTED, Comparison
from tools.verify.files import dtype_on_disk

MISSING = "the package llama-cpp-python is not installed: pip install -e '.[llama-cpp]' (docs/gguf.md)"


@dataclass
class Logits:
    """How far llama.cpp's logits are from ours.

    Attributes:
        version: of llama-cpp-python.
        ours: against our forward.
        rounded: against our forward with inputs rounded as llama.cpp rounds them.
        bound: on the mean KL divergence of the second.
    """

    version: str
    ours: Comparison
    rounded: Comparison
    bound: float

    def lines(self) -> list[str]:
        """For people."""
        there, here = self.ours.perplexity("theirs"), self.ours.perplexity("ours")
        return [
            f"llama.cpp (llama-cpp-python {self.version}), {self.ours.tokens} tokens: same likeliest token "
            f"{self.ours.top1:.1%}, perplexity {there:.4f} there, {here:.4f} here, KL {self.ours.kl:.2g}",
            f"with inputs rounded as it rounds them: same likeliest token {self.rounded.top1:.1%}, perplexity "
            f"{self.rounded.perplexity('ours'):.4f} here, KL {self.rounded.kl:.2g} (at most {self.bound:.2g})",
        ]

    def problems(self) -> list[str]:
        """What is wrong; empty if nothing is."""
        if self.rounded.kl <= self.bound:  # a NaN is not
            return []
        return [
            f"llama.cpp computes something else: KL from its logits is {self.rounded.kl:.3g} nats per token, inputs "
            f"rounded as it rounds them, at most {self.bound:.2g} expected"
        ]


def installed() -> bool:
    """Whether llama.cpp can be run here."""
    try:
        import llama_cpp  # noqa: F401
    except ImportError:
        return False
    return True


def engine_logits(file: Path, batches: Sequence[Tensor]) -> Iterator[Tensor]:
    """What llama.cpp makes of each row ``ids [1, T]``, on the CPU with keys and values in fp32: ``[1, T, V]``.

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


@torch.no_grad()
def compare_logits(file: Path, against: Path, model: PreTrainedModel, batches: Sequence[Tensor]) -> Logits:
    """Compare llama.cpp's logits of rows of token ids ``[1, T]`` with those of ``model``, which is in fp32.

    Args:
        file: for llama.cpp.
        against: the compressed export that the model was loaded from.
        model: its.
        batches: of token ids.

    Raises:
        ValueError: llama.cpp does not load the file.
    """
    import llama_cpp

    routed = any(is_expert(name) for name, module in model.named_modules() if isinstance(module, QuantLayer))
    bound = OUR_FORWARD_KL_ROUTED if routed else OUR_FORWARD_KL
    found = Logits(llama_cpp.__version__, Comparison("our forward"), Comparison("rounded"), bound)
    for ids, theirs in zip(batches, engine_logits(file, batches), strict=True):
        found.ours.add(model(input_ids=ids, use_cache=False).logits.float(), theirs, ids)
        with rounded_inputs(model, dtype_on_disk(against, model)):
            found.rounded.add(model(input_ids=ids, use_cache=False).logits.float(), theirs, ids)
    return found


@contextmanager
def rounded_inputs(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """Inside the block what linear layers read is rounded as llama.cpp rounds it; ``dtype`` is that of what is not
    quantized in the file."""
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
    """``x [..., features]`` in fp32 through ggml's Q8_0 and back: ``d = absmax / 127``, codes by ``1 / d``, the scale
    stored in fp16."""
    groups = x.float().unflatten(-1, (-1, BLOCK))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest == 0, 0.0, 127.0 / largest)
    return ((groups * inverse).round() * (largest / 127.0).half().float()).flatten(-2)
