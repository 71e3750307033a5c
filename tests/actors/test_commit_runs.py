"""Commits that come one behind the other: taken as a run, and answered as if each came alone."""

from __future__ import annotations

import copy
import random
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pykka
import pytest
import zmq
from coordinator_child import (
    ANYWHERE,
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
from cometmq.actors.runtime.access import ANYBODY, NO_TAG, CommitRun, Doorman
from cometmq.actors.runtime.inbox import SocketInbox
from cometmq.actors.runtime.lines import LineRun
from cometmq.actors.runtime.request import Request
from cometmq.actors.runtime.routers import RouterRun
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
    QueueKey,
    QueueOffset,
    Subscription,
    TopicInfo,
    tag_of,
)
from cometmq.protocol.errors import DiskFull, NotOwner, SystemBusy
from cometmq.protocol.ledger import OffsetSet, decode_entry
from cometmq.protocol.wire.line import abstract

WAIT_MS = patient(60_000)
UNDER_WAY = 100  # a line holds some 270 answers that nobody has read
QUEUES = 4
GROUPS = ("g", "h", "new")


class Place:
    """A coordinator, and what is said to it in one go by one client."""

    def __init__(self, actor: pykka.ActorRef[Any], commitlog: pykka.ActorRef[Any]) -> None:
        self.actor: Any = actor._actor_weakref()
        self.commitlog: Any = commitlog._actor_weakref()
        self.outside = self.actor.addresses[1]
        self.number = 0

    def say(self, *commands: Command, by_line: bool = False) -> list[Command]:
        """The answers, in the order of the commands."""
        heads = []
        for command in commands:
            self.number += 1
            heads.append(frames.pack(self.number, command))
        found = dict(map(frames.unpack, self._exchange(heads, by_line)))
        first = self.number - len(heads) + 1
        return [found[number] for number in range(first, self.number + 1)]

    def _exchange(self, heads: Sequence[bytes], by_line: bool) -> list[bytes]:
        if by_line:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
                line.connect(abstract(self.actor.inbox.lines.name))
                line.settimeout(WAIT_MS / 1000)
                answers = []
                for at in range(0, len(heads), UNDER_WAY):
                    some = heads[at : at + UNDER_WAY]
                    for head in some:
                        line.send(frames.join(head, ()) or b"")
                    answers += [line.recv(frames.PACKET_MAX) for _ in some]
                return [answer[frames.LONE_FRAME :] for answer in answers]
        with zmq.Context.instance().socket(zmq.DEALER) as dealer:
            dealer.linger, dealer.rcvtimeo = 0, WAIT_MS
            dealer.connect(self.outside)
            for head in heads:
                dealer.send(head)
            return [dealer.recv() for _ in heads]

    def kept(self) -> list[Any]:
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
def place(folder: Path, *, runs: bool = True) -> Iterator[Place]:
    folder.mkdir(exist_ok=True)
    commitlog = FakeCommitlog.start()
    with running(commitlog):
        actor = CoordinatorActor.start(
            Settings(),
            folder,
            commitlog_endpoint=address_of(commitlog),
            ledger_log=ledger_of(address_of(commitlog)),
            name_server_endpoints=[],
            family_address=f"ipc://@cometmq-test-runs-{id(commitlog)}",
            bind=[(ANYWHERE, True), (ANYWHERE, False)],
        )
        with running(actor) as family:
            family.ask(EndpointsChanged(endpoints_at(address_of(actor))))
            family.ask(CreateTopic(TopicInfo("t", QUEUES, QUEUES)))
            found = Place(actor, commitlog)
            if not runs:
                inbox = found.actor.inbox
                doorman = copy.copy(inbox.doorman)  # which all coordinators have in common
                doorman.run_tag = NO_TAG
                inbox.doorman = inbox.lines._doorman = doorman
            yield found


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
@pytest.mark.parametrize("count", [1, 2, 64, 65, 257, 1_000])
def test_each_is_answered(here: Place, by_line: bool, count: int) -> None:
    answers = here.say(*(commit(number) for number in range(1, count + 1)), by_line=by_line)
    assert answers == [Done()] * count
    assert here.committed("g")[0] == count
    assert [change.queue_offset for change in here.kept()] == list(range(1, count + 1))


@pytest.mark.parametrize("by_line", [False, True])
def test_they_keep_their_order_with_what_comes_between(here: Place, by_line: bool) -> None:
    """On one connection: a commit before a farewell counts, and the one behind it does not."""
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
def test_one_that_is_refused_does_not_take_others_along(here: Place, by_line: bool) -> None:
    epoch = join(here, "m")[0]
    ours = CommitOffsets("g", [QueueOffset("t", 0, 5, epoch)], "m")
    older = CommitOffsets("g", [QueueOffset("t", 0, 6, epoch - 1)], "m")
    answers = here.say(ours, older, commit(7), ours, commit(1, queue_id=99), by_line=by_line)
    done, late, administrators, again, nowhere = kinds(answers)
    assert (done, again) == (Done, Done)
    assert late == administrators == NotOwner.code
    assert isinstance(nowhere, int)
    assert here.committed("g") == [5, -1, -1, -1]


def test_what_the_log_refuses_is_taken_back(here: Place) -> None:
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
@pytest.mark.parametrize("seed", range(6))
def test_a_run_is_what_its_commits_are_one_by_one(tmp_path: Path, seed: int, by_line: bool) -> None:
    """The same commands by one client, to a coordinator that takes runs and to one that does not:
    the same answers, the same offsets, the same changes in the ledger."""
    rng = random.Random(seed)
    commands = [drawn(rng) for _ in range(400)]
    found = []
    for runs in (True, False):
        with place(tmp_path / f"store-{runs}", runs=runs) as here:
            join(here, "m", "h")
            answers = here.say(*commands, by_line=by_line)
            told = [
                (each.code, each.text.partition("(epoch")[0]) if isinstance(each, Failed) else 0
                for each in answers
            ]
            found.append((told, [here.committed(group) for group in GROUPS], here.kept()))
    assert found[0] == found[1]
    assert {0, NotOwner.code} <= {each[0] if each else 0 for each in found[0][0]}


def test_a_client_that_is_gone_does_no_harm(here: Place) -> None:
    packet = frames.join(frames.pack(1, commit(5)), ()) or b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(abstract(here.actor.inbox.lines.name))
        for _ in range(50):
            line.send(packet)
    while here.committed("g")[0] != 5:
        assert here.say(Ping())
    assert here.say(commit(6), by_line=True) == [Done()]


class Waiting(Request):
    """Of some senders."""

    def __init__(self, *senders: bytes) -> None:
        super().__init__(0, Ping(), (), ANYBODY)
        self.names = senders

    @property
    def senders(self) -> Iterable[bytes]:
        return self.names


def test_who_waits_in_a_run_keeps_the_order_of_its_own() -> None:
    """A run waits for one of its senders, and then the others of it wait with what they said
    later."""
    inbox = SocketInbox()
    held = Waiting(b"a")
    run, later, nobodys = Waiting(b"a", b"b"), Waiting(b"b"), Waiting(b"c")
    inbox.hold_back([held])
    assert inbox._not_ahead_of_their_own([run, later, nobodys]) == [nobodys]
    assert inbox.take_rest() == [held, run, later]


# --- who is handed runs ---------------------------------------------------------------------------


def test_only_who_takes_runs_is_handed_any() -> None:
    assert Doorman("reader", [CommitOffsets]).run_tag == NO_TAG
    assert Doorman("coordinator", [CommitOffsets, CommitRun]).run_tag == tag_of(CommitOffsets)


def test_access_control_judges_each_of_them() -> None:
    """It has to see what they say, so they come one by one."""
    judged = Doorman("coordinator", [CommitOffsets, CommitRun], lambda _command, _principal: None)
    assert judged.run_tag == NO_TAG


def test_the_family_comes_one_by_one(here: Place) -> None:
    taken = []
    take = here.actor.find_handler(CommitRun)

    def note(command: Any, request: Any) -> None:
        taken.append((type(request), request.principal))
        take(command, request)

    here.actor._handlers[CommitRun] = note
    heads = [frames.pack(number, commit(number)) for number in range(1, 3)]
    with zmq.Context.instance().socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, WAIT_MS
        dealer.connect(here.actor.addresses[0])
        for head in heads:
            dealer.send(head)
        for _ in heads:
            dealer.recv()
    assert taken == []
    assert here.say(commit(3)) == [Done()]
    assert here.say(commit(4), by_line=True) == [Done()]
    assert [kind for kind, _ in taken] == [RouterRun, LineRun]
    assert taken[0][1] == ANYBODY
    assert not taken[1][1].is_family
