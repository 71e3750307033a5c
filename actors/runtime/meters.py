"""Meters: every figure that a process reports, declared once.

A process reports its figures in a `Statistics` command, by the keys of these declarations.
`cometmq stat`, `cometmq cluster status` and docs/statistics.md read the same declarations, so that
no reader takes a key apart.

A declaration says what the figure is (`Kind`), in which unit, and what RocketMQ 5 calls it where it
has the same figure. Where a process reports a figure for several objects (slaves, replicas), the
key has the object's label in the place of `{...}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

Value = int | float | str


class Kind(StrEnum):
    """How a figure behaves in time."""

    COUNTER = "counter"  # only grows, from 0 at the start of its process
    GAUGE = "gauge"
    TEXT = "text"


@dataclass(frozen=True, eq=False)
class Meter:
    """The declaration of one figure.

    Args:
        name: its key in `Statistics.values`; a label's place is `{label}`.
        kind: counter, gauge or text.
        unit: what one is; empty for a text or a plain state.
        help: what it says, a phrase.
        processes: the roles that report it.
        rocketmq: the name of the same figure in RocketMQ 5's metrics; empty where it has none.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    processes: tuple[str, ...]
    rocketmq: str = ""

    @property
    def key(self) -> str:
        assert not self.label, f"{self.name} is reported for each {self.label}: use `of`"
        return self.name

    @property
    def label(self) -> str:
        """The name of its label; empty if there is none."""
        return self.name.partition("{")[2].partition("}")[0]

    @property
    def field(self) -> str:
        """Its name among the figures of one object: `lag_bytes` of `slave.{slave}.lag_bytes`."""
        return self.name.rpartition("}.")[2]

    def of(self, label: object) -> Labelled:
        """This figure of one object.

        Args:
            label: the object's name or number.
        """
        return Labelled(self, str(label))

    def label_in(self, key: str) -> str | None:
        """The label in a key of this figure; None for the key of another figure."""
        assert self.label, f"{self.name} has no label"
        head, _, tail = self.name.partition("{" + self.label + "}")
        if key.startswith(head) and key.endswith(tail) and len(key) > len(head) + len(tail):
            return key[len(head) : len(key) - len(tail)]
        return None


@dataclass(frozen=True)
class Labelled:
    """A figure of one object, see `Meter.of`."""

    meter: Meter
    label: str

    @property
    def key(self) -> str:
        return self.meter.name.replace("{" + self.meter.label + "}", self.label)


Figures = dict[Meter | Labelled, Value]
Counts = dict[Meter | Labelled, int]


def zeroes(*meters: Meter) -> Counts:
    """Counters before anything is counted."""
    return dict.fromkeys(meters, 0)


def values_of(figures: Mapping[Meter | Labelled, Value]) -> dict[str, Value]:
    """Figures as `Statistics` carries them."""
    return {figure.key: value for figure, value in figures.items()}


def by_label(values: Mapping[str, Value], *meters: Meter) -> dict[str, dict[str, Value]]:
    """Figures that are reported for each object of a kind.

    Args:
        values: of a `Statistics` command.
        meters: those that are wanted; they share one label.

    Returns:
        By label, in the order of `values`: the figures by their fields.
    """
    found: dict[str, dict[str, Value]] = {}
    for key, value in values.items():
        for meter in meters:
            if (label := meter.label_in(key)) is not None:
                found.setdefault(label, {})[meter.field] = value
    return found


METERS: Final[dict[str, Meter]] = {}


def _declare(
    kind: Kind, name: str, unit: str, help: str, processes: str, rocketmq: str = ""
) -> Meter:
    assert name not in METERS, name
    METERS[name] = Meter(name, kind, unit, help, tuple(processes.split()), rocketmq)
    return METERS[name]


def _counter(name: str, unit: str, help: str, processes: str, rocketmq: str = "") -> Meter:
    return _declare(Kind.COUNTER, name, unit, help, processes, rocketmq)


def _gauge(name: str, unit: str, help: str, processes: str, rocketmq: str = "") -> Meter:
    return _declare(Kind.GAUGE, name, unit, help, processes, rocketmq)


def _text(name: str, help: str, processes: str) -> Meter:
    return _declare(Kind.TEXT, name, "", help, processes)


# --- processes that clients connect to ------------------------------------------------------------

_LISTENING: Final = "broker commitlog cleaner coordinator namesrv reader scheduler"

PID = _gauge("pid", "", "Process id.", "commitlog ha")
CONNECTIONS = _gauge(
    "connections", "connections", "Connections of clients (ha: of slaves).", f"{_LISTENING} ha"
)
CONNECTIONS_REFUSED = _counter(
    "connections_refused", "connections", "Connections refused at the limit.", _LISTENING
)
CONNECTIONS_ENDED = _counter(
    "connections_ended", "connections", "Connections closed for what they left unread.", _LISTENING
)
HANDSHAKES_FAILED = _counter(
    "handshakes_failed", "connections", "Connections that did not complete a handshake.", _LISTENING
)
ACCEPTS_FAILED = _counter(
    "accepts_failed", "times", "Connections not accepted for want of a descriptor.", _LISTENING
)
OF_CLIENTS: Final = (
    CONNECTIONS, CONNECTIONS_REFUSED, CONNECTIONS_ENDED, HANDSHAKES_FAILED, ACCEPTS_FAILED,
)  # fmt: skip

# --- broker (supervisor) --------------------------------------------------------------------------

PROCESS_ID = _gauge("pid.{process}", "", "Process id of a child; 0 if it is not running.", "broker")
RESTARTS = _counter("restarts", "times", "Restarts of processes in this run.", "broker")
EPOCH = _gauge("epoch", "", "Epoch of the broker's run, or of the group's master.", "broker ha")
SERVES = _gauge("serves", "", "1 while every process serves.", "broker")
BROKER = _text("broker", "Name of the broker.", "broker")
NAME_SERVER = _text("name_server", "Address of the built-in name server.", "broker")

# --- commitlog ------------------------------------------------------------------------------------

MESSAGES = _counter(
    "messages",
    "messages",
    "Messages stored in this run.",
    "commitlog",
    "rocketmq_messages_in_total",
)
WROTE = _gauge("wrote", "bytes", "End of the CommitLog.", "commitlog")
QUEUES = _gauge("queues", "queues", "Queues of all topics.", "commitlog dispatcher")
TOPICS = _gauge(
    "topics", "topics", "Topics known.", "commitlog coordinator namesrv", "rocketmq_topic_number"
)
WAITING_FOR_FLUSH = _gauge(
    "waiting_for_flush", "requests", "Sends whose answers wait for the disk or a replica.",
    "commitlog",
)  # fmt: skip
REPEATS_FOUND = _counter(
    "repeats_found", "messages", "Repeated sends that were stored already.", "commitlog"
)
COPIES_BY_KEY = _counter(
    "copies_by_key", "messages", "Messages not stored again, by their key.", "commitlog"
)
TRANSACTIONS_COMMITTED = _counter(
    "transactions_committed", "transactions", "Transactions committed.", "commitlog",
    "rocketmq_commit_messages_total",
)  # fmt: skip
TRANSACTIONS_ROLLED_BACK = _counter(
    "transactions_rolled_back", "transactions", "Transactions rolled back.", "commitlog",
    "rocketmq_rollback_messages_total",
)  # fmt: skip
SYNCS = _counter("syncs", "times", "Syncs of the log by the commitlog process.", "commitlog")
STAGED_BYTES = _gauge("staged_bytes", "bytes", "Batches that wait in stages.", "commitlog")
DERIVERS = _gauge("derivers", "", "Processors whose positions are kept.", "commitlog")
NAMED_PRODUCERS = _gauge("named_producers", "producers", "Producers with an id.", "commitlog")
REQUESTERS = _gauge("requesters", "mailboxes", "Mailboxes of requesters.", "commitlog")
REPLY_BYTES = _gauge("reply_bytes", "bytes", "Replies that wait in mailboxes.", "commitlog")

# --- commitlog of a slave or follower -------------------------------------------------------------

MASTER = _text("master", "The master that is followed, or the group's master.", "commitlog ha")
MASTER_STATE = _text("master_state", "State of the connection to the master.", "commitlog")
MASTER_TROUBLE = _text("master_trouble", "Last failure of that connection.", "commitlog")
ACKNOWLEDGED = _gauge("acknowledged", "bytes", "Log end reported to the master.", "commitlog")
LAST_HEARD_S = _gauge("last_heard_s", "s", "Time since the master's last frame.", "commitlog")
BEHIND_MS = _gauge("behind_ms", "ms", "Age of the last copied message.", "commitlog")

# --- allocator ------------------------------------------------------------------------------------

ALLOCATED = _gauge("allocated", "bytes", "End of the reserved file space.", "allocator")
RESERVED_BYTES = _gauge(
    "reserved_bytes", "bytes", "File space reserved ahead of the log's end.", "allocator"
)
FRESH_SEGMENTS = _counter("fresh_segments", "segments", "Segments created.", "allocator")
RECYCLED_SEGMENTS = _counter("recycled_segments", "segments", "Segments reused.", "allocator")
HOT_WINDOW = _text("hot_window", "State of the pages kept in memory.", "allocator")
LIMITS = _text("limits", "Limits of the system that were reached.", "allocator")

# --- dispatcher, flush ----------------------------------------------------------------------------

BEHIND_BYTES = _gauge(
    "behind_bytes", "bytes", "Log not yet dispatched (dispatcher) or not yet synced (flush).",
    "dispatcher flush",
    "rocketmq_storage_dispatch_behind_bytes, rocketmq_storage_flush_behind_bytes",
)  # fmt: skip
ENTRY_BYTES = _gauge("entry_bytes", "bytes", "Size of a ConsumeQueue entry.", "dispatcher")
INDEX = _text("index", "`off` where messages are not indexed by keys.", "dispatcher")
INDEX_BEHIND_BYTES = _gauge(
    "index_behind_bytes", "bytes", "Dispatched log not yet indexed.", "dispatcher"
)
FLUSHES = _counter("flushes", "times", "Syncs of the log by the flush process.", "flush")

# --- cleaner --------------------------------------------------------------------------------------

MIN_OFFSET = _gauge("min_offset", "bytes", "Beginning of the CommitLog.", "cleaner")
DELETED_SEGMENTS = _counter("deleted_segments", "segments", "Segments deleted.", "cleaner")
ROUNDS = _counter("rounds", "times", "Completed cleaning rounds.", "cleaner")
RETIRED_BYTES = _gauge("retired_bytes", "bytes", "Deleted segments still on the disk.", "cleaner")
DISK_USED_PERCENT = _gauge("disk_used_percent", "percent", "Use of the store's disk.", "cleaner")
VERIFIED_BYTES = _counter("verified_bytes", "bytes", "Log read and verified.", "cleaner")
VERIFIED_PASSES = _counter("verified_passes", "times", "Verifications of the whole log.", "cleaner")
DAMAGES = _counter("damages", "records", "Corrupt records found.", "cleaner")
WRITABLE = _text("writable", "`no` while the disk is too full for new messages.", "cleaner")
HOLDS = _text("holds", "Holds that keep segments, with their offsets.", "cleaner")
HELD_SEGMENTS = _gauge(
    "held_segments", "segments", "Deleted segments that a reader uses.", "cleaner"
)
FREE_SEGMENTS = _gauge("free_segments", "segments", "Deleted segments ready for reuse.", "cleaner")
RELEASING_SEGMENTS = _gauge(
    "releasing_segments", "segments", "Deleted segments whose space is being freed.", "cleaner"
)
FORCED_SEGMENTS = _counter(
    "forced_segments", "segments", "Segments freed although a reader used them.", "cleaner"
)

# --- reader ---------------------------------------------------------------------------------------

HELD_PULLS = _gauge("held_pulls", "requests", "Pulls that wait for messages.", "reader")
PULLS_WITHOUT_ROOM = _gauge(
    "pulls_without_room", "requests", "Pulls that wait for memory for answers.", "reader"
)
MESSAGES_OUT = _counter(
    "messages_out", "messages", "Messages sent to consumers over ZeroMQ.", "reader",
    "rocketmq_messages_out_total",
)  # fmt: skip

# --- scheduler ------------------------------------------------------------------------------------

DELIVERED_LATER = _counter(
    "delivered_later", "messages", "Messages delivered after a delay level.", "scheduler"
)
TIMERS_PENDING = _gauge(
    "timers_pending", "messages", "Timed messages not yet due.", "scheduler",
    "rocketmq_timing_messages",
)  # fmt: skip
TIMERS_DELIVERED = _counter(
    "timers_delivered", "messages", "Timed messages delivered.", "scheduler"
)
NEVER_DELIVERED = _counter(
    "never_delivered", "messages", "Due messages that the log refused for good.", "scheduler"
)
GIVEN_BACK = _counter("given_back", "messages", "Retries and dead letters stored.", "scheduler")
TRANSACTIONS_CHECKED = _counter(
    "transactions_checked", "transactions", "Checks sent to producers.", "scheduler"
)
TRANSACTIONS_GIVEN_UP = _counter(
    "transactions_given_up", "transactions", "Transactions given up after the last check.",
    "scheduler",
)  # fmt: skip
REVIVED = _counter(
    "revived", "messages", "Messages redelivered from RocketMQ's POP check points.", "scheduler"
)

# --- coordinator, name server ---------------------------------------------------------------------

CONFIG_FILE_WRITES = _counter("config_file_writes", "files", "Snapshots written.", "coordinator")
LEDGER_ENTRIES = _counter("ledger_entries", "entries", "Entries of the ledger.", "coordinator")
LEDGER_POSITION = _gauge(
    "ledger_position", "", "Queue offset up to which a slave has read the ledger.", "coordinator"
)
GROUPS = _gauge(
    "groups", "groups", "Consumer groups.", "coordinator", "rocketmq_consumer_group_number"
)
MEMBERS = _gauge(
    "members", "members", "Members of all groups.", "coordinator", "rocketmq_consumer_connections"
)
HELD_JOINS = _gauge("held_joins", "requests", "Joins that wait for an update.", "coordinator")
WAITING_FOR_CONFIRMATION = _gauge(
    "waiting_for_confirmation", "requests", "Topic changes that are not confirmed yet.",
    "coordinator",
)  # fmt: skip
COMMITLOG_TROUBLE = _text(
    "commitlog_trouble", "Why topics do not reach the commitlog process.", "coordinator"
)
NAME_SERVER_TROUBLE = _text(
    "name_server_trouble", "Why name servers are not reached.", "coordinator"
)
POPPED = _gauge("popped", "ranges", "Ranges of messages in flight to pop consumers.", "coordinator")
HELD_POPS = _gauge("held_pops", "requests", "Pops that wait for messages.", "coordinator")
NEVER_POPPED_AGAIN = _counter(
    "never_popped_again", "messages", "Popped messages that could not be retried.", "coordinator"
)
BROKERS = _gauge("brokers", "brokers", "Registered brokers.", "namesrv")

# --- ha of a master with slaves -------------------------------------------------------------------

SLAVES = _gauge("slaves", "slaves", "Connected slaves.", "ha")
SLAVES_IN_SYNC = _gauge("slaves_in_sync", "slaves", "Slaves close enough to be waited for.", "ha")
SLAVES_CONNECTED = _counter("slaves_connected", "times", "Connections of slaves.", "ha")
SLAVES_LOST = _counter("slaves_lost", "times", "Connections of slaves that ended.", "ha")
SLAVES_REFUSED = _counter(
    "slaves_refused", "times", "Connections ended for a protocol error.", "ha"
)
SLAVES_NOT_ADMITTED = _counter(
    "slaves_not_admitted", "times", "Connections from addresses not admitted.", "ha"
)
REPLICATED = _gauge("replicated", "bytes", "End of the replicated log.", "ha")
SLAVE_ADDRESS = _text("slave.{slave}.address", "Address of a slave.", "ha")
SLAVE_ACKNOWLEDGED = _gauge("slave.{slave}.acknowledged", "bytes", "Log end it reported.", "ha")
SLAVE_LAG_BYTES = _gauge("slave.{slave}.lag_bytes", "bytes", "Log it has yet to receive.", "ha")
SLAVE_SINCE_MS = _gauge("slave.{slave}.since_ms", "ms", "Time of its connection (epoch).", "ha")
OF_SLAVE: Final = (SLAVE_ADDRESS, SLAVE_ACKNOWLEDGED, SLAVE_LAG_BYTES, SLAVE_SINCE_MS)

# --- ha of a replica in a group -------------------------------------------------------------------

GROUP = _text("group", "Name of the group of replicas.", "ha")
REPLICA = _text("replica", "Name of this replica.", "ha")
REPLICA_ROLE = _text("replica_role", "`master` or `follower`.", "ha")
IN_SYNC = _text("in_sync", "Names of the in-sync replicas.", "ha")
END = _gauge("end", "bytes", "End of this replica's log.", "ha")
TROUBLE = _text("trouble", "Why this replica left its group.", "ha")
PEERS = _gauge("peers", "replicas", "Other replicas of the group.", "ha")
PEERS_CONNECTED = _gauge(
    "peers_connected", "replicas", "Replicas that frames can be sent to.", "ha"
)
PEERS_CONNECTIONS = _gauge("peers_connections", "connections", "Incoming connections.", "ha")
PEERS_SENT = _counter("peers_sent", "frames", "Frames sent.", "ha")
PEERS_SENT_BYTES = _counter("peers_sent_bytes", "bytes", "Content of frames sent.", "ha")
PEERS_DROPPED = _counter(
    "peers_dropped", "frames", "Frames dropped for want of a connection.", "ha"
)
PEERS_HEARD = _counter("peers_heard", "frames", "Frames received.", "ha")
PEERS_HEARD_BYTES = _counter("peers_heard_bytes", "bytes", "Content of frames received.", "ha")
PEERS_REFUSED = _counter("peers_refused", "times", "Connections ended for an invalid frame.", "ha")
PEERS_NOT_ADMITTED = _counter(
    "peers_not_admitted", "times", "Connections of replicas that are not of the group.", "ha"
)
PEERS_CONNECTIONS_ENDED = _counter(
    "peers_connections_ended", "times", "Connections replaced or lost.", "ha"
)
PEERS_CONNECTIONS_REFUSED = _counter(
    "peers_connections_refused", "times", "Connections refused before their handshake.", "ha"
)
PEERS_HANDSHAKES_FAILED = _counter(
    "peers_handshakes_failed", "times", "Connections whose TLS handshake failed.", "ha"
)
PEERS_ACCEPTS_FAILED = _counter(
    "peers_accepts_failed", "times", "Connections not accepted for want of a descriptor.", "ha"
)
PEER_ADDRESS = _text("peer.{replica}.address", "Address of another replica.", "ha")
PEER_CONNECTED = _gauge("peer.{replica}.connected", "", "1 while frames can be sent to it.", "ha")
FOLLOWER_REPLICA = _text("follower.{number}.replica", "Name of a follower.", "ha")
FOLLOWER_HELD = _gauge("follower.{number}.held", "bytes", "Log end it confirmed.", "ha")
FOLLOWER_LAG_BYTES = _gauge(
    "follower.{number}.lag_bytes", "bytes", "Log it has yet to confirm.", "ha"
)
FOLLOWER_IN_SYNC = _gauge("follower.{number}.in_sync", "", "1 while it is in sync.", "ha")
FOLLOWER_WHY = _text("follower.{number}.why", "Why it is not in sync.", "ha")
FOLLOWER_TROUBLE = _text("follower.{number}.trouble", "What the replica itself reported.", "ha")
OF_FOLLOWER: Final = (
    FOLLOWER_REPLICA, FOLLOWER_HELD, FOLLOWER_LAG_BYTES, FOLLOWER_IN_SYNC, FOLLOWER_WHY,
    FOLLOWER_TROUBLE,
)  # fmt: skip


def as_markdown() -> str:
    """docs/statistics.md: all figures, by process."""
    return "".join(_page())


def _page() -> Iterator[str]:
    yield (
        "# Statistics\n\nWhat each process of a broker reports. `cometmq stat` shows the most "
        "important figures;\n`cometmq stat --name-server HOST:PORT` prints all of them, a line "
        "each. Counters begin at 0 when\ntheir process starts and only grow. This page is printed "
        "from `actors/runtime/meters.py`.\n"
    )
    for process in sorted({process for meter in METERS.values() for process in meter.processes}):
        yield f"\n## {process}\n\n| Name | Kind | Unit | Meaning | RocketMQ 5 |\n"
        yield "| --- | --- | --- | --- | --- |\n"
        for meter in METERS.values():
            if process in meter.processes:
                yield (
                    f"| `{meter.name}` | {meter.kind} | {meter.unit} | {meter.help} "
                    f"| {meter.rocketmq and f'`{meter.rocketmq}`'} |\n"
                )
