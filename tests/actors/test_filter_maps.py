"""Filter maps of a whole broker: who has them made, what is drained by them, what befalls them."""

from __future__ import annotations

import os
import random
import shutil
import threading
from pathlib import Path

import pytest
from family import RunningBroker
from filtered import (
    QUEUES,
    SETTINGS,
    TOPIC,
    Traffic,
    drain,
    ends,
    expression,
    maps_of,
    register,
    running,
    send,
    told,
    until_calculated,
)
from scripted_ha import ALL, Replica
from transacting import until

from cometmq import Admin, Producer
from cometmq.errors import NotConfirmed
from cometmq.protocol.commands import JoinGroup, Subscription
from cometmq.shm.derived.filter_maps import map_folder, read_filters
from cometmq.shm.kernel.layout import FILTER_BLOCK_ENTRIES
from cometmq.shm.live.control import Counter
from cometmq.shm.os.files import FILTER_MAPS_DIR, FILTERS_FILE
from cometmq.shm.reading.selection import selection_of

pytestmark = pytest.mark.timeout(180)


# --- drains ---


@pytest.mark.slow
def test_what_is_drained_by_maps_is_what_is_wanted(tmp_path: Path) -> None:
    traffic = Traffic()
    chance = traffic.chance
    with running(tmp_path) as broker:
        send(broker, traffic, 3_000)
        choices = [("*", "a = '1'"), ("red || blue", "c > 1"), ("*", expression(chance)),
                   ("green", expression(chance))]  # fmt: skip
        expressions = []
        for number, (tags, sql) in enumerate(choices):
            register(broker, f"first-{number}", tags, sql)
            expressions.append(selection_of(tags, sql).expression)
        until_calculated(broker, *expressions, ends=ends(broker))
        for number, (tags, sql) in enumerate(choices):
            wanted = traffic.wanted(tags, sql)
            for transport in ("mapped", "zmq"):
                group = f"drains-{transport}-{number}"
                found = drain(broker, group, tags, sql, wanted, transport)
                assert sorted(found) == sorted(wanted), (traffic.seed, tags, sql, transport)
        assert broker.statistics("dispatcher")["filters"] == len(set(expressions))


def test_a_record_that_its_map_does_not_want_is_not_looked_at(tmp_path: Path) -> None:
    """Its property is overwritten in the log, so that whoever looked would want it."""
    with running(tmp_path) as broker:
        with Producer(broker.ready.name_server, linger_ms=2) as producer:
            for number in range(200):
                producer.send(
                    TOPIC, b"%d" % number, queue_id=0, properties={"mark": "no" if number else "ok"}
                )
            producer.flush()
        register(broker, "g", "*", "mark = 'ok'")
        until_calculated(broker, "mark = 'ok'", ends={0: 200})
        for segment in sorted((broker.store / "commitlog").iterdir()):
            content = segment.read_bytes()
            with segment.open("r+b") as file:
                file.write(content.replace(b"mark\1no", b"mark\1ok"))
        for transport in ("mapped", "zmq"):
            assert drain(broker, f"g-{transport}", "*", "mark = 'ok'", [b"0"], transport) == [b"0"]
            every = [b"%d" % number for number in range(200)]
            found = drain(broker, f"h-{transport}", "*", "mark IN ('ok')", every, transport)
            assert sorted(found) == sorted(every), "without a map it is"


def test_a_backlog_over_the_border_of_two_blocks(tmp_path: Path) -> None:
    count = FILTER_BLOCK_ENTRIES + 1
    near = {*range(5), *range(FILTER_BLOCK_ENTRIES - 2, count)}
    with running(tmp_path, {"mappedFileSizeCommitLog": 64 << 20}) as broker:
        with Producer(broker.ready.name_server, linger_ms=5) as producer:
            for number in range(count):
                here = {"at": "near" if number in near else "far"}
                producer.send(TOPIC, b"%d" % number, queue_id=0, properties=here)
            producer.flush()
        register(broker, "g", "*", "at = 'near'")
        until("the second block", lambda: told(broker, "at = 'near'", 0, 1) == 1)
        assert told(broker, "at = 'near'", 0, 0) == FILTER_BLOCK_ENTRIES
        for transport in ("mapped", "zmq"):
            wanted = [b"%d" % number for number in sorted(near)]
            assert drain(broker, transport, "*", "at = 'near'", wanted, transport) == wanted


# --- who has maps made ---


def test_maps_come_and_go_with_filters_and_topics(tmp_path: Path) -> None:
    traffic = Traffic()
    with running(tmp_path, {"flushConsumerOffsetInterval": 200}) as broker:
        send(broker, traffic, 300)
        assert maps_of(broker)[1] == 0
        assert not (broker.store / FILTER_MAPS_DIR).exists(), "nobody has a filter"
        register(broker, "one", "*", "a = '1'")
        register(broker, "two", "red", "a = '1'")
        joined = "TAGS IN ('red') AND (a = '1')"
        until_calculated(broker, "a = '1'", joined, ends=ends(broker))
        assert read_filters(broker.store) == {TOPIC: ["a = '1'", joined]}
        with Admin(broker.ready.name_server) as admin:
            broker.coordinator.ask(JoinGroup("one", "m", [Subscription(TOPIC, "*", "b = '2'")]))
            until_calculated(broker, "b = '2'", ends=ends(broker))
            until("what nobody registers goes", lambda: len(folders(broker)) == 2)
            before = broker.read_queue(TOPIC, 0)
            admin.delete_topic(TOPIC)
            until("so do those of a topic", lambda: folders(broker) == [])
            broker.create_topic(TOPIC, QUEUES)
            until_calculated(broker, "b = '2'", ends=ends(broker))
        send(broker, traffic, 300)
        after = broker.read_queue(TOPIC, 0)
        assert [each.queue_offset for each in after] == list(range(len(after))), (
            "no place is given twice"
        )
        assert [each.body for each in after[: len(before)]] == [each.body for each in before]
        until_calculated(broker, "b = '2'", ends=ends(broker))
        wanted = traffic.wanted("*", "b = '2'")
        for transport in ("mapped", "zmq"):
            found = drain(broker, f"drains-{transport}", "*", "b = '2'", wanted, transport)
            assert sorted(found) == sorted(wanted), traffic.seed


def folders(broker: RunningBroker) -> list[str]:
    root = broker.store / FILTER_MAPS_DIR
    return sorted(os.listdir(root)) if root.exists() else []


def test_no_maps_where_they_are_off(tmp_path: Path) -> None:
    traffic = Traffic()
    with running(tmp_path, {"enableCalcFilterBitMap": False}) as broker:
        send(broker, traffic, 300)
        wanted = traffic.wanted("*", "a = '1'")
        assert sorted(drain(broker, "g", "*", "a = '1'", wanted)) == sorted(wanted)
        until("the dispatcher could know", lambda: (broker.store / FILTERS_FILE).exists())
        assert broker.statistics("dispatcher")["filter_maps"] == "off"
        assert maps_of(broker)[1] == 0


def test_an_orderly_end_leaves_no_maps(tmp_path: Path) -> None:
    traffic = Traffic()
    with running(tmp_path) as broker:
        send(broker, traffic, 300)
        register(broker, "g", "*", "a = '1'")
        until_calculated(broker, "a = '1'", ends=ends(broker))
        store = broker.store
        assert broker.close() == 0
    assert not (store / FILTER_MAPS_DIR).exists()
    assert not (store / FILTERS_FILE).exists()


# --- what befalls them ---


@pytest.mark.slow
def test_damaged_maps_hide_nothing(tmp_path: Path) -> None:
    traffic = Traffic()
    with running(tmp_path) as broker:
        send(broker, traffic, 1_000)
        register(broker, "g", "*", "a = '1'")
        until_calculated(broker, "a = '1'", ends=ends(broker))
        wanted = traffic.wanted("*", "a = '1'")
        files = sorted(map_folder(broker.store, TOPIC, "a = '1'").iterdir())
        assert len(files) == QUEUES
        whole = [file.read_bytes() for file in files]
        for number in range(16):
            for file, content in zip(files, whole, strict=True):
                file.write_bytes(damaged(traffic.chance, content))
            transport = ("mapped", "zmq")[number % 2]
            found = drain(broker, f"g-{number}", "*", "a = '1'", wanted, transport)
            assert sorted(found) == sorted(wanted), traffic.seed


def damaged(chance: random.Random, content: bytes) -> bytes:
    at = chance.randrange(len(content))
    match chance.randrange(4):
        case 0:
            return (
                content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
            )
        case 1:
            return content[:at]
        case 2:
            return (content[:at] + bytes(512) + content[at + 512 :])[: len(content)]
        case _:
            return bytes(len(content))  # all messages surely unwanted


@pytest.mark.slow
def test_maps_of_the_run_before_are_not_believed(tmp_path: Path) -> None:
    """They say of queue 0 what is true of queue 0, and are put back once the broker has begun anew;
    to see that nobody looks, all of them say that nothing is wanted."""
    traffic = Traffic()
    with running(tmp_path) as broker:
        send(broker, traffic, 600)
        register(broker, "g", "*", "mark = 'never'")
        until_calculated(broker, "mark = 'never'", ends=ends(broker))
        folder = map_folder(broker.store, TOPIC, "mark = 'never'")
        shutil.copytree(folder, tmp_path / "old")
        store = broker.store
        broker.kill_all()
    with RunningBroker(store, SETTINGS) as broker:
        wanted = traffic.wanted("*", "a = '1'")
        register(broker, "g", "*", "a = '1'")
        until_calculated(broker, "a = '1'", ends=ends(broker))
        for number, name in enumerate(os.listdir(tmp_path / "old")):
            assert (tmp_path / "old" / name).stat().st_size
            shutil.copy(tmp_path / "old" / name, map_folder(store, TOPIC, "a = '1'") / name)
            transport = ("mapped", "zmq")[number % 2]
            found = drain(broker, f"g-{number}", "*", "a = '1'", wanted, transport)
            assert sorted(found) == sorted(wanted), traffic.seed


@pytest.mark.slow
def test_the_dispatcher_dies_and_filters_change_under_load(tmp_path: Path) -> None:
    """Consumers with filters of their own begin, come to the end of what was sent, and go, while
    messages come and the dispatcher is killed."""
    traffic = Traffic()
    chance = traffic.chance
    with running(tmp_path) as broker:
        send(broker, traffic, 2_000)
        for number in range(12):
            tags = chance.choice(["*", "red", "red || green"])
            sql = expression(chance)
            register(broker, f"g-{number % 3}", tags, sql)
            if chance.random() < 0.5:
                until_calculated(broker, selection_of(tags, sql).expression, ends=ends(broker))
            pid = broker.pids()["dispatcher"] if number % 3 == 1 else 0
            if pid:
                broker.end(pid)
            sender = threading.Thread(target=send, args=(broker, more := Traffic(), 500))
            sender.start()
            try:
                wanted = traffic.wanted(tags, sql)
                transport = chance.choice(["mapped", "zmq"])
                found = drain(broker, f"d-{number}", tags, sql, wanted, transport)
            finally:
                sender.join()
            assert wanted <= set(found), (traffic.seed, tags, sql, transport)
            traffic.sent |= more.sent
            if pid:
                broker.wait_serves("dispatcher", not_pid=pid)
            wanted = traffic.wanted(tags, sql)
            found = drain(broker, f"e-{number}", tags, sql, wanted, transport)
            assert sorted(found) == sorted(wanted), (traffic.seed, tags, sql, transport)


@pytest.mark.slow
def test_a_place_that_is_given_again_after_a_cut_is_judged_anew(tmp_path: Path) -> None:
    """In a group the log is cut behind what was confirmed: no map has told of that."""
    no, ok = {"mark": "no"}, {"mark": "ok"}
    with Replica(tmp_path / "store") as replica:
        replica.run(1)
        replica.create_topic(TOPIC, 1)
        replica.send(TOPIC, 0, [b"kept"] * 100, properties=no)
        register(replica, "g", "*", "mark = 'ok'")
        until_calculated(replica, "mark = 'ok'", ends={0: 100})
        replica.tell(confirm=(confirmed := replica.counter(Counter.WROTE)))
        with pytest.raises(NotConfirmed):
            replica.send(TOPIC, 0, [b"cut"], properties=no)
        pid = replica.pids()["dispatcher"]
        replica.end(pid)
        replica.wait_serves("dispatcher", not_pid=pid)  # and calculates all that there is
        until_calculated(replica, "mark = 'ok'", ends={0: 100})
        before = maps_of(replica)
        replica.run(0, cut_to=confirmed)
        replica.tell(confirm=ALL)
        replica.run(2)
        (sent,) = replica.send(TOPIC, 0, [b"another"], properties=ok)
        assert sent.queue_offset == 100
        register(replica, "g", "*", "mark = 'ok'")
        until_calculated(replica, "mark = 'ok'", ends={0: 101})
        assert maps_of(replica)[0] != before[0]
        for transport in ("mapped", "zmq"):
            found = drain(replica, f"g-{transport}", "*", "mark = 'ok'", [b"another"], transport)
            assert found == [b"another"]
