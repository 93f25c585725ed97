"""What is lost where an engine quantizes a trained model anew instead of reading the codes that were trained.

    python benchmarks/engines.py --exports runs/qwen3/export [...] --text heldout.txt [--templates base.gguf ...]

Takes compressed exports of trained models. Each is written as launch/export.py would for llama.cpp (q4_0 or w4a16_g32),
for MLX (w4a16_g32 of a model in bf16) and for ExecuTorch (8da4w in bf16), and once as plain weights (``dequantized``),
which the engine's own tool quantizes: llama.cpp's quantizer and the rounding of the package gguf, ``mlx_lm.convert``,
torchao's ``quantize_``. The engines compute logits of the text, which are compared with those of our forward, in fp32.

Needs llama-cpp-python and gguf, or mlx-lm, or executorch; what is missing is left out, and said. Without
``--templates`` a GGUF file gets metadata and the tokens' names from the checkpoint itself, enough for token ids.
Writes ``benchmarks/results/engines.md``.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks import timing
from model.build import build_model
from model.checkpoint.load import load_weights
from model.quantized.scales import take_scales
from model.quantized.schemes import source_schemes
from model.save import export_model
from quant import Quantization, prepare
from quant.formats.layouts import check_layout
from tests.gguf_templates import gguf_template
from tools.compressed import load_compressed
from tools.verify import executorch as xnnpack
from tools.verify import gguf as llama
from tools.verify.comparison import Comparison, windows
from tools.verify.files import dtype_on_disk
from tools.verify.gguf import engine_logits

Values = Mapping[str, Tensor]  # of quantized weights, fp32, by the engine's name
HEAD = (
    "| model | file | weights equal | RMS error of the rest | same top token | KL | perplexity | of our forward |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |"
)


@dataclass
class Row:
    """One file of one model.

    Attributes:
        equal: share of the values of quantized weights that are those of the last forward.
        error: root of the mean square of what differs, over that of the weights.
        logits: the engine's against our forward's.
    """

    model: str
    file: str
    equal: float
    error: float
    logits: Comparison

    def text(self) -> str:
        """A row of the table."""
        logits = self.logits
        ours, theirs = logits.perplexity("ours"), logits.perplexity("theirs")
        return (
            f"| {self.model} | {self.file} | {self.equal:.2%} | {self.error:.2%} | {logits.top1:.2%} | {logits.kl:.2g} "
            f"| {theirs:.3f} ({theirs / ours - 1:+.2%}) | {ours:.3f} |"
        )


@dataclass
class Trained:
    """One export, with what our forward makes of the text."""

    name: str
    export: Path
    text: Path
    tokens: int
    window: int
    batches: list[Tensor] = field(init=False)
    ours: list[Tensor] = field(init=False)
    model: PreTrainedModel = field(init=False)
    quantization: Quantization = field(init=False)

    @torch.no_grad()
    def __post_init__(self) -> None:
        tokenizer = AutoTokenizer.from_pretrained(self.export)
        ids = tokenizer(self.text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
        whole = min(self.tokens, len(ids)) // self.window * self.window  # a lowered program takes rows of one length
        self.batches = windows(ids[:whole], self.window)
        wide, _ = load_compressed(self.export)
        self.ours = [wide(input_ids=ids, use_cache=False).logits for ids in self.batches]
        self.model, self.quantization = load_compressed(self.export, dtype=dtype_on_disk(self.export, wide))

    def holds(self, layout: str) -> str | None:
        """Why a layout does not hold the model; None if it does."""
        try:
            check_layout(layout, (layer.scheme for layer in self.quantization.layers.values()))
        except ValueError as error:
            return str(error)
        engine = {"mlx": "MLX", "executorch": "XNNPACK"}.get(layout)
        return f"{engine} has no scales in fp32" if engine and self.model.dtype == torch.float32 else None

    def written(self, layout: str, out: Path, template: Path | None = None) -> Path:
        """Write the export again in another layout."""
        model, quantization = self.model, self.quantization
        if layout == "mlx":  # which has the experts of a layer together
            model, quantization = with_stacks(self.export, model.dtype)
        export_model(model, quantization, self.export, out, layout=layout, template=template)  # type: ignore[arg-type]
        return out

    def compared(self, logits: Iterator[Tensor]) -> Comparison:
        """An engine's logits with ours."""
        found = Comparison()
        for ids, ours, theirs in zip(self.batches, self.ours, logits, strict=True):
            found.add(ours, theirs, ids)
        return found

    def row(self, file: str, values: Values, expected: Values, logits: Iterator[Tensor]) -> Row:
        """A row of the table."""
        pairs = [(values[name], expected[name]) for name in expected]
        equal = sum(int((one == other).sum()) for one, other in pairs)
        count = sum(other.numel() for _, other in pairs)
        wrong = sum(float((one - other).double().square().sum()) for one, other in pairs)
        size = sum(float(other.double().square().sum()) for _, other in pairs)
        different = max(1, count - equal)
        error = ((wrong / different) / (size / count)) ** 0.5
        return Row(self.name, file, equal / count, error, self.compared(logits))


def with_stacks(export: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, Quantization]:
    """The model of an export with its codes, scales and schemes; its experts are stacks."""
    halves = {"bf16": {"enabled": dtype == torch.bfloat16}, "fp16": {"enabled": dtype == torch.float16}}
    model = build_model(export, halves, dtype=dtype, device=torch.device("cpu"), experts="stacked")
    load_weights(model, export, progress=False)
    schemes = source_schemes(model, export)
    quantization = prepare(model, None, named=schemes, learn_weight_scale=False, learn_input_scale=False)
    take_scales(model, quantization, export)
    return model, quantization


# ---- llama.cpp


def gguf_values(file: Path) -> dict[str, Tensor]:
    """Every tensor in blocks, as the package gguf dequantizes it."""
    import gguf

    return {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in gguf.GGUFReader(file).tensors
        if tensor.tensor_type.name not in ("F32", "F16", "BF16")
    }


def rounded_anew(ours: Path, file: Path) -> None:
    """Our GGUF file with every tensor in blocks rounded anew by the package gguf, from its own values."""
    import gguf

    file.write_bytes(ours.read_bytes())
    reader = gguf.GGUFReader(file, "r+")
    for tensor in reader.tensors:
        if tensor.tensor_type.name in ("Q4_0", "Q8_0"):
            tensor.data[:] = gguf.quants.quantize(
                gguf.quants.dequantize(tensor.data, tensor.tensor_type), tensor.tensor_type
            )
    reader.data.flush()


def quantized_by_llama(plain: Path, out: Path, *, linears_alone: bool) -> None:
    """llama.cpp's own quantizer on a GGUF file of plain weights, to Q4_0."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, 1
    if linears_alone:  # embeddings and head stay, as they do in ours
        import gguf

        kind = next(int(t.tensor_type) for t in gguf.GGUFReader(plain).tensors if t.name == "token_embd.weight")
        params.token_embedding_type = params.output_tensor_type = kind
    if llama_cpp.llama_model_quantize(os.fsencode(plain), os.fsencode(out), params):
        raise SystemExit(f"llama.cpp did not quantize {plain}")


def llama_rows(trained: Trained, template: Path | None, scratch: Path) -> Iterator[Row]:
    """What llama.cpp makes of our file, and of those that were rounded anew."""
    template = template or gguf_template(trained.export, scratch / "template.gguf")
    ours = trained.written("gguf", scratch / "gguf", template) / "model.gguf"
    plain_dir = trained.written("dequantized", scratch / "plain")
    dtype = trained.model.dtype
    halves = {"bf16": {"enabled": dtype == torch.bfloat16}, "fp16": {"enabled": dtype == torch.float16}}
    plain_model = build_model(plain_dir, halves, dtype=dtype, device=torch.device("cpu"))
    load_weights(plain_model, plain_dir, progress=False)
    export_model(plain_model, None, plain_dir, scratch / "plain_gguf", layout="gguf", template=template)
    plain = scratch / "plain_gguf" / "model.gguf"
    expected = gguf_values(ours)
    rows: dict[str, Callable[[Path], Any]] = {
        "GGUF, the codes of training": lambda out: out.write_bytes(ours.read_bytes()),
        "GGUF, rounded anew by the package gguf": lambda out: rounded_anew(ours, out),
        "GGUF, llama.cpp's quantizer, Linears alone": lambda out: quantized_by_llama(plain, out, linears_alone=True),
        "GGUF, llama.cpp's quantizer, its defaults": lambda out: quantized_by_llama(plain, out, linears_alone=False),
    }
    for index, (name, make) in enumerate(rows.items()):
        out = scratch / f"{index}.gguf"
        make(out)
        yield trained.row(name, gguf_values(out), expected, engine_logits(out, trained.batches))


# ---- MLX


def mlx_values(directory: Path) -> dict[str, Tensor]:
    """Every tensor in affine groups, dequantized with its scales in fp32."""
    import mlx.core as mx
    import numpy as np

    found: dict[str, Any] = {}
    for file in sorted(directory.glob("model*.safetensors")):
        found |= mx.load(str(file))
    values, said = {}, json.loads((directory / "config.json").read_text())["quantization"]
    for key in (key.removesuffix(".scales") for key in found if key.endswith(".scales")):
        scales, biases = (found[f"{key}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
        sizes = {name: said.get(key, said)[name] for name in ("group_size", "bits")}  # a router's may be others
        weight = mx.dequantize(found[f"{key}.weight"], scales, biases, **sizes)
        values[key] = torch.from_numpy(np.array(weight))
    return values


def mlx_logits(directory: Path, batches: Sequence[Tensor], *, wide: bool = False) -> Iterator[Tensor]:
    """What mlx-lm makes of each row of token ids, computing in the directory's dtype or, wide, in fp32.

    They differ by more than bf16 alone explains where MLX adds up products of bf16 in bf16, as on a CPU whose vectors
    hold fewer values than a word holds codes (mlx/backend/cpu/quantized.cpp, _qmm_t, mlx 0.32).
    """
    import mlx.core as mx
    import numpy as np
    from mlx.utils import tree_flatten, tree_unflatten
    from mlx_lm.utils import load_model

    model, _ = load_model(directory)
    if wide:
        floats = {
            key: value for key, value in tree_flatten(model.parameters()) if mx.issubdtype(value.dtype, mx.floating)
        }
        model.update(tree_unflatten([(key, value.astype(mx.float32)) for key, value in floats.items()]))
    for ids in batches:
        yield torch.from_numpy(np.array(model(mx.array(ids.numpy())).astype(mx.float32)))


def mlx_rows(trained: Trained, scratch: Path) -> Iterator[Row]:
    """What MLX makes of our directory, and of what mlx_lm.convert rounds anew."""
    from mlx_lm.convert import convert

    ours = trained.written("mlx", scratch / "mlx")
    plain, expected = scratch / "plain", mlx_values(ours)
    if not plain.is_dir():
        trained.written("dequantized", plain)
    # mlx-lm reads sizes by the names of earlier versions of transformers, which our export for it has too.
    theirs, config = (json.loads((directory / "config.json").read_text()) for directory in (ours, plain))
    config |= {key: value for key, value in theirs.items() if key not in config and not key.startswith("quantization")}
    (plain / "config.json").write_text(json.dumps(config))
    for name, predicate in (
        ("MLX, the codes of training", None),
        ("MLX, mlx_lm.convert, Linears alone", lambda path, _: path in expected),
        ("MLX, mlx_lm.convert, its defaults", None),
    ):
        directory = ours
        if "convert" in name:
            directory = scratch / name.replace(" ", "_")
            convert(str(plain), str(directory), quantize=True, q_group_size=32, q_bits=4, quant_predicate=predicate)
        values = mlx_values(directory)
        yield trained.row(name, values, expected, mlx_logits(directory, trained.batches))
        logits = mlx_logits(directory, trained.batches, wide=True)
        yield trained.row(f"{name}, computed in fp32", values, expected, logits)


def mlx_missing() -> str | None:
    """Why MLX cannot be run here; None if it can."""
    try:
        import mlx.core  # noqa: F401
        import mlx_lm  # noqa: F401
    except ImportError as error:
        return f"{error}: pip install -e '.[mlx]'"
    return None


# ---- ExecuTorch


def intx_values(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every weight in torchao's integers, dequantized."""
    return {name: weight.dequantize() for name, weight in model.state_dict().items() if hasattr(weight, "qdata")}


def quantized_by_torchao(plain: Path, like: Values) -> PreTrainedModel:
    """torchao's own quantizer on a checkpoint of plain weights, of those in ``like``: what ``8da4w`` is called in
    ExecuTorch's scripts."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(plain, local_files_only=True)
    config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    quantize_(model, config, filter_fn=lambda _, name: f"{name}.weight" in like)
    return xnnpack.lowerable(model)


def executorch_rows(trained: Trained, scratch: Path) -> Iterator[Row]:
    """What ExecuTorch makes of our directory in XNNPACK, and of what torchao rounds anew."""
    plain = scratch / "plain"
    if not plain.is_dir():
        trained.written("dequantized", plain)
    ours = xnnpack.loaded(trained.written("executorch", scratch / "executorch"))
    expected = intx_values(ours)
    for name, model in (
        ("ExecuTorch, the codes of training", ours),
        ("ExecuTorch, torchao's quantize_, the same layers", quantized_by_torchao(plain, expected)),
    ):
        yield trained.row(name, intx_values(model), expected, iter(xnnpack.computed(model, trained.batches)))


def executorch_missing() -> str | None:
    """Why ExecuTorch cannot be run here; None if it can."""
    try:
        import executorch.runtime  # noqa: F401
    except ImportError as error:
        return f"{error}: pip install -e '.[executorch]'"
    return None


def rows_of(trained: Trained, template: Path | None) -> Iterator[Row | str]:
    """Rows of the table, and what was left out."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        why = trained.holds("gguf") or (None if llama.installed() else llama.MISSING)
        yield from [f"{trained.name}, GGUF: skipped: {why}"] if why else llama_rows(trained, template, scratch)
        why = trained.holds("mlx") or mlx_missing()
        yield from [f"{trained.name}, MLX: skipped: {why}"] if why else mlx_rows(trained, scratch)
        why = trained.holds("executorch") or executorch_missing()
        yield from [f"{trained.name}, ExecuTorch: skipped: {why}"] if why else executorch_rows(trained, scratch)


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exports", type=Path, nargs="+", required=True, help="compressed exports of trained models")
    parser.add_argument("--names", nargs="+", help="of them, in the table; that of the folder above each without it")
    parser.add_argument("--templates", type=Path, nargs="+", help="GGUF files of their base models, in the same order")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text that nothing was trained on")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text")
    parser.add_argument("--window", type=int, default=256, help="tokens per forward")
    parser.add_argument("--results", type=Path, default=timing.RESULTS, help="folder that the table is written to")
    arguments = parser.parse_args()
    count, load = len(arguments.exports), os.getloadavg()
    names = arguments.names or [export.resolve().parent.name for export in arguments.exports]
    templates = arguments.templates or [None] * count
    if not len(names) == len(templates) == count:
        parser.error(f"{count} --exports, {len(names)} --names, {len(templates)} --templates: expected as many of each")
    found: list[Row | str] = []
    for name, export, template in zip(names, arguments.exports, templates, strict=True):
        for row in rows_of(Trained(name, export, arguments.text, arguments.tokens, arguments.window), template):
            print(row if isinstance(row, str) else row.text(), flush=True)
            found.append(row)
    machine = timing.machine(
        torch.device("cpu"), load, "transformers", "llama-cpp-python", "gguf", "mlx", "mlx-lm", "executorch", "torchao"
    )
    lines = [
        "# What is lost where an engine quantizes a trained model anew",
        "",
        f"{arguments.tokens} tokens of {arguments.text.name} in rows of {arguments.window}. {machine}",
        f"`{timing.command()}`",
        "",
        HEAD,
        *(row.text() for row in found if isinstance(row, Row)),
        "",
        *(f"- {row}" for row in found if isinstance(row, str)),
    ]
    timing.write(arguments.results, "engines", torch.device("cpu"), "\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    os.environ.setdefault("TQDM_DISABLE", "1")
    main()
