"""Inputs that are quantized once for the layers that read them, and those that fused attention keeps anyway."""

import copy
import re
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchgen
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3ForCausalLM

import quant
from benchmarks.timing import kept_bytes
from quant.gemm import rotate
from quant.inputs import ATTENTION, Restored, kept_by_attention
from quant.spec import get_scheme
from tests.lib.saved import kept_for_backward, kinds
from tests.lib.scales import fill_scales
from tests.lib.tiny import tiny_config
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
    return kinds(found)


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
    q = quant.replace_layers(model, get_scheme("fp8_static"), learn_weight_scale=False, learn_input_scale=False)
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


def test_an_input_that_autocast_casts_is_not_held(seed):
    """Each layer casts it again, so nothing is shared."""
    model, _ = attention()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model.q_proj(torch.randn(4, WIDTH))
    assert entry(model) is None


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


# ---- inputs that fused attention keeps anyway

BATCH, TOKENS, LAYERS = 2, 5, 2
# Bytes per element of an input that are kept: codes, a byte of scale per group (four per token), of NVFP4 a mask.
KEPT = {
    "nvfp4_w4a4": 1 / 2 + 1 / 16 + 1 / 8,
    "mxfp4_w4a4": 1 / 2 + 1 / 32,
    "mxfp8": 1 + 1 / 32,
    "mxfp4_mxfp8": 1 + 1 / 32,
    "fp8_dynamic": 1 + 4 / 64,
}


def attention_output() -> Tensor:
    """[batch, 4, tokens, 16], as a model's attention has it: made of transposed queries, keys and values."""
    made = (torch.randn(BATCH, TOKENS, 4, 16).requires_grad_().transpose(1, 2) for _ in range(3))
    return F.scaled_dot_product_attention(*made, is_causal=True)


class Identity(torch.autograd.Function):
    """The same memory behind a Function, which nothing is known of; ZeRO-3 has such a one around modules."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad


# What models do between attention and o_proj, in which the memory stays what it is.
SHOWN = {
    "as in transformers": lambda x: x.transpose(1, 2).contiguous().reshape(BATCH, TOKENS, -1).contiguous(),
    "permuted": lambda x: x.permute(0, 2, 1, 3).flatten(2),
    "rows alone": lambda x: x.transpose(1, 2).view(BATCH * TOKENS, -1),
    "sliced": lambda x: x[..., :8].transpose(1, 2),
    "squeezed": lambda x: x[:1].squeeze(0).unsqueeze(1).squeeze(1),
    "turned": lambda x: x.transpose(1, 2).reshape(BATCH * TOKENS, -1).t(),
    "an alias": torch.ops.aten.alias,
}
# What makes new values, or a copy, or something that counts writes of its own.
MADE = {
    "gated": lambda x: x * torch.sigmoid(torch.randn(x.shape[-1])),
    "added to": lambda x: x + 1,
    "cast": lambda x: x.bfloat16(),
    "copied": lambda x: x.clone(),
    "another layout": lambda x: x.contiguous(),
    "rotated": lambda x: rotate(x, 16),
    "dropped": lambda x: F.dropout(x, 0.5),
    "behind a Function": Identity.apply,
    "an unsafe view": lambda x: torch.ops.aten._unsafe_view(x.transpose(1, 2), (BATCH, TOKENS, -1)),
    "detached": lambda x: x.detach(),
}


def test_views_of_attentions_output_show_what_it_keeps(seed):
    """The memory that attention's node saved, which counts the view's writes (so that torch finds one before backward),
    and nothing of it is a copy."""
    for name, view in SHOWN.items():
        output = attention_output()
        x = view(output)
        assert kept_by_attention(x), name
        saved = output.grad_fn._raw_saved_output.data
        assert saved.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        before = x._version
        with torch.no_grad():
            output.zero_()
        assert x._version == before + 1, name


def test_other_inputs_are_not_kept(seed):
    """New values of the output; of attention that is not fused, of a leaf, of nothing with a gradient."""
    for name, make in MADE.items():
        assert not kept_by_attention(make(attention_output())), name
    with sdpa_kernel(SDPBackend.MATH):
        assert not kept_by_attention(attention_output().transpose(1, 2))
    with torch.no_grad():
        assert not kept_by_attention(attention_output())
    behind, leaf = Identity.apply(attention_output()), torch.randn(3).requires_grad_()
    assert kept_by_attention(behind, frozenset({"Identity"})) and not kept_by_attention(behind, frozenset({"Other"}))
    assert not kept_by_attention(leaf) and not kept_by_attention(Identity.apply(leaf), frozenset({"Identity"}))


def test_torchs_own_formulas_ask_for_the_output():
    """Every attention operator of torch with a backward formula reads its output there, and has a known node."""
    file = Path(torchgen.__file__).parent / "packaged" / "autograd" / "derivatives.yaml"
    known = set()
    for formula in file.read_text().split("\n- name: ")[1:]:
        name = re.split(r"\W", formula)[0]
        if "attention" in name and not name.endswith("backward"):
            assert re.search(r"query, key, value.*: \w+\(.*\boutput\b", formula), name
            known.add("".join(part.capitalize() for part in name.split("_")))
    assert len(known) >= 5 and known <= ATTENTION


# ---- a model


def model_of(scheme: str) -> tuple[nn.Module, Tensor]:
    """A tiny Qwen3, its attention as wide as the residual stream, and token ids."""
    config = tiny_config("qwen3", layers=LAYERS, even=True)
    config._attn_implementation = "sdpa"
    model = Qwen3ForCausalLM(config).bfloat16().train()
    quantization = quant.replace_layers(model, get_scheme(scheme), learn_weight_scale=True, learn_input_scale=False)
    fill_scales(quantization, 2.0)  # global scales that clip some
    return model, torch.randint(config.vocab_size, (BATCH, TOKENS))


def keep_codes(model: nn.Module, *aliases: str) -> None:
    for module in model.modules():
        if isinstance(module, quant.QuantLinear):
            module.dynamic_codes, module.aliases = True, frozenset(aliases)


def hide(model: nn.Module) -> None:
    """Have each o_proj see its input behind a Function."""
    for name, module in model.named_modules():
        if name.endswith("o_proj"):
            module.register_forward_pre_hook(lambda _, inputs: (Identity.apply(*inputs),))


def loss_and_gradients(model: nn.Module, ids: Tensor) -> tuple[dict[str, Tensor], int]:
    """The loss and all gradients; and the bytes kept for backward."""
    model.zero_grad()
    forward = lambda: model(input_ids=ids, labels=ids, use_cache=False).loss  # noqa: E731
    kept = kept_bytes(forward, model)
    loss = forward()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}, kept


@pytest.mark.parametrize("scheme", KEPT)
def test_a_model_keeps_less_and_trains_the_same(scheme, seed):
    """o_proj keeps nothing; behind an unknown Function it keeps codes. All bits equal those without kept codes.

    Recomputed layers too: there torch complains about tensors that differ.
    """
    model, ids = model_of(scheme)
    expected, plain = loss_and_gradients(model, ids)
    keep_codes(model)
    found = [loss_and_gradients(model, ids)]
    hide(model)
    found.append(loss_and_gradients(model, ids))
    keep_codes(model, "Identity")
    found.append(loss_and_gradients(model, ids))
    shown, hidden, named = (kept for _, kept in found)
    assert shown == named < plain
    assert hidden - shown == KEPT[scheme] * BATCH * TOKENS * 64 * LAYERS
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    for gradients, _ in (*found, loss_and_gradients(model, ids)):
        assert gradients.keys() == expected.keys() and len(gradients) > 7 * LAYERS
        assert all(torch.equal(value, expected[name]) for name, value in gradients.items())


# ---- the input of q, k and v is restored in backward once for all three, and held no longer

WAYS = {"fp8_static": {"fp8_gemm": True}, "learned": {"learn_input": True}, "fp8_dynamic": {}, "8da4w": {}}


def restored_model(way: str) -> tuple[Attention, object]:
    return attention("fp8_static" if way == "learned" else way, **WAYS[way])


def readers(model: nn.Module) -> list[nn.Module]:
    return [model.q_proj, model.k_proj, model.v_proj]


def some(count: int = 2) -> list[Tensor]:
    return [torch.randn(6, WIDTH).bfloat16() for _ in range(count)]


def restored_gradients(model: nn.Module, x: Tensor, grad: Tensor, recomputed: str) -> tuple[dict[str, Tensor], int]:
    """Return those of the input and the parameters, and how often an input was restored for them."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    output = model(leaf) if recomputed == "no" else checkpoint(model, leaf, use_reentrant=recomputed == "reentrant")
    with Count() as made:
        output.backward(grad)
    assert not made.alive(6, WIDTH)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"x": leaf.grad, **found}, len(made.restored(6, WIDTH))


@pytest.mark.parametrize("recomputed", ("no", "reentrant", "not reentrant"))
@pytest.mark.parametrize("way", WAYS)
def test_restored_once_and_the_same(way, recomputed, seed):
    model, q = restored_model(way)
    x, grad = some()
    together, once = restored_gradients(model, x, grad, recomputed)
    unshared(q)
    alone, apart = restored_gradients(model, x, grad, recomputed)
    assert_equal(alone, together)
    # Three layers restore where one did; and where the second forward fake-quantizes, three do so too.
    assert apart - once == (2 if recomputed == "no" or way == "fp8_static" else 4)


@pytest.mark.parametrize("way", WAYS)
def test_a_backward_of_some_of_the_layers_holds_nothing_after_it(way, seed):
    """One layer's backward with the graph kept, then all: each gives what it gives without sharing."""
    model, q = restored_model(way)
    (x,), found = some(1), []
    grads = [torch.randn_like(layer(x)) for layer in readers(model)]
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        outputs = [layer(leaf) for layer in readers(model)]
        parameters = [leaf, *(layer.weight for layer in readers(model))]
        with Count() as made:
            one = torch.autograd.grad(outputs[1], (leaf, parameters[2]), grads[1], retain_graph=True)
        assert len(made.restored(6, WIDTH)) == 1 and not made.alive(6, WIDTH)
        with Count() as made:
            every = torch.autograd.grad(outputs, parameters, grads, retain_graph=True)
            again = torch.autograd.grad(outputs, parameters, grads)
        assert len(made.restored(6, WIDTH)) == (6 if found else 2) and not made.alive(6, WIDTH)
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
    with Count() as made, pytest.raises(RuntimeError, match="on purpose"):
        sum(one.sum() for one in outputs).backward()
    assert len(made.restored(6, WIDTH)) == 1
    other, _ = attention(fp8_gemm=True)
    expected = results(other, x.detach(), ones)
    assert not made.alive(6, WIDTH)
    assert_equal(results(other, x.detach(), ones), expected)
    del outputs
    assert not made.alive(6, WIDTH)


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
    with Count() as made:
        together = torch.autograd.grad(losses[2], weights)
    assert len(made.restored(6, WIDTH)) == 6 and not made.alive(6, WIDTH) and all(map(torch.equal, alone, together))
    assert Restored._filled is not None
