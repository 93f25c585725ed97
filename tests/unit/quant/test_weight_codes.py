"""Weight codes that are kept until the weights change."""

import pytest
import torch

import quant
from quant.spec import get_scheme
from tests.unit.quant.attention import WIDTH, Attention, Count, assert_equal, attention, fill_scales, results

pytestmark = pytest.mark.usefixtures("prepared")


@pytest.mark.parametrize(
    ("scheme", "fp8_gemm"),
    [
        ("fp8_static", False),
        ("fp8_static", True),
        ("w4a16_g32", False),
        ("int8_dynamic", False),
        ("nvfp4", False),
        ("mxfp4", False),
    ],
)
def test_kept_weight_codes(scheme, fp8_gemm, seed):
    """The same bits, quantized once over forwards and backwards, until the weights change."""
    model = Attention(bias=True).bfloat16()
    q = quant.prepare(model, get_scheme(scheme), learn_weight_scale=True, learn_input_scale=False, fp8_gemm=fp8_gemm)
    fill_scales(q)
    x, grad = torch.randn(6, WIDTH).bfloat16(), torch.randn(6, WIDTH).bfloat16()
    with Count() as count:
        expected = results(model, x, grad)
    sizes = {tuple(layer.weight.shape) for layer in q.layers.values()}
    often = sum(count.quantized(size) for size in sizes)
    assert often == 2 * len(q.layers), "once in forward, once in backward"
    for layer in q.layers.values():
        layer.keeps_weight_codes = True
    with Count() as count:
        for _ in range(3):
            assert_equal(results(model, x, grad), expected)
    assert sum(count.quantized(size) for size in sizes) == len(q.layers)

    with torch.no_grad():
        for layer in q.layers.values():
            layer.weight.mul_(-1)
    stale = results(model, x, grad)
    assert torch.equal(stale["output"], expected["output"]), "nothing said that they changed: the old codes"
    quant.weights_changed(model)
    changed = results(model, x, grad)
    assert not torch.equal(changed["output"], stale["output"])
    for layer in q.layers.values():
        layer.keeps_weight_codes = False
    assert_equal(results(model, x, grad), changed)


def test_weight_codes_are_of_the_scale_too(seed):
    """A step of theta alone changes the codes; weights_changed drops them."""
    model, q = attention()
    x, grad = torch.randn(6, WIDTH).bfloat16(), torch.randn(6, WIDTH).bfloat16()
    for layer in q.layers.values():
        layer.keeps_weight_codes = True
    before = results(model, x, grad)
    with torch.no_grad():
        model.q_proj.weight_theta.add_(0.4)
    quant.weights_changed(model)
    after = results(model, x, grad)
    for layer in q.layers.values():
        layer.keeps_weight_codes = False
    assert_equal(after, results(model, x, grad))
    assert not torch.equal(before["output"], after["output"])


def test_weight_codes_made_in_inference_mode(seed):
    """An evaluation before the first step must not leave codes that training cannot save."""
    model, q = attention()
    x, grad = torch.randn(6, WIDTH).bfloat16(), torch.randn(6, WIDTH).bfloat16()
    expected = results(model, x, grad)
    for layer in q.layers.values():
        layer.keeps_weight_codes = True
    with torch.inference_mode():
        model(x)
    assert_equal(results(model, x, grad), expected)
