"""The folder of a cluster on one machine: what it has, where, and how it is made.

    cluster.json       which group, engine, name server and replicas; written last of all
    secret             what the replicas prove to each other that they belong together (0600)
    engine/            files of the SQLite engine
    lock               held by whoever runs the cluster
    n0/broker.conf     of each replica, and `store`, `broker.log`, `errors.log` beside it

Every path is a full one, so a folder that was moved is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Self

import msgspec

from cometmq.actors.replication.peers.secret import make_secret
from cometmq.conf import BrokerSettings, load_settings
from cometmq.conf.engine import ENGINE_KEYS, EngineAccess
from cometmq.conf.group import Id
from cometmq.conf.settings import options_by_key
from cometmq.protocol.errors import ArgumentIllegal, ConfigError, StoreError, StoreLocked
from cometmq.shm.os.durable import PRIVATE, replace_file, sync_folder

CLUSTER_FILE: Final = "cluster.json"
SECRET_FILE: Final = "secret"
LOCK_FILE: Final = "lock"
ENGINE_DIR: Final = "engine"
BROKER_CONF: Final = "broker.conf"
STORE_DIR: Final = "store"
HOST: Final = "127.0.0.1"
VERSION: Final = 1
_BYTES_MAX: Final = 65_536
_PORTS_FROM: Final = 10_240  # below are those of well-known services
_LOCAL_PORTS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")

# What `cluster init` itself says in each broker.conf; nobody else may.
OWN_KEYS: Final = (
    "brokerName", "namesrvAddr", "port", "storePathRootDir", "enableDLegerCommitLog", "dLegerGroup",
    "dLegerPeers", "dLegerSelfId", "minInSyncReplicas", "groupEngine", "groupSecretFile", "logFile",
)  # fmt: skip

_HEAD: Final = "# Written by `cometmq cluster`. A change counts from the replica's next start on.\n"


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One replica: its name, and where it takes the others' connections."""

    name: Id
    address: Annotated[str, msgspec.Meta(max_length=255)]
    removed: bool = False  # its place in dLegerPeers stays, so that nobody else gets its brokerId


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """cluster.json."""

    version: int = VERSION
    folder: str  # where it was made
    group: str
    engine: str
    min_in_sync: int
    name_server: str  # host:port
    replicas: tuple[Place, ...]
    settings: dict[str, str] = {}  # further ones of each replica
    zookeeper: tuple[int, int, int] | None = None  # earlier releases: ports of a ZooKeeper server
    formed: bool = False  # the engine has had the group's record


class ClusterFolder:
    """One that is there; `make` makes one. Raises StoreError for what is none."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.file = self._read()

    @classmethod
    def is_at(cls, path: Path) -> bool:
        return (path / CLUSTER_FILE).exists()

    @classmethod
    def make(
        cls,
        path: Path,
        *,
        group: str,
        replicas: int,
        min_in_sync: int,
        port: int = 0,
        engine: str | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> Self:
        """Create all files that the cluster needs to start, except the group's record.

        Args:
            port: port of the name server; the replicas use the following ones. 0: free ports, which
                the cluster keeps.
            engine: URL of the engine; None: SQLite in the folder.
            settings: additional settings of each replica, by RocketMQ's keys.

        Completes a folder that a killed run left unfinished. Raises ConfigError for illegal
        settings, StoreError for a folder with foreign files, OSError.
        """
        path = path.absolute()
        given = dict(settings or {})
        _check_settings(given, has_own_engine=engine is None)
        count = 1 + replicas
        ports = free_ports(count) if port == 0 else range(port, port + count)
        if ports[-1] > 65_535:
            raise ConfigError(f"port = {port}: those behind it would go up to {ports[-1]}")
        file = ClusterFile(
            folder=str(path),
            group=group,
            engine=engine or f"sqlite:{path / ENGINE_DIR}",
            min_in_sync=min_in_sync,
            name_server=f"{HOST}:{ports[0]}",
            replicas=tuple(
                Place(f"n{number}", f"{HOST}:{ports[1 + number]}") for number in range(replicas)
            ),
            settings=given,
        )
        for replica in file.replicas:
            BrokerSettings.from_keys(_keys_of(file, replica.name)).check_for_writing()
        known = {SECRET_FILE, LOCK_FILE, ENGINE_DIR, *(each.name for each in file.replicas)}
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        foreign = sorted(each.name for each in path.iterdir() if each.name not in known)
        foreign = [name for name in foreign if not name.endswith(".tmp")]
        if foreign:
            raise StoreError(f"{path}: is no cluster's and has other things in it: {foreign[0]}")
        secret = path / SECRET_FILE
        if not secret.exists():
            make_secret(secret)
        for replica in file.replicas:
            _write_replica(file, replica.name)
        sync_folder(path.parent)
        _keep(path, file)
        return cls(path)

    def _read(self) -> ClusterFile:
        path = self.path / CLUSTER_FILE
        try:
            with path.open("rb") as opened:
                content = opened.read(_BYTES_MAX + 1)
        except FileNotFoundError:
            raise StoreError(
                f"{self.path}: no cluster is there; `cometmq cluster init` makes one"
            ) from None
        try:
            file = msgspec.json.decode(content, type=ClusterFile)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreError(f"{path}: cannot be read: {error}") from None
        if file.version != VERSION:
            raise StoreError(f"{path}: is of version {file.version}, this is {VERSION}")
        if not Path(file.folder).exists() or not Path(file.folder).samefile(self.path):
            raise StoreError(
                f"{path}: was made in {file.folder}, and what it names is there: move it back"
            )
        return file

    def reread(self) -> bool:
        """Whether another process has changed cluster.json since; that counts then. Raises
        StoreError."""
        before, self.file = self.file, self._read()
        return self.file != before

    @property
    def replicas(self) -> tuple[Place, ...]:
        """Those that were not removed."""
        return tuple(each for each in self.file.replicas if not each.removed)

    def replica(self, name: str) -> Place:
        """Raises ArgumentIllegal."""
        for each in self.replicas:
            if each.name == name:
                return each
        known = ", ".join(each.name for each in self.replicas)
        raise ArgumentIllegal(f"{self.path}: there is no replica {name!r:.140}, but {known}")

    @property
    def engine_access(self) -> EngineAccess:
        """As `cluster init --set` was told; `cluster` itself speaks to the engine by it."""
        return BrokerSettings.from_keys(self.file.settings).engine_access

    def store_of(self, name: str) -> Path:
        return self.path / name / STORE_DIR

    def settings_of(self, name: str) -> BrokerSettings:
        """As its broker.conf has them, checked. The environment does not count: it would be the
        same for all replicas. Raises ConfigError."""
        settings = load_settings(self.path / name / BROKER_CONF, environment={}).settings
        settings.check_for_writing()
        return settings

    # --- changes ---

    def keep_formed(self) -> None:
        """The engine has the group's record: if it is gone one day, nobody makes another one."""
        if not self.file.formed:
            self._change(formed=True)

    def add(self, name: str, address: str | None) -> Place:
        """A folder for one more replica. One that was removed may come back, with an empty store.

        Args:
            address: host:port; None: a free port of this machine.

        Raises ConfigError, StoreError.
        """
        with self._alone():
            for each in self.replicas:
                if each.name == name and address in (None, each.address):
                    return each  # an attempt before this one has made it
            place = Place(name, address or f"{HOST}:{free_ports(1)[0]}")
            store = self.store_of(name)
            if store.exists() and any(store.iterdir()):
                raise StoreError(
                    f"{store}: a replica begins with an empty store; move this one away"
                )
            others = self.file.replicas
            if any(each.name == name for each in others):
                kept = tuple(place if each.name == name else each for each in others)
            else:
                kept = (*others, place)
            _write_replica(msgspec.structs.replace(self.file, replicas=kept), name)
            self._put(replicas=kept)
            return place

    def remove(self, name: str) -> None:
        """Its files stay."""
        self.replica(name)
        with self._alone():
            self._put(
                replicas=tuple(
                    msgspec.structs.replace(each, removed=True) if each.name == name else each
                    for each in self.file.replicas
                )
            )

    def _change(self, **changes: object) -> None:
        with self._alone():
            self._put(**changes)

    def _put(self, **changes: object) -> None:
        file = msgspec.structs.replace(self.file, **changes)
        _keep(self.path, file)
        self.file = file

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One process at a time changes cluster.json, of what it is then."""
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            self.file = self._read()
            yield
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """For whoever runs the cluster. Raises StoreLocked where another process does."""
        path = self.path / LOCK_FILE
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
                raise StoreLocked(f"{self.path}: process {pid} runs this cluster") from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)


def _keep(path: Path, file: ClusterFile) -> None:
    content = msgspec.json.format(msgspec.json.encode(file), indent=2)
    replace_file(path / CLUSTER_FILE, content + b"\n", mode=PRIVATE)


def _check_settings(settings: Mapping[str, str], *, has_own_engine: bool) -> None:
    known = options_by_key()
    problems = [f"--set {key}: there is no such setting" for key in settings if key not in known]
    problems += [f"--set {key}: the cluster says that" for key in OWN_KEYS if key in settings]
    if has_own_engine:
        of_others = [key for key in ENGINE_KEYS if key in settings]
        problems += [f"--set {key}: of an engine elsewhere (--engine URL)" for key in of_others]
    if problems:
        raise ConfigError(*problems)


def _keys_of(file: ClusterFile, name: str) -> dict[str, str]:
    """A replica's settings, by their keys."""
    folder = Path(file.folder) / name
    own = {
        "brokerName": file.group,
        "namesrvAddr": file.name_server,
        "port": "0",
        "storePathRootDir": str(folder / STORE_DIR),
        "enableDLegerCommitLog": "true",
        "dLegerGroup": file.group,
        "dLegerPeers": ";".join(f"{each.name}-{each.address}" for each in file.replicas),
        "dLegerSelfId": name,
        "minInSyncReplicas": str(file.min_in_sync),
        "groupEngine": file.engine,
        "groupSecretFile": str(Path(file.folder) / SECRET_FILE),
        "logFile": str(folder / "broker.log"),
    }
    assert set(own) == set(OWN_KEYS)
    return {**file.settings, **own}


def _write_replica(file: ClusterFile, name: str) -> None:
    """Its folder and broker.conf, from which its settings come as they were meant. Raises
    ConfigError."""
    keys = _keys_of(file, name)
    wanted = BrokerSettings.from_keys(keys)
    folder = Path(file.folder) / name
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / BROKER_CONF
    lines = [f"{key}={_escaped(value)}\n" for key, value in keys.items()]
    replace_file(path, "".join([_HEAD, *lines]).encode(), mode=PRIVATE)
    found = load_settings(path, environment={}).settings.as_keys()
    for key, value in wanted.as_keys().items():
        if found[key] != value:
            raise ConfigError(f"{key} = {value!r:.200}: {path} cannot hold it")


def _escaped(value: str) -> str:
    """As a Java properties file has it."""
    escaped = value.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"\\{escaped}" if escaped[:1] in (" ", "\t", "\f") else escaped


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, to be listened on at every start from now on.

    They lie below those that the system hands out to whoever connects somewhere: one of these could
    be taken when it is needed again.
    """
    try:
        below = int(_LOCAL_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        below = 32_768
    found: list[int] = []
    span = range(_PORTS_FROM, max(below, _PORTS_FROM + 1_000))
    for port in random.sample(span, len(span)):
        if len(found) == count:
            break
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            found.append(port)
    if len(found) < count:
        raise ConfigError("port = 0: there are no free ports on this machine; choose some (--port)")
    return found


def pairs_to_settings(pairs: Sequence[str]) -> dict[str, str]:
    """What `--set KEY=VALUE` says. Raises ConfigError."""
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {pair:.80}: must be KEY=VALUE")
        settings[key.strip()] = value.strip()
    return settings
