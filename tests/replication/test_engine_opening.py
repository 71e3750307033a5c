"""What opens an engine, and what it meets there: settings, files and answers that cannot be."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from patience import patient

from cometmq.actors.replication.engines import sqlite
from cometmq.actors.replication.engines.engine import Applied, Stored, Unknown
from cometmq.actors.replication.engines.errors import (
    EngineFault,
    EngineUnreachable,
)
from cometmq.actors.replication.engines.opening import HOSTS_MAX, URL_MAX, open_engine
from cometmq.protocol.errors import ConfigError

# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "", "sqlite", "sqlite:", "sqlite:relative", "sqlite:/", "sqlite://host/path",
        "sqlite:/a/../b", "sqlite:/a\0b", "sqlite:/a\nb", "sqlite:/\ud800", "etcd:/a", "etcd://", "etcd://host",
        "etcd://host:0", "etcd://host:65536", "etcd://host:1x", "etcd://host:-1", "etcd://:1",
        "etcd://a:1,", "etcd://a:1,,b:1", "etcd://a:1,a:1", "etcd://user:word@a:1", "etcd://a b:1",
        "etcd://a:1?x=1", "etcd://a:1#x", "etcd://a:1/..", "etcd://a:1/a//b", "etcd://a:1/a b",
        "etcd://a:\u0661", "etcd://a:1/%2e%2e", "etcd://a:1/" + "x" * 65, "ETCD://a:1",
        "etcd://[::1:1", "redis://a:1", " etcd://a:1", "etcd://a:1\n",
        "etcd://" + "a" * 254 + ":1",
        "etcd://a..b:1", "etcd://.a:1", "etcd://" + "a" * 64 + ":1",
        "sqlite:/" + "x" * URL_MAX, None, 1, b"sqlite:/tmp/x",
    ],
)  # fmt: skip
def test_no_engine_has_such_a_url(url: object) -> None:
    with pytest.raises(ConfigError, match="engine"):
        open_engine(url)  # type: ignore[arg-type]


def test_as_many_servers_as_there_may_be() -> None:
    hosts = [f"h{number}:1" for number in range(HOSTS_MAX + 1)]
    with pytest.raises(ConfigError, match="17 servers, at most 16"):
        open_engine(f"etcd://{','.join(hosts)}")
    open_engine(f"etcd://{','.join(hosts[1:])}").close()


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("etcd://a:2379", "etcd://a:2379/cometmq"),
        ("etcd://a:1,[::1]:65535/x/y", "etcd://a:1,::1:65535/x/y"),
        ("etcd://a.b-c_d:2181/root/", "etcd://a.b-c_d:2181/root"),
    ],
)
def test_opening_asks_nobody(url: str, where: str) -> None:
    with open_engine(url) as engine:
        assert engine.where == where


@pytest.mark.parametrize("timeout_s", [0, -1, 61, float("nan"), "1", True])
def test_no_such_time_limit(timeout_s: object) -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        open_engine("etcd://a:1", timeout_s)  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["zookeeper", "zookeeper://a:1", "zookeeper://a:1,b:2/root"])
def test_zookeeper_is_refused_with_its_replacement(url: str) -> None:
    with pytest.raises(ConfigError, match=r"ZooKeeper is not supported.*use etcd.*docs/engines"):
        open_engine(url)


# --- files of SQLite ------------------------------------------------------------------------------


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(EngineFault, match=r"file: "):
        open_engine(f"sqlite:{tmp_path}/file")


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    tmp_path.chmod(0o700)
    with pytest.raises(EngineFault, match="'commitlog': name a folder of its own"):
        open_engine(f"sqlite:{tmp_path}")
    assert os.listdir(tmp_path) == ["commitlog"]


def test_a_folder_that_others_may_write(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(EngineFault, match="nobody else may write"):
        open_engine(f"sqlite:{folder}")


@pytest.mark.parametrize(
    "content", [b"x" * 100, b"SQLite format 3\0" + b"x" * 5000], ids=["text", "head"]
)
def test_a_file_that_is_no_database(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir(mode=0o700)
    (folder / "records.db").write_bytes(content)
    with pytest.raises(EngineFault, match=r"records\.db"):
        open_engine(f"sqlite:{folder}")


def test_a_database_of_something_else(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir(mode=0o700)
    connection = sqlite3.connect(folder / "records.db")
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    with pytest.raises(EngineFault, match="a SQLite file of something else"):
        open_engine(f"sqlite:{folder}")


def changed(folder: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(folder / "records.db")
    with connection:
        connection.execute(statement, values)
    connection.close()


def test_a_layout_of_a_later_release(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    open_engine(f"sqlite:{folder}").close()
    changed(folder, "PRAGMA user_version = 2")
    with pytest.raises(EngineFault, match="layout 2, this release knows 1"):
        open_engine(f"sqlite:{folder}")


@pytest.mark.parametrize(
    ("record", "version"), [("text", 1), (b"x", 0), (b"x" * 65_537, 1), (1, 1)]
)
def test_rows_that_no_broker_wrote(tmp_path: Path, record: object, version: object) -> None:
    folder = tmp_path / "cluster"
    with open_engine(f"sqlite:{folder}") as engine:
        changed(folder, "INSERT INTO records VALUES ('g', ?, ?)", version, record)
        for call in (lambda: engine.get("g"), lambda: engine.cas("g", 1, b"")):
            with pytest.raises(EngineFault, match="group g"):
                call()


def test_sessions_end_with_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:{tmp_path}/cluster"
    with open_engine(url) as before:
        before.open_session("g", 1, 60)
        version = before.cas("g", None, b"x")
        assert isinstance(version, Applied)
        monkeypatch.setattr(sqlite, "boot_id", lambda: "another")
        with open_engine(url) as engine:
            assert engine.alive("g") == frozenset()
            assert engine.get("g") == Stored(b"x", version.version)
    names = sorted(path.name for path in (tmp_path / "cluster").glob("sessions-*.db"))
    assert names == ["sessions-another.db"]


def test_a_session_that_is_over_is_not_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not either while nobody has looked."""
    with sqlite.SqliteEngine(tmp_path / "cluster") as engine:
        lease = engine._lease("g", 1, 30.0)
        assert lease.renew(100.0, 1) == 130.0
        later = sqlite._now_ns() + 31 * 10**9
        monkeypatch.setattr(sqlite, "_now_ns", lambda: later)
        assert lease.renew(131.0, 1) is None
        assert engine.alive("g") == frozenset()


def test_clocks_that_cannot_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:{tmp_path}/cluster"
    with open_engine(url):
        monkeypatch.setattr(sqlite, "time_namespace", lambda: "time:[7]")
        with pytest.raises(EngineFault, match="another time namespace"):
            open_engine(url)
        monkeypatch.setattr(sqlite, "boot_id", lambda: "")
        with pytest.raises(EngineFault, match="does not tell its boots apart"):
            open_engine(url)


# --- answers that cannot be -----------------------------------------------------------------------


@contextmanager
def answering(answer: Callable[[bytes], bytes]) -> Iterator[int]:
    """A server that takes what comes, and says that; its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    line, _ = server.accept()
                except OSError:
                    return
                with line:
                    line.settimeout(patient(10))  # of a client that says nothing
                    try:
                        request = line.recv(1 << 17)
                        if request.endswith(b"\r\n\r\n"):  # of HTTP; its body comes by itself
                            request += line.recv(1 << 17)
                        line.sendall(answer(request))
                    except OSError:
                        continue

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def http(body: bytes, status: str = "200 OK") -> Callable[[bytes], bytes]:
    return lambda _: b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (
        status.encode(), len(body), body,
    )  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        b"", b"no JSON", b"[]", b'{"kvs": 1}', b'{"kvs": [{}]}', b'{"kvs": [1]}',
        b'{"kvs": [{"value": "!", "mod_revision": "1"}]}',
        b'{"kvs": [{"value": "eA==", "mod_revision": "x"}]}',
        b'{"kvs": [{"value": "eA==", "mod_revision": "0"}]}',
        b'{"kvs": [{"value": "eA==", "mod_revision": null}]}',
        b'{"kvs": [{"value": "eA==", "mod_revision": "9223372036854775808"}]}',
        json.dumps({"kvs": [{"value": "A" * 87_384 + "AAAA", "mod_revision": "1"}]}).encode(),
        b'{"x": "' + b"x" * (4 << 20) + b'"}', b"[" * 100_000,
    ],
    ids=range(14),
)  # fmt: skip
def test_an_etcd_that_is_none(body: bytes) -> None:
    with answering(http(body)) as port, open_engine(f"etcd://127.0.0.1:{port}", 5) as engine:
        assert isinstance(engine.cas("g", None, b"x"), Unknown)
        with pytest.raises(EngineFault, match=rf"etcd://127\.0\.0\.1:{port}"):
            engine.get("g")


@pytest.mark.parametrize("ttl", ["0", "-1", "10001", "1" + "0" * 400, "x", ""])
def test_a_session_of_etcd_that_is_granted_for_no_time(ttl: str) -> None:
    body = json.dumps({"ID": "7", "TTL": ttl, "succeeded": True}).encode()
    with (
        answering(http(body)) as port,
        open_engine(f"etcd://127.0.0.1:{port}", 5) as engine,
        pytest.raises(EngineFault, match="none of etcd's"),
    ):
        engine.open_session("g", 1, 2)


@pytest.mark.parametrize(
    "line", [b"[" * 100_000, b'{"result": {"events": 1}}', b'{"result": {"events": [{}]}}', b"{}"],
    ids=["deep", "no events", "none of a key", "no result"],
)  # fmt: skip
def test_a_stream_that_says_what_cannot_be_is_begun_anew(line: bytes) -> None:
    """For ever: a change is told of by the next one."""
    asked = threading.Semaphore(0)

    def answer(request: bytes) -> bytes:
        if b"/v3/watch" in request:
            asked.release()
            return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s\n" % (len(line) + 1, line)
        return http(b"{}")(request)

    with answering(answer) as port, open_engine(f"etcd://127.0.0.1:{port}", 5) as engine:
        engine.watch("g")
        for _ in range(3):
            assert asked.acquire(timeout=patient(60))


@pytest.mark.parametrize("status", ["404 Not Found", "401 Unauthorized", "302 Found"])
def test_an_etcd_that_refuses(status: str) -> None:
    with answering(http(b"{}", status)) as port, open_engine(f"etcd://127.0.0.1:{port}") as engine:
        for call in (lambda: engine.get("g"), lambda: engine.cas("g", None, b"")):
            with pytest.raises(EngineFault, match=f"status {status[:3]}"):
                call()


@pytest.mark.parametrize(
    "answer",
    [
        http(b'{"error": "etcdserver: no leader"}', "503 Service Unavailable"),
        lambda _: b"",
        lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{",
        lambda _: b"\0" * 100,
    ],
    ids=["no leader", "nothing", "half", "bytes"],
)
def test_an_answer_of_etcd_that_does_not_come(answer: Callable[[bytes], bytes]) -> None:
    """What was sent may be done; a read is no more than not answered."""
    with answering(answer) as port, open_engine(f"etcd://127.0.0.1:{port}", 0.4) as engine:
        assert isinstance(engine.cas("g", None, b"x"), Unknown)
        assert isinstance(engine.delete("g", 1), Unknown)
        for call in (lambda: engine.get("g"), lambda: engine.alive("g")):
            with pytest.raises(EngineUnreachable, match="is a majority"):
                call()
