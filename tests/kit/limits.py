"""Find limits of the suite that `COMETMQ_TEST_PATIENCE` does not change. No tests here.

A limit is a number of at least `LEAST_S` that bounds a wait: an argument of a call that waits, a
default of such an argument, a number added to the clock's time, a bound of a measured time. Write
it as `patient(60)` (see patience.py), in that place or where the constant is defined.

    python tests/kit/limits.py             lists such numbers
    python tests/kit/limits.py --write     writes `patient(...)` around them
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
#: Machinery of the benchmarks that belongs to the product: `cometmq bench` uses it, too.
HARNESS: Final = ("harness", "omb", "peers")
LEAST_S: Final = 5.0  # shorter waits belong to a polling loop, or are the subject of a test
LEAST_MS: Final = 1000 * LEAST_S  # for poll objects, whose only argument is in ms
KEYWORDS: Final = frozenset({"timeout", "timeout_s", "limit_s", "within_s", "wait_for_broker"})
ANY: Final = frozenset(range(9))
LATER: Final = ANY - {0}
FIRST: Final = frozenset({0})
#: Functions that wait, by name, with the positions of their arguments that are times.
POSITIONS: Final[dict[str, frozenset[int]]] = {
    "Timer": FIRST,
    "acquire": ANY,
    "awaitTermination": ANY,
    "eventually": LATER,
    "finished": LATER,
    "has_ended": LATER,
    "is_readable": LATER,
    "join": FIRST,
    "poll": LATER,
    "result": ANY,
    "select": frozenset({3}),
    "settimeout": ANY,
    "still_there": LATER,
    "timeout": ANY,  # asyncio's
    "until": LATER,
    "wait": ANY,
    "wait_for": LATER,
    "wait_hit": ANY,
    "wait_procs": LATER,
    "wait_until": frozenset({2}),
}
#: Names of deadlines: a number that is added to get one is a limit.
DEADLINES: Final = frozenset({"deadline", "give_up_at"})
#: Attributes of sockets of ZeroMQ, in ms.
IN_MS: Final = frozenset({"rcvtimeo", "sndtimeo"})
#: Names of measured times.
TAKEN: Final = frozenset({"took", "took_s", "elapsed", "elapsed_s"})
#: Names of constants that are always limits.
LIMITS: Final = re.compile(
    r"(.*_)?(WAIT|TIMEOUT|READY|START|STOP|END|ANSWER|PROGRESS|ELECTION|AWAY|SEEN|MAX)_S"
)
CLOCKS: Final = frozenset({"monotonic", "perf_counter", "up_s"})
#: Owners of simulated clocks; and marks, which conftest.py multiplies.
NOT_OURS: Final = frozenset({"world", "rig", "mark"})


class Limit(NamedTuple):
    """A plain number that is a limit, with its place, also as a default or a constant."""

    path: Path
    node: ast.expr
    used_at: int  # the line that waits

    def __str__(self) -> str:
        return f"{self.path}:{self.node.lineno}: {ast.unparse(self.node)} (line {self.used_at})"


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def number_of(node: ast.expr | None) -> float | None:
    """Return the value of a literal, also of a computed one such as 3 * 60."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.BinOp(left=left, op=op, right=right):
            one, other = number_of(left), number_of(right)
            if one is None or other is None:
                return None
            match op:
                case ast.Add():
                    return one + other
                case ast.Sub():
                    return one - other
                case ast.Mult():
                    return one * other
                case ast.Div() if other:
                    return one / other
    return None


def is_clock(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and name_of(node.func) in CLOCKS


def is_taken(node: ast.expr) -> bool:
    """Return whether a node is a measured time: the clock minus a start time."""
    if name_of(node) in TAKEN:
        return True
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and is_clock(node.left)


def of_call(node: ast.Call) -> Iterator[ast.expr]:
    for keyword in node.keywords:
        if keyword.arg in KEYWORDS:
            yield keyword.value
    name = name_of(node.func)
    places = POSITIONS.get(name, frozenset())
    if isinstance(node.func, ast.Attribute) and name_of(node.func.value) in NOT_OURS:
        return
    if name == "join" and len(node.args) > 1:
        return  # os.path's, or of a group
    yield from (each for place, each in enumerate(node.args) if place in places)
    if name == "poll" and len(node.args) == 1 and not node.keywords:
        number = number_of(node.args[0])
        if number is not None and number >= LEAST_MS:
            yield node.args[0]


def of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr]:
    names = node.args
    positional = [*names.posonlyargs, *names.args]
    pairs = [*zip(reversed(positional), reversed(names.defaults), strict=False)]
    pairs += [
        (each, at) for each, at in zip(names.kwonlyargs, names.kw_defaults, strict=True) if at
    ]
    yield from (default for name, default in pairs if name.arg in KEYWORDS)


def of_compare(node: ast.Compare, *, gives_up: bool = False) -> Iterator[ast.expr]:
    """Yield limits of a comparison.

    Args:
    gives_up: The comparison is the condition of a branch that fails when the limit is exceeded.
    """
    if gives_up:
        node = ast.Compare(node.left, [_TURNED.get(type(op), type(op))() for op in node.ops],
                           node.comparators)  # fmt: skip
    sides = [node.left, *node.comparators]
    for one, op, other in zip(sides, node.ops, sides[1:], strict=False):
        if is_taken(one) and isinstance(op, ast.Lt | ast.LtE):
            yield other
        elif is_taken(other) and isinstance(op, ast.Gt | ast.GtE):
            yield one


def of_assignment(target: ast.expr, value: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, other in zip(target.elts, value.elts, strict=False):
            yield from of_assignment(one, other)
        return
    name = name_of(target)
    if name in KEYWORDS:
        yield value
    if name in IN_MS and (number_of(value) or LEAST_MS) >= LEAST_MS:
        yield value
    if name in DEADLINES and isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        yield value.right


_TURNED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Gt: ast.Lt, ast.GtE: ast.Lt, ast.Lt: ast.Gt, ast.LtE: ast.Gt,
}  # fmt: skip


def times(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield all nodes that are the time of a wait or the upper bound of a duration."""
    for node in ast.walk(tree):
        match node:
            case ast.Call():
                yield from of_call(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from of_function(node)
            case ast.BinOp(left=left, op=ast.Add(), right=right) if is_clock(left):
                yield right
            case ast.Compare():
                yield from of_compare(node)
            case ast.If(test=ast.Compare() as test):
                yield from of_compare(test, gives_up=True)
            case ast.AnnAssign(target=ast.Name(id=name), value=value) if name in KEYWORDS and value:
                yield value
            case ast.Assign(targets=[target], value=value):
                yield from of_assignment(target, value)
            case ast.Dict(keys=keys, values=values):
                yield from (
                    value
                    for key, value in zip(keys, values, strict=True)
                    if isinstance(key, ast.Constant) and key.value in KEYWORDS
                )


def constants(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield name, value


class Modules:
    """All modules of the suite, with the constants that each defines."""

    def __init__(self, paths: list[Path]) -> None:
        self._trees = {path: ast.parse(path.read_text()) for path in paths}
        self._by_stem = {path.stem: path for path in paths}

    def limits(self) -> list[Limit]:
        """Return each limit once, however often it is used."""
        found: dict[tuple[Path, int, int], Limit] = {}
        for limit in self._all():
            found.setdefault((limit.path, limit.node.lineno, limit.node.col_offset), limit)
        return list(found.values())

    def _all(self) -> Iterator[Limit]:
        for path, tree in self._trees.items():
            for value in times(tree):
                yield from self._bare(path, value, value.lineno)
            for name, value in constants(tree):
                if LIMITS.fullmatch(name):
                    yield from self._bare(path, value, value.lineno)

    def _bare(self, path: Path, value: ast.expr, used_at: int) -> Iterator[Limit]:
        number = number_of(value)
        if number is not None:
            if number >= LEAST_S:
                yield Limit(path, value, used_at)
            return
        match value:
            case ast.BinOp(left=left, right=right):
                # A number that is added to a limit, or multiplies it, is not a limit itself.
                parts = [each for each in (left, right) if number_of(each) is None]
            case ast.IfExp(body=left, orelse=right):
                parts = [left, right]
            case ast.Call(func=ast.Name(id="min" | "max"), args=args):
                parts = args
            case ast.Name() | ast.Attribute():
                made = self._made_at(path, value)
                if made is not None:
                    yield from self._bare(*made, used_at)
                return
            case _:
                return
        yield from (limit for part in parts for limit in self._bare(path, part, used_at))

    def _made_at(self, path: Path, value: ast.expr) -> tuple[Path, ast.expr] | None:
        """Return where a constant gets its value: here, or in the module that defines it."""
        name = name_of(value)
        if not name.isupper():
            return None
        if isinstance(value, ast.Attribute):
            other = self._by_stem.get(name_of(value.value))
            return self._constant(other, name) if other else None
        return self._constant(path, name)

    def _constant(self, path: Path, name: str) -> tuple[Path, ast.expr] | None:
        for found, value in constants(self._trees[path]):
            if found == name:
                return path, value
        for node in self._trees[path].body:
            match node:
                case ast.ImportFrom(module=str(module), names=names):
                    if any(each.name == name for each in names) and module[:7] != "cometmq":
                        other = self._by_stem.get(module.rpartition(".")[2])
                        return self._constant(other, name) if other else None
        return None


def of_the_suite() -> list[Limit]:
    paths = [path for folder in ("tests", "bench") for path in (ROOT / folder).rglob("*.py")]
    harness = [ROOT / "bench" / each for each in HARNESS]
    return Modules(
        [path for path in sorted(paths) if not any(map(path.is_relative_to, harness))]
    ).limits()


def make_patient(path: Path, nodes: list[ast.expr]) -> None:
    """Write `patient(...)` around these numbers of a file; `ruff check --fix` sorts the import."""
    lines = path.read_bytes().splitlines(keepends=True)
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        assert node.lineno == node.end_lineno
        assert node.end_col_offset is not None
        line, begin, end = lines[node.lineno - 1], node.col_offset, node.end_col_offset
        lines[node.lineno - 1] = line[:begin] + b"patient(" + line[begin:end] + b")" + line[end:]
    text = b"".join(lines).decode()
    if "from patience import" not in text:
        future = "from __future__ import annotations\n"
        text = text.replace(future, f"{future}\nfrom patience import patient\n", 1)
    path.write_text(text)


def main(arguments: list[str]) -> int:
    found = of_the_suite()
    by_path: dict[Path, list[ast.expr]] = defaultdict(list)
    for limit in found:
        print(limit)
        by_path[limit.path].append(limit.node)
    if arguments == ["--write"]:
        for path, nodes in by_path.items():
            make_patient(path, nodes)
        return 0
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
