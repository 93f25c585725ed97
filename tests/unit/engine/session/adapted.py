"""Recipes with adapters, students of them, and folders of adapters as peft would write them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.config.config import Recipe
from engine.config.reading import load_recipe
from engine.session.student import build_student
from tests.lib.checkpoints import CPU, ENGINES
from tests.lib.recipes import write_sections

DS_CONFIG = {"zero_optimization": {"stage": 0}, **ENGINES[torch.bfloat16]}


def recipe(directory: Path, path: Path, choice: dict | None = None, /, **sections: Any) -> Recipe:
    """Write and read a recipe for adapters of ``choice`` on a checkpoint."""
    model = {"path": str(path), **sections.pop("model", {})}
    adapter = {"kind": "lora", "rank": 4, **(choice or {})}
    quant = sections.pop("quant", {"scheme": "w4a16_g32"})
    return load_recipe(write_sections(directory, model=model, adapter=adapter, quant=quant, **sections))


def adapters(settings: Recipe) -> dict[str, torch.nn.Module]:
    """Build the student, and return its layers with an adapter by name."""
    _, quantization = build_student(settings, DS_CONFIG, CPU)
    return {name: layer for name, layer in quantization.layers.items() if layer.adapter is not None}


def folder(directory: Path, base: Path) -> Path:
    """Write an adapter for every linear layer of a checkpoint as peft would, with random tensors."""
    directory.mkdir()
    tensors = {}
    for name, layer in adapters(recipe(directory, base)).items():
        for part, parameter in (("A", layer.lora_a), ("B", layer.lora_b)):
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = torch.randn_like(parameter).detach()
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 32.0, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
