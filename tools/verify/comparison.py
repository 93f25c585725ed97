"""Compare an export in this project and in another engine: tensors bit for bit, logits within a bound."""

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from model.checkpoint.safetensors import Reader, read_headers, read_tensor
from model.console import figure, perplexity, progress_bar, working
from model.head import embedding_rows
from model.quantized.quantization_config import read_json_object
from model.ranks import listed
from model.save.export_model import export_model
from quant import QuantEmbedding, Quantization
from tools.compressed import load_compressed


@dataclass
class LogitComparison:
    """Differences between the logits of this project ("ours") and of another reader ("theirs"), accumulated over
    batches. The KL divergence is KL(theirs || ours)."""

    max_abs: float = 0.0
    abs_sum: float = 0.0
    kl_sum: float = 0.0
    agree: int = 0
    tokens: int = 0
    logits: int = 0
    square_sum: float = 0.0
    nll: dict[str, float] = field(default_factory=lambda: {"ours": 0.0, "theirs": 0.0})
    predicted: int = 0

    def add(self, ours: Tensor, theirs: Tensor, ids: Tensor) -> None:
        """Add a batch: logits [B, T, V] of this project and of the other reader for token ids ``ids`` [B, T]."""
        difference = (ours - theirs).abs()
        self.max_abs = max(self.max_abs, difference.max().item()) if difference.isfinite().all() else math.inf
        self.abs_sum += difference.sum(dtype=torch.float64).item()
        self.square_sum += (theirs - theirs.mean()).square().sum(dtype=torch.float64).item()
        self.logits += theirs.numel()
        log_p, log_q = theirs.log_softmax(-1), ours.log_softmax(-1)
        self.kl_sum += (log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64).item()
        self.agree += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        self.tokens += ids.numel()
        for side, logits in (("ours", ours), ("theirs", theirs)):
            self.nll[side] += F.cross_entropy(
                logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
            ).item()
        self.predicted += ids[:, 1:].numel()

    @property
    def mean_abs(self) -> float:
        """Mean absolute difference of the logits."""
        return self.abs_sum / self.logits

    @property
    def relative_max(self) -> float:
        """Largest absolute difference of the logits, in standard deviations of the other reader's logits."""
        return self.max_abs / math.sqrt(self.square_sum / self.logits)

    @property
    def kl(self) -> float:
        """Mean KL(theirs || ours), nats per token."""
        return self.kl_sum / self.tokens

    @property
    def top1(self) -> float:
        """Share of positions where both readers' most likely token is the same."""
        return self.agree / self.tokens

    def perplexity(self, side: str) -> float:
        """Compute the perplexity per token of one side, ``"ours"`` or ``"theirs"``."""
        return perplexity(self.nll[side] / self.predicted)

    def row(self, name: str) -> str:
        """Format the figures as a row of the report's table, called ``name``."""
        return (
            f"{name:<17} {self.max_abs:>10.3g} {self.mean_abs:>10.3g} {self.kl:>10.3g} {100 * self.top1:>8.3f}% "
            f"{figure(self.perplexity('ours')):>10} {figure(self.perplexity('theirs')):>12}"
        )

    def line(self, bound: float) -> str:
        """Format the relative figures in one line, with ``bound``, the limit of the KL divergence."""
        return (
            f"{self.tokens} tokens, KL {self.kl:.2g} (at most {bound:.2g} expected), top-1 {100 * self.top1:.2f}%, "
            f"perplexity {self.perplexity('theirs'):.4f}, ours {self.perplexity('ours'):.4f}: "
            f"{'ok' if self.kl <= bound else 'NOT ok'}"
        )


@dataclass
class Report:
    """Result of a comparison."""

    engine: str  # the other reader of the export
    contents: str  # schemes or types of the weights
    layers: int = 0  # number of quantized layers or tensors
    equal: int | None = None  # number of tensors that are equal bit for bit, each expert counted; None: not compared
    logits: dict[str, LogitComparison] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # empty if the export is good
    note: str | None = None  # for the user
    remarks: list[str] = field(default_factory=list)  # what the figures of a comparison mean, a line each

    @property
    def ok(self) -> bool:
        """True if no problem was found."""
        return not self.problems

    def require(self, name: str, figure: float, bound: float, what: str) -> None:
        """Add a problem if a ``figure`` of the comparison ``name`` is NaN or above ``bound``; ``what`` is the figure's
        name."""
        if not figure <= bound:
            self.problems.append(
                f"{name}: {what} is {figure:.3g}, at most {bound:.2g} expected; the largest logit difference from "
                f"{self.engine} is {self.logits[name].max_abs:.3g}"
            )

    def require_kl(self, name: str, bound: float) -> None:
        """Add a problem if the KL divergence of the comparison ``name`` is above ``bound``."""
        self.require(name, self.logits[name].kl, bound, "KL divergence, in nats per token,")

    def explain(self, name: str, bound: float, why: str) -> None:
        """Add a remark if the most likely tokens differ in the comparison ``name``. It gives the reason ``why``, and
        says if the KL divergence is within ``bound``."""
        found = self.logits[name]
        if found.agree < found.tokens:
            verdict = "no error" if found.kl <= bound else "too much"
            self.remarks.append(
                f"{name}: the most likely token differs at {1 - found.top1:.3%} of the positions, since {why}. This is "
                f"{verdict}: the KL divergence is {found.kl:.3g}, and at most {bound:.2g} is allowed"
            )

    def table(self) -> str:
        """Format the report as a table, with the problems below it."""
        title = f"{self.contents}: {self.layers} quantized layers"
        if self.equal is not None:
            title += f", {self.equal} tensors of the checkpoint equal bit for bit"
        lines = [title]
        if self.logits:
            lines[0] += f", {next(iter(self.logits.values())).tokens} tokens"
            head = f"{'against':<17} {'max |diff|':>10} {'mean':>10} {'KL':>10} {'top-1':>9} {'ppl, ours':>10} "
            lines += [f"{head}{self.engine:>12}", *(found.row(name) for name, found in self.logits.items())]
        lines += self.remarks
        lines += [f"note: {self.note}"] if self.note else []
        lines += [f"PROBLEM: {problem}" for problem in self.problems]
        return "\n".join([*lines, "ok" if self.ok else "NOT ok"])


class Engine:
    """Reader of the exports of one format. Its ``__init__`` opens an export."""

    export: Path
    found: dict[str, Any]  # the tensors in the files by name, of the engine's own type
    unused: frozenset[str] = frozenset()  # names of tensors that a compressed checkpoint may lack
    report: Report  # after opening it has only the contents of the export
    model: PreTrainedModel  # the compressed export in fp32; set before anything is compared, as is the next
    quantization: Quantization  # of this model

    def names(self, key: str) -> list[str]:
        """Return the names of the engine's tensors that contain the checkpoint's tensor ``key``, alone or with
        others; empty for a tensor that no file of this engine contains."""
        return [key]

    def equals(self, key: str, names: list[str], expected: Tensor) -> bool:
        """Return True if ``expected``, the checkpoint's tensor ``key``, equals the dequantized values of the engine's
        tensors ``names`` (the result of :meth:`names`), in fp32 and bit for bit.

        Raises:
            LookupError, ValueError, ArithmeticError, NotImplementedError: the tensors cannot be dequantized.
        """
        raise NotImplementedError

    def compare_logits(self, against: Path, batches: Sequence[Tensor]) -> None:
        """Add comparisons of the logits for ``batches`` of token ids, and their problems, to the report; ``against`` is
        the directory of the compressed export."""
        raise NotImplementedError


@torch.no_grad()
def compare_with_compressed(
    engine: Engine, against: Path, batches: Sequence[Tensor], *, trust_remote_code: bool = False
) -> Report:
    """Compare an export for ``engine`` with a compressed export of the same checkpoint, in one process on CPU.

    Every tensor is compared, then the logits of ``batches`` of token ids [B, T]. If a tensor differs, logits are not
    compared, as the engine may crash. Tensors need no tolerance, except NVFP4's with its two scales: a code times a
    scale is one product in fp32 in every engine. Needs 4 bytes per parameter in the folder for temporary files.

    Raises:
        RankError: ``against`` is no compressed checkpoint.
        ValueError: the engine does not load the export, or the tokens are of another model.
    """
    report, left = engine.report, engine.found.keys() - engine.unused
    report.equal = 0
    engine.model, engine.quantization = load_compressed(against, trust_remote_code=trust_remote_code)
    check_tokens(engine.model, batches, engine.export)
    tied = _tied_head(engine)
    with tempfile.TemporaryDirectory() as scratch, Reader() as reader:
        plain = Path(scratch) / "plain"
        options: dict[str, Any] = {"layout": "dequantized", "trust_remote_code": trust_remote_code}
        export_model(engine.model, engine.quantization, against, plain, **options)
        for key, tensor in progress_bar(desc="verify", unit="tensor", over=read_headers(plain).tensors.items()):
            own = tied.get(key, key)
            names = engine.names(own)
            if not names:
                continue
            if names[0] not in engine.found:
                report.problems.append(f"{engine.export} lacks {key}")
                continue
            left = left.difference(names)
            why = ""
            try:
                if engine.equals(own, names, read_tensor(reader, tensor).float()):
                    report.equal += 1
                    continue
            except (LookupError, ValueError, ArithmeticError, NotImplementedError) as error:
                why = f": {error}"
            report.problems.append(f"{names[0]} does not equal {key} of {against}{why}")
    if left:
        report.problems.append(f"{against} lacks {listed(sorted(left), 6)}")
    if report.ok and batches:
        with working("logits"):
            engine.compare_logits(against, batches)
    else:
        why = "no text was given" if report.ok else "the tensors are not equal"
        report.note = f"logits: skipped: {why}"
    return report


def _tied_head(engine: Engine) -> dict[str, str]:
    """Map lm_head's key to that of the embeddings, if the engine computes both with one quantized weight."""
    if not read_json_object(engine.export / "config.json").get("tie_word_embeddings"):
        return {}
    model = engine.model
    ends = {id(model.get_output_embeddings()): "head", id(model.get_input_embeddings()): "table"}
    names = {ends[id(module)]: f"{name}.weight" for name, module in model.named_modules() if id(module) in ends}
    return {names["head"]: names["table"]}


def check_tokens(model: PreTrainedModel, batches: Sequence[Tensor], export: Path) -> None:
    """Raise ValueError for token ids without an embedding in the model: some engines would read beyond the table."""
    count = embedding_rows(model)
    largest = max((int(ids.max()) for ids in batches), default=0)
    if largest >= count:
        raise ValueError(
            f"{export} has the tokenizer of another model: it gives token {largest}, but the model has {count} tokens: "
            "copy the model's own tokenizer there"
        )


def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Compute the logits [B, T, V], in fp32, of this project's forward for ``ids`` [B, T]."""
    return model(input_ids=ids, use_cache=False).logits.float()


def on_input(change: Callable[[Tensor], Tensor], _: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Apply ``change`` to a module's input; as ``partial(on_input, change)`` this is a forward pre-hook."""
    return (change(arguments[0]), *arguments[1:])


def rounded(model: PreTrainedModel, quantization: Quantization, times: int) -> Iterator[None]:
    """Change the embeddings, and the inputs of all quantized layers, by about one rounding; yield ``times`` times. The
    changes differ each time. After the last one the model is as before."""
    weight = cast("Tensor", model.get_input_embeddings().weight)
    before, size = weight.clone(), 1e-6 if weight.dtype == torch.float32 else torch.finfo(weight.dtype).eps / 2

    def changed(x: Tensor) -> Tensor:
        return (x.float() * (1 + size * torch.randn(x.shape))).to(x.dtype)

    modules = (*quantization.layers.values(), *quantization.caches.values())
    with ExitStack() as stack:
        for module in (one for one in modules if not isinstance(one, QuantEmbedding)):  # whose inputs are token ids
            # before inputs are quantized
            hook = module.register_forward_pre_hook(partial(on_input, changed), prepend=True)
            stack.callback(hook.remove)
        for _ in range(times):
            weight.copy_(changed(before))
            yield
        weight.copy_(before)


def compare(ours: Iterable[Tensor], theirs: Iterable[Tensor], batches: Sequence[Tensor]) -> LogitComparison:
    """Compare the logits of two models for ``batches`` of token ids."""
    found = LogitComparison()
    for one, other, ids in zip(ours, theirs, batches, strict=True):
        found.add(one, other, ids)
    return found


def windows(token_ids: list[int], length: int) -> list[Tensor]:
    """Cut ids into pieces [1, T], T at most ``length``; a last piece of one token predicts nothing and is left out."""
    return [piece.unsqueeze(0) for piece in torch.tensor(token_ids).split(length) if len(piece) > 1]
