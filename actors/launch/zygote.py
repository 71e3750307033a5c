"""The process that all children are forked from.

It has everything imported, one thread and no sockets, so a child is there within milliseconds, in a
known state, and shares the memory of the interpreter with the others. It is forked from the
supervisor before that one starts its first thread, takes orders from a pipe, and reports on another
which children it has started and which have ended. When the supervisor dies the order pipe ends,
and so does the zygote; the children see the same end of their own pipe and finish by themselves.

A page of memory is shared until somebody writes to it, and Python writes to whatever it looks at
(reference counts). So all that can be worked out before a fork is (`prepare`), and the children of
one order are forked in a row: what the zygote does in between would be each child's own memory.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import select
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

COLLECT_AFTER: Final = 20_000  # objects that may be in a cycle
_LENGTH: Final = struct.Struct("<I")


class Started(msgspec.Struct, tag=True):
    """A child runs."""

    role: str
    pid: int


class Ready(msgspec.Struct, tag=True):
    """A child serves."""

    role: str
    pid: int


class Broken(msgspec.Struct, tag=True):
    """A child could not start, and why, in words."""

    role: str
    pid: int
    text: str
    code: int


class Ended(msgspec.Struct, tag=True):
    """A child has ended. `status` is negative for a signal (subprocess's way)."""

    pid: int
    status: int


class Closing(msgspec.Struct, tag=True):
    """A service that has the writer wants its broker to end in order. Reports go on coming."""


Report = Started | Ready | Broken | Ended | Closing


class Prepared(Protocol):
    """A child that is about to be forked."""

    @property
    def role(self) -> str: ...


Messages = Sequence[dict[str, Any]]
Prepare = Callable[[Messages], Sequence[Prepared]]
RunChild = Callable[[Any, int, int], int]
_decode_report: Final = msgspec.msgpack.Decoder(Report).decode


def write_report(descriptor: int, report: Report) -> None:
    """One write below PIPE_BUF, so that reports of several processes do not mix."""
    body = msgspec.msgpack.encode(report)
    if isinstance(report, Broken) and len(body) > 3500:
        body = msgspec.msgpack.encode(
            Broken(report.role, report.pid, report.text[:800], report.code)
        )
    try:  # noqa: SIM105  `suppress` would be some pages more of each fork's own
        os.write(descriptor, _LENGTH.pack(len(body)) + body)
    except BrokenPipeError:
        pass  # nobody reads it: the broker ends, as its children will see


class ReportReader:
    """Takes reports from the pipe's reading end, which does not block."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._held = b""
        self.ended = False  # nobody will report any more
        os.set_blocking(descriptor, False)

    def read(self) -> list[Report]:
        while True:
            try:
                more = os.read(self._descriptor, 65_536)
            except BlockingIOError:
                break
            except ConnectionResetError:
                more = b""
            if not more:
                self.ended = True
                break
            self._held += more
        found = []
        while len(self._held) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._held)[0]
            if len(self._held) < end:
                break
            found.append(_decode_report(self._held[_LENGTH.size : end]))
            self._held = self._held[end:]
        return found


class Zygote:
    """The supervisor's end. Make it while the process has one thread.

    Args:
        prepare: called in the zygote with the Family messages of an order, before its children are
            forked: what it returns is theirs, in that order. It raises nothing.
        run_child: what a child does with that, the pipe for reports, and its lifeline; it returns
            the exit status.
    """

    def __init__(self, prepare: Prepare, run_child: RunChild) -> None:
        self.report_fd, reports = os.pipe()
        self._lifeline, self._alive = os.pipe()  # ends for everybody when the supervisor dies
        orders, self._orders = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for descriptor in (self.report_fd, self._alive, self._orders):
                    os.close(descriptor)
                _run(prepare, run_child, orders, reports, self._lifeline)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(70)  # what is above in the stack is the supervisor's
        self.end_fd = os.pidfd_open(self.pid)  # can be read once the zygote has ended
        os.close(orders)
        os.close(reports)
        os.close(self._lifeline)

    def start(self, messages: Messages) -> None:
        """Order children with those Family messages. Of each come back Started, and Ready or
        Broken, in either order."""
        body = msgspec.msgpack.encode(messages)
        left = memoryview(_LENGTH.pack(len(body)) + body)
        while left:
            left = left[os.write(self._orders, left) :]

    def close(self) -> None:
        """End the zygote, and whatever child still waits on its lifeline."""
        os.close(self._orders)
        os.close(self._alive)
        os.waitpid(self.pid, 0)
        os.close(self.end_fd)


def say_stacks_on_signal() -> None:
    """SIGUSR1: where every thread of this process is, to standard error. SIGUSR2: nothing. Both end
    a process by default. Forks inherit it."""
    with contextlib.suppress(io.UnsupportedOperation, AttributeError, RuntimeError):  # no stderr
        faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _run(
    prepare: Prepare,
    run_child: RunChild,
    orders: int,
    reports: int,
    lifeline: int,
) -> None:
    """The zygote's whole life. Never returns."""
    # A signal to the whole group (Ctrl-C, a service manager) is the supervisor's to act on: it ends
    # its children in order, and they inherit this. Its own end is the end of the lifeline.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    say_stacks_on_signal()
    # What a command makes goes by itself when it is answered. Thousands of them are under way at a
    # time, in which the usual 700 would look for cycles all the time.
    gc.set_threshold(COLLECT_AFTER)
    poll = select.poll()
    poll.register(orders, select.POLLIN)
    ends: dict[int, int] = {}  # what can be read once a child has ended -> its pid
    while True:
        ready = [descriptor for descriptor, _ in poll.poll()]
        for descriptor in ready:
            if descriptor in ends:
                poll.unregister(descriptor)
                os.close(descriptor)
                _reap(ends.pop(descriptor), reports)
        if orders in ready:
            messages = _read_order(orders)
            if messages is None:
                os._exit(0)
            children = prepare(messages)
            gc.freeze()
            pids = []
            for child in children:
                pid = os.fork()
                if pid == 0:
                    for descriptor in (orders, *ends):
                        os.close(descriptor)
                    _become_child(run_child, child, reports, lifeline)
                pids.append(pid)
            for child, pid in zip(children, pids, strict=True):
                write_report(reports, Started(child.role, pid))
                end = os.pidfd_open(pid)
                ends[end] = pid
                poll.register(end, select.POLLIN)


def _read_order(orders: int) -> Messages | None:
    head = os.read(orders, _LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (left,) = _LENGTH.unpack(head)
    body = b""
    while len(body) < left:
        more = os.read(orders, left - len(body))
        if not more:
            return None
        body += more
    found: Messages = msgspec.msgpack.decode(body)
    return found


def _reap(pid: int, reports: int) -> None:
    _, status = os.waitpid(pid, 0)
    write_report(reports, Ended(pid, os.waitstatus_to_exitcode(status)))


def _become_child(run_child: RunChild, child: Prepared, reports: int, lifeline: int) -> None:
    status = 70
    try:
        status = run_child(child, reports, lifeline)
    finally:
        sys.stderr.flush()
        os._exit(status)
