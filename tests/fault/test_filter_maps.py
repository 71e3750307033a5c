"""Kills while filters are registered and their maps are made: nothing is hidden, and maps come."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault.points import POINTS, Points
from filtered import (
    Traffic,
    drain,
    ends,
    register,
    running,
    send,
    until_calculated,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WAIT_S = 60.0


def test_whoever_makes_maps_is_killed_at_every_point(tmp_path: Path) -> None:
    """The next expression is registered, which leads to the point; then all of it is drained."""
    traffic = Traffic()
    points = [point for point in POINTS.values() if point.when == "filters"]
    assert {point.role for point in points} == {"dispatcher", "coordinator"}
    with Points(tmp_path / "points") as hits:
        for number, point in enumerate(points):
            root = tmp_path / str(number)
            root.mkdir()
            with running(root, environ=hits.environ, module=Points.MODULE) as broker:
                traffic.sent.clear()
                send(broker, traffic, 400)
                register(broker, "before", "*", "a = '1'")
                until_calculated(broker, "a = '1'", ends=ends(broker))
                pid = broker.pids()[point.role]
                hits.arm(point, traffic.chance.randint(1, point.nth_max))
                register(broker, "after", "*", "b = '2'")
                assert hits.wait_hit(WAIT_S) == pid, point.name
                hits.disarm()
                broker.wait_serves(point.role, not_pid=pid)
                for transport in ("mapped", "zmq"):
                    for sql in ("a = '1'", "b = '2'"):
                        wanted = traffic.wanted("*", sql)
                        found = drain(broker, f"{transport}-{sql[0]}", "*", sql, wanted, transport)
                        assert sorted(found) == sorted(wanted), (traffic.seed, point.name)
                until_calculated(broker, "a = '1'", "b = '2'", ends=ends(broker))
