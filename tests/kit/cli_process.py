"""The command line in processes of its own, as a shell would run it. No tests here."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forked
from patience import patient

COMMAND = (sys.executable, "-m", "cometmq")
IMPORTED = (
    "cometmq.cli.messages cometmq.cli.topics cometmq.cli.groups cometmq.cli.stat "
    "cometmq.client.consumer cometmq.client.aio"
)
TIMEOUT_S = patient(240)  # Spark beside other tests


def environment(**more: str) -> dict[str, str]:
    """The test run's own, without settings of a broker."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("COMETMQ_")}
    return {**kept, **more}


def run(
    *arguments: str, input: bytes = b"", cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[bytes]:
    """One command to its end.

    It is forked from a process that has the command line imported, see forked.py; or started, where
    its folder or what an interpreter looks at matters, or Spark is to be.
    """
    its = environment(**variables)
    command = [*COMMAND, *arguments]
    if cwd or "spark" in arguments[:1] or any(each.startswith("PYTHON") for each in variables):
        return subprocess.run(
            command, input=input, capture_output=True, timeout=TIMEOUT_S, cwd=cwd, env=its
        )
    errors, theirs = os.pipe()
    try:
        process = forked.fork("cometmq.__main__", theirs, its, arguments, IMPORTED)
    finally:
        os.close(theirs)
    assert process.stdin is not None
    assert process.stdout is not None
    with open(errors, "rb") as said, process.stdout as printed, ThreadPoolExecutor(2) as pool:
        out, err = pool.submit(printed.read), pool.submit(said.read)
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin as given:
                given.write(input)
            code = process.wait(TIMEOUT_S)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(command, code, out.result(), err.result())


def output_of(*arguments: str, input: bytes = b"", **variables: str) -> bytes:
    """The standard output of a command that must succeed."""
    done = run(*arguments, input=input, **variables)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def json_of(*arguments: str, input: bytes = b"", **variables: str) -> Any:
    return json.loads(output_of(*arguments, "-o", "json", input=input, **variables))


def start(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=cwd,
        start_new_session=True,
        env=environment(**variables),
    )


def interrupt(process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    """Ctrl-C: exit code, what it still printed, and what it said."""
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, out, err


class ServerProcess:
    """`cometmq broker` or `cometmq namesrv`; `ready` is the line it prints."""

    def __init__(self, *arguments: str, cwd: Path | None = None) -> None:
        self.process = start(*arguments, "-o", "json", cwd=cwd)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            _, said = self.process.communicate(timeout=TIMEOUT_S)
            raise AssertionError(f"not ready: {said.decode()}")
        self.ready: dict[str, Any] = json.loads(line)

    @property
    def name_server(self) -> str:
        return str(self.ready["name_server"])

    def stop(self) -> tuple[int, str]:
        """End it in order: exit code, and what it said."""
        self.process.send_signal(signal.SIGTERM)
        _, said = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, said.decode()

    def close(self) -> None:
        if self.process.poll() is None:
            self.stop()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


@contextlib.contextmanager
def serving(*arguments: str, cwd: Path | None = None) -> Iterator[ServerProcess]:
    server = ServerProcess(*arguments, cwd=cwd)
    try:
        yield server
    finally:
        server.close()
