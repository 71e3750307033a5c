"""What users and distributors get: the wheel, the sdist, and a build that cannot be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from installed import copy_sources, install, wheel_in
from patience import patient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"


def run(*command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    own = ("COMETMQ_", "PYTHONPATH", "PYTEST_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    return subprocess.run(
        command, cwd=cwd, env={**kept, **variables}, capture_output=True, text=True,
        timeout=patient(500), check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_in(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_sources(tmp_path_factory.mktemp("sources") / "tree")


@pytest.fixture(scope="module")
def unpacked(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    done = run(sys.executable, "-c", SDIST, folder, cwd=tree)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("cometmq-*.tar.gz")
    with tarfile.open(made) as archive:
        archive.extractall(folder, filter="data")
    return folder / made.name.removesuffix(".tar.gz")


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_wheel_has_what_is_run(wheel: Path) -> None:
    """No debug information, and beside Python what `cometmq bench` builds, and the grammar."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        kernel = [name for name in names if name.endswith(".so")]
        assert len(kernel) == 5
        assert not any(b".debug_" in archive.read(name) for name in kernel)
    packaged = (".py", ".pyi", ".so", "/py.typed", ".yaml")
    other = {name for name in names if not name.endswith(packaged) and ".dist-info/" not in name}
    assert {re.sub(r"/\w+\.java$", "/*.java", name) for name in other} == {
        "cometmq/bench/control.c", "cometmq/bench/peers/java/*.java",
        "cometmq/protocol/filters/grammar.lark",
    }  # fmt: skip
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {
        "cometmq", "pyspark_cometmq",
    }  # fmt: skip
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_sdist_has_all_sources(tree: Path, unpacked: Path) -> None:
    built = re.compile(r"cometmq\.egg-info/|PKG-INFO$|setup\.cfg$")
    found, wanted = ({each for each in files_of(folder) if not built.match(each)}
                     for folder in (unpacked, tree))  # fmt: skip
    assert found == wanted


def test_the_sdists_tests_run(wheel: Path, unpacked: Path, tmp_path: Path) -> None:
    """Against the wheel, and where nobody has the test data; all of them can be collected."""
    python = install(wheel, tmp_path / "venv")
    pytest_ = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    done = run(*pytest_, "--collect-only", "--assert=plain", "tests", "bench", cwd=unpacked)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    quick = ("tests/conf", "tests/test_errors.py", "tests/shm/test_records.py")
    done = run(*pytest_, "-m", "not slow", f"--basetemp={tmp_path / 'inner'}", *quick, cwd=unpacked)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 100


@pytest.mark.parametrize("variable", ["PATH", "CC"])
def test_a_build_without_a_compiler(tree: Path, variable: str) -> None:
    """One sentence, which says what to install."""
    done = run(sys.executable, "setup.py", "-q", "build_ext", cwd=tree, **{variable: "/nowhere/cc"})
    assert done.returncode == 1
    *warnings, said = done.stderr.splitlines()  # setuptools has some of its own
    assert not any("Traceback" in line for line in warnings)
    sentence = r"cometmq: .* by a C compiler, and \S+ is not there: install gcc .*"
    assert re.fullmatch(sentence, said)


def test_a_free_threaded_python_is_refused(tree: Path) -> None:
    """Here an ordinary one that is told it is one, since few machines have it."""
    pretend = (
        "import sys, sysconfig; sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1; "
        "sys.argv = ['setup.py', '-q', 'build_ext']; import runpy; runpy.run_path('setup.py')"
    )
    done = run(sys.executable, "-c", pretend, cwd=tree)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "cometmq: a free-threaded Python is not supported"
    )
