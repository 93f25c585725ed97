"""Launches, bytes and host waits of a decoder layer, counted from the operators that it calls; no GPU is needed.

    python benchmarks/traffic.py [--tokens 8192] [--write]

A layer of Qwen3-8B runs forward and backward on the meta device, in bf16 and in each scheme, and one of Qwen3-30B-A3B,
whose stacked experts are multiplied at once in bf16 too, in some; a dispatch mode sees every
operator with the shapes of its tensors. An operator that computes is a launch (some of ours are two on CUDA); it reads
each of its inputs and writes each of its outputs once. Views and allocations are free. Attention is one operator
forward and one backward, as flash attention is.

The last two columns are an **estimate**, not a measurement: bytes at :data:`BANDWIDTH`, GEMMs at :data:`RATES`, one
after the other, against bf16 counted in the same way, without and with activation checkpointing. What limits it: caches
and launch latency are left out, and no GPU has confirmed the rates.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.timing import RESULTS
from model.moe.arrange import arrange_experts
from quant import SCHEMES, prepare
from quant.fused import fuse
from quant.packed_weight import placeholder

META = torch.device("meta")
BANDWIDTH = 0.88 * 4.3e12  # bytes per second: elementwise kernels reach that part of an H200's
# Operations per second of GEMMs: of e4m3 with sums that go to fp32, and with "fast accumulation".
RATES = {"bf16": 0.74e15, "fp8": 1.05e15, "fp8, fast sums": 1.40e15}
QWEN3_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
# 128 experts of which each token chooses 8, stacked as a run has them.
QWEN3_30B_A3B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
GEMMS = {"mm", "addmm", "bmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"}
WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique2"}
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "_unsafe_view", "alias"}
FREE |= {"set_"}
# In place, and without sums, these touch gradients only where something was clipped: nothing, here.
CLIPPED = {"masked_", "dequantize_and_mask_", "fake_quantize_backward_", "fake_quantize_tokens_and_mask_"}
# Of long runs partial sums, and their sum; of more runs than are counted on the device in a launch of its own, see
# launch_reduction in quant/kernels/cuda/reductions.h.
WITH_SUMS = "fake_quantize_backward_"
SEGMENT = 8 * 2048  # elements of a run whose sum is taken at once; kSegment in quant/kernels/kernels.h
COUNTED_RUNS = 1024  # kCountedRuns in cuda/reductions.h
NORM_BACKWARD = "rms_norm_backward"  # in two launches where the weight has a gradient; quant/kernels/cuda/fused.cu


@dataclass
class Traffic(TorchDispatchMode):
    """Counts while it is entered.

    Attributes:
        launches: by the operator's name.
        bytes: read and written, by the operator's name; of GEMMs too.
        operations: of GEMMs, by the names in :data:`RATES`.
        waits: operators whose result the host must have, by name.
    """

    launches: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2]
        if name in WAITS:
            self.waits[name] += 1
        if name in FREE or func.is_view:
            return result
        given = zip(func._schema.arguments, args, strict=False)
        named = [(argument.name, value) for argument, value in given] + list((kwargs or {}).items())
        read = [one for key, value in named if key != "after" for one in tree_leaves(value) if isinstance(one, Tensor)]
        writes = {argument.name for argument in func._schema.arguments if _written(argument)}
        changed = [value for key, value in named if key in writes]
        written = [one for one in tree_leaves(result) if isinstance(one, Tensor) and not _among(one, changed)]
        sums = name == WITH_SUMS and written[0].numel() > 0
        if name in CLIPPED and not sums:
            read = [one for one in read if not _among(one, changed)]
            changed = []
        parts = written[0].numel() if sums else 1
        long = sums and parts > COUNTED_RUNS and read[0].numel() > SEGMENT * parts
        partial = _partial_sums(written) if name == NORM_BACKWARD else 0
        self.launches[name] += 1 + long + (partial > 0)
        self.bytes[name] += sum(map(_size, [*read, *written, *changed])) + partial
        if name in GEMMS:
            self._count_operations(name, dict(named), read, [*written, *changed][0])
        return result

    def _count_operations(self, name: str, named: dict[str, Any], read: list[Tensor], outcome: Tensor) -> None:
        """Of a GEMM."""
        left = read[1] if name == "addmm" else read[0]
        fp8 = "fp8, fast sums" if named.get("use_fast_accum") else "fp8"
        # The gradient of a stack has a sum over the rows of each expert, which are all rows together.
        times = outcome.shape[0] if left.dim() == 2 and outcome.dim() == 3 else 1
        self.operations[fp8 if left.itemsize == 1 else "bf16"] += 2 * left.shape[-1] * outcome.numel() // times

    def seconds(self) -> float:
        """The estimate."""
        moved = sum(count for name, count in self.bytes.items() if name not in GEMMS)
        return moved / BANDWIDTH + sum(count / RATES[kind] for kind, count in self.operations.items())


def _partial_sums(written: list[Tensor]) -> int:
    """Bytes of the sums over 32 rows that a norm's backward writes and reads for its weight's gradient."""
    of_x, of_weight = written
    return 2 * 4 * -(-of_x.numel() // (32 * of_x.shape[-1])) * of_weight.numel()


def _written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _among(one: Tensor, others: list[Any]) -> bool:
    return any(one is other for other in others)


def _size(tensor: Tensor) -> int:
    """Bytes of what a tensor reads; a dimension that was expanded is read once."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * int(torch.Size([side if stride else 1 for side, stride in sides]).numel())


@torch.library.custom_op("benchmarks::attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of ``[batch, heads, tokens, size]``, in one launch; computes nothing."""
    return torch.empty_like(query)


@torch.library.custom_op("benchmarks::attention_backward", mutates_args=())
def attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients."""
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


attention.register_fake(lambda query, key, value: torch.empty_like(query))
attention_backward.register_fake(
    lambda grad, query, key, value: (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
)
attention.register_autograd(
    lambda ctx, grad: attention_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def _counted_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    return attention(query, key, value).transpose(1, 2), None


AttentionInterface.register("counted", _counted_attention)


def decoder_layer(
    scheme: str | None, *, learn: bool = True, experts: bool = False, **compute: Any
) -> Callable[[Tensor], Tensor]:
    """A layer of Qwen3-8B, or with ``experts`` of Qwen3-30B-A3B, on the meta device, as a function of its input ``[1,
    tokens, hidden]``.

    ``compute`` is what :func:`quant.prepare` is told of the fp8 GEMMs, and ``codes``: whether codes stand in for the
    weights, as they do where stage 3 gathers these (``quant.quantized_all_gather``); here and below. ``fused``: as with
    ``quant.fuse_norms``.
    """
    small = {"num_hidden_layers": 1, "vocab_size": 128}
    config = Qwen3MoeConfig(**small, **QWEN3_30B_A3B) if experts else Qwen3Config(**small, **QWEN3_8B)
    with META:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="counted")
    arrange_experts(model, "stacked")
    if scheme is not None:
        _quantize(model, scheme, learn, **compute)
    layer = model.model.layers[0]

    def forward(x: Tensor) -> Tensor:
        angles = torch.empty(1, x.shape[1], config.head_dim, dtype=x.dtype, device=META)
        output: Tensor = layer(x, position_embeddings=(angles, angles), attention_mask=None)
        return output

    return forward


def _quantize(
    model: nn.Module, scheme: str, learn: bool, *, codes: bool = False, fused: bool = False, **compute: Any
) -> None:
    scales = {"learn_weight_scale": learn, "learn_input_scale": False}
    quantization = prepare(model, SCHEMES[scheme], **scales, **compute)
    if fused:
        fuse(model)
    for layer in quantization.layers.values() if codes else ():
        weight = layer.weight
        layer.known_weight_scale = torch.empty_like(layer.weight_s0)
        weight.data = placeholder(weight.new_empty(weight.shape, dtype=torch.uint8), weight.shape, weight.dtype)


def counted(
    forward: Callable[[Tensor], Tensor],
    tokens: int,
    *,
    checkpointed: bool = False,
    hidden: int = QWEN3_8B["hidden_size"],
) -> tuple[Traffic, Traffic]:
    """Of a forward, and of its backward; the weights have no gradients yet."""
    x = torch.empty(1, tokens, hidden, dtype=torch.bfloat16, device=META, requires_grad=True)
    with Traffic() as there:
        output = checkpoint(forward, x, use_reentrant=False) if checkpointed else forward(x)
    with Traffic() as back:
        output.backward(torch.empty_like(output))
    return there, back


def quant_linear(scheme: str | None, features: int, *, learn: bool = True, **compute: Any) -> nn.Module:
    """A Linear of ``[features, hidden]`` on the meta device; quantized if a scheme is named."""
    with META:
        model = nn.ModuleDict({"up_proj": nn.Linear(QWEN3_8B["hidden_size"], features, False, dtype=torch.bfloat16)})
    if scheme is not None:
        _quantize(model, scheme, learn, **compute)
    return model["up_proj"]


COUNTED = (
    f"{date.today()}, torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}. "
    "Counted from operators, so that no machine matters; the last two columns are estimates: see "
    "`benchmarks/traffic.py`."
)
WAYS: dict[str, dict[str, Any]] = {
    "fp8_static, simulate": {"scheme": "fp8_static"},
    "fp8_static, fp8 GEMM, sums in fp32": {"scheme": "fp8_static", "fp8_gemm": True, "fast_accum": False},
    "fp8_static, fp8 GEMM": {"scheme": "fp8_static", "fp8_gemm": True},
    "fp8_static, fp8 GEMM, codes gathered": {"scheme": "fp8_static", "fp8_gemm": True, "codes": True},
    "fp8_static, fp8 GEMM, fixed scales": {"scheme": "fp8_static", "fp8_gemm": True, "learn": False},
    "fp8_static, fp8 GEMM, norms fused": {"scheme": "fp8_static", "fp8_gemm": True, "fused": True},
    "fp8_static, fp8 GEMM, codes gathered, norms fused": {
        "scheme": "fp8_static",
        "fp8_gemm": True,
        "codes": True,
        "fused": True,
    },
    **{name: {"scheme": name} for name in SCHEMES if name != "fp8_static"},
}


# Of the layer with experts, whose Linears besides are as those of the other.
WAYS_OF_EXPERTS = {name: WAYS[name] for name in ("fp8_static, simulate", "fp8_static, fp8 GEMM", "w4a16_g32", "8da4w")}


def rows(tokens: int, ways: dict[str, dict[str, Any]], *, experts: bool = False) -> Iterator[str]:
    """The table: one row for each way, and bf16 before them."""
    base = [0.0, 0.0]
    hidden = (QWEN3_30B_A3B if experts else QWEN3_8B)["hidden_size"]
    for name, way in ({"bf16": {"scheme": None}} | ways).items():
        alone = [one.launches.total() for one in counted(quant_linear(way["scheme"], 12288, **_rest(way)), tokens)]
        whole = counted(decoder_layer(experts=experts, **way), tokens, hidden=hidden)
        again = counted(decoder_layer(experts=experts, **way), tokens, checkpointed=True, hidden=hidden)
        seconds = [sum(one.seconds() for one in parts) for parts in (whole, again)]
        base = seconds if way["scheme"] is None else base
        launches, moved, waits = (
            sum(counter.total() for counter in counters)
            for counters in zip(*((one.launches, one.bytes, one.waits) for one in whole), strict=True)
        )
        ratios = " | ".join(f"{one / plain:.2f}" for one, plain in zip(seconds, base, strict=True))
        yield f"| {name} | {alone[0]} + {alone[1]} | {launches} | {moved / 1e9:.2f} | {waits} | {ratios} |"


def _rest(way: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in way.items() if key not in ("scheme", "fused")}


def main() -> None:
    """Print the table; write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS / 'traffic.md'}")
    arguments = parser.parse_args()
    lines = ["# Traffic of a decoder layer", "", COUNTED, ""]
    for tokens in arguments.tokens:
        for model, ways in (("Qwen3-8B", WAYS), ("Qwen3-30B-A3B", WAYS_OF_EXPERTS)):
            lines += [f"## {model}, {tokens} tokens", ""]
            lines += [
                "| | launches of a Linear | of the layer | GB | host waits | of bf16 (estimate) | with checkpointing |"
            ]
            lines += ["| --- " * 7 + "|"]
            lines += [*rows(tokens, ways, experts=ways is WAYS_OF_EXPERTS), ""]
    page = "\n".join(lines)
    print(page)
    if arguments.write:
        (RESULTS / "traffic.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
