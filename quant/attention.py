"""Fake quantization of keys and values as a server stores them in a KV cache: after q/k-norm and RoPE, with one scale
for the keys and one for the values of a layer.

vLLM stores ``e4m3(k / k_scale)``, saturating, and attention multiplies the stored codes by ``k_scale``, in prompt and
generation; values have the same form with ``v_scale``. transformers does the same, and so does SGLang with a
compressed-tensors checkpoint, since August 2026 (pull request 35455). Scales are per layer, fp32 of shape [1], on disk
``<attention>.k_scale`` and ``<attention>.v_scale``. This module multiplies by the reciprocal instead of dividing, which
moves the code of about one value in a thousand to its neighbor. Attention kernels that also round queries and
probabilities to fp8 are not simulated.

transformers' models call attention through a registry of implementations (``AttentionInterface``), with queries, keys
and values in their final form. :func:`wrap_attention` registers a wrapper under a new name, and sets the model to that
name; :mod:`model.sequence` uses it, too. :func:`attach_kv_cache` wraps the model's implementation (sdpa, eager,
flex_attention, flash_attention_2 or the user's own) in a function that first quantizes keys and values with the scales
of the attention module. With transformers' cache, unquantized keys and values are stored, and quantized when read. The
result is the same, as tokens are quantized independently.

Attention kernels keep the quantized keys and values for backward. The quantizer also keeps a 1-bit mask per element if
the scale is fixed, or the unquantized keys and values if the scale learns.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from quant import kernels
from quant.observers import Observer
from quant.scale import Quantizer, Scale, check_fp32, lsq_factor
from quant.spec import TensorSpec

AttentionFunction = Callable[..., Any]

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_EAGER = "eager_attention_forward"


def attention_modules(model: nn.Module, needed: str) -> dict[str, Any]:
    """Find the modules that call attention through transformers' ``AttentionInterface``; by module name.

    Raises ValueError if no such module exists, or if a module with "attention" in its class name is not such a module
    and contains none.
    ``needed`` is the end of the error's text: what is not possible with such a model, and the remedy.
    """
    modules = dict(model.named_modules())
    found = {name: module for name, module in modules.items() if _INTERFACE in _globals_used(module)}
    others = [
        f"{name} ({type(module).__name__})"
        for name, module in modules.items()
        if "attention" in type(module).__name__.lower()
        and not any(attention == name or attention.startswith(f"{name}.") for attention in found)
    ]
    if others:
        raise ValueError(
            f"{', '.join(others[:3])}: found attention that does not go through transformers' AttentionInterface, "
            f"{needed}"
        )
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no module that calls attention through transformers' AttentionInterface, "
            f"{needed}"
        )
    return found


def wrap_attention(
    model: nn.Module,
    attentions: Mapping[str, Any],
    label: str,
    wrap: Callable[[AttentionFunction], AttentionFunction],
    *,
    needed: str,
    wrap_mask: Callable[[AttentionFunction], AttentionFunction] = lambda mask: mask,
) -> None:
    """Replace the model's attention implementation by a wrapper, in place; do not set another one afterwards.

    Args:
        model: a PreTrainedModel of transformers; parameters may be partitioned or on the meta device.
        attentions: result of :func:`attention_modules`.
        label: part of the wrapper's name in the registry.
        wrap: takes an attention function and returns its wrapper.
        needed: end of the errors' text, as in :func:`attention_modules`.
        wrap_mask: takes the function that creates the implementation's masks, if it has one, and returns its wrapper;
            by default the function itself.

    Raises:
        ValueError: ``model`` is no PreTrainedModel, its attention modules have different implementations, one has no
            eager attention although the model uses it, or one does not take the wrapper.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"found a {type(model).__name__}, expected a PreTrainedModel, as its attention must be replaced"
        )
    base = model.config._attn_implementation
    implementations = {_implementation(base, name, attention) for name, attention in attentions.items()}
    if len(implementations) > 1:
        raise ValueError(
            f"the model's attention modules use different functions for {base!r}, expected one function for all: set "
            "model.attn_implementation to another name"
        )
    (implementation,) = implementations

    def under_its_name(module: Any, *args: Any, **kwargs: Any) -> Any:
        its_config = Changed(module.config, _attn_implementation=base)
        return implementation(Changed(module, config=its_config), *args, **kwargs)

    # transformers would look up a kernel for a name with "flash" or a slash; flash kernels are looked up by the name in
    # the module's configuration.
    name = f"{base}_{label}_{implementation.__module__.rpartition('.')[2]}"
    name = re.sub(r"\W", "_", name.replace("flash", "fast"))
    AttentionInterface.register(name, wrap(under_its_name if "flash" in base else implementation))
    masks = AttentionMaskInterface()
    if base in masks:
        AttentionMaskInterface.register(name, wrap_mask(masks[base]))
    model.set_attn_implementation(name)
    for path, attention in attentions.items():
        if attention.config._attn_implementation != name:
            raise ValueError(f"{path}, a {type(attention).__name__}, keeps its own attention implementation, {needed}")


def _globals_used(module: nn.Module) -> tuple[str, ...]:
    """Return the names of globals and attributes in the code of the module's forward."""
    code = getattr(_forward(module), "__code__", None)
    return code.co_names if code is not None else ()


def _forward(module: nn.Module) -> Callable[..., Any]:
    return inspect.unwrap(type(module).forward)


def _implementation(base: str, name: str, attention: nn.Module) -> AttentionFunction:
    """Return the attention function of the implementation ``base``; "eager" is defined in the model's own file. Raises
    ValueError if the forward uses no such function, or several."""
    scope = _forward(attention).__globals__
    if base != "eager":
        return scope[_INTERFACE].get_interface(base, None)
    eager = [used for used in _globals_used(attention) if used.endswith(_EAGER)]
    if len(eager) != 1:
        raise ValueError(
            f"{name}, a {type(attention).__name__}, has no {_EAGER}: set model.attn_implementation to another one"
        )
    return scope[eager[0]]


class Changed:
    """Proxy of an object with some attributes replaced."""

    def __init__(self, inner: Any, **attributes: Any) -> None:
        self.__dict__ |= {"_inner": inner, **attributes}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


KEY, VALUE = "k_cache", "v_cache"
"""Names of the attributes on an attention module."""

# Attributes of attention modules whose cache does not have the keys and values that the attention reads.
_NOT_CACHED = {
    "kv_b_proj": "it is served from the latent that keys and values are projected from",
    "is_kv_shared_layer": "it reads the keys and values of another layer",
}
_OTHER_SCHEME = "choose a quant.scheme that leaves the KV cache unquantized"
_NEEDED = f"so its keys and values cannot be quantized: {_OTHER_SCHEME}"


class QuantCache(nn.Module):
    """Fake quantizer of the keys, or of the values, of one layer.

    A theta that trains gets a gradient of zeros while quantization is off. Its gradient has LSQ's factor with numel =
    features of a token (KV heads times head size), as for the input of a Linear.

    Attributes:
        spec: number format.
        input_s0: frozen fp32 scale ``(1,)``; NaN until filled.
        input_theta: logarithmic correction that trains, ``(1,)`` in the model's dtype; None for a fixed scale.
        input_fake_quant: switch of fake quantization.
        input_observer: if set, observes the keys or values in every forward.
    """

    def __init__(self, spec: TensorSpec, *, dtype: torch.dtype, device: torch.device, learn: bool) -> None:
        """Create an unfilled scale; ``dtype`` is the model's."""
        super().__init__()
        self.spec = spec
        self.input_s0 = nn.Parameter(torch.full((1,), torch.nan, device=device), requires_grad=False)
        self.input_theta = nn.Parameter(torch.zeros(1, dtype=dtype, device=device)) if learn else None
        self.input_fake_quant = True
        self.input_observer: Observer | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Fake-quantize ``x [batch, KV heads, tokens, head size]``, in the model's dtype, with any strides; return it
        unchanged while fake quantization is off."""
        if self.input_observer is not None:
            self.input_observer.update(x, self.input_scale() if self.input_fake_quant else None)
        learns = self.input_theta is not None and torch.is_grad_enabled()
        if not (self.input_fake_quant or learns):
            return x
        check_fp32({"input_s0": self.input_s0})
        spec = self.spec if self.input_fake_quant else None
        return _FakeQuantize.apply(x, self.input_s0, self.input_theta, spec, x.shape[1] * x.shape[-1])

    @torch.no_grad()
    def input_scale(self) -> Tensor:
        """Compute the effective scale as the forward uses it, fp32 ``(1,)``. Parameters must be gathered."""
        scale = Scale(self.input_s0, self.input_theta)
        return kernels.effective_scale(Quantizer(scale, self.spec, torch.float32))

    def extra_repr(self) -> str:
        return f"{self.spec.dtype}, fake_quant={self.input_fake_quant}"


class _FakeQuantize(torch.autograd.Function):
    """Autograd function that fake-quantizes keys or values: ``apply(x, s0, theta, spec, features)``. The output
    is ``x`` if ``spec`` is None."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, s0: Tensor, theta: Tensor | None, spec: TensorSpec | None, features: int
    ) -> Tensor:
        needs_x, _, needs_theta, *_ = ctx.needs_input_grad
        ctx.spec, ctx.features = spec, features
        if spec is None:
            ctx.save_for_backward(theta)
            return x.view_as(x)
        quantizer = Quantizer(Scale(s0, theta), spec, x.dtype)
        if needs_x and not needs_theta:
            _, mask, values = kernels.quantize_with_values(x, quantizer, mask=True)
            ctx.save_for_backward(mask)
            return values
        if needs_theta:
            ctx.save_for_backward(x, s0, theta)
        return kernels.fake_quantize(x, quantizer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, _, needs_theta, *_ = ctx.needs_input_grad
        saved = ctx.saved_tensors
        if ctx.spec is None:
            return grad, None, torch.zeros_like(saved[0]) if needs_theta else None, None, None
        # A copy to write to, contiguous as the kernels need it.
        grad = grad.clone(memory_format=torch.contiguous_format)
        if not needs_theta:
            (mask,) = saved
            return kernels.masked_(grad, mask), None, None, None, None
        x, s0, theta = saved
        quantizer, factor = Quantizer(Scale(s0, theta), ctx.spec, x.dtype), lsq_factor(ctx.features, ctx.spec)
        grad_theta = kernels.fake_quantize_backward_(grad, x, quantizer, factor=factor, theta_gradient=True)
        return grad if needs_x else None, None, grad_theta, None, None


def attach_kv_cache(model: nn.Module, spec: TensorSpec, *, learn: bool) -> dict[str, QuantCache]:
    """Give every attention module of ``model`` a quantizer for its keys and another for its values, in place.

    The attention implementation is replaced by :func:`wrap_attention`. The scales are new Parameters on the attention's
    device, not partitioned; with ``learn`` they have a theta. Returns the quantizers by module name, keys before
    values, in module order.

    Raises:
        ValueError: the model has no attention, or an attention module whose keys and values do not pass through
            transformers' attention interface or are not stored in its cache.
    """
    attentions = attention_modules(model, _NEEDED)
    for name, attention in attentions.items():
        for attribute, problem in _NOT_CACHED.items():
            if getattr(attention, attribute, False):
                raise ValueError(
                    f"the KV cache of {name}, a {type(attention).__name__}, cannot be quantized: {problem}; "
                    f"{_OTHER_SCHEME}"
                )
    wrap_attention(model, attentions, "quantized_kv", _quantizing, needed=_NEEDED)
    caches: dict[str, QuantCache] = {}
    for path, attention in attentions.items():
        like = next(attention.parameters())
        for attribute in (KEY, VALUE):
            cache = QuantCache(spec, dtype=like.dtype, device=like.device, learn=learn).train(attention.training)
            attention.add_module(attribute, cache)
            caches[f"{path}.{attribute}"] = cache
    return caches


def _quantizing(implementation: AttentionFunction) -> AttentionFunction:
    """Wrap an attention function so that keys and values are quantized first."""

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if hasattr(module, KEY):
            key, value = getattr(module, KEY)(key), getattr(module, VALUE)(value)
        return implementation(module, query, key, value, *args, **kwargs)

    return attention
