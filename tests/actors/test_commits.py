"""Many commits in one poll batch: each is checked, and answered once, when the ledger has it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pykka
import pytest
import zmq
from coordinator_child import (
    ANYWHERE,
    Child,
    FakeCommitlog,
    FakeLedger,
    Settings,
    address_of,
    endpoints_at,
    ledger_of,
    running,
)
from patience import patient

from cometmq.actors.coordination.coordinator import CoordinatorActor
from cometmq.actors.runtime.guard import Unforeseen
from cometmq.actors.tables.group_share import ConsumerGroup
from cometmq.protocol import frames
from cometmq.protocol.commands import (
    Command,
    CommitOffsets,
    CreateTopic,
    DeleteGroup,
    Done,
    EndpointsChanged,
    Failed,
    FetchOffsets,
    GroupOffsets,
    GroupShare,
    JoinGroup,
    LeaveGroup,
    Ping,
    Pong,
    QueueKey,
    QueueOffset,
    Subscription,
    TopicInfo,
)
from cometmq.protocol.errors import DiskFull, NotOwner, SystemBusy
from cometmq.protocol.ledger import OffsetSet, decode_entry
from cometmq.protocol.wire.line import Line

WAIT_MS = patient(60_000)
UNDER_WAY = 100
QUEUES = 4
GROUPS = ("g", "h", "new")


class Connection:
    """One client's connection, by which it sends without waiting for answers."""

    def __init__(self, address: str, *, by_line: bool = False) -> None:
        self._number = 0
        self._by_line = by_line
        if by_line:
            self._line = Line(address, os.getuid())
            self._answers: list[bytes] = []
        else:
            self._dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
            self._dealer.linger, self._dealer.rcvtimeo = 0, WAIT_MS
            self._dealer.connect(address)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        if self._by_line:
            self._line.shut()
        else:
            self._dealer.close()

    def send(self, command: Command) -> int:
        """Return the request id."""
        self._number += 1
        head = frames.pack(self._number, command)
        if self._by_line:
            self._line.send(head)
        else:
            self._dealer.send(head)
        return self._number

    def receive(self) -> tuple[int, Command]:
        if self._by_line:
            while not self._answers:
                self._answers += [head for head, _ in self._line.receive(WAIT_MS / 1000) or ()]
            return frames.unpack(self._answers.pop(0))
        return frames.unpack(self._dealer.recv())

    def say(self, *commands: Command, under_way: int = UNDER_WAY) -> list[Command]:
        """Return the answers in the order of the commands, each of which has exactly one. Commits
        are done in their order."""
        found: dict[int, Command] = {}
        ids: list[int] = []
        for at in range(0, len(commands), under_way):
            some = {self.send(command): command for command in commands[at : at + under_way]}
            answers = [self.receive() for _ in some]
            assert sorted(number for number, _ in answers) == list(some)
            done = [number for number, answer in answers if isinstance(answer, Done)]
            commits = [number for number in done if isinstance(some[number], CommitOffsets)]
            assert commits == sorted(commits)
            found.update(answers)
            ids += some
        last = self.send(Ping())  # a second answer to another one would come before its answer
        assert self.receive()[0] == last
        return [found[number] for number in ids]


class Place:
    """A coordinator, and what one client says to it."""

    def __init__(self, actor: pykka.ActorRef[Any], commitlog: pykka.ActorRef[Any]) -> None:
        self.actor: Any = actor._actor_weakref()
        self.commitlog: Any = commitlog._actor_weakref()

    def connect(self, *, by_line: bool = False) -> Connection:
        address = self.actor.inbox.lines.name if by_line else self.actor.addresses[1]
        return Connection(address, by_line=by_line)

    def say(self, *commands: Command, by_line: bool = False) -> list[Command]:
        with self.connect(by_line=by_line) as connection:
            return connection.say(*commands)

    def kept(self) -> list[OffsetSet]:
        """All changes of offsets that the ledger has. An entry that was not answered in time is
        there once more, and its place tells."""
        bodies = FakeLedger(self.commitlog._path)._bodies()
        entries = {place: changes for place, changes, _ in map(decode_entry, bodies)}
        found = [change for place in sorted(entries) for change in entries[place]]
        return [change for change in found if isinstance(change, OffsetSet)]

    def committed(self, group: str) -> list[int]:
        keys = [QueueKey("t", queue_id) for queue_id in range(QUEUES)]
        answer = self.say(FetchOffsets(group, keys))[0]
        assert isinstance(answer, GroupOffsets)
        return [each.queue_offset for each in answer.offsets]


@contextmanager
def place(folder: Path) -> Iterator[Place]:
    folder.mkdir(exist_ok=True)
    commitlog = FakeCommitlog.start()
    with running(commitlog):
        actor = CoordinatorActor.start(
            Settings(),
            folder,
            commitlog_endpoint=address_of(commitlog),
            ledger_log=ledger_of(address_of(commitlog)),
            name_server_endpoints=[],
            family_address=f"ipc://@cometmq-test-commits-{id(commitlog)}",
            bind=[(ANYWHERE, True), (ANYWHERE, False)],
        )
        with running(actor) as family:
            family.ask(EndpointsChanged(endpoints_at(address_of(actor))))
            family.ask(CreateTopic(TopicInfo("t", QUEUES, QUEUES)))
            yield Place(actor, commitlog)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path / "store") as found:
        yield found


def commit(offset: int, group: str = "g", queue_id: int = 0, **more: Any) -> CommitOffsets:
    return CommitOffsets(group, [QueueOffset("t", queue_id, offset)], **more)


def join(here: Place, member: str, group: str = "g") -> dict[int, int]:
    """Queue id -> epoch."""
    answer = here.say(JoinGroup(group, member, [Subscription("t", "*")], [], -1, 0))[0]
    assert isinstance(answer, GroupShare)
    return {key.queue_id: epoch for key, epoch in zip(answer.queues, answer.epochs, strict=True)}


def kinds(answers: Sequence[Command]) -> list[object]:
    """Done, or the code of the error."""
    return [each.code if isinstance(each, Failed) else type(each) for each in answers]


@pytest.mark.parametrize("by_line", [False, True])
@pytest.mark.parametrize("count", [1, 2, 64, 65, 257])
def test_each_commit_is_answered_once(here: Place, by_line: bool, count: int) -> None:
    answers = here.say(*(commit(number) for number in range(1, count + 1)), by_line=by_line)
    assert answers == [Done()] * count
    assert here.committed("g")[0] == count
    assert [change.queue_offset for change in here.kept()] == list(range(1, count + 1))


@pytest.mark.parametrize("by_line", [False, True])
def test_commits_are_answered_when_the_ledger_has_them(here: Place, by_line: bool) -> None:
    """Several connections have commits in one poll batch; a refusal need not wait."""
    here.commitlog.silent = True
    with here.connect(by_line=by_line) as one, here.connect(by_line=by_line) as other:
        wanted = {each: [each.send(commit(number)) for number in (1, 2)] for each in (one, other)}
        refused, ping = one.send(commit(3, member="stranger")), one.send(Ping())
        said = dict([one.receive(), one.receive()])
        assert kinds([said[refused], said[ping]]) == [NotOwner.code, Pong]
        ping = other.send(Ping())
        assert other.receive()[0] == ping
        assert here.kept() == []
        here.commitlog.silent = False
        for each, ids in wanted.items():
            assert [each.receive() for _ in ids] == [(number, Done()) for number in ids]
            assert each.say() == []  # nothing comes a second time
    assert here.kept()


@pytest.mark.parametrize("by_line", [False, True])
def test_commits_keep_their_order_with_other_commands(here: Place, by_line: bool) -> None:
    """On one connection, a commit before LeaveGroup counts, and one after it is refused."""
    epoch = join(here, "m")[0]
    first = CommitOffsets("g", [QueueOffset("t", 0, 1, epoch)], "m")
    second = CommitOffsets("g", [QueueOffset("t", 0, 2, epoch)], "m")
    third = CommitOffsets("g", [QueueOffset("t", 0, 3, epoch)], "m")
    answers = here.say(first, second, LeaveGroup("g", "m"), third, by_line=by_line)
    assert kinds(answers) == [Done, Done, Done, NotOwner.code]
    assert here.committed("g")[0] == 2
    answers = here.say(commit(9), DeleteGroup("g"), commit(4), by_line=by_line)
    assert kinds(answers) == [Done] * 3
    assert here.committed("g")[0] == 4


@pytest.mark.parametrize("by_line", [False, True])
def test_a_refused_commit_does_not_affect_others(here: Place, by_line: bool) -> None:
    epoch = join(here, "m")[0]
    ours = CommitOffsets("g", [QueueOffset("t", 0, 5, epoch)], "m")
    older = CommitOffsets("g", [QueueOffset("t", 0, 6, epoch - 1)], "m")
    answers = here.say(ours, older, commit(7), ours, commit(1, queue_id=99), by_line=by_line)
    done, late, administrators, again, nowhere = kinds(answers)
    assert (done, again) == (Done, Done)
    assert late == administrators == NotOwner.code
    assert isinstance(nowhere, int)
    assert here.committed("g") == [5, -1, -1, -1]


class Broken:
    """A group that fails when an administrator commits."""

    def __init__(self, group: ConsumerGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        if name == "owner_of":
            raise RuntimeError("a fault of ours")
        return getattr(self._group, name)


@pytest.mark.parametrize("by_line", [False, True])
def test_a_commit_that_fails_unexpectedly_is_answered_alone(here: Place, by_line: bool) -> None:
    """Fault 30: commits beside it were answered once more, with its error."""
    join(here, "m", "broken")
    groups = here.actor._members.groups
    groups["broken"] = Broken(groups["broken"])
    broken = commit(1, "broken")
    said = [each for number in range(1, 21) for each in (commit(number), broken, broken)]
    answers = kinds(here.say(*said, by_line=by_line))
    assert answers == [Done, Unforeseen.code, Unforeseen.code] * 20
    assert here.committed("g")[0] == 20


def test_commits_that_the_log_refuses_are_undone(here: Place) -> None:
    assert here.say(commit(5), commit(6, queue_id=1)) == [Done(), Done()]
    here.commitlog.refusal = SystemBusy("not now")
    answers = here.say(commit(7), commit(8), commit(9, queue_id=1), commit(3, queue_id=2))
    assert kinds(answers) == [SystemBusy.code] * 4
    here.commitlog.refusal = None
    assert here.committed("g") == [5, 6, -1, -1]
    assert here.say(commit(7)) == [Done()]
    assert here.committed("g") == [7, 6, -1, -1]


def test_a_full_disk_costs_a_snapshot_and_no_commit(here: Place) -> None:
    assert here.say(commit(5)) == [Done()]
    here.commitlog.refusal = DiskFull("full")
    assert here.say(*(commit(number) for number in range(6, 40))) == [Done()] * 34
    here.commitlog.refusal = None
    assert here.committed("g")[0] == 39


def test_a_killed_coordinator_has_answered_no_commit_that_is_lost(tmp_path: Path) -> None:
    """It is killed before the ledger has the commits, and again right after their answers."""
    with running(commitlog := FakeCommitlog.start()):
        child = Child(tmp_path, address_of(commitlog))
        child.line.ask(CreateTopic(TopicInfo("t", QUEUES, QUEUES)))
        commitlog._actor_weakref().silent = True
        with Connection(child.address) as connection:
            for number in range(1, 50):
                connection.send(commit(number))
            ping = connection.send(Ping())
            assert connection.receive()[0] == ping
            child.kill()
        commitlog._actor_weakref().silent = False
        child = Child(tmp_path, address_of(commitlog))
        with Connection(child.address) as connection:
            asked = FetchOffsets("g", [QueueKey("t", 0)])
            assert connection.say(asked) == [GroupOffsets([QueueOffset("t", 0, -1)])]
            assert connection.say(*map(commit, range(1, 50))) == [Done()] * 49
            child.kill()
        child = Child(tmp_path, address_of(commitlog))
        with Connection(child.address) as connection:
            assert connection.say(asked) == [GroupOffsets([QueueOffset("t", 0, 49)])]
            child.kill()


def drawn(rng: random.Random) -> Command:
    if rng.random() < 0.05:
        return rng.choice([Ping(), LeaveGroup("h", "m"), DeleteGroup("new", force=True)])
    offsets = [
        QueueOffset(rng.choice(["t"] * 9 + ["u"]), rng.randrange(QUEUES + 1), rng.randrange(30))
        for _ in range(rng.choice([1, 1, 1, 2, 5]))
    ]
    return CommitOffsets(
        rng.choice(GROUPS), offsets, rng.choice(["", "", "m"]), rng.random() < 0.1,
        rng.random() < 0.1,
    )  # fmt: skip


@pytest.mark.parametrize("by_line", [False, True])
def test_a_poll_batch_is_what_its_commands_are_one_by_one(tmp_path: Path, by_line: bool) -> None:
    """The same commands, many at a time and one at a time: the same answers, the same offsets, the
    same changes in the ledger."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    commands = [drawn(rng) for _ in range(400)]
    found = []
    for under_way in (UNDER_WAY, 1):
        with place(tmp_path / f"store-{under_way}") as here:
            join(here, "m", "h")
            with here.connect(by_line=by_line) as connection:
                answers = connection.say(*commands, under_way=under_way)
            told = [
                (each.code, each.text.partition("(epoch")[0]) if isinstance(each, Failed) else 0
                for each in answers
            ]
            found.append((told, [here.committed(group) for group in GROUPS], here.kept()))
    assert found[0] == found[1]
    assert {0, NotOwner.code} <= {each[0] if each else 0 for each in found[0][0]}


def test_a_client_that_is_gone_does_no_harm(here: Place) -> None:
    with here.connect(by_line=True) as gone:
        for _ in range(50):
            gone.send(commit(5))
    while here.committed("g")[0] != 5:
        assert here.say(Ping())
    assert here.say(commit(6), by_line=True) == [Done()]
