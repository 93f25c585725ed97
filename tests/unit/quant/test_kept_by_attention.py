"""Inputs that fused attention keeps anyway: which they are, the same bits, and what a model keeps then."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchgen
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3ForCausalLM

import quant
from benchmarks.timing import kept_bytes
from model.scales import renew_weight_scales
from quant.hadamard import rotate
from quant.inputs import ATTENTION, kept_by_attention
from quant.spec import get_scheme
from tests.lib.tiny import tiny_config

BATCH, TOKENS, LAYERS = 2, 5, 2
# Bytes per element of an input that are kept: codes, a byte of scale per group (four per token), of NVFP4 a mask.
KEPT = {
    "nvfp4_w4a4": 1 / 2 + 1 / 16 + 1 / 8,
    "mxfp4_w4a4": 1 / 2 + 1 / 32,
    "mxfp8": 1 + 1 / 32,
    "mxfp4_mxfp8": 1 + 1 / 32,
    "fp8_dynamic": 1 + 4 / 64,
}


def attention_output(dtype: torch.dtype = torch.float32) -> Tensor:
    """[batch, 4, tokens, 16], as a model's attention has it: made of transposed queries, keys and values."""
    made = (torch.randn(BATCH, TOKENS, 4, 16, dtype=dtype).requires_grad_().transpose(1, 2) for _ in range(3))
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


@pytest.mark.parametrize("way", SHOWN)
def test_views_of_attentions_output_show_what_it_keeps(way, seed):
    """The memory that attention's node saved, which counts the view's writes, and nothing of it is a copy."""
    output = attention_output()
    x = SHOWN[way](output)
    assert kept_by_attention(x)
    saved = output.grad_fn._raw_saved_output.data
    assert saved.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    before = x._version
    with torch.no_grad():
        output.zero_()
    assert x._version == before + 1


@pytest.mark.parametrize("way", MADE)
def test_what_is_made_of_it_is_another_tensor(way, seed):
    assert not kept_by_attention(MADE[way](attention_output()))


def test_a_function_that_is_known_is_looked_through(seed):
    x = Identity.apply(SHOWN["as in transformers"](attention_output()))
    assert kept_by_attention(x, frozenset({"Identity"})) and not kept_by_attention(x, frozenset({"Other"}))
    assert not kept_by_attention(Identity.apply(torch.randn(3).requires_grad_()), frozenset({"Identity"}))


def test_inputs_of_others(seed):
    """Of attention that is not fused, of a leaf, of nothing with a gradient."""
    with sdpa_kernel(SDPBackend.MATH):
        assert not kept_by_attention(attention_output().transpose(1, 2))
    assert not kept_by_attention(torch.randn(3).requires_grad_())
    with torch.no_grad():
        assert not kept_by_attention(attention_output())


def test_torchs_own_formulas_ask_for_the_output():
    """Of each attention of torch that has a formula for backward: that reads the output, and its node is known."""
    file = Path(torchgen.__file__).parent / "packaged" / "autograd" / "derivatives.yaml"
    known = set()
    for entry in file.read_text().split("\n- name: ")[1:]:
        name = re.split(r"\W", entry)[0]
        if "attention" in name and not name.endswith("backward"):
            assert re.search(r"query, key, value.*: \w+\(.*\boutput\b", entry), name
            known.add("".join(part.capitalize() for part in name.split("_")))
    assert len(known) >= 5 and known <= ATTENTION


# ---- a model


def model_of(scheme: str, attention: str = "sdpa") -> tuple[nn.Module, Tensor]:
    """A tiny Qwen3, its attention as wide as the residual stream, and token ids."""
    config = tiny_config("qwen3", layers=LAYERS, even=True)
    config._attn_implementation = attention
    model = Qwen3ForCausalLM(config).bfloat16().train()
    quantization = quant.prepare(model, get_scheme(scheme), learn_weight_scale=True, learn_input_scale=False)
    renew_weight_scales(quantization)
    with torch.no_grad():
        for group in quantization.input_groups:  # global scales that clip some
            group.s0.fill_(448 * 6 / 2.0)
    return model, torch.randint(config.vocab_size, (BATCH, TOKENS))


def keep(model: nn.Module, codes: bool, aliases: frozenset[str] = frozenset()) -> None:
    for module in model.modules():
        if isinstance(module, quant.QuantLinear):
            module.dynamic_codes, module.aliases = codes, aliases


def hide(model: nn.Module) -> None:
    """Have each o_proj see its input behind a Function."""
    for name, module in model.named_modules():
        if name.endswith("o_proj"):
            module.register_forward_pre_hook(lambda _, inputs: (Identity.apply(*inputs),))


def results(model: nn.Module, ids: Tensor) -> tuple[dict[str, Tensor], int]:
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
    """Of o_proj nothing; behind a Function its codes, until that is named. All bits are those without kept codes."""
    model, ids = model_of(scheme)
    expected, plain = results(model, ids)
    keep(model, True)
    found = [results(model, ids)]
    hide(model)
    found.append(results(model, ids))
    keep(model, True, frozenset({"Identity"}))
    found.append(results(model, ids))
    for gradients, _ in found:
        assert gradients.keys() == expected.keys() and len(gradients) > 7 * LAYERS
        assert all(torch.equal(value, expected[name]) for name, value in gradients.items())
    shown, hidden, named = (kept for _, kept in found)
    assert shown == named < plain
    assert hidden - shown == KEPT[scheme] * BATCH * TOKENS * 64 * LAYERS


def test_eager_attention_keeps_no_output(seed):
    """Its last product keeps what it multiplied: codes are kept, as where o_proj sees a Function."""
    model, ids = model_of("nvfp4_w4a4", "eager")
    expected, plain = results(model, ids)
    keep(model, True)
    kept, bytes_kept = results(model, ids)
    hide(model)
    assert results(model, ids)[1] == bytes_kept < plain
    assert all(torch.equal(value, expected[name]) for name, value in kept.items())


@pytest.mark.parametrize("scheme", ("nvfp4_w4a4", "mxfp8"))
def test_recomputed_layers_train_the_same(scheme, seed):
    """Forward and its repetition choose the same: torch would complain of other tensors."""
    model, ids = model_of(scheme)
    expected, _ = results(model, ids)
    keep(model, True)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    found, _ = results(model, ids)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("through", ("views", "a known Function", "an unknown Function"))
def test_a_write_to_what_is_shared_is_an_error(through, seed):
    """Also where only the layer's backward runs, not attention's; what was kept as codes does not mind."""
    model, _ = model_of("mxfp4_w4a4")
    layer = model.model.layers[0].self_attn.o_proj
    layer.dynamic_codes, layer.aliases = True, frozenset({"Identity"} if through == "a known Function" else {})
    output = attention_output(torch.bfloat16)
    x = SHOWN["as in transformers"](output)
    x = x if through == "views" else Identity.apply(x)
    result = layer(x)
    with torch.no_grad():
        output.mul_(2)
    if through == "an unknown Function":
        assert torch.autograd.grad(result.sum(), layer.weight)[0].isfinite().all()
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(result.sum(), layer.weight)


@pytest.mark.parametrize("trains", ("input", "weight"))
def test_frozen_weights_and_frozen_inputs(trains, seed):
    """Where one operand alone needs a gradient: the same bits."""
    model, _ = model_of("nvfp4_w4a4")
    layer = model.model.layers[0].self_attn.o_proj
    if trains == "input":
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
    found = []
    q = torch.randn(BATCH, TOKENS, 4, 16).mul_(3).bfloat16()
    for layer.dynamic_codes in (False, True):
        layer.zero_grad()
        leaf = q.clone().requires_grad_(trains == "input")
        turned = leaf.transpose(1, 2)
        value = turned if trains == "input" else turned.clone().requires_grad_()
        x = SHOWN["as in transformers"](F.scaled_dot_product_attention(turned, turned, value, is_causal=True))
        assert kept_by_attention(x)
        layer(x).float().square().sum().backward()
        found.append((leaf.grad, layer.weight.grad))
    for ours, theirs in zip(*found, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)
    assert any(one is not None for one in found[0])
