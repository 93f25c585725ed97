"""Which scales training refuses to start from: legitimate and wrong ones, alone and beside codes.

    python benchmarks/scale_fit.py --model MODEL

Every case is tried on random weights (Gaussian, heavy tails, outlier columns, rows of unequal size) and on some of
MODEL's, under every scheme that it exists for. The table counts how often a case is refused, by the scales alone and
where the file has codes too, and gives the largest error of what passes.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.timing import arguments_of, command, machine, write
from model.scales.codes import add_products, count_of_sums, other_weights
from quant import SCHEMES, Ranges, partial_errors, partial_fit, partial_stats, scales_from_errors, scales_from_stats
from quant.fit import Fit, scale_problem
from quant.linear import LinearPart
from quant.observers import zero_points_from_stats
from quant.reference import dequantize, fake_quant, quantize, round_scale
from quant.spec import TensorSpec

NAMES = "fp8_static fp8_dynamic fp8_block int8_dynamic w8a16_g32 w4a16_g128 w4a16_g32 w4a16_channel w3a16_g32"
NAMES += " w3a16_channel w2a16_g32 w2a16_channel w4a16_asym w8a16_asym nvfp4 mxfp4"
TINY = 1e-12
REMARKS = """`refused` is by the scales alone, `with codes` where the file has codes beside them. The largest error is
the squared error over the squared weights, of the scales that pass by themselves and with the layer's own scales."""


class Case:
    """A weight under a scheme: its statistics and its own scales."""

    def __init__(self, weight: Tensor, spec: TensorSpec):
        self.weight, self.spec, self.shape = weight, spec, tuple(weight.shape)
        self.stats = partial_stats(weight.flatten(), 0, self.shape, spec)
        self.absmax, self.zero = scales_from_stats(self.stats, spec), zero_points_from_stats(self.stats, spec)
        self.own = self.best() if Ranges().searches(spec) else self.absmax

    def best(self) -> Tensor:
        """Scales of the smallest squared error."""
        errors = partial_errors(self.weight.flatten(), 0, self.shape, self.stats, self.spec)
        return scales_from_errors(self.stats, errors, self.spec)

    def gptq(self, scale: Tensor) -> Tensor:
        """Weights that lie on the grid: columns in turn, each one's error made good by those to come (Frantar et al.
        2023), for inputs of which a few directions are large."""
        columns = self.shape[1]
        inputs = torch.randn(2 * columns, 32) @ torch.randn(32, columns) + torch.randn(2 * columns, columns)
        hessian = inputs.t() @ inputs / len(inputs)
        hessian += 0.01 * hessian.diagonal().mean() * torch.eye(columns)
        upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
        weight, result = self.weight.clone(), torch.empty_like(self.weight)
        for column in range(columns):
            group = column * scale.shape[1] // columns
            its, zero = (None if each is None else each[:, [group]] for each in (scale, self.zero))
            assert its is not None
            result[:, column] = fake_quant(weight[:, [column]], its, self.spec, zero)[:, 0]
            error = (weight[:, column] - result[:, column]) / upper[column, column]
            weight[:, column:] -= error[:, None] * upper[column, column:]
        return result

    def stored(self, scale: Tensor) -> Tensor:
        """As a file of the scheme would hold it."""
        if self.spec.scale_format == "float32":
            return scale
        if self.spec.scale_format == "model":
            return scale.bfloat16().float()
        return round_scale(scale.clamp(min=TINY), self.spec, 448 * 6 / self.weight.abs().max())

    def sums(self, scale: Tensor) -> Tensor:
        """Errors and squares by scale."""
        return partial_fit(self.weight.flatten(), 0, self.shape, scale, self.spec, self.zero)

    def refused(self, scale: Tensor) -> tuple[bool, float]:
        """Whether the scales are refused, and the error that they make."""
        error, squares = self.sums(scale)
        parts = (scale, self.own, self.absmax, error, self.sums(self.own)[0], squares)
        problem = scale_problem(Fit(*(part.flatten().double() for part in parts)), self.spec)
        return problem is not None, float(error.sum() / squares.sum())

    def refused_codes(self, scale: Tensor, source: Tensor, of_source: Tensor) -> bool:
        """Whether codes are refused that were made of ``source`` with the scales ``of_source``, beside ``scale``."""
        codes = quantize(source, of_source, self.spec, self.zero)
        decoded = dequantize(codes, scale, self.spec, torch.float32, self.zero)
        rounded = fake_quant(self.weight, scale, self.spec, self.zero)
        part = LinearPart("", *self.shape)
        sums = torch.zeros(count_of_sums(part, self.spec), dtype=torch.float64)
        add_products(sums, part, self.spec, 0, slice(0, self.weight.numel()), (self.weight, rounded, decoded))
        return other_weights(sums, part) is not None


def weights(model: Path) -> dict[str, Tensor]:
    """Random weights, and layers of a trained model with the next layer's (``next <name>``)."""
    rows, columns = 512, 1024
    normal = torch.randn(rows, columns) * 0.02
    found = {
        "gaussian": normal,
        "laplace": torch.distributions.Laplace(0, 0.02).sample((rows, columns)),
        "student t": torch.distributions.StudentT(4.0).sample((rows, columns)) * 0.02,
        "outlier columns": normal * torch.where(torch.rand(columns) < 0.01, 20.0, 1.0),
        "unequal rows": normal * torch.exp(torch.randn(rows, 1) * 0.7),
    }
    disk = load_file(model / "model.safetensors")
    for name in ("1.self_attn.q_proj", "3.self_attn.v_proj", "2.mlp.gate_proj", "4.mlp.down_proj"):
        found[name] = disk[f"model.layers.{name}.weight"].float()
        after = re.sub(r"^\d+", lambda number: str(int(number[0]) + 1), name)
        found[f"next {name}"] = disk[f"model.layers.{after}.weight"].float()
    return {name: weight.bfloat16().float() for name, weight in found.items()}


def legitimate(case: Case) -> Iterator[tuple[str, Tensor]]:
    """Scales that must pass."""
    spec, own = case.spec, case.own
    yield "largest magnitude", case.absmax
    yield "smallest squared error", case.best()
    yield "clipped to 80%", own * 0.8
    if spec.granularity in ("group", "channel"):
        yield "codes of GPTQ", case.best()
    yield "codes of weights that trained by 30% of their size", own
    if spec.bits < 8 and spec.scale_format != "e8m0":
        yield "clipped to 70% (AWQ, AutoRound)", own * 0.7
    if spec.dtype == "int" and spec.symmetric:
        yield "absmax / qmax", case.absmax * ((spec.qmax - spec.qmin) / 2 / spec.qmax)
        signs = torch.where(case.stats[0] > case.stats[1], -1.0, 1.0)
        yield "signed, extreme on qmin", case.absmax * ((spec.qmax - spec.qmin) / 2 / -spec.qmin) * signs
    for stray in (0.1, 0.2, 0.3):
        yield f"trained, theta strayed by {stray}", own * torch.exp(torch.randn_like(own).clamp(-2, 2) * stray)
    yield "trained, theta -0.2 +- 0.2", own * torch.exp(torch.randn_like(own).clamp(-2, 2) * 0.2 - 0.2)
    if spec.scale_format == "e8m0":
        yield "OCP rule, absmax in [4, 8)", torch.exp2(case.stats.amax(0).clamp(min=TINY).log2().floor() - 2)
    if spec.scale_format in ("float32", "model"):
        yield "powers of two, up", torch.exp2(own.log2().ceil())
        yield "powers of two, nearest", torch.exp2(own.log2().round())


def wrong(case: Case, other: Tensor | None) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Name, scales of the file, and of what weight and with which scales its codes were made."""
    spec, own, weight = case.spec, case.own, case.weight
    largest = case.stats.amax(0).clamp(min=TINY)
    shuffled = own.flatten()[torch.randperm(own.numel())].view_as(own)
    tampered = {"times 2": own * 2, "divided by 2": own / 2, "reciprocal": 1 / own, "absmax, not divided": largest}
    tampered |= {"divided by 57344 (e5m2)": largest / 57344} if spec.dtype != "int" else {}
    tampered |= {"without e8m0's bias": own * 2.0**-100} if spec.scale_format == "e8m0" else {}
    if own.numel() > 1:
        tampered |= {"permuted": shuffled, "next row's": own.roll(1, 0)}
        if own.shape[1] > 1:
            tampered |= {"transposed": own.t().reshape(own.shape), "next group's": own.roll(1, 1)}
    for name, scale in tampered.items():
        yield name, scale, weight, own
    for bits in (2, 3, 4, 8):
        if spec.dtype == "int" and bits != spec.bits:
            of = TensorSpec("int", bits, spec.granularity, spec.group_size, spec.symmetric)
            yield f"of int{bits}, alone", Case(weight, of).own, weight, own
    for spread in (0.3, 0.5):
        smooth = torch.exp(torch.randn(weight.shape[1]) * spread)
        made = Case(weight * smooth / (smooth.max() * smooth.min()).sqrt(), spec)
        yield f"of smoothed weights, spread {spread}", made.own, made.weight, made.own
    strangers = {"of a random weight of this size": torch.randn_like(weight) * weight.std()}
    if other is not None:
        strangers["the next layer's"] = other
    for name, stranger in strangers.items():
        made = Case(stranger, spec)
        yield name, made.own, stranger, made.own


def main() -> None:
    """Try every case and write the tables."""
    parser = arguments_of(__doc__, rounds=1)
    parser.add_argument("--model", type=Path, required=True, help="directory of a trained model")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    load = os.getloadavg()
    torch.manual_seed(0)
    found = weights(arguments.model)
    tables: dict[bool, dict[str, list[tuple[bool, bool, float, float, str]]]] = {True: {}, False: {}}
    for scheme in NAMES.split()[:: 6 if arguments.quick else 1]:
        spec = SCHEMES[scheme].weights
        for name, weight in found.items():
            if name.startswith("next ") or any(side % (spec.group_size or 1) for side in weight.shape):
                continue
            case = Case(weight, spec)
            own_error = case.refused(case.stored(case.own))[1]
            good = [(title, scale, weight, scale) for title, scale in legitimate(case)]
            bad = list(wrong(case, found.get(f"next {name}")))
            for fine, cases in ((True, good), (False, bad)):
                for title, scale, source, of_source in cases:
                    scale = case.stored(scale.clamp(min=TINY) if title[:6] != "signed" else scale)
                    of_source = scale if fine else case.stored(of_source)
                    if title.startswith("codes of GPTQ"):
                        source = case.gptq(scale)
                    elif title.startswith("codes of weights"):
                        source = weight + 0.3 * torch.randn_like(weight) * weight.std()
                    alone, error = case.refused(scale)
                    beside = alone or case.refused_codes(scale, source, of_source)
                    row = (alone, beside, error, own_error, f"{scheme}, {name}")
                    tables[fine].setdefault(title, []).append(row)
    lines = [
        "# Which scales are refused",
        "",
        machine(torch.device("cpu"), load),
        "",
        f"Command: `{command()}`",
        "",
        REMARKS,
    ]
    for fine, heading in ((True, "Legitimate"), (False, "Wrong")):
        lines += [
            "",
            f"## {heading}",
            "",
            "| scales | cases | refused | with codes | largest error that passes | where |",
        ]
        lines += ["| --- | --- | --- | --- | --- | --- |"]
        for title, rows in tables[fine].items():
            passing = [row for row in rows if not row[0]]
            worst = max(passing, key=lambda row: row[2] / row[3], default=None)
            where = "" if worst is None else f"{worst[2]:.2g} instead of {worst[3]:.2g} | {worst[4]}"
            counts = f"{sum(row[0] for row in rows)} | {sum(row[1] for row in rows)}"
            lines.append(f"| {title} | {len(rows)} | {counts} | {where or '|'} |")
    write(arguments.results, "scale_fit", torch.device("cpu"), "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
