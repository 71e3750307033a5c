"""The coordinator: what topics there are, who consumes them, and how far they have come."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, Protocol, TypeVar

import msgspec

from cometmq.actors.group_share import ConsumerGroup, GroupRecord
from cometmq.actors.service import Request, ServiceActor, Timer
from cometmq.protocol import names
from cometmq.protocol.channel import Channel, Pending
from cometmq.protocol.commands import (
    BrokerEndpoints,
    BrokerRoute,
    Command,
    CommitOffsets,
    CreateTopic,
    DeleteSegments,
    DeleteTopic,
    DescribeGroup,
    Done,
    DropHold,
    EndpointsChanged,
    EnsureTopic,
    FetchOffsets,
    Finish,
    GroupDescription,
    GroupInfo,
    GroupList,
    GroupOffsets,
    GroupQueue,
    JoinGroup,
    LeaveGroup,
    ListGroups,
    ListHolds,
    ListTopics,
    PlaceHold,
    QueueKey,
    QueueOffset,
    RegisterBroker,
    TopicInfo,
    TopicList,
    TopicRoute,
    TopicsChanged,
    UnregisterBroker,
)
from cometmq.protocol.errors import (
    BadRequest,
    CometError,
    GroupNotExist,
    NameIllegal,
    NoPermission,
    NotConfirmed,
    NotOwner,
    OffsetIllegal,
    ServiceNotAvailable,
    ShuttingDown,
    StoreDamaged,
    SubscriptionIllegal,
    SystemBusy,
    TopicNotExist,
)
from cometmq.protocol.tags import parse_tags
from cometmq.shm.config_files import (
    ConfigFile,
    ConsumerOffsetTable,
    SubscriptionGroupConfig,
    SubscriptionGroupTable,
    TopicConfig,
    TopicTable,
)

log = logging.getLogger(__name__)

TableT = TypeVar("TableT", bound=msgspec.Struct)

TEMPLATE_TOPIC: Final = "TBW102"  # RocketMQ AUTO_CREATE_TOPIC_KEY_TOPIC
READ, INHERIT = 4, 1  # bits of perm; 2 is write
PERM_DEFAULT: Final = 6
PERM_MAX: Final = 7
QUEUES_MAX: Final = 4_096  # of one topic
MEMBER_NAME_MAX: Final = 255
MEMBERS_MAX: Final = 10_000  # of one group
QUEUE_OFFSET_MAX: Final = (1 << 63) - 1

REGISTER_INTERVAL_S: Final = 30.0  # RocketMQ registerNameServerPeriod
CONFIRM_TIMEOUT_S: Final = 2.5  # below the 3 s that a client waits, so that it hears the reason
LINE_TIMEOUT_SHARE: Final = 0.8  # of that, so that what is wrong with a line is known by then
RETRY_S: Final = 0.5
UNREGISTER_TIMEOUT_S: Final = 0.5
OFFSET_VERSION_STEP: Final = 500  # commits for one step of the data version; RocketMQ's
FIRST_VERSION: Final = 1  # of the topics, as they were found at the start


class CoordinatorSettings(Protocol):
    """What the coordinator needs of the broker's settings."""

    @property
    def auto_create_topic_enable(self) -> bool: ...
    @property
    def auto_create_subscription_group(self) -> bool: ...
    @property
    def default_topic_queue_nums(self) -> int: ...
    @property
    def flush_consumer_offset_interval_ms(self) -> int: ...
    @property
    def consumer_session_timeout_ms(self) -> int: ...


class MemberTable(msgspec.Struct, kw_only=True, rename="camel"):
    """consumerMembers.json, which RocketMQ does not have: the groups' members and their queues.

    Without it a coordinator that was killed and comes back would give queues away that others
    still work on. Its time of change is the coordinator's last sign of life (see `_flush`).
    """

    groups: dict[str, GroupRecord] = {}


class OffsetBook:
    """consumerOffset.json: how far each group has come in each queue.

    What is put is in memory until `save`; if that fails, everything since the last one is undone.
    """

    def __init__(self, path: Path) -> None:
        self._file = ConfigFile(path, ConsumerOffsetTable)
        self._table = self._file.load() or ConsumerOffsetTable()
        self._undo: list[tuple[str, int, int | None]] = []  # key, queue id, what stood there
        self._put_count = 0
        self._unsynced = False
        self.write_count = 0  # of the file

    @property
    def unsaved(self) -> bool:
        return bool(self._undo)

    def get(self, group: str, topic: str, queue_id: int) -> int:
        """The next message to consume, -1 if nothing was ever committed."""
        return self._table.offset_table.get(f"{topic}@{group}", {}).get(queue_id, -1)

    def put(self, group: str, topic: str, queue_id: int, queue_offset: int) -> None:
        key = f"{topic}@{group}"
        self._undo.append((key, queue_id, self._set(key, queue_id, queue_offset)))
        self._put_count += 1
        if self._put_count % OFFSET_VERSION_STEP == 0:
            self._table.data_version = self._table.data_version.next(_now_ms())

    def forget_topic(self, topic: str) -> None:
        for key in [key for key in self._table.offset_table if key.startswith(f"{topic}@")]:
            for queue_id in list(self._table.offset_table[key]):
                self._undo.append((key, queue_id, self._set(key, queue_id, None)))

    def queues_of(self, group: str) -> list[QueueKey]:
        """The queues in which the group has ever committed an offset."""
        return [
            QueueKey(key.removesuffix(f"@{group}"), queue_id)
            for key, offsets in self._table.offset_table.items()
            if key.endswith(f"@{group}")
            for queue_id in offsets
        ]

    def topics_of_groups(self) -> dict[str, tuple[str, ...]]:
        return self._table.group_topic_map()

    def put_back(self, ends: Mapping[tuple[str, int], int]) -> int:
        """Move what lies behind the end of its queue back to that end; how many there were."""
        behind = [
            (key, queue_id, ends.get((key.partition("@")[0], queue_id), 0))
            for key, offsets in self._table.offset_table.items()
            for queue_id, offset in offsets.items()
            if offset > ends.get((key.partition("@")[0], queue_id), 0)
        ]
        for key, queue_id, end in behind:
            before = self._set(key, queue_id, end)
            self._undo.append((key, queue_id, before))
            log.warning("%s: queue %d ends at %d, %s was committed", key, queue_id, end, before)
        return len(behind)

    def save(self) -> None:
        """From here on, what was put survives a kill of this process. See `sync`."""
        self._store(durable=False)
        self._unsynced = True

    def sync(self) -> None:
        """From here on, it survives the loss of power as well."""
        if self._unsynced or self._undo:
            self._store(durable=True)
            self._unsynced = False

    def _store(self, *, durable: bool) -> None:
        try:
            _store(self._file, self._table, durable=durable)
        except ServiceNotAvailable:
            for key, queue_id, before in reversed(self._undo):
                self._set(key, queue_id, before)
            raise
        finally:
            self._undo.clear()
        self.write_count += 1

    def _set(self, key: str, queue_id: int, queue_offset: int | None) -> int | None:
        """Set or, with None, remove; what stood there."""
        offsets = self._table.offset_table.setdefault(key, {})
        before = offsets.pop(queue_id, None) if queue_offset is None else offsets.get(queue_id)
        if queue_offset is not None:
            offsets[queue_id] = queue_offset
        elif not offsets:
            del self._table.offset_table[key]
        return before


class NewsLine:
    """Tells one other process the newest state, again and again until it is confirmed.

    One message is under way at a time; what changes meanwhile is told after it. Nothing here
    blocks: all methods run in the actor's thread, and so do `news` and `heard`.

    Args:
        timeout_s: for an answer; then the line is given up and a new one taken.
        news: the version of the newest state and the command that tells it; None: nothing to tell.
        heard: called when `confirmed` or `trouble` has changed.
    """

    def __init__(
        self,
        actor: ServiceActor,
        name: str,
        endpoint: str,
        *,
        timeout_s: float,
        news: Callable[[], tuple[int, Command] | None],
        heard: Callable[[int, Command | None], None],
    ) -> None:
        self.name = name
        self.confirmed = -1  # the version that the process has
        self.trouble = ""  # why the last attempt failed; empty: it did not
        self._actor, self._endpoint, self._timeout_s = actor, endpoint, timeout_s
        self._news, self._heard = news, heard
        self._channel = Channel(endpoint, name)
        self._attempt = 0  # answers to an earlier one are too late
        self._timeout: Timer | None = None  # of the message under way
        self._retry: Timer | None = None
        self._again = False

    def send(self) -> None:
        """Tell the newest state, after the message under way if there is one."""
        if self._timeout is not None:
            self._again = True
            return
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        news = self._news()
        if news is None:
            return
        version, command = news
        self._again = False
        self._attempt += 1
        attempt = self._attempt
        self._timeout = self._actor.after(self._timeout_s, self._give_up)

        def on_done(pending: Pending) -> None:  # in the channel's thread
            self._actor.call_soon(partial(self._done, attempt, version, command, pending))

        self._channel.request(command, on_done=on_done)

    def ask_last(self, command: Command) -> Pending | None:
        """Send a last word, to be waited for with `wait`; None if it never heard anything."""
        return self._channel.request(command) if self.confirmed >= 0 else None

    def wait(self, pending: Pending, timeout_s: float) -> bool:
        return self._channel.wait(pending, timeout_s)

    def complaint(self) -> str:
        return f"{self.name} has not confirmed it: {self.trouble or 'no answer yet'}"

    def close(self) -> None:
        self._channel.close()

    def _done(self, attempt: int, version: int, command: Command, pending: Pending) -> None:
        if attempt != self._attempt or self._timeout is None:
            return
        self._timeout.cancel()
        self._timeout = None
        try:
            pending.result()
        except CometError as error:
            self._failed(str(error))
            return
        if self.trouble:
            log.info("%s answers again", self.name)
        self.trouble = ""
        self.confirmed = version
        self._heard(version, command)
        if self._again:
            self.send()

    def _give_up(self) -> None:
        """No answer. A new line, so that nothing which waits in the old one is sent later."""
        self._attempt += 1
        self._timeout = None
        self._channel.close()
        self._channel = Channel(self._endpoint, self.name)
        self._failed(f"no answer from {self.name} within {self._timeout_s:g} s")

    def _failed(self, trouble: str) -> None:
        if trouble != self.trouble:
            log.warning("%s has not confirmed the topics: %s", self.name, trouble)
        self.trouble = trouble
        self._retry = self._actor.after(RETRY_S, self.send)
        self._heard(self.confirmed, None)


class _Waiting:
    """An answer that waits until the other processes know the topic."""

    __slots__ = ("answer", "request", "timer", "version")

    def __init__(
        self, request: Request, version: int, answer: Callable[[], Command], timer: Timer
    ) -> None:
        self.request = request
        self.version = version
        self.answer = answer
        self.timer = timer


class _Held:
    """A JoinGroup that waits for news. `timer` is None for one that does not want to wait."""

    __slots__ = ("request", "timer", "version")

    def __init__(self, request: Request, version: int, timer: Timer | None) -> None:
        self.request = request
        self.version = version
        self.timer = timer


class CoordinatorActor(ServiceActor):
    """Keeps topics, consumer groups and consumer offsets.

    Writes, alone: config/*.json.
    Wakes on: commands, answers of the commitlog process and the name servers, timers: held
        JoinGroups, silent members, flushConsumerOffsetInterval, a registration every 30 s.
    Dies: of a config file that is damaged at the start, with its .bak. A file that cannot be
        written fails the request, which then has changed nothing.

    Whatever one drain of the sockets brings is worked through before anything is written: all its
    commits go into one file. An answer never says more than what survives a kill at that moment.

    Args:
        store_dir: must exist; `config` is made in it.
        commitlog_endpoint: where the commitlog process takes TopicsChanged.
        queue_ends: waits for the recovery after a bad end, and returns where the queues end now.
        cleaner_endpoint: where the cleaner takes what clients want of it; empty: nobody does.
        name_server_endpoints: all of them are told. With none, routes are only had from here.
        confirm_timeout_s: how long a topic may be unknown to them before the client hears of it.
    """

    role: ClassVar[str] = "coordinator"
    internal_commands: ClassVar[tuple[type[Command], ...]] = (Finish, EndpointsChanged)
    answered_later: ClassVar[tuple[type[Command], ...]] = (
        CommitOffsets,
        CreateTopic,
        DeleteSegments,
        DeleteTopic,
        DropHold,
        EndpointsChanged,
        EnsureTopic,
        JoinGroup,
        ListHolds,
        PlaceHold,
    )

    def __init__(
        self,
        settings: CoordinatorSettings,
        store_dir: Path,
        *,
        commitlog_endpoint: str,
        cleaner_endpoint: str = "",
        name_server_endpoints: Sequence[str],
        confirm_timeout_s: float = CONFIRM_TIMEOUT_S,
        queue_ends: Callable[[], Mapping[tuple[str, int], int]] | None = None,
        bind: Sequence[tuple[str, bool]] = (),
    ) -> None:
        config_dir = store_dir / "config"
        self._topics_file = ConfigFile(config_dir / "topics.json", TopicTable)
        self._topics = self._topics_file.load() or TopicTable()
        self._configs_file = ConfigFile(
            config_dir / "subscriptionGroup.json", SubscriptionGroupTable
        )
        self._configs = self._configs_file.load() or SubscriptionGroupTable()
        self._offsets = OffsetBook(config_dir / "consumerOffset.json")
        self._members_file = ConfigFile(config_dir / "consumerMembers.json", MemberTable)
        self._members = MemberTable()
        super().__init__(bind=bind)
        self._settings = settings
        self._confirm_timeout_s = confirm_timeout_s
        self._queue_ends = queue_ends
        self._session_timeout_s = settings.consumer_session_timeout_ms / 1000
        self._endpoints: BrokerEndpoints | None = None
        self._registered: BrokerEndpoints | None = None  # as a name server has confirmed them
        self._moved: list[tuple[Request, Timer]] = []  # EndpointsChanged that wait for that
        self._settled = False

        self._version = FIRST_VERSION  # of the topics
        self._changed_at: dict[str, int] = {}  # topic -> the version it was changed in
        self._waiting: list[_Waiting] = []

        self._first_group_version = _now_ms()  # above the versions of any earlier life
        self._groups: dict[str, ConsumerGroup] = {}
        self._queue_counts: dict[str, int] = {}  # topic -> queues that may be read
        self._saved_versions: dict[str, int] = {}  # group -> as it stands in the file
        self._held: dict[str, dict[str, _Held]] = {}  # group -> member
        self._overtaken: list[tuple[ConsumerGroup, str, _Held]] = []  # by the member's next one
        self._stirred: set[str] = set()  # groups whose held JoinGroups must be looked at
        self._commits: list[Request] = []  # put, but not yet saved

        self._keep_template_topic()
        self._announced = (0, self._topic_infos())  # what the commitlog process has confirmed
        self._count_queues()
        self._go_on_with_members()
        self._commitlog = self._line_to_commitlog(commitlog_endpoint)
        self._name_servers = [self._line_to_name_server(at) for at in name_server_endpoints]
        self._cleaner = Channel(cleaner_endpoint, "the cleaner") if cleaner_endpoint else None

    def on_start(self) -> None:
        """pykka's hook, in the actor's thread, before the first message."""
        if self._queue_ends is not None and self._offsets.put_back(self._queue_ends()):
            # Or what takes the places of lost messages would never reach these groups.
            self._offsets.sync()
        self._commitlog.send()
        self.every(REGISTER_INTERVAL_S, self._register)
        self.every(self._settings.flush_consumer_offset_interval_ms / 1000, self._flush)
        self.every(self._session_timeout_s / 8, self._expire_members)

    def on_stop(self) -> None:
        super().on_stop()
        for line in (self._commitlog, *self._name_servers):
            line.close()
        if self._cleaner is not None:
            self._cleaner.close()

    def settle(self) -> None:
        self._finish_round()
        self._settled = True
        error = ShuttingDown("the broker is stopping")
        for waiting in self._waiting:
            waiting.timer.cancel()
            waiting.request.fail(error)
        self._waiting.clear()
        for held_ones in self._held.values():
            for held in held_ones.values():
                held.request.fail(error)
        self._held.clear()
        self._unregister()
        try:
            self._flush()
        except ServiceNotAvailable as problem:  # on the disk as of the last time, then
            log.error("%s", problem)

    def statistics(self) -> dict[str, int | float | str]:
        return {
            "topics": len(self._topics.topic_config_table),
            "groups": len(self._configs.subscription_group_table),
            "members": sum(len(group.members) for group in self._groups.values()),
            "offset_file_writes": self._offsets.write_count,
            "held_joins": sum(len(held) for held in self._held.values()),
            "waiting_for_confirmation": len(self._waiting),
            "commitlog_trouble": self._commitlog.trouble,
            "name_server_trouble": "; ".join(
                line.trouble for line in self._name_servers if line.trouble
            ),
        }

    # --- rounds: everything that one drain of the sockets brought ---

    def on_requests(self, requests: list[Request]) -> None:
        super().on_requests(requests)
        self._finish_round()

    def _finish_round(self) -> None:
        """Make what happened outlive this process, then say that it happened."""
        self._save_offsets()
        self._save_members()
        overtaken, self._overtaken = self._overtaken, []
        for group, member, held in overtaken:
            self._answer_join(group, member, held)
        stirred, self._stirred = self._stirred, set()
        for name in stirred:
            self._answer_held(name)

    def _flush(self) -> None:
        self._save_offsets()
        self._offsets.sync()
        if self._members.groups:
            with contextlib.suppress(OSError):
                os.utime(self._members_file.path)  # so far this coordinator has lived

    # --- topics ---

    def on_ensure_topic(self, command: EnsureTopic, request: Request) -> None:
        topic = command.topic
        names.check_writable_topic(topic)
        known = topic in self._topics.topic_config_table
        if not known:
            if topic == TEMPLATE_TOPIC or not self._settings.auto_create_topic_enable:
                raise TopicNotExist(f"topic {topic} is unknown, and autoCreateTopicEnable is off")
            count = self._settings.default_topic_queue_nums
            self._put_topic(TopicInfo(topic, count, count, PERM_DEFAULT))
        self._answer_when_known(request, topic, lambda: self._route(topic), is_change=not known)

    def on_create_topic(self, command: CreateTopic, request: Request) -> None:
        info = command.info
        _check_changeable(info.topic)
        for kind, count in (("read", info.read_queues), ("write", info.write_queues)):
            if not 1 <= count <= QUEUES_MAX:
                raise BadRequest(f"{count} {kind} queues: 1 to {QUEUES_MAX}")
        if not 0 <= info.perm <= PERM_MAX:
            raise BadRequest(f"perm {info.perm}: 0 to {PERM_MAX}")
        is_change = self._put_topic(info)
        self._answer_when_known(
            request, info.topic, lambda: self._route(info.topic), is_change=is_change
        )

    def on_delete_topic(self, command: DeleteTopic, request: Request) -> None:
        topic = command.topic
        _check_changeable(topic)
        self._config_of(topic)
        self._save_offsets()
        # First the offsets: a topic of the same name must never find them.
        self._offsets.forget_topic(topic)
        if self._offsets.unsaved:
            self._offsets.save()
        remaining = dict(self._topics.topic_config_table)
        del remaining[topic]
        self._replace_topics(remaining, topic)
        log.info("topic %s is deleted", topic)
        self._answer_when_known(request, topic, Done, is_change=True)

    def on_list_topics(self, _command: ListTopics, _request: Request) -> Command:
        return TopicList(self._topic_infos())

    def _put_topic(self, info: TopicInfo) -> bool:
        """Create or change a topic, in the file as well. Whether anything is different now."""
        known = self._topics.topic_config_table.get(info.topic)
        config = msgspec.structs.replace(
            known or TopicConfig(topic_name=info.topic),
            read_queue_nums=info.read_queues,
            write_queue_nums=info.write_queues,
            perm=info.perm,
        )
        if config == known:
            return False
        self._replace_topics(self._topics.topic_config_table | {info.topic: config}, info.topic)
        text = "topic %s is %s: %d read queues, %d write queues, perm %d"
        done = "changed" if known else "created"
        log.info(text, info.topic, done, info.read_queues, info.write_queues, info.perm)
        if info.write_queues > info.read_queues:
            log.warning("topic %s: nobody will read the queues beyond its read queues", info.topic)
        return True

    def _replace_topics(self, configs: dict[str, TopicConfig], changed: str) -> None:
        version = self._topics.data_version.next(_now_ms())
        topics = TopicTable(data_version=version, topic_config_table=configs)
        _store(self._topics_file, topics, durable=True)
        self._topics = topics
        self._version += 1
        self._changed_at[changed] = self._version
        self._count_queues()
        for name, group in self._groups.items():
            if changed in group.topics():
                group.topics_changed()
                self._stirred.add(name)
        self._commitlog.send()

    def _keep_template_topic(self) -> None:
        """TBW102 exists while topics are created by themselves, as in RocketMQ."""
        configs = dict(self._topics.topic_config_table)
        before = configs.pop(TEMPLATE_TOPIC, None)
        config = None
        if self._settings.auto_create_topic_enable:
            count = self._settings.default_topic_queue_nums
            config = configs[TEMPLATE_TOPIC] = msgspec.structs.replace(
                before or TopicConfig(topic_name=TEMPLATE_TOPIC),
                read_queue_nums=count,
                write_queue_nums=count,
                perm=PERM_DEFAULT | INHERIT,
            )
        if config != before:
            version = self._topics.data_version.next(_now_ms())
            self._topics = TopicTable(data_version=version, topic_config_table=configs)
            try:
                _store(self._topics_file, self._topics, durable=True)
            except ServiceNotAvailable as error:  # it is made again at every start
                log.error("%s", error)

    def _topic_infos(self) -> list[TopicInfo]:
        return [_info(config) for config in self._topics.topic_config_table.values()]

    def _config_of(self, topic: str) -> TopicConfig:
        config = self._topics.topic_config_table.get(topic)
        if config is None:
            raise TopicNotExist(f"topic {topic} is unknown to this broker")
        return config

    def _count_queues(self) -> None:
        self._queue_counts.clear()
        for topic, config in self._topics.topic_config_table.items():
            self._queue_counts[topic] = config.read_queue_nums if config.perm & READ else 0

    def _route(self, topic: str) -> Command:
        assert self._endpoints is not None
        return TopicRoute(topic, [BrokerRoute(self._endpoints, _info(self._config_of(topic)))])

    # --- what the other processes must know before a topic is announced ---

    def on_endpoints_changed(self, command: EndpointsChanged, request: Request) -> None:
        """Answered when clients can find the broker; after a while also without a name server."""
        self._endpoints = command.endpoints
        self._registered = None

        def give_up() -> None:
            self._moved.remove((request, timer))
            request.reply(Done())

        timer = self.after(self._confirm_timeout_s, give_up)
        self._moved.append((request, timer))
        self._register()
        self._answer_moved()
        self._answer_waiting()

    def _register(self) -> None:
        for line in self._name_servers:
            line.send()

    def _unregister(self) -> None:
        """The one place that waits for another process: at the end, and not for long."""
        if self._endpoints is None:
            return
        me = self._endpoints
        command = UnregisterBroker(me.cluster, me.broker, me.broker_id)
        asked = [(line, line.ask_last(command)) for line in self._name_servers]
        deadline = time.monotonic() + UNREGISTER_TIMEOUT_S
        for line, pending in asked:
            if pending and not line.wait(pending, max(0.0, deadline - time.monotonic())):
                log.warning("%s did not hear that the broker is stopping", line.name)

    def _line_to_commitlog(self, endpoint: str) -> NewsLine:
        return NewsLine(
            self,
            "the commitlog process",
            endpoint,
            timeout_s=self._confirm_timeout_s * LINE_TIMEOUT_SHARE,
            news=self._news_for_commitlog,
            heard=self._on_commitlog_heard,
        )

    def _line_to_name_server(self, endpoint: str) -> NewsLine:
        return NewsLine(
            self,
            f"the name server {endpoint}",
            endpoint,
            timeout_s=self._confirm_timeout_s * LINE_TIMEOUT_SHARE,
            news=self._news_for_name_server,
            heard=self._on_name_server_heard,
        )

    def _on_name_server_heard(self, _version: int, command: Command | None) -> None:
        if isinstance(command, RegisterBroker):
            self._registered = command.endpoints
            self._answer_moved()
        self._answer_waiting()

    def _answer_moved(self) -> None:
        """Answer who said where the processes listen, once a name server has confirmed it."""
        if self._registered == self._endpoints or not self._name_servers:
            for request, timer in self._moved:
                timer.cancel()
                request.reply(Done())
            self._moved.clear()

    def _news_for_commitlog(self) -> tuple[int, Command] | None:
        return self._version, TopicsChanged(self._topic_infos())

    def _on_commitlog_heard(self, version: int, command: Command | None) -> None:
        if isinstance(command, TopicsChanged):
            # Only now may a client be led to these topics.
            self._announced = version, command.topics
            self._register()
        self._answer_waiting()

    def _news_for_name_server(self) -> tuple[int, Command] | None:
        if self._endpoints is None or self._settled:
            return None
        version, topics = self._announced
        return version, RegisterBroker(self._endpoints, topics)

    def _answer_when_known(
        self, request: Request, topic: str, answer: Callable[[], Command], *, is_change: bool
    ) -> None:
        """Answer as soon as every process knows the topic as it is now, or say which does not."""
        version = self._changed_at.get(topic, FIRST_VERSION)
        kind = NotConfirmed if is_change else ServiceNotAvailable

        def give_up() -> None:
            self._waiting.remove(waiting)
            request.fail(kind(f"topic {topic}: {self._missing(version)}"))

        waiting = _Waiting(request, version, answer, self.after(self._confirm_timeout_s, give_up))
        self._waiting.append(waiting)
        self._answer_waiting()

    def _answer_waiting(self) -> None:
        for waiting in list(self._waiting):
            if self._missing(waiting.version):
                continue
            self._waiting.remove(waiting)
            waiting.timer.cancel()
            try:
                answer = waiting.answer()
            except CometError as error:
                waiting.request.fail(error)
            else:
                waiting.request.reply(answer)

    def _missing(self, version: int) -> str:
        """What keeps a topic of that version from being announced; empty: nothing.

        A name server that is in trouble is not waited for as long as another has confirmed.
        """
        if self._endpoints is None:
            return "it is not known yet where this broker's processes listen"
        if self._commitlog.confirmed < version:
            return self._commitlog.complaint()
        behind = [line for line in self._name_servers if line.confirmed < version]
        if version == FIRST_VERSION or not behind:
            return ""
        if len(behind) < len(self._name_servers) and all(line.trouble for line in behind):
            return ""
        return behind[0].complaint()

    # --- what the cleaner does ---

    def _hand_to_cleaner(self, command: Command, request: Request) -> None:
        if self._cleaner is None:
            raise ServiceNotAvailable("no cleaner belongs to this coordinator")
        self._cleaner.request(
            command, on_done=lambda done: self.call_soon(partial(_hand_back, request, done))
        )

    on_delete_segments = on_place_hold = on_drop_hold = on_list_holds = _hand_to_cleaner

    # --- groups ---

    def on_join_group(self, command: JoinGroup, request: Request) -> None:
        subscriptions = _checked_subscriptions(command)
        config = self._group_config(command.group)
        if not config.consume_enable:
            raise NoPermission(f"group {command.group} may not consume (consumeEnable)")
        group = self._group(command.group)
        if command.member not in group and len(group.members) >= MEMBERS_MAX:
            raise SystemBusy(f"group {command.group} has {MEMBERS_MAX} members, and takes no more")
        group.join(
            command.member,
            subscriptions,
            command.owned,
            version=command.version,
            now=time.monotonic(),
        )
        self._hold(group, command, request)

    def on_leave_group(self, command: LeaveGroup, _request: Request) -> Command:
        group = self._groups.get(command.group)
        if group is not None and group.leave(command.member):
            self._stirred.add(command.group)
            self._save_members()
        return Done()

    def on_list_groups(self, _command: ListGroups, _request: Request) -> Command:
        topics = self._offsets.topics_of_groups()
        known = self._configs.subscription_group_table.keys() | self._groups.keys() | topics.keys()
        infos = []
        for name in sorted(known):
            group = self._groups.get(name)
            subscribed = group.topics() if group else ()
            infos.append(
                GroupInfo(
                    name,
                    group.members if group else [],
                    sorted({*topics.get(name, ()), *subscribed}),
                )
            )
        return GroupList(infos)

    def on_describe_group(self, command: DescribeGroup, _request: Request) -> Command:
        name = command.group
        names.check_group(name)
        self._save_offsets()  # nothing is told that a kill could still undo
        group = self._groups.get(name)
        queues = set(self._offsets.queues_of(name))
        if group is None and not queues and name not in self._configs.subscription_group_table:
            raise GroupNotExist(f"group {name} is unknown to this broker")
        for topic in group.topics() if group else ():
            queues.update(QueueKey(topic, i) for i in range(self._queue_counts.get(topic, 0)))
        return GroupDescription(
            name,
            group.members if group else [],
            group.subscriptions() if group else [],
            [
                GroupQueue(
                    queue.topic,
                    queue.queue_id,
                    self._offsets.get(name, queue.topic, queue.queue_id),
                    group.owner_of(queue) if group else "",
                )
                for queue in sorted(queues, key=lambda queue: (queue.topic, queue.queue_id))
            ],
        )

    def _group_config(self, name: str) -> SubscriptionGroupConfig:
        """The group's configuration; made, in the file as well, if it is unknown and allowed."""
        names.check_group(name)
        config = self._configs.subscription_group_table.get(name)
        if config is not None:
            return config
        if not self._settings.auto_create_subscription_group:
            raise GroupNotExist(f"group {name} is unknown, and autoCreateSubscriptionGroup is off")
        config = SubscriptionGroupConfig(group_name=name)
        configs = SubscriptionGroupTable(
            data_version=self._configs.data_version.next(_now_ms()),
            forbidden_table=self._configs.forbidden_table,
            subscription_group_table=self._configs.subscription_group_table | {name: config},
        )
        _store(self._configs_file, configs, durable=True)
        self._configs = configs
        log.info("group %s is created", name)
        return config

    def _group(self, name: str) -> ConsumerGroup:
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = self._new_group(name)
        return group

    def _new_group(
        self, name: str, record: GroupRecord | None = None, now: float = 0
    ) -> ConsumerGroup:
        return ConsumerGroup(
            name,
            self._queue_counts,
            session_timeout_s=self._session_timeout_s,
            record=record,
            first_version=self._first_group_version,
            now=now,
        )

    # --- held JoinGroups ---

    def _hold(self, group: ConsumerGroup, command: JoinGroup, request: Request) -> None:
        """Keep the request until the end of the round, or longer if it wants to wait."""
        held_ones = self._held.setdefault(command.group, {})
        earlier = held_ones.pop(command.member, None)
        if earlier is not None:
            self._overtaken.append((group, command.member, earlier))
        wait_s = min(command.wait_ms / 1000, self._session_timeout_s / 3)
        timer = None
        if wait_s > 0:
            timer = self.after(wait_s, partial(self._stop_holding, group, command.member, request))
        held_ones[command.member] = _Held(request, command.version, timer)
        self._stirred.add(command.group)

    def _stop_holding(self, group: ConsumerGroup, member: str, request: Request) -> None:
        held = self._held.get(group.name, {}).get(member)
        if held is not None and held.request is request:
            del self._held[group.name][member]
            self._answer_join(group, member, held)

    def _answer_held(self, name: str) -> None:
        """Answer the JoinGroups of a group that wait no longer: there is news, or no patience."""
        group = self._groups[name]
        held_ones = self._held.get(name, {})
        for member, held in list(held_ones.items()):
            has_news = member not in group or group.version_of(member) != held.version
            if has_news or held.timer is None:
                del held_ones[member]
                self._answer_join(group, member, held)

    def _answer_join(self, group: ConsumerGroup, member: str, held: _Held) -> None:
        if held.timer is not None:
            held.timer.cancel()
        held.request.reply(group.share_of(member))

    def _expire_members(self) -> None:
        now = time.monotonic()
        for name, group in self._groups.items():
            for member in group.expire(now):
                text = "group %s: member %s was silent for %g s; its queues go to others"
                log.warning(text, name, member, self._session_timeout_s)
                self._stirred.add(name)
        self._finish_round()

    # --- members, across a restart ---

    def _go_on_with_members(self) -> None:
        """Take up the groups where an earlier coordinator left them, unless they are too old."""
        try:
            members = self._members_file.load()
            if members is None:
                return
            since_s = time.time() - self._members_file.path.stat().st_mtime
        except (StoreDamaged, OSError) as error:
            log.warning("the groups start anew: %s", error)
            return
        self._members = members
        since_s -= self._settings.flush_consumer_offset_interval_ms / 1000  # see `_flush`
        now = time.monotonic()
        for name, record in self._members.groups.items():
            group = self._new_group(name, record, now - max(0.0, since_s))
            group.expire(now)
            self._groups[name] = group

    def _save_members(self) -> None:
        versions = {name: self._groups[name].version for name in self._stirred}
        if versions.items() <= self._saved_versions.items():
            return
        self._members = MemberTable(
            groups={name: group.record() for name, group in self._groups.items() if group.members}
        )
        try:
            _store(self._members_file, self._members, durable=False)
        except ServiceNotAvailable as error:
            # Sharing goes on; only a restart right now would not know of it.
            log.error("%s", error)
        else:
            self._saved_versions |= versions

    # --- offsets ---

    def on_commit_offsets(self, command: CommitOffsets, request: Request) -> None:
        self._group_config(command.group)
        if command.member:
            self._check_owner(command)
        for entry in command.offsets:
            self._check_offset(entry)
        for entry in command.offsets:
            self._commit(command.group, command.member, entry)
        self._commits.append(request)

    def on_fetch_offsets(self, command: FetchOffsets, _request: Request) -> Command:
        names.check_group(command.group)
        self._save_offsets()  # nothing is told that a kill could still undo
        return GroupOffsets(
            [
                QueueOffset(
                    queue.topic,
                    queue.queue_id,
                    self._offsets.get(command.group, queue.topic, queue.queue_id),
                )
                for queue in command.queues
            ]
        )

    def _check_owner(self, command: CommitOffsets) -> None:
        group = self._groups.get(command.group)
        if group is None or command.member not in group:
            raise NotOwner(f"{command.member[:140]} is not a member of group {command.group}")
        group.touch(command.member, time.monotonic())
        for entry in command.offsets:
            owner = group.owner_of(QueueKey(entry.topic, entry.queue_id))
            if owner != command.member:
                raise NotOwner(
                    f"queue {entry.queue_id} of {entry.topic} belongs to "
                    f"{owner or 'nobody'}, not to {command.member}"
                )

    def _check_offset(self, entry: QueueOffset) -> None:
        config = self._config_of(entry.topic)
        count = max(config.read_queue_nums, config.write_queue_nums)
        if not 0 <= entry.queue_id < count:
            raise OffsetIllegal(f"queue {entry.queue_id} of {entry.topic}: it has {count}")
        if not 0 <= entry.queue_offset <= QUEUE_OFFSET_MAX:
            raise OffsetIllegal(f"queue offset {entry.queue_offset}: 0 to {QUEUE_OFFSET_MAX}")

    def _commit(self, group: str, member: str, entry: QueueOffset) -> None:
        topic, queue_id, queue_offset = entry.topic, entry.queue_id, entry.queue_offset
        before = self._offsets.get(group, topic, queue_id)
        if queue_offset == before or (member and queue_offset < before):
            return  # an old commit that arrives late
        if queue_offset < before:
            text = "group %s: queue %d of %s goes back from %d to %d, by an administrator"
            log.warning(text, group, queue_id, topic, before, queue_offset)
        self._offsets.put(group, topic, queue_id, queue_offset)

    def _save_offsets(self) -> None:
        """One file for all commits that wait, then their answers."""
        commits, self._commits = self._commits, []
        try:
            if self._offsets.unsaved:
                self._offsets.save()
        except ServiceNotAvailable as error:
            log.error("%s", error)
            for request in commits:
                request.fail(error)
        else:
            for request in commits:
                request.reply(Done())


def _hand_back(request: Request, done: Pending) -> None:
    """What another process answered, to whoever asked us."""
    if done.answer is not None:
        request.reply(done.answer)
    elif done.error is not None:
        request.fail(done.error)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _store(file: ConfigFile[TableT], table: TableT, *, durable: bool) -> None:
    try:
        file.store(table, durable=durable)
    except (OSError, ValueError) as error:
        raise ServiceNotAvailable(f"{file.path.name} cannot be written: {error}") from error


def _info(config: TopicConfig) -> TopicInfo:
    return TopicInfo(
        config.topic_name, config.read_queue_nums, config.write_queue_nums, config.perm
    )


def _check_changeable(topic: str) -> None:
    names.check_writable_topic(topic)
    if topic == TEMPLATE_TOPIC:
        raise NameIllegal(f"topic {topic} is the broker's own; see autoCreateTopicEnable")


def _checked_subscriptions(command: JoinGroup) -> dict[str, str]:
    """topic -> tag expression; raises what is wrong with the command."""
    if not 1 <= len(command.member) <= MEMBER_NAME_MAX or not command.member.isprintable():
        shown = repr(command.member[:MEMBER_NAME_MAX])
        raise BadRequest(f"member name {shown}: 1 to {MEMBER_NAME_MAX} printable characters")
    if not command.subscriptions:
        raise SubscriptionIllegal(f"member {command.member} subscribes to nothing")
    subscriptions: dict[str, str] = {}
    for subscription in command.subscriptions:
        topic = subscription.topic
        names.check_topic(topic)
        parse_tags(subscription.tags)
        if subscriptions.setdefault(topic, subscription.tags) != subscription.tags:
            raise SubscriptionIllegal(f"member {command.member} subscribes to {topic} twice")
    return subscriptions
