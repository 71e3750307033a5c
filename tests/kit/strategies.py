"""Hypothesis strategies for messages: all that RocketMQ's rules allow, and their borders."""

from __future__ import annotations

import string
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from typing import Any

from hypothesis import strategies as st

Host = tuple[IPv4Address | IPv6Address, int]

RETRY_PREFIX = "%RETRY%"
TOPIC_BYTES_MAX = 127  # of an ordinary topic; a longer one, in a record of version 2, is a retry's
RETRY_TOPIC_BYTES_MAX = 255

I32 = (-(2**31), 2**31 - 1)
# 3 to 35 years after 1970 in milliseconds, and the borders that no clock shows.
_TIMESTAMPS = st.one_of(st.integers(10**11, 2**40), st.sampled_from((0, 1, 2**31, 2**53)))

_LEGAL = string.ascii_letters + string.digits + "%|_-"
_SEPARATORS = "\x01\x02"
# "Aa" and "BB" have one Java hash code, that of "polygenelubricants" is -2**31.
_COLLIDING_TAGS = ("Aa", "BB", "polygenelubricants")
_NON_BMP_TAGS = ("标签😀", "\U0001d54b" * 40)
_AWKWARD_TAGS = (*_COLLIDING_TAGS, *_NON_BMP_TAGS, "e\u0301", " a  b ", "a || b")


@dataclass(frozen=True, kw_only=True)
class Message:
    """What a producer hands in, and what its connection and the broker's clock add."""

    topic: str
    queue_id: int
    body: bytes
    tags: str | None
    keys: str | None  # separated by spaces
    user_properties: dict[str, str] = field(default_factory=dict)
    flag: int
    reconsume_times: int
    born_timestamp: int
    born_host: Host
    store_timestamp: int
    store_host: Host

    @property
    def properties(self) -> dict[str, str]:
        """All of them, tags and keys first."""
        own = {"TAGS": self.tags, "KEYS": self.keys}
        return {name: value for name, value in own.items() if value} | self.user_properties

    @property
    def properties_text(self) -> bytes:
        """The properties as a record has them, with the separator at the end."""
        entries = (f"{name}\x01{value}\x02" for name, value in self.properties.items())
        return "".join(entries).encode()

    def record_arguments(self) -> dict[str, Any]:
        """The message as the arguments of `reference.encode_record`."""
        taken = ("tags", "keys", "user_properties")  # they are in the properties
        arguments = {name: value for name, value in vars(self).items() if name not in taken}
        return arguments | {"properties": self.properties_text}


def topics() -> st.SearchStrategy[str]:
    """Legal names: ordinary ones, and those of retry topics, which may be longer than 127."""
    return st.one_of(ordinary_topics(), retry_topics())


def ordinary_topics() -> st.SearchStrategy[str]:
    return _legal(1, TOPIC_BYTES_MAX).filter(lambda name: not name.startswith("%"))


def retry_topics() -> st.SearchStrategy[str]:
    lengths = st.one_of(
        # 127 is the last that fits version 1, 255 the last that is legal at all.
        st.sampled_from((len(RETRY_PREFIX) + 1, 126, 127, 128, 129, 254, 255)),
        st.integers(len(RETRY_PREFIX) + 1, RETRY_TOPIC_BYTES_MAX),
    )
    groups = lengths.flatmap(lambda length: _legal(1, 1).map(lambda c: c * (length - 7)))
    return groups.map(RETRY_PREFIX.__add__)


def _legal(size_min: int, size_max: int) -> st.SearchStrategy[str]:
    return st.text(_LEGAL, min_size=size_min, max_size=size_max)


def bodies(size_max: int = 4096) -> st.SearchStrategy[bytes]:
    """Empty, binary, and long ones, which are a short piece many times over."""
    long = st.tuples(st.binary(min_size=1, max_size=16), st.integers(1, max(1, size_max // 16)))
    return st.one_of(
        st.binary(max_size=min(64, size_max)),
        long.map(lambda piece: (piece[0] * piece[1])[:size_max]),
        st.sampled_from((b"", b"\0", b"\xff" * min(8, size_max))),
    )


def property_text(size_min: int = 1, size_max: int = 40) -> st.SearchStrategy[str]:
    """Any text that survives being a property: no separators, no lone surrogates, not empty."""
    alphabet = st.characters(exclude_characters=_SEPARATORS, exclude_categories=["Cs"])
    return st.text(alphabet, min_size=size_min, max_size=size_max)


def tags() -> st.SearchStrategy[str | None]:
    return st.one_of(st.none(), st.sampled_from(_AWKWARD_TAGS), property_text())


def keys() -> st.SearchStrategy[str | None]:
    """None to four keys in one text; a key itself has no space."""
    key = property_text(1, 20).map(lambda text: text.replace(" ", "_"))
    joined = st.lists(key, min_size=1, max_size=4).map(" ".join)
    return st.one_of(st.none(), joined)


# Names that the store gives a meaning; a producer's own are any others.
RESERVED = frozenset(
    (
        *("TAGS", "KEYS", "UNIQ_KEY", "WAIT", "DELAY", "DUP_INFO", "__CRC32#"),
        *("INNER_NUM", "INNER_BASE", "INNER_MULTI_DISPATCH", "INNER_MULTI_QUEUE_OFFSET"),
        *("REAL_TOPIC", "REAL_QID", "RETRY_TOPIC", "PGROUP", "TRAN_MSG", "__transactionId__"),
    )
)


def user_properties() -> st.SearchStrategy[dict[str, str]]:
    names = property_text(1, 12).filter(lambda name: name not in RESERVED)
    return st.dictionaries(names, property_text(), max_size=4)


def flags() -> st.SearchStrategy[int]:
    return st.one_of(st.sampled_from((0, -1, *I32)), st.integers(*I32))


def queue_ids() -> st.SearchStrategy[int]:
    return st.integers(0, 15)


def timestamps() -> st.SearchStrategy[int]:
    """Milliseconds since 1970."""
    return _TIMESTAMPS


def hosts() -> st.SearchStrategy[Host]:
    return st.tuples(st.ip_addresses(), st.integers(0, 65535))


@st.composite
def messages(
    draw: st.DrawFn,
    topic: st.SearchStrategy[str] | None = None,
    body: st.SearchStrategy[bytes] | None = None,
) -> Message:
    """A legal message; `topic` and `body` narrow it down."""
    return Message(
        topic=draw(topics() if topic is None else topic),
        queue_id=draw(queue_ids()),
        body=draw(bodies() if body is None else body),
        tags=draw(tags()),
        keys=draw(keys()),
        user_properties=draw(user_properties()),
        flag=draw(flags()),
        reconsume_times=draw(st.integers(0, 16)),
        born_timestamp=draw(timestamps()),
        born_host=draw(hosts()),
        store_timestamp=draw(timestamps()),
        store_host=draw(hosts()),
    )
