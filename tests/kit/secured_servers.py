"""An etcd server that requires TLS, our certificate and a password. No tests here."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from certificates import Authority
from engine_servers import READY_S, TIMEOUT_S, World, need_etcd
from ports import free_ports

from cometmq.actors.replication.engines.engine import Engine
from cometmq.actors.replication.engines.opening import open_engine
from cometmq.conf.engine import EngineAccess

USER = "broker"
PASSWORD = "a pass word: of 消息"


class SecuredEtcd(World):
    """A secured etcd with its own certificate authority; `access` has all that a client needs."""

    kind = "etcd"
    servers = 1

    def __init__(self, place: Path, stack: ExitStack) -> None:
        self.place = place
        self.authority = Authority(place / "ca")
        self.server = self.authority.issue("server")
        client = self.authority.issue("client")
        self.password_file = place / "password"
        self.password_file.write_text(PASSWORD + "\n")
        self.password_file.chmod(0o600)
        self.access = EngineAccess(
            str(self.authority.cert), str(client.cert), str(client.key), USER,
            str(self.password_file),
        )  # fmt: skip
        self._first = free_ports(2)
        self.url = f"etcd://localhost:{self._first}"
        self._process = self._start()
        stack.callback(self._close)
        self._context = ssl.create_default_context(cafile=str(self.authority.cert))
        self._context.load_cert_chain(self.access.cert_file, self.access.key_file)
        self._until(lambda: self._post("/v3/kv/range", {"key": _b64(b"x")}))
        self.allow(USER, PASSWORD, "/cometmq/")
        self.ask("user/add", name="root", password="root")
        self.ask("role/add", name="root")
        self.ask("user/grant", user="root", role="root")

    def open(self, timeout_s: float = TIMEOUT_S, **other: str) -> Engine:
        """
        Args:
            other: than in `access`.
        """
        return open_engine(self.url, timeout_s, self.access._replace(**other))

    def written(self, name: str, text: str) -> str:
        """A file with a secret; its path."""
        path = self.place / name
        path.write_text(text)
        path.chmod(0o600)
        return str(path)

    def allow(self, user: str, password: str, prefix: str, token: str = "") -> None:
        """A user that may read and write all keys with that prefix."""
        key, behind = prefix.encode(), prefix[:-1].encode() + bytes([ord(prefix[-1]) + 1])
        self.ask("user/add", token, name=user, password=password)
        self.ask("role/add", token, name=user)
        perm = {"permType": "READWRITE", "key": _b64(key), "range_end": _b64(behind)}
        self.ask("role/grant", token, name=user, perm=perm)
        self.ask("user/grant", token, user=user, role=user)

    def enable(self) -> None:
        self.ask("enable")

    def root(self) -> str:
        """Its token."""
        return str(self.ask("authenticate", name="root", password="root")["token"])

    def ask(self, what: str, token: str = "", /, **body: Any) -> dict[str, Any]:
        return self._post(f"/v3/auth/{what}", body, token)

    def _post(self, path: str, body: dict[str, Any], token: str = "") -> dict[str, Any]:
        line = http.client.HTTPSConnection("localhost", self._first, context=self._context)
        try:
            line.request("POST", path, json.dumps(body), {"Authorization": token} if token else {})
            answer = line.getresponse()
            content = json.loads(answer.read())
        finally:
            line.close()
        assert answer.status == 200, (path, content)
        return dict(content)

    def _until(self, call: Callable[[], object]) -> None:
        """It answers that."""
        until = time.monotonic() + READY_S
        while True:
            try:
                call()
            except (OSError, AssertionError):
                assert time.monotonic() < until, (self.place / "log").read_text()[-2_000:]
                time.sleep(0.05)
            else:
                return

    def _start(self) -> subprocess.Popen[bytes]:
        client = f"https://localhost:{self._first}"
        peer = f"http://127.0.0.1:{self._first + 1}"
        with (self.place / "log").open("ab") as output:
            return subprocess.Popen(
                [
                    "setpriv", "--pdeathsig", "KILL", "etcd", "--name", "n0",
                    "--data-dir", str(self.place / "data"),
                    "--listen-client-urls", f"https://127.0.0.1:{self._first}",
                    "--advertise-client-urls", client,
                    "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                    "--initial-cluster", f"n0={peer}",
                    "--cert-file", str(self.server.cert), "--key-file", str(self.server.key),
                    "--trusted-ca-file", str(self.authority.cert), "--client-cert-auth",
                ],
                stdout=output, stderr=output,
            )  # fmt: skip

    def restart(self, server: int = 0) -> None:
        """Of one whose users are enabled."""
        self._close()
        self._process = self._start()
        self._until(self.root)

    def _close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def secured_running(place: Path) -> Iterator[SecuredEtcd]:
    """Run a secured etcd with users enabled. Skip the test if etcd is not installed."""
    need_etcd()
    with ExitStack() as stack:
        etcd = SecuredEtcd(place, stack)
        etcd.enable()
        yield etcd


def _b64(content: bytes) -> str:
    return base64.b64encode(content).decode()
