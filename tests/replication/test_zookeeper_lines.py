"""What a handle on ZooKeeper makes of a server, or a connection, that says what it should not."""

from __future__ import annotations

import contextlib
import logging
import random
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from engine_servers import eventually
from kazoo.protocol.connection import ConnectionHandler
from scripted_zookeeper import (
    AUTH,
    BAD_VERSION,
    CHILDREN,
    CONNECT,
    EXISTS,
    GET,
    NODE_EXISTS,
    SET,
    Asked,
    Node,
    ScriptedZooKeeper,
    framed,
    replied,
)

from cometmq.actors.replication.engines.engine import (
    Applied,
    Engine,
    Holding,
    Refused,
    Stored,
    Unknown,
    now_s,
)
from cometmq.actors.replication.engines.errors import EngineError, EngineFault, EngineUnreachable
from cometmq.actors.replication.engines.opening import open_engine
from cometmq.actors.replication.engines.zookeeper import ZooKeeperEngine
from cometmq.conf.engine import NO_ACCESS, EngineAccess

TIMEOUT_S = 20.0  # of a call: nothing here takes long, but the machine may be busy

Say = Callable[[Asked, bytes], bytes | None]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@contextmanager
def served(
    *, authority: Authority | None = None, access: EngineAccess = NO_ACCESS
) -> Iterator[tuple[ScriptedZooKeeper, Engine]]:
    """A server, and a handle on it."""
    context = None
    if authority is not None:
        pair = authority.issue("server")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.cert, pair.key)
        access = access._replace(ca_file=str(authority.cert))
    with (
        ScriptedZooKeeper(context, "localhost" if context else "127.0.0.1") as server,
        open_engine(server.url, TIMEOUT_S, access) as engine,
    ):
        yield server, engine


class Once:
    """Says something else to the first request of a kind."""

    def __init__(self, op: int, odd: Say) -> None:
        self.done = threading.Event()
        self._op = op
        self._odd = odd

    def __call__(self, asked: Asked, reply: bytes) -> bytes | None:
        if asked.op != self._op or self.done.is_set():
            return reply
        self.done.set()
        return self._odd(asked, reply)


def event(kind: int, path: bytes) -> bytes:
    """A watch's, of ZooKeeper's."""
    return replied(-1, 0, 0, struct.pack(">iii", kind, 3, len(path)) + path)


NUMBER_0 = framed(struct.pack(">iiqi", 0, 4_000, 0, 16) + b"p" * 16 + b"\0")
ODD: dict[str, Say] = {
    "of another request": lambda asked, _: replied(asked.xid + 1, 1),
    "of one that nobody has made": lambda _, reply: reply + replied(77, 1),
    "short": lambda *_: framed(b"abc"),
    "empty": lambda *_: framed(b""),
    "below zero": lambda *_: struct.pack(">i", -5),
    "huge": lambda *_: struct.pack(">i", 2**31 - 1) + bytes(64),
    "of HTTP": lambda *_: b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "an error that nobody knows": lambda asked, _: replied(asked.xid, 1, -5_000),
    "cut": lambda asked, _: replied(asked.xid, 1, 0, b"\0"),
    "a name that is none": lambda _, reply: event(3, b"\xff\xff") + reply,
    "an event that is none": lambda _, reply: event(99, b"/cometmq") + reply,
    "that we may come in": lambda _, reply: replied(-4, 0) + reply,
    "that we may not": lambda _, reply: replied(-4, 0, -115) + reply,
    "nothing more": lambda *_: None,
}
odd_answers = pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@odd_answers
@pytest.mark.slow
def test_an_odd_answer_costs_a_connection_and_no_more(
    odd: Say, tls: bool, authority: Authority, group: str
) -> None:
    """Of ZooKeeper itself such is the answer behind that which a session gets that has moved."""
    with served(authority=authority if tls else None) as (server, engine):
        made = engine.cas(group, None, b"x")
        assert isinstance(made, Applied)
        server.say = strike = Once(GET, odd)
        assert engine.get(group) == Stored(b"x", made.version)
        assert strike.done.is_set()
        assert engine.alive(group) == frozenset()


@odd_answers
@pytest.mark.slow
def test_a_session_goes_on_behind_an_odd_answer(odd: Say, group: str) -> None:
    with served() as (server, engine):
        session = engine.open_session(group, 1, 6)  # a busy machine renews it in time
        server.say = strike = Once(EXISTS, odd)
        assert strike.done.wait(60)
        count = len(server.asked)

        def is_renewed() -> bool:
            renewals = [each.op for each in server.asked[count:]].count(EXISTS)
            return renewals > 1 and session.holding is Holding.HELD

        eventually(lambda: is_renewed() or session.holding is Holding.LOST)
        assert session.holding is not Holding.LOST  # its time never ends there
        assert engine.alive(group) == {1}


def test_a_session_is_held_on_whose_connection_breaks_behind_the_answer(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is looked at who the node is of."""
    with served() as (server, engine):
        assert isinstance(engine, ZooKeeperEngine)
        lease = engine._lease(group, 1, 2)
        line = lease._line
        asked = line.ask

        def ask(timeout_s: float, *starts: Callable[[Any], Any]) -> list[Any]:
            answers = asked(timeout_s, *starts)
            server.say = lambda each, reply: None if each.op == CONNECT else reply
            server.hang_up()
            eventually(lambda: not line._client.connected)
            return answers

        monkeypatch.setattr(line, "ask", ask)
        try:
            assert lease.renew(now_s(), TIMEOUT_S) is not None
        finally:
            lease.release()


OPENED: dict[str, Say] = {
    "no password": lambda *_: framed(struct.pack(">iiqi", 0, 4_000, 9, -1) + b"\0"),
    "short password": lambda *_: framed(struct.pack(">iiqi", 0, 4_000, 9, 4) + b"pass\0"),
    "for ever": lambda *_: framed(struct.pack(">iiqi", 0, 2**31 - 1, 9, 16) + b"p" * 16 + b"\0"),
    "number 0": lambda *_: NUMBER_0,
    "empty": lambda *_: framed(b""),
    "bytes": lambda *_: framed(b"\xff" * 37),
    "over": lambda *_: framed(struct.pack(">iiqi", 0, 0, 0, -1) + b"\0"),
    "huge": lambda *_: struct.pack(">i", 2**31 - 1),
    "nothing": lambda *_: None,
}
REFUSED = ("bytes", "over")  # by a time of 0 or less


@pytest.mark.parametrize("odd", OPENED)
@pytest.mark.slow
def test_a_session_that_is_opened_oddly(odd: str, group: str) -> None:
    """Also when it was there before: it is held on by whom it is of, or lost if it is refused."""
    with served() as (server, engine):
        server.say = strike = Once(CONNECT, OPENED[odd])
        assert engine.get(group) is None
        assert strike.done.is_set()
        server.say = lambda _, reply: reply
        session = engine.open_session(group, 1, 2)
        server.say = strike = Once(CONNECT, OPENED[odd])
        server.hang_up()
        assert strike.done.wait(60)
        count = len(server.asked)
        eventually(lambda: EXISTS in [each.op for each in server.asked[count:]])
        (owner,) = {node.owner for node in server.nodes.values() if node.owner}

        def is_settled() -> bool:
            if session.holding is Holding.HELD:
                return server.asked[-1].session == owner
            return session.holding is Holding.LOST

        eventually(is_settled)
        assert session.holding is not Holding.LOST or odd in REFUSED


def test_a_node_of_no_session_is_not_that_of_a_session_without_a_number(group: str) -> None:
    with served() as (server, engine):
        assert isinstance(engine, ZooKeeperEngine)
        server.nodes[f"{engine.sessions_path(group)}/1"] = Node(b"by hand", 1, 1)
        server.say = lambda asked, reply: NUMBER_0 if asked.op == CONNECT else reply
        engine.timeout_s = 1.0
        with pytest.raises(EngineUnreachable, match="it opens no session"):
            engine.open_session(group, 1, 2)


@pytest.mark.parametrize(
    "odd",
    [
        lambda *_: replied(1, 1),
        lambda *_: replied(-4, 0, -5_000),
        lambda *_: replied(-4, 0, -102),
        lambda *_: framed(b"abc"),
        lambda *_: None,
    ],
    ids=["another", "an error that nobody knows", "no permission", "short", "nothing"],
)
def test_a_user_that_is_answered_oddly(odd: Say, group: str, tmp_path: Path) -> None:
    word = tmp_path / "word"
    word.write_text("word")
    word.chmod(0o600)
    access = NO_ACCESS._replace(user="me", password_file=str(word))
    with served(access=access) as (server, engine):
        server.say = strike = Once(AUTH, odd)
        assert engine.get(group) is None
        assert strike.done.is_set()


def test_it_is_said_once(group: str, caplog: pytest.LogCaptureFixture) -> None:
    with served() as (server, engine):
        engine.timeout_s = 1.0
        server.say = lambda asked, reply: replied(asked.xid + 1, 1) if asked.op == GET else reply
        told = ""
        while server.connections < 4 or "it answers request" not in told:
            with pytest.raises(EngineUnreachable) as raised:
                engine.get(group)
            told = str(raised.value)
        said = [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert len(said) == 1
        assert server.url in said[0].message
        assert "it answers request" in said[0].message
        assert said[0].exc_info is None


@pytest.mark.parametrize("code", [BAD_VERSION, NODE_EXISTS])
def test_an_error_that_is_no_answer_to_what_was_asked(group: str, code: int) -> None:
    """As one flipped bit makes it of "there is no such node"."""
    with served() as (server, engine):
        server.say = lambda asked, reply: (
            replied(asked.xid, 1, code) if asked.op in (GET, CHILDREN) else reply
        )
        for call in (engine.get, engine.alive, lambda g: engine.cas(g, None, b"x")):
            with pytest.raises(EngineFault, match="is no answer to what was asked"):
                call(group)
        server.say = lambda _, reply: reply
        assert engine.get(group) is None


@pytest.mark.slow
def test_whatever_is_said(group: str) -> None:
    """Bytes exchanged at random, over many connections."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)

    def garbled(_: Asked, reply: bytes) -> bytes | None:
        if chance.random() < 0.5:
            return reply
        said = bytearray(reply)
        for _ in range(chance.randrange(1, 4)):
            said[chance.randrange(len(said))] ^= 1 << chance.randrange(8)
        return bytes(said[: chance.randrange(1, len(said) + 1)] if chance.random() < 0.3 else said)

    with served() as (server, engine):
        session = engine.open_session(group, 1, 2)
        server.say = garbled
        engine.timeout_s = 0.1
        for number in range(32):
            if number % 8 == 7:
                server.hang_up()
            call = chance.choice([engine.get, engine.alive, lambda g: engine.cas(g, None, b"x")])
            with contextlib.suppress(EngineError):
                call(group)
        server.say = lambda _, reply: reply
        server.hang_up()  # half an answer may have come
        engine.timeout_s = TIMEOUT_S
        eventually(lambda: engine.alive(group) is not None)
        eventually(lambda: session.holding is not Holding.IN_DOUBT)


def test_a_client_whose_thread_ends_is_followed_by_another(
    group: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of whatever: its session is over, and nobody takes it for held."""
    with served() as (server, engine):
        session = engine.open_session(group, 1, 2)
        looked_up = ConnectionHandler._expand_client_hosts
        ends = iter([MemoryError("a test's")] * 2)

        def expand(connection: ConnectionHandler) -> object:
            for error in ends:
                raise error
            return looked_up(connection)

        monkeypatch.setattr(ConnectionHandler, "_expand_client_hosts", expand)
        server.hang_up()
        eventually(lambda: session.holding is Holding.LOST)
        assert engine.get(group) is None
        assert "MemoryError" in caplog.text
        for each in [each for each, node in server.nodes.items() if node.owner]:
            server.end_session(server.nodes[each].owner)  # as its time does
        again = engine.open_session(group, 1, 2)
        assert again.left_s() > 0
        assert engine.alive(group) == {1}


# --- what was lost, and comes late ----------------------------------------------------------------


def test_requests_of_a_session_are_never_taken_for_each_other(group: str) -> None:
    """ZooKeeper knows a request by its session and its number, and nothing else: behind another
    connection as well, as long as it is under way."""
    with served() as (server, engine):
        session = engine.open_session(group, 1, 2)
        for _ in range(4):
            engine.get(group)
            server.hang_up()
        count = len(server.asked)
        eventually(lambda: EXISTS in [each.op for each in server.asked[count:]])
        assert session.holding is not Holding.LOST
    numbers = [(each.session, each.xid) for each in server.asked if each.xid > 0]
    assert len(set(numbers)) == len(numbers)


class MovedSession(ScriptedZooKeeper):
    """The first change of a node is on its way when its connection breaks. What has become of it
    comes to the server that the session has moved to behind the next change, and is told to whoever
    has a request of that number there (ZooKeeper CommitProcessor)."""

    lost: tuple[Asked, bytes] | None = None

    def answer(self, asked: Asked, content: bytes) -> bytes:
        if asked.op != SET:
            return super().answer(asked, content)
        if self.lost is None:
            self.lost = asked, content
            return b""
        before, lost = self.lost
        found = super().answer(before, lost)
        if (before.session, before.xid) == (asked.session, asked.xid):
            return found
        return super().answer(asked, content)


def test_the_late_outcome_of_a_lost_change_is_not_taken_for_that_of_the_next(group: str) -> None:
    with MovedSession() as server, open_engine(server.url, TIMEOUT_S) as engine:
        assert isinstance(engine, ZooKeeperEngine)
        first = engine.cas(group, None, b"first")
        assert isinstance(first, Applied)
        server.say = lambda _, reply: reply or None
        server.hang_up()  # so both changes are the second request of a connection
        assert isinstance(engine.cas(group, first.version, b"lost"), Unknown)
        outcome = engine.cas(group, first.version, b"next")
        there = server.nodes[engine.record_path(group)].data
        assert (outcome, there[1:]) == (Refused(engine.get(group)), b"lost")
