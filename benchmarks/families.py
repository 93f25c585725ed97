"""Train every family of causal language models of transformers that is known here, and write which of them work.

    python benchmarks/families.py [--only "qwen3" "gemma2"] [--keep DIRECTORY] [--write]

Every variant of tests/families is made as a tiny random checkpoint and taken, on two ranks under ZeRO-3, through what a
user does: load and export without quantizing (same keys, same bytes), logits and gradients in fp32 against
transformers, packed samples against each alone, 12 steps of fp8_static and of w4a16_g32 with an export that must load
as the class in its config.json and verify. With ``--write`` the table goes to docs/models.md.

The sizes are tiny and the weights random: a family that works has its layers, names and layouts handled; how well it
trains is not seen.
"""

import argparse
import json
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.families.variants import COMPOSITE, DENSE, EXPERTS, HYBRIDS, VARIANTS  # noqa: E402
from tests.lib.launcher import run_waiting  # noqa: E402

SCRIPT = ROOT / "tests" / "families" / "scripts" / "family.py"
PAGE = ROOT / "docs" / "models.md"
PATIENCE = 3600.0
SECTIONS = (
    ("Dense", DENSE),
    ("Mixtures of experts", EXPERTS),
    ("With recurrences or convolutions", HYBRIDS),
    ("Composite models: the text model trains, towers are copied", COMPOSITE),
)
Stages = dict[str, str]


class Outcome(NamedTuple):
    """How the stages of a variant ended, and the commit that was tried."""

    stages: Stages
    commit: str


def measure(names: Sequence[str], directory: Path) -> dict[str, Outcome]:
    """Outcomes by variant and stage; a job that ends early is followed by one that starts behind the stage of its end.

    Outcomes that lie in ``directory`` already are taken from there.
    """

    def outcomes(name: str) -> dict[str, Any]:
        file = directory / f"{name}.json"
        return dict(json.loads(file.read_text())) if file.exists() else {"stages": {}, "finished": False}

    for count, name in enumerate(names):
        while not (found := outcomes(name))["finished"]:
            print(f"{count} of {len(names)} done; next: {name}", flush=True)
            before = len(found["stages"])
            _, output = run_waiting(SCRIPT, directory, name, timeout=PATIENCE)
            (directory / f"{name}.{before}.log").write_text(output)
            if len((found := outcomes(name))["stages"]) == before and not found["finished"]:  # it got nowhere
                stages = {**found["stages"], "start": f"wrong: the job ended: {output[-300:]}"}
                (directory / f"{name}.json").write_text(json.dumps({"stages": stages, "finished": True}))
    ended = {}
    for name in names:
        found = outcomes(name)
        stages = {stage: text.replace(f"{directory}/", "") for stage, text in found["stages"].items()}
        ended[name] = Outcome(stages, found.get("commit", ""))
    return ended


def verdict(stages: Stages) -> tuple[str, str]:
    """Summarize a variant's stages: the support that a user can expect in a few words, and the reason."""
    wrong = [f"{stage}: {outcome}" for stage, outcome in stages.items() if outcome.startswith("wrong")]
    if wrong:
        return "wrong", wrong[0]
    refused = {stage: outcome for stage, outcome in stages.items() if outcome.startswith("refused")}
    packing = refused.pop("packed", None)
    exempt = [stage for stage in refused if stages.get(f"{stage}, exempt") == "ok"]
    if exempt and len(exempt) == len(refused):
        return "works with layers exempt", refused[exempt[0]].removeprefix("refused: ")
    if refused and all(stages.get(f"{stage}, dequantized") == "ok" for stage in refused):
        return "works dequantized", next(iter(refused.values())).removeprefix("refused: ")
    if refused:
        return "refused", next(iter(refused.values())).removeprefix("refused: ")
    readers = [
        f"{stage.removesuffix(', reader')}: {why}" for stage, why in stages.items() if stage.endswith(", reader")
    ]
    return "works without packing" if packing else "works", "; ".join(readers)


def table(results: dict[str, Outcome]) -> str:
    """The page docs/models.md."""
    import torch
    import transformers

    verdicts = {name: verdict(one.stages) for name, one in results.items()}
    counts = Counter(kind for kind, _ in verdicts.values())
    lines = [
        "# Which models work",
        "",
        "This page is written by `python benchmarks/families.py --write`. "
        f"Results of {len(verdicts)} variants: "
        + ", ".join(f"*{kind}* {count}" for kind, count in counts.most_common())
        + ".",
        f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}, two CPU ranks under "
        "ZeRO-3.",
        "",
        "Each variant is a tiny random checkpoint, made from transformers' own configuration class, with one trait of",
        "the published models. *Works* means that loading and exporting it changes no byte, that logits and gradients",
        "in fp32 are those of transformers, and that 12 steps of `fp8_static` and of `w4a16_g32` run. Both exports",
        "load as the class that their `config.json` names, without a missing or an unexpected key, and compute what",
        "training saw. *Works without packing* means that transformers' code of this family lets packed samples see",
        "each other, so that `data.packing` is refused. *Works with layers exempt* means that a run is refused, that",
        "the message names the `quant.exempt_more` that it needs, and that it works with that option. *Works",
        "dequantized* means that a run is refused unless the export has unquantized weights (`export.format:",
        "dequantized`). If transformers cannot load an export in a scheme, a run warns before it trains, and *reason*",
        "has the scheme and the warning; such an export was compared with the weights that compressed-tensors",
        "decompresses. Otherwise *reason* is the run's error text, shortened. *Commit* is the version of DeepQAT that",
        "was tried, with a + if files had changed since. To try another model, see [adding a",
        "model](adding_a_model.md).",
    ]
    for title, variants in SECTIONS:
        rows = [variant.name for variant in variants if variant.name in verdicts]
        lines += (
            ["", f"## {title}", "", "| model | result | reason | commit |", "| --- | --- | --- | --- |"] if rows else []
        )
        for name in rows:
            kind, why = verdicts[name]
            lines.append(f"| {name} | {kind} | {_cell(why)} | {results[name].commit} |")
    if missing := [name for name in VARIANTS if name not in verdicts]:
        lines += ["", "## Not run", "", *textwrap.wrap("; ".join(missing) + ".", 120, break_on_hyphens=False)]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    line = text.replace("|", "\\|").replace("\n", " ")
    return line if len(line) <= 300 else f"{line[:300]} ..."


def main() -> None:
    """Measure and print; write the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, metavar="VARIANT", default=list(VARIANTS))
    parser.add_argument("--keep", type=Path, help="directory for outcomes and logs, also of an earlier run")
    parser.add_argument("--write", action="store_true", help="write docs/models.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        results = measure(arguments.only, directory)
    page = table(results)
    print(page)
    if arguments.write:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
