"""Does an exported checkpoint load elsewhere, and compute there what training saw? Compared with transformers, in fp32.

Two readers of one directory are run on the same tokens: transformers, which lets compressed-tensors decompress, and our
own forward (``model.compressed``), whose fake quantisation gives the codes on disk bit for bit. Where their arithmetic
differs by definition, the difference is not waved through by a loose tolerance but taken out and put back:

1. *same arithmetic*: our model with each known difference replaced by what transformers does. Both then perform the
   same operations on the same numbers, so logits agree to the rounding of matrix products, and on one machine usually
   bit for bit. Whatever is wrong with a checkpoint (a code, a scale, a key, an ignored layer) shows here.
2. *our forward*: with the differences back in. How large they are is measured and bounded.

The known differences:

- transformers divides an input by its scale, training multiplies with the fp32 reciprocal, as vLLM does. Where ``x/s``
  lies within a rounding of a boundary between codes, the code differs. In fp32 that is one element in some millions,
  but each such step (1/16 of the value) moves the values behind it, and further codes flip: through 6 layers the logits
  differ by 0.2 at most and by 0.002 in the mean, 1% of what quantising them cost. With scales that are powers of two
  both are exact, and agree.
- transformers keeps the experts of a MoE fused and dequantises them when it loads. Their inputs are then not quantised:
  both comparisons leave that off here too, and a third line, *full forward*, shows our complete one (what vLLM
  computes) beside it, without a bound.
- and it dequantises them in the dtype of the scale: bf16 for integer formats, even in a model loaded as fp32. (The
  others are dequantised in fp32.) In the bf16 forward of training the weights are rounded likewise.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from model.compressed import is_ignored, load_compressed, quantized_keys, read_quantization_config, read_tensor
from model.experts import PerExpertMLPs
from model.names import module_name_on_disk
from model.ranks import listed
from model.save import is_router
from model.shards import Checkpoint, Reader, read_headers
from quant import Quantization, QuantLinear
from quant.export import packed_shapes, unpack_weight, weight_codes

# Mean KL divergence under the same arithmetic, nats per token. Measured: 0 for dense models, where the same kernels see
# the same numbers. Of a MoE transformers multiplies gate and up at once and we one after the other: 1e-6 of a logit,
# and where an input lies that close to a boundary its fp8 code flips, 2.5e-8. A scale or a layer read wrongly gives
# 1e-3 and more.
SAME_ARITHMETIC_KL = 1e-5
# The same of our forward. Measured: 1.4e-5 with fp8 inputs, 0 without; what fp8 quantisation itself costs is 1e-3.
OUR_FORWARD_KL = 1e-3


@dataclass
class Comparison:
    """Two models' logits on the same tokens, accumulated over windows. The other model is the reference of the KL."""

    name: str
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
        """Logits [B, T, V] of both for ``ids`` [B, T]."""
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
        """Largest absolute difference, in standard deviations of the logits."""
        return self.max_abs / math.sqrt(self.square_sum / self.logits)

    @property
    def kl(self) -> float:
        """Mean KL(theirs || ours), nats per token."""
        return self.kl_sum / self.tokens

    @property
    def top1(self) -> float:
        """Share of positions where both predict the same token."""
        return self.agree / self.tokens

    def perplexity(self, side: str) -> float:
        """Per token, of ``"ours"`` or ``"theirs"``."""
        return math.exp(self.nll[side] / self.predicted)

    def row(self) -> str:
        """One line of :meth:`Report.table`."""
        return (
            f"{self.name:<17} {self.max_abs:>10.3g} {self.mean_abs:>10.3g} {self.kl:>10.3g} {100 * self.top1:>8.3f}% "
            f"{self.perplexity('ours'):>10.4f} {self.perplexity('theirs'):>12.4f}"
        )


@dataclass(frozen=True)
class Report:
    """What :func:`compare_with_transformers` found.

    Attributes:
        scheme: name of the scheme in the checkpoint's config.
        layers: number of quantised Linears.
        same_arithmetic: with the known differences taken out.
        our_forward: with them.
        full_forward: of a MoE with quantised inputs: its experts' inputs quantised too, as they are when served. No
            bound.
        problems: everything that is wrong, empty if the checkpoint is good.
    """

    scheme: str
    layers: int
    same_arithmetic: Comparison
    our_forward: Comparison
    full_forward: Comparison | None
    problems: list[str]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def table(self) -> str:
        """The comparison for people, problems below it."""
        rows = [self.same_arithmetic, self.our_forward, *([self.full_forward] if self.full_forward else [])]
        head = f"{'against':<17} {'max |diff|':>10} {'mean':>10} {'KL':>10} {'top-1':>9} {'ppl, ours':>10} "
        head += f"{'transformers':>12}"
        title = f"{self.scheme}: {self.layers} quantised layers, {rows[0].tokens} tokens, logits in fp32"
        lines = [title, head, *(row.row() for row in rows), *(f"PROBLEM: {problem}" for problem in self.problems)]
        return "\n".join([*lines, "ok" if self.ok else "NOT ok"])


def windows(token_ids: list[int], length: int) -> list[Tensor]:
    """Consecutive pieces [1, T] of at most ``length`` tokens; a last one of one token predicts nothing and is left."""
    return [piece.unsqueeze(0) for piece in torch.tensor(token_ids).split(length) if len(piece) > 1]


@torch.no_grad()
def compare_with_transformers(
    export_dir: str | Path, batches: Iterable[Tensor], *, trust_remote_code: bool = False
) -> Report:
    """Load ``export_dir`` twice, as transformers does and as we do, and compare, in one process on CPU.

    Args:
        export_dir: what ``model.save.export_model`` wrote.
        batches: input_ids [B, T], T at least 2; each is one forward.
        trust_remote_code: whether Python code in the directory may be run.

    Raises:
        RankError: the directory is no compressed checkpoint or its keys or shapes are wrong (see ``load_compressed``).
    """
    directory = Path(export_dir)
    model, quantization = load_compressed(directory, trust_remote_code=trust_remote_code)
    model_dtype = _dtype_on_disk(directory, model)
    problems = check_layout(directory, model, quantization, model_dtype)
    moe = any(isinstance(module, PerExpertMLPs) for module in model.modules())
    theirs, loading = _load_theirs(directory, moe, trust_remote_code)
    problems += loading

    quantization.set_fake_quant(weights=True, activations=True)
    same, ours, full = Comparison("same arithmetic"), Comparison("our forward"), None
    if any(_is_expert(name) and layer.input_fake_quant for name, layer in quantization.layers.items()):
        full = Comparison("full forward")
    for ids in batches:
        expected = theirs(input_ids=ids, use_cache=False).logits
        with _their_arithmetic(quantization, model_dtype):
            same.add(model(input_ids=ids, use_cache=False).logits, expected, ids)
        with _inputs_of_experts_left(quantization):
            ours.add(model(input_ids=ids, use_cache=False).logits, expected, ids)
        if full is not None:
            full.add(model(input_ids=ids, use_cache=False).logits, expected, ids)

    for comparison, bound in ((same, SAME_ARITHMETIC_KL), (ours, OUR_FORWARD_KL)):
        if not comparison.kl <= bound:  # a NaN is not
            problems.append(
                f"{comparison.name}: KL from transformers is {comparison.kl:.3g} nats per token, at most {bound:.0e} "
                f"expected; the largest logit difference is {comparison.max_abs:.3g}"
            )
    scheme = next(iter(quantization.layers.values())).scheme
    return Report(scheme.name, len(quantization.layers), same, ours, full, problems)


def _load_theirs(directory: Path, moe: bool, trust_remote_code: bool) -> tuple[PreTrainedModel, list[str]]:
    """transformers' model in fp32, and what it complained about while loading."""
    # The eager experts multiply expert by expert, as we do; the default sums in another order.
    options = {"experts_implementation": "eager"} if moe else {}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        output_loading_info=True,
        local_files_only=True,
        trust_remote_code=trust_remote_code,
        **options,
    )
    model, info = loaded
    problems = []
    for kind, keys in info.items():
        # It has no use for the input scales of experts that it dequantises.
        found = [
            key for key in keys if not (kind == "unexpected_keys" and _is_expert(key) and key.endswith(".input_scale"))
        ]
        if found:
            problems.append(f"transformers reports {kind}: {listed(sorted(map(str, found)))}")
    for parameter in model.parameters():
        # Experts that were dequantised in the scale's dtype, against the dtype asked for.
        if parameter.is_floating_point() and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    return model.eval(), problems


# ---------------------------------------------------------------------------------------------------------------------
# The known differences
# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def _inputs_of_experts_left(quantization: Quantization) -> Iterator[None]:
    """Experts' inputs are not quantised inside the block."""
    experts = [layer for name, layer in quantization.layers.items() if _is_expert(name) and layer.input_fake_quant]
    for layer in experts:
        layer.input_fake_quant = False
    yield
    for layer in experts:
        layer.input_fake_quant = True


@contextmanager
def _their_arithmetic(quantization: Quantization, model_dtype: torch.dtype) -> Iterator[None]:
    """Inside the block our model computes as transformers does: see the module docstring."""
    dividing = [layer for name, layer in quantization.layers.items() if layer.input_fake_quant and not _is_expert(name)]
    rounded = {
        layer: layer.weight.data
        for name, layer in quantization.layers.items()
        if _is_expert(name) and layer.scheme.weights.dtype == "int"
    }
    with _inputs_of_experts_left(quantization):
        hooks = [layer.register_forward_pre_hook(_divide) for layer in dividing]
        for layer in dividing:
            layer.input_fake_quant = False
        for layer, weight in rounded.items():
            layer.weight_fake_quant = False
            layer.weight.data = weight.to(model_dtype).float()
        yield
        for hook in hooks:
            hook.remove()
        for layer in dividing:
            layer.input_fake_quant = True
        for layer, weight in rounded.items():
            layer.weight_fake_quant = True
            layer.weight.data = weight


def _divide(layer: torch.nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
    """compressed-tensors' fake quantisation of a Linear's input: divides by the scale."""
    assert isinstance(layer, QuantLinear)
    scale = layer.input_scale()
    assert scale is not None
    return ((arguments[0] / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale,)


def _is_expert(name: str) -> bool:
    return ".experts." in name


# ---------------------------------------------------------------------------------------------------------------------
# The files
# ---------------------------------------------------------------------------------------------------------------------


def check_layout(
    directory: Path, model: PreTrainedModel, quantization: Quantization, model_dtype: torch.dtype
) -> list[str]:
    """What readers other than transformers would stumble over, one sentence each.

    Checks dtypes and shapes of all codes and scales, that layers which serving fuses have equal scales, that the codes
    in the files are those of our forward, and that MoE routers are ignored (vLLM has them as Linears).

    Args:
        directory: the checkpoint.
        model, quantization: as ``load_compressed(directory)`` gave them; in fp32.
        model_dtype: dtype on disk of what is not quantised.
    """
    checkpoint = read_headers(directory)
    problems: list[str] = []
    stored: dict[str, dict[str, Tensor]] = {"weight_scale": {}, "input_scale": {}}
    with Reader() as reader:
        for name, layer in quantization.layers.items():
            keys = quantized_keys(model, name, layer)
            problems += _wrong_tensors(checkpoint, layer, keys, model_dtype)
            tensors = {suffix: read_tensor(reader, checkpoint.tensors[key]) for suffix, key in keys.items()}
            for suffix in stored.keys() & tensors.keys():
                stored[suffix][name] = tensors[suffix]
            codes = weight_codes(layer.weight, layer.weight_scale(), layer.scheme.weights)
            if not torch.equal(codes.view(torch.int8), unpack_weight(tensors, layer.scheme).view(torch.int8)):
                problems.append(f"{name}: our forward quantises the weight to other codes than those on disk")
    for suffix, groups in (("weight_scale", quantization.weight_groups), ("input_scale", quantization.input_groups)):
        for group in groups:
            if any(not torch.equal(stored[suffix][name], stored[suffix][group.owner]) for name in group.members):
                problems.append(f"{', '.join(group.members)} are served with one {suffix}, but have several on disk")
    return problems + _routers_not_ignored(directory, model)


def _wrong_tensors(
    checkpoint: Checkpoint, layer: QuantLinear, keys: dict[str, str], model_dtype: torch.dtype
) -> list[str]:
    """Codes and scales that have another dtype or shape than the format says."""
    expected = packed_shapes(layer.in_features, layer.out_features, layer.scheme, model_dtype)
    return [
        f"{key} is {found.dtype} {list(found.shape)}, expected {dtype} {list(shape)}"
        for (suffix, key), (dtype, shape) in zip(keys.items(), expected.values(), strict=True)
        if ((found := checkpoint.tensors[key]).dtype, found.shape) != (dtype, shape)
    ]


def _dtype_on_disk(directory: Path, model: PreTrainedModel) -> torch.dtype:
    """The dtype of the embeddings, which are never quantised."""
    embeddings = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embeddings)
    dtype = read_headers(directory).tensors[f"{module_name_on_disk(model, name)}.weight"].dtype
    assert dtype is not None, "load_compressed has read it"
    return dtype


def _routers_not_ignored(directory: Path, model: PreTrainedModel) -> list[str]:
    ignore = read_quantization_config(directory).get("ignore") or []
    routers = [module_name_on_disk(model, name) for name, module in model.named_modules() if is_router(module)]
    missing = [name for name in routers if not is_ignored([name], ignore)]
    return [f"ignore does not name the routers {listed(missing)}: vLLM would quantise them"] if missing else []
