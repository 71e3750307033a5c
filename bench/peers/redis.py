"""Redis Streams: Debian's redis-server, an append-only file, one stream for each queue.

Page cache is `appendfsync everysec`, fdatasync is `appendfsync always`: Redis then answers what
came in one turn of its event loop after one fdatasync. The append-only file is not rewritten
(`auto-aof-rewrite-percentage 0`) and no snapshot is taken (`save ""`), as Redis would in the midst
of a run at its defaults: both would cost it. Memory is bounded (`maxmemory 2gb`, `noeviction`):
beyond that XADD fails, and so does the run.

Clients:
    redis-py: the official one for Python; with hiredis as its parser where that is installed. One
        in flight is XADD; a stream and a batch are pipelines without a transaction, of 500 or of
        the batch's size, or of `in_flight` with the option `window`. Reads by XREAD (COUNT 500),
        which keeps no progress in the server; with the option `shared` or `ack` by XREADGROUP and
        XACK.

The best official client is redis-benchmark, in C, which can neither read nor send more than one
body: it is no worker, and has a row of its own, `Redis.benchmark()`.

The option `transport`: "tcp" (default) or "unix".
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from cometmq.bench.extra import BenchError
from cometmq.bench.peers.server import (
    LOOPBACK,
    Servers,
    fetch_program,
    free_ports,
    missing_module,
    missing_program,
)
from cometmq.bench.stamps import Stamper
from cometmq.bench.systems import Durability, System

FSYNC: Final = {Durability.PAGE_CACHE: "everysec", Durability.FSYNC: "always"}
MEMORY: Final = "2gb"
BENCHMARK_TIMEOUT_S: Final = 600


class Redis(Servers):
    name = "redis"
    clients: tuple[str, ...] = ("redis-py",)
    c_client = "redis-benchmark"

    def missing(self) -> str | None:
        return missing_program("redis-server", "redis-server") or missing_module("redis")

    def fetch(self) -> None:
        fetch_program("redis-server", "redis-server")

    def start(self, folder: Path, durability: Durability) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._port, self._socket = free_ports(1), folder / "redis.socket"
        command = [shutil.which("redis-server") or "redis-server"]
        for name, value in (
            ("bind", LOOPBACK), ("port", str(self._port)), ("unixsocket", str(self._socket)),
            ("dir", str(folder)), ("save", ""), ("appendonly", "yes"),
            ("appendfsync", FSYNC[durability]), ("auto-aof-rewrite-percentage", "0"),
            ("maxmemory", MEMORY), ("maxmemory-policy", "noeviction"),
        ):  # fmt: skip
            command += [f"--{name}", value]
        self.launch(self.name, command, folder).wait_for("Ready to accept connections")

    def create(self, topic: str, queues: int) -> None:
        """Nothing to do: the first XADD makes a stream."""
        assert self._ask("PING").startswith(b"+PONG")

    def command(self, client: str) -> list[str]:
        return [sys.executable, "-m", {"redis-py": "cometmq.bench.peers.redis_py"}[client]]

    def endpoint(self) -> dict[str, Any]:
        return {"host": LOOPBACK, "port": self._port, "unix": str(self._socket)}

    def benchmark(
        self, topic: str, messages: int, size: int, *, pipeline: int = 64, connections: int = 1
    ) -> dict[str, Any]:
        """XADD of one body by redis-benchmark, over the Unix socket, which is its fastest way.

        Sends whole pipelines, so up to one more than `messages`. Raises BenchError unless the
        stream has grown by as many as were sent.
        """
        count = -(-messages // pipeline) * pipeline
        command = ["redis-benchmark", "--csv", "-s", str(self._socket), "-n", str(count)]
        command += ["-P", str(pipeline), "-c", str(connections), "-x", "XADD", topic, "*", "b"]
        before = self._length(topic)
        body = Stamper(size, 0, 1, pool=1).body(0)
        done = subprocess.run(command, input=body, capture_output=True, timeout=BENCHMARK_TIMEOUT_S)
        said = done.stdout.decode(errors="replace")
        acked = self._length(topic) - before
        if done.returncode or acked != count:
            raise BenchError(f"redis-benchmark sent {acked} of {count} messages: {said}")
        rate = float(said.splitlines()[-1].split('","')[1])
        client = f"redis-benchmark {self.version()}"
        return {"acked": acked, "seconds": acked / rate, "rate": rate, "client": client}

    def _length(self, key: str) -> int:
        return int(self._ask(f"XLEN {key}")[1:])

    def _ask(self, line: str) -> bytes:
        """A command that is answered in one line."""
        with socket.create_connection((LOOPBACK, self._port), timeout=10) as connection:
            connection.sendall(line.encode() + b"\r\n")
            return connection.makefile("rb").readline()

    def version(self) -> str:
        """Such as "7.0.15"."""
        said = subprocess.run(["redis-server", "--version"], capture_output=True, text=True)
        return said.stdout.partition("v=")[2].split()[0]


def system() -> System:
    return Redis()
