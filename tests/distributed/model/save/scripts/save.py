"""Launched on every rank: train one step, export in several ways, keep the whole parameters for comparison.

Arguments: output directory, then ``name:stage:scheme:way:checkpoint`` per model, of which the way is "plain",
"offload" (parameters and optimizer) or "codes" (weights are gathered as these). Each rank writes ``rank<r>.json`` (what
its exports returned or raised), rank 0 also ``whole.pt`` (the parameters).
"""

import json
import resource
import signal
import sys
from pathlib import Path
from unittest import mock

import deepspeed
import torch

from engine.session.context import init_ranks
from model.ranks import RankError, barrier, is_main, raise_everywhere, rank
from model.save.export_model import export_model
from model.scales.in_place import measure_weight_scales, write_scales
from model.zero import (
    ReceiveBuffer,
    forward_only,
    gathered,
    gathered_on_main,
    keep_frozen_fp32,
    local_data,
    partition_new_parameters,
)
from model.zero.quantized_gather import gather_quantized
from quant import SCHEMES, Scheme, TensorSpec, replace_layers, weights_changed
from tests.distributed.model.scripts.models import ds_config, loaded
from tests.lib.linears import split_stacks

SHARD = 20_000
CHANNEL = Scheme("w3a16_channel", TensorSpec("int", 3, "channel"))  # odd widths, which no group size divides


def trained(stage: int, scheme: Scheme, way: str, checkpoint: str, device: torch.device):
    """A model after one real optimizer step: weights and thetas are no longer what was loaded."""
    offload = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}} if way == "offload" else {}
    # Norms and scales stay whole on every rank, the rest is partitioned.
    config = ds_config(stage, stage3_param_persistence_threshold=1000, **offload)
    model = loaded(Path(checkpoint), config)
    quantization = replace_layers(
        model, scheme, learn_weight_scale=True, learn_input_scale=scheme.activations is not None
    )
    partition_new_parameters(model, config)
    write_scales(quantization.weight_groups, measure_weight_scales(quantization))
    inputs = quantization.input_groups
    write_scales(inputs, {group.owner: torch.tensor([0.011 + 0.001 * i]) for i, group in enumerate(inputs)})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    with keep_frozen_fp32(model):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    after_backward = [gather_quantized(model, quantization)] if way == "codes" else []
    generator = torch.Generator().manual_seed(rank())
    ids = torch.randint(0, 301, (1, 40), generator=generator).to(device)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    for finish in after_backward:
        finish()
    engine.step()
    weights_changed(model)
    return engine, model, quantization, trace_after_forwards(engine, ids)


def attempt(*arguments, **options) -> dict:
    """Export, and what came of it."""
    try:
        report = export_model(*arguments, **options)
    except RankError as error:
        return {"raised": str(error)}
    return {"files": report.files, "tensors": report.tensors, "bytes": report.bytes, "peak": report.peak_bytes}


def exports(model, quantization, checkpoint: str, out: Path) -> dict[str, dict]:
    """Every way to export that must work, and every way that must fail on all ranks and leave nothing behind."""
    results = {"plain": attempt(model, None, checkpoint, out / "plain", max_shard_size=SHARD)}

    def export(name: str, directory: str, source: Path | str = checkpoint, **options) -> None:
        results[name] = attempt(model, quantization, source, out / directory, **options)

    export("one", "one")
    export("many", "many", max_shard_size=SHARD)
    export("refused", "many")
    export("no source", "fresh", out / "absent")
    # A write that really fails, in the middle of a file: the kernel refuses to let a file of this process grow further.
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_main():
        resource.setrlimit(resource.RLIMIT_FSIZE, (SHARD // 2, limit[1]))
    export("disk full", "full", max_shard_size=SHARD)
    if is_main():
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    # No device here runs out of memory for a model of this size.
    with mock.patch.object(ReceiveBuffer, "reserve", side_effect=torch.OutOfMemoryError("out of memory")):
        export("no memory", "unheld")
    # Packing that fails: a scale in the last third of the model is lost.
    group = quantization.weight_groups[2 * len(quantization.weight_groups) // 3]
    with gathered([group.s0], modifier_rank=0), torch.no_grad():
        kept = group.s0.clone()
        group.s0.fill_(torch.nan)
    export("lost scale", "lost", max_shard_size=SHARD)
    results["lost scale"]["owner"] = group.owner
    with gathered([group.s0], modifier_rank=0), torch.no_grad():
        group.s0.copy_(kept)
    return results


def gathered_on_rank_0(model, whole: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """Parameters that are not what they should be: whole on rank 0 in their batches, else and afterwards untouched."""
    parameters = dict(model.named_parameters())

    def state() -> dict[str, tuple]:
        return {
            key: (p.data_ptr(), tuple(p.shape), getattr(p, "ds_status", None), local_data(p).data_ptr())
            for key, p in parameters.items()
        }

    before, wrong = state(), []
    names = list(parameters)
    batches = [names[start : start + 4] for start in range(0, len(names), 3)]  # neighbors share one
    together = [[parameters[name] for name in batch] for batch in batches]
    buffer = ReceiveBuffer()
    buffer.reserve(together)
    turns = gathered_on_main(together, buffer)
    for batch, _ in zip(batches, turns, strict=True):
        inside = batch if is_main() else []
        wrong += [key for key in inside if not torch.equal(parameters[key].detach().cpu(), whole[key])]
        wrong += [key for key, now in state().items() if key not in inside and now != before[key]]
    return {"wrong inside": wrong, "changed after": [key for key, now in state().items() if now != before[key]]}


def trace_after_forwards(engine, ids) -> list[bool]:
    """Whether stage 3 knows the order of its first step, after one forward alone and after two."""
    knows = []
    for _ in range(2):
        with forward_only(engine), torch.no_grad():
            engine(input_ids=ids)
        offload = getattr(engine.optimizer, "parameter_offload", None)
        knows.append(offload is None or offload.get_param_coordinator().is_complete_trace())
    return knows


def die_while_writing(model, quantization, checkpoint: str, out: Path) -> None:
    """Rank 0 is killed by the kernel in the middle of its second shard; does not return."""
    if is_main():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SHARD // 2, resource.RLIM_INFINITY))
    export_model(model, quantization, checkpoint, out / "killed", max_shard_size=SHARD // 3)


def main() -> None:
    """One model after another, in one process group."""
    directory, *models = (argument for argument in sys.argv[1:] if not argument.startswith("--local_rank"))
    device = init_ranks()
    for index, entry in enumerate(models):
        name, stage, scheme, way, checkpoint = entry.split(":")
        out = Path(directory) / name
        engine, model, quantization, trace = trained(
            int(stage), {**SCHEMES, CHANNEL.name: CHANNEL}[scheme], way, checkpoint, device
        )
        if is_main():
            out.mkdir(parents=True)
        barrier()
        results = exports(model, quantization, checkpoint, out)
        parameters = dict(model.named_parameters())
        with gathered(parameters.values()):
            whole_on_all = {key: parameter.detach().cpu().clone() for key, parameter in parameters.items()}
            whole = split_stacks(model, whole_on_all)
        results |= gathered_on_rank_0(model, whole_on_all) | {"trace": trace}
        (out / f"rank{rank()}.json").write_text(json.dumps(results))
        if is_main():
            torch.save(whole, out / "whole.pt")
        raise_everywhere(None)
        if index == len(models) - 1:
            die_while_writing(model, quantization, checkpoint, out)
        engine.destroy()


if __name__ == "__main__":
    main()
