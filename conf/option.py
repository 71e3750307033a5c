"""What one option is: its name, type, default, range, unit and text, declared in one place.

    class StoreSettings:
        max_message_size: int = option(
            4_194_304,
            key="maxMessageSize",  # RocketMQ's key, so that an existing broker.conf works
            at_least=1,
            help="The largest body a message may have.",
        )

Everything else is taken from that declaration: the check of a value, the names in files and in the
environment, `config show`, `config explain` and docs/configuration.md.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from cometmq.protocol.errors import ConfigError

T = TypeVar("T")

# RocketMQ keeps nearly every number in a Java int; a value beyond that would not come from there.
JAVA_INT_MAX: Final = 2**31 - 1

# More digits than any range allows. Python refuses to convert a text of some thousand digits.
_NUMBER: Final = re.compile(r"([+-]?[0-9]{1,19})\s*([A-Za-z]*|%)")

# Control characters, and halves of a UTF-16 pair, which no file name and no answer can hold.
_NOT_TEXT: Final = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")

_SHOWN_MAX: Final = 80  # characters of a refused value that an error repeats


class Unit(StrEnum):
    """What a number counts. A text may name a multiple of it (`64MiB`, `5s`)."""

    BYTES = "bytes"
    MS = "ms"
    HOURS = "hours"
    PERCENT = "%"
    PAGES = "pages"


# The end of an attribute's name says its unit.
_SUFFIXES: Final = {
    "_bytes": Unit.BYTES,
    "_size": Unit.BYTES,
    "_ms": Unit.MS,
    "_hours": Unit.HOURS,
    "_percent": Unit.PERCENT,
    "_pages": Unit.PAGES,
}

# Multiples in ascending order. "MB" and "m" are left out: people do not agree on what they mean.
_SIZES: Final = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_TIMES_MS: Final = {"ms": 1, "s": 1_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_TIMES_HOURS: Final = {"h": 1, "d": 24}
_MULTIPLES: Final[Mapping[Unit | None, Mapping[str, int]]] = {
    Unit.BYTES: _SIZES,
    Unit.MS: _TIMES_MS,
    Unit.HOURS: _TIMES_HOURS,
    Unit.PERCENT: {"%": 1},
}
_EXAMPLES: Final = {
    Unit.BYTES: "67108864 or 64MiB",
    Unit.MS: "5000 or 5s",
    Unit.HOURS: "72 or 3d",
    Unit.PERCENT: "90 or 0.9",
}


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One declared option. `take` is the only way a value gets into the settings."""

    default: object
    key: str  # camelCase, RocketMQ's own where RocketMQ has it
    help: str
    unit: Unit | None = None
    at_least: int | None = None
    at_most: int = JAVA_INT_MAX
    round_up_to: int = 1  # the next multiple of this is what counts
    check: Callable[[Any], str | None] | None = None  # says what a value must be, or None
    aliases: tuple[str, ...] = ()
    needs_restart: bool = True
    attribute: str = ""  # this and the next two come from the dataclass the option stands in
    type: type = str
    optional: bool = False  # None, or an empty text, means "not set"

    @property
    def names(self) -> tuple[str, ...]:
        """Every key that sets this option; the first is the one to write."""
        return (self.key, *self.aliases)

    @property
    def environment_variable(self) -> str:
        return environment_variable(self.key)

    def take(self, given: object) -> Any:
        """The value to keep for what was given: a text from a file, or a Python value.

        Raises:
            ConfigError: `flushIntervalCommitLog = 0: must be at least 1`
        """
        try:
            value = self._convert(given)
        except ValueError as error:
            raise self.refusal(given, str(error)) from None
        problem = self._problem(value)
        if problem is not None:
            raise self.refusal(given, problem)
        return value

    def refusal(self, given: object, must: str) -> ConfigError:
        shown = as_text(given)
        if len(shown) > _SHOWN_MAX:
            shown = shown[:_SHOWN_MAX] + "..."
        if _NOT_TEXT.search(shown):
            shown = ascii(shown)
        return ConfigError(f"{self.key} = {shown}: {must}")

    def _convert(self, given: object) -> object:
        if isinstance(given, str) and not isinstance(given, Enum):
            given = given.strip()
        if self.optional and given in (None, ""):
            return None
        if self.type is int:
            return _round_up(to_number(given, self.unit), self.round_up_to)
        if self.type is bool:
            return _to_bool(given)
        if issubclass(self.type, Enum):
            return _to_choice(given, self.type)
        return _to_path(given) if self.type is Path else _to_text(given)

    def _problem(self, value: object) -> str | None:
        if isinstance(value, int) and not isinstance(value, bool):
            if self.at_least is not None and value < self.at_least:
                return f"must be at least {self.at_least}"
            if value > self.at_most:
                return f"must be at most {self.at_most}"
        return self.check(value) if self.check is not None and value is not None else None


def option(
    default: T,
    *,
    key: str,
    help: str,
    unit: Unit | None = None,
    at_least: int | None = None,
    at_most: int = JAVA_INT_MAX,
    round_up_to: int = 1,
    check: Callable[[Any], str | None] | None = None,
    aliases: tuple[str, ...] = (),
    needs_restart: bool = True,
) -> T:
    """Declare a field of a settings dataclass as an option.

    Args:
        default: the value when nobody says otherwise. It has to pass its own checks.
        key: the name in files and for `--set`; camelCase.
        help: one or two sentences; the documentation prints them.
        unit: only where the end of the attribute's name (`_ms`, `_bytes`, ...) does not say it.
        at_least, at_most: the range of a number, both included.
        round_up_to: a number is rounded up to a multiple of this.
        check: for what a range cannot say: None if the value is good, or "must be ...".
        aliases: further keys that mean the same, such as an older spelling.
        needs_restart: a running broker does not notice a change.
    """
    declared = Option(
        default=default,
        key=key,
        help=help,
        unit=unit,
        at_least=at_least,
        at_most=at_most,
        round_up_to=round_up_to,
        check=check,
        aliases=aliases,
        needs_restart=needs_restart,
    )
    return dataclasses.field(default=default, metadata={"option": declared})


@functools.cache
def options_of(settings_class: type) -> Mapping[str, Option]:
    """The options of a settings dataclass, by the names of their attributes."""
    hints = typing.get_type_hints(settings_class)
    options = {
        entry.name: _completed(entry.metadata["option"], entry.name, hints[entry.name])
        for entry in dataclasses.fields(settings_class)
    }
    names = [name for declared in options.values() for name in declared.names]
    assert len(names) == len(set(names)), "a key stands for two options"
    return types.MappingProxyType(options)


def _completed(declared: Option, attribute: str, hint: Any) -> Option:
    """The option, with what only the dataclass field knows about it."""
    kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not types.NoneType]
    suffix = "_" + attribute.rpartition("_")[2]
    return msgspec.structs.replace(
        declared,
        attribute=attribute,
        type=kinds[0],
        optional=types.NoneType in typing.get_args(hint),
        unit=declared.unit or _SUFFIXES.get(suffix),
    )


def environment_variable(key: str) -> str:
    """`checkCRCOnRecover` -> `COMETMQ_CHECK_CRC_ON_RECOVER`."""
    return "COMETMQ_" + snake_case(key).upper()


def snake_case(key: str) -> str:
    """`brokerIP1` -> `broker_ip1`, `checkCRCOnRecover` -> `check_crc_on_recover`."""
    words = re.sub(r"([a-z0-9])([A-Z])|([A-Z])(?=[A-Z][a-z])", r"\1\3_\2", key)
    return words.lower()


def to_number(given: object, unit: Unit | None = None) -> int:
    """A whole number in `unit`, from a number or a text such as `64MiB` or `5s`.

    Raises:
        ValueError: saying what it must be.
    """
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    if unit is Unit.PERCENT and (percent := _percent_of_fraction(given)) is not None:
        return percent
    multiples = _MULTIPLES.get(unit, {})
    match = _NUMBER.fullmatch(given.strip()) if isinstance(given, str) else None
    by_name = {name.lower(): multiple for name, multiple in multiples.items()}
    if match is None or (match[2] and match[2].lower() not in by_name):
        example = f" of {unit}, such as {_EXAMPLES[unit]}" if unit in _EXAMPLES else ""
        raise ValueError(f"must be a whole number{example}")
    return int(match[1]) * by_name.get(match[2].lower(), 1)


def _percent_of_fraction(given: object) -> int | None:
    """Return 90 for `0.9`, the form of a ratio in RocketMQ's system properties. Return None for
    anything else, including a fraction with more than two places."""
    text = str(given).strip() if isinstance(given, (str, float)) else ""
    match = re.fullmatch(r"0?\.([0-9]{1,2})0*", text)
    return int(match[1].ljust(2, "0")) if match else None


def readable(number: int, unit: Unit | None) -> str:
    """The number with the largest unit that keeps it whole: 67108864 bytes -> `64MiB`.

    `to_number` reads it back to the same number.
    """
    multiples = _MULTIPLES.get(unit)
    if multiples is None:
        return str(number)
    fitting = {name: n for name, n in multiples.items() if number % n == 0 and abs(number) >= n}
    name = max(fitting or multiples, key=lambda name: fitting.get(name, 0))
    return f"{number // multiples[name]}{name}"


def as_text(value: object) -> str:
    """A value the way it is written in a broker.conf."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value.value) if isinstance(value, Enum) else str(value)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _to_bool(given: object) -> bool:
    if isinstance(given, bool):
        return given
    # Java's parseBoolean reads "yes" and "1" as false. Neither that nor the opposite would be safe.
    if isinstance(given, str) and given.lower() in ("true", "false"):
        return given.lower() == "true"
    raise ValueError("must be true or false")


def _to_choice(given: object, choices: type[Enum]) -> Enum:
    for choice in choices:
        if given is choice:
            return choice
        if isinstance(given, str) and given.lower() == str(choice.value).lower():
            return choice
    raise ValueError("must be " + " or ".join(str(choice.value) for choice in choices))


def _to_text(given: object) -> str:
    if not isinstance(given, str):
        raise ValueError("must be text")
    if _NOT_TEXT.search(given):
        raise ValueError("must not hold control characters")
    return given


def _to_path(given: object) -> Path:
    if isinstance(given, os.PathLike):
        given = os.fspath(given)
    text = _to_text(given)
    if not text:
        raise ValueError("must be a folder")
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~somebody, who is not known here
        raise ValueError("must be a folder; there is no such home") from None
