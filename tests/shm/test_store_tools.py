"""`cometmq store`: verify, repair, dump, on stores that a real RocketMQ wrote."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import golden
import pytest
from click.testing import CliRunner, Result
from family import RunningBroker
from log_scan import scan_log

from cometmq.cli.store import store as store_command
from cometmq.protocol.errors import StoreLocked
from cometmq.shm.reading.store_reader import StoreReader
from cometmq.shm.tools.verify import verify_store


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(store_command, [str(each) for each in arguments])


def contents(store: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(store.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("name", golden.CLEAN)
def test_verify_finds_nothing_in_a_clean_store(name: str, tmp_path: Path) -> None:
    store = golden.unpack(name, tmp_path)
    before = contents(store)
    done = run("verify", "-o", "json", store)
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    settings = golden.meta(name)["settings"]
    assert found["findings"] == []
    assert found["records"] == golden.meta(name)["records"]
    assert found["segment_bytes"] == settings["mappedFileSizeCommitLog"]
    assert found["queue_segment_bytes"] == settings["mappedFileSizeConsumeQueue"]
    assert contents(store) == before


def test_a_store_that_never_had_a_message(tmp_path: Path) -> None:
    """Is in order; a folder that is no store, or whose log is no log, is not."""
    with RunningBroker(tmp_path / "store"):
        pass
    assert not list((tmp_path / "store" / "commitlog").iterdir())
    for command in ("verify", "repair", "verify"):
        done = run(command, "-o", "json", tmp_path / "store")
        assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["records"], found["queues"], found["findings"]) == (0, 0, [])
    assert run("dump", tmp_path / "store").output == ""
    with closing(StoreReader.open_closed(tmp_path / "store")) as reader:
        assert list(scan_log(reader)) == []
    assert "no commitlog/ in it" in str(run("verify", tmp_path).exception)
    (tmp_path / "commitlog").mkdir()
    (tmp_path / "commitlog" / "00000000000000000000").touch()
    assert "no segment in commitlog/" in str(run("verify", tmp_path).exception)


@pytest.mark.parametrize(
    ("name", "kind", "offset"),
    [
        ("damaged-bitflip", "damaged", 7_053),
        ("damaged-bitflip-early", "damaged", 10_055),
        ("damaged-tail", "dirty", 11_032),
        ("damaged-tail-stale", "dirty", 11_032),
        ("damaged-nocq", "missing", 0),
    ],
)
def test_verify_names_what_is_wrong(name: str, kind: str, offset: int, tmp_path: Path) -> None:
    store = golden.unpack(name, tmp_path)
    before = contents(store)
    done = run("verify", "-o", "json", store)
    assert done.exit_code == 1
    findings: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    assert {finding["kind"] for finding in findings} == {kind}
    assert abs(findings[0]["offset"] - offset) < 4  # the first byte of garbage may be zero
    assert contents(store) == before


@pytest.mark.parametrize("name", golden.DAMAGED)
def test_repair_leaves_only_what_cannot_be_mended(name: str, tmp_path: Path) -> None:
    store = golden.unpack(name, tmp_path)
    before = contents(store)
    assert run("repair", "--dry-run", store).exit_code == 0
    assert contents(store) == before
    done = run("repair", "-o", "json", store)
    assert done.exit_code == 0, done.output
    kinds = {finding.kind for finding in verify_store(store).findings}
    assert kinds == ({"damaged"} if "bitflip" in name else set())


@pytest.mark.parametrize("command", ["verify", "dump", "repair"])
def test_a_store_in_use_is_refused(command: str, tmp_path: Path) -> None:
    import subprocess
    import sys

    store = golden.unpack("damaged-base", tmp_path)
    holder = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+b');"
        "fcntl.lockf(f, fcntl.LOCK_EX, 1, 0); print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(store / "lock")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        before = contents(store)
        assert isinstance(run(command, store).exception, StoreLocked)
        assert contents(store) == before
        process.communicate()


def test_dump_prints_every_record(tmp_path: Path) -> None:
    name = "loghub-abort"
    store = golden.unpack(name, tmp_path)
    rows = [json.loads(line) for line in run("dump", store).stdout.splitlines()]
    assert [(row["physical_offset"], row["body"]) for row in rows] == [
        (row["physicalOffset"], row["body"]) for row in golden.listing(name)
    ]
    some = run("dump", "-t", "loghub_Spark", "--from", "1000", "--to", "20000", store).stdout
    places = [json.loads(line)["physical_offset"] for line in some.splitlines()]
    assert places == [
        row["physicalOffset"]
        for row in golden.listing(name)
        if row["topic"] == "loghub_Spark" and 1000 <= row["physicalOffset"] < 20_000
    ]


def test_dump_says_what_it_passes_over(tmp_path: Path) -> None:
    done = run("dump", golden.unpack("damaged-bitflip", tmp_path))
    assert len(done.stdout.splitlines()) == 999
    assert "no whole record in [269197, 269500)" in done.stderr
