"""Apache RocketMQ: a name server and a broker, from published jars, with the official Java client.

Page cache is `flushDiskType=ASYNC_FLUSH`, RocketMQ's default; fdatasync is SYNC_FLUSH. Beside that
the broker has its own defaults, with these exceptions, all in its favour: a disk that is fuller
than 75 % is no reason to delete or to refuse, and a send that waits for longer than 200 ms, or a
put that takes longer than 1 s, is not refused as "busy" before 10 s (`waitTimeMillsInSendQueue`,
`osPageCacheBusyTimeOutMills`), as a slow disk would otherwise end the run. The start script's 8
GiB of heap are 2 GiB here.

RocketMQ has no official client for this protocol in pure Python that were worth measuring, so
there is only `java`, DefaultMQProducer and DefaultMQPushConsumer. Settings (`SETTINGS`; the
options `producer` and `consumer` of a job overrule them): no retries, so that no message is sent
twice unseen; no compression, which would start at 4 KiB; `autoBatch` is off, as by default, and a
batch is what is sent as one. A stream has at most 1,024 messages unanswered. The consumer listens
in one thread, as messages of one queue are otherwise handed over out of order, takes what came as
one batch, and holds up to 65,535 messages (1,000 before the go; none where several share a group,
and then it begins up to a second late); the broker gives at most 32 messages a pull unless its
setting `maxTransferCountOnMessageInMemory` says otherwise.

What the client does beside plain sends and reads is a worker of its own, `semantics`
(RocketSemantics): transactions, retries, handlers and pops. Its listeners have 20 threads and take
one message a call, as by default; a member that pops may hold 1,024 messages that it has not
acknowledged, the most that the client allows, where its own 96 make it wait 50 ms again and again.

Neither client nor broker keeps the order of messages of one queue that are in flight together:
both have pools of threads. Runs in the mode `async` may therefore report messages out of order.

The store's replication port is on all interfaces, since RocketMQ cannot bind it to one; it is
free, and nobody answers to it that is not a RocketMQ slave.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from pathlib import Path
from typing import Any, ClassVar, Final

from cometmq.bench.extra import BenchError
from cometmq.bench.peers.maven import Bundle
from cometmq.bench.peers.server import LOOK_S, LOOPBACK, READY_S, Servers, free_ports
from cometmq.bench.systems import Durability, System

VERSION: Final = "5.3.3"
JARS: Final = Bundle(
    f"rocketmq-{VERSION}",
    (
        f"org.apache.rocketmq:rocketmq-broker:{VERSION}",
        f"org.apache.rocketmq:rocketmq-namesrv:{VERSION}",
        f"org.apache.rocketmq:rocketmq-client:{VERSION}",
        "org.hdrhistogram:HdrHistogram:2.2.2",
        "com.google.code.gson:gson:2.9.0",
    ),
)
_JAVA: Final = Path(__file__).with_name("java")
SOURCES: Final = [
    _JAVA / f"{name}.java"
    for name in ("Worker", "Bodies", "Receiver", "RocketWorker", "RocketSemantics", "StoreWorker")
]
FLUSHES: Final = {Durability.PAGE_CACHE: "ASYNC_FLUSH", Durability.FSYNC: "SYNC_FLUSH"}

# What RocketMQ's scripts give to a JVM newer than 8; without it the store cannot reach the memory
# behind its buffers.
OPENED: Final = [
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
]
# Properties of the JVM, for the store's own looks at the disk.
FULL_DISK: Final = [
    "-Drocketmq.broker.diskSpaceWarningLevelRatio=0.99",
    "-Drocketmq.broker.diskSpaceCleanForciblyRatio=0.98",
]
BROKER_FLAGS: Final = [
    "-Xms2g",
    "-Xmx2g",
    "-XX:+UseG1GC",
    "-XX:G1HeapRegionSize=16m",
    "-XX:G1ReservePercent=25",
    "-XX:InitiatingHeapOccupancyPercent=30",
    "-XX:SoftRefLRUPolicyMSPerMB=0",
    "-XX:-OmitStackTraceInFastThrow",
    "-XX:MaxDirectMemorySize=2g",
    *OPENED,
    *FULL_DISK,
]
NAMESRV_FLAGS: Final = ["-Xms128m", "-Xmx256m", "-XX:+UseSerialGC"]
WORKER_FLAGS: Final = ["-Xms512m", "-Xmx2g", "-XX:+UseG1GC", *OPENED, *FULL_DISK]

STORE_SETTINGS: Final = {"diskMaxUsedSpaceRatio": "95"}
_BROKER: Final = {
    **STORE_SETTINGS,
    "brokerClusterName": "bench",
    "brokerName": "bench",
    "brokerId": "0",
    "brokerIP1": LOOPBACK,
    "bindAddress": LOOPBACK,
    "autoCreateTopicEnable": "false",
    "waitTimeMillsInSendQueue": "10000",
    "osPageCacheBusyTimeOutMills": "10000",
}
_PRODUCE: Final = {
    "sendMsgTimeout": "30000",
    "retryTimesWhenSendFailed": "0",
    "retryTimesWhenSendAsyncFailed": "0",
    "compressMsgBodyOverHowmuch": str(2**31 - 1),
}
_LISTEN: Final = {"consumeThreadMin": "20", "consumeThreadMax": "20"}
#: By client and phase, in the client's own words.
SETTINGS: Final = {
    "java": {
        **dict.fromkeys(("one_in_flight", "open_loop", "async", "batch", "transactions"), _PRODUCE),
        "handlers": _LISTEN,
        "retries": _LISTEN,
        "pops": {**_LISTEN, "popThresholdForQueue": "1024"},
        "consume": {
            "consumeThreadMin": "1",
            "consumeThreadMax": "1",
            "consumeMessageBatchMaxSize": "1024",
            "pullBatchSize": "1024",
        },
    }
}

# RocketMQ RequestCode, PermName and RemotingCommand.
_CREATE_TOPIC: Final = 17
_ROUTE: Final = 105
_HA_STATUS: Final = 907
_READ_WRITE: Final = 6
_SUCCESS: Final = 0
ANSWER_S: Final = 30.0


def missing_jars() -> str | None:
    return JARS.missing and f"{JARS.missing} (cometmq bench fetch)"


class RocketMQ(Servers):
    """
    Args:
        settings: of the broker and its store, by their own names, beside ours.
    """

    name = "rocketmq"
    clients: tuple[str, ...] = ("java",)
    unordered = frozenset({"async"})
    # Some 12 s, from 700 to 28,000 messages/s: both JVMs compile what a message passes through.
    first: ClassVar[dict[str, int]] = {"async": 150_000}

    def __init__(self, settings: dict[str, str] | None = None) -> None:
        super().__init__()
        self.settings = settings or {}

    def missing(self) -> str | None:
        return missing_jars()

    def fetch(self) -> None:
        JARS.classes(SOURCES)

    def start(self, folder: Path, durability: Durability) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._namesrv = free_ports(1)
        self._listen = free_ports(4) + 2  # its second port is the one two below; then replication
        self._start_namesrv(folder)
        self._start_broker(folder, durability)

    def _start_namesrv(self, folder: Path) -> None:
        config = _properties(
            folder / "namesrv.properties",
            {"listenPort": str(self._namesrv), "bindAddress": LOOPBACK},
        )
        flags = [*NAMESRV_FLAGS, *_home(folder)]
        command = JARS.java("org.apache.rocketmq.namesrv.NamesrvStartup", flags=flags)
        server = self.launch("namesrv", [*command, "-c", str(config)], folder)
        server.wait_for("boot success")

    def _start_broker(self, folder: Path, durability: Durability) -> None:
        self._launch_broker(folder, self._listen, durability, self.settings)

    def _launch_broker(
        self, folder: Path, port: int, durability: Durability, settings: dict[str, str]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = _properties(
            folder / "broker.properties",
            {
                **_BROKER,
                "namesrvAddr": f"{LOOPBACK}:{self._namesrv}",
                "listenPort": str(port),
                "haListenPort": str(port + 1),
                "storePathRootDir": str(folder / "store"),
                "flushDiskType": FLUSHES[durability],
                **settings,
            },
        )
        flags = [*BROKER_FLAGS, *_home(folder)]
        command = JARS.java("org.apache.rocketmq.broker.BrokerStartup", flags=flags)
        self.launch("broker", [*command, "-c", str(config)], folder).wait_for("boot success")

    def create(self, topic: str, queues: int) -> None:
        """Returns when the name server knows the way."""
        fields = {
            "topic": topic,
            "defaultTopic": "TBW102",
            "readQueueNums": queues,
            "writeQueueNums": queues,
            "perm": _READ_WRITE,
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": 0,
            "order": False,
        }
        code, said, _ = remoting(self._listen, _CREATE_TOPIC, fields)
        if code != _SUCCESS:
            raise BenchError(f"rocketmq does not create {topic}: {said}")
        deadline = time.monotonic() + ANSWER_S
        while remoting(self._namesrv, _ROUTE, {"topic": topic})[0] != _SUCCESS:
            if time.monotonic() > deadline:
                raise BenchError(f"rocketmq's name server does not learn of {topic}")
            time.sleep(0.01)  # the broker registers in its own time

    def command(self, client: str) -> list[str]:
        main = {"java": "RocketWorker", "semantics": "RocketSemantics"}[client]
        flags = [*WORKER_FLAGS, f"-Duser.home={self._folder}"]  # it logs below that
        return JARS.java(main, JARS.classes(SOURCES), flags=flags)

    def endpoint(self) -> dict[str, Any]:
        return {"namesrv": f"{LOOPBACK}:{self._namesrv}", "settings": SETTINGS}

    def version(self) -> str:
        return VERSION


class RocketPair(RocketMQ):
    """A SYNC_MASTER, which acknowledges a message when its slave has it too, and that slave."""

    def _start_broker(self, folder: Path, durability: Durability) -> None:
        both = {"inSyncReplicas": "2", **self.settings}
        master = both | {"brokerRole": "SYNC_MASTER"}
        self._launch_broker(folder, self._listen, durability, master)
        slave = both | {"brokerRole": "SLAVE", "brokerId": "1"}
        self._launch_broker(folder / "slave", free_ports(4) + 2, durability, slave)
        self._wait_for_the_slave()

    def _wait_for_the_slave(self) -> None:
        """It connects some seconds after its start; a message before that is refused."""
        deadline = time.monotonic() + READY_S
        while True:
            code, said, body = remoting(self._listen, _HA_STATUS, {})
            if code != _SUCCESS:
                raise BenchError(f"rocketmq does not say how its slave is: {said}")
            if json.loads(body)["inSyncSlaveNums"]:
                return
            if time.monotonic() > deadline:
                raise BenchError(f"rocketmq's slave is not in sync after {READY_S:g} s")
            time.sleep(LOOK_S)  # nothing tells when


def _home(folder: Path) -> list[str]:
    """Where it looks for its files, and where it writes its logs."""
    return [f"-Duser.home={folder}", f"-Drocketmq.home.dir={folder}"]


def _properties(path: Path, values: dict[str, str]) -> Path:
    path.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
    return path


def remoting(port: int, code: int, fields: dict[str, Any]) -> tuple[int, str, bytes]:
    """One request of RocketMQ's remoting protocol without a body: the answer's code, remark, body.

    Frame: i32 size of what follows, i32 size of the header (JSON: first byte 0), header, body.
    """
    given = {name: str(value).lower() if value is False else str(value) for name, value in
             fields.items()}  # fmt: skip
    header = json.dumps(
        {"code": code, "flag": 0, "language": "OTHER", "opaque": 1, "version": 0,
         "serializeTypeCurrentRPC": "JSON", "extFields": given}
    ).encode()  # fmt: skip
    with socket.create_connection((LOOPBACK, port), timeout=ANSWER_S) as connection:
        connection.sendall(struct.pack(">ii", 4 + len(header), len(header)) + header)
        with connection.makefile("rb") as answer:
            size, header_size = struct.unpack(">ii", answer.read(8))
            content = answer.read(size - 4)
    header_size &= 0xFFFFFF
    found = json.loads(content[:header_size])
    return int(found["code"]), str(found.get("remark", "")), content[header_size:]


def system() -> System:
    return RocketMQ()
