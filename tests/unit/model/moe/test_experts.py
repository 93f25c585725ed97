"""Experts in both forms compared with transformers' own, and layouts that must be refused."""

import copy
import random
from pathlib import Path
from typing import NamedTuple, get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV4Config, LlamaConfig, LlamaForCausalLM, PretrainedConfig, Qwen3MoeConfig
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from model.moe.arrange import _gated_of, arrange_experts
from model.moe.experts import ExpertRows, Experts, Form, PerExpertMLPs, StackedMLPs
from model.ranks import RankError
from tests.families.variants import VARIANTS
from tests.lib.checkpoints import build
from tests.lib.counting import Counting

FORMS = pytest.mark.parametrize("form", get_args(Form))


class Case(NamedTuple):
    """Fused experts of transformers, the same ones in one of our forms, and what goes into both."""

    ours: StackedMLPs | PerExpertMLPs
    fused: nn.Module
    hidden: Tensor
    chosen: Tensor
    weights: Tensor

    def outputs(self, chosen: Tensor | None = None) -> list[Tensor]:
        chosen = self.chosen if chosen is None else chosen
        with torch.no_grad():
            return [module(self.hidden, chosen, self.weights) for module in (self.ours, self.fused)]

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Gradients of our weights, in the layout of the fused module."""
        if isinstance(self.ours, StackedMLPs):
            return self.ours.gate_up_proj.weight.grad, self.ours.down_proj.weight.grad
        mlps = list(self.ours.children())
        gate_up = [torch.cat([mlp.gate_proj.weight.grad, mlp.up_proj.weight.grad]) for mlp in mlps]
        return torch.stack(gate_up), torch.stack([mlp.down_proj.weight.grad for mlp in mlps])


@torch.no_grad()
def case(form: Form, dtype: torch.dtype, *, exact: bool = False, clamped: bool = False) -> Case:
    """Experts of random sizes with random routing, some of them unhit.

    With ``exact`` every matrix product is exact in any order, by any kernel: sums of at most 90 integers below 2^13,
    which fit in fp32. The weights of the chosen experts stay random, so that the order in which experts are added up
    shows in the last bit. ``clamped``: gate and up, by a limit that random values exceed.
    """
    e, h, i, t = (random.randint(*bounds) for bounds in ((2, 9), (1, 70), (1, 90), (1, 60)))
    if random.random() < 0.5:  # sides of whole 16 bytes, which the grouped product takes
        h, i = -h % 8 + h, -i % 8 + i
    used = random.randint(1, e)
    k = random.randint(1, used)
    print(f"{e} experts of which {used} can be hit, hidden {h}, intermediate {i}, {t} tokens, top {k}, {dtype}")
    config: PretrainedConfig = Qwen3MoeConfig(hidden_size=h, moe_intermediate_size=i, num_experts=e)
    if clamped:
        config = DeepseekV4Config(hidden_size=h, moe_intermediate_size=i, n_routed_experts=e, swiglu_limit=0.2)
    config._experts_implementation = "eager"
    fused = (DeepseekV4Experts if clamped else Qwen3MoeExperts)(config).to(dtype)
    assert not clamped or fused.limit == 0.2

    def values(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape).float() if exact else torch.randn(shape)

    if exact:
        fused.act_fn = nn.ReLU()
    for parameter in fused.parameters():
        parameter.copy_(values(*parameter.shape) * (1.0 if exact else 0.3))
    of = Experts(e, h, i, fused.act_fn, _gated_of(fused))
    if form == "stacked":
        stacks = (nn.Parameter(fused.gate_up_proj.clone()), nn.Parameter(fused.down_proj.clone()))
        ours: StackedMLPs | PerExpertMLPs = StackedMLPs(of, stacks)
    else:
        ours = PerExpertMLPs(of).to(dtype)
        for expert, mlp in enumerate(ours.children()):
            mlp.gate_proj.weight.copy_(fused.gate_up_proj[expert, :i])
            mlp.up_proj.weight.copy_(fused.gate_up_proj[expert, i:])
            mlp.down_proj.weight.copy_(fused.down_proj[expert])
    hit = torch.randperm(e)[:used]
    chosen = torch.stack([hit[torch.randperm(used)[:k]] for _ in range(t)])
    return Case(ours, fused, values(t, h).to(dtype), chosen, torch.rand(t, k).to(dtype))


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_transformers_fused_experts(form: Form, dtype: torch.dtype):
    """Bit-equal where matrix products are exact in any order. Elsewhere fp32 sums of 90 terms differ by up to 1.6e-6 of
    the largest output where they cancel (7,000 draws; MKL's products differ in the last bit in one of ten cases on some
    CPUs), and in bf16 such a sum is occasionally rounded to a neighbor, 2^-8 apart. Swapped experts differ in the first
    digit."""
    for _ in range(10):
        ours, theirs = case(form, dtype, exact=True).outputs()
        assert torch.equal(ours, theirs)
        ours, theirs = case(form, dtype).outputs()
        tolerance = {torch.float32: 4e-6, torch.bfloat16: 2**-7}[dtype]
        assert (ours - theirs).abs().max() <= tolerance * max(1.0, float(theirs.abs().max()))


@FORMS
@pytest.mark.parametrize("clamped", [False, True])
def test_every_expert_gets_a_gradient_and_it_is_the_fused_one(form: Form, clamped: bool):
    """Zeros where no token chose it: without a gradient ranks would disagree."""
    one = case(form, torch.float64, clamped=clamped)
    target = torch.randn(one.hidden.shape, dtype=torch.float64)
    inputs = [one.hidden.clone().requires_grad_() for _ in range(2)]
    for module, value in zip((one.ours, one.fused), inputs, strict=True):
        (module(value, one.chosen, one.weights) * target).sum().backward()
    for ours, theirs in zip(one.gradients(), (one.fused.gate_up_proj.grad, one.fused.down_proj.grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-10, atol=1e-12)


@FORMS
def test_no_tokens_and_choices_of_no_expert(form: Form):
    """transformers uses the number of experts as "none"."""
    one = case(form, torch.float32)
    output = one.ours(one.hidden[:0], one.chosen[:0], one.weights[:0])
    assert output.shape == one.hidden[:0].shape
    output.sum().backward()
    assert not any(gradient.any() for gradient in one.gradients())
    one = case(form, torch.bfloat16, exact=True)
    none = torch.rand(one.chosen.shape) < 0.5
    assert torch.equal(*one.outputs(torch.where(none, one.ours.num_experts, one.chosen)))


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
    arranged = copy.deepcopy(model)
    assert arrange_experts(arranged, form) == 1
    ours = next(module for module in arranged.modules() if isinstance(module, StackedMLPs | PerExpertMLPs)).bfloat16()
    assert ours.of.sums_of_weights and not ours.of.has_gate
    with torch.no_grad():
        for stack in ("up_proj", "down_proj"):
            value = getattr(theirs, stack).copy_(torch.randint(-1, 2, getattr(theirs, stack).shape))
            if form == "stacked":
                getattr(ours, stack).weight.copy_(value)
            else:
                for mlp, matrix in zip(ours.children(), value, strict=True):
                    getattr(mlp, stack).weight.copy_(matrix)
        inputs = torch.randint(-1, 2, (19, theirs.hidden_dim)).bfloat16()
        chosen = torch.stack([torch.randperm(theirs.num_experts)[:3] for _ in range(19)])
        weights = torch.rand(19, 3)
        assert torch.equal(ours(inputs, chosen, weights), theirs(inputs, chosen, weights))


@pytest.mark.parametrize(
    ("kind", "named"), [("longcat_flash", "LongcatFlashExperts"), ("jetmoe", "JetMoeParallelExperts")]
)
def test_other_layouts_are_refused_by_class_name(kind: str, named: str, tmp_path: Path):
    VARIANTS[kind].config().save_pretrained(tmp_path)
    with pytest.raises(RankError, match=rf"\({named}\) is a mixture of experts .*not supported"):
        build(tmp_path, torch.float32, attn_implementation="eager")


EXPERTS, WIDTH, INNER = 6, 16, 10
FORMS_OF_BANKS = ("list", "dict", "parameters", "stack", "stack_transposed", "rows")


class Own(nn.Module):
    """A class that is not torch's."""


def odd_model(form: str, *, says: bool) -> LlamaForCausalLM:
    """A Llama whose second layer has a block whose picker scores the members of a bank: the weights of all experts in a
    form of its own, below a name that says nothing. ``says``: its configuration knows of the experts."""
    sizes = {"vocab_size": 32, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2)
    if says:
        config.ffn_config = {"moe_num_experts": EXPERTS, "experts_per_tok": 2}
    model = LlamaForCausalLM(config)
    one = [nn.Linear(WIDTH, INNER, bias=False) for _ in range(EXPERTS)]
    bank, odd = Own(), Own()
    bank.w = {
        "list": nn.ModuleList(one),
        "dict": nn.ModuleDict({f"e{index}": linear for index, linear in enumerate(one)}),
        "parameters": nn.ParameterList([linear.weight for linear in one]),
        "stack": nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH)),
        "stack_transposed": nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER)),
        "rows": nn.Parameter(torch.empty(EXPERTS * INNER, WIDTH)),
    }[form]
    odd.pick, odd.bank = nn.Linear(WIDTH, EXPERTS), bank
    model.model.layers[1].add_module("odd", odd)
    return model


@pytest.mark.parametrize(
    ("form", "says"),
    # Rows of experts one below the other look like any matrix without their number.
    [(form, says) for form in FORMS_OF_BANKS for says in (True, False) if says or form != "rows"],
)
def test_several_experts_in_an_unknown_form_are_refused_by_name(form: str, says: bool):
    """Ranks would run other experts each, and their collectives would not meet."""
    model = odd_model(form, says=says)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.odd\.bank(\.w)? \(\w+\) is a mixture of experts"):
        arrange_experts(model, "stacked")


def test_several_parts_without_a_choice_are_left_alone():
    """Two attentions and two MLPs in a layer, a norm per head, a matrix per head: they run for every token."""
    model = odd_model("list", says=False)
    odd = model.model.layers[1].odd
    odd.pick = nn.Linear(WIDTH, EXPERTS + 1)
    odd.heads = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(EXPERTS + 1)])
    assert arrange_experts(model, "stacked") == 0


def test_lists_named_experts_are_refused_and_other_modules_left_alone():
    """Their own caller runs the hit ones only, which is silently wrong when ranks route differently."""
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Linear(4, 4), nn.ModuleList([nn.Linear(2, 2)]))
    before = list(model)
    assert arrange_experts(model, "per_expert") == 0
    assert list(model) == before
    model = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])})
    with pytest.raises(ValueError, match=r"experts \(ModuleList\) is a mixture of experts"):
        arrange_experts(model, "stacked")


def test_rows_are_grouped_by_expert_and_moves_are_those_of_indexing():
    """Values and gradients, bit for bit: autograd adds in the order of the rows here, since torch uses one thread for
    tensors of this size. Some experts are not chosen, some tokens choose one twice, or there are none."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16) * 10:
        tokens, experts, width = random.randint(0, 40), random.randint(1, 9), random.randint(1, 33)
        chosen = torch.randint(random.randint(1, experts), (tokens, random.randint(1, 4)))
        where = ExpertRows.of(chosen, experts)
        assert where.expert.equal(chosen.t().reshape(-1).sort().values)
        assert where.offsets.equal(torch.bincount(where.expert, minlength=experts).cumsum(0).int())
        assert where.choice[where.row].equal(torch.arange(chosen.numel()))
        assert where.arranged(chosen).equal(where.expert)
        assert where.token[where.of_token].equal(torch.arange(tokens)[:, None].expand_as(chosen))
        assert where.expert[where.of_token].equal(chosen.sort(dim=-1).values)

        numbers = torch.randn(chosen.shape, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(where.arranged, (numbers,))
        hidden, factors = torch.randn(tokens, width).to(dtype), torch.randn(chosen.numel(), 1).to(dtype)
        target = torch.randn(width, tokens).to(dtype).t()  # gradients come as views too
        ours, theirs = (hidden.clone().requires_grad_() for _ in range(2))
        found, rows = where.summed(where.spread(ours) * factors), theirs[where.token] * factors
        expected = torch.zeros_like(hidden)
        for column in where.of_token.unbind(1):
            expected = expected + rows[column]
        for result in (found, expected):
            result.backward(target)
        assert torch.equal(found, expected) and torch.equal(ours.grad, theirs.grad)


def test_nothing_is_accumulated_at_indices():
    """An accumulation sorts on a GPU, or adds in any order. The host waits for nothing: the meta device has no
    values."""
    of = Experts(4, 16, 8, nn.functional.silu)
    weights = (nn.Parameter(torch.empty(shape, device="meta")) for shape in of.shapes().values())
    experts = StackedMLPs(of, weights)
    hidden, factors = (torch.empty(6, size, device="meta", requires_grad=True) for size in (16, 2))
    chosen = torch.zeros(6, 2, dtype=torch.int64, device="meta")
    with Counting() as called:
        experts(hidden, chosen, factors).sum().backward()
    assert hidden.grad is not None and factors.grad is not None
    assert not any("scatter_add" in name for name in called.launches)
    # Numbers of rows are put at indices; autograd of indexing would accumulate gradients by a second such call.
    assert sum(count for name, count in called.launches.items() if "index_put" in name) == 1
    # Rows are gathered once there and once back, and so are the weights; sums are one pass.
    assert called.launches["sum_rows"] == 2 and called.launches["index_select"] == 4
