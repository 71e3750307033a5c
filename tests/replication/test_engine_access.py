"""Engines that want TLS, our certificate and a password: against real servers of both kinds."""

from __future__ import annotations

import contextlib
import select
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority, Pair
from engine_servers import eventually, need_etcd
from patience import patient
from secured_servers import USER, SecuredEtcd

from cometmq.actors.replication.engines.access import Access
from cometmq.actors.replication.engines.engine import (
    Applied,
    Engine,
    Stored,
    Watch,
    now_s,
)
from cometmq.actors.replication.engines.errors import EngineFault, EngineUnreachable
from cometmq.actors.replication.engines.login import Login
from cometmq.actors.replication.engines.opening import open_engine
from cometmq.conf.engine import NO_ACCESS, EngineAccess
from cometmq.protocol.errors import ConfigError

real = [pytest.mark.slow, pytest.mark.timeout(200)]


def seen(watch: Watch, record: bytes) -> bool:
    """Woken by the watch alone, until it shows that record."""
    poller = select.poll()
    poller.register(watch.fileno(), select.POLLIN)
    until = time.monotonic() + patient(60)
    while (view := watch.take()) is None or view.stored is None or view.stored.record != record:
        if not poller.poll(max(0.0, until - time.monotonic()) * 1000):
            return False
    return True


# --- what is there; what else a handle does: test_engines.py --------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_session_and_a_watch_outlive_a_restart_of_the_server(
    secured: SecuredEtcd, group: str
) -> None:
    """The connections are made anew, under TLS and with the password: etcd has forgotten its
    tokens."""
    with secured.open(60) as engine, secured.open(60) as other:
        made = engine.cas(group, None, b"before")
        assert isinstance(made, Applied)
        session = engine.open_session(group, 1, 12)  # it is seen renewed, every quarter of that
        watch = engine.watch(group)
        assert seen(watch, b"before")
        held_until_s = now_s() + session.left_s()
        secured.restart()
        assert other.get(group) == Stored(b"before", made.version)
        eventually(lambda: now_s() + session.left_s() > held_until_s + 1)
        assert other.alive(group) == {1}
        assert isinstance(other.cas(group, made.version, b"after"), Applied)
        assert seen(watch, b"after")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_certificates_are_renewed_under_a_handle(secured: SecuredEtcd, group: str) -> None:
    """The first ones are of nobody that the server trusts."""
    place = secured.place / f"renewed{group[-1]}"
    stranger = Authority(place / "stranger").issue("client")
    own = Pair(place / "cert", place / "key")
    shutil.copy(stranger.cert, own.cert)
    shutil.copy(stranger.key, own.key)
    with secured.open(20, cert_file=str(own.cert), key_file=str(own.key)) as engine:
        with pytest.raises(EngineFault, match="it refuses our certificate"):
            engine.get(group)
        shutil.copy(secured.access.cert_file, own.cert)  # one before the other
        with pytest.raises(EngineFault, match="it refuses our certificate"):
            engine.get(group)
        shutil.copy(secured.access.key_file, own.key)

        def answered() -> bool:
            try:
                return engine.get(group) is None
            except EngineFault:  # a connection under way is of the ones before
                return False

        eventually(answered)


# --- what is refused, and is named ----------------------------------------------------------------


@contextmanager
def listening(pair: Pair) -> Iterator[int]:
    """A server that shows that certificate, and says nothing; its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    line, _ = server.accept()
                except OSError:
                    return
                with contextlib.suppress(OSError), line:
                    line.settimeout(patient(10))
                    context.wrap_socket(line, server_side=True).close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def told(engine: Engine, group: str) -> str:
    """What a call that cannot be answered says, and a change: it is known not to be made."""
    with engine:
        with pytest.raises(EngineFault) as raised:
            engine.get(group)
        with pytest.raises(EngineFault):
            engine.cas(group, None, b"never")
        with pytest.raises(EngineFault):
            engine.open_session(group, 9, 4)
    said = str(raised.value)
    assert engine.where in said
    assert "pass word" not in said
    return said


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_who_is_not_trusted(secured: SecuredEtcd, group: str) -> None:
    stranger = Authority(secured.place / "stranger")
    other = stranger.issue("client")
    said = told(secured.open(ca_file=str(stranger.cert)), group)
    assert "its certificate is refused: unable to get local issuer certificate" in said
    assert f"(groupEngineCaFile = {stranger.cert})" in said
    said = told(secured.open(cert_file=str(other.cert), key_file=str(other.key)), group)
    assert "it refuses our certificate: sslv3 alert" in said
    assert f"(groupEngineCertFile = {other.cert})" in said
    said = told(secured.open(cert_file="", key_file=""), group)
    assert "it refuses our certificate" in said
    assert "(groupEngineCertFile = none is given)" in said


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_host_name_that_the_certificate_does_not_have(secured: SecuredEtcd, group: str) -> None:
    url = secured.url.replace("localhost", "127.0.0.1")
    with open_engine(url, 20, secured.access) as engine:
        assert engine.get(group) is None  # that one it has
    named = secured.authority.issue("elsewhere", "DNS:elsewhere")
    with listening(named) as port:
        said = told(open_engine(f"{secured.kind}://localhost:{port}", 20, secured.access), group)
    assert "Hostname mismatch, certificate is not valid for 'localhost'" in said


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_wrong_passwords_and_missing_ones(secured: SecuredEtcd, group: str) -> None:
    with secured.open() as engine:
        assert isinstance(engine.cas(group, None, b"x"), Applied)
    wrong = secured.written("wrong", "wrong\n")
    said = told(secured.open(password_file=wrong), group)
    assert f"(groupEngineUser = {USER}, groupEnginePasswordFile = {wrong})" in said
    said = told(secured.open(user="", password_file=""), group)
    assert "(nobody is named by groupEngineUser)" in said


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_user_has_no_permission_on_that_path(secured: SecuredEtcd, group: str) -> None:
    with secured.open() as engine:
        engine.cas(group, None, b"x")
    word = secured.written("other", "another word")
    secured.allow("other", "another word", "/elsewhere/", secured.root())
    access = secured.access._replace(user="other", password_file=word)
    with open_engine(f"{secured.url}/elsewhere", 20, access) as theirs:
        assert isinstance(theirs.cas(group, None, b"theirs"), Applied)
    said = told(open_engine(secured.url, 20, access), group)
    assert "permission" in said
    assert f"(groupEngineUser = other, groupEnginePasswordFile = {word})" in said


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_one_of_both_speaks_tls(secured: SecuredEtcd, group: str) -> None:
    with (
        open_engine(secured.url, 2) as engine,
        pytest.raises(EngineUnreachable, match=r"TLS.*groupEngineCaFile"),
    ):
        engine.get(group)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_users_are_enabled_under_a_handle(tmp_path: Path, group: str) -> None:
    """Brokers are told their user first, and etcd to ask for it then."""
    need_etcd()
    with ExitStack() as stack:
        server = SecuredEtcd(tmp_path, stack)
        engine = stack.enter_context(server.open())
        nobody = stack.enter_context(server.open(user="", password_file=""))
        made = engine.cas(group, None, b"x")
        assert isinstance(made, Applied)
        assert nobody.get(group) == Stored(b"x", made.version)
        session = engine.open_session(group, 1, 10)
        watch = engine.watch(group)
        assert seen(watch, b"x")
        server.enable()
        assert isinstance(engine.cas(group, made.version, b"y"), Applied)
        assert seen(watch, b"y")
        assert session.left_s() > 0
        with pytest.raises(EngineFault, match="nobody is named by groupEngineUser"):
            nobody.get(group)
        named = server.authority.issue("named", subject="CN")
        other = server.open(cert_file=str(named.cert), key_file=str(named.key))
        with other, pytest.raises(EngineFault, match=r"no certificate with a common name \(CN\)"):
            other.get(group)


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def access(authority: Authority, tmp_path: Path) -> EngineAccess:
    """Of files of its own, that are all good."""
    pair = authority.issue("own")
    word = tmp_path / "word"
    word.write_text("word\n")
    word.chmod(0o600)
    files = {"ca.pem": authority.cert, "cert.pem": pair.cert, "key.pem": pair.key}
    for name, path in files.items():
        shutil.copy(path, tmp_path / name)
    return EngineAccess(*(str(tmp_path / name) for name in files), "me", str(word))


def refused(access: EngineAccess, url: str = "etcd://a:1") -> str:
    with pytest.raises(ConfigError) as raised:
        open_engine(url, 1, access)
    return str(raised.value)


def test_files_that_are_good(access: EngineAccess) -> None:
    found = Access(access)
    assert found.is_tls
    assert found.password() == "word"
    Path(access.key_file).chmod(0o640)  # root:ssl-cert, on Debian
    for url in ("etcd://a:1",):
        open_engine(url, 1, access).close()


def test_a_file_is_not_there(access: EngineAccess) -> None:
    for setting, field in FILES.items():
        said = refused(access._replace(**{field: "/nowhere/x"}))
        assert f"{setting} = /nowhere/x" in said
        assert "No such file" in said


FILES = {
    "groupEngineCaFile": "ca_file",
    "groupEngineCertFile": "cert_file",
    "groupEngineKeyFile": "key_file",
    "groupEnginePasswordFile": "password_file",
}


@pytest.mark.parametrize("content", [b"", b"x", b"-----BEGIN CERTIFICATE-----\nx\n", bytes(99)])
def test_a_file_has_something_else(access: EngineAccess, content: bytes) -> None:
    for setting, field in list(FILES.items())[:3]:
        path = Path(getattr(access, field))
        before = path.read_bytes()
        path.write_bytes(content)
        assert f"{setting} = {path}" in refused(access)
        path.write_bytes(before)


def test_the_key_of_another_certificate(access: EngineAccess, authority: Authority) -> None:
    other = authority.issue("other")
    said = refused(access._replace(key_file=str(other.key)))
    assert f"groupEngineKeyFile = {other.key}: no certificate (PEM) and its key: key" in said


def test_a_key_with_a_passphrase_asks_nobody(access: EngineAccess, tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "pkey", "-in", access.key_file, "-aes128", "-passout", "pass:x", "-out",
         str(locked)], check=True, capture_output=True,
    )  # fmt: skip
    locked.chmod(0o600)
    assert f"groupEngineKeyFile = {locked}: it has a passphrase" in refused(
        access._replace(key_file=str(locked))
    )


@pytest.mark.parametrize(
    ("field", "modes"), [("key_file", (0o604, 0o602)), ("password_file", (0o640, 0o604, 0o620))]
)
def test_secrets_that_others_may_use(
    access: EngineAccess, field: str, modes: tuple[int, ...]
) -> None:
    path = Path(getattr(access, field))
    for mode in modes:
        path.chmod(mode)
        assert f"{path}: its mode is {mode:04o}" in refused(access)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"a\nb", b"a\n\n", b"\0", b"\xff", b"x" * 1_025, b"a\tb"]
)
def test_what_is_no_password(access: EngineAccess, content: bytes) -> None:
    Path(access.password_file).write_bytes(content)
    assert "it must have a password in one line" in refused(access)


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"word", "word"), (b"word\r\n", "word"), (b" w ord ", " w ord "), ("ü消".encode(), "ü消"),
     (b"a:b", "a:b"), (b"x" * 1_024, "x" * 1_024)],
)  # fmt: skip
def test_what_is_a_password(access: EngineAccess, content: bytes, word: str) -> None:
    Path(access.password_file).write_bytes(content)
    assert Access(access).password() == word


def test_files_are_read_again_once_they_are_others(
    access: EngineAccess, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    found = Access(access)
    before = found.context()
    assert found.context() is before
    other = authority.issue("other")
    shutil.copy(other.cert, access.cert_file)
    assert found.context() is before  # its key is not there yet
    assert "what was read before stays in use" in caplog.text
    shutil.copy(other.key, access.key_file)
    assert found.context() is not before
    Path(access.password_file).write_text("another one")
    assert found.password() == "another one"
    Path(access.password_file).unlink()
    assert found.password() == "another one"


def test_a_busy_etcd_is_asked_for_one_token_at_a_time(access: EngineAccess) -> None:
    """Also where nobody who needs it has the time for it."""
    may_answer, asked = threading.Event(), []

    def send(path: str, body: dict[str, Any], _until: float, token: str) -> dict[str, Any]:
        asked.append((path, body, token))
        assert may_answer.wait(patient(60))
        return {"token": f"token {len(asked)}"}

    login = Login("here", Access(access), send)
    for _ in range(3):
        with pytest.raises(EngineUnreachable, match="no token in time"):
            login.token(time.monotonic() + 0.01)
    may_answer.set()
    assert login.token(time.monotonic() + patient(60)) == "token 1"
    assert asked == [("/v3/auth/authenticate", {"name": "me", "password": "word"}, "")]
    login.forget("another")
    assert login.token(0) == "token 1"
    login.forget("token 1")
    assert login.token(time.monotonic() + patient(60)) == "token 2"


def test_a_file_engine_has_neither(access: EngineAccess, tmp_path: Path) -> None:
    for part in (access, NO_ACCESS._replace(user="x")):
        assert "is a file, and knows no TLS and no users" in refused(part, f"sqlite:{tmp_path}/e")
