"""CometMQ: a durable message broker for Python, on Apache RocketMQ's own files.

    from cometmq import Broker

    with Broker("./store") as broker, broker.producer() as producer:
        producer.send("orders", b"hello", tags="paid")

What is named here is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from cometmq import errors
    from cometmq.broker import Broker
    from cometmq.client import (
        Admin,
        AsyncConsumer,
        AsyncPopConsumer,
        AsyncProducer,
        Consumer,
        Message,
        PendingTransaction,
        PopConsumer,
        Producer,
        Receipt,
        Reject,
        Reply,
        Retry,
        Transaction,
        subscribe_actor,
    )
    from cometmq.protocol.version import VERSION as __version__
    from cometmq.shm.kernel.store import Appender

__all__ = [
    "Admin",
    "Appender",
    "AsyncConsumer",
    "AsyncPopConsumer",
    "AsyncProducer",
    "Broker",
    "Consumer",
    "Message",
    "PendingTransaction",
    "PopConsumer",
    "Producer",
    "Receipt",
    "Reject",
    "Reply",
    "Retry",
    "Transaction",
    "__version__",
    "errors",
    "subscribe_actor",
]

# Where each name lives, and what it is called there: nothing, where it is a module of its own.
_HOME: Final = {
    **dict.fromkeys(__all__, "cometmq.client"),
    "Appender": "cometmq.shm.kernel.store",
    "Broker": "cometmq.broker",
    "__version__": "cometmq.protocol.version",
    "errors": "cometmq.errors",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(home)
    if name == "errors":
        return module  # the import has put it here
    value = getattr(module, "VERSION" if name == "__version__" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
