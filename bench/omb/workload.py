"""A workload file of OpenMessaging Benchmark: its fields, read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, get_type_hints

from cometmq.bench.extra import BenchError, load
from cometmq.bench.stamps import STAMP_BYTES

SATURATE: Final = 10_000_000  # the rate that its files ask for as "maximum"
FOLDER: Final = Path(__file__).parent
KEYS: Final = ("NO_KEY", "KEY_ROUND_ROBIN", "RANDOM_NANO")
# What the file may say and we do nothing with, and the only value for which that is right.
_UNUSED: Final[Mapping[str, Any]] = {
    "keyDistributor": "NO_KEY",
    "backlogDrainRatio": 1.0,
}


@dataclass(frozen=True)
class Workload:
    """The names are the benchmark's own (its Workload.java), and so are the defaults."""

    name: str
    topics: int
    partitionsPerTopic: int
    messageSize: int
    subscriptionsPerTopic: int
    producersPerTopic: int
    consumerPerSubscription: int
    producerRate: int  # messages/s of all producers; 0 = find the largest that is sustained
    testDurationMinutes: float
    warmupDurationMinutes: float = 1
    useRandomizedPayloads: bool = False
    randomBytesRatio: float = 0.0
    randomizedPayloadPoolSize: int = 0
    payloadFile: str = ""
    consumerBacklogSizeGB: float = 0
    keyDistributor: str = "NO_KEY"
    backlogDrainRatio: float = 1.0

    def __post_init__(self) -> None:
        for name in ("topics", "partitionsPerTopic", "subscriptionsPerTopic", "producersPerTopic",
                     "consumerPerSubscription"):  # fmt: skip
            self._need(name, getattr(self, name) >= 1, "must be at least 1")
        self._need(
            "messageSize", self.messageSize >= STAMP_BYTES,
            f"must be at least {STAMP_BYTES}: so much of a body tells it from all others",
        )  # fmt: skip
        for name in ("producerRate", "consumerBacklogSizeGB", "warmupDurationMinutes",
                     "randomizedPayloadPoolSize"):  # fmt: skip
            self._need(name, getattr(self, name) >= 0, "must not be negative")
        self._need("testDurationMinutes", self.testDurationMinutes > 0, "must be above 0")
        self._need("randomBytesRatio", 0 <= self.randomBytesRatio <= 1, "must be from 0 to 1")
        for name, only in _UNUSED.items():
            self._need(name, getattr(self, name) == only, f"only {only} is supported")

    def _need(self, name: str, holds: bool, text: str) -> None:
        if not holds:
            raise BenchError(f"{self.name}: {name} {getattr(self, name)}: {text}")

    @property
    def saturates(self) -> bool:
        return self.producerRate >= SATURATE

    @property
    def payload_options(self) -> dict[str, Any]:
        """For the workers. Without random payloads and file the body is zeros, as theirs is."""
        if self.payloadFile:
            return {"payload_file": self.payloadFile}
        share = self.randomBytesRatio if self.useRandomizedPayloads else 0.0
        return {"random_share": share, "pool": self.randomizedPayloadPoolSize}


def known_workloads() -> list[str]:
    """Names of the files that come with CometMQ."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find(name: str) -> Path:
    """A file, or one that comes with CometMQ by its name."""
    path = Path(name)
    if path.is_file():
        return path
    own = FOLDER / f"{name.removesuffix('.yaml')}.yaml"
    if "/" not in name and own.is_file():
        return own
    raise BenchError(f"{name}: no such file; with CometMQ come {', '.join(known_workloads())}")


def parse(path: Path) -> Workload:
    """Raises BenchError that names file and field."""
    yaml = load("yaml")
    try:
        given = yaml.safe_load(path.read_text())
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BenchError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(given, dict):
        raise BenchError(f"{path}: not a workload: a mapping of fields is expected")
    return _checked(path, {"name": path.stem} | given)


def _checked(path: Path, given: dict[Any, Any]) -> Workload:
    types = get_type_hints(Workload)
    for name, value in given.items():
        if name not in types:
            from difflib import get_close_matches

            near = get_close_matches(str(name), list(types), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise BenchError(f"{path}: unknown field {name!r}{hint}")
        if not _fits(value, types[name]):
            raise BenchError(f"{path}: {name}: {value!r} is not {_article(types[name].__name__)}")
    required = [each.name for each in fields(Workload)][:9]
    missing = [name for name in required if name not in given]
    if missing:
        raise BenchError(f"{path}: {', '.join(missing)}: missing")
    payload = given.get("payloadFile") or ""
    if payload:
        file = path.parent / payload
        if not file.is_file():
            raise BenchError(f"{path}: payloadFile {payload!r}: no such file")
        given["payloadFile"] = str(file.resolve())
    return Workload(**{name: value for name, value in given.items() if value is not None})


def _fits(value: object, kind: type) -> bool:
    if value is None:
        return True
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _article(kind: str) -> str:
    return {"int": "a whole number", "float": "a number", "str": "text"}.get(kind, "true or false")
