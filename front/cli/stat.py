"""`cometmq stat`: what a running broker is doing, from its control file.

The counters are read from shared memory and ask nobody. Processes come from the broker actor, and
from the operating system when it does not answer.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
import psutil

from cometmq.actors.launch.addresses import address_of
from cometmq.actors.runtime import meters
from cometmq.actors.runtime.roles import role_of
from cometmq.cli.broker import load
from cometmq.cli.health import processes_of
from cometmq.cli.options import output_option
from cometmq.cli.output import JSON, console, print_json, record_of, table_of
from cometmq.cli.stat_replication import FOLLOWING, following_lines, slaves_in, slaves_text
from cometmq.cli.topics import BROKERS_OWN
from cometmq.client.routes import Routes
from cometmq.cluster.stores import supervisor_of
from cometmq.protocol.commands import (
    GetStatistics,
    Hold,
    HoldList,
    ListHolds,
    ListTopics,
    Statistics,
    TopicList,
)
from cometmq.protocol.errors import BadRequest, CometError, NotReachable
from cometmq.protocol.names import HIDDEN_TOPICS
from cometmq.protocol.topics import TopicMirror, catch_up
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter
from cometmq.shm.live.queue_table import QUEUES_FILE, QueueTable
from cometmq.shm.state.holds import read_holds

if TYPE_CHECKING:
    from rich.console import RenderableType

ASK_S: Final = 0.5
OFFSETS: Final = (
    Counter.MIN_OFFSET, Counter.ALLOCATED, Counter.WROTE, Counter.FLUSHED, Counter.DISPATCHED,
)  # fmt: skip
RATED: Final = ("wrote", "flushed", "dispatched", "messages", "flushes", "syncs")
CONNECTION_COUNTS: Final = tuple(meter.key for meter in meters.OF_CLIENTS)
PHASES: Final = ("starting", "recovered", "serving", "stopped")


@dataclass(frozen=True)
class Snapshot:
    """A broker at one moment. Offsets and lags are bytes of the CommitLog."""

    at: float  # time.monotonic()
    meta: dict[str, Any]
    counters: dict[str, int]
    topics: dict[str, dict[str, int]]
    processes: list[dict[str, Any]]
    holds: list[dict[str, Any]] = field(default_factory=list)
    broker: dict[str, Any] = field(default_factory=dict)  # as the broker actor says
    segments: dict[str, Any] = field(default_factory=dict)  # as the allocator says
    # By role, of those that clients come to; what reached a limit is counted there as well.
    connections: dict[str, dict[str, int]] = field(default_factory=dict)
    slaves: list[dict[str, Any]] = field(default_factory=list)
    replication: dict[str, Any] = field(default_factory=dict)  # as `ha` says; where it is
    following: dict[str, Any] = field(default_factory=dict)  # as a slave's commitlog process says

    def as_record(self, before: Snapshot | None) -> dict[str, Any]:
        """For JSON; rates per second where there is a moment to compare with."""
        counters = self.counters
        record: dict[str, Any] = {
            "broker": self.broker.get("broker"),
            "name_server": self.broker.get("name_server"),
            "restarts": self.broker.get("restarts"),
            **{key: self.meta[key] for key in ("version", "pid", "store", "started_ms", "flush")},
            "phase": PHASES[counters["phase"]],
            "counters": counters,
            "flush_behind_bytes": counters["wrote"] - counters["flushed"],
            "dispatch_behind_bytes": counters["wrote"] - counters["dispatched"],
            "segments": self.segments,
            "connections": self.connections,
            **({"following": self.following} if self.following else {}),
            "topics": self.topics,
            "holds": {hold["name"]: hold["physical_offset"] for hold in self.holds},
            "processes": self.processes,
        }
        if self.replication:
            record["replication"] = self.replication | {
                "slaves": {slave["address"]: slave for slave in self.slaves}
            }
        if before is not None:
            record["per_second"] = self.rates(before)
        return record

    def rates(self, before: Snapshot) -> dict[str, int]:
        seconds = max(self.at - before.at, 1e-6)
        return {
            name: round((self.counters[name] - before.counters[name]) / seconds) for name in RATED
        }


class Watcher:
    """Looks at one store's broker again and again.

    Raises NotReachable when no broker runs there.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        path = store / CONTROL_FILE
        if not path.exists():
            raise NotReachable(
                f"{store}: no broker is running on this store; --store names another one, "
                "--name-server asks brokers elsewhere"
            )
        self._control = ControlFile.open(path, writable=False)
        self.meta = self._control.meta
        self._queues = QueueTable.open(store / QUEUES_FILE, self._control.read(Counter.QUEUES))
        self._ports = [name for name in self.meta["roles"] if role_of(name).port is not None]
        self._slave_roles = [name for name in self.meta["roles"] if name == "ha"]
        self._channels = {
            role: Channel(address_of(self.meta["token"], role), f"the {role}")
            for role in ("broker", "allocator", *self._slave_roles, *self._ports)
        }
        self._known_topics = TopicMirror()
        self._known: dict[int, psutil.Process] = {}  # kept: a share of CPU is since the last look
        self._check_alive()

    def _check_alive(self) -> None:
        if supervisor_of(self.meta) is not None:
            return
        raise NotReachable(
            f"{self._store}: the broker (process {self.meta['pid']}) is gone and did not end in "
            "order; the next start recovers the store"
        )

    def look(self) -> Snapshot:
        self._check_alive()
        found = self._ask_all()
        broker = found["broker"]
        return Snapshot(
            time.monotonic(),
            self.meta,
            self._control.values(),
            self._topics(),
            list(self._processes(broker)),
            [msgspec.structs.asdict(hold) for hold in self._holds()],
            broker,
            found["allocator"],
            {
                role: {name: found[role][name] for name in CONNECTION_COUNTS if name in found[role]}
                for role in self._ports
            },
            *slaves_in(found.get("ha", {})),
            {name: found["commitlog"][name] for name in FOLLOWING if name in found["commitlog"]},
        )

    def _ask_all(self) -> dict[str, dict[str, Any]]:
        """By role; nothing of one that is busy, or another user's."""
        asked = {
            role: (channel, channel.request(GetStatistics()))
            for role, channel in self._channels.items()
        }
        deadline = time.monotonic() + ASK_S
        found: dict[str, dict[str, Any]] = {}
        for role, (channel, pending) in asked.items():
            found[role] = {}
            if channel.wait(pending, max(0.0, deadline - time.monotonic())):
                with contextlib.suppress(CometError):
                    answer, _ = pending.result()
                    if isinstance(answer, Statistics):
                        found[role] = answer.values
        return found

    def _holds(self) -> list[Hold]:
        """Of a coordinator that is busy, or another user's, as its last snapshot has them."""
        with contextlib.suppress(CometError):
            answer, _ = self._channels["coordinator"].ask(ListHolds(), timeout_s=ASK_S)
            if isinstance(answer, HoldList):
                return sorted(answer.holds, key=lambda hold: hold.name)
        return read_holds(self._store)

    def _topics(self) -> dict[str, dict[str, int]]:
        """`queues` are those that a topic has to be read from, as in `topic list`; some may never
        have had a message."""
        found: dict[str, dict[str, int]] = defaultdict(lambda: {"queues": 0, "messages": 0})
        with contextlib.suppress(CometError):  # as of one that is busy: what was known before
            catch_up(self._known_topics, self._ask_topics)
        for name, info in self._known_topics.topics.items():
            if name not in BROKERS_OWN:
                found[name]["queues"] = info.read_queues
        for topic, queue_id in self._queues.queues():
            if topic in HIDDEN_TOPICS:
                continue
            queue_range = self._queues.range_of(topic, queue_id)
            if queue_range is not None:
                found[topic]["queues"] = max(found[topic]["queues"], queue_id + 1)
                found[topic]["messages"] += (
                    queue_range.max_queue_offset - queue_range.min_queue_offset
                )
        return dict(sorted(found.items()))

    def _ask_topics(self, command: ListTopics) -> TopicList:
        answer, _ = self._channels["coordinator"].ask(command, timeout_s=ASK_S)
        if not isinstance(answer, TopicList):
            raise BadRequest(f"{type(answer).__name__} is no answer to ListTopics")
        return answer

    def _processes(self, broker: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The supervisor, and the children it has."""
        roles = {
            figures[meters.PROCESS_ID.field]: role
            for role, figures in meters.by_label(broker, meters.PROCESS_ID).items()
        }
        supervisor = psutil.Process(self.meta["pid"])
        yield self._usage(supervisor, "broker")
        for child in supervisor.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                name = child.name()  # the zygote, which starts the others, has none of its own
                other = name.removeprefix("cmq-") if name.startswith("cmq-") else "zygote"
                yield self._usage(child, roles.get(child.pid, other))

    def _usage(self, found: psutil.Process, role: str) -> dict[str, Any]:
        """Its share of the memory (PSS: what is shared counts in parts) and its time on a CPU.

        A percentage needs a look before this one.
        """
        is_new = found.pid not in self._known
        process = self._known.setdefault(found.pid, found)
        with process.oneshot():
            times = process.cpu_times()
            percent = process.cpu_percent()
            return {
                "role": role,
                "pid": process.pid,
                "pss_bytes": _pss(process),
                "cpu_s": round(times.user + times.system, 2),
                "cpu_percent": None if is_new else percent,
            }

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()


def _pss(process: psutil.Process) -> int | None:
    try:
        return int(process.memory_full_info().pss)
    except psutil.AccessDenied:
        return None


# --- the command ----------------------------------------------------------------------------------


@click.command()
@click.option("--store", metavar="DIR", help="The broker's store. [./store]")
@click.option("--json", "as_json", is_flag=True, help="The same as -o json.")
@click.option(
    "-w",
    "--watch",
    metavar="SECONDS",
    type=click.FloatRange(0.05),
    help="Look again and again, and show rates. With JSON, a line each time; in a pipe, each time "
    "the values below a line with the time.",
)
@click.option(
    "--name-server", metavar="HOST:PORT", help="Of all brokers there, as their processes tell it."
)
@output_option
def stat(
    store: str | None,
    as_json: bool,
    watch: float | None,
    name_server: str | None,
    output: str,
) -> None:
    """Show what a running broker is doing.

    Reads the broker's control file, which disturbs nobody: counters, what is written and not yet
    flushed or dispatched, topics, and the family of processes. Exit code 3 when no broker runs on
    the store. With --name-server, brokers of other machines are asked for what their processes
    count.
    """
    as_json = as_json or output == JSON
    if name_server is not None:
        if store or watch:
            raise click.UsageError("--name-server goes without --store and --watch")
        _show_remote(name_server, as_json)
        return
    folder = Path(store) if store else load(None, ()).settings.store_path_root_dir
    watcher = Watcher(folder)
    try:
        if watch is None:
            _show_once(watcher, as_json)
        else:
            _watch(watcher, watch, as_json)
    finally:
        watcher.close()


def _show_remote(name_server: str, as_json: bool) -> None:
    routes = Routes(name_server)
    found: dict[str, dict[str, Any]] = {}
    try:
        for broker in routes.masters():
            found[broker.broker] = {
                process: routes.ask(address, GetStatistics(), Statistics, name=process).values
                for process, address in processes_of(broker)
            }
    finally:
        routes.close()
    if as_json:
        print_json(found)
    else:
        _print_tsv(found)


def _show_once(watcher: Watcher, as_json: bool) -> None:
    snapshot = watcher.look()
    if as_json:
        print_json(snapshot.as_record(None))
    elif sys.stdout.isatty():
        console().print(drawing(snapshot, None))
    else:
        _print_tsv(snapshot.as_record(None))


def _watch(watcher: Watcher, seconds: float, as_json: bool) -> None:
    """Until Ctrl-C, or until the broker ends."""
    if as_json or not sys.stdout.isatty():
        before = watcher.look()
        while True:
            time.sleep(seconds)
            now = watcher.look()
            record = now.as_record(before)
            if as_json:
                click.echo(json.dumps(record))
            else:
                _print_tsv({"time": datetime.now().astimezone().isoformat(), **record})
            sys.stdout.flush()
            before = now
    from rich.live import Live

    before = watcher.look()
    with Live(drawing(before, None), console=console(), auto_refresh=False) as live:
        while True:
            time.sleep(seconds)
            now = watcher.look()
            live.update(drawing(now, before), refresh=True)
            before = now


def _print_tsv(record: dict[str, Any]) -> None:
    """One value a line, under its path."""

    def walk(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{path}.{key}" if path else key, inner)
        elif isinstance(value, list):
            for entry in value:
                walk(f"{path}.{entry['role']}", entry)
        else:
            click.echo(f"{path}\t{'' if value is None else value}")

    walk("", record)


def drawing(snapshot: Snapshot, before: Snapshot | None) -> RenderableType:
    """The page that a terminal shows."""
    from rich.console import Group
    from rich.table import Table

    counters = snapshot.counters
    record = snapshot.as_record(None)
    running_s = int(time.time() - snapshot.meta["started_ms"] / 1000)
    head = {
        "broker": record["broker"] or "(does not answer)",
        "store": record["store"],
        "name_server": record["name_server"],
        "state": f"{record['phase']} for {running_s:,} s, {record['restarts'] or 0} restarts, "
        f"{record['flush']}",
        "behind": f"flush {record['flush_behind_bytes']:,} bytes, "
        f"dispatch {record['dispatch_behind_bytes']:,} bytes",
        **following_lines(snapshot.following, counters["wrote"]),
        **_segment_lines(snapshot.segments),
        "connections": _connections(snapshot.connections),
    }
    rates = snapshot.rates(before) if before else {}
    rows = [
        {"counter": name, "value": value, "per_second": rates.get(name)}
        for name, value in counters.items()
        if name in RATED or Counter[name.upper()] in OFFSETS or name == "queues"
    ]
    if record["holds"]:
        head["holds"] = ", ".join(f"{name} at {at:,}" for name, at in record["holds"].items())
    if snapshot.replication:
        head["slaves"] = slaves_text(snapshot.slaves)
    topics = [{"topic": name, **values} for name, values in snapshot.topics.items()]
    grid = Table.grid(padding=(0, 3))
    grid.add_row(
        Group(table_of(rows), table_of(topics, columns=("topic", "queues", "messages"))),
        table_of([_process_row(process, before) for process in snapshot.processes]),
    )
    return Group(record_of(head), grid)


def _segment_lines(segments: dict[str, Any]) -> dict[str, str]:
    """What was got ready ahead of the log's end, and what could not be had."""
    if not segments:
        return {}
    lines = {
        "segments": f"{segments['fresh_segments']} made, "
        f"{segments['recycled_segments']} used again",
        "hot_window": segments["hot_window"],
    }
    return lines | ({"limits": segments["limits"]} if segments["limits"] else {})


def _connections(by_role: dict[str, dict[str, int]]) -> str:
    """How many there are, and what reached a limit."""
    sums = {name: sum(each.get(name, 0) for each in by_role.values()) for name in CONNECTION_COUNTS}
    text = f"{sums.pop('connections'):,}"
    for name, count in sums.items():
        if count:
            text += f", {count:,} {name.replace('_', ' ')}"
    return text


def _process_row(process: dict[str, Any], before: Snapshot | None) -> dict[str, Any]:
    pss = process["pss_bytes"]
    row = {
        "process": process["role"],
        "pid": str(process["pid"]),
        "PSS_MiB": None if pss is None else round(pss / 1_048_576, 1),
        "CPU_s": process["cpu_s"],
    }
    return row if before is None else {**row, "CPU_%": process["cpu_percent"]}


__all__ = ["Snapshot", "Watcher", "stat"]
