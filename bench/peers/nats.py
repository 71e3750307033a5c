"""NATS JetStream: Debian's nats-server with a file store; one stream a topic, a subject each queue.

Page cache is the default: the server writes before it answers and syncs every two minutes.
fdatasync is `sync_interval: always`, which nats-server has from 2.10 on; an older one (Debian 12
has 2.9) is refused for that level in a clear sentence.

Client: `nats-py`, the official one for Python, on uvloop where that is installed. One in flight is
js.publish(); a stream is js.publish_async() with at most `in_flight` unanswered, 4,000 (its
default) without a window; a batch is so many publish_async() of one subject and the wait for all.
The open loop runs in the event loop itself, paced by a timerfd, since its own timers are a
millisecond coarse. Reads by an ordered consumer, which is pushed and needs no acknowledgement;
with the options `shared` or `ack` by a durable pull consumer: fetch(500), and an acknowledgement
each. With `pushed` as well by a durable push consumer with a callback, which nats-py does two to
three times as many messages with; 20,000 may be unacknowledged.

There is no C client among Debian's packages or on PyPI, so nats-py is also the best there is here.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from cometmq.bench.extra import BenchError, load
from cometmq.bench.peers.server import (
    LOOPBACK,
    Servers,
    fetch_program,
    free_ports,
    missing_module,
    missing_program,
)
from cometmq.bench.systems import Durability, System

SYNC_ALWAYS_FROM: Final = (2, 10)
ANSWER_S: Final = 30.0

_CONFIG: Final = """\
listen: "{host}:{port}"
max_payload: 8MB
jetstream {{
  store_dir: "{data}"
  max_memory_store: 512MB
{more}}}
"""


class Nats(Servers):
    name = "nats"
    clients: tuple[str, ...] = ("nats-py",)

    def missing(self) -> str | None:
        return missing_program("nats-server", "nats-server") or missing_module("nats-py")

    def fetch(self) -> None:
        fetch_program("nats-server", "nats-server")

    def start(self, folder: Path, durability: Durability) -> None:
        """Raises BenchError for fdatasync with a server that cannot do it."""
        folder.mkdir(parents=True, exist_ok=True)
        more = ""
        if durability == Durability.FSYNC:
            if tuple(map(int, self.version().split(".")[:2])) < SYNC_ALWAYS_FROM:
                raise BenchError(
                    f"nats-server {self.version()} knows no `sync_interval: always`: fdatasync per "
                    "acknowledgement needs 2.10 or newer"
                )
            more = "  sync_interval: always\n"
        self._port = free_ports(1)
        config = folder / "nats.conf"
        config.write_text(
            _CONFIG.format(host=LOOPBACK, port=self._port, data=folder / "data", more=more)
        )
        command = [shutil.which("nats-server") or "nats-server", "-c", str(config)]
        self.launch(self.name, command, folder, {"GOMEMLIMIT": "2GiB"}).wait_for("Server is ready")

    def create(self, topic: str, queues: int) -> None:
        asyncio.run(self._create(topic))

    async def _create(self, topic: str) -> None:
        client = await load("nats").connect(self.endpoint()["url"], connect_timeout=ANSWER_S)
        try:
            await client.jetstream(timeout=ANSWER_S).add_stream(name=topic, subjects=[f"{topic}.*"])
        finally:
            await client.close()

    def command(self, client: str) -> list[str]:
        return [sys.executable, "-m", {"nats-py": "cometmq.bench.peers.nats_py"}[client]]

    def endpoint(self) -> dict[str, Any]:
        return {"url": f"nats://{LOOPBACK}:{self._port}"}

    def version(self) -> str:
        """Such as "2.9.10"."""
        said = subprocess.run(["nats-server", "--version"], capture_output=True, text=True).stdout
        found = re.search(r"\d+\.\d+\.\d+", said)
        if found is None:
            raise BenchError(f"nats-server says no version: {said!r}")
        return found[0]


def system() -> System:
    return Nats()
