"""Mutants of the project's source, and which of them the tests kill: shows that a restructured tree is still tested.

    N="--work build/mutants/now"
    python -m tests.mutants.measure $N      # again until 0 files are left
    python -m tests.mutants.run $N --names tests/mutants/names.json --verdict killed    # likewise
    python -m tests.mutants.compare tests/mutants/killed.json build/mutants/now/results.jsonl

``killed.json`` holds 400 mutants of the tree before the restructuring, with their verdicts; ``names.json`` says what
was renamed and moved since (see find.py). A mutant whose statement is no longer there is reported as gone. "unreached":
no unit test calls the function.
"""
