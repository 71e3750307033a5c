"""The embedded broker: the whole family, started and ended with a `with`."""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Unpack

import msgspec

from cometmq.actors.launch.addresses import address_of
from cometmq.actors.launch.embedded import EmbeddedFailed, EmbeddedReady
from cometmq.actors.runtime.roles import roles_of
from cometmq.actors.runtime.service_log import ServiceLog
from cometmq.children import module_command
from cometmq.conf import BrokerSettings
from cometmq.conf.profiles import PROFILES
from cometmq.nursery import MainProcess, fork, nursery
from cometmq.protocol.errors import ArgumentIllegal, CometError, ShuttingDown, from_code
from cometmq.protocol.tags import ALL_TAGS
from cometmq.protocol.wire.descriptors import need
from cometmq.protocol.wire.patched import check_not_patched
from cometmq.shm.tools.start_checks import sizes_there

if TYPE_CHECKING:
    from cometmq.actors.launch.hosted import Guest
    from cometmq.client import (
        AsyncConsumer,
        AsyncPopConsumer,
        AsyncProducer,
        Consumer,
        PopConsumer,
        Producer,
    )
    from cometmq.client.options import ConsumerOptions, PopOptions, ProducerOptions
    from cometmq.protocol.wire.remote import RemoteRef
    from cometmq.shm.kernel.store import Appender

EMBEDDING: Final = 16  # descriptors: its pipes and its log, while it starts
HOSTING: Final = 64  # what the writer's process has open, with the first of its clients
_decode_answer: Final = msgspec.json.Decoder(EmbeddedReady | EmbeddedFailed).decode


class Broker:
    """A broker of this service's own, in processes of its own.

        with Broker("./store") as broker, broker.producer() as producer:
            producer.send("orders", b"hello")

    It serves from the constructor on until `close`; when this process ends without that, the broker
    notices and ends in order by itself. Threads may share it.

    What its processes log goes to this service's `logging`, to the loggers `cometmq...` of the same
    names; records say by `role` and `process` whose they are. The setting logLevel (here WARNING
    unless it is given) says what is sent at all.

    Args:
        store: the store directory; made if it does not exist.
        port: the name server's; 0 takes free ports, which is all that an embedded broker needs.
        settings: more settings, by RocketMQ's keys, such as {"flushDiskType": "SYNC_FLUSH"};
            docs/configuration.md has all of them. The sizes of segments are those of the store
            where it has some already.
        writer: "here" has this very process hold the log's lock and write it, so that `appender`
            stores a message without asking anybody. Everything else stays as it is. When this
            process dies, the broker ends; its forks cannot append.
        profile: "test" is for the tests of a service: less memory (below 100 MiB for all processes
            together) and below 32 MiB of disk. What is promised stays the same. `settings` come
            first. The process that such brokers are forked from stays until this one ends, so that
            the next one is there in a tenth of a second.

    Raises ConfigError for a setting that cannot be used, such as an address that this machine does
    not have or a port that is taken, StoreLocked, StoreNotOurs and others of `cometmq.errors` when
    it cannot start, TooFewDescriptors, and ArgumentIllegal for what can be no argument.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        *,
        port: int = 0,
        settings: Mapping[str, object] | None = None,
        writer: Literal["apart", "here"] = "apart",
        profile: Literal["test"] | None = None,
    ) -> None:
        _check_kind(writer, profile)
        given: dict[str, object] = {
            "logLevel": "WARNING",
            **PROFILES.get(profile or "", {}),
            **sizes_there(_folder(store)),
            **_keys_of(settings),
        }
        arguments = {"storePathRootDir": str(_folder(store).absolute()), "port": port}
        for key, value in arguments.items():
            if given.setdefault(key, value) != value:
                argument = "store" if key == "storePathRootDir" else key
                raise ArgumentIllegal(f"settings: {key} is the argument `{argument}`")
        self.settings = BrokerSettings.from_keys(given)
        self.settings.check_for_writing()
        need(HOSTING if writer == "here" else EMBEDDING, "a broker of this process's own")
        self._closed = False
        self._owner = os.getpid()
        self._guest: Guest | None = None
        if writer == "here":
            from cometmq.actors.launch.hosted import Guest  # with it the whole writer

            self._guest = Guest()
        self._log = ServiceLog()
        log = self._log.fileno()
        if self._guest is None and profile == "test":
            nursery()  # its process starts while this one imports
            _load_clients()
            self._process: MainProcess = fork(log)
        else:
            said = [f"log={log}"] if self._guest is None else [f"log={log}", "hosted"]
            self._process = subprocess.Popen(
                module_command("cometmq.actors.launch.embedded", *said),
                stdin=subprocess.PIPE if self._guest is None else self._guest.theirs.fileno(),
                stdout=subprocess.PIPE,
                pass_fds=(log,),
                start_new_session=True,  # Ctrl-C is for this process, which then closes the broker
            )
        self._log.start()
        line = msgspec.json.encode(self.settings.as_keys()) + b"\n"
        if self._guest is None:
            assert self._process.stdin is not None
            self._process.stdin.write(line)
            self._process.stdin.flush()
        else:
            self._guest.start(self._process.pid, line)
            _hosting.add(self)
        _load_clients()
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
        """Its brokerName, by which clients tell brokers apart."""
        return self._ready.broker

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        return self._ready.pid

    @property
    def recent_log(self) -> list[logging.LogRecord]:
        """The last 1,000 records that its processes have logged, oldest first.

        Also those below the level of this service's loggers; the setting logLevel (here WARNING
        unless it is given) says what is logged at all. A record has `role` and `process`.
        """
        return list(self._log.recent)

    def producer(self, **options: Unpack[ProducerOptions]) -> Producer:
        """A Producer for this broker; options as there."""
        from cometmq.client import Producer

        self._check_open()
        return Producer(self.name_server, **options)

    def consumer(
        self,
        group: str | None,
        topic: str | None = None,
        tags: str = ALL_TAGS,
        **options: Unpack[ConsumerOptions],
    ) -> Consumer:
        """A Consumer for this broker; options as there."""
        from cometmq.client import Consumer

        self._check_open()
        return Consumer(self.name_server, group, topic, tags, **options)

    def pop_consumer(
        self, group: str, topic: str, tags: str = ALL_TAGS, **options: Unpack[PopOptions]
    ) -> PopConsumer:
        """A PopConsumer for this broker; options as there."""
        from cometmq.client import PopConsumer

        self._check_open()
        return PopConsumer(self.name_server, group, topic, tags, **options)

    def async_pop_consumer(
        self, group: str, topic: str, tags: str = ALL_TAGS, **options: Unpack[PopOptions]
    ) -> AsyncPopConsumer:
        """An AsyncPopConsumer for this broker; options as of PopConsumer."""
        from cometmq.client import AsyncPopConsumer

        self._check_open()
        return AsyncPopConsumer(self.name_server, group, topic, tags, **options)

    def async_producer(self, **options: Unpack[ProducerOptions]) -> AsyncProducer:
        """An AsyncProducer for this broker; options as of Producer."""
        from cometmq.client import AsyncProducer

        self._check_open()
        return AsyncProducer(self.name_server, **options)

    def async_consumer(
        self,
        group: str | None,
        topic: str | None = None,
        tags: str = ALL_TAGS,
        **options: Unpack[ConsumerOptions],
    ) -> AsyncConsumer:
        """An AsyncConsumer for this broker; options as of Consumer."""
        from cometmq.client import AsyncConsumer

        self._check_open()
        return AsyncConsumer(self.name_server, group, topic, tags, **options)

    def appender(self, topic: str, queue_id: int = 0) -> Appender:
        """Appends to one queue of a topic, in this process; for `writer="here"` only.

            orders = broker.appender("orders")
            orders.append(b"paid", tags="eu", keys="o-42")  # its queue offset, once it is stored
            orders.append_many(bodies)

        The topic is made if it does not exist and may be made. Raises TopicNotExist, NameIllegal,
        NoPermission, MessageIllegal for a queue that it does not have.
        """
        self._check_open()
        if self._guest is None or self._guest.actor is None:
            raise ArgumentIllegal('an appender needs Broker(..., writer="here")')
        if not isinstance(topic, str):
            raise ArgumentIllegal(f"topic is one name, not {type(topic).__name__}")
        if not isinstance(queue_id, int) or isinstance(queue_id, bool):
            raise ArgumentIllegal(f"queue_id is a number from 0, not {type(queue_id).__name__}")
        return self._guest.actor.appender(topic, queue_id)

    def actor(self, role: str) -> RemoteRef:
        """A reference to one of the family's actors that pykka code can tell and ask.

        Roles: broker, namesrv, commitlog, allocator, dispatcher, flush, cleaner, coordinator,
        reader-0 ...
        """
        from cometmq.protocol.wire.remote import RemoteRef

        self._check_open()
        roles = ["broker", *roles_of(self.settings)]
        if role not in roles:
            raise ArgumentIllegal(f"no role {role!r}: it is one of {', '.join(roles)}")
        return RemoteRef(address_of(self._ready.token, role), role)

    def _check_open(self) -> None:
        if self._closed:
            raise ShuttingDown("this broker was closed: open another Broker")

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
        self._log.close()
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


def _load_clients() -> None:
    """What this process will want next, while the broker's own start."""
    import cometmq.client  # noqa: F401


def _check_kind(writer: str, profile: str | None) -> None:
    """Raise ArgumentIllegal for unknown values, MonkeyPatched in a patched process."""
    check_not_patched("a Broker of CometMQ")
    if profile is not None and profile not in PROFILES:
        raise ArgumentIllegal(f"profile={profile!r}: {', '.join(PROFILES)}, or none")
    if writer not in ("apart", "here"):
        raise ArgumentIllegal(f"writer={writer!r}: 'apart' or 'here'")


def _keys_of(settings: object) -> Mapping[str, object]:
    if settings is None:
        return {}
    if isinstance(settings, Mapping) and all(isinstance(key, str) for key in settings):
        return settings
    shown = repr(settings)[:80]
    raise ArgumentIllegal(
        f'settings = {shown}: a dict by RocketMQ\'s keys, such as {{"flushDiskType": "SYNC_FLUSH"}}'
    )


def _folder(store: object) -> Path:
    if isinstance(store, str | os.PathLike):
        path = os.fspath(store)
        if isinstance(path, str) and path:
            return Path(path)
    raise ArgumentIllegal(f"store = {store!r}: the path of a directory, as text or as a Path")


# Brokers with their writer in this process end before it does, in order.
_hosting: Final[set[Broker]] = set()


@atexit.register
def _close_all() -> None:
    for broker in list(_hosting):
        broker.close()
