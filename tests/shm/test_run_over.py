"""Who has a store mapped reads nothing of it once its run is over: the next start may change it."""

from __future__ import annotations

from pathlib import Path

from patience import patient

from cometmq import Broker
from cometmq.shm.live.control import CONTROL_FILE, ControlFile, end_run
from cometmq.shm.log.marks import remove_marks


def test_a_mapped_consumer_hands_out_nothing_of_a_run_that_is_over(tmp_path: Path) -> None:
    """As the next start says it, before it changes anything."""
    store = tmp_path / "store"
    with (
        Broker(store, settings={"logLevel": "ERROR"}) as broker,
        broker.producer() as producer,
        broker.consumer("g", "t", transport="mapped") as consumer,
    ):
        producer.send("t", b"of this run", queue_id=0).wait()
        assert [message.body for message in consumer.poll(10, patient(20))] == [b"of this run"]
        end_run(store / CONTROL_FILE)
        producer.send("t", b"who knows", queue_id=0).wait()
        assert consumer.poll(10, 1) == []


def test_a_start_and_an_end_say_that_the_run_before_is_over(tmp_path: Path) -> None:
    path = tmp_path / CONTROL_FILE
    first = ControlFile.create(path, {"pid": 1})
    assert not first.is_over
    second = ControlFile.create(path, {"pid": 2})
    assert first.is_over
    assert not second.is_over
    remove_marks(tmp_path)
    assert second.is_over
