"""The layers that serving fuses into one GEMM, as a table.

Taken from vLLM, whose classes say it in ``packed_modules_mapping`` and in the stacked parameters of ``load_weights``;
``tests/unit/quant/vllm_groups.json`` has all that they say, and a test compares it with this table. Names are those of
transformers' modules, which for some families differ from those on disk.

Where one class fuses more than another does (q, k and v alone, or with the gate of a linear attention), the row that
names the class comes first. To share scales among layers that one server runs by themselves costs a little precision,
and nothing else: so a row holds for any class, unless its names mean other layers elsewhere.
"""

from typing import NamedTuple

# The version of vLLM whose tables these are.
VLLM_VERSION = "0.33.0"


class FusedLayers(NamedTuple):
    """Layers of one parent that are served as one.

    Attributes:
        members: their names below the parent. A layer that a model does not have is served as if it were one of the
            others (Gemma 4's values are its keys), or not at all.
        classes: how the names of the parents' classes begin; any class where there is none.
    """

    members: tuple[str, ...]
    classes: tuple[str, ...] = ()


GATE_UP = ("gate_proj", "up_proj")
_QKV = ("q_proj", "k_proj", "v_proj")
FUSED: tuple[FusedLayers, ...] = (
    FusedLayers((*_QKV, "g_proj"), ("OlmoHybridGatedDeltaNet",)),
    FusedLayers((*_QKV, "b_proj", "forget_gate.f_a_proj"), ("KimiLinearDeltaAttention",)),
    FusedLayers((*_QKV, "b_proj", "forget_gate.f_a_proj", "g_a_proj"), ("Glm5NextTextLinearAttention",)),
    FusedLayers((*_QKV, "b_proj"), ("BailingHybridDeltaAttention",)),
    FusedLayers((*_QKV, "gate_proj"), ("BeamAttention", "MuseSparkTextAttention")),
    FusedLayers((*_QKV, "r_proj"), ("InklingAttention",)),
    FusedLayers((*_QKV, "indexer.index_qk_proj"), ("Qwen4ExpTextAttention",)),
    FusedLayers(("key_proj", "value_proj"), ("Qwen4ExpTextPLELayer",)),
    FusedLayers(("input_mix_weight_down", "block_inject_weight"), ("Qwen4ExpTextGatedResidual",)),
    FusedLayers(("q_a_proj", "kv_proj"), ("DeepseekV4Attention",)),
    FusedLayers(("kv_proj", "gate_proj"), ("DeepseekV4",)),
    FusedLayers(_QKV),
    FusedLayers(GATE_UP),
    FusedLayers(("w1", "w3")),  # LFM2's gate and up
    FusedLayers(("q_a_proj", "kv_a_proj_with_mqa")),  # latent attention
    FusedLayers(("in_proj_qkv", "in_proj_z")),  # Qwen3.5's linear attention
    FusedLayers(("in_proj_b", "in_proj_a")),
)
