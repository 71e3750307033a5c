"""What replicas show each other."""

from __future__ import annotations

import ssl

import pytest
from cryptography import x509

from cometmq.actors.replication.peers import certificate
from cometmq.actors.replication.peers.certificate import Contexts, authority_key, contexts, name_of
from cometmq.protocol.errors import ConfigError

SECRET = bytes(range(32))


def joined(one: Contexts, other: Contexts) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """One as the client, and the other; raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = one.client.wrap_bio(to_client, to_server)
    server = other.server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client.version() == server.version() == "TLSv1.3"
    return client, server


def shake_hands(one: Contexts, other: Contexts) -> tuple[str, str]:
    """Whom each of them sees; raises ssl.SSLError."""
    client, server = joined(one, other)
    return name_of(client), name_of(server)


@pytest.mark.parametrize("name", ["n0", "a", "a" * 64, "a" * 120, "A.b_c"])
def test_each_sees_the_other_s_name(name: str) -> None:
    ours, theirs = contexts(SECRET, "group-a", name), contexts(SECRET, "group-a", "n1")
    assert shake_hands(ours, theirs) == ("n1", name)
    assert shake_hands(theirs, ours) == (name, "n1")


def test_a_replica_may_be_called_like_its_group() -> None:
    same = contexts(SECRET, "g", "g")
    assert shake_hands(same, contexts(SECRET, "g", "replicas")) == ("replicas", "g")


@pytest.mark.parametrize(("secret", "group"), [(bytes(32), "group-a"), (SECRET, "group-b")])
def test_another_secret_or_group(secret: bytes, group: str) -> None:
    ours, theirs = contexts(SECRET, "group-a", "n0"), contexts(secret, group, "n1")
    for pair in ((ours, theirs), (theirs, ours)):
        with pytest.raises(ssl.SSLError):
            shake_hands(*pair)


def test_the_authority_is_the_same_for_ever() -> None:
    """Or replicas of two releases could not speak to each other."""
    public = authority_key(SECRET, "group-a").public_key().public_bytes_raw()
    loaded = contexts(SECRET, "group-a", "n0").client.get_ca_certs(binary_form=True)
    assert public in loaded[0]
    assert public.hex() == "6c593c797833ac5f7e9ad9a5b9d98356024338fd51e242b02bddb8c6bde87423"


def test_each_start_draws_another_key() -> None:
    shown = [seen_of(contexts(SECRET, "group-a", "n0")) for _ in range(2)]
    one, other = (each.public_key().public_bytes_raw() for each in shown)
    assert one != other
    for each in shown:
        authority_key(SECRET, "group-a").public_key().verify(
            each.signature, each.tbs_certificate_bytes
        )
        assert not each.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def seen_of(theirs: Contexts) -> x509.Certificate:
    """The certificate that they show to who comes."""
    ours = contexts(SECRET, "group-a", "n1")
    client, _ = joined(ours, theirs)
    content = client.getpeercert(binary_form=True)
    assert content is not None
    return x509.load_der_x509_certificate(content)


def test_without_ed25519_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: object) -> None:
        raise ssl.SSLError(1, "no such key")

    monkeypatch.setattr(certificate, "_context", cannot)
    with pytest.raises(ConfigError, match=r"TLS 1\.3 with keys of Ed25519"):
        contexts(SECRET, "group-a", "n0")


def test_nothing_below_tls_1_3_is_spoken() -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    ours = contexts(SECRET, "group-a", "n0")
    with pytest.raises(ssl.SSLError, match=r"(?i)version|protocol"):
        shake_hands(ours._replace(client=old), ours)
