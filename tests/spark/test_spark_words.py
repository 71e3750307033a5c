"""Messages to Spark users: Kafka's names, modes, numbers, and no output after success
(Fault 36)."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from patience import patient
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql.types import StringType, StructField, StructType

from cometmq import Admin, Broker
from cometmq.cli.spark.shown import plain
from cometmq.spark import quiet
from cometmq.spark.encoding import check_columns
from cometmq.spark.jobs.lag import GroupLag
from cometmq.spark.jobs.replay import Replayed
from cometmq.spark.kafka import READ_COLUMNS, READ_OPTIONS, WRITE_COLUMNS, WRITE_OPTIONS
from cometmq.spark.options import OptionError, ReadOptions, options_of, parse
from cometmq.spark.schema import COLUMNS, SchemaError, columns_of
from cometmq.spark.sink_options import WriteOptions, parse_write

SMALL = {"mappedFileSizeCommitLog": 8 << 20, "mlockEnable": False}


# --- Kafka's names ---


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("maxOffsetsPerTrigger", "Kafka's maxOffsetsPerTrigger is maxMessagesPerTrigger here"),
        ("minOffsetsPerTrigger", "is minMessagesPerTrigger here"),
        ("maxoffsetspertrigger", "is maxMessagesPerTrigger here"),
        ("maxRecordsPerPartition", "is maxMessagesPerPartition here"),
        ("kafka.bootstrap.servers", "is namesrv here"),
        ("kafka.group.id", "is consumerGroup here"),
        ("groupIdPrefix", "is consumerGroup here"),
        ("failOnDataLoss", "is onMissing (fail, or skip for failOnDataLoss = false) here"),
        ("startingOffsetsByTimestamp", "is startingTimestamp here"),
        ("endingOffsetsByTimestamp", "is endingTimestamp here"),
        ("startingOffsetsByTimestampStrategy", "is onNoTimestamp here"),
        ("includeHeaders", "is the column `properties` here"),
        ("kafkaConsumer.pollTimeoutMs", "is timeoutMs here"),
        ("fetchOffset.numRetries", "is retries here"),
        ("fetchOffset.retryIntervalMs", "has no counterpart"),
        ("kafka.security.protocol", "has no counterpart"),
        ("maxBytesPerTriger", "did you mean maxBytesPerTrigger"),
    ],
)
def test_options_of_kafkas_source(name: str, text: str) -> None:
    with pytest.raises(OptionError) as raised:
        parse({"namesrv": "s", "subscribe": "t", name: "hunter2"})
    assert text in str(raised.value)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kafka.bootstrap.servers", "is namesrv here"),
        ("kafka.acks", "is delivery here"),
        ("kafka.transactional.id", "is sinkId here"),
        ("includeHeaders", "is the column `properties` here"),
        ("kafka.compression.type", "has no counterpart"),
        ("topics", "did you mean topic"),
    ],
)
def test_options_of_kafkas_sink(name: str, text: str) -> None:
    with pytest.raises(OptionError) as raised:
        parse_write({"namesrv": "s", "topic": "t", name: "x"})
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("names", "kind"), [(READ_OPTIONS, ReadOptions), (WRITE_OPTIONS, WriteOptions)]
)
def test_counterparts_are_there(names: dict[str, str], kind: type) -> None:
    """Each counterpart exists, and no name of ours is treated as Kafka's."""
    ours = {name for entry in options_of(kind).values() for name in entry.names}
    for name, counterpart in names.items():
        assert name == name.lower()
        assert not counterpart or counterpart.split()[0] in {*ours, "the"}
    assert not {name.lower() for name in ours} & set(names)


def test_columns_of_kafka() -> None:
    for name, counterpart in READ_COLUMNS.items():
        assert not counterpart or counterpart in COLUMNS
        with pytest.raises(SchemaError) as raised:
            columns_of(StructType([StructField(name, StringType())]))
        said = f"is {counterpart} here" if counterpart else "has no counterpart"
        assert f"there is no column {name!r}; Kafka's {name} {said}. There are" in str(raised.value)
    for name, counterpart in WRITE_COLUMNS.items():
        with pytest.raises(SchemaError) as raised:
            check_columns(StructType([StructField(name, StringType())]), has_topic=True)
        assert f"Kafka's {name} is {counterpart} here. There are" in str(raised.value)


# --- modes ---


@pytest.mark.slow
def test_modes(spark: SparkSession, tmp_path: Path) -> None:
    """Spark refuses a save without a mode; our error for the Overwrite that it suggests names
    Append as the only mode."""
    with Broker(tmp_path / "store", settings=SMALL) as broker:
        with Admin(broker.name_server) as admin:
            admin.create_topic("t", 1)
        writer = (
            spark.range(3)
            .selectExpr("cast(id as string) body")
            .write.format("cometmq")
            .options(namesrv=broker.name_server, topic="t")
        )
        with pytest.raises(AnalysisException, match="Append"):
            writer.save()
        with pytest.raises(AnalysisException, match=r"Append is the only mode here"):
            writer.mode("overwrite").save()
        writer.mode("append").save()


# --- numbers ---


def test_numbers_have_three_places() -> None:
    done = Replayed("/a", "t", 3, 7, 83.78423026400014, 0)
    assert plain(done)["seconds"] == 83.784
    row = GroupLag(1, "g", "t", "b", 0, 1, 2, 1, 0, 5, None, 1 / 3, None, 2 / 3, "ok")
    found = plain([row, {"deep": [row]}])
    assert (found[0]["rate_in"], found[0]["eta_s"], found[0]["rate_out"]) == (0.333, 0.667, None)
    assert found[1]["deep"][0]["rate_in"] == 0.333
    assert json.dumps(found[0]["lag_bytes"]) == "5"


# --- nothing after success ---


def raised_in(file: str, error: BaseException) -> BaseException:
    """Return an error whose last frame is in that file."""
    program = compile("def worker(error):\n    raise error\n", file, "exec")
    names: dict[str, Any] = {}
    exec(program, names)
    try:
        names["worker"](error)
    except BaseException as found:
        return found
    raise AssertionError


def printed(error: BaseException, capsys: pytest.CaptureFixture[str]) -> str:
    try:
        raise error
    except BaseException:
        quiet.Tracebacks().print_exc()
    return capsys.readouterr().err


DAEMON = "/x/pyspark.zip/pyspark/daemon.py"


def test_flush_to_a_closed_socket_is_not_reported(capsys: pytest.CaptureFixture[str]) -> None:
    def error_of(kind: type[BaseException], file: str = DAEMON) -> BaseException:
        error = raised_in(file, kind("it happened"))
        error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None
        return error

    for kind in (BrokenPipeError, ConnectionResetError):
        try:
            raised = error_of(kind)
            assert quiet._was_closed(raised)
        finally:
            capsys.readouterr()
    for other in (
        error_of(ValueError), error_of(OSError), error_of(BrokenPipeError, "/x/users.py"),
        error_of(BrokenPipeError, "/x/pyspark/worker.py"),
    ):  # fmt: skip
        assert not quiet._was_closed(other)
    after = error_of(BrokenPipeError)
    after.__context__ = RuntimeError("what a user's function raised")
    assert not quiet._was_closed(after)
    assert "it happened" in printed(error_of(ValueError), capsys)
    assert quiet.Tracebacks().format_exc is traceback.format_exc


def test_only_daemons_of_pyspark_are_kept_quiet() -> None:
    """The module `traceback` of a user's program is not replaced."""
    program = (
        "import sys, traceback, cometmq.spark.source\n"
        "assert sys.modules['__main__'].traceback is traceback\n"
        "import pyspark.daemon\n"
        "assert pyspark.daemon.traceback is traceback\n"
        "cometmq.spark.quiet.keep_quiet()\n"
        "assert pyspark.daemon.traceback is not traceback\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=patient(120))


TAKES = """
import sys
from cometmq.spark import session
name_server = sys.argv[1]
spark = session("local[2]", conf={
    "spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
})
spark.sparkContext.setLogLevel("ERROR")
frame = spark.range(20000).selectExpr("cast(id as string) body")
frame.write.format("cometmq").mode("append").options(namesrv=name_server, topic="t").save()
options = dict(namesrv=name_server, subscribe="t", isolation="dispatched", batchRows=10)
read = spark.read.format("cometmq").options(**options)
for _ in range(5):
    assert len(read.load().take(1)) == 1
    assert len(read.load().limit(2).collect()) == 2
read.load().show(1)
assert read.load().count() == 20000
print("well")
"""


@pytest.mark.slow
def test_nothing_is_said_after_success(tmp_path: Path) -> None:
    """Nothing is printed although Spark stops reading from its workers when it has enough rows."""
    with Broker(tmp_path / "store", settings=SMALL) as broker:
        with Admin(broker.name_server) as admin:
            admin.create_topic("t", 1)
        done = subprocess.run(
            [sys.executable, "-c", TAKES, broker.name_server],
            capture_output=True, text=True, timeout=patient(300), cwd=tmp_path, check=False,
        )  # fmt: skip
    assert done.stdout.endswith("well\n"), done.stderr
    # pyspark's own worker that searches for formats runs none of our code: its output is ignored.
    found = [line for line in done.stderr.splitlines() if "/daemon.py" in line]
    assert not [line for line in found if ".zip/" not in line], done.stderr
