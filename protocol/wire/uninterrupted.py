"""Calls that no signal handler interrupts.

Python runs a signal handler in the main thread, between two instructions of that thread. If the
thread holds a lock, no other code gets it before the handler returns: a handler that calls a method
which needs the lock would deadlock. So, as long as a signal has a handler, the main thread takes no
lock of a client: a helper thread makes its calls, while the main thread waits and holds no lock. A
call by the handler is then like one of another thread. All other threads, and a main thread without
handlers, make their calls themselves.

A handler that raises (as the one of SIGINT does) ends the wait of the main thread, not the call:
`abandon` and `undo` handle that call.
"""

from __future__ import annotations

import functools
import os
import queue
import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Self = TypeVar("Self")
Class = TypeVar("Class", bound=type)

_SIGNALS: Final = tuple(sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))
# Handlers that call no client: they set a flag for their event loop, or cancel one of its tasks.
_OF_EVENT_LOOPS: Final = ("asyncio.", "uvloop.")

_known: list[Any] = []  # the handlers at the last check
_may_call = False  # whether one of them may call a client


def may_be_interrupted() -> bool:
    """Return whether a signal handler may interrupt this thread now, and call a client."""
    global _known, _may_call
    if threading.get_ident() != threading.main_thread().ident:
        return False
    found = [*map(getsignal, _SIGNALS)]
    if found != _known:
        _may_call = any(map(_calls_others, found))
        _known = found
    return _may_call


def _calls_others(handler: object) -> bool:
    if not callable(handler) or handler is signal.default_int_handler:
        return False
    inner = handler.func if isinstance(handler, functools.partial) else handler
    module = getattr(inner, "__module__", None)
    return not (isinstance(module, str) and module.startswith(_OF_EVENT_LOOPS))


class Abandoned:
    """Flag that becomes true when the caller no longer waits for a call."""

    __slots__ = ("_is",)

    def __init__(self) -> None:
        self._is = False

    def __bool__(self) -> bool:
        return self._is

    def set(self) -> None:
        self._is = True


class _Call(Generic[R]):
    """A call that a helper makes for the main thread."""

    def __init__(self, work: Callable[[], R], undo: Callable[[R], object] | None) -> None:
        self._work = work
        self._undo = undo
        self._first: list[str] = []  # first event: "ended" or "abandoned"
        self._ended = threading.Lock()  # held until the call has ended
        self._ended.acquire()
        self._error: BaseException | None = None
        self._results: list[R] = []

    def make(self) -> None:
        """Make the call, in the helper thread."""
        try:
            self._results.append(self._work())
        except BaseException as error:
            self._error = error
        self._first.append("ended")
        if self._first[0] != "ended":
            self._undo_it()
        self._ended.release()

    def wait(self) -> None:
        """Wait for the end of the call. A handler may run meanwhile, and raise."""
        self._ended.acquire()
        self._ended.release()

    def abandon(self) -> None:
        """Note that the caller no longer waits: undo the result."""
        self._first.append("abandoned")
        if self._first[0] == "ended":
            self._undo_it()

    def _undo_it(self) -> None:
        if self._undo is not None and self._results:
            self._undo(self._results[0])

    def result(self) -> R:
        try:
            if self._error is not None:
                raise self._error
            return self._results[0]
        finally:
            self._error = None  # it refers to this frame


class _Helper:
    """Daemon thread that makes calls, one after the other. An idle one stays for later calls."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call[Any]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="cometmq-call", daemon=True).start()

    def make(self, call: _Call[Any]) -> None:
        self._calls.put(call)

    def _serve(self) -> None:
        while True:
            call = self._calls.get()
            call.make()
            del call
            _idle.append(self)


_idle: Final[list[_Helper]] = []
os.register_at_fork(after_in_child=_idle.clear)


def _idle_helper() -> _Helper | None:
    """Return an idle helper, or a new one; None if the interpreter ends and starts no threads."""
    try:
        return _idle.pop()
    except IndexError:
        pass  # each nested call of a handler needs one more helper
    try:
        return _Helper()
    except RuntimeError:
        return None


def call_uninterrupted(
    work: Callable[[], R],
    *,
    abandon: Callable[[], object] | None = None,
    undo: Callable[[R], object] | None = None,
    finish: bool = False,
) -> R:
    """Return the result of `work`, or raise its error; no signal handler interrupts it.

    Args:
        abandon: called in the main thread when a handler raises there: `work` should end soon.
        undo: called with the result of `work` if it returns after that.
        finish: True: wait for the end of `work` even then, before the exception propagates.
    """
    helper = _idle_helper() if may_be_interrupted() else None
    if helper is None:
        return work()
    made = _Call(work, undo)
    helper.make(made)
    try:
        made.wait()
    except BaseException:
        if abandon is not None:
            abandon()
        made.abandon()
        if finish:
            made.wait()
        raise
    return made.result()


def uninterrupted(
    method: Callable[Concatenate[Self, P], R],
) -> Callable[Concatenate[Self, P], R]:
    """Wrap a method so that no signal handler interrupts it."""

    @functools.wraps(method)
    def through(self: Self, /, *arguments: P.args, **keywords: P.kwargs) -> R:
        if not may_be_interrupted():
            return method(self, *arguments, **keywords)
        return call_uninterrupted(functools.partial(method, self, *arguments, **keywords))

    return through


def uninterrupted_class(besides: Iterable[str] = ()) -> Callable[[Class], Class]:
    """Wrap all public methods and properties of a class, inherited ones included, so that no
    signal handler interrupts them.

    Args:
        besides: names of members to leave out, since they handle signals themselves.
    """
    left = frozenset(besides)

    def wrap(kind: Class) -> Class:
        for name in dir(kind):
            is_public = not name.startswith("_") or name in ("__init__", "__enter__", "__exit__")
            if not is_public or name in left:
                continue
            member = _member(kind, name)
            if isinstance(member, FunctionType):
                setattr(kind, name, uninterrupted(member))
            elif isinstance(member, property) and member.fget is not None:
                setattr(kind, name, property(uninterrupted(member.fget), doc=member.__doc__))
        return kind

    return wrap


def _member(kind: type, name: str) -> object:
    for base in kind.__mro__:
        if name in vars(base):
            return None if base is object else vars(base)[name]
    return None
