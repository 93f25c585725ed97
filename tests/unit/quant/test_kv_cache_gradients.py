"""Gradients through quantized keys and values, against finite differences and against fp64."""

import copy
import random

import pytest
import torch

from quant.kv_cache import QuantCache
from quant.reference import fake_quant, inside_range
from tests.unit.quant.kv_models import KV_HEADS, SIZE, SPEC, QuantizingCache, attach, build, record_inputs, tokens
from tests.unit.quant.oracle import Surrogate


class Smooth:
    """The fp64 surrogate of one tensor, rounding errors and clipping held as they are at ``x``; smooth in both."""

    def __init__(self, cache, x):
        scale = cache.input_scale()
        self.surrogate, self.inside = Surrogate(x, scale, SPEC), inside_range(x, scale, SPEC)
        self.bound = x.sign().double() * SPEC.qmax
        self.s0, self.rounding = cache.input_s0.double(), scale.double() - cache.input_s0.double() * _exp(cache)

    def __call__(self, x, theta):
        at, s = self.surrogate, self.s0 * theta.exp() + self.rounding
        error = torch.where(at.follows_x, at.error * at.scale / s, at.error)
        inside = torch.where(at.beyond, s * self.bound + x - at.x, x + s * error)
        return torch.where(self.inside, inside, s * self.bound)


def _exp(cache):
    return cache.input_theta.detach().double().exp()


@pytest.mark.parametrize("learn", [True, False])
def test_gradients_of_a_quantizer_against_finite_differences(learn, seed):
    """In the layout that attention has them in. LSQ's factor counts the features of a token, whatever their number of
    tokens: the gradient of a batch is the sum of those of its parts."""
    for _ in range(5):
        batch, heads, length, size = (random.randint(1, 5) for _ in range(4))
        cache = QuantCache(SPEC, dtype=torch.float32, device=torch.device("cpu"), learn=True)
        x = (torch.randn(batch, length, heads, size) * torch.randn(heads, 1).mul(2).exp()).transpose(1, 2)
        x = x.requires_grad_()
        with torch.no_grad():
            cache.input_s0.copy_(x.abs().max() / 448 * random.uniform(0.2, 1.2))
            cache.input_theta.normal_(std=0.3)
        cache.input_theta.requires_grad_(learn)
        grad = torch.randn(batch, heads, length, size)
        (cache(x) * grad).sum().backward()
        smooth, theta = Smooth(cache, x.detach()), cache.input_theta.detach().double()
        assert torch.equal(x.grad, grad * smooth.inside)
        up, down = (smooth(x.detach().double(), theta + step) for step in (1e-6, -1e-6))
        if learn:
            terms = grad * (up - down) / 2e-6
            size = terms.abs().sum().item() + smooth.s0.item()
            expected = terms.sum().item() / (heads * x.shape[-1] * 448) ** 0.5
            # fp32 terms and an fp32 sum: 5e-9 of the terms' sizes at most in 750 cases.
            assert cache.input_theta.grad.item() == pytest.approx(expected, rel=0, abs=2e-7 * size)
        else:
            assert cache.input_theta.grad is None


@pytest.mark.parametrize(("family", "attention"), [("qwen3", "sdpa"), ("qwen3_moe", "eager"), ("llama", "eager")])
def test_gradients_of_a_model_against_fp64(family, attention, seed):
    """Of every weight and every theta, those of the model in fp64 with the surrogates. With grouped queries a key's
    gradient is the sum over the queries that read it."""
    model, ids = build(family, attention), tokens()
    precise = copy.deepcopy(model).double()
    caches = attach(model)
    seen, weights = record_inputs(caches), torch.randn(*ids.shape, 64)
    (model(ids, use_cache=False).logits * weights).sum().backward()
    thetas = {name: cache.input_theta.detach().double().requires_grad_() for name, cache in caches.items()}
    smooth = {name: Smooth(cache, seen[name]) for name, cache in caches.items()}
    functions = [lambda x, name=name: smooth[name](x, thetas[name]) for name in caches]
    pairs = list(zip(functions[::2], functions[1::2], strict=True))
    logits = precise(ids, past_key_values=QuantizingCache(precise.config, pairs)).logits
    (logits * weights.double()).sum().backward()
    factor = 1 / (KV_HEADS * SIZE * SPEC.qmax) ** 0.5
    expected = {name: parameter.grad for name, parameter in precise.named_parameters()}
    expected |= {f"{name}.input_theta": theta.grad * factor for name, theta in thetas.items()}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained.keys() == expected.keys()
    largest = max(theta.grad.abs().item() for theta in thetas.values()) * factor
    for name, parameter in trained.items():
        # fp32 against fp64: at most 3e-6 in 150 runs. A theta's gradient may cancel: measured by the largest of them.
        size = largest if name.endswith("theta") else expected[name].norm()
        assert (parameter.grad - expected[name]).norm() / size < 1e-4, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_quantizer_is_the_reference_and_keeps_no_second_copy(dtype, seed):
    """Bit for bit, in any stride. With a fixed scale a bit of each element is kept for backward, with a learned one the
    element itself, and nothing where nothing trains."""
    x = torch.randn(2, 7, 3, 16).to(dtype).transpose(1, 2)
    cache = QuantCache(SPEC, dtype=dtype, device=torch.device("cpu"), learn=True)
    with torch.no_grad():
        cache.input_s0.fill_(0.7 * x.abs().max() / 448)
    for learns, trains, kept in ((False, True, [x.numel() // 8]), (True, True, [x.nbytes, 4, x.element_size()])):
        cache.input_theta.requires_grad_(learns)
        saved: list[int] = []
        given = x.detach().requires_grad_(trains)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes), lambda _: None):  # noqa: B023
            values = cache(given)
        assert torch.equal(values, fake_quant(x, cache.input_scale(), SPEC)) and values.dtype == dtype
        assert saved == kept
    with torch.no_grad():
        assert torch.equal(cache(x), values)


def test_activation_checkpointing_and_compilation_change_nothing(seed):
    model, ids = build("qwen3", "sdpa"), tokens()
    attach(model)

    def gradients():
        model.zero_grad()
        model(ids, use_cache=False).logits.square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    expected = gradients()
    assert all(value.any() for value in expected.values())
    model.train().activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    assert all(torch.equal(value, expected[name]) for name, value in gradients().items())
    model.eval().activation_checkpointing_disable()
    torch._dynamo.reset()
    model.model.layers[0].compile(fullgraph=True, backend="aot_eager")
    for name, value in gradients().items():
        # The same operators on the same numbers, but for decompositions whose last bits may move a code.
        assert "theta" in name or (value - expected[name]).norm() < 0.02 * expected[name].norm(), name
