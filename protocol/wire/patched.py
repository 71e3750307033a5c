"""Check whether gevent or eventlet has replaced modules that clients need."""

from __future__ import annotations

import sys
from typing import Final

from cometmq.protocol.errors import MonkeyPatched

GEVENT: Final = ("thread", "threading", "socket", "select", "queue")
EVENTLET: Final = ("thread", "socket", "select")


def check_not_patched(what: str) -> None:
    """Raise MonkeyPatched if gevent or eventlet, where imported, has replaced modules."""
    for library, module, is_patched, names in (
        ("gevent", "gevent.monkey", "is_module_patched", GEVENT),
        ("eventlet", "eventlet.patcher", "is_monkey_patched", EVENTLET),
    ):
        asked = getattr(sys.modules.get(module), is_patched, None)
        found = [name for name in names if asked is not None and asked(name)]
        if found:
            raise MonkeyPatched(
                f"{what} does not work where {library} has replaced {', '.join(found)}: use it in "
                "a process without monkey patching, such as a worker with threads (gunicorn -k "
                "gthread, celery -P threads) or with asyncio"
            )
