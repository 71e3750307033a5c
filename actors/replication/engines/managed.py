"""ZooKeeper servers of our own, as child processes, from the jars that PySpark carries.

    peers = [Peer("10.0.0.1", 2181), Peer("10.0.0.2", 2181), Peer("10.0.0.3", 2181)]
    with ManagedServer(Path("/var/lib/cometmq/zookeeper"), 1, peers) as server:
        server.wait_until_ready(30)

An ensemble has one server, or three of which two must run. Each has a folder of its own: config and
log files, and `data`, which is its memory: a server whose folder was emptied must not come back
under its old number while the others run. Its ports take everybody's connections, so they belong
into a network that only brokers reach.

PySpark's folder of jars is no distribution of ZooKeeper: which version is in it is looked up, and
what is missing is said.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from cometmq.actors.replication.engines.errors import (
    EngineError,
    EngineMissing,
    EngineUnreachable,
)
from cometmq.protocol.errors import ArgumentIllegal
from cometmq.protocol.retry import pause_s
from cometmq.shm.os.durable import PRIVATE, replace_file, sync_folder

MAIN: Final = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
OLDEST: Final = (3, 5)  # `create` that answers with the node's state
TICK_MS: Final = 500  # sessions of a second at least; each ends up to a tick late
TAIL_BYTES: Final = 2_000
_INSTEAD: Final = (
    "install PySpark (pip install 'cometmq[spark]'), or another engine:\n"
    "    apt-get install zookeeperd    # then zookeeper://host:2181\n"
    "    apt-get install etcd-server   # then etcd://host:2379"
)
# What a server loads: itself, its log, and what it keeps snapshots and metrics with.
_JARS: Final = (
    "zookeeper-*.jar", "slf4j-api-*.jar", "log4j-*.jar", "snappy-java-*.jar", "metrics-core-*.jar",
    "netty-buffer-*.jar", "netty-codec-*.jar", "netty-common-*.jar", "netty-handler-*.jar",
    "netty-resolver-*.jar", "netty-transport-*.jar", "commons-io-*.jar", "commons-cli-*.jar",
)  # fmt: skip
_LOGGING: Final = """\
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = {log}
appender.file.filePattern = {log}.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d %-5p [%t] %c{{1}}: %m%n
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 4MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 3
"""


_MODE: Final = re.compile(rb"^Mode: ([a-z]+)", re.MULTILINE)
_HOST: Final = re.compile(r"[A-Za-z0-9_.-]{1,253}")
_FOLDER: Final = re.compile(r"(/[A-Za-z0-9_.-]+)+")  # Java takes backslashes and $ for signs


@dataclass(frozen=True)
class Peer:
    """One server of an ensemble: where clients come, and where the other servers do."""

    host: str
    client_port: int
    quorum_port: int = 2888
    election_port: int = 3888


@dataclass(frozen=True)
class Jars:
    """The servers' program."""

    version: str
    class_path: str


def find_jars(folder: Path | None = None) -> Jars:
    """What there is in PySpark, or in another folder of jars. Raises EngineMissing."""
    folder = folder or _pyspark_jars()
    versions = [
        found[1]
        for path in folder.glob("zookeeper-*.jar")
        if (found := re.fullmatch(r"zookeeper-([0-9]+\.[0-9]+[0-9A-Za-z.-]*)\.jar", path.name))
    ]
    if len(versions) != 1:
        raise EngineMissing(f"{folder} has {len(versions)} jars of ZooKeeper: {_INSTEAD}")
    (version,) = versions
    major, minor = map(int, version.split(".")[:2])
    if (major, minor) < OLDEST:
        raise EngineMissing(f"{folder} has ZooKeeper {version}, 3.5 is needed: {_INSTEAD}")
    if not list(folder.glob(f"zookeeper-jute-{version}.jar")):
        raise EngineMissing(f"{folder} has no zookeeper-jute-{version}.jar: {_INSTEAD}")
    paths = sorted({str(path) for kind in _JARS for path in folder.glob(kind)})
    return Jars(version, os.pathsep.join(paths))


def check_installed() -> None:
    """Whatever a server and its clients need is there; or raises EngineMissing, which says what to
    install."""
    find_jars()
    for name in ("java", "setpriv"):
        _program(name)
    if find_spec("kazoo") is None:
        raise EngineMissing(
            f"kazoo is not installed: pip install 'cometmq[cluster]'; or {_INSTEAD}"
        )


def _pyspark_jars() -> Path:
    spec = find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise EngineMissing(f"PySpark, whose jars have a ZooKeeper, is not installed: {_INSTEAD}")
    return Path(spec.submodule_search_locations[0], "jars")


class ManagedServer:
    """One server, which runs until it is closed; the kernel kills it when this process dies.

    A thread starts it and waits for its end. Its last words are in `log` and `output`.

    Args:
        folder: made if it is not there.
        number: which of the peers it is, from 1.
        peers: all servers of the ensemble, in an order that never changes: one or three.

    Raises ArgumentIllegal, EngineMissing, EngineError.
    """

    def __init__(
        self, folder: Path, number: int, peers: Sequence[Peer], *, java: str = "java",
        heap_mib: int = 128, jars: Jars | None = None,
    ) -> None:  # fmt: skip
        if len(peers) not in (1, 3) or not 1 <= number <= len(peers):
            raise ArgumentIllegal(
                f"server {number} of {len(peers)}: an ensemble has one or three servers, counted "
                "from 1"
            )
        _check(folder, peers)
        self.folder = folder
        self.number = number
        self.peers = tuple(peers)
        self.log = folder / "zookeeper.log"
        self.output = folder / "output.log"
        self._jars = jars or find_jars()
        self._heap_mib = heap_mib
        self._programs = _program(java), _program("setpriv")
        self._process: subprocess.Popen[bytes] | None = None
        self._spawned = threading.Event()
        self._trouble: OSError | None = None
        write_folder(folder, number, self.peers)
        self._thread = threading.Thread(target=self._run, name=f"zookeeper-{number}", daemon=True)
        self._thread.start()
        self._spawned.wait()
        if self._trouble is not None:
            raise EngineError(f"{folder}: {self._trouble}") from self._trouble

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _run(self) -> None:
        """The kernel kills a child with the *thread* that started it: this one outlives it."""
        try:
            with self.output.open("ab") as output:
                self._process = subprocess.Popen(
                    self._command(), stdin=subprocess.DEVNULL, stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True, cwd=self.folder,
                )  # fmt: skip
        except OSError as error:
            self._trouble = error
        finally:
            self._spawned.set()
        if self._process is not None:
            self._process.wait()

    def _command(self) -> list[str]:
        java, setpriv = self._programs
        # Only with the signal set it is looked whether the parent still lives: no gap is left.
        guarded = 'test "$PPID" = "$0" && exec "$@"'
        return [
            setpriv, "--pdeathsig", "KILL", "sh", "-c", guarded, str(os.getpid()),
            java, f"-Xmx{self._heap_mib}m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
            "-XX:-UsePerfData", "-Dzookeeper.jmx.log4j.disable=true", "-Dlog4j2.disableJmx=true",
            f"-Dlog4j2.configurationFile={self.folder / 'log4j2.properties'}",
            "-Dzookeeper.preAllocSize=4096", "-cp", self._jars.class_path, MAIN,
            str(self.folder / "zoo.cfg"),
        ]  # fmt: skip

    def wait_until_ready(self, timeout_s: float) -> None:
        """Until it serves, which it does with a majority only.

        Raises EngineError if it has ended, EngineUnreachable when the time is over.
        """
        until = time.monotonic() + timeout_s
        failures = 0
        while not self.mode():
            if not self.is_running:
                raise EngineError(f"{self.folder}: the server has ended: {self._last_words()}")
            failures += 1
            if time.monotonic() > until:
                raise EngineUnreachable(
                    f"{self.folder}: not ready after {timeout_s:g} s: {self._last_words()}"
                )
            time.sleep(pause_s(failures, most_s=0.1))  # nothing tells when it is

    def mode(self) -> str:
        """ "leader", "follower" or "standalone", by `srvr`; empty: it does not serve."""
        peer = self.peers[self.number - 1]
        try:
            with socket.create_connection((peer.host, peer.client_port), 1) as line:
                line.sendall(b"srvr")
                with line.makefile("rb") as answer:
                    found = _MODE.search(answer.read(65_536))
        except OSError:
            return ""
        return found[1].decode() if found else ""

    def _last_words(self) -> str:
        for path in (self.log, self.output):
            with contextlib.suppress(OSError):
                text = path.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip()
                if text:
                    return f"{path}: {text}"
        return f"see {self.output}"

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):  # it has ended in this moment
                os.kill(self.pid, number)

    def close(self) -> None:
        """End it; what it has answered is on the disk however it ends."""
        self.kill(signal.SIGTERM)
        self.kill(signal.SIGCONT)
        self._thread.join(5)
        self.kill()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _check(folder: Path, peers: Sequence[Peer]) -> None:
    """What is written into the servers' config is one word a line. Raises ArgumentIllegal."""
    taken: set[tuple[str, int]] = set()
    for peer in peers:
        if not _HOST.fullmatch(peer.host):
            raise ArgumentIllegal(f"peer {peer.host!r:.80}: a host's name or its IPv4 address")
        for port in (peer.client_port, peer.quorum_port, peer.election_port):
            if type(port) is not int or not 0 < port < 65_536:
                raise ArgumentIllegal(f"peer {peer.host}: port {port!r:.20}")
            if (peer.host, port) in taken:
                raise ArgumentIllegal(f"peer {peer.host}: port {port} is named twice")
            taken.add((peer.host, port))
    if not _FOLDER.fullmatch(str(folder)):
        raise ArgumentIllegal(f"folder {str(folder)!r:.200}: a full path of a-zA-Z0-9_.- is needed")


def write_folder(folder: Path, number: int, peers: Sequence[Peer]) -> None:
    """Config, number and folders, on the disk before the first start: without a number that
    outlives a power cut a server does not come back. Raises EngineError."""
    data = folder / "data"
    try:
        for each in (folder, data):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        myid = data / "myid"
        if myid.exists() and myid.read_text().strip() != str(number):
            raise EngineError(
                f"{myid} says {myid.read_text()[:20]!r}, and this is server {number}: it is the "
                "folder of another server"
            )
        replace_file(myid, f"{number}\n".encode(), mode=PRIVATE)
        replace_file(folder / "zoo.cfg", configuration(data, number, peers).encode(), mode=PRIVATE)
        logging = _LOGGING.format(log=folder / "zookeeper.log")
        replace_file(folder / "log4j2.properties", logging.encode(), mode=PRIVATE)
        sync_folder(folder.parent)
    except OSError as error:
        raise EngineError(f"{folder}: {error.strerror or error}") from error


def configuration(data: Path, number: int, peers: Sequence[Peer]) -> str:
    """A zoo.cfg. Source: ZooKeeper's administrator's guide."""
    lines = {
        "tickTime": TICK_MS,
        "initLimit": 20,
        "syncLimit": 4,
        "minSessionTimeout": 2 * TICK_MS,
        "maxSessionTimeout": 120 * TICK_MS,
        "dataDir": data,
        "clientPort": peers[number - 1].client_port,
        "clientPortAddress": peers[number - 1].host,
        "maxClientCnxns": 0,
        "admin.enableServer": "false",
        "4lw.commands.whitelist": "srvr",
        "autopurge.snapRetainCount": 3,
        "autopurge.purgeInterval": 1,
    }
    if len(peers) > 1:
        for each, peer in enumerate(peers, 1):
            lines[f"server.{each}"] = f"{peer.host}:{peer.quorum_port}:{peer.election_port}"
    return "".join(f"{key}={value}\n" for key, value in lines.items())


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        package = "util-linux" if name == "setpriv" else "openjdk-17-jre-headless"
        raise EngineMissing(f"there is no {name}: apt-get install {package}; or {_INSTEAD}")
    return found
