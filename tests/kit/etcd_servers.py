"""Servers of one etcd that tests can kill, stop and restart one by one. No tests here."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from still import wait_stopped

PORTS: Final = 2  # of one server: for clients, and for the other servers
_ANSWER_S: Final = 1.0


def trouble() -> str:
    """Return why etcd cannot run here; empty if it can."""
    for program in ("etcd", "setpriv", "nsenter"):
        if shutil.which(program) is None:
            return f"the engine etcd: {program} is not installed"
    return ""


class EtcdServer:
    """One server of an etcd, which ends with the process that started it.

    Args:
        folder: folder of its data, which a later start resumes with; its log is beside it.
        number: index of this server in `hosts`.
        hosts: address of each server.
        first_port: port of the first server; each has PORTS of them.
        namespace: path of the network namespace that it runs in; empty: this one.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        hosts: Sequence[str],
        first_port: int,
        namespace: str = "",
    ) -> None:
        self.address = hosts[number], first_port + PORTS * number
        client = "http://{}:{}".format(*self.address)
        peers = [f"http://{host}:{first_port + PORTS * at + 1}" for at, host in enumerate(hosts)]
        command = [
            "setpriv", "--pdeathsig", "KILL", "etcd", "--name", f"n{number}",
            "--data-dir", str(folder),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peers[number],
            "--initial-advertise-peer-urls", peers[number],
            "--initial-cluster", ",".join(f"n{at}={url}" for at, url in enumerate(peers)),
            "--heartbeat-interval", "100", "--election-timeout", "1000",
        ]  # fmt: skip
        if namespace:
            command = ["nsenter", f"--net={namespace}", *command]
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f"{folder.name}.log").open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: int) -> None:
        """Send a signal; after SIGSTOP wait until the process has stopped."""
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            wait_stopped(self.pid)

    def close(self) -> None:
        """Kill the server (kill -9)."""
        self._process.kill()
        self._process.wait()

    def status(self) -> dict[str, object]:
        """Return the server's own status; empty while it has no leader or does not answer."""
        connection = http.client.HTTPConnection(*self.address, timeout=_ANSWER_S)
        try:
            connection.request("POST", "/v3/maintenance/status", "{}")
            found = json.loads(connection.getresponse().read())
        except (OSError, ValueError, http.client.HTTPException):
            return {}
        finally:
            connection.close()
        return found if int(found.get("leader", 0)) else {}

    def leads(self) -> bool:
        """Return whether this server is the leader."""
        status = self.status()
        header = status.get("header")
        return isinstance(header, dict) and status["leader"] == header["member_id"]
