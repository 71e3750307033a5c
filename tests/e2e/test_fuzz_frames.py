"""Rubbish at the sockets and at the kernel: a typed error, a log line, and nothing else.

The long form, with so many times the inputs:

    COMETMQ_TEST_FUZZ=20 python -m pytest tests/e2e/test_fuzz_frames.py
"""

from __future__ import annotations

import os
import random
import string
import struct
import subprocess
import sys
import time
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

import kernel_fuzz
import msgspec
import patience
import pytest
import zmq
from family import RunningBroker, Sent, encode_batch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from paths import SEARCH

from cometmq.protocol import frames
from cometmq.protocol.commands import (
    COMMANDS,
    PROTOCOL_VERSION,
    Command,
    Failed,
    Part,
    Ping,
    Pong,
    Section,
    SendMessages,
    SendResult,
)
from cometmq.protocol.errors import (
    BY_CODE,
    BadRequest,
    MessageIllegal,
    UnknownCommand,
    UnsupportedVersion,
)
from cometmq.protocol.wire.channel import Channel

TIMES = int(os.environ.get("COMETMQ_TEST_FUZZ", "1"))
MESSAGES = 400 * TIMES  # at each of the four sockets
CHECK_EVERY = 50  # of them: does the good client still get served?
KERNEL_INPUTS = 5_000 * TIMES
ANSWER_TIMEOUT_S = patience.patient(5)
HELD_MS_MAX = 20  # a pull or a join that may be held is answered after that

GOOD_TOPIC = "good"
VICTIM = "fuzz"  # a topic that exists, so that what is thrown comes further than its name
TARGETS = ("commitlog", "reader", "coordinator", "namesrv")
ROLE_OF = {"reader": "reader-0"}

FUZZ = settings(
    max_examples=MESSAGES,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # a dead process makes shrinking slow, and what is found is short
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


# --- what is thrown -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thrown:
    """The frames of one message. An answer is owed where they are a command at all."""

    parts: list[bytes]
    is_command: bool = False
    is_answered: bool = False


# Not a name that a good client uses: what a command may do to its own topics is its own affair.
HOSTILE_TEXTS = (
    "", "../x", "..", "/etc/passwd", "x" * 127, "x" * 128, "x" * 300, "%RETRY%" + "g" * 250, "a\0b",
    "a b", "t\n", "*", "a || b", "a | b", "||", "\ud7ff\U0010ffff", "fuzz", "fuzz2", "%", "TBW102",
    "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "1.2.3.4:5", "[::1]:99999999", "x:y",
    "tcp://127.0.0.1:1", "ipc:///nowhere", "inproc://x", "tcp://256.1.1.1:x", "@@NOT-UTF8@@",
    "|".join(["t"] * 200), " || ".join(f"t{n}" for n in range(40)),
)  # fmt: skip
HOSTILE_NUMBERS = (
    0, 1, -1, 2, 7, 8, 127, 128, 255, 4096, 65_535, 65_536, 2**31 - 1, 2**31, -(2**31),
    -(2**31) - 1, 2**32, 2**53, 2**62, 2**63 - 1, -(2**63), 2**63, 2**64 - 1,
)  # fmt: skip
NOT_UTF8 = b"\xff\xfe\xc0\x80\xed\xa0\x80\xf8\x80\x80\x80\x80"

texts = st.one_of(
    st.just(VICTIM), st.sampled_from(HOSTILE_TEXTS), st.text(string.printable, max_size=20)
)
numbers = st.one_of(st.integers(0, 3), st.sampled_from(HOSTILE_NUMBERS))
anything = st.one_of(
    texts, numbers, st.none(), st.booleans(), st.floats(), st.binary(max_size=20),
    st.lists(numbers, max_size=3), st.dictionaries(texts, numbers, max_size=2),
)  # fmt: skip


def values_of(kind: Any, name: str = "") -> st.SearchStrategy[Any]:
    """Hostile values of a field's type."""
    if name in ("suspend_ms", "wait_ms"):
        return st.sampled_from([0, 1, HELD_MS_MAX, -1, -(2**63)])
    if kind is str:
        return texts
    if kind is bool:
        return st.booleans()
    if kind is int:
        return numbers
    if kind is bytes:
        return st.binary(max_size=20)
    if kind is NoneType:
        return st.none()
    origin = typing.get_origin(kind)
    if origin in (typing.Union, UnionType):
        return st.one_of([values_of(each) for each in typing.get_args(kind)])
    if origin is list:
        return st.lists(values_of(typing.get_args(kind)[0]), max_size=4)
    if origin is tuple:
        return st.tuples(*map(values_of, typing.get_args(kind))).map(list)
    if origin is dict:
        return st.dictionaries(texts, numbers, max_size=3)
    assert issubclass(kind, Part | Command), kind
    return st.tuples(*fields_of(kind)).map(list)


def fields_of(kind: type[Any]) -> list[st.SearchStrategy[Any]]:
    hints = typing.get_type_hints(kind)
    return [values_of(hints[name], name) for name in kind.__struct_fields__]


def encode(content: object) -> bytes:
    return msgspec.msgpack.encode(content).replace(b"@@NOT-UTF8@@", NOT_UTF8)


def tag_of(kind: type[Command]) -> int:
    tag = kind.__struct_config__.tag
    assert isinstance(tag, int)
    return tag


@st.composite
def commands(draw: st.DrawFn) -> Thrown:
    """A command of the right types, with hostile values, and payloads that may be rubbish."""
    # Sending, pulling and the coordinator's commands have most to lose.
    kind = draw(st.sampled_from([*COMMANDS, SendMessages, SendMessages]))
    values = [draw(field) for field in fields_of(kind)]
    command = encode([tag_of(kind), *values])
    payload = draw(payloads)
    if kind is SendMessages and draw(st.booleans()):
        sections = values[0][: len(payload)]
        payload = payload[: len(sections)]
        command = encode([tag_of(kind), sections, *values[1:]])
    try:
        decoded = frames.unpack(frames.HEAD.pack(PROTOCOL_VERSION, 1) + command)[1]
    except BadRequest:
        return Thrown([command, *payload], is_command=True, is_answered=True)
    if kind is SendMessages and values[0] and draw(st.booleans()):
        # One that nearly holds: a real batch for a real queue, and a single value that is wrong.
        chance = random.Random(draw(seeds))
        batch, count = kernel_fuzz.real_batch(chance)
        section = [VICTIM, 0, count, 0, True]
        whole: list[Any] = [[section], 0, "", False]
        if draw(st.booleans()):
            section[draw(st.integers(1, 3))] = draw(numbers)
        else:
            whole[1], whole[2] = draw(numbers), draw(texts)
        command, payload = encode([tag_of(kind), *whole]), [batch]
        return Thrown([command, *payload], is_command=True, is_answered=True)
    silent = isinstance(decoded, SendMessages) and decoded.oneway
    return Thrown([command, *payload], is_command=True, is_answered=not silent)


def good_batch(seed: int) -> bytes:
    return kernel_fuzz.real_batch(random.Random(seed))[0]


def bad_batch(seed: int) -> bytes:
    chance = random.Random(seed)
    return kernel_fuzz.mutated(chance, kernel_fuzz.real_batch(chance)[0])


seeds = st.integers(0, 2**32)
payloads = st.lists(
    st.one_of(seeds.map(bad_batch), seeds.map(good_batch), st.binary(max_size=60)), max_size=4
)


@st.composite
def wrong_types(draw: st.DrawFn) -> Thrown:
    """A known or unknown tag, with any number of fields of any type."""
    tag = draw(st.one_of(st.sampled_from([tag_of(kind) for kind in COMMANDS]), numbers, texts))
    values = draw(st.lists(anything, max_size=6))
    return Thrown([encode([tag, *values])], is_command=True, is_answered=True)


@st.composite
def mutated_heads(draw: st.DrawFn) -> Thrown:
    """A whole head with bytes changed, cut or doubled: version and request id among them."""
    body = draw(commands()).parts
    head = frames.HEAD.pack(PROTOCOL_VERSION, draw(st.integers(0, 2**64 - 1))) + body[0]
    return Thrown([kernel_fuzz.mutated(random.Random(draw(seeds)), head), *body[1:]])


def announced(prefix: bytes) -> Thrown:
    """MessagePack that says much more is to come."""
    return Thrown([prefix], is_command=True, is_answered=True)


huge = st.sampled_from(
    [
        b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\x92\x0a\xdd\xff\xff\xff\xff",
        b"\x91" * 5_000, b"\x81" * 5_000, b"\xdc\xff\xff" * 1_000, b"\x92\x0a\x91\x95\xdb\xff\xff",
    ]
).map(announced)  # fmt: skip
versions = st.tuples(st.integers(0, 255), st.binary(max_size=30)).map(
    lambda made: Thrown([struct.pack(">BQ", made[0], 0) + made[1]])
)
random_bytes = st.lists(st.binary(max_size=100), min_size=1, max_size=6).map(Thrown)
thrown = st.one_of(
    commands(), commands(), wrong_types(), mutated_heads(), huge, versions, random_bytes
)


# --- whom it is thrown at -------------------------------------------------------------------------


class Patient:
    """A broker under fire, and a good client beside it."""

    def __init__(self, broker: RunningBroker) -> None:
        self.broker = broker
        broker.create_topic(GOOD_TOPIC, 1)
        broker.create_topic(VICTIM, 4)
        self.pids = broker.pids()
        self.sent: list[Sent] = []
        self.endpoints = {
            "commitlog": broker.endpoints.commitlog,
            "reader": broker.endpoints.readers[0],
            "coordinator": broker.endpoints.coordinator,
            "namesrv": broker.ready.name_server,
        }
        self._number = 0
        self.thrown = 0

    def throw(self, socket: zmq.Socket[bytes], one: Thrown) -> Command | None:
        """Over one line; a command is answered, and the answer returned."""
        self.thrown += 1
        if not one.is_command:
            socket.send_multipart(one.parts)
            return None
        wanted = 2**48 + self.thrown  # no rubbish has it
        head = frames.HEAD.pack(PROTOCOL_VERSION, wanted) + one.parts[0]
        socket.send_multipart([head, *one.parts[1:]])
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while one.is_answered:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"no answer\n{self.broker.log[-5000:]}"
            if socket.poll(int(left_s * 1000)):
                number, answer = frames.unpack(socket.recv_multipart()[0])
                if number == wanted:
                    return answer
        return None

    def check(self, target: str) -> None:
        """The same process serves a good client."""
        role = ROLE_OF.get(target, target)
        with Channel(self.endpoints[target]) as line:
            pong, _ = line.ask(Ping(), timeout_s=patience.patient(30))
        assert isinstance(pong, Pong)
        assert pong.pid == self.pids[role], self.broker.log[-5000:]
        self.sent += self.broker.send(GOOD_TOPIC, 0, [b"good %d" % len(self.sent)])

    def check_all(self) -> None:
        assert self.broker.pids() == self.pids
        self.broker.assert_stored(self.sent)
        assert "Traceback" not in self.broker.log


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Patient]:
    store = tmp_path_factory.mktemp("fuzzed") / "store"
    with RunningBroker(store) as broker:
        yield Patient(broker)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.slow
def test_frames(target: str, patient: Patient) -> None:
    socket: zmq.Socket[bytes]
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0
        socket.connect(patient.endpoints[target])

        @FUZZ
        @given(one=thrown)
        def throw(one: Thrown) -> None:
            answer = patient.throw(socket, one)
            if isinstance(answer, Failed):
                # 1 is what an unforeseen exception of ours becomes.
                assert answer.code in BY_CODE, answer
                assert answer.code != 1, answer
            if patient.thrown % CHECK_EVERY == 0:
                patient.check(target)

        before = patient.thrown
        throw()
    assert patient.thrown - before >= MESSAGES
    patient.check(target)
    patient.check_all()


@pytest.mark.parametrize(
    "command",
    [
        SendMessages([Section(GOOD_TOPIC, 0, 2**63 - 1)], 0),
        SendMessages([Section(GOOD_TOPIC, 0, 1)], 0, "1.2.3.4:99999999999"),
        SendMessages([Section(GOOD_TOPIC, 0, 1, 0x4)], 0),
    ],
)
def test_values_that_no_section_may_have(command: SendMessages, patient: Patient) -> None:
    """Numbers that are none of a command's at all: see test_integers.py."""
    with Channel(patient.endpoints["commitlog"]) as line:
        answer, _ = line.ask(command, [encode_batch([b"x"])], timeout_s=patience.patient(30))
    assert isinstance(answer, SendResult)
    assert answer.results[0].code in (BadRequest.code, MessageIllegal.code)
    patient.check("commitlog")


@pytest.mark.parametrize("target", TARGETS)
def test_a_frame_that_is_too_large(target: str, patient: Patient) -> None:
    """The line is cut; the head's own limit is answered."""
    for head, payload in (
        (b"\x01" + bytes(8) + bytes(frames.HEAD_MAX), []),
        (frames.pack(7, Ping()), [bytes(frames.FRAME_MAX)] * 2),
    ):
        with zmq.Context.instance().socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(patient.endpoints[target])
            socket.send_multipart([head, *payload])
            assert socket.poll(patience.patient(10_000))
            frames.unpack(socket.recv_multipart()[0])
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(patient.endpoints[target])
        socket.send(bytes(frames.FRAME_MAX + 1))
        socket.send(frames.pack(8, Ping()))
        socket.poll(200)
    patient.check(target)
    patient.check_all()


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_wrong_is_said(target: str, patient: Patient) -> None:
    for parts, error, text in (
        ([b""], BadRequest, "head of 0 bytes, at least 9"),
        ([b"x" * 5], BadRequest, "head of 5 bytes, at least 9"),
        ([frames.HEAD.pack(9, 3) + b"\x91\x02"], UnsupportedVersion, "protocol version 9"),
        ([frames.HEAD.pack(1, 3) + b"\x91\x63"], BadRequest, "not a command"),
        ([frames.HEAD.pack(1, 3) + b"\xc1"], BadRequest, "not a command"),
        ([frames.HEAD.pack(1, 3) + b"\x91\x04"], UnknownCommand, "Finish"),
        ([frames.HEAD.pack(1, 3) + b"\x91\x01"], UnknownCommand, "Done"),
    ):
        with zmq.Context.instance().socket(zmq.DEALER) as socket:
            socket.connect(patient.endpoints[target])
            socket.send_multipart(parts)
            assert socket.poll(patience.patient(10_000))
            _, answer = frames.unpack(socket.recv_multipart()[0])
        assert isinstance(answer, Failed)
        assert BY_CODE[answer.code] is error
        assert text in answer.text
    patient.check(target)


@pytest.mark.parametrize("seed", [pytest.param(seed, id=f"seed{seed}") for seed in (1, 2)])
@pytest.mark.slow
def test_the_kernel(seed: int, tmp_path: Path) -> None:
    """Typed errors only, also where the bytes end at a page that must not be touched."""
    note = tmp_path / "input"
    done = subprocess.run(
        [sys.executable, kernel_fuzz.__file__, str(seed), str(KERNEL_INPUTS), str(note)],
        capture_output=True,
        text=True,
        timeout=patience.patient(200) * TIMES,
        env={**os.environ, "PYTHONPATH": SEARCH},
    )
    assert done.stdout == "survived\n", (done.returncode, done.stderr, note.read_text())
