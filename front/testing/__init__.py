"""Test services that use CometMQ: a pytest plug-in with a real broker.

    def test_order_is_billed(cometmq):
        orders, bills = cometmq.topic("orders"), cometmq.topic("bills")
        cometmq.producer().send(orders, b"3 apples")
        bill_next(cometmq.consumer("billing", orders), cometmq.producer(), bills)
        cometmq.expect(bills, [b"3 apples: 1.50"])

pytest loads the plug-in from the installed package; `-p no:cometmq.testing` switches it off. A test
that requests no fixture of it imports nothing else of CometMQ. docs/testing.md is the guide.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from cometmq.broker import Broker
    from cometmq.testing.sandbox import OwnBroker, Sandbox

__all__ = ["OwnBroker", "Sandbox"]

BEGAN: Final = pytest.StashKey[float]()  # of a test: Unix time
BROKERS: Final = pytest.StashKey[list["Broker | Sandbox"]]()  # that a test has used, or a session


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cometmq.testing import sandbox

    return getattr(sandbox, name)


@pytest.fixture(scope="session")
def cometmq_settings() -> Mapping[str, object]:
    """Settings of the brokers, by RocketMQ's keys. Override it in conftest.py, for the session.

    The default is none: the profile "test", and logLevel INFO, so that the report of a failed test
    shows what the broker did.
    """
    return {}


@pytest.fixture(scope="session")
def cometmq_broker(
    cometmq_settings: Mapping[str, object],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Broker]:
    """A real `Broker(profile="test")` for all tests of the session, in processes of its own.

    Its store is deleted at the end of the session. With pytest-xdist each worker has a broker.
    """
    from cometmq.testing.sandbox import open_broker

    with store_folder(tmp_path_factory) as store, open_broker(store, cometmq_settings) as broker:
        request.session.stash.setdefault(BROKERS, []).append(broker)
        yield broker


@pytest.fixture
def cometmq(cometmq_broker: Broker, request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """Topics, groups and clients of one test, on the broker of the session; see `Sandbox`."""
    from cometmq.testing.sandbox import Sandbox

    with Sandbox(cometmq_broker) as sandbox:
        request.node.stash.setdefault(BROKERS, []).append(sandbox)
        yield sandbox


@pytest.fixture
def cometmq_own_broker(
    cometmq_settings: Mapping[str, object],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[OwnBroker]:
    """A broker for this test alone, which it may kill, restart and pause; see `OwnBroker`."""
    from cometmq.testing.sandbox import OwnBroker

    with store_folder(tmp_path_factory) as store, OwnBroker(store, cometmq_settings) as broker:
        request.node.stash.setdefault(BROKERS, []).append(broker)
        yield broker


@contextlib.contextmanager
def store_folder(factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for a store, below pytest's temporary folder; deleted at the end."""
    folder = factory.mktemp("cometmq")
    try:
        yield folder / "store"
    finally:
        shutil.rmtree(folder)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note when the test began: older lines of the broker's log are not its."""
    item.stash[BEGAN] = time.time()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the broker's log to the report of a failed test."""
    report = yield
    if report.failed:
        used = item.stash.get(BROKERS, [])
        if "cometmq_broker" in getattr(item, "fixturenames", ()) and not used:
            used = item.session.stash.get(BROKERS, [])
        for each in used:
            from cometmq.testing.sandbox import log_text

            text = log_text(each.recent_log, item.stash.get(BEGAN, 0.0))
            report.sections.append((f"CometMQ broker log ({report.when})", text))
    return report
