"""The time and memory of the losses through lm_head, against the same losses written with torch's operators.

    python benchmarks/kd_loss.py [--device cuda] [--rounds 5] [--vocabulary V] [--no-memory | --no-time]

Both sides take hidden states of student and teacher to the gradients of the student's hidden states (and of its lm_head
where that trains), GEMMs included. "direct" has whole logits of both, one fp32 copy of each, and torch's autograd of
one loss: ``kl`` alone is the plain KL that the bar is about. "chunked" is engine.losses.chunked.

The direct form runs only where it is predicted to stay under 16 GiB and under 70% of the memory that is free; elsewhere
the table has the prediction, by bytes per token at T = 1024. Writes ``benchmarks/results/kd_loss.md``, on CUDA
``kd_loss_cuda.md``.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import timing
from benchmarks.timing import MIB, peak_bytes
from engine.losses.chunked import TeacherHidden, chunked_losses
from engine.losses.objective import KD_KINDS, Distillation, Objective, tokens_at_a_time

BAR = 1.2  # of the direct form with one plain KL, at T = 1024
LARGEST_DIRECT = 16 * 2**30
TOKENS, QUICK_TOKENS = (1024, 2048, 4096, 8192), (16, 32, 64)
VOCABULARIES, QUICK_VOCABULARIES = (32_000, 151_936), (300, 1000)
HIDDEN, QUICK_HIDDEN = 1024, 32


class Problem:
    """Hidden states and lm_heads of a student and a teacher, bf16; T positions, all with a target."""

    def __init__(self, tokens: int, vocabulary: int, hidden: int, device: torch.device, train_head: bool) -> None:
        options = {"device": device, "dtype": torch.bfloat16}
        self.hidden = torch.randn(tokens, hidden, **options).requires_grad_()
        self.teacher_hidden = torch.randn(tokens, hidden, **options)
        self.weight, self.teacher_weight = (
            torch.randn(vocabulary, hidden, **options).mul_(2 / math.sqrt(hidden)) for _ in range(2)
        )
        self.weight.requires_grad_(train_head)
        self.labels = torch.randint(vocabulary, (tokens,), device=device)

    def forget(self) -> None:
        """Drop the gradients."""
        self.hidden.grad = self.weight.grad = None

    def direct(self, kind: str) -> None:
        """Logits whole, losses by torch's operators."""
        with torch.no_grad():
            teacher = F.linear(self.teacher_hidden, self.teacher_weight)
        student = F.linear(self.hidden, self.weight)
        direct_loss(kind, student, teacher, self.labels).backward()

    def chunked(self, objective: Objective) -> None:
        """The engine's way."""
        teacher = TeacherHidden(self.teacher_hidden, self.teacher_weight) if objective.kd_weight else None
        chunked_losses(self.hidden, self.weight, None, self.labels, teacher, objective).total.backward()


def direct_loss(kind: str, student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """``kl``; or ``lm + cakld`` as one would write it."""
    log_q, log_p = F.log_softmax(student.float(), dim=-1), F.log_softmax(teacher.float(), dim=-1)
    if kind == "kl":
        return F.kl_div(log_q, log_p, log_target=True, reduction="sum")
    p = log_p.exp()
    forward = (p * (log_p - log_q)).sum(-1)
    reverse = (log_q.exp() * (log_q - log_p)).sum(-1)
    confidence = p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return (confidence * reverse + (1 - confidence) * forward).sum() + F.nll_loss(log_q, labels, reduction="sum")


def objectives() -> dict[str, Objective]:
    """Build the measured objectives by name: each distillation kind, and sums with the language modeling loss."""
    kinds = {kind: Objective(0.0, 1.0, Distillation(kind, 2.0 if kind == "kd" else 1.0)) for kind in KD_KINDS}
    return {
        **kinds,
        "kl_top_k, tail": Objective(0.0, 1.0, Distillation("kl_top_k", tail=True)),
        "r_kl_top_k, tail": Objective(0.0, 1.0, Distillation("r_kl_top_k", tail=True)),
        "lm": Objective(1.0, 0.0),
        "lm + kl": Objective(1.0, 1.0, Distillation("kl")),
        "lm + cakld": Objective(1.0, 1.0, Distillation("cakld")),
    }


def timed(problem: Problem, work: Callable[[], None], device: torch.device) -> float:
    """Seconds of one forward and backward."""
    seconds = timing.seconds_of(work, device)
    problem.forget()
    return seconds


def time_table(tokens: int, vocabulary: int, hidden: int, rounds: int, device: torch.device) -> str:
    """All losses at one size, in turn, and whether the bar is met."""
    trained = Problem(tokens, vocabulary, hidden, device, train_head=True)
    frozen = Problem(tokens, vocabulary, hidden, device, train_head=False)
    ways = {"direct, kl": (trained, partial(trained.direct, "kl"))}
    ways["direct, lm + cakld"] = (trained, partial(trained.direct, "lm + cakld"))
    for name, objective in objectives().items():
        ways[f"chunked, {name}"] = (trained, partial(trained.chunked, objective))
    ways["direct, kl, lm_head frozen"] = (frozen, partial(frozen.direct, "kl"))
    ways["chunked, kl, lm_head frozen"] = (frozen, partial(frozen.chunked, objectives()["kl"]))
    times = timing.interleave({name: partial(timed, *way, device) for name, way in ways.items()}, rounds, warmup=1)
    rows = []
    for name, time in times.items():
        base = times["direct, kl, lm_head frozen" if name.endswith("frozen") else "direct, kl"]
        rows.append([name, f"{time.median * 1e3:.0f}", time.text(base)])
    ratio = times["chunked, kl"].ratio(times["direct, kl"])
    verdict = "The bar is met." if ratio <= BAR else f"- missed: {ratio:.2f} of direct kl, bar {BAR}"
    return f"{timing.table(('loss', 'ms', 'of direct kl (quartiles)'), rows)}\n\n{verdict}"


def available(device: torch.device) -> int:
    """Bytes that are free now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def measured_peak(problem: Problem, work: Callable[[], None], device: torch.device) -> int:
    """Bytes of one forward and backward."""
    peak = peak_bytes(work, device)
    problem.forget()
    return peak


def memory_table(tokens: tuple[int, ...], vocabulary: int, hidden: int, device: torch.device) -> str:
    """Peaks by T, lm_head frozen but in the last column."""
    rows = []
    per_token: dict[str, float] = {}
    objective = objectives()["lm + cakld"]
    for count in tokens:
        frozen = Problem(count, vocabulary, hidden, device, train_head=False)
        cells = [str(count)]
        for kind in ("kl", "lm + cakld"):
            # Before the first measurement: twelve fp32 tensors are more than either takes.
            predicted = count * per_token.get(kind, 12 * 4 * vocabulary)
            first = kind not in per_token
            if (predicted < LARGEST_DIRECT or first) and predicted < 0.7 * available(device):
                peak = measured_peak(frozen, partial(frozen.direct, kind), device)
                per_token.setdefault(kind, peak / count)
                in_logits = peak / (4 * count * vocabulary)
                cells.append(f"{peak / MIB:,.0f} ({in_logits:.1f} fp32 [T, V])")
            else:
                cells.append(f"predicted {predicted / MIB:,.0f}, not run")
        peak = measured_peak(frozen, partial(frozen.chunked, objective), device)
        cells.append(f"{peak / MIB:,.1f}")
        trained = Problem(count, vocabulary, hidden, device, train_head=True)
        peak = measured_peak(trained, partial(trained.chunked, objective), device)
        cells.append(f"{peak / MIB:,.1f}")
        rows.append(cells)
    return timing.table(("T", "direct, kl", "direct, lm + cakld", "chunked, lm + cakld", "lm_head trains"), rows)


def main() -> None:
    """Measure, print, write."""
    parser = timing.options_of(__doc__, rounds=5)
    parser.add_argument("--vocabulary", type=int, help="only this one")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--no-memory", action="store_true")
    which.add_argument("--no-time", action="store_true")
    options = parser.parse_args()
    device = timing.device_of(options)
    tokens, vocabularies = (QUICK_TOKENS, QUICK_VOCABULARIES) if options.quick else (TOKENS, VOCABULARIES)
    vocabularies = (options.vocabulary,) if options.vocabulary else vocabularies
    hidden, rounds = (QUICK_HIDDEN, 2) if options.quick else (HIDDEN, options.rounds)
    sections: list[str] = []
    for vocabulary in vocabularies:
        if not options.no_time:
            times = time_table(tokens[0], vocabulary, hidden, rounds, device)
            sections += [f"## Time at T = {tokens[0]}, V = {vocabulary}", times]
        if not options.no_memory:
            peaks = memory_table(tokens, vocabulary, hidden, device)
            sections += [f"## Peak memory at V = {vocabulary}, MiB", peaks]
    timing.write(
        options.results,
        "kd_loss",
        device,
        f"# Losses through lm_head in chunks against whole logits, {device.type.upper()}",
        f"bf16, hidden size {hidden}, every position has a target, {tokens_at_a_time(None, device)} tokens per chunk, "
        f"K = {Distillation().top_k}; {rounds} rounds in turn, medians. peak: beyond what was there before.\n"
        f"{timing.head(device)}\nBar: chunked kl at most {BAR} of direct kl at T = {tokens[0]}.",
        *sections,
    )


if __name__ == "__main__":
    main()
