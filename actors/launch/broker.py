"""The supervisor's actor: starts the processes of a broker, watches them, ends them in order."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

from cometmq.actors.launch.addresses import Addresses, address_of, name_of
from cometmq.actors.launch.binding import HeldPorts, bind_error
from cometmq.actors.launch.ending import end_now, send_signal
from cometmq.actors.launch.orderly_end import (
    KILL_TIMEOUT_S,
    POLL_S,
    OrderlyEnd,
    writer_has_stopped,
)
from cometmq.actors.launch.process_table import ProcessTable, how_it_ended
from cometmq.actors.launch.restarts import Restarts
from cometmq.actors.launch.runs import (
    OUTLIVING,
    OUTLIVING_HA,
    check_order,
    create_control,
    kill_run,
    left_by,
    next_log,
)
from cometmq.actors.launch.telling import Telling
from cometmq.actors.launch.zygote import (
    Broken,
    Closing,
    Ended,
    Ready,
    Report,
    ReportReader,
    Started,
    Zygote,
)
from cometmq.actors.runtime import meters
from cometmq.actors.runtime.roles import doorbell_of, roles_of
from cometmq.actors.runtime.service import Request, ServiceActor
from cometmq.conf import BrokerSettings
from cometmq.protocol.commands import (
    BeginRun,
    BrokerEndpoints,
    Command,
    Finish,
    RunBegun,
)
from cometmq.protocol.errors import (
    BY_CODE,
    BadRequest,
    CometError,
    DiskFull,
    ShuttingDown,
    StoreError,
)
from cometmq.shm.live.control import Counter, Phase
from cometmq.shm.log.last_run import LastRun
from cometmq.shm.log.marks import forget_last_run, remove_marks
from cometmq.shm.os.ballast import BASE_BYTES, drop_ballast, take_ballast
from cometmq.shm.os.durable import sync_folder
from cometmq.shm.os.files import ABORT_FILE, SLAVE_FILE
from cometmq.shm.os.locks import StoreLock
from cometmq.shm.state.identity import keep_identity, was_opened_by_others

if TYPE_CHECKING:
    from cometmq.actors.launch.hosted import Host

log = logging.getLogger("cometmq.actors.launch.supervisor")

START_GRACE_S: Final = 10  # for a start that is under way when the end is asked for


class BrokerActor(ServiceActor):
    """Supervises the processes of one broker.

    Writes, alone: the process table, `abort`, the control file's header.
    Wakes on: reports of children that have started or ended, Finish (which a signal becomes),
    BeginRun of `ha`, in a group that elects its master.
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
        self.token = token
        self.failure: CometError | None = None
        self.restarts = 0
        self._configured = settings
        if settings.is_in_group:
            settings = settings.for_run(0)  # it follows, until it is elected
        self._settings = settings  # of this run
        self._epoch = 0  # that this run is the master of
        self._store = settings.store_path_root_dir
        self._segment_bytes = settings.mapped_file_size_commit_log_bytes
        self._name = settings.broker_name  # for clients
        if not self._name:
            in_group = settings.is_in_group
            self._name = settings.group_name if in_group else name_of(self._store)
        self._zygote = zygote
        self._reports = ReportReader(zygote.report_fd)
        self._unread: deque[Report] = deque()
        self._host = host  # of the commitlog actor, which then is no child
        self._host_reports = ReportReader(host.report_fd) if host else None
        self._doorbells = doorbells
        self._on_ready = on_ready
        roles = roles_of(settings)
        self._table = ProcessTable(roles, hosted="" if host is None else "commitlog")
        self._ports = HeldPorts()
        self._addresses = Addresses(settings, roles, token, self._name, self._ports)
        self._telling = Telling(self.call_soon, self._registered)
        self._is_ready = False
        self._run_is_ready = False  # in a group there may be one that never is
        self._ending_run = False
        self._lost: list[
            tuple[str, int, int]
        ] = []  # those that were to outlive a run, while it ended
        self._finishing = False
        self._restarts = Restarts(lambda role: self._start([role]), self.after)
        self._began = self._run_began = time.monotonic()

    def say_state(self) -> None:
        """In the main thread: how far everything is, to the log, and where every thread of every
        process is, to standard error."""
        counters = " ".join(f"{name}={value}" for name, value in self._control.values().items())
        pids = dict(self._table.pids)
        log.warning("asked by SIGUSR1: pids %s; counters %s", pids, counters)
        faulthandler.dump_traceback(all_threads=True)
        for role, pid in pids.items():
            if not self._table.is_hosted(role):
                send_signal(pid, signal.SIGUSR1)

    # --- start ---

    def on_start(self) -> None:
        self._lock = StoreLock(self._store, 1)
        abort = self._store / ABORT_FILE
        self._was_slave = (self._store / SLAVE_FILE).exists()
        # A slave may end in the middle of what its master wrote in one piece, and its books may be
        # ahead of its log: who becomes a master looks at all of it.
        promoted = self._was_slave and not self._settings.is_slave
        self._clean = not abort.exists() and not promoted
        self._last_run = None
        if not (self._clean or promoted):
            self._last_run = LastRun.read(self._store, self._segment_bytes)
        if was_opened_by_others(self._store):
            if not self._clean:
                log.info("another program may have opened the store since the last run of CometMQ")
            forget_last_run(self._store, clean=self._clean)
        drop_ballast(self._store)
        abort.write_text(str(os.getpid()))
        if self._settings.is_slave:
            (self._store / SLAVE_FILE).touch()
        sync_folder(self._store)
        queue_segment_bytes = self._settings.mapped_file_size_consume_queue_bytes
        identity = keep_identity(self._store, self._name, self._segment_bytes, queue_segment_bytes)
        if self._settings.broker_name not in ("", identity.created_as):
            log.warning(
                "brokerName=%s: the store was created by broker %s; progress that is stored under "
                "a broker's name (broadcasting, Spark) is not found under another one",
                self._name, identity.created_as,
            )  # fmt: skip
        self._control = create_control(
            self._settings, self._doorbells, self._table.roles, self._name, self.token, self._epoch
        )
        self.inbox.listen_to(self._zygote.report_fd)
        self.inbox.listen_to(self._zygote.end_fd)
        if self._host is not None:
            self.inbox.listen_to(self._host.report_fd)
            self.inbox.listen_to(self._host.end_fd)
        self._start(self._table.roles)

    def _start(self, roles: Sequence[str]) -> None:
        in_common = {
            "settings": self._settings.as_keys(),
            "store": str(self._store),
            "doorbells": list(self._doorbells),
            "addresses": self._addresses.family,
            "name_servers": self._addresses.name_servers,
            "clean": self._clean,
            "last_run": self._last_run and self._last_run.as_message(),
            "epoch": self._epoch,
        }
        children: list[dict[str, Any]] = []
        for role in roles:
            own = {"role": role, "doorbell": doorbell_of(role), "bind": self._addresses.binds[role]}
            if self._host is not None and self._table.is_hosted(role):
                self._table.started(role, self._host.pid)
                self._host.start(in_common | own)
            else:
                self._table.ordered(role)
                children.append(in_common | own)
        self._zygote.start(children)

    # --- runs of a replica ---

    def on_begin_run(self, command: BeginRun, _request: Request) -> Command:
        if not self._settings.is_in_group:
            raise BadRequest("this broker is no replica of a group: it has one run")
        if self._finishing or self.failure is not None:
            raise ShuttingDown("the broker is shutting down")
        if command.pid and command.pid != self._table.pids.get("ha"):
            raise BadRequest(f"process {command.pid} is not the `ha` process any more")
        check_order(command, self._segment_bytes)
        return RunBegun(self._begin_run(command, OUTLIVING))

    def _begin_run(self, order: BeginRun, outliving: Collection[str]) -> int:
        """End the run that is, and begin another; where the log of the old one ended. Raises
        CometError once the broker has given up."""
        began = time.monotonic()
        self._kill_run(outliving)
        killed = time.monotonic()
        try:
            drop_ballast(self._store)
            left = left_by(
                self._store, self._segment_bytes, self._control,
                clean=self._clean, before=self._last_run,
            )  # fmt: skip
            left = next_log(self._store, self._segment_bytes, left, order)
            self._settings = self._configured.for_run(order.epoch)
            self._epoch, self._clean, self._last_run = order.epoch, left.clean, left.last_run
            roles = roles_of(self._settings)
            self._table.begin_run(roles)
            self._addresses = Addresses(self._settings, roles, self.token, self._name, self._ports)
            self._control = create_control(
                self._settings, self._doorbells, roles, self._name, self.token, self._epoch
            )
        except (OSError, CometError) as error:
            failure = error if isinstance(error, CometError) else StoreError(str(error))
            self._fail(failure)
            raise failure from None
        log.info(
            "a run %s begins, the last one ended at %d%s; its processes were gone after %.0f ms, "
            "this took %.0f ms",
            f"as master of epoch {order.epoch}" if order.epoch else "as follower", left.end,
            f", cut to {order.cut_to}" if order.cut_to >= 0 else "",
            (killed - began) * 1000, (time.monotonic() - killed) * 1000,
        )  # fmt: skip
        self._run_is_ready = False
        self._run_began = began
        self._start([role for role in roles if role not in outliving])
        lost, self._lost = self._lost, []
        for each in lost:
            self._on_ended(*each)
        return left.end

    def _kill_run(self, outliving: Collection[str]) -> None:
        """No process of the run is left, nor any report of one. Raises CometError once the broker
        has given up."""
        self._ending_run = True
        self._telling.forget()
        self._restarts.forget()
        left = kill_run(self._table, outliving, self._read_reports, lambda: self.failure)
        if left:
            self._fail(StoreError(f"{', '.join(left)} could not be ended for another run"))
        if self.failure is not None:
            raise self.failure
        self._ending_run = False

    # --- reports ---

    def on_readable(self, source: Any) -> None:
        self._unread += self._reports.read()
        while self._unread:  # what a report leads to may read more of them
            self._take(self._unread.popleft())
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
                self._table.started(role, pid)
                self._on_serving(role)
            case Ready(role, _):
                self._table.serves(role)
                self._on_serving(role)
            case Broken(role, _, text, code):
                if not self._ending_run:
                    self._on_broken(role, text, code)
            case Closing():
                self.actor_ref.tell(Finish())
            case Ended(pid, status):
                role = self._table.gone(pid)
                if role and not self._ending_run:
                    self._on_ended(role, pid, status)
                elif role in OUTLIVING:
                    self._lost.append((role, pid, status))

    def _on_serving(self, role: str) -> None:
        if not self._table.all_serve or self._finishing or self._ending_run:
            return
        # The coordinator registers the broker; the first time, that makes it ready.
        self._telling.tell(self._addresses.family["coordinator"], self.endpoints)
        if self._is_ready:
            log.info("%s serves again", role)

    def _registered(self) -> None:
        if self._settings.is_in_group and not self._run_is_ready:
            self._run_is_ready = True
            self._take_ballast(leave_bytes=2 * BASE_BYTES)
            log.info("this run serves after %.0f ms", (time.monotonic() - self._run_began) * 1000)
        if not self._is_ready:
            self._is_ready = True
            if self._was_slave and not self._configured.is_slave:
                (self._store / SLAVE_FILE).unlink(missing_ok=True)
            if not self._settings.is_in_group:
                self._take_ballast(leave_bytes=2 * BASE_BYTES)
            log.info(
                "%s serves %s after %.2f s; name server %s",
                self.endpoints.broker, self._store, time.monotonic() - self._began,
                self.public_name_server,
            )  # fmt: skip
            self._on_ready(self)

    @property
    def endpoints(self) -> BrokerEndpoints:
        """Where clients reach its actors."""
        return self._addresses.endpoints

    @property
    def public_name_server(self) -> str:
        """Where clients find the broker."""
        return self._addresses.public_name_server

    def _on_broken(self, role: str, text: str, code: int) -> None:
        """A child said why it cannot start: at the first start that is the broker's own failure."""
        bind = bind_error(role, self._addresses.binds[role], text, self._settings)
        error = bind or BY_CODE.get(code, CometError)(f"{role}: {text}")
        if self._is_ready and not self._table.is_hosted(role):
            log.error("%s did not start again: %s", role, text)
            if isinstance(error, DiskFull):
                self._table.lacks_room(role)
        else:
            self._fail(error)

    def _on_ended(self, role: str, pid: int, status: int) -> None:
        if self.failure is not None:
            return
        if self._table.is_hosted(role) and writer_has_stopped(self._control):
            return
        if self._table.has_come_to_its_end(role, status):
            return
        if role == "ha" and self._finishing and self._settings.is_in_group:
            self._table.ends[role] = 0  # there is no other run that it could order
            return
        reason = self._table.why_it_is_over(role, pid, status, is_ready=self._is_ready)
        if reason is not None:
            self._fail(reason)
            return
        if role == "ha" and self._settings.is_in_group:
            log.error(
                "%s (process %d) ended %s: following with another one",
                role,
                pid,
                how_it_ended(status),
            )
            self.restarts += 1
            with contextlib.suppress(CometError):  # then the broker has given up, and said why
                self._begin_run(BeginRun(0), OUTLIVING_HA)
            return
        pause = self._table.pause_before_start(role)
        log.error(
            "%s (process %d) ended %s: starting it again%s",
            role, pid, how_it_ended(status), f" in {pause:.2f} s" if pause else "",
        )  # fmt: skip
        self.restarts += 1
        self._restarts.start(role, 0.0 if self._finishing else pause)
        # Have everybody look again: it may have moved a counter without waking sleepers.
        for doorbell in self._doorbells:
            os.eventfd_write(doorbell, 1)
        assert self._control.wake_words is not None
        self._control.wake_words.wake_everybody()

    def _fail(self, error: CometError) -> None:
        """End without order: `abort` stays, and the next start recovers."""
        if self.failure is not None:
            return
        log.critical("%s", error)
        self.failure = error
        self._restarts.forget()
        if self._host is not None:
            self._host.close()
        self._kill_children()
        self.stop()

    def _kill_children(self) -> None:
        """At once: a store is to be recovered from any moment, so there is nothing to wait for."""
        end_now(self._table.children, KILL_TIMEOUT_S)
        if self._clean and self._control.read(Counter.PHASE).value == Phase.STARTING:
            try:  # nothing was touched: the last end is still the orderly one
                remove_marks(self._store)
            except OSError as error:
                log.warning("the next start recovers, since marks of this one stay: %s", error)

    # --- end ---

    def settle(self) -> None:
        """Every role to its end, one after the other, and then the marks of a bad end removed."""
        if self._finishing or self.failure is not None:
            return  # asked twice, as by a signal and by the end of the lifeline; or too late
        self._finishing = True
        self._restarts.start_waiting()
        began = time.monotonic()
        if not self._wait_serving():
            self._kill_children()
            log.warning("asked to end before it was ready: the next start goes on from there")
            return
        unsettled = OrderlyEnd(
            self._table,
            self._control,
            self._addresses.family,
            self._host,
            self._read_reports,
            lambda: self.failure,
        ).run()
        if self.failure is not None:
            return  # it has given up meanwhile, and said why
        if unsettled:
            log.error(
                "not everything was settled (%s): abort stays, and the next start recovers",
                "; ".join(unsettled),
            )
            return
        remove_marks(self._store)
        self._take_ballast()
        wrote = self._control.read(Counter.WROTE).value
        log.info("finished in order at %d; %.2f s", wrote, time.monotonic() - began)

    def _wait_serving(self) -> bool:
        """Whether every role has come so far that it can be asked; a start may be nearly there."""
        if self._settings.is_in_group:  # it may wait for others, and may be killed at any line
            return self._run_is_ready
        deadline = time.monotonic() + START_GRACE_S
        while not self._is_ready and not self._table.all_serve:
            if time.monotonic() > deadline or self.failure is not None:
                return False
            self._read_reports(POLL_S)
        return True

    def _read_reports(self, timeout_s: float) -> None:
        """What the inbox would hand on, which waits until the end is over."""
        poll = select.poll()
        sources = [self._zygote.report_fd, self._zygote.end_fd]
        if self._host is not None and self._host_reports is not None:
            sources += [self._host.report_fd, self._host.end_fd]
        for source in sources:
            poll.register(source, select.POLLIN)
        for source, _ in poll.poll(timeout_s * 1000):
            if self.failure is None:
                self.on_readable(source)

    def _take_ballast(self, leave_bytes: int = 0) -> None:
        queues = self._control.read(Counter.QUEUES).value
        take_ballast(self._store, queues, leave_bytes=leave_bytes)

    def on_stop(self) -> None:
        super().on_stop()
        if self._host is not None:
            self._host.close()
        self._zygote.close()
        self._ports.close()

    def statistics(self) -> meters.Figures:
        found: meters.Figures = {
            meters.PROCESS_ID.of(role): self._table.pids.get(role, 0) for role in self._table.roles
        }
        found[meters.RESTARTS] = self.restarts
        found[meters.EPOCH] = self._epoch
        found[meters.SERVES] = int(self._table.all_serve and self._is_ready)
        found[meters.BROKER] = self._name
        found[meters.NAME_SERVER] = self.public_name_server
        return found
