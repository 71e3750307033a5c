"""The main thread of a child process: it starts the one actor, and waits for its end."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import pykka
import zmq

from cometmq.actors.launch.zygote import Broken, Ready, write_report
from cometmq.actors.runtime.family import EXIT_UNSETTLED, Family
from cometmq.actors.runtime.listeners.zeromq import LINGER_MS
from cometmq.actors.runtime.logs import ProcessLog, log_of, set_up_logging
from cometmq.actors.runtime.roles import ROLES, role_of
from cometmq.actors.runtime.service import ServiceActor
from cometmq.conf import BrokerSettings
from cometmq.protocol.commands import Finish
from cometmq.protocol.errors import CometError
from cometmq.shm.live.control import ControlFile
from cometmq.shm.os.libc import name_thread

log = logging.getLogger(__name__)

EXIT_REFUSED: Final = 65  # it told the supervisor why it cannot start
FINISH_TIMEOUT_S: Final = 20


def load_roles(settings: BrokerSettings) -> None:
    """What is imported before the zygote is forked no child has to; and what no child needs is
    memory and time of every start."""
    for each in ROLES:
        each.load_all(settings)


class Setup(NamedTuple):
    """Of a child that can start."""

    family: Family
    actor: type[ServiceActor]
    log: ProcessLog


class Child(NamedTuple):
    """What is worked out before a child is forked; or why it cannot start, for it to tell."""

    role: str
    setup: Setup | Exception


def prepare(messages: Sequence[dict[str, Any]]) -> list[Child]:
    """In the zygote: children with these Family messages. What they have in common is there
    once."""
    children: list[Child] = []
    mapped: ControlFile | None = None
    for message in messages:
        role = str(message["role"])
        try:
            family = Family.from_message(message, mapped)
            mapped = family.control
            actor = role_of(role).load(family.settings)
            children.append(Child(role, Setup(family, actor, log_of(role, family.settings))))
        except Exception as error:
            children.append(Child(role, error))
    return children


def run_child(child: Child, reports: int, lifeline: int) -> int:
    """Host one actor until it is told to finish; the exit status."""
    role, setup = child
    if isinstance(setup, Exception):
        return _report_broken(reports, role, setup)
    family = setup.family
    try:
        set_up_logging(role, family.settings, setup.log)
        name_thread(f"cmq-{role}")
        bind = [(family.addresses[role], True)]
        if family.bind:
            bind.append((family.bind, False))
        actor = actor_of(setup.actor.of_family(family, bind))
    except Exception as error:
        return _report_broken(reports, role, error)
    return _serve(role, actor, reports, lifeline)


def actor_of(reference: pykka.ActorRef[Any]) -> ServiceActor:
    """The actor itself, which its own thread keeps alive."""
    actor: ServiceActor | None = reference._actor_weakref()
    assert actor is not None
    return actor


def _report_broken(reports: int, role: str, error: BaseException) -> int:
    if isinstance(error, CometError | OSError | zmq.ZMQError):
        text = str(error)
    else:
        traceback.print_exception(error)
        text = f"{type(error).__name__}: {error}"
    write_report(reports, Broken(role, os.getpid(), text, getattr(error, "code", 1)))
    return EXIT_REFUSED


def _serve(role: str, actor: ServiceActor, reports: int, lifeline: int) -> int:
    """Until the actor has stopped, or the supervisor's end makes us stop it; the exit status.

    One thread waits for all of it: a further one would be memory of each process's own.
    """
    moved = os.eventfd(0)
    actor.on_milestone = partial(os.eventfd_write, moved, 1)
    poll = select.poll()
    for descriptor in (lifeline, moved):
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
    is_told = False
    while True:
        has_ended = actor.ended.is_set()  # first: it may start and end between two looks
        if actor.started.is_set() and not is_told:
            is_told = True
            if actor.start_error is not None:
                return _report_broken(reports, role, actor.start_error)
            write_report(reports, Ready(role, os.getpid()))
        if has_ended:
            break
        ready = {descriptor for descriptor, _ in poll.poll()}
        if moved in ready:
            os.eventfd_read(moved)
        if lifeline in ready:
            log.warning("the supervisor is gone: finishing")
            if not actor.started.is_set():
                return EXIT_UNSETTLED  # it may wait for processes that end as well
            with contextlib.suppress(pykka.ActorDeadError):
                actor.actor_ref.tell(Finish())
            actor.ended.wait(FINISH_TIMEOUT_S)
            break
    # The last answers leave before the process does.
    zmq.Context.instance().destroy(linger=LINGER_MS)
    return 0 if actor.settled else EXIT_UNSETTLED
