"""What a group has to have kept, in the logs and queues of all its replicas.

Beside what the checker asks of any history:

- what is confirmed is the same bytes in each replica's log, its end the same for all;
- each store holds together by itself: queues, index and log;
- an epoch has one master;
- nothing was ever read above what was confirmed, on any replica (Peeker), and nothing that
  was read or delivered is missing at the end (`gone`, and the checker's VANISHED).
"""

from __future__ import annotations

import contextlib
import errno
import random
import re
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

import reference
from family import pull
from fault.checker import Verdict, add_store_findings
from fault.history import History, Op, read_histories, value_of
from fault.work import Work

from cometmq.actors.launch.addresses import address_of
from cometmq.protocol.commands import GetQueueRange, PullMessages, QueueRange
from cometmq.protocol.errors import CometError
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.live.control import ControlFile, Counter
from cometmq.shm.os.files import COMMITLOG_DIR, list_segments, segment_name
from cometmq.shm.tools.verify import verify_store

SEGMENT_BYTES: Final = 1 << 20
PEEK_S: Final = 0.1
PEEKED: Final = 32  # messages, at a queue's end
ASK_S: Final = 2.0
_DEATHS: Final = ("dies of an exception", "broken invariant")
_ENTRY: Final = re.compile(r"^(?=[0-9]{4}-[0-9]{2}-[0-9]{2} )", re.MULTILINE)
NO_DISK: Final = f"[Errno {errno.EIO}]"
_MASTER: Final = re.compile(r"this replica is the master of epoch ([0-9]+)")


class Judged(Protocol):
    """Of a replica, what is looked at."""

    name: str
    store: Path

    @property
    def log(self) -> str: ...

    def control(self) -> ControlFile | None: ...


def judge(
    histories: Path,
    replicas: Sequence[Judged],
    confirmed: Mapping[str, int],
    work: Work,
    former: Sequence[Judged] = (),
) -> tuple[Verdict, list[Op]]:
    """Of replicas that have ended, and what was done to them.

    Args:
        confirmed: how far each log was, as its replica said last.
        work: what the clients did, and have done to its end.
        former: replicas that are in the group no more, whose stores nobody counts on.
    """
    ops = read_histories(histories)
    verdict = work.judge(ops, replicas[0].store)
    add_store_findings(verdict, gone(ops, replicas[0].store))
    for each in replicas:
        found = [*reference.check_store(each.store), *map(str, verify_store(each.store).findings)]
        add_store_findings(verdict, [f"{each.name}: {text}" for text in found])
    stores = {each.name: each.store for each in replicas}
    add_store_findings(verdict, differences(stores, min(confirmed.values())))
    logs = {each.name: each.log for each in (*replicas, *former)}
    add_store_findings(verdict, doubled_epochs(logs))
    add_store_findings(verdict, deaths(logs))
    verdict.counts["masterships"] = sum(len(_MASTER.findall(log)) for log in logs.values())
    return verdict, [op for op in ops if op.f == "fault"]


def gone(ops: Sequence[Op], store: Path) -> Iterator[str]:
    """What was read from a replica's queues, and is not what stands there in the end."""
    places = {
        (unit.topic, unit.queue_id, unit.queue_offset): value_of(unit.body)
        for unit in reference.walk_log(store)
        if isinstance(unit, reference.Record)
    }
    for op in ops:
        there = places.get((op.topic, op.queue, op.offset))
        if op.f == "read" and op.type == "ok" and there != op.value:
            where = f"{op.topic}/{op.queue}/{op.offset}"
            yield f"{op.p} read {op.value} at {where}, where {there} is"


def differences(stores: Mapping[str, Path], end: int) -> Iterator[str]:
    """Where logs are not the same bytes below `end`, from where all of them begin."""
    (first, store), *others = stores.items()
    starts = {
        name: list_segments(path / COMMITLOG_DIR, SEGMENT_BYTES) for name, path in stores.items()
    }
    begin = max(min(found, default=0) for found in starts.values())
    for start in range(begin, end, SEGMENT_BYTES):
        wanted = _segment(store, start)[: end - start]
        for name, path in others:
            found = _segment(path, start)[: end - start]
            if found != wanted:
                pairs = zip(wanted, found, strict=False)
                at = next(
                    (n for n, (a, b) in enumerate(pairs) if a != b), min(len(wanted), len(found))
                )
                yield f"the logs of {first} and {name} differ at {start + at}, below {end}"
                return


def _segment(store: Path, start: int) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return (store / COMMITLOG_DIR / segment_name(start)).read_bytes()
    return b""


def doubled_epochs(logs: Mapping[str, str]) -> Iterator[str]:
    masters: dict[int, list[str]] = defaultdict(list)
    for name, log in logs.items():
        for epoch in _MASTER.findall(log):
            masters[int(epoch)].append(name)
    for epoch, names in sorted(masters.items()):
        if len(names) > 1:
            yield f"epoch {epoch} has had {len(names)} masters: {', '.join(names)}"


def deaths(logs: Mapping[str, str]) -> Iterator[str]:
    """Processes that have died of what nobody had thought of. A disk that does not answer any more
    has lost its power, and so has the process."""
    for name, log in logs.items():
        for entry in _ENTRY.split(log):
            if any(each in entry for each in _DEATHS) and NO_DISK not in entry:
                yield f"{name}: {entry.strip()}"


class Peeker:
    """Reads from every replica, at the ends of queues, past the clients' ways: what it gets has to
    be confirmed there. A thread; `check` raises what it has found.

    Replicas in namespaces of their own are not asked: their families' addresses are theirs alone.
    """

    def __init__(
        self, replicas: Sequence[Judged], topics: Mapping[str, int], history: History, seed: int
    ) -> None:
        self._replicas, self._history = replicas, history  # these may become others
        self._queues = [(topic, queue) for topic, count in topics.items() for queue in range(count)]
        self._chance = random.Random(f"{seed} peeker")
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self.peeked = 0
        self._thread = threading.Thread(target=self._run, name="peeker")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()
        self._history.close()

    def check(self) -> None:
        if self._failure is not None:
            raise AssertionError(f"the peeker: {self._failure!r}") from self._failure

    def _run(self) -> None:
        try:
            while not self._over.wait(PEEK_S):
                with contextlib.suppress(CometError):
                    self._peek(self._chance.choice(list(self._replicas)))
        except BaseException as error:
            self._failure = error

    def _peek(self, replica: Judged) -> None:
        control = replica.control()
        if control is None:
            return
        meta = control.meta
        topic, queue = self._chance.choice(self._queues)
        with Channel(address_of(meta["token"], "reader-0"), "a reader") as line:
            answer, _ = line.ask(GetQueueRange(topic, queue), timeout_s=ASK_S)
            assert isinstance(answer, QueueRange)
            at = max(0, answer.max_queue_offset - PEEKED)
            _, messages = pull(line, PullMessages(topic, queue, at, 2 * PEEKED), ASK_S)
        # What a run finds in its queues was confirmed in one before, though it may not know it yet.
        known = (Counter.REPLICATED, Counter.DISPATCHED)
        confirmed = max(control.read(counter).value for counter in known)
        again = replica.control()
        if again is None or again.meta["nonce"] != meta["nonce"]:
            return  # another run has begun, and counts for itself
        values = [(message.queue_offset, value_of(message.body)) for message in messages]
        self._history.write(
            self._history.op("ok", "read", topic=topic, queue=queue, offset=offset, value=value)
            for offset, value in values
        )
        self.peeked += len(messages)
        for message in messages:
            assert message.physical_offset < confirmed, (
                f"{replica.name}, {topic}/{queue}/{message.queue_offset}: at "
                f"{message.physical_offset}, confirmed is {confirmed}"
            )
