"""The main thread of a child process: it starts the one actor, and waits for its end."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import traceback
from typing import Any, Final

import pykka
import zmq

from cometmq.actors.launch.zygote import Broken, Ready, write_report
from cometmq.actors.runtime.family import EXIT_UNSETTLED, Family, settings_of
from cometmq.actors.runtime.inbox import LINGER_MS
from cometmq.actors.runtime.logs import set_up_logging
from cometmq.actors.runtime.roles import ROLES, role_of
from cometmq.actors.runtime.service import ServiceActor
from cometmq.protocol.commands import Finish
from cometmq.protocol.errors import CometError
from cometmq.shm.os.libc import name_thread

log = logging.getLogger(__name__)

EXIT_REFUSED: Final = 65  # it told the supervisor why it cannot start
FINISH_TIMEOUT_S: Final = 20


def load_roles(*, in_group: bool = False) -> None:
    """What is imported before the zygote is forked no child has to. Only a group needs what its
    own actors do."""
    for each in ROLES:
        each.load_all(in_group=in_group)


def settle(order: dict[str, Any]) -> None:
    """In the zygote, before a child is forked: what all of them would work out is worked out once,
    and its memory is shared. What is wrong with it the child finds again, and tells."""
    with contextlib.suppress(CometError):
        settings_of(order["settings"])


def run_child(order: dict[str, Any], reports: int, lifeline: int) -> int:
    """Host one actor until it is told to finish; the exit status."""
    role = str(order["role"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        family = Family.from_message(order)
        set_up_logging(role, family.settings)
        name_thread(f"cmq-{role}")
        bind = [(family.addresses[role], True)]
        if family.bind:
            bind.append((family.bind, False))
        actor_class = role_of(role).load(family.settings)
        reference = actor_class.of_family(family, bind)
    except Exception as error:
        return _report_broken(reports, role, error)
    actor = actor_of(reference)
    reporting = _report_when_started(reference, reports, role)
    _wait_for_the_end(reference, lifeline)
    if actor.started.is_set():
        reporting.join()  # a start that failed is told before the process ends of it
    return 0 if actor.settled else EXIT_UNSETTLED


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
    zmq.Context.instance().destroy(linger=LINGER_MS)
