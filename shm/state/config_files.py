"""RocketMQ's config/*.json on the disk: each is replaced so that a kill at any instant leaves it
whole, with a previous content beside it."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Final, Generic

from cometmq.shm.os.durable import beside, put_in_place, sync_file, sync_folder, write_beside
from cometmq.shm.state.fastjson import (
    FILE_BYTES_MAX,
    ConfigFileDamaged,
    StructT,
    decode,
    is_json,
)
from cometmq.shm.state.json_text import dumps

logger = logging.getLogger(__name__)

_QUICK_BYTES_MIN: Final = 64 << 10
# What goes with a file, in the words of an error.
WITHOUT: Final = {
    "topics.json": "topics are made anew as they are used, with defaultTopicQueueNums queues (with "
    "more by `cometmq topic create`); their messages and offsets stay",
    "subscriptionGroup.json": "groups are made anew as they are used, with RocketMQ's defaults",
    "consumerOffset.json": "every group begins where a new one does (elsewhere by `cometmq group "
    "reset`)",
    "holds.json": "nothing is held any more: the log is deleted as it expires",
}


class ConfigFile(Generic[StructT]):
    """One file of config/, with a previous content beside it in `<file>.bak`.

    Has one writer at a time, who keeps the object; anyone may `load`. Whatever instant a process
    is killed at, the next `load` finds the content before or after the `store`, whole. Only what
    is on the disk becomes the `.bak`: a loss of power may leave a file of zeros of what was not.
    """

    def __init__(self, path: Path, kind: type[StructT]) -> None:
        self.path = path
        self.bak_path = path.with_name(path.name + ".bak")
        self._kind = kind
        self._main_is_whole: bool | None = None  # None: nobody has looked
        self._main_is_synced: bool | None = None  # None: nobody knows what was done before us
        self.loaded_from: Path | None = None  # which of the two; None: neither holds anything

    def load(self) -> StructT | None:
        """The file's content, else that of its `.bak`, None if neither holds anything.

        Raises ConfigFileDamaged if one is damaged and the other does not help: to go on without
        would forget what it held.
        """
        main = self._read(self.path)
        self._main_is_whole = isinstance(main, self._kind)
        if isinstance(main, self._kind):
            self.loaded_from = self.path
            return main
        previous = self._read(self.bak_path)
        fault = main if isinstance(main, ConfigFileDamaged) else f"{self.path}: missing or empty"
        if isinstance(previous, self._kind):
            logger.warning("%s; its previous content is used, from %s", fault, self.bak_path)
            self.loaded_from = self.bak_path
            return previous
        for damaged in (main, previous):
            if isinstance(damaged, ConfigFileDamaged):
                raise damaged.with_way_out(
                    self._way_out(bak_is_damaged=isinstance(previous, ConfigFileDamaged))
                )
        return None

    def _way_out(self, *, bak_is_damaged: bool) -> str:
        """What to do where neither of the two holds."""
        bak, loss = self.bak_path.name, WITHOUT.get(self.path.name)
        return (
            f"{bak} {'is damaged too' if bak_is_damaged else 'is missing or empty'}, so that "
            f"nothing can be used in its place: put a whole {self.path.name} there, of a backup"
            + (f"; or move both away, and {loss}" if loss else "")
        )

    def check(self) -> None:
        """Raise ConfigFileDamaged where `load` would. A large file is only looked at as JSON, which
        is a hundred times faster."""
        try:
            with self.path.open("rb") as file:
                content = file.read(FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            content = b""
        if not _QUICK_BYTES_MIN <= len(content) <= FILE_BYTES_MAX or not is_json(content):
            self.load()

    def _read(self, path: Path) -> StructT | ConfigFileDamaged | None:
        """None for a missing or empty file, which mean the same, as they do to RocketMQ."""
        try:
            with path.open("rb") as file:
                content = file.read(FILE_BYTES_MAX + 1)
            return decode(content, self._kind, name=str(path)) if content else None
        except FileNotFoundError:
            return None
        except ConfigFileDamaged as damaged:
            return damaged

    def store(self, value: StructT, *, durable: bool) -> None:
        """Replaces the content; what stood there before becomes the `.bak`, if it was durable.

        Survives a kill of the process at any line. Survives the loss of power if `durable`, which
        waits for the disk; otherwise the last durable content may return. The first `store` is
        durable in any case, so that there is one. Raises OSError (the old content stays, or the
        new one if it was only the folder that could not be synced), ValueError for what could not
        be read again.
        """
        self.store_text(dumps(value), durable=durable)

    def store_text(self, text: str, *, durable: bool) -> None:
        """As `store`, of what is written already."""
        content = text.encode()
        if len(content) > FILE_BYTES_MAX:
            reason = f"{self.path}: {len(content)} bytes, at most {FILE_BYTES_MAX} can be read"
            raise ValueError(reason)
        durable = durable or self._main_is_synced is None
        self.make_folder(durable=durable)
        write_beside(self.path, content, durable=durable)
        self.take_new(durable=durable)

    @property
    def new_path(self) -> Path:
        """Where the next content is written, before `take_new`."""
        return beside(self.path)

    def take_new(self, *, durable: bool) -> None:
        """What stands in `new_path` (synced, if `durable`) becomes the content."""
        if self._main_is_whole is None:
            self._main_is_whole = isinstance(self._read(self.path), self._kind)
        # A damaged file must not push out the whole one that stands in .bak.
        if self._main_is_whole and (durable or self._main_is_synced):
            self._keep_previous(durable)
        put_in_place(self.new_path, self.path, durable=False)
        self._main_is_whole, self._main_is_synced = True, durable
        if durable:
            sync_folder(self.path.parent)

    def make_folder(self, *, durable: bool) -> None:
        """The folder of a store that never had one."""
        folder = self.path.parent
        if not folder.is_dir():
            os.mkdir(folder)
            if durable:
                sync_folder(folder.parent)

    def _keep_previous(self, durable: bool) -> None:
        """Makes `.bak` a second name of the present content, in one step; both names stay whole."""
        if not self._main_is_synced:
            with contextlib.suppress(FileNotFoundError):
                sync_file(self.path)
        link_path = beside(self.bak_path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(link_path)  # of a writer that was killed
        try:
            os.link(self.path, link_path)
        except FileNotFoundError:
            return  # somebody has removed the file: .bak is all there is
        except OSError:  # no hard links here, or not to another user's file
            write_beside(self.bak_path, self.path.read_bytes(), durable=durable)
        put_in_place(link_path, self.bak_path, durable=False)
        # Renaming between two names of one file, as after a kill at the line above, does nothing.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(link_path)
