"""Clients that are newer than their broker (Fault 34)."""

from __future__ import annotations

from collections.abc import Iterator

import cli_process
import pytest
from client_fakes import FakeBroker, Handle

from cometmq import Admin, Producer
from cometmq.actors.runtime.service import Request
from cometmq.errors import BadRequest, UnknownCommand
from cometmq.protocol import frames
from cometmq.protocol.commands import (
    Command,
    Failed,
    ListQueues,
    ListTopics,
    TopicList,
)


class OlderBroker(FakeBroker):
    """A broker of a release without ListQueues, with the error of that release."""

    def on_list_queues(self, command: ListQueues, _request: Request) -> Command:
        raise BadRequest(f"not a command: Invalid value {type(command).__struct_config__.tag}")

    def on_list_topics(self, _command: ListTopics, _request: Request) -> Command:
        return TopicList(list(self.topics.values()))


@pytest.fixture
def older() -> Iterator[Handle]:
    handle = Handle(OlderBroker.start(queues=2))
    with Producer(handle.address) as producer:
        for number in range(3):
            producer.send("t", b"%d" % number, queue_id=number % 2)
    yield handle
    handle.stop()


def test_topics_of_an_older_broker_are_described(older: Handle) -> None:
    """`describe_topic` works; it raised: not a command: Invalid value 56."""
    with Admin(older.address) as admin:
        assert admin.topics() == ["t"]
        (listed,) = admin.describe_topics()
        assert listed == admin.describe_topic("t")
    found = {
        each.queue_id: (each.min_queue_offset, each.max_queue_offset) for each in listed.queues
    }
    assert found == {0: (0, 2), 1: (0, 1)}


def test_topic_list_shows_an_older_broker(older: Handle) -> None:
    done = cli_process.run("topic", "list", "--name-server", older.address)
    assert done.returncode == 0, done.stderr
    assert b"t" in done.stdout


@pytest.mark.parametrize("path", ["", " - at `$[0]`"])
@pytest.mark.parametrize(
    ("tag", "name", "release"), [(56, "ListQueues", "0.2.0"), (9_999, "command 9999", "a later")]
)
def test_unknown_command_names_the_older_side(path: str, tag: int, name: str, release: str) -> None:
    answer = Failed(BadRequest.code, f"not a command: Invalid value {tag}{path}")
    with pytest.raises(UnknownCommand, match=f"{name}, which is new in {release}.*older"):
        frames.raise_if_failed(answer)


def test_other_bad_requests_are_left_alone() -> None:
    text = "not a command: Invalid value 178 - at `$[1][0]`"
    with pytest.raises(BadRequest, match="Invalid value 178") as raised:
        frames.raise_if_failed(Failed(BadRequest.code, text))
    assert type(raised.value) is BadRequest
