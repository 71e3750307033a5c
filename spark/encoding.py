"""Rows that are to be sent: which columns they may have, and how they become batch bodies.

Work per row is the kernel's; here whole columns are handed on.
"""

from __future__ import annotations

import difflib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from cometmq.protocol.errors import CometError, MessageIllegal
from cometmq.shm.kernel.columns import NO_QUEUE, ArrowText, RowEncoder, RowIllegal
from cometmq.spark.kafka import WRITE_COLUMNS as KAFKAS_COLUMNS
from cometmq.spark.kafka import counterpart
from cometmq.spark.schema import SchemaError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

OPEN_BYTES_MAX: Final = 32 << 20  # in batches that are not full, of all queues together

# name -> (Spark types, what it holds)
WRITE_COLUMNS: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "body": (("binary", "string"), "not empty; needed"),
    "topic": (("string",), "needed, unless the option `topic` says it for all rows"),
    "queue_id": (("int",), "that queue; where it is null the next two lines hold"),
    "ordering_key": (("string",), "rows of one key go to one queue, by RocketMQ's hash; "
     "where it is null too, batches go to the queues in turn"),
    "sharding_key": (("string",), "the same, as it was called at first; one of the two"),
    "keys": (("string",), "keys to find the message by, separated by spaces"),
    "tags": (("string",), "the one tag that consumers may select by"),
    "properties": (("map<string,string>",), "TAGS, KEYS, UNIQ_KEY and WAIT are refused; "
     "DELAY, TIMER_... and TRAN_MSG too: they would be delivered at once. Properties with an empty "
     "or null value are omitted"),
    "flag": (("int",), "a number of the sender's own, 0 where it is null"),
}  # fmt: skip


def check_columns(schema: StructType, *, has_topic: bool) -> None:
    """Whether rows of a schema can be sent. Raises SchemaError with the right columns."""
    listed = ", ".join(f"{name} {' or '.join(kinds)}" for name, (kinds, _) in WRITE_COLUMNS.items())
    names = [each.name for each in schema.fields]
    for each in schema.fields:
        found = WRITE_COLUMNS.get(each.name)
        if found is None:
            close = difflib.get_close_matches(each.name, WRITE_COLUMNS, n=1, cutoff=0.6)
            hint = f"; did you mean {close[0]}? " if close else "; "
            if kafkas := counterpart(each.name, KAFKAS_COLUMNS):
                hint = f"{kafkas}. "
            raise SchemaError(f"there is no column {each.name!r} to write{hint}There are {listed}")
        kind = each.dataType.simpleString()
        if kind not in found[0]:
            raise SchemaError(f"column {each.name} is {' or '.join(found[0])}, not {kind}: cast it")
    if {"ordering_key", "sharding_key"} <= set(names):
        raise SchemaError("columns ordering_key and sharding_key are two names of one thing")
    if len(set(names)) != len(names):
        raise SchemaError(f"a column is named twice: {', '.join(names)}")
    if "body" not in names:
        raise SchemaError(f"there is no column body, and a message needs one. There are {listed}")
    if "topic" not in names and not has_topic:
        raise SchemaError("where do the rows go? Neither an option nor a column says the topic")


class Outlet(Protocol):
    """Where bodies go."""

    def queues(self, topic: str) -> list[int]:
        """The ids of the topic's queues; their places in this list are what `send` takes."""

    def send(self, topic: str, place: int | None, body: bytes, count: int) -> None: ...


@dataclass
class Encoding:
    """One task's way from record batches to bodies."""

    outlet: Outlet
    topic: str = ""  # for all rows; goes before the column
    batch_bytes: int = 262_144
    body_max: int = 4 << 20
    multi_tags: bool = False
    rows: int = 0
    _routes: dict[str, tuple[int, int, Any]] = field(default_factory=dict)
    _slots: list[tuple[str, int | None]] = field(default_factory=list)

    def send_all(self, batches: Iterable[Any]) -> int:
        """Send the rows of pyarrow.RecordBatches; how many. Raises MessageIllegal with the row."""
        encoder = RowEncoder(
            batch_bytes=self.batch_bytes, body_max=self.body_max, multi_tags=self.multi_tags
        )
        for batch in batches:
            self._send(self._encode(encoder, batch))
            self.rows += batch.num_rows
            if encoder.size > OPEN_BYTES_MAX:
                self._send(encoder.drain())
        self._send(encoder.drain())
        return self.rows

    def _send(self, bodies: Sequence[tuple[int, bytes, int]]) -> None:
        for slot, body, count in bodies:
            self.outlet.send(*self._slots[slot], body, count)

    def _encode(self, encoder: RowEncoder, batch: Any) -> list[tuple[int, bytes, int]]:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        try:
            codes, routes = self._topics(columns.get("topic"), batch.num_rows)
            return encoder.encode(
                batch.num_rows,
                codes,
                routes,
                _numbers(columns.get("queue_id"), NO_QUEUE),
                _text(columns.get("ordering_key", columns.get("sharding_key"))),
                _needed_text(columns["body"]),
                _text(columns.get("keys")),
                _text(columns.get("tags")),
                _properties(columns.get("properties")),
                _numbers(columns.get("flag"), 0),
            )
        except RowIllegal as error:
            row, column, text = error.args
            raise MessageIllegal(f"row {self.rows + row}, column {column}: {text}") from None

    def _topics(self, column: Any, rows: int) -> tuple[Any, list[tuple[int, int, Any]]]:
        """(each row's index into the routes, routes)."""
        if self.topic or not rows:
            return None, [self._route(self.topic, 0)] if rows else []
        if column.null_count:
            raise RowIllegal(column.is_null().index(True).as_py(), "topic", "it is null")
        coded = column.dictionary_encode()
        codes = coded.indices.cast("int32")
        routes = [
            self._route(topic, codes.index(code).as_py())
            for code, topic in enumerate(coded.dictionary.to_pylist())
        ]
        return codes.to_numpy(), routes

    def _route(self, topic: str, row: int) -> tuple[int, int, Any]:
        found = self._routes.get(topic)
        if found is None:
            try:
                queues = self.outlet.queues(topic)
            except CometError as error:
                error.add_note(f"row {self.rows + row}, column topic")
                raise
            by_id = array("i", [-1]) * (max(queues) + 1)
            for place, queue_id in reversed(list(enumerate(queues))):
                by_id[queue_id] = place  # of several brokers the first that has it
            found = self._routes[topic] = len(self._slots), len(queues), by_id
            self._slots += [(topic, place) for place in range(len(queues))] + [(topic, None)]
        return found


def _numbers(column: Any, null: int) -> Any:
    return None if column is None else column.fill_null(null).to_numpy()


def _text(column: Any) -> ArrowText | None:
    return None if column is None else _needed_text(column)


def _needed_text(column: Any) -> ArrowText:
    narrow = _narrow(column)
    validity, offsets, data = narrow.buffers()
    if not len(narrow):
        offsets = bytes(4 * (narrow.offset + 1))  # Arrow may leave them away
    return ArrowText(validity, offsets, data, narrow.offset, len(narrow))


def _narrow(column: Any) -> Any:
    """With 32-bit offsets: Spark may be set to send others."""
    import pyarrow as pa  # type: ignore[import-untyped]

    narrow = {
        pa.large_string(): pa.string(), pa.string_view(): pa.string(),
        pa.large_binary(): pa.binary(), pa.binary_view(): pa.binary(),
    }  # fmt: skip
    return column.cast(narrow[column.type]) if column.type in narrow else column


def _properties(column: Any) -> tuple[ArrowText, ArrowText, ArrowText] | None:
    if column is None:
        return None
    names, values = _needed_text(column.keys), _needed_text(column.items)
    validity, offsets = column.buffers()[:2]
    places = ArrowText(
        validity, offsets, None, column.offset, len(column), min(names.rows, values.rows)
    )
    return places, names, values


def as_table() -> str:
    """For docs/spark.md."""
    lines = ["| column | type | |", "| --- | --- | --- |"]
    for name, (kinds, text) in WRITE_COLUMNS.items():
        lines.append(f"| `{name}` | {' or '.join(kinds)} | {text} |")
    return "\n".join(lines) + "\n"


def batches_of(iterator: Iterator[Any]) -> Iterator[Any]:
    """Without empty ones, which have no buffers to look at."""
    return (batch for batch in iterator if batch.num_rows)
