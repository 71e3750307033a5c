"""The command line against a broker that it started itself, through pipes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import (
    COMMAND,
    TIMEOUT_S,
    ServerProcess,
    environment,
    interrupt,
    json_of,
    output_of,
    run,
    serving,
    start,
)
from ports import free_ports
from shared_data import data_path

from cometmq.client import Admin, Consumer

VARIABLE = "COMETMQ_NAME_SERVER"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    store = tmp_path_factory.mktemp("cli") / "store"
    with serving("broker", "--port", "0", "--store", str(store)) as server:
        yield server
        code, said = server.stop()
        assert code == 0, said
        assert "finished in order" in said
        assert not (store / "abort").exists()


@pytest.fixture
def at(broker: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Where the broker is, as the environment says it."""
    return {VARIABLE: broker.name_server}


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["HDFS", "OpenSSH", "Zookeeper"])
def test_a_log_goes_through_byte_for_byte(name: str, at: dict[str, str]) -> None:
    data = data_path("loghub", f"{name}.log").read_bytes()
    lines = data.rstrip(b"\n").count(b"\n") + 1
    counts = json_of("msg", "send", "-t", name, input=data, **at)
    assert (counts["sent"], counts["acknowledged"], counts["unconfirmed"]) == (lines, lines, 0)
    printed = output_of("msg", "tail", "-t", name, "--until-end", **at)
    assert printed.rstrip(b"\n") == data.rstrip(b"\n")


def test_tags_and_keys_out_of_each_line(at: dict[str, str]) -> None:
    log = data_path("loghub", "HDFS.log")
    fields = ("--tags-from", "5", "--keys-from", r"(blk_-?\d+)", "-p", "day=monday")
    one_queue = ("--queue", "0")  # there is no order among several
    output_of("msg", "send", "-t", "Tagged", *fields, *one_queue, str(log), **at)
    tag = "dfs.FSNamesystem"
    tail = ("msg", "tail", "-t", "Tagged", "--tags", tag, "--until-end")
    got = output_of(*tail, "-f", r"%g|%k|%h|%s\n", **at).splitlines()
    wanted = [
        line for line in log.read_bytes().splitlines() if line.split()[4] == b"dfs.FSNamesystem:"
    ]
    key = re.compile(rb"blk_-?\d+")
    for row, line in zip(got, wanted, strict=True):
        found = key.search(line)
        assert found is not None
        assert row.split(b"|", 3)[:3] == [tag.encode(), found[0], b"day=monday"]
        assert row.split(b"|", 3)[3].rstrip(b"\r") == line


@pytest.mark.parametrize(
    ("pattern", "line", "tag"),
    [
        (r"\[(\w+)\]", "order [支付] done".encode(), "支付"),
        (r"(\w+)$", "naïve café".encode(), "café"),
        (r"(?i)ÄRGER", "großer ärger".encode(), "ärger"),
        (r"\[(.)\]", "[é]".encode(), "é"),
        (r"level=(\w+)", b"\xff\xfe level=warn \xe9", "warn"),
        (r"level=(\S+)", b"level=caf\xe9 x", "caf\ufffd"),
        (r"\d+", "zahl ١٢ 7".encode(), "١٢"),
    ],
)
def test_patterns_are_text(pattern: str, line: bytes, tag: str, at: dict[str, str]) -> None:
    """Fault 31: patterns match text of any script; a line that is not UTF-8 is sent unchanged."""
    topic = f"Text{zlib.crc32(pattern.encode() + line)}"
    options = ("--tags-from", pattern, "--keys-from", pattern, "-k", pattern)
    output_of("msg", "send", "-t", topic, *options, input=line + b"\n", **at)
    got = output_of("msg", "tail", "-t", topic, "--until-end", "-f", r"%g|%k|%s\n", **at)
    assert got == f"{tag}|{tag}|".encode() + line + b"\n"


def test_key_with_a_space_out_of_a_line_is_refused(at: dict[str, str]) -> None:
    """Fault 31: a key with a space is refused: it would be stored as two keys."""
    lines = b"user=ann.\nuser=john smith.\nuser=zoe.\n"
    send = ("msg", "send", "-t", "Spaced", "--queue", "0", "--keys-from", r"user=(.+)\.")
    done = run(*send, "-o", "json", input=lines, **at)
    assert done.returncode == 1
    report = json.loads(done.stdout)
    names = "sent", "acknowledged", "refused", "unconfirmed"
    assert [report[name] for name in names] == [2, 1, 1, 0]
    assert b"'john smith'" in done.stderr
    assert b"has a space, which separates keys" in done.stderr


def test_property_without_a_value_is_refused(at: dict[str, str]) -> None:
    """Fault 31: a property without a value is refused; it would be omitted silently."""
    done = run("msg", "send", "-t", "Empty", "-p", "day=", input=b"x\n", **at)
    assert (done.returncode, b"cannot have an empty value" in done.stderr) == (2, True)


@pytest.mark.parametrize("tags", ["a", "b", "a || b", "c"])
def test_until_end_with_tags_that_are_not_the_last(tags: str, at: dict[str, str]) -> None:
    topic = "Tags" + tags.replace(" ", "").replace("|", "_")
    lines = b"a 1\na 2\nb 3\nx 4\n"
    output_of("msg", "send", "-t", topic, "--queue", "0", "--tags-from", "1", input=lines, **at)
    printed = output_of("msg", "tail", "-t", topic, "--tags", tags, "--until-end", **at)
    wanted = [line for line in lines.split(b"\n") if line[:1] in tags.encode().split(b" || ")]
    assert printed.split(b"\n")[:-1] == [line for line in wanted if line]


def test_lines_of_one_key_keep_their_order(at: dict[str, str]) -> None:
    lines = b"".join(b"%d n%d\n" % (number % 7, number) for number in range(700))
    output_of("msg", "send", "-t", "Sharded", "-k", "1", input=lines, **at)
    printed = output_of("msg", "tail", "-t", "Sharded", "--until-end", **at).split(b"\n")[:-1]
    for key in b"0123456":
        mine = [line for line in printed if line[0] == key]
        assert mine == [line for line in lines.splitlines() if line[0] == key]


def test_one_queue_count_and_receipts(at: dict[str, str]) -> None:
    send = ("msg", "send", "-t", "Single", "--queue", "2", "--count", "3", "--receipts")
    out = output_of(*send, "-o", "json", input=b"a\n\nb\nc\nd\n", **at)
    *receipts, counts = [json.loads(line) for line in out.splitlines()]
    assert [(each["queue_id"], each["queue_offset"]) for each in receipts] == [
        (2, 0), (2, 1), (2, 2),
    ]  # fmt: skip
    assert (counts["sent"], counts["acknowledged"], counts["skipped_empty"]) == (3, 3, 1)
    tail = ("msg", "tail", "-t", "Single", "-n", "2", "--from", "1")
    shown = [json.loads(line) for line in output_of(*tail, "-o", "json", **at).splitlines()]
    assert [each["body"] for each in shown] == ["b", "c"]
    assert [each["msg_id"] for each in shown] == [each["msg_id"] for each in receipts[1:]]
    assert output_of(*tail[:-2], "--from", "-2", "-f", "%s", **at) == b"bc"


def test_get(at: dict[str, str]) -> None:
    output_of("msg", "send", "-t", "Get", "--tags", "a", input=b"hello\n", **at)
    message_id = output_of("msg", "tail", "-t", "Get", "-n", "1", "-f", "%I", **at).decode()
    assert json_of("msg", "get", message_id, **at)["body"] == "hello"
    assert output_of("msg", "get", message_id, "-f", r"%g %s\n", **at) == b"a hello\n"
    missing = run("msg", "get", message_id[:-2] + "01", **at)
    assert missing.returncode == 1
    assert b"no broker has a message" in missing.stderr or b"no record" in missing.stderr


def test_tail_follows_and_ends_with_ctrl_c(at: dict[str, str]) -> None:
    output_of("msg", "send", "-t", "Follow", input=b"before\n", **at)
    tail = start("msg", "tail", "-t", "Follow", **at)
    with tail:
        assert tail.stdout is not None
        assert tail.stdout.readline() == b"before\n"
        output_of("msg", "send", "-t", "Follow", input=b"after\n", **at)
        assert tail.stdout.readline() == b"after\n"
        code, out, err = interrupt(tail)
    assert (code, out, err.strip()) == (130, b"", b"2 messages")


def test_tail_ends_quietly_when_nobody_reads_on(at: dict[str, str]) -> None:
    output_of("msg", "send", "-t", "Pipe", input=b"line\n" * 100_000, **at)
    tail = start("msg", "tail", "-t", "Pipe", **at)
    with tail:
        assert tail.stdout is not None
        assert tail.stderr is not None
        tail.stdout.readline()
        tail.stdout.close()
        assert tail.stderr.read() == b""
        assert tail.wait(TIMEOUT_S) == 141


def test_tail_of_a_topic_that_is_not_there(at: dict[str, str]) -> None:
    done = run("msg", "tail", "-t", "Nowhere", **at)
    assert done.returncode == 1
    assert done.stderr.startswith(b"Error: topic Nowhere: ")
    assert "Nowhere" not in {each["topic"] for each in json_of("topic", "list", "--all", **at)}


def test_send_ends_with_ctrl_c_and_counts(at: dict[str, str]) -> None:
    tail = start("msg", "tail", "-t", "Slowly", "-n", "2", "-g", "slow", **at)
    send = start("msg", "send", "-t", "Slowly", "-o", "json", **at)
    tail.kill()
    tail.communicate()
    with send:
        assert send.stdin is not None
        send.stdin.write(b"one\ntwo\nthr")
        send.stdin.flush()
        json_lines = output_of("msg", "tail", "-t", wait_for_topic("Slowly", at), "-n", "2", **at)
        assert json_lines == b"one\ntwo\n"
        code, out, _ = interrupt(send)
    assert code == 130
    assert json.loads(out)["acknowledged"] == 2


def wait_for_topic(topic: str, at: dict[str, str]) -> str:
    """Until the topic has been created by somebody else."""
    while topic not in {each["topic"] for each in json_of("topic", "list", **at)}:
        pass
    return topic


# --- topics and groups ----------------------------------------------------------------------------


def test_topics(broker: ServerProcess, at: dict[str, str]) -> None:
    output_of("topic", "create", "Made", "--queues", "3", **at)
    described = json_of("topic", "describe", "Made", **at)
    assert len(described["queues"]) == described["read_queues"] == 3
    listed = output_of("topic", "list", **at).decode().splitlines()
    assert listed[0] == "topic\tread_queues\twrite_queues\tmessages\tbrokers"
    assert f"Made\t3\t3\t0\t{broker.ready['broker']}" in listed
    output_of("topic", "delete", "Made", "--yes", **at)
    assert run("topic", "describe", "Made", **at).returncode == 1


def test_groups(at: dict[str, str]) -> None:
    output_of("msg", "send", "-t", "Grouped", "--queue", "0", input=b"1\n2\n3\n4\n5\n", **at)
    assert output_of("msg", "tail", "-t", "Grouped", "-g", "g", "-n", "3", **at) == b"1\n2\n3\n"
    described = json_of("group", "describe", "g", **at)
    assert (described["lag"], described["members"]) == (2, [])
    assert {"group": "g", "members": 0, "lag": 2, "topics": ["Grouped"]} in json_of(
        "group", "list", **at
    )
    moved = json_of("group", "reset", "g", "-t", "Grouped", "--to", "1", "--queue", "0", **at)
    assert [each["queue_offset"] for each in moved] == [1]
    assert output_of("msg", "tail", "-t", "Grouped", "-g", "g", "-n", "2", **at) == b"2\n3\n"
    output_of("group", "reset", "g", "-t", "Grouped", "--to", "latest", **at)
    assert json_of("group", "describe", "g", **at)["lag"] == 0


def test_a_running_consumer_goes_on_where_the_group_is_reset_to(at: dict[str, str]) -> None:
    output_of("msg", "send", "-t", "Again", "--queue", "0", input=b"1\n2\n", **at)
    tail = start("msg", "tail", "-t", "Again", "-g", "again", **at)
    with tail:
        assert tail.stdout is not None
        assert [tail.stdout.readline() for _ in range(2)] == [b"1\n", b"2\n"]
        for more in ((), ("--force",)):  # as scripts of before have it
            output_of("group", "reset", "again", "-t", "Again", "--to", "earliest", *more, **at)
            assert [tail.stdout.readline() for _ in range(2)] == [b"1\n", b"2\n"]
        interrupt(tail)


def test_a_group_is_shifted(broker: ServerProcess, at: dict[str, str]) -> None:
    name = broker.ready["broker"]
    output_of("msg", "send", "-t", "Shifted", "--queue", "0", input=b"1\n2\n3\n4\n", **at)
    reset = ("group", "reset", "shifted", "-t", "Shifted", "--queue", "0")
    output_of(*reset, "--to", "latest", **at)
    head = "broker\ttopic\tqueue_id\tbefore\tqueue_offset\n"
    assert output_of(*reset, "--by=-3", **at).decode() == f"{head}{name}\tShifted\t0\t4\t1\n"
    done = run(*reset, "--by=-3", **at)
    assert done.stdout.decode() == f"{head}{name}\tShifted\t0\t1\t0\n"
    said = f"queue 0 of Shifted on {name} has no offset -2: 0 is taken"
    assert said in done.stderr.decode()
    refused = run(*reset, "--to", "9", **at)
    assert refused.returncode == 1
    assert "queue offset 9: queue 0 of Shifted on broker " in refused.stderr.decode()
    assert " has 0 to 4" in refused.stderr.decode()
    clamped = run(*reset, "--to", "9", "--clamp", **at)
    assert clamped.stdout.decode().endswith(f"{name}\tShifted\t0\t4\n")
    assert "has no offset 9: 4 is taken" in clamped.stderr.decode()
    for wrong in ((), ("--to", "latest", "--by", "1")):
        assert b"either a place (--to), or by how many" in run(*reset, *wrong, **at).stderr


def test_group_settings(at: dict[str, str]) -> None:
    made = run("group", "create", "made", "--set", "retryMaxTimes=3", **at)
    assert made.stderr == b"group made: created\n"
    again = run("group", "create", "made", **at)
    assert again.returncode == 1
    assert again.stderr.decode() == (
        "Error: group made exists: retryMaxTimes 3, not 16; nothing was changed (to change it: "
        "group update)\n"
    )
    policy = '{"type": "EXPONENTIAL"}'
    changed = run("group", "update", "made", "--set", f"groupRetryPolicy={policy}", **at)
    assert changed.stderr == b"group made: changed\n"
    assert json_of("group", "describe", "made", **at)["settings"] == {
        "consumeEnable": True,
        "consumeBroadcastEnable": True,
        "consumeMessageOrderly": False,
        "brokerId": 0,
        "whichBrokerWhenConsumeSlowly": 1,
        "retryQueueNums": 1,
        "retryMaxTimes": 3,
        "groupRetryPolicy": {
            "type": "EXPONENTIAL",
            "exponentialRetryPolicy": {"initial": 5_000, "max": 7_200_000, "multiplier": 2},
        },
        "consumeTimeoutMinute": 15,
        "notifyConsumerIdsChangedEnable": True,
        "attributes": {},
        "sameSubscriptions": False,
    }
    for pair, said in (
        ("retryMaxTime=3", "a group has no setting 'retryMaxTime'; is retryMaxTimes meant?"),
        ("consumeEnable=no", "consumeEnable = '\"no\"': Expected `bool`, got `str`"),
        ("consumeEnable", "'consumeEnable': KEY=VALUE"),
    ):
        refused = run("group", "update", "made", "--set", pair, **at)
        assert refused.returncode in (1, 2)
        assert said in refused.stderr.decode()
    assert b"nothing is to be changed" in run("group", "update", "made", **at).stderr


@pytest.mark.slow
def test_groups_are_cloned_and_deleted(at: dict[str, str]) -> None:
    output_of("msg", "send", "-t", "Cloned", "--queue", "0", input=b"1\n2\n", **at)
    output_of("group", "reset", "one", "-t", "Cloned", "--to", "1", "--queue", "0", **at)
    done = run("group", "clone", "one", "two", **at)
    assert done.stderr == b"group two: 1 queues are where those of one are\n"
    assert output_of("msg", "tail", "-t", "Cloned", "-g", "two", "-n", "1", **at) == b"2\n"
    tail = start("msg", "tail", "-t", "Cloned", "-g", "one", **at)
    with tail:
        assert tail.stdout is not None
        assert tail.stdout.readline() == b"2\n"
        refused = run("group", "delete", "one", "--yes", **at)
        assert refused.returncode == 1
        assert b"group one has members: " in refused.stderr
        assert b"(--force)" in refused.stderr
        assert b"(--force)" in run("group", "clone", "two", "one", **at).stderr
        interrupt(tail)
    assert run("group", "delete", "one", "--yes", **at).stderr == b"group one: deleted\n"
    gone = run("group", "delete", "one", "--yes", **at)
    assert gone.stderr == b"Error: group one is unknown to this broker\n"
    assert run("group", "describe", "one", **at).returncode == 1


def test_differing_tags_are_told(broker: ServerProcess, at: dict[str, str]) -> None:
    server = broker.ready["name_server"]
    output_of("msg", "send", "-t", "Unlike", "--tags", "a", input=b"1\n", **at)
    first = start("msg", "tail", "-t", "Unlike", "-g", "unlike", "--tags", "a", **at)
    with first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"1\n"
        with (
            Admin(server) as admin,
            Consumer(server, "unlike", "Unlike", tags="b", member="other") as consumer,
        ):
            while len(admin.describe_group("unlike").members) < 2:
                consumer.poll(1, 0.05)
            described = run("group", "describe", "unlike", **at)
        interrupt(first)
    assert b"subscribes to b of Unlike; most do to a\n" in described.stderr


# --- a running broker -----------------------------------------------------------------------------


def test_stat(broker: ServerProcess, at: dict[str, str]) -> None:
    output_of("msg", "send", "-t", "Stat", input=b"a\nb\n", **at)
    store = str(broker.ready["store"])
    shown = json.loads(output_of("stat", "--store", store, "--json"))
    assert shown["broker"] == broker.ready["broker"]
    assert shown["phase"] == "serving"
    assert shown["topics"]["Stat"]["messages"] == 2
    assert shown["counters"]["wrote"] <= shown["counters"]["allocated"]
    roles = {each["role"] for each in shown["processes"]}
    assert {"broker", "zygote", "commitlog", "dispatcher", "reader-0", "namesrv"} <= roles
    assert b"counters.wrote\t" in output_of("stat", "--store", store)


def test_stat_watches(broker: ServerProcess, at: dict[str, str]) -> None:
    watch = start("stat", "--store", str(broker.ready["store"]), "--json", "-w", "0.05")
    with watch:
        assert watch.stdout is not None
        before = json.loads(watch.stdout.readline())["counters"]["messages"]
        output_of("msg", "send", "-t", "Watched", input=b"a\n" * 100, **at)
        total, rated = before, 0
        while total < before + 100:
            shown = json.loads(watch.stdout.readline())
            total, rated = shown["counters"]["messages"], shown["per_second"]["messages"]
        code, _, _ = interrupt(watch)
    assert code == 130
    assert rated > 0


def test_stat_without_a_broker(tmp_path: Path) -> None:
    done = run("stat", "--store", str(tmp_path))
    assert done.returncode == 3
    assert done.stderr.startswith(f"Error: {tmp_path}: no broker is running on this".encode())
    assert b"--name-server asks" in done.stderr


def test_stat_of_a_broker_that_was_killed(tmp_path: Path) -> None:
    with serving("broker", "--port", "0", "--store", str(tmp_path / "s")) as server:
        server.process.kill()
        server.process.wait(TIMEOUT_S)
        done = run("stat", "--store", str(tmp_path / "s"))
    assert done.returncode == 3
    assert b"is gone and did not end in order" in done.stderr


def test_a_store_that_is_taken(broker: ServerProcess) -> None:
    done = run("broker", "--port", "0", "--store", str(broker.ready["store"]))
    assert done.returncode == 1
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith("Error: ")
    assert f"process {broker.ready['pid']}" in last
    assert "Traceback" not in done.stderr.decode()


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        port = str(free_ports(4))
        taken.bind(("127.0.0.1", int(port)))
        taken.listen()
        for server in ("namesrv", "broker"):
            done = run(server, "--port", port, cwd=tmp_path)
            assert done.returncode == 1
            said = done.stderr.decode()
            assert f"port {port} is taken by process {os.getpid()}" in said
            assert "choose another with --port" in said
            assert "Traceback" not in said


def test_a_queue_that_is_not_there(broker: ServerProcess) -> None:
    """To wait for it in silence would be for ever."""
    output_of("topic", "create", "three", "--queues", "3", **{VARIABLE: broker.name_server})
    asked = ("msg", "tail", "-t", "three", "--queue", "3")
    for more in ((), ("--until-end",)):
        done = run(*asked, *more, **{VARIABLE: broker.name_server})
        assert done.returncode == 2
        assert b"topic three has no queue 3, but 0 to 2" in done.stderr


@pytest.mark.slow
def test_two_brokers_need_one_option(tmp_path: Path) -> None:
    """Without any configuration, in the current folder; the second one with another port."""
    conf = tmp_path / "broker.conf"
    first, second = free_ports(4), free_ports(4)
    conf.write_text(f"brokerName = broker-a\nbrokerRole = ASYNC_MASTER\nport = {first}\nhaX = 1\n"
                    f"storePathRootDir = {tmp_path / 'a'}\n")  # fmt: skip
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(serving("broker", "-c", str(conf)))
        two = stack.enter_context(serving("broker", "--port", str(second), cwd=tmp_path))
        assert one.ready["broker"] == "broker-a"
        assert Path(two.ready["store"]) == tmp_path / f"store-{second}"
        assert (one.name_server, two.name_server) == (
            f"tcp://127.0.0.1:{first}", f"tcp://127.0.0.1:{second}",
        )  # fmt: skip
        code, said = one.stop()
    assert code == 0
    assert 'Warning: broker.conf, line 4: unknown key "haX", ignored' in said


@pytest.mark.slow
def test_a_name_server_alone(tmp_path: Path) -> None:
    with serving("namesrv", "--port", "0") as names:
        server = names.name_server.removeprefix("tcp://")
        arguments = ("--port", "0", "--name-server", server, "--store", str(tmp_path / "s"))
        with serving("broker", *arguments) as broker:
            assert broker.name_server == names.name_server
            output_of("msg", "send", "-t", "T", input=b"x\n", **{VARIABLE: server})
            assert output_of("msg", "tail", "-t", "T", "-n", "1", **{VARIABLE: server}) == b"x\n"
        assert names.stop()[0] == 0


def test_the_line_that_a_person_reads(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "broker", "--port", "0", "--store", str(tmp_path / "s")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment(),
    )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(TIMEOUT_S) == 0
    ready = re.fullmatch(
        r"broker \S+ is ready: store (\S+), name server (tcp://127\.0\.0\.1:\d+), pid (\d+); "
        r"try: echo hello \| cometmq msg send -t greetings --name-server \2\n",
        line,
    )
    assert ready is not None, line
    assert (ready[1], int(ready[3])) == (str(tmp_path / "s"), process.pid)
    assert rest == b"", "one line"
