"""COMETMQ_CLIENT_TIMEOUT: the default timeout of calls by clients (fault 40)."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from patience import patient

from cometmq import Admin, AsyncProducer, Producer, errors
from cometmq.cli.command_line import run as run_here
from cometmq.client.sending.attempts import FAILOVER_S, SEND_S, RetryPolicy
from cometmq.protocol.client_timeout import TIMEOUT_S, TIMEOUT_VARIABLE, default_timeout_s
from cometmq.protocol.commands import Ping
from cometmq.protocol.wire.channel import Channel
from cometmq.protocol.wire.remote import RemoteRef

NOWHERE = "tcp://127.0.0.1:1"
SOON_S = 0.2


def ask_by_channel(**options: float) -> None:
    with Channel(NOWHERE) as channel:
        channel.ask(Ping(), **options)  # type: ignore[arg-type]


def ask_by_reference(**options: float) -> None:
    reference = RemoteRef(NOWHERE)
    try:
        reference.ask(Ping(), timeout=options.get("timeout_s"))
    finally:
        reference.stop()


def ask_by_admin(**options: float) -> None:
    with Admin(NOWHERE, **options) as admin:
        admin.brokers()


def ask_by_producer(**options: float) -> None:
    with Producer(NOWHERE, **options) as producer:  # type: ignore[arg-type]
        producer.send("t", b"nobody takes it")


ASKING = [ask_by_channel, ask_by_reference, ask_by_admin, ask_by_producer]


@pytest.mark.parametrize("ask", ASKING)
def test_the_variable_is_the_default(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[..., None]
) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, str(SOON_S))
    began = time.monotonic()
    with pytest.raises(errors.NotReachable):
        ask()
    assert SOON_S <= time.monotonic() - began < patient(20)


@pytest.mark.parametrize("ask", ASKING)
def test_an_argument_overrules_it(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[..., None]
) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, "3600")
    with pytest.raises(errors.NotReachable):
        ask(timeout_s=SOON_S)


def test_without_it_defaults_are_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TIMEOUT_VARIABLE)
    assert default_timeout_s() == TIMEOUT_S == 3
    policy = RetryPolicy(None, None)
    assert (policy.timeout_s, policy.timeout_most_s) == (SEND_S, FAILOVER_S)


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "inf"])
def test_what_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, text)
    for make in (Admin, Producer, AsyncProducer):
        with pytest.raises(errors.ConfigError, match=f"{TIMEOUT_VARIABLE}='{text}': must be"):
            make(NOWHERE)


def test_a_command_says_what_is_wrong_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, "soon")
    assert run_here(["topic", "list", "--name-server", NOWHERE]) != 0
    said = capsys.readouterr().err
    assert said.startswith(f"Error: {TIMEOUT_VARIABLE}='soon': must be seconds above 0")
    assert "Traceback" not in said


def test_a_broker_takes_it_for_no_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, "20")
    assert run_here(["config", "show"]) == 0
    assert TIMEOUT_VARIABLE not in capsys.readouterr().err
