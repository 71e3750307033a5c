"""Snapshots: RocketMQ's files in config/, written from the books while these go on changing."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from cometmq.actors.coordination.files import Shown
from cometmq.actors.coordination.ledger import Ledger
from cometmq.actors.runtime.service import ServiceActor
from cometmq.protocol.errors import CometError, ServiceNotAvailable
from cometmq.protocol.ledger import Place
from cometmq.shm.os.durable import SHARED, sync_file
from cometmq.shm.state.fastjson import FILE_BYTES_MAX
from cometmq.shm.state.ledger_mark import (
    LEDGER_FILE,
    Mark,
    Marked,
    Snapshot,
    new_digest,
    write_mark,
)

log = logging.getLogger(__name__)

Action = Callable[[], None]

SLICE_S: Final = 0.00025  # of the actor's time, between two looks at its sockets
CONTENTS_MAX: Final = 8  # that the mark names, where the disk has failed and it is not known which


class _Content:
    """The next content of a file, as the thread writes it."""

    def __init__(self, shown: Shown) -> None:
        self.file = shown.file
        self.pieces = shown.pieces()
        self.changes = shown.book.changes  # that are in it for certain
        self._size = 0
        self._digest = new_digest()
        self._descriptor = -1

    @property
    def name(self) -> str:
        return self.file.path.name

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def open(self) -> None:
        self.file.make_folder(durable=True)
        self.file.new_path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(self.file.new_path, flags, SHARED)

    def write(self, text: str) -> None:
        content = text.encode()
        self._size += len(content)
        if self._size > FILE_BYTES_MAX:
            raise ValueError(f"more than {FILE_BYTES_MAX} bytes, which could not be read again")
        self._digest.update(content)
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        self.close()
        sync_file(self.file.new_path)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def drop(self) -> None:
        self.close()
        with suppress(OSError):
            self.file.new_path.unlink()  # on a full disk, half a file is in the way


class _Making:
    """A snapshot that is being made: new contents of the files whose books have changed.

    Args:
        position: the queue offset of the first entry that may not be in it.
        last: the place of the last entry that is.
    """

    def __init__(
        self, contents: list[_Content], same: list[str], position: int, last: Place
    ) -> None:
        self.contents = contents
        self.same = same  # names of files that have it all already
        self.actions: list[Action] = []  # what waits for it
        self.position, self.last = position, last

    def pieces(self) -> Iterator[tuple[_Content, str]]:
        for content in self.contents:
            for text in content.pieces:
                yield content, text

    def open(self) -> None:
        for content in self.contents:
            content.open()

    def drop(self) -> None:
        for content in self.contents:
            content.drop()

    def snapshot(self, digest: str) -> Snapshot:
        return Snapshot(digest, self.position, self.last)

    @property
    def names(self) -> str:
        return ", ".join(content.name for content in self.contents) or LEDGER_FILE


class Snapshots:
    """Writes the files of the books that have changed, and the mark that says which entries are in
    which file.

    The text is made in slices of the actor's time; a thread writes it, has it on the disk, and puts
    it in place. So a snapshot of a million offsets delays nobody. It does not show one moment: a
    change that is made meanwhile may be in it already, and is made once more by a start, which
    comes to the same. But it takes its place only when all that can be in it is in the log; if
    something was taken back, it is begun anew.

    Args:
        shown: the books, as they were when their files were loaded, and changes made since then.
        mark: as it stands in the store.
    """

    def __init__(
        self,
        actor: ServiceActor,
        store: Path,
        ledger: Ledger,
        shown: Sequence[Shown],
        mark: Mark,
    ) -> None:
        self._actor = actor
        self._store = store
        self._ledger = ledger
        self._shown = shown
        self._mark = mark
        # No later entry is in the files, as the mark has them, and where they look for the next.
        self._marked = ledger.covered, ledger.position
        self._saved = {each.file.path.name: 0 for each in shown}  # changes that a file has
        self._making: _Making | None = None
        self._waiting: list[Action] = []  # for the next one
        self._undone = 0
        self._failure: Exception | None = None  # of the thread, while it makes one
        self._said = ""  # last in the log of why they cannot be written
        self._thread = ThreadPoolExecutor(1, "cometmq snapshots")
        self.count = 0  # of files that were written

    @property
    def is_due(self) -> bool:
        """Whether there is an entry, or a change, that is not in the files."""
        return (
            self._marked != (self._ledger.covered, self._ledger.position)
            or not self._ledger.is_settled
            or any(self._has_changed(each) for each in self._shown)
        )

    def begin(self) -> None:
        """Begin one, unless one is being made or there is nothing new."""
        if self._making is None and self.is_due:
            self._making = self._new(self._ledger.covered)
            self._making.actions, self._waiting = self._waiting, []
            self._undone = self._ledger.undone
            self._failure = None
            self._submit(self._making.open)
            self._actor.call_soon(partial(self._step, self._making, self._making.pieces()))

    def then(self, action: Action) -> None:
        """Call it once what has changed until now is in the files, or once that has failed: then
        the log is still needed for it."""
        if not self.is_due:
            action()
            return
        self._waiting.append(action)
        self.begin()

    def write_now(self) -> None:
        """Make one at once, with every change that was made, also those that are not in the log.

        Raises ServiceNotAvailable: the files are what they were before.
        """
        if self._making is not None:  # what the thread has to do for it comes before
            self._thread.submit(self._making.drop)
            self._waiting = [*self._making.actions, *self._waiting]
            self._making = None
        making = self._new(self._ledger.given)
        making.actions, self._waiting = self._waiting, []

        def write() -> None:
            making.open()
            for content in making.contents:
                content.write("".join(content.pieces))
            self._put_in_place(making)

        try:
            self._thread.submit(write).result()
        except (OSError, ValueError, CometError) as error:
            making.drop()
            raise ServiceNotAvailable(f"{making.names} cannot be written: {error}") from error
        else:
            self._count(making)
        finally:
            for action in making.actions:
                action()

    def close(self) -> None:
        self._thread.shutdown()

    def _has_changed(self, shown: Shown) -> bool:
        return shown.book.changes != self._saved[shown.file.path.name]

    def _new(self, last: Place) -> _Making:
        changed = [each for each in self._shown if self._has_changed(each)]
        same = [each.file.path.name for each in self._shown if each not in changed]
        return _Making([_Content(each) for each in changed], same, self._ledger.position, last)

    # --- in the actor's thread ---

    def _step(self, making: _Making, pieces: Iterator[tuple[_Content, str]]) -> None:
        if self._making is not making:
            return
        texts: dict[_Content, list[str]] = {}
        until = time.perf_counter() + SLICE_S
        for content, text in pieces:
            texts.setdefault(content, []).append(text)
            if time.perf_counter() > until:
                self._write(texts)
                self._actor.call_soon(partial(self._step, making, pieces))
                return
        self._write(texts)
        self._ledger.then(partial(self._is_written, making))

    def _write(self, texts: dict[_Content, list[str]]) -> None:
        for content, some in texts.items():
            self._submit(partial(content.write, "".join(some)))

    def _is_written(self, making: _Making, error: CometError | None) -> None:
        if self._making is not making:
            return
        if error is not None or self._ledger.undone != self._undone:
            self._thread.submit(making.drop)
            self._end(making)  # the next one has what is true now
            return
        self._submit(partial(self._put_in_place, making))
        self._thread.submit(self._actor.call_soon, partial(self._done, making))

    def _done(self, making: _Making) -> None:
        if self._making is not making:
            return
        if self._failure is None:
            self._said = ""
            self._count(making)
        else:
            self._say(making, self._failure)
            self._thread.submit(making.drop)
        self._end(making)

    def _say(self, making: _Making, failure: Exception) -> None:
        """Once, as long as it is the same: it is tried again at once, on a full disk for hours."""
        text = str(failure)
        level = logging.DEBUG if text == self._said else logging.ERROR
        self._said = text
        log.log(level, "%s cannot be written: %s", making.names, text)

    def _end(self, making: _Making) -> None:
        self._making = None
        for action in making.actions:
            action()
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            self.then(action)

    def _count(self, making: _Making) -> None:
        self._marked = making.last, making.position
        for content in making.contents:
            self._saved[content.name] = content.changes
        self.count += len(making.contents)

    def _submit(self, work: Any) -> None:
        """After what was submitted before, and unless that has failed."""
        self._thread.submit(self._guarded, work)

    # --- in the thread ---

    def _guarded(self, work: Any) -> None:
        if self._failure is None:
            try:
                work()
            except (OSError, ValueError, CometError) as error:
                self._failure = error

    def _put_in_place(self, making: _Making) -> None:
        """Killed before a file is replaced, its older content counts, and then the newer one."""
        for content in making.contents:
            content.sync()
        before = self._mark
        mark = before
        for content in making.contents:
            old = before.files.get(content.name, Marked())
            may_be = [*old.contents, making.snapshot(content.digest)][-CONTENTS_MAX:]
            mark = mark.with_file(content.name, Marked(contents=may_be, previous=old.previous))
        if making.contents:
            self._keep(mark)
        for content in making.contents:
            content.file.take_new(durable=True)
            old = before.files.get(content.name, Marked())
            new = [making.snapshot(content.digest)]
            mark = mark.with_file(content.name, Marked(contents=new, previous=old.contents))
        for name in making.same:
            old = mark.files.get(name, Marked())
            if len(old.contents) == 1:
                new = [making.snapshot(old.contents[0].digest)]
                mark = mark.with_file(name, Marked(contents=new, previous=old.previous))
        self._keep(mark)

    def _keep(self, mark: Mark) -> None:
        write_mark(self._store, mark)
        self._mark = mark
