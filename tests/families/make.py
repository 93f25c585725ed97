"""Tiny random checkpoints of every family, made from transformers' own configuration classes.

A configuration is made small by the names of its options (:data:`SMALL`), so that a family needs no lines of its own
unless it has a rule that these numbers break, or a quirk of a published model that is to be tried. Composite
configurations are made small part by part.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)

from tests.lib.tiny import tiny_tokenizer

VOCABULARY = 307
# Values by the names of options. Widths are multiples of 32 where groups of weights need it, and heads differ from key
# heads.
_SIZES: dict[str, Any] = {
    # width and depth
    "vocab_size vocab_size_per_layer_input": VOCABULARY,
    "hidden_size n_embd d_model dim embedding_size lru_width hidden_dim word_embed_proj_dim": 64,
    "intermediate_size n_inner ffn_dim ffn_hidden_size intermediate_dim": 96,
    "num_hidden_layers n_layer n_layers num_layers": 2,
    "max_position_embeddings n_positions max_seq_len": 128,
    "hidden_size_per_layer_input": 32,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
    # attention
    "num_attention_heads n_head n_heads num_heads": 4,
    "num_key_value_heads num_global_key_value_heads": 2,
    "head_dim global_head_dim query_pre_attn_scalar": 16,
    "sliding_window attention_window_size block_size window_size rotary_dim": 8,
    "q_lora_rank kv_lora_rank": 32,
    "qk_rope_head_dim index_topk": 8,
    "qk_nope_head_dim v_head_dim index_head_dim": 16,
    "index_n_heads": 2,
    # experts
    "num_experts num_local_experts n_routed_experts moe_num_experts": 4,
    "num_experts_per_tok moe_top_k moe_k moe_topk top_k_experts n_group": 2,
    "n_shared_experts num_shared_experts moe_num_shared_experts topk_group first_k_dense_replace": 1,
    "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size router_hidden_size": 32,
    "moe_shared_expert_intermediate_size shared_experts_intermediate_size expert_ffn_hidden_size": 32,
    "moe_ffn_hidden_size": 32,
    # recurrences and convolutions
    "mamba_n_heads mamba_num_heads": 8,
    "mamba_d_head mamba_head_dim": 16,
    "mamba_d_state ssm_state_size state_size mamba_dt_rank time_step_rank laurel_rank": 8,
    "mamba_n_groups n_groups mamba_ngroups": 1,
    "mamba_d_ssm": 128,
    "conv_kernel linear_num_value_heads linear_num_heads": 4,
    "n_mamba_heads linear_num_key_heads altup_num_inputs": 2,
    "linear_key_head_dim linear_value_head_dim linear_head_dim": 16,
    # parts of composite models that see or hear
    "depth": 2,
    "embed_dim out_hidden_size projection_dim vision_output_dim projector_input_dim projector_output_dim": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_position_embeddings position_embedding_size": 16,
}
SMALL = {name: value for names, value in _SIZES.items() for name in names.split()}


@dataclass(frozen=True)
class Variant:
    """One family, or one quirk of its published models.

    Attributes:
        name: of the variant; it begins with the family's.
        model_type: as config.json names it.
        options: values of the configuration that differ from :data:`SMALL`.
        parts: the same for each part of a composite configuration, by its name (``text_config``, ...).
    """

    name: str
    model_type: str
    options: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def config(self) -> PretrainedConfig:
        """The tiny configuration."""
        return shrunk(self.model_type, self.options, self.parts)

    def class_of(self, config: PretrainedConfig) -> type[PreTrainedModel]:
        """The class that a published config.json names."""
        mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if composite(config) else MODEL_FOR_CAUSAL_LM_MAPPING
        found: type[PreTrainedModel] = mapping[type(config)]
        return found

    def model(self, *, seed: int = 0, dtype: torch.dtype = torch.float32, attention: str = "eager") -> PreTrainedModel:
        """A model of that class with random weights, the same for the same seed."""
        config = self.config()
        torch.manual_seed(seed)
        model = self.class_of(config)._from_config(config, dtype=torch.float32, attn_implementation=attention)
        randomize(model, seed)
        return model.to(dtype).eval()

    def checkpoint(self, directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Path:
        """Write a checkpoint as ``save_pretrained`` does, with a tokenizer."""
        self.model(seed=seed, dtype=dtype).save_pretrained(directory)
        tiny_tokenizer().save_pretrained(directory)
        return directory


def composite(config: PretrainedConfig) -> bool:
    """Return True if ``config`` has parts, of which one is the language model."""
    return config.get_text_config() is not config


def shrunk(model_type: str, options: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]) -> PretrainedConfig:
    """The configuration of ``model_type`` with small sizes, and ``options`` and ``parts`` over them."""
    cls = CONFIG_MAPPING[model_type]
    known = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}
    values = {key: value for key, value in SMALL.items() if key in known}
    for name, part in (getattr(cls, "sub_configs", None) or {}).items():
        own = dict(parts.get(name, {}))
        kind = own.pop("model_type", None) or getattr(part, "model_type", "")
        if kind in CONFIG_MAPPING:  # not AutoConfig: which class that becomes is for ``parts`` to say
            values[name] = shrunk(kind, own, {}).to_dict()
        elif own:
            values[name] = own
    return cls(**{**values, **options})


@torch.no_grad()
def randomize(model: PreTrainedModel, seed: int) -> None:
    """Make a fresh model's weights tell: matrices large enough for logits to differ, norms and biases not neutral."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in (each for each in model.parameters() if each.is_floating_point()):
        spread = parameter.std().item() if parameter.numel() > 1 else 0.0
        if spread == 0:  # norms, biases, gates: whatever constant they begin with
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        elif parameter.ndim > 1 and spread < 0.1:
            parameter *= 0.1 / spread
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in stored and "bias" in name and buffer.is_floating_point():  # corrections of the choice of experts
            buffer += 0.1 * torch.randn(buffer.shape, generator=generator)
