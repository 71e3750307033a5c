"""SQL92 expressions: what is refused, where, and how soon."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filter_cases import STRICTER, cases
from hypothesis import given
from hypothesis import strategies as st
from patience import patient

from cometmq.protocol.errors import FilterIllegal, SubscriptionIllegal, from_code
from cometmq.protocol.filters import TEXT_MAX, compile_filter
from cometmq.protocol.filters.limits import DEPTH_MAX, NAMES_MAX, OPERATORS_MAX
from cometmq.protocol.filters.program import WORD, Op
from cometmq.protocol.tags import joined, split

PIECES = [
    "a",
    "b",
    "'x'",
    "5",
    ".5",
    "(",
    ")",
    ",",
    "and",
    "or",
    "not",
    "is",
    "null",
    "in",
    "<>",
    "=",
]
PIECES += ["between", "contains", ">", "<=", "-", "+", "true", "--", "/*", "*/"]
KERNEL = Path(__file__).parents[2] / "shm" / "kernel"


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("a > ", "line 1, column 3", "the end where one of these is expected: (, +, -, FALSE"),
        ("a > 5 AND\n  b = = 3", "line 2, column 7", "'=' where one of these is expected"),
        ("a LIKE 'x'", "line 1, column 3", "'LIKE' where one of these is expected: <, <="),
        ("a != 3", "line 1, column 3", "'!' begins no word"),
        ("a = 'it", "line 1, column 5", "without its closing '"),
        ("a > 'x'", "line 1, column 5", "a text cannot be compared"),
        ("a = 1 OR b = NULL", "line 1, column 14", "IS NULL"),
        ("a BETWEEN 9 AND 1", "line 1, column 11", "above the higher"),
        ("a > 9223372036854775808", "line 1, column 5", "above 9223372036854775807"),
        ("a > 0.0", "line 1, column 5", "write 0"),
        ("'a' IN ('a')", "line 1, column 1", "a property"),
        ("a IN (3)", "line 1, column 7", "'3' where one of these is expected: a 'text'"),
        ("a = 1 AND 5", "line 1, column 11", "a constant where"),
    ],
)
def test_a_wrong_expression_is_refused_with_its_place(text: str, place: str, what: str) -> None:
    with pytest.raises(FilterIllegal) as raised:
        compile_filter(text)
    assert place in str(raised.value)
    assert what in str(raised.value)
    assert isinstance(raised.value, SubscriptionIllegal)
    assert isinstance(from_code(FilterIllegal.code, "x"), FilterIllegal)


@pytest.mark.parametrize("text", [text for text, outcome in cases() if outcome == "refused"])
def test_what_rocketmq_refuses_is_refused(text: str) -> None:
    with pytest.raises(FilterIllegal):
        compile_filter(text)


@pytest.mark.parametrize("text", STRICTER)
def test_what_rocketmq_reads_in_part_is_refused(text: str) -> None:
    with pytest.raises(FilterIllegal):
        compile_filter(text)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a = 1 OR " * 100_000 + "a = 1", f"at most {TEXT_MAX}"),
        ("x" * 1_048_576, f"at most {TEXT_MAX}"),
        (" OR ".join(["a=1"] * 10_000), f"at most {TEXT_MAX}"),
        ("not " * 1_100 + "a", f"more than {OPERATORS_MAX} operators"),
        ("-" + " -" * 1_100 + "1 = a", f"more than {OPERATORS_MAX} operators"),
        ("a=1 or(" * (DEPTH_MAX + 1) + "a" + ")" * (DEPTH_MAX + 1), f"deeper than {DEPTH_MAX}"),
        ("(" * 4_000, "the end where"),
        (" OR ".join(f"p{n}" for n in range(NAMES_MAX + 1)), f"at most {NAMES_MAX}"),
        ("a = '\ud800'", "lone surrogate"),
    ],
)
def test_what_is_too_large_is_refused(text: str, what: str) -> None:
    before = time.process_time()
    with pytest.raises(FilterIllegal, match=re.escape(what)):
        compile_filter(text)
    assert time.process_time() - before < 5, "seconds of a processor for what is refused"


def test_what_just_fits_is_taken() -> None:
    compile_filter("(" * 3_000 + "a" + ")" * 3_000)
    chain = compile_filter(" OR ".join(["a=1"] * (OPERATORS_MAX // 2)))
    assert chain.names == (b"a",)
    compile_filter(" OR ".join(f"p{n}" for n in range(NAMES_MAX)))


@given(st.lists(st.sampled_from(PIECES), max_size=40).map(" ".join) | st.text(max_size=200))
def test_any_text_is_compiled_or_refused(text: str) -> None:
    try:
        program = compile_filter(text)
    except FilterIllegal:
        return
    assert len(program.code) % WORD.size == 0


def test_the_kernel_has_the_same_numbers() -> None:
    text = (KERNEL / "filter.pxi").read_text() + (KERNEL / "codec.pxd").read_text()
    assert {f"F_{op.name} = {op.value}" for op in Op} <= set(re.findall(r"F_\w+ = \d+", text))
    assert f"FILTER_DEPTH = {DEPTH_MAX}\n" in text
    assert f"FILTER_NAMES = {NAMES_MAX}\n" in text


def test_the_parser_is_loaded_with_the_first_filter() -> None:
    program = (
        "import sys, cometmq.client, cometmq.actors.reading.reader\n"
        "assert 'lark' not in sys.modules\n"
        "from cometmq.protocol.filters import compile_filter\n"
        "compile_filter('a')\n"
        "assert 'lark' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=patient(60))


def test_tags_and_sql_become_one_text_and_two_again() -> None:
    rng = random.Random(92)
    for _ in range(100):
        sql = "".join(rng.choices("ab \n'=", k=rng.randrange(10)))
        assert split(joined("a || b", sql)) == ("a || b", sql), "seed 92"


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_a_comment_ends_with_its_line(end: str) -> None:
    """Whichever sign ends the line, as RocketMQ has it."""
    whole = compile_filter("a = 7 AND b = 9")
    assert compile_filter(f"a = 7 -- and so on{end}AND b = 9") == whole
    assert compile_filter("a = 7 -- AND b = 9") != whole


@pytest.mark.parametrize("name", ["\u017fize", "\u212aelvin", "größe"])
def test_names_are_of_ascii_letters(name: str) -> None:
    with pytest.raises(FilterIllegal):
        compile_filter(f"{name} = 7")
