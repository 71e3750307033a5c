"""The embedded broker: the whole family, started and ended with a `with`."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

import msgspec

from cometmq.actors.hosted import Guest
from cometmq.actors.supervisor import EmbeddedFailed, EmbeddedReady, address_of
from cometmq.client import AsyncConsumer, AsyncProducer, Consumer, Producer
from cometmq.conf import BrokerSettings
from cometmq.protocol.channel import RemoteRef
from cometmq.protocol.errors import CometError, from_code
from cometmq.shm._kernel import Appender

_decode_answer: Final = msgspec.json.Decoder(EmbeddedReady | EmbeddedFailed).decode


class Broker:
    """A broker of this service's own, in processes of its own.

        with Broker("./store") as broker, broker.producer() as producer:
            producer.send("orders", b"hello")

    It serves from the constructor on until `close`; when this process ends without that, the broker
    notices and ends in order by itself. Threads may share it.

    Args:
        store: the store directory; made if it does not exist.
        port: the name server's; 0 takes free ports, which is all that an embedded broker needs.
        settings: more settings, by RocketMQ's keys, such as {"flushDiskType": "SYNC_FLUSH"}.
        writer: "here" has this very process hold the log's lock and write it, so that `appender`
            stores a message without asking anybody. Everything else stays as it is. When this
            process dies, the broker ends; its forks cannot append.

    Raises StoreLocked, StoreNotOurs and others of `cometmq.errors` when it cannot start.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        *,
        port: int = 0,
        settings: Mapping[str, object] | None = None,
        writer: Literal["apart", "here"] = "apart",
    ) -> None:
        if writer not in ("apart", "here"):
            raise ValueError(f"writer={writer!r}: 'apart' or 'here'")
        given: dict[str, object] = {"logLevel": "WARNING", **(settings or {})}
        given |= {"storePathRootDir": str(Path(store).absolute()), "port": port}
        self.settings = BrokerSettings.from_keys(given)
        self._closed = False
        self._owner = os.getpid()
        self._guest = Guest() if writer == "here" else None
        command = [sys.executable, "-m", "cometmq.actors.supervisor"]
        self._process = subprocess.Popen(
            command if self._guest is None else [*command, "hosted"],
            stdin=subprocess.PIPE if self._guest is None else self._guest.theirs.fileno(),
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process, which then closes the broker
        )
        line = msgspec.json.encode(self.settings.as_keys()) + b"\n"
        if self._guest is None:
            assert self._process.stdin is not None
            self._process.stdin.write(line)
            self._process.stdin.flush()
        else:
            self._guest.start(self._process.pid, line)
            _hosting.add(self)
        self._ready = self._wait_ready()

    def _wait_ready(self) -> EmbeddedReady:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise CometError(
                f"the broker ended with status {self._process.returncode}; see its log"
            )
        answer: EmbeddedReady | EmbeddedFailed = _decode_answer(line)
        if isinstance(answer, EmbeddedFailed):
            self.close()
            raise from_code(answer.code, answer.text)
        return answer

    @property
    def name_server(self) -> str:
        """Where producers and consumers of other processes find it."""
        return self._ready.name_server

    @property
    def name(self) -> str:
        return self._ready.broker

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        return self._ready.pid

    def producer(self, **options: Any) -> Producer:
        """A Producer for this broker; options as there."""
        return Producer(self.name_server, **options)

    def consumer(self, group: str, topic: str | None = None, **options: Any) -> Consumer:
        """A Consumer for this broker; options as there."""
        return Consumer(self.name_server, group, topic, **options)

    def async_producer(self, **options: Any) -> AsyncProducer:
        return AsyncProducer(self.name_server, **options)

    def async_consumer(self, group: str, topic: str | None = None, **options: Any) -> AsyncConsumer:
        return AsyncConsumer(self.name_server, group, topic, **options)

    def appender(self, topic: str, queue_id: int = 0) -> Appender:
        """Appends to one queue of a topic, in this process; for `writer="here"` only.

            orders = broker.appender("orders")
            orders.append(b"paid", tags="eu", keys="o-42")  # its queue offset, once it is stored
            orders.append_many(bodies)

        The topic is made if it does not exist and may be made. Raises TopicNotExist, NameIllegal,
        NoPermission, MessageIllegal for a queue that it does not have.
        """
        if self._guest is None or self._guest.actor is None:
            raise ValueError('an appender needs Broker(..., writer="here")')
        return self._guest.actor.appender(topic, queue_id)

    def actor(self, role: str) -> RemoteRef:
        """A reference to one of the family's actors that pykka code can tell and ask.

        Roles: broker, namesrv, commitlog, allocator, dispatcher, flush, cleaner, coordinator,
        reader-0 ...
        """
        return RemoteRef(address_of(self._ready.token, role), role)

    def close(self) -> None:
        """End in order: everything that was acknowledged is flushed. May be called twice.

        Nothing in a fork of the process that has opened it.
        """
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        _hosting.discard(self)
        assert self._process.stdout is not None
        if self._guest is not None:
            self._guest.close()
        elif self._process.stdin is not None:
            self._process.stdin.close()  # its lifeline
        self._process.wait()
        if self._guest is not None:
            self._guest.wait()
        self._process.stdout.close()

    def __enter__(self) -> Broker:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()


# Brokers with their writer in this process end before it does, in order.
_hosting: Final[set[Broker]] = set()


@atexit.register
def _close_all() -> None:
    for broker in list(_hosting):
        broker.close()
