"""Entries of the ledger: what is written is read, what is not known is passed over."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.protocol.ledger import (
    CHANGE_BYTES_MIN,
    ENTRY_BYTES_MAX,
    ENTRY_HEAD_MAX,
    FORMAT,
    LEDGER_TOPIC,
    Change,
    Fold,
    LedgerDamaged,
    OffsetSet,
    OffsetsForgotten,
    Place,
    decode_entry,
    entry_bytes_max,
    entry_of,
    pack_change,
)
from cometmq.protocol.names import LONG_TOPIC_MAX, check_topic

NUMBERS = st.integers(0, (1 << 63) - 1)
CHANGES = st.one_of(
    st.builds(OffsetSet, st.text(), st.text(), st.integers(0, (1 << 31) - 1), NUMBERS),
    st.builds(OffsetsForgotten, st.text()),
)


def body_of(place: Place, *changes: Change) -> bytes:
    return entry_of(place, [pack_change(change) for change in changes])


@given(NUMBERS, NUMBERS, st.lists(CHANGES, max_size=40))
def test_what_is_written_is_read(epoch: int, number: int, changes: list[Change]) -> None:
    body = body_of(Place(epoch, number), *changes)
    assert decode_entry(body) == (Place(epoch, number), changes, 0)
    assert len(body) <= ENTRY_HEAD_MAX + sum(len(pack_change(change)) for change in changes)


def test_the_bytes_of_an_entry() -> None:
    """They stand in logs: they never change."""
    body = body_of(Place(5, 1), OffsetSet("g", "t", 1, 2), OffsetsForgotten("x"))
    assert body.hex() == "9301920501dd000000029501a167a17401029202a178"


def test_a_later_version_is_understood_as_far_as_it_goes() -> None:
    later = [(1, "g", "t", 0, 5, "one field more"), (99, "of another kind", {}), (2, "t")]
    body = msgspec.msgpack.encode((FORMAT, (5, 2, "more"), later, "more"))
    place, changes, unknown = decode_entry(body)
    assert (place, unknown) == (Place(5, 2), 1)
    assert changes == [OffsetSet("g", "t", 0, 5), OffsetsForgotten("t")]


@given(st.binary(max_size=60))
def test_rubbish_is_damage(body: bytes) -> None:
    with suppress(LedgerDamaged):
        decode_entry(body)


def test_damage_names_the_ledger() -> None:
    with pytest.raises(LedgerDamaged, match=LEDGER_TOPIC):
        decode_entry(b"{}")


def test_each_entry_counts_once_and_none_of_an_earlier_life() -> None:
    fold = Fold(Place(5, 1))
    taken = [
        fold.admit(place)
        for place in (Place(5, 1), Place(5, 2), Place(5, 2), Place(6, 1), Place(5, 3), Place(6, 2))
    ]
    assert taken == [False, True, False, True, False, True]
    assert fold.last == Place(6, 2)


@pytest.mark.parametrize(
    ("segment", "message", "most"),
    [
        (1 << 30, 4 << 20, ENTRY_BYTES_MAX),
        (65_536, 4 << 20, 32_768 - ENTRY_HEAD_MAX),
        (1 << 20, 4_096, 4_096 - ENTRY_HEAD_MAX),
        (1_000, 100, CHANGE_BYTES_MIN),
    ],
)
def test_an_entry_fits_into_the_log(segment: int, message: int, most: int) -> None:
    assert entry_bytes_max(segment, message) == most


def test_any_change_fits_into_an_entry() -> None:
    longest = OffsetSet("g" * 120, "%DLQ%" + "t" * (LONG_TOPIC_MAX - 5), 1 << 30, (1 << 63) - 1)
    check_topic(longest.topic)
    assert len(pack_change(longest)) <= CHANGE_BYTES_MIN
