"""As many topics as a broker may have: told in pages, and a change costs what has changed."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from coordinator_child import (
    ANYWHERE,
    INSIDE,
    FakeCommitlog,
    Settings,
    address_of,
    endpoints_at,
    ledger_of,
    running,
)
from patience import patient

from cometmq import Broker
from cometmq.actors.coordination.coordinator import CoordinatorActor
from cometmq.actors.coordination.namesrv import NameServerActor
from cometmq.actors.tables import topics as topic_book
from cometmq.actors.tables.topics import TopicBook
from cometmq.client import Admin
from cometmq.protocol.commands import (
    ChangeMode,
    CreateTopic,
    CreateTopics,
    DeleteTopic,
    Done,
    EndpointsChanged,
    EnsureTopic,
    Finish,
    GetRoute,
    GetStatistics,
    ListTopics,
    Statistics,
    TopicInfo,
    TopicList,
    TopicRoute,
    TopicsCreated,
    TopicsKnown,
)
from cometmq.protocol.configs import TopicConfig
from cometmq.protocol.errors import (
    BadRequest,
    DiskFull,
    ServiceNotAvailable,
    TooManyTopics,
    TopicExists,
    TopicNotExist,
)
from cometmq.protocol.ledger import Change, TopicPut, TopicRemoved
from cometmq.protocol.topics import TopicMirror, fetch_topics
from cometmq.protocol.wire.remote import RemoteRef
from cometmq.shm.state.config_files import ConfigFile
from cometmq.shm.state.json_text import dumps
from cometmq.shm.state.tables import TopicTable


def store_with_topics(store: Path, count: int, width: int = 120) -> list[str]:
    """A store as an earlier run has left it, with topics whose names are that long."""
    names = [f"{number:0{width}d}" for number in range(count)]
    store.mkdir(parents=True, exist_ok=True)
    table = {
        name: TopicConfig(topic_name=name, read_queue_nums=2, write_queue_nums=2) for name in names
    }
    ConfigFile(store / "config" / "topics.json", TopicTable).store(
        TopicTable(topic_config_table=table), durable=False
    )
    return names


def test_a_store_with_more_topics_than_fit_into_a_message_starts(tmp_path: Path) -> None:
    names = store_with_topics(tmp_path / "store", 10_000)
    with Broker(tmp_path / "store") as broker:
        with broker.producer() as producer:
            producer.send(names[-1], b"x")
            producer.send("one-more", b"x")
        with Admin(broker.name_server) as admin:
            assert set(admin.topics()) >= {*names, "one-more"}
            assert admin.describe_topic(names[-1]).message_count == 1


# --- the coordinator, with a commitlog process that notes what it is told ---


@contextmanager
def coordinating(
    store: Path, settings: Settings | None = None, **options: Any
) -> Iterator[tuple[RemoteRef, FakeCommitlog]]:
    with running(reference := FakeCommitlog.start()):
        actor = CoordinatorActor.start(
            settings or Settings(),
            store,
            commitlog_endpoint=address_of(reference),
            ledger_log=ledger_of(address_of(reference)),
            name_server_endpoints=options.pop("name_servers", []),
            confirm_timeout_s=patient(30),
            bind=INSIDE,
            **options,
        )
        with running(actor) as line:
            line.ask(EndpointsChanged(endpoints_at(address_of(actor))))
            commitlog = reference._actor_weakref()
            assert isinstance(commitlog, FakeCommitlog)
            yield line, commitlog


def statistic(line: RemoteRef, name: str) -> Any:
    answer = line.ask(GetStatistics())
    assert isinstance(answer, Statistics)
    return answer.values[name]


def all_topics(line: RemoteRef) -> dict[str, TopicInfo]:
    def ask(question: ListTopics) -> TopicList:
        answer = line.ask(question)
        assert isinstance(answer, TopicList)
        return answer

    return fetch_topics(ask).topics


def test_one_topic_more_costs_one_short_page(tmp_path: Path) -> None:
    names = store_with_topics(tmp_path, 10_000)
    with coordinating(tmp_path) as (line, commitlog):
        line.ask(EnsureTopic(names[-1]))  # which is told last
        told = len(commitlog.pages)
        line.ask(EnsureTopic("one-more"))
        pages = commitlog.pages[told:]
        assert [[info.topic for info in page.topics] for page in pages] == [["one-more"]]
        assert {info.topic for info in commitlog.told[-1]} == {*names, "one-more", "TBW102"}
        line.ask(DeleteTopic(names[3]))
        assert [page.removed for page in commitlog.pages[told + 1 :]] == [[names[3]]]
        assert names[3] not in {info.topic for info in commitlog.told[-1]}


def test_who_has_forgotten_everything_is_told_from_the_beginning(tmp_path: Path) -> None:
    names = store_with_topics(tmp_path, 5_000)
    with coordinating(tmp_path) as (line, commitlog):
        line.ask(EnsureTopic(names[0]))
        commitlog.forget()
        line.ask(EnsureTopic("one-more"))
        assert {info.topic for info in commitlog.told[-1]} == {*names, "one-more", "TBW102"}


def test_a_list_in_one_answer_is_whole_or_refused(tmp_path: Path) -> None:
    names = store_with_topics(tmp_path, 5_000)
    with coordinating(tmp_path) as (line, _):
        with pytest.raises(BadRequest, match="5001 topics do not fit into one answer"):
            line.ask(ListTopics())
        assert set(all_topics(line)) == {*names, "TBW102"}


def test_many_at_once_are_one_entry(tmp_path: Path) -> None:
    with coordinating(tmp_path) as (line, _):
        before = statistic(line, "ledger_entries")
        infos = [TopicInfo(f"t{number}", 1, 1) for number in range(2_000)]
        answer = line.ask(CreateTopics([*infos, TopicInfo("a b"), TopicInfo("x", 0, 1)]))
        assert isinstance(answer, TopicsCreated)
        assert [each.topic for each in answer.refused] == ["a b", "x"]
        assert answer.refused_count == 2
        assert statistic(line, "ledger_entries") == before + 1
        assert line.ask(CreateTopics(infos)) == TopicsCreated([], 0)  # they are there
        assert statistic(line, "ledger_entries") == before + 1
        changed = line.ask(CreateTopics([TopicInfo("t7", 2, 2)]))
        assert isinstance(changed, TopicsCreated)
        assert changed.refused[0].code == TopicExists.code
        assert line.ask(Finish()) == Done()
    with coordinating(tmp_path) as (line, _):
        assert set(all_topics(line)) == {info.topic for info in infos} | {"TBW102"}


def test_the_file_is_the_one_that_rocketmq_would_have(tmp_path: Path) -> None:
    """Its text is put together of the topics' texts; it must be what the table gives."""
    with coordinating(tmp_path) as (line, _):
        for name, queues in (("a", 1), ("b", 2), ("c", 3)):
            line.ask(CreateTopic(TopicInfo(name, queues, queues)))
        line.ask(DeleteTopic("a"))
        line.ask(CreateTopic(TopicInfo("b", 5, 4, 4), ChangeMode.UPDATE))
        assert line.ask(Finish()) == Done()
    path = tmp_path / "config" / "topics.json"
    table = ConfigFile(path, TopicTable).load()
    assert table is not None
    assert set(table.topic_config_table) == {"b", "c", "TBW102"}
    assert path.read_text() == dumps(table)


def test_no_more_than_max_topics(tmp_path: Path) -> None:
    store_with_topics(tmp_path / "old", 5)
    with coordinating(tmp_path / "old", Settings(max_topics=3)) as (line, _):
        assert len(all_topics(line)) == 6  # an old store has what it has
        with pytest.raises(TooManyTopics, match="maxTopics"):
            line.ask(EnsureTopic("one-more"))
    (tmp_path / "new").mkdir()
    with coordinating(tmp_path / "new", Settings(max_topics=3)) as (line, _):
        for number in range(3):
            line.ask(EnsureTopic(f"t{number}"))
        for command in (EnsureTopic("t3"), CreateTopic(TopicInfo("t3"))):
            with pytest.raises(TooManyTopics, match="3 topics, as many as maxTopics allows"):
                line.ask(command)
        assert isinstance(line.ask(EnsureTopic("t0")), TopicRoute)
        line.ask(DeleteTopic("t1"))
        assert isinstance(line.ask(EnsureTopic("t3")), TopicRoute)


def test_what_cannot_be_kept_changes_nothing(tmp_path: Path) -> None:
    with coordinating(tmp_path) as (line, commitlog):
        line.ask(CreateTopic(TopicInfo("t", 2, 2)))
        commitlog.refusal = DiskFull("full")
        told = len(commitlog.pages)
        config = tmp_path / "config"
        config.write_text("in the way")
        for command in (
            EnsureTopic("new"),
            CreateTopic(TopicInfo("t", 4, 4), ChangeMode.UPDATE),
            CreateTopics([TopicInfo("new")]),
            DeleteTopic("t"),
        ):
            with pytest.raises(ServiceNotAvailable, match=r"topics\.json.* cannot be written"):
                line.ask(command)
        assert isinstance(line.ask(EnsureTopic("t")), TopicRoute)  # what is known needs no ledger
        config.unlink()
        commitlog.refusal = None
        assert all_topics(line)["t"] == TopicInfo("t", 2, 2)
        assert "new" not in all_topics(line)
        assert [page for page in commitlog.pages[told:] if page.topics or page.removed] == []
        line.ask(CreateTopic(TopicInfo("new", 3, 3)))
        assert commitlog.pages[-1].topics == [TopicInfo("new", 3, 3)]


def test_what_clients_cannot_be_told_does_not_keep_the_rest_from_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = {
        name: TopicConfig(topic_name=name, read_queue_nums=1, write_queue_nums=1)
        for name in ("good", "not good", "x" * 300)
    }
    (tmp_path / "config").mkdir()
    ConfigFile(tmp_path / "config" / "topics.json", TopicTable).store(
        TopicTable(topic_config_table=table), durable=False
    )
    with (
        running(NameServerActor.start(bind=[(ANYWHERE, False)])) as server,
        coordinating(tmp_path, name_servers=[server._channel.endpoint]) as (line, _),
    ):
        line.ask(EnsureTopic("new"))
        for name in ("good", "new"):
            assert isinstance(server.ask(GetRoute(name)), TopicRoute)
        assert set(all_topics(line)) == {"good", "new", "TBW102"}
        assert line.ask(Finish()) == Done()
    assert "2 topics are not served" in caplog.text
    kept = ConfigFile(tmp_path / "config" / "topics.json", TopicTable).load()
    assert kept is not None
    assert set(kept.topic_config_table) == {"good", "not good", "x" * 300, "new", "TBW102"}


# --- the name server ---


def wait_free(endpoint: str) -> None:
    """Until ZeroMQ's thread has come to close what listened there."""
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    deadline = time.monotonic() + patient(60)
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ does
            try:
                probe.bind((host, int(port)))
                return
            except OSError:
                assert time.monotonic() < deadline, f"{endpoint} is still in use"
        time.sleep(0.01)


def test_a_name_server_that_starts_anew_learns_all_topics(tmp_path: Path) -> None:
    names = store_with_topics(tmp_path, 5_000)
    first = NameServerActor.start(bind=[(ANYWHERE, False)])
    with running(first) as server:
        endpoint = server._channel.endpoint
        with coordinating(tmp_path, name_servers=[endpoint]) as (line, _):
            assert isinstance(server.ask(GetRoute(names[-1])), TopicRoute)
            first.stop()
            wait_free(endpoint)
            with running(NameServerActor.start(bind=[(endpoint, False)])) as again:
                line.ask(CreateTopic(TopicInfo("one-more")))
                for name in (names[0], names[-1], "one-more"):
                    assert isinstance(again.ask(GetRoute(name)), TopicRoute)
                line.ask(DeleteTopic(names[0]))
                with pytest.raises(TopicNotExist):
                    again.ask(GetRoute(names[0]))


def test_a_broker_that_starts_anew_replaces_its_topics_at_once() -> None:
    """While the pages of its next life come, the topics of the one before are served."""
    mirror = TopicMirror()
    old, new = TopicInfo("old", 1, 1), TopicInfo("new", 2, 2)
    assert mirror.take(TopicList([old], run=1, since=0, version=1)) == {"old"}
    page = TopicList([new], run=2, since=0, version=1, complete=False)
    assert mirror.take(page) == set()
    assert (mirror.topics, mirror.known) == ({"old": old}, TopicsKnown(2, 1))
    last = TopicList([TopicInfo("more")], run=2, since=1, version=2)
    assert mirror.take(last) == {"old", "new", "more"}
    assert set(mirror.topics) == {"new", "more"}


def test_a_page_after_a_gap_is_not_taken() -> None:
    mirror = TopicMirror()
    mirror.take(TopicList([TopicInfo("a")], run=1, since=0, version=1))
    for page in (
        TopicList([TopicInfo("b")], run=1, since=2, version=3),  # after a gap
        TopicList([TopicInfo("b")], run=2, since=1, version=2),  # of another life
    ):
        assert mirror.take(page) == set()
        assert mirror.known == TopicsKnown(1, 1)
    mirror.take(TopicList([TopicInfo("b")], run=1, since=1, version=2))
    overtaken = TopicList([TopicInfo("b", 9, 9)], run=1, since=1, version=1)
    assert mirror.take(overtaken) == set()
    assert mirror.topics["b"] == TopicInfo("b")


def started(configs: dict[str, TopicConfig]) -> TopicBook:
    book = TopicBook(configs, 1_000, time.time_ns())
    book.begin(None)
    return book


def change(book: TopicBook, wanted: Change, *, kept: bool) -> None:
    """Make it; nobody is told of it before it is kept, or after it is taken back."""
    version, undo = book.version, book.apply(wanted)
    told = book.page(book.run, version)
    assert (told.topics, told.removed) == ([], [])
    if kept:
        book.kept([wanted])
        assert book.version == version + 1
    else:
        book.undo(undo)
        assert book.version == version


@pytest.mark.parametrize("seed", range(20))
def test_any_losses_end_in_the_same_topics(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Changes, restarts of who is told and of who tells, pages that are lost or come twice."""
    monkeypatch.setattr(topic_book, "PAGE_BYTES", 1_000)  # seven topics
    monkeypatch.setattr(topic_book, "TOMBSTONES_MAX", 5)
    chance = random.Random(seed)
    what = ("put", "put", "remove", "tell", "tell", "tell", "twice", "forget", "restart")
    configs: dict[str, TopicConfig] = {}
    book = started(configs)
    mirror = TopicMirror()
    for _ in range(300):
        name = f"t{chance.randrange(40):03d}" + "x" * 100
        match chance.choice(what):
            case "put":
                config = TopicConfig(topic_name=name, read_queue_nums=chance.randrange(1, 9))
                change(book, TopicPut(config), kept=chance.random() < 0.8)
            case "remove" if name in book:
                change(book, TopicRemoved(name), kept=chance.random() < 0.8)
            case "tell":
                mirror.take(book.page(mirror.known.run, mirror.known.version))
            case "twice":
                page = book.page(mirror.known.run, mirror.known.version)
                mirror.take(page)
                mirror.take(page)
            case "forget":
                mirror = TopicMirror()
            case "restart":
                book = started(configs)
    complete = False
    while not complete:
        page = book.page(mirror.known.run, mirror.known.version)
        mirror.take(page)
        complete = page.complete and mirror.known == TopicsKnown(book.run, book.version)
    assert {name: info.read_queues for name, info in mirror.topics.items()} == {
        name: config.read_queue_nums for name, config in configs.items()
    }, f"seed {seed}"
