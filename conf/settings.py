# ruff: noqa: RUF009 - option() makes a dataclass field, it is not a default of its own.
"""The settings of a broker: every option with its default, its range and its meaning.

`BrokerSettings` is one flat, frozen object. It is declared in groups, each a class of its own, so
that a part of the broker can ask for no more than what it uses (`def __init__(self, settings:
FlushSettings)`). Defaults are RocketMQ's, except where a comment says why not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from cometmq.conf.delay_levels import DEFAULT_LEVELS, parse_levels
from cometmq.conf.engine import EngineSettings
from cometmq.conf.group import GroupSettings, Peer
from cometmq.conf.option import Option, as_text, option, options_of
from cometmq.conf.replication import ReplicationSettings
from cometmq.conf.rocketmq import NOT_USED, PROMISES
from cometmq.protocol.errors import ConfigError

# RocketMQ MessageExtEncoder: what a record may hold beyond its body.
RECORD_OVERHEAD_MAX_BYTES: Final = 65_536
# RocketMQ's largest frame, and ours: nothing larger is sent, whatever maxMessageSize says.
FRAME_MAX: Final = 16_777_216
# RocketMQ CommitLog, END_FILE_MIN_BLANK_LENGTH: the blank that closes a segment.
SEGMENT_END_BYTES: Final = 8
# RocketMQ IndexFile: a header, a slot, an entry. The sum of all is a Java int.
_INDEX_HEADER_BYTES: Final = 40
_INDEX_SLOT_BYTES: Final = 4
_INDEX_ENTRY_BYTES: Final = 20
_INDEX_FILE_BYTES_MAX: Final = 2**31 - 1

# How much alike two keys are, from 0 to 1: one is worth a hint, the other was meant.
_HINT: Final = 0.7
_SLIP: Final = 0.85

# Addresses that mean "all of this machine's", which nobody can connect to.
_ANY_ADDRESS: Final = ("0.0.0.0", "::", "[::]", "*")


class FlushDiskType(Enum):
    """When a message counts as stored."""

    ASYNC_FLUSH = "ASYNC_FLUSH"  # when it is written
    SYNC_FLUSH = "SYNC_FLUSH"  # when it is on the disk


class ArchiveOverflow(Enum):
    """What a disk that is too full does to a log that waits for its archive."""

    REFUSE_WRITES = "refuse-writes"  # nothing is deleted, and at the warning level nothing is taken
    DELETE = "delete"  # what the archive does not have is deleted too


class BrokerRole(Enum):
    """What a broker is to the others of its name."""

    ASYNC_MASTER = "ASYNC_MASTER"  # takes messages, does not wait for a slave
    SYNC_MASTER = "SYNC_MASTER"  # takes messages, waits for a slave
    SLAVE = "SLAVE"  # copies a master


class LogFormat(Enum):
    TEXT = "text"
    JSON = "json"


class LogLevel(Enum):
    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


def _a_name(value: str) -> str | None:
    # It becomes a part of file names and of topic names.
    if len(value) > 127 or re.search(r"[\s/\\]", value):
        return "must be at most 127 characters, without blanks and slashes"
    return None


def _delay_levels(value: str) -> str | None:
    try:
        parse_levels(value)
    except ValueError as error:
        return str(error)
    return None


def _a_cluster_name(value: str) -> str | None:
    return _a_name(value) if value else "must not be empty"


def _an_address(value: str) -> str | None:
    return "must be one address, without blanks" if re.search(r"\s|[;,/]", value) else None


def _a_bind_address(value: str) -> str | None:
    return _an_address(value) if value else "must not be empty"


def _name_servers(value: str) -> str | None:
    for address in filter(None, (part.strip() for part in value.split(";"))):
        port = re.fullmatch(r"(?:tcp://)?(?:[^\s:/]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", address)
        if port is None or not 1 <= int(port[1]) <= 65535:
            return 'must be host:port, several separated by ";"'
    return None


def _one_path(value: Path) -> str | None:
    # RocketMQ splits here; two folders taken for one name would look like an empty store.
    return "must be one folder; several are not supported yet" if "," in str(value) else None


def _hours_of_day(value: str) -> str | None:
    for hour in _split_hours(value):
        if not re.fullmatch(r"\s*[0-9]{1,2}\s*", hour) or int(hour) > 23:
            return 'must be hours from 00 to 23, several separated by ";"'
    return None


def _split_hours(value: str) -> list[str]:
    return value.rstrip(";").split(";")  # Java's split, too, drops what is empty at the end


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class IdentitySettings:
    """Identity"""

    broker_cluster_name: str = option(
        "DefaultCluster",
        key="brokerClusterName",
        check=_a_cluster_name,
        help="The cluster this broker belongs to.",
    )
    broker_name: str = option(
        "",
        key="brokerName",
        check=_a_name,
        help="The name clients know this broker by; a master and its slaves share it. "
        "Empty: the name under which the store was created; for a new store, the names of the "
        "machine and the folder.",
    )
    broker_id: int = option(
        0,
        key="brokerId",
        at_least=0,
        help="0 is the master of its name, larger numbers are slaves.",
    )
    broker_role: BrokerRole = option(
        BrokerRole.ASYNC_MASTER,
        key="brokerRole",
        help="Whether the broker takes messages itself, and whether it waits for a slave "
        "(SYNC_MASTER, see inSyncReplicas), or copies a master (SLAVE, see haMasterAddress).",
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class NetworkSettings:
    """Network"""

    namesrv_addr: str = option(
        "",
        key="namesrvAddr",
        check=_name_servers,
        help='The name servers to register with, as host:port, several separated by ";". '
        "Empty: the broker starts one of its own.",
    )
    bind_address: str = option(
        "127.0.0.1",  # RocketMQ listens on every interface; being reachable should be a decision
        key="bindAddress",
        aliases=("listenHost",),
        check=_a_bind_address,
        help="The address to listen on. 0.0.0.0 is every interface; brokerIP1 then has to say "
        "which address clients use.",
    )
    broker_ip1: str = option(
        "",
        key="brokerIP1",
        check=_an_address,
        help="The address told to clients and written into records. Empty: bindAddress.",
    )
    port: int = option(
        9876,
        key="port",
        at_least=0,
        at_most=65_535,
        help="The name server's port; the broker's other processes take the ones that follow. "
        "0: whatever is free, for all of them.",
    )
    listen_port: int = option(
        10_911,
        key="listenPort",
        at_least=1,
        at_most=65_535,
        help="The port for RocketMQ's own protocol, which is also the one written into records.",
    )
    max_connections: int = option(
        16_384,
        key="maxConnections",
        at_least=1,
        at_most=1_000_000,
        help="How many connections of clients each port takes at once; as many descriptors have to "
        "be allowed (ulimit -n), or it is fewer.",
    )
    max_connection_in_flight_bytes: int = option(
        134_217_728,
        key="maxConnectionInFlightBytes",
        at_least=33_554_432,  # two frames of the largest size
        at_most=2**40,
        help="How much of one connection may be in memory: what it has sent and nobody could take "
        "up yet, and what it was answered and has not received. Beyond that it is ended. More than "
        "the max_in_flight_bytes of its producers.",
    )

    @property
    def advertised_address(self) -> str:
        """Where clients reach this broker."""
        return self.broker_ip1 or self.bind_address

    @property
    def name_servers(self) -> tuple[str, ...]:
        """The name servers as `host:port`. Empty: start one."""
        parts = (part.strip().removeprefix("tcp://") for part in self.namesrv_addr.split(";"))
        return tuple(part for part in parts if part)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class StoreSettings:
    """Store"""

    store_path_root_dir: Path = option(
        # RocketMQ: store in the user's home. The current folder can be seen and thrown away.
        Path("store"),
        key="storePathRootDir",
        help="The folder of the store. A leading ~ is your home.",
    )
    store_path_commit_log: Path | None = option(
        None,
        key="storePathCommitLog",
        check=_one_path,
        help="The folder of the CommitLog: commitlog in the folder of the store, or the target of "
        "that link. For a log on another disk, mount the disk there or make commitlog a link.",
    )
    store_group: str = option(
        "",
        key="storeGroup",
        help="The group of this machine, by name or number, whose members may read the store's "
        "files: Spark, and consumers that map the store, under other users. Empty: only the user "
        "that the broker runs as.",
    )
    mapped_file_size_commit_log_bytes: int = option(
        1_073_741_824,
        key="mappedFileSizeCommitLog",
        aliases=("mapedFileSizeCommitLog",),  # RocketMQ 4.x
        at_least=4_096,
        help="The size of a CommitLog segment, any number of bytes. A message lies in one segment "
        "with all that belongs to it. A store has to be opened with the size it was written with.",
    )
    mapped_file_size_consume_queue_bytes: int = option(
        6_000_000,
        key="mappedFileSizeConsumeQueue",
        aliases=("mapedFileSizeConsumeQueue",),  # RocketMQ 4.x
        at_least=20,
        round_up_to=20,
        help="The size of a ConsumeQueue segment, rounded up to a multiple of 20. A store has to "
        "be opened with the size it was written with.",
    )
    max_message_size: int = option(
        4_194_304,
        key="maxMessageSize",
        at_least=1,
        help="The largest body a message may have that a client sends, at most 16 MiB with all "
        "that is said with it. It may be lowered: what is stored already stays, is replicated, and "
        "is delivered, after its delay and to be tried again as well.",
    )
    message_index_enable: bool = option(
        True,
        key="messageIndexEnable",
        help="Whether messages can be found by key.",
    )
    max_hash_slot_num: int = option(
        5_000_000,
        key="maxHashSlotNum",
        at_least=1,
        help="The number of hash slots in an index file. A store has to be opened with the number "
        "it was written with.",
    )
    max_index_num: int = option(
        20_000_000,
        key="maxIndexNum",
        at_least=2,  # entry 0 is never used
        help="The number of entries in an index file. A store has to be opened with the number it "
        "was written with.",
    )
    auto_message_version_on_topic_len: bool = option(
        True,
        key="autoMessageVersionOnTopicLen",
        help="Whether a record takes RocketMQ's second format when its topic's name is too long "
        "for the first, at more than 127 characters.",
    )
    enabled_append_prop_crc: bool = option(
        False,
        key="enabledAppendPropCRC",
        help="Whether each record ends in a checksum of the whole record, as RocketMQ 5.2 can.",
    )
    check_crc_on_recover: bool = option(
        True,
        key="checkCRCOnRecover",
        help="Whether recovery compares each message's body with its checksum.",
    )
    cut_log_at_damage: bool = option(
        False,
        key="cutLogAtDamage",
        help="RocketMQ's way: after a bad end the log ends at the first damaged record, and whole "
        "messages behind it are lost. Otherwise it is passed over.",
    )

    @property
    def commit_log_dir(self) -> Path:
        return self.store_path_commit_log or self.store_path_root_dir / "commitlog"

    @property
    def record_bytes_max(self) -> int:
        """The largest record that a client can have stored."""
        return self.max_message_size + RECORD_OVERHEAD_MAX_BYTES

    @property
    def stored_record_bytes_max(self) -> int:
        """The largest record that may lie in the log, here or at a master: maxMessageSize may have
        been, or be there, whatever lets a message through RocketMQ's largest frame."""
        return max(self.max_message_size, FRAME_MAX) + RECORD_OVERHEAD_MAX_BYTES

    @property
    def segment_remark(self) -> str:
        """What to know of segments that are smaller than the largest record; "" where none is."""
        segment = self.mapped_file_size_commit_log_bytes
        if segment >= self.record_bytes_max + SEGMENT_END_BYTES:
            return ""
        return (
            f"mappedFileSizeCommitLog = {segment}: a message lies in one segment with all that "
            f"belongs to it, so that one of {max(0, segment - SEGMENT_END_BYTES)} bytes is too "
            f"large, whatever maxMessageSize ({self.max_message_size}) says"
        )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class FlushSettings:
    """Flushing"""

    flush_disk_type: FlushDiskType = option(
        FlushDiskType.ASYNC_FLUSH,
        key="flushDiskType",
        help="ASYNC_FLUSH acknowledges a message when it is written: it survives the end of the "
        "process. SYNC_FLUSH when it is on the disk: it survives a power cut.",
    )
    sync_flush_timeout_ms: int = option(
        5_000,
        key="syncFlushTimeout",
        at_least=1,
        help="Under SYNC_FLUSH, how long an answer waits for the disk before it says so.",
    )
    flush_interval_commit_log_ms: int = option(
        500,
        key="flushIntervalCommitLog",
        at_least=1,
        help="Under ASYNC_FLUSH, the pause between two looks at what is not flushed yet.",
    )
    flush_commit_log_least_pages: int = option(
        4,
        key="flushCommitLogLeastPages",
        at_least=0,
        help="Under ASYNC_FLUSH, how many pages must wait before they are flushed. 0: any byte.",
    )
    flush_commit_log_thorough_interval_ms: int = option(
        10_000,
        key="flushCommitLogThoroughInterval",
        at_least=0,
        help="Under ASYNC_FLUSH, the longest time that anything stays unflushed, however little "
        "it is.",
    )
    flush_interval_consume_queue_ms: int = option(
        1_000,
        key="flushIntervalConsumeQueue",
        at_least=1,
        help="The pause between two looks at what is not flushed of the ConsumeQueues.",
    )
    flush_consume_queue_least_pages: int = option(
        2,
        key="flushConsumeQueueLeastPages",
        at_least=0,
        help="How many pages of a ConsumeQueue must wait before they are flushed. 0: any byte.",
    )
    flush_consume_queue_thorough_interval_ms: int = option(
        60_000,
        key="flushConsumeQueueThoroughInterval",
        at_least=0,
        help="The longest time that anything of a ConsumeQueue stays unflushed. The checkpoint "
        "is written along with it.",
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class SendSettings:
    """Sending"""

    max_in_flight_send_bytes: int = option(
        268_435_456,
        key="maxInFlightSendBytes",
        at_least=1,
        at_most=2**40,
        help="How much may wait to be stored or acknowledged. Beyond it producers are told that "
        "the broker is busy.",
    )
    wait_time_in_send_queue_ms: int = option(
        1_000,
        key="waitTimeMillsInSendQueue",
        at_least=1,
        help="Under SYNC_FLUSH, how long a send may have waited for the disk before further sends "
        "are told that the broker is busy. RocketMQ's default is 200, for its queue of requests.",
    )
    os_page_cache_busy_time_out_ms: int = option(
        1_000,
        key="osPageCacheBusyTimeOutMills",
        at_least=1,
        help="Sends that came while a put took longer than this are told that the broker is busy.",
    )
    hot_window_bytes: int = option(
        50_331_648,
        key="hotWindowBytes",
        at_least=0,
        at_most=2**40,
        help="How far ahead of the CommitLog's end its pages are made ready, and locked in memory "
        "where that is permitted. 0: not at all.",
    )
    hot_window_max_bytes: int = option(
        2_147_483_648,
        key="hotWindowMaxBytes",
        at_least=0,
        at_most=2**40,
        help="How far ahead pages are brought into memory for a writer that comes further than "
        "hotWindowBytes before it can be followed; at most an eighth of the machine's memory, and "
        "the segments that are there. No more than hotWindowBytes, such as 0: no further than "
        "that.",
    )
    mlock_enable: bool = option(
        True,
        key="mlockEnable",
        help="Whether to lock the pages of the hot window in memory. Without the permission the "
        "broker warns once and runs on.",
    )
    staged_lease_ms: int = option(
        86_400_000,
        key="stagedLease",
        at_least=1,
        help="How long a stage that is neither added to nor committed is kept, see docs/spark.md.",
    )
    max_staged_bytes: int = option(
        4_294_967_296,
        key="maxStagedBytes",
        at_least=1,
        at_most=2**40,
        help="What may wait in stages, of all sinks together.",
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ReadSettings:
    """Reading"""

    reader_count: int = option(
        1,
        key="readerCount",
        at_least=1,
        at_most=16,
        help="The number of processes that answer pulls and queries.",
    )
    max_filter_message_size: int = option(
        16_000,
        key="maxFilterMessageSize",
        at_least=20,
        help="How much of a ConsumeQueue, at 20 bytes a message, one pull looks at when its tags "
        "match little.",
    )
    enable_property_filter: bool = option(
        True,
        key="enablePropertyFilter",
        help="Whether consumers may choose messages by SQL92 expressions over their properties.",
    )
    long_polling_enable: bool = option(
        True,
        key="longPollingEnable",
        help="Whether a pull that finds nothing waits for a message.",
    )
    slave_read_enable: bool = option(
        False,
        key="slaveReadEnable",
        help="Whether consumers are advised to read from a slave what lies so far back that it is "
        "not in this machine's memory. A slave is read in any case while its master is away.",
    )
    access_message_in_memory_max_ratio_percent: int = option(
        40,
        key="accessMessageInMemoryMaxRatio",
        at_least=1,
        at_most=100,
        help="How much of the machine's memory the newest messages are expected to lie in; what "
        "lies further back is far behind (see slaveReadEnable).",
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class TopicSettings:
    """Topics and consumers"""

    auto_create_topic_enable: bool = option(
        True,
        key="autoCreateTopicEnable",
        help="Whether sending to a topic that does not exist creates it.",
    )
    max_topics: int = option(
        200_000,
        key="maxTopics",
        at_least=1,
        at_most=10_000_000,
        help="The most topics that the broker creates, by itself or when told to. Each costs about "
        "1 KiB of memory in the broker, and 250 bytes in config/topics.json.",
    )
    auto_create_subscription_group: bool = option(
        True,
        key="autoCreateSubscriptionGroup",
        help="Whether consuming as a group that does not exist creates it.",
    )
    max_groups: int = option(
        200_000,
        key="maxGroups",
        at_least=1,
        at_most=10_000_000,
        help="The most consumer groups that the broker creates, by itself or when told to. Each "
        "costs about 2 KiB of memory, and 500 bytes in config/subscriptionGroup.json.",
    )
    default_topic_queue_nums: int = option(
        8,
        key="defaultTopicQueueNums",
        at_least=1,
        at_most=65_535,
        help="The most queues that a topic is created with when a message creates it.",
    )
    flush_consumer_offset_interval_ms: int = option(
        5_000,
        key="flushConsumerOffsetInterval",
        at_least=1,
        help="The pause between two writes of the consumers' offsets. After a crash, what was "
        "consumed since may be delivered again.",
    )
    consumer_session_timeout_ms: int = option(
        10_000,
        key="consumerSessionTimeout",
        at_least=100,
        help="How long a consumer may be silent before its queues go to the others of its group.",
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class DelaySettings:
    """Messages for later"""

    message_delay_level: str = option(
        DEFAULT_LEVELS,
        key="messageDelayLevel",
        check=_delay_levels,
        help="How long a message of each delay level waits: numbers with s, m, h or d, separated "
        "by a blank; level 1 is the first. Retries wait by level 3 and those after it.",
    )
    flush_delay_offset_interval_ms: int = option(
        10_000,
        key="flushDelayOffsetInterval",
        at_least=1,
        help="The pause between two writes of delayOffset.json. A RocketMQ broker that opens the "
        "store after a crash delivers again what was delivered since; this one does not.",
    )
    mapped_file_size_timer_log_bytes: int = option(
        104_857_600,
        key="mappedFileSizeTimerLog",
        at_least=1_024,
        help="The size of the files in timerlog/, which say when messages with a time of their own "
        "are due; made with the first such message, and taken from the disk as they fill.",
    )

    transaction_time_out_ms: int = option(
        6_000,
        key="transactionTimeOut",
        at_least=1,
        help="How old a message of a transaction without an end is when its producers are asked "
        "first. No local transaction should take longer.",
    )
    transaction_check_interval_ms: int = option(
        30_000,
        key="transactionCheckInterval",
        at_least=1,
        help="The interval between two checks of a message.",
    )
    transaction_check_max: int = option(
        15,
        key="transactionCheckMax",
        at_least=1,
        help="After so many questions a message goes to TRANS_CHECK_MAX_TIME_TOPIC, and its "
        "transaction is over. Rounds in which no producer was there count too.",
    )
    store_reply_message_enable: bool = option(
        True,
        key="storeReplyMessageEnable",
        help="Replies to requests are stored, too, in the topic <brokerClusterName>_REPLY_TOPIC; "
        "off: they only go to their requesters.",
    )

    @property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """How long each level waits; level 1 is the first."""
        return parse_levels(self.message_delay_level)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class CleaningSettings:
    """Cleaning"""

    file_reserved_time_hours: int = option(
        72,
        key="fileReservedTime",
        at_least=1,
        help="How long a segment is kept after it was last written to.",
    )
    delete_when: str = option(
        "04",
        key="deleteWhen",
        check=_hours_of_day,
        help="The hours of the day, local time, in which old segments are deleted, separated "
        'by ";".',
    )
    disk_max_used_space_ratio_percent: int = option(
        75,
        key="diskMaxUsedSpaceRatio",
        at_least=10,
        at_most=95,
        help="A disk fuller than this: old segments are deleted at any hour.",
    )
    disk_space_clean_forcibly_ratio_percent: int = option(
        85,
        key="diskSpaceCleanForciblyRatio",
        at_least=30,
        at_most=99,
        help="A disk fuller than this, with less than twice diskFreeBytesMin free: segments are "
        "deleted although they are not old.",
    )
    disk_space_warning_level_ratio_percent: int = option(
        90,
        key="diskSpaceWarningLevelRatio",
        at_least=35,
        at_most=99,
        help="A disk fuller than this, with less than diskFreeBytesMin free: messages are refused "
        "until there is room again.",
    )
    disk_free_bytes_min: int = option(
        2_147_483_648,
        key="diskFreeBytesMin",
        at_least=0,
        at_most=2**50,
        help="While so much of the disk is free, messages are taken however full it is in percent; "
        "while twice as much is free, nothing is deleted that is not old. 0: the percentages alone "
        "decide, as in RocketMQ.",
    )
    never_delete_unread: bool = option(
        False,
        key="neverDeleteUnread",
        help="Whether segments that are not old stay on a disk that is too full as long as no "
        "consumer group has read all of them: then messages are refused instead. Old ones go.",
    )
    clean_resource_interval_ms: int = option(
        10_000,
        key="cleanResourceInterval",
        at_least=1,
        help="The pause between two looks for something to delete.",
    )
    verify_log_bytes_per_second: int = option(
        8_388_608,
        key="verifyLogBytesPerSecond",
        at_least=0,
        at_most=2**40,
        help="How fast the segments of the log that are full are read again, to find damage: each "
        "record's place, sizes and CRC. 0: not at all. A replica of a group ends of damage.",
    )
    verify_log_interval_ms: int = option(
        604_800_000,
        key="verifyLogInterval",
        at_least=1,
        help="From one beginning of that to the next, at least. A start begins with it.",
    )
    delete_file_batch_max: int = option(
        10,
        key="deleteFileBatchMax",
        at_least=1,
        help="How many segments are deleted at a time.",
    )
    clean_file_forcibly_enable: bool = option(
        True,
        key="cleanFileForciblyEnable",
        help="Whether segments that are not old may be deleted when the disk is too full.",
    )
    delete_commit_log_files_interval_ms: int = option(
        100,
        key="deleteCommitLogFilesInterval",
        aliases=("deletePhysicFilesInterval",),
        at_least=1,
        help="The pause between two steps of removing CommitLog segments; a step gives at most "
        "64 MiB back to the disk.",
    )
    delete_consume_queue_files_interval_ms: int = option(
        100,
        key="deleteConsumeQueueFilesInterval",
        at_least=1,
        help="The pause between two queues of which ConsumeQueue segments are deleted.",
    )
    destroy_mapped_file_interval_forcibly_ms: int = option(
        120_000,
        key="destroyMapedFileIntervalForcibly",
        aliases=("destroyMappedFileIntervalForcibly",),
        at_least=1,
        help="How long a segment that is to be deleted waits for a process that still uses it, "
        "before it is removed all the same.",
    )
    redelete_hanged_file_interval_ms: int = option(
        120_000,
        key="redeleteHangedFileInterval",
        at_least=1,
        help="The pause before a removal that has failed is tried again.",
    )
    recycled_segments_max: int = option(
        2,
        key="recycledSegmentsMax",
        at_least=0,
        at_most=1_000,
        help="How many deleted segments are kept to be used again, which is cheaper than to make "
        "new ones; none while the disk is fuller than diskSpaceCleanForciblyRatio.",
    )
    archive_hold: bool = option(
        False,
        key="archiveHold",
        help="Whether segments are only deleted when the archive has them, see docs/cleaning.md.",
    )
    archive_overflow: ArchiveOverflow = option(
        ArchiveOverflow.REFUSE_WRITES,
        key="archiveOverflow",
        help="With archiveHold, when the disk is fuller than diskSpaceCleanForciblyRatio: "
        "refuse-writes keeps what is not archived, delete does not.",
    )

    @property
    def delete_hours(self) -> frozenset[int]:
        """The hours of the day of `deleteWhen`, 0 to 23."""
        return frozenset(int(hour) for hour in _split_hours(self.delete_when))


PARTS: Final = (
    "broker", "commitlog", "allocator", "dispatcher", "flush", "cleaner", "reader", "coordinator",
    "scheduler", "namesrv", "ha",
)  # fmt: skip


def _split_levels(text: str) -> list[tuple[str, str]]:
    pairs = (entry.partition("=") for entry in text.replace(",", ";").split(";") if entry.strip())
    return [(part.strip(), level.strip().upper()) for part, _, level in pairs]


def _levels_of_parts(text: str) -> str | None:
    for part, level in _split_levels(text):
        if part not in PARTS:
            return f"must name a process, and {part!r} is none: {', '.join(PARTS)}"
        if level not in LogLevel.__members__:
            return f"must give {part} a level: one one of {', '.join(LogLevel.__members__)}"
    return None


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class LoggingSettings:
    """Logging"""

    log_format: LogFormat = option(
        LogFormat.TEXT,
        key="logFormat",
        help="text is for people, json writes one JSON object a line.",
    )
    log_level: LogLevel = option(
        LogLevel.INFO,
        key="logLevel",
        help="Nothing below this level is logged.",
    )
    log_levels: str = option(
        "",
        key="logLevels",
        check=_levels_of_parts,
        help="Levels that differ, by process: `flush=DEBUG;cleaner=WARNING`. Processes: broker, "
        "commitlog, allocator, dispatcher, flush, cleaner, reader, coordinator, namesrv, ha.",
    )
    log_file: str = option(
        "",
        key="logFile",
        help="The file that all processes of the broker log to, instead of standard error. It may "
        "be moved at any time: then a new one is created. Its mode is 0640, whatever the umask; an "
        "existing file keeps its mode, and the files that follow it get the same.",
    )
    log_file_max_bytes: int = option(
        67_108_864,
        key="logFileMaxBytes",
        at_least=0,
        at_most=2**40,
        help="A log file of so many bytes is renamed to `.1`, and a new one begun. 0: never.",
    )
    log_file_count: int = option(
        5,
        key="logFileCount",
        at_least=0,
        at_most=1_000,
        help="How many log files that were renamed are kept.",
    )

    def log_level_of(self, part: str) -> LogLevel:
        """The level of a process, named without its number."""
        levels = dict(_split_levels(self.log_levels))
        return LogLevel(levels.get(part, self.log_level.value))


# In the order of the documentation.
GROUPS: Final = (
    IdentitySettings,
    NetworkSettings,
    StoreSettings,
    FlushSettings,
    SendSettings,
    ReadSettings,
    TopicSettings,
    DelaySettings,
    CleaningSettings,
    ReplicationSettings,
    GroupSettings,
    EngineSettings,
    LoggingSettings,
)


@dataclass(frozen=True, kw_only=True)
class BrokerSettings(
    IdentitySettings,
    NetworkSettings,
    StoreSettings,
    FlushSettings,
    SendSettings,
    ReadSettings,
    TopicSettings,
    DelaySettings,
    CleaningSettings,
    ReplicationSettings,
    GroupSettings,
    EngineSettings,
    LoggingSettings,
):
    """All settings of a broker, checked when they are made and frozen afterwards.

        BrokerSettings(store_path_root_dir="./store", max_message_size=1_048_576)

    A path may be given as text; a size, a time or a choice may be given as it is written in a
    broker.conf. `dataclasses.replace` makes a changed copy, which is checked again.

    Raises:
        ConfigError: with every problem that was found.
    """

    def __post_init__(self) -> None:
        problems: list[str] = []
        for attribute, declared in options_of(BrokerSettings).items():
            try:
                value = declared.take(getattr(self, attribute))
                object.__setattr__(self, attribute, value)
            except ConfigError as error:
                problems.extend(error.problems)
        if not problems:
            problems.extend(self._contradictions())
        if problems:
            raise ConfigError(*problems)

    def _contradictions(self) -> Iterable[str]:
        yield from self._contradictions_of_role()
        index_file_bytes = (
            _INDEX_HEADER_BYTES
            + _INDEX_SLOT_BYTES * self.max_hash_slot_num
            + _INDEX_ENTRY_BYTES * self.max_index_num
        )
        if index_file_bytes > _INDEX_FILE_BYTES_MAX:
            yield (
                f"maxHashSlotNum = {self.max_hash_slot_num}, maxIndexNum = {self.max_index_num}: "
                f"an index file of {index_file_bytes} bytes, at most {_INDEX_FILE_BYTES_MAX}"
            )

    @property
    def is_slave(self) -> bool:
        return self.broker_role is BrokerRole.SLAVE

    def _contradictions_of_role(self) -> Iterable[str]:
        role = f"brokerRole = {self.broker_role.value}"
        if self.is_slave and self.broker_id == 0:
            yield f"brokerId = 0: must be larger with {role}, another one for each slave"
        if not self.is_slave and self.broker_id != 0:
            yield f"brokerId = {self.broker_id}: must be 0 with {role}"
        if self.is_slave and not self.broker_name:
            yield f"brokerName: must be the master's with {role}"
        if self.is_slave and not (self.ha_master_address or self.is_in_group):
            yield f"haMasterAddress: must be the master's host:port with {role}"
        if (
            self.in_sync_replicas not in (None, 1)
            and self.broker_role is not BrokerRole.SYNC_MASTER
        ):
            yield (
                f"inSyncReplicas = {self.in_sync_replicas}: nobody waits for a slave with "
                f"{role}; SYNC_MASTER does"
            )
        if self.min_in_sync_replicas not in (None, 1) and not self.is_in_group:
            yield (
                f"minInSyncReplicas = {self.min_in_sync_replicas}: nobody counts replicas without "
                "a group (enableDLegerCommitLog); SYNC_MASTER waits for inSyncReplicas"
            )
        if self.ha_send_heartbeat_interval_ms >= self.ha_housekeeping_interval_ms:
            yield (
                f"haSendHeartbeatInterval = {self.ha_send_heartbeat_interval_ms}: must be below "
                f"haHousekeepingInterval = {self.ha_housekeeping_interval_ms}, or who is idle is "
                "disconnected"
            )

    @property
    def ha_port(self) -> int | None:
        """Where slaves come to this broker; None: it has no replication."""
        if self.broker_role is BrokerRole.SLAVE:
            return None
        if self.ha_listen_port == 0 and self.broker_role is BrokerRole.SYNC_MASTER:
            return self.listen_port + 1  # RocketMQ's default
        return self.ha_listen_port or None

    @property
    def group_name(self) -> str:
        return self.d_leger_group or self.broker_name

    @property
    def own_peer(self) -> Peer:
        """This replica. Raises ConfigError where dLegerPeers does not name it."""
        for peer in self.group_peers:
            if peer.replica == self.d_leger_self_id:
                return peer
        raise ConfigError(
            f"dLegerSelfId = {self.d_leger_self_id!r}: none of dLegerPeers = {self.d_leger_peers}"
        )

    def for_run(self, epoch: int) -> BrokerSettings:
        """A replica's settings for a run as the master of an epoch, or (0) as a follower."""
        if epoch:
            return replace(self, broker_role=BrokerRole.ASYNC_MASTER, broker_id=0)
        number = 1 + [peer.replica for peer in self.group_peers].index(self.d_leger_self_id)
        return replace(self, broker_role=BrokerRole.SLAVE, broker_id=number)

    @property
    def slaves_wanted(self) -> int:
        """How many slaves must have a message before it is acknowledged."""
        if self.broker_role is not BrokerRole.SYNC_MASTER:
            return 0
        return 1 if self.in_sync_replicas is None else self.in_sync_replicas - 1

    @property
    def slave_wait_s(self) -> float:
        """How long an answer may wait for slaves."""
        waits = self.slaves_wanted or self.is_in_group
        return self.slave_timeout_ms / 1000 if waits else 0.0

    @property
    def replication_remark(self) -> str:
        """What to know of a SYNC_MASTER that waits for nobody; "" for any other."""
        if self.broker_role is not BrokerRole.SYNC_MASTER or self.slaves_wanted:
            return ""
        return (
            "brokerRole = SYNC_MASTER, inSyncReplicas = 1: messages are acknowledged without any "
            "slave, as under ASYNC_MASTER; 2 waits for one"
        )

    def check_for_writing(self) -> None:
        """Refuse what only someone who reads a store can live with. A broker calls this.

        Not a part of construction: a store can be read, whatever the settings of its writer were.

        Raises:
            ConfigError: with every problem that was found.
        """
        problems = [
            *self._no_room_for_one_message(),
            *self._unreachable(),
            *self._no_port_for_slaves(),
            *self._no_replica(),
        ]
        if problems:
            raise ConfigError(*problems)

    def _no_room_for_one_message(self) -> Iterable[str]:
        if self.max_in_flight_send_bytes < self.record_bytes_max:
            yield (
                f"maxInFlightSendBytes = {self.max_in_flight_send_bytes}: must be at least "
                f"maxMessageSize + {RECORD_OVERHEAD_MAX_BYTES} = {self.record_bytes_max}"
            )

    def _no_port_for_slaves(self) -> Iterable[str]:
        if self.ha_port is not None and self.ha_port > 65_535:
            yield (
                f"listenPort = {self.listen_port}: slaves would come to {self.ha_port}, 65535 is "
                "the last; set haListenPort"
            )

    def _no_replica(self) -> Iterable[str]:
        """What cannot be a replica of a group. Its runs have roles and ids of their own; so these
        are looked at here, where the broker's own settings are."""
        if not self.is_in_group:
            return
        if self.broker_role is not BrokerRole.ASYNC_MASTER or self.broker_id != 0:
            yield (
                f"brokerRole = {self.broker_role.value}, brokerId = {self.broker_id}: must be "
                "ASYNC_MASTER and 0 with enableDLegerCommitLog, the group elects its master"
            )
        if self.ha_listen_port:
            yield f"haListenPort = {self.ha_listen_port}: a group has no other slaves; leave it out"
        if self.ha_master_address:
            yield (
                f"haMasterAddress = {self.ha_master_address}: a group elects its master; leave it "
                "out"
            )
        if not self.broker_name:
            yield "brokerName: must be given in a group, the same for all of its replicas"
        yield from self.group_problems(self.group_name)
        yield from self.engine_problems()

    def _unreachable(self) -> Iterable[str]:
        if self.advertised_address.strip("[]") in _ANY_ADDRESS:
            key = "brokerIP1" if self.broker_ip1 else "bindAddress"
            yield (
                f"{key} = {self.advertised_address}: nobody can connect to that; "
                "set brokerIP1 to the address clients use"
            )

    @classmethod
    def from_keys(cls, values: Mapping[str, object]) -> BrokerSettings:
        """Settings from RocketMQ's keys: `{"mappedFileSizeCommitLog": 65536}`.

        Raises:
            ConfigError: for a bad value, and for a key that does not exist. Whoever reads a file
                made for another broker wants `load_settings`, which warns instead.
        """
        options = options_by_key()
        unknown = [key for key in values if key not in options]
        if unknown:
            raise ConfigError(*(f"{key}: no such key{did_you_mean(key)}" for key in unknown))
        arguments: dict[str, Any] = {options[key].attribute: value for key, value in values.items()}
        return cls(**arguments)

    def as_keys(self) -> dict[str, str | int | bool]:
        """Every key with its value, ready for JSON; `from_keys` makes the same settings of it."""
        values = {}
        for attribute, declared in options_of(BrokerSettings).items():
            value = getattr(self, attribute)
            values[declared.key] = value if isinstance(value, int) else as_text(value)
        return values


_OPTIONS_BY_KEY: Final = MappingProxyType(
    {name: declared for declared in options_of(BrokerSettings).values() for name in declared.names}
)


def options_by_key() -> Mapping[str, Option]:
    """Every key and alias, with the option it sets."""
    return _OPTIONS_BY_KEY


def nearest_key(key: str) -> str | None:
    """The key that someone who wrote `key` may have meant."""
    return _nearest(key, _OPTIONS_BY_KEY, _HINT)


def mistyped_key(key: str) -> str | None:
    """The key that someone who wrote `key` must have meant, one that means something here."""
    return _nearest(key, (*PROMISES, *_OPTIONS_BY_KEY), _SLIP)


def _nearest(key: str, names: Iterable[str], cutoff: float) -> str | None:
    """`-`, `_`, `.`, blanks and capitals count for nothing."""
    if len(key) > 100:  # the comparison takes the square of the length
        return None
    import difflib  # nobody needs it who makes no mistake

    by_letters = {_letters(name): name for name in names}
    found = difflib.get_close_matches(_letters(key), by_letters, n=1, cutoff=cutoff)
    return by_letters[found[0]] if found else None


def _letters(key: str) -> str:
    return re.sub(r"[-_.\s]", "", key).lower()


def did_you_mean(key: str) -> str:
    if key in NOT_USED:
        promise = PROMISES.get(key)
        return " here, RocketMQ has it" + (f"; {promise.instead}" if promise is not None else "")
    nearest = nearest_key(key)
    return f"; did you mean {nearest}?" if nearest is not None else ""
