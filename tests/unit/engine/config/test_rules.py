"""Contradictions between options and options without effect, each refused by one line; defaults are never refused."""

import ast
import inspect
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from engine.config import rules
from engine.config.config import Recipe
from engine.config.errors import ONLY_WITH
from engine.config.quant import QUANTIZES
from engine.config.reading import parse_recipe
from tests.unit.engine.config.recipes import minimal, refusal, write

TraceFunction = Callable[[FrameType, str, Any], Any]

LORA = "--adapter.kind lora"
BESIDE = f"{LORA} --adapter.merge false --quant.scheme w4a16_g32"
CODES = f"{BESIDE} --adapter.base quantized"
GPTQ = "--quant.init gptq --quant.scheme w4a16_g32"
FOLLOW = "--quant.scales_follow_weights true"
NEVER = "--quant.fake_quant_start -1"
KD = "--loss.kd_weight 1 --loss.teacher t"
SELF = "--loss.kd_weight 1 --loss.teacher self"
CACHE = "--loss.kd_weight 1 --loss.top_k 5 --loss.teacher_cache c"
EVALUATED = "--eval.every 2 --data.held_out 5"
ROTATED = r"--quant.rotate ['.*\.down_proj']"

# Options that contradict each other, and how the line begins that says so.
CONTRADICTIONS = [
    ("--data.fields '{prompt: question}'", "data.fields: {'prompt': 'question'}, expected "),
    ("--data.weights [1,2]", "data.weights: [1.0, 2.0], expected one per file of data.train"),
    (
        "--data.packing true --data.micro_batch_size 2 --model.attn_implementation flash_attention_2",
        "data.micro_batch_size: 2, expected 1 with data.packing and model.attn_implementation flash_attention_2",
    ),
    # Steps and rates.
    ("--optim.schedule wsd --optim.decay_steps 0", "optim.decay_steps: 0, expected at least 1"),
    ("--optim.warmup_steps 11", "optim.warmup_steps: 11, expected at most 10 (train.steps)"),
    ("--optim.schedule wsd --optim.decay_steps 11", "optim.decay_steps: 11, expected at most 10 (train.steps)"),
    (
        "--optim.schedule wsd --optim.warmup_steps 6 --optim.decay_steps 5",
        "optim.warmup_steps, optim.decay_steps: 6 and 5 together, expected at most 10 (train.steps)",
    ),
    ("--optim.weight_decay 2 --optim.lr 1", "optim.weight_decay: 2.0, expected at most 1: a step takes so much of"),
    ("--optim.weight_decay 2 --optim.embedding_lr 1", "optim.weight_decay: 2.0, expected at most 1: a step takes so"),
    (
        "--optim.weight_decay 2 --schedule '[{at: 1, lr: {weights: 1}}]'",
        "optim.weight_decay: 2.0, expected at most 1: a step takes so",
    ),
    # What learns.
    (
        "--learnable.weight false --learnable.weight_scale false",
        "learnable: nothing is learnable, expected at least one of weight, weight_scale, act_scale, norm, router to be",
    ),
    (
        f"--learnable.weight false {NEVER}",
        "quant.fake_quant_start: -1 (never), expected 0 or more with learnable.weight false: only scales learn",
    ),
    (
        "--quant.scheme fp8_kv --learnable.weight false",
        "learnable: only weight_scale is true, expected act_scale, weight or norm too: quant.scheme fp8_kv has no",
    ),
    # Losses and teachers.
    ("--loss.lm_weight 0", "loss.lm_weight, loss.kd_weight: both 0, expected at least one above 0: there is no loss"),
    ("--loss.kd_weight 1", "loss.teacher: None, expected a directory since loss.kd_weight is 1.0"),
    (
        "--schedule '[{at: 1, loss: {kd: 1}}]'",
        "loss.teacher: None, expected a directory since an event under schedule sets kd",
    ),
    (
        f"{SELF} --learnable.weight true --learnable.norm true",
        "loss.teacher: 'self', expected learnable.weight and learnable.norm to be false, or a directory: a student",
    ),
    (
        f"{SELF} --learnable.router true",
        "loss.teacher: 'self', expected learnable.router to be false, or a directory: a student",
    ),
    (f"{SELF} {GPTQ}", "loss.teacher: 'self', expected a directory: quant.init gptq and"),
    (
        f"{SELF} --quant.start p --quant.snap_to_codes true",
        "loss.teacher: 'self', expected a directory: quant.init rtn and quant.snap_to_codes move the weights",
    ),
    ("--loss.kd kl_top_k", "loss.top_k: None, expected a number of tokens, like 100: loss.kd is kl_top_k"),
    (f"{CACHE} --loss.kd cakld", "loss.kd: 'cakld', expected kl_top_k: with loss.teacher_cache"),
    (f"{CACHE} --loss.kd r_kl_top_k", "loss.kd: 'r_kl_top_k', expected kl_top_k"),
    (f"{CACHE} --loss.teacher self", "loss.teacher: 'self', expected a directory or null: loss.teacher_cache is there"),
    (f"{CACHE} --loss.diagnostics_every 5", "loss.diagnostics_every: 5, expected 0: loss.teacher_cache does not hold"),
    # Evaluation.
    ("--eval.every 2", "eval.every: 2, expected 0, or samples to evaluate on (data.held_out, data.eval)"),
    (
        f"{EVALUATED} --train.checkpoint_every 3",
        "train.checkpoint_every: 3, expected a multiple of eval.every (2), so that each checkpoint has been evaluated",
    ),
    (
        f"{CACHE} {EVALUATED} --eval.best total",
        "eval.best: 'total', expected lm: loss.teacher_cache holds no held-out samples",
    ),
    # When fake quant is on, and how layers compute.
    (
        "--quant.fake_quant_start 2 --schedule '[{at: 1, fake_quant: true}]'",
        "quant.fake_quant_start: 2, expected 0 or -1, since events under schedule switch fake quant",
    ),
    ("--quant.fake_quant_start 10", "quant.fake_quant_start: 10, expected below train.steps (10), or -1 to train"),
    (
        "--quant.compute fp8_gemm --model.dtype float32",
        "quant.compute: 'fp8_gemm', expected auto or simulate: the fp8 GEMM gives bfloat16, model.dtype is float32",
    ),
    (
        "--quant.compute fp8_gemm --quant.scheme w4a16_g32",
        "quant.compute: 'fp8_gemm', expected auto or simulate: quant.scheme w4a16_g32 has no fp8 codes per tensor on",
    ),
    (
        "--quant.fuse_norms true --learnable.act_scale true",
        "quant.fuse_norms: True, expected false with learnable.act_scale: the gradient of a scale",
    ),
    ("--quant.fuse_norms true --train.compile true", "quant.fuse_norms: True, expected false with train.compile"),
    *(
        (f"{ROTATED} {source}", r"quant.rotate: ['.*\\.down_proj'], expected nothing with quant.scheme source, quant.s")
        for source in ("--quant.scales p", "--quant.start p")
    ),
    (f"{ROTATED} --export.format dequantized", "export.format: 'dequantized', expected compressed with quant.rotate"),
    # First scales and codes.
    (
        f"{FOLLOW} --quant.weight_range mse",
        "quant.weight_range: 'mse', expected absmax, since quant.scales_follow_weights measures in every step",
    ),
    (f"{FOLLOW} --quant.scales p", "quant.scales: 'p', expected null: quant.scales_follow_weights replaces"),
    ("--quant.start g --quant.scales p", "quant.start: 'g', expected null with quant.scales: both are checkpoints"),
    *(
        (f"--quant.start g {again}", "quant.start: 'g', expected null with quant.fake_quant_start or quant.scales_foll")
        for again in ("--quant.fake_quant_start 2", FOLLOW)
    ),
    *(
        (f"{GPTQ} {source}", "quant.init: 'gptq', expected rtn: the codes and scales are those of quant.st")
        for source in ("--quant.scales p", "--quant.start p")
    ),
    *(
        (f"{GPTQ} {again}", "quant.init: 'gptq', expected rtn with quant.fake_quant_start or quant.scales_f")
        for again in ("--quant.fake_quant_start 2", FOLLOW)
    ),
    *(
        (
            f"{start} --schedule '[{{at: 2, fake_quant: {off}}}]'",
            f"schedule: [EventRecipe(at=2, every=None, when=None, fake_quant={off!r}".replace("'false'", "False"),
        )
        for start in (GPTQ, "--quant.start g")
        for off in ("false", "activations")
        if (start, off) != (GPTQ, "activations")  # of which that scheme has none
    ),
    (
        f"{GPTQ} {LORA}",
        "quant.init: 'gptq', expected rtn with adapter.kind lora: adapters leave the weights",
    ),
    (f"{GPTQ} --quant.calibration_batches 0", "quant.calibration_batches: 0, expected 1 or more: quant.init g"),
    (
        "--quant.init gptq --quant.scheme fp8_block",
        "quant.init: 'gptq', expected rtn with quant.scheme fp8_block: a scheme here has a scale for",
    ),
    # Scales of inputs.
    (
        "--quant.scheme nvfp4_w4a4 --quant.input_range percentile",
        "quant.input_range: 'percentile', expected absmax with quant.scheme nvfp4_w4a4: the scales below a",
    ),
    (
        "--quant.scheme nvfp4_w4a4 --quant.initial_input_scale 1",
        "quant.initial_input_scale: 1.0, expected null with quant.scheme nvfp4_w4a4: a global scale of inputs",
    ),
    (
        "--quant.initial_input_scale .5 --quant.calibration_batches 16",
        "quant.initial_input_scale: 0.5, expected null or quant.calibration_batches 0 (it is 16): either is",
    ),
    (
        "--quant.initial_input_scale .5 --quant.fake_quant_start 2",
        "quant.initial_input_scale: 0.5, expected null with quant.fake_quant_start 2: what trains until then",
    ),
    ("--quant.calibration_batches 0", "quant.calibration_batches: 0, expected 1 or more (or quant.scales, or quant.in"),
    # Adapters.
    (f"{LORA} --learnable.weight true", "learnable.weight: True, expected false with adapter.kind lora"),
    (f"{LORA} {NEVER}", "quant.fake_quant_start: -1 (never), expected 0 or more with adapter.kind lora: without fake"),
    (f"{LORA} --train.compile true", "train.compile: True, expected false with adapter.kind lora, whose gradients"),
    (
        f"{LORA} --quant.quantized_all_gather true",
        "quant.quantized_all_gather: True, expected false with adapter.kind lora: the codes",
    ),
    (f"{LORA} --quant.fuse_norms true", "quant.fuse_norms: True, expected false with adapter.kind lora: adapters were"),
    (f"{LORA} {ROTATED}", r"quant.rotate: ['.*\\.down_proj'], expected nothing with adapter.kind lora: an adapter"),
    *(
        (
            f"{BESIDE} --learnable.{name} true",
            "learnable: more than adapters learns, expected weight_scale, act_scale, norm, router to be false with",
        )
        for name in ("weight_scale", "norm", "router")
    ),
    (
        f"{BESIDE} --adapter.ranks '{{.*q_proj: 3}}'",
        "adapter.ranks: {'.*q_proj': 3}, expected nothing with adapter.merge false: vLLM multiplies",
    ),
    (
        f"{BESIDE} --export.format mlx",
        "export.format: 'mlx', expected one of compressed, vllm_fp8, dequantized, peft with adapter.merge false",
    ),
    (f"{BESIDE} --adapter.init error --adapter.start a", "adapter.init: 'error', expected zeros with adapter.start"),
    *(
        (f"{CODES} {source}", "adapter.base: 'quantized', expected weights with quant.start or quant.scales; or quant")
        for source in ("--quant.start a", "--quant.scales a")
    ),
    *(
        (
            f"{CODES} {again}",
            "adapter.base: 'quantized', expected weights; or quantized with quant.fake_quant_start 0 and quan",
        )
        for again in ("--quant.fake_quant_start 2", FOLLOW)
    ),
    (f"{CODES} --adapter.init error", "adapter.init: 'error', expected zeros with adapter.base quantized"),
    # Exports.
    (
        "--export.format mlx --quant.scheme fp8_kv",
        "export.format: 'mlx', expected compressed with quant.scheme fp8_kv, which quantizes the KV cache",
    ),
    *(
        (f"{kind} --export.format peft", "export.format: 'peft', expected another format, or adapter.kind lora with")
        for kind in ("", LORA)
    ),
    *(
        (f"{NEVER} --quant.scheme {scheme} --export.format {kind}", f"export.format: '{kind}', expected compressed or")
        for scheme, kind in (("fp8_static", "vllm_fp8"), ("w4a16_g32", "mlx"))
    ),
    # Events.
    ("--schedule '[{at: 10, freeze_scales: true}]'", "schedule[0].at: 10, expected below train.steps (10)"),
    ("--schedule '[{every: 11, fake_quant: true}]'", "schedule[0].every: 11, expected at most train.steps (10)"),
    (
        "--quant.scheme w4a16_g32 --schedule '[{at: 1, fake_quant: activations}]'",
        "schedule[0].fake_quant: 'activations', expected weights or false: quant.scheme w4a16_g32 quantizes no",
    ),
    (
        "--quant.scheme fp8_kv --schedule '[{at: 1, fake_quant: weights}]'",
        "schedule[0].fake_quant: 'weights', expected true, activations or false: quant.scheme fp8_kv quantizes no",
    ),
    (
        "--schedule '[{at: 3, loss: {lm: 0}}]'",
        "schedule[0].loss: {'lm': 0.0}, expected a weight above 0 for the other loss in the same event: at that time",
    ),
]

# Options without effect; and, beside them, what gives them one.
IDLE = [
    ("--data.loss_on all --data.kind text", "--data.kind chat"),
    ("--data.fields '{input: question, output: answer}' --data.kind text", "--data.kind chat"),
    ("--data.too_long truncate --data.kind text", "--data.kind chat"),
    ("--data.eval [h.jsonl]", "--eval.every 2"),
    ("--learnable.act_scale true --quant.scheme w4a16_g32", "--quant.scheme fp8_static"),
    *(
        (f"--adapter.{name} {value}", LORA)
        for name, value in (
            ("merge", "false"),
            ("start", "a"),
            ("rank", "4"),
            ("alpha", "8"),
            ("rslora", "true"),
            ("targets", "[.*]"),
            ("ranks", "'{.*: 3}'"),
        )
    ),
    *(
        (f"--adapter.{name} {value} {merged} --quant.scheme w4a16_g32", BESIDE)
        for name, value in (("base", "quantized"), ("init", "error"), ("dropout", "0.1"))
        for merged in ("", LORA)
    ),
    (f"{LORA} --quant.scheme fp8_kv", "--quant.scheme fp8_static_kv"),
    ("--loss.temperature 2", "--loss.kd kd"),
    ("--loss.tail true", "--loss.kd r_kl_top_k --loss.top_k 5"),
    ("--loss.diagnostics_every 2", KD),
    ("--optim.embedding_lr 1e-4 --learnable.weight false", "--learnable.weight true"),
    ("--optim.embedding_lr 1e-4 --learnable.embedding false", "--learnable.embedding true"),
    ("--optim.norm_lr 1e-4", "--learnable.norm true"),
    ("--optim.act_scale_lr 1e-4", "--learnable.act_scale true"),
    ("--optim.adapter_lr 1e-4", LORA),
    ("--optim.decay_steps 2", "--optim.schedule wsd"),
    ("--train.activation_offload true", "--train.activation_checkpointing true"),
    (f"--eval.best kd {KD}", EVALUATED),
    (f"--eval.best kd {EVALUATED}", KD),
    ("--export.template base.gguf", "--export.format gguf"),
    ("--quant.snap_to_codes true", "--quant.start g"),
    ("--quant.init gptq --quant.scheme fp8_kv", "--quant.scheme w4a16_g32"),
    ("--quant.weight_range mse --quant.scheme fp8_kv", "--quant.scheme fp8_static_kv"),
    ("--quant.signed_scales true --quant.scheme w4a16_asym", "--quant.scheme w2a16_g32"),
    ("--quant.input_range mse --quant.scheme w4a16_g32", "--quant.scheme fp8_static_kv"),
    ("--quant.percentile 99", "--quant.input_range percentile"),
    (f"{FOLLOW} --quant.scheme fp8_kv", "--quant.scheme fp8_static_kv"),
    ("--quant.initial_input_scale 1 --quant.scheme w4a16_g32", "--quant.scheme fp8_static"),
    (
        "--quant.fp8_fast_accum false --quant.compute simulate",
        "--quant.compute fp8_gemm --quant.quantized_all_gather true",
    ),
    ("--quant.fp8_fast_accum false --quant.scheme w4a16_g128", "--quant.scheme fp8_static"),
    ("--quant.fp8_fast_accum false --model.dtype float32", "--model.dtype bfloat16"),
    ("--quant.keep_codes true --quant.scheme 8da4w", "--quant.scheme nvfp4_w4a4"),
    ("--quant.fuse_norms true --quant.scheme fp8_dynamic", "--quant.scheme w8a8_static"),
    ("--quant.quantized_all_gather true --quant.scheme nvfp4_w4a4", "--quant.scheme int8_dynamic"),
    ("--quant.quantized_all_gather true --quant.scheme mxfp8", "--quant.rules '[{scheme: fp8_static, first: 1}]'"),
    ("--quant.rotate_block 64", ROTATED),
]

# Options that act while fake quant is on alone.
NEVER_ACT = [
    "--quant.scales p",
    FOLLOW,
    "--quant.compute fp8_gemm",
    "--quant.fp8_fast_accum false",
    "--quant.keep_codes true --quant.scheme nvfp4_w4a4",
    "--quant.fuse_norms true",
    "--quant.quantized_all_gather true",
    ROTATED,
    "--learnable.act_scale true",
]

GOOD = [
    "--quant.fake_quant_start 9",
    NEVER,
    # What describes a quantized run beside it may stay.
    f"{NEVER} --quant.compute simulate --quant.calibration_batches 0 --learnable.weight_scale false",
    f"{NEVER} --quant.scheme w2a16_g32 --quant.signed_scales true --quant.weight_range mse",
    f"{NEVER} --quant.scheme fp8_static_kv --quant.input_range percentile --quant.percentile 99",
    "--quant.calibration_batches 0 --quant.fake_quant_start 3",
    "--quant.calibration_batches 0 --quant.initial_input_scale 0.1",
    "--quant.calibration_batches 0 --quant.scales ptq",
    "--quant.calibration_batches 0 --quant.scheme w2a16_g32",
    f"{FOLLOW} --quant.weight_range absmax",
    "--learnable.weight false --learnable.weight_scale false --learnable.norm true",
    "--learnable.weight false --learnable.act_scale true",
    f"{LORA} --learnable.weight false --learnable.weight_scale false",
    f"{LORA} --learnable.act_scale true --learnable.norm true",
    "--loss.lm_weight 0 --loss.kd_weight 1 --loss.teacher t",
    f"{KD} --loss.kd kd --loss.temperature 2",
    f"{KD} --loss.kd r_kl_top_k --loss.top_k 5 --loss.tail true",
    SELF,
    CACHE,
    f"{CACHE} --loss.kd kl_top_k --loss.teacher t --loss.tail true",
    "--optim.grad_clip 0",
    "--optim.warmup_steps 10",
    "--optim.schedule wsd --optim.warmup_steps 10",
    *(
        f"{ROTATED} --quant.rotate_block 1024 --quant.scheme {scheme}"
        for scheme in ("mxfp4_mxfp8", "nvfp4_w4a4", "w4a16_g32")
    ),
    *(f"--quant.quantized_all_gather true --quant.scheme {scheme}" for scheme in ("fp8_dynamic", "w4a16_channel")),
    "--quant.fuse_norms true",
    "--schedule '[{at: 3, loss: {lm: 0, kd: 1}}]' --loss.teacher t",
]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    return ["--config", str(write(tmp_path))]


@pytest.mark.parametrize(("options", "said"), CONTRADICTIONS)
def test_contradictions(words: list[str], options: str, said: str) -> None:
    """One problem, one line: a check that fires beside the right one would send the reader the wrong way."""
    (line,) = refusal(*words, *shlex.split(options))
    assert line.startswith(said)


@pytest.mark.parametrize(("options", "beside"), IDLE)
def test_options_without_effect(words: list[str], options: str, beside: str) -> None:
    (line,) = refusal(*words, *shlex.split(options))
    key = options.split()[0].removeprefix("--")
    assert re.fullmatch(rf"{key}: .+ has no effect unless .+; remove it or change that", line)
    parse_recipe([*words, *shlex.split(f"{options} {beside}")], check_files=False)


@pytest.mark.parametrize("options", NEVER_ACT)
def test_options_that_never_act_without_fake_quant(words: list[str], options: str) -> None:
    """They do where fake quant begins at some step: from the start, later, or by an event."""
    (line,) = refusal(*words, *shlex.split(options), *NEVER.split())
    assert line.startswith(options.split()[0].removeprefix("--")) and f"no effect unless {QUANTIZES.words}; " in line
    for start in ("0", "2", "-1 --schedule '[{at: 1, fake_quant: true}]'"):
        parse_recipe([*words, *shlex.split(f"{options} --quant.fake_quant_start {start}")], check_files=False)


@pytest.mark.parametrize("options", GOOD)
def test_good_options_pass(words: list[str], options: str) -> None:
    parse_recipe([*words, *shlex.split(options)], check_files=False)


def test_every_rule_and_every_condition_has_a_case(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables reach each ``yield`` of rules.py, and each condition of an option."""
    monkeypatch.setattr(Recipe, "validate", lambda recipe: rules.derive(recipe, {}))
    tables = [*(options for options, _ in (*CONTRADICTIONS, *IDLE)), *(f"{options} {NEVER}" for options in NEVER_ACT)]
    recipes = [parse_recipe([*words, *shlex.split(options)], check_files=False) for options in tables]
    reached, lines = set(), []

    def trace(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        reached.add(frame.f_lineno)
        return trace if frame.f_code.co_filename == rules.__file__ else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for recipe in recipes:
            lines += list(rules.contradictions(recipe))
    finally:
        sys.settrace(before)
    yields = [node for node in ast.walk(ast.parse(inspect.getsource(rules))) if isinstance(node, ast.Yield)]
    assert len(yields) > 50
    missed = [ast.unparse(node) for node in yields if reached.isdisjoint(range(node.lineno, node.end_lineno + 1))]
    assert not missed
    for key, _, item in rules.options(minimal()):
        for condition in item.metadata.get(ONLY_WITH, ()):
            words_of_any_scheme = re.sub(r"\\{quant\\.scheme\\}", r"\\w+", re.escape(condition.words))
            said = re.compile(f"{key}: .* unless {words_of_any_scheme}; remove")
            assert any(map(said.match, lines)), (key, condition.words)


@pytest.mark.parametrize(
    ("weights", "events", "refused"),
    [
        ((1, 0), "{at: 3, loss: {lm: 0, kd: 1}}", []),
        ((1, 1), "{at: 2, loss: {kd: 0}}, {at: 5, loss: {lm: 0}}", [1]),
        ((1, 1), "{at: 5, loss: {kd: 0}}, {at: 2, loss: {lm: 0}}", [0]),
        ((1, 1), "{at: 2, loss: {kd: 0}}, {when: loss/lm < 2, loss: {lm: 0}}", [0, 1]),
        ((1, 0), "{at: 2, loss: {kd: 1}}, {when: loss/lm < 2, loss: {lm: 0}}", [1]),
        ((1, 0), "{every: 2, loss: {kd: 1}}, {at: 4, loss: {lm: 0, kd: 0.5}}", []),
        ((1, 0), "{every: 2, loss: {lm: 2}}, {when: loss/lm < 1, lr: {weights: 0}}", []),
        ((0, 1), "{every: 2, loss: {kd: 0}}", [0]),
    ],
)
def test_weights_of_losses_are_followed_through_the_events(words, weights, events, refused) -> None:
    """Which leave no loss at the step at which one happens, or may happen."""
    lm, kd = weights
    given = ["--loss.lm_weight", f"{lm}", "--loss.kd_weight", f"{kd}", "--loss.teacher", "t"]
    options = [*words, *given, "--schedule", f"[{events}]"]
    if not refused:
        parse_recipe(options, check_files=False)
        return
    problems = refusal(*options)
    assert [problem.partition(".")[0] for problem in problems] == [f"schedule[{index}]" for index in refused]
    assert all("expected a weight above 0 for the other loss in the same event" in problem for problem in problems)


def test_an_assignment_in_python_leaves_defaults_to_follow() -> None:
    """What the default of an option was is no statement; what was assigned is."""
    recipe: Recipe = minimal()
    assert recipe.learnable.weight and recipe.learnable.weight_scale
    recipe.adapter.kind, recipe.adapter.merge = "lora", False
    recipe.validate()
    assert not recipe.learnable.weight and not recipe.learnable.weight_scale
    recipe.adapter.kind, recipe.adapter.merge = "none", True
    recipe.validate()
    assert recipe.learnable.weight and recipe.learnable.weight_scale
