"""Tiny models with quantized keys and values, and transformers' cache that quantizes what it hands out."""

import random

import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from quant.kv_cache import attach_kv_cache
from quant.observers import Observer
from quant.reference import fake_quant
from quant.spec import PRESETS

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
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "qwen3_moe": (Qwen3MoeConfig, {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}),
    "llama": (LlamaConfig, {}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "phi3": (Phi3Config, {}),
    "gemma2": (Gemma2Config, {"sliding_window": 8}),
    "gemma3": (Gemma3TextConfig, {"sliding_window": 8}),
}


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


def reference_cache(model, caches):
    scales = [cache.input_scale() for cache in caches.values()]
    return QuantizingCache(model.config, [lambda x, s=scale: fake_quant(x, s, SPEC) for scale in scales])


def record_inputs(caches):
    """Inputs of each quantizer in the next forward, by name."""
    seen = {}
    for name, cache in caches.items():
        cache.register_forward_pre_hook(lambda _, args, name=name: seen.__setitem__(name, args[0].detach()))
    return seen
