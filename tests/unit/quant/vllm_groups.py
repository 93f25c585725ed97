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

Group = list[str]


def texts(nodes: list[ast.expr]) -> Group:
    return [node.value for node in nodes if isinstance(node, ast.Constant)]


def fused(tree: ast.Module) -> Iterator[Group]:
    """The names of the parts of each fused layer of a file."""
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        name = "" if target is None else ast.unparse(target)
        if name == "packed_modules_mapping" and isinstance(node.value, ast.Dict):
            yield from (texts(value.elts) for value in node.value.values if isinstance(value, ast.List | ast.Tuple))
        rows: list[list[ast.expr]] = []
        if isinstance(node, ast.Assign) and "stacked_params_mapping" in name:
            rows = [row.elts[:2] for row in getattr(node.value, "elts", []) if len(getattr(row, "elts", ())) == 3]
        elif isinstance(node, ast.keyword) and node.arg == "orig_to_new_stacked" and isinstance(node.value, ast.Dict):
            pairs = zip(node.value.keys, node.value.values, strict=True)
            rows = [[value.elts[0], key] for key, value in pairs if isinstance(value, ast.Tuple)]
        groups: dict[str, Group] = defaultdict(list)
        for whole, part in (names for names in map(texts, rows) if len(names) == 2):
            groups[whole.strip(".")].append(part.strip("."))
        yield from (list(dict.fromkeys(parts)) for parts in groups.values())


def groups_of(package: Path) -> dict[tuple[str, ...], list[str]]:
    """The files of vLLM that fuse each group of two layers or more, by the names that the layers have on disk."""
    found: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for file in [*package.glob("model_executor/models/*.py"), *package.glob("models/**/*.py")]:
        for parts in fused(ast.parse(file.read_text())):
            names = tuple(part.rpartition(".")[2] for part in parts if not part.endswith((".weight", ".bias")))
            if len(names) > 1:
                found[names].add(str(file.relative_to(package)))
    return {names: sorted(files) for names, files in sorted(found.items())}


if __name__ == "__main__":
    rows = [{"layers": names, "files": files} for names, files in groups_of(Path(sys.argv[1])).items()]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    print(f'{{"version": "{sys.argv[2]}", "groups": [\n{lines}\n]}}')
