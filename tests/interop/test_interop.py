"""CometMQ's files and Apache RocketMQ's published store classes: each reads what the other wrote.

Here the harness proves itself on stores that RocketMQ wrote. Those were written, and described, by
a development version after release 5.3.3; they are read here by 5.3.3. No difference between the
two shows in these stores: not in a field of a record, in what recovery makes of the damaged ones,
in the bounds of a queue or in the answer to a query. Nothing is left out of the comparison. (Their
BatchConsumeQueue set is not read here: it needs topic settings, which the harness does not have.)
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import golden
import pytest
from interop import rocketmq
from interop.rocketmq import (
    StoreRefused,
    append_messages,
    assert_rocketmq_reads,
    assert_same_records,
    list_store,
)

# The first of them may have to wait for the classes to be fetched.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(rocketmq.FETCH_TIMEOUT_S + 120)]
ARGUMENTS = {
    "queryMessage": ("topic", "key", "maxNum", "begin", "end"),
    "getMessage": ("topic", "queueId", "offset", "maxMsgNums", "tags"),
    "getOffsetInQueueByTime": ("topic", "queueId", "timestamp", "boundary"),
}
BODIES = [f"line {index}".encode() * (1 + index % 40) for index in range(2_000)]


def gaps(name: str) -> list[tuple[str, int, int]]:
    """Queue offsets that point at no message, as the golden store's own listing met them."""
    keys = (oddity.split(":") for oddity in golden.meta(name).get("oddities", {}))
    return [(topic, int(queue_id), int(at)) for _, topic, queue_id, at in keys]


def unanswered(queries: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """The golden queries without their answers: what is compared must come from this RocketMQ."""
    return {
        kind: [{name: query[name] for name in ARGUMENTS[kind]} for query in asked]
        for kind, asked in queries.items()
    }


def damaged(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.jvm
@pytest.mark.parametrize(
    "name", [*golden.CLEAN, "loghub-abort", *map(damaged, ("damaged-base", *golden.DAMAGED))]
)
def test_reads_a_golden_store(name: str, tmp_path: Path) -> None:
    """Every field of every record, those in no queue included; each queue's bounds; the log's."""
    meta = golden.meta(name)
    store = golden.unpack(name, tmp_path)
    listing = assert_rocketmq_reads(
        store, meta["settings"], golden.listing(name), unreadable=gaps(name)
    )
    assert len(listing["messages"]) == meta["records"]
    assert listing["lastExitOk"] == (meta["exit"] == "clean")
    for key in ("minPhyOffset", "maxPhyOffset", "queues"):
        assert listing[key] == meta["opened"][key], key


@pytest.mark.jvm
@pytest.mark.parametrize("name", ["loghub-clean", "loghub-abort", "special"])
def test_answers_the_golden_queries(name: str, tmp_path: Path) -> None:
    """By key, by time, by offset and by tags."""
    meta = golden.meta(name)
    settings = meta["settings"]
    listing = list_store(
        golden.unpack(name, tmp_path),
        segment_bytes=settings["mappedFileSizeCommitLog"],
        queue_segment_bytes=settings["mappedFileSizeConsumeQueue"],
        settings=settings,
        queries=unanswered(meta["queries"]),
    )
    assert listing["queries"] == meta["queries"]


@pytest.mark.jvm
@pytest.mark.parametrize("leave_open", [False, True], ids=["closed", "halted"])
def test_goes_on_with_a_store(leave_open: bool, tmp_path: Path) -> None:
    """RocketMQ appends over several segments; what it acknowledged is what it then reads."""
    settings = golden.meta("special")["settings"]
    store = golden.unpack("special", tmp_path)
    written = append_messages(store, settings, "appended", BODIES, queues=3, leave_open=leave_open)
    assert (store / "abort").exists() == leave_open
    listing = assert_rocketmq_reads(
        store, settings, [*golden.listing("special"), *written], unreadable=gaps("special")
    )
    assert listing["lastExitOk"] != leave_open
    assert [line["queueOffset"] for line in written] == [index // 3 for index in range(2_000)]


@pytest.mark.jvm
@pytest.mark.parametrize("abort", [False, True], ids=["clean", "abort"])
def test_opens_a_store_as_we_leave_it(abort: bool, tmp_path: Path) -> None:
    """Two segments allocated ahead, a file and a directory of ours in the root, no checkpoint.

    RocketMQ deletes the empty segments, writes a checkpoint, and leaves the rest alone.
    """
    settings = golden.meta("special")["settings"]
    store = golden.unpack("special", tmp_path)
    ahead = [allocate_segment(store, settings["mappedFileSizeCommitLog"]) for _ in range(2)]
    ours = [store / "control", store / "cometmq" / "anything"]
    (store / "cometmq").mkdir()
    for path in ours:
        path.write_bytes(b"ours")
    (store / "checkpoint").unlink()
    if abort:
        (store / "abort").write_text("1")

    assert_rocketmq_reads(store, settings, golden.listing("special"), unreadable=gaps("special"))

    assert not any(path.exists() for path in ahead)
    assert all(path.read_bytes() == b"ours" for path in ours)
    assert (store / "checkpoint").stat().st_size == 4096


def allocate_segment(store: Path, segment_bytes: int) -> Path:
    """An empty segment behind the last one."""
    last = max(int(path.name) for path in (store / "commitlog").iterdir())
    path = store / "commitlog" / f"{last + segment_bytes:020d}"
    path.touch()
    os.truncate(path, segment_bytes)
    return path


@contextmanager
def foreign_file(store: Path) -> Iterator[None]:
    (store / "commitlog" / "notes").write_bytes(b"ours")
    yield


@contextmanager
def short_segment(store: Path) -> Iterator[None]:
    os.truncate(max((store / "commitlog").iterdir()), 4096)
    yield


@contextmanager
def held_lock(store: Path) -> Iterator[None]:
    with open(store / "lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        yield


@pytest.mark.jvm
@pytest.mark.parametrize(
    ("trouble", "said"),
    [(foreign_file, "load"), (short_segment, "load"), (held_lock, "Lock failed")],
)
def test_refuses_a_store(trouble: Callable[[Path], Any], said: str, tmp_path: Path) -> None:
    settings = golden.meta("special")["settings"]
    store = golden.unpack("special", tmp_path)
    with trouble(store), pytest.raises(StoreRefused, match=said):
        assert_rocketmq_reads(store, settings, golden.listing("special"))


def without_first(records: list[dict[str, Any]]) -> None:
    del records[0]


def twice_the_last(records: list[dict[str, Any]]) -> None:
    records.append(records[-1])


def other_body(records: list[dict[str, Any]]) -> None:
    records[7]["body"] = b"another"


def other_property(records: list[dict[str, Any]]) -> None:
    records[7]["properties"]["added"] = ""


def unknown_field(records: list[dict[str, Any]]) -> None:
    records[7]["reconsumeTime"] = 0


def no_word_of_the_queue(records: list[dict[str, Any]]) -> None:
    for record in records:
        del record["cq"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_first, "1 records nobody wrote, first at 0"),
        (twice_the_last, "records: RocketMQ has 295, expected 296"),
        (other_body, "record at 2059: body"),
        (other_property, "record at 2059: properties"),
        (unknown_field, "record at 2059: RocketMQ's listing has no 'reconsumeTime'"),
        (no_word_of_the_queue, "in no queue"),
    ],
)
def test_a_difference_is_noticed(change: Callable[[list[dict[str, Any]]], None], said: str) -> None:
    read, expected = golden.listing("special"), golden.listing("special")
    assert_same_records(read, expected)
    change(expected)
    with pytest.raises(AssertionError, match=said):
        assert_same_records(read, expected)
