"""config/*.json: read as RocketMQ wrote them, written as it writes them, whole after every kill."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from shared_data import data_path

from cometmq.protocol.configs import (
    CustomizedRetryPolicy,
    ExponentialRetryPolicy,
    GroupRetryPolicy,
    RetryPolicyType,
    SimpleSubscriptionData,
    SubscriptionGroupConfig,
    TopicConfig,
    TopicFilterType,
)
from cometmq.shm.kernel.codec import integer_pairs
from cometmq.shm.os import durable as durable_files
from cometmq.shm.state import config_files, fastjson
from cometmq.shm.state.config_files import ConfigFile
from cometmq.shm.state.fastjson import ConfigFileDamaged, decode, loads
from cometmq.shm.state.json_text import dumps
from cometmq.shm.state.tables import (
    ConsumerOffsetTable,
    DataVersion,
    DelayOffsetTable,
    SubscriptionGroupTable,
    Table,
    TopicTable,
)

KINDS: dict[str, type[Table]] = {
    "topics.json": TopicTable,
    "subscriptionGroup.json": SubscriptionGroupTable,
    "consumerOffset.json": ConsumerOffsetTable,
    "delayOffset.json": DelayOffsetTable,
}
WITH_BAK = [name for name in KINDS if name != "delayOffset.json"]
REAL_FILES = [*KINDS, *(name + ".bak" for name in WITH_BAK)]


def real(name: str) -> bytes:
    return data_path("rocketmq-stores", "config", name).read_bytes()


def real_table(name: str) -> Table:
    return decode(real(name), KINDS[name.removesuffix(".bak")], name=name)


def truth() -> Any:
    return json.loads(data_path("rocketmq-stores", "config.truth.json").read_text())


def as_truth(value: object) -> Any:
    """Our value as ordinary JSON with RocketMQ's names, as the truth is written down."""
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.fields(value)
        return {each.encode_name: as_truth(getattr(value, each.name)) for each in fields}
    if isinstance(value, dict):
        return {str(key): as_truth(each) for key, each in value.items()}
    return json.loads(msgspec.json.encode(value))


# --- Files that RocketMQ wrote ---------------------------------------------------------------


def test_topics_are_what_rocketmq_says() -> None:
    for name in ("topics.json", "topics.json.bak"):
        table = decode(real(name), TopicTable)
        assert as_truth(table.topic_config_table) == truth()["topics"]
        assert as_truth(table.data_version) == truth()["topicsDataVersion"]
    batch = table.topic_config_table["batch_topic"]
    assert (batch.read_queue_nums, batch.write_queue_nums, batch.perm) == (15, 12, 4)
    assert batch.topic_filter_type is TopicFilterType.MULTI_TAG
    assert batch.attributes == {"queue.type": "BatchCQ"}


def test_groups_are_what_rocketmq_says() -> None:
    for name in ("subscriptionGroup.json", "subscriptionGroup.json.bak"):
        table = decode(real(name), SubscriptionGroupTable)
        groups = as_truth(table.subscription_group_table)
        for group in groups.values():  # the truth leaves these two out
            del group["groupRetryPolicy"], group["subscriptionDataSet"]
        assert groups == truth()["groups"]
        assert as_truth(table.data_version) == truth()["groupsDataVersion"]
        assert table.forbidden_table == truth()["forbidden"]
    policies = {
        name: group.group_retry_policy for name, group in table.subscription_group_table.items()
    }
    assert policies["cg_a"] == GroupRetryPolicy()
    assert policies["cg_b"].customized_retry_policy == CustomizedRetryPolicy(
        next=(1000, 5000, 30000)
    )
    assert policies["CID_41"] == GroupRetryPolicy(
        type=RetryPolicyType.EXPONENTIAL,
        exponential_retry_policy=ExponentialRetryPolicy(initial=2000, max=600000, multiplier=3),
    )


def test_consumer_offsets_are_what_rocketmq_says() -> None:
    table = decode(real("consumerOffset.json"), ConsumerOffsetTable)
    assert as_truth(table.offset_table) == truth()["consumerOffsets"]
    assert as_truth(table.data_version) == truth()["consumerOffsetsDataVersion"]
    previous = decode(real("consumerOffset.json.bak"), ConsumerOffsetTable)
    assert previous.offset_table.pop("loghub_Apache@cg_a")[0] == 601367700
    assert table.offset_table.pop("loghub_Apache@cg_a")[0] == 4242
    assert previous == table


def test_delay_offsets_are_what_rocketmq_says() -> None:
    table = decode(real("delayOffset.json"), DelayOffsetTable)
    assert as_truth(table.offset_table) == truth()["delayOffsets"]
    assert as_truth(table.data_version) == truth()["delayOffsetsDataVersion"]


@pytest.mark.parametrize("name", REAL_FILES)
def test_writer_gives_rocketmqs_bytes(name: str) -> None:
    assert dumps(real_table(name)).encode() == real(name)


@pytest.mark.parametrize("name", REAL_FILES)
def test_ordinary_json_loads_too(name: str) -> None:
    """RocketMQ takes what json.dumps writes, integer keys quoted; so do we."""
    ordinary = json.dumps(loads(real(name)))
    assert decode(ordinary, KINDS[name.removesuffix(".bak")]) == real_table(name)


def test_a_file_without_a_type_keeps_its_bytes() -> None:
    """consumerFilter.json has a Java array, which a tuple stands for."""

    def arrays_as_tuples(value: object) -> object:
        if isinstance(value, dict):
            return {key: arrays_as_tuples(item) for key, item in value.items()}
        return tuple(value) if isinstance(value, list) else value

    filters = loads(real("consumerFilter.json"))
    assert filters == {"filterDataByTopic": truth()["filters"]["filterDataByTopic"]}
    assert dumps(arrays_as_tuples(filters)).encode() == real("consumerFilter.json")


def test_maps_and_lists_in_maps() -> None:
    text = (  # specification 12.3, consumerOrderInfo.json
        '{\n\t"table":{\n\t\t"TopicA@g1":{0:{\n\t\t\t\t"a":"attemptId",\n\t\t\t\t"o":[\n'
        '\t\t\t\t\t100,\n\t\t\t\t\t1\n\t\t\t\t],\n\t\t\t\t"oc":{101:1\n\t\t\t\t}\n\t\t\t}\n'
        "\t\t}\n\t}\n}"
    )
    info = {0: {"a": "attemptId", "o": [100, 1], "oc": {101: 1}}}
    assert loads(text) == {"table": {"TopicA@g1": info}}
    assert dumps(loads(text)) == text


# --- Other files -----------------------------------------------------------------------------


def test_files_of_rocketmq_4() -> None:
    offsets = decode(b'{"offsetTable":{"t@g":{0:5,1:7}}}', ConsumerOffsetTable)
    assert offsets == ConsumerOffsetTable(offset_table={"t@g": {0: 5, 1: 7}})
    assert decode("{}", DelayOffsetTable) == DelayOffsetTable()
    groups = decode(
        '{"dataVersion":{"counter":3,"timestamp":9},"subscriptionGroupTable":{"g":{"brokerId":0,'
        '"consumeBroadcastEnable":false,"consumeEnable":true,"consumeFromMinEnable":true,'
        '"groupName":"g","notifyConsumerIdsChangedEnable":true,"retryMaxTimes":3,'
        '"retryQueueNums":1,"whichBrokerWhenConsumeSlowly":1}}}',
        SubscriptionGroupTable,
    )
    assert groups.data_version == DataVersion(state_version=0, counter=3, timestamp=9)
    assert groups.subscription_group_table["g"] == SubscriptionGroupConfig(
        group_name="g", consume_broadcast_enable=False, retry_max_times=3
    )


def test_unknown_keys_and_nulls_are_ignored() -> None:
    text = '{"later":[{"a":null}],"topicConfigTable":{"t":{"topicName":"t","attributes":null,7:8}}}'
    assert decode(text, TopicTable).topic_config_table == {"t": TopicConfig(topic_name="t")}


def test_subscription_data_stands_inline() -> None:
    data = SimpleSubscriptionData(topic="t", expression_type="TAG", expression="*", version=1)
    group = SubscriptionGroupConfig(group_name="g", subscription_data_set=(data, data))
    text = dumps(group)
    bean = (
        '{\n\t\t"expression":"*",\n\t\t"expressionType":"TAG",\n\t\t"topic":"t",\n'
        '\t\t"version":1\n\t}'
    )
    assert f'\t"subscriptionDataSet":[{bean},{bean}],\n' in text
    assert decode(text, SubscriptionGroupConfig) == group


def test_group_topic_map_follows_the_offsets() -> None:
    table = ConsumerOffsetTable(
        offset_table={"b@g": {}, "a@g": {}, "a@h": {}, "x": {}, "a@b@c": {}}
    )
    assert table.group_topic_map() == {"g": ("a", "b"), "h": ("a",)}


def test_references_of_fastjson() -> None:
    """RocketMQ 4.x writes the second of two equal maps as a path to the first."""
    text = (
        r'{"offsetTable":{"%RETRY%g@g":{0:5,1:7},"t@copy":'
        r'{"$ref":"$.offsetTable.\\%RETRY\\%g\\@g"}}}'
    )
    offsets = decode(text, ConsumerOffsetTable).offset_table
    assert offsets["t@copy"] == offsets["%RETRY%g@g"] == {0: 5, 1: 7}
    assert offsets["t@copy"] is not offsets["%RETRY%g@g"]


@pytest.mark.parametrize(
    "path",
    ["", "$", "..", "@", "$.", "$x", "$.offsetTable", "$.offsetTable.z", "$.offsetTable.a[0]",
     "$.offsetTable[99999999999]", "$.offsetTable.b", "$.offsetTable.a.b.c", "$\\"],
)  # fmt: skip
def test_a_reference_to_nothing_is_damage(path: str) -> None:
    text = json.dumps({"offsetTable": {"a": {"1": 2}, "b": {"$ref": path}}})
    with pytest.raises(ConfigFileDamaged, match="reference"):
        decode(text, ConsumerOffsetTable)


def test_references_cannot_blow_up_a_file() -> None:
    doubling: dict[str, object] = {"0": {"x": 1}}
    for n in range(1, 60):
        doubling[str(n)] = {"x": {"$ref": f"$.d.{n - 1}"}, "y": {"$ref": f"$.d.{n - 1}"}}
    with pytest.raises(ConfigFileDamaged, match="repeat more than"):
        decode(json.dumps({"d": doubling}), ConsumerOffsetTable)


def test_data_version() -> None:
    version = DataVersion(counter=7, timestamp=100)
    assert version.next(200) == DataVersion(state_version=0, counter=8, timestamp=200)
    assert version.next(50).next(60, 2) == DataVersion(state_version=2, counter=9, timestamp=60)
    in_order = [
        DataVersion(state_version=0, counter=1, timestamp=9),
        DataVersion(state_version=0, counter=2, timestamp=1),
        DataVersion(state_version=0, counter=2, timestamp=2),
        DataVersion(state_version=1, counter=0, timestamp=0),
    ]
    assert sorted(reversed(in_order)) == in_order


# --- Round trips -----------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
JSON = st.recursive(
    st.booleans() | INT64 | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(TEXT, inner, max_size=4),
        st.dictionaries(INT64, inner, max_size=4),
    ),
    max_leaves=20,
)
VERSIONS = st.builds(DataVersion, INT64, INT64, INT64)
ATTRIBUTES = st.dictionaries(TEXT, TEXT, max_size=3)
TOPICS = st.builds(
    TopicConfig,
    topic_name=TEXT,
    read_queue_nums=INT32,
    perm=INT32,
    topic_filter_type=st.sampled_from(TopicFilterType),
    order=st.booleans(),
    attributes=ATTRIBUTES,
)
POLICIES = st.builds(
    GroupRetryPolicy,
    type=st.sampled_from(RetryPolicyType),
    customized_retry_policy=st.none()
    | st.builds(CustomizedRetryPolicy, next=st.lists(INT64, max_size=3).map(tuple)),
    exponential_retry_policy=st.none()
    | st.builds(ExponentialRetryPolicy, initial=INT64, max=INT64, multiplier=INT64),
)
SUBSCRIPTIONS = st.builds(
    SimpleSubscriptionData, topic=TEXT, expression=st.none() | TEXT, version=INT64
)
GROUPS = st.builds(
    SubscriptionGroupConfig,
    group_name=TEXT,
    consume_enable=st.booleans(),
    retry_max_times=INT32,
    broker_id=INT64,
    group_retry_policy=POLICIES,
    subscription_data_set=st.none() | st.lists(SUBSCRIPTIONS, max_size=2).map(tuple),
    attributes=ATTRIBUTES,
)
OFFSETS = st.dictionaries(INT32, INT64, max_size=4)
TABLES: st.SearchStrategy[Table] = st.one_of(
    st.builds(
        TopicTable,
        data_version=VERSIONS,
        topic_config_table=st.dictionaries(TEXT, TOPICS, max_size=3),
    ),
    st.builds(
        SubscriptionGroupTable,
        data_version=VERSIONS,
        forbidden_table=st.dictionaries(TEXT, st.dictionaries(TEXT, INT32, max_size=2), max_size=2),
        subscription_group_table=st.dictionaries(TEXT, GROUPS, max_size=3),
    ),
    st.builds(
        ConsumerOffsetTable,
        data_version=VERSIONS,
        offset_table=st.dictionaries(TEXT | TEXT.map("t@{}".format), OFFSETS, max_size=4),
    ),
    st.builds(DelayOffsetTable, data_version=VERSIONS, offset_table=OFFSETS),
)


@given(TABLES)
def test_tables_come_back(table: Table) -> None:
    text = dumps(table)
    assert decode(text, type(table)) == table
    assert decode(text.encode(), type(table)) == table


@given(JSON)
def test_values_come_back(value: object) -> None:
    assert loads(dumps(value)) == value


@given(JSON | st.none(), st.sampled_from([None, 2]))
def test_ordinary_json_reads_as_pythons_own(value: object, indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    assert loads(text) == json.loads(text, object_pairs_hook=dict)


def test_strings_are_escaped_as_fastjson_does() -> None:
    text = '\x00\x07\b\t\n\x0b\f\r\x1f"\\/\x7f\x9f\xa0\u2028\u2029é😀<'
    written = r'"\u0000\u0007\b\t\n\u000B\f\r\u001F\"\\/\u007F\u009F' + "\xa0" + r"\u2028\u2029é😀<"
    assert dumps(text) == written + '"'
    assert loads(dumps(text)) == text


def test_strings_that_look_like_keys_stay_untouched() -> None:
    tricky = {'{0:1,2:3}"': '\\",{4:5', "a": "\\\\", 5: '{"6":7}'}
    assert loads(dumps(tricky)) == tricky
    assert loads(' { -3 : [ ] ,\r\n\t4:{5:{ }}, "6" : true } ') == {-3: [], 4: {5: {}}, "6": True}


def test_nulls_are_left_out_of_maps() -> None:
    assert dumps({"a": None, "b": 1}) == '{\n\t"b":1\n}'
    assert loads('{"a":null}') == {"a": None}


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1, float("inf"), float("nan")])
def test_numbers_that_do_not_fit_are_not_written(value: object) -> None:
    with pytest.raises(ValueError, match=r"64 bits|cannot be written"):
        dumps([value])


@pytest.mark.parametrize("value", [b"x", {1.5: 1}, {True: 1}, {1, 2}, object()])
def test_other_types_are_not_written(value: object) -> None:
    with pytest.raises(TypeError, match="cannot be"):
        dumps(value)


def test_a_circle_is_not_written() -> None:
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises(ValueError, match="nested deeper"):
        dumps(circle)


# --- Hostile text ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "column", "reason"),
    [
        ("", 1, 1, "ends too early"),
        (" \n\t", 2, 2, "ends too early"),
        ('{\n\t"a":1,\n\t"b":?\n}', 3, 6, "unreadable from '[?]' on"),
        ('{"a":1}\n x', 2, 2, "something follows the end"),
        ('{"a":1}{', 1, 8, "something follows the end"),
        ('{"a":1,}', 1, 8, "a key expected"),
        ('{"a" 1}', 1, 6, "':' expected"),
        ('{"a":}', 1, 6, "a value expected"),
        ('{1.5:1}', 1, 2, "a key expected"),
        ('{true:1}', 1, 2, "a key expected"),
        ('[1 2]', 1, 4, "',' or ']' expected"),
        ('[","2]', 1, 5, "',' or ']' expected"),
        ('["a","\\x41"]', 1, 6, "bad escape"),
        ('"\\ud800"', 1, 1, "bad escape"),
        ('"\n"', 1, 1, "unreadable"),
        ('"abc', 1, 1, "unreadable"),
        ("[01]", 1, 2, "not a 64-bit number"),
        ("[9223372036854775808]", 1, 2, "not a 64-bit number"),
        ("[1e999]", 1, 2, "not a 64-bit number"),
        ("-", 1, 1, "unreadable"),
        ("NaN", 1, 1, "unreadable"),
        ("{'a':1}", 1, 2, "unreadable"),
        ("{a:1}", 1, 2, "unreadable"),
        ("__import__('os')", 1, 1, "unreadable"),
    ],
)  # fmt: skip
def test_damage_is_located(text: str, line: int, column: int, reason: str) -> None:
    with pytest.raises(ConfigFileDamaged, match=reason) as caught:
        loads(text, name="x.json")
    error = caught.value
    assert (error.file, error.line, error.column) == ("x.json", line, column)
    assert str(error).startswith(f"x.json, line {line}, column {column}: ")


def test_bytes_that_are_not_utf8() -> None:
    with pytest.raises(ConfigFileDamaged, match="line 2, column 3: not UTF-8"):
        loads(b'{\n "\xff":1}')


@pytest.mark.parametrize("text", ["[" * 34, '{"a":' * 1_000_000, "[{1:" * 1_000_000])
def test_deep_nesting_is_damage(text: str) -> None:
    with pytest.raises(ConfigFileDamaged, match="nested deeper than 32"):
        loads(text)


@pytest.mark.parametrize("text", ["9" * 5_000_000, "{" + "9" * 5_000_000 + ":1}", "-0." + "1" * 99])
def test_huge_numbers_are_damage(text: str) -> None:
    with pytest.raises(ConfigFileDamaged, match="not a 64-bit number") as caught:
        loads(text)
    assert len(str(caught.value)) < 200


def test_a_huge_text_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastjson, "FILE_BYTES_MAX", 10)
    assert loads("[1,2,3,44]") == [1, 2, 3, 44]
    with pytest.raises(ConfigFileDamaged, match="11 bytes, at most 10"):
        loads("[1,2,3,444]")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (TopicTable, "null"),
        (TopicTable, "[]"),
        (TopicTable, '{"topicConfigTable":{"t":{}}}'),
        (TopicTable, '{"topicConfigTable":{"t":{"topicName":"t","perm":2147483648}}}'),
        (TopicTable, '{"topicConfigTable":{"t":{"topicName":"t","topicFilterType":"NONE"}}}'),
        (ConsumerOffsetTable, '{"offsetTable":{"t@g":{"x":1}}}'),
        (ConsumerOffsetTable, '{"offsetTable":{"t@g":{0:"1"}}}'),
        (DelayOffsetTable, '{"offsetTable":{1:1.5}}'),
        (DelayOffsetTable, '{"dataVersion":7}'),
    ],
)
def test_another_shape_is_damage(kind: type[Table], text: str) -> None:
    with pytest.raises(ConfigFileDamaged, match=r"x\.json: "):
        decode(text, kind, name="x.json")


@given(st.binary(max_size=60) | st.text('{}[]:,"\\0123456789.-eE $aftruenls\n', max_size=60))
def test_any_text_is_read_or_damage(text: str | bytes) -> None:
    for read in (loads, lambda text: decode(text, ConsumerOffsetTable)):
        with contextlib.suppress(ConfigFileDamaged):
            read(text)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.slow
def test_a_file_cut_anywhere_is_damage(name: str) -> None:
    whole = real(name)
    for length in range(len(whole)):
        with pytest.raises(ConfigFileDamaged):
            loads(whole[:length])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.slow
def test_a_file_with_any_byte_changed_is_read_or_damage(name: str) -> None:
    whole = real(name)
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] = b"\0\xff9{"[at % 4]
        with contextlib.suppress(ConfigFileDamaged):
            decode(bytes(changed), KINDS[name])


# --- ConfigFile: loading ---------------------------------------------------------------------

OLDER, OLD, NEW = (
    DelayOffsetTable(
        data_version=DataVersion(counter=n), offset_table={level: n for level in (1, 2)}
    )
    for n in (1, 2, 3)
)
DAMAGED = b'{"offsetTable":{1:'


def text_of(table: Table) -> bytes:
    return dumps(table).encode()


def config_file(folder: Path) -> ConfigFile[DelayOffsetTable]:
    return ConfigFile(folder / "delayOffset.json", DelayOffsetTable)


def lay(folder: Path, main: bytes | None, bak: bytes | None) -> ConfigFile[DelayOffsetTable]:
    file = config_file(folder)
    for path, content in ((file.path, main), (file.bak_path, bak)):
        if content is not None:
            path.write_bytes(content)
    return file


@pytest.mark.parametrize("bak", [None, b"", DAMAGED, text_of(OLDER)])
def test_a_whole_main_file_is_enough(
    tmp_path: Path, bak: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert lay(tmp_path, text_of(OLD), bak).load() == OLD
    assert not caplog.records


@pytest.mark.parametrize("main", [None, b"", DAMAGED, b"\0" * 100, b"[]", b"\xff"])
def test_bak_stands_in(
    tmp_path: Path, main: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    file = lay(tmp_path, main, text_of(OLDER))
    assert file.load() == OLDER
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(file.path) in record.getMessage()
    assert str(file.bak_path) in record.getMessage()


@pytest.mark.parametrize("main", [None, b""])
@pytest.mark.parametrize("bak", [None, b""])
def test_nothing_there(tmp_path: Path, main: bytes | None, bak: bytes | None) -> None:
    assert lay(tmp_path, main, bak).load() is None
    assert config_file(tmp_path / "absent").load() is None


@pytest.mark.parametrize(
    ("main", "bak"), [(DAMAGED, None), (DAMAGED, b""), (DAMAGED, DAMAGED), (None, DAMAGED)]
)
def test_damage_without_help_is_an_error(
    tmp_path: Path, main: bytes | None, bak: bytes | None
) -> None:
    file = lay(tmp_path, main, bak)
    with pytest.raises(ConfigFileDamaged) as caught:
        file.load()
    assert caught.value.file == str(file.path if main else file.bak_path)
    state = "damaged too" if bak else "missing or empty"
    assert f"{file.bak_path.name} is {state}" in str(caught.value)
    assert f"put a whole {file.path.name} there" in str(caught.value)


def test_what_goes_with_a_file_is_said(tmp_path: Path) -> None:
    file = ConfigFile(tmp_path / "topics.json", TopicTable)
    file.path.write_bytes(DAMAGED)
    with pytest.raises(ConfigFileDamaged, match="move both away, and topics are made anew"):
        file.load()
    file.path.unlink()
    assert file.load() is None  # as it says


@pytest.mark.parametrize("name", WITH_BAK)
@pytest.mark.slow
def test_a_real_file_cut_anywhere_falls_back(name: str, tmp_path: Path) -> None:
    file = ConfigFile(tmp_path / name, KINDS[name])
    file.bak_path.write_bytes(real(name + ".bak"))
    whole = real(name)
    for length in range(0, len(whole), 97):
        file.path.write_bytes(whole[:length])
        assert file.load() == real_table(name + ".bak")


# --- ConfigFile: storing ---------------------------------------------------------------------


@pytest.mark.parametrize("durable", [False, True])
def test_store_keeps_the_previous_content(tmp_path: Path, durable: bool) -> None:
    file = config_file(tmp_path / "config")  # made when first needed
    file.store(OLDER, durable=durable)
    assert not file.bak_path.exists()
    file.store(OLD, durable=True)
    file.store(NEW, durable=durable)
    assert (file.path.read_bytes(), file.bak_path.read_bytes()) == (text_of(NEW), text_of(OLD))
    assert sorted(path.name for path in file.path.parent.iterdir()) == [
        "delayOffset.json",
        "delayOffset.json.bak",
    ]
    assert config_file(tmp_path / "config").load() == NEW


def test_durable_waits_for_file_then_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(file: int) -> None:
        calls.append("fsync " + os.readlink(f"/proc/self/fd/{file}").removeprefix(str(tmp_path)))
        fsync(file)

    def noted_replace(source: Path, target: Path) -> None:
        calls.append(f"replace {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    file = lay(tmp_path, text_of(OLD), None)
    file.store(NEW, durable=True)
    assert calls == [
        "fsync /delayOffset.json.tmp",
        "fsync /delayOffset.json",  # nobody knows whether the writer before us did
        "replace delayOffset.json.bak",
        "replace delayOffset.json",
        "fsync ",
    ]
    calls.clear()
    file.store(OLD, durable=False)
    assert calls == ["replace delayOffset.json.bak", "replace delayOffset.json"]
    calls.clear()
    file.store(NEW, durable=False)
    assert calls == ["replace delayOffset.json"]  # .bak stays what is on the disk


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("left", [b"", bytes(60), None])
def test_lost_power_takes_back_no_more_than_what_was_not_durable(
    tmp_path: Path, first: bool, left: bytes | None
) -> None:
    """A file that was renamed but never synced may come back as zeros, or empty, or not."""
    file = lay(tmp_path, text_of(OLDER) if first else None, None)
    if not first:
        file.store(OLDER, durable=True)
    file.store(OLD, durable=not first)  # the first of this writer
    for _ in range(3):
        file.store(NEW, durable=False)
        if left is None:
            file.path.unlink()
        else:
            file.path.write_bytes(left)
        assert config_file(tmp_path).load() == OLD
        file.path.unlink(missing_ok=True)
        file.path.write_bytes(text_of(NEW))


@pytest.mark.parametrize("main", [b"", DAMAGED, None])
def test_a_damaged_file_does_not_push_out_the_whole_one(tmp_path: Path, main: bytes | None) -> None:
    lay(tmp_path, main, text_of(OLDER)).store(NEW, durable=False)
    file = config_file(tmp_path)
    assert file.load() == NEW
    assert file.bak_path.read_bytes() == text_of(OLDER)


def test_without_hard_links_the_previous_content_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*paths: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    file = lay(tmp_path, text_of(OLD), text_of(OLDER))
    file.store(NEW, durable=True)
    assert (file.path.read_bytes(), file.bak_path.read_bytes()) == (text_of(NEW), text_of(OLD))


def test_what_could_not_be_read_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = lay(tmp_path, text_of(OLD), None)
    with pytest.raises(ValueError, match="64 bits"):
        file.store(DelayOffsetTable(offset_table={1: 1 << 63}), durable=False)
    monkeypatch.setattr(config_files, "FILE_BYTES_MAX", 150)
    with pytest.raises(ValueError, match="at most 150"):
        file.store(DelayOffsetTable(offset_table=dict.fromkeys(range(99), 0)), durable=False)
    assert file.load() == OLD
    assert [path.name for path in tmp_path.iterdir()] == [file.path.name]


# --- ConfigFile: kills and faults ------------------------------------------------------------

# What lies there before, and what `load` says of it.
STATES: dict[str, tuple[bytes | None, bytes | None, DelayOffsetTable | None]] = {
    "nothing": (None, None, None),
    "main": (text_of(OLD), None, OLD),
    "main and bak": (text_of(OLD), text_of(OLDER), OLD),
    "only bak": (None, text_of(OLD), OLD),
    "main damaged": (DAMAGED, text_of(OLD), OLD),
    "main empty": (b"", text_of(OLD), OLD),
    "bak damaged": (text_of(OLD), DAMAGED, OLD),
}
in_every_state = pytest.mark.parametrize(
    ("main", "bak", "before"), STATES.values(), ids=STATES.keys()
)


STEPS = ("_keep_previous", "store_text", "write_beside", "put_in_place", "sync_file", "sync_folder")


class Killed(BaseException):
    """Not an Exception, so that nothing that handles faults runs, as after a kill."""


def check_after(folder: Path, before: DelayOffsetTable | None) -> None:
    """One of the two contents is there, whole, and the file can be stored again."""
    file = config_file(folder)
    assert file.load() in (before, NEW)
    another = DelayOffsetTable(offset_table={18: 1 << 40})
    previous = file.load()
    for _ in range(2):
        file.store(another, durable=True)
        assert config_file(folder).load() == another
        left = {path.name for path in folder.iterdir()} - {file.path.name, file.bak_path.name}
        assert not left
    assert previous is None or decode(file.bak_path.read_bytes(), DelayOffsetTable) == another


@in_every_state
@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.slow
def test_kill_at_every_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    main: bytes | None,
    bak: bytes | None,
    before: DelayOffsetTable | None,
    durable: bool,
) -> None:
    """What a kill leaves is the folder as it is at that line: a copy is taken at each."""
    folder, copies = tmp_path / "config", tmp_path / "copies"
    folder.mkdir()
    file = lay(folder, main, bak)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:50]))  # many torn writes
    lines: set[int] = set()
    count = 0

    def at_line(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        nonlocal count
        if frame.f_code.co_filename not in (config_files.__file__, durable_files.__file__):
            return None
        if frame.f_code.co_name in STEPS:
            shutil.copytree(folder, copies / str(count))
            lines.add(frame.f_lineno)
            count += 1
        return at_line

    sys.settrace(at_line)
    try:
        file.store(NEW, durable=durable)
    finally:
        sys.settrace(None)
    assert len(lines) > 15
    for n in range(count):
        check_after(copies / str(n), before)
    check_after(folder, NEW)


@in_every_state
@pytest.mark.parametrize("fault", [Killed, OSError])
def test_the_nth_call_of_the_system_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    main: bytes | None,
    bak: bytes | None,
    before: DelayOffsetTable | None,
    fault: type[BaseException],
) -> None:
    """For n = 1, 2, 3 ... until no call is left to fail."""
    names = ("open", "write", "fsync", "close", "link", "unlink", "replace")
    for n in itertools.count(1):
        folder = tmp_path / str(n)
        folder.mkdir()
        file = lay(folder, main, bak)
        stored = False
        with monkeypatch.context() as patch:
            calls = fail_at(n, names, patch, fault)
            with contextlib.suppress(fault):
                file.store(NEW, durable=True)
                stored = True
        if len(calls) < n:
            break
        if fault is OSError:
            assert file.load() == NEW if stored else file.load() in (before, NEW)
            file.store(NEW, durable=True)  # the same object may go on
            assert file.load() == NEW
        check_after(folder, before)
    assert stored
    assert n > 8


def fail_at(
    n: int, names: tuple[str, ...], patch: pytest.MonkeyPatch, fault: type[BaseException]
) -> list[str]:
    """Has the nth call of the named functions of `os` fail instead of acting; notes all calls."""
    calls: list[str] = []
    ours = threading.current_thread()

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if threading.current_thread() is not ours:  # pytest-xdist's have work to do as well
                return function(*arguments, **keywords)
            calls.append(function.__name__)
            if len(calls) == n:
                raise fault(28, "No space left on device")
            return function(*arguments, **keywords)

        return call

    for name in names:
        patch.setattr(os, name, failing(getattr(os, name)))
    return calls


CHILD = """
import itertools, sys
from pathlib import Path
from cometmq.shm.state.config_files import ConfigFile
from cometmq.shm.state.tables import DelayOffsetTable
file = ConfigFile(Path(sys.argv[1]), DelayOffsetTable)
for n in itertools.count(int(sys.argv[2])):
    file.store(DelayOffsetTable(offset_table={level: n for level in range(500)}), durable=False)
    print(n, flush=True)
"""


@pytest.mark.slow
def test_offsets_survive_real_kills(tmp_path: Path) -> None:
    """A child stores as fast as it can and is killed: nothing it reported is older than what lies
    there, and no content is half of one store and half of another."""
    file = config_file(tmp_path)
    start = 1
    for n in range(8):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(file.path), str(start)], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        for _ in range(5 + 7 * n):
            reported = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        reported = int((child.stdout.read().split() or [b"%d" % reported])[-1])
        child.stdout.close()
        child.wait()
        table = config_file(tmp_path).load()
        assert table is not None
        (stored,) = set(table.offset_table.values())
        assert reported <= stored <= reported + 1
        start = stored + 1


@given(
    st.dictionaries(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-(1 << 63), (1 << 63) - 1))
)
@example({-(1 << 63): (1 << 63) - 1, 0: -1, 1: 0})
def test_integer_pairs(table: dict[int, int]) -> None:
    assert f"{{{integer_pairs(table)}}}" == str(table).replace(" ", "")


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ({1: "1"}, TypeError), ({"1": 1}, TypeError),
        ({1: True}, TypeError), ({1: None}, TypeError),
        ({1: 1 << 63}, OverflowError), ({-(1 << 63) - 1: 1}, OverflowError),
    ],
)  # fmt: skip
def test_what_are_no_integer_pairs(table: dict[int, int], error: type[Exception]) -> None:
    with pytest.raises(error):
        integer_pairs(table)
