"""`msg query`, `query_messages`: as many as were asked for, or it is said that there are more."""

from __future__ import annotations

from collections.abc import Iterator

import cli_process
import pytest
from family import RunningBroker
from inside import wait_indexed
from patience import patient

from cometmq.client import Admin
from cometmq.protocol.commands import QueryMessages, QueryResult
from cometmq.protocol.wire.channel import Channel

SETTINGS = {"maxHashSlotNum": 1_000, "maxIndexNum": 4_000}  # several files
COUNT = 2_500  # more than two answers hold


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    with RunningBroker(tmp_path_factory.mktemp("pages") / "store", SETTINGS) as running:
        for topic in ("many", "large", "alike"):
            running.create_topic(topic, 1)
        for first in range(0, COUNT, 500):
            running.send("many", 0, [b"%d" % n for n in range(first, first + 500)], keys="k")
        for number in range(44):
            running.send("large", 0, [b"%d " % number + b"x" * 250_000], keys="k")
        running.send("alike", 0, [b"found"], keys="Aa")
        for _ in range(66):
            running.send("alike", 0, [b"passed over"] * 1_000, keys="BB")  # of the same hash
        wait_indexed(running)
        yield running


def test_more_than_one_answer_holds(broker: RunningBroker) -> None:
    with Admin(broker.ready.name_server) as admin:
        found = admin.query_messages("many", "k", max_count=10 * COUNT)
        assert [message.body for message in found] == [b"%d" % n for n in range(COUNT)]
        newest = admin.query_messages("many", "k", max_count=1_500)
        assert [message.body for message in newest] == [b"%d" % n for n in range(1_000, COUNT)]
        begin, end = found[300].store_timestamp_ms, found[-300].store_timestamp_ms
        between = admin.query_messages("many", "k", begin=begin, end=end, max_count=COUNT)
        assert [m.body for m in between] == [
            m.body for m in found if begin <= m.store_timestamp_ms <= end
        ]


def test_more_bytes_than_one_answer_holds(broker: RunningBroker) -> None:
    with Admin(broker.ready.name_server) as admin:
        found = admin.query_messages("large", "k")
        assert [int(message.body.split()[0]) for message in found] == list(range(44))


def test_more_of_the_same_hash_than_one_question_looks_at(broker: RunningBroker) -> None:
    with Admin(broker.ready.name_server) as admin:
        assert [message.body for message in admin.query_messages("alike", "Aa")] == [b"found"]


def test_an_answer_says_that_there_is_more(broker: RunningBroker) -> None:
    reader: Channel = broker.reader
    command = QueryMessages("many", "k", max_count=COUNT)
    seen, below = 0, command.below
    while True:
        answer, _ = reader.ask(
            QueryMessages("many", "k", COUNT, below=below), timeout_s=patient(30)
        )
        assert isinstance(answer, QueryResult)
        assert 0 < answer.count <= 1024
        seen += answer.count
        if not answer.more_below:
            break
        assert answer.more_below < below
        below = answer.more_below
    assert seen == COUNT


def test_the_command_line_says_what_it_left_out(broker: RunningBroker) -> None:
    asked = ("msg", "query", "--name-server", broker.ready.name_server, "-t", "many", "-k", "k")
    done = cli_process.run(*asked, "-f", "%s\\n")
    assert done.stdout.splitlines() == [b"%d" % n for n in range(COUNT - 64, COUNT)]
    assert done.stderr == (b"these are the newest 64; there are older ones: -n 640 shows more\n")
    done = cli_process.run(*asked, "-n", str(COUNT), "-f", "%s\\n")
    assert done.stdout.splitlines() == [b"%d" % n for n in range(COUNT)]
    assert done.stderr == b""
