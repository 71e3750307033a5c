"""The broker, with what takes its time when a test says so; see test_orderly_end.py.

    python -m slow_launcher      with SLOW = a folder in the environment

While `restart` is in that folder no process is ordered. `settle-ROLE` has that role's end begin
with so many rounds of work with pauses between, each of 0.2 s, and `idle-ROLE` with pauses alone.
`recover` has the dispatcher pause before it restores the ends of the queues.
`exit-ROLE` is the same between the answer of its end and the end of its process. `unready` has the
supervisor hear nothing of the registration; `refuse-ROLE` has it not settle.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cometmq.actors.launch import embedded, orderly_end, supervisor
from cometmq.actors.launch.broker import BrokerActor
from cometmq.actors.launch.process import Child
from cometmq.actors.launch.zygote import Messages, Zygote
from cometmq.actors.runtime.roles import ROLES
from cometmq.conf import BrokerSettings
from cometmq.protocol.errors import DiskFull
from cometmq.shm.derived.queue_builder import QueueBuilder

SLOW = "COMETMQ_TEST_SLOW"
ROUND_S = 0.2


def install(folder: Path) -> None:
    start = Zygote.start

    def start_later(self: Zygote, messages: Messages) -> None:
        def wait() -> None:
            while (folder / "restart").exists():
                time.sleep(0.01)
            start(self, messages)

        threading.Thread(target=wait, daemon=True).start()

    Zygote.start = start_later
    for role in ROLES:
        actor = role.load(BrokerSettings())
        actor.settle = slowly(folder, role.name, actor.settle)
    run_child = supervisor.run_child

    def exit_slowly(child: Child, reports: int, lifeline: int) -> int:
        status = run_child(child, reports, lifeline)
        pause(folder / f"exit-{child.role}", 0.03)
        return status

    supervisor.run_child = exit_slowly
    finish_recovery = QueueBuilder.finish_recovery

    def recover_slowly(self: QueueBuilder) -> None:
        pause(folder / "recover", 0.0)
        finish_recovery(self)

    QueueBuilder.finish_recovery = recover_slowly
    orderly_end.SILENCE_S = 2
    orderly_end.NOTICE_S = 1
    if (folder / "unready").exists():
        BrokerActor._registered = lambda self: None


def pause(path: Path, busy_s: float) -> None:
    """As many rounds as stand there, with so much work in each."""
    for _ in range(int(path.read_text()) if path.exists() else 0):
        until = time.process_time() + busy_s
        while time.process_time() < until:
            pass
        time.sleep(ROUND_S)


def slowly(folder: Path, role: str, settle: Callable[[Any], None]) -> Callable[[Any], None]:
    def settle_slowly(self: Any) -> None:
        for name, busy_s in (("settle", 0.03), ("idle", 0.0)):
            pause(folder / f"{name}-{role}", busy_s)
        if (folder / f"refuse-{role}").exists():
            raise DiskFull("as the test wants it")
        settle(self)

    return settle_slowly


def main() -> None:
    install(Path(os.environ[SLOW]))
    embedded.main()


if __name__ == "__main__":
    main()
