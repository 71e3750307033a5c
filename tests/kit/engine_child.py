"""A process that uses an engine, told by lines of JSON what to do; answers are lines too.

with Child(url) as child:
    child.ask(do="session", group="g", broker=1, ttl=2.0)
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from paths import SEARCH
from patience import patient

from cometmq.conf.engine import NO_ACCESS, EngineAccess

ANSWER_S = patient(90.0)
TIMEOUT_S = patient(20.0)  # of a call


class Child:
    """The process, from outside.

    Args:
        access: how it speaks to the engine.
        boot: what it takes for this boot of the machine, if not the truth.
    """

    def __init__(self, url: str, *, access: EngineAccess = NO_ACCESS, boot: str = "") -> None:
        command = [sys.executable, str(Path(__file__)), url, json.dumps(access), boot]
        self.process = subprocess.Popen(
            command,
            bufsize=0,  # what is read ahead would not wake `select`
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": SEARCH},
        )
        self.hear()

    def say(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_S)
        assert ready, "the child says nothing"
        line = self.process.stdout.readline()
        assert line, "the child has ended"
        return json.loads(line)

    def ask(self, **command: Any) -> Any:
        self.say(**command)
        return self.hear()

    def stop(self) -> None:
        """Until it has stopped: the signal alone is only on its way."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> list[Any]:
        """What it had said, and nobody had heard."""
        self.process.kill()
        assert self.process.stdout is not None
        said = self.process.stdout.read().splitlines()
        self.process.wait()
        return [json.loads(line) for line in said if line.endswith(b"}")]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.communicate()


# --- in the process -------------------------------------------------------------------------------


def answers(url: str, access: EngineAccess, boot: str) -> Iterator[Any]:
    from cometmq.actors.replication.engines import sqlite
    from cometmq.actors.replication.engines.engine import now_s
    from cometmq.actors.replication.engines.opening import open_engine

    if boot:
        sqlite.boot_id = lambda: boot
    engine = open_engine(url, TIMEOUT_S, access)
    session = None
    yield {"ready": True}
    for line in sys.stdin:
        command = json.loads(line)
        do, group = command["do"], command.get("group", "")
        if do == "session":
            session = engine.open_session(group, command["broker"], command["ttl"])
            yield {"ttl": session.ttl_s}
        elif do == "holding":
            assert session is not None
            left_s = session.left_s()
            yield {"holding": session.holding.name, "until": now_s() + left_s, "left": left_s}
        elif do == "lost":
            assert session is not None
            while session.holding.name != "LOST":
                select.select([session], [], [], ANSWER_S)
                session.clear()
            yield {"holding": "LOST"}
        elif do == "get":
            stored = engine.get(group)
            yield {"record": stored.record.decode(), "version": stored.version} if stored else None
        elif do == "count":
            yield from counting(engine, group, command["times"])
        elif do == "hold":
            with engine._records.writing():
                yield {"pid": os.getpid()}
                sys.stdin.readline()
        elif do == "slow":  # it says when it is within its transaction, and waits
            judged = engine._stored

            def waiting(*found: Any, judged: Any = judged) -> Any:
                print(json.dumps({"within": True}), flush=True)
                sys.stdin.readline()
                return judged(*found)

            engine._stored = waiting
            yield {"outcome": type(engine.cas(group, command["expected"], b"slow")).__name__}
        elif do == "forked":
            yield {"said": forked(engine, session, group)}


def counting(engine: Any, group: str, times: int) -> Iterator[Any]:
    """Add one so many times, and say each."""
    from cometmq.actors.replication.engines.engine import Applied, Refused
    from cometmq.actors.replication.engines.errors import EngineUnreachable

    done = 0
    while done < times:
        try:
            before = engine.get(group)
            number = int(before.record) + 1 if before else 1
            outcome = engine.cas(group, before and before.version, b"%d" % number)
        except EngineUnreachable as error:
            yield {"unreachable": str(error)}
            continue
        if isinstance(outcome, Applied):
            done += 1
            yield {"number": number, "version": outcome.version}
        elif not isinstance(outcome, Refused):
            yield {"unknown": number, "why": outcome.why}
            return
    yield {"done": done}


def forked(engine: Any, session: Any, group: str) -> list[str]:
    """What a process that is forked now hears of everything."""
    watch = engine.watch(group)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = []
        for call in (
            lambda: engine.get(group), lambda: engine.cas(group, None, b""),
            lambda: engine.alive(group), lambda: engine.watch(group), engine.close,
            lambda: engine.open_session(group, 9, 2.0), lambda: session.holding, session.close,
            watch.take, watch.close,
        ):  # fmt: skip
            try:
                call()
                said.append("nothing")
            except BaseException as error:
                said.append(f"{type(error).__name__}: {error}")
        os.write(writing, json.dumps(said).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading, "rb") as said_there:
        return list(json.loads(said_there.read()))


if __name__ == "__main__":
    for answer in answers(sys.argv[1], EngineAccess(*json.loads(sys.argv[2])), sys.argv[3]):
        print(json.dumps(answer), flush=True)
