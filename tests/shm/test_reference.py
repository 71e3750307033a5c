"""The second reader against stores that RocketMQ wrote: before it judges, it is judged."""

from __future__ import annotations

import ast
import base64
import shutil
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import golden
import pytest
import reference
import strategies
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import (
    BadRecord,
    BadStore,
    Blank,
    Reason,
    Record,
    check_store,
    crc31,
    decode_properties,
    decode_record,
    decompress,
    encode_again,
    encode_blank,
    encode_entry,
    encode_properties,
    encode_record,
    java_hash,
    queues,
    read_checkpoint,
    records,
    tags_code,
    walk_log,
    walk_queue,
    write_store,
)

FLIPPED_EARLY = "damaged-bitflip-early"  # recovery starts behind the damage and does not see it


@dataclass(frozen=True)
class Golden:
    """One set, unpacked once for all tests that only read."""

    name: str
    store: Path

    @cached_property
    def meta(self) -> dict[str, Any]:
        return golden.meta(self.name)

    @cached_property
    def listing(self) -> list[dict[str, Any]]:
        return golden.listing(self.name)

    @cached_property
    def records(self) -> list[Record]:
        return records(self.store, check_crc=self.name != FLIPPED_EARLY)


@pytest.fixture(scope="module", params=golden.ALL)
def any_set(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return Golden(request.param, golden.unpack(request.param, tmp_path_factory.mktemp("golden")))


@pytest.fixture
def clean_store(tmp_path: Path) -> Path:
    """A store of our own that a test may damage."""
    store = tmp_path / "store"
    write_store(store, [message(number) for number in range(400)])
    assert check_store(store) == []
    return store


def message(number: int) -> dict[str, Any]:
    return {
        "topic": f"topic{number % 2}",
        "queue_id": number % 3,
        "body": b"%d" % number * 10,
        "properties": encode_properties({"TAGS": f"tag{number % 5}"}),
        "store_timestamp": 1_700_000_000_000 + number,
        "store_host": (ip_address("10.0.0.2"), 10911),
        "sys_flag": 4 if number % 50 == 49 else 0,
    }


def test_the_judge_shares_nothing_with_the_judged() -> None:
    """A mistake that both make is one that neither finds."""
    tree = ast.parse(Path(reference.__file__).read_text("utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    assert {str(name).split(".")[0] for name in imported} <= sys.stdlib_module_names


# --- the golden sets ----------------------------------------------------------------------------


def as_listed(record: Record) -> dict[str, Any]:
    """The record in the words of the listing."""
    found = {
        "topic": record.topic,
        "queueId": record.queue_id,
        "queueOffset": record.queue_offset,
        "physicalOffset": record.physical_offset,
        "storeSize": record.total_size,
        "sysFlag": record.sys_flag,
        "flag": record.flag,
        "bornTimestamp": record.born_timestamp,
        "bornHost": record.born_host,
        "storeTimestamp": record.store_timestamp,
        "storeHost": record.store_host,
        "reconsumeTimes": record.reconsume_times,
        "preparedTransactionOffset": record.prepared_transaction_offset,
        "bodyCRC": record.body_crc,
        "body": record.body,
        "properties": record.properties,
        "msgId": record.msg_id,
        "recordCrc32": zlib.crc32(record.raw),
        "magic": f"{record.magic:08x}",
    }
    if record.sys_flag & 1:
        found["bodyDecompressed"] = record.body_decompressed
    if record.lies_at != record.physical_offset:
        found["foundAt"] = record.lies_at
    if not record.body_crc_ok:
        found["bodyCrcOk"] = False
    return found


def as_found(row: dict[str, Any]) -> dict[str, Any]:
    """The row with hosts as addresses and bodies as bytes, without its queue entry."""
    row = {name: value for name, value in row.items() if name != "cq"}
    row |= {name: golden.host(row[name]) for name in ("bornHost", "storeHost")}
    for name in {"body", "bodyDecompressed"} & row.keys():
        row[name] = row[name] if row[name] is None else base64.b64decode(row[name])
    return row


@pytest.mark.slow
def test_every_record_is_as_rocketmq_lists_it(any_set: Golden) -> None:
    assert len(any_set.records) == len(any_set.listing) == any_set.meta["records"]
    for record, row in zip(any_set.records, any_set.listing, strict=True):
        assert as_listed(record) == as_found(row)


def test_the_blanks_are_those_that_rocketmq_met(any_set: Golden) -> None:
    walk = walk_log(any_set.store, check_crc=any_set.name != FLIPPED_EARLY)
    blanks = [(unit.lies_at, unit.total_size) for unit in walk if isinstance(unit, Blank)]
    listed = any_set.meta["opened"]["blanks"]
    assert blanks == [(blank["physicalOffset"], blank["length"]) for blank in listed]


def test_the_walk_ends_where_and_why_it_should(any_set: Golden) -> None:
    walk = walk_log(any_set.store, check_crc=any_set.name != FLIPPED_EARLY)
    units = list(walk)
    assert walk.stop is not None
    assert walk.stop.physical_offset == units[-1].lies_at + units[-1].total_size
    reasons = {
        "damaged-bitflip": Reason.BAD_BODY_CRC,
        # The first part of an old record; random bytes stand for its properties' length.
        "damaged-tail": Reason.BAD_LENGTH,
    }
    assert walk.stop.reason is reasons.get(any_set.name, Reason.END_OF_DATA)


def test_every_queue_entry_is_as_rocketmq_lists_it(any_set: Golden) -> None:
    """Abort and damaged sets are packed before recovery, which restores or drops some entries."""
    listed = {
        (row["topic"], row["queueId"], row["cq"]["index"]): row["cq"]
        for row in any_set.listing
        if row["cq"]
    }
    found = {
        (topic, queue_id, entry.index): {
            "index": entry.index,
            "pos": entry.physical_offset,
            "size": entry.size,
            "tagsCode": entry.tags_code,
        }
        for topic, queue_id in queues(any_set.store)
        for entry in walk_queue(any_set.store, topic, queue_id)
    }
    shared = found.keys() & listed.keys()
    assert {place: found[place] for place in shared} == {place: listed[place] for place in shared}
    assert len(found.keys() - listed.keys()) == (13 if any_set.name == "damaged-bitflip" else 0)
    if any_set.name in golden.CLEAN:
        assert len(found) == any_set.meta["recordsInConsumeQueues"]


def test_queue_entries_on_disk_are_counted(any_set: Golden) -> None:
    counts = {
        f"{topic}/{queue_id}": len(walk_queue(any_set.store, topic, queue_id, fillers=True))
        for topic, queue_id in queues(any_set.store)
    }
    if any_set.name not in golden.BATCH_QUEUES:
        assert counts == any_set.meta["onDisk"]["consumeQueueEntries"]


def test_the_tags_code_follows_from_the_record(any_set: Golden) -> None:
    for record, row in zip(any_set.records, any_set.listing, strict=True):
        if row["cq"]:
            assert tags_code(record) == row["cq"]["tagsCode"], record


def test_the_encoder_reproduces_every_record(any_set: Golden) -> None:
    for record in any_set.records:
        if record.body_crc_ok:
            assert encode_again(record) == record.raw


def test_the_checkpoint_words(any_set: Golden) -> None:
    if any_set.name == "damaged-nocq-nocheckpoint":
        with pytest.raises(FileNotFoundError):
            read_checkpoint(any_set.store)
    else:
        words = list(any_set.meta["onDisk"]["checkpoint"].values())
        assert list(vars(read_checkpoint(any_set.store)).values()) == words


def test_unpacking_keeps_the_modification_times(any_set: Golden) -> None:
    written_s = any_set.records[-1].store_timestamp / 1000
    for path in (any_set.store / "commitlog").iterdir():
        assert abs(path.stat().st_mtime - written_s) < 600


# --- check_store --------------------------------------------------------------------------------

ABORTED = "abort: present, the store was not shut down"


@pytest.mark.parametrize("any_set", golden.CLEAN + golden.BATCH_QUEUES, indirect=True)
def test_nothing_is_found_in_a_clean_store(any_set: Golden) -> None:
    assert check_store(any_set.store) == []


@pytest.mark.parametrize("any_set", golden.ABORT + golden.DAMAGED, indirect=True)
def test_what_is_wrong_with_the_others_is_found(any_set: Golden) -> None:
    findings = check_store(any_set.store)
    assert findings.pop(0) == ABORTED
    damage = any_set.meta.get("damage", {})
    match any_set.name:
        case "damaged-base":
            assert findings == []
        case "damaged-bitflip" | "damaged-bitflip-early":
            at = damage["recordPhysicalOffset"]
            assert findings == [f"record at {at}: the body does not have the stored CRC"]
        case "damaged-tail":
            (finding,) = findings
            assert f"behind the end of the log at {damage['at']} (BAD_LENGTH)" in finding
        case "damaged-tail-stale":
            at, says = damage["at"], damage["copiedFrom"]
            assert findings == [
                f"record at {at}: says that it lies at {says}",
                f"record at {at}: no entry in a queue",
            ]
        case "loghub-abort":
            assert_without_entry(findings, 420)
        case "damaged-nocq-all":
            assert_without_entry(findings, 1000)
        case "damaged-nocq":
            assert_without_entry(findings, 500)
        case "damaged-nocq-nocheckpoint":
            assert findings.pop(0) == "checkpoint: absent"
            assert_without_entry(findings, 500)


def assert_without_entry(findings: list[str], count: int) -> None:
    assert len(findings) == count
    assert all(finding.endswith(": no entry in a queue") for finding in findings)


def edit(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def queue_file(store: Path) -> Path:
    return store / "consumequeue/topic0/0" / f"{0:020d}"


def log_file(store: Path) -> Path:
    return store / "commitlog" / f"{0:020d}"


def flip_a_bit_of_a_body(store: Path) -> None:
    record = records(store)[7]
    at = record.lies_at + record.raw.index(record.body)
    edit(log_file(store), at, bytes([record.body[0] ^ 0x10]))


def tell_a_wrong_place(store: Path) -> None:
    edit(log_file(store), records(store)[7].lies_at + 28, (1).to_bytes(8))


def put_bytes_behind_the_end(store: Path) -> None:
    end = records(store)[-1]
    edit(log_file(store), end.lies_at + end.total_size + 5000, b"\1")


def swap_two_entries(store: Path) -> None:
    content = queue_file(store).read_bytes()
    edit(queue_file(store), 40, content[60:80] + content[40:60])


def drop_an_entry(store: Path) -> None:
    """The entries behind it move up."""
    content = queue_file(store).read_bytes()
    edit(queue_file(store), 40, content[60:] + bytes(20))


def drop_the_last_entry(store: Path) -> None:
    last = walk_queue(store, "topic0", 0)[-1]
    edit(queue_file(store), last.index * 20, bytes(20))


def zero_an_entry(store: Path) -> None:
    edit(queue_file(store), 40, bytes(20))


def point_an_entry_elsewhere(store: Path) -> None:
    edit(queue_file(store), 40, (12345).to_bytes(8))


def give_an_entry_a_wrong_size(store: Path) -> None:
    edit(queue_file(store), 48, (7).to_bytes(4))


def give_an_entry_a_wrong_tags_code(store: Path) -> None:
    edit(queue_file(store), 52, (7).to_bytes(8))


def append_an_entry_for_no_record(store: Path) -> None:
    after = walk_queue(store, "topic0", 0)[-1].index + 1
    edit(queue_file(store), after * 20, encode_entry(1 << 40, 100, 0))


def append_an_entry_for_a_prepared_record(store: Path) -> None:
    prepared = next(record for record in records(store) if not record.queued)
    after = walk_queue(store, "topic0", 0)[-1].index + 1
    entry = encode_entry(prepared.lies_at, prepared.total_size, tags_code(prepared))
    edit(queue_file(store), after * 20, entry)


def put_a_filler_behind_an_entry(store: Path) -> None:
    edit(queue_file(store), 40, encode_entry(0, 0x7FFFFFFF, 0))


def mistake_one_queue_for_another(store: Path) -> None:
    shutil.copytree(store / "consumequeue/topic0/0", store / "consumequeue/topic9/0")


def shorten_a_queue_file(store: Path) -> None:
    queue_file(store).write_bytes(queue_file(store).read_bytes()[:-20])


def shorten_a_log_file(store: Path) -> None:
    """The queue and the log have more than one segment, so that there is a size to compare."""
    last = sorted((store / "commitlog").iterdir())[-1]
    shutil.copy(last, last.with_name(f"{1 << 16:020d}"))
    log_file(store).write_bytes(log_file(store).read_bytes()[:-1])


def name_a_log_file_wrongly(store: Path) -> None:
    log_file(store).rename(store / "commitlog" / "0")


def leave_a_gap_in_the_log(store: Path) -> None:
    path = store / "commitlog" / f"{3 << 16:020d}"
    path.write_bytes(bytes(1 << 16))


def leave_a_gap_in_a_queue(store: Path) -> None:
    queue_file(store).with_name(f"{4000:020d}").write_bytes(bytes(2000))


def tear_the_checkpoint(store: Path) -> None:
    (store / "checkpoint").write_bytes(bytes(40))


def write_behind_the_checkpoint(store: Path) -> None:
    edit(store / "checkpoint", 40, b"\1")


def leave_the_abort_file(store: Path) -> None:
    (store / "abort").touch()


# What each fault must be called; part of a finding.
FAULTS: dict[Callable[[Path], None], str] = {
    flip_a_bit_of_a_body: "does not have the stored CRC",
    tell_a_wrong_place: "says that it lies at 1",
    put_bytes_behind_the_end: "bytes that are not zero",
    swap_two_entries: "entry 2: index 2, the record at",
    drop_an_entry: ": no entry in a queue",
    drop_the_last_entry: ": no entry in a queue",
    zero_an_entry: "not dense",
    point_an_entry_elsewhere: "entry 2: no record at 12345",
    give_an_entry_a_wrong_size: "entry 2: size 7, the record at",
    give_an_entry_a_wrong_tags_code: "entry 2: tags code 7, the record at",
    append_an_entry_for_no_record: ": no record at 1099511627776",
    append_an_entry_for_a_prepared_record: "is of a kind that has no entry",
    put_a_filler_behind_an_entry: "a filler behind an entry",
    mistake_one_queue_for_another: "entry 0: queue topic9/0, the record at",
    shorten_a_queue_file: "1980 bytes instead of 2000",
    shorten_a_log_file: "65536 bytes instead of 65535",
    name_a_log_file_wrongly: "the name is not 20 digits",
    leave_a_gap_in_the_log: "commitlog: a gap before 00000000000000196608",
    leave_a_gap_in_a_queue: "a gap before 00000000000000004000",
    tear_the_checkpoint: "40 bytes instead of 4096",
    write_behind_the_checkpoint: "bytes behind the five words",
    leave_the_abort_file: ABORTED,
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(clean_store: Path, fault: Callable[[Path], None]) -> None:
    fault(clean_store)
    findings = check_store(clean_store)
    assert [finding for finding in findings if FAULTS[fault] in finding], findings


def test_entries_below_a_log_cut_at_its_beginning_are_right(tmp_path: Path) -> None:
    write_store(tmp_path, [message(number) for number in range(1000)])
    log_file(tmp_path).unlink()
    assert check_store(tmp_path) == []


def test_an_empty_last_segment_is_passed_over(clean_store: Path) -> None:
    (clean_store / "commitlog" / f"{1 << 16:020d}").touch()
    assert check_store(clean_store) == []


def test_a_segment_of_another_size_than_asked_for_is_refused(clean_store: Path) -> None:
    with pytest.raises(BadStore, match="65536 bytes instead of 131072"):
        walk_log(clean_store, 1 << 17)


# --- the vectors of the format's description ----------------------------------------------------

VECTOR = bytes.fromhex(
    "00000084daa320a73610a6860000000100000007000000000000000500000000"
    "00001000000000000000018bcfe5687b0a000001000012340000018bcfe569c8"
    "0a00000200002a9f0000000000000000000000000000000568656c6c6f06546f"
    "70696341001e544147530154616741024b455953016b3102554e49515f4b4559"
    "01553102"
)
VECTOR_ARGUMENTS: dict[str, Any] = {
    "topic": "TopicA",
    "queue_id": 1,
    "flag": 7,
    "queue_offset": 5,
    "physical_offset": 4096,
    "born_timestamp": 1700000000123,
    "born_host": (ip_address("10.0.0.1"), 4660),
    "store_timestamp": 1700000000456,
    "store_host": (ip_address("10.0.0.2"), 10911),
    "body": b"hello",
    "properties": encode_properties({"TAGS": "TagA", "KEYS": "k1", "UNIQ_KEY": "U1"}),
}
MINIMAL = bytes.fromhex(
    "00000068daa320a7000000000000000000000000000000000000000000000000"
    "0000000000000010000000000000000100000000000000000000000000000001"
    "0000000100000000000000020a00000200002a9f000000000000000000000000"
    "0000000001540000"
)


def test_vector_record() -> None:
    record = decode_record(VECTOR)
    assert encode_record(**VECTOR_ARGUMENTS) == VECTOR
    for name, value in VECTOR_ARGUMENTS.items():
        assert getattr(record, "properties_raw" if name == "properties" else name) == value
    assert record.properties == {"TAGS": "TagA", "KEYS": "k1", "UNIQ_KEY": "U1"}
    assert record.msg_id == "0A00000200002A9F0000000000001000"


def test_vector_queue_entry() -> None:
    entry = encode_entry(4096, len(VECTOR), tags_code(decode_record(VECTOR)))
    assert entry.hex() == "000000000000100000000084000000000027a807"
    filler = encode_entry(0, 0x7FFFFFFF, 0)
    assert filler.hex() == "00000000000000007fffffff0000000000000000"


def test_vector_crc_property() -> None:
    raw = encode_record(**VECTOR_ARGUMENTS, append_crc=True)
    record = decode_record(raw)
    assert (len(raw), len(record.properties_raw), crc31(raw[:-20])) == (152, 50, 1910532946)
    assert raw[-20:].hex() == "5f5f435243333223013634393233353031393102"
    assert record.property_crc_ok
    assert decode_record(VECTOR).property_crc_ok is None
    torn = raw[:130] + b"!" + raw[131:]
    assert decode_record(torn).property_crc_ok is False


def test_crc_property_closes_the_last_property_first() -> None:
    record = decode_record(encode_record(topic="T", properties=b"a\x01b", append_crc=True))
    assert record.properties_raw.startswith(b"a\x01b\x02__CRC32#\x01")
    assert record.property_crc_ok


def test_vector_minimal_record() -> None:
    born, stored = (ip_address("::1"), 1), (ip_address("10.0.0.2"), 10911)
    raw = encode_record(
        topic="T", born_timestamp=1, born_host=born, store_timestamp=2, store_host=stored
    )
    assert raw == MINIMAL
    assert decode_record(MINIMAL).born_host == born


def test_vector_blank() -> None:
    assert encode_blank(463).hex() == "000001cfcbd43194"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 0),
        ("TagA", 0x27A807),
        ("标签😀", 825518074),
        ("polygenelubricants", -(2**31)),
        ("TopicA#U1", -1903241331),
        ("TopicA#k1", -1903240649),
    ],
)
def test_vector_hash_codes(text: str, code: int) -> None:
    assert java_hash(text) == code


# --- what is no record --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", Reason.TOO_SHORT),
        (VECTOR[:7], Reason.TOO_SHORT),
        (bytes(100), Reason.END_OF_DATA),
        (VECTOR[:-1], Reason.BAD_SIZE),
        (encode_blank(9), Reason.BAD_SIZE),
        (encode_blank(8), Reason.BLANK),
        (VECTOR[:7] + b"\0" + VECTOR[8:], Reason.BAD_MAGIC),
        (VECTOR.replace(b"hello", b"hallo"), Reason.BAD_BODY_CRC),
        (b"\0\0\0\x85" + VECTOR[4:] + b"\0", Reason.BAD_LENGTH),
        (b"\0\0\0\x83" + VECTOR[4:], Reason.BAD_LENGTH),
        (b"\0\0\0\x08" + VECTOR[4:], Reason.BAD_LENGTH),
        (b"\xff\xff\xff\xff" + VECTOR[4:], Reason.BAD_LENGTH),
        (VECTOR.replace(b"\0\0\0\x05hello", b"\xff\xff\xff\xffhello"), Reason.BAD_LENGTH),
        (VECTOR.replace(b"\x06Topic", b"\x86Topic"), Reason.BAD_LENGTH),
    ],
)
def test_what_is_no_record_says_why(content: bytes, reason: Reason) -> None:
    with pytest.raises(BadRecord) as bad:
        decode_record(content)
    assert bad.value.reason is reason


@given(st.data())
@settings(max_examples=100, deadline=None, database=None)
def test_rubbish_never_raises_anything_else(data: st.DataObject) -> None:
    content = bytearray(VECTOR)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        record = decode_record(content)
    except BadRecord:
        return
    assert record.total_size == len(record.raw)


def test_properties_that_are_not_as_they_should_be() -> None:
    raw = b"a\x01b\x02\x01empty name\x02empty value\x01\x02alone\x02\x02a\x01c\x01d"
    assert decode_properties(raw) == {"a": "c\x01d"}


def test_a_compression_that_the_tests_do_without_is_named() -> None:
    with pytest.raises(NotImplementedError, match="compression type 2"):
        decompress(b"", 0x201)


# --- random stores ------------------------------------------------------------------------------


@pytest.mark.slow
@given(strategies.messages(), st.booleans())
@settings(max_examples=100, deadline=None, database=None)
def test_what_was_encoded_is_decoded(message: strategies.Message, append_crc: bool) -> None:
    raw = encode_record(**message.record_arguments(), append_crc=append_crc)
    record = decode_record(b"before" + raw + b"behind", 6)
    assert record.raw == raw
    assert record.magic == (0xDAA320AB if len(message.topic) > 127 else 0xDAA320A7)
    properties = {name: value for name, value in record.properties.items() if name != "__CRC32#"}
    assert properties == message.properties
    for name in message.record_arguments().keys() - {"properties"}:
        assert getattr(record, name) == getattr(message, name)
    assert encode_again(record) == raw


@given(st.lists(strategies.messages(body=strategies.bodies(256)), max_size=12))
@settings(
    max_examples=25,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@pytest.mark.slow
def test_a_random_store_reads_back(tmp_path: Path, messages: list[strategies.Message]) -> None:
    store = tmp_path / "store"
    shutil.rmtree(store, ignore_errors=True)
    written = write_store(
        store,
        [message.record_arguments() for message in messages],
        segment_size=1 << 12,
        queue_segment_size=60,
    )
    assert records(store) == written
    assert check_store(store) == []
