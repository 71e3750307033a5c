"""What a replica shows the others: a certificate that its group's authority has signed.

    key of the authority  =  HMAC-SHA256(secret, "cometmq replicas' authority v1" 0 group)

Whoever has the group's secret is the authority, and so each replica signs its own certificate, for
a key that it draws anew at each start. So the key of a connection is nowhere but in the memory of
the two that it joins, and there is nothing to be given out but the secret.

The forms are those of RFC 5280 and RFC 8410.
"""

from __future__ import annotations

import base64
import hmac
import os
import secrets
import ssl
from typing import Any, Final, NamedTuple

from cometmq.actors.replication.ed25519 import public_key, sign
from cometmq.protocol.errors import ConfigError

_DOMAIN: Final = b"cometmq replicas' authority v1"  # of what is derived for something else: another

_BOOLEAN, _INTEGER, _BITS, _OCTETS, _OBJECT, _UTF8 = 0x01, 0x02, 0x03, 0x04, 0x06, 0x0C
_UTC_TIME, _TIME, _SEQUENCE, _SET, _VERSION, _EXTENSIONS = 0x17, 0x18, 0x30, 0x31, 0xA0, 0xA3
_TRUE: Final = b"\xff"
_COMMON_NAME: Final = bytes.fromhex("550403")  # 2.5.4.3
_BASIC_CONSTRAINTS: Final = bytes.fromhex("551d13")  # 2.5.29.19
_ED25519: Final = bytes.fromhex("2b6570")  # 1.3.101.112


class Contexts(NamedTuple):
    """How a replica speaks TLS: to who comes, and to whom it goes."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def contexts(secret: bytes, group: str, replica: str) -> Contexts:
    """TLS 1.3 and nothing else, with certificates on both sides. Who the other side is says
    `name_of`. Raises ConfigError where this OpenSSL does not do that."""
    seed = hmac.digest(secret, b"\0".join((_DOMAIN, group.encode())), "sha256")
    issuer = f"replicas of {group}"  # no replica is called so: it has spaces
    authority = _certificate(issuer, issuer, public_key(seed), seed, True)
    own_seed = os.urandom(32)
    own = _certificate(issuer, replica, public_key(own_seed), seed, False)
    pem = _pem("CERTIFICATE", own) + _pem("PRIVATE KEY", _private_key(own_seed))
    try:
        return Contexts(
            _context(ssl.PROTOCOL_TLS_SERVER, authority, pem),
            _context(ssl.PROTOCOL_TLS_CLIENT, authority, pem),
        )
    except ssl.SSLError as error:
        raise ConfigError(
            "replicas speak to each other by TLS 1.3 with keys of Ed25519, and "
            f"{ssl.OPENSSL_VERSION} does not: {error}"
        ) from None


def name_of(connection: ssl.SSLObject) -> str:
    """Of the replica at the other end, once the handshake is over; "" where it has none."""
    found: Any = connection.getpeercert() or {}
    names = {key: value for part in found.get("subject", ()) for key, value in part}
    return str(names.get("commonName", ""))


def _context(protocol: int, authority: bytes, pem: bytes) -> ssl.SSLContext:
    made = ssl.SSLContext(protocol)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # it is a replica's name, not a machine's
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=authority)
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        made.num_tickets = 0  # nobody comes back by one
    memory = os.memfd_create("certificate")  # OpenSSL reads files alone
    try:
        os.write(memory, pem)
        made.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return made


# --- forms ---


def _certificate(issuer: str, subject: str, key: bytes, signer: bytes, is_authority: bool) -> bytes:
    """For ever: whoever has the secret can make another one."""
    form = _part(_SEQUENCE, _part(_OBJECT, _ED25519))
    always = _part(_SEQUENCE, _part(_UTC_TIME, b"700101000000Z"), _part(_TIME, b"99991231235959Z"))
    signs = _part(_SEQUENCE, _part(_BOOLEAN, _TRUE) if is_authority else b"")
    extension = _part(
        _SEQUENCE,
        _part(_OBJECT, _BASIC_CONSTRAINTS), _part(_BOOLEAN, _TRUE), _part(_OCTETS, signs),
    )  # fmt: skip
    said = _part(
        _SEQUENCE,
        _part(_VERSION, _part(_INTEGER, b"\x02")),
        _part(_INTEGER, b"\x01" + secrets.token_bytes(8)),
        form,
        _name(issuer),
        always,
        _name(subject),
        _part(_SEQUENCE, form, _bits(key)),
        _part(_EXTENSIONS, _part(_SEQUENCE, extension)),
    )
    return _part(_SEQUENCE, said, form, _bits(sign(signer, said)))


def _private_key(seed: bytes) -> bytes:
    form = _part(_SEQUENCE, _part(_OBJECT, _ED25519))
    return _part(_SEQUENCE, _part(_INTEGER, b"\0"), form, _part(_OCTETS, _part(_OCTETS, seed)))


def _name(text: str) -> bytes:
    common = _part(_SEQUENCE, _part(_OBJECT, _COMMON_NAME), _part(_UTF8, text.encode()))
    return _part(_SEQUENCE, _part(_SET, common))


def _bits(content: bytes) -> bytes:
    return _part(_BITS, b"\0", content)


def _part(tag: int, *content: bytes) -> bytes:
    """In DER: tag, length, content."""
    whole = b"".join(content)
    size = len(whole)
    length = bytes([size]) if size < 128 else b"\x82" + size.to_bytes(2, "big")
    if 128 <= size < 256:
        length = b"\x81" + bytes([size])
    return bytes([tag]) + length + whole


def _pem(kind: str, content: bytes) -> bytes:
    text = base64.encodebytes(content).decode()
    return f"-----BEGIN {kind}-----\n{text}-----END {kind}-----\n".encode()
