"""A Spark standalone cluster of the pip distribution, and drivers for it. No tests here.

    with Cluster(python, folder) as cluster, cluster.driver() as driver:
        driver.begin("count", ...)
        rows = driver.wait_for("rows")

Every process is in a process group of its own and has the run's mark in its environment, by which
the rest, executors and Python workers, are found at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import jvm
import psutil
from family import MARK, RUN, left_behind
from patience import patient

SPARK_MARK: Final = f"{RUN}/spark-cluster"
DRIVER: Final = Path(__file__).with_name("cluster_driver.py")
EXECUTOR: Final = "CoarseGrainedExecutorBackend"
START_S: Final = patient(90)  # of a JVM, on a machine that has other work to do
STEP_S: Final = patient(240)  # of a driver, from one event to the next
SPARK_JVM: Final = " ".join(jvm.SPARK)
CONF: Final[Mapping[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.executor.extraJavaOptions": SPARK_JVM,
    "spark.executor.memory": "512m",
    # To compile code for each query takes longer than to interpret it for some rows.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # No task before all executors are there.
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
    "spark.sql.shuffle.partitions": "2",
}


class Process:
    """One that leads a group, whose lines on standard output are waited for."""

    def __init__(
        self, command: Sequence[object], log: Path, environ: Mapping[str, str], cwd: Path
    ) -> None:
        self.log_path = log
        self._lines: queue.Queue[str | None] = queue.Queue()
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [str(each) for each in command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                start_new_session=True, env=environ, cwd=cwd,
            )  # fmt: skip
        self.pid = self._process.pid
        self._drain = threading.Thread(target=self._read)
        self._drain.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self.log_path.open("a") as log:
            for line in self._process.stdout:
                log.write(line)
                log.flush()
                self._lines.put(line)
        self._lines.put(None)

    def line(self, timeout_s: float) -> str | None:
        """The next one; None at the end."""
        try:
            return self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"silent for {timeout_s} s:\n{self.log()}") from None

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")[-8000:]

    def kill(self) -> None:
        """kill -9 of the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._drain.join()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has not read all that it was told
            self._process.stdin.close()
        self._process.stdout.close()


class Daemon(Process):
    """Master or worker."""

    def wait_for(self, pattern: str) -> re.Match[str]:
        while (line := self.line(START_S)) is not None:
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"it ended before {pattern!r}:\n{self.log()}")


class Driver(Process):
    """A Python process with a Spark session, which does one task after the other; see
    cluster_driver."""

    def begin(self, task: str, **told: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps([task, told]), file=self._process.stdin, flush=True)

    def end(self, timeout_s: float) -> int:
        """After its tasks; its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(timeout_s)

    def wait_for(self, event: str) -> Any:
        """What it says of the next such event; those before are passed over."""
        while (line := self.line(STEP_S)) is not None:
            name, value = json.loads(line)
            if name == event:
                return value
        raise AssertionError(f"it ended before {event!r}:\n{self.log()}")

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Cluster:
    """One master and two workers of a core each, on ports that are free."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python = python
        self.folder = folder
        self._daemons: list[Daemon] = []
        self._drivers = 0
        self._environ = {
            **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": SPARK_JVM,
            "PYSPARK_PYTHON": str(python),
            MARK: SPARK_MARK,
        }

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        master = self._daemon("master", "master.Master")
        self.url = master.wait_for(r"Starting Spark master at (spark://\S+)")[1]
        workers = [
            self._daemon(name, "worker.Worker", "-c", "1", "-m", "1g", self.url)
            for name in ("worker-1", "worker-2")
        ]
        for worker in workers:
            worker.wait_for("Successfully registered with master")

    def _daemon(self, name: str, kind: str, *arguments: str) -> Daemon:
        home = self.folder / name
        home.mkdir()
        place = [self._spark_class(), f"org.apache.spark.deploy.{kind}", "--host", "127.0.0.1"]
        command = [*place, "--port", "0", "--webui-port", "0", *arguments]
        environ = {**self._environ, "SPARK_WORKER_DIR": str(home)}
        # Their own log goes to standard error.
        daemon = Daemon(["sh", "-c", 'exec "$@" 2>&1', "sh", *command], home / "log", environ, home)
        self._daemons.append(daemon)
        return daemon

    def _spark_class(self) -> Path:
        import pyspark

        return Path(pyspark.__file__).with_name("bin") / "spark-class"

    def driver(self, cores: int = 2) -> Driver:
        """A driver, with an executor for each core."""
        self._drivers += 1
        home = self.folder / f"driver-{self._drivers}"
        home.mkdir()
        conf = {**CONF, "spark.cores.max": str(cores)}
        told = json.dumps({"master": self.url, "conf": conf})
        return Driver([self.python, DRIVER, told], home / "log", self._environ, home)

    def executors(self) -> list[psutil.Process]:
        return [each for each in left_behind(SPARK_MARK) if EXECUTOR in " ".join(each.cmdline())]

    def close(self) -> None:
        """End everything, whatever it is at."""
        for daemon in self._daemons:
            daemon.kill()
        left = left_behind(SPARK_MARK)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, patient(20))
