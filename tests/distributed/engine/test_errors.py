"""What a user can get wrong ends the run on every rank, before its first step, with the name of the thing: no hang."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Lfm2Config, Lfm2ForCausalLM

from engine.checkpoint.files import file_crc32
from tests.families.make import Variant as Family
from tests.families.variants import VARIANTS
from tests.lib.launcher import run_ranks, run_waiting
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_checkpoint, tiny_tokenizer
from tests.lib.variants import NO_TEACHER

SCRIPT = Path(__file__).parent / "scripts" / "errors.py"
TRAIN = ROOT / "launch" / "train.py"
RANKS = 2
RAW_WEIGHT = r"quant.exempt_more: ['model\.layers\.\d+\.mamba\.dt_proj']"
# Whole windows of 128 tokens are compressed, and these samples have none.
NO_GRADIENT = (
    "model.layers.0.self_attn.compressor.position_bias, model.layers.0.self_attn.compressor.kv_proj.weight",
    "the loss of the first step did not depend on them",
    r"set learnable.freeze: ['model\.layers\.\d+\.self_attn\.compressor\.position_bias$', ",
)
AFTER_THE_START = ("raw_weight", "no_gradient", "diverges")
# name: what the text must hold. Paths are filled in with the test's directory.
EXPECTED = {
    "bad_line": ("{base}/bad_line.jsonl:31",),
    "few_samples": ("3 samples", "8"),
    "no_tokenizer": ("{base}/no_tokenizer",),
    "export_not_empty": ("export.dir", "{base}/export_not_empty/export", "not empty"),
    "recipe_not_written": ("output_dir: [Errno 21] Is a directory: ", "{base}/recipe_not_written/recipe.yaml"),
    "ds_config_key": ("{base}/ds_config_key.json", "zero_optimizaton", "zero_optimization"),
    "ds_config_clash": ("{base}/ds_config_clash.json", "gradient_clipping", "optim.grad_clip"),
    "teacher_vocabulary": ("loss.teacher", "{base}/other", "300", "301", "290"),
    "damaged_weights": ("{base}/damaged_weights/model.safetensors",),
    "not_numbers": ("{base}/not_numbers are not all numbers: NaN or Inf in model.embed_tokens.weight",),
    "diverges": (
        "checkpoints/step_00000002 was not written: the model diverged",
        "NaN or Inf in model.layers.0.self_at",
    ),
    "no_scales": ("{base}/empty", "safetensors"),
    "input_scales": (
        "scales of inputs in {base}/input_scales do not fit the inputs of the first samples",
        "model.layers.1.mlp.down_proj: the scale is 1e+06, absmax is",
        "nearly all codes are unused",
    ),
    "raw_weight": ("layers.0.mamba.dt_proj: the model's forward did not call them", RAW_WEIGHT),
    "no_gradient": NO_GRADIENT,
    "unseen_input": ("inputs that no batch reached", "layers.0.mamba.dt_proj", RAW_WEIGHT),
    "fused_experts": ("block_sparse_moe.experts", "input_linear.weight", "no quantized form", "quant.exempt"),
    # Of weights that cannot be read, so that what is said was found before they are.
    "adapter_of_nothing": ("adapter.targets: '.*no_proj' matches no linear layer",),
    "adapter_of_head": ("adapter.targets: lm_head: lm_head and embeddings get no adapter",),
    "adapter_of_embeddings": ("adapter.targets: model.embed_tokens: lm_head and embeddings get no adapter",),
    "adapter_too_large": ("q_proj: rank 49, expected at most 48, the layer's smaller side",),
    "adapter_of_another": ("adapter.start", "{base}/adapter", "it was trained on another checkpoint than model.path"),
    "codes_not_made": (
        "model.layers.0.self_attn.q_proj: adapter.base: quantized: scheme 'fp8_static' has a scale that a",
    ),
    "samples_seen": ("data.packing: true, expected false: model.path", "{base}/state", "the one before them in a row"),
    "samples_seen_by_teacher": ("data.packing: true, expected false: loss.teacher", "{base}/state", "in a row"),
}


def tiny_state_checkpoint(directory: Path) -> Path:
    """An LFM2, whose convolutions carry a state from token to token, with the tokenizer of the other models."""
    config = Lfm2Config(
        vocab_size=301,
        hidden_size=48,
        intermediate_size=83,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=2,
    )
    Lfm2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def write_adapter(directory: Path) -> None:
    """A folder as our export writes it beside another checkpoint."""
    directory.mkdir()
    tensors = {"lora_A": torch.randn(4, 48), "lora_B": torch.randn(48, 4)}
    keys = {f"base_model.model.model.layers.0.self_attn.q_proj.{key}.weight": one for key, one in tensors.items()}
    save_file(keys, directory / "adapter_model.safetensors", metadata={"format": "pt", "base": "of another"})
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 32, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def write_what_is_wrong(base: Path, model: Path, chats: Path) -> None:
    """Data, checkpoints, directories and configurations that the recipes name."""
    lines = chats.read_text().splitlines()
    lines[30] = lines[30][:-5]
    (base / "bad_line.jsonl").write_text("\n".join(lines))
    (base / "few.jsonl").write_text("\n".join(lines[:3]))
    shutil.copytree(model, base / "no_tokenizer", ignore=shutil.ignore_patterns("tokenizer*", "*chat_template*"))
    shutil.copytree(model, base / "damaged_weights")
    weights = base / "damaged_weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    shutil.copytree(model, base / "not_numbers")
    tensors = load_file(base / "not_numbers" / "model.safetensors")
    tensors["model.embed_tokens.weight"][-1, -1] = torch.nan  # which one rank holds, and no sample looks up
    save_file(tensors, base / "not_numbers" / "model.safetensors", metadata={"format": "pt"})
    (base / "export_not_empty" / "export").mkdir(parents=True)
    (base / "export_not_empty" / "export" / "precious").touch()
    (base / "recipe_not_written" / "recipe.yaml").mkdir(parents=True)
    (base / "empty").mkdir()
    (base / "input_scales").mkdir()
    scales = {"model.layers.1.mlp.down_proj.input_scale": torch.tensor(1e6)}
    save_file(scales, base / "input_scales" / "model.safetensors")
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    (base / "ds_config_key.json").write_text(json.dumps({"zero_optimizaton": zero}))
    (base / "ds_config_clash.json").write_text(json.dumps({"zero_optimization": zero, "gradient_clipping": 3.0}))
    other = tiny_checkpoint(base / "other")
    config = AutoConfig.from_pretrained(other)
    config.vocab_size = 290
    config.save_pretrained(other)
    tiny_state_checkpoint(base / "state")
    VARIANTS["granitemoe"].checkpoint(base / "granite")
    VARIANTS["jamba"].checkpoint(base / "raw")  # it multiplies by the weight of a Linear, which it does not call
    Family("deepseek_v4", "deepseek_v4").checkpoint(base / "windows")
    write_adapter(base / "adapter")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Recipes of runs that cannot work."""
    base = tmp_path_factory.mktemp("errors")
    model = tiny_checkpoint(base / "model")
    chats = write_chats(base / "chats.jsonl")
    write_what_is_wrong(base, model, chats)
    packed = {"data": {"packing": True}}
    raw_weight = {"model": {"path": str(base / "raw"), "attn_implementation": "eager"}, "loss": NO_TEACHER}
    sections = {
        "bad_line": {"data": {"train": [str(base / "bad_line.jsonl")]}},
        "few_samples": {"data": {"train": [str(base / "few.jsonl")]}},
        "no_tokenizer": {"model": {"path": str(base / "no_tokenizer")}},
        "export_not_empty": {"export": {"enabled": True}},
        "recipe_not_written": {},
        "ds_config_key": {"deepspeed": str(base / "ds_config_key.json")},
        "ds_config_clash": {"deepspeed": str(base / "ds_config_clash.json")},
        "teacher_vocabulary": {"loss": {"teacher": str(base / "other")}},
        "damaged_weights": {"model": {"path": str(base / "damaged_weights")}},
        "not_numbers": {"model": {"path": str(base / "not_numbers")}, "loss": NO_TEACHER},
        "diverges": {
            "loss": NO_TEACHER,
            "train": {"steps": 3, "checkpoint_every": 1, "keep_checkpoints": 1},
        },
        "no_scales": {"quant": {"scales": str(base / "empty")}},
        "input_scales": {"quant": {"scales": str(base / "input_scales")}},
        "raw_weight": {**raw_weight, "quant": {"scheme": "w8a16_channel"}},
        "no_gradient": {
            "model": {"path": str(base / "windows")},
            "loss": NO_TEACHER,
            "quant": {"exempt_more": [r".*\.o_a_proj"]},
        },
        "unseen_input": raw_weight,
        "fused_experts": {"model": {"path": str(base / "granite")}, "export": {"enabled": True}, "loss": NO_TEACHER},
        "samples_seen": {"model": {"path": str(base / "state")}, "loss": NO_TEACHER, **packed},
        "samples_seen_by_teacher": {"loss": {"teacher": str(base / "state")}, **packed},
    }
    damaged = sections["damaged_weights"] | {"loss": NO_TEACHER, "learnable": {"weight": False, "weight_scale": False}}
    beside = {"merge": False, "base": "quantized"}
    given = {"initial_input_scale": 1.0, "calibration_batches": 0}
    for name, choice in {
        "adapter_of_nothing": {"targets": [".*no_proj"]},
        "adapter_of_head": {"targets": ["lm_head"]},
        "adapter_of_embeddings": {"targets": [".*embed_tokens"]},
        "adapter_too_large": {"rank": 49},
        "adapter_of_another": {"rank": 4, "start": str(base / "adapter")},
        "codes_not_made": beside,
    }.items():
        sections[name] = damaged | {"adapter": {"kind": "lora", **choice}, "quant": given}
    assert sections.keys() == EXPECTED.keys()
    for name, values in sections.items():
        write_recipe(base, name, model, chats, stage=3, dtype="bfloat16", **values)
    return base


@pytest.fixture(scope="module")
def ended(base):
    """One launch for all of them."""
    run_ranks(SCRIPT, *(str(base / f"{name}.yaml") for name in EXPECTED))
    return base


@pytest.mark.parametrize("name", EXPECTED)
def test_every_rank_says_what_is_wrong(ended, name):
    found = [json.loads((ended / f"{name}_{rank}.json").read_text()) for rank in range(RANKS)]
    assert found[0]["type"] in ("RankError", "RecipeError", "DsConfigError") and found[0]["text"] == found[1]["text"]
    for part in EXPECTED[name]:
        assert part.replace("{base}", str(ended)) in found[0]["text"]
    assert [one["steps"] for one in found] == [int(name in AFTER_THE_START)] * RANKS
    assert list((ended / "export_not_empty").iterdir()) == [ended / "export_not_empty" / "export"]


def test_a_checkpoint_that_is_not_written_costs_none_before(ended):
    directory = ended / "diverges" / "checkpoints"
    assert [path.name for path in directory.glob("step_*")] == ["step_00000001"]
    assert (directory / "latest").read_text() == "step_00000001"


def test_a_checkpoint_that_holds_nan_is_not_continued(ended):
    """As an earlier version would have written it: everything but the numbers is in order."""
    checkpoint = ended / "diverges" / "checkpoints" / "step_00000001"
    file = next(checkpoint.glob("*zero_pp_rank_1_*optim_states.pt"))
    state = torch.load(file, weights_only=False)
    state["optimizer_state_dict"]["fp32_flat_groups"][0].data[0] = torch.nan
    torch.save(state, file)
    manifest = json.loads((checkpoint / "state.json").read_text())
    manifest["files"][file.name] = [file.stat().st_size, file_crc32(file)]
    (checkpoint / "state.json").write_text(json.dumps(manifest))
    recipe = yaml.safe_load((ended / "diverges.yaml").read_text())
    recipe["train"]["resume"] = True
    (ended / "continues.yaml").write_text(yaml.safe_dump(recipe))
    run_ranks(SCRIPT, str(ended / "continues.yaml"))
    for rank in range(RANKS):
        text = json.loads((ended / f"continues_{rank}.json").read_text())["text"]
        assert text.startswith(f"{checkpoint} cannot be continued: its run had diverged")
        assert "NaN or Inf in model.layers.0.self_attn." in text


def test_a_run_ends_with_an_exit_code_and_the_text_once(base):
    """The latest of them: the student is in its partitions, and only then the teacher's config is compared."""
    code, output = run_waiting(TRAIN, "--config", base / "teacher_vocabulary.yaml")
    assert code == 1
    assert output.count("the teacher 290") == 1 and "Traceback" not in output


def test_a_bad_recipe_is_said_once_before_ranks_meet(base):
    code, output = run_waiting(TRAIN, "--config", base / "teacher_vocabulary.yaml", "--optim.lr", "-1")
    assert code == 2
    assert output.count("error: optim.lr: -1") == 1 and "Traceback" not in output, output
