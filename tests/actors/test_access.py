"""Every door of a process asks the doorman: what it refuses, no actor sees."""

from __future__ import annotations

import contextlib
import os
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from patience import patient

from cometmq.actors.launch.broker import BrokerActor
from cometmq.actors.runtime.access import (
    ANYBODY,
    AUTHORIZER,
    FAMILY,
    Doorman,
    Policy,
    Principal,
)
from cometmq.actors.runtime.request import Request
from cometmq.actors.runtime.roles import ROLES
from cometmq.actors.runtime.service import ServiceActor, _snake
from cometmq.conf import BrokerSettings
from cometmq.protocol import frames
from cometmq.protocol.commands import (
    COMMANDS,
    Answer,
    Audience,
    Command,
    Done,
    Failed,
    Finish,
    GetRoute,
    ListTopics,
    Ping,
    Pong,
    PullMessages,
    TopicList,
    TopicsChanged,
)
from cometmq.protocol.errors import NoPermission, UnknownCommand
from cometmq.protocol.wire.channel import Channel
from cometmq.protocol.wire.line import Line

WAIT_S = patient(60)
HOOKS = {
    "on_broken_invariant", "on_doorbell", "on_failure", "on_readable", "on_receive", "on_requests",
    "on_start", "on_stop",
}  # fmt: skip


class Host(ServiceActor):
    """It works on groups, as the writer does, and so sees all that comes before any guard."""

    role = "host"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[Command] = []

    def on_start(self) -> None:
        self.inbox.listen_for_lines(self.line)

    @property
    def line(self) -> str:
        return f"cometmq-test-{os.getpid()}-{id(self)}"

    def on_requests(self, requests: list[Request]) -> None:
        self.seen += [request.command for request in requests]
        for request in requests:
            self.handle(request)

    def on_list_topics(self, _command: ListTopics, _request: Request | None) -> Command:
        return Done()

    def on_topics_changed(self, _command: TopicsChanged, _request: Request | None) -> Command:
        return Done()

    def on_pull_messages(self, _command: PullMessages, request: Request) -> None:
        request.reply(Done())


@contextlib.contextmanager
def host() -> Iterator[Host]:
    inside = f"ipc://@cometmq-test-{os.getpid()}-{random.randrange(1 << 32)}"
    reference = Host.start(bind=[(inside, True), ("tcp://127.0.0.1:*", False)])
    actor = reference._actor_weakref()
    assert isinstance(actor, Host)
    try:
        assert actor.started.wait(WAIT_S)
        yield actor
    finally:
        reference.stop()


def ask_by_line(actor: Host, command: Command) -> Command:
    line = Line(actor.line, os.getuid())
    line.send(frames.pack(1, command))
    messages = line.receive(WAIT_S)
    assert messages
    return frames.unpack(messages[0][0])[1]


def ask_at(actor: Host, door: str, command: Command) -> Command:
    if door == "line":
        return ask_by_line(actor, command)
    if door == "within":
        answer = actor.actor_ref.ask(command)
        assert isinstance(answer, Command)
        return answer
    with Channel(actor.addresses[0 if door == "family" else 1]) as channel:
        return channel.ask(command, timeout_s=WAIT_S)[0]


def refused(actor: Host, door: str, command: Command, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        frames.raise_if_failed(ask_at(actor, door, command))


DOORS = ("family", "clients", "line", "within")
OUTSIDE = ("clients", "line")
CHANGED = TopicsChanged(TopicList([]))


@pytest.mark.parametrize("door", DOORS)
def test_what_it_takes(door: str) -> None:
    with host() as actor:
        assert ask_at(actor, door, ListTopics()) == Done()


@pytest.mark.parametrize("door", DOORS)
def test_what_it_has_no_handler_for(door: str) -> None:
    with host() as actor:
        refused(actor, door, GetRoute("t"), UnknownCommand, "host does not take GetRoute")
        refused(actor, door, Done(), UnknownCommand, "host does not take Done")
        assert actor.seen == []


@pytest.mark.parametrize("door", OUTSIDE)
def test_what_only_the_family_may_say(door: str) -> None:
    with host() as actor:
        for command in (CHANGED, Finish()):
            refused(actor, door, command, UnknownCommand, "is not taken from outside")
        assert actor.seen == []
        assert isinstance(ask_at(actor, door, Ping()), Pong)


@pytest.mark.parametrize("door", ["family", "within"])
def test_the_family_may(door: str) -> None:
    with host() as actor:
        assert ask_at(actor, door, CHANGED) == Done()
        assert ask_at(actor, door, Finish()) == Done()
        assert actor.ended.wait(WAIT_S)


def test_what_is_answered_later_is_not_asked_within_the_process() -> None:
    with host() as actor:
        assert ask_at(actor, "clients", PullMessages("t", 0, 0)) == Done()
        refused(actor, "within", PullMessages("t", 0, 0), UnknownCommand, "through a socket only")


def test_in_the_middle_of_a_group() -> None:
    """The others of the same drain are not harmed."""
    with host() as actor, zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(actor.addresses[1])
        said = [ListTopics(), CHANGED, Ping(), Finish(), ListTopics(since=1)] * 20
        for number, command in enumerate(said):
            socket.send(frames.pack(number, command))
        answers: dict[int, Command] = {}
        while len(answers) < len(said):
            assert socket.poll(WAIT_S * 1000)
            number, answer = frames.unpack(socket.recv_multipart()[0])
            answers[number] = answer
        inner = TopicsChanged | Finish
        for number, command in enumerate(said):
            assert isinstance(answers[number], Failed) == isinstance(command, inner)
        assert not any(isinstance(command, inner) for command in actor.seen)


# --- the place of access control ------------------------------------------------------------------


@contextlib.contextmanager
def policy(rules: Policy) -> Iterator[None]:
    AUTHORIZER.reload(rules)
    try:
        yield
    finally:
        AUTHORIZER.reload(None)


@pytest.mark.parametrize("door", OUTSIDE)
def test_access_control_is_asked_first(door: str) -> None:
    asked: list[tuple[Command, Principal]] = []

    class NoPulls:
        def check(self, command: Command, principal: Principal) -> None:
            asked.append((command, principal))
            if isinstance(command, PullMessages):
                raise NoPermission(f"{principal.name} may not read {command.topic}")

    with host() as actor, policy(NoPulls()):
        name = f"uid {os.getuid()}" if door == "line" else ANYBODY.name
        pull = PullMessages("t", 0, 0)
        refused(actor, door, pull, NoPermission, f"{name} may not read t")
        assert ask_at(actor, door, ListTopics()) == Done()
        assert asked == [(pull, Principal(name)), (ListTopics(), Principal(name))]
        assert actor.seen == [ListTopics()]
        ask_at(actor, "family", pull)
        assert len(asked) == 2  # the family is not asked


def test_a_policy_can_be_replaced_while_an_actor_runs() -> None:
    class Nothing:
        def check(self, command: Command, principal: Principal) -> None:
            raise NoPermission(f"{principal.name} may not do anything")

    with host() as actor:
        assert ask_at(actor, "clients", ListTopics()) == Done()
        with policy(Nothing()):
            refused(actor, "clients", ListTopics(), NoPermission, "anybody may not do anything")
        assert ask_at(actor, "clients", ListTopics()) == Done()


def test_the_default_lets_everybody() -> None:
    doorman = Doorman("reader", [PullMessages])
    doorman.admit(PullMessages("t", 0, 0), ANYBODY)
    doorman.admit(PullMessages("t", 0, 0), FAMILY)


# --- what roles take ------------------------------------------------------------------------------

ACTORS = [role.load(BrokerSettings()) for role in ROLES] + [BrokerActor]


def handlers(actor: type[ServiceActor]) -> set[str]:
    names = {name for owner in (actor, *actor.part_types) for name in dir(owner)}
    return {name for name in names if re.match(r"on_[a-z]", name)} - HOOKS


def test_every_handler_has_a_command() -> None:
    commands = [kind for kind in COMMANDS if not issubclass(kind, Answer)]
    known = {f"on_{_snake(kind.__name__)}" for kind in commands}
    for actor in ACTORS:
        assert handlers(actor) <= known, actor


def test_every_command_has_a_handler() -> None:
    taken = set().union(*(handlers(actor) for actor in ACTORS))
    for kind in COMMANDS:
        is_taken = f"on_{_snake(kind.__name__)}" in taken
        assert is_taken == (kind.access.audience is not Audience.NOBODY), kind
