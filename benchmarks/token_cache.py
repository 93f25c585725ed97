"""Time and memory of a rank's start on chats: from files, while their tokens are put into data.cache, and from there.

    python benchmarks/token_cache.py --model DIR [--mb 1 10 100] [--generated 1000 3600 10000]

A start reads the samples, holds some out, makes the loader, its digest and its first step: all that a run does with its
data before it trains. Each is a process of its own, and its memory is what it adds to that of the imports. The files
are generated. The last rows are of files with as many tokens per byte, which are generated too: too many to tokenize
here, and 8 bytes each on the disk.

Writes ``benchmarks/results/token_cache.md``.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks import timing
from data.cache import ArrayWriter, TokenCache
from data.chat import CHAT_DTYPES, Counts, Options, read_chat
from data.loader import HeldOut, Loader, seen_in_training, split_held_out
from data.samples import load_tokenizer

OPTIONS = Options(max_length=2048, fields=None, loss_on="last", too_long="drop", special_tokens="keep")
WORDS = ["the", "of", "and", "to", "in", "is", "that", "for", "it", "was", "on", "are", "with", "as", "his", "they"]
LENGTH = 500  # of generated samples
PER_MEGABYTE = 281_000  # tokens of these words


def kilobytes(key: str) -> int:
    """A figure of this process: VmHWM is the most memory so far, RssAnon its own now, without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def start(model: str, file: Path, cache: Path | None) -> dict[str, float]:
    """Read the data as a rank does before it trains."""
    tokenizer = load_tokenizer(model)
    own, began = kilobytes("RssAnon"), time.perf_counter()
    kept = TokenCache(cache, lambda text, any_rank: None)
    samples, counts = read_chat([file], tokenizer, **asdict(OPTIONS), cache=kept)
    training, held_out = split_held_out(samples, 8, 0)
    seen_in_training(training, held_out)
    sizes: dict[str, Any] = {"micro_batch_size": 1, "rank": 0, "world": 1, "pad_token_id": 0}
    loader = Loader(training, gradient_accumulation_steps=1, seed=0, **sizes)
    HeldOut(held_out, **sizes)
    found = (loader.digest, len(loader.step(0)))
    assert all(found)
    seconds = time.perf_counter() - began
    return {
        "tokens": counts.tokens,
        "seconds": seconds,
        "own": (kilobytes("RssAnon") - own) / 1e6,
        "most": kilobytes("VmHWM") / 1e6,
    }


def apart(model: str, file: Path, cache: Path | None) -> dict[str, float]:
    """The same in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--model",
        model,
        "--file",
        str(file),
        *(["--cache", str(cache)] if cache else []),
    ]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def write_chats(path: Path, megabytes: int) -> None:
    """Chats of about 1 kB."""
    rng = random.Random(0)
    with path.open("w") as file:
        while file.tell() < megabytes * 1e6:
            question, answer = (" ".join(rng.choices(WORDS, k=rng.randint(20, 400))) for _ in range(2))
            file.write(json.dumps({"input": question, "output": answer}) + "\n")


def write_tokens(model: str, file: Path, cache: Path, tokens: int) -> None:
    """Put generated tokens into a cache, as those of ``file``."""

    def build(out: ArrayWriter) -> dict[str, Any]:
        count, rng = 0, np.random.default_rng(0)
        for _ in range(tokens // (LENGTH * 1000)):
            inputs = rng.integers(0, 30_000, LENGTH * 1000, dtype=np.int32)
            lines = np.arange(count, count := count + 1000) + 1
            same = np.full(1000, LENGTH)
            out.add(inputs=inputs, labels=inputs, lengths=same, targets=same, lines=lines)
        counts = Counts(files=1, lines=count, samples=count, tokens=count * LENGTH, targets=count * LENGTH)
        return {"counts": counts.as_json(), "highest": 29_999, "problems": [], "more_problems": 0}

    kept = TokenCache(cache)
    about = kept.about(load_tokenizer(model), {"kind": "chat", **asdict(OPTIONS)}, chat=True)
    kept.shard(file, about, CHAT_DTYPES, build)


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mb", type=int, nargs="*", default=[1, 10, 100])
    parser.add_argument("--generated", type=int, nargs="*", default=[1000, 3600, 10000], help="MB of other files")
    parser.add_argument("--model", required=True, help="a checkpoint, of which the tokenizer is used")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.file is not None:
        print(json.dumps(start(arguments.model, arguments.file, arguments.cache)))
        return
    rows = []

    def measure(name: str, way: str, file: Path, cache: Path | None) -> None:
        found = apart(arguments.model, file, cache)
        figures = f"{found['seconds']:.1f} | {found['own']:.2f} | {found['most']:.2f}"
        rows.append(f"| {name} | {found['tokens']:,} | {way} | {figures} |")
        print(rows[-1], flush=True)

    with tempfile.TemporaryDirectory() as folder:
        file, cache = Path(folder) / "chats.jsonl", Path(folder) / "cache"
        for size in arguments.mb:
            write_chats(file, size)
            time.sleep(3)  # a file that was just written is read again at the next start
            for way, used in (("from the file", None), ("into the cache", cache), ("from the cache", cache)):
                measure(f"{size} MB", way, file, used)
        for size in arguments.generated:
            with file.open("wb") as empty:  # is digested like any other
                empty.truncate(size * 10**6)
            time.sleep(3)
            began = time.perf_counter()
            write_tokens(arguments.model, file, cache, size * PER_MEGABYTE)
            print(f"written in {time.perf_counter() - began:.0f} s", flush=True)
            for way in ("from the cache, the first time", "from the cache"):
                measure(f"{size / 1000:g} GB", way, file, cache)
            shutil.rmtree(cache)
    timing.write(
        Path(__file__).parent / "results",
        "token_cache",
        torch.device("cpu"),
        "# Start on chats with and without data.cache",
        "Seconds until the first batch, on one rank: samples, 8 of them held out, loader, digest, first step; without\n"
        "imports. Own memory: what that adds to the process, without mapped files. At most: all of the process, with\n"
        "imports, mapped files and their pages that were read. The chats have about 1 kB; the tokens of the last rows\n"
        "are generated. The first time also finds copies of the held-out samples; they are remembered in the cache.\n"
        "All of the generated samples have the same length and number of targets, so eight tokens of each are read.",
        timing.head(torch.device("cpu"), "transformers", "tokenizers", "numpy"),
        "\n".join(["| file | tokens | start | seconds | own memory, GB | at most, GB |", "| --- " * 6 + "|", *rows]),
    )


if __name__ == "__main__":
    main()
