"""Engines for the tests of replication: started once for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from engine_servers import World, running

from cometmq.actors.replication.engines.engine import Engine

_numbers = itertools.count()


@pytest.fixture(scope="session", params=["sqlite", "zookeeper", "etcd"])
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    with running(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture
def engine(world: World) -> Iterator[Engine]:
    with world.open() as opened:
        yield opened


@pytest.fixture
def group() -> str:
    """That nobody else has."""
    return f"%group|{next(_numbers)}"
