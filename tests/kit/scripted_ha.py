"""A replica of a group whose `ha` process does what a test says. No tests here.

    python -m scripted_ha       the broker, with that process

    with Replica(tmp_path / "store") as replica:
        replica.run(1)
        sent = replica.send("t", 0, [b"one"])

It stands for the core of replication and for the other replicas: it confirms what it is told to,
and says what the broker may do for clients. It speaks to the test by a socket of its own, in lines
of JSON: a request, an answer.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from family import RunningBroker
from patience import patient

from cometmq.actors.launch import broker, embedded, runs
from cometmq.actors.launch.addresses import address_of
from cometmq.actors.replication.group import member
from cometmq.actors.runtime.family import Family
from cometmq.actors.runtime.service import ServiceActor
from cometmq.protocol import errors
from cometmq.protocol.commands import BeginRun, BrokerList, ListBrokers, RunBegun
from cometmq.protocol.errors import CometError
from cometmq.protocol.wire.channel import Channel
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, Counter, Phase, Service

ALL = (1 << 63) - 1
DIE, FLAG = "COMETMQ_TEST_DIE", "COMETMQ_TEST_FLAG"
CONFIRM = "COMETMQ_TEST_CONFIRM"  # what `confirm` is at the start
GROUP: Mapping[str, object] = {
    "enableDLegerCommitLog": True,
    "brokerName": "group",
    "dLegerPeers": "n0-127.0.0.1:1;n1-127.0.0.1:2;n2-127.0.0.1:3",
    "dLegerSelfId": "n0",
    "groupEngine": "sqlite:/nowhere",  # neither is asked for: what a test follows stays as it is
    "groupSecretFile": "/nowhere",
    "slaveTimeout": 2_000,  # a busy machine may let one of our processes wait for a second
}


class ScriptedHa(ServiceActor):
    """Confirms all that is written, unless it is told how far; a master is OPEN, unless it is told
    otherwise."""

    role = "ha"

    def __init__(self, family: Family, *, bind: Sequence[tuple[str, bool]] = ()) -> None:
        super().__init__(bind=bind)
        self._limit = int(os.environ.get(CONFIRM, ALL))
        self._service = Service.OPEN
        self._supervisor = Channel(family.addresses["broker"], "the supervisor")
        self._enter(family)

    def on_start(self) -> None:
        self.inbox.listen_to_doorbell(self._family.doorbell_fd)
        self._look()
        address = self._family.addresses["ha"]
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\0" + script_of(address))
        listener.listen()
        threading.Thread(target=self._listen, args=(listener,), daemon=True).start()

    def settle(self) -> None:
        """Nobody is waited for; whoever waits for the supervisor is told that it is over."""
        self._supervisor.close()

    # --- the counters ---

    def _enter(self, family: Family) -> None:
        self._family = family
        control, doorbell = family.control, family.doorbell
        self._phase = control.sleep_on(Counter.PHASE, doorbell)
        self._wrote = control.sleep_on(Counter.WROTE, doorbell)
        self._replicated = control.own(Counter.REPLICATED)
        self._said = control.own(Counter.SERVICE)
        self._known = control.own(Counter.CONFIRM_KNOWN)
        self._sure_until = control.own(Counter.SURE_UNTIL)

    def on_doorbell(self) -> None:
        self._look()

    def _look(self) -> None:
        self._phase.arm()
        self._wrote.arm()
        if self._phase.value < Phase.RECOVERED:
            return
        end = min(self._limit, self._wrote.value)
        if end > self._replicated.value:
            self._replicated.advance(end)
        service = self._service if self._family.epoch else Service.NONE
        if service != self._said.value:
            self._said.reset(service)
        self._sure_until.reset(ALL)
        if not self._known.value:
            self._known.reset(1)

    # --- what the test wants, in a thread of its own ---

    def _listen(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rw") as lines:
            for line in lines:
                try:
                    answer = self._do(json.loads(line))
                except CometError as error:
                    answer = {"error": type(error).__name__, "text": str(error)}
                lines.write(json.dumps(answer) + "\n")
                lines.flush()

    def _do(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if "order" in wanted:
            order = BeginRun(**wanted["order"], pid=os.getpid())
            answer, _ = self._supervisor.ask(order, timeout_s=patient(60))
            assert isinstance(answer, RunBegun)
            self._in_actor(lambda: self._enter(self._family.in_next_run(order.epoch)))
            self._in_actor(self._look)
            return {"end": answer.end}

        def take() -> None:
            self._limit = wanted.get("confirm", self._limit)
            self._service = wanted.get("service", self._service)
            self._look()

        self._in_actor(take)
        return {}

    def _in_actor(self, action: Callable[[], None]) -> None:
        done = threading.Event()

        def act() -> None:
            try:
                action()
            finally:
                done.set()

        self.call_soon(act)
        done.wait()


def script_of(address: str) -> str:
    return address.removeprefix("ipc://@") + "-script"


class Script:
    """The test's end."""

    def __init__(self, token: str) -> None:
        self._name = "\0" + script_of(address_of(token, "ha"))

    def ask(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Waits until there is somebody to ask. Raises EOFError if that process dies meanwhile."""
        deadline = time.monotonic() + patient(60)
        with socket.socket(socket.AF_UNIX) as connection:
            while True:
                try:
                    connection.connect(self._name)
                    break
                except ConnectionRefusedError:
                    assert time.monotonic() < deadline, "nobody listens"
                    time.sleep(0.001)
            try:
                connection.sendall(json.dumps(wanted).encode() + b"\n")
                line = connection.makefile().readline()
            except (ConnectionResetError, BrokenPipeError):
                line = ""
        if not line:
            raise EOFError
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise getattr(errors, found["error"], CometError)(found["text"])
        return found


class Replica(RunningBroker):
    """A broker that is one replica of a group; the other ones are what the test says of them."""

    def __init__(
        self,
        store: Path,
        settings: Mapping[str, object] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        keys = {**GROUP, **(settings or {})}
        super().__init__(store, keys, module="scripted_ha", environ=environ)
        self.token = ControlFile.open(store / CONTROL_FILE, writable=False).meta["token"]

    def tell(self, **wanted: int) -> dict[str, Any]:
        """`confirm`: up to where, ALL for whatever is written; `service`: see Service."""
        return Script(self.token).ask(wanted)

    def order(self, epoch: int, **order: int) -> int:
        """Another run; where the log of the last one ended. Returns when it has begun."""
        return int(Script(self.token).ask({"order": {"epoch": epoch, **order}})["end"])

    def wait_run(self, epoch: int) -> None:
        """Until that run serves as a whole, and is registered."""
        deadline = time.monotonic() + patient(60)
        wanted = 0 if epoch else 1
        with Channel(self.ready.name_server) as names:
            while True:
                found, _ = names.ask(ListBrokers(), timeout_s=patient(30))
                assert isinstance(found, BrokerList)
                told = self.statistics()
                ids = [each.broker_id for each in found.brokers]
                if told["epoch"] == epoch and told["serves"] and ids == [wanted]:
                    return
                assert time.monotonic() < deadline, self.log
                time.sleep(0.01)

    def run(self, epoch: int, **order: int) -> int:
        end = self.order(epoch, **order)
        self.wait_run(epoch)
        return end


def install() -> None:
    member.MemberActor = ScriptedHa


def die_behind(name: str, flag: Path) -> None:
    """The supervisor is killed after that step of a change of runs, once the flag is there."""
    module = broker if name == "create_control" else runs
    step = getattr(module, name)

    def die(*arguments: Any, **named: Any) -> Any:
        found = step(*arguments, **named)
        if flag.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(module, name, die)


def main() -> None:
    install()
    if DIE in os.environ:
        die_behind(os.environ[DIE], Path(os.environ[FLAG]))
    embedded.main()


if __name__ == "__main__":
    main()
