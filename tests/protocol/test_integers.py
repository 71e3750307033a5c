"""Integers on the wire: each field of each command has a limit, and nothing beyond it gets through.

Fields and limits are taken from the declarations, so that a new command is tested by being there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import msgspec
import pytest
import zmq
from family import RunningBroker
from msgspec import inspect
from patience import patient

from cometmq.actors.runtime.listeners.zeromq import MAILBOX_COUNT
from cometmq.protocol import frames
from cometmq.protocol.commands import COMMANDS, PROTOCOL_VERSION, Command, Failed, Ping, Pong
from cometmq.protocol.errors import BadRequest
from cometmq.protocol.integers import INT32_MAX, INT32_MIN, INT64_MAX
from cometmq.protocol.wire.channel import Channel

WIDE = 2**64 - 1, 2**63, -(2**63)
NARROW = 2**31, -(2**31) - 1
WAITS = {"suspend_ms", "wait_ms"}  # an actor may hold the answer for so long
ANSWER_TIMEOUT_S = patient(150)  # for checks an actor waits 30 s, and for the cleaner 60

Place = tuple[int | str, ...]  # the way to a value, in a command as MessagePack has it


def sample(kind: inspect.Type, name: str = "") -> Any:
    """A small value of that type, as MessagePack has it."""
    match kind:
        case inspect.StructType(tag=tag, fields=fields):
            values = [sample(field.type, field.name) for field in fields]
            return values if tag is None else [tag, *values]
        case inspect.ListType(item_type=item):
            return [sample(item)]
        case inspect.DictType(value_type=value):
            return {"x": sample(value)}
        case inspect.UnionType(types=types):
            return sample(types[0])
        case inspect.IntType():
            return 0 if name in WAITS else 1
        case inspect.BoolType():
            return False  # never `oneway`
        case inspect.StrType():
            return "x"
        case inspect.BytesType():
            return b"x"
    raise AssertionError(kind)


def integers(kind: inspect.Type, name: str = "", at: Place = ()) -> Iterator[
    tuple[str, Place, inspect.IntType]
]:  # fmt: skip
    """Every integer in a type: its name as an error says it, where it lies, and its type."""
    match kind:
        case inspect.StructType(tag=tag, fields=fields):
            for index, field in enumerate(fields, 0 if tag is None else 1):
                yield from integers(field.type, f"{name}.{field.name}", (*at, index))
        case inspect.ListType(item_type=item):
            yield from integers(item, f"{name}[0]", (*at, 0))
        case inspect.DictType(value_type=value):
            yield from integers(value, f"{name}[...]", (*at, "x"))
        case inspect.UnionType(types=types):
            for each in types:
                yield from integers(each, name, at)
        case inspect.IntType():
            yield name, at, kind


FIELDS = [
    (f"{kind.__name__}{name}", kind, place, integer)
    for kind in COMMANDS
    for name, place, integer in integers(inspect.type_info(kind))
]


def with_value(kind: type[Command], place: Place, value: int) -> bytes:
    command = here = sample(inspect.type_info(kind))
    for step in place[:-1]:
        here = here[step]
    here[place[-1]] = value
    return msgspec.msgpack.encode(command)


def refused(integer: inspect.IntType, value: int) -> int | None:
    """The limit that the value is beyond."""
    if integer.le is not None and value > integer.le:
        return integer.le
    if integer.ge is not None and value < integer.ge:
        return integer.ge
    return None


def test_there_are_fields() -> None:
    names = {name for name, *_ in FIELDS}
    assert {"QueryMessages.end_ms", "SendMessages.sections[0].queue_id"} <= names


@pytest.mark.parametrize(("name", "integer"), [(name, integer) for name, _, _, integer in FIELDS])
def test_each_integer_has_a_limit(name: str, integer: inspect.IntType) -> None:
    """One of three; 64 bits with a sign are what files, native code and RocketMQ have."""
    allowed = [(None, INT64_MAX), (INT32_MIN, INT32_MAX)]
    if name in ("LocalStore.control_device", "LocalStore.control_inode"):
        allowed = [(0, None)]  # the system's numbers
    assert (integer.ge, integer.le) in allowed


@pytest.mark.parametrize("value", [*WIDE, *NARROW])
@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field[0])
def test_what_is_beyond_it_is_no_command(
    field: tuple[str, type[Command], Place, inspect.IntType], value: int
) -> None:
    name, kind, place, integer = field
    head = frames.HEAD.pack(PROTOCOL_VERSION, 7) + with_value(kind, place, value)
    limit = refused(integer, value)
    if limit is None:
        assert type(frames.unpack(head)[1]) is kind
        return
    with pytest.raises(BadRequest) as error:
        frames.unpack(head)
    assert f"{name}: " in str(error.value)
    assert str(limit) in str(error.value)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ([10, [["t", 0]], 0], r"SendMessages\.sections\[0\]: Expected `array`"),
        ([10, [], 0, 5], r"SendMessages\.born_host: Expected `str`, got `int`"),
        ([6, "r", {"a": []}], r"Statistics\.values\[\.\.\.\]: Expected"),
        ([10], r"not a command: SendMessages: Expected `array`"),
        ([99], "not a command: Invalid value 99"),
        ([], "not a command: Expected `array`"),
        (["x", 1], "not a command: Expected `int`"),
        ({}, "not a command: Expected `array`"),
        (5, "not a command: Expected `array`"),
    ],
)
def test_what_is_wrong_is_named(command: object, text: str) -> None:
    with pytest.raises(BadRequest, match=text):
        frames.unpack(frames.HEAD.pack(PROTOCOL_VERSION, 7) + msgspec.msgpack.encode(command))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    with RunningBroker(tmp_path_factory.mktemp("integers") / "store") as broker:
        yield broker


PORTS: dict[str, Callable[[RunningBroker], str]] = {
    "commitlog": lambda broker: broker.endpoints.commitlog,
    "reader-0": lambda broker: broker.endpoints.readers[0],
    "coordinator": lambda broker: broker.endpoints.coordinator,
    "namesrv": lambda broker: broker.ready.name_server,
}


@pytest.mark.parametrize("role", PORTS)
@pytest.mark.slow
def test_no_actor_stumbles(role: str, broker: RunningBroker) -> None:
    """Each number in each field, at each port: an answer, and never one of an unforeseen error.
    No more of them on their way than an actor keeps answers for who does not take them."""
    pid, endpoint = broker.pids()[role], PORTS[role](broker)
    thrown = [
        (f"{name} = {value}", with_value(kind, place, value))
        for name, kind, place, _ in FIELDS
        for value in (*WIDE, *NARROW)
    ]
    names: dict[int, str] = {}
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0
        socket.connect(endpoint)
        left = iter(enumerate(thrown, 1))
        while True:
            for number, (name, command) in islice(left, MAILBOX_COUNT // 2 - len(names)):
                names[number] = name
                socket.send(frames.HEAD.pack(PROTOCOL_VERSION, number) + command)
            if not names:
                break
            assert socket.poll(ANSWER_TIMEOUT_S * 1000), (names, broker.log[-3000:])
            number, answer = frames.unpack(socket.recv_multipart()[0])
            name = names.pop(number)
            assert not (isinstance(answer, Failed) and answer.code == 1), (name, answer)
    with Channel(endpoint) as line:
        pong, _ = line.ask(Ping(), timeout_s=ANSWER_TIMEOUT_S)
    assert isinstance(pong, Pong)
    assert pong.pid == pid
    assert "Traceback" not in broker.log


def test_the_frame_that_was_found(broker: RunningBroker) -> None:
    """An unsigned 64-bit number as the end of a range of time, as it once reached the index."""
    command = (
        b"\x98\x1b\xb3SCHEDULE_TOPIC_XXXX\xb3SCHEDULE_TOPIC_XXXX\xce\x00\x01\x00\x00\x00"
        b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xc3\xce\x00\x01\x00\x00"
    )
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(broker.endpoints.readers[0])
        socket.send_multipart([frames.HEAD.pack(PROTOCOL_VERSION, 3) + command, b""])
        assert socket.poll(ANSWER_TIMEOUT_S * 1000)
        _, answer = frames.unpack(socket.recv_multipart()[0])
    assert isinstance(answer, Failed)
    assert answer.code == BadRequest.code
    assert f"QueryMessages.end_ms: Expected `int` <= {INT64_MAX}" in answer.text
