"""Settings: RocketMQ's defaults and files, ranges, precedence, warnings, documentation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cometmq.conf
from cometmq.conf import (
    BrokerRole,
    BrokerSettings,
    ConfigError,
    FlushDiskType,
    LogFormat,
    LogLevel,
    Origin,
    Unit,
    as_markdown,
    explain_option,
    explain_options,
    load_settings,
    readable,
    show_settings,
    to_number,
)
from cometmq.conf.engine import ENGINE_KEYS
from cometmq.conf.option import environment_variable, options_of, snake_case
from cometmq.conf.rocketmq import NOT_USED
from cometmq.conf.settings import (
    FRAME_MAX,
    GROUPS,
    RECORD_OVERHEAD_MAX_BYTES,
    nearest_key,
    options_by_key,
)
from cometmq.conf.sources import read_properties
from cometmq.protocol import frames

ROOT = Path(__file__).resolve().parents[2]

# The defaults of RocketMQ's MessageStoreConfig and BrokerConfig, by its keys.
ROCKETMQ_DEFAULTS: dict[str, str | int | bool] = {
    "brokerClusterName": "DefaultCluster",
    "brokerRole": "ASYNC_MASTER",
    "haMasterAddress": "",
    "haSendHeartbeatInterval": 5_000,
    "haHousekeepingInterval": 20_000,
    "mappedFileSizeCommitLog": 1_073_741_824,
    "mappedFileSizeConsumeQueue": 6_000_000,
    "mappedFileSizeTimerLog": 104_857_600,
    "maxMessageSize": 4_194_304,
    "maxHashSlotNum": 5_000_000,
    "maxIndexNum": 20_000_000,
    "messageIndexEnable": True,
    "flushDiskType": "ASYNC_FLUSH",
    "flushIntervalCommitLog": 500,
    "flushCommitLogLeastPages": 4,
    "flushCommitLogThoroughInterval": 10_000,
    "flushIntervalConsumeQueue": 1_000,
    "flushConsumeQueueLeastPages": 2,
    "flushConsumeQueueThoroughInterval": 60_000,
    "syncFlushTimeout": 5_000,
    "checkCRCOnRecover": True,
    "enabledAppendPropCRC": False,
    "autoMessageVersionOnTopicLen": True,
    "maxFilterMessageSize": 16_000,
    "deleteWhen": "04",
    "fileReservedTime": 72,
    "cleanResourceInterval": 10_000,
    "verifyLogBytesPerSecond": 8_388_608,
    "verifyLogInterval": 604_800_000,
    "deleteFileBatchMax": 10,
    "osPageCacheBusyTimeOutMills": 1_000,
    "cleanFileForciblyEnable": True,
    "deleteCommitLogFilesInterval": 100,
    "deleteConsumeQueueFilesInterval": 100,
    "destroyMapedFileIntervalForcibly": 120_000,
    "redeleteHangedFileInterval": 120_000,
    "diskMaxUsedSpaceRatio": 75,
    "diskSpaceCleanForciblyRatio": 85,
    "diskSpaceWarningLevelRatio": 90,
    "flushConsumerOffsetInterval": 5_000,
    "flushDelayOffsetInterval": 10_000,
    "messageDelayLevel": "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h",
    "transactionTimeOut": 6_000,
    "transactionCheckInterval": 30_000,
    "transactionCheckMax": 15,
    "storeReplyMessageEnable": True,
    "longPollingEnable": True,
    "slaveReadEnable": False,
    "accessMessageInMemoryMaxRatio": 40,
    "enablePropertyFilter": True,
    "defaultTopicQueueNums": 8,
    "autoCreateTopicEnable": True,
    "autoCreateSubscriptionGroup": True,
    "slaveTimeout": 3_000,
    "haMaxGapNotInSync": 256 * 2**20,
}

# What RocketMQ does not have, or has with another value.
OWN_DEFAULTS: dict[str, str | int | bool] = {
    "storeGroup": "",
    "brokerName": "",
    "brokerId": 0,
    "namesrvAddr": "",
    "bindAddress": "127.0.0.1",
    "brokerIP1": "",
    "port": 9876,
    "listenPort": 10_911,
    "maxConnections": 16_384,
    "maxConnectionInFlightBytes": 128 * 2**20,
    "storePathRootDir": "store",
    "storePathCommitLog": "",
    "maxInFlightSendBytes": 256 * 2**20,
    "waitTimeMillsInSendQueue": 1_000,
    "cutLogAtDamage": False,
    "hotWindowBytes": 48 * 2**20,
    "hotWindowMaxBytes": 2 * 2**30,
    "mlockEnable": True,
    "readerCount": 1,
    "consumerSessionTimeout": 10_000,
    "recycledSegmentsMax": 2,
    "diskFreeBytesMin": 2 * 2**30,
    "neverDeleteUnread": False,
    "archiveHold": False,
    "archiveOverflow": "refuse-writes",
    "stagedLease": 86_400_000,
    "maxStagedBytes": 4 * 2**30,
    "maxTopics": 200_000,
    "maxGroups": 200_000,
    "haListenPort": 0,
    "haAllowedPeers": "",
    "haTransferBatchSize": 2**20,
    "haFlowControlEnable": False,
    "maxHaTransferByteInSecond": 100 * 2**20,
    "inSyncReplicas": "",
    "enableDLegerCommitLog": False,
    "dLegerGroup": "",
    "dLegerPeers": "",
    "dLegerSelfId": "",
    "minInSyncReplicas": "",
    "groupEngine": "",
    "groupSecretFile": "",
    "groupSessionTimeout": 2_000,
    "groupEngineCaFile": "",
    "groupEngineCertFile": "",
    "groupEngineKeyFile": "",
    "groupEngineUser": "",
    "groupEnginePasswordFile": "",
    "logFormat": "text",
    "logLevel": "INFO",
    "logLevels": "",
    "logFile": "",
    "logFileMaxBytes": 64 * 2**20,
    "logFileCount": 5,
}

BROKER_CONF = r"""
# Licensed under the Apache License, Version 2.0
! a comment, too \
brokerClusterName=DefaultCluster
   brokerName = broker-a   
brokerId:0
deleteWhen 04
fileReservedTime=48
brokerRole=ASYNC_MASTER
flushDiskType=SYNC_FLUSH

namesrvAddr=rocketmq-nameserver1:9876;\
            rocketmq-nameserver2:9876
defaultTopicQueueNums=4
autoCreateTopicEnable=false
listenPort=20911
mapedFileSizeCommitLog=268435456
mapedFileSizeConsumeQueue=300001
destroyMapedFileIntervalForcibly=60000
diskMaxUsedSpaceRatio=88
storePathRootDir=/data/\u6d88\u606f/store
storePathCommitLog=/data/commit\ log
maxMessageSize=65536
sendMessageThreadPoolNums=128
transientStorePoolEnable=false
flushEveryWrite=100
"""  # noqa: W291 - the blanks at the end of a line are part of what is tested


def load(text: str, tmp_path: Path, **more: Any) -> cometmq.conf.Loaded:
    file = tmp_path / "broker.conf"
    file.write_text(text, encoding="utf-8")
    return load_settings(file, **{"environment": {}, **more})


def problems_of(**values: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        BrokerSettings.from_keys(values)
    return raised.value.problems


# -- Declarations


def test_every_default() -> None:
    assert BrokerSettings().as_keys() == ROCKETMQ_DEFAULTS | OWN_DEFAULTS


def test_attributes_are_the_keys_in_snake_case_with_the_unit_at_the_end() -> None:
    for attribute, declared in options_of(BrokerSettings).items():
        snake = snake_case(declared.key)
        snake = snake.replace("_mills", "").replace("maped", "mapped")  # RocketMQ's spelling
        ends = ("", "_ms", "_bytes", "_hours", "_percent")
        assert attribute in [snake + end for end in ends], declared.key
        has_unit = declared.key.endswith(("Interval", "Timeout", "Mills", "Time", "Ratio", "Bytes"))
        assert declared.unit is not None or not has_unit, declared.key


def test_every_option_is_explained_and_in_one_group() -> None:
    grouped = [attribute for group in GROUPS for attribute in options_of(group)]
    assert sorted(grouped) == sorted(field.name for field in dataclasses.fields(BrokerSettings))
    for declared in options_of(BrokerSettings).values():
        assert declared.help.endswith("."), declared.key
        assert declared.type is not int or declared.at_least is not None, declared.key
        assert declared.take(declared.default) == declared.default


@pytest.mark.parametrize(
    ("key", "variable"),
    [
        ("brokerIP1", "COMETMQ_BROKER_IP1"),
        ("checkCRCOnRecover", "COMETMQ_CHECK_CRC_ON_RECOVER"),
        ("enabledAppendPropCRC", "COMETMQ_ENABLED_APPEND_PROP_CRC"),
        ("storePathRootDir", "COMETMQ_STORE_PATH_ROOT_DIR"),
        ("port", "COMETMQ_PORT"),
    ],
)
def test_environment_variable(key: str, variable: str) -> None:
    assert environment_variable(key) == variable


def test_public_names() -> None:
    assert sorted(cometmq.conf.__all__) == sorted(set(cometmq.conf.__all__))
    assert all(hasattr(cometmq.conf, name) for name in cometmq.conf.__all__)


# -- Values


def test_a_number_may_be_written_with_its_unit() -> None:
    settings = BrokerSettings.from_keys(
        {
            "mappedFileSizeCommitLog": "64MiB",
            "maxMessageSize": " 1 mib ",
            "flushIntervalCommitLog": "2s",
            "syncFlushTimeout": "200ms",
            "fileReservedTime": "3d",
            "diskMaxUsedSpaceRatio": "80%",
        }
    )
    assert settings.mapped_file_size_commit_log_bytes == 67_108_864
    assert settings.max_message_size == 1_048_576
    assert settings.flush_interval_commit_log_ms == 2_000
    assert settings.sync_flush_timeout_ms == 200
    assert settings.file_reserved_time_hours == 72
    assert settings.disk_max_used_space_ratio_percent == 80


@given(st.integers(-(10**18), 10**18), st.sampled_from([*Unit, None]))
def test_readable_numbers_are_read_back(number: int, unit: Unit | None) -> None:
    assert to_number(readable(number, unit), unit) == number
    assert to_number(str(number), unit) == number


@given(st.text(), st.sampled_from([*Unit, None]))
def test_a_text_is_a_number_or_refused(text: str, unit: Unit | None) -> None:
    problem = ""
    try:
        to_number(text, unit)
    except ValueError as error:
        problem = str(error)
    assert problem == "" or problem.startswith("must be a whole number")


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("flushIntervalCommitLog", 0, "flushIntervalCommitLog = 0: must be at least 1"),
        ("flushIntervalCommitLog", "0", "flushIntervalCommitLog = 0: must be at least 1"),
        ("readerCount", 17, "readerCount = 17: must be at most 16"),
        ("maxMessageSize", 2**31, "maxMessageSize = 2147483648: must be at most 2147483647"),
        ("diskMaxUsedSpaceRatio", 96, "diskMaxUsedSpaceRatio = 96: must be at most 95"),
        ("diskSpaceWarningLevelRatio", 34, "diskSpaceWarningLevelRatio = 34: must be at least 35"),
        ("diskSpaceWarningLevelRatio", 100, "diskSpaceWarningLevelRatio = 100: must be at most 99"),
        (
            "diskSpaceCleanForciblyRatio",
            29,
            "diskSpaceCleanForciblyRatio = 29: must be at least 30",
        ),
        (
            "diskSpaceCleanForciblyRatio",
            100,
            "diskSpaceCleanForciblyRatio = 100: must be at most 99",
        ),
        (
            "maxMessageSize",
            "64MB",
            "maxMessageSize = 64MB: must be a whole number of bytes, such as 67108864 or 64MiB",
        ),
        (
            "syncFlushTimeout",
            "1.5s",
            "syncFlushTimeout = 1.5s: must be a whole number of ms, such as 5000 or 5s",
        ),
        ("readerCount", "2s", "readerCount = 2s: must be a whole number"),
        ("readerCount", True, "readerCount = true: must be a whole number"),
        ("readerCount", "9" * 5000, f"readerCount = {'9' * 80}...: must be a whole number"),
        ("port", "", "port = : must be a whole number"),
        ("port", 65_536, "port = 65536: must be at most 65535"),
        ("mlockEnable", "yes", "mlockEnable = yes: must be true or false"),
        ("mlockEnable", 1, "mlockEnable = 1: must be true or false"),
        ("flushDiskType", "SYNC", "flushDiskType = SYNC: must be ASYNC_FLUSH or SYNC_FLUSH"),
        ("brokerId", 1, "brokerId = 1: must be 0 with brokerRole = ASYNC_MASTER"),
        (
            "brokerName",
            "../x",
            "brokerName = ../x: must be at most 127 characters, without blanks and slashes",
        ),
        ("brokerClusterName", "", "brokerClusterName = : must not be empty"),
        ("brokerName", "a\0b", r"brokerName = 'a\x00b': must not hold control characters"),
        ("brokerName", "a\ud800", r"brokerName = 'a\ud800': must not hold control characters"),
        ("brokerName", 7, "brokerName = 7: must be text"),
        ("storePathRootDir", "", "storePathRootDir = : must be a folder"),
        (
            "storePathRootDir",
            "~no such user/x",
            "storePathRootDir = ~no such user/x: must be a folder; there is no such home",
        ),
        (
            "storePathCommitLog",
            "/a,/b",
            "storePathCommitLog = /a,/b: must be one folder; several are not supported yet",
        ),
        (
            "deleteWhen",
            "04;24",
            'deleteWhen = 04;24: must be hours from 00 to 23, several separated by ";"',
        ),
        ("deleteWhen", "", 'deleteWhen = : must be hours from 00 to 23, several separated by ";"'),
        (
            "namesrvAddr",
            "localhost",
            'namesrvAddr = localhost: must be host:port, several separated by ";"',
        ),
        ("bindAddress", "", "bindAddress = : must not be empty"),
        (
            "maxIndexNum",
            200_000_000,
            "maxHashSlotNum = 5000000, maxIndexNum = 200000000: "
            "an index file of 4020000040 bytes, at most 2147483647",
        ),
        ("maxMesageSize", 1, "maxMesageSize: no such key; did you mean maxMessageSize?"),
    ],
)
def test_a_bad_value_is_refused(key: str, value: object, problem: str) -> None:
    assert problems_of(**{key: value}) == (problem,)


def test_all_problems_are_reported_at_once() -> None:
    problems = problems_of(readerCount=0, flushIntervalCommitLog=0)
    assert sorted(problems) == [
        "flushIntervalCommitLog = 0: must be at least 1",
        "readerCount = 0: must be at least 1",
    ]


def test_settings_in_python(tmp_path: Path) -> None:
    settings = BrokerSettings(
        store_path_root_dir=tmp_path, flush_disk_type=FlushDiskType.SYNC_FLUSH
    )
    assert settings.commit_log_dir == tmp_path / "commitlog"
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.port = 1  # type: ignore[misc]
    with pytest.raises(ConfigError, match="port = -1: must be at least 0"):
        dataclasses.replace(settings, port=-1)


def test_settings_go_through_json_and_back() -> None:
    settings = BrokerSettings(
        store_path_root_dir=Path("/data/store"),
        max_message_size=100,
        log_format=LogFormat.JSON,
        log_level=LogLevel.DEBUG,
        mlock_enable=False,
    )
    assert BrokerSettings.from_keys(json.loads(json.dumps(settings.as_keys()))) == settings


def test_consume_queue_segments_are_rounded_up_to_whole_entries() -> None:
    for given_bytes, kept_bytes in [(20, 20), (300_001, 300_020), (2**31 - 8, 2_147_483_640)]:
        settings = BrokerSettings(mapped_file_size_consume_queue_bytes=given_bytes)
        assert settings.mapped_file_size_consume_queue_bytes == kept_bytes


@pytest.mark.parametrize("value", ["04", "04;16", " 4 ; 16 ;"])
def test_delete_hours(value: str) -> None:
    assert BrokerSettings(delete_when=value).delete_hours <= {4, 16}
    assert 4 in BrokerSettings(delete_when=value).delete_hours


def test_name_servers() -> None:
    assert BrokerSettings().name_servers == ()
    addresses = "a:9876; tcp://10.0.0.1:9877;[::1]:9878;"
    settings = BrokerSettings(namesrv_addr=addresses)
    assert settings.name_servers == ("a:9876", "10.0.0.1:9877", "[::1]:9878")


# -- Reading a store and writing one


@pytest.mark.parametrize("segment_bytes", [4_096, 65_536, 4_194_304, 4_194_304 + 65_543])
def test_small_segments_can_be_written(segment_bytes: int) -> None:
    """As with RocketMQ: what fits into none is refused when it is sent."""
    settings = BrokerSettings(mapped_file_size_commit_log_bytes=segment_bytes)
    settings.check_for_writing()
    assert settings.segment_remark == (
        f"mappedFileSizeCommitLog = {segment_bytes}: a message lies in one segment with all that "
        f"belongs to it, so that one of {segment_bytes - 8} bytes is too large, whatever "
        "maxMessageSize (4194304) says"
    )


def test_what_is_stored_may_be_larger_than_what_is_sent() -> None:
    """By a frame at most, or as far as is set."""
    assert FRAME_MAX == frames.FRAME_MAX
    for size, most in ((1, 1 << 24), (1 << 24, 1 << 24), (1 << 25, 1 << 25)):
        settings = BrokerSettings(max_message_size=size)
        assert settings.stored_record_bytes_max == most + RECORD_OVERHEAD_MAX_BYTES


def test_segments_that_hold_every_record_need_no_remark() -> None:
    assert BrokerSettings().segment_remark == ""
    room = 4_194_304 + 65_536 + 8
    assert BrokerSettings(mapped_file_size_commit_log_bytes=room).segment_remark == ""


def test_a_broker_needs_an_address_and_room_for_one_message() -> None:
    BrokerSettings().check_for_writing()
    BrokerSettings(bind_address="0.0.0.0", broker_ip1="10.0.0.1").check_for_writing()
    with pytest.raises(ConfigError) as raised:
        BrokerSettings(bind_address="0.0.0.0", max_in_flight_send_bytes=1).check_for_writing()
    assert raised.value.problems == (
        "maxInFlightSendBytes = 1: must be at least maxMessageSize + 65536 = 4259840",
        "bindAddress = 0.0.0.0: nobody can connect to that; "
        "set brokerIP1 to the address clients use",
    )


# -- Groups that elect their master

REPLICA = {
    "brokerName": "orders",
    "enableDLegerCommitLog": True,
    "dLegerPeers": "n0-10.0.0.1:40911;n1-10.0.0.2:40911;n2-10.0.0.3:40911",
    "dLegerSelfId": "n1",
    "groupEngine": "etcd://10.0.0.9:2379",
    "groupSecretFile": "/etc/cometmq/secret",
}


def test_a_replica_follows_first_and_its_runs_have_roles_of_their_own() -> None:
    settings = BrokerSettings.from_keys(REPLICA)
    settings.check_for_writing()
    assert settings.group_name == "orders"
    assert settings.min_iss == 2
    assert settings.own_peer == ("n1", "10.0.0.2:40911")
    follower, master = settings.for_run(0), settings.for_run(7)
    assert (follower.is_slave, follower.broker_id) == (True, 2)
    assert (master.is_slave, master.broker_id) == (False, 0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"brokerRole": "SYNC_MASTER"},
            "brokerRole = SYNC_MASTER, brokerId = 0: must be ASYNC_MAS",
        ),
        (
            {"brokerRole": "SLAVE", "brokerId": 1},
            "brokerRole = SLAVE, brokerId = 1: must be ASYNC_MASTER and 0",
        ),
        ({"haListenPort": 10912}, "haListenPort = 10912: a group has no other slaves"),
        ({"haMasterAddress": "10.0.0.1:10912"}, "haMasterAddress = 10.0.0.1:10912: a group elects"),
        ({"brokerName": "", "dLegerGroup": "orders"}, "brokerName: must be given in a group"),
        ({"dLegerGroup": "a.b"}, "dLegerGroup = a.b: a group's name is 1 to 120 of"),
        ({"brokerName": "bestellungen-für-köln"}, "brokerName = bestellungen-für-köln: a group's"),
        ({"dLegerSelfId": "n3"}, "dLegerSelfId = n3: must be one of dLegerPeers"),
        ({"dLegerSelfId": ""}, "dLegerSelfId = : must be one of dLegerPeers"),
        ({"minInSyncReplicas": 1}, "minInSyncReplicas: min_iss = 1: a message would be ack"),
        ({"minInSyncReplicas": 4}, "minInSyncReplicas: min_iss = 4, but there are 3 replicas"),
        ({"groupEngine": ""}, "groupEngine: must name what keeps the group's record"),
        ({"groupSecretFile": ""}, "groupSecretFile: must be a file with the secret"),
        ({"groupEngineUser": "me"}, "groupEngineUser = me: needs groupEnginePasswordFile"),
        ({"groupEnginePasswordFile": "/w"}, "groupEnginePasswordFile = /w: needs groupEngineUser"),
        (
            {"groupEngineKeyFile": "/k", "groupEngineCaFile": "/c"},
            "groupEngineKeyFile = /k: needs groupEngineCertFile",
        ),
        (
            {"groupEngineCertFile": "/c", "groupEngineKeyFile": "/k"},
            "groupEngineCertFile = /c: needs groupEngineCaFile",
        ),
        (
            {"groupEngineCertFile": "/c", "groupEngineCaFile": "/a"},
            "groupEngineCertFile = /c: needs groupEngineKeyFile",
        ),
        ({"dLegerPeers": "n0-a:1;n1-b:1"}, "dLegerPeers: 2 replicas: a group that fails over"),
        ({"dLegerPeers": "n0-a:1;n1-b:1;n1-c:1"}, "dLegerPeers: 2 replicas have the id n1"),
        ({"dLegerPeers": "n0-a:1;n1-b:1;n2-b:1"}, "dLegerPeers: 2 replicas have the address b:1"),
        (
            {"dLegerPeers": ";".join(f"n{each}-a:{each + 1}" for each in range(16))},
            "dLegerPeers: 16 replicas: a group that fails over by itself has 3 to 15",
        ),
    ],
)
def test_what_can_be_no_replica_does_not_start(changes: dict[str, Any], told: str) -> None:
    settings = BrokerSettings.from_keys(REPLICA | changes)  # its store can still be read
    with pytest.raises(ConfigError) as raised:
        settings.check_for_writing()
    (said,) = raised.value.problems
    assert said.startswith(told)


def test_all_that_is_wrong_with_a_replica_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        BrokerSettings(enable_dleger_commit_log=True, ha_listen_port=1).check_for_writing()
    keys = [said.replace(":", " ").split()[0] for said in raised.value.problems]
    assert keys == [
        "haListenPort", "brokerName", "dLegerPeers", "minInSyncReplicas", "dLegerSelfId",
        "groupEngine", "groupSecretFile",
    ]  # fmt: skip


def test_how_an_engine_is_spoken_to() -> None:
    keys = {key: f"/{key}" for key in ENGINE_KEYS}
    settings = BrokerSettings.from_keys(REPLICA | keys)
    settings.check_for_writing()
    assert tuple(settings.engine_access) == tuple(keys.values())


@pytest.mark.parametrize("count", [3, 15])
def test_so_many_replicas_can_be(count: int) -> None:
    peers = ";".join(f"n{each}-a:{each + 1}" for each in range(count))
    keys = {"dLegerPeers": peers, "minInSyncReplicas": count}
    BrokerSettings.from_keys(REPLICA | keys).check_for_writing()


@pytest.mark.parametrize(
    "peers", ["n0", "n0-a", "n0-a:0", "n0-a:65536", "-a:1", "n0-a:1,n1-b:1", "n0 -a:1", "ü-a:1"]
)
def test_peers_are_ids_and_addresses(peers: str) -> None:
    (said,) = problems_of(dLegerPeers=peers)
    assert said.startswith(f"dLegerPeers = {peers}: must be id-host:port of each replica")


def test_rocketmqs_default_of_replicas_in_sync_promises_nothing() -> None:
    BrokerSettings.from_keys({"minInSyncReplicas": 1}).check_for_writing()


# -- Files


def test_a_broker_conf_of_rocketmq(tmp_path: Path) -> None:
    settings, warnings, origins = load(BROKER_CONF, tmp_path)
    assert settings.broker_name == "broker-a"
    assert settings.broker_id == 0
    assert settings.broker_role is BrokerRole.ASYNC_MASTER
    assert settings.delete_when == "04"
    assert settings.file_reserved_time_hours == 48
    assert settings.flush_disk_type is FlushDiskType.SYNC_FLUSH
    assert settings.name_servers == ("rocketmq-nameserver1:9876", "rocketmq-nameserver2:9876")
    assert settings.default_topic_queue_nums == 4
    assert settings.auto_create_topic_enable is False
    assert settings.listen_port == 20_911
    assert settings.mapped_file_size_commit_log_bytes == 268_435_456
    assert settings.mapped_file_size_consume_queue_bytes == 300_020
    assert settings.store_path_root_dir == Path("/data/消息/store")
    assert settings.commit_log_dir == Path("/data/commit log")
    assert settings.destroy_mapped_file_interval_forcibly_ms == 60_000
    assert warnings == (
        "broker.conf, line 24: sendMessageThreadPoolNums: RocketMQ key, not used by CometMQ",
        "broker.conf, line 25: transientStorePoolEnable: RocketMQ key, not used by CometMQ",
        'broker.conf, line 26: unknown key "flushEveryWrite", ignored',
    )
    assert origins["brokerName"].place == "broker.conf, line 5"
    assert origins["mappedFileSizeCommitLog"].origin is Origin.FILE


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("a=1", [("a", "1")]),
        ("a = 1\r\nb:2\rc 3\n", [("a", "1"), ("b", "2"), ("c", "3")]),
        ("a", [("a", "")]),
        ("a==b", [("a", "=b")]),
        ("a\tb=c", [("a", "b=c")]),
        (r"a\=b\:c\ d=1", [("a=b:c d", "1")]),
        ("#a=1\n  !b=2\n\n", []),
        ("#a=1\\\nb=2", [("b", "2")]),
        ("a=1,\\\n   2,\\\n   # 3", [("a", "1,2,# 3")]),
        ("a=1\\\\\nb=2", [("a", "1\\"), ("b", "2")]),
        ("a=1\\", [("a", "1")]),
        (r"a=\t\n\q\\", [("a", "\t\nq\\")]),
        (r"a=\u00e9\ud83d\ude00", [("a", "é😀")]),
        (r"a=c:\\temp", [("a", "c:\\temp")]),
        ("a=x\u2028y\x85z", [("a", "x\u2028y\x85z")]),
    ],
)
def test_properties_as_java_reads_them(text: str, entries: list[tuple[str, str]]) -> None:
    assert [(entry.key, entry.value) for entry in read_properties(text)] == entries


# The escapes of java.util.Properties.store, for what its load gives a meaning to.
ESCAPES = str.maketrans({c: "\\" + c for c in "\\=:#! "} | {"\n": "\\n", "\r": "\\r", "\f": "\\f"})


@given(st.dictionaries(st.text(min_size=1), st.text()))
def test_properties_round_trip(entries: dict[str, str]) -> None:
    escaped = {
        key.translate(ESCAPES).replace("\t", "\\t"): value.translate(ESCAPES).replace("\t", "\\t")
        for key, value in entries.items()
    }
    text = "\n".join(f"{key} = {value}" for key, value in escaped.items())
    assert {entry.key: entry.value for entry in read_properties(text)} == entries


@given(
    st.binary() | st.text("\\u0dD8=: \t\r\n#!aé\ud800").map(lambda t: t.encode("utf-8", "replace"))
)
def test_rubbish_in_a_file_is_a_config_error_or_a_warning(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "rubbish.conf"
    file.write_bytes(content)
    try:
        load_settings(file, environment={})
    except ConfigError as error:
        str(error).encode()


@given(
    key=st.sampled_from(sorted(options_by_key())),
    value=st.text() | st.integers().map(str) | st.just("~root"),
)
def test_rubbish_in_a_value_is_a_config_error(key: str, value: str) -> None:
    problems: tuple[str, ...] = ()
    try:
        load_settings(environment={}, pairs=[f"{key}={value}"])
    except ConfigError as error:
        problems = error.problems
    for problem in problems:
        assert options_by_key()[key].key in problem
        problem.encode()


def test_a_file_not_in_utf_8_is_read_as_java_does(tmp_path: Path) -> None:
    file = tmp_path / "broker.conf"
    file.write_bytes("# Gr\xf6\xdfe\nbrokerName=caf\xe9\n".encode("latin-1"))
    assert load_settings(file, environment={}).settings.broker_name == "café"


@pytest.mark.parametrize("name", ["missing.conf", ".", "a\0b"])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read: "):
        load_settings(tmp_path / name, environment={})


def test_an_error_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load(
            "\nflushIntervalCommitLog=0",
            tmp_path,
            environment={"COMETMQ_READER_COUNT": "many"},
            pairs=["port=x"],
        )
    assert raised.value.problems == (
        "flushIntervalCommitLog = 0: must be at least 1 (broker.conf, line 2)",
        "readerCount = many: must be a whole number (COMETMQ_READER_COUNT)",
        "port = x: must be a whole number (--set)",
    )
    with pytest.raises(ConfigError, match=r"^broker\.conf, line 2: \\u must be followed by four"):
        load("a=b\nc=\\u12", tmp_path)


# -- Precedence and warnings


def test_set_overrules_environment_overrules_file(tmp_path: Path) -> None:
    text = "port=1\nreaderCount=2\nlistenPort=3"
    environment = {"COMETMQ_PORT": "11", "COMETMQ_READER_COUNT": "12", "HOME": "/"}
    loaded = load(text, tmp_path, environment=environment, pairs=["port = 21"])
    assert loaded.settings.port == 21
    assert loaded.settings.reader_count == 12
    assert loaded.settings.listen_port == 3
    assert loaded.warnings == ()
    origins = {
        row.key: (row.origin, row.place) for row in show_settings(loaded.settings, loaded.origins)
    }
    assert origins["port"] == (Origin.SET, "--set")
    assert origins["readerCount"] == (Origin.ENV, "COMETMQ_READER_COUNT")
    assert origins["listenPort"] == (Origin.FILE, "broker.conf, line 3")
    assert origins["logLevel"] == (Origin.DEFAULT, "")


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMETMQ_STORE_PATH_ROOT_DIR", "/data/x")
    assert load_settings().settings.store_path_root_dir == Path("/data/x")


def test_an_overruled_value_need_not_be_good(tmp_path: Path) -> None:
    assert load("port=x", tmp_path, pairs=["port=1"]).settings.port == 1


def test_aliases(tmp_path: Path) -> None:
    settings = load("listenHost=10.0.0.1", tmp_path).settings
    assert settings.advertised_address == "10.0.0.1"
    loaded = load("mapedFileSizeCommitLog=1GiB\nmappedFileSizeCommitLog=2000000000", tmp_path)
    assert loaded.settings.mapped_file_size_commit_log_bytes == 2_000_000_000
    assert loaded.warnings == (
        "broker.conf, line 2: mappedFileSizeCommitLog overrules "
        "mapedFileSizeCommitLog (broker.conf, line 1)",
    )


def test_unknown_keys_from_elsewhere() -> None:
    loaded = load_settings(
        environment={
            "COMETMQ_FLUSH_DISK": "1",
            "COMETMQ_BROKER_IP2": "x",
            "COMETMQ_X": "",
        },
        pairs=["brokerIP2=10912", "x=1", "logging=a", "k" * 500 + "=1"],
    )
    assert loaded.settings == BrokerSettings()
    assert loaded.warnings == (
        "COMETMQ_BROKER_IP2: brokerIP2: RocketMQ key, not used by CometMQ",
        "COMETMQ_FLUSH_DISK: unknown variable, ignored; did you mean COMETMQ_FLUSH_DISK_TYPE?",
        "COMETMQ_X: unknown variable, ignored",
        "--set: brokerIP2: RocketMQ key, not used by CometMQ",
        '--set: unknown key "x", ignored',
        '--set: unknown key "logging", ignored',
        f'--set: unknown key "{"k" * 80}...", ignored',
    )


@pytest.mark.parametrize("pair", ["port", "=1", ""])
def test_a_pair_needs_a_key_and_an_equals_sign(pair: str) -> None:
    with pytest.raises(ConfigError, match=f"^--set {pair}: must be key=value$"):
        load_settings(environment={}, pairs=[pair])


def test_no_key_is_both_used_and_not_used() -> None:
    assert not NOT_USED & options_by_key().keys()


def test_the_nearest_key_of_a_key_is_itself() -> None:
    assert [nearest_key(key.upper()) for key in options_by_key()] == list(options_by_key())


# -- Explaining


def test_explain_option() -> None:
    explanation = explain_option("mapedFileSizeCommitLog")
    assert explanation == explain_option("COMETMQ_MAPPED_FILE_SIZE_COMMIT_LOG")
    assert explanation == explain_option("mapped_file_size_commit_log_bytes")
    assert explanation.key == "mappedFileSizeCommitLog"
    assert explanation.type == "number"
    assert explanation.default == "1073741824"
    assert explanation.default_readable == "1GiB"
    assert explanation.range == "at least 4096"
    assert explanation.unit == "bytes"
    assert explanation.needs_restart
    assert explain_option("readerCount").range == "1 to 16"
    assert explain_option("logFormat").range == "text or json"
    with pytest.raises(ConfigError, match=r"^logFormt: no such key; did you mean logFormat\?$"):
        explain_option("logFormt")


def test_show_without_origins() -> None:
    rows = {row.key: row for row in show_settings(BrokerSettings(max_message_size=1_048_576))}
    assert list(rows) == [explanation.key for explanation in explain_options()]
    assert (rows["maxMessageSize"].value, rows["maxMessageSize"].readable) == ("1048576", "1MiB")
    assert rows["maxMessageSize"].origin is Origin.SET
    assert rows["storePathRootDir"].origin is Origin.DEFAULT
    assert rows["mlockEnable"].value == "true"


def test_documentation_is_up_to_date() -> None:
    """If not, print it again: conf/explain.py says how."""
    assert (ROOT / "docs/configuration.md").read_text(encoding="utf-8") == as_markdown()


# -- Replication


@pytest.mark.parametrize(
    ("values", "port", "slaves", "remark"),
    [
        ({}, None, 0, False),
        ({"haListenPort": 1}, 1, 0, False),
        ({"haListenPort": 65_535, "inSyncReplicas": 1}, 65_535, 0, False),
        ({"brokerRole": "SYNC_MASTER"}, 10_912, 1, False),
        ({"brokerRole": "SYNC_MASTER", "listenPort": 20_911}, 20_912, 1, False),
        ({"brokerRole": "SYNC_MASTER", "haListenPort": 7, "inSyncReplicas": 2}, 7, 1, False),
        ({"brokerRole": "SYNC_MASTER", "inSyncReplicas": 65}, 10_912, 64, False),
        ({"brokerRole": "SYNC_MASTER", "inSyncReplicas": "1"}, 10_912, 0, True),
        ({"brokerRole": "SYNC_MASTER", "inSyncReplicas": ""}, 10_912, 1, False),
    ],
)
def test_who_is_waited_for_and_where(
    values: dict[str, Any], port: int | None, slaves: int, remark: bool
) -> None:
    settings = BrokerSettings.from_keys(values)
    assert (settings.ha_port, settings.slaves_wanted) == (port, slaves)
    assert bool(settings.replication_remark) is remark
    assert BrokerSettings.from_keys(settings.as_keys()) == settings


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"inSyncReplicas": 2},
            "inSyncReplicas = 2: nobody waits for a slave with brokerRole = A",
        ),
        ({"inSyncReplicas": 0}, "inSyncReplicas = 0: must be at least 1"),
        ({"inSyncReplicas": 66}, "inSyncReplicas = 66: must be at most 65"),
        ({"haTransferBatchSize": 1_023}, "haTransferBatchSize = 1023: must be at least 1024"),
        (
            {"maxHaTransferByteInSecond": 0},
            "maxHaTransferByteInSecond = 0: must be at least 1",
        ),
        ({"haTransferBatchSize": 4_194_293}, "haTransferBatchSize = 4194293: must be at most 4194"),
        ({"haAllowedPeers": "10.0.0.0/33"}, "haAllowedPeers = 10.0.0.0/33: must be addresses or"),
        ({"haAllowedPeers": "a-host"}, "haAllowedPeers = a-host: must be addresses or networks"),
        (
            {"haSendHeartbeatInterval": 20_000},
            "haSendHeartbeatInterval = 20000: must be below haHousekeepingInterval = 20000",
        ),
        (
            {"brokerRole": "SYNC_MASTER", "brokerId": 1},
            "brokerId = 1: must be 0 with brokerRole = SYNC_MASTER",
        ),
    ],
)
def test_impossible_replication_is_refused(values: dict[str, Any], said: str) -> None:
    (problem,) = problems_of(**values)
    assert problem.startswith(said)


def test_there_is_a_port_for_slaves() -> None:
    settings = BrokerSettings.from_keys({"brokerRole": "SYNC_MASTER", "listenPort": 65_535})
    with pytest.raises(ConfigError, match="slaves would come to 65536, 65535 is the last"):
        settings.check_for_writing()


def test_networks_of_slaves() -> None:
    settings = BrokerSettings.from_keys({"haAllowedPeers": " 10.0.0.7; 10.1.0.0/16 ,::1;"})
    assert [str(each) for each in settings.allowed_networks] == [
        "10.0.0.7/32", "10.1.0.0/16", "::1/128",
    ]  # fmt: skip
    assert BrokerSettings().allowed_networks == ()
