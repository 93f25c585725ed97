"""A quantized embedding table: rows as a Linear's weight would be, and gradients as its."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quant import Rule, get_scheme, prepare
from quant.linear import QuantEmbedding
from quant.reference import absmax_scale, effective_scale, fake_quant, fake_quant_backward
from quant.scale import Scale
from quant.spec import Scheme, TensorSpec

ROWS, FEATURES = 20, 96


def embedding(scheme: Scheme, dtype: torch.dtype, *, learn: bool = True, padding: int | None = None) -> QuantEmbedding:
    """With scales that clip some, and thetas that are not 0."""
    plain = nn.Embedding(ROWS, FEATURES, padding_idx=padding).to(dtype)
    shape = scheme.weights.scale_shape((ROWS, FEATURES))
    s0 = absmax_scale(plain.weight.detach().float().reshape(*shape, -1).abs().amax(-1), scheme.weights) * 0.8
    theta = nn.Parameter((torch.randn(shape) / 10).to(dtype)) if learn else None
    return QuantEmbedding(plain, scheme, weight=Scale(nn.Parameter(s0, requires_grad=False), theta))


@pytest.mark.parametrize("name", ["w8a16_channel", "w4a16_g32", "w2a16_g32"])
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_values_and_gradients_are_those_of_the_quantized_table(name, dtype, seed):
    """The whole table quantized and then looked up is the definition; a row that is read twice gets both gradients."""
    layer = embedding(get_scheme(name), dtype, padding=random.choice((None, 3)))
    spec = layer.scheme.weights
    ids = torch.randint(ROWS, random.choice(((7,), (3, 5), (0,))))
    scale = effective_scale(layer.weight_s0, layer.weight_theta.detach(), spec, dtype)
    table = fake_quant(layer.weight.detach(), scale, spec)
    out = layer(ids)
    assert out.dtype == dtype and torch.equal(out, F.embedding(ids, table))
    assert torch.equal(layer.weight_scale(), scale)

    grad = torch.randn(out.shape, dtype=torch.float64).to(dtype)
    out.backward(grad)
    of_rows = torch.zeros(ROWS, FEATURES, dtype=torch.float64).index_add_(
        0, ids.flatten(), grad.double().flatten(0, -2)
    )
    inside, _ = fake_quant_backward(torch.ones_like(table), layer.weight.detach(), scale, spec, scale_gradient=False)
    expected = of_rows * inside.double()
    padded = torch.arange(ROWS) == (-1 if layer.padding_idx is None else layer.padding_idx)
    expected[padded] = 0
    # A row is read a few times: a few roundings of the sum in dtype.
    bound = {torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
    torch.testing.assert_close(layer.weight.grad.double(), expected, rtol=bound, atol=bound)
    _, of_scale = fake_quant_backward(of_rows, layer.weight.detach().double(), scale, spec, scale_gradient=True)
    unrounded = layer.weight_s0.double() * layer.weight_theta.detach().double().exp()
    numel = FEATURES if spec.group_size is None else spec.group_size
    of_theta = of_scale.double() * unrounded / math.sqrt(numel * spec.qmax)
    torch.testing.assert_close(layer.weight_theta.grad.double(), of_theta, rtol=bound, atol=bound)

    # Off it is the table, and theta gets zeros: without a gradient it would be stepped with its last one under ZeRO-3.
    layer.weight_fake_quant = False
    layer.zero_grad()
    out = layer(ids)
    assert torch.equal(out, F.embedding(ids, layer.weight))
    out.sum().backward()
    assert torch.equal(layer.weight_theta.grad, torch.zeros_like(layer.weight_theta))
    with torch.no_grad():
        assert torch.equal(layer(ids), out)


def test_it_is_prepared_by_name_only():
    """A rule is for Linears; what an embedding cannot have is refused by its name."""

    def prepared(scheme, table: nn.Embedding | None = None, **options):
        model = nn.Sequential(table or nn.Embedding(ROWS, FEATURES), nn.Linear(FEATURES, 4))
        return model, prepare(model, scheme, learn_weight_scale=True, learn_input_scale=False, **options)

    int4 = get_scheme("w4a16_g32")
    assert list(prepared(None, rules=[Rule(int4, layers=".*")])[1].layers) == ["1"]
    table = nn.Embedding(ROWS, FEATURES)
    model, quantization = prepared(get_scheme("fp8_static"), table, named={"0": get_scheme("w8a16_channel")})
    assert list(quantization.layers) == [group.owner for group in quantization.weight_groups] == ["0", "1"]
    assert model[0] is quantization.layers["0"] and model[0].weight is table.weight
    assert quantization.weight_groups[0].s0 is model[0].weight_s0
    per_tensor = Scheme("t", TensorSpec("int", 8, "tensor"))
    for scheme in (get_scheme("fp8_static"), get_scheme("nvfp4"), get_scheme("w8a16_asym"), per_tensor):
        with pytest.raises(ValueError, match=r"0: scheme .* embeddings can have symmetric integer weights"):
            prepared(None, named={"0": scheme})
    with pytest.raises(ValueError, match="does more than look up"):
        prepared(None, nn.Embedding(4, 32, max_norm=1.0), named={"0": int4})
