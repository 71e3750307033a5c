"""Apache Kafka: one node in KRaft mode (broker and controller in one process), from published jars.

Page cache is Kafka's default, which leaves syncing to the system; fdatasync is
`log.flush.interval.messages=1`: every produce request is synced before it is answered. All
producers have `acks=all`. The heap is Kafka's own 1 GiB, with the flags of its start script. The
offsets topic has one partition instead of 50 and groups do not wait for more members: both only
shorten starts.

Clients, each with settings of its own for every phase (`SETTINGS`); the options `producer` and
`consumer` of a job overrule them:
    java: the official client. One in flight and open loop: `linger.ms=0`. Streams: `linger.ms=5`
        with batches of 256 KiB. Batch: so many send() and a flush().
    confluent-kafka: librdkafka's binding. The same; streams and batches have
        `delivery.report.only.error`, so that an acknowledgement costs no call of Python, and are
        finished when flush() has left nothing.
"""

from __future__ import annotations

import sys
import uuid
from base64 import urlsafe_b64encode
from pathlib import Path
from subprocess import run
from typing import Any, Final

from cometmq.bench.extra import BenchError, load
from cometmq.bench.peers.maven import Bundle
from cometmq.bench.peers.server import LOOPBACK, Servers, free_ports, missing_module
from cometmq.bench.systems import Durability, System

VERSION: Final = "4.1.1"
JARS: Final = Bundle(
    f"kafka-{VERSION}",
    (
        f"org.apache.kafka:kafka_2.13:{VERSION}",
        "org.apache.logging.log4j:log4j-slf4j-impl:2.24.3",
        "org.hdrhistogram:HdrHistogram:2.2.2",
        "com.google.code.gson:gson:2.9.0",
    ),
)
_JAVA: Final = Path(__file__).with_name("java")
SOURCES: Final = [
    _JAVA / f"{name}.java" for name in ("Worker", "Bodies", "Receiver", "KafkaWorker")
]
SERVER_FLAGS: Final = [
    "-Xms1g",
    "-Xmx1g",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-XX:MaxInlineLevel=15",
    "-Djava.awt.headless=true",
]
WORKER_FLAGS: Final = ["-Xms512m", "-Xmx2g", "-XX:+UseG1GC"]
FORMAT_TIMEOUT_S: Final = 60
CREATE_TIMEOUT_S: Final = 30

_ACKS: Final = {"acks": "all", "compression.type": "none"}
_STREAM: Final = {**_ACKS, "linger.ms": "5", "batch.size": str(256 << 10)}
_PROMPT: Final = {**_ACKS, "linger.ms": "0"}
_QUIET: Final = {"delivery.report.only.error": True, "queue.buffering.max.messages": 1_000_000}
_CONSUME: Final = {
    "auto.offset.reset": "earliest",
    "fetch.min.bytes": "1",
    "max.partition.fetch.bytes": str(10 << 20),
}
#: By client and phase, in the client's own words.
SETTINGS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "java": {
        "one_in_flight": _PROMPT,
        "open_loop": _PROMPT,
        "async": {**_STREAM, "buffer.memory": str(64 << 20)},
        "batch": {**_STREAM, "buffer.memory": str(64 << 20)},
        "consume": {**_CONSUME, "max.poll.records": "10000"},
    },
    "python": {
        "one_in_flight": _PROMPT,
        "open_loop": _PROMPT,
        "async": {**_STREAM, **_QUIET},
        "batch": {**_STREAM, **_QUIET},
        "consume": {**_CONSUME, "queued.min.messages": "1000000"},
    },
}

_PROPERTIES: Final = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{controller}
listeners=PLAINTEXT://{host}:{port},CONTROLLER://{host}:{controller}
advertised.listeners=PLAINTEXT://{host}:{port}
inter.broker.listener.name=PLAINTEXT
controller.listener.names=CONTROLLER
log.dirs={data}
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
"""
_FSYNC: Final = "log.flush.interval.messages=1\n"
_LOG4J: Final = """\
rootLogger.level = info
rootLogger.appenderRef.out.ref = out
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d %p %m (%c)%n
"""


class Kafka(Servers):
    """
    Args:
        settings: of the broker, by its own names, beside ours.
    """

    name = "kafka"
    clients: tuple[str, ...] = ("java", "confluent-kafka")

    def __init__(self, settings: dict[str, str] | None = None) -> None:
        super().__init__()
        self.settings = settings or {}

    def missing(self) -> str | None:
        if JARS.missing:
            return f"{JARS.missing} (cometmq bench fetch)"
        return missing_module("confluent-kafka")

    def fetch(self) -> None:
        JARS.classes(SOURCES)

    def start(self, folder: Path, durability: Durability) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._port = free_ports(2)
        config = folder / "server.properties"
        text = _PROPERTIES.format(
            host=LOOPBACK, port=self._port, controller=self._port + 1, data=folder / "data"
        )
        text += _FSYNC if durability == Durability.FSYNC else ""
        config.write_text(
            text + "".join(f"{key}={value}\n" for key, value in self.settings.items())
        )
        (folder / "log4j2.properties").write_text(_LOG4J)
        if not (folder / "data" / "meta.properties").exists():
            self._format(config)
        flags = [*SERVER_FLAGS, f"-Dlog4j2.configurationFile={folder / 'log4j2.properties'}"]
        command = [*JARS.java("kafka.Kafka", flags=flags), str(config)]
        self.launch(self.name, command, folder).wait_for("Kafka Server started")

    def _format(self, config: Path) -> None:
        """Kafka does not start on a folder without the identity of its cluster."""
        cluster = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "a")
        command = JARS.java("kafka.tools.StorageTool", flags=["-Xmx256m", "-XX:+UseSerialGC"])
        command += ["format", "-t", cluster, "-c", str(config)]
        done = run(command, capture_output=True, text=True, timeout=FORMAT_TIMEOUT_S)
        if done.returncode:
            raise BenchError(f"kafka's folder could not be formatted: {done.stderr[-500:]}")

    def create(self, topic: str, queues: int) -> None:
        admin = load("confluent_kafka.admin")
        settings = {"bootstrap.servers": f"{LOOPBACK}:{self._port}", "log_level": 4}
        client = admin.AdminClient(settings)
        new = admin.NewTopic(topic, num_partitions=queues, replication_factor=1)
        for answer in client.create_topics([new]).values():
            answer.result(CREATE_TIMEOUT_S)

    def command(self, client: str) -> list[str]:
        if client == "java":
            return JARS.java("KafkaWorker", JARS.classes(SOURCES), flags=WORKER_FLAGS)
        return [sys.executable, "-m", {"confluent-kafka": "cometmq.bench.peers.kafka_py"}[client]]

    def endpoint(self) -> dict[str, Any]:
        return {"bootstrap": f"{LOOPBACK}:{self._port}", "settings": SETTINGS}

    def version(self) -> str:
        return VERSION


def system() -> System:
    return Kafka()
