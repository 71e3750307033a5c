"""Messages for later, transactions, names and keys as the work of a rig's clients.

The rules are those of timed_checker.py.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

import msgspec
from fault.checker import Rules, Verdict, check, stored_in
from fault.history import Op, read_histories
from fault.reading import Values
from fault.rig import SETTINGS, Acks
from fault.timed_checker import check_timed, expected, seen_in, without_dark
from fault.timed_clients import KEYED, MODULE, NAMED, TIMED, TX, TX_GROUP
from fault.work import Work
from fault.workload import Workload
from patience import patient

NAME: Final = "writer-1"
NO_PROGRESS_S: Final = patient(90.0)
TOGETHER_S: Final = 0.3  # two producers of one name


class TimedWork(Work):
    """See the module."""

    topics: ClassVar[Mapping[str, int]] = {TIMED: 2, TX: 2, NAMED: 3, KEYED: 3}
    settings: ClassVar[Mapping[str, object]] = {
        **SETTINGS,
        "mappedFileSizeTimerLog": 8_192,
        "transactionTimeOut": 500,
        "transactionCheckInterval": 500,
        "transactionCheckMax": 100_000,  # how long a broker is away is not to matter
    }

    def clients(
        self, name_server: str, folder: Path, *, seed: int, transport: str = "auto"
    ) -> Workload:
        work = Workload(
            name_server, folder, seed=seed, producers=(), groups=(), watch=False,
            transport=transport,
        )  # fmt: skip
        plain = msgspec.structs.replace(
            work.spec("timer"), module=MODULE, pace_s=0.02, size_max=2_000, queues=3,
            topics=(NAMED,),
        )  # fmt: skip
        of = partial(msgspec.structs.replace, plain)
        work.first += [
            plain, of(kind="shop", timeout_s=3.0), of(kind="shop", timeout_s=3.0),
            of(kind="named", name=NAME), of(kind="keyed"), of(kind="keyed", timeout_s=1.0),
            of(kind="checker", group=TX_GROUP),
        ]  # fmt: skip
        return work

    def drain(self, clients: Workload, values: Values) -> None:
        """Wait until all scheduled and committed messages are delivered. Raise if they are not: a
        late message would look lost to the checker (fault 39)."""
        wanted = {op.value for op in expected(without_dark(read_histories(clients.folder)))}
        left, since = -1, time.monotonic()
        while missing := self._missing(wanted, values):
            if len(missing) != left:
                left, since = len(missing), time.monotonic()
            clients.check_alive()
            assert time.monotonic() - since < NO_PROGRESS_S, (
                f"{left} of {len(wanted)} have not come, and none in {NO_PROGRESS_S:g} s: late, or "
                f"lost; such as {sorted(missing)[:5]}"
            )
            time.sleep(0.2)  # a queue can be waited for, not two of them

    def _missing(self, wanted: set[str], values: Values) -> set[str]:
        """Return the wanted messages that are not delivered yet."""
        come = [values.of(topic, self.topics[topic]) for topic in (TIMED, TX)]
        return wanted.difference(*come)

    def judge(self, ops: Sequence[Op], store: Path) -> Verdict:
        ops = without_dark(ops)
        # What was sent, and not scheduled or the like, is for the checker of plain messages.
        sent = [op for op in ops if op.f != "read" or op.topic == NAMED]
        stored = [one for one in stored_in(store) if one.topic == NAMED]
        verdict = check(sent, stored, Rules())
        check_timed(verdict, ops, seen_in(store))
        return verdict


def supersede(clients: Workload, acks: Acks, chance: random.Random, timeout_s: float) -> None:
    """Another process takes the name of one that goes on for a while, and then ends."""
    (older,) = clients.of_kind("named")
    clients.fault("supersede", "producer")
    newer = clients.start(older.spec)
    behind = acks.wait_for_each([newer.spec.p], timeout_s)
    assert not behind, f"{behind} got nothing stored"
    time.sleep(chance.random() * TOGETHER_S)
    clients.stop([older])
