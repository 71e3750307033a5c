"""How an engine is spoken to: by TLS with whom we trust, and as a user with a password.

The files that the settings name are read again once they were replaced, so certificates and
passwords are renewed under brokers that run; what cannot be read then leaves the ones before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from cometmq.actors.runtime.private_file import OF_GROUP, read_private
from cometmq.conf.engine import NO_ACCESS, EngineAccess
from cometmq.protocol.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

log = logging.getLogger(__name__)

PASSWORD_BYTES_MAX: Final = 1_024
PEM_BYTES_MAX: Final = 65_536

T = TypeVar("T")

# What a server says of a certificate that it does not take, or misses.
_OF_OURS: Final = (
    "CERTIFICATE",
    "UNKNOWN_CA",
    "ACCESS_DENIED",
    "DECRYPT_ERROR",
    "HANDSHAKE_FAILURE",
)


class Secret(str):
    """A text that no log line shows, whoever prints what it is part of."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'...'"


class _Connection(ssl.SSLSocket):
    """TLS socket that reads the server's rejection of our certificate when a send fails: with TLS
    1.3 it arrives after the handshake, and the error of the send does not name it."""

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        try:
            return super().send(data, flags)
        except (ConnectionError, ssl.SSLEOFError):
            with contextlib.suppress(ssl.SSLWantReadError):
                self.recv(1)
            raise


class Access:
    """What an EngineAccess names, read. Any number of threads use it.

    Raises ConfigError, with the setting, the file, and what is wrong with it.
    """

    def __init__(self, asked: EngineAccess) -> None:
        self.asked = asked
        self.user = asked.user
        tls = (asked.ca_file, asked.cert_file, asked.key_file)
        self._context = _Kept(tls, lambda: _context(asked)) if asked.ca_file else None
        self._password = (
            _Kept((asked.password_file,), lambda: _password(asked)) if asked.user else None
        )

    @property
    def is_tls(self) -> bool:
        return self._context is not None

    def context(self) -> ssl.SSLContext | None:
        """None: without TLS."""
        return None if self._context is None else self._context.get()

    def password(self) -> Secret:
        assert self._password is not None, "nobody is named"
        return self._password.get()

    def who(self) -> str:
        """For messages: whom the engine sees."""
        if not self.user:
            return "nobody is named by groupEngineUser"
        return (
            f"groupEngineUser = {self.user}, groupEnginePasswordFile = {self.asked.password_file}"
        )

    def words(self, error: BaseException) -> str:
        """What went wrong on a connection."""
        if isinstance(error, ssl.SSLCertVerificationError):
            why = error.verify_message.rstrip(".")
            return f"its certificate is refused: {why} (groupEngineCaFile = {self.asked.ca_file})"
        if isinstance(error, ssl.SSLEOFError):
            return "it ended the connection within TLS: does it speak TLS there?"
        if isinstance(error, ssl.SSLError) and error.reason:
            said = error.reason.replace("_", " ").lower()
            if is_of_ours(error):
                ours = self.asked.cert_file or "none is given"
                return f"it refuses our certificate: {said} (groupEngineCertFile = {ours})"
            return f"TLS fails: {said}: does it speak TLS there?"
        said = str(error) or type(error).__name__
        if isinstance(error, ConnectionResetError) and not self.is_tls:
            return f"{said} (does it take TLS alone? see groupEngineCaFile)"
        return said


def is_refusal(error: BaseException) -> bool:
    """Whether TLS says that one of both is not who it must be, or that there is no TLS."""
    return isinstance(error, ssl.SSLError) and not isinstance(
        error,
        ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLWantReadError | ssl.SSLWantWriteError,
    )


def is_of_ours(error: BaseException) -> bool:
    """Whether the other side has refused our certificate. With TLS 1.3 that is heard only after
    the handshake; what was sent meanwhile it has not read."""
    reason = (error.reason or "") if isinstance(error, ssl.SSLError) else ""
    return "ALERT" in reason and any(word in reason for word in _OF_OURS)


def shut(line: socket.socket) -> None:
    """End a connection that another thread reads. An SSLSocket's own `shutdown` takes its TLS
    away, and that thread would read what is encrypted."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(line, socket.SHUT_RDWR)


class _Kept(Generic[T]):
    """What was made of files; made again once these are others."""

    def __init__(self, paths: Sequence[str], make: Callable[[], T]) -> None:
        self._paths = [path for path in paths if path]
        self._make = make
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._value = make()

    def get(self) -> T:
        with self._lock:
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._value = self._make()
                except ConfigError as error:  # of two files one may not be replaced yet
                    log.warning("what was read before stays in use: %s", error)
            return self._value

    def _look(self) -> list[tuple[int, int, int] | None]:
        found: list[tuple[int, int, int] | None] = []
        for path in self._paths:
            try:
                file = os.stat(path)
                found.append((file.st_ino, file.st_size, file.st_mtime_ns))
            except OSError:
                found.append(None)
        return found


def _context(asked: EngineAccess) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the host's name must be in the certificate
    context.sslsocket_class = _Connection
    try:
        context.load_verify_locations(asked.ca_file)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise ConfigError(f"groupEngineCaFile = {asked.ca_file}: {_reason(error)}") from None
    if asked.cert_file:
        _load_own(context, asked)
    return context


def _load_own(context: ssl.SSLContext, asked: EngineAccess) -> None:
    key = read_private("groupEngineKeyFile", Path(asked.key_file), PEM_BYTES_MAX, others=OF_GROUP)
    if b"ENCRYPTED" in key:
        raise ConfigError(f"groupEngineKeyFile = {asked.key_file}: it has a passphrase")
    try:
        # Without a password given, OpenSSL would ask for one at the terminal.
        context.load_cert_chain(asked.cert_file, asked.key_file, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"groupEngineCertFile = {asked.cert_file}, groupEngineKeyFile = {asked.key_file}: "
            f"no certificate (PEM) and its key: {_reason(error)}"
        ) from None


def _password(asked: EngineAccess) -> Secret:
    path = Path(asked.password_file)
    text = read_private("groupEnginePasswordFile", path, PASSWORD_BYTES_MAX)
    try:
        word = text.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        word = ""
    if not word or not word.isprintable() or len(text) > PASSWORD_BYTES_MAX:
        raise ConfigError(
            f"groupEnginePasswordFile = {path}: it must have a password in one line, of "
            f"{PASSWORD_BYTES_MAX} bytes at most"
        )
    return Secret(word)


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return str(error.strerror if isinstance(error, OSError) and error.strerror else error)


#: Without TLS, as nobody.
PLAIN: Final = Access(NO_ACCESS)
