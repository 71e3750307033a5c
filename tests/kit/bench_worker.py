"""A system without a server, whose worker says what it is told to say. No tests here.

Messages lie in a file, a line each; `options["fault"]` is what the producer does wrong.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cometmq.bench.stamps import damaged
from cometmq.bench.systems import Durability
from cometmq.bench.worker import Job, serve


class FileSystem:
    name: str = "file"
    clients: tuple[str, ...] = ("python",)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def missing(self) -> str | None:
        return None

    def start(self, folder: Path, durability: Durability) -> None:
        self.folder = folder

    def create(self, topic: str, queues: int) -> None:
        (self.folder / topic).touch()

    def command(self, client: str) -> list[str]:
        return [sys.executable, __file__]

    def endpoint(self) -> dict[str, Any]:
        return {"folder": str(self.folder)}

    def processes(self) -> list[int]:
        return []

    def version(self) -> str:
        return "1"

    def stop(self) -> None:
        pass


class FileSender:
    client = "file 1"

    def __init__(self, job: Job) -> None:
        self._folder = Path(job.endpoint["folder"])
        self._fault = job.options.get("fault")

    def one(self, topic: str, body: bytes) -> None:
        self._append(topic, [body])

    def stream(self, topics: Sequence[str], bodies: list[bytes], in_flight: int) -> None:
        self._append(topics[0], bodies)

    def batch(self, topic: str, bodies: list[bytes]) -> None:
        self._append(topic, bodies)

    def begin(self, topic: str, body: bytes) -> None:
        self._append(topic, [body])

    def finish(self, begun: deque[None]) -> int:
        begun.popleft()
        if self._fault == "refuse":
            raise RuntimeError("the disk is full")
        return 1

    def close(self) -> None:
        pass

    def _append(self, topic: str, bodies: list[bytes]) -> None:
        bodies = list(bodies)
        if self._fault == "lose":
            del bodies[7]
        elif self._fault == "reorder":
            bodies[3], bodies[4] = bodies[4], bodies[3]
        elif self._fault == "damage":
            bodies[5] = damaged(bodies[5])
        elif self._fault == "repeat":
            bodies.insert(5, bodies[5])
        elif self._fault == "die":
            sys.exit(3)
        with (self._folder / topic).open("a") as file:
            file.writelines(body.hex() + "\n" for body in bodies)


class FileReceiver:
    client = "file 1"

    def __init__(self, job: Job) -> None:
        self._file = (Path(job.endpoint["folder"]) / job.topics[0]).open()
        self._rest = ""  # of a line that is not whole yet

    def poll(self, timeout_s: float) -> list[bytes]:
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        return [bytes.fromhex(line) for line in lines]

    def split(self, messages: Sequence[bytes]) -> list[tuple[int, bytes]]:
        return [(0, body) for body in messages]

    def acknowledge(self, messages: Sequence[bytes]) -> None:
        pass

    def close(self) -> None:
        self._file.close()


if __name__ == "__main__":
    serve(FileSender, FileReceiver)
