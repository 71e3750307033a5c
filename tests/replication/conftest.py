"""Engines for the tests of replication: started once for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from engine_servers import World, running
from secured_servers import secured_running

from cometmq.actors.replication.engines.engine import Engine

_numbers = itertools.count()


Start = Callable[[str], World]


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """The engine of that name, started once."""
    found: dict[str, World] = {}
    with ExitStack() as stack:

        def start(name: str) -> World:
            if name not in found:
                kind, _, is_secured = name.partition(", ")
                place = tmp_path_factory.mktemp(kind)
                run = secured_running(place) if is_secured else running(kind, place)
                found[name] = stack.enter_context(run)
            return found[name]

        yield start


@pytest.fixture(scope="session")
def secured(start: Start) -> World:
    """One that wants TLS, our certificate, and a password."""
    return start("etcd, secured")


@pytest.fixture(scope="session", params=["sqlite", "etcd"])
def world(request: pytest.FixtureRequest, start: Start) -> World:
    return start(request.param)


@pytest.fixture
def engine(world: World) -> Iterator[Engine]:
    with world.open() as opened:
        yield opened


@pytest.fixture
def group() -> str:
    """That nobody else has."""
    return f"%group|{next(_numbers)}"
