"""Reading fastjson's JSON, in which RocketMQ keeps its files in config/.

RocketMQ writes with fastjson 1.2.83 in its pretty format, which is not quite JSON: integer map keys
stand without quotes. `loads` is that syntax, `decode` adds the meaning (types, references, nulls).
json_text.py writes it.
"""

from __future__ import annotations

import json
import math
import re
from typing import Final, TypeVar

import msgspec

from cometmq.protocol.errors import StoreDamaged
from cometmq.shm.kernel.codec import quote_keys

FILE_BYTES_MAX: Final = 256 << 20  # some ten million consumer offsets
DEPTH_MAX: Final = 32  # RocketMQ's own files go to 7
REFERENCED_MAX: Final = 1_000_000  # values that references may repeat, all together
INT64: Final = range(-(1 << 63), 1 << 63)
_NUMBER_CHARACTERS_MAX: Final = 40


class ConfigFileDamaged(StoreDamaged):
    """A config file that is not what it must be; line and column (from 1) where they are known."""

    def __init__(self, file: str, reason: str, line: int | None = None, column: int | None = None):
        where = file if line is None else f"{file}, line {line}, column {column}"
        super().__init__(f"{where}: {reason}")
        self.file = file
        self.reason = reason
        self.line = line
        self.column = column

    def with_way_out(self, text: str) -> ConfigFileDamaged:
        """The same, and what to do."""
        return ConfigFileDamaged(self.file, f"{self.reason}; {text}", self.line, self.column)


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
        raise self._damaged(f"a key expected, not {shortened(token)}")

    def _one_of(self, marks: str) -> str:
        kind, token = self._take()
        if kind != "mark" or token not in marks:
            expected = " or ".join(repr(mark) for mark in marks)
            raise self._damaged(f"{expected} expected, not {shortened(token)}")
        return token

    def _string(self, token: str) -> str:
        if "\\" not in token:
            return token[1:-1]
        try:
            text = str(json.loads(token))
            text.encode()  # half a surrogate pair could never be written again
        except ValueError:
            raise self._damaged(f"a string with a bad escape: {shortened(token)}") from None
        return text

    def _number(self, token: str) -> int | float:
        digits = token.removeprefix("-")
        # The length comes first: Python's own conversion is slow for very long ones.
        if len(token) <= _NUMBER_CHARACTERS_MAX and not re.match(r"0[0-9]", digits):
            number = int(token) if digits.isdigit() else float(token)
            if number in INT64 if isinstance(number, int) else math.isfinite(number):
                return number
        raise self._damaged(f"not a 64-bit number: {shortened(token)}")

    def _damaged(self, reason: str) -> ConfigFileDamaged:
        line = self._text.count("\n", 0, self._start) + 1
        column = self._start - self._text.rfind("\n", 0, self._start)
        return ConfigFileDamaged(self._name, reason, line, column)


def shortened(token: str) -> str:
    return repr(token if len(token) <= 60 else token[:60] + "...")


StructT = TypeVar("StructT", bound=msgspec.Struct)


def decode(text: str | bytes, kind: type[StructT], *, name: str = "text") -> StructT:
    """The struct that a file's text stands for. Unknown keys are ignored, absent ones get defaults.

    Raises ConfigFileDamaged, whatever the text is.
    """
    plain = _decode_plain(text, kind)
    if plain is not None:
        return plain
    tree = _Settler(loads(text, name=name), name).settled()
    try:
        return msgspec.convert(tree, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ConfigFileDamaged(name, str(error)) from None


def _decode_plain(text: str | bytes, kind: type[StructT]) -> StructT | None:
    """The same by native code, a hundred times as fast, for what is JSON but for bare keys.

    None: look closer, and say what is wrong, if anything is.
    """
    raw = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if len(raw) > FILE_BYTES_MAX or b'"$ref"' in raw or b"\\u" in raw:
        return None  # a reference may also be spelled with escapes
    try:
        raw.decode()  # msgspec does not look into what it skips
        return msgspec.json.decode(quote_keys(raw), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


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
            reason = f"the reference {shortened(reference)} names nothing that stands before it"
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


def is_json(content: bytes) -> bool:
    """With the numbers in quotes that stand as keys. Never wrong where it says yes."""
    try:
        msgspec.json.decode(quote_keys(content), type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
