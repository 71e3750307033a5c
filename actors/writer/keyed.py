"""Messages that are stored once by their keys: one whose key is there is answered, not stored."""

from __future__ import annotations

import logging
import time
from typing import Final

import msgspec

from cometmq.actors.runtime.clock_steps import StepsForward
from cometmq.actors.runtime.family import Family
from cometmq.protocol.commands import Copy, RebuildIndex, Section, SectionResult
from cometmq.protocol.errors import ArgumentIllegal, MessageIllegal, MessageTooLarge, NoPermission
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.kernel.codec import BatchIllegal, Message, batch_keys, batch_without, unique_id
from cometmq.shm.log.commit_log import refusal
from cometmq.shm.reading.recent_keys import RecentKeys

log = logging.getLogger(__name__)

WINDOW_MS_MAX: Final = 7 * 24 * 3_600_000
COMMAND_COUNT_MAX: Final = 4_096  # messages of a command, so that an answer holds all copies
KEY_MAX: Final = 1_024  # bytes
ID_MAX: Final = 64  # characters; a longer id is not told
LATE_MS: Final = 30_000  # what a clock may be wrong by, or a command late


class Keyed:
    """Tells what of a batch is stored already. The log has all that is known for it."""

    def __init__(self, family: Family) -> None:
        self.copies = 0  # that were answered
        self._forward = StepsForward()
        self._enabled = family.settings.message_index_enable
        self._recent = RecentKeys(
            family.store,
            family.control,
            family.index_shape,
            family.settings.mapped_file_size_commit_log_bytes,
        )
        self._address = family.addresses["dispatcher"]
        # Opened when it is needed first: a service's writer may come to its end without `close`.
        self._dispatcher: Channel | None = None

    def check(self, section: Section, count: int) -> None:
        """Raises why it cannot be asked of such a section.

        Args:
            count: of messages of its command that are stored once by their keys.
        """
        if not self._enabled:
            raise NoPermission("messageIndexEnable is off: messages cannot be found by their keys")
        if section.delay_level or section.producer_group:
            raise MessageIllegal("what is delivered later is not stored once by its keys")
        if not 0 < section.window_ms <= WINDOW_MS_MAX:
            raise ArgumentIllegal(f"window_ms = {section.window_ms}: 1 to {WINDOW_MS_MAX}")
        if count > COMMAND_COUNT_MAX:
            raise MessageTooLarge(
                f"{count} messages in one command that are stored once by their keys, at most "
                f"{COMMAND_COUNT_MAX}"
            )

    def stored(
        self, section: Section, batch: memoryview, end: int
    ) -> tuple[dict[int, Message], dict[int, int]]:
        """Which of its messages are there, by their index; and of which other of its messages, that
        is to be stored, one is a copy.

        Args:
            end: of the log, as far as it is laid down.

        Raises MessageIllegal, SystemBusy.
        """
        keys = self._keys(section, batch)
        window_ms = section.window_ms
        if section.repeats_ms >= 0:  # then at least what its first attempt has stored counts
            window_ms = max(window_ms, min(section.repeats_ms, 1 << 50) + LATE_MS)
        window_ms += self._forward.within_ms(window_ms)
        since_ms = int(time.time() * 1000) - window_ms
        try:
            found = self._recent.find(section.topic, keys, end, since_ms)
        finally:
            self._report_damage()
        inside: dict[int, int] = {}
        if len(set(keys)) != len(keys):
            first: dict[bytes, int] = {}
            for index, key in enumerate(keys):
                other = first.setdefault(key, index)
                if other != index and other not in found:
                    inside[index] = other
        self.copies += len(found) + len(inside)
        return found, inside

    def _keys(self, section: Section, batch: memoryview) -> list[bytes]:
        try:
            keys = batch_keys(batch, section.count)
        except BatchIllegal as error:
            raise refusal(error) from None
        longest = max(keys, key=len, default=b"")
        if len(longest) > KEY_MAX:
            raise MessageIllegal(
                f"a key of {len(longest)} bytes, at most {KEY_MAX} where messages are stored once "
                f"by their keys: {longest[:100]!r}..."
            )
        return keys

    def _report_damage(self) -> None:
        """The dispatcher builds damaged index files again."""
        while self._recent.damaged:
            name = self._recent.damaged.pop()
            log.error("index file %s is damaged", name)
            if self._dispatcher is None:
                self._dispatcher = Channel(self._address, "dispatcher")
            self._dispatcher.tell(RebuildIndex(name))

    def let_go_of_deleted(self) -> None:
        self._recent.let_go_of_deleted()

    def close(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.close()
        self._recent.close()


def rest_of(batch: memoryview, left_out: list[int], section: Section) -> tuple[Section, bytes]:
    """What is to be stored of it."""
    rest = msgspec.structs.replace(section, count=section.count - len(left_out))
    return rest, batch_without(batch, left_out)


def answered(
    section: Section,
    batch: memoryview,
    found: dict[int, Message],
    inside: dict[int, int],
    stored: SectionResult,
) -> SectionResult:
    """The places of all its messages, where the rest was stored so."""
    left_out = sorted({*found, *inside})
    copies: list[Copy] = []
    skipped = 0
    places: dict[int, int] = {}  # of those that others are copies of
    firsts = set(inside.values())
    for index in sorted({*left_out, *firsts}):
        if index in firsts:
            places[index] = stored.queue_offset + index - skipped
        if index in found:
            copies.append(_copy_of(index, found[index]))
        elif index in inside:
            first = inside[index]
            copies.append(Copy(index, section.queue_id, places[first], unique_id(batch, first)))
        if index in found or index in inside:
            skipped += 1
    return msgspec.structs.replace(stored, copies=copies)


def _copy_of(index: int, first: Message) -> Copy:
    identity = first.msg_id if len(first.msg_id) <= ID_MAX else ""
    return Copy(index, first.queue_id, first.queue_offset, identity, first.store_timestamp_ms)
