"""Exports of a model in training on two ranks: what is on disk, what memory it took, what a failure leaves behind."""

import json
import re
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from model.checkpoint.safetensors import INDEX
from model.save.aside import remove_left
from tests.distributed.model.save.scripts.save import SHARD
from tests.lib.checkpoints import differing, read_tensors
from tests.lib.launcher import run_waiting
from tests.lib.tiny import tiny_checkpoint

SCRIPT = Path(__file__).parent / "scripts" / "save.py"
# name: stage, architecture, scheme, way. Stage 3 with every layout, and stage 2, where nothing is gathered.
RUNS = {
    "zero3-dense": (3, "qwen3", "fp8_static", "plain"),
    "zero3-moe": (3, "qwen3_moe", "fp8_static", "plain"),
    "zero3-int3": (3, "llama", "w3a16_channel", "plain"),
    "zero3-offload": (3, "qwen3_moe", "fp8_static", "offload"),
    "zero3-codes": (3, "qwen3_moe", "fp8_static", "codes"),
    "zero2-dense": (2, "qwen3", "fp8_static", "plain"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One launch; the last thing it does is to be killed while writing."""
    base = tmp_path_factory.mktemp("save")
    entries = []
    for name, (stage, kind, scheme, way) in RUNS.items():
        source = tiny_checkpoint(base / f"source-{name}", kind, tied=kind == "qwen3")
        entries.append(f"{name}:{stage}:{scheme}:{way}:{source}")
    code, output = run_waiting(SCRIPT, base / "out", *entries)
    assert code == -signal.SIGXFSZ, f"expected to be killed at the very end, not {code}:\n{output[-8000:]}"
    return base


class Exported:
    """Files of one case: directories, results of both ranks, and the whole parameters."""

    def __init__(self, base: Path, name: str):
        self.stage, self.kind, *_ = RUNS[name]
        self.directory, self.source = base / "out" / name, base / f"source-{name}"
        self.ranks = [json.loads((self.directory / f"rank{rank}.json").read_text()) for rank in range(2)]
        self.whole = torch.load(self.directory / "whole.pt")
        self.plain = {key: tensor for key, tensor in self.whole.items() if not key.endswith(("_s0", "_theta"))}

    def tensors(self, export: str) -> dict[str, torch.Tensor]:
        """Everything in the weight files of one export."""
        return read_tensors(self.directory / export)


@pytest.fixture(params=RUNS)
def case(run, request):
    return Exported(run, request.param)


def test_many_shards_hold_the_same_as_one(case):
    assert case.ranks[0]["one"]["files"] == ["model.safetensors"]
    assert not (case.directory / "one" / INDEX).exists()
    assert not differing(case.tensors("one"), case.tensors("many"))
    files = case.ranks[0]["many"]["files"]
    assert len(files) > 2
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    index = json.loads((case.directory / "many" / INDEX).read_text())
    for file in files:
        assert {key for key, where in index["weight_map"].items() if where == file} == load_file(
            case.directory / "many" / file
        ).keys()


def test_no_shard_is_beyond_its_limit_unless_it_is_one_module(case):
    assert case.ranks[0]["one"]["bytes"] == sum(tensor.nbytes for tensor in case.tensors("one").values())
    for file in case.ranks[0]["many"]["files"]:
        tensors = load_file(case.directory / "many" / file)
        modules = {key.rpartition(".")[0] for key in tensors}
        assert sum(tensor.nbytes for tensor in tensors.values()) <= SHARD or len(modules) == 1


def largest_module(tensors: dict[str, torch.Tensor]) -> int:
    """Bytes of the module that has most."""
    sizes: Counter[str] = Counter()
    for key, tensor in tensors.items():
        sizes[key.rpartition(".")[0]] += tensor.nbytes
    return max(sizes.values())


def test_rank_0_holds_one_module_packed_and_two_gathered(case):
    """At most, counted: the largest module gathered, as much coming, and the largest on disk; rank 1 holds nothing."""
    # Scales that the module shares are listed under another one's name.
    gathered = 2 * (largest_module(case.whole) + 16) if case.stage == 3 else 0
    for export in ("one", "many"):
        assert min(gathered, 1) <= case.ranks[0][export]["peak"] <= gathered + largest_module(case.tensors(export))
        assert case.ranks[1][export]["peak"] == 0
    for rank in case.ranks:
        assert rank["wrong inside"] == rank["changed after"] == []
        # Where stage 3 takes a forward alone for a step it gathers module by module from then on, and twice.
        assert rank["trace"] == [True, True]


def test_the_rest_of_the_directory(case):
    for export in ("one", "many", "plain"):
        directory = case.directory / export
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            assert (directory / file).read_bytes() == (case.source / file).read_bytes()
        config, source = (json.loads((path / "config.json").read_text()) for path in (directory, case.source))
        quantized = config.pop("quantization_config", None)
        assert config == source
        assert (quantized is None) == (export == "plain")
        # Readable for whoever serves it: the library that writes the files makes them private.
        assert len({path.stat().st_mode & 0o777 for path in directory.iterdir()}) == 1
    router = [r"re:.*mlp\.gate$"] if case.kind == "qwen3_moe" else []
    one = json.loads((case.directory / "one" / "config.json").read_text())
    assert one["quantization_config"]["ignore"] == [*router, "lm_head"]


def test_a_plain_export_is_the_trained_model(case):
    """Each parameter is as rank 0 saw it whole, after a step that moved them, and transformers finds all of them."""
    assert not differing(case.tensors("plain"), case.plain) and differing(read_tensors(case.source), case.plain)
    _, info = AutoModelForCausalLM.from_pretrained(case.directory / "plain", output_loading_info=True)
    assert not any(info.values()), info


FAILURES = {
    "refused": "is not empty",
    "no source": "has no config.json",
    "disk full": "export failed in model-0000",
    "no memory": "out of memory",
    "lost scale": "weight_scale has a value that is not finite",
}


def test_a_failure_on_rank_0_is_raised_on_both_and_leaves_nothing_behind(case):
    """No directory of a failed export, and nothing beside; the full disk names its file."""
    for attempt, message in FAILURES.items():
        first, second = (results[attempt]["raised"] for results in case.ranks)
        assert first == second and message in first, attempt
    layer, _, leaf = case.ranks[0]["lost scale"]["owner"].rpartition(".")
    # Of stacked experts the first one that has no scale.
    assert (f"{layer}.0." if layer.endswith(".experts") else f"{layer}.{leaf}") in first
    left = {path.name for path in case.directory.iterdir() if path.is_dir()}
    killed = {name for name in left if name.startswith("killed.tmp-")}
    assert left - killed == {"one", "many", "plain"}
    assert re.search(
        r"/full\.tmp-\w{8}/model-0000\d-of-\d+\.safetensors: File too large", case.ranks[0]["disk full"]["raised"]
    )


def test_a_killed_export_never_looks_complete(run):
    """Killed in the middle of a file: nothing under its name, and what lies beside nobody takes for a checkpoint."""
    directory = run / "out" / list(RUNS)[-1]
    assert not (directory / "killed").exists()
    (left,) = directory.glob("killed.tmp-*")
    assert any(left.iterdir())
    assert not (left / "config.json").exists()
    remove_left(directory / "killed")  # as the next export does
    assert not left.exists()
