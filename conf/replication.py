"""The settings of replication between a master and its slaves: a group of BrokerSettings."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from cometmq.conf.option import option

SLAVES_MAX: Final = 64
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# RocketMQ DefaultHAClient, READ_MAX_BUFFER_SIZE: a frame that is larger never becomes whole there.
_SLAVE_BUFFER_BYTES: Final = 4_194_304
_FRAME_HEADER_BYTES: Final = 12


def networks(text: str) -> tuple[Network, ...]:
    """Those that a list of addresses and networks names. Raises ValueError."""
    parts = (part.strip() for part in re.split("[;,]", text))
    return tuple(ipaddress.ip_network(part, strict=False) for part in parts if part)


def _networks(value: str) -> str | None:
    try:
        networks(value)
    except ValueError as error:
        return f'must be addresses or networks (10.0.0.0/8), separated by ";": {error}'
    return None


def _a_peer(value: str) -> str | None:
    found = re.fullmatch(r"(?:[^\s:/;,]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", value)
    if value and (found is None or not 1 <= int(found[1]) <= 65535):
        return "must be host:port"
    return None


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ReplicationSettings:
    """Replication"""

    ha_listen_port: int = option(
        0,
        key="haListenPort",
        at_least=0,
        at_most=65_535,
        help="The port where slaves come to this master, see docs/master-slave.md. 0: under "
        "ASYNC_MASTER none, nobody can copy the log; under SYNC_MASTER the one after listenPort.",
    )
    ha_allowed_peers: str = option(
        "",
        key="haAllowedPeers",
        check=_networks,
        help="The addresses and networks that slaves may come from (10.0.0.7;10.1.0.0/16), "
        'separated by ";". RocketMQ\'s protocol asks nobody who they are, and hides nothing of '
        "what it carries. Empty: this machine alone.",
    )
    ha_master_address: str = option(
        "",
        key="haMasterAddress",
        check=_a_peer,
        help="host:port where a slave's master sends its log: its haListenPort. A slave needs it.",
    )
    ha_transfer_batch_size: int = option(
        1_048_576,  # RocketMQ: 32 KiB, with an acknowledgement for each
        key="haTransferBatchSize",
        at_least=1_024,
        at_most=_SLAVE_BUFFER_BYTES - _FRAME_HEADER_BYTES,
        help="How much of the log a slave is sent in one frame, at most.",
    )
    ha_flow_control_enable: bool = option(
        False,
        key="haFlowControlEnable",
        help="Whether maxHaTransferByteInSecond limits how fast slaves are sent the log: one that "
        "was away then leaves the network, and a small machine, to producers and consumers. "
        "Replicas of a group are not slowed down.",
    )
    max_ha_transfer_byte_in_second: int = option(
        104_857_600,
        key="maxHaTransferByteInSecond",
        at_least=1,
        help="How many bytes of the log a slave is sent a second, at most, with "
        "haFlowControlEnable. Below what producers send, it falls behind, and under SYNC_MASTER "
        "their answers wait for it.",
    )
    ha_send_heartbeat_interval_ms: int = option(
        5_000,
        key="haSendHeartbeatInterval",
        at_least=1,
        help="How long nothing is sent to a slave before it is told that there is nothing; and a "
        "slave that has nothing new tells its master how far it is, that often.",
    )
    ha_housekeeping_interval_ms: int = option(
        20_000,
        key="haHousekeepingInterval",
        at_least=1,
        help="A connection between master and slave that nothing comes by for so long is closed.",
    )
    in_sync_replicas: int | None = option(
        None,
        key="inSyncReplicas",
        at_least=1,
        at_most=SLAVES_MAX + 1,
        help="How many brokers must have a message before it is acknowledged, the master counted. "
        "Empty: 2 under SYNC_MASTER, else 1. RocketMQ 5's default is always 1, and its SYNC_MASTER "
        "then waits for nobody.",
    )
    slave_timeout_ms: int = option(
        3_000,
        key="slaveTimeout",
        at_least=1,
        help="Under SYNC_MASTER, how long an answer waits for slaves before it says "
        "FLUSH_SLAVE_TIMEOUT.",
    )
    ha_max_gap_not_in_sync_bytes: int = option(
        268_435_456,
        key="haMaxGapNotInSync",
        aliases=("haSlaveFallbehindMax",),  # RocketMQ 4.x
        at_least=1,
        help="A slave that is further behind than this is not waited for. Where too few are close "
        "enough, messages are answered with SLAVE_NOT_AVAILABLE at once.",
    )

    @property
    def ha_bytes_per_s(self) -> int:
        """That a slave is sent, at most; 0: there is no limit."""
        return self.max_ha_transfer_byte_in_second if self.ha_flow_control_enable else 0

    @property
    def allowed_networks(self) -> tuple[Network, ...]:
        """Where slaves may come from; none: this machine."""
        return networks(self.ha_allowed_peers)
