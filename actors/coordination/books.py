"""The coordinator's books: made as the ledger has them, changed by way of it, shown in config/."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from cometmq.actors.coordination.files import (
    FiltersFile,
    GroupsFile,
    HoldsFile,
    MembersFile,
    OffsetsFile,
    PoppedFile,
    TopicsFile,
)
from cometmq.actors.coordination.ledger import Action, Ledger
from cometmq.actors.coordination.order_file import OrderFile
from cometmq.actors.coordination.snapshots import Snapshots
from cometmq.actors.runtime import meters
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.actors.tables.book import Book
from cometmq.actors.tables.retry_topics import RetryTopics
from cometmq.protocol.commands import Command
from cometmq.protocol.errors import CometError, NotConfirmed
from cometmq.protocol.integers import INT64_MAX
from cometmq.protocol.ledger import ENTRY_BYTES_MAX, KINDS, Change, OffsetSet, Place, PopsForgotten
from cometmq.shm.reading.ledger_log import LedgerLog
from cometmq.shm.reading.resuming import resume

CONFIG_DIR: Final = "config"


class Books:
    """Topics, groups, members, offsets, holds, what is popped, filters; the one way to change them.

    Args:
        store: must exist.
        topics_max, groups_max: no more are created.
    """

    def __init__(self, actor: ServiceActor, store: Path, topics_max: int, groups_max: int) -> None:
        self._actor = actor
        self._store = store
        config_dir = store / CONFIG_DIR
        self._topics_file = TopicsFile(config_dir, topics_max)
        self._groups_file = GroupsFile(config_dir, groups_max)
        self._members_file = MembersFile(config_dir)
        self._offsets_file = OffsetsFile(config_dir)
        self._holds_file = HoldsFile(store)
        self._popped_file = PoppedFile(config_dir)
        self._order_file = OrderFile(config_dir)
        self._filters_file = FiltersFile(config_dir)
        self._files = (
            self._topics_file, self._groups_file, self._members_file, self._offsets_file,
            self._holds_file, self._popped_file, self._order_file, self._filters_file,
        )  # fmt: skip
        self.topics = self._topics_file.book
        self.groups = self._groups_file.book
        self.members = self._members_file.book
        self.offsets = self._offsets_file.book
        self.holds = self._holds_file.book
        self.popped = self._popped_file.book
        self.takes = self._order_file.book
        self.filters = self._filters_file.book
        self.retry_topics = RetryTopics(self.groups, self.topics, self.offsets)
        self.silent_s = self._members_file.silent_s  # since the last coordinator was seen to live
        self._ledger: Ledger
        self.snapshots: Snapshots
        books: tuple[Book, ...] = tuple(each.book for each in self._files)
        self._books_of: dict[type[Change], tuple[Book, ...]] = {
            kind: tuple(book for book in books if kind in book.kinds) for kind in KINDS
        }

    def go_on(
        self,
        ledger_log: LedgerLog,
        *,
        commitlog_endpoint: str,
        entry_bytes_max: int = ENTRY_BYTES_MAX,
        slave_wait_s: float = 0.0,
        is_alone: bool = True,
        ends: Callable[[], Mapping[tuple[str, int], int]] | None,
        template_queues: int | None = None,
        make_ledger: Callable[[Place, int], Ledger] | None = None,
    ) -> None:
        """From here on the books are what they were, and changes are kept.

        Args:
            make_ledger: takes the place of the last entry that every book has, and the queue offset
                behind what the log has, and makes what takes the changes; the default has them
                appended to the log.
            template_queues: of TBW102; None: it is not there. See TopicBook.
            ledger_log: as the log has it; closed here.
            ends: where the queues end, if a power cut can have cut them.
        """
        try:
            parts = [(each.file, each.book.apply) for each in self._files]
            resumed = resume(self._store, parts, ledger_log)
        finally:
            ledger_log.close()
        if make_ledger is not None:
            self._ledger = make_ledger(resumed.common, ledger_log.end)
        else:
            self._ledger = Ledger(
                self._actor,
                commitlog_endpoint,
                last=resumed.last,
                position=ledger_log.end,
                keep=lambda: self.snapshots.write_now(),
                entry_bytes_max=entry_bytes_max,
                slave_wait_s=slave_wait_s,
                is_alone=is_alone,
            )
        self.snapshots = Snapshots(
            self._actor, self._store, self._ledger, self._files, resumed.mark
        )
        # What takes the places of lost messages would never reach groups that were ahead of them.
        if ends is not None:
            # The ends of topics that are not served are unknown: their offsets stay.
            found = {**ends(), **dict.fromkeys(self.topics.queues_not_served(), INT64_MAX)}
            moved = (
                self._offsets_file.put_back(found),
                self._popped_file.put_back(found),
                self._order_file.put_back(found),
            )
            if any(moved):
                self.snapshots.write_now()
        self.topics.begin(template_queues)

    # --- changing ---

    def check_room(self) -> None:
        """Raises SystemBusy while so much waits for the log that no more is taken."""
        self._ledger.check_room()

    @property
    def epoch(self) -> int:
        """Of this life of the coordinator: above those of all that were before it."""
        return self._ledger.epoch

    def change(self, change: Change, *, on_disk: bool = False) -> None:
        """Make a change; `send` has it kept. Raises BadRequest for one that is too large.

        Args:
            on_disk: it is not kept before a power cut cannot take it either.
        """
        self._ledger.add(change, self._books_of[type(change)], on_disk=on_disk)

    def replay(self, changes: Sequence[Change]) -> None:
        """Make changes that lie in the log, of somebody else's ledger."""
        for change in changes:
            for book in self._books_of[type(change)]:
                book.apply(change)
        self.topics.kept(changes)

    def move(self, change: OffsetSet) -> None:
        """Have a group go on elsewhere: what it has popped of that queue counts no more."""
        self.change(change)
        key = (change.group, change.topic, change.queue_id)
        if key in self.popped.queues or self.takes.get(key) is not None:
            self.change(PopsForgotten(*key))

    def forget_pops(self, group: str) -> None:
        """The group takes its messages another way from now on: at its offsets."""
        keys = {key for key in self.popped.queues if key[0] == group}
        for key in sorted(keys | {key for key, _ in self.takes.of_group(group)}):
            self.change(PopsForgotten(*key))

    def has_popped(self, group: str, now_ms: int) -> bool:
        """Whether anybody of the group has messages."""
        return any(
            queue.out for key, queue in self.popped.queues.items() if key[0] == group
        ) or any(take.free_ms > now_ms for _, take in self.takes.of_group(group))

    def check_new_group(self, group: str) -> None:
        """Raise unless a group of that name exists or can be created: TooManyGroups; NameIllegal if
        it would receive another group's retries."""
        self.groups.check_put(group)
        self.retry_topics.check_new(group)

    def then(self, action: Action) -> None:
        """Call it with None once all that was changed until now is kept, or with the error."""
        self._ledger.then(action)

    def tell(self, request: Request, answer: Callable[[], Command]) -> None:
        """Answer once nothing of it can be undone by a kill any more.

        The answer is made now: what the books have later may not be in the log when it goes out.
        """
        as_it_is = answer()

        def when_known(error: CometError | None) -> None:
            if error is None:
                request.reply(as_it_is)
            elif isinstance(error, NotConfirmed):
                request.fail(error)
            else:  # what was refused is taken back, and not told
                self._actor.carry_out(request, answer)

        self._ledger.then(when_known)

    def send(self) -> None:
        """The changes of this round become one entry."""
        self._ledger.send()

    def hear(self) -> None:
        """What has become of an entry."""
        self._ledger.on_readable()

    # --- time, and the end ---

    def note_life(self) -> None:
        """So far this coordinator has lived."""
        self._members_file.note_life()

    def end(self, error: CometError) -> None:
        """Everything is in the files. Raises ServiceNotAvailable."""
        if not self._ledger.is_settled:
            self._ledger.keep_otherwise(error)
        if self.snapshots.is_due:
            self.snapshots.write_now()

    def close(self) -> None:
        if hasattr(self, "_ledger"):  # else the start has failed
            self._ledger.close()
        if hasattr(self, "snapshots"):
            self.snapshots.close()

    def statistics(self) -> meters.Figures:
        return {
            meters.TOPICS: len(self.topics),
            meters.CONFIG_FILE_WRITES: self.snapshots.count,
            meters.LEDGER_ENTRIES: self._ledger.entries,
        }
