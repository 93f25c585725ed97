"""Three Linears that read one tensor and one that reads another: their results, and how often operators run."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import quant
from quant.spec import get_scheme
from tests.lib.scales import fill_scales

WIDTH, HEADS = 64, (64, 32, 32)
DTYPES = (torch.float32, torch.bfloat16)


class Attention(nn.Module):
    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        for name, size in zip(("q_proj", "k_proj", "v_proj"), HEADS, strict=True):
            setattr(self, name, nn.Linear(WIDTH, size, bias=bias))
        self.o_proj = nn.Linear(sum(HEADS), WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1))


def attention(
    scheme: str = "fp8_static",
    *,
    learn_input: bool = False,
    fp8_gemm: bool = False,
    dtype=torch.bfloat16,
    bias: bool = False,
) -> tuple[Attention, quant.Quantization]:
    model = Attention(bias=bias).to(dtype)
    q = quant.replace_layers(
        model, get_scheme(scheme), learn_weight_scale=True, learn_input_scale=learn_input, fp8_gemm=fp8_gemm
    )
    fill_scales(q)
    return model, q


QUANTIZING = {"quantize", "fake_quantize", "fake_quantize_tokens", "fake_quantize_tokens_and_mask_"}
RESTORING = {"dequantize", "dequantize_and_mask_", *QUANTIZING} - {"quantize"}


class Count(TorchDispatchMode):
    """Record the operators of this project: name, shape of the first tensor, and a weak reference to the result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[int, ...], Callable[[], Tensor | None]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "deepqat":
            name = func.overloadpacket.__name__
            alone = name == "fake_quantize_tokens_and_mask_" and not args[4]
            first = result[0] if isinstance(result, tuple) else result
            reference = weakref.ref(first) if isinstance(first, Tensor) else lambda: None
            self.calls.append(("masked" if alone else name, tuple(args[0].shape), reference))
        return result

    def quantized(self, shape: tuple[int, ...]) -> int:
        """Count how often a tensor of this shape was quantized."""
        return sum(name in QUANTIZING and at == shape for name, at, _ in self.calls)

    def restored(self, *shape: int) -> list[Callable[[], Tensor | None]]:
        """Find what was restored of inputs of this shape."""
        return [result for name, at, result in self.calls if name in RESTORING and at == shape]

    def alive(self, *shape: int) -> bool:
        return any(result() is not None for result in self.restored(*shape))


def entry(model: Attention):
    shared = model.q_proj.shared_input
    assert shared is model.k_proj.shared_input is model.v_proj.shared_input
    return shared._entry


def unshared(q: quant.Quantization) -> None:
    for layer in q.layers.values():
        layer.shared_input = None


def results(model: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Output and gradients, by name."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    output = model(leaf)
    output.backward(grad)
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach(), "x": leaf.grad, **found}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
