"""A real RocketMQ broker, with name server and clients, in a JVM of its own; as published.

    with RealRocketMQ(tmp_path) as rocket:
        rocket.start(store, settings)
        rocket.consume("workers", {"work": ""})
        rocket.wait(lambda events: len(events) >= 10)
        rocket.stop()

One JVM serves one broker after the other, since its start takes as long as all that it does then.
What it has said is printed where a test with it fails.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import jvm
from interop.peers import ROCKETMQ_IN_SHORT
from patience import patient
from ports import free_ports

from cometmq.bench.peers.rocketmq import FULL_DISK, JARS, OPENED
from cometmq.shm.state.fastjson import loads

HOST = Path(__file__).with_name("BrokerHost.java")
WAIT_S = patient(240.0)
TAIL_CHARACTERS = 6_000
_FLAGS = ["-Xmx640m", *jvm.SMALL, *OPENED, *FULL_DISK]
_BROKER = {
    "brokerClusterName": "interop",
    "brokerId": 0,
    "brokerIP1": "127.0.0.1",
    "bindAddress": "127.0.0.1",
    "autoCreateTopicEnable": "false",
    "enablePropertyFilter": "true",
    "diskMaxUsedSpaceRatio": 95,
    **ROCKETMQ_IN_SHORT,
}

Event = dict[str, Any]


class RealRocketMQ:
    """The JVM.

    Args:
        folder: of its logs and configurations.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        port = free_ports()
        self._namesrv = f"127.0.0.1:{port}"
        config = self._properties("namesrv", {"listenPort": port, "bindAddress": "127.0.0.1"})
        flags = [*_FLAGS, f"-Duser.home={folder}", f"-Drocketmq.home.dir={folder}"]
        flags.append(f"-Drocketmq.client.logRoot={folder}/client")
        command = JARS.java("BrokerHost", JARS.classes([HOST]), flags=flags)
        self._stderr = (folder / "stderr").open("wb")
        self._process = subprocess.Popen(
            [*command, self._namesrv, str(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        self._moved = threading.Condition()
        self._answers: list[Any] = []
        self._events: list[Event] = []
        self._has_ended = False
        self._starts = 0
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,))
        self._reader.start()

    # --- brokers ---

    def start(self, store: Path, settings: Mapping[str, Any], topic: str) -> int:
        """A broker on the store; returns when the name server knows the way to the topic. What
        clients saw of the one before is forgotten.

        Returns:
            Where its own records begin in the commit log, in bytes.
        """
        self._starts += 1
        self._events = []
        first = free_ports(4)  # its second port is the one two below; then replication
        config = {
            **_BROKER,
            **settings,
            "brokerName": f"real-{self._starts}",
            "namesrvAddr": self._namesrv,
            "listenPort": first + 2,
            "haListenPort": first + 3,
            "storePathRootDir": store,
        }
        path = self._properties(f"broker-{self._starts}", config)
        begin: int = self._ask("start", config=str(path), topic=topic)
        return begin

    def stop(self) -> None:
        """In order, its clients first."""
        self._ask("stop")

    def state(self) -> dict[str, Any]:
        """What it would write to config/: topics, groups, offsets, delayOffsets, filters."""
        return {name: loads(text) for name, text in self._ask("state").items()}

    def lag(self, group: str, topic: str) -> int:
        """How many messages of the topic the group has not committed."""
        lag: int = self._ask("lag", group=group, topic=topic)
        return lag

    def records(self, topic: str) -> list[Event]:
        found: list[Event] = self._ask("records", topic=topic)
        return found

    # --- clients ---

    def consume(self, group: str, topics: Mapping[str, str], **options: int) -> None:
        """A push consumer, by SQL92 where that is given; see BrokerHost.isConsumed."""
        self._ask("consume", group=group, topics=dict(topics), **options)

    def produce(self, group: str, topic: str) -> None:
        """A producer that answers checks by the property `fate`."""
        self._ask("produce", group=group, topic=topic)

    def send(
        self,
        group: str,
        topic: str,
        body: str,
        how: str = "",
        *,
        properties: Mapping[str, str] = {},
        **options: int,
    ) -> None:
        """By the producer of that group.

        Args:
            how: "level", "after" or "half"; then with `level` or `ms`.
        """
        fields = {"topic": topic, "body": body, "how": how, "properties": dict(properties)}
        assert self._ask("send", group=group, **fields, **options) == "SEND_OK"

    def close_clients(self) -> None:
        self._ask("close")

    @property
    def events(self) -> list[Event]:
        """What clients of this broker have seen until now."""
        with self._moved:
            return list(self._events)

    def wait(self, holds: Callable[[list[Event]], object], timeout_s: float = WAIT_S) -> None:
        """Until that holds of what clients have seen; it is looked at when there is more."""
        with self._moved:
            done = self._moved.wait_for(lambda: self._has_ended or holds(self._events), timeout_s)
        assert not self._has_ended, "the JVM has ended"
        assert done, f"not after {timeout_s:g} s; the last of {len(self._events)} events: " + str(
            self._events[-3:]
        )

    # --- the JVM ---

    def _ask(self, what: str, **fields: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **fields}) + "\n")
        self._process.stdin.flush()
        with self._moved:
            self._moved.wait_for(lambda: self._has_ended or self._answers, WAIT_S)
            assert self._answers, f"no answer to {what}"
            answer = self._answers.pop()
        assert "error" not in answer, f"{what}: {answer['error']}"
        return answer["answer"]

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            said = json.loads(line)
            with self._moved:
                if "event" in said:
                    self._events.append(said["event"] | {"at": time.time()})
                else:
                    self._answers.append(said)
                self._moved.notify_all()
        with self._moved:
            self._has_ended = True
            self._moved.notify_all()

    def _properties(self, name: str, values: Mapping[str, Any]) -> Path:
        path = self._folder / f"{name}.properties"
        path.write_text("".join(f"{key}={value}\n" for key, value in values.items()))
        return path

    @property
    def said(self) -> str:
        """The ends of its output and of its broker's log."""
        logs = [self._folder / "stderr", *sorted(self._folder.glob("**/broker.log"))]
        tails = (f"--- {log}\n{_without_noise(log.read_text(errors='replace'))}" for log in logs)
        return "\n".join(tails)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._process.stdin.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._stderr.close()

    def __enter__(self) -> RealRocketMQ:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.end()
        if kind is not None:
            sys.stderr.write(self.said)


def _without_noise(text: str) -> str:
    """Its end, without what the logging says of itself."""
    return re.sub(r".*\|-INFO .*\n", "", text)[-TAIL_CHARACTERS:]
