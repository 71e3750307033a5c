"""The broker process: takes the store, starts the supervisor's actor, and waits for its end."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pykka

from cometmq.actors.launch.binding import check_ports
from cometmq.actors.launch.broker import BrokerActor
from cometmq.actors.launch.process import load_roles, prepare, run_child
from cometmq.actors.launch.zygote import Zygote, say_stacks_on_signal
from cometmq.actors.runtime.family import settings_of
from cometmq.actors.runtime.logs import set_up_logging
from cometmq.actors.runtime.roles import doorbell_count
from cometmq.conf import BrokerSettings
from cometmq.protocol.commands import Finish
from cometmq.protocol.errors import CometError, ConfigError, StoreError
from cometmq.protocol.wire.descriptors import need_in_all
from cometmq.shm.derived.queue_check import StoreFiles
from cometmq.shm.os.files import COMMITLOG_DIR, LOCK_FILE, check_store_folder, make_store_folders
from cometmq.shm.os.locks import lock_for_family
from cometmq.shm.state.damage import check_not_damaged
from cometmq.shm.state.permission import group_id, settle_permission, umask_of
from cometmq.shm.tools.start_checks import check_kind, check_store, not_usable

if TYPE_CHECKING:
    from cometmq.actors.launch.hosted import Host

log = logging.getLogger(__name__)

# What a coordinator has open, which has the most, but for doorbells, and the beginnings of what
# clients take: the connections of a producer and a consumer.
DESCRIPTORS: Final = 88
FAMILY_TIMEOUT_S: Final = 10  # for the children of a supervisor that was killed


def run_broker(
    settings: BrokerSettings,
    on_ready: Callable[[BrokerActor], None],
    lifeline: int | None = None,
    host: Host | None = None,
) -> None:
    """Serve until a signal, or the end of the lifeline or of the host, ends it in order.

    To be called in the main thread of a process that has started no other. Raises CometError when
    the broker could not start or had to give up.
    """
    settings = replace(settings, store_path_root_dir=settings.store_path_root_dir.absolute())
    settings.check_for_writing()
    if host is not None and settings.is_in_group:
        raise ConfigError(
            "enableDLegerCommitLog = true: a service that appends by itself has the writer in its "
            "own process, which no change of the master could end: run the replicas as brokers of "
            "their own"
        )
    log_dir = settings.store_path_root_dir / COMMITLOG_DIR
    if settings.commit_log_dir.resolve() != log_dir.resolve():
        raise StoreError(
            f"storePathCommitLog = {settings.commit_log_dir}: the log of this store is {log_dir}. "
            f"To keep it elsewhere, make {log_dir} a link, or mount the disk at {log_dir}"
        )
    raise_descriptor_limit()
    need_in_all(DESCRIPTORS + doorbell_count(settings), "a process of this broker")
    set_up_logging("broker", settings)
    family_lock = _take_store(settings)
    doorbells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(doorbell_count(settings))]
    _load_children(settings)
    zygote = Zygote(prepare, run_child)
    if settings.segment_remark:
        log.warning("%s", settings.segment_remark)
    if settings.replication_remark:
        log.warning("%s", settings.replication_remark)
    token = os.urandom(8).hex()
    try:
        reference = BrokerActor.start(settings, zygote, doorbells, token, on_ready, host)
    except CometError:  # a port was taken since it was looked at
        zygote.close()
        raise
    actor = reference._actor_weakref()
    assert actor is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: _tell_to_finish(reference))
    say_stacks_on_signal()
    signal.signal(signal.SIGUSR1, lambda *_: actor.say_state())
    actor.started.wait()
    if actor.start_error is not None:
        zygote.close()
        raise actor.start_error
    if lifeline is not None:
        threading.Thread(target=_follow, args=(lifeline, reference), daemon=True).start()
    actor.ended.wait()
    for descriptor in (*doorbells, family_lock):
        os.close(descriptor)
    if actor.failure is not None:
        raise actor.failure


def _load_children(settings: BrokerSettings) -> None:
    """Before anything is forked: what is imported here is in memory once for all processes, for as
    long as none of them looks for garbage in it."""
    gc.disable()
    load_roles(settings)
    settings_of(settings.as_keys())  # as the zygote will have them
    logging.getLogger("pykka").isEnabledFor(logging.DEBUG)  # each actor asks; the answer is kept
    # Imports have filled it with names that nobody looks up again. Each that made way for another
    # one later would be a page less to share.
    sys._clear_type_cache()
    gc.freeze()
    gc.enable()


def _take_store(settings: BrokerSettings) -> int:
    """Lock the store for this broker, unless there is a reason to refuse it: then nothing in it is
    changed, nor anything made. The descriptor that holds the lock."""
    store = settings.store_path_root_dir
    segment_bytes = settings.mapped_file_size_commit_log_bytes
    queue_segment_bytes = settings.mapped_file_size_consume_queue_bytes
    held: list[int] = []
    group = group_id(settings.store_group)
    try:
        check_kind(store)
        check_store_folder(store)
        # First of all: where there is a broker, its files and ports are not to be judged.
        if (store / LOCK_FILE).exists():
            held.append(lock_for_family(store, FAMILY_TIMEOUT_S))
        if settings.is_in_group:
            check_not_damaged(store)
        is_copy = settings.is_slave or settings.is_in_group
        check_store(StoreFiles(store, segment_bytes, queue_segment_bytes), is_copy=is_copy)
        check_ports(settings)
        os.umask(umask_of(group))
        make_store_folders(store)
        settle_permission(store, group)
        return held.pop() if held else lock_for_family(store, FAMILY_TIMEOUT_S)
    except OSError as error:
        raise not_usable(store, error) from None
    finally:
        for descriptor in held:
            os.close(descriptor)


def raise_descriptor_limit() -> None:
    """As far as this process and those that it forks are allowed: each connection takes one."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != most:
        with contextlib.suppress(ValueError, OSError):  # no limit, and no process may have that
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _follow(lifeline: int, reference: Any) -> None:
    """The embedding process holds the other end; its end is ours."""
    while os.read(lifeline, 4096):
        pass
    _tell_to_finish(reference)


def _tell_to_finish(reference: pykka.ActorRef[BrokerActor]) -> None:
    with contextlib.suppress(pykka.ActorDeadError):  # it has given up already, and said why
        reference.tell(Finish())
