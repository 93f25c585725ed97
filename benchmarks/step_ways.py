"""The ways to quantize whose steps step.py compares: ours, plain PyTorch's and torchao's."""

from collections.abc import Callable
from functools import partial, reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import timing
from quant import SCHEMES, QuantLinear, combine, partial_stats, prepare, scales_from_stats
from quant.fused import LAYERS, fuse
from quant.scale import first_input_scale
from quant.spec import FP4_MAX, FP8_MAX

Convert = Callable[[nn.Module, Callable[[], Tensor]], None]
GEMM, FUSED, KEPT = ", fp8_gemm", ", norms fused", ", codes kept"  # end the names of ways
FOUR_BITS = ("mxfp4_w4a4", "nvfp4_w4a4")  # of inputs, in groups


def ours(
    scheme: str,
    module: nn.Module,
    forward: Callable[[], Tensor],
    *,
    weight: bool = False,
    inputs: bool = False,
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


def replace(module: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace every Linear but lm_head."""
    for name, linear in list(module.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if type(linear) is nn.Linear and leaf != "lm_head":
            setattr(module.get_submodule(parent), leaf, make(linear))


class EagerLinear(nn.Linear):
    """fp8 fake quantization by PyTorch's own operators and their autograd, with learned scales."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        # Of the weights and the unit inputs of this benchmark; no time depends on them.
        scales = (linear.weight.detach().abs().amax().float() / FP8_MAX, torch.tensor(5 / FP8_MAX))
        self.weight_scale, self.input_scale = (nn.Parameter(s.to(linear.weight.device)) for s in scales)

    @staticmethod
    def fake_quant(x: Tensor, scale: Tensor) -> Tensor:
        """Clamp, round straight-through, scale back."""
        v = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX)
        v = v + (v.to(torch.float8_e4m3fn).float() - v).detach()
        return (v * scale).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.fake_quant(x, self.input_scale), self.fake_quant(self.weight, self.weight_scale))


def torchao(kind: str, module: nn.Module, forward: Callable[[], Tensor]) -> None:
    """torchao's QAT: int4 weights in groups of 32, without or with int8 inputs per token; or MXFP4 on both sides."""
    from torchao.quantization import quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    int4 = IntxFakeQuantizeConfig(torch.int4, PerGroup(32), is_symmetric=True)
    int8 = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False) if kind == "int8" else None
    weights, inputs = int4, int8
    if kind == "mx":
        from torchao.prototype.qat.mx import MXFakeQuantizeConfig

        weights = inputs = MXFakeQuantizeConfig()  # its GEMM is emulated
    config = QATConfig(activation_config=inputs, weight_config=weights, step="prepare")
    quantize_(module, config, filter_fn=lambda m, name: isinstance(m, nn.Linear) and not name.endswith("lm_head"))


def ways_of(module: nn.Module, fp8_gemm: bool) -> dict[str, Convert | None]:
    """Name and conversion of each way; None for bf16, which stays as it is."""
    learned = {
        "weight scale learned": {"weight": True},
        "both learned": {"weight": True, "inputs": True},
        "both fixed": {},
    }
    ways: dict[str, Convert | None] = {"bf16": None}
    for gemm in (False, True) if fp8_gemm else (False,):
        for name, scales in learned.items():
            ways[f"fp8_static, {name}{GEMM * gemm}"] = partial(ours, "fp8_static", **scales, fp8_gemm=gemm)
        if any(type(one).__name__ in LAYERS for one in module.modules()):
            fused = partial(ours, "fp8_static", weight=True, fp8_gemm=gemm, fused=True)
            ways[f"fp8_static, weight scale learned{FUSED}{GEMM * gemm}"] = fused
    ways["w4a16_g32, learned"] = partial(ours, "w4a16_g32", weight=True)
    ways["w4a16_g32, fixed"] = partial(ours, "w4a16_g32")
    for scheme in FOUR_BITS:
        ways[f"{scheme}, fixed"] = partial(ours, scheme)
        ways[f"{scheme}, fixed{KEPT}"] = partial(ours, scheme, keep_codes=True)
    ways["plain PyTorch: fp8 static, both learned"] = lambda module, forward: replace(module, EagerLinear)
    if timing.installed("torchao"):
        ways["torchao: int4 weights in groups of 32"] = partial(torchao, "int4")
        ways["torchao: the same, int8 inputs per token"] = partial(torchao, "int8")
        ways["torchao: MXFP4 on both sides"] = partial(torchao, "mx")
    return ways
