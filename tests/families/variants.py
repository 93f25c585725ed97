"""The families and their quirks, as :class:`~tests.families.make.Variant`."""

from tests.families.make import Variant

MLA = {"head_dim": 8, "num_key_value_heads": 4}  # the rotary part alone is what these call the size of a head
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [2.0, 2.1, 2.2, 2.3, 2.4, 2.5, 2.6, 2.7],
    "original_max_position_embeddings": 64,
}
HYBRID = {"num_hidden_layers": 4}
LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"]}
QWEN4 = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
QWEN4 |= {"indexer_budget": 16, "indexer_compress_ratio": 4}
SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"]}


def _v(name: str, model_type: str | None = None, parts: dict | None = None, **options) -> Variant:
    return Variant(name, model_type or name, options, parts or {})


def _named(names: str) -> list[Variant]:
    """Families without a quirk."""
    return [_v(name) for name in names.split()]


def _seeing(name: str, text: str | dict, vision: str, token: str = "image_token_index", **options) -> Variant:
    """A composite family by the types of its language model, or that and more of its options, and of its eyes."""
    language = {"model_type": text} if isinstance(text, str) else text
    return _v(name, None, {"text_config": language, "vision_config": {"model_type": vision}}, **{token: 3}, **options)


DENSE = (
    _v("llama"),
    _v("llama, tied", "llama", tie_word_embeddings=True),
    _v("llama, rope of llama 3", "llama", rope_parameters=LLAMA3),
    _v("llama, biases", "llama", attention_bias=True, mlp_bias=True),
    _v("llama, heads wider than hidden", "llama", head_dim=32),
    _v("mistral", sliding_window=None),
    _v("mistral, sliding window", "mistral"),
    *_named("ministral ministral3 qwen2"),
    _v("qwen2, tied", "qwen2", tie_word_embeddings=True),
    _v("qwen2, sliding window", "qwen2", use_sliding_window=True, max_window_layers=1),
    _v("qwen3"),
    _v("qwen3, tied", "qwen3", tie_word_embeddings=True),
    _v("qwen3, yarn", "qwen3", rope_parameters=YARN),
    _v("phi"),
    _v("phi3", sliding_window=None),
    _v("phi3, longrope", "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64),
    _v("gemma"),
    _v("gemma2", final_logit_softcapping=30.0, attn_logit_softcapping=50.0),
    _v("gemma3_text", num_hidden_layers=6),
    _v("gemma3_text, tied off, softcap", "gemma3_text", tie_word_embeddings=False, final_logit_softcapping=30.0),
    _v("gemma3n_text", **SLIDING_AND_FULL, num_kv_shared_layers=0, activation_sparsity_pattern=[0.95, 0.0]),
    _v(
        "gemma3n_text, shared keys",
        "gemma3n_text",
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.0],
    ),
    _v("gemma4_text", **SLIDING_AND_FULL),
    _v("gemma4_text, keys are values", "gemma4_text", **SLIDING_AND_FULL, attention_k_eq_v=True),
    _v("gemma4_text, softcap", "gemma4_text", **SLIDING_AND_FULL, final_logit_softcapping=30.0),
    _v("vaultgemma", final_logit_softcapping=30.0),
    _v("olmo", clip_qkv=0.5),
    _v("olmo2"),
    _v("olmo3", **SLIDING_AND_FULL),
    *_named("starcoder2 stablelm"),
    _v("stablelm, parallel", "stablelm", use_parallel_residual=True, qk_layernorm=True, use_qkv_bias=True),
    *_named("gpt2 gpt_bigcode"),
    _v("gpt_bigcode, heads apart", "gpt_bigcode", multi_query=False),
    _v("gpt_neo", attention_types=[[["global", "local"], 1]]),
    _v("gpt_neox"),
    _v("gpt_neox, sequential", "gpt_neox", use_parallel_residual=False),
    *_named("gptj codegen opt"),
    _v("opt, 350m", "opt", word_embed_proj_dim=32, do_layer_norm_before=False),
    *_named("bloom mpt"),
    _v("falcon", multi_query=True, parallel_attn=True),
    _v("falcon, 40b", "falcon", new_decoder_architecture=True, num_kv_heads=2),
    _v("falcon, alibi", "falcon", alibi=True, parallel_attn=False, multi_query=False, bias=True),
    _v("cohere", logit_scale=0.25),
    _v("cohere, norms of q and k", "cohere", logit_scale=0.25, use_qk_norm=True),
    _v("cohere2", logit_scale=0.25, **SLIDING_AND_FULL),
    _v("granite", logits_scaling=8.0, embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.1),
    _v("granite_swa", logits_scaling=8.0),
    *_named("glm glm4 helium"),
    _v("smollm3", no_rope_layers=[1, 0]),
    _v("seed_oss"),
    _v("exaone4", **SLIDING_AND_FULL),
    *_named("nemotron persimmon arcee apertus ernie4_5 hunyuan_v1_dense diffllama doge bitnet"),
    _v("cwm", bos_token_id=1),
    *_named("jais2 mellum hyperclovax"),
    _v("nanochat", final_logit_softcapping=15.0),
    _v("minicpm3", **MLA, dim_model_base=32),
    _v("youtu", **MLA),
    _v("xglm", attention_heads=4),
    *_named("biogpt openai-gpt"),
    _v("modernbert-decoder", bos_token_id=1),
    *_named("hrm_text gpt_neox_japanese ctrl"),
    _v("cpmant", dim_head=16, dim_ff=96, prompt_length=4, prompt_types=4, segment_types=4),
    _v("gemma4_unified_text", **SLIDING_AND_FULL),
    _v("flint", **SLIDING_AND_FULL),
)

EXPERTS = (
    _v("mixtral", sliding_window=None),
    _v("qwen2_moe", decoder_sparse_step=1),
    _v("qwen2_moe, mixed layers", "qwen2_moe", mlp_only_layers=[0]),
    _v("qwen3_moe", norm_topk_prob=True),
    _v("qwen3_moe, mixed layers", "qwen3_moe", mlp_only_layers=[0], norm_topk_prob=False),
    *_named("olmoe flex_olmo phimoe"),
    _v("deepseek_v2", **MLA, q_lora_rank=None),
    _v("deepseek_v2, groups", "deepseek_v2", **MLA, topk_method="group_limited_greedy"),
    _v("deepseek_v3", **MLA),
    _v("deepseek_v3, no low rank of q", "deepseek_v3", **MLA, q_lora_rank=None),
    _v("deepseek_v32", **MLA),
    _v("deepseek_v4", compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}),
    _v("glm4_moe", use_qk_norm=True),
    _v("glm4_moe_lite", **MLA),
    _v("glm_moe_dsa", **MLA),
    *_named("dots1 ernie4_5_moe exaone_moe solar_open"),
    _v("cohere2_moe", logit_scale=0.25),
    _v("hunyuan_v1_moe", moe_topk=[2, 2]),
    *_named("jetmoe minimax minimax_m2 mimo_v2_flash laguna"),
    _v("gpt_oss", **SLIDING_AND_FULL),
    _v("llama4_text", intermediate_size_mlp=96, num_experts_per_tok=1, **HYBRID),
    _v("granitemoe", logits_scaling=8.0),
    _v("granitemoe_swa", logits_scaling=8.0),
    _v("granitemoeshared", logits_scaling=8.0),
    _v("granitemoehybrid, dense", "granitemoehybrid", num_local_experts=0, layer_types=["attention"] * 2),
    _v("granitemoehybrid", layer_types=["mamba", "attention"], logits_scaling=8.0),
    _v("gemma4_text, experts", "gemma4_text", **SLIDING_AND_FULL, enable_moe_block=True),
    _v(
        "dbrx",
        parts={
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    *_named("afmoe aria_text"),
    _v("longcat_flash", **MLA, qk_head_dim=24, zero_expert_num=2),
    _v("axk1", **MLA),
    _v("hy_v3"),
    _v("lfm2_moe", layer_types=["conv", "full_attention"], num_dense_layers=1),
    _v("kimi_linear", **MLA, **LINEAR_AND_FULL),
    _v("bailing_hybrid"),
    _v("qwen3_next", **LINEAR_AND_FULL),
    _v("qwen3_5_moe_text", **LINEAR_AND_FULL),
    _v("nemotron_h", layers_block_type=["mamba", "attention", "moe", "mlp"]),
    _v("jamba", attn_layer_period=2, attn_layer_offset=1),
    _v("zaya", num_experts_per_tok=1),
    _v("axk2", **MLA),
    _v("dots3_note_text", num_key_value_heads=4),
    _v("hy_v4"),
    _v("inkling_text", layer_types=["hybrid_sliding", "hybrid"], mlp_layer_types=["dense", "sparse"]),
    _v("inkling2_text", layer_types=["hybrid_sliding", "hybrid"]),
    _v("kolibri1", **SLIDING_AND_FULL),
    _v("minimax_m3_vl_text", layer_types=["minimax_m3_sparse", "full_attention"]),
)

HYBRIDS = (
    _v("qwen3_5_text", **LINEAR_AND_FULL),
    _v("olmo_hybrid", **LINEAR_AND_FULL, num_key_value_heads=4),
    _v("lfm2", layer_types=["conv", "full_attention"]),
    _v("falcon_h1", lm_head_multiplier=0.25, embedding_multiplier=5.0, key_multiplier=0.5, ssm_out_multiplier=0.5),
    _v("bamba", attn_layer_indices=[1]),
    _v("mamba"),
    _v("mamba2", num_heads=8),
    _v("falcon_mamba"),
    _v("recurrent_gemma", num_hidden_layers=3, intermediate_size=192),
    _v("zamba", num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2),
    _v("zamba2", num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2, n_mamba_heads=8),
    *_named("rwkv xlstm"),
    _v("lfm3", layer_types=["conv", "full_attention"]),
    _v("qwen4_exp_text", **LINEAR_AND_FULL, **QWEN4),
)

_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_QWEN_EYES = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
_QWEN_MROPE = {"text_config": {"rope_parameters": _MROPE}}
_DEEP_EYES = {**_QWEN_MROPE, "vision_config": {"deepstack_visual_indexes": [0]}}
_SHORT_MROPE = {"text_config": {"rope_parameters": {**_MROPE, "mrope_section": [2, 1, 1]}}}
_LLAMA4 = {"intermediate_size_mlp": 96, "num_experts_per_tok": 1, **HYBRID}
COMPOSITE = (
    _v("qwen3_5", **_QWEN_EYES, parts={"text_config": LINEAR_AND_FULL}),
    _v("qwen3_5_moe", **_QWEN_EYES, parts={"text_config": LINEAR_AND_FULL}),
    _v("qwen3_vl", **_QWEN_EYES, parts=_DEEP_EYES),
    _v("qwen3_vl_moe", **_QWEN_EYES, parts=_DEEP_EYES),
    _v("qwen2_vl", **_QWEN_EYES, parts=_QWEN_MROPE),
    _v("qwen2_5_vl", **_QWEN_EYES, parts={**_QWEN_MROPE, "vision_config": {"fullatt_block_indexes": [0]}}),
    _seeing("gemma3", {"num_hidden_layers": 6}, "siglip_vision_model"),
    _v("gemma4", image_token_id=3, parts={"text_config": SLIDING_AND_FULL}, audio_config=None),
    _seeing("mistral3", "mistral", "pixtral"),
    _seeing("llava", "llama", "clip_vision_model"),
    _seeing("llava_next", "mistral", "clip_vision_model"),
    _seeing("internvl", "qwen2", "internvl_vision", "image_token_id"),
    _seeing("aya_vision", {"model_type": "cohere2", "logit_scale": 0.25}, "siglip_vision_model"),
    _v("llama4", image_token_index=3, parts={"text_config": _LLAMA4}),
    _v("glm4v", image_token_id=3, video_token_id=4, parts=_QWEN_MROPE),
    _v("glm4v_moe", image_token_id=3, video_token_id=4, parts=_SHORT_MROPE),
    _v("kimi_k25", parts={"text_config": {"model_type": "deepseek_v3", **MLA}}),
    _seeing("lfm2_vl", "lfm2", "siglip2_vision_model", "image_token_id"),
    _seeing("smolvlm", "llama", "smolvlm_vision", "image_token_id"),
    _seeing("idefics3", "llama", "idefics3_vision", "image_token_id"),
    _seeing("paligemma", "gemma", "siglip_vision_model"),
    _seeing("llava_onevision", "qwen2", "siglip_vision_model", video_token_index=4),
    _v("exaone4_5", parts={"text_config": {"model_type": "exaone4", **SLIDING_AND_FULL}}),
    _v("gemma4_unified", parts={"text_config": SLIDING_AND_FULL}),
    _v("minimax_m3_vl"),
    _v("qwen4_exp", parts={"text_config": {**LINEAR_AND_FULL, **QWEN4}}),
    _v("step3p7"),
)

VARIANTS = {variant.name: variant for variant in (*DENSE, *EXPERTS, *HYBRIDS, *COMPOSITE)}
