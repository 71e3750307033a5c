"""Where a group is: its engine, and what of it is on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from cometmq.actors.replication.engines.engine import Engine
from cometmq.actors.replication.engines.opening import open_engine
from cometmq.cluster.folder import ClusterFolder
from cometmq.conf import BrokerSettings
from cometmq.conf.engine import NO_ACCESS, EngineAccess
from cometmq.protocol.errors import ConfigError, NotReachable

_SQLITE = "sqlite:"


class GroupPlace(msgspec.Struct, frozen=True, kw_only=True):
    """
    Args:
        engine: as the setting groupEngine has it.
        access: how it is spoken to.
        name_server: host:port, several separated by ";"; empty: not known.
        stores: of replicas on this machine.
        folder: of a cluster on this machine; None: the group is elsewhere.
    """

    group: str
    engine: str
    access: EngineAccess = NO_ACCESS
    name_server: str = ""
    stores: Mapping[str, Path] = {}
    folder: ClusterFolder | None = None

    @classmethod
    def of_folder(cls, folder: ClusterFolder) -> GroupPlace:
        return cls(
            group=folder.file.group,
            engine=folder.file.engine,
            access=folder.engine_access,
            name_server=f"tcp://{folder.file.name_server}",
            stores={each.name: folder.store_of(each.name) for each in folder.replicas},
            folder=folder,
        )

    @classmethod
    def of_settings(cls, settings: BrokerSettings) -> GroupPlace:
        """That of a replica. Raises ConfigError where the settings are of none."""
        if not settings.is_in_group:
            raise ConfigError("enableDLegerCommitLog = false: this broker is in no group")
        settings.check_for_writing()
        return cls(
            group=settings.group_name,
            engine=settings.group_engine,
            access=settings.engine_access,
            name_server=";".join(f"tcp://{each}" for each in settings.name_servers),
            stores={settings.d_leger_self_id: settings.store_path_root_dir.absolute()},
        )

    def open(self) -> Engine:
        """Raises ConfigError, NotReachable, and what `open_engine` does."""
        folder = Path(self.engine.removeprefix(_SQLITE))
        if self.engine.startswith(_SQLITE) and not folder.exists():
            raise NotReachable(f"{self.engine}: no engine is there")
        return open_engine(self.engine, access=self.access)
