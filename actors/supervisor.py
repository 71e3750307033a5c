"""The broker process: starts the family, watches it, and ends it in order."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
import pykka

from cometmq.actors.family import EXIT_FATAL
from cometmq.actors.hosted import Host
from cometmq.actors.logs import set_up_logging
from cometmq.actors.service import VERSION, ServiceActor
from cometmq.actors.zygote import Broken, Ended, Ready, Report, ReportReader, Started, Zygote
from cometmq.conf import BrokerSettings
from cometmq.protocol.channel import Channel
from cometmq.protocol.commands import BrokerEndpoints, EndpointsChanged, Finish
from cometmq.protocol.errors import BY_CODE, CometError, StoreError
from cometmq.shm.control import CONTROL_FILE, ControlFile, Counter, Doorbell, Phase
from cometmq.shm.files import (
    ABORT_FILE,
    COMMITLOG_DIR,
    RETIRED_DIR,
    STAGING_DIR,
    StoreLock,
    check_store_folder,
    lock_for_family,
    remove_folder,
    sync_folder,
)
from cometmq.shm.identity import keep_identity
from cometmq.shm.last_run import LastRun, life_of
from cometmq.shm.queue_table import (
    APPENDED_FILE,
    QUEUES_FILE,
    AppendedTable,
    QueueTable,
    keep_as_before,
)
from cometmq.shm.references import create_references

# Not __name__: an embedded broker runs this module as __main__.
log = logging.getLogger("cometmq.actors.supervisor")

# Starting: all at once, each waits for the counters it needs. Finishing: in this order, so that
# each finds the work of those before it complete.
FINISH_ORDER: Final = (
    "commitlog", "dispatcher", "flush", "allocator", "cleaner", "reader", "coordinator", "namesrv",
)  # fmt: skip
FINISH_TIMEOUT_S: Final = 60
KILL_TIMEOUT_S: Final = 5
FAMILY_TIMEOUT_S: Final = 10  # for the children of a supervisor that was killed
DEATHS_MAX: Final = 5
DEATHS_WITHIN_S: Final = 10
# Ports behind the name server's, when they are fixed.
PORT_OF: Final = {"namesrv": 0, "commitlog": 1, "coordinator": 2, "reader": 3}


def kind_of(role: str) -> str:
    return role.partition("-")[0]


class BrokerActor(ServiceActor):
    """Supervises the processes of one broker.

    Writes, alone: the process table, `abort`, the control file's header.
    Wakes on: reports of children that have started or ended, Finish (which a signal becomes).
    A child that dies is started again; one that says that the store must not be used further, or
    that dies again and again, ends the broker, and `abort` stays for the next start to find.
    """

    role = "broker"

    def __init__(
        self,
        settings: BrokerSettings,
        zygote: Zygote,
        doorbells: Sequence[int],
        token: str,
        on_ready: Callable[[BrokerActor], None],
        host: Host | None = None,
    ) -> None:
        super().__init__(bind=[(address_of(token, "broker"), True)])
        self._settings = settings
        self._store = settings.store_path_root_dir
        self._zygote = zygote
        self._reports = ReportReader(zygote.report_fd)
        self._host = host  # of the commitlog actor, which then is no child
        self._host_reports = ReportReader(host.report_fd) if host else None
        self._doorbells = doorbells
        self._token = token
        self._on_ready = on_ready
        self._roles = roles_of(settings)
        self._pids: dict[str, int] = {}
        self._serving: set[str] = set()
        self._binds = {role: self._first_bind(role) for role in self._roles}
        self._deaths: dict[str, list[float]] = defaultdict(list)
        self._is_ready = False
        self._finishing = False
        self._began = time.monotonic()
        self.failure: CometError | None = None
        self.restarts = 0

    # --- start ---

    def on_start(self) -> None:
        self._lock = StoreLock(self._store, 1)
        abort = self._store / ABORT_FILE
        self._clean = not abort.exists()
        self._last_run = None if self._clean else LastRun.read(self._store, self._segment_bytes)
        abort.write_text(str(os.getpid()))
        sync_folder(self._store)
        keep_identity(self._store, self._name)
        self._control = ControlFile.create(
            self._store / CONTROL_FILE, self._describe(), self._doorbells
        )
        QueueTable.create(self._store / QUEUES_FILE, self._control.read(Counter.QUEUES))
        AppendedTable.create(self._store / APPENDED_FILE)
        create_references(self._store)
        self.inbox.listen_to(self._zygote.report_fd)
        self.inbox.listen_to(self._zygote.end_fd)
        if self._host is not None:
            self.inbox.listen_to(self._host.report_fd)
            self.inbox.listen_to(self._host.end_fd)
        for role in self._roles:
            self._start(role)

    @property
    def _name(self) -> str:
        """What clients call this broker."""
        return self._settings.broker_name or default_name(self._store)

    def _describe(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "pid": os.getpid(),
            "token": self._token,
            "nonce": secrets.token_hex(16),  # who knows it can read this very file
            "store": str(self._store.resolve()),
            "started_ms": int(time.time() * 1000),
            "roles": self._roles,
            "broker": self._name,
            "segment_bytes": self._segment_bytes,
            "max_message_bytes": self._settings.max_message_size,
            "life": life_of(self._store),
            "flush": self._settings.flush_disk_type.value,
            "archive_hold": self._settings.archive_hold,
        }

    @property
    def _segment_bytes(self) -> int:
        return self._settings.mapped_file_size_commit_log_bytes

    def _first_bind(self, role: str) -> str | None:
        kind = kind_of(role)
        if kind not in PORT_OF:
            return None
        base = self._settings.port
        port = "*" if not base else str(base + PORT_OF[kind] + number_of(role))
        return f"tcp://{bracketed(self._settings.bind_address)}:{port}"

    def _start(self, role: str) -> None:
        family_message = {
            "role": role,
            "settings": self._settings.as_keys(),
            "store": str(self._store),
            "doorbells": list(self._doorbells),
            "doorbell": doorbell_of(role),
            "addresses": {name: address_of(self._token, name) for name in self._roles},
            "name_servers": self.name_servers,
            "bind": self._binds[role],
            "clean": self._clean,
            "last_run": self._last_run and self._last_run.as_message(),
            "hosted": self._host is not None,
        }
        if self._is_hosted(role):
            assert self._host is not None
            self._pids[role] = self._host.pid
            self._host.start(family_message)
        else:
            self._zygote.start(family_message)

    def _is_hosted(self, role: str) -> bool:
        """Whether it lives in a service's process, which is never killed, nor waited for."""
        return role == "commitlog" and self._host is not None

    @property
    def name_servers(self) -> list[str]:
        """Where the broker registers: the ones it was told, else its own."""
        if self._settings.name_servers:
            return [f"tcp://{server}" for server in self._settings.name_servers]
        return [address_of(self._token, "namesrv")]

    # --- reports ---

    def on_readable(self, source: Any) -> None:
        for report in self._reports.read():
            self._take(report)
        if source == self._zygote.end_fd:
            self.inbox.forget(source)
            self._fail(CometError("the zygote has ended: no process could be started again"))
        if self._host is not None and self._host_reports is not None:
            self._follow_host(self._host, self._host_reports, source)

    def _follow_host(self, host: Host, reports: ReportReader, source: Any) -> None:
        """What the service reports; when it closes its end, or dies, the broker ends."""
        for report in reports.read():
            self._take(report)
        if source == host.end_fd:
            log.error("process %d, which has the writer, is gone", host.pid)
        if reports.ended or source == host.end_fd:
            self.inbox.forget(host.report_fd)
            self.inbox.forget(host.end_fd)
            self._host_reports = None
            self.actor_ref.tell(Finish())

    def _take(self, report: Report) -> None:
        match report:
            case Started(role, pid):
                self._pids[role] = pid
            case Ready(role, _, address):
                self._serving.add(role)
                if address:
                    self._binds[role] = address
                self._on_serving(role)
            case Broken(role, _, text, code):
                self._on_broken(role, text, code)
            case Ended(pid, status):
                role = next((name for name, known in self._pids.items() if known == pid), "")
                if role:
                    self._on_ended(role, pid, status)

    def _on_serving(self, role: str) -> None:
        if self._serving != set(self._roles):
            return
        self._tell_endpoints()
        if self._is_ready:
            log.info("%s serves again", role)

    def _tell_endpoints(self) -> None:
        """The coordinator registers the broker; the first time, that makes it ready."""
        channel = Channel(address_of(self._token, "coordinator"), "coordinator")

        def done(_pending: Any) -> None:
            self.call_soon(lambda: self._registered(channel))

        channel.request(EndpointsChanged(self.endpoints), on_done=done)

    def _registered(self, channel: Channel) -> None:
        channel.close()
        if not self._is_ready:
            self._is_ready = True
            log.info(
                "%s serves %s after %.2f s; name server %s",
                self.endpoints.broker, self._store, time.monotonic() - self._began,
                self.public_name_server,
            )  # fmt: skip
            self._on_ready(self)

    @property
    def endpoints(self) -> BrokerEndpoints:
        readers = [self._public(role) for role in self._roles if kind_of(role) == "reader"]
        return BrokerEndpoints(
            cluster=self._settings.broker_cluster_name,
            broker=self._name,
            broker_id=self._settings.broker_id,
            commitlog=self._public("commitlog"),
            readers=readers,
            coordinator=self._public("coordinator"),
        )

    def _public(self, role: str) -> str:
        """The address as clients reach it: the port that was bound, at the advertised host."""
        port = (self._binds[role] or "").rpartition(":")[2]
        return f"tcp://{bracketed(self._settings.advertised_address)}:{port}"

    @property
    def public_name_server(self) -> str:
        if self._settings.name_servers:
            return ";".join(f"tcp://{server}" for server in self._settings.name_servers)
        return self._public("namesrv")

    def _on_broken(self, role: str, text: str, code: int) -> None:
        """A child said why it cannot start: at the first start that is the broker's own failure."""
        error = BY_CODE.get(code, CometError)(f"{role}: {self._name_port_holder(role, text)}")
        if self._is_ready and not self._is_hosted(role):
            log.error("%s did not start again: %s", role, text)
        else:
            self._fail(error)

    def _name_port_holder(self, role: str, text: str) -> str:
        """What holds the port, where that is why the child could not start."""
        bind = self._binds[role]
        if bind is None or "in use" not in text.lower():
            return text
        port = int(bind.rpartition(":")[2])
        return f"port {port} is taken by {port_holder(port)}; choose another with --port"

    def _on_ended(self, role: str, pid: int, status: int) -> None:
        self._serving.discard(role)
        self._pids.pop(role, None)
        if self._finishing or self.failure is not None:
            return
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        now = time.monotonic()
        deaths = [at for at in self._deaths[role] if at > now - DEATHS_WITHIN_S]
        self._deaths[role] = [*deaths, now]
        if status == EXIT_FATAL:
            self._fail(StoreError(f"{role} took the store out of service; see its log"))
        elif self._is_hosted(role):
            self._fail(
                CometError(f"the writer in process {pid} has ended, and this broker with it")
            )
        elif not self._is_ready:
            self._fail(
                CometError(f"{role} (process {pid}) ended {how} before the broker was ready")
            )
        elif len(self._deaths[role]) > DEATHS_MAX:
            self._fail(CometError(f"{role} has ended {how}, {len(deaths) + 1} times in a row"))
        else:
            log.error("%s (process %d) ended %s: starting it again", role, pid, how)
            self.restarts += 1
            self._start(role)
            self._ring_all()

    def _ring_all(self) -> None:
        """Have everybody look again: who died may have moved a counter without waking sleepers."""
        for doorbell in self._doorbells:
            os.eventfd_write(doorbell, 1)

    def _fail(self, error: CometError) -> None:
        """End without order: `abort` stays, and the next start recovers."""
        if self.failure is not None:
            return
        log.critical("%s", error)
        self.failure = error
        if self._host is not None:
            self._host.close()
        self._kill_children()
        if self._clean and self._control.read(Counter.PHASE).value == Phase.STARTING:
            self._remove_marks()  # nothing was touched: the last end is still the orderly one
        self.stop()

    def _kill_children(self) -> None:
        """At once: a store is to be recovered from any moment, so there is nothing to wait for."""
        children = [pid for role, pid in self._pids.items() if not self._is_hosted(role)]
        for pid in children:
            _signal(pid, signal.SIGKILL)
        for process in _processes(children):
            _wait(process, KILL_TIMEOUT_S)

    # --- end ---

    def settle(self) -> None:
        """Everything to its end, one after the other, and then the marks of a bad end removed."""
        if self._finishing or self.failure is not None:
            return  # asked twice, as by a signal and by the end of the lifeline; or too late
        self._finishing = True
        began = time.monotonic()
        order = sorted(self._pids, key=lambda role: FINISH_ORDER.index(kind_of(role)))
        complete = self._is_ready
        for role in order:
            complete = self._finish(role) and complete
        control = self._control
        wrote = control.read(Counter.WROTE).value
        behind = [
            counter.name.lower()
            for counter in (Counter.DISPATCHED, Counter.FLUSHED)
            if control.read(counter).value != wrote
        ]
        if not complete or behind:
            log.error(
                "not everything was settled (%s): abort stays", ", ".join(behind) or "see above"
            )
            return
        self._remove_marks()
        log.info("finished in order at %d; %.2f s", wrote, time.monotonic() - began)

    def _finish(self, role: str) -> bool:
        """Ask one child to end, and see it gone."""
        pid = self._pids[role]
        deadline = time.monotonic() + FINISH_TIMEOUT_S
        with Channel(address_of(self._token, role), role) as channel:
            pending = channel.request(Finish())
            while not channel.wait(pending, 0.2, keep=True):
                if _has_ended(pid):
                    log.error("%s (process %d) is gone, and did not finish", role, pid)
                    return False
                if time.monotonic() > deadline:
                    log.error("%s did not finish within %d s", role, FINISH_TIMEOUT_S)
                    if not self._is_hosted(role):
                        _signal(pid, signal.SIGKILL)
                    return False
        try:
            pending.result()
        except CometError as error:
            log.error("%s did not finish: %s", role, error)
            complete = False
        else:
            complete = True
        for process in _processes([] if self._is_hosted(role) else [pid]):
            _wait(process, deadline - time.monotonic())
        return complete

    def _remove_marks(self) -> None:
        store = self._store
        remove_folder(store / STAGING_DIR)
        remove_folder(store / RETIRED_DIR)
        for name in (CONTROL_FILE, APPENDED_FILE):
            (store / name).unlink(missing_ok=True)
        keep_as_before(store)
        sync_folder(store)
        (store / ABORT_FILE).unlink()
        sync_folder(store)

    def on_stop(self) -> None:
        super().on_stop()
        if self._host is not None:
            self._host.close()
        self._zygote.close()

    def statistics(self) -> dict[str, int | float | str]:
        found: dict[str, int | float | str] = {
            f"pid.{role}": self._pids.get(role, 0) for role in self._roles
        }
        found["restarts"] = self.restarts
        found["broker"] = self.endpoints.broker
        found["name_server"] = self.public_name_server
        return found


# --- addresses and names --------------------------------------------------------------------------


def address_of(token: str, role: str) -> str:
    """Where an actor takes the family's commands: in the abstract namespace, so that nothing is
    left behind however it ends."""
    return f"ipc://@cometmq-{token}-{role}"


def roles_of(settings: BrokerSettings) -> list[str]:
    roles = ["commitlog", "allocator", "dispatcher", "flush", "cleaner", "coordinator"]
    roles += [f"reader-{number}" for number in range(settings.reader_count)]
    if not settings.name_servers:
        roles.insert(0, "namesrv")
    return roles


def number_of(role: str) -> int:
    return int(role.partition("-")[2] or 0)


def doorbell_of(role: str) -> int:
    return Doorbell[kind_of(role).upper()] + number_of(role)


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def default_name(store: Path) -> str:
    """A broker's name where none was given: the machine's, and the store's."""
    host = "".join(c if c.isalnum() or c in "_-" else "-" for c in os.uname().nodename)
    folder = "".join(c if c.isalnum() or c in "_-" else "-" for c in store.resolve().name)
    return f"{host}-{folder}"[:100]


def port_holder(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                name = " ".join(psutil.Process(connection.pid).cmdline())[:100]
                return f"process {connection.pid} ({name})"
    except psutil.Error:
        pass
    return "another process"


def _processes(pids: Any) -> list[psutil.Process]:
    found = []
    for pid in pids:
        try:
            found.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    return found


def _has_ended(pid: int) -> bool:
    """Also one that nobody has buried yet."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(descriptor)


def _wait(process: psutil.Process, timeout_s: float) -> None:
    """Until it has ended. Whether it was buried does not matter: once the zygote is dead that is
    left to init, which may take its time, or in a container never do it."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(max(0.0, timeout_s) * 1000):
            log.warning("process %d is still there", process.pid)
    finally:
        os.close(descriptor)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


# --- the process ----------------------------------------------------------------------------------


def run_broker(
    settings: BrokerSettings,
    on_ready: Callable[[BrokerActor], None],
    lifeline: int | None = None,
    host: Host | None = None,
) -> None:
    """Serve until a signal, or the end of the lifeline or of the host, ends it in order.

    To be called in the main thread of a process that has started no other. Raises CometError when
    the broker could not start or had to give up.
    """
    settings = replace(settings, store_path_root_dir=settings.store_path_root_dir.absolute())
    settings.check_for_writing()
    if settings.commit_log_dir != settings.store_path_root_dir / COMMITLOG_DIR:
        raise StoreError(
            f"storePathCommitLog = {settings.commit_log_dir}: the log lies in "
            f"{settings.store_path_root_dir / COMMITLOG_DIR}, other places are not supported yet"
        )
    check_store_folder(settings.store_path_root_dir)
    family_lock = lock_for_family(settings.store_path_root_dir, FAMILY_TIMEOUT_S)
    doorbells = [
        os.eventfd(0, os.EFD_NONBLOCK) for _ in range(Doorbell.READER + settings.reader_count)
    ]
    zygote = Zygote()
    set_up_logging("broker", settings)
    token = secrets.token_hex(8)
    reference = BrokerActor.start(settings, zygote, doorbells, token, on_ready, host)
    actor = reference._actor_weakref()
    assert actor is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: _tell_to_finish(reference))
    actor.started.wait()
    if actor.start_error is not None:
        zygote.close()
        raise actor.start_error
    if lifeline is not None:
        threading.Thread(target=_follow, args=(lifeline, reference), daemon=True).start()
    actor.ended.wait()
    for descriptor in (*doorbells, family_lock):
        os.close(descriptor)
    if actor.failure is not None:
        raise actor.failure


def _follow(lifeline: int, reference: Any) -> None:
    """The embedding process holds the other end; its end is ours."""
    while os.read(lifeline, 4096):
        pass
    _tell_to_finish(reference)


def _tell_to_finish(reference: pykka.ActorRef[BrokerActor]) -> None:
    with contextlib.suppress(pykka.ActorDeadError):  # it has given up already, and said why
        reference.tell(Finish())


class EmbeddedReady(msgspec.Struct, tag="ready"):
    """What an embedding process is told once the broker serves."""

    token: str
    name_server: str
    broker: str
    pid: int


class EmbeddedFailed(msgspec.Struct, tag="failed"):
    code: int
    text: str


def main() -> None:
    """An embedded broker: settings come as one line of JSON on standard input, which then is the
    lifeline; what became of it goes out as one line on standard output.

    With the argument `hosted` standard input is the socket of a service that has the writer.
    """
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(0, 1)
        if not more:
            return
        line += more
    out = os.dup(1)
    os.dup2(2, 1)  # whatever prints, prints to the log

    def tell(message: EmbeddedReady | EmbeddedFailed) -> None:
        os.write(out, msgspec.json.encode(message) + b"\n")

    def ready(actor: BrokerActor) -> None:
        tell(
            EmbeddedReady(
                actor._token, actor.public_name_server, actor.endpoints.broker, os.getpid()
            )
        )

    hosted = sys.argv[1:] == ["hosted"]
    try:
        settings = BrokerSettings.from_keys(msgspec.json.decode(line))
        if hosted:
            run_broker(settings, ready, host=Host(0))
        else:
            run_broker(settings, ready, lifeline=0)
    except Exception as error:
        tell(EmbeddedFailed(getattr(error, "code", CometError.code), str(error)))
        sys.exit(1)


if __name__ == "__main__":
    main()
