"""The process that embedded brokers of the profile "test" are forked from.

A test suite opens a broker for each of many tests. This process, a child of the service's, has
imported what a broker needs before the first is asked for; a broker is then there in a tenth of a
second. It has one thread and no sockets but the one to the service; it ends with the service, or
when that one closes its end. Its brokers do not depend on it: each has a lifeline of its own.

    service (front/nursery.py)                     nursery
      order: 4 bytes of length, MessagePack,  ->     fork: the broker's main process
      with its descriptors
                                              <-     its pid, 4 bytes
      the pipe `status` of that order         <-     its exit status as text, once it has ended
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Final

import msgspec

LENGTH: Final = struct.Struct("<I")
#: The pipe for the status; standard input, output, error; the log's socket, if the order has `log`.
ORDER_FDS: Final = 4
_FDS_ROOM: Final = 16


class NurseryOrder(msgspec.Struct):
    """A broker in that folder, with that environment, as if it was started there.

    With `log` it has its log sent to the service, else on its standard error.
    """

    log: bool
    folder: bytes
    environment: dict[bytes, bytes]
    umask: int


def main(run: Callable[[], None] | None = None) -> None:
    """Standard input is the socket of the service. `run`: what a broker's main process does, if not
    embedded.main."""
    gc.disable()  # all that is imported stays: looking for garbage in it finds nothing
    from cometmq.actors.launch import broker, embedded, supervisor  # noqa: F401
    from cometmq.actors.launch.process import load_roles
    from cometmq.conf import BrokerSettings

    load_roles(BrokerSettings())
    gc.enable()
    gc.freeze()
    # As descriptor 0 it would be closed when a broker gets its own.
    service = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
    wake_read, wake_write = os.pipe()
    for descriptor in (wake_read, wake_write):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(service, select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    brokers: dict[int, int] = {}  # pid -> the pipe for its status
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if wake_read in ready:
            os.read(wake_read, 4096)
            _reap(brokers)
        if service.fileno() in ready:
            received = _receive(service)
            if received is None:
                os._exit(0)
            order, descriptors = received
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for descriptor in (wake_read, wake_write, *brokers.values(), descriptors[0]):
                    os.close(descriptor)
                service.close()
                _become(order, descriptors[1:], run or embedded.main)
            brokers[pid] = descriptors[0]
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            with contextlib.suppress(OSError):  # the service has ended, which is seen next
                service.sendall(LENGTH.pack(pid))


def _receive(service: socket.socket) -> tuple[NurseryOrder, list[int]] | None:
    """The next order with its descriptors; None if the service has closed its end."""
    descriptors: list[int] = []
    held = b""
    while len(held) < LENGTH.size or len(held) < LENGTH.size + LENGTH.unpack_from(held)[0]:
        try:
            more, rights, _, _ = socket.recv_fds(service, 65_536, _FDS_ROOM)
        except ConnectionResetError:
            return None
        if not more:
            return None
        descriptors += rights
        held += more
    order = msgspec.msgpack.decode(held[LENGTH.size :], type=NurseryOrder)
    assert len(descriptors) == ORDER_FDS + order.log
    return order, descriptors


def _reap(brokers: dict[int, int]) -> None:
    for pid in list(brokers):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            told = brokers.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(told)


def _become(order: NurseryOrder, descriptors: list[int], run: Callable[[], None]) -> None:
    """The broker's main process, from here to its end."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()  # Ctrl-C is for the service, which then closes the broker
        for number, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.umask(order.umask)
        os.environb.clear()
        os.environb.update(order.environment)
        os.chdir(order.folder)
        sys.argv = ["cometmq.actors.launch.embedded"]
        sys.argv += [f"log={log}" for log in descriptors[3:]]
        run()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
