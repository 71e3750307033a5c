"""A session: workloads on several systems in turns, and the folder that keeps what came of them."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec

from cometmq.bench import machine, systems
from cometmq.bench.cases import Context
from cometmq.bench.extra import BenchError
from cometmq.bench.results import Line, Results
from cometmq.bench.workloads import WORKLOADS, controls
from cometmq.cli.output import hint, warn

RESULTS: Final = "results.json"
LOGS: Final = "raw"
OMB: Final = "omb"


@dataclass
class Session:
    """What is measured, and where it goes.

    Args:
        out: the bundle's folder.
        names: of the systems; they take turns within a round.
    """

    out: Path
    names: Sequence[str]
    ctx: Context
    rounds: int
    settings: dict[str, object] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    omb: list[dict[str, Any]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def take_over(self, before: Results, workloads: Sequence[str]) -> None:
        """Go on with a bundle: all that it has but of these workloads, which are measured anew."""
        self.lines = [
            line for line in before.lines
            if line.workload not in workloads and line.beside not in workloads
        ]  # fmt: skip
        self.omb = [] if OMB in workloads else before.omb
        self.versions = dict(before.versions)

    def usable(self) -> list[str]:
        """The systems that can run here. Says which cannot, and why."""
        found = []
        for name in self.names:
            try:
                system = systems.usable(name)
            except BenchError as error:
                self.missing[name] = str(error)
                warn(str(error))
                continue
            self.versions[name] = system.version()
            found.append(name)
        if not found:
            raise BenchError("none of the systems can run here")
        return found

    def make(self, name: str) -> systems.System:
        made = systems.system(name)
        if name == systems.OWN and self.settings:
            made.settings.update(self.settings)  # type: ignore[attr-defined]
        return made

    def run(self, workloads: Sequence[str], *, with_controls: bool = True) -> None:
        """Round by round, and in a round system by system: A-B-A-B."""
        self.ctx.plan()  # what cannot be asked for is told before anything starts
        names = self.usable()
        for workload in workloads:
            for number in range(self.rounds):
                ctx = replace(self.ctx, round=number)
                hint(f"{workload}, round {number + 1} of {self.rounds}")
                if with_controls:
                    self.lines += controls(ctx, workload)
                for name in names:
                    self.lines += measured(workload, ctx, self.make(name))
                self.save()

    def results(self) -> Results:
        return Results(
            machine=machine.facts(self.ctx.folder),
            run=machine.this_run(sys.argv[2:]) | {"rounds": self.rounds},
            versions=self.versions | library_versions(),
            lines=self.lines,
            omb=self.omb,
            missing=self.missing,
        )

    def save(self) -> Results:
        found = self.results()
        text = msgspec.json.format(msgspec.json.encode(found))
        (self.out / RESULTS).write_bytes(text + b"\n")
        return found


def measured(workload: str, ctx: Context, system: systems.System) -> list[Line]:
    """Its lines. A system that cannot do it at all gets one that says so."""
    from cometmq.bench.cases import Case

    try:
        return WORKLOADS[workload](ctx, system)
    except (BenchError, OSError) as error:
        client = system.clients[0]
        return [Case(ctx, workload, system).failed(workload, ctx.plan(client=client), error)]


def library_versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("pyzmq", "hdrhistogram", "confluent-kafka", "redis", "nats-py"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@contextmanager
def folders(out: Path | None, store: Path | None) -> Iterator[tuple[Path, Path]]:
    """(the bundle, where stores lie). Temporary ones are removed; SIGTERM is a Ctrl-C here."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    scratch = Path(tempfile.mkdtemp(prefix="cometmq-bench-", dir=store))
    try:
        bundle = out or scratch / "bundle"
        (bundle / LOGS).mkdir(parents=True, exist_ok=True)
        yield bundle, scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
