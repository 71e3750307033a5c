"""The kernel's buffers as Arrow record batches. Nothing is copied and no message is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cometmq.shm.kernel.columns import ArrowBuffer, Columns

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def arrow_schema(schema: StructType) -> Any:
    """The pyarrow.Schema that Spark expects of batches of a schema."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


def take_batch(columns: Columns, schema: Any) -> Any:
    """What was collected, as a pyarrow.RecordBatch of that pyarrow.Schema."""
    import pyarrow as pa  # type: ignore[import-untyped]

    rows, found = columns.take()
    arrays = [
        _array(pa, field.type, rows, nulls, buffers)
        for field, (nulls, buffers) in zip(schema, found, strict=True)
    ]
    if not arrays:  # no column, but rows to count
        return pa.RecordBatch.from_struct_array(
            pa.StructArray.from_buffers(pa.struct([]), rows, [None])
        )
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(pa: Any, kind: Any, rows: int, nulls: int, buffers: Sequence[ArrowBuffer]) -> Any:
    found = [pa.py_buffer(buffer) for buffer in buffers]
    if len(found) == 1:
        return pa.Array.from_buffers(kind, rows, [None, found[0]])
    if len(found) == 3:
        return pa.Array.from_buffers(kind, rows, [found[0] if nulls else None, *found[1:]], nulls)
    _, offsets, name_offsets, names, value_offsets, values = found
    count = name_offsets.size // 4 - 1
    entries = pa.Array.from_buffers(
        pa.struct([kind.key_field, kind.item_field]),
        count,
        [None],
        children=[
            pa.Array.from_buffers(kind.key_type, count, [None, name_offsets, names]),
            pa.Array.from_buffers(kind.item_type, count, [None, value_offsets, values]),
        ],
    )
    return pa.Array.from_buffers(kind, rows, [None, offsets], 0, children=[entries])
