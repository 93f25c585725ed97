"""Memory predicted before a run: the arithmetic, the step on the meta device, the command."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.timing import kept_bytes
from engine.config.deepspeed import DsConfigError
from engine.config.errors import RecipeError
from engine.config.reading import load_recipe
from launch.memory import main
from model.zero import WHOLE_ELEMENTS, WHOLE_ELEMENTS_IN_ALL, to_be_whole
from quant import SCALE_PARAMETERS, SCHEMES, replace_layers
from tests.lib.recipes import bare_recipe as recipe
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_config
from tools.memory import trace
from tools.memory.model import meta_student, student_events
from tools.memory.planner import RESERVE, Planner
from tools.memory.trace import own_bytes
from tools.memory.zero import Inventory, Settings, ShardedParameter, held_by

REAL = Path(__file__).parent / "configs" / "qwen3_30b_a3b.json"


# ---- bytes held


def settings(stage: int, *, dtype: str = "bf16", accumulation: int = 1, **zero) -> Settings:
    """Four ranks, with fp32 accumulation where a stage has it."""
    config = {
        dtype: {"enabled": True},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, **zero},
        "gradient_accumulation_steps": accumulation,
        **({"data_types": {"grad_accum_dtype": "fp32"}} if stage else {}),
    }
    return Settings.of(config, 4)


def inventory(size: int = 2) -> Inventory:
    """A matrix of 4,000 and one of 1,002 elements that train, a frozen scale of 10."""
    weights = [ShardedParameter("a", 4000, size, True), ShardedParameter("b", 1002, size, True)]
    scale = ShardedParameter("s", 10, 4, False, released=True, whole=True)
    return Inventory([*weights, scale], {"weights": weights}, quantized=5000)


ALL = 5002  # elements that train
FLAT = 5008  # aligned to two for each of 4 ranks
SHARE = FLAT // 4
PART = 1000 + 251  # of each matrix a quarter, padded
SECOND = 2000 + 502  # of each matrix a half, padded for 4 ranks
RELEASED = {"stage3_param_persistence_threshold": 0}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
ALL_OFFLOADED = OFFLOADED | {"offload_param": {"device": "cpu"}}
PERSISTS = {"stage3_param_persistence_threshold": 1002}
HPZ = {"zero_hpz_partition_size": 2}
ITEMS = ("parameters", "gradients", "master weights", "moments", "buckets")
NOTHING = (0, 0, 0, 0, 0)
WHOLE, SPLIT = 2 * FLAT + 40, 2 * PART + 40  # bytes of bf16 parameters and of the scale


@pytest.mark.parametrize(
    ("stage", "dtype", "zero", "device", "host"),
    [
        (0, "bf16", {}, (2 * ALL + 40, 2 * ALL, 4 * ALL, 8 * ALL, 0), NOTHING),
        (0, "fp32", {}, (4 * ALL + 40, 4 * ALL, 0, 8 * ALL, 0), NOTHING),
        (1, "bf16", {}, (WHOLE, 4 * FLAT + 2 * ALL, 4 * SHARE, 8 * SHARE, 0), NOTHING),
        (1, "fp32", {}, (4 * FLAT + 40, 4 * SHARE, 4 * SHARE, 8 * SHARE, 4000), NOTHING),
        (2, "bf16", {}, (WHOLE, 4 * SHARE, 4 * SHARE, 8 * SHARE, 2000), NOTHING),
        (2, "bf16", {"overlap_comm": True}, (WHOLE, 4 * SHARE, 4 * SHARE, 8 * SHARE, 4000), NOTHING),
        (2, "bf16", OFFLOADED, (WHOLE, 4 * SHARE, 0, 0, 10_000), (0, 4 * SHARE, 4 * SHARE, 8 * SHARE, 2 * SHARE)),
        (3, "bf16", RELEASED, (SPLIT, 4 * PART, 4 * PART, 8 * PART, 2000), NOTHING),
        (3, "fp32", RELEASED, (4 * PART + 40, 4 * PART, 4 * PART, 8 * PART, 4000), NOTHING),
        (3, "bf16", PERSISTS, (SPLIT + 2004, 4 * PART, 4 * PART, 8 * PART, 2000), NOTHING),
        (3, "bf16", RELEASED | HPZ, (SPLIT + 2 * SECOND, 4 * PART, 4 * PART, 8 * PART, 2000), NOTHING),
        (3, "bf16", RELEASED | OFFLOADED, (SPLIT, 0, 0, 0, 2000), (0, 8 * PART, 4 * PART, 8 * PART, 0)),
        (3, "bf16", RELEASED | ALL_OFFLOADED, (0, 0, 0, 0, 2000), (SPLIT, 8 * PART, 4 * PART, 8 * PART, 0)),
    ],
)
def test_bytes_held_are_those_of_the_papers_formulas_and_what_deepspeed_adds(stage, dtype, zero, device, host):
    held = held_by(settings(stage, dtype=dtype, **zero), inventory(4 if dtype == "fp32" else 2))
    assert [tuple(place[item] for item in ITEMS) for place in (held.device, held.host)] == [device, host]


def test_an_optimizer_on_nvme():
    """A large group is in files and passes through four buffers; gradients of its small matrices stay on the device."""
    numels = {"a": 4 << 20, "b": 4000, "c": 4002}
    small = [ShardedParameter("d", 4000, 2, True)]
    large = [ShardedParameter(name, numel, 2, True) for name, numel in numels.items()]
    found = Inventory([*large, *small], {"weights": large, "norms": small})
    path = {"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}, "stage3_param_persistence_threshold": 0}
    held = held_by(settings(3, **path), found)
    share = (1 << 20) + 1000 + 1001
    assert held.device["gradients"] == 4 * (1000 + 1001)
    assert held.host["swap buffers"] == 4 * 4 * ((1 << 20) + 2048)  # in whole blocks of 256
    assert held.host["gradients"] == 4 * (share + 1000) + 4 * 1000
    assert (held.host["master weights"], held.host["moments"]) == (4 * 1000, 8 * 1000)
    assert held.device["master weights"] == held.device["moments"] == 0


@pytest.mark.parametrize(
    ("stage", "zero", "blocks"),
    [(0, {}, 16 + 4), (1, {}, 5), (2, {}, 5), (3, {}, 5), (3, {"sub_group_size": 1000}, 4 + 1)],
)
def test_moments_in_8_bits_are_two_codes_and_two_scales_per_block_of_each_tensor(stage, zero, blocks):
    """The matrices have 4,000 and 1,002 elements, of which a rank updates 1,252 and on stage 3 1,251."""
    coded = dataclasses.replace(inventory(), coded=frozenset({"weights"}))
    assert held_by(settings(stage, **zero), coded).device["moments"] == blocks * 2 * (256 + 4)


@pytest.mark.parametrize("stage", range(4))
def test_codes_that_stay_between_micro_batches_count_where_weights_stay(stage):
    codes = [held_by(settings(stage, accumulation=n), inventory()).device["weight codes"] for n in (1, 2)]
    assert codes == [0, 5000 if stage < 3 else 0]


# ---- the step on the meta device


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_equal_layers_are_run_twice_and_counted_as_often_as_they_are(tmp_path, monkeypatch, kind, checkpointing):
    train = {"activation_checkpointing": checkpointing}
    student = meta_student(recipe(tmp_path, kind, train=train))
    short = student_events(student, None, 2).events
    assert student.model.config.num_hidden_layers == 6 == len(student.model.model.layers)
    monkeypatch.setattr(trace, "REPRESENTATIVES", 6)
    whole = student_events(student, None, 2).events
    assert [(event.kind, event.name) for event in short] == [(event.kind, event.name) for event in whole]
    torch.testing.assert_close(own_bytes(short), own_bytes(whole), rtol=0, atol=0)


def peak(directory: Path, kind: str = "qwen3", **sections) -> int:
    """The most bytes of a step of the student of two rows."""
    return int(own_bytes(student_events(meta_student(recipe(directory, kind, **sections)), None, 2).events).max())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_experts_in_every_dtype_take_the_memory_that_their_size_says(tmp_path, dtype):
    """On the meta device torch multiplies groups in bf16 alone."""
    quant = {"scheme": "w8a16_channel"}
    other, bf16 = (
        peak(tmp_path, "qwen3_moe", model={"path": str(tmp_path / "model"), "dtype": one}, quant=quant)
        for one in (dtype, "bfloat16")
    )
    assert (1 if dtype == "float16" else 1.3) * 0.9 < other / bf16 < 2.2


def test_checkpointing_keeps_less_and_masks_take_their_bytes(tmp_path):
    plain = peak(tmp_path, data={"max_length": 256})
    assert peak(tmp_path, data={"max_length": 256}, train={"activation_checkpointing": True}) < plain
    # A mask that is added, in bf16, is kept by each of 6 layers.
    padded = peak(tmp_path, data={"max_length": 256, "kind": "chat"})
    assert padded - plain >= 2 * 256 * 256 * 6 * 2


def test_masks_take_their_bytes_if_the_router_trains_too(tmp_path):
    """Its auxiliary loss reads a mask of two dimensions, from which the model makes the other."""
    data = [{"max_length": 256, "kind": kind} for kind in ("text", "chat")]
    with_router, without = (
        [peak(tmp_path, "qwen3_moe", data=one, learnable={"router": trains}) for one in data]
        for trains in (True, False)
    )
    assert with_router[1] - with_router[0] >= 0.9 * (without[1] - without[0]) > 0


# ---- scales


def test_activations_are_shared_with_the_rows(tmp_path):
    """All of them: each of N ranks has 1 / N of the tokens, and in attention 1 / N of the heads."""
    tiny_config("llama", even=True, layers=6).save_pretrained(tmp_path)
    found = []
    for ranks in (1, 2, 4):
        own = {"data": {"max_length": 2048}, "parallel": {"sequence": ranks}}
        planner = Planner(recipe(tmp_path, tmp_path / "config.json", **own))
        moments = planner.predict("zero1", 4).moments
        found.append(max(moments[phase].parts["activations"] for phase in ("forward", "backward")))
    for ranks, size in zip((2, 4), found[1:], strict=True):
        assert size == pytest.approx(found[0] / ranks, rel=0.1), found
    with pytest.raises(RecipeError, match="expected a divisor of the number of ranks, which is 6"):
        planner.predict("zero1", 6)


def test_scales_over_the_limit_are_shared_out_as_in_a_run(tmp_path):
    """36 layers with a scale for 32 weights, on every rank as many as model.zero makes whole."""
    sides = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    config = Qwen3Config(num_hidden_layers=36, intermediate_size=3072, vocab_size=300, **sides)
    config.save_pretrained(tmp_path / "large")
    planner = Planner(recipe(tmp_path, tmp_path / "large" / "config.json", quant={"scheme": "w4a16_g32"}))
    model, modules = planner.student.model, planner.student.quantization.modules.values()
    named = [pair for module in modules for pair in module.named_parameters(recurse=False)]
    scales = {id(parameter) for name, parameter in named if name in SCALE_PARAMETERS}
    ids = {id(parameter) for parameter in to_be_whole(p for p in model.parameters() if id(p) in scales)}
    whole = [p for p in planner.inventory.parameters if p.whole]
    assert {p.name for p in whole} == {name for name, parameter in model.named_parameters() if id(parameter) in ids}
    assert 0 <= WHOLE_ELEMENTS_IN_ALL - sum(p.numel for p in whole) < WHOLE_ELEMENTS
    shared = [p for p in planner.inventory.parameters if p.released and not p.trains and not p.whole]
    assert shared and max(p.numel for p in shared) <= WHOLE_ELEMENTS
    assert {p.share(8) * 8 for p in shared} == {4 * p.numel for p in shared}


def zero3(directory: Path, **options) -> str:
    """A configuration of stage 3 in which nothing persists."""
    path = directory / "zero3.json"
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **options}
    path.write_text(json.dumps({"zero_optimization": zero}))
    return str(path)


def test_codes_travel_as_bytes(tmp_path):
    """Weights of quantized layers take half, each in forward and in backward, and nothing else does."""
    config = zero3(tmp_path, stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=0)
    planners = [Planner(recipe(tmp_path, quant={"quantized_all_gather": codes})) for codes in (False, True)]
    as_they_are, as_codes = (planner.predict(config, 2).cost.traffic for planner in planners)
    weights = sum(layer.weight.numel() for layer in planners[1].student.quantization.layers.values())
    assert as_codes == {**as_they_are, "all_gather": as_they_are["all_gather"] - 2 * weights}
    with pytest.raises(DsConfigError, match=r"zero3: quant\.quantized_all_gather: true, expected false: no layer"):
        planners[1].predict("zero3", 2)  # all persist


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_codes_of_inputs_are_kept_instead_of_these(tmp_path, attention):
    """quant.keep_codes saves what it saves in a model that computes: of o_proj nothing where attention keeps its input
    anyway, which it does behind the Functions around modules here and on stage 3, too."""
    predicted, counted = [], []
    for kept in (False, True):
        own = {"path": str(tmp_path / "model"), "attn_implementation": attention}
        quant = {"scheme": "fp8_dynamic", "keep_codes": kept}
        events = student_events(meta_student(recipe(tmp_path, model=own, quant=quant)), None, 2).events
        predicted.append(events[[event.kind for event in events].index("loss")].live)
        config = tiny_config("qwen3", layers=6)
        config._attn_implementation = attention
        model = Qwen3ForCausalLM(config).bfloat16().train()
        for layer in replace_layers(
            model, SCHEMES["fp8_dynamic"], learn_weight_scale=True, learn_input_scale=False
        ).layers:
            model.get_submodule(layer).dynamic_codes = kept
        counted.append(kept_bytes(lambda model=model: model(torch.zeros(2, 64, dtype=torch.int64)).logits, model))
    assert predicted[0] - predicted[1] == counted[0] - counted[1] > 0


def test_attention_without_a_known_node_in_the_graph(tmp_path):
    """flex_attention's, as its output is a graph of its own in a run: the codes of o_proj's inputs are counted."""
    quant = {"scheme": "fp8_dynamic", "keep_codes": True}
    flex, flash, sdpa = (
        peak(tmp_path, model={"path": str(tmp_path / "model"), "attn_implementation": attention}, quant=quant)
        for attention in ("flex_attention", "flash_attention_2", "sdpa")
    )
    assert flex > flash == sdpa


def test_norms_that_write_codes_keep_less(tmp_path):
    plain, fused = (
        Planner(recipe(tmp_path, quant={"fuse_norms": on})).predict("zero0", 1).peak for on in (False, True)
    )
    assert fused < plain


# ---- the whole


def test_the_largest_micro_batch_is_the_last_that_fits(tmp_path):
    planner = Planner(recipe(tmp_path, data={"max_length": 64}))
    limit = RESERVE + 2 * planner.predict("zero2", 2).peak
    rows = planner.predict("zero2", 2, gpu_bytes=limit).largest_micro_batch
    assert rows is not None and rows > 8  # so that every chunk of the losses is full

    def peak(rows: int) -> int:
        data = dataclasses.replace(planner.recipe.data, micro_batch_size=rows)
        return Planner(dataclasses.replace(planner.recipe, data=data)).predict("zero2", 2).peak

    assert peak(rows) + RESERVE <= limit < peak(rows + 1) + RESERVE
    assert planner.predict("zero2", 2, gpu_bytes=RESERVE).largest_micro_batch == 0


def test_a_teacher_is_held_and_gathered(tmp_path):
    with_teacher = {"kd_weight": 1.0, "teacher": str(tmp_path / "model")}
    planner = Planner(recipe(tmp_path, loss=with_teacher))
    assert planner.teacher is not None
    size = sum(p.numel() * p.element_size() for p in planner.teacher.model.parameters())
    size += planner.teacher.head.weight.numel() * 2
    assert planner.predict("zero0", 2).held.device["teacher"] == size
    share = planner.predict(zero3(tmp_path), 2).held.device["teacher"]
    assert size / 2 <= share <= size / 2 + 2 * len(list(planner.teacher.model.parameters()))


def test_a_real_model_is_counted_exactly_without_its_weights(tmp_path):
    """The recipe of Qwen3-30B-A3B with a teacher, for 8 GPUs of 80 GB."""
    (tmp_path / "config.json").write_bytes(REAL.read_bytes())
    shipped = load_recipe(ROOT / "launch" / "recipes" / "qwen3_30b_a3b.yaml")
    shipped.model.path = shipped.loss.teacher = str(tmp_path)
    planner = Planner(shipped)
    scales = [p for p in planner.inventory.parameters if "theta" in p.name or "_s0" in p.name]
    weights = [p for p in planner.inventory.parameters if "theta" not in p.name and "_s0" not in p.name]
    assert sum(p.numel for p in weights) == 30_532_122_624  # as its model card says, 30.5B
    assert 0 < sum(p.numel * p.size for p in scales) < 10**6
    predicted = planner.predict(shipped.deepspeed, 8)
    # Of weights 2, gradients 4 and masters 4 bytes, and moments of 2, or 8 of embeddings; beside them 2 of the teacher.
    states = sum(predicted.held.device.values()) - predicted.held.device["buckets"]
    assert states == pytest.approx((14 * 30.532e9 + 6 * 2 * 151_936 * 2048) / 8, rel=0.01)
    assert predicted.peak + RESERVE < 70e9


def test_the_command(tmp_path, capsys):
    recipe(tmp_path)
    run = ["--config", str(tmp_path / "recipe.yaml"), "--ranks", "2"]
    main([*run, "--gpu_gb", "80", "--strategies", "zero2,zero3"])
    text = capsys.readouterr().out
    assert "| GB per rank" in text and "| largest micro-batch |" in text and "reserve: 4 GB" in text
    assert "zero2" in text and "zero3" in text and "zero1" not in text
    with pytest.raises(SystemExit, match="2"):  # as launch/train.py ends
        main([*run, "--model.path", str(tmp_path / "nowhere")])
    assert "error: model.path" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*run, "--measured", str(tmp_path / "recipe.yaml")])
    assert "error: --measured" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*run, "--measured", "memory.json", "--gpu_gb", "80"])
    assert "error: --gpu_gb has no effect with --measured" in capsys.readouterr().err
    for memory in ("nan", "-3", "0", "inf"):
        with pytest.raises(SystemExit, match="2"):
            main([*run, f"--gpu_gb={memory}"])
        assert f"error: --gpu_gb: {float(memory)}, expected the memory of a GPU" in capsys.readouterr().err
