"""Published Java classes, fetched once by the ordinary `mvn`; and Java of ours, compiled when used.

    kafka = Bundle("kafka-4.1.1", ("org.apache.kafka:kafka_2.13:4.1.1",))
    kafka.fetch()
    command = kafka.java("KafkaWorker", sources, flags=["-Xmx1g"])

All of it lies in a cache (`$COMETMQ_CACHE`, else `~/.cache/cometmq`), never in the repository.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cometmq.bench.extra import BenchError

FETCH_TIMEOUT_S: Final = 600
COMPILE_TIMEOUT_S: Final = 110

# Plain `dependency:copy-dependencies` would take whatever plugin version this Maven was built with.
_COPY: Final = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"
# Spark's POMs name a mirror of Central that is asked before it, and is not there for everybody: who
# names it first is who counts, and says that it has nothing.
_POM: Final = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>cometmq</groupId>
  <artifactId>fetch</artifactId>
  <version>1</version>
  <repositories>
    <repository>
      <id>gcs-maven-central-mirror</id>
      <url>file:///nowhere</url>
      <releases><enabled>false</enabled></releases>
      <snapshots><enabled>false</enabled></snapshots>
    </repository>
  </repositories>
  <dependencies>
{dependencies}  </dependencies>
</project>
"""
_DEPENDENCY: Final = """\
    <dependency>
      <groupId>{}</groupId>
      <artifactId>{}</artifactId>
      <version>{}</version>
    </dependency>
"""


class NotAvailable(BenchError):
    """Java cannot be run here: no JVM, no Maven, or the artifacts cannot be had."""


def cache_dir() -> Path:
    root = os.environ.get("COMETMQ_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "cometmq"


def program(name: str, package: str) -> str:
    """Where a program is. Raises NotAvailable, with the Debian package that brings it."""
    found = shutil.which(name)
    if found is None:
        raise NotAvailable(f"no `{name}` on the PATH: apt-get install {package}")
    return found


@dataclass(frozen=True)
class Bundle:
    """Artifacts of pinned versions, with all that they need to run.

    Args:
        name: of its folder in the cache.
        artifacts: "group:artifact:version".
    """

    name: str
    artifacts: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Another list of artifacts has another folder."""
        return cache_dir() / f"{self.name}-{_key(self.pom.encode())}"

    @property
    def pom(self) -> str:
        parts = (artifact.split(":") for artifact in self.artifacts)
        return _POM.format(dependencies="".join(_DEPENDENCY.format(*each) for each in parts))

    @property
    def missing(self) -> str | None:
        """None: it can be used without a network. Else why not, in a few words."""
        for name, package in (("java", "default-jre-headless"), ("javac", "default-jdk-headless")):
            try:
                program(name, package)
            except NotAvailable as why:
                return str(why)
        if not self._jars.is_dir():
            return f"{self.artifacts[0]} was not fetched yet"
        return None

    @property
    def _jars(self) -> Path:
        return self.folder / "jars"

    def fetch(self) -> list[Path]:
        """The jars; if not there yet, got by Maven, which checks sums. Raises NotAvailable."""
        program("java", "default-jdk-headless")
        if not self._jars.is_dir():
            _fill(self._jars, self._copy)
        return sorted(self._jars.glob("*.jar"))

    def classes(self, sources: Sequence[Path]) -> Path:
        """The folder of the compiled sources; each content of them has its own."""
        key = _key(*(source.read_bytes() for source in sources))
        target = self.folder / f"classes-{key}"
        if not target.is_dir():
            self.fetch()
            _fill(target, lambda into: self._compile(sources, into))
        return target

    def classpath(self, *classes: Path) -> str:
        return os.pathsep.join([*map(str, classes), str(self._jars / "*")])

    def java(self, main: str, *classes: Path, flags: Sequence[str] = ()) -> list[str]:
        """The command that runs a class."""
        java = program("java", "default-jdk-headless")
        return [java, *flags, "-cp", self.classpath(*classes), main]

    def _copy(self, into: Path) -> None:
        pom = into.parent / "pom.xml"
        pom.write_text(self.pom)
        command = [program("mvn", "maven"), "-B", "-C", "-q", "-Dstyle.color=never"]
        command += ["-f", str(pom), _COPY, f"-DoutputDirectory={into}", "-DincludeScope=runtime"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise NotAvailable(f"mvn took longer than {FETCH_TIMEOUT_S} s") from error
        _, name, version = self.artifacts[0].split(":")
        if done.returncode or not (into / f"{name}-{version}.jar").exists():
            raise NotAvailable(f"mvn could not get {self.name}: {_first_error(done.stdout)}")

    def _compile(self, sources: Sequence[Path], into: Path) -> None:
        command = [program("javac", "default-jdk-headless"), "-cp", self.classpath()]
        command += ["-d", str(into), *map(str, sources)]
        # Sources that do not compile are a fault of ours, so that is not NotAvailable.
        subprocess.run(command, check=True, timeout=COMPILE_TIMEOUT_S)


def _key(*contents: bytes) -> str:
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]


def _fill(target: Path, fill: Callable[[Path], None]) -> None:
    """Makes `target` by `fill(directory)`; it appears whole or not at all."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            _alone(),
            tempfile.TemporaryDirectory(dir=target.parent, prefix=".new-") as directory,
        ):
            if target.is_dir():  # somebody else has done so meanwhile
                return
            made = Path(directory) / "made"
            made.mkdir()
            fill(made)
            made.rename(target)
    except OSError as error:
        if not target.is_dir():
            raise NotAvailable(f"cannot write to the cache: {error}") from error


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Maven's own store of jars, which all caches share, does not bear two at once."""
    with (cache_dir() / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _first_error(log: str) -> str:
    errors = [line for line in log.splitlines() if line.startswith("[ERROR]")]
    return (errors or log.splitlines() or ["it said nothing"])[0][:400]
