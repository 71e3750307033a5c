"""What campaigns share: their registry, what they are asked for, and the tally they add to.

    @campaign("kills", "kill -9 of every process")
    def random_kills(options: Options) -> Iterator[Tally]:
        while not options.over:
            ...
            yield Tally(campaign="kills", ...)      # each is appended to the tally as it comes

A run adds lines and changes none, so figures accumulate over runs, and each failure can be run
again by its seed and commit.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
from paths import ROOT

TALLY: Final = Path(__file__).with_name("tally.jsonl")


class Tally(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One line of the tally: so many faults of one kind against one target in one run.

    outcome: "ok", or what the checker found in the whole run.
    acknowledged, lost, duplicates: messages sent between such a fault and the next one.
    recover_ms: by fault, the longest time without an acknowledgement.
    counts: what else a campaign counts.
    """

    campaign: str
    seed: int
    commit: str
    date: str
    fault: str
    target: str
    point: str = ""
    flush: str = ""
    faults: int = 0
    acknowledged: int = 0
    lost: int = 0
    duplicates: int = 0
    recover_ms: list[float] = []
    counts: dict[str, int] = {}
    outcome: str = "ok"


@dataclass
class Options:
    """What was asked for.

    Args:
        faults: how many in all; a campaign may round.
        minutes: no fault is begun later.
        only: targets, points or kinds of fault; empty = all.
        flush: "sync", "async", or "both" in turn.
        stop_s: how long a process is stopped; 0: 1 to 5 s.
        place: where stores are made; those of failed runs stay.
    """

    faults: int = 100
    seed: int = 0
    minutes: float = 10.0
    only: tuple[str, ...] = ()
    flush: str = "both"
    stop_s: float = 0.0
    place: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    quiet: bool = False
    failures: list[str] = field(default_factory=list)
    stopped: bool = False  # Ctrl-C: end after the fault under way

    def __post_init__(self) -> None:
        self._until = time.monotonic() + self.minutes * 60

    @property
    def over(self) -> bool:
        return self.stopped or bool(self.failures) or time.monotonic() > self._until

    def wants(self, target: str) -> bool:
        return not self.only or target in self.only

    def sync_of(self, number: int) -> bool:
        return self.flush == "sync" or (self.flush == "both" and number % 2 == 1)

    def folder(self, name: str) -> Path:
        """A new one, for one round."""
        return Path(tempfile.mkdtemp(prefix=f"cometmq-{name}-", dir=self.place))

    def failed(self, text: str) -> None:
        self.failures.append(text)

    def say(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)

    def progress(self, text: str) -> None:
        """Overwrites itself on a terminal; nothing elsewhere."""
        if not self.quiet and sys.stdout.isatty():
            print(f"\r{text}\033[K\r", end="", flush=True)


Campaign = Callable[[Options], Iterator[Tally]]
CAMPAIGNS: Final[dict[str, Campaign]] = {}
HELP: Final[dict[str, str]] = {}


def campaign(name: str, help_: str) -> Callable[[Campaign], Campaign]:
    """Register it under a name; the module has to be named in __main__.MODULES."""

    def register(function: Campaign) -> Campaign:
        CAMPAIGNS[name], HELP[name] = function, help_
        return function

    return register


@cache
def commit_under_test() -> str:
    """The commit, with a + if tracked files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git(
            "status", "--porcelain", "--untracked-files=no", "--", ":!tests/*/tally.jsonl"
        )
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


def new_tally(
    name: str, seed: int, sync: bool, fault: str, target: str, point: str = "", outcome: str = "ok"
) -> Tally:
    return Tally(
        campaign=name,
        seed=seed,
        commit=commit_under_test(),
        date=today(),
        flush="SYNC_FLUSH" if sync else "ASYNC_FLUSH",
        fault=fault,
        target=target,
        point=point,
        outcome=outcome,
    )


# --- the tally ------------------------------------------------------------------------------------


def append_tally(line: Tally, path: Path = TALLY) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def read_tally(path: Path = TALLY) -> list[Tally]:
    if not path.exists():
        return []
    decoder = msgspec.json.Decoder(Tally)
    return [decoder.decode(line) for line in path.read_bytes().splitlines() if line]


def report(lines: Iterable[Tally]) -> str:
    """Totals by campaign, fault, target and flush mode, as a Markdown table."""
    groups: dict[tuple[str, str, str, str], list[Tally]] = defaultdict(list)
    for line in lines:
        groups[line.campaign, line.fault, line.target, line.flush].append(line)
    rows = [
        "| campaign | fault | target | flush | faults | acknowledged | lost | duplicates "
        "| recovered in ms: p50 / p99 / max | failed runs |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for key, found in sorted(groups.items()):
        rows.append(_row(key, found))
    commits = sorted({line.commit for group in groups.values() for line in group})
    return "\n".join([*rows, "", f"Commits: {', '.join(commits) or 'none'}."])


def _row(key: tuple[str, str, str, str], found: list[Tally]) -> str:
    times = sorted(ms for line in found for ms in line.recover_ms)
    shown = " / ".join(f"{percentile(times, part):.0f}" for part in (50, 99, 100)) if times else "-"
    numbers = [
        sum(getattr(line, name) for line in found)
        for name in ("faults", "acknowledged", "lost", "duplicates")
    ]
    runs = {(line.seed, line.commit, line.date) for line in found if line.outcome != "ok"}
    cells = [*key, *(f"{number:,}" for number in numbers), shown, str(len(runs))]
    return "| " + " | ".join(cells) + " |"


def percentile(ordered: list[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * part / 100))] if ordered else 0.0
