"""Writing fastjson's pretty format, as RocketMQ does: what fastjson.py reads.

The types decide how `dumps` writes a value:

    Struct              keys sorted, one a line         a Java object
    dict, str keys      one a line, in their order      Map<String, ...>
    dict, int keys      {0:5,1:7 newline }              Map<Integer, ...>
    dict, Struct keys   {{"a":1}:5 newline }            Map<MessageQueue, ...>
    list                one item a line                 List
    tuple               [1,2] on one line               Java array, Set
"""

from __future__ import annotations

import functools
import math
from typing import Final

import msgspec

from cometmq.protocol.configs import TopicConfig, TopicFilterType
from cometmq.shm.state.fastjson import DEPTH_MAX, INT64, shortened
from cometmq.shm.state.tables import Table

# fastjson's table (SerializeWriter.writeStringWithDoubleQuote)
_ESCAPES: Final = {
    **{chr(code): f"\\u{code:04X}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)},
    **{"\b": r"\b", "\t": r"\t", "\n": r"\n", "\f": r"\f", "\r": r"\r"},
    **{'"': r"\"", "\\": r"\\"},
}
_ESCAPE_TABLE: Final = str.maketrans(_ESCAPES)


def dumps(value: object) -> str:
    """The text that fastjson's pretty format has for a value; see the table at the top.

    Raises ValueError or TypeError for what has no such text, or is nested too deep.
    """
    parts: list[str] = []
    _write(parts, value, 0)
    return "".join(parts)


def _write(parts: list[str], value: object, depth: int) -> None:
    """Appends the text of a value that stands in a container indented by `depth`."""
    if depth > DEPTH_MAX:
        raise ValueError(f"nested deeper than {DEPTH_MAX}")
    if type(value) is TopicConfig:
        _write_topic(parts, value, depth)
    elif isinstance(value, msgspec.Struct):
        _write_bean(parts, value, depth)
    elif isinstance(value, dict):
        _write_map(parts, value, depth)
    elif isinstance(value, list):
        _write_list(parts, value, depth)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            parts.append("," if index else "[")
            _write(parts, item, depth)  # fastjson does not indent here
        parts.append("]" if value else "[]")
    else:
        parts.append(_scalar(value))


def _scalar(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int):
        if int(value) not in INT64:
            raise ValueError(f"{shortened(hex(value))} does not fit into 64 bits")
        return str(int(value))
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} cannot be written")
        return repr(float(value))
    raise TypeError(f"a {type(value).__name__} cannot be written")


def _string(text: str) -> str:
    return f'"{text.translate(_ESCAPE_TABLE)}"'


@functools.cache
def _names(kind: type[msgspec.Struct]) -> tuple[tuple[str, str], ...]:
    """Each field's name in the file and in Python."""
    return tuple((field.encode_name, field.name) for field in msgspec.structs.fields(kind))


def _write_bean(parts: list[str], bean: msgspec.Struct, depth: int) -> None:
    members = {written: getattr(bean, ours) for written, ours in _names(type(bean))}
    if isinstance(bean, Table):
        members |= bean.computed()
    present = [(name, members[name]) for name in sorted(members) if members[name] is not None]
    line = "\n" + "\t" * (depth + 1)
    parts.append("{" + line)
    for index, (name, value) in enumerate(present):
        parts.append(("," + line if index else "") + _string(name) + ":")
        _write(parts, value, depth + 1)
    parts.append("\n" + "\t" * depth + "}")


def _write_topic(parts: list[str], config: TopicConfig, depth: int) -> None:
    """As `_write_bean`; but there may be 200,000 of them, and most differ in the name alone."""
    before, after = _around_name(
        depth,
        tuple(config.attributes.items()),
        config.order,
        config.perm,
        config.read_queue_nums,
        config.topic_filter_type,
        config.topic_sys_flag,
        config.write_queue_nums,
    )
    parts += (before, _string(config.topic_name), after)


@functools.lru_cache(maxsize=1024)
def _around_name(
    depth: int,
    attributes: tuple[tuple[str, str], ...],
    order: bool,
    perm: int,
    read_queue_nums: int,
    topic_filter_type: TopicFilterType,
    topic_sys_flag: int,
    write_queue_nums: int,
) -> tuple[str, str]:
    """What stands before and behind a topic's name."""
    parts: list[str] = []
    config = TopicConfig(
        topic_name=_NO_NAME,
        attributes=dict(attributes),
        order=order,
        perm=perm,
        read_queue_nums=read_queue_nums,
        topic_filter_type=topic_filter_type,
        topic_sys_flag=topic_sys_flag,
        write_queue_nums=write_queue_nums,
    )
    _write_bean(parts, config, depth)
    mark = '"topicName":'
    before, after = "".join(parts).split(mark + _string(_NO_NAME))
    return before + mark, after


_NO_NAME: Final = "\x00"


def entry_text(key: str, value: object, depth: int) -> str:
    """An entry of a map as it stands in a file, its key before it."""
    parts = ["\n" + "\t" * depth, _string(key), ":"]
    _write(parts, value, depth)
    return "".join(parts)


def _write_map(parts: list[str], members: dict[object, object], depth: int) -> None:
    present = [(key, value) for key, value in members.items() if value is not None]
    line = "\n" + "\t" * (depth + 1)
    parts.append("{")
    for index, (key, value) in enumerate(present):
        if isinstance(key, str):
            lead = line + _string(key)
        elif isinstance(key, int) and not isinstance(key, bool):
            lead = _scalar(key)
        elif isinstance(key, msgspec.Struct):
            lead = _bean(key, depth + 1)
        else:
            raise TypeError(f"a {type(key).__name__} cannot be a key")
        parts.append(("," if index else "") + lead + ":")
        _write(parts, value, depth + 1)
    parts.append("\n" + "\t" * depth + "}" if members else "}")


def _bean(bean: msgspec.Struct, depth: int) -> str:
    parts: list[str] = []
    _write_bean(parts, bean, depth)
    return "".join(parts)


def _write_list(parts: list[str], items: list[object], depth: int) -> None:
    line = "\n" + "\t" * (depth + 1)
    parts.append("[")
    for index, item in enumerate(items):
        parts.append("," + line if index else line)
        _write(parts, item, depth + 1)
    parts.append("\n" + "\t" * depth + "]" if items else "]")
