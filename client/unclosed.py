"""What a user leaves open: closed when nobody has it any more, or at the interpreter's end.

Either is told by a ResourceWarning. An object may be collected at any place, in any thread, while
any lock is held. So nothing is closed there: a thread of its own does it.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import queue
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Final

from cometmq.protocol.wire.steady import Steady

log = logging.getLogger(__name__)

Closing = Callable[[], None]

_numbers: Final = itertools.count()
_open: Final[dict[int, tuple[str, Closing]]] = {}
_left: queue.SimpleQueue[Closing] = queue.SimpleQueue()  # whose `put` may interrupt itself
_lock = threading.Lock()
_thread: Steady | None = None


class Unclosed:
    """Watches an object that is to be closed.

    Args:
        owner: what the user holds.
        what: what a warning calls it.
        close: closes what is behind it; must not hold the owner.
    """

    def __init__(self, owner: object, what: str, close: Closing) -> None:
        _start()
        self._number = next(_numbers)
        _open[self._number] = what, close
        self._watch = weakref.finalize(owner, _collected, self._number)
        self._watch.atexit = False

    def is_closed(self) -> None:
        """The user has closed it."""
        self._watch.detach()
        _open.pop(self._number, None)


def _start() -> None:
    global _thread
    with _lock:
        if _thread is None:
            # Behind everything that was registered before, such as the end of a broker in this
            # process: so it runs before that.
            atexit.register(close_left)
            _thread = Steady("cometmq-unclosed", _close_next)
            _thread.start()


def _collected(number: int) -> None:
    """In any thread, at any place."""
    found = _open.pop(number, None)
    if found is not None:
        what, close = found
        _left.put(close)
        _warn(what)


def _warn(what: str) -> None:
    warnings.warn(
        f"{what} was not closed: use it in a `with`, or close it", ResourceWarning, stacklevel=3
    )


def _close_next() -> bool:
    _close(_left.get())
    return True


def _close(close: Closing) -> None:
    try:
        close()
    except Exception as error:
        log.warning("closing what was left open: %s", error)


def close_left() -> None:
    """Close all that is open, as at the interpreter's end."""
    while _open:
        _, (what, close) = _open.popitem()
        _close(close)
        try:
            _warn(what)
        except ResourceWarning as warning:  # where warnings are errors, too, everything is closed
            log.warning("%s", warning)


def _forked() -> None:
    """What the parent has opened is the parent's."""
    global _left, _lock, _thread
    _open.clear()
    _left = queue.SimpleQueue()
    _lock = threading.Lock()
    if _thread is not None:
        atexit.unregister(close_left)
        _thread = None


os.register_at_fork(after_in_child=_forked)
