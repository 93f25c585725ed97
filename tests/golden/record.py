"""Golden runs: train tiny models and compare every bit with a record, to show that a restructuring changes nothing.

    python tests/golden/record.py [--check | --write] [--only TEXT] [--record FILE]

Two ranks train 20 steps (CPU, gloo) of every combination of a dense and a MoE model, ZeRO stages 1 and 3, and
``RECIPES``. Compared with ``record.json`` are the losses of every step, every exported tensor (name, type, shape,
bytes), every tensor of the training checkpoint (type, shape, bytes) and the collectives of one late step by kind. The
record has no name of the project in it: after a renaming only the recipes below follow. Three to four minutes on two
cores.

The bits depend on the CPU and on the version of torch: the record says where it was made. On another machine write a
record of the commit that a change starts from (``--write --record FILE``), and check the change against that.
"""

import argparse
import json
import os
import platform
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.golden.ranks import digest, exported
from tests.lib.launcher import run_ranks
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.tiny import tiny_checkpoint

HERE = Path(__file__).parent
STEPS = 20
KINDS, STAGES = ("qwen3", "qwen3_moe"), (1, 3)
LORA = {"learnable": {"weight": False}, "optim": {"lr": 1e-2}}
# Beside weights that are held as codes; an expert in a stack has no such adapter.
BESIDE = {
    "learnable": {"weight": False, "weight_scale": False},
    "optim": {"lr": 1e-2},
    "adapter": {"kind": "lora", "rank": 4, "merge": False, "base": "quantized", "targets": [".*self_attn.*"]},
}
# The sections of each run, merged into those of `write_run` and of tests/lib/recipes.py.
RECIPES: dict[str, dict[str, Any]] = {
    "fp8_static": {"quant": {"scheme": "fp8_static"}, "learnable": {"act_scale": True}},
    "w4a16_g32": {"quant": {"scheme": "w4a16_g32"}},
    "nvfp4": {"quant": {"scheme": "nvfp4"}},
    "w2a16_g32_gptq": {"quant": {"scheme": "w2a16_g32", "init": "gptq"}},
    "lora_merged": {**LORA, "quant": {"scheme": "w4a16_g32"}, "adapter": {"kind": "lora", "rank": 4}},
    # Codes that are made while the weights are read.
    "lora_quantized": {**BESIDE, "quant": {"scheme": "w4a16_g32", "calibration_batches": 0}},
    # Codes of a checkpoint, the export of another run.
    "lora_source": {**BESIDE, "quant": {"scheme": "source"}, "export": {"format": "peft"}},
}
SOURCE = "w4a16_g32"


def write_run(directory: Path, kind: str, stage: int, name: str) -> Path:
    """Write the recipe of one run, whose output goes to a directory beside it."""
    sections: dict[str, Any] = {
        "train": {"steps": STEPS, "gradient_accumulation_steps": 2, "checkpoint_every": STEPS, "quant_stats_every": 0},
        **RECIPES[name],
    }
    sections["quant"] = {"calibration_batches": 2, **sections["quant"]}
    sections["export"] = {"enabled": True, **sections.get("export", {})}
    model = directory / f"{kind}-{stage}-{SOURCE}" / "export" if name == "lora_source" else directory / kind
    loss = {"teacher": str(directory / kind), "diagnostics_every": 0}  # the record is of losses alone
    chats, run = directory / "chats.jsonl", f"{kind}-{stage}-{name}"
    return write_recipe(directory, run, model, chats, stage=stage, dtype="bfloat16", loss=loss, **sections)


def train(directory: Path, kind: str, stage: int, name: str) -> dict[str, Any]:
    """Train one run and return its hashes; before it the run that it starts from, unless that was trained already."""
    found = directory / f"{kind}-{stage}-{name}" / "found.json"
    if not found.exists():
        if name == "lora_source":
            train(directory, kind, stage, SOURCE)
        run_ranks(HERE / "ranks.py", write_run(directory, kind, stage, name))
    return json.loads(found.read_text())


def record(directory: Path, only: str) -> dict[str, Any]:
    """Train all runs whose name matches ``only``; return their hashes, those of their inputs, and the machine."""
    chats = write_chats(directory / "chats.jsonl")
    inputs = {"chats": digest([chats.read_bytes()])}
    for kind in KINDS:
        tiny_checkpoint(directory / kind, kind, even=True)
        inputs[kind] = digest([str(exported(directory / kind)), (directory / kind / "tokenizer.json").read_bytes()])
    runs = {}
    for kind in KINDS:
        for stage in STAGES:
            for name in RECIPES:
                title = f"{kind} stage {stage} {name}"
                if re.search(only, title):
                    started = time.monotonic()
                    try:
                        runs[title] = train(directory, kind, stage, name)
                    except AssertionError as error:
                        print(error)
                        runs[title] = {"failed": "see above"}
                    print(f"{title}: {time.monotonic() - started:.1f} s", flush=True)
    return {"machine": machine(), "inputs": inputs, "runs": runs}


def machine() -> dict[str, str]:
    """Describe the CPU and the torch that the bits of a matrix product depend on."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    flags = set(re.search(r"^flags\s*: (.*)$", cpuinfo, re.M)[1].split()) if "flags" in cpuinfo else set()
    told = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_tile", "avx512_fp16")
    names = re.findall(r"^(?:model name|cpu family|model)\s*: (.*)$", cpuinfo.split("\n\n")[0], re.M)
    return {
        "cpu": f"{platform.machine()} {' '.join(sorted(names))}",
        "instructions": " ".join(flag for flag in told if flag in flags),
        "torch": f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}",
    }


def differences(expected: Any, found: Any, path: str = "") -> list[str]:
    """List the values that differ, one per line."""
    if isinstance(expected, dict) and isinstance(found, dict):
        keys = [*expected, *(key for key in found if key not in expected)]
        return [
            line
            for key in keys
            for line in differences(expected.get(key, "nothing"), found.get(key, "nothing"), f"{path} | {key}")
        ]
    return [] if expected == found else [f"{path.removeprefix(' | ')}: recorded {expected}, found {found}"]


def main() -> None:
    """Exit with 0: all equal; 1: something differs; 2: it does, but the record is of another kind of machine."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the record (the default)")
    parser.add_argument("--write", action="store_true", help="write the record instead")
    parser.add_argument("--only", default="", metavar="TEXT", help="regex on names like 'qwen3_moe stage 3 nvfp4'")
    parser.add_argument("--record", type=Path, default=HERE / "record.json", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.write and (arguments.check or arguments.only):
        parser.error("--write goes with neither --check nor --only")
    expected = {} if arguments.write else json.loads(arguments.record.read_text())
    elsewhere = [] if arguments.write else differences(expected.pop("machine"), machine())
    if elsewhere:
        print("warning: the record is of another kind of machine, where the same program may give other bits:")
        print("\n".join(elsewhere), flush=True)
    with tempfile.TemporaryDirectory(prefix="deepqat_golden_") as directory:
        found = record(Path(directory), arguments.only)
    if arguments.write:
        if failed := [name for name, run in found["runs"].items() if "failed" in run]:
            sys.exit(f"nothing is written, these runs failed: {', '.join(failed)}")
        arguments.record.write_text(json.dumps(found, indent=1) + "\n")
        return
    del found["machine"]
    expected["runs"] = {name: run for name, run in expected["runs"].items() if re.search(arguments.only, name)}
    lines = differences(expected, found)
    if not found["runs"]:
        sys.exit(f"no run matches {arguments.only!r}")
    print("\n".join(lines) or f"{len(found['runs'])} runs: all as recorded")
    if lines and elsewhere:
        print("inconclusive: the record is of another kind of machine (see the warning above); write one on this")
        print("machine, of the commit that the change starts from, with --write --record FILE, and check against it")
    sys.exit(0 if not lines else 2 if elsewhere else 1)


if __name__ == "__main__":
    main()
