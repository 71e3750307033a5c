"""What opens an engine, and what it meets there: settings, files and answers that cannot be."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from ports import free_ports

from cometmq.actors.replication.engines import managed, sqlite
from cometmq.actors.replication.engines.engine import Applied, Stored, Unknown
from cometmq.actors.replication.engines.errors import (
    EngineError,
    EngineFault,
    EngineMissing,
    EngineUnreachable,
)
from cometmq.actors.replication.engines.kazoos import Line, granted_s
from cometmq.actors.replication.engines.managed import (
    ManagedServer,
    Peer,
    configuration,
    find_jars,
    write_folder,
)
from cometmq.actors.replication.engines.opening import HOSTS_MAX, URL_MAX, open_engine
from cometmq.protocol.errors import ArgumentIllegal, ConfigError

# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "", "sqlite", "sqlite:", "sqlite:relative", "sqlite:/", "sqlite://host/path",
        "sqlite:/a/../b", "sqlite:/a\0b", "sqlite:/a\nb", "sqlite:/\ud800", "etcd:/a", "etcd://", "etcd://host",
        "etcd://host:0", "etcd://host:65536", "etcd://host:1x", "etcd://host:-1", "etcd://:1",
        "etcd://a:1,", "etcd://a:1,,b:1", "etcd://a:1,a:1", "etcd://user:word@a:1", "etcd://a b:1",
        "etcd://a:1?x=1", "etcd://a:1#x", "etcd://a:1/..", "etcd://a:1/a//b", "etcd://a:1/a b",
        "etcd://a:\u0661", "zookeeper://a:1/%2e%2e", "zookeeper://a:1/" + "x" * 65, "ZOOKEEPER://a:1",
        "zookeeper://[::1:1", "redis://a:1", " etcd://a:1", "etcd://a:1\n",
        "etcd://" + "a" * 254 + ":1",
        "zookeeper://a..b:1", "etcd://.a:1", "etcd://" + "a" * 64 + ":1",
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
        ("zookeeper://a.b-c_d:2181/root/", "zookeeper://a.b-c_d:2181/root"),
    ],
)
def test_opening_asks_nobody(url: str, where: str) -> None:
    with open_engine(url) as engine:
        assert engine.where == where


@pytest.mark.parametrize("timeout_s", [0, -1, 61, float("nan"), "1", True])
def test_no_such_time_limit(timeout_s: object) -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        open_engine("etcd://a:1", timeout_s)  # type: ignore[arg-type]


def test_kazoo_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kazoo.client", None)
    with pytest.raises(EngineMissing, match=r"pip install 'cometmq\[cluster\]'"):
        open_engine("zookeeper://a:1")


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
                    line.settimeout(10)  # of a client that says nothing
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
            assert asked.acquire(timeout=60)


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


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 64],
    ids=["nothing", "HTTP", "bytes"],
)
def test_a_zookeeper_that_is_none(answer: bytes) -> None:
    with answering(lambda _: answer) as port:
        with pytest.raises(EngineUnreachable, match=str(port)):
            granted_s("zookeeper", [("127.0.0.1", port)], 2, 2)
        engine = open_engine(f"zookeeper://127.0.0.1:{port}", 0.4)
        with engine, pytest.raises(EngineUnreachable, match=str(port)):
            engine.get("g")


# --- managed servers ------------------------------------------------------------------------------


@contextmanager
def machine_that_is_gone() -> Iterator[tuple[str, int]]:
    """Nothing answers there: a connection is neither accepted nor refused."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        with contextlib.suppress(TimeoutError):
            while True:
                line = stack.enter_context(socket.socket())
                line.settimeout(0.2)
                line.connect(listener.getsockname())
        yield listener.getsockname()


@pytest.mark.slow
def test_a_server_whose_machine_is_gone_keeps_nobody_from_the_others_for_a_session() -> None:
    """All are tried in turn. Between the first and the third time that the other one is, the one
    that is gone is tried once at least: that alone was a session."""
    session_s = 12.0
    with machine_that_is_gone() as gone, socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(60)
        line = Line("a test", [gone, other.getsockname()], session_s, session_s)
        line._start()
        try:
            tried_s = []
            for _ in range(3):
                other.accept()[0].close()
                tried_s.append(time.monotonic())
        finally:
            line.close()
    assert tried_s[-1] - tried_s[0] < session_s


def test_which_jars_there_are(tmp_path: Path) -> None:
    with pytest.raises(EngineMissing, match=r"0 jars .*\n.*zookeeperd.*\n.*etcd-server"):
        find_jars(tmp_path)
    (tmp_path / "zookeeper-3.4.14.jar").touch()
    with pytest.raises(EngineMissing, match=r"ZooKeeper 3\.4\.14, 3\.5 is needed"):
        find_jars(tmp_path)
    (tmp_path / "zookeeper-3.4.14.jar").rename(tmp_path / "zookeeper-3.10.0.jar")
    with pytest.raises(EngineMissing, match=r"no zookeeper-jute-3\.10\.0\.jar"):
        find_jars(tmp_path)
    (tmp_path / "zookeeper-jute-3.10.0.jar").touch()
    assert find_jars(tmp_path).version == "3.10.0"
    (tmp_path / "zookeeper-3.9.5.jar").touch()
    with pytest.raises(EngineMissing, match="2 jars"):
        find_jars(tmp_path)


def test_pyspark_carries_a_zookeeper() -> None:
    jars = find_jars()
    assert jars.version >= "3.9"
    assert all(Path(path).is_file() for path in jars.class_path.split(os.pathsep))


def test_pyspark_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managed, "find_spec", lambda _: None)
    with pytest.raises(EngineMissing, match=r"PySpark.*\n.*apt-get install zookeeperd"):
        find_jars()


@pytest.mark.parametrize("missing", ["java", "setpriv"])
def test_a_program_is_not_installed(
    tmp_path: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = managed.shutil.which
    monkeypatch.setattr(
        managed.shutil, "which", lambda name: None if name == missing else found(name) or name
    )
    with pytest.raises(EngineMissing, match=f"there is no {missing}: apt-get install"):
        ManagedServer(tmp_path, 1, [Peer("127.0.0.1", 1)])


def test_the_folder_of_a_server(tmp_path: Path) -> None:
    peers = [Peer("a", 1), Peer("b", 2, 3, 4), Peer("c", 5)]
    write_folder(tmp_path / "server", 2, peers)
    write_folder(tmp_path / "server", 2, peers)
    text = (tmp_path / "server/zoo.cfg").read_text()
    assert text == configuration(tmp_path / "server/data", 2, peers)
    assert "clientPort=2\nclientPortAddress=b\n" in text
    assert "admin.enableServer=false\n" in text
    assert "server.1=a:2888:3888\nserver.2=b:3:4\nserver.3=c:2888:3888\n" in text
    assert (tmp_path / "server/data/myid").read_text() == "2\n"
    with pytest.raises(EngineError, match="the folder of another server"):
        write_folder(tmp_path / "server", 1, peers)
    assert "server." not in configuration(tmp_path, 1, peers[:1])


@pytest.mark.parametrize(("number", "count"), [(0, 1), (2, 1), (1, 2), (1, 0), (4, 3), (1, 4)])
def test_no_such_ensemble(tmp_path: Path, number: int, count: int) -> None:
    peers = [Peer("127.0.0.1", port + 1) for port in range(count)]
    with pytest.raises(ArgumentIllegal, match="one or three servers"):
        ManagedServer(tmp_path / "server", number, peers)
    assert not (tmp_path / "server").exists()


@pytest.mark.parametrize(
    ("folder", "peer"),
    [
        ("ok", Peer("a\nadmin.enableServer=true", 1)), ("ok", Peer("", 1)), ("ok", Peer("::1", 1)),
        ("ok", Peer("a", 0)), ("ok", Peer("a", 65_536)), ("ok", Peer("a", 2888)),
        ("ok", Peer("a", True)), ("a b", Peer("a", 1)), ("a\nb", Peer("a", 1)),
        ("${x}", Peer("a", 1)), ("a\\b", Peer("a", 1)),
    ],
)  # fmt: skip
def test_what_no_config_takes(tmp_path: Path, folder: str, peer: Peer) -> None:
    with pytest.raises(ArgumentIllegal, match=r"peer|folder"):
        ManagedServer(tmp_path / folder, 1, [peer])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    """Somebody has its port."""
    from engine_servers import need_zookeeper

    need_zookeeper()
    port = free_ports()
    taken = socket.create_server(("127.0.0.1", port))
    with taken, ManagedServer(tmp_path, 1, [Peer("127.0.0.1", port)]) as server:
        with pytest.raises(EngineError, match=r"the server has ended: .*log: "):
            server.wait_until_ready(60)
        assert not server.is_running
