"""The kernel's filter: outcomes, against a reference, and programs that nobody compiled."""

from __future__ import annotations

import operator
import random
from typing import Any, Final

import pytest
from filter_cases import PROPERTIES, cases, encoded
from hypothesis import given
from hypothesis import strategies as st

from cometmq.protocol.filters import compile_filter
from cometmq.protocol.filters.program import WORD, Op
from cometmq.shm.kernel.codec import Filter

Tree = tuple[Any, ...]
SHOWN: Final = {"true": True, "false": False, "null": None, "failed": "failed"}
ORDERED: Final = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


class Failed(Exception):
    """A comparison of what cannot be compared."""


def outcome(text: str, properties: dict[str, str]) -> bool | str | None:
    return outcome_of(text, encoded(properties))


def outcome_of(text: str, properties: bytes) -> bool | str | None:
    return Filter(*compile_filter(text)).outcome(properties)


@pytest.mark.parametrize(("text", "said"), [case for case in cases() if case[1] != "refused"])
def test_outcomes_are_those_of_rocketmq(text: str, said: str) -> None:
    assert outcome(text, PROPERTIES) is SHOWN[said] or outcome(text, PROPERTIES) == SHOWN[said]
    assert Filter(*compile_filter(text)).matches(encoded(PROPERTIES)) is (said == "true")


@pytest.mark.parametrize(
    ("text", "properties", "said"),
    [
        ("a = 'y'", b"a\1x\2a\1y\2", True),  # the last of a name
        ("a IS NULL", b"a\1\2", True),  # empty: dropped
        ("a = 'x'", b"a\1x", True),  # without its end
        ("a = 'x'", b"\2\2\1\2a\1x\2", True),
        ("a = 'x\1y'", b"a\1x\1y\2", True),
        ("a IS NULL", b"", True),
        ("a = 'x'", b"\xff\1x\2a\1\xff\2", False),
        ("a > 1", b"a\1\xff\2", "failed"),
        ("a < 1.5", b"a\1" + b"1" * 600 + b"\2", "failed"),  # no number is that long
        ("a = 9223372036854775807", b"a\0019223372036854775807\2", True),
        ("a < -9223372036854775807", b"a\1-9223372036854775808\2", True),
        ("a < 1", b"a\1-9223372036854775809\2", "failed"),
        ("a < 0", b"a\1-\2", "failed"),
        ("a = 1.5", b"a\1 1.5f\t\2", True),
        ("a = 1.5", b"a\1inf\2", "failed"),
        ("a = 1.5", b"a\0010x10\2", "failed"),
        ("a CONTAINS '\xe4'", "a\1b\xe4c\2".encode(), True),
    ],
)
def test_properties_as_they_lie(text: str, properties: bytes, said: bool | str) -> None:
    assert outcome_of(text, properties) == said


@pytest.mark.slow
def test_properties_of_every_length_and_of_bytes_beside_the_separators() -> None:
    chance = random.Random(seed := 29)
    names = [("name_of_a_property" * 2)[:count] for count in (1, 2, 7, 8, 9, 15, 16, 17, 33)]
    held = 0
    for number in range(20_000):
        text = "".join(chance.choices("ab\0\1\2\3\x82\x7f", k=chance.randrange(40)))
        parts = [chance.choice([text, *(f"{name}\1{text}" for name in names)]) for _ in range(4)]
        properties = "\2".join(parts).encode()
        name = chance.choice(names)
        found = None
        for part in properties.split(b"\2"):
            has, separator, value = part.partition(b"\1")
            if separator and has == name.encode() and value:
                found = value.decode()
        asked = text if chance.random() < 0.5 or found is None else found
        wanted = None if found is None else found == asked
        assert outcome_of(f"{name} = '{asked}'", properties) is wanted, (seed, number)
        held += wanted is True
    assert held > 1_000


# --- against a reference ---


def value_of(tree: Tree, properties: dict[str, str]) -> Any:
    """What an expression is, by plain Python: the rules as docs/filters.md tells them."""
    kind, *parts = tree
    if kind == "property":
        return properties.get(parts[0])
    if kind == "constant":
        return parts[0]
    if kind in ("and", "or"):
        decided = kind == "or"
        left = truth(value_of(parts[0], properties))
        if left is decided:
            return decided
        right = truth(value_of(parts[1], properties))
        if right is decided:
            return decided
        return None if None in (left, right) else not decided
    left = value_of(parts[0], properties)
    if kind == "not":
        left = truth(left)
        return None if left is None else not left
    if kind == "null":
        return left is None
    if kind == "in":
        return None if left is None else left in parts[1]
    right = value_of(parts[1], properties)
    if None in (left, right):
        if kind != "=":
            return None
        return True if left is right else None if left is None else False
    if kind == "=" and isinstance(left, str) and isinstance(right, str):
        return left == right
    left, right = as_other(left, right), as_other(right, left)
    return left == right if kind == "=" else ORDERED[kind](left, right)


def truth(value: Any) -> bool | None:
    return value if value is None or isinstance(value, bool) else False


def as_other(value: Any, other: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return int(value) if type(other) is int else float(value)
    except ValueError:
        raise Failed from None


def shown(tree: Tree) -> str:
    kind, *parts = tree
    if kind == "property":
        return str(parts[0])
    if kind == "constant":
        return (
            "'" + parts[0].replace("'", "''") + "'" if isinstance(parts[0], str) else repr(parts[0])
        )
    if kind == "not":
        return f"NOT ({shown(parts[0])})"
    if kind == "null":
        return f"({shown(parts[0])}) IS NULL"
    if kind == "in":
        return f"{shown(parts[0])} IN ({', '.join(shown(('constant', each)) for each in parts[1])})"
    return f"({shown(parts[0])}) {kind} ({shown(parts[1])})"


TEXTS = st.sampled_from(["x", "it's", "7", "-3", "2.5", "\xe4"])
NUMBERS = st.integers(0, 9) | st.sampled_from([0.5, 2.5, 7.0])
PROPERTY = st.tuples(st.just("property"), st.sampled_from("abcd"))
OPERAND = PROPERTY | st.tuples(st.just("constant"), NUMBERS)
LEAF = (
    st.tuples(st.sampled_from(sorted(ORDERED)), OPERAND, OPERAND)
    | st.tuples(st.just("="), PROPERTY, OPERAND | st.tuples(st.just("constant"), TEXTS))
    | st.tuples(st.just("null"), PROPERTY)
    | st.tuples(st.just("in"), PROPERTY, st.lists(TEXTS, min_size=1, max_size=6))
)
TREES = st.recursive(
    LEAF | PROPERTY,
    lambda inner: (
        st.tuples(st.sampled_from(["and", "or"]), inner, inner) | st.tuples(st.just("not"), inner)
    ),
    max_leaves=20,
)


@given(TREES, st.dictionaries(st.sampled_from("abcd"), TEXTS))
def test_any_expression_is_what_the_reference_says(tree: Tree, properties: dict[str, str]) -> None:
    try:
        wanted = value_of(tree, properties)
        wanted = truth(wanted)
    except Failed:
        wanted = "failed"
    assert outcome(shown(tree), properties) == wanted, shown(tree)


# --- programs that nobody compiled ---


@pytest.mark.parametrize(
    "words",
    [
        [],
        [(99, 0, 0, 0)],
        [(Op.PROPERTY, 0, 0, 1)],
        [(Op.TEXT, 0, 0, 9)],
        [(Op.NOT, 0, 0, 0)],
        [(Op.TRUE, 0, 0, 0), (Op.TRUE, 0, 0, 0)],
        [(Op.TRUE, 0, 0, 0), (Op.AND, 0, 0, 0)],
        [(Op.TRUE, 0, 0, 0), (Op.SKIP_TRUE, 0, 0, 1)],
        [(Op.TRUE, 0, 0, 0), (Op.SKIP_TRUE, 0, 0, 0xFFFFFFFF)],
        [(Op.TRUE, 0, 0, 0), (Op.SKIP_TRUE, 0, 0, 1), (Op.TRUE, 0, 0, 0), (Op.AND, 0, 0, 0)],
        [(Op.TRUE, 0, 0, 0)] * 65 + [(Op.AND, 0, 0, 0)] * 64,
        [(Op.PROPERTY, 0, 0, 0), (Op.IN, 0, 4, 0)],
    ],
)
def test_a_program_that_could_do_anything_else_is_refused(words: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"word|program"):
        Filter(b"".join(WORD.pack(*word) for word in words), (b"a",), (b"x",), (1,), (1.5,))


def test_random_programs_are_refused_or_end() -> None:
    rng = random.Random(seed := 13)
    taken = 0
    for number in range(30_000):
        words = [
            WORD.pack(
                rng.randrange(24), rng.randrange(2), rng.randrange(3), rng.choice((0, 0, 0, 1, 2))
            )
            for _ in range(rng.randrange(1, 9))
        ]
        try:
            made = Filter(b"".join(words), (b"a", b"b"), (b"x", b"y", b"7"), (1, 7), (1.5, 2.0))
        except ValueError:
            continue
        taken += 1
        assert made.outcome(b"a\0017\2b\1x\2") in (True, False, None, "failed"), (seed, number)
    assert taken > 1_000
