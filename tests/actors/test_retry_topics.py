"""The retry topic that redelivers a popped message, and the group that owns it (Fault 2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from family import RunningBroker
from patience import patient

from cometmq import Admin, Consumer, PopConsumer, Producer, errors
from cometmq.actors.tables.groups import GroupBook
from cometmq.actors.tables.offsets import OffsetBook
from cometmq.actors.tables.retry_topics import RetryTopics
from cometmq.actors.tables.topics import TopicBook
from cometmq.protocol.commands import GivenBack
from cometmq.protocol.configs import SubscriptionGroupConfig, TopicConfig
from cometmq.protocol.ledger import OffsetSet

WAIT_S = patient(60)


def known(
    groups: Iterable[str], topics: Iterable[str], reads: Iterable[tuple[str, str]] = ()
) -> RetryTopics:
    """Return retry topics.

    Args:
        reads: groups, with the topics in which they have committed offsets.
    """
    configs = {each: SubscriptionGroupConfig(group_name=each) for each in groups}
    offsets = OffsetBook({})
    for group, topic in reads:
        offsets.apply(OffsetSet(group, topic, 0, 1))
    table = {each: TopicConfig(topic_name=each) for each in topics}
    return RetryTopics(GroupBook(configs, 9), TopicBook(table, 99, 1), offsets)


def topic_of(found: RetryTopics, group: str, topic: str) -> str:
    return found.topic_of(group, GivenBack(topic, 0, 0, 0, handle=1), popped=True)


def test_the_name_that_rocketmq_reads() -> None:
    found = known(["g"], ["t"], [("g", "t")])
    assert topic_of(found, "g", "t") == "%RETRY%g_t"
    assert topic_of(found, "g", "%RETRY%g_t") == "%RETRY%g_t"
    assert topic_of(found, "g", "%RETRY%g+t") == "%RETRY%g_t"  # of an older release
    assert topic_of(found, "g", "%RETRY%g") == "%RETRY%g"
    assert found.topic_of("g", GivenBack("t", 0, 0, 0), popped=False) == "%RETRY%g"


def test_a_name_that_is_another_group_s() -> None:
    by_name = known(["g", "g_t"], ["t"], [("g", "t")])
    assert topic_of(by_name, "g", "t") == "%RETRY%g+t"
    by_pair = known(["a", "a_b"], ["b_c", "c"], [("a", "b_c"), ("a_b", "c")])
    assert topic_of(by_pair, "a", "b_c") == "%RETRY%a+b_c"
    assert topic_of(by_pair, "a_b", "c") == "%RETRY%a_b+c"
    no_pair = known(["a", "a_b"], ["b_c", "c"], [("a", "b_c"), ("a_b", "d")])
    assert topic_of(no_pair, "a", "b_c") == "%RETRY%a_b_c"


def test_long_names() -> None:
    group, topic = "g" * 120, "t" * 127
    assert topic_of(known([group], [topic]), group, topic) == f"%RETRY%{group}_{topic}"
    longer = f"%DLQ%{topic}"
    assert topic_of(known([group], [longer]), group, longer) == f"%RETRY%{group}"


def test_both_names_are_read() -> None:
    topics = ["t", "%RETRY%g", "%RETRY%g_t", "%RETRY%g+t", "%RETRY%g_u", "%RETRY%g+u"]
    assert known(["g"], topics).read_by("g", "t") == ["%RETRY%g", "%RETRY%g_t", "%RETRY%g+t"]
    assert known(["g", "g_t"], topics).read_by("g", "t") == ["%RETRY%g", "%RETRY%g+t"]
    assert known(["g"], ["t"]).read_by("g", "t") == []


def test_what_is_deleted_with_a_group() -> None:
    topics = ["%RETRY%g", "%RETRY%g_t", "%RETRY%g+t", "%RETRY%g_u", "%RETRY%gg", "%RETRY%g_x_y"]
    found = known(["g", "g_x"], topics, [("g", "t"), ("g", "%RETRY%g_u"), ("g_x", "y")])
    assert found.of_group("g") == ["%RETRY%g", "%RETRY%g_t", "%RETRY%g+t", "%RETRY%g_u"]


def test_a_new_group_takes_over_nothing() -> None:
    found = known(["g"], ["t", "%RETRY%g_t"], [("g", "t"), ("g", "%RETRY%g_t")])
    with pytest.raises(errors.NameIllegal, match="%RETRY%g_t has retries of group g for topic t"):
        found.check_new("g_t")
    found.check_new("g_u")
    found.check_new("g")
    known(["g"], ["t", "%RETRY%g_t"], [("g", "t")]).check_new("g_t")  # g shares queues
    known(["g", "g_t"], ["t", "%RETRY%g_t"], [("g", "t"), ("g", "%RETRY%g_t")]).check_new("g_t")


# --- a broker ---


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    with RunningBroker(tmp_path_factory.mktemp("retries") / "store") as found:
        yield found


def retried(broker: RunningBroker, group: str, topic: str, body: bytes) -> None:
    """Send a message, pop it as the group, and give it back."""
    server = broker.ready.name_server
    with Producer(server) as producer, PopConsumer(server, group, topic) as consumer:
        producer.send(topic, body)
        (message,) = consumer.poll(1, WAIT_S)
        assert message.body == body
        consumer.nack(message, after=0)


def test_each_gets_its_own(broker: RunningBroker) -> None:
    """Groups and topics with ambiguous names each get their own retries."""
    server = broker.ready.name_server
    with Admin(server) as admin:
        for topic in ("c", "b_c"):
            admin.create_topic(topic, 1)
        for group, topic in (("a", "b_c"), ("a_b", "c")):
            retried(broker, group, topic, f"{group} {topic}".encode())
        for group, topic in (("a", "b_c"), ("a_b", "c")):
            with PopConsumer(server, group, topic) as consumer:
                (message,) = consumer.poll(9, WAIT_S)
                assert (message.topic, message.body) == (topic, f"{group} {topic}".encode())
                consumer.ack(message)
                assert consumer.poll(9, 1.0) == []
        assert "%RETRY%a_b_c" in admin.topics()
        with pytest.raises(errors.NameIllegal, match="%RETRY%a_b_c has retries of group a"):
            admin.create_group("a_b_c")
        with pytest.raises(errors.NameIllegal), Consumer(server, "a_b_c", "c") as late:
            late.poll(1, WAIT_S)
        admin.delete_group("a")
        assert "%RETRY%a_b_c" in admin.topics()  # it may belong to the other group, too
        admin.delete_topic("%RETRY%a_b_c")
        admin.create_group("a_b_c")


def test_a_group_that_shares_queues_keeps_its_own(broker: RunningBroker) -> None:
    server = broker.ready.name_server
    with Admin(server) as admin:
        admin.create_topic("jobs", 1)
        admin.create_group("works_jobs")
        retried(broker, "works", "jobs", b"popped")
        assert "%RETRY%works+jobs" in admin.topics()
        with Consumer(server, "works_jobs", "jobs") as consumer:
            assert [message.body for message in consumer.poll(9, WAIT_S)] == [b"popped"]
            assert consumer.poll(9, 1.0) == []
        with PopConsumer(server, "works", "jobs") as consumer:
            (message,) = consumer.poll(9, WAIT_S)
            assert (message.body, message.reconsume_times) == (b"popped", 1)
            consumer.ack(message)
        admin.delete_group("works")
        assert "%RETRY%works+jobs" not in admin.topics()
