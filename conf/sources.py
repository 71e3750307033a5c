"""Where settings come from: RocketMQ's broker.conf, the environment, and `--set key=value`.

The later of these wins: default, file, environment, `--set`. An existing broker.conf is read as it
stands. What it asks for and CometMQ does not have is named in a warning, or refused where a broker
without it would only look safe; and so is a key that can only be a known one, mistyped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from cometmq.conf.option import environment_variable
from cometmq.conf.rocketmq import NOT_USED, PROMISES
from cometmq.conf.settings import BrokerSettings, mistyped_key, nearest_key, options_by_key
from cometmq.protocol.errors import ConfigError

_ENVIRONMENT_PREFIX: Final = "COMETMQ_"
# No settings: of clients, of benchmarks, of tests.
_OTHERS: Final = (
    "COMETMQ_CACHE", "COMETMQ_CLIENT_TIMEOUT", "COMETMQ_NAME_SERVER", "COMETMQ_TEST_",
)  # fmt: skip

# Java's Properties ends a line, and takes for blank, nothing but these.
_LINE_END: Final = re.compile("\r\n|\r|\n")
_BLANKS: Final = " \t\f"
_KEY: Final = re.compile(r"((?:[^\\=: \t\f]|\\.)*)[ \t\f]*[=:]?[ \t\f]*", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_ESCAPED: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


class Origin(Enum):
    """Who set a value. Each overrules those before it."""

    DEFAULT = "default"
    FILE = "file"
    ENV = "env"
    SET = "set"


class Property(msgspec.Struct, frozen=True):
    """One entry of a properties file."""

    key: str
    value: str
    line: int  # its first line, from 1


class Assignment(msgspec.Struct, frozen=True):
    """One value that somebody gave, before it is checked."""

    key: str
    value: str
    origin: Origin
    place: str  # for people: "broker.conf, line 3", "COMETMQ_PORT", "--set"


class Loaded(NamedTuple):
    """Settings, what to tell the user about them, and where each value came from."""

    settings: BrokerSettings
    warnings: tuple[str, ...]
    origins: Mapping[str, Assignment]  # by key; a key that nobody set is not in it


def load_settings(
    file: str | os.PathLike[str] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    pairs: Iterable[str] = (),
) -> Loaded:
    """Settings from all that apply.

    Args:
        file: a broker.conf, in RocketMQ's format.
        environment: `COMETMQ_FLUSH_DISK_TYPE=SYNC_FLUSH` and the like; None = the process's own.
        pairs: `key=value` each, as given to `--set`.

    Raises:
        ConfigError: with every problem that was found, and the place of each.
    """
    given = [
        *(_from_file(Path(file)) if file is not None else ()),
        *_from_environment(os.environ if environment is None else environment),
        *_from_pairs(pairs),
    ]
    options = options_by_key()
    known = [assignment for assignment in given if assignment.key in options]
    found = _judge(assignment for assignment in given if assignment.key not in options)
    warnings = (*found.promises, *found.notes, *_given_twice(known))
    effective = {options[assignment.key].key: assignment for assignment in known}
    return Loaded(_settings(effective, found.problems), warnings, MappingProxyType(effective))


def read_properties(text: str) -> Iterator[Property]:
    """The entries of a Java properties file, in their order; a key may come more than once.

    Raises:
        ConfigError: for a `\\u` without four hexadecimal digits, as in Java.
    """
    for number, line in _logical_lines(text):
        match = _KEY.match(line)
        assert match is not None  # it matches the empty text
        try:
            yield Property(_unescape(match[1]), _unescape(line[match.end() :]), number)
        except ValueError as error:
            raise ConfigError(f"line {number}: {error}") from None


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines without comments, each joined with those that continue it, and its first number."""
    begun, first = "", 0
    for number, line in enumerate(_LINE_END.split(text), start=1):
        line = line.lstrip(_BLANKS)
        if not begun:
            first = number
            if not line or line[0] in "#!":
                continue
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:  # the last one stands for itself and not for the one before it
            begun += line[:-1]
            continue
        if begun + line:
            yield first, begun + line
        begun = ""
    if begun:
        yield first, begun


def _unescape(text: str) -> str:
    def meaning(match: re.Match[str]) -> str:
        escaped = match[1]
        if escaped[0] != "u":
            return _ESCAPED.get(escaped, escaped)
        if len(escaped) == 1:
            raise ValueError("\\u must be followed by four hexadecimal digits")
        return chr(int(escaped[1:], 16))

    # Two escapes can be the halves of one character. A half that stays alone is refused when it is
    # taken for a setting.
    utf_16 = _ESCAPE.sub(meaning, text).encode("utf-16-le", "surrogatepass")
    return utf_16.decode("utf-16-le", "surrogatepass")


def _from_file(file: Path) -> Iterator[Assignment]:
    try:
        content = file.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{_shown(str(file))}: cannot be read: {reason}") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")  # what Java takes a properties file to be
    try:
        for entry in read_properties(text):
            place = f"{_shown(file.name)}, line {entry.line}"
            yield Assignment(entry.key, entry.value, Origin.FILE, place)
    except ConfigError as error:
        name = _shown(file.name)
        raise ConfigError(*(f"{name}, {problem}" for problem in error.problems)) from None


def _from_environment(environment: Mapping[str, str]) -> Iterator[Assignment]:
    keys = {environment_variable(key): key for key in (*NOT_USED, *options_by_key())}
    for name in sorted(environment):
        if name.startswith(_ENVIRONMENT_PREFIX) and not name.startswith(_OTHERS):
            yield Assignment(keys.get(name, name), environment[name], Origin.ENV, _shown(name))


def _from_pairs(pairs: Iterable[str]) -> Iterator[Assignment]:
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {_shown(pair)}: must be key=value")
        yield Assignment(key.strip(), value, Origin.SET, "--set")


def _settings(effective: Mapping[str, Assignment], problems: list[str]) -> BrokerSettings:
    values: dict[str, Any] = {}
    for key, assignment in effective.items():
        declared = options_by_key()[key]
        try:
            values[declared.attribute] = declared.take(assignment.value)
        except ConfigError as error:
            problems.extend(f"{problem} ({assignment.place})" for problem in error.problems)
    if problems:
        raise ConfigError(*problems)
    return BrokerSettings(**values)


class _Findings(NamedTuple):
    """What is wrong with keys that set nothing; the graver ones first."""

    problems: list[str]
    promises: list[str]
    notes: list[str]


def _judge(unknown: Iterable[Assignment]) -> _Findings:
    found = _Findings([], [], [])
    for assignment in unknown:
        key, place = assignment.key, assignment.place
        promise = PROMISES.get(key)
        if promise is not None and promise.is_made_by(assignment.value):
            text = f"{key} = {_shown(assignment.value.strip())}: {promise.instead}"
            if promise.refused:
                found.problems.append(f"{text}; without that line the broker starts ({place})")
            else:
                found.promises.append(f"{place}: {text}")
        elif key in NOT_USED:
            found.notes.append(f"{place}: {key}: RocketMQ key, not used by CometMQ")
        else:
            _judge_unknown(assignment, found)
    return found


def _judge_unknown(assignment: Assignment, found: _Findings) -> None:
    """It must be a known key, mistyped, or nobody knows what it is."""
    is_variable = assignment.origin is Origin.ENV
    what = "unknown variable" if is_variable else f'unknown key "{_shown(assignment.key)}"'
    plain = assignment.place.removeprefix(_ENVIRONMENT_PREFIX) if is_variable else assignment.key
    meant, perhaps = mistyped_key(plain), nearest_key(plain)
    nearest = meant or perhaps
    if nearest is not None:
        nearest = environment_variable(nearest) if is_variable else nearest
    hint = f"; did you mean {nearest}?" if nearest is not None else ""
    if meant is not None:  # to pass over it would run with something else than what was said
        found.problems.append(f"{assignment.place}: {what}{hint}")
    else:
        found.notes.append(f"{assignment.place}: {what}, ignored{hint}")


def _given_twice(assignments: Iterable[Assignment]) -> Iterator[str]:
    """One source that sets an option twice contradicts itself; only the last value counts."""
    seen: dict[tuple[str, Origin], Assignment] = {}
    for assignment in assignments:
        option_key = options_by_key()[assignment.key].key
        earlier = seen.get((option_key, assignment.origin))
        if earlier is not None and earlier.value.strip() != assignment.value.strip():
            yield (
                f"{assignment.place}: {assignment.key} overrules {earlier.key} ({earlier.place})"
            )
        seen[option_key, assignment.origin] = assignment


def _shown(key: str) -> str:
    short = key if len(key) <= 80 else key[:80] + "..."
    return short if short.isprintable() else ascii(short)
