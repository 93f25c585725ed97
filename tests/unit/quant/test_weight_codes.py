"""Weight codes that are kept until the weights change."""

import pytest
import torch

import quant
from tests.unit.quant.attention import WIDTH, Count, assert_equal, attention, results

pytestmark = pytest.mark.usefixtures("prepared")


def keep(q: quant.Quantization, kept: bool = True) -> None:
    for layer in q.layers.values():
        layer.keeps_weight_codes = kept


@pytest.mark.parametrize("scheme", ["fp8_static", "fp8_gemm", "w4a16_g32", "int8_dynamic", "nvfp4", "mxfp4"])
def test_kept_weight_codes(scheme, seed):
    """The same bits, quantized once over forwards and backwards, until the weights change, or theta alone."""
    gemm = scheme == "fp8_gemm"
    model, q = attention("fp8_static" if gemm else scheme, fp8_gemm=gemm, bias=True)
    x, grad = torch.randn(6, WIDTH).bfloat16(), torch.randn(6, WIDTH).bfloat16()
    sizes = {tuple(layer.weight.shape) for layer in q.layers.values()}
    with Count() as count:
        expected = results(model, x, grad)
    assert sum(map(count.quantized, sizes)) == 2 * len(q.layers), "once in forward, once in backward"
    keep(q)
    with Count() as count:
        for _ in range(3):
            assert_equal(results(model, x, grad), expected)
    assert sum(map(count.quantized, sizes)) == len(q.layers)

    for name, change in (("weight", lambda one: one.mul_(-1)), ("weight_theta", lambda one: one.add_(0.8))):
        with torch.no_grad():
            change(getattr(model.q_proj, name))
        stale = results(model, x, grad)
        if name == "weight":
            assert torch.equal(stale["output"], expected["output"]), "nothing said that it changed: the old codes"
        quant.weights_changed(model)
        changed = results(model, x, grad)
        assert not torch.equal(changed["output"], expected["output"])
        keep(q, False)
        assert_equal(results(model, x, grad), changed)
        keep(q)
        expected = results(model, x, grad)


def test_weight_codes_made_in_inference_mode(seed):
    """An evaluation before the first step must not leave codes that training cannot save."""
    model, q = attention()
    x, grad = torch.randn(6, WIDTH).bfloat16(), torch.randn(6, WIDTH).bfloat16()
    expected = results(model, x, grad)
    keep(q)
    with torch.inference_mode():
        model(x)
    assert_equal(results(model, x, grad), expected)
