"""A store goes from a broker of ours to a real RocketMQ and comes back, each time in the middle of
its work: every message is delivered by one of the three, once, at its time, and counted on.

Ours ends in order, or is killed once its files in config/ have what was done. The test has the
brokers do all of this together, twice (a minute each), and then looks at one thing after the other.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from interop import peers, rocketmq
from interop.handover import (
    FAR_S,
    HOLD_S,
    LIMIT,
    PICKED,
    PICKERS,
    PLANS,
    SQL,
    TOPICS,
    WORKERS,
    Handover,
)
from interop.real import Event, RealRocketMQ

from cometmq.client.administration.messages import parse_offset_msg_id
from cometmq.protocol.names import DELAY_TOPIC
from cometmq.shm.kernel.codec import Message, decode
from cometmq.shm.reading.store_reader import StoreReader
from cometmq.shm.state.fastjson import loads
from cometmq.shm.tools.verify import verify_store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.jvm,
    pytest.mark.timeout(rocketmq.FETCH_TIMEOUT_S + 600),
]
BROKERS = ["ours", "theirs", "ours again"]
RETRY_TOPIC, DLQ_TOPIC = f"%RETRY%{WORKERS}", f"%DLQ%{WORKERS}"


@pytest.fixture(scope="module")
def rocket(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealRocketMQ]:
    peers.require("rocketmq")
    failed = request.session.testsfailed
    with RealRocketMQ(tmp_path_factory.mktemp("jvm")) as running:
        yield running
        if request.session.testsfailed > failed:
            sys.stderr.write(running.said)


@pytest.fixture(scope="module", params=["closed", "killed"])
def over(
    request: pytest.FixtureRequest, rocket: RealRocketMQ, tmp_path_factory: pytest.TempPathFactory
) -> Handover:
    killed = request.param == "killed"
    handover = Handover(tmp_path_factory.mktemp(request.param), rocket, killed=killed)
    handover.begin()
    handover.go_on()
    handover.come_back()
    return handover


def stored(over: Handover, topic: str, queue_id: int = 0) -> list[Message]:
    """What a queue has at the end of all."""
    found: list[Message] = []
    with closing(StoreReader.open_closed(over.store)) as reader:
        while (result := reader.get_message(topic, queue_id, len(found), 1_000)).payload:
            found += decode(bytes(result.payload))
    return found


def test_each_attempt_is_made_once(over: Handover) -> None:
    """By one broker, or by the next one if a machine that is slow has it held for too short."""
    handed_on = Counter[tuple[str, ...]]()
    for plan in PLANS:
        found = [each for each in over.of("work") if each.body == plan.body]
        assert [each.reconsume_times for each in found] == plan.attempts, (plan, found)
        brokers = [each.broker for each in found]
        assert brokers == sorted(brokers, key=BROKERS.index), plan
        handed_on[tuple(dict.fromkeys(brokers))] += 1
    assert handed_on["ours", "theirs"], handed_on
    assert handed_on["theirs", "ours again"], handed_on
    assert [each.broker for each in over.of("work") if each.body == "rejected"] == ["ours"]


def test_what_a_consumer_is_shown_of_a_retry(over: Handover) -> None:
    """Where it was sent at first, by whatever broker it is shown."""
    first = {each.body: each for each in over.of("work") if not each.reconsume_times}
    for each in over.of("work"):
        sent = first[each.body]
        names = ("UNIQ_KEY", "KEYS", "TAGS", "fails", "holds")
        assert {name: each.properties.get(name) for name in names} == {
            name: sent.properties.get(name) for name in names
        }
        # With this property RocketMQ's client has sent it anew: a broker did not answer in time.
        if "MAX_RECONSUME_TIMES" not in each.properties:
            assert each.born_ms == sent.born_ms
        if each.reconsume_times:
            assert each.properties["RETRY_TOPIC"] == "work"


def test_dead_letters(over: Handover) -> None:
    dead = stored(over, DLQ_TOPIC)
    wanted = [plan.body for plan in PLANS if plan.is_dead] + ["rejected"]
    assert Counter(each.body.decode() for each in dead) == Counter(wanted)
    with closing(StoreReader.open_closed(over.store)) as reader:
        for each in dead:
            times = 0 if each.body == b"rejected" else LIMIT
            assert each.reconsume_times == times + 1
            _, place = parse_offset_msg_id(each.properties["ORIGIN_MESSAGE_ID"])
            origin = reader.record_at(place)
            assert (origin.topic, origin.body, origin.reconsume_times) == ("work", each.body, 0)


def test_records_are_as_rocketmqs(over: Handover) -> None:
    """Retries and dead letters: the same properties, whoever has stored them."""
    for topic in (DELAY_TOPIC, RETRY_TOPIC, DLQ_TOPIC):
        ours, theirs = set(), set()
        for record in over.at_last.records[topic]:
            shape = shape_of(record)
            if shape is not None:
                is_theirs = record["commitLogOffset"] >= over.theirs_from
                (theirs if is_theirs else ours).add(shape)
        assert theirs, topic
        # A plan's message is not dead before the store is handed over.
        assert ours or topic == DLQ_TOPIC, topic
        assert not ours - theirs, topic
    # And what ours stores of what has come back:
    shapes = {shape_of(record) for record in over.at_last.records[DLQ_TOPIC]}
    for message in stored(over, DLQ_TOPIC):
        record: Event = {
            "properties": message.properties,
            "reconsumeTimes": message.reconsume_times,
        }
        assert shape_of(record) in shapes | {None}


def shape_of(record: Event) -> tuple[Any, ...] | None:
    """What must be the same; None: it is not of a plan."""
    properties = record["properties"]
    if "ORIGIN_MESSAGE_ID" not in properties or "KEYS" not in properties:
        return None
    names = sorted(properties.keys() - {"holds"})
    values = [properties.get(name) for name in ("RETRY_TOPIC", "REAL_TOPIC", "WAIT")]
    is_dead = record["reconsumeTimes"] > LIMIT
    return (*names, *values, properties["DELAY"] if is_dead else None)


def test_delay_levels(over: Handover) -> None:
    found = [(each.broker, each.body) for each in over.of("later")]
    assert found == [("ours", "early"), ("theirs", "late"), ("ours again", "theirs")]
    for each in over.of("later"):
        wait_s = 1 if each.body == "early" else HOLD_S
        assert each.stored_ms >= each.born_ms + wait_s * 1_000, each
    levels = [each.properties["DELAY"] for each in stored(over, DELAY_TOPIC, 8)]
    assert levels == ["9", "9"], "one of each broker waits on"


def test_timers(over: Handover) -> None:
    found = Counter((each.broker, each.body) for each in over.of("timed"))
    late = [("theirs", f"late {number}") for number in range(5)]
    assert found == Counter([("ours", "early"), *late, ("ours again", "theirs")])
    for each in over.of("timed"):
        assert each.stored_ms >= int(each.properties["TIMER_OUT_MS"]), each
    assert [each.message.body for each in over.scheduled] == [b"far", b"far"]
    for each in over.scheduled:
        assert each.due_ms > each.message.store_timestamp_ms + FAR_S * 500


def test_transactions(over: Handover) -> None:
    """RocketMQ asks for both messages of a transaction, one after the other."""
    found = Counter((each.broker, each.body) for each in over.of("orders"))
    assert found == Counter(
        (broker, body + more)
        for broker, body, parts in (
            ("ours", "early, committed", 2),
            ("theirs", "late, commit", 2),
            ("ours again", "late, undecided", 2),
            ("ours again", "theirs, commit", 1),
        )
        for more in ("", " too")[:parts]
    )
    asked = set(over.checked)
    for fate in ("commit", "roll back", "undecided"):
        assert {("theirs", f"late, {fate}"), ("theirs", f"late, {fate} too")} <= asked
    assert {"theirs, commit", "theirs, roll back"} <= {body for _, body in asked}
    by_ours = {body for broker, body in asked if broker == "ours again"}
    decided = {"late, commit", "late, commit too", "late, roll back", "late, roll back too"}
    assert "late, undecided" in by_ours
    assert not by_ours & decided, "RocketMQ has ended them"


def test_offsets_topics_and_groups(over: Handover) -> None:
    state = over.at_first.state
    offsets = state["offsets"]["offsetTable"]
    for (group, topic, queue_id), offset in over.before.items():
        assert offsets[f"{topic}@{group}"][queue_id] == offset, (group, topic)
    topics = state["topics"]["topicConfigTable"]
    for topic, queues in TOPICS.items():
        assert (topics[topic]["readQueueNums"], topics[topic]["writeQueueNums"]) == (queues, queues)
    assert topics[RETRY_TOPIC]["readQueueNums"] == 2
    workers = state["groups"]["subscriptionGroupTable"][WORKERS]
    assert (workers["retryMaxTimes"], workers["retryQueueNums"]) == (LIMIT, 2)
    # And RocketMQ's come back.
    for key, queues in over.at_last.state["offsets"]["offsetTable"].items():
        topic, group = key.split("@")
        for queue_id, offset in queues.items():
            if (group, topic, queue_id) in over.committed:
                assert over.committed[group, topic, queue_id] >= offset, key


def test_what_was_read_just_before_the_end(over: Handover) -> None:
    """No file need have it after a kill: then some is read once more, and no more than that."""
    found = Counter(each.body for each in over.of("last", "theirs"))
    assert found["unread"] == 1
    assert found["read"] <= (5 if over.killed else 0)
    assert not over.of("last", "ours again")


def test_filters(over: Handover) -> None:
    """The group's filter is one and the same for all three, since when it was registered first."""
    found = Counter((each.broker, each.body) for each in over.of("picked"))
    names = {"ours": "early", "theirs": "late", "ours again": "theirs"}
    assert found == Counter(
        (broker, f"{name} {number}") for broker, name in names.items() for number in PICKED
    )
    file = over.store / "config" / "consumerFilter.json"
    tables: list[Any] = [over.at_first.state["filters"], over.at_last.state["filters"]]
    tables.append(loads(file.read_bytes()))
    filters = [table["filterDataByTopic"]["picked"]["groupFilterData"][PICKERS] for table in tables]
    assert len({each["bornTime"] for each in filters}) == 1, filters
    assert len({str(each["bloomFilterData"]) for each in filters}) == 1, filters
    for each in filters:
        assert (each["expression"], each["expressionType"]) == (SQL, "SQL92")


def test_nothing_is_left(over: Handover) -> None:
    assert over.lags == {group: 0 for group in over.lags}
    assert not verify_store(over.store).findings
