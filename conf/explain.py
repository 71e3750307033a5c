"""What the settings are and what they mean: rows for `config show` and `config explain`.

The documentation is printed from the same declarations:

    python -c "from cometmq.conf import as_markdown; print(as_markdown(), end='')" \\
        > docs/configuration.md
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum

import msgspec

from cometmq.conf.option import JAVA_INT_MAX, Option, as_text, options_of, readable
from cometmq.conf.settings import GROUPS, BrokerSettings, did_you_mean
from cometmq.conf.sources import Assignment, Origin
from cometmq.protocol.errors import ConfigError

_HEAD = """\
# Configuration

A broker reads its settings once, when it starts. Of these, the later wins:

1. the default
2. a configuration file, in the format of RocketMQ's `broker.conf`
3. the environment: `COMETMQ_` and the key in capitals, such as `COMETMQ_FLUSH_DISK_TYPE`
4. `--set key=value` on the command line

Keys, defaults and plain numbers are RocketMQ's, so an existing `broker.conf` works. A key of
RocketMQ that CometMQ does not use is named in a warning; where it stands for something that
CometMQ does not do yet, such as `traceTopicEnable`, the warning says what. What would protect
something, such as `aclEnable=true` or `minInSyncReplicas=2`, is refused, as a broker without it
would only look safe. A key that nobody knows is named in a warning, and refused when it can only
be a known one, mistyped.

A size may also be written as `64MiB` (B, KiB, MiB, GiB, TiB), a time as `5s` (ms, s, min, h, d).
A value out of range is refused, where RocketMQ would quietly take another one.

In Python, the settings are attributes of `cometmq.conf.BrokerSettings`; the names are given below.
"""


class ShownSetting(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `config show`."""

    group: str
    key: str
    value: str  # as it would be written in a broker.conf
    readable: str  # the same for people: "1GiB"
    origin: Origin
    place: str  # where exactly: "broker.conf, line 3"; empty for a default


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """All there is to know about one option."""

    group: str
    key: str
    aliases: tuple[str, ...]
    attribute: str  # of BrokerSettings
    environment_variable: str
    type: str
    default: str
    default_readable: str
    range: str  # "at least 1", "0 to 65535", "text or json"; empty: anything
    unit: str  # empty: none
    help: str
    needs_restart: bool


def show_settings(
    settings: BrokerSettings, origins: Mapping[str, Assignment] | None = None
) -> tuple[ShownSetting, ...]:
    """The effective value of every option.

    Args:
        settings: as a broker uses them.
        origins: of `load_settings`. Without them, what differs from its default counts as set.
    """
    return tuple(
        _shown(group, declared, getattr(settings, declared.attribute), origins)
        for group, declared in _grouped_options()
    )


def explain_option(key: str) -> Explanation:
    """What one key means. An alias, and the name in Python or in the environment, will do too.

    Raises:
        ConfigError: there is no such key; the text names the nearest one.
    """
    for group, declared in _grouped_options():
        if key in (*declared.names, declared.attribute, declared.environment_variable):
            return _explanation(group, declared)
    raise ConfigError(f"{key}: no such key{did_you_mean(key)}")


def explain_options() -> tuple[Explanation, ...]:
    """Every option, in the order of the documentation."""
    return tuple(_explanation(group, declared) for group, declared in _grouped_options())


def as_markdown() -> str:
    """docs/configuration.md."""
    lines, group = [_HEAD], ""
    for explanation in explain_options():
        if explanation.group != group:
            group = explanation.group
            lines.append(f"## {group}\n")
        lines.append(_section(explanation))
    return "\n".join(lines)


def _grouped_options() -> Iterator[tuple[str, Option]]:
    for group in GROUPS:
        for declared in options_of(group).values():
            yield group.__doc__ or "", declared


def _shown(
    group: str, declared: Option, value: object, origins: Mapping[str, Assignment] | None
) -> ShownSetting:
    assignment = (origins or {}).get(declared.key)
    origin = assignment.origin if assignment else Origin.DEFAULT
    if origins is None and value != declared.take(declared.default):
        origin = Origin.SET
    return ShownSetting(
        group=group,
        key=declared.key,
        value=as_text(value),
        readable=_readable(declared, value),
        origin=origin,
        place=assignment.place if assignment else "",
    )


def _explanation(group: str, declared: Option) -> Explanation:
    return Explanation(
        group=group,
        key=declared.key,
        aliases=declared.aliases,
        attribute=declared.attribute,
        environment_variable=declared.environment_variable,
        type=_type_name(declared),
        default=as_text(declared.default),
        default_readable=_readable(declared, declared.default),
        range=_range(declared),
        unit=declared.unit or "",
        help=declared.help,
        needs_restart=declared.needs_restart,
    )


def _readable(declared: Option, value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return readable(value, declared.unit)
    return as_text(value)


def _type_name(declared: Option) -> str:
    if issubclass(declared.type, Enum):
        return "choice"
    return {int: "number", bool: "true or false", str: "text"}.get(declared.type, "path")


def _range(declared: Option) -> str:
    if issubclass(declared.type, Enum):
        return " or ".join(str(choice.value) for choice in declared.type)
    if declared.type is not int:
        return ""
    if declared.at_most == JAVA_INT_MAX:
        return f"at least {declared.at_least}"
    return f"{declared.at_least} to {declared.at_most}"


def _section(explanation: Explanation) -> str:
    facts = {
        "Default": _default(explanation),
        "Type": ", ".join(filter(None, (explanation.type, explanation.range))),
        "Unit": explanation.unit,
        "Python": f"`{explanation.attribute}`",
        "Environment": f"`{explanation.environment_variable}`",
        "Also written": ", ".join(f"`{alias}`" for alias in explanation.aliases),
        "Takes effect": "" if explanation.needs_restart else "at once",
    }
    rows = "\n".join(f"- {name}: {text}" for name, text in facts.items() if text)
    return f"### {explanation.key}\n\n{explanation.help}\n\n{rows}\n"


def _default(explanation: Explanation) -> str:
    if not explanation.default:
        return "none"
    if explanation.default_readable.startswith(explanation.default):
        return f"`{explanation.default}`"
    return f"`{explanation.default}` ({explanation.default_readable})"
