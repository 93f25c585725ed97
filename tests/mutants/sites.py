"""Find the places of the project's Python files where one small fault can be put in, and put it in.

A place is named by its function, operator, normalized statement (strings blanked, only the header of a compound
statement) and the expression that changes, never by line: it is found again after the file has moved.
"""

import ast
import copy
import difflib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("launch", "tools", "engine", "model", "quant", "data")
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
}
COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "barrier", "gather", "scatter", "reduce")
COLLECTIVES += ("everywhere", "over_ranks")
ALIKE = 0.7  # of a statement's text that must have stayed, where the rest was renamed
SILENT = ("print", "warn", "info", "debug", "warning", "log")  # calls whose loss no test of numbers is asked to see


@dataclass(frozen=True)
class Site:
    """One possible fault: the bytes from ``start`` to ``end`` become ``text``."""

    qualname: str
    operator: str
    statement: str
    before: str
    start: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        """Put the fault into the file."""
        return source[: self.start] + self.text.encode() + source[self.end :]


@dataclass(frozen=True)
class Mutant:
    """A fault by what it is, not by where it is; ``ordinal`` counts equal ones of a function."""

    module: str
    qualname: str
    operator: str
    ordinal: int
    statement: str
    before: str

    def __str__(self) -> str:
        inside = "" if self.before == self.statement else f"  in  {self.statement}"
        return f"{self.module}:{self.qualname or '<module>'} [{self.operator}] {self.before}{inside}"


class Tree:
    """All sites of a tree, by their operator."""

    def __init__(self, tree: Path) -> None:
        self._sites: dict[str, list[tuple[str, Site]]] = defaultdict(list)
        for path in sorted(path for folder in FOLDERS for path in (tree / folder).rglob("*.py")):
            for site in sites(path.read_bytes()):
                self._sites[site.operator].append((str(path.relative_to(tree)), site))

    def mutants(self) -> list[Mutant]:
        """Return a mutant for each site."""
        seen: Counter[tuple[str, ...]] = Counter()
        found = []
        for module, site in (one for of_operator in self._sites.values() for one in of_operator):
            key = (module, site.qualname, site.operator, site.statement, site.before)
            found.append(Mutant(*key[:3], seen[key], *key[3:]))
            seen[key] += 1
        return found

    def find(self, mutant: Mutant) -> tuple[str, Site] | None:
        """Find the module and site of a mutant, also in another function or, if nearly alike, with other names."""
        of_operator = self._sites[mutant.operator]
        same = [one for one in of_operator if (one[1].statement, one[1].before) == (mutant.statement, mutant.before)]
        closeness: list[Callable[[str, Site], bool]] = [
            lambda path, site: path == mutant.module and site.qualname == mutant.qualname,
            lambda path, site: bool(mutant.qualname) and site.qualname == mutant.qualname,
            lambda path, site: Path(path).name == Path(mutant.module).name and site.qualname == mutant.qualname,
        ]
        for close in (*closeness, lambda path, site: True):
            fits = [one for one in same if close(*one)]
            if fits and len({(path, site.qualname) for path, site in fits}) == 1:
                return fits[min(mutant.ordinal, len(fits) - 1)]
        for close in closeness:
            scored = [(_alike(site, mutant), (path, site)) for path, site in of_operator if close(path, site)]
            score, best = max(scored, key=lambda pair: pair[0], default=(0.0, None))
            if score >= ALIKE:
                return best
        return None


def _alike(site: Site, mutant: Mutant) -> float:
    """Return how much of the statement and of the expression has stayed, from 0 to 1."""
    pairs = (mutant.statement, site.statement), (mutant.before, site.before)
    return min(difflib.SequenceMatcher(None, old, new, autojunk=False).ratio() for old, new in pairs)


class _Blank(ast.NodeTransformer):
    """Replace every string by an empty one: texts of messages may be reworded."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("") if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant("")


def sites(source: bytes) -> Iterator[Site]:
    """Every site of a file, in its order."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for qualname, statement, last in _statements(ast.parse(source).body, ()):
        header = normalized(statement)
        for node, operator, text in _mutations(statement, last):
            assert node.end_lineno is not None and node.end_col_offset is not None
            start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            before = header if node is statement else normalized(node)
            yield Site(".".join(qualname), operator, header, before, start, end, text)


def normalized(node: ast.AST) -> str:
    """Text of a statement's header or of an expression, independent of layout, comments and strings."""
    node = _Blank().visit(copy.deepcopy(node))
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        if isinstance(getattr(node, name, None), list):
            setattr(node, name, [ast.Pass()] if name == "body" else [])
    return ast.unparse(node).removesuffix("\n    pass")


def _statements(
    body: list[ast.stmt], qualname: tuple[str, ...], function: bool = False
) -> Iterator[tuple[tuple[str, ...], ast.stmt, bool]]:
    """Statements with the name of their function, and if each is the function's last."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = (*qualname, statement.name)
            yield from _statements(statement.body, inside, not isinstance(statement, ast.ClassDef))
            continue
        if isinstance(statement, ast.If) and ast.unparse(statement.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
            continue
        yield qualname, statement, function and statement is body[-1]
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            child = getattr(statement, name, [])
            for block in [part.body for part in child] if name in ("handlers", "cases") else [child]:
                yield from _statements(block, qualname)


def _mutations(statement: ast.stmt, last: bool) -> Iterator[tuple[ast.stmt | ast.expr, str, str]]:
    """Node, name of the operator, and new text of every fault of a statement, its blocks left out."""
    match statement:
        case ast.Raise():
            yield statement, "drop raise", "pass"
            return
        case ast.Expr(value=ast.Call() as call):
            name = ast.unparse(call.func).rpartition(".")[2]
            if name in SILENT:
                return
            yield statement, "drop collective" if any(part in name for part in COLLECTIVES) else "drop call", "pass"
        case ast.Return() if not last:
            yield statement, "drop return", "pass"
        case ast.AugAssign() if type(statement.op) in ARITHMETIC:
            changed = copy.deepcopy(statement)
            changed.op = ARITHMETIC[type(statement.op)]()
            yield statement, "swap arithmetic", ast.unparse(changed)
        case ast.If() | ast.While():
            yield statement.test, "negate", f"(not {ast.unparse(ast.UnaryOp(ast.Not(), statement.test))[4:]})"
    for root in _headers(statement):
        for node in _walk(root):
            for operator, changed in _of_expression(node):
                text = ast.unparse(changed)
                yield node, operator, text if isinstance(changed, ast.Constant | ast.Name | ast.Call) else f"({text})"


def _headers(statement: ast.stmt) -> list[ast.expr]:
    """Expressions of a statement that are evaluated, without those of its blocks, targets and annotations."""
    if isinstance(statement, ast.With):
        return [item.context_expr for item in statement.items]
    names = ("value", "test", "iter", "subject")
    if isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Call | ast.Yield):
        return []  # docstrings
    return [node for name in names if isinstance(node := getattr(statement, name, None), ast.expr)]


def _walk(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions below ``node`` in their order, without the parts of f-strings."""
    if isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, ast.expr):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _walk(child)


def _of_expression(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Every fault of one node of an expression."""
    changed: ast.expr = copy.copy(node)
    match changed:
        case ast.Compare(ops=[operator, *more]):
            changed.ops = [COMPARISONS[type(operator)](), *more]
            yield "flip comparison", changed
        case ast.BinOp() if type(changed.op) in ARITHMETIC and not _is_text(changed):
            changed.op = ARITHMETIC[type(changed.op)]()
            yield "swap arithmetic", changed
        case ast.BoolOp():
            changed.op = ast.Or() if isinstance(changed.op, ast.And) else ast.And()
            yield "swap and/or", changed
        case ast.Constant(value=bool(value)):
            yield "flip constant", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "off by one", ast.Constant(value + 1)
        case ast.IfExp():
            changed.test = ast.UnaryOp(ast.Not(), changed.test)
            yield "negate", changed
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield "drop minus", operand
        case ast.Call(args=[first, second, *more]) if isinstance(second, ast.Name | ast.Attribute):
            if isinstance(first, ast.Name | ast.Attribute) and first is not second:
                changed.args = [second, first, *more]
                yield "swap arguments", changed
        case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper, step=step)):
            if (bound := upper or lower) is not None and not isinstance(bound, ast.Constant):
                moved = ast.BinOp(bound, ast.Sub(), ast.Constant(1))
                changed.slice = ast.Slice(moved if upper is None else lower, moved if upper else None, step)
                yield "move bound", changed


def _is_text(node: ast.BinOp) -> bool:
    """Tell string concatenation and repetition, as far as the literals show it."""
    return any(
        isinstance(part, ast.JoinedStr) or isinstance(getattr(part, "value", None), str) for part in ast.walk(node)
    )
