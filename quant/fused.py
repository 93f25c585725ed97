"""RMSNorm and SwiGLU modules that quantize their output for the layers that read it (their *readers*).

The input of q, k and v, and of gate and up, is the output of an RMSNorm; the input of down is ``silu(gate) * up``. The
model's own modules write these tensors in the model's dtype, and the layers read them again to quantize them. The
modules here replace the model's own, keep their Parameters and children under the same names, and return codes
(:mod:`quant.inputs`), with the arithmetic of :mod:`quant.reference`. All readers of a module must share one static
input scale that does not learn. While fake quant of a reader's input is off, or an observer measures it, the module
computes the same bits as the module that it replaced.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from quant import kernels
from quant.inputs import QuantizedActivation, QuantizedInput, Restored, SharedInput
from quant.linear import QuantLinear
from quant.quantization import forward_with, random_tensors
from quant.rules import examples
from quant.scale import Quantizer, Scale

MOST_FEATURES = 16384  # limit of a norm's rows, each one segment of the kernels' sums

# Decoder layers and MLPs of transformers with a known forward: only q, k and v of self_attn read the first norm, only
# gate and up of mlp the second.
LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "Qwen3MoeDecoderLayer")
MLPS = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "Qwen3MoeMLP")
NORMS: dict[str, tuple[str, ...]] = {
    "input_layernorm": ("self_attn", "q_proj", "k_proj", "v_proj"),
    "post_attention_layernorm": ("mlp", "gate_proj", "up_proj"),
}


class FusedModule(nn.Module):
    """Base of a norm or activation that returns its output quantized for its readers, the layers that take it as input.

    Attributes:
        input_s0: the frozen scale of the readers' input, also registered here so that ZeRO-3 gathers it for this
            module.
        readers: the layers that read the output, not registered as children.
        source: name of the module, for an error.
    """

    input_s0: nn.Parameter

    def __init__(self, source: str, readers: Sequence[QuantLinear]) -> None:
        """Store the readers, which :func:`_problem_of_readers` accepted, and give them one ``shared_input``."""
        super().__init__()
        assert readers[0].input_s0 is not None
        self.input_s0 = readers[0].input_s0
        self.source = source
        self.readers = tuple(readers)  # a tuple of modules registers none
        self.shared_input = SharedInput(sum(reader.input_fake_quant for reader in readers))
        for reader in readers:
            reader.shared_input = self.shared_input

    def passes_codes(self) -> bool:
        """Return True if every reader now takes codes: fake quant of its input is on, and no observer measures this
        input. Return False under ``torch.compile``, which fuses operators itself."""
        taken = all(reader.input_fake_quant and reader.input_observer is None for reader in self.readers)
        return taken and not torch.compiler.is_compiling()

    def wants_values(self) -> bool:
        """Return True if a reader now multiplies fake-quantized values instead of codes."""
        return not all(reader.fp8_gemm and reader.weight_fake_quant for reader in self.readers)

    def quantizer(self, dtype: torch.dtype) -> Quantizer:
        """Return the quantizer of the readers' input; ``dtype`` is the model's."""
        spec = self.readers[0].scheme.activations
        assert spec is not None
        return Quantizer(Scale(self.input_s0), spec, dtype)

    def output(self, like: Tensor, values: Tensor, codes: Tensor) -> QuantizedActivation:
        """Build the output in the shape and dtype of ``like``: a tensor without values that carries the results of the
        fused kernel to the readers, ``codes`` and the fake-quantized ``values`` (empty if not computed)."""
        quantized = QuantizedInput(values if values.numel() == codes.numel() else None, codes)
        return QuantizedActivation(like, quantized, Restored(), self.source, self.shared_input)


class FusedRMSNorm(FusedModule):
    """RMSNorm that replaces ``norm``, with its ``weight`` and ``variance_epsilon``."""

    weight: nn.Parameter

    def __init__(self, norm: nn.Module, source: str, readers: Sequence[QuantLinear]) -> None:
        super().__init__(source, readers)
        assert isinstance(norm.weight, nn.Parameter) and isinstance(norm.variance_epsilon, float)
        self.weight = norm.weight
        self.variance_epsilon = norm.variance_epsilon
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x [..., features]``. The result has the same shape, and is a
        :class:`quant.inputs.QuantizedActivation` if :meth:`passes_codes` and ``x`` has the weight's dtype; else an
        ordinary tensor."""
        if x.dtype != self.weight.dtype or not self.passes_codes():
            return rms_norm(x, self.weight, self.variance_epsilon)
        trains = torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)
        output: Tensor = _NormFunction.apply(self, trains, x, self.weight, self.input_s0)
        return output

    def extra_repr(self) -> str:
        return f"eps={self.variance_epsilon}, codes for {len(self.readers)} layers"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute RMSNorm with the same bits as LlamaRMSNorm and its variants in transformers."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


class _NormFunction(torch.autograd.Function):
    """Autograd function of RMSNorm with quantized output: ``apply(module, trains, x, weight, s0)``. Saves ``x``, the
    weight, 1 / RMS of each row, and one bit per element: 0 if clipped."""

    @staticmethod
    def forward(ctx: Any, module: FusedRMSNorm, trains: bool, x: Tensor, weight: Tensor, s0: Tensor) -> Tensor:
        codes, mask, values, rstd = kernels.rms_norm_quantize(
            x,
            weight,
            module.variance_epsilon,
            module.quantizer(weight.dtype),
            mask=trains,
            values=module.wants_values(),
        )
        ctx.save_for_backward(x, weight, rstd, mask)
        return module.output(x, values, codes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd, mask = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3]
        grad_x, grad_weight = kernels.rms_norm_backward(grad, x, weight, rstd, mask, weight_gradient=wanted)
        return None, None, grad_x if ctx.needs_input_grad[2] else None, grad_weight, None


class FusedSwiGLU(FusedModule):
    """Module that computes ``silu(gate) * up`` for one reader, ``down``; replaces the activation ``act`` of an MLP."""

    def __init__(self, act: nn.Module, source: str, down: QuantLinear) -> None:
        super().__init__(source, [down])
        self.act = act
        self.train(act.training)

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute ``silu(gate) * up`` of two tensors of one shape. The result has the same shape, and is a
        :class:`quant.inputs.QuantizedActivation` if :meth:`passes_codes` and the dtypes of gate and up are equal; else
        an ordinary tensor."""
        if gate.dtype != up.dtype or not self.passes_codes():
            product: Tensor = self.act(gate) * up
            return product
        trains = torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)
        output: Tensor = _SwiGLUFunction.apply(self, trains, gate, up, self.input_s0)
        return output


class _SwiGLUFunction(torch.autograd.Function):
    """Autograd function of ``silu(gate) * up`` with quantized output: ``apply(module, trains, gate, up, s0)``. Saves
    ``gate``, ``up`` and one bit per element: 0 if clipped."""

    @staticmethod
    def forward(ctx: Any, module: FusedSwiGLU, trains: bool, gate: Tensor, up: Tensor, s0: Tensor) -> Tensor:
        how = {"mask": trains, "values": module.wants_values()}
        codes, mask, values = kernels.silu_mul_quantize(gate, up, module.quantizer(gate.dtype), **how)
        ctx.save_for_backward(gate, up, mask)
        return module.output(gate, values, codes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *kernels.silu_mul_backward(grad, *ctx.saved_tensors), None


class FusedMLP(nn.Module):
    """MLP ``down(silu(gate(x)) * up(x))`` with the children of ``mlp``, which it replaces, and a
    :class:`FusedSwiGLU`."""

    def __init__(self, mlp: nn.Module, source: str) -> None:
        super().__init__()
        children = dict(mlp.named_children())
        down = children["down_proj"]
        assert isinstance(down, QuantLinear)
        children["act_fn"] = FusedSwiGLU(children["act_fn"], source, down)
        for name, child in children.items():
            self.add_module(name, child)
        self.train(mlp.training)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the MLP of ``x [..., hidden]``, in the same shape."""
        gate, up, down, act = (self.get_submodule(name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn"))
        return down(act(gate(x), up(x)))


class Fused(NamedTuple):
    """Result of :func:`fuse`.

    Attributes:
        norms, mlps: names of the replaced modules.
        left: norms and MLPs of known decoder layers that were not replaced: the reason by module name.
    """

    norms: list[str]
    mlps: list[str]
    left: dict[str, str]

    def unchanged(self) -> str:
        """Format two entries of ``left`` and the number of the other entries."""
        return examples([f"{name} ({why})" for name, why in self.left.items()], 2)

    def summary(self) -> str:
        """Write one line: how many norms and MLPs were replaced, and why others were not."""
        done = f"{len(self.norms)} norms and {len(self.mlps)} MLPs pass codes to the layers that read them"
        return done + (f"; {len(self.left)} stay: {self.unchanged()}" if self.left else "")


def fuse(model: nn.Module) -> Fused:
    """Replace norms of ``model`` in place by modules that quantize their output, and MLPs by modules that quantize the
    input of their last Linear (down), where all layers that read the quantized tensor can take codes.

    Call it after rotations and adapters are attached, since layers with a rotation or an adapter need values instead of
    codes. Parameters may be partitions. Raises ValueError, with the reasons, if nothing can be fused.
    """
    modules, fused = dict(model.named_modules()), Fused([], [], {})
    for prefix, layer in modules.items():
        if type(layer).__name__ not in LAYERS:
            continue
        for norm, (parent, *readers) in NORMS.items():
            name = f"{prefix}.{norm}"
            problem = _problem_of_norm(modules[name], modules[f"{prefix}.{parent}"], readers)
            if problem is None:
                layers = [modules[f"{prefix}.{parent}.{reader}"] for reader in readers]
                setattr(layer, norm, FusedRMSNorm(modules[name], name, layers))
                fused.norms.append(name)
            else:
                fused.left[name] = problem
        name = f"{prefix}.mlp"
        problem = _problem_of_mlp(modules[name])
        if problem is None:
            layer.mlp = FusedMLP(modules[name], name)
            fused.mlps.append(name)
        else:
            fused.left[name] = problem
    if not (fused.norms or fused.mlps):
        why = f"the layers of {type(model).__name__} are none of {', '.join(LAYERS)}"
        if fused.left:
            why = f"nothing can be fused: {fused.unchanged()}"
        raise ValueError(f"quant.fuse_norms: true, expected false: {why}")
    return fused


def _problem_of_norm(norm: nn.Module, parent: nn.Module, readers: Sequence[str]) -> str | None:
    """Return the reason why a norm cannot be replaced, or None."""
    if "gate_proj" in readers and type(parent).__name__ not in MLPS:
        return f"a {type(parent).__name__} may read its values, as a router of experts does"
    layers: list[Any] = [getattr(parent, name, None) for name in readers]
    if problem := _problem_of_readers(layers):
        return problem
    width = layers[0].in_features
    if width % 8 or width > MOST_FEATURES:
        return f"its {width} features are not a multiple of 8, or are more than {MOST_FEATURES}"
    return None if _computes_rms_norm(norm) else f"a {type(norm).__name__} computes something else than RMSNorm"


def _problem_of_mlp(mlp: nn.Module) -> str | None:
    if type(mlp).__name__ not in MLPS:
        return f"a {type(mlp).__name__} is none of {', '.join(MLPS)}"
    if problem := _problem_of_readers([getattr(mlp, "down_proj", None)]):
        return problem
    return None if _computes_swiglu(mlp) else f"a {type(mlp).__name__} computes something else than SwiGLU"


def _problem_of_readers(layers: Sequence[nn.Module | None]) -> str | None:
    """Return the reason why layers cannot take codes, or None."""
    if not all(isinstance(layer, QuantLinear) and not layer.projections for layer in layers):
        return "not all layers that read it are quantized Linears"
    readers: list[Any] = list(layers)
    spec = readers[0].scheme.activations
    if spec is None or spec.dynamic or spec.granularity != "tensor" or readers[0].input_s0 is None:
        return "the layers that read it have no static scale of their input"
    if any(one.input_s0 is not readers[0].input_s0 or one.scheme.activations != spec for one in readers):
        return "the layers that read it have several scales"
    if any(one.input_theta is not None for one in readers):
        return "the scale of its output learns"
    if any(one.rotation is not None or one.adapter is not None for one in readers):
        return "a layer that reads it rotates its input, or has an adapter"
    return None


def _computes_rms_norm(norm: nn.Module) -> bool:
    """Return True if a norm computes :func:`rms_norm`; tested with a small weight."""
    eps = getattr(norm, "variance_epsilon", None)
    if set(norm._parameters) != {"weight"} or norm._modules or not isinstance(eps, float):
        return False
    x, weight = random_tensors((2, 3, 8), (8,), dtype=torch.bfloat16)
    found = forward_with(norm, x, parameters={"weight": weight})
    return isinstance(found, Tensor) and torch.equal(found, rms_norm(x, weight, eps))


def _computes_swiglu(mlp: nn.Module) -> bool:
    """Return True if an MLP computes ``down(silu(gate(x)) * up(x))``; tested with small children."""
    names = ("gate_proj", "up_proj", "down_proj")
    if set(mlp._modules) != {*names, "act_fn"} or mlp._parameters:
        return False
    x, *weights = random_tensors((2, 3, 8), (6, 8), (6, 8), (8, 6), dtype=torch.float32)
    gate, up, down = (partial(F.linear, weight=weight) for weight in weights)
    children = {**dict(zip(names, (gate, up, down), strict=True)), "act_fn": mlp._modules["act_fn"]}
    found = forward_with(mlp, x, parameters={}, _modules=children)
    return isinstance(found, Tensor) and torch.equal(found, down(F.silu(gate(x)) * up(x)))
