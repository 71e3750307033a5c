"""The text of the files in config/, piece by piece: there may be a million offsets in one, and what
it is made of goes on changing meanwhile. Joined it is what `dumps` has for such a table."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Protocol

from cometmq.protocol.configs import TopicConfig
from cometmq.shm.kernel.codec import indexed_pairs, integer_pairs
from cometmq.shm.state.json_text import dumps, entry_text
from cometmq.shm.state.tables import DataVersion, SubscriptionGroupTable, Table, TopicTable


class Offsets(Protocol):
    """Queue offsets by queue id; see actors/tables/queue_offsets.py."""

    near: array[int]
    far: dict[int, int]


def table_pieces(table: Table, key: str, entries: Iterable[tuple[str, object]]) -> Iterator[str]:
    """A table of which one map is made of these entries.

    Args:
        table: in which that map is empty.
        key: of it.
    """
    before, _, after = dumps(table).partition(f'"{key}":{{}}')
    yield f'{before}"{key}":{{'
    lead = ""
    for name, value in entries:
        yield lead + entry_text(name, value, 2)
        lead = ","
    yield ("\n\t}" if lead else "}") + after


def topics_pieces(
    data_version: DataVersion, topics: Iterable[tuple[str, TopicConfig]]
) -> Iterator[str]:
    """topics.json."""
    return table_pieces(TopicTable(data_version=data_version), "topicConfigTable", topics)


def groups_pieces(
    table: SubscriptionGroupTable, groups: Iterable[tuple[str, object]]
) -> Iterator[str]:
    """subscriptionGroup.json, of a table without groups."""
    return table_pieces(table, "subscriptionGroupTable", groups)


def member_pieces(
    highest: int,
    groups: Iterable[tuple[str, object]],
    subscribed: Iterable[tuple[str, list[str]]],
) -> Iterator[str]:
    """consumerMembers.json."""
    for key, entries in (("groups", groups), ("subscribed", subscribed)):
        yield f'{"{" if key == "groups" else ""}\n\t"{key}":{{'
        lead = ""
        for name, value in entries:
            yield lead + entry_text(name, value, 2)
            lead = ","
        yield "\n\t}," if lead else "},"
    yield f'\n\t"highest":{highest}\n}}'


def filters_pieces(
    by_topic: Iterable[tuple[str, Iterable[tuple[str, object]]]],
) -> Iterator[str]:
    """consumerFilter.json, of the filters of each topic by group; there is one at least."""
    yield '{\n\t"filterDataByTopic":{'
    lead = ""
    for topic, filters in by_topic:
        yield f'{lead}\n\t\t{dumps(topic)}:{{\n\t\t\t"groupFilterData":{{'
        lead = ""
        for group, value in filters:
            yield lead + entry_text(group, value, 4)
            lead = ","
        yield f'\n\t\t\t}},\n\t\t\t"topic":{dumps(topic)}\n\t\t}}'
        lead = ","
    yield "\n\t}\n}" if lead else "}\n}"


def offsets_pieces(
    data_version: DataVersion,
    topics_of: Iterable[tuple[str, Iterable[str]]],
    offsets: Iterable[tuple[str, Offsets]],
) -> Iterator[str]:
    """consumerOffset.json. A key without offsets is left out, and groups stand in their order here:
    RocketMQ reads neither.

    Args:
        topics_of: the topics of each group.
        offsets: queue offsets by queue, of each `topic@group`.
    """
    head = dumps(Table(data_version=data_version))
    yield head.removesuffix("\n}") + ',\n\t"groupTopicMap":{'
    lead = "\n\t\t"
    for group, topics in topics_of:
        yield f"{lead}{dumps(group)}:[{','.join(map(dumps, topics))}]"
        lead = ",\n\t\t"
    yield '},\n\t"offsetTable":{' if lead[0] == "\n" else '\n\t},\n\t"offsetTable":{'
    lead = "\n\t\t"
    for key, queues in offsets:
        if queues:
            pairs = [indexed_pairs(queues.near), integer_pairs(queues.far)]
            yield f"{lead}{dumps(key)}:{{{','.join(filter(None, pairs))}\n\t\t}}"
            lead = ",\n\t\t"
    yield "}\n}" if lead[0] == "\n" else "\n\t}\n}"
