"""Choice of calls that a helper thread makes; see protocol/wire/uninterrupted.py (Fault 13)."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading

import pytest

from cometmq.protocol.wire.uninterrupted import call_uninterrupted, may_be_interrupted

PLAIN = """
from cometmq.protocol.wire.uninterrupted import may_be_interrupted
print(may_be_interrupted())
"""


def test_program_without_handlers_needs_no_helper() -> None:
    done = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_helper_makes_calls_while_there_is_a_handler() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        assert may_be_interrupted()
        assert call_uninterrupted(threading.current_thread) is not threading.main_thread()
        with pytest.raises(KeyError, match="raised"):
            call_uninterrupted(lambda: {}["raised"])
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_handlers_of_event_loops_call_nobody() -> None:
    async def look() -> bool:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
        return may_be_interrupted()

    before = may_be_interrupted()
    assert asyncio.run(look()) is before


def test_other_threads_need_no_helper() -> None:
    found: list[bool] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        thread = threading.Thread(target=lambda: found.append(may_be_interrupted()))
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [False]
