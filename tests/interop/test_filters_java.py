"""SQL92 filters against RocketMQ's own evaluator: the table, and expressions made at random."""

from __future__ import annotations

import base64
import random
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from filter_cases import PROPERTIES, STRICTER, cases, encoded
from interop import rocketmq
from patience import patient

from cometmq.bench.peers.maven import Bundle
from cometmq.protocol.errors import FilterIllegal
from cometmq.protocol.filters import compile_filter
from cometmq.shm.kernel.codec import Filter

pytestmark = [
    pytest.mark.slow,
    pytest.mark.jvm,
    pytest.mark.timeout(rocketmq.FETCH_TIMEOUT_S + 120),
]
FILTER = Bundle(
    f"rocketmq-filter-{rocketmq.VERSION}",
    (f"org.apache.rocketmq:rocketmq-filter:{rocketmq.VERSION}",),
)
EVALUATOR = Path(__file__).with_name("FilterEvaluator.java")
SHOWN = {True: "true", False: "false", None: "null", "failed": "failed"}
ATOMS = (
    "a", "b", "t", "f", "m", "neg", "a > 5", "f < 2.5", "m = 7", "a = c", "b <> 'x'", "m IS NULL",
    "a IN ('7', 'x')", "m NOT IN ('y')", "s CONTAINS 't'", "b NOT STARTSWITH 'x'", "b ENDSWITH 'x'",
    "a BETWEEN 1 AND c", "f NOT BETWEEN 1.0 AND 1.25", "TRUE", "NULL", "b > 1", "t = TRUE",
    "big > 1.5",
)  # fmt: skip


def asked(expressions: Iterable[str]) -> list[str]:
    """What RocketMQ says of each, of a message with PROPERTIES."""
    rocketmq.require()
    pairs = [_packed(piece) for pair in PROPERTIES.items() for piece in pair]
    lines = "".join(" ".join([_packed(text), *pairs]) + "\n" for text in expressions)
    command = FILTER.java("FilterEvaluator", FILTER.classes([EVALUATOR]))
    done = subprocess.run(
        command, input=lines, capture_output=True, text=True, check=True, timeout=patient(100)
    )
    return done.stdout.splitlines()


def _packed(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def ours(text: str) -> str:
    try:
        program = compile_filter(text)
    except FilterIllegal:
        return "refused"
    return SHOWN[Filter(*program).outcome(encoded(PROPERTIES))]


def made(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(ATOMS)
    left, right = made(rng, depth - 1), made(rng, depth - 1)
    return rng.choice((
        f"{left} AND {right}", f"{left} OR {right}", f"NOT ({left})", f"({left}) = ({right})",
        f"({left} OR {right})", f"({left}) IS NULL", f"({left}) <> ({right})", f"NOT {left}",
    ))  # fmt: skip


def test_the_table_is_what_rocketmq_says() -> None:
    table = cases()
    said = asked(text for text, _ in table)
    assert list(zip((text for text, _ in table), said, strict=True)) == table
    assert "refused" not in asked(STRICTER)[1:], "not stricter any more"


def test_expressions_made_at_random() -> None:
    rng = random.Random(seed := 5)
    expressions = [made(rng, rng.randrange(1, 5)) for _ in range(3_000)]
    said = asked(expressions)
    for text, theirs in zip(expressions, said, strict=True):
        assert ours(text) == theirs, (seed, text)
    assert {"true", "false", "null", "failed"} <= set(said)
