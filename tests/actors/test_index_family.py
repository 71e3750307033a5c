"""Queries by key to a running broker: while it is used, after kills, on RocketMQ's stores."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cli_process
import golden
import pytest
from family import RunningBroker, send_batch
from inside import wait_indexed
from interop import rocketmq
from patience import patient

from cometmq.client import Admin
from cometmq.protocol.commands import QueryMessages, QueryResult
from cometmq.protocol.errors import CometError, MessageNotFound, NoPermission
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.derived.index_file import list_index_files, read_header
from cometmq.shm.kernel.codec import Message, decode
from cometmq.shm.live.control import Counter
from cometmq.shm.os.files import Checkpoint

SMALL_INDEX = {"maxHashSlotNum": 100, "maxIndexNum": 500}
KEYS = 7


def query(broker: RunningBroker, topic: str, key: str, **kinds: Any) -> list[Message]:
    """What the first reader finds, once all that is written is indexed."""
    wait_indexed(broker)
    command = QueryMessages(topic, key, **kinds)
    answer, payload = broker.reader.ask(command, timeout_s=patient(30))
    assert isinstance(answer, QueryResult)
    messages = decode(payload[0].buffer) if payload else []
    assert len(messages) == answer.count
    return messages


def wait_logged(broker: RunningBroker, text: str) -> None:
    """The dispatcher serves before it looks at its index."""
    deadline = time.monotonic() + patient(60)
    while text not in broker.log:
        assert time.monotonic() < deadline, broker.log
        time.sleep(0.005)


class Sent:
    """Batches with keys that come again and again, and all that was acknowledged of them."""

    def __init__(self, broker: RunningBroker) -> None:
        self.by_key: dict[str, list[bytes]] = defaultdict(list)
        self.count = 0
        broker.create_topic("t", 1)

    def send(self, line: Channel, batches: int) -> None:
        for _ in range(batches):
            key = f"k{self.count % KEYS}"
            bodies = [b"%d %d" % (self.count, number) for number in range(20)]
            try:
                send_batch(line, "t", 0, bodies, keys=f"{key} every", timeout_s=patient(5))
            except CometError as error:
                if not error.retriable:
                    raise
                continue
            self.by_key[key] += bodies
            self.count += 1

    def check(self, broker: RunningBroker) -> None:
        """Every acknowledged message is found by its key, once."""
        for key, bodies in self.by_key.items():
            messages = query(broker, "t", key, max_count=1024)
            found = [message.body for message in messages]
            assert len({message.physical_offset for message in messages}) == len(found)
            assert set(found) >= set(bodies[-1024:]), key
            offsets = [message.physical_offset for message in messages]
            assert offsets == sorted(offsets)
        last = query(broker, "t", "every", max_count=1)
        assert query(broker, "t", last[0].msg_id, unique=True)[0].body == last[0].body


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RunningBroker]:
    with RunningBroker(tmp_path / "store", SMALL_INDEX) as running:
        yield running


def test_by_key_time_and_id(broker: RunningBroker) -> None:
    sent = Sent(broker)
    sent.send(broker.commitlog, 40)
    sent.check(broker)
    every = query(broker, "t", "every", max_count=1024)
    assert len(every) == 800
    newest = query(broker, "t", "every", max_count=3)
    assert [message.body for message in newest] == [message.body for message in every[-3:]]
    times = [message.store_timestamp_ms for message in every]
    begin, end = times[100], times[600]
    wanted = [m.body for m in every if begin <= m.store_timestamp_ms <= end]
    between = query(broker, "t", "every", max_count=1024, begin_ms=begin, end_ms=end)
    assert [message.body for message in between] == wanted
    assert query(broker, "t", "every", begin_ms=times[-1] + 1) == []
    assert query(broker, "t", "nobody's") == []
    assert query(broker, "other", "every") == []
    assert query(broker, "t", every[0].msg_id) == []  # that is no key, but an id


def test_the_same_hash_is_not_the_same_key(broker: RunningBroker) -> None:
    broker.create_topic("t", 1)
    for key in ("Aa", "BB", "Aa"):
        broker.send("t", 0, [key.encode()], keys=key)
    assert [message.body for message in query(broker, "t", "Aa", max_count=2)] == [b"Aa", b"Aa"]
    assert [message.body for message in query(broker, "t", "BB")] == [b"BB"]


def test_full_files_are_flushed_and_said_so(broker: RunningBroker) -> None:
    Sent(broker).send(broker.commitlog, 40)  # 2,400 entries of at most 499 a file
    wait_indexed(broker)
    store = broker.store
    names = list_index_files(store)
    assert len(names) == 5
    assert broker.close() == 0
    header = read_header(store / "index" / names[3])
    assert header is not None
    assert Checkpoint(store).words["index_msg_timestamp"] == header.end_timestamp
    assert header.index_count == 500


@pytest.fixture(scope="module", params=["orderly", "killed"])
def ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Sent]:
    """A store of five files of the index, and how its broker has ended."""
    store = tmp_path_factory.mktemp("ended") / "store"
    with RunningBroker(store, SMALL_INDEX) as broker:
        sent = Sent(broker)
        sent.send(broker.commitlog, 40)
        wait_indexed(broker)
        if request.param == "killed":
            broker.kill_all()
    return store, sent


@pytest.mark.parametrize("lost", ["nothing", "oldest", "middle", "newest", "all", "bytes", "size"])
@pytest.mark.slow
def test_after_a_restart_all_is_found(ended: tuple[Path, Sent], lost: str, tmp_path: Path) -> None:
    store, sent = Path(shutil.copytree(ended[0], tmp_path / "store")), copy.deepcopy(ended[1])
    files = [store / "index" / name for name in list_index_files(store)]
    assert len(files) == 5
    damage(files, lost)
    with RunningBroker(store, SMALL_INDEX) as broker:
        sent.check(broker)
        sent.send(broker.commitlog, 10)
        sent.check(broker)


def damage(files: list[Path], lost: str) -> None:
    if lost == "all":
        for path in files:
            path.unlink()
        files[0].parent.rmdir()
    elif lost == "bytes":
        raw = bytearray(files[2].read_bytes())
        raw[:40] = os.urandom(40)
        files[2].write_bytes(raw)
    elif lost == "size":
        os.truncate(files[1], 1000)
    elif lost != "nothing":
        files[{"oldest": 0, "middle": 2, "newest": -1}[lost]].unlink()


def test_a_chain_that_is_damaged_is_built_again(broker: RunningBroker) -> None:
    """Noticed by the query that meets it; the next ones find everything."""
    sent = Sent(broker)
    sent.send(broker.commitlog, 40)
    wait_indexed(broker)
    name = list_index_files(broker.store)[1]
    with (broker.store / "index" / name).open("r+b") as file:
        file.seek(40 + 400 + 20)
        file.write(b"\x7f" * 20 * 499)
    query(broker, "t", "every", max_count=1024)
    deadline = time.monotonic() + patient(60)
    while name in list_index_files(broker.store):
        assert time.monotonic() < deadline, broker.log
        time.sleep(0.01)
    sent.check(broker)


@pytest.mark.slow
def test_killed_while_it_indexes(broker: RunningBroker) -> None:
    """kill -9 of the dispatcher under load, again and again: nothing is lost, nothing doubled."""
    sent = Sent(broker)
    over = threading.Event()

    def load() -> None:
        with Channel(broker.endpoints.commitlog) as line:
            while not over.is_set():
                sent.send(line, 1)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for _ in range(4):
            before = sent.count
            while sent.count < before + 30:
                time.sleep(0.005)
            broker.kill("dispatcher")
    finally:
        over.set()
        thread.join(patient(30))
    sent.check(broker)


def test_off(tmp_path: Path) -> None:
    """messageIndexEnable: no file, and a query says why; switched on, all is indexed."""
    store = tmp_path / "store"
    with RunningBroker(store, {**SMALL_INDEX, "messageIndexEnable": False}) as broker:
        sent = Sent(broker)
        sent.send(broker.commitlog, 3)
        with pytest.raises(NoPermission, match="messageIndexEnable"):
            broker.reader.ask(QueryMessages("t", "k1"), timeout_s=patient(30))
        assert not (store / "index").exists()
    with RunningBroker(store, SMALL_INDEX) as broker:
        sent.check(broker)


def test_sizes_of_the_default(tmp_path: Path) -> None:
    """RocketMQ's file size; of the disk only what is needed."""
    default = {"maxHashSlotNum": 5_000_000, "maxIndexNum": 20_000_000}
    with RunningBroker(tmp_path / "store", default) as broker:
        assert list_index_files(broker.store) == []
        sent = Sent(broker)
        sent.send(broker.commitlog, 3)
        sent.check(broker)
        (name,) = list_index_files(broker.store)
        status = (broker.store / "index" / name).stat()
        assert status.st_size == 420_000_040
        assert status.st_blocks * 512 < 26 << 20


# --- stores of RocketMQ ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*golden.CLEAN, "loghub-abort"])
@pytest.mark.slow
def test_golden_stores(name: str, tmp_path: Path) -> None:
    """Opened by a broker of ours: what RocketMQ found is found, and all that a scan finds."""
    meta = golden.meta(name)
    store = golden.unpack(name, tmp_path)
    listing = {row["physicalOffset"]: row for row in golden.listing(name)}
    with RunningBroker(store, {**meta["settings"], "maxMessageSize": 8_000}) as broker:
        for asked in meta["queries"]["queryMessage"]:
            topic, key, begin, end = (asked[each] for each in ("topic", "key", "begin", "end"))
            messages = query(broker, topic, key, max_count=1024, begin_ms=begin, end_ms=end)
            messages += query(
                broker, topic, key, max_count=1024, begin_ms=begin, end_ms=end, unique=True
            )
            found = {message.physical_offset for message in messages}
            wanted = {
                at
                for at in asked["physicalOffsets"]
                if at in listing and has_key(listing[at], topic, key, begin, end)
            }
            assert found >= wanted, asked
            assert found == {
                at for at, row in listing.items() if has_key(row, topic, key, begin, end)
            }, asked  # fmt: skip


def has_key(row: dict[str, Any], topic: str, key: str, begin: int, end: int) -> bool:
    properties = row["properties"]
    if row["topic"] != topic or not begin <= row["storeTimestamp"] <= end:
        return False
    if row["sysFlag"] & 12 == 12:
        return False
    return key == properties.get("UNIQ_KEY") or key in properties.get("KEYS", "").split(" ")


@pytest.mark.jvm
@pytest.mark.timeout(rocketmq.FETCH_TIMEOUT_S + 120)
@pytest.mark.slow
def test_rocketmq_finds_what_we_indexed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with RunningBroker(store, SMALL_INDEX) as broker:
        sent = Sent(broker)
        sent.send(broker.commitlog, 40)
        ours = {key: query(broker, "t", key) for key in sent.by_key}
        last = query(broker, "t", "every", max_count=1)[0]
    forever = (1 << 63) - 1
    listing = rocketmq.list_store(
        store,
        segment_bytes=1 << 20,
        queue_segment_bytes=2_000,
        settings=SMALL_INDEX,
        queries={
            "queryMessage": [
                {"topic": "t", "key": key, "maxNum": 64, "begin": 0, "end": forever}
                for key in (*ours, last.msg_id)
            ]
        },
    )
    answers = {row["key"]: row["physicalOffsets"] for row in listing["queries"]["queryMessage"]}
    assert answers.pop(last.msg_id) == [last.physical_offset]
    assert answers == {key: [m.physical_offset for m in found] for key, found in ours.items()}


# --- client and command line ----------------------------------------------------------------------


@pytest.mark.slow
def test_admin_and_command_line(broker: RunningBroker) -> None:
    sent = Sent(broker)
    sent.send(broker.commitlog, 8)
    wait_indexed(broker)
    server = broker.ready.name_server
    with Admin(server) as admin:
        every = admin.query_messages("t", "every", max_count=1000)
        assert len(every) == 160
        newest = every[-1]
        assert admin.get_message(newest.msg_id, topic="t").body == newest.body
        assert admin.get_message(newest.offset_msg_id, topic="t").body == newest.body
        begin = every[20].store_timestamp_ms
        since = admin.query_messages("t", "every", begin=begin, max_count=1000)
        assert [m.body for m in since] == [m.body for m in every if m.store_timestamp_ms >= begin]
        with pytest.raises(MessageNotFound, match="say in which topic"):
            admin.get_message(newest.msg_id)
        with pytest.raises(MessageNotFound, match="topic t has no"):
            admin.get_message("nonsense", topic="t")
        beyond = "F" * 32  # what would be the physical offset is no Java long
        with pytest.raises(MessageNotFound, match="say in which topic"):
            admin.get_message(beyond)
        with pytest.raises(MessageNotFound, match="topic t has no"):
            admin.get_message(beyond, topic="t")
    check_command_line(server, newest)


def check_command_line(server: str, newest: Message) -> None:
    asked = ("msg", "query", "--name-server", server, "-t", "t", "--key", "k0")
    done = cli_process.output_of(*asked, "-n", "3", "-f", "%s\\n")
    assert done.splitlines() == [b"7 17", b"7 18", b"7 19"]
    assert cli_process.json_of(*asked, "--from", "1h")[-1]["body"] == "7 19"
    assert cli_process.json_of(*asked, "--to", "1h") == []
    assert cli_process.run(*asked, "--from", "17").returncode == 2
    asked = ("msg", "get", "--name-server", server, newest.msg_id)
    assert cli_process.output_of(*asked, "-t", "t", "-f", "%s") == newest.body
    assert b"say in which topic" in cli_process.run(*asked).stderr


def test_without_room_for_a_file(tmp_path: Path) -> None:
    """A disk that an index file does not fit on: messages go on, and the end is in order."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "cometmq-test", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a full disk, which needs a mount")
    try:
        default = {"maxHashSlotNum": 5_000_000, "maxIndexNum": 20_000_000}
        with RunningBroker(folder / "store", default) as broker:
            broker.create_topic("t", 1)
            sent = broker.send("t", 0, [b"x"] * 10)
            broker.assert_stored(sent)
            assert list_index_files(broker.store) == []
            assert broker.close() == 0
            broker.until_logged("no room for index entries")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("end", ["in order", "killed"])
@pytest.mark.slow
def test_a_log_without_keys_is_not_read_again(end: str, tmp_path: Path) -> None:
    """Nothing but `cometmq.indexed` tells that it has been read; it does not outlive its files."""
    store = tmp_path / "store"
    with RunningBroker(store, SMALL_INDEX) as broker:
        broker.create_topic("t", 1)
        broker.send("t", 0, [b"with"], keys="a")
        broker.send("t", 0, [b"without"] * 500)
        wait_indexed(broker)
        wrote = broker.counter(Counter.WROTE)
        if end == "killed":
            broker.finish("dispatcher")  # which writes the mark, as every 64 MiB would
            broker.kill_all()
    with RunningBroker(store, SMALL_INDEX) as broker:
        wait_logged(broker, f"indexing from {wrote} to {wrote}")
        assert [message.body for message in query(broker, "t", "a")] == [b"with"]
        broker.kill_all()
    for name in list_index_files(store):
        (store / "index" / name).unlink()
    with RunningBroker(store, SMALL_INDEX) as broker:
        wait_logged(broker, f"indexing from 0 to {wrote}")
        assert [message.body for message in query(broker, "t", "a")] == [b"with"]
