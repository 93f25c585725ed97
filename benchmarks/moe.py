"""A MoE under ZeRO-3 on two ranks: collectives, bytes and time of a step, by the form of its experts.

    python benchmarks/moe.py [--layers 48] [--experts 128] [--rounds 5] [--without_per_expert]

The structure of Qwen3-30B-A3B at reduced width, in bf16, with random weights. Three ways take turns in one process:

- ``plain``: transformers' own fused experts, trained as they are;
- ``stacked``: fp8 QAT, static scales, those of weights learned, ``model.experts: stacked``;
- ``per_expert``: the same with ``model.experts: per_expert``.

Collectives are those that DeepSpeed's comms logger sees in a step after the third. At DeepSpeed's own persistence
threshold it gathers each trained parameter below it alone after every step; at 0 they come with the next weights.

The bar: stacked makes no more of any kind than plain, and takes at most 1.10 of its time. Writes
``benchmarks/results/moe.md``.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import timing
from tests.lib.launcher import on_ranks

# The plain model last: zero.Init around the constructors of transformers leaves its classes changed.
WAYS = ("stacked", "per_expert", "plain")
TOKENS = 128  # per rank


def write_config(directory: Path, layers: int, experts: int, hidden: int, inner: int) -> None:
    """config.json of the model; nothing else is read."""
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=3 * inner,
        moe_intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=experts,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(directory)


def ds_config(threshold: int | None, **options: int) -> dict:
    """Stage 3; with DeepSpeed's own persistence threshold, or another one, and more of its options."""
    zero: dict = {"stage": 3, **options}
    if threshold is not None:
        zero["stage3_param_persistence_threshold"] = threshold
    return {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "comms_logger": {"enabled": True, "verbose": False, "prof_all": True},
    }


def engine_of(way: str, directory: Path, threshold: int | None, **options: int):
    """An engine with random weights, and what a step must be followed by."""
    import copy

    import deepspeed
    from transformers import AutoConfig, AutoModelForCausalLM

    from model.build import build_model
    from model.scales.in_place import release_scales, renew_weight_scales, write_scales
    from model.zero import keep_frozen_fp32, local_data, partition_new_parameters
    from quant import SCHEMES, replace_layers, weights_changed

    config = ds_config(threshold, **options)
    quantization = None
    if way == "plain":
        with deepspeed.zero.Init(config_dict_or_path=copy.deepcopy(config)):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.bfloat16)
    else:
        device = torch.device("cpu")
        model = build_model(directory, config, dtype=torch.bfloat16, device=device, experts=way)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = local_data(parameter)
            local.fill_(1) if "norm" in name else local.normal_(0, 0.02)
    if way != "plain":
        quantization = replace_layers(model, SCHEMES["fp8_static"], learn_weight_scale=True, learn_input_scale=False)
        partition_new_parameters(model, config)
        renew_weight_scales(quantization)
        write_scales(quantization.input_groups, {g.owner: torch.tensor([0.02]) for g in quantization.input_groups})
    model.config.use_cache = False
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    with keep_frozen_fp32(model):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if quantization is not None:
        release_scales(engine, quantization)
    return engine, (lambda: weights_changed(model)) if quantization is not None else (lambda: None)


def logged() -> tuple[Counter, Counter]:
    """Calls and bytes by kind since the last time, without those within one rank."""
    from deepspeed import comm

    log = comm.comm.comms_logger.comms_dict
    calls: Counter = Counter()
    sizes: Counter = Counter()
    for kind, by_size in log.items():
        for size, (count, *_) in by_size.items():
            calls[kind] += count
            sizes[kind] += count * size
    log.clear()
    return calls, sizes


def measure(directory: Path, threshold: int | None, rounds: int, chosen: list[str]) -> dict[str, Any]:
    """Measure the chosen ways at one threshold, on each rank."""
    import deepspeed

    from engine.session.context import init_ranks
    from model.ranks import rank

    init_ranks()
    steps, rows = {}, {}
    for way in chosen:
        begin = time.perf_counter()
        engine, after_step = engine_of(way, directory, threshold)
        made = time.perf_counter() - begin
        generator = torch.Generator().manual_seed(rank())

        def step(engine=engine, after_step=after_step, generator=generator) -> float:
            ids = torch.randint(0, 2048, (1, TOKENS), generator=generator)
            begin = time.perf_counter()
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            after_step()
            return time.perf_counter() - begin

        # Not in the steps that are timed: the log adds up a list that grows with every call, in every call.
        deepspeed.comm.configure(enabled=False)
        for _ in range(3):
            step()
        logged()
        deepspeed.comm.configure(enabled=True)
        step()
        calls, sizes = logged()
        deepspeed.comm.configure(enabled=False)
        rows[way] = {"calls": calls, "bytes": sizes, "parameters": len(list(engine.module.parameters())), "made": made}
        steps[way] = step
    timings = timing.interleave(steps, rounds, 1)
    for way, row in rows.items():
        row |= {
            "median": timings[way].median,
            "ratio": timings[way].ratio(timings["plain"]),
            "text": timings[way].text(timings["plain"]),
        }
    torch.distributed.destroy_process_group()
    return {"threshold": threshold, "ways": rows}


def report(found: list[dict]) -> list[str]:
    """One row per threshold and way, and whether the bars are met."""
    kinds = sorted({kind for one in found for way in one["ways"].values() for kind in way["calls"]})
    rows, misses = [], []
    for one in found:
        threshold = "as shipped" if one["threshold"] is None else str(one["threshold"])
        for way, row in one["ways"].items():
            calls = [str(row["calls"].get(kind, 0)) for kind in kinds]
            moved = f"{sum(row['bytes'].values()) / 1e6:.1f}"
            times = [f"{row['median']:.2f}", row["text"], f"{row['made']:.0f}"]
            rows.append([threshold, way, f"{row['parameters']:,}", *calls, moved, *times])
        plain, stacked = one["ways"]["plain"], one["ways"]["stacked"]
        for kind, count in stacked["calls"].items():
            if count > plain["calls"].get(kind, 0):
                misses.append(f"- missed at {threshold}: {count} {kind}, plain has {plain['calls'].get(kind, 0)}")
        if stacked["ratio"] > 1.10:
            misses.append(f"- missed at {threshold}: stacked takes {stacked['ratio']:.2f} of plain, bar 1.10")
    columns = ("threshold", "way", "parameters", *kinds, "MB", "step, s", "of plain (quartiles)", "made in, s")
    return [timing.table(columns, rows), "\n".join(misses) or "The bars are met."]


def main() -> None:
    """Measure on two ranks, write the table."""
    from benchmarks import moe  # ranks find a function of this file by this name

    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--inner", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without_per_expert", action="store_true", help="which takes minutes to make")
    options = parser.parse_args()
    chosen = [way for way in WAYS if way != "per_expert" or not options.without_per_expert]
    found = []
    with tempfile.TemporaryDirectory() as directory:
        write_config(Path(directory), options.layers, options.experts, options.hidden, options.inner)
        for threshold in (None, 0):
            found.append(on_ranks(moe.measure, Path(directory), threshold, options.rounds, chosen)[0][0])
            print(found[-1], flush=True)
    sizes = f"{options.layers} layers, {options.experts} experts, top 8, hidden {options.hidden}, intermediate "
    timing.write(
        timing.RESULTS,
        "moe",
        torch.device("cpu"),
        "# Experts by their form, ZeRO-3 on two ranks, CPU",
        f"{sizes}{options.inner}, {TOKENS} tokens per rank, {options.rounds} rounds in turn.\n"
        f"{timing.head(torch.device('cpu'), 'deepspeed', 'transformers')}",
        *report(found),
    )


if __name__ == "__main__":
    main()
