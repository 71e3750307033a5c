"""Keys that set nothing: mistyped ones, and those of RocketMQ that promise what is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from cometmq.cli.command_line import run
from cometmq.conf import BrokerSettings, ConfigError, load_settings
from cometmq.conf.rocketmq import NOT_USED, PROMISES
from cometmq.conf.settings import mistyped_key, options_by_key


def problems(*pairs: str, **environment: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        load_settings(environment=environment, pairs=pairs)
    return raised.value.problems


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("flushDiskTyp", "flushDiskType"),
        ("flushdisktype", "flushDiskType"),
        ("flush_disk_type", "flushDiskType"),
        ("flush-disk-type", "flushDiskType"),
        ("fileReservedTimes", "fileReservedTime"),
        ("maxMesageSize", "maxMessageSize"),
        ("autoCreateTopicEnabled", "autoCreateTopicEnable"),
        ("brokerip1", "brokerIP1"),
        ("aclEnabled", "aclEnable"),  # mistyped, it would be missed all the more
    ],
)
def test_a_mistyped_key_is_refused(written: str, meant: str) -> None:
    """To pass over it would run with something else than what was asked for."""
    assert problems(f"{written}=1") == (f'--set: unknown key "{written}"; did you mean {meant}?',)


def test_a_mistyped_variable_is_refused() -> None:
    said = problems(COMETMQ_FLUSH_DISK_TIPE="SYNC_FLUSH")
    assert said == (
        "COMETMQ_FLUSH_DISK_TIPE: unknown variable; did you mean COMETMQ_FLUSH_DISK_TYPE?",
    )


def test_a_mistyped_key_ends_the_command_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    conf = tmp_path / "broker.conf"
    conf.write_text("brokerName=a\nflushDiskTyp=SYNC_FLUSH\naclEnable=true\n")
    assert run(["broker", "-c", str(conf), "--set", "prot=1"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        'Error: broker.conf, line 2: unknown key "flushDiskTyp"; did you mean flushDiskType?',
        "aclEnable = true: there is no access control yet: whoever reaches the port may send, read "
        "and delete everything; without that line the broker starts (broker.conf, line 3)",
    ]
    assert list(tmp_path.iterdir()) == [conf]


def test_no_key_of_rocketmq_is_taken_for_a_mistyped_one() -> None:
    """A whole broker.conf of RocketMQ names all of them, at values that promise nothing."""
    pairs = []
    for key in sorted(NOT_USED):
        promise = PROMISES.get(key)
        if promise is None or promise.harmless:
            pairs.append(f"{key}={promise.harmless[-1] if promise else 1}")
    loaded = load_settings(environment={}, pairs=pairs)
    assert loaded.settings == BrokerSettings()
    assert [*loaded.warnings] == [
        f"--set: {pair.partition('=')[0]}: RocketMQ key, not used by CometMQ" for pair in pairs
    ]


def test_what_is_far_from_any_key_is_a_warning() -> None:
    assert mistyped_key("theirOwnThing") is None
    loaded = load_settings(environment={}, pairs=["theirOwnThing=1"])
    assert loaded.warnings == ('--set: unknown key "theirOwnThing", ignored',)


@pytest.mark.parametrize(
    ("pair", "told"),
    [
        ("aclEnable=true", "no access control yet"),
        ("aclEnable = TRUE", "no access control yet"),
        ("authenticationEnabled=true", "no access control yet"),
        ("authorizationEnabled=true", "no access control yet"),
        ("useTLS=true", "no TLS yet"),
        ("tls.server.mode=enforcing", "no TLS yet"),
        ("enableControllerMode=true", "a group elects its master with enableDLegerCommitLog"),
        ("minInSyncReplicas=2", "nobody counts replicas without a group (enableDLegerCommitLog)"),
        ("inSyncReplicas=2", "nobody waits for a slave with brokerRole = ASYNC_MASTER"),
        ("brokerPermission=4", "take the permission from its topics"),
        ("storeType=defaultRocksDB", "RocksDB is not read"),
        ("readOnlyCommitLogStorePaths=/old/log", "would not be found"),
    ],
)
def test_what_only_looks_safe_is_refused(pair: str, told: str) -> None:
    (said,) = problems(pair)
    assert told in said
    assert said.startswith(pair.partition("=")[0].strip() + " = ")


@pytest.mark.parametrize(
    ("pair", "told"),
    [
        ("enableLmq=true", "no light queues yet"),
        ("fetchNamesrvAddrByAddressServer=true", "namesrvAddr has to name them"),
    ],
)
def test_what_is_not_there_yet_is_said_first(pair: str, told: str) -> None:
    warnings = load_settings(environment={}, pairs=["sendMessageThreadPoolNums=4", pair]).warnings
    assert told in warnings[0]
    assert warnings[1:] == ("--set: sendMessageThreadPoolNums: RocketMQ key, not used by CometMQ",)


def test_settings_in_python_say_whose_key_it_is() -> None:
    with pytest.raises(
        ConfigError, match=r"^aclEnable: no such key here, RocketMQ has it; there is"
    ):
        BrokerSettings.from_keys({"aclEnable": True})
    said = r"^haMaxTimeSlaveNotCatchup: no such key here, RocketMQ has it$"
    with pytest.raises(ConfigError, match=said):
        BrokerSettings.from_keys({"haMaxTimeSlaveNotCatchup": 1})


def test_every_promise_is_a_key_that_sets_nothing() -> None:
    assert set(PROMISES) <= NOT_USED
    assert not NOT_USED & options_by_key().keys()
