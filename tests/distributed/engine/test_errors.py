"""Runs that cannot work, and ranks that do not do the same: every rank says what is wrong, and none hangs."""

import pickle
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import save_file
from torch import Tensor

from data.loader import MicroBatch
from engine.checkpoint.checked_files import file_crc32
from engine.config.reading import load_recipe
from engine.loop import Loop, LoopState
from engine.losses.objective import LossChunk
from launch.exits import clean_exit
from model.ranks import is_main, rank, shut_down
from model.save.aside import WRITING
from model.zero import local_data
from tests.distributed.engine.scripts.train import End, end_of, ends_of
from tests.families.make import Variant as Family
from tests.families.variants import VARIANTS
from tests.lib.checkpoints import edit_json, edit_tensors
from tests.lib.launcher import CALL, launch, on_ranks
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.tiny import tiny_checkpoint
from tests.lib.variants import NO_TEACHER

STEPS = 3
RAW_WEIGHT = r"quant.exempt_more: ['model\.layers\.\d+\.mamba\.dt_proj']"
AFTER_THE_START = ("raw_weight", "no_gradient", "diverges")


Cases = dict[str, tuple[dict[str, Any], list[str]]]
"""Sections of a recipe that cannot work, and what the error must hold, by name."""


def model(path: Path, **options: str) -> dict[str, Any]:
    """The sections of a recipe with this model."""
    return {"model": {"path": str(path), **options}, "loss": NO_TEACHER}


def cases(base: Path) -> Cases:
    """All cases. Those that are found before the weights are read name weights that cannot be read."""
    return {**of_files(base), **before_data(base), **before_weights(base), **with_weights(base)}


def of_files(base: Path) -> Cases:
    """Data, tokenizers and directories."""
    bad_data = {"data": {"train": [f"{base}/bad_line.jsonl"]}}
    return {
        "bad_line": (bad_data, [f"{base}/bad_line.jsonl:31"]),
        "few_samples": ({"data": {"train": [f"{base}/few.jsonl"]}}, ["3 samples", "8"]),
        "no_tokenizer": (model(base / "no_tokenizer"), [f"{base}/no_tokenizer"]),
        "export_not_empty": (
            {"export": {"enabled": True}},
            ["export.dir", f"{base}/export_not_empty/export", "not empty"],
        ),
        "recipe_not_written": (
            {},
            [f"output_dir: {base}/recipe_not_written/recipe.yaml.partial -> ", "/recipe.yaml: Is a directory"],
        ),
        "teacher_vocabulary": (
            {"loss": {"teacher": f"{base}/other"}},
            ["loss.teacher", f"{base}/other", "300", "301", "290"],
        ),
        "teacher_tokens": ({"loss": {"teacher": f"{base}/strange"}}, ["has another tokenizer: token 290 is"]),
    }


def before_data(base: Path) -> Cases:
    """Models, which are checked before data is read, with their scales and the layers that can be quantized."""
    bad_data = {"data": {"train": [f"{base}/bad_line.jsonl"]}}
    return {
        "weights_before_data": (
            {**model(base / "damaged_weights"), **bad_data},
            [f"{base}/damaged_weights/model.safetensors is truncated"],
        ),
        "teacher_before_data": (
            {"loss": {"teacher": f"{base}/damaged_weights"}, **bad_data},
            [f"{base}/damaged_weights/model.safetensors is truncated"],
        ),
        "groups_before_data": ({"quant": {"scheme": "w4a16_g128"}, **bad_data}, ["is not divisible by group_size 128"]),
        "scales_before_data": ({"quant": {"scales": f"{base}/empty"}, **bad_data}, [f"{base}/empty has no *.safet"]),
        "event_before_data": (
            {"schedule": [{"at": 1, "fake_quant": False, "layers": "nothing"}], **bad_data},
            ["schedule[0].layers: pattern 'nothing' matches no quantized layer"],
        ),
        "cache_before_data": (
            {"loss": {"kd": "kl_top_k", "top_k": 5, "teacher": None, "teacher_cache": f"{base}/cache"}, **bad_data},
            [f"{base}/cache/manifest.json is damaged ('format')"],
        ),
    }


def before_weights(base: Path) -> Cases:
    """Options that contradict the model or the number of steps."""
    early = model(base / "damaged_weights")
    fixed = {"learnable": {"weight": False, "weight_scale": False}}
    adapter = {"adapter": {"kind": "lora", "targets": ["lm_head"]}, **fixed}
    return {
        "late_event": (early, ["an event at step 1000, expected at most 4: train.steps is 5, and steps count from 0"]),
        "adapter_of_head": ({**early, **adapter}, ["adapter.targets: lm_head: lm_head and embeddings get no adapter"]),
    }


def with_weights(base: Path) -> Cases:
    """Weights and scales, at the start and in the first steps."""
    raw = model(base / "raw", attn_implementation="eager")
    often = {"steps": STEPS, "checkpoint_every": 1, "keep_checkpoints": 1}
    return {
        "not_numbers": (
            model(base / "not_numbers"),
            [f"{base}/not_numbers are not all numbers: NaN or Inf in model.embed_tokens.weight"],
        ),
        "diverges": (
            {"loss": NO_TEACHER, "train": often},
            ["step_00000002 was not written: the model diverged", "NaN or Inf in model.layers.0.self_at"],
        ),
        "input_scales": (
            {"quant": {"scales": f"{base}/input_scales"}},
            [
                f"scales of inputs in {base}/input_scales do not fit the inputs of the first samples",
                "model.layers.1.mlp.down_proj: the scale is 1e+06, absmax is",
                "nearly all codes are unused",
            ],
        ),
        "raw_weight": (
            {**raw, "quant": {"scheme": "w8a16_channel"}},
            ["layers.0.mamba.dt_proj: the model's forward did not call them", RAW_WEIGHT],
        ),
        "unseen_input": (raw, ["inputs that no batch reached", "layers.0.mamba.dt_proj", RAW_WEIGHT]),
        # Whole windows of 128 tokens are compressed, and these samples have none.
        "no_gradient": (
            {**model(base / "windows"), "quant": {"exempt_more": [r".*\.o_a_proj"]}},
            [
                "model.layers.0.self_attn.compressor.position_bias, model.layers.0.self_attn.compressor.kv_proj.weight",
                "the loss of the first step did not depend on them",
                r"set learnable.freeze: ['model\.layers\.\d+\.self_attn\.compressor\.position_bias$', ",
            ],
        ),
    }


def write_what_is_wrong(base: Path, model: Path, chats: Path) -> None:
    """Data, checkpoints, directories and configurations that the recipes name."""
    lines = chats.read_text().splitlines()
    lines[30] = lines[30][:-5]
    (base / "bad_line.jsonl").write_text("\n".join(lines))
    (base / "few.jsonl").write_text("\n".join(lines[:3]))
    shutil.copytree(model, base / "no_tokenizer", ignore=shutil.ignore_patterns("tokenizer*", "*chat_template*"))
    for name in ("damaged_weights", "not_numbers"):
        shutil.copytree(model, base / name)
    weights = base / "damaged_weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    embedding = "model.embed_tokens.weight"  # one rank holds its last value, and no sample looks it up
    edit_tensors(base / "not_numbers", embedding, lambda tensors: tensors[embedding][-1, -1].fill_(torch.nan))
    for directory in ("export_not_empty/export/precious", "recipe_not_written/recipe.yaml", "empty", "input_scales"):
        (base / directory).mkdir(parents=True)
    (base / "cache").mkdir()
    (base / "cache" / "manifest.json").write_text("{}")
    scales = {"model.layers.1.mlp.down_proj.input_scale": torch.tensor(1e6)}
    save_file(scales, base / "input_scales" / "model.safetensors")
    edit_json(tiny_checkpoint(base / "other") / "config.json", vocab_size=290)
    edit_json(tiny_checkpoint(base / "strange", "llama") / "tokenizer.json", exchange_two_tokens)
    VARIANTS["jamba"].checkpoint(base / "raw")  # it multiplies by the weight of a Linear, which it does not call
    Family("deepseek_v4", "deepseek_v4").checkpoint(base / "windows")


def exchange_two_tokens(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    by_id = {id: token for token, id in vocabulary.items()}
    vocabulary[by_id[290]], vocabulary[by_id[295]] = 295, 290


def late_event(loop: Loop) -> None:
    loop.at(1000)(print)


def spoil(loop: Loop) -> None:
    """Make a weight infinite after two steps, as a run that diverges does."""

    @loop.every(2)
    def fill(state: LoopState) -> None:
        weight = next(weight for name, weight in state.model.named_parameters() if ".0.self_attn." in name)
        local_data(weight).fill_(float("inf"))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The recipes."""
    base = tmp_path_factory.mktemp("errors")
    model, chats = tiny_checkpoint(base / "model"), write_chats(base / "chats.jsonl")
    write_what_is_wrong(base, model, chats)
    for name, (sections, _) in cases(base).items():
        write_recipe(base, name, model, chats, **sections)
    write_recipe(base, "raises", model, chats, loss=NO_TEACHER)
    return base


@pytest.fixture(scope="module")
def ended(base) -> list[dict[str, End]]:
    """How they ended on each rank, in one job."""
    return on_ranks(ends_of, base, {**dict.fromkeys(cases(base)), "diverges": spoil, "late_event": late_event})[0]


@pytest.mark.parametrize("name", cases(Path()))
def test_every_rank_says_what_is_wrong(base, ended, name):
    first, second = (ends[name] for ends in ended)
    assert first.text.startswith(("RankError", "RecipeError", "DsConfigError")) and first == second
    assert not [part for part in cases(base)[name][1] if part not in first.text], first.text
    assert first.began == (name in AFTER_THE_START)
    assert list((base / "export_not_empty" / "export").iterdir()) == [base / "export_not_empty" / "export" / "precious"]


def test_a_checkpoint_of_a_run_that_diverged_is_neither_written_nor_continued(base, ended):
    """The one before it stays. One with NaN, as an earlier version would have written it, is refused."""
    directory = base / "diverges" / "checkpoints"
    assert [path.name for path in directory.glob("step_*")] == ["step_00000001"]
    assert (directory / "latest").read_text() == "step_00000001"

    checkpoint = directory / "step_00000001"
    file = next(checkpoint.glob("*zero_pp_rank_1_*optim_states.pt"))
    state = torch.load(file, weights_only=False)
    state["optimizer_state_dict"]["fp32_flat_groups"][0].data[0] = torch.nan
    torch.save(state, file)
    whole = {file.name: [file.stat().st_size, file_crc32(file)]}
    edit_json(checkpoint / "state.json", lambda manifest: manifest["files"].update(whole))
    recipe = yaml.safe_load((base / "diverges.yaml").read_text())
    recipe["train"]["resume"] = True
    (base / "continues.yaml").write_text(yaml.safe_dump(recipe))
    for end in on_ranks(end_of, base / "continues.yaml")[0]:
        assert f": {checkpoint} cannot be continued: its run had diverged" in end.text
        assert "NaN or Inf in model.layers.0.self_attn." in end.text


class Defect(dict):
    """A micro-batch that cannot be brought to the device."""

    def __getitem__(self, name: str) -> Any:
        raise ZeroDivisionError("planted in the middle of a step")


def raise_on_rank_1(path: Path) -> None:
    """Run a recipe; from the second step on the second batch of rank 1 is a defect."""
    with clean_exit():
        loop = Loop(load_recipe(path))

        @loop.at(1)
        def plant(state: LoopState) -> None:
            step = state.loader.step

            def with_defect(k: int) -> list[MicroBatch]:
                first, second = step(k)
                return [first, Defect(second)]

            if rank() == 1:
                state.loader.step = with_defect

        loop.run()


def test_a_rank_that_raises_ends_the_job_with_its_error_first(base):
    """The launcher ends at all: the other rank waits in a collective, which would give up after half an hour."""
    (base / "call").write_bytes(pickle.dumps((raise_on_rank_1, [base / "raises.yaml"])))
    result = launch(CALL, base / "call")
    assert result.returncode == 1
    errors = [line for line in result.stdout.splitlines() if line.startswith("error on rank")]
    assert errors[0] == "error on rank 1:" and "ZeroDivisionError: planted in the middle of a step" in result.stdout


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that do not do the same
# ---------------------------------------------------------------------------------------------------------------------


def rates(loop: Loop) -> None:
    """A condition that holds on rank 1 alone changes a rate, which no collective shows."""
    loop.when(lambda state: rank() == 1)(lambda state: state.set_peak_rates(weights=0.5))


def weights(loop: Loop) -> None:
    """An action sets another loss weight on each rank."""
    loop.at(1)(lambda state: state.set_loss_weights(lm=1.0 + rank()))


def layers(loop: Loop) -> None:
    """An action switches fake quant off on rank 0 alone."""
    loop.at(1)(lambda state: state.session.quantization.set_fake_quant(False, False) if is_main() else None)


def stops(loop: Loop) -> None:
    """Rank 0 ends its run after the first step, rank 1 does not."""
    loop.every(1)(lambda state: state.stop() if is_main() else None)


def last(loop: Loop) -> None:
    """The ranks part after the last step: there is no other to find it."""
    loop.every(loop.recipe.train.steps)(lambda state: state.set_peak_rates(weights=float(rank())))


def same(loop: Loop) -> None:
    """Both ranks do the same, and a condition is met: nothing is wrong. Counts the reductions of a step."""
    loop.when(lambda state: True)(lambda state: state.set_peak_rates(weights=1e-4))
    counted = dist.all_reduce

    def count(tensor: Tensor, *arguments: object, **options: object) -> object:
        REDUCTIONS.append(f"{tensor.dtype} {tensor.numel()}")
        return counted(tensor, *arguments, **options)

    # The very function that model.ranks looks up.
    loop.at(1)(lambda state: setattr(dist, "all_reduce", count))
    loop.every(2)(lambda state: setattr(dist, "all_reduce", counted))


def skipped(loop: Loop) -> None:
    """Every loss is infinite, in fewer steps than end a run by themselves."""

    @loop.token_loss("bad", weight=1.0)
    def bad(chunk: LossChunk) -> Tensor:
        return 0.0 * chunk.student.sum(-1) + torch.inf


PLANTS = {plant.__name__: plant for plant in (rates, weights, layers, stops, last, same, skipped)}
REDUCTIONS: list[str] = []


def run_differing(base: Path) -> tuple[dict[str, End], list[str], str]:
    """How the runs ended, the reductions of a step, and the error of a run behind the end of the process group."""
    ends = ends_of(base, PLANTS)
    shut_down()
    return ends, REDUCTIONS, end_of(base / "same.yaml").text


@pytest.fixture(scope="module")
def differing(tmp_path_factory):
    """Directory of the runs, what the ranks found, what they printed."""
    base = tmp_path_factory.mktemp("differing")
    model, chats = tiny_checkpoint(base / "model", layers=1), write_chats(base / "chats.jsonl")
    for index, name in enumerate(PLANTS):
        write_recipe(
            base,
            name,
            model,
            chats,
            stage=index % 4,
            train={"steps": STEPS, "gradient_accumulation_steps": 1},
            loss=NO_TEACHER,
            quant={"scheme": "w4a16_channel"} if name == "layers" else {"calibration_batches": 1},
            export={"enabled": name == "skipped"},
        )
    (left := base / "skipped" / "export.tmp-0123abcd").mkdir(parents=True)
    (left / WRITING).write_text(socket.gethostname())  # of an export that was killed
    (first, second), output = on_ranks(run_differing, base)
    assert first[0] == second[0]
    return base, first, output


@pytest.mark.parametrize(
    ("name", "steps", "expected"),
    [
        ("rates", 1, 'peak rates is {} on rank 0 and {"weights": 0.5} on rank 1'),
        ("weights", 1, 'loss weights is {"lm": 1.0} on rank 0 and {"lm": 2.0} on rank 1'),
        ("layers", 1, "fake quant is {"),
        ("stops", 1, "stopped is true on rank 0 and false on rank 1"),
        ("last", STEPS, 'peak rates is {"weights": 0.0} on rank 0 and {"weights": 1.0} on rank 1'),
    ],
)
def test_ranks_that_do_not_do_the_same_are_told_apart(differing, name, steps, expected):
    end = differing[1][0][name]
    assert end.text.startswith(f"RankError: step {steps}: the ranks differ in what events have set: ")
    assert expected in end.text and "Conditions and actions must do the same on every rank" in end.text
    assert end.steps == steps


def test_ranks_that_do_the_same_train_on_with_two_reductions_a_step(differing):
    """Events are compared in the reduction of the token counts."""
    _, (ends, reductions, again), _ = differing
    assert ends["same"] == End("", True, STEPS)
    ours = [one for one in reductions if one in ("torch.float32 2", "torch.int64 4")]
    assert sorted(ours) == ["torch.float32 2", "torch.int64 4"], reductions
    assert sum(one.startswith("torch.int64") for one in reductions) == 1
    assert again.startswith("RankError: this process has closed its process group and cannot start another")


def test_a_run_in_which_no_step_trained_fails_and_exports_nothing(differing):
    """And removes what an export left that was killed."""
    base, (ends, *_), _ = differing
    assert ends["skipped"].steps == STEPS
    expected = f"RankError: all {STEPS} steps were left out: their loss or gradients were not finite"
    assert ends["skipped"].text.startswith(expected)
    assert not list((base / "skipped").glob("export*"))


def test_a_run_that_would_write_nothing_says_so_before_it_trains(differing):
    """All but the one that exports; and none leaves the mark of a job that runs."""
    base, _, output = differing
    said = "warning: this run writes neither an export (export.enabled is false) nor a checkpoint"
    assert output.count(said) == len(PLANTS) - 1
    assert not list(base.glob("*/.running*"))
