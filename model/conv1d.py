"""GPT-2's Linears: transformers has them as ``Conv1D``, whose weight is ``[in, out]``.

Ours are ``nn.Linear`` in their place, so that all that is said of Linears holds for them. The weight lies turned on
disk: it is read and written so (:mod:`model.names`). No reader takes such a layer quantised: vLLM turns every tensor
called ``weight`` of these models as it loads, and compressed-tensors looks for Linears. So what was trained can be
exported as weights (``export.format: dequantized``).
"""

from weakref import WeakKeyDictionary

from torch import nn
from transformers.pytorch_utils import Conv1D

# By model, since quantised layers take the places of these Linears.
_TURNED: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def arrange_conv1d(model: nn.Module) -> None:
    """Replace every ``Conv1D`` of an empty model by an nn.Linear, in place, where new parameters land on the meta
    device."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Conv1D)}
    for name, conv in found.items():
        model.set_submodule(name, _linear(conv))
    _TURNED[model] = frozenset(f"{name}.weight" for name in found)


def _linear(conv: nn.Module) -> nn.Linear:
    weight = conv.get_parameter("weight")
    rows, columns = weight.shape
    linear = nn.Linear(rows, columns, bias=False, dtype=weight.dtype, device="meta")
    linear.bias = conv.get_parameter("bias")
    return linear.train(conv.training)


def turned_weights(model: nn.Module) -> frozenset[str]:
    """Names of the weights ``[out, in]`` of a model whose tensors on disk are ``[in, out]``."""
    return _TURNED.get(model, frozenset())
