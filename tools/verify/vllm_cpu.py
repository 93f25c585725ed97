"""Compute log-probabilities of exports in vLLM's CPU backend, from vLLM's own environment.

    VLLM_PYTHON -P tools/verify/vllm_cpu.py JOBS.json

This script imports only vllm and numpy, because vLLM needs another torch than this project: the environment that runs
it (:func:`tools.verify.vllm.run`) has none of the project's requirements. JOBS.json is a list of objects:

    export: directory of the export.
    tokens: .npy file of token ids [windows, T].
    dtype: dtype of the computation, a name of torch.
    out: .npz file to write. ``logprobs`` [windows, T - 1, V] in fp32 has the log-probability of every token of the
        vocabulary at positions 1 to T - 1, ``kernels`` the names of the kernels that compute the layers, and
        ``version`` the version of vLLM.
    kv_cache_dtype: dtype of keys and values in the cache; by default, as the export says.
    codes: if true, ``out`` also has the bytes of each fp8 parameter of the loaded model, under its name.

Each job runs in a process of its own, forked after the slow imports. A job that fails does not write ``out``, but a
file of this name with ``.error`` added, which has the error in one line.
"""

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# vLLM reads these at its import. Without the last, AMX multiplies int4 weights by inputs in int8.
VLLM_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # a compilation of seconds for one gather
    "VLLM_CPU_INT4_W4A8": "0",
}


def load(job: dict[str, Any], tokens: Any) -> Any:
    """Load the export of a job in vLLM."""
    from vllm import LLM

    return LLM(
        job["export"],
        dtype=job["dtype"],
        kv_cache_dtype=job.get("kv_cache_dtype", "auto"),
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=tokens.shape[1] + 1,
        max_num_seqs=len(tokens),
        max_logprobs=-1,
        enable_prefix_caching=False,
    )


def compute(job: dict[str, Any], engine: Any, tokens: Any) -> dict[str, Any]:
    """Compute the arrays of the job's file ``out``, by name."""
    import numpy as np
    import vllm
    from vllm import SamplingParams

    found: dict[str, Any] = {"version": vllm.__version__, "kernels": engine.apply_model(kernels)[0]}
    if job.get("codes"):
        found |= engine.apply_model(fp8_codes)[0]
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, flat_logprobs=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in tokens.tolist()]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    found["logprobs"] = np.stack([log_probs_of(output.prompt_logprobs) for output in outputs])
    return found


def log_probs_of(flat: Any) -> Any:
    """Convert vLLM's flat log-probabilities to an array [T - 1, V]; the first token has none."""
    import numpy as np

    rows = []
    for start, end in zip(flat.start_indices[1:], flat.end_indices[1:], strict=True):
        row = np.full(max(flat.token_ids[start:end]) + 1, np.nan, np.float32)
        row[flat.token_ids[start:end]] = flat.logprobs[start:end]
        rows.append(row)
    return np.stack(rows)


def kernels(model: Any) -> list[str]:
    """Return the quantization method and kernel of each quantized module, each combination once."""
    found: dict[str, None] = {}
    for module in model.modules():
        method, scheme = getattr(module, "quant_method", None), getattr(module, "scheme", None)
        held = [value for owner in (scheme, method) if owner is not None for value in vars(owner).items()]
        inner = [value for name, value in held if "kernel" in name or name == "fp8_linear"]
        names = [type(value).__name__ for value in (scheme or method, *inner[:1]) if value is not None]
        if method is not None:
            found[" ".join(names)] = None
    return list(found)


def fp8_codes(model: Any) -> dict[str, Any]:
    """Return the bytes of the parameters in fp8, by name."""
    import torch

    named = model.named_parameters()
    return {name: p.data.contiguous().view(torch.uint8).numpy() for name, p in named if p.dtype == torch.float8_e4m3fn}


def main(arguments: Sequence[str], prepare: Callable[[dict[str, Any]], object] = lambda job: None) -> int:
    """Run the jobs of a file, the only one of ``arguments``, one after the other; return 0, even if jobs fail.
    ``prepare`` is called in each job's process before it loads anything."""
    for name, value in VLLM_SETTINGS.items():
        os.environ.setdefault(name, value)
    import numpy as np
    from vllm.model_executor.layers.quantization import get_quantization_config

    get_quantization_config("compressed-tensors")  # imports most of vLLM, before the forks
    gc.freeze()  # else each process collects the garbage of these imports

    (file,) = arguments
    for job in json.loads(Path(file).read_text(encoding="utf-8")):
        if (process := os.fork()) == 0:
            code = 1
            try:
                prepare(job)
                tokens = np.load(job["tokens"])
                engine = load(job, tokens)  # never shut down, which would take a second
                np.savez(job["out"], **compute(job, engine, tokens))
                code = 0
            except BaseException as error:
                traceback.print_exc()
                line = " ".join(f"{type(error).__name__}: {error}".split())
                Path(job["out"] + ".error").write_text(line, encoding="utf-8")
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.waitpid(process, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
