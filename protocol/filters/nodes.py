"""Nodes of an SQL92 expression: each is checked, and has its code already.

The restrictions are RocketMQ's. A chain of operators grows one list, so that ten thousand of
them nest no call; parentheses are bounded by the depth of the stack that they need.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum, auto
from typing import Final, NoReturn

from lark import Token, Transformer, v_args

from cometmq.protocol.errors import FilterIllegal
from cometmq.protocol.filters.limits import DEPTH_MAX, NAMES_MAX, OPERATORS_MAX
from cometmq.protocol.filters.program import WORD, Op, Program

_INT64_MAX: Final = 2**63 - 1
_ORDERED: Final = {
    "GREATER": Op.GREATER,
    "GREATER_EQUAL": Op.GREATER_EQUAL,
    "LESS": Op.LESS,
    "LESS_EQUAL": Op.LESS_EQUAL,
}
_HOLDS: Final = {"CONTAINS": Op.CONTAINS, "STARTSWITH": Op.STARTS, "ENDSWITH": Op.ENDS}

Word = tuple[Op, tuple[object, ...], bool, int]  # operation, values, negated, words to skip


class Kind(Enum):
    NUMBER = auto()  # these constants
    TEXT = auto()
    TRUTH = auto()
    NULL = auto()
    PROPERTY = auto()
    SIGNED = auto()
    LOGIC = auto()  # a comparison, or several


_CONSTANTS: Final = (Kind.NUMBER, Kind.TEXT, Kind.TRUTH, Kind.NULL)


class Node:
    """A part of the expression.

    Args:
        depth: of the stack while it is evaluated.
        place: of its first word.
    """

    __slots__ = ("code", "depth", "kind", "operators", "place", "value")

    def __init__(
        self,
        kind: Kind,
        code: list[Word],
        place: tuple[int, int],
        depth: int = 1,
        operators: int = 0,
        value: object = None,
    ) -> None:
        self.kind = kind
        self.code = code
        self.place = place
        self.depth = depth
        self.operators = operators
        self.value = value
        if operators > OPERATORS_MAX:
            _refuse(place, f"more than {OPERATORS_MAX} operators")
        if depth > DEPTH_MAX:
            _refuse(place, f"nested deeper than {DEPTH_MAX}")

    def copy(self) -> Node:
        return Node(self.kind, list(self.code), self.place, self.depth, self.operators, self.value)


def _refuse(place: tuple[int, int], what: str) -> NoReturn:
    raise FilterIllegal(f"SQL92, line {place[0]}, column {place[1]}: {what}")


def _place(token: Token) -> tuple[int, int]:
    return token.line or 1, token.column or 1


def _word(op: Op, *values: object, negated: bool = False, skip: int = 0) -> Word:
    return op, values, negated, skip


def _constant(kind: Kind, op: Op, token: Token, *values: object) -> Node:
    return Node(kind, [_word(op, *values)], _place(token), value=values[0] if values else None)


def _text_of(token: Token) -> bytes:
    return token[1:-1].replace("''", "'").encode()


# --- operators ---


def _unary(node: Node, kind: Kind, *words: Word) -> Node:
    node.code.extend(words)
    return Node(kind, node.code, node.place, node.depth, node.operators + 1)


def _binary(left: Node, right: Node, *words: Word) -> Node:
    left.code.extend(right.code)
    left.code.extend(words)
    depth = max(left.depth, right.depth + 1)
    operators = left.operators + right.operators + 1
    return Node(Kind.LOGIC, left.code, left.place, depth, operators)


def _logic(left: Node, right: Node, op: Op, skip: Op) -> Node:
    left, right = _truth(left), _truth(right)
    left.code.append(_word(skip, skip=len(right.code) + 1))
    return _binary(left, right, _word(op))


def _truth(node: Node) -> Node:
    """As an operand of AND, OR and NOT, and as the whole."""
    if node.kind in (Kind.PROPERTY, Kind.SIGNED):
        if node.kind is Kind.SIGNED:
            _refuse(node.place, "a number with a sign is neither true nor false")
        node.code.append(_word(Op.BOOLEAN))
    elif node.kind in (Kind.NUMBER, Kind.TEXT):
        _refuse(node.place, "a constant where a comparison or a property is expected")
    return node


def _ordered(left: Node, right: Node, op: Op) -> Node:
    for node in (left, right):
        if node.kind is Kind.TEXT:
            _refuse(node.place, "a text cannot be compared by >, >=, <, <= or BETWEEN")
        if node.kind in (Kind.TRUTH, Kind.NULL, Kind.LOGIC):
            _refuse(node.place, "only numbers and properties can be compared by >, >=, <, <=")
    return _binary(left, right, _word(op))


def _same(left: Node, right: Node, *more: Word) -> Node:
    for node in (left, right):
        if node.kind is Kind.NULL:
            _refuse(node.place, "nothing equals NULL: use IS NULL or IS NOT NULL")
    if left.kind is Kind.TRUTH and right.kind in (Kind.NUMBER, Kind.TEXT):
        _refuse(left.place, "TRUE and FALSE equal no number and no text")
    return _binary(left, right, _word(Op.EQUAL), *more)


def _within(node: Node, texts: Iterable[Token], *, negated: bool) -> Node:
    if node.kind is not Kind.PROPERTY:
        _refuse(node.place, "the left side of IN is a property")
    values = [_text_of(text) for text in texts]
    return _unary(node, Kind.LOGIC, _word(Op.IN, *values, negated=negated))


def _between(node: Node, low: Node, high: Node, *, negated: bool) -> Node:
    if low.kind is Kind.NULL or high.kind is Kind.NULL:
        _refuse(low.place, "NULL is no bound of BETWEEN")
    again = node.copy()
    if negated:
        below, above = _ordered(node, low, Op.LESS), _ordered(again, high, Op.GREATER)
        return _logic(below, above, Op.OR, Op.SKIP_TRUE)
    bounds = low.value, high.value
    if all(isinstance(bound, int | float) for bound in bounds) and bounds[0] > bounds[1]:  # type: ignore[operator]
        _refuse(low.place, "the lower bound of BETWEEN is above the higher one")
    above, below = _ordered(node, low, Op.GREATER_EQUAL), _ordered(again, high, Op.LESS_EQUAL)
    return _logic(above, below, Op.AND, Op.SKIP_FALSE)


@v_args(inline=True)
class Nodes(Transformer[Token, Node]):
    """What the parser calls for each rule of the grammar, operands first. Without state."""

    def finished(self, node: Node) -> Program:
        return _assembled(_truth(node))

    def either(self, left: Node, right: Node) -> Node:
        return _logic(left, right, Op.OR, Op.SKIP_TRUE)

    def both(self, left: Node, right: Node) -> Node:
        return _logic(left, right, Op.AND, Op.SKIP_FALSE)

    def equal(self, left: Node, _sign: Token, right: Node) -> Node:
        return _same(left, right)

    def unequal(self, left: Node, _sign: Token, right: Node) -> Node:
        return _same(left, right, _word(Op.NOT))

    def is_null(self, node: Node, _null: Token) -> Node:
        return _binary(node, Node(Kind.NULL, [_word(Op.NULL)], node.place), _word(Op.EQUAL))

    def is_not_null(self, node: Node, _not: Token, null: Token) -> Node:
        return _unary(self.is_null(node, null), Kind.LOGIC, _word(Op.NOT))

    def ordered(self, left: Node, sign: Token, right: Node) -> Node:
        return _ordered(left, right, _ORDERED[sign.type])

    def between(self, node: Node, _between_: Token, low: Node, high: Node) -> Node:
        return _between(node, low, high, negated=False)

    def not_between(self, node: Node, _not: Token, _between_: Token, low: Node, high: Node) -> Node:
        return _between(node, low, high, negated=True)

    def one_of(self, node: Node, _in: Token, *texts: Token) -> Node:
        return _within(node, texts, negated=False)

    def none_of(self, node: Node, _not: Token, _in: Token, *texts: Token) -> Node:
        return _within(node, texts, negated=True)

    def holds(self, node: Node, how: Token, text: Token) -> Node:
        return _unary(node, Kind.LOGIC, _word(_HOLDS[how.type], _text_of(text)))

    def holds_not(self, node: Node, _not: Token, how: Token, text: Token) -> Node:
        return _unary(node, Kind.LOGIC, _word(_HOLDS[how.type], _text_of(text), negated=True))

    def same(self, _sign: Token, node: Node) -> Node:
        return node

    def negative(self, sign: Token, node: Node) -> Node:
        return _unary(node, Kind.SIGNED, _word(Op.NEGATE))

    def negation(self, _not: Token, node: Node) -> Node:
        return _unary(_truth(node), Kind.LOGIC, _word(Op.NOT))

    def long(self, token: Token) -> Node:
        digits = token.rstrip("lL")
        value = int(digits) if len(digits) <= 19 else _INT64_MAX + 1
        if value > _INT64_MAX:
            _refuse(_place(token), f"an integer above {_INT64_MAX}")
        return _constant(Kind.NUMBER, Op.LONG, token, value)

    def double(self, token: Token) -> Node:
        value = float(token)
        if value == 0 or math.isinf(value):
            _refuse(_place(token), "a number with a point is neither 0.0 nor infinite: write 0")
        return _constant(Kind.NUMBER, Op.DOUBLE, token, value)

    def text(self, token: Token) -> Node:
        return _constant(Kind.TEXT, Op.TEXT, token, _text_of(token))

    def true(self, token: Token) -> Node:
        return _constant(Kind.TRUTH, Op.TRUE, token)

    def false(self, token: Token) -> Node:
        return _constant(Kind.TRUTH, Op.FALSE, token)

    def null(self, token: Token) -> Node:
        return _constant(Kind.NULL, Op.NULL, token)

    def property(self, token: Token) -> Node:
        return _constant(Kind.PROPERTY, Op.PROPERTY, token, token.encode())


# --- assembly ---


def _assembled(node: Node) -> Program:
    """Names and constants go into tables, and the code refers to them."""
    names: dict[bytes, int] = {}
    tables: dict[Op, list[object]] = {Op.LONG: [], Op.DOUBLE: [], Op.TEXT: []}
    code: list[bytes] = []
    for op, values, negated, skip in node.code:
        argument = skip
        if op is Op.PROPERTY:
            argument = names.setdefault(values[0], len(names))  # type: ignore[arg-type]
        elif values:
            table = tables.get(op, tables[Op.TEXT])
            argument = len(table)
            table.extend(values)
        code.append(WORD.pack(op, negated, len(values), argument))
    if len(names) > NAMES_MAX:
        _refuse(node.place, f"{len(names)} different properties, at most {NAMES_MAX}")
    longs, doubles, texts = (tuple(table) for table in tables.values())
    return Program(b"".join(code), tuple(names), texts, longs, doubles)  # type: ignore[arg-type]
