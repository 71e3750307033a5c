"""`cometmq demo`: it runs, it counts, and it would tell of a loss."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from cli_process import interrupt, json_of, start
from shared_data import data_path

from cometmq.cli.demo import Demo, Group, Outcome
from cometmq.cli.demo_text import Text


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    """The commitlog process is killed in the middle, and nothing is lost."""
    logs = str(data_path("loghub"))
    shown = json_of("demo", logs, "--count", "60000", TMPDIR=str(tmp_path))
    producer, everything, some = shown["lines"]
    assert producer["sent"] == producer["acknowledged"] == 60_000
    assert everything["acknowledged"] == 60_000
    assert 0 < some["acknowledged"] < 60_000
    for group in (everything, some):
        assert (group["lost"], group["wrong"]) == (0, 0)
        assert group["received"] == group["acknowledged"] + group["duplicates"]
        assert group["p99_ms"] is not None
    assert shown["killed_pid"] > 0
    assert shown["restarts"] == 1
    assert shown["back_after_s"] > 0
    assert list(tmp_path.iterdir()) == [], "it clears up"


@pytest.mark.slow
def test_ctrl_c_ends_the_sending_and_counts(tmp_path: Path) -> None:
    demo = start("demo", str(data_path("loghub")), "--seconds", "60", TMPDIR=str(tmp_path))
    with demo:
        assert demo.stderr is not None
        said = []
        while not said or b"sending" not in said[-1]:
            said.append(demo.stderr.readline())
            assert said[-1], said
        code, out, err = interrupt(demo)
    assert code == 130
    assert out.startswith(b"who\ttags\tsent\t")
    assert b"lost: 0" in err
    assert list(tmp_path.iterdir()) == []


def line_of(times: bytes, *, changed: int = 0, received: int | None = None) -> object:
    group = Group("some", ["a"], Path(tempfile.gettempdir()))
    group.said = {
        "received": sum(times) if received is None else received,
        "distinct": 0,
        "changed": changed,
    }
    wanted, acknowledged = bytes([1, 0, 1, 1]), bytearray([1, 1, 1, 0])
    return Demo._line(group, wanted, times, acknowledged, 1.0)


@pytest.mark.parametrize(
    ("times", "changed", "lost", "duplicates", "wrong"),
    [
        (b"\1\0\1\0", 0, 0, 0, 0),
        (b"\1\0\1\1", 0, 0, 0, 0),  # stored although it was not acknowledged
        (b"\1\0\0\0", 0, 1, 0, 0),
        (b"\3\0\1\0", 0, 0, 2, 0),
        (b"\1\1\1\0", 0, 0, 0, 1),  # another's
        (b"\1\0\1\0", 2, 0, 0, 2),  # other bytes
    ],
)
def test_it_tells_what_went_wrong(
    times: bytes, changed: int, lost: int, duplicates: int, wrong: int
) -> None:
    line = line_of(times, changed=changed)
    found = (getattr(line, "lost"), getattr(line, "duplicates"), getattr(line, "wrong"))  # noqa: B009
    assert found == (lost, duplicates, wrong)
    assert Outcome([line]).failed == bool(lost or wrong)  # type: ignore[list-item]


def test_the_filter_has_a_few_tags_and_not_the_commonest() -> None:
    tags = ["INFO"] * 5 + ["WARN"] * 3 + ["ERROR"] * 2 + ["a", "b"]
    assert Text([b"x"] * len(tags), tags, ["f"]).filter_tags() == ["WARN", "ERROR", "a"]
    assert Text([b"x"], ["only"], ["f"]).filter_tags() == ["only"]
