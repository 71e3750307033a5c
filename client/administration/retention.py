"""Retention: what is deleted now, and the holds that keep something."""

from __future__ import annotations

from datetime import datetime

import msgspec

from cometmq.client.administration.brokers import Brokers
from cometmq.client.administration.descriptions import DeletedDescription, HoldDescription
from cometmq.client.arguments import checked
from cometmq.protocol.commands import (
    Command,
    DeletedSegments,
    DeleteSegments,
    DropHold,
    Hold,
    HoldList,
    ListHolds,
    PlaceHold,
)


class RetentionAdmin(Brokers):
    """See Admin."""

    @checked
    def delete_expired(self, *, broker: str | None = None) -> list[DeletedDescription]:
        """Delete what fileReservedTime allows now, whatever the hour; what went, by broker.

        Args:
            broker: only there; None = on all.
        """
        found = []
        for master in self._masters(broker):
            gone = self._ask(master.coordinator, DeleteSegments(), DeletedSegments)
            found.append(DeletedDescription(master.broker, *msgspec.structs.astuple(gone)))
        return found

    @checked
    def place_hold(
        self,
        name: str,
        physical_offset: int = 0,
        *,
        lease_s: float | None = None,
        broker: str | None = None,
        store_id: str = "",
    ) -> list[HoldDescription]:
        """Have nothing at or above a physical offset deleted; the holds there are now.

        A hold survives restarts of the broker. Placing it again moves it and renews its lease.
        Only a disk over diskSpaceCleanForciblyRatio overrides it, and then a line in the broker's
        log says so.

        Args:
            physical_offset: below the log's beginning: from that beginning on.
            lease_s: it ends by itself after that time; None = it stays until it is dropped.
            broker: only there; None = on all. An offset means the same on one broker only.
            store_id: what `cometmq.store` in the store's folder says: a broker that has another
                store refuses. "" = it is not asked.
        """
        lease_ms = 0 if lease_s is None else max(1, int(lease_s * 1000))
        return self._on_holds(PlaceHold(name, physical_offset, lease_ms, store_id), broker)

    @checked
    def drop_hold(self, name: str, *, broker: str | None = None) -> list[HoldDescription]:
        """End a hold; those that are left. Nothing happens if there is none of that name."""
        return self._on_holds(DropHold(name), broker)

    @checked
    def holds(self, *, broker: str | None = None) -> list[HoldDescription]:
        """The holds of a broker, or of all."""
        return self._on_holds(ListHolds(), broker)

    def _on_holds(self, command: Command, broker: str | None) -> list[HoldDescription]:
        return [
            _described(master.broker, hold, answer.min_physical_offset)
            for master in self._masters(broker)
            for answer in (self._ask(master.coordinator, command, HoldList),)
            for hold in answer.holds
        ]


def _described(broker: str, hold: Hold, log_min: int) -> HoldDescription:
    expires = datetime.fromtimestamp(hold.expires_ms / 1000) if hold.expires_ms else None
    overridden = hold.physical_offset < log_min
    return HoldDescription(broker, hold.name, hold.physical_offset, expires, overridden)
