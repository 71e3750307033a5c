"""A copy of books: what is packed of a store, and what becomes of any content that is laid."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dying
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cometmq.actors.coordination import files as coordination_files
from cometmq.actors.coordination.books import Books
from cometmq.actors.replication.group import state_copy as books_copy
from cometmq.actors.replication.group.state_copy import (
    STORE_FILES,
    CopyDamaged,
    Fate,
    lay_books,
    pack_books,
    stage_copy,
)
from cometmq.protocol.errors import DiskFull, ServiceNotAvailable, StoreDamaged, StoreError
from cometmq.protocol.ledger import Place
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter
from cometmq.shm.os import durable
from cometmq.shm.state import laid_books
from cometmq.shm.state.laid_books import ASIDE_DIR, BOOKS_FILE, MAKING_DIR, STAGED_DIR, needs_books
from cometmq.shm.state.laid_books import place_books as place
from cometmq.shm.state.ledger_mark import (
    LEDGER_FILE,
    NO_CONTENT,
    Mark,
    Marked,
    Snapshot,
    digest_of,
    read_mark,
    write_mark,
)

BEGIN = 7 << 20  # of the master's log
MEMBERS = b'{"groups":{"g":{"members":{"m":{"t":"*"}},"owners":{},"epochs":{}}},"highest":3}'
HOLDS = b'{"holds":{"h":{"physicalOffset":9,"expiresMs":0}}}'
POPPED = b'{"queues":[["g","t",0,1,5,[],[[77,1,2,9]]]]}'
ORDER = b'{"table":{"t@g":{1:{"o":[4,1],"popTime":5,"i":6,"h":7,"oe":6}}}}'
FILTERS = b"""{"filterDataByTopic":{"t":{"groupFilterData":{"g":{"consumerGroup":"g","topic":"t",
    "expression":"a > 1","expressionType":"SQL92","bornTime":5,"clientVersion":6}},"topic":"t"}}}"""


def offsets(offset: int) -> bytes:
    return b'{"dataVersion":{"counter":1},"offsetTable":{"t@g":{0:%d}}}' % offset


CONTENTS = {
    "topics.json": b'{"topicConfigTable":{"t":{"topicName":"t","readQueueNums":4,"perm":6}}}',
    "subscriptionGroup.json": b'{"subscriptionGroupTable":{"g":{"groupName":"g"}}}',
    "consumerOffset.json": offsets(42),
    "consumerMembers.json": MEMBERS,
    "holds.json": HOLDS,
    "popped.json": POPPED,
    "consumerOrderInfo.json": ORDER,
    "consumerFilter.json": FILTERS,
}
SNAPSHOT = 100, Place(5, 60)
NONE: tuple[Any, ...] = (set(), set(), {}, set(), set(), [], {}, {})


def write_books(store: Path, contents: dict[str, bytes]) -> None:
    """As a coordinator leaves them."""
    (store / "config").mkdir(parents=True, exist_ok=True)
    mark = Mark()
    for name, content in contents.items():
        if content:
            (store / "config" / name).write_bytes(content)
        mark = mark.with_file(name, Marked(contents=[Snapshot(digest_of(content), *SNAPSHOT)]))
    write_mark(store, mark)


@pytest.fixture
def master(tmp_path: Path) -> Path:
    store = tmp_path / "master"
    store.mkdir()
    write_books(store, CONTENTS)
    control = ControlFile.create(store / CONTROL_FILE, {})
    for counter in (Counter.WROTE, Counter.FLUSHED, Counter.DISPATCHED, Counter.MIN_OFFSET):
        control.own(counter).reset(BEGIN)
    return store


def books_of(store: Path) -> tuple[Any, ...]:
    """As a start reads the files."""
    books = Books(None, store, 1_000, 1_000)  # type: ignore[arg-type]
    return (
        {topic for topic, _ in books.topics.items()},
        set(books.groups.configs),
        {key: dict(books.offsets.queues(key)) for key in books.offsets.every_key()},
        {group for group, record in books.members.records() if record.members},
        set(books.holds.all()),
        coordination_files.table_of(books.popped),
        dict(books.takes.items()),
        books.filters.by_topic(),
    )


def everything(folder: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(folder.rglob("*"))
    }


def packed(files: list[Any], *, version: object = 1, log_begin: object = BEGIN) -> bytes:
    """With a CRC that holds."""
    body = msgspec.msgpack.encode([version, log_begin, files])
    return body + zlib.crc32(body).to_bytes(4, "big")


# --- there and back ---


def test_all_books_come(master: Path, tmp_path: Path) -> None:
    whole = books_of(master)
    assert all(whole)
    store = tmp_path / "store"
    write_books(store, {"topics.json": b'{"topicConfigTable":{"mine":{"topicName":"mine"}}}'})
    (store / "config" / "timercheck").write_bytes(b"of a log that is gone")
    assert needs_books(store, 0)
    lay_books(store, pack_books(master), BEGIN)
    assert books_of(store) == whole
    mark = read_mark(store)
    for name, content in CONTENTS.items():
        assert mark.files[name].contents == [Snapshot(digest_of(content), *SNAPSHOT)]
    assert sorted(path.name for path in (store / "config").iterdir()) == sorted(CONTENTS)
    left = {path.name for path in store.iterdir()}
    assert left == {"config", LEDGER_FILE, BOOKS_FILE}
    # They go with a log that begins where the master's did then, or before.
    assert not needs_books(store, BEGIN)
    assert not needs_books(store, 0)
    assert needs_books(store, BEGIN + 1)


def test_a_master_that_has_nothing(tmp_path: Path) -> None:
    master, store = tmp_path / "master", tmp_path / "store"
    for folder in (master, store):
        folder.mkdir()
    ControlFile.create(master / CONTROL_FILE, {})
    lay_books(store, pack_books(master), 0)
    assert books_of(store) == NONE
    assert not needs_books(store, 0)


def test_a_file_that_is_not_there_stays_away(master: Path, tmp_path: Path) -> None:
    (master / "config" / "popped.json").unlink()
    mark = read_mark(master)
    write_mark(
        master, mark.with_file("popped.json", Marked(contents=[Snapshot(NO_CONTENT, *SNAPSHOT)]))
    )
    store = tmp_path / "store"
    store.mkdir()
    lay_books(store, pack_books(master), BEGIN)
    assert not (store / "config" / "popped.json").exists()
    assert read_mark(store).files["popped.json"].contents == [Snapshot(NO_CONTENT, *SNAPSHOT)]


def test_the_files_of_the_books_are_those_that_are_copied(tmp_path: Path) -> None:
    books = Books(None, tmp_path, 10, 10)  # type: ignore[arg-type]
    kinds = {f"config/{each.file.path.name}": each.file._kind for each in books._files}
    copied = {name: file for name, file in STORE_FILES.items() if file.fate is Fate.COPIED}
    assert {name: file.kind for name, file in copied.items() if file.kind} == kinds
    assert copied.keys() - kinds.keys() == {LEDGER_FILE}
    assert all(file.why for file in STORE_FILES.values())


# --- while the files are replaced ---


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books_copy, "TRIES", 3)
    monkeypatch.setattr(books_copy, "PAUSE_S", 0.0)


def packed_offsets(content: bytes) -> tuple[bytes, int]:
    files = msgspec.msgpack.decode(content[:-4])[2]
    (found,) = [(each[1], each[2]) for each in files if each[0] == "consumerOffset.json"]
    return found


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    "where", ["before the mark", "after the mark", "in place", "done", "twice"]
)
def test_a_snapshot_that_takes_its_place_meanwhile(
    where: str, master: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the file and the mark the coordinator comes as far as that."""
    path = master / "config" / "consumerOffset.json"
    old = read_mark(master).files[path.name].contents
    new, newer = (Snapshot(digest_of(offsets(at)), at, Place(5, at)) for at in (200, 300))

    def go_on() -> None:
        write_mark(master, read_mark(master).with_file(path.name, Marked(contents=[*old, new])))
        if where == "after the mark":
            return
        path.write_bytes(offsets(200))
        if where == "in place":
            return
        marked = Marked(contents=[new], previous=old)
        if where == "twice":
            path.write_bytes(offsets(300))
            marked = Marked(contents=[newer], previous=[new])
        write_mark(master, read_mark(master).with_file(path.name, marked))

    real, done = books_copy._read, []

    def read(asked: Path) -> bytes:
        content = real(asked)
        if asked == path and not done and where != "before the mark":
            done.append(1)
            go_on()
        return content

    monkeypatch.setattr(books_copy, "_read", read)
    wanted = (offsets(300), 300) if where == "twice" else (offsets(42), 100)
    assert packed_offsets(pack_books(master)) == wanted


@pytest.mark.usefixtures("hurried")
def test_what_never_fits_is_an_error(master: Path) -> None:
    (master / "config" / "topics.json").write_bytes(b'{"topicConfigTable":{}}')
    with pytest.raises(ServiceNotAvailable, match=r"topics\.json"):
        pack_books(master)
    (master / "config" / "topics.json").unlink()
    with pytest.raises(ServiceNotAvailable, match=r"topics\.json"):
        pack_books(master)
    (master / LEDGER_FILE).write_bytes(b"{")
    with pytest.raises(StoreDamaged, match=LEDGER_FILE):
        pack_books(master)
    shutil.rmtree(master / "config")
    (master / CONTROL_FILE).unlink()
    with pytest.raises(StoreError, match="no broker is running"):
        pack_books(master)


@pytest.mark.usefixtures("hurried")
def test_a_damaged_file_that_a_start_has_replaced_by_its_bak(master: Path) -> None:
    path = master / "config" / "consumerOffset.json"
    path.rename(path.with_name(f"{path.name}.bak"))
    path.write_bytes(b"\0" * 100)
    assert packed_offsets(pack_books(master)) == (offsets(42), 100)
    mark = read_mark(master).files[path.name]
    # A .bak that is only the one before is no help: the ledger may not reach back so far.
    other = Snapshot(digest_of(offsets(43)), 200, Place(5, 200))
    marked = Marked(contents=[other], previous=mark.contents)
    write_mark(master, read_mark(master).with_file(path.name, marked))
    with pytest.raises(ServiceNotAvailable, match=path.name):
        pack_books(master)


@pytest.mark.usefixtures("hurried")
def test_holds_of_before_are_waited_for(master: Path) -> None:
    (master / "config" / "holds.json").unlink()
    marked = Marked(contents=[Snapshot(NO_CONTENT, *SNAPSHOT)])
    write_mark(master, read_mark(master).with_file("holds.json", marked))
    (master / "cometmq.holds").write_bytes(b'[["h",9,0]]')
    with pytest.raises(ServiceNotAvailable, match=r"holds\.json"):
        pack_books(master)


def test_more_than_is_copied(master: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(pack_books(master))
    monkeypatch.setattr(books_copy, "COPY_BYTES_MAX", size)
    assert len(pack_books(master)) == size
    for limit in (size - 1, 10):
        monkeypatch.setattr(books_copy, "COPY_BYTES_MAX", limit)
        with pytest.raises(StoreError, match=f"at most {limit}"):
            pack_books(master)


# --- hostile content ---


def refused(store: Path, content: bytes) -> None:
    before = everything(store)
    with pytest.raises(CopyDamaged):
        lay_books(store, content, 0)
    assert everything(store) == before


ROW = ["topics.json", CONTENTS["topics.json"], 1, 2, 3]
BAD: dict[str, bytes] = {
    "nothing": b"",
    "a CRC alone": zlib.crc32(b"").to_bytes(4, "big"),
    "another version": packed([ROW], version=2),
    "no version": packed([ROW], version="1"),
    "a log that begins nowhere": packed([ROW], log_begin=-1),
    "a log beyond all": packed([ROW], log_begin=1 << 63),
    "a path": packed([["../topics.json", *ROW[1:]]]),
    "an absolute path": packed([["/tmp/topics.json", *ROW[1:]]]),
    "an empty name": packed([["", *ROW[1:]]]),
    "a name with a zero": packed([["topics.json\0", *ROW[1:]]]),
    "a file that is not copied": packed([["delayOffset.json", *ROW[1:]]]),
    "the mark as a file": packed([["cometmq.ledger", *ROW[1:]]]),
    "a file twice": packed([ROW, ROW]),
    "a name that is no text": packed([[b"topics.json", *ROW[1:]]]),
    "a row too short": packed([ROW[:-1]]),
    "a row too long": packed([[*ROW, 4]]),
    "a negative position": packed([[*ROW[:2], -1, 2, 3]]),
    "a number beyond all": packed([[*ROW[:4], 1 << 64 - 1]]),
    "a number that is none": packed([[*ROW[:4], 1.5]]),
    "no JSON": packed([["topics.json", b"\0" * 100, 1, 2, 3]]),
    "JSON of another kind": packed([["topics.json", b'{"topicConfigTable":[]}', 1, 2, 3]]),
    "members of another kind": packed([["consumerMembers.json", b'{"groups":{"g":1}}', 1, 2, 3]]),
    "deep JSON": packed([["topics.json", b"[" * 100_000, 1, 2, 3]]),
    "deep MessagePack": (body := b"\x91" * 100_000) + zlib.crc32(body).to_bytes(4, "big"),
    "a length that is not there": (
        (body := b"\x93\x01\x00\xdd\xff\xff\xff\xff") + zlib.crc32(body).to_bytes(4, "big")
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_refused(what: str, tmp_path: Path) -> None:
    write_books(tmp_path, CONTENTS)
    refused(tmp_path, BAD[what])


def test_too_much_is_refused_unread(
    master: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = pack_books(master)
    monkeypatch.setattr(books_copy, "COPY_BYTES_MAX", len(content) - 1)
    monkeypatch.setattr(books_copy, "_decode", None)
    store = tmp_path / "store"
    store.mkdir()
    refused(store, content)


json_bytes = st.sampled_from([b"", b"{}", b"[]", b"{", *CONTENTS.values()]) | st.binary(max_size=60)
numbers = st.integers(-(1 << 63), (1 << 64) - 1)
rows = st.tuples(st.sampled_from([*CONTENTS, "../x"]) | st.text(max_size=9), json_bytes, numbers,
                 numbers, numbers)  # fmt: skip
contents = (
    st.binary(max_size=200)
    | st.binary(max_size=200).map(lambda body: body + zlib.crc32(body).to_bytes(4, "big"))
    | st.builds(packed, st.lists(rows, max_size=4), log_begin=numbers)
)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=contents)
@pytest.mark.slow
def test_whatever_comes(content: bytes, tmp_path: Path) -> None:
    """It is refused, and nothing is changed; or it is laid, and a start can read it."""
    store = tmp_path / "store"
    shutil.rmtree(store, ignore_errors=True)
    write_books(store, CONTENTS)
    (tmp_path / "beside").mkdir(exist_ok=True)
    before = everything(store)
    try:
        lay_books(store, content, 0)
    except CopyDamaged:
        assert everything(store) == before
    else:
        books_of(store)
        assert set(everything(store)) <= {
            "config", LEDGER_FILE, BOOKS_FILE, *(f"config/{name}" for name in CONTENTS)
        }  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"store", "beside"}


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_damage_is_noticed(data: st.DataObject, master: Path, tmp_path: Path) -> None:
    whole = pack_books(master)
    store = tmp_path / "store"
    store.mkdir(exist_ok=True)
    at = data.draw(st.integers(0, len(whole) - 1))
    flip = data.draw(st.integers(1, 255))
    damaged = bytes([*whole[:at], whole[at] ^ flip, *whole[at + 1 :]])
    for content in (damaged, whole[:at]):
        refused(store, content)


# --- the store that gets them ---


def test_no_link_is_followed(master: Path, tmp_path: Path) -> None:
    content = pack_books(master)
    outside, store = tmp_path / "outside", tmp_path / "store"
    write_books(outside, CONTENTS | {"consumerOffset.json": offsets(7)})
    store.mkdir()
    kept = everything(outside)
    for name in ("config", MAKING_DIR, STAGED_DIR, ASIDE_DIR):
        (store / name).symlink_to(outside / "config")
    for name in (LEDGER_FILE, BOOKS_FILE, f"{BOOKS_FILE}.tmp"):
        (store / name).symlink_to(outside / LEDGER_FILE)
    lay_books(store, content, BEGIN)
    assert everything(outside) == kept
    assert not any(path.is_symlink() for path in store.rglob("*"))
    assert books_of(store) == books_of(master)


def test_books_that_do_not_reach_the_log(master: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    write_books(store, {"holds.json": HOLDS})
    with pytest.raises(StoreError, match="ask the master"):
        place(store, 0)
    stage_copy(store, pack_books(master))
    before = everything(store)
    with pytest.raises(StoreError, match=str(BEGIN + 1)):
        place(store, BEGIN + 1)
    assert everything(store) == before
    place(store, BEGIN)
    assert books_of(store) == books_of(master)
    with pytest.raises(StoreError, match="ask the master"):
        place(store, BEGIN)  # they are used up


@pytest.mark.parametrize("text", [b"", b"{", b'{"log_begin":-1}', b'{"log_begin":9,"format":2}'])
def test_a_marker_that_says_nothing(text: bytes, tmp_path: Path) -> None:
    (tmp_path / BOOKS_FILE).write_bytes(text)
    assert needs_books(tmp_path, 0)


def test_a_full_disk(master: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, store = pack_books(master), tmp_path / "store"
    store.mkdir()
    count, real = 0, durable.write_beside

    def write_beside(path: Path, *arguments: Any, **named: Any) -> Path:
        nonlocal count
        count += 1
        if count == room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *arguments, **named)

    monkeypatch.setattr(durable, "write_beside", write_beside)
    room = 0
    while room < len(CONTENTS) + 2:  # the mark, and what says that they were laid
        room, count = room + 1, 0
        with pytest.raises(DiskFull):
            lay_books(store, content, BEGIN)
        assert not everything(store)
    count, room = 0, 0
    lay_books(store, content, BEGIN)
    assert books_of(store) == books_of(master)


# --- killed ---

WATCHED = frozenset(str(module.__file__) for module in (laid_books, durable))


@pytest.mark.slow
@pytest.mark.parametrize("before", ["nothing", "of its own", "of a master"])
def test_killed_at_any_line(before: str, master: Path, tmp_path: Path) -> None:
    """A start finds no books, those of before, or all; and the copy is asked for until it does."""
    base, work = tmp_path / "base", tmp_path / "work"
    base.mkdir()
    old = NONE
    if before != "nothing":
        write_books(base, {"consumerOffset.json": offsets(7)})
        old = books_of(base)
    if before == "of a master":
        (base / BOOKS_FILE).write_bytes(b'{"log_begin":%d,"format":1}' % (BEGIN - 1))
    content, new = pack_books(master), books_of(master)
    shutil.copytree(base, work)
    lay: Callable[[], None] = partial(lay_books, work, content, BEGIN)
    lines = dying.lines_of(lay, WATCHED)
    assert books_of(work) == new
    assert len(lines) > 60
    seen = []
    # Each line of laid_books.py the first time, and some passes of all, mostly writing and syncing.
    passes = [(line, nth) for line, count in lines.items() for nth in range(1, count + 1)]
    first = [each for each in passes if each[1] == 1 and each[0][0] == laid_books.__file__]
    for line, nth in [*first, *dying.some_of(passes, 40)]:
        shutil.rmtree(work)
        shutil.copytree(base, work)
        assert dying.die_at(lay, WATCHED, line, nth) == dying.DIED, (line, nth)
        found = books_of(work)
        assert found in (old, NONE, new), (line, nth)
        seen.append(found)
        if not needs_books(work, BEGIN):
            assert found == new, (line, nth)
            assert read_mark(work).newest() == SNAPSHOT[1]
        lay()
        assert books_of(work) == new, (line, nth)
        assert not needs_books(work, BEGIN)
        assert {path.name for path in work.iterdir()} == {"config", LEDGER_FILE, BOOKS_FILE}
    assert old in seen
    assert NONE in seen
    assert new in seen
