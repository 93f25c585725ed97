"""Configurations of other tools, in the form in which they publish them, and the recipes that come out."""

import json
import sys
from dataclasses import replace

import pytest
import yaml

from engine.config.config import Recipe
from engine.config.reading import load_recipe, parse_recipe
from launch import convert_recipe
from launch.convert_recipe import HOUSEKEEPING, ForeignRecipe, converted_recipe
from tests.lib.root import ROOT

# As configs/qwen3/qat/fp8_static/learn_scale/qwen3-30b-a3b_fp8_static_end2end_learn_scale_zero3.yaml.
SCALES_ONLY = """
global: {save_path: ./output}
model: {name: Qwen, model_path: Qwen/Qwen3-30B-A3B, trust_remote_code: true, torch_dtype: auto, device_map: None,
        low_cpu_mem_usage: true, use_cache: false}
compression:
  name: QAT
  quantization:
    {name: fp8_static, bits: 8, quant_method: {weight: per-tensor, activation: per-tensor},
     ignore_layers: [lm_head, embed_tokens, gate.weight]}
  QAT:
    hf_dataset: null
    from_ptq_ckpt: ./output_ptq_30b/qwen3-a3b_fp8_static
    training_mode: end2end
    dist_mode: hf
    save_format: real
    do_train: true
    loss_type: cakld
    loss_topk: null
    kd_temperature: 1.0
    kd_alpha: 0.5
    lm_loss_weight: 1.0
    kd_loss_weight: 1.0
    plugin_config:
      enable_scale: true
      quant_config: {use_weight_quant: true, use_activation_quant: true, use_qkv_quant: false,
        weight_scale_init_value: 0.1, activation_scale_init_value: 0.1,
        learnable: {act_scale: false, weight_scale: true, kv_scale: false, norm: false, lwc: false}}
    hf_args: {bf16: true, logging_steps: 1, logging_first_step: true, per_device_train_batch_size: 1,
      gradient_accumulation_steps: 1, learning_rate: 1.0e-6, lr_scheduler_type: cosine, num_train_epochs: 1,
      max_steps: 3,
      save_strategy: "no", warmup_ratio: 0.0, max_grad_norm: 1.0, gradient_checkpointing: true,
      gradient_checkpointing_kwargs: {use_reentrant: true}, deepspeed: configs/ds_config_zero3.json}
dataset: {name: TextDataset, data_path: sharegpt.jsonl, max_seq_length: 4096, num_samples: 256, batch_size: 1}
"""
# As its qwen3-4b_fp8_static_end2end_learn_scale_zero3.yaml, which differs in these places.
SCALES_ONLY_4B = SCALES_ONLY
for of_30b, of_4b in (
    ("./output}", "./output_4b_zero3}"),
    ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-4B"),
    ("[lm_head, embed_tokens, gate.weight]", "[lm_head, embed_tokens]"),
    ("./output_ptq_30b/qwen3-a3b_fp8_static", "./output_ptq/qwen3-4b_fp8_static"),
    ("max_steps: 3", "max_steps: 5"),
    ("sharegpt.jsonl, max_seq_length: 4096, num_samples: 256", "sharegpt.jsonl, max_seq_length: 512, num_samples: 16"),
    ("batch_size: 1}", "batch_size: 1, is_sft_data: true}"),
):
    assert of_30b in SCALES_ONLY_4B
    SCALES_ONLY_4B = SCALES_ONLY_4B.replace(of_30b, of_4b)
# As recipes/configs/llama3/8B_qat_full.yaml.
TORCHTUNE = """
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: tokenizer.model, max_seq_len: 1024}
dataset: {_component_: torchtune.datasets.alpaca_dataset, packed: false}
seed: null
shuffle: true
model: {_component_: torchtune.models.llama3.llama3_8b}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: llama3,
  checkpoint_files: [model.safetensors], recipe_checkpoint: null, output_dir: "${output_dir}", model_type: LLAMA3}
resume_from_checkpoint: false
batch_size: 2
epochs: 3
quantizer: {_component_: torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer, groupsize: 256}
optimizer: {_component_: torch.optim.AdamW, lr: 2.0e-5, foreach: false}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
max_steps_per_epoch: null
gradient_accumulation_steps: 1
device: cuda
enable_activation_checkpointing: true
memory_efficient_fsdp_wrap: true
dtype: fp32
metric_logger: {_component_: torchtune.training.metric_logging.DiskLogger, log_dir: "${output_dir}"}
output_dir: alpaca-llama3-finetune
log_every_n_steps: 1
log_peak_memory_stats: false
"""
# With these values of other keys: a temperature and a top k of cakld, epochs beside steps; any model of torchtune.
WITHOUT_EFFECT = [f"compression.QAT.{key}" for key in ("loss_topk", "kd_temperature", "hf_args.num_train_epochs")]
WITHOUT_EFFECT += ["model._component_"]
# As recipes/configs/llama3/8B_qat_lora.yaml in these keys.
TORCHTUNE_LORA = TORCHTUNE.replace(
    "llama3.llama3_8b",
    """llama3.lora_llama3_8b, lora_attn_modules: [q_proj, output_proj], apply_lora_to_mlp: true,
      apply_lora_to_output: false, lora_rank: 4, lora_alpha: 8, lora_dropout: 0.5""",
)
TORCHTUNE_LORA += """
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 100,
  num_cycles: 0.5}
"""
FILES = {"AngelSlim": SCALES_ONLY, "torchtune": TORCHTUNE, "torchtune with LoRA": TORCHTUNE_LORA}


def read(text: str) -> tuple[Recipe, list[str]]:
    """The recipe that comes out, parsed as training does, and the notes."""
    made = converted_recipe(yaml.safe_load(text))
    words = [
        f"--{section}={json.dumps(value) if isinstance(value, dict) else value}"
        for section, value in made.recipe.items()
    ]
    return parse_recipe(words, check_files=False), made.notes


def test_scales_alone_learn_from_the_model_itself():
    recipe, notes = read(SCALES_ONLY)
    assert (recipe.quant.scheme, recipe.quant.scales) == ("fp8_static", "./output_ptq_30b/qwen3-a3b_fp8_static")
    learnable = recipe.learnable
    assert not learnable.weight and learnable.weight_scale and not learnable.act_scale and not learnable.norm
    assert (recipe.loss.kd, recipe.loss.teacher, recipe.loss.lm_weight, recipe.loss.kd_weight) == (
        "cakld",
        "self",
        1,
        1,
    )
    assert (recipe.train.steps, recipe.optim.schedule, recipe.optim.min_lr_ratio) == (3, "cosine", 0)
    assert tuple(recipe.optim.betas) == (0.9, 0.999)
    assert (recipe.deepspeed, recipe.train.activation_checkpointing, recipe.data.max_length) == ("zero3", True, 4096)
    said = {note.partition(":")[0].rpartition(".")[2] for note in notes}
    assert said == {"num_samples", "learning_rate", "is_sft_data", "from_ptq_ckpt", "deepspeed", "max_seq_length"}
    dense, notes = read(SCALES_ONLY_4B)
    assert (dense.train.steps, dense.data.max_length, dense.model.path) == (5, 512, "Qwen/Qwen3-4B")
    assert (dense.quant, dense.learnable, dense.loss) == (
        replace(recipe.quant, scales="./output_ptq/qwen3-4b_fp8_static"),
        recipe.learnable,
        recipe.loss,
    )
    assert not any("is_sft_data" in note for note in notes)


def test_scales_may_be_in_the_folder_that_their_qat_writes(tmp_path):
    (tmp_path / "qat" / "final_quant_checkpoint").mkdir(parents=True)
    for name, expected in (("qat", "qat/final_quant_checkpoint"), ("ptq", "ptq")):
        changed = SCALES_ONLY_4B.replace("./output_ptq/qwen3-4b_fp8_static", str(tmp_path / name))
        assert read(changed)[0].quant.scales == str(tmp_path / expected)


@pytest.mark.parametrize(("form", "name"), [(SCALES_ONLY_4B, "qwen3_4b"), (SCALES_ONLY, "qwen3_30b_a3b")])
def test_shipped_recipes_are_its_verified_scenarios(form, name):
    """For more steps, with the betas of this project, and with scales that the run measures."""
    shipped = load_recipe(ROOT / "launch" / "recipes" / f"{name}_fp8_scales_only.yaml")
    converted, _ = read(form)
    optim = {"betas": shipped.optim.betas, "scale_lr": shipped.optim.scale_lr}
    for section, same in {
        "quant": {"scales": None},
        "learnable": {},
        "loss": {},
        "optim": optim,
        "data": {"train": shipped.data.train, "seed": shipped.data.seed},
        "train": {"steps": shipped.train.steps, "seed": shipped.train.seed, "log_every": shipped.train.log_every},
    }.items():
        assert replace(getattr(converted, section), **same) == getattr(shipped, section), section
    assert converted.deepspeed == shipped.deepspeed


def test_first_scales_of_inputs_are_of_as_many_samples_as_there():
    """Without a PTQ checkpoint each rank calibrates on lazy_init_samples samples; with one, on as many micro-batches as
    in the shipped recipes."""
    shipped = load_recipe(ROOT / "launch" / "recipes" / "qwen3_4b_fp8_scales_only.yaml")
    recipe, _ = read(SCALES_ONLY_4B)
    assert recipe.quant.calibration_batches == shipped.quant.calibration_batches == 64
    alone = SCALES_ONLY_4B.replace("from_ptq_ckpt: ./output_ptq/qwen3-4b_fp8_static", "from_ptq_ckpt: null")
    for rows, samples, batches in ((1, None, 10), (1, 60, 60), (4, 10, 3), (4, 60, 15)):
        changed = alone.replace("train_batch_size: 1", f"train_batch_size: {rows}")
        if samples is not None:
            changed = changed.replace("use_qkv_quant: false", f"use_qkv_quant: false, lazy_init_samples: {samples}")
        recipe, notes = read(changed)
        assert recipe.quant.scales is None and recipe.quant.calibration_batches == batches
        assert any("lazy_init" in note for note in notes) == (rows > 1)


def test_chats_stay_chats_with_and_without_their_prompts():
    """AngelSlim learns the prompts of the same files unless is_sft_data is set; Hub data sets are text."""
    for given, noted in (("", True), (", is_sft_data: false", True), (", is_sft_data: true", False)):
        recipe, notes = read(SCALES_ONLY.replace(", batch_size: 1}", given + "}"))
        assert recipe.data.kind == "chat" and any("is_sft_data: false" in note for note in notes) == noted
    recipe, notes = read(SCALES_ONLY.replace("hf_dataset: null", "hf_dataset: a/b"))
    assert recipe.data.kind == "text" and not any("is_sft_data" in note for note in notes)
    assert recipe.data.train == ["hf://datasets/a/b"]
    recipe, notes = read(SCALES_ONLY.replace("sharegpt.jsonl", "'a/b,c-1'"))  # as its configurations of QAD have it
    assert recipe.data.train == ["hf://datasets/a/b/c-1/train*"] and any("data_path: converted" in n for n in notes)
    assert recipe.data.kind == "text" and not any("is_sft_data" in note for note in notes)
    recipe, notes = read(SCALES_ONLY.replace("hf_dataset: null", 'hf_dataset: "a/b,c-1"'))
    assert recipe.data.train == ["hf://datasets/a/b/c-1/train*"] and any("hf_dataset: converted" in n for n in notes)


def test_an_adapter_of_torchtune_is_beside_the_quantized_weights():
    recipe, notes = read(TORCHTUNE_LORA)
    adapter = recipe.adapter
    assert (adapter.kind, adapter.merge, adapter.rank, adapter.alpha, adapter.dropout) == ("lora", False, 4, 8, 0.5)
    assert adapter.targets == [r".*\.(q_proj|o_proj|gate_proj|up_proj|down_proj)"]
    assert not any("lora" in note or "lr_scheduler" in note for note in notes)
    assert (recipe.optim.schedule, recipe.optim.min_lr_ratio, recipe.optim.warmup_steps) == ("cosine", 0, 100)


def test_inputs_of_w4a8_fp8_keep_their_one_stored_scale():
    changed = SCALES_ONLY.replace("fp8_static, bits", "w4a8_fp8, bits")
    changed = changed.replace("weight: per-tensor", "weight: per-group, group_size: 128")
    recipe, notes = read(changed)
    scheme = recipe.quant.preset().linear
    assert (scheme.weights.bits, scheme.weights.group_size) == (4, 128)
    assert (scheme.activations.granularity, scheme.activations.dynamic) == ("tensor", False)
    assert any("has a scale per token" in note for note in notes)


def test_torchtune_trains_all_weights_with_the_scales_of_each_step():
    recipe, _ = read(TORCHTUNE)
    assert read(TORCHTUNE.replace(", groupsize: 256", ""))[0] == recipe  # torchao's default
    scheme = recipe.quant.preset().linear
    assert (scheme.weights.bits, scheme.weights.group_size, scheme.activations.symmetric) == (4, 256, False)
    assert recipe.quant.scales_follow_weights and not recipe.learnable.weight_scale
    assert recipe.learnable.weight and recipe.learnable.norm and recipe.learnable.embedding
    assert (recipe.optim.lr, recipe.optim.weight_decay, recipe.optim.schedule) == (2e-5, 0.01, "constant")
    assert (recipe.train.epochs, recipe.model.dtype, recipe.optim.grad_clip) == (3, "float32", 0)


@pytest.mark.parametrize("tool", FILES)
def test_every_key_is_converted_or_named(tool, seed):
    """A key of any name anywhere, or another value of a known key: the recipe changes or a note names the key."""
    contents = yaml.safe_load(FILES[tool])
    before = converted_recipe(contents)
    places = [("", contents)]
    for path, place in places:
        places += [(f"{path}{key}.", value) for key, value in place.items() if isinstance(value, dict)]
    for path, place in places:
        place[key := f"new_{seed}"] = 7
        after = converted_recipe(contents)
        del place[key]
        named = sum(f"{key}: 7" in note for note in after.notes)
        assert after.recipe == before.recipe and named == (HOUSEKEEPING.fullmatch(path + key) is None), path
    for key in ForeignRecipe(yaml.safe_load(FILES[tool])).keys:
        changed = yaml.safe_load(FILES[tool])
        *sections, name = key.split(".")
        place = changed
        for section in sections:
            place = place[section]
        old = place[name]
        place[name] = {bool: not old, int: 7, float: 0.25, list: ["other"], type(None): "other"}.get(type(old), "other")
        if HOUSEKEEPING.fullmatch(key) or key in WITHOUT_EFFECT:
            continue
        try:
            found = converted_recipe(changed)
        except ValueError:
            continue
        assert (found.recipe, found.notes) != (before.recipe, before.notes), f"{key} is passed over"


def test_what_their_file_leaves_open_is_said():
    """Defaults of the Trainer, and a loss that has a weight of 0 there."""
    contents = yaml.safe_load(SCALES_ONLY)
    contents["compression"]["QAT"]["hf_args"] = {"save_strategy": "no", "report_to": ["wandb", "comet_ml"]}
    del contents["compression"]["QAT"]["kd_loss_weight"]
    recipe, notes = read(yaml.safe_dump(contents))
    assert recipe.loss.kd_weight == 0 and any("loss_type: cakld has no effect" in note for note in notes)
    assert any("per_device_train_batch_size 8, num_train_epochs 3, logging_steps 500" in note for note in notes)
    assert not any("save_steps" in note for note in notes) and any("(the default there)" in note for note in notes)
    assert recipe.train.report_to == ["wandb"] and any("report_to: wandb, comet_ml, expected" in note for note in notes)


def test_steps_below_1_are_shares_of_all_steps():
    """As transformers' Trainer reads warmup_steps, logging_steps and save_steps."""
    shares = SCALES_ONLY.replace('save_strategy: "no", warmup_ratio: 0.0', "save_steps: 0.4, warmup_steps: 0.03")
    shares = shares.replace("logging_steps: 1", "logging_steps: 0.1")
    recipe, notes = read(shares.replace("max_steps: 3", "max_steps: 50"))
    assert (recipe.optim.warmup_ratio, recipe.optim.warmup_steps) == (0.03, 0)
    assert (recipe.train.log_every, recipe.train.checkpoint_every) == (5, 20)
    assert not any("share" in note for note in notes)
    recipe, notes = read(shares.replace("max_steps: 3", "max_steps: -1"))
    assert any("logging_steps: 0.1 is a share of all steps there: train.log_every" in note for note in notes)
    assert any("save_steps: 0.4 is a share of all steps there: train.checkpoint_every" in note for note in notes)


def test_a_redirected_recipe_keeps_the_notes(tmp_path, monkeypatch, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(SCALES_ONLY)
    monkeypatch.setattr(sys, "argv", ["convert_recipe.py", str(path)])
    convert_recipe.main()
    out, err = capsys.readouterr()
    assert yaml.safe_load(out) == converted_recipe(yaml.safe_load(SCALES_ONLY)).recipe
    noted = [line.removeprefix("# ") for line in out.splitlines() if line.startswith("# note: ")]
    *notes, following = err.splitlines()
    assert following.startswith("next: deepspeed --num_gpus N launch/train.py")
    assert noted == notes and any("num_samples: the whole file" in line for line in noted)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1", "expected a QAT"),
        ("- 1", "keys and values"),
        ("compression: {name: PTQ}", "QAT or QAD: launch/calibrate.py"),
        (
            "{compression: {name: QAT}, training: {hf_args: {}}}",
            "older versions of AngelSlim had them in a section trai",
        ),
        ("compression: {name: MCoreQAD}", "QAT or QAD: write a recipe by docs/coming_from.md"),
    ],
)
def test_refused_in_one_line(text, said, tmp_path, monkeypatch, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["convert_recipe.py", str(path)])
    with pytest.raises(SystemExit):
        convert_recipe.main()
    last = capsys.readouterr().err.splitlines()[-1]
    assert str(path) in last and said in last
