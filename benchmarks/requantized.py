"""How many top tokens a GGUF file keeps that has the codes of training, and one that llama.cpp's quantizer makes again.

    python benchmarks/requantized.py --export runs/qwen3/gguf --plain qwen3-trained-bf16.gguf --text heldout.txt

``--export`` is an export with ``export.format: gguf``, ``--plain`` the same weights (``export.format: dequantized``)
after llama.cpp's converter, in BF16. llama.cpp's quantizer makes Q4_0 of the second. Each file is run in llama.cpp as
it is, where inputs of layers are rounded to 8 bits, and with its weights in F32. The reference is the plain one in F32.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.verify.comparison import LogitComparison
from tools.verify.engines import engine_logits

F32, Q4_0, BF16 = 0, 2, 30  # llama.cpp's file types of the first two, and its tensor type of the last


def quantize(source: Path, target: Path, file_type: int, **options: int) -> Path:
    """Write ``source`` in another type with llama.cpp's quantizer."""
    from cyllama.llama import llama_cpp

    llama_cpp.disable_logging()
    parameters = llama_cpp.LlamaModelQuantizeParams()
    parameters.ftype, parameters.nthread, parameters.allow_requantize = file_type, 1, True
    for name, value in options.items():
        setattr(parameters, name, value)
    llama_cpp.model_quantize(str(source), str(target), parameters)
    return target


def main(arguments: list[str] | None = None) -> None:
    """Print a table of the files' top tokens and KL."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, required=True)
    parser.add_argument("--plain", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(options.export)
    ids = tokenizer(options.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0, : options.tokens]
    batches = [row[None] for row in ids.view(-1, 256)]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        files = {
            "the codes of training": options.export / "model.gguf",
            "Q4_0 again, embeddings and head kept": quantize(
                options.plain, place / "kept.gguf", Q4_0, token_embedding_type=BF16, output_tensor_type=BF16
            ),
            "Q4_0 again, llama.cpp's defaults": quantize(options.plain, place / "defaults.gguf", Q4_0),
        }
        reference = list(engine_logits(quantize(options.plain, place / "plain.gguf", F32), batches))
        files = {"BF16, not quantized": options.plain, **files}
        print("| file | MB | same top token | KL | weights in F32: same top token | KL |")
        print("| --- | --- | --- | --- | --- | --- |")
        for name, file in files.items():
            cells = []
            for run in (file, quantize(file, place / "f32.gguf", F32)):
                found = LogitComparison()
                for expected, logits, row in zip(reference, engine_logits(run, batches), batches, strict=True):
                    found.add(torch.as_tensor(logits), expected, row)
                cells += [f"{100 * found.top1:.1f}%", f"{found.kl:.1e}"]
            print(f"| {name} | {file.stat().st_size / 1e6:.0f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
