"""Three Linears that read one tensor and one that reads another: their results, and how often operators run."""

from collections import Counter

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import quant
from quant.spec import get_scheme
from tests.lib.scales import fill_scales

WIDTH, HEADS = 64, (64, 32, 32)
DTYPES = (torch.float32, torch.bfloat16)


class Attention(nn.Module):
    """Three layers that read one tensor, and one that reads another."""

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
    q = quant.prepare(
        model, get_scheme(scheme), learn_weight_scale=True, learn_input_scale=learn_input, fp8_gemm=fp8_gemm
    )
    fill_scales(q)
    return model, q


class Count(TorchDispatchMode):
    """Counts calls of the operators, by name and by the shape of what they get."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "deepqat":
            name = func.overloadpacket.__name__
            alone = name == "fake_quantize_tokens_and_mask_" and not args[4]
            self.calls["masked" if alone else name, tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))

    def quantized(self, shape: tuple[int, ...]) -> int:
        """How often a tensor of this shape was."""
        names = ("quantize", "quantize_with_values", "quantize_with_scale", "fake_quantized", "fake_quantized_tokens")
        names += ("fake_quantize_tokens_and_mask_",)
        return sum(self.calls[name, shape] for name in names)


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
