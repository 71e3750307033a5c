"""The settings of a group of replicas that elects its master: a group of BrokerSettings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

import msgspec

from cometmq.conf.option import option

MIN_IN_SYNC: Final = 2
REPLICAS_MIN: Final = 3  # with two, the loss of either one ends writing
REPLICAS_MAX: Final = 15
ID_MAX: Final = 120

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=ID_MAX, pattern=r"^[a-zA-Z0-9_.-]+$")]

# What every engine takes for a name, and the group's record as well.
_GROUP: Final = re.compile(r"[a-zA-Z0-9_-]{1,120}")
_PEER: Final = re.compile(
    r"([a-zA-Z0-9_.]{1,120})-((?:[^\s:/;,]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5}))"
)


class Peer(NamedTuple):
    """One replica of a group."""

    replica: str
    address: str  # host:port


def peers(text: str) -> tuple[Peer, ...]:
    """Those that a list of RocketMQ's form names: n0-host:port;n1-host:port. Raises ValueError."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        match = _PEER.fullmatch(part)
        if match is None or not 1 <= int(match[3]) <= 65535:
            raise ValueError(f"{part!r:.80} is no id-host:port")
        found.append(Peer(match[1], match[2]))
    return tuple(found)


def is_peer(replica: str, address: str) -> bool:
    """Whether dLegerPeers can name such a replica."""
    try:
        return peers(f"{replica}-{address}") == ((replica, address),)
    except ValueError:
        return False


def _peers(value: str) -> str | None:
    try:
        peers(value)
    except ValueError as error:
        return f'must be id-host:port of each replica, separated by ";": {error}'
    return None


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class GroupSettings:
    """Groups that elect their master"""

    enable_dleger_commit_log: bool = option(
        False,
        key="enableDLegerCommitLog",
        help="Whether this broker is a replica of a group that elects its master by itself, see "
        "docs/replication.md. Its role is then the group's affair: brokerRole stays ASYNC_MASTER.",
    )
    d_leger_group: str = option(
        "",
        key="dLegerGroup",
        help="The group's name. Empty: brokerName.",
    )
    d_leger_peers: str = option(
        "",
        key="dLegerPeers",
        check=_peers,
        help="All replicas of the group, this one too, and where each takes the others' "
        "connections: n0-10.0.0.1:40911;n1-10.0.0.2:40911;n2-10.0.0.3:40911. At least three.",
    )
    d_leger_self_id: str = option(
        "",
        key="dLegerSelfId",
        help="Which of dLegerPeers this broker is.",
    )
    min_in_sync_replicas: int | None = option(
        None,
        key="minInSyncReplicas",
        at_least=1,  # RocketMQ's default, in a broker.conf without a group
        at_most=REPLICAS_MAX,
        help="How many replicas of a group must have a message before it is acknowledged, 2 at "
        "least; with fewer in sync nothing is stored. Empty: 2.",
    )
    group_engine: str = option(
        "",
        key="groupEngine",
        help="Engine that stores the group's record: sqlite:/folder on one machine, or "
        "etcd://host:port,host:port between machines; see docs/engines.md.",
    )
    group_secret_file: str = option(
        "",
        key="groupSecretFile",
        help="A file with the secret that all replicas of the group share; whoever does not know "
        "it is no replica. `cometmq cluster init` makes one.",
    )
    group_session_timeout_ms: int = option(
        2_000,
        key="groupSessionTimeout",
        at_least=500,
        at_most=60_000,
        help="How long the engine hears nothing of a master before another one is elected.",
    )

    @property
    def is_in_group(self) -> bool:
        return self.enable_dleger_commit_log

    @property
    def group_peers(self) -> tuple[Peer, ...]:
        return peers(self.d_leger_peers)

    @property
    def min_iss(self) -> int:
        return self.min_in_sync_replicas or MIN_IN_SYNC

    def group_problems(self, group: str) -> Iterator[str]:
        """Why no replica can be made of these settings.

        Args:
            group: the group's name; empty: neither it nor brokerName was given.
        """
        if group and not _GROUP.fullmatch(group):
            key = "dLegerGroup" if self.d_leger_group else "brokerName"
            yield (
                f"{key} = {group:.140}: a group's name is 1 to 120 of a-z, A-Z, 0-9, _ and -"
                + ("" if self.d_leger_group else "; dLegerGroup may differ from brokerName")
            )
        for problem in impossible(self.group_peers, self.min_iss):
            key = "minInSyncReplicas" if problem.startswith("min_iss") else "dLegerPeers"
            yield f"{key}: {problem}"
        if self.d_leger_self_id not in dict(self.group_peers):
            yield (
                f"dLegerSelfId = {self.d_leger_self_id:.140}: must be one of dLegerPeers = "
                f"{self.d_leger_peers:.300}"
            )
        if not self.group_engine:
            yield "groupEngine: must name what keeps the group's record, see docs/engines.md"
        if not self.group_secret_file:
            yield "groupSecretFile: must be a file with the secret that all replicas share"


def impossible(replicas: Sequence[tuple[str, str]], min_iss: int) -> list[str]:
    """Why a group of these replicas cannot be; one line for each reason, empty if it can.

    Args:
        replicas: id and address of each, as they were configured.
        min_iss: how many replicas must have a message before it is acknowledged.
    """
    problems = []
    names = [name for name, _ in replicas]
    for name, count in sorted(Counter(names).items()):
        if count > 1:
            problems.append(f"{count} replicas have the id {name}: each needs one of its own")
    for address, count in sorted(Counter(address for _, address in replicas).items()):
        if count > 1:
            problems.append(f"{count} replicas have the address {address}")
    for name in names:
        try:
            msgspec.convert(name, Id)
        except msgspec.ValidationError as error:
            problems.append(f"replica {name!r:.140}: {error}")
    if not REPLICAS_MIN <= len(replicas) <= REPLICAS_MAX:
        problems.append(
            f"{len(replicas)} replicas: a group that fails over by itself has "
            f"{REPLICAS_MIN} to {REPLICAS_MAX}"
        )
    if min_iss > len(replicas):
        problems.append(
            f"min_iss = {min_iss}, but there are {len(replicas)} replicas: "
            "nothing would ever be acknowledged"
        )
    if min_iss < 2:
        problems.append(
            f"min_iss = {min_iss}: a message would be acknowledged while one disk alone has it"
        )
    return problems
