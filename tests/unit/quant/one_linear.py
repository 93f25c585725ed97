"""One quantized Linear: the module with measured scales, and random operands of its function with their gradients."""

import math
import random
from dataclasses import replace

import torch
from torch import nn

from quant import QuantLinear, Scheme, get_scheme, replace_layers
from quant.autograd import Plan, quant_linear
from quant.linear import StackedLinear
from quant.reference import absmax_scale, effective_scale, fake_quant, fake_quantize_tokens
from quant.scale import Scale
from quant.spec import TensorSpec
from tests.lib.scales import fill_scales
from tests.unit.quant.oracle import per_scale

FP8 = TensorSpec("fp8_e4m3", 8, "tensor")
INT4 = TensorSpec("int", 4, "group", 16)
BLOCKS, NVFP4 = TensorSpec("fp8_e4m3", 8, "block", 16), TensorSpec("fp4_e2m1", 4, "group", 16)
FP8_GROUPS = TensorSpec("fp8_e4m3", 8, "group", 16, dynamic=True)
MX8 = TensorSpec("fp8_e4m3", 8, "group", 32, dynamic=True, mx=True)
ASYMMETRIC = TensorSpec("int", 8, "token", symmetric=False, dynamic=True)
SCHEMES = [
    (FP8, FP8),
    (INT4, None),
    (TensorSpec("int", 2, "group", 16), None),
    (TensorSpec("int", 4, "group", 16, narrow=True), None),
    (TensorSpec("int", 4, "group", 16, symmetric=False), None),
    (TensorSpec("int", 8, "channel", symmetric=False), FP8),
    (FP8, None),
    (None, FP8),
    (BLOCKS, FP8_GROUPS),
    (BLOCKS, None),
    (TensorSpec("int", 4, "block", 16), FP8),
    (TensorSpec("fp8_e4m3", 8, "channel"), TensorSpec("fp8_e4m3", 8, "token", dynamic=True)),
    (TensorSpec("int", 8, "channel"), TensorSpec("int", 8, "tensor")),
    (INT4, ASYMMETRIC),
    (None, ASYMMETRIC),
    (NVFP4, None),
    (TensorSpec("fp4_e2m1", 4, "group", 32), TensorSpec("int", 8, "token", dynamic=True)),
    (replace(MX8, dynamic=False), MX8),
    (TensorSpec("int", 4, "group", 32, ggml=True), None),
]


def quantized_linear(
    scheme: Scheme | str, out: int, in_: int, *, dtype=torch.bfloat16, bias=False, experts=0, largest=2.5, **options
) -> QuantLinear:
    """Build a quantized Linear, or a stack of experts, with measured scales; ``options`` are those of
    :func:`quant.replace_layers`."""
    scheme = get_scheme(scheme) if isinstance(scheme, str) else scheme
    layer: nn.Module = nn.Linear(in_, out, bias=bias).to(dtype)
    if experts:
        weight = nn.Parameter(torch.randn(experts, out, in_).div(16).to(dtype))
        layer = StackedLinear(weight, (experts, out, in_), ("up_proj",))
    model = nn.ModuleDict({"up_proj": layer})
    fill_scales(
        replace_layers(model, scheme, **{"learn_weight_scale": False, "learn_input_scale": False, **options}), largest
    )
    return model["up_proj"]


class Case:
    """Random operands of one Linear, with scales that clip some of the weights and inputs."""

    def __init__(self, weight_spec, input_spec, dtype=torch.float32, *, tokens=None, bias=True):
        out, in_ = random.randint(1, 24), 32 * random.randint(1, 3)
        if weight_spec is not None and weight_spec.granularity == "block":
            out = random.randint(1, 40)
            in_ = random.randint(1, 70) if input_spec is None or input_spec.group_size is None else in_
        tokens = random.choice([(7,), (2, 5), (3, 1)]) if tokens is None else tokens
        self.x = torch.randn(*tokens, in_).to(dtype).requires_grad_()
        self.weight = nn.Parameter(torch.randn(out, in_).to(dtype))
        self.bias = nn.Parameter(torch.randn(out).to(dtype)) if bias else None
        self.weight_s0, self.weight_theta = self._scale(self.weight, weight_spec, (out, in_), dtype)
        self.weight_global = None
        if weight_spec is not None and weight_spec.scale_format == "e4m3":
            # The largest scales before theta have the code 448; some are below the smallest normal one.
            ends = 448 / self.weight_s0.max() if self.weight_s0.numel() else torch.ones(())
            self.weight_global = nn.Parameter(10 ** random.uniform(-3, 0) * ends.view(1), requires_grad=False)
        self.weight_zero = None
        if weight_spec is not None and weight_spec.has_zero_points:
            # 0 is no end of the grid: an element there would ask for other finite differences.
            zero = torch.randint(int(weight_spec.qmin) + 1, int(weight_spec.qmax), self.weight_s0.shape)
            self.weight_zero = nn.Parameter(zero.float(), requires_grad=False)
        self.input_s0, self.input_theta = self._scale(self.x, input_spec, (math.prod(tokens), in_), dtype)
        # Any numbers: what the caller says is what counts.
        self.plan = Plan(
            weight_spec, input_spec, weight_numel=random.randint(1, 999), input_numel=random.randint(1, 99)
        )

    @staticmethod
    def _scale(x, spec, shape, dtype):
        if spec is None or spec.dynamic:
            return None, None
        absmax = torch.ones(1)
        if x.numel():
            absmax = per_scale(x.detach().float().reshape(shape), spec).abs().amax(-1)
        theta = 0.3 * torch.randn(absmax.shape) - 0.5
        s0 = nn.Parameter(absmax_scale(absmax, spec), requires_grad=False)
        return s0, nn.Parameter(theta.to(dtype))

    @property
    def parameters(self):
        every = (*self.tensors().values(), self.weight_global, self.weight_zero)
        return [tensor for tensor in every if isinstance(tensor, nn.Parameter)]

    def tensors(self):
        names = ("x", "weight", "bias", "weight_s0", "weight_theta", "input_s0", "input_theta")
        return {name: getattr(self, name) for name in names}

    def trained(self):
        return {name: t for name, t in self.tensors().items() if t is not None and t.requires_grad}

    def scales(self):
        weight = Scale(self.weight_s0, self.weight_theta, self.weight_global, self.weight_zero)
        input_ = Scale(self.input_s0, self.input_theta)
        return [None if one.s0 is None else one for one in (weight, input_)]

    def __call__(self, **options):
        return quant_linear(self.x, self.weight, self.bias, *self.scales(), self.plan, **options)

    def scale(self, kind):
        spec = getattr(self.plan, kind)
        s0, theta = getattr(self, f"{kind}_s0"), getattr(self, f"{kind}_theta")
        global_scale = self.weight_global if kind == "weight" else None
        return effective_scale(s0, theta, spec, self.weight.dtype, global_scale).detach()

    def operands(self):
        """What the GEMM multiplies: the fake-quantized input and weight."""
        x, weight = self.x.detach(), self.weight.detach()
        spec = self.plan.input
        if spec is not None:
            x = fake_quantize_tokens(x, spec) if spec.dynamic else fake_quant(x, self.scale("input"), spec)
        if self.plan.weight is not None:
            weight = fake_quant(weight, self.scale("weight"), self.plan.weight, self.weight_zero)
        return x, weight


def gradients(case, output=None):
    """Gradients of a random linear functional of the output, by name, and that functional."""
    output = case() if output is None else output
    grad = torch.randn_like(output)
    trained = case.trained()
    values = torch.autograd.grad(output, list(trained.values()), grad, allow_unused=True)
    return dict(zip(trained, values, strict=True)), grad
