"""Run pytest, then run failed tests once more, alone. No tests here.

    python tests/kit/again.py [--until SECONDS] [--list FILE] PYTEST_OPTION... [-- PATH...]

A test that fails beside others and passes alone has met a limit of this machine, or has a race.
The run passes, and its last lines list such tests: each has to be fixed. The run fails at once,
without a second one, on more failed tests than `FAILED_MAX`, errors of collection, a crash of a
worker or of pytest, internal errors, interruption, collected tests that never ran, and remaining
processes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import pytest
from outcomes import Outcomes
from patience import patient

ROOT: Final = Path(__file__).resolve().parents[2]
FAILED_MAX: Final = 5
WITHIN_S: Final = patient(300.0)  # least time limit of the second run
INTERRUPT_S: Final = patient(30.0)  # pytest ends what runs, and prints its closing lines
INTERRUPTED: Final = 130  # the exit status of a shell for that


def run_pytest(arguments: list[str], within_s: float | None = None) -> Outcomes:
    """Run pytest in a separate process that inherits our output.

    Args:
    within_s: Interrupt it after this time; None: never.
    """
    with tempfile.TemporaryDirectory(prefix="cometmq-outcomes-") as folder:
        path = Path(folder, "outcomes.json")
        command = [sys.executable, "-m", "pytest", "-p", "tests.kit.outcomes", f"--outcomes={path}"]
        process = subprocess.Popen([*command, *arguments], cwd=ROOT)
        late = ""
        try:
            status = process.wait(within_s)
        except subprocess.TimeoutExpired:
            late = f"it did not end within {within_s:.0f} s"
            status = _end(process)
        except KeyboardInterrupt:
            _wait_for_end(process)
            raise
        found = _read(path)
    if late:
        found.problems.insert(0, late)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        found.problems.append(f"pytest ended with exit status {status}")
    elif status and not found.failed and not found.problems:
        found.problems.append(f"pytest ended with exit status {status:d}, and no test failed")
    return found


def _end(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGINT)
    return _wait_for_end(process)


def _wait_for_end(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(INTERRUPT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _read(path: Path) -> Outcomes:
    try:
        return Outcomes(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        return Outcomes(problems=[f"pytest did not come to its end ({error})"])


def say(text: str = "") -> None:
    print(text, flush=True)


def fail(*problems: str) -> int:
    for each in problems:
        say(f"FAILED: {each}")
    return 1


def as_list(title: str, tests: list[str]) -> str:
    return "\n".join([f"{title} ({len(tests)}):", *(f"  {each}" for each in tests)])


def run(options: list[str], paths: list[str], until: float, listed: Path | None) -> int:
    """Do both runs and return the exit status.

    Args:
    until: Time limit of the second run, by the clock `monotonic`.
    listed: File that lists the tests that passed only alone; empty if there are none.
    """
    if listed:
        listed.write_text("")  # the file exists even if no test failed
    first = run_pytest([*options, *paths])
    if first.problems:
        return fail(*first.problems)
    if not first.failed:
        return 0
    count = len(first.failed)
    if count > FAILED_MAX:
        return fail(f"{count} tests: at most {FAILED_MAX} would run once more, so none did")
    say(f"\n--- what failed runs once more, alone ({count})")
    places = [f"{first.root}{os.sep}{each}" for each in first.failed]
    second = run_pytest([*options, "-n", "0", *places], max(WITHIN_S, until - time.monotonic()))
    say(f"\nfirst run:  {first.closing}\nsecond run: {second.closing}")
    passed = [each for each in first.failed if each in second.passed]
    left = [each for each in first.failed if each not in second.passed]
    if passed:
        shown = as_list("passed only when they ran alone, each is a fault to be fixed", passed)
        say(shown)
        if listed:
            listed.write_text(shown + "\n")
    if left:
        say(as_list("did not pass alone", left))
    if left or second.problems:
        return fail(*second.problems, *([f"{len(left)} tests, twice"] if left else []))
    return 0


def main(arguments: list[str]) -> int:
    before, paths = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        before, paths = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--until", type=float, default=0.0, help="Seconds from now that both runs may take."
    )
    parser.add_argument("--list", type=Path, help="File for tests that passed only alone.")
    ours, options = parser.parse_known_args(before)
    began = time.monotonic()
    try:
        return run(options, paths, began + ours.until, ours.list)
    except KeyboardInterrupt:
        fail(f"interrupted after {time.monotonic() - began:.0f} s")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
