"""A coordinator that dies at any line of a reset or of a deletion. No tests here.

One process forks a coordinator for each line: it forks before it has a thread.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import dying
from coordinator_child import INSIDE, Settings, address_of, endpoints_at, ledger_of

from cometmq.actors.coordination import groups, ledger, members, moves
from cometmq.actors.coordination.coordinator import CoordinatorActor
from cometmq.protocol.commands import (
    Command,
    CommitOffsets,
    CreateTopic,
    DeleteGroup,
    EndpointsChanged,
    FetchOffsets,
    GroupOffsets,
    GroupShare,
    JoinGroup,
    QueueKey,
    QueueOffset,
    QueueReset,
    ResetOffsets,
    Subscription,
    TopicInfo,
)
from cometmq.protocol.errors import GroupNotExist, NotOwner
from cometmq.protocol.wire.remote import RemoteRef

WATCHED = {
    "reset": {str(module.__file__) for module in (moves, members, ledger)},
    "delete": {str(module.__file__) for module in (groups, members)},
}
QUEUES = 2
BEFORE, AFTER = 50, 4
MOVES: dict[str, Command] = {
    "reset": ResetOffsets("g", [QueueReset("t", i, AFTER) for i in range(QUEUES)]),
    "delete": DeleteGroup("g", force=True),
}
PLACES = {"reset": AFTER, "delete": -1}  # where the group is then

See = Callable[[dying.Line], None]


class Tracing:
    """Sees every watched line of the coordinator's thread, from `begin` to `end`."""

    def __init__(self, see: See, watched: set[str]) -> None:
        self._see = see
        self._watched = watched
        self._armed = False
        threading.settrace(self._trace)

    def begin(self) -> None:
        self._armed = True

    def end(self) -> None:
        self._armed = False

    def _trace(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename not in self._watched:
            return None
        if event == "line" and self._armed:
            self._see((frame.f_code.co_filename, frame.f_lineno))
        return self._trace


class Coordinator:
    """In this process, until it ends."""

    def __init__(self, store: Path, commitlog: str) -> None:
        actor = CoordinatorActor.start(
            Settings(),
            store,
            commitlog_endpoint=commitlog,
            ledger_log=ledger_of(commitlog),
            name_server_endpoints=[],
            bind=INSIDE,
        )
        self.line = RemoteRef(address_of(actor))
        self.line.ask(EndpointsChanged(endpoints_at(address_of(actor))))

    def place(self, queue_id: int) -> int:
        answer = self.line.ask(FetchOffsets("g", [QueueKey("t", queue_id)]))
        assert isinstance(answer, GroupOffsets)
        return answer.offsets[0].queue_offset

    def commit(self, queue_id: int, place: int, epoch: int, member: str = "m") -> None:
        offsets = [QueueOffset("t", queue_id, place, epoch)]
        self.line.ask(CommitOffsets("g", offsets, member, seek=bool(member)))

    def take_on(self) -> list[int]:
        """A new member of that name has both queues, at BEFORE; the epochs."""
        answer = self.line.ask(JoinGroup("g", "m", [Subscription("t")]))
        assert isinstance(answer, GroupShare)
        for queue_id, epoch in enumerate(answer.epochs):
            self.commit(queue_id, BEFORE, epoch)
        return answer.epochs

    def is_fenced(self, queue_id: int, epoch: int) -> bool:
        try:
            self.commit(queue_id, BEFORE + 1, epoch)
        except (NotOwner, GroupNotExist):
            return True
        return False


def prepare(store: Path, commitlog: str) -> None:
    coordinator = Coordinator(store, commitlog)
    coordinator.line.ask(CreateTopic(TopicInfo("t", QUEUES, QUEUES)))


def move(store: Path, commitlog: str, name: str, see: See, note: Path) -> None:
    """After a look at what the last one has come to. The note has the epochs of before, and, in a
    second line, whether it was answered."""
    tracing = Tracing(see, WATCHED[name])
    coordinator = Coordinator(store, commitlog)
    if note.exists():
        check(coordinator, name, note)
    epochs = coordinator.take_on()
    note.write_text(" ".join(map(str, epochs)))
    tracing.begin()
    coordinator.line.ask(MOVES[name])
    with note.open("a") as file:
        file.write("\nanswered")
    tracing.end()


def check(coordinator: Coordinator, name: str, note: Path) -> None:
    """All was moved, or nothing; where it was moved, who owned it is fenced off."""
    epochs, *answered = note.read_text().split("\n")
    places = {coordinator.place(queue_id) for queue_id in range(QUEUES)}
    assert places in ({BEFORE}, {PLACES[name]}), places
    if answered:
        assert places == {PLACES[name]}
    if places == {PLACES[name]}:
        for queue_id, epoch in enumerate(map(int, epochs.split())):
            assert coordinator.is_fenced(queue_id, epoch)
    try:
        coordinator.line.ask(MOVES[name])  # once more is no harm
    except GroupNotExist:
        assert name == "delete"
    assert {coordinator.place(queue_id) for queue_id in range(QUEUES)} == {PLACES[name]}


def in_child(action: Callable[..., object], *arguments: object) -> int:
    return dying.in_child(partial(action, *arguments))


def lines_of(store: Path, commitlog: str, name: str, note: Path, told: int) -> None:
    """Write the lines that a move passes to a descriptor."""
    passed: Counter[dying.Line] = Counter()

    def see(line: dying.Line) -> None:
        passed[line] += 1

    move(store, commitlog, name, see, note)
    with os.fdopen(told, "w") as pipe:
        pipe.writelines(f"{file}\t{number}\n" for file, number in passed)


def die_everywhere(store: Path, commitlog: str, name: str, ready: Connection) -> None:
    """The whole test, in a process without threads; sends the count of lines it has died at."""
    note = store.parent / "note"
    store.mkdir()
    assert in_child(prepare, store, commitlog) == 0
    read, write = os.pipe()
    assert in_child(lines_of, store, commitlog, name, note, write) == 0
    os.close(write)
    with os.fdopen(read) as pipe:
        rows = [row.split("\t") for row in pipe]
    lines = [(file, int(number)) for file, number in rows]
    for line in lines:
        see = dying.dying_at(line, 1)
        status = in_child(move, store, commitlog, name, see, note)
        # 0: it comes there after the answer. Else what the one before has left was wrong.
        assert status in (dying.DIED, 0), (line, status)
    assert in_child(move, store, commitlog, name, see, note) in (dying.DIED, 0)
    ready.send(len(lines))
