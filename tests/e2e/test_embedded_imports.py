"""What the processes of an embedded broker import: never what happens to lie in the working
directory, always the package that the program itself uses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from family import MARK, RUN, SMALL
from patience import patient

import cometmq

ROOT = Path(__file__).resolve().parents[2]
# Third-party packages, one of ours, and what the standard library has.
HIDDEN = ("zmq", "msgspec", "pykka", "psutil", "cometmq", "logging", "select", "runpy", "site")
PROGRAM = """
import json, os, sys
{before}
import cometmq
from cometmq import Broker
{after}
settings = json.loads(sys.argv[2])
with Broker(sys.argv[1], settings=settings, writer={writer!r}) as broker:
    with broker.producer() as producer:
        producer.send("orders", b"hello")
    with broker.consumer("g", "orders") as consumer:
        for message in consumer:
            print("got", message.body.decode(), cometmq.__file__)
            break
"""


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    """A folder with modules that nobody may import."""
    folder = tmp_path / "poisoned"
    folder.mkdir()
    for name in HIDDEN:
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'hit')!r}, 'a').write('{name} ')\n"
            "raise ImportError('from the working directory')\n"
        )
    return folder


def run(tmp_path: Path, cwd: Path, *flags: str, **parts: str) -> str:
    """What the program prints; it lies in a folder of its own."""
    script = tmp_path / "program" / "main.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(PROGRAM.format(**{"before": "", "after": "", "writer": "apart"} | parts))
    settings = {key: value for key, value in SMALL.items() if key != "port"}
    done = subprocess.run(
        [sys.executable, *flags, script, tmp_path / "store", msgspec.json.encode(settings)],
        cwd=cwd,
        env={**os.environ, MARK: f"{RUN}/embedded"},
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    hit = tmp_path / "hit"
    assert not hit.exists(), f"imported: {hit.read_text()}"
    return done.stdout


@pytest.mark.parametrize("writer", ["apart", "here"])
def test_nothing_comes_from_the_working_directory(
    writer: str, poisoned: Path, tmp_path: Path
) -> None:
    assert run(tmp_path, poisoned, writer=writer).startswith("got hello")


def test_nor_from_what_the_program_has_on_its_path(poisoned: Path, tmp_path: Path) -> None:
    """Put in front once it has imported us."""
    after = f"sys.path.insert(0, {str(poisoned)!r})"
    assert run(tmp_path, tmp_path, after=after).startswith("got hello")


def test_a_package_that_the_program_alone_knows_is_found(poisoned: Path, tmp_path: Path) -> None:
    """Vendored: by its own path, in a Python that looks nowhere else."""
    vendor = tmp_path / "vendor"
    package = vendor / "cometmq"
    package.mkdir(parents=True)
    for name in ("actors", "client", "conf", "protocol", "shm", "spark"):
        (package / name).symlink_to(ROOT / name)
    for path in (ROOT / "front").iterdir():
        (package / path.name).symlink_to(path)
    folders = [str(vendor), str(Path(msgspec.__file__).parents[1])]
    said = run(tmp_path, poisoned, "-I", "-S", before=f"sys.path += {folders!r}")
    assert said.startswith("got hello")
    assert str(package) in said
    assert str(package) not in str(cometmq.__file__)


def test_a_start_imports_nothing_that_it_does_not_need() -> None:
    """Each of these is a twentieth of a start or more."""
    program = (
        "import sys; from cometmq.actors.launch import process, supervisor; "
        "process.load_roles(supervisor.BrokerSettings()); "
        "print(*{'asyncio', 'psutil', 'ssl', 'rich', 'click', 'lark', 'difflib', 'subprocess'}"
        " & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=True,
    )
    assert done.stdout == "\n"


@pytest.mark.parametrize("profile", [None, "test"])
def test_clients_are_imported_while_the_broker_starts(profile: str | None, tmp_path: Path) -> None:
    program = (
        "import sys; from cometmq import Broker; print('cometmq.client' in sys.modules); "
        f"Broker(sys.argv[1], profile={profile!r}).close(); print('cometmq.client' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "store"],
        env={**os.environ, MARK: f"{RUN}/embedded"},
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=True,
    )
    assert done.stdout.split() == ["False", "True"]
