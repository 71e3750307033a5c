"""Keys of RocketMQ that have no effect here, and what is missing without them.

Most of them are for tuning: whoever brings a broker.conf along need not care. Some promise what
CometMQ does not do. Those that protect something (who may do what, what a message survives) are
refused: a broker that ran without would look protected. The others are warned about.

Knows nothing of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Promise(NamedTuple):
    """What a key of RocketMQ promises, and CometMQ does not do."""

    instead: str  # what happens here
    harmless: tuple[str, ...]  # values that promise nothing, in lower case
    refused: bool

    def is_made_by(self, value: str) -> bool:
        return value.strip().lower() not in self.harmless


_OFF: Final = ("", "false")
_ONE: Final = ("", "0", "1")
_ANY_VALUE: Final = ()

_OPEN: Final = (
    "there is no access control yet: whoever reaches the port may send, read and delete everything"
)
_PLAIN: Final = "there is no TLS yet: everything travels as it is"
_ALONE: Final = (
    "there is no controller: a group elects its master with enableDLegerCommitLog, and a master "
    "without a group has slaves (haListenPort)"
)
_NO_BITMAPS: Final = (
    "filter bitmaps do not exist any more: readers evaluate SQL92 filters natively "
    "(docs/filters.md); remove the setting"
)
_OWN_QUEUE: Final = "there are no light queues yet: a message is in the queue of its topic alone"
_TOLD: Final = "name servers are not looked up: namesrvAddr has to name them"


def _promises(refused: bool, *rows: tuple[str, str, tuple[str, ...]]) -> dict[str, Promise]:
    return {
        key: Promise(instead, harmless, refused)
        for keys, instead, harmless in rows
        for key in keys.split()
    }


PROMISES: Final[Mapping[str, Promise]] = {
    **_promises(
        True,
        ("aclEnable authenticationEnabled authorizationEnabled", _OPEN, _OFF),
        ("useTLS tls.enable", _PLAIN, _OFF),
        ("tls.server.mode", _PLAIN, ("", "disabled", "permissive")),
        ("enableControllerMode duplicationEnable", _ALONE, _OFF),
        ("allAckInSyncStateSet", _ALONE, _OFF),
        ("enableCalcFilterBitMap", _NO_BITMAPS, _OFF),
        (
            "brokerPermission",
            "a whole broker cannot be closed yet: take the permission from its topics",
            ("", "6", "7"),
        ),
        ("storeType", "the queues of a store are files; RocksDB is not read", ("", "default")),
        (
            "readOnlyCommitLogStorePaths",
            "a log lies in one folder: what is in the others would not be found",
            ("",),
        ),
    ),
    **_promises(
        False,
        ("enableLmq enableMultiDispatch", _OWN_QUEUE, _OFF),
        ("enableCompaction", "topics are not compacted: a message stays until it expires", _OFF),
        ("enableSlaveActingMaster enableRemoteEscape", _ALONE, _OFF),
        ("totalReplicas", _ALONE, _ONE),
        ("traceTopicEnable", "messages are not traced yet", _OFF),
        ("metricsExporterType", "nothing is exported yet: see cometmq stat", ("", "0", "disable")),
        ("defaultMessageRequestMode", "consumers pull; there is no POP yet", ("", "pull")),
        ("rejectPullConsumerEnable", "no consumer is turned away", _OFF),
        ("disableConsumeIfConsumerReadSlowly", "a consumer that is behind is not stopped", _OFF),
        ("messageStorePlugIn", "no plug-in is run", ("",)),
        ("startAcceptSendRequestTimeStamp", "messages are taken from the start on", ("", "0")),
        ("fetchNameSrvAddrByDnsLookup fetchNamesrvAddrByAddressServer", _TOLD, _OFF),
    ),
}

# Every key of BrokerConfig, BrokerIdentity, MessageStoreConfig, NettyServerConfig,
# NettyClientConfig and AuthConfig of RocketMQ 5.3.3, and those of 4.x, that sets nothing here.
_KEYS: Final = """
    abortFile accessMessageInMemoryHotRatio accountStatsEnable
    accountStatsPrintZeroValues ackMessageThreadPoolNums ackThreadPoolQueueCapacity
    aclCacheExpiredSecond aclCacheMaxNum aclCacheRefreshSecond aclEnable adminBrokerThreadPoolNums
    adminBrokerThreadPoolQueueCapacity allAckInSyncStateSet allowRecallWhenBrokerNotWriteable
    appendAckAsync appendCkAsync asyncLearner asyncSendEnable authConfigPath authenticationEnabled
    authenticationMetadataProvider authenticationProvider authenticationStrategy
    authenticationWhitelist authorizationEnabled authorizationMetadataProvider authorizationProvider
    authorizationStrategy authorizationWhitelist autoDeleteUnusedStats
    batchDispatchRequestThreadPoolNums bitMapLengthConsumeQueueExt
    bottomMostCompressionTypeForConsumeQueueStore broadcastOffsetExpireMaxSecond
    broadcastOffsetExpireSecond brokerConfigPath brokerElectionPriority brokerFastFailureEnable
    brokerHeartbeatInterval brokerIP2 brokerNotActiveTimeoutMillis brokerPermission
    brokerTopicEnable cgColdReadThreshold channelExpiredTimeout channelNotActiveInterval
    checkSyncStateSetPeriod cleanOfflineBrokerInterval cleanRocksDBDirtyCQIntervalMin
    cleanSwapedMapInterval clearRetryTopicWhenDeleteTopic clientAsyncSemaphoreValue
    clientCallbackExecutorThreads clientChannelMaxIdleTimeSeconds clientCloseSocketIfTimeout
    clientManagerThreadPoolQueueCapacity clientManageThreadPoolNums clientOnewaySemaphoreValue
    clientPooledByteBufAllocatorEnable clientSocketRcvBufSize clientSocketSndBufSize
    clientWorkerThreads clusterName clusterTopicEnable coldCtrStrategyEnable
    coldDataFlowControlEnable coldDataScanEnable commercialBaseCount commercialBigCount
    commercialEnable commercialSizePerMsg commercialTimerCount commercialTransCount
    commitCommitLogLeastPages commitCommitLogThoroughInterval commitIntervalCommitLog
    commitLogForceSwapMapInterval commitLogSwapMapInterval commitLogSwapMapReserveFileNum
    compactionCqMappedFileSize compactionMappedFileSize compactionScheduleInternal
    compactionThreadNum compatibleWithOldNameSrv compressedRegister configBlackList
    configManagerVersion configName connectTimeoutMillis consumerFallbehindThreshold
    consumerManagerThreadPoolQueueCapacity consumerManageThreadPoolNums
    consumerOffsetUpdateVersionStep controllerAddr controllerHeartBeatTimeoutMills
    correctLogicMinOffsetForceInterval correctLogicMinOffsetSleepInterval dataReadAheadEnable
    debugLockEnable defaultMessageRequestMode defaultPopShareQueueNum defaultQueryMaxNum
    delayOffsetUpdateVersionStep disableCallbackExecutor disableConsumeIfConsumerReadSlowly
    disableNettyWorkerGroup disappearTimeAfterStart diskFallRecorded dispatchCqCacheNum
    dispatchCqThreads dispatchFromSenderThread
    duplicationEnable enableAsyncReput enableAutoInSyncReplicas enableBatchPush
    enableBroadcastOffsetStore enableBuildConsumeQueueConcurrently
    enableCalcFilterBitMap enableCleanExpiredOffset enableCompaction enableConsumeQueueExt
    enableControllerMode
    enableCreateSysGroup enableDetailStat  enableFastChannelEventProcess
    enableLmq enableLmqStats enableMixedMessageType enableMultiDispatch enableNetWorkFlowControl
    enableNotifyAfterPopOrderLockRelease enableNotifyBeforePopCalculateLag enablePopBatchAck
    enablePopBufferMerge enablePopLog enablePopMessageThreshold
    enableReconnectForGoAway enableRegisterProducer enableRemoteEscape enableRetryTopicV2
    enableRocksDBLog enableScheduleAsyncDeliver enableScheduleMessageStats enableShutdownGracefully
    enableSingleTopicRegister enableSkipLongAwaitingAck enableSlaveActingMaster
    enableSplitRegistration endTransactionPoolQueueCapacity endTransactionThreadPoolNums
    estimateAccumulation expectConsumerNumUseFilter fastFailIfNoBufferInStorePool
    fetchControllerAddrByDnsLookup fetchNamesrvAddrByAddressServer fetchNameSrvAddrByDnsLookup
    fetchNamesrvAddrInterval filterDataCleanTimeSpan filterSupportRetry flushCommitLogTimed
    flushConsumerOffsetHistoryInterval flushLeastPagesWhenWarmMapedFile
    forceRegister forceVerifyPropCRC forwardTimeout globalColdReadThreshold
    haMaxTimeSlaveNotCatchup heartbeatThreadPoolNums
    heartbeatThreadPoolQueueCapacity highSpeedMode initAuthenticationUser
    initPopOffsetByCheckMsgInMem innerClientAuthenticationCredentials
    isBrokerContainer isEnableBatchPush isInBrokerContainer isolateLogEnable isScanAvailableNameSrv
    litePullMessageEnable litePullMessageThreadPoolNums litePullThreadPoolQueueCapacity
    loadBalancePollNameServerInterval loadBalanceProcessorThreadPoolNums
    loadBalanceThreadPoolQueueCapacity lockInStrictMode logicalDiskSpaceCleanForciblyThreshold
    logicQueueForceSwapMapInterval logicQueueSwapMapInterval logicQueueSwapMapReserveFileNum
    mappedFileSizeConsumeQueueExt mappedFileSwapEnable
    mapperFileSizeBatchConsumeQueue maxAsyncPutMessageRequests maxBatchDeleteFilesNum
    maxChecksumRange maxConsumeQueueScan maxErrorRateOfBloomFilter
    maxLmqConsumeQueueNum maxMsgsNumBatch maxOffsetMapSize maxPopPollingSize
    maxReconnectIntervalTimeSeconds maxRecoveryCommitlogFiles maxSlaveResendLength
    maxStatsIdleTimeInMinutes maxTopicLength maxTransferBytesOnMessageInDisk
    maxTransferBytesOnMessageInMemory maxTransferCountOnMessageInDisk
    maxTransferCountOnMessageInMemory memTableFlushIntervalMs messageIndexSafe
    messageStorePlugIn metricGrpcExporterIntervalInMills metricGrpcExporterTimeOutInMills
    metricLoggingExporterIntervalInMills metricsExporterType metricsGrpcExporterHeader
    metricsGrpcExporterTarget metricsInDelta metricsLabel metricsOtelCardinalityLimit
    metricsPromExporterHost metricsPromExporterPort migrateAuthFromV1Enabled
    msgTraceTopicName notifyConsumerIdsChangedEnable offsetCheckInSlave popCkMaxBufferSize
    popCkOffsetMaxQueueSize popCkStayBufferTime popCkStayBufferTimeOut popConsumerFSServiceInit
    popConsumerKVServiceEnable popConsumerKVServiceInit popConsumerKVServiceLog
    popFromRetryProbability popInflightMessageThreshold popLongPollingForceNotifyInterval
    popPollingMapSize popPollingSize popResponseReturnActualRetryTopic popReviveMaxAttemptTimes
    popReviveMaxReturnSizePerRead preferredLeaderId printChannelGroups printChannelGroupsMinNum
    processReplyMessageThreadPoolNums pullBatchMaxMessageCount pullMessageThreadPoolNums
    pullThreadPoolQueueCapacity putConsumeQueueDataByFileChannel putMessageFutureThreadPoolNums
    putMessageTimeout putMsgIndexHightWater putThreadPoolQueueCapacity queryMessageThreadPoolNums
    queryThreadPoolQueueCapacity readOnlyCommitLogStorePaths readUnCommitted
    realTimeNotifyConsumerChange realTimePersistRocksDBConfig recallMessageEnable
    recheckReputOffsetFromCq recoverConcurrently recoverThreadPoolNums regionId
    registerBrokerTimeoutMills registerNameServerPeriod rejectPullConsumerEnable
    rejectTransactionMessage replicasPerDiskPartition replyThreadPoolQueueCapacity
    retrieveMessageFromPopRetryTopicV1 reviveAckWaitMs reviveInterval reviveMaxSlow reviveQueueNum
    reviveScanTime rocketmqHome rocksdbCompressionType rocksdbCQDoubleWriteEnable
    rocksdbFlushWalFrequency rocksdbWalFileRollingThreshold sampleCountThreshold sampleSteps
    scheduleAsyncDeliverMaxPendingLimit scheduleAsyncDeliverMaxResendNum2Blocked
    searchBcqByCacheEnable sendHeartbeatTimeoutMillis sendMessageThreadPoolNums
    sendThreadPoolQueueCapacity serverAsyncSemaphoreValue serverCallbackExecutorThreads
    serverChannelMaxIdleTimeSeconds serverLoadBalancerEnable serverNettyWorkerGroupEnable
    serverOnewaySemaphoreValue serverPooledByteBufAllocatorEnable serverSelectorThreads
    serverSocketBacklog serverSocketRcvBufSize serverSocketSndBufSize serverWorkerThreads
    shortPollingTimeMills shutdownWaitTimeSeconds skipPreOnline skipWhenCKRePutReachMaxTimes
    socksProxyConfig spinLockCollisionRetreatOptimalDegree
    splitRegistrationSize startAcceptSendRequestTimeStamp statefulAuthenticationCacheExpiredSecond
    statefulAuthenticationCacheMaxNum statefulAuthorizationCacheExpiredSecond
    statefulAuthorizationCacheMaxNum statRocksDBCQIntervalSec storeCheckpoint
    storePathBrokerIdentity storePathConsumeQueue storePathDLedgerCommitLog storePathEpochFile
    storePathIndex storeType subscriptionExpiredTimeout
    syncBrokerMemberGroupPeriod syncBrokerMetadataPeriod syncControllerMetadataPeriod
    syncFromLastFile syncMasterFlushOffsetWhenStartup timerCheckMetricsWhen
    timerColdDataCheckIntervalMs timerCongestNumEachSlot timerEnableCheckMetrics
    timerEnableDisruptor timerEnableRetryUntilSuccess timerFlushIntervalMs timerGetMessageThreadNum
    timerInterceptDelayLevel timerMaxDelaySec timerMetricSmallThreshold timerPrecisionMs
    timerProgressLogIntervalMs timerPutMessageThreadNum timerRollWindowSlot timerSkipUnknownError
    timerStopDequeue timerStopEnqueue timerWarmEnable timerWheelEnable tls.enable tls.server.mode
    tlsTestModeEnable topicQueueLockNum totalReplicas traceOn traceTopicEnable
    transactionMetricFlushInterval transactionOpBatchInterval transactionOpMsgMaxSize
    transferMsgByHeap
    transientStorePoolEnable transientStorePoolSize travelCqFileNumWhenGetMessage
    updateNameServerAddrPeriod useABSLock useEpollNativeSelector usePIDColdCtrStrategy
    userCacheExpiredSecond userCacheMaxNum userCacheRefreshSecond useReentrantLockWhenPutMessage
    useServerSideResetOffset useStaticSubscription useTLS validateSystemTopicWhenUpdateTopic
    waitTimeMillsInAckQueue waitTimeMillsInAdminBrokerQueue waitTimeMillsInHeartbeatQueue
    waitTimeMillsInLitePullQueue waitTimeMillsInPullQueue waitTimeMillsInTransactionQueue
    wakeCommitWhenPutMessage wakeFlushWhenPutMessage warmMapedFileEnable writeBufferHighWaterMark
    writeBufferLowWaterMark writeWithoutMmap
"""
NOT_USED: Final = frozenset(_KEYS.split())
assert set(PROMISES) <= NOT_USED
