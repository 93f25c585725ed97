"""The input of q, k and v is restored in backward once for all three, and held no longer."""

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from quant.inputs import Restored
from tests.unit.quant.attention import WIDTH, Attention, assert_equal, attention, results, unshared

MAKERS = ("dequantize", "dequantize_and_mask_", "fake_quantized", "fake_quantized_tokens")
MAKERS += ("fake_quantize_tokens_and_mask_",)
WAYS = {"fp8_static": {"fp8_gemm": True}, "learned": {"learn_input": True}, "fp8_dynamic": {}, "8da4w": {}}


class Made(TorchDispatchMode):
    """Weak references to what was restored of an input of ``shape``."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape
        self.found: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "deepqat" and func.overloadpacket.__name__ in MAKERS and result.shape == self.shape:
            self.found.append(weakref.ref(result))
        return result

    def alive(self) -> int:
        return sum(one() is not None for one in self.found)


def model_of(way: str) -> tuple[Attention, object]:
    return attention("fp8_static" if way == "learned" else way, **WAYS[way])


def readers(model: nn.Module) -> list[nn.Module]:
    return [model.q_proj, model.k_proj, model.v_proj]


def some(count: int = 2) -> list[Tensor]:
    return [torch.randn(6, WIDTH).bfloat16() for _ in range(count)]


def gradients(model: nn.Module, x: Tensor, grad: Tensor, recomputed: str) -> tuple[dict[str, Tensor], int]:
    """Return those of the input and the parameters, and how often an input was restored for them."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    output = model(leaf) if recomputed == "no" else checkpoint(model, leaf, use_reentrant=recomputed == "reentrant")
    with Made(6, WIDTH) as made:
        output.backward(grad)
    assert not made.alive()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"x": leaf.grad, **found}, len(made.found)


@pytest.mark.parametrize("recomputed", ("no", "reentrant", "not reentrant"))
@pytest.mark.parametrize("way", WAYS)
def test_restored_once_and_the_same(way, recomputed, seed):
    model, q = model_of(way)
    x, grad = some()
    together, once = gradients(model, x, grad, recomputed)
    unshared(q)
    alone, apart = gradients(model, x, grad, recomputed)
    assert_equal(alone, together)
    # Three layers restore where one did; and where the second forward fake-quantizes, three do so too.
    assert apart - once == (2 if recomputed == "no" or way == "fp8_static" else 4)


@pytest.mark.parametrize("recomputed", ("no", "not reentrant"))
@pytest.mark.parametrize("scheme", ("fp8_dynamic", "mxfp4_w4a4"))
def test_codes_that_are_kept_of_dynamic_inputs_give_the_same(scheme, recomputed, seed):
    """Their gradient is masked already when their values are restored."""
    model, _ = attention(scheme)
    (x, grad), found = some(), []
    for kept in (True, False):
        for layer in model.children():
            layer.dynamic_codes = kept
        found.append(gradients(model, x, grad, recomputed)[0])
    assert_equal(*found)


@pytest.mark.parametrize("way", WAYS)
def test_a_backward_of_some_of_the_layers_holds_nothing_after_it(way, seed):
    """One layer's backward with the graph kept, then all: each gives what it gives without sharing."""
    model, q = model_of(way)
    (x,), found = some(1), []
    grads = [torch.randn_like(layer(x)) for layer in readers(model)]
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        outputs = [layer(leaf) for layer in readers(model)]
        parameters = [leaf, *(layer.weight for layer in readers(model))]
        with Made(6, WIDTH) as made:
            one = torch.autograd.grad(outputs[1], (leaf, parameters[2]), grads[1], retain_graph=True)
        assert len(made.found) == 1 and not made.alive()
        with Made(6, WIDTH) as made:
            every = torch.autograd.grad(outputs, parameters, grads, retain_graph=True)
            again = torch.autograd.grad(outputs, parameters, grads)
        assert len(made.found) == (6 if found else 2) and not made.alive()
        found.append([*one, *every, *again])
        unshared(q)
    assert all(map(torch.equal, *found))


def test_a_backward_that_raises_leaves_nothing_to_the_next(seed):
    """It is raised behind the first of three backwards; what was restored goes with the graph, or when another group's
    input is restored."""
    model, _ = attention(fp8_gemm=True)
    x, ones = some(1)[0], torch.ones(6, WIDTH).bfloat16()
    outputs = [layer(x.requires_grad_()) for layer in readers(model)]

    def fail(grad: Tensor) -> None:
        raise RuntimeError("on purpose")

    outputs[1].register_hook(fail)
    with Made(6, WIDTH) as made, pytest.raises(RuntimeError, match="on purpose"):
        sum(one.sum() for one in outputs).backward()
    assert len(made.found) == 1
    other, _ = attention(fp8_gemm=True)
    expected = results(other, x.detach(), ones)
    assert not made.alive()
    assert_equal(results(other, x.detach(), ones), expected)
    del outputs
    assert not made.alive()


def test_what_is_kept_may_be_moved(seed):
    """Hooks that give each layer a copy of its own of what it kept: restored for each, the same bits."""
    model, _ = attention(fp8_gemm=True)
    x, grad = some()
    expected = results(model, x, grad)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one.detach().clone(), lambda one: one.clone()):
        assert_equal(results(model, x, grad), expected)


def test_two_inputs_in_turn(seed):
    """Layers of two groups whose backwards alternate: one input is held at a time."""
    models, xs = [attention(fp8_gemm=True)[0] for _ in range(2)], some()
    pairs = [[(layer, x.requires_grad_()) for layer in readers(model)] for model, x in zip(models, xs, strict=True)]
    alternating = [reader for both in zip(*pairs, strict=True) for reader in both]
    weights = [layer.weight for layer, _ in alternating]
    losses = [sum(layer(x).float().sum() for layer, x in one) for one in (*pairs, alternating)]
    alone = torch.autograd.grad(losses[0] + losses[1], weights)
    with Made(6, WIDTH) as made:
        together = torch.autograd.grad(losses[2], weights)
    assert len(made.found) == 6 and not made.alive() and all(map(torch.equal, alone, together))
    assert Restored._filled is not None
