"""Wrap the attention implementation of transformers' models: find the modules that call it, register a wrapper of it.

transformers' models call attention through a registry of implementations (``AttentionInterface``), with queries, keys
and values in their final form. A wrapper is registered under a name of its own, and the model is set to that name.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

AttentionFunction = Callable[..., Any]

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_EAGER = "eager_attention_forward"


def attention_modules(model: nn.Module, needed: str) -> dict[str, Any]:
    """Find the modules that call an attention implementation, by name.

    ``needed`` ends the text of the error, with the reason and the remedy. Raises ValueError for attention that does not
    use transformers' interface.
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
        wrap: makes the wrapper of an attention function.
        needed: ends the text of errors, as in :func:`attention_modules`.
        wrap_mask: makes the wrapper of the function that creates the implementation's masks, if it has one.

    Raises:
        ValueError: the model's implementation cannot be set, or a module does not take it.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"found a {type(model).__name__}, expected a PreTrainedModel, as its attention must be replaced"
        )
    name = _register(model.config._attn_implementation, attentions, label, wrap, wrap_mask)
    model.set_attn_implementation(name)
    for path, attention in attentions.items():
        if attention.config._attn_implementation != name:
            raise ValueError(
                f"{path}, a {type(attention).__name__}, did not take another attention implementation, {needed}"
            )


def _globals_used(module: nn.Module) -> tuple[str, ...]:
    """Return the names of globals and attributes in the code of the module's forward."""
    code = getattr(_forward(module), "__code__", None)
    return code.co_names if code is not None else ()


def _forward(module: nn.Module) -> Callable[..., Any]:
    return inspect.unwrap(type(module).forward)


def _register(
    base: str,
    attentions: Mapping[str, Any],
    label: str,
    wrap: Callable[[AttentionFunction], AttentionFunction],
    wrap_mask: Callable[[AttentionFunction], AttentionFunction],
) -> str:
    """Register the wrapper of ``base`` for the attention modules; return the new name."""
    implementations = {_implementation(base, name, attention) for name, attention in attentions.items()}
    if len(implementations) > 1:
        raise ValueError(
            f"found attention modules with different implementations of {base!r}, expected one in the whole model: set "
            "model.attn_implementation to another one"
        )
    (implementation,) = implementations

    def under_its_name(module: Any, *args: Any, **kwargs: Any) -> Any:
        return implementation(
            Changed(module, config=Changed(module.config, _attn_implementation=base)), *args, **kwargs
        )

    # transformers would look up a kernel for a name with "flash" or a slash; flash kernels are looked up by the name in
    # the module's configuration.
    name = f"{base}_{label}_{implementation.__module__.rpartition('.')[2]}"
    name = re.sub(r"\W", "_", name.replace("flash", "fast"))
    AttentionInterface.register(name, wrap(under_its_name if "flash" in base else implementation))
    masks = AttentionMaskInterface()
    if base in masks:
        AttentionMaskInterface.register(name, wrap_mask(masks[base]))
    return name


def _implementation(base: str, name: str, attention: nn.Module) -> AttentionFunction:
    """Return the attention function of the implementation ``base``; "eager" is defined in the model's own file."""
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
