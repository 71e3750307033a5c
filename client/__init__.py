"""Producers, consumers and administration.

    with Producer("127.0.0.1:9876") as producer:
        producer.send("orders", b"paid", tags="eu", keys="o-42")

    with Consumer("127.0.0.1:9876", "billing", "orders", tags="eu") as consumer:
        for message in consumer:
            consumer.ack(message)

Every class says in its docstring what may happen twice, what may be lost and when it blocks. What
is not in `__all__` may change. What is named here is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from cometmq.client.admin import Admin
    from cometmq.client.aio import AsyncConsumer, AsyncProducer
    from cometmq.client.consumer import Consumer
    from cometmq.client.handling.outcomes import Reject, Retry
    from cometmq.client.popping.aio import AsyncPopConsumer
    from cometmq.client.popping.consumer import PopConsumer
    from cometmq.client.receiving.subscription import ActorSubscription, subscribe_actor
    from cometmq.client.sending.loop_transaction import AsyncTransaction
    from cometmq.client.sending.pending import PendingTransaction
    from cometmq.client.sending.producer import Producer
    from cometmq.client.sending.receipt import Receipt, Receipts
    from cometmq.client.sending.requests import Reply
    from cometmq.client.sending.transaction import Transaction
    from cometmq.shm.kernel.codec import Message

__all__ = [
    "ActorSubscription",
    "Admin",
    "AsyncConsumer",
    "AsyncPopConsumer",
    "AsyncProducer",
    "AsyncTransaction",
    "Consumer",
    "Message",
    "PendingTransaction",
    "PopConsumer",
    "Producer",
    "Receipt",
    "Receipts",
    "Reject",
    "Reply",
    "Retry",
    "Transaction",
    "subscribe_actor",
]

_HOME: Final = {
    "ActorSubscription": "cometmq.client.receiving.subscription",
    "Admin": "cometmq.client.admin",
    "AsyncConsumer": "cometmq.client.aio",
    "AsyncPopConsumer": "cometmq.client.popping.aio",
    "AsyncProducer": "cometmq.client.aio",
    "AsyncTransaction": "cometmq.client.sending.loop_transaction",
    "Consumer": "cometmq.client.consumer",
    "Message": "cometmq.shm.kernel.codec",
    "PendingTransaction": "cometmq.client.sending.pending",
    "PopConsumer": "cometmq.client.popping.consumer",
    "Producer": "cometmq.client.sending.producer",
    "Receipt": "cometmq.client.sending.receipt",
    "Receipts": "cometmq.client.sending.receipt",
    "Reject": "cometmq.client.handling.outcomes",
    "Reply": "cometmq.client.sending.requests",
    "Retry": "cometmq.client.handling.outcomes",
    "Transaction": "cometmq.client.sending.transaction",
    "subscribe_actor": "cometmq.client.receiving.subscription",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
