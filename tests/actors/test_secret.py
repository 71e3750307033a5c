"""The file with the secret of a group: how it is made, and which files are none."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest

from cometmq.actors.replication.peers import secret
from cometmq.actors.replication.peers.secret import load_secret, make_secret
from cometmq.protocol.errors import ConfigError


def test_a_secret_is_made_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    make_secret(path)
    found = load_secret(path)
    assert len(found) == 32
    assert path.stat().st_mode & 0o7777 == 0o600
    assert [*tmp_path.iterdir()] == [path]
    with pytest.raises(ConfigError, match="there is a file already"):
        make_secret(path)
    assert load_secret(path) == found
    assert [*tmp_path.iterdir()] == [path]
    make_secret(tmp_path / "another")
    assert load_secret(tmp_path / "another") != found


@pytest.mark.parametrize("step", ["write_beside", "sync_folder", "link"])
def test_a_secret_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os if step == "link" else secret, step, fail)
    path = tmp_path / "secret"
    with pytest.raises(ConfigError, match="Permission denied"):
        make_secret(path)
    left = [*tmp_path.iterdir()]
    assert left == ([path] if step == "sync_folder" else [])
    if left:
        load_secret(path)


TEXT = b"0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("content", "is_good"),
    [
        (TEXT, True),
        (TEXT + b"\n", True),
        (TEXT.upper(), True),
        (TEXT[:-1], False),
        (TEXT[:-1] + b"\n", False),
        (TEXT + b"0", False),
        (TEXT + b"\n\n", False),
        (TEXT[:-1] + b"g", False),
        (b"", False),
        (b"\n", False),
        (bytes(64), False),
        ("é".encode() * 32, False),
        (TEXT * 1_000, False),
    ],
)
def test_what_is_a_secret(tmp_path: Path, content: bytes, is_good: bool) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    if is_good:
        assert load_secret(path) == bytes.fromhex(TEXT.decode())
    else:
        with pytest.raises(ConfigError, match=f"groupSecretFile = {path}: .*hexadecimal"):
            load_secret(path)


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o604, 0o602, 0o601, 0o666, 0o610])
def test_a_secret_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    make_secret(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode is {mode:04o}"):
        load_secret(path)


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "socket", "nothing", "zero"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "secret"
    with contextlib.ExitStack() as stack:
        match kind:
            case "folder":
                path.mkdir(0o700)
            case "pipe":
                os.mkfifo(path, 0o600)
            case "device":
                path.symlink_to("/dev/zero")
            case "socket":
                stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(path))
            case "zero":
                path = tmp_path / "a\0b"
        with pytest.raises(ConfigError, match=r"no regular file|cannot be read"):
            load_secret(path)


def test_a_secret_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    make_secret(path)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner:
        with pytest.raises(ConfigError, match=f"belongs to user {owner}"):
            load_secret(path)
    else:
        os.chown(path, 4_711, -1)
        with pytest.raises(ConfigError, match="belongs to user 4711"):
            load_secret(path)
