"""Java's hash codes and map order, against the specification's golden values (sections 2.5, 15)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.shm.state.java import java_hash_map_order, java_string_hash


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 0),
        ("TagA", 2598919),
        ("标签😀", 825518074),  # the last is two UTF-16 units
        ("polygenelubricants", -(1 << 31)),
        ("TopicA#U1", -1903241331),
        ("TopicA#k1", -1903240649),
        ("Aa", 2112),
        ("BB", 2112),
    ],
)
def test_string_hash(text: str, code: int) -> None:
    assert java_string_hash(text) == code


@given(st.text(st.characters()))
def test_string_hash_is_a_signed_32_bit_number(text: str) -> None:
    assert -(1 << 31) <= java_string_hash(text) < 1 << 31


def test_order_of_a_brokers_properties() -> None:
    names = ["KEYS", "TAGS", "UNIQ_KEY", "MSG_REGION", "TRACE_ON", "CLUSTER"]
    in_order = ["MSG_REGION", "UNIQ_KEY", "CLUSTER", "TAGS", "KEYS", "TRACE_ON"]
    assert java_hash_map_order(names, 128) == in_order


def test_keys_of_one_bucket_keep_the_order_they_came_in() -> None:
    assert java_hash_map_order(["Aa", "BB", "Aa"], 16) == ["Aa", "BB"]
    assert java_hash_map_order(["BB", "Aa", "BB"], 16) == ["BB", "Aa"]


def test_table_doubles_beyond_three_quarters() -> None:
    # One-character strings hash to their code: "A" is 65, "B" 66 ...
    assert java_hash_map_order("DCBA", 4) == ["A", "B", "C", "D"]  # 4 > 3: eight buckets
    assert java_hash_map_order("DCB", 4) == ["D", "B", "C"]  # 68 % 4 is 0
    assert java_hash_map_order(["H", "A"], 8) == ["H", "A"]
    assert java_hash_map_order([*"HABCDEF"], 8) == [*"ABCDEFH"]  # 7 > 6: sixteen buckets


@given(
    st.lists(st.text(st.characters(), max_size=4), max_size=40), st.sampled_from([1, 8, 16, 128])
)
def test_every_key_is_there_once(keys: list[str], table_size: int) -> None:
    assert sorted(java_hash_map_order(keys, table_size)) == sorted(set(keys))


@pytest.mark.parametrize("table_size", [-16, 0, 3, 100])
def test_table_size_is_a_power_of_two(table_size: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        java_hash_map_order(["a"], table_size)
