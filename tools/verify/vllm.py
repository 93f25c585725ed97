"""Compute and compare exports in vLLM, which runs in another environment (:mod:`tools.verify.vllm_cpu`).

vLLM's CPU backend differs from this project by definition in these points (0.32, without AMX). :func:`as_vllm` makes
this project's forward compute the same:

- Inputs of layers with integer weights of fewer than 8 bits, or with MX weights, are not quantized.
- The scale of a token in int8 is absmax / 127, not absmax / 127.5.
- The KV cache in fp8 rounds towards zero, not to the nearest code.

The other difference is rounding: a value near the boundary between two codes gets the other code. Its size is measured
with :func:`~tools.verify.comparison.rounded`: our forward is compared with itself after all inputs of layers changed by
a rounding.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from quant import Quantization, Scheme
from tools.compressed import load_compressed
from tools.verify.check import inputs_left
from tools.verify.comparison import LogitComparison, check_tokens, logits_of, on_input, rounded

SCRIPT = Path(__file__).with_name("vllm_cpu.py")
Result = dict[str, np.ndarray] | str


def run(python: str | Path, jobs: Sequence[dict[str, Any]], tokens: Tensor, *, script: Path = SCRIPT) -> list[Result]:
    """Run jobs of :mod:`tools.verify.vllm_cpu` for ``tokens`` [windows, T] with ``python``, the interpreter of an
    environment with vllm-cpu; return the result of each, or the error text of a job that failed. ``jobs`` have all keys
    except ``tokens`` and ``out``; ``script``: ``vllm_cpu.py``, or one that calls its ``main``. Raises ValueError if
    ``python`` cannot be run, vLLM cannot be imported there, or a job ended without a result."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        np.save(scratch / "tokens.npy", tokens.numpy())
        outs = [scratch / f"{index}.npz" for index in range(len(jobs))]
        whole = [
            {**job, "tokens": str(scratch / "tokens.npy"), "out": str(out)} for job, out in zip(jobs, outs, strict=True)
        ]
        (scratch / "jobs.json").write_text(json.dumps(whole), encoding="utf-8")
        # Its environment has packages of its own: not those that PYTHONPATH adds.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(python), "-P", str(script), str(scratch / "jobs.json")]
        try:
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
            )
        except OSError as error:
            raise ValueError(f"{python} cannot be run: {error.strerror}") from error
        return [_result(out, done.stdout, python) for out in outs]


def _result(out: Path, said: str, python: str | Path) -> Result:
    if out.exists():
        with np.load(out) as arrays:
            return dict(arrays)
    error = out.with_name(out.name + ".error")
    if not error.exists():
        last = said.strip().splitlines()[-1:] or ["no output"]
        raise ValueError(f"vLLM ended without a result under {python}: {last[0]}")
    return error.read_text(encoding="utf-8")


@torch.no_grad()
def compare_with_vllm(
    directory: Path,
    python: str | Path,
    tokens: Tensor,
    *,
    against: Path | None = None,
    trust_remote_code: bool = False,
) -> tuple[str, bool]:
    """Compare an export in vLLM's CPU backend, in bf16, with DeepQAT's forward of ``against``: a compressed export of
    the same model, or None if the export ``directory`` is itself compressed.

    Return the figures in one line, and True if they are within the bound. Kernels of some CPUs (AMX) do not quantize
    some inputs, or ignore stored scales. On these, the difference may be as large as the effect of quantizing inputs.

    Raises:
        ValueError: vLLM does not load the export, or cannot be run; the export or its tokens are of another model.
        RankError: the directory of DeepQAT's forward is no compressed checkpoint.
    """
    ours_of = against or directory
    model, quantization = load_compressed(ours_of, dtype=torch.bfloat16, trust_remote_code=trust_remote_code)
    check_tokens(model, [tokens], directory)
    (result,) = run(python, [{"export": str(directory), "dtype": "bfloat16"}], tokens)
    if isinstance(result, str):
        raise ValueError(f"vLLM does not load {directory}: {result}")
    theirs = torch.from_numpy(result["logprobs"])
    with as_vllm(quantization, truncate=True):
        ours = logprobs(model, tokens)
        if ours.shape != theirs.shape:
            raise ValueError(
                f"{ours_of} is of another model than {directory}: its vocabulary has {ours.shape[-1]} tokens, that of "
                f"the export in vLLM {theirs.shape[-1]}; expected the checkpoint that was exported"
            )
        bound = max(divergence(logprobs(model, tokens), ours) for _ in rounded(model, quantization, 2))
    with inputs_left(quantization):
        bound = max(bound, 2 * divergence(logprobs(model, tokens), ours))
    found = LogitComparison()
    found.add(ours, theirs, tokens[:, :-1])
    return f"vLLM {result['version']} on the CPU, bfloat16: {found.line(bound)}", found.kl <= bound


def logprobs(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Compute our log-probabilities [windows, T - 1, V] of each next token."""
    return logits_of(model, tokens)[:, :-1].log_softmax(-1)


def divergence(theirs: Tensor, ours: Tensor) -> float:
    """Compute the mean KL(theirs || ours) of log-probabilities, in nats per token."""
    return (theirs.double().exp() * (theirs.double() - ours.double())).sum(-1).mean().item()


@contextmanager
def as_vllm(quantization: Quantization, *, truncate: bool) -> Iterator[None]:
    """Make our forward compute like vLLM's CPU backend inside the block; with ``truncate`` also the KV cache."""
    changes: list[tuple[Any, Callable[[Tensor], Tensor]]] = []
    for layer in quantization.layers.values():
        if layer.scheme.activations is not None and (change := _their_input(layer.scheme)) is not None:
            changes.append((layer, change))
    if truncate:
        changes += [(c, partial(truncated, scale=c.input_scale())) for c in quantization.caches.values()]
    with ExitStack() as stack:
        for module, change in changes:
            stack.callback(setattr, module, "input_fake_quant", module.input_fake_quant)
            module.input_fake_quant = False
            stack.callback(module.register_forward_pre_hook(partial(on_input, change)).remove)
        yield


def _their_input(scheme: Scheme) -> Callable[[Tensor], Tensor] | None:
    weights, inputs = scheme.weights, scheme.activations
    if weights.mx or (weights.dtype == "int" and weights.bits < 8):
        return unchanged
    return int8_of_127 if inputs is not None and inputs.dtype == "int" and inputs.dynamic else None


def unchanged(x: Tensor) -> Tensor:
    """Return the input unquantized."""
    return x


def int8_of_127(x: Tensor) -> Tensor:
    """Quantize each token to int8 with the scale absmax / 127, and back."""
    scale = (x.float().abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return ((x.float() / scale).round() * scale).to(x.dtype)


def truncated(x: Tensor, scale: Tensor) -> Tensor:
    """Quantize ``x / scale`` to e4m3, rounded towards zero, and dequantize it to the dtype of ``x``."""
    values = (x.float() / scale).clamp(-448, 448)
    nearest = values.to(torch.float8_e4m3fn)
    codes = nearest.view(torch.uint8) - (nearest.float().abs() > values.abs()).byte()
    return (codes.view(torch.float8_e4m3fn).float() * scale).to(x.dtype)
