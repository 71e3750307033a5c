"""The command line without a broker: names, help, settings, and the parts of its commands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import pytest
from cli_process import environment, run

import cometmq
import cometmq.errors
from cometmq.cli import formatting, positions
from cometmq.cli.broker import load, with_store_of_port
from cometmq.cli.command_line import cli
from cometmq.cli.command_line import run as run_here
from cometmq.cli.demo_text import collect
from cometmq.cli.formatting import compile_format
from cometmq.cli.options import LazyGroup
from cometmq.cli.positions import Offset
from cometmq.cli.sending import LineSource, extractor
from cometmq.protocol.client_timeout import TIMEOUT_VARIABLE
from cometmq.protocol.errors import BY_CODE

ROCKETMQ_CONF = """\
# Licensed to the Apache Software Foundation (ASF) under one or more
brokerClusterName = DefaultCluster
brokerName = broker-a
brokerId = 0
deleteWhen = 04
fileReservedTime = 48
brokerRole = ASYNC_MASTER
flushDiskType = ASYNC_FLUSH
sendMessageThreadPoolNums = 16
traceTopicEnable = true
flushDisk = SYNC
"""


# --- public names ---------------------------------------------------------------------------------


def test_what_is_promised_is_what_is_visible() -> None:
    visible = {name for name in dir(cometmq) if not name.startswith("_")} | {"__version__"}
    modules = {name for name in visible if isinstance(getattr(cometmq, name), type(os))}
    imported = {"annotations", "import_module", "TYPE_CHECKING", "Any", "Final"}
    assert visible - (modules - {"errors"}) - imported == set(cometmq.__all__)
    assert cometmq.__all__ == sorted(cometmq.__all__)


def test_every_public_name_can_be_had() -> None:
    for name in cometmq.__all__:
        assert getattr(cometmq, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Prodcuer'"):
        cometmq.Prodcuer  # noqa: B018


def test_every_error_is_public() -> None:
    expected = {error.__name__ for error in BY_CODE.values()}
    assert set(cometmq.errors.__all__) == expected


@pytest.mark.parametrize("code", ["import cometmq", "import cometmq.cli.command_line"])
def test_importing_brings_in_nothing_slow(code: str) -> None:
    slow = "{'zmq', 'rich', 'psutil', 'pykka', 'msgspec', 'cometmq.client'}"
    check = f"{code}\nimport sys\nprint(sorted({slow} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, check=True)
    assert done.stdout == b"[]\n"


# --- the tree of commands -------------------------------------------------------------------------


def commands(group: LazyGroup, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name in group.entries:
        found = group.get_command(click.Context(group), name)
        yield (*path, name)
        if isinstance(found, LazyGroup):
            yield from commands(found, (*path, name))


COMMANDS = sorted(commands(cli))  # type: ignore[arg-type]


def command_at(path: tuple[str, ...]) -> tuple[LazyGroup, click.Command]:
    group: LazyGroup = cli  # type: ignore[assignment]
    for name in path[:-1]:
        group = group.get_command(click.Context(group), name)  # type: ignore[assignment]
    found = group.get_command(click.Context(group), path[-1])
    assert found is not None
    return group, found


@pytest.mark.parametrize("path", COMMANDS, ids="-".join)
def test_help(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here([*path, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Usage: cometmq " + " ".join(path) in shown
    group, command = command_at(path)
    first_line = (command.help or "").partition("\n")[0]
    assert group.entries[path[-1]][2] == first_line, "the group's help says the same"
    assert first_line in " ".join(shown.split())


def test_the_help_documents_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(["--help"]) == 0
    assert "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 nobody" in capsys.readouterr().out


@pytest.mark.parametrize(("said", "meant"), [("brokr", "broker"), ("tail", "msg tail")])
def test_an_unknown_command_names_the_nearest(
    said: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here([said]) == 2
    assert f'did you mean "{meant}"?' in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["msg", "send"],
        ["msg", "send", "-t", "T", "--tags", "a", "--tags-from", "1"],
        ["msg", "send", "-t", "T", "--tags-from", "("],
        ["msg", "send", "-t", "T", "--tags-from", "0"],
        ["msg", "send", "-t", "T", "-p", "novalue"],
        ["msg", "send", "-t", "T", "--queue", "1", "-k", "1"],
        ["msg", "send", "-t", "T", "--queue", "1", "--ordering-key", "a"],
        ["msg", "send", "-t", "T", "--ordering-key", "a", "-k", "1"],
        ["msg", "tail", "-t", "T", "-f", "%z"],
        ["msg", "tail", "-t", "T", "-f", "%s", "-o", "json"],
        ["msg", "tail", "-t", "T", "--from", "yesterday"],
        ["msg", "tail", "-t", "T", "-g", "g", "--until-end"],
        ["msg", "tail", "-t", "T", "-g", "g", "--from", "7"],
        ["msg", "get", "xyz"],
        ["group", "reset", "g", "-t", "T", "--to", "7"],
        ["broker", "--port", "70000"],
    ],
    ids=" ".join,
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(arguments) == 2
    said = capsys.readouterr()
    assert "Error: " in said.err
    assert said.out == ""


def test_nobody_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0.5")
    assert run_here(["topic", "list", "--name-server", "127.0.0.1:1"]) == 3
    said = capsys.readouterr()
    assert said.err.startswith("Error: no name server answers at tcp://127.0.0.1:1")
    assert "Traceback" not in said.err


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(["msg", "send", "-t", "T", "/nowhere/x.log"]) == 1
    assert capsys.readouterr().err == "Error: /nowhere/x.log: No such file or directory\n"


def test_a_folder_is_no_file_of_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_here(["msg", "send", "-t", "T", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith(f"Error: {tmp_path}: Is a directory\n")


# --- settings -------------------------------------------------------------------------------------


def test_a_broker_conf_of_rocketmq(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conf = tmp_path / "broker.conf"
    conf.write_text(ROCKETMQ_CONF)
    assert run_here(["config", "show", "-c", str(conf), "--changed"]) == 0
    said = capsys.readouterr()
    assert "brokerName\tbroker-a\tbroker-a\tbroker.conf, line 3\n" in said.out
    assert "fileReservedTime\t48\t2d\tbroker.conf, line 6\n" in said.out
    assert said.err.splitlines() == [
        "Warning: broker.conf, line 10: traceTopicEnable = true: messages are not traced yet",
        "Warning: broker.conf, line 9: sendMessageThreadPoolNums: RocketMQ key, "
        "not used by CometMQ",
        'Warning: broker.conf, line 11: unknown key "flushDisk", ignored; '
        "did you mean flushDiskType?",
    ]


def test_config_show_as_json() -> None:
    done = run(
        "config", "show", "--changed", "-o", "json", COMETMQ_PORT="7", COMETMQ_NAME_SERVER="x:1"
    )
    assert done.stdout == (
        b'[{"key": "port", "value": "7", "readable": "7", "set_by": "COMETMQ_PORT"}]\n'
    )
    assert done.stderr == b"", "the command line's own variable is no setting"


def test_config_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(["config", "explain", "COMETMQ_FLUSH_DISK_TYPE"]) == 0
    assert "key\tflushDiskType\n" in capsys.readouterr().out
    assert run_here(["config", "explain"]) == 0
    assert capsys.readouterr().out.startswith("key\tdefault\tmeaning\nbrokerClusterName\t")
    assert run_here(["config", "explain", "flushDiskTyp"]) == 1
    assert "did you mean flushDiskType?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pairs", "store"),
    [
        ([], "store"),
        (["port=9876"], "store"),
        (["port=0"], "store"),
        (["port=9900"], "store-9900"),
        (["port=9900", "storePathRootDir=mine"], "mine"),
    ],
)
def test_another_port_has_another_store(
    pairs: list[str], store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    assert with_store_of_port(load(None, pairs)).store_path_root_dir == Path(store)


def test_settings_that_cannot_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(["broker", "--set", "flushIntervalCommitLog=0"]) == 1
    expected = "Error: flushIntervalCommitLog = 0: must be at least 1 (--set)\n"
    assert capsys.readouterr().err == expected


# --- parts ----------------------------------------------------------------------------------------


LINE = b"081109 203615 148 INFO dfs.DataNode$PacketResponder: block blk_-38 terminating"


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        ("4", "INFO"),
        ("5", "dfs.DataNode$PacketResponder"),
        ("99", None),
        (r"(blk_-?\d+)", "blk_-38"),
        (r"dfs\.(\w+)", "DataNode"),
        (r"\bINFO\b", "INFO"),
        ("nothing", None),
        ("(x)?INFO", None),
    ],
)
def test_values_out_of_lines(spec: str, value: str | None) -> None:
    extract = extractor(spec)
    assert extract is not None
    assert extract(LINE) == value


def test_lines_keep_their_bytes(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"a\r\n\n\xff\x00b\nlast")
    two.write_bytes(b"next\n")
    source = LineSource([str(one), str(two)])
    assert source.total_bytes() == 17
    assert [line for lines in source for line in lines if line] == [
        b"a\r", b"\xff\x00b", b"last", b"next",
    ]  # fmt: skip
    assert source.read_bytes == 17


def test_a_line_longer_than_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cometmq.cli.sending.READ_BYTES", 4)
    file = tmp_path / "long"
    file.write_bytes(b"0123456789\nx\n" + b"y" * 9)
    lines = [line for part in LineSource([str(file)]) for line in part if line]
    assert lines == [b"0123456789", b"x", b"y" * 9]


class FakeMessage:
    topic, queue_id, queue_offset = "T", 3, 17
    body, keys, tags, msg_id, offset_msg_id = b"b\xff", "k1 k2", None, "UID", "OID"
    store_timestamp_ms, born_timestamp_ms = 5, 4
    born_host = store_host = "127.0.0.1:1"
    properties = {"TAGS": "x", "UNIQ_KEY": "UID", "a": "1"}  # noqa: RUF012
    flag = reconsume_times = 0


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (r"%s\n", b"b\xff\n"),
        (r"%t/%p @%o %T", b"T/3 @17 5"),
        (r"%k %K [%g] %h %i %I %S", b"k1 k2 5 [] a=1 UID OID 2"),
        (r"100%%\t\\", b"100%\t\\"),
    ],
)
def test_formats(template: str, shown: bytes) -> None:
    assert compile_format(template)(FakeMessage()) == shown  # type: ignore[arg-type]


def test_a_body_that_is_no_text() -> None:
    record = formatting.as_record(FakeMessage())  # type: ignore[arg-type]
    assert record["body_base64"] == "Yv8="
    assert record["properties"] == {"a": "1"}


def test_positions() -> None:
    assert positions.parse("earliest") == positions.parse("begin") == "earliest"
    assert positions.parse("latest") == positions.parse("end") == "latest"
    assert positions.parse("17") == Offset(17)
    assert positions.parse("-5") == Offset(-5)
    assert positions.parse("2026-11-21T08:00:00+00:00") == datetime(2026, 11, 21, 8, tzinfo=UTC)
    ago = positions.parse("10min")
    assert isinstance(ago, datetime)
    assert abs(datetime.now(UTC) - timedelta(minutes=10) - ago) < timedelta(seconds=5)


def test_the_demo_finds_text(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"x ERROR y\n[warning] z\n\nplain\n")
    (tmp_path / "b.bin").write_bytes(b"\0\1\2\n")
    text = collect([str(tmp_path)])
    assert text.lines == [b"x ERROR y", b"[warning] z", b"plain"]
    assert text.tags == ["ERROR", "WARN", "a"]
    assert len(text.files) == 1
    assert len(collect([]).lines) > 100
    with pytest.raises(click.ClickException, match="no such file"):
        collect([str(tmp_path / "c")])
