"""Experts in either form against transformers' own, and what must be refused."""

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV4Config, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from model.build import build_model
from model.moe.arrange import _gated_of, arrange_experts
from model.moe.experts import Experts, Form, PerExpertMLPs, StackedMLPs
from model.ranks import RankError
from tests.families.variants import VARIANTS


def clamped_experts(e: int, h: int, i: int, limit: float) -> DeepseekV4Experts:
    """Of a class that clamps gate and up, by a limit that random values exceed."""
    config = DeepseekV4Config(hidden_size=h, moe_intermediate_size=i, n_routed_experts=e, swiglu_limit=limit)
    config._experts_implementation = "eager"
    experts = DeepseekV4Experts(config)
    assert experts.limit == limit
    return experts


class Case:
    """Fused experts of random sizes with random routing, some experts unhit, and the same ones in one of our forms.

    With ``exact_products`` every matrix product is exact in any order, by any kernel: sums of at most 90 integers below
    2^13, which fit in fp32. The weights of the chosen experts stay random, so that the order in which experts are added
    up shows in the last bit.
    """

    def __init__(self, form: Form, dtype: torch.dtype, exact_products: bool = False, clamped: bool = False):
        self.generator = torch.Generator().manual_seed(random.randrange(2**31))
        e, h, i, t = self.integer(2, 9), self.integer(1, 70), self.integer(1, 90), self.integer(1, 60)
        if self.integer(0, 1):  # sides of whole 16 bytes, which the grouped product takes
            h, i = -h % 8 + h, -i % 8 + i
        used = self.integer(1, e)
        k = self.integer(1, used)
        print(f"{e} experts of which {used} can be hit, hidden {h}, intermediate {i}, {t} tokens, top {k}, {dtype}")
        config = Qwen3MoeConfig(hidden_size=h, moe_intermediate_size=i, num_experts=e)
        config._experts_implementation = "eager"
        if clamped:
            self.fused = clamped_experts(e, h, i, limit=0.2).to(dtype)
        else:
            self.fused = Qwen3MoeExperts(config).to(dtype)
        if exact_products:
            self.fused.act_fn = nn.ReLU()
        with torch.no_grad():
            for parameter in self.fused.parameters():
                parameter.copy_(self.values(parameter.shape, exact_products) * (1.0 if exact_products else 0.3))
            of = Experts(e, h, i, self.fused.act_fn, _gated_of(self.fused))
            if form == "stacked":
                stacks = (nn.Parameter(self.fused.gate_up_proj.clone()), nn.Parameter(self.fused.down_proj.clone()))
                self.ours = StackedMLPs(of, stacks)
            else:
                self.ours = PerExpertMLPs(of).to(dtype)
                for expert, mlp in enumerate(self.ours.experts()):
                    mlp.gate_proj.weight.copy_(self.fused.gate_up_proj[expert, :i])
                    mlp.up_proj.weight.copy_(self.fused.gate_up_proj[expert, i:])
                    mlp.down_proj.weight.copy_(self.fused.down_proj[expert])
        hit = torch.randperm(e, generator=self.generator)[:used]
        choose = [hit[torch.randperm(used, generator=self.generator)[:k]] for _ in range(t)]
        self.inputs = self.values((t, h), exact_products).to(dtype)
        self.index, self.weights = torch.stack(choose), torch.rand(t, k, generator=self.generator).to(dtype)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Of our weights, as those of the fused module."""
        if isinstance(self.ours, StackedMLPs):
            return self.ours.gate_up_proj.weight.grad, self.ours.down_proj.weight.grad
        pairs = [
            (torch.cat([m.gate_proj.weight.grad, m.up_proj.weight.grad]), m.down_proj.weight.grad)
            for m in self.ours.experts()
        ]
        return torch.stack([gate_up for gate_up, _ in pairs]), torch.stack([down for _, down in pairs])

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def values(self, shape: Sequence[int], exact_products: bool) -> Tensor:
        """Gaussian, or -1, 0 and 1."""
        if exact_products:
            return torch.randint(-1, 2, tuple(shape), generator=self.generator).float()
        return torch.randn(tuple(shape), generator=self.generator)


FORMS = pytest.mark.parametrize("form", get_args(Form))


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("_", range(10))
def test_bit_equal_to_transformers_where_matrix_products_are(form: Form, dtype: torch.dtype, _: int):
    """Which is all that can be asked: the rows of an expert lie elsewhere in memory there, and gate and up are one
    product. For either, fp32 products of MKL differ in the last bit, in one of ten random cases on some CPUs."""
    case = Case(form, dtype, exact_products=True)
    with torch.no_grad():
        ours, theirs = (module(case.inputs, case.index, case.weights) for module in (case.ours, case.fused))
    assert torch.equal(ours, theirs)


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("_", range(10))
def test_equal_to_transformers_fused_experts(form: Form, dtype: torch.dtype, _: int):
    """Gate and up are one product there, which may add up in another order: fp32 sums of 90 terms differ a little,
    by up to 1.6e-6 of the largest output where they cancel (7,000 draws); swapped experts differ in the first digit.

    In bf16 such a sum is rounded to the next of two values once in a while, 2^-8 apart, and a token adds up several.
    """
    case = Case(form, dtype)
    with torch.no_grad():
        ours, theirs = (module(case.inputs, case.index, case.weights) for module in (case.ours, case.fused))
    tolerance = {torch.float32: 4e-6, torch.bfloat16: 2**-7}[dtype]
    assert (ours - theirs).abs().max() <= tolerance * max(1.0, float(theirs.abs().max()))


@FORMS
@pytest.mark.parametrize("clamped", [False, True])
def test_every_expert_gets_a_gradient_and_it_is_the_fused_one(form: Form, clamped: bool):
    """Zeros where no token chose it: without a gradient ranks would disagree."""
    case = Case(form, torch.float64, clamped=clamped)
    target = torch.randn(case.inputs.shape, generator=case.generator, dtype=torch.float64)
    inputs = [case.inputs.clone().requires_grad_() for _ in range(2)]
    for module, value in zip((case.ours, case.fused), inputs, strict=True):
        (module(value, case.index, case.weights) * target).sum().backward()
    for ours, theirs in zip(case.gradients(), (case.fused.gate_up_proj.grad, case.fused.down_proj.grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-10, atol=1e-12)


WHOLE = ["deepseek_v4", "lfm2_moe", "granitemoe", "nemotron_h", "gpt_oss", "aria_text", "dbrx", "llama4_text"]


@pytest.mark.parametrize("name", WHOLE)
def test_whole_models_compute_what_they_did(seed, name: str):
    """Classes that clamp, whose activation is a plain function, and without a gate; logits and gradients in fp64."""
    theirs = VARIANTS[name].model(seed=seed, dtype=torch.float64)
    theirs.config._experts_implementation = "eager"
    ours = copy.deepcopy(theirs)
    assert arrange_experts(ours, "stacked") > 0
    ids = torch.randint(3, 300, (2, 9))
    found = []
    for model in (ours, theirs):
        logits = model(input_ids=ids, use_cache=False).logits
        logits.square().mean().backward()
        found.append((logits, model.get_input_embeddings().weight.grad))
    for our, their in zip(*found, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-9, atol=1e-11)


@FORMS
def test_experts_without_a_gate_are_added_up_in_the_dtype_of_their_weights(seed, form: Form):
    """As their class does: weights are fp32 there where hidden states are bf16. Products are exact in any order."""
    model = VARIANTS["nemotron_h"].model(seed=seed)
    model.config._experts_implementation = "eager"
    theirs = next(module for module in model.modules() if isinstance(module, NemotronHExperts)).bfloat16()
    e, h, i = theirs.num_experts, theirs.hidden_dim, theirs.intermediate_dim
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape))
    arranged = copy.deepcopy(model)
    assert arrange_experts(arranged, "stacked") == 1
    ours = next(module for module in arranged.modules() if isinstance(module, StackedMLPs))
    assert ours.of.sums_of_weights and not ours.of.has_gate
    if form == "per_expert":
        ours = PerExpertMLPs(ours.of).bfloat16()
        with torch.no_grad():
            for expert, mlp in enumerate(ours.experts()):
                mlp.up_proj.weight.copy_(theirs.up_proj[expert])
                mlp.down_proj.weight.copy_(theirs.down_proj[expert])
    inputs = torch.randint(-1, 2, (19, h)).bfloat16()
    chosen = torch.stack([torch.randperm(e)[:3] for _ in range(19)])
    weights = torch.rand(19, 3)
    with torch.no_grad():
        assert torch.equal(ours(inputs, chosen, weights), theirs(inputs, chosen, weights)), (e, h, i)


@FORMS
def test_no_tokens_at_all(form: Form):
    case = Case(form, torch.float32)
    output = case.ours(case.inputs[:0], case.index[:0], case.weights[:0])
    assert output.shape == case.inputs[:0].shape
    output.sum().backward()
    assert not any(gradient.any() for gradient in case.gradients())


@FORMS
def test_choices_of_no_expert_are_left_out(form: Form):
    """transformers uses the number of experts as "none"."""
    case = Case(form, torch.bfloat16, exact_products=True)
    index = torch.where(torch.rand(case.index.shape, generator=case.generator) < 0.5, case.ours.num_experts, case.index)
    with torch.no_grad():
        ours, theirs = (module(case.inputs, index, case.weights) for module in (case.ours, case.fused))
    assert torch.equal(ours, theirs)


REFUSED = {"longcat_flash": "LongcatFlashExperts", "jetmoe": "JetMoeParallelExperts"}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_layouts_are_refused_by_class_name(kind: str, tmp_path: Path):
    VARIANTS[kind].config().save_pretrained(tmp_path)
    with pytest.raises(RankError, match=rf"\({REFUSED[kind]}\) is a mixture of experts .*not supported"):
        build_model(tmp_path, {}, dtype=torch.float32, device=torch.device("cpu"), attn_implementation="eager")


def test_experts_in_a_module_list_are_refused():
    """Their own caller runs the hit ones only, which is silently wrong when ranks route differently."""
    model = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])})
    with pytest.raises(ValueError, match=r"experts \(ModuleList\) is a mixture of experts"):
        arrange_experts(model, "stacked")


EXPERTS, WIDTH, INNER = 6, 16, 10


class Bank(nn.Module):
    """The weights of all experts in a form of its own, below a name that says nothing."""

    def __init__(self, form: str) -> None:
        super().__init__()
        one = [nn.Linear(WIDTH, INNER, bias=False) for _ in range(EXPERTS)]
        forms = {
            "list": nn.ModuleList(one),
            "dict": nn.ModuleDict({f"e{index}": linear for index, linear in enumerate(one)}),
            "parameters": nn.ParameterList([linear.weight for linear in one]),
            "stack": nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH)),
            "stack_turned": nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER)),
            "rows": nn.Parameter(torch.empty(EXPERTS * INNER, WIDTH)),
        }
        self.w = forms[form]


class Chosen(nn.Module):
    """A block whose picker scores the members of a bank."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.pick, self.bank = nn.Linear(WIDTH, EXPERTS), Bank(form)


def odd_model(form: str, *, says: bool) -> LlamaForCausalLM:
    """A Llama in whose second layer stands such a block; ``says``: its configuration knows of the experts."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    if says:
        config.ffn_config = {"moe_num_experts": EXPERTS, "experts_per_tok": 2}
    model = LlamaForCausalLM(config)
    model.model.layers[1].add_module("odd", Chosen(form))
    return model


@pytest.mark.parametrize("says", (True, False), ids=("named", "unnamed"))
@pytest.mark.parametrize("form", ("list", "dict", "parameters", "stack", "stack_turned", "rows"))
def test_several_experts_in_an_unknown_form_are_refused_by_name(form: str, says: bool):
    """Ranks would run other experts each, and their collectives would not meet."""
    if form == "rows" and not says:
        pytest.skip("rows of experts one below the other look like any matrix without their number")
    model = odd_model(form, says=says)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.odd\.bank(\.w)? \(\w+\) is a mixture of experts"):
        arrange_experts(model, "stacked")


def test_several_parts_that_nobody_chooses_from_are_left_alone():
    """Two attentions and two MLPs in a layer, a norm per head, a matrix per head: they run for every token."""
    model = odd_model("list", says=False)
    odd = model.model.layers[1].odd
    odd.pick = nn.Linear(WIDTH, EXPERTS + 1)
    odd.heads = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(EXPERTS + 1)])
    assert arrange_experts(model, "stacked") == 0


def test_other_modules_are_left_alone():
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Linear(4, 4), nn.ModuleList([nn.Linear(2, 2)]))
    before = list(model)
    assert arrange_experts(model, "per_expert") == 0
    assert list(model) == before
