"""What tasks wait for in vain, and how answers come home to an event loop."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from cometmq.client.sending import in_loop
from cometmq.client.sending.in_loop import call_home
from cometmq.client.sending.overdue import Overdue


class Waited:
    def __init__(self, in_s: float) -> None:
        self.limit = time.monotonic() + in_s


class Timers:
    """An event loop whose time comes when the test says so."""

    def __init__(self) -> None:
        self.set: list[tuple[float, Any, tuple[object, ...]]] = []
        self.cancelled = 0

    def call_later(self, delay_s: float, action: Any, *arguments: object) -> Timers:
        self.set.append((delay_s, action, arguments))
        return self

    def cancel(self) -> None:
        self.cancelled += 1

    def come(self) -> None:
        _, action, arguments = self.set[-1]
        action(*arguments)


def test_one_timer_watches_over_all() -> None:
    late: list[Waited] = []
    loop: Any = Timers()
    overdue: Overdue[Waited] = Overdue(late.append)
    first, second, third = Waited(10), Waited(20), Waited(-1)
    for each in (first, second):
        overdue.add(loop, each)
    assert len(loop.set) == 1
    overdue.discard(first)
    loop.come()  # in vain: the second one has more time
    assert (late, len(loop.set), loop.set[-1][0] > 10) == ([], 2, True)
    overdue.add(loop, third)  # it is due before the timer is
    assert (len(loop.set), loop.set[-1][0], loop.cancelled) == (3, 0, 1)
    loop.come()
    assert late == [third]
    overdue.discard(third)
    second.limit = 0
    loop.come()
    assert late == [third, second]
    assert len(loop.set) == 4  # nothing is left to be watched over
    overdue.add(loop, Waited(5))
    assert len(loop.set) == 5


def test_a_limit_may_be_put_off() -> None:
    late: list[Waited] = []
    loop: Any = Timers()
    overdue: Overdue[Waited] = Overdue(late.append)
    one = Waited(0)
    overdue.add(loop, one)
    one.limit += 60
    loop.come()
    assert not late
    one.limit -= 60
    loop.come()
    assert late == [one]


def test_what_waited_in_a_loop_that_is_over_is_forgotten() -> None:
    late: list[Waited] = []
    old, new = Timers(), Timers()
    overdue: Overdue[Waited] = Overdue(late.append)
    overdue.add(old, Waited(-1))  # type: ignore[arg-type]
    overdue.add(new, one := Waited(-1))  # type: ignore[arg-type]
    old.come()
    assert not late
    new.come()
    assert late == [one]


@pytest.mark.parametrize("error", [ValueError, None])
def test_what_a_line_brings_comes_home_in_that_turn(
    error: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first at once, the others behind it, whatever becomes of the first."""
    called: list[str] = []
    failed: list[object] = []

    def fail_or_not(name: str) -> None:
        called.append(name)
        if error is not None:
            raise error

    async def read() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failed.append(context.get("exception")))

        def read_line(*_: object) -> bool:
            call_home(loop, fail_or_not, "first")
            call_home(loop, called.append, "second")
            assert not called
            return True

        monkeypatch.setattr(in_loop, "read_line", read_line)
        over = asyncio.Event()

        def turn() -> None:
            loop.call_soon(called.append, "next turn")
            in_loop._read(loop, None, None)  # type: ignore[arg-type]

        loop.call_soon(turn)
        loop.call_soon(lambda: loop.call_soon(over.set))
        await over.wait()
        call_home(loop, called.append, "later")
        assert called == ["first", "next turn", "second"]
        await asyncio.sleep(0)
        assert called[-1] == "later"

    asyncio.run(read())
    assert [type(each) for each in failed] == ([] if error is None else [error])
