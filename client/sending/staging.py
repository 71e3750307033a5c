"""Staged commits, the client's side: batches that are stored all together, once, or not at all."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

from cometmq.client.routes import MASTER, Routes
from cometmq.client.sending.attempts import born_host
from cometmq.protocol.commands import (
    CloseStage,
    Command,
    CommitStages,
    Done,
    DropStages,
    Section,
    StageMessages,
    StagesCommitted,
)
from cometmq.protocol.errors import (
    CometError,
    NoPermission,
    NotConfirmed,
    NotMaster,
    NotReachable,
    QueueNotExist,
    TopicNotExist,
)
from cometmq.protocol.names import check_staging_name, check_writable_topic
from cometmq.protocol.perm import WRITE
from cometmq.protocol.retry import pause_s

Answer = TypeVar("Answer", bound=Command)
ASK_S: Final = 5.0  # for one answer; then it is asked again


class SinkLine:
    """Asks the commitlog process of one broker, again and again until it answers.

    Every command of stages may come twice, so a lost answer costs nothing. One thread uses it.

    Args:
        broker: its name; "" = learned from the first topic.
        timeout_s: for one command, retries included.
    """

    def __init__(
        self,
        name_server: str | Iterable[str],
        sink: str,
        *,
        broker: str = "",
        timeout_s: float = 30,
    ) -> None:
        check_staging_name("sink", sink)
        self.sink = sink
        self.broker = broker
        self.timeout_s = timeout_s
        self._routes = Routes(name_server)
        self._endpoint = ""
        self._pause = threading.Event()

    def commit(self, epoch: int, stages: Sequence[str]) -> StagesCommitted:
        return self.ask(CommitStages(self.sink, epoch, list(stages)), StagesCommitted)

    def drop(self, epoch: int, stages: Sequence[str]) -> None:
        self.ask(DropStages(self.sink, epoch, list(stages)), Done)

    def queues(self, topic: str, *, anew: bool = False) -> list[int]:
        """Return the ids of this broker's queues; a new topic is created, as for a producer.

        Args:
            anew: True: fetch the route now.

        Raises NoPermission, TopicNotExist.
        """
        check_writable_topic(topic)
        if anew:
            self._routes.refresh(topic, self.timeout_s)
        masters = [
            each
            for each in self._routes.topic(topic, self.timeout_s).brokers
            if each.endpoints.broker_id == MASTER
        ]
        names = sorted(each.endpoints.broker for each in masters)
        if not self.broker:
            if len(names) > 1:
                raise TopicNotExist(
                    f"topic {topic} is on {', '.join(names)}; what is to be there exactly once "
                    "goes through one broker: say which, brokerName"
                )
            self.broker = names[0]
        for each in masters:
            if each.endpoints.broker == self.broker:
                self._endpoint = each.endpoints.commitlog
                if not each.info.perm & WRITE:
                    raise NoPermission(f"topic {topic} is not writable")
                return list(range(each.info.write_queues))
        raise TopicNotExist(f"topic {topic} is not on broker {self.broker}: {', '.join(names)}")

    def ask(
        self, command: Command, kind: type[Answer], payload: Sequence[bytes | memoryview] = ()
    ) -> Answer:
        deadline = time.monotonic() + self.timeout_s
        failures = 0
        while True:
            try:
                endpoint = self._endpoint = self._endpoint or self._look_up()
                left_s = min(ASK_S, max(0.1, deadline - time.monotonic()))
                channel = self._routes.channel(endpoint, f"broker {self.broker}")
                answer, _ = channel.ask(command, payload, timeout_s=left_s)
            except CometError as error:
                failures += 1
                if not error.retriable or time.monotonic() >= deadline:
                    raise
                if isinstance(error, (NotConfirmed, NotReachable, NotMaster)):
                    self._forget_endpoint()
                self._pause.wait(pause_s(failures))
            else:
                if not isinstance(answer, kind):
                    raise CometError(f"{endpoint} answered {type(answer).__name__}")
                return answer

    def born_host(self) -> str:
        return born_host(self._endpoint or self._look_up())

    def _look_up(self) -> str:
        for master in self._routes.masters():
            if master.broker == self.broker:
                return master.commitlog
        raise NotReachable(f"the name server knows no broker {self.broker}")

    def _forget_endpoint(self) -> None:
        """It may have moved."""
        if self._endpoint:
            self._routes.retire(self._endpoint)
            self._endpoint = ""

    def close(self) -> None:
        self._routes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()


class StageWriter:
    """Fills one stage; with the same methods as BodySender."""

    def __init__(self, line: SinkLine, epoch: int, stage: str) -> None:
        check_staging_name("stage", stage)
        self._line = line
        self.epoch = epoch
        self.stage = stage
        self.batches = 0
        self._queues: dict[str, list[int]] = {}
        self._any = dict(self._queues)  # newest queues, for bodies that may go to any
        self._turn = random.randrange(1 << 16)
        self._born_host = ""

    def queues(self, topic: str) -> list[int]:
        if topic not in self._queues:
            self._queues[topic] = self._any[topic] = self._line.queues(topic)
            self._born_host = self._line.born_host()
        return self._queues[topic]

    def send(self, topic: str, place: int | None, body: bytes, count: int) -> None:
        """Stage as `BodySender.send` does. `place` is an index into the first `queues` answer."""
        if place is not None:
            self._stage(topic, self._queues[topic][place], body, count)
            return
        deadline = time.monotonic() + self._line.timeout_s
        failures = 0
        while True:
            self._turn += 1
            queues = self._any[topic]
            try:
                self._stage(topic, queues[self._turn % len(queues)], body, count)
                return
            except QueueNotExist:
                failures += 1
                if time.monotonic() >= deadline:
                    raise
                time.sleep(pause_s(failures))
                self._any[topic] = self._line.queues(topic, anew=True)

    def _stage(self, topic: str, queue_id: int, body: bytes, count: int) -> None:
        command = StageMessages(
            self._line.sink, self.epoch, self.stage, self.batches,
            [Section(topic, queue_id, count)], int(time.time() * 1000), self._born_host,
        )  # fmt: skip
        self._line.ask(command, Done, [body])
        self.batches += 1

    def finish(self) -> None:
        """The stage is whole, and on the disk."""
        self._line.ask(CloseStage(self._line.sink, self.epoch, self.stage, self.batches), Done)
