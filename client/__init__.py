"""Producers, consumers and administration.

    with Producer("127.0.0.1:9876") as producer:
        producer.send("orders", b"paid", tags="eu", keys="o-42")

    with Consumer("127.0.0.1:9876", "billing", "orders", tags="eu") as consumer:
        for message in consumer:
            consumer.ack(message)

Every class says in its docstring what may happen twice, what may be lost and when it blocks. What
is not in `__all__` may change.
"""

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
from cometmq.shm.kernel._kernel import Message

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
