"""The producer against a broker that does as it is told."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from client_fakes import Handle, fake_broker, start_broker
from patience import patient

from cometmq.client import Producer, Receipt
from cometmq.client.sending.accumulator import OPEN_MAX
from cometmq.protocol import errors
from cometmq.protocol.commands import SendMessages
from cometmq.protocol.errors import CometError
from cometmq.shm.kernel.codec import decode, java_hash

NOBODY = "tcp://127.0.0.1:1"


@pytest.fixture
def broker() -> Iterator[Handle]:
    with fake_broker() as handle:
        yield handle


def stored_ids(handle: Handle, topic: str, queue_id: int) -> list[str]:
    records = handle.broker.records[topic, queue_id]
    return [message.msg_id for message in decode(b"".join(records))]


# --- one by one ---


def test_receipt_says_where_the_message_is(broker: Handle) -> None:
    with Producer(broker.address) as producer:
        producer.send("t", b"first", queue_id=2)
        receipt = producer.send(
            "t", b"hello", tags="a", keys=["k1", "k2"], properties={"p": "v"}, queue_id=2, flag=7
        )
    message = decode(broker.broker.records["t", 2][1])[0]
    assert (message.body, message.tags, message.keys, message.flag) == (b"hello", "a", "k1 k2", 7)
    assert message.properties["p"] == "v"
    assert receipt.msg_id == message.msg_id
    assert (receipt.topic, receipt.queue_id, receipt.queue_offset) == ("t", 2, 1)
    assert (receipt.broker, receipt.status, receipt.done) == ("b", "SEND_OK", True)
    assert receipt.store_timestamp_ms == 1_700_000_000_000
    assert "t/2 @1 SEND_OK" in repr(receipt)


@pytest.mark.parametrize("linger_ms", [0, 1])
def test_stored_but_not_flushed_is_no_error(broker: Handle, linger_ms: float) -> None:
    broker.broker.faults = [10]
    with Producer(broker.address, linger_ms=linger_ms) as producer:
        assert producer.send("t", b"x").status == "FLUSH_DISK_TIMEOUT"


def test_queues_take_turns(broker: Handle) -> None:
    with Producer(broker.address) as producer:
        for _ in range(40):
            producer.send("t", b"x")
    assert [len(broker.broker.bodies("t", i)) for i in range(4)] == [10] * 4


@pytest.mark.parametrize("key", ["o-42", "polygenelubricants", ""])
def test_ordering_key_chooses_the_queue_as_rocketmq_does(broker: Handle, key: str) -> None:
    with Producer(broker.address) as producer:
        assert producer.send("t", b"x", ordering_key=key).queue_id == abs(java_hash(key)) % 4


def test_wait_and_oneway_reach_the_broker(broker: Handle) -> None:
    with Producer(broker.address) as producer:
        producer.send("t", b"x", wait=False)
        producer.send_oneway("t", b"y", queue_id=1)
        broker.wait_for(lambda fake: b"y" in fake.bodies("t", 1))
    first, second = broker.asked(SendMessages)
    assert not first.sections[0].wait
    assert second.oneway


# --- errors ---


@pytest.mark.parametrize("linger_ms", [0, 1])
@pytest.mark.parametrize(
    "kind",
    [
        errors.MessageIllegal,
        errors.MessageTooLarge,
        errors.DiskFull,
        errors.ShuttingDown,
        errors.SystemBusy,
        errors.NoPermission,
    ],
)
def test_every_refusal_has_its_type(
    broker: Handle, kind: type[CometError], linger_ms: float
) -> None:
    broker.broker.faults = [kind.code]
    with Producer(broker.address, linger_ms=linger_ms, retry_max=0) as producer:
        with pytest.raises(kind, match=f"fault {kind.code}"):
            producer.send("t", b"x").queue_offset  # noqa: B018
        if linger_ms:
            with pytest.raises(kind):
                producer.flush()
        producer.flush()  # told once
        assert producer.send("t", b"x").queue_offset >= 0


@pytest.mark.parametrize("linger_ms", [0, 1])
def test_no_answer_in_time_is_not_confirmed(broker: Handle, linger_ms: float) -> None:
    broker.broker.faults = ["silent"]
    producer = Producer(broker.address, linger_ms=linger_ms, timeout_s=0.3)
    began = time.monotonic()
    with pytest.raises(errors.NotConfirmed, match=r"0\.3 s"):
        producer.send("t", b"x").wait()
    assert 0.3 <= time.monotonic() - began < patient(20)
    with pytest.raises(errors.NotConfirmed) if linger_ms else pytest.raises(RuntimeError):
        producer.close()
        producer.send("t", b"x")


def test_a_refusal_after_a_lost_attempt_is_not_sure(broker: Handle) -> None:
    with Producer(broker.address, timeout_s=patient(5), retry_max=1) as producer:
        producer.send("t", b"first")
        broker.broker.faults = ["lost"]
        future = producer.send_async("t", b"x")
        broker.wait_for(lambda fake: sum(map(len, fake.batches.values())) == 2)
        broker.stop()
        with (
            fake_broker(broker.address, faults=[2]),
            pytest.raises(errors.NotConfirmed, match="earlier attempt"),
        ):
            future.result(patient(60))


@pytest.mark.parametrize("linger_ms", [0, 1])
def test_what_needs_no_broker_is_told_without_one(broker: Handle, linger_ms: float) -> None:
    with Producer(broker.address, max_message_bytes=1000, linger_ms=linger_ms) as producer:
        producer.send("t", b"x")
        with pytest.raises(errors.MessageTooLarge, match="1001 bytes, at most 1000"):
            producer.send("t", b"x" * 1001)
        with pytest.raises(errors.MessageIllegal, match="at least one byte"):
            producer.send("t", b"")
        for body in ("text", "", 5, None):
            with pytest.raises(TypeError, match=r"bytes-like"):
                producer.send("t", body)  # type: ignore[arg-type]
        with pytest.raises(errors.NameIllegal):
            producer.send("../x", b"x")
        with pytest.raises(errors.MessageIllegal, match="0x01"):
            producer.send("t", b"x", tags="a\x01b")
        with pytest.raises(errors.MessageTooLarge, match="32767"):
            producer.send("t", b"x", properties={"p": "v" * 40_000})
        with pytest.raises(errors.MessageIllegal, match="TAGS"):
            producer.send("t", b"x", properties={"TAGS": "v"})
        with pytest.raises(ValueError, match="queue 9"):
            producer.send("t", b"x", queue_id=9)
        with pytest.raises(errors.MessageTooLarge):
            producer.send_many("t", [b"x" * 1001])
        with pytest.raises(TypeError):
            producer.send_many("t", b"bytes")  # type: ignore[arg-type]


@pytest.mark.parametrize("linger_ms", [0, 60_000])
def test_batches_are_no_way_around_the_limit(broker: Handle, linger_ms: float) -> None:
    """The broker's limit is far above; a batch would take it."""
    with Producer(broker.address, max_message_bytes=1000, linger_ms=linger_ms) as producer:
        producer.send_many("t", [b"x" * 1000] * 10)
        producer.send("t", b"x" * 1000)
        with pytest.raises(errors.MessageTooLarge):
            producer.send("t", b"x" * 1001)
        with pytest.raises(errors.MessageTooLarge):
            producer.send_many("t", [b"x" * 1000, b"x" * 1001])


def test_nobody_there_names_the_address() -> None:
    with (
        Producer(NOBODY, timeout_s=0.2) as producer,
        pytest.raises(errors.NotReachable, match=r"127\.0\.0\.1:1 "),
    ):
        producer.send("t", b"x")


def test_a_topic_that_may_not_be_created() -> None:
    with (
        fake_broker(create=False) as handle,
        Producer(handle.address) as producer,
        pytest.raises(errors.TopicNotExist, match="may not be created"),
    ):
        producer.send("t", b"x")


# --- retries ---


@pytest.mark.parametrize("linger_ms", [0, 1])
def test_refusals_that_pass_are_ridden_out(broker: Handle, linger_ms: float) -> None:
    busy = errors.SystemBusy("later")
    broker.broker.faults = [busy, 2, 14, 17]
    with Producer(broker.address, linger_ms=linger_ms) as producer:
        assert producer.send("t", b"x", queue_id=0).queue_offset == 0
    assert broker.broker.bodies("t", 0) == [b"x"]


def numbers(bodies: list[bytes]) -> list[int]:
    return [int(body) for body in bodies]


def without_repeats(batches: list[list[bytes]]) -> list[int]:
    """The messages, of batches that were stored twice only once."""
    kept: list[list[bytes]] = []
    for batch in batches:
        if batch not in kept:
            kept.append(batch)
    return [number for batch in kept for number in numbers(batch)]


def test_a_broken_line_repeats_whole_batches_in_order() -> None:
    """The first broker stores a batch and dies before it says so; the second goes on."""
    first = start_broker()
    producer = Producer(first.address, linger_ms=1, batch_count=10, timeout_s=patient(30))
    producer.send("t", b"0", queue_id=0).wait()
    first.broker.faults = ["lost"]
    receipts = [producer.send("t", str(i).encode(), queue_id=0) for i in range(1, 101)]
    first.wait_for(lambda fake: len(fake.batches["t", 0]) == 2)
    first.stop()
    with fake_broker(first.address) as second:
        producer.close()
        batches = first.broker.batches["t", 0] + second.broker.batches["t", 0]
        assert first.broker.batches["t", 0][1] == second.broker.batches["t", 0][0]
        assert without_repeats(batches) == list(range(101))
        ids = stored_ids(first, "t", 0)[1:] + stored_ids(second, "t", 0)
        assert set(ids) == {receipt.msg_id for receipt in receipts}
        assert len(ids) == 100 + len(first.broker.batches["t", 0][1])


@pytest.mark.parametrize("code", [2, 14, 9004])
def test_nothing_overtakes_a_batch_that_was_refused(broker: Handle, code: int) -> None:
    with Producer(broker.address, linger_ms=1, batch_count=5) as producer:
        producer.send("t", b"0", queue_id=0).wait()
        broker.broker.faults = [None, code, None, code, code]
        for i in range(1, 200):
            producer.send("t", str(i).encode(), queue_id=0)
    assert numbers(broker.broker.bodies("t", 0)) == list(range(200))


def test_sending_at_once_waits_behind_what_is_under_way(broker: Handle) -> None:
    with Producer(broker.address) as producer:
        broker.broker.hold.clear()
        producer.send_async("t", b"1", queue_id=0)
        producer.send_async("t", b"2", queue_id=0)
        done: list[Receipt] = []
        thread = threading.Thread(target=lambda: done.append(producer.send("t", b"3", queue_id=0)))
        thread.start()
        broker.wait_for(lambda fake: len(fake.held) == 1)
        broker.do(lambda fake: fake.release())
        thread.join(patient(60))
    assert broker.broker.bodies("t", 0) == [b"1", b"2", b"3"]
    assert done[0].queue_offset == 2


@pytest.mark.parametrize("linger_ms", [0, 1])
def test_a_broker_that_moved_is_found(broker: Handle, linger_ms: float) -> None:
    """The route changes while an answer is awaited; the old address stays silent."""
    with (
        fake_broker() as elsewhere,
        Producer(broker.address, linger_ms=linger_ms, timeout_s=patient(30)) as producer,
    ):
        producer.send("t", b"x", queue_id=0).wait()
        broker.broker.faults = ["silent"]
        broker.broker.moved_to = elsewhere.address
        assert producer.send("t", b"y", queue_id=0).queue_offset == 0
        assert elsewhere.broker.bodies("t", 0) == [b"y"]


def test_an_idle_producer_notices_that_the_broker_was_restarted() -> None:
    """Nothing is stored twice when nothing was on its way."""
    first = start_broker()
    with Producer(first.address, timeout_s=patient(30)) as producer:
        producer.send("t", b"1", queue_id=0)
        first.stop()
        with fake_broker(first.address) as second:
            second.broker.topics = first.broker.topics
            producer.send("t", b"2", queue_id=0)
            assert second.broker.bodies("t", 0) == [b"2"]


# --- batches ---


def test_messages_that_linger_share_a_batch(broker: Handle) -> None:
    with Producer(broker.address, linger_ms=500) as producer:
        producer.send("t", b"0").wait()
        began = time.monotonic()
        receipts = [producer.send("t", str(i).encode()) for i in range(1, 51)]
        assert not receipts[0].done
        assert repr(receipts[0]) == "<Receipt t on its way>"
        assert [each.queue_offset - receipts[0].queue_offset for each in receipts] == [*range(50)]
        assert 0.4 < time.monotonic() - began < patient(20)
    assert len(broker.asked(SendMessages)) == 2


def test_a_full_batch_does_not_linger(broker: Handle) -> None:
    with Producer(broker.address, linger_ms=60_000, batch_count=10) as producer:
        receipts = [producer.send("t", b"x") for _ in range(11)]
        receipts[9].wait()
        assert not receipts[10].done
        producer.flush()
        assert receipts[10].done


def test_small_batches_of_several_queues_share_a_request(broker: Handle) -> None:
    with Producer(broker.address, linger_ms=60_000) as producer:
        for i in range(20):
            producer.send("t", b"x", queue_id=i % 4)
        producer.flush()
    (command,) = broker.asked(SendMessages)
    assert [(each.queue_id, each.count) for each in command.sections] == [(i, 5) for i in range(4)]


def test_batches_do_not_mix_who_waits_for_the_disk(broker: Handle) -> None:
    with Producer(broker.address, linger_ms=60_000) as producer:
        for i in range(6):
            producer.send("t", str(i).encode(), queue_id=0, wait=i % 3 != 0)
    sections = [each for command in broker.asked(SendMessages) for each in command.sections]
    assert [each.wait for each in sections] == [False, True, False, True]
    assert numbers(broker.broker.bodies("t", 0)) == list(range(6))


@pytest.mark.parametrize("queue_id", [None, 0])
def test_each_delay_level_has_a_batch_of_its_own(broker: Handle, queue_id: int | None) -> None:
    """None closes another's; within each the calls' order holds."""
    levels = [0, 3, 4]
    with Producer(broker.address, linger_ms=60_000) as producer:
        receipts = [
            producer.send("t", str(i).encode(), queue_id=queue_id, delay_level=levels[i % 3])
            for i in range(300)
        ]
        assert len({id(each._batch) for each in receipts}) == 3
        producer.send_many("t", [b"300", b"303"], queue_id=queue_id)
        producer.send("t", b"301", queue_id=queue_id, delay_level=3)
        assert not receipts[1].done
    sections = [each for command in broker.asked(SendMessages) for each in command.sections]
    counts: dict[int, list[int]] = {}
    for each in sections:
        counts.setdefault(each.delay_level, []).append(each.count)
    assert (counts[3], counts[4], sum(counts[0])) == ([101], [100], 102)
    if queue_id is not None:  # send_many is behind what was there before it
        assert counts[0] == [100, 2]
        bodies = numbers(broker.broker.bodies("t", 0))
        ends = [303, 301, 299]
        for kind, end in enumerate(ends):
            assert [each for each in bodies if each % 3 == kind] == [*range(kind, end + 1, 3)]


def test_levels_of_a_queue_are_bounded(broker: Handle) -> None:
    """The oldest batch leaves for one more."""
    with Producer(broker.address, linger_ms=60_000) as producer:
        receipts = [producer.send("t", b"x", delay_level=level) for level in range(OPEN_MAX)]
        receipts += [producer.send("t", b"x", delay_level=level) for level in range(OPEN_MAX)]
        assert len({id(each._batch) for each in receipts}) == OPEN_MAX
        producer.send("t", b"x", delay_level=OPEN_MAX)
        receipts[0].wait()
        assert [each.done for each in receipts[:OPEN_MAX]] == [True] + [False] * (OPEN_MAX - 1)
        again = producer.send("t", b"x", delay_level=1)
        assert again._batch is receipts[1]._batch
    assert all(each.done for each in receipts)


def test_both_batches_of_a_busy_queue_leave(broker: Handle) -> None:
    """Without linger, behind what is on its way to the one queue."""
    with Producer(broker.address, timeout_s=patient(30)) as producer:
        producer.send("t", b"0", queue_id=1)
        broker.broker.hold.clear()
        futures = [producer.send_async("t", b"1", queue_id=1)]
        broker.wait_for(lambda fake: len(fake.held) == 1)
        for i in range(2, 40):
            level = 3 if i % 2 else 0
            futures.append(producer.send_async("t", b"%d" % i, queue_id=1, delay_level=level))
        broker.do(lambda fake: fake.release())
        for future in futures:
            future.result(patient(30))
    assert len(broker.asked(SendMessages)) == 4


def test_what_is_on_its_way_is_bounded(broker: Handle) -> None:
    body = b"x" * 1000
    limit = 20_000
    with Producer(
        broker.address,
        linger_ms=1,
        batch_bytes=5_000,
        max_in_flight_bytes=limit,
        timeout_s=patient(10),
    ) as producer:
        producer.send("t", body).wait()
        broker.broker.hold.clear()
        sent = threading.Event()

        def work() -> None:
            for _ in range(100):
                producer.send("t", body)
            sent.set()

        thread = threading.Thread(target=work)
        thread.start()
        broker.wait_for(lambda fake: len(fake.held) == 4)  # one for every queue
        assert not sent.wait(0.2)
        assert producer._sender.delivery.window.in_flight_bytes <= limit + 5_000
        assert not producer._sender.has_room
        broker.do(lambda fake: fake.release())
        assert sent.wait(patient(60))
        thread.join()
    assert sum(len(broker.broker.bodies("t", i)) for i in range(4)) == 101


def test_send_many(broker: Handle) -> None:
    bodies = [str(i).encode() for i in range(5_000)]
    with Producer(broker.address, batch_bytes=10_000) as producer:
        receipts = producer.send_many("t", bodies, tags="a")
        assert len(receipts) == 5_000
        assert receipts[-1].msg_id == receipts[4_999].msg_id
        with pytest.raises(IndexError):
            receipts[5_000]
        for index, receipt in enumerate(receipts):
            assert (
                broker.broker.bodies("t", receipt.queue_id)[receipt.queue_offset] == bodies[index]
            )
        ids = [receipt.msg_id for receipt in receipts[10:20]]
        assert ids == [each.msg_id for each in receipts][10:20]
        stored = [each for i in range(4) for each in stored_ids(broker, "t", i)]
        assert sorted(stored) == sorted(receipt.msg_id for receipt in receipts)
        counts = [len(broker.broker.batches["t", i]) for i in range(4)]
        assert max(counts) - min(counts) <= 1
        assert not producer.send_many("t", [])


def test_send_many_keeps_the_order_of_a_key(broker: Handle) -> None:
    bodies = [str(i).encode() for i in range(3_000)]
    with Producer(broker.address, linger_ms=60_000, batch_bytes=10_000) as producer:
        producer.send("t", b"-1", queue_id=1)
        broker.broker.faults = [None, 2, None, 2]
        producer.send_many("t", bodies, queue_id=1)
    assert numbers(broker.broker.bodies("t", 1)) == list(range(-1, 3_000))


def test_send_many_says_how_much_is_stored(broker: Handle) -> None:
    broker.broker.faults = [None, 13]
    with (
        Producer(broker.address, batch_count=10) as producer,
        pytest.raises(errors.MessageIllegal) as caught,
    ):
        producer.send_many("t", [b"x"] * 30)
    assert caught.value.__notes__ == ["20 messages of this send_many are stored"]


# --- futures and callbacks ---


def test_futures_and_callbacks(broker: Handle) -> None:
    heard: list[tuple[Receipt | None, CometError | None]] = []
    with Producer(broker.address, retry_max=0) as producer:
        future: Future[Receipt] = producer.send_async(
            "t", b"x", callback=lambda receipt, error: heard.append((receipt, error))
        )
        receipt = future.result(patient(60))
        broker.broker.faults = [13]
        failing = producer.send_async(
            "t", b"x", callback=lambda receipt, error: heard.append((receipt, error))
        )
        error = failing.exception(10)
        assert isinstance(error, errors.MessageIllegal)
        producer.flush()  # the future has the error
    assert heard[0] == (receipt, None)
    assert heard[1][0] is None
    assert heard[1][1] is error


def unreachable_of_producers() -> list[object]:
    """What only the collector frees of what producers have made; not of the fake broker, nor of the
    threads of other tests, which leave theirs at any time."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return [
            each for each in gc.garbage
            if type(each) is Future or type(each).__module__.startswith("cometmq.client.")
        ]  # fmt: skip
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_what_was_answered_is_no_garbage(broker: Handle) -> None:
    """It goes when nobody has it any more: what waits for the collector makes it stop us longer."""
    with Producer(broker.address) as producer:
        producer.send_async("t", b"first").result(patient(60))
        gc.collect()
        gc.disable()
        gc.freeze()  # what tests before this one have left is not looked at
        try:
            futures = [producer.send_async("t", b"x") for _ in range(1_000)]
            for future in futures:
                future.result(patient(60))
            there = [weakref.ref(future) for future in futures]
            del future, futures
            producer.flush()
            assert [each for each in there if each() is not None] == []
            # Each of the messages would leave its future, or another object.
            assert len(unreachable_of_producers()) < 100
        finally:
            gc.unfreeze()
            gc.enable()


def test_garbage_of_a_producer_is_seen() -> None:
    """By the test above, if there were any."""
    gc.collect()
    for _ in range(10):
        future: Future[Receipt] = Future()
        future.add_done_callback(future.set_result)  # type: ignore[arg-type]  # a cycle
    del future
    assert sum(type(each) is Future for each in unreachable_of_producers()) >= 10


def test_what_is_added_to_a_future_may_send_and_wait(broker: Handle) -> None:
    done = threading.Event()

    def added(_future: Future[Receipt]) -> None:
        producer.send("t", b"2")
        done.set()

    with Producer(broker.address) as producer:
        future = producer.send_async("t", b"1")
        future.add_done_callback(added)
        assert done.wait(patient(60))
        done.clear()
        future.add_done_callback(added)  # it has been answered already
        assert done.wait(patient(60))


def test_a_callback_may_send_and_wait(broker: Handle) -> None:
    second: list[Receipt] = []
    done = threading.Event()

    def callback(_receipt: Receipt | None, _error: CometError | None) -> None:
        second.append(producer.send("t", b"2"))
        done.set()

    with Producer(broker.address) as producer:
        producer.send_async("t", b"1", callback=callback)
        assert done.wait(patient(60))
    assert second[0].done


def test_threads_may_share_a_producer(broker: Handle) -> None:
    with Producer(broker.address) as producer:

        def work() -> None:
            for i in range(50):
                producer.send("t", str(i).encode())

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(patient(30))
    stored = [each for i in range(4) for each in numbers(broker.broker.bodies("t", i))]
    assert sorted(stored) == sorted([*range(50)] * 4)


# --- life ---


def test_closing(broker: Handle) -> None:
    producer = Producer(broker.address, linger_ms=60_000)
    receipt = producer.send("t", b"x")
    producer.close()
    assert receipt.queue_offset == 0
    producer.close()
    for call in (
        lambda: producer.send("t", b"x"),
        lambda: producer.send_many("t", [b"x"]),
        lambda: producer.send_async("t", b"x"),
        lambda: producer.send_oneway("t", b"x"),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_leaving_by_an_exception_shows_that_one(broker: Handle) -> None:
    broker.broker.faults = [13]
    producer = Producer(broker.address, linger_ms=60_000)

    def work() -> None:
        with producer:
            producer.send("t", b"x")
            raise KeyError

    with pytest.raises(KeyError):
        work()


def test_a_fork_is_told(broker: Handle) -> None:
    with Producer(broker.address, linger_ms=1) as lingering, Producer(broker.address) as producer:
        producer.send("t", b"x")
        lingering.send("t", b"x").wait()
        child = os.fork()
        if not child:
            status = 0
            for call in (
                lambda: producer.send("t", b"x"),
                lambda: lingering.send("t", b"x"),
                lambda: producer.send_many("t", [b"x"]),
                lambda: producer.send("new", b"x"),
                producer.flush,
                producer.close,
            ):
                try:
                    call()
                except RuntimeError as error:
                    status |= "fork" not in str(error)
                else:
                    status |= 2
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        producer.send("t", b"x")


def test_ctrl_c_leaves_it_usable(broker: Handle) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Producer(broker.address, timeout_s=patient(30)) as producer:
            producer.send("t", b"1")
            broker.broker.faults = ["silent"]
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                producer.send("t", b"2")
            assert producer.send("t", b"3").done
    finally:
        signal.signal(signal.SIGALRM, old)
