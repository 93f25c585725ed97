"""Fake quant of keys and values against a cache that quantizes by the reference, and its gradients."""

import copy
import random
import re

import pytest
import torch
import transformers as hf
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache

from engine.session.optimizer import classify
from quant import replace_layers
from quant.attention import QuantCache, attach_kv_cache
from quant.observers import Observer
from quant.reference import fake_quant, fake_quant_backward, inside_range
from quant.spec import PRESETS
from tests.lib.saved import kept_for_backward
from tests.unit.quant.oracle import DTYPES

SPEC = PRESETS["fp8_kv"].kv_cache
LAYERS, KV_HEADS, SIZE = 2, 2, 16
COMMON = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
FAMILIES = {
    "qwen2": (hf.Qwen2Config, {}),
    "qwen3": (hf.Qwen3Config, {}),
    "qwen3_moe": (hf.Qwen3MoeConfig, {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}),
    "llama": (hf.LlamaConfig, {}),
    "mixtral": (hf.MixtralConfig, {"num_local_experts": 4}),
    "phi3": (hf.Phi3Config, {}),
    "gemma2": (hf.Gemma2Config, {"sliding_window": 8}),
    "gemma3": (hf.Gemma3TextConfig, {"sliding_window": 8}),
}
SMALL = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "pad_token_id": 0}
SHARING = {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2, "intermediate_size": 32}
REFUSED = [
    (hf.FalconConfig, {}, "self_attention (FalconAttention)"),
    (hf.BloomConfig, {}, "self_attention (BloomAttention)"),
    (hf.MambaConfig, {}, "MambaForCausalLM"),
    (hf.DeepseekV3Config, {"kv_lora_rank": 16, "q_lora_rank": 16}, "latent"),
    (hf.Gemma3nTextConfig, {**SHARING, "vocab_size_per_layer_input": 64}, "another layer"),
]


def build(family, attention="eager"):
    """A tiny random fp32 model whose attention is not close to uniform."""
    kind, extra = FAMILIES[family]
    model = AutoModelForCausalLM.from_config(
        kind(**COMMON, **extra),
        attn_implementation=attention,
        dtype=torch.float32,
        experts_implementation="eager",  # grouped_mm knows no fp64
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.eval()


def attach(model):
    """Quantized keys and values, with learned scales that clip some of what a first forward has shown, each its own."""
    caches = attach_kv_cache(model, SPEC, learn=True)
    switch(caches, False)
    for cache in caches.values():
        cache.input_observer = Observer(SPEC)
    with torch.no_grad():
        model(tokens(), use_cache=False)
        for cache in caches.values():
            cache.input_s0.copy_(cache.input_observer.absmax / 448 * random.uniform(0.3, 0.6))
            cache.input_theta.normal_(std=0.1)
            cache.input_observer = None
    switch(caches, True)
    return caches


def tokens(rows=2, length=24):
    return torch.randint(1, 64, (rows, length))


def switch(caches, on):
    for cache in caches.values():
        cache.input_fake_quant = on


class QuantizingCache(DynamicCache):
    """transformers' cache, which hands out what it holds through ``functions``, for keys and values of each layer."""

    def __init__(self, config, functions):
        super().__init__(config=config)
        self.functions = functions

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        both = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        its = self.functions[2 * layer_idx : 2 * layer_idx + 2]
        return tuple(function(x) for function, x in zip(its, both, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_reads_what_a_quantized_cache_would_hold(family, seed):
    """Bit for bit: the same kernels get the same keys and values. In one pass, and token by token from a cache."""
    for attention in ("eager",) if family == "gemma2" else ("eager", "sdpa"):
        model, ids = build(family, attention), tokens()
        caches = attach(model)
        names = [f"model.layers.{layer}.self_attn.{kind}_cache" for layer in range(LAYERS) for kind in "kv"]
        assert list(caches) == names and all(model.get_submodule(name) is caches[name] for name in names)
        with torch.no_grad():
            ours = model(ids, use_cache=False).logits
            switch(caches, False)
            plain, scales = model(ids, use_cache=False).logits, [cache.input_scale() for cache in caches.values()]
            cached = QuantizingCache(model.config, [lambda x, s=scale: fake_quant(x, s, SPEC) for scale in scales])
            assert torch.equal(ours, model(ids, past_key_values=cached).logits)
            assert (ours - plain).abs().max() > 1e-3, "nothing was quantized"
            steps = [model(ids[:, i : i + 1], past_key_values=cached).logits for i in range(3)]
            switch(caches, True)
            own = DynamicCache(config=model.config)
            assert torch.equal(ours, model(ids, past_key_values=own).logits)
            for i, expected in enumerate(steps):
                assert torch.equal(model(ids[:, i : i + 1], past_key_values=own).logits, expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_cache_packing_and_padding_give_each_sample_its_own_logits(attention, seed):
    """GEMMs of other shapes may sum in another order, which moves a code of a few thousand here and there: compared
    with what quantization as a whole changes."""
    model = build("qwen3", attention)
    samples = [tokens(1, length) for length in (5, 11, 8)]
    caches = attach(model)
    with torch.no_grad():
        alone = [model(sample, use_cache=False).logits[0] for sample in samples]
        positions = torch.cat([torch.arange(sample.shape[1]) for sample in samples])[None]
        packed = model(torch.cat(samples, 1), position_ids=positions, use_cache=False).logits[0].split((5, 11, 8))
        rows = torch.zeros(3, 11, dtype=torch.long)
        mask = torch.zeros_like(rows)
        for row, sample in enumerate(samples):
            rows[row, : sample.shape[1]], mask[row, : sample.shape[1]] = sample, 1
        padded = model(rows, attention_mask=mask, use_cache=False).logits
        grown = DynamicCache(config=model.config)
        steps = [model(part, past_key_values=grown).logits[0] for part in samples[1].split((4, 1, 5, 1), 1)]
        switch(caches, False)
        for row, (ours, sample) in enumerate(zip(alone, samples, strict=True)):
            effect = (model(sample, use_cache=False).logits[0] - ours).norm()
            assert (packed[row] - ours).norm() < 0.1 * effect
            assert (padded[row, : sample.shape[1]] - ours).norm() < 0.1 * effect
            assert row != 1 or (torch.cat(steps) - ours).norm() < 0.1 * effect


def test_switched_off_the_model_is_as_it_was_and_learned_scales_get_zeros(seed):
    """A cast that has rounded the scales is refused."""
    model, ids = build("qwen3", "sdpa"), tokens()
    plain = model(ids, use_cache=False).logits
    caches = attach(model)
    switch(caches, False)
    logits = model(ids, use_cache=False).logits
    assert torch.equal(logits, plain)
    logits.sum().backward()
    assert all(cache.input_theta.grad.tolist() == [0] for cache in caches.values())
    with pytest.raises(TypeError, match=r"input_s0 is torch\.bfloat16"):
        model.bfloat16()(tokens())


@pytest.mark.parametrize("of_inputs", [False, True])
@pytest.mark.parametrize("name", ["fp8_kv", "fp8_static_kv"])
def test_prepare_switches_and_watches_keys_and_values_as_inputs(name, of_inputs, seed):
    """Alone, and beside layers: their scale groups are the last of the inputs', their switch is that of activations."""
    model, preset = build("qwen3"), PRESETS[name]
    learn = {"learn_weight_scale": False, "learn_input_scale": of_inputs, "learn_kv_scale": True}
    quantization = replace_layers(model, preset.linear, kv_cache=preset.kv_cache, **learn)
    caches = quantization.caches
    groups = quantization.input_groups[-2 * LAYERS :]
    assert all((group.theta is not None) == of_inputs for group in quantization.input_groups[: -2 * LAYERS])
    assert [group.owner for group in groups] == list(caches) and bool(quantization.layers) == (name != "fp8_kv")
    for group, cache in zip(groups, caches.values(), strict=True):
        assert group.members == [group.owner] and group.spec == SPEC
        assert group.s0 is cache.input_s0 and group.theta is cache.input_theta
    kinds = {owned.name: owned.kind for owned in classify(model) if "_cache." in owned.name}
    expected = {"input_s0": "frozen", "input_theta": "kv_scale"}
    assert kinds == {f"{name}.{part}": kind for name in caches for part, kind in expected.items()}

    def on():
        return [cache.input_fake_quant for cache in caches.values()]

    quantization.set_fake_quant(True, False)
    assert on() == [False] * 4
    quantization.set_fake_quant(False, True, r".*\.1\.self_attn\.(k|v)_cache")
    state = quantization.fake_quant_state()
    assert on() == [False, False, True, True] and [state[name] for name in caches] == [(False, one) for one in on()]
    quantization.set_fake_quant(True, True)
    quantization.restore_fake_quant(state)
    assert quantization.fake_quant_state() == state
    quantization.set_fake_quant(False, False)
    quantization.observe(True)
    model(tokens(), use_cache=False)
    assert quantization.observing and all(group.observer.absmax > 0 for group in quantization.input_groups)
    quantization.observe(False)
    assert not quantization.observing


def test_flash_attention_finds_its_kernel_by_the_name_it_was_asked_for(seed):
    """With a stand-in for the kernels, which need a GPU: it looks at what transformers' flash attention looks at."""

    def head_proxy(module, query, key, value, attention_mask, **kwargs):
        assert module.config._attn_implementation == "flash_attention_9" and module.config.head_dim == SIZE
        assert module.is_causal and not module.training and attention_mask is None
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("flash_attention_9", head_proxy)
    hf.AttentionMaskInterface.register("flash_attention_9", hf.AttentionMaskInterface()["flash_attention_2"])
    model, ids = build("qwen3", "sdpa"), tokens()
    same = copy.deepcopy(model)
    model.config._attn_implementation = "flash_attention_9"
    caches, others = attach(model), attach(same)
    for ours, theirs in zip(caches.values(), others.values(), strict=True):
        theirs.load_state_dict(ours.state_dict())
    assert torch.equal(model(ids, use_cache=False).logits, same(ids, use_cache=False).logits)


@pytest.mark.parametrize(("config", "extra", "named"), REFUSED, ids=lambda one: getattr(one, "model_type", ""))
def test_models_whose_cache_is_another_are_refused_by_name(config, extra, named):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(**SMALL, **extra), attn_implementation="eager")
    with pytest.raises(ValueError, match=re.escape(named)):
        attach_kv_cache(model, SPEC, learn=False)
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="nothing to quantize"):
        replace_layers(nn.Linear(8, 8), None, learn_weight_scale=False, learn_input_scale=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quantizer_is_the_reference_and_keeps_no_second_copy(dtype, seed):
    """Bit for bit, in any stride. With a fixed scale a bit of each element is kept for backward, with a learned one the
    element itself. An observer counts what is clipped."""
    x = torch.randn(2, 7, 3, 16).to(dtype).transpose(1, 2)
    cache = QuantCache(SPEC, dtype=dtype, device=torch.device("cpu"), learn=True)
    with torch.no_grad():
        cache.input_s0.fill_(0.7 * x.abs().max() / 448)
    for learns, kept in ((False, x.numel() // 8), (True, x.nbytes)):
        cache.input_theta.requires_grad_(learns)
        leaf, grad = x.detach().requires_grad_(), torch.randn_like(x)
        cache.input_observer = seen = Observer(SPEC)
        with kept_for_backward(cache.parameters()) as saved:
            values = cache(leaf)
        assert torch.equal(values, fake_quant(x, cache.input_scale(), SPEC)) and values.dtype == dtype
        values.backward(grad)
        inside = inside_range(x, cache.input_scale(), SPEC)
        assert torch.equal(leaf.grad, grad * inside)
        if learns:  # LSQ's factor counts the features of a token
            _, of_scale = fake_quant_backward(grad.float(), x.float(), cache.input_scale(), SPEC, scale_gradient=True)
            expected = of_scale * cache.input_scale() / (3 * 16 * SPEC.qmax) ** 0.5
            eps = max(torch.finfo(dtype).eps, 1e-5)  # of theta's dtype, or of fp32 sums of some 700 terms
            torch.testing.assert_close(cache.input_theta.grad.float(), expected, rtol=2 * eps, atol=eps)
        assert seen.absmax == x.abs().max() and seen.clipped == (~inside).sum() > 0
        assert [tensor.nbytes for tensor in saved.values()] == [kept]
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
