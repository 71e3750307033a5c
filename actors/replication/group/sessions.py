"""By which ids an engine knows the sessions of replicas."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from cometmq.actors.replication.core.record import GroupRecord, Life


def session_id(life: Life) -> int:
    """That of one life of one store: a replica that was killed and starts again need not wait for
    the end of its former session."""
    replica, store_uuid, incarnation = life
    text = f"{replica}\0{store_uuid}\0{incarnation}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def alive_in(record: GroupRecord, ids: Collection[int]) -> frozenset[str]:
    """The replicas whose latest life, as the record has it, has a session."""
    lives = {replica: record.life(replica) for replica in record.replicas}
    return frozenset(
        replica for replica, life in lives.items() if life is not None and session_id(life) in ids
    )
