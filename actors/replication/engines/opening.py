"""Open the engine that a setting names.

sqlite:/var/lib/cometmq/cluster            a folder on this machine
etcd://a:2379,b:2379,c:2379                endpoints, and a prefix of keys behind them
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from cometmq.actors.replication.engines import etcd
from cometmq.actors.replication.engines.access import Access
from cometmq.actors.replication.engines.engine import TIMEOUT_S, Engine
from cometmq.actors.replication.engines.sqlite import SqliteEngine
from cometmq.conf.engine import NO_ACCESS, EngineAccess
from cometmq.protocol.errors import ConfigError

URL_MAX: Final = 2048
HOSTS_MAX: Final = 16
_TIMEOUT_S_MAX: Final = 60.0

_FORMS: Final = "sqlite:/folder or etcd://host:port,…"
_REMOVED: Final = "zookeeper"
_URL: Final = re.compile(r"etcd://([^/]*)((?:/[A-Za-z0-9_-]{1,64}){0,8})/?")
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9_.-]{1,253}):([0-9]{1,5})")
_FOLDER: Final = re.compile(r"sqlite:(/[^\x00-\x1f\x7f\ud800-\udfff]*)")


def open_engine(url: str, timeout_s: float = TIMEOUT_S, access: EngineAccess = NO_ACCESS) -> Engine:
    """Open the engine that a setting names.

    Args:
        timeout_s: limit of each call, in seconds, up to 60.
        access: TLS files and user of an etcd; SQLite takes none.

    Raises ConfigError, also for files of `access` that cannot be used; for SQLite also EngineFault
    and EngineUnreachable.
    """
    opener = opener_of(url, access)
    if type(timeout_s) not in (int, float) or not 0 < timeout_s <= _TIMEOUT_S_MAX:
        raise ConfigError(
            f"engine: timeout_s = {timeout_s!r:.40}: up to {_TIMEOUT_S_MAX:g} seconds"
        )
    return opener(timeout_s)


def opener_of(url: str, access: EngineAccess = NO_ACCESS) -> Callable[[float], Engine]:
    """Return a function that opens that engine, given the limit of a call in seconds.

    Nothing is opened yet. Raises ConfigError, which no retry resolves.
    """
    if not isinstance(url, str) or len(url) > URL_MAX:
        raise ConfigError(
            f"engine = {url!r:.100}: a text of {URL_MAX} characters at most: {_FORMS}"
        )
    if found := _FOLDER.fullmatch(url):
        if any(access):
            raise ConfigError(f"engine = {url!r:.200}: is a file, and knows no TLS and no users")
        return partial(SqliteEngine, _folder(url, found[1]))
    if url == _REMOVED or url.startswith(f"{_REMOVED}:"):
        raise ConfigError(
            f"engine = {url!r:.200}: ZooKeeper is not supported any more; use etcd "
            "(etcd://host:port,host:port,host:port) between machines, or sqlite:/folder on one; "
            "docs/engines.md explains how to move a group to another engine"
        )
    if not (found := _URL.fullmatch(url)):
        raise ConfigError(f"engine = {url!r:.200}: must be {_FORMS}")
    hosts, below = found.groups()
    addresses = [_address(url, each) for each in hosts.split(",")]
    if len(addresses) > HOSTS_MAX:
        raise ConfigError(f"engine: {len(addresses)} servers, at most {HOSTS_MAX}")
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"engine = {url!r:.200}: a server is named twice")
    return partial(etcd.EtcdEngine, addresses, below or etcd.PREFIX, Access(access))


def _address(url: str, text: str) -> tuple[str, int]:
    found = _HOST.fullmatch(text)
    if found is None or not 0 < int(found[2]) < 65_536:
        raise ConfigError(f"engine = {url!r:.200}: {text!r:.80} is no host:port")
    host = found[1].strip("[]")
    try:
        host.encode("idna")  # as whoever looks it up does
    except UnicodeError as error:
        raise ConfigError(f"engine = {url!r:.200}: {host!r:.80} is no host: {error}") from None
    return host, int(found[2])


def _folder(url: str, folder: str) -> Path:
    path = Path(folder)
    if ".." in path.parts or len(path.parts) < 2 or folder.startswith("//"):
        raise ConfigError(f"engine = {url!r:.200}: the full path of a folder: {_FORMS}")
    return path
