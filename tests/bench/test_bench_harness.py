"""The benchmark harness: that it measures what it says, and notices what went wrong."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from bench_worker import FileSystem
from patience import exactly, patient

pytest.importorskip("hdrh", reason="pip install '.[bench]'")

from cometmq.bench import (
    histograms,
    plots,
    reading,
    report,
    results,
    stamps,
    systems,
    targets,
    trial,
)
from cometmq.bench.extra import BenchError, load
from cometmq.bench.omb import run as omb_run
from cometmq.bench.omb import workload as omb
from cometmq.bench.open_loop import Schedule
from cometmq.bench.own import CometMQ
from cometmq.bench.results import Line, Results
from cometmq.bench.trial import EARLY, ONE, Outcome, Plan, Trial

# --- bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [32, 33, 128, 16_385])
def test_a_body_is_told_from_all_others(size: int) -> None:
    stamper, verifier = stamps.Stamper(size, producer=3, seed=7), stamps.Verifier(seed=7)
    bodies = [stamper.body(number, 1000 + number) for number in range(50)]
    assert {len(body) for body in bodies} == {size}
    assert len(set(bodies)) == 50
    assert [verifier.add(0, body) for body in bodies] == [(1000 + n, 3, n) for n in range(50)]
    assert verifier.result(exactly(50)) == {
        "received": 50, "distinct": 50, "duplicates": 0, "out_of_order": 0, "bad_crc": 0, "lost": 0
    }  # fmt: skip


def test_the_layout_of_a_stamp() -> None:
    """Golden: workers in other languages have the same."""
    body = stamps.Stamper(40, producer=2, seed=5, payload=b"ab").body(1, 9)
    assert body.hex() == (
        "0900000000000000" "0100000000000000" "02000000" "05000000"
        f"{stamps.crc32(b'abababab').to_bytes(4, 'little').hex()}"
        f"{stamps.crc32(body[:28]).to_bytes(4, 'little').hex()}" + b"abababab".hex()
    )  # fmt: skip


@pytest.mark.parametrize("size", [32, 100])
def test_bodies_made_together_are_those_made_one_by_one(size: int) -> None:
    stamper = stamps.Stamper(size, producer=2**32 - 1, seed=7, pool=10)
    assert stamper.bodies(3, 20_003) == [stamper.body(number) for number in range(3, 20_003)]
    due = Schedule(1e5, 2**62)
    for ready in (64, 50):  # all at once, or as the run goes on
        bodies = list(stamper.stream(64, ready, due.span))
        assert bodies == [stamper.body(number, due(number)) for number in range(64)]


def test_every_bit_of_a_body_is_checked() -> None:
    body = stamps.Stamper(48, producer=0, seed=1).body(0)
    for bit in range(48 * 8):
        turned = bytearray(body)
        turned[bit // 8] ^= 1 << bit % 8
        verifier = stamps.Verifier(seed=1)
        verifier.add(0, bytes(turned))
        assert (verifier.bad_crc, verifier.distinct) == (1, 0), bit


def test_duplicates_order_and_strangers_are_counted() -> None:
    one, other = (stamps.Stamper(64, producer, seed=1) for producer in (0, 1))
    verifier = stamps.Verifier(seed=1)
    verifier.add_all("a", [one.body(0), one.body(2), one.body(1), one.body(2)])
    verifier.add_all("b", [one.body(4), one.body(5), other.body(0)])
    verifier.add("a", stamps.Stamper(64, 0, seed=2).body(9))  # of another run
    verifier.add("a", b"short")
    assert verifier.result(expect=8) == {
        "received": 9, "distinct": 6, "duplicates": 1, "out_of_order": 1, "bad_crc": 2, "lost": 2
    }  # fmt: skip


def test_bodies_that_come_again_are_expected_in_turns() -> None:
    bodies = stamps.Stamper(128, producer=0, seed=7).bodies(0, 3)
    whole, torn = (stamps.Verifier(seed=7, again=3) for _ in range(2))
    whole.add_all(0, bodies * 2 + bodies[:1])
    assert (whole.distinct, whole.out_of_order) == (7, 0)
    torn.add_all(0, [*bodies, bodies[1], *bodies[2:]])
    assert (torn.distinct, torn.out_of_order) == (5, 1)


def test_half_of_a_body_is_random() -> None:
    body = stamps.Stamper(1032, 0, 1).body(0)
    assert body[-500:] == bytes(500)
    assert len(set(body[32:532])) > 200


# --- histograms and schedule ----------------------------------------------------------------------


def test_many_values_at_once_are_the_same_as_one_by_one() -> None:
    source = random.Random(1)
    values = [int(10 ** source.uniform(0, 10.7)) for _ in range(5_000)]
    values += [1, 2047, 2048, 4095, 4096, 59_999_999_999]
    slow = histograms.new()
    for value in values:
        slow.record_value(value)
    assert histograms.of(array("q", values)).equals(slow)


def test_values_outside_count_as_the_nearest() -> None:
    assert histograms.summary(histograms.of([-5, 0, 10**12]))["count"] == 3


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    parts = [histograms.of(range(1, 5000)), histograms.of([7_000_000, 9_000_000])]
    path = histograms.write(tmp_path / "a.hlog", *parts, seconds=20)
    for one, other in zip(histograms.intervals(path), parts, strict=True):
        assert one.equals(other)
    assert histograms.read(path).get_total_count() == 5001
    starts = [float(line.split(",")[0]) for line in path.read_text().splitlines() if line[0] > "/"]
    assert starts[1] - starts[0] == pytest.approx(10, abs=0.01)


@pytest.mark.parametrize("text", ["", "#[nothing]\n", "1.0,2.0,3.0,HISTxyz\n"])
def test_a_log_that_is_none_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.hlog"
    path.write_text(text)
    with pytest.raises(BenchError, match=r"bad\.hlog"):
        histograms.read(path)


def test_the_schedule_does_not_drift() -> None:
    due = Schedule(3_000, 1_000)
    assert due(0) == 1_000
    assert due(3_000_000) == 1_000 + 1000 * 10**9
    assert all(333_333 <= due(n + 1) - due(n) <= 333_334 for n in range(1000))
    assert due.span(5, 1000).tolist() == [due(n) for n in range(5, 1000)]
    assert [due.due(at) for at in (0, 999, 1_000, 334_332, 334_334, 1_000 + 10**9)] == [
        0, 0, 1, 1, 2, 3001
    ]  # fmt: skip


def test_warm_up_ends_when_three_windows_are_alike() -> None:
    assert not trial.is_stable([100, 100])
    assert not trial.is_stable([90, 100, 100])
    assert trial.is_stable([50, 98, 100, 99])


def test_the_clock_stands_only_before_the_last_message() -> None:
    """What is checked behind it is in no time that a stop could be taken from."""
    bodies = stamps.Stamper(128, 0, seed=1).bodies(0, 60)
    source: Any = SimpleNamespace(split=lambda messages: [(0, body) for body in messages])
    given: dict[str, Any] = {"size": 128, "inline": False, "skip": 0, "expect": 60}
    found = reading.Reading(source, stamps.Verifier(1), **given)
    found._held_max = 20
    for turn in range(3):
        found.take(bodies[20 * turn :][:20], turn)
    assert found.verifier.result(exactly(60))["lost"] == 0
    assert 0 < found.last_paused_ns < found.paused_ns


# --- runs -----------------------------------------------------------------------------------------


def run(tmp_path: Path, **plan: Any) -> Outcome:
    return Trial(FileSystem(tmp_path), Plan(**plan), tmp_path / "logs").run()


@pytest.mark.parametrize("mode", ["async", "batch", "one_in_flight"])
def test_a_good_run_has_no_faults(tmp_path: Path, mode: str) -> None:
    outcome = run(tmp_path, mode=mode, messages=100, warmup=20, batch=50)
    assert outcome.faults == []
    assert (outcome.delivered, outcome.total) == (120, 120)
    assert outcome.rate > 0


def test_an_open_loop_has_its_rate_and_three_latencies(tmp_path: Path) -> None:
    outcome = run(tmp_path, rate=2_000, messages=600, warmup=100, reading=EARLY)
    assert outcome.faults == []
    assert outcome.rate == pytest.approx(2_000, rel=0.3)
    for kind in ("service", "response", "end_to_end"):
        histogram = outcome.histogram(kind)
        assert histogram is not None, kind
        assert histogram.get_total_count() == 600, kind


@pytest.mark.parametrize(
    ("fault", "told"),
    [("lose", "1 lost"), ("reorder", "out of order"), ("damage", "damaged")],
)
@pytest.mark.slow
def test_a_system_that_does_harm_is_caught(
    tmp_path: Path, fault: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "IDLE_S", 0.5)
    outcome = run(tmp_path, messages=50, options={"fault": fault})
    assert any(told in each for each in outcome.faults), outcome.faults


def test_duplicates_are_told_and_are_no_fault(tmp_path: Path) -> None:
    outcome = run(tmp_path, messages=50, options={"fault": "repeat"})
    assert outcome.faults == []
    assert outcome.consumed[0][0]["duplicates"] == 1


def test_a_worker_that_dies_or_is_refused_is_an_error(tmp_path: Path) -> None:
    before = psutil.Process().children(recursive=True)
    with pytest.raises(BenchError, match="produce-0: ended with status 3"):
        run(tmp_path, messages=50, options={"fault": "die"})
    with pytest.raises(BenchError, match="the disk is full"):
        run(tmp_path, messages=50, rate=1000, options={"fault": "refuse"})
    assert set(psutil.Process().children(recursive=True)) <= set(before)


def test_a_worker_that_acknowledges_too_little_is_caught() -> None:
    plan = Plan(messages=10)
    assert trial.check_produced([{"acked": 10, "failed": 0}], plan) == []
    assert "had 1 failures" in trial.check_produced([{"acked": 9, "failed": 1}], plan)[0]


def test_a_consumer_that_contradicts_itself_is_caught() -> None:
    good = {"received": 5, "distinct": 5, "duplicates": 0, "out_of_order": 0, "bad_crc": 0}
    assert trial.check([[good]], 5) == []
    assert "contradicts" in trial.check([[good | {"received": 6}]], 5)[0]
    assert "nobody acknowledged" in trial.check([[good]], 4)[0]
    halves = [good | {"received": 2, "distinct": 2}, good | {"received": 3, "distinct": 3}]
    assert trial.check([halves, [good]], 5) == []


@pytest.mark.slow
def test_our_broker_in_a_real_run(tmp_path: Path) -> None:
    """All roles of the real thing: one in flight, streams, groups with members, an open loop."""
    system = CometMQ({"mappedFileSizeCommitLog": 16 << 20})
    try:
        system.start(tmp_path, systems.Durability.PAGE_CACHE)
        for number, plan in enumerate((
            Plan(mode=ONE, messages=5_000, warmup=20),  # many ticks of the processor's clock
            Plan(messages=20_000, warmup=100, queues=4, groups=2, consumers=2, reading=EARLY),
            Plan(rate=1000, messages=1000, warmup=200, reading=EARLY),
        )):  # fmt: skip
            outcome = Trial(system, plan, tmp_path / f"{number}").run()
            assert outcome.faults == [], plan
            assert outcome.delivered >= plan.total * plan.groups
            assert outcome.cost.servers_s > 0
        pids = system.processes()
        assert len(pids) > 5
    finally:
        system.stop()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


# --- systems --------------------------------------------------------------------------------------


def test_a_system_that_is_not_there_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BenchError, match="no system 'rabbit'; there are cometmq, rocketmq"):
        systems.system("rabbit")
    monkeypatch.setitem(sys.modules, "cometmq.bench.peers.kafka", None)
    with pytest.raises(BenchError, match="kafka cannot be measured"):
        systems.system("kafka")


def test_a_library_that_is_not_there_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(BenchError, match=r"yaml is not installed: pip install '.\[bench\]'"):
        load("yaml")


# --- OpenMessaging Benchmark ----------------------------------------------------------------------

GOOD = {
    "topics": 1, "partitionsPerTopic": 2, "messageSize": 100, "subscriptionsPerTopic": 1,
    "producersPerTopic": 1, "consumerPerSubscription": 1, "producerRate": 50_000,
    "testDurationMinutes": 15,
}  # fmt: skip


def omb_file(tmp_path: Path, **fields: Any) -> Path:
    path = tmp_path / "w.yaml"
    given = {name: value for name, value in (GOOD | fields).items() if value is not None}
    path.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in given.items()))
    return path


def test_a_workload_file_is_read(tmp_path: Path) -> None:
    found = omb.parse(
        omb_file(tmp_path, useRandomizedPayloads=True, randomBytesRatio=0.5,
                 randomizedPayloadPoolSize=10)
    )  # fmt: skip
    assert (found.name, found.messageSize, found.warmupDurationMinutes) == ("w", 100, 1)
    assert found.payload_options == {"random_share": 0.5, "pool": 10}


def test_a_payload_file_is_found_beside_the_workload(tmp_path: Path) -> None:
    (tmp_path / "payload.data").write_bytes(b"x" * 200)
    found = omb.parse(omb_file(tmp_path, payloadFile="payload.data"))
    assert found.payload_options == {"payload_file": str(tmp_path / "payload.data")}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"partitionPerTopic": 3}, "did you mean partitionsPerTopic"),
        ({"topics": "many"}, "topics: 'many' is not a whole number"),
        ({"topics": True}, "topics: True is not a whole number"),
        ({"topics": 0}, "topics 0: must be at least 1"),
        ({"messageSize": 20}, "messageSize 20: must be at least 32"),
        ({"messageSize": None}, "messageSize: missing"),
        ({"randomBytesRatio": 2.0}, "must be from 0 to 1"),
        ({"keyDistributor": "KEY_ROUND_ROBIN"}, "only NO_KEY is supported"),
        ({"payloadFile": "none.data"}, "no such file"),
        ({"testDurationMinutes": 0}, "must be above 0"),
    ],
)
def test_a_bad_workload_file_is_one_clear_error(
    tmp_path: Path, fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(BenchError, match=told):
        omb.parse(omb_file(tmp_path, **fields))


@pytest.mark.parametrize("text", ["a: [", "- 1\n", "\x00"])
def test_what_is_no_workload_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(text)
    with pytest.raises(BenchError, match=r"w\.yaml: not"):
        omb.parse(path)


def test_the_workloads_that_come_with_us_are_read() -> None:
    found = {name: omb.parse(omb.find(name)) for name in omb.known_workloads()}
    assert len(found) >= 10
    assert all(name == each.name for name, each in found.items())
    assert found["1-topic-1-partition-100b"].producerRate == 50_000
    assert found["max-rate-1-topic-1-partition-1p-1c-64kb"].saturates


def test_latencies_below_a_millisecond_are_reported(tmp_path: Path) -> None:
    """What the original loses."""
    path = histograms.write(tmp_path / "a.hlog", histograms.of([250_000] * 99 + [2_000_000]))
    found = omb_run.latencies_of("endToEndLatency", [path], 1e6)
    assert found["aggregatedEndToEndLatency50pct"] == pytest.approx(0.25, rel=0.01)
    assert found["endToEndLatencyMax"] == [pytest.approx(2, rel=0.01)]
    assert found["aggregatedEndToEndLatencyQuantiles"]["100"] == pytest.approx(2, rel=0.01)


def test_counts_between_two_words_of_a_worker() -> None:
    told: Any = SimpleNamespace(samples=[(0.0, 0), (10.0, 1000), (20.0, 1500)])
    counts = omb_run.Counts([told])
    assert [counts.at(when) for when in (-1, 5, 15, 30)] == [0, 500, 1250, 1500]
    assert counts.rates([0, 10, 20]) == [100, 50]


# --- reports --------------------------------------------------------------------------------------


def line(system: str, value: float, **more: Any) -> Line:
    given: dict[str, Any] = {
        "workload": "produce", "case": "one call a message", "system": system, "client": "python",
        "durability": "page cache", "round": 0, "size": 128, "key": "messages_per_s",
        "values": {"messages_per_s": value},
    }  # fmt: skip
    return Line(**given | more)


def some_results(*lines: Line) -> Results:
    return Results(machine={"cores": 2}, run={"commit": "abc"}, versions={}, lines=list(lines))


def test_medians_and_ratios() -> None:
    lines = [line("cometmq", value) for value in (100.0, 300.0, 200.0)]
    lines += [line("kafka", 50.0, client="java"), line("kafka", 1.0, client="java", faults=["x"])]
    ours, theirs = results.rows(lines)
    assert (ours["median"], ours["min"], ours["max"], ours["rounds"]) == (200, 100, 300, 3)
    assert theirs["cometmq_is"] == "4.00x"
    assert theirs["remarks"] == "1 of 2 rounds FAILED"


def test_of_latencies_less_is_better() -> None:
    ours = results.grouped([line("cometmq", 0, key="p50_us", values={"p50_us": 10.0})])[0]
    theirs = results.grouped([line("kafka", 0, key="p50_us", values={"p50_us": 30.0})])[0]
    assert results.ratio(ours, theirs) == 3


def test_latencies_at_different_rates_are_not_compared() -> None:
    def at(rate: float) -> results.Group:
        values = {"p50_us": 10.0, "asked_per_s": rate}
        return results.grouped([line("cometmq", 0, key="p50_us", values=values)])[0]

    assert results.ratio(at(1000), at(1000)) == 1
    assert results.ratio(at(1000), at(2000)) is None


def test_a_busy_machine_is_marked() -> None:
    assert "busy machine" in results.rows([line("cometmq", 1, others=0.06)])[0]["remarks"]
    assert not results.rows([line("cometmq", 1, others=0.05)])[0]["remarks"]


def test_the_table_of_targets() -> None:
    found = some_results(
        line("cometmq", 1_000_000), line("rocketmq", 100_000, client="java"),
        line("kafka", 900_000, client="confluent-kafka"),
    )  # fmt: skip
    rows = [(row["measured"], row["reached"]) for row in targets.table(found) if row["id"] == "P2"]
    assert rows == [
        ("against rocketmq (java): 10.00x", "aim"),
        ("against kafka (confluent-kafka): 1.11x", "missed"),
        ("acknowledged: 1.00 M/s", "floor"),
    ]
    assert {row["id"] for row in targets.table(found)} == {row.id for row in targets.ROWS}


@pytest.mark.slow
def test_a_report_from_given_results(tmp_path: Path) -> None:
    log = tmp_path / report.LOGS / "a" / "x.service.hlog"
    log.parent.mkdir(parents=True)
    histograms.write(log, histograms.of(range(1000, 90_000)))
    logs = {"service": ["a/x.service.hlog"]}
    given = some_results(
        line("cometmq", 5, hlogs=logs, case="<one> in flight", faults=[]),
        *(line(system, value / size, workload="sizes", size=size)
          for system, value in (("cometmq", 1e9), ("kafka", 2e9)) for size in (128, 1024)),
        line("nats", 5, faults=["7 lost"]),
    )  # fmt: skip
    page = report.write_report(given, tmp_path).read_text()
    assert "&lt;one&gt; in flight" in page
    assert page.count("data:image/png;base64,") == 2
    assert 'src="http' not in page
    assert "href=" not in page
    assert "7 lost" in page
    assert {path.name for path in (tmp_path / report.PLOTS).iterdir()} == {
        "sizes-one-call-a-message.png", "latency-produce-one--in-flight-128.png"
    }  # fmt: skip
    assert results.load_results(tmp_path / "results.json").lines == given.lines
    assert "| kafka |" in (tmp_path / "tables.md").read_text()


def test_results_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with pytest.raises(BenchError, match="No such file"):
        results.load_results(path)
    path.write_text("{}")
    with pytest.raises(BenchError, match=r"not a results\.json"):
        results.load_results(path)


def test_a_curve_ends_at_the_last_sample() -> None:
    curve = histograms.curve(histograms.of([1000] * 3 + [5000]))
    assert [round(above, 2) for _, above in curve] == [0.25, 0]
    assert plots._nines(0.9) == pytest.approx(1)


# --- the command line -----------------------------------------------------------------------------


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cometmq", "bench", *arguments],
        capture_output=True, text=True, timeout=patient(100),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["produce", "--size", "31", "--quick"], 1, "size 31: a body has at least 32 bytes"),
        (["produce", "--size", "x"], 2, "a number of bytes such as 128, 1k or 2g"),
        (["produce", "--against", "rabbit"], 2, "no system 'rabbit'"),
        (["produce", "--set", "x"], 2, "KEY=VALUE"),
        (["omb", "nothing"], 1, "nothing: no such file; with CometMQ come"),
        (["report"], 2, "--out DIR"),
        (["report", "--out", "/dev/null/x", "--from", "/nowhere"], 1, "/nowhere"),
    ],
)
@pytest.mark.slow
def test_bad_input_is_one_clear_error(arguments: list[str], code: int, told: str) -> None:
    done = command(*arguments)
    assert done.returncode == code, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def is_own(process: psutil.Process) -> bool:
    """Whether it is our broker in the harness."""
    try:
        return "cometmq.bench.own" in process.cmdline()
    except psutil.NoSuchProcess:
        return False  # it has ended since it was listed


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "cometmq", "bench", "end-to-end", "--seconds", "60",
         "--no-controls", "--store", str(tmp_path)],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    process.stderr.readline()
    below = psutil.Process(process.pid)
    while not any(map(is_own, below.children(recursive=True))):
        assert process.poll() is None
    started = below.children(recursive=True)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=patient(60))
    assert process.returncode == 130
    _, alive = psutil.wait_procs(started, patient(10))
    assert not alive
    assert not list(tmp_path.iterdir())


def test_the_bare_loops(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    from cometmq.bench import control

    program = control.build(tmp_path)
    assert control.memcpy_per_s(program, 128, 100_000) > 1000
    assert len(control.fdatasync_ns(program, tmp_path / "sync", 512, 5)) == 5
    assert all(rate > 0 for rate in control.page_bytes_per_s(program, tmp_path / "pages", 1 << 20))
    assert not (tmp_path / "pages").exists()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").write_bytes(os.urandom(100_000))
    assert control.read_bytes_per_s(program, tmp_path / "data") > 0
    assert len(control.echo_ns(64, 20)) == 20
    assert control.push_pull_per_s(64, 200) > 0


def test_a_sustained_rate_is_one_that_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []

    def keeps_up(_outcome: object, rate: float) -> bool:
        tried.append(rate)
        return rate <= bearable

    case: Any = SimpleNamespace(ctx=SimpleNamespace(seconds=1.0), system=CometMQ())
    monkeypatch.setattr(omb_run, "_try", lambda case, plan: None)
    monkeypatch.setattr(omb_run, "keeps_up", keeps_up)
    bearable = 300.0
    found = omb_run.sustained(case, Plan(), 1000.0)
    assert found in tried
    assert 300 - 1000 / 64 <= found <= 300
    bearable = 1.0
    with pytest.raises(BenchError, match="not even 16 messages/s"):
        omb_run.sustained(case, Plan(), 1000.0)
