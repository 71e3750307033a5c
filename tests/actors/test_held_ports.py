"""Ports that the system has chosen stay a broker's own, also while nobody listens there."""

from __future__ import annotations

import errno
import os
import signal
import socket
from pathlib import Path

import psutil
import pytest
from family import RunningBroker

from cometmq.actors.launch.binding import HeldPorts
from cometmq.client import Producer
from cometmq.conf import BrokerSettings
from cometmq.protocol.errors import ConfigError


def is_free(port: int) -> bool:
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True


def test_while_a_process_is_started_again(tmp_path: Path) -> None:
    with (
        RunningBroker(tmp_path / "store") as broker,
        Producer(broker.ready.name_server) as producer,
    ):
        producer.send("topic", b"before")
        pid, zygote = broker.pids()["coordinator"], broker.zygote_pid()
        (port,) = {each.laddr.port for each in psutil.Process(pid).net_connections("tcp")
                   if each.status == psutil.CONN_LISTEN}  # fmt: skip
        os.kill(zygote, signal.SIGSTOP)  # it starts nobody
        try:
            broker.end(pid)
            with socket.socket() as tried, pytest.raises(ConnectionRefusedError):
                tried.connect(("127.0.0.1", port))
            assert not is_free(port)
        finally:
            os.kill(zygote, signal.SIGCONT)
        again = psutil.Process(broker.wait_serves("coordinator", not_pid=pid))
        assert port in {each.laddr.port for each in again.net_connections("tcp")}
        producer.send("another", b"behind")


def test_each_role_has_its_own_as_long_as_they_are_held() -> None:
    ports, settings = HeldPorts(), BrokerSettings()
    roles = ("namesrv", "coordinator", "commitlog", "reader-0", "reader-1")
    found = {role: ports.of(role, settings) for role in roles}
    assert len(set(found.values())) == len(roles)
    assert found == {role: ports.of(role, settings) for role in roles}
    assert ports.of("flush", settings) is None
    assert not any(is_free(port) for port in found.values() if port)
    # Who is to listen there may.
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", found["namesrv"]))
        listener.listen()
    ports.close()
    assert all(is_free(port) for port in found.values() if port)


def test_one_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = HeldPorts()
        with pytest.raises(ConfigError, match=f"^port = {port}: namesrv: port {port} is taken"):
            ports.of("namesrv", BrokerSettings(port=port))
        ports.close()
