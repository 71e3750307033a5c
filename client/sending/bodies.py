"""A producer of batch bodies that were encoded elsewhere: for sinks."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from cometmq.client.routes import Routes
from cometmq.client.sending.delivery import Delivery
from cometmq.client.sending.lanes import Lane, TopicLanes
from cometmq.client.sending.receipt import Batch
from cometmq.protocol.names import check_writable_topic


class BodySender:
    """Carries batch bodies to queues of topics. One thread uses it.

    What Producer says of order holds here too: a queue gets one body at a time, and one that must
    be sent again is not overtaken. What was never answered is sent again, and stored once if its
    messages have a UNIQ_KEY.

    Args:
        timeout_s: for one body, retries included.
        max_in_flight_bytes: sent and unanswered; with more, `send` waits.
    """

    def __init__(
        self,
        name_server: str | Iterable[str],
        *,
        timeout_s: float = 30.0,
        max_in_flight_bytes: int = 8 << 20,
    ) -> None:
        self._routes = Routes(name_server)
        self._delivery = Delivery(
            self._routes,
            timeout_s=timeout_s,
            attempts_max=None,
            in_flight_bytes_max=max_in_flight_bytes,
        )
        self._topics: dict[str, tuple[TopicLanes, list[Lane]]] = {}
        self.sent_count = 0  # messages

    def queues(self, topic: str) -> list[int]:
        """The ids of the topic's queues that may be written, broker by broker. A new topic is made.

        Raises TopicNotExist, NameIllegal, NoPermission, NotReachable.
        """
        if topic not in self._topics:
            check_writable_topic(topic)
            self._routes.topic(topic)
            lanes = self._delivery.lanes_of(topic)
            self._topics[topic] = lanes, lanes.writable()
        return [lane.queue_id for lane in self._topics[topic][1]]

    def send(self, topic: str, place: int | None, body: bytes, count: int) -> None:
        """Send to the queue that stands at `place` in `queues`; None: whichever's turn it is.

        Raises the error of an earlier body, when there is one.
        """
        if self._delivery.window.failed:
            self.flush()
        lanes, known = self._topics[topic]
        batch = Batch(topic, None, wait=True)
        batch.body, batch.count, batch.free = body, count, place is None
        self._delivery.send_body(batch, lanes.next() if place is None else known[place])
        self.sent_count += count

    def flush(self) -> None:
        """Wait for all answers. Raises the first error."""
        self._delivery.flush()

    def close(self) -> None:
        """What is unanswered is given up."""
        self._delivery.close()
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
