"""Recipes with adapters, students of them, and folders of adapters as peft would write them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.config.config import Recipe
from engine.config.reading import load_recipe
from engine.session.student import build_student

CPU = torch.device("cpu")
DS_CONFIG = {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}


def recipe(directory: Path, path: Path, choice: dict | None = None, /, **sections) -> Recipe:
    contents = {
        "model": {"path": str(path)},
        "data": {"train": ["a.jsonl"]},
        "train": {"steps": 4},
        "output_dir": "out",
        "quant": {"scheme": "w4a16_g32"},
        "learnable": {"weight": False},
        "adapter": {"kind": "lora", "rank": 4, **(choice or {})},
        **sections,
    }
    file = directory / "recipe.yaml"
    file.write_text(json.dumps(contents))  # JSON is YAML
    return load_recipe(file)


def adapters(settings: Recipe) -> dict[str, torch.nn.Module]:
    """The layers with an adapter by name."""
    _, quantization = build_student(settings, DS_CONFIG, CPU)
    return {name: layer for name, layer in quantization.layers.items() if layer.adapter is not None}


BESIDE, FROZEN = {"kind": "lora", "merge": False}, {"learnable": {"weight": False, "weight_scale": False}}


def folder(directory: Path, base: Path, rank: int = 4, alpha: float = 32.0, only: str = "_proj") -> Path:
    """An adapter as peft would write it for the Linears whose names end so, and its tensors on disk."""
    directory.mkdir()
    drawn = adapters(recipe(directory, base, {"rank": rank, "targets": [f".*{only}"]}))
    tensors = {}
    for name, layer in drawn.items():
        for part, parameter in (("A", layer.lora_a), ("B", layer.lora_b)):
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = torch.randn_like(parameter).detach()
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
