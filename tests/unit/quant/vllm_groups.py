"""Reads from vLLM's source which layers its classes fuse, without importing it.

    python -m tests.unit.quant.vllm_groups SITE_PACKAGES/vllm 0.33.0 > tests/unit/quant/vllm_groups.json

A class says it in ``packed_modules_mapping``, a loader in ``stacked_params_mapping`` or ``orig_to_new_stacked``.
"""

import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

Group = tuple[str, tuple[str, ...]]


def packed(tree: ast.Module) -> Iterator[Group]:
    """What the classes of a file pack: the fused name, and those of its parts."""
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "packed_modules_mapping" and isinstance(node.value, ast.Dict):
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, (ast.List, ast.Tuple)):
                    yield key.value, tuple(part.value for part in value.elts if isinstance(part, ast.Constant))


def stacked(tree: ast.Module) -> Iterator[Group]:
    """What the loaders of a file stack."""
    for node in ast.walk(tree):
        rows: list[tuple[ast.expr | None, ast.expr | None]] = []
        if isinstance(node, ast.Assign) and "stacked_params_mapping" in ast.unparse(node.targets[0]):
            elements = getattr(node.value, "elts", [])
            rows = [(row.elts[0], row.elts[1]) for row in elements if isinstance(row, ast.Tuple) and len(row.elts) == 3]
        elif isinstance(node, ast.keyword) and node.arg == "orig_to_new_stacked" and isinstance(node.value, ast.Dict):
            rows = [
                (value.elts[0], key)
                for key, value in zip(node.value.keys, node.value.values, strict=True)
                if isinstance(value, ast.Tuple)
            ]
        groups: dict[str, list[str]] = defaultdict(list)
        for whole, part in rows:
            if isinstance(whole, ast.Constant) and isinstance(part, ast.Constant):
                groups[whole.value.strip(".")].append(part.value.strip("."))
        yield from ((whole, tuple(dict.fromkeys(parts))) for whole, parts in groups.items())


def groups_of(package: Path) -> dict[tuple[str, ...], list[str]]:
    """The files of vLLM that fuse each group of two layers or more, by the names that the layers have on disk."""
    found: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for file in [*package.glob("model_executor/models/*.py"), *package.glob("models/**/*.py")]:
        tree = ast.parse(file.read_text())
        for _, parts in (*packed(tree), *stacked(tree)):
            names = tuple(part.rpartition(".")[2] for part in parts if not part.endswith((".weight", ".bias")))
            if len(names) > 1:
                found[names].add(str(file.relative_to(package)))
    return {names: sorted(files) for names, files in sorted(found.items())}


if __name__ == "__main__":
    rows = [{"layers": names, "files": files} for names, files in groups_of(Path(sys.argv[1])).items()]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    print(f'{{"version": "{sys.argv[2]}", "groups": [\n{lines}\n]}}')
