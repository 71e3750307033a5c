"""Messages, receipts, outcomes and errors as values: copied, pickled, sent to other processes
(Fault 26)."""

from __future__ import annotations

import copy
import importlib
import multiprocessing
import pickle
import pkgutil
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from inside import wait_dispatched
from patience import patient

import cometmq.protocol.errors as errors_of_protocol
from cometmq import Admin, Broker, Message, Receipt, Reject, Reply, Retry, errors
from cometmq.client import PendingTransaction, PopConsumer, Receipts
from cometmq.client.sending.settled import Settled
from cometmq.protocol.errors import CometError
from cometmq.shm.kernel import codec, columns, live, store
from cometmq.shm.kernel.codec import count_attempts, decode, message_from
from cometmq.testing import Sandbox

WAIT_S = patient(60)
WAYS: list[Any] = [
    *(
        pytest.param(
            lambda value, number=number: pickle.loads(pickle.dumps(value, number)), id=f"{number}"
        )
        for number in range(2, pickle.HIGHEST_PROTOCOL + 1)
    ),
    pytest.param(copy.copy, id="copy"),
    pytest.param(copy.deepcopy, id="deepcopy"),
]
FIELDS = [
    "topic", "stored_topic", "queue_id", "queue_offset", "physical_offset", "body", "stored_body",
    "tags", "keys", "properties", "raw_properties", "msg_id", "offset_msg_id", "flag", "sys_flag",
    "born_timestamp_ms", "store_timestamp_ms", "born_host", "store_host", "reconsume_times",
    "prepared_transaction_offset", "body_crc", "is_queued", "tags_code", "size", "magic", "record",
]  # fmt: skip
Way = Callable[[Any], Any]


def fields(message: Message) -> dict[str, Any]:
    return {name: getattr(message, name) for name in FIELDS}


@pytest.fixture
def topic(cometmq: Sandbox) -> str:
    return cometmq.topic("values")


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as running:
        yield running


# --- functions that run in the pool ---


def fields_of(message: Message) -> dict[str, Any]:
    return fields(message)


def there_and_back(value: Any) -> Any:
    return value


def raised(error: BaseException) -> None:
    raise error


def raise_retry(message: Message) -> None:
    raise Retry(after=timedelta(seconds=len(message.body)))


class Odd(Retry):
    """A Retry with a different constructor."""

    def __init__(self, *, order: int) -> None:
        super().__init__(after=order / 2)
        self.order = order


class Unfit(Reject):
    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"{code} at {where}")
        self.code = code


class Silent(Retry):
    """A Retry whose constructor does not call that of Retry."""

    def __init__(self, first: int, second: int) -> None:
        self.pair = first, second


def refused_here(message: Message) -> list[str]:
    """Return the errors of calls that only the process with the message's consumer can make."""
    said = []
    for call in (
        lambda: message.reply(b"x"),
        lambda: importlib.import_module("cometmq.client.popping.broker").taken_of(message),
    ):
        try:
            call()
        except TypeError as error:  # ArgumentIllegal is one
            said.append(str(error))
    return said


# --- messages ---


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("transport", ["mapped", "zmq"])
def test_message_keeps_all_that_it_says(
    broker: Broker, topic: str, transport: str, way: Way
) -> None:
    with broker.producer() as producer:
        producer.send(topic, b"plain", tags="paid", keys=["a", "b"], properties={"region": "eu"})
        producer.send(topic, bytes(100_000), keys="zeros")
    with broker.consumer("g-" + topic, topic, transport=transport) as consumer:
        found: list[Message] = []
        while len(found) < 2:
            found += consumer.poll(2, timeout_s=WAIT_S)
        for message in found:
            again = way(message)
            assert type(again) is Message
            assert fields(again) == fields(message)
            assert repr(again) == repr(message)
            consumer.ack(again)
        consumer.commit()
    with Admin(broker.name_server) as admin:
        assert admin.describe_group("g-" + topic).lag == 0


def record(**kinds: Any) -> bytes:
    """Return a record as RocketMQ encodes it."""
    body, topic = kinds.get("body", b"body"), kinds.get("topic", b"t")
    properties = kinds.get("properties", b"TAGS\x01a\x02")
    host = bytes([10, 0, 0, 1]) + struct.pack(">i", 10911)
    crc = kinds.get("crc", importlib.import_module("zlib").crc32(body) & 0x7FFFFFFF)
    rest = (
        struct.pack(">IIiiqqiq", 0xDAA320A7, crc, 3, 7, 11, 4096, 0, 1_700_000_000_000)
        + host + struct.pack(">q", 1_700_000_000_001) + host
        + struct.pack(">iqi", 0, 0, len(body)) + body
        + struct.pack(">b", len(topic)) + topic
        + struct.pack(">h", len(properties)) + properties
    )  # fmt: skip
    return struct.pack(">i", len(rest) + 4) + rest


@pytest.mark.parametrize("way", WAYS)
def test_message_that_was_tried_before(way: Way) -> None:
    retried = record(topic=b"%RETRY%g", properties=b"RETRY_TOPIC\x01orders\x02")
    (message,) = decode(retried)
    codec.restore_topics([message])
    count_attempts([message], 3)
    again = way(message)
    assert (again.topic, again.stored_topic, again.reconsume_times) == ("orders", "%RETRY%g", 3)
    count_attempts([again])  # each copy has its own count
    assert (again.reconsume_times, message.reconsume_times) == (4, 3)


@pytest.mark.parametrize(
    "given",
    [
        b"", b"\0", record()[:-1], record() + b"x", record() + record(), record(crc=1),
        record().replace(b"\xda\xa3\x20\xa7", b"\xda\xa3\x20\xa6"),
        struct.pack(">i", 0x7FFFFFFF) + record()[4:], bytes(200),
    ],
)  # fmt: skip
def test_broken_bytes_make_no_message(given: bytes) -> None:
    with pytest.raises(ValueError, match=f"{len(given)} bytes are not a message"):
        message_from(given)
    with pytest.raises(TypeError):
        message_from(bytearray(given))  # type: ignore[arg-type]


def test_pickle_holds_the_record_alone(broker: Broker, topic: str) -> None:
    """A pickle does not contain the buffer of hundreds of messages."""
    with broker.producer() as producer:
        producer.send_many(topic, [b"%d" % number for number in range(500)])
    wait_dispatched(broker)
    with broker.consumer("g-" + topic, topic) as consumer:
        message = consumer.poll(500, timeout_s=WAIT_S)[0]
        assert len(pickle.dumps(message)) < message.size + 300


def test_message_in_another_process(broker: Broker, topic: str, pool: ProcessPoolExecutor) -> None:
    with broker.producer() as producer:
        producer.send(topic, b"there", properties={"a": "b"})
    with broker.consumer("g-" + topic, topic) as consumer:
        (message,) = consumer.poll(1, timeout_s=WAIT_S)
        assert pool.submit(fields_of, message).result(WAIT_S) == fields(message)
        said = pool.submit(refused_here, message).result(WAIT_S)
        assert "copied to another process" in said[0]
        assert "was not popped by a consumer of this process" in said[1]
        back = pool.submit(there_and_back, message).result(WAIT_S)
        consumer.ack(back)
        consumer.commit()
    with Admin(broker.name_server) as admin:
        assert admin.describe_group("g-" + topic).lag == 0


@pytest.mark.parametrize("orderly", [False, True])
def test_popped_message_that_comes_back_is_acknowledged(
    broker: Broker, topic: str, pool: ProcessPoolExecutor, orderly: bool
) -> None:
    """A popped message that returns to its process can be acknowledged while its consumer lives."""
    with PopConsumer(
        broker.name_server, "p-" + topic, topic, invisible_s=WAIT_S, orderly=orderly,
        start="earliest",
    ) as consumer:  # fmt: skip
        with broker.producer() as producer:
            producer.send_many(topic, [b"ack", b"nack", b"extend"])
        found: list[Message] = []
        while len(found) < 3:
            found += consumer.poll(3, timeout_s=WAIT_S)
        found = [pool.submit(there_and_back, each).result(WAIT_S) for each in found]
        by_body = {each.body: each for each in found}
        consumer.extend(copy.copy(by_body[b"extend"]), WAIT_S)
        consumer.ack(by_body[b"ack"])
        consumer.nack(by_body[b"nack"], after=0)
        again: list[Message] = []
        while not again:
            again = consumer.poll(1, timeout_s=WAIT_S)
        assert (again[0].body, again[0].reconsume_times) == (b"nack", 1)
        back = copy.deepcopy(pickle.loads(pickle.dumps(again[0])))
        assert back.reconsume_times == 1
        consumer.ack(back)


@pytest.mark.parametrize("way", WAYS)
def test_copy_of_a_request_is_replied_to(broker: Broker, topic: str, way: Way) -> None:
    with broker.consumer("r-" + topic, topic) as consumer, broker.producer() as producer:

        def serve() -> None:
            (request,) = consumer.poll(1, timeout_s=WAIT_S)
            way(request).reply(b"done")

        served = threading.Thread(target=serve)
        served.start()
        reply = producer.request(topic, b"do it", timeout_s=WAIT_S)
        served.join()
        again = way(reply)
        assert (type(again), again.body) == (Reply, b"done")
        assert again.properties == reply.properties
        assert again.correlation_id == reply.correlation_id


def test_pending_transaction() -> None:
    pending = PendingTransaction("id", "t", 1, 2, decode(record())[0])
    for number in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(pending, number))
        assert (again.id, again.topic, again.times, again.message_count) == ("id", "t", 1, 2)
        assert fields(again.message) == fields(pending.message)


# --- receipts ---

RECEIPT = [
    "topic", "msg_id", "duplicate", "queue_id", "queue_offset", "broker", "status",
    "store_timestamp_ms", "due_ms", "done",
]  # fmt: skip


def says(receipt: Receipt) -> dict[str, Any]:
    return {name: getattr(receipt, name) for name in RECEIPT}


@pytest.mark.parametrize("way", WAYS)
def test_receipts(broker: Broker, topic: str, way: Way, pool: ProcessPoolExecutor) -> None:
    with broker.producer(linger_ms=20) as producer:
        under_way = producer.send(topic, b"soon")
        again = way(under_way)  # waits for the answer, as its fields do
        assert says(again) == says(under_way)
        many = producer.send_many(topic, [b"%d" % number for number in range(1000)])
        copied = way(many)
        assert type(copied) is Receipts
        assert [says(each) for each in copied] == [says(each) for each in many]
        assert says(way(many[500])) == says(many[500])
        assert [says(each) for each in way(many[3:6])] == [says(each) for each in many[3:6]]
        timed = producer.send(topic, b"later", deliver_after=timedelta(hours=1))
        again = way(timed)
        assert says(again) == says(timed)
        assert again.recall_handle == timed.recall_handle
        producer.recall(again.recall_handle)
        assert repr(again.wait()) == repr(timed)
        assert says(pool.submit(there_and_back, timed).result(WAIT_S)) == says(timed)


@pytest.mark.parametrize("way", WAYS)
def test_receipt_of_a_duplicate(broker: Broker, topic: str, way: Way) -> None:
    with broker.producer(dedup="keys") as producer:
        first = producer.send(topic, b"once", keys="k1")
        second = producer.send(topic, b"once", keys="k1")
        assert second.duplicate
        assert says(way(second)) == says(second)
        assert (way(second).msg_id, way(first).duplicate) == (first.msg_id, False)


def test_pickled_receipts_are_small(broker: Broker, topic: str) -> None:
    with broker.producer() as producer:
        receipts = producer.send_many(topic, [bytes(1000)] * 1000)
    assert len(pickle.dumps(receipts[7])) < 1000
    assert len(pickle.dumps(receipts)) < 60_000


def test_receipt_of_what_failed_raises_its_error_as_a_copy() -> None:
    settled = Settled("t", ("ID",), error=errors.DiskFull("full"))
    for value in (Receipt(settled, 0), Receipts([settled])[0]):
        again = pickle.loads(pickle.dumps(value))
        assert (again.topic, again.msg_id, again.done) == ("t", "ID", True)
        for name in ("queue_id", "queue_offset", "status", "due_ms", "broker"):
            with pytest.raises(errors.DiskFull, match="full"):
                getattr(again, name)


def test_pickled_receipt_is_checked() -> None:
    for given in (
        {"topic": 1, "ids": ("a",), "error": errors.DiskFull("full")},
        {"topic": "t", "ids": (1,), "error": errors.DiskFull("full")},
        {"topic": "t", "ids": ("a",)},
        {"topic": "t", "ids": ("a",), "error": ValueError()},
        {"topic": "t", "ids": ("a",), "result": 7},
        {"topic": "t", "ids": ("a",), "error": errors.DiskFull("full"), "due": (1, 2)},
    ):
        with pytest.raises(errors.ArgumentIllegal):
            Settled(**given)  # type: ignore[arg-type]


# --- outcomes ---

OUTCOMES = [
    Retry(), Retry(after=1), Retry(after=0.25), Retry(timedelta(minutes=2)), Reject(),
    Reject("nobody can"), Odd(order=3), Unfit(7, where="there"), Silent(1, 2),
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("outcome", OUTCOMES, ids=repr)
def test_outcomes(outcome: Exception, way: Way) -> None:
    again = way(outcome)
    assert type(again) is type(outcome)
    assert (str(again), again.args, vars(again)) == (str(outcome), outcome.args, vars(outcome))


@pytest.mark.parametrize("outcome", OUTCOMES, ids=repr)
def test_outcomes_of_a_process_pool(outcome: Exception, pool: ProcessPoolExecutor) -> None:
    with pytest.raises(type(outcome)) as caught:
        pool.submit(raised, outcome).result(WAIT_S)
    assert (str(caught.value), vars(caught.value)) == (str(outcome), vars(outcome))
    (message,) = decode(record(body=b"12345"))
    with pytest.raises(Retry) as retried:  # the pool is still there
        pool.submit(raise_retry, message).result(WAIT_S)
    assert retried.value.after_s == 5.0


def test_pickled_retry_is_checked() -> None:
    outcome = Retry(after=1)
    outcome.after_s = -1
    with pytest.raises(errors.ArgumentIllegal):
        pickle.loads(pickle.dumps(outcome))


# --- errors ---


def exceptions() -> list[type[Exception]]:
    """Return all exception types of this package."""
    import cometmq

    for name in ("spark", "client", "protocol", "shm", "conf", "cluster"):
        package = importlib.import_module(f"cometmq.{name}")
        for found in pkgutil.walk_packages(package.__path__, f"cometmq.{name}."):
            if "autoload" not in found.name and "jobs" not in found.name:
                importlib.import_module(found.name)
    assert cometmq.errors is errors
    kinds: list[type[Exception]] = [CometError]
    for kind in kinds:
        kinds += [each for each in kind.__subclasses__() if each not in kinds]  # type: ignore[misc]
    natives = [each for part in (codec, columns, live, store) for each in vars(part).values()]
    found = [each for each in natives if isinstance(each, type)]
    return [*kinds, *(each for each in found if issubclass(each, Exception))]


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "RecordTooLarge": ("what", 7, 5),
    "ConfigFileDamaged": ("topics.json", "no JSON", 3, 9),
}


@pytest.mark.parametrize("way", WAYS)
def test_errors(way: Way) -> None:
    found = exceptions()
    assert errors_of_protocol.DiskFull in found
    assert len(found) > 60
    for kind in found:
        error = kind(*ARGUMENTS.get(kind.__name__, ("first",)))
        error.add_note("noted")
        if isinstance(error, CometError):
            error.stored = 3
        again = way(error)
        assert type(again) is kind
        assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))
        if isinstance(error, CometError):
            once_more = errors_of_protocol.again(error)
            assert (type(once_more), str(once_more)) == (kind, str(error))


@pytest.mark.parametrize("way", WAYS)
def test_all_problems_of_a_configuration(way: Way) -> None:
    again = way(errors.ConfigError("one is wrong", "two is wrong"))
    assert again.problems == ("one is wrong", "two is wrong")
    assert str(again) == "one is wrong\ntwo is wrong"
