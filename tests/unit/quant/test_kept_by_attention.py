"""Inputs that fused attention keeps anyway: how they are told, and that a model keeps less with the same bits."""

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


def model_of(scheme: str) -> tuple[nn.Module, Tensor]:
    """A tiny Qwen3, its attention as wide as the residual stream, and token ids."""
    config = tiny_config("qwen3", layers=LAYERS, even=True)
    config._attn_implementation = "sdpa"
    model = Qwen3ForCausalLM(config).bfloat16().train()
    quantization = quant.prepare(model, get_scheme(scheme), learn_weight_scale=True, learn_input_scale=False)
    renew_weight_scales(quantization)
    with torch.no_grad():
        for group in quantization.input_groups:  # global scales that clip some
            group.s0.fill_(448 * 6 / 2.0)
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
    """Of o_proj nothing; behind a Function its codes, until that is named. All bits are those without kept codes, in
    recomputed layers too: there torch would complain of other tensors."""
    model, ids = model_of(scheme)
    expected, plain = results(model, ids)
    keep_codes(model)
    found = [results(model, ids)]
    hide(model)
    found.append(results(model, ids))
    keep_codes(model, "Identity")
    found.append(results(model, ids))
    shown, hidden, named = (kept for _, kept in found)
    assert shown == named < plain
    assert hidden - shown == KEPT[scheme] * BATCH * TOKENS * 64 * LAYERS
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    for gradients, _ in (*found, results(model, ids)):
        assert gradients.keys() == expected.keys() and len(gradients) > 7 * LAYERS
        assert all(torch.equal(value, expected[name]) for name, value in gradients.items())
