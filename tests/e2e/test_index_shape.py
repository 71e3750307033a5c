"""An index file does not say how many slots it has: `store verify` finds that also where there is
one message in it, whose entry fits many shapes."""

from __future__ import annotations

from pathlib import Path

from family import RunningBroker

from cometmq.shm.derived.index_file import IndexShape, find_shape, read_header
from cometmq.shm.os.files import map_segment
from cometmq.shm.tools.verify import verify_store

SHAPE = IndexShape(100, 200)


def test_a_file_with_one_message(tmp_path: Path) -> None:
    store = tmp_path / "store"
    settings = {"maxHashSlotNum": SHAPE.slots, "maxIndexNum": SHAPE.entries}
    with RunningBroker(store, settings) as broker:
        broker.create_topic("t")
        broker.assert_stored(broker.send("t", 0, [b"the only one"], keys="order-1"))
        assert broker.close() == 0
    (path,) = (store / "index").iterdir()
    header = read_header(path)
    assert header is not None
    with map_segment(path, SHAPE.file_bytes, writable=False) as memory:
        assert find_shape(memory, header) == SHAPE
    assert not verify_store(store).findings
