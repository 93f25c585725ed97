"""From nothing but Python to a trained, quantised, exported and verified model, in a few minutes on two CPU cores.

    make quickstart            (or: python launch/quickstart.py [--out runs/quickstart])

1. a corpus from the text that Python itself ships (the language reference behind ``help()``), a tokenizer trained on it
2. a small Qwen3, trained by this project's loop with fake quant off
3. FT: the same model trained a little longer, still unquantised
4. per scheme, PTQ: FT quantised without training; QAT: step 2's model trained with fake quant for as long as FT, from
   its own scales, then exported
5. perplexity of them all on held-out text, by the served arithmetic; the exports loaded and compared in transformers

Steps 2 to 4 are the commands that a user would run, through the deepspeed launcher on two ranks (or all GPUs) under
ZeRO-3. FT sees the same data for the same steps as QAT, so the recovered share (PTQ - QAT) / (PTQ - FT) credits nothing
to longer training.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from engine.evaluate import Perplexity, evaluate_text, load_for_evaluation, read_eval_text

ROOT = Path(__file__).resolve().parent.parent
SCHEMES = ("fp8_static", "w2a16_g32")  # one that costs nothing, and one where quantising without training hurts
VOCABULARY = 2048
LENGTH = 128
BASE_STEPS, TUNE_STEPS = 240, 60


def main() -> None:
    """Run all of it; prints one table at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="made anew (default runs/quickstart)")
    out: Path = parser.parse_args().out
    began = time.perf_counter()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)

    make_corpus(out)
    make_model(out)
    run(out, "base", "train.py", model=out / "init", steps=BASE_STEPS, lr=3e-3)
    run(out, "ft", "train.py", model=out / "base", steps=TUNE_STEPS, lr=1e-3)
    for scheme in SCHEMES:
        run(out, f"ptq_{scheme}", "calibrate.py", model=out / "ft", steps=1, lr=0.0, scheme=scheme)
        run(out, f"qat_{scheme}", "train.py", model=out / "base", steps=TUNE_STEPS, lr=1e-3, scheme=scheme)
    for scheme in SCHEMES:
        verify(out, out / f"qat_{scheme}")
    print_table(out, time.perf_counter() - began)


def make_corpus(out: Path) -> None:
    """Python's own reference text: train.txt, and every tenth topic as heldout.txt."""
    names = sorted(topics)
    heldout = names[::10]
    (out / "heldout.txt").write_text("\n\n".join(topics[name] for name in heldout), encoding="utf-8")
    train = "\n\n".join(topics[name] for name in names if name not in set(heldout))
    (out / "train.txt").write_text(train, encoding="utf-8")


def make_model(out: Path) -> None:
    """A tokenizer trained on the corpus, and a Qwen3 with random weights, as a Hugging Face checkpoint in ``init``."""
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
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(out / "init")


def run(out: Path, name: str, script: str, *, model: Path, steps: int, lr: float, scheme: str | None = None) -> None:
    """One of the project's commands, on all ranks; its recipe, log and TensorBoard files are in ``runs/<name>``.

    Without a scheme fake quant stays off, and the export is a plain checkpoint.
    """
    directory = out / "runs" / name
    directory.mkdir(parents=True)
    recipe = {
        "model": {"path": str(model)},
        "data": {"kind": "text", "train": [str(out / "train.txt")], "max_length": LENGTH, "micro_batch_size": 8},
        "quant": {"scheme": scheme or SCHEMES[0], "fake_quant_start": 0 if scheme else -1},
        "learnable": {"norm": True},
        "train": {"steps": steps, "clip_stats_every": 20},
        "optim": {"lr": lr, "warmup_steps": min(10, steps)},
        "export": {"dir": str(out / name)},
        "deepspeed": "zero3",
        "output_dir": str(directory),
    }
    (directory / "quickstart.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    launcher = Path(sys.executable).parent / "deepspeed"
    ranks = torch.cuda.device_count() or 2
    command = [
        str(launcher),
        "--num_gpus",
        str(ranks),
        str(ROOT / "launch" / script),
        "--config",
        f"{directory}/quickstart.yaml",
    ]
    print(f"\n$ deepspeed --num_gpus {ranks} launch/{script} --config {directory}/quickstart.yaml", flush=True)
    call(command, directory / "log.txt")


def verify(out: Path, export: Path) -> None:
    """Load the export with transformers and compare logits with our forward."""
    print(f"\n$ python launch/verify.py --export {export} --text {out}/heldout.txt --tokens 512", flush=True)
    command = [sys.executable, str(ROOT / "launch/verify.py"), "--export", str(export)]
    call([*command, "--text", str(out / "heldout.txt"), "--tokens", "512"], None)


def call(command: list[str], log: Path | None) -> None:
    """Run a command; standard output goes to ``log`` if given, progress bars to the terminal. Exits if it fails."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", "1")
    # Python adds the script's folder to the path, not the project's.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    if log is None:
        code = subprocess.run(command, env=environment).returncode
    else:
        with open(log, "w", encoding="utf-8") as file:
            code = subprocess.run(command, env=environment, stdout=file).returncode
    if code:
        tail = (
            ""
            if log is None
            else "\n".join(["", *log.read_text(encoding="utf-8").splitlines()[-20:], f"(all of it: {log})"])
        )
        sys.exit(f"failed with exit code {code}: {' '.join(command)}{tail}")


def print_table(out: Path, seconds: float) -> None:
    """Perplexity and size of every checkpoint, and the share of PTQ's loss that QAT recovered."""
    found = {name: perplexity(out, name) for name in ("ft", *(f"{k}_{s}" for s in SCHEMES for k in ("ptq", "qat")))}
    plain = found["ft"].per_token
    print(f"\nPerplexity per token on {out}/heldout.txt ({found['ft'].tokens:,} tokens, never trained on):\n")
    print(f"{'':14} {'bf16':>8} {'PTQ':>8} {'QAT':>8} {'recovered':>10} {'file':>9} {'of bf16':>8}")
    bf16_size = weights_size(out / "ft")
    print(f"{'bf16 (FT)':14} {plain:8.2f} {'':8} {'':8} {'':10} {bf16_size / 1e6:6.2f} MB")
    for scheme in SCHEMES:
        ptq, qat = found[f"ptq_{scheme}"].per_token, found[f"qat_{scheme}"].per_token
        # A share of a loss that is within noise says nothing: below half a percent it is not shown.
        recovered = f"{(ptq - qat) / (ptq - plain):10.0%}" if ptq > 1.005 * plain else f"{'(no loss)':>10}"
        size = weights_size(out / f"qat_{scheme}")
        print(
            f"{scheme:14} {plain:8.2f} {ptq:8.2f} {qat:8.2f} {recovered} {size / 1e6:6.2f} MB {size / bf16_size:8.0%}"
        )
    print(f"\nExports: {out}/qat_*. Curves: tensorboard --logdir {out}/runs. Time: {seconds:.0f} s.")


def perplexity(out: Path, name: str) -> Perplexity:
    """Perplexity of one checkpoint on the held-out text, in this process."""
    from transformers import AutoTokenizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_for_evaluation(out / name, torch.bfloat16, device)
    text = read_eval_text(out / "heldout.txt", AutoTokenizer.from_pretrained(out / name))

    def forward(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits

    return evaluate_text(forward, text, length=LENGTH, batch_size=16, device=device)


def weights_size(directory: Path) -> int:
    """Bytes of the safetensors files."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


if __name__ == "__main__":
    main()
