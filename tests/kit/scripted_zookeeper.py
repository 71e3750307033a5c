"""A ZooKeeper in this process, of some threads, that says what a test wants it to. No tests here.

with ScriptedZooKeeper() as server:
    server.say = lambda asked, reply: reply       # what is said, of what would be; None: hang up
    engine = open_engine(server.url)

It has nodes, ephemeral ones as well, and sessions that never run out; watches it does not tell of.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, NamedTuple, Self

CONNECT: Final = 0  # not of ZooKeeper: the first that is said on a connection
CREATE: Final = 1
EXISTS: Final = 3
GET: Final = 4
SET: Final = 5
CHILDREN: Final = 8
PING: Final = 11
MULTI: Final = 14
CREATE2: Final = 15
AUTH: Final = 100
CLOSE: Final = -11

NO_NODE: Final = -101
BAD_VERSION: Final = -103
NODE_EXISTS: Final = -110

_HEAD: Final = struct.Struct(">ii")  # of a request: xid, type
_REPLY: Final = struct.Struct(">iqi")  # xid, zxid, error
_STAT: Final = struct.Struct(">qqqqiiiqiiq")
_CONNECT: Final = struct.Struct(">iqiq")  # protocol, zxid, ms, session
_CONNECTED: Final = struct.Struct(">iiq")  # protocol, ms, session


class Asked(NamedTuple):
    """A request."""

    connection: int  # from 1
    session: int
    xid: int
    op: int


@dataclass
class Node:
    data: bytes
    made: int
    changed: int
    version: int = 0
    owner: int = 0


class Refused(Exception):
    """With an error of ZooKeeper."""


@dataclass
class _Reader:
    content: bytes
    at: int = 0

    def int(self) -> int:
        self.at += 4
        return int(struct.unpack_from(">i", self.content, self.at - 4)[0])

    def text(self) -> str:
        return self.bytes().decode()

    def bytes(self) -> bytes:
        count = max(0, self.int())
        self.at += count
        return self.content[self.at - count : self.at]


@dataclass
class ScriptedZooKeeper:
    """
    Args:
        context: its TLS, if it speaks it.
        host: by which `url` names it.
    """

    context: ssl.SSLContext | None = None
    host: str = "127.0.0.1"
    say: Callable[[Asked, bytes], bytes | None] = lambda _, reply: reply
    asked: list[Asked] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=lambda: {"/": Node(b"", 0, 0)})
    connections: int = 0

    def __post_init__(self) -> None:
        self._zxid = 0
        self._sessions = 0
        self._lock = threading.Lock()
        self._lines: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"zookeeper://{self.host}:{self._listener.getsockname()[1]}"

    def hang_up(self) -> None:
        """On everybody."""
        with self._lock:
            for line in list(self._lines):
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(line, socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self.hang_up()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    # --- connections ---

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
                self._lines.add(line)
            thread = threading.Thread(target=self._serve, args=(line, self.connections))
            self._threads.append(thread)
            thread.start()

    def _serve(self, line: socket.socket, number: int) -> None:
        plain = line
        with contextlib.suppress(OSError, EOFError), contextlib.ExitStack() as stack:
            stack.callback(lambda: self._lines.discard(plain))
            stack.callback(lambda: line.close())
            if self.context is not None:
                line = self.context.wrap_socket(line, server_side=True)
            stream = stack.enter_context(line.makefile("rb"))
            reply, session = self._connected(_frame(stream.read))
            if not self._tell(line, Asked(number, session, 0, CONNECT), reply):
                return
            while True:
                content = _frame(stream.read)
                xid, op = _HEAD.unpack_from(content)
                asked = Asked(number, session, xid, op)
                self.asked.append(asked)
                with self._lock:
                    reply = self.answer(asked, content[_HEAD.size :])
                if not self._tell(line, asked, reply) or op == CLOSE:
                    return

    def _tell(self, line: socket.socket, asked: Asked, reply: bytes) -> bool:
        said = self.say(asked, reply)
        if said is not None:
            line.sendall(said)
        return said is not None

    def _connected(self, content: bytes) -> tuple[bytes, int]:
        _, _, granted_ms, session = _CONNECT.unpack_from(content)
        with self._lock:
            if not session:
                self._sessions += 1
                session = self._sessions
        reply = _CONNECTED.pack(0, granted_ms, session) + _buffer(b"p" * 16) + b"\0"
        return framed(reply), session

    # --- requests ---

    def answer(self, asked: Asked, content: bytes) -> bytes:
        """What a ZooKeeper says to that."""
        error, body = 0, b""
        try:
            body = self._carry_out(asked, _Reader(content))
        except Refused as refused:
            error = refused.args[0]
        return replied(asked.xid, self._zxid, error, body)

    def _carry_out(self, asked: Asked, read: _Reader) -> bytes:
        op = asked.op
        if op == MULTI:  # of a check of "/" alone
            return struct.pack(">iBi", 13, 0, 0) + struct.pack(">iBi", -1, 1, -1)
        if op in (PING, AUTH):
            return b""
        if op == CLOSE:
            self.end_session(asked.session)
            return b""
        path = read.text()
        if op in (CREATE, CREATE2):
            return self._create(asked, path, read)
        node = self.nodes.get(path)
        if node is None:
            raise Refused(NO_NODE)
        if op == EXISTS:
            return _stat(node)
        if op == GET:
            return _buffer(node.data) + _stat(node)
        if op == CHILDREN:
            names = [each[len(path) + 1 :] for each in self.nodes if _parent(each) == path]
            return struct.pack(">i", len(names)) + b"".join(map(_buffer, map(str.encode, names)))
        assert op == SET, asked
        return self._set(node, read.bytes(), read.int())

    def _create(self, asked: Asked, path: str, read: _Reader) -> bytes:
        data = read.bytes()
        for _ in range(read.int()):
            read.int(), read.text(), read.text()
        if path in self.nodes:
            raise Refused(NODE_EXISTS)
        if _parent(path) not in self.nodes:
            raise Refused(NO_NODE)
        self._zxid += 1
        owner = asked.session if read.int() & 1 else 0
        node = self.nodes[path] = Node(data, self._zxid, self._zxid, owner=owner)
        return _buffer(path.encode()) + (_stat(node) if asked.op == CREATE2 else b"")

    def _set(self, node: Node, data: bytes, version: int) -> bytes:
        if version not in (-1, node.version):
            raise Refused(BAD_VERSION)
        self._zxid += 1
        node.data, node.version, node.changed = data, node.version + 1, self._zxid
        return _stat(node)

    def end_session(self, session: int) -> None:
        for path in [path for path, node in self.nodes.items() if node.owner == session]:
            del self.nodes[path]


def replied(xid: int, zxid: int, error: int = 0, body: bytes = b"") -> bytes:
    return framed(_REPLY.pack(xid, zxid, error) + body)


def framed(content: bytes) -> bytes:
    return struct.pack(">i", len(content)) + content


def _frame(read: Callable[[int], bytes]) -> bytes:
    def all_of(count: int) -> bytes:
        content = read(count)
        if len(content) < count:
            raise EOFError
        return content

    return all_of(int(struct.unpack(">i", all_of(4))[0]))


def _buffer(content: bytes) -> bytes:
    return struct.pack(">i", len(content)) + content


def _stat(node: Node) -> bytes:
    return _STAT.pack(
        node.made, node.changed, 0, 0, node.version, 0, 0, node.owner, len(node.data), 0, node.made
    )


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/" if path != "/" else ""
