"""What replicas show each other, and the signatures in it."""

from __future__ import annotations

import hashlib
import hmac
import random
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from cometmq.actors.replication import certificate
from cometmq.actors.replication.certificate import Contexts, contexts, name_of
from cometmq.actors.replication.ed25519 import public_key, sign
from cometmq.protocol.errors import ConfigError

SECRET = bytes(range(32))
SEED = random.randrange(1 << 32)

# RFC 8032, 7.1: private key, public key, message, signature.
VECTORS = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701c"
        "f9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0"
        "f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f76098"
        "4dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]


@pytest.mark.parametrize(("private", "public", "message", "signature"), VECTORS)
def test_signatures_of_the_rfc(private: str, public: str, message: str, signature: str) -> None:
    assert public_key(bytes.fromhex(private)).hex() == public
    assert sign(bytes.fromhex(private), bytes.fromhex(message)).hex() == signature


def shake_hands(one: Contexts, other: Contexts) -> tuple[str, str]:
    """Whom each of them sees; raises ssl.SSLError."""
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
    domain = b"cometmq replicas' authority v1"
    seed = hmac.digest(SECRET, domain + b"\0group-a", hashlib.sha256)
    loaded = contexts(SECRET, "group-a", "n0").client.get_ca_certs(binary_form=True)
    assert public_key(seed) in loaded[0]
    expected = "6c593c797833ac5f7e9ad9a5b9d98356024338fd51e242b02bddb8c6bde87423"
    assert public_key(seed).hex() == expected


def test_each_start_draws_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def keep(seed: bytes) -> bytes:
        drawn.append(seed)
        return public_key(seed)

    monkeypatch.setattr(certificate, "public_key", keep)
    for _ in range(2):
        contexts(SECRET, "group-a", "n0")
    assert drawn[0] == drawn[2]
    assert drawn[1] != drawn[3]


def test_openssl_takes_them(tmp_path: Path) -> None:
    """As what they are, and by its strictest rules for the signature."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    seeds = [random.Random(SEED).randbytes(32) for _ in range(2)]
    authority = certificate._certificate("a b", "a b", public_key(seeds[0]), seeds[0], True)
    own = certificate._certificate("a b", "n0", public_key(seeds[1]), seeds[0], False)
    paths = [tmp_path / "authority.pem", tmp_path / "own.pem"]
    for path, content in zip(paths, (authority, own), strict=True):
        path.write_bytes(certificate._pem("CERTIFICATE", content))
    for path in paths:
        command = ["openssl", "verify", "-check_ss_sig", "-CAfile", str(paths[0]), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    shown = subprocess.run(
        ["openssl", "x509", "-in", str(paths[1]), "-noout", "-text"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for expected in ("CN = n0", "CN = a b", "CA:FALSE", "9999", "ED25519"):
        assert expected in shown


def test_without_ed25519_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate, "_private_key", lambda _seed: b"\x30\0")
    with pytest.raises(ConfigError, match=r"TLS 1\.3 with keys of Ed25519"):
        contexts(SECRET, "group-a", "n0")


def test_nothing_below_tls_1_3_is_spoken() -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    ours = contexts(SECRET, "group-a", "n0")
    with pytest.raises(ssl.SSLError, match=r"(?i)version|protocol"):
        shake_hands(ours._replace(client=old), ours)
