"""Where settings come from: RocketMQ's broker.conf, the environment, and `--set key=value`.

The later of these wins: default, file, environment, `--set`. An existing broker.conf is read as it
stands. What it asks for and CometMQ does not have is named in a warning.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from cometmq.conf.option import ConfigError, environment_variable
from cometmq.conf.settings import BrokerSettings, did_you_mean, nearest_key, options_by_key

_ENVIRONMENT_PREFIX: Final = "COMETMQ_"
# No settings: of clients, of benchmarks, of tests.
_OTHERS: Final = ("COMETMQ_NAME_SERVER", "COMETMQ_CACHE", "COMETMQ_TEST_")

# Java's Properties ends a line, and takes for blank, nothing but these.
_LINE_END: Final = re.compile("\r\n|\r|\n")
_BLANKS: Final = " \t\f"
_KEY: Final = re.compile(r"((?:[^\\=: \t\f]|\\.)*)[ \t\f]*[=:]?[ \t\f]*", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_ESCAPED: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


class Origin(Enum):
    """Who set a value. Each overrules those before it."""

    DEFAULT = "default"
    FILE = "file"
    ENV = "env"
    SET = "set"


@dataclass(frozen=True)
class Property:
    """One entry of a properties file."""

    key: str
    value: str
    line: int  # its first line, from 1


@dataclass(frozen=True)
class Assignment:
    """One value that somebody gave, before it is checked."""

    key: str
    value: str
    origin: Origin
    place: str  # for people: "broker.conf, line 3", "COMETMQ_PORT", "--set"


class Loaded(NamedTuple):
    """Settings, what to tell the user about them, and where each value came from."""

    settings: BrokerSettings
    warnings: tuple[str, ...]
    origins: Mapping[str, Assignment]  # by key; a key that nobody set is not in it


def load_settings(
    file: str | os.PathLike[str] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    pairs: Iterable[str] = (),
) -> Loaded:
    """Settings from all that apply.

    Args:
        file: a broker.conf, in RocketMQ's format.
        environment: `COMETMQ_FLUSH_DISK_TYPE=SYNC_FLUSH` and the like; None = the process's own.
        pairs: `key=value` each, as given to `--set`.

    Raises:
        ConfigError: with every problem that was found, and the place of each.
    """
    given = [
        *(_from_file(Path(file)) if file is not None else ()),
        *_from_environment(os.environ if environment is None else environment),
        *_from_pairs(pairs),
    ]
    options = options_by_key()
    known = [assignment for assignment in given if assignment.key in options]
    warnings = [_unknown(assignment) for assignment in given if assignment.key not in options]
    warnings += _given_twice(known)
    effective = {options[assignment.key].key: assignment for assignment in known}
    return Loaded(_settings(effective), tuple(warnings), MappingProxyType(effective))


def read_properties(text: str) -> Iterator[Property]:
    """The entries of a Java properties file, in their order; a key may come more than once.

    Raises:
        ConfigError: for a `\\u` without four hexadecimal digits, as in Java.
    """
    for number, line in _logical_lines(text):
        match = _KEY.match(line)
        assert match is not None  # it matches the empty text
        try:
            yield Property(_unescape(match[1]), _unescape(line[match.end() :]), number)
        except ValueError as error:
            raise ConfigError(f"line {number}: {error}") from None


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines without comments, each joined with those that continue it, and its first number."""
    begun, first = "", 0
    for number, line in enumerate(_LINE_END.split(text), start=1):
        line = line.lstrip(_BLANKS)
        if not begun:
            first = number
            if not line or line[0] in "#!":
                continue
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:  # the last one stands for itself and not for the one before it
            begun += line[:-1]
            continue
        if begun + line:
            yield first, begun + line
        begun = ""
    if begun:
        yield first, begun


def _unescape(text: str) -> str:
    def meaning(match: re.Match[str]) -> str:
        escaped = match[1]
        if escaped[0] != "u":
            return _ESCAPED.get(escaped, escaped)
        if len(escaped) == 1:
            raise ValueError("\\u must be followed by four hexadecimal digits")
        return chr(int(escaped[1:], 16))

    # Two escapes can be the halves of one character. A half that stays alone is refused when it is
    # taken for a setting.
    utf_16 = _ESCAPE.sub(meaning, text).encode("utf-16-le", "surrogatepass")
    return utf_16.decode("utf-16-le", "surrogatepass")


def _from_file(file: Path) -> Iterator[Assignment]:
    try:
        content = file.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{_shown(str(file))}: cannot be read: {reason}") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")  # what Java takes a properties file to be
    try:
        for entry in read_properties(text):
            place = f"{_shown(file.name)}, line {entry.line}"
            yield Assignment(entry.key, entry.value, Origin.FILE, place)
    except ConfigError as error:
        name = _shown(file.name)
        raise ConfigError(*(f"{name}, {problem}" for problem in error.problems)) from None


def _from_environment(environment: Mapping[str, str]) -> Iterator[Assignment]:
    keys = {environment_variable(key): key for key in (*NOT_USED, *options_by_key())}
    for name in sorted(environment):
        if name.startswith(_ENVIRONMENT_PREFIX) and not name.startswith(_OTHERS):
            yield Assignment(keys.get(name, name), environment[name], Origin.ENV, _shown(name))


def _from_pairs(pairs: Iterable[str]) -> Iterator[Assignment]:
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {_shown(pair)}: must be key=value")
        yield Assignment(key.strip(), value, Origin.SET, "--set")


def _settings(effective: Mapping[str, Assignment]) -> BrokerSettings:
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, assignment in effective.items():
        declared = options_by_key()[key]
        try:
            values[declared.attribute] = declared.take(assignment.value)
        except ConfigError as error:
            problems.extend(f"{problem} ({assignment.place})" for problem in error.problems)
    if problems:
        raise ConfigError(*problems)
    return BrokerSettings(**values)


def _unknown(assignment: Assignment) -> str:
    key, place = _shown(assignment.key), assignment.place
    if assignment.key in NOT_USED:
        return f"{place}: {key}: RocketMQ key, not used by CometMQ"
    if assignment.origin is not Origin.ENV:
        return f'{place}: unknown key "{key}", ignored{did_you_mean(assignment.key)}'
    nearest = nearest_key(place.removeprefix(_ENVIRONMENT_PREFIX).replace("_", ""))
    hint = f"; did you mean {environment_variable(nearest)}?" if nearest is not None else ""
    return f"{place}: unknown variable, ignored{hint}"


def _given_twice(assignments: Iterable[Assignment]) -> Iterator[str]:
    """One source that sets an option twice contradicts itself; only the last value counts."""
    seen: dict[tuple[str, Origin], Assignment] = {}
    for assignment in assignments:
        option_key = options_by_key()[assignment.key].key
        earlier = seen.get((option_key, assignment.origin))
        if earlier is not None and earlier.value.strip() != assignment.value.strip():
            yield (
                f"{assignment.place}: {assignment.key} overrules {earlier.key} ({earlier.place})"
            )
        seen[option_key, assignment.origin] = assignment


def _shown(key: str) -> str:
    short = key if len(key) <= 80 else key[:80] + "..."
    return short if short.isprintable() else ascii(short)


# Keys of RocketMQ's MessageStoreConfig, BrokerConfig and Netty configurations, of 4.x and 5.x,
# that a broker.conf may hold and that have no effect here.
_ROCKETMQ_KEYS: Final = """
    maxTransferBytesOnMessageInMemory
    maxTransferCountOnMessageInMemory maxTransferBytesOnMessageInDisk
    maxTransferCountOnMessageInDisk accessMessageInMemoryMaxRatio
    storePathConsumeQueue storePathIndex storeCheckpoint abortFile storePathEpochFile
    storePathBrokerIdentity storePathDLedgerCommitLog readOnlyCommitLogStorePaths storeType
    mapperFileSizeBatchConsumeQueue enableConsumeQueueExt mappedFileSizeConsumeQueueExt
    bitMapLengthConsumeQueueExt mappedFileSizeTimerLog compactionMappedFileSize
    compactionCqMappedFileSize enableCompaction maxTopicLength messageIndexSafe maxMsgsNumBatch
    defaultQueryMaxNum flushCommitLogTimed commitIntervalCommitLog commitCommitLogLeastPages
    commitCommitLogThoroughInterval flushLeastPagesWhenWarmMapedFile warmMapedFileEnable
    transientStorePoolEnable transientStorePoolSize fastFailIfNoBufferInStorePool
    writeWithoutMmap putConsumeQueueDataByFileChannel wakeCommitWhenPutMessage
    wakeFlushWhenPutMessage useReentrantLockWhenPutMessage useABSLock topicQueueLockNum
    slaveTimeout putMessageTimeout forceVerifyPropCRC travelCqFileNumWhenGetMessage
    offsetCheckInSlave diskFallRecorded readUnCommitted recheckReputOffsetFromCq
    duplicationEnable replicasPerDiskPartition logicalDiskSpaceCleanForciblyThreshold
    putMsgIndexHightWater debugLockEnable correctLogicMinOffsetForceInterval mappedFileSwapEnable
    haListenPort haSendHeartbeatInterval haHousekeepingInterval haTransferBatchSize
    haMasterAddress haMaxGapNotInSync haSlaveFallbehindMax haFlowControlEnable
    maxHaTransferByteInSecond haMaxTimeSlaveNotCatchup totalReplicas inSyncReplicas
    minInSyncReplicas allAckInSyncStateSet enableAutoInSyncReplicas syncMasterFlushOffsetWhenStartup
    syncFromLastFile asyncLearner messageDelayLevel flushDelayOffsetInterval
    enableScheduleMessageStats enableScheduleAsyncDeliver scheduleAsyncDeliverMaxPendingLimit
    timerWheelEnable timerPrecisionMs timerRollWindowSlot timerMaxDelaySec timerFlushIntervalMs
    timerGetMessageThreadNum timerPutMessageThreadNum timerCongestNumEachSlot
    timerSkipUnknownError timerEnableRetryUntilSuccess timerEnableCheckMetrics
    timerCheckMetricsWhen timerStopEnqueue timerStopDequeue timerWarmEnable timerEnableDisruptor
    timerInterceptDelayLevel enableLmq enableMultiDispatch maxLmqConsumeQueueNum
    dataReadAheadEnable coldDataFlowControlEnable coldDataScanEnable
    enableBuildConsumeQueueConcurrently batchDispatchRequestThreadPoolNums
    enableDLegerCommitLog dLegerGroup dLegerPeers dLegerSelfId preferredLeaderId
    isEnableBatchPush rocketmqHome brokerConfigPath brokerIP2 brokerPermission
    recoverConcurrently recoverThreadPoolNums shortPollingTimeMills transferMsgByHeap
    slaveReadEnable enablePropertyFilter enableCalcFilterBitMap filterSupportRetry
    expectConsumerNumUseFilter maxErrorRateOfBloomFilter filterDataCleanTimeSpan
    transactionTimeOut transactionCheckMax transactionCheckInterval transactionOpMsgMaxSize
    transactionOpBatchInterval reviveQueueNum reviveInterval reviveScanTime reviveMaxSlow
    enablePopBufferMerge popCkStayBufferTime popCkStayBufferTimeOut popCkMaxBufferSize
    popCkOffsetMaxQueueSize enablePopBatchAck enablePopLog enableSkipLongAwaitingAck
    popPollingSize popPollingMapSize maxPopPollingSize consumerOffsetUpdateVersionStep
    delayOffsetUpdateVersionStep brokerFastFailureEnable
    waitTimeMillsInPullQueue waitTimeMillsInLitePullQueue waitTimeMillsInHeartbeatQueue
    waitTimeMillsInTransactionQueue waitTimeMillsInAckQueue startAcceptSendRequestTimeStamp
    useServerSideResetOffset configManagerVersion regionId traceOn traceTopicEnable
    msgTraceTopicName clusterTopicEnable brokerTopicEnable messageStorePlugIn
    sendMessageThreadPoolNums putMessageFutureThreadPoolNums pullMessageThreadPoolNums
    litePullMessageThreadPoolNums ackMessageThreadPoolNums processReplyMessageThreadPoolNums
    queryMessageThreadPoolNums adminBrokerThreadPoolNums clientManageThreadPoolNums
    consumerManageThreadPoolNums loadBalanceProcessorThreadPoolNums heartbeatThreadPoolNums
    endTransactionThreadPoolNums sendThreadPoolQueueCapacity putThreadPoolQueueCapacity
    pullThreadPoolQueueCapacity litePullThreadPoolQueueCapacity ackThreadPoolQueueCapacity
    replyThreadPoolQueueCapacity queryThreadPoolQueueCapacity clientManagerThreadPoolQueueCapacity
    consumerManagerThreadPoolQueueCapacity heartbeatThreadPoolQueueCapacity
    endTransactionPoolQueueCapacity adminBrokerThreadPoolQueueCapacity
    loadBalanceThreadPoolQueueCapacity flushConsumerOffsetHistoryInterval
    rejectTransactionMessage fetchNameSrvAddrByDnsLookup fetchNamesrvAddrByAddressServer
    notifyConsumerIdsChangedEnable highSpeedMode commercialEnable commercialTimerCount
    commercialTransCount commercialBigCount commercialBaseCount commercialSizePerMsg
    accountStatsEnable accountStatsPrintZeroValues registerBrokerTimeoutMills
    sendHeartbeatTimeoutMillis disableConsumeIfConsumerReadSlowly consumerFallbehindThreshold
    rejectPullConsumerEnable compressedRegister forceRegister registerNameServerPeriod
    brokerHeartbeatInterval brokerNotActiveTimeoutMillis enableNetWorkFlowControl
    enableBroadcastOffsetStore broadcastOffsetExpireSecond broadcastOffsetExpireMaxSecond
    realTimeNotifyConsumerChange litePullMessageEnable syncBrokerMemberGroupPeriod
    loadBalancePollNameServerInterval cleanOfflineBrokerInterval serverLoadBalancerEnable
    defaultMessageRequestMode defaultPopShareQueueNum aclEnable enableDetailStat
    autoDeleteUnusedStats isolateLogEnable forwardTimeout enableSlaveActingMaster
    enableRemoteEscape skipPreOnline asyncSendEnable lockInStrictMode compatibleWithOldNameSrv
    enableControllerMode controllerAddr fetchControllerAddrByDnsLookup syncBrokerMetadataPeriod
    checkSyncStateSetPeriod syncControllerMetadataPeriod controllerHeartBeatTimeoutMills
    validateSystemTopicWhenUpdateTopic brokerElectionPriority useStaticSubscription
    metricsExporterType metricsGrpcExporterTarget metricsGrpcExporterHeader
    metricGrpcExporterTimeOutInMills metricGrpcExporterIntervalInMills
    metricLoggingExporterIntervalInMills metricsPromExporterPort metricsPromExporterHost
    metricsLabel metricsInDelta channelExpiredTimeout subscriptionExpiredTimeout
    estimateAccumulation recallMessageEnable enableRetryTopicV2 popFromRetryProbability
    authenticationEnabled authorizationEnabled tlsTestModeEnable useTLS
    serverWorkerThreads serverCallbackExecutorThreads serverSelectorThreads
    serverOnewaySemaphoreValue serverAsyncSemaphoreValue serverChannelMaxIdleTimeSeconds
    serverSocketSndBufSize serverSocketRcvBufSize serverSocketBacklog
    serverPooledByteBufAllocatorEnable useEpollNativeSelector clientWorkerThreads
    clientCallbackExecutorThreads clientOnewaySemaphoreValue clientAsyncSemaphoreValue
    connectTimeoutMillis channelNotActiveInterval clientChannelMaxIdleTimeSeconds
    clientSocketSndBufSize clientSocketRcvBufSize clientPooledByteBufAllocatorEnable
    clientCloseSocketIfTimeout
"""
NOT_USED: Final = frozenset(_ROCKETMQ_KEYS.split())
