"""One server each of etcd and ZooKeeper that wants TLS, our certificate and a password. No tests
here.
"""

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
from engine_servers import READY_S, TIMEOUT_S, World, need_etcd, need_zookeeper
from ports import free_ports

from cometmq.actors.replication.engines.engine import Engine
from cometmq.actors.replication.engines.managed import ManagedServer, Peer
from cometmq.actors.replication.engines.opening import open_engine
from cometmq.conf.engine import EngineAccess

USER = "broker"
PASSWORD = "a pass word: of 消息"


class SecuredWorld(World):
    """Both have an authority of their own; `access` has everything that is needed."""

    servers = 1

    def __init__(self, place: Path) -> None:
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


class SecuredEtcd(SecuredWorld):
    kind = "etcd"

    def __init__(self, place: Path, stack: ExitStack) -> None:
        super().__init__(place)
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


class SecuredServer(ManagedServer):
    """Its TLS port is the second one; the first, without TLS, is for `wait_until_ready` and for
    those who do what they should not.

    Args:
        server: its certificate and key in one file.
        authority: the certificates of those who may have signed its clients'.
        java: further arguments.
    """

    def __init__(self, folder: Path, peer: Peer, server: Path, authority: Path, *java: str) -> None:
        self._tls = server, authority
        self._more = java
        super().__init__(folder, 1, [peer])

    def _command(self) -> list[str]:
        server, authority = self._tls
        factory = "org.apache.zookeeper.server.NettyServerCnxnFactory"
        config = self.folder / "tls.cfg"
        config.write_text(
            (self.folder / "zoo.cfg").read_text()
            + f"secureClientPort={self.peers[0].quorum_port}\n"
            f"serverCnxnFactory={factory}\n"
            f"ssl.keyStore.location={server}\nssl.keyStore.type=PEM\n"
            f"ssl.trustStore.location={authority}\nssl.trustStore.type=PEM\n"
        )
        *command, main, _ = super()._command()
        return [*command, *self._more, main, str(config)]


class SecuredZooKeeper(SecuredWorld):
    kind = "zookeeper"

    def __init__(self, place: Path, stack: ExitStack) -> None:
        super().__init__(place)
        first = free_ports(3)
        self.peer = Peer("127.0.0.1", first, first + 1, first + 2)
        self.url = f"zookeeper://localhost:{first + 1}"
        self.plain_url = f"zookeeper://127.0.0.1:{first}"
        self._store = place / "server.store.pem"
        self._store.write_bytes(self.server.key.read_bytes() + self.server.cert.read_bytes())
        self._server = self._start()
        stack.callback(lambda: self._server.close())
        self._server.wait_until_ready(READY_S)

    def _start(self, *java: str) -> SecuredServer:
        folder = self.place / "server"
        return SecuredServer(folder, self.peer, self._store, self.authority.cert, *java)

    def restart(self, server: int = 0, *java: str) -> None:
        self._server.kill()
        self._server.close()
        self._server = self._start(*java)
        self._server.wait_until_ready(READY_S)


@contextmanager
def secured_running(kind: str, place: Path) -> Iterator[SecuredWorld]:
    """Users are enabled. Skips where it is not installed."""
    with ExitStack() as stack:
        if kind == "zookeeper":
            need_zookeeper()
            yield SecuredZooKeeper(place, stack)
        else:
            need_etcd()
            etcd = SecuredEtcd(place, stack)
            etcd.enable()
            yield etcd


def _b64(content: bytes) -> str:
    return base64.b64encode(content).decode()
