"""Rows of Arrow columns as batch bodies: the same as one by one, and buffers that lie."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from family import encode_batch

from cometmq.protocol.names import RESERVED_PROPERTIES, UNKEPT_PROPERTIES
from cometmq.shm.kernel.columns import ArrowText, RowEncoder, RowIllegal


def text(values: Sequence[bytes]) -> ArrowText:
    offsets = array("i", [0])
    for value in values:
        offsets.append(offsets[-1] + len(value))
    return ArrowText(None, offsets, b"".join(values), 0, len(values))


def without_ids(body: bytes) -> bytes:
    """UNIQ_KEY differs from message to message."""
    found, at = b"", 0
    while (next_at := body.find(b"UNIQ_KEY\x01", at)) >= 0:
        found += body[at:next_at]
        at = next_at + 9 + 32
    return found + body[at:]


def test_bodies_are_the_producers() -> None:
    bodies = [b"%d" % number * (number % 50 + 1) for number in range(300)]
    encoder = RowEncoder(batch_bytes=5_000)
    full = encoder.encode(
        300, None, [(0, 1, array("i", [0]))], None, None, text(bodies), text([b"k"] * 300),
        text([b"t"] * 300),
    )  # fmt: skip
    made = full + encoder.drain()
    assert encoder.size == 0
    assert len(made) > 5
    assert all(slot == 1 and len(body) <= 5_000 for slot, body, _ in made)
    at = 0
    for _, body, count in made:
        wanted = encode_batch(bodies[at : at + count], tags="t", keys="k")
        assert without_ids(body) == without_ids(wanted)
        at += count
    assert at == 300


@pytest.mark.parametrize("name", sorted(UNKEPT_PROPERTIES.keys() | RESERVED_PROPERTIES))
def test_properties_that_a_producer_refuses_are_refused_in_rows(name: str) -> None:
    route = [(0, 1, array("i", [0]))]
    one = places = text([b"x"])  # of the latter the offsets count: one property
    for refused in (name, f"{name}x", f"x{name}", name[:-1]):
        names, values = text([refused.encode()]), text([b"1"])
        arguments = (1, None, route, None, None, one, None, None, (places, names, values))
        if refused == name:
            with pytest.raises(RowIllegal, match=name):
                RowEncoder().encode(*arguments)
        else:
            RowEncoder().encode(*arguments)


@pytest.mark.parametrize("tag", [b"a||b", b"a || b", b"||", b"a||"])
def test_an_expression_is_no_tag(tag: bytes) -> None:
    route = [(0, 1, array("i", [0]))]
    with pytest.raises(RowIllegal, match="one tag"):
        RowEncoder().encode(1, None, route, None, None, text([b"x"]), None, text([tag]))
    for fine in (b"a|b", b"|", b"", b"a"):
        RowEncoder().encode(1, None, route, None, None, text([b"x"]), None, text([fine]))


@pytest.mark.parametrize(
    "arguments",
    [
        (None, array("i", [0, 5]), b"1234", 0, 1),  # behind the data
        (None, array("i", [3, 1]), b"1234", 0, 1),  # backwards
        (None, array("i", [-1, 1]), b"1234", 0, 1),
        (None, array("i", [0, 1]), b"1234", 0, 2),  # too few
        (None, array("i", [0, 1]), b"1234", 1 << 60, 1),
        (None, array("i", [0, 1]), b"1234", -1, 1),
        (None, array("i", [0, 1]), b"1234", 0, -1),
        (b"", array("i", [0, 1]), b"1234", 0, 1),  # no validity
        (None, array("i", [0, 1]), None, 0, 1),
    ],
)
def test_columns_that_lie(arguments: Any) -> None:
    with pytest.raises(ValueError, match=r"offsets|validity"):
        ArrowText(*arguments)


def test_columns_that_are_too_short() -> None:
    route = [(0, 1, array("i", [0]))]
    one, two = text([b"a"]), text([b"a", b"b"])
    encoder = RowEncoder()
    for arguments in (
        (2, None, route, None, None, one, None, None),
        (2, None, route, None, None, two, one, None),
        (2, array("i", [0]), route, None, None, two, None, None),
        (1, array("i", [7]), route, None, None, one, None, None),
        (1, array("i", [-1]), route, None, None, one, None, None),
        (1, None, [], None, None, one, None, None),
        (1, None, [(0, 0, array("i", [0]))], None, one, one, None, None),
        (2, None, route, array("i", [0]), None, two, None, None),
        (2, None, route, None, None, two, None, None, (one, two, two)),
        (2, None, route, None, None, two, None, None, None, array("i", [0])),
        (1, None, route, None, None, one, None, None, (two, text([]), text([]))),
    ):
        with pytest.raises(ValueError, match=r"wanted|topics|queue|rows|properties|flags"):
            encoder.encode(*arguments)  # type: ignore[arg-type]
    with pytest.raises(RowIllegal):
        encoder.encode(1, None, route, array("i", [2**31 - 1]), None, one, None, None)
