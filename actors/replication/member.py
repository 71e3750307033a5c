"""A replica of a group that elects its master: the process that speaks with the others."""

from __future__ import annotations

from cometmq.actors.replication.ha import HaActor


class MemberActor(HaActor):
    """To come."""
