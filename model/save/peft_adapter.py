"""Write unmerged adapters of quantized weights in peft's format (see ``model/peft.py``)."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from model.families import text_part
from model.peft import CONFIG, PREFIX, WEIGHTS
from model.ranks import errors_on_all_ranks, is_main, listed
from model.save.aside import Aside
from model.save.finish import write_json
from model.save.shard_writer import ShardWriter, safetensors_head
from model.zero import full_shape, whole_values
from quant import Quantization, QuantLinear
from quant.adapters import AdapterBeside


@dataclass(frozen=True)
class PeftFolder:
    """Contents of an adapter's folder in peft's format.

    Attributes:
        tensors: tensors by key in the file; empty on all ranks except rank 0.
        config: contents of adapter_config.json.
        base: digest of the checkpoint that the adapter was trained on; a run that starts from the adapter compares it
            with its own base.
    """

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    base: str

    def write(self, directory: Path) -> None:
        """Write the files into ``directory``, from one process. The same adapter always gives the same bytes."""
        directory.mkdir(exist_ok=True)
        write_json(self.config, directory / CONFIG)
        shapes = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in self.tensors.items()}
        head = safetensors_head(shapes, {"base": self.base})
        with closing(ShardWriter(directory / WEIGHTS, shapes, head)) as writer:
            for key, tensor in self.tensors.items():
                writer.write(key, tensor)
            writer.finish()

    def publish(self, out: Path) -> None:
        """Write the folder under a temporary name, and rename it to ``out`` when everything is on disk; a collective.
        Raises RankError if it cannot be written, or if the adapter has NaN or Inf; then ``out`` is not created."""
        with errors_on_all_ranks(ValueError, OSError):
            if is_main():
                broken = [key for key, tensor in self.tensors.items() if not bool(tensor.isfinite().all())]
                if broken:
                    raise ValueError(
                        f"{out} was not written: the model diverged, export an earlier checkpoint: NaN or Inf in "
                        f"{listed(broken, 5)}"
                    )
                with closing(Aside(out, sum(tensor.nbytes for tensor in self.tensors.values()))) as aside:
                    self.write(aside.path)
                    aside.publish()


def collect_adapter(
    model: PreTrainedModel,
    quantization: Quantization,
    *,
    alpha: float,
    rslora: bool,
    dropout: float,
    base_path: str,
    base: str,
) -> PeftFolder:
    """Gather unmerged adapters to rank 0, in the model's dtype; a collective.

    Args:
        model, quantization: the model and its quantized layers; all adapters have the same LoRA rank.
        alpha, rslora, dropout: the recipe's values under ``adapter``.
        base_path: checkpoint to record as the adapter's base model.
        base: digest of that checkpoint (:class:`PeftFolder`).
    """
    tensors: dict[str, Tensor] = {}
    adapters = {
        name: layer.adapter for name, layer in quantization.layers.items() if isinstance(layer.adapter, AdapterBeside)
    }
    for name, adapter in adapters.items():
        pair = {"lora_A": adapter.lora_a, "lora_B": adapter.lora_b}
        for (part, parameter), values in zip(pair.items(), whole_values(tuple(pair.values())), strict=True):
            if is_main():
                tensors[f"{PREFIX}{name}.{part}.weight"] = (
                    values.to("cpu", parameter.dtype).view(full_shape(parameter)).contiguous()
                )
    (rank,) = {full_shape(adapter.lora_a)[0] for adapter in adapters.values()}
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | QuantLinear)]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_path,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": rslora,
        "lora_dropout": dropout,
        "bias": "none",
        "target_modules": _targets(set(adapters), linears, whole=not text_part(model)),
        "inference_mode": True,
    }
    return PeftFolder(tensors, config, base)


def _targets(chosen: set[str], linears: list[str], *, whole: bool) -> list[str]:
    """List peft's ``target_modules``: name suffixes if these match just the chosen modules, else full names.

    ``whole`` is True if ``linears`` names every Linear of the model in peft or vLLM; else a suffix might match others.
    """
    ends = {name.rpartition(".")[2] for name in chosen}
    meant = {name for name in linears if name.rpartition(".")[2] in ends}
    return sorted(ends) if whole and meant == chosen else sorted(chosen)
