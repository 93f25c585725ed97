"""Inputs that are quantized once for the layers that read them."""

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quant
from quant.spec import get_scheme
from tests.unit.quant.attention import (
    DTYPES,
    WIDTH,
    Attention,
    Count,
    assert_equal,
    attention,
    bytes_saved,
    entry,
    results,
    unshared,
)

pytestmark = pytest.mark.usefixtures("prepared")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp8_gemm", (False, True))
@pytest.mark.parametrize("learn_input", (False, True))
def test_quantized_once_and_the_same(learn_input, fp8_gemm, dtype, seed):
    """One call for three layers in the forward, nothing held after it, every bit as without sharing."""
    model, q = attention(learn_input=learn_input, fp8_gemm=fp8_gemm, dtype=dtype, bias=True)
    x, grad = torch.randn(5, 3, WIDTH).to(dtype), torch.randn(5, 3, WIDTH).to(dtype)
    with Count() as count:
        model(x)
    assert count.quantized((5, 3, WIDTH)) == 1 and entry(model) is None
    shared = results(model, x, grad)
    assert entry(model) is None
    with torch.no_grad(), Count() as count:
        assert torch.equal(model(x), shared["output"])
    assert count.quantized((5, 3, WIDTH)) == 1 and entry(model) is None
    unshared(q)
    with Count() as count:
        model(x)
    assert count.quantized((5, 3, WIDTH)) == 3
    alone = results(model, x, grad)
    assert_equal(shared, alone)
    assert {"q_proj.weight", "q_proj.weight_theta", "q_proj.bias"} <= shared.keys()
    assert ("q_proj.input_theta" in shared) == learn_input
    assert (shared["x"] == 0).sum() < shared["x"].numel() / 2 and shared["x"].any()


@pytest.mark.parametrize("scheme", ("int8_dynamic", "fp8_dynamic", "8da4w"))
def test_dynamic_inputs_are_quantized_once_and_kept_once(scheme, seed):
    """The values of one pass over the input are handed on; backward keeps the input itself, once for three layers."""
    model, q = attention(scheme)
    x, grad = torch.randn(5, 3, WIDTH).bfloat16(), torch.randn(5, 3, WIDTH).bfloat16()
    with Count() as count:
        shared = results(model, x, grad)
    forward, backward = 1, 1
    assert count.quantized((5, 3, WIDTH)) == forward + backward and entry(model) is None
    leaf = x.clone().requires_grad_()
    with bytes_saved(model) as found:
        outputs = [layer(leaf) for layer in (model.q_proj, model.k_proj, model.v_proj)]
    assert list(found) == [leaf.data_ptr()] and len(outputs) == 3
    model.q_proj.weight.requires_grad_(False)
    model.q_proj.weight_theta.requires_grad_(False)
    with Count() as count:
        model(leaf)
    assert count.quantized((5, 3, WIDTH)) == 1, "a frozen layer takes the same values"
    model.q_proj.weight.requires_grad_(True)
    model.q_proj.weight_theta.requires_grad_(True)
    unshared(q)
    with Count() as count:
        model(x)
    assert count.quantized((5, 3, WIDTH)) == 3
    assert_equal(results(model, x, grad), shared)
    assert shared["output"].any() and shared["q_proj.weight_theta"].any()


def test_layers_of_different_parents_share_nothing(seed):
    """Two blocks have an input each; a group of one has nobody to share with."""
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


def test_another_tensor_is_quantized_anew(seed):
    """Equal values at another address, another view, the same tensor after a write: never the old codes."""
    model, q = attention()
    x = torch.randn(4, WIDTH).bfloat16()
    alone = {name: q.layers[name] for name in ("q_proj", "k_proj", "v_proj")}

    def expected(name: str, tensor: Tensor) -> Tensor:
        layer = alone[name]
        shared, layer.shared_input = layer.shared_input, None
        output = layer(tensor)
        layer.shared_input = shared
        return output

    with torch.no_grad():
        for second in (x.clone(), x[:2], 2 * x, x.t().contiguous().t(), x.view(2, 2, WIDTH)):
            model.q_proj(x)
            with Count() as count:
                output = model.k_proj(second)
            assert count.quantized(tuple(second.shape)) == 1
            assert torch.equal(output, expected("k_proj", second))
            model.q_proj.shared_input._entry = None
        square = torch.randn(WIDTH, WIDTH).bfloat16()
        model.q_proj(square)
        assert torch.equal(model.k_proj(square.t()), expected("k_proj", square.t().clone()))
        model.q_proj.shared_input._entry = None
        model.q_proj(x)
        before = expected("k_proj", x)
        x.mul_(-2)
        after = model.k_proj(x)
        assert torch.equal(after, expected("k_proj", x)) and not torch.equal(after, before)
        with Count() as count:  # an alias, as ZeRO-3 hands out, is the same tensor
            assert torch.equal(model.v_proj(x.view_as(x)), expected("v_proj", x.clone()))
        assert count.quantized((4, WIDTH)) == 1, "only that of `expected`"


def test_another_kind_is_quantized_anew(seed):
    """What a forward without gradients left has no mask for backward."""
    model, q = attention()
    x, grad = torch.randn(4, WIDTH).bfloat16(), torch.randn(4, WIDTH).bfloat16()
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
    x, grad = torch.randn(4, WIDTH).bfloat16(), torch.randn(4, WIDTH).bfloat16()
    expected = results(model, x, grad)
    leaf = x.clone().requires_grad_()

    def fails(*_) -> None:
        raise KeyError("out of luck")

    hook = model.v_proj.register_forward_pre_hook(fails)
    for failing in (leaf, torch.randn(7, WIDTH).bfloat16()):
        with pytest.raises(KeyError):
            model(failing)
        assert entry(model).taken == 2
    hook.remove()
    assert_equal(results(model, x, grad), expected)
    assert entry(model) is None
    hook = model.v_proj.register_forward_pre_hook(fails)
    with pytest.raises(KeyError):
        model(leaf)
    hook.remove()
    for _ in range(3):  # the count of the failed forward is out of step with the next ones; their results are not
        model.zero_grad()
        leaf.grad = None
        model(leaf).backward(grad)
        assert torch.equal(leaf.grad, expected["x"])


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
    x, grad = torch.randn(4, WIDTH).bfloat16(), torch.randn(4, WIDTH).bfloat16()
    expected = results(model, x, grad)
    with torch.inference_mode():
        assert torch.equal(model(x), expected["output"])
        inside = x.clone()
        assert inside.is_inference() and torch.equal(model(inside), expected["output"])
        inside.mul_(2)
        model.q_proj(inside)
        assert entry(model) is None
        inside.mul_(0.5)
        assert torch.equal(model(inside), expected["output"])
    assert_equal(results(model, x, grad), expected)


@pytest.mark.parametrize("fp8_gemm", (False, True))
@pytest.mark.parametrize("learn_input", (False, True))
@pytest.mark.parametrize("reentrant", (False, True))
def test_activation_checkpointing(reentrant, learn_input, fp8_gemm, seed):
    """The recomputed forward quantizes again, once; gradients are the same bit for bit."""
    model, _ = attention(learn_input=learn_input, fp8_gemm=fp8_gemm)
    x, grad = torch.randn(4, WIDTH).bfloat16(), torch.randn(4, WIDTH).bfloat16()
    expected = results(model, x, grad)
    leaf = x.clone().requires_grad_()
    model.zero_grad()
    with Count() as count:
        output = checkpoint(model, leaf, use_reentrant=reentrant)
        assert count.quantized((4, WIDTH)) == 1
    assert entry(model) is None
    with Count() as count:
        output.backward(grad)
    # Backward of a learned input scale needs the values of the input again, once for all layers.
    assert count.quantized((4, WIDTH)) == 1 + learn_input
    assert entry(model) is None
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_equal({"output": output.detach(), "x": leaf.grad, **found}, expected)


@pytest.mark.parametrize("fp8_gemm", (False, True))
@pytest.mark.parametrize("learn_input", (False, True))
def test_one_copy_is_kept_for_backward(learn_input, fp8_gemm, seed):
    """Codes and mask of a fixed scale, the input itself of a learned one: once for three layers, in both modes."""
    model, q = attention(learn_input=learn_input, fp8_gemm=fp8_gemm)
    x = torch.randn(8, WIDTH).bfloat16().requires_grad_()
    n = x.numel()

    def kept() -> list[tuple[torch.dtype, int]]:
        with bytes_saved(model) as found:
            outputs = [layer(x) for layer in (model.q_proj, model.k_proj, model.v_proj)]
        assert len(outputs) == 3
        return sorted(found.values(), key=str)

    if learn_input:
        assert kept() == [(torch.bfloat16, 2 * n)]
    else:
        assert kept() == [(torch.float8_e4m3fn, n), (torch.uint8, n // 8)]
    unshared(q)
    if not learn_input:
        assert kept() == 3 * [(torch.float8_e4m3fn, n)] + 3 * [(torch.uint8, n // 8)]
