"""Inputs quantised once for the layers that read them, weight codes that are kept, and the GEMM of codes."""

import weakref
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import quant
from quant.kernels import prepare_kernels
from quant.linear import QuantLinear
from quant.reference import absmax_scale, fake_quant, quantize
from quant.spec import TensorSpec, get_scheme

FP8 = TensorSpec("fp8_e4m3", 8, "tensor")
WIDTH, HEADS = 64, (64, 32, 32)
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """The remark on what cannot be compiled belongs to no test here."""
    prepare_kernels()


class Attention(nn.Module):
    """Three layers that read one tensor, and one that reads another."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        for name, size in zip(("q_proj", "k_proj", "v_proj"), HEADS, strict=True):
            setattr(self, name, nn.Linear(WIDTH, size, bias=bias))
        self.o_proj = nn.Linear(sum(HEADS), WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1))


def fill_scales(q: quant.Quantization, input_scale: float = 2.5 / 448) -> None:
    """Weight scales from the weights, input scales that clip some of a Gaussian, thetas that are not 0."""
    with torch.no_grad():
        for group in q.weight_groups:
            largest = max(q.layers[name].weight.abs().max().float() for name in group.members)
            group.s0.copy_(absmax_scale(largest, group.spec).expand_as(group.s0))
        for group in q.global_groups:
            group.s0.fill_(448 / q.layers[group.owner].weight_s0.max().item())
        for group in q.input_groups:
            group.s0.fill_(input_scale)
        for group in (*q.weight_groups, *q.input_groups):
            if group.theta is not None:
                group.theta.fill_(-0.125)


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

    def quantised(self, shape: tuple[int, ...]) -> int:
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
    """Output and gradients."""
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


# ---- one quantisation for q, k and v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp8_gemm", (False, True))
@pytest.mark.parametrize("learn_input", (False, True))
def test_quantised_once_and_the_same(learn_input, fp8_gemm, dtype, seed):
    """One call for three layers in the forward, nothing held after it, every bit as without sharing."""
    model, q = attention(learn_input=learn_input, fp8_gemm=fp8_gemm, dtype=dtype, bias=True)
    x, grad = torch.randn(5, 3, WIDTH).to(dtype), torch.randn(5, 3, WIDTH).to(dtype)
    with Count() as count:
        model(x)
    assert count.quantised((5, 3, WIDTH)) == 1 and entry(model) is None
    shared = results(model, x, grad)
    assert entry(model) is None
    with torch.no_grad(), Count() as count:
        assert torch.equal(model(x), shared["output"])
    assert count.quantised((5, 3, WIDTH)) == 1 and entry(model) is None
    unshared(q)
    with Count() as count:
        model(x)
    assert count.quantised((5, 3, WIDTH)) == 3
    alone = results(model, x, grad)
    assert_equal(shared, alone)
    assert {"q_proj.weight", "q_proj.weight_theta", "q_proj.bias"} <= shared.keys()
    assert ("q_proj.input_theta" in shared) == learn_input
    assert (shared["x"] == 0).sum() < shared["x"].numel() / 2 and shared["x"].any()


@pytest.mark.parametrize("scheme", ("int8_dynamic", "fp8_dynamic", "8da4w"))
def test_dynamic_inputs_are_quantised_once_and_kept_once(scheme, seed):
    """The values of one pass over the input are handed on; backward keeps the input itself, once for three layers."""
    model, q = attention(scheme)
    x, grad = torch.randn(5, 3, WIDTH).bfloat16(), torch.randn(5, 3, WIDTH).bfloat16()
    with Count() as count:
        shared = results(model, x, grad)
    forward, backward = 1, 1
    assert count.quantised((5, 3, WIDTH)) == forward + backward and entry(model) is None
    leaf = x.clone().requires_grad_()
    with bytes_saved(model) as found:
        outputs = [layer(leaf) for layer in (model.q_proj, model.k_proj, model.v_proj)]
    assert list(found) == [leaf.data_ptr()] and len(outputs) == 3
    model.q_proj.weight.requires_grad_(False)
    model.q_proj.weight_theta.requires_grad_(False)
    with Count() as count:
        model(leaf)
    assert count.quantised((5, 3, WIDTH)) == 1, "a frozen layer takes the same values"
    model.q_proj.weight.requires_grad_(True)
    model.q_proj.weight_theta.requires_grad_(True)
    unshared(q)
    with Count() as count:
        model(x)
    assert count.quantised((5, 3, WIDTH)) == 3
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
    """Neither the input nor its quantised form outlives what autograd keeps."""
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


def test_another_tensor_is_quantised_anew(seed):
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
            assert count.quantised(tuple(second.shape)) == 1
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
        assert count.quantised((4, WIDTH)) == 1, "only that of `expected`"


def test_another_kind_is_quantised_anew(seed):
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
    """The recomputed forward quantises again, once; gradients are the same bit for bit."""
    model, _ = attention(learn_input=learn_input, fp8_gemm=fp8_gemm)
    x, grad = torch.randn(4, WIDTH).bfloat16(), torch.randn(4, WIDTH).bfloat16()
    expected = results(model, x, grad)
    leaf = x.clone().requires_grad_()
    model.zero_grad()
    with Count() as count:
        output = checkpoint(model, leaf, use_reentrant=reentrant)
        assert count.quantised((4, WIDTH)) == 1
    assert entry(model) is None
    with Count() as count:
        output.backward(grad)
    # Backward of a learned input scale needs the values of the input again, once for all layers.
    assert count.quantised((4, WIDTH)) == 1 + learn_input
    assert entry(model) is None
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_equal({"output": output.detach(), "x": leaf.grad, **found}, expected)


@contextmanager
def bytes_saved(model: nn.Module):
    """``{address: (dtype, bytes)}`` of what autograd keeps, Parameters aside."""
    parameters = {p.data_ptr() for p in model.parameters()}
    found: dict[int, tuple[torch.dtype, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            found[tensor.data_ptr()] = (tensor.dtype, tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


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


# ---- weight codes that are kept


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
    """The same bits, quantised once over forwards and backwards, until the weights change."""
    model = Attention(bias=True).bfloat16()
    q = quant.prepare(model, get_scheme(scheme), learn_weight_scale=True, learn_input_scale=False, fp8_gemm=fp8_gemm)
    fill_scales(q)
    x, grad = torch.randn(6, WIDTH).bfloat16(), torch.randn(6, WIDTH).bfloat16()
    with Count() as count:
        expected = results(model, x, grad)
    sizes = {tuple(layer.weight.shape) for layer in q.layers.values()}
    often = sum(count.quantised(size) for size in sizes)
    assert often == 2 * len(q.layers), "once in forward, once in backward"
    for layer in q.layers.values():
        layer.keeps_weight_codes = True
    with Count() as count:
        for _ in range(3):
            assert_equal(results(model, x, grad), expected)
    assert sum(count.quantised(size) for size in sizes) == len(q.layers)

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


# ---- the GEMM of codes


def single(
    out: int, in_: int, *, dtype=torch.bfloat16, learn: bool = False, bias: bool = False, power_of_two: bool = False
) -> QuantLinear:
    model = nn.Sequential(nn.Linear(in_, out, bias=bias)).to(dtype)
    q = quant.prepare(model, get_scheme("fp8_static"), learn_weight_scale=learn, learn_input_scale=learn, fp8_gemm=True)
    fill_scales(q)
    layer = model[0]
    assert isinstance(layer, QuantLinear)
    if power_of_two:
        with torch.no_grad():
            for s0, theta in ((layer.weight_s0, layer.weight_theta), (layer.input_s0, layer.input_theta)):
                s0.copy_(torch.exp2(s0.log2().round()))
                if theta is not None:
                    theta.zero_()
    return layer


def exact_product(layer: QuantLinear, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output of the exact fake-quantised operands in fp64, and the sum of the magnitudes of its terms."""
    x64 = quantize(x, layer.input_scale(), FP8).double() * layer.input_scale().double()
    scale = layer.weight_scale()
    weight64 = quantize(layer.weight.detach(), scale, FP8).double() * scale.double()
    bias = layer.bias.detach().double() if layer.bias is not None else torch.zeros(layer.out_features).double()
    return x64 @ weight64.t() + bias, x64.abs() @ weight64.t().abs() + bias.abs()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("learn", (False, True))
def test_both_computations_against_fp64(learn, bias, dtype, seed):
    """Within what rounding allows, of an output y with terms of magnitudes S, in a dtype with unit roundoff u:

    * both add n + 1 terms in fp32, off by at most (n + 2) 2^-24 S, and round the result by u |y|;
    * fp8_gemm multiplies exact codes and then by both scales (and adds the bias): 4 more roundings of 2^-24 S;
    * simulate rounds each operand to the dtype first: (1 + u)^2 - 1, at most 2.01 u S. This is what fp8_gemm does not
      have: in bf16 it lies well below simulate's bound.
    """
    layer = single(48, 256, dtype=dtype, learn=learn, bias=bias)
    x = torch.randn(40, 256).to(dtype)
    exact, size = exact_product(layer, x)
    u, fp32 = torch.finfo(dtype).eps / 2, 2.0**-24
    gemm = 1.01 * ((256 + 2 + 4) * fp32 * size + u * exact.abs()) + u * fp32
    simulate = gemm + 1.02 * 2.01 * u * size
    off = {}
    for fp8_gemm, bound in ((True, gemm), (False, simulate)):
        layer.fp8_gemm = fp8_gemm
        output = layer(x)
        assert output.dtype == dtype
        off[fp8_gemm] = (output.double() - exact).abs()
        assert (off[fp8_gemm] <= bound).all(), f"fp8_gemm {fp8_gemm}: {(off[fp8_gemm] / bound).max()} times the bound"
    if dtype == torch.bfloat16:
        assert off[False].mean() > off[True].mean(), "rounded operands must show, or the bounds tell nothing"


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_computations_agree_with_powers_of_two(dtype, seed):
    """No operand is rounded then: only the order of additions, and one rounding of the result, may differ."""
    layer = single(48, 256, dtype=dtype, power_of_two=True)
    x = torch.randn(40, 256).to(dtype)
    exact, size = exact_product(layer, x)
    outputs = []
    for layer.fp8_gemm in (True, False):
        outputs.append(layer(x).double())
        assert torch.equal(fake_quant(x, layer.input_scale(), FP8).double(), exact_operand(x, layer.input_scale()))
    accumulation = 2 * 1.01 * 258 * 2.0**-24 * size
    rounding = torch.finfo(dtype).eps * exact.abs() * 1.01
    assert ((outputs[0] - outputs[1]).abs() <= accumulation + rounding).all()
    # In bf16 the rounded results are nearly all the same: the accumulation is 65,536 times finer.
    if dtype == torch.bfloat16:
        assert (outputs[0] == outputs[1]).double().mean() > 0.95


def exact_operand(x: Tensor, scale: Tensor) -> Tensor:
    return quantize(x, scale, FP8).double() * scale.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("learn", (False, True))
def test_gradients_are_the_same_in_both(learn, dtype, seed):
    """Backward is one computation: given the same gradient of the output, bit for bit; the same bytes are kept."""
    layer = single(48, 64, dtype=dtype, learn=learn, bias=True)
    x, grad = torch.randn(3, 7, 64).to(dtype), torch.randn(3, 7, 48).to(dtype)
    found, kept = [], []
    for layer.fp8_gemm in (True, False):
        values = results(layer, x, grad)
        del values["output"]
        found.append(values)
        with bytes_saved(layer) as saved:
            output = layer(x.clone().requires_grad_())
        kept.append(sorted(saved.values(), key=str))
        assert output.shape == (3, 7, 48)
    assert_equal(*found)
    assert {"x", "weight", "bias"} <= found[0].keys() and ("weight_theta" in found[0]) == learn
    assert kept[0] == kept[1] and len(kept[0]) == (1 if learn else 2)


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("tokens", ((0,), (0, 5), (2, 0)), ids=str)
def test_no_tokens(tokens, bias, seed):
    """An expert that no token chose: zero gradients, not None."""
    layer = single(48, 64, learn=True, bias=bias)
    x = torch.empty(*tokens, 64, dtype=torch.bfloat16, requires_grad=True)
    output = layer(x)
    assert output.shape == (*tokens, 48) and output.dtype == torch.bfloat16
    output.sum().backward()
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert parameter.grad is None or not parameter.grad.any(), name


def test_layers_that_the_gemm_cannot_take_simulate(seed):
    """Sides that 16 does not divide: listed, and computed as without fp8_gemm."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fits = nn.Linear(64, 48)
            self.narrow = nn.Linear(48, 40)
            self.other = nn.Linear(40, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.narrow(self.fits(x)))

    models = {}
    for fp8_gemm in (True, False):
        torch.manual_seed(seed)
        model = Odd().bfloat16()
        q = quant.prepare(
            model,
            get_scheme("fp8_static"),
            learn_weight_scale=False,
            learn_input_scale=False,
            fp8_gemm=fp8_gemm,
        )
        fill_scales(q)
        models[fp8_gemm] = model
        assert q.simulated == (["narrow", "other"] if fp8_gemm else [])
        assert [layer.fp8_gemm for layer in q.layers.values()] == [fp8_gemm, False, False]
    x = torch.randn(5, 64).bfloat16()
    assert models[True](x).shape == (5, 64)
    hidden = torch.randn(5, 48).bfloat16()
    assert torch.equal(models[True].narrow(hidden), models[False].narrow(hidden))
    assert torch.equal(models[True].other(hidden[:, :40]), models[False].other(hidden[:, :40]))


def test_the_gemm_only_while_both_operands_are_quantised(seed):
    """With either switch off the layer is what it is without fp8_gemm."""
    layer = single(48, 64)
    x = torch.randn(5, 64).bfloat16()
    for weights, inputs in ((True, False), (False, True), (False, False)):
        layer.weight_fake_quant, layer.input_fake_quant = weights, inputs
        layer.fp8_gemm = True
        output = layer(x)
        layer.fp8_gemm = False
        assert torch.equal(output, layer(x))
