"""Inputs that are quantized once for the layers that read them."""

import copy
import weakref

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.spec import get_scheme
from tests.lib.saved import kept_for_backward, storages
from tests.unit.quant.attention import (
    DTYPES,
    WIDTH,
    Attention,
    Count,
    assert_equal,
    attention,
    entry,
    results,
    unshared,
)

pytestmark = pytest.mark.usefixtures("prepared")


def random_pair(*tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """An input, and a gradient of the output."""
    return torch.randn(*tokens, WIDTH).to(dtype), torch.randn(*tokens, WIDTH).to(dtype)


def quantized(function, x: Tensor) -> int:
    """How often a call quantizes a tensor of the shape of its argument."""
    with Count() as count:
        function(x)
    return count.quantized(tuple(x.shape))


def kept(model: nn.Module, x: Tensor) -> list[tuple[torch.dtype, int]]:
    """Dtypes and bytes of what q, k and v keep of their input for backward."""
    with kept_for_backward(model.parameters()) as found:
        outputs = [layer(x) for layer in (model.q_proj, model.k_proj, model.v_proj)]
    assert len(outputs) == 3
    return sorted(((found[at].dtype, size) for at, size in storages(found).items()), key=str)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp8_gemm", (False, True))
@pytest.mark.parametrize("learn_input", (False, True))
def test_quantized_once_and_the_same(learn_input, fp8_gemm, dtype, seed):
    """One call for three layers in the forward, nothing held after it, every bit as without sharing. Kept for backward
    are codes and mask of a fixed scale, the input itself of a learned one: once for three layers."""
    model, q = attention(learn_input=learn_input, fp8_gemm=fp8_gemm, dtype=dtype, bias=True)
    x, grad = random_pair(5, 3, dtype=dtype)
    leaf, n = x.clone().requires_grad_(), x.numel()
    assert quantized(model, x) == 1 and entry(model) is None
    shared = results(model, x, grad)
    assert entry(model) is None
    with torch.no_grad():
        assert quantized(model, x) == 1 and torch.equal(model(x), shared["output"]) and entry(model) is None
    own, codes = [(dtype, n * dtype.itemsize)], [(torch.float8_e4m3fn, n), (torch.uint8, n // 8)]
    assert kept(model, leaf) == (own if learn_input else codes)
    unshared(q)
    assert kept(model, leaf) == (own if learn_input else sorted(3 * codes, key=str))
    assert quantized(model, x) == 3
    assert_equal(shared, results(model, x, grad))
    assert {"q_proj.weight", "q_proj.weight_theta", "q_proj.bias"} <= shared.keys()
    assert ("q_proj.input_theta" in shared) == learn_input
    assert (shared["x"] == 0).sum() < shared["x"].numel() / 2 and shared["x"].any()


@pytest.mark.parametrize("scheme", ("int8_dynamic", "fp8_dynamic", "8da4w"))
def test_dynamic_inputs_are_quantized_once_and_kept_once(scheme, seed):
    """The values of one pass over the input are handed on; backward keeps the input itself, once for three layers."""
    model, q = attention(scheme)
    x, grad = random_pair(5, 3)
    with Count() as count:
        shared = results(model, x, grad)
    assert count.quantized((5, 3, WIDTH)) == 2 and entry(model) is None, "forward and backward"
    leaf = x.clone().requires_grad_()
    assert kept(model, leaf) == [(torch.bfloat16, leaf.nbytes)]
    model.q_proj.weight.requires_grad_(False)
    model.q_proj.weight_theta.requires_grad_(False)
    assert quantized(model, leaf) == 1, "a frozen layer takes the same values"
    model.q_proj.weight.requires_grad_(True)
    model.q_proj.weight_theta.requires_grad_(True)
    unshared(q)
    assert quantized(model, x) == 3
    assert_equal(results(model, x, grad), shared)
    assert shared["output"].any() and shared["q_proj.weight_theta"].any()


def test_layers_of_different_parents_share_nothing(seed):
    """Two blocks have an input each; a group of one shares with none."""
    model = nn.Sequential(Attention(), Attention()).bfloat16()
    q = quant.prepare(model, get_scheme("fp8_static"), learn_weight_scale=False, learn_input_scale=False)
    assert model[0].q_proj.shared_input is model[0].v_proj.shared_input
    assert model[0].q_proj.shared_input is not model[1].q_proj.shared_input
    assert model[0].q_proj.shared_input.consumers == 3
    assert all(q.layers[f"{i}.o_proj"].shared_input is None for i in range(2))


def test_nothing_is_held_after_the_forward(seed):
    """Neither the input nor its quantized form outlives what autograd keeps."""
    model, _ = attention()
    x = torch.randn(4, WIDTH).bfloat16()
    with torch.no_grad():
        model.q_proj(x)
        held = entry(model)
        assert held is not None and held.x.data_ptr() == x.data_ptr()
        references = [weakref.ref(held), weakref.ref(held.x), weakref.ref(held.value.values)]
        del held
        model.k_proj(x)
        assert all(reference() is not None for reference in references)
        model.v_proj(x)
    assert entry(model) is None
    assert all(reference() is None for reference in references)


def test_another_tensor_is_quantized_for_itself(seed):
    """Equal values at another address, another view, the same tensor after a write: never the old codes."""
    model, _ = attention()
    twin = copy.deepcopy(model)
    x, square = torch.randn(4, WIDTH).bfloat16(), torch.randn(WIDTH, WIDTH).bfloat16()
    views = (x.clone(), x[:2], 2 * x, x.t().contiguous().t(), x.view(2, 2, WIDTH))
    with torch.no_grad():
        for first, second in (*((x, view) for view in views), (square, square.t())):
            model.q_proj(first)
            with Count() as count:
                output = model.k_proj(second)
            assert count.quantized(tuple(second.shape)) == 1
            assert torch.equal(output, twin.k_proj(second.clone()))
            model.q_proj.shared_input.drop()
        model.q_proj(x)
        before = twin.k_proj(x.clone())
        x.mul_(-2)
        after = model.k_proj(x)
        assert torch.equal(after, twin.k_proj(x.clone())) and not torch.equal(after, before)
        with Count() as count:  # an alias, as ZeRO-3 hands out, is the same tensor
            alias = model.v_proj(x.view_as(x))
        assert count.quantized((4, WIDTH)) == 0 and torch.equal(alias, twin.v_proj(x.clone()))


def test_another_kind_is_quantized_for_itself(seed):
    """A forward without gradients leaves no mask for backward."""
    model, q = attention()
    x, grad = random_pair(4)
    expected = results(model, x, grad)
    leaf = x.clone().requires_grad_()
    with torch.no_grad():
        model.q_proj(leaf)
    assert entry(model) is not None
    model.zero_grad()
    output = model(leaf)
    output.backward(grad)
    assert torch.equal(output, expected["output"]) and torch.equal(leaf.grad, expected["x"])
    # A layer whose weight is frozen wants no codes, one that multiplies codes no values.
    model.k_proj.weight.requires_grad_(False)
    model.k_proj.weight_theta.requires_grad_(False)
    model.v_proj.fp8_gemm = True
    mixed = results(model, x, grad)
    unshared(q)
    assert_equal(mixed, results(model, x, grad))
    assert "k_proj.weight" not in mixed and "v_proj.weight" in mixed


def test_an_exception_in_between(seed):
    """Between k and v something fails; the next forward, of the same tensor or another, is as if nothing had been."""
    model, _ = attention()
    x, grad = random_pair(4)
    expected = results(model, x, grad)
    leaf = x.clone().requires_grad_()

    def fails(*_) -> None:
        raise KeyError("out of luck")

    for failing in (torch.randn(7, WIDTH).bfloat16(), leaf):
        hook = model.v_proj.register_forward_pre_hook(fails)
        with pytest.raises(KeyError):
            model(failing)
        assert entry(model).taken == 2
        hook.remove()
        for _ in range(3):  # the count of the failed forward is out of step with the next ones; their results are not
            model.zero_grad()
            leaf.grad = None
            model(leaf).backward(grad)
            assert torch.equal(leaf.grad, expected["x"])
        assert_equal(results(model, x, grad), expected)


def test_a_scale_that_changes_after_an_interrupted_forward(seed):
    """The same tensor again, under another scale: weights_changed drops what was left of the first."""
    model, q = attention()
    x = torch.randn(4, WIDTH).bfloat16()
    model.q_proj(x)
    assert entry(model) is not None
    with torch.no_grad():
        q.input_groups[0].s0.mul_(2)
    quant.weights_changed(model)
    assert entry(model) is None
    output = model(x)
    unshared(q)
    assert torch.equal(output, model(x))


@pytest.mark.parametrize("fp8_gemm", (False, True))
def test_inference_mode(fp8_gemm, seed):
    """Tensors made there have no version to compare; training goes on after it."""
    model, _ = attention(fp8_gemm=fp8_gemm)
    x, grad = random_pair(4)
    expected = results(model, x, grad)
    with torch.inference_mode():
        inside = x.clone()
        assert inside.is_inference() and torch.equal(model(inside), expected["output"])
        model.q_proj(inside.mul_(2))
        assert entry(model) is None and torch.equal(model(inside.mul_(0.5)), expected["output"])
    assert_equal(results(model, x, grad), expected)
