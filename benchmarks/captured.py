"""Training of a small model as one CUDA graph, for recovery.py: the run of a recipe in one process.

For each of the 210 layers of a model of 135 million parameters the host needs 1 ms and more (results/gpu.md), and an
H100 takes 35 ms for the whole step. So forward, backward, clipping and AdamW are captured once and replayed. Models,
scales, samples, losses, parameter groups and learning rates are those of engine.loop; AdamW updates fp32 copies,
without DeepSpeed. On a CPU the same functions run without a graph: after 12 steps of qwen3-11m at 2 bits KL was 0.0412,
and 0.0411 with engine.loop.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from data.loader import MicroBatch, on_device, valid_tokens
from engine.cluster.job import RunLock
from engine.config.config import Recipe
from engine.schedule import Schedule
from engine.session.optimizer import SCALE_GROUPS, lr_factor, parameter_groups
from engine.session_export import export_trained
from engine.start import start_run
from engine.step import micro_batch_losses
from quant import weights_changed

# transformers makes no mask for an implementation that it has none for: rows are neither padded nor packed.
AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)
WARM_UP = 3  # steps before the capture, at learning rates of 0


def train_captured(recipe: Recipe) -> None:
    """Train and export. Raises ValueError for a recipe with what the captured step does not do."""
    quant, train = recipe.quant, recipe.train
    if (
        *(recipe.schedule, recipe.data.packing, recipe.learnable.router, quant.fake_quant_start),
        *(
            quant.scales_follow_weights,
            train.gradient_accumulation_steps > 1,
            train.activation_offload,
            recipe.optim.moments,
        ),
    ) != ([], False, False, 0, False, False, False, "float32"):
        raise ValueError(
            "--captured: expected a recipe without schedule, packing, router, fake_quant_start, scales_follow_weights, "
            "activation_offload, 8-bit moments and gradient accumulation"
        )
    with RunLock() as run_lock:
        state = start_run(recipe, Schedule(), [], run_lock)
    with state.stop_requests, state.metrics:
        model, device, optim = state.session.model, state.session.device, recipe.optim
        session = replace(state.session, engine=model)
        for each in (model, getattr(state.session.teacher, "module", model)):
            each.config._attn_implementation = "sdpa_without_mask"
        groups = parameter_groups(model, optim)
        parameters: list[nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
        for group in groups:
            group["params"] = [parameter.detach().float().clone() for parameter in group["params"]]
            group["lr"] = torch.zeros((), device=device)
            group.pop("moments")
        masters: list[Tensor] = [master for group in groups for master in group["params"]]
        for master in masters:
            master.grad = torch.zeros_like(master)
        optimizer = torch.optim.AdamW(groups, betas=optim.betas, fused=True, capturable=device.type == "cuda")
        first = on_device(state.loader.step(0)[0], device)
        valid, objective = valid_tokens([first]), state.objective()
        kept = {name: first[name].clone() for name in ("input_ids", "labels", "positions")}
        loss = torch.zeros((), device=device)

        def step() -> None:
            weights_changed(model)
            result = micro_batch_losses(session, first | kept, objective, scale=1 / valid)
            gradients = torch.autograd.grad(result.total, parameters)
            with torch.no_grad():
                torch._foreach_copy_([master.grad for master in masters], list(gradients))
                nn.utils.clip_grad_norm_(masters, optim.grad_clip)
                optimizer.step()
                torch._foreach_copy_(parameters, masters)
                loss.copy_(result.total.detach())

        run = captured(step, optimizer) if device.type == "cuda" else step
        peaks, done, began = session.overrides.peaks(), 0, time.perf_counter()
        losses: list[Tensor] = []
        while len(losses) < recipe.train.steps:
            batch = state.loader.step(done)[0]
            done += 1
            if not fits(batch, kept, valid):
                continue  # the last row of an epoch is short
            for name, tensor in on_device(batch, device).items():
                if name in kept:
                    kept[name].copy_(tensor)
            factor = lr_factor(
                len(losses),
                total=recipe.train.steps,
                warmup=optim.warmup(recipe.train.steps),
                kind=optim.schedule,
                min_ratio=optim.min_lr_ratio,
                decay=optim.decay_steps,
            )
            for group in optimizer.param_groups:
                share = factor * state.quant.learning(group["name"]) if group["name"] in SCALE_GROUPS else factor
                group["lr"].fill_(peaks[group["name"]] * share)
            run()
            losses.append(loss.clone())
            if len(losses) % 100 == 0 or len(losses) == 10:
                mean, seconds = float(torch.stack(losses[-50:]).mean()), time.perf_counter() - began
                print(f"step {len(losses)}: loss {mean:.4f}, {1e3 * seconds / len(losses):.1f} ms a step", flush=True)
        weights_changed(model)
        export_trained(state.session, state.quant, ())


def fits(batch: MicroBatch, kept: dict[str, Tensor], valid: int) -> bool:
    """Tell if a micro-batch has the shapes of the first."""
    return batch["input_ids"].shape == kept["input_ids"].shape and valid_tokens([batch]) == valid


def captured(step: Callable[[], None], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Capture a step and return its replay. The steps before the capture change moments alone, which are reset."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()
    return graph.replay
