"""Recipes that are refused, by one line for one problem: bad values, contradictions, options without effect."""

import ast
import inspect
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from string import Template
from types import FrameType
from typing import Any

import pytest

from engine.config import config as rules
from engine.config.config import Recipe
from engine.config.errors import ONLY_WITH
from engine.config.quant import QUANTIZES
from engine.config.reading import parse_recipe
from tests.lib.recipes import minimal, refusal, write_minimal

TraceFunction = Callable[[FrameType, str, Any], Any]

# Options that many rows share; "$LORA" in a row means these words.
SHARED = {
    "LORA": "adapter.kind=lora",
    "BESIDE": "adapter.kind=lora adapter.merge=false quant.scheme=w4a16_g32",
    "CODES": "adapter.kind=lora adapter.merge=false quant.scheme=w4a16_g32 adapter.base=quantized",
    "TWO": "quant.decoupled_scales=true",
    "MERGED": "adapter.kind=lora quant.scheme=w4a16_g32 adapter.base=quantized",
    "GPTQ": "quant.init=gptq quant.scheme=w4a16_g32",
    "FOLLOW": "quant.scales_follow_weights=true",
    "NEVER": "quant.fake_quant_start=-1",
    "KD": "loss.kd_weight=1 loss.teacher=t",
    "SELF": "loss.kd_weight=1 loss.teacher=self",
    "CACHE": "loss.kd_weight=1 loss.top_k=5 loss.teacher_cache=c",
    "EVALUATED": "eval.every=2 data.held_out=5",
    "WRITES": "data.kind=on_policy data.server=http://a:1 loss.lm_weight=0 loss.kd_weight=1 loss.teacher=t",
    "ROTATED": r"quant.rotate=['.*\.down_proj']",
}


def rows(text: str) -> list[tuple[str, ...]]:
    """Cells of a table of words, one row a line."""
    whole = Template(text).substitute(SHARED)
    return [tuple(map(str.strip, line.split(" | "))) for line in whole.splitlines() if line.strip()]


# Options, and how the only line begins that refuses them; by section of the option to change.
REFUSED = rows(r"""
    model.path=                                 | model.path: ''

    parallel.sequence=4 data.packing=true data.max_length=3 | data.max_length: 3, expected at least 4 with
    parallel.sequence=2 learnable.router=true   | learnable.router: True, expected false with parallel.sequence 2: its
    parallel.sequence=2 train.compile=true      | train.compile: True, expected false with parallel.sequence 2: ranks

    data.train=[]                               | data.train: [], expected at least one file
    data.train=[a,./a] data.weights=[1,1]       | data.train[1]: './a' is data.train[0], expected each file once
    data.weights=[0]                            | data.weights: [0.0], expected numbers above 0
    data.weights=[.nan]                         | data.weights: [nan], expected numbers above 0
    data.weights=[1,2]                          | data.weights: [1.0, 2.0], expected one per file of data.train
    $WRITES data.server=null                    | data.server: None, expected the address of a vLLM server with
    $WRITES data.server=localhost:8000          | data.server: 'localhost:8000', expected an address like http://
    $WRITES data.new_tokens=2048                | data.new_tokens: 2048, expected less than data.max_length (2048)
    $WRITES data.new_tokens=0                   | data.new_tokens: 0, expected at least 1
    $WRITES data.temperature=0.001              | data.temperature: 0.001, expected 0 or 0.01 to 100, as vLLM raises
    $WRITES data.max_age=-1                     | data.max_age: -1, expected at least 0
    $WRITES data.server_seconds=1800            | data.server_seconds: 1800.0, expected at least 1, and a number that
    $WRITES data.packing=true                   | data.packing: True, expected false with data.kind on_policy: lengths
    $WRITES data.held_out=4                     | data.held_out: 4, expected 0 with data.kind on_policy: prompts have
    $WRITES data.too_long=truncate              | data.too_long: 'truncate', expected drop with data.kind on_policy
    $WRITES loss.lm_weight=0.5                  | loss.lm_weight: 0.5, expected 0 with data.kind on_policy: the student
    $WRITES schedule='[{at: 1, loss: {lm: 1}}]' | schedule[0].loss: {'lm': 1.0}, expected lm 0 with data.kind on_policy
    $WRITES loss.teacher_cache=c loss.top_k=5   | loss.teacher_cache: 'c', expected null with data.kind on_policy: the
    $WRITES export.format=gguf quant.scheme=q4_0 | export.format: 'gguf', expected one of compressed, dequantized,
    $WRITES $BESIDE                             | adapter.merge: False, expected true with data.kind on_policy: vLLM
    data.held_out=-1                            | data.held_out: -1, expected a number of samples, or a share between
    data.held_out=1.0                           | data.held_out: 1.0, expected a number of samples, or a share between
    data.held_out=.nan                          | data.held_out: nan, expected a number of samples
    data.eval="['']" $EVALUATED                 | data.eval: [''], expected files
    data.fields='{prompt: question}'            | data.fields: {'prompt': 'question'}, expected
    data.max_length=1                           | data.max_length: 1, expected at least 2
    data.micro_batch_size=0                     | data.micro_batch_size: 0, expected at least 1
    data.packing=true data.micro_batch_size=2 model.attn_implementation=flash_attention_2 | data.micro_batch_size: 2,
    data.seed=-1                                | data.seed: -1, expected at least 0

    learnable.weight=false learnable.weight_scale=false | learnable: nothing is learnable, expected at least one of
    quant.scheme=fp8_kv learnable.weight=false  | learnable: only weight_scale is true, expected kv_scale, weight or
    $LORA learnable.weight=true                 | learnable.weight: True, expected false with adapter.kind lora
    $BESIDE learnable.weight_scale=true         | learnable: more than adapters learns, expected weight_scale,
    $BESIDE learnable.norm=true                 | learnable: more than adapters learns, expected weight_scale,
    $BESIDE learnable.router=true               | learnable: more than adapters learns, expected weight_scale,

    $LORA adapter.rank=0                        | adapter.rank: 0, expected at least 1
    $LORA adapter.ranks="{'(': 3}"              | adapter.ranks: {'(': 3}, expected regular expressions
    $BESIDE adapter.ranks='{.*q_proj: 3}'       | adapter.ranks: {'.*q_proj': 3}, expected {} with adapter.merge
    adapter.base=nf4                            | adapter.base: Expected one of ['weights', 'quantized']. Got value:
    $BESIDE adapter.dropout=1                   | adapter.dropout: 1.0, expected a number of at least 0 and below 1
    $BESIDE adapter.dropout=-.1                 | adapter.dropout: -0.1, expected a number of at least 0 and below 1
    $BESIDE adapter.init=error adapter.start=a  | adapter.init: 'error', expected zeros with adapter.start
    $BESIDE adapter.init=error quant.fake_quant_start=2 | quant.fake_quant_start: 2, expected 0 with adapter.init
    $BESIDE adapter.init=error schedule='[{at: 1, fake_quant: false}]' | schedule[0].fake_quant: False, expected true or
    $CODES adapter.init=error                   | adapter.init: 'error', expected zeros with adapter.base quantized
    $CODES quant.start=a                        | adapter.base: 'quantized', expected weights, or quant.start and
    $CODES quant.scales=a                       | adapter.base: 'quantized', expected weights, or quant.start and
    $CODES quant.fake_quant_start=2             | adapter.base: 'quantized', expected weights; or quantized with
    $CODES $FOLLOW                              | adapter.base: 'quantized', expected weights; or quantized with
    $MERGED learnable.weight_scale=true         | learnable.weight_scale: True, expected false with adapter.base
    $MERGED schedule='[{at: 1, fake_quant: false}]' | schedule[0].fake_quant: False, expected true or weights with
    $MERGED quant.scales=a                      | adapter.base: 'quantized', expected weights, or quant.start and

    optim.lr=-1e-5                              | optim.lr: -1e-05, expected at least 0
    optim.lr=1e300                              | optim.lr: 1e+300, expected at least 0, and a number that is at most
    optim.scale_lr=-1                           | optim.scale_lr: -1.0, expected at least 0
    optim.min_lr_ratio=1.1                      | optim.min_lr_ratio: 1.1, expected between 0 and 1
    optim.betas=[0.9,1]                         | optim.betas: (0.9, 1.0), expected two numbers in [0, 1)
    optim.eps=0                                 | optim.eps: 0.0, expected at least 1e-30
    optim.eps=1e-46                             | optim.eps: 1e-46, expected at least 1e-30
    optim.eps=1e39                              | optim.eps: 1e+39, expected at least 1e-30, and a number that fp32
    optim.grad_clip=-1                          | optim.grad_clip: -1.0, expected at least 0
    optim.grad_clip=.inf                        | optim.grad_clip: inf, expected at least 0
    optim.weight_decay=-1                       | optim.weight_decay: -1.0, expected at least 0
    optim.weight_decay=2 optim.lr=1             | optim.weight_decay: 2.0, expected at most 1: a step subtracts
    optim.weight_decay=2 optim.embedding_lr=1   | optim.weight_decay: 2.0, expected at most 1: a step subtracts
    optim.weight_decay=2 schedule='[{at: 1, lr: {weights: 1}}]' | optim.weight_decay: 2.0, expected at most 1: a step
    train.steps=0                               | train.steps: 0, expected at least 1, or train.epochs
    train.epochs=-1                             | train.epochs: -1.0, expected at least 0
    optim.warmup_steps=5 optim.warmup_ratio=0.1 | optim.warmup_ratio: 0.1, expected 0, as optim.warmup_steps is 5
    optim.warmup_ratio=1.5                      | optim.warmup_ratio: 1.5, expected between 0 and 1
    optim.warmup_steps=11                       | optim.warmup_steps: 11, expected at most 10 (train.steps)
    optim.schedule=wsd optim.decay_steps=0      | optim.decay_steps: 0, expected at least 1
    optim.schedule=wsd optim.decay_steps=11     | optim.decay_steps: 11, expected at most 10 (train.steps)
    optim.schedule=wsd optim.warmup_steps=6 optim.decay_steps=5 | optim.warmup_steps, optim.decay_steps: 6 and 5

    loss.lm_weight=-1                           | loss.lm_weight: -1.0, expected at least 0
    loss.lm_weight=1e38                         | loss.lm_weight: 1e+38, expected at least 0, and a number that is at
    loss.lm_weight=0                            | loss.lm_weight, loss.kd_weight: both 0, expected at least one above
    loss.kd=kd loss.temperature=0               | loss.temperature: 0.0, expected at least 1e-15
    loss.kd=kd loss.temperature=1e30            | loss.temperature: 1e+30, expected at least 1e-15, and a number
    loss.kd=r_kl_top_k loss.top_k=0             | loss.top_k: 0, expected at least 1
    loss.kd=kl_top_k                            | loss.top_k: None, expected a number of tokens, like 100: loss.kd is
    loss.diagnostics_every=-1                   | loss.diagnostics_every: -1, expected at least 0
    loss.chunk_tokens=0                         | loss.chunk_tokens: 0, expected at least 1
    loss.kd_weight=1                            | loss.teacher: None, expected a directory since loss.kd_weight is
    schedule='[{at: 1, loss: {kd: 1}}]'         | loss.teacher: None, expected a directory since an event under
    $SELF learnable.weight=true learnable.norm=true | loss.teacher: 'self', expected learnable.weight and
    $SELF learnable.router=true                 | loss.teacher: 'self', expected learnable.router to be false, or a
    $SELF $GPTQ                                 | loss.teacher: 'self', expected a directory: quant.init gptq and
    $SELF quant.start=p quant.snap_to_codes=true | loss.teacher: 'self', expected a directory: quant.init rtn and
    $CACHE loss.teacher_cache=                  | loss.teacher_cache: ''
    $CACHE loss.kd=cakld                        | loss.kd: 'cakld', expected kl_top_k: with loss.teacher_cache
    $CACHE loss.kd=r_kl_top_k                   | loss.kd: 'r_kl_top_k', expected kl_top_k
    $CACHE loss.teacher=self                    | loss.teacher: 'self', expected a directory or null:
    $CACHE loss.diagnostics_every=5             | loss.diagnostics_every: 5, expected 0: diagnostics compare

    train.seed=4294967296                       | train.seed: 4294967296, expected 0 to 4294967295
    train.gradient_accumulation_steps=0         | train.gradient_accumulation_steps: 0, expected at least 1
    train.log_every=0                           | train.log_every: 0, expected at least 1
    train.log_every=9223372036854775808         | train.log_every: 9223372036854775808, expected at least 1, and a
    train.quant_stats_every=-1                  | train.quant_stats_every: -1, expected at least 0
    train.checkpoint_every=-1                   | train.checkpoint_every: -1, expected at least 0
    $EVALUATED train.checkpoint_every=3         | train.checkpoint_every: 3, expected a multiple of eval.every (2), so
    train.keep_checkpoints=0                    | train.keep_checkpoints: 0, expected at least 1
    train.max_skipped_steps=0                   | train.max_skipped_steps: 0, expected at least 1
    train.resume=step_12                        | train.resume: 'step_12', expected true, false, best, or a name like
    train.resume=../step_00000012               | train.resume: '../step_00000012', expected true, false, best
    $LORA train.compile=true                    | train.compile: True, expected false with adapter.kind lora: torch

    quant.scheme=fp9                            | quant.scheme: 'fp9', expected one of fp8_static,
    quant.exempt=[a,(]                          | quant.exempt[1]: '(', expected a regular expression
    quant.compute=fp8_gemm model.dtype=float32  | quant.compute: 'fp8_gemm', expected auto or simulate: the fp8 GEMM
    quant.compute=fp8_gemm quant.scheme=w4a16_g32 | quant.compute: 'fp8_gemm', expected auto or simulate: quant.scheme
    learnable.act_scale=true learnable.kv_scale=false quant.scheme=fp8_kv | learnable.act_scale: True, expected false
    quant.fuse_norms=true learnable.act_scale=true | quant.fuse_norms: True, expected false with learnable.act_scale:
    quant.fuse_norms=true train.compile=true    | quant.fuse_norms: True, expected false with train.compile
    $LORA quant.fuse_norms=true                 | quant.fuse_norms: True, expected false with adapter.kind lora:
    $LORA quant.quantized_all_gather=true       | quant.quantized_all_gather: True, expected false with adapter.kind
    $ROTATED quant.scales=p                     | quant.rotate: ['.*\\.down_proj'], expected [] with quant.scheme
    $ROTATED quant.start=p                      | quant.rotate: ['.*\\.down_proj'], expected [] with quant.scheme
    $LORA $ROTATED                              | quant.rotate: ['.*\\.down_proj'], expected [] with adapter.kind
    quant.scheme=nvfp4_w4a4 quant.input_range=percentile | quant.input_range: 'percentile', expected absmax with

    quant.fake_quant_start=-2                   | quant.fake_quant_start: -2, expected at least -1
    quant.fake_quant_start=10                   | quant.fake_quant_start: 10, expected below train.steps (10), or -1
    quant.fake_quant_start=2 schedule='[{at: 1, fake_quant: true}]' | quant.fake_quant_start: 2, expected 0 or -1,
    learnable.weight=false $NEVER               | quant.fake_quant_start: -1 (never), expected 0 or more with
    $LORA $NEVER                                | quant.fake_quant_start: -1 (never), expected 0 or more with

    $TWO learnable.weight=true                  | learnable.weight: True, expected false with quant.decoupled_scales
    $TWO learnable.weight_scale=false learnable.norm=true | learnable.weight_scale: False, expected true with quant
    $TWO $LORA                                  | adapter.kind: 'lora', expected none with quant.decoupled_scales:
    $TWO train.compile=true                     | train.compile: True, expected false with quant.decoupled_scales: co
    $TWO quant.quantized_all_gather=true        | quant.quantized_all_gather: True, expected false with quant.decoupled
    $TWO quant.fuse_norms=true                  | quant.fuse_norms: True, expected false with quant.decoupled_scales:
    $TWO $FOLLOW                                | quant.scales_follow_weights: True, expected false with quant.decoup

    $FOLLOW quant.weight_range=mse              | quant.weight_range: 'mse', expected absmax, since
    $FOLLOW quant.scales=p                      | quant.scales: 'p', expected null: quant.scales_follow_weights
    quant.start=g quant.scales=p                | quant.start: 'g', expected null with quant.scales: both are
    quant.start=g quant.fake_quant_start=2      | quant.start: 'g', expected null with quant.fake_quant_start or
    quant.start=g $FOLLOW                       | quant.start: 'g', expected null with quant.fake_quant_start or
    $GPTQ quant.scales=p                        | quant.init: 'gptq', expected rtn: the codes and scales are those of
    $GPTQ quant.start=p                         | quant.init: 'gptq', expected rtn: the codes and scales are those of
    $GPTQ quant.fake_quant_start=2              | quant.init: 'gptq', expected rtn with quant.fake_quant_start or
    $GPTQ $FOLLOW                               | quant.init: 'gptq', expected rtn with quant.fake_quant_start or
    $GPTQ $LORA                                 | quant.init: 'gptq', expected rtn with adapter.kind lora: adapters
    $GPTQ quant.calibration_batches=0           | quant.calibration_batches: 0, expected 1 or more: quant.init g
    quant.init=gptq quant.scheme=fp8_block      | quant.init: 'gptq', expected rtn with quant.scheme fp8_block: other
    $GPTQ schedule='[{at: 2, fake_quant: false}]' | schedule: [EventRecipe(at=2, every=None, when=None,
    quant.start=g schedule='[{at: 2, fake_quant: false}]' | schedule: [EventRecipe(at=2, every=None, when=None,
    quant.start=g schedule='[{at: 2, fake_quant: activations}]' | schedule: [EventRecipe(at=2, every=None, when=None,
    quant.start=g quant.lm_head=tied quant.embedding=w8a16_channel | quant.start: 'g', expected null with quant.lm_head
    quant.scales=g quant.lm_head=tied quant.embedding=w8a16_channel | quant.scales: 'g', expected null with quant.lm
    quant.calibration_batches=-1                | quant.calibration_batches: -1, expected at least 0
    quant.calibration_batches=0                 | quant.calibration_batches: 0, expected 1 or more (or quant.scales,
    quant.initial_input_scale=0 quant.calibration_batches=0 | quant.initial_input_scale: 0.0, expected at least
    quant.initial_input_scale=.5 quant.calibration_batches=16 | quant.initial_input_scale: 0.5, expected null or
    quant.scales=p quant.fake_quant_start=2     | quant.scales: 'p', expected null with quant.fake_quant_start 2: the
    quant.initial_input_scale=.5 quant.fake_quant_start=2 | quant.initial_input_scale: 0.5, expected null with
    quant.scheme=nvfp4_w4a4 quant.initial_input_scale=1 | quant.initial_input_scale: 1.0, expected null with
    quant.scheme=nvfp4_w4a4 quant.input_headroom=0.5 | quant.input_headroom: 0.5, expected at least 1
    quant.scheme=nvfp4_w4a4 quant.input_headroom=100 | quant.input_headroom: 100.0, expected at least 1, and a number

    eval.every=2                                | eval.every: 2, expected 0, or samples to evaluate on (data.held_out,
    $CACHE $EVALUATED eval.best=total           | eval.best: 'total', expected lm: loss.teacher_cache contains no
    export.max_shard_size=5XB                   | export.max_shard_size: '5XB', expected a positive number and a unit
    export.format=peft                          | export.format: 'peft', expected another format, or adapter.kind lora
    $LORA export.format=peft                    | export.format: 'peft', expected another format, or adapter.kind lora
    $BESIDE export.format=mlx                   | export.format: 'mlx', expected one of compressed, vllm_fp8,
    $ROTATED export.format=dequantized          | export.format: 'dequantized', expected compressed with quant.rotate
    quant.scheme=fp8_kv export.format=mlx       | export.format: 'mlx', expected compressed with quant.scheme fp8_kv,
    $NEVER quant.scheme=fp8_static export.format=vllm_fp8 | export.format: 'vllm_fp8', expected compressed or
    $NEVER quant.scheme=w4a16_g32 export.format=mlx | export.format: 'mlx', expected compressed or
    deepspeed=                                  | deepspeed: ''
    output_dir=                                 | output_dir: ''

    schedule='[{fake_quant: on}]'               | schedule[0]: no time, expected exactly one of at, every, when
    schedule='[{at: 1, every: 2, observe: on}]' | schedule[0]: {'at': 1, 'every': 2}, expected exactly one of at,
    schedule='[{at: 1}]'                        | schedule[0]: nothing happens, expected one of fake_quant
    schedule='[{at: -1, fake_quant: on}]'       | schedule[0].at: -1, expected at least 0
    schedule='[{at: 10, freeze_scales: on}]'    | schedule[0].at: 10, expected below train.steps (10)
    schedule='[{every: 0, fake_quant: on}]'     | schedule[0].every: 0, expected at least 1
    schedule='[{every: 11, fake_quant: on}]'    | schedule[0].every: 11, expected at most train.steps (10)
    schedule='[{when: loss falls, observe: on}]' | schedule[0].when: 'loss falls', expected like loss/lm < 2.5
    schedule='[{when: x < y, fake_quant: on}]'  | schedule[0].when: 'x < y', expected like loss/lm < 2.5
    schedule='[{when: x < nan, observe: on}]'   | schedule[0].when: 'x < nan', expected like loss/lm < 2.5
    schedule='[{when: x < inf, observe: on}]'   | schedule[0].when: 'x < inf', expected like loss/lm < 2.5
    schedule='[{at: 1, layers: a, observe: on}]' | schedule[0].layers: 'a', expected fake_quant beside it
    schedule='[{at: 1, layers: (, fake_quant: on}]' | schedule[0].layers: '(', expected a regular expression
    schedule='[{at: 1, lr: {}}]'                | schedule[0].lr: {}, expected one of weights
    schedule='[{at: 1, lr: {scales: 1}}]'       | schedule[0].lr: 'scales', expected one of weights
    schedule='[{at: 1, lr: {weights: -1}}]'     | schedule[0].lr.weights: -1.0, expected at least 0
    schedule='[{at: 1, loss: {kl: 1}}]'         | schedule[0].loss: 'kl', expected one of lm, kd
    schedule='[{at: 3, loss: {lm: 0}}]'         | schedule[0].loss: {'lm': 0.0}, expected a weight above 0 for the
    quant.scheme=w4a16_g32 schedule='[{at: 1, fake_quant: activations}]' | schedule[0].fake_quant: 'activations',
    quant.scheme=fp8_kv schedule='[{at: 1, fake_quant: weights}]' | schedule[0].fake_quant: 'weights', expected true,
""")

# Options without effect; and, beside them, what gives them one.
IDLE = rows(r"""
    data.loss_on=all data.kind=text             | data.kind=chat
    data.fields='{input: question, output: answer}' data.kind=text | data.kind=chat
    data.too_long=truncate data.kind=text       | data.kind=chat
    data.eval=[h.jsonl]                         | eval.every=2
    data.server=http://a:1                      | $WRITES
    data.new_tokens=9                           | $WRITES
    data.temperature=0.5                        | $WRITES
    data.max_age=9                              | $WRITES
    data.server_seconds=9                       | $WRITES
    learnable.act_scale=true quant.scheme=w4a16_g32 | quant.scheme=fp8_static
    adapter.merge=false                         | $LORA
    adapter.start=a                             | $LORA
    adapter.rank=4                              | $LORA
    adapter.alpha=8                             | $LORA
    adapter.rslora=true                         | $LORA
    adapter.targets=[.*]                        | $LORA
    adapter.ranks='{.*: 3}'                     | $LORA
    adapter.base=quantized                      | $LORA
    adapter.init=error                          | $BESIDE
    adapter.init=error $LORA                    | $BESIDE
    adapter.dropout=0.1                         | $BESIDE
    adapter.dropout=0.1 $LORA                   | $BESIDE
    $LORA quant.scheme=fp8_kv                   | quant.scheme=fp8_static_kv
    loss.teacher_weights=int8                   | $KD
    loss.temperature=2                          | loss.kd=kd
    loss.tail=true                              | loss.kd=r_kl_top_k loss.top_k=5
    loss.diagnostics_every=2                    | $KD
    optim.embedding_lr=1e-4 learnable.weight=false | learnable.weight=true
    optim.embedding_lr=1e-4 learnable.embedding=false | learnable.embedding=true
    optim.norm_lr=1e-4                          | learnable.norm=true
    optim.act_scale_lr=1e-4                     | learnable.kv_scale=true quant.scheme=fp8_kv
    learnable.kv_scale=true                     | quant.scheme=fp8_static_kv
    optim.adapter_lr=1e-4                       | $LORA
    optim.moments=8bit learnable.weight=false   | learnable.router=true
    optim.decay_steps=2                         | optim.schedule=wsd
    data.skip=[a.jsonl:1] data.kind=text        | data.kind=chat
    train.activation_offload=true               | train.activation_checkpointing=true
    eval.best=kd $KD                            | $EVALUATED
    eval.best=kd $EVALUATED                     | $KD
    export.template=base.gguf                   | export.format=gguf
    quant.snap_to_codes=true                    | quant.start=g
    $TWO quant.scheme=fp8_kv                    | quant.scheme=mxfp4
    quant.init=gptq quant.scheme=fp8_kv         | quant.scheme=w4a16_g32
    quant.weight_range=mse quant.scheme=fp8_kv  | quant.scheme=fp8_static_kv
    quant.signed_scales=true quant.scheme=w4a16_asym | quant.scheme=w2a16_g32
    quant.input_range=mse quant.scheme=w4a16_g32 | quant.scheme=fp8_static_kv
    quant.percentile=99                         | quant.input_range=percentile
    $FOLLOW quant.scheme=fp8_kv                 | quant.scheme=fp8_static_kv
    quant.initial_input_scale=1 quant.scheme=w4a16_g32 | quant.scheme=fp8_static
    quant.input_headroom=2 quant.scheme=mxfp4_w4a4 | quant.scheme=nvfp4_w4a4
    quant.fp8_fast_accum=false quant.compute=simulate | quant.compute=fp8_gemm quant.quantized_all_gather=true
    quant.fp8_fast_accum=false quant.scheme=w4a16_g128 | quant.scheme=fp8_static
    quant.fp8_fast_accum=false model.dtype=float32 | model.dtype=bfloat16
    quant.keep_codes=true quant.scheme=8da4w    | quant.scheme=nvfp4_w4a4
    quant.fuse_norms=true quant.scheme=fp8_dynamic | quant.scheme=w8a8_static
    quant.quantized_all_gather=true quant.scheme=nvfp4_w4a4 | quant.scheme=int8_dynamic
    quant.quantized_all_gather=true quant.scheme=mxfp8 | quant.rules='[{scheme: fp8_static, first: 1}]'
    quant.rotate_block=64                       | $ROTATED
""")

# Options that act while fake quant is on alone.
NEVER_ACT = rows(r"""
    quant.scales=p
    $FOLLOW
    $TWO learnable.norm=true
    quant.compute=fp8_gemm
    quant.fp8_fast_accum=false
    quant.keep_codes=true quant.scheme=nvfp4_w4a4
    quant.fuse_norms=true
    quant.quantized_all_gather=true
    $ROTATED
    learnable.act_scale=true
    learnable.kv_scale=true quant.scheme=fp8_kv
""")

# What describes a quantized run may stay in the run without fake quant beside it ($NEVER).
GOOD = rows(r"""
    quant.fake_quant_start=9
    $NEVER
    $NEVER quant.compute=simulate quant.calibration_batches=0 learnable.weight_scale=false
    $NEVER quant.scheme=w2a16_g32 quant.signed_scales=true quant.weight_range=mse
    $NEVER quant.scheme=fp8_static_kv quant.input_range=percentile quant.percentile=99
    quant.calibration_batches=0 quant.fake_quant_start=3
    quant.calibration_batches=0 quant.initial_input_scale=0.1
    quant.calibration_batches=0 quant.scales=ptq
    quant.calibration_batches=0 quant.scheme=w2a16_g32
    $FOLLOW quant.weight_range=absmax
    learnable.weight=false learnable.weight_scale=false learnable.norm=true
    learnable.weight=false learnable.act_scale=true
    $LORA learnable.weight=false learnable.weight_scale=false
    $LORA learnable.act_scale=true learnable.norm=true
    loss.lm_weight=0 $KD
    $WRITES data.eval=[h.jsonl] eval.every=2 data.loss_on=all
    $WRITES data.temperature=0 loss.kd=rkl
    $KD loss.kd=kd loss.temperature=2
    $KD loss.kd=r_kl_top_k loss.top_k=5 loss.tail=true
    $SELF
    $CACHE
    $CACHE loss.kd=kl_top_k loss.teacher=t loss.tail=true
    optim.grad_clip=0
    optim.warmup_steps=10
    optim.schedule=wsd optim.warmup_steps=10
    $ROTATED quant.rotate_block=1024 quant.scheme=mxfp4_mxfp8
    $ROTATED quant.rotate_block=1024 quant.scheme=nvfp4_w4a4
    $ROTATED quant.rotate_block=1024 quant.scheme=w4a16_g32
    quant.quantized_all_gather=true quant.scheme=fp8_dynamic
    quant.quantized_all_gather=true quant.scheme=w4a16_channel
    quant.fuse_norms=true
    schedule='[{at: 3, loss: {lm: 0, kd: 1}}]' loss.teacher=t
    quant.scheme=fp8_kv schedule='[{at: 3, fake_quant: activations}]'
""")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    return ["--config", str(write_minimal(tmp_path))]


def of(options: str) -> Iterator[str]:
    """Words of the command line for the options of a row."""
    return (f"--{word}" for word in shlex.split(options))


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_refused(words: list[str], options: str, said: str) -> None:
    """A check that fires beside the right one would send the reader the wrong way."""
    (line,) = refusal(*words, *of(options))
    assert line.startswith(said)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (f"data.seed=1{'0' * 400}", "data.seed: 1000000"),
        (f"optim.lr=1{'0' * 400}", "optim.lr: an integer beyond every float, expected a number that 64 bits hold"),
        *((f"output_dir={path}", "output_dir: '") for path in ("a\0b", "x" * 256, "x/" * 5000)),
        ("schedule=[{at: 1, fake_quant: sometimes}]", "schedule: "),
        ("schedule=[{at: 1, fakequant: on}]", "schedule: "),
    ],
    ids=lambda text: text[:30],
)
def test_values_that_nothing_holds(words: list[str], option: str, said: str) -> None:
    (line,) = refusal(*words, f"--{option}")
    assert line.startswith(said)
    assert "output_dir" not in option or "in names of at most 255 bytes without NUL" in line
    assert "fakequant" not in option or "fakequant" in line


TEXTS = [key for key, _, item in rules.recipe_options(minimal()) if item.type in (str, str | None)]


@pytest.mark.parametrize("key", TEXTS)
@pytest.mark.parametrize("word", ["true", "No", "off", "None"])
def test_a_boolean_is_no_text(words: list[str], key: str, word: str) -> None:
    """A directory of the name "true" would be made, or looked for after the start."""
    said = f"{key}: {word!r}, expected "
    assert len([line for line in refusal(*words, f"--{key}={word}") if line.startswith(said)]) == 1


def test_a_directory_may_have_the_name_of_a_boolean(words: list[str]) -> None:
    recipe = parse_recipe([*words, "--data.cache=./true", "--output_dir=runs/no"], check_files=False)
    assert (recipe.data.cache, recipe.output_dir) == ("./true", "runs/no")


@pytest.mark.parametrize(("options", "beside"), IDLE)
def test_options_without_effect(words: list[str], options: str, beside: str) -> None:
    (line,) = refusal(*words, *of(options))
    key = options.split("=")[0]
    assert re.fullmatch(rf"{key}: .+ has no effect unless .+; remove it or change that", line)
    parse_recipe([*words, *of(f"{options} {beside}")], check_files=False)


@pytest.mark.parametrize(("options",), NEVER_ACT)
def test_options_that_never_act_without_fake_quant(words: list[str], options: str) -> None:
    """They do where fake quant begins at some step: from the start, later, or by an event."""
    (line,) = refusal(*words, *of(f"{options} {SHARED['NEVER']}"))
    assert line.startswith(options.split("=")[0]) and f"no effect unless {QUANTIZES.words}; " in line
    # Scales of files are measured again at a later start.
    later = () if options == "quant.scales=p" else ("2",)
    for start in ("0", *later, "-1 schedule='[{at: 1, fake_quant: true}]'"):
        parse_recipe([*words, *of(f"{options} quant.fake_quant_start={start}")], check_files=False)


@pytest.mark.parametrize(("options",), GOOD)
def test_good_options_pass(words: list[str], options: str) -> None:
    parse_recipe([*words, *of(options)], check_files=False)


def test_every_rule_and_every_condition_has_a_case(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables reach each ``yield`` of a rule, and each condition of an option."""
    monkeypatch.setattr(Recipe, "validate", lambda recipe: rules.derive(recipe, {}))
    tables = [options for options, _ in (*REFUSED, *IDLE)]
    tables += [f"{options} {SHARED['NEVER']}" for (options,) in NEVER_ACT]
    recipes = [parse_recipe([*words, *of(options)], check_files=False) for options in tables if "nf4" not in options]
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
    names = {rule.__name__ for rule in rules.RULES}
    functions = [node for node in ast.parse(inspect.getsource(rules)).body if getattr(node, "name", "") in names]
    yields = [node for function in functions for node in ast.walk(function) if isinstance(node, ast.Yield)]
    assert len(yields) > 50
    missed = [ast.unparse(node) for node in yields if reached.isdisjoint(range(node.lineno, node.end_lineno + 1))]
    assert not missed
    for key, _, item in rules.recipe_options(minimal()):
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
    """An event is refused if it leaves, or may leave, no loss at the step at which it happens."""
    lm, kd = weights
    options = [*words, *of(f"loss.lm_weight={lm} loss.kd_weight={kd} loss.teacher=t schedule='[{events}]'")]
    if not refused:
        parse_recipe(options, check_files=False)
        return
    problems = refusal(*options)
    assert [problem.partition(".")[0] for problem in problems] == [f"schedule[{index}]" for index in refused]
    assert all("expected a weight above 0 for the other loss in the same event" in problem for problem in problems)
