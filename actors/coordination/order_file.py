"""consumerOrderInfo.json: what groups have out that take messages in order, as RocketMQ's file."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import groupby, pairwise
from pathlib import Path
from typing import Final

from cometmq.actors.tables.popped import Key
from cometmq.actors.tables.takes import TakeBook
from cometmq.protocol.commands import ATTEMPT_MAX
from cometmq.protocol.errors import StoreDamaged
from cometmq.protocol.integers import INT64_MAX
from cometmq.protocol.ledger import PopsForgotten
from cometmq.protocol.takes import Take
from cometmq.shm.state.config_files import ConfigFile
from cometmq.shm.state.json_text import entry_text
from cometmq.shm.state.tables import ConsumerOrderInfoTable, OrderInfo

log = logging.getLogger(__name__)

COUNT_MAX: Final = 1 << 30  # a number of 32 bits has room for more
BITS: Final = 64  # of RocketMQ's mask of what is acknowledged, and so messages at most


class OrderFile:
    """consumerOrderInfo.json; if it is damaged, what was out comes again at once."""

    def __init__(self, config_dir: Path) -> None:
        self.file = ConfigFile(config_dir / "consumerOrderInfo.json", ConsumerOrderInfoTable)
        table = ConsumerOrderInfoTable()
        try:
            table = self.file.load() or table
        except (StoreDamaged, OSError) as error:
            log.warning("what groups have out that take messages in order comes again: %s", error)
        takes: dict[Key, Take] = {}
        for name, queues in table.table.items():
            topic, _, group = name.partition("@")
            for queue_id, info in queues.items():
                take = take_of(info)
                if take is None:
                    log.warning("%s: queue %d of %s makes no sense, and is passed over",
                                self.file.path, queue_id, name)  # fmt: skip
                elif take.left:  # else RocketMQ keeps it for a day
                    takes[group, topic, queue_id] = take
        self.book = TakeBook(takes)

    def put_back(self, ends: Mapping[tuple[str, int], int]) -> bool:
        """Forget what was taken where the queue has lost its end; whether there was any. From the
        group's offset on it comes again."""
        lost = self.book.beyond(ends)
        for group, topic, queue_id in lost:
            self.book.apply(PopsForgotten(group, topic, queue_id))
            log.warning(
                "group %s: queue %d of %s has lost messages that were taken; what is there comes "
                "again", group, queue_id, topic,
            )  # fmt: skip
        return bool(lost)

    def pieces(self) -> Iterator[str]:
        rows = sorted(self.book.items(), key=lambda row: (row[0][1], row[0][0], row[0][2]))
        yield '{\n\t"table":{'
        lead = ""
        for (topic, group), some in groupby(rows, key=lambda row: (row[0][1], row[0][0])):
            queues = {key[2]: order_info_of(take) for key, take in some}
            yield lead + entry_text(f"{topic}@{group}", queues, 2)
            lead = ","
        yield ("\n\t}" if lead else "}") + "\n}"


def order_info_of(take: Take) -> OrderInfo:
    """With a bit for the last neighbour if it is acknowledged: by it RocketMQ knows where to go on
    behind them all. What is not out is visible since ever."""
    offsets = [offset for offset, _ in take.left]
    is_last_done = take.end - 1 != offsets[-1]
    listed = [*offsets, take.end - 1] if is_last_done else offsets
    visible = {offset: 0 for offset in offsets if offset >= take.out_end}
    if take.back_ms:
        visible[take.out_end - 1] = take.back_ms
    return OrderInfo(
        a=take.attempt or None,
        cm=_signed(1 << len(offsets)) if is_last_done else 0,
        i=take.until_ms - take.popped_ms,
        l=take.popped_ms,
        o=[listed[0], *(offset - listed[0] for offset in listed[1:])],
        oc={offset: count for offset, count in take.left if count},
        ot=visible or None,
        pop_time=take.popped_ms,
        handle=take.handle,
        out_end=take.out_end,
    )


def _signed(mask: int) -> int:
    """As Java's long has it."""
    return mask - (1 << BITS) if mask >> (BITS - 1) else mask


def take_of(info: OrderInfo) -> Take | None:
    """None for what cannot be one.

    RocketMQ names no handle: what its consumers have nobody can acknowledge here, and it comes
    again when all of its time is over.
    """
    if not info.o:
        return None
    offsets = [info.o[0], *(info.o[0] + each for each in info.o[1:])]
    ordered = all(one < two for one, two in pairwise(offsets))
    if not ordered or offsets[0] < 0 or offsets[-1] >= INT64_MAX or len(offsets) > BITS:
        return None
    left = [offset for at, offset in enumerate(offsets) if not info.cm >> at & 1]
    counts, visible = info.oc or {}, info.ot or {}
    until_ms = min(max(info.pop_time + max(info.i or 0, 0), 0), INT64_MAX)
    end = out_end = offsets[-1] + 1
    back_ms = 0
    if info.handle > 0:
        out_end = min(max(info.out_end, 0), end)
        back_ms = max(visible.get(out_end - 1, 0), 0)
    else:
        until_ms = max((visible.get(offset, until_ms) for offset in left), default=0)
    return Take(
        max(info.handle, 0),
        (info.a or "")[:ATTEMPT_MAX],
        max(info.pop_time, 0),
        max(until_ms, 0),
        tuple((offset, min(max(counts.get(offset, 0), 0), COUNT_MAX)) for offset in left),
        end,
        out_end,
        back_ms,
    )
