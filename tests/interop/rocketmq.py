"""Apache RocketMQ's published store classes, as a judge of the files that CometMQ writes.

    from interop.rocketmq import assert_rocketmq_reads

    def test_rocketmq_reads_what_we_wrote(tmp_path: Path) -> None:
        acknowledged = write_a_store(tmp_path)
        assert_rocketmq_reads(tmp_path, settings, acknowledged)

The classes are those of a release, fetched once by the ordinary `mvn` into a cache directory
(`$COMETMQ_CACHE`, else `~/.cache/cometmq`). Each call below is one run of a JVM: some five seconds,
three of which RocketMQ spends in its shutdown. A test that calls one of them is to be marked `jvm`
and is skipped, loudly, where there is no JVM or the classes cannot be had.
"""

from __future__ import annotations

import base64
import functools
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import golden
import jvm
import pytest
from patience import patient

from cometmq.bench.peers import maven
from cometmq.bench.peers.maven import Bundle, NotAvailable

VERSION = "5.3.3"
STORE = Bundle(f"rocketmq-store-{VERSION}", (f"org.apache.rocketmq:rocketmq-store:{VERSION}",))
FETCH_TIMEOUT_S = maven.FETCH_TIMEOUT_S  # for tests that may be the first to fetch
HELPER = Path(__file__).with_name("StoreLister.java")
RUN_TIMEOUT_S = patient(
    110
)  # below the limit of a test, so that the reason is seen and not only a timeout
REFUSED = 3  # StoreLister's exit code
# RocketMQ looks at all network interfaces before it opens anything, and cannot do that while one
# goes: those of tests that have a network of their own do.
INTERFACE_GONE = 'because "localHost" is null'
STARTS_MAX = 5


class StoreRefused(Exception):
    """RocketMQ does not open the directory: a file of the wrong size, or its lock is held.

    Holds what RocketMQ said. It locks after it has recovered, so the files may have been changed.
    """


# Getting RocketMQ


def compile_helper() -> Path:
    """The directory of StoreLister's classes; each content of it has its own."""
    return STORE.classes([HELPER])


@functools.cache
def _why_not() -> str | None:
    """Asked once a session, so that a machine without a network waits for Maven only once."""
    try:
        compile_helper()
    except NotAvailable as why:
        return str(why)
    return None


def require() -> None:
    """Skips the running test if RocketMQ cannot be run here."""
    why_not = _why_not()
    if why_not is not None:
        pytest.skip(f"the files against RocketMQ {VERSION}: {why_not}")


# Running it


def list_store(
    store_dir: Path,
    *,
    segment_bytes: int,
    queue_segment_bytes: int,
    queries: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Opens the store with RocketMQ, reads all of it, and closes it cleanly.

    RocketMQ recovers, and so may change, what it opens: give it a copy. Without queries the index
    is off: where `abort` lies, RocketMQ then drops the newest index files and makes no new ones.
    Raises StoreRefused. Skips the test if there is no RocketMQ.

    Returns:
        messages: one mapping a record, in CommitLog order; `body` in base64, `cq` its
            ConsumeQueue entry (None: no queue has it), `bodyCrcOk` and `foundAt` only if wrong.
        queues, queuesAfterLoad: minOffset and maxOffset of each queue, and as they stood before
            dispatch started.
        unreadable: the queue offsets between min and max for which getMessage returned nothing.
        minPhyOffset, maxPhyOffset, logReadTo: the log's bounds, and how far it could be walked.
        lastExitOk, abortLeft: whether `abort` was missing before, and whether it is there now.
        queries: the given ones, each with RocketMQ's answer added.
    """
    request: dict[str, Any] = {"mode": "list"}
    if queries is not None:
        request["queries"] = queries
    request["settings"] = {
        "messageIndexEnable": queries is not None,
        **(settings or {}),
        "mappedFileSizeCommitLog": segment_bytes,
        "mappedFileSizeConsumeQueue": queue_segment_bytes,
    }
    messages, summary = _run(store_dir, request)
    return {**summary, "messages": sorted(messages, key=_place)}


def append_messages(
    store_dir: Path,
    settings: Mapping[str, Any],
    topic: str,
    bodies: Iterable[bytes],
    *,
    queues: int = 1,
    leave_open: bool = False,
    compress: str | None = None,
) -> list[dict[str, Any]]:
    """Has RocketMQ go on with the store: puts one message a body, round robin over the queues.

    Message i has the tag `tag<i % 3>`, the key `key<i>` and a unique key. `leave_open` halts the
    JVM after the last acknowledgement, and so leaves `abort`, and maybe queues behind the log.
    `compress` is the name of what its client compresses bodies by.
    Returns what RocketMQ acknowledged, in that order.
    """
    encoded = [base64.b64encode(body).decode() for body in bodies]
    request = {
        "mode": "leave-open" if leave_open else "append",
        "settings": settings,
        "append": {
            "topic": topic,
            "queues": queues,
            "bodies": encoded,
            **({"compress": compress} if compress else {}),
        },
    }
    acknowledged, summary = _run(store_dir, request)
    assert len(acknowledged) == len(encoded), (len(acknowledged), len(encoded))
    assert leave_open or not summary["abortLeft"]
    return acknowledged


def _run(store_dir: Path, request: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One run of StoreLister: the lines it wrote, and its summary."""
    require()
    flags = ["-Xmx512m", *jvm.SMALL]
    for _ in range(STARTS_MAX):
        done = subprocess.run(
            STORE.java("StoreLister", compile_helper(), flags=flags),
            input=json.dumps({**request, "storeDir": str(store_dir)}).encode(),
            capture_output=True,
            timeout=RUN_TIMEOUT_S,
        )
        logged = done.stderr.decode(errors="replace")
        if done.returncode == 0 or INTERFACE_GONE not in logged:
            break
    if done.returncode == REFUSED:
        raise StoreRefused(logged)
    # Not splitlines(): a property may hold any of the characters that would also end a line there.
    lines = [json.loads(line) for line in done.stdout.split(b"\n") if line]
    assert done.returncode == 0, f"StoreLister failed:\n{logged}"
    assert lines, f"StoreLister wrote nothing:\n{logged}"
    assert "summary" in lines[-1], f"StoreLister's answer is cut off:\n{logged}"
    return lines[:-1], lines[-1]["summary"]


# Comparing


def assert_rocketmq_reads(
    store_dir: Path,
    settings: Mapping[str, Any],
    expected: Sequence[Mapping[str, Any]],
    *,
    unreadable: Iterable[tuple[str, int, int]] = (),
) -> dict[str, Any]:
    """RocketMQ opens the store and finds exactly the expected records, in log and queues.

    Args:
        settings: by RocketMQ's names; needs both segment sizes.
        expected: one mapping a record, in any order, with at least `physicalOffset`. Every field
            given is compared (their names: see `list_store`); `body` may be bytes or base64.
            A record without `cq` is expected to be in its queue; say `cq: None` if it is in none.
        unreadable: (topic, queueId, queueOffset) of queue entries that point at no message.

    Returns the listing, for further questions.
    """
    listing = list_store(
        store_dir,
        segment_bytes=settings["mappedFileSizeCommitLog"],
        queue_segment_bytes=settings["mappedFileSizeConsumeQueue"],
        settings=settings,
    )
    assert_same_records(listing["messages"], expected)
    gaps = {(gap["topic"], gap["queueId"], gap["queueOffset"]) for gap in listing["unreadable"]}
    assert gaps == set(unreadable), f"RocketMQ cannot read these queue offsets: {sorted(gaps)}"
    _same("end of the log walk", listing["logReadTo"], listing["maxPhyOffset"])
    assert not listing["abortLeft"], "RocketMQ could not close the store cleanly"
    return listing


def assert_same_records(
    read: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]
) -> None:
    """The comparison of `assert_rocketmq_reads`; `read` is in full, `expected` may have less."""
    read_at = {_place(record): record for record in read}
    expected_at = {_place(record): record for record in expected}
    missing = sorted(expected_at.keys() - read_at.keys())
    surplus = sorted(read_at.keys() - expected_at.keys())
    assert not missing, f"{len(missing)} records not found by RocketMQ, first at {missing[0]}"
    assert not surplus, f"{len(surplus)} records nobody wrote, first at {surplus[0]}"
    _same("records", len(read), len(expected))  # two at one place
    for at, wanted in expected_at.items():
        _assert_same_fields(at, read_at[at], wanted)


def _place(record: Mapping[str, Any]) -> int:
    """Where it lies in the log: what the record itself says of that, unless that is wrong."""
    place: int = record.get("foundAt", record["physicalOffset"])
    return place


def _assert_same_fields(at: int, read: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert "cq" in wanted or read["cq"] is not None, f"record at {at}: in no queue"
    for wrong in ("bodyCrcOk", "foundAt"):
        assert wrong in wanted or wrong not in read, f"record at {at}: {wrong} = {read[wrong]}"
    for field, value in wanted.items():
        assert field in read, f"record at {at}: RocketMQ's listing has no {field!r}"
        _same(f"record at {at}: {field}", _plain(field, read[field]), _plain(field, value))


def _same(what: str, read: Any, wanted: Any) -> None:
    assert read == wanted, f"{what}: RocketMQ has {read!r}, expected {wanted!r}"


def _plain(field: str, value: Any) -> Any:
    """A value in the one form in which it can be compared."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if field in ("bornHost", "storeHost"):  # one IPv6 address has several spellings
        return golden.host(value)
    return value
