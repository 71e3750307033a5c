"""The columns: one table of their names, Spark types and whether they are there by default.

The kernel fills them under the same names (`columns.COLUMN_NAMES`).
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final

from cometmq.protocol.errors import CometError
from cometmq.spark.kafka import READ_COLUMNS, counterpart

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

# name -> (Spark type, in the default schema, what it holds)
COLUMNS: Final[dict[str, tuple[str, bool, str]]] = {
    "topic": ("string", True, ""),
    "broker": ("string", True, "the broker's name"),
    "queue_id": ("int", True, ""),
    "queue_offset": ("bigint", True, ""),
    "store_ts": ("timestamp", True, "when the broker stored it"),
    "born_ts": ("timestamp", True, "when the producer sent it"),
    "keys": ("string", True, "separated by spaces; null without"),
    "tags": ("string", True, "null without"),
    "unique_key": ("string", True, "the id that the producer gave it; null without"),
    "body": ("binary", True, "unfolded where it is compressed, unless `decompress=false`"),
    "properties": ("map<string,string>", True, "all; what is no UTF-8 becomes U+FFFD"),
    "reconsume_times": ("int", True, ""),
    "physical_offset": ("bigint", False, ""),
    "store_size": ("int", False, "bytes of the whole record"),
    "body_crc": ("int", False, "as the record says"),
    "flag": ("int", False, ""),
    "sys_flag": ("int", False, ""),
    "born_host": ("string", False, "ip:port"),
    "store_host": ("string", False, "ip:port"),
    "prepared_txn_offset": ("bigint", False, ""),
    "properties_raw": ("binary", False, "the bytes in the record"),
    "body_raw": ("binary", False, "the bytes in the record"),
    "msg_id": ("string", False, "RocketMQ's offset message id, hex"),
}
LARGE: Final = frozenset({"body", "properties"})  # what `metadata=true` leaves out


class SchemaError(CometError, ValueError):
    """A column that does not exist, or has another type."""

    code = 9043


def default_schema(*, metadata: bool = False) -> str:
    """As DDL."""
    return ", ".join(
        f"{name} {kind}"
        for name, (kind, by_default, _) in COLUMNS.items()
        if by_default and not (metadata and name in LARGE)
    )


def full_schema() -> str:
    return ", ".join(f"{name} {kind}" for name, (kind, _, _) in COLUMNS.items())


def columns_of(schema: StructType) -> tuple[str, ...]:
    """The columns that somebody chose, in his order. Raises SchemaError with the right ones."""
    for field in schema.fields:
        found = COLUMNS.get(field.name)
        if found is None:
            close = difflib.get_close_matches(field.name, COLUMNS, n=1, cutoff=0.6)
            hint = f"; did you mean {close[0]}? " if close else "; "
            if kafkas := counterpart(field.name, READ_COLUMNS):
                hint = f"{kafkas}. "
            raise SchemaError(f"there is no column {field.name!r}{hint}There are {full_schema()}")
        kind = field.dataType.simpleString()
        if kind != found[0]:
            raise SchemaError(f"column {field.name} is {found[0]}, not {kind}")
        if not field.nullable:
            raise SchemaError(f"column {field.name}: all columns are nullable")
    names = tuple(field.name for field in schema.fields)
    if len(set(names)) != len(names):
        raise SchemaError(f"a column is named twice: {', '.join(names)}")
    return names


def as_table() -> str:
    """For docs/spark.md."""
    lines = ["| column | type | by default | |", "| --- | --- | --- | --- |"]
    for name, (kind, by_default, text) in COLUMNS.items():
        lines.append(f"| `{name}` | {kind} | {'yes' if by_default else ''} | {text} |")
    return "\n".join(lines) + "\n"
