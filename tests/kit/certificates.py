"""Certificates for tests, made by openssl's command line. No tests here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

_CONFIG = """\
[req]
distinguished_name = name
prompt = no
[name]
{subject} = {name}
[ca]
basicConstraints = critical, CA:TRUE
[leaf]
basicConstraints = critical, CA:FALSE
subjectAltName = {names}
"""


class Pair(NamedTuple):
    """A certificate and its key, in files."""

    cert: Path
    key: Path


class Authority:
    """Signs what tests need. Skips where openssl is not installed."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("certificates: openssl is not installed")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._own = self._make("ca", "IP:127.0.0.1", "ca", "CN")
        self.cert = self._own.cert

    def issue(
        self, name: str, names: str = "DNS:localhost,IP:127.0.0.1", subject: str = "O"
    ) -> Pair:
        """
        Args:
            names: that it is for, as openssl's subjectAltName has them.
            subject: as what it has its own name: O, organization; CN, common name.
        """
        return self._make(name, names, "leaf", subject, self._own)

    def _make(
        self, name: str, names: str, extensions: str, subject: str, signer: Pair | None = None
    ) -> Pair:
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        config = self._folder / f"{name}.cnf"
        config.write_text(_CONFIG.format(name=name, names=names, subject=subject))
        command = [
            "openssl", "req", "-x509", "-config", str(config), "-extensions", extensions,
            "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
            "-keyout", str(pair.key), "-out", str(pair.cert),
        ]  # fmt: skip
        if signer is not None:
            command += ["-CA", str(signer.cert), "-CAkey", str(signer.key)]
        subprocess.run(command, check=True, capture_output=True)
        pair.key.chmod(0o600)
        return pair
