"""`cometmq spark doctor`: what Spark needs of this machine, one thing after the other."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from cometmq.cli.options import output_option
from cometmq.cli.output import print_rows
from cometmq.cli.spark.running import EXIT_FINDINGS, job, session_of, session_options, text_of
from cometmq.protocol.version import install

JAVA_MIN: Final = 17
PROBE_TIMEOUT_S: Final = 60
OK, NOTE, WRONG = "ok", "note", "wrong"
INSTALL: Final = install("spark")
NEEDED: Final = ("pyspark", "pyarrow", "cometmq")

# What a worker's interpreter has: from a directory that tells it nothing, and as Spark looks for
# formats. A neighbour pyspark_* that raises hides all of them.
PROBE: Final = """
import importlib, importlib.metadata, json, pkgutil, platform
def attempt(name):
    try:
        importlib.import_module(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
names = [each.name for each in pkgutil.iter_modules() if each.name.startswith("pyspark_")]
packages = {}
for name in ("pyspark", "pyarrow", "cometmq"):
    wrong = attempt("cometmq.shm.kernel.columns" if name == "cometmq" else name)
    packages[name] = [wrong, None if wrong else importlib.metadata.version(name)]
print(json.dumps({"python": platform.python_version(), "packages": packages,
                  "formats": {name: attempt(name) for name in names}}))
"""


class Check(NamedTuple):
    check: str
    state: str
    says: str


def _java() -> Check:
    home = os.environ.get("JAVA_HOME")
    command = str(Path(home, "bin", "java")) if home else shutil.which("java")
    remedy = f"Spark needs Java {JAVA_MIN}: set JAVA_HOME, or PATH"
    if command is None:
        return Check("java", WRONG, f"there is none; {remedy}")
    try:
        said = _run([command, "-version"])
    except (OSError, subprocess.SubprocessError) as error:
        return Check("java", WRONG, f"{command} does not run: {error}; {remedy}")
    found = re.search(r'version "(\d+)[^"]*"', said.stderr)
    if said.returncode or found is None:
        return Check("java", WRONG, f"{command} says no version; {remedy}")
    state = OK if int(found[1]) >= JAVA_MIN else WRONG
    return Check("java", state, f"{found[0]}, {command}" + ("" if state == OK else f"; {remedy}"))


def _worker() -> Iterator[Check]:
    worker = os.environ.get("PYSPARK_PYTHON", sys.executable)
    try:
        said = _run([worker, "-c", PROBE])
    except (OSError, subprocess.SubprocessError) as error:
        yield Check("worker", WRONG, f"PYSPARK_PYTHON, {worker}, does not run: {error}")
        return
    if said.returncode:
        yield Check("worker", WRONG, f"{worker}: {said.stderr.strip().splitlines()[-1]}")
        return
    found: dict[str, Any] = json.loads(said.stdout)
    ours = "{}.{}".format(*sys.version_info)
    same = found["python"].startswith(f"{ours}.")
    text = f"Python {found['python']}, {worker}"
    yield Check("worker", OK if same else WRONG, text if same else f"{text}; the driver has {ours}")
    for name in NEEDED:
        wrong, version = found["packages"][name]
        yield Check(name, WRONG if wrong else OK, f"{wrong}; {INSTALL}" if wrong else version)
    yield _format(found["formats"])


def _format(formats: dict[str, str | None]) -> Check:
    broken = [f"{name} ({wrong})" for name, wrong in formats.items() if wrong]
    by_hand = "call cometmq.spark.register(spark)"
    if broken:
        text = f"Spark finds no format by itself, as these fail: {', '.join(broken)}; {by_hand}"
        return Check("format", NOTE, text)
    if "pyspark_cometmq" not in formats:
        text = f"Spark does not find it by itself, as of an editable install; {by_hand}"
        return Check("format", NOTE, text)
    return Check("format", OK, "Spark finds it by itself")


def _round_trip(master: str, driver_memory: str, conf: tuple[str, ...]) -> Check:
    """One row through a broker of its own, and back."""
    from cometmq import Broker
    from cometmq.client import Admin

    small = {"mappedFileSizeCommitLog": 8 << 20, "mlockEnable": False}
    name = "round trip"
    try:
        with tempfile.TemporaryDirectory() as folder, Broker(folder, settings=small) as broker:
            with Admin(broker.name_server) as admin:
                admin.create_topic("doctor", 1)
            spark = session_of(master, driver_memory, conf)
            row = spark.range(1).selectExpr("'well' body", "0 queue_id")
            given = {"namesrv": broker.name_server, "topic": "doctor"}
            row.write.format("cometmq").mode("append").options(**given).save()
            with broker.consumer("doctor", "doctor") as consumer:
                consumer.poll(1, timeout_s=10)  # by then it is in its queue
            back = {"namesrv": broker.name_server, "subscribe": "doctor", "isolation": "dispatched"}
            found = spark.read.format("cometmq").options(**back).load().select("body").collect()
            spark.stop()
    except Exception as error:
        return Check(name, WRONG, text_of(error) or f"{type(error).__name__}: {error}")
    bodies = [bytes(each.body) for each in found]
    if bodies != [b"well"]:
        return Check(name, WRONG, f"one row was written, and {bodies} came back")
    return Check(name, OK, f"one row to a broker and back, {master}")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, cwd="/", timeout=PROBE_TIMEOUT_S, check=False
    )


@click.command()
@session_options
@output_option
@job
def doctor(master: str, driver_memory: str, conf: tuple[str, ...], output: str) -> None:
    """Look for what Spark needs, and send one row to a broker and back.

    Java, the workers' interpreter and its packages, whether Spark finds the format by itself. The
    broker is one of its own, on this machine. Ends with exit code 1 if something is wrong.

    \b
    cometmq spark doctor
    """
    found = [_java(), *_worker()]
    if any(each.state == WRONG for each in found):
        found.append(Check("round trip", NOTE, "not tried"))
    else:
        found.append(_round_trip(master, driver_memory, conf))
    print_rows([each._asdict() for each in found], output)
    if any(each.state == WRONG for each in found):
        raise SystemExit(EXIT_FINDINGS)
