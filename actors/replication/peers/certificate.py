"""What a replica shows the others: a certificate that its group's authority has signed.

    key of the authority  =  HMAC-SHA256(secret, "cometmq replicas' authority v1" 0 group)

Whoever has the group's secret is the authority, and so each replica signs its own certificate, for
a key that it draws anew at each start. So the key of a connection is nowhere but in the memory of
the two that it joins, and there is nothing to be given out but the secret.
"""

from __future__ import annotations

import hmac
import os
import ssl
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from cometmq.protocol.errors import ConfigError

_DOMAIN: Final = b"cometmq replicas' authority v1"  # of what is derived for something else: another
_AUTHORITY: Final = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "CometMQ replicas")])
_REPLICA: Final = "cometmq-replica:"  # a URI, since a common name has 64 characters at most
# For ever: whoever has the secret can make another one. RFC 5280, 4.1.2.5
_BEGIN: Final = datetime(1970, 1, 1, tzinfo=UTC)
_END: Final = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


class Contexts(NamedTuple):
    """How a replica speaks TLS: to who comes, and to whom it goes."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def contexts(secret: bytes, group: str, replica: str) -> Contexts:
    """TLS 1.3 and nothing else, with certificates on both sides. Who the other side is says
    `name_of`. Raises ConfigError where this OpenSSL does not do that."""
    authority, own = authority_key(secret, group), Ed25519PrivateKey.generate()
    issued = _certificate(_AUTHORITY, authority.public_key(), authority, is_authority=True)
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(_REPLICA + replica)])
    shown = _certificate(x509.Name([]), own.public_key(), authority, names=names)
    key = own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    root = issued.public_bytes(Encoding.DER)
    pem = shown.public_bytes(Encoding.PEM) + key
    try:
        return Contexts(
            _context(ssl.PROTOCOL_TLS_SERVER, root, pem),
            _context(ssl.PROTOCOL_TLS_CLIENT, root, pem),
        )
    except ssl.SSLError as error:
        raise ConfigError(
            "replicas speak to each other by TLS 1.3 with keys of Ed25519, and "
            f"{ssl.OPENSSL_VERSION} does not: {error}"
        ) from None


def authority_key(secret: bytes, group: str) -> Ed25519PrivateKey:
    """It signs what the group's replicas show."""
    seed = hmac.digest(secret, b"\0".join((_DOMAIN, group.encode())), "sha256")
    return Ed25519PrivateKey.from_private_bytes(seed)


def name_of(connection: ssl.SSLObject) -> str:
    """Of the replica at the other end, once the handshake is over; "" where it has none."""
    found: Any = connection.getpeercert() or {}
    for kind, value in found.get("subjectAltName", ()):
        if kind == "URI" and value.startswith(_REPLICA):
            return str(value[len(_REPLICA) :])
    return ""


def _certificate(
    subject: x509.Name,
    key: Ed25519PublicKey,
    signer: Ed25519PrivateKey,
    *,
    is_authority: bool = False,
    names: x509.SubjectAlternativeName | None = None,
) -> x509.Certificate:
    signs = x509.BasicConstraints(ca=is_authority, path_length=None)
    builder = (
        x509.CertificateBuilder()
        .issuer_name(_AUTHORITY).subject_name(subject).public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN).not_valid_after(_END)
        .add_extension(signs, critical=True)
    )  # fmt: skip
    if names is not None:
        builder = builder.add_extension(names, critical=True)  # RFC 5280, 4.2.1.6
    return builder.sign(signer, None)


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
