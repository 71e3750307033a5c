"""Epochs of sinks: which of them a client may name, and which of them are repeats. Pure: no I/O.

A sink numbers its commits itself: a stream by Spark's number of the batch, which begins at 0 and
grows by one a batch, with gaps where a batch had no rows; a batch is epoch 0. No broker gives these
numbers out, so none of them may bar those that follow for ever:

- An epoch is no later than brokers' clocks can be, in ms. A sink may number its commits by the time
  as well; a count never comes so far.
- An epoch that was committed covers those below it only as far as a repeat can come from. One of
  further below is no repeat: the sink restarted its count, or its name was reused.
"""

from __future__ import annotations

from typing import Final

from cometmq.actors.tables.producers import AHEAD_MAX_MS
from cometmq.protocol.errors import BadRequest

# How far below the last one an epoch may be a repeat. Spark runs its last batch again; a checkpoint
# that was restored from a backup, or a driver that was cut off, is days behind, at several batches
# a second.
REPEATS_MAX: Final = 1_000_000
COUNT_MAX: Final = 100_000_000_000  # whatever is above it is a time in ms, from 1973 on


def epoch_max(now_ms: int) -> int:
    """The last epoch that a sink may name."""
    return now_ms + AHEAD_MAX_MS


def check_epoch(sink: str, epoch: int, now_ms: int) -> None:
    """Raises BadRequest for one that can be neither a count nor a time."""
    most = epoch_max(now_ms)
    if not 0 <= epoch <= most:
        raise BadRequest(
            f"sink {sink:.140}: epoch {epoch}: 0 to {most} are allowed; count commits from 0"
        )


def is_begun_anew(epoch: int, last: int, now_ms: int) -> bool:
    """Whether an epoch that is not above the last one is no repeat.

    So it is where the last one is too far away, or above what an epoch may be, which an older
    release let a client commit. Times are never too far away.
    """
    if epoch > last:
        return False
    return last > now_ms + 2 * AHEAD_MAX_MS or (epoch <= COUNT_MAX and last - epoch > REPEATS_MAX)
