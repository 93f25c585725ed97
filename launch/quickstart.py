"""Train, quantize, export and verify a model from scratch, with only Python, in a few minutes on two CPU cores.

    make quickstart            (or: python launch/quickstart.py [--out runs/quickstart])

1. A corpus is made of text that Python ships: the docstrings of its standard library and the language reference behind
   ``help()``. A tokenizer is trained on it, and a small Qwen3 is created with random weights.
2. The model is trained by this project's loop with fake quant off.
3. FT: it is trained a little longer, still unquantized.
4. For each scheme, PTQ: FT is quantized without training. QAT: the model of step 2 is trained with fake quant for as
   long as FT, from scales measured on its own weights and inputs, and then exported.
5. The exports are loaded in transformers and compared with our forward.
6. One table shows the perplexity of all models on held-out text, with serving numerics.

Steps 2 to 5 are ordinary user commands, training on two ranks (or all GPUs) under ZeRO-3. FT sees the same data in the
same order for the same steps as QAT, so longer training does not count in the recovered share
(PTQ - QAT) / (PTQ - FT).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not a model.py or data/ of the current directory

import ast
import functools
import os
import random
import shutil
import socket
import sysconfig
import time
import timeit
from collections.abc import Iterator, Sequence
from pydoc_data.topics import topics

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from launch.scripts import find_launcher, option_parser, path_option, run_command

_SCHEMES = ("fp8_static", "w2a16_g32")  # one almost lossless without training, and one that degrades
_MARKER = ".quickstart"  # file in a folder that may be removed and made again
VOCABULARY = 512
LENGTH = 128
BASE_STEPS, TUNE_STEPS = 300, 60
BASE_LR, TUNE_LR = 3e-3, 2e-3
TRAIN_CHARACTERS, HELDOUT_CHARACTERS = 1_000_000, 40_000
_STEPS = 4 + 3 * len(_SCHEMES)


def main() -> None:
    """Run all steps and print one table at the end."""
    parser = option_parser(__doc__)
    parser.add_argument(
        "--out", type=path_option, default=Path("runs/quickstart"), help="made again (default runs/quickstart)"
    )
    out: Path = parser.parse_args().out
    try:
        find_launcher()
    except FileNotFoundError as error:
        parser.exit(1, f"error: {error}\n")
    if not gpus():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else every process warns about a missing GPU
    logging.disable_progress_bar()
    began = time.perf_counter()
    made_here = out / _MARKER
    if out.exists() and not made_here.is_file() and (not out.is_dir() or any(out.iterdir())):
        parser.exit(1, f"error: --out {out} exists and was not made by this script: name another folder\n")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    made_here.touch()

    steps = iter(range(1, _STEPS + 1))
    if training_dtype() == torch.float32:
        print(
            "A GEMM in bfloat16 takes several times as long as one in float32 on this CPU: all models are in float32."
        )
    print_heading(next(steps), "a corpus from Python's own documentation, a tokenizer, a Qwen3 with random weights")
    make_corpus(out)
    make_model(out)
    print_heading(next(steps), f"base: train it with fake quant off, {BASE_STEPS} steps")
    train(out, "base", model=out / "init", steps=BASE_STEPS, lr=BASE_LR)
    print_heading(next(steps), f"FT: {TUNE_STEPS} steps more with fake quant off, what QAT is compared with")
    train(out, "ft", model=out / "base", steps=TUNE_STEPS, lr=TUNE_LR)
    for scheme in _SCHEMES:
        print_heading(next(steps), f"PTQ: quantize FT to {scheme}, without training")
        export_ptq(out, f"ptq_{scheme}", model=out / "ft", scheme=scheme)
        print_heading(next(steps), f"QAT: {TUNE_STEPS} steps from base in {scheme}, then export")
        train(out, f"qat_{scheme}", model=out / "base", steps=TUNE_STEPS, lr=TUNE_LR, scheme=scheme)
    for scheme in _SCHEMES:
        print_heading(next(steps), f"load the {scheme} export in transformers, compare its logits with our forward")
        verify(out, out / f"qat_{scheme}")
    print_heading(next(steps), "perplexity of them all on text that none was trained on")
    print_table(out, began)


def gpus() -> int:
    """Return the number of GPUs for the ranks; 0 with DS_ACCELERATOR=cpu."""
    return torch.cuda.device_count() if os.environ.get("DS_ACCELERATOR", "cuda") == "cuda" else 0


@functools.cache
def training_dtype() -> torch.dtype:
    """Return bfloat16, or float32 on a CPU that takes more than 4 times as long for a GEMM in bfloat16 (up to 50 times
    without instructions for it)."""
    if gpus():
        return torch.bfloat16
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.ones(128, 128, dtype=dtype)
        seconds[dtype] = min(timeit.repeat(functools.partial(torch.mm, rows, rows), number=1, repeat=20))
    return torch.float32 if seconds[torch.bfloat16] > 4 * seconds[torch.float32] else torch.bfloat16


def print_heading(step: int, text: str) -> None:
    """Print the heading of a step."""
    print(f"\n[{step}/{_STEPS}] {text}", flush=True)


def make_corpus(out: Path) -> None:
    """Write train.txt and heldout.txt, which come from different modules and topics."""
    texts = [*docstrings(), *topics.values()]
    random.Random(0).shuffle(texts)
    heldout, train = texts[::20], [text for index, text in enumerate(texts) if index % 20]
    for name, part, characters in ("heldout", heldout, HELDOUT_CHARACTERS), ("train", train, TRAIN_CHARACTERS):
        text = "\n\n".join(part)[:characters]
        (out / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{out}/{name}.txt: {len(text):,} characters")


def docstrings() -> Iterator[str]:
    """Yield the docstrings of each module of the standard library as one text; packages and tests are skipped."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        nodes = ast.walk(ast.parse(path.read_bytes()))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [ast.get_docstring(node) for node in nodes if isinstance(node, documented)]
        if text := "\n\n".join(filter(None, found)):
            yield text


def make_model(out: Path) -> None:
    """Write ``init``, a Hugging Face checkpoint: a tokenizer trained on the corpus, a Qwen3 with random weights."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(out / "train.txt")], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    wrapped.save_pretrained(out / "init")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).type(training_dtype())
    model.save_pretrained(out / "init")
    print(f"{out}/init: {model.num_parameters():,} parameters, vocabulary of {VOCABULARY}")


def train(out: Path, name: str, *, model: Path, steps: int, lr: float, scheme: str | None = None) -> None:
    """Run launch/train.py on all ranks. Without a scheme fake quant is off and the export is a plain checkpoint."""
    recipe = write_recipe(out, name, model=model, steps=steps, lr=lr, scheme=scheme)
    ranks = gpus() or 2
    launcher = ["deepspeed", "--quiet", "--num_gpus", str(ranks), *port_options()]
    run_logged([*launcher, "launch/train.py", "--config", str(recipe)], recipe.with_name("log.txt"))


def export_ptq(out: Path, name: str, *, model: Path, scheme: str) -> None:
    """Run launch/calibrate.py in one process: a model this small needs no launcher."""
    recipe = write_recipe(out, name, model=model, steps=1, lr=0.0, scheme=scheme)
    run_logged(["python", "launch/calibrate.py", "--config", str(recipe)], recipe.with_name("log.txt"))


def verify(out: Path, export: Path) -> None:
    """Run launch/verify.py; its report goes to the terminal, the loading bars of other libraries to the log."""
    text = ["--text", str(out / "heldout.txt"), "--tokens", "1024"]
    command = ["python", "launch/verify.py", "--export", str(export), *text]
    run_logged(command, out / "runs" / export.name / "verify.txt", report=True)


def write_recipe(out: Path, name: str, *, model: Path, steps: int, lr: float, scheme: str | None) -> Path:
    """Write the recipe of a run into ``out``/runs/<name>, the run's output directory; return the recipe's path."""
    directory = out / "runs" / name
    directory.mkdir(parents=True)
    dtype = str(training_dtype()).removeprefix("torch.")
    recipe = {
        "model": {"path": str(model), "attn_implementation": "eager", "dtype": dtype},
        "data": {"kind": "text", "train": [str(out / "train.txt")], "max_length": LENGTH, "micro_batch_size": 8},
        "quant": {"scheme": scheme or _SCHEMES[0], "fake_quant_start": 0 if scheme else -1},
        "learnable": {"norm": True},
        "train": {"steps": steps, "quant_stats_every": 10},
        "optim": {"lr": lr, "scale_lr": 1e-2, "warmup_steps": min(10, steps)},
        "export": {"dir": str(out / name)},
        "deepspeed": "zero3",
        "output_dir": str(directory),
    }
    path = directory / "quickstart.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return path


def port_options() -> list[str]:
    """Return launcher options for a free port if the launcher's default port is in use on this machine, else none."""
    with socket.socket() as default, socket.socket() as free:
        default.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            default.bind(("127.0.0.1", 29500))
            return []
        except OSError:
            free.bind(("127.0.0.1", 0))
            return ["--master_port", str(free.getsockname()[1])]


def run_logged(shown: Sequence[str], log: Path, *, report: bool = False) -> None:
    """Print a command and run it; if it fails, exit with the last lines of its log. Progress bars and errors (standard
    error) go to the terminal, and standard output to ``log``; with ``report`` it is the other way round."""
    with open(log, "w", encoding="utf-8") as file:
        code = run_command(shown, **{"stderr" if report else "stdout": file})
    if code:
        end = "\n".join(log.read_text(encoding="utf-8").splitlines()[-20:])
        sys.exit(f"\n{end}\nerror: exit code {code} of the command above; the last lines of {log} are above this one")


def print_table(out: Path, began: float) -> None:
    """Print perplexity and size of every checkpoint, the share of PTQ's loss that QAT recovered, and the time since
    ``began`` (of ``time.perf_counter``)."""
    # Not at the top: this imports DeepSpeed, which probes for a GPU (see main).
    from model.console import progress_bar
    from tools.evaluation.perplexity import Questions, evaluate_checkpoint
    from tools.evaluation.results import Comparison, comparison_tables, write_comparison

    device = torch.device("cuda" if gpus() else "cpu")
    questions = Questions(text=out / "heldout.txt", length=LENGTH, batch_size=16, dtype=training_dtype())
    names = ["ft", *(f"{kind}_{scheme}" for scheme in _SCHEMES for kind in ("ptq", "qat"))]
    bar = progress_bar(desc="evaluate", unit="model", over=names)
    found = {name: evaluate_checkpoint(out / name, questions, device) for name in bar}
    sides = ({scheme: found[f"{kind}_{scheme}"] for scheme in _SCHEMES} for kind in ("ptq", "qat"))
    comparison = Comparison(found["ft"], *sides)
    written = write_comparison(comparison, out)
    print(f"\n{comparison_tables(comparison)}\n\n{written}: the same to keep.")
    print(f"Checkpoints: {out}/qat_*. Curves: tensorboard --logdir {out}/runs. Logs: {out}/runs/*/log.txt.")
    print(f"Time: {time.perf_counter() - began:.0f} s.")


if __name__ == "__main__":
    main()
