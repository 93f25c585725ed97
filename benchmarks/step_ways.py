"""The ways to quantize whose steps benchmarks/step.py compares: ours, plain PyTorch's and torchao's."""

from collections.abc import Callable
from functools import partial, reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import timing
from quant import SCHEMES, QuantLinear, combine, partial_stats, prepare, scales_from_stats
from quant.fused import fuse
from quant.scale import first_input_scale
from quant.spec import FP4_MAX, FP8_MAX

GEMM = ", fp8_gemm"  # ends the names of the ways that multiply codes
FUSED = ", norms fused"  # ends those whose norms and SwiGLU write codes (quant.fuse_norms)
KEPT = ", codes kept"  # ends those that keep codes of dynamic inputs for backward (quant.keep_codes)
FOUR_BITS = ("mxfp4_w4a4", "nvfp4_w4a4")  # of inputs, in groups


def ours(
    scheme: str,
    module: nn.Module,
    forward: Callable[[], Tensor],
    *,
    weight: bool,
    inputs: bool,
    fp8_gemm: bool = False,
    keep_codes: bool = False,
    fused: bool = False,
) -> None:
    """QuantLinears with absmax scales of the weights and of the inputs of one batch."""
    chosen = SCHEMES[scheme]
    quantization = prepare(module, chosen, learn_weight_scale=weight, learn_input_scale=inputs, fp8_gemm=fp8_gemm)
    assert not quantization.simulated, quantization.simulated
    for layer in quantization.layers.values():
        if isinstance(layer, QuantLinear):
            layer.dynamic_codes = keep_codes
    if fused:
        fuse(module)
    with torch.no_grad():
        for group in quantization.weight_groups:
            weights = [quantization.layers[name].weight for name in group.members]
            stats = [partial_stats(w.flatten(), 0, (w.shape[0], w.shape[1]), chosen.weights) for w in weights]
            group.s0.copy_(scales_from_stats(reduce(combine, stats), chosen.weights))
        for group in quantization.global_groups:
            largest = max(float(quantization.layers[name].weight.abs().max()) for name in group.members)
            group.s0.fill_(FP8_MAX * FP4_MAX / largest)
        if not quantization.input_groups:
            return
        quantization.set_fake_quant(weights=False, activations=False)
        quantization.observe(True)
        forward()
        quantization.observe(False)
        for group in quantization.input_groups:
            assert group.observer is not None
            group.s0.copy_(first_input_scale(group.observer.absmax.reshape(1), group.spec))
        quantization.set_fake_quant(weights=True, activations=True)


class EagerLinear(nn.Linear):
    """fp8 fake quantization as PyTorch's own operators and their autograd do it, with learned scales."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        # Of the weights and the unit inputs of this benchmark; no time depends on them.
        scales = (linear.weight.detach().abs().amax().float() / FP8_MAX, torch.tensor(5 / FP8_MAX))
        self.weight_scale, self.input_scale = (nn.Parameter(s.to(linear.weight.device)) for s in scales)

    @staticmethod
    def fake_quant(x: Tensor, scale: Tensor) -> Tensor:
        """Clamped, rounded straight-through, scaled back."""
        v = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX)
        v = v + (v.to(torch.float8_e4m3fn).float() - v).detach()
        return (v * scale).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.fake_quant(x, self.input_scale), self.fake_quant(self.weight, self.weight_scale))


def eager_fp8(module: nn.Module, forward: Callable[[], Tensor]) -> None:
    """Every Linear but lm_head becomes an :class:`EagerLinear`."""
    for name, linear in list(module.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if type(linear) is nn.Linear and leaf != "lm_head":
            setattr(module.get_submodule(parent), leaf, EagerLinear(linear))


def torchao(activations: bool, module: nn.Module, forward: Callable[[], Tensor]) -> None:
    """torchao's QAT: int4 weights in groups of 32, with or without dynamic int8 activations per token."""
    from torchao.quantization import quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    int8 = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False) if activations else None
    int4 = IntxFakeQuantizeConfig(torch.int4, PerGroup(32), is_symmetric=True)
    config = QATConfig(activation_config=int8, weight_config=int4, step="prepare")
    quantize_(module, config, filter_fn=lambda m, name: isinstance(m, nn.Linear) and not name.endswith("lm_head"))


def torchao_mx(module: nn.Module, forward: Callable[[], Tensor]) -> None:
    """torchao's QAT in MXFP4 on both sides, its GEMM emulated; its NVFP4 has no emulation, and needs a Blackwell."""
    from torchao.prototype.qat.mx import MXFakeQuantizeConfig
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    mx = MXFakeQuantizeConfig()
    config = QATConfig(activation_config=mx, weight_config=mx, step="prepare")
    quantize_(module, config, filter_fn=lambda m, name: isinstance(m, nn.Linear) and not name.endswith("lm_head"))


def make_ways(fp8_gemm: bool, norms: bool) -> dict[str, Callable[[nn.Module, Callable[[], Tensor]], None] | None]:
    """Name and conversion of each way; None for bf16, which stays as it is. ``norms``: whether there are some."""
    learned = {
        "weight scale learned": {"weight": True, "inputs": False},
        "both learned": {"weight": True, "inputs": True},
        "both fixed": {"weight": False, "inputs": False},
    }
    ways: dict[str, Callable[[nn.Module, Callable[[], Tensor]], None] | None] = {"bf16": None}
    for name, scales in learned.items():
        ways[f"fp8_static, {name}"] = partial(ours, "fp8_static", **scales)
    if fp8_gemm:
        for name, scales in learned.items():
            ways[f"fp8_static, {name}{GEMM}"] = partial(ours, "fp8_static", **scales, fp8_gemm=True)
    for name, gemm in {"": False, **({GEMM: True} if fp8_gemm else {})}.items() if norms else ():
        way = partial(ours, "fp8_static", weight=True, inputs=False, fp8_gemm=gemm, fused=True)
        ways[f"fp8_static, weight scale learned{FUSED}{name}"] = way
    ways["w4a16_g32, learned"] = partial(ours, "w4a16_g32", weight=True, inputs=False)
    ways["w4a16_g32, fixed"] = partial(ours, "w4a16_g32", weight=False, inputs=False)
    for scheme in FOUR_BITS:
        ways[f"{scheme}, fixed"] = partial(ours, scheme, weight=False, inputs=False)
        ways[f"{scheme}, fixed{KEPT}"] = partial(ours, scheme, weight=False, inputs=False, keep_codes=True)
    ways["plain PyTorch: fp8 static, both learned"] = eager_fp8
    if timing.installed("torchao"):
        ways["torchao: int4 weights in groups of 32"] = partial(torchao, False)
        ways["torchao: the same, int8 activations per token"] = partial(torchao, True)
        ways["torchao: MXFP4 on both sides"] = torchao_mx
    return ways
