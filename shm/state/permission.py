"""Who may read a store: its owner alone, or the members of one group as well (`storeGroup`).

A store is closed to others by the mode of its folder, and each file by its own: 0700 and 0600, or
2750 and 0640, where everything that is made in the folder belongs to the group. The processes of a
broker have a umask that says so; who makes files of a store elsewhere names the mode. `lock` and
what is staged are the owner's in any case: who may open `lock` could lock it, and keep a broker
from going on.
"""

from __future__ import annotations

import grp
import logging
import os
import stat
from pathlib import Path
from typing import Final

from cometmq.protocol.errors import StoreError
from cometmq.shm.os.ballast import BALLAST_FILE
from cometmq.shm.os.files import LOCK_FILE
from cometmq.shm.state.staging import STAGES_DIR

log = logging.getLogger(__name__)

PRIVATE_UMASK: Final = 0o077
GROUP_UMASK: Final = 0o027
GROUP_FOLDER: Final = stat.S_ISGID | 0o750


def group_id(name: str) -> int | None:
    """The group that `storeGroup` names; None for no group. Raises StoreError where there is none
    of that name, or where this user may not give files to it."""
    if not name:
        return None
    try:
        found = int(name) if name.isdigit() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise StoreError(f"storeGroup = {name}: this machine has no such group") from None
    if os.geteuid() != 0 and found not in (os.getegid(), *os.getgroups()):
        raise StoreError(f"storeGroup = {name}: user {os.geteuid()} is not a member of it")
    return found


def umask_of(group: int | None) -> int:
    return PRIVATE_UMASK if group is None else GROUP_UMASK


def umask_like(store: Path) -> int:
    """For what a tool makes in a store: read by whom the store's folder lets in."""
    status = store.stat()
    return GROUP_UMASK if status.st_mode & GROUP_FOLDER == GROUP_FOLDER else PRIVATE_UMASK


def settle_permission(store: Path, group: int | None) -> None:
    """Close `lock`, give a store to the group that it is not given to yet, and warn of what is
    wider than that."""
    lock = store / LOCK_FILE
    if lock.exists() and lock.stat().st_mode & 0o077:
        lock.chmod(0o600)
    if group is not None and not _is_given(store, group):
        _give(store, group)
    mode = stat.S_IMODE(store.stat().st_mode)
    if mode & umask_of(group):
        log.warning(
            "%s has mode %04o: more users of this machine than its owner%s may look into it; "
            "chmod %04o closes it, storeGroup opens it to one group",
            store, mode, "" if group is None else " and its group",
            0o700 if group is None else GROUP_FOLDER,
        )  # fmt: skip


def _is_given(store: Path, group: int) -> bool:
    status = store.stat()
    return status.st_gid == group and status.st_mode & GROUP_FOLDER == GROUP_FOLDER


def _give(store: Path, group: int) -> None:
    """Everything that is there; the store's folder last, so that a killed start does it again."""
    for folder, _, files in os.walk(store, topdown=False):
        if STAGES_DIR in Path(folder).relative_to(store).parts:
            continue
        for name in files:
            path = Path(folder, name)
            if path.is_symlink() or name in (LOCK_FILE, BALLAST_FILE):
                continue
            os.chown(path, -1, group)
            path.chmod(stat.S_IMODE(path.stat().st_mode) & 0o700 | 0o040)
        os.chown(folder, -1, group)
        os.chmod(folder, GROUP_FOLDER)
