"""How a replica behaves in time, and who it is. Times are in s of any clock that only grows."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one replica of one group. No safety depends on a time."""

    group: str
    replica: str
    address: str
    sync_flush: bool = True  # False: what is in the page cache counts as held
    beat_s: float = 0.05  # how often a master says that it is there
    silence_s: float = 1.0  # a follower that hears nothing begins a new session
    poll_s: float = 1.0  # how often the record is read without being told of a change
    retry_s: float = 0.2  # after a change of the record whose outcome is unknown
    election_s: float = 0.2  # how long bids are gathered
    lag_s: float = 10.0  # who has not caught up for so long leaves the in-sync set; many beats
    contact_s: float = 4.0  # a master without followers for so long gives up its mastership
    keep_s: float = 1.0  # how often a confirm offset that has moved is made durable
    frame_bytes: int = 1 << 20  # of records, in one frame
    window_bytes: int = 16 << 20  # of records, on their way to a follower
