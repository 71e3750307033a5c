"""The main thread of a child: it starts the one actor, and waits for the reasons to end it."""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, Final

import pykka
import zmq

from cometmq.actors.allocator import AllocatorActor
from cometmq.actors.cleaner import CleanerActor
from cometmq.actors.commitlog import CommitLogActor
from cometmq.actors.coordinator import CoordinatorActor
from cometmq.actors.dispatcher import DispatcherActor
from cometmq.actors.family import Family
from cometmq.actors.flush import FlushActor
from cometmq.actors.logs import set_up_logging
from cometmq.actors.namesrv import NameServerActor
from cometmq.actors.reader import ReaderActor
from cometmq.actors.service import ServiceActor
from cometmq.actors.zygote import Broken, Ready, write_report
from cometmq.protocol.commands import Finish
from cometmq.protocol.errors import CometError
from cometmq.shm.control import Counter, Phase

log = logging.getLogger(__name__)

EXIT_REFUSED: Final = 65  # it told the supervisor why it cannot start
FINISH_TIMEOUT_S: Final = 20


def _coordinator(family: Family, bind: list[tuple[str, bool]]) -> type[ServiceActor] | Any:
    return CoordinatorActor.start(
        family.settings,
        family.store,
        commitlog_endpoint=family.addresses["commitlog"],
        cleaner_endpoint=family.addresses["cleaner"],
        name_server_endpoints=list(family.name_servers),
        queue_ends=_queue_ends(family),
        bind=bind,
    )


def _queue_ends(family: Family) -> Callable[[], dict[tuple[str, int], int]] | None:
    """Where the queues end once they are recovered; None where no power cut can have cut them."""
    control = family.control
    if family.clean or control.read(Counter.PHASE).value >= Phase.SERVING:
        return None

    def ends() -> dict[tuple[str, int], int]:
        family.wait_for(Counter.PHASE, Phase.RECOVERED)
        family.wait_for(Counter.DISPATCHED, control.read(Counter.WROTE).value)
        table = family.queue_table()
        ranges = {key: table.range_of(*key) for key in table.queues()}
        return {key: found.max_queue_offset for key, found in ranges.items() if found is not None}

    return ends


def _name_server(_family: Family, bind: list[tuple[str, bool]]) -> Any:
    return NameServerActor.start(bind=bind)


def _with_family(actor: type[ServiceActor]) -> Callable[[Family, list[tuple[str, bool]]], Any]:
    return lambda family, bind: actor.start(family, bind=bind)


# A role is an actor's name, followed by a number where there are several.
ACTORS: Final[dict[str, Callable[[Family, list[tuple[str, bool]]], Any]]] = {
    "commitlog": _with_family(CommitLogActor),
    "allocator": _with_family(AllocatorActor),
    "dispatcher": _with_family(DispatcherActor),
    "flush": _with_family(FlushActor),
    "reader": _with_family(ReaderActor),
    "cleaner": _with_family(CleanerActor),
    "coordinator": _coordinator,
    "namesrv": _name_server,
}


def run_child(order: dict[str, Any], reports: int, lifeline: int) -> int:
    """Host one actor until it is told to finish; the exit status."""
    role = str(order["role"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        family = Family.from_message(order)
        set_up_logging(role, family.settings)
        name_process(f"cmq-{role}")
        bind = [(family.addresses[role], True)]
        if family.bind:
            bind.append((family.bind, False))
        reference = ACTORS[role.partition("-")[0]](family, bind)
    except Exception as error:
        return _report_broken(reports, role, error)
    actor = actor_of(reference)
    reporting = _report_when_started(reference, reports, role)
    _wait_for_the_end(reference, lifeline)
    if actor.started.is_set():
        reporting.join()  # a start that failed is told before the process ends of it
    return 0


def name_process(name: str) -> None:
    """What `ps` and `top` show: 15 characters."""
    ctypes.CDLL(None).prctl(15, name.encode()[:15], 0, 0, 0)  # PR_SET_NAME


def actor_of(reference: pykka.ActorRef[Any]) -> ServiceActor:
    """The actor itself, which its own thread keeps alive."""
    actor = reference._actor_weakref()
    assert isinstance(actor, ServiceActor)
    return actor


def _report_when_started(
    reference: pykka.ActorRef[Any], reports: int, role: str
) -> threading.Thread:
    """A thread, since the actor may take its time in `on_start` and must be stoppable meanwhile."""

    def watch() -> None:
        actor = actor_of(reference)
        actor.started.wait()
        if actor.start_error is not None:
            status = _report_broken(reports, role, actor.start_error)
            sys.stderr.flush()
            os._exit(status)
        address = actor.addresses[1] if len(actor.addresses) > 1 else ""
        write_report(reports, Ready(role, os.getpid(), address))

    thread = threading.Thread(target=watch, name="start", daemon=True)
    thread.start()
    return thread


def _report_broken(reports: int, role: str, error: BaseException) -> int:
    if isinstance(error, CometError | OSError | zmq.ZMQError):
        text = str(error)
    else:
        traceback.print_exception(error)
        text = f"{type(error).__name__}: {error}"
    write_report(reports, Broken(role, os.getpid(), text, getattr(error, "code", 1)))
    return EXIT_REFUSED


def _wait_for_the_end(reference: pykka.ActorRef[Any], lifeline: int) -> None:
    """Until the actor has stopped, or the supervisor's end makes us stop it."""
    stopped_read, stopped_write = os.pipe()

    actor = actor_of(reference)

    def watch() -> None:
        actor.ended.wait()
        os.write(stopped_write, b"s")

    threading.Thread(target=watch, name="stopped", daemon=True).start()
    poll = select.poll()
    for descriptor in (lifeline, stopped_read):
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
    ready = {descriptor for descriptor, _ in poll.poll()}
    if stopped_read not in ready:
        log.warning("the supervisor is gone: finishing")
        if not actor.started.is_set():
            return  # it may wait for processes that end as well; nothing has begun yet
        reference.tell(Finish())
        actor.ended.wait(FINISH_TIMEOUT_S)
    # The last answers leave before the process does.
    zmq.Context.instance().destroy(linger=200)
