"""Layers of a student that are quantized, and that train: families of transformers, built on the meta device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import z3_leaf_module

from engine.session.optimizer import classify
from engine.session.student import quantized_share
from model.ranks import RankError
from tests.families.variants import VARIANTS
from tests.lib.recipes import minimal
from tools.memory.model import MetaStudent, meta_student


def student_of(name: str, directory: Path, **sections: Any) -> MetaStudent:
    VARIANTS[name].config().save_pretrained(directory)
    return meta_student(minimal(model={"path": str(directory)}, **sections))


@pytest.mark.parametrize("name", ("hunyuan_v1_moe", "afmoe", "qwen2_moe", "phimoe"))
def test_routers_are_neither_quantized_nor_trained(name: str, tmp_path: Path):
    student = student_of(name, tmp_path, learnable={"norm": True})
    routers = {owned.name: owned.parameter for owned in classify(student.model) if owned.kind == "router"}
    assert any(parameter.dim() > 1 for parameter in routers.values())
    assert not any(parameter.requires_grad for parameter in routers.values())
    below = {router.rpartition(".")[0] for router in routers}
    assert below.isdisjoint(student.quantization.layers)
    others = [layer for layer in student.quantization.layers if "_proj" not in layer]
    assert not any(".gate" in layer or "router" in layer for layer in others)


def test_the_share_of_the_matrices_that_is_quantized(tmp_path: Path):
    student = student_of("qwen3_moe", tmp_path, quant={"exempt_more": [r".*\.o_proj"]})
    share = quantized_share(student.model, student.quantization)
    # Two layers, 64 wide: q 64 x 64, k and v 32 x 64; four experts of three matrices of 64 x 32.
    assert share.parameters == {
        "attention": (2 * 2 * 64 * 64, 2 * 3 * 64 * 64),
        "MLP": (0, 0),
        "experts": (2 * 4 * 3 * 64 * 32,) * 2,
        "other": (0, 0),
    }
    assert list(share.lines()) == [
        "quantized: 88.9% of the 73,728 parameters in the decoder's matrices "
        "(attention 16,384 of 24,576, experts 49,152 of 49,152)"
    ]
    student = student_of("qwen3", tmp_path, quant={"exempt_more": [r".*\.mlp\..*"]})
    _, warning = quantized_share(student.model, student.quantization).lines()
    assert "60.0% of the decoder's matrices are not quantized" in warning
    assert "model.layers.*.mlp.gate_proj.weight (12,288)" in warning


NO_LINEARS = {"exempt_more": [r".*_proj", r".*\.experts\..*"]}
TURNED = {"scheme": "w4a16_channel", "lm_head": "w8a16_channel", "rotate": ["lm_head"], "rotate_block": 64}
NOTHING = r"nothing to quantize: .* Qwen3MoeForCausalLM is exempt.* are in .*Router"
NO_NAME = r"learnable\.freeze: .* matches no parameter.*model\.embed_tokens\.weight"


@pytest.mark.parametrize(
    ("name", "sections", "said"),
    [
        ("qwen3_moe", {"quant": {"scheme": "fp8_static", **NO_LINEARS}}, NOTHING),
        # Keys and values alone would be quantized.
        ("qwen3_moe", {"quant": {"scheme": "fp8_static_kv", **NO_LINEARS}}, NOTHING),
        ("qwen3", {"learnable": {"freeze": [r"layers\.0\.mlp"]}}, NO_NAME),
        ("qwen3", {"learnable": {"freeze": [r".*\.o_proj\.input_theta"]}}, NO_NAME),
        # Its losses are computed from its weight, and an input that no layer turns.
        ("llama", {"quant": TURNED}, r"quant\.rotate: the input of lm_head cannot be rotated"),
    ],
)
def test_refused(name: str, sections: dict[str, Any], said: str, tmp_path: Path):
    with pytest.raises((RankError, ValueError), match=said):
        student_of(name, tmp_path, **sections)


def test_the_output_layer_stays_as_it_is_whatever_it_is_called(tmp_path: Path):
    student = student_of("rwkv", tmp_path, quant={"exempt": [r".*\.key"]})
    assert "head" in student.quantization.exempt and "head" not in student.quantization.layers


def test_what_chooses_tokens_of_sparse_attention_is_exempt_and_does_not_train(tmp_path: Path):
    """transformers runs it without gradients, so that weight decay alone would move it; serving keeps it as it is."""
    student = student_of("deepseek_v32", tmp_path)
    chosen = {name: value for name, value in student.model.named_parameters() if ".indexer." in name}
    assert len(chosen) >= 3 and not any(".indexer." in name for name in student.quantization.layers)
    assert not any(parameter.requires_grad for parameter in chosen.values())
    model = VARIANTS["deepseek_v32"].model()
    model(input_ids=torch.randint(3, 300, (1, 20)), use_cache=False).logits.square().mean().backward()
    assert chosen.keys() <= {name for name, parameter in model.named_parameters() if parameter.grad is None}


def test_what_serving_runs_in_one_gemm_with_q_k_and_v_is_quantized_with_them(tmp_path: Path):
    """And its scales do not train: it is gathered whole, and ZeRO-3 would lose what reaches them from q, k and v."""
    learnable = {"weight_scale": True, "act_scale": True}
    student = student_of("qwen4_exp_text", tmp_path, learnable=learnable)
    quantized = student.quantization.layers
    chosen = {name: layer for name, layer in quantized.items() if name.endswith(".indexer.index_qk_proj")}
    assert chosen
    for name, layer in chosen.items():
        block = name.removesuffix(".indexer.index_qk_proj")
        assert all(quantized[f"{block}.{leaf}"].weight_theta is layer.weight_theta for leaf in ("q_proj", "v_proj"))
        assert not layer.weight_theta.requires_grad and not layer.input_theta.requires_grad
        assert quantized[f"{block}.o_proj"].weight_theta.requires_grad
        assert z3_leaf_module(student.model.get_submodule(f"{block}.indexer"))


@pytest.mark.parametrize("name", ("granitemoehybrid, dense", "qwen3_moe"))
def test_the_auxiliary_loss_is_asked_for_where_a_router_gives_logits(name: str, tmp_path: Path, capsys):
    student = student_of(name, tmp_path, learnable={"router": True})
    asked = student.model.config.output_router_logits
    assert asked == (name == "qwen3_moe") != ("no router of it gives logits" in capsys.readouterr().out)
    model = VARIANTS[name].model()
    model.config.output_router_logits = asked
    found = model(input_ids=torch.randint(3, 300, (1, 8)), use_cache=False)
    assert (found.aux_loss is not None) == asked


@pytest.mark.parametrize(("name", "computed"), [("glm4_moe", False), ("deepseek_v3", False), ("mixtral", True)])
def test_a_family_without_auxiliary_loss_is_named(name: str, computed: bool, tmp_path: Path, capsys):
    student_of(name, tmp_path, learnable={"router": True})
    warned = "transformers computes no auxiliary loss for it: routers train without load balancing"
    assert (warned in capsys.readouterr().out) != computed


@pytest.mark.parametrize(
    ("name", "fixed"),
    [
        ("ernie4_5_moe", "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"),
        ("afmoe", "model.layers.1.mlp.expert_bias"),
        ("hrm_text", "model.z_L_init"),
    ],
)
def test_what_the_class_has_frozen_stays_so_and_is_said(name: str, fixed: str, tmp_path: Path, capsys):
    """It gets no gradient: weight decay alone would move it."""
    student = student_of(name, tmp_path, learnable={"norm": True, "router": name != "hrm_text"})
    parameters = dict(student.model.named_parameters())
    assert not parameters[fixed].requires_grad
    assert sum(parameter.requires_grad for parameter in parameters.values()) > 20
    assert f"frozen by the model's class: {fixed}" in capsys.readouterr().out


def test_parameters_are_frozen_by_name(tmp_path: Path):
    patterns = [r"model\.layers\.0\..*", r".*\.q_proj\.weight_theta"]
    student = student_of("qwen3", tmp_path, learnable={"norm": True, "freeze": patterns})
    trained = {name for name, value in student.model.named_parameters() if value.requires_grad}
    assert "model.layers.1.self_attn.q_proj.weight" in trained and "model.embed_tokens.weight" in trained
    assert not any(".layers.0." in name or ".q_proj.weight_theta" in name for name in trained)
