"""RocketMQ's config/*.json: topics, groups and offsets, written and read as RocketMQ does.

RocketMQ writes with fastjson 1.2.83 in its pretty format, which is not quite JSON: integer map keys
stand without quotes. `loads` and `dumps` are that syntax, `decode` adds the meaning (types,
references, nulls), and `ConfigFile` keeps one such file so that a kill at any instant leaves it
whole.

The types decide how `dumps` writes a value:

    Struct              keys sorted, one a line         a Java object
    dict, str keys      one a line, in their order      Map<String, ...>
    dict, int keys      {0:5,1:7 newline }              Map<Integer, ...>
    list                one item a line                 List
    tuple               [1,2] on one line               Java array, Set
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Generic, TypeVar

import msgspec

from cometmq.protocol.errors import StoreDamaged
from cometmq.shm.java import java_hash_map_order

logger = logging.getLogger(__name__)

FILE_BYTES_MAX: Final = 256 << 20  # some ten million consumer offsets
DEPTH_MAX: Final = 32  # RocketMQ's own files go to 7
REFERENCED_MAX: Final = 1_000_000  # values that references may repeat, all together
_NUMBER_CHARACTERS_MAX: Final = 40
_INT64: Final = range(-(1 << 63), 1 << 63)


class ConfigFileDamaged(StoreDamaged):
    """A config file that is not what it must be; line and column (from 1) where they are known."""

    code = 9024

    def __init__(self, file: str, reason: str, line: int | None = None, column: int | None = None):
        where = file if line is None else f"{file}, line {line}, column {column}"
        super().__init__(f"{where}: {reason}")
        self.file = file
        self.reason = reason
        self.line = line
        self.column = column


# --- What the files hold ---------------------------------------------------------------------

Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]


class DataVersion(msgspec.Struct, frozen=True, order=True, rename="camel"):
    """How often a table was changed. A higher one is newer; the fields compare in this order."""

    state_version: int = 0  # the controller's epoch, 0 without one
    counter: int = 0
    timestamp: int = 0  # ms

    def next(self, now_ms: int, state_version: int = 0) -> DataVersion:
        """The version after one more change."""
        return DataVersion(state_version, self.counter + 1, now_ms)


class Bean(msgspec.Struct, frozen=True, rename="camel"):
    """A Java object in a file: snake_case here, RocketMQ's camelCase there."""


class Table(msgspec.Struct, kw_only=True, rename="camel"):
    """What a whole file holds. Whoever changes it sets `data_version` to its `next`."""

    data_version: DataVersion = DataVersion()

    def computed(self) -> dict[str, object]:
        """Further keys that RocketMQ writes, made of the others, and ignores when it reads."""
        return {}


class TopicFilterType(StrEnum):
    SINGLE_TAG = "SINGLE_TAG"
    MULTI_TAG = "MULTI_TAG"


class TopicConfig(Bean, frozen=True, kw_only=True):
    topic_name: str
    read_queue_nums: Int32 = 16
    write_queue_nums: Int32 = 16
    perm: Int32 = 6  # bits: 8 priority, 4 read, 2 write, 1 inherit
    topic_filter_type: TopicFilterType = TopicFilterType.SINGLE_TAG
    topic_sys_flag: Int32 = 0
    order: bool = False
    attributes: dict[str, str] = {}  # such as message.type: FIFO; without the command line's "+"


class TopicTable(Table, kw_only=True):
    """topics.json"""

    topic_config_table: dict[str, TopicConfig] = {}


class RetryPolicyType(StrEnum):
    EXPONENTIAL = "EXPONENTIAL"
    CUSTOMIZED = "CUSTOMIZED"


class CustomizedRetryPolicy(Bean, frozen=True, kw_only=True):
    """Waits before the 1st, 2nd, ... next delivery, in ms; RocketMQ's delay levels by default."""

    next: tuple[int, ...] = (
        *(seconds * 1000 for seconds in (1, 5, 10, 30)),
        *(minutes * 60_000 for minutes in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 60, 120)),
    )


class ExponentialRetryPolicy(Bean, frozen=True, kw_only=True):
    initial: int = 5_000  # ms
    max: int = 7_200_000  # ms
    multiplier: int = 2


class GroupRetryPolicy(Bean, frozen=True, kw_only=True):
    """How long a message waits before it is delivered again. An absent policy has its defaults."""

    type: RetryPolicyType = RetryPolicyType.CUSTOMIZED
    exponential_retry_policy: ExponentialRetryPolicy | None = None
    customized_retry_policy: CustomizedRetryPolicy | None = None


class SimpleSubscriptionData(Bean, frozen=True, kw_only=True):
    topic: str
    expression_type: str | None = None
    expression: str | None = None
    version: int = 0


class SubscriptionGroupConfig(Bean, frozen=True, kw_only=True):
    """A consumer group. A file of RocketMQ 4.x lacks some of the keys: they get the defaults."""

    group_name: str
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_message_orderly: bool = False
    retry_queue_nums: Int32 = 1
    retry_max_times: Int32 = 16
    group_retry_policy: GroupRetryPolicy = GroupRetryPolicy()
    broker_id: int = 0
    which_broker_when_consume_slowly: int = 1
    notify_consumer_ids_changed_enable: bool = True
    group_sys_flag: Int32 = 0
    consume_timeout_minute: Int32 = 15
    subscription_data_set: tuple[SimpleSubscriptionData, ...] | None = None
    attributes: dict[str, str] = {}


class SubscriptionGroupTable(Table, kw_only=True):
    """subscriptionGroup.json"""

    forbidden_table: dict[str, dict[str, Int32]] = {}  # group -> topic -> bits
    subscription_group_table: dict[str, SubscriptionGroupConfig] = {}


class ConsumerOffsetTable(Table, kw_only=True):
    """consumerOffset.json: `topic@group` -> queue id -> queue offset of the next message."""

    offset_table: dict[str, dict[int, int]] = {}

    def group_topic_map(self) -> dict[str, tuple[str, ...]]:
        """The topics of each group, in the order of RocketMQ's maps (ConsumerOffsetManager)."""
        topics: dict[str, list[str]] = {}
        for key in self.offset_table:
            topic, _, group = key.partition("@")
            if group and "@" not in group:
                topics.setdefault(group, []).append(topic)
        # new HashMap<>(128), and new HashSet<>(8) for each group
        return {
            group: tuple(java_hash_map_order(topics[group], 8))
            for group in java_hash_map_order(topics, 128)
        }

    def computed(self) -> dict[str, object]:
        return {"groupTopicMap": self.group_topic_map()}


class DelayOffsetTable(Table, kw_only=True):
    """delayOffset.json: delay level -> queue offset of the next message in SCHEDULE_TOPIC_XXXX."""

    offset_table: dict[int, int] = {}


# --- Reading ---------------------------------------------------------------------------------

# Possessive throughout, so that no text makes it go back and try again.
_TOKEN = re.compile(
    r"""[ \t\r\n]*+(?:
        (?P<string>"(?:[^"\\\x00-\x1f]++|\\.)*+")
      | (?P<number>-?+[0-9]++(?:\.[0-9]++)?+(?:[eE][+-]?+[0-9]++)?+)
      | (?P<word>true|false|null)
      | (?P<mark>[{}\[\]:,])
    )""",
    re.VERBOSE,
)
_BLANK = re.compile(r"[ \t\r\n]*+")
_WORDS: Final = {"true": True, "false": False, "null": None}


def loads(text: str | bytes, *, name: str = "text") -> object:
    """JSON, in which integers may be keys without quotes: those become int keys.

    The numbers are floats and 64-bit integers. `name` is what an error calls the text.
    Raises ConfigFileDamaged, whatever the text is.
    """
    if len(text) > FILE_BYTES_MAX:
        reason = f"{len(text)} bytes, at most {FILE_BYTES_MAX} are read"
        raise ConfigFileDamaged(name, reason)
    if isinstance(text, bytes):
        text = _decode_utf8(text, name)
    return _Reader(text, name).document()


def _decode_utf8(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise ConfigFileDamaged(name, f"not UTF-8: {error.reason}", line, column) from None


class _Reader:
    """Takes token after token from a text and makes the value of them."""

    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name
        self._start = 0  # of the token last taken
        self._end = 0

    def document(self) -> object:
        value = self._value(*self._take(), depth=0)
        self._start = self._skip_blanks()
        if self._start < len(self._text):
            raise self._damaged("something follows the end")
        return value

    def _take(self) -> tuple[str, str]:
        """The kind and the text of the next token."""
        match = _TOKEN.match(self._text, self._end)
        if match is None or match.lastgroup is None:
            self._start = self._skip_blanks()
            found = self._text[self._start : self._start + 1]
            raise self._damaged(f"unreadable from {found!r} on" if found else "ends too early")
        self._start, self._end = match.span(match.lastgroup)
        return match.lastgroup, match[match.lastgroup]

    def _skip_blanks(self) -> int:
        match = _BLANK.match(self._text, self._end)
        return match.end() if match else self._end

    def _value(self, kind: str, token: str, depth: int) -> object:
        if depth > DEPTH_MAX:
            raise self._damaged(f"nested deeper than {DEPTH_MAX}")
        if kind == "string":
            return self._string(token)
        if kind == "number":
            return self._number(token)
        if kind == "word":
            return _WORDS[token]
        if token == "{":
            return self._object(depth + 1)
        if token == "[":
            return self._array(depth + 1)
        raise self._damaged(f"a value expected, not {token!r}")

    def _object(self, depth: int) -> dict[str | int, object]:
        members: dict[str | int, object] = {}
        kind, token = self._take()
        if token == "}":
            return members
        while True:
            key = self._key(kind, token)
            self._one_of(":")
            members[key] = self._value(*self._take(), depth=depth)  # of equal keys the last counts
            if self._one_of(",}") == "}":
                return members
            kind, token = self._take()

    def _array(self, depth: int) -> list[object]:
        items: list[object] = []
        kind, token = self._take()
        if token == "]":
            return items
        while True:
            items.append(self._value(kind, token, depth))
            if self._one_of(",]") == "]":
                return items
            kind, token = self._take()

    def _key(self, kind: str, token: str) -> str | int:
        if kind == "string":
            return self._string(token)
        if kind == "number":
            number = self._number(token)
            if isinstance(number, int):
                return number
        raise self._damaged(f"a key expected, not {_shortened(token)}")

    def _one_of(self, marks: str) -> str:
        kind, token = self._take()
        if kind != "mark" or token not in marks:
            expected = " or ".join(repr(mark) for mark in marks)
            raise self._damaged(f"{expected} expected, not {_shortened(token)}")
        return token

    def _string(self, token: str) -> str:
        if "\\" not in token:
            return token[1:-1]
        try:
            text = str(json.loads(token))
            text.encode()  # half a surrogate pair could never be written again
        except ValueError:
            raise self._damaged(f"a string with a bad escape: {_shortened(token)}") from None
        return text

    def _number(self, token: str) -> int | float:
        digits = token.removeprefix("-")
        # The length comes first: Python's own conversion is slow for very long ones.
        if len(token) <= _NUMBER_CHARACTERS_MAX and not re.match(r"0[0-9]", digits):
            number = int(token) if digits.isdigit() else float(token)
            if number in _INT64 if isinstance(number, int) else math.isfinite(number):
                return number
        raise self._damaged(f"not a 64-bit number: {_shortened(token)}")

    def _damaged(self, reason: str) -> ConfigFileDamaged:
        line = self._text.count("\n", 0, self._start) + 1
        column = self._start - self._text.rfind("\n", 0, self._start)
        return ConfigFileDamaged(self._name, reason, line, column)


def _shortened(token: str) -> str:
    return repr(token if len(token) <= 60 else token[:60] + "...")


StructT = TypeVar("StructT", bound=msgspec.Struct)


def decode(text: str | bytes, kind: type[StructT], *, name: str = "text") -> StructT:
    """The struct that a file's text stands for. Unknown keys are ignored, absent ones get defaults.

    Raises ConfigFileDamaged, whatever the text is.
    """
    tree = _Settler(loads(text, name=name), name).settled()
    try:
        return msgspec.convert(tree, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ConfigFileDamaged(name, str(error)) from None


class _Settler:
    """Gives keys and references their meaning: a null is an absent key, a key is a string.

    fastjson writes {"$ref":"$.offsetTable.t\\@g"} for an object that it has written before;
    RocketMQ 4.x puts one map into the offset table twice when it clones a group's offsets.
    Only what stands complete before a reference can be meant, so there are no circles.
    """

    _STEP = re.compile(r"\.((?:\\.|[^\\.\[])++)|\[([0-9]{1,10})\]", re.DOTALL)

    def __init__(self, root: object, name: str) -> None:
        self._root = root
        self._name = name
        self._done: dict[int, tuple[object, int]] = {}  # id of what was read: settled, its size
        self._referenced = 0

    def settled(self) -> object:
        return self._settle(self._root)[0]

    def _settle(self, value: object) -> tuple[object, int]:
        """What `value` means, and of how many values that consists."""
        if isinstance(value, dict):
            reference = value.get("$ref")
            if len(value) == 1 and isinstance(reference, str):
                return self._follow(reference)
            there = {key: item for key, item in value.items() if item is not None}
            parts = {str(key): self._settle(item) for key, item in there.items()}
            size = 1 + sum(size for _, size in parts.values())
            self._done[id(value)] = {key: part for key, (part, _) in parts.items()}, size
            return self._done[id(value)]
        if isinstance(value, list):
            items = [self._settle(item) for item in value]
            self._done[id(value)] = [part for part, _ in items], 1 + sum(size for _, size in items)
            return self._done[id(value)]
        return value, 1

    def _follow(self, reference: str) -> tuple[object, int]:
        target = self._done.get(id(self._walk(reference)))
        if target is None:
            reason = f"the reference {_shortened(reference)} names nothing that stands before it"
            raise ConfigFileDamaged(self._name, reason)
        self._referenced += target[1]
        if self._referenced > REFERENCED_MAX:
            reason = f"references repeat more than {REFERENCED_MAX} values"
            raise ConfigFileDamaged(self._name, reason)
        return target

    def _walk(self, reference: str) -> object:
        """What was read at a path like $.a.b[0], None if there is no such thing."""
        value, end = self._root, 1
        while end < len(reference) and reference.startswith("$"):
            step = self._STEP.match(reference, end)
            if step is None:
                return None
            end = step.end()
            if isinstance(value, dict):
                key = int(step[2]) if step[2] else re.sub(r"\\(.)", r"\1", step[1], flags=re.DOTALL)
                value = value.get(key)
            elif isinstance(value, list) and step[2] and int(step[2]) < len(value):
                value = value[int(step[2])]
            else:
                return None
        return value


# --- Writing ---------------------------------------------------------------------------------

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
    if isinstance(value, msgspec.Struct):
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
        if int(value) not in _INT64:
            raise ValueError(f"{_shortened(hex(value))} does not fit into 64 bits")
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


def _write_map(parts: list[str], members: dict[object, object], depth: int) -> None:
    present = [(key, value) for key, value in members.items() if value is not None]
    line = "\n" + "\t" * (depth + 1)
    parts.append("{")
    for index, (key, value) in enumerate(present):
        if isinstance(key, str):
            lead = line + _string(key)
        elif isinstance(key, int) and not isinstance(key, bool):
            lead = _scalar(key)
        else:
            raise TypeError(f"a {type(key).__name__} cannot be a key")
        parts.append(("," if index else "") + lead + ":")
        _write(parts, value, depth + 1)
    parts.append("\n" + "\t" * depth + "}" if members else "}")


def _write_list(parts: list[str], items: list[object], depth: int) -> None:
    line = "\n" + "\t" * (depth + 1)
    parts.append("[")
    for index, item in enumerate(items):
        parts.append("," + line if index else line)
        _write(parts, item, depth + 1)
    parts.append("\n" + "\t" * depth + "]" if items else "]")


# --- The files -------------------------------------------------------------------------------


class ConfigFile(Generic[StructT]):
    """One file of config/, with a previous content beside it in `<file>.bak`.

    Has one writer at a time, who keeps the object; anyone may `load`. Whatever instant a process
    is killed at, the next `load` finds the content before or after the `store`, whole. Only what
    is on the disk becomes the `.bak`: a loss of power may leave a file of zeros of what was not.
    """

    def __init__(self, path: Path, kind: type[StructT]) -> None:
        self.path = path
        self.bak_path = path.with_name(path.name + ".bak")
        self._kind = kind
        self._main_is_whole: bool | None = None  # None: nobody has looked
        self._main_is_synced: bool | None = None  # None: nobody knows what was done before us

    def load(self) -> StructT | None:
        """The file's content, else that of its `.bak`, None if neither holds anything.

        Raises ConfigFileDamaged if one is damaged and the other does not help: to go on without
        would forget what it held.
        """
        main = self._read(self.path)
        self._main_is_whole = isinstance(main, self._kind)
        if isinstance(main, self._kind):
            return main
        previous = self._read(self.bak_path)
        fault = main if isinstance(main, ConfigFileDamaged) else f"{self.path}: missing or empty"
        if isinstance(previous, self._kind):
            logger.warning("%s; its previous content is used, from %s", fault, self.bak_path)
            return previous
        for damaged in (main, previous):
            if isinstance(damaged, ConfigFileDamaged):
                logger.warning("%s; %s does not help either", fault, self.bak_path)
                raise damaged
        return None

    def _read(self, path: Path) -> StructT | ConfigFileDamaged | None:
        """None for a missing or empty file, which mean the same, as they do to RocketMQ."""
        try:
            with path.open("rb") as file:
                content = file.read(FILE_BYTES_MAX + 1)
            return decode(content, self._kind, name=str(path)) if content else None
        except FileNotFoundError:
            return None
        except ConfigFileDamaged as damaged:
            return damaged

    def store(self, value: StructT, *, durable: bool) -> None:
        """Replaces the content; what stood there before becomes the `.bak`, if it was durable.

        Survives a kill of the process at any line. Survives the loss of power if `durable`, which
        waits for the disk; otherwise the last durable content may return. The first `store` is
        durable in any case, so that there is one. Raises OSError (the old content stays, or the
        new one if it was only the folder that could not be synced), ValueError for what could not
        be read again.
        """
        content = dumps(value).encode()
        if len(content) > FILE_BYTES_MAX:
            reason = f"{self.path}: {len(content)} bytes, at most {FILE_BYTES_MAX} can be read"
            raise ValueError(reason)
        if self._main_is_whole is None:
            self._main_is_whole = isinstance(self._read(self.path), self._kind)
        durable = durable or self._main_is_synced is None
        self._make_folder(durable)
        new_path = self.path.with_name(self.path.name + ".tmp")
        _write_file(new_path, content, durable)
        # A damaged file must not push out the whole one that stands in .bak.
        if self._main_is_whole and (durable or self._main_is_synced):
            self._keep_previous(durable)
        os.replace(new_path, self.path)
        self._main_is_whole, self._main_is_synced = True, durable
        if durable:
            _sync_folder(self.path.parent)

    def _make_folder(self, durable: bool) -> None:
        folder = self.path.parent
        if not folder.is_dir():
            os.mkdir(folder)
            if durable:
                _sync_folder(folder.parent)

    def _keep_previous(self, durable: bool) -> None:
        """Makes `.bak` a second name of the present content, in one step; both names stay whole."""
        if not self._main_is_synced:
            _sync_file(self.path)
        link_path = self.bak_path.with_name(self.bak_path.name + ".tmp")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(link_path)  # of a writer that was killed
        try:
            os.link(self.path, link_path)
        except FileNotFoundError:
            return  # somebody has removed the file: .bak is all there is
        except OSError:  # no hard links here, or not to another user's file
            _write_file(link_path, self.path.read_bytes(), durable)
        os.replace(link_path, self.bak_path)
        # Renaming between two names of one file, as after a kill at the line above, does nothing.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(link_path)


def _write_file(path: Path, content: bytes, durable: bool) -> None:
    """Writes a new file; what a killed writer left under the name is removed, not overwritten."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(file, rest) :]
        if durable:
            os.fsync(file)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)  # on a full disk, half a file is in the way
        raise
    finally:
        os.close(file)


def _sync_file(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
